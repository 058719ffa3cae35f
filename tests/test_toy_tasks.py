"""What toys are trained on: distributions and structure of the sequences, against counting and the formula."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import pytest
import reference
import torch

from probes.errors import InputError
from toy.tasks import Copying, InContext, World

SMALL = InContext(items=4, width=6, classes=5, labels=3, burst=2, batch=8)


def generator(seed: int = 100) -> torch.Generator:
    """Of a seed that no world of these tests has: the same would draw the same vectors."""
    return torch.Generator().manual_seed(seed)


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Between all rows of x and all of y, exactly 0 where they are the same."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def uniform(counts: torch.Tensor) -> bool:
    """Whether counts are what a uniform distribution gives: each within 4.5 standard deviations, by binomial counting.

    For a few dozen counts that fails by chance once in ten thousand seeds; seeds are fixed.
    """
    n, p = counts.sum().item(), 1 / counts.numel()
    return bool(((counts - n * p).abs() < 4.5 * math.sqrt(n * p * (1 - p))).all())


# ---------------------------------------------------------------------------------------------------------- copying


def test_copying_asks_for_the_token_at_its_position():
    drawn = Copying(vocabulary=7, length=5, batch=3).draw(None, generator(), 4)
    assert drawn.inputs.shape == (4, 3, 5)
    for target in range(-5, 5):
        answers = Copying(vocabulary=7, length=5, batch=3, target=target).answers(drawn)
        for step in range(4):
            for n in range(3):
                assert answers[step, n] == drawn.inputs[step, n].tolist()[target]


def test_copying_draws_every_token_everywhere_alike_and_independently():
    inputs = Copying(vocabulary=6, length=4, batch=500).draw(None, generator(), 20).inputs.flatten(0, 1)
    for position in range(4):
        assert uniform(torch.bincount(inputs[:, position], minlength=6))
    for a, b in combinations(range(4), 2):
        assert uniform(torch.bincount(inputs[:, a] * 6 + inputs[:, b], minlength=36))


def test_copying_targets_share_a_stream_and_other_sizes_do_not():
    assert Copying(target=3).stream == Copying(target=-2).stream
    for other in (Copying(vocabulary=11), Copying(length=11), Copying(batch=64)):
        assert other.stream != Copying().stream


def test_copying_is_described_by_all_its_fields():
    assert Copying(9, 8, 2, 16).described() == {
        "task": "copying",
        "vocabulary": 9,
        "length": 8,
        "target": 2,
        "batch": 16,
        "bos": False,
    }


def test_bos_stands_first_and_nowhere_else():
    task = Copying(vocabulary=5, length=6, target=3, batch=50, bos=True)
    drawn = task.draw(None, generator(), 4)
    assert (drawn.inputs[..., 0] == 4).all()
    assert set(drawn.inputs[..., 1:].unique().tolist()) == {0, 1, 2, 3}
    assert (task.outputs, task.first, task.stream.bos) == (4, 4, True)
    assert torch.equal(task.answers(drawn), drawn.inputs[..., 3])
    assert (Copying().first, Copying().outputs) == (None, 10)


@pytest.mark.parametrize("given", [{"target": 0}, {"target": -6}, {"vocabulary": 2}])
def test_bos_cannot_be_asked_for_or_be_all_there_is(given):
    with pytest.raises(InputError, match=f"{next(iter(given))}={next(iter(given.values()))}"):
        Copying(**({"vocabulary": 5, "length": 6, "target": 3, "bos": True} | given))


def test_text_behind_bos_is_drawn_like_any_other():
    with_bos = Copying(vocabulary=5, length=6, bos=True).draw(None, generator(), 3).inputs
    without = Copying(vocabulary=4, length=6).draw(None, generator(), 3).inputs
    assert torch.equal(with_bos[..., 1:], without[..., 1:])


# --------------------------------------------------------------------------------------------- in-context retrieval


def read(task: InContext, world: World, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(class of each item and of the query [n, items + 1], label after each item [n, items]) from the vectors alone.

    By the nearest class mean and label, which is exact where nothing is noisy.
    """
    assert task.eps == 0
    items, labels = inputs[:, 0::2], inputs[:, 1::2]
    return distance(items, world.means).argmin(-1), distance(labels, world.labels).argmin(-1)


@pytest.mark.parametrize("biased", [None, (0,), (3,), (0, 3), (1, 1, 2)])
def test_sequences_have_the_structure_of_the_source(biased):
    task = InContext(items=4, width=6, classes=5, labels=3, burst=2, eps=0.0, batch=1000, biased=biased)
    world = task.world(1, "cpu")
    drawn = task.draw(world, generator(), 3)
    assert drawn.inputs.shape == (3, 1000, 9, 6)
    answers = task.answers(drawn)
    assert answers.shape == (3, 1000)
    classes, labels = read(task, world, drawn.inputs.flatten(0, 1))
    asked = torch.zeros(4)
    for row, given, answer in zip(classes.tolist(), labels.tolist(), answers.flatten().tolist(), strict=True):
        *own, query = row
        counts = {c: own.count(c) for c in own}
        assert sorted(counts.values()) == [2, 2]  # exactly `burst` of each, of items / burst distinct classes
        assert query in counts
        assert given == [int(world.label_of[c]) for c in own]
        assert answer == int(world.label_of[query])
        for position in range(4):
            asked[position] += own[position] == query
    # Of a sequence's items, two are of the query's class: the asked one, and one of the other three at random.
    places = range(4) if biased is None else biased
    wanted = torch.tensor([sum((at == p) + (at != p) / 3 for p in places) / len(places) for at in range(4)])
    assert torch.allclose(
        asked / 3000, wanted, atol=4.5 * 0.5 / math.sqrt(3000)
    )  # a share's largest deviation is 0.5/sqrt n


@pytest.mark.parametrize(("classes", "kinds"), [(5, 2), (4, 3), (4, 4), (3, 1)])
def test_classes_are_drawn_uniformly_without_replacement(classes, kinds):
    task = InContext(items=kinds, width=2, classes=classes, burst=1)
    drawn = task._classes(generator(), (30_000,))
    counts = {chosen: 0 for chosen in permutations(range(classes), kinds)}
    for row in drawn.tolist():
        counts[tuple(row)] += 1  # a KeyError: a class twice, or one that is not there
    assert uniform(torch.tensor(list(counts.values())))


def test_the_order_of_items_is_uniform():
    task = InContext(items=4, width=2, classes=9, burst=2)
    drawn = task._classes(generator(), (12_000,))
    same = drawn == drawn[:, :1]
    assert same.sum(1).eq(2).all()
    partner = same[:, 1:].int().argmax(1)
    assert uniform(torch.bincount(partner, minlength=3))
    assert uniform(torch.bincount(drawn.flatten(), minlength=9))


@pytest.mark.parametrize(("scale", "deviation"), [("text", 1 / math.sqrt(48)), ("program", 1 / 48)])
@pytest.mark.parametrize("data", ["gaussian", "fixed"])
def test_every_vector_has_the_stated_variance(scale, deviation, data):
    task = InContext(width=48, classes=400, labels=100, scale=scale, data=data, batch=64)
    assert task.deviation == pytest.approx(deviation)
    world = task.world(0, "cpu")
    items = torch.cat([task.draw(task.world(seed, "cpu"), generator(seed), 1).inputs[0, :, ::2] for seed in range(30)])
    for vectors in (world.means, world.labels, items):
        # Classes and, in fixed data, the common direction recur: independent numbers are fewer than numbers. 30 x 48 of the
        # common direction have the largest error, 0.75^2 / 1.5625 x sqrt(2 / 1440) = 1.3 %; labels have 2 %.
        assert vectors.square().mean().sqrt().item() == pytest.approx(deviation, rel=0.05)
        assert abs(vectors.mean().item()) < 0.15 * deviation


def test_items_of_one_class_share_its_mean_and_nothing_else():
    task = InContext(items=8, width=64, classes=2, burst=4, eps=0.75, batch=500)
    world = task.world(0, "cpu")
    inputs = task.draw(world, generator(), 2).inputs.flatten(0, 1)
    items = inputs[:, 0:-1:2]
    means = world.means / math.sqrt(1 + 0.75**2)
    nearest = distance(items, means).argmin(-1)  # two classes, 11 standard deviations apart
    noise = items - means[nearest]
    assert (nearest == 0).sum(1).eq(4).all()
    wanted = 0.75 / 8 / math.sqrt(1 + 0.75**2)
    assert noise.std().item() == pytest.approx(wanted, rel=0.01)  # 512,000 numbers: 0.1 %
    # Noise of different items is uncorrelated: 64,000 products per pair, 0.4 % each.
    by_item = noise.transpose(0, 1).flatten(1)
    assert torch.allclose(torch.corrcoef(by_item), torch.eye(8), atol=0.02)
    # So is that of the query and the item it was asked for: no item is the query's copy.
    query = inputs[:, -1] - means[distance(inputs[:, -1], means).argmin(-1)]
    for at in range(8):
        both = torch.stack([noise[:, at].flatten(), query.flatten()])
        assert abs(torch.corrcoef(both)[0, 1]) < 0.02


def test_fixed_data_have_one_vector_per_class_all_leaning_to_one_side():
    task = InContext(items=4, width=6, classes=5, labels=3, burst=2, data="fixed", anisotropy=0.5, batch=200)
    world = task.world(3, "cpu")
    items = task.draw(world, generator(), 2).inputs[..., ::2, :].flatten(0, 2)
    wanted = (world.means + 0.5 * world.common) / math.sqrt(1.25)
    assert distance(items, wanted).min(-1).values.max() < 1e-6
    assert torch.unique(distance(items, wanted).argmin(-1)).tolist() == [0, 1, 2, 3, 4]


def test_a_sequence_is_put_together_as_the_formula_says(monkeypatch):
    task = SMALL
    world = task.world(0, "cpu")
    noise: list[torch.Tensor] = []
    fresh = torch.randn

    def kept(*size, **options):
        noise.append(fresh(*size, **options))
        return noise[-1]

    monkeypatch.setattr(torch, "randn", kept)
    drawn = task.draw(world, generator(), 2)
    (eta,) = noise  # [step, B, items + 1, d], of standard deviation 1
    for step in range(2):
        for n in range(8):
            # Which classes they are is read off the noiseless rest.
            items = drawn.inputs[step, n, ::2] * math.sqrt(1 + task.eps**2) - task.eps * task.deviation * eta[step, n]
            classes = distance(items, world.means).argmin(-1).tolist()
            wanted = reference.in_context_sequence(
                world.means[classes].tolist(),
                world.labels.tolist(),
                world.label_of[classes].tolist(),
                (eta[step, n] * task.deviation).tolist(),
                task.eps,
            )
            assert torch.allclose(drawn.inputs[step, n], torch.tensor(wanted), atol=1e-6)


# --------------------------------------------------------------------------------------------------------- test sets


@pytest.mark.parametrize("data", ["gaussian", "fixed"])
@pytest.mark.parametrize(("right", "wrong"), [(0, 4), (4, 0), (0, 7), (7, 0), (7, 4)])
def test_pairs_put_one_vector_in_two_places_and_ask_for_one(data, right, wrong):
    task = InContext(width=16, classes=64, labels=32, data=data)
    world = task.world(0, "cpu")
    drawn = task.pairs(world, generator(), 4000, right, wrong)
    x, answers = drawn.inputs[0], task.answers(drawn)[0]
    assert x.shape == (4000, 17, 16)
    assert torch.equal(x[:, 2 * right], x[:, 2 * wrong])
    if data == "gaussian":  # no other two items are the same, and the query is a vector of its own
        others = [at for at in range(8) if at != wrong]
        apart = distance(x[:, 0::2][:, [*others, 8]], x[:, 0::2][:, [*others, 8]])
        assert (apart + torch.eye(8)).min() > 0
    labels = distance(x[:, 1::2], world.labels)
    assert labels.min(-1).values.max() < 1e-5
    labels = labels.argmin(-1)
    assert torch.equal(labels[:, right], answers)
    # `wrong` has the label of the class it had: of `right`'s class with 3 of the 7 other items, else one of 32 by chance.
    share = (labels[:, wrong] == answers).float().mean().item()
    expected = 3 / 7 + 4 / 7 / 32
    assert share == pytest.approx(expected, abs=4.5 * math.sqrt(expected * (1 - expected) / 4000))
    assert uniform(torch.bincount(answers, minlength=32))


def test_pairs_ask_for_novel_classes():
    task = InContext(width=16, classes=64, eps=0.0)
    world = task.world(0, "cpu")
    x = task.pairs(world, generator(), 300, 0, 7).inputs[0]
    assert distance(x[:, ::2], world.means).min() > 0.1  # no mean of training's, whose vectors have length 1
    assert torch.allclose(x[:, -1], x[:, 0])  # without noise the query is the right item
    # 4 items of one class, 4 of the other, but for the one that was replaced:
    same = (distance(x[:, 0:-1:2], x[:, -1:])[..., 0] < 1e-3).sum(1)
    assert set(same.tolist()) == {4, 5}


def test_single_has_one_item_of_each_class():
    task = InContext(width=16, classes=64, eps=0.0, labels=32)
    world = task.world(0, "cpu")
    for at in (0, 3, 7):
        drawn = task.single(world, generator(at), 500, at)
        x, answers = drawn.inputs[0], task.answers(drawn)[0]
        assert (distance(x[:, 0:-1:2], x[:, 0:-1:2]) + torch.eye(8)).min() > 0.1
        assert torch.allclose(x[:, -1], x[:, 2 * at])
        assert torch.equal(distance(x[:, 1::2], world.labels).argmin(-1)[:, at], answers)


# ------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("task", [SMALL, InContext(items=4, width=6, classes=5, burst=2, data="fixed")])
def test_the_same_seed_draws_the_same_and_another_does_not(task):
    world, again, other = (task.world(seed, "cpu") for seed in (5, 5, 6))
    for one, same, differs in zip(world, again, other, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, differs)
    for draw in (
        lambda world, seed: task.draw(world, generator(seed), 2),
        lambda world, seed: task.pairs(world, generator(seed), 9, 0, 3),
        lambda world, seed: task.single(world, generator(seed), 9, 1),
    ):
        assert torch.equal(draw(world, 1).inputs, draw(again, 1).inputs)
        assert torch.equal(draw(world, 1).hidden, draw(again, 1).hidden)
        assert not torch.equal(draw(world, 1).inputs, draw(world, 2).inputs)


def test_drawing_leaves_the_world_and_the_global_generator_alone():
    world = SMALL.world(0, "cpu")
    before = [one.clone() for one in world]
    state = torch.get_rng_state()
    SMALL.draw(world, generator(), 2)
    SMALL.pairs(world, generator(), 9, 0, 3)
    SMALL.single(world, generator(), 9, 0)
    assert all(torch.equal(*both) for both in zip(before, world, strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.gpu
def test_on_a_gpu_data_are_drawn_there():
    task = InContext(width=16, classes=64, batch=500)
    world = task.world(0, "cuda")
    drawn = task.draw(world, torch.Generator("cuda").manual_seed(0), 2)
    assert drawn.inputs.device.type == drawn.hidden.device.type == "cuda"
    assert drawn.inputs.std().item() == pytest.approx(0.25, rel=0.05)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Copying(vocabulary=1), "vocabulary=1 is too few; give at least 2"),
        (lambda: Copying(length=0), "length=0 is too few"),
        (lambda: Copying(batch=0), "batch=0 is too few"),
        (lambda: Copying(target=10), "target=10 is no position of 10; give from -10 to 9"),
        (lambda: Copying(target=-11), "target=-11 is no position of 10"),
        (lambda: InContext(items=0), "items=0 is too few"),
        (lambda: InContext(burst=3), "burst=3 does not divide 8 items"),
        (lambda: InContext(classes=1), "1 classes are too few; give at least 2"),
        (lambda: InContext(labels=0), "labels=0 is too few"),
        (lambda: InContext(eps=-0.1), "eps=-0.1 is no strength"),
        (lambda: InContext(anisotropy=math.nan), "anisotropy=nan is no strength"),
        (lambda: InContext(scale="paper"), "scale='paper' is unknown; give one of text, program"),  # pyright: ignore
        (lambda: InContext(data="words"), "data='words' is unknown; give one of gaussian, fixed"),  # pyright: ignore
        (lambda: InContext(biased=()), "biased=() are no items; give numbers from 0 to 7, or None"),
        (lambda: InContext(biased=(0, 8)), "biased=(0, 8) are no items"),
        (lambda: SMALL.pairs(SMALL.world(0, "cpu"), generator(), 1, 0, 4), "item 4 is not there; give a number from 0 to 3"),
        (lambda: SMALL.pairs(SMALL.world(0, "cpu"), generator(), 1, -1, 0), "item -1 is not there"),
        (lambda: SMALL.pairs(SMALL.world(0, "cpu"), generator(), 1, 2, 2), "items 2 and 2 are one"),
        (lambda: SMALL.single(SMALL.world(0, "cpu"), generator(), 1, 4), "item 4 is not there"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(make, says):
    with pytest.raises(InputError) as raised:
        make()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_ids_stand_for_classes_labels_and_a_query_from_the_context():
    task = InContext(items=4, width=8, classes=16, labels=4, burst=2)
    world = task.world(0, "cpu")
    ids = task.ids(world, generator(), 100)
    assert ids.shape == (100, 9)
    items, labels, query = ids[:, 0:8:2], ids[:, 1::2], ids[:, 8]
    assert torch.equal(labels, 16 + world.label_of[items])
    assert (items == query[:, None]).sum(1).eq(2).all()  # a burst of it
    assert int(ids.max()) < 16 + 4
    biased = InContext(items=4, width=8, classes=16, labels=4, burst=1, biased=(2,))
    ids = biased.ids(biased.world(0, "cpu"), generator(), 20)
    assert torch.equal(ids[:, 4], ids[:, 8])


def test_novel_sequences_are_of_classes_that_training_never_shows():
    task = InContext(items=4, width=8, classes=16, labels=4, burst=2, eps=0.0)
    world = task.world(0, "cpu")
    drawn = task.novel(world, generator(1), 50)
    items, query = drawn.inputs[0][:, 0:8:2], drawn.inputs[0][:, 8]
    assert (torch.cdist(items.flatten(0, 1), world.means) > 0.05).all()
    same = (items - query[:, None]).square().sum(-1) < 1e-10
    assert same.sum(1).eq(2).all()
    behind = drawn.inputs[0][torch.arange(50), 2 * same.int().argmax(1) + 1]
    torch.testing.assert_close(behind, world.labels[drawn.hidden[0]])
