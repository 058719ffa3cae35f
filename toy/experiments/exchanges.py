"""Tokens on a circle that change places while a previous-token head is trained [Liu-4].

The task and the model are those of `previous_token`, with 100 tokens in two dimensions. There the rows of the unembedding
come to lie on a circle: a linear readout names a token where that token's row is the furthest one out, so that all rows have
to be corners of one convex line. What moves along it has to pass its neighbours. The post shows the embeddings instead;
their circle is looked at, too, and their exchanges are counted. As they lie on no circle, two angles can cross while the
embeddings are apart.

Weights are kept every few steps. Of each kept step:

- circles and exchanges, as `circles` defines them; all but their number is told of exchanges in the unembedding;
- losses are those of fresh sequences, the same at every step, so that what moves is the model.

What exchanges have to do with the loss is told from `SETTLED` of the training on, where circles are there. Chance is what
the same exchanges give at other times: all dates moved together by a random shift, around the end, which keeps their bursts.
It is the baseline of the loss at exchanges, and of the share of exchanges that stand near a spike.
"""

from __future__ import annotations

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
from scipy.ndimage import median_filter

from probes.charts import BLUE, GREY, VERMILLION, Series, curves, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.errors import InputError
from probes.measure import Headline
from probes.results.tables import Table

from ..model import Switches, forward
from ..train import Run, Trained, seed_of
from . import previous_token, settings
from .circles import Exchange, circle, exchanges, passing
from .copied import TEST_BLOCK, picked, spikes
from .experiment import Work
from .in_context import stacked_on
from .previous_token import SCHEDULES, SWITCH, WEIGHTS
from .reading import OVER_RUNS, changes, courses, judge, learnt, over, setting, state, tables_of, under
from .sweep import Cells, Measure, Part, axes, sweep

TABLES = ("embedding", "unembedding")
SETTLED = 0.2  # of the training
REACH = 100  # steps before and after an exchange that are looked at
NEAR = 50  # steps from the beginning of a spike
WINDOW = 400  # steps of the running median of the loss, against which it is high or low
AT_ONCE = 16  # kept steps evaluated in one pass
DIMS = ("residual", "learning_rate", "schedule", "seed")


@dataclass(frozen=True)
class Settings(settings.Settings):
    """The post's V = 100, C = 4, width 2 at its two learning rates; seeds, schedules and switches are ours."""

    LEAST: ClassVar = {"vocabulary": 4, "steps": 4 * REACH}
    CHOICES: ClassVar = {"residual": SWITCH}
    vocabulary: int = 100
    context: int = 4
    learning_rate: tuple[float, ...] = (0.01, 0.1)
    schedule: tuple[str, ...] = SCHEDULES
    residual: tuple[str, ...] = SWITCH
    seeds: int = 5
    steps: int = 10_000
    every: int = 5  # steps between kept weights
    points: int = 100  # of the curves over training
    batch: int = 128
    test: int = 2048  # fresh sequences
    shifts: int = 500  # of chance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every * self.points > self.steps:
            raise InputError(
                f"points={self.points} are too many for steps={self.steps}; give at most {self.steps // self.every}"
            )
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


QUICK = Settings(learning_rate=(0.1,), residual=("off",), seeds=2, steps=3000, points=60, test=512, shifts=100)


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train all models and follow their tokens.

    Returns:
        Over `DIMS` what `measures` below lists; points are steps of curves, lags steps from an exchange. What is told of
        spikes and chance is from `SETTLED` of the training on; `frames`: the exchange that cost one model's tokens most.
    """
    kept = np.arange(0, s.steps + 1, s.every)
    lags = np.arange(-(REACH // s.every), REACH // s.every + 1) * s.every
    points = kept[np.linspace(0, len(kept) - 1, s.points + 1).round().astype(int)][1:]
    coords: dict[str, Any] = axes(s, *DIMS) | {
        "table": list(TABLES),
        "point": (("point",), points, {"long_name": "updates of the weights", "units": "1"}),
        "who": ["the two", "others"],
        "lag": (("lag",), lags, {"long_name": "steps from the exchange", "units": "1"}),
        "frame": (("frame",), lags, {"long_name": "steps from the exchange", "units": "1"}),
        "token": np.arange(s.vocabulary),
        "axis": [0, 1],
        "side": ["one", "other"],
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
        "excess": Measure("loss over its running median at exchanges", "nat"),
        "excess_chance": Measure("the same at shifted times, mean", "nat"),
        "excess_scatter": Measure("the same at shifted times, deviation", "nat"),
        "passing": Measure("loss by token around exchanges", "nat", ("who", "lag"), single),
    }
    frames = {
        "frame_rows": Measure("unembedding around one exchange", "1", ("frame", "token", "axis"), single),
        "frame_loss": Measure("loss of its two tokens", "nat", ("frame",), single),
        "frame_step": Measure("updates of the weights", "1", ("frame",), np.int32),
        "frame_pair": Measure("the two tokens", "1", ("side",), np.int32),
    }
    seen: list[Any] = []
    found = Part(DIMS, measures, _followed(s, kept, points, lags, work, seen))
    return sweep(coords, found, Part((), frames, seen), attrs={"task": "previous token", "width": 2})


def _followed(
    s: Settings, kept: np.ndarray, points: np.ndarray, lags: np.ndarray, work: Work, seen: list[Any]
) -> Cells:
    """Model by model; the frames of the first seed at the last rate and the first schedule go into `seen`."""
    runs, index, late = s.runs(), np.searchsorted(kept, points), SETTLED * s.steps
    trained = work.train("exchanges", runs, s.steps, record=kept.tolist(), recorded=WEIGHTS)
    shown = (s.residual[0], s.learning_rate[-1], s.schedule[0], 0)
    for n, (cell, model) in enumerate(zip(s.cells(), trained, strict=True)):
        tables = {name: _rows(model, name, kept) for name in TABLES}
        roundness, spread, angles = zip(*(circle(rows) for rows in tables.values()), strict=True)
        counted = [exchanges(of_table) for of_table in angles]
        settled = [[exchange for exchange in of_table if kept[exchange.at] >= late] for of_table in counted]
        by_token, right = on_fresh(model, kept, s.test)
        loss = by_token.mean(1)
        around, costs = passing(settled[1], by_token, lags // s.every)
        chance = np.random.default_rng(seed_of(cell[-1], TEST_BLOCK))
        yield (
            cell,
            {
                "roundness": np.stack(roundness)[:, index],
                "gap_spread": np.stack(spread)[:, index],
                "exchanges": np.histogram([exchange.at for exchange in counted[1]], [-1, *index])[0],
                "loss": loss[index],
                "picked": right[index],
                "rate": [len(of_table) / ((1 - SETTLED) * s.steps) * 1000 for of_table in settled],
                "passing": around,
                **_beside(settled[1], loss, model, kept, s, chance),
            },
        )
        if cell == shown and np.isfinite(costs).any():
            most = settled[1][int(np.nanargmax(costs))]
            frames = most.at + lags // s.every
            frame_loss = by_token[frames][:, [most.one, most.other]].mean(1)
            values = (tables["unembedding"][frames], frame_loss, kept[frames], most[1:])
            seen.append(((), dict(zip(("frame_rows", "frame_loss", "frame_step", "frame_pair"), values, strict=True))))
        work.advance("circles", float(n + 1), float(len(runs)))


def _rows(model: Trained, name: str, kept: np.ndarray) -> Float[np.ndarray, "step token axis"]:
    tables = torch.stack([model.recorded[int(step)][name] for step in kept]).double().numpy()
    return tables.swapaxes(1, 2) if name == "unembedding" else tables


def on_fresh(
    model: Trained, kept: np.ndarray, test: int
) -> tuple[Float[np.ndarray, "step token"], Float[np.ndarray, " step"]]:
    """After every kept step, on fresh sequences: the mean loss where each token is the answer, in nats, and `picked`."""
    run: Any = model.run
    drawn = run.task.draw(None, torch.Generator().manual_seed(seed_of(0, TEST_BLOCK)), -(-test // run.task.batch))
    inputs, answers = drawn.inputs.flatten(0, 1)[:test], run.task.answers(drawn).flatten()[:test]
    share = torch.nn.functional.one_hot(answers, run.task.vocabulary).double()
    share /= share.sum(0).clamp(min=1)  # a token that nobody asks for has a loss of 0
    losses, picks = [], []
    for some in np.array_split(kept, -(-len(kept) // AT_ONCE)):
        weights = stacked_on([model.recorded[int(step)] for step in some], torch.device("cpu"))
        switches = Switches.of([run.architecture] * len(some))
        with torch.no_grad():
            logits = forward(run.architecture, weights, switches, inputs.expand(len(some), *inputs.shape))
            right = -logits.log_softmax(-1).gather(-1, answers.expand(len(some), -1)[..., None])[..., 0]
        losses.append((right.double() @ share).numpy())
        picks.append(picked(logits, inputs, answers).double().mean(-1).numpy())
    return np.concatenate(losses), np.concatenate(picks)


def _beside(
    found: Sequence[Exchange],
    loss: Float[np.ndarray, " step"],
    model: Trained,
    kept: np.ndarray,
    s: Settings,
    generator: np.random.Generator,
) -> dict[str, float]:
    """What settled exchanges have to do with the loss; without any, the number of spikes alone."""
    first = int(np.searchsorted(kept, SETTLED * s.steps))
    begun = [at for at in spikes(model.losses.double().numpy(), s.vocabulary) if at >= SETTLED * s.steps]
    told: dict[str, float] = {"spikes": len(begun)}
    if not found:
        return told
    dates = np.array([one.at for one in found])
    near = np.zeros(len(kept))
    for step in begun:
        near[np.abs(kept - step) <= NEAR] = 1
    high = loss - median_filter(loss, WINDOW // s.every + 1, mode="nearest")
    span = len(kept) - first
    shifts = generator.integers(span, size=s.shifts)
    shifted = first + (dates - first + shifts[:, None]) % span
    chance = high[shifted].mean(1)
    told |= {"excess": high[dates].mean(), "excess_chance": chance.mean(), "excess_scatter": chance.std()}
    return told | {"spiked": near[dates].mean(), "spiked_chance": near[shifted].mean()}


# -- what a result says

ROUND = 0.1  # roundness of what counts as a circle, ours
FAST, VOCABULARY = 0.1, 100
AT_END = f"after {SETTLED:.0%} of the training"


def end(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A curve's end."""
    return ds[name].isel(point=-1, drop=True)


def cost(ds: xr.Dataset) -> xr.DataArray:
    """What the two tokens lose on the day of their exchange, over the outer half of the window, nats."""
    two = ds["passing"].sel(who="the two", drop=True)
    return two.sel(lag=0, drop=True) - two.where(abs(two["lag"]) > two["lag"].max() / 2).mean("lag")


RADIUS = Headline("deviation of the radius over its mean at the end", lambda ds: end(ds, "roundness"))
GAPS = Headline("deviation of neighbours' angles over their mean at the end", lambda ds: end(ds, "gap_spread"))
RATE = Headline(f"exchanges per 1,000 steps {AT_END}", lambda ds: ds["rate"])
SPIKED = Headline(
    f"in runs with spikes, the share of exchanges within {NEAR} steps of a spike's beginning less that at shifted times",
    lambda ds: (ds["spiked"] - ds["spiked_chance"]).where(ds["spikes"] > 0),
    form="+.3f",
)
HEADLINES = (
    *(RADIUS, GAPS, RATE, SPIKED),
    Headline("loss at the end, nats", lambda ds: end(ds, "loss")),
    Headline("right of its own tokens", lambda ds: end(ds, "picked")),
    Headline(f"spikes {AT_END}", lambda ds: ds["spikes"]),
    Headline("loss at exchanges over its running median, nats", lambda ds: ds["excess"]),
    Headline("the same at shifted times", lambda ds: ds["excess_chance"]),
    Headline("cost of an exchange to its two tokens, nats", cost, form="+.3f"),
)


def tables(ds: xr.Dataset) -> list[Table]:
    """The circles, and what exchanges have to do with the loss."""
    return tables_of(HEADLINES, ds)


COLORS = {"constant": VERMILLION, "cosine": BLUE}
CAPTION = (
    "Residual stream {}, learning rate {:g}: medians of {} seeds, and their range. Radius of the embedding: dotted."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Circles and exchanges over training, and the loss around an exchange, at the last learning rate; one exchange."""
    residual, rate = str(ds["residual"].values[0]), float(ds["learning_rate"].values[-1])
    of = ds.sel(residual=residual, learning_rate=rate)
    figure, cells = sheet(2, 2, caption=CAPTION.format(residual, rate, ds.sizes["seed"]))
    schedules = [str(name) for name in ds["schedule"].values]
    colors = [COLORS[name] for name in schedules]

    def draw(cell: Axes, values: xr.DataArray, along: str, name: str = "{}", line: str = "-") -> None:
        names = {schedule: name.format(schedule) for schedule in schedules}
        courses(cell, values, along, "schedule", names, colors=colors, line=line)

    for table, name, line in (("embedding", "", ":"), ("unembedding", "{} rate", "-")):
        draw(cells[0, 0], of["roundness"].sel(table=table), "point", name, line)
    between = xr.DataArray(np.diff(ds["point"], prepend=0), dims="point")
    draw(cells[0, 1], (of["exchanges"] * 1000 / between).isel(point=slice(1, None)), "point", "{} rate")
    for who, line in (("the two", "-"), ("others", ":")):
        draw(cells[1, 0], of["passing"].sel(who=who), "lag", f"{who}, {{}}", line)
    cells[0, 0].set(xlabel="step", ylabel="radius: deviation / mean", ylim=(0, 1.5))
    cells[0, 1].set(xlabel="step", ylabel="exchanges per 1,000 steps")
    cells[0, 1].set_yscale("symlog", linthresh=10)
    cells[1, 0].set(xlabel="steps from the exchange", ylabel="loss by token (nat)")
    if "frame_rows" in ds:
        _exchange(cells[1, 1], ds)
    else:
        cells[1, 1].set_axis_off()
    return {"": figure}


def _exchange(cell: Axes, ds: xr.Dataset) -> None:
    """The unembedding's rows, and the paths of two tokens around the exchange that cost them most."""
    rows, steps = ds["frame_rows"].values, ds["frame_step"].values
    curves(cell, [Series("other tokens", rows[-1, :, 1], GREY, x=rows[-1, :, 0], line="", marker=".")])
    for token, color in zip(ds["frame_pair"].values.tolist(), (VERMILLION, BLUE), strict=True):
        path = rows[:, token]
        curves(cell, [Series("", path[:, 1], color, x=path[:, 0], width=0.8)])
        curves(cell, [Series(f"token {token}", path[-1:, 1], color, x=path[-1:, 0], line="")])
    cell.set(xlabel=f"unembedding, steps {steps[0]:,} to {steps[-1]:,}", xticks=[], yticks=[], aspect="equal")


# -- statements, at the post's learning rate with spikes: 0.1, constant

liu: Any = Source("[Liu-4]", "liu4-exchanges")
TASK = "In the previous-token task (V = 100, C = 4, width 2)"
CONSTANT = {"learning_rate": FAST, "schedule": "constant"}
BOTH = f"{OVER_RUNS}, with and without residual stream"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged in every setting whose toys know the order of their tokens."""
    if setting(ds, "vocabulary") != VOCABULARY:
        ds = ds.isel(learning_rate=slice(0))
    return judge(liu, ds, learnt(ds, end(ds, "picked")))


# The source speaks of the embeddings; the rows of the unembedding are what a linear readout has to set apart.
for _suffix, _kind, _words, _table in (
    ("-unembedding", "ours", "rows of the unembedding", "unembedding"),
    ("", "published", "token embeddings", "embedding"),
):
    _at, _circle = CONSTANT | {"table": _table}, "circle" if _suffix else "circle-of-embeddings"
    _ours = f"{BOTH}; the threshold is ours"
    state(liu, _circle, f"{TASK} the {_words} lie on a circle.", RADIUS, under(ROUND), _at, by=_ours, kind=_kind)
    _move = f"{TASK} {_words} change places at learning rate 0.1."
    state(liu, f"change-places{_suffix}", _move, RATE, over(0), _at, by=BOTH, kind=_kind)
state(liu, "at-spikes", f"{TASK} the loss spikes where tokens change places.", SPIKED, over(0), CONSTANT, by=BOTH)


_rates: Any = [{"schedule": _schedule} for _schedule in ("constant", "cosine")]
_at = {"table": "unembedding", "learning_rate": FAST}
for _name, _of, _words in (
    ("decay-fewer-exchanges", RATE, "keeps tokens from changing places"),
    ("decay-more-even", GAPS, "lets tokens come to even distances on their circle"),
):
    changes(liu, _name, f"{TASK} learning rate decay {_words}.", _of, _rates[0], _rates[1], under(0), _at)
