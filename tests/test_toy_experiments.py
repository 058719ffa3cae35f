"""What holds for every experiment: its modules, settings, tiny run, tables and figures; and the sweeps that they are."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from commands import bad_input
from tiny_runs import claims, ran

from probes.results.dataset import load
from probes.results.tables import write_report
from toy.experiments import experiment as frame
from toy.experiments.experiment import report_of, settings_of
from toy.experiments.sweep import Measure, Part, filled, sweep

REPORTS = Path(__file__).parent.parent / "reports" / "toy"
LARGEST = 300_000  # bytes of a figure


def test_a_sweep_puts_what_cells_give_at_their_coordinates():
    measures = {
        "x": Measure("an x", "nat", ("step",), np.float32),
        "n": Measure("a count", dtype=np.int16),
        "never": Measure("nothing", dims=("unused",)),
    }
    cells = [("b", 1), ("a", 0), ("b", 0)]  # not all, and in another order than their coordinates
    ds = sweep(
        {
            "kind": ["a", "b"],
            "seed": range(2),
            "step": (("step",), np.array([1, 10, 100]), {"long_name": "updates"}),
            "unused": [1, 2],
        },
        Part(("kind", "seed"), measures, filled(cells, x=[[1, 2, 3], [4, 5], [6]], n=torch.tensor([7, 8, 9]))),
        Part(("kind",), {"limit": Measure("a limit")}, [(("b",), {"limit": 0.1})]),
    )
    nan = np.nan
    expected = [[[4, 5, nan], [nan] * 3], [[6, nan, nan], [1, 2, 3]]]  # short arrays fill the beginning
    np.testing.assert_array_equal(ds["x"], np.array(expected, dtype=np.float32), strict=True)
    np.testing.assert_array_equal(ds["n"], np.array([[8, 0], [9, 7]], dtype=np.int16), strict=True)
    np.testing.assert_array_equal(ds["limit"], [nan, 0.1])
    assert (ds["x"].attrs, ds["n"].attrs["units"]) == ({"long_name": "an x", "units": "nat"}, "1")
    assert list(ds.sizes) == ["kind", "seed", "step"]  # without what nothing was measured along
    assert ds["step"].attrs["long_name"] == "updates"


@pytest.mark.parametrize("name", frame.EXPERIMENTS)
def test_settings_are_those_of_committed_results_and_can_be_given_as_a_caption_writes_them(name):
    module = frame.experiment(name)
    assert module.Settings() != module.QUICK == settings_of(name, quick=True)
    published = json.loads(load(REPORTS / f"{name}.nc").attrs["published_settings"])
    full = json.loads(json.dumps(vars(module.Settings())))
    assert {field: published.get(field, value) for field, value in full.items()} == full
    for field, value in vars(module.QUICK).items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        assert settings_of(name, quick=True, given=[f"{field}={text}"]) == module.QUICK


@pytest.mark.parametrize("name", frame.EXPERIMENTS)
def test_a_tiny_run_of_every_experiment_is_written_drawn_and_judged(name, tmp_path_factory):
    ds, report, files, out = ran(name, tmp_path_factory)
    xr.testing.assert_identical(load(out / f"{name}.nc").drop_attrs(), ds.drop_attrs())
    assert all(ds[variable].attrs["long_name"] for variable in ds)
    assert set(files) == {file for file in out.iterdir() if file.name != "births-runs"}  # nothing is left unfinished
    assert {f"{name}{kind}" for kind in (".nc", ".md", ".png", ".svg")} <= {file.name for file in files}
    for file in files:
        assert 0 < file.stat().st_size < LARGEST or file.suffix == ".nc"
    found = claims(name, ds)
    assert [row[1] for row in report.tables[-1].rows] == [claim.claim for claim in found]
    assert all(c.claim[0].isupper() and c.claim.endswith(".") for c in found)  # read alone
    ids = [claim.id for claim in found]
    assert len(set(ids)) == len(ids)
    assert not any("{" in getattr(claim, field) for claim in found for field in ("id", "source", "claim", "rule"))


@pytest.mark.parametrize("name", frame.EXPERIMENTS)
def test_committed_tables_are_what_the_rules_say_of_committed_results(name, tmp_path):
    file = REPORTS / f"{name}.nc"
    ds = load(file)
    write_report(report_of(name, ds), tmp_path / "again.md", ds.attrs["command"])
    again = (tmp_path / "again.md").read_text(encoding="utf-8")
    assert again == file.with_suffix(".md").read_text(encoding="utf-8"), (
        "headwater report --out reports writes them again"
    )


@pytest.mark.parametrize("name", frame.EXPERIMENTS)
def test_any_part_of_a_result_is_judged_by_the_same_statements(name, tmp_path_factory):
    ds = ran(name, tmp_path_factory).ds
    chosen = {
        "retrieval": ("layers", "target", "residual"),
        "previous-token": ("seed", "batch", "offset_context"),
        "exchanges": ("residual", "learning_rate", "schedule", "seed"),
        "remarks": ("case", "learning_rate", "by_share", "seed"),
        "position-bias": ("mask", "positional", "training", "residual", "seed"),
        "rollout": ("case", "source", "decay", "theta"),
        "petroglyph": ("layers", "mask", "positional", "norm"),
        "births": ("kind", "seed"),
    }

    def judged(part: xr.Dataset) -> list[str]:
        return [claim.id for claim in claims(name, part)]

    ids = judged(ds)
    for dim in chosen[name]:
        for end in (0, -1):
            part = ds.isel({dim: [end]})
            assert judged(part) == ids
            assert report_of(name, part).tables[0].rows


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("retrieval", {"target": (10,)}, "target 10 is no position of 10"),
        ("exchanges", {"schedule": ("linear",)}, "schedule='linear'"),
        ("previous-token", {"grid_contexts": (4, 2)}, "grid_contexts=2 is too few; give at least 3"),
        ("position-bias", {"masks": ("window-18",)}, "window=18 does not fit"),
        ("position-bias", {"positional": ("decay",), "masks": ("full",)}, "nothing is left of the grid"),
        ("rollout", {"prefixes": (18,)}, "prefixes=18 does not fit 17 positions; give at most 17"),
        ("rollout", {"planes": (32,)}, "planes=32 is no plane of 64 dimensions; give 0 to 31"),
        ("petroglyph", {"length": 9}, "length=9 is out of range; give 3 to 8"),
        ("births", {"kinds": ("even-0.36",)}, "kinds=even-0.36 is no initialization; give uniform, branches, flat"),
        ("births", {"steps": 1000}, "checkpoints=1000 is not before steps=1000"),
    ],
)
def test_grids_that_cannot_be_are_refused_in_one_line(name, given, says):
    with bad_input(says):
        frame.experiment(name).Settings(**given)
