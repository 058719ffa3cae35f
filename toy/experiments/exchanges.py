"""Tokens on a circle that change places while a previous-token head is trained [Liu-4].

The task and the model are those of `previous_token`, with 100 tokens in two dimensions. There the rows of the unembedding
come to lie on a circle: a linear readout names a token where that token's row is the furthest one out, so that all rows have
to be corners of one convex line. What moves along it has to pass its neighbours. The post shows the embeddings instead;
their circle is looked at, too, and their exchanges are counted. As they lie on no circle, two angles can cross while the
embeddings are apart.

Weights are kept every few steps. Of each kept step:

- a circle is fitted to the rows of a table (least squares of `|p|^2 = 2 p . c + const`): `roundness`, the deviation of the
  radius over its mean, and `gap_spread`, that of the angles between neighbours (0 where they are even, near 1 where angles
  are drawn at random);
- an exchange is a pair of tokens of which one was more than half a mean gap ahead of the other and is then as far behind it,
  without going round: tokens that only jostle do not count. It is dated halfway between. All but their number is told of
  exchanges in the unembedding;
- losses are those of fresh sequences, the same at every step, so that what moves is the model.

What exchanges have to do with the loss is told from `SETTLED` of the training on, where circles are there. Chance is what
the same exchanges give at other times: all dates moved together by a random shift, around the end, which keeps their bursts.
It is the baseline of the loss at exchanges, and of the share of exchanges that stand near a spike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from scipy.ndimage import median_filter

from probes.errors import InputError

from ..model import Switches, forward
from ..train import Trained, seed_of
from . import previous_token
from .experiment import Work
from .in_context import stacked_on
from .previous_token import SCHEDULES, SWITCH, TEST_BLOCK, rightly_picked, spikes
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


class Exchange(NamedTuple):
    """Two tokens that changed places, and when: the index of a kept step."""

    at: int
    one: int
    other: int


def measure(settings: Settings, work: Work) -> xr.Dataset:
    """Train all models and follow their tokens.

    Returns:
        Over `DIMS`: `roundness`, `gap_spread [..., table, point]`; `exchanges [..., point]`, since the point before; of
        fresh sequences `loss [..., point]` and `picked [..., point]`, see `previous_token.rightly_picked`. From `SETTLED` of
        the training on: `rate [..., table]`, exchanges per 1,000 steps; `spikes`, how many (`previous_token.spikes`), and
        `spiked`, the share of exchanges within `NEAR` steps of a spike's beginning; `excess` of the loss at exchanges over
        its running median; `spiked_chance` and `excess_chance`, means of both at shifted times, `excess_scatter`, the
        deviation of the latter; `passing [..., who, lag]`, loss of the two tokens and of all others around exchanges.
        `frame_rows [frame, token, axis]`, `frame_loss [frame]`, `frame_step`, `frame_pair [who2]`: the exchange of one model
        that cost its tokens most.
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


def exchanges(angles: Float[np.ndarray, "step token"]) -> list[Exchange]:
    """Pairs that change places, by date: by more than half a mean gap before and after, and not around the far side."""
    count = angles.shape[1]
    found = []
    for one in range(count - 1):
        ahead = angles[:, one, None] - angles[:, one + 1 :]
        ahead = (ahead + np.pi) % (2 * np.pi) - np.pi
        for other, lead in enumerate(ahead.T, one + 1):
            clear = np.flatnonzero(np.abs(lead) > np.pi / count)
            turned = np.flatnonzero(np.sign(lead[clear[1:]]) != np.sign(lead[clear[:-1]]))
            for before, after in zip(clear[turned], clear[turned + 1], strict=True):
                if max(abs(lead[before]), abs(lead[after])) < np.pi / 2:
                    found.append(Exchange(int(before + after) // 2, one, other))
    return sorted(found)


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


def passing(
    found: Sequence[Exchange], by_token: Float[np.ndarray, "step token"], lags: np.ndarray
) -> tuple[Float[np.ndarray, "who lag"], Float[np.ndarray, " exchange"]]:
    """(mean loss of the two tokens and of all others around exchanges, what each exchange cost its two tokens).

    The cost is their loss on the day less that in the outer half of the window. Exchanges too near to the end have NaN.
    """
    curves, costs = [], np.full(len(found), np.nan)
    outer = np.abs(lags) > lags[-1] / 2
    for n, one in enumerate(found):
        if one.at + lags[0] < 0 or one.at + lags[-1] >= len(by_token):
            continue
        around = by_token[one.at + lags]
        own = around[:, [one.one, one.other]].mean(1)
        costs[n] = own[lags == 0][0] - own[outer].mean()
        curves.append([own, (around.sum(1) - 2 * own) / (around.shape[1] - 2)])
    return (np.mean(curves, 0) if curves else np.full((2, len(lags)), np.nan)), costs
