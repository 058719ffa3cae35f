"""A folder of results such as `headwater report` leaves, of tiny random models, for the tests of the page."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import xarray as xr
from filelock import FileLock

from probes.claims.claim import Claim
from probes.options import Prompts
from probes.report.measuring import Source, Study, measure, studies
from probes.results.dataset import attributes, load, made_with, save
from probes.run.files import file_name
from toy.match_result import judged

LENGTH, PROMPTS = 24, 4
ROGUE = "<script>alert('x')</script>/ape & co"  # the name of a model, as somebody might call a folder
KINDS = ("jacobian", "theory", "sinks", "trajectory", "leakage", "bos-swap", "scalar")


def models(folder: Path) -> Path:
    """Two tiny checkpoints, "ape" (with BOS) and "bee" (without), and a text for them."""
    return families.checkpoints(folder, ape=("llama", "prepended"), bee=("gpt2", "end"))


def small(*kinds: str) -> list[Study]:
    """Studies of the report with fewer fresh models and resamples."""
    less: dict[str, Any] = {kind: {"bootstrap": 20} for kind in ("leakage", "bos-swap")}
    less |= {kind: {"seeds": 2} for kind in ("jacobian", "theory")}
    chosen = (one for one in studies() if not kinds or one.kind in kinds)
    return [replace(one, options={**one.options, **less.get(one.kind, {})}) for one in chosen]


def source(folder: Path) -> Source:
    return Source(Prompts(text=folder / "text.txt"))


def renamed(root: Path, old: str, new: str) -> None:
    """Every result of a model once more, under another name."""
    for file in sorted(root.rglob(f"*-{old}.nc")):
        ds = load(file).assign_attrs(model=new)
        save(ds, file.with_name(f"{file.stem.removesuffix(old)}{file_name(new)}.nc"))


def shared(factory: pytest.TempPathFactory) -> Path:
    """A folder with `models` and their report, `whole`, made once for all processes of a run of the tests; only read."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pages"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            (folder / "models").mkdir(parents=True)
            whole(models(folder / "models"), folder / "report")
            (folder / "done").touch()
    return folder


def whole(models: Path, root: Path) -> Path:
    """Results of every kind: "ape" measured, and again under a bad name; two steps, a map, toys beside "ape"."""
    measure([str(models / "ape")], root, count=PROMPTS, length=LENGTH, source=source(models), chosen=small())
    renamed(root, "ape", ROGUE)
    for step, name in (("ape@step0", "sinks-ape@step0.nc"), ("ape", "sinks-ape.nc")):
        ds = load(root / "sinks" / "sinks-ape.nc")
        ds["alpha"] = ds["alpha"] * (1 if step == "ape" else 0.5)
        save(ds, root / "steps" / name)
    save(atlas(), root / "theory" / "map.nc")
    save(match(), root / "match" / "match.nc")
    return root


def made(**more: Any) -> dict[str, Any]:
    return attributes({**made_with(), "device": "cpu", "dtype": "float32", **more})


def atlas() -> xr.Dataset:
    """A map of five places whose first positions stand 4, 2, 1 and 6 times above the middle, the last one's not at all."""
    x, primacy = np.linspace(0, 1, 32), (4.0, 2.0, 1.0, 6.0, 0.0)
    curves = np.stack([np.where(x < 0.05, high, 1.0) + (x == 1) * 2.0 for high in primacy])
    names = ("measured", "uniform", "values", "score_path", "config", "cesaro", "value")
    of_places = {
        "group": ["depth", "depth", "depth", "model", "window"],
        "strength": [0.1, 0.5, 1.0, 0.3, 0.1],
        "blocks": [8, 8, 8, 12, 8],
        "width": [64] * 5,
        "length": [32] * 5,
        "name": ["", "", "", "Some-7B", ""],
        "label": ["weak", "middling", "strong", "Some-7B", "a window"],
    }
    coords = {name: ("place", values) for name, values in of_places.items()}
    variables = {name: (("place", "position"), curves * (1 if name == "measured" else 1.1)) for name in names}
    return xr.Dataset(variables, coords=coords, attrs=made(measurement="map", seeds=2, products=64, factor=2.0))


def held(claim: Claim) -> bool | None:
    """A verdict as a bool; None for what is neither."""
    return {"holds": True, "does not hold": False}.get(claim.verdict)


def claims() -> list[Claim]:
    """One of every verdict, from two sources."""
    told = (
        ("b-second", "[Gu] Table 1", "Sinks are <b>everywhere</b>.", "0.64", "0.1", "does not hold"),
        ("a-first", "[Ruscio] 4.1", "A swap removes 40 %.", "40 %", "81 %", "holds"),
        ("c-third", "[Gu] Table 2", "Larger models have more.", "-", "-", "not measured"),
    )
    names = ("id", "source", "claim", "published", "measured", "verdict")
    common: dict[str, Any] = {"model": "ape", "rule": "the number is above 0.3", "command": "headwater x"}
    return [Claim(**dict(zip(names, one, strict=True)), **common) for one in told]


def match() -> xr.Dataset:
    """A committed result of a model beside toys, as if it were of another model."""
    ds = load(Path(__file__).resolve().parent.parent / "reports" / "match" / "match-tiny-llama.nc")
    del ds.attrs["weights"]
    return judged(ds.assign_attrs(model="ape"))
