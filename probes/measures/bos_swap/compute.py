"""Another embedding at position 0: what a model does without its first token.

`swapped` is a view of the same weights in which position 0 holds a replacement before block 0 reads it, or from a later
block on, or in its keys or values alone, or in part. `reweighed` takes key 0 away, or holds what it does to the denominators
of attention. Each is a view like any other, and every measure runs on it unchanged. `bos_swap` runs several of them before
and after; `probes.models.swap` has the names of what can be done.

**Removed.** The log form of leakage (`probes.leakage`) is V(X - M), X what the residual stream makes of a head's log-weights
(through logits and denominators), M what the mask does. The residual component is V(X), the leakage that would be left if
the mask made none, and the fraction of it removed is `1 - V(X)_after / V(X)_before`: 1 where the swap leaves nothing, 0
where it changes nothing, negative where it adds. Heads and blocks are averaged before the ratio. The
*Shapley value* of the residual source, V(X) - C(X, M), is no measure to take a fraction of: where the residual stream works
against the mask, as sinks do that steady the denominators, it is negative. It is given before and after (`source_...`),
as is every other part, since a swap acts on all of them.

**Intervals** (95 %, percentiles of the bootstrap) are paired: each resample draws the prompts once, within each half, and
takes the same ones before and after. V(X) is estimated without bias and can be noise around 0, above all in block 0: where
the estimate is not above 0 there is no fraction (NaN), and where more than 2.5 % of the resamples are not, its interval is
infinite at both ends: more prompts are needed to know it.

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
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.checks import check_logits
from ...models.load import takes_model
from ...models.swap import Intervention, intervention
from ...models.view import View
from ...results.curves import rms_profile
from ...results.dataset import Variable, dataset, provenance, with_ends, with_low_high
from ...results.statistics import INTERVAL, jackknife
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
LEAST = {"profile_prompts": 0, "products": 2, "recall": 0}
WITHOUT_LEAKAGE = ("without-0", "held-log-z")  # see the module's text
RESIDUAL = "residual component of leakage, log form, mean over blocks and heads"
AT = ("layer", "band")
# What is measured on either side of a swap, by its variable's name.
SIDES = {
    "leakage_{}": Variable(("part", *AT), "leakage, log form, mean over heads", "nat^2"),
    "source_{}": Variable(("source", *AT), "leakage, log form, Shapley value, mean over heads", "nat^2"),
    "weight_{}": Variable(("source", *AT), "leakage, weight form, Shapley value, mean over heads"),
    "residual_{}_of_model": Variable(("band",), RESIDUAL, "nat^2"),
    "residual_steady_{}_of_model": Variable(("band",), f"{RESIDUAL}, the constant sink taken out", "nat^2"),
    "sink_rate_{}": Variable(("layer",), f"share of (prompt, head) with alpha > {THRESHOLD:g} at position 0"),
    "loss_{}": Variable(("position",), "next-token loss, mean over prompts", "nat"),
    "sensitivity_{}": Variable(("position",), "||J_j||_F / sqrt(d), rms over prompts"),
}
# What `probes.leakage` calls the first of these: by head, and the residual component, whose heads and blocks are averaged.
FORMS = {"leakage_{}": "log_form", "source_{}": "log_source", "weight_{}": "weight_source"}
COMPONENTS = {"residual_{}_of_model": "log_stream", "residual_steady_{}_of_model": "steady_stream"}
RECALL = {
    "log_p": Variable((), "recall, log probability of the value", "nat"),
    "exact": Variable((), "recall, share of exact answers"),
}
Side = dict[str, np.ndarray]  # of `SIDES` [resample, ...], of others than leakage one; losses, divergences, recall
Variables = dict[str, tuple[Any, ...]]


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
            "mean@4:keys" or "without-0@8", see `probes.models.swap`; or a list of such. Means are taken over `tokens`.
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
        `weight_...` [source, layer, band], those of the weight form: each `before` and `after`, and `leakage_change`.
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
    bands, lags = check(model, tokens, bands, lags)
    options: dict[str, Any] = {"bands": bands, "lags": lags, "seed": seed, "bootstrap": bootstrap}
    options |= {"profile_prompts": profile_prompts, "products": products, "recall": recall}
    for name, least in LEAST.items():
        if options[name] < least:
            raise InputError(f"{name}={options[name]} is too few; give {least} or more")
    if recall:
        check_recall(model, recall)
    check_logits(model)
    views = {name: swap.on(model, tokens, seed=seed) for name, swap in swaps.items()}
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    pieces, share = pieces or Store(), 1 / (1 + len(swaps))
    before = _side(model, tokens, options, drawn, pieces.within("before"), part(progress, 0.0, share))
    results = []
    for n, (name, view) in enumerate(views.items(), 1):
        heard = part(progress, n * share, (n + 1) * share)
        unknown = before if swaps[name].what in WITHOUT_LEAKAGE else None
        after = _side(view, tokens, options, drawn, pieces.within(name), heard, model, unknown)
        results.append(_compared(before, after) | _of_behaviour(before, after, drawn.double().numpy()))
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


def _side(
    model: View,
    tokens: Tensor,
    options: Mapping[str, Any],
    drawn: Tensor,
    pieces: Store,
    progress: Progress | None,
    original: View | None = None,
    unknown: Side | None = None,
) -> Side:
    """The model as it is, or another one and how far it is from the `original`.

    Where the leakage of that one means nothing, it is NaN in the shape of `unknown`.
    """
    heard = {name: part(progress, *stage) for name, stage in STAGES.items()}
    if unknown is None:
        forms = splits(model, tokens, options["bands"], options["lags"], drawn, heard["leakage"], pieces=pieces)
        found = {name: forms[form].mean(-2) for name, form in FORMS.items()}
        found |= {name: forms[form][:, 0].mean((1, 2)) for name, form in COMPONENTS.items()}
    else:
        found = {name: np.full_like(unknown[name], np.nan) for name in (*FORMS, *COMPONENTS)}
    sink = sinks(model, tokens, keys=(0,), pieces=pieces, progress=heard["sinks"]).isel(key=0)
    losses, divergences = consequences(model, tokens, original, heard["loss"], pieces=pieces)
    found |= {"sink_rate_{}": sink.sink_rate.values[None], "loss_{}": _padded(losses.mean(0))[None], "losses": losses}
    if divergences is not None:
        found["kl"] = divergences
    if len(first := tokens[: options["profile_prompts"]]):
        sketch: Any = {"method": "sketch", "products": options["products"], "seed": options["seed"]}
        ds = jacobian(model, first, **sketch, pieces=pieces, progress=heard["sensitivity"])
        found["sensitivity_{}"] = rms_profile(ds.sensitivity).mean[None]
    if options["recall"]:
        lists = {"pairs": RECALLED, "contexts": options["recall"], "seed": options["seed"]}
        ds = retrieval(model, **lists, pieces=pieces, progress=heard["recall"])
        found |= {name: ds[name].values for name in RECALL}
    return found


# ----------------------------------------------------------------------------------------------------- what is reported


def _along_replacements(results: Sequence[Variables]) -> Variables:
    """Variables of each replacement along a leading dimension."""
    return {
        name: (("replacement", *dims), np.stack([one[name][1] for one in results]), attrs)
        for name, (dims, _, attrs) in results[0].items()
    }


def _compared(before: Side, after: Side) -> Variables:
    """What is measured on either side, and the fractions of V(X) that are removed."""
    found: Variables = {}
    for name, variable in SIDES.items():
        for when, side in (("before", before), ("after", after)):
            if name in side:
                words = f"{variable.long_name}, {when} the swap"
                found |= with_ends(name.format(when), variable._replace(long_name=words), side[name])
    change = SIDES["leakage_{}"]._replace(long_name="change of leakage, log form, mean over heads, by the swap")
    found |= with_ends("leakage_change", change, after["leakage_{}"] - before["leakage_{}"])
    for name in COMPONENTS:
        variable = Variable(("band",), f"fraction of the {SIDES[name].long_name}, that the swap removes")
        ends = removed(before[name], after[name])
        name = name.replace("residual", "removed").replace("_{}", "")
        resampled = len(before["leakage_{}"]) > 1
        found |= with_low_high(name, variable, ends) if resampled else {name: variable.of(ends[0])}
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


def _of_behaviour(before: Side, after: Side, weights: Float[np.ndarray, "resample prompt"]) -> Variables:
    """Changes of the next-token loss, divergence, recall; `weights` say how often a resample has each prompt."""
    whole = weights / weights.sum(1, keepdims=True)  # in a mean over both halves
    change = whole @ (after["losses"] - before["losses"])  # [resample, predicted]
    words, of_kl = (
        "change of the next-token loss by the swap",
        "KL divergence of the next token from the model as it is",
    )
    found = with_ends("loss_change", Variable(("position",), words, "nat"), _padded(change))
    for name, by_position, of in (("loss_change", change, words), ("kl", whole @ after["kl"], of_kl)):
        known = ~np.isnan(by_position[0, 1:])
        mean = by_position[:, 1:][:, known if known.any() else slice(None)].mean(1)
        found |= with_ends(f"{name}_of_model", Variable((), f"{of}, mean over positions from 1 on", "nat"), mean)
    for name, variable in ((name, variable) for name, variable in RECALL.items() if name in before):
        first, second = before[name], after[name]
        for when, values in (("before", first), ("after", second), ("change", second - first)):
            ends = jackknife(np.mean, values, np.arange(len(values)) // 2)  # over couples of lists
            words = f"{variable.long_name}, {when}{' by' if when == 'change' else ''} the swap"
            found |= with_low_high(f"recall_{name}_{when}", variable._replace(long_name=words), ends)
    return found


def _padded(values: Float[np.ndarray, "... predicted"]) -> Float[np.ndarray, "... position"]:
    """NaN at the last position, which predicts nothing."""
    return np.concatenate([values, np.full((*values.shape[:-1], 1), np.nan)], -1)
