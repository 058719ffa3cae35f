"""Attention on the first keys: ours against whole patterns, over the prompt's length, `python benchmarks/sinks.py`.

Every contender runs in a process of its own at every length. The plain pass that times are divided by is timed in turn
with the contender, in the same process.
"""

import copy
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from common import MIB, llama, parser, peak_of, random_tokens, ratio, section, turns
from torch import Tensor

import probes

KEYS = 8
SHORT = 32  # of the prompt before the memory's level is taken: libraries are loaded by then, the weights hashed
CONTENDERS = {
    "sinks": f"`probes.sinks`, {KEYS} keys",
    "plain": "plain forward pass (transformers, sdpa, no logits)",
    "sinks all": '`probes.sinks`, `keys="all"`',
    "eager": "transformers, `output_attentions=True`",
    "hooks": "TransformerLens, `run_with_hooks`, pattern by pattern",
}
TEXT = (
    "One prompt of T random tokens; random Llama, float32; a process for each contender. Times are multiples of the plain "
    "pass timed in turn; one round at T = 8,192. Memory is the peak above the loaded "
    "model. All but the plain pass end with [Gu]'s alpha of the first keys, which `probes.sinks` gives beside the other "
    "statistics of sinks; the last column is its largest difference at key 0. `output_attentions` collects the patterns of "
    "all blocks; hooks reduce each pattern as it passes, the best that can be done with a pattern that is there as a whole."
)


def alpha_of(pattern: Tensor) -> Tensor:
    """[Gu]'s alpha [head, key] of the first keys from a whole pattern [1, H, T, T]."""
    return pattern[0, :, :, :KEYS].sum(-2) / (pattern.shape[-1] - torch.arange(KEYS))


def contender(name: str, model: Any) -> Callable[[Tensor], Tensor | None]:
    """A function of tokens that gives alpha [layer, head, key] of the first keys, or nothing (the plain pass)."""
    if name.startswith("sinks"):
        view = probes.load(model)
        keys: Any = "all" if name == "sinks all" else tuple(range(KEYS))

        def ours(ids: Tensor) -> Tensor:
            alpha = probes.sinks(view, ids, keys=keys)["alpha"].isel(prompt=0, missing_dims="ignore")
            return torch.from_numpy(alpha.values[..., :KEYS])

        return ours
    other: Any = copy.deepcopy(model)
    if name == "plain":
        return lambda ids: (other.model(ids, use_cache=False), None)[1]
    other.set_attn_implementation("eager")
    if name == "eager":
        return lambda ids: torch.stack(
            [alpha_of(pattern) for pattern in other.model(ids, use_cache=False, output_attentions=True).attentions]
        )
    # Not above: one contender needs TransformerLens, which takes long to import.
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    bridge: Any = build_bridge_from_module(other, type(other).__name__, hf_config=other.config, model_name="random")
    points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(other.config.num_hidden_layers)]

    def hooked(ids: Tensor) -> Tensor:
        alphas: list[Tensor] = []
        hooks = [(point, lambda pattern, hook: alphas.append(alpha_of(pattern))) for point in points]
        bridge.run_with_hooks(ids, return_type=None, fwd_hooks=hooks)
        return torch.stack(alphas)

    return hooked


@torch.no_grad()
def measured(name: str, width: int, blocks: int, length: int) -> tuple[dict[str, list[float]], int, np.ndarray | None]:
    """(seconds of the contender and of the plain pass by round, bytes at the peak, alpha of key 0)."""
    model = llama(width, blocks, heads=4, length=max(4096, length))
    plain, own = contender("plain", model), contender(name, model)
    for call in (plain, own):
        call(random_tokens(SHORT))
    tokens = random_tokens(length)
    alpha, peak = peak_of(lambda: own(tokens))
    rounds = 7 if length <= 1024 else 3 if length <= 4096 else 1
    seconds = turns({"own": lambda: own(tokens), "plain": lambda: plain(tokens)}, rounds)
    return seconds, peak, None if alpha is None else alpha[..., 0].double().numpy()


def rows(width: int, blocks: int, length: int) -> list[list[str]]:
    """Every contender at one length, ours first."""
    lines, ours = [], None
    for name, words in CONTENDERS.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            seconds, peak, alpha = alone.submit(measured, name, width, blocks, length).result()
        ours = ours or (peak, alpha)
        off = "" if alpha is None else f"{np.abs(alpha - ours[1]).max():.0e}"
        times, memory = ratio(seconds["own"], seconds["plain"]), f"{peak / ours[0]:.1f}"
        lines.append([f"{length:,}", words, times, f"{peak / MIB:,.0f}", memory, off])
    return lines


def main() -> None:
    """Print the section."""
    quick = parser(__doc__).parse_args().quick
    width, blocks, lengths = (128, 2, (128, 256)) if quick else (256, 4, (256, 1024, 4096, 8192))
    body = [row for length in lengths for row in rows(width, blocks, length)]
    columns = ["T", "", "time / plain pass", "MiB above the model", "memory / ours, 8 keys", "alpha differs by"]
    print(section("Sinks", f"Width {width}, {blocks} blocks of 4 heads. {TEXT}", columns, body))


if __name__ == "__main__":
    main()
