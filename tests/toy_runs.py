"""Short training runs of toys: what tests interrupt."""

from dataclasses import replace
from typing import Any

from toy.model import Architecture
from toy.tasks import Copying, InContext
from toy.train import Run

SMALL = Architecture(blocks=2, width=2, length=6, vocabulary=5, outputs=5)
TASK = Copying(vocabulary=5, length=6, batch=16)
WIDE = Architecture(
    blocks=2, width=8, length=9, vocabulary=None, outputs=4, output_projection=False, head="mlp", residual=False
)
PAIRS = InContext(items=4, width=8, classes=16, labels=4, burst=2, batch=16)


def copying(target: int = -1, seed: int = 0, architecture: Architecture = SMALL, **options: Any) -> Run:
    rate: dict[str, Any] = {"learning_rate": 3e-3}
    return Run(architecture, replace(TASK, target=target), seed, **(rate | options))


MIXED = [copying(seed=0), copying(seed=1, target=2), Run(WIDE, PAIRS, 0, 1e-3)]
