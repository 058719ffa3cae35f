"""Another embedding at position 0: what a model does without its first token.

`swapped` puts a view in front of a view: the same weights, but position 0 holds a replacement before block 0 reads it, or
from a later block on, or in its keys or values alone, or in part. `reweighed` takes key 0 away, or holds what it does to the
denominators of attention. Each is a view like any other, and every probe runs on it unchanged. `bos_swap` runs several of
them before and after; `probes.models.intervene` has the names of what can be done.

**Removed.** The log form of leakage (`probes.leakage`) is V(X - M), X what the residual stream makes of a head's log-weights
(through logits and denominators), M what the mask does. The residual component is V(X), the leakage that would be left if
the mask made none, and the fraction of it removed is `1 - V(X)_after / V(X)_before`: 1 where the swap leaves nothing, 0
where it changes nothing, negative where it adds. Heads, blocks for `removed_of_model`, are averaged before the ratio. The
*Shapley value* of the residual source, V(X) - C(X, M), is no measure to take a fraction of: where the residual stream works
against the mask, as sinks do that steady the denominators, it is negative. It is given before and after (`source_...`),
as is every other part with its change, since a swap acts on all of them.

**Intervals** (95 %, percentiles of the bootstrap) are paired: each resample draws the prompts once, within each half, and
takes the same ones before and after. V(X) is estimated without bias and can be noise around 0, above all in block 0: where
the estimate is not above 0 there is no fraction (NaN), and where more than 2.5 % of the resamples are not, its interval is
infinite at both ends: more prompts are needed to know it. `residual_change` is known better, since much of the noise is the
same before and after.

**Loss.** `-log p` of the token at i + 1 read out at position i, in nats. At position 0 the model predicts from the
replacement alone, so that means over positions begin at 1. Where the next token of some prompt is one that the model's head
excludes (toys that predict labels only) there is no loss: NaN, left out of the mean over positions.

**Behaviour.** `kl` is `KL(p_i || p'_i)` of the next token, p as the model is; `recall_...` are those of `probes.retrieval`
on lists of `RECALLED` pairs, before and after: the mean, and by the depth of the pair.

**Definitions of "removed".** [Ruscio] does not say of what 40 % are removed. `removed_by` has every definition that we could
think of (`DEFINITIONS`), each as `1 - after / before`.

**What has no leakage.** Without key 0, log-weights of it are minus infinity; with log Z held or made equal, logits and
denominators are no longer those that mask and stream make. There the parts of leakage after the intervention are NaN.

**Jacobian profile.** Sensitivity to what block 0 reads, with the same probes before and after. At position 0 that is the
sensitivity to the replacement, another point: under "zero" the norms divide by sqrt(eps) there, in block after block where
there are no biases, and numbers of 1e13 are right.

Sources: science of the measurement, section 4, "BOS swap"; [Ruscio], arXiv 2606.06160, removes 40 % at early queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..models.checks import check_logits
from ..models.given import takes_model
from ..models.intervene import Intervention, intervention
from ..models.view import View
from ..results.curves import Profile, rms_profile
from ..results.dataset import dataset, provenance, tokens_hash
from ..results.statistics import INTERVAL
from ..results.variables import Variable, with_ends
from ..run.progress import Progress, part
from ..run.store import Store
from .consequences import RECALLED, check_recall, consequences, recalled
from .jacobian import PRODUCTS, jacobian
from .leakage import BOUND
from .leakage.compute import LAGS, PARTS, SOURCES, band_coordinates, check
from .leakage.forms import resampling, splits
from .retrieval import retrieval
from .sinks import THRESHOLD, sinks

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


# -------------------------------------------------------------------------------------------------- before and after


@dataclass(frozen=True)
class State:
    """One side of a swap: what was measured with one embedding at position 0. Made by `state`."""

    of: dict[str, Any]  # model, prompts and options
    leaks: dict[str, np.ndarray]  # by `FORMS` and "residual", [resample, entry, layer, head, band]
    sink: xr.Dataset  # of key 0
    losses: Float[np.ndarray, "prompt predicted"]
    divergences: Float[np.ndarray, "prompt predicted"] | None  # from the model as it is
    profile: Profile | None
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
    before: State | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """What another embedding at position 0 does to leakage, sinks, next-token loss and the Jacobian profile.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], at least 4 prompts, as in `probes.leakage`. Position 0, BOS or not, is replaced.
        replacement: a token id, "mean", "zero", "random" or "drawn", see `swapped`; or an intervention by its name, as
            "mean@4:keys" or "without-0@8", see `probes.models.intervene`. Means are taken over `tokens`.
        seed: of the resampling, the sketch's probes and the random direction.
        bands, lags, bootstrap: as in `probes.leakage`.
        profile_prompts: how many prompts the Jacobian profile is taken on, the first ones; all, if there are fewer; 0: no
            profile.
        products: of its sketch, per prompt.
        recall: how many lists recall is measured on, an even number; 0: none.
        documents: what each prompt is a window of, as in `probes.leakage`.
        before: the model as it is, measured with the same options (`state`): several replacements need that only once.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset. With intervals `..._low` and `..._high` (unless `bootstrap` is 0), and means over heads:
        `removed [layer, band]` and `removed_of_model [band]`, the fraction of the residual component that the swap removes,
        see the module's text; `removed_steady...`, the same without the constant sink (see `probes.leakage`); `residual_...`
        [layer, band] and `residual_..._of_model` [band], what they are fractions of, `residual_steady_...` alike;
        `leakage_...` [part, layer, band], the log form in squared nats; `source_...` [source, layer, band], its Shapley
        values; `weight_...` [source, layer, band], those of the weight form: each `before`, `after` and the `change`.
        `loss_change [position]`, `loss_change_of_model` (mean over positions from 1 on), `kl`, `kl_of_model` alike, nats;
        `removed_by [definition, band]`; with `recall` the mean over lists `recall_log_p_...` and `recall_exact_...`, before,
        after and the change, and `recall_by_depth_log_p_... [depth]`, `recall_by_depth_exact_... [depth]` alike.
        Without intervals: `alpha_before`, `alpha_after` [layer, head] and `sink_rate_before`, `sink_rate_after` [layer] of
        key 0; `loss_before`, `loss_after` [position], NaN at the last, which predicts nothing; `sensitivity_before`,
        `sensitivity_after` [position], rms over prompts, and their standard errors `..._stderr`. `tokens`; attributes say
        what made it, `replacement` among them.

    Raises:
        InputError: no such replacement, an option that cannot be used, prompts that do not fit bands and lags, values
            that are not finite, or `before` is of another model, other prompts or options.

    Source: science of the measurement, section 4; [Ruscio], arXiv 2606.06160.
    """
    numbers = {"bootstrap": bootstrap, "profile_prompts": profile_prompts, "products": products, "recall": recall}
    options = _options(model, tokens, seed=seed, bands=bands, lags=lags, **numbers)
    chosen = intervention(replacement)
    check_logits(model)
    view = chosen.on(model, tokens, seed=seed)
    if before is not None and before.of != (key := _key(model, tokens, options)):
        other = ", ".join(name for name in key if before.of.get(name) != key[name])
        raise InputError(f"before was measured with other {other}; measure it with the same, or leave it out")
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    half = 0.5 if before is None else 0.0  # of the work, before the swap
    pieces = pieces or Store()
    if before is None:
        before = _state(model, tokens, options, drawn, pieces.within("before"), part(progress, 0.0, half))
    after = _state(view, tokens, options, drawn, pieces.within("after"), part(progress, half, 1.0), chosen, model)
    states = {"before": before, "after": after}
    if progress is not None:
        progress(1.0, 1.0)
    name = chosen.label
    return dataset(
        _variables(states, drawn.double().numpy(), bootstrap > 0),
        tokens=tokens,
        coords={
            "part": list(PARTS),
            "source": list(SOURCES),
            "layer": range(model.spec.blocks),
            "head": range(model.spec.heads),
            "definition": list(DEFINITIONS),
            **({"depth": range(RECALLED)} if recall else {}),
            **band_coordinates(options["bands"]),
        },
        attrs=provenance(model, tokens, measurement="bos_swap", replacement=name, **options) | {"replacement": name},
    )


def _variables(
    states: Mapping[str, State], weights: Float[np.ndarray, "resample prompt"], intervals: bool
) -> dict[str, tuple[Any, ...]]:
    """The result's variables, of the sides by "before" and "after"; `weights` say how often a resample has each prompt."""
    variables: dict[str, tuple[Any, ...]] = {}

    def add(name: str, dims: tuple[str, ...], values: Any, said: str, units: str = "1") -> None:
        variables[name] = Variable(dims, said, units).of(values)

    def changed(name: str, suffix: str, kind: Callable[[State], Any], variable: Variable) -> list[Any]:
        """Resamples before and after, and their difference, each with its interval; the first two."""
        one = kind(states["before"])
        other = kind(states["after"]) if states["after"].leaks else np.full_like(one, np.nan)
        for when, values in (("before", one), ("after", other), ("change", other - one)):
            said = f"{variable.long_name}, {when}{' by' if when == 'change' else ''} the swap"
            variables.update(with_ends(f"{name}_{when}{suffix}", variable._replace(long_name=said), values))
        return [one, other]

    for form, (dim, of_what, units) in FORMS.items():
        variable = Variable((dim, "layer", "band"), f"{of_what}, mean over heads", units)
        changed(form, "", lambda side, form=form: side.leaks[form].mean(-2), variable)
    levels: tuple[tuple[str, tuple[str, ...], Any, str], ...] = (
        ("", ("layer", "band"), 2, "mean over heads"),
        ("_of_model", ("band",), (1, 2), "mean over blocks and heads"),
    )
    for (end, kind, taken), (suffix, dims, over, of_what) in product(COMPONENTS, levels):
        said = f"residual component of leakage, log form, {of_what}{taken}"
        sides = changed(
            f"residual{end}",
            suffix,
            lambda side, kind=kind, over=over: side.leaks[kind][:, 0].mean(over),  # of [resample, layer, head, band]
            Variable(dims, said, "nat^2"),
        )
        for name, values in zip(("", "_low", "_high") if intervals else ("",), removed(*sides), strict=False):
            said = f"fraction of the residual component that the swap removes, {of_what}{taken}"
            add(f"removed{end}{suffix}{name}", dims, values, said)

    for dim, values in zip(
        ("", "_low", "_high") if intervals else ("",), _by_definition(*states.values()), strict=False
    ):
        said = "fraction that the intervention removes, by what it is a fraction of; mean over blocks and heads"
        add(f"removed_by{dim}", ("definition", "band"), values, said)

    losses = [side.losses for side in states.values()]
    for when, loss in zip(states, losses, strict=True):
        said = f"next-token loss, mean over prompts, {when} the swap"
        add(f"loss_{when}", ("position",), _padded(loss.mean(0)), said, "nat")
    whole = weights / weights.sum(1, keepdims=True)  # in a mean over both halves
    found = {"loss_change": (losses[1] - losses[0], "change of the next-token loss by the swap")}
    if (divergences := states["after"].divergences) is not None:
        found["kl"] = divergences, "KL divergence of the next token from the model as it is"
    for name, (values, said) in found.items():
        by_position = whole @ values  # [resample, position]
        variables |= with_ends(name, Variable(("position",), said, "nat"), _padded(by_position))
        known = ~np.isnan(by_position[0, 1:])
        some = by_position[:, 1:][:, known] if known.any() else by_position[:, 1:]
        of_model = Variable((), f"{said}, mean over positions from 1 on", "nat")
        variables |= with_ends(f"{name}_of_model", of_model, some.mean(1))
    variables |= recalled(*(side.recall for side in states.values()))
    for when, side in states.items():
        add(
            f"alpha_{when}",
            ("layer", "head"),
            side.sink.alpha.values,
            f"mean weight on position 0 [Gu], {when} the swap",
        )
        rate = f"share of (prompt, head) with alpha > {THRESHOLD:g} at position 0, {when} the swap"
        add(f"sink_rate_{when}", ("layer",), side.sink.sink_rate.values, rate)
        if side.profile is None:
            continue
        norm = f"||J_j||_F / sqrt(d), rms over prompts, {when} the swap"
        add(f"sensitivity_{when}", ("position",), side.profile.mean, norm)
        add(f"sensitivity_{when}_stderr", ("position",), side.profile.stderr, f"standard error: {norm}")
    return variables


def state(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> State:
    """The model as it is, for `bos_swap(..., before=...)` with several replacements; options are those of `bos_swap`.

    Raises:
        InputError: as `bos_swap`.
    """
    options = _options(model, tokens, **options)
    drawn = resampling(len(tokens), options["bootstrap"], options["seed"], documents)
    found = _state(model, tokens, options, drawn, (pieces or Store()).within("before"), progress)
    if progress is not None:
        progress(1.0, 1.0)
    return found


def _options(
    model: View,
    tokens: Tensor,
    *,
    seed: int = 0,
    bands: Any = None,
    lags: Any = LAGS,
    bootstrap: int = 400,
    profile_prompts: int = PROFILE_PROMPTS,
    products: int = PRODUCTS,
    recall: int = 0,
) -> dict[str, Any]:
    """The options by name, once they can be used."""
    bands, lags = check(model, tokens, bands, lags)
    numbers = {"seed": seed, "bootstrap": bootstrap, "profile_prompts": profile_prompts, "products": products}
    numbers["recall"] = recall
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]:
            raise InputError(f"{name}={value} cannot be used; give a whole number, {LEAST[name]} or more")
    if recall:
        check_recall(model, recall)
    return {"seed": seed, "bands": bands, "lags": lags} | numbers


def _key(model: View, tokens: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """What two sides of a swap share."""
    shared = {name: getattr(model.identity, name) for name in ("weights", "backend", "dtype")}
    return shared | {"tokens": tokens_hash(tokens)} | dict(options)


def _state(
    model: View,
    tokens: Tensor,
    options: Mapping[str, Any],
    drawn: Tensor,
    pieces: Store,
    progress: Progress | None,
    done: Intervention | None = None,
    original: View | None = None,
) -> State:
    """The model as it is, or as an intervention leaves it, and then how far that is from the model as it is."""
    heard = {name: part(progress, *stage) for name, stage in STAGES.items()}
    if done is not None and done.what in WITHOUT_LEAKAGE:
        leaks = {}
    else:
        found = splits(model, tokens, options["bands"], options["lags"], drawn, heard["leakage"], pieces=pieces)
        leaks = {name: found[form] for name, form in LEAKS.items()}
    sink = sinks(model, tokens, keys=(0,), per_prompt=False, pieces=pieces, progress=heard["sinks"]).isel(key=0)
    losses, divergences = consequences(model, tokens, original, heard["loss"], pieces=pieces)
    given = {name: options[name] for name in ("products", "seed")}
    profile, first = None, tokens[: options["profile_prompts"]]
    if len(first):
        found = jacobian(model, first, method="sketch", **given, pieces=pieces, progress=heard["sensitivity"])
        profile = rms_profile(found.sensitivity, found.stderr)
    recall = None
    if options["recall"]:
        lists = {"pairs": RECALLED, "keys": "apart", "digits": 4, "candidates": 1, "contexts": options["recall"]}
        recall = retrieval(model, **lists, seed=options["seed"], pieces=pieces, progress=heard["recall"])
    return State(_key(model, tokens, options), leaks, sink, losses, divergences, profile, recall)


# By name: dimension, what it is, unit.
FORMS = {
    "leakage": ("part", "leakage, log form", "nat^2"),
    "source": ("source", "leakage, log form, Shapley value", "nat^2"),
    "weight": ("source", "leakage, weight form, Shapley value", "1"),
}
# V(X): the end of its name, what it is in `LEAKS`, and what it leaves out.
COMPONENTS = (("", "residual", ""), ("_steady", "steady", ", the constant sink taken out"))
# What `probes.leakage` calls them, and V(X).
LEAKS = {
    "leakage": "log_form",
    "source": "log_source",
    "weight": "weight_source",
    "residual": "log_stream",
    "steady": "steady_stream",
    "sink": "log_sink",
}
WITHOUT_LEAKAGE = ("without-0", "held-log-z", "equal-log-z")  # see the module's text


# Of what a fraction is removed: [resample, band] of a side, means over blocks and heads.
DEFINITIONS: dict[str, Callable[[State], Float[np.ndarray, "resample band"]]] = {
    "V(X), constant sink out": lambda side: side.leaks["steady"][:, 0].mean((1, 2)),
    "V(X), constant sink in": lambda side: side.leaks["residual"][:, 0].mean((1, 2)),
    "V(K), position 0's own term": lambda side: side.leaks["sink"][:, 0].mean((1, 2)),
    "V(S), all of leakage": lambda side: side.leaks["leakage"][:, 0].mean((1, 2)),
    "source of the stream, log form": lambda side: side.leaks["source"][:, 1].mean((1, 2)),
    "its share of leakage": lambda side: (
        DEFINITIONS["source of the stream, log form"](side) / DEFINITIONS["V(S), all of leakage"](side)
    ),
    "source of the stream, weights": lambda side: _weights(side)[:, 1].mean((1, 2)),
    "all of leakage, weights": lambda side: _weights(side).sum(1).mean((1, 2)),
}


def _weights(side: State) -> Float[np.ndarray, "resample source layer head band"]:
    """The weight form, NaN in bands where some head's variances are none of weights; see `probes.measures.leakage`."""
    found = side.leaks["weight"]
    return np.where(np.abs(found[:1]).max((1, 2, 3), keepdims=True) > BOUND, np.nan, found)


def _by_definition(before: State, after: State) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is removed under every definition, [definition, band], with both ends."""
    found = []
    for of in DEFINITIONS.values():
        one = of(before)
        found.append(removed(one, of(after) if after.leaks else np.full_like(one, np.nan)))
    value, low, high = (np.stack(some) for some in zip(*found, strict=True))
    return value, low, high


def removed(
    before: Float[np.ndarray, "resample ..."], after: Float[np.ndarray, "resample ..."]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`1 - after / before`: of the first, and low and high end over the other resamples; see the module's text.

    A resample with nothing to remove counts as unknown: below the low end and above the high one.
    """
    same, there = before == after, before > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        fraction = np.where(same, 0.0, 1 - after / before)
    estimate = np.where(same | there, fraction, np.nan)[0]

    def end(percent: float, outside: float, method: Any) -> np.ndarray:
        found = np.where(same | there, fraction, outside)[1:]
        at = np.percentile(found, percent, axis=0, method=method) if len(found) else np.nan
        return np.where(np.isnan(estimate), np.nan, at)

    return estimate, end(INTERVAL[0], -np.inf, "lower"), end(INTERVAL[1], np.inf, "higher")


def _padded(values: Float[np.ndarray, "... predicted"]) -> Float[np.ndarray, "... position"]:
    """NaN at the last position, which predicts nothing."""
    return np.concatenate([values, np.full((*values.shape[:-1], 1), np.nan)], -1)
