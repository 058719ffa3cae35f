"""The training that `headwater selftest` repeats on two devices: one small toy, to where it has learnt its task."""

from dataclasses import dataclass

import torch
import xarray as xr

from probes.results.dataset import dataset

from .model import Architecture
from .tasks import Copying, Drawn
from .train import Run, train

LENGTH, STEPS, RATE = 12, 100, 3e-3


@dataclass(frozen=True)
class SameEverywhere(Copying):
    """`Copying` of sequences that are drawn on the CPU, whatever the device that trains on them."""

    def draw(self, world: None, generator: torch.Generator, steps: int) -> Drawn:
        drawn = super().draw(world, torch.Generator().manual_seed(generator.initial_seed()), steps)
        return Drawn(*(tensor.to(generator.device) for tensor in drawn))


def training(device: torch.device) -> xr.Dataset:
    """`losses` [step] in nats and all `weights` [weight] in one row, in the end, of one toy trained on a device.

    100 steps of AdamW carry a change of 1e-6 in the initial weights to 5e-6 of the losses and 1e-4 of a matrix.
    """
    architecture = Architecture(2, 2, 32, LENGTH, positional="rope", norm="rms", feed_forward=True)
    run = Run(architecture, SameEverywhere(length=LENGTH, target=3, batch=64), learning_rate=RATE)
    (trained,) = train([run], STEPS, device=device)
    weights = torch.cat([tensor.flatten() for tensor in trained.weights.values()])
    return dataset({"losses": (("step",), trained.losses), "weights": (("weight",), weights)})
