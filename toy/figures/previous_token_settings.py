"""The head that finds the token before the last: the post's settings, sizes, offsets and learning rates."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from probes.figures.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION

from ..experiments.previous_token_claims import BY_NAME, variants
from .sheet import barred, entry, grid, sheet

VARIANTS = {("off", "off"): "v", ("off", "on"): "o", ("on", "off"): "^", ("on", "on"): "s"}
RATES = (BLUE, VERMILLION, GREEN, PURPLE)
WIDTH = 9.0


def previous_token_hyperparameters_figure(ds: xr.Dataset, *, path: str | Path | None = None) -> Figure | None:
    """Relative perplexity by setting, size and offset, and loss curves by learning rate with their spikes.

    None where the result has none of these. Arguments as in `previous_token_figure`.

    Raises:
        InputError: the result is another one.
    """
    parts = {"relative_published": _published, "relative_by_size": _sizes, "relative_by_target": _offsets}
    top = [draw for name, draw in parts.items() if name in ds]
    vocabularies = [int(v) for v in ds["rate_vocabulary"].values] if "rate_loss" in ds else []
    rows = int(bool(top)) + int(bool(vocabularies))
    if not rows:
        return None
    notes = [
        "points and lines: median over seeds, bars and bands: their range",
        "triangles: where a seed's spike begins",
    ]
    with sheet(ds, (WIDTH, 3.35 * rows + 0.5), notes, dpi=140, path=path) as figure:
        grids: Any = np.atleast_1d(np.array(figure.subfigures(rows, 1), dtype=object))
        if top:
            ratios = [1.5 if draw is _published else 1 for draw in top]
            cells: Any = grids[0].subplots(1, len(top), squeeze=False, width_ratios=ratios)
            for cell, draw in zip(cells[0], top, strict=True):
                draw(cell, ds)
        if vocabularies:
            panels = list(product(vocabularies, ds["schedule"].values))
            cells = grids[-1].subplots(1, len(panels), squeeze=False, sharey=True)
            for cell, (vocabulary, schedule) in zip(cells[0], panels, strict=True):
                _rates(cell, ds.sel(rate_vocabulary=vocabulary, schedule=schedule))
                cell.set_title(f"V = {vocabulary}, {schedule} rate")
            cells[0, 0].set_ylabel("training loss (nat)")
    return figure


def _published(cell: Axes, ds: xr.Dataset) -> None:
    """The post's settings: every variant and batch size beside the published number."""
    chosen = [BY_NAME[str(name)] for name in ds["cell"].values]
    colors = (BLUE, ORANGE, GREEN)
    batches = [int(b) for b in ds["batch"].values]
    kinds = list(product(enumerate(batches), variants(ds)))
    for row, one in enumerate(chosen):
        for n, ((b, batch), variant) in enumerate(kinds):
            seeds = ds["relative_published"].sel(cell=one.name, batch=batch, **variant._asdict()).values
            seeds = seeds[np.isfinite(seeds)]
            if seeds.size:
                y, color = row + 0.7 * ((n + 0.5) / len(kinds) - 0.5), colors[b % 3]
                cell.hlines(y, seeds.min(), seeds.max(), color=color, linewidth=0.9)
                cell.plot(np.median(seeds), y, linestyle="", marker=VARIANTS[variant], markersize=3.8, color=color)
        cell.vlines(one.value, row - 0.42, row + 0.42, color=BLACK, linewidth=1.8)
    cell.set_xscale("log")
    names = [f"V = {x.vocabulary}, C = {x.context},\nwidth {x.width}, lr {x.learning_rate:g}" for x in chosen]
    cell.set_yticks(range(len(chosen)), names, fontsize=7)
    cell.set_ylim(len(chosen) - 0.45, -0.55 - 1.9)
    handles = [entry("published", color=BLACK, linewidth=1.8)]
    for variant in variants(ds):
        label = f"residual {variant.residual}, $W_O$ {variant.projection}"
        handles.append(entry(label, color=GREY, marker=VARIANTS[variant], linestyle="", markersize=4))
    handles += [entry(f"batch {x}", color=colors[b % 3], linewidth=1.6) for b, x in enumerate(batches)]
    cell.legend(handles=handles, loc="upper center", fontsize=6.8, ncols=2, columnspacing=0.9, handletextpad=0.5)
    grid(cell, "x")
    cell.set(xlabel="(perplexity $-$ 1) / V", title="The post's settings")


def _sizes(cell: Axes, ds: xr.Dataset) -> None:
    """Relative perplexity against V, one line per context and width."""
    values = ds["relative_by_size"]
    vocabularies = ds["vocabulary"].values
    markers = "os^vD"
    for (w, width), (c, context) in product(enumerate(ds["width"].values), enumerate(ds["context"].values)):
        one = values.sel(width=width, context=context).transpose("seed", "vocabulary").values
        color = (BLUE, VERMILLION, GREEN)[w % 3]
        look: Any = {"marker": markers[c % 5], "markersize": 4.5, "markerfacecolor": color if c == 0 else "white"}
        look |= {"linestyle": "-" if c == 0 else (0, (4, 1.5)), "linewidth": 1}
        x = vocabularies * 1.06 ** (2 * w + c - 1.5)
        barred(cell, x, one, color, bar=0.9, label=f"C = {context}, width {width}", **look)
    cell.set(xscale="log", yscale="log", xticks=vocabularies, xticklabels=[str(v) for v in vocabularies])
    cell.xaxis.set_minor_formatter(NullFormatter())
    cell.minorticks_off()
    cell.set_xlim(vocabularies.min() / 1.4, vocabularies.max() * 1.4)
    low, high = cell.get_ylim()
    cell.set_ylim(low, high * (high / low) ** 0.42)
    cell.legend(loc="upper left", fontsize=7)
    cell.set(xlabel="vocabulary V", ylabel="(perplexity $-$ 1) / V", title="By size")


def _offsets(cell: Axes, ds: xr.Dataset) -> None:
    """Relative perplexity by the offset of the token asked for."""
    values = ds["relative_by_target"]
    for n, context in enumerate(ds["offset_context"].values):
        one = values.sel(offset_context=context).transpose("seed", "target").dropna("target", how="all")
        x = one["target"].values + 1 + 0.16 * (n - (values.sizes["offset_context"] - 1) / 2)
        look: Any = {"marker": "os^"[n % 3], "linestyle": "", "markersize": 4, "label": f"C = {context}"}
        barred(cell, x, one.values, (BLUE, VERMILLION, GREEN)[n % 3], bar=1, **look)
    cell.set_yscale("log")
    low, high = cell.get_ylim()
    cell.set_ylim(low, high * (high / low) ** 0.25)
    lowest = int(ds["target"].min()) + 1
    cell.set_xticks(range(lowest, 0), [str(x).replace("-", "\u2212") for x in range(lowest, 0)])
    cell.legend(loc="upper left", fontsize=7, ncols=2)
    cell.set(xlabel="offset from the last token", title="Other offsets")


def _rates(cell: Axes, ds: xr.Dataset) -> None:
    """Loss by step, median and range over seeds, by learning rate; where spikes begin."""
    x = ds["rate_step"].values
    for r, rate in enumerate(ds["learning_rate"].values):
        one, color = ds.sel(learning_rate=rate), RATES[r % len(RATES)]
        loss, count = (one[name].transpose("seed", "rate_step").values for name in ("rate_loss", "spikes"))
        label = f"lr {rate:g}: {int(count.sum())} spikes"
        cell.plot(x, np.median(loss, 0), color=color, linewidth=1.3, zorder=3, label=label)
        if len(loss) > 1:
            # Extremes of two bins at a time: a band's outline is most of the SVG.
            starts = np.arange(0, len(x), 2)
            low, high = np.minimum.reduceat(loss.min(0), starts), np.maximum.reduceat(loss.max(0), starts)
            cell.fill_between(x[starts], low, high, color=color, alpha=0.15, linewidth=0)
        at = x[np.nonzero(count)[1]]
        look: Any = {"marker": "v", "markersize": 4, "markeredgewidth": 0.8, "markerfacecolor": "none"}
        cell.plot(at, np.full(len(at), 8.0 * 2.2**r), linestyle="", color=color, **look)
    cell.set(yscale="log", xlabel="step")
    cell.xaxis.set_major_locator(MaxNLocator(3))
    cell.legend(loc="lower left", fontsize=7)
