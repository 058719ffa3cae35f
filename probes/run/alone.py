"""One run at a time writes to a folder: a lock that the system takes back when its holder ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import InputError
from .files import missing_folders, remove_empty


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within it, no other process writes below a path; the lock is `PATH.lock`, and goes with the folders made for it.

    Raises:
        InputError: another process has the lock.
    """
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
