"""Units of work in `OUT/unfinished`: done, begun or refused, until all of them are done and the folder goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import InputError
from . import processes
from .alone import Alone
from .files import remove_cut_short, require_writable, together
from .progress import Advance
from .resume import RESULT, Stores, keeping, store_files

Result = TypeVar("Result")

FOLDER = "unfinished"  # of units, in the output's folder
NAMED = 6  # of the units found, in the line that says so


class Unfinished(Generic[Result]):
    """The units of one kind of work ("jacobian", "map", "sinks", ...), kept in OUT/unfinished until all are done.

    With several processes all of them measure, and the first one writes the units' results.

    Args:
        out: folder of the results.
        kind: names the files.
        pack: a unit's result as bytes.
        unpack: the result again.
        telling: of the names of a key that differ, those that count, in the order they are to be named; all if not given.

    Raises:
        InputError: the folder cannot be made or written to (tried here, before long work, and nothing is left behind), or
            another version has left work there, or another run is writing to it.
    """

    def __init__(
        self,
        out: str | Path,
        kind: str,
        *,
        pack: Callable[[Result], bytes],
        unpack: Callable[[bytes], Result],
        telling: Callable[[list[str], Mapping[str, Any]], list[str]] = lambda changed, key: changed,
    ) -> None:
        self.out, self.kind = Path(out), kind
        self.folder = self.out / FOLDER
        self._pack, self._unpack, self._telling = pack, unpack, telling
        if processes.first():
            require_writable(self.folder)
        processes.wait()
        older = [file for ending in ("*.nc", "*.part[0-9]*") for file in self.folder.glob(ending)]
        if older:
            raise InputError(f"'{older[0]}' is unfinished work of an older version; remove '{self.folder}'")
        self._stores, self._alone = Stores(self.folder / kind), Alone(self.folder / kind)
        if processes.first():
            self._alone.check()

    def has(self, label: str) -> bool:
        """Whether something of a unit is there, measured with whatever."""
        return self._stores.key(label) is not None

    def done(self, label: str) -> bool:
        """Whether its result is there."""
        return RESULT in self._stores.where(label)

    def check(self, label: str, key: Mapping[str, Any], *, without: Collection[str] = ()) -> None:
        """Refuse to resume a unit that was measured with another key; `without` names what is not known yet.

        Raises:
            InputError: naming what differs, or the run that is measuring it now.
        """
        before, now = self._stores.key(label), json.loads(json.dumps(dict(key), default=str))
        if before is None:
            return
        changed = [name for name in {**now, **before} if name not in without and now.get(name) != before.get(name)]
        if changed := self._telling(changed, now):
            self._alone.check()  # a run that has begun since this one did: its work is not to be deleted
            raise InputError(
                f"'{self.out}' holds an unfinished study with other {', '.join(changed)}; "
                f"give the same settings to go on with it, delete '{self.folder}', or give another folder"
            )

    def going_on(self, labels: Sequence[str]) -> str | None:
        """One line that says which of these units are there already; None where there are none."""
        found = [label for label in labels if self.done(label)]
        begun = [label for label in labels if label not in found and self.has(label)]
        if not found and not begun:
            return None
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        done = f" ({', '.join(found[:NAMED])}{more})" if found else ""
        partly = f", {', '.join(begun)} begun" if begun else ""
        return f"going on with '{self.folder}': {len(found)} of {len(labels)} are done{done}{partly}"

    def unit(
        self,
        label: str,
        key: Mapping[str, Any],
        measure: Callable[[], Result],
        *,
        advance: Advance | None = None,
    ) -> Result:
        """The unit as it was measured before, or as it is measured and kept now; `advance` hears that it was before.

        Raises:
            InputError: as in `check`, the folder cannot be written to, or another run is writing to it.
        """
        if processes.first():
            self._alone.take()
        try:
            return self._unit(label, key, measure, advance)
        except BaseException:
            self._alone.release()
            raise

    def _unit(
        self, label: str, key: Mapping[str, Any], measure: Callable[[], Result], advance: Advance | None
    ) -> Result:
        self.check(label, key)
        if processes.agreed(self.done(label)):
            if advance is not None:
                advance(label, 1.0, 1.0)
            (read,) = self._stores.readers(label, [RESULT])
            return self._unpack(read()[RESULT].tobytes())
        with keeping(self._stores, key, label):
            made = measure()
        if processes.first():
            content = {RESULT: np.frombuffer(self._pack(made), np.uint8)}
            self._stores.own.write(label, json.dumps(dict(key), default=str), RESULT, content)
        processes.wait()
        if processes.first():
            for other in self._stores:
                other.forget(label)
        return made

    def finish(self, write: Callable[[], object]) -> None:
        """Write what came of all units, in one process and all of it or nothing; then the units go."""
        try:
            if processes.first():
                with together():
                    write()
            self.clear()
        finally:
            self._alone.release()

    def clear(self) -> None:
        """Remove all units of this kind, those of an older number of seeds, too; other files stay."""
        processes.wait()  # somebody may be reading
        self._stores.close()
        processes.wait()
        if not processes.first():
            return
        for file in store_files(self._stores.path):
            file.unlink(missing_ok=True)
            file.with_name(f"{file.name}-journal").unlink(missing_ok=True)
        remove_cut_short(self.out, self.kind)
        self._alone.release()
        with suppress(OSError):  # somebody else's file is in it
            self.folder.rmdir()
