"""The toys' experiments in the smallest sizes that have everything, run through the frame once for all tests."""

from pathlib import Path
from typing import NamedTuple

import pytest
import xarray as xr

from probes.claims.claim import Claim
from probes.data.documents import HELDOUT
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


def claims(name: str, ds: xr.Dataset) -> list[Claim]:
    """The statements that an experiment's result is judged by."""
    return experiment.experiment(name).claims(ds)
