"""Attention sinks, and the heads that read position 0.

Sources: [Gu], arXiv 2410.10781 (alpha, sink rate); [Wu], arXiv 2502.01951 (the indicator with tau). "Sink-reading" and what
it is made of are ours. `A_ij` is the weight of query i on key j <= i, T the prompt's length; [Gu] counts queries from 1.

Sinks, for any keys k, not only 0:

- [Gu] `alpha_k = sum_{i >= k} A_ik / (T - k)` per prompt, block and head. It is the mean weight over all queries that the
  mask lets see k; behind a sliding window those that have left k behind count with weight 0. The sink rate is the share of
  (prompt, head) with `alpha_k > threshold` (eps; strict; 0.3), decided per prompt and averaged afterwards.
- Uniform attention alone gives alpha_0 = H_T / T: 0.074 at T = 64 (the length of the published tables), 0.024 at 256, 0.0022
  at 4,096. `uniform` is that number for the same T and each block's own window, to be read beside alpha.
- [Wu] `over_tau`: the fraction of the queries that see k (mask and window) with `A_ik > tau` (0.2), mean over prompts.
- Under a prefix that every query sees, or a full mask, queries before k may see it, too. [Gu]'s sum stays as it stands, over
  the queries i >= k, so that alpha of one key means the same under every mask; `over_tau` counts all that see k.

Heads, for position 0, over the queries i >= 1 that see it (query 0, under a causal mask, sees nothing else). With
o_i = sum_j A_ij v_j, and W_O the head's rows of the output projection, before any norm on the branch:

- `attends`: the mean of `A_i0`. A sink in the sense of the weights.
- `reads`: `sqrt(sum |A_i0 v_0 W_O|^2 / sum |o_i W_O|^2)`, sums over prompts and queries: how large what the head takes from
  position 0 is against all that it writes. A no-op sink (tiny v_0) attends without reading. It can exceed 1, where the rest
  cancels what came from position 0; `reads_along` = `sum <A_i0 v_0 W_O, o_i W_O> / sum |o_i W_O|^2` is signed, and
  such shares of all positions add up to 1. Early queries see few keys and count most: uniform attention over orthogonal
  values of one size reads sqrt(sum (i+1)^-2 / sum (i+1)^-1) = 0.35 at T = 256 while it attends 0.02, so that reading
  says something about a sink only together with attending.
- `reacts`, on request: another embedding is put at position 0 (`probes.bos.swapped`), and the pattern becomes A'. The mean
  over prompts and the queries i >= 2 that see position 0 of `1/2 sum_{j >= 1} |A_ij - A'_ij|` says how much attention to
  the *other* keys has changed: by going to and from position 0, or among them. `reacts_among_others` is the same with
  both rows renormalized over keys >= 1, and keeps the second alone. (Under a causal mask query 1 has a single other key.)
- Norms at position 0 and at the rest of `|v_j|`, `|k_j|` (rotated; repeated for the heads that share it) and `|v_j W_O|`.

Rules (`selected`): each of the three by its threshold, and "sink-reading", which is attends and reads both: a head that
looks at position 0 and uses what is there. Their numbers are reported beside each other, since none of them implies another.

Costs. One prompt at a time, and no pattern is held. Chosen keys are columns made from the kernel's log-sum-exp; sizes of
writing are quadratic forms with each head's Gram matrix `W_O W_O^T` [c, c], made once for all prompts: a few hundredths of
a plain forward pass together. `keys="all"` makes every pattern once more, block of queries by block. `reacts` runs every
prompt twice, and makes both patterns of the queries that see position 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from .attention import column_statistics, columns, outputs, pattern_blocks, run_watched
from .errors import InputError
from .memory import Room
from .models.fused import query_blocks, shares
from .models.given import takes_model
from .models.view import Attention, View
from .pieces import Piece, Pieces, each, groups
from .positions import read_ranges
from .prompts import check_tokens
from .results import dataset, provenance

Keys: TypeAlias = tuple[int, ...] | Literal["all"]
Progress = Callable[[float, float], None]  # (prompts done, prompts in all)

FIRST_KEYS = tuple(range(8))  # the keys unless told; of a shorter prompt, those that exist
THRESHOLD = 0.3  # [Gu]'s eps
TAU = 0.2  # [Wu]'s
ATTENDS = 0.3  # [Gu]'s eps again, on the mean over prompts; eight times uniform attention at 128 positions
READS = 0.3  # of the output's size; where the parts are orthogonal, 0.3^2 = 9 % of its energy
REACTS = 0.1  # a tenth of a query's attention moves, while nothing but position 0 was changed from outside
NORMS = ("value_norm", "key_norm", "written_norm")
RULES = ("attends", "reads", "reacts", "sink-reading")
PLACES = ("sink", "rest")  # position 0; the mean over all others
PICTURE_LENGTH = 128  # queries and keys of a pattern's picture: more cannot be seen on a page

COLUMNS = (
    "block",
    "head",
    "attends",
    "reads",
    "reacts",
    "value 0/rest",
    "written 0/rest",
    "key 0/rest",
    "sink-reading",
)


class HeadRow(NamedTuple):
    """One head in numbers; ratios are position 0 against the mean of the rest. `reacts` is NaN where not measured."""

    layer: int
    head: int
    attends: float
    reads: float
    reacts: float
    value_ratio: float
    written_ratio: float
    key_ratio: float
    sink_reading: bool

    @property
    def score(self) -> float:
        """attends * reads; 0 where a head has neither."""
        return _score(self.attends, self.reads)


@takes_model
def sinks(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    keys: Any = FIRST_KEYS,
    threshold: Any = THRESHOLD,
    tau: Any = TAU,
    per_prompt: bool | None = None,
    reacts: Any = None,
    pictures: Any = 0,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Sink metrics of chosen keys, and which heads attend to, read and react to position 0.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], position 0 included.
        keys: positions, or "all"; the first 8 unless told, or as many of them as there are.
        threshold: [Gu]'s eps for alpha.
        tau: [Wu]'s, for single weights.
        per_prompt: keep alpha of every prompt instead of the mean; unless told, for chosen keys only.
        reacts: what to put at position 0 in order to measure `reacts`, as in `probes.bos.swapped`: "mean", "zero", "random"
            or a token id. None: not measured.
        pictures: patterns to keep of the heads with the highest attends * reads: of the first prompt, at most
            128 positions; as many as there are heads, if fewer.
        progress: called with (prompts done, prompts in all), fractions included.

    Returns:
        Dataset with `alpha` [prompt, layer, head, key] or [layer, head, key]; `sink_rate` [layer, key] and
        `sink_rate_of_model` [key]; `over_tau` [layer, head, key] and `over_tau_of_model` [key]; `uniform` [layer, key];
        `attends`, `reads`, `reads_along`, with a replacement `reacts` and `reacts_among_others`, all [layer, head];
        `value_norm`, `key_norm`, `written_norm` [layer, head, place]; `selected` [rule, layer, head], 1 or 0; with
        pictures `pattern` [picture, picture_query, picture_key], whose coordinates `picture_layer` and `picture_head` say
        whose they are; `tokens`; attributes with the rules' thresholds and what made it. NaN: no query sees position 0
        (a window of 1), or the head writes nothing.

    Raises:
        InputError: tokens, a key, a number or a replacement that cannot be used; values that are not finite.

    Source: [Gu], arXiv 2410.10781; [Wu], arXiv 2502.01951; reading is ours, see the module's text.
    """
    check_tokens(model, tokens)
    chosen = _check_keys(keys, tokens.shape[1])
    _check_share("threshold", threshold)
    _check_share("tau", tau)
    if isinstance(pictures, bool) or not isinstance(pictures, Integral) or int(pictures) < 0:
        raise InputError(f"pictures={pictures} cannot be drawn; give 0 or more")
    every = isinstance(keys, str)
    separate = not every if per_prompt is None else per_prompt
    other = None
    if reacts is not None:
        from .bos import swapped  # not above: it measures sinks itself

        other = swapped(model, reacts)

    sums = _Sums(model, tokens, None if every else chosen, float(threshold), float(tau), separate, other is not None)
    report = _Reporter(progress, len(tokens), model.spec.blocks)
    together = groups(len(tokens))

    room = Room(model, tokens.shape[1], report)

    def summed(group: int) -> Piece:
        return room(lambda: sum_of(together[group]))

    def sum_of(some: range) -> Piece:
        sums.begin(len(some))
        for at, n in enumerate(some):
            ids = tokens[n : n + 1]
            with torch.no_grad():
                embeddings = model.embed(ids)
                if other is not None:  # side by side, so that both patterns of a block exist together
                    embeddings = torch.cat([embeddings, other.embed(ids)])

            def watch(layer: int, attention: Attention, at: int = at) -> None:
                sums.add(at, layer, attention)
                report()

            run_watched(model, embeddings, watch)
        return sums.piece()

    def expect(numbers: Iterable[int]) -> None:
        report.total = float(sum(len(together[n]) for n in numbers)) or 1.0

    found = sums.results(each("sinks", len(together), summed, before=expect))
    report.finish()
    if not all(np.isfinite(found[name]).all() for name in ("alpha", "value_norm", "key_norm", "written_norm")):
        raise InputError(
            f"model '{model.identity.name}' gives attention that is not finite; "
            "check its weights, or use dtype float32 or float64"
        )

    by_prompt = ("prompt",) if separate else ()
    heads, places = ("layer", "head"), ("layer", "head", "place")
    described: dict[str, tuple[tuple[str, ...], str]] = {
        "alpha": ((*by_prompt, *heads, "key"), "mean weight on the key, over the queries from it on [Gu]"),
        "sink_rate": (("layer", "key"), f"share of (prompt, head) with alpha > {threshold:g}"),
        "sink_rate_of_model": (("key",), f"share of (prompt, layer, head) with alpha > {threshold:g}"),
        "over_tau": ((*heads, "key"), f"fraction of the queries that see the key with a weight > {tau:g} [Wu]"),
        "over_tau_of_model": (("key",), f"mean over layers and heads of the fraction with a weight > {tau:g}"),
        "uniform": (("layer", "key"), "alpha of uniform attention under the block's mask"),
        "attends": (heads, "mean weight on position 0"),
        "reads": (heads, "size of what comes from position 0 against the head's output"),
        "reads_along": (heads, "part of the head's output along what comes from position 0, signed"),
        "reacts": (heads, "attention to keys >= 1 changed by another embedding at position 0, total variation"),
        "reacts_among_others": (heads, "the same, rows renormalized over keys >= 1"),
        "value_norm": (places, "|v_j|"),
        "key_norm": (places, "|k_j|"),
        "written_norm": (places, "|v_j W_O|"),
        "selected": (("rule", *heads), "whether the rule selects the head"),
    }
    found["selected"] = _selected(found)
    variables: dict[str, tuple[Any, ...]] = {
        name: (dims, found[name], {"long_name": said, "units": "activation" if name.endswith("norm") else "1"})
        for name, (dims, said) in described.items()
        if name in found
    }
    coords: dict[str, Any] = {
        "layer": list(range(model.spec.blocks)),
        "head": list(range(model.spec.heads)),
        "key": list(chosen),
        "place": list(PLACES),
        "rule": list(RULES),
    }
    if pictures:
        best = _best(found, int(pictures))
        said = {"long_name": "attention pattern of the first prompt", "units": "1"}
        drawn = _pictures(model, tokens[:1], best)
        variables["pattern"] = (("picture", "picture_query", "picture_key"), drawn, said)
        coords |= {"picture": list(range(len(best)))}
        coords |= {f"picture_{name}": (("picture",), [b[n] for b in best]) for n, name in enumerate(heads)}
    return dataset(
        variables,
        tokens=tokens,
        coords=coords,
        attrs=provenance(
            model,
            tokens,
            measurement="sinks",
            keys="all" if every else list(chosen),
            threshold=float(threshold),
            tau=float(tau),
            per_prompt=separate,
            reacts=None if other is None else other.replacement,
            pictures=int(pictures),
        )
        | {"attends_threshold": ATTENDS, "reads_threshold": READS, "reacts_threshold": REACTS},
    )


def parse_keys(value: str) -> Keys:
    """Read keys from the command line: "all", or positions and ranges of them, ends included: "0-7", "0,5", "0-3,8".

    Raises:
        InputError: it is none of these, or names a position twice.
    """
    if value == "all":
        return "all"
    ranges = read_ranges(value, "keys", "all, 0-7 or 0,5")
    found = [key for first, last in ranges for key in range(first, last + 1)]
    _check_distinct(found)
    return tuple(found)


def ranked(ds: xr.Dataset, n: int | None = None) -> list[HeadRow]:
    """The heads of a result of `sinks`, the highest attends * reads first; the first `n` of them if given.

    Raises:
        InputError: the result is another measurement's, or `n` is negative.
    """
    needed = ("attends", "reads", "value_norm", "key_norm", "written_norm", "selected")
    missing = [name for name in needed if name not in ds]
    if missing or ds["attends"].ndim != 2:
        raise InputError(f"the result has no {missing[0] if missing else 'single run'}; give one of sinks")
    if n is not None and n < 0:
        raise InputError(f"n={n} heads cannot be listed; give 0 or more")
    ratios = {name: _ratio(ds[f"{name}_norm"]) for name in ("value", "written", "key")}
    attends, reads = ds["attends"].values, ds["reads"].values
    reacts = ds["reacts"].values if "reacts" in ds else np.full_like(attends, np.nan)
    reading = ds["selected"].sel(rule="sink-reading").values
    rows = [
        HeadRow(
            layer,
            head,
            attends=float(attends[layer, head]),
            reads=float(reads[layer, head]),
            reacts=float(reacts[layer, head]),
            value_ratio=float(ratios["value"][layer, head]),
            written_ratio=float(ratios["written"][layer, head]),
            key_ratio=float(ratios["key"][layer, head]),
            sink_reading=bool(reading[layer, head]),
        )
        for layer in range(attends.shape[0])
        for head in range(attends.shape[1])
    ]
    return sorted(rows, key=lambda row: -row.score)[:n]


def cells(row: HeadRow) -> Iterator[str]:
    """A head as text, in the order of `COLUMNS`."""
    yield from (str(row.layer), str(row.head))
    for value in (row.attends, row.reads, row.reacts):
        yield "-" if math.isnan(value) else f"{value:.3f}"
    for value in (row.value_ratio, row.written_ratio, row.key_ratio):
        yield "-" if math.isnan(value) else f"{value:.3g}"
    yield "yes" if row.sink_reading else "-"


def uniform_alpha(
    length: int, keys: Sequence[int], window: int | None, prefix: int | None = None
) -> Float[np.ndarray, " key"]:
    """alpha of uniform attention, where every query spreads evenly over the keys that it sees."""
    reach = length if window is None else min(window, length)
    everyone = 0 if prefix is None else min(prefix, length)  # keys that all queries see
    after = np.arange(length) + 1
    # Keys up to the query, or to the prefix's end, less those between that end and the window's first.
    shares = 1 / (np.maximum(after, everyone) - np.maximum(after - reach - everyone, 0))
    total = np.concatenate([[0.0], np.cumsum(shares)])  # total[i]: of the queries before i
    k = np.asarray(keys, dtype=np.int64)
    end = np.where(k < everyone, length, np.minimum(k + reach, length))
    return (total[end] - total[k]) / (length - k)


# ------------------------------------------------------------------------------------------------------- sums


class _Sums:
    """What is summed over some prompts, in float64, as each block attends. Numbers are [layer, head] unless said otherwise.

    `begin` starts a sum anew, `piece` is what it has come to, `results` puts all pieces together.
    """

    SUMMED = ("sinks", "over", "weight", "own", "along", "whole", "moved", "among")

    def __init__(
        self,
        model: View,
        tokens: Tensor,
        chosen: tuple[int, ...] | None,  # None: all
        threshold: float,
        tau: float,
        separate: bool,
        reacting: bool,
    ) -> None:
        self.spec, self.prompts, self.length = model.spec, tokens.shape[0], tokens.shape[1]
        self.chosen, self.threshold, self.tau = chosen, threshold, tau
        self.separate, self.reacting = separate, reacting
        self.device = device = model.device
        self.grams = [_gram(model.output_weights(layer)) for layer in range(model.spec.blocks)]
        k = torch.arange(self.length, device=device) if chosen is None else torch.tensor(chosen, device=device)
        self.until_end = (self.length - k).double()  # queries from the key on
        # The queries that see position 0 are those before `reaches`; those that see each key number `seeing` [K].
        reaches = [self.length if w is None else min(w, self.length) for w in model.spec.windows]
        self.seeing = [self.until_end.clamp_max(reach) for reach in reaches]
        self.reaches = reaches
        prefix, self.ahead = model.spec.prefix, None
        if prefix is not None:
            self.seeing = [torch.where(k < prefix, self.length, queries) for queries in self.seeing]
            self.reaches = [self.length for _ in reaches]
            # [query, key]: queries before a key, which count in `over` alone.
            self.ahead = torch.arange(self.length, device=device)[:, None] < k

    def begin(self, prompts: int) -> None:
        """Nothing is summed yet, of so many prompts."""
        heads = (self.spec.blocks, self.spec.heads)
        keys = self.length if self.chosen is None else len(self.chosen)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self.device)

        self.alpha = zeros(*[prompts] * self.separate, *heads, keys)
        self.sinks, self.over = zeros(self.spec.blocks, keys), zeros(*heads, keys)
        # Of position 0: its weights, their squares times |v_0 W_O|^2, its share along the output, the output.
        self.weight, self.own, self.along, self.whole = (zeros(*heads) for _ in range(4))
        self.moved, self.among = zeros(*heads), zeros(*heads)
        self.norms = {name: zeros(*heads, 2) for name in NORMS}

    def piece(self) -> Piece:
        """The sums since `begin`."""
        found = {name: getattr(self, name) for name in ("alpha", *self.SUMMED)} | self.norms
        return {name: x.cpu().numpy() for name, x in found.items()}

    def add(self, prompt: int, layer: int, attention: Attention) -> None:
        """One block of one prompt; where reactions are measured, of the prompt and its twin."""
        for heads in shares(self.spec.heads):
            self._add_heads(prompt, (layer, heads), _of_heads(attention, heads))

    def _add_heads(self, prompt: int, at: tuple[int, slice], attention: Attention) -> None:
        """Some heads of a block, which `at` says."""
        layer = at[0]
        if self.reacting:
            moved, among = _reactions(_cut(attention, self.reaches[layer]))
            self.moved[at] += moved
            self.among[at] += among
            attention = _first(attention)
        if self.chosen is None:
            of_0 = columns(attention, (0,))[0, ..., 0]
            total, over = (x[0] for x in column_statistics(attention, self.tau))
        else:
            total, over, of_0 = self._of_chosen(self.chosen, attention)
        alpha = total / self.until_end
        self.sinks[layer] += (alpha > self.threshold).sum(0)
        self.over[at] += over / self.seeing[layer]
        if self.separate:
            self.alpha[prompt, *at] = alpha
        else:
            self.alpha[at] += alpha / self.prompts
        self._add_writing(at, attention, of_0)

    def _of_chosen(self, chosen: tuple[int, ...], attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """Of every chosen key the sum of the weights on it and the number above tau, [H, K]; weights on position 0."""
        total, over, of_0 = [], [], None
        for some in shares(len(chosen)):
            keys = chosen[some]
            picked = keys if of_0 is not None or 0 in keys else (*keys, 0)
            weights = columns(attention, picked)[0]  # [H, T, K]
            if of_0 is None:
                of_0 = weights[..., picked.index(0)]
            weights = weights[..., : len(keys)]
            over.append((weights > self.tau).sum(-2))
            counted = weights if self.ahead is None else weights.masked_fill(self.ahead[:, some], 0)
            total.append(counted.sum(-2, dtype=torch.float64))
        assert of_0 is not None
        return torch.cat(total, -1), torch.cat(over, -1), of_0

    def _add_writing(self, at: tuple[int, slice], attention: Attention, weights: Float[Tensor, "head query"]) -> None:
        """What is written, by `|x W_O|^2 = x G x` with G = W_O W_O^T; `weights` are those on position 0."""
        layer, heads = at
        gram, value, output = self.grams[layer][heads], attention.value[0], outputs(attention)[0]
        value = value.to(gram.dtype)
        imaged = value @ gram  # [H, T, c]
        from_0 = imaged[:, 0, :].clone()  # <v_0 W_O, x W_O> = <from_0, x>
        written = imaged.mul_(value).sum(-1).clamp_min_(0)  # rounding may leave a tiny negative number
        for name, sizes in (
            ("value_norm", torch.linalg.vector_norm(value, dim=-1)),
            ("key_norm", torch.linalg.vector_norm(attention.key[0], dim=-1, dtype=gram.dtype)),
            ("written_norm", written.sqrt()),
        ):
            self.norms[name][*at, 0] += sizes[:, 0]
            self.norms[name][*at, 1] += sizes[:, 1:].mean(-1, dtype=torch.float64)
        reading = slice(1, self.reaches[layer])
        weights, output = weights[:, reading], output[:, reading].to(gram.dtype)
        self.weight[at] += weights.sum(-1, dtype=torch.float64)
        self.own[at] += weights.square().sum(-1, dtype=torch.float64) * written[:, 0]
        taken = (weights[:, None, :] @ output)[:, 0]  # sum_i A_i0 o_i
        self.along[at] += (taken * from_0).sum(-1)
        # sum_i o_i G o_i = <G, sum_i o_i^T o_i>
        self.whole[at] += ((output.mT @ output) * gram).sum((-2, -1), dtype=torch.float64).clamp_min(0)

    def results(self, pieces: Pieces) -> dict[str, np.ndarray]:
        """What is reported, of all pieces in their order."""
        self.begin(0)
        alpha = []
        for piece in pieces:
            for name in self.SUMMED:
                getattr(self, name).add_(torch.from_numpy(piece[name]).to(self.device))
            for name, sums in self.norms.items():
                sums.add_(torch.from_numpy(piece[name]).to(self.device))
            if self.separate:
                alpha.append(torch.from_numpy(piece["alpha"]))
            else:
                self.alpha.add_(torch.from_numpy(piece["alpha"]).to(self.device))
        if self.separate:
            self.alpha = torch.cat(alpha)
        prompts, heads = self.prompts, self.spec.heads
        reading, reacting = (
            torch.tensor([max(0, reach - start) for reach in self.reaches], device=self.weight.device)[:, None]
            * prompts
            for start in (1, 2)
        )
        rate, over = self.sinks / (prompts * heads), self.over / prompts
        found = {
            "alpha": self.alpha,
            "sink_rate": rate,
            "sink_rate_of_model": rate.mean(0),
            "over_tau": over,
            "over_tau_of_model": over.mean((0, 1)),
            "attends": self.weight / reading,
            "reads": (self.own / self.whole).sqrt(),
            "reads_along": self.along / self.whole,
        }
        if self.reacting:
            found |= {"reacts": self.moved / reacting, "reacts_among_others": self.among / reacting}
        found |= {name: norms / prompts for name, norms in self.norms.items()}
        keys = range(self.length) if self.chosen is None else self.chosen
        spec = self.spec
        uniform = np.stack([uniform_alpha(self.length, keys, window, spec.prefix) for window in spec.windows])
        return {name: x.cpu().numpy() for name, x in found.items()} | {"uniform": uniform}


def _gram(weights: Float[Tensor, "head c d"]) -> Float[Tensor, "head c c"]:
    exact = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return exact @ exact.mT


def _reactions(
    attention: Attention,
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Sums over queries i >= 2 of total variation over keys >= 1, between the two prompts: as is, and renormalized."""
    heads = attention.query.shape[1]
    moved, among = (
        torch.zeros(heads, dtype=torch.float64, device=attention.query.device) for _ in ("as is", "renormalized")
    )
    for start, stop in query_blocks(attention):
        start = max(start, 2)
        if start >= stop:
            continue
        logits = attention.logits(start, stop)  # [2, H, rows, keys]
        # The rest against position 0, without the 1 - A_i0 that cancels where the sink takes almost everything.
        rest = logits[..., 1:].logsumexp(-1, keepdim=True)
        shares = logits[..., 1:].sub_(rest).exp_()
        rest = (rest - logits[..., :1]).sigmoid_()
        among += (shares[0] - shares[1]).abs_().sum((-2, -1), dtype=torch.float64) / 2
        shares.mul_(rest)
        moved += (shares[0] - shares[1]).abs_().sum((-2, -1), dtype=torch.float64) / 2
    return moved, among


def _first(attention: Attention) -> Attention:
    """Of the first prompt alone."""
    return _each(attention, lambda x: x[:1])


def _of_heads(attention: Attention, heads: slice) -> Attention:
    """Of some heads alone."""
    slopes = None if attention.slopes is None else attention.slopes[heads]
    return replace(_each(attention, lambda x: x[:, heads]), slopes=slopes)


def _cut(attention: Attention, stop: int) -> Attention:
    """Of the positions before `stop` alone, which do not depend on what follows."""
    return attention if stop >= attention.query.shape[2] else _each(attention, lambda x: x[:, :, :stop])


def _each(attention: Attention, function: Callable[[Tensor], Tensor]) -> Attention:
    names = ("query", "key", "value", "output", "normalizer")
    found = {name: getattr(attention, name) for name in names}
    return replace(attention, **{name: None if x is None else function(x) for name, x in found.items()})


# ---------------------------------------------------------------------------------------------------- heads


def _score(attends: float, reads: float) -> float:
    score = attends * reads
    return 0.0 if math.isnan(score) else score


def _selected(found: dict[str, np.ndarray]) -> np.ndarray:
    """[rule, layer, head], 1 where selected; comparisons with NaN are false."""
    attends, reads = found["attends"] > ATTENDS, found["reads"] > READS
    reacts = found["reacts"] > REACTS if "reacts" in found else np.zeros_like(attends)
    return np.stack([attends, reads, reacts, attends & reads]).astype(np.int8)


def _best(found: dict[str, np.ndarray], n: int) -> list[tuple[int, int]]:
    """(layer, head) of the n highest scores."""
    score = np.nan_to_num(found["attends"] * found["reads"])
    order = np.argsort(-score, axis=None, kind="stable")[:n]
    return [(int(at // score.shape[1]), int(at % score.shape[1])) for at in order]


def _pictures(model: View, tokens: Tensor, best: list[tuple[int, int]]) -> np.ndarray:
    """Patterns of the chosen heads [picture, query, key], float32: their first `PICTURE_LENGTH` queries and keys."""
    length = min(PICTURE_LENGTH, tokens.shape[1])
    tokens = tokens[:, : max(length, model.spec.prefix or 0)]  # what follows is seen by none of these
    drawn = np.zeros((len(best), length, length), dtype=np.float32)

    def watch(layer: int, attention: Attention) -> None:
        wanted = [(n, head) for n, (at, head) in enumerate(best) if at == layer]
        for block in pattern_blocks(attention) if wanted else ():
            for n, head in wanted:
                picture = drawn[n, block.start : block.stop, block.first : block.last]
                weights = block.weights[0, head, : picture.shape[0], : picture.shape[1]]
                picture[...] = weights.float().cpu().numpy()

    with torch.no_grad():
        embeddings = model.embed(tokens)
    run_watched(model, embeddings, watch)
    return drawn


def _ratio(norms: xr.DataArray) -> np.ndarray:
    """Position 0 against the rest [layer, head]; NaN or infinite where the rest is nothing."""
    sink, rest = (norms.sel(place=place).values for place in PLACES)
    with np.errstate(divide="ignore", invalid="ignore"):
        return sink / rest


# --------------------------------------------------------------------------------------------------- options


class _Reporter:
    def __init__(self, progress: Progress | None, prompts: int, blocks: int) -> None:
        self.progress, self.total, self.blocks, self.done = progress, float(prompts), blocks, 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done / self.blocks, self.total)

    def finish(self) -> None:
        """All is there, be it from before."""
        if self.progress is not None and self.done == 0:
            self.progress(self.total, self.total)


def _check_keys(keys: Any, length: int) -> tuple[int, ...]:
    if keys is FIRST_KEYS:
        return FIRST_KEYS[:length]
    if isinstance(keys, str):
        if keys != "all":
            raise InputError(f"keys '{keys}' are no positions; give a tuple of integers, or 'all'")
        return tuple(range(length))
    try:
        found = tuple(keys)
    except TypeError:
        raise InputError(f"keys {keys} are no positions; give a tuple of integers, or 'all'") from None
    if not found:
        raise InputError("keys are empty; give at least one position, or 'all'")
    for key in found:
        if isinstance(key, bool) or not isinstance(key, Integral):
            raise InputError(f"key {key} is no position; give integers from 0 to {length - 1}, or 'all'")
        if not 0 <= int(key) < length:
            raise InputError(f"key {key} is outside the prompts; positions run from 0 to {length - 1}")
    _check_distinct(found)
    return tuple(int(key) for key in found)


def _check_distinct(keys: Sequence[int]) -> None:
    seen: set[int] = set()
    for key in keys:
        if key in seen:
            raise InputError(f"key {key} is given twice; give each once")
        seen.add(key)


def _check_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise InputError(f"{name}={value} is no share of attention; give a number from 0 to below 1")
