"""Experiment position-bias: the grid, a tiny run through the frame, the rules of the statements both ways."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from tiny_runs import TINY, made_up, questioned, verdicts

from probes.claims.rules import SURE
from probes.errors import InputError
from toy.experiments import experiment
from toy.experiments import position_bias as module
from toy.experiments.in_context import ITEMS, generator_of, switches_of
from toy.experiments.position_bias import DIMS, PAIRS, QUICK, Case, Settings, cases
from toy.experiments.position_bias.statements import agreement, claims, kept_from
from toy.train import logits, train

LEARNT = {  # gaps of the three pairs that biased training adds
    "unbiased": [0.0, 0.0, 0.0],
    "first": [0.3, 0.3, 0.2],
    "middle": [-0.5, 0.0, 0.5],
    "last": [-0.3, -0.3, -0.3],
    "first-and-last": [0.5, 0.0, -0.5],
}
WITH_STREAM = {2: 0.4, 4: 0.8}  # by depth, what a residual stream leaves of the bias
ENCODED = {"none": 0.2, "decay": -0.2, "rope": -0.15, "sinusoidal": 0.1}
EVERYTHING = Settings(depths=(2, 4), scales=("text",), seeds=3, steps=1000, checks=1)


def published(change: Callable[[xr.DataArray], xr.DataArray] = lambda gap: gap, s: Settings = EVERYTHING) -> xr.Dataset:
    """A result by whose gaps everything that was published holds, which `change` may alter."""
    coords = module.axes_of(s) | {"pair": list(PAIRS), "position": range(ITEMS)}
    of: Any = {dim: xr.DataArray(values, {dim: values}, dim) for dim, values in coords.items()}
    stream = xr.DataArray(list(WITH_STREAM.values()), {"depth": list(WITH_STREAM)}).reindex(depth=s.depths)
    encoded = xr.DataArray(list(ENCODED.values()), {"positional": list(ENCODED)}).reindex(positional=s.positional)
    added = xr.DataArray(list(LEARNT.values()), {"training": list(LEARNT), "pair": list(PAIRS)}).reindex(
        training=s.training
    )
    gap = (encoded + 0.03 * of["depth"]) * xr.DataArray([0.6, 1.0, 0.5], {"pair": list(PAIRS)})
    gap = gap * stream.where(of["residual"] == "on", 1.0)
    gap = gap + added.where((of["training"] != "last") | (of["positional"] != "none"), 0.0)
    gap = gap.where((of["mask"] != "full") | (of["training"] != "unbiased"), 0.0)
    gap = change(gap.broadcast_like(xr.Dataset(coords={dim: coords[dim] for dim in DIMS}))) + 1e-3 * of["seed"]
    gap = gap.where((of["mask"] != "full") | (of["positional"] != "decay")).transpose(*DIMS, "pair")
    dip = 0.2 * (of["training"] == "first-and-last") * abs(2 * of["position"] / (ITEMS - 1) - 1)
    by_item = (0.5 + dip).broadcast_like(gap.isel(pair=0, drop=True)).transpose(*DIMS, "position")
    dims = " ".join(DIMS)
    return made_up(
        coords,
        s,
        gap=(f"{dims} pair", gap),
        accuracy_by_position=(f"{dims} position", by_item),
        novel_accuracy=(dims, gap.isel(pair=0).where(gap.isel(pair=0).isnull(), 0.8)),
    )


def judged(ds: xr.Dataset) -> dict[str, bool | None]:
    """By id; the statements about sinks have tests of their own."""
    return {name: holds for name, holds in verdicts("position-bias", ds, "wu-toy-").items() if "sink-" not in name}


def test_grid_is_every_combination_that_there_is_and_a_plan_the_contrasts_of_the_paper():
    s = Settings()
    grid = cases(s)
    assert len(set(grid)) == len(grid) == 2 * 2 * 3 * 2 * 5 * (4 + 3) * 5
    assert not [c for c in grid if c.positional == "decay" and c.mask == "full"]
    order = [(c.scale == "program", c.data == "fixed", c.depth, c.seed) for c in grid]
    assert order == sorted(order)  # whole seeds of whole depths
    parts = module.parts(grid, "cpu").values()
    assert all(len({module.run_of(c, s).task for c in part}) == 1 for part in parts)
    assert [len(part) for part in module.parts(grid, "cuda").values()] == [len(grid) // 3] * 3
    assert sorted(repr(c) for part in parts for c in part) == sorted(map(repr, grid))
    masks = ("causal", "full", *module.OTHER_MASKS)
    plan = Settings(plan="contrasts", masks=masks, residual=("on", "off"), scales=("text",), depths=(2, 4), seeds=3)
    grid = cases(plan)
    assert len(grid) == len({*grid}) == 3 * (4 * 5 + 3 * 3 + 6 + 4 + 2) + 2 * 4
    assert {(c.mask, c.training) for c in grid if c.residual == "off"} == {("causal", "unbiased")}
    assert {c.positional for c in grid if c.data == "fixed"} == {"none", "rope"}
    assert {c.seed for c in grid if c.depth == 4} == {0, 1}


def test_checks_and_masks_are_what_the_settings_say():
    steps = module.check_steps(Settings())
    assert (steps[0], steps[-1], len(steps)) == (100, 100_000, 10)
    assert module.check_steps(replace(QUICK, checks=1)) == [600]
    assert module.check_steps(Settings(steps=3)) == [3]
    assert switches_of("window-5") == {"mask": "window", "window": 5}
    for name in ("causal-5", "window", "window-", "window-x", "window--1", "", "sliding-5"):
        with pytest.raises(InputError, match=r"unknown; give causal, full, window-N"):
            switches_of(name)


def test_a_tiny_run_has_every_model_of_its_grid_and_the_numbers_of_its_models(tiny):
    ds, s = tiny.ds, experiment.settings_of("position-bias", quick=False, given=TINY["position-bias"])
    there = ds["gap"].notnull().all("pair")
    assert int(there.sum()) == len(cases(s))
    assert all(bool(there.sel(case._asdict())) for case in cases(s))
    for name in ("accuracy_by_position", "course_gap", "training_loss"):
        assert (ds[name].notnull().all([dim for dim in ds[name].dims if dim not in DIMS]) == there).all()
    # The last check is the trained model, on as many sequences.
    np.testing.assert_array_equal(ds["course_gap"].isel(step=-1), ds["gap"])
    np.testing.assert_array_equal(ds["course_novel"].isel(step=-1), ds["novel_accuracy"])
    assert ds["step"].values.tolist() == [6]  # checks begin at step 100, or at the end of shorter training
    assert len(tiny.report.tables[0].rows) == len({c._replace(seed=0) for c in cases(s)})
    assert {file.name for file in tiny.files} >= {"position-bias.png", "position-bias-sinks.png"}

    case = Case("text", "gaussian", 2, "causal", "rope", "off", "first-and-last", 1)
    (model,) = train([module.run_of(case, s)], s.steps)
    task: Any = model.run.task
    world, here, cpu = task.world(1, "cpu"), ds.sel(case._asdict()), torch.device("cpu")

    def share(drawn):
        right = logits([model], drawn.inputs[0])[0].argmax(-1) == drawn.hidden[0]
        return float(right.float().mean())

    few = 2.01 / s.tests  # ties of logits at most
    for n, (earlier, later) in enumerate(PAIRS.values()):
        first, second = (
            share(task.pairs(world, generator_of(cpu, "pairs", 1, n, m), s.tests, right, wrong))
            for m, (right, wrong) in enumerate(((earlier, later), (later, earlier)))
        )
        assert float(here["gap"][n]) == pytest.approx(first - second, abs=few)
    drawn = task.single(world, generator_of(cpu, "single", 1, 5), s.tests, 5)
    assert float(here["accuracy_by_position"][5]) == pytest.approx(share(drawn), abs=few)
    unbiased = replace(task, biased=None)
    own, changed = (getattr(unbiased, of)(world, generator_of(cpu, of, 1), s.tests) for of in ("novel", "relabelled"))
    assert float(here["novel_accuracy"]) == pytest.approx(share(own), abs=few)
    assert float(here["by_heart"]) == pytest.approx(share(changed), abs=few)
    assert float(here["training_loss"][-1]) == pytest.approx(float(model.losses.mean()), rel=1e-5)


def test_learning_is_told_by_the_step_from_which_on_it_stays():
    course = xr.DataArray([[0.5, 0.9, 0.8], [0.9, 0.7, 0.6]], {"step": [100, 316, 1000]}, ("seed", "step"))
    np.testing.assert_array_equal(kept_from(xr.Dataset({"course_novel": course})), [316, np.nan])


def test_all_statements_hold_where_they_do():
    found = judged(published())
    assert [name for name, holds in found.items() if holds is not True] == ["text-and-program"]  # one scale
    assert len(found) == 18


def shift(by: Any, **at: Any) -> Callable[[xr.DataArray], xr.DataArray]:
    """Other gaps for some models; `by` of the three pairs."""

    def change(gap: xr.DataArray) -> xr.DataArray:
        moved = gap.copy()
        moved.loc[at] = moved.loc[at] + xr.DataArray(np.broadcast_to(by, 3), {"pair": list(PAIRS)})
        return moved

    return change


def turned(**which: str) -> Callable[[xr.DataArray], xr.DataArray]:
    """The other sign for some models."""
    ((dim, value),) = which.items()
    return lambda gap: gap.where(gap[dim] != value, -gap)


@pytest.mark.parametrize(
    ("change", "refuted"),
    [
        (shift([0, 0, -0.2], positional="none", training="unbiased", depth=4), ["causal-favours-earlier"]),
        (
            lambda gap: gap - 0.06 * gap["depth"],
            ["causal-grows-with-depth", "decay-depth-favours-earlier", "rope-depth-favours-earlier"],
        ),
        (shift(0.5, positional="decay", training="unbiased", depth=4), ["decay-favours-recent"]),
        (shift(0.5, positional="rope", training="unbiased", depth=2), ["rope-favours-recent"]),
        (shift(-0.4, positional="rope", training="first", depth=2), ["data-first"]),
        (shift([0.6, 0, 0], positional="none", training="middle"), ["data-middle"]),
        (shift(-0.6, positional="none", training="last", depth=4), ["data-last"]),
        (abs, ["lost-in-the-middle-gaps"]),
        (shift([0.6, 0, -0.6], positional="rope", training="unbiased"), ["lost-in-the-middle-two-ends"]),
        (shift(0.1, mask="full"), ["full-even", "full-even-encoded"]),
        (lambda gap: gap.where(gap["residual"] == "off", gap.sel(residual="off")), ["residual-weaker"]),
        (turned(data="fixed"), ["fixed-vocabulary"]),
    ],
)
def test_statements_fail_where_they_do_not_hold(change, refuted):
    assert {f"{name}-text" for name in refuted} <= questioned("position-bias", published(change), "wu-toy-")


FEW: Any = {"residual": ("on",), "training": ("unbiased",), "data": ("gaussian",), "masks": ("causal",), "seeds": 3}


def test_a_dip_by_accuracy_needs_a_dip():
    ds = published(s=replace(EVERYTHING, depths=(2,), data=("gaussian",), masks=("causal",)))
    level = ds.assign(accuracy_by_position=ds["accuracy_by_position"] * 0 + 0.5)
    assert "lost-in-the-middle-accuracy-text" in questioned("position-bias", level, "wu-toy-")


def test_scales_are_compared_and_what_one_measures_has_no_row_for_the_other():
    s = Settings(depths=(2,), positional=("none", "rope"), steps=10, checks=1, **FEW)
    found = judged(published(s=s).where(lambda ds: (ds["scale"] == "text") | (ds["positional"] == "none")))
    assert found["text-and-program"] is True
    assert judged(published(turned(scale="program"), s))["text-and-program"] is False
    assert {"causal-favours-earlier-text", "causal-favours-earlier-program", "rope-favours-recent-text"} <= {*found}
    assert "rope-favours-recent-program" not in found
    assert sum("data-first" in name for name in found) == 1  # measured at neither


def test_the_same_biases_are_the_same_in_every_gap():
    def found(*means: float) -> str:
        runs = (np.add.outer(gaps, [-0.001, 0.0, 0.001]) for gaps in ((0.3, 0.2, 0.0), means))
        _, test = agreement(*(xr.DataArray(x, dims=("pair", "seed")) for x in runs))
        assert test is not None
        return test(SURE)

    assert found(0.1, 0.4, 0.01) == "holds"  # the last is none in both
    assert (found(0.1, 0.4, 0.1), found(0.1, -0.4, 0.1)) == ("undecided", "does not hold")


def test_what_lies_within_the_spread_of_runs_or_was_not_run_is_not_decided():
    both = FEW | {"residual": ("off", "on"), "training": ("unbiased", "last")}
    s = Settings(depths=(2,), positional=("none",), scales=("text",), steps=10, **both)  # three gaps differ by 0.001
    for gap, earlier, last in ((-0.03, False, False), (0.0, None, True), (0.03, True, True)):
        found = judged(published(lambda values, gap=gap: 0 * values + gap, s))
        assert (found["causal-favours-earlier-text"], found["data-last-text"]) == (earlier, last)
        assert all(holds is None for name, holds in found.items() if "depth" in name or "decay" in name)
    (weaker,) = (one for one in claims(published(turned(residual="on"), s)) if "residual-weaker" in one.id)
    assert (weaker.verdict, "a gap changes its sign: 1" in weaker.measured) == ("undecided", True)


def test_toys_that_do_not_retrieve_are_not_judged():
    def found(ds):
        return {c.id.removeprefix("wu-toy-").removesuffix("-text"): c for c in claims(ds)}

    ds = published(s=replace(EVERYTHING, data=("gaussian",)))
    ds["novel_accuracy"].loc[{"positional": "rope", "training": "unbiased"}] -= 0.29
    rows = found(ds)
    assert rows["rope-favours-recent"].verdict == "not trained"
    assert rows["learns"].verdict == "does not hold"
    # Who copies the label of one place is not judged, whatever the same toys learn from unbiased data.
    ds["novel_accuracy"].loc[{"training": "first", "positional": ["decay", "none"]}] = 0.516
    shown = found(ds)["data-first"].measured
    assert ("sinusoidal, first" in shown, "decay" in shown, "rope" in shown) == (True, False, False)
    # Where toys learn with a residual stream alone, those are judged.
    ds["novel_accuracy"].loc[{"residual": "off"}] = 0.5
    ds["novel_accuracy"].loc[{"mask": "full"}] = 0.5
    rows = found(ds)
    assert rows["causal-favours-earlier"].measured.startswith("with residual stream: depth 2, first-middle +0.06")
    assert rows["full-even"].verdict == rows["full-even-encoded"].verdict == "not trained"
