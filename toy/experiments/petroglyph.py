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
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from probes.claims.claim import Claim, Kind, Statement
from probes.claims.rules import SURE, range_told
from probes.errors import InputError
from probes.results.dataset import dataset
from probes.results.tables import Table, number

from ..model import Architecture, Mask, NormSwitch, PositionalSwitch, Switches, Weights, forward, initial
from ..tasks import WhichFirst, mirrored
from ..train import Run, Trained, stacked
from .experiment import Work
from .rules import each_above, over_told

EPS = float(np.finfo(np.float64).eps)
TEST_SEED = 2**32  # of test sequences; runs have smaller ones
LONGEST = 8  # of the exact test, tokens: 7! = 5,040 permutations of each prefix
POINTS = 25  # steps at which training models are tested, at most
POSITIONAL = ("none", "learned", "sinusoidal", "rope", "decay")
TRAINED_POSITIONAL = ("none", "learned")

BOTH = "[Liu-7], [Irie]"
CONTROL = f"{BOTH}, our control"
# The same numbers summed in another order differ by about eps of the terms' size, some ten times per layer.
ROUNDING = 1e3  # eps; what is above it is no rounding
CLEAR = 1e9  # eps; what is above it, 2e-7 of the output, is seen in float32, too
TIES = 0.01  # accuracy; a blind model's two answers may part where its two logits tie within rounding
SOLVED = 0.95  # accuracy


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
        for name in ("layers", "mask", "positional", "residual", "feed_forward", "norm"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise InputError(f"{name}={','.join(map(str, values)) or 'nothing'}; give one or more different values")
        for name in ("seeds", "sequences", "steps", "tests"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is too few; give at least 1")
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
        names = ("layers", "mask", "positional", "residual", "feed_forward", "norm")
        return [
            dict(zip(names, case, strict=True))
            for case in product(*(getattr(self, name) for name in names))
            if possible(str(case[1]), str(case[2]))
        ]

    def architecture(
        self,
        *,
        layers: int,
        mask: str,
        positional: str,
        residual: bool = True,
        feed_forward: bool = False,
        norm: str = "none",
        length: int | None = None,
        outputs: int | None = None,
    ) -> Architecture:
        return Architecture(
            blocks=layers,
            heads=self.heads,
            width=self.width,
            length=length or self.length,
            vocabulary=self.vocabulary,
            outputs=outputs or self.vocabulary,
            mask=cast(Mask, mask),
            positional=cast(PositionalSwitch, positional),
            decay=self.decay if positional == "decay" else None,
            residual=residual,
            feed_forward=feed_forward,
            norm=cast(NormSwitch, norm),
        )

    def kinds(self) -> list[tuple[int, str, str]]:
        """(layers, mask, positional) of the models that are trained."""
        trained = [p for p in self.positional if p in TRAINED_POSITIONAL]
        return list(product(self.layers, self.mask, trained))

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
    dims = ("layers", "mask", "positional", "residual", "feed_forward", "norm")
    shape = [len(getattr(s, dim)) for dim in dims]
    largest, least = np.full((*shape, s.seeds), np.nan), np.full((*shape, s.seeds), np.nan)
    orders = prefix_orders(s.length)
    tokens = distinct_tokens(s.vocabulary, s.length, s.sequences)
    cases = s.cases()
    for n, case in enumerate(cases):
        architecture = s.architecture(**case)
        weights = stacked([initial(architecture, seed) for seed in range(s.seeds)])
        place = tuple(getattr(s, dim).index(case[dim]) for dim in dims)
        largest[place], least[place] = differences(architecture, weights, tokens, orders)
        work.advance("exact test", float(n + 1), float(len(cases)))
    runs, ends = s.runs(), recorded_steps(s.steps)
    kinds, found = s.kinds(), {}
    if runs:
        names = sorted({name for run in runs for name in initial(run.architecture, 0)})
        trained = work.train("petroglyph", runs, s.steps, record=ends, recorded=names)
        found = _trained(s, kinds, trained, ends, tokens, orders, work)
    trained_positional = [p for p in s.positional if p in TRAINED_POSITIONAL]
    units: Any = {"units": "float64 eps of the largest output"}
    return dataset(
        {
            "difference": ((*dims, "seed"), largest, {"long_name": "largest change under permuted prefixes", **units}),
            "least_difference": (
                (*dims, "seed"),
                least,
                {"long_name": "change under the permutation of least", **units},
            ),
            **found,
        },
        coords={
            "layers": list(s.layers),
            "mask": list(s.mask),
            "positional": list(s.positional),
            "residual": np.array(s.residual, dtype=np.int8),
            "feed_forward": np.array(s.feed_forward, dtype=np.int8),
            "norm": list(s.norm),
            "seed": np.arange(s.seeds),
        }
        | ({"trained_positional": trained_positional, "step": ends} if found else {}),
        attrs={
            "exact_dtype": "float64",
            "permutations": len(orders) - 1,
            "task": "which of two marked tokens stands first; tested on sequences and their mirror images",
        },
    )


def _trained(
    s: Settings,
    kinds: Sequence[tuple[int, str, str]],
    trained: Sequence[Trained],
    ends: Sequence[int],
    tokens: Tensor,
    orders: Tensor,
    work: Work,
) -> dict[str, tuple[Any, ...]]:
    """What `measure` gives of trained models."""
    drawn = WhichFirst(s.vocabulary, s.context, s.tests).draw(None, torch.Generator().manual_seed(TEST_SEED), 1)
    inputs = torch.cat([drawn.inputs[0], mirrored(drawn.inputs[0])])
    answers = torch.cat([drawn.hidden[0], 1 - drawn.hidden[0]])
    accuracy, loss = (torch.empty(len(trained), len(ends), dtype=torch.float64) for _ in range(2))
    exact = np.empty(len(trained))
    for n in range(len(kinds)):
        members = range(n * s.seeds, (n + 1) * s.seeds)
        architecture = trained[members[0]].run.architecture
        for at, step in enumerate(ends):
            weights = stacked([trained[i].recorded[step] for i in members])
            out = exact_outputs(architecture, weights, inputs)
            accuracy[list(members), at] = (out.argmax(-1) == answers).double().mean(1)
            each = functional.cross_entropy(out.flatten(0, 1), answers.repeat(s.seeds), reduction="none")
            loss[list(members), at] = each.view(s.seeds, -1).mean(1)
        # No other weight depends on the length; the last position stays the last one.
        weights = stacked([trained[i].weights for i in members])
        if "positions" in weights:
            weights["positions"] = weights["positions"][:, -s.length :]
        shorter = replace(architecture, length=s.length)
        exact[list(members)] = differences(shorter, weights, tokens, orders)[0]
        work.advance("trained models", float(n + 1), float(len(kinds)))
    sizes = [len(s.layers), len(s.mask), len({p for _, _, p in kinds}), s.seeds]
    dims = ("layers", "mask", "trained_positional", "seed")
    return {
        "trained_difference": (
            dims,
            exact.reshape(sizes),
            {
                "long_name": "largest change under permuted prefixes, trained",
                "units": "float64 eps of the largest output",
            },
        ),
        "accuracy": (
            (*dims, "step"),
            accuracy.view(*sizes, -1),
            {"long_name": "accuracy on mirrored pairs", "units": "1"},
        ),
        "loss": ((*dims, "step"), loss.view(*sizes, -1), {"long_name": "loss on mirrored pairs", "units": "nat"}),
    }


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


# ------------------------------------------------------------------------------------------------ what results say


def fresh(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> np.ndarray | None:
    """A change of one kind of fresh models, `[variant, seed]`; None where the result has none."""
    wanted = {"layers": layers, "mask": mask, "positional": positional}
    if any(value not in ds[dim].values for dim, value in wanted.items()) or not possible(mask, positional):
        return None
    found = ds[name].sel(wanted).transpose("residual", "feed_forward", "norm", "seed").values
    return found.reshape(-1, found.shape[-1])


def trained(ds: xr.Dataset, name: str, layers: int, mask: str, positional: str) -> xr.DataArray | None:
    """A variable of one kind of trained models, `[seed, ...]`; None where the result has none."""
    wanted = {"layers": layers, "mask": mask, "trained_positional": positional}
    if name not in ds or any(value not in ds[dim].values for dim, value in wanted.items()):
        return None
    return ds[name].sel(wanted)


def kinds(ds: xr.Dataset) -> list[tuple[int, str, str]]:
    """(layers, mask, positional) of the fresh models."""
    found = product(ds["layers"].values, ds["mask"].values, ds["positional"].values)
    return [(int(n), str(mask), str(p)) for n, mask, p in found if possible(str(mask), str(p))]


def tables(ds: xr.Dataset) -> list[Table]:
    """Changes under permuted prefixes, in eps; accuracy of what was trained."""
    rows, learned = [], []
    for kind in kinds(ds):
        largest, least, after = fresh(ds, "difference", *kind), fresh(ds, "least_difference", *kind), None
        after = trained(ds, "trained_difference", *kind)
        assert largest is not None
        assert least is not None
        said = "-" if after is None else _range(after.values)
        rows.append([str(kind[0]), *kind[1:], str(len(largest)), _range(largest), number(least.min(), ".2g"), said])
        accuracy, loss = trained(ds, "accuracy", *kind), trained(ds, "loss", *kind)
        if accuracy is None or loss is None:
            continue
        last, final = accuracy.isel(step=-1), loss.isel(step=-1)
        cells = [range_told(x, ".3f") for x in (last, final)]
        solved = (accuracy > SOLVED).all("seed").values
        first = str(int(accuracy["step"][int(solved.argmax())])) if solved.any() else "-"
        learned.append([str(kind[0]), *kind[1:], *cells, first])
    head = ("layers", "mask", "positional")
    found = [
        Table(
            f"Change of the last output under all {ds.attrs['permutations']} permutations of a prefix, in eps of float64",
            (*head, "variants", "largest, over variants and seeds", "of the permutation of least change", "trained"),
            rows,
        )
    ]
    if learned:
        columns = (*head, "accuracy, median (range)", "loss (nats)", f"all seeds above {SOLVED:g} from step")
        found.append(Table(f"Which token stands first; blind to order: 0.5 and {math.log(2):.3f}", columns, learned))
    return found


def claims(ds: xr.Dataset) -> list[Claim]:
    """The claim in its two halves, fresh and trained, and what controls it."""
    encodings = [str(p) for p in ds["positional"].values if p != "none"]
    one, two, full = (1, "causal", "none"), (2, "causal", "none"), (2, "full", "none")
    found = [
        _fresh_claim(
            ds,
            "one-layer-blind",
            BOTH,
            "One layer without positional encoding cannot tell permuted prefixes apart.",
            [one],
            blind=True,
        ),
        _fresh_claim(
            ds,
            "two-layers-see",
            BOTH,
            "Two causal layers without positional encoding can tell permuted prefixes apart.",
            [two],
            blind=False,
        ),
        _fresh_claim(
            ds,
            "full-mask-blind",
            CONTROL,
            "It takes the causal mask to tell permuted prefixes apart without positional encoding: two layers under a "
            "full mask cannot.",
            [full],
            blind=True,
        ),
        _fresh_claim(
            ds,
            "encoding-sees",
            CONTROL,
            "It is the missing encoding that keeps one causal layer from telling permuted prefixes apart: with one "
            f"({', '.join(encodings) or 'any'}) it can.",
            [(1, "causal", p) for p in encodings],
            blind=False,
        ),
        _variants(ds, [(one, True), (two, False), (full, True)]),
    ]
    said = Statement(
        "petroglyph-trained",
        BOTH,
        "Trained models without positional encoding are as fresh ones: one layer cannot tell permuted prefixes apart, "
        "two causal layers can, two under a full mask cannot.",
        f"the largest change of the output by any permutation is below {ROUNDING:g} eps with one layer and with two "
        f"under a full mask, and above {CLEAR:g} eps with two causal layers, in every model",
    )
    after = [trained(ds, "trained_difference", *kind) for kind in (one, two, full)]
    if any(x is None for x in after):
        found.append(said.judged())
    else:
        values = [x.values for x in after if x is not None]
        blind = values[0].max() < ROUNDING and values[2].max() < ROUNDING
        measured = "; ".join(f"{_range(x)} eps" for x in values)
        found.append(said.judged(measured, bool(blind and values[1].min() > CLEAR)))
    return [
        *found,
        _accuracy_claim(
            ds,
            "one-layer-cannot-learn",
            BOTH,
            "One causal layer without positional encoding cannot learn which of two tokens stands first.",
            one,
            blind=True,
        ),
        _accuracy_claim(
            ds,
            "two-layers-learn",
            BOTH,
            "Two causal layers without positional encoding learn which of two tokens stands first.",
            two,
            blind=False,
        ),
        _accuracy_claim(
            ds,
            "full-mask-cannot-learn",
            CONTROL,
            "Two layers under a full mask without positional encoding do not learn which of two tokens stands first.",
            full,
            blind=True,
        ),
        _accuracy_claim(
            ds,
            "encoding-learns",
            CONTROL,
            "One causal layer with learned positions learns which of two tokens stands first.",
            (1, "causal", "learned"),
            blind=False,
        ),
    ]


def _fresh_claim(
    ds: xr.Dataset, name: str, source: str, text: str, chosen: Sequence[tuple[int, str, str]], *, blind: bool
) -> Claim:
    """Fresh models of these kinds, all variants and seeds: the largest change is rounding, or even the least is none."""
    rule = (
        f"the largest change of the last output by any permutation of the tokens before it is below {ROUNDING:g} eps "
        "in every model"
        if blind
        else f"the least change of the last output by any permutation of the tokens before it is above {CLEAR:g} eps "
        "in every model"
    )
    said = Statement(f"petroglyph-{name}", source, text, rule, kind=_kind(source))
    found = [fresh(ds, "difference" if blind else "least_difference", *kind) for kind in chosen]
    values = [x.ravel() for x in found if x is not None]
    if not values or len(values) < len(chosen):
        return said.judged()
    every = np.concatenate(values)
    if blind:
        measured = (
            f"largest change of {every.size} models, {ds.attrs['permutations']} permutations: {every.max():.2g} eps"
        )
        return said.judged(measured, bool(every.max() < ROUNDING))
    # Every permutation is to be told apart, up to chance ties: the one of least change.
    measured = f"least change of {every.size} models, {ds.attrs['permutations']} permutations: {every.min():.2g} eps"
    return said.judged(measured, bool(every.min() > CLEAR))


def _variants(ds: xr.Dataset, expected: Sequence[tuple[tuple[int, str, str], bool]]) -> Claim:
    """Residual stream, feed-forward and norms: each variant's verdicts, one by one."""
    agree, of = 0, 0
    said = Statement(
        "petroglyph-variants",
        CONTROL,
        "Residual stream, feed-forward and norm leave as it is who tells permuted prefixes apart without positional "
        "encoding: one layer cannot, two causal layers can, two under a full mask cannot.",
        "every variant gives these three verdicts in all seeds",
        kind="ours",
    )
    for kind, blind in expected:
        largest, least = fresh(ds, "difference", *kind), fresh(ds, "least_difference", *kind)
        if largest is None or least is None:
            return said.judged()
        as_expected = largest.max(1) < ROUNDING if blind else least.min(1) > CLEAR
        agree, of = agree + int(as_expected.sum()), of + as_expected.size
    many = of > len(expected)
    return said.judged(f"{agree} of {of} verdicts are the same in all seeds", agree == of if many else None)


def _accuracy_claim(
    ds: xr.Dataset, name: str, source: str, text: str, kind: tuple[int, str, str], *, blind: bool
) -> Claim:
    rule = (
        f"accuracy is within {TIES:g} of 1/2 in every seed at every step"
        if blind
        else f"the 95 % interval over runs of the accuracy at the end of training lies above {SOLVED:g}"
    )
    said = Statement(f"petroglyph-{name}", source, text, rule, kind=_kind(source))
    accuracy = trained(ds, "accuracy", *kind)
    if accuracy is None:
        return said.judged()
    if blind:
        off = float(abs(accuracy - 0.5).max())
        measured = (
            f"accuracy within {off:.2g} of 1/2 in {accuracy.sizes['seed']} seeds at all {accuracy.sizes['step']} steps"
        )
        return said.judged(measured, off < TIES)
    last = accuracy.isel(step=-1)
    measured = f"accuracy {over_told(last, '.3f')} after {int(last['step'])} steps"
    return said.judged(measured, each_above(last, SOLVED)(SURE))


def _kind(source: str) -> Kind:
    return "ours" if source == CONTROL else "published"


def _range(values: np.ndarray) -> str:
    low, high = (f"{x:.2g}" for x in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"
