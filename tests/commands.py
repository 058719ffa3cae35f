"""Commands and programs as tests start them, where there is too little room, too, and what they leave behind."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from probes.cli import main as cli
from probes.errors import InputError


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The exit code of `headwater ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["headwater", *arguments])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return raised.value.code


def bad_input(says: str) -> Any:
    """An error for the caller, whose one line says this."""
    return pytest.raises(InputError, match=rf"\A[^\n]*{re.escape(says)}[^\n]*\Z")


def listing(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder, with the content of files and the target of links."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        kept = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder).as_posix()] = kept
    return found


def program(*arguments: str, **environment: str) -> str:
    """What an interpreter of its own prints, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Writes beyond so many bytes fail with EFBIG; Python ignores the signal that comes with it."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
