"""The memory that a measure says it takes before it begins (its function `memory`), against the peak that it takes.

Every run is a process of its own that is warm: the model is loaded, its weights are hashed, the probe has run on a short
prompt. Then the estimate is made and the probe run; memory is the peak above the level between the two. The same run's peak
differs from process to process (glibc decides as it goes which freed tensors it keeps: up to half of a small peak), so that
there are several, and the estimate is held against the largest: what does not fit once has not fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Headline, Job, Row, Rows, Section, Settings, table
from machine import MIB, Memory
from models import SIGMA, VOCABULARY, llama, qwen, random_tokens
from transformers import Qwen2Config, Qwen2ForCausalLM

import probes
from probes.measures import jacobian, leakage, sinks, trajectory

TITLE = "The planner's estimates"
PROMISED = 0.25  # of the measured peak
SHORT = 32
RUNS = 3  # processes for each row
# By name: the probe, its options as it and its `memory` take them, and both.
CALLS: dict[str, tuple[str, dict[str, Any], Callable[..., Any], Callable[..., int]]] = {
    "jacobian, exact": ("jacobian", {"method": "exact"}, probes.jacobian, jacobian.memory),
    "jacobian, sketch of 24": ("jacobian", {"method": "sketch", "products": 24}, probes.jacobian, jacobian.memory),
    "sinks": ("sinks", {}, probes.sinks, sinks.memory),
    'sinks, keys="all"': ("sinks", {"keys": "all"}, probes.sinks, sinks.memory),
    "trajectory": ("trajectory", {}, probes.trajectory, trajectory.memory),
    "leakage": ("leakage", {"bootstrap": 100}, probes.leakage, leakage.memory),
}


def grouped(length: int) -> Any:
    """A random model with grouped heads and a wide feed-forward, as Qwen2.5-0.5B has, a quarter as deep and half as wide."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=448,
        intermediate_size=2432,
        num_hidden_layers=6,
        num_attention_heads=7,
        num_key_value_heads=1,
        max_position_embeddings=max(4096, length),
        initializer_range=SIGMA,
    )
    model: Any = Qwen2ForCausalLM(config)
    return model.eval().requires_grad_(False)


def jobs(settings: Settings) -> list[Job]:
    """A job per run, since what one leaves behind would count for the next."""
    if settings.cuda:
        shapes = {"Qwen2.5-0.5B shape": {"size": "0.5B"}, "Qwen2.5-7B shape": {"size": "7B"}}
        sizes = {"jacobian": ((1, 4096),), "sinks": ((1, 32768),), "trajectory": ((1, 8192),), "leakage": ((16, 1024),)}
    elif settings.quick:
        shapes = {"Llama, width 128, 4 blocks": {"width": 128, "blocks": 4}}
        sizes = {"sinks": ((1, 512),), "leakage": ((8, 128),)}
    else:
        shapes = {"Llama, width 256, 6 blocks": {"width": 256, "blocks": 6}, "Qwen2, width 448, 6 blocks": {}}
        sizes = {"jacobian": ((1, 512),), "sinks": ((1, 4096),), "trajectory": ((2, 2048),), "leakage": ((16, 512),)}
    found = []
    for shape, made in shapes.items():
        for name, (probe, *_) in CALLS.items():
            if name == "jacobian, exact" and ("width" not in made or settings.cuda):
                continue  # minutes, and no other memory than the sketch's
            for prompts, length in sizes.get(probe, ()):
                label = f"{shape}, {prompts} x {length:,}"
                point = {**made, "prompts": prompts, "length": length, "row": label}
                runs = range(1 if settings.quick else RUNS)
                found += [Job("planner", name, {f"{label}, process {n}": point}) for n in runs]
    return found


def _model(point: dict[str, Any], device: str) -> Any:
    if "size" in point:
        return qwen(point["size"], point["length"], device=device)
    if "width" in point:
        return llama(point["width"], point["blocks"], point["length"], device=device)
    return grouped(point["length"]).to(device)


def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Rows with planned and measured bytes."""
    _, options, call, memory_of = CALLS[job.name]
    for label, point in job.points.items():
        view: Any = probes.load(_model(point, settings.device))
        prompts, length = point["prompts"], point["length"]
        call(view, random_tokens(prompts, SHORT, device=settings.device), **options)
        planned = memory_of(view, prompts, length, **options)
        tokens = random_tokens(prompts, length, device=settings.device)
        memory = Memory(settings.device)
        call(view, tokens, **options)
        yield label, {"planned": planned, "above": memory.above()}


def section(rows: Rows, settings: Settings) -> Section:
    body, off = [], []
    runs: dict[tuple[str, str], list[Row]] = {}
    for job in jobs(settings):
        for label, row in rows.of(job).items():
            runs.setdefault((job.name, job.points[label]["row"]), []).append(row)
    for (name, label), found in runs.items():
        peaks = sorted(row["above"] for row in found)
        planned = max(found, key=lambda row: row["above"])["planned"]
        off.append(planned / peaks[-1] - 1)
        measured = ", ".join(f"{peak / MIB:,.0f}" for peak in peaks)
        body.append([name, label, f"{planned / MIB:,.0f}", measured, f"{off[-1]:+.0%}"])
    within = f"{sum(abs(x) <= PROMISED for x in off)} of {len(off)}"
    lines = [
        "Peak memory above the loaded model, as `headwater` says before it begins and as measured; prompts x tokens. "
        "Peaks are those of several processes of the same run, which differ by what the allocator keeps of freed memory. "
        f"Memory is promised within {PROMISED:.0%} of the largest: {within} rows are.",
        "",
        *table(["probe", "at", "planned, MiB", "measured peaks", "off by"], body),
    ]
    what = f"planner: memory estimates within {PROMISED:.0%} of the measured peak; the worst one"
    return Section([Headline(what, within, "", f"{max(map(abs, off)):.0%} off")] if off else [], lines)
