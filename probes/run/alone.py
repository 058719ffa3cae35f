"""One run at a time writes to a folder: a lock that the system takes back when its holder ends, however it ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import InputError
from .files import missing_folders, remove_empty

try:
    import fcntl
except ImportError:  # Windows has none; runs are not kept apart there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within it, no other process writes below a path; the lock is `PATH.lock`, and goes with the folders made for it.

    Raises:
        InputError: another process has the lock; the message names it.
    """
    lock = path.with_name(f"{path.name}.lock")
    made = missing_folders(lock.parent)
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = None if fcntl is None else _locked(lock)
    try:
        yield
    finally:
        if file is not None:
            lock.unlink(missing_ok=True)
            file.close()
        remove_empty([*made, lock.parent])


def _locked(lock: Path) -> IO[str] | None:
    """The lock's file, locked; None on a file system without locks."""
    assert fcntl is not None
    while True:
        file = lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise InputError(
                f"another run ({holder}) is writing to '{lock.parent}'; wait until it ends, or give another folder"
            ) from None
        except OSError:
            file.close()
            return None
        with suppress(FileNotFoundError):  # its holder has just removed it
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                with suppress(OSError):  # a full disk; the name only helps
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}")
                    file.flush()
                return file
        file.close()
