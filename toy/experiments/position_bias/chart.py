"""The figure of position-bias: gaps of three pairs of items by encoding, depth, mask and training data."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.charts import BLUE, ORANGE, SKY, Series, dots, sheet
from probes.results.statistics import over_runs

from .. import sinks_claims
from ..learnt import ENCODINGS, STREAMS, gate
from .training import PAIRS

COLORS = dict(zip(PAIRS, (BLUE, ORANGE, SKY), strict=True))
FEWEST = 3  # seeds from which on an interval by Student's t says something (that of two is 13 times their range)
PALE = 0.4
ROW, PANEL = 0.3, 3.6  # inches of a kind of models, and of a panel


def charts(ds: xr.Dataset) -> dict[str, Figure]:
    """Gaps after unbiased training under a causal mask, under other masks, and after biased training.

    Of Gaussian data at the first scale, if there are any, and of the residual switch that more models have.
    """
    at = {"scale": ds["scale"].values[0], "data": ds["data"].values[0]}
    many = ds["gap"].sel(at).notnull().sum([dim for dim in ds["gap"].dims if dim not in (*at, "residual")])
    at["residual"] = many["residual"].values[int(many.values.argmax())]
    states = gate(ds)[1]
    there = ds["gap"].sel(at).notnull().any(("seed", "pair"))
    dims = ("training", "mask", "positional", "depth")
    kinds: list[dict[str, Any]] = [
        dict(zip(dims, labels, strict=True)) for labels in product(*(ds[dim].values.tolist() for dim in dims))
    ]
    kinds = [kind for kind in kinds if bool(there.sel(kind))]
    chosen = {
        "answers anywhere, causal mask": [x for x in kinds if (x["training"], x["mask"]) == ("unbiased", "causal")],
        "other masks": [x for x in kinds if x["mask"] != "causal"],
        "answers at certain items, causal mask": [
            x for x in kinds if x["training"] != "unbiased" and x["mask"] == "causal"
        ],
    }
    chosen = {title: of_panel for title, of_panel in chosen.items() if of_panel}
    caption = (
        "Accuracy where the earlier of two identical items is right, less that where the later is: above 0 the earlier "
        "decides; means over seeds, 95 % intervals (ranges of two). Pale: has not learnt to retrieve. Models "
        f"{STREAMS[at['residual']]}."
    )
    height = 0.7 + ROW * max(map(len, chosen.values()))
    figure, (cells,) = sheet(1, len(chosen), height=height, width=PANEL * len(chosen), caption=caption)
    for cell, (title, of_panel) in zip(cells, chosen.items(), strict=True):
        deep = len({kind["depth"] for kind in of_panel}) > 1
        learnt = np.array([states.sel(at | kind).item() == "trained" for kind in of_panel])
        gaps = [ds["gap"].sel(at | kind) for kind in of_panel]
        _gaps(cell, [_words(kind, deep=deep) for kind in of_panel], gaps, learnt, labelled=cell is cells[-1])
        cell.set_title(title, fontsize=9)
    return {"": figure} | {f"-sinks{end}": sinks for end, sinks in sinks_claims.charts(ds).items()}


def _words(kind: dict[str, Any], *, deep: bool) -> str:
    """A kind of models, without what its panel's title says; `deep`: there are several depths."""
    mask = "" if kind["mask"] == "causal" else kind["mask"].replace("-", " of ") if "-" in kind["mask"] else "full mask"
    answers = "" if kind["training"] == "unbiased" else f"answers {kind['training'].replace('-and-', ' or ')}"
    return ", ".join(filter(None, (mask, ENCODINGS[kind["positional"]], answers, f"{kind['depth']} blocks" * deep)))


def _gaps(cell: Axes, names: list[str], gaps: list[xr.DataArray], learnt: np.ndarray, *, labelled: bool) -> None:
    """A line for each kind of models, a dot for each pair of items."""
    for passed, alpha in ((learnt, 1.0), (~learnt, PALE)):
        series = []
        for pair, color in COLORS.items():
            ends = np.array([over_seeds(gap.sel(pair=pair).values) for gap in gaps])
            value, low, high = np.where(passed[:, None], ends, np.nan).T
            label = pair.replace("-", " against ") if labelled and alpha == 1 else ""
            series.append(Series(label, value, color, low, high, alpha=alpha))
        dots(cell, names, series, limits=(-1.0, 1.0))


def over_seeds(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over seeds and an interval: 95 % by Student's t from `FEWEST` seeds on, their range below it, NaN of one."""
    known = values[np.isfinite(values)]
    if 1 < known.size < FEWEST:
        return float(known.mean()), float(known.min()), float(known.max())
    return over_runs(known)[:3]
