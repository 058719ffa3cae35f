"""How far off the estimators are: error of sketch and scalar against exact, over products, on pretrained models.

    python benchmarks/estimators.py [MODEL ...] [--prompts 4] [--length 256] [--out reports/jacobian]

Beside the sketch stands what one would use without its basis: the same number of plain orthonormal, or Gaussian, probes.
Errors are relative, root mean square over positions, prompts and draws; "mean profile" is the error of the root mean square
over prompts. Writes `estimators.md`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from machine import describe

import probes
from probes.files import atomic
from probes.jacobian import _Apart, _Estimate, _Pace, _Prompt, _Reporter
from probes.models.view import View
from probes.summary import rms_log_error, spearman

BUDGETS = (32, 64, 96)


def plain(model: View, tokens: torch.Tensor, products: int, kind: str, seed: int) -> np.ndarray:
    """Sensitivities from plain probes, [prompt, position]."""
    width, rows = model.spec.width, []
    for n in range(len(tokens)):
        pace = _Pace.of(model, tokens.shape[1], 0, None)
        prompt = _Prompt(model, tokens[n : n + 1], "residual", [0], _Apart.of(model, 0, "auto"), pace, check=False)
        generator = torch.Generator().manual_seed(1000 * seed + n)
        estimate = _Estimate(width, generator)
        with prompt.linearized():
            if kind == "orthonormal":
                estimate.add_probes(prompt, products, _Reporter(None, products))
                squared = estimate.squared()[0]
            else:
                gaussian = torch.randn(width, products, generator=generator, dtype=torch.float64)
                estimate.add_exact(prompt, gaussian / products**0.5, _Reporter(None, products))
                squared = estimate.squared()[0]
        rows.append((squared / width).sqrt())
    return torch.stack(rows).numpy()


def errors(estimated: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """(per prompt, of the mean profile), relative, rms over positions that have any sensitivity."""
    seen = exact > 0
    each = estimated[seen] / exact[seen] - 1
    mean, true = (np.sqrt((x**2).mean(0)) for x in (estimated, exact))
    return float(np.sqrt((each**2).mean())), float(np.sqrt(((mean[true > 0] / true[true > 0] - 1) ** 2).mean()))


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=probes.bundled())
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("reports/jacobian"))
    given = parser.parse_args()

    lines = [
        "# Estimators against the exact norm",
        "",
        f"`python benchmarks/estimators.py {' '.join(given.models)} --prompts {given.prompts} --length {given.length} "
        f"--draws {given.draws}`",
        "",
        f"Pretrained weights, float32, T = {given.length}, {given.prompts} prompts, {given.draws} draws. Relative error of "
        "the norm, root mean square over positions; products spent include what the sketch's basis costs.",
    ]
    for name in given.models:
        model = probes.load(name, device=given.device)
        tokens = probes.prompts(model, n=given.prompts, length=given.length)
        exact = probes.jacobian(model, tokens)["sensitivity"].values
        scalar = probes.jacobian(model, tokens, method="scalar")["sensitivity"].values
        lines += [
            "",
            f"## {name} (d = {model.spec.width})",
            "",
            "| products | sketch | sketch, mean profile | inside 95 % interval | orthonormal | Gaussian |",
            "|---|---|---|---|---|---|",
        ]
        for budget in BUDGETS:
            if budget >= model.spec.width:
                continue
            found: dict[str, list[tuple[float, float]]] = {"sketch": [], "orthonormal": [], "gaussian": []}
            inside, spent = [], 0.0
            for seed in range(given.draws):
                sketch = probes.jacobian(model, tokens, method="sketch", products=budget, seed=seed)
                values, stderr = sketch["sensitivity"].values, sketch["stderr"].values
                inside.append((abs(values - exact) <= 1.96 * stderr)[exact > 0].mean())
                spent = float(sketch["products"].mean())
                found["sketch"].append(errors(values, exact))
                for kind in ("orthonormal", "gaussian"):
                    found[kind].append(errors(plain(model, tokens, budget, kind, seed), exact))
            mean = {kind: np.sqrt(np.mean(np.square(pairs), axis=0)) for kind, pairs in found.items()}
            lines.append(
                f"| {spent:.1f} | {mean['sketch'][0]:.2%} | {mean['sketch'][1]:.2%} | {np.mean(inside):.0%} | "
                f"{mean['orthonormal'][0]:.2%} | {mean['gaussian'][0]:.2%} |"
            )
            print(name, lines[-1], flush=True)
        seen = (exact > 0).all(0)
        profile, truth = (np.sqrt((x[:, seen] ** 2).mean(0)) for x in (scalar, exact))
        each = [rms_log_error(scalar[n][exact[n] > 0], exact[n][exact[n] > 0]) for n in range(len(exact))]
        lines += [
            "",
            f"Scalar (one product, all ones): RMS log error {np.sqrt(np.mean(np.square(each))):.2f} per prompt, "
            f"{rms_log_error(profile, truth):.2f} of the mean profile; rank correlation {spearman(profile, truth):.3f}.",
        ]
        print(lines[-1], flush=True)
    lines += ["", describe(given.device if given.device != "auto" else "cpu"), ""]
    with atomic(given.out / "estimators.md") as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    print(f"wrote {given.out / 'estimators.md'}")


if __name__ == "__main__":
    main()
