"""Many toys trained at once: against torch's AdamW one by one, alone against side by side, interrupted against not."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import bad_input
from torch import Tensor
from torch.nn import functional
from toy_runs import MIXED, PAIRS, SMALL, TASK, WIDE, copying

from toy import train as training
from toy.model import Switches, forward, initial
from toy.train import Run, Trained, forget, groups, logits, seed_of, stacked, train

# Side by side, products are added up in another order than alone: 5e-7 of a loss of 2.3 after 200 steps at these rates.
NOISE = 5e-6


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    """Bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert one.run == other.run
        parts = [({"losses": x.losses}, x.weights, *x.recorded.values()) for x in (one, other)]
        for a, b in zip(*parts, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in {*a, *b})


def by_torch(run: Run, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(losses, weights) by torch's optimizer and scheduler and `toy.model.forward`, data drawn block by block."""
    weights = {name: tensor[None].requires_grad_() for name, tensor in initial(run.architecture, run.seed).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=run.learning_rate, weight_decay=run.weight_decay)
    falls = run.schedule == "cosine"
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if falls else None
    switches = Switches.of([run.architecture])
    task: Any = run.task
    world = task.world(run.seed, "cpu")
    losses: list[Tensor] = []
    drawn: Any = None
    for step in range(steps):
        block, at = divmod(step, training.STEPS_DRAWN)
        if at == 0:
            drawn = task.draw(world, torch.Generator().manual_seed(seed_of(run.seed, block)), training.STEPS_DRAWN)
        out = forward(run.architecture, weights, switches, drawn.inputs[None, at])[0]
        loss = functional.cross_entropy(out, task.answers(drawn)[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return torch.stack(losses), {name: tensor.detach()[0] for name, tensor in weights.items()}


TOKENS = [
    copying(
        target=n % 6,
        seed=n // 3,
        architecture=replace(SMALL, residual=n % 4 > 0, mask="full" if n % 7 == 0 else "causal"),
        learning_rate=(3e-3, 1e-3, 2e-3)[n % 3],
        weight_decay=(0.0, 0.1, 0.0, 1.0)[n % 4],
        schedule="cosine" if n % 5 > 2 else "constant",
    )
    for n in range(20)
]
MANY: list[Run] = [
    *TOKENS,
    *(Run(WIDE, task, seed, 1e-3) for seed in (0, 1) for task in (PAIRS, replace(PAIRS, biased=(0,)))),
    *(copying(seed=2, architecture=replace(SMALL, positional=kind)) for kind in ("rope", "learned")),
    Run(replace(WIDE, residual=True), PAIRS, 0, 1e-3, weight_decay=0.1, schedule="cosine"),
    Run(replace(WIDE, positional="decay", decay=0.2), PAIRS, 1, 1e-3),
    *(Run(replace(WIDE, blocks=1), PAIRS, 0, rate) for rate in (1e-3, 3e-3)),
]


def test_training_is_torch_s_adamw_one_by_one_with_each_model_s_own_data_rate_decay_and_schedule():
    steps = 130  # more than two blocks of data
    together = train(MANY, steps)
    assert [one.run for one in together] == MANY
    for one in [*together[:20:3], *together[20:]]:
        losses, weights = by_torch(one.run, steps)
        assert torch.allclose(one.losses, losses, rtol=0, atol=NOISE)
        for name, fresh in initial(one.run.architecture, one.run.seed).items():
            # AdamW's steps are as long as the rate: noise in a weight is larger than in the loss.
            assert torch.allclose(one.weights[name], weights[name], rtol=0, atol=10 * NOISE)
            assert (weights[name] - fresh).abs().max() > 0.01
    assert len({seed_of(seed, block) for seed in range(30) for block in range(30)}) == 900


def test_groups_hold_every_run_once_and_shapes_apart(monkeypatch):
    looks: list[dict[str, Any]] = [{"mask": "full"}, {"residual": False}, {"positional": "sinusoidal"}]
    same = [copying(architecture=replace(SMALL, **look), seed=seed) for seed in (0, 1) for look in looks]
    same += [copying(architecture=SMALL, learning_rate=0.1, weight_decay=0.5, schedule="cosine")]
    assert [sorted(group) for group in groups(same)] == [list(range(len(same)))]
    other: dict[str, Any] = {"blocks": 1, "heads": 2, "positional": "learned", "feed_forward": True, "norm": "rms"}
    runs = [*same, *(copying(architecture=replace(SMALL, **{name: value})) for name, value in other.items())]
    runs += [copying(architecture=replace(SMALL, positional="rope")), replace(runs[0], task=replace(TASK, batch=8))]
    found = groups(runs)
    assert len(found) == 1 + len(other) + 2
    assert sorted(chain(*found)) == list(range(len(runs)))
    for together in (1, 7, 20):
        monkeypatch.setitem(training.TOGETHER, "cpu", together * 16 * 6 * (2 * 2 + 6))  # numbers in a model's streams
        found = groups(TOKENS)
        assert sorted(chain(*found)) == list(range(20))
        assert max(map(len, found)) <= together
        assert len(found) == -(-20 // together)


def test_weights_are_recorded_at_the_steps_asked_for_and_nothing_else_changes():
    names, told = ("embedding", "1.q", "positions"), []
    one, two = train([copying(seed=4), copying()], 10, record=[7, 0, 10, 7], recorded=names, advance=told.append)
    assert sum(told) == 20
    assert list(one.recorded) == [0, 7, 10]
    assert all(set(kept) == {"embedding", "1.q"} for kept in one.recorded.values())
    fresh, (shorter,) = initial(SMALL, 4), train([copying(seed=4)], 7)
    for name in ("embedding", "1.q"):
        assert torch.equal(one.recorded[0][name], fresh[name])
        torch.testing.assert_close(one.recorded[7][name], shorter.weights[name], rtol=0, atol=NOISE)
        assert torch.equal(one.recorded[10][name], one.weights[name])
    plain = train([copying(seed=4), copying()], 10)
    assert_same(plain, [replace(one, recorded={}), replace(two, recorded={})])


def test_outcomes_of_one_shape_predict_as_the_pass_does():
    found, ids = train([copying(seed=s) for s in (0, 1)], 20), TASK.draw(None, torch.Generator(), 1).inputs[0]
    for whole, one in zip(logits(found, ids), found, strict=True):
        alone = forward(SMALL, stacked([one.weights]), Switches.of([SMALL]), ids[None])[0]
        assert torch.allclose(whole, alone, atol=1e-5)
    assert logits(train([Run(WIDE, PAIRS, seed=s) for s in (0, 1)], 2), torch.randn(3, 9, 8)).shape == (2, 3, 4)


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path, steps: int, after: int, **options: Any) -> None:
    """Training, told of and saved at every step, that is stopped as by Ctrl-C once this many model-steps are done."""
    monkeypatch.setattr(training, "TELL_SECONDS", -1.0)
    monkeypatch.setattr(training, "SAVE_SECONDS", -1.0)
    told: list[int] = []

    def stop(more: int) -> None:
        told.append(more)
        if sum(told) >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(MIXED, steps, folder=folder, advance=stop, **options)


@pytest.mark.parametrize("after", [1, 199])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(tmp_path, monkeypatch, after):
    steps, record = 70, (0, 5, 65, 70)
    whole = train(MIXED, steps, record=record)
    interrupted(monkeypatch, tmp_path, steps, after, record=record)
    told: list[int] = []
    resumed = train(MIXED, steps, record=record, folder=tmp_path, advance=told.append)
    assert_same(resumed, whole)
    assert resumed[0].seconds > 0
    assert sum(told) == 3 * steps
    assert sum(told[: 1 if after < 140 else 2]) >= after - 2  # a group's work is told at once, two model-steps each
    told.clear()
    assert_same(train(MIXED, steps, record=record, folder=tmp_path, advance=told.append), whole)
    assert told == [140, 70]  # nothing is trained any more
    (tmp_path / "notes.txt").touch()
    forget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "change", [{"steps": 51}, {"record": (0, 3)}, {"runs": [MIXED[0], replace(MIXED[1], seed=9), MIXED[2]]}]
)
def test_other_work_in_the_folder_is_not_taken_up(tmp_path, monkeypatch, change):
    interrupted(monkeypatch, tmp_path, 50, 20, record=(3,))
    told: list[int] = []
    train(**({"runs": MIXED, "steps": 50, "record": (3,), "folder": tmp_path, "advance": told.append} | change))
    assert told[0] == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: copying(learning_rate=0.0), "learning_rate=0.0 is not positive"),
        (lambda: copying(seed=-1), "seed=-1 is out of range"),
        (lambda: Run(replace(SMALL, length=7), TASK), "length=7 of the model does not fit the task's length=6"),
        (lambda: Run(replace(WIDE, outputs=3), PAIRS), "outputs=3 are too few for 4 answers; give 4"),
        (lambda: train([copying()], 5, record=[6]), "step 6 cannot be recorded; give steps from 0 to 5"),
        (lambda: train([copying()], 10**9, folder=Path(__file__) / "below"), "is no folder"),  # at once
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(make, says):
    with bad_input(says):
        make()
