"""The statements of [Liu-7] about its curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import SURE, above, below, between, every
from probes.results.curves import spearman
from probes.results.statistics import Interval, between_runs, over_runs

from ..rules import Judged, at, decided, each_above, judged, need, over_told, setting
from .curves import AGREES, PUBLISHED, PUBLISHED_SIZE, Kind, of_kind, published, roughness, softmax

NORMAL = 1.96  # standard errors to either end of a 95 % interval over sequences
BREAKS = 0.1  # nats; what a plateau that is broken falls by at least: some five times what its targets differ by
MOST = 0.5  # of a curve's roughness
liu: Any = Source("[Liu-7]", "liu7-retrieval")
TASK = "In the retrieval task (token k of 10)"
RUNS = "by 95 % intervals over runs"


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-7] about its curves; of other attention than softmax it says nothing."""
    found = judged(liu, ds)
    return found if softmax(ds) else [replace(claim, measured="-", verdict="not measured") for claim in found]


BLIND = (
    "In the retrieval task (which token stands at position k of 10) 1 layer without positional encoding cannot tell apart "
    "the tokens before the last, so it cannot retrieve any k <= 8."
)
LIMIT = (
    "the 95 % interval over sequences of every one-layer model's loss lies above that of the best reader blind to order "
    f"less {AGREES:g} nats"
)


@liu("one-layer-blind", "", BLIND, rule=LIMIT)
def one_layer_blind(ds: xr.Dataset) -> Judged:
    """Every one-layer model of the result, all widths and variants, seeds and steps aside."""
    here = at(ds, layers=1).sel(target=_targets(ds, "before-last"))
    limit, loss = float(here["limit"].sel(reader="bag and last").max()), here["loss"].values.ravel()
    reach = NORMAL * here["loss_error"].values.ravel()
    measured = (
        f"least loss of {loss.size} models {loss.min():.2f}, "
        f"median {float(here['loss'].median()):.2f}; a reader blind to order gets {limit:.3f}"
    )
    ends = (Interval(x, x - off, x + off) for x, off in zip(loss, reach, strict=True))
    return decided(measured, *(above(end, limit - AGREES) for end in ends))


def as_published(ds: xr.Dataset, models: Kind, part: str) -> Judged:
    """The published numbers, at k <= 8 or at the last token."""
    chosen, read, loss = _targets(ds, part), published(ds, models), of_kind(ds, models)["loss"]
    ends = [(over_runs(loss.sel(target=k).values), float(read.sel(target=k))) for k in chosen]
    verdict = every([between(run, x - AGREES, x + AGREES) for run, x in ends])(SURE)
    # One target that is off refutes; agreement needs all of them.
    missing = part == "before-last" and chosen.size < PUBLISHED_SIZE - 1
    words = "; ".join(f"{int(k)}: {_over_seeds(loss.sel(target=k))}" for k in chosen)
    return Judged(words, "undecided" if verdict == "holds" and missing else verdict)


READ = (
    f"95 % intervals over runs lie within {AGREES:g} nats of the published curve, what can be read off its figure, at all "
    "these k"
)
for _kind, _curve in PUBLISHED.items():
    *_before, _last = (f"{loss:.2f}" for loss in _curve)
    _read = f"{', '.join(_before)} at k = 0 to 8" if len(set(_before)) > 1 else f"{_before[0]} at every k <= 8"
    _parts = ["a residual stream"] * _kind.residual + ["a feed-forward"] * _kind.feed_forward
    _models = f"{_kind.layers} layer{'s' * (_kind.layers > 1)} of width {_kind.width}"
    _models += f" with {' and '.join(_parts)}" * bool(_parts) + (" have" if _kind.layers > 1 else " has")
    _id = (
        f"depth-{_kind.layers}-width-{_kind.width}{'-residual' * _kind.residual}{'-feed-forward' * _kind.feed_forward}"
    )
    for _where, _number in (("before-last", _read), ("last", f"{_last} at k = 9")):
        _claim = f"{TASK} {_models} a loss in nats of {_number}."
        liu(f"{_id}-{_where}", "", _claim, rule=READ, published=_number, models=_kind, part=_where)(as_published)


def beats_blind(ds: xr.Dataset, width: int) -> Judged:
    """Two layers know more of the first token than any single one can."""
    loss, limit = _loss(ds, 2, width, target=0), float(at(ds["limit"], reader="bag and last", target=0))
    measured = f"{_over_seeds(loss)}; no 1-layer model gets below {limit:.2f}"
    return decided(measured, below(over_runs(loss.values), limit))


def primacy(ds: xr.Dataset, width: int) -> Judged:
    """The first token is the easiest, and the loss grows with k."""
    k = _targets(ds, "before-last")
    need(k.size >= 3, 0 in k)
    loss = _loss(ds, 2, width, target=k).transpose("seed", "target")
    first, others = loss.sel(target=0), loss.sel(target=k[1:]).min("target")
    rho = np.array([spearman(k.astype(float), run) for run in loss.values])
    measured = (
        f"{_over_seeds(first)} at k = 0, least after it {_over_seeds(others)}, Spearman of loss and k "
        f"{over_told(rho, '.2f')} over {k.size} targets"
    )
    return decided(measured, each_above(others - first), above(over_runs(rho), 0))


def lost_in_the_middle(ds: xr.Dataset, layers: int, width: int) -> Judged:
    """Both ends are easier than any token between."""
    ends = _loss(ds, layers, width, target=[0, *_targets(ds, "last").tolist()])
    inner = _loss(ds, layers, width, target=_targets(ds, "between")).min("target")
    first, final = map(_over_seeds, ends.transpose("target", "seed"))
    return decided(f"first {first}, last {final}, least between {_over_seeds(inner)}", each_above(inner - ends))


for _width in (2, 10):
    _two, _end = f"{TASK} 2 layers of width {_width}", f"width-{_width}"
    _claim = f"{_two} differ in kind from 1 layer: they tell positions apart (k = 0)."
    _rule = "the 95 % interval over runs of the loss at k = 0 lies below that of the best reader blind to order"
    liu(f"two-layers-see-order-{_end}", "", _claim, rule=_rule, width=_width)(beats_blind)
    _claim = f"{_two} find the first token the easiest of those before the last, and their loss grows with k."
    _rule = (
        "of the losses at all k before the last that at k = 0 is the least, and their rank correlation with k is above 0, "
        f"{RUNS}"
    )
    liu(f"primacy-{_end}", "", _claim, rule=_rule, width=_width)(primacy)
    _rule = f"the losses of the first and of the last token are both below the least between, {RUNS}"
    _easier = "the first and the last token are easier than any between."
    _lost: Any = {"rule": _rule, "width": _width}
    liu(f"lost-in-the-middle-{_end}", "", f"{_two} are lost in the middle: {_easier}", layers=2, **_lost)(
        lost_in_the_middle
    )
    _claim = f"{TASK} 3 layers of width {_width} are lost in the middle as 2 are: {_easier}"
    liu(f"three-layers-lost-in-the-middle-{_end}", "", _claim, layers=3, **_lost)(lost_in_the_middle)

BREAK = "break the plateau of the loss over k (3 layers, width 10)."
PLATEAU = (
    f"with it the mean loss over the targets between first and last falls by more than {BREAKS:g} nats, by the 95 % "
    "interval over runs"
)
STREAM, BOTH = "residual streams", "a feed-forward beside residual streams"


@liu("residual-breaks-plateau", "", f"{TASK} {STREAM} {BREAK}", rule=PLATEAU, before=(0, 0), after=(1, 0))
@liu(
    "feed-forward-breaks-plateau",
    "",
    f"{TASK} {BOTH} {BREAK.replace('break', 'breaks')}",
    rule=PLATEAU,
    before=(1, 0),
    after=(1, 1),
)
def breaks(ds: xr.Dataset, before: tuple[int, int], after: tuple[int, int]) -> Judged:
    """Whether the mean over the targets between first and last falls by more than `BREAKS`."""
    middle = _targets(ds, "between")
    without, with_it = (_loss(ds, 3, 10, *which, target=middle).mean("target") for which in (before, after))
    measured = f"mean over k = {middle[0]} to {middle[-1]}: {_over_seeds(without)} to {_over_seeds(with_it)}"
    return decided(measured, each_above(without - with_it, BREAKS))


SPIKY = "residual streams and a feed-forward give the curve of loss over k spikes where it had a plateau"
SHARED = (
    "the mean size of its second differences between the first token and the last, counted with the sign that the other "
    "seeds' mean has"
)


@liu(
    "spiky",
    "",
    f"{TASK} {SPIKY} (3 layers, width 10).",
    rule=f"{SHARED}, is larger with both than with neither, by the 95 % interval of Welch's t over runs",
)
def spiky(ds: xr.Dataset) -> Judged:
    """The curve over k is rougher with residual stream and feed-forward, in what seeds share."""
    plain, spiked = (roughness(_loss(ds, 3, 10, *which)).shared for which in ((0, 0), (1, 1)))
    measured = f"{over_told(plain, '.2f')} without, {over_told(spiked, '.2f')} with both"
    return decided(measured, above(between_runs(spiked, plain), 0))


OF_THE_TASK = (
    f"{TASK} the spikes of a single run's curve of loss over k are those of the task, not of its seed (3 layers, width 10, "
    "residual stream and feed-forward)."
)
MOSTLY = (
    f"more than {MOST:.0%} of the mean size of its second differences has the sign that the other seeds' mean has, by the "
    "95 % interval over runs"
)


@liu("beyond-scatter", "", OF_THE_TASK, rule=MOSTLY, kind="ours")
def beyond_scatter(ds: xr.Dataset) -> Judged:
    """Most of a single run's roughness is shared by the other seeds."""
    rough = roughness(_loss(ds, 3, 10, 1, 1))
    measured = f"{over_told(rough.own, '.2f')} in a single run, of which {over_told(rough.shared, '.2f')} is shared"
    return decided(measured, above(over_runs(rough.shared - MOST * rough.own), 0))


def _loss(ds: xr.Dataset, *kind: int, **wanted: Any) -> xr.DataArray:
    return at(of_kind(ds, Kind(*kind))["loss"], **wanted)


def _targets(ds: xr.Dataset, part: str) -> np.ndarray:
    """The result's targets "before-last", rising, those "between" the first of them and the last position, or "last"."""
    k, last = np.sort(ds["target"].values), setting(ds, "context") - 1
    chosen = {"before-last": k[k < last], "between": k[k < last][1:], "last": k[k == last]}[part]
    need(chosen.size)
    return chosen


def _over_seeds(values: xr.DataArray) -> str:
    return over_told(values, ".2f")
