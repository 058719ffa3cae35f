"""The toys' experiments in the smallest sizes that have everything, run through the frame once for all tests."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xarray as xr
from pages import held

from probes.claims.claim import Claim
from probes.data.documents import HELDOUT
from probes.results.dataset import dataset
from probes.results.tables import Report
from toy.experiments import experiment

_TINY = {
    "retrieval": "layers=1,2 width=2 seeds=2 target=9,0,4 steps=60 sequences=3000 feed-forward=no rounds=1",
    "previous-token": "vocabulary=5 steps=30 seeds=2 batch=16 grid-vocabularies=5,6 grid-contexts=4 grid-widths=2"
    " rate-steps=60 blind-widths=2,3 test=64",
    "exchanges": "vocabulary=8 seeds=2 steps=400 every=10 batch=16 test=64",
    "remarks": "seeds=2 steps=20 share-steps=20 vocabulary=5 share-vocabulary=6 batch=16 test=64",
    "position-bias": "plan=contrasts depths=2,4 residual=off,on training=unbiased,first-and-last scales=text"
    " masks=causal,full,window-5,window-9,prefix-2,prefix-4 seeds=2 steps=6 tests=60 checks=2 course-tests=100 width=8"
    " batch=8",
    "rollout": "length=6 layers=8 seeds=2 sequences=3 scales=0.1,1 windows=3 prefixes=2 decays=0.3 peak-length=40"
    " peak-layers=4 peak-decays=0.3,0.7 planes=11,13",
    "petroglyph": "seeds=2 steps=40 tests=200 length=4 sequences=2 norm=none,rms width=4 batch=32",
    "births": "kinds=uniform-0.36,flat-0.36 seeds=0 steps=8 checkpoints=0,4 batch=2 length=32 width=16 blocks=2"
    f" vocabulary=400 text={HELDOUT} heldout-characters=4000 prompts=2 products=8",
}
TINY = {name: settings.split() for name, settings in _TINY.items()}


class Ran(NamedTuple):
    """An experiment's result, its report, the files of both and their folder."""

    ds: xr.Dataset
    report: Report
    files: list[Path]
    out: Path


_ran: dict[str, Ran] = {}


def ran(name: str, factory: pytest.TempPathFactory) -> Ran:
    """The tiny run of an experiment; copy the result to change it."""
    if name not in _ran:
        out = factory.mktemp(name)
        _ran[name] = Ran(*experiment.run(name, out, given=TINY[name], device="cpu"), out)
    return _ran[name]


def made_up(coords: Mapping[str, Any], settings: Any, **variables: tuple[str, Any]) -> xr.Dataset:
    """A result of variables given as (dimensions, what broadcasts to them), as if a full run had made it."""
    filled = {}
    for name, (dims, values) in variables.items():
        size = [len(coords[dim]) for dim in dims.split()]
        filled[name] = (dims.split(), np.broadcast_to(values, size).copy())
    own, published = (json.dumps(asdict(one)) for one in (settings, type(settings)()))
    attrs = {"settings": own, "published_settings": published, "quick": 0}
    return dataset(filled, coords=dict(coords), attrs=attrs | {"hardware": "none", "seconds": 1.0, "torch": "2"})


def changed(ds: xr.Dataset, name: str, change: Callable[[np.ndarray], Any]) -> xr.Dataset:
    """The result with another variable: what `change` returns of its values, or makes of them in place."""
    values = ds[name].values.copy()
    other = change(values)
    return ds.assign({name: ds[name].copy(data=np.broadcast_to(values if other is None else other, values.shape))})


def put(*place: Any, to: Any) -> Callable[[np.ndarray], None]:
    """A change of values at one place."""

    def change(values: np.ndarray) -> None:
        values[place] = to

    return change


def claims(name: str, ds: xr.Dataset) -> list[Claim]:
    """The statements that an experiment's result is judged by."""
    return experiment.experiment(name).claims(ds)


def verdicts(name: str, ds: xr.Dataset, prefix: str = "") -> dict[str, bool | None]:
    """Whether statements hold, by their ids without `prefix`; None for what is neither."""
    return {claim.id.removeprefix(prefix): held(claim) for claim in claims(name, ds)}


def questioned(name: str, ds: xr.Dataset, prefix: str = "") -> set[str]:
    """The ids without `prefix` of what does not hold; those of what is undecided end in a question mark."""
    marks = {"does not hold": "", "undecided": "?"}
    return {f"{c.id.removeprefix(prefix)}{marks[c.verdict]}" for c in claims(name, ds) if c.verdict in marks}
