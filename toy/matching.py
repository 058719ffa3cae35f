"""Toys that match a model: the same depth, heads, mask, positional encoding and residual structure, in small.

A toy of a model keeps what the model's sense of position can come from and shrinks the rest. Width, vocabulary and length
are small, feed-forwards are plain, every head has keys of its own, RoPE has its usual wavelengths. Each *variant* takes one
ingredient away: the residual stream, the causal mask, the positional encoding, the sliding window. Two tasks train every
variant: retrieval [Liu-7], one model for each position that is asked for, and in-context retrieval [Wu] with answers
anywhere. Both ask for all positions alike: what a trained toy then prefers is not in its data.

A window of w positions reaches `blocks (w - 1)` back; it is scaled so that it reaches the same fraction of the toy's
length as the model's does of the length that the model is measured at.

Models that need the same toys share them: equal runs are trained once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from probes.errors import InputError
from probes.models.view import Spec

from .checks import at_least
from .model import Architecture, initial
from .tasks import Copying, InContext
from .train import Run, Trained, forget, logits, train
from .view import Toy

Task = Literal["retrieval", "in-context"]
TASKS: tuple[Task, ...] = ("retrieval", "in-context")
MATCHED = "matched"
WIDTH = 32  # about; a multiple of the heads
LEAST_HEAD = 4  # dimensions of a head: two wavelengths of RoPE
LAST_STEPS = 20  # over which the final loss is averaged
TEST_SEED = 1 << 20  # of sequences that no training draws


@dataclass(frozen=True)
class Settings:
    """How toys are made and trained.

    `ablations`: also train variants that lack one ingredient, with `ablation_seeds` seeds instead of `seeds`.

    Raises:
        InputError: a number that is too small, or items that do not go together.
    """

    seeds: int = 2
    ablations: bool = True
    ablation_seeds: int = 1
    items: int = 8  # pairs of an in-context sequence, as published; both tasks have 2 items + 1 positions
    width: int = WIDTH
    vocabulary: int = 10  # tokens of the retrieval task beside BOS
    targets: int = 0  # positions that retrieval asks for, evenly spaced; 0: every one
    classes: int = 8192  # too many to be known by heart in so few steps
    labels: int = 8
    burst: int = 4
    eps: float = 0.25  # of an item's noise; [Wu] has 0.75, 2048 classes, 32 labels and 100,000 steps
    steps: int = 300  # of retrieval
    in_context_steps: int = 1500
    batch: int = 32
    learning_rate: float = 5e-3  # of retrieval; both fall to zero along half a cosine
    in_context_learning_rate: float = 3e-3
    sequences: int = 1000  # of a test of accuracy

    def __post_init__(self) -> None:
        for name in ("seeds", "ablation_seeds", "width", "steps", "in_context_steps", "batch", "sequences"):
            at_least(name, getattr(self, name), 1)
        at_least("items", self.items, 4)
        at_least("targets", self.targets, 0)
        self.in_context(self.width)  # raises what does not go together

    @property
    def length(self) -> int:
        """Positions of every toy."""
        return 2 * self.items + 1

    def asked(self, bos: bool) -> list[int]:
        """Positions that retrieval toys are asked for, one toy each."""
        every = range(int(bos), self.length)
        if not self.targets:
            return list(every)
        return sorted({round(float(x)) for x in np.linspace(every[0], every[-1], self.targets)})

    def retrieval(self, target: int, bos: bool) -> Copying:
        return Copying(self.vocabulary + bos, self.length, target, self.batch, bos)

    def in_context(self, width: int) -> InContext:
        return InContext(
            items=self.items,
            width=width,
            classes=self.classes,
            labels=self.labels,
            burst=self.burst,
            eps=self.eps,
            batch=self.batch,
        )

    def described(self) -> dict[str, Any]:
        """All fields, for provenance."""
        return asdict(self)


QUICK = Settings(seeds=1, ablations=False, items=4, width=16, steps=100, in_context_steps=200, burst=2)


@dataclass(frozen=True)
class Variant:
    """One kind of toy of a model: an architecture for each task, and the seeds it is trained with."""

    name: str  # "matched", or what it lacks: "no residual", "no causal mask", "no positions", "no window"
    architectures: dict[Task, Architecture]
    tasks: dict[Task, tuple[Any, ...]]  # one for each model of a seed
    seeds: tuple[int, ...]
    learning_rates: dict[Task, float]

    def runs(self, task: Task) -> list[Run]:
        """All of a task, seed by seed, targets in order."""
        return [
            Run(self.architectures[task], one, seed=seed, learning_rate=self.learning_rates[task], schedule="cosine")
            for seed in self.seeds
            for one in self.tasks[task]
        ]


@dataclass(frozen=True)
class Plan:
    """What is trained for one model; `notes` say in what the toys do not match it."""

    variants: tuple[Variant, ...]
    notes: tuple[str, ...]
    bos: bool
    settings: Settings

    def runs(self, task: Task) -> list[Run]:
        return [run for variant in self.variants for run in variant.runs(task)]


@dataclass(frozen=True)
class Member:
    """One trained toy: its view, its view before training, and how well it does on sequences it has not seen."""

    view: Toy
    fresh: Toy
    run: Run
    prompts: Callable[[int], Int[Tensor, "prompt position"]]  # so many of its task's sequences, as token ids
    seed: int
    target: int | None  # the position asked for; None in context
    loss: float  # at the end of training, nats
    accuracy: float

    def scaled(self, factor: float) -> Toy:
        """The toy before training with all that enters block 0 multiplied: small factors let the blocks weigh more."""
        run = self.run
        weights = {
            name: tensor * factor if name in ("embedding", "positions") else tensor
            for name, tensor in initial(run.architecture, run.seed).items()
        }
        return Toy(
            run.architecture, weights, name=f"{self.view.identity.name}, scaled", condition="init", bos=self.view.bos
        )


@dataclass(frozen=True)
class Group:
    """The toys of one variant and task."""

    variant: str
    task: Task
    members: tuple[Member, ...]
    key: str  # equal for equal groups of other models


def plan(
    spec: Spec,
    *,
    bos: bool,
    length: int,
    norm: Literal["rms", "layer"] = "rms",
    settings: Settings = Settings(),
) -> Plan:
    """The toys that match a model.

    Args:
        spec: the model's.
        bos: whether BOS stands first in its prompts; retrieval sequences then have one, too.
        length: positions of the model's prompts, which a window is a fraction of.
        norm: kind of the model's norms.
        settings: sizes and training.

    Raises:
        InputError: the model's length is too short, or its depth is none.
    """
    at_least("length", length, 2)
    window = _window(spec, length, settings.length)
    head = max(LEAST_HEAD, 2 * round(settings.width / spec.heads / 2))
    base = Architecture(
        blocks=spec.blocks,
        heads=spec.heads,
        width=head * spec.heads,
        length=settings.length,
        vocabulary=settings.vocabulary + bos,
        outputs=settings.vocabulary,
        mask="causal" if window is None else "window",
        window=window,
        positional=spec.positional[0],
        feed_forward=True,
        norm=norm,
    )
    tasks: dict[Task, tuple[Any, ...]] = {
        "retrieval": tuple(settings.retrieval(target, bos) for target in settings.asked(bos)),
        "in-context": (settings.in_context(base.width),),
    }
    variants = tuple(
        Variant(
            name,
            {"retrieval": found, "in-context": replace(found, vocabulary=None, outputs=settings.labels)},
            tasks,
            tuple(range(settings.seeds if name == MATCHED else settings.ablation_seeds)),
            {"retrieval": settings.learning_rate, "in-context": settings.in_context_learning_rate},
        )
        for name, found in ({MATCHED: base} | (_ablated(base) if settings.ablations else {})).items()
    )
    return Plan(variants, tuple(_notes(spec)), bos, settings)


def _window(spec: Spec, length: int, toy_length: int) -> int | None:
    """The toys' window: as large a part of their length as the model's is of `length`; None for no window."""
    (own, *others) = set(spec.windows)
    if others or own is None or own >= length:
        return None
    return max(2, round((own - 1) * (toy_length - 1) / (length - 1)) + 1)


def _ablated(base: Architecture) -> dict[str, Architecture]:
    """By name, the matched architecture without one ingredient."""
    found = {
        "no residual": replace(base, residual=False),
        "no causal mask": replace(base, mask="full", window=None),
    }
    if base.positional != "none":
        found["no positions"] = replace(base, positional="none")
    if base.window is not None:
        found["no window"] = replace(base, mask="causal", window=None)
    return found


def _notes(spec: Spec) -> Iterator[str]:
    """In what toys do not match the model."""
    if len(set(spec.windows)) > 1:
        yield "blocks with and without a window differ; the toys' masks are causal without one"
    if spec.prefix is not None:
        yield "every query sees a prefix; the toys' masks are causal"
    if len(set(spec.positional)) > 1:
        yield "blocks differ in their positional encoding; the toys have that of block 0 in all"
    if spec.kv_heads != spec.heads:
        yield f"{spec.heads} query heads share {spec.kv_heads} key-value heads; the toys' heads have their own"


def model_steps(plans: Sequence[Plan]) -> int:
    """Updates of single models that training takes, those that plans share counted once."""
    return sum(len(_distinct(plans, task)) * _steps(plans, task) for task in TASKS)


def toys(
    plans: Sequence[Plan],
    *,
    folder: str | Path | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[str, float, float], None] | None = None,
) -> list[list[Group]]:
    """Train what the plans need, each distinct model once, and give every plan its groups, variants and tasks in order.

    Args:
        plans: of one setting.
        folder: where unfinished training is kept and resumed from; the caller removes it in the end (`finish`).
        device: where toys are trained; their views are on the CPU.
        advance: called with (task, model-steps done, in all).

    Raises:
        InputError: no plans or plans of two settings; as `train.train` does.
    """
    if len({one.settings for one in plans}) != 1:
        raise InputError(f"{len(plans)} plans have {len({one.settings for one in plans})} settings; give plans of one")
    trained: dict[Run, Trained] = {}
    for task in TASKS:
        runs, steps = _distinct(plans, task), _steps(plans, task)
        done, total = 0, float(len(runs) * steps)

        def count(more: int, task: Task = task, total: float = total) -> None:
            nonlocal done
            done += more
            if advance is not None:
                advance(f"toys: {task}", float(done), total)

        within = None if folder is None else Path(folder) / task
        found = train(runs, steps, device=device, folder=within, advance=count)
        trained |= dict(zip(runs, found, strict=True))
    member = cache(lambda run, name: _member(trained[run], name, plans[0].settings.sequences, device))
    group = cache(lambda variant, task, runs: _group(variant, task, runs, member))
    return [
        [group(variant.name, task, tuple(variant.runs(task))) for variant in one.variants for task in TASKS]
        for one in plans
    ]


@dataclass(frozen=True)
class Matching:
    """Plans and toys of one setting on one device: what a study of models is given, since it knows no toys itself."""

    settings: Settings = Settings()
    device: str = "auto"  # as in `probes.load`

    @property
    def described(self) -> dict[str, Any]:
        return self.settings.described()

    def plan(self, spec: Spec, *, bos: bool, length: int, norm: Literal["rms", "layer"]) -> Plan:
        """As `plan`."""
        return plan(spec, bos=bos, length=length, norm=norm, settings=self.settings)

    def toys(
        self, plans: Sequence[Plan], folder: Path, advance: Callable[[str, float, float], None] | None
    ) -> list[list[Group]]:
        """As `toys`."""
        usual = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(usual if self.device == "auto" else self.device)
        return toys(plans, folder=folder, device=device, advance=advance)

    def finish(self, folder: Path) -> None:
        """As `finish`."""
        finish(folder)


def finish(folder: str | Path) -> None:
    """Remove what `toys` kept of unfinished training."""
    for task in TASKS:
        forget(Path(folder) / task)
    forget(folder)


def _steps(plans: Sequence[Plan], task: Task) -> int:
    settings = plans[0].settings
    return settings.steps if task == "retrieval" else settings.in_context_steps


def _distinct(plans: Sequence[Plan], task: Task) -> list[Run]:
    return list(dict.fromkeys(run for one in plans for run in one.runs(task)))


def _group(variant: str, task: Task, runs: tuple[Run, ...], member: Callable[[Run, str], Member]) -> Group:
    members = tuple(member(run, f"{variant} {task}") for run in runs)
    return Group(variant, task, members, f"{variant} {task} {list(runs)!r}")


def _member(trained: Trained, name: str, sequences: int, device: torch.device | str) -> Member:
    run, task = trained.run, trained.run.task
    if isinstance(task, Copying):
        view = Toy(run.architecture, trained.weights, name=name, bos=task.first)
    else:
        view = Toy.of(trained, name=name, device=device)
    return Member(
        view,
        view.reinitialized(run.seed),
        run,
        partial(_prompts, run, device),
        run.seed,
        task.target if isinstance(task, Copying) else None,
        float(trained.losses[-LAST_STEPS:].mean()),
        _accuracy(trained, sequences, device),
    )


def _prompts(run: Run, device: torch.device | str, n: int) -> Int[Tensor, "prompt position"]:
    """Sequences of a run's task as its view reads them; the same ones for all targets of retrieval."""
    generator = torch.Generator(device).manual_seed(TEST_SEED)
    task = run.task
    if isinstance(task, InContext):
        return task.ids(task.world(run.seed, device), generator, n).cpu()
    return task.draw(None, generator, -(-n // task.batch)).inputs.flatten(0, 1)[:n].cpu()


def _accuracy(trained: Trained, sequences: int, device: torch.device | str) -> float:
    """The share of unseen sequences that a toy is right about; in context those of classes it has never seen."""
    generator, task = torch.Generator(device).manual_seed(TEST_SEED + 1), trained.run.task
    world = task.world(trained.run.seed, device)
    if isinstance(task, InContext):
        drawn = task.novel(world, generator, sequences)
    else:
        drawn = task.draw(world, generator, -(-sequences // task.batch))
    guessed = logits([trained], drawn.inputs.flatten(0, 1).cpu())[0].argmax(-1)
    return float((guessed == task.answers(drawn).flatten().cpu()).double().mean())
