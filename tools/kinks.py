"""Why losses may part that begin within 1e-9 nat of each other: a ReLU unit is on in one training and off in the other.

    python tools/kinks.py FOLDER [--steps 1000] [--batch 32] [--out reports/toy/program-kinks.md]

FOLDER is a checkout of the published program of [Wu] (`tools/published.py`). Two copies of its model are trained in float64
on the same sequences, at the text's scale with sinusoidal encoding. Only their tables of sinusoids differ, by rounding: one
has the program's, whose angles are in float32, the other has ours.

A ReLU's slope jumps at 0. Where the input of a unit is nearer to 0 than the copies are to each other, a sequence may enter
the unit's gradient in one copy alone. AdamW divides a gradient by the size of past ones, so that the step then differs by a
share of the learning rate, however small the input was.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from program import RATES, machine
from published import WIDTH, Draws, fresh, model_there
from torch import Tensor
from torch.nn import functional

from probes.run.files import atomic, table_lines
from toy.experiments.position_bias import RESIDUAL, architecture_of
from toy.model import sinusoids
from toy.train import STEPS_DRAWN, Run, seed_of

SHOWN = (10, 100, 200, 400, 600, 800)  # steps whose difference is shown, beside the last one
AFTER = (1, 10, 100)  # steps after the first unit that differs
TITLE = "# Why two trainings of [Wu]'s program part"
EXPLAINED = (
    "Two copies of the published model differ in the rounding of their sinusoids alone. A unit differs where its input is "
    "above 0 in one copy alone. Differences of the loss are in nats."
)


class Course(NamedTuple):
    """Two copies of a model in training."""

    apart: list[float]  # difference of the losses, by step
    first: int | None  # the first step at which a ReLU unit differs, from 0
    nearest: float  # the larger of its two inputs then, without sign


def inputs_of_units(model: Any, batch: tuple[Tensor, Tensor], optimizer: Any) -> tuple[float, Tensor]:
    """(loss, what the head's ReLU units read, [layer, B, unit]) of one step of training."""
    read: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: read.append(out.detach())) for layer in model.mlp_layers]
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    for hook in hooks:
        hook.remove()
    return loss.item(), torch.stack(read)


def course(draws: Draws, run: Run, steps: int) -> Course:
    """A copy with the program's sinusoids beside one with ours."""
    copies = [model_there(draws, run) for _ in range(2)]
    copies[1].pos_encoding.pe[0, : run.architecture.length] = sinusoids(run.architecture)
    rates: dict[str, Any] = {"lr": run.learning_rate, "weight_decay": run.weight_decay}
    optimizers = [torch.optim.AdamW(model.parameters(), **rates) for model in copies]
    apart, first, nearest = [], None, 0.0
    for step, batch in enumerate(islice(draws.batches(run.task), steps)):
        (one, read), (other, beside) = (
            inputs_of_units(*copy) for copy in zip(copies, [batch] * 2, optimizers, strict=True)
        )
        apart.append(abs(one - other))
        differs = (read > 0) != (beside > 0)
        if first is None and differs.any():
            first, nearest = step, float(torch.maximum(read.abs(), beside.abs())[differs].max())
    return Course(apart, first, nearest)


def shown(residual: str, found: Course) -> list[str]:
    """A line of the table."""
    at = [found.apart[step - 1] if step <= len(found.apart) else None for step in SHOWN]
    if found.first is None:
        behind = ["-"] * (3 + len(AFTER))
    else:
        later = [found.apart[min(found.first + n, len(found.apart) - 1)] for n in AFTER]
        numbers = [found.nearest, found.apart[found.first], *later]
        behind = [str(found.first + 1), *(f"{value:.1e}" for value in numbers)]
    return [residual, *("-" if value is None else f"{value:.1e}" for value in at), f"{found.apart[-1]:.1e}", *behind]


def main() -> None:
    """Train the copies, and write the page."""
    given = argparse.ArgumentParser(description="Why two trainings of [Wu]'s program part.")
    given.add_argument("folder", type=Path, help="a checkout of the program")
    for name, default in {"--steps": 1000, "--batch": 32}.items():
        given.add_argument(name, type=int, default=default)
    given.add_argument("--out", type=Path, default=Path("reports/toy/program-kinks.md"))
    asked = given.parse_args()
    draws = Draws(asked.folder)
    task: Any = draws.tasks(asked.batch)["text"]
    for block in range(-(-asked.steps // STEPS_DRAWN)):
        draws.block(torch.Generator().manual_seed(seed_of(0, block)), STEPS_DRAWN, asked.batch)
    rows = []
    with fresh(torch.float64):
        for residual in RESIDUAL:
            run = Run(architecture_of(2, "causal", "sinusoidal", residual, WIDTH), task, 0, **RATES)
            rows.append(shown(residual, course(draws, run, asked.steps)))
    before = [f"apart, step {step}" for step in SHOWN]
    behind = ["first unit: step", "its input", "apart then", *(f"{n} later" for n in AFTER)]
    table = table_lines(["residual", *before, f"step {asked.steps}", *behind], rows)
    command = f"`python tools/kinks.py {shlex.join(['FOLDER', *sys.argv[2:]])}`"
    settings = f"{asked.steps:,} steps, batch {asked.batch}, 2 blocks, the text's scale. {machine()}"
    with atomic(asked.out) as temporary:
        text = "\n\n".join([TITLE, command, EXPLAINED, settings, "\n".join(table)])
        temporary.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
