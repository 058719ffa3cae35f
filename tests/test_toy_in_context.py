"""How in-context toys are tested: what they answer, and the sequences of the tests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from toy.experiments import position_bias as module
from toy.experiments.in_context import CHUNK, accuracies, copied, pair_tests
from toy.experiments.position_bias import PAIRS, Case, Settings, cases
from toy.model import initial
from toy.tasks import InContext
from toy.train import Run, Trained, logits, train


def test_accuracy_does_not_depend_on_how_sequences_are_cut(monkeypatch):
    settings = Settings(depths=(2,), width=8, batch=8, steps=5, seeds=1)
    some = [c for c in cases(settings) if (c.scale, c.data, c.training) == ("text", "gaussian", "first")]
    models = train([module.run_of(c, settings) for c in some], 5)
    task: Any = models[0].run.task
    drawn = task.single(task.world(0, "cpu"), torch.Generator().manual_seed(1), 101, 3)
    expected = [float((logits([m], drawn.inputs[0])[0].argmax(-1) == drawn.hidden[0]).float().mean()) for m in models]
    for chunk in (1, 4000, 1 << 30):
        monkeypatch.setitem(CHUNK, "cpu", chunk)
        found = accuracies([(m.run.architecture, m.weights) for m in models], drawn, torch.device("cpu"))
        np.testing.assert_allclose(found, expected, atol=1.01 / 101)  # a tie of logits at most


def test_answers_and_copied_labels_are_counted_one_by_one():
    task = InContext(width=8, labels=4)
    a = replace(module.architecture_of(2, "causal", "rope", "on", 8), outputs=4)
    models = [Trained(Run(a, task, seed), torch.zeros(1), initial(a, seed)) for seed in (0, 1)]
    world = task.world(0, "cpu")
    drawn = task.novel(world, torch.Generator().manual_seed(1), 50)
    pairs, cpu = [(a, model.weights) for model in models], torch.device("cpu")
    accuracy, shown = accuracies(pairs, drawn, cpu), copied(pairs, world, drawn, cpu)
    for n, said in enumerate(logits(models, drawn.inputs[0]).argmax(-1).tolist()):
        right = among = 0
        for sequence, answer, given in zip(drawn.inputs[0], drawn.hidden[0].tolist(), said, strict=True):
            labels = [next(i for i in range(4) if torch.equal(world.labels[i], x)) for x in sequence[1::2]]
            right += given == answer
            among += given in labels
        assert (accuracy[n], shown[n]) == pytest.approx((right / 50, among / 50), abs=1e-6)
    assert 0 < shown.min() < shown.max() < 1


def test_test_sets_depend_on_the_world_alone():
    settings = Settings(width=8)
    one, other, elsewhere = (
        module.run_of(Case(scale, "gaussian", depth, "causal", "none", "off", training, 3), settings)
        for scale, depth, training in (("text", 2, "first"), ("text", 4, "unbiased"), ("program", 2, "first"))
    )
    sets = [list(pair_tests(run, PAIRS.values(), 9, torch.device("cpu"))) for run in (one, other, elsewhere)]
    for (a, b, x), (c, d, y), (_, _, z) in zip(*sets, strict=True):
        assert (a, b) == (c, d)
        assert b in (1, -1)
        assert torch.equal(x.inputs, y.inputs)
        assert torch.equal(x.hidden, y.hidden)
        assert not torch.equal(x.inputs, z.inputs)
    assert not torch.equal(sets[0][0][2].inputs, sets[0][1][2].inputs)
