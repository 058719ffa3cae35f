"""Work on many prompts, prompt by prompt: shared between processes, kept on disk, taken up again after an interruption.

A probe says what it wants of prompt n as a function that gives a few arrays, a *piece*, and puts the pieces together in the
order of the prompts (`each`). Everything else is the same for all probes and happens here:

- Several processes (`probes.run.processes`): process r measures the prompts n with n mod R = r, and all of them see all
  pieces. Since pieces are put together in one order, the numbers do not depend on how many processes there were.
- `keeping(path, key)`: within it every piece is appended to a journal on disk as soon as it is there, and pieces found
  there are not measured again. Whoever is killed goes on with the prompt it was at. Pieces are read back one at a time,
  so that memory does not grow with the number of prompts.

Work in rounds over all prompts, where each round follows from what all of them gave so far, has a stage for every round,
whose pieces hold what the round added. Arrays called `own.…` are for later rounds of the same prompt alone: without a
journal they stay in the process that measured the prompt, which is the one that measures it in the next round, too.

A journal is a file per process, `PATH.part0`, `PATH.part1`, ...: records of a fixed header, a name, and the arrays in the
safetensors format, under a checksum. What a kill or a full disk left of an unfinished record is seen by that and cut off.
The first record is the key, what the pieces were measured with.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import load as unpacked
from safetensors.numpy import save as packed

from ..errors import InputError
from . import processes

Piece: TypeAlias = dict[str, np.ndarray]

HEADER = struct.Struct("<4sIQI")  # mark, length of the name, length of the content, checksum of both
MARK = b"hwpc"
KEY = "key"
OWN = "own."  # begins the names of arrays that no other process needs
MOST = 64  # pieces of grouped prompts


class Journal:
    """Records in one file, appended; read by anybody.

    Raises:
        InputError: the file cannot be read or written to.
    """

    def __init__(self, path: Path, *, most: int | None = None) -> None:
        self.path = path
        self.places: dict[str, tuple[int, int]] = {}  # by name, where its content begins and how long it is
        self._end = 0
        self._writing: int | None = None
        self.scan(most)

    def scan(self, most: int | None = None) -> None:
        """Find the records that have come since, at most so many."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._end)
                while len(self.places) != most and len(header := file.read(HEADER.size)) == HEADER.size:
                    mark, named, size, check = HEADER.unpack(header)
                    rest = os.fstat(file.fileno()).st_size - file.tell()
                    if mark != MARK or named + size > rest:
                        return
                    name = file.read(named)
                    if zlib.crc32(file.read(size), zlib.crc32(name)) != check:
                        return
                    self.places[name.decode(errors="replace")] = (file.tell() - size, size)
                    self._end = file.tell()
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"'{self.path}' cannot be read ({error.strerror or error}); delete it") from None

    def append(self, name: str, content: bytes) -> None:
        """Add a record; on failure the file is as it was."""
        try:
            if self._writing is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._writing = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
                os.ftruncate(self._writing, self._end)  # of an unfinished record
            called = name.encode()
            check = zlib.crc32(content, zlib.crc32(called))
            at = self._end
            for part in (HEADER.pack(MARK, len(called), len(content), check) + called, content):
                left = memoryview(part)
                while left:
                    written = os.pwrite(self._writing, left, at)
                    left, at = left[written:], at + written
        except OSError as error:
            if self._writing is not None:
                os.ftruncate(self._writing, self._end)
            reason = error.strerror or error
            raise InputError(
                f"cannot write '{self.path}' ({reason}); make room or choose another folder, the same command then goes on"
            ) from None
        self.places[name] = (at - len(content), len(content))
        self._end = at

    def content(self, name: str) -> bytes:
        """What was recorded under a name."""
        start, size = self.places[name]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)

    def array(self, name: str, called: str) -> np.ndarray:
        """One array of those recorded under a name; the others are not read."""
        start, _ = self.places[name]
        with self.path.open("rb") as file:
            file.seek(start)
            size = int.from_bytes(file.read(8), "little")
            found = json.loads(file.read(size))[called]
            begin, end = found["data_offsets"]
            file.seek(start + 8 + size + begin)
            alone = json.dumps({called: found | {"data_offsets": [0, end - begin]}}).encode()
            content = len(alone).to_bytes(8, "little") + alone + file.read(end - begin)
        return np.array(unpacked(content)[called])

    def close(self) -> None:
        """No more is appended."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None


class Kept:
    """The journals of one unit of work, of all processes there ever were."""

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self.path = path
        self.journals = {file: Journal(file) for file in part_files(path)}
        self._own = path.with_name(f"{path.name}.part{processes.number()}")
        # Stages so far, by scope: those of one name are told apart by their order.
        self._called: Counter[str] = Counter()
        self.journals.setdefault(self._own, Journal(self._own))
        self._key = json.dumps(dict(key), default=str).encode()
        # What to do is shared by what was there when all looked, and nobody has added to it yet.
        self._before = {name for journal in self.journals.values() for name in journal.places}
        processes.wait()

    def missing(self, names: Sequence[str]) -> list[int]:
        """Numbers of those that were not there at the beginning: the same in all processes."""
        return [n for n, name in enumerate(names) if name not in self._before]

    def stage(self, name: str) -> str:
        """The prefix of a stage's names."""
        scope = _scope.get()
        self._called[scope] += 1
        return f"{scope}{self._called[scope]}/{name}/"

    def find(self, name: str) -> Journal | None:
        """The journal that has a record."""
        return next((journal for journal in self.journals.values() if name in journal.places), None)

    def append(self, name: str, piece: Piece) -> None:
        """Keep a piece in this process's journal, which begins with the key when there is something to keep."""
        own = self.journals[self._own]
        if KEY not in own.places:
            own.append(KEY, self._key)
        own.append(name, packed({key: np.asarray(x, order="C") for key, x in piece.items()}))

    def refresh(self) -> None:
        """Find what the other processes have kept."""
        for file in part_files(self.path):
            self.journals.setdefault(file, Journal(file)).scan()

    def close(self) -> None:
        """Nothing more is kept."""
        for journal in self.journals.values():
            journal.close()


_kept: ContextVar[Kept | None] = ContextVar("headwater_kept", default=None)
_scope: ContextVar[str] = ContextVar("headwater_scope", default="")


def part_files(path: Path) -> list[Path]:
    """The journals of a unit, process by process."""
    parts = [file for file in path.parent.glob("*.part*") if file.name.rpartition(".part")[0] == path.name]
    return sorted(parts, key=lambda file: (len(file.name), file.name))


def key_of(path: Path) -> dict[str, Any] | None:
    """What the pieces of a unit were measured with; None where there are none."""
    for file in part_files(path):
        journal = Journal(file, most=1)
        if KEY in journal.places:
            return json.loads(journal.content(KEY))
    return None


@contextmanager
def keeping(path: Path, key: Mapping[str, Any]) -> Iterator[None]:
    """Within it, `each` keeps its pieces in the journal `path`, and takes what is there.

    The caller has made sure that what is there was measured with the same `key`.
    """
    kept = Kept(path, key)
    token, scope = _kept.set(kept), _scope.set("")
    try:
        yield
    finally:
        _kept.reset(token)
        _scope.reset(scope)
        kept.close()


def journal_folder() -> Path | None:
    """The folder that holds the journal, or the nearest above it that is there; None where nothing is kept."""
    kept = _kept.get()
    return None if kept is None else next(path for path in kept.path.absolute().parents if path.is_dir())


class Pieces(Sequence[Piece]):
    """The pieces of all prompts; those on disk are read when asked for."""

    def __init__(self, found: Sequence[Piece | tuple[Journal, str]]) -> None:
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Pieces(self._found[at])
        found = self._found[at]
        if isinstance(found, dict):
            return found
        return {name: np.array(x) for name, x in unpacked(found[0].content(found[1])).items()}

    def stacked(self, name: str) -> np.ndarray:
        """One array of every piece, [piece, ...]."""
        first = self._array(0, name)
        stack = np.empty((len(self), *first.shape), dtype=first.dtype)
        for n in range(len(self)):
            stack[n] = self._array(n, name)
        return stack

    def _array(self, at: int, name: str) -> np.ndarray:
        found = self._found[at]
        return found[name] if isinstance(found, dict) else found[0].array(found[1], name)


def each(
    stage: str,
    count: int,
    measure: Callable[[int], Piece],
    *,
    before: Callable[[Iterable[int]], None] | None = None,
) -> Pieces:
    """The pieces 0 to `count` - 1, measured by `measure(n)` where they are not there already.

    Args:
        stage: what they are pieces of; the same stages have to follow each other whenever this work is done.
        count: how many.
        measure: a function of the piece's number, and nothing else: whichever process calls it, and after whichever others.
        before: hears which of its pieces this process will measure; those that are missing here are found elsewhere.
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
    prefix = kept.stage(stage)
    names = [f"{prefix}{n}" for n in range(count)]
    # Shared anew, so that all have something to do, however many there were before.
    missing = kept.missing(names)
    for n, piece in measure([missing[r :: len(everybody)] for r in everybody]):
        kept.append(names[n], piece)
    processes.wait()
    if len(everybody) > 1:
        kept.refresh()
    found: list[Piece | tuple[Journal, str]] = []
    for name in names:
        journal = kept.find(name)
        if journal is None:
            raise InputError(f"'{kept.path.parent}' is not seen by all processes; give a folder that all of them share")
        found.append((journal, name))
    return Pieces(found)


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
    if processes.count() > 1:
        mine = {
            f"{n}/{name}": np.asarray(x, order="C")
            for n, piece in own.items()
            for name, x in piece.items()
            if not name.startswith(OWN)
        }
        for content in processes.gathered(packed(mine)):
            for name, array in unpacked(content).items():
                n, _, called = name.partition("/")
                found.setdefault(int(n), {})[called] = array
    return Pieces([found[n] for n in range(len(found))])


FOLDER = "unfinished"  # of units, in the output's folder
