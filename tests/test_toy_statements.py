"""Statements about toys follow their numbers: committed results, all runs alike, with a number or a setting changed."""

import json
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from tiny_runs import claims

from probes.claims.ledger import Source, Stated
from probes.claims.rules import SURE
from probes.results.dataset import load
from probes.results.statistics import Interval
from toy.experiments.experiment import EXPERIMENTS, experiment
from toy.experiments.reading import lacking
from toy.experiments.walks import SUMMED

REPORTS = Path(__file__).parent.parent / "reports" / "toy"
MARKS = {"holds": "+", "does not hold": "", "undecided": "?", "not trained": "-", "not measured": "-"}
PREFIX = {"retrieval": "liu7-retrieval-", "births": "births-", "petroglyph": "petroglyph-", "position-bias": "wu-toy-"}
PREFIX |= {name: f"liu4-{name}-" for name in ("previous-token", "exchanges", "remarks")} | {"rollout": "wu-"}


@cache
def alike(name: str) -> xr.Dataset:
    """A committed result whose runs differ by a thousandth, so that what their medians say is decided."""
    ds = load(REPORTS / f"{name}.nc")
    spread = 1 + 1e-3 * xr.DataArray(np.linspace(-1, 1, ds.sizes["seed"]), dims="seed")
    runs = {name: (of.median("seed") * spread).transpose(*of.dims) for name, of in ds.items() if "seed" in of.dims}
    if name == "position-bias":  # as if all its toys had learnt their task, those without residual stream as the others
        runs = {name: of.fillna(of.sel(residual="on")) if "residual" in of.dims else of for name, of in runs.items()}
        gaussian = {name: runs[name].sel(data="gaussian", drop=True) for name in ("gap", "novel_accuracy")}
        runs |= {name: runs[name].fillna(of) for name, of in gaussian.items()}  # and those with a fixed vocabulary
        runs["novel_accuracy"] = runs["novel_accuracy"].where(runs["novel_accuracy"].isnull(), 0.9)
    return ds.assign(runs)


def marked(name: str, ds: xr.Dataset) -> set[str]:
    """Ids without what the source's have in common, and what they are judged by the numbers."""
    return {claim.id.removeprefix(PREFIX[name]) + MARKS[claim.verdict] for claim in claims(name, ds)}


by_medians = cache(lambda name: marked(name, alike(name)))


PLAIN, STREAM, BOTH = ({"residual": r, "feed_forward": f} for r, f in ((0, 0), (1, 0), (1, 1)))
SMALL, TWO, DEEP = ({"layers": layers, "width": width} for layers, width in ((1, 2), (2, 10), (3, 10)))
MAIN, CONSTANT = {"residual": "off", "projection": "on"}, {"learning_rate": 0.1, "schedule": "constant"}
ONE, CAUSAL, FULL = ({"layers": n, "mask": mask} for n, mask in ((1, "causal"), (2, "causal"), (2, "full")))
TEXT = {"data": "gaussian", "mask": "causal", "scale": "text"}
UNBIASED, FIRST, ENDS = (TEXT | {"training": training} for training in ("unbiased", "first", "first-and-last"))
NONE, FRESH = {"trained_positional": "none"}, {"residual": 1, "feed_forward": 0, "norm": "rms", "seed": 1}
INSIDE, LAYERS = list(range(1, 9)), np.arange(1, 25)
ON_AXIS = "width 10 with positions on 1 axis and distance attention"


@pytest.mark.parametrize(
    ("name", "variable", "where", "value", "refuted"),
    [
        ("retrieval", "loss", SMALL | BOTH | {"seed": 2, "target": 3}, 1.6, "one-layer-blind"),
        ("retrieval", "loss_first", SMALL | PLAIN | {"target": 4}, 2.25, "depth-1-width-2"),
        ("retrieval", "loss", TWO | PLAIN | {"target": 0}, 1.99, "two-layers-see-order primacy lost-in-the-middle"),
        ("retrieval", "loss", TWO | PLAIN | {"seed": 0, "target": 0}, 2.1, "primacy? lost-in-the-middle?"),
        ("retrieval", "loss", DEEP | PLAIN | {"target": 9}, 1.4, "three-layers-lost-in-the-middle+"),
        ("retrieval", "loss", DEEP | STREAM | {"target": INSIDE}, 2.2, "plateau-broken"),
        ("retrieval", "loss", DEEP | BOTH | {"target": INSIDE}, 1.65, "plateau-broken spiky"),
        ("retrieval", "loss", DEEP | BOTH | {"seed": 0, "target": INSIDE[::2]}, 9.0, "plateau-broken? spiky?"),
        ("previous-token", "perplexity", MAIN | {"positional": "none", "step": slice(60, 200)}, 25.0, "stalls+"),
        ("previous-token", "perplexity", MAIN | {"positional": "learned", "step": 3000}, 1.6, "solved"),
        ("previous-token", "blind_perplexity", {}, 20.6, "bound+"),
        ("previous-token", "separation", {}, 0.0, "separation"),
        ("previous-token", "bilinear", {"residual": "off", "seed": 0}, 9.0, "bilinear-form?"),
        ("previous-token", "relative_published", {"cell": "V=30 C=4 width 2 lr 0.01"}, 2.5e-4, "longer-context"),
        ("previous-token", "relative_published", {"cell": "V=30 C=4 width 2 lr 0.1"}, 1e-2,
            "v30-c4-width-2-lr-0.1 fast"),
        ("previous-token", "relative_published", {"cell": "V=100 C=10 width 10 lr 0.01", "seed": 0}, 1e-1,
            "v100-c10-width-10-lr-0.01? wider?"),
        ("previous-token", "relative_by_size", {"vocabulary": 30, "context": 10, "width": 2}, 1e-7,
            "larger-vocabulary longer-context wider"),
        ("previous-token", "spikes", {"rate_step": 100}, 1.0, "spike+"),
        ("previous-token", "relative_by_target", {"offset_context": 4, "target": -4}, 0.5, "offsets"),
        ("exchanges", "roundness", {"residual": "on"}, 0.5, "circle"),
        ("exchanges", "rate", {"residual": "off", "schedule": "constant"}, -50.0,
            "change-places decay-fewer-exchanges"),
        ("exchanges", "spiked_chance", {}, 1.0, "at-spikes"),
        ("exchanges", "parted", {"schedule": "constant"}, -0.1, "separation"),
        ("exchanges", "gap_spread", {}, 0.1, "decay-more-even"),
        ("exchanges", "picked", CONSTANT | {"residual": "off"}, 0.4, "at-spikes-"),  # those with a stream have no spikes
        ("petroglyph", "difference", ONE | FRESH | {"positional": "none"}, 1e4, "one-layer-blind"),
        ("petroglyph", "difference", FULL | FRESH | {"positional": "none"}, 1e4, "full-mask-blind"),
        ("petroglyph", "least_difference", CAUSAL | FRESH | {"positional": "none"}, 1e8, "two-layers-see"),
        ("petroglyph", "least_difference", ONE | FRESH | {"positional": "rope"}, 2.0, "encoding-sees"),
        ("petroglyph", "trained_difference", ONE | NONE, 1e10, "trained"),
        ("petroglyph", "trained_difference", CAUSAL | NONE, 3.0, "trained"),
        ("petroglyph", "trained_difference", FULL | NONE, 1e10, "trained"),
        ("petroglyph", "accuracy", ONE | NONE | {"seed": 1, "step": 0}, 0.53, "one-layer-cannot-learn"),
        ("petroglyph", "accuracy", FULL | NONE, 0.48, "full-mask-cannot-learn"),
        ("petroglyph", "accuracy", CAUSAL | NONE, 0.9, "two-layers-learn"),
        ("petroglyph", "accuracy", ONE | {"trained_positional": "learned"}, 0.9, "encoding-learns"),
        ("births", "elasticity", {"step": 2400, "position": slice(1, 16)}, 1e-9, "from-flat-primacy"),
        ("births", "elasticity", {"step": 2400, "position": slice(111, 126)}, 1e-9, "from-flat-recency"),
        ("births", "elasticity", {"step": 2400, "position": 127}, 1e-9, "follows-last? from-flat-last"),
        ("births", "elasticity", {"step": 2400, "position": slice(0, 126)}, 1.0,
            "follows-first follows-primacy follows-recency "
            "from-flat-first from-flat-last from-flat-primacy from-flat-recency"),
        ("position-bias", "gap", UNBIASED | {"positional": "none", "pair": "middle-last"}, -0.2,
            "causal-favours-earlier"),
        ("position-bias", "gap", UNBIASED | {"depth": 4}, 0.9, "decay-favours-recent"),
        ("position-bias", "gap", UNBIASED | {"positional": "decay"}, 0.5,
            "decay-favours-recent decay-depth-favours-earlier data-first"),
        ("position-bias", "gap", UNBIASED | {"positional": "rope"}, -0.5, "rope-favours-recent+ rope-depth-favours-earlier"),
        ("position-bias", "gap", {"mask": "causal", "training": "unbiased"}, 0.3,
            "causal-grows-with-depth decay-depth-favours-earlier rope-depth-favours-earlier decay-favours-recent data-first "
            "residual-weaker fixed-vocabulary+ text-and-program+"),
        ("position-bias", "gap", FIRST, -0.4, "data-first fixed-vocabulary-biased"),
        ("position-bias", "gap", TEXT | {"training": "middle"}, [-0.9, 0.0, 0.9], "data-middle+ fixed-vocabulary-biased"),
        ("position-bias", "gap", TEXT | {"training": "last", "positional": "none"}, -0.03,
            "data-last fixed-vocabulary-biased"),
        ("position-bias", "gap", ENDS, [-0.5, 0.0, 0.5], "lost-in-the-middle fixed-vocabulary-biased"),
        ("position-bias", "accuracy_by_position", ENDS | {"position": [3, 4]}, 2.0, "lost-in-the-middle"),
        ("position-bias", "gap", {"data": "fixed", "residual": "on", "depth": 4}, 0.9, "residual-amplifies+"),
        ("position-bias", "gap", {"mask": "full", "positional": "none"}, 0.1, "full-even"),
        ("position-bias", "gap", {"mask": "full", "training": "unbiased"}, 0.015, "full-even-encoded+"),
        ("position-bias", "novel_accuracy", {"positional": "rope", "training": "unbiased"}, 0.5,
            "learns rope-favours-recent- rope-depth-favours-earlier-"),
        ("position-bias", "novel_accuracy", {"residual": "off"}, 0.5,
            "learns causal-grows-with-depth- decay-depth-favours-earlier- rope-depth-favours-earlier- residual-weaker- "
            "causal-favours-earlier decay-favours-recent"),
        ("remarks", "relative", {"learning_rate": 0.01}, 1.0, ""),  # the other learning rate does
        ("remarks", "relative", {"case": ON_AXIS}, 0.3, "one-axis"),
        ("remarks", "relative", {"case": "width 2 with positions on 1 axis"}, 0.3, "one-axis-inner"),
        ("remarks", "length_rank", {"by_share": 0.0, "learning_rate": 0.01}, [-0.5, -0.2, 0, 0.2, 0.5], "lengths?"),
        ("remarks", "share_loss", {"by_share": [-0.5, 0.5]}, 9.0, "rates"),
        ("remarks", "picked", {"by_share": -0.5, "learning_rate": 0.1}, 0.4, "rates"),  # they do better at this rate alone
        ("remarks", "picked", {"by_share": -0.5}, 0.4, "lengths- rates-"),
        ("rollout", "violations", {"case": "causal"}, 1, "thm-4.1-bound"),
        ("rollout", "violations", {"case": "window 3"}, 1, "thm-4.2-bound"),
        ("rollout", "violations", {"case": "prefix 2"}, 1, "thm-4.3-bound"),
        ("rollout", "decay_violations", {}, 1, "thm-4.4-and-4.5-bound"),
        ("rollout", "rope_violations", {}, 1, "thm-4.6-and-4.7-bound"),
        ("rollout", "planes_violations", {}, 1, "app-i-planes-bound"),
        ("rollout", "outside", {"case": "causal"}, 0.1 + np.exp(-LAYERS), "thm-4.1-limit"),
        ("rollout", "outside", {"case": "causal"}, LAYERS**-2.0, "thm-4.1-limit"),  # it goes, but not exponentially
        ("rollout", "outside", {"case": "window 5", "layer": slice(4, None)}, 0.4, "thm-4.2-limit thm-4.2-rate"),
        ("rollout", "outside", {"case": "window 3"}, np.exp(-2 * LAYERS), "thm-4.2-rate"),
        ("rollout", "outside", {"case": "prefix 2"}, 0.1, "thm-4.3-limit"),
        ("rollout", "share", {"case": "prefix 2", "layer": slice(20, None)}, 1e-6, "thm-4.3-shares"),
        ("rollout", "decay_curve", {"distance": 100}, 9.0, "thm-4.5-peak"),
        ("rollout", "decay_curve", {"distance": 100, "seed": 0}, 9.0, "thm-4.5-peak?"),
        ("rollout", "decay_curve", {"distance": 60, "peak_layer": 1}, 9.0, "thm-4.5-peak thm-4.5-peak-moves"),
        ("rollout", "rope_curve", {"distance": 0}, 9.0, "thm-4.7-peak-with-angle thm-4.7-peak-with-depth"),
        ("rollout", "beyond", {"attention": "sigmoid", "layer": 23}, 0.01, "other-attention"),
        ("rollout", "beyond", {"attention": f"sigmoid{SUMMED}", "layer": 23}, 0.2, "other-attention-summed"),
    ],
)  # fmt: skip
def test_statements_follow_the_numbers_that_they_read(name, variable, where, value, refuted):
    ds = alike(name).copy()
    ds[variable] = ds[variable].astype(float).copy(deep=True)
    ds[variable].loc[where] = value
    ds[variable] = ds[variable].where(alike(name)[variable].notnull())
    assert marked(name, ds) - by_medians(name) == {*refuted.split()}


SIZES = [0.0, *(way * 10.0**size for size in range(-9, 10) for way in (-1, 1)), *map(float, range(-20, 20))]


def statements(name: str) -> list[Stated]:
    """Those of an experiment."""
    bias = name == "position-bias"
    module = import_module("toy.experiments.position_bias.statements") if bias else experiment(name)
    sources = [of for of in vars(module).values() if isinstance(of, Source)]
    return list({one.statement.id: one for of in sources for one in of.statements}.values())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_rule_over_intervals_can_hold_and_fail(name, monkeypatch):
    """Some numbers in the place of those that a rule reads make it hold, and some make it fail."""
    random, picks = np.random.default_rng(0), [lambda of: of.value, *(lambda of, x=x: x for x in SIZES)]
    picks += [lambda of: random.choice([of.value, random.choice(SIZES)])] * 40
    for one in (one for one in statements(name) if one.function is not lacking):
        judge, found = partial(one.function, alike(name), **one.given), set()
        test = judge()[1]
        for again, pick in product((False, True), picks if callable(test) else ()):
            monkeypatch.setattr(Interval, "at", lambda of, level, pick=pick: (pick(of),) * 2)
            test = judge()[1] if again else test  # some rules look at intervals before they give their test
            found.add(test(SURE) if callable(test) else test)
            if {"holds", "does not hold"} <= found:
                break
        monkeypatch.undo()
        assert {"holds", "does not hold"} <= found or not callable(test), one.statement.id


@pytest.mark.parametrize(
    ("name", "settings", "judged"),
    [
        ("retrieval", {"attention": "sigmoid"}, 0),
        ("previous-token", {"steps": 1000}, 13),  # shorter runs do not judge published numbers
        ("previous-token", {"context": 5}, 14),
        ("exchanges", {"vocabulary": 30}, 0),
        ("remarks", {"vocabulary": 31}, 2),
    ],
)
def test_other_settings_than_the_published_ones_are_not_judged(name, settings, judged):
    of = json.loads(alike(name).attrs["settings"]) | settings
    found = claims(name, alike(name).assign_attrs(settings=json.dumps(of)))
    assert sum(claim.verdict in ("holds", "does not hold") for claim in found) == judged


@pytest.mark.parametrize(
    ("name", "variable", "left"),
    [
        ("retrieval", "loss_error", 13),
        ("previous-token", "relative_published", 8),
        ("exchanges", "rate", 6),
        ("petroglyph", "accuracy", 5),
        ("births", "loss", 4),
        ("rollout", "outside", 13),
    ],
)
def test_what_a_result_lacks_is_not_judged(name, variable, left):
    lost = marked(name, alike(name).drop_vars(variable)) - by_medians(name)
    assert all(mark.endswith("-") for mark in lost)
    assert len(by_medians(name)) - len(lost) == left
