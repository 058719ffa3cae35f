"""The published program of [Wu] as our scripts use it: its data set, its model with our weights, its loop.

All are imported from a checkout of github.com/xinyiwu98/position-bias-in-attention, no part of which is here.

One definition differs and is translated. The program's RoPE turns neighbouring components against each other, ours turns the
halves of a head: one is the other with the columns of the query and key matrices in another order.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from toy.experiments.position_bias import SCALES
from toy.model import Architecture, initial
from toy.tasks import Drawn, InContext
from toy.train import Run

WIDTH = InContext.width
GAMMA = 0.8  # the program's name for exp(-decay)
ENCODINGS = {"rope": "rope", "sinusoidal": "sin"}  # by the program's names
PARTS = {"q": "query_projection", "k": "key_projection", "v": "value_projection"}


class Draws:
    """Sequences of the program's data set, kept block by block under the seed of the generator that chose them."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        data, models, loop = (importlib.import_module(name) for name in ("data", "models", "train"))
        del sys.path[0]
        self.san, self.train = models.SAN, loop.train
        torch.manual_seed(0)
        random.seed(0)
        task = InContext()
        self.dataset = data.TrainDataset(N=task.items, K=task.classes, D=WIDTH, B=task.burst, eps=task.eps)
        self.kept: dict[int, Drawn] = {}

    def block(self, generator: torch.Generator, steps: int, batch: int) -> Drawn:
        """The block of that seed, drawn at the first call."""
        seed = generator.initial_seed()
        if seed not in self.kept:
            indices = torch.randint(len(self.dataset), (steps * batch,), generator=generator)
            with fresh(torch.float32):  # as it draws by itself
                sequences, labels = zip(*(self.dataset[index] for index in indices.tolist()), strict=True)
            inputs = torch.stack(sequences).unflatten(0, (steps, batch))
            self.kept[seed] = Drawn(inputs, torch.tensor(labels).view(steps, batch))
        return self.kept[seed]

    def batches(self, task: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, answers) of every step that was drawn, at the task's scale."""
        for drawn in self.kept.values():
            yield from zip(*scaled(task, drawn), strict=True)

    def tasks(self, batch: int) -> dict[str, InContext]:
        """Our task at each scale, with the program's sequences."""
        draws = self

        class Theirs(InContext):
            def world(self, seed: int, device: torch.device | str) -> Any:
                return draws

            def draw(self, world: Any, generator: torch.Generator, steps: int) -> Drawn:
                return scaled(self, world.block(generator, steps, self.batch))

        return {scale: Theirs(scale=scale, batch=batch) for scale in SCALES}


def scaled(task: InContext, drawn: Drawn) -> Drawn:
    """The program's sequences at the task's scale, in float64; the factor, 1 or 8, rounds nothing."""
    return drawn._replace(inputs=drawn.inputs.double() * (task.deviation * task.width))


@contextmanager
def fresh(dtype: torch.dtype, *, everywhere: bool = False) -> Iterator[None]:
    """New tensors are of that dtype; `everywhere`: also what either program casts to float32 is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mock.patch.object(Tensor, "float", Tensor.double if everywhere else Tensor.float):
            yield
    finally:
        torch.set_default_dtype(before)


def neighbours(width: int) -> Tensor:
    """The order of columns that makes pairs of neighbours of the pairs that lie half a head apart."""
    return torch.arange(width).view(2, -1).T.flatten()


def named_there(architecture: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights of one model under the program's names, in its shapes [outputs, inputs] and its order of columns."""
    found = {}
    for name, tensor in weights.items():
        stem = name.removesuffix(".bias")
        first, _, second = stem.partition(".")
        if second in PARTS:
            if architecture.positional == "rope" and second != "v":
                tensor = tensor[:, neighbours(architecture.width)]
            stem = f"attn_layers.{first}.{PARTS[second]}"
        else:
            stem = f"mlp_layers.{second}" if first == "head" else "lin"
        found[f"{stem}.{'bias' if name.endswith('bias') else 'weight'}"] = tensor.T if tensor.ndim == 2 else tensor
    return found


def model_there(draws: Draws, run: Run) -> Any:
    """The program's model with our fresh weights."""
    a = run.architecture
    sizes = dict(in_channels=a.width, hidden_channels=a.width, out_channels=a.outputs, num_attn_layers=a.blocks)
    masks = dict(mask_type=a.mask, window_size=a.window or a.length, num_prefixes=a.prefix or 1)
    if a.positional == "decay":
        masks |= dict(mask_type="decay", gamma=GAMMA)
    model = draws.san(**sizes, **masks, pe=ENCODINGS.get(a.positional), residual=a.residual)
    begin = named_there(a, initial(a, run.seed))
    own = dict(model.named_parameters())
    if own.keys() != begin.keys():
        raise SystemExit(f"only one of the two programs has the weights {', '.join(sorted(own.keys() ^ begin.keys()))}")
    for name, parameter in own.items():
        parameter.data.copy_(begin[name])
    return model
