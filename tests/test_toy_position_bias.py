"""Experiment position-bias: the grid, a tiny run through the frame, the claims' rules both ways, figures."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from tiny_runs import TINY, changed, questioned, verdicts

from probes.errors import InputError
from probes.results.dataset import made_with
from toy.experiments import experiment
from toy.experiments import position_bias as module
from toy.experiments.in_context import PARTS, generator_of
from toy.experiments.learnt import remade
from toy.experiments.position_bias import DIMS, ITEMS, MEASURES, ORDERS, PAIRS, QUICK, Case, Settings, cases
from toy.experiments.position_bias_claims import agreement, claims, over_seeds, tables
from toy.experiments.sweep import Part, sweep
from toy.figures.position_bias import position_bias_curves_figure
from toy.train import logits, train


@pytest.fixture(scope="module")
def everything():
    return made_up()


def made_up(change: Callable[[Case, np.ndarray], np.ndarray] | None = None, s: Settings | None = None) -> xr.Dataset:
    """A result in which everything that was published holds; `change` may alter the gaps [pair] of a case."""
    s = s or Settings(depths=(2, 4, 6), residual=("off", "on"), scales=("text",), seeds=3, steps=1000, checks=1)
    steps = module.check_steps(s)

    def found():
        for case in cases(s):
            gap = published(case) if change is None else change(case, published(case))
            gap = gap + 1e-3 * case.seed
            dip = 0.2 if case.training == "first-and-last" else 0.0
            accuracy = np.stack([0.8 + gap / 2, 0.8 - gap / 2], -1)
            curve = 0.5 + dip * np.abs(np.linspace(-1, 1, ITEMS))
            course = np.repeat(accuracy[..., None], len(steps), -1), np.repeat(gap[:, None], len(steps), -1)
            told = np.full(len(steps), accuracy.mean())  # of novel classes, all of them labels of the context
            learning = (told[-1], told, told * 0 + 1, np.broadcast_to(told, (case.depth, len(PARTS), len(steps))))
            values = (accuracy, gap, curve, *course, np.ones(len(steps)), *learning, 0.125)
            yield case, dict(zip(MEASURES, values, strict=False))  # without sinks

    coords = {"pair": list(PAIRS), "order": list(ORDERS), "position": np.arange(ITEMS), "step": steps}
    coords |= {"layer": np.arange(max(s.depths)), "part": list(PARTS)}
    own = {"settings": asdict(s), "published_settings": asdict(Settings()), "hardware": "made up", "seconds": 1.0}
    return sweep(module.axes_of(s) | coords, Part(DIMS, MEASURES, found()), attrs=own | {"quick": 0} | made_with())


LEARNT = {  # gaps of the three pairs that biased training adds
    "unbiased": [0.0, 0.0, 0.0],
    "first": [0.3, 0.3, 0.2],
    "middle": [-0.5, 0.0, 0.5],
    "last": [-0.3, -0.3, -0.3],
    "first-and-last": [0.5, 0.0, -0.5],
}


WITH_STREAM = {2: 0.4, 4: 0.8, 6: 0.5}  # by depth, what a residual stream leaves of the bias


def published(case: Case) -> np.ndarray:
    if case.mask == "full" and case.training == "unbiased":
        return np.zeros(3)
    even = {"none": 0.2, "decay": -0.2, "rope": -0.15, "sinusoidal": 0.1}[case.positional] + 0.03 * case.depth
    learns = (case.training, case.positional) != ("last", "none")
    gap = even * np.array([0.6, 1.0, 0.5]) * (WITH_STREAM[case.depth] if case.residual == "on" else 1.0)
    return gap + learns * np.array(LEARNT[case.training])


def judged(ds: xr.Dataset) -> dict[str, bool | None]:
    """By id; the statements about sinks have tests of their own."""
    found = verdicts("position-bias", ds, "wu-toy-")
    return {name: holds for name, holds in found.items() if not name.startswith("sink-")}


def test_published_grid_is_every_combination_that_there_is():
    settings = Settings()
    found = cases(settings)
    assert len(set(found)) == len(found) == 2 * 2 * 3 * 2 * 5 * (4 + 3) * 5
    assert not [c for c in found if c.positional == "decay" and c.mask == "full"]
    order = [(c.scale, c.data, c.depth, c.seed) for c in found]  # whole seeds of whole depths
    assert order == sorted(order, key=lambda x: (x[0] == "program", x[1] == "fixed", *x[2:]))
    for part in module.parts(found, "cpu"):
        assert len({(c.scale, c.data, c.depth, c.seed, c.training) for c in part}) == 1
        assert len({module.run_of(c, settings).task for c in part}) == 1
    assert [len(part) for part in module.parts(found, "cuda")] == [len(found) // 3] * 3
    assert sorted(repr(c) for part in module.parts(found, "cpu") for c in part) == sorted(map(repr, found))
    back = Case("text", "gaussian", 2, "prefix-4", "decay", "off", "unbiased", 0)  # decay needs a mask that looks back
    assert not module.in_grid(back)
    assert module.in_grid(back._replace(mask="window-4"))
    assert module.in_grid(back._replace(positional="none"))


def test_checks_run_to_the_last_step():
    steps = module.check_steps(Settings())
    assert (steps[0], steps[-1], len(steps)) == (100, 100_000, 10)
    assert module.check_steps(replace(QUICK, checks=1)) == [600]
    assert module.check_steps(Settings(steps=3)) == [3]


def test_masks_by_name():
    assert module.switches_of("causal") == {"mask": "causal"}
    assert module.switches_of("full") == {"mask": "full"}
    assert module.switches_of("window-5") == {"mask": "window", "window": 5}
    assert module.switches_of("prefix-2") == {"mask": "prefix", "prefix": 2}
    for name in ("causal-5", "window", "window-", "window-x", "window--1", "", "sliding-5"):
        with pytest.raises(InputError, match=r"unknown; give causal, full, window-N"):
            module.switches_of(name)


def test_a_plan_is_the_contrasts_of_the_paper():
    masks = ("causal", "full", "window-5", "window-9", "window-13", "prefix-2", "prefix-4", "prefix-6")
    s = Settings(plan="contrasts", masks=masks, residual=("on", "off"), scales=("text",), depths=(2, 4), seeds=3)
    found = cases(s)
    assert len(found) == len({*found}) == 3 * (4 * 5 + 3 * 3 + 6 + 4 + 2) + 2 * 4
    assert {c.training for c in found if c.mask == "full"} == {"unbiased", "first", "last"}
    assert {(c.mask, c.training) for c in found if c.residual == "off"} == {("causal", "unbiased")}
    assert {c.positional for c in found if c.data == "fixed"} == {"none", "rope"}
    assert {c.seed for c in found if c.depth == 4} == {0, 1}


def test_a_tiny_run_has_every_model_of_its_grid_and_no_other(tiny):
    ds = tiny.ds
    s = experiment.settings_of("position-bias", quick=False, given=TINY["position-bias"])
    assert ds["gap"].dims == (*DIMS, "pair")
    there = ds["gap"].notnull().all("pair")
    assert (there == ds["gap"].notnull().any("pair")).all()
    assert sorted(module.measured_in(ds)) == sorted(cases(s))
    for name in ("accuracy", "accuracy_by_position", "course_accuracy", "training_loss"):
        others = [dim for dim in ds[name].dims if dim not in DIMS]
        assert (ds[name].notnull().all(others) == there).all()
    np.testing.assert_array_equal(ds["gap"], ds["accuracy"].sel(order="earlier") - ds["accuracy"].sel(order="later"))
    # The last check is the trained model, on as many sequences.
    np.testing.assert_array_equal(ds["course_accuracy"].isel(step=-1), ds["accuracy"])
    np.testing.assert_array_equal(ds["course_gap"].isel(step=-1), ds["gap"])
    assert ds["step"].values.tolist() == [6]  # checks begin at step 100, or at the end of shorter training
    assert len(tiny.report.tables[0].rows) == len({c._replace(seed=0, training="") for c in cases(s)})
    parts = ("", "-curves", "-learning", "-full-curves", "-full-learning", "-masks", "-text-fixed", "-sinks")
    assert {file.name for file in tiny.files} >= {f"position-bias{part}.png" for part in parts}


def test_results_add_up(tmp_path, monkeypatch):
    """Two parts of a grid, one after the other, give what the whole gives; nothing is trained twice."""
    monkeypatch.setattr(experiment, "draw", lambda *_: [])
    few = ["depths=1", "residual=off", "data=gaussian", "scales=text", "masks=causal", "width=8", "batch=8", "steps=3"]
    few += ["tests=20", "course-tests=20", "checks=1"]
    first = [*few, "positional=rope,none", "training=unbiased", "seeds=1"]
    more = [*few, "positional=none", "training=first,unbiased", "seeds=2"]
    trained: list[int] = []
    train_all = module.trained

    def counted(s: Any, found: Any, *rest: Any) -> Any:
        trained.append(len(found))
        return train_all(s, found, *rest)

    monkeypatch.setattr(module, "trained", counted)
    said: list[str] = []
    runs = [
        experiment.run("position-bias", tmp_path, given=given, device="cpu", told=said.append)[0]
        for given in (first, first, more)
    ]
    assert trained == [2, 0, 3]
    there = f"'{tmp_path / module.RESULT}' holds"
    assert said == [
        f"{there} 2 of the 2 models asked for, and 0 others",
        f"{there} 1 of the 4 models asked for, and 1 others",
    ]
    xr.testing.assert_identical(runs[1].drop_attrs(), runs[0].drop_attrs())
    (alone, _, _) = experiment.run("position-bias", tmp_path / "alone", given=more, device="cpu")
    for one in (runs[0], alone):
        for case in module.measured_in(one):
            xr.testing.assert_equal(
                runs[2].sel(case._asdict()).drop_vars("training_loss"),
                one.sel(case._asdict()).drop_vars("training_loss"),
            )
    assert len(module.measured_in(runs[2])) == 5
    assert runs[2]["positional"].values.tolist() == ["none", "rope"]
    own = json.loads(runs[2].attrs["settings"])
    assert (own["training"], own["seeds"], own["plan"]) == (["unbiased", "first"], 2, "product")
    assert runs[2].attrs["seconds"] >= runs[0].attrs["seconds"]
    with pytest.raises(InputError, match=r"position-bias\.nc' was made with steps=3, not 4; give the same to add"):
        experiment.run("position-bias", tmp_path, given=[*(x for x in first if x != "steps=3"), "steps=4"])


def test_a_result_of_several_commands_names_what_makes_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "draw", lambda *_: [])
    few = ["depths=1", "residual=off", "data=gaussian", "scales=text", "masks=causal", "width=8", "batch=8", "steps=1"]
    few += ["tests=9", "course-tests=9", "checks=1", "seeds=1", "training=unbiased"]
    said = []
    for names in ("none", "rope", "none,rope"):
        monkeypatch.setattr("probes.results.dataset._command", f"headwater {names} --out 'a b'")
        given = [*few, f"positional={names}"]
        said.append(experiment.run("position-bias", tmp_path, given=given, device="cpu")[0].attrs["command"])
    assert said[::2] == ["headwater none --out 'a b'", "headwater none,rope --out 'a b'"]
    assert "--with positional=none,rope" in said[1]
    assert said[1].endswith("--with course-tests=9 --with width=8 --with batch=8 --out 'a b'")


def test_commands_make_the_models_that_they_are_for():
    given = ["depths=2,4", "data=gaussian", "masks=causal,full", "seeds=3", "steps=3", "checks=2"]
    settings = experiment.settings_of("position-bias", quick=False, given=given)
    every = module.cases(settings)
    found = {case for case in every if case.seed < 2 or case.positional == "rope"} - {every[0], every[-1]}
    found |= {every[0]._replace(seed=seed) for seed in range(2)}
    told = module.commands(found, vars(settings), "headwater --out there").split("; ")
    assert len(told) < len(found) / 4
    again = [experiment.settings_of("position-bias", quick=False, given=one.split()[4:-2:2]) for one in told]
    assert {case for one in again for case in module.cases(one)} == found
    assert {(one.steps, one.checks) for one in again} == {(3, 2)}


def test_a_comparison_of_two_kinds_of_data_names_what_both_have(everything):
    both = (everything["data"] == "gaussian") | (everything["positional"] == "none")
    ds = everything.where(both).assign_attrs(command="headwater --out x; headwater --out x")
    given = {"one": {"data": "gaussian"}, "other": {"data": "fixed"}, "scale": "text", "training": "unbiased"}
    (told,) = remade(ds)(given).split("; ")
    assert "--with data=fixed,gaussian " in told
    assert "--with positional=none " in told


def test_numbers_of_a_run_are_those_of_its_models(tiny):
    settings = experiment.settings_of("position-bias", quick=False, given=TINY["position-bias"])
    case = Case("text", "gaussian", 2, "causal", "rope", "off", "first-and-last", 1)
    (model,) = train([module.run_of(case, settings)], settings.steps)
    task: Any = model.run.task
    world = task.world(1, "cpu")
    here = tiny.ds.sel({dim: getattr(case, dim) for dim in DIMS})

    def share(drawn):
        return float((logits([model], drawn.inputs[0])[0].argmax(-1) == drawn.hidden[0]).float().mean())

    tie = 1.01 / settings.tests
    for n, (earlier, later) in enumerate(PAIRS.values()):
        for m, (right, wrong) in enumerate(((earlier, later), (later, earlier))):
            generator = generator_of(torch.device("cpu"), "pairs", 1, n, m)
            drawn = task.pairs(world, generator, settings.tests, right, wrong)
            assert float(here["accuracy"][n, m]) == pytest.approx(share(drawn), abs=tie)
    drawn = task.single(world, generator_of(torch.device("cpu"), "single", 1, 5), settings.tests, 5)
    assert float(here["accuracy_by_position"][5]) == pytest.approx(share(drawn), abs=tie)
    assert float(here["training_loss"][-1]) == pytest.approx(float(model.losses.mean()), rel=1e-5)


def test_learning_is_told_by_seed_and_by_the_step_from_which_on_it_stays():
    s = replace(QUICK, positional=("none",), training=("unbiased",), masks=("causal",), steps=1000)
    ds = made_up(s=s)
    ds["course_novel"].loc[{"seed": 0}] = np.array([0.5, 0.9, 0.8]).reshape(-1)
    ds["course_novel"].loc[{"seed": 1}] = np.array([0.9, 0.7, 0.6]).reshape(-1)
    (row,) = tables(ds)[2].rows
    assert row[8] == "316, -"
    assert (row[7], *row[9:11], row[-1]) == ("0.800, 0.800", "1.000, 1.000", "0.125, 0.125", "trained")
    assert tables(ds.drop_vars("by_heart"))[2].rows[0][10] == "-, -"  # results of before


def test_intervals_over_seeds():
    middle, low, high = over_seeds(np.array([1.0, 2.0, 3.0]))
    assert (middle, high - 2) == (2.0, pytest.approx(4.302653 / math.sqrt(3), rel=1e-6))
    assert low == pytest.approx(4 - high)
    assert over_seeds(np.array([1.0, np.nan, 3.0])) == (2.0, 1.0, 3.0)
    assert over_seeds(np.array([2.0]))[0] == 2.0
    assert np.isnan(over_seeds(np.array([2.0]))[1:]).all()
    assert np.isnan(over_seeds(np.array([np.nan]))).all()


def test_all_statements_hold_where_they_do(everything):
    found = judged(everything)
    assert [name for name, holds in found.items() if holds is not True] == ["text-and-program"]  # one scale
    assert len(found) == 27


def deep(case: Case, gap: np.ndarray) -> np.ndarray:
    return gap - 0.06 * case.depth


def only(positional, training, by: Any, depth=None):
    def change(case, gap):
        mine = case.positional == positional and training == case.training and depth in (None, case.depth)
        return gap + by if mine else gap

    return change


def turned(**which: str):
    """The other sign for some models."""
    return lambda case, gap: -gap if all(getattr(case, dim) == value for dim, value in which.items()) else gap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("causal-favours-earlier", only("none", "unbiased", np.array([0, 0, -0.2]), depth=4)),
        ("causal-favours-earlier-fixed", turned(data="fixed")),
        ("middle-last-smallest-fixed", only("none", "unbiased", np.array([0, 0, 0.5]))),
        ("causal-grows-with-depth", deep),
        ("decay-depth-favours-earlier", deep),
        ("rope-depth-favours-earlier", deep),
        ("decay-favours-recent", only("decay", "unbiased", 0.5, depth=4)),
        ("rope-favours-recent", only("rope", "unbiased", 0.5, depth=2)),
        ("data-first", only("rope", "first", -0.4, depth=2)),
        ("data-middle", only("none", "middle", np.array([0.6, 0, 0]))),
        ("data-last", only("none", "last", -0.6, depth=4)),
        ("lost-in-the-middle-gaps", lambda case, gap: np.abs(gap)),
        ("residual-same-sign", turned(residual="on")),
        ("residual-weaker", lambda case, gap: gap / WITH_STREAM[case.depth] if case.residual == "on" else gap),
        ("fixed-vocabulary", turned(data="fixed")),
        ("decay-beyond-rope", only("rope", "unbiased", -0.3)),
        ("middle-last-smallest", only("none", "unbiased", np.array([0, 0, 0.5]))),
        ("full-even", lambda case, gap: gap + 0.1 * (case.mask == "full")),
        ("full-even-encoded", lambda case, gap: gap + 0.1 * (case.mask == "full")),
        ("full-follows", lambda case, gap: gap * (case.mask != "full")),
        ("sinusoidal-follows", only("sinusoidal", "last", np.array([0, 0.6, 0.6]))),
        ("causal-follows-first", only("none", "first", -0.6)),
        ("lost-in-the-middle-two-ends", only("rope", "unbiased", np.array([0.6, 0, -0.6]))),
        (
            "lost-in-the-middle-two-ends",
            lambda case, gap: np.array([1, 0, -1]) if (case.training, case.residual) == ("unbiased", "on") else gap,
        ),
        ("residual-not-monotonic", lambda case, gap: gap + 0.1 * case.depth * (case.residual == "on")),
    ],
)
def test_statements_fail_where_they_do_not_hold(name, change):
    assert f"{name}-text" in questioned("position-bias", made_up(change), "wu-toy-")


def test_scales_are_compared():
    lists: Any = {"positional": ("none",), "training": ("unbiased",), "scales": ("text", "program")}
    s = replace(QUICK, masks=("causal",), seeds=3, **lists)
    assert judged(made_up(s=s))["text-and-program"] is True
    assert judged(made_up(turned(scale="program"), s))["text-and-program"] is False


def test_the_same_biases_are_the_same_in_every_gap():
    def found(*means: float) -> str:
        runs = (np.add.outer(gaps, [-0.001, 0.0, 0.001]) for gaps in ((0.3, 0.2, 0.0), means))
        return str(agreement(*(xr.DataArray(x, dims=("pair", "seed")) for x in runs)).verdict)

    assert found(0.1, 0.4, 0.01) == "holds"  # the last is none in both
    assert (found(0.1, 0.4, 0.1), found(0.1, -0.4, 0.1)) == ("undecided", "does not hold")


def test_what_is_neither_amplified_nor_followed():
    lists: Any = {"residual": ("off", "on"), "training": ("unbiased", "last"), "positional": ("none",)}
    s = replace(QUICK, masks=("causal",), seeds=3, **lists)
    (weaker,) = (one for one in claims(made_up(turned(residual="on"), s)) if one.id == "wu-toy-residual-weaker-text")
    assert (weaker.verdict, "a gap changes its sign: 1" in weaker.measured) == ("undecided", True)
    for gap, holds in ((-0.01, True), (-0.03, False)):  # by which the last item wins
        assert judged(made_up(lambda case, _, gap=gap: np.full(3, gap), s))["data-last-text"] is holds


def test_what_one_scale_measures_has_no_row_for_the_other():
    few: Any = {"residual": ("on",), "training": ("unbiased",), "data": ("gaussian",), "masks": ("causal",), "seeds": 2}
    both = Settings(depths=(2,), positional=("none", "rope"), steps=10, checks=1, **few)
    ds = made_up(s=both)
    names = {claim.id for claim in claims(ds.where((ds["scale"] == "text") | (ds["positional"] == "none")))}
    assert {f"wu-toy-causal-favours-earlier-{scale}" for scale in ("text", "program")} <= names
    assert "wu-toy-rope-favours-recent-text" in names
    assert "wu-toy-rope-favours-recent-program" not in names
    assert sum("data-first" in name for name in names) == 1  # measured at neither


def test_a_dip_by_accuracy_needs_a_dip(everything):
    ds = changed(everything, "accuracy_by_position", lambda x: x * 0 + 0.5)
    assert "lost-in-the-middle-accuracy-text" in questioned("position-bias", ds, "wu-toy-")


def test_what_was_not_run_is_not_judged():
    few = Settings(depths=(2,), positional=("none",), residual=("on",), training=("unbiased",), data=("fixed",))
    plain = replace(few, residual=("off",), data=("gaussian",))
    for settings in (few, replace(plain, seeds=1), replace(few, masks=("full",))):
        ds = made_up(s=replace(settings, steps=10, checks=1))
        assert all(holds is None for name, holds in judged(ds).items() if "depth" in name or "decay" in name)
        assert len(tables(ds)) == 3
    assert judged(made_up(s=plain))["causal-favours-earlier-text"] is True


def test_a_gap_within_the_spread_of_runs_is_undecided():
    s = replace(QUICK, seeds=3)  # gaps of the three differ by 0.001 each
    for gap, found in ((-0.01, "does not hold"), (0.0, "undecided"), (0.01, "holds")):
        ds = made_up(lambda case, _, gap=gap: np.full(3, gap), s)
        assert claims(ds)[1].verdict == found


@pytest.mark.slow
def test_toys_that_do_not_retrieve_are_not_judged():
    def found(ds):
        return {c.id.removeprefix("wu-toy-").removesuffix("-text"): c for c in claims(ds)}

    ds = made_up(s=Settings(scales=("text",), data=("gaussian",), depths=(2, 4), seeds=3, steps=1000, checks=1))
    ds["novel_accuracy"].loc[{"positional": "rope", "training": "unbiased"}] -= 0.29
    rows = found(ds)
    assert rows["rope-favours-recent"].verdict == "not trained"
    said = rows["rope-favours-recent"].measured
    assert said.startswith("4 of 8 settings have not learnt after 1,000 steps; accuracy on novel classes (blind to")
    assert said.count("RoPE, with") == said.count("blocks 0.51") == 4
    assert "no encoding" not in said
    assert rows["learns"].verdict == "does not hold"
    assert rows["decay-favours-recent"].verdict == rows["full-even"].verdict == "holds"
    assert "Left out" not in rows["decay-favours-recent"].measured
    judged_on, left_out = rows["data-first"].measured.split(". Left out: ")
    assert "rope" not in judged_on  # a shift needs unbiased data
    assert left_out.startswith("settings that have not learnt after 1,000 steps")
    assert left_out.count("RoPE, without") == left_out.count("RoPE") == 2  # with residual stream nothing is judged
    # Who copies the label of one place is not judged, whatever the same toys learn from unbiased data.
    copies = ds.copy(deep=True)
    copies["novel_accuracy"].loc[{"training": "first", "positional": ["decay", "none"]}] = 0.516
    rows = found(copies)
    judged_on, left_out = rows["data-first"].measured.split(". Left out: ")
    assert "sinusoidal, first" in judged_on
    assert "decay" not in judged_on
    assert "no encoding, without residual stream, 2 blocks, answers first" in left_out
    assert left_out.endswith("; and 2 more")
    # A rule on all trainings names those of biased data that it leaves out.
    assert "decay mask, without residual stream, 2 blocks, answers first" in rows["residual-same-sign"].measured
    copies["novel_accuracy"].loc[{"training": "first"}] = 0.516
    rows = found(copies)
    assert rows["data-first"].verdict == "not trained"
    assert "decay mask, without residual stream, 2 blocks, answers first 0.516 [0.5" in rows["data-first"].measured
    assert rows["decay-favours-recent"].verdict == "holds"
    # Where toys learn with a residual stream alone, those are judged.
    ds["novel_accuracy"].loc[{"residual": "off"}] = 0.5
    ds["novel_accuracy"].loc[{"mask": "full"}] = 0.5
    rows = found(ds)
    assert rows["causal-favours-earlier"].measured.startswith("with residual stream: first-middle: depth 2: +0.06")
    assert rows["causal-favours-earlier"].verdict == "holds"
    assert rows["full-even"].verdict == rows["full-even-encoded"].verdict == "not trained"
    assert "RoPE, with residual stream, 2 blocks, full mask 0.500" in rows["full-even-encoded"].measured
    ds = ds.drop_vars("novel_accuracy")  # as results of before, whose paired tests decide
    ds["accuracy"].loc[{"training": "unbiased"}] = [0.9, 0.6]  # 0.75 on average, and hardly surely
    ds["accuracy"].loc[{"training": "unbiased", "seed": 0}] += 0.01
    assert found(ds)["causal-favours-earlier"].verdict == "not trained"
    assert {c.verdict for c in claims(ds.sel(training=["last"]))} <= {"holds", "undecided", "not measured"}


def test_curves_are_drawn_of_the_seeds_that_there_are():
    many: Any = {"residual": ("off", "on"), "masks": ("causal",), "seeds": 2}
    ds = made_up(s=Settings(depths=(2,), scales=("text",), steps=1000, checks=3, **many))
    fewer = ds.where((ds["residual"] == "on") | (ds["seed"] == 0))  # as when another setting was given a second seed
    for given in (ds, fewer):
        cell = position_bias_curves_figure(given, at={"scale": "text", "data": "gaussian", "mask": "causal"}).axes[0]
        curves = [line.get_ydata() for line in cell.lines if len(line.get_xdata()) == ITEMS]
        assert len(curves) == 8
        assert np.isfinite(curves).all()
