"""Toys that match a model: the same structure and strengths in small, fresh and trained (`docs/probes/match.md`, "Match").

Each *variant* of a fresh toy lacks one ingredient: the residual stream, the causal mask, the positional encoding, the
sliding window. Strengths are ratios, through which alone the second-moment kernel of a fresh model depends on its width:
what a block adds to the stream against what is there, the feed-forward's part of it, and how far logits are from equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from probes.errors import InputError
from probes.models.linear import LinearizedBlock, normalized
from probes.models.view import Parts, Spec, View
from probes.run.precision import double
from probes.run.progress import Progress, Tally

from . import checks
from .checks import at_least, usable_device
from .model import Architecture, initial
from .tasks import Copying
from .train import Run, Trained, logits, train
from .view import Toy

Training = Literal["init", "retrieval"]
MATCHED = "matched"
WIDTH = 32  # about; a multiple of the heads
LEAST_HEAD = 4  # dimensions of a head: two wavelengths of RoPE
LAST_STEPS = 20  # over which the final loss is averaged
TEST_SEED = 1 << 20  # of sequences that no training draws
ROWS = 256  # of a normalized input that strengths are measured on
DRAWS = 4  # fresh toys whose strengths are averaged


class Strength(NamedTuple):
    """Root mean squares: of what block 0 reads, and of what a normalized input makes in a block."""

    embedding: float  # position 0 left out
    logits: float
    values: float  # W_O W_V n, without averaging, after its norm if it has one
    feed_forward: float


@torch.no_grad()
def strength(model: View, tokens: Int[Tensor, "prompt position"], *, seed: int = 0) -> Strength | None:
    """The four numbers of a model with fresh weights; None where its blocks cannot be taken apart."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, ROWS, model.spec.width, generator=generator).to(model.device, model.dtype)
    found = []
    for layer in range(model.spec.blocks):
        parts = model.parts(layer)
        if parts is None:
            return None
        block = LinearizedBlock(parts, rows, None)
        key, value = (x.repeat_interleave(block.groups, 1) for x in (block.key, block.value))
        projected = functional.linear(value.transpose(1, 2).flatten(2), parts.o.weight)
        written = normalized(parts.post_attention_norm, projected)[1]
        found.append([_square(x) for x in (block.query @ key.mT, written, block.output - block.middle)])
    blocks = torch.tensor(found).mean(0).sqrt().tolist()
    return Strength(_square(model.embed(tokens)[:, 1:]) ** 0.5, *blocks)


def _square(x: Tensor) -> float:
    return float(double(x).square().mean())


@torch.no_grad()
def frequencies(model: View, tokens: Int[Tensor, "prompt position"]) -> tuple[tuple[float, ...] | None, ...]:
    """Radians per position of RoPE's planes by block, scaling included, 0 for those it leaves alone; None without RoPE.

    They are read from the rotation of a pass over the first prompt: whatever rule made it, this is what acted.
    """

    def of(rotation: tuple[Tensor, Tensor] | None) -> tuple[float, ...] | None:
        if rotation is None:
            return None
        cos, sin = (double(part[1]).chunk(2)[0] for part in rotation)
        turned = torch.atan2(sin, cos).tolist()
        return (*turned, *[0.0] * (model.spec.head_dim // 2 - len(turned)))

    return tuple(map(of, model.trace(model.embed(tokens[:1])).rotary))


@dataclass(frozen=True)
class Settings(checks.Settings):
    """How toys are made and trained.

    `ablations`: also make fresh variants that lack one ingredient.
    """

    LEAST: ClassVar = {"positions": 8, "longest": 8, "targets": 0}
    fresh_seeds: int = 4
    longest: int = 512  # positions of a fresh toy at most
    seeds: int = 2
    ablations: bool = True
    deepest: int = 6  # blocks of a trained toy at most
    positions: int = 33  # of retrieval
    width: int = WIDTH
    vocabulary: int = 10  # tokens of the retrieval task beside BOS
    targets: int = 6  # positions that retrieval asks for, evenly spaced; 0: every one
    steps: int = 300
    batch: int = 32
    learning_rate: float = 5e-3  # falls to zero along half a cosine
    sequences: int = 1000  # of a test of accuracy

    def asked(self, bos: bool) -> list[int]:
        """Positions that retrieval toys are asked for, one toy each."""
        every = range(int(bos), self.positions)
        if not self.targets:
            return list(every)
        return sorted({round(float(x)) for x in np.linspace(every[0], every[-1], self.targets)})


QUICK = Settings(fresh_seeds=2, ablations=False, positions=17, targets=4, steps=200, sequences=500)


@dataclass(frozen=True)
class Plan:
    """What is made for one model: fresh toys by variant, and runs of matched ones; `notes` say in what they do not match it.

    A variant is "matched", or named by what it lacks: "no residual", "no causal mask", "no positions", "no window". Runs go
    seed by seed, targets in order.
    """

    fresh: dict[str, Architecture]
    runs: list[Run]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """One toy: its view, what it reads, and, of a trained one, how well it does on sequences it has not seen."""

    view: Toy
    seed: int
    prompts: Int[Tensor, "prompt position"] | None = None  # its task's; None: the model's own
    target: int | None = None  # the position asked for
    loss: float = np.nan  # at the end of training, nats
    accuracy: float = np.nan


@dataclass(frozen=True)
class Matching:
    """Plans and toys of one setting on one device."""

    settings: Settings = Settings()
    device: str = "auto"  # as in `probes.load`

    def plan(
        self,
        spec: Spec,
        *,
        bos: bool,
        length: int,
        parts: Parts | None = None,
        strengths: Strength | None = None,
        frequencies: Sequence[tuple[float, ...] | None] = (None,),
    ) -> Plan:
        """The toys that match a model.

        With `bos` retrieval sequences have one, too. A window is a fraction of `length`, the positions of the model's
        prompts. Toys have the norms of `parts`, block 0 taken apart, and RMS norms of the stream without it, and torch's own
        strengths where there are none. `frequencies` as the function of this name gives them.
        """
        at_least("length", length, 2)
        if (positional := spec.positional[0]) == "shared rope":
            raise InputError(f"toys have no latent attention, which {spec.family} has; give a model of another family")
        s = self.settings
        head = max(LEAST_HEAD, 2 * round(s.width / spec.heads / 2))
        planes, turns = head // 2, frequencies[0]
        own = None if parts is None else parts.attention_norm or parts.post_attention_norm
        base = Architecture(
            blocks=spec.blocks,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            width=head * spec.heads,
            length=min(length, s.longest),
            vocabulary=spec.vocabulary,
            outputs=s.vocabulary,
            positional=positional,
            # A base's wavelengths are evenly spaced logarithms: so are those of every n-th plane.
            frequencies=None if turns is None else tuple(turns[n * len(turns) // planes] for n in range(planes)),
            feed_forward=True,
            norm="rms" if own is None else own.kind,
            qk_norm=parts is not None and parts.q_norm is not None,
            post_norm=parts is not None and parts.post_attention_norm is not None,
        )
        base = replace(base, factors=() if strengths is None else _factors(base, strengths))

        def matched(positions: int, **others: Any) -> Architecture:
            window = _window(spec, length, positions)
            mask = "causal" if window is None else "window"
            return replace(base, length=positions, mask=mask, window=window, **others)

        whole = matched(base.length)
        fresh = {MATCHED: whole} | (_ablated(whole) if s.ablations else {})
        small = matched(s.positions, vocabulary=s.vocabulary + bos, blocks=min(spec.blocks, s.deepest))
        asked = [Copying(s.vocabulary + bos, s.positions, target, s.batch, bos) for target in s.asked(bos)]
        runs = [
            Run(small, task, seed, learning_rate=s.learning_rate, schedule="cosine")
            for seed in range(s.seeds)
            for task in asked
        ]
        return Plan(fresh, runs, _notes(spec, s, length, strengths, parts, frequencies))

    def toys(
        self, plan: Plan, folder: str | Path | None = None, progress: Progress | None = None
    ) -> dict[tuple[str, Training], list[Member]]:
        """Fresh toys and trained ones by variant and training, in the plan's order.

        Unfinished training is kept in `folder` and resumed from there; the caller removes it in the end.
        """
        s, device = self.settings, torch.device(usable_device(self.device))
        members: dict[tuple[str, Training], list[Member]] = {}
        for variant, a in plan.fresh.items():
            views = (
                Toy(a, initial(a, seed), name=f"{variant} init", condition="init") for seed in range(s.fresh_seeds)
            )
            members[variant, "init"] = list(map(Member, views, range(s.fresh_seeds)))
        steps = Tally(progress, len(plan.runs) * s.steps)
        trained = train(plan.runs, s.steps, device=device, folder=folder, advance=steps)
        members[MATCHED, "retrieval"] = [_member(one, s.sequences, device) for one in trained]
        return members


def _window(spec: Spec, length: int, toy_length: int) -> int | None:
    """The toys' window: as large a part of their length as the model's is of `length`; None for no window."""
    (own, *others) = _windows(spec, length)
    if others or own is None:
        return None
    return max(2, round((own - 1) * (toy_length - 1) / (length - 1)) + 1)


def _windows(spec: Spec, length: int) -> set[int | None]:
    """Those of the blocks; None for one that prompts of this length fit into."""
    return {None if window is None or window >= length else window for window in spec.windows}


def _factors(base: Architecture, wanted: Strength) -> tuple[tuple[str, float], ...]:
    """What fresh weights of toys are multiplied by, to be as strong as the model's; values stay as torch draws them.

    The norms divide by the size of the stream: what counts is each part's size against that of values. Where a norm follows
    a matrix, its weight is what counts. Biases are zero, as all supported families have them.
    """
    plain = replace(base, vocabulary=2, factors=(("bias", 0.0),))
    made = (strength(Toy(plain, initial(plain, seed)), torch.tensor([[0, 1]])) for seed in range(DRAWS))
    own = Strength(*np.sqrt(np.mean(np.square([one for one in made if one is not None]), 0)).tolist())
    looks = (wanted.logits / own.logits) ** 0.5
    embedding, down = (
        getattr(wanted, name) / wanted.values / (getattr(own, name) / own.values)
        for name in ("embedding", "feed_forward")
    )
    q, k = ("q_norm", "k_norm") if base.qk_norm else ("q", "k")
    last = "post_mlp_norm" if base.post_norm else "down"
    factors = {"bias": 0.0, "embedding": embedding, "positions": embedding, q: looks, k: looks, last: down}
    return tuple(factors.items())


def _ablated(base: Architecture) -> dict[str, Architecture]:
    """By name, architectures without one ingredient."""
    found = {"no residual": replace(base, residual=False), "no causal mask": replace(base, mask="full", window=None)}
    if base.positional != "none":
        found["no positions"] = replace(base, positional="none", frequencies=None)
    if base.window is not None:
        found["no window"] = replace(base, mask="causal", window=None)
    return found


def _notes(
    spec: Spec,
    settings: Settings,
    length: int,
    strengths: Strength | None,
    parts: Parts | None,
    turns: Sequence[tuple[float, ...] | None],
) -> tuple[str, ...]:
    """In what toys do not match the model."""
    deep = f"trained toys have {settings.deepest} of the model's {spec.blocks} blocks; fresh ones have all"
    by_head = parts is None or parts.q_norm is None or parts.q_norm.weight.numel() == spec.head_dim
    notes = {
        "blocks with and without a window differ; the toys' masks are causal without one": len(_windows(spec, length))
        > 1,
        "every query sees a prefix; the toys' masks are causal": spec.prefix is not None,
        "blocks differ in their positional encoding; the toys have that of block 0 in all": len(set(spec.positional))
        > 1,
        "blocks differ in their wavelengths of RoPE; the toys have those of block 0 in all": len({*turns} - {None}) > 1,
        "all heads have one norm of queries and keys; the toys have one for each": not by_head,
        "branches read the stream without a norm; the toys norm it": parts is not None and parts.attention_norm is None,
        "blocks cannot be taken apart; the toys have torch's own strengths": strengths is None,
        deep: spec.blocks > settings.deepest,
        f"fresh toys have {settings.longest} of {length} positions": length > settings.longest,
    }
    return tuple(note for note, holds in notes.items() if holds)


def _member(trained: Trained, sequences: int, device: torch.device) -> Member:
    run, task = trained.run, cast(Copying, trained.run.task)
    # The same for all targets.
    read = task.draw(None, torch.Generator(device).manual_seed(TEST_SEED), 1).inputs[0].cpu()
    unseen = torch.Generator(device).manual_seed(TEST_SEED + 1)
    drawn = task.draw(None, unseen, -(-sequences // task.batch))
    predicted, answers = logits([trained], drawn.inputs.flatten(0, 1).cpu())[0], task.answers(drawn).flatten().cpu()
    return Member(
        Toy(run.architecture, trained.weights, name=f"{MATCHED} retrieval", bos=task.first),
        run.seed,
        read,
        task.target,
        float(trained.losses[-LAST_STEPS:].mean()),
        float((predicted.argmax(-1) == answers).double().mean()),
    )
