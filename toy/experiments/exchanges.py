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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.ndimage import median_filter

from probes.charts import BLUE, GREY, VERMILLION, Series, curves, sheet
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import Test, above, below
from probes.errors import InputError
from probes.results.statistics import over_runs
from probes.results.tables import Table, number

from ..model import Switches, forward
from ..train import Trained, seed_of
from . import previous_token
from .circles import Exchange, circle, exchanges, passing
from .experiment import Work
from .in_context import stacked_on
from .learnt import in_order
from .previous_token import SCHEDULES, SWITCH, TEST_BLOCK, rightly_picked, spikes
from .rules import Judged, by_parts, judged, need, over_told, places, ranged, setting
from .sweep import Cells, Measure, Part, axes, each_at_least, each_distinct, sweep

TABLES = ("embedding", "unembedding")
SETTLED = 0.2  # of the training
REACH = 100  # steps before and after an exchange that are looked at
NEAR = 50  # steps from the beginning of a spike
WINDOW = 400  # steps of the running median of the loss, against which it is high or low
AT_ONCE = 16  # kept steps evaluated in one pass
DIMS = ("residual", "learning_rate", "schedule", "seed")


@dataclass(frozen=True)
class Settings:
    """The post's V = 100, C = 4, width 2 at its two learning rates; seeds, schedules and switches are ours."""

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
        each_distinct(self, "learning_rate", "schedule", "residual")
        each_at_least(self, 1, "seeds", "every", "points", "batch", "test", "shifts")
        each_at_least(self, 4, "vocabulary")
        if self.steps < 4 * REACH:
            raise InputError(f"steps={self.steps} are too few; give at least {4 * REACH}")
        if self.every * self.points > self.steps:
            raise InputError(
                f"points={self.points} are too many for steps={self.steps}; give at most {self.steps // self.every}"
            )
        for value in self.residual:
            if value not in SWITCH:
                raise InputError(f"residual={value} is no switch; give on or off")
        self.runs()

    def cells(self) -> list[tuple[Any, ...]]:
        """All models, as values of `DIMS`."""
        return list(product(self.residual, self.learning_rate, self.schedule, range(self.seeds)))

    def runs(self) -> list[Any]:
        """The training of every cell."""
        plain = previous_token.Settings(vocabulary=self.vocabulary, context=self.context, batch=self.batch)
        return [
            previous_token.run_of(plain, seed, residual=residual, learning_rate=rate, schedule=schedule)
            for residual, rate, schedule, seed in self.cells()
        ]


QUICK = Settings(learning_rate=(0.1,), residual=("off",), seeds=2, steps=3000, points=60, test=512, shifts=100)


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train all models and follow their tokens.

    Returns:
        Over `DIMS` what `measures` below lists; points are steps of curves, lags steps from an exchange. What is told of
        spikes and chance is from `SETTLED` of the training on; `frames`: the exchange that cost one model's tokens most.
    """
    s = settings
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
    runs = s.runs()
    names = ("embedding", "positions", "0.q", "0.k", "0.v", "0.o", "unembedding")
    trained = work.train("exchanges", runs, s.steps, record=kept.tolist(), recorded=names)
    shown = (s.residual[0], s.learning_rate[-1], s.schedule[0], 0)
    for n, (cell, model) in enumerate(zip(s.cells(), trained, strict=True)):
        tables = {name: _rows(model, name, kept) for name in TABLES}
        round_, spread, angles = zip(*(circle(rows) for rows in tables.values()), strict=True)
        counted = [exchanges(one) for one in angles]
        found = counted[1]
        by_token, right = on_fresh(model, kept, s.test)
        loss = by_token.mean(1)
        index = np.searchsorted(kept, points)
        at = np.array([one.at for one in found], int)
        values: dict[str, Any] = {
            "roundness": np.stack(round_)[:, index],
            "gap_spread": np.stack(spread)[:, index],
            "exchanges": np.histogram(at, [-1, *index])[0],
            "loss": loss[index],
            "picked": right[index],
        }
        settled = [[one for one in each if kept[one.at] >= SETTLED * s.steps] for each in counted]
        late = settled[1]
        values["rate"] = [len(each) / ((1 - SETTLED) * s.steps) * 1000 for each in settled]
        values |= _beside(late, loss, model, kept, s, np.random.default_rng(seed_of(cell[-1], TEST_BLOCK)))
        values["passing"], costs = passing(late, by_token, lags // s.every)
        if cell == shown and np.isfinite(costs).any():
            most = late[int(np.nanargmax(costs))]
            around = most.at + lags // s.every
            own = by_token[around][:, [most.one, most.other]].mean(1)
            rows = tables["unembedding"][around]
            told = {"frame_rows": rows, "frame_loss": own, "frame_step": kept[around], "frame_pair": most[1:]}
            seen.append(((), told))
        yield cell, values
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
    found, picked = [], []
    for some in np.array_split(kept, -(-len(kept) // AT_ONCE)):
        weights = stacked_on([model.recorded[int(step)] for step in some], torch.device("cpu"))
        switches = Switches.of([run.architecture] * len(some))
        with torch.no_grad():
            logits = forward(run.architecture, weights, switches, inputs.expand(len(some), *inputs.shape))
            losses = -logits.log_softmax(-1).gather(-1, answers.expand(len(some), -1)[..., None])[..., 0]
        found.append((losses.double() @ share).numpy())
        picked.append(rightly_picked(logits, inputs, answers).double().mean(-1).numpy())
    return np.concatenate(found), np.concatenate(picked)


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
KINDS = ("residual", "learning_rate", "schedule")
FAST, VOCABULARY = 0.1, 100
BESIDE = {
    "spikes": "spikes",
    "spiked": "near a spike",
    "spiked_chance": "at shifted times",
    "excess": "loss over its median",
    "excess_chance": "at shifted times",
}


def tables(ds: xr.Dataset) -> list[Table]:
    """The circles, and what exchanges have to do with the loss: medians over seeds."""
    circles, beside = [], []
    for labels, of in places(ds, *KINDS):
        end = of.isel(point=-1)
        by_table = [end[name].sel(table=table) for name in ("roundness", "gap_spread") for table in TABLES]
        circles.append([*map(str, labels), *map(_median, (end["loss"], end["picked"], *by_table))])
        rates = [of["rate"].sel(table=table) for table in TABLES]
        cost = over_told(_passing_cost(of), "+.3f")
        beside.append([*map(str, labels), *map(_median, (*rates, *(of[name] for name in BESIDE))), cost])
    columns = (
        "loss, nat",
        "right of its own tokens",
        *(f"{of}, {table}" for of in ("radius", "gaps") for table in TABLES),
    )
    names = (*(f"per 1,000 steps, {table}" for table in TABLES), *BESIDE.values(), "cost to the two, nat")
    end = (
        "Circles at the end of training: deviation over mean of the radius and of neighbours' gaps (medians over seeds)"
    )
    late = f"Exchanges after {SETTLED:.0%} of the training (medians over seeds; the cost to the two tokens: mean over runs)"
    return [Table(end, (*KINDS, *columns), circles), Table(late, (*KINDS, *names), beside)]


def _median(values: xr.DataArray) -> str:
    known = values.values[np.isfinite(values.values)]
    return number(np.median(known), ".3g") if known.size else "-"


def _passing_cost(ds: xr.Dataset) -> xr.DataArray:
    """[..., seed]: what the two tokens lose on the day, over the outer half of the window."""
    two = ds["passing"].sel(who="the two")
    return two.sel(lag=0) - two.where(abs(two["lag"]) > two["lag"].max() / 2).mean("lag")


COLORS = {"constant": VERMILLION, "cosine": BLUE}
CAPTION = (
    "Residual stream {}, learning rate {:g}: medians of {} seeds, and their range. Radius of the embedding: dotted."
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Circles and exchanges over training, and the loss around an exchange, at the last learning rate; one exchange."""
    residual, rate = str(ds["residual"].values[0]), float(ds["learning_rate"].values[-1])
    at, x = ds.sel(residual=residual, learning_rate=rate), ds["point"].values
    figure, cells = sheet(2, 2, caption=CAPTION.format(residual, rate, ds.sizes["seed"]))
    for schedule, color in ((str(name), COLORS[str(name)]) for name in ds["schedule"].values):
        of = at.sel(schedule=schedule)
        for table, line in zip(TABLES, (":", "-"), strict=True):
            label = "" if line == ":" else f"{schedule} rate"
            radius = of["roundness"].sel(table=table).transpose("seed", "point")
            curves(cells[0, 0], [ranged(label, radius, color, x=x, line=line)])
        each = of["exchanges"].transpose("seed", "point").values * 1000 / np.diff(x, prepend=0)
        curves(cells[0, 1], [ranged(f"{schedule} rate", each[:, 1:], color, x=x[1:])])
        passed = of["passing"].dropna("seed").transpose("who", "seed", "lag")
        for runs, line in zip(passed, ("-", ":"), strict=True):
            if len(runs.seed):
                who = f"{runs.who.item()}, {schedule}"
                curves(cells[1, 0], [ranged(who, runs, color, x=ds["lag"].values, line=line)])
    cells[0, 0].set(xlabel="step", ylabel="radius: deviation / mean", ylim=(0, 1.5))
    cells[0, 1].set(xlabel="step", ylabel="exchanges per 1,000 steps")
    cells[0, 1].set_yscale("symlog", linthresh=10)
    cells[1, 0].set(xlabel="steps from the exchange", ylabel="loss by token (nat)")
    if "frame_rows" in ds:
        _exchange(cells[1, 1], ds)
    else:
        cells[1, 1].set_axis_off()
    return {"": figure}


def _exchange(cell: Any, ds: xr.Dataset) -> None:
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
OVER = "95 % interval over runs, with and without residual stream"
CIRCLE = f"the deviation of the radius over its mean at the end is below {ROUND:g}, a threshold of ours: {OVER}"
CHANGES = f"exchanges per 1,000 steps after {SETTLED:.0%} of the training are above 0"
SPIKES = (
    f"the share of exchanges within {NEAR} steps of a spike's beginning, less that at shifted times, is above 0: {OVER}"
)
DECAY = f"with a learning rate of 0.1 that falls to 0, less that at a constant 0.1, is below 0, seed by seed: {OVER}"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged in every setting whose toys know the order of their tokens."""
    return judged(liu, ds, **in_order(ds))


def _fast(ds: xr.Dataset, schedule: str = "constant") -> xr.Dataset:
    need(FAST in ds["learning_rate"].values, schedule in ds["schedule"].values, setting(ds, "vocabulary") == VOCABULARY)
    return ds.sel(learning_rate=FAST, schedule=schedule)


def _by_residual(
    values: xr.DataArray, test: Callable[..., Test], than: float, form: str = ".3g", end: str = ""
) -> Judged:
    """Whether the mean over runs is above or below a number, with residual stream and without."""
    parts = []
    for (residual,), runs in places(values.dropna("residual", how="all"), "residual"):
        runs = runs.dropna("seed")
        words = f"residual stream {residual}: {over_told(runs, form)}{end.format(runs.size)}"
        parts.append((words, test(over_runs(runs.values), than)))
    return by_parts(parts)


def circles(ds: xr.Dataset, table: str) -> Judged:
    """The points of a table lie on a circle at the end."""
    return _by_residual(_fast(ds)["roundness"].sel(table=table).isel(point=-1), below, ROUND)


def changes(ds: xr.Dataset, table: str) -> Judged:
    """Tokens change places."""
    return _by_residual(_fast(ds)["rate"].sel(table=table), above, 0)


# The source speaks of the embeddings; the rows of the unembedding are what a linear readout has to set apart.
for _suffix, _kind, _words, _table in (
    ("-unembedding", "ours", "rows of the unembedding", "unembedding"),
    ("", "published", "token embeddings", "embedding"),
):
    _where: dict[str, Any] = {"kind": _kind, "table": _table}
    _circle, _lie = "circle" if _suffix else "circle-of-embeddings", f"{TASK} the {_words} lie on a circle."
    liu(_circle, "", _lie, rule=f"of the {_words} {CIRCLE}; learning rate 0.1", **_where)(circles)
    _move = f"{TASK} {_words} change places at learning rate 0.1."
    liu(f"change-places{_suffix}", "", _move, rule=f"{CHANGES}, of the {_words}: {OVER}", **_where)(changes)


@liu("at-spikes", "", f"{TASK} the loss spikes where tokens change places.", rule=f"in runs with spikes, {SPIKES}")
def at_spikes(ds: xr.Dataset) -> Judged:
    """In runs with spikes, more exchanges stand at them than chance has."""
    fast = _fast(ds)
    more = (fast["spiked"] - fast["spiked_chance"]).where(fast["spikes"] > 0)
    return _by_residual(more, above, 0, "+.3f", " in {} runs")


FEWER = f"{TASK} learning rate decay keeps tokens from changing places."
EVENER = f"{TASK} learning rate decay lets tokens come to even distances on their circle."
GAPS = "the deviation of neighbours' angles over their mean, in the unembedding at the end"


@liu("decay-fewer-exchanges", "", FEWER, rule=f"exchanges per 1,000 steps in the unembedding {DECAY}", of="rate")
@liu("decay-more-even", "", EVENER, rule=f"{GAPS}, {DECAY}", of="gap_spread")
def decay_lowers(ds: xr.Dataset, of: str) -> Judged:
    """With a rate that falls, less than with a constant one, seed by seed."""
    constant, falling = (
        _fast(ds, schedule)[of].sel(table="unembedding").isel(point=-1, missing_dims="ignore")
        for schedule in ("constant", "cosine")
    )
    parts = []
    for (residual,), less in places((falling - constant).dropna("residual", how="all"), "residual"):
        words = " to ".join(over_told(runs.sel(residual=residual)) for runs in (constant, falling))
        parts.append((f"residual stream {residual}: {words}", below(over_runs(less.values), 0)))
    return by_parts(parts)
