"""The frame of the experiments: settings, provenance, captions, unfinished work, the command line."""

import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr
from commands import bad_input, call
from kept import interrupting
from matplotlib.figure import Figure

from probes.claims.claim import Claim
from probes.measure import Headline
from probes.results.dataset import dataset, load, save
from toy import checks
from toy import train as training
from toy.experiments import experiment as frame
from toy.experiments.experiment import Work, claims_of, extent, report_of, run, settings_of
from toy.model import Architecture
from toy.tasks import Copying
from toy.train import Run


@dataclass(frozen=True)
class Settings(checks.Settings):
    LEAST: ClassVar = {"targets": -1}
    CHOICES: ClassVar = {"task": ("copying", "in-context")}
    steps: int = 40
    rate: float = 0.01
    task: str = "copying"
    residual: bool = True
    targets: tuple[int, ...] = (0, 3)
    rates: tuple[float, ...] = (0.1,)
    names: tuple[str, ...] = ("a",)
    switches: tuple[bool, ...] = (False, True)


def measured(settings: Settings, work: Work) -> xr.Dataset:
    a = Architecture(length=4, vocabulary=4, outputs=4, residual=settings.residual)
    tasks = [(seed, Copying(4, 4, target, 8)) for seed in (0, 1) for target in settings.targets]
    runs = [Run(a, task, seed, learning_rate=settings.rate) for seed, task in tasks]
    loss = torch.stack([one.losses[-1] for one in work.train("all of them", runs, settings.steps)]).view(2, -1)
    work.advance("evaluation", 1.0, 1.0)
    coords = {"seed": [0, 1], "target": list(settings.targets)}
    return dataset({"loss": (("seed", "target"), loss)}, coords=coords, attrs={"task": settings.task})


def claimed(ds: xr.Dataset) -> list[Claim]:
    loss, rows = ds["loss"], [("x-below-9", "below 9"), ("x-below-0", "below 0"), ("x-last", "the last | first")]
    holds = [bool((loss < 9).all()), bool((loss < 0).all()), None if 3 not in ds["target"] else True]
    claims = [Claim(name, "[X] Fig. 1", text, f"rule of {name}") for name, text in rows]
    return [
        claim.judged("" if verdict is None else "1.00", verdict) for claim, verdict in zip(claims, holds, strict=True)
    ]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An experiment of a second, called tiny-one."""
    module: Any = ModuleType("toy.experiments.tiny_one")
    module.Settings, module.QUICK = Settings, Settings(steps=20, targets=(0,))
    module.measure, module.claims, module.charts = measured, claimed, lambda ds: {"": Figure()}
    module.HEADLINES = [Headline("loss", lambda ds: ds["loss"])]
    monkeypatch.setitem(sys.modules, "toy.experiments.tiny_one", module)
    monkeypatch.setattr(frame, "EXPERIMENTS", (*frame.EXPERIMENTS, "tiny-one"))
    return module


def test_settings_are_the_full_or_the_quick_ones_with_changes_by_their_types(tiny):
    assert settings_of("tiny-one", quick=False) == Settings()
    given = ["steps=300", "rate=1e-3", "task=in-context", "residual=no", " targets = -1, 2,", "switches=no,YES"]
    changed = settings_of("tiny-one", quick=True, given=[*given, "rates=1,0.5"])
    expected = Settings(300, 0.001, "in-context", False, (-1, 2), (1.0, 0.5), ("a",), (False, True))
    assert changed == expected
    assert list(map(type, changed.rates + changed.switches)) == [float, float, bool, bool]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["steps"], "--with 'steps' has no value; give steps=VALUE"),
        (["step=3"], "'tiny-one' has no setting 'step' (did you mean steps?); give FIELD=VALUE with one"),
        (["switches=yes,maybe"], "--with 'switches=yes,maybe' cannot be read; give a value like False,True"),
        (["steps=3", "rate=1", "steps=4"], "--with 'steps=4' gives steps a second time"),
        (["steps=0"], "steps=0 is too few; give at least 1"),
        (["rate=-0.1"], "rate=-0.1 is out of range; give a finite number of 0 or more"),
        (["rates=1,1"], "rates=1.0,1.0; give one or more different values"),
        (["task=sorting"], "task='sorting' is unknown; give one of copying, in-context"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny, given, says):
    with bad_input(says):
        settings_of("tiny-one", quick=False, given=given)


def test_a_run_writes_result_figure_and_table(tiny, tmp_path):
    told: list[tuple[str, float, float]] = []
    ds, report, files = run(
        "tiny-one", tmp_path, quick=True, given=["rate=0.5"], device="cpu", advance=lambda *step: told.append(step)
    )
    assert sorted(files) == [tmp_path / f"tiny-one.{end}" for end in ("md", "nc", "png", "svg")]
    assert sorted(files) == sorted(tmp_path.iterdir())
    back = load(tmp_path / "tiny-one.nc")
    np.testing.assert_array_equal(back["loss"].values, ds["loss"].values)
    attrs = back.attrs
    assert json.loads(attrs["settings"]) == json.loads(json.dumps(vars(Settings(steps=20, rate=0.5, targets=(0,)))))
    assert json.loads(attrs["published_settings"])["steps"] == 40
    assert (attrs["experiment"], attrs["quick"], attrs["device"], attrs["task"]) == ("tiny-one", 1, "cpu", "copying")
    assert attrs["torch"] == torch.__version__
    assert 0 <= attrs["seconds"] < 600
    assert told[-1] == ("evaluation", 1.0, 1.0)
    assert [step for step in told if step[0] == "all of them"][-1] == ("all of them", 40.0, 40.0)
    assert report_of("tiny-one", back).tables == report.tables  # from the file alone
    columns = list(zip(*report.tables[-1].rows, strict=True))
    assert columns[1::2] == [("below 9", "below 0", "the last | first"), ("holds", "does not hold", "not measured")]
    page = (tmp_path / "tiny-one.md").read_text(encoding="utf-8")
    assert all(said in page for said in (extent(ds), *columns[3]))


def test_interrupted_and_run_again_is_the_uninterrupted_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "TELL_SECONDS", -1.0)
    monkeypatch.setattr(training, "SAVE_SECONDS", -1.0)
    whole, _, _ = run("tiny-one", tmp_path / "whole", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        run("tiny-one", tmp_path / "out", device="cpu", advance=interrupting(21))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".unfinished-tiny-one"]
    told: list[tuple[str, float, float]] = []
    said: list[str] = []
    again, _, _ = run("tiny-one", tmp_path / "out", device="cpu", advance=lambda *s: told.append(s), told=said.append)
    assert told[0] == ("all of them", 80.0, 160.0)
    assert said == [f"going on with the trainings in '{tmp_path / 'out' / '.unfinished-tiny-one'}'"]
    np.testing.assert_array_equal(again["loss"].values, whole["loss"].values)
    after, expected = ({file.name for file in (tmp_path / name).iterdir()} for name in ("out", "whole"))
    assert after == expected


def test_claims_of_a_result_have_model_and_command(tiny, tmp_path):
    ds, _, _ = run("tiny-one", tmp_path, quick=True, device="cpu")
    rows = claims_of("tiny-one", ds)
    assert {row.model for row in rows} == {"toys, 2 seeds, quick run"}
    full, quick = "headwater toy tiny-one --out runs/toy", "headwater toy tiny-one --quick"
    assert {row.command for row in rows} == {full}  # made from Python
    called = claims_of("tiny-one", ds.assign_attrs(command=quick))
    assert [row.command for row in called] == [quick, quick, full]
    whole = ds.isel(seed=[0]).assign_attrs(settings=ds.attrs["published_settings"], quick=0)
    assert {row.model for row in claims_of("tiny-one", whole)} == {"toys, 1 seed, full run"}


def test_a_report_writes_tables_of_toys_by_present_rules(tiny, tmp_path, monkeypatch):
    ds, _, _ = run("tiny-one", tmp_path / "toy", quick=True, device="cpu")
    save(ds.assign_attrs(command="headwater toy tiny-one --quick"), tmp_path / "toy" / "tiny-one.nc")
    monkeypatch.setattr(tiny, "claims", lambda ds: claimed(ds)[1:])  # a rule goes
    assert call(monkeypatch, "report", "--out", str(tmp_path)) == 0
    lines = (tmp_path / "toy" / "tiny-one.md").read_text(encoding="utf-8").splitlines()
    assert lines[2] == "`headwater toy tiny-one --quick`"  # what trained, not what wrote
    assert [line.split("|")[2].strip() for line in lines if line.startswith("| [X]")] == ["below 0", "the last \\"]
    assert "x-below-9" not in (tmp_path / "claims.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("retrival", "there is no experiment 'retrival' (did you mean retrieval?); give one of"),
        ("tiny-one retrieval --with task=copying", "'retrieval' has no setting 'task'"),  # before any work
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tiny, monkeypatch, capfd, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "toy", *arguments.split()) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.strip().splitlines())) == ("", 1)
    assert says in err
    assert list(tmp_path.iterdir()) == []
