"""Hub ids: what the local cache has of them, and whether the hub answers; nobody waits without being told for what."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError
from ..run import processes
from .checkpoint import CONFIG, check_weights

MOMENT = 1.0  # seconds in which nobody asks what is being waited for
PATIENCE = 10  # seconds that the hub has to answer


class UnreachableError(InputError):
    """The hub does not answer."""


def cached(source: str, revision: str | None) -> Path | None:
    """The folder of a model in the local cache, which its commit names; None where its config is not there.

    Raises:
        InputError: this is no hub id.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        config = huggingface_hub.try_to_load_from_cache(source, CONFIG, revision=revision)
    except HFValidationError:
        raise InputError(f"'{source}' is no hub id; they are written owner/name, as Qwen/Qwen2.5-0.5B") from None
    return Path(config).parent if isinstance(config, str) else None


def whole(folder: Path) -> bool:
    """Whether all files of the weights are there."""
    try:
        check_weights(folder)
    except InputError as error:
        if "not there" in str(error) or "neither" in str(error):
            return False
        raise
    return True


def asked(source: str, revision: str | None, missing: str) -> str | None:
    """The commit that the hub has for this model, asked once before the long way round; `missing` says why it is asked.

    Raises:
        UnreachableError: it does not answer.
        InputError: it knows no such model or revision.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        with saying(f"{source} {missing}; waiting for {huggingface_hub.constants.ENDPOINT}"):
            return huggingface_hub.HfApi().model_info(source, revision=revision, timeout=PATIENCE).sha
    except RevisionNotFoundError:
        raise InputError(f"'{source}' has no revision '{revision}'; look up its branches and tags") from None
    except RepositoryNotFoundError:
        raise InputError(f"'{source}' is not on the hub, or private; check the name, or log in") from None
    except Exception as error:  # whatever the network does
        raise UnreachableError(
            f"'{source}' {missing} and the hub cannot be reached ({type(error).__name__}); "
            "check the network, or give a folder"
        ) from None


@contextmanager
def saying(line: str) -> Iterator[None]:
    """Print the line on stderr if what happens within takes longer than a moment."""
    timer = threading.Timer(
        MOMENT, lambda: processes.first() and print("headwater:", line, file=sys.stderr, flush=True)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
