"""A head that finds the token before the last: what training it takes, and how the embeddings get there [Liu-4].

Random tokens `[A][B][C][D]`; the model has to name `[C]` (`tasks.Copying`, target -2). The model of the post embeds tokens,
adds a learned vector per position, has one attention layer and unembeds. The post does not say whether the attention layer
adds to a residual stream or has an output projection, so `variants` trains all four. A relative perplexity is
`(perplexity - 1) / V` over fresh sequences: `expm1` of the mean loss, in float64 from weights trained in float32, so that a
value of 1e-9 is as accurate as one of 1.

The separation direction s is the unit vector with the largest margin `min_j s . (p_j - p_t)` between the position asked
for and the others: the point nearest to the origin of the hull of all `p_j - p_t`, if the origin lies outside. p_t is on
its negative side. Logits are `x_query W_Q W_K^T x_key / sqrt(d)`; the query's own p is on the positive side, so that
`s W_Q W_K^T s < 0` gives p_t the largest logit. The post's -1.1 is this with its s = (1, 1), of length sqrt(2); the unit
vector gives half of it. Positions have no zero of their own, since one vector added to every p and taken off every token
embedding changes no number; signs along s are hence counted both as they are and with the mean token embedding added to p.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from scipy.optimize import nnls
from torch import Tensor

from probes.errors import InputError

from ...checks import one_of
from ...model import Architecture, PositionalSwitch, Switches, forward
from ...tasks import Copying
from ...train import Run, Schedule, Trained, seed_of, stacked
from ..experiment import Work
from ..sweep import Measure, Part, each, each_at_least, sweep
from .chart import charts as charts
from .statements import claims as claims
from .tables import PUBLISHED, Switch
from .tables import tables as tables

SWITCH = ("off", "on")  # of residual stream and output projection
POSITIONAL: tuple[PositionalSwitch, ...] = ("none", "learned")
SCHEDULES: tuple[Schedule, ...] = ("constant", "cosine")
SPIKE_SMOOTH, SPIKE_RISE, FALLEN = 50, 1.0, 0.5  # steps, nats, share of a guesser's loss; see `spikes`
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
    batch: int = 128  # which the post does not say
    learning_rate: float = 0.01
    variants: bool = True  # curves and published cells with residual off/on, W_O off/on; else the one below alone
    residual: str = "off"  # of everything else
    projection: str = "on"
    cells: bool = True  # the published relative perplexities
    batches: tuple[int, ...] = (128, 512)  # of them; those beyond `batch` in one variant, for context 4 and width 2
    grid_vocabularies: tuple[int, ...] = (10, 30, 100)
    grid_contexts: tuple[int, ...] = (4, 10)
    grid_widths: tuple[int, ...] = (2, 10)
    rate_vocabularies: tuple[int, ...] = (30, 100)
    rates: tuple[float, ...] = (0.01, 0.1)
    rate_steps: int = 10_000
    blind_widths: tuple[int, ...] = (2, 4, 10, 30)  # without positional encoding: what is the plateau the bound of?
    offset_contexts: tuple[int, ...] = (4, 10)  # other tokens are asked for than the one before the last
    points: int = 60  # steps at which weights are kept, on a log grid
    rate_points: int = 500  # of the learning rates' loss curves, equally far apart
    test: int = 16_384  # fresh sequences behind every final perplexity
    curve_test: int = 4096  # and behind every point of the perplexity curves

    def __post_init__(self) -> None:
        each_at_least(self, 1, "seeds", "batch", "rate_steps", "rate_points", "test", "curve_test")
        each_at_least(self, 2, "steps", "points")
        each_at_least(self, 3, "vocabulary", "context")
        each_at_least(self, 3, "grid_vocabularies", "grid_contexts", "rate_vocabularies", "offset_contexts")
        for name in ("residual", "projection"):
            one_of(name, getattr(self, name), SWITCH)
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


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train and evaluate everything; the variables' own names say what they mean."""
    s = settings
    variants = _variants(s)
    longest = max(s.offset_contexts, default=s.context)
    coords: dict[str, Any] = {
        "positional": list(POSITIONAL),
        "residual": list(dict.fromkeys(v.residual for v in variants)),
        "projection": list(dict.fromkeys(v.projection for v in variants)),
        "seed": list(range(s.seeds)),
        "step": _log_grid(s.steps, s.points),
        "position": list(range(-s.context + 1, 1)),  # from the last, which asks: -1 is the token before it
        "token": list(range(s.vocabulary)),
        **{name: list(range(s.width)) for name in ("axis", "row", "column")},
        "batch": list(s.batches),
        "cell": [cell.name for cell in PUBLISHED],
        "vocabulary": list(s.grid_vocabularies),
        "context": list(s.grid_contexts),
        "width": list(s.grid_widths),
        "rate_vocabulary": list(s.rate_vocabularies),
        "learning_rate": list(s.rates),
        "schedule": list(SCHEDULES),
        "rate_step": _bin_ends(s.rate_steps, s.rate_points),
        "blind_width": list(s.blind_widths),
        "offset_context": list(s.offset_contexts),
        "target": list(range(-longest, -1)),
    }
    sizes = {"vocabulary": s.grid_vocabularies, "context": s.grid_contexts, "width": s.grid_widths}
    others = {"offset_context": s.offset_contexts, "target": coords["target"]}
    after = f"(perplexity - 1) / V after {s.steps} steps"
    blind = f"perplexity without positional encoding after {s.steps} steps"
    return sweep(
        coords,
        *_curves(s, work),
        _cells(s, work),
        _grid(s, work, "grid", "relative_by_size", after, sizes),
        *_rates(s, work),
        _grid(s, work, "blind", "blind_perplexity", blind, {"blind_width": s.blind_widths}, positional="none"),
        _grid(s, work, "offsets", "relative_by_target", f"{after}, by the position asked for", others),
    )


def _curves(s: Settings, work: Work) -> list[Part]:
    """The published setting: perplexity curves without and with positions, and the paths of the embeddings."""
    steps = _log_grid(s.steps, s.points)
    models = [(*v, seed) for v in _variants(s) for seed in range(s.seeds)]
    both = [(kind, *model) for kind in POSITIONAL for model in models]
    runs = [run_of(s, seed, positional=kind, residual=r, projection=p) for kind, r, p, seed in both]
    names = ("embedding", "positions", "0.q", "0.k", "0.v", "0.o", "unembedding")
    trained = work.train("curves", runs, s.steps, record=steps.tolist(), recorded=names)
    relative = np.stack([relative_perplexity(trained, s.curve_test, at=int(step)) for step in steps], -1)
    placed = trained[len(models) :]

    def path(name: str) -> np.ndarray:  # [model, step, ...]
        return np.stack([[model.recorded[int(step)][name].numpy() for step in steps] for model in placed])

    positions = path("positions")
    form = path("0.q").astype(np.float64) @ path("0.k").astype(np.float64).swapaxes(-1, -2)
    directions, margins = separations(positions, s.context - 2)
    dims, single = ("residual", "projection", "seed"), np.float32
    form_text = "W_Q W_K^T: logit = x_query W_Q W_K^T x_key / sqrt(width)"
    widest = "unit vector s of the largest margin between p_-1 and the others"
    curves = {
        "perplexity": Measure("perplexity on fresh sequences", "1", ("step",)),
        "relative": Measure("(perplexity - 1) / V on fresh sequences", "1", ("step",)),
    }
    paths = {
        "positions": Measure("positional embedding, by place from the last", "1", ("step", "position", "axis"), single),
        "tokens": Measure("token embedding", "1", ("step", "token", "axis"), single),
        "query_key": Measure(form_text, "nat", ("step", "row", "column"), single),
        "separation": Measure(widest, "1", ("step", "axis"), single),
        "margin": Measure("least s . (p_j - p_-1) over the other places", "1", ("step",), single),
        "bilinear": Measure("s W_Q W_K^T s", "nat", ("step",), single),
    }
    bilinear = np.einsum("...i,...ij,...j->...", directions, form, directions)
    found = (positions, path("embedding"), form, directions, margins, bilinear)
    return [
        Part(("positional", *dims), curves, each(both, perplexity=1 + s.vocabulary * relative, relative=relative)),
        Part(dims, paths, each(models, **dict(zip(paths, found, strict=True)))),
    ]


def _cells(s: Settings, work: Work) -> Part:
    """The settings that the post has numbers for, in every variant and at several batch sizes; NaN where not trained.

    A short run's `steps` and `rate_steps` stand for the post's 3,000 and 10,000.
    """
    cells: list[tuple[Any, ...]] = []
    found: list[float] = []
    for long, steps in ((False, s.steps), (True, s.rate_steps)) if s.cells and s.batches else ():
        runs = []
        for batch, cell, v, seed in product(s.batches, PUBLISHED, _variants(s), range(s.seeds)):
            beyond = (cell.context, cell.width, *v) != (4, 2, s.residual, s.projection)
            if (cell.steps > 3000) == long and not (batch > s.batch and beyond):
                given = {name: getattr(cell, name) for name in ("vocabulary", "context", "width", "learning_rate")}
                runs.append(run_of(s, seed, batch=batch, **given, **v._asdict()))
                cells.append((batch, cell.name, *v, seed))
        found += _ends(s, work, f"cells {steps}", runs, steps).tolist()
    measures = {"relative_published": Measure("(perplexity - 1) / V in the post's settings")}
    axes = ("batch", "cell", "residual", "projection", "seed")
    return Part(axes, measures, each(cells, relative_published=found))


def _grid(
    s: Settings, work: Work, label: str, variable: str, text: str, axes: Mapping[str, Sequence[int]], **given: Any
) -> Part:
    """Perplexity after `steps` steps along axes, which are named as `run_of`'s arguments behind any first word.

    Contexts that lack the position asked for are left out.
    """
    cells = [cell for cell in product(*axes.values(), range(s.seeds)) if "target" not in axes or -cell[1] <= cell[0]]
    names = [axis.rpartition("_")[2] for axis in axes]
    runs = [run_of(s, seed, **given, **dict(zip(names, place, strict=True))) for *place, seed in cells]
    relative = _ends(s, work, label, runs, s.steps)
    values = 1 + s.vocabulary * relative if variable == "blind_perplexity" else relative
    return Part((*axes, "seed"), {variable: Measure(text)}, each(cells, **{variable: values}))


def _rates(s: Settings, work: Work) -> list[Part]:
    """Longer training at several learning rates, constant or falling; loss curves and their spikes."""
    cells = list(product(s.rate_vocabularies, s.rates, SCHEDULES, range(s.seeds)))
    if not cells:
        return []
    runs = [run_of(s, seed, vocabulary=v, learning_rate=rate, schedule=schedule) for v, rate, schedule, seed in cells]
    trained = work.train("rates", runs, s.rate_steps)
    ends = _bin_ends(s.rate_steps, s.rate_points)
    starts = np.concatenate([[0], ends[:-1]])
    means, counts = [], []
    for model in trained:
        losses = model.losses.double().numpy()
        means.append(np.add.reduceat(losses, starts) / np.diff(np.append(starts, len(losses))))
        at = spikes(losses, model.run.architecture.outputs)
        counts.append(np.bincount(np.searchsorted(ends, at, side="right"), minlength=len(ends)))
    measures = {
        "rate_loss": Measure("training loss, mean of the steps up to this one", "nat", ("rate_step",), np.float32),
        "spikes": Measure("loss spikes that begin in the steps up to this one", "1", ("rate_step",), np.int16),
        "rate_relative": Measure(f"(perplexity - 1) / V after {s.rate_steps} steps"),
    }
    relative = relative_perplexity(trained, s.test)
    found = each(cells, rate_loss=means, spikes=counts, rate_relative=relative)
    return [Part(("rate_vocabulary", "learning_rate", "schedule", "seed"), measures, found)]


def _variants(s: Settings) -> list[Switch]:
    return [Switch(*v) for v in product(SWITCH, SWITCH)] if s.variants else [Switch(s.residual, s.projection)]


def _ends(s: Settings, work: Work, label: str, runs: Sequence[Run], steps: int) -> Float[np.ndarray, " model"]:
    """Train, and give relative perplexities after the last step; no runs are no training."""
    return relative_perplexity(work.train(label, runs, steps), s.test) if runs else np.empty(0)


def run_of(s: Settings, seed: int, **given: Any) -> Run:
    """A model and its training; what is not given is as in the settings, with learned positions, -2 asked for."""
    named = ("vocabulary", "context", "width", "residual", "projection", "learning_rate", "batch")
    usual = {name: getattr(s, name) for name in named}
    one = usual | {"positional": "learned", "schedule": "constant", "target": -2} | given
    architecture = Architecture(
        blocks=1,
        width=one["width"],
        length=one["context"],
        vocabulary=one["vocabulary"],
        outputs=one["vocabulary"],
        positional=one["positional"],
        residual=one["residual"] == "on",
        output_projection=one["projection"] == "on",
    )
    task = Copying(one["vocabulary"], one["context"], one["target"], one["batch"])
    return Run(architecture, task, seed=seed, learning_rate=one["learning_rate"], schedule=one["schedule"])


def relative_perplexity(models: Sequence[Trained], test: int, *, at: int | None = None) -> Float[np.ndarray, " model"]:
    """(perplexity - 1) / V of each model over `test` fresh sequences, which models of one task share, in float64.

    `at`: with the weights that were kept at that step instead of the last.
    """
    total = np.zeros(len(models))
    for some, said, _, right in _answered(models, test, at):
        total[some] += _losses(said, right).sum(-1).numpy()
    return np.expm1(total / test) / [cast(Copying, model.run.task).vocabulary for model in models]


def picked(models: Sequence[Trained], test: int) -> Float[np.ndarray, " model"]:
    """Of each model: the share of `test` fresh sequences in which the right token is picked (`rightly_picked`)."""
    total = np.zeros(len(models))
    for some, said, ids, right in _answered(models, test):
        total[some] += rightly_picked(said, ids, right).sum(-1).numpy()
    return total / test


def rightly_picked(
    logits: Float[Tensor, "model batch outputs"], inputs: Int[Tensor, "batch T"], answers: Int[Tensor, " batch"]
) -> Bool[Tensor, "model batch"]:
    """Whether no token of its sequence has a larger logit than the right one.

    It tells order from vocabulary. A model that takes the right token for its neighbour on a circle still picks it from the
    sequence. A reader blind to order, who knows the last token alone, picks one of the `T - 1` before it by chance.
    """
    own = logits.gather(-1, inputs.expand(len(logits), -1, -1)).amax(-1)
    return logits.gather(-1, answers.expand(len(logits), -1)[..., None])[..., 0] >= own


def _answered(
    models: Sequence[Trained], test: int, at: int | None = None
) -> Iterator[tuple[list[int], Float[Tensor, "model batch outputs"], Int[Tensor, "batch T"], Int[Tensor, " batch"]]]:
    """Batch by batch: indices of models, their logits in float64, the sequences and the answers."""
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
            for ids, right in zip(inputs.split(CHUNK), answers.split(CHUNK), strict=True):
                with torch.no_grad():
                    yield some, forward(shape, weights, switches, ids.expand(len(some), *ids.shape)), ids, right


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


def _log_grid(steps: int, points: int) -> np.ndarray:
    """0 and about `points` whole numbers to `steps`, each a like factor after the other."""
    return np.unique(np.concatenate([[0], np.geomspace(1, steps, points).round()])).astype(int)


def _bin_ends(steps: int, points: int) -> np.ndarray:
    return np.unique(np.linspace(0, steps, points + 1).round()).astype(int)[1:]
