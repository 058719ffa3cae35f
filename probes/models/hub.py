"""Hub ids: the folder that the local cache has of a model, or fetches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError
from .checkpoint import INDEX, WEIGHTS, read_object

PATIENCE = 10  # seconds that the hub has to answer
FETCHED = ("*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")  # files that a model is made of


def folder_of(source: str, revision: str | None) -> Path:
    """The folder of a model in the local cache, which its commit names; fetched where it is not all there.

    Raises:
        InputError: this is no hub id, the hub knows no such model or revision, or it does not answer.
    """
    import huggingface_hub
    from huggingface_hub import errors

    options: dict[str, Any] = {"revision": revision, "allow_patterns": FETCHED, "ignore_patterns": "*/*"}
    missing = "is not in the local cache"
    try:
        folder = Path(huggingface_hub.snapshot_download(source, local_files_only=True, **options))
        if _whole(folder):
            return folder
        missing = "is in the local cache without its weights"
    except errors.HFValidationError:
        raise InputError(f"'{source}' is no hub id; they are written owner/name, as Qwen/Qwen2.5-0.5B") from None
    except errors.LocalEntryNotFoundError:
        pass
    try:
        huggingface_hub.HfApi().model_info(source, revision=revision, timeout=PATIENCE)
        return Path(huggingface_hub.snapshot_download(source, etag_timeout=PATIENCE, **options))
    except errors.RevisionNotFoundError:
        raise InputError(f"'{source}' has no revision '{revision}'; look up its branches and tags") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"'{source}' is not on the hub, or private; check the name, or log in") from None
    except Exception as error:  # whatever the network does
        raise InputError(
            f"'{source}' {missing} and the hub cannot be reached ({type(error).__name__}); "
            "check the network, or give a folder"
        ) from None


def _whole(folder: Path) -> bool:
    """Whether all files of the weights are there, as a fetch that was stopped leaves them not."""
    index = folder / INDEX
    names = read_object(index)["weight_map"].values() if index.exists() else [WEIGHTS]
    return all((folder / name).exists() for name in names)
