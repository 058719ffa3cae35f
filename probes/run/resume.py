"""Work that survives interruption: units and pieces within a unit, kept in one SQLite file per process.

A unit is what is measured in one go (a model under one condition, a place on a map, one replacement). Its key says what it
was measured with: the same work given again reads what is there, and other work is refused before anything is measured. A
piece is a part of a unit: a few named arrays, mostly of one prompt.

- `probes.run.unfinished` keeps units in `OUT/unfinished` until all of them are done.
- `each` makes the pieces of a unit, shared between processes (`probes.run.processes`): process r makes the pieces n with
  n mod R = r, and every process sees all of them in one order. So numbers do not depend on how many processes there were.
- Within a unit every piece is written as soon as it is made (`keeping`). A killed run resumes at its current piece. Pieces
  are read back one at a time, so that memory does not grow with their number.

Work in rounds, where each round depends on what all pieces gave so far, has one stage per round, whose pieces hold what that
round added. Arrays called `own.…` are for later rounds of the same piece alone. Without a file they stay in the process that
made them, which is the one that needs them in the next round, too.

Process r writes `PATH-r.sqlite` and no other. A transaction is whole or not there, so a kill or a full disk costs the piece
in work and nothing else. Other processes read the file, over a network file system, too; that is why it has a rollback
journal and not a write-ahead log, which needs memory that all share.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import InputError
from . import processes

Piece: TypeAlias = dict[str, np.ndarray]
Reader: TypeAlias = Callable[..., Piece]  # of all arrays of a piece, or of the one of a name

RESULT = "result"  # the piece that holds the result of a finished unit
OWN = "own."  # begins the names of arrays that no other process needs
MOST = 64  # pieces of grouped prompts
BLOCK = 1 << 28  # bytes per row: SQLite's own limit is 10^9
SLACK = 1 << 16  # bytes that a transaction takes beside its arrays, more than enough
PATIENCE = 600  # seconds to wait while another process has the file locked
# `content` stands last, so that names are read without it. `crc` is its checksum: a disk may flip a bit.
TABLES = (
    "CREATE TABLE IF NOT EXISTS units (label, key, PRIMARY KEY (label))",
    "CREATE TABLE IF NOT EXISTS arrays "
    "(label, piece, name, block, dtype, shape, crc, content, PRIMARY KEY (label, piece, name, block))",
)


class Store:
    """The SQLite file of one process.

    Raises:
        InputError: the file cannot be read or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: sqlite3.Connection | None = None

    def read(self, query: str, *values: Any) -> list[Any]:
        """Rows; none where the file or its tables are not there."""
        try:
            return self._connection().execute(query, values).fetchall() if self.path.is_file() else []
        except sqlite3.Error as error:
            if str(error).startswith("no such table"):
                return []
            raise InputError(f"'{self.path}' cannot be read ({error}); delete it") from None

    def piece(self, label: str, piece: str, only: str | None = None) -> Piece:
        """The arrays of a piece, or the one of a name.

        Raises:
            InputError: one is not as it was written.
        """
        found: Piece = {}
        blocks: dict[str, list[bytes]] = {}
        query = "SELECT name, dtype, shape, crc, content FROM arrays WHERE label = ? AND piece = ?"
        query += " AND name = coalesce(?, name) ORDER BY rowid"
        for name, dtype, shape, crc, content in self.read(query, label, piece, only):
            content = content or b""  # as SQLite gives an empty one back
            if zlib.crc32(content) != crc:
                raise InputError(f"'{self.path}' is damaged ({name} of {label} is not as it was written); delete it")
            blocks.setdefault(name, []).append(content)
            if sum(map(len, blocks[name])) == np.dtype(dtype).itemsize * math.prod(json.loads(shape)):
                found[name] = np.frombuffer(bytearray().join(blocks[name]), dtype).reshape(json.loads(shape))
        return found

    def write(self, label: str, key: str, piece: str, arrays: Piece) -> None:
        """Add a piece of a unit in one transaction; after a failure the file is as it was."""
        rows = []
        for name, array in arrays.items():
            content = np.asarray(array, order="C")
            plain = content.reshape(-1).view(np.uint8).data
            kind = (content.dtype.str, json.dumps(content.shape))
            for block, start in enumerate(range(0, max(1, len(plain)), BLOCK)):
                part = plain[start : start + BLOCK]
                rows.append((label, piece, name, block, *kind, zlib.crc32(part), part))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connection() as connection:
                for table in TABLES:
                    connection.execute(table)
                connection.execute("INSERT OR IGNORE INTO units VALUES (?, ?)", (label, key))
                connection.executemany("INSERT OR REPLACE INTO arrays VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        except (sqlite3.Error, OSError) as error:
            reason = self._reason(error, sum(len(row[-1]) for row in rows))
            raise InputError(
                f"cannot write '{self.path}' ({reason}); free some space or choose another folder, then the same command "
                "resumes"
            ) from None

    def forget(self, label: str) -> None:
        """Remove the pieces of a unit, but for its result; where that takes more room than there is, they stay."""
        if self.read("SELECT 1 FROM arrays WHERE label = ? AND piece != ? LIMIT 1", label, RESULT):
            with suppress(sqlite3.Error), self._connection() as connection:
                connection.execute("DELETE FROM arrays WHERE label = ? AND piece != ?", (label, RESULT))

    def close(self) -> None:
        """Nothing more is read or written for now."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = sqlite3.connect(self.path, timeout=PATIENCE)
            self._opened.execute("PRAGMA synchronous = NORMAL")
        return self._opened

    def _reason(self, error: Exception, size: int) -> str:
        """The system's words, which SQLite hides: a file of the size that this one needed brings them out."""
        try:
            if isinstance(error, OSError):
                raise error
            with tempfile.TemporaryFile(dir=self.path.parent) as file:
                file.seek(self.path.stat().st_size)
                file.write(bytes(size + SLACK))
        except OSError as again:
            return again.strerror or str(again)
        return str(error)


class Stores:
    """The files of all processes there ever were: PATH-0.sqlite, PATH-1.sqlite, ..."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own = Store(path.with_name(f"{path.name}-{processes.number()}.sqlite"))
        self._all = {self.own.path: self.own}

    def __iter__(self) -> Iterator[Store]:
        for file in store_files(self.path):
            self._all.setdefault(file, Store(file))
        yield from self._all.values()

    def key(self, label: str) -> dict[str, Any] | None:
        """What a unit was measured with; None where there is nothing of it."""
        for store in self:
            for (key,) in store.read("SELECT key FROM units WHERE label = ?", label):
                return json.loads(key)
        return None

    def where(self, label: str) -> dict[str, Store]:
        """The names of a unit's pieces, and which file has them."""
        query = "SELECT DISTINCT piece FROM arrays WHERE label = ?"
        return {name: store for store in self for (name,) in store.read(query, label)}

    def readers(self, label: str, names: Sequence[str]) -> list[Reader]:
        """Readers of pieces, in the order of their names.

        Raises:
            InputError: one of them is not there.
        """
        where = self.where(label)
        if not set(names) <= set(where):
            raise InputError(f"'{self.path.parent}' is not seen by all processes; give a folder that all of them share")
        return [partial(where[name].piece, label, name) for name in names]

    def close(self) -> None:
        """Nothing more is read or written for now."""
        for store in self._all.values():
            store.close()


def store_files(path: Path) -> list[Path]:
    """The files at a path, process by process."""
    named = re.compile(rf"{re.escape(path.name)}-(\d+)\.sqlite")
    found = [file for file in path.parent.glob("*.sqlite") if named.fullmatch(file.name)]
    return sorted(found, key=lambda file: (len(file.name), file.name))


class Kept:
    """The pieces of the unit that is in work."""

    def __init__(self, stores: Stores, label: str, key: Mapping[str, Any]) -> None:
        self.stores, self.label, self.key = stores, label, json.dumps(dict(key), default=str)
        # Stages so far, by scope: those of one name are told apart by their order.
        self.called: Counter[str] = Counter()
        # Work is divided by what was there when all processes looked, before any of them adds to it.
        self.before = set(stores.where(label))
        processes.wait()


_kept: ContextVar[Kept | None] = ContextVar("headwater_kept", default=None)
_scope: ContextVar[str] = ContextVar("headwater_scope", default="")


@contextmanager
def keeping(path: Path | Stores, key: Mapping[str, Any], label: str = "") -> Iterator[None]:
    """Within it, `each` keeps the pieces of the unit `label` in the files at `path`, and takes what is there.

    The caller has made sure that what is there was measured with the same `key`.
    """
    stores = path if isinstance(path, Stores) else Stores(path)
    token, scope = _kept.set(Kept(stores, label, key)), _scope.set("")
    try:
        yield
    finally:
        _kept.reset(token)
        _scope.reset(scope)
        if stores is not path:
            stores.close()


def kept_folder() -> Path | None:
    """The folder that holds the unit in work, or the nearest above it that is there; None where nothing is kept."""
    kept = _kept.get()
    return None if kept is None else next(path for path in kept.stores.path.absolute().parents if path.is_dir())


class Pieces(Sequence):  # of `Piece`, which stays unsaid: a check of signatures would read one from disk
    """All pieces of a stage; those on disk are read when asked for."""

    def __init__(self, found: Sequence[Piece | Reader]) -> None:
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Pieces(self._found[at])
        found = self._found[at]
        return found() if callable(found) else found

    def stacked(self, name: str) -> np.ndarray:
        """One array of every piece, [piece, ...]; the others are not read."""
        first = self._array(0, name)
        stack = np.empty((len(self), *first.shape), dtype=first.dtype)
        for n in range(len(self)):
            stack[n] = self._array(n, name)
        return stack

    def _array(self, at: int, name: str) -> np.ndarray:
        found = self._found[at]
        return (found(name) if callable(found) else found)[name]


def each(
    stage: str,
    count: int,
    measure: Callable[[int], Piece],
    *,
    before: Callable[[Iterable[int]], None] | None = None,
) -> Pieces:
    """The pieces 0 to `count` - 1, made by `measure(n)` where they are not there already.

    Args:
        stage: what they are pieces of; the same stages have to follow each other whenever this work is done.
        count: how many.
        measure: a function of the piece's number, and nothing else: whichever process calls it, and after whichever others.
        before: hears which pieces this process will make; those that are missing here are found elsewhere.
    """

    def one_by_one(shares: Sequence[Sequence[int]]) -> Iterator[tuple[int, Piece]]:
        own = shares[processes.number()]
        if before is not None:
            before(own)
        for n in own:
            yield n, measure(n)

    return shared(stage, count, one_by_one)


def shared(stage: str, count: int, measure: Callable[[Sequence[Sequence[int]]], Iterable[tuple[int, Piece]]]) -> Pieces:
    """As `each`, for pieces that are made together.

    `measure(shares)` hears which pieces every process is to make, by its number, and gives this one's as (number, piece).
    """
    kept, everybody = _kept.get(), range(processes.count())
    processes.begin()
    if kept is None:
        return exchanged(dict(measure([range(r, count, len(everybody)) for r in everybody])))
    scope = _scope.get()
    kept.called[scope] += 1
    names = [f"{scope}{kept.called[scope]}/{stage}/{n}" for n in range(count)]
    # Divided anew, so that all have something to do, however many processes there were before.
    missing = [n for n, name in enumerate(names) if name not in kept.before]
    for n, piece in measure([missing[r :: len(everybody)] for r in everybody]):
        kept.stores.own.write(kept.label, kept.key, names[n], piece)
    processes.wait()
    return Pieces(kept.stores.readers(kept.label, names))


@contextmanager
def within(scope: str) -> Iterator[None]:
    """Stages inside are told apart from those of other scopes, whichever of them were run before."""
    token = _scope.set(f"{_scope.get()}{scope}/")
    try:
        yield
    finally:
        _scope.reset(token)


def groups(count: int) -> list[range]:
    """Prompts that share a piece, where pieces are sums and too large to keep one for each: at most `MOST` pieces.

    They follow from the number of prompts alone, so that sums are taken in one order.
    """
    size = max(1, math.ceil(count / MOST))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def exchanged(own: Mapping[int, Piece]) -> Pieces:
    """The pieces of all processes in the order of their numbers, which run from 0 on without a gap.

    `own.…` arrays are in the pieces of this process alone.
    """
    found = dict(own)
    mine = {n: {name: x for name, x in piece.items() if not name.startswith(OWN)} for n, piece in own.items()}
    for theirs in processes.gathered(mine):
        found = theirs | found
    return Pieces([found[n] for n in range(len(found))])


def remove(path: Path) -> None:
    """Remove the files of all processes at a path, and their folder where nothing else is in it."""
    for file in store_files(path):
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}-journal").unlink(missing_ok=True)
    with suppress(OSError):  # not there, or somebody else's file is in it
        path.parent.rmdir()
