"""A cache of folders that take long to make: written whole or not at all, and checked before they are used.

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
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..run.files import system_error

LIST = "headwater.json"  # the last file written: sizes and checksums of all others
AT_ONCE = 1 << 24  # bytes read together
ABANDONED = 24 * 3600.0  # seconds after which no process is still writing a folder
UNFINISHED = ".headwater-unfinished-"  # the prefix of folders that are being written or removed


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
    """The folder of that name if it is as it was written; a damaged one is removed."""
    root = cache_folder()
    if root is None or not (root / name).is_dir():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = json.loads((root / name / LIST).read_text(encoding="utf-8"))
        if listed and all(_sums(root / name / file) == sums for file, sums in listed.items()):
            return root / name
    with suppress(OSError):
        discarded = tempfile.mkdtemp(prefix=UNFINISHED, dir=root)  # moved first: a removal may be interrupted
        (root / name).rename(Path(discarded) / name)
        shutil.rmtree(discarded, ignore_errors=True)
    return None


def keep(name: str, write: Callable[[Path], None]) -> Path | None:
    """The folder of that name, filled by `write`; None where it cannot be written, which is no error.

    Where two processes write the same folder, the first one's stays.
    """
    root, temporary = cache_folder(), None
    try:
        if root is None:
            return None
        root.mkdir(parents=True, exist_ok=True)
        _clear(root)
        temporary = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=root))
        write(temporary)
        listed = {file.name: _sums(file) for file in temporary.iterdir()}
        (temporary / LIST).write_text(json.dumps(listed), encoding="utf-8")
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
    found = keep(name, write)
    if found is None and lasting:
        raise refuse(
            f"is unpacked to disk for a device map, and {cache_folder()} cannot be written; set HEADWATER_CACHE"
        )
    with nullcontext(found) if found is not None else tempfile.TemporaryDirectory(prefix="headwater-") as place:
        try:
            if found is None:
                write(Path(place))
        except OSError as error:
            reason = error.strerror or error
            raise refuse(f"cannot be unpacked to disk ({reason}); set HEADWATER_CACHE to a larger one") from None
        yield Path(place)


def _sums(file: Path) -> list[int]:
    """Size and checksum, which show whether a file was cut short or changed."""
    size = checksum = 0
    with file.open("rb") as opened:
        while block := opened.read(AT_ONCE):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]


def _clear(root: Path) -> None:
    """Remove what killed processes left unfinished."""
    for folder in root.glob(f"{UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)
