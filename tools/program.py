"""Train the published program of [Wu] and ours from the same weights on the same sequences, and compare the losses.

    python tools/program.py FOLDER [--steps 1000] [--batch 128] [--depth 2] [--out reports/toy/program.md]

FOLDER is a checkout of the published program (`tools/published.py`). Its model, data set and training loop run with torch's
AdamW at its rates. Ours is `toy.train.train`. Both compute in float64 and begin with our fresh weights. The program's data
set draws the sequences for both; at the text's scale they are multiplied by 8.

Both programs keep some numbers of the encodings in float32, whatever the weights are. Each setting is therefore trained
twice: "as written", and "all in float64", where every cast to float32 becomes one to float64.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from published import WIDTH, Draws, fresh, model_there, named_there
from torch import Tensor
from torch.nn import functional

from probes.run.files import atomic, table_lines
from probes.run.hardware import hardware
from toy.experiments.position_bias import POSITIONAL, RESIDUAL, SCALES, architecture_of
from toy.tasks import Drawn, InContext
from toy.train import Run, train

RATES: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 1e-6}
MASKS = ("full", "window-5", "window-9", "window-13", "prefix-2", "prefix-4", "prefix-6")
MASK_STEPS = 20
TESTS = 6  # sets on which the program's loop measures accuracy, here before the first step alone
MARGIN = 1e-6  # nats, by which losses may differ at the last step
EARLY = (10, 100)  # steps whose largest difference is shown
LOOKED_AT = 2000  # sequences of each data set in the table of draws
STATISTICS = (
    *(f"deviation of {what}' components, times 64" for what in ("items", "labels")),
    "pairs with the answer's label",
    "share of sequences whose first pair has it",
    "cosine of the query with items of that label",
)
EXPLAINED = (
    "FOLDER is a checkout of the program. Losses are in nats, each before its step's update. 'Apart' is the largest "
    "difference of the two losses over some steps, 'weights' the largest difference of a weight after the last step."
)
SAID = {  # by the table's title
    "All in float64": "Every cast to float32, in either program, is one to float64.",
    "As written": "Weights, sums and optimizer are in float64, and casts to float32 stay. The program computes angles and "
    "powers of gamma in float32 and rotates in float32. Ours computes angles in float64 and rounds the tables. Without "
    "encoding no cast changes a number. `tools/kinks.py` shows why losses may part.",
    "Other masks, all in float64": "Without encoding.",
}


def theirs(draws: Draws, run: Run, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(losses [step], final weights by the program's names) of the program's model in its loop."""
    model = model_there(draws, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, weight_decay=run.weight_decay)
    losses = []

    def criterion(logits: Tensor, answers: Tensor) -> Tensor:
        loss = functional.cross_entropy(logits, answers)
        if loss.requires_grad:
            losses.append(loss.detach())
        return loss

    tests = [[next(draws.batches(run.task))]] * TESTS
    with redirect_stdout(StringIO()):
        draws.train(model, draws.batches(run.task), *tests, criterion, optimizer, "cpu", num_iter=steps, rec_freq=steps)
    return torch.stack(losses), {name: parameter.detach() for name, parameter in model.named_parameters()}


class Compared(NamedTuple):
    """One setting, trained by both."""

    run: Run
    ours: Tensor  # losses [step]
    theirs: Tensor
    weights: float  # largest difference of a weight at the end

    @property
    def apart(self) -> Tensor:
        """Differences of the losses [step]."""
        return (self.ours - self.theirs).abs()


def compared(draws: Draws, runs: list[Run], steps: int, *, everywhere: bool) -> Iterator[Compared]:
    """Every run, trained by both programs."""
    with fresh(torch.float64, everywhere=everywhere):
        for one in train(runs, steps):
            losses, weights = theirs(draws, one.run, steps)
            own = named_there(one.run.architecture, one.weights)
            apart = max(float((own[name] - weights[name]).abs().max()) for name in weights)
            yield Compared(one.run, one.losses, losses, apart)


def statistics(drawn: Drawn, labels: Tensor) -> list[float]:
    """`STATISTICS` of sequences [step, B, T, d]; `labels [label, d]` are the vectors of labels."""
    items, seen = drawn.inputs[..., ::2, :], drawn.inputs[..., 1::2, :]
    answer = (seen == labels[drawn.hidden][..., None, :]).all(-1)  # [step, B, pair]: has the answer's label
    cosine = functional.cosine_similarity(items[..., :-1, :], items[..., -1:, :], dim=-1)
    shares = answer.double().sum(-1).mean(), answer[..., 0].double().mean(), cosine[answer].mean()
    return [float(items.std()) * WIDTH, float(seen.std()) * WIDTH, *map(float, shares)]


def shown(one: Compared) -> list[str]:
    """A setting's line in a table."""
    a = one.run.architecture
    mask = f"{a.mask}-{a.window or a.prefix}" if a.window or a.prefix else a.mask
    losses = (losses[at] for at in (0, -1) for losses in (one.ours, one.theirs))
    apart = [*(one.apart[:steps].max() for steps in EARLY), one.apart.max(), one.apart[-1], one.weights]
    words = [one.run.described()["scale"], "on" if a.residual else "off", a.positional, mask]
    return [*words, *(f"{float(loss):.9f}" for loss in losses), *(f"{float(each):.1e}" for each in apart)]


def section(title: str, found: list[Compared]) -> list[str]:
    """Paragraphs: a table of settings, under how many of them agree and how far the furthest are apart."""
    ends = [float(one.apart[-1]) for one in found]
    losses = [f"{whose}, step {at}" for at in (1, len(found[0].ours)) for whose in ("ours", "program")]
    apart = [*(f"apart, steps 1-{n}" for n in EARLY), "at any step", "at the last", "weights"]
    said = (
        f"The losses of the last step lie within {MARGIN:g} nat of each other in {sum(end <= MARGIN for end in ends)} of "
        f"{len(found)} settings. The largest difference is {max(ends):.1e} at the last step and "
        f"{max(float(one.apart.max()) for one in found):.1e} at any step."
    )
    table = table_lines(["scale", "residual", "encoding", "mask", *losses, *apart], [shown(one) for one in found])
    return [f"## {title}", SAID[title], said, "\n".join(table)]


def draws_section(draws: Draws, batch: int) -> list[str]:
    """Paragraphs: a table of statistics of the program's sequences and of ours at its scale."""
    task = InContext(scale="program", batch=batch)
    there = Drawn(*(part[: -(-LOOKED_AT // batch)] for part in next(iter(draws.kept.values()))))
    world = task.world(0, "cpu")
    own = task.draw(world, torch.Generator().manual_seed(1), len(there.inputs))
    contents = torch.stack([draws.dataset.label_content[label] for label in range(task.labels)])
    sides = statistics(there, contents), statistics(own, world.labels)
    cells = [[name, *(f"{value:.3f}" for value in values)] for name, *values in zip(STATISTICS, *sides, strict=True)]
    table = table_lines([f"{there.hidden.numel():,} sequences", "program", "ours"], cells)
    return ["## Draws", "Each data set with its own random numbers, at the program's scale.", "\n".join(table)]


def asked_for() -> argparse.Namespace:
    """What the command line says."""
    given = argparse.ArgumentParser(description="The published program of [Wu] beside ours.")
    given.add_argument("folder", type=Path, help="a checkout of the program")
    for name, default in {"--steps": 1000, "--batch": InContext.batch, "--depth": 2}.items():
        given.add_argument(name, type=int, default=default)
    given.add_argument("--out", type=Path, default=Path("reports/toy/program.md"))
    return given.parse_args()


def trained(draws: Draws, asked: argparse.Namespace) -> Iterator[tuple[str, list[Compared]]]:
    """Title and settings of every table; each setting is told on the terminal when it is done."""
    tasks = draws.tasks(asked.batch)

    def runs_of(scales: Sequence[str], masks: Sequence[str], encodings: Sequence[str]) -> list[Run]:
        return [
            Run(architecture_of(asked.depth, mask, positional, residual, WIDTH), tasks[scale], 0, **RATES)
            for scale, mask, positional, residual in product(scales, masks, encodings, RESIDUAL)
        ]

    plain = runs_of(SCALES, ["causal"], POSITIONAL)
    encoded = [run for run in plain if run.architecture.positional != "none"]
    masked = runs_of(["text"], MASKS, ["none"])
    for title, runs, steps, everywhere in (
        ("All in float64", plain, asked.steps, True),
        ("As written", encoded, asked.steps, False),
        ("Other masks, all in float64", masked, min(MASK_STEPS, asked.steps), True),
    ):
        found = []
        for one in compared(draws, runs, steps, everywhere=everywhere):
            found.append(one)
            print(title, *shown(one), flush=True)
        yield title, found


def machine() -> str:
    """What a page says of the machine."""
    return hardware(torch.device("cpu")).replace("float32", f"float64, torch {torch.__version__}.")


def main() -> None:
    """Compare, and write the page."""
    asked = asked_for()
    draws = Draws(asked.folder)
    tables = dict(trained(draws, asked))
    command = f"python tools/program.py {shlex.join(['FOLDER', *sys.argv[2:]])}"
    settings = f"{asked.steps:,} steps, batch {asked.batch}, {asked.depth} blocks. {machine()}"
    text = ["# The published program of [Wu] and ours, step by step", f"`{command}`", EXPLAINED, settings]
    text += [paragraph for title, found in tables.items() for paragraph in section(title, found)]
    with atomic(asked.out) as temporary:
        temporary.write_text("\n\n".join([*text, *draws_section(draws, asked.batch)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
