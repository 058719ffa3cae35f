"""Toys that match a model: which architectures, which tasks, training that plans share, and views for the probes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from probes.errors import InputError
from probes.models.view import Spec
from toy.matching import QUICK, TASKS, Matching, Settings, finish, model_steps, plan, toys
from toy.model import initial
from toy.tasks import Copying, InContext
from toy.train import Run, train

SPEC = Spec(
    family="llama",
    blocks=3,
    heads=4,
    kv_heads=4,
    head_dim=32,
    width=128,
    vocabulary=1000,
    positional=("rope",) * 3,
    windows=(None,) * 3,
    max_length=256,
    initializer_range=0.02,
)
SMALL = Settings(
    seeds=2,
    items=4,
    width=8,
    vocabulary=4,
    classes=16,
    labels=4,
    burst=2,
    steps=3,
    in_context_steps=2,
    batch=4,
    sequences=8,
)


def planned(spec: Spec = SPEC, *, settings: Settings = SMALL, **given: Any):
    return plan(spec, **({"bos": True, "length": 256, "settings": settings} | given))


def variants(*args: Any, **given: Any) -> dict[str, Any]:
    return {variant.name: variant for variant in planned(*args, **given).variants}


def test_matched_toy_shares_what_position_can_come_from():
    found = variants()["matched"].architectures["retrieval"]
    assert (found.blocks, found.heads, found.mask, found.positional) == (3, 4, "causal", "rope")
    assert (found.residual, found.feed_forward, found.norm, found.output_projection) == (True, True, "rms", True)
    assert found.width == 16  # four heads of at least four dimensions
    assert found.length == 9
    assert variants(norm="layer")["matched"].architectures["in-context"].norm == "layer"


@pytest.mark.parametrize(("heads", "width"), [(1, 32), (4, 32), (12, 48), (14, 56), (32, 128)])
def test_heads_divide_the_width_and_are_even(heads, width):
    found = variants(replace(SPEC, heads=heads, kv_heads=heads), settings=Settings())["matched"]
    assert found.architectures["retrieval"].width == width
    assert found.architectures["retrieval"].head_dim % 2 == 0


def test_each_ablation_lacks_one_ingredient():
    found = {name: one.architectures["retrieval"] for name, one in variants().items()}
    assert set(found) == {"matched", "no residual", "no causal mask", "no positions"}
    matched = found["matched"]
    assert found["no residual"] == replace(matched, residual=False)
    assert found["no causal mask"] == replace(matched, mask="full")
    assert found["no positions"] == replace(matched, positional="none")


def test_windowed_models_have_a_variant_without_window():
    found = {n: v.architectures["retrieval"] for n, v in variants(replace(SPEC, windows=(97,) * 3), length=257).items()}
    assert found["matched"].window == 4  # 96 of 256 steps back, 3 of 8
    assert found["no window"] == replace(found["matched"], mask="causal", window=None)
    assert found["no causal mask"].window is None


@pytest.mark.parametrize(
    ("window", "length", "expected"), [(32, 256, 3), (2, 256, 2), (256, 256, None), (400, 256, None)]
)
def test_windows_keep_their_fraction_of_the_length(window, length, expected):
    found = variants(replace(SPEC, windows=(window,) * 3), length=length, settings=replace(SMALL, items=8))["matched"]
    assert found.architectures["retrieval"].window == expected
    assert found.architectures["retrieval"].mask == ("causal" if expected is None else "window")


def test_models_without_encoding_have_none_to_take_away():
    assert "no positions" not in variants(replace(SPEC, positional=("none",) * 3))
    learned = variants(replace(SPEC, positional=("learned",) * 3))
    assert learned["matched"].architectures["retrieval"].positional == "learned"


def test_what_does_not_match_is_said():
    assert planned().notes == ()
    notes = planned(
        replace(SPEC, windows=(None, 8, None), kv_heads=2, prefix=4, positional=("rope", "none", "rope"))
    ).notes
    assert len(notes) == 4
    for said in ("window differ", "prefix", "positional encoding", "4 query heads share 2"):
        assert any(said in note for note in notes)


def test_retrieval_asks_for_every_position_but_that_of_bos():
    with_bos, without = (variants(bos=bos)["matched"].tasks["retrieval"] for bos in (True, False))
    assert [task.target for task in with_bos] == list(range(1, 9))
    assert [task.target for task in without] == list(range(9))
    assert with_bos[0].first == 4
    assert without[0].first is None


def test_runs_are_seeds_by_targets_and_fewer_for_ablations():
    found = variants()
    assert len(found["matched"].runs("retrieval")) == 2 * 8
    assert len(found["no residual"].runs("retrieval")) == 8
    assert [run.seed for run in found["matched"].runs("in-context")] == [0, 1]
    assert variants(settings=replace(SMALL, ablations=False)).keys() == {"matched"}


def test_all_retrieval_models_of_a_shape_train_side_by_side():
    shapes = {run.architecture.shape for run in planned().runs("retrieval")}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [({"seeds": 0}, "seeds=0"), ({"steps": 0}, "steps=0"), ({"items": 2}, "items=2"), ({"burst": 3}, "burst=3")],
)
def test_settings_that_cannot_be_are_refused(given, said):
    with pytest.raises(InputError, match=said):
        replace(SMALL, **given)


def test_quick_setting_is_small():
    assert model_steps([planned(settings=QUICK)]) < 0.05 * model_steps([planned(settings=Settings())])


# ----------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def groups():
    return toys([planned()])[0]


def test_groups_are_variants_by_tasks(groups):
    names = ["matched", "no residual", "no causal mask", "no positions"]
    assert [(group.variant, group.task) for group in groups] == [(name, task) for name in names for task in TASKS]
    assert [member.target for member in groups[0].members] == 2 * list(range(1, 9))
    assert all(0 <= member.accuracy <= 1 for group in groups for member in group.members)


def test_members_are_what_training_alone_gives(groups):
    member = groups[0].members[3]
    alone = train([member.run], SMALL.steps)[0]
    for name in alone.weights:
        torch.testing.assert_close(member.view._weights[name][0], alone.weights[name], atol=1e-6, rtol=1e-4)
    for name, tensor in initial(member.run.architecture, member.seed).items():
        assert torch.equal(member.fresh._weights[name][0], tensor)
    assert member.loss == pytest.approx(float(alone.losses.mean()), rel=1e-4)


def test_prompts_are_sequences_of_the_task(groups):
    found = groups[0].members[0]
    tokens = found.prompts(5)
    assert tokens.shape == (5, 9)
    assert (tokens[:, 0] == found.view.bos).all()
    assert int(tokens[:, 1:].max()) < 4
    assert torch.equal(tokens, groups[0].members[5].prompts(5))
    in_context = groups[1].members[0]
    ids = in_context.prompts(5)
    assert (ids[:, 0::2] < 16).all()
    assert (ids[:, 1::2] >= 16).all()
    assert in_context.view.bos is None
    assert torch.isfinite(in_context.view.residual(in_context.view.embed(ids))).all()


def test_scaled_toys_differ_in_what_enters_alone(groups):
    member = groups[0].members[0]
    tokens = member.prompts(3)
    torch.testing.assert_close(member.scaled(0.25).embed(tokens), 0.25 * member.fresh.embed(tokens))
    assert torch.equal(member.scaled(0.25)._weights["0.q"], member.fresh._weights["0.q"])


def test_plans_share_what_they_have_in_common():
    one, other = planned(), planned(replace(SPEC, windows=(97,) * 3))
    apart = sum(model_steps([each]) for each in (one, other))
    assert model_steps([one, one]) == model_steps([one])
    # Both have the variant without mask, and what one calls matched the other calls "no window", of its first seed.
    common = 8 * SMALL.steps + SMALL.in_context_steps
    assert model_steps([one, other]) == apart - 2 * common


def test_equal_groups_of_two_plans_have_one_key():
    small = replace(SMALL, ablations=False, seeds=1)
    first, second = toys([planned(settings=small), planned(replace(SPEC, vocabulary=7), settings=small)])
    assert first[0].key == second[0].key
    assert first[0].key != first[1].key


def test_plans_of_two_settings_are_refused():
    with pytest.raises(InputError, match="2 settings"):
        toys([planned(), planned(settings=replace(SMALL, steps=4))])
    with pytest.raises(InputError, match="0 plans"):
        toys([])


class Stop(Exception):
    """Pulls the plug."""


def test_training_goes_on_where_it_stopped(tmp_path):
    small = replace(SMALL, ablations=False, seeds=1)
    whole = toys([planned(settings=small)])

    def advance(label: str, done: float, total: float) -> None:
        if label == "toys: in-context":
            raise Stop

    with pytest.raises(Stop):
        toys([planned(settings=small)], folder=tmp_path / "kept", advance=advance)
    assert list((tmp_path / "kept" / "retrieval").glob("group-*"))
    told: list[tuple[str, float, float]] = []
    found = Matching(small, "cpu").toys([planned(settings=small)], tmp_path / "kept", lambda *now: told.append(now))
    assert told[0] == ("toys: retrieval", 24.0, 24.0)  # all there
    for one, other in zip(whole[0], found[0], strict=True):
        assert [m.loss for m in one.members] == [m.loss for m in other.members]
    finish(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_retrieval_can_be_learned():
    """The setting's rate and schedule, on a short sequence with its own first token."""
    task = Copying(vocabulary=5, length=5, target=2, batch=32, bos=True)
    shape = replace(variants()["matched"].architectures["retrieval"], length=5, vocabulary=5, outputs=4)
    trained = train([Run(shape, task, learning_rate=Settings().learning_rate, schedule="cosine")], 150)[0]
    assert float(trained.losses[-10:].mean()) < 0.1


def test_accuracy_in_context_is_that_of_novel_classes():
    task = InContext(items=4, width=8, classes=16, labels=4, burst=2)
    world = task.world(0, "cpu")
    drawn = task.novel(world, torch.Generator().manual_seed(1), 200)
    inputs = drawn.inputs[0]
    assert inputs.shape == (200, 9, 8)
    # The answer is the label behind an item of the query's class, and no item is one of the world's classes.
    near = (inputs[:, 0:8:2] - inputs[:, 8:]).square().sum(-1).argmin(-1)
    behind = inputs[torch.arange(200), 2 * near + 1]
    guessed = (behind[:, None] - world.labels).square().sum(-1).argmin(-1)
    assert (guessed == drawn.hidden[0]).double().mean() > 0.7


def test_positions_asked_for_are_all_or_evenly_spaced():
    length = SMALL.length
    assert SMALL.asked(True) == list(range(1, length))
    assert SMALL.asked(False) == list(range(length))
    few = replace(SMALL, targets=3)
    assert few.asked(True) == [1, round((1 + length - 1) / 2), length - 1]
    assert replace(SMALL, targets=99).asked(True) == list(range(1, length))
    with pytest.raises(InputError, match="targets=-1"):
        replace(SMALL, targets=-1)
