"""What toys are trained on: distributions and structure of the sequences, against counting and the formula."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from commands import bad_input

from toy.tasks import Copying, InContext

SMALL = InContext(items=4, width=6, classes=5, labels=3, burst=2, batch=8)
WORLD = SMALL.world(0, "cpu")


def generator(seed: int = 100) -> torch.Generator:
    """Of a seed that no world of these tests has."""
    return torch.Generator().manual_seed(seed)


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Between all rows of x and all of y, exactly 0 where they are the same."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def uniform(counts: torch.Tensor) -> bool:
    """Whether counts are what a uniform distribution gives: each within 4.5 standard deviations, by binomial counting."""
    n, p = counts.sum().item(), 1 / counts.numel()
    return bool(((counts - n * p).abs() < 4.5 * math.sqrt(n * p * (1 - p))).all())


def test_copying_draws_every_token_alike_and_asks_for_the_one_at_its_position():
    drawn = Copying(vocabulary=6, length=4, batch=500).draw(None, generator(), 20)
    assert drawn.inputs.shape == (20, 500, 4)
    for target in range(-4, 4):
        answers = Copying(vocabulary=6, length=4, batch=500, target=target).answers(drawn)
        np.testing.assert_array_equal(answers, drawn.inputs.numpy()[..., target])
    inputs = drawn.inputs.flatten(0, 1)
    for position in range(4):
        assert uniform(torch.bincount(inputs[:, position], minlength=6))
    for a, b in combinations(range(4), 2):
        assert uniform(torch.bincount(inputs[:, a] * 6 + inputs[:, b], minlength=36))


def test_bos_stands_first_and_nowhere_else():
    task = Copying(vocabulary=5, length=6, target=3, batch=50, bos=True)
    drawn = task.draw(None, generator(), 4)
    assert (drawn.inputs[..., 0] == 4).all()
    assert (task.outputs, task.first, Copying().outputs, Copying().first) == (4, 4, 10, None)
    assert torch.equal(task.answers(drawn), drawn.inputs[..., 3])
    # Text behind it is drawn like any other.
    without = Copying(vocabulary=4, length=6, batch=50).draw(None, generator(), 4).inputs
    assert torch.equal(drawn.inputs[..., 1:], without[..., 1:])


@pytest.mark.parametrize("biased", [None, (0,), (1, 2)])
def test_sequences_have_the_structure_of_the_source(biased):
    task = InContext(items=4, width=6, classes=5, labels=3, burst=2, eps=0.0, batch=1000, biased=biased)
    world = task.world(1, "cpu")
    drawn = task.draw(world, generator(), 3)
    assert drawn.inputs.shape == (3, 1000, 9, 6)
    assert task.answers(drawn).shape == (3, 1000)
    # By the nearest class mean and label, which is exact where nothing is noisy.
    x = drawn.inputs.flatten(0, 1)
    classes, labels = distance(x[:, 0::2], world.means).argmin(-1), distance(x[:, 1::2], world.labels).argmin(-1)
    own, query = classes[:, :-1], classes[:, -1:]
    assert all(sorted(row.count(c) for c in set(row)) == [2, 2] for row in own.tolist())  # `burst` of each class
    assert torch.equal(labels, world.label_of[own])
    assert torch.equal(task.answers(drawn).flatten(), world.label_of[query[:, 0]])
    # Of a sequence's items, two are of the query's class: the asked one, and one of the other three at random.
    assert (own == query).sum(1).eq(2).all()
    places = range(4) if biased is None else biased
    wanted = torch.tensor([sum((at == p) + (at != p) / 3 for p in places) / len(places) for at in range(4)])
    # A share's largest deviation is 0.5 / sqrt n.
    assert torch.allclose((own == query).float().mean(0), wanted, atol=4.5 * 0.5 / math.sqrt(3000))


@pytest.mark.parametrize(("classes", "kinds"), [(5, 2), (4, 4)])
def test_classes_are_drawn_uniformly_without_replacement(classes, kinds):
    task = InContext(items=kinds, width=2, classes=classes, burst=1)
    counts = {chosen: 0 for chosen in permutations(range(classes), kinds)}
    for row in task._classes(generator(), (30_000,)).tolist():
        counts[tuple(row)] += 1  # a KeyError: a class twice, or one that is not there
    assert uniform(torch.tensor(list(counts.values())))


@pytest.mark.parametrize(
    ("data", "scale", "deviation"), [("gaussian", "text", 1 / math.sqrt(48)), ("fixed", "program", 1 / 48)]
)
def test_every_vector_has_the_stated_variance_and_fixed_ones_lean_to_one_side(data, scale, deviation):
    task = InContext(width=48, classes=400, labels=100, scale=scale, data=data, batch=64)
    world = task.world(0, "cpu")
    items = torch.cat([task.draw(task.world(seed, "cpu"), generator(seed), 1).inputs[0, :, ::2] for seed in range(30)])
    for vectors in (world.means, world.labels, items):
        # 30 x 48 numbers of fixed data's common direction have the largest error, 0.75^2 / 1.5625 x sqrt(2 / 1440) = 1.3 %,
        # and 100 labels 2 %.
        assert vectors.square().mean().sqrt().item() == pytest.approx(deviation, rel=0.05)
    if data == "fixed":
        of_class = (world.means + 0.75 * world.common) / 1.25  # 1.25^2 = 1 + 0.75^2
        assert distance(items[:64].flatten(0, 1), of_class).min(-1).values.max() < 1e-6


def test_a_sequence_is_put_together_as_the_formula_says(monkeypatch):
    """[Wu]'s: `(mu + eps eta) / sqrt(1 + eps^2)`, its label's vector, ..., the query without one."""
    noise, fresh = [], torch.randn

    def kept(*size, **options):
        noise.append(fresh(*size, **options))
        return noise[-1]

    monkeypatch.setattr(torch, "randn", kept)
    inputs = SMALL.draw(WORLD, generator(), 2).inputs
    (eta,) = noise  # [step, B, items + 1, d], of standard deviation 1
    eta = SMALL.eps * SMALL.deviation * eta
    scale = math.sqrt(1 + SMALL.eps**2)
    classes = distance(inputs[..., ::2, :] * scale - eta, WORLD.means).argmin(-1)
    assert torch.allclose(inputs[..., ::2, :], (WORLD.means[classes] + eta) / scale, atol=1e-6)
    assert torch.equal(inputs[..., 1::2, :], WORLD.labels[WORLD.label_of[classes[..., :-1]]])


@pytest.mark.parametrize(("data", "right", "wrong"), [("gaussian", 7, 0), ("fixed", 4, 0)])
def test_pairs_put_one_vector_in_two_places_and_ask_for_one(data, right, wrong):
    task = InContext(width=16, classes=64, labels=32, data=data)
    world = task.world(0, "cpu")
    drawn = task.pairs(world, generator(), 4000, right, wrong)
    x, answers = drawn.inputs[0], task.answers(drawn)[0]
    assert torch.equal(x[:, 2 * right], x[:, 2 * wrong])
    if data == "gaussian":  # no other two items are the same, and the query is a vector of its own
        others = x[:, 0::2][:, [at for at in range(9) if at != wrong]]
        assert (distance(others, others) + torch.eye(8)).min() > 0
    labels = distance(x[:, 1::2], world.labels).argmin(-1)
    assert torch.equal(labels[:, right], answers)
    # `wrong` has the label of the class it had: of `right`'s class with 3 of the 7 other items, else one of 32 by chance.
    expected = 3 / 7 + 4 / 7 / 32
    share = (labels[:, wrong] == answers).float().mean().item()
    assert share == pytest.approx(expected, abs=4.5 * math.sqrt(expected * (1 - expected) / 4000))


def test_tests_are_of_classes_that_training_never_shows():
    task = InContext(width=16, classes=64, eps=0.0)
    world = task.world(0, "cpu")
    places = torch.arange(300)
    for at, same, drawn in (
        (0, {4, 5}, task.pairs(world, generator(1), 300, 0, 7)),  # 4 items of one class, but for the one replaced
        (3, {1}, task.single(world, generator(2), 300, 3)),
        (None, {4}, task.novel(world, generator(3), 300)),
    ):
        x, answers = drawn.inputs[0], task.answers(drawn)[0]
        items, query, labels = x[:, 0:-1:2], x[:, -1:], distance(x[:, 1::2], world.labels).argmin(-1)
        assert distance(items, world.means).min() > 0.1  # no mean of training's, whose vectors have length 1
        alike = distance(items, query)[..., 0] < 1e-3
        assert set(alike.sum(1).tolist()) == same
        shown = alike.int().argmax(1) if at is None else at
        assert alike[places, shown].all()
        assert torch.equal(labels[places, shown], answers)


def test_relabelled_classes_have_each_others_labels():
    task = InContext(width=16, classes=64, labels=32, burst=2, eps=0.0)
    world = task.world(0, "cpu")
    drawn = task.relabelled(world, generator(3), 200)
    x, own = drawn.inputs[0], drawn.hidden[0]
    classes = distance(x[:, 0::2], world.means).argmin(-1)  # of the items, and of the query
    assert torch.equal(world.label_of[classes[:, -1]], own)
    for asked, shown in zip(classes.tolist(), distance(x[:, 1::2], world.labels).argmin(-1).tolist(), strict=True):
        told = dict(sorted(zip(asked[:-1], shown, strict=True)))  # by class its one label: that of the class before
        assert len(told) == 4
        assert list(told.values()) == [int(world.label_of[n]) for n in [*list(told)[-1:], *list(told)[:-1]]]


def test_the_same_seed_draws_the_same_and_another_does_not():
    state = torch.get_rng_state()
    worlds = [SMALL.world(seed, "cpu") for seed in (5, 5, 6)]
    drawn = [SMALL.pairs(worlds[0], generator(seed), 9, 0, 3) for seed in (1, 1, 2)]
    for one, same, differs in (*zip(*worlds, strict=True), [each.inputs for each in drawn]):
        assert torch.equal(one, same)
        assert not torch.equal(one, differs)
    assert torch.equal(state, torch.get_rng_state())  # nobody else's numbers are used up


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Copying(vocabulary=2, bos=True), "vocabulary=2 is too few; give at least 3"),
        (lambda: Copying(target=10), "target=10 is no position of 10; give from -10 to 9"),
        (lambda: Copying(target=0, bos=True), "target=0 is BOS in every sequence; give from 1 to 9"),
        (lambda: InContext(burst=3), "burst=3 does not divide 8 items"),
        (lambda: InContext(classes=1), "classes=1 is too few; give at least 2"),
        (lambda: InContext(biased=(8,)), "biased=(8,) are no items; give numbers from 0 to 7, or None"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(make, says):
    with bad_input(says):
        make()
