"""A head that finds the token before the last: what training it takes, and how the embeddings get there [Liu-4].

Task, variants, the separation direction and what readers without positions can reach stand in `docs/probes/match.md`. `MAIN`
is the variant that statements are about. Relative perplexities are those of `copied`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import nnls

from probes.charts import BLUE, CYCLE, GREY, VERMILLION, Panel, level, panels, words
from probes.claims.claim import Claim
from probes.claims.ledger import Source
from probes.claims.rules import Told, drawn, some
from probes.measure import Headline
from probes.results.statistics import one_more

from .. import checks
from ..model import Architecture, PositionalSwitch
from ..tasks import Copying
from ..train import Run, Trained
from . import reading as read
from .copied import at_step, bag, evaluated, spikes
from .experiment import Work
from .sweep import Measure, Part, filled, sweep

RELATIVE = "(perplexity - 1) / V"
SWITCH = ("off", "on")  # of residual stream and output projection
MAIN = {"residual": "off", "projection": "on"}  # of which everything is trained
POSITIONAL: tuple[PositionalSwitch, ...] = ("none", "learned")
WEIGHTS = ("embedding", "positions", "0.q", "0.k", "0.v", "0.o", "unembedding")
ASKED = -2  # the token's place from the end
POINTS = 60  # steps at which weights are kept, on a log grid
LARGER = 4  # times the batch; the post does not name its own, so that its perplexities are measured at two


class Cell(NamedTuple):
    """A setting of which [Liu-4] has a number, in `MAIN`."""

    vocabulary: int
    context: int
    width: int
    learning_rate: float

    @property
    def name(self) -> str:
        """Its coordinate in results."""
        return f"V={self.vocabulary} C={self.context} width {self.width} lr {self.learning_rate:g}"


LONGER = 10_000  # steps of the post's longer trainings
# Relative perplexities that are read off its figures, and after how many steps.
PUBLISHED = {
    Cell(30, 4, 2, 0.01): (3000, 2.5e-4),
    Cell(30, 10, 2, 0.01): (3000, 3e-3),
    Cell(100, 10, 10, 0.01): (3000, 4e-7),
    Cell(30, 4, 2, 0.1): (3000, 4e-6),
    Cell(100, 4, 2, 0.01): (LONGER, 4e-3),
    Cell(100, 4, 2, 0.1): (LONGER, 1.3e-2),
}


@dataclass(frozen=True)
class Settings(checks.Settings):
    """Sizes of everything that is trained; seeds, and widths without positions, are ours."""

    LEAST: ClassVar = {"steps": 2} | dict.fromkeys(("vocabulary", "context", "grid_vocabularies", "grid_contexts"), 3)
    vocabulary: int = 30
    context: int = 4
    width: int = 2
    steps: int = 3000
    seeds: int = 5
    batch: int = 128  # which the post does not say
    learning_rate: float = 0.01
    grid_vocabularies: tuple[int, ...] = (10, 30, 100)
    grid_contexts: tuple[int, ...] = (4, 10)
    grid_widths: tuple[int, ...] = (2, 10)
    rate_steps: int = 10_000  # of the longer trainings
    blind_widths: tuple[int, ...] = (2, 4, 10, 30)  # without positional encoding: what is the plateau the bound of?
    test: int = 16_384  # fresh sequences behind every final perplexity, four times those behind points of curves


QUICK = Settings(
    seeds=2, steps=800, rate_steps=1000, test=4096, grid_vocabularies=(30,), grid_widths=(2,), blind_widths=(2, 10)
)


def measure(s: Settings, work: Work) -> xr.Dataset:
    """Train and evaluate everything; the variables' own names say what they mean."""
    kept = np.unique(np.append(0, np.geomspace(1, s.steps, POINTS).round())).astype(int).tolist()
    coords: dict[str, Any] = {
        "positional": list(POSITIONAL),
        **{name: list(SWITCH) for name in MAIN},
        "seed": list(range(s.seeds)),
        "step": kept,
        "position": list(range(-s.context + 1, 1)),  # from the last, which asks: -1 is the token before it
        "token": list(range(s.vocabulary)),
        "axis": list(range(s.width)),
        "batch": [s.batch, LARGER * s.batch],
        "cell": [cell.name for cell in PUBLISHED],
        "rate_vocabulary": [100],
        "learning_rate": [0.01, 0.1],
        "schedule": ["constant"],
        "vocabulary": list(s.grid_vocabularies),
        "context": list(s.grid_contexts),
        "width": list(s.grid_widths),
        "blind_width": list(s.blind_widths),
        "offset_context": [s.context],
        "target": list(range(-s.context, -1)),  # other tokens are asked for than the one before the last
    }

    def grid(label: str, variable: str, *axes: str, **fixed: Any) -> Part:
        """Perplexity after `steps` steps along axes, which are named as `run_of`'s arguments behind any first word."""
        cells, names = [*product(*(coords[axis] for axis in (*axes, "seed")))], [axis.split("_")[-1] for axis in axes]
        runs = [run_of(s, seed, **fixed, **dict(zip(names, at, strict=True))) for *at, seed in cells]
        relative, _ = evaluated(work.train(label, runs, s.steps), s.test)
        values = 1 + s.vocabulary * relative if "perplexity" in variable else relative
        name = f"{variable.replace('_', ' ').replace('relative', RELATIVE)} after {s.steps} steps"
        return Part((*axes, "seed"), {variable: Measure(name)}, filled(cells, **{variable: values}))

    return sweep(
        coords,
        *_curves(s, work, kept),
        *_cells(s, work),
        grid("grid", "relative_by_size", "vocabulary", "context", "width"),
        grid("blind", "blind_perplexity", "blind_width", positional="none"),
        grid("offsets", "relative_by_target", "offset_context", "target"),
    )


def _curves(s: Settings, work: Work, kept: Sequence[int]) -> list[Part]:
    """The published setting: perplexity curves without and with positions, and where the embeddings come to lie."""
    cells = list(product(POSITIONAL, SWITCH, SWITCH, range(s.seeds)))
    runs = [run_of(s, seed, positional=kind, residual=r, projection=p) for kind, r, p, seed in cells]
    trained = work.train("curves", runs, s.steps, record=kept, recorded=WEIGHTS)
    relative = [evaluated([at_step(model, step) for model in trained], s.test // 4)[0] for step in kept]
    perplexity = {"perplexity": Measure("perplexity on fresh sequences", dims=("step",))}
    embeddings = {
        "positions": Measure("positional embedding, by place from the last", dims=("step", "position", "axis")),
        "tokens": Measure("token embedding at the end", dims=("token", "axis")),
        "separation": Measure("unit vector s of the largest margin at the end", dims=("axis",)),
        "bilinear": Measure("s W_Q W_K^T s at the end", "nat"),
    }
    placed = [(cell[1:], _placed(model)) for cell, model in zip(cells, trained, strict=True) if cell[0] != "none"]
    curves = filled(cells, perplexity=1 + s.vocabulary * np.transpose(relative))
    return [Part(("positional", *MAIN, "seed"), perplexity, curves), Part((*MAIN, "seed"), embeddings, placed)]


def _placed(model: Trained) -> dict[str, Any]:
    """Paths of the positions, and how these and attention part the one asked for from the others at the end."""
    w = {name: tensor.double().numpy() for name, tensor in model.weights.items()}
    s = separation(w["positions"], ASKED)
    paths = np.stack([model.recorded[step]["positions"] for step in sorted(model.recorded)])
    return {"positions": paths, "tokens": w["embedding"], "separation": s, "bilinear": s @ w["0.q"] @ w["0.k"].T @ s}


def _cells(s: Settings, work: Work) -> list[Part]:
    """The settings that the post has numbers for; a short run's `steps` and `rate_steps` stand for its 3,000 and 10,000.

    Spikes of the loss are those of the longer trainings.
    """
    relative: list[Any] = []
    counts: list[Any] = []
    for published, steps in ((3000, s.steps), (LONGER, s.rate_steps)):
        own = [cell for cell, (trained, _) in PUBLISHED.items() if trained == published]
        places = list(product((s.batch, LARGER * s.batch), own, range(s.seeds)))
        runs = [run_of(s, seed, batch=batch, **cell._asdict()) for batch, cell, seed in places]
        models = work.train(f"cells {published}", runs, steps)
        cells = [(batch, cell.name, *MAIN.values(), seed) for batch, cell, seed in places]
        relative += filled(cells, relative_published=evaluated(models, s.test)[0])
        for (batch, cell, seed), model in zip(places, models, strict=True):
            if (published, batch) == (LONGER, s.batch):
                at = (cell.vocabulary, cell.learning_rate, "constant", seed)
                counts.append((at, {"spikes": len(spikes(model.losses.double().numpy(), cell.vocabulary))}))
    measures = {"relative_published": Measure(f"{RELATIVE} in the post's settings")}
    spiked = {"spikes": Measure("loss spikes", dtype=np.int16)}
    return [
        Part(("batch", "cell", *MAIN, "seed"), measures, relative),
        Part(("rate_vocabulary", "learning_rate", "schedule", "seed"), spiked, counts),
    ]


def run_of(s: Settings, seed: int, **fields: Any) -> Run:
    """A model and its training; other fields than those of the settings, `MAIN`, learned positions and `ASKED`."""
    usual: dict[str, Any] = {"positional": "learned", "schedule": "constant", "target": ASKED}
    of: Any = vars(s) | MAIN | usual | fields
    sizes: Any = {"blocks": 1, "width": of["width"], "length": of["context"], "outputs": of["vocabulary"]}
    switches: Any = {"residual": of["residual"] == "on", "output_projection": of["projection"] == "on"}
    architecture = Architecture(vocabulary=of["vocabulary"], positional=of["positional"], **sizes, **switches)
    task = Copying(of["vocabulary"], of["context"], of["target"], of["batch"])
    return Run(architecture, task, seed=seed, learning_rate=of["learning_rate"], schedule=of["schedule"])


def separation(positions: Float[np.ndarray, "position axis"], asked: int) -> Float[np.ndarray, " axis"]:
    """The unit vector s of the largest `min_j s . (p_j - p_asked)`; NaN where the origin lies in the hull of differences.

    The hull's point that is nearest to the origin is found by Wolfe's trick: min |P^T w|^2 + (1 - sum w)^2 over w >= 0 has
    w proportional to the hull's own minimizer.
    """
    p = positions.astype(np.float64)
    points = np.delete(p, asked, 0) - p[asked]
    system = np.concatenate([points.T / (np.abs(points).max() or 1.0), np.ones((1, len(points)))])
    weights, _ = nnls(system, np.array([*[0.0] * points.shape[1], 1.0]))
    nearest = weights / weights.sum() @ points
    size = float(np.linalg.norm(nearest))
    return nearest / size if size > 1e-9 * np.abs(p).max() else np.full(p.shape[1], np.nan)


# -- what a result says, all in the variant `MAIN`

STALL = 25.0  # perplexity without positions at which the post's curve stalls first
NEAR = 0.05  # relative: how near a plateau has to be to a published one; the figure's axis resolves no less
STALLED = 1.5  # factor in steps over which a perplexity stays near a plateau, to count as one
WIDEST = 100.0  # ends of a prediction interval that lie further apart tell nothing: the numbers span four decades
WITHIN = 3.0  # factor within which a relative perplexity agrees: half a decade of the post's logarithmic axis


def reader(ds: xr.Dataset, name: str) -> xr.DataArray:
    """The perplexity that a reader without positions has: the best one, and the published bound."""
    v, c = read.setting(ds, "vocabulary"), read.setting(ds, "context")
    return xr.DataArray({BEST: math.exp(bag(v, c - 1)), BOUND: v * (c - 2) / (c - 1)}[name])


def at_end(ds: xr.Dataset) -> xr.Dataset:
    """The main variant after its last step."""
    return ds.sel(MAIN).isel(step=-1, drop=True)


def signed(ds: xr.Dataset) -> xr.DataArray:
    """Above 0 where p_-1 is negative along s and all others are positive."""
    end = at_end(ds)
    along = (end["positions"] * end["separation"]).sum("axis", skipna=False)
    return along.where(along["position"] != -1, -along).min("position", skipna=False)


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


TASK = "In the previous-token task"
END = Headline("perplexity at the end", lambda ds: ds["perplexity"].isel(step=-1, drop=True))
STAY = Headline(f"factor in steps within {NEAR:.0%} of {STALL:g}", stalled, ratio=True)
SIGNS = Headline("the least of -s p_-1 and s p of the others", signed)
FORM = Headline("s W_Q W_K^T s", lambda ds: at_end(ds)["bilinear"])
BLIND = Headline("perplexity without positions", lambda ds: ds["blind_perplexity"])
CELLS = Headline(f"{RELATIVE} in the post's settings", lambda ds: ds["relative_published"], ratio=True)
SIZE = Headline(RELATIVE, lambda ds: ds["relative_by_size"], ratio=True)
# Committed results count them by parts of the training.
SPIKES = Headline("spikes of the loss", lambda ds: ds["spikes"].sum({"rate_step"} & {*ds["spikes"].dims}))
OFFSETS = Headline("perplexity by token", lambda ds: 1 + read.setting(ds, "vocabulary") * ds["relative_by_target"])
BOUND, BEST = "V (C-2) / (C-1)", "best reader blind to order"
HEADLINES = (
    *(END, STAY, SIGNS, FORM),
    *(Headline(name, partial(reader, name=name)) for name in (BOUND, BEST)),
    *(BLIND, CELLS, SIZE, SPIKES, OFFSETS),
)


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Perplexities, paths of the first seed's positions, widths."""
    rows = [Panel("perplexity", _perplexities), Panel("second axis", _places)]
    caption = (
        "Naming the token before the last. Medians over seeds and ranges; no residual stream, output projection. Embeddings "
        "of the first seed: paths of the positions (ring: start, dot: end), grey: tokens."
    )
    return {"": panels({"": ds}, [*rows, Panel("perplexity without positions", _blind)], caption)}


def _perplexities(cell: Axes, ds: xr.Dataset) -> None:
    """By step, with what readers without positions have."""
    kinds = {"none": "no positions", "learned": "learned positions"}
    perplexity = ds["perplexity"].sel(MAIN).isel(step=slice(1, None))
    read.courses(cell, perplexity, "step", "positional", kinds, colors=(BLUE, VERMILLION), log=True)
    _readers(cell, ds)
    cell.set(xscale="log", xlabel="step")


def _blind(cell: Axes, ds: xr.Dataset) -> None:
    """By width, between the published bound and the real one."""
    read.courses(cell, ds["blind_perplexity"].expand_dims("all"), "blind_width", "all", {0: ""}, log=True, marker="o")
    _readers(cell, ds)
    cell.set(xlabel="width")


def _readers(cell: Axes, ds: xr.Dataset) -> None:
    bound, best = (float(reader(ds, name)) for name in (BOUND, BEST))
    level(cell, bound, f"published bound {BOUND}")
    level(cell, best, "best blind to order")
    cell.set_ylim(bottom=min(cell.get_ylim()[0], 0.8 * best))


def _places(cell: Axes, ds: xr.Dataset) -> None:
    """Where positional embeddings went; tokens at the end."""
    tokens, paths = (of.isel(seed=0, axis=slice(2)) for of in (at_end(ds)["tokens"], ds["positions"].sel(MAIN)))
    cell.plot(*tokens.transpose("axis", "token").values, ".", markersize=3.5, color=GREY)
    for n, place in enumerate(paths["position"].values[::-1]):
        path, color = paths.sel(position=place).transpose("axis", "step").values, CYCLE[n % len(CYCLE)]
        cell.plot(*path, color=color, linewidth=1.1)
        cell.plot(*path[:, 0], "o", markersize=4, color=color, markerfacecolor="white")
        cell.plot(*path[:, -1], "o", markersize=6, color=color)
        name = {0: "the last, which asks", -1: "the one before, asked for"}.get(int(place), f"{-place} before the last")
        words(cell, name, 1 - 0.14 * n, color, fraction=True)
    cell.set_aspect("equal", adjustable="datalim")
    cell.set_xlabel("first axis")


# -- statements

liu = Source("[Liu-4]", "liu4-previous-token")
SMALL = "(V = 30, C = 4, width 2)"
PERPLEXITY = "previous-token task's perplexity"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements of [Liu-4], judged; those about its plateau in its setting alone."""
    post = (read.setting(ds, "vocabulary"), read.setting(ds, "context")) == (30, 4)
    return read.judge(liu, ds if post else ds.drop_vars(["perplexity", "blind_perplexity"], errors="ignore"))


def ends(positional: str, value: float) -> read.Ruled:
    """Where a curve ends."""
    bound = read.as_drawn(value, NEAR * value, value / 2)
    return read.lies(END, bound, MAIN | {"positional": positional}, read.ONE_RUN)


_claim = f"Without positional embeddings the {PERPLEXITY} stalls at about {STALL:g}, then at about 20.6 {SMALL}."
read.state(liu, "stalls", _claim, read.lies(STAY, read.over(STALLED)), ends("none", 20.6), published=f"{STALL:g}, 20.6")
_claim = f"With learned positional embeddings the {PERPLEXITY} falls to about 1 {SMALL}."
read.state(liu, "solved", _claim, ends("learned", 1.0), published="1")
_claim = f"{TASK} V (C-2)/(C-1) = 20 bounds the perplexity that can be had without positions (V = 30, C = 4)."
read.state(liu, "bound", _claim, read.lies(BLIND, read.over(20), by=f"{read.OVER_RUNS}, at every width"), kind="ours")
_claim = (
    f"{TASK} (C = 4) the position asked for, p_-1, is negative along the separation direction s, and p_0, p_-2, p_-3 are "
    "positive (up to s -> -s)."
)
read.state(liu, "separation", _claim, read.lies(SIGNS, read.over(0)))
_claim = f"{TASK} s W_Q W_K^T s < 0 along the separation direction s"
_claim += " (-1.1 for s = (1, 1), which is -0.56 for the unit vector)."
read.state(liu, "bilinear-form", _claim, read.lies(FORM, read.under(0)), published="-1.1")


def agrees(ds: xr.Dataset, cell: Cell) -> Told:
    """Agreement in any variant at any batch size, on the logarithmic axis that the number was read off."""
    trained, value = PUBLISHED[cell]
    parts = {}
    for (batch, *switches), of in read.places(read.of_runs(CELLS, ds, {"cell": cell.name}), "batch", *MAIN):
        if of.notnull().any():
            runs = {place: one_more(mean) for place, mean in read.means(of).items()}
            name = ", ".join((f"batch {batch}", *map(" ".join, zip(MAIN, switches, strict=True))))
            parts[name] = read.tell(runs, drawn, *map(math.log, (value, WITHIN, WIDEST)), change=math.exp)
    words, test = read.together(parts, some)
    steps = int(read.setting(ds, "rate_steps" if trained == LONGER else "steps"))  # what stands for the post's
    return (words, test) if steps == trained else (f"{words}, after {steps:,} steps", None)


AGREES = (
    "in some variant (residual stream, output projection) at some batch size, of which the source names none, the published "
    "run lies inside the 95 % prediction interval of one more run, by its logarithm, or within a factor of "
    f"{WITHIN:g} of it, what can be read off a logarithmic axis; undecided where its ends lie more than {WIDEST:g}-fold "
    "apart (ours)"
)
for _cell, (_trained, _published) in PUBLISHED.items():
    _v, _c, _width, _rate = _cell
    _value = f"{_published:.1e}"
    _text = (
        f"{TASK} {RELATIVE} = {_value} after {_trained:,} steps at V = {_v}, C = {_c}, width {_width}, learning rate"
    )
    _name, _text = f"v{_v}-c{_c}-width-{_width}-lr-{_rate:g}", f"{_text} {_rate:g}."
    liu(_name, "", _text, rule=AGREES, published=_value, cell=_cell)(agrees)


def less(one: int, other: int) -> read.Ruled:
    """One of the published settings has the smaller number."""
    cells = [{"cell": cell.name} for cell in PUBLISHED]
    return read.grows(CELLS, [cells[one], cells[other]], {"batch": 128} | MAIN)


_two = {"width": 2}  # of which the post says it; at width 10 all numbers lie at the floor of float32
_text = f"{TASK} {RELATIVE} grows with V (width 2)."
read.state(liu, "larger-vocabulary", _text, read.grows(SIZE, [{"vocabulary": size} for size in (10, 30, 100)], _two))
_text, _sizes = f"{TASK} {RELATIVE} grows with C (width 2).", [{"context": size} for size in (4, 10)]
read.state(liu, "longer-context", _text, less(0, 1), read.grows(SIZE, _sizes, _two))
_text, _widths = f"{TASK} width 10 does far better than width 2, whatever V and C.", [{"width": 10}, _two]
read.state(liu, "wider", _text, less(2, 0), read.grows(SIZE, _widths))
_text = f"{TASK} learning rate 0.1 does better than 0.01 at V = 30, and worse at V = 100."
read.state(liu, "fast", _text, less(3, 0), less(4, 5))
_claim = f"{TASK} at V = 100, C = 4, width 2 the loss has a spike at learning rate 0.1 (near step 6,000)."
_fast = {"rate_vocabulary": 100, "learning_rate": 0.1, "schedule": "constant"}
read.state(liu, "spike", _claim, read.lies(SPIKES, read.over(0), _fast), published="near step 6,000")
_claim = f"Any fixed offset other than the {TASK[7:]}'s is learned as well (C = 4)."
_at, _by = {"offset_context": 4}, f"{read.OVER_RUNS}, at every offset"
read.state(liu, "offsets", _claim, read.lies(OFFSETS, read.around(1), _at, _by))
