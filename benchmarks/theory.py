"""How far theories are from the exact Jacobian norm of fresh models, by family and by d sigma^2; and what each costs.

    python benchmarks/theory.py [--seeds 4] [--out reports/theory]

Errors are means over positions of |predicted / measured - 1|, prediction and measurement averaged over the seeds first; of
N^L ([Chowdhury], arXiv 2603.10123), whose alpha is fitted and scale is free, the RMS log error. Tokens are random. Writes
`errors.md`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe

import probes
from probes.files import atomic
from probes.models.load import fresh
from probes.models.view import View
from probes.summary import relative_error, rms_log_error, spearman, ushape
from probes.theory import fit_alpha, second_moment, second_moment_from_config

LENGTH = 96
KERNELS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "measured": {"attention": "measured"},
    "score path": {"attention": "measured", "score_path": True},
}
HEAD = "uniform | measured | score path | config only | N^L (alpha) | value share"


def grouped(kind: str, *, width: int = 256, blocks: int = 12, sigma: float = 0.02, **more: Any) -> dict[str, Any]:
    """A configuration with grouped-query attention, head width 64."""
    return {
        "model_type": kind,
        "vocab_size": 1024,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
        "num_key_value_heads": 2,
        "intermediate_size": 3 * width,
        "initializer_range": sigma,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | more


GPT2 = {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 256, "n_layer": 12, "n_head": 4, "bos_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": grouped("qwen2"),
    "Llama": grouped("llama"),
    "Mistral, window 32": grouped("mistral", sliding_window=32),
    "GPT-2": GPT2 | {"n_positions": 1024, "eos_token_id": 1},
    "GPT-NeoX": grouped("gpt_neox", num_key_value_heads=None),
    "Gemma": grouped("gemma", head_dim=64),
    "Gemma-2, window 32": grouped("gemma2", head_dim=64, query_pre_attn_scalar=64, sliding_window=32),
    "Qwen3 (queries and keys normed)": grouped("qwen3", head_dim=64),
}


class Measured:
    """Exact profiles of fresh models of one configuration and all theories', averaged over seeds."""

    def __init__(self, config: Mapping[str, Any], seeds: int, length: int) -> None:
        sums: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        for seed in range(seeds):
            model = fresh(config, seed)
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(2, model.spec.vocabulary, (1, length), generator=generator)
            for name, profile in self._profiles(model, tokens, config):
                sums[name] = sums.get(name, 0) + profile / seeds
            bare = fresh(config, seed, positional=False)
            sums["bare"] = sums.get("bare", 0) + probes.jacobian(bare, tokens)["sensitivity"].values[0] / seeds
        self.curves = sums
        self.spec = model.spec
        self.fit = fit_alpha(sums["total"], self.spec.blocks, window=self.spec.windows)

    def _profiles(
        self, model: View, tokens: torch.Tensor, config: Mapping[str, Any]
    ) -> Iterable[tuple[str, np.ndarray]]:
        began = time.perf_counter()
        exact = probes.jacobian(model, tokens, pathway="all")["sensitivity"]
        self.seconds["exact, by pathway"] = time.perf_counter() - began
        for path in ("total", "value", "score"):
            yield path, exact.sel(pathway=path).values[0]
        for name, options in KERNELS.items():
            began = time.perf_counter()
            yield name, second_moment(model, tokens, **options)["sensitivity"].values[0]
            self.seconds[name] = time.perf_counter() - began
        began = time.perf_counter()
        yield "config only", second_moment_from_config(dict(config), tokens=tokens)["sensitivity"].values[0]
        self.seconds["config only"] = time.perf_counter() - began

    def errors(self) -> str:
        """The cells of `HEAD`."""
        total = self.curves["total"]
        cells = [f"{relative_error(self.curves[name], total):.1%}" for name in (*KERNELS, "config only")]
        seen = (total > 0) & (self.fit.curve > 0)
        cesaro = rms_log_error(self.fit.curve[seen], total[seen], free_scale=True)
        share = np.mean(self.curves["value"][total > 0] / total[total > 0])
        return " | ".join([*cells, f"{cesaro:.1%} ({self.fit.alpha:.2f})", f"{share:.3f}"])

    def shape(self) -> str:
        """Primacy, recency, and how much the order of positions depends on positional encoding."""
        shape = ushape(self.curves["total"])
        return f"{shape.primacy:.3g} | {shape.recency:.3g} | {spearman(self.curves['total'], self.curves['bare']):.3f}"


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("reports/theory"))
    given = parser.parse_args()

    lines = [
        "# Theories against the exact Jacobian norm of fresh models",
        "",
        f"`python benchmarks/theory.py --seeds {given.seeds}`",
        "",
        f"Mean over positions of |predicted / measured - 1|, averaged over {given.seeds} seeds first; N^L: RMS log error "
        "with fitted alpha and free scale. Value share: norm of the value path (patterns constant) against the whole, mean "
        "over positions. Random tokens, float32.",
        "",
        f"## Families: 12 blocks, width 256, initializer range 0.02, T = {LENGTH}",
        "",
        f"| family | {HEAD} |",
        "|---" * 7 + "|",
    ]
    for name, config in FAMILIES.items():
        found = Measured(config, given.seeds, LENGTH)
        lines.append(f"| {name} | {found.errors()} |")
        print(lines[-1], flush=True)
        if name == "Qwen2":
            timed = found.seconds
    lines += [
        "",
        "Seconds on the first of them, one prompt: " + ", ".join(f"{name} {s:.2f}" for name, s in timed.items()) + ".",
        "",
        "## d sigma^2: Qwen2, 8 blocks (width 896: 6), T = 64",
        "",
        "Primacy and recency as in `headwater jacobian`; RoPE: rank correlation of the profiles with and without rotation.",
        "",
        f"| width, initializer range | d sigma^2 | {HEAD} | primacy | recency | RoPE |",
        "|---" * 11 + "|",
    ]
    for width, blocks, sigma in ((256, 8, 0.02), (896, 6, 0.02), (256, 8, 0.04), (256, 8, 0.06), (256, 8, 0.08)):
        found = Measured(grouped("qwen2", width=width, blocks=blocks, sigma=sigma), given.seeds, 64)
        strength = width * sigma**2
        lines.append(f"| {width}, {sigma:g} | {strength:.2g} | {found.errors()} | {found.shape()} |")
        print(lines[-1], flush=True)
    found = Measured(grouped("qwen3", blocks=8, head_dim=64), given.seeds, 64)
    lines.append(
        f"| 256, 0.02, queries and keys normed | 0.1, logits of order 1 | {found.errors()} | {found.shape()} |"
    )
    print(lines[-1], flush=True)
    lines += ["", f"Machine: {describe('cpu')}.", ""]
    with atomic(given.out / "errors.md") as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
