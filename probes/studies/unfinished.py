"""Work that may be interrupted: the result of every finished unit is kept in `OUT/unfinished` until all of them are done.

A unit is what is measured in one go: a model under one condition, a place of a map, one replacement. Its file says what it
was measured with (`key`); started again, the same work reads back what is there, and other work is refused before anything
is measured. Of a unit that was cut short, the pieces that were done (prompts, mostly) are kept beside it in the same way,
by `probes.run.pieces`. With several processes all of them measure, and the first one writes.

A key is plain data by name; where it holds the options that chose the prompts, their hash decides whether these are the
same (a text may have moved), and the options only say why not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import xarray as xr

from ..errors import InputError
from ..models.view import View
from ..results.dataset import load, provenance, save
from ..run import processes
from ..run.files import file_name, remove_cut_short, require_writable
from ..run.pieces import FOLDER, keeping, key_of, part_files
from ..run.progress import Advance

CHOOSING = ("prompts", "length", "text", "dataset", "split", "column", "chat", "first")
HASH = "tokens_sha256"
MARK = "unfinished"  # a unit's attribute: {"kind": ..., "key": {...}} as JSON
NAMED = 6  # of the units found, in the line that says so


def measured_on(model: View, tokens: Any) -> dict[str, Any]:
    """The part of a key that is the model's, the prompts' and the program's."""
    made = provenance(model, tokens)
    return {name: made[name] for name in ("weights", "backend", "dtype", HASH, "headwater")}


class Unfinished:
    """The unfinished units of one kind of work ("jacobian", "map", "sinks", ...) in a folder.

    Raises:
        InputError: the folder cannot be made or written to; tried here, before long work, and nothing is left behind.
    """

    def __init__(self, out: str | Path, kind: str) -> None:
        self.out, self.kind = Path(out), kind
        self.folder = self.out / FOLDER
        self._labels: set[str] = set()
        if processes.first():
            require_writable(self.folder)
        processes.wait()

    def has(self, label: str) -> bool:
        """Whether something of a unit of this label is there, measured with whatever."""
        return self.done(label) or key_of(self._parts(label)) is not None

    def done(self, label: str) -> bool:
        """Whether all of it is there."""
        return self._file(label).exists()

    def check(self, label: str, key: Mapping[str, Any], *, without: Collection[str] = ()) -> None:
        """Refuse to go on with a unit that was measured with another key; `without` names what is not known yet.

        Raises:
            InputError: naming what differs, or the file if it is damaged or of other origin.
        """
        if not self.has(label):
            return
        before, now = self._key(label), json.loads(json.dumps(key, default=str))
        changed = [name for name in {**now, **before} if name not in without and now.get(name) != before.get(name)]
        if HASH in now and HASH not in changed:
            changed = [name for name in changed if name not in CHOOSING]
        elif {*changed}.intersection({"seed", *CHOOSING}) and HASH in changed:
            changed.remove(HASH)
        if changed:
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
        measure: Callable[[], xr.Dataset],
        *,
        advance: Advance | None = None,
    ) -> xr.Dataset:
        """The unit as it was measured before, or as it is measured and kept now; `advance` hears that it was before.

        Raises:
            InputError: as in `check`, or the folder cannot be written to.
        """
        self._labels.add(label)
        self.check(label, key)
        file, mark = self._file(label), {"kind": self.kind, "key": dict(key)}
        if processes.agreed(file.exists()):
            found = load(file)
            del found.attrs[MARK]
            if advance is not None:
                advance(label, 1.0, 1.0)
            return found
        with keeping(self._parts(label), mark):
            made = measure()
        if processes.first():
            save(made.assign_attrs({MARK: json.dumps(mark, default=str)}), file)
        processes.wait()
        if processes.first():
            for part in part_files(self._parts(label)):
                part.unlink(missing_ok=True)
        return made

    def clear(self) -> None:
        """Remove all units of this kind, those of an older number of seeds, too; other files stay."""
        processes.wait()  # somebody may be reading
        if not processes.first():
            return
        cut_short = tuple(f".{file_name(label)}-" for label in self._labels)  # by a kill while they were written
        for file in self.folder.glob("*.nc"):
            mark = _mark(file)
            if (mark is not None and mark.get("kind") == self.kind) or file.name.startswith(cut_short):
                file.unlink(missing_ok=True)
        for part in self.folder.glob("*.part*"):
            path = part.with_name(part.name.rpartition(".part")[0])
            found = key_of(path)
            ours = (
                path.name in {file_name(label) for label in self._labels}
                if found is None
                else found.get("kind") == self.kind
            )
            if ours:
                part.unlink(missing_ok=True)
        remove_cut_short(self.out, self.kind)
        with suppress(OSError):  # somebody else's file is in it
            self.folder.rmdir()

    def _file(self, label: str) -> Path:
        return self.folder / f"{file_name(label)}.nc"

    def _parts(self, label: str) -> Path:
        return self.folder / file_name(label)

    def _key(self, label: str) -> dict[str, Any]:
        file = self._file(label)
        if not file.exists():
            begun = key_of(self._parts(label))
            if begun is not None:
                return begun["key"]
        mark = _mark(file)
        if mark is None:
            load(file)  # says what is wrong with it, if it is damaged
            raise InputError(f"'{file}' was not left by an unfinished study; delete it, or give another folder")
        return mark["key"]


def _mark(file: Path) -> dict[str, Any] | None:
    """A unit's mark, read without its data; None where there is none to be read."""
    try:
        with h5py.File(file) as opened:
            return json.loads(str(opened.attrs[MARK]))
    except (OSError, RuntimeError, KeyError, ValueError, TypeError):  # damaged, or somebody else's
        return None
