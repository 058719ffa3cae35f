"""How fast toys train: many at once against one by one, a plain torch loop, and the published program of [Wu].

    python benchmarks/toys.py [--program FOLDER]

FOLDER is a checkout of github.com/xinyiwu98/position-bias-in-attention, whose data set and model are imported from there
and trained in its own loop, at every depth and encoding of the paper; without it, ours alone are measured on its task. A
sweep of six models that takes a step in a second makes six model-steps per second. The clock is this process's CPU time,
which other work on the machine hardly disturbs.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

import torch
from common import parser, ratio, section, spread, turns
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from toy.model import Architecture
from toy.tasks import Copying, InContext
from toy.train import Run, train

GAMMA = 0.8  # of the decay mask, m = -ln 0.8
TEXT = (
    "Model-steps per second of 50 retrieval models or 6 of [Wu]'s, by CPU time of one thread. Ours draw their data as they "
    "go, as the published program does end to end; what runs over one batch draws none."
)


Contender: TypeAlias = tuple[Callable[[], object], int]  # what is timed, and how many steps of a model it makes


class Plain(nn.Module):
    """The retrieval model as one would write it with torch.nn."""

    def __init__(self, width: int, layers: int = 2, vocabulary: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in "qkvo"}) for _ in range(layers)
        )
        self.unembedding = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, later = self.embedding(ids), torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for block in self.blocks:
            layers: Any = block
            q, k, v = (layers[name](x) for name in "qkv")
            scores = (q @ k.mT / math.sqrt(x.shape[-1])).masked_fill(later, -math.inf)
            x = x + layers["o"](scores.softmax(-1) @ v)
        return self.unembedding(x[:, -1])


def plain_loop(width: int, steps: int) -> Contender:
    """Steps of one such model with torch's Adam."""
    torch.manual_seed(0)
    model = Plain(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loop() -> None:
        for _ in range(steps):
            ids = torch.randint(10, (128, 10))
            loss = functional.cross_entropy(model(ids), ids[:, 4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return loop, steps


def published(folder: str, depth: int, positional: str, steps: int) -> dict[str, Contender]:
    """[Wu]'s program end to end, and with one batch over and over; its evaluation every 100 steps is left out of both."""
    sys.path.insert(0, folder)
    data, models = (importlib.import_module(name) for name in ("data", "models"))
    del sys.path[0]
    random.seed(0)
    torch.manual_seed(0)
    training = data.TrainDataset(N=8, K=2048, D=64, B=4, eps=0.75)
    mask = {"mask_type": "decay", "gamma": GAMMA} if positional == "decay" else {"mask_type": "causal", "gamma": 1}
    shape = {"in_channels": 64, "hidden_channels": 64, "out_channels": 32, "num_attn_layers": depth, "residual": False}
    model: Any = models.SAN(**shape, **mask, pe="rope" if positional == "rope" else None)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    # A sampler of ours spares its own one's first permutation of 64 million indices.
    batches = iter(DataLoader(training, batch_size=128, sampler=range(128 * 1000)))
    batch = next(batches)
    return {
        "the published program, end to end": (lambda: [step(*next(batches)) for _ in range(steps)], steps),
        "the published program, one batch": (lambda: [step(*batch) for _ in range(steps)], steps),
    }


def ours(runs: list[Run], steps: int) -> dict[str, Contender]:
    """All runs at once, and the first of them alone."""
    alone = (lambda: train(runs[:1], steps), steps)
    return {"ours": (lambda: train(runs, steps), steps * len(runs)), "ours, one by one": alone}


def rows(label: str, contenders: dict[str, Contender], rounds: int) -> list[list[str]]:
    """The rates of each, and how many times faster ours are."""
    calls = {name: call for name, (call, _) in contenders.items()}
    turns(calls, 1)  # warms up
    seconds = turns(calls, rounds, time.process_time)
    rates = {name: [contenders[name][1] / each for each in times] for name, times in seconds.items()}
    best = rates.pop("ours")
    return [[label, name, spread(rate), spread(best), ratio(best, rate)] for name, rate in rates.items()]


def main() -> None:
    """Print the section."""
    options = parser(__doc__)
    options.add_argument("--program", help="a checkout of the published program")
    given = options.parse_args()
    steps, rounds = (16, 1) if given.quick else (128, 5)
    body = []
    for width in (2, 10):
        runs = [
            Run(Architecture(blocks=2, width=width), Copying(target=k), seed) for seed in range(5) for k in range(10)
        ]
        contenders = {"a torch.nn loop, one by one": plain_loop(width, steps), **ours(runs, steps)}
        body += rows(f"retrieval, width {width}", contenders, rounds)
    steps = 4 if given.quick else 30
    for depth, positional in product((2, 4, 6), ("none", "decay", "rope")) if given.program else [(2, "none")]:
        encoding: dict[str, Any] = {
            "positional": positional,
            "decay": -math.log(GAMMA) if positional == "decay" else None,
        }
        sizes: dict[str, Any] = {"blocks": depth, "width": 64, "length": 17, "vocabulary": None, "outputs": 32}
        shape = Architecture(**sizes, **encoding, residual=False, output_projection=False, head="mlp")
        contenders = ours([Run(shape, InContext(), seed, 1e-3, 1e-6) for seed in range(6)], steps)
        if given.program:
            contenders |= published(given.program, depth, positional, steps=6)
        body += rows(f"[Wu], {depth} blocks, encoding {positional}", contenders, rounds)
    print(section("Toys", TEXT, ["models", "against", "its rate", "ours, all at once", "ours / its"], body))


if __name__ == "__main__":
    main()
