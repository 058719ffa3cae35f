"""All results under a folder, as `make report` leaves them: what statements are judged by and the page is made from.

A result's kind is the folder it lies in, relative to the root ("jacobian", "leakage", "toy", "toy/long", ...); its name is
the model's, or what the file's name has from there on ("tiny-llama@step100" of sinks-tiny-llama@step100.nc); the file's
where there is no model. The map of theory is a kind of its own. Real language models have a folder of their own, `llm`,
which is left out of the kind: "llm/leakage" is "leakage" too, and "llm/code/leakage", the same on another text, is
"code/leakage". NAME.nc.xz counts as NAME.nc where there is none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import xarray as xr

from ..errors import InputError
from ..run.files import file_name
from ..run.store import FOLDER
from .dataset import PACKED, check_prompts, load

MAP = "map"
REAL = "llm"  # folder of results of real language models


@dataclass(frozen=True)
class Collected(Mapping[str, Mapping[str, xr.Dataset]]):
    """Results by kind and name: `collected["jacobian"]["tiny-llama"]`; a kind that is not there is empty."""

    root: Path
    results: dict[str, dict[str, xr.Dataset]] = field(default_factory=dict)
    files: dict[tuple[str, str], Path] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Mapping[str, xr.Dataset]:
        return self.results.get(kind, {})

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)


def collect(root: str | Path) -> Collected:
    """Read every result under `root`; unfinished work and hidden folders are left out.

    Raises:
        InputError: there is no such folder, a result in it is damaged, or two are of one kind and name.
    """
    root = Path(root)
    if not root.is_dir():
        raise InputError(f"'{root}' is no folder; give the one that results were written to")
    found = Collected(root)
    files = {*root.rglob("*.nc"), *(file.with_suffix("") for file in root.rglob(f"*.nc{PACKED}"))}
    for file in sorted(files):
        within = file.relative_to(root).parts
        if any(part.startswith(".") or part == FOLDER for part in within):
            continue
        ds = load(file)
        check_prompts(ds, f"'{file}'")
        kind, name = _place(file, within, ds)
        of_kind = found.results.setdefault(kind, {})
        if name in of_kind:
            other = found.files[kind, name]
            raise InputError(f"'{other}' and '{file}' are both of '{name}'; remove the one that is out of date")
        of_kind[name] = ds
        found.files[kind, name] = file
    # Files have another order: "tiny-llama-ntk.nc" before "tiny-llama.nc", "toy/long" before "toy/retrieval.nc".
    ordered = {kind: dict(sorted(of_kind.items())) for kind, of_kind in sorted(found.results.items())}
    return replace(found, results=ordered)


def _place(file: Path, within: tuple[str, ...], ds: xr.Dataset) -> tuple[str, str]:
    """(kind, name) of a result."""
    if ds.attrs.get("measurement") == MAP:
        return MAP, file.stem
    folders = within[1:-1] if len(within) > 2 and within[0] == REAL else within[:-1]
    kind, model = "/".join(folders) or str(ds.attrs.get("measure", file.stem)), str(ds.attrs.get("model", ""))
    at = file.stem.rfind(file_name(model)) if model else 0
    name = file.stem[at:] if at >= 0 else model
    return kind, model if name == file_name(model) else name
