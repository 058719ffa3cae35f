"""Toys that match a model: which architectures, which tasks, training that plans share, and views for the probes."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kept import Stop, stopping_at
from made_toys import MATCHED as SMALL

from probes.errors import InputError
from probes.models.strength import Strength, strength
from probes.models.view import Spec
from toy.matching import QUICK, TEST_SEED, Matching, Plan, Settings
from toy.model import Architecture, initial
from toy.tasks import Copying
from toy.train import logits, train
from toy.view import Toy

SPEC = Spec("llama", 3, 4, 4, 32, 128, 1000, ("rope",) * 3, (None,) * 3, 256, 0.02)


def planned(spec: Spec = SPEC, *, settings: Settings = SMALL, **given: Any) -> Plan:
    return Matching(settings, "cpu").plan(spec, **({"bos": True, "length": 256} | given))


def shapes(*args: Any, **given: Any) -> dict[str, Architecture]:
    """The architecture of each variant's retrieval toys."""
    runs = planned(*args, **given).runs
    return {name: own[0].architecture for (name, task), own in runs.items() if task == "retrieval"}


def test_matched_toys_share_what_position_can_come_from_and_ablations_lack_one_of_it():
    found = shapes(replace(SPEC, kv_heads=2))
    sizes: dict[str, Any] = {"blocks": 3, "heads": 4, "kv_heads": 2, "width": 16, "length": 9}
    matched = Architecture(**sizes, vocabulary=5, outputs=4, positional="rope", feed_forward=True, norm="rms")
    assert matched.residual
    assert matched.output_projection
    assert planned(norm="layer").runs["matched", "in-context"][0].architecture.norm == "layer"
    expected = {
        "matched": matched,
        "no residual": replace(matched, residual=False),
        "no causal mask": replace(matched, mask="full"),
        "no positions": replace(matched, positional="none"),
    }
    assert found == expected
    # Fresh ones have the model's own length and tokens.
    fresh = planned(replace(SPEC, kv_heads=2)).fresh
    assert fresh == {name: replace(one, length=256, vocabulary=1000) for name, one in expected.items()}
    assert "no positions" not in shapes(replace(SPEC, positional=("none",) * 3))
    assert shapes(replace(SPEC, positional=("learned",) * 3))["matched"].positional == "learned"
    assert shapes(settings=replace(SMALL, ablations=False)).keys() == {"matched"}


def test_depth_and_length_have_limits_that_are_said():
    plan = planned(settings=replace(SMALL, deepest=2, longest=100))
    assert plan.runs["matched", "retrieval"][0].architecture.blocks == 2
    assert plan.runs["matched", "in-context"][0].architecture.blocks == 2
    assert (plan.fresh["matched"].blocks, plan.fresh["matched"].length) == (3, 100)
    assert [note for note in plan.notes if "2 of the model's 3" in note or "100 of 256" in note] == list(
        plan.notes[-2:]
    )


def test_wavelengths_are_those_of_every_so_many_planes():
    """A base's wavelengths stay that base's with fewer planes, whatever the scaling did to them."""
    own = [1_000 ** (-n / 16) / (1 + n) for n in range(16)]  # heads of the toys have four dimensions
    found = planned(frequencies=own).fresh
    assert found["matched"].frequencies == (own[0], own[8])
    assert found["no positions"].frequencies is None


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_strengths_of_fresh_toys_are_the_model_s(norm):
    """Up to the scale of the stream, which the norms take out, and the scatter of small weights."""
    wanted = Strength(embedding=0.02, logits=0.05, values=0.04, feed_forward=0.006)
    a = planned(strengths=wanted, norm=norm, settings=replace(SMALL, width=32)).fresh["matched"]
    tokens = torch.arange(40).reshape(2, 20)
    measured = [strength(Toy(a, initial(a, seed)), tokens) for seed in range(8)]
    found = Strength(*np.sqrt(np.mean(np.square(np.array(measured, dtype=float)), 0)))
    assert found.logits == pytest.approx(wanted.logits, rel=0.1)
    assert found.feed_forward / found.values == pytest.approx(wanted.feed_forward / wanted.values, rel=0.1)
    assert found.embedding / found.values == pytest.approx(wanted.embedding / wanted.values, rel=0.1)


@pytest.mark.parametrize(("heads", "width"), [(4, 32), (12, 48), (14, 56)])
def test_heads_divide_the_width_and_are_even(heads, width):
    found = shapes(replace(SPEC, heads=heads, kv_heads=heads), settings=Settings())["matched"]
    assert found.width == width
    assert found.head_dim % 2 == 0


@pytest.mark.parametrize(
    ("window", "length", "expected"), [(32, 256, 3), (2, 256, 2), (97, 257, 7), (256, 256, None), (400, 256, None)]
)
def test_windows_keep_their_fraction_of_the_length(window, length, expected):
    found = shapes(replace(SPEC, windows=(window,) * 3), length=length, settings=replace(SMALL, positions=17))
    matched = found["matched"]
    assert (matched.window, matched.mask) == (expected, "causal" if expected is None else "window")
    if expected is not None:  # 97: 96 of 256 steps back, 6 of 16
        assert found["no window"] == replace(matched, mask="causal", window=None)
        assert found["no causal mask"].window is None


def test_what_does_not_match_is_said():
    assert planned(strengths=Strength(1.0, 1.0, 1.0, 1.0)).notes == ()
    odd = replace(SPEC, windows=(None, 8, None), kv_heads=2, prefix=4, positional=("rope", "none", "rope"))
    notes = planned(odd).notes
    assert len(notes) == 4
    for said in ("window differ", "prefix", "positional encoding", "torch's own strengths"):
        assert any(said in note for note in notes)


def test_runs_are_seeds_by_positions_asked_for():
    length, runs = SMALL.positions, planned().runs
    plans = [planned(bos=bos).runs["matched", "retrieval"] for bos in (True, False)]
    with_bos, without = ([cast(Copying, run.task) for run in own] for own in plans)
    assert [task.target for task in with_bos] == 2 * SMALL.asked(True) == 2 * list(range(1, length))
    assert [task.target for task in without] == 2 * SMALL.asked(False) == 2 * list(range(length))
    assert (with_bos[0].first, without[0].first) == (4, None)
    assert replace(SMALL, targets=3).asked(True) == [1, round(length / 2), length - 1]
    assert replace(SMALL, targets=99).asked(True) == list(range(1, length))
    assert len(runs["no residual", "retrieval"]) == 8
    assert [run.seed for run in runs["matched", "in-context"]] == [0, 1]
    # All retrieval models of a shape train side by side.
    assert len({run.architecture.shape for (_, task), own in runs.items() if task == "retrieval" for run in own}) == 1
    assert len(planned(settings=QUICK).runs) == 2 < len(planned(settings=Settings()).runs)


@pytest.mark.parametrize(
    "changes",
    [{"seeds": 0}, {"items": 3}, {"burst": 3}, {"targets": -1}, {"positions": 7}],
)
def test_what_cannot_be_matched_is_refused(changes):
    with pytest.raises(InputError, match="{}={}".format(*next(iter(changes.items())))):
        replace(SMALL, **changes)


@pytest.fixture(scope="module")
def toys():
    return Matching(SMALL, "cpu").toys(planned())


def test_toys_are_fresh_and_trained_in_the_plan_s_order(toys):
    names = ["matched", "no residual", "no causal mask", "no positions"]
    expected = [(name, training) for training in ("init", "retrieval") for name in names] + [("matched", "in-context")]
    assert list(toys) == expected
    assert [member.seed for member in toys["matched", "init"]] == [0, 1]
    assert [member.seed for member in toys["no residual", "init"]] == [0]
    found = toys["matched", "retrieval"]
    assert [member.target for member in found] == 2 * list(range(1, 9))
    assert all(0 <= member.accuracy <= 1 for (_, task), some in toys.items() if task != "init" for member in some)
    alone = train([planned().runs["matched", "retrieval"][3]], SMALL.steps)[0]
    for name in alone.weights:
        torch.testing.assert_close(found[3].view._weights[name][0], alone.weights[name], atol=1e-6, rtol=1e-4)
    assert found[3].loss == pytest.approx(float(alone.losses.mean()), rel=1e-4)
    # Tested on sequences of the task, by hand.
    task = alone.run.task
    drawn = task.draw(None, torch.Generator().manual_seed(TEST_SEED + 1), 2)  # 8 sequences in batches of 4
    log_p = logits([alone], drawn.inputs.flatten(0, 1))[0].log_softmax(-1)
    answers = task.answers(drawn).flatten()
    assert found[3].log_p == pytest.approx(float(log_p[torch.arange(8), answers].mean()), rel=1e-4)
    assert found[3].accuracy == float((log_p.argmax(-1) == answers).double().mean())


def test_prompts_are_sequences_of_the_task(toys):
    found, in_context = toys["matched", "retrieval"][0], toys["matched", "in-context"][0]
    assert toys["matched", "init"][0].prompts is None  # fresh toys read the model's
    tokens, ids = found.prompts(5), in_context.prompts(5)
    assert tokens.shape == (5, 9)
    assert (tokens[:, 0] == found.view.bos).all()
    assert int(tokens[:, 1:].max()) < 4
    assert torch.equal(tokens, toys["matched", "retrieval"][5].prompts(5))
    assert (ids[:, 0::2] < 16).all()
    assert (ids[:, 1::2] >= 16).all()
    assert in_context.view.bos is None


def test_training_resumes_where_it_stopped(tmp_path):
    small, folder = replace(SMALL, ablations=False, seeds=1), tmp_path / "kept"
    maker, plan = Matching(small, "cpu"), planned(settings=small)
    whole = maker.toys(plan)
    with pytest.raises(Stop):
        maker.toys(plan, folder, stopping_at("toys: in-context"))
    told: list[tuple[str, float, float]] = []
    found = maker.toys(plan, folder, lambda *now: told.append(now))
    assert told[0] == ("toys: retrieval", 24.0, 24.0)  # all there
    for of, members in whole.items():
        np.testing.assert_array_equal([m.loss for m in members], [m.loss for m in found[of]])
