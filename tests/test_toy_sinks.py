"""Experiment sinks: the metric against the probe and by hand, a tiny run against its models, the claims' rules, figures."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from tiny_runs import claims, questioned, verdicts

import probes
from toy.experiments import sinks
from toy.experiments.position_bias import architecture_of
from toy.experiments.sinks import metrics, patterns, uniform_sink
from toy.experiments.sinks_claims import kinds, tables
from toy.model import Switches, block, embedded, initial
from toy.tasks import InContext
from toy.train import Run, stacked, train
from toy.view import Toy

LENGTH = 17


def a_model(mask: str, residual: str = "off", positional: str = "none", depth: int = 3):
    """(architecture, weights without model dimension) whose attention is far from even."""
    a = architecture_of(depth, mask, positional, residual, 16)
    weights = initial(a, 1)
    return a, {name: w * (6.0 if name[2:] in ("q", "k") else 1.0) for name, w in weights.items()}


def passed(a, weights):
    return a, stacked([weights]), Switches.of([a])


@pytest.mark.parametrize(
    ("mask", "residual"),
    [("causal", "off"), ("window-5", "on"), ("window-9", "off"), ("prefix-4", "on"), ("full", "off")],
)
def test_metric_of_vectors_is_that_of_the_probe(mask, residual, monkeypatch):
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
    monkeypatch.setitem(sinks.CHUNK, "cpu", 1)  # sequences one by one
    for one, other in zip(metrics(*passed(a, weights), inputs, 0.2), (over, alpha), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "positional"), [("causal", "rope"), ("window-5", "decay"), ("prefix-2", "sinusoidal")]
)
def test_patterns_are_those_of_the_pass(mask, positional):
    a, weights = a_model(mask, "on", positional)
    a, side, switches = passed(a, weights)
    inputs = torch.randn(1, 3, LENGTH, 16, generator=torch.Generator().manual_seed(2))
    x = embedded(side, switches, inputs)
    for layer, pattern in zip(range(a.blocks), patterns(a, side, switches, inputs), strict=True):
        after = block(a, side, switches, layer, x)
        mixed = pattern[:, :, 0] @ (x @ side[f"{layer}.v"][:, None])
        torch.testing.assert_close(x + mixed, after)
        x = after


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


def test_a_tiny_run(tiny):
    ds = tiny.ds
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
    figures = ("sinks", "sinks-text-1-residual", "sinks-text-2", "sinks-text-2-residual")
    assert {file.name for file in tiny.files if file.suffix == ".png"} == {f"{name}.png" for name in figures}
    assert len(tiny.report.tables[0].rows) == len(kinds(ds)) * ds.sizes["mask"]


def test_numbers_of_a_run_are_those_of_its_models(tiny):
    ds = tiny.ds
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


def made_up(tiny, sink, masks=("causal", "window-5", "window-9", "prefix-2", "prefix-4")) -> xr.Dataset:
    """One kind of trained models of a tiny run with another metric: `sink` [position] by mask, 0.1 before training."""
    ds = tiny.ds.sel(depth=[2], residual=["off"], mask=list(masks)).copy(deep=True)
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


@pytest.mark.parametrize(
    ("refuted", "which", "place", "value"),
    [
        (set(), "causal", 0, 0.2),
        ({"first-token"}, "causal", 3, 0.9),
        ({"made-by-training"}, "causal", 0, 0.09),
        ({"first-token-window"}, "window-9", 16, 0.9),
        ({"weaker-with-window"}, "window-5", 0, 0.9),
        ({"shared-by-prefix"}, "prefix-4", 3, 0.04),
        ({"shared-by-prefix"}, "prefix-2", 2, 0.9),
    ],
)
def test_statements_hold_and_fail_where_they_do(tiny, refuted, which, place, value):
    def sink(mask):
        values = as_published(mask)
        if mask == which:
            values[place] = value
        return values

    ds = made_up(tiny, sink)
    assert len(claims("sinks", ds)) == 5
    assert questioned("sinks", ds, "wu-toy-sink-") == {f"{name}-text-2" for name in refuted}
    assert "not measured" not in {claim.verdict for claim in claims("sinks", ds)}


def test_toys_that_do_not_retrieve_are_not_judged(tiny):
    ds = made_up(tiny, as_published)
    ds["novel_accuracy"].loc[{"mask": "causal"}] = 0.5
    found = claims("sinks", ds)
    assert [c.verdict for c in found] == ["not trained"] * 2 + ["holds"] * 3
    assert "0.500 to 0.900, of a reader blind to content 0.516; 4 of 5 kinds of toys trained" in found[0].measured
    ds["sink"].loc[{"mask": "window-5", "seed": 0, "position": 3}] = 0.9
    assert claims("sinks", ds)[2].verdict == "undecided"
    # Accuracy on classes of training fails nobody, and lets nobody pass.
    old = ds.drop_vars("novel_accuracy").assign(accuracy=ds["accuracy"] * 0 + 0.9)
    for untold in (old, tiny.ds):
        assert {c.verdict for c in claims("sinks", untold)} == {"not trained"}


def test_what_was_not_run_is_not_judged(tiny):
    for mask, judged in (("prefix-2", [None, None, None, None, True]), ("window-5", [None, None, True, None, None])):
        assert list(verdicts("sinks", made_up(tiny, as_published, (mask,))).values()) == judged
    only = tiny.ds.sel(residual=["on"], depth=[1])
    assert len(claims("sinks", only)) == 5
    assert len(claims("sinks", tiny.ds)) == 10  # with a residual stream they are not published
    assert tables(only)[0].rows[0][2] == "on"
