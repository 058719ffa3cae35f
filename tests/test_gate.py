"""The gate of in-context toys: the blind reader's closed form against all its cases, and who passes."""

import itertools

import numpy as np
import pytest
import torch

from probes.results.gate import TRAINED, blind_reader, learnt
from toy.tasks import InContext


@pytest.mark.parametrize(("classes", "labels"), [(1, 4), (4, 3)])
def test_blind_reader_is_right_as_often_as_in_all_contexts(classes, labels):
    contexts = itertools.product(range(labels), repeat=classes)
    asked = [np.mean([copied == context[0] for copied in context]) for context in contexts]  # for the first class
    assert blind_reader(classes, labels) == pytest.approx(np.mean(asked), abs=1e-12)


def test_blind_reader_of_the_published_task():
    task = InContext(width=4)
    assert blind_reader(task.items // task.burst, task.labels) == 0.515625
    world = task.world(0, "cpu")
    drawn = task.novel(world, torch.Generator().manual_seed(1), 4000)
    shown = drawn.inputs[0][:, 1::2] @ world.labels.T
    nearest = (shown * 2 - world.labels.square().sum(1)).argmax(-1)
    assert (nearest == drawn.hidden[0][:, None]).double().mean() == pytest.approx(0.515625, abs=0.02)


@pytest.mark.parametrize(
    ("accuracy", "found"),
    [
        ([TRAINED] * 3, "trained"),
        ([0.7, 0.8, 0.9], "partly trained"),  # on average above, but not surely
        ([0.99], "partly trained"),
        ([0.5], "not trained"),
        ([], "not trained"),
    ],
)
def test_the_lower_end_over_runs_decides(accuracy, found):
    assert learnt(accuracy, blind_reader(2, 32)) == found
