"""How far theories are from the exact Jacobian norm of fresh models, by family and by d sigma^2.

    python benchmarks/theory.py [families] [strengths] [--seeds 4] [--out reports/theory]

Errors are means over positions of |predicted / measured - 1|, prediction and measurement averaged over the seeds first; of
N^L ([Chowdhury], arXiv 2603.10123), whose alpha is fitted and scale is free, the RMS log error. Tokens are random. Writes
`families.md` and `strengths.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe

import probes
from probes.models.load import fresh
from probes.results.curves import relative_error, rms_log_error, spearman
from probes.results.ushape import shape_of
from probes.run.files import atomic
from probes.theory.cesaro import fit_alpha
from probes.theory.kernel import second_moment, second_moment_from_config

LENGTH = 96
KERNELS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "measured": {"attention": "measured"},
    "score path": {"attention": "measured", "score_path": True},
}
HEAD = "uniform | measured | score path | config only | N^L (alpha) | value share"
SHAPE = "primacy | recency | RoPE"


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


def measured(config: Mapping[str, Any], seeds: int, length: int, **sketch: Any) -> tuple[str, str]:
    """(the cells of `HEAD`, the cells of `SHAPE`) for fresh models of one configuration, averaged over seeds."""
    curves: dict[str, Any] = {}
    for seed in range(seeds):
        model = fresh(config, seed)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(2, model.spec.vocabulary, (1, length), generator=generator)
        paths = probes.jacobian(model, tokens, pathway="all", **sketch)["sensitivity"]
        profiles = {path: paths.sel(pathway=path) for path in ("total", "value", "score")}
        profiles |= {name: second_moment(model, tokens, **more)["sensitivity"] for name, more in KERNELS.items()}
        profiles["config only"] = second_moment_from_config(dict(config), tokens=tokens)["sensitivity"]
        profiles["bare"] = probes.jacobian(fresh(config, seed, positional=False), tokens, **sketch)["sensitivity"]
        for name, profile in profiles.items():
            curves[name] = curves.get(name, 0) + profile.values[0] / seeds
    total, fit = curves["total"], fit_alpha(curves["total"], model.spec.blocks, window=model.spec.windows)
    errors = [f"{relative_error(curves[name], total):.1%}" for name in (*KERNELS, "config only")]
    seen = (total > 0) & (fit.curve > 0)
    cesaro = rms_log_error(fit.curve[seen], total[seen], free_scale=True)
    share = np.mean(curves["value"][total > 0] / total[total > 0])
    shape = shape_of(total)
    ends = f"{shape.primacy:.3g} | {shape.recency:.3g} | {spearman(total, curves['bare']):.3f}"
    return " | ".join([*errors, f"{cesaro:.1%} ({fit.alpha:.2f})", f"{share:.3f}"]), ends


def families(seeds: int) -> list[str]:
    """Lines of the table by family."""
    lines = [
        f"Eight families, 12 blocks, width 256, initializer range 0.02, T = {LENGTH}, exact.",
        "",
        f"| family | {HEAD} |",
        "|---" * 7 + "|",
    ]
    for name, config in FAMILIES.items():
        lines.append(f"| {name} | {measured(config, seeds, LENGTH)[0]} |")
        print(lines[-1], flush=True)
    return lines


def strengths(seeds: int) -> list[str]:
    """Lines of the table by d sigma^2."""
    lines = [
        "Qwen2, 8 blocks, T = 64, exact; at width 896 6 blocks and a sketch of 128 products. Primacy and recency are "
        "the mean curve's; RoPE: rank correlation of the profiles with and without rotation.",
        "",
        f"| width, initializer range | d sigma^2 | {HEAD} | {SHAPE} |",
        "|---" * 11 + "|",
    ]
    rows: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        (f"256, {sigma:g}", f"{256 * sigma**2:.2g}", grouped("qwen2", blocks=8, sigma=sigma), {})
        for sigma in (0.02, 0.04, 0.06, 0.08)
    ]
    rows.insert(1, ("896, 0.02", "0.36", grouped("qwen2", width=896, blocks=6), {"method": "sketch", "products": 128}))
    normed = grouped("qwen3", blocks=8, head_dim=64)
    rows.append(("256, 0.02, queries and keys normed (Qwen3)", "0.1, logits of order 1", normed, {}))
    for name, strength, config, sketch in rows:
        lines.append(f"| {name} | {strength} | {' | '.join(measured(config, seeds, 64, **sketch))} |")
    return lines


TABLES = {"families": families, "strengths": strengths}


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("reports/theory"))
    given = parser.parse_args()
    for table in given.tables:
        if table not in TABLES:
            parser.error(f"table '{table}' does not exist; use {', '.join(TABLES)}")
    for table in given.tables:
        lines = [
            "# Theories against the Jacobian norm of fresh models",
            "",
            f"`python benchmarks/theory.py {table} --seeds {given.seeds}`",
            "",
            f"Mean over positions of |predicted / measured - 1|, averaged over {given.seeds} seeds first; N^L: RMS log "
            "error with fitted alpha and free scale. Value share: norm of the value path (patterns constant) against the "
            "whole, mean over positions. Random tokens, float32.",
            "",
            *TABLES[table](given.seeds),
            "",
            f"Machine: {describe('cpu')}.",
            "",
        ]
        print("\n".join(lines))
        with atomic(given.out / f"{table}.md") as temporary:
            temporary.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
