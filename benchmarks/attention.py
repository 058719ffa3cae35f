"""Attention statistics beside a plain forward pass, and what other ways to them cost, over the prompt's length.

Every contender runs in a process of its own, so that what one leaves behind does not count for another, and goes through
the lengths until it does not survive one. Memory is the peak above the level with the model loaded and a short prompt
run. The plain pass that times are divided by is timed in turn with the contender, in the same process.

What the others do is the shortest way each offers to the same numbers, [Gu]'s alpha of the first keys. `output_attentions`
and `run_with_cache` collect the patterns of all blocks; under TransformerLens's hooks and in nnsight's trace each pattern is
reduced as it passes, so that one at a time exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Headline, Job, Row, Rows, Section, Settings, middle, ratios, spread, table
from machine import GIB, MIB, Memory, installed, out_of_memory, seconds_of, turns
from models import made, random_tokens
from torch import Tensor

import probes
from probes.measures.sinks import sinks
from probes.models.huggingface import shadow

TITLE = "Sinks and attention statistics"
KEYS = 8
SHORT = 32  # of the prompt before the memory's level is taken: libraries are loaded by then, the weights hashed
CONTENDERS = {
    "plain": "plain forward pass (transformers, sdpa, no logits)",
    "sinks": f"`probes.sinks`, {KEYS} keys",
    "sinks all": '`probes.sinks`, `keys="all"`',
    "eager": "transformers, `output_attentions=True`",
    "cache": "TransformerLens, `run_with_cache` of the patterns",
    "hooks": "TransformerLens, `run_with_hooks`, pattern by pattern",
    "nnsight": "nnsight, pattern by pattern in the trace",
}
OURS = ("sinks", "sinks all")
OTHERS = ("eager", "cache", "hooks", "nnsight")
MISSING = "not installed (`pip install nnsight`)"


def lengths(settings: Settings) -> list[int]:
    """Prompt lengths, short to long."""
    if settings.cuda:
        return [4096, 8192, 16384, 32768]
    return [128, 256, 512] if settings.quick else [256, 1024, 4096, 8192, 32768]


def shapes(settings: Settings) -> dict[str, dict[str, Any]]:
    """Models by what the page calls them."""
    if settings.cuda:
        return {f"Qwen2.5-{size} shape, bf16": {"size": size} for size in ("0.5B", "7B")}
    if settings.quick:
        return {"Llama, 2 blocks, 4 heads, width 128": {"width": 128, "blocks": 2, "heads": 4}}
    return {"Llama, 4 blocks, 4 heads, width 256": {"width": 256, "blocks": 4, "heads": 4}}


def jobs(settings: Settings) -> list[Job]:
    """A job per contender."""
    found = []
    for shape, point in shapes(settings).items():
        for name in CONTENDERS:
            points = {f"{shape}, T = {n:,}": {**point, "length": n} for n in lengths(settings)}
            found.append(Job("attention", name, points, rising=True))
    return found


def alpha_of(pattern: Tensor, keys: int = KEYS) -> Tensor:
    """[Gu]'s alpha [head, key] of the first keys from a whole pattern [1, H, T, T]."""
    queries = pattern.shape[-1] - torch.arange(keys, device=pattern.device)
    return pattern[0, :, :, :keys].float().sum(-2) / queries


def contender(name: str, model: Any) -> Callable[[Tensor], Any]:
    """A function of tokens that gives alpha [layer, head, key], or nothing (the plain pass)."""
    if name in OURS:
        view = probes.load(model)
        keys: Any = "all" if name == "sinks all" else tuple(range(KEYS))

        def ours(ids: Tensor) -> Tensor:
            alpha = torch.from_numpy(sinks(view, ids, keys=keys)["alpha"].values)
            return (alpha[0] if alpha.ndim == 4 else alpha)[..., :KEYS]

        return ours
    other: Any = shadow(model)
    if name == "plain":
        return lambda ids: (other.model(ids, use_cache=False), None)[1]
    if name == "eager":
        other.set_attn_implementation("eager")

        def eager(ids: Tensor) -> Tensor:
            return torch.stack(
                list(map(alpha_of, other.model(ids, use_cache=False, output_attentions=True).attentions))
            )

        return eager
    if name == "nnsight":
        return by_nnsight(other, model.config.num_hidden_layers)
    # Not above: only two contenders need TransformerLens, which takes long to import.
    from probes.models.lens import boot

    bridge: Any = boot(other, "random")
    points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.config.num_hidden_layers)]

    def cached(ids: Tensor) -> Tensor:
        _, cache = bridge.run_with_cache(ids, names_filter=points, return_type=None)
        return torch.stack([alpha_of(cache[point]) for point in points])

    def hooked(ids: Tensor) -> Tensor:
        found: list[Tensor] = []
        hooks = [(point, lambda pattern, hook: found.append(alpha_of(pattern))) for point in points]
        bridge.run_with_hooks(ids, return_type=None, fwd_hooks=hooks)
        return torch.stack(found)

    return {"cache": cached, "hooks": hooked}[name]


def by_nnsight(model: Any, blocks: int) -> Callable[[Tensor], Tensor]:
    """A trace that takes each block's pattern as it comes out of eager attention."""
    import nnsight

    model.set_attn_implementation("eager")
    traced: Any = nnsight.NNsight(model.model)

    def trace(ids: Tensor) -> Tensor:
        with traced.trace(ids, use_cache=False):
            found: Any = nnsight.save([])
            for layer in range(blocks):
                found.append(alpha_of(traced.layers[layer].self_attn.output[1]))
        return torch.stack(list(found))

    return trace


def rounds_of(length: int) -> int:
    """How often the pair is timed: minutes in all at any length."""
    return 7 if length <= 1024 else 3 if length <= 4096 else 1


@torch.no_grad()
def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Rows with seconds and those of the plain pass, bytes above the level, alpha of key 0."""
    if job.name == "nnsight" and installed("nnsight") is None:
        yield next(iter(job.points)), {"failed": MISSING}
        return
    device = settings.device
    longest = max(job.points.values(), key=lambda point: point["length"])
    model = made(longest, device)
    plain, own = contender("plain", model), contender(job.name, model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    for call in (plain, own):
        call(random_tokens(1, SHORT, device=device))
    for label, point in job.points.items():
        row = _row(random_tokens(1, point["length"], device=device), plain, own, settings)
        yield label, row | ({} if "failed" in row else {"weights": weights, "nnsight": installed("nnsight")})
        if "failed" in row:
            return


def _row(tokens: Tensor, plain: Callable[[Tensor], Any], own: Callable[[Tensor], Any], settings: Settings) -> Row:
    device = settings.device
    calls = {"contender": lambda: own(tokens), "plain": lambda: plain(tokens)}
    memory = Memory(device)
    memory.limit(settings.memory_limit)
    row: Row = {}
    found: dict[str, Any] = {}
    try:
        first = {"contender": seconds_of(lambda: found.update(alpha=own(tokens)), device)}
        row["above"] = memory.above()
        if found["alpha"] is not None:
            row["alpha of key 0"] = found["alpha"][..., 0].double().cpu().flatten().tolist()
        first["plain"] = seconds_of(calls["plain"], device)
        row["seconds"] = turns(calls, rounds=rounds_of(tokens.shape[1]), device=device, first=first)
    except (RuntimeError, MemoryError) as error:
        asked = out_of_memory(error)
        if asked is None:
            raise
        return {"failed": f"memory, limit {settings.memory_limit / GIB:.1f} GiB{asked and ', ' + asked}"}
    return row


# -------------------------------------------------------------------------------------------------------------- page


def by_contender(rows: Rows, settings: Settings, shape: str) -> dict[str, dict[int, Row]]:
    """Rows of a model by contender and length, those that did not survive included."""
    found: dict[str, dict[int, Row]] = {}
    for job in jobs(settings):
        for label, point in job.points.items():
            row = rows.get(job, label)
            if label.startswith(f"{shape}, T") and row is not None:
                found.setdefault(job.name, {})[point["length"]] = row
    return found


def lived(one: dict[int, Row]) -> dict[int, Row]:
    """The rows that survived, by length."""
    return {length: row for length, row in sorted(one.items()) if "failed" not in row}


def relative(row: Row) -> list[float]:
    """Time of a contender as a multiple of the plain pass's, round by round."""
    return ratios(row["seconds"]["contender"], row["seconds"]["plain"])


def section(rows: Rows, settings: Settings) -> Section:
    lines = [
        "One prompt of T random tokens; every contender in a process of its own. Time is a multiple of the plain pass timed "
        "in turn with it: median (quartiles); one round from T = 8,192 on. Memory is the peak above the level with "
        "the model loaded (weights are not in it). All but the plain pass end with [Gu]'s alpha of the first keys, which "
        "`probes.sinks` gives beside the other statistics of sinks; the last column is the largest difference between "
        "alphas of key 0. `output_attentions` and `run_with_cache` collect all blocks' patterns; the next two reduce each "
        "pattern as it passes, the best that can be done with a pattern that is there as a whole.",
    ]
    headlines: list[Headline] = []
    at = lengths(settings)
    columns = ["", *(f"T = {n:,}" for n in at)]
    for shape in shapes(settings):
        found = by_contender(rows, settings, shape)
        if not found:
            continue
        times, memory = [], []
        for name in (name for name in CONTENDERS if name in found):
            one = found[name]
            times.append([CONTENDERS[name], *(_time(one[n]) if n in one else "" for n in at)])
            cells = [_memory(one[n]) if n in one else "" for n in at]
            memory.append([CONTENDERS[name], *cells, _difference(name, found)])
        plain = [f"{n:,}: {middle(row['seconds']['plain']):.3g} s" for n, row in lived(found.get("plain", {})).items()]
        weights = next((row["weights"] for one in found.values() for row in lived(one).values()), 0)
        lines += ["", f"### {shape}", "", "Time, as a multiple of a plain forward pass:", "", *table(columns, times)]
        lines += ["", f"The plain pass itself, by T: {'; '.join(plain)}."] if plain else []
        lines += ["", "Peak memory above the loaded model, MiB:", "", *table([*columns, "alpha differs by"], memory)]
        lines += ["", f"Weights: {weights / MIB:,.0f} MiB."]
        headlines += _headlines(shape, {name: lived(one) for name, one in found.items() if lived(one)})
    versions = {row.get("nnsight") for row in rows.found.values() if row.get("nnsight")}
    lines += ["", f"nnsight {', '.join(sorted(versions))}."] if versions else []
    picture = f"benchmarks/{settings.figure('attention')}"
    lines += ["", f"![Attention statistics: time and memory over the prompt's length]({picture})"]
    return Section(headlines, lines)


def _time(row: Row) -> str:
    if "failed" not in row:
        return spread(relative(row), ".2f")
    return MISSING if row["failed"] == MISSING else f"did not survive ({row['failed']})"


def _memory(row: Row) -> str:
    return "—" if "failed" in row else f"{row['above'] / MIB:,.0f}"


def _difference(name: str, found: dict[str, dict[int, Row]]) -> str:
    """The largest difference of alpha of key 0 from ours, over lengths both have."""
    one, ours = lived(found[name]), lived(found.get("sinks", {}))
    if name not in (*OTHERS, "sinks all") or not set(one) & set(ours):
        return ""
    pairs = [zip(one[n]["alpha of key 0"], ours[n]["alpha of key 0"], strict=True) for n in set(one) & set(ours)]
    return f"{max(abs(a - b) for pair in pairs for a, b in pair):.0e}"


def _headlines(shape: str, found: dict[str, dict[int, Row]]) -> list[Headline]:
    ours, headlines = found.get("sinks", {}), []

    def said(row: Row) -> str:
        return f"{middle(relative(row)):.2f} passes, {row['above'] / MIB:,.0f} MiB"

    for name in (name for name in OTHERS if set(found.get(name, {})) & set(ours)):
        at = max(set(found[name]) & set(ours))
        one, other = ours[at], found[name][at]
        time, memory = middle(relative(other)) / middle(relative(one)), other["above"] / max(1, one["above"])
        what = f"sinks at T = {at:,}, the longest prompt survived by {CONTENDERS[name]}"
        headlines.append(Headline(what, said(one), said(other), f"time {time:.2f}, memory {memory:.1f}"))
    if ours:
        others = [max(found[name]) for name in OTHERS if name in found]
        reached = f"at most T = {max(others):,}" if others else "not measured"
        headlines.append(Headline(f"sinks at T = {max(ours):,} ({shape})", said(ours[max(ours)]), reached, ""))
    return headlines
