"""Many toys trained at once: against torch's AdamW one by one, alone against side by side, interrupted against not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from probes.errors import InputError
from toy import narrow
from toy import train as training
from toy.model import Architecture, Switches, forward, initial
from toy.tasks import Copying, InContext
from toy.train import Run, Trained, forget, groups, logits, seed_of, stacked, train

# Side by side, products are added up in another order than alone: two or three units in the last place of a loss of 2.3
# after 200 steps at the rates used here (measured: 5e-7). Training that is unstable would amplify that; at a rate of 0.01
# one model in fifty does within 200 steps.
NOISE = 5e-6
SMALL = Architecture(blocks=2, width=2, length=6, vocabulary=5, outputs=5)
TASK = Copying(vocabulary=5, length=6, batch=16)
WIDE = Architecture(
    blocks=2, width=8, length=9, vocabulary=None, outputs=4, output_projection=False, head="mlp", residual=False
)
PAIRS = InContext(items=4, width=8, classes=16, labels=4, burst=2, batch=16)


def copying(target: int = -1, seed: int = 0, architecture: Architecture = SMALL, **options: Any) -> Run:
    rate: dict[str, Any] = {"learning_rate": 3e-3}
    return Run(architecture, replace(TASK, target=target), seed, **(rate | options))


def assert_same(one: Trained, other: Trained) -> None:
    """Bit for bit."""
    assert one.run == other.run
    assert torch.equal(one.losses, other.losses)
    for a, b in ((one.weights, other.weights), *zip(one.recorded.values(), other.recorded.values(), strict=True)):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert list(one.recorded) == list(other.recorded)


def assert_close(one: Trained, other: Trained) -> None:
    """Up to the order in which floats are added."""
    assert one.run == other.run
    assert torch.allclose(one.losses, other.losses, rtol=0, atol=NOISE)
    for name in one.weights:  # AdamW's steps are as long as the rate: noise in a weight is larger than in the loss
        assert torch.allclose(one.weights[name], other.weights[name], rtol=0, atol=10 * NOISE)


# -------------------------------------------------------------------------------------- against torch, one at a time


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


OPTIONS: list[dict[str, Any]] = [
    {},
    {"learning_rate": 1e-3, "weight_decay": 0.1},
    {"schedule": "cosine"},
    {"schedule": "cosine", "weight_decay": 1.0, "learning_rate": 2e-3},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_training_is_torch_s_adamw_with_each_model_s_own_rate_decay_and_schedule(kind):
    if kind == "tokens":
        runs = [copying(target=n, seed=n, **options) for n, options in enumerate(OPTIONS)]
    else:
        rate: dict[str, Any] = {"learning_rate": 3e-3}
        runs = [Run(WIDE, PAIRS, n, **(rate | options)) for n, options in enumerate(OPTIONS)]
    steps = 130  # more than two blocks of data
    for one in train(runs, steps):
        losses, weights = by_torch(one.run, steps)
        assert torch.allclose(one.losses, losses, rtol=0, atol=NOISE)
        for name, tensor in weights.items():
            assert torch.allclose(one.weights[name], tensor, rtol=0, atol=10 * NOISE)
            assert (tensor - initial(one.run.architecture, one.run.seed)[name]).abs().max() > 0.01


def test_the_schedule_ends_at_nothing():
    (cosine,) = train([copying(schedule="cosine")], 60, record=range(61), recorded=["unembedding"])
    moved = [
        (cosine.recorded[n + 1]["unembedding"] - cosine.recorded[n]["unembedding"]).abs().max().item()
        for n in range(60)
    ]
    # AdamW moves a weight by the rate at most while gradients keep their sign: 3e-3 at first, 3e-3 (pi/120)^2 / 1 at last.
    assert moved[0] == pytest.approx(3e-3, rel=1e-3)
    assert max(moved[-2:]) < 3e-5


# ------------------------------------------------------------------------------------------------- alone, side by side


def fifty(width: int = 2) -> list[Run]:
    """Six targets and more, eight seeds and a bit; residual on and off, rates and decays of their own."""
    architecture = replace(SMALL, width=width)
    return [
        copying(
            target=n % 6,
            seed=n // 6,
            architecture=replace(architecture, residual=n % 4 > 0, mask="full" if n % 7 == 0 else "causal"),
            learning_rate=(3e-3, 1e-3)[n % 2],
            weight_decay=(0.0, 0.1, 0.0)[n % 3],
        )
        for n in range(50)
    ]


@pytest.mark.slow
def test_alone_or_among_fifty_gives_the_same_losses():
    runs = fifty()
    assert len(groups(runs)) == 1
    together = train(runs, 200)
    for n in (0, 13, 49):
        (alone,) = train([runs[n]], 200)
        assert_close(alone, together[n])
    assert not torch.equal(together[0].losses, together[6].losses)  # another seed is another model


def test_vectors_alone_or_together_give_the_same_losses():
    switches: list[dict[str, Any]] = [{}, {"residual": True}, {"positional": "decay", "decay": 0.2}]
    tasks = (PAIRS, replace(PAIRS, biased=(0,)))
    runs = [Run(replace(WIDE, **switch), task, seed, 1e-3) for seed in (0, 1) for task in tasks for switch in switches]
    together = train(runs, 60)
    for n in (0, 4, 7, 11):
        assert_close(train([runs[n]], 60)[0], together[n])


def test_shapes_may_be_mixed_and_outcomes_keep_the_runs_order():
    runs = [
        copying(seed=3),
        Run(WIDE, PAIRS, 1, 1e-3),
        copying(seed=1, architecture=replace(SMALL, blocks=1)),
        copying(seed=2),
        copying(architecture=replace(SMALL, positional="rope")),
        copying(architecture=replace(SMALL, positional="learned")),
    ]
    found = train(runs, 12)
    assert [one.run for one in found] == runs
    for one in found:
        assert_close(train([one.run], 12)[0], one)


def test_groups_hold_every_run_once_and_shapes_apart():
    looks: list[dict[str, Any]] = [
        {"mask": "full"},
        {"mask": "window", "window": 2},
        {"mask": "prefix", "prefix": 2},
        {"residual": False},
        {"positional": "sinusoidal"},
        {"positional": "decay", "decay": 0.1},
    ]
    same = [copying(architecture=replace(SMALL, **look), seed=seed) for seed in (0, 1) for look in looks]
    same += [copying(learning_rate=0.1, weight_decay=0.5, schedule="cosine")]
    assert [sorted(group) for group in groups(same)] == [list(range(len(same)))]
    others: list[dict[str, Any]] = [
        {"blocks": 1},
        {"width": 4},
        {"heads": 2},
        {"positional": "learned"},
        {"positional": "rope"},
        {"feed_forward": True},
        {"norm": "rms"},
        {"norm": "layer"},
        {"output_projection": False},
        {"head": "mlp"},
        {"outputs": 6},
    ]
    runs = [*same, *(copying(architecture=replace(SMALL, **other)) for other in others)]
    runs += [replace(runs[0], task=replace(TASK, batch=8)), Run(WIDE, PAIRS)]
    found = groups(runs)
    assert len(found) == 1 + len(others) + 2
    assert sorted(chain(*found)) == list(range(len(runs)))


@pytest.mark.parametrize("together", [1, 2, 7, 20, 100])
def test_groups_are_no_larger_than_asked_for(together):
    found = groups(fifty(), together=together)
    assert sorted(chain(*found)) == list(range(50))
    assert max(map(len, found)) <= together
    assert len(found) == -(-50 // together)


def test_models_that_share_data_stand_together():
    runs = [copying(target=k, seed=s) for k in range(6) for s in range(4)]
    streams = training._Streams([runs[i] for i in groups(runs)[0]], torch.device("cpu"))
    assert len(streams.keys) == 4
    assert streams.counts == [6, 6, 6, 6]


# ---------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("architecture", [SMALL, replace(SMALL, width=2 * (narrow.WIDEST + 1))])
def test_shared_streams_give_every_model_its_own_data(architecture):
    """Seven models on three streams, unevenly, in and out of order; narrow and wide layout."""
    runs = [copying(target=k, seed=s, architecture=architecture) for s, k in [*((0, k) for k in range(4)), (1, 2)]]
    runs += [copying(target=k, seed=2, architecture=architecture) for k in (0, 5)]
    for order in (range(7), (3, 6, 0, 4, 5, 1, 2)):
        mixed = [runs[n] for n in order]
        streams = training._Streams(mixed, torch.device("cpu"))
        for step in (0, 1, training.STEPS_DRAWN - 1, training.STEPS_DRAWN, 0):
            inputs, answers = streams.at(step)
            if streams.narrow:
                spread = inputs.repeat_interleave(torch.tensor(streams.counts), 0) if streams.counts else inputs
                tokens = spread.argmax(1).unflatten(1, (6, 16)).transpose(1, 2)
            else:
                tokens = inputs
            assert (streams.counts is None) == (order != range(7))
            for e, run in enumerate(mixed):
                drawn = run.task.draw(
                    None,
                    torch.Generator().manual_seed(seed_of(run.seed, step // training.STEPS_DRAWN)),
                    training.STEPS_DRAWN,
                )
                assert torch.equal(tokens[e], drawn.inputs[step % training.STEPS_DRAWN])
                assert torch.equal(answers[e], run.task.answers(drawn)[step % training.STEPS_DRAWN])


def test_vectors_are_shared_or_each_model_s_own():
    alone = [Run(WIDE, PAIRS, 0, rate) for rate in (1e-3, 1e-2)]
    inputs, answers = training._Streams(alone, torch.device("cpu")).at(3)
    assert len(inputs) == 1
    assert len(answers) == 2
    mixed = [*alone, Run(WIDE, PAIRS, 1), Run(WIDE, replace(PAIRS, biased=(0,)), 0)]
    for runs in (mixed, mixed[1:]):  # three streams of four models, and of three
        inputs, answers = training._Streams(runs, torch.device("cpu")).at(3)
        for e, run in enumerate(runs):
            own, asked = training._Streams([run], torch.device("cpu")).at(3)
            assert torch.equal(inputs[e], own[0])
            assert torch.equal(answers[e], asked[0])


def test_blocks_of_data_have_seeds_of_their_own():
    seeds = {seed_of(seed, block) for seed in range(30) for block in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**56 for seed in seeds)


@pytest.mark.parametrize("counts", [None, [3, 3], [1, 5]])
@pytest.mark.parametrize(
    "look", [{}, {"mask": "window", "window": 2}, {"mask": "prefix", "prefix": 3}, {"mask": "full"}]
)
@pytest.mark.parametrize("heads", [1, 2])
def test_going_by_query_changes_nothing(monkeypatch, counts, look, heads):
    """Many models attend query by query, few all at once: values and gradients of both are those of the plain pass."""
    architecture = Architecture(blocks=3, width=4, heads=heads, length=6, vocabulary=5, outputs=5, **look)
    fresh = stacked([initial(architecture, seed) for seed in range(6)])
    weights = {name: tensor.double().requires_grad_() for name, tensor in fresh.items()}
    narrower = Switches.of([replace(architecture, residual=seed > 2) for seed in range(6)])
    switches = Switches(narrower.bias.double(), None, None, None, narrower.keep.double())
    ids = torch.randint(5, (2, 7, 6), generator=torch.Generator().manual_seed(0))
    each = torch.tensor(counts or [3, 3])
    wanted = forward(architecture, weights, switches, ids.repeat_interleave(each, 0))
    slope = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = [wanted, *torch.autograd.grad((wanted * slope).sum(), list(weights.values()))]
    for few in (0, 1 << 16):
        monkeypatch.setattr(narrow, "FEW", few)
        columns = narrow.one_hot(ids, 5).double()
        out = narrow.forward(architecture, weights, switches, columns, counts).transpose(1, 2)
        found = [out, *torch.autograd.grad((out * slope).sum(), list(weights.values()))]
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------------------------ recording


def test_weights_are_recorded_at_the_steps_asked_for():
    names = ("embedding", "1.q", "positions")
    (one,) = train([copying(seed=4)], 10, record=[7, 0, 10, 7], recorded=names)
    assert list(one.recorded) == [0, 7, 10]
    assert all(set(kept) == {"embedding", "1.q"} for kept in one.recorded.values())
    fresh = initial(SMALL, 4)
    (shorter,) = train([copying(seed=4)], 7)
    for name in ("embedding", "1.q"):
        assert torch.equal(one.recorded[0][name], fresh[name])
        assert torch.equal(one.recorded[7][name], shorter.weights[name])
        assert torch.equal(one.recorded[10][name], one.weights[name])
    assert one.losses.shape == (10,)


def test_recording_changes_nothing_and_nothing_is_recorded_unasked():
    runs = [copying(seed=0), copying(seed=1)]
    plain, kept = train(runs, 12), train(runs, 12, record=range(13))
    for one, other in zip(plain, kept, strict=True):
        assert one.recorded == {}
        assert torch.equal(one.losses, other.losses)


def test_progress_counts_every_model_step_once():
    told: list[int] = []
    train([copying(seed=0), copying(seed=1), Run(WIDE, PAIRS)], 20, advance=told.append)
    assert sum(told) == 60
    assert min(told) >= 0


def test_outcomes_of_one_shape_predict_as_the_pass_does():
    found = train([copying(seed=s, target=k) for s in (0, 1) for k in (0, 3)], 20)
    ids = torch.randint(5, (9, 6), generator=torch.Generator().manual_seed(0))
    whole = logits(found, ids)
    assert whole.shape == (4, 9, 5)
    assert torch.equal(whole, logits(found, ids, together=3)) or torch.allclose(whole, logits(found, ids, together=3))
    for e, one in enumerate(found):
        alone = forward(SMALL, stacked([one.weights]), Switches.of([SMALL]), ids[None])[0]
        assert torch.allclose(whole[e], alone, atol=1e-5)
    vectors = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(0))
    assert logits(train([Run(WIDE, PAIRS, seed=s) for s in (0, 1)], 2), vectors).shape == (2, 3, 4)


# ---------------------------------------------------------------------------------------------- interrupted and resumed


class Stop:
    """Progress that is interrupted, as by Ctrl-C, once this many model-steps are done."""

    def __init__(self, after: int) -> None:
        self.after, self.done, self.told = after, 0, 0

    def __call__(self, more: int) -> None:
        self.done, self.told = self.done + more, self.told + 1
        if self.done >= self.after:
            raise KeyboardInterrupt


@pytest.fixture
def chatty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told at every step."""
    monkeypatch.setattr(training, "TELL_SECONDS", -1.0)


MIXED = [copying(seed=0), copying(seed=1, target=2), Run(WIDE, PAIRS, 0, 1e-3)]


@pytest.mark.parametrize("after", [1, 131, 139, 199])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(tmp_path, chatty, after):
    steps, record = 70, (0, 5, 65, 70)
    whole = train(MIXED, steps, record=record)
    with pytest.raises(KeyboardInterrupt):
        train(MIXED, steps, record=record, folder=tmp_path, advance=Stop(after))
    told: list[int] = []
    resumed = train(MIXED, steps, record=record, folder=tmp_path, advance=told.append)
    for one, other in zip(whole, resumed, strict=True):
        assert_same(one, other)
    assert sum(told) == 3 * steps
    assert (
        sum(told[: 1 if after < 140 else 2]) >= after - 2
    )  # a group's done work is told at once, two model-steps each
    # Again: nothing is trained any more.
    told.clear()
    for one, other in zip(whole, train(MIXED, steps, record=record, folder=tmp_path, advance=told.append), strict=True):
        assert_same(one, other)
    assert told == [140, 70]
    assert resumed[0].seconds > 0
    forget(tmp_path)
    assert not tmp_path.exists()


def test_an_interruption_within_an_update_does_not_mix_two_steps(tmp_path, monkeypatch):
    steps = 30
    whole = train(MIXED[:2], steps)
    update = training._Group._update
    count = 0

    def broken(self: Any, slope: Tensor) -> None:
        nonlocal count
        count += 1
        if count == 17:
            self.mean.lerp_(slope, 0.5)  # half an update
            raise KeyboardInterrupt
        update(self, slope)

    monkeypatch.setattr(training._Group, "_update", broken)
    monkeypatch.setattr(training, "SAVE_SECONDS", -1.0)  # as if a minute passed with every step
    with pytest.raises(KeyboardInterrupt):
        train(MIXED[:2], steps, folder=tmp_path)
    for one, other in zip(whole, train(MIXED[:2], steps, folder=tmp_path), strict=True):
        assert_same(one, other)
    assert count == 17 + steps - 16  # and the sixteen whole ones were kept


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_toy_train import MIXED, training
training.SAVE_SECONDS = 0.02
done = 0
def advance(more):
    global done
    done += more
    print(done, flush=True)
training.TELL_SECONDS = -1.0
training.train(MIXED, 4000, record=(0, 9), folder={folder!r}, advance=advance)
"""


def test_killed_and_resumed_is_uninterrupted_bit_for_bit(tmp_path):
    program = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "work"))
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 200 and any((tmp_path / "work").glob("group-0.safetensors")):
                break
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    told: list[int] = []
    # The same call, but for its length: what was saved holds 4,000 steps and would take as long.
    with pytest.raises(InputError, match="steps 4000, not 60"):
        train(MIXED, 60, record=(0, 9), folder=tmp_path / "work")
    stop = Stop(600)

    def advance(more: int) -> None:
        told.append(more)
        stop(more)

    with pytest.raises(KeyboardInterrupt):
        train(MIXED, 4000, record=(0, 9), folder=tmp_path / "work", advance=advance)
    assert told[0] > 0  # it was taken up
    with pytest.raises(KeyboardInterrupt):
        train(MIXED, 4000, record=(0, 9), folder=tmp_path / "other", advance=Stop(sum(told) + 400))
    from safetensors import safe_open

    states = []
    for name in ("work", "other"):
        with safe_open(tmp_path / name / "group-0.safetensors", "pt") as file:
            states.append({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    n = min(len(state["losses"]) for state in states)
    assert n > 100
    assert torch.equal(states[0]["losses"][:n], states[1]["losses"][:n])
    assert torch.equal(states[0]["kept/9/embedding"], states[1]["kept/9/embedding"])


def unfinished(folder: Path, runs: list[Run] = MIXED, steps: int = 50, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(runs, steps, folder=folder, advance=Stop(20), **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: (MIXED, 51, {}), "steps 50, not 51"),
        (lambda: (MIXED, 50, {"record": (0, 3)}), "record [3], not [0, 3]"),
        (lambda: (MIXED, 50, {"record": (2,)}), "record [3], not [2]"),
        (lambda: (MIXED, 50, {"record": (3,), "recorded": ("unembedding",)}), "recorded"),
        (lambda: ([MIXED[0]], 50, {}), "2 runs side by side, not 1"),
        (lambda: (MIXED, 50, {"together": 1}), "2 runs side by side, not 1"),
        (
            lambda: ([replace(MIXED[0], learning_rate=0.1), *MIXED[1:]], 50, {}),
            "learning_rate 0.003, not 0.1, in run 0",
        ),
        (lambda: ([MIXED[0], replace(MIXED[1], seed=9), MIXED[2]], 50, {}), "seed 1, not 9, in run 1"),
        (lambda: ([replace(MIXED[0], task=replace(TASK, target=0)), *MIXED[1:]], 50, {}), "target -1, not 0, in run 0"),
        (
            lambda: ([replace(MIXED[0], architecture=replace(SMALL, residual=False)), *MIXED[1:]], 50, {}),
            "residual True, not False, in run 0",
        ),
    ],
)
def test_other_work_in_the_folder_is_refused_by_what_differs(tmp_path, chatty, change, says):
    unfinished(tmp_path, record=(3,))
    runs, steps, options = change()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError) as raised:
        train(runs, steps, folder=tmp_path, **({"record": (3,)} | options))
    message = str(raised.value)
    assert says in message
    assert f"'{tmp_path}' holds unfinished training with" in message
    assert "remove that folder" in message
    assert "\n" not in message
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_work_of_another_torch_is_refused(tmp_path, chatty, monkeypatch):
    unfinished(tmp_path)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with pytest.raises(InputError, match=r"with torch .*, not 9\.9\.9"):
        train(MIXED, 50, folder=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "foreign", "no numbers"])
def test_a_damaged_state_is_named(tmp_path, chatty, damage):
    unfinished(tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    if damage == "foreign":
        save_file({"x": torch.ones(3)}, file)
    elif damage == "no numbers":
        save_file({"x": torch.ones(3)}, file, metadata={"described": "[]", "step": "many", "seconds": "0"})
    else:
        file.write_bytes({"cut": content[: len(content) // 2], "text": b"nothing", "empty": b""}[damage])
    with pytest.raises(InputError) as raised:
        train(MIXED, 50, folder=tmp_path)
    assert f"'{file}' cannot be read" in str(raised.value)
    assert "remove it to start anew" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_forget_removes_its_own_files_alone(tmp_path):
    folder = tmp_path / "work"
    train([copying()], 3, folder=folder)
    (folder / ".group-0-x7.safetensors").touch()  # killed while it was written
    (folder / "notes.txt").touch()
    forget(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    forget(folder)
    assert not folder.exists()
    forget(folder)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train([copying()], 3)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ elsewhere


@pytest.mark.gpu
def test_on_a_gpu_models_learn_and_go_on_after_an_interruption(tmp_path, chatty):
    runs = [*fifty(), Run(WIDE, PAIRS, 0, 1e-3)]
    whole = train(runs, 60, device="cuda", record=(0, 60))
    with pytest.raises(KeyboardInterrupt):
        train(runs, 60, device="cuda", record=(0, 60), folder=tmp_path, advance=Stop(1500))
    resumed = train(runs, 60, device="cuda", record=(0, 60), folder=tmp_path)
    for one, other in zip(whole, resumed, strict=True):
        # Sums on a GPU may be made in another order each time.
        assert torch.allclose(one.losses, other.losses, rtol=0, atol=1e-4)
        assert one.losses.device.type == one.weights["unembedding"].device.type == "cpu"
    alone = train([runs[3]], 60, device="cuda")[0]
    assert torch.allclose(alone.losses, whole[3].losses, rtol=0, atol=1e-4)
    with pytest.raises(InputError, match="device cuda, not cpu"):
        train(runs, 60, record=(0, 60), folder=tmp_path)


def test_two_threads_give_the_losses_of_one():
    """The same kernels split over threads add the same numbers in the same order at this size; the last place may differ."""
    runs = fifty()[:6]
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(train(runs, 20))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: copying(learning_rate=0.0), "learning_rate=0.0 is not positive"),
        (lambda: copying(learning_rate=float("nan")), "learning_rate=nan is not positive"),
        (lambda: copying(weight_decay=-1.0), "weight_decay=-1.0 is no decay"),
        (lambda: copying(seed=-1), "seed=-1 is out of range"),
        (lambda: copying(seed=2**32), f"seed={2**32} is out of range"),
        (lambda: copying(schedule="linear"), "schedule='linear' is unknown; give 'constant' or 'cosine'"),
        (lambda: Run(replace(SMALL, length=7), TASK), "length=7 of the model does not fit the task's length=6"),
        (lambda: Run(replace(SMALL, vocabulary=4), TASK), "vocabulary=4 of the model does not fit the task's vocabulary=5"),
        (lambda: Run(replace(SMALL, vocabulary=None), TASK), "vocabulary=None of the model"),
        (lambda: Run(replace(WIDE, width=16), PAIRS), "width=16 of the model does not fit the task's width=8"),
        (lambda: Run(replace(WIDE, outputs=3), PAIRS), "outputs=3 are too few for 4 answers; give 4"),
        (lambda: train([], 5), "0 runs of 5 steps are no training"),
        (lambda: train([copying()], 0), "1 runs of 0 steps are no training"),
        (lambda: train([copying()], 5, record=[6]), "step 6 cannot be recorded; give steps from 0 to 5"),
        (lambda: train([copying()], 5, record=[-1, 2]), "step -1 cannot be recorded"),
        (lambda: train([copying()], 5, record=[1], recorded=("embeding",)), "no run has any of the weights embeding"),
        (lambda: train([copying()], 5, together=0), "together=0 is too few; give at least 1, or None"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(make, says):
    with pytest.raises(InputError) as raised:
        make()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    began = time.monotonic()
    with pytest.raises(InputError, match="is no folder"):
        train([copying()], 10**9, folder=tmp_path / "file" / "below")
    assert time.monotonic() - began < 5
