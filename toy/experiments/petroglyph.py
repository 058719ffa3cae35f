"""Order without positional encoding: one causal layer cannot tell permuted prefixes apart, two layers can.

The claim is discussed in [Liu-7] and in [Irie] ("Why Are Positional Encodings Nonessential for Deep Autoregressive
Transformers? A Petroglyph Revisited", ACL Findings 2025). Two tests:

Exact. In float64, the output at the last position under every permutation of the tokens before it, for a sequence of
different tokens; the largest change, against the largest output. In one layer without positional encoding the last query
reads the others as a set, in whatever stream structure, so that only the order of floating-point sums is left. In two
layers the others have seen different prefixes. Under a full mask all see the same, and any depth is blind.

Trained. Which of two marked tokens stands first (`tasks.WhichFirst`)? Test sequences come with their mirror images, in which
the two are exchanged: a model blind to order gives both one answer, and is right in exactly one of them, however it was
trained. Its accuracy is 1/2 without sampling error; its loss is `ln 2` at least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from probes.errors import InputError

from ..model import Architecture, Switches, Weights, forward, initial
from ..tasks import WhichFirst, mirrored
from ..train import Run, Trained, stacked
from .experiment import Work
from .sweep import Cells, Measure, Part, axes, each, each_at_least, each_distinct, sweep

EPS = float(np.finfo(np.float64).eps)
TEST_SEED = 2**32  # of test sequences; runs have smaller ones
LONGEST = 8  # of the exact test, tokens: 7! = 5,040 permutations of each prefix
POINTS = 25  # steps at which training models are tested, at most
POSITIONAL = ("none", "learned", "sinusoidal", "rope", "decay")
TRAINED_POSITIONAL = ("none", "learned")
KIND: tuple[str, ...] = ("layers", "mask", "positional", "residual", "feed_forward", "norm")
DIMS = (*KIND, "seed")
TRAINED_DIMS = ("layers", "mask", "trained_positional", "seed")
EPS_OF = "float64 eps of the largest output"


def possible(mask: str, positional: str) -> bool:
    """Decay is a loss per token into the past, which a full mask does not have."""
    return not (mask == "full" and positional == "decay")


@dataclass(frozen=True)
class Settings:
    """Exact test and training; both with every mask, residual off and on, feed-forward off and on, and so on.

    `seeds`, `sequences`, `steps`, `tests` are numbers. `length` is that of the exact test, all of whose permutations are
    tried; `context` that of the task. Neither source gives a setting for this figure.
    """

    layers: tuple[int, ...] = (1, 2)
    mask: tuple[str, ...] = ("causal", "full")
    positional: tuple[str, ...] = POSITIONAL
    residual: tuple[bool, ...] = (False, True)
    feed_forward: tuple[bool, ...] = (False, True)
    norm: tuple[str, ...] = ("none", "rms", "layer")
    seeds: int = 5
    width: int = 8
    heads: int = 1
    decay: float = 0.5
    vocabulary: int = 10
    length: int = 6
    sequences: int = 4
    context: int = 10
    steps: int = 1000
    learning_rate: float = 3e-3
    batch: int = 128
    tests: int = 4096  # and as many mirror images

    def __post_init__(self) -> None:
        each_distinct(self, *KIND)
        each_at_least(self, 1, "seeds", "sequences", "steps", "tests")
        if not 3 <= self.length <= LONGEST:
            raise InputError(f"length={self.length} is out of range; give from 3 to {LONGEST}, for all permutations")
        if self.length > self.vocabulary:
            raise InputError(f"length={self.length} different tokens need as many ids; give vocabulary={self.length}")
        if self.context < self.length:
            raise InputError(
                f"context={self.context} is shorter than the exact test's length={self.length}; give {self.length} or more"
            )
        for mask in self.mask:
            if mask not in ("causal", "full"):
                raise InputError(f"mask '{mask}' is not compared here; give causal, full or both")
        self.runs()  # architectures, rates and tasks refuse what cannot be
        for case in self.cases():
            self.architecture(**case)

    def cases(self) -> list[dict[str, Any]]:
        """The kinds of models of the exact test, in the order of `difference`'s dimensions; some cannot be (`possible`)."""
        kinds = (dict(zip(KIND, case, strict=True)) for case in product(*(getattr(self, name) for name in KIND)))
        return [kind for kind in kinds if possible(kind["mask"], kind["positional"])]

    def architecture(
        self, *, layers: int, length: int | None = None, outputs: int | None = None, **kind: Any
    ) -> Architecture:
        """A model of a kind, with a residual stream unless it says otherwise."""
        return Architecture(
            blocks=layers,
            heads=self.heads,
            width=self.width,
            length=length or self.length,
            vocabulary=self.vocabulary,
            outputs=outputs or self.vocabulary,
            decay=self.decay if kind["positional"] == "decay" else None,
            **kind,
        )

    def trained(self) -> list[str]:
        """The encodings of the models that are trained."""
        return [p for p in self.positional if p in TRAINED_POSITIONAL]

    def kinds(self) -> list[tuple[int, str, str]]:
        """(layers, mask, positional) of the models that are trained."""
        return list(product(self.layers, self.mask, self.trained()))

    def runs(self) -> list[Run]:
        """Of the trained demonstration, in the order of `accuracy`'s dimensions."""
        task = WhichFirst(self.vocabulary, self.context, self.batch)
        return [
            Run(
                self.architecture(layers=layers, mask=mask, positional=positional, length=self.context, outputs=2),
                task,
                seed=seed,
                learning_rate=self.learning_rate,
            )
            for (layers, mask, positional), seed in product(self.kinds(), range(self.seeds))
        ]


QUICK = Settings(seeds=2, steps=300, tests=1024)


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """The exact test on fresh and trained models, and the demonstration's accuracy while they train.

    Returns:
        `difference [layers, mask, positional, residual, feed_forward, norm, seed]` of fresh models: largest change of an
        output under all permutations of a prefix, over the largest output, in units of float64's eps, largest over
        sequences; `least_difference` alike: of the permutation that changes least, which has to be told apart, too.
        NaN where there is no such model. `trained_difference [layers, mask, trained_positional, seed]` alike, of trained
        models after their last step. `accuracy`, `loss [layers, mask, trained_positional, seed, step]`: which marked token
        stands first, on fresh sequences and their mirror images.
    """
    s = settings
    tokens, orders = distinct_tokens(s.vocabulary, s.length, s.sequences), prefix_orders(s.length)
    changes = {
        "difference": Measure("largest change under permuted prefixes", EPS_OF),
        "least_difference": Measure("change under the permutation of least", EPS_OF),
    }
    learned = {
        "trained_difference": Measure("largest change under permuted prefixes, trained", EPS_OF),
        "accuracy": Measure("accuracy on mirrored pairs", "1", ("step",)),
        "loss": Measure("loss on mirrored pairs", "nat", ("step",)),
    }
    coords = axes(s, *DIMS) | {"trained_positional": s.trained(), "step": recorded_steps(s.steps)}
    return sweep(
        coords,
        Part(DIMS, changes, _fresh(s, tokens, orders, work)),
        Part(TRAINED_DIMS, learned, _trained(s, tokens, orders, work)),
        attrs={
            "exact_dtype": "float64",
            "permutations": len(orders) - 1,
            "task": "which of two marked tokens stands first; tested on sequences and their mirror images",
        },
    )


def _fresh(s: Settings, tokens: Tensor, orders: Tensor, work: Work) -> Cells:
    """The exact test of fresh models, kind by kind."""
    cases = s.cases()
    for n, case in enumerate(cases):
        architecture = s.architecture(**case)
        weights = stacked([initial(architecture, seed) for seed in range(s.seeds)])
        largest, least = differences(architecture, weights, tokens, orders)
        cells = [(*case.values(), seed) for seed in range(s.seeds)]
        yield from each(cells, difference=largest, least_difference=least)
        work.advance("exact test", float(n + 1), float(len(cases)))


def _trained(s: Settings, tokens: Tensor, orders: Tensor, work: Work) -> Cells:
    """Train the demonstration and test it, kind by kind."""
    kinds, runs, ends = s.kinds(), s.runs(), recorded_steps(s.steps)
    if not runs:
        return
    names = sorted({name for run in runs for name in initial(run.architecture, 0)})
    trained = work.train("petroglyph", runs, s.steps, record=ends, recorded=names)
    drawn = WhichFirst(s.vocabulary, s.context, s.tests).draw(None, torch.Generator().manual_seed(TEST_SEED), 1)
    inputs = torch.cat([drawn.inputs[0], mirrored(drawn.inputs[0])])
    answers = torch.cat([drawn.hidden[0], 1 - drawn.hidden[0]])
    for n, kind in enumerate(kinds):
        members: list[Trained] = trained[n * s.seeds : (n + 1) * s.seeds]
        architecture = members[0].run.architecture
        accuracy, loss = (torch.empty(s.seeds, len(ends), dtype=torch.float64) for _ in range(2))
        for at, step in enumerate(ends):
            out = exact_outputs(architecture, stacked([model.recorded[step] for model in members]), inputs)
            accuracy[:, at] = (out.argmax(-1) == answers).double().mean(1)
            losses = functional.cross_entropy(out.flatten(0, 1), answers.repeat(s.seeds), reduction="none")
            loss[:, at] = losses.view(s.seeds, -1).mean(1)
        # No other weight depends on the length; the last position stays the last one.
        weights = stacked([model.weights for model in members])
        if "positions" in weights:
            weights["positions"] = weights["positions"][:, -s.length :]
        exact, _ = differences(replace(architecture, length=s.length), weights, tokens, orders)
        cells = [(*kind, seed) for seed in range(s.seeds)]
        yield from each(cells, trained_difference=exact, accuracy=accuracy, loss=loss)
        work.advance("trained models", float(n + 1), float(len(kinds)))


def prefix_orders(length: int) -> Int[Tensor, "permutation position"]:
    """All orders of the positions before the last one, the identity first."""
    return torch.tensor([[*order, length - 1] for order in permutations(range(length - 1))])


def distinct_tokens(vocabulary: int, length: int, n: int) -> Int[Tensor, "sequence position"]:
    """Sequences without repeats, so that every permutation of a prefix changes it."""
    generator = torch.Generator().manual_seed(TEST_SEED)
    return torch.stack([torch.randperm(vocabulary, generator=generator)[:length] for _ in range(n)])


def exact_outputs(
    architecture: Architecture, weights: Weights, inputs: Int[Tensor, "sequence position"]
) -> Float[Tensor, "model sequence outputs"]:
    """The outputs at the last position, in float64."""
    s = Switches.of([architecture])
    cos, sin, added = (None if x is None else x.double() for x in (s.cos, s.sin, s.added))
    exact = Switches(bias=s.bias.double(), cos=cos, sin=sin, added=added, keep=s.keep.double())
    doubles = {name: x.double() for name, x in weights.items()}
    models = len(next(iter(doubles.values())))
    with torch.no_grad():
        return forward(architecture, doubles, exact, inputs[None].expand(models, *inputs.shape))


def differences(
    architecture: Architecture,
    weights: Weights,
    tokens: Int[Tensor, "sequence position"],
    orders: Int[Tensor, "permutation position"],
) -> tuple[np.ndarray, np.ndarray]:
    """(largest, least) change of each model's output under the orders after the first one, in eps of its largest output.

    A permutation's change is its largest over outputs; the largest and the least are over permutations and sequences.
    """
    permuted = tokens[:, orders]  # [sequence, permutation, position]
    out = exact_outputs(architecture, weights, permuted.flatten(0, 1))
    out = out.unflatten(1, permuted.shape[:2])  # [model, sequence, permutation, outputs]
    changes = (out[:, :, 1:] - out[:, :, :1]).abs().amax(-1).flatten(1)
    scale = out.abs().flatten(1).amax(1) * EPS
    return (changes.amax(1) / scale).numpy(), (changes.amin(1) / scale).numpy()


def recorded_steps(steps: int) -> list[int]:
    """Steps at which models are tested: 0, and evenly spread over the logarithm up to the last."""
    return sorted({0, *np.geomspace(1, steps, POINTS - 1).round().astype(int).tolist()})
