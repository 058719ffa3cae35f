"""Experiment sinks: the metric against the probe and by hand, a tiny run through the frame, the claims' rules, figures."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from pages import held
from PIL import Image

import probes
from probes.errors import InputError
from probes.results.dataset import load
from toy.experiments import experiment, sinks
from toy.experiments.position_bias import DECAY, architecture_of, switches_of
from toy.experiments.sinks import Settings, metrics, patterns, uniform_sink
from toy.experiments.sinks_claims import claims, kinds, tables
from toy.figures.sinks import draw
from toy.model import Switches, block, embedded, initial
from toy.tasks import InContext
from toy.train import Run, Trained, stacked, train
from toy.view import Toy

MASKS = ("causal", "window-5", "window-9", "prefix-4", "full")
TINY = [
    *("masks=causal,window-5,window-9,prefix-2,prefix-4", "depths=1,2", "residual=off,on", "scales=text", "seeds=2"),
    *("steps=5", "sequences=40", "width=8", "batch=8"),
]
LARGEST = 300_000
LENGTH = 17


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("sinks")
    return *experiment.run("sinks", out, given=TINY, device="cpu"), out


def a_model(mask: str, residual: str = "off", positional: str = "none", depth: int = 3):
    """(architecture, weights without model dimension) whose attention is far from even."""
    a = architecture_of(depth, mask, positional, residual, 16)
    weights = initial(a, 1)
    return a, {name: w * (6.0 if name[2:] in ("q", "k") else 1.0) for name, w in weights.items()}


def passed(a, weights):
    return a, stacked([weights]), Switches.of([a])


# -- the metric


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("residual", ["off", "on"])
def test_metric_of_vectors_is_that_of_the_probe(mask, residual):
    """Every vector is a token of its own, so that the probe can read them."""
    a, weights = a_model(mask, residual)
    inputs = torch.randn(7, LENGTH, 16, generator=torch.Generator().manual_seed(2))
    over, alpha = metrics(*passed(a, weights), inputs, 0.2)
    toy = Toy(a, weights, table=inputs.flatten(0, 1))
    tokens = torch.arange(7 * LENGTH).view(7, LENGTH)
    probe = probes.sinks(toy, tokens, keys="all", tau=0.2)
    np.testing.assert_allclose(over, probe["over_tau"].sel(head=0), atol=1e-6)
    np.testing.assert_allclose(alpha, probe["alpha"].sel(head=0), atol=1e-6)  # float32
    assert over.max() > 0.15
    assert over.std() > 0.02


def test_metric_does_not_depend_on_how_sequences_are_cut(monkeypatch):
    a, weights = a_model("prefix-4")
    inputs = torch.randn(7, LENGTH, 16, generator=torch.Generator().manual_seed(2))
    whole = metrics(*passed(a, weights), inputs, 0.2)
    monkeypatch.setitem(sinks.CHUNK, "cpu", 1)
    for one, other in zip(metrics(*passed(a, weights), inputs, 0.2), whole, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "positional"), [("causal", "rope"), ("window-5", "decay"), ("prefix-2", "sinusoidal")]
)
def test_patterns_are_those_of_the_pass(mask, positional):
    a, weights = a_model(mask, "on", positional)
    a, side, switches = passed(a, weights)
    inputs = torch.randn(1, 3, LENGTH, 16, generator=torch.Generator().manual_seed(2))
    found = list(patterns(a, side, switches, inputs))
    x = embedded(side, switches, inputs)
    for layer, pattern in enumerate(found):
        after = block(a, side, switches, layer, x)
        mixed = pattern[:, :, 0] @ (x @ side[f"{layer}.v"][:, None])
        torch.testing.assert_close(x + mixed, after)
        x = after
    assert (a.decay or DECAY) == DECAY
    assert len(found) == a.blocks


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("causal", [4 / 17, 3 / 16, 2 / 15, 1 / 14]),
        ("window-5", [4 / 5, 3 / 5, 2 / 5, 1 / 5]),  # even weights in a full window of 5 are no more than tau
        ("window-4", [1.0] * LENGTH),
        ("prefix-2", [4 / 17, 4 / 17, 2 / 15, 1 / 14]),
        ("prefix-4", [4 / 17] * 4),
        ("prefix-6", [0.0]),
        ("full", [0.0]),
    ],
)
def test_even_weights_by_hand(mask, expected):
    a = architecture_of(2, mask, "none", "off", 8)
    by_hand = np.zeros(LENGTH)
    by_hand[: len(expected)] = expected
    np.testing.assert_allclose(uniform_sink(a, 0.2), by_hand, atol=1e-12)
    weights = initial(a, 0) | {"0.q": torch.zeros(8, 8), "1.q": torch.zeros(8, 8)}
    over, alpha = metrics(*passed(a, weights), torch.randn(3, LENGTH, 8), 0.2001)  # 1/5 in float32 is more than 0.2
    if mask != "window-5":
        np.testing.assert_allclose(over, [by_hand] * 2, atol=1e-12)
    if mask == "causal":
        harmonic = np.cumsum(1 / np.arange(1, LENGTH + 1))[-1]
        assert alpha[:, 0] == pytest.approx(harmonic / LENGTH)


# -- a run


def test_a_tiny_run(tiny):
    ds, report, files, out = tiny
    assert ds["sink"].dims == (*sinks.DIMS, "position")
    assert ds["sink"].notnull().all()
    deep = ds["over_tau"].sel(layer=1)
    assert deep.sel(depth=2).notnull().all()
    assert deep.sel(depth=1).isnull().all()
    np.testing.assert_allclose(ds["sink"], ds["over_tau"].mean("layer"), rtol=1e-6)
    # Attention of one sequence: rows that the mask lets sum to one.
    pattern = ds["pattern"].sel(depth=2, mask="window-5")
    np.testing.assert_allclose(pattern.sum("key"), 1, rtol=1e-5)
    assert (pattern.sel(query=10, key=[5, 11, 16]) == 0).all()
    np.testing.assert_array_equal(ds["fresh"].sel(residual="on", depth=1), ds["fresh"].sel(residual="off", depth=1))
    xr.testing.assert_identical(load(out / "sinks.nc")["sink"], ds["sink"])
    first = ("sinks", "sinks-text-1-residual", "sinks-text-2", "sinks-text-2-residual")
    names = {f"{name}{kind}" for name in first for kind in (".png", ".svg")} | {"sinks.nc", "sinks.md"}
    assert {file.name for file in files} == {file.name for file in out.iterdir()} == names
    for file in files:
        assert 0 < file.stat().st_size < LARGEST
        if file.suffix == ".png":
            with Image.open(file) as image:
                assert image.width > 600
    assert len(report.tables[0].rows) == len(kinds(ds)) * ds.sizes["mask"]


def test_numbers_of_a_run_are_those_of_its_models(tiny):
    ds = tiny[0]
    task = InContext(width=8, batch=8)
    run = Run(architecture_of(2, "prefix-4", "none", "on", 8), task, seed=1, learning_rate=1e-3, weight_decay=1e-6)
    (model,) = train([run], 5)
    drawn = replace(task, batch=40).draw(task.world(1, "cpu"), sinks.generator_of(torch.device("cpu"), "sinks", 1), 1)
    at = {"scale": "text", "depth": 2, "mask": "prefix-4", "residual": "on", "seed": 1}
    over, alpha = metrics(*passed(run.architecture, model.weights), drawn.inputs[0], 0.2)
    few = 2.01 / (40 * LENGTH)  # a weight at tau itself may fall on either side, trained alone or among others
    np.testing.assert_allclose(ds["over_tau"].sel(at), over, atol=few)
    np.testing.assert_allclose(ds["alpha"].sel(at), alpha, atol=1e-5)
    fresh, _ = metrics(*passed(run.architecture, initial(run.architecture, 1)), drawn.inputs[0], 0.2)
    np.testing.assert_allclose(ds["fresh"].sel(at), fresh.mean(0), atol=few)
    assert float(ds["training_loss"].sel(at)) == pytest.approx(float(model.losses[-1]), rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tau": 1.0}, "tau=1.0 is no threshold"),
        ({"sequences": 0}, "sequences=0 is too few"),
        ({"masks": ("window",)}, "mask 'window' is unknown"),
        ({"seeds": 0}, "seeds=0 is too few"),
        ({"residual": ("maybe",)}, "'maybe' is unknown"),
    ],
)
def test_bad_settings_are_refused_in_one_line(fields, message):
    with pytest.raises(InputError, match=message) as error:
        Settings(**fields)
    assert "\n" not in str(error.value)


def test_the_published_masks():
    assert [switches_of(mask) for mask in Settings().masks] == [
        {"mask": "causal"},
        *({"mask": "window", "window": n} for n in (5, 9, 13)),
        *({"mask": "prefix", "prefix": n} for n in (2, 4, 6)),
    ]


# -- statements and figures


def made_up(tiny, sink, masks=("causal", "window-5", "window-9", "prefix-2", "prefix-4")) -> xr.Dataset:
    """One kind of trained models of a tiny run with another metric: `sink` [position] by mask, 0.1 before training."""
    ds = tiny[0].sel(depth=[2], residual=["off"], mask=list(masks)).copy(deep=True)
    ds["fresh"][:] = 0.1
    ds["novel_accuracy"][:] = 0.9
    for mask in masks:
        ds["sink"].loc[{"mask": mask}] = sink(mask)
    return ds


def as_published(mask: str) -> np.ndarray:
    kind, _, n = mask.partition("-")
    values = np.full(LENGTH, 0.05)
    values[: int(n) if kind == "prefix" else 1] = 0.2 + 0.02 * int(n or 0)
    return values


def judged(ds: xr.Dataset) -> list[bool | None]:
    return [held(claim) for claim in claims(ds)]


def test_statements_hold_where_they_do(tiny):
    ds = made_up(tiny, as_published)
    assert judged(ds) == [True] * 5
    assert all(c.claim[0].isupper() and c.claim.endswith(".") for c in claims(ds))  # read alone


def changed(which, place, value):
    def sink(mask):
        values = as_published(mask)
        if mask == which:
            values[place] = value
        return values

    return sink


@pytest.mark.parametrize(
    ("number", "sink"),
    [
        (0, changed("causal", 3, 0.9)),
        (1, changed("causal", 0, 0.09)),
        (2, changed("window-9", 16, 0.9)),
        (3, changed("window-5", 0, 0.9)),
        (4, changed("prefix-4", 3, 0.04)),
        (4, changed("prefix-2", 2, 0.9)),
    ],
)
def test_statements_fail_where_they_do_not_hold(tiny, number, sink):
    found = judged(made_up(tiny, sink))
    assert found.pop(number) is False
    assert found == [True] * 4


def test_toys_that_do_not_retrieve_are_not_judged(tiny):
    ds = made_up(tiny, as_published)
    ds["novel_accuracy"].loc[{"mask": "causal"}] = 0.5
    found = claims(ds)
    assert [c.verdict for c in found] == ["not trained"] * 2 + ["holds"] * 3
    assert "0.500 to 0.900, of a reader blind to content 0.516; 4 of 5 kinds of toys trained" in found[0].measured
    old = ds.drop_vars("novel_accuracy").assign(accuracy=ds["accuracy"] * 0 + 0.9)
    assert {c.verdict for c in claims(old)} == {
        "not trained"
    }  # of classes of training: fails nobody, and lets nobody pass
    assert {c.verdict for c in claims(tiny[0])} == {"not trained"}


def test_runs_that_disagree_leave_it_open(tiny):
    ds = made_up(tiny, as_published)
    ds["sink"].loc[{"mask": "causal", "seed": 0, "position": 3}] = 0.9
    assert claims(ds)[0].verdict == "undecided"


@pytest.mark.slow
def test_what_was_not_run_is_not_judged(tiny):
    assert judged(made_up(tiny, as_published, ("prefix-2",))) == [None, None, None, None, True]
    assert judged(made_up(tiny, as_published, ("window-5",))) == [None, None, True, None, None]
    only = tiny[0].sel(residual=["on"], depth=[1])
    assert len(claims(only)) == 5
    assert len(claims(tiny[0])) == 10  # with a residual stream they are not published
    assert tables(only)[0].rows[0][2] == "on"


@pytest.mark.slow
def test_figure_of_one_mask_and_seed(tiny, tmp_path):
    ds = tiny[0].sel(mask=["causal"], depth=[2], residual=["on"], seed=[0])
    png, svg = draw(ds, tmp_path / "sinks")
    assert png.stat().st_size < LARGEST
    assert svg.stat().st_size < LARGEST


def test_a_trained_toy_is_looked_at_as_it_is():
    a, weights = a_model("causal")
    model = Trained(Run(a, InContext(width=16)), torch.zeros(1), weights)
    architecture, side, _ = sinks._one(model, torch.device("cpu"))
    assert architecture == a
    assert all(torch.equal(side[name][0], weights[name]) for name in weights)
