"""Short training runs of toys, alone as a program too: what tests interrupt and kill.

    python tests/toy_runs.py FOLDER

trains without end to speak of, saves often, and prints how many model-steps are done.
"""

import sys
from dataclasses import replace
from typing import Any

from toy import train as training
from toy.model import Architecture
from toy.tasks import Copying, InContext
from toy.train import Run

SMALL = Architecture(blocks=2, width=2, length=6, vocabulary=5, outputs=5)
TASK = Copying(vocabulary=5, length=6, batch=16)
WIDE = Architecture(
    blocks=2, width=8, length=9, vocabulary=None, outputs=4, output_projection=False, head="mlp", residual=False
)
PAIRS = InContext(items=4, width=8, classes=16, labels=4, burst=2, batch=16)
STEPS, RECORD = 4000, (0, 9)  # of the program


def copying(target: int = -1, seed: int = 0, architecture: Architecture = SMALL, **options: Any) -> Run:
    rate: dict[str, Any] = {"learning_rate": 3e-3}
    return Run(architecture, replace(TASK, target=target), seed, **(rate | options))


MIXED = [copying(seed=0), copying(seed=1, target=2), Run(WIDE, PAIRS, 0, 1e-3)]


if __name__ == "__main__":
    training.SAVE_SECONDS, training.TELL_SECONDS = 0.02, -1.0
    training.train(MIXED, STEPS, record=RECORD, folder=sys.argv[1], advance=lambda more: print(more, flush=True))
