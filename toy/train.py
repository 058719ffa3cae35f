"""Train many toys at once: one batched pass, one optimizer step for all.

Models of one `Architecture.shape` and batch size go side by side in tensors with a leading model dimension; a sweep that
mixes shapes is trained group by group. Every model keeps its own learning rate, decay, data and seed: the loss is the sum
of the models' own, which share no parameter, so that each gets the gradient it would get alone. A model's data depend on its
seed and step alone, and its fresh weights on its seed, so that training it alone or among fifty gives the same losses up to
the order in which floats are added. That order depends on the number of models and of threads: losses agree with those of
other numbers to rounding for the first hundreds of steps, and drift apart where training itself is unstable.

All parameters lie in one `[E, P]` tensor, of which the matrices are views: AdamW is then ten operations for any number of
models.
"""

import hashlib
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from probes.errors import InputError
from probes.run.files import alone, remove_empty, require_writable
from probes.run.memory import own_memory
from probes.run.store import RESULT, Piece, Store

from .checks import Settings, above_zero
from .model import Architecture, Switches, Weights, forward, initial
from .tasks import Copying, Task

BETAS, EPS = (0.9, 0.999), 1e-8  # torch's defaults, which the sources use
DRAW = 1 << 22  # numbers of input drawn at a time and model; a block of data is 16 MiB in float32
STEPS_DRAWN = 64  # steps of a block at most
# Numbers in the models' streams beyond which a group is split: what fits the cache of a CPU, or a device's memory, of which
# each takes so many bytes: what the backward pass reads and writes, and a block of data (230 of them at 2 blocks of [Wu]).
TOGETHER, BYTES = defaultdict(lambda: 1 << 28, cpu=1 << 20), 320
SAVE_SECONDS, TELL_SECONDS = 20.0, 0.2
UNFINISHED = "training"  # folder of unfinished work

Schedule = Literal["constant", "cosine"]


@dataclass(frozen=True)
class Run(Settings):
    """One model and its training. `schedule`: the learning rate stays, or falls to zero along half a cosine.

    `by_share`: the rate of a token's rows in embedding and unembedding is multiplied by its share of the tokens, over the
    mean share, to this power (`Copying.shares`).

    Raises:
        InputError: numbers out of range, or a model that cannot read the task's sequences.
    """

    LEAST: ClassVar = {"by_share": -math.inf}
    architecture: Architecture
    task: Task
    seed: int = 0
    learning_rate: float = 1e-2
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    by_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero("learning_rate", self.learning_rate)
        model, task = self.architecture, self.task
        for name in ("length", "vocabulary", *(["width"] if task.vocabulary is None else [])):
            have, need = getattr(model, name), getattr(task, name)
            if have != need:
                raise InputError(
                    f"{name}={have} of the model does not fit the task's {name}={need}; give them the same"
                )
        if self.by_share and not (isinstance(task, Copying) and not task.bos and math.isfinite(self.by_share)):
            raise InputError(
                f"by_share={self.by_share} needs the tokens' shares; give it with Copying without BOS, or 0"
            )
        if model.outputs < task.outputs:
            raise InputError(f"outputs={model.outputs} are too few for {task.outputs} answers; give {task.outputs}")


@dataclass
class Trained:
    """One run's outcome, on the CPU: `losses [step]` in nats, weights by name, and what was recorded, by step and name."""

    run: Run
    losses: Float[Tensor, " step"]
    weights: dict[str, Tensor]
    recorded: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    seconds: float = 0.0  # its share of its group's training, interrupted parts included


def train(
    runs: Sequence[Run],
    steps: int,
    *,
    device: torch.device | str = "cpu",
    record: Iterable[int] = (),
    recorded: Sequence[str] = ("embedding", "positions"),
    folder: str | Path | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[Trained]:
    """Train every run for `steps` steps and give the outcomes in the runs' order.

    Args:
        runs: may mix shapes, tasks, seeds and rates.
        steps: updates of the weights.
        device: where data are drawn and models trained.
        record: steps (numbers of updates done, 0 for fresh weights) at which the weights named in `recorded` are kept.
        recorded: names as in `model.initial`; those a model does not have are left out.
        folder: where unfinished work is saved every 20 seconds (`probes.run.store`), and resumed from. The same call then
            gives the very numbers of an uninterrupted one (on the same number of threads). The caller removes the folder
            in the end (`forget`).
        advance: called now and then with the number of model-steps done since; the first call tells what was done before.

    Raises:
        InputError: no runs or steps; steps to record that are not made; `folder` cannot be read or written, or is being
            written to by another process.
    """
    if not runs or steps < 1:
        raise InputError(f"{len(runs)} runs of {steps} steps are no training; give at least one of each")
    record = sorted(set(record))
    if record and not 0 <= record[0] <= record[-1] <= steps:
        wrong = record[0] if record[0] < 0 else record[-1]
        raise InputError(f"step {wrong} cannot be recorded; give steps from 0 to {steps}")
    root = None if folder is None else Path(folder) / UNFINISHED
    if root is not None:
        require_writable(root)
    found: dict[int, Trained] = {}
    with nullcontext() if root is None else alone(root):
        for number, members in enumerate(groups(runs, device)):
            group = _Group([runs[i] for i in members], steps, torch.device(device), record, recorded)
            group.go(Store(root, f"group {number}", group.key), advance or (lambda done: None))
            found |= dict(zip(members, group.trained(), strict=True))
    return [found[i] for i in range(len(runs))]


def forget(folder: str | Path) -> None:
    """Remove what `train` keeps of unfinished work in a folder and in those below it; other files stay."""
    for path in (*Path(folder).glob("*"), Path(folder)):
        shutil.rmtree(path / UNFINISHED, ignore_errors=True)
        remove_empty([path])


def groups(runs: Sequence[Run], device: torch.device | str = "cpu") -> list[list[int]]:
    """Which runs train side by side: those of one shape and batch size, in parts that fit the device's cache or memory.

    RoPE, which costs time where it is on, stands apart from the rest. What counts is all of a device's memory, not what is
    free: a training that is taken up again has the groups that it had.
    """
    place = torch.device(device)
    own = own_memory(place)
    fitting = TOGETHER[place.type] if own is None else own.mem_get_info(place)[1] // BYTES
    by_shape: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        a = run.architecture
        by_shape.setdefault((a.shape, run.task.batch, a.positional == "rope"), []).append(i)
    found = []
    for (shape, batch, *_), members in by_shape.items():
        numbers = batch * shape.length * (shape.width * shape.blocks + shape.heads * shape.length)
        most = max(1, fitting // numbers)
        parts = -(-len(members) // most)
        each = -(-len(members) // parts)
        found += [members[at : at + each] for at in range(0, len(members), each)]
    return found


def logits(models: Sequence[Trained], inputs: Tensor) -> Float[Tensor, "model batch outputs"]:
    """What trained models of one shape predict at the last position for the same inputs [B, T(, d)], without gradients."""
    architectures = [model.run.architecture for model in models]
    weights = stacked([model.weights for model in models])
    shared = inputs[None].expand(len(models), *inputs.shape) if inputs.dtype == torch.long else inputs[None]
    with torch.no_grad():
        return forward(architectures[0], weights, Switches.of(architectures), shared)


def stacked(weights: Sequence[Weights]) -> dict[str, Tensor]:
    """Weights of several models side by side."""
    return {name: torch.stack([one[name] for one in weights]) for name in weights[0]}


def seed_of(seed: int, block: int) -> int:
    """A generator's seed for one block of one seed's data."""
    return int.from_bytes(hashlib.sha256(f"toy data {seed} {block}".encode()).digest()[:7])


class _Data:
    """The data of a group, drawn block by block, once for all models of one task and seed."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.device, task, read = device, runs[0].task, [(run.task, run.seed) for run in runs]
        self.worlds = {(task, seed): task.world(seed, device) for task, seed in dict.fromkeys(read)}
        self.which = torch.tensor([[*self.worlds].index(one) for one in read], device=device)
        numbers = task.batch * task.length * (task.width or 1)
        self.size = max(1, min(STEPS_DRAWN, DRAW // numbers))  # of a block, in steps
        self.block, self.inputs, self.answers = -1, torch.empty(0), torch.empty(0)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """(inputs [E, B, ...], answers [E, B]) of a step."""
        block, n = divmod(step, self.size)
        if block != self.block:
            drawn = []
            for (task, seed), world in self.worlds.items():
                generator = torch.Generator(self.device).manual_seed(seed_of(seed, block))
                one = task.draw(world, generator, self.size)
                drawn.append((one.inputs, task.answers(one)))
            self.block, (self.inputs, self.answers) = block, map(torch.stack, zip(*drawn, strict=True))
        return self.inputs[self.which, n], self.answers[self.which, n]


class _Group:
    """Runs of one shape, side by side."""

    def __init__(
        self, runs: Sequence[Run], steps: int, device: torch.device, record: Sequence[int], names: Sequence[str]
    ) -> None:
        self.runs, self.steps, self.device, self.record = runs, steps, device, record
        self.architecture = runs[0].architecture
        fresh = stacked([initial(run.architecture, run.seed) for run in runs])
        self.sizes = {name: tensor.shape for name, tensor in fresh.items()}
        self.flat = torch.cat([tensor.flatten(1) for tensor in fresh.values()], 1).to(device)
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.losses = torch.zeros(steps, len(runs), device=device)
        self.kept = {name: torch.zeros(len(record), *size) for name, size in self.sizes.items() if name in names}
        self.step, self.seconds = 0, 0.0
        each = [rates(run, self.sizes) for run in runs]
        self.rate = torch.stack([one.expand(max(map(len, each))) for one in each]).to(device)
        self.decay = torch.tensor([[run.weight_decay] for run in runs], device=device)
        self.falls = torch.tensor([[run.schedule == "cosine"] for run in runs], device=device)
        self.key = {
            "torch": torch.__version__,  # another one may draw other data: half of each would be neither's result
            "steps": steps,
            "record": record,
            "recorded": names,
            "device": device.type,
            "runs": [[run.task.kind, asdict(run)] for run in runs],
        }
        self._keep()

    def weights(self) -> dict[str, Tensor]:
        """Views into the flat parameters, without history."""
        found, at = {}, 0
        for name, size in self.sizes.items():
            numbers = size[1:].numel()
            found[name] = self.flat[:, at : at + numbers].view(size)
            at += numbers
        return found

    def go(self, store: Store, advance: Callable[[int], None]) -> None:
        """Train to the end from wherever the state in `store` is."""
        if (state := store.get(RESULT)) is not None:
            self._resume(state)
        advance(self.step * len(self.runs))
        if self.step == self.steps:
            return
        leaves = {name: view.detach().requires_grad_() for name, view in self.weights().items()}
        switches = Switches.of([run.architecture for run in self.runs], self.device)
        data = _Data(self.runs, self.device)
        now = saved = told = time.monotonic()
        done = 0  # model-steps that `advance` has not heard of
        while self.step < self.steps:
            self._update(self._slope(leaves, switches, data))
            self.step += 1
            self._keep()
            done += len(self.runs)
            before, now = now, time.monotonic()
            self.seconds += now - before
            if store.folder is not None and (now - saved > SAVE_SECONDS or self.step == self.steps):
                arrays = {name: tensor.cpu().numpy() for name, tensor in self._state().items()}
                store.put(RESULT, arrays | {"at": np.array([self.step, self.seconds])})
                saved = time.monotonic()
            if now - told > TELL_SECONDS or self.step == self.steps:
                advance(done)
                told, done = now, 0

    def _slope(self, leaves: dict[str, Tensor], switches: Switches, data: _Data) -> Float[Tensor, "model parameter"]:
        """The gradient of this step's losses, which are stored in `losses`."""
        inputs, answers = data.at(self.step)
        out = forward(self.architecture, leaves, switches, inputs)  # [E, B, outputs]
        losses = functional.cross_entropy(out.flatten(0, 1), answers.flatten(), reduction="none")
        losses = losses.view(answers.shape).mean(1)
        slopes = torch.autograd.grad(losses.sum(), list(leaves.values()))
        self.losses[self.step] = losses.detach()
        return torch.cat([slope.flatten(1) for slope in slopes], 1)

    def _update(self, slope: Float[Tensor, "model parameter"]) -> None:
        """AdamW [Loshchilov and Hutter], arXiv 1711.05101, as torch's, with a rate and a decay per model."""
        first, second = BETAS
        n = self.step + 1
        rate = self.rate * torch.where(self.falls, 0.5 * (1 + math.cos(math.pi * self.step / self.steps)), 1.0)
        self.mean.lerp_(slope, 1 - first)
        self.square.mul_(second).addcmul_(slope, slope, value=1 - second)
        scale = self.square.sqrt().div_(math.sqrt(1 - second**n)).add_(EPS)
        self.flat.mul_(1 - rate * self.decay)
        self.flat.sub_((self.mean / scale).mul_(rate / (1 - first**n)))

    def _keep(self) -> None:
        """Keep the weights to be recorded, if this is a step to record."""
        if self.step in self.record:
            weights = self.weights()
            for name, kept in self.kept.items():
                kept[self.record.index(self.step)] = weights[name]

    def trained(self) -> list[Trained]:
        weights = {name: tensor.cpu().clone() for name, tensor in self.weights().items()}
        losses = self.losses.cpu()
        return [
            Trained(
                run,
                losses[:, e].clone(),
                {name: tensor[e] for name, tensor in weights.items()},
                {at: {name: kept[n, e] for name, kept in self.kept.items()} for n, at in enumerate(self.record)},
                self.seconds / len(self.runs),
            )
            for e, run in enumerate(self.runs)
        ]

    def _state(self) -> dict[str, Tensor]:
        """What a resumed training begins with, beside step and seconds; the tensors themselves."""
        kept = {f"kept/{name}": tensor for name, tensor in self.kept.items()}
        return {"flat": self.flat, "mean": self.mean, "square": self.square, "losses": self.losses} | kept

    def _resume(self, arrays: Piece) -> None:
        self.step, self.seconds = int(arrays["at"][0]), float(arrays["at"][1])
        for name, tensor in self._state().items():
            tensor.copy_(torch.from_numpy(arrays[name]))


def rates(run: Run, sizes: Mapping[str, Sequence[int]]) -> Float[Tensor, " parameter"]:
    """A run's learning rate of every parameter, or of all together `[1]`; sizes are those of a group's weights, by name."""
    if not run.by_share:
        return torch.tensor([run.learning_rate])
    shares = cast(Copying, run.task).shares
    by_token = (
        shares / shares.mean()
    ) ** run.by_share  # the table of the embedding is [token, d], the other [d, token]
    factors = {"embedding": by_token[:, None], "unembedding": by_token}
    ones = {name: torch.ones(*size[1:]) for name, size in sizes.items()}
    return run.learning_rate * torch.cat([(one * factors.get(name, 1.0)).flatten() for name, one in ones.items()])
