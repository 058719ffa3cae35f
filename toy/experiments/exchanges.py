"""Tokens on a circle that change places while a previous-token head is trained [Liu-4].

What is measured stands in `docs/probes/match.md`. As embeddings lie on no circle, two of their angles can cross while they
are apart: all but the number of exchanges is told of those in the unembedding, from `SETTLED` of the training on.
"""

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
from .copied import at_step, scored, spikes
from .experiment import Work
from .previous_token import SWITCH, WEIGHTS
from .reading import OVER_RUNS, change, courses, judge, lacking, learnt, lies, over, setting, state, under
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
    seeds: int = 5
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
    }
    return sweep(coords, Part(DIMS, measures, _followed(s, kept, points, work)))


def _followed(s: Settings, kept: np.ndarray, points: np.ndarray, work: Work) -> Cells:
    """Model by model."""
    runs, late = s.runs(), SETTLED * s.steps
    trained = work.train("exchanges", runs, s.steps, record=kept.tolist(), recorded=WEIGHTS)
    for n, (cell, model) in enumerate(zip(s.cells(), trained, strict=True)):
        roundness, spread, angles = zip(*(circle(_rows(model, name, kept)) for name in TABLES), strict=True)
        counted = [exchanges(of_table) for of_table in angles]
        settled = [of_table[kept[of_table] >= late] for of_table in counted]
        losses, picks = scored([at_step(model, step) for step in kept[points].tolist()], s.test)
        begun = [at for at in spikes(model.losses.double().numpy(), s.vocabulary) if at >= late]
        near: np.ndarray = np.any(abs(kept[:, None] - np.array(begun)) <= NEAR, axis=1)
        yield (
            cell,
            {
                "roundness": np.stack(roundness)[:, points],
                "gap_spread": np.stack(spread)[:, points],
                "exchanges": np.histogram(counted[1], [-1, *points])[0],
                "loss": losses.mean(1),
                "picked": picks.mean(1),
                "rate": [len(of_table) / ((1 - SETTLED) * s.steps) * 1000 for of_table in settled],
                "spikes": len(begun),
                "spiked": near[settled[1]].mean() if len(settled[1]) else np.nan,
                "spiked_chance": near[kept >= late].mean(),
            },
        )
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
    """Steps at which pairs change places: by more than half a mean gap before and after, not around the far side."""
    count = angles.shape[1]
    found = []
    for one in range(count - 1):
        ahead = angles[:, one, None] - angles[:, one + 1 :]
        ahead = (ahead + np.pi) % (2 * np.pi) - np.pi
        for lead in ahead.T:
            clear = np.flatnonzero(np.abs(lead) > np.pi / count)
            turned = np.flatnonzero(np.sign(lead[clear[1:]]) != np.sign(lead[clear[:-1]]))
            for before, after in zip(clear[turned], clear[turned + 1], strict=True):
                if max(abs(lead[before]), abs(lead[after])) < np.pi / 2:
                    found.append(int(before + after) // 2)
    return np.sort(np.array(found, int))


# -- what a result says

ROUND = 0.1  # roundness of what counts as a circle, ours
SLOW, FAST, VOCABULARY = 0.01, 0.1, 100
AT_END = f"after {SETTLED:.0%} of the training"


def end(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A curve's end."""
    return ds[name].isel(point=-1, drop=True)


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


for _name, _words, _rule in (
    ("confidently-wrong", "at a spike the tokens that change places are confidently wrong", "their margins there"),
    ("order-random", "the order of tokens on the circle is random", "orders of several seeds against permuted ones"),
):
    liu(_name, "", f"{TASK} {_words}.", rule=f"{_rule}: not kept by these runs")(lacking)


_rates: Any = [{"schedule": _schedule} for _schedule in ("constant", "cosine")]
_at = {"table": "unembedding", "learning_rate": FAST}
for _name, _of, _words in (
    ("decay-fewer-exchanges", RATE, "keeps tokens from changing places"),
    ("decay-more-even", GAPS, "lets tokens come to even distances on their circle"),
):
    state(liu, _name, f"{TASK} learning rate decay {_words}.", lies(change(_of, *_rates), under(0), _at))
