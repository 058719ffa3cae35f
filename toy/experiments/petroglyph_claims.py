"""What a result of petroglyph says: changes by kind of model, tables, and the statements of [Liu-7] and [Irie]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.rules import range_told
from probes.results.tables import Table, number

from .petroglyph import possible
from .rules import Judged, decided, each_above, judge, known, need, over_told, variable

# The same numbers summed in another order differ by about eps of the terms' size, some ten times per layer.
ROUNDING = 1e3  # eps; what is above it is no rounding
CLEAR = 1e9  # eps; what is above it, 2e-7 of the output, is seen in float32, too
TIES = 0.01  # accuracy; a blind model's two answers may part where its two logits tie within rounding
SOLVED = 0.95  # accuracy
Kind = tuple[int, str, str]  # layers, mask, positional
BLIND: dict[Kind, bool] = {  # who cannot tell permuted prefixes apart
    (1, "causal", "none"): True,
    (2, "causal", "none"): False,
    (2, "full", "none"): True,
}


def fresh(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> np.ndarray:
    """A change of one kind of fresh models, `[variant, seed]`."""
    need(possible(mask, positional))
    found = variable(ds, name, layers=layers, mask=mask, positional=positional)
    return found.transpose("residual", "feed_forward", "norm", "seed").values.reshape(-1, ds.sizes["seed"])


def trained(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> xr.DataArray:
    """A variable of one kind of trained models, `[seed, ...]`."""
    return variable(ds, name, layers=layers, mask=mask, trained_positional=positional)


def kinds(ds: xr.Dataset) -> list[Kind]:
    """(layers, mask, positional) of the fresh models."""
    found = product(*(ds[dim].values.tolist() for dim in ("layers", "mask", "positional")))
    return [(layers, mask, positional) for layers, mask, positional in found if possible(mask, positional)]


def tables(ds: xr.Dataset) -> list[Table]:
    """Changes under permuted prefixes, in eps; accuracy of what was trained."""
    rows, learned = [], []
    for kind in kinds(ds):
        names = list(map(str, kind))
        largest, least = fresh(ds, "difference", *kind), fresh(ds, "least_difference", *kind)
        after = known(trained, ds, "trained_difference", *kind)
        told = "-" if after is None else _range(after.values)
        rows.append([*names, str(len(largest)), _range(largest), number(least.min(), ".2g"), told])
        if after is not None:
            accuracy, loss = trained(ds, "accuracy", *kind), trained(ds, "loss", *kind)
            steps = accuracy["step"].values[(accuracy > SOLVED).all("seed").values]
            last = [range_told(one.isel(step=-1), ".3f") for one in (accuracy, loss)]
            learned.append([*names, *last, str(steps[0]) if steps.size else "-"])
    head = ("layers", "mask", "positional")
    title = (
        f"Change of the last output under all {ds.attrs['permutations']} permutations of a prefix, in eps of float64"
    )
    columns = ("variants", "largest, over variants and seeds", "of the permutation of least change", "trained")
    found = [Table(title, (*head, *columns), rows)]
    if learned:
        columns = (*head, "accuracy, median (range)", "loss (nats)", f"all seeds above {SOLVED:g} from step")
        found.append(Table(f"Which token stands first; blind to order: 0.5 and {math.log(2):.3f}", columns, learned))
    return found


def claims(ds: xr.Dataset) -> list[Claim]:
    """The claim in its two halves, fresh and trained, and what controls it."""
    encodings = [str(name) for name in ds["positional"].values if name != "none"]
    encoded = {"encodings": ", ".join(encodings) or "any", "positional": encodings}
    return judge(__name__, ds, lists={"encoded": [encoded]})


def fresh_blind(ds: xr.Dataset, layers: int, mask: str, positional: str) -> Judged:
    """All variants and seeds: the largest change is rounding."""
    found = fresh(ds, "difference", layers, mask, positional)
    many = f"{found.size} models, {ds.attrs['permutations']} permutations"
    return Judged(f"largest change of {many}: {found.max():.2g} eps", bool(found.max() < ROUNDING))


def fresh_see(ds: xr.Dataset, layers: int, mask: str, positional: str | Sequence[str]) -> Judged:
    """All variants and seeds: every permutation is told apart, up to chance ties, even the one of least change."""
    need(positional)
    names = [positional] if isinstance(positional, str) else positional
    every = np.concatenate([fresh(ds, "least_difference", layers, mask, name).ravel() for name in names])
    many = f"{every.size} models, {ds.attrs['permutations']} permutations"
    return Judged(f"least change of {many}: {every.min():.2g} eps", bool(every.min() > CLEAR))


def variants(ds: xr.Dataset) -> Judged:
    """Residual stream, feed-forward and norms: each variant's verdicts, one by one."""
    as_expected = np.concatenate(
        [
            fresh(ds, "difference", *kind).max(1) < ROUNDING
            if blind
            else fresh(ds, "least_difference", *kind).min(1) > CLEAR
            for kind, blind in BLIND.items()
        ]
    )
    agree, of = int(as_expected.sum()), as_expected.size
    measured = f"{agree} of {of} verdicts are the same in all seeds"
    return Judged(measured, agree == of if of > len(BLIND) else None)


def trained_alike(ds: xr.Dataset) -> Judged:
    """One layer, two, and two under a full mask, after training."""
    found = {kind: trained(ds, "trained_difference", *kind).values for kind in BLIND}
    alike = [found[kind].max() < ROUNDING if blind else found[kind].min() > CLEAR for kind, blind in BLIND.items()]
    return Judged("; ".join(f"{_range(x)} eps" for x in found.values()), bool(all(alike)))


def guess(ds: xr.Dataset, layers: int, mask: str, positional: str) -> Judged:
    """Half of the answers are right, all the time."""
    accuracy = trained(ds, "accuracy", layers, mask, positional)
    off = float(abs(accuracy - 0.5).max())
    seeds, steps = accuracy.sizes["seed"], accuracy.sizes["step"]
    return Judged(f"accuracy within {off:.2g} of 1/2 in {seeds} seeds at all {steps} steps", off < TIES)


def learn(ds: xr.Dataset, layers: int, mask: str, positional: str) -> Judged:
    """Nearly all answers are right in the end."""
    last = trained(ds, "accuracy", layers, mask, positional).isel(step=-1)
    return decided(f"accuracy {over_told(last, '.3f')} after {int(last['step'])} steps", each_above(last, SOLVED))


def _range(values: np.ndarray) -> str:
    low, high = (f"{x:.2g}" for x in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"
