"""The two forms of leakage: every part and source of one block's samples, under every resampling of the prompts.

Definitions, names and sources are those of `probes.leakage`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...errors import InputError
from ...models.checks import not_finite
from ...models.view import Attention, View
from ...results import statistics
from ...run.memory import trim
from ...run.progress import Progress, Tally
from ...run.store import Piece, Store
from .samples import Band, Course, Half, halves_of, lag_means_of, sampled

NUMBERS_AT_ONCE = 1 << 21  # of the quantities of prompts: 16 MiB in doubles
SHUFFLES = 100  # of query labels


def resampling(
    prompts: int, count: int, seed: int, documents: Sequence[str] | None = None
) -> Int[Tensor, "resample prompt"]:
    """`statistics.resampling` within each half.

    Raises:
        InputError: a number of resamples or a seed that is none, or documents that are not those of the prompts.
    """
    for name, value in {"bootstrap": count, "seed": seed}.items():
        if not isinstance(value, int) or value < 0:
            raise InputError(f"{name}={value} cannot be used; give a whole number, 0 or more")
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
    *,
    pieces: Store,
) -> dict[str, Float[np.ndarray, "_ _ layer head band"]]:
    """Both forms of every block under each resampling of the prompts, [resample, entry, layer, head, band].

    By the names of `leakage`'s variables; and "shuffled", [1, shuffle, layer, head, band]. Every process runs all prompts
    through the blocks and splits a share of these.

    Raises:
        InputError: values that are not finite.
    """
    report, longest = Tally(progress, model.spec.blocks), max(last + 1 - first for first, last in bands)
    # Heads that are taken together, so that what is held stays below `NUMBERS_AT_ONCE` where one head's does.
    heads = max(1, NUMBERS_AT_ONCE // (len(tokens) * longest * (len(OF_LAGS) * len(lags) + len(OF_QUERIES))))
    ahead, course = iter(range(model.spec.blocks)), list[Course]()

    def measured(layer: int) -> Piece:
        """A block's forms; the blocks before it that nobody asks this process for are passed."""
        if not course:
            course.append(Course(model, tokens, pieces.folder))
        for at in ahead:
            if at == layer:
                break
            for _ in course[0].through(at):
                pass
            report()
        found = [split(halves, bands, lags, drawn) for halves in course[0].attention(layer, heads)]
        trim()
        report()
        return {name: torch.cat([some[name] for some in found], 2).numpy() for name in found[0]}

    blocks = list(pieces.each("leakage", model.spec.blocks, measured))
    report.finish()
    found = {name: np.stack([block[name] for block in blocks], 2) for name in blocks[0]}
    if not all(np.isfinite(values).all() for values in found.values()):
        raise not_finite(model, "attention logits")
    return found


def split(
    halves: Sequence[Attention], bands: Sequence[Band], lags: Sequence[int], drawn: Int[Tensor, "resample prompt"]
) -> dict[str, Float[Tensor, "_ _ head band"]]:
    """Both forms of some heads, from their attention on the prompts of either half, under each resampling of these."""
    means, found = [lag_means_of(half) for half in halves], []
    for band in bands:
        of_halves = [sampled(half, mean, band, lags) for half, mean in zip(halves, means, strict=True)]
        quantities = _Drawn(of_halves, drawn)
        found.append(_forms(quantities) | {"shuffled": _shuffled(quantities)})
    return {name: torch.stack([of_band[name] for of_band in found], -1) for name in found[0]}


# What is averaged over prompts: of every lag and query, and of every query.
OF_LAGS = ("logits", "toeplitz", "both", "only mask", "neither", "only residual")
OF_QUERIES = ("normalizer", "with_sink", "with_constant", "of_mask")


def _quantities(half: Half) -> Float[Tensor, "prompt head row query"]:
    """Rows: `OF_LAGS`, each for all lags, and `OF_QUERIES`."""
    toeplitz = half.logits + half.shift
    z, m = half.normalizer[:, :, None], half.of_mask[:, :, None]
    # Denominators whose mean over the half's prompts is its mean over the band at every query.
    z_steady, m_steady = (x - x.mean(0) + x.mean((0, -1), keepdim=True)[0] for x in (z, m))
    pairs = ((half.logits, z), (toeplitz, m), (toeplitz, m_steady), (half.logits, z_steady))
    cells = ((s - log_z).exp() for s, log_z in pairs)
    moved = (x[:, :, None] for x in (half.moved_sink, half.moved_constant, half.moved_mask))
    return torch.cat([half.logits, toeplitz, *cells, z, *moved], 2)


class _Drawn:
    """A band's quantities under many resamplings of the prompts at once, and covariances of their means.

    `C(E x, E y) = sum_nm w_n w'_m <x_n, y_m>`: products of prompts are taken once, and every resample is a quadratic form in
    its weights. Halves of an odd number of prompts differ by one: the smaller has a row and weights of zeros.
    """

    def __init__(self, halves: Sequence[Half], drawn: Int[Tensor, "resample prompt"]) -> None:
        values, weights = [_quantities(half) for half in halves], []
        for own in halves_of(drawn.shape[1]):
            counts = drawn[:, own].to(values[0])
            weights.append((counts / counts.sum(1, keepdim=True)).T)
        self._values = pad_sequence(values, batch_first=True)  # [half, prompt, head, quantity, query]
        self._weights = pad_sequence(weights, batch_first=True).mT.contiguous()  # [half, resample, prompt]
        self._lags = halves[0].shift.shape[1]

    def __getitem__(self, name: str) -> Float[Tensor, "half prompt head lag query"]:
        """One of `OF_LAGS`, or of `OF_QUERIES` with one lag for all."""
        if name in OF_LAGS:
            start = OF_LAGS.index(name) * self._lags
            return self._values[..., start : start + self._lags, :]
        at = len(OF_LAGS) * self._lags + OF_QUERIES.index(name)
        return self._values[..., at : at + 1, :]

    def means(self, name: str) -> Float[Tensor, "half head lag query"]:
        """Over the prompts as they are."""
        return torch.einsum("hn,hnabc->habc", self._weights[:, 0], self[name])

    def covariance(self, x: Tensor, y: Tensor) -> Float[Tensor, "resample head"]:
        """Between the halves, mean of both orders, over the band's queries; mean over lags."""
        found = _form(x[0], y[1], self._weights)
        return found if x is y else (found + _form(x[1], y[0], self._weights.flip(0))) / 2

    def variance(self, x: Tensor) -> Float[Tensor, "resample head"]:
        """Of the mean of both halves, its sampling noise included."""
        both, weights = x.flatten(0, 1), torch.cat(list(self._weights), 1) / 2
        return _form(both, both, torch.stack([weights, weights]))


def _form(x: Tensor, y: Tensor, weights: Float[Tensor, "side resample prompt"]) -> Float[Tensor, "resample head"]:
    """Covariance over queries of the means of x and y [prompt, head, lag, query], mean over lags."""
    x, y = (v - v.mean(-1, keepdim=True) for v in (x, y))
    lags = max(x.shape[2], y.shape[2])
    x, y = (v.expand(-1, -1, lags, -1).transpose(0, 1).flatten(2) for v in (x, y))  # [head, prompt, lag * query]
    products = x @ y.transpose(-1, -2) / x.shape[-1]
    return ((weights[0] @ products) * weights[1]).sum(-1).T.cpu()


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
    total, logits, mask, denominator, of_stream, of_terms, of_whole, sink, constant, varying, neither = (
        covariance(y, y) for y in (*parts, toeplitz)
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
        "log_neither": (neither,),  # the mask's mean, made constant over the band, is no part of a covariance
    }
    both, only_mask, neither, only_residual = (covariance(x, x) for x in map(drawn.__getitem__, OF_LAGS[2:]))
    found["weight_form"] = (both, only_mask, only_residual, neither)
    apart = only_mask - only_residual  # Shapley values: each source's, alone and beside the other
    found["weight_source"] = ((both - neither + apart) / 2, (both - neither - apart) / 2, neither)
    return {name: torch.stack(values, 1) for name, values in found.items()}
