"""How fast toys train: many at once against one by one, against a plain torch loop, against the published program of [Wu].

`--program FOLDER` names a checkout of github.com/xinyiwu98/position-bias-in-attention, whose data set and model are imported
from there and trained in its own loop; without it, ours alone are measured on its task. `--full` adds all depths and
positional encodings. Rates are model-steps per second: a sweep of six models that takes a step in a second makes six. "End
to end" includes drawing the data. With one thread on a CPU the clock is the process's CPU time, which other work on the
machine hardly disturbs.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from harness import Headline, Job, Row, Rows, Section, Settings, middle, ratios, spread, table
from machine import synchronize
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from toy import narrow
from toy.model import Architecture
from toy.tasks import Copying, InContext
from toy.train import Run, groups, train

TITLE = "Toys"
DEPTHS = (2, 4, 6)
POSITIONS = ("none", "decay", "rope")
GAMMA = 0.8  # of the decay mask, m = -ln 0.8
SWEEP = 6  # models of a sweep in the comparison with [Wu]
STEPS = 30  # of one of our measurements: one block of data
THEIR_STEPS, SAME_BATCH_STEPS = 6, 8
TINY = 50  # retrieval models of a sweep: ten targets, five seeds
TINY_STEPS = 128  # two blocks of data
SAID = {
    "torch": "a torch.nn loop, one by one",
    "program": "the published program, end to end",
    "program, one batch": "the published program's step, one batch over and over",
    "plain": "ours, without the narrow layout",
    "one": "ours, one by one",
}
HEADLINES = {("retrieval, width 2", "torch"), ("retrieval, width 2", "one"), ("[Wu], 2 blocks", "program")}


def jobs(settings: Settings) -> list[Job]:
    """One job; the fuller grid is on the page as soon as one of its rows is there."""
    points: dict[str, dict[str, Any]] = {f"retrieval, width {width}": {"width": width} for width in (2, 10)}
    chosen = [(2, "none"), *([] if settings.quick else [(6, "none")])]
    for depth, positional in product(DEPTHS, POSITIONS) if settings.full else chosen:
        label = f"[Wu], {depth} blocks" + f", {positional}" * (positional != "none")
        points[label] = {"depth": depth, "positional": positional}
    return [Job("toys", "all", points)]


class Clock:
    """CPU time of this process at one thread on a CPU, the clock on the wall otherwise."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cpu = device == "cpu" and torch.get_num_threads() == 1

    def __call__(self) -> float:
        synchronize(self.device)
        return time.process_time() if self.cpu else time.perf_counter()

    def rates(self, calls: Mapping[str, tuple[Callable[[], object], float]], rounds: int) -> dict[str, list[float]]:
        """Units per second of every call in every round, after one round to warm up; a call comes with its units."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for at in range(rounds + 1):
            for name, (call, units) in calls.items():
                began = self()
                call()
                if at > 0:
                    found[name].append(units / (self() - began))
        return found


def architecture(depth: int, positional: str) -> Architecture:
    """[Wu]'s model without residuals, its program's default."""
    options: dict[str, Any] = {"positional": positional, "decay": -math.log(GAMMA) if positional == "decay" else None}
    shape: dict[str, Any] = {"blocks": depth, "width": 64, "length": 17, "vocabulary": None, "outputs": 32}
    return Architecture(**shape, residual=False, output_projection=False, head="mlp", **options)


class Program:
    """The published program's parts, and its training loop."""

    def __init__(self, folder: Path, device: str) -> None:
        sys.path.insert(0, str(folder))
        self.data, models = (importlib.import_module(name) for name in ("data", "models"))
        del sys.path[0]
        self.san, self.device = models.SAN, device
        random.seed(0)
        self.sizes = {"N": 8, "K": 2048, "D": 64, "B": 4, "eps": 0.75}
        self.training = self.data.TrainDataset(**self.sizes)

    def model(self, depth: int, positional: str) -> nn.Module:
        torch.manual_seed(0)
        decays = positional == "decay"
        return self.san(
            in_channels=64,
            hidden_channels=64,
            out_channels=32,
            mask_type="decay" if decays else "causal",
            gamma=GAMMA if decays else 1,
            pe="rope" if positional == "rope" else None,
            num_attn_layers=depth,
            residual=False,
        ).to(self.device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As its loader gives them, endlessly, without its sampler's first permutation of 64 million indices."""
        training = self.training

        class Short(Dataset[Any]):
            def __len__(self) -> int:
                return 128 * 1000

            def __getitem__(self, index: int) -> Any:
                return training[index]

        while True:
            yield from DataLoader(Short(), batch_size=128, shuffle=True)

    def calls(self, depth: int, positional: str) -> dict[str, tuple[Callable[[], object], float]]:
        """Its loop end to end, and with one batch over and over; its evaluation every 100 steps is left out of both."""
        model, criterion = self.model(depth, positional), nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
        batches = self.batches()
        batch = next(batches)

        def step(inputs: Tensor, targets: Tensor) -> None:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

        return {
            "program": (lambda: [step(*next(batches)) for _ in range(THEIR_STEPS)], THEIR_STEPS),
            "program, one batch": (lambda: [step(*batch) for _ in range(SAME_BATCH_STEPS)], SAME_BATCH_STEPS),
        }


class Plain(nn.Module):
    """The retrieval model as one would write it with torch.nn."""

    def __init__(self, width: int, layers: int = 2, vocabulary: int = 10, length: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in "qkvo"}) for _ in range(layers)
        )
        self.unembedding = nn.Linear(width, vocabulary, bias=False)
        self.later: Tensor
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            layers: Any = block
            q, k, v = (layers[name](x) for name in "qkv")
            scores = (q @ k.mT / math.sqrt(x.shape[-1])).masked_fill(self.later, -math.inf)
            x = x + layers["o"](scores.softmax(-1) @ v)
        return self.unembedding(x[:, -1])


def plainly(width: int, device: str) -> Callable[[], object]:
    """A loop over steps of one such model with torch's Adam."""
    torch.manual_seed(0)
    model = Plain(width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loop() -> None:
        for _ in range(TINY_STEPS):
            ids = torch.randint(10, (128, 10), device=device)
            loss = functional.cross_entropy(model(ids), ids[:, 4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return loop


def in_plain_layout(runs: list[Run], device: str) -> None:
    """Train by the pass that all models can take (`toy.model`)."""
    widest, narrow.WIDEST = narrow.WIDEST, 0
    try:
        train(runs, TINY_STEPS, device=device)
    finally:
        narrow.WIDEST = widest


def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Rows with the model-steps per second of every contender and round."""
    device = settings.device
    torch.set_num_threads(1)  # the clock is then the process's own CPU time, which others on the machine do not add to
    clock = Clock(device)
    program = None if settings.program is None else Program(Path(settings.program), device)
    for label, point in job.points.items():
        if "width" in point:
            shape = Architecture(blocks=2, width=point["width"])
            runs = [Run(shape, Copying(target=k), seed) for seed in range(5) for k in range(10)]
            steps, others = TINY_STEPS, {"torch": (plainly(point["width"], device), float(TINY_STEPS))}
            others["plain"] = (lambda runs=runs: in_plain_layout(runs, device), float(TINY_STEPS * len(runs)))
        else:
            shape = architecture(**point)
            runs = [Run(shape, InContext(), seed, 1e-3, 1e-6) for seed in range(SWEEP)]
            steps, others = STEPS, {} if program is None else program.calls(**point)
        calls = {
            **others,
            "one": (lambda runs=runs, steps=steps: train(runs[:1], steps, device=device), float(steps)),
            "all": (lambda runs=runs, steps=steps: train(runs, steps, device=device), float(steps * len(runs))),
        }
        rates = clock.rates(calls, 2 if settings.quick else 5)
        yield label, {"rates": rates, "models": len(runs), "groups": len(groups(runs, device)), "cpu": clock.cpu}


def section(rows: Rows, settings: Settings) -> Section:
    (job,) = jobs(replace(settings, full=True))  # what was measured with --full stays on the page
    found = rows.of(job)
    body, headlines = [], []
    for label, row in found.items():
        for name, each in row["rates"].items():
            if name not in SAID:
                continue
            ours, gain = row["rates"]["all"], ratios(row["rates"]["all"], each)
            body.append([label, SAID[name], spread(each), spread(ours), spread(gain)])
            if (label, name) in HEADLINES:
                what = f"toys, {label}: {row['models']} trained at once, against {SAID[name]}"
                said = (f"{middle(x):,.{0 if middle(x) >= 20 else 1}f} model-steps/s" for x in (ours, each))
                headlines.append(Headline(what, *said, spread(gain)))
    cpu = any(row["cpu"] for row in found.values())
    lines = [
        f"Model-steps per second of {TINY} retrieval models or {SWEEP} of [Wu]'s: a sweep of six that takes a step a "
        "second makes six. Ratios are those of rounds, median (quartiles). "
        f"Clock: {'CPU time of one thread' if cpu else 'wall'}. "
        "Ours draw their data as they go, as the published program does end to end; what runs over one batch draws none.",
        "",
        *table(["models", "against", "its rate", "ours, all at once", "ours / its"], body),
    ]
    if found and not any("program" in row["rates"] for row in found.values()):
        lines += ["", "The published program was not there: `--program FOLDER` gives a checkout of it."]
    return Section(headlines, lines)
