"""A head that finds the token before the last: what training it takes, and how the embeddings get there [Liu-4].

Random tokens `[A][B][C][D]`; the model has to name `[C]` (`tasks.Copying`, target -2). The model of the post embeds tokens,
adds a learned vector per position, has one attention layer and unembeds. The post does not say whether the attention layer
adds to a residual stream or has an output projection, so all four variants are trained; what the statements are about is
`MAIN`. Relative perplexities are those of `copied`.

The separation direction s is the unit vector with the largest margin `min_j s . (p_j - p_t)` between the position asked
for and the others: the point nearest to the origin of the hull of all `p_j - p_t`, if the origin lies outside. p_t is on
its negative side. Logits are `x_query W_Q W_K^T x_key / sqrt(d)`; the query's own p is on the positive side, so that
`s W_Q W_K^T s < 0` gives p_t the largest logit. The post's -1.1 is this with its s = (1, 1), of length sqrt(2); the unit
vector gives half of it. Positions have no zero of their own, since one vector added to every p and taken off every token
embedding changes no number; signs along s are hence counted both as they are and with the mean token embedding added to p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.optimize import nnls

from probes.errors import InputError

from ...model import Architecture, PositionalSwitch
from ...tasks import Copying
from ...train import Run, Schedule
from .. import settings
from ..copied import evaluated, spikes
from ..experiment import Work
from ..sweep import Measure, Part, filled, sweep
from .statements import MAIN, PUBLISHED, SWITCH
from .statements import charts as charts
from .statements import claims as claims
from .statements import tables as tables

VARIANTS = [dict(zip(MAIN, switches, strict=True)) for switches in product(SWITCH, SWITCH)]
POSITIONAL: tuple[PositionalSwitch, ...] = ("none", "learned")
SCHEDULES: tuple[Schedule, ...] = ("constant", "cosine")
WEIGHTS = ("embedding", "positions", "0.q", "0.k", "0.v", "0.o", "unembedding")
ASKED = -2  # the token's place from the end


@dataclass(frozen=True)
class Settings(settings.Settings):
    """Sizes of everything that is trained; the first parts are [Liu-4]'s, offsets and seeds are ours."""

    LEAST: ClassVar = {
        **dict.fromkeys(("steps", "points"), 2),
        **dict.fromkeys(("vocabulary", "context", "grid_vocabularies", "grid_contexts", "rate_vocabularies"), 3),
        "offset_contexts": 3,
    }
    vocabulary: int = 30
    context: int = 4
    width: int = 2
    steps: int = 3000
    seeds: int = 5
    batch: int = 128  # which the post does not say
    learning_rate: float = 0.01
    batches: tuple[int, ...] = (
        128,
        512,
    )  # of the published perplexities; those beyond `batch` of context 4 and width 2
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
        super().__post_init__()
        if self.rate_steps < self.rate_points:
            raise InputError(
                f"rate_steps={self.rate_steps} are fewer than rate_points={self.rate_points}; give at least as many"
            )


QUICK = Settings(
    seeds=2,
    grid_vocabularies=(30,),
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


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train and evaluate everything; the variables' own names say what they mean."""
    coords: dict[str, Any] = {
        "positional": list(POSITIONAL),
        **{name: list(SWITCH) for name in MAIN},
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
        "target": list(range(-max(s.offset_contexts), -1)),
    }
    grid = {name: coords[name] for name in ("vocabulary", "context", "width")}
    offsets = {name: coords[name] for name in ("offset_context", "target")}
    after = f"(perplexity - 1) / V after {s.steps} steps"
    blind = f"perplexity without positional encoding after {s.steps} steps"
    return sweep(
        coords,
        *_curves(s, work),
        _cells(s, work),
        _grid(s, work, "grid", "relative_by_size", after, grid),
        _rates(s, work),
        _grid(s, work, "blind", "blind_perplexity", blind, {"blind_width": s.blind_widths}, positional="none"),
        _grid(s, work, "offsets", "relative_by_target", f"{after}, by the position asked for", offsets),
    )


def _curves(s: Settings, work: Work) -> list[Part]:
    """The published setting: perplexity curves without and with positions, and the paths of the embeddings."""
    steps = _log_grid(s.steps, s.points)
    models = [(*variant.values(), seed) for variant in VARIANTS for seed in range(s.seeds)]
    both = [(kind, *model) for kind in POSITIONAL for model in models]
    runs = [run_of(s, seed, positional=kind, residual=r, projection=p) for kind, r, p, seed in both]
    trained = work.train("curves", runs, s.steps, record=steps.tolist(), recorded=WEIGHTS)
    relative = np.stack([evaluated(trained, s.curve_test, at=int(step))[0] for step in steps], -1)

    def path(name: str) -> np.ndarray:  # [model, step, ...], of models with positions
        return np.stack([[of.recorded[int(step)][name].numpy() for step in steps] for of in trained[len(models) :]])

    positions = path("positions")
    form = path("0.q").astype(np.float64) @ path("0.k").astype(np.float64).swapaxes(-1, -2)
    directions, margins = separations(positions, s.context + ASKED)
    bilinear = np.einsum("...i,...ij,...j->...", directions, form, directions)
    dims, single = (*MAIN, "seed"), np.float32
    form_text = "W_Q W_K^T: logit = x_query W_Q W_K^T x_key / sqrt(width)"
    curves = {
        "perplexity": Measure("perplexity on fresh sequences", "1", ("step",)),
        "relative": Measure("(perplexity - 1) / V on fresh sequences", "1", ("step",)),
    }
    paths = {
        "positions": Measure("positional embedding, by place from the last", "1", ("step", "position", "axis"), single),
        "tokens": Measure("token embedding", "1", ("step", "token", "axis"), single),
        "query_key": Measure(form_text, "nat", ("step", "row", "column"), single),
        "separation": Measure("unit vector s of the largest margin", "1", ("step", "axis"), single),
        "margin": Measure("least s . (p_j - p_-1) over the other places", "1", ("step",), single),
        "bilinear": Measure("s W_Q W_K^T s", "nat", ("step",), single),
    }
    values = (positions, path("embedding"), form, directions, margins, bilinear)
    return [
        Part(("positional", *dims), curves, filled(both, perplexity=1 + s.vocabulary * relative, relative=relative)),
        Part(dims, paths, filled(models, **dict(zip(paths, values, strict=True)))),
    ]


def _cells(s: Settings, work: Work) -> Part:
    """The settings that the post has numbers for, in every variant and at several batch sizes; NaN where not trained.

    A short run's `steps` and `rate_steps` stand for the post's 3,000 and 10,000.
    """
    cells: list[tuple[Any, ...]] = []
    relative: list[float] = []
    for long, steps in ((False, s.steps), (True, s.rate_steps)):
        runs = []
        for batch, cell, variant, seed in product(s.batches, PUBLISHED, VARIANTS, range(s.seeds)):
            main = (cell.context, cell.width, variant) == (4, 2, MAIN)
            if (cell.steps > 3000) == long and (batch <= s.batch or main):
                fields = {name: getattr(cell, name) for name in ("vocabulary", "context", "width", "learning_rate")}
                runs.append(run_of(s, seed, batch=batch, **fields, **variant))
                cells.append((batch, cell.name, *variant.values(), seed))
        relative += _ends(s, work, f"cells {steps}", runs, steps).tolist()
    measures = {"relative_published": Measure("(perplexity - 1) / V in the post's settings")}
    return Part(("batch", "cell", *MAIN, "seed"), measures, filled(cells, relative_published=relative))


def _grid(
    s: Settings, work: Work, label: str, variable: str, text: str, axes: Mapping[str, Sequence[int]], **fixed: Any
) -> Part:
    """Perplexity after `steps` steps along axes, which are named as `run_of`'s arguments behind any first word.

    Contexts that lack the position asked for are left out.
    """
    cells = [cell for cell in product(*axes.values(), range(s.seeds)) if "target" not in axes or -cell[1] <= cell[0]]
    names = [axis.rpartition("_")[2] for axis in axes]
    runs = [run_of(s, seed, **fixed, **dict(zip(names, place, strict=True))) for *place, seed in cells]
    relative = _ends(s, work, label, runs, s.steps)
    values = 1 + s.vocabulary * relative if variable == "blind_perplexity" else relative
    return Part((*axes, "seed"), {variable: Measure(text)}, filled(cells, **{variable: values}))


def _rates(s: Settings, work: Work) -> Part:
    """Longer training at several learning rates, constant or falling; loss curves and their spikes."""
    cells = list(product(s.rate_vocabularies, s.rates, SCHEDULES, range(s.seeds)))
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
    values = filled(cells, rate_loss=means, spikes=counts, rate_relative=evaluated(trained, s.test)[0])
    return Part(("rate_vocabulary", "learning_rate", "schedule", "seed"), measures, values)


def _ends(s: Settings, work: Work, label: str, runs: Sequence[Run], steps: int) -> Float[np.ndarray, " model"]:
    """Train, and give relative perplexities after the last step."""
    return evaluated(work.train(label, runs, steps), s.test)[0]


def run_of(s: Settings, seed: int, **fields: Any) -> Run:
    """A model and its training; other fields than those of the settings, `MAIN`, learned positions and `ASKED`."""
    usual: dict[str, Any] = {
        name: getattr(s, name) for name in ("vocabulary", "context", "width", "learning_rate", "batch")
    }
    of: Any = usual | MAIN | {"positional": "learned", "schedule": "constant", "target": ASKED} | fields
    architecture = Architecture(
        blocks=1,
        width=of["width"],
        length=of["context"],
        vocabulary=of["vocabulary"],
        outputs=of["vocabulary"],
        positional=of["positional"],
        residual=of["residual"] == "on",
        output_projection=of["projection"] == "on",
    )
    task = Copying(of["vocabulary"], of["context"], of["target"], of["batch"])
    return Run(architecture, task, seed=seed, learning_rate=of["learning_rate"], schedule=of["schedule"])


def separations(
    positions: Float[np.ndarray, "*batch position axis"], asked: int
) -> tuple[Float[np.ndarray, "*batch axis"], Float[np.ndarray, "*batch"]]:
    """(s, margin) of every set of positions: s the unit vector of the largest `min_j s . (p_j - p_asked)`, which is margin.

    NaN where no direction separates: the origin lies in the hull of the differences. The hull's point that is nearest to
    the origin is found by Wolfe's trick: min |P^T w|^2 + (1 - sum w)^2 over w >= 0 has w proportional to the hull's own
    minimizer.
    """
    flat = positions.reshape(-1, *positions.shape[-2:]).astype(np.float64)
    values = np.full((len(flat), flat.shape[-1] + 1), np.nan)
    for n, p in enumerate(flat):
        points = np.delete(p, asked, 0) - p[asked]
        system = np.concatenate([points.T / (np.abs(points).max() or 1.0), np.ones((1, len(points)))])
        weights, _ = nnls(system, np.array([*[0.0] * points.shape[1], 1.0]))
        nearest = weights / weights.sum() @ points
        size = np.linalg.norm(nearest)
        if size > 1e-9 * np.abs(p).max():
            values[n] = [*(nearest / size), size]
    values = values.reshape(*positions.shape[:-2], -1)
    return values[..., :-1], values[..., -1]


def _log_grid(steps: int, points: int) -> np.ndarray:
    """0 and about `points` whole numbers to `steps`, each a like factor after the other."""
    return np.unique(np.concatenate([[0], np.geomspace(1, steps, points).round()])).astype(int)


def _bin_ends(steps: int, points: int) -> np.ndarray:
    return np.unique(np.linspace(0, steps, points + 1).round()).astype(int)[1:]
