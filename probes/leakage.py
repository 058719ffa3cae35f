"""Absolute position in attention patterns, and where it comes from: the causal mask or the residual stream.

A rotary pattern "should" depend on how far back a key stands, not on where the query stands. It does depend on it, in two
ways. The **causal mask** gives a later query more keys to share its attention among. The **residual stream** carries
position: what blocks below wrote differs between early and late positions, and so do queries and keys. This file measures
how much a head's attention depends on absolute position and splits it exactly into the two.

Setting. Prompts n are windows cut at random offsets behind one first token, so that what a token is says nothing about
where it stands. `s_ij` are a head's scaled logits after rotation, soft-cap and slopes; `log Z_i` the log-sum-exp over the
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
mask. `terms_form` and `terms_source` are the same with M alone made constant, the number of terms, as in the log form.

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

Nulls stand beside the total: uniform attention under the same mask, and the total with one half's queries under each
other's labels (97.5 % quantile), which is what no dependence on the query gives.

Null tests (in `tests/test_leakage.py`, on every bundled model). In block 0 streams carry no position, so V(S) and, behind a
first token like any other, V(D) and the residual source are 0 within noise; behind BOS only R is, K being what BOS is.
`log_neither` is 0 up to rounding. Patterns of known answer are recovered: equal logits (all mask, V(M) = Var log(i + 1));
logits with an absolute bias under fixed denominators (all residual).

What the definition cannot tell: whether a stream's positional content was itself made by the masks of blocks below. "Mask"
is this block's own mask; in block 0 that is all there is, and deeper the residual stream carries on what masks began.

Sources: the question is [Ruscio]'s (arXiv 2606.06160); the definitions, the split and the correction are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from . import statistics
from .errors import InputError
from .models.given import takes_model
from .models.view import View
from .positions import read_ranges
from .prompts import check_tokens
from .results import dataset, provenance
from .samples import Band, Half, Progress, Sampled, Samples, by_block, halves_of
from .statistics import INTERVAL, ends
from .summary import estimate

LAGS = tuple(range(1, 9))
EARLY = 32  # [Ruscio]'s "early queries" stand before this position; later bands double
LEAST_PROMPTS = 4  # two in each half, or no prompt has a deviation of its own
NUMBERS_AT_ONCE = 1 << 21  # of quantities that resamples are taken of: 16 MiB in doubles
FEW_PROMPTS = 400  # of a half: as many as there are resamples usually, which is where either way costs the same
SHUFFLES = 100  # of query labels
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
        seed: of the resampling.
        documents: what each prompt is a window of; documents are then resampled instead of prompts.
        progress: called with (blocks done, blocks in all).

    Returns:
        Dataset over `layer`, `head`, `band` (with `band_first`, `band_last`), in squared nats (log form) or squared weights
        (weight form): `log_form [part, layer, head, band]`, parts total = logits + mask + denominator + covariance;
        `log_source [source, ...]`; `log_stream` = V(X), the *residual component*; `log_noise`; `log_sink` = V(K),
        `log_rest` = V(R); `log_neither`; `weight_form [cell, ...]`, `weight_source [source, ...]`; `terms_form` and
        `terms_source` alike. `sink_constant` and `sink_varying`, the two parts of V(K); `steady_source`, `steady_stream`:
        with the constant sink on the side of the mask. `null_...` [band] beside the total of the model: uniform attention,
        and shuffled query labels (97.5 % quantile). Means over heads are `..._by_block [..., layer, band]`, over the whole
        model `..._of_model [..., band]`; sources divided by their total are `log_share_of_model`, `weight_share_of_model`
        and `terms_share_of_model`. `..._low` and `..._high` are the intervals. Attributes say what made it.

    Raises:
        InputError: too few prompts, bands or lags that do not fit the prompts or a window, values that are not finite, a
            model whose queries see a prefix or all keys: the split is derived for causal masks.

    Source: ours, see the module's text; the question is [Ruscio]'s, arXiv 2606.06160.
    """
    bands, lags = check(model, tokens, bands, lags)
    if not isinstance(bootstrap, int) or bootstrap < 0:
        raise InputError(f"bootstrap={bootstrap} is no number of resamples; give 0 or more")
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed={seed} is no seed; give a whole number, 0 or more")
    drawn = resampling(len(tokens), bootstrap, seed, documents)
    found = splits(model, tokens, bands, lags, drawn, progress)
    variables: dict[str, tuple[Any, ...]] = {}
    shuffled = found.pop("shuffled")[0].mean((1, 2))  # [shuffle, band]
    nulls = {
        "null_uniform": (uniform_total(model, tokens.shape[1], bands), "the same under uniform attention"),
        "null_shuffled": (np.percentile(shuffled, INTERVAL[1], axis=0), "97.5 % quantile under shuffled query labels"),
    }
    for name, (values, said) in nulls.items():
        variables[name] = (("band",), values, {"long_name": f"leakage, log form, {said}", "units": "nat^2"})
    for name, values in found.items():  # [resample, entry, layer, head, band]
        entry, units = ENTRIES[name]
        of_model = values.mean((2, 3))
        levels: dict[str, tuple[tuple[str, ...], Any]] = {
            name: (("layer", "head", "band"), values),
            f"{name}_by_block": (("layer", "band"), values.mean(3)),
            f"{name}_of_model": (("band",), of_model),
        }
        if entry == ("source",):
            total = of_model.sum(1, keepdims=True)
            shares = np.divide(of_model, total, out=np.full_like(of_model, np.nan), where=total > 0)
            levels[f"{name.removesuffix('_source')}_share_of_model"] = (("band",), shares)
        for level, (dims, at) in levels.items():
            described = {"long_name": DESCRIBED[name], "units": "1" if "share" in level else units}
            dims, at = (entry + dims, at) if entry else (dims, at[:, 0])
            variables[level] = (dims, at[0], described)
            if bootstrap:
                low, high = ends(at)
                variables[f"{level}_low"], variables[f"{level}_high"] = (dims, low, described), (dims, high, described)
    options = {"bands": bands, "lags": lags, "bootstrap": bootstrap, "seed": seed}
    return dataset(
        variables,
        tokens=tokens,
        coords={
            "part": list(PARTS),
            "source": list(SOURCES),
            "cell": list(CELLS),
            "layer": range(model.spec.blocks),
            "head": range(model.spec.heads),
            **band_coordinates(bands),
        },
        attrs=provenance(model, tokens, **options),
    )


def uniform_total(model: View, length: int, bands: Sequence[Band]) -> Float[np.ndarray, " band"]:
    """V(log number of visible keys) over each band's queries, mean over blocks: what the mask alone leaks."""
    i = np.arange(length)
    seen = [np.log(i + 1 if w is None else np.minimum(i + 1, w)) for w in model.spec.windows]
    return np.array([np.mean([x[first : last + 1].var() for x in seen]) for first, last in bands])


ENTRIES: dict[str, tuple[tuple[str, ...], str]] = {
    "log_form": (("part",), "nat^2"),
    "log_source": (("source",), "nat^2"),
    "log_stream": ((), "nat^2"),
    "log_noise": ((), "nat^2"),
    "steady_source": (("source",), "nat^2"),
    "steady_stream": ((), "nat^2"),
    "log_sink": ((), "nat^2"),
    "sink_constant": ((), "nat^2"),
    "sink_varying": ((), "nat^2"),
    "log_rest": ((), "nat^2"),
    "log_neither": ((), "nat^2"),
    "weight_form": (("cell",), "1"),
    "weight_source": (("source",), "1"),
    "terms_form": (("cell",), "1"),
    "terms_source": (("source",), "1"),
}
DESCRIBED = {
    "log_form": "leakage, log form, and its parts",
    "log_source": "leakage, log form, Shapley value of each source",
    "log_stream": "variance of what the residual stream adds to the log-weights",
    "steady_source": "leakage, log form, Shapley value of each source, the constant sink on the mask's side",
    "steady_stream": "variance of what the residual stream adds to the log-weights, the constant sink taken out",
    "log_noise": "sampling noise that an uncorrected variance would add",
    "log_sink": "variance of what position 0 adds to the log-denominator",
    "sink_constant": "variance of what position 0 adds to the log-denominator with its mean logit held constant",
    "sink_varying": "variance of what position 0's mean logit adds by changing with the query",
    "log_rest": "variance of what the rest of the residual stream adds to the log-denominator",
    "log_neither": "leakage, log form, with both sources removed",
    "weight_form": "leakage, weight form, by the sources that are on",
    "weight_source": "leakage, weight form, Shapley value of each source and what is left without",
    "terms_form": "leakage, weight form, the mask taken as the number of terms alone, by the sources that are on",
    "terms_source": "leakage, weight form, the mask taken as the number of terms alone, Shapley values",
}


# ------------------------------------------------------------------------------------------- what results may be read for


def resolved(ds: xr.Dataset, form: str, band: str) -> bool:
    """Whether shares of this band's total ("log", "weight" or "terms" form) mean anything.

    Not where the total may be zero, of which they would be any number, nor where the null check of block 0 fails.
    """
    where = {"part": "total"} if form == "log" else {"cell": "both"}
    total = estimate(ds, f"{form}_form_of_model", band=band, **where)
    return total[0] > 0 and not total[1] <= 0 and not null_fails(ds, band)


def null_fails(ds: xr.Dataset, band: str) -> bool:
    """Whether block 0, whose streams carry no position, has a residual component whose interval excludes 0.

    One that position 0's own term V(K) accounts for is none: BOS has logits of its own there, which is no noise.
    """
    first = {"layer": ds["layer"].values[0], "band": band}
    _, low, high = estimate(ds, "log_stream_by_block", **first)
    _, own_low, own_high = estimate(ds, "log_sink_by_block", **first)
    return high < 0 or (low > 0 and not (own_low > 0 and own_high >= low))


# ---------------------------------------------------------------------------------------------------- bands and lags


def usual_bands(length: int, lags: Sequence[int]) -> tuple[Band, ...]:
    """From the longest lag + 1 to 31, then doubling: 32-63, 64-127, ...; those of at least two queries."""
    first, last = max(lags) + 1, EARLY - 1
    bands = []
    while first < length:
        bands.append((first, min(last, length - 1)))
        first, last = max(first, last + 1), 2 * (last + 1) - 1
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
        raise InputError(f"{count} prompts cannot be split in two halves of several; give at least {LEAST_PROMPTS}")
    lags = tuple(lags)
    if not lags or len(set(lags)) < len(lags) or any(not isinstance(lag, int) or lag < 1 for lag in lags):
        raise InputError(f"lags {list(lags)} are none, repeated or below 1; give some, as 1-8")
    window = min((w for w in model.spec.windows if w is not None), default=None)
    if window is not None and max(lags) >= window:
        raise InputError(f"lag {max(lags)} is out of the window of {window} positions; give lags up to {window - 1}")
    bands = usual_bands(length, lags) if bands is None else tuple((int(a), int(b)) for a, b in bands)
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
    if len(set(bands)) < len(bands):
        raise InputError(f"bands {', '.join(map(name_of, bands))} repeat one; give each once")
    return bands, lags


def name_of(band: Band) -> str:
    """As in 9-31."""
    return f"{band[0]}-{band[1]}"


def band_coordinates(bands: Sequence[Band]) -> dict[str, Any]:
    """Coordinates of the dimension `band`."""
    return {
        "band": [name_of(band) for band in bands],
        "band_first": (("band",), [first for first, _ in bands]),
        "band_last": (("band",), [last for _, last in bands]),
    }


def parse_lags(text: str) -> tuple[int, ...]:
    """Read 1-8 or 1,2,4; ranges are inclusive.

    Raises:
        InputError: it is neither.
    """
    return tuple(lag for first, last in read_ranges(text, "lags", "1-8 or 1,2,4") for lag in range(first, last + 1))


def parse_bands(text: str) -> tuple[Band, ...]:
    """Read 9-31,32-63, inclusive.

    Raises:
        InputError: it is no list of ranges.
    """
    return tuple(read_ranges(text, "bands", "9-31,32-63"))


# ---------------------------------------------------------------------------------------------------- summing up


def resampling(
    prompts: int, count: int, seed: int, documents: Sequence[str] | None = None
) -> Int[Tensor, "resample prompt"]:
    """`statistics.resampling` within each half."""
    if documents is not None and len(documents) != prompts:
        raise InputError(f"{len(documents)} documents are named for {prompts} prompts; name one for each")
    return torch.from_numpy(statistics.resampling(prompts, count, seed, halves_of(prompts), documents))


def splits(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    bands: Sequence[Band],
    lags: Sequence[int],
    drawn: Int[Tensor, "resample prompt"],
    progress: Progress | None = None,
) -> dict[str, Float[np.ndarray, "_ _ layer head band"]]:
    """Both forms of every block under each resampling of the prompts, [resample, entry, layer, head, band].

    By the names of `leakage`'s variables; and "shuffled", [1, shuffle, layer, head, band].

    Raises:
        InputError: values that are not finite.
    """
    blocks = by_block(model, tokens, bands, lags, lambda sampled: split(sampled, bands, drawn), progress)
    found = {name: np.stack([block[name] for block in blocks], 2) for name in blocks[0]}
    if not all(np.isfinite(values).all() for values in found.values()):
        raise InputError(
            f"model '{model.identity.name}' gives attention logits that are not finite; "
            "check its weights, or use dtype float32"
        )
    return found


def split(
    sampled: Sampled, bands: Sequence[Band], drawn: Int[Tensor, "resample prompt"]
) -> dict[str, Float[Tensor, "_ _ head band"]]:
    """Both forms of one block under each resampling of its prompts."""
    found = [_split_band(sampled, n, band, drawn) for n, band in enumerate(bands)]
    return {name: torch.stack([one[name] for one in found], -1) for name in found[0]}


def _split_band(
    sampled: Sampled, number: int, band: Band, drawn: Int[Tensor, "resample prompt"]
) -> dict[str, Float[Tensor, "_ _ head"]]:
    """One band; some heads and some resamples at a time, so that what is held stays below `NUMBERS_AT_ONCE`."""
    at = slice(band[0] - sampled.first, band[1] + 1 - sampled.first)
    heads, lags, _ = sampled.halves[0].shift.shape
    prompts = math.ceil(drawn.shape[1] / 2)
    numbers = 2 * (at.stop - at.start) * (len(OF_LAGS) * lags + len(OF_QUERIES))  # of a head, a row of both halves
    few = prompts <= FEW_PROMPTS and prompts * numbers <= NUMBERS_AT_ONCE
    some = max(1, NUMBERS_AT_ONCE // (numbers * (prompts if few else len(drawn))))
    draws = len(drawn) if few else max(1, NUMBERS_AT_ONCE // numbers)
    found = []
    for start in range(0, heads, some):
        own, every, shuffled = slice(start, start + some), [], None
        for part in drawn.split(draws):
            made = _Drawn(sampled, number, at, own, part, few=few)
            shuffled = _shuffled(made) if shuffled is None else shuffled
            every.append(_forms(made))
        assert shuffled is not None
        found.append({name: torch.cat([one[name] for one in every]) for name in every[0]} | {"shuffled": shuffled})
    return {name: torch.cat([one[name] for one in found], -1) for name in found[0]}


# What is averaged over prompts: of every lag and query, and of every query.
OF_LAGS = ("logits", "toeplitz", "both", "only mask", "neither", "only residual", "only residual, terms")
OF_QUERIES = ("normalizer", "with_sink", "with_constant", "of_mask")


def _quantities(
    samples: Samples, half: Half, number: int, at: slice, heads: slice
) -> Float[Tensor, "prompt head row query"]:
    """Rows: `OF_LAGS`, each for all lags, and `OF_QUERIES`; of band `number`, which is `at` these queries."""
    logits = samples.logits[:, heads, :, at]
    toeplitz = logits + half.shift[heads, :, at]
    z, m, sink, through_sink, through_mask = (
        x[:, heads, None, at]
        for x in (samples.normalizer, samples.of_mask, samples.with_sink, samples.through_sink, samples.through_mask)
    )
    constant, through_constant = (
        x[:, heads, None, number, at] for x in (samples.with_constant, samples.through_constant)
    )
    # Denominators whose mean over the half's prompts is its mean over the band at every query.
    steady_z, steady_terms = (
        mean - mean.mean(-1, keepdim=True) for mean in (half.normalizer[heads, at], half.of_mask[heads, at])
    )
    z_steady, z_terms, m_steady = z - steady_z[:, None], z - steady_terms[:, None], m - steady_terms[:, None]
    pairs = ((logits, z), (toeplitz, m), (toeplitz, m_steady), (logits, z_steady), (logits, z_terms))
    cells = ((s - log_z).exp() for s, log_z in pairs)
    sinks = (sink + through_sink, constant + through_constant)
    return torch.cat([logits, toeplitz, *cells, z, *sinks, m + through_mask], 2)


class _Drawn:
    """A band's quantities under many resamplings of the prompts at once, and covariances of their means.

    Of few prompts, `C(E x, E y) = sum_nm w_n w'_m <x_n, y_m>`: products of prompts are taken once, and every resample is a
    quadratic form in its weights. Of many, their means in every resample are held. `values` [half, row, head, quantity,
    query] has a row for each prompt, zeros where a half has fewer, or for each resample.
    """

    def __init__(
        self,
        sampled: Sampled,
        number: int,
        at: slice,
        heads: slice,
        drawn: Int[Tensor, "resample prompt"],
        *,
        few: bool,
    ) -> None:
        found = []
        for half, own in zip(sampled.halves, halves_of(drawn.shape[1]), strict=True):
            weights = drawn[:, own].to(half.shift)
            weights = weights / weights.sum(1, keepdim=True)
            rows = (_quantities(samples, half, number, at, heads) for samples in half.chunks)
            found.append((weights, torch.cat(list(rows)) if few else _weighed(weights, rows)))
        most = max(len(rows) for _, rows in found)  # halves of an odd number of prompts differ by one
        padded = [
            functional.pad(x, (0, 0) * (x.ndim - 1) + (0, most - len(x))) if len(x) < most else x for _, x in found
        ]
        self.values = torch.stack(padded)
        self._weights = None
        if few:
            self._weights = torch.stack([functional.pad(w, (0, most - w.shape[1])) for w, _ in found])
        self.lags = sampled.halves[0].shift.shape[1]

    def __getitem__(self, name: str) -> Float[Tensor, "half row head lag query"]:
        """One of `OF_LAGS`, or of `OF_QUERIES` with one lag for all."""
        if name in OF_LAGS:
            start = OF_LAGS.index(name) * self.lags
            return self.values[..., start : start + self.lags, :]
        start = len(OF_LAGS) * self.lags + OF_QUERIES.index(name)
        return self.values[..., start : start + 1, :]

    def means(self, name: str) -> Float[Tensor, "half head lag query"]:
        """Over the prompts as they are."""
        x = self[name]
        return x[:, 0] if self._weights is None else torch.einsum("hn,hnabc->habc", self._weights[:, 0], x)

    def covariance(self, x: Tensor, y: Tensor) -> Float[Tensor, "resample head"]:
        """Between the halves, mean of both orders, over the band's queries; mean over lags."""
        found = self._form(x[0], y[1], self._weights)
        if x is y:
            return found
        return (found + self._form(x[1], y[0], None if self._weights is None else self._weights.flip(0))) / 2

    def variance(self, x: Tensor) -> Float[Tensor, "resample head"]:
        """Of the mean of both halves, its sampling noise included."""
        if self._weights is None:
            both = x.mean(0)
            return self._form(both, both, None)
        both, weights = x.flatten(0, 1), torch.cat(list(self._weights), 1) / 2
        return self._form(both, both, torch.stack([weights, weights]))

    @staticmethod
    def _form(x: Tensor, y: Tensor, weights: Tensor | None) -> Float[Tensor, "resample head"]:
        """Covariance over queries of x and y [row, head, lag, query], mean over lags."""
        x, y = (v - v.mean(-1, keepdim=True) for v in (x, y))
        if weights is None:
            return (x * y).mean((-2, -1)).cpu()
        lags = max(x.shape[2], y.shape[2])
        x, y = (v.expand(-1, -1, lags, -1).transpose(0, 1).flatten(2) for v in (x, y))  # [head, prompt, lag * query]
        products = x @ y.transpose(-1, -2) / x.shape[-1]
        return ((weights[0] @ products) * weights[1]).sum(-1).T.cpu()


def _weighed(
    weights: Float[Tensor, "resample prompt"], rows: Iterable[Float[Tensor, "some head quantity query"]]
) -> Float[Tensor, "resample head quantity query"]:
    """The rows' means under every resample, added chunk by chunk."""
    total, seen = weights.new_zeros(()), 0
    for some in rows:
        total = total + torch.tensordot(weights[:, seen : seen + len(some)], some, 1)
        seen += len(some)
    return total


def _shuffled(drawn: _Drawn) -> Float[Tensor, "one shuffle head"]:
    """The total of the log form with the queries of one half under each other's labels: what no dependence gives."""
    one, other = (x - x.mean(-1, keepdim=True) for x in drawn.means("logits") - drawn.means("normalizer"))
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(one.shape[-1], generator=generator).to(one.device) for _ in range(SHUFFLES)]
    return torch.stack([(one * other[..., order]).mean((-2, -1)) for order in orders])[None].cpu()


def _forms(drawn: _Drawn) -> dict[str, Float[Tensor, "resample entry head"]]:
    """Every variable of the log form and of the weight form, of one band."""
    covariance = drawn.covariance
    s, toeplitz, z, with_sink, with_constant, m = (
        drawn[name] for name in ("logits", "toeplitz", "normalizer", "with_sink", "with_constant", "of_mask")
    )
    stream = s - (z - with_constant)  # X, and M beside it with the constant sink
    whole, of_mask = s - (z - m), with_constant
    parts = (s - z, s, m, z - m, stream, of_mask, whole, with_sink - m, with_constant - m, with_sink - with_constant)
    total, logits, mask, denominator, of_stream, of_terms, of_whole, sink, constant, varying, rest, neither = (
        covariance(y, y) for y in (*parts, z - with_sink, toeplitz)
    )
    shared, shared_whole = covariance(stream, of_mask), covariance(whole, m)
    found = {
        "log_form": (total, logits, mask, denominator, total - logits - mask - denominator),
        "log_source": (mask - shared_whole, of_whole - shared_whole, torch.zeros_like(mask)),
        "log_stream": (of_whole,),
        "steady_source": (of_terms - shared, of_stream - shared, torch.zeros_like(mask)),
        "steady_stream": (of_stream,),
        "log_noise": (drawn.variance(s - z) - total,),
        "log_sink": (sink,),
        "sink_constant": (constant,),
        "sink_varying": (varying,),
        "log_rest": (rest,),
        "log_neither": (neither,),  # the mask's mean, made constant over the band, is no part of a covariance
    }
    both, only_mask, neither = (covariance(a, a) for a in (drawn["both"], drawn["only mask"], drawn["neither"]))
    for form, name in (("weight", "only residual"), ("terms", "only residual, terms")):
        a = drawn[name]
        only_residual = covariance(a, a)
        mask = (only_mask - neither + both - only_residual) / 2
        residual = (only_residual - neither + both - only_mask) / 2
        found[f"{form}_form"] = (both, only_mask, only_residual, neither)
        found[f"{form}_source"] = (mask, residual, neither)
    return {name: torch.stack(values, 1) for name, values in found.items()}
