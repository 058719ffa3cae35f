"""How far off the estimators are: sketch, plain probes and the scalar surrogate against brute force, on pretrained models.

    python benchmarks/estimators.py [MODEL ...] [--lengths 32,256] [--prompts 2] [--draws 2] [--out reports/jacobian]

A model is a bundled name, `smollm2-135m`, or a path; one that is not there is named and skipped. The truth is every
Jacobian J_j, all d directions pulled back, and held at the shortest length against float64 brute force: plain automatic
differentiation of the model's own modules. Beside the sketch stands what one would use without its basis: the same number
of plain orthonormal, or Gaussian, probes. Errors are relative, root mean square over positions, prompts and draws; "mean
profile" is the error of the root mean square over prompts. Writes `estimators.md`; rows that are there already for the same
options are kept, so that a stopped run resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe

import probes
from probes.errors import InputError
from probes.models.memory import paced
from probes.models.pullback import Apart, Prompt
from probes.models.view import View
from probes.results.curves import rms_log_error, spearman
from probes.run.files import atomic

BUDGETS = (32, 64, 96)
AUTO = 0.02  # the relative error that products="auto" is asked for


def jacobians(model: View, ids: torch.Tensor) -> np.ndarray:
    """Every J_j of one prompt, [position, output direction, d], in the model's dtype."""
    length, width = ids.shape[1], model.spec.width
    pace = paced(model, length)
    prompt = Prompt(model, ids, "residual", [0], Apart(model, 0, "auto"), pace, check=True)
    found = np.empty((length, width, width), dtype=np.float32)
    with prompt.linearized():
        for rows in torch.arange(width).split(pace.chunk):
            found[:, rows[0] : rows[-1] + 1] = prompt.pull(prompt.top()[rows])[0].transpose(0, 1).cpu().numpy()
    return found


def brute_force(source: str, ids: torch.Tensor, device: str) -> np.ndarray:
    """Sensitivities of one prompt in float64: a backward pass of the model's own modules for every direction."""
    model = probes.load(source, device=device, dtype="float64")
    width, step = model.spec.width, 8
    leaf = model.embed(ids).detach().expand(step, -1, -1).clone().requires_grad_()
    output = model.residual(leaf)[:, -1]
    squared = torch.zeros(ids.shape[1], dtype=torch.float64)
    # Widths are multiples of 8, so that every piece has as many directions as the leaf has copies.
    for directions in torch.eye(width, dtype=torch.float64, device=leaf.device).split(step):
        (gradient,) = torch.autograd.grad(output, leaf, directions, retain_graph=True)
        squared += gradient.pow(2).sum((0, 2)).cpu()
    return (squared / width).sqrt().numpy()


def norms(rows: np.ndarray, width: int, scale: float) -> np.ndarray:
    """Sensitivities [position] from pulled rows [position, row, d], whose squares count `scale` times."""
    return np.sqrt(np.einsum("tkd,tkd->t", rows, rows, dtype=np.float64) * scale / width)


def plain(truth: np.ndarray, products: int, kind: str, seed: int) -> np.ndarray:
    """Sensitivities [position] from plain probes."""
    width = truth.shape[1]
    probe = np.random.default_rng(seed).standard_normal((width, products))
    if kind == "orthonormal":
        probe = np.linalg.qr(probe)[0] * width**0.5
    return norms(probe.T.astype(np.float32) @ truth, width, 1 / products)


def errors(estimated: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """(per prompt, of the mean profile), relative, rms over positions that have any sensitivity; both [prompt, position]."""
    seen = exact > 0
    each = estimated[seen] / exact[seen] - 1
    mean, true = (np.sqrt((x**2).mean(0)) for x in (estimated, exact))
    return float(np.sqrt((each**2).mean())), float(np.sqrt(((mean[true > 0] / true[true > 0] - 1) ** 2).mean()))


def measured(model: View, tokens: torch.Tensor, draws: int, source: str, brute: bool) -> dict[str, Any]:
    """All rows of one model at one length, as numbers."""
    truth = [jacobians(model, ids[None]) for ids in tokens]
    exact = np.stack([norms(found, model.spec.width, 1.0) for found in truth])
    seen, rows = exact > 0, []
    for budget in [budget for budget in BUDGETS if budget < model.spec.width]:
        pairs: dict[str, list[tuple[float, float]]] = {"sketch": [], "orthonormal": [], "Gaussian": []}
        inside, spent = [], 0.0
        for seed in range(draws):
            sketch = probes.jacobian(model, tokens, method="sketch", products=budget, seed=seed)
            values, stderr = sketch["sensitivity"].values, sketch["stderr"].values
            inside.append((abs(values - exact) <= 1.96 * stderr)[seen].mean())
            spent = float(sketch["products"].mean())
            pairs["sketch"].append(errors(values, exact))
            for kind in ("orthonormal", "Gaussian"):
                drawn = [plain(one, budget, kind, 1000 * seed + n) for n, one in enumerate(truth)]
                pairs[kind].append(errors(np.stack(drawn), exact))
        mean = {kind: [float(x) for x in np.sqrt(np.mean(np.square(found), axis=0))] for kind, found in pairs.items()}
        rows.append({"spent": spent, "inside": float(np.mean(inside)), **mean})
    auto = probes.jacobian(model, tokens, method="sketch", products="auto", relative_error=AUTO)
    scalar = probes.jacobian(model, tokens, method="scalar")["sensitivity"].values
    each = [rms_log_error(scalar[n][seen[n]], exact[n][seen[n]]) for n in range(len(exact))]
    profile, true = (np.sqrt((x[:, seen.all(0)] ** 2).mean(0)) for x in (scalar, exact))
    found = {
        "rows": rows,
        "auto": [float(auto["products"].mean()), *errors(auto["sensitivity"].values, exact)],
        "scalar": [float(np.sqrt(np.mean(np.square(each)))), rms_log_error(profile, true), spearman(profile, true)],
    }
    if brute:
        reference = brute_force(source, tokens[:1], str(model.device))
        found["brute"] = float(np.max(np.abs(exact[0][seen[0]] / reference[seen[0]] - 1)))
    return found


def section(name: str, length: int, prompts: int, found: dict[str, Any]) -> list[str]:
    """The rows as lines of Markdown."""
    columns = ["products", "sketch", "sketch, mean profile", "inside 95 % interval", "orthonormal", "Gaussian"]
    lines = ["", f"## {name}, T = {length}, {prompts} prompt{'s' * (prompts > 1)}", "", f"| {' | '.join(columns)} |"]
    lines.append("|---" * len(columns) + "|")
    for row in found["rows"]:
        cells = [f"{row['spent']:.1f}", f"{row['sketch'][0]:.2%}", f"{row['sketch'][1]:.2%}", f"{row['inside']:.0%}"]
        lines.append(f"| {' | '.join([*cells, *(f'{row[kind][0]:.2%}' for kind in ('orthonormal', 'Gaussian'))])} |")
    spent, own, mean = found["auto"]
    error, of_mean, rank = found["scalar"]
    lines += [
        "",
        f'`products="auto"`, relative error {AUTO:.0%}: {spent:.1f} products, {mean:.2%} off (mean profile), {own:.2%} (one '
        "prompt).",
        f"Scalar (one product, all ones): RMS log error {error:.2f} per prompt, {of_mean:.2f} of the mean profile; rank "
        f"correlation {rank:.3f}.",
    ]
    brute = "Exact against float64 brute force, largest relative difference over positions: {:.1e}."
    return lines + ([brute.format(found["brute"])] if "brute" in found else [])


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*probes.bundled(), "smollm2-135m"])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--lengths", default="32,256")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("reports/jacobian"))
    given = parser.parse_args()
    lengths = sorted(int(length) for length in given.lengths.split(","))
    kept = given.out / "estimators.json"
    known: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    lines = [
        "# Estimators against the exact norm",
        "",
        "`python benchmarks/estimators.py MODEL --lengths T --prompts N --draws N`",
        "",
        "Pretrained weights (those of GGUF files dequantized), float32, bundled code as text. Relative error of the norm, "
        "root mean square over positions; products spent include what the sketch's basis costs.",
    ]
    for source in given.models:
        try:
            model = probes.load(source, device=given.device)
        except InputError as error:
            print(f"{source}: skipped ({error})", flush=True)
            continue
        for length in lengths:
            key = f"{model.identity.name} {length} {given.prompts} {given.draws} {model.identity.weights[:12]}"
            if key not in known:
                tokens = probes.prompts(model, n=given.prompts, length=length)
                found = measured(model, tokens, given.draws, source, length == lengths[0])
                known[key] = {"name": model.identity.name, "length": length, "prompts": given.prompts, **found}
                with atomic(kept) as temporary:
                    temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
            print("\n".join(section(model.identity.name, length, given.prompts, known[key])), flush=True)
    for found in sorted(known.values(), key=lambda one: (one["name"], one["length"])):
        lines += section(found["name"], found["length"], found["prompts"], found)
    lines += ["", describe(given.device if given.device != "auto" else "cpu"), ""]
    with atomic(given.out / "estimators.md") as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    print(f"wrote {given.out / 'estimators.md'}")


if __name__ == "__main__":
    main()
