"""What a result of petroglyph says: changes by kind of model, tables, and the statements of [Liu-7] and [Irie]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import xarray as xr

from probes.claims.claim import Claim, read_statements
from probes.claims.rules import range_told
from probes.results.tables import Table, number

from .petroglyph import possible
from .rules import NOT_THERE, Judged, Rule, decided, each_above, has, judge, over_told

STATEMENTS = read_statements(Path(__file__).with_name("petroglyph.toml"))
# The same numbers summed in another order differ by about eps of the terms' size, some ten times per layer.
ROUNDING = 1e3  # eps; what is above it is no rounding
CLEAR = 1e9  # eps; what is above it, 2e-7 of the output, is seen in float32, too
TIES = 0.01  # accuracy; a blind model's two answers may part where its two logits tie within rounding
SOLVED = 0.95  # accuracy
Kind = tuple[int, str, str]  # layers, mask, positional
ONE, TWO, FULL = (1, "causal", "none"), (2, "causal", "none"), (2, "full", "none")
BLIND = {ONE: True, TWO: False, FULL: True}  # which of them cannot tell permuted prefixes apart


def fresh(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> np.ndarray | None:
    """A change of one kind of fresh models, `[variant, seed]`; None where the result has none."""
    wanted = {"layers": layers, "mask": mask, "positional": positional}
    if not has(ds, **wanted) or not possible(mask, positional):
        return None
    found = ds[name].sel(wanted).transpose("residual", "feed_forward", "norm", "seed").values
    return found.reshape(-1, found.shape[-1])


def trained(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> xr.DataArray | None:
    """A variable of one kind of trained models, `[seed, ...]`; None where the result has none."""
    wanted = {"layers": layers, "mask": mask, "trained_positional": positional}
    return ds[name].sel(wanted) if name in ds and has(ds, **wanted) else None


def kinds(ds: xr.Dataset) -> list[tuple[int, str, str]]:
    """(layers, mask, positional) of the fresh models."""
    found = product(ds["layers"].values, ds["mask"].values, ds["positional"].values)
    return [(int(n), str(mask), str(p)) for n, mask, p in found if possible(str(mask), str(p))]


def tables(ds: xr.Dataset) -> list[Table]:
    """Changes under permuted prefixes, in eps; accuracy of what was trained."""
    rows, learned = [], []
    for kind in kinds(ds):
        largest, least, after = fresh(ds, "difference", *kind), fresh(ds, "least_difference", *kind), None
        after = trained(ds, "trained_difference", *kind)
        assert largest is not None
        assert least is not None
        said = "-" if after is None else _range(after.values)
        rows.append([str(kind[0]), *kind[1:], str(len(largest)), _range(largest), number(least.min(), ".2g"), said])
        accuracy, loss = trained(ds, "accuracy", *kind), trained(ds, "loss", *kind)
        if accuracy is None or loss is None:
            continue
        last, final = accuracy.isel(step=-1), loss.isel(step=-1)
        cells = [range_told(x, ".3f") for x in (last, final)]
        solved = (accuracy > SOLVED).all("seed").values
        first = str(int(accuracy["step"][int(solved.argmax())])) if solved.any() else "-"
        learned.append([str(kind[0]), *kind[1:], *cells, first])
    head = ("layers", "mask", "positional")
    found = [
        Table(
            f"Change of the last output under all {ds.attrs['permutations']} permutations of a prefix, in eps of float64",
            (*head, "variants", "largest, over variants and seeds", "of the permutation of least change", "trained"),
            rows,
        )
    ]
    if learned:
        columns = (*head, "accuracy, median (range)", "loss (nats)", f"all seeds above {SOLVED:g} from step")
        found.append(Table(f"Which token stands first; blind to order: 0.5 and {math.log(2):.3f}", columns, learned))
    return found


def claims(ds: xr.Dataset) -> list[Claim]:
    """The claim in its two halves, fresh and trained, and what controls it."""
    encodings = [str(p) for p in ds["positional"].values if p != "none"]
    rules: dict[str, Rule] = {
        "petroglyph-one-layer-blind": partial(_fresh_blind, kind=ONE),
        "petroglyph-two-layers-see": partial(_fresh_see, kinds=[TWO]),
        "petroglyph-full-mask-blind": partial(_fresh_blind, kind=FULL),
        "petroglyph-encoding-sees": partial(_fresh_see, kinds=[(1, "causal", p) for p in encodings]),
        "petroglyph-variants": _variants,
        "petroglyph-trained": _trained_alike,
        "petroglyph-one-layer-cannot-learn": partial(_guesses, kind=ONE),
        "petroglyph-two-layers-learn": partial(_learns, kind=TWO),
        "petroglyph-full-mask-cannot-learn": partial(_guesses, kind=FULL),
        "petroglyph-encoding-learns": partial(_learns, kind=(1, "causal", "learned")),
    }
    said = STATEMENTS["petroglyph-encoding-sees"]
    named = replace(said, claim=said.claim.format(encodings=", ".join(encodings) or "any"))
    return judge(ds, STATEMENTS | {said.id: named}, rules)


def _fresh_blind(ds: xr.Dataset, *, kind: Kind) -> Judged:
    """All variants and seeds: the largest change is rounding."""
    if (found := fresh(ds, "difference", *kind)) is None:
        return NOT_THERE
    many = f"{found.size} models, {ds.attrs['permutations']} permutations"
    return Judged(f"largest change of {many}: {found.max():.2g} eps", bool(found.max() < ROUNDING))


def _fresh_see(ds: xr.Dataset, *, kinds: Sequence[Kind]) -> Judged:
    """All variants and seeds: every permutation is told apart, up to chance ties, even the one of least change."""
    found = [x.ravel() for kind in kinds if (x := fresh(ds, "least_difference", *kind)) is not None]
    if not found or len(found) < len(kinds):
        return NOT_THERE
    every = np.concatenate(found)
    many = f"{every.size} models, {ds.attrs['permutations']} permutations"
    return Judged(f"least change of {many}: {every.min():.2g} eps", bool(every.min() > CLEAR))


def _variants(ds: xr.Dataset) -> Judged:
    """Residual stream, feed-forward and norms: each variant's verdicts, one by one."""
    agree, of = 0, 0
    for kind, blind in BLIND.items():
        largest, least = fresh(ds, "difference", *kind), fresh(ds, "least_difference", *kind)
        if largest is None or least is None:
            return NOT_THERE
        as_expected = largest.max(1) < ROUNDING if blind else least.min(1) > CLEAR
        agree, of = agree + int(as_expected.sum()), of + as_expected.size
    measured = f"{agree} of {of} verdicts are the same in all seeds"
    return Judged(measured, agree == of if of > len(BLIND) else None)


def _trained_alike(ds: xr.Dataset) -> Judged:
    found = {kind: x.values for kind in BLIND if (x := trained(ds, "trained_difference", *kind)) is not None}
    if len(found) < len(BLIND):
        return NOT_THERE
    alike = [found[kind].max() < ROUNDING if blind else found[kind].min() > CLEAR for kind, blind in BLIND.items()]
    return Judged("; ".join(f"{_range(x)} eps" for x in found.values()), bool(all(alike)))


def _guesses(ds: xr.Dataset, *, kind: Kind) -> Judged:
    if (accuracy := trained(ds, "accuracy", *kind)) is None:
        return NOT_THERE
    off = float(abs(accuracy - 0.5).max())
    seeds, steps = accuracy.sizes["seed"], accuracy.sizes["step"]
    return Judged(f"accuracy within {off:.2g} of 1/2 in {seeds} seeds at all {steps} steps", off < TIES)


def _learns(ds: xr.Dataset, *, kind: Kind) -> Judged:
    if (accuracy := trained(ds, "accuracy", *kind)) is None:
        return NOT_THERE
    last = accuracy.isel(step=-1)
    return decided(f"accuracy {over_told(last, '.3f')} after {int(last['step'])} steps", each_above(last, SOLVED))


def _range(values: np.ndarray) -> str:
    low, high = (f"{x:.2g}" for x in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"
