"""Writing files so that an interruption leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import InputError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; on success it takes the place of `path`, on failure it is removed.

    Raises:
        InputError: the folder cannot be made or written to, or the disk is full.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp's files are private; results are as public as any other file
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot write '{path}' ({reason}); choose a folder with room and permission") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def require_writable(folder: str | Path) -> None:
    """Check before long work that `folder` can be made and written to, by making it and a file in it; both go again.

    Permissions alone do not tell of names that are too long, links in a circle, or what the system keeps for itself.

    Raises:
        InputError: it, or the nearest folder above it that exists, is no folder or may not be written to.
    """
    folder, missing = Path(folder).absolute(), []
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise InputError(f"cannot write to '{folder}' ('{nearest}' is no folder); choose another folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise InputError(f"cannot write to '{folder}' ('{nearest}' gives no permission); choose another folder")
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot write to '{folder}' ({reason}); choose another folder") from None
    finally:
        for path in missing:
            with suppress(OSError):  # not made
                path.rmdir()


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON, indented, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def file_name(name: str) -> str:
    """A file name for any name: a model's, which may be a path or a hub id, or a label."""
    return "".join(c if c.isalnum() or c in "-_.@" else "-" for c in name).strip("-.")


def write_table(
    path: str | Path, title: str, lines: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """A page in Markdown: a title, lines of text under it, one table.

    Raises:
        InputError: the path cannot be written to.
    """
    table = [columns, ["---"] * len(columns), *rows]
    text = [f"# {title}", "", *(f"{line}\n" for line in lines), *(f"| {' | '.join(row)} |" for row in table)]
    with atomic(path) as temporary:
        temporary.write_text("\n".join(text) + "\n", encoding="utf-8")
