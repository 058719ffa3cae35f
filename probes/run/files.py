"""Writing files so that an interruption leaves either the old file or the new one, never half of one."""

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from ..errors import InputError


def what_is(path: str | Path) -> Literal["file", "folder", "neither", "nothing"]:
    """What stands at a path, links followed: "neither" is a pipe or a device, which may never end or never begin.

    A name that no file system takes (too long, a circle of links, NUL in it) stands for nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return "nothing"
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "neither"


_waiting: dict[Path, Path] | None = None  # within `together`: by place, the temporary file that takes it at the end


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; on success it takes the place of `path`, on failure it is removed.

    Within `together` it takes its place at the end of that.

    Raises:
        InputError: the folder cannot be made or written to, or the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}-{os.getpid():08x}{path.suffix}")
    try:
        if path.is_dir():
            raise InputError(f"'{path}' is a folder, and a file is to be written there; move it")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if _waiting is None:
            temporary.replace(path)
        else:
            _waiting[path] = temporary
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        reason = system_error(error)
        if reason is None:
            raise
        raise InputError(f"cannot write '{path}' ({reason}); choose a folder with room and permission") from error


@contextmanager
def together() -> Iterator[None]:
    """Files written by `atomic` within this take their places at its end, all of them; after a failure, none does.

    So a disk that is full when the figure is written leaves the older result beside the older figure. Within another
    `together` this does nothing of its own.
    """
    global _waiting
    if _waiting is not None:
        yield
        return
    _waiting = {}
    try:
        yield
        for path, temporary in _waiting.items():
            temporary.replace(path)
    finally:
        written, _waiting = _waiting, None
        for temporary in written.values():
            temporary.unlink(missing_ok=True)


def system_error(error: BaseException) -> str | None:
    """What the system had against reading or writing, where this error is about that.

    safetensors and tokenizers raise exceptions of their own, with the system's number in the text.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None or isinstance(error, InputError) else os.strerror(int(found[1]))


def missing_folders(folder: Path) -> list[Path]:
    """Those of a folder and the folders above it that are not there, the deepest first."""
    return [path for path in (folder, *folder.parents) if what_is(path) == "nothing"]


def remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not made, or somebody else's file is in it
            folder.rmdir()


def require_writable(folder: str | Path) -> None:
    """Check before long work that `folder` can be made and written to, by making it and a file in it; both go again.

    Permissions alone do not tell of names that are too long, links in a circle, or what the system keeps for itself.

    Raises:
        InputError: it, or the nearest folder above it that exists, is no folder or may not be written to.
    """
    folder, made = Path(folder).absolute(), []
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(0, f"'{nearest}' is no folder")
        made = missing_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # NUL in its name is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write to {str(folder)!r} ({reason}); choose another folder") from None
    finally:
        remove_empty(made)


def remove_cut_short(folder: Path, name: str) -> None:
    """Remove what kills have left of files NAME.* and NAME-*.* while `atomic` wrote them; nobody may be writing them now."""
    temporary = re.compile(rf"\.{re.escape(name)}(-.+)?-[a-z0-9_]{{8}}\.\w+")
    for file in folder.glob(f".{name}-*"):
        if temporary.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON, indented, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def file_name(name: str) -> str:
    """A file name for any name: a model's, which may be a path or a hub id, or a label."""
    return "".join(c if c.isalnum() or c in "-_.@" else "-" for c in name).strip("-.")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within it, no other process writes below a path; the lock `PATH.lock` goes with the folders made for it."""
    lock = path.with_name(f"{path.name}.lock")
    made = missing_folders(lock.parent)
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock, blocking=False)
    try:
        held.acquire()
    except Timeout:
        raise InputError(
            f"another run is writing to '{lock.parent}'; wait until it ends, or give another folder"
        ) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: who takes a lock looks whether its file is still there
        held.release()
        remove_empty([*made, lock.parent])
