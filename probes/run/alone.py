"""One run at a time writes to a folder: a lock that the system takes back when its holder ends, however it ends."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import InputError

try:
    import fcntl
except ImportError:  # Windows has none; runs are not kept apart there
    fcntl = None  # type: ignore[assignment]


class Alone:
    """The right to write the files at a path (`PATH-0.sqlite`, ...), held through the file `PATH.lock`."""

    def __init__(self, path: Path) -> None:
        self._lock = path.with_name(f"{path.name}.lock")
        self._held: IO[str] | None = None

    def check(self) -> None:
        """Refuse where another process holds it; nothing is made.

        Raises:
            InputError: one does.
        """
        if self._held is None and self._lock.is_file():
            self.take()
            self.release()

    def take(self) -> None:
        """Hold it until `release`; a process that has it may take it again.

        Raises:
            InputError: another process has it, which the message names.
        """
        while self._held is None and fcntl is not None:
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            file = self._lock.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip()
                file.close()
                if holder == _own_name():
                    return
                raise InputError(
                    f"another run ({holder}) is writing to '{self._lock.parent}'; wait until it ends, or give another folder"
                ) from None
            except OSError:  # a file system without locks
                file.close()
                return
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self._lock.stat()):
                    file.truncate(0)
                    file.write(_own_name())
                    file.flush()
                    self._held = file
                    weakref.finalize(self, file.close)  # where an error keeps `release` from being called
                    return
            file.close()  # its holder has just removed it

    def release(self) -> None:
        """Hold it no longer."""
        if self._held is not None:
            self._lock.unlink(missing_ok=True)
            self._held.close()
            self._held = None
            with suppress(OSError):  # somebody's files are in it
                self._lock.parent.rmdir()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within it, no other process writes the files at a path.

    Raises:
        InputError: as `Alone.take`.
    """
    lock = Alone(path)
    lock.take()
    try:
        yield
    finally:
        lock.release()


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
