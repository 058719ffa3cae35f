"""Tokens on a circle that change places while a previous-token head is trained [Liu-4].

What is measured stands in `docs/probes/match.md`. As embeddings lie on no circle, two of their angles can cross while they
are apart: all but the number of exchanges is told of those in the unembedding, from `SETTLED` of the training on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.charts import BLUE, VERMILLION, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.measure import Headline

from .. import checks
from ..train import Run, Trained
from . import previous_token
from .copied import at_step, fresh, scored, spikes
from .experiment import Work
from .previous_token import ASKED, SWITCH, WEIGHTS, separation
from .reading import OVER_RUNS, change, courses, judge, learnt, lies, need, no_more, over, setting, state, under
from .sweep import Cells, Measure, Part, axes, sweep

TABLES = ("embedding", "unembedding")
SETTLED = 0.2  # of the training
NEAR = 50  # steps from the beginning of a spike
POINTS = 100  # of the curves over training
DIMS = ("residual", "learning_rate", "schedule", "seed")


@dataclass(frozen=True)
class Settings(checks.Settings):
    """The post's V = 100, C = 4, width 2 at its two learning rates; seeds, schedules and switches are ours."""

    LEAST: ClassVar = {"vocabulary": 4, "steps": 100}
    CHOICES: ClassVar = {"residual": SWITCH}
    vocabulary: int = 100
    context: int = 4
    learning_rate: tuple[float, ...] = (0.01, 0.1)
    schedule: tuple[str, ...] = ("constant", "cosine")
    residual: tuple[str, ...] = SWITCH
    seeds: int = 10
    steps: int = 10_000
    every: int = 5  # steps between kept weights
    batch: int = 128
    test: int = 2048  # fresh sequences

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runs()

    def cells(self) -> list[tuple[Any, ...]]:
        """All models, as values of `DIMS`."""
        return list(product(self.residual, self.learning_rate, self.schedule, range(self.seeds)))

    def runs(self) -> list[Run]:
        """The training of every cell."""
        plain = previous_token.Settings(vocabulary=self.vocabulary, context=self.context, batch=self.batch)
        return [
            previous_token.run_of(plain, seed, residual=residual, learning_rate=rate, schedule=schedule)
            for residual, rate, schedule, seed in self.cells()
        ]


QUICK = Settings(learning_rate=(0.1,), residual=("off",), seeds=2, steps=3000, test=512)


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train all models and follow their tokens.

    Returns:
        Over `DIMS` what `measures` below lists; points are steps of curves. What is told of spikes and chance is from
        `SETTLED` of the training on.
    """
    kept = np.arange(0, s.steps + 1, s.every)
    points = np.unique(np.linspace(0, len(kept) - 1, POINTS + 1).round().astype(int))[1:]
    coords: dict[str, Any] = axes(s, *DIMS) | {
        "table": list(TABLES),
        "who": ["the two", "others"],
        "token": np.arange(s.vocabulary),
        "point": (("point",), kept[points], {"long_name": "updates of the weights", "units": "1"}),
    }
    single = np.float32
    measures = {
        "roundness": Measure("deviation of the radius over its mean", "1", ("table", "point"), single),
        "gap_spread": Measure("deviation of neighbours' angles over their mean", "1", ("table", "point"), single),
        "exchanges": Measure("exchanges since the point before", "1", ("point",), np.int32),
        "loss": Measure("loss on fresh sequences", "nat", ("point",), single),
        "picked": Measure("share of right answers among the tokens of the sequence", "1", ("point",), single),
        "rate": Measure("exchanges per 1,000 steps", dims=("table",)),
        "spikes": Measure("loss spikes", dtype=np.int32),
        "spiked": Measure(f"share of exchanges within {NEAR} steps of a spike's beginning"),
        "spiked_chance": Measure("the same at shifted times, mean"),
        "wrong": Measure(
            "at exchanges near spikes: sequences about these tokens with a loss above log V", dims=("who",)
        ),
        "parted": Measure("least of -s p_-1 and s p of the other positions at the end"),
        "order": Measure("the unembedding's tokens by angle, at the end", dims=("token",), dtype=np.int16),
    }
    return sweep(coords, Part(DIMS, measures, _followed(s, kept, points, work)))


def _followed(s: Settings, kept: np.ndarray, points: np.ndarray, work: Work) -> Cells:
    """Model by model."""
    runs, late = s.runs(), SETTLED * s.steps
    trained = work.train("exchanges", runs, s.steps, record=kept.tolist(), recorded=WEIGHTS)
    for n, (cell, model) in enumerate(zip(s.cells(), trained, strict=True)):
        roundness, spread, angles = zip(*(circle(_rows(model, name, kept)) for name in TABLES), strict=True)
        found = [exchanges(of_table) for of_table in angles]
        counted = [of_table[:, 0] for of_table in found]
        settled = [of_table[kept[of_table] >= late] for of_table in counted]
        losses, picks = scored([at_step(model, step) for step in kept[points].tolist()], s.test)
        begun = [at for at in spikes(model.losses.double().numpy(), s.vocabulary) if at >= late]
        near: np.ndarray = np.any(abs(kept[:, None] - np.array(begun)) <= NEAR, axis=1)
        measured = {
            "roundness": np.stack(roundness)[:, points],
            "gap_spread": np.stack(spread)[:, points],
            "exchanges": np.histogram(counted[1], [-1, *points])[0],
            "loss": losses.mean(1),
            "picked": picks.mean(1),
            "rate": [len(of_table) / ((1 - SETTLED) * s.steps) * 1000 for of_table in settled],
            "spikes": len(begun),
            "spiked": near[settled[1]].mean() if len(settled[1]) else np.nan,
            "spiked_chance": near[kept >= late].mean(),
            "wrong": wrong(model, kept, found[1][near[counted[1]]], s.test),
            "parted": parted(model.weights["positions"].double().numpy()),
            "order": np.argsort(angles[1][-1]),
        }
        yield cell, measured
        work.advance("circles", float(n + 1), float(len(runs)))


def _rows(model: Trained, name: str, kept: np.ndarray) -> Float[np.ndarray, "step token axis"]:
    tables = torch.stack([model.recorded[int(step)][name] for step in kept]).double().numpy()
    return tables.swapaxes(1, 2) if name == "unembedding" else tables


def circle(
    rows: Float[np.ndarray, "step token axis"],
) -> tuple[Float[np.ndarray, " step"], Float[np.ndarray, " step"], Float[np.ndarray, "step token"]]:
    """(roundness, spread of gaps, angles about the centre) of the circle fitted to the points of each step."""
    fit = np.concatenate([2 * rows, np.ones_like(rows[..., :1])], -1)
    centre = (np.linalg.pinv(fit) @ np.square(rows).sum(-1)[..., None])[:, None, :2, 0]
    off = rows - centre
    radius, angles = np.hypot(off[..., 0], off[..., 1]), np.arctan2(off[..., 1], off[..., 0])
    order = np.sort(angles, 1)
    gaps = np.diff(np.concatenate([order, order[:, :1] + 2 * np.pi], 1), axis=1)
    return radius.std(1) / radius.mean(1), gaps.std(1) / gaps.mean(1), angles


def exchanges(angles: Float[np.ndarray, "step token"]) -> np.ndarray:
    """(step, one, other) of pairs that change places, in the order of the steps.

    By more than half a mean gap before and after, and not around the far side.
    """
    count = angles.shape[1]
    found = []
    for one in range(count - 1):
        ahead = angles[:, one, None] - angles[:, one + 1 :]
        ahead = (ahead + np.pi) % (2 * np.pi) - np.pi
        for other, lead in enumerate(ahead.T, start=one + 1):
            clear = np.flatnonzero(np.abs(lead) > np.pi / count)
            turned = np.flatnonzero(np.sign(lead[clear[1:]]) != np.sign(lead[clear[:-1]]))
            for before, after in zip(clear[turned], clear[turned + 1], strict=True):
                if max(abs(lead[before]), abs(lead[after])) < np.pi / 2:
                    found.append((int(before + after) // 2, one, other))
    return np.array(sorted(found), int).reshape(-1, 3)


def wrong(model: Trained, kept: np.ndarray, found: np.ndarray, test: int) -> Sequence[float]:
    """Of sequences about the two tokens of these exchanges, and about others, the share with a loss above log V.

    The right token then has less than one who knows nothing would give it: others are trusted. Mean over exchanges.
    """
    if not len(found):
        return [np.nan, np.nan]
    task: Any = model.run.task
    steps, answers = np.unique(found[:, 0]), fresh(task, test)[1].numpy()
    losses = scored([at_step(model, int(step)) for step in kept[steps]], test)[0]
    at = (losses > math.log(task.vocabulary))[np.searchsorted(steps, found[:, 0])]  # [exchange, sequence]
    two = (answers == found[:, 1:, None]).any(1)
    return [float(((at & who).sum(1) / np.maximum(who.sum(1), 1)).mean()) for who in (two, ~two)]


def parted(positions: Float[np.ndarray, "position axis"]) -> float:
    """Above 0 where the position asked for is negative along the separation direction s, and all others are positive."""
    along = positions @ separation(positions, ASKED)
    along[ASKED] *= -1
    return float(along.min())


# -- what a result says

ROUND = 0.1  # roundness of what counts as a circle, ours
ALIKE = 0.05  # of neighbours: orders that share no more of them than chance and this are random, ours
SLOW, FAST, VOCABULARY = 0.01, 0.1, 100
AT_END = f"after {SETTLED:.0%} of the training"


def end(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A curve's end."""
    return ds[name].isel(point=-1, drop=True)


def shared(ds: xr.Dataset) -> xr.DataArray:
    """How many more of a run's neighbours on the circle are neighbours in another seed's than chance gives; mean over seeds.

    Tokens of toys have no order of their own, and orders are compared up to turns and reflections.
    """
    order = ds["order"].transpose(*DIMS, "token")
    edges = np.sort(np.stack([order.values, np.roll(order.values, 1, -1)], -1), -1) @ [1000, 1]  # [..., seed, edge]
    seeds, count = edges.shape[-2:]
    need(seeds > 1)
    both = (edges[..., :, None, :, None] == edges[..., None, :, None, :]).sum((-1, -2)) / count  # [..., seed, seed]
    excess = (both.sum(-1) - 1) / (seeds - 1) - 2 / (count - 1)
    first = order.isel(token=0, drop=True)
    return first.copy(data=excess).where(first.notnull())


RADIUS = Headline("deviation of the radius over its mean at the end", lambda ds: end(ds, "roundness"))
GAPS = Headline("deviation of neighbours' angles over their mean at the end", lambda ds: end(ds, "gap_spread"))
RATE = Headline(f"exchanges per 1,000 steps {AT_END}", lambda ds: ds["rate"])
SPIKED = Headline(
    f"in runs with spikes, the share of exchanges within {NEAR} steps of a spike's beginning less that at shifted times",
    lambda ds: (ds["spiked"] - ds["spiked_chance"]).where(ds["spikes"] > 0),
    form="+.3f",
)
WRONG = Headline(
    "at exchanges near spikes, the share of sequences about the two tokens whose loss is above log V, what one who knows "
    "nothing has, less that of sequences about others",
    lambda ds: ds["wrong"].sel(who="the two") - ds["wrong"].sel(who="others"),
    form="+.3f",
)
PARTED = Headline(
    "the least of -s p_-1 and s p of the other positions at the end", lambda ds: ds["parted"], form="+.3f"
)
SHARED = Headline("the share of neighbours that other seeds have, too, less that of random orders, 2 / (V - 1)", shared)
HEADLINES = (
    *(RADIUS, GAPS, RATE, SPIKED, WRONG, PARTED, SHARED),
    Headline("loss at the end, nats", lambda ds: end(ds, "loss")),
    Headline("right of its own tokens", lambda ds: end(ds, "picked")),
    Headline(f"spikes {AT_END}", lambda ds: ds["spikes"]),
)


COLORS = {"constant": VERMILLION, "cosine": BLUE}
CAPTION = (
    "Residual stream {}, learning rate {:g}: medians of {} seeds, and their range. Radius of the embedding: dotted."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Circles and exchanges over training, at the last learning rate."""
    residual, rate = str(ds["residual"].values[0]), float(ds["learning_rate"].values[-1])
    of = ds.sel(residual=residual, learning_rate=rate)
    figure, cells = sheet(2, 1, caption=CAPTION.format(residual, rate, ds.sizes["seed"]))
    schedules = [str(name) for name in ds["schedule"].values]
    colors = [COLORS[name] for name in schedules]

    def draw(cell: Axes, values: xr.DataArray, along: str, name: str = "{}", line: str = "-") -> None:
        names = {schedule: name.format(schedule) for schedule in schedules}
        courses(cell, values, along, "schedule", names, colors=colors, line=line)

    for table, name, line in (("embedding", "", ":"), ("unembedding", "{} rate", "-")):
        draw(cells[0, 0], of["roundness"].sel(table=table), "point", name, line)
    between = xr.DataArray(np.diff(ds["point"], prepend=0), dims="point")
    draw(cells[1, 0], (of["exchanges"] * 1000 / between).isel(point=slice(1, None)), "point", "{} rate")
    cells[0, 0].set(xlabel="step", ylabel="radius: deviation / mean", ylim=(0, 1.5))
    cells[1, 0].set(xlabel="step", ylabel="exchanges per 1,000 steps")
    cells[1, 0].set_yscale("symlog", linthresh=10)
    return {"": figure}


# -- statements, at the post's two learning rates: 0.01, and 0.1, which has spikes

liu: Any = Source("[Liu-4]", "liu4-exchanges")
TASK = "In the previous-token task (V = 100, C = 4, width 2)"
CONSTANT = {"learning_rate": FAST, "schedule": "constant"}
BOTH = f"{OVER_RUNS}, with and without residual stream"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged in every setting whose toys know the order of their tokens."""
    if setting(ds, "vocabulary") != VOCABULARY:
        ds = ds.isel(learning_rate=slice(0))
    return judge(liu, ds, learnt(ds, end(ds, "picked")))


# The source shows embeddings, whose basis is free: attention undoes any linear map, so that a circle may be an ellipse.
# The rows of the unembedding are what a linear readout has to set apart.
_at = {"learning_rate": SLOW, "schedule": "constant", "table": "unembedding"}
_ours = f"{BOTH}; of the rows of the unembedding, at the learning rate without spikes; the threshold is ours"
state(liu, "circle", f"{TASK} the tokens lie on a circle.", lies(RADIUS, under(ROUND), _at, _ours))
_move, _by = f"{TASK} tokens change places at learning rate 0.1.", f"{BOTH}, by embedding and by unembedding"
state(liu, "change-places", _move, lies(RATE, over(0), CONSTANT, _by))
state(liu, "at-spikes", f"{TASK} the loss spikes where tokens change places.", lies(SPIKED, over(0), CONSTANT, BOTH))


_text = f"{TASK} at a spike the tokens that change places are confidently wrong."
state(liu, "confidently-wrong", _text, lies(WRONG, over(0), CONSTANT, BOTH))
_text = f"{TASK} at learning rate 0.1, too, the position asked for, p_-1, is negative along the separation direction s, and "
_text += "p_0, p_-2, p_-3 are positive."
state(liu, "separation", _text, lies(PARTED, over(0), CONSTANT, BOTH))
_at, _text = {"schedule": "constant"}, f"{TASK} the order of tokens on the circle is random."
state(liu, "order-random", _text, lies(SHARED, no_more(ALIKE), _at, f"{BOTH}; of the rows of the unembedding"))


_rates: Any = [{"schedule": _schedule} for _schedule in ("constant", "cosine")]
_at = {"table": "unembedding", "learning_rate": FAST}
for _name, _of, _words in (
    ("decay-fewer-exchanges", RATE, "keeps tokens from changing places"),
    ("decay-more-even", GAPS, "lets tokens come to even distances on their circle"),
):
    state(liu, _name, f"{TASK} learning rate decay {_words}.", lies(change(_of, *_rates), under(0), _at))
