"""What a result of previous-token says: tables, the figure, and the statements of [Liu-4], all in the variant `MAIN`.

What readers without positions can reach, for the plateau without positional encoding:

- Without positions attention sees the query and a bag of tokens. A reader of the bag of the first C - 1 tokens says each
  with its share; no reader without positions is better. Its perplexity `exp(bag)` is nearly C - 1, far from what the post
  sees.
- The published V (C - 2) / (C - 1) is a mean of perplexities: a reader that bets on one of the C - 1 tokens has perplexity
  near 0 (really 1) once in C - 1 times and V else. As a mean of losses the same bet is V^((C-2)/(C-1)), and its exact
  arithmetic mean is larger by 1 / (C - 1). It bounds nothing: the limit is far below, and what holds a model of width 2
  near 20 is that two numbers do not carry a bag of three tokens. Hence models without positions are trained at several
  widths. The same bet among all C tokens, the query among them, is V (C - 1) / C.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.charts import BLUE, CYCLE, FAINT, GREY, VERMILLION, Panel, curves, level, panels, words
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import Told, between, some
from probes.measure import Headline
from probes.results.tables import Table

from ..copied import bag
from ..reading import (
    OVER_RUNS,
    TINY,
    around,
    courses,
    each,
    judge,
    of_runs,
    over,
    places,
    ranged,
    rises,
    setting,
    state,
    tables_of,
    together,
    under,
)

SWITCH = ("off", "on")  # of residual stream and output projection
MAIN = {"residual": "off", "projection": "on"}  # of which everything is trained
STALL = 25.0  # perplexity without positions at which the post's curve stalls first
ENDS = {"none": 20.6, "learned": 1.0}  # perplexities at which its curves end
NEAR = 0.05  # relative: how near a plateau has to be to a published one; the figure's axis resolves no less
STALLED = 1.5  # factor in steps over which a perplexity stays near a plateau, to count as one
WIDTHS = (2, 10)  # of the post's sizes
WITHIN = 3.0  # factor within which a relative perplexity agrees: half a decade of the post's logarithmic axis
PUBLISHED_FORM = ((-0.41, 1.35), (0.19, -2.25))  # W_Q W_K^T; with s = (1, 1) the post has s W_Q W_K^T s = -1.1


class Cell(NamedTuple):
    """A relative perplexity that is read off a figure of [Liu-4], in `MAIN`."""

    vocabulary: int
    context: int
    width: int
    learning_rate: float
    steps: int
    value: float

    @property
    def name(self) -> str:
        """Its coordinate in results."""
        return f"V={self.vocabulary} C={self.context} width {self.width} lr {self.learning_rate:g}"

    @property
    def words(self) -> str:
        """The setting in its statement."""
        return f"V = {self.vocabulary}, C = {self.context}, width {self.width}, learning rate {self.learning_rate:g}"


PUBLISHED = (
    Cell(30, 4, 2, 0.01, 3000, 2.5e-4),
    Cell(30, 10, 2, 0.01, 3000, 3e-3),
    Cell(100, 10, 10, 0.01, 3000, 4e-7),
    Cell(30, 4, 2, 0.1, 3000, 4e-6),
    Cell(100, 4, 2, 0.01, 10_000, 4e-3),
    Cell(100, 4, 2, 0.1, 10_000, 1.3e-2),
)


def sizes(ds: xr.Dataset) -> tuple[int, int]:
    """Vocabulary and context."""
    return int(setting(ds, "vocabulary")), int(setting(ds, "context"))


def betting(ds: xr.Dataset) -> dict[str, xr.DataArray]:
    """Perplexities without positions: of the best reader, and of a bet on one of the earlier tokens by kind of mean."""
    v, c = sizes(ds)
    readers = {
        "best": math.exp(bag(v, c - 1)),
        "published": v * (c - 2) / (c - 1),
        "arithmetic": (v * (c - 2) + 1) / (c - 1),
        "geometric": v ** ((c - 2) / (c - 1)),
        "with the query": v * (c - 1) / c,
    }
    return {name: xr.DataArray(perplexity) for name, perplexity in readers.items()}


def at_end(ds: xr.Dataset) -> xr.Dataset:
    """The main variant after its last step."""
    return ds.sel(MAIN).isel(step=-1, drop=True)


def signed(ds: xr.Dataset, moved: bool = False) -> xr.DataArray:
    """Above 0 where p_-1 is negative along s and all others are positive; `moved`: with the mean token embedding added."""
    end = at_end(ds)
    places = end["positions"] + (end["tokens"].mean("token") if moved else 0)
    along = (places * end["separation"]).sum("axis", skipna=False)
    return along.where(along["position"] != -1, -along).min("position", skipna=False)


def lead(ds: xr.Dataset) -> xr.DataArray:
    """By how many nats the mean token's query prefers p_-1 to the best of the others, p alone."""
    end = at_end(ds)
    asking = (end["positions"].sel(position=0) + end["tokens"].mean("token")).rename(axis="row")
    asked_for = (asking * end["query_key"]).sum("row").rename(column="axis")
    logits = (asked_for * end["positions"]).sum("axis") / math.sqrt(ds.sizes["axis"])
    return logits.sel(position=-1) - logits.drop_sel(position=-1).max("position")


def stalled(ds: xr.Dataset) -> xr.DataArray:
    """The factor in steps over which a curve without positions stays near `STALL`, at its longest; 1 if it never does."""

    def stay(perplexity: np.ndarray) -> float:
        longest, start = 1.0, None
        for step, value in zip(ds["step"].values, perplexity, strict=True):
            start = (start or step) if abs(value / STALL - 1) < NEAR and step else None
            longest = max(longest, step / start) if start else longest
        return float(longest)

    perplexity = ds["perplexity"].sel(MAIN | {"positional": "none"})
    return xr.apply_ufunc(stay, perplexity, input_core_dims=[["step"]], vectorize=True)


def off_published(ds: xr.Dataset) -> xr.DataArray:
    """The rms over settings of log10(median over seeds / published), by variant and batch size."""
    published = xr.DataArray([cell.value for cell in PUBLISHED], {"cell": [cell.name for cell in PUBLISHED]})
    off: xr.DataArray = xr.ufuncs.log10(ds["relative_published"].median("seed").clip(TINY) / published)
    return (off**2).mean("cell") ** 0.5


TASK, RELATIVE = "In the previous-token task", "(perplexity - 1) / V"
END = Headline("perplexity at the end", lambda ds: ds["perplexity"].isel(step=-1, drop=True))
STAY = Headline(f"factor in steps within {NEAR:.0%} of {STALL:g}", stalled, ratio=True)
SIGNS = Headline("the least of -s p_-1 and s p of the others", signed)
FORM = Headline("s W_Q W_K^T s", lambda ds: at_end(ds)["bilinear"])
BLIND = Headline("perplexity without positions", lambda ds: ds["blind_perplexity"])
CELLS = Headline(f"{RELATIVE} in the post's settings", lambda ds: ds["relative_published"], ratio=True)
SIZE = Headline(RELATIVE, lambda ds: ds["relative_by_size"], ratio=True)
SPIKES = Headline("spikes of the loss", lambda ds: ds["spikes"].sum("rate_step"))
OFFSETS = Headline("perplexity by token", lambda ds: 1 + setting(ds, "vocabulary") * ds["relative_by_target"])
READERS = [
    Headline("V (C-2) / (C-1)", lambda ds: betting(ds)["published"]),
    Headline("best reader blind to order", lambda ds: betting(ds)["best"]),
    Headline("mean loss of a bet", lambda ds: betting(ds)["geometric"]),
    Headline("bet with the query", lambda ds: betting(ds)["with the query"]),
]
HEADLINES = (
    *(END, STAY, SIGNS, Headline("with the mean token embedding added", partial(signed, moved=True)), FORM),
    *(Headline("nats by which the mean token's query prefers p_-1", lead), *READERS, BLIND, CELLS),
    *(Headline("rms log10 off the published", off_published), SIZE, SPIKES),
    *(Headline(f"{RELATIVE} after longer training", lambda ds: ds["rate_relative"]), OFFSETS),
)


def tables(ds: xr.Dataset) -> list[Table]:
    """All numbers."""
    return tables_of(HEADLINES, ds)


# -- the figure


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Perplexities, paths of the positions in the seed of the median perplexity, W_Q W_K^T along s, widths."""
    rows = [
        Panel("perplexity", _perplexities, height=2.7),
        Panel("second axis", _paths, height=2.7),
        Panel("$s W_Q W_K^T s$ (nat)", _form, height=2.7),
        Panel("perplexity without positions", _blind, height=2.7),
    ]
    size, context = sizes(ds)
    title = f"Naming the token before the last: {context} tokens in context, {size} in the vocabulary"
    caption = (
        "Medians over seeds and ranges; no residual stream, output projection. Embeddings of seed "
        f"{_typical(ds)}: paths of the positions (ring: start, dot: end), grey: tokens, arrow: the direction s that parts "
        "the position asked for from the others."
    )
    return {"": panels({title: ds}, rows, caption)}


def _typical(ds: xr.Dataset) -> int:
    """The seed whose last relative perplexity with positions is the (lower) median."""
    last = ds["relative"].sel(MAIN | {"positional": "learned"}).isel(step=-1).sortby("seed")
    return int(last["seed"][np.argsort(last.values, kind="stable")[(last.size - 1) // 2]])


def _perplexities(cell: Axes, ds: xr.Dataset) -> None:
    """By step, with what readers without positions have."""
    kinds = {"none": "no positions", "learned": "learned positions"}
    perplexity = ds["perplexity"].sel(MAIN).isel(step=slice(1, None))
    courses(cell, perplexity, "step", "positional", kinds, colors=(BLUE, VERMILLION), log=True)
    _levels(cell, ds, published="published bound V (C-2) / (C-1)")
    cell.set(xscale="log", xlabel="step")


def _levels(cell: Axes, ds: xr.Dataset, **bets: str) -> None:
    """What readers without positions have."""
    limit = float(betting(ds)["best"])
    for kind, name in bets.items():
        level(cell, float(betting(ds)[kind]), name)
    level(cell, limit, "best blind to order")
    cell.set_ylim(bottom=min(cell.get_ylim()[0], 0.8 * limit))


def _paths(cell: Axes, ds: xr.Dataset) -> None:
    """Where positional embeddings went; tokens at the end; the separation direction."""
    of = ds[["positions", "tokens", "separation"]].sel(MAIN | {"seed": _typical(ds)}).isel(axis=slice(2))
    tokens = of["tokens"].isel(step=-1).transpose("axis", "token").values
    cell.plot(*tokens, ".", markersize=3.5, color=GREY)
    for n, place in enumerate(of["position"].values[::-1]):
        path, color = of["positions"].sel(position=place).transpose("axis", "step").values, CYCLE[n % len(CYCLE)]
        cell.plot(*path, color=color, linewidth=1.1)
        cell.plot(*path[:, 0], "o", markersize=4, color=color, markerfacecolor="white")
        cell.plot(*path[:, -1], "o", markersize=6, color=color)
        name = {0: "the last, which asks", -1: "the one before, asked for"}.get(int(place), f"{-place} before the last")
        words(cell, name, 1 - 0.14 * n, color, fraction=True)
    s = of["separation"].isel(step=-1).values
    if np.isfinite(s).all():
        cell.annotate("", 0.6 * np.abs(tokens).max() * s, (0, 0), arrowprops={"arrowstyle": "-|>"})
    cell.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    cell.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    cell.set_aspect("equal", adjustable="datalim")
    cell.set_xlabel("first axis")


def _form(cell: Axes, ds: xr.Dataset) -> None:
    """Along training, every seed."""
    bilinear = ds["bilinear"].sel(MAIN).isel(step=slice(1, None)).expand_dims(run=1).rename(seed="each", run="seed")
    colors = [VERMILLION if seed == _typical(ds) else BLUE for seed in ds["seed"].values]
    courses(cell, bilinear, "step", "each", {seed: f"seed {seed}" for seed in ds["seed"].values}, colors=colors)
    cell.axhline(0, color=GREY, linewidth=0.9)
    cell.set(xscale="log", xlabel="step")
    if float(abs(bilinear).max()) > 1:
        cell.set_yscale("symlog", linthresh=1)


def _blind(cell: Axes, ds: xr.Dataset) -> None:
    """By width, between the published bound and the real one."""
    perplexity = ds["blind_perplexity"].transpose("seed", "blind_width")
    curves(cell, [ranged("", perplexity, BLUE, line="")], log=True)
    _levels(cell, ds, published="V (C-2) / (C-1)", geometric="$V^{(C-2)/(C-1)}$")
    count = perplexity.sizes["blind_width"]
    cell.set(
        xticks=range(count), xticklabels=perplexity["blind_width"].values, xlim=(-0.5, count - 0.5), xlabel="width"
    )


# -- statements

liu = Source("[Liu-4]", "liu4-previous-token")
SMALL = "(V = 30, C = 4, width 2)"
PERPLEXITY = "previous-token task's perplexity"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements of [Liu-4], judged; those about its plateau in its setting alone."""
    return judge(liu, ds if sizes(ds) == (30, 4) else ds.drop_vars(["perplexity", "blind_perplexity"], errors="ignore"))


_claim = f"Without positional embeddings the {PERPLEXITY} at first stalls at about {STALL:g} {SMALL}."
state(liu, "stalls", _claim, STAY, over(STALLED), published=f"{STALL:g}")
for _name, _positional, _text in (
    ("plateau", "none", f"Without positional embeddings the {PERPLEXITY} then stalls at about"),
    ("solved", "learned", f"With learned positional embeddings the {PERPLEXITY} falls to about"),
):
    _level = f"{ENDS[_positional]:g}"
    _where = MAIN | {"positional": _positional}
    state(liu, _name, f"{_text} {_level} {SMALL}.", END, around(ENDS[_positional]), _where, published=_level)
_claim = f"{TASK} V (C-2)/(C-1) = 20 bounds the perplexity that can be had without positions (V = 30, C = 4)."
state(liu, "bound", _claim, BLIND, over(20), published="20", by=f"{OVER_RUNS}, at every width")
_claim = (
    f"{TASK} (C = 4) the position asked for, p_-1, is negative along the separation direction s, and p_0, p_-2, p_-3 are "
    "positive (up to s -> -s)."
)
state(liu, "separation", _claim, SIGNS, over(0))
_claim = f"{TASK} s W_Q W_K^T s < 0 along the separation direction s"
_claim += " (-1.1 for s = (1, 1), which is -0.56 for the unit vector)."
state(liu, "bilinear-form", _claim, FORM, under(0), published="-1.1")


def agrees(ds: xr.Dataset, cell: Cell) -> Told:
    """Agreement at any batch size, on the logarithmic axis that the number was read off."""
    by_batch = of_runs(CELLS, ds, {"cell": cell.name} | MAIN).dropna("batch", how="all")
    ends = [math.log(cell.value) + way * math.log(WITHIN) for way in (-1, 1)]
    parts = {f"batch {batch}": each(of, between, *ends, change=math.exp) for (batch,), of in places(by_batch, "batch")}
    words, test = together(parts, some)
    steps = int(setting(ds, "rate_steps" if cell.steps > 3000 else "steps"))  # what stands for the post's
    return (words, test) if steps == cell.steps else (f"{words}, after {steps:,} steps", None)


AGREES = (
    "at some batch size the 95 % interval over runs of its logarithm lies within a factor of "
    f"{WITHIN:g}, what can be read off a logarithmic axis, of the published number"
)
for _cell in PUBLISHED:
    _name = f"v{_cell.vocabulary}-c{_cell.context}-width-{_cell.width}-lr-{_cell.learning_rate:g}"
    _value = f"{_cell.value:.1e}"
    _text = f"{TASK} {RELATIVE} = {_value} after {_cell.steps:,} steps at {_cell.words}."
    liu(_name, "", _text, rule=AGREES, published=_value, cell=_cell)(agrees)

for _name, _less, _more, _text in (
    ("longer", 0, 1, f"{RELATIVE} is larger at C = 10 than at C = 4 (V = 30, width 2)"),
    ("wider", 2, 0, "width 10 does far better than width 2, even at V = 100, C = 10"),
    ("fast-at-30", 3, 0, "learning rate 0.1 does better than 0.01 at V = 30"),
    ("fast-at-100", 4, 5, "learning rate 0.1 does worse than 0.01 at V = 100"),
):
    _two = [{"cell": PUBLISHED[n].name} for n in (_less, _more)]
    rises(liu, _name, f"{TASK} {_text}.", CELLS, _two, {"batch": 128} | MAIN)
for _width in WIDTHS:
    for _name, _dim, _symbol, _values in (
        ("larger-vocabulary", "vocabulary", "V", (10, 30, 100)),
        ("longer-context", "context", "C", (4, 10)),
    ):
        _text = f"{TASK} {RELATIVE} grows with {_symbol} at width {_width}."
        rises(liu, f"{_name}-width-{_width}", _text, SIZE, [{_dim: size} for size in _values], {"width": _width})
_claim = f"{TASK} {RELATIVE} is smaller at width 10 than at width 2, whatever V and C."
rises(liu, "width-helps", _claim, SIZE, [{"width": 10}, {"width": 2}])
_claim = f"{TASK} at V = 100, C = 4, width 2 the loss has a spike at learning rate 0.1 (near step 6,000)."
_fast = {"rate_vocabulary": 100, "learning_rate": 0.1, "schedule": "constant"}
state(liu, "spike", _claim, SPIKES, over(0), _fast, published="near step 6,000")
_claim = f"Any fixed offset other than the {TASK[7:]}'s is learned as well (C = 4)."
state(liu, "offsets", _claim, OFFSETS, around(1), {"offset_context": 4}, by=f"{OVER_RUNS}, at every offset")
