"""A head that finds the token before the last: what it takes, and how the embeddings come to it [Liu-4].

Random tokens `[A][B][C][D]`, and `[C]` is asked for (`tasks.Copying`, target -2). The model of the post embeds tokens,
adds a learned vector per position, has one attention layer and unembeds; whether the attention layer adds to the stream
and whether it has an output projection the post does not say, and `variants` trains all four. Every relative perplexity is
`(perplexity - 1) / V` over fresh sequences: the mean loss in float64 from weights trained in float32, and `expm1` of it, so
that 1e-9 is as good a number as 1.

What readers without positions can reach, for the plateau without positional encoding:

- Without positions attention sees the query and a bag of tokens. A reader of the bag of the first C - 1 tokens (it may
  know which one is the query, and leave that out) says each with its share, `count / (C - 1)`; the answer is one of them,
  each as likely as the other. Its loss is `E[log((C - 1) / count)]`, count - 1 being Binomial(C - 2, 1/V): no reader
  without positions is better. Its perplexity is nearly C - 1, far from what the post sees (`blind_limit`).
- The published V (C - 2) / (C - 1) is a mean of perplexities: a reader that bets on one of the C - 1 tokens has perplexity
  near 0 (really 1) once in C - 1 times and V else. As a mean of losses the same bet is V^((C-2)/(C-1)), and its exact
  arithmetic mean is larger by 1 / (C - 1). It bounds nothing: the limit is far below, and what holds a model of width 2
  near 20 is that two numbers do not carry a bag of three tokens. Hence models without positions are trained at several
  widths. The same bet among all C tokens, the query among them, is V (C - 1) / C.

The separation direction s is the unit vector with the largest margin `min_j s . (p_j - p_t)` between the position asked
for and the others: the point nearest to the origin of the hull of all `p_j - p_t`, if the origin lies outside. p_t is on
its negative side. Logits are `x_query W_Q W_K^T x_key / sqrt(d)`; the query's own p is on the positive side, so that
`s W_Q W_K^T s < 0` gives p_t the largest logit. The post's -1.1 is this with its s = (1, 1), of length sqrt(2): its unit
vector gives half of it. Positions have no zero of their own, since one vector added to every p and taken off every token
embedding changes no number; signs along s are hence counted both as they are and with the mean token embedding added to p.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from scipy.optimize import nnls
from scipy.special import gammaln
from torch import Tensor

from probes.claims.claim import Claim, Statement
from probes.claims.rules import SURE, above, below, between, every, near, range_told, some
from probes.errors import InputError
from probes.results.dataset import dataset
from probes.results.statistics import between_runs, over_runs
from probes.results.tables import Table, number

from ..checks import at_least
from ..model import Architecture, PositionalSwitch, Switches, forward
from ..tasks import Copying
from ..train import Run, Schedule, Trained, seed_of, stacked
from .experiment import Work, each_above, over_each, over_told

SWITCH = ("off", "on")  # of residual stream and output projection
SPIKE_SMOOTH, SPIKE_RISE, FALLEN = 50, 1.0, 0.5  # steps, nats, share of a guesser's loss; see `spikes`
TINY = float(np.finfo(np.float64).tiny)
TEST_BLOCK = -1  # of data: no step of training draws it
CHUNK, TOGETHER = 4096, 8  # sequences and models evaluated at a time: float64 of 100 tokens stays below 30 MiB


@dataclass(frozen=True)
class Settings:
    """Sizes of everything that is trained; the first parts are [Liu-4]'s, offsets and seeds are ours."""

    vocabulary: int = 30
    context: int = 4
    width: int = 2
    steps: int = 3000
    seeds: int = 5
    batch: int = 128
    learning_rate: float = 0.01
    variants: bool = True  # curves and published cells with residual off/on, W_O off/on; else the one below alone
    residual: str = "off"  # of everything else
    projection: str = "on"
    cells: bool = True  # the published relative perplexities
    batches: tuple[int, ...] = (128, 512)  # of them: the post does not give its own
    large_seeds: int = 2  # of batches beyond `batch`, which are trained for context 4 and width 2 alone
    grid_vocabularies: tuple[int, ...] = (10, 30, 100)
    grid_contexts: tuple[int, ...] = (4, 10)
    grid_widths: tuple[int, ...] = (2, 10)
    rate_vocabularies: tuple[int, ...] = (30, 100)
    rates: tuple[float, ...] = (0.01, 0.1)
    rate_steps: int = 10_000
    blind_widths: tuple[int, ...] = (2, 4, 10, 30)  # without positional encoding
    offset_contexts: tuple[int, ...] = (4, 10)
    points: int = 60  # steps at which weights are kept, on a log grid
    rate_points: int = 500  # of the learning rates' loss curves, equally far apart
    test: int = 16_384  # fresh sequences behind every final perplexity
    curve_test: int = 4096  # and behind every point of the perplexity curves

    def __post_init__(self) -> None:
        for name in ("seeds", "large_seeds", "batch", "rate_steps", "rate_points", "test", "curve_test"):
            at_least(name, getattr(self, name), 1)
        for name in ("steps", "points"):
            at_least(name, getattr(self, name), 2)
        for name in ("vocabulary", "context"):
            at_least(name, getattr(self, name), 3)
        for name in ("grid_vocabularies", "grid_contexts", "rate_vocabularies", "offset_contexts"):
            for value in getattr(self, name):
                at_least(name, value, 3)
        for name in ("residual", "projection"):
            if getattr(self, name) not in SWITCH:
                raise InputError(f"{name}={getattr(self, name)} is no switch; give on or off")
        if self.rate_steps < self.rate_points:
            raise InputError(
                f"rate_steps={self.rate_steps} are fewer than rate_points={self.rate_points}; give at least as many"
            )


QUICK = Settings(
    seeds=2,
    grid_vocabularies=(30,),
    grid_contexts=(4, 10),
    grid_widths=(2,),
    rate_vocabularies=(30,),
    rate_steps=1000,
    blind_widths=(2, 10),
    offset_contexts=(4,),
    points=40,
    rate_points=100,
    batches=(128,),
    steps=800,
    test=4096,
    curve_test=1024,
)


class Cell(NamedTuple):
    """A relative perplexity that is read off a figure of [Liu-4]."""

    vocabulary: int
    context: int
    width: int
    learning_rate: float
    steps: int
    value: float

    @property
    def name(self) -> str:
        return f"V={self.vocabulary} C={self.context} width {self.width} lr {self.learning_rate:g}"

    @property
    def told(self) -> str:
        """The setting as in a sentence; `name` is its coordinate in results."""
        return f"V = {self.vocabulary}, C = {self.context}, width {self.width}, learning rate {self.learning_rate:g}"


PUBLISHED = (
    Cell(30, 4, 2, 0.01, 3000, 2.5e-4),
    Cell(30, 10, 2, 0.01, 3000, 3e-3),
    Cell(100, 10, 10, 0.01, 3000, 4e-7),
    Cell(30, 4, 2, 0.1, 3000, 4e-6),
    Cell(100, 4, 2, 0.01, 10_000, 4e-3),
    Cell(100, 4, 2, 0.1, 10_000, 1.3e-2),
)


class Switch(NamedTuple):
    """What the post leaves open."""

    residual: str
    projection: str


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train everything and evaluate it; dims and meanings are in the variables' own names."""
    s = settings
    variants = [Switch(r, p) for r in SWITCH for p in SWITCH] if s.variants else [Switch(s.residual, s.projection)]
    residuals, projections = (list(dict.fromkeys(x)) for x in zip(*variants, strict=True))
    shape = (len(residuals), len(projections))
    own = Switch(s.residual, s.projection)
    found: dict[str, tuple[Any, ...]] = {}
    found |= _curves(s, work, variants, shape)
    found |= _cells(s, work, variants, shape)
    found |= _grid(s, work, own)
    found |= _rates(s, work, own)
    found |= _blind(s, work, own)
    found |= _offsets(s, work, own)
    longest = max(s.offset_contexts, default=s.context)
    coords: dict[str, Any] = {
        "positional": ["none", "learned"],
        "residual": residuals,
        "projection": projections,
        "seed": list(range(s.seeds)),
        "step": _log_grid(s.steps, s.points),
        "position": list(range(-s.context + 1, 1)),  # from the last, which asks: -1 is the token before it
        "token": list(range(s.vocabulary)),
        "axis": list(range(s.width)),
        "row": list(range(s.width)),
        "column": list(range(s.width)),
        "batch": list(s.batches),
        "cell": [cell.name for cell in PUBLISHED],
        "vocabulary": list(s.grid_vocabularies),
        "context": list(s.grid_contexts),
        "width": list(s.grid_widths),
        "rate_vocabulary": list(s.rate_vocabularies),
        "learning_rate": list(s.rates),
        "schedule": ["constant", "cosine"],
        "rate_step": _bin_ends(s.rate_steps, s.rate_points),
        "blind_width": list(s.blind_widths),
        "offset_context": list(s.offset_contexts),
        "target": list(range(-longest, -1)),
    }
    used = {dim for _, variable in found.items() for dim in variable[0]}
    return dataset(found, coords={name: value for name, value in coords.items() if name in used})


def _curves(s: Settings, work: Work, variants: Sequence[Switch], shape: tuple[int, int]) -> dict[str, tuple[Any, ...]]:
    """The published setting: perplexity curves without and with positions, and what embeddings do on the way."""
    steps = _log_grid(s.steps, s.points)
    kinds: tuple[PositionalSwitch, ...] = ("none", "learned")
    runs = [
        _run(s, v, seed, s.vocabulary, s.context, s.width, positional=kind)
        for kind in kinds
        for v in variants
        for seed in range(s.seeds)
    ]
    names = ("embedding", "positions", "0.q", "0.k", "0.v", "0.o", "unembedding")
    trained = work.train("curves", runs, s.steps, record=steps.tolist(), recorded=names)
    size = (*shape, s.seeds)
    relative = np.stack([relative_perplexity(trained, s.curve_test, at=int(step)) for step in steps], -1)
    relative = relative.reshape(2, *size, len(steps))
    placed = trained[len(trained) // 2 :]

    def path(name: str) -> np.ndarray:
        kept = [torch.stack([model.recorded[int(step)][name] for step in steps]) for model in placed]
        return torch.stack(kept).reshape(*size, len(steps), *kept[0].shape[1:]).numpy()

    positions, tokens = path("positions"), path("embedding")
    form = path("0.q").astype(np.float64) @ path("0.k").astype(np.float64).swapaxes(-1, -2)
    directions, margins = separations(positions, s.context - 2)
    bilinear = np.einsum("...i,...ij,...j->...", directions, form, directions)
    dims = ("residual", "projection", "seed", "step")
    return {
        "perplexity": (
            ("positional", *dims),
            1 + s.vocabulary * relative,
            {"long_name": "perplexity on fresh sequences", "units": "1"},
        ),
        "relative": (
            ("positional", *dims),
            relative,
            {"long_name": "(perplexity - 1) / V on fresh sequences", "units": "1"},
        ),
        "positions": (
            (*dims, "position", "axis"),
            positions,
            {"long_name": "positional embedding, by place from the last", "units": "1"},
        ),
        "tokens": ((*dims, "token", "axis"), tokens, {"long_name": "token embedding", "units": "1"}),
        "query_key": (
            (*dims, "row", "column"),
            form.astype(np.float32),
            {"long_name": "W_Q W_K^T: logit = x_query W_Q W_K^T x_key / sqrt(width)", "units": "nat"},
        ),
        "separation": (
            (*dims, "axis"),
            directions.astype(np.float32),
            {"long_name": "unit vector s of the largest margin between p_-1 and the others", "units": "1"},
        ),
        "margin": (
            dims,
            margins.astype(np.float32),
            {"long_name": "least s . (p_j - p_-1) over the other places", "units": "1"},
        ),
        "bilinear": (dims, bilinear.astype(np.float32), {"long_name": "s W_Q W_K^T s", "units": "nat"}),
    }


def _cells(s: Settings, work: Work, variants: Sequence[Switch], shape: tuple[int, int]) -> dict[str, tuple[Any, ...]]:
    """What the post has numbers for, in every variant and at several batch sizes; NaN where not trained.

    A short run's `steps` and `rate_steps` stand for the post's 3,000 and 10,000.
    """
    if not (s.cells and s.batches):
        return {}
    found = np.full((len(s.batches), len(PUBLISHED), *shape, s.seeds), np.nan)
    for long, steps in ((False, s.steps), (True, s.rate_steps)):
        runs, places = [], []
        for b, batch in enumerate(s.batches):
            for c, cell in enumerate(PUBLISHED):
                large = batch > s.batch
                if (cell.steps > 3000) != long or (large and (cell.context, cell.width) != (4, 2)):
                    continue
                for v, variant in enumerate(variants):
                    for seed in range(min(s.seeds, s.large_seeds) if large else s.seeds):
                        size = (cell.vocabulary, cell.context, cell.width)
                        runs.append(_run(s, variant, seed, *size, rate=cell.learning_rate, batch=batch))
                        places.append((b, c, v // shape[1], v % shape[1], seed))
        values = relative_perplexity(work.train(f"cells {steps}", runs, steps), s.test)
        found[tuple(np.transpose(places))] = values
    return {
        "relative_published": (
            ("batch", "cell", "residual", "projection", "seed"),
            found,
            {"long_name": "(perplexity - 1) / V in the post's settings", "units": "1"},
        )
    }


def _grid(s: Settings, work: Work, own: Switch) -> dict[str, tuple[Any, ...]]:
    """Relative perplexity after `steps` steps against vocabulary, context and width."""
    cells = [(v, c, w) for v in s.grid_vocabularies for c in s.grid_contexts for w in s.grid_widths]
    if not cells:
        return {}
    runs = [_run(s, own, seed, *cell) for cell in cells for seed in range(s.seeds)]
    values = relative_perplexity(work.train("grid", runs, s.steps), s.test)
    size = (len(s.grid_vocabularies), len(s.grid_contexts), len(s.grid_widths), s.seeds)
    return {
        "relative_by_size": (
            ("vocabulary", "context", "width", "seed"),
            values.reshape(size),
            {"long_name": f"(perplexity - 1) / V after {s.steps} steps", "units": "1"},
        )
    }


def _rates(s: Settings, work: Work, own: Switch) -> dict[str, tuple[Any, ...]]:
    """Longer training at several learning rates, that stay or fall; loss curves and their spikes."""
    if not (s.rate_vocabularies and s.rates):
        return {}
    schedules: tuple[Schedule, ...] = ("constant", "cosine")
    runs = [
        _run(s, own, seed, vocabulary, s.context, s.width, rate=rate, schedule=schedule)
        for vocabulary in s.rate_vocabularies
        for rate in s.rates
        for schedule in schedules
        for seed in range(s.seeds)
    ]
    trained = work.train("rates", runs, s.rate_steps)
    ends = _bin_ends(s.rate_steps, s.rate_points)
    starts = np.concatenate([[0], ends[:-1]])
    means, counts = [], []
    for model in trained:
        losses = model.losses.double().numpy()
        means.append(np.add.reduceat(losses, starts) / np.diff(np.append(starts, len(losses))))
        at = spikes(losses, model.run.architecture.outputs)
        counts.append(np.bincount(np.searchsorted(ends, at, side="right"), minlength=len(ends)))
    size = (len(s.rate_vocabularies), len(s.rates), len(schedules), s.seeds)
    dims = ("rate_vocabulary", "learning_rate", "schedule", "seed")
    return {
        "rate_loss": (
            (*dims, "rate_step"),
            np.reshape(means, (*size, -1)).astype(np.float32),
            {"long_name": "training loss, mean of the steps up to this one", "units": "nat"},
        ),
        "spikes": (
            (*dims, "rate_step"),
            np.reshape(counts, (*size, -1)).astype(np.int16),
            {"long_name": "loss spikes that begin in the steps up to this one", "units": "1"},
        ),
        "rate_relative": (
            dims,
            relative_perplexity(trained, s.test).reshape(size),
            {"long_name": f"(perplexity - 1) / V after {s.rate_steps} steps", "units": "1"},
        ),
    }


def _blind(s: Settings, work: Work, own: Switch) -> dict[str, tuple[Any, ...]]:
    """Models without positions, by width: what is the plateau the bound of?"""
    if not s.blind_widths:
        return {}
    runs = [
        _run(s, own, seed, s.vocabulary, s.context, width, positional="none")
        for width in s.blind_widths
        for seed in range(s.seeds)
    ]
    values = relative_perplexity(work.train("blind", runs, s.steps), s.test).reshape(len(s.blind_widths), s.seeds)
    return {
        "blind_perplexity": (
            ("blind_width", "seed"),
            1 + s.vocabulary * values,
            {"long_name": f"perplexity without positional encoding after {s.steps} steps", "units": "1"},
        )
    }


def _offsets(s: Settings, work: Work, own: Switch) -> dict[str, tuple[Any, ...]]:
    """Other tokens than the one before the last; NaN where the context has no such place."""
    if not s.offset_contexts:
        return {}
    longest = max(s.offset_contexts)
    targets = list(range(-longest, -1))
    cells = [(c, t) for c in s.offset_contexts for t in targets if -t <= c]
    runs = [
        _run(s, own, seed, s.vocabulary, context, s.width, target=target)
        for context, target in cells
        for seed in range(s.seeds)
    ]
    values = relative_perplexity(work.train("offsets", runs, s.steps), s.test).reshape(len(cells), s.seeds)
    table = np.full((len(s.offset_contexts), len(targets), s.seeds), np.nan)
    for (context, target), row in zip(cells, values, strict=True):
        table[s.offset_contexts.index(context), targets.index(target)] = row
    return {
        "relative_by_target": (
            ("offset_context", "target", "seed"),
            table,
            {"long_name": f"(perplexity - 1) / V after {s.steps} steps, by the position asked for", "units": "1"},
        )
    }


def _run(
    s: Settings,
    variant: Switch,
    seed: int,
    vocabulary: int,
    context: int,
    width: int,
    *,
    positional: PositionalSwitch = "learned",
    rate: float | None = None,
    schedule: Schedule = "constant",
    target: int = -2,
    batch: int | None = None,
) -> Run:
    architecture = Architecture(
        blocks=1,
        width=width,
        length=context,
        vocabulary=vocabulary,
        outputs=vocabulary,
        positional=positional,
        residual=variant.residual == "on",
        output_projection=variant.projection == "on",
    )
    task = Copying(vocabulary, context, target, batch or s.batch)
    return Run(architecture, task, seed=seed, learning_rate=rate or s.learning_rate, schedule=schedule)


def relative_perplexity(models: Sequence[Trained], test: int, *, at: int | None = None) -> Float[np.ndarray, " model"]:
    """(perplexity - 1) / V of each model over `test` fresh sequences, which models of one task share, in float64.

    `at`: with the weights that were kept at that step instead of the last.
    """
    found = np.empty(len(models))
    by_shape: dict[Any, list[int]] = {}
    for i, model in enumerate(models):
        task: Any = model.run.task
        by_shape.setdefault((model.run.architecture.shape, replace(task, batch=test)), []).append(i)
    for (shape, task), members in by_shape.items():
        generator = torch.Generator().manual_seed(seed_of(0, TEST_BLOCK))
        drawn = task.draw(None, generator, 1)
        inputs, answers = drawn.inputs[0], task.answers(drawn)[0]
        for start in range(0, len(members), TOGETHER):
            some = members[start : start + TOGETHER]
            kept = [models[i].weights if at is None else models[i].recorded[at] for i in some]
            weights = {name: tensor.double() for name, tensor in stacked(kept).items()}
            switches = Switches.of([models[i].run.architecture for i in some])
            total = torch.zeros(len(some), dtype=torch.float64)
            for ids, right in zip(inputs.split(CHUNK), answers.split(CHUNK), strict=True):
                with torch.no_grad():
                    logits = forward(shape, weights, switches, ids.expand(len(some), *ids.shape))
                total += _losses(logits, right).sum(-1)
            found[some] = torch.expm1(total / test).numpy() / task.vocabulary
    return found


def _losses(logits: Float[Tensor, "model batch outputs"], answers: Tensor) -> Float[Tensor, "model batch"]:
    """-log p of the answers, small ones with all their digits: log1p of the others' odds."""
    index = answers.expand(len(logits), -1)[..., None]
    odds = logits - logits.gather(-1, index)
    largest = odds.amax(-1, keepdim=True)  # 0 where the answer leads
    others = (odds - largest).exp().scatter(-1, index, 0.0).sum(-1)
    largest = largest[..., 0]
    return torch.where(largest > 0, largest + (others + (-largest).exp()).log(), torch.log1p(others))


def spikes(losses: Float[np.ndarray, " step"], outputs: int) -> list[int]:
    """Steps at which a loss spike begins.

    The curve is the mean of the last `SPIKE_SMOOTH` losses, its floor the lowest value so far. Once the floor is below
    `FALLEN` of log(outputs), a guesser's loss, a spike begins where the curve is above three floors, or `SPIKE_RISE` nats
    above the floor, whichever is less, and ends where it is back within half that rise: a rise is one spike however
    ragged, and one that stays is one.
    """
    if len(losses) < SPIKE_SMOOTH:
        return []
    sums = np.concatenate([[0.0], np.cumsum(losses, dtype=np.float64)])
    curve = (sums[SPIKE_SMOOTH:] - sums[:-SPIKE_SMOOTH]) / SPIKE_SMOOTH
    floors = np.minimum.accumulate(curve)
    rises = np.minimum(2 * floors, SPIKE_RISE)
    found: list[int] = []
    inside = False
    for n in np.flatnonzero(floors < FALLEN * math.log(outputs)):
        if not inside and curve[n] > floors[n] + rises[n]:
            found.append(int(n) + SPIKE_SMOOTH - 1)
            inside = True
        elif inside and curve[n] < floors[n] + rises[n] / 2:
            inside = False
    return found


def separations(
    positions: Float[np.ndarray, "*batch position axis"], asked: int
) -> tuple[Float[np.ndarray, "*batch axis"], Float[np.ndarray, "*batch"]]:
    """(s, margin) of every set of positions: s the unit vector of the largest `min_j s . (p_j - p_asked)`, which is margin.

    NaN where no direction separates: the origin lies in the hull of the differences.
    """
    flat = positions.reshape(-1, *positions.shape[-2:]).astype(np.float64)
    found = np.full((len(flat), flat.shape[-1] + 1), np.nan)
    for n, p in enumerate(flat):
        nearest = _nearest_of_hull(np.delete(p, asked, 0) - p[asked])
        size = np.linalg.norm(nearest)
        if size > 1e-9 * np.abs(p).max():
            found[n] = [*(nearest / size), size]
    found = found.reshape(*positions.shape[:-2], -1)
    return found[..., :-1], found[..., -1]


def _nearest_of_hull(points: Float[np.ndarray, "point axis"]) -> Float[np.ndarray, " axis"]:
    """The point of the convex hull that is nearest to the origin (Wolfe's trick: least squares with weights >= 0)."""
    # min |P^T w|^2 + (1 - sum w)^2 over w >= 0 has w proportional to the hull's own minimizer.
    scale = np.abs(points).max() or 1.0
    system = np.concatenate([points.T / scale, np.ones((1, len(points)))])
    weights, _ = nnls(system, np.array([*[0.0] * points.shape[1], 1.0]))
    return weights / weights.sum() @ points


def blind_limit(vocabulary: int, context: int) -> float:
    """Perplexity of the best reader that knows the query and the bag of the other tokens: exp E[log((C-1) / count)].

    Of the C - 1 tokens before the query one is the answer, each as likely; count says how often the answer stands among
    them, so count - 1 is Binomial(C - 2, 1/V).
    """
    others = context - 2
    k = np.arange(others + 1.0)
    ways = gammaln(others + 1) - gammaln(k + 1) - gammaln(others - k + 1)
    chance = np.exp(ways - k * math.log(vocabulary) + (others - k) * math.log1p(-1 / vocabulary))
    return math.exp(float(chance @ np.log((context - 1) / (k + 1))))


def betting(vocabulary: int, context: int) -> dict[str, float]:
    """What betting on one of the earlier tokens gives, by kind of mean: see the module's text."""
    v, c = vocabulary, context
    return {
        "published": v * (c - 2) / (c - 1),
        "arithmetic": (v * (c - 2) + 1) / (c - 1),
        "geometric": v ** ((c - 2) / (c - 1)),
        "with the query": v * (c - 1) / c,
    }


def _log_grid(steps: int, points: int) -> np.ndarray:
    """0 and about `points` whole numbers to `steps`, each a like factor after the other."""
    return np.unique(np.concatenate([[0], np.geomspace(1, steps, points).round()])).astype(int)


def _bin_ends(steps: int, points: int) -> np.ndarray:
    return np.unique(np.linspace(0, steps, points + 1).round()).astype(int)[1:]


# ------------------------------------------------------------------------------------------------------------ reporting

SOURCE = "[Liu-4]"
PLATEAUS = (25.0, 20.6)  # perplexities without positions at which the post's curve stalls, one after the other
NEAR = 0.05  # relative: how near a plateau has to be to a published one; the figure's axis resolves no less
STALLED = 1.5  # factor in steps over which a perplexity stays near a plateau, to count as one
WITHIN = 3.0  # factor within which a relative perplexity agrees: half a decade of the post's logarithmic axis
PUBLISHED_FORM = ((-0.41, 1.35), (0.19, -2.25))  # W_Q W_K^T; with s = (1, 1) the post has s W_Q W_K^T s = -1.1


def main_variant(ds: xr.Dataset) -> Switch:
    """The variant of which everything was trained: what figures show."""
    settings = json.loads(ds.attrs["settings"])
    return Switch(settings["residual"], settings["projection"])


def of_variant(ds: xr.Dataset, name: str) -> xr.DataArray | None:
    """A variable in the main variant, None where the result lacks it."""
    if name not in ds:
        return None
    v = main_variant(ds)
    if v.residual not in ds["residual"].values or v.projection not in ds["projection"].values:
        return None
    return ds[name].sel(residual=v.residual, projection=v.projection)


def typical_seed(ds: xr.Dataset) -> int:
    """Index of the seed whose last relative perplexity with positions is the (lower) median."""
    relative = of_variant(ds, "relative")
    assert relative is not None
    last = relative.sel(positional="learned").isel(step=-1).values
    return int(np.argsort(last, kind="stable")[(len(last) - 1) // 2])


class Agreement(NamedTuple):
    """How near a variant comes to the published relative perplexities."""

    batch: int
    variant: Switch
    error: float  # rms over cells of log10(median over seeds / published)
    cells: int
    plateau: float  # perplexity without positions, median over seeds; NaN for batches whose curves were not trained


def agreements(ds: xr.Dataset) -> list[Agreement]:
    """All variants, the best first for each batch size; empty where the result has no published cells."""
    if "relative_published" not in ds:
        return []
    batch = int(json.loads(ds.attrs["settings"])["batch"])
    found = []
    for b in ds["batch"].values:
        rows = []
        for r in ds["residual"].values:
            for p in ds["projection"].values:
                one = ds["relative_published"].sel(batch=b, residual=r, projection=p)
                medians = one.median("seed").values
                known = np.isfinite(medians)
                ratio = np.log10(np.maximum(medians[known], TINY) / _values(ds)[known])
                plateau = math.nan
                if int(b) == batch:
                    curve = ds["perplexity"].sel(positional="none", residual=r, projection=p)
                    plateau = float(curve.isel(step=-1).median())
                error = float(np.sqrt(np.mean(ratio**2))) if known.any() else math.nan
                rows.append(Agreement(int(b), Switch(str(r), str(p)), error, int(known.sum()), plateau))
        found += sorted(rows, key=lambda row: math.inf if math.isnan(row.error) else row.error)
    return found


def _values(ds: xr.Dataset) -> np.ndarray:
    by_name = {cell.name: cell.value for cell in PUBLISHED}
    return np.array([by_name[str(name)] for name in ds["cell"].values])


class Signs(NamedTuple):
    """On which sides of zero the positions lie along s, at the end, by seed; None for seeds that nothing separates."""

    own: list[bool | None]  # p_-1 negative and all others positive
    apart: np.ndarray  # [seed]; the least of -s p_-1 and s p of the others, above 0 where `own`; NaN as `bilinear`
    shifted: list[bool | None]  # the same with the mean token embedding added
    bilinear: np.ndarray  # [seed], NaN where nothing separates
    lead: np.ndarray  # [seed]; by how many nats the mean token's query prefers p_-1 to the best of the others, p alone


def signs(ds: xr.Dataset) -> Signs | None:
    """Of the main variant; None where the result lacks it."""
    positions, tokens, directions, form, matrix = (
        of_variant(ds, name) for name in ("positions", "tokens", "separation", "bilinear", "query_key")
    )
    if positions is None or tokens is None or directions is None or form is None or matrix is None:
        return None
    p, s = positions.isel(step=-1), directions.isel(step=-1)
    mean = tokens.isel(step=-1).mean("token")
    asking = (p.sel(position=0) + mean).rename(axis="row")
    asked_for = (asking * matrix.isel(step=-1)).sum("row").rename(column="axis")
    logits = (asked_for * p).sum("axis") / math.sqrt(p.sizes["axis"])
    others = logits.sel(position=[int(x) for x in logits["position"].values if x != -1])
    lead = logits.sel(position=-1) - others.max("position")

    def apart(places: xr.DataArray) -> np.ndarray:
        along = (places * s).sum("axis", skipna=False)
        return along.where(along["position"] != -1, -along).min("position", skipna=False).values

    def judged(least: np.ndarray) -> list[bool | None]:
        return [None if np.isnan(one) else bool(one > 0) for one in least]

    own = apart(p)
    return Signs(judged(own), own, judged(apart(p + mean)), form.isel(step=-1).values, lead.values)


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers, medians over seeds with their range."""
    variant, last = main_variant(ds), ds["perplexity"].isel(step=-1)
    found = []
    rows = [
        [str(r), str(p), str(kind), range_told(last.sel(residual=r, projection=p, positional=kind))]
        for r in ds["residual"].values
        for p in ds["projection"].values
        for kind in ds["positional"].values
    ]
    v, c = _sizes(ds)
    readers = betting(v, c)
    found.append(
        Table(f"Perplexity, V = {v}, C = {c}: last step", ("residual", "W_O", "positions", "median (range)"), rows)
    )
    limits = [
        ["exp E[log((C-1)/count)], the best without positions", number(blind_limit(v, c), ".3f")],
        ["V (C-2)/(C-1), published bound", number(readers["published"], ".3f")],
        ["mean perplexity of a bet on one of the C-1 earlier tokens", number(readers["arithmetic"], ".3f")],
        ["perplexity of its mean loss, V^((C-2)/(C-1))", number(readers["geometric"], ".3f")],
        ["V (C-1)/C, the bet among all C tokens", number(readers["with the query"], ".3f")],
    ]
    found.append(Table("Readers without positions: perplexity", ("reader", "perplexity"), limits))
    if "blind_perplexity" in ds:
        rows = [[str(int(one["blind_width"])), range_told(one)] for one in ds["blind_perplexity"]]
        found.append(Table("Perplexity without positions, by width", ("width", "median (range)"), rows))
    if "relative_published" in ds:
        found += _published_tables(ds)
    if (side := signs(ds)) is not None:
        rows = []
        for n, seed in enumerate(ds["seed"].values):
            m = of_variant(ds, "query_key")
            assert m is not None
            matrix = m.isel(seed=n, step=-1).values
            rows.append(
                [
                    str(seed),
                    ", ".join(number(x, ".2f") for x in matrix.flat),
                    number(side.bilinear[n], ".2f"),
                    number(side.lead[n], ".2f"),
                    *({True: "yes", False: "no", None: "-"}[x[n]] for x in (side.own, side.shifted)),
                ]
            )
        columns = (
            "seed",
            "W_Q W_K^T, row by row",
            "s W_Q W_K^T s",
            "lead of p_-1, nats",
            "signs as published",
            "with mean token added",
        )
        found.append(Table("Separation, last step", columns, rows))
    if "relative_by_size" in ds:
        rows = [
            [str(int(one["vocabulary"])), str(int(one["context"])), str(int(one["width"])), range_told(one)]
            for one in ds["relative_by_size"].stack(size=("vocabulary", "context", "width")).transpose("size", ...)
        ]
        found.append(Table("(perplexity - 1) / V by size", ("V", "C", "width", "median (range)"), rows))
    if "rate_relative" in ds:
        rows = []
        stacked_ = ds[["rate_relative", "spikes"]].stack(case=("rate_vocabulary", "learning_rate", "schedule"))
        for n in range(stacked_.sizes["case"]):
            one = stacked_.isel(case=n)
            rows.append(
                [
                    str(int(one["rate_vocabulary"])),
                    f"{float(one['learning_rate']):g}",
                    str(one["schedule"].values),
                    range_told(one["rate_relative"]),
                    range_told(one["spikes"].sum("rate_step"), "g"),
                ]
            )
        columns = ("V", "learning rate", "schedule", "(perplexity - 1) / V", "spikes")
        found.append(Table("Learning rates: median (range)", columns, rows))
    if "relative_by_target" in ds:
        rows = [
            [str(int(row["offset_context"])), str(int(one["target"]) + 1), range_told(one)]
            for row in ds["relative_by_target"]
            for one in row
            if np.isfinite(one).any()
        ]
        found.append(Table("(perplexity - 1) / V by offset", ("C", "offset", "median (range)"), rows))
    note = f" (residual {variant.residual}, W_O {variant.projection})"
    return [Table(t.title + note if "residual" not in t.columns else t.title, t.columns, t.rows) for t in found]


def _published_tables(ds: xr.Dataset) -> list[Table]:
    rows = [
        [str(a.batch), *a.variant, number(a.error, ".2f"), str(a.cells), number(a.plateau, ".1f")]
        for a in agreements(ds)
    ]
    columns = ("batch", "residual", "W_O", "rms log10 error", "settings", "plateau without positions")
    found = [Table("Which variant the post's numbers agree with, the best first", columns, rows)]
    rows = []
    for cell, value in zip(ds["cell"].values, _values(ds), strict=True):
        for b in ds["batch"].values:
            one = ds["relative_published"].sel(cell=cell, batch=b)
            if np.isfinite(one).any():
                shown = [
                    range_told(one.sel(residual=r, projection=p))
                    for r in ds["residual"].values
                    for p in ds["projection"].values
                ]
                rows.append([str(cell), str(b), number(value, ".1e"), *shown])
    names = [f"residual {r}, W_O {p}" for r in ds["residual"].values for p in ds["projection"].values]
    found.append(Table("(perplexity - 1) / V in the post's settings", ("setting", "batch", "published", *names), rows))
    return found


def claims(ds: xr.Dataset) -> list[Claim]:
    """Statements of [Liu-4], judged in the main variant unless they say otherwise."""
    found = _plateau_claims(ds) + _head_claims(ds)
    found += [_cell_claim(ds, cell) for cell in PUBLISHED]
    by_name = {cell.name: cell for cell in PUBLISHED}
    short, long, wide, fast, large, large_fast = by_name
    found += [
        _order_claim(
            ds, "longer", "(perplexity - 1) / V is larger at C = 10 than at C = 4 (V = 30, width 2)", short, long
        ),
        _order_claim(ds, "wider", "width 10 does far better than width 2, even at V = 100, C = 10", wide, short),
        _order_claim(ds, "fast-at-30", "learning rate 0.1 does better than 0.01 at V = 30", fast, short),
        _order_claim(ds, "fast-at-100", "learning rate 0.1 does worse than 0.01 at V = 100", large, large_fast),
        _spike_claim(ds),
        _offset_claim(ds),
    ]
    return found


def _plateau_claims(ds: xr.Dataset) -> list[Claim]:
    v, c = _sizes(ds)
    setting = "(V = 30, C = 4, width 2)"
    curve = of_variant(ds, "perplexity")
    statements = stalls, then, bounded, solves = [
        Statement(f"liu4-previous-token-{name}", SOURCE, text, rule, published)
        for name, text, rule, published in (
            (
                "stalls",
                "Without positional embeddings the previous-token task's perplexity at first stalls at about 25 "
                f"{setting}.",
                f"the factor in steps over which the perplexity stays within {NEAR:.0%} of {PLATEAUS[0]:g} is above "
                f"{STALLED:g}, by the 95 % interval over runs of its logarithm",
                f"{PLATEAUS[0]:g}",
            ),
            (
                "plateau",
                "Without positional embeddings the previous-token task's perplexity then stalls at about 20.6 "
                f"{setting}.",
                f"the 95 % interval over runs of the perplexity at the end lies within a quarter of {PLATEAUS[1]:g}",
                f"{PLATEAUS[1]:g}",
            ),
            (
                "bound",
                f"In the previous-token task V (C-2)/(C-1) = {betting(30, 4)['published']:g} bounds the perplexity "
                "that can be had without positions (V = 30, C = 4).",
                "95 % intervals over runs of the perplexity without positions lie above V (C-2)/(C-1) at every width",
                f"{betting(30, 4)['published']:g}",
            ),
            (
                "solved",
                f"With learned positional embeddings the previous-token task's perplexity falls to about 1 {setting}.",
                "the 95 % interval over runs of the perplexity at the end lies within a quarter of 1",
                "1",
            ),
        )
    ]
    if curve is None or (v, c) != (30, 4):
        return [statement.judged() for statement in statements]
    without, placed = (curve.sel(positional=kind) for kind in ("none", "learned"))
    long = [_stay(without.isel(seed=n), PLATEAUS[0]) for n in range(without.sizes["seed"])]
    last, end = without.isel(step=-1), placed.isel(step=-1)
    logs = np.log(long)
    first = stalls.judged(
        f"it stays within {NEAR:.0%} of it over a factor of {over_told(logs, '.2f', math.exp)} in steps, in "
        f"{sum(x >= STALLED for x in long)} of {len(long)} seeds over {STALLED:g} or more",
        above(over_runs(logs), math.log(STALLED))(SURE),
    )
    second = then.judged(
        f"{over_told(last)} after {int(last['step'])} steps", near(over_runs(last.values), PLATEAUS[1])(SURE)
    )
    limit = blind_limit(v, c)
    if "blind_perplexity" in ds:
        widths = ds["blind_perplexity"]
        best = ", ".join(f"{over_told(one)} at width {int(one['blind_width'])}" for one in widths)
        bound = bounded.judged(
            f"{best}; the best reader blind to order gets {limit:.2f}. It is the mean perplexity of betting on one token",
            each_above(widths, betting(v, c)["published"])(SURE),
        )
    else:
        bound = bounded.judged()
    solved = solves.judged(f"{over_told(end)} after {int(end['step'])} steps", near(over_runs(end.values), 1.0)(SURE))
    return [first, second, bound, solved]


def _stay(curve: xr.DataArray, level: float) -> float:
    """The factor in steps over which a curve stays near a level, at its longest; 1 if it never does."""
    steps, near = curve["step"].values, np.abs(curve.values / level - 1) < NEAR
    longest, start = 1.0, None
    for step, inside in zip(steps, near, strict=True):
        if not inside or step == 0:
            start = None
            continue
        start = start or step
        longest = max(longest, step / start)
    return float(longest)


def _head_claims(ds: xr.Dataset) -> list[Claim]:
    statements = separates, negative = [
        Statement(
            "liu4-previous-token-separation",
            SOURCE,
            "In the previous-token task (C = 4) the position asked for, p_-1, is negative along the separation "
            "direction s, and p_0, p_-2, p_-3 are positive (up to s -> -s).",
            "the least of -s p_-1 and s p of the others is above 0, by the 95 % interval over runs",
        ),
        Statement(
            "liu4-previous-token-bilinear-form",
            SOURCE,
            "In the previous-token task s W_Q W_K^T s < 0 along the separation direction s (-1.1 for s = (1, 1), "
            "which is -0.56 for the unit vector).",
            "s W_Q W_K^T s is below 0, by the 95 % interval over runs",
            "-1.1",
        ),
    ]
    side = signs(ds)
    if side is None:
        return [statement.judged() for statement in statements]
    seeds = len(side.own)
    right, shifted = (sum(x is True for x in found) for found in (side.own, side.shifted))
    below_zero = int((side.bilinear < 0).sum())
    return [
        separates.judged(
            f"{right} of {seeds} seeds; {shifted} with the mean token embedding added; "
            f"{sum(x is None for x in side.own)} not separated; least {over_told(side.apart)}",
            above(over_runs(side.apart), 0)(SURE),
        ),
        negative.judged(
            f"{over_told(side.bilinear)}; below 0 in {below_zero} of {seeds} seeds; "
            f"the mean token's query prefers p_-1 in {int((side.lead > 0).sum())} of {seeds} seeds",
            below(over_runs(side.bilinear), 0)(SURE),
        ),
    ]


def _cell_claim(ds: xr.Dataset, cell: Cell) -> Claim:
    """Agreement at any batch size, on the logarithmic axis that the number was read off."""
    said = Statement(
        f"liu4-previous-token-v{cell.vocabulary}-c{cell.context}-width-{cell.width}-lr-{cell.learning_rate:g}",
        SOURCE,
        f"In the previous-token task (perplexity - 1) / V = {cell.value:.1e} after {cell.steps:,} steps at "
        f"{cell.told}.",
        f"at some batch size the 95 % interval over runs of its logarithm lies within a factor of {WITHIN:g}, what can "
        "be read off a logarithmic axis, of the published number",
        f"{cell.value:.1e}",
    )
    own = of_variant(ds, "relative_published")
    if own is None or cell.name not in own["cell"].values or not np.isfinite(one := own.sel(cell=cell.name)).any():
        return said.judged()
    known = [one.sel(batch=b).dropna("seed") for b in one["batch"].values if np.isfinite(one.sel(batch=b)).any()]
    logs = [_logs(x) for x in known]
    shown = "; ".join(f"batch {int(x['batch'])}: {over_told(x, change=math.exp)}" for x in logs)
    if _steps(ds, cell) != cell.steps:
        return said.judged(f"{shown}, after {_steps(ds, cell):,} steps", None)
    ends = [math.log(cell.value) + way * math.log(WITHIN) for way in (-1, 1)]
    return said.judged(shown, some([between(over_runs(x.values), *ends) for x in logs])(SURE))


def _logs(relative: xr.DataArray) -> xr.DataArray:
    """Logarithms, over which seeds spread by decades."""
    return xr.ufuncs.log(relative.dropna("seed").clip(TINY))


def _steps(ds: xr.Dataset, cell: Cell) -> int:
    """Steps that stand for the post's."""
    settings = json.loads(ds.attrs["settings"])
    return int(settings["rate_steps" if cell.steps > 3000 else "steps"])


def _order_claim(ds: xr.Dataset, name: str, text: str, less: str, more: str) -> Claim:
    """Logarithms of both groups of runs, at the first batch size."""
    told = {cell.name: cell.told for cell in PUBLISHED}
    rule = (
        f"(perplexity - 1) / V at {told[less]} is below that at {told[more]}, by the 95 % interval of Welch's t over runs "
        "of their logarithms' difference"
    )
    said = Statement(f"liu4-previous-token-{name}", SOURCE, f"In the previous-token task {text}.", rule)
    own = of_variant(ds, "relative_published")
    if own is None or not {less, more} <= set(own["cell"].values):
        return said.judged()
    small, large = (own.sel(cell=cell).isel(batch=0) for cell in (less, more))
    if not (np.isfinite(small).any() and np.isfinite(large).any()):
        return said.judged()
    few, many = _logs(small), _logs(large)
    measured = f"{over_told(few, change=math.exp)} at {less}, {over_told(many, change=math.exp)} at {more}"
    return said.judged(measured, below(between_runs(few.values, many.values), 0)(SURE))


def _spike_claim(ds: xr.Dataset) -> Claim:
    said = Statement(
        "liu4-previous-token-spike",
        SOURCE,
        "In the previous-token task at V = 100, C = 4, width 2 the loss has a spike at learning rate 0.1 (near step "
        "6,000).",
        "the number of spikes of the loss at the constant learning rate 0.1 is above 0, by the 95 % interval over runs",
        "near step 6,000",
    )
    if "spikes" not in ds or 100 not in ds["rate_vocabulary"].values or not {0.1, 0.01} <= _rates_of(ds):
        return said.judged()
    counts = ds["spikes"].sum("rate_step").sel(rate_vocabulary=100, schedule="constant")
    fast, slow = (counts.sel(learning_rate=rate) for rate in (0.1, 0.01))
    at = ds["spikes"].sel(rate_vocabulary=100, schedule="constant", learning_rate=0.1).any("seed")
    where = [int(step) for step in ds["rate_step"].values[at.values]]
    where_told = f"from step {min(where):,} to {max(where):,}" if where else "none"
    measured = (
        f"{over_told(fast)} spikes per run at 0.1 ({where_told}), {over_told(slow)} at 0.01; "
        f"{int((fast > 0).sum())} of {fast.size} seeds have any at 0.1"
    )
    return said.judged(measured, each_above(fast)(SURE))


def _rates_of(ds: xr.Dataset) -> set[float]:
    return {round(float(rate), 6) for rate in ds["learning_rate"].values}


def _offset_claim(ds: xr.Dataset) -> Claim:
    said = Statement(
        "liu4-previous-token-offsets",
        SOURCE,
        "Any fixed offset other than the previous-token task's is learned as well (C = 4).",
        "95 % intervals over runs of the perplexity lie within a quarter of 1 at every offset",
    )
    if "relative_by_target" not in ds or 4 not in ds["offset_context"].values:
        return said.judged()
    here = ds["relative_by_target"].sel(offset_context=4).dropna("target", how="all")
    v = _sizes(ds)[0]
    perplexity = 1 + v * here
    shown = ", ".join(f"{over_told(one)} at offset {int(one['target']) + 1}" for one in perplexity)
    return said.judged(f"perplexity {shown}", every([near(one, 1.0) for one in over_each(perplexity)])(SURE))


def _sizes(ds: xr.Dataset) -> tuple[int, int]:
    settings = json.loads(ds.attrs["settings"])
    return int(settings["vocabulary"]), int(settings["context"])
