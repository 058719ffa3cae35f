"""How fast toys train: many at once against one by one, against a plain torch loop, against the published program of [Wu].

A short form of `benchmarks/toys.py`, whose parts it uses and which has the sweep over depths and positional encodings.
Where the program's folder is given its own data set, model and loop are run. Where it is not, its step is written out: the
same model as torch modules with torch's AdamW, over one batch again and again. That has no data to draw, which takes most
of the program's time, and so says what its step alone would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness import Headline, Job, Row, Rows, Section, Settings, ratios, spread, table
from torch import Tensor, nn
from torch.nn import functional
from toys import STEPS, TINY, TINY_STEPS, Clock, Program, architecture, plainly
from toys import middle as rate

from toy.model import Architecture
from toy.tasks import Copying, InContext
from toy.train import Run, groups, train

TITLE = "Toys"
SWEEP = 6
MODULE_STEPS = 30
BATCH, LENGTH, WIDTH, LABELS = 128, 17, 64, 32  # [Wu]'s


def jobs(settings: Settings) -> list[Job]:
    points = {f"retrieval, width {width}": {"kind": "retrieval", "width": width} for width in (2, 10)}
    depths = (2,) if settings.quick else (2, 6)
    points |= {f"[Wu], {depth} blocks": {"kind": "in context", "depth": depth} for depth in depths}
    return [Job("toys", "all", points)]


class Modules(nn.Module):
    """[Wu]'s model as modules: attention with q, k, v only, no residuals, then three ReLU layers on the last position."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkv") for _ in range(depth)
        )
        layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.head = nn.Sequential(*layers, nn.Linear(WIDTH, LABELS))
        self.later: Tensor
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            q, k, v = (layer(x) for layer in block)  # type: ignore[union-attr]
            scores = (q @ k.mT / WIDTH**0.5).masked_fill(self.later, float("-inf"))
            x = scores.softmax(-1) @ v
        return self.head(x[:, -1])


def modules(depth: int, device: str) -> Callable[[], object]:
    """A loop of `MODULE_STEPS` steps over one batch."""
    torch.manual_seed(0)
    model = Modules(depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
    x, y = torch.randn(BATCH, LENGTH, WIDTH, device=device) / WIDTH**0.5, torch.randint(LABELS, (BATCH,), device=device)

    def loop() -> None:
        for _ in range(MODULE_STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return loop


def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Rows with the model-steps per second of every contender and round."""
    device = settings.device
    torch.set_num_threads(1)  # the clock is then the process's own CPU time, which others on the machine do not add to
    clock = Clock(device)
    program = None if settings.program is None else Program(Path(settings.program), device)
    rounds = 2 if settings.quick else 5
    for label, point in job.points.items():
        if point["kind"] == "retrieval":
            shape = Architecture(blocks=2, width=point["width"])
            runs = [Run(shape, Copying(target=k), seed) for seed in range(5) for k in range(10)]
            steps, others = TINY_STEPS, {"torch": (plainly(point["width"], device), float(TINY_STEPS))}
        else:
            shape = architecture(point["depth"], "none")
            runs = [Run(shape, InContext(), seed, 1e-3, 1e-6) for seed in range(SWEEP)]
            steps = STEPS
            if program is None:
                others = {"modules": (modules(point["depth"], device), float(MODULE_STEPS))}
            else:
                others = dict(program.calls(point["depth"], "none"))
        calls = {
            **others,
            "one": (lambda runs=runs, steps=steps: train(runs[:1], steps, device=device), float(steps)),
            "all": (lambda runs=runs, steps=steps: train(runs, steps, device=device), float(steps * len(runs))),
        }
        rates = clock.rates(calls, rounds)
        yield label, {"rates": rates, "models": len(runs), "groups": len(groups(runs, device)), "cpu": clock.cpu}


SAID = {
    "torch": "a torch.nn loop, one by one",
    "program": "the published program, end to end",
    "program, one batch": "the published program's step, one batch over and over",
    "modules": "its step written out as torch modules, one batch over and over",
    "one": "ours, one by one",
}


# (row, contender) of the head table.
HEADLINES = {
    ("retrieval, width 2", "torch"),
    ("retrieval, width 2", "one"),
    ("[Wu], 2 blocks", "program"),
    ("[Wu], 2 blocks", "modules"),
}


def section(rows: Rows, settings: Settings, folder: Path) -> Section:
    (job,) = jobs(settings)
    found = rows.of(job)
    body, headlines = [], []
    for label, row in found.items():
        rates = row["rates"]
        for name, each in rates.items():
            if name == "all":
                continue
            gain = ratios(rates["all"], each)
            body.append([label, SAID[name], spread(each), spread(rates["all"]), spread(gain)])
            if (label, name) in HEADLINES:
                what = f"toys, {label}: {row['models']} trained at once, against {SAID[name]}"
                ours, other = (f"{rate(x)} model-steps/s" for x in (rates["all"], each))
                headlines.append(Headline(what, ours, other, spread(gain)))
    cpu = any(row["cpu"] for row in found.values())
    lines = [
        f"Model-steps per second (a sweep of six that takes a step in a second makes six), {TINY} retrieval models or "
        f"{SWEEP} of [Wu]'s; ratios are those of rounds, median (quartiles). "
        + ("Clock: CPU time of one thread. " if cpu else "Clock: on the wall. ")
        + "Ours draw their data as they go, as the published program does end to end; what runs over one batch draws none. "
        "All depths and encodings: `python benchmarks/toys.py --program FOLDER`, [table](toy/training.md).",
        "",
        *table(["models", "against", "its rate", "ours, all at once", "ours / its"], body),
    ]
    if found and not any("program" in row["rates"] for row in found.values()):
        lines += ["", "The published program was not there: `--program FOLDER` gives a checkout of it."]
    return Section(headlines, lines)
