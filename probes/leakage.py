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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from . import processes
from .attention import by_layer, diagonals, normalizers
from .errors import InputError
from .jacobian import Progress
from .models.view import Attention, View
from .pieces import Piece, shared
from .positions import read_ranges
from .prompts import check_tokens
from .results import dataset, provenance
from .summary import estimate

LAGS = tuple(range(1, 9))
EARLY = 32  # [Ruscio]'s "early queries" stand before this position; later bands double
LEAST_PROMPTS = 4  # two in each half, or no prompt has a deviation of its own
TOKENS_AT_ONCE = 8192  # of prompts run through a block together
LOGITS_AT_ONCE = 1 << 23  # of all prompts of a half, heads and keys: 32 MiB in float32
INTERVAL = (2.5, 97.5)  # percentiles of the bootstrap
PARTS = ("total", "logits", "mask", "denominator", "covariance")
SOURCES = ("mask", "residual", "spread")
CELLS = ("both", "mask", "residual", "neither")  # which sources are on

Band = tuple[int, int]  # first and last query


@dataclass(frozen=True)
class Samples:
    """What leakage needs of one block, prompt by prompt, at the queries `first` to `first` + Q."""

    first: int
    logits: Float[Tensor, "prompt head lag query"]  # s_{i, i-lag}
    toeplitz: Float[Tensor, "prompt head lag query"]  # s~_{i, i-lag}
    normalizer: Float[Tensor, "prompt head query"]  # log Z_i
    with_sink: Float[Tensor, "prompt head query"]  # log Z~_i, but position 0 with its own logits
    of_mask: Float[Tensor, "prompt head query"]  # log Z~_i
    # What a prompt adds to the two above through the means `E s_ij - t` that shift all prompts, to first order; mean 0.
    through_sink: Float[Tensor, "prompt head query"]
    through_mask: Float[Tensor, "prompt head query"]


def leakage(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    bands: Any = None,
    lags: Any = LAGS,
    bootstrap: int = 400,
    seed: int = 0,
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
        progress: called with (blocks done, blocks in all).

    Returns:
        Dataset over `layer`, `head`, `band` (with `band_first`, `band_last`), in squared nats (log form) or squared
        weights (weight form): `log_form [part, layer, head, band]`, parts total = logits + mask + denominator +
        covariance; `log_source [source, ...]`; `log_stream` = V(X), the *residual component*; `log_noise`; `log_sink` =
        V(K), `log_rest` = V(R); `log_neither`; `weight_form [cell, ...]`, `weight_source [source, ...]`; `terms_form` and
        `terms_source` alike. Means over heads are `..._by_block [..., layer, band]`, over the whole model `..._of_model
        [..., band]`; sources divided by their total are `log_share_of_model`, `weight_share_of_model` and
        `terms_share_of_model`. `..._low` and `..._high` are the intervals. Attributes say what made it.

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
    weights = resampling(len(tokens), bootstrap, seed)

    def summed_up(samples: Samples) -> dict[str, Tensor]:
        return log_form(samples, bands, weights) | weight_form(samples, bands, weights)

    found = by_block(model, tokens, bands, lags, summed_up, progress)
    names = {name: np.stack([block[name] for block in found], 2) for name in found[0]}
    if not all(np.isfinite(values).all() for values in names.values()):
        raise InputError(
            f"model '{model.identity.name}' gives attention logits that are not finite; "
            "check its weights, or use dtype float32"
        )
    variables: dict[str, tuple[Any, ...]] = {}
    for name, values in names.items():  # [resample, entry, layer, head, band]
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
                low, high = _interval(at)
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


def _interval(resamples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends over the resamples [1:]; none where the estimate [0] is none (a share of nothing)."""
    known = ~np.isnan(resamples[0])
    ends = np.full((2, *resamples.shape[1:]), np.nan)
    ends[:, known] = np.nanpercentile(resamples[1:, known], INTERVAL, axis=0)
    return ends[0], ends[1]


ENTRIES: dict[str, tuple[tuple[str, ...], str]] = {
    "log_form": (("part",), "nat^2"),
    "log_source": (("source",), "nat^2"),
    "log_stream": ((), "nat^2"),
    "log_noise": ((), "nat^2"),
    "log_sink": ((), "nat^2"),
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
    "log_noise": "sampling noise that an uncorrected variance would add",
    "log_sink": "variance of what position 0 adds to the log-denominator",
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


# ---------------------------------------------------------------------------------------------------- measuring


def by_block(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    bands: Sequence[Band],
    lags: Sequence[int],
    summed_up: Callable[[Samples], dict[str, Tensor]],
    progress: Progress | None = None,
) -> list[Piece]:
    """What `summed_up` makes of every block's samples; all prompts run through a block before the next.

    Several processes run a share of the prompts each, and hand queries, keys and log-sum-exps of a block to one of them,
    which makes its samples: block after block another one.
    """
    chunk, finished = max(1, TOKENS_AT_ONCE // tokens.shape[1]), False

    def measured(shares: Sequence[Sequence[int]]) -> Iterator[tuple[int, Piece]]:
        nonlocal finished
        owner = {layer: process for process, share in enumerate(shares) for layer in share}
        if not owner:
            return
        embeddings, count = _own_prompts(model, tokens, chunk)
        rounds = sorted(owner)[len(shares) - 1 :: len(shares)]  # after these blocks everybody has one
        mine: tuple[int, Attention] | None = None
        for layer, attentions in by_layer(model, embeddings, chunk=chunk):
            if layer in owner:
                whole = _handed(_joined(attentions), count, owner[layer])
                mine = mine if whole is None else (layer, whole)
            if mine is not None and (layer in rounds or layer == max(owner)):
                made = summed_up(samples_of(mine[1], bands, lags))
                yield mine[0], {name: x.cpu().numpy() for name, x in made.items()}
                mine = None
            if progress is not None:
                progress(float(layer + 1), float(model.spec.blocks))
            finished = layer + 1 == model.spec.blocks
            if layer == max(owner):
                return

    found = list(shared("leakage", model.spec.blocks, measured))
    if progress is not None and not finished:  # the last blocks were there, or are another process's
        progress(float(model.spec.blocks), float(model.spec.blocks))
    return found


def _own_prompts(model: View, tokens: Int[Tensor, "prompt position"], chunk: int) -> tuple[Tensor, int]:
    """(embeddings of this process's prompts, how many count): whole chunks, so that products have the same shapes."""
    chunks, share = math.ceil(len(tokens) / chunk), processes.count()
    first, last = (chunk * (chunks * n // share) for n in (processes.number(), processes.number() + 1))
    own = tokens[first:last]
    some = own if len(own) else tokens[:chunk]  # to go through the blocks with
    return torch.cat([model.embed(some[n : n + 1]) for n in range(len(some))]), len(own)


def _handed(attention: Attention, count: int, to: int) -> Attention | None:
    """The first `count` prompts of every process together, in process `to`."""
    given = {name: getattr(attention, name)[:count] for name in ("query", "key")} | {
        "normalizer": normalizers(attention)[:count]
    }
    found = {name: processes.handed(x, to) for name, x in given.items()}
    if found["query"] is None:
        return None
    value = attention.value[:1].expand(len(found["query"]), -1, -1, -1)
    return replace(attention, value=value, **found)


def samples_of(attention: Attention, bands: Sequence[Band], lags: Sequence[int]) -> Samples:
    """The samples of one block from the attention of all prompts; the first half of the batch is the first half."""
    first, last = min(a for a, _ in bands), max(b for _, b in bands)
    halves = [_half(attention, index) for index in halves_of(len(attention.query))]
    parts = [_samples_of_half(half, first, last + 1, lags) for half in halves]
    return Samples(first, *(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def halves_of(count: int) -> tuple[slice, slice]:
    """The two halves of the prompts."""
    return slice(0, count // 2), slice(count // 2, count)


def _samples_of_half(attention: Attention, first: int, stop: int, lags: Sequence[int]) -> tuple[Tensor, ...]:
    """The fields of `Samples` but `first`, of one half's prompts, queries `first` to `stop`."""
    own_means = _lag_means(attention)  # [prompt, head, lag]
    means = own_means.mean(0)
    count, heads, _, _ = attention.query.shape
    logits = diagonals(attention, lags)[..., first:stop].double()
    centred = logits - logits.mean(0) + means[:, torch.tensor(lags, device=means.device), None]
    found: list[tuple[Tensor, ...]] = []
    for start in range(first, stop, _rows(attention, stop)):
        end = min(start + _rows(attention, stop), stop)
        left = attention.first_key(start)
        block = attention.logits(start, end)  # [prompt, head, query, key]
        queries, keys = torch.arange(start, end)[:, None], torch.arange(left, end)[None, :]
        distance = (queries - keys).clamp_min(0).to(block.device)
        # A hidden entry stays hidden: minus infinity less a finite shift. Its own mean is no number, so it has none.
        mean, hidden = block.mean(0), torch.isinf(block[0])
        made = block + (means.to(block)[:, distance] - mean).masked_fill_(hidden, 0)
        nothing = made.new_full((count, heads, end - start), float("-inf"))
        sees_zero = left == 0
        others = made[..., 1:].logsumexp(-1) if sees_zero else made.logsumexp(-1)
        of_mask = torch.logaddexp(others, made[..., 0] if sees_zero else nothing)
        with_sink = torch.logaddexp(others, block[..., 0] if sees_zero else nothing)
        # What a prompt adds to log Z~ through the means that all prompts of its half are shifted by, to first order.
        added = (own_means - means).to(block)[..., distance] - (block - mean).masked_fill_(hidden, 0)
        through = []
        for log_z in (of_mask, with_sink):
            weights = (made - log_z[..., None]).exp_().mean(0)  # [head, query, key]
            if log_z is with_sink and sees_zero:
                weights[..., 0] = 0  # position 0 keeps its own logits there
            through.append((weights * added).sum(-1))
        found.append((with_sink, of_mask, *through))
    normalizer = normalizers(attention)[..., first:stop].double()
    with_sink, of_mask, through_mask, through_sink = (
        torch.cat(pieces, -1).double() for pieces in zip(*found, strict=True)
    )
    return logits, centred, normalizer, with_sink, of_mask, through_sink, through_mask


def _lag_means(attention: Attention) -> Float[Tensor, "prompt head lag"]:
    """Each prompt's mean logit over all queries and keys other than 0, for every lag below T; `t(lag)` is their mean.

    The longest lags have one pair or none; those without any take the last one that has.
    """
    count, heads, length, _ = attention.query.shape
    device = attention.query.device
    sums = torch.zeros(count, heads, length, dtype=torch.float64, device=device)
    counts = torch.zeros(length, dtype=torch.float64, device=device)
    step = _rows(attention, length)
    for start in range(1, length, step):
        end = min(start + step, length)
        left = attention.first_key(start)
        block = attention.logits(start, end)  # [prompt, head, query, key]
        rows, columns = block.shape[-2:]
        keys = torch.arange(left, end, device=device)
        seen = torch.isfinite(block[0, 0]) & (keys > 0)
        by_lag = _diagonal_sums(block.masked_fill_(~seen, 0).double())  # of lags start - end + 1 and up
        least = start - (end - 1)
        reach = slice(max(0, -least), rows + columns - 1)
        lags = slice(max(0, least), max(0, least) + len(range(*reach.indices(rows + columns - 1))))
        sums[..., lags] += by_lag[..., reach]
        counts[lags] += _diagonal_sums(seen.double())[reach]
    if not counts.any():
        raise InputError("attention scores are not finite; check the model's weights, or use dtype float32 or float64")
    longest = int(counts.nonzero().max())
    means = sums / counts.clamp_min(1)
    means[..., longest + 1 :] = means[..., longest : longest + 1]
    return means


def _diagonal_sums(block: Float[Tensor, "*some query key"]) -> Float[Tensor, "*some diagonal"]:
    """Sums along diagonals, from the last column of the first row to the first column of the last row.

    Columns turned round and rows shifted by their number, by reading them with a row length of one less: a diagonal becomes
    a column, and its sum has the same order on every device.
    """
    rows, columns = block.shape[-2:]
    width = rows + columns - 1
    turned = torch.nn.functional.pad(block.flip(-1), (0, width + 1 - columns))  # [..., rows, width + 1]
    return turned.flatten(-2)[..., : rows * width].unflatten(-1, (rows, width)).sum(-2)


def _rows(attention: Attention, keys: int) -> int:
    count, heads = attention.query.shape[:2]
    return max(1, LOGITS_AT_ONCE // (count * heads * keys))


def _half(attention: Attention, index: slice) -> Attention:
    tensors = {name: getattr(attention, name)[index] for name in ("query", "key", "value")}
    return replace(attention, **tensors, output=None, normalizer=normalizers(attention)[index])


def _joined(attentions: Sequence[Attention]) -> Attention:
    """One batch of all prompts; of values, which nothing here needs, only the shape is kept."""
    first = attentions[0]
    if len(attentions) == 1:
        return first
    query, key = (torch.cat([getattr(a, name) for a in attentions]) for name in ("query", "key"))
    value = first.value[:1].expand(len(query), -1, -1, -1)
    normalizer = torch.cat([normalizers(a) for a in attentions])
    return replace(first, query=query, key=key, value=value, output=None, normalizer=normalizer)


# ---------------------------------------------------------------------------------------------------- summing up


def resampling(prompts: int, count: int, seed: int) -> Float[Tensor, "resample half prompt"]:
    """Weights of the prompts in each half's mean: first the halves as they are, then `count` resamples within each."""
    random = np.random.default_rng(seed)
    weights = np.zeros((1 + count, 2, prompts))
    for half, index in enumerate(halves_of(prompts)):
        size = index.stop - index.start
        weights[0, half, index] = 1 / size
        weights[1:, half, index] = random.multinomial(size, np.full(size, 1 / size), size=count) / size
    return torch.from_numpy(weights)


def log_form(
    samples: Samples, bands: Sequence[Band], weights: Float[Tensor, "resample half prompt"]
) -> dict[str, Float[Tensor, "resample entry head band"]]:
    """The log form of one block under each resampling of its prompts, by the names of `leakage`'s variables."""
    found: dict[str, list[Tensor]] = {}
    for band in bands:
        at = slice(band[0] - samples.first, band[1] + 1 - samples.first)
        s, toeplitz = samples.logits[..., at], samples.toeplitz[..., at]
        z, with_sink, m = (
            x[..., at].unsqueeze(2)
            for x in (
                samples.normalizer,
                samples.with_sink + samples.through_sink,
                samples.of_mask + samples.through_mask,
            )
        )
        steady = _of_own_half(m).mean(-1, keepdim=True)  # the mask removed: its mean over the band
        x, weighed = s - (z - m), _Weighed(weights)
        total, logits, mask, denominator, stream, sink, rest, neither = (
            weighed.covariance(y, y) for y in (s - z, s, m, z - m, x, with_sink - m, z - with_sink, toeplitz - steady)
        )
        shared = weighed.covariance(x, m)
        band_found = {
            "log_form": (total, logits, mask, denominator, total - logits - mask - denominator),
            "log_source": (mask - shared, stream - shared, torch.zeros_like(mask)),
            "log_stream": (stream,),
            "log_noise": (weighed.variance(s - z) - total,),
            "log_sink": (sink,),
            "log_rest": (rest,),
            "log_neither": (neither,),
        }
        for name, values in band_found.items():
            found.setdefault(name, []).append(torch.stack(values, 1))
    return {name: torch.stack(values, -1) for name, values in found.items()}


def weight_form(
    samples: Samples, bands: Sequence[Band], weights: Float[Tensor, "resample half prompt"]
) -> dict[str, Float[Tensor, "resample entry head band"]]:
    """The weight form of one block under each resampling of its prompts, by the names of `leakage`'s variables."""
    found: dict[str, list[Tensor]] = {}
    weighed = _Weighed(weights)

    def cell(logits: Tensor, log_z: Tensor, removed: Tensor | None) -> Float[Tensor, "resample head"]:
        """`V(E exp(s - log Z))`, of the denominators' means only the part `removed` made constant over the band."""
        if removed is not None:
            log_z = log_z - removed + removed.mean(-1, keepdim=True)
        a = (logits - log_z).exp()
        return weighed.covariance(a, a)

    for band in bands:
        at = slice(band[0] - samples.first, band[1] + 1 - samples.first)
        z, m = (x[..., at].unsqueeze(2) for x in (samples.normalizer, samples.of_mask))
        whole, terms = _of_own_half(z), _of_own_half(m)
        with_stream, without = (samples.logits[..., at], z), (samples.toeplitz[..., at], m)
        both, only_mask, neither = cell(*with_stream, None), cell(*without, None), cell(*without, terms)
        for name, removed in (("weight", whole), ("terms", terms)):
            only_residual = cell(*with_stream, removed)
            mask = (only_mask - neither + both - only_residual) / 2
            residual = (only_residual - neither + both - only_mask) / 2
            cells, sources = (both, only_mask, only_residual, neither), (mask, residual, neither)
            found.setdefault(f"{name}_form", []).append(torch.stack(cells, 1))
            found.setdefault(f"{name}_source", []).append(torch.stack(sources, 1))
    return {name: torch.stack(values, -1) for name, values in found.items()}


class _Weighed:
    """Covariances over queries of means over prompts, under many weightings of the prompts at once.

    Of few prompts, `C(E x, E y) = sum_nm w_n w'_m <x_n, y_m>`: products of prompts are taken once, and every resample is a
    quadratic form in its weights. Of more prompts than numbers in each, the means themselves are taken.
    """

    def __init__(self, weights: Float[Tensor, "resample half prompt"]) -> None:
        self._weights = weights

    def covariance(self, x: Tensor, y: Tensor) -> Float[Tensor, "resample head"]:
        """Between the halves, mean of both orders, of x, y [prompt, head, lag, query]; mean over lags."""
        one, other = halves_of(self._weights.shape[-1])
        first, second = self._weights[:, 0, one], self._weights[:, 1, other]
        found = self._form(x[one], y[other], first, second)
        return found if x is y else (found + self._form(x[other], y[one], second, first)) / 2

    def variance(self, x: Tensor) -> Float[Tensor, "resample head"]:
        """Of the mean over all prompts, its sampling noise included."""
        everyone = self._weights.mean(1)
        return self._form(x, x, everyone, everyone)

    @staticmethod
    def _form(
        x: Tensor, y: Tensor, left: Float[Tensor, "resample some"], right: Float[Tensor, "resample others"]
    ) -> Float[Tensor, "resample head"]:
        """Covariance of x [some, head, lag, query] under `left` and y [others, ...] under `right`."""
        lags = max(x.shape[2], y.shape[2])
        x, y = ((v - v.mean(-1, keepdim=True)).expand(-1, -1, lags, -1).transpose(0, 1).flatten(2) for v in (x, y))
        left, right = left.to(x), right.to(y)
        numbers, found = x.shape[-1], []
        for a, b in zip(x, y, strict=True):  # head by head, [prompt, lag * query]
            if len(a) < 2 * numbers:
                found.append(((left @ (a @ b.T)) * right).sum(-1) / numbers)
            else:
                found.append(((left @ a) * (right @ b)).mean(-1))
        return torch.stack(found, -1).cpu()


def _of_own_half(values: Tensor) -> Tensor:
    """For every prompt [prompt, ...] the mean over its half."""
    return torch.cat([values[index].mean(0).expand_as(values[index]) for index in halves_of(len(values))])
