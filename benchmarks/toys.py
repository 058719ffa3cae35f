"""How fast toys train: against the published program of [Wu], against one model at a time, against the products alone.

    python benchmarks/toys.py [--program FOLDER] [--threads 1] [--device cpu] [--rounds 3] [--out reports/toy]

FOLDER holds a checkout of github.com/xinyiwu98/position-bias-in-attention; its data set and its model are imported from
there and trained in its own loop. Without it, ours alone is measured. Rates are model-steps per second: a sweep of six
models that takes a step in a second makes six. "End to end" includes drawing the data. Contenders are timed in turn, so that
drift of a shared machine hits all alike; rates are medians over rounds, ratios medians of the rounds' own ratios.

With one thread on a CPU the clock is the process's CPU time, which is the time of an otherwise idle machine but for caches
and memory that others use, too; else it is the clock on the wall. Three rounds are four minutes of CPU time. Writes
`training.md`.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from machine import describe, synchronize
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from probes.run.files import atomic, table_lines
from toy.model import Architecture
from toy.tasks import Copying, InContext
from toy.train import Run, groups, train

DEPTHS = (2, 4, 6)
POSITIONS = ("none", "decay", "rope")
GAMMA = 0.8  # of the decay mask, m = -ln 0.8
SWEEP = 6  # models of a sweep in the comparison with [Wu]
STEPS = 30  # of one of our measurements: one block of data
THEIR_STEPS, SAME_BATCH_STEPS = 6, 8
THEIR_SEQUENCES = 8  # of a test set built in a round; all six sets of 10,000 are extrapolated from them
TEST_SETS, TEST_SIZE = 6, 10_000
TINY = 50  # retrieval models of a sweep: ten targets, five seeds
TINY_STEPS = 128  # two blocks of data
WIDTHS = (2, 10)

Calls = Mapping[str, tuple[Callable[[], object], float]]  # by name: what to time, and how many model-steps it makes


class Clock:
    """CPU time of this process at one thread on a CPU, the clock on the wall otherwise."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cpu = device == "cpu" and torch.get_num_threads() == 1

    def __call__(self) -> float:
        synchronize(self.device)
        return time.process_time() if self.cpu else time.perf_counter()

    def rates(self, calls: Calls, rounds: int) -> dict[str, list[float]]:
        """Units per second of every call in every round, after one round to warm up."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for at in range(rounds + 1):
            for name, (call, units) in calls.items():
                began = self()
                call()
                if at > 0:
                    found[name].append(units / (self() - began))
        return found


def middle(rates: list[float]) -> str:
    """Median, with as many digits as it deserves."""
    value = statistics.median(rates)
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the rounds' ratios and their range."""
    each = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    shown = [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (statistics.median(each), each[0], each[-1])]
    return "{} ({} to {})".format(*shown)


# ------------------------------------------------------------------------------------------------------------------ [Wu]


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
        """As its loader gives them, for ever, without its sampler's first permutation of 64 million indices."""
        training = self.training

        class Short(Dataset[Any]):
            def __len__(self) -> int:
                return 128 * 1000

            def __getitem__(self, index: int) -> Any:
                return training[index]

        while True:
            yield from DataLoader(Short(), batch_size=128, shuffle=True)

    def calls(self, depth: int, positional: str) -> Calls:
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

    def test_sequences(self) -> object:
        return self.data.TestDataset(
            num_seqs=THEIR_SEQUENCES, test_type="IC_first_last", train_dataset=self.training, **self.sizes
        )


def against_the_program(given: argparse.Namespace, clock: Clock) -> tuple[list[str], list[list[str]], list[str]]:
    """(columns, rows, sentences below)."""
    program = None if given.program is None else Program(given.program, given.device)
    columns = ["blocks", "positions", "ours, one model", f"ours, {given.sweep} models", "products alone", "share"]
    if program is not None:
        columns[2:2] = ["program, end to end", "program, one batch"]
        columns += ["ours, one model / program", f"{given.sweep} / program", "one model / one batch"]
    rows = []
    for depth in DEPTHS:
        for positional in POSITIONS:
            runs = [Run(architecture(depth, positional), InContext(), seed, 1e-3, 1e-6) for seed in range(given.sweep)]
            calls: dict[str, tuple[Callable[[], object], float]] = {
                "one": (lambda runs=runs: train(runs[:1], STEPS, device=given.device), STEPS),
                "sweep": (lambda runs=runs: train(runs, STEPS, device=given.device), STEPS * len(runs)),
            }
            if program is not None:
                calls |= program.calls(depth, positional)
            found = clock.rates(calls, given.rounds)
            flops, limit = flops_of(runs[0], given.device), matrix_rate(given.device, clock)
            products = limit / flops
            share = statistics.median(found["one"]) / products
            row = [str(depth), positional, middle(found["one"]), middle(found["sweep"])]
            row += [f"{products:,.0f}", f"{share:.0%}"]
            if program is not None:
                theirs, again = found["program"], found["program, one batch"]
                row[2:2] = [middle(theirs), middle(again)]
                row += [ratio(found["one"], theirs), ratio(found["sweep"], theirs), ratio(found["one"], again)]
            rows.append(row)
            print(" | ".join(row), flush=True)
    below = [
        f"Batch 128, AdamW, no residuals, in-context data of that paper. Groups that a sweep of {given.sweep} is trained "
        "in: " + ", ".join(f"{_groups(depth, given)} at {depth} blocks" for depth in DEPTHS) + ". "
        '"Products alone": model-steps per second if a step were its matrix products and those ran at the rate above; '
        '"share": of that what one model reaches. Our last block computes the last position alone.'
    ]
    if program is not None:
        below.append(
            "The program's end-to-end rate leaves out what its sampler does before the first step (it lists a permutation "
            "of 64 million indices) and its evaluation every 100 steps."
        )
    below.append(test_sets(program, given, clock))
    return columns, rows, below


def _groups(depth: int, given: argparse.Namespace) -> str:
    runs = [Run(architecture(depth, "none"), InContext(), seed) for seed in range(given.sweep)]
    return " + ".join(str(len(group)) for group in groups(runs, given.device))


def test_sets(program: Program | None, given: argparse.Namespace, clock: Clock) -> str:
    """How long all test sequences take."""
    task = InContext()
    world = task.world(0, given.device)

    def ours() -> None:
        generator = torch.Generator(given.device).manual_seed(1)
        for right, wrong in ((0, 4), (4, 0), (0, 7), (7, 0), (4, 7), (7, 4)):
            task.pairs(world, generator, TEST_SIZE, right, wrong)

    calls: dict[str, tuple[Callable[[], object], float]] = {"ours": (ours, TEST_SETS * TEST_SIZE)}
    if program is not None:
        calls["program"] = (program.test_sequences, THEIR_SEQUENCES)
    found = clock.rates(calls, given.rounds)
    seconds = TEST_SETS * TEST_SIZE / statistics.median(found["ours"])
    text = f"Six test sets of 10,000 sequences: ours {seconds:.2g} s"
    if program is None:
        return text + "."
    minutes = TEST_SETS * TEST_SIZE / statistics.median(found["program"]) / 60
    return (
        f"{text}, the program {minutes:.0f} minutes (extrapolated from {given.rounds} times {THEIR_SEQUENCES} sequences). "
        f"Ratio {ratio(found['ours'], found['program'])}."
    )


def flops_of(run: Run, device: str) -> float:
    """Floating-point operations of the matrix products of one training step, counted as it runs."""
    with FlopCounterMode(display=False) as counter:
        train([run], 1, device=device)
    return float(counter.get_total_flops())


def matrix_rate(device: str, clock: Clock, models: int = 1) -> float:
    """Floating-point operations per second of batched products [2176, 64] x [64, 64]."""
    x, w = (torch.randn(models, rows, 64, device=device) for rows in (128 * 17, 64))
    out = torch.empty_like(x)

    def products() -> None:
        for _ in range(100):
            torch.bmm(x, w, out=out)

    return statistics.median(clock.rates({"": (products, 100 * models * 2.0 * 128 * 17 * 64 * 64)}, 3)[""])


# ------------------------------------------------------------------------------------------------------ tiny retrieval


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


def tiny(given: argparse.Namespace, clock: Clock) -> tuple[list[str], list[list[str]], list[str]]:
    """(columns, rows, sentences below)."""
    columns = ["width", "torch.nn and Adam, one by one", "ours, one by one", f"ours, {TINY} at once"]
    columns += ["at once / torch.nn", "at once / one by one"]
    rows, parts = [], []
    for width in WIDTHS:
        runs = [Run(Architecture(blocks=2, width=width), Copying(target=k), s) for s in range(5) for k in range(10)]
        found = clock.rates(
            {
                "plain": (plainly(width, given.device), TINY_STEPS),
                "one": (lambda runs=runs: train(runs[:1], TINY_STEPS, device=given.device), TINY_STEPS),
                "all": (lambda runs=runs: train(runs, TINY_STEPS, device=given.device), TINY_STEPS * len(runs)),
            },
            given.rounds,
        )
        rates = [found[name] for name in ("plain", "one", "all")]
        rows.append([str(width), *map(middle, rates), ratio(rates[2], rates[0]), ratio(rates[2], rates[1])])
        parts.append(f"{' + '.join(str(len(group)) for group in groups(runs, given.device))} at width {width}")
        print(" | ".join(rows[-1]), flush=True)
    below = [
        "Two blocks, one head, vocabulary and context 10, batch 128; ten targets and five seeds. Groups trained side by "
        "side: " + ", ".join(parts) + ". All include drawing the data and the optimizer."
    ]
    return columns, rows, below


# -------------------------------------------------------------------------------------------------------------- the page


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, help="folder with [Wu]'s program")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep", type=int, default=SWEEP, help="models of a sweep in the comparison with [Wu]")
    parser.add_argument("--out", type=Path, default=Path("reports/toy"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = Clock(given.device)
    shown = [word for word in sys.argv[1:] if word != str(given.program)]
    if given.program is not None:
        shown.insert(shown.index("--program") + 1 if "--program" in shown else 0, "FOLDER")
    command = shlex.join(["python", "benchmarks/toys.py", *shown])
    parts = {
        "Tiny retrieval models": tiny(given, clock),
        "In-context retrieval of [Wu]": against_the_program(given, clock),
    }
    rates = ", ".join(f"{matrix_rate(given.device, clock, n) / 1e9:.0f} ({n} at once)" for n in (1, given.sweep))
    lines = [
        f"`{command}`",
        f"Model-steps per second, medians of {given.rounds} round{'s' if given.rounds > 1 else ''} in which the contenders "
        "took turns; ratios: median and range of the rounds' own. Clock: "
        + ("CPU time of the one thread." if clock.cpu else "on the wall."),
        describe(given.device),
        f"Products [2176, 64] x [64, 64], GFLOP/s: {rates}.",
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    write_page(given.out / "training.md", lines, parts)
    print(f"wrote {given.out / 'training.md'}")


def write_page(path: Path, lines: list[str], parts: Mapping[str, tuple[list[str], list[list[str]], list[str]]]) -> None:
    """A title, what was measured, and a table for each part."""
    text = ["# How fast toys train", "", *(f"{line}\n" for line in lines)]
    for title, (columns, rows, below) in parts.items():
        text += [f"## {title}", ""]
        text += table_lines(columns, rows)
        text += ["", *(f"{line}\n" for line in below)]
    with atomic(path) as temporary:
        temporary.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
