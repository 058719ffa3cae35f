"""Another embedding at position 0: what a model does without its first token.

`swapped` is a view of the same weights in which position 0 holds a replacement before block 0 reads it, or from a later
block on, or in its keys or values alone, or in part. `reweighed` takes key 0 away, or holds what it does to the denominators
of attention. Each is a view like any other, and every measure runs on it unchanged. `bos_swap` runs several of them before
and after; `probes.models.intervene` has the names of what can be done.

**Removed.** The log form of leakage (`probes.leakage`) is V(X - M), X what the residual stream makes of a head's log-weights
(through logits and denominators), M what the mask does. The residual component is V(X), the leakage that would be left if
the mask made none, and the fraction of it removed is `1 - V(X)_after / V(X)_before`: 1 where the swap leaves nothing, 0
where it changes nothing, negative where it adds. Heads and blocks are averaged before the ratio. The
*Shapley value* of the residual source, V(X) - C(X, M), is no measure to take a fraction of: where the residual stream works
against the mask, as sinks do that steady the denominators, it is negative. It is given before and after (`source_...`),
as is every other part with its change, since a swap acts on all of them.

**Intervals** (95 %, percentiles of the bootstrap) are paired: each resample draws the prompts once, within each half, and
takes the same ones before and after. V(X) is estimated without bias and can be noise around 0, above all in block 0: where
the estimate is not above 0 there is no fraction (NaN), and where more than 2.5 % of the resamples are not, its interval is
infinite at both ends: more prompts are needed to know it. `residual_change_of_model` is known better, since much of the
noise is the same before and after.

**Loss.** `-log p` of the token at i + 1 read out at position i, in nats. At position 0 the model predicts from the
replacement alone, so that means over positions begin at 1. Where the next token of some prompt is one that the model's head
excludes (toys that predict labels only) there is no loss: NaN, left out of the mean over positions.

**Behaviour.** `kl_of_model` is `KL(p_i || p'_i)` of the next token, p as the model is; `recall_...` are those of
`probes.retrieval` on lists of `RECALLED` pairs, before and after.

**What has no leakage.** Without key 0, log-weights of it are minus infinity; with log Z held, logits and
denominators are no longer those that mask and stream make. There the parts of leakage after the intervention are NaN.

**Jacobian profile.** Sensitivity to what block 0 reads, with the same probes before and after. At position 0 that is the
sensitivity to the replacement, another point: under "zero" the norms divide by sqrt(eps) there, in block after block where
there are no biases, and numbers of 1e13 are right.

Sources: science of the measurement, section 4, "BOS swap"; [Ruscio], arXiv 2606.06160, removes 40 % at early queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.checks import check_logits
from ...models.intervene import Intervention, intervention
from ...models.load import takes_model
from ...models.view import View
from ...results.curves import rms_profile
from ...results.dataset import dataset, provenance
from ...results.statistics import INTERVAL, couples, jackknife
from ...results.variables import Variable, with_ends, with_low_high
from ...run.progress import Progress, part
from ...run.store import Store
from ..consequences import RECALLED, check_recall, consequences
from ..jacobian import PRODUCTS, jacobian
from ..leakage.compute import LAGS, PARTS, SOURCES, band_coordinates, check
from ..leakage.forms import resampling, splits
from ..retrieval import retrieval
from ..sinks import THRESHOLD, sinks

PROFILE_PROMPTS = 4
# When each is measured, as shares of a side's time.
STAGES = {
    "leakage": (0.0, 0.5),
    "sinks": (0.5, 0.6),
    "loss": (0.6, 0.7),
    "sensitivity": (0.7, 0.9),
    "recall": (0.9, 1.0),
}
LEAST = {"bootstrap": 0, "seed": 0, "profile_prompts": 0, "products": 2, "recall": 0}
WITHOUT_LEAKAGE = ("without-0", "held-log-z")  # see the module's text
# Of the log form's parts, and Shapley values of both forms: what `probes.leakage` calls them, dimension, words and unit.
FORMS = {
    "leakage": ("log_form", "part", "leakage, log form", "nat^2"),
    "source": ("log_source", "source", "leakage, log form, Shapley value", "nat^2"),
    "weight": ("weight_source", "source", "leakage, weight form, Shapley value", "1"),
}
# Of V(X): the end of its name, what `probes.leakage` calls it, and what it leaves out.
COMPONENTS = {"": ("log_stream", ""), "_steady": ("steady_stream", ", the constant sink taken out")}
Leaks = Mapping[str, Float[np.ndarray, "resample entry layer head band"]]
Variables = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class State:
    """One side of a swap: what was measured with one embedding at position 0."""

    leaks: Leaks  # by the names of `probes.leakage`
    sink: xr.Dataset  # of key 0
    losses: Float[np.ndarray, "prompt predicted"]
    divergences: Float[np.ndarray, "prompt predicted"] | None  # from the model as it is
    profile: Float[np.ndarray, " position"] | None
    recall: xr.Dataset | None


@takes_model
def bos_swap(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    replacement: Any = "mean",
    seed: int = 0,
    bands: Any = None,
    lags: Any = LAGS,
    bootstrap: int = 400,
    profile_prompts: int = PROFILE_PROMPTS,
    products: int = PRODUCTS,
    recall: int = 0,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """What another embedding at position 0 does to leakage, sinks, next-token loss and the Jacobian profile.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], at least 4 prompts, as in `probes.leakage`. Position 0, BOS or not, is replaced.
        replacement: a token id, "mean", "zero", "random" or "drawn", see `swapped`; or an intervention by its name, as
            "mean@4:keys" or "without-0@8", see `probes.models.intervene`; or a list of such. Means are taken over `tokens`.
        seed: of the resampling, the sketch's probes and the random direction.
        bands, lags, bootstrap: as in `probes.leakage`.
        profile_prompts: how many prompts the Jacobian profile is taken on, the first ones; all, if there are fewer; 0: no
            profile.
        products: of its sketch, per prompt.
        recall: how many lists recall is measured on, an even number; 0: none.
        documents: what each prompt is a window of, as in `probes.leakage`.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset; of several replacements all but `tokens` has the leading dimension `replacement`, and the model as it is
        was measured once. With intervals `..._low` and `..._high` (unless `bootstrap` is 0):
        `removed_of_model` [band], the fraction of the residual component that the swap removes, see the module's text, and
        `removed_steady_of_model`, the same without the constant sink (see `probes.leakage`); what they are fractions of,
        `residual_..._of_model` [band] and `residual_steady_..._of_model`; means over heads of `leakage_...`
        [part, layer, band], the log form in squared nats, `source_...` [source, layer, band], its Shapley values, and
        `weight_...` [source, layer, band], those of the weight form: each `before`, `after` and the `change`.
        `loss_change [position]`, `loss_change_of_model` (mean over positions from 1 on), `kl_of_model` alike, nats; with
        `recall` the mean over lists of `recall_log_p_...` and `recall_exact_...`, before, after and the change.
        Without intervals: `sink_rate_before`, `sink_rate_after` [layer] of key 0; `loss_before`, `loss_after` [position],
        NaN at the last, which predicts nothing; `sensitivity_before`, `sensitivity_after` [position], rms over prompts.
        `tokens`; attributes say what made it, a single `replacement` among them.

    Raises:
        InputError: no such replacement or one twice, an option that cannot be used, prompts that do not fit bands and lags,
            or values that are not finite.

    Source: science of the measurement, section 4; [Ruscio], arXiv 2606.06160.
    """
    swaps = _interventions(replacement)
    numbers = {"bootstrap": bootstrap, "profile_prompts": profile_prompts, "products": products, "recall": recall}
    options = _options(model, tokens, bands, lags, seed=seed, **numbers)
    check_logits(model)
    views = {name: swap.on(model, tokens, seed=seed) for name, swap in swaps.items()}
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    pieces, share = pieces or Store(), 1 / (1 + len(swaps))
    before = _state(model, tokens, options, drawn, pieces.within("before"), part(progress, 0.0, share))
    results = []
    for n, (name, view) in enumerate(views.items(), 1):
        heard = part(progress, n * share, (n + 1) * share)
        leaks = None if swaps[name].what not in WITHOUT_LEAKAGE else before.leaks
        after = _state(view, tokens, options, drawn, pieces.within(name), heard, model, leaks)
        variables = _of_leakage(before.leaks, after.leaks, intervals=bootstrap > 0)
        results.append(variables | _of_behaviour(before, after, drawn.double().numpy()) | _of_attention(before, after))
    if progress is not None:
        progress(1.0, 1.0)
    alone = len(swaps) == 1
    chosen: Any = next(iter(swaps.values())).label if alone else list(swaps)
    made = provenance(model, tokens, measurement="bos_swap", replacement=chosen, **options)
    return dataset(
        results[0] if alone else _along_replacements(results),
        tokens=tokens,
        coords={
            **({} if alone else {"replacement": chosen}),
            "part": list(PARTS),
            "source": list(SOURCES),
            "layer": range(model.spec.blocks),
            **band_coordinates(options["bands"]),
        },
        attrs=made | ({"replacement": chosen} if alone else {}),
    )


def _interventions(given: Any) -> dict[str, Intervention]:
    """By name, in order.

    Raises:
        InputError: there is none, one is unknown or named twice.
    """
    chosen = [intervention(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    named = {str(one.label): one for one in chosen}
    if not chosen or len(named) < len(chosen):
        raise InputError(f"replacements {', '.join(str(one.label) for one in chosen)}: give one or more, each once")
    return named


def _options(model: View, tokens: Tensor, bands: Any, lags: Any, **numbers: Any) -> dict[str, Any]:
    """The options by name, once they can be used."""
    bands, lags = check(model, tokens, bands, lags)
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]:
            raise InputError(f"{name}={value} cannot be used; give a whole number, {LEAST[name]} or more")
    if numbers["recall"]:
        check_recall(model, numbers["recall"])
    return {"bands": bands, "lags": lags} | numbers


def _state(
    model: View,
    tokens: Tensor,
    options: Mapping[str, Any],
    drawn: Tensor,
    pieces: Store,
    progress: Progress | None,
    original: View | None = None,
    unknown: Leaks | None = None,
) -> State:
    """The model as it is, or another one and how far it is from the `original`.

    Where the leakage of that one means nothing, it is NaN in the shape of `unknown`.
    """
    heard = {name: part(progress, *stage) for name, stage in STAGES.items()}
    if unknown is None:
        forms = splits(model, tokens, options["bands"], options["lags"], drawn, heard["leakage"], pieces=pieces)
        leaks = {form: forms[form] for form, *_ in (*FORMS.values(), *COMPONENTS.values())}
    else:
        leaks = {name: np.full_like(values, np.nan) for name, values in unknown.items()}
    sink = sinks(model, tokens, keys=(0,), pieces=pieces, progress=heard["sinks"]).isel(key=0)
    losses, divergences = consequences(model, tokens, original, heard["loss"], pieces=pieces)
    sketch = {name: options[name] for name in ("products", "seed")}
    profile, first = None, tokens[: options["profile_prompts"]]
    if len(first):
        ds = jacobian(model, first, method="sketch", **sketch, pieces=pieces, progress=heard["sensitivity"])
        profile = rms_profile(ds.sensitivity).mean
    recall = None
    if options["recall"]:
        lists = {"pairs": RECALLED, "contexts": options["recall"]}
        recall = retrieval(model, **lists, seed=options["seed"], pieces=pieces, progress=heard["recall"])
    return State(leaks, sink, losses, divergences, profile, recall)


# ----------------------------------------------------------------------------------------------------- what is reported


def _along_replacements(results: Sequence[Variables]) -> Variables:
    """Variables of each replacement along a leading dimension."""
    return {
        name: (("replacement", *dims), np.stack([one[name][1] for one in results]), attrs)
        for name, (dims, _, attrs) in results[0].items()
    }


def _compared(name: str, variable: Variable, sides: Sequence[np.ndarray], end: str = "") -> Variables:
    """Resamples before and after, and their difference, each with its interval."""
    found = {}
    for when, values in zip(("before", "after", "change"), (*sides, sides[1] - sides[0]), strict=True):
        words = f"{variable.long_name}, {when}{' by' if when == 'change' else ''} the swap"
        found |= with_ends(f"{name}_{when}{end}", variable._replace(long_name=words), values)
    return found


def _of_leakage(before: Leaks, after: Leaks, *, intervals: bool) -> Variables:
    """Parts and sources of leakage, V(X), and the fractions of it that are removed."""
    found: Variables = {}
    for name, (form, dim, words, units) in FORMS.items():
        variable = Variable((dim, "layer", "band"), f"{words}, mean over heads", units)
        found |= _compared(name, variable, [side[form].mean(-2) for side in (before, after)])
    for name, (form, without) in COMPONENTS.items():
        sides = [side[form][:, 0].mean((1, 2)) for side in (before, after)]
        words = f"residual component of leakage, log form, mean over blocks and heads{without}"
        found |= _compared(f"residual{name}", Variable(("band",), words, "nat^2"), sides, "_of_model")
        variable = Variable(("band",), f"fraction of the {words}, that the swap removes")
        for end, values in zip(("", "_low", "_high") if intervals else ("",), removed(*sides), strict=False):
            found[f"removed{name}_of_model{end}"] = variable.of(values)
    return found


def removed(
    before: Float[np.ndarray, "resample ..."], after: Float[np.ndarray, "resample ..."]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`1 - after / before`: of the first, and low and high end over the other resamples; see the module's text.

    A resample with nothing to remove counts as unknown: below the low end and above the high one.
    """
    known = (before == after) | (before > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        fraction = np.where(before == after, 0.0, 1 - after / before)
    estimate = np.where(known, fraction, np.nan)[0]

    def end(percent: float, outside: float, method: Any) -> np.ndarray:
        resamples = np.where(known, fraction, outside)[1:]
        at = np.percentile(resamples, percent, axis=0, method=method) if len(resamples) else np.nan
        return np.where(np.isnan(estimate), np.nan, at)

    return estimate, end(INTERVAL[0], -np.inf, "lower"), end(INTERVAL[1], np.inf, "higher")


def _of_behaviour(before: State, after: State, weights: Float[np.ndarray, "resample prompt"]) -> Variables:
    """Next-token loss, divergence and recall; `weights` say how often a resample has each prompt."""
    found: Variables = {}
    for when, side in (("before", before), ("after", after)):
        words = f"next-token loss, mean over prompts, {when} the swap"
        found[f"loss_{when}"] = Variable(("position",), words, "nat").of(_padded(side.losses.mean(0)))
    whole = weights / weights.sum(1, keepdims=True)  # in a mean over both halves
    change = whole @ (after.losses - before.losses)  # [resample, predicted]
    words, of_kl = (
        "change of the next-token loss by the swap",
        "KL divergence of the next token from the model as it is",
    )
    found |= with_ends("loss_change", Variable(("position",), words, "nat"), _padded(change))
    for name, by_position, of in (("loss_change", change, words), ("kl", whole @ after.divergences, of_kl)):
        known = ~np.isnan(by_position[0, 1:])
        mean = by_position[:, 1:][:, known if known.any() else slice(None)].mean(1)
        found |= with_ends(f"{name}_of_model", Variable((), f"{of}, mean over positions from 1 on", "nat"), mean)
    return found | _of_recall(before.recall, after.recall)


def _padded(values: Float[np.ndarray, "... predicted"]) -> Float[np.ndarray, "... position"]:
    """NaN at the last position, which predicts nothing."""
    return np.concatenate([values, np.full((*values.shape[:-1], 1), np.nan)], -1)


def _of_recall(before: xr.Dataset | None, after: xr.Dataset | None) -> Variables:
    """Recall with intervals over couples of lists; nothing where it was not measured."""
    found: Variables = {}
    if before is None or after is None:
        return found
    for name, what, unit in (
        ("log_p", "log probability of the value", "nat"),
        ("exact", "share of exact answers", "1"),
    ):
        first, second = before[name].values, after[name].values
        for when, values in (("before", first), ("after", second), ("change", second - first)):
            variable = Variable((), f"recall, {what}, {when}{' by' if when == 'change' else ''} the swap", unit)
            ends = jackknife(np.mean, values, couples(before))
            found |= with_low_high(f"recall_{name}_{when}", variable, ends)
    return found


def _of_attention(before: State, after: State) -> Variables:
    """Weights on position 0, and the Jacobian profile where it was measured."""
    found: Variables = {}
    for when, side in (("before", before), ("after", after)):
        words = f"share of (prompt, head) with alpha > {THRESHOLD:g} at position 0, {when} the swap"
        found[f"sink_rate_{when}"] = Variable(("layer",), words).of(side.sink.sink_rate.values)
        if side.profile is not None:
            norm = f"||J_j||_F / sqrt(d), rms over prompts, {when} the swap"
            found[f"sensitivity_{when}"] = Variable(("position",), norm).of(side.profile)
    return found
