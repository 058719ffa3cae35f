"""Attention sinks, and the heads that read position 0.

Sources: [Gu], arXiv 2410.10781 (alpha, sink rate); [Wu], arXiv 2502.01951 (the indicator with tau). What heads do with
position 0, and the roles they get by it (`probes.measures.sinks.roles`), are ours. `A_ij` is the weight of query i on key j
<= i, T the prompt's length; [Gu] counts queries from 1.

Sinks, for any keys k, not only 0:

- [Gu] `alpha_k = sum_{i >= k} A_ik / (T - k)` per prompt, block and head. It is the mean weight over all queries that the
  mask lets see k; behind a sliding window those that have left k behind count with weight 0. The sink rate is the share of
  (prompt, head) with `alpha_k > threshold` (eps; strict; 0.3), decided per prompt and averaged afterwards.
- Uniform attention alone gives alpha_0 = H_T / T: 0.074 at T = 64 (the length of the published tables), 0.024 at 256, 0.0022
  at 4,096. `uniform` is that number for the same T and each block's own window, to be read beside alpha.
- [Wu] `over_tau`: the fraction of the queries that see k (mask and window) with `A_ik > tau` (0.2), mean over prompts.
- Where heads have learned sink logits s (gpt-oss), these stand in every denominator, `A_ij = exp(s_ij) / (exp(s) +
  sum_k exp(s_ik))`: rows sum to less than 1, and alpha, `reads` and all other numbers here are of such weights.
  `sink_logit_share` is the mean over the queries i >= 1 of what is missing, `exp(s) / (exp(s) + sum_k exp(s_ik))`. `uniform`
  is without it.
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
- `reacts`, on request: another embedding is put at position 0 (`probes.models.swap.swapped`), and the pattern becomes
  A'. The mean over prompts and the queries i >= 2 that see position 0 of `1/2 sum_{j >= 1} |A_ij - A'_ij|` says how
  much attention to the *other* keys has changed: by going to and from position 0, or among them. `reacts_among_others`
  is the same with both rows renormalized over keys >= 1, and keeps the second alone. (Under a causal mask query 1 has a
  single other key.)
- Norms at position 0 and at the rest of `|v_j|`, `|k_j|` (rotated; repeated for the heads that share it) and `|v_j W_O|`.

- Sizes beside the stream, and the head's role: `probes.measures.sinks.roles`. `reads` is a share of the head's own output,
  which tends to 1 wherever attention does, however little the head writes: it says nothing about use, the role does.

Rules (`selected`): each of attends, reads and reacts by its threshold, and "sink-reading", which is attends and reads both.

Costs. One prompt at a time, and no pattern is held. Chosen keys are columns made from the kernel's log-sum-exp; sizes of
writing are quadratic forms with each head's Gram matrix `W_O W_O^T` [c, c], made once for all prompts; attention is run
once more, with position 0 hidden: about a tenth of a plain forward pass together. `keys="all"` makes every pattern once
more, block of queries by block. `reacts` runs every prompt twice, and makes both patterns of the queries that see position
0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ...data.positions import read_ranges
from ...errors import InputError
from ...models.checks import check_logits, check_tokens, not_finite
from ...models.given import takes_model
from ...models.swap import swapped
from ...models.view import Attention, Edit, View
from ...results.dataset import by_block, dataset, provenance
from ...results.variables import Variable, labelled
from ...run.memory import Retry
from ...run.progress import Progress, Tally
from ...run.store import Piece, Store, groups
from ..attention import pattern_blocks, run_watched
from .collectors import TABLE, collectors, named
from .effect import PROMPTS as EFFECT_PROMPTS
from .effect import check_effect, effects, passes_in_all
from .evict import CACHES, DIMS, NUMBERINGS, check_evict, evict_passes, evictions
from .roles import BESIDE, LIMITS, PLACES, ROLES, RULES, WITHHELD, assigned, best, estimates, selected
from .sums import Sums

Keys: TypeAlias = tuple[int, ...] | Literal["all"]

FIRST_KEYS = tuple(range(8))  # the keys unless told; of a shorter prompt, those that exist
THRESHOLD = 0.3  # [Gu]'s eps
TAU = 0.2  # [Wu]'s
PICTURE_LENGTH = 128  # queries and keys of a pattern's picture: more cannot be seen on a page


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
    effect: Any = None,
    effect_prompts: Any = EFFECT_PROMPTS,
    evict: Any = None,
    keep: Any = None,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
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
        reacts: what to put at position 0 in order to measure `reacts`, as in `probes.swapped`: "mean", "zero", "random" or a
            token id. None: not measured.
        pictures: patterns to keep of the strongest sinks, the heads with the largest mean weight on position 0: of the first
            prompt, at most 128 positions; as many as there are heads, if fewer.
        effect: heads whose effect is measured (see `probes.measures.sinks.effect`): True or "all", or how many, those
            that rank first before. None: not measured. It takes about half a pass for each head and prompt.
        effect_prompts: how many prompts it is measured on, the first ones; all, if there are fewer.
        evict: numbers of first keys that a cache keeps, as (0, 1, 4): what the model does with such a cache instead of all
            keys (see `probes.measures.sinks.evict`). None: not measured. It takes more than a pass for each pair of numbers.
        keep: numbers of last keys that it keeps, the query's own among them; (64, 128, 256) unless told, as far as prompts
            are longer.
        documents: what each prompt is a window of; intervals are then over documents instead of prompts.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (prompts done, prompts in all), fractions included.

    Returns:
        Dataset with `alpha` [prompt, layer, head, key] or [layer, head, key]; `sink_rate` [layer, key] and
        `sink_rate_of_model` [key]; `over_tau` [layer, head, key] and `over_tau_of_model` [key]; `uniform` [layer, key];
        `reads`, `reads_along`, with a replacement `reacts_among_others`, all [layer, head]; `attends`, `written`,
        `output`, `output_own`, with a replacement `reacts` and `reacts_output`, with learned sink logits
        `sink_logit_share` [layer, head], each with `..._low`,
        `..._high` and `..._by_prompt` [prompt, layer, head]; on request `effect` and `loss_change` alike, NaN where not
        measured; with `evict` alike `evict_loss_before`, `evict_loss_change`, `evict_kl` [first_keys, last_keys, numbering,
        cache]; with all keys `strong_...` [layer, strong] and `token_...` [layer, collector], see
        `probes.measures.sinks.collectors`; `has_role` [role, layer, head], 1 or 0, one role for each head, and `role_sure`
        [layer, head], 1 or 0 (see `probes.measures.sinks.roles`; where a norm follows on the attention's output, neither
        these nor sizes beside the stream, and the attribute `roles_withheld` says why); `value_norm`, `key_norm`,
        `written_norm` [layer, head, place];
        `selected` [rule, layer, head], 1 or 0; with pictures `pattern` [picture, picture_query, picture_key], whose
        coordinates `picture_layer` and `picture_head` say whose they are; `tokens`; attributes with the rules' thresholds
        and what made it. NaN: no query sees position 0 (a window of 1), or the head writes nothing.

    Raises:
        InputError: tokens, a key, a number or a replacement that cannot be used; not one document for each prompt; values
            that are not finite.

    Source: [Gu], arXiv 2410.10781; [Wu], arXiv 2502.01951; roles are ours, see `probes.measures.sinks.roles`.
    """
    check_tokens(model, tokens)
    chosen = _check_keys(keys, tokens.shape[1])
    _check_share("threshold", threshold)
    _check_share("tau", tau)
    if isinstance(pictures, bool) or not isinstance(pictures, Integral) or int(pictures) < 0:
        raise InputError(f"pictures={pictures} cannot be drawn; give 0 or more")
    if documents is not None and len(documents) != len(tokens):
        raise InputError(f"{len(documents)} documents are named for {len(tokens)} prompts; name one for each")
    heads_asked = check_effect(effect, effect_prompts)
    first_keys, last_keys = check_evict(evict, keep, tokens.shape[1])
    if heads_asked != 0 or evict is not None:
        check_logits(model)
    every = isinstance(keys, str)
    separate = not every if per_prompt is None else per_prompt
    other = None if reacts is None else swapped(model, reacts)
    sums = Sums(model, tokens, None if every else chosen, float(threshold), float(tau), separate, other is not None)
    report = Tally(progress, len(tokens), per=model.spec.blocks)
    of_cache = evict_passes(model, len(tokens), tokens.shape[1], evict, keep)
    later = passes_in_all(model, len(tokens), effect, effect_prompts) + of_cache
    retry = Retry(f"a prompt of {tokens.shape[1]} positions of '{model.identity.name}'", report)
    pieces = pieces or Store()
    found = _summed(model, other, tokens, sums, retry, report, later, pieces)
    by_head = {name: found.pop(name) for name in BY_PROMPT if name in found}  # [prompt, layer, head]
    if model.spec.post_norm:
        by_head = {name: each for name, each in by_head.items() if name not in BESIDE}
    intervals = estimates(by_head, documents)
    if not model.spec.post_norm:
        has_role, sure = assigned(intervals)
        found |= {"has_role": has_role.astype(np.int8), "role_sure": sure.astype(np.int8)}

    def passed(count: float) -> None:
        report(count * model.spec.blocks)

    if heads_asked != 0:
        first = best(found | {name: one.value for name, one in intervals.items()}, heads_asked)
        some = tokens[: int(effect_prompts)]
        effects_found = effects(model, some, first, retry, passed, lambda more: report.expect(more + of_cache), pieces)
        intervals |= estimates(effects_found, None if documents is None else documents[: len(some)])
        unmeasured = np.full((len(tokens) - len(some), *found["reads"].shape), np.nan)
        by_head |= {name: np.concatenate([each, unmeasured]) for name, each in effects_found.items()}
    if first_keys:
        evicted = evictions(model, tokens, first_keys, last_keys, retry, passed, report.expect, pieces)
        intervals |= estimates(evicted, documents)
        by_head |= evicted
    report.finish()
    table = _variables(float(threshold), float(tau), separate)
    for name, interval in intervals.items():
        values: tuple[Any, ...] = (*interval[:3], by_head[name].astype(np.float32))
        for (end, said), value in zip(ENDS.items(), values, strict=True):
            own = BY_PROMPT[name]
            dims = ("prompt", *own.dims) if end == "_by_prompt" else own.dims
            table[name + end] = Variable(dims, own.long_name + said, own.units)
            found[name + end] = value
    found["selected"] = selected(found).astype(np.int8)
    coords: dict[str, Any] = {**by_block(model.spec), "head": range(model.spec.heads), "key": list(chosen)}
    coords |= {"place": list(PLACES), "rule": list(RULES)} | ({"role": list(ROLES)} if "has_role" in found else {})
    if pictures:
        first = best({"attends": found["attends"], "written": found["attends"]}, int(pictures))  # the strongest
        found["pattern"] = _pictures(model, tokens[:1], first)
        coords |= {"picture": list(range(len(first)))}
        coords |= {f"picture_{name}": (("picture",), [one[n] for one in first]) for n, name in enumerate(HEAD)}
    if every:
        found |= collectors(found.pop("by_key"), found["uniform"], tokens.cpu().numpy(), documents)
        coords |= named(found, model.tokenizer)
        table |= TABLE
    if first_keys:
        coords |= dict(zip(DIMS, (list(first_keys), list(last_keys), list(NUMBERINGS), list(CACHES)), strict=True))
    options = {
        "keys": "all" if every else list(chosen),
        "threshold": float(threshold),
        "tau": float(tau),
        "per_prompt": separate,
        "reacts": None if other is None else other.replacement,
        "pictures": int(pictures),
        "effect": "all" if heads_asked is None else heads_asked or None,
        "effect_prompts": min(int(effect_prompts), len(tokens)) if heads_asked != 0 else None,
        "evict": list(first_keys) or None,
        "keep": list(last_keys) or None,
    }
    return dataset(
        labelled(table, found),
        tokens=tokens,
        coords=coords,
        attrs=provenance(model, tokens, measurement="sinks", **options)
        | {f"{name}_threshold": limit for name, limit in LIMITS.items()}
        | ({"roles_withheld": WITHHELD} if model.spec.post_norm else {}),
    )


def _summed(
    model: View,
    other: View | None,
    tokens: Tensor,
    sums: Sums,
    retry: Retry,
    report: Tally,
    later: float,
    store: Store,
) -> dict[str, np.ndarray]:
    """What `sums` gives of all prompts; `other` is the view with another embedding at position 0, if there is one.

    Raises:
        InputError: values that are not finite.
    """
    together = groups(len(tokens))
    streams = [Edit("residual", layer, sums.watch_stream) for layer in range(model.spec.blocks)]

    def sum_of(some: range) -> Piece:
        sums.begin(len(some))
        for at, n in enumerate(some):
            with torch.no_grad():  # side by side, so that both patterns of a block exist together
                views = (model,) if other is None else (model, other)
                embeddings = torch.cat([view.embed(tokens[n : n + 1]) for view in views])

            def watch(layer: int, attention: Attention, at: int = at) -> None:
                sums.add(at, layer, attention)
                report()

            run_watched(model, embeddings, watch, streams)
        return sums.piece()

    def expect(numbers: Iterable[int]) -> None:
        report.total = (float(sum(len(together[n]) for n in numbers)) or 1.0) + later

    pieces = store.each("sinks", len(together), lambda group: retry(lambda: sum_of(together[group])), before=expect)
    found = sums.results(pieces)
    if not all(np.isfinite(found[name]).all() for name in ("alpha", "value_norm", "key_norm", "written_norm")):
        raise not_finite(model, "attention")
    return found


def parse_keys(value: str) -> Keys:
    """Read keys from the command line: "all", or positions and ranges of them, ends included: "0-7", "0,5", "0-3,8".

    Raises:
        InputError: it is none of these, or names a position twice.
    """
    if value == "all":
        return "all"
    ranges = read_ranges(value, "keys", "all, 0-7 or 0,5")
    found = tuple(key for first, last in ranges for key in range(first, last + 1))
    _check_distinct(found)
    return found


# ------------------------------------------------------------------------------------------------ what a result holds


HEAD = ("layer", "head")
# What follows the name of a number kept of every prompt, and its name in words.
ENDS = {
    "": "",
    "_low": ", low end of the 95 % interval",
    "_high": ", high end of the 95 % interval",
    "_by_prompt": ", by prompt",
}
_REMOVED = "when what the head takes from position 0 is removed"
_OWN = "size of the head's output beside its own with position 0 hidden, by weight on position 0"
_CHANGE = "size of the output's change by another embedding at position 0, beside the stream"
# Kept of every prompt.
BY_PROMPT = {
    "attends": Variable(HEAD, "mean weight on position 0"),
    "written": Variable(HEAD, "size of what comes from position 0 beside the stream that the block reads"),
    "output": Variable(HEAD, "size of the head's output beside the stream that the block reads"),
    "output_own": Variable(HEAD, _OWN),
    "reacts": Variable(HEAD, "attention to keys >= 1 changed by another embedding at position 0, total variation"),
    "effect": Variable(HEAD, f"KL of the next token {_REMOVED}", "nat"),
    "loss_change": Variable(HEAD, f"change of the next-token loss {_REMOVED}", "nat"),
    "reacts_output": Variable(HEAD, _CHANGE),
    "evict_loss_before": Variable(DIMS, "next-token loss with all keys", "nat"),
    "evict_loss_change": Variable(DIMS, "change of the next-token loss with the first and last keys alone", "nat"),
    "evict_kl": Variable(DIMS, "KL of the next token with the first and last keys alone", "nat"),
    "sink_logit_share": Variable(HEAD, "mean weight on the learned sink logit, which reads nothing"),
}


def _variables(threshold: float, tau: float, separate: bool) -> dict[str, Variable]:
    rate, by_key = f"with alpha > {threshold:g}", (*HEAD, "key")
    alpha = ("prompt", *by_key) if separate else by_key
    return BY_PROMPT | {
        "alpha": Variable(alpha, "mean weight on the key, over the queries from it on [Gu]"),
        "sink_rate": Variable(("layer", "key"), f"share of (prompt, head) {rate}"),
        "sink_rate_of_model": Variable(("key",), f"share of (prompt, layer, head) {rate}"),
        "over_tau": Variable(by_key, f"fraction of the queries that see the key with a weight > {tau:g} [Wu]"),
        "over_tau_of_model": Variable(("key",), f"mean over layers and heads of the fraction with a weight > {tau:g}"),
        "uniform": Variable(("layer", "key"), "alpha of uniform attention under the block's mask"),
        "reads": Variable(HEAD, "size of what comes from position 0 against the head's output"),
        "reads_along": Variable(HEAD, "part of the head's output along what comes from position 0, signed"),
        "reacts_among_others": Variable(HEAD, "as reacts, rows renormalized over keys >= 1"),
        "has_role": Variable(("role", *HEAD), "whether it is the head's role"),
        "role_sure": Variable(HEAD, "whether no interval that decided the role contains its threshold"),
        "value_norm": Variable((*HEAD, "place"), "|v_j|", "activation"),
        "key_norm": Variable((*HEAD, "place"), "|k_j|", "activation"),
        "written_norm": Variable((*HEAD, "place"), "|v_j W_O|", "activation"),
        "selected": Variable(("rule", *HEAD), "whether the rule selects the head"),
        "pattern": Variable(("picture", "picture_query", "picture_key"), "attention pattern of the first prompt"),
    }


def _pictures(model: View, tokens: Tensor, first: list[tuple[int, int]]) -> np.ndarray:
    """Patterns of the chosen heads [picture, query, key], float32: their first `PICTURE_LENGTH` queries and keys."""
    length = min(PICTURE_LENGTH, tokens.shape[1])
    tokens = tokens[:, : max(length, model.spec.prefix or 0)]  # what follows is seen by none of these
    drawn = np.zeros((len(first), length, length), dtype=np.float32)

    def watch(layer: int, attention: Attention) -> None:
        wanted = [(n, head) for n, (at, head) in enumerate(first) if at == layer]
        for block in pattern_blocks(attention) if wanted else ():
            for n, head in wanted:
                picture = drawn[n, block.start : block.stop, block.first : block.last]
                weights = block.weights[0, head, : picture.shape[0], : picture.shape[1]]
                picture[...] = weights.float().cpu().numpy()

    with torch.no_grad():
        run_watched(model, model.embed(tokens), watch)
    return drawn


# --------------------------------------------------------------------------------------------------- options


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
