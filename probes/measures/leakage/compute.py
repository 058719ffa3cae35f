"""Absolute position in attention patterns, and where it comes from: the causal mask or the residual stream.

A rotary pattern "should" depend on how far back a key stands, not on where the query stands. It does depend on it, in two
ways. The **causal mask** gives a later query more keys to share its attention among. The **residual stream** carries
position: what blocks below wrote differs between early and late positions, and so do queries and keys. This file measures
how much a head's attention depends on absolute position and splits it exactly into the two.

Setting. Prompts n are windows cut at random offsets behind one first token, so that a token's identity says nothing
about its position. `s_ij` are a head's scaled logits after rotation, soft-cap and slopes; `log Z_i` the log-sum-exp over the
keys that query i sees; `A_ij = exp(s_ij - log Z_i)`. Queries i run over a band B, lags over a few small ones, keys i - lag
are never position 0. `E` is the mean over prompts, `V` the variance over i in B, averaged over lags; `C` the covariance.

**Log form** (primary). `l_i(lag) = E log A_{i,i-lag}`. Attention that depends on the lag alone has V(l) = 0. Otherwise

    l = S - M - D,     S_i(lag) = E s_{i,i-lag},     M_i = E log Z~_i,     D_i = E log Z_i - M_i,
    V(l) = V(S) + V(M) + V(D) + [2 C(M, D) - 2 C(S, M) - 2 C(S, D)]
    total  logits  mask  denominator        covariance

where `Z~` belongs to *Toeplitz-made* logits: `s~_ij = s_ij - (E s_ij - t(i - j))`, `t(lag)` the mean of `E s_{i,i-lag}` over
all queries and keys other than 0. Means then depend on the lag alone, every prompt keeps its own deviations, and what is
left in M is that a later query has more terms. Rotary logits of streams whose statistics do not depend on position are
Toeplitz in the mean, so whatever `S` and `D` show has come in through the residual stream: `S` directly, `D` through the
denominator. As two sources, `X = S - D` (residual) and `-M` (mask), with Shapley values of the variance game:

    residual = V(X) - C(X, M),     mask = V(M) - C(X, M),     their sum = V(l).

V(X) alone is the *residual component*: how far the residual stream moves log-weights with the query's place. Its Shapley
value falls below zero where the stream works against the mask, as a sink that steadies denominators does.

D splits once more, D = K + R: K is what position 0 adds (its own logit in the place of `t(i)`; the sink), R is the rest.
**The constant sink** is no position: a learned logit that is the same for all queries still leaks, since the number of
other keys grows (logit 2, uniform attention otherwise, queries 9-31: V(K) = 0.008 nat^2). So K splits,
with position 0's mean logit E s_i0 replaced by what it would be without position in any stream: b t(i) + c, with c the
mean of E s_i0 - b t(i) over the band and b = 0 (a constant) or 1 (Toeplitz like all others), whichever is nearer to it for
the head. What position 0 adds then is `sink_constant`; `sink_varying` = K - `sink_constant`. Every prompt keeps its
deviations. `steady_source` and `steady_stream` are the Shapley values and V(X) with the constant on the mask's side:
M + `sink_constant` and X = S - `sink_varying` - R.

Learned sink logits (gpt-oss) are one more term of every denominator, the same for all queries: they stand in Z_i and Z~_i
alike, so that what they leak as the number of keys grows is the mask's, as the constant sink's is in `steady_source`.

With both sources removed l is `t(lag)` less a constant: exactly 0 (`log_neither`, rounding).

**Weight form**. The same on A itself, as a 2 x 2 design. `residual` off: logits are made Toeplitz as above, in the
denominator, too. `mask` off: each query's E log Z_i is replaced by its mean over the band's queries; as with the logits,
every prompt keeps its own deviation (to replace each prompt's own log Z_i would take a query with one high logit to
"weights" of many thousands). With W the variance `V(E A_{i,i-lag})` of each of the four cells,

    mask = [W(mask) - W(neither) + W(both) - W(residual)] / 2,      spread = W(neither),
    residual = [W(residual) - W(neither) + W(both) - W(mask)] / 2,  mask + residual + spread = W(both).

`spread` is what single prompts' deviations alone leave, since E exp is not exp E: 0 where patterns are the same in all
prompts. Here `mask` stands for all of the denominator: D goes with it, shows only when both are on, and is shared equally;
a bias that all keys of a query share, which cancels in the softmax, is charged to the residual stream and taken off the
mask.

Noise. Every V and C above is a covariance between two halves of the prompts (the mean of both orders), each half with its
own E and its own t: sampling noise, which V of an estimated mean would count as leakage, cancels in expectation, and
values may come out slightly negative. `log_noise` is what the uncorrected variance over all prompts would have added.
Intervals: prompts are drawn again with replacement within each half. What a prompt adds to the means that shift all prompts
(`E s_ij - t` inside `s~`) is taken along to first order, `sum_j E p~_ij (t^n - t - s^n_ij + E s_ij)` on its log Z~_i with
p~ the Toeplitz-made pattern; without it intervals were three times too narrow where denominators rest on lags of few
pairs. In the weight form those means, and those of log Z_i, stay as they were estimated.

Assumptions. (1) Text statistics do not depend on position behind position 0: windows at random offsets. (2) The positional
encoding itself gives logits that depend on the lag alone (RoPE, ALiBi, none): with learned absolute positions everything
they do counts as residual stream, since that is where they are. (3) First-order: "made Toeplitz" acts on means. If the
*spread* of logits depends on position, that part of M and of `spread` is the residual stream's second order.
(4) Subtracting a half's own mean shrinks its deviations by (1 - 1/n): at 16 prompts a half, 3 % in standard deviation.
(5) Percentiles of products of halves count the noise between the halves twice: where noise is all there is, intervals are
wider than the scatter over other prompts, by up to sqrt(3).

The total has three nulls, what patterns leak that have learnt nothing about position:

- *uniform*: attention that weighs all visible keys alike, under the model's masks. Closed form.
- *fresh*: the model with fresh weights of the same configuration, on some of the same prompts. At usual deviations logits
  are small at initialization and this is near the uniform one; where it is not, the architecture leaks by itself.
- *shuffled*: the model as it is, one half's queries under each other's labels (97.5 % quantile): what the estimate shows
  where nothing depends on the query.

A total below the uniform null says that training has made patterns depend on the query's place less than the mask alone
would have them.

The definition cannot tell whether a stream's positional content was itself made by the masks of blocks below. "Mask"
is this block's own mask; in block 0 that is all there is, and deeper the residual stream carries on what masks began.

Sources: the question is [Ruscio]'s (arXiv 2606.06160); the definitions, the split and the correction are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.checks import check_tokens
from ...models.load import takes_model
from ...models.view import View
from ...results.dataset import Variable, by_block, dataset, provenance, with_ends
from ...results.statistics import INTERVAL
from ...run import processes
from ...run.memory import available
from ...run.progress import Progress, part
from ...run.store import Store
from .forms import resampling, splits
from .samples import LEAST_PROMPTS, Band, halves_of

LAGS = tuple(range(1, 9))
FRESH_PROMPTS = 64  # of the null of fresh weights: its mean over all heads is known to 1 % with them
EARLY = 32  # [Ruscio]'s "early queries" stand before this position; later bands double
PARTS = ("total", "logits", "mask", "denominator", "covariance")
SOURCES = ("mask", "residual", "spread")
CELLS = ("both", "mask", "residual", "neither")  # which sources are on


@takes_model
def leakage(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    bands: Any = None,
    lags: Any = LAGS,
    bootstrap: int = 400,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    fresh: int | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """How much attention to the token `lag` back depends on where the query stands, and through which source.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], at least 4 prompts: one first token, then windows of text cut at random offsets
            (`probes.prompts`). The two halves are the first and the second half of them.
        bands: (first, last) query of each band; 9-31, 32-63, 64-127, ... unless given (from the longest lag + 1).
        lags: how far back the keys stand, at least 1; shorter than every window and than a band's first query.
        bootstrap: resamples of the prompts for the intervals (95 %, percentiles); 0 for none.
        seed: of the resampling, and of the fresh weights.
        documents: what each prompt is a window of; documents are then resampled instead of prompts.
        fresh: prompts of the null of fresh weights (the first of each half), 0 for none; if not given 64, where memory has
            room for a second copy of the weights.
        pieces: where what each block gave is kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset over `layer`, `head`, `band` (with `band_first`, `band_last`), in squared nats (log form) or squared
        weights (weight form): `log_form [part, layer, head, band]`, parts total = logits + mask + denominator +
        covariance; `log_source [source, ...]`; `log_stream` = V(X), the *residual component*; `log_noise`; `log_sink` =
        V(K); `log_neither`; `weight_form [cell, ...]`, `weight_source [source, ...]`. `sink_constant` and
        `sink_varying`, the two parts of V(K); `steady_source`, `steady_stream`: with the constant sink on the side of the
        mask. `null_...` [band] beside the total of the model: `uniform` attention, `fresh` weights, `shuffled` query labels
        (97.5 % quantile). Means over heads are `..._by_block [..., layer, band]`, over the whole model `..._of_model [...,
        band]`; sources divided by their total are `log_share_of_model`, `steady_share_of_model` and
        `weight_share_of_model`. `..._low` and `..._high` are the intervals. Attributes say what made it.

    Raises:
        InputError: too few prompts, bands or lags that do not fit the prompts or a window, values that are not finite, a
            model whose queries see a prefix or all keys: the split is derived for causal masks.

    Source: ours, see the module's text; the question is [Ruscio]'s, arXiv 2606.06160.
    """
    bands, lags = check(model, tokens, bands, lags)
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    fresh = int(processes.agreed(fresh_prompts(model, fresh, len(tokens))))
    first = fresh / (fresh + len(tokens))  # the share of the work on fresh weights, which goes ahead
    pieces = pieces or Store()
    known = {"null_uniform": uniform(model, tokens.shape[1], bands)[None]}  # [resample, band]
    if fresh:
        halves = zip(halves_of(len(tokens)), halves_of(fresh), strict=True)  # the first of each: they share no document
        chosen = [half.start + n for half, some in halves for n in range(some.stop - some.start)]
        named: Any = None if documents is None else [documents[n] for n in chosen]
        twin, again = model.reinitialized(seed), resampling(fresh, bootstrap, seed, named)
        heard, store = part(progress, 0.0, first), pieces.within("fresh")
        found = splits(twin, tokens[chosen], bands, lags, again, heard, pieces=store)
        known["null_fresh"] = found["log_form"][:, 0].mean((1, 2))
        del twin
    found = splits(model, tokens, bands, lags, drawn, part(progress, first, 1.0), pieces=pieces)
    known["null_shuffled"] = np.percentile(found.pop("shuffled").mean((2, 3)), INTERVAL[1], axis=1)
    variables: dict[str, tuple[Any, ...]] = {}
    for name, values in known.items():
        variables |= with_ends(name, Variable(("band",), f"leakage, log form: {NULLS[name]}", "nat^2"), values)
    for name, values in found.items():  # [resample, entry, layer, head, band]
        variables |= _levels(name, values)
    options = {"bands": bands, "lags": lags, "bootstrap": bootstrap, "seed": seed, "fresh": fresh}
    entries = {"part": list(PARTS), "source": list(SOURCES), "cell": list(CELLS)}
    places = {**by_block(model.spec), "head": range(model.spec.heads), **band_coordinates(bands)}
    attrs = provenance(model, tokens, measurement="leakage", **options)
    return dataset(variables, tokens=tokens, coords=entries | places, attrs=attrs)


def _levels(name: str, values: np.ndarray) -> dict[str, tuple[Any, ...]]:
    """A variable of every head, of every block and of the model, and shares of sources; [resample, entry, layer, ...]."""
    entry, long_name, units = VARIABLES[name]
    of_model, variables = values.mean((2, 3)), {}
    levels = {
        name: (("layer", "head", "band"), values),
        f"{name}_by_block": (("layer", "band"), values.mean(3)),
        f"{name}_of_model": (("band",), of_model),
    }
    for level, (dims, at) in levels.items():
        variable = Variable(entry + dims, long_name, units)
        variables |= with_ends(level, variable, at if entry else at[:, 0])
    if entry == ("source",):
        total = of_model.sum(1, keepdims=True)
        shares = np.divide(of_model, total, out=np.full_like(of_model, np.nan), where=total > 0)
        level = f"{name.removesuffix('_source')}_share_of_model"
        variables |= with_ends(level, Variable((*entry, "band"), long_name), shares)
    return variables


NULLS = {"null_uniform": "uniform attention", "null_fresh": "fresh weights", "null_shuffled": "shuffled labels"}
_STREAM = "variance of what the residual stream adds to the log-weights"
_SINK = "variance of what position 0 adds to the log-denominator"
_SHAPLEY = "log form, Shapley value of each source"
_TABLE = {
    "log_form": ("part", "leakage, log form, and its parts"),
    "log_source": ("source", f"leakage, {_SHAPLEY}"),
    "log_stream": ("", _STREAM),
    "log_noise": ("", "sampling noise that an uncorrected variance would add"),
    "steady_source": ("source", f"leakage, {_SHAPLEY}, the constant sink on the mask's side"),
    "steady_stream": ("", f"{_STREAM}, the constant sink taken out"),
    "log_sink": ("", _SINK),
    "sink_constant": ("", f"{_SINK} with its mean logit held constant"),
    "sink_varying": ("", "variance of what position 0's mean logit adds by changing with the query"),
    "log_neither": ("", "leakage, log form, with both sources removed"),
    "weight_form": ("cell", "leakage, weight form, by the sources that are on"),
    "weight_source": ("source", "leakage, weight form, Shapley value of each source and what is left without"),
}
# By form and part; dimensions before [layer, head, band].
VARIABLES = {
    name: Variable((dim,) if dim else (), said, "1" if name.startswith("weight") else "nat^2")
    for name, (dim, said) in _TABLE.items()
}


# ---------------------------------------------------------------------------------------------------- bands and lags


def usual_bands(length: int, lags: Sequence[int]) -> tuple[Band, ...]:
    """From the longest lag + 1 to 31, then doubling: 32-63, 64-127, ...; those of at least two queries."""
    stops = [EARLY * 2**n for n in range(length.bit_length())]
    bands = ((max(start, max(lags) + 1), min(stop, length) - 1) for start, stop in pairwise([0, *stops]))
    return tuple((a, b) for a, b in bands if b > a)


def check(model: View, tokens: Any, bands: Any, lags: Any) -> tuple[tuple[Band, ...], tuple[int, ...]]:
    """Bands and lags that fit model and prompts.

    Raises:
        InputError: as `leakage` does.
    """
    check_tokens(model, tokens)
    if model.spec.prefix is not None:
        raise InputError(
            f"model '{model.identity.name}' lets every query see a prefix of {model.spec.prefix} positions, and leakage is "
            "split for causal masks alone; give a model without a prefix"
        )
    count, length = tokens.shape
    if count < LEAST_PROMPTS:
        raise InputError(f"{count} prompts are too few for two halves; give at least {LEAST_PROMPTS}")
    lags = tuple(lags)
    if not lags or len(set(lags)) < len(lags) or min(lags) < 1:
        raise InputError(f"lags {list(lags)} are none, repeated or below 1; give some, as 1-8")
    window = min((w for w in model.spec.windows if w is not None), default=None)
    if window is not None and max(lags) >= window:
        raise InputError(f"lag {max(lags)} is out of the window of {window} positions; give lags up to {window - 1}")
    bands = usual_bands(length, lags) if bands is None else tuple((int(a), int(b)) for a, b in bands)
    if len(set(bands)) < len(bands):
        raise InputError("bands repeat one; give each once")
    if not bands or max(lags) + 2 >= length:
        raise InputError(
            f"prompts of {length} positions leave no queries behind lag {max(lags)}; give longer prompts or shorter lags"
        )
    for first, last in bands:
        if first <= max(lags) or last >= length or last <= first:
            raise InputError(
                f"band {first}-{last} does not fit lags up to {max(lags)} and {length} positions; "
                f"give at least two queries within {max(lags) + 1}-{length - 1}"
            )
    return bands, lags


def uniform(model: View, length: int, bands: Sequence[Band]) -> Float[np.ndarray, " band"]:
    """V(log number of visible keys) over each band's queries, mean over blocks: what the mask alone leaks."""
    i = np.arange(length)
    seen = [np.log(i + 1 if w is None else np.minimum(i + 1, w)) for w in model.spec.windows]
    return np.array([np.mean([x[first : last + 1].var() for x in seen]) for first, last in bands])


def fresh_prompts(model: View, asked: int | None, prompts: int) -> int:
    """How many prompts fresh weights are measured on, `asked` or as many as there are; 0 for no such null.

    If not given, `FRESH_PROMPTS` where memory has room for a second copy of the weights.

    Raises:
        InputError: too few for two halves of several.
    """
    if asked is None:
        module = getattr(getattr(model, "original", model), "_model", None)
        weights = sum(p.numel() * p.element_size() for p in module.parameters()) if module is not None else 0
        asked = FRESH_PROMPTS if not model.offloaded and weights < available(model.device) else 0
    if asked and asked < LEAST_PROMPTS:
        raise InputError(
            f"fresh={asked} prompts are too few for two halves; give at least {LEAST_PROMPTS}, or 0 for none"
        )
    return min(asked, prompts)


def band_coordinates(bands: Sequence[Band]) -> dict[str, Any]:
    """Coordinates of the dimension `band`."""
    first, last = ((("band",), list(ends)) for ends in zip(*bands, strict=True))
    return {"band": [f"{a}-{b}" for a, b in bands], "band_first": first, "band_last": last}
