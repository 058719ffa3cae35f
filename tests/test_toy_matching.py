"""Toys that match a model: which architectures, which runs, and training that resumes."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from made_toys import MATCHED as SMALL
from made_toys import STANDARD, made

from probes.models.view import Spec
from toy.matching import QUICK, TEST_SEED, Matching, Plan, Settings, Strength, strength
from toy.model import Architecture, initial
from toy.tasks import Copying
from toy.train import logits, train
from toy.view import Toy

SPEC = Spec("llama", 3, 4, 4, 32, 128, 1000, ("rope",) * 3, (None,) * 3, 256, 0.02)


def planned(spec: Spec = SPEC, *, settings: Settings = SMALL, **given: Any) -> Plan:
    return Matching(settings, "cpu").plan(spec, **({"bos": True, "length": 256} | given))


def test_matched_toys_share_what_position_can_come_from_and_ablations_lack_one_of_it():
    plan = planned(replace(SPEC, kv_heads=2))
    sizes: dict[str, Any] = {"blocks": 3, "heads": 4, "kv_heads": 2, "width": 16, "length": 9}
    matched = Architecture(**sizes, vocabulary=5, outputs=4, positional="rope", feed_forward=True, norm="rms")
    assert {run.architecture for run in plan.runs} == {matched}
    for norms in ({"norm": "layer"}, {"qk_norm": True}, {"post_norm": True, "norm": "layer"}):
        found = planned(parts=made(**STANDARD | norms).parts(0)).runs[0].architecture
        assert found == replace(matched, kv_heads=4, **norms)
    fresh = replace(matched, length=256, vocabulary=1000)  # the model's own length and tokens
    assert plan.fresh == {
        "matched": fresh,
        "no residual": replace(fresh, residual=False),
        "no causal mask": replace(fresh, mask="full"),
        "no positions": replace(fresh, positional="none"),
    }
    assert "no positions" not in planned(replace(SPEC, positional=("none",) * 3)).fresh
    assert planned(settings=QUICK).fresh.keys() == {"matched"}
    for heads, width in ((4, 32), (14, 56)):  # heads are even, and no narrower than 4
        wide = planned(replace(SPEC, heads=heads, kv_heads=heads), settings=Settings()).runs[0].architecture
        assert wide.width == width
    short = planned(settings=replace(SMALL, deepest=2, longest=100))
    assert short.runs[0].architecture.blocks == 2
    assert (short.fresh["matched"].blocks, short.fresh["matched"].length) == (3, 100)
    # A base's wavelengths stay that base's with fewer planes, whatever the scaling did to them: every so many of them.
    own = tuple(1_000 ** (-n / 16) / (1 + n) for n in range(16))  # heads of the toys have four dimensions
    assert planned(frequencies=[own]).fresh["matched"].frequencies == (own[0], own[8])


@pytest.mark.parametrize(
    "norms", [{}, {"norm": "layer"}, {"qk_norm": True}, {"norm": "layer", "post_norm": True}], ids=str
)
def test_strengths_of_fresh_toys_are_the_model_s(norms):
    """Up to the scale of the stream, which the norms take out, and the scatter of small weights."""
    wanted = Strength(embedding=0.02, logits=0.05, values=0.04, feed_forward=0.006)
    parts = made(**STANDARD | norms).parts(0)
    a = planned(strengths=wanted, parts=parts, settings=replace(SMALL, width=32)).fresh["matched"]
    tokens = torch.arange(40).reshape(2, 20)
    measured = [strength(Toy(a, initial(a, seed)), tokens) for seed in range(8)]
    found = Strength(*np.sqrt(np.mean(np.square(np.array(measured, dtype=float)), 0)))
    assert found.logits == pytest.approx(wanted.logits, rel=0.1)
    assert found.feed_forward / found.values == pytest.approx(wanted.feed_forward / wanted.values, rel=0.1)
    assert found.embedding / found.values == pytest.approx(wanted.embedding / wanted.values, rel=0.1)


@pytest.mark.parametrize(
    ("window", "length", "expected"), [(32, 256, 3), (2, 256, 2), (97, 257, 7), (256, 256, None), (400, 256, None)]
)
def test_windows_keep_their_fraction_of_the_length(window, length, expected):
    plan = planned(replace(SPEC, windows=(window,) * 3), length=length, settings=replace(SMALL, positions=17))
    trained, fresh = plan.runs[0].architecture, plan.fresh["matched"]
    # 97: 96 of 256 steps back, 6 of 16.
    assert (trained.window, trained.mask) == (expected, "causal" if expected is None else "window")
    assert fresh.window == (None if expected is None else window)
    if expected is not None:
        assert plan.fresh["no window"] == replace(fresh, mask="causal", window=None)
        assert plan.fresh["no causal mask"].window is None


def test_notes_say_in_what_toys_do_not_match():
    mixed, apart = replace(SPEC, windows=(100, None, 100)), Strength(1, 1, 1, 1)
    given: dict[str, Any] = {"settings": replace(SMALL, longest=100), "strengths": apart}
    assert planned(mixed, length=100, **given).notes == ()  # prompts fit into every window
    (note,) = planned(mixed, length=101, settings=SMALL, strengths=apart).notes
    assert "with and without a window" in note
    (note,) = planned(length=100, frequencies=[(1.0, 0.1), None, (1.0, 0.2)], **given).notes
    assert "wavelengths" in note


def test_runs_are_seeds_by_positions_asked_for():
    length = SMALL.positions
    with_bos, without = ([cast(Copying, run.task) for run in planned(bos=bos).runs] for bos in (True, False))
    assert [task.target for task in with_bos] == 2 * list(range(1, length))
    assert [task.target for task in without] == 2 * list(range(length))
    assert (with_bos[0].first, without[0].first) == (4, None)
    assert replace(SMALL, targets=3).asked(True) == [1, round(length / 2), length - 1]
    assert replace(SMALL, targets=99).asked(True) == list(range(1, length))
    assert [run.seed for run in planned().runs] == [0] * 8 + [1] * 8


def test_toys_are_fresh_and_trained_in_the_plan_s_order():
    toys = Matching(SMALL, "cpu").toys(planned())
    names = ["matched", "no residual", "no causal mask", "no positions"]
    assert list(toys) == [*((name, "init") for name in names), ("matched", "retrieval")]
    assert [member.seed for member in toys["no residual", "init"]] == [0, 1]
    found = toys["matched", "retrieval"]
    assert [member.target for member in found] == 2 * list(range(1, 9))
    assert all(0 <= member.accuracy <= 1 for member in found)
    alone = train([planned().runs[3]], SMALL.steps)[0]
    for name in alone.weights:
        torch.testing.assert_close(found[3].view._weights[name][0], alone.weights[name], atol=1e-6, rtol=1e-4)
    assert found[3].loss == pytest.approx(float(alone.losses.mean()), rel=1e-4)
    # Tested on sequences of the task, by hand.
    task = alone.run.task
    drawn = task.draw(None, torch.Generator().manual_seed(TEST_SEED + 1), 2)  # 8 sequences in batches of 4
    right = logits([alone], drawn.inputs.flatten(0, 1))[0].argmax(-1) == task.answers(drawn).flatten()
    assert found[3].accuracy == float(right.double().mean())
    # What they are measured on is the same for all.
    tokens = found[0].prompts
    assert tokens is not None
    assert (tokens[:, 0] == found[0].view.bos).all()
    assert int(tokens[:, 1:].max()) < 4
    assert torch.equal(tokens, found[5].prompts)
