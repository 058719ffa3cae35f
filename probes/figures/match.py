"""Toys beside a model: every curve on the position fraction, what ingredients make, and the sources of leakage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..measures.agreement import averaged, fractions, taken_at
from ..measures.matched import clean, elastic, positive, profile, swap_ratio
from .style import (
    BLACK,
    BLUE,
    DPI,
    FAINT,
    GREEN,
    GREY,
    LARGEST,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    THEORIES,
    VERMILLION,
    WIDEST,
    Style,
    handle,
    log_axis,
    mark,
    panels,
    points,
    position_axis,
    results_of,
    save_figure,
    side_legend,
    small_print,
)

NEEDS = {
    "model_sensitivity": ("state", "seed", "prompt", "position"),
    "toy_alpha": ("variant", "training", "toy_seed", "toy_prompt", "point"),
}
MATCHED = "matched"
MODEL = {
    "init": Style("model, init", BLUE, "-", 5),
    "pretrained": Style("model, pretrained", VERMILLION, "-", 6),
}
TOYS = {
    "init": Style("toy, init", SKY, (0, (4, 1.5)), 7),
    "grown": Style("same growth of stream", ORANGE, (0, (1, 1.3)), 7),
    "retrieval": Style("retrieval toy", GREEN, (0, (4, 1.5)), 7),
    "in-context": Style("in-context toy", PURPLE, (0, (1, 1.3)), 7),
}
SHOWN = {training: style for training, style in TOYS.items() if training != "grown"}  # in rows of everything
VARIANTS = {
    MATCHED: Style("matched toy", BLACK, "-", 4),
    "no residual": Style("no residual stream", VERMILLION, (0, (4, 1.5)), 5),
    "no causal mask": Style("no causal mask", BLUE, (0, (1, 1.3)), 6),
    "no positions": Style("no positional encoding", ORANGE, "-.", 5),
    "no window": Style("no window", GREEN, (0, (3, 1, 1, 1)), 5),
}
SOURCE_MARKS = {"mask": ("o", BLACK), "residual": ("s", ORANGE)}
MOST = 130  # points of a curve that are drawn
SHARES = (-1.0, 2.0)  # shares of leakage that are drawn; beyond there are arrows
HEIGHTS = {
    "birth": 1.7,
    "trained": 1.7,
    "alpha": 1.5,
    "swap": 1.5,
    "leakage": 1.6,
    "without at init": 1.6,
    "without, retrieval": 1.6,
}


def match_figure(results: xr.Dataset | Mapping[str, xr.Dataset], *, path: str | Path | None = None) -> Figure:
    """Model and toys through the same probes, one column per model, over the position fraction.

    From above: sensitivity at birth, with theory; sensitivity after training, with the kernel alone; mean weight on a
    position against uniform attention; sensitivity with the mean embedding at position 0 against without; shares of
    leakage by source; toys that lack one ingredient, at birth and trained on retrieval. Sensitivities are divided by their
    geometric mean where all of a panel are above zero: a toy's unit is its own. Toys' curves have a marker per position
    where a model's stands beside them.

    Args:
        results: results of `match`, by the model's name; or one of them.
        path: where to save; see `save_figure`.

    Raises:
        InputError: no results, or one of another study.
    """
    found = results_of(results, "match", NEEDS)
    ablated = any(ds.sizes["variant"] > 1 for ds in found.values())
    heights = {row: height for row, height in HEIGHTS.items() if ablated or not row.startswith("without")}
    with matplotlib.rc_context(STYLE):
        own = [row for row in heights if row not in ("alpha", "swap", "leakage")]
        figure, width, cells, sides = panels(list(found), heights, side=1.75, own=own)
        for column, ds in enumerate(found.values()):
            for row in heights:
                _draw(row, cells[row][column], ds)
        for row in heights:
            if row != "leakage":
                for cell in cells[row]:
                    position_axis(cell, below=row == list(heights)[-1] or row == "swap")
                for cell in cells[row] if row in own else cells[row][:1]:
                    log_axis(cell)
            cells[row][0].set_ylabel(LABELS[row])
        _legends(sides, found)
        small_print(figure, _said(found), width)
        if path is not None:
            save_figure(figure, path, dpi=min(DPI, int(WIDEST / width)), largest=LARGEST)
    return figure


LABELS = {
    "birth": "sensitivity, init\n(scale free)",
    "trained": "sensitivity, trained\n(scale free)",
    "alpha": "alpha / uniform",
    "swap": "sensitivity,\nswapped / not",
    "leakage": "share of leakage",
    "without at init": "toys at init\n(scale free)",
    "without, retrieval": "retrieval toys\n(scale free)",
}


def _draw(row: str, cell: Axes, ds: xr.Dataset) -> None:
    if row in ("birth", "trained"):
        state = "init" if row == "birth" else "pretrained"
        trainings = ("init", "grown") if row == "birth" else ("retrieval", "in-context")
        found = [(_of_model(ds, state), MODEL[state], False)]
        found += [(_of_toy(ds, MATCHED, training), TOYS[training], True) for training in trainings]
        theories = _theories(ds, state) if row == "birth" else _theories(ds, state)[:1]
        _together(cell, [*found, *theories], ds.sizes["point"])
    elif row == "alpha":
        cell.axhline(1, color=GREY, linewidth=0.8)
        for state, style in MODEL.items():
            values = clean(ds["model_alpha"].sel(state=state).values)
            if values is not None:
                _line(cell, averaged(values) / positive(ds["model_uniform"].values), style)
        for training, style in SHOWN.items():
            values = clean(ds["toy_alpha"].sel(variant=MATCHED, training=training).values)
            if values is not None:
                uniform = ds["toy_uniform"].sel(variant=MATCHED).values
                _line(cell, averaged(values) / positive(uniform), style, marked=True)
    elif row == "swap":
        cell.axhline(1, color=GREY, linewidth=0.8)
        for kind, styles, where in (("model", MODEL, "state"), ("toy", SHOWN, "training")):
            for key, style in styles.items():
                at = {where: key} | ({"variant": MATCHED} if kind == "toy" else {})
                if (ratio := swap_ratio(ds, kind, at)) is not None:
                    _line(cell, ratio, style, marked=kind == "toy")
    elif row == "leakage":
        _leakage(cell, ds)
    else:
        training = "init" if row.endswith("init") else "retrieval"
        there = {variant: style for variant, style in VARIANTS.items() if variant in ds["variant"].values}
        _together(cell, [(_of_toy(ds, v, training), style, False) for v, style in there.items()], ds.sizes["point"])


def _together(cell: Axes, found: Sequence[tuple[np.ndarray | None, Style, bool]], at: int) -> None:
    """Curves over their geometric means, at those of `at` even fractions where all of them are above zero."""
    curves = [(curve, style, marked) for curve, style, marked in found if curve is not None]
    coarse = np.stack([taken_at(curve, min(at, len(curve))) for curve, _, _ in curves])
    common = np.all(coarse > 0, 0)
    for (curve, style, marked), own in zip(curves, coarse, strict=True):
        mean = np.exp(np.log(own[common]).mean()) if common.any() else 1.0
        _line(cell, positive(curve) / mean, style, marked=marked)


def _line(cell: Axes, y: np.ndarray, style: Style, *, marked: bool = False) -> None:
    given: Any = {"marker": "o", "markersize": 2.2} if marked else {}
    given |= {"linewidth": 1.0 if marked else 1.2, "zorder": style.order}
    x = fractions(len(y))
    if len(y) > MOST:  # neighbours in twos, threes, ...; the ends as they are
        inner = np.array_split(np.arange(1, len(y) - 1), MOST - 2)
        x, y = (np.array([v[0], *(v[n].mean() for n in inner), v[-1]]) for v in (x, y))
    cell.plot(x, y, color=style.color, linestyle=style.line, **given)


def _of_model(ds: xr.Dataset, state: str) -> np.ndarray | None:
    values = clean(profile(ds, "model").sel(state=state).values)
    return None if values is None else averaged(values)


def _of_toy(ds: xr.Dataset, variant: str, training: str) -> np.ndarray | None:
    values = clean(profile(ds, "toy").sel(variant=variant, training=training).values)
    return None if values is None else averaged(values)


def _theories(ds: xr.Dataset, state: str) -> list[tuple[np.ndarray | None, Style, bool]]:
    found: list[tuple[np.ndarray | None, Style, bool]] = []
    if "theory_kernel" in ds and (kernel := clean(ds["theory_kernel"].sel(state=state).values)) is not None:
        found.append((averaged(kernel), THEORIES["score_path"], False))
    if not np.isnan(cesaro := ds["theory_cesaro"].sel(state=state).values.astype(np.float64)).any():
        found.append((cesaro, THEORIES["cesaro"], False))
    return found


def _leakage(cell: Axes, ds: xr.Dataset) -> None:
    """Shares of mask and residual stream in the early band: model at init, pretrained, toy at init, trained on retrieval."""
    who = [("model", {"state": "init"}), ("model", {"state": "pretrained"})]
    who += [("toy", {"variant": MATCHED, "training": training}) for training in ("init", "retrieval")]
    for offset, (source, (marker, color)) in zip((-0.12, 0.12), SOURCE_MARKS.items(), strict=True):
        found = []
        for kind, where in who:
            ends = []
            for end in ("", "_low", "_high"):
                values = ds[f"{kind}_leakage_share{end}"].sel(where | {"source": source}).values
                known = values[~np.isnan(values)]
                ends.append(float(known.mean()) if known.size else np.nan)
            found.append(ends)
        value, low, high = np.array(found).T
        points(cell, np.arange(len(who)) + offset, value, (low, high), color=color, marker=marker, limits=SHARES)
    cell.set_xticks(
        range(len(who)), ["init", "pretr.", "toy init", "retr."], rotation=25, ha="right", rotation_mode="anchor"
    )
    cell.set_xlim(-0.6, len(who) - 0.4)
    cell.set_ylim(SHARES[0] - 0.1, SHARES[1] + 0.1)
    cell.axhline(0, color=GREY, linewidth=0.8)
    cell.grid(axis="y", color=FAINT, linewidth=0.6)
    cell.set_axisbelow(True)


def _legends(sides: Mapping[str, Axes], found: Mapping[str, xr.Dataset]) -> None:
    theories = [
        t for t in ("score_path", "cesaro") if t == "cesaro" or any("theory_kernel" in ds for ds in found.values())
    ]
    lines = [handle(THEORIES[t], THEORIES[t].label) for t in theories]

    def named(styles: Mapping[str, Style], *keys: str) -> list[Any]:
        return [handle(styles[key], styles[key].label) for key in keys]

    side_legend(sides["birth"], [*named(MODEL, "init"), *named(TOYS, "init", "grown"), *lines])
    side_legend(sides["trained"], [*named(MODEL, "pretrained"), *named(TOYS, "retrieval", "in-context"), *lines[:-1]])
    side_legend(sides["alpha"], [*named(MODEL, *MODEL), *named(TOYS, *SHOWN)], "mean weight [Gu]")
    side_legend(sides["swap"], [*named(MODEL, *MODEL), *named(TOYS, *SHOWN)], "mean embedding at 0")
    marks = [
        mark("causal mask", *SOURCE_MARKS["mask"]),
        mark("residual stream", *SOURCE_MARKS["residual"]),
    ]
    side_legend(sides["leakage"], marks, "early queries, log form")
    there = [v for v in VARIANTS if any(v in ds["variant"].values for ds in found.values())]
    for row in ("without at init", "without, retrieval"):
        if row in sides:
            side_legend(sides[row], named(VARIANTS, *there))


def _said(found: Mapping[str, xr.Dataset]) -> list[str]:
    from ..measures.matched import toys_learnt  # which draws on this module

    first = next(iter(found.values()))
    quick = ["QUICK setting"] if any(ds.attrs.get("quick") for ds in found.values()) else []
    lengths = " / ".join(dict.fromkeys(str(ds.sizes["position"]) for ds in found.values()))
    idle = [name for name, ds in found.items() if toys_learnt(ds, MATCHED, "in-context") != "trained"]
    return [
        *quick,
        f"models: T = {lengths}, {first.sizes['prompt']} prompts; toys: {first.sizes['point']} positions, "
        "same depth, heads, mask, encoding",
        f"retrieval: one toy for each position asked for, {'geometric mean' if elastic(first) else 'rms'} over them",
        "curves: geometric means over prompts and seeds; sensitivities over their own geometric mean",
        *([f"in-context toys that are not trained, and say nothing: of {', '.join(idle)}"] if idle else []),
    ]
