"""Pieces of work that survive interruption: one `.npz` per piece, written whole or not at all (`docs/scale.md`).

A unit of work is what is measured in one go (a model under one condition, a place on a map, one replacement). A piece is a
part of it: a few named arrays, mostly of one prompt. `Store.each` makes the pieces of a stage, shared between processes:
process r makes the missing pieces r, r + R, r + 2R, ..., and every process sees all of them in one order.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import InputError, reason
from . import processes
from .files import alone, atomic, file_name, remove_cut_short, require_writable

Piece: TypeAlias = dict[str, np.ndarray]

FOLDER = "unfinished"  # of all units of a command, in the folder of its results
RESULT = "result"  # the piece that holds the result of a finished unit
NAMES = "names of all arrays"  # an array of a piece's file: a flipped bit may hide others from the zip's directory
MOST = 64  # pieces of grouped prompts
NAMED = 6  # of the units that are done, in the line that says so
LABEL = 100  # letters of a label in a folder's name, which file systems limit


class Store:
    """The pieces of one unit of work.

    Args:
        root: folder that holds the units' folders; None keeps pieces in memory.
        label: which unit, in words.
        key: everything the numbers depend on; another key is another folder. What JSON lacks counts as its `repr`.
    """

    def __init__(self, root: Path | None = None, label: str = "", key: Mapping[str, Any] | None = None) -> None:
        text = json.dumps([label, dict(key or {})], sort_keys=True, default=repr)
        name = f"{file_name(label)[:LABEL]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.folder = None if root is None else Path(root) / name
        self._scope, self._stages = "", set[str]()

    def within(self, scope: str) -> Store:
        """The same store for a part of the work: its stages are told apart from those of other scopes."""
        part = Store()
        part.folder = None if self.folder is None else self.folder / file_name(scope)
        part._scope, part._stages = f"{self._scope}{scope}/", self._stages
        return part

    def has(self, name: str) -> bool:
        """Whether a piece is there."""
        return self.folder is not None and self._path(name).exists()

    @property
    def begun(self) -> bool:
        """Whether any piece is there."""
        return self.folder is not None and next(self.folder.rglob("[!.]*.npz"), None) is not None

    def get(self, name: str) -> Piece | None:
        """A piece, or None where it is not there."""
        return _read(self._path(name)) if self.has(name) else None

    def put(self, name: str, piece: Piece) -> None:
        """Write a piece in place of an older one; after a failure that one is as it was."""
        with atomic(self._path(name)) as temporary, temporary.open("wb") as file:
            np.savez(file, **piece, **{NAMES: np.array(list(piece), str)})  # type: ignore[arg-type]

    def each(
        self,
        stage: str,
        count: int,
        measure: Callable[[int], Piece],
        *,
        before: Callable[[Iterable[int]], None] | None = None,
    ) -> Pieces:
        """The pieces 0 to `count` - 1, made by `measure(n)` where they are not there already: `together` of one piece."""
        return self.together(stage, count, lambda numbers: [measure(n) for n in numbers], before=before)

    def together(
        self,
        stage: str,
        count: int,
        measure: Callable[[Sequence[int]], Sequence[Piece]],
        at_once: int = 1,
        *,
        before: Callable[[Iterable[int]], None] | None = None,
    ) -> Pieces:
        """The pieces 0 to `count` - 1, made by `measure(numbers)`, `at_once` of them at a time, where they are not there.

        Args:
            stage: what they are pieces of; each stage of a scope has a name of its own.
            count: how many.
            measure: a function of the pieces' numbers, and nothing else: whichever process calls it, and after whichever
                others. What a piece holds does not depend on those that are made with it, rounding aside.
            at_once: how many pieces it is asked for at most, as `probes.run.memory.prompts_at_once` says.
            before: hears which pieces this process will make; those that are missing here are found elsewhere.
        """
        if (place := self._scope + stage) in self._stages:
            raise ValueError(f"this store has made '{place}' before; give each call a store of its own, or a scope")
        self._stages.add(place)
        processes.begin()
        names = [f"{stage}-{n}" for n in range(count)]
        # The first process looks, before any of them adds a piece.
        missing = processes.agreed([n for n in range(count) if not self.has(names[n])])
        share = missing[processes.number() :: processes.count()]
        if before is not None:
            before(share)
        batches = (share[start : start + at_once] for start in range(0, len(share), at_once))
        made = (pair for numbers in batches for pair in zip(numbers, measure(numbers), strict=True))
        if self.folder is None:
            pieces: dict[int, Piece] = {}
            for theirs in processes.gathered(dict(made)):
                pieces |= theirs
            return Pieces([pieces[n] for n in range(len(pieces))])
        for n, piece in made:
            self.put(names[n], piece)
        processes.wait()
        if not all(map(self.has, names)):
            raise InputError(f"'{self.folder}' is not seen by all processes; give a folder that all of them share")
        return Pieces([self._path(name) for name in names])

    def once(self, make: Callable[[], Piece]) -> Piece:
        """The unit's result, made by all processes together where it is not there already; its pieces go then."""
        if self.folder is None:
            return make()
        if not processes.agreed(self.has(RESULT)):
            result = make()
            processes.wait()  # somebody may be reading
            if processes.first():
                self.put(RESULT, result)
                for path in self.folder.iterdir():
                    if path != self._path(RESULT):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            processes.wait()
        return _read(self._path(RESULT))

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{file_name(name)}.npz"


class Pieces(Sequence):  # of `Piece`, which stays unsaid: a check of signatures would read one from disk
    """All pieces of a stage; those on disk are read when asked for."""

    def __init__(self, pieces: Sequence[Piece | Path]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Pieces(self._pieces[at])
        piece = self._pieces[at]
        return _read(piece) if isinstance(piece, Path) else piece

    def stacked(self, name: str) -> np.ndarray:
        """One array of every piece, [piece, ...]; the others are not read."""
        first = self._array(0, name)
        stack = np.empty((len(self), *first.shape), dtype=first.dtype)
        for n in range(len(self)):
            stack[n] = self._array(n, name)
        return stack

    def _array(self, at: int, name: str) -> np.ndarray:
        piece = self._pieces[at]
        return (_read(piece, name) if isinstance(piece, Path) else piece)[name]


def _read(path: Path, only: str | None = None) -> Piece:
    """The arrays of a piece, or the one of a name; the zip's checksums are held against the bytes."""
    try:
        with zipfile.ZipFile(path) as file:
            names = [only] if only is not None else _array(file, NAMES).tolist()
            return {name: _array(file, name) for name in names}
    except MemoryError:
        raise
    except Exception as error:  # a flipped bit may look like encryption, another compression, ...
        raise InputError(f"'{path}' is damaged ({reason(error)}); remove it, and measure again what it holds") from None


def _array(file: zipfile.ZipFile, name: str) -> np.ndarray:
    return np.load(io.BytesIO(file.read(f"{name}.npy")))


def groups(count: int) -> list[range]:
    """Prompts that share a piece, where pieces are sums and too large to keep one for each: at most `MOST` pieces.

    They follow from the number of prompts alone, so that sums are taken in one order.
    """
    size = max(1, math.ceil(count / MOST))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def going_on(stores: Mapping[str, Store]) -> str | None:
    """One line that says which units, by their labels, are there already; None where there are none."""
    done = [label for label, store in stores.items() if store.has(RESULT)]
    begun = [label for label, store in stores.items() if label not in done and store.begun]
    if not done and not begun:
        return None
    folder = next(store.folder.parent for store in stores.values() if store.folder is not None)
    more = f" and {len(done) - NAMED} more" if len(done) > NAMED else ""
    names = f" ({', '.join(done[:NAMED])}{more})" if done else ""
    partly = f", {', '.join(begun)} begun" if begun else ""
    return f"going on with '{folder}': {len(done)} of {len(stores)} are done{names}{partly}"


@contextmanager
def unfinished(out: Path, kind: str) -> Iterator[Path]:
    """The folder of a command's units, `OUT/unfinished/KIND`: no other run writes to it meanwhile.

    Where the body ends well the folder is removed, with units of other settings and what kills have left of result files.
    """
    root = out / FOLDER / kind
    if processes.first():
        require_writable(root)
    with alone(root) if processes.first() else nullcontext():
        yield root
        processes.wait()  # somebody may be reading
        if processes.first():
            shutil.rmtree(root, ignore_errors=True)
            remove_cut_short(out, kind)
