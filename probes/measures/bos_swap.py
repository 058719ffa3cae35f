"""Another embedding at position 0: what a model does without its first token.

`swapped` puts a view in front of a view: the same weights, but position 0 holds a replacement before block 0 reads it. It
is a view like any other, and every probe runs on it unchanged. `bos_swap` runs several of them before and after.

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
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from ..models.checks import not_finite
from ..models.given import takes_model
from ..models.swap import swapped
from ..models.view import View
from ..results.curves import Profile, mean_profile
from ..results.dataset import dataset, provenance, tokens_hash
from ..results.statistics import INTERVAL
from ..results.variables import Variable, with_ends
from ..run.reporting import Progress, Report, part
from ..run.resume import Piece, each, within
from .jacobian import PRODUCTS, jacobian
from .jacobian import memory as of_jacobian
from .leakage import LAGS, PARTS, SOURCES, band_coordinates, check, held
from .leakage_forms import resampling, splits
from .sinks import THRESHOLD, sinks

PROFILE_PROMPTS = 4
# When each is measured, as shares of a side's time.
STAGES = {"leakage": (0.0, 0.5), "sinks": (0.5, 0.6), "loss": (0.6, 0.7), "sensitivity": (0.7, 1.0)}
LEAST = {"bootstrap": 0, "seed": 0, "profile_prompts": 1, "products": 2}
LOGITS_AT_ONCE = 1 << 24  # next-token logits: 64 MiB in float32


# -------------------------------------------------------------------------------------------------- before and after


@dataclass(frozen=True)
class State:
    """One side of a swap: what was measured with one embedding at position 0. Made by `state`."""

    of: dict[str, Any]  # model, prompts and options
    leaks: dict[str, np.ndarray]  # by `FORMS` and "residual", [resample, entry, layer, head, band]
    sink: xr.Dataset  # of key 0
    losses: Float[np.ndarray, "prompt predicted"]
    profile: Profile


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
    documents: Sequence[str] | None = None,
    before: State | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """What another embedding at position 0 does to leakage, sinks, next-token loss and the Jacobian profile.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], at least 4 prompts, as in `probes.leakage`. Position 0, BOS or not, is replaced.
        replacement: a token id, "mean", "zero" or "random", see `swapped`.
        seed: of the resampling, the sketch's probes and the random direction.
        bands, lags, bootstrap: as in `probes.leakage`.
        profile_prompts: how many prompts the Jacobian profile is taken on, the first ones; all, if there are fewer.
        products: of its sketch, per prompt.
        documents: what each prompt is a window of, as in `probes.leakage`.
        before: the model as it is, measured with the same options (`state`): several replacements need that only once.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset. With intervals `..._low` and `..._high` (unless `bootstrap` is 0), and means over heads:
        `removed [layer, band]` and `removed_of_model [band]`, the fraction of the residual component that the swap removes,
        see the module's text; `removed_steady...`, the same without the constant sink (see `probes.leakage`); `residual_...`
        [layer, band] and `residual_..._of_model` [band], what they are fractions of, `residual_steady_...` alike;
        `leakage_...` [part, layer, band], the log form in squared nats; `source_...` [source, layer, band], its Shapley
        values; `weight_...` [source, layer, band], those of the weight form: each `before`, `after` and the `change`.
        `loss_change [position]`, `loss_change_of_model` (mean over positions from 1 on), nats.
        Without intervals: `alpha_before`, `alpha_after` [layer, head] and `sink_rate_before`, `sink_rate_after` [layer] of
        key 0; `loss_before`, `loss_after` [position], NaN at the last, which predicts nothing; `sensitivity_before`,
        `sensitivity_after` [position], rms over prompts, and their standard errors `..._stderr`. `tokens`; attributes say
        what made it, `replacement` among them.

    Raises:
        InputError: no such replacement, an option that cannot be used, prompts that do not fit bands and lags, values
            that are not finite, or `before` is of another model, other prompts or options.

    Source: science of the measurement, section 4; [Ruscio], arXiv 2606.06160.
    """
    numbers = {"bootstrap": bootstrap, "profile_prompts": profile_prompts, "products": products}
    options = _options(model, tokens, seed=seed, bands=bands, lags=lags, **numbers)
    if before is not None and before.of != (key := _key(model, tokens, options)):
        other = ", ".join(name for name in key if before.of.get(name) != key[name])
        raise InputError(f"before was measured with other {other}; measure it with the same, or leave it out")
    view = swapped(model, replacement, seed=seed)
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    half = 0.5 if before is None else 0.0  # of the work, before the swap
    if before is None:
        with within("before"):
            before = _state(model, tokens, options, drawn, part(progress, 0.0, half))
    with within("after"):
        states = {"before": before, "after": _state(view, tokens, options, drawn, part(progress, half, 1.0))}
    if progress is not None:
        progress(1.0, 1.0)
    return dataset(
        _variables(states, drawn.double().numpy(), bootstrap > 0),
        tokens=tokens,
        coords={
            "part": list(PARTS),
            "source": list(SOURCES),
            "layer": range(model.spec.blocks),
            "head": range(model.spec.heads),
            **band_coordinates(options["bands"]),
        },
        attrs=provenance(model, tokens, measurement="bos_swap", replacement=view.replacement, **options)
        | {"replacement": view.replacement},
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
        one, other = (kind(side) for side in states.values())
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

    losses = [side.losses for side in states.values()]
    for when, loss in zip(states, losses, strict=True):
        said = f"next-token loss, mean over prompts, {when} the swap"
        add(f"loss_{when}", ("position",), _padded(loss.mean(0)), said, "nat")
    whole = weights / weights.sum(1, keepdims=True)  # in a mean over both halves
    change = whole @ (losses[1] - losses[0])  # [resample, position]
    by_position = Variable(("position",), "change of the next-token loss by the swap", "nat")
    variables |= with_ends("loss_change", by_position, _padded(change))
    change = change[:, 1:]
    if np.isnan(change).any():
        known = ~np.isnan(change[0])
        change = change[:, known] if known.any() else change
    of_model = Variable((), "the same, mean over positions from 1 on", "nat")
    variables |= with_ends("loss_change_of_model", of_model, change.mean(1))
    for when, side in states.items():
        add(
            f"alpha_{when}",
            ("layer", "head"),
            side.sink.alpha.values,
            f"mean weight on position 0 [Gu], {when} the swap",
        )
        rate = f"share of (prompt, head) with alpha > {THRESHOLD:g} at position 0, {when} the swap"
        add(f"sink_rate_{when}", ("layer",), side.sink.sink_rate.values, rate)
        norm = f"||J_j||_F / sqrt(d), rms over prompts, {when} the swap"
        add(f"sensitivity_{when}", ("position",), side.profile.mean, norm)
        add(f"sensitivity_{when}_stderr", ("position",), side.profile.stderr, f"standard error: {norm}")
    return variables


def state(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    documents: Sequence[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> State:
    """The model as it is, for `bos_swap(..., before=...)` with several replacements; options are those of `bos_swap`.

    Raises:
        InputError: as `bos_swap`.
    """
    options = _options(model, tokens, **options)
    drawn = resampling(len(tokens), options["bootstrap"], options["seed"], documents)
    with within("before"):
        found = _state(model, tokens, options, drawn, progress)
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
) -> dict[str, Any]:
    """The options by name, once they can be used."""
    bands, lags = check(model, tokens, bands, lags)
    numbers = {"seed": seed, "bootstrap": bootstrap, "profile_prompts": profile_prompts, "products": products}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]:
            raise InputError(f"{name}={value} cannot be used; give a whole number, {LEAST[name]} or more")
    return {"seed": seed, "bands": bands, "lags": lags} | numbers


def _key(model: View, tokens: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """What two sides of a swap share."""
    shared = {name: getattr(model.identity, name) for name in ("weights", "backend", "dtype")}
    return shared | {"tokens": tokens_hash(tokens)} | dict(options)


def _state(model: View, tokens: Tensor, options: Mapping[str, Any], drawn: Tensor, progress: Progress | None) -> State:
    heard = {name: part(progress, *stage) for name, stage in STAGES.items()}
    found = splits(model, tokens, options["bands"], options["lags"], drawn, heard["leakage"])
    leaks = {name: found[form] for name, form in LEAKS.items()}
    sink = sinks(model, tokens, keys=(0,), per_prompt=False, progress=heard["sinks"]).isel(key=0)
    losses = _losses(model, tokens, heard["loss"])
    given = {name: options[name] for name in ("products", "seed")}
    first = tokens[: options["profile_prompts"]]
    profile = jacobian(model, first, method="sketch", **given, progress=heard["sensitivity"])
    return State(_key(model, tokens, options), leaks, sink, losses, mean_profile(profile.sensitivity, profile.stderr))


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
}


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


@torch.no_grad()
def _losses(
    model: View, tokens: Int[Tensor, "prompt position"], progress: Progress | None
) -> Float[np.ndarray, "prompt predicted"]:
    """`-log p` of every next token, prompt by prompt, next-token logits for some positions at a time.

    NaN where the head excludes the token (logit minus infinity): toys may tell only some of the ids apart.
    """
    rows = max(1, LOGITS_AT_ONCE // model.spec.vocabulary)
    report = Report(progress, len(tokens))

    def measured(n: int) -> Piece:
        found, never = np.zeros(tokens.shape[1] - 1), np.zeros(tokens.shape[1] - 1, dtype=bool)
        normed = model.norm(model.residual(model.embed(tokens[n : n + 1])))[0, :-1]
        targets = tokens[n, 1:].to(normed.device)
        for start in range(0, len(targets), rows):
            at = slice(start, start + rows)
            logits = model.unembed(normed[at])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = functional.cross_entropy(logits, targets[at], reduction="none").double()
            excluded = torch.isneginf(logits.gather(-1, targets[at][:, None])[:, 0])
            excluded &= torch.isneginf(logits).all(0)[targets[at]]  # whatever it reads; a single one is a fault
            found[at], never[at] = loss.masked_fill(excluded, torch.nan).cpu().numpy(), excluded.cpu().numpy()
        report()
        return {"loss": found, "never": never}

    pieces = each("loss", len(tokens), measured)
    report.finish()
    found, never = pieces.stacked("loss"), pieces.stacked("never")
    if not (np.isfinite(found) | never).all():
        raise not_finite(model, "a next-token loss")
    return found


def memory(model: View, prompts: int, length: int, **options: Any) -> int:
    """Bytes above the loaded model at the peak, about: of leakage or of the profile; options as of `bos_swap`."""
    return max(held(model, prompts, length, **options), of_jacobian(model, prompts, length, **options))
