"""CPU seconds that a thousand steps of one retrieval toy take by depth and positions: `python tools/match_cost.py`.

Eight toys of four heads and 32 dimensions train side by side in one thread, as in `headwater match tiny-llama`; toys of more
than 12 blocks have the nine heads and 36 dimensions of those of `smollm2-135m`.
"""

from __future__ import annotations

import time

import torch

from toy.model import Architecture
from toy.tasks import Copying
from toy.train import Run, train

PLACES = ((6, 17), (6, 33), (6, 65), (6, 129), (12, 33), (30, 17), (30, 33))  # blocks, positions
TOYS, STEPS = 8, 20


def seconds(blocks: int, positions: int) -> float:
    """Of a thousand steps of one toy."""
    heads, width = (4, 32) if blocks <= 12 else (9, 36)
    shape = Architecture(
        blocks=blocks, heads=heads, width=width, length=positions, vocabulary=11, outputs=10, positional="rope",
        feed_forward=True, norm="rms",
    )  # fmt: skip
    runs = [Run(shape, Copying(11, positions, target, 32, bos=True)) for target in range(1, 1 + TOYS)]
    before = time.process_time()
    train(runs, STEPS)
    return 1000 * (time.process_time() - before) / STEPS / TOYS


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| blocks | positions | CPU seconds |\n|---|---|---|")
    for place in PLACES:
        print(f"| {place[0]} | {place[1]} | {seconds(*place):.1f} |", flush=True)
