"""What the benchmarks share: contenders that take turns, peak memory, random models, and a section of Markdown.

A benchmark is a script that runs ours beside what one would use instead, and prints a section whose table has the ratios.
"""

import argparse
import ctypes
import gc
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from probes.run.hardware import hardware, processor

torch.set_num_threads(1)  # quotable on any machine; a process's CPU time is then that of the work alone
MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 1000  # small, so that embeddings and logits hide nothing
HEAD_WIDTH = 64
SIGMA = 0.04  # weights twice as wide as usual, for patterns that are not uniform


def parser(text: str | None) -> argparse.ArgumentParser:
    """The command line that every benchmark has."""
    options = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small sizes: they show that it runs, not how fast")
    return options


def turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every call by round. Calls take turns, so that what shares the machine disturbs all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = clock()
            call()
            seconds[name].append(clock() - began)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Median and quartiles of the rounds' ratios; the median alone where there are less than three rounds."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def spread(values: Sequence[float]) -> str:
    """Median and quartiles with three digits; the median alone where there are less than three values."""
    low, middle, high = (
        f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in np.quantile(values, [0.25, 0.5, 0.75])
    )
    return f"{middle} ({low} to {high})" if len(values) > 2 else middle


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """(what a call returns, bytes of resident memory at its peak above the level before it); on Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and kept would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    level = resident("VmRSS")
    result = call()
    return result, max(0, resident("VmHWM") - level)


def resident(name: str) -> int:
    """A size from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def llama(width: int, blocks: int, heads: int | None = None, *, length: int = 4096) -> LlamaForCausalLM:
    """A random Llama in float32 for prompts of up to `length` tokens; feed-forwards 11/4 of the width, as usual."""
    torch.manual_seed(0)
    heads = heads or width // HEAD_WIDTH
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        initializer_range=SIGMA,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False)


def random_tokens(length: int, prompts: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    """Ids [prompt, position]."""
    return torch.randint(vocabulary, (prompts, length), generator=torch.Generator().manual_seed(1))


def section(
    title: str, text: str, columns: Sequence[str], rows: Sequence[Sequence[object]], device: str = "cpu"
) -> str:
    """A section of the page: heading, command and machine, what was measured, table."""
    script, *words = sys.argv
    command = shlex.join(["python", f"benchmarks/{Path(script).name}", *words])
    body = [columns, ["---"] * len(columns), *rows]
    table = [f"| {' | '.join(map(str, cells))} |" for cells in body]
    return "\n".join([f"## {title}", "", f"`{command}`: {machine(device)}.", "", text, "", *table])


def machine(device: str) -> str:
    """Where and when it is measured, and with what code."""
    asked: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], **asked).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "transformer-lens"))
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    where = f"{processor()}, one thread" if device == "cpu" else hardware(torch.device(device))
    return f"{where}; {versions}; {date}, commit {commit or 'unknown'}"
