"""A cache of folders that take long to make, written whole or not at all.

They lie under $HEADWATER_CACHE, else $XDG_CACHE_HOME/headwater, else ~/.cache/headwater, each under a key of everything
that its content depends on. Any of them may be removed at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..run.files import system_error

ABANDONED = 24 * 3600.0  # seconds after which no process is still writing a folder
UNFINISHED = ".headwater-unfinished-"  # the prefix of folders that are being written


def cache_folder() -> Path | None:
    """Where folders are kept; None where there is no home."""
    for variable, below in (("HEADWATER_CACHE", ""), ("XDG_CACHE_HOME", "headwater")):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / below
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "headwater"
    return None


def key(parts: Mapping[str, Any]) -> str:
    """A name for everything that a folder's content depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def kept(name: str) -> Path | None:
    """The folder of that name, if it is there."""
    root = cache_folder()
    return root / name if root is not None and (root / name).is_dir() else None


def keep(name: str, write: Callable[[Path], None]) -> Path | None:
    """The folder of that name, filled by `write`; None where it cannot be written, which is no error.

    Where two processes write the same folder, the first one's stays.
    """
    root, temporary = cache_folder(), None
    if root is None or kept(name) is not None:
        return kept(name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for folder in root.glob(f"{UNFINISHED}*"):  # what killed processes left
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > ABANDONED:
                    shutil.rmtree(folder, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=root))
        write(temporary)
        with suppress(OSError):  # another's is there
            temporary.rename(root / name)
    except Exception as error:
        if not isinstance(error, InputError) and system_error(error) is None:
            raise
        return None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return kept(name)


@contextmanager
def made(
    name: str, write: Callable[[Path], None], refuse: Callable[[str], InputError], *, lasting: bool
) -> Iterator[Path]:
    """The folder that `write` fills: kept under that name, else, where nothing can be kept, a temporary one.

    Raises:
        InputError: `refuse` makes it of a reason. There is no room, or a folder that has to be `lasting`, since models read
            weights from it later, could only be temporary.
    """
    folder = keep(name, write)
    if folder is None and lasting:
        raise refuse(
            f"is unpacked to disk for a device map, and {cache_folder()} cannot be written; set HEADWATER_CACHE"
        )
    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory(prefix="headwater-") as place:
        try:
            if folder is None:
                write(Path(place))
        except OSError as error:
            why = error.strerror or error
            raise refuse(f"cannot be unpacked to disk ({why}); set HEADWATER_CACHE to a larger one") from None
        yield Path(place)
