"""Figures of the attention probes hold at 6 blocks as at 80: what is drawn is seen, and nothing lies upon anything else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xarray as xr
from drawn import (
    DRAWN,
    bos_result,
    drawn,
    labelled,
    leakage_result,
    several,
    sinks_result,
    text_of,
    trajectory_result,
    with_roles,
)
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from probes.figures import BLUE, GREEN, VERMILLION, bos_figure, leakage_figure, sinks_figure, trajectory_figure
from probes.figures.draw import in_view
from probes.figures.palette import PARTS
from probes.figures.sinks import GROUPS
from probes.figures.style import LARGEST, coinciding, numeral

SIZES = [(6, 4), (30, 9), (80, 64)]  # blocks, heads


def results_of(blocks: int, heads: int) -> dict[Any, xr.Dataset]:
    sizes = {"layers": blocks, "heads": heads}
    return {
        sinks_figure: sinks_result(**sizes),
        trajectory_figure: trajectory_result(layers=blocks),
        leakage_figure: leakage_result(**sizes),
        bos_figure: bos_result(**sizes),
    }


def shown_ticks(axes: Axes) -> list[list[Any]]:
    """Boxes of the labels that are drawn, by axis."""
    found = []
    for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
        ticks = [tick for tick in axis.get_major_ticks() if tick.label1.get_visible() and tick.label1.get_text()]
        found.append([tick.label1.get_window_extent() for tick in ticks if low <= tick.get_loc() <= high])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw for draw, *_ in DRAWN])
def test_labels_lie_inside_and_clear_of_each_other(draw):
    small, large = (results_of(*size)[draw] for size in SIZES[:2])
    for models in ({"one": large}, {"six": small, "thirty": large, "again": large, "last": small}):
        figure: Figure = draw(models)
        figure.draw_without_rendering()
        panels = [axes for axes in figure.axes if axes.axison or axes.get_legend()]
        boxes = [box for axes in panels if (box := axes.get_tightbbox()) is not None]
        for number, box in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
            assert not any(box.overlaps(other) for other in boxes[:number])
        for labels in (labels for axes in panels if axes.axison for labels in shown_ticks(axes)):
            assert not any(one.overlaps(other) for one, other in pairwise(labels))


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "heads"), SIZES[1:])
def test_everything_drawn_is_within_its_axes(blocks, heads):
    for draw, ds in results_of(blocks, heads).items():
        figure: Figure = draw(ds)
        figure.draw_without_rendering()
        for axes in (axes for axes in figure.axes if axes.axison):
            left, right = sorted(axes.get_xlim())
            low, high = sorted(axes.get_ylim())
            for line in axes.lines:
                if line.get_transform() == axes.transData:
                    x, y = np.asarray(line.get_xydata(), dtype=float).T
                    seen = np.isfinite(x) & np.isfinite(y)
                    assert np.all((left <= x[seen]) & (x[seen] <= right))
                    assert np.all((low <= y[seen]) & (y[seen] <= high)), (axes.get_ylabel(), low, y[seen].min())


@pytest.mark.slow
def test_files_of_the_largest_models_stay_small(tmp_path):
    for (draw, _, name), ds in zip(DRAWN, results_of(*SIZES[-1]).values(), strict=True):
        draw(ds, path=tmp_path / name)
        for end in ("png", "svg"):
            assert (tmp_path / f"{name}.{end}").stat().st_size < LARGEST


def test_many_sink_reading_heads_leave_the_heat_map_to_be_seen():
    ds = sinks_result(layers=30, heads=9)
    heads = labelled(sinks_figure(ds), "block")
    assert not heads.patches
    (dots,) = [line for line in heads.lines if line.get_color() == VERMILLION]
    reading = np.argwhere(ds["selected"].sel(rule="sink-reading").values)
    np.testing.assert_array_equal(np.asarray(dots.get_xydata())[:, ::-1], reading)
    height = heads.get_window_extent().height / 30
    assert dots.get_markersize() * heads.get_figure().dpi / 72 < 0.6 * height  # pyright: ignore


def test_many_heads_that_read_and_park_have_dots_of_their_own():
    ds = with_roles(sinks_result(layers=30, heads=9))
    heads = labelled(sinks_figure(ds), "block")
    for role, color in (("reads", VERMILLION), ("parks", GREEN)):
        (dots,) = [line for line in heads.lines if line.get_color() == color]
        having = np.argwhere(ds["has_role"].sel(role=role).values)
        np.testing.assert_array_equal(np.asarray(dots.get_xydata())[:, ::-1], having)


def test_norms_of_many_heads_are_medians_of_groups():
    ds = sinks_result(layers=30, heads=9)
    figure = sinks_figure(ds)
    cell = labelled(figure, "norm, 0 / rest")
    (written,) = drawn(cell, color=GREEN)
    norms = ds["written_norm"]
    ratio = (norms.sel(place="sink") / norms.sel(place="rest")).values.ravel()
    order = np.argsort(ds["attends"].values.ravel())
    np.testing.assert_allclose(written, [np.median(ratio[group]) for group in np.array_split(order, GROUPS)])
    assert sum(len(line.get_xdata()) for line in cell.lines) < 50  # pyright: ignore[reportArgumentType]
    assert "norms of over 64 heads: medians and quartiles of 10 equal groups" in text_of(figure)
    assert "medians" not in text_of(sinks_figure(sinks_result()))


def test_many_blocks_are_lines_in_bands():
    ds = leakage_result(layers=30)
    figure = leakage_figure(ds)
    cell = labelled(figure, "leakage (weight²)")
    for line, source in zip(cell.lines, ds["source"].values, strict=False):
        values = ds["weight_source_by_block"].isel(band=0).sel(source=source).values
        np.testing.assert_allclose(np.asarray(line.get_ydata()), values)
    bands = [area for area in cell.collections if isinstance(area, PolyCollection)]
    assert [to_hex(area.get_facecolor()[0]) for area in bands] == [c.lower() for c in (BLUE, VERMILLION, GREEN)]  # pyright: ignore
    bars = [bar for bar in labelled(figure, "parts (nat²)").patches if isinstance(bar, Rectangle)]
    assert len(bars) == 30 * len(PARTS)
    assert {bar.get_width() for bar in bars} == {1.0}  # no gaps
    swapped = several("mean", "zero", layers=30, heads=9)
    figure = bos_figure(swapped)
    cell = labelled(figure, r"change of $\alpha_0$")
    change = (swapped["alpha_after"] - swapped["alpha_before"]).sel(replacement="zero")
    np.testing.assert_allclose(drawn(cell, color=VERMILLION), [change.median("head").values])
    assert "median and all of the heads" in text_of(figure)
    assert "a dot per head" not in text_of(figure)


@pytest.mark.parametrize("length", [48, 512])
def test_the_small_print_says_how_many_positions_a_picture_shows(length):
    ds = sinks_result()
    few = ds.isel(picture_query=slice(length), picture_key=slice(length))
    assert f"first {min(length, 128)} positions" in text_of(sinks_figure(few))
    assert f"first {min(length, 64)} positions" in text_of(sinks_figure({"one": few, "two": few}))


def test_curves_that_coincide_are_said_to():
    ds = trajectory_result(layers=30)
    apart = trajectory_figure(ds)
    assert "coincide" not in text_of(apart)
    same = ds.copy(deep=True)
    same["norm_others"][1] = same["norm_others"][0] * 1.001
    figure = trajectory_figure(same)
    assert "*: curves that coincide" in text_of(figure)
    legends = [text.get_text() for axes in figure.axes if (made := axes.get_legend()) for text in made.get_texts()]
    assert {"BOS, elsewhere*", "text, elsewhere*", "BOS at position 0", "text at position 0"} <= set(legends)
    both = labelled(figure, r"norm $\|h\|_2$").lines
    widths = {str(line.get_label()): line.get_linewidth() for line in both}
    assert widths["BOS, elsewhere"] > widths["text, elsewhere"]  # the upper one leaves the lower one to be seen


def test_curves_are_compared_in_every_panel_they_are_in():
    figure = Figure()
    first, second = figure.subplots(1, 2, sharey=True)
    x = np.arange(100)
    for cell, shift in ((first, 0.0), (second, 5.0)):
        cell.plot(x, x, label="a")
        cell.plot(x, np.where(x == 7, 90.0, x + 0.1), label="b")  # a single place apart
        cell.plot(x, x + shift, label="c")
    handles = [Line2D([], [], label=name) for name in "abc"]
    assert coinciding([first, second], handles) == ["*"]
    assert [handle.get_label() for handle in handles] == ["a*", "b*", "c"]
    alone = [Line2D([], [], label=name) for name in "xy"]
    assert coinciding([first, second], alone) == []


def test_low_values_of_a_stream_are_not_cut_off():
    ds = trajectory_result()
    ds["norm_first"][:, 0] = 1e-3
    ds["norm_first"][:, -1] = 1e5
    low, high = labelled(trajectory_figure(ds), r"norm $\|h\|_2$").get_ylim()
    assert low < 1e-3 < 1e5 < high


def test_ticks_are_read_as_numbers():
    said = {0.01: "0.01", 0.0: "0", 2e4: "20,000", 1e5: "$10^{5}$", 2e-5: r"$2\cdot 10^{-5}$", -0.1: "−0.1"}
    assert {value: numeral(value) for value in said} == said


def test_a_block_far_beyond_the_others_is_named_and_leaves_them_visible():
    """Qwen2.5's first block has a weight form of 1e234: its key biases make logits of hundreds."""
    values = xr.DataArray(np.ones((2, 20)), dims=("part", "layer"), coords={"layer": range(20)})
    cell = Figure().add_subplot()
    in_view(cell, values)
    assert not cell.texts
    values[:, 3] = -6e233
    in_view(cell, values)
    assert cell.texts[0].get_text() == "beyond the axis: block 3 (1.2e+234)"
    assert cell.get_ylim() == pytest.approx((-2.2, 2.2))
