"""Experiment position-bias: the grid, a tiny run through the frame, the rules of the statements both ways."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from tiny_runs import TINY, questioned, verdicts

from probes.errors import InputError
from probes.results.dataset import made_with
from toy.experiments import experiment
from toy.experiments.in_context import PARTS, generator_of
from toy.experiments.learnt import DIMS
from toy.experiments.position_bias import training as module
from toy.experiments.position_bias.chart import over_seeds
from toy.experiments.position_bias.statements import agreement, claims, tables
from toy.experiments.position_bias.training import ITEMS, MEASURES, ORDERS, PAIRS, QUICK, Case, Settings, cases
from toy.experiments.sweep import Part, sweep
from toy.train import logits, train

LEARNT = {  # gaps of the three pairs that biased training adds
    "unbiased": [0.0, 0.0, 0.0],
    "first": [0.3, 0.3, 0.2],
    "middle": [-0.5, 0.0, 0.5],
    "last": [-0.3, -0.3, -0.3],
    "first-and-last": [0.5, 0.0, -0.5],
}
WITH_STREAM = {2: 0.4, 4: 0.8, 6: 0.5}  # by depth, what a residual stream leaves of the bias
ENCODED = {"none": 0.2, "decay": -0.2, "rope": -0.15, "sinusoidal": 0.1}
EVERYTHING = Settings(scales=("text",), seeds=3, steps=1000, checks=1)


def published(case: Case) -> np.ndarray:
    """Gaps by which everything that was published holds."""
    if case.mask == "full" and case.training == "unbiased":
        return np.zeros(3)
    stream = WITH_STREAM[case.depth] if case.residual == "on" else 1.0
    gap = (ENCODED[case.positional] + 0.03 * case.depth) * np.array([0.6, 1.0, 0.5]) * stream
    return gap + ((case.training, case.positional) != ("last", "none")) * np.array(LEARNT[case.training])


def made_up(change: Callable[[Case, np.ndarray], Any] = lambda case, gap: gap, s: Settings = EVERYTHING) -> xr.Dataset:
    """A result with the published gaps, which `change` may alter, case by case; without sinks."""
    steps = module.check_steps(s)

    def cells():
        for case in cases(s):
            gap = change(case, published(case)) + 1e-3 * case.seed
            dip = 0.2 if case.training == "first-and-last" else 0.0
            accuracy = np.stack([0.8 + gap / 2, 0.8 - gap / 2], -1)
            course = np.repeat(accuracy[..., None], len(steps), -1), np.repeat(gap[:, None], len(steps), -1)
            novel = np.full(len(steps), accuracy.mean())  # all answers are labels of the context
            learning = (novel[-1], novel, novel * 0 + 1, np.broadcast_to(novel, (case.depth, len(PARTS), len(steps))))
            by_position = 0.5 + dip * np.abs(np.linspace(-1, 1, ITEMS))
            values = (accuracy, gap, by_position, *course, np.ones(len(steps)), *learning, 0.125)
            yield case, dict(zip(MEASURES, values, strict=False))

    coords = {"pair": list(PAIRS), "order": list(ORDERS), "position": np.arange(ITEMS), "step": steps}
    coords |= {"layer": np.arange(max(s.depths)), "part": list(PARTS)}
    attrs = {"settings": asdict(s), "published_settings": asdict(Settings()), "hardware": "none", "seconds": 1.0}
    return sweep(module.axes_of(s) | coords, Part(DIMS, MEASURES, cells()), attrs=attrs | {"quick": 0} | made_with())


def judged(ds: xr.Dataset) -> dict[str, bool | None]:
    """By id; the statements about sinks have tests of their own."""
    return {name: holds for name, holds in verdicts("position-bias", ds, "wu-toy-").items() if "sink-" not in name}


def test_grid_is_every_combination_that_there_is_and_a_plan_the_contrasts_of_the_paper():
    grid = cases(Settings())
    assert len(set(grid)) == len(grid) == 2 * 2 * 3 * 2 * 5 * (4 + 3) * 5
    assert not [c for c in grid if c.positional == "decay" and c.mask == "full"]
    order = [(c.scale == "program", c.data == "fixed", c.depth, c.seed) for c in grid]
    assert order == sorted(order)  # whole seeds of whole depths
    parts = module.parts(grid, "cpu").values()
    assert all(len({module.run_of(c, Settings()).task for c in part}) == 1 for part in parts)
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
    assert module.switches_of("window-5") == {"mask": "window", "window": 5}
    for name in ("causal-5", "window", "window-", "window-x", "window--1", "", "sliding-5"):
        with pytest.raises(InputError, match=r"unknown; give causal, full, window-N"):
            module.switches_of(name)
    for given, says in (({"masks": ("full",), "positional": ("decay",)}, "nothing is left"), ({"tau": 1.0}, "tau=1")):
        with pytest.raises(InputError, match=says):
            Settings(**given)


def test_a_tiny_run_has_every_model_of_its_grid_and_the_numbers_of_its_models(tiny):
    ds, s = tiny.ds, experiment.settings_of("position-bias", quick=False, given=TINY["position-bias"])
    there = ds["gap"].notnull().all("pair")
    assert int(there.sum()) == len(cases(s))
    assert all(bool(there.sel(case._asdict())) for case in cases(s))
    for name in ("accuracy", "accuracy_by_position", "course_accuracy", "training_loss"):
        assert (ds[name].notnull().all([dim for dim in ds[name].dims if dim not in DIMS]) == there).all()
    np.testing.assert_array_equal(ds["gap"], ds["accuracy"].sel(order="earlier") - ds["accuracy"].sel(order="later"))
    # The last check is the trained model, on as many sequences.
    np.testing.assert_array_equal(ds["course_accuracy"].isel(step=-1), ds["accuracy"])
    assert ds["step"].values.tolist() == [6]  # checks begin at step 100, or at the end of shorter training
    assert len(tiny.report.tables[0].rows) == len({c._replace(seed=0, training="") for c in cases(s)})
    assert {file.name for file in tiny.files} >= {"position-bias.png", "position-bias-sinks.png"}

    case = Case("text", "gaussian", 2, "causal", "rope", "off", "first-and-last", 1)
    (model,) = train([module.run_of(case, s)], s.steps)
    task: Any = model.run.task
    world, here, cpu = task.world(1, "cpu"), ds.sel(case._asdict()), torch.device("cpu")

    def share(drawn):
        right = logits([model], drawn.inputs[0])[0].argmax(-1) == drawn.hidden[0]
        return pytest.approx(float(right.float().mean()), abs=1.01 / s.tests)  # a tie of logits at most

    for n, (earlier, later) in enumerate(PAIRS.values()):
        for m, (right, wrong) in enumerate(((earlier, later), (later, earlier))):
            drawn = task.pairs(world, generator_of(cpu, "pairs", 1, n, m), s.tests, right, wrong)
            assert float(here["accuracy"][n, m]) == share(drawn)
    drawn = task.single(world, generator_of(cpu, "single", 1, 5), s.tests, 5)
    assert float(here["accuracy_by_position"][5]) == share(drawn)
    assert float(here["training_loss"][-1]) == pytest.approx(float(model.losses.mean()), rel=1e-5)


def test_learning_is_told_by_seed_and_by_the_step_from_which_on_it_stays():
    s = replace(QUICK, positional=("none",), training=("unbiased",), masks=("causal",), steps=1000)
    ds = made_up(s=s)
    ds["course_novel"].loc[{"seed": 0}] = np.array([0.5, 0.9, 0.8]).reshape(-1)
    ds["course_novel"].loc[{"seed": 1}] = np.array([0.9, 0.7, 0.6]).reshape(-1)
    (row,) = tables(ds)[2].rows
    assert row[8] == "316, -"
    assert (row[7], *row[9:11], row[-1]) == ("0.800, 0.800", "1.000, 1.000", "0.125, 0.125", "trained")


def test_intervals_over_seeds():
    middle, low, high = over_seeds(np.array([1.0, 2.0, 3.0]))
    assert (middle, high - 2) == (2.0, pytest.approx(4.302653 / math.sqrt(3), rel=1e-6))
    assert low == pytest.approx(4 - high)
    assert over_seeds(np.array([1.0, np.nan, 3.0])) == (2.0, 1.0, 3.0)
    assert np.isnan(over_seeds(np.array([2.0]))[1:]).all()


def test_all_statements_hold_where_they_do():
    found = judged(made_up())
    assert [name for name, holds in found.items() if holds is not True] == ["text-and-program"]  # one scale
    assert len(found) == 18


def only(positional: str, training: str, by: Any, *depths: int) -> Any:
    """Other gaps for some models, of all depths where none is given."""

    def change(case: Case, gap: np.ndarray) -> np.ndarray:
        mine = (case.positional, case.training) == (positional, training) and case.depth in (
            depths or EVERYTHING.depths
        )
        return gap + by if mine else gap

    return change


def turned(**which: str) -> Any:
    """The other sign for some models."""
    return lambda case, gap: -gap if all(getattr(case, dim) == value for dim, value in which.items()) else gap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "refuted"),
    [
        (only("none", "unbiased", np.array([0, 0, -0.2]), 4), ["causal-favours-earlier"]),
        (
            lambda case, gap: gap - 0.06 * case.depth,
            ["causal-grows-with-depth", "decay-depth-favours-earlier", "rope-depth-favours-earlier"],
        ),
        (only("decay", "unbiased", 0.5, 4), ["decay-favours-recent"]),
        (only("rope", "unbiased", 0.5, 2), ["rope-favours-recent"]),
        (only("rope", "first", -0.4, 2), ["data-first"]),
        (only("none", "middle", np.array([0.6, 0, 0])), ["data-middle"]),
        (only("none", "last", -0.6, 4), ["data-last"]),
        (lambda case, gap: np.abs(gap), ["lost-in-the-middle-gaps"]),
        (only("rope", "unbiased", np.array([0.6, 0, -0.6])), ["lost-in-the-middle-two-ends"]),
        (lambda case, gap: gap + 0.1 * (case.mask == "full"), ["full-even", "full-even-encoded"]),
        (lambda case, gap: gap / WITH_STREAM[case.depth] if case.residual == "on" else gap, ["residual-weaker"]),
        (turned(data="fixed"), ["fixed-vocabulary"]),
    ],
)
def test_statements_fail_where_they_do_not_hold(change, refuted):
    assert {f"{name}-text" for name in refuted} <= questioned("position-bias", made_up(change), "wu-toy-")


def test_a_dip_by_accuracy_needs_a_dip():
    ds = made_up(s=replace(EVERYTHING, depths=(2,), data=("gaussian",), masks=("causal",)))
    level = ds.assign(accuracy_by_position=ds["accuracy_by_position"] * 0 + 0.5)
    assert "lost-in-the-middle-accuracy-text" in questioned("position-bias", level, "wu-toy-")


def test_scales_are_compared_and_what_one_measures_has_no_row_for_the_other():
    few: Any = {"residual": ("on",), "training": ("unbiased",), "data": ("gaussian",), "masks": ("causal",), "seeds": 3}
    s = Settings(depths=(2,), positional=("none", "rope"), steps=10, checks=1, **few)
    found = judged(made_up(s=s).where(lambda ds: (ds["scale"] == "text") | (ds["positional"] == "none")))
    assert found["text-and-program"] is True
    assert judged(made_up(turned(scale="program"), s))["text-and-program"] is False
    assert {"causal-favours-earlier-text", "causal-favours-earlier-program", "rope-favours-recent-text"} <= {*found}
    assert "rope-favours-recent-program" not in found
    assert sum("data-first" in name for name in found) == 1  # measured at neither


def test_the_same_biases_are_the_same_in_every_gap():
    def found(*means: float) -> str:
        runs = (np.add.outer(gaps, [-0.001, 0.0, 0.001]) for gaps in ((0.3, 0.2, 0.0), means))
        return str(agreement(*(xr.DataArray(x, dims=("pair", "seed")) for x in runs)).verdict)

    assert found(0.1, 0.4, 0.01) == "holds"  # the last is none in both
    assert (found(0.1, 0.4, 0.1), found(0.1, -0.4, 0.1)) == ("undecided", "does not hold")


def test_what_lies_within_the_spread_of_runs_or_was_not_run_is_not_decided():
    s = replace(
        QUICK, seeds=3, residual=("off", "on"), training=("unbiased", "last"), positional=("none",)
    )  # gaps of the three differ by 0.001
    for gap, earlier, last in ((-0.03, False, False), (0.0, None, True), (0.03, True, True)):
        found = judged(made_up(lambda case, _, gap=gap: np.full(3, gap), s))
        assert (found["causal-favours-earlier-text"], found["data-last-text"]) == (earlier, last)
        assert all(holds is None for name, holds in found.items() if "depth" in name or "decay" in name)
    (weaker,) = (one for one in claims(made_up(turned(residual="on"), s)) if "residual-weaker" in one.id)
    assert (weaker.verdict, "a gap changes its sign: 1" in weaker.measured) == ("undecided", True)


@pytest.mark.slow
def test_toys_that_do_not_retrieve_are_not_judged():
    def found(ds):
        return {c.id.removeprefix("wu-toy-").removesuffix("-text"): c for c in claims(ds)}

    ds = made_up(s=replace(EVERYTHING, data=("gaussian",), depths=(2, 4)))
    ds["novel_accuracy"].loc[{"positional": "rope", "training": "unbiased"}] -= 0.29
    rows = found(ds)
    words = rows["rope-favours-recent"].measured
    assert rows["rope-favours-recent"].verdict == "not trained"
    assert words.startswith("4 of 8 settings have not learnt after 1,000 steps; accuracy on novel classes (blind to")
    assert words.count("RoPE, with") == words.count("blocks 0.51") == 4
    assert rows["learns"].verdict == "does not hold"
    assert "Left out" not in rows["decay-favours-recent"].measured
    shown, left_out = rows["data-first"].measured.split(". Left out: ")
    assert "rope" not in shown  # a shift needs unbiased data
    assert left_out.count("RoPE, without") == left_out.count("RoPE") == 2  # with residual stream nothing is judged
    # Who copies the label of one place is not judged, whatever the same toys learn from unbiased data.
    copies = ds.copy(deep=True)
    copies["novel_accuracy"].loc[{"training": "first", "positional": ["decay", "none"]}] = 0.516
    shown, left_out = found(copies)["data-first"].measured.split(". Left out: ")
    assert ("sinusoidal, first" in shown, "decay" in shown) == (True, False)
    assert "no encoding, without residual stream, 2 blocks, answers first" in left_out
    assert left_out.endswith("; and 2 more")
    # Where toys learn with a residual stream alone, those are judged.
    ds["novel_accuracy"].loc[{"residual": "off"}] = 0.5
    ds["novel_accuracy"].loc[{"mask": "full"}] = 0.5
    rows = found(ds)
    assert rows["causal-favours-earlier"].measured.startswith("with residual stream: first-middle: depth 2: +0.06")
    assert rows["full-even"].verdict == rows["full-even-encoded"].verdict == "not trained"
