"""What attention statistics cost beside a plain forward pass, and what the other ways to them cost.

    python benchmarks/attention.py [--lengths 1024,4096,32768] [--contenders NAME ...] [--out reports/attention]

One random Llama of 8 blocks, 16 heads and width 1,024, one prompt of random tokens. Every contender runs in a process of
its own, so that what one leaves behind does not count for another. Memory is the peak above the level with the model
loaded and a short prompt run; weights are counted apart, the interpreter and its libraries not at all. Times are medians;
the plain pass they are divided by is timed in turn with them, in the same process, so that drift of a shared machine hits
both.

A contender that needs more memory than `--memory-limit` or more time than `--time-limit` did not survive; longer prompts are
then not tried. Writes `attention.md`, and each row as soon as it is there to `attention.json`, from which a run that was
stopped goes on; `--again` measures anew.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe, synchronize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import probes
from probes.files import atomic
from probes.models.huggingface import shadow
from probes.models.lens import boot
from probes.sinks import sinks

MIB, GIB = 1 << 20, 1 << 30
VOCABULARY = 1000  # small, so that embeddings and logits hide nothing
KEYS = 8
SHORT = 32  # of the prompt before the memory's level is taken: libraries are loaded by then, the weights hashed
PROMPTS = 4  # of leakage, which compares two halves of its prompts
CONTENDERS = {
    "plain": "plain forward pass (transformers, sdpa, no logits)",
    "sinks": f"`sinks`, {KEYS} keys",
    "sinks all": '`sinks`, `keys="all"`',
    "leakage": f"`leakage`, {PROMPTS} prompts, no intervals; time per prompt",
    "eager": "transformers, `output_attentions=True`",
    "lens": "TransformerLens, cache of the patterns",
}
OURS, OTHERS = "sinks", ("eager", "lens")  # whose alpha is compared


def made(length: int, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """The model; weights twice as wide as usual, for patterns that are not uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=max(4096, length),
        initializer_range=0.04,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device, dtype).eval().requires_grad_(False)


def alpha_of(patterns: list[Tensor], keys: int) -> Tensor:
    """[Gu]'s alpha from full patterns [1, H, T, T], [layer, head, key]."""
    length = patterns[0].shape[-1]
    queries = length - torch.arange(keys, device=patterns[0].device)
    return torch.stack([pattern[0, :, :, :keys].float().sum(-2) / queries for pattern in patterns])


def calls(name: str, model: LlamaForCausalLM) -> tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]:
    """(the plain pass, the contender): functions of tokens; a contender may give an alpha."""
    alone: Any = shadow(model)

    def plain(tokens: Tensor) -> None:
        for ids in tokens.split(1):
            alone.model(ids, use_cache=False)

    if name == "plain":
        return plain, plain
    if name == "eager":
        other: Any = shadow(model)
        other.set_attn_implementation("eager")
        return plain, lambda ids: alpha_of(
            list(other.model(ids, use_cache=False, output_attentions=True).attentions), KEYS
        )
    if name == "lens":
        bridge: Any = boot(shadow(model), "random")

        def cached(ids: Tensor) -> Tensor:
            wanted: Any = {"names_filter": lambda point: point.endswith("hook_pattern"), "return_type": None}
            _, cache = bridge.run_with_cache(ids, **wanted)
            return alpha_of([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(8)], KEYS)

        return plain, cached
    view = probes.load(model)
    if name == "leakage":
        from probes.leakage import leakage

        return plain, lambda tokens: leakage(view, tokens, bootstrap=0)
    keys: Any = "all" if name == "sinks all" else tuple(range(KEYS))
    return plain, lambda ids: torch.from_numpy(
        sinks(view, ids, keys=keys)["alpha"].values[..., :KEYS].reshape(8, 16, KEYS)
    )


# --------------------------------------------------------------------------------------------------- in one process


class Memory:
    """Resident memory of this process, or what torch has allocated on the device, in bytes."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.device = device
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self.level = torch.cuda.memory_allocated(device)
            return
        ctypes.CDLL(None).malloc_trim(0)  # memory freed and kept would be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # makes the peak begin here
        self.level = _status("VmRSS")

    def above(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device) if self.cuda else _status("VmHWM")
        return max(0, peak - self.level)

    def limit(self, size: int) -> None:
        """Let this process have `size` bytes in all, from now on."""
        if self.cuda:
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, size / torch.cuda.get_device_properties(self.device).total_memory), self.device
            )
        else:  # address space is counted, of which libraries take more than they use
            allowed = _status("VmSize") + max(0, size - _status("VmRSS"))
            resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def rounds_of(length: int) -> int:
    """How often the pair is timed: minutes in all at any length."""
    return 7 if length <= 1024 else 3 if length <= 8192 else 1


@torch.no_grad()
def measure(name: str, length: int, dtype: torch.dtype, device: str, limit: int) -> dict[str, Any]:
    """One row: seconds, seconds of the plain pass beside it, bytes above the level; or why there are none."""
    model = made(length, dtype, device)
    plain, contender = calls(name, model)
    prompts = PROMPTS if name == "leakage" else 1
    tokens = torch.randint(VOCABULARY, (prompts, length), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 0  # leakage wants one first token
    tokens = tokens.to(device)
    for call in (plain, contender):
        call(tokens[:, :SHORT])
    memory = Memory(device)
    memory.limit(limit)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    row: dict[str, Any] = {"weights": weights}
    try:
        began = time.perf_counter()
        alpha = contender(tokens)
        synchronize(device)
        first = time.perf_counter() - began
        row["above"] = memory.above()
        if isinstance(alpha, Tensor):
            row["alpha"] = alpha.double().cpu().flatten().tolist()
        rounds = rounds_of(length)
        seconds: dict[str, list[float]] = {"contender": [first] if rounds == 1 else [], "plain": []}
        if rounds > 1:
            plain(tokens)
        for _ in range(rounds):
            for which, call in (("contender", contender), ("plain", plain)):
                if which == "contender" and rounds == 1:
                    continue  # the first call has to do
                synchronize(device)
                began = time.perf_counter()
                call(tokens)
                synchronize(device)
                seconds[which].append(time.perf_counter() - began)
        row |= {which: statistics.median(times) / prompts for which, times in seconds.items()}
        row["rounds"] = rounds
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and "memory" not in text:
            raise
        wanted = next((int(word) for word in text.split() if word.isdigit() and int(word) > MIB), None)
        asked = "" if wanted is None else f": asked for {wanted / GIB:.2g} GiB at once"
        return {"failed": f"memory, limit {limit / GIB:.1f} GiB{asked}"}
    return row


# ------------------------------------------------------------------------------------------------------- the table


def available(device: str) -> int:
    """Bytes that may be had now."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    group = Path("/sys/fs/cgroup/memory.max")
    given = group.read_text().strip() if group.exists() else "max"
    return found if given == "max" else min(found, int(given))


def run(name: str, length: int, given: argparse.Namespace, limit: int) -> dict[str, Any]:
    """A row, from a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--lengths", str(length), "--dtype", given.dtype]
    command += ["--device", given.device, "--memory-limit", str(limit / GIB)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            out, _ = process.communicate(timeout=given.time_limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {"failed": f"time, limit {given.time_limit:g} s"}
        except BaseException:  # interrupted: nothing of ours keeps running
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == -signal.SIGKILL:
        return {"failed": "memory, killed by the system"}
    if process.returncode:
        raise SystemExit(f"{name} at T = {length} failed with exit status {process.returncode}; see above")
    return json.loads(out.splitlines()[-1])


def cells(name: str, row: dict[str, Any], base: dict[str, Any] | None, ours: dict[str, Any] | None) -> list[str]:
    """A row of the table; `base` is the plain pass's."""
    if "failed" in row:
        return [CONTENDERS[name], f"did not survive ({row['failed']})", *[""] * 5]
    found = [CONTENDERS[name], f"{row['contender']:.2f}", f"{row['contender'] / row['plain']:.2f}"]
    found.append(f"{row['above'] / MIB:,.0f}")
    if base is None or "failed" in base:
        found += ["", ""]
    else:
        sums = (row["weights"] + row["above"], base["weights"] + base["above"])
        found += [f"{row['above'] / max(1, base['above']):.2f}", f"{sums[0] / sums[1]:.2f}"]
    if name in OTHERS and ours is not None and "alpha" in row and "alpha" in ours:
        pairs = zip(row["alpha"], ours["alpha"], strict=True)
        found.append(f"{max(abs(a - b) for a, b in pairs):.1e}")
    return [*found, ""][:7]


def table(rows: dict[str, dict[str, Any]], given: argparse.Namespace, limit: int) -> str:
    """The page."""
    command = shlex.join(["python", "benchmarks/attention.py", *given.asked])
    lines = [
        "# Attention statistics beside a plain forward pass",
        "",
        f"`{command}`",
        "",
        f"Random Llama, 8 blocks, 16 heads, width 1,024, {given.dtype}; one prompt of T random tokens. Seconds are medians; "
        "divided by the plain pass timed in turn with them. Memory is the peak above the level with the model loaded, "
        f"{'allocated on the device' if given.device.startswith('cuda') else 'resident'}; its ratios are to the plain "
        "pass's, without and with the weights. All but the plain pass and leakage end with the same numbers, [Gu]'s alpha "
        "of the first keys; the last column is the largest difference from ours.",
    ]
    for length in given.lengths:
        here = {name: rows[key(name, length)] for name in given.contenders if key(name, length) in rows}
        if not here:
            continue
        lines += ["", f"## T = {length:,}", ""]
        lines.append("| | seconds | / plain | MiB above | / plain | / plain, with weights | alpha differs by |")
        lines.append("|---|---|---|---|---|---|---|")
        for name, row in here.items():
            lines.append("| " + " | ".join(cells(name, row, here.get("plain"), here.get(OURS))) + " |")
    longest = []
    for name in given.contenders:
        lived = [n for n in given.lengths if "failed" not in rows.get(key(name, n), {"failed": ""})]
        longest.append(f"{CONTENDERS[name]}: {max(lived, default=0):,}")
    lines += ["", "Longest of these that each survived: " + "; ".join(longest) + "."]
    missing = [key(name, n) for n in given.lengths for name in given.contenders if key(name, n) not in rows]
    if missing:
        lines += ["", f"Not run: {'; '.join(missing)}."]
    limits = f"Limits: {limit / GIB:.1f} GiB, {given.time_limit:g} s for a contender and the plain passes beside it."
    return "\n".join([*lines, "", limits, "", describe(given.device), ""])


def key(name: str, length: int) -> str:
    """Of a row in `attention.json`."""
    return f"{name}, {length}"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")], default=[1024, 4096, 32768])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-limit", type=float, help="GiB; 80 %% of what is free unless given")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for one contender at one length")
    parser.add_argument("--again", action="store_true", help="measure anew what attention.json has")
    parser.add_argument("--out", type=Path, default=Path("reports/attention"))
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.asked = sys.argv[1:]
    given.lengths = sorted(set(given.lengths))
    return given


def main() -> None:
    """Measure what is not there yet, print and write the table."""
    given = parsed()
    limit = int(0.8 * available(given.device)) if given.memory_limit is None else int(given.memory_limit * GIB)
    if given.one is not None:
        print(json.dumps(measure(given.one, given.lengths[0], getattr(torch, given.dtype), given.device, limit)))
        return
    kept, machine = given.out / "attention.json", [describe(given.device), given.dtype]
    rows: dict[str, dict[str, Any]] = {}
    if kept.exists() and not given.again:
        found = json.loads(kept.read_text(encoding="utf-8"))
        rows = found["rows"] if found["machine"] == machine else {}
    for length in given.lengths:
        for name in given.contenders:
            if key(name, length) not in rows:
                failed = next((n for n in given.lengths if n < length and "failed" in rows.get(key(name, n), {})), None)
                if failed is not None:
                    continue  # more of what was too much
                rows[key(name, length)] = run(name, length, given, limit)
                with atomic(kept) as temporary:
                    temporary.write_text(json.dumps({"machine": machine, "rows": rows}), encoding="utf-8")
            here = [rows.get(key(other, length)) for other in ("plain", OURS)]
            print(f"T = {length}: " + " | ".join(cells(name, rows[key(name, length)], *here)), flush=True)
    with atomic(given.out / "attention.md") as temporary:
        temporary.write_text(table(rows, given, limit), encoding="utf-8")
    print(f"wrote {given.out / 'attention.md'}")


if __name__ == "__main__":
    main()
