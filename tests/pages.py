"""A folder of results such as `headwater report` leaves, of tiny random models, for the tests of the page."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
from filelock import FileLock

from probes.claims.claim import Claim
from probes.options import Prompts
from probes.report.measuring import Source, Study, measure, studies
from probes.results.dataset import load, save
from probes.run.files import file_name

REPORTS = Path(__file__).resolve().parent.parent / "reports"
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
    save(load(REPORTS / "theory" / "map.nc"), root / "theory" / "map.nc")
    match = load(REPORTS / "match" / "match-tiny-llama.nc").assign_attrs(model="ape")
    del match.attrs["weights"]
    save(match, root / "match" / "match.nc")
    return root


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
