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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from probes.charts import BLUE, DOTTED, FAINT, GREEN, GREY, INK, ORANGE, VERMILLION, Series, curves, dots, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import range_told
from probes.results.tables import Table, number

from ..checks import refuse
from ..model import Architecture, Switches, Weights, forward, initial
from ..tasks import WhichFirst, mirrored
from ..train import Run, Trained, stacked
from .experiment import Work
from .rules import Judged, decided, each_above, judged, known, need, over_told, ranged, variable
from .sweep import Cells, Measure, Part, axes, each, each_at_least, each_distinct, sweep

EPS = float(np.finfo(np.float64).eps)
EPS_OF = "float64 eps of the largest output"
TEST_SEED = 2**32  # of test sequences; runs have smaller ones
LONGEST = 8  # of the exact test, tokens: 7! = 5,040 permutations of each prefix
POINTS = 25  # steps at which training models are tested, at most
TRAINED_POSITIONAL = ("none", "learned")
KIND: tuple[str, ...] = ("layers", "mask", "positional", "residual", "feed_forward", "norm")
DIMS = (*KIND, "seed")
TRAINED_DIMS = ("layers", "mask", "trained_positional", "seed")


def possible(mask: str, positional: str) -> bool:
    """Decay is a loss per token into the past, which a full mask does not have."""
    return not (mask == "full" and positional == "decay")


@dataclass(frozen=True)
class Settings:
    """Exact test and training; neither source gives a setting for this figure."""

    layers: tuple[int, ...] = (1, 2)
    mask: tuple[str, ...] = ("causal", "full")
    positional: tuple[str, ...] = ("none", "learned", "sinusoidal", "rope", "decay")
    residual: tuple[bool, ...] = (False, True)
    feed_forward: tuple[bool, ...] = (False, True)
    norm: tuple[str, ...] = ("none", "rms", "layer")
    seeds: int = 5
    width: int = 8
    heads: int = 1
    decay: float = 0.5
    vocabulary: int = 10
    length: int = 6  # of the exact test, all of whose permutations are tried
    sequences: int = 4
    context: int = 10  # of the task
    steps: int = 1000
    learning_rate: float = 3e-3
    batch: int = 128
    tests: int = 4096  # and as many mirror images

    def __post_init__(self) -> None:
        each_distinct(self, *KIND)
        each_at_least(self, 1, "seeds", "sequences", "steps", "tests")
        length, others = self.length, [mask for mask in self.mask if mask not in ("causal", "full")]
        refuse(
            {
                f"length={length} is out of range; give from 3 to {LONGEST}, for all permutations": (
                    not 3 <= length <= LONGEST
                ),
                f"length={length} different tokens need as many ids; give vocabulary={length}": length
                > self.vocabulary,
                f"context={self.context} is shorter than the exact test's length={length}; give {length} or more": (
                    self.context < length
                ),
                f"mask '{', '.join(others)}' is not compared here; give causal, full or both": others,
            }
        )
        self.runs()  # architectures, rates and tasks refuse what cannot be
        for case in self.cases():
            self.architecture(**case)

    def cases(self) -> list[dict[str, Any]]:
        """The kinds of models of the exact test, in the order of `difference`'s dimensions."""
        kinds = (dict(zip(KIND, case, strict=True)) for case in product(*(getattr(self, name) for name in KIND)))
        return [kind for kind in kinds if possible(kind["mask"], kind["positional"])]

    def architecture(self, **kind: Any) -> Architecture:
        """A model of a kind, with a residual stream unless it says otherwise."""
        sizes: dict[str, Any] = {"heads": self.heads, "width": self.width, "length": self.length}
        sizes |= {"vocabulary": self.vocabulary, "outputs": self.vocabulary}
        decay = self.decay if kind["positional"] == "decay" else None
        return Architecture(blocks=kind.pop("layers"), decay=decay, **(sizes | kind))

    def trained(self) -> list[tuple[int, str, str]]:
        """(layers, mask, positional) of the models that are trained."""
        return [kind for kind in product(self.layers, self.mask, self.positional) if kind[2] in TRAINED_POSITIONAL]

    def runs(self) -> list[Run]:
        """The training of every kind, its seeds side by side."""
        task = WhichFirst(self.vocabulary, self.context, self.batch)
        shapes = [
            self.architecture(layers=layers, mask=mask, positional=positional, length=self.context, outputs=2)
            for layers, mask, positional in self.trained()
        ]
        return [
            Run(shape, task, seed, learning_rate=self.learning_rate) for shape in shapes for seed in range(self.seeds)
        ]


QUICK = Settings(seeds=2, steps=300, tests=1024)


# -- measurement


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
    encodings = [name for name in s.positional if name in TRAINED_POSITIONAL]
    return sweep(
        axes(s, *DIMS) | {"trained_positional": encodings, "step": recorded_steps(s.steps)},
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
    kinds, runs, ends = s.trained(), s.runs(), recorded_steps(s.steps)
    if not runs:
        return
    names = sorted({name for run in runs for name in initial(run.architecture, 0)})
    models = work.train("petroglyph", runs, s.steps, record=ends, recorded=names)
    drawn = WhichFirst(s.vocabulary, s.context, s.tests).draw(None, torch.Generator().manual_seed(TEST_SEED), 1)
    inputs = torch.cat([drawn.inputs[0], mirrored(drawn.inputs[0])])
    answers = torch.cat([drawn.hidden[0], 1 - drawn.hidden[0]])
    for n, kind in enumerate(kinds):
        members: list[Trained] = models[n * s.seeds : (n + 1) * s.seeds]
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
    exact = Switches(*(None if x is None else x.double() for x in vars(s).values()))  # type: ignore[arg-type]
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


# -- what a result says

# The same numbers summed in another order differ by about eps of the terms' size, some ten times per layer.
ROUNDING = 1e3  # eps; what is above it is no rounding
CLEAR = 1e9  # eps; what is above it, 2e-7 of the output, is seen in float32, too
TIES = 0.01  # accuracy; a blind model's two answers may part where its two logits tie within rounding
SOLVED = 0.95  # accuracy
Kind = tuple[int, str, str]  # layers, mask, positional
ONE: Kind = (1, "causal", "none")  # blind to the order of a prefix
TWO: Kind = (2, "causal", "none")  # not blind
FULL: Kind = (2, "full", "none")  # blind
ENCODED: list[Kind] = [(1, "causal", name) for name in ("learned", "sinusoidal", "rope", "decay")]


def fresh(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> np.ndarray:
    """A change of one kind of fresh models, `[variant, seed]`."""
    need(possible(mask, positional))
    values = variable(ds, name, layers=layers, mask=mask, positional=positional)
    return values.transpose("residual", "feed_forward", "norm", "seed").values.reshape(-1, ds.sizes["seed"])


def trained(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> xr.DataArray:
    """A variable of one kind of trained models, `[seed, ...]`."""
    return variable(ds, name, layers=layers, mask=mask, trained_positional=positional)


def kinds(ds: xr.Dataset) -> list[Kind]:
    """(layers, mask, positional) of the fresh models."""
    cases = product(*(ds[dim].values.tolist() for dim in ("layers", "mask", "positional")))
    return [(layers, mask, positional) for layers, mask, positional in cases if possible(mask, positional)]


def tables(ds: xr.Dataset) -> list[Table]:
    """Changes under permuted prefixes, in eps; accuracy of what was trained."""
    rows, learned = [], []
    for kind in kinds(ds):
        names = list(map(str, kind))
        largest, least = fresh(ds, "difference", *kind), fresh(ds, "least_difference", *kind)
        after = known(trained, ds, "trained_difference", *kind)
        changed = "-" if after is None else _range(after.values)
        rows.append([*names, str(len(largest)), _range(largest), number(least.min(), ".2g"), changed])
        if after is not None:
            accuracy, loss = trained(ds, "accuracy", *kind), trained(ds, "loss", *kind)
            steps = accuracy["step"].values[(accuracy > SOLVED).all("seed").values]
            last = [range_told(values.isel(step=-1), ".3f") for values in (accuracy, loss)]
            learned.append([*names, *last, str(steps[0]) if steps.size else "-"])
    head, many = ("layers", "mask", "positional"), ds.attrs["permutations"]
    columns = ("variants", "largest, over variants and seeds", "of the permutation of least change", "trained")
    title = f"Change of the last output under all {many} permutations of a prefix, in eps of float64"
    found = [Table(title, (*head, *columns), rows)]
    if learned:
        columns = (*head, "accuracy, median (range)", "loss (nats)", f"all seeds above {SOLVED:g} from step")
        found.append(Table(f"Which token stands first; blind to order: 0.5 and {math.log(2):.3f}", columns, learned))
    return found


def _range(values: np.ndarray) -> str:
    low, high = (f"{x:.2g}" for x in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


# The kinds whose training is drawn; the blind ones lie on one another, and both are seen.
DRAWN: dict[Kind, tuple[str, Any]] = {
    TWO: (BLUE, "-"),
    (1, "causal", "learned"): (GREEN, "-"),
    ONE: (VERMILLION, "-"),
    FULL: (ORANGE, DOTTED),
}
FLOOR = 0.1  # eps; smaller changes, and none, are drawn there
CAPTION = "Left: what lies in the shade is rounding. Right: medians of {} seeds and their range, on mirrored pairs."


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Change of the last output under permuted prefixes by kind of model; accuracy while the demonstration trains."""
    shown = [kind for kind in kinds(ds) if kind[2] == "none" or kind[:2] == (1, "causal")] or kinds(ds)
    figure, ((exact, course),) = sheet(1, 2, height=3.4, caption=CAPTION.format(ds.sizes["seed"]))
    changes = [fresh(ds, "difference", *kind).ravel() for kind in shown]
    after = [known(trained, ds, "trained_difference", *kind) for kind in shown]
    ends = np.array([np.nan if of is None else max(float(of.max()), FLOOR) for of in after])
    of_fresh = ranged("fresh", np.maximum(changes, FLOOR).T, GREY)
    dots(
        exact,
        [_name(kind) for kind in shown],
        [of_fresh, Series("trained", ends, INK, marker="D", filled=False)],
        zero=False,
    )
    exact.axvspan(FLOOR / 2, ROUNDING, color=FAINT, zorder=0, linewidth=0)
    exact.set(xscale="log", xlabel="change of the last output (eps)", xticks=[1, 1e4, 1e8, 1e12, 1e16])
    for kind, (color, line) in DRAWN.items():
        if (accuracy := known(trained, ds, "accuracy", *kind)) is not None:
            runs = accuracy.transpose("seed", "step")
            curves(course, [ranged(_name(kind), runs, color, x=ds["step"].values, line=line)])
    course.set_xscale("symlog", linthresh=1)
    course.minorticks_off()
    course.set(xlabel="training step", ylabel="accuracy", ylim=(0.45, 1.02))
    return {"": figure}


def _name(kind: Kind) -> str:
    layers, mask, positional = kind
    return f"{layers} layer{'s' * (layers > 1)}, {mask}, {'no encoding' if positional == 'none' else positional}"


# -- statements: the claim in its two halves, fresh and trained, and what controls it

petroglyph: Any = Source("[Liu-7], [Irie]", "petroglyph")
control = replace(petroglyph, name="[Liu-7], [Irie], our control", kind="ours")
CHANGE = "change of the last output by any permutation of the tokens before it is"
BLIND = f"the largest {CHANGE} below {ROUNDING:g} eps in every model"
SEES = f"the least {CHANGE} above {CLEAR:g} eps in every model"
GUESSES = f"accuracy is within {TIES:g} of 1/2 in every seed at every step"
LEARNS = f"the 95 % interval over runs of the accuracy at the end of training lies above {SOLVED:g}"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged."""
    return judged(petroglyph, ds)


ONE_BLIND = "One layer without positional encoding cannot tell permuted prefixes apart."
TWO_SEE = "Two causal layers without positional encoding can tell permuted prefixes apart."
IT_TAKES_THE_MASK = (
    "It takes the causal mask to tell permuted prefixes apart without positional encoding: two layers under a full mask "
    "cannot."
)
IT_IS_THE_ENCODING = (
    "It is the missing encoding that keeps one causal layer from telling permuted prefixes apart: with one it can."
)


@petroglyph("one-layer-blind", "", ONE_BLIND, rule=BLIND, of=ONE)
@control("full-mask-blind", "", IT_TAKES_THE_MASK, rule=BLIND, of=FULL)
def fresh_blind(ds: xr.Dataset, of: Kind) -> Judged:
    """All variants and seeds: the largest change is rounding."""
    largest = fresh(ds, "difference", *of)
    many = f"{largest.size} models, {ds.attrs['permutations']} permutations"
    return Judged(f"largest change of {many}: {largest.max():.2g} eps", bool(largest.max() < ROUNDING))


@petroglyph("two-layers-see", "", TWO_SEE, rule=SEES, of=[TWO])
@control("encoding-sees", "", IT_IS_THE_ENCODING, rule=SEES, of=ENCODED)
def fresh_see(ds: xr.Dataset, of: Sequence[Kind]) -> Judged:
    """All variants and seeds: every permutation is told apart, up to chance ties, even the one of least change."""
    of = [kind for kind in of if kind in kinds(ds)]
    need(of)
    least = np.concatenate([fresh(ds, "least_difference", *kind).ravel() for kind in of])
    many = f"{least.size} models, {ds.attrs['permutations']} permutations"
    return Judged(f"least change of {many}: {least.min():.2g} eps", bool(least.min() > CLEAR))


@petroglyph(
    "trained",
    "",
    "Trained models without positional encoding are as fresh ones: one layer cannot tell permuted prefixes apart, two "
    "causal layers can, two under a full mask cannot.",
    rule=f"the largest change of the output by any permutation is below {ROUNDING:g} eps with one layer and with two under "
    f"a full mask, and above {CLEAR:g} eps with two causal layers, in every model",
)
def trained_alike(ds: xr.Dataset) -> Judged:
    """One layer, two, and two under a full mask, after training."""
    one, two, full = (trained(ds, "trained_difference", *kind).values for kind in (ONE, TWO, FULL))
    alike = one.max() < ROUNDING and two.min() > CLEAR and full.max() < ROUNDING
    return Judged("; ".join(f"{_range(x)} eps" for x in (one, two, full)), bool(alike))


ONE_GUESSES = "One causal layer without positional encoding cannot learn which of two tokens stands first."
FULL_GUESSES = "Two layers under a full mask without positional encoding do not learn which of two tokens stands first."
TWO_LEARN = "Two causal layers without positional encoding learn which of two tokens stands first."
POSITIONS_LEARN = "One causal layer with learned positions learns which of two tokens stands first."


@petroglyph("one-layer-cannot-learn", "", ONE_GUESSES, rule=GUESSES, of=ONE)
@control("full-mask-cannot-learn", "", FULL_GUESSES, rule=GUESSES, of=FULL)
def guess(ds: xr.Dataset, of: Kind) -> Judged:
    """Half of the answers are right, all the time."""
    accuracy = trained(ds, "accuracy", *of)
    off = float(abs(accuracy - 0.5).max())
    seeds, steps = accuracy.sizes["seed"], accuracy.sizes["step"]
    return Judged(f"accuracy within {off:.2g} of 1/2 in {seeds} seeds at all {steps} steps", off < TIES)


@petroglyph("two-layers-learn", "", TWO_LEARN, rule=LEARNS, of=TWO)
@control("encoding-learns", "", POSITIONS_LEARN, rule=LEARNS, of=(1, "causal", "learned"))
def learn(ds: xr.Dataset, of: Kind) -> Judged:
    """Nearly all answers are right in the end."""
    last = trained(ds, "accuracy", *of).isel(step=-1)
    return decided(f"accuracy {over_told(last, '.3f')} after {int(last['step'])} steps", each_above(last, SOLVED))
