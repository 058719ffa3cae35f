"""In-context toys: their answers; the sink metric against the probe and by hand, in a tiny run, and by the claims' rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from pages import held
from tiny_runs import TINY, claims

import probes
from probes.claims.claim import Claim
from probes.measures.sinks import TAU
from toy.experiments import experiment, in_context
from toy.experiments.in_context import accuracies, architecture_of, copied, looked_at, metrics, uniform_sink
from toy.experiments.position_bias import DIMS, Case, run_of
from toy.model import Switches, initial
from toy.tasks import InContext
from toy.train import Run, Trained, logits, stacked, train
from toy.view import Toy

LENGTH = 17


@pytest.mark.parametrize(
    ("mask", "residual", "positional"),
    [("window-5", "off", "decay"), ("prefix-4", "on", "sinusoidal"), ("causal", "on", "rope")],
)
def test_metric_of_vectors_is_that_of_the_probe(mask, residual, positional, monkeypatch):
    """Every vector is a token of its own, so that the probe can read them."""
    a = architecture_of(3, mask, positional, residual, 16)
    uneven = {"q": 6.0, "k": 6.0}  # times as large
    weights = {name: w * uneven.get(name[2:], 1.0) for name, w in initial(a, 1).items()}
    inputs = torch.randn(7, LENGTH, 16, generator=torch.Generator().manual_seed(2))
    passed = a, stacked([weights]), Switches.of([a])
    over, alpha = metrics(*passed, inputs, 0.2)
    toy = Toy(replace(a, vocabulary=7 * LENGTH), weights | {"embedding": inputs.flatten(0, 1)})
    probe = probes.sinks(toy, torch.arange(7 * LENGTH).view(7, LENGTH), keys="all")
    np.testing.assert_allclose(over, probe["over_tau"].sel(head=0), atol=1e-6)
    np.testing.assert_allclose(alpha, probe["alpha"].sel(head=0), atol=1e-6)  # float32
    assert over.std() > 0.02
    monkeypatch.setitem(in_context.CHUNK, "cpu", 1)  # sequences one by one
    for one, other in zip(metrics(*passed, inputs, 0.2), (over, alpha), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("causal", [4 / 17, 3 / 16, 2 / 15, 1 / 14]),
        ("window-5", [4 / 5, 3 / 5, 2 / 5, 1 / 5]),  # even weights in a full window of 5 are no more than tau
        ("window-4", [1.0] * LENGTH),
        ("prefix-2", [4 / 17, 4 / 17, 2 / 15, 1 / 14]),
        ("full", [0.0]),
    ],
)
def test_even_weights_by_hand(mask, expected):
    a = architecture_of(2, mask, "none", "off", 8)
    by_hand = np.zeros(LENGTH)
    by_hand[: len(expected)] = expected
    np.testing.assert_allclose(uniform_sink(a, 0.2), by_hand, atol=1e-12)


def test_a_tiny_run(tiny):
    ds = tiny.ds
    there = ds["gap"].notnull().all("pair")
    unbiased = there & (ds["training"] == "unbiased")
    for name in ("over_tau", "alpha"):
        assert ds[name].dims == (*DIMS, "layer", "key")
        assert (ds[name].sel(layer=[0, 1]).notnull().all(["layer", "key"]) == unbiased).all()
        assert (ds[name].sel(layer=3).notnull().all("key") == unbiased & (ds["depth"] == 4)).all()
    # Its numbers are those of its models.
    s = experiment.settings_of("position-bias", quick=False, given=TINY["position-bias"])
    case = Case("text", "gaussian", 2, "prefix-4", "none", "off", "unbiased", 0)
    run = run_of(case, s)
    (model,) = train([run], s.steps)
    here, device = ds.sel(case._asdict()).sel(layer=[0, 1]), torch.device("cpu")
    found = looked_at(model, s.tests, TAU, device)
    few = 2.01 / (s.tests * LENGTH)  # a weight at tau itself may fall on either side, trained alone or among others
    np.testing.assert_allclose(here["over_tau"], found["over_tau"], atol=few)
    np.testing.assert_allclose(here["alpha"], found["alpha"], atol=1e-5)
    fresh = looked_at(replace(model, weights=initial(run.architecture, 0)), s.tests, TAU, device)
    np.testing.assert_allclose(here["fresh"], fresh["over_tau"].mean(0), atol=few)


def made_up(tiny, masks=("causal", "window-5", "window-9", "prefix-2", "prefix-4")) -> xr.Dataset:
    """A tiny run's models without encoding, trained, with the metric that was published, 0.1 before training."""
    which = {"data": ["gaussian"], "depth": [2], "mask": list(masks), "positional": ["none"], "residual": ["off"]}
    ds = tiny.ds.sel(which | {"layer": [0, 1]}).copy(deep=True)
    ds["fresh"][:] = 0.1
    ds["novel_accuracy"][:] = 0.9
    ds["over_tau"][:] = ds["alpha"][:] = 0.05
    for mask in masks:
        kind, _, n = mask.partition("-")
        for key in range(int(n) if kind == "prefix" else 1):
            at = {"mask": mask, "key": key}
            ds["over_tau"].loc[at] = ds["alpha"].loc[at] = 0.2 + 0.02 * int(n or 0)
    return ds


def of_sinks(ds: xr.Dataset) -> list[Claim]:
    return [claim for claim in claims("position-bias", ds) if "-sink-" in claim.id]


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
    ds = made_up(tiny)
    ds["over_tau"].loc[{"mask": which, "key": place}] = ds["alpha"].loc[{"mask": which, "key": place}] = value
    found = of_sinks(ds)
    assert len(found) == 5
    assert {c.id for c in found if held(c) is not True} == {f"wu-toy-sink-{name}" for name in refuted}
    assert "not measured" not in {claim.verdict for claim in found}


def test_toys_that_do_not_retrieve_or_were_not_run_are_not_judged(tiny):
    ds = made_up(tiny)
    ds["novel_accuracy"].loc[{"mask": "causal"}] = 0.5
    assert [c.verdict for c in of_sinks(ds)] == ["not trained"] * 2 + ["holds"] * 3
    ds["over_tau"].loc[{"mask": "window-9", "seed": 0, "key": 3}] = 0.9
    assert of_sinks(ds)[2].verdict == "undecided"
    assert {c.verdict for c in of_sinks(tiny.ds)} == {"not trained"}
    for mask, judged in (("prefix-2", [None, None, None, None, True]), ("window-5", [None, None, True, None, None])):
        assert [held(claim) for claim in of_sinks(made_up(tiny, (mask,)))] == judged
    # Toys with a residual stream are judged where the others have not learnt.
    ds = made_up(tiny, ("causal",))
    both = xr.concat([ds.where(ds["seed"] < 0), ds], "residual").assign_coords(residual=["off", "on"])
    assert of_sinks(both)[0].measured.startswith("text, 2: with residual stream: causal: +0.150")


# -- what in-context toys answer, and the sequences that they are asked


@pytest.mark.parametrize("chunk", [1, 4000])
def test_answers_and_copied_labels_are_counted_one_by_one_however_sequences_are_cut(chunk, monkeypatch):
    monkeypatch.setitem(in_context.CHUNK, "cpu", chunk)
    task = InContext(width=8, labels=4)
    a = replace(architecture_of(2, "causal", "rope", "on", 8), outputs=4)
    models = [Trained(Run(a, task, seed), torch.zeros(1), initial(a, seed)) for seed in (0, 1)]
    world = task.world(0, "cpu")
    drawn = task.novel(world, torch.Generator().manual_seed(1), 50)
    pairs, cpu = [(a, model.weights) for model in models], torch.device("cpu")
    accuracy, shown = accuracies(pairs, drawn, cpu), copied(pairs, world, drawn, cpu)
    for n, said in enumerate(logits(models, drawn.inputs[0]).argmax(-1).tolist()):
        right = among = 0
        for sequence, answer, given in zip(drawn.inputs[0], drawn.hidden[0].tolist(), said, strict=True):
            labels = [next(i for i in range(4) if torch.equal(world.labels[i], x)) for x in sequence[1::2]]
            right += given == answer
            among += given in labels
        assert (accuracy[n], shown[n]) == pytest.approx((right / 50, among / 50), abs=1e-6)
    assert 0 < shown.min() < shown.max() < 1
