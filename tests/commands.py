"""Commands as tests give them, and what they leave behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from probes.cli import main as cli


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The exit code of `headwater ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["headwater", *arguments])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return raised.value.code


def listing(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder, with the content of files and the target of links."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        kept = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder).as_posix()] = kept
    return found
