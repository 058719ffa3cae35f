"""Absolute position in attention patterns, and where it comes from: the causal mask, the sink or the residual stream.

Definition, nulls and how to read them stand on the measure's page (`docs/probes/leakage.md`); this is the derivation.

Setting. Prompts n are windows cut at random offsets behind one first token, so that a token's identity says nothing
about its position. `s_ij` are a head's scaled logits after rotation, soft-cap and slopes; `log Z_i` the log-sum-exp over the
keys that query i sees; `A_ij = exp(s_ij - log Z_i)`. Queries i run over a band B, lags over a few small ones, keys i - lag
are never position 0. `E` is the mean over prompts, `V` the variance over i in B, averaged over lags; `C` the covariance.
**Leakage** of a head is V(l) of `l_i(lag) = E log A_{i,i-lag}`, in nat^2.

**Share of position** is the mean over lags of V(l) at the lag / Var_{n,i} log A^n_{i,i-lag}. The numerator is free of noise;
the denominator pools the prompts of both halves and holds all there is (the square of its mean is the product of the
halves' means, or few prompts would make it too large). It is taken as 1e-9 nat^2 at least (rounding).

**Three parties.** `l = X - C - M`, with the denominators of *Toeplitz-made* logits

    s~_ij = s_ij - (E s_ij - t(i - j)),    t(lag) = mean of E s_{i,i-lag} over all queries and keys other than 0:

means then depend on the lag alone, every prompt keeps its own deviations.

- the **number of keys**, M_i = E log Z~_i. What is left in it is that a later query has more terms.
- the **constant sink**, C_i: what log Z~_i gains where position 0 has, in the place of t(i), what its mean logit E s_i0
  would be without position in any stream: b t(i) + c, with c the mean of E s_i0 - b t(i) over the band and b = 0 (constant)
  or 1 (Toeplitz like all others), whichever is nearer to it for the head.
- the **stream**, X = S - (E log Z - M - C) with `S_i(lag) = E s_{i,i-lag}`. Rotary logits of streams whose statistics do
  not depend on position are Toeplitz in the mean, so whatever is in X has come in through the residual stream: through the
  logit itself, or through the denominator. V(X) alone is the *residual component*; V(X - C) is `log_stream`.

`log_form` are parts by place: `l = S - M - D`, D = E log Z - M, total = V(S) + V(M) + V(D) + covariance. `log_sink` is
the variance of what position 0 adds to the denominator by its own logits. With M held at its mean over the band and C and X
removed, l is `t(lag)` less a constant: V is 0 (`log_neither`, rounding). Learned sink logits stand in Z_i and Z~_i alike.

Noise. Every V and C above is a covariance between two halves of the prompts (the mean of both orders), each half with its
own E and its own t: sampling noise, which V of an estimated mean would count as leakage, cancels in expectation, and
values may come out slightly negative. `log_noise` is what the uncorrected variance over all prompts would have added.
Intervals: prompts are drawn again with replacement within each half. What a prompt adds to the means that shift all prompts
(`E s_ij - t` inside `s~`) is taken along to first order, `sum_j E p~_ij (t^n - t - s^n_ij + E s_ij)` on its log Z~_i with
p~ the Toeplitz-made pattern; without it intervals were three times too narrow where denominators rest on lags of few
pairs. Subtracting a half's own mean shrinks its deviations by (1 - 1/n): at 16 prompts a half, 3 % in standard deviation.
Percentiles of products of halves count the noise between the halves twice: where noise is all there is, intervals are
wider than the scatter over other prompts, by up to sqrt(3).

Sources: the question is [Ruscio]'s (arXiv 2606.06160); the definitions, the split and the correction are ours.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError, TooFew, plural
from ...models.checks import check_tokens
from ...models.load import takes_model
from ...models.view import View
from ...models.words import edited
from ...results.dataset import Variable, by_block, dataset, provenance, with_ends
from ...results.statistics import INTERVAL, ends
from ...run import processes
from ...run.memory import available
from ...run.progress import Progress, part
from ...run.store import Store
from .forms import ROUNDING, resampling, splits
from .samples import LEAST_PROMPTS, Band, halves_of

LAGS = tuple(range(1, 9))
FRESH_PROMPTS = 64  # of the null of fresh weights: its mean over all heads is known to 1 % with them
EARLY = 32  # [Ruscio]'s "early queries" stand before this position; later bands double
PARTS = ("total", "logits", "mask", "denominator", "covariance")
PARTIES = ("keys", "constant sink", "stream")
ALL = "all"  # parties
QUANTILES = {"lower quartile": 0.25, "median": 0.5, "upper quartile": 0.75}  # over the heads of all blocks


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
    unmasked: bool = False,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """How much attention to the token `lag` back depends on where the query stands, and which party tells it.

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
        unmasked: whether the same weights are measured where every query sees every key, too.
        pieces: where what each block gave is kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset over `layer`, `head`, `band` (with `band_first`, `band_last`), in squared nats but for shares:
        `log_form [part, ...]`, parts total = logits + mask + denominator + covariance; `position_share`;
        `parties [party, other, ...]`, both with `all` for sums; `steady_stream` = V(X); `log_stream`, `log_noise`,
        `log_sink`, `log_neither`. Means over heads are `..._by_block [..., layer, band]`, over the whole model
        `..._of_model [..., band]`. `..._of_heads [quantile, band]` are median and quartiles over the heads of all
        blocks, of `log_form`'s total, `position_share` and `steady_stream`; `parties_of_heads [party, other, band]` the
        medians. `below_null_of_model` [band] with `surely_below_null_of_model` and `surely_above_null_of_model`: shares of
        heads. `null_...` and `null_share_...` [quantile, band]: `uniform` attention (also `..._by_block`), `fresh` weights,
        `unmasked`, `shuffled` query labels (97.5 % quantile). `..._low` and `..._high` are the intervals. Attributes say
        what made it.

    Raises:
        InputError: too few prompts, bands or lags that do not fit the prompts or a window, values that are not finite, a
            model whose queries see a prefix or all keys: the split is derived for causal masks.

    Source: ours, see the module's text; the question is [Ruscio]'s, arXiv 2606.06160.
    """
    bands, lags = check(model, tokens, bands, lags)
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    fresh = int(processes.agreed(fresh_prompts(model, fresh, len(tokens))))
    work = fresh + (1 + unmasked) * len(tokens)
    first, last = fresh / work, 1 - unmasked * len(tokens) / work  # fresh weights go ahead, those without mask behind
    pieces = pieces or Store()
    mask = uniform(model, tokens.shape[1], bands)
    alike = np.broadcast_to(mask[None, :, None], (1, len(mask), model.spec.heads, len(bands)))
    known = {"null_uniform": over_heads(alike)}  # [resample, quantile, band]
    if fresh:
        halves = zip(halves_of(len(tokens)), halves_of(fresh), strict=True)  # the first of each: they share no document
        chosen = [half.start + n for half, some in halves for n in range(some.stop - some.start)]
        named: Any = None if documents is None else [documents[n] for n in chosen]
        twin, again = model.reinitialized(seed), resampling(fresh, bootstrap, seed, named)
        heard, store = part(progress, 0.0, first), pieces.within("fresh")
        found = splits(twin, tokens[chosen], bands, lags, again, heard, pieces=store)
        known |= {f"{null}_fresh": over_heads(found[form][:, 0]) for form, null in NULL_OF.items()}
        del twin
    found = splits(model, tokens, bands, lags, drawn, part(progress, first, last), pieces=pieces)
    if unmasked:
        heard, bare = part(progress, last, 1.0), edited(model, "unmasked")
        seen = splits(bare, tokens, bands, lags, drawn, heard, pieces=pieces.within("unmasked"))
        known |= {f"{null}_unmasked": over_heads(seen[form][:, 0]) for form, null in NULL_OF.items()}
    for null, values in zip(NULL_OF.values(), found.pop("shuffled"), strict=True):
        known[f"{null}_shuffled"] = np.percentile(over_heads(values), INTERVAL[1], axis=0)[None]
    variables: dict[str, tuple[Any, ...]] = {}
    for name, values in known.items():
        said = f"over heads: {NULLS[name.rpartition('_')[2]]}"
        variables |= with_ends(name, Variable(("quantile", "band"), said, "1" if "share" in name else "nat^2"), values)
    variables["null_uniform_by_block"] = Variable(("layer", "band"), NULLS["uniform"], "nat^2").of(mask)
    for name in VARIABLES:  # [resample, entry, layer, head, band]
        variables |= _levels(name, found[name])
    variables |= _of_heads(found, mask)
    options = {"bands": bands, "lags": lags, "bootstrap": bootstrap, "seed": seed, "fresh": fresh, "unmasked": unmasked}
    entries = {"part": list(PARTS), "party": [*PARTIES, ALL], "other": [*PARTIES, ALL], "quantile": list(QUANTILES)}
    places = {**by_block(model.spec), "head": range(model.spec.heads), **band_coordinates(bands)}
    attrs = provenance(model, tokens, measurement="leakage", **options)
    return dataset(variables, tokens=tokens, coords=entries | places, attrs=attrs)


def _levels(name: str, values: np.ndarray) -> dict[str, tuple[Any, ...]]:
    """A variable of every head, and its means over a block's heads and over all heads; [resample, entry, layer, ...]."""
    entry, long_name, units = VARIABLES[name]
    values = matrix(values) if entry == ("party", "other") else values if entry else values[:, 0]
    variables: dict[str, tuple[Any, ...]] = {}
    for level, dims, at in (
        (name, ("layer", "head", "band"), values),
        (f"{name}_by_block", ("layer", "band"), values.mean(-2)),
        (f"{name}_of_model", ("band",), values.mean((-3, -2))),
    ):
        variables |= with_ends(level, Variable(entry + dims, long_name, units), at)
    return variables


def matrix(values: Float[np.ndarray, "resample entry *place"]) -> Float[np.ndarray, "resample party other *place"]:
    """The parties' nine covariances as a matrix, the sums of its rows and columns behind them."""
    square = values.reshape(len(values), len(PARTIES), len(PARTIES), *values.shape[2:])
    rows = np.concatenate([square, square.sum(2, keepdims=True)], 2)
    return np.concatenate([rows, rows.sum(1, keepdims=True)], 1)


def over_heads(values: Float[np.ndarray, "*resample layer head band"]) -> Float[np.ndarray, "*resample quantile band"]:
    """Quartiles and median over the heads of all blocks."""
    return np.moveaxis(np.quantile(values, list(QUANTILES.values()), axis=(-3, -2)), 0, -2)


def _of_heads(found: Mapping[str, np.ndarray], mask: Float[np.ndarray, "layer band"]) -> dict[str, tuple[Any, ...]]:
    """What is told of all heads: quantiles, how many lie below the null of their mask, and the parties' medians."""
    total = found["log_form"][:, 0]  # [resample, layer, head, band]
    quantiles = {"log_form": total, **{name: found[name][:, 0] for name in ("position_share", "steady_stream")}}
    variables: dict[str, tuple[Any, ...]] = {}
    for name, values in quantiles.items():
        said = Variable(("quantile", "band"), f"over heads: {OF_HEADS[name]}", "1" if "share" in name else "nat^2")
        variables |= with_ends(f"{name}_of_heads", said, over_heads(values))
    leaks = mask > ROUNDING  # a full window shows every query as many keys
    null = np.where(leaks, mask, np.nan)[:, None]
    count = np.where(leaks.any(0), total.shape[2] * leaks.sum(0), np.nan)
    variables |= with_ends("below_null_of_model", SHARES["below"], (total < null).sum((1, 2)) / count)
    if len(total) > 1:
        low, high = ends(total)
        for name, where in {"surely_below": high < null, "surely_above": low > null}.items():
            variables[f"{name}_null_of_model"] = SHARES[name].of(where.sum((0, 1)) / count)
    medians = np.median(matrix(found["parties"]), (-3, -2))
    said = Variable(("party", "other", "band"), "median over heads: covariances of the parties", "nat^2")
    return variables | with_ends("parties_of_heads", said, medians)


NULLS = {
    "uniform": "uniform attention",
    "fresh": "fresh weights",
    "unmasked": "attention without a mask",
    "shuffled": "shuffled labels",
}
OF_HEADS = {
    "log_form": "leakage V(l)",
    "position_share": "share of the variance of log-weights that the query's place explains",
    "steady_stream": "residual component V(X)",
}
NULL_OF = {"log_form": "null", "position_share": "null_share"}  # what nulls are called
SHARES = {
    "below": Variable(("band",), "share of heads whose leakage lies below uniform attention's"),
    "surely_below": Variable(("band",), "share of heads whose interval lies below uniform attention's leakage"),
    "surely_above": Variable(("band",), "share of heads whose interval lies above uniform attention's leakage"),
}
_STREAM = "variance of what the residual stream adds to the log-weights"
# Dimensions before [layer, head, band].
VARIABLES = {
    "log_form": Variable(("part",), "leakage and its parts", "nat^2"),
    "position_share": Variable((), OF_HEADS["position_share"]),
    "parties": Variable(("party", "other"), "covariances of the parties, which sum to the leakage", "nat^2"),
    "steady_stream": Variable((), f"{_STREAM}, the constant sink taken out", "nat^2"),
    "log_stream": Variable((), f"{_STREAM}, the constant sink left in", "nat^2"),
    "log_noise": Variable((), "sampling noise that an uncorrected variance would add", "nat^2"),
    "log_sink": Variable((), "variance of what position 0 adds to the log-denominator", "nat^2"),
    "log_neither": Variable((), "leakage with all parties removed", "nat^2"),
}


# ---------------------------------------------------------------------------------------------------- bands and lags


def usual_bands(length: int, lags: Sequence[int]) -> tuple[Band, ...]:
    """From the longest lag + 1 to 31, then doubling: 32-63, 64-127, ...; those of at least two queries."""
    stops = [EARLY * 2**n for n in range(length.bit_length())]
    bands = ((max(start, max(lags) + 1), min(stop, length) - 1) for start, stop in pairwise([0, *stops]))
    return tuple((a, b) for a, b in bands if b > a)


def check(model: View, tokens: Any, bands: Any, lags: Any) -> tuple[tuple[Band, ...], tuple[int, ...]]:
    """Bands and lags that fit model and prompts."""
    check_tokens(model, tokens)
    if model.spec.prefix is not None:
        raise InputError(
            f"model '{model.identity.name}' lets every query see a prefix of {model.spec.prefix} positions, and leakage is "
            "split for causal masks alone; give a model without a prefix"
        )
    count, length = tokens.shape
    if count < LEAST_PROMPTS:
        raise TooFew(f"two halves take more than {plural(count, 'prompt')}; give at least {LEAST_PROMPTS}")
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


def uniform(model: View, length: int, bands: Sequence[Band]) -> Float[np.ndarray, "layer band"]:
    """V(log number of visible keys) over each band's queries: what a block's mask alone leaks; a full window, nothing."""
    i = np.arange(length)
    seen = [np.log(i + 1 if w is None else np.minimum(i + 1, w)) for w in model.spec.windows]
    return np.array([[(x[first : last + 1] - x[last]).var() for first, last in bands] for x in seen])


def fresh_prompts(model: View, asked: int | None, prompts: int) -> int:
    """How many prompts fresh weights are measured on, `asked` or as many as there are; 0 for no such null.

    If not given, `FRESH_PROMPTS` where memory has room for a second copy of the weights.
    """
    if asked is None:
        module = getattr(getattr(model, "original", model), "_model", None)
        weights = sum(p.numel() * p.element_size() for p in module.parameters()) if module is not None else 0
        asked = FRESH_PROMPTS if not model.offloaded and weights < available(model.device) else 0
    if asked and asked < LEAST_PROMPTS:
        raise InputError(f"fresh={asked} is too few for two halves; give at least {LEAST_PROMPTS}, or 0 for none")
    return min(asked, prompts)


def band_coordinates(bands: Sequence[Band]) -> dict[str, Any]:
    """Coordinates of the dimension `band`."""
    first, last = ((("band",), list(ends)) for ends in zip(*bands, strict=True))
    return {"band": [f"{a}-{b}" for a, b in bands], "band_first": first, "band_last": last}
