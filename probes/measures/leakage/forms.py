"""Parts, parties and shares of one block's leakage, under every resampling of the prompts.

Definitions, names and sources are those of `probes.leakage`.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...errors import InputError
from ...models.checks import check_documents, not_finite
from ...models.view import Attention, View
from ...results import statistics
from ...run.memory import Retry, block_numbers, share_of, shares, trim
from ...run.precision import precise
from ...run.progress import Progress, Tally
from ...run.store import Piece, Store
from ..attention import part_of
from .samples import Band, Course, Half, halves_of, lag_means_of, sampled

SHUFFLES = 100  # of query labels
ROUNDING = 1e-9  # nat^2: a variance of log-weights below it is rounding, of which nothing is a share

Named: TypeAlias = dict[str, tuple[Float[Tensor, "resample head"], ...]]  # the entries of each variable


def resampling(
    prompts: int, count: int, seed: int, documents: Sequence[str] | None = None
) -> Int[Tensor, "resample prompt"]:
    """`statistics.resampling` within each half."""
    for name, value in {"bootstrap": count, "seed": seed}.items():
        if not isinstance(value, int) or value < 0:
            raise InputError(f"{name}={value} cannot be used; give a whole number, 0 or more")
    check_documents(documents, prompts)
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
    """Every block under each resampling of the prompts, [resample, entry, layer, head, band].

    By the names of `leakage`'s variables; and "shuffled", [total and share, shuffle, layer, head, band]. Every process
    runs all prompts through the blocks and splits a share of these.
    """
    report, longest = Tally(progress, model.spec.blocks), max(last + 1 - first for first, last in bands)
    # Heads that are taken together, so that the quantities of prompts stay below a block's numbers where one head's do.
    of_head = len(tokens) * longest * (len(OF_LAGS) * len(lags) + len(OF_QUERIES))
    heads = max(1, block_numbers(model.device) // of_head)
    back, counted = torch.tensor(lags, device=model.device), drawn.to(precise(model.device))
    retry = Retry(
        f"a block's attention on {len(tokens)} prompts of {tokens.shape[1]} positions of '{model.identity.name}'"
    )
    ahead, course = iter(range(model.spec.blocks)), list[Course]()

    def apart(halves: Sequence[Attention]) -> list[dict[str, Tensor]]:
        """Of these heads, or of some after the other where memory has run out and no edit takes all."""
        few = [slice(None)] if halves[0].reweigh else shares(halves[0].query.shape[1])
        return [split([part_of(half, heads=some) for half in halves], bands, back, counted) for some in few]

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
        found = [part for halves in course[0].attention(layer, heads) for part in retry(partial(apart, halves))]
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
    halves: Sequence[Attention], bands: Sequence[Band], lags: Int[Tensor, " lag"], drawn: Int[Tensor, "resample prompt"]
) -> dict[str, Float[Tensor, "_ _ head band"]]:
    """All variables of some heads, from their attention on the prompts of either half, under each resampling of these.

    All of them come back from the attention's device at once.
    """
    numbers = share_of(block_numbers(halves[0].query.device))
    means, found, shuffled = [lag_means_of(half, numbers) for half in halves], list[Named](), list[Tensor]()
    weights = _weights(drawn.to(means[0]))
    for band in bands:
        of_halves = [sampled(half, mean, band, lags, numbers) for half, mean in zip(halves, means, strict=True)]
        quantities = _Drawn(of_halves, weights)
        found.append(_forms(quantities))
        shuffled.append(_shuffled(quantities))
    of_bands = [torch.stack([x for values in of_band.values() for x in values], 1) for of_band in found]
    parts = torch.stack(of_bands, -1).cpu().split([len(values) for values in found[0].values()], 1)
    return {**dict(zip(found[0], parts, strict=True)), "shuffled": torch.stack(shuffled, -1).cpu()}


# What is averaged over prompts: of every lag and query, and of every query.
OF_LAGS = ("logits", "toeplitz")
OF_QUERIES = ("normalizer", "with_sink", "with_constant", "of_mask")


def _quantities(half: Half) -> Float[Tensor, "prompt head row query"]:
    """Rows: `OF_LAGS`, each for all lags, and `OF_QUERIES`."""
    of_queries = (half.normalizer, half.moved_sink, half.moved_constant, half.moved_mask)
    return torch.cat([half.logits, half.logits + half.shift, *(x[:, :, None] for x in of_queries)], 2)


def _weights(counts: Float[Tensor, "resample prompt"]) -> Float[Tensor, "half resample own"]:
    """What every prompt counts in the mean of its half; of halves of an odd number the smaller one ends with a zero."""
    of_halves = [counts[:, own] / counts[:, own].sum(1, keepdim=True) for own in halves_of(counts.shape[1])]
    return pad_sequence([weights.T for weights in of_halves], batch_first=True).mT.contiguous()


class _Drawn:
    """A band's quantities under many resamplings of the prompts at once, and covariances of their means.

    `C(E x, E y) = sum_nm w_n w'_m <x_n, y_m>`: products of prompts are taken once, and every resample is a quadratic form in
    its weights. Halves of an odd number of prompts differ by one: the smaller has a row and weights of zeros.
    """

    def __init__(self, halves: Sequence[Half], weights: Float[Tensor, "half resample prompt"]) -> None:
        self._values = pad_sequence([_quantities(half) for half in halves], batch_first=True)
        # [half, prompt, head, quantity, query]
        self._weights = weights
        # Numbers of the quantities, or shuffles, that are taken together: they are copied some four times on the way.
        self.at_once = share_of(block_numbers(weights.device)) // 8
        self._lags = halves[0].shift.shape[1]

    def __getitem__(self, name: str) -> Float[Tensor, "half prompt head lag query"]:
        """One of `OF_LAGS`, or of `OF_QUERIES` with one lag for all."""
        if name in OF_LAGS:
            start = OF_LAGS.index(name) * self._lags
            return self._values[..., start : start + self._lags, :]
        at = len(OF_LAGS) * self._lags + OF_QUERIES.index(name)
        return self._values[..., at : at + 1, :]

    def means(self, x: Tensor) -> Float[Tensor, "half head lag query"]:
        """Over the prompts as they are."""
        return torch.einsum("hn,hnabc->habc", self._weights[:, 0], x)

    def covariances(
        self, of: Sequence[Tensor], with_: Sequence[Tensor] | None = None
    ) -> list[Float[Tensor, "resample head"]]:
        """Each with itself or its partner: between the halves, mean of both orders, over the band's queries; mean over lags.

        Those that go together, as many as are few numbers, have one shape.
        """
        found, heads = list[Tensor](), of[0].shape[2]
        size = max(1, self.at_once // max(of[0][0].numel(), heads * of[0].shape[1] ** 2))
        for some in (slice(n, n + size) for n in range(0, len(of), size)):
            x = _beside(of[some])
            if with_ is None:
                both = _form(x[0], x[1], self._weights)
            else:
                y = _beside(with_[some])
                both = (_form(x[0], y[1], self._weights) + _form(x[1], y[0], self._weights.flip(0))) / 2
            found += both.split(heads, 1)
        return found

    def shares(self, x: Tensor) -> Float[Tensor, "resample head"]:
        """What the variance of x's means over prompts is of its variance over queries and prompts; mean over lags."""
        (explained,) = self.covariances([x.flatten(2, 3)[:, :, :, None]])
        whole = self.spread(x)
        return (explained.unflatten(1, whole.shape[1:]) / whole).mean(-1)

    def spread(self, x: Tensor) -> Float[Tensor, "resample head lag"]:
        """Variance over queries and the prompts of both halves, `ROUNDING` at least.

        The square of the mean is the product of the halves' means, or few prompts would make it too large.
        """
        near_0 = x - x.mean((0, 1, 4), keepdim=True)
        parts = (y.mean(-1) for y in (near_0, near_0.square()))
        means, squares = (torch.einsum("hbn,hnal->hbal", self._weights, y) for y in parts)
        return (squares.mean(0) - means.prod(0)).clamp_min(ROUNDING)

    def variance(self, x: Tensor) -> Float[Tensor, "resample head"]:
        """Of the mean of both halves, its sampling noise included."""
        both, weights = x.flatten(0, 1), torch.cat(list(self._weights), 1) / 2
        return _form(both, both, torch.stack([weights, weights]))


def _beside(quantities: Sequence[Tensor]) -> Float[Tensor, "half prompt head lag query"]:
    """Several as if they were of more heads."""
    return quantities[0] if len(quantities) == 1 else torch.cat(list(quantities), 2)


def _form(x: Tensor, y: Tensor, weights: Float[Tensor, "side resample prompt"]) -> Float[Tensor, "resample head"]:
    """Covariance over queries of the means of x and y [prompt, head, lag, query], mean over lags."""
    x, y = (v - v.mean(-1, keepdim=True) for v in (x, y))
    lags = max(x.shape[2], y.shape[2])
    x, y = (v.expand(-1, -1, lags, -1).transpose(0, 1).flatten(2) for v in (x, y))  # [head, prompt, lag * query]
    products = x @ y.transpose(-1, -2) / x.shape[-1]
    return ((weights[0] @ products) * weights[1]).sum(-1).T


def _shuffled(drawn: _Drawn) -> Float[Tensor, "what shuffle head"]:
    """Total and share with the queries of one half under each other's labels: what no dependence gives."""
    log_weights = drawn["logits"] - drawn["normalizer"]
    one, other = (x - x.mean(-1, keepdim=True) for x in drawn.means(log_weights))
    orders = _orders(one.shape[-1], one.device).split(max(1, drawn.at_once // one.numel()))
    moved = (other[..., some].movedim(2, 0).contiguous() for some in orders)  # [shuffle, head, lag, query]
    by_lag = torch.cat([(one * there).mean(-1) for there in moved])
    return torch.stack([by_lag.mean(-1), (by_lag / drawn.spread(log_weights)[0]).mean(-1)])


@lru_cache(maxsize=16)  # as many bands; they are the same in every block
def _orders(queries: int, device: torch.device) -> Int[Tensor, "shuffle query"]:
    """Other orders of a band's queries."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(queries, generator=generator) for _ in range(SHUFFLES)]).to(device)


def _forms(drawn: _Drawn) -> Named:
    """Every variable of one band."""
    s, toeplitz, z, with_sink, with_constant, m = (
        drawn[name] for name in ("logits", "toeplitz", "normalizer", "with_sink", "with_constant", "of_mask")
    )
    stream, constant = s - z + with_constant, with_constant - m  # l = stream - m - constant
    total, logits, of_stream, neither = drawn.covariances([s - z, s, stream, toeplitz])
    keys, denominator, sink, of_constant = drawn.covariances([m, z - m, with_sink - m, constant])
    (keys_constant,) = drawn.covariances([m], [constant])
    keys_stream, constant_stream = (-x for x in drawn.covariances([stream, stream], [m, constant]))
    of_keys = (keys, keys_constant, keys_stream)
    of_sink, of_rest = (keys_constant, of_constant, constant_stream), (keys_stream, constant_stream, of_stream)
    return {
        "log_form": (total, logits, keys, denominator, total - logits - keys - denominator),
        "parties": (*of_keys, *of_sink, *of_rest),
        "position_share": (drawn.shares(s - z),),
        "log_source": (sum_of(of_keys), sum_of(of_sink + of_rest)),
        "log_stream": (of_constant + of_stream + 2 * constant_stream,),
        "steady_stream": (of_stream,),
        "log_noise": (drawn.variance(s - z) - total,),
        "log_sink": (sink,),
        "log_neither": (neither,),  # the mask's mean, made constant over the band, is no part of a covariance
    }


def sum_of(entries: Sequence[Tensor]) -> Tensor:
    """Of several entries."""
    return torch.stack(list(entries)).sum(0)
