"""The head that finds the token before the last: curves, W_Q W_K^T, and the paths of embeddings, also animated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from probes.figures.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SIGNED, SKY, VERMILLION

from ..experiments.previous_token_claims import (
    ENDS,
    STALL,
    betting,
    blind_limit,
    main_variant,
    of_variant,
    typical_seed,
)
from ..experiments.rules import known, setting
from .animation import animate, plane
from .previous_token_settings import previous_token_hyperparameters_figure
from .sheet import entry, files, sheet, wanted

# The position asked for stands out; colours of the others run from the query backwards.
ASKED = VERMILLION
OTHERS = (BLUE, GREEN, PURPLE, ORANGE, SKY, BLACK)
WIDTH = 7.4
FRAMES = 60  # of an animation at most


def previous_token_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure:
    """Perplexity without and with positions; positions' paths; W_Q W_K^T; widths without positions.

    Args:
        ds: a result of `headwater toy previous-token`.
        path: where to save; see `save_figure`.

    Raises:
        InputError: the result is another one.
    """
    for name in ("perplexity", "relative", "positions", "tokens", "separation", "query_key", "bilinear"):
        _own(ds, name)
    v = main_variant(ds)
    note = (
        f"residual stream {v.residual}, output projection {v.projection}; lines: median over seeds, thin: each seed; "
        f"paths and matrix: seed {typical_seed(ds)}, the median one"
    )
    with sheet(ds, (WIDTH, 6.1), [note], dpi=150, path=path) as figure:
        cells: Any = figure.subplots(2, 2)
        _curves(cells[0, 0], ds)
        _paths(cells[0, 1], ds)
        _form(cells[1, 0], ds)
        if "blind_perplexity" in ds:
            _blind(cells[1, 1], ds)
        else:
            cells[1, 1].axis("off")
    return figure


def previous_token_paths(ds: xr.Dataset, *, path: str | Path) -> Path:
    """Write an animated GIF of token and positional embeddings as training moves them; returns its path.

    Raises:
        InputError: the result is another one, or the path cannot be written to.
    """
    path = Path(path)
    seed = typical_seed(ds)
    positions, tokens, relative = (_own(ds, name) for name in ("positions", "tokens", "relative"))
    p, e = (x.isel(seed=seed).transpose("step", ..., "axis").values[..., :2] for x in (positions, tokens))
    perplexity = 1 + setting(ds, "vocabulary") * relative.sel(positional="learned").isel(seed=seed).values
    steps = ds["step"].values
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(FRAMES, len(steps))).round().astype(int))
    reach = 1.08 * max(np.abs(p).max(), np.abs(e).max())
    places = [int(x) for x in ds["position"].values]

    def picture(cell: Axes, n: int) -> None:
        plane(cell, reach)
        cell.plot(*e[n].T, linestyle="", marker=".", markersize=3.5, color=GREY, zorder=2)
        for k, place in enumerate(places):
            color = _color(place)
            cell.plot(*p[: n + 1, k].T, color=color, linewidth=0.9, alpha=0.6, zorder=3)
            cell.plot(*p[n, k], marker="o", markersize=6, color=color, zorder=4)
            cell.annotate(_place(place), p[n, k], (5, 4), textcoords="offset points", fontsize=8, color=color)
        cell.set_title(f"step {int(steps[n]):,}, perplexity {perplexity[n]:.2f}", fontsize=9)

    return animate(path, [(picture, int(n)) for n in chosen], [_color(place) for place in places])


def _own(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A variable in the main variant."""
    found = known(of_variant, ds, name)
    wanted(ds, found is not None, f"{name} of its main variant", "previous-token")
    assert found is not None
    return found


def _log_axis(cell: Axes) -> None:
    """Decades, 2 and 5 are labelled."""
    cell.set_yscale("log")
    cell.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    cell.yaxis.set_minor_formatter(NullFormatter())


def _place(place: int) -> str:
    return f"$p_{{{place}}}$"


def _color(place: int) -> str:
    if place == -1:
        return ASKED
    return OTHERS[(-place - (place < -1)) % len(OTHERS)]


def _curves(cell: Axes, ds: xr.Dataset) -> None:
    """Perplexity by step, with what readers without positions have."""
    curve = _own(ds, "perplexity")
    v, c = setting(ds, "vocabulary"), setting(ds, "context")
    steps = np.maximum(ds["step"].values, 0.7)  # 0 has no logarithm and stands left of 1
    for kind, color, label in (("none", BLUE, "without positions"), ("learned", VERMILLION, "with learned positions")):
        one = curve.sel(positional=kind).transpose("seed", "step").values
        cell.plot(steps, one.T, color=color, linewidth=0.6, alpha=0.45)
        cell.plot(steps, np.median(one, 0), color=color, linewidth=1.8, label=label)
    cell.set_xscale("log")
    _log_axis(cell)
    cell.set_ylim(0.92, 9 * v)
    lines = [(betting(v, c)["published"], "$V(C-2)/(C-1)$"), (blind_limit(v, c), "best blind to order")]
    for level, label in lines:
        cell.axhline(level, color=BLACK, linewidth=0.9, linestyle=(0, (1, 1.4)), zorder=1)
        cell.annotate(label, (0.75, level), (0, -2), textcoords="offset points", va="top", fontsize=7.5)
    if (v, c) == (30, 4):
        look: Any = {"marker": "<", "linestyle": "", "markersize": 4, "color": BLACK, "markerfacecolor": "none"}
        beside = cell.get_yaxis_transform()
        cell.plot([1.03] * 2, [STALL, ENDS["none"]], transform=beside, clip_on=False, label="published stalls", **look)
    cell.legend(loc="upper right", fontsize=7.5)
    cell.set(xlabel="step", ylabel="perplexity", title=f"The token before the last: V = {v}, C = {c}")


def _paths(cell: Axes, ds: xr.Dataset) -> None:
    """Where positional embeddings went; tokens at the end; the separation direction."""
    seed = typical_seed(ds)
    positions, tokens, directions = (_own(ds, name) for name in ("positions", "tokens", "separation"))
    p = positions.isel(seed=seed).transpose("position", "step", "axis").values[..., :2]
    e = tokens.isel(seed=seed, step=-1).transpose("token", "axis").values[:, :2]
    s = directions.isel(seed=seed, step=-1).values[:2]
    reach = 1.12 * max(np.abs(p).max(), np.abs(e).max())
    plane(cell, reach)
    cell.plot(*e.T, linestyle="", marker=".", markersize=3.5, color=GREY, zorder=2)
    for place, course in zip(ds["position"].values, p, strict=True):
        color = _color(int(place))
        cell.plot(*course.T, color=color, linewidth=1.1, zorder=3)
        cell.plot(*course[0], marker="o", markersize=4, color=color, markerfacecolor="white", zorder=4)
        cell.plot(*course[-1], marker="o", markersize=6, color=color, zorder=5)
    handles: list[Any] = [
        entry(_place(int(x)), color=_color(int(x)), marker="o", markersize=5, linewidth=1.1)
        for x in ds["position"].values[::-1]
    ]
    handles.append(entry("tokens, end", color=GREY, marker=".", linestyle="", markersize=5))
    if np.isfinite(s).all():
        cell.annotate("", 0.55 * reach * s, (0, 0), arrowprops={"arrowstyle": "-|>", "color": BLACK, "linewidth": 1.2})
        aside = 0.07 * reach * np.array([-s[1], s[0]])
        cell.annotate("$s$", 0.55 * reach * s + aside, ha="center", va="center")
    cell.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, borderaxespad=0)
    cell.set_xlabel("axis 0")
    cell.set_ylabel("axis 1", labelpad=0)
    cell.set_title("Paths from start (ring) to end (dot)")


def _form(cell: Axes, ds: xr.Dataset) -> None:
    """W_Q W_K^T of one seed, and s W_Q W_K^T s of all along training."""
    form, bilinear = _own(ds, "query_key"), _own(ds, "bilinear")
    seed = typical_seed(ds)
    steps = np.maximum(ds["step"].values, 0.7)
    curves = bilinear.transpose("seed", "step").values
    for n, one in enumerate(curves):
        own = n == seed
        cell.plot(steps, one, color=VERMILLION if own else BLUE, linewidth=1.7 if own else 0.8, zorder=3 + own)
    cell.axhline(0, color=GREY, linewidth=0.9)
    cell.set_xscale("log")
    cell.set_yscale("symlog", linthresh=1)
    cell.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "\u2212")))
    cell.set(
        ylim=(min(-3.0, 1.6 * np.nanmin(curves)), 60 * max(1.0, np.nanmax(curves))),
        xlabel="step",
        ylabel="$s\\,W_QW_K^T s$  (nat)",
        title="Along $s$; inset: $W_QW_K^T$ at the end",
    )
    handles = [
        entry(f"seed {int(ds['seed'].values[seed])}", color=VERMILLION, linewidth=1.7),
        entry("others", color=BLUE, linewidth=0.8),
    ]
    cell.legend(handles=handles if len(curves) > 1 else handles[:1], loc="upper right", fontsize=8)
    matrix = form.isel(seed=seed, step=-1).transpose("row", "column").values
    inset = cell.inset_axes((0.1, 0.68, 0.3, 0.3))
    most = float(np.abs(matrix).max())
    inset.imshow(matrix, cmap=SIGNED, vmin=-most, vmax=most, aspect="auto")
    inset.set(xticks=[], yticks=[])
    if matrix.size <= 9:
        for (row, column), value in np.ndenumerate(matrix):
            color = "white" if abs(value) > 0.65 * most else BLACK
            inset.annotate(f"{value:.2f}", (column, row), ha="center", va="center", fontsize=8, color=color)


def _blind(cell: Axes, ds: xr.Dataset) -> None:
    """Models without positions by width, between the published bound and the real one."""
    v, c = setting(ds, "vocabulary"), setting(ds, "context")
    values = ds["blind_perplexity"].transpose("blind_width", "seed").values
    x = np.arange(len(values))
    cell.vlines(x, values.min(1), values.max(1), color=BLUE, linewidth=1.2)
    cell.plot(x, np.median(values, 1), marker="o", markersize=4.5, linestyle="", color=BLUE, label="trained")
    readers = betting(v, c)
    lines: Any = [
        (readers["published"], "$V(C-2)/(C-1)$", (0, (1, 1.4))),
        (readers["geometric"], "$V^{(C-2)/(C-1)}$", (0, (4, 1.5))),
        (blind_limit(v, c), "best blind to order", "-"),
    ]
    for level, label, line in lines:
        cell.axhline(level, color=BLACK, linewidth=0.9, linestyle=line, label=label, zorder=1)
    _log_axis(cell)
    cell.set(
        ylim=(min(2.0, 0.8 * blind_limit(v, c)), 3.2 * v),
        xticks=x,
        xticklabels=[str(int(w)) for w in ds["blind_width"].values],
        xlim=(-0.5, len(values) - 0.5),
    )
    cell.legend(loc="upper right", fontsize=7.5, ncols=2, columnspacing=1)
    cell.set(xlabel="width", ylabel="perplexity", title="Without positions, by width")


def draw(ds: xr.Dataset, path: Path) -> list[Path]:
    """PATH and PATH-hyperparameters as .png and .svg, PATH-paths.gif."""
    more, paths = (path.with_name(f"{path.name}-{name}") for name in ("hyperparameters", "paths"))
    previous_token_figure(ds, path=path)
    written = files(path)
    if previous_token_hyperparameters_figure(ds, path=more) is not None:
        written += files(more)
    return [*written, previous_token_paths(ds, path=paths.with_suffix(".gif"))]
