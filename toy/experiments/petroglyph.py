"""Order without positional encoding: one causal layer cannot tell permuted prefixes apart, two layers can.

The claim is discussed in [Liu-7] and in [Irie] ("Why Are Positional Encodings Nonessential for Deep Autoregressive
Transformers? A Petroglyph Revisited", ACL Findings 2025). The two tests, exact and trained, stand in `docs/probes/match.md`.
"""

from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from probes.charts import BLUE, DOTTED, FAINT, GREEN, GREY, ORANGE, VERMILLION, curves, dots, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import Told
from probes.errors import InputError, plural
from probes.measure import Headline

from .. import checks
from ..model import Architecture, Switches, Weights, forward, initial
from ..tasks import WhichFirst, mirrored
from ..train import Run, Trained, stacked
from .experiment import Work
from .reading import judge, known, lies, over, ranged, state, under
from .sweep import Cells, Measure, Part, axes, filled, sweep

EPS = float(np.finfo(np.float64).eps)
EPS_OF = "float64 eps of the largest output"
TEST_SEED = 2**32  # of test sequences; runs have smaller ones
LONGEST = 8  # of the exact test, tokens: 7! = 5,040 permutations of each prefix
DECAY = 0.5  # nats per token, of what decays
RATE = 3e-3
POINTS = 25  # steps at which training models are tested, at most
TRAINED_POSITIONAL = ("none", "learned")
KIND: tuple[str, ...] = ("layers", "mask", "positional", "residual", "feed_forward", "norm")
DIMS = (*KIND, "seed")
TRAINED_DIMS = ("layers", "mask", "trained_positional", "seed")


@dataclass(frozen=True)
class Settings(checks.Settings):
    """Exact test and training; neither source gives a setting for this figure."""

    CHOICES: ClassVar = {"mask": ("causal", "full")}
    layers: tuple[int, ...] = (1, 2)
    mask: tuple[str, ...] = ("causal", "full")
    positional: tuple[str, ...] = ("none", "learned", "sinusoidal", "rope", "decay")
    residual: tuple[bool, ...] = (False, True)
    feed_forward: tuple[bool, ...] = (False, True)
    norm: tuple[str, ...] = ("none", "rms", "layer")
    seeds: int = 5
    width: int = 8
    vocabulary: int = 10
    length: int = 6  # of the exact test, all of whose permutations are tried
    sequences: int = 4
    context: int = 10  # of the task
    steps: int = 1000
    batch: int = 128
    tests: int = 4096  # and as many mirror images

    def __post_init__(self) -> None:
        super().__post_init__()
        most = min(LONGEST, self.vocabulary, self.context)
        if not 3 <= self.length <= most:  # all permutations of different tokens are tried
            raise InputError(f"length={self.length} is out of range; give 3 to {most}")
        self.runs()  # architectures, rates and tasks refuse what cannot be
        for case in self.cases():
            self.architecture(**case)

    def cases(self) -> list[dict[str, Any]]:
        """The kinds of models of the exact test; a full mask has no decay, which is a loss per token into the past."""
        kinds = (dict(zip(KIND, case, strict=True)) for case in product(*(getattr(self, name) for name in KIND)))
        return [kind for kind in kinds if (kind["mask"], kind["positional"]) != ("full", "decay")]

    def architecture(self, **kind: Any) -> Architecture:
        """A model of a kind, with a residual stream unless it says otherwise."""
        sizes: dict[str, Any] = {"width": self.width, "length": self.length}
        sizes |= {"vocabulary": self.vocabulary, "outputs": self.vocabulary}
        decay = DECAY if kind["positional"] == "decay" else None
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
        return [Run(shape, task, seed, learning_rate=RATE) for shape in shapes for seed in range(self.seeds)]


QUICK = Settings(seeds=2, steps=300, tests=1024)


# -- measurement


def measure(s: Settings, work: Work) -> xr.Dataset:
    """The exact test on fresh and trained models, and the demonstration's accuracy while they train.

    Differences are over the largest output, in units of float64's eps, and largest over sequences; the permutation that
    changes least has to be told apart, too.
    """
    tokens, orders = distinct_tokens(s.vocabulary, s.length, s.sequences), prefix_orders(s.length)
    changes = {
        "difference": Measure("largest change under permuted prefixes", EPS_OF),
        "least_difference": Measure("change under the permutation of least", EPS_OF),
    }
    learned = {
        "trained_difference": Measure("largest change under permuted prefixes, trained", EPS_OF),
        "accuracy": Measure("accuracy on mirrored pairs", "1", ("step",)),
    }
    encodings = [name for name in s.positional if name in TRAINED_POSITIONAL]
    return sweep(
        axes(s, *DIMS) | {"trained_positional": encodings, "step": recorded_steps(s.steps)},
        Part(DIMS, changes, _fresh(s, tokens, orders, work)),
        Part(TRAINED_DIMS, learned, _trained(s, tokens, orders, work)),
    )


def _fresh(s: Settings, tokens: Tensor, orders: Tensor, work: Work) -> Cells:
    """The exact test of fresh models, kind by kind."""
    cases = s.cases()
    for n, case in enumerate(cases):
        architecture = s.architecture(**case)
        weights = stacked([initial(architecture, seed) for seed in range(s.seeds)])
        largest, least = differences(architecture, weights, tokens, orders)
        cells = [(*case.values(), seed) for seed in range(s.seeds)]
        yield from filled(cells, difference=largest, least_difference=least)
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
        picks = [exact_outputs(architecture, stacked([m.recorded[step] for m in members]), inputs) for step in ends]
        accuracy = torch.stack([(out.argmax(-1) == answers).double().mean(1) for out in picks], 1)
        # No other weight depends on the length; the last position stays the last one.
        weights = stacked([model.weights for model in members])
        if "positions" in weights:
            weights["positions"] = weights["positions"][:, -s.length :]
        exact, _ = differences(replace(architecture, length=s.length), weights, tokens, orders)
        cells = [(*kind, seed) for seed in range(s.seeds)]
        yield from filled(cells, trained_difference=exact, accuracy=accuracy)
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
    doubles = {name: x.double() for name, x in weights.items()}
    models = len(next(iter(doubles.values())))
    with torch.no_grad():
        return forward(architecture, doubles, Switches.of([architecture]), inputs[None].expand(models, *inputs.shape))


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
FLOOR = 0.1  # eps; smaller changes, and none, are drawn there
# layers, mask, positional
ONE, TWO, FULL = (1, "causal", "none"), (2, "causal", "none"), (2, "full", "none")
LEARNED = (1, "causal", "learned")
ENCODED = (1, "causal", ["learned", "sinusoidal", "rope", "decay"])


def fresh_of(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Changes of fresh models by kind, every variant and seed a model [layers, mask, positional, model]."""
    return ds[name].stack(model=("residual", "feed_forward", "norm", "seed")).drop_vars(["model", *DIMS[3:]])


CHANGE = "change of the last output, in eps, by any permutation of the tokens before it"
LARGEST = Headline(f"the largest {CHANGE}", lambda ds: fresh_of(ds, "difference").max("model"))
LEAST = Headline(f"the least {CHANGE}", lambda ds: fresh_of(ds, "least_difference").min("model"))
AFTER = Headline(f"the largest {CHANGE}, after training,", lambda ds: ds["trained_difference"])
END = Headline("accuracy at the end of training", lambda ds: ds["accuracy"].isel(step=-1, drop=True), form=".3f")
OFF = Headline(
    "the distance of accuracy from 1/2, in any seed at any step,",
    lambda ds: abs(ds["accuracy"] - 0.5).max(("seed", "step")),
)
HEADLINES = (LARGEST, LEAST, AFTER, END, OFF)


# The kinds whose training is drawn; the blind ones lie on one another, and both are seen.
DRAWN: dict[tuple[int, str, str], tuple[str, Any]] = {
    TWO: (BLUE, "-"),
    LEARNED: (GREEN, "-"),
    ONE: (VERMILLION, "-"),
    FULL: (ORANGE, DOTTED),
}
CAPTION = "Left: fresh models; shaded: rounding. Right: medians of {} seeds and their range, on mirrored pairs."


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Change of the last output under permuted prefixes by kind of fresh model; accuracy while the demonstration trains."""
    kinds = list(product(*(ds[dim].values.tolist() for dim in KIND[:3])))
    shown = [kind for kind in kinds if kind[2] == "none" or kind[:2] == (1, "causal")] or kinds
    figure, ((exact, course),) = sheet(1, 2, height=3.4, caption=CAPTION.format(ds.sizes["seed"]))
    fresh = [fresh_of(ds, "difference").sel(at(kind)).values for kind in shown]
    dots(exact, [_name(kind) for kind in shown], [ranged("", np.maximum(fresh, FLOOR).T, GREY)], zero=False)
    exact.axvspan(FLOOR / 2, ROUNDING, color=FAINT, zorder=0, linewidth=0)
    exact.set(xscale="log", xlabel="change of the last output (eps)", xticks=[1, 1e4, 1e8, 1e12, 1e16])
    for kind, (color, line) in DRAWN.items():
        if (accuracy := known(lambda of=kind: ds["accuracy"].sel(at(of, trained=True)))) is not None:
            runs = accuracy.transpose("seed", "step")
            curves(course, [ranged(_name(kind), runs, color, x=ds["step"].values, line=line)])
    course.set_xscale("symlog", linthresh=1)
    course.minorticks_off()
    course.set(xlabel="training step", ylabel="accuracy", ylim=(0.45, 1.02))
    return {"": figure}


def at(kind: tuple[int, str, Any], *, trained: bool = False) -> dict[str, Any]:
    """A kind's place in a result."""
    return dict(zip(TRAINED_DIMS if trained else KIND, kind, strict=False))


def _name(kind: tuple[int, str, str]) -> str:
    layers, mask, positional = kind
    return f"{plural(layers, 'layer')}, {mask}, {'no encoding' if positional == 'none' else positional}"


# -- statements: the claim in its two halves, fresh and trained, and what controls it; what symmetry alone says is a theorem

petroglyph = Source("[Liu-7], [Irie]", "petroglyph")
control = petroglyph.but(name="[Liu-7], [Irie], our control", kind="ours")
theorem = petroglyph.but(kind="theorem")
ALL = "in every model"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged."""
    return judge(petroglyph, ds)


_claim = "One layer without positional encoding cannot tell permuted prefixes apart."
state(theorem, "one-layer-blind", _claim, lies(LARGEST, under(ROUNDING), at(ONE), ALL))
_claim = (
    "It takes the causal mask to tell permuted prefixes apart without positional encoding: two layers under a full mask "
    "cannot."
)
state(theorem, "full-mask-blind", _claim, lies(LARGEST, under(ROUNDING), at(FULL), ALL))
_claim = "Two causal layers without positional encoding can tell permuted prefixes apart."
state(petroglyph, "two-layers-see", _claim, lies(LEAST, over(CLEAR), at(TWO), ALL))
_claim = "It is the missing encoding that keeps one causal layer from telling permuted prefixes apart: with one it can."
state(control, "encoding-sees", _claim, lies(LEAST, over(CLEAR), at(ENCODED), ALL))


@petroglyph(
    "trained",
    rule=f"{AFTER.name} lies below {ROUNDING:g} with one layer and with two under a full mask, and above {CLEAR:g} with two "
    f"causal layers, {ALL}",
)
def _(ds: xr.Dataset) -> Told:
    """Trained models without positional encoding are as fresh ones: one layer cannot tell permuted prefixes apart, two
    causal layers can, two under a full mask cannot.
    """
    one, two, full = (AFTER.of(ds).sel(at(kind, trained=True)) for kind in (ONE, TWO, FULL))
    alike = one.max() < ROUNDING and two.min() > CLEAR and full.max() < ROUNDING
    words = f"one layer {one.max():.2g} at most, full mask {full.max():.2g}; two layers {two.min():.2g} at least"
    return words, bool(alike)


for _source, _name_of, _kind, _words in (
    (theorem, "one-layer-cannot-learn", ONE, "One causal layer without positional encoding cannot learn"),
    (theorem, "full-mask-cannot-learn", FULL, "Two layers under a full mask without positional encoding do not learn"),
):
    _claim = f"{_words} which of two tokens stands first."
    state(_source, _name_of, _claim, lies(OFF, under(TIES), at(_kind, trained=True), "without sampling error"))
for _source, _name_of, _kind, _words in (
    (petroglyph, "two-layers-learn", TWO, "Two causal layers without positional encoding learn"),
    (control, "encoding-learns", LEARNED, "One causal layer with learned positions learns"),
):
    _solved = lies(END, over(SOLVED), at(_kind, trained=True))
    state(_source, _name_of, f"{_words} which of two tokens stands first.", _solved)
