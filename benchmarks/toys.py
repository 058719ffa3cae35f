"""How fast toys train: many at once against one by one, and against a plain torch loop, `python benchmarks/toys.py`."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import parser, ratio, section, spread, turns
from torch import Tensor, nn
from torch.nn import functional

from toy.model import Architecture
from toy.tasks import Copying
from toy.train import Run, train

TEXT = "Model-steps per second of 50 retrieval models, by CPU time of one thread; all draw their data as they go."


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


def plain_loop(width: int, steps: int) -> Callable[[], None]:
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

    return loop


def rows(width: int, steps: int, rounds: int) -> list[list[str]]:
    """The rates of each, and how many times faster ours are; a sweep of six that takes a step a second makes six."""
    runs = [Run(Architecture(blocks=2, width=width), Copying(target=k), seed) for seed in range(5) for k in range(10)]
    calls = {
        "ours": lambda: train(runs, steps),
        "ours, one by one": lambda: train(runs[:1], steps),
        "a torch.nn loop, one by one": plain_loop(width, steps),
    }
    turns(calls, 1)  # warms up
    seconds = turns(calls, rounds, time.process_time)
    rates = {
        name: [(len(runs) if name == "ours" else 1) * steps / each for each in times] for name, times in seconds.items()
    }
    best = rates.pop("ours")
    return [
        [f"retrieval, width {width}", name, spread(rate), spread(best), ratio(best, rate)]
        for name, rate in rates.items()
    ]


def main() -> None:
    """Print the section."""
    quick = parser(__doc__).parse_args().quick
    body = [row for width in (2, 10) for row in rows(width, *((16, 1) if quick else (128, 5)))]
    print(section("Toys", TEXT, ["models", "against", "its rate", "ours, all at once", "ours / its"], body))


if __name__ == "__main__":
    main()
