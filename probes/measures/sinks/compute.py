"""Attention sinks, and the heads that read position 0.

Definitions stand on the measure's page (`docs/probes/sinks.md`). `A_ij` is the weight of query i on key j <= i, T the
prompt's length; [Gu] counts queries from 1.

- Behind a sliding window, queries that have left a key behind count in alpha with weight 0; in `over_tau` only those count
  that see the key. Under a prefix that every query sees, or a full mask, queries before k may see it, too: [Gu]'s sum stays
  over the queries i >= k, so that alpha of one key means the same under every mask; `over_tau` counts all that see k.
- `reacts` is the mean over prompts and the queries i >= 2 that see position 0 of `1/2 sum_{j >= 1} |A_ij - A'_ij|`. (Under a
  causal mask query 1 has a single other key.)
- Norms at position 0 and at the rest are of `|v_j|` and `|k_j|` (rotated; repeated for the heads that share it).

Sources: [Gu], arXiv 2410.10781 (alpha, sink rate); [Wu], arXiv 2502.01951 (the indicator with tau). What heads do with
position 0, and the roles they get by it (`probes.measures.sinks.roles`), are ours.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ...errors import InputError
from ...models.behind import continued
from ...models.checks import check_documents, check_logits, check_tokens, lacks_bos, not_finite
from ...models.load import takes_model
from ...models.swap import swapped
from ...models.view import View
from ...results.dataset import Variable, by_block, dataset, provenance, with_low_high
from ...results.statistics import Interval, freedom, holm, unit_of
from ...run.memory import Retry, prompts_at_once
from ...run.progress import Progress, Tally
from ...run.store import Piece, Store
from .collectors import TABLE, collectors, named
from .effect import CACHES, DIMS, GROUPS, KEEP, NUMBERINGS, REMOVED, caches, effects, evictions, joint, losing
from .roles import PLACES, ROLES, assigned, estimates, role_shares, strongest
from .secondary import RULES, secondary
from .secondary import TABLE as LEVEL_TABLE
from .sums import MEANS, NORMS, SIZES, SQUARES, Sums

FIRST_KEYS = 8  # so many keys unless told; of a shorter prompt, those that exist
EFFECT_PROMPTS = 16  # how many of the prompts, the first ones, effects are measured on


@takes_model
def sinks(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    keys: Any = None,
    reacts: Any = None,
    effect: Any = None,
    effect_prompts: int = EFFECT_PROMPTS,
    evict: Any = None,
    keep: Any = None,
    answer: int | None = None,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Sink metrics of chosen keys, and which heads attend to, read and react to position 0.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], position 0 included; of other lengths with `attention_mask` (`docs/prompts.md`).
        keys: positions, or "all"; the first 8 unless told, or as many of them as there are.
        reacts: what to put at position 0 in order to measure `reacts`, as in `probes.swapped`: "mean", "zero", "random" or a
            token id. None: not measured.
        effect: heads whose effect is measured (see `probes.measures.sinks.effect`): True or "all", or how many, those
            that take most from position 0. None: not measured. It takes about half a pass for each head and prompt, and
            five passes for each prompt with all sink heads, and all others, at once; 0 measures these alone.
        effect_prompts: how many prompts effects of single heads are measured on, the first ones; all, if there are fewer.
        evict: numbers of first keys that a cache keeps, as (0, 1, 4): what the model does with such a cache instead of all
            keys (see `probes.measures.sinks.effect`), with 1 among them also without the value of key 0. None: not
            measured. It takes over a pass for each pair of numbers.
        keep: numbers of last keys that it keeps, the query's own among them; (64, 128, 256) unless told, as far as prompts
            are longer.
        answer: so many tokens that the model writes after each prompt, the most probable one each time, are part of the
            prompts, and their queries' alpha is told apart. None: none.
        documents: what each prompt is a window of; intervals are then over documents instead of prompts.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (passes done, passes in all), each of a prompt.

    Returns:
        Dataset with the variables of `VARIABLES`, `tokens`, and attributes that say what made it. `alpha` of chosen keys has
        a dimension `prompt`, of all keys it is the mean. What is kept of every prompt comes with `..._low`, `..._high` and,
        as [prompt, ...], `..._by_prompt`: `attends`, `written`, `output`, `output_own`, with a replacement `reacts` and
        `reacts_output`, with learned sink logits `sink_logit_share`, on request `effect` and `loss_change` (NaN where not
        measured), `joint_...` and `evict_...`. With an answer there are `answer_alpha` and `answer_uniform`, with all keys
        `token_...`, see `probes.measures.sinks.collectors`, and `aligned_share` and `level_...`, see
        `probes.measures.sinks.secondary`. The attribute `lacks_bos` is there where prompts lack what the
        model's tokenizer puts first.
        NaN: no query sees position 0 (a window of 1), or the head writes nothing.

    Raises:
        InputError: tokens, a key, a number or a replacement that cannot be used; not one document for each prompt; values
            that are not finite.

    Source: [Gu], arXiv 2410.10781; [Wu], arXiv 2502.01951; roles are ours, see `probes.measures.sinks.roles`.
    """
    check_tokens(model, tokens)
    (prompts, asked), length = tokens.shape, tokens.shape[1] + (answer or 0)
    check_documents(documents, prompts)
    every = isinstance(keys, str) and keys == "all"
    usual = range(length if every else min(FIRST_KEYS, length))
    chosen = _distinct("keys", usual if every or keys is None else keys, 0, length)
    first, last = _kept(evict, keep, length)
    most = model.spec.blocks * model.spec.heads
    if effect_prompts < 1 or (isinstance(effect, int) and effect < 0) or (isinstance(effect, str) and effect != "all"):
        raise InputError(
            f"effect={effect}, effect_prompts={effect_prompts}: give all or a number of heads, and 1 or more"
        )
    heads = most if effect is True or effect == "all" else min(int(effect or 0), most)
    on, together = tokens[:effect_prompts] if heads else tokens[:0], effect is not None and effect is not False
    if first or together:
        check_logits(model)
    views = [model] if reacts is None else [model, swapped(model, reacts)]
    passes = prompts + len(on) * (1 + heads / 2)
    passes += prompts * (1 + len(losing(caches(model, length, first, last).values(), length))) * bool(first)
    passes += prompts * (1 + len(GROUPS) * len(REMOVED)) * together
    passes += prompts * (1 + answer) if answer is not None else 0
    report, pieces = Tally(progress, passes, per=model.spec.blocks), pieces or Store()
    retry = Retry(f"a prompt of {length} positions of '{model.identity.name}'", report)

    prompt = tokens
    if answer is not None:
        tokens = torch.cat([prompt, _written(model, prompt, answer, report, retry, pieces).to(prompt.device)], 1)
    found = Sums(model, tokens, None if every else tuple(chosen), report).measured(views, retry, pieces)
    if answer is not None:
        before = [key for key in chosen if key < asked]
        alone = Sums(model, prompt, None if every else tuple(before), report)
        found |= _of_answer(found, alone.measured([model], retry, pieces.within("prompt")), chosen, asked, answer)
    if not all(np.isfinite(found[name]).all() for name in ("alpha", *NORMS)):
        raise not_finite(model, "attention")
    by_prompt = {name: found.pop(name) for name in (*MEANS, *SIZES) if name in found}  # [prompt, layer, head]
    pairs = {"reads": [found.pop(name) for name in SQUARES]}
    pairs["written_median"] = [by_prompt[name] ** 2 for name in ("written", "output")]
    of_roles = by_prompt | {name: np.stack(each, 1) for name, each in pairs.items()}
    intervals = estimates(of_roles, documents)
    found["has_role"], found["role_sure"] = assigned(intervals)
    intervals["role_share"] = role_shares(of_roles, documents)
    taken = strongest(intervals["written"].value, heads)
    later = effects(model, on, taken, retry, report, pieces) if heads else {}
    attends = np.asarray(intervals["attends"].value)
    of_groups = joint(model, tokens, attends, retry, report, pieces) if together else {}
    found |= {name: of_groups.pop(name) for name in ("group_heads",) if of_groups}
    later |= of_groups | (evictions(model, tokens, first, last, retry, report, pieces) if first else {})
    report.finish()
    intervals |= estimates(later, documents)
    if heads:
        change = intervals["loss_change"]
        found["loss_rises"] = holm(change, freedom(unit_of(len(on), documents))) & (change.value > 0)

    coords: dict[str, Any] = {**by_block(model.spec), "head": range(model.spec.heads), "key": chosen}
    coords |= {"place": list(PLACES), "role": list(ROLES)}
    if every:
        by_key, uniform, ids = found.pop("by_key"), found["uniform"], tokens.cpu().numpy()
        found |= collectors(by_key, uniform, ids, documents)
        coords["collector_token"] = named(found["token_id"], model.tokenizer)
        streams = found.pop("aligned"), found.pop("norms")
        levels, words = secondary(*streams, by_key, uniform, ids, model.tokenizer, documents)
        found |= levels
        coords |= {"rule": list(RULES), "level_token": (("level",), words)}
    if first:
        coords |= dict(zip(DIMS, (first, last, list(NUMBERINGS), list(CACHES)), strict=True))
    if together:
        coords |= {"group": list(GROUPS), "removed": list(REMOVED)}
    variables = {name: _variable(name, values) for name, values in found.items()}
    for name, each in (by_prompt | later).items():
        variables |= _with_ends(name, intervals[name], each, prompts)
    for name in (*pairs, "role_share"):  # of sums over prompts
        variables |= with_low_high(name, VARIABLES[name], map(np.asarray, intervals[name][:3]))
    options = {
        "keys": "all" if every else chosen,
        "reacts": None if reacts is None else views[1].replacement,  # pyright: ignore[reportAttributeAccessIssue]
        "effect": ("all" if heads == most else heads) if together else None,
        "effect_prompts": len(on) or None,
        "evict": first or None,
        "keep": last or None,
        "answer": answer,
    }
    attrs = provenance(model, tokens, measurement="sinks", **options)
    attrs |= {"lacks_bos": lacking} if (lacking := lacks_bos(model, tokens)) else {}
    return dataset(variables, tokens=tokens, coords=coords, attrs=attrs)


# ------------------------------------------------------------------------------------------------ what a result holds


HEAD = ("layer", "head")
_KEY, _PLACE = (*HEAD, "key"), (*HEAD, "place")
_REMOVED = "when what the head takes from position 0 is removed"
_OWN = "size of the head's output beside its own with position 0 hidden, by weight on position 0"
_CHANGE = "size of the output's change by another embedding at position 0, beside the stream"
_KEPT = "with the first and last keys alone"
_GROUP, _OF_GROUP = ("group", "removed"), "when what all heads of a group take from position 0 is removed"
_NO_VALUE = "with the first key, but not its value, and the last keys"
VARIABLES = {
    **TABLE,
    **LEVEL_TABLE,
    "attends": Variable(HEAD, "mean weight on position 0"),
    "written": Variable(HEAD, "size of what comes from position 0 beside the stream that the block reads"),
    "output": Variable(HEAD, "size of the head's output beside the stream that the block reads"),
    "output_own": Variable(HEAD, _OWN),
    "reacts": Variable(HEAD, "attention to keys >= 1 changed by another embedding at position 0, total variation"),
    "reacts_output": Variable(HEAD, _CHANGE),
    "sink_logit_share": Variable(HEAD, "mean weight on the learned sink logit, which reads nothing"),
    "effect": Variable(HEAD, f"KL of the next token {_REMOVED}", "nat"),
    "loss_change": Variable(HEAD, f"change of the next-token loss {_REMOVED}", "nat"),
    "loss_rises": Variable(HEAD, f"whether the next-token loss rises {_REMOVED}, after Holm over the heads tried"),
    "joint_loss_change": Variable(_GROUP, f"change of the next-token loss {_OF_GROUP}", "nat"),
    "joint_kl": Variable(_GROUP, f"KL of the next token {_OF_GROUP}", "nat"),
    "group_heads": Variable(("group",), "heads of a group", "head"),
    "evict_loss_before": Variable(DIMS, "next-token loss with all keys", "nat"),
    "evict_loss_change": Variable(DIMS, f"change of the next-token loss {_KEPT}", "nat"),
    "evict_kl": Variable(DIMS, f"KL of the next token {_KEPT}", "nat"),
    "evict_value_loss_change": Variable(DIMS[1:], f"change of the next-token loss {_NO_VALUE}", "nat"),
    "evict_value_kl": Variable(DIMS[1:], f"KL of the next token {_NO_VALUE}", "nat"),
    "alpha": Variable(_KEY, "mean weight on the key, over the queries from it on [Gu]"),
    "answer_alpha": Variable(_KEY, "mean weight on the key, over the queries of the tokens that the model wrote"),
    "answer_uniform": Variable(("layer", "key"), "the same of uniform attention under the block's mask"),
    "sink_rate": Variable(("layer", "key"), "share of (prompt, head) with alpha above the threshold"),
    "sink_rate_of_model": Variable(("key",), "share of (prompt, layer, head) with alpha above the threshold"),
    "over_tau": Variable(_KEY, "fraction of the queries that see the key with a weight above tau [Wu]"),
    "over_tau_of_model": Variable(("key",), "mean over layers and heads of the fraction with a weight above tau"),
    "uniform": Variable(("layer", "key"), "alpha of uniform attention under the block's mask"),
    "reads": Variable(HEAD, "size of what comes from position 0 against the head's output"),
    "written_median": Variable(HEAD, "size of what comes from position 0 against the block's median head output"),
    "role_share": Variable(("role",), "share of heads that have the role"),
    "has_role": Variable(("role", *HEAD), "whether it is the head's role"),
    "role_sure": Variable(HEAD, "whether no interval that decided the role contains its threshold"),
    "value_norm": Variable(_PLACE, "|v_j|", "activation"),
    "key_norm": Variable(_PLACE, "|k_j|", "activation"),
}


def _variable(name: str, values: Any) -> tuple[Any, ...]:
    """As `dataset` takes it: of every prompt where it has a dimension more; truth as 1 or 0."""
    values = np.asarray(values)
    dims = ("prompt", *VARIABLES[name].dims)[-values.ndim :]
    values = values.astype(np.int8) if values.dtype == bool else values
    return VARIABLES[name]._replace(dims=dims).of(values)


def _with_ends(name: str, interval: Interval, each: np.ndarray, prompts: int) -> dict[str, tuple[Any, ...]]:
    """A number, the ends of its interval, and its values by prompt, of which those behind the measured ones are NaN."""
    whole, known = np.full((prompts, *each.shape[1:]), np.nan, dtype=np.float32), VARIABLES[name]
    whole[: len(each)] = each
    by_prompt = Variable(("prompt", *known.dims), f"{known.long_name}, by prompt", known.units)
    return with_low_high(name, known, map(np.asarray, interval[:3])) | {f"{name}_by_prompt": by_prompt.of(whole)}


# ---------------------------------------------------------------------------------------------------- answers


def _written(
    model: View, tokens: Tensor, count: int, report: Callable[[int], Any], retry: Retry, pieces: Store
) -> Int[Tensor, "prompt written"]:
    """What the model writes after each prompt."""

    def of(some: Sequence[int]) -> list[Piece]:
        return [{"ids": ids.numpy()} for ids in continued(model, tokens[list(some)], count, report)]

    at_once = prompts_at_once(model, tokens.shape[1] + count)
    kept = pieces.together("answer", len(tokens), lambda some: retry(lambda: of(some)), at_once)
    return torch.from_numpy(kept.stacked("ids"))


def _of_answer(
    whole: Mapping[str, np.ndarray], prompt: Mapping[str, np.ndarray], keys: Sequence[int], length: int, count: int
) -> dict[str, np.ndarray]:
    """Alpha of the last `count` queries alone: what all queries give a key, less what those of the prompt give it.

    No query of the prompt sees what follows, so that its pattern is the same with and without the answer.
    """
    k = np.asarray(keys)
    there, added = np.maximum(length - k, 0), np.minimum(count, length + count - k)
    found = {}
    for name in ("alpha", "uniform"):
        earlier = np.zeros_like(whole[name])
        earlier[..., : prompt[name].shape[-1]] = prompt[name]
        found[f"answer_{name}"] = (whole[name] * (there + added) - earlier * there) / added
    return found


# --------------------------------------------------------------------------------------------------- options


def _kept(evict: Any, keep: Any, length: int) -> tuple[list[int], list[int]]:
    """Numbers of first and of last keys that caches keep; none where they are not measured."""
    if evict is None and keep is not None:
        raise InputError(f"keep={keep} has no use without evict; say how many first keys are kept")
    if evict is None:
        return [], []
    usual = [number for number in KEEP if number < length]
    return _distinct("evict", evict, 0, length), _distinct("keep", usual if keep is None else keep, 1, length)


def _distinct(name: str, values: Any, least: int, length: int) -> list[int]:
    """Whole numbers below a prompt's length; a single one counts as a list of it."""
    listed: list[Any] = np.atleast_1d(values).tolist()
    remedy = f"give whole numbers from {least} to {length - 1}"
    for value in listed:
        if not isinstance(value, int) or not least <= value < length:
            raise InputError(f"{name}={value} cannot be used with prompts of {length} positions; {remedy}")
    if not listed or len(set(listed)) < len(listed):
        raise InputError(f"{name}={','.join(map(str, listed))} name {'a number twice' if listed else 'none'}; {remedy}")
    return listed
