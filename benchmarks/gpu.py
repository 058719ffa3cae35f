"""A GPU at the shapes of published models, with random weights: `python benchmarks/gpu.py` (a CPU runs --quick).

    python benchmarks/gpu.py [--quick] [--only attention,jacobian,load,commands] [--seconds 300]

Every number is the best of a few calls after one that warms up; the peak of memory is what PyTorch's allocator gave above
what lay there before. What is begun is finished; nothing is begun after `--seconds`.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import MIB, VOCABULARY, parser, random_tokens, section
from jacobian import last_stream
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import probes

# Width, feed-forward, blocks, heads, key-value heads.
SHAPES = {"0.5B": (896, 4864, 24, 14, 2), "7B": (3584, 18944, 28, 28, 4), "tiny": (128, 352, 4, 2, 2)}
SMALL: dict[str, Any] = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMALL |= {"num_attention_heads": 9, "num_key_value_heads": 3}  # SmolLM2-135M
KEYS = 8
TEXT = (
    "Random weights at the shapes of Qwen2.5-0.5B and of a 7B model, in bfloat16, one prompt of T random tokens, and at the "
    "shape of SmolLM2-135M in float32, many prompts. Memory is the peak above the loaded model. A plain pass is "
    "transformers' own (sdpa, no logits); of many prompts, all of them in one batch where they fit."
)
Row = list[str]


def model(size: str, length: int, device: str) -> Any:
    """A random model of a shape, on the device."""
    width, inner, blocks, heads, kv = SHAPES[size]
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": blocks}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": length}
    shape["initializer_range"] = 0.04
    half = torch.float32 if device == "cpu" else torch.bfloat16
    return made(Qwen2Config(vocab_size=VOCABULARY, **shape), device, half)


def made(config: Any, device: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def timed(call: Callable[[], object], times: int = 2) -> tuple[float, float]:
    """(seconds of the best call, MiB above before) after one call to warm up; NaN where memory runs out."""
    cuda = torch.cuda.is_available()
    try:
        call()
        gc.collect()
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds), (torch.cuda.max_memory_allocated() - before) / MIB if cuda else float("nan")
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return float("nan"), float("nan")


def row(
    what: str, ours: tuple[float, float], other: str = "", beside: tuple[float, float] = (float("nan"), float("nan"))
) -> Row:
    """What was measured, ours, the other, and how many times the other's seconds ours are."""

    def cells(pair: tuple[float, float]) -> list[str]:
        return ["" if np.isnan(value) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in pair]

    lost = other and np.isnan(beside[0])
    ratio = "" if not other else "out of memory" if lost else f"{ours[0] / beside[0]:.2f}"
    found = [what, *cells(ours), other, *cells(beside), ratio]
    print(" | ".join(found), file=sys.stderr, flush=True)
    return found


def eager(whole: Any, ids: Tensor) -> list[Tensor]:
    """Column sums of the patterns that transformers hands over."""
    whole.set_attn_implementation("eager")
    try:
        patterns = whole.model(ids, use_cache=False, output_attentions=True).attentions
        return [pattern[0].float().sum(-2) for pattern in patterns]
    finally:
        whole.set_attn_implementation("sdpa")


def attention(device: str, quick: bool) -> Iterator[Row]:
    """Sinks beside plain passes, and beside whole patterns."""
    for size, lengths in (("tiny", (64,)),) if quick else (("0.5B", (4096, 16384)), ("7B", (4096, 16384))):
        whole = model(size, max(lengths), device)
        for length in lengths:
            yield from sinks(whole, random_tokens(length).to(device), f"{size}, T = {length:,}")
        del whole
        gc.collect()


def sinks(whole: Any, ids: Tensor, what: str) -> Iterator[Row]:
    """The rows of one length."""
    view = probes.load(whole)
    with torch.no_grad():
        plain = timed(lambda: whole.model(ids, use_cache=False), 3)
        patterns = timed(lambda: eager(whole, ids))
    few = timed(lambda: probes.sinks(view, ids, keys=tuple(range(KEYS))))
    yield row(f"sinks, {KEYS} keys, {what}", few, "a plain pass", plain)
    yield row(f"sinks, {KEYS} keys, {what}", few, "`output_attentions`", patterns)
    yield row(f"sinks, all keys, {what}", timed(lambda: probes.sinks(view, ids, keys="all")), "a plain pass", plain)


def replicated(whole: Any, ids: Tensor, copies: int) -> Tensor:
    """||J_j||_F^2 by repeating the prompt for so many directions at a time, the forward pass each time."""
    total, width = torch.zeros((), device=ids.device), whole.config.hidden_size
    for start in range(0, width, copies):
        rows = min(copies, width - start)
        embedded = whole.model.embed_tokens(ids).detach().expand(rows, -1, -1).clone().requires_grad_()
        last = last_stream(whole, embedded)[:, -1]
        cotangent = torch.zeros_like(last)
        cotangent[torch.arange(rows), torch.arange(start, start + rows)] = 1
        (gradient,) = torch.autograd.grad(last, embedded, cotangent)
        total = total + gradient.float().square().sum((0, 2))
    return total


def jacobian(device: str, quick: bool) -> Iterator[Row]:
    """The exact Jacobian beside repeated prompts; sketches beside plain passes."""
    size, length = ("tiny", 64) if quick else ("0.5B", 512)
    whole, ids = model(size, length, device), random_tokens(length).to(device)
    view = probes.load(whole)
    ours = timed(lambda: probes.jacobian(view, ids, method="exact"))
    for copies in (8, 32):
        beside = timed(lambda copies=copies: replicated(whole, ids, copies), 1)
        yield row(f"exact Jacobian, {size}, T = {length}", ours, f"the prompt repeated {copies} times", beside)
    norms = probes.jacobian(view, ids, method="exact")["sensitivity"].values[0] * whole.config.hidden_size**0.5
    gap = np.abs(norms / replicated(whole, ids, 32).double().sqrt().cpu().numpy() - 1)
    print(f"largest difference of the norms {gap.max():.1e}, median {np.median(gap):.1e}", file=sys.stderr)
    del whole, view
    gc.collect()
    size, length = ("tiny", 64) if quick else ("7B", 2048)
    whole, ids = model(size, length, device), random_tokens(length).to(device)
    view = probes.load(whole)
    with torch.no_grad():
        plain = timed(lambda: whole.model(ids, use_cache=False), 3)
    for products in (16, 64):
        ours = timed(lambda products=products: probes.jacobian(view, ids, method="sketch", products=products))
        yield row(f"sketch of {products} products, {size}, T = {length:,}", ours, "a plain pass", plain)


def load(device: str, quick: bool) -> Iterator[Row]:
    """A model that is in memory already, its hash taken."""
    whole = model("tiny" if quick else "7B", 64, device)
    began = time.perf_counter()
    named = probes.load(whole).identity.weights
    seconds = time.perf_counter() - began
    yield row(f"`probes.load` of a model in memory, and its hash ({named[:8]})", (seconds, float("nan")))


def commands(device: str, quick: bool) -> Iterator[Row]:
    """Measures of many prompts on a small model."""
    shape: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    config = LlamaConfig(**(shape if quick else SMALL), max_position_embeddings=2048, initializer_range=0.04)
    whole = made(config, device)
    view, small = probes.load(whole), 16 if quick else 1
    cases: dict[str, tuple[int, int, Callable[[Tensor], object]]] = {
        "sinks": (32, 256, lambda ids: probes.sinks(view, ids)),
        "sinks, all keys": (32, 256, lambda ids: probes.sinks(view, ids, keys="all")),
        "trajectory": (128, 256, lambda ids: probes.trajectory(view, ids)),
        "leakage": (512, 128, lambda ids: probes.leakage(view, ids)),
        "bos-swap, `mean`": (64, 128, lambda ids: probes.bos_swap(view, ids, replacement="mean")),
        "bos-swap, `mean@1:keys`": (64, 128, lambda ids: probes.bos_swap(view, ids, replacement="mean@1:keys")),
        "Jacobian, exact": (48, 256, lambda ids: probes.jacobian(view, ids, method="exact")),
        "Jacobian, sketch of 64": (48, 256, lambda ids: probes.jacobian(view, ids, method="sketch")),
    }
    for name, (prompts, length, call) in cases.items():
        ids = random_tokens(max(16, length // small), max(4, prompts // small), config.vocab_size).to(device)
        with torch.no_grad():
            plain = timed(lambda ids=ids: [whole.model(some, use_cache=False) for some in ids.split(64)])
        ours = timed(lambda call=call, ids=ids: call(ids), 1)
        yield row(f"{name}, SmolLM2, {len(ids)} prompts of {ids.shape[1]}", ours, "plain passes", plain)


PARTS = {"attention": attention, "jacobian": jacobian, "load": load, "commands": commands}


def main() -> None:
    """Print the section."""
    options = parser(__doc__)
    options.add_argument("--only", type=lambda names: names.split(","), default=list(PARTS), help=",".join(PARTS))
    options.add_argument("--seconds", type=float, default=300)
    given, began, rows = options.parse_args(), time.time(), []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.quick:
        options.error("there is no CUDA device here; --quick runs small shapes on the CPU")
    for name in given.only:
        for line in PARTS[name](device, given.quick):
            rows.append(line)
            if time.time() - began > given.seconds:
                break
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    columns = ["ours", "seconds", "MiB", "beside", "seconds", "MiB", "ours / beside, seconds"]
    print(section("On a GPU", TEXT, columns, rows, device))


if __name__ == "__main__":
    main()
