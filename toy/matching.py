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

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from probes.models.view import Spec
from probes.run.progress import Advance

from .checks import at_least, usable_device
from .model import Architecture, initial
from .tasks import Copying, InContext
from .train import Run, Trained, forget, logits, train
from .view import Toy

Task = Literal["retrieval", "in-context"]
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

    def in_context(self, width: int) -> InContext:
        return InContext(self.items, width, self.classes, self.labels, self.burst, self.eps, batch=self.batch)

    def described(self) -> dict[str, Any]:
        """All fields, for provenance."""
        return asdict(self)


QUICK = Settings(seeds=1, ablations=False, items=4, width=16, steps=100, in_context_steps=200, burst=2)


@dataclass(frozen=True)
class Plan:
    """What is trained for one model: runs by variant and task, in order; `notes` say in what the toys do not match it.

    A variant is "matched", or named by what it lacks: "no residual", "no causal mask", "no positions", "no window". Runs go
    seed by seed, targets in order.
    """

    runs: dict[tuple[str, Task], list[Run]]
    notes: tuple[str, ...]


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
        a, name = self.run.architecture, f"{self.view.identity.name}, scaled"
        weights = initial(a, self.run.seed)
        weights |= {key: weights[key] * factor for key in ("embedding", "positions") if key in weights}
        return Toy(a, weights, name=name, condition="init", bos=self.view.bos)


@dataclass(frozen=True)
class Group:
    """The toys of one variant and task."""

    variant: str
    task: Task
    members: tuple[Member, ...]
    key: str  # equal for equal groups of other models


@dataclass(frozen=True)
class Matching:
    """Plans and toys of one setting on one device: what a study of models is given, since it knows no toys itself."""

    settings: Settings = Settings()
    device: str = "auto"  # as in `probes.load`

    @property
    def described(self) -> dict[str, Any]:
        return self.settings.described()

    def plan(self, spec: Spec, *, bos: bool, length: int, norm: Literal["rms", "layer"] = "rms") -> Plan:
        """The toys that match a model.

        Args:
            spec: the model's.
            bos: whether BOS stands first in its prompts; retrieval sequences then have one, too.
            length: positions of the model's prompts, which a window is a fraction of.
            norm: kind of the model's norms.

        Raises:
            InputError: the model's length is too short, or its depth is none.
        """
        at_least("length", length, 2)
        s, window = self.settings, _window(spec, length, self.settings.length)
        head = max(LEAST_HEAD, 2 * round(s.width / spec.heads / 2))
        base = Architecture(
            blocks=spec.blocks,
            heads=spec.heads,
            width=head * spec.heads,
            length=s.length,
            vocabulary=s.vocabulary + bos,
            outputs=s.vocabulary,
            mask="causal" if window is None else "window",
            window=window,
            positional=spec.positional[0],
            feed_forward=True,
            norm=norm,
        )
        copying = [Copying(s.vocabulary + bos, s.length, target, s.batch, bos) for target in s.asked(bos)]
        runs: dict[tuple[str, Task], list[Run]] = {}
        for name, found in ({MATCHED: base} | (_ablated(base) if s.ablations else {})).items():
            seeds = range(s.seeds if name == MATCHED else s.ablation_seeds)
            vectors, task = replace(found, vocabulary=None, outputs=s.labels), s.in_context(base.width)
            rates = {"schedule": "cosine", "learning_rate": s.learning_rate}
            runs[name, "retrieval"] = [Run(found, one, seed, **rates) for seed in seeds for one in copying]
            rates["learning_rate"] = s.in_context_learning_rate
            runs[name, "in-context"] = [Run(vectors, task, seed, **rates) for seed in seeds]
        return Plan(runs, _notes(spec))

    def toys(
        self, plans: Sequence[Plan], folder: str | Path | None = None, advance: Advance | None = None
    ) -> list[list[Group]]:
        """Train what the plans need, each distinct model once, and give every plan its groups, variants and tasks in order.

        Args:
            plans: made by this.
            folder: where unfinished training is kept and resumed from; the caller removes it in the end (`finish`).
            advance: called with (task, model-steps done, in all).

        Raises:
            InputError: as `train.train` does.
        """
        device = torch.device(usable_device("auto") if self.device == "auto" else self.device)
        trained: dict[Run, Trained] = {}
        for task, steps in (("retrieval", self.settings.steps), ("in-context", self.settings.in_context_steps)):
            asked = (run for plan in plans for (_, of), runs in plan.runs.items() if of == task for run in runs)
            runs = list(dict.fromkeys(asked))
            done, total = 0, float(len(runs) * steps)

            def count(more: int, task: str = task, total: float = total) -> None:
                nonlocal done
                done += more
                if advance is not None:
                    advance(f"toys: {task}", float(done), total)

            within = None if folder is None else Path(folder) / task
            found = train(runs, steps, device=device, folder=within, advance=count)
            trained |= dict(zip(runs, found, strict=True))

        @cache
        def group(variant: str, task: Task, runs: tuple[Run, ...]) -> Group:
            made = (_member(trained[run], f"{variant} {task}", self.settings.sequences, device) for run in runs)
            return Group(variant, task, tuple(made), f"{variant} {task} {list(runs)!r}")

        return [[group(*of, tuple(runs)) for of, runs in plan.runs.items()] for plan in plans]

    def finish(self, folder: str | Path) -> None:
        """Remove what `toys` kept of unfinished training."""
        forget(folder)


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


def _notes(spec: Spec) -> tuple[str, ...]:
    """In what toys do not match the model."""
    shared = f"{spec.heads} query heads share {spec.kv_heads} key-value heads; the toys' heads have their own"
    notes = {
        "blocks with and without a window differ; the toys' masks are causal without one": len(set(spec.windows)) > 1,
        "every query sees a prefix; the toys' masks are causal": spec.prefix is not None,
        "blocks differ in their positional encoding; the toys have that of block 0 in all": len(set(spec.positional))
        > 1,
        shared: spec.kv_heads != spec.heads,
    }
    return tuple(note for note, holds in notes.items() if holds)


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
