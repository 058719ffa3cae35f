"""Figures of the attention probes, of 3 blocks as of 80: what is drawn is what the results hold, and can be seen."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
import xarray as xr
from drawn import (
    DRAWN,
    bos_result,
    drawn,
    ends_of,
    labelled,
    leakage_result,
    legends_of,
    several,
    text_of,
)
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from probes.errors import InputError
from probes.figures import BLUE, GREEN, VERMILLION, bos_figure, leakage_figure
from probes.figures.bos import HIGHEST, PUBLISHED
from probes.figures.draw import outliers
from probes.figures.leakage import SHARES
from probes.figures.palette import GREY, ORANGE, PARTS, SOURCES
from probes.figures.style import LARGEST
from probes.measures.leakage import BOUND, resolved
from probes.results.dataset import load
from probes.studies.reports import leakage_report

SIZES = {"small": (6, 4), "middle": (30, 9), "large": (80, 64)}  # blocks, heads


def results_of(size: str) -> dict[Any, xr.Dataset]:
    """A result for each figure."""
    blocks, heads = SIZES[size]
    sizes = {"layers": blocks, "heads": heads}
    made = (leakage_result(layers=blocks), bos_result(**sizes))
    return dict(zip((draw for draw, *_ in DRAWN), made, strict=True))


@pytest.mark.parametrize(("draw", "result", "command"), DRAWN)
def test_results_of_another_probe_are_refused(draw, result, command):
    with pytest.raises(InputError, match="no results to draw; give at least one"):
        draw({})
    for _, other, theirs in DRAWN:
        if theirs != command:
            with pytest.raises(InputError, match=rf"the result of 'a' has no .*; give one of headwater {command}$"):
                draw({"fine": result(), "a": other()})
    with pytest.raises(InputError, match="the result of 'tiny' has no"):
        draw(result().expand_dims(condition=["init"]))


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "result", "command"), DRAWN)
def test_one_column_per_model_says_what_it_rests_on_and_files_stay_small(draw, result, command, tmp_path):
    before = result()
    figure = draw({"one": before, "two": before}, path=tmp_path / command)
    xr.testing.assert_identical(before, result())
    assert [axes.get_title() for axes in figure.axes if axes.get_title() in ("one", "two")] == ["one", "two"]
    assert all(part in text_of(figure) for part in ("T = 64", "4 prompts", "float32"))
    assert ElementTree.parse(tmp_path / f"{command}.svg").getroot().tag.endswith("svg")
    assert imread(tmp_path / f"{command}.png").shape[1] > 900
    draw(results_of("large")[draw], path=tmp_path / "large")
    for file in tmp_path.iterdir():
        assert file.stat().st_size < LARGEST, file.name


@pytest.mark.slow
@pytest.mark.parametrize("size", ["middle", "large"])
def test_everything_drawn_is_within_its_axes(size):
    for draw, ds in results_of(size).items():
        figure: Figure = draw(ds)
        figure.draw_without_rendering()
        for axes in (axes for axes in figure.axes if axes.axison):
            limits = np.sort([axes.get_xlim(), axes.get_ylim()])
            for line in (line for line in axes.lines if line.get_transform() == axes.transData):
                at = np.asarray(line.get_xydata(), dtype=float)
                at = at[np.isfinite(at).all(1)]
                assert np.all((limits[:, 0] <= at) & (at <= limits[:, 1])), axes.get_ylabel()


def test_parts_are_stacked_up_to_the_total_and_negative_ones_hang_down():
    ds = leakage_result()
    figure = leakage_figure(ds)
    early = ds.isel(band=0)
    cell = labelled(figure, "parts (nat²)")
    assert cell.get_xlabel() == "block, queries 9-31"
    above, below = np.zeros(ds.sizes["layer"]), np.zeros(ds.sizes["layer"])
    for part, color in PARTS.items():
        bars = [p for p in cell.patches if isinstance(p, Rectangle) and to_hex(p.get_facecolor()) == color.lower()]
        values = early["log_form_by_block"].sel(part=part).values
        np.testing.assert_allclose([bar.get_height() for bar in bars], values)
        np.testing.assert_allclose([bar.get_y() for bar in bars], np.where(values < 0, below, above))
        above, below = above + values.clip(0), below + values.clip(max=0)
    cell = labelled(figure, "leakage (nat²)")
    total = early["log_form_by_block"].sel(part="total").values
    np.testing.assert_allclose(above + below, total)
    assert any(np.allclose(dots, total) for dots in drawn(cell, marker="o"))
    alone = early["log_stream_by_block"].values
    assert any(np.allclose(dots, alone) for dots in drawn(cell, color=ORANGE, marker="D"))
    bare = ds.drop_vars([name for name in ds if str(name).endswith(("_low", "_high"))])  # bootstrap=0
    assert not labelled(leakage_figure(bare), "leakage (nat²)").collections[1:]  # noise alone, no intervals
    noise_lines, intervals = (ends_of(lines)[..., 1] for lines in cell.collections[:2])
    np.testing.assert_allclose(noise_lines[:, 0], early["log_noise_by_block"].values)
    np.testing.assert_allclose(intervals, np.stack([total - 0.02, total + 0.02], -1))
    cell = labelled(figure, "leakage (weight²)")
    for source, color in SOURCES.items():
        values = early["weight_source_by_block"].sel(source=source).values
        np.testing.assert_allclose(drawn(cell, color=color, marker="o"), [values])


def test_shares_beyond_the_axis_are_arrowheads_and_none_is_said():
    ds = leakage_result()
    log, weight = (
        axes for axes in leakage_figure(ds).axes if axes.get_ylabel() == "share of total"
    )  # in the order of rows
    assert [text.get_text() for text in log.texts] == ["no total"]
    np.testing.assert_allclose(drawn(log, color=BLUE, marker="o"), [[0.25]])
    np.testing.assert_allclose(drawn(log, color=VERMILLION, marker="o"), [[0.75]])
    assert not drawn(log, color=GREEN)  # the log form has no spread
    np.testing.assert_allclose(drawn(weight, color=BLUE, marker="v"), [[SHARES[0]], [SHARES[0]]])  # and of its interval
    np.testing.assert_allclose(drawn(weight, color=GREEN, marker="o"), [[0]])


def test_shares_are_drawn_where_the_table_prints_them():
    def share_cells(name: str = "", band: int = 0, value: float = 0.0) -> list[Axes]:
        ds = leakage_result()
        for form in ("log", "weight"):
            ds[f"{form}_share_of_model"][:] = 0.5
        if name:
            ds[name][..., band] = value
        return [axes for axes in leakage_figure(ds).axes if axes.get_ylabel() == "share of total"]

    for cell in share_cells():
        assert not cell.texts
        np.testing.assert_allclose(drawn(cell, color=BLUE, marker="o"), [[0.5, 0.5]])
    log, weight = share_cells("log_form_of_model_low", 1, -0.1)
    assert [text.get_text() for text in log.texts] == ["no total"]
    np.testing.assert_allclose(drawn(log, color=BLUE, marker="o"), [[0.5]])
    assert not weight.texts
    for cell in share_cells("log_stream_by_block_low", 0, 0.01):  # the null check fails
        assert [text.get_position()[0] for text in cell.texts] == [0]
        np.testing.assert_allclose(drawn(cell, color=BLUE, marker="o"), [[0.5]])


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


def test_a_block_far_beyond_the_others_is_named_and_leaves_them_visible():
    values = xr.DataArray(np.ones((2, 20)), dims=("part", "layer"), coords={"layer": range(20)})
    assert outliers(values) == (None, "")
    values[:, 3] = -300
    assert outliers(values) == (pytest.approx(2.2), "block 3 (600)")
    ds = leakage_result(layers=30)
    ds["log_form_by_block"][1:, 7, 0] = 300
    figure = leakage_figure({"ape": ds})
    assert "ape: beyond the axis of parts: block 7 (1.2e+03)" in text_of(figure)
    assert labelled(figure, "parts (nat²)").get_ylim()[1] < 1


def test_a_weight_form_that_no_weight_can_have_is_left_out_with_the_reason():
    """A number in [0, 1] has a variance of at most 1/4. Qwen2.5's key biases make logits of hundreds beside a held log Z."""
    qwen = load("reports/llm/leakage/leakage-qwen2.5-coder-0.5b-instruct-q4_k_m.nc")
    cells = np.abs(qwen["weight_form_by_block"])
    assert float(cells.sel(cell=["both", "mask"]).max()) < BOUND == 0.25  # where weights are normalized
    beyond = [int(layer) for layer in qwen["layer"] if float(cells.isel(band=0).sel(layer=layer).max()) > BOUND]
    assert {0, 1, 4, 8} <= set(beyond)
    figure = leakage_figure({"qwen": qwen})
    cell = labelled(figure, "leakage (weight²)")
    for line in cell.lines[:3]:
        assert np.isnan(np.asarray(line.get_ydata())).nonzero()[0].tolist() == beyond
    assert f"no weight form in block {', '.join(map(str, beyond))}: variances above 1/4" in text_of(figure)
    assert not resolved(qwen, "weight", "9-31")
    report = leakage_report({"qwen": qwen})
    assert not any("e+" in cell for table in report.tables for row in table.rows for cell in row)


def test_every_replacement_has_its_colour():
    ds = several("mean", "zero", 7)
    figure = bos_figure({"one": ds, "two": bos_result("mean")})
    share = labelled(figure, "share removed")
    assert [drawn(share, color=color, marker="o")[0].tolist() for color in (BLUE, VERMILLION)] == [[0.35], [0.35]]
    dashed = [ends_of(lines) for lines in share.collections if to_hex(lines.get_color()) == GREY]  # pyright: ignore
    np.testing.assert_allclose(np.concatenate(dashed)[..., 1], PUBLISHED)
    np.testing.assert_allclose(np.concatenate(dashed)[..., 0].mean(-1), [0])  # early queries alone
    assert [text.get_text() for text in share.texts] == ["none"]
    change = labelled(figure, r"change of $\alpha_0$")
    expected = (ds["alpha_after"] - ds["alpha_before"]).sel(replacement="zero").values.ravel()
    np.testing.assert_allclose(drawn(change, color=VERMILLION), [expected])
    assert {"mean", "zero", "token 7", "before", "[Ruscio], early"} <= legends_of(figure)
    alone, of_several = bos_figure(bos_result("zero")), bos_figure(several("zero"))
    for label in ("share removed", r"change of $\alpha_0$", "change of loss (nat)"):
        np.testing.assert_equal(drawn(labelled(alone, label)), drawn(labelled(of_several, label)))


def test_loss_and_sensitivity_before_and_after():
    ds = bos_result("random")
    ds["sensitivity_after"][0] = 1e9
    figure = bos_figure(ds)
    loss = labelled(figure, "change of loss (nat)")
    (curve,) = drawn(loss, color=GREEN)
    np.testing.assert_allclose(curve[:8], ds["loss_change"].values[:8])
    assert np.isfinite(curve).all()
    assert loss.get_xscale() == "log"
    sensitivity = labelled(figure, r"$\|J_j\|_F\,/\,\sqrt{d}$")
    after = drawn(sensitivity, color=GREEN, marker="None")[0]
    np.testing.assert_allclose(after, [np.nan, *ds["sensitivity_after"].values[1:]])
    (arrow,) = drawn(sensitivity, color=GREEN, marker="^")
    assert arrow.tolist() == [HIGHEST * float(ds["sensitivity_before"].max())]
    assert sensitivity.get_ylim()[1] < 1e3


def test_changes_of_many_blocks_are_medians_in_bands():
    swapped = several("mean", "zero", layers=30, heads=9)
    figure = bos_figure(swapped)
    cell = labelled(figure, r"change of $\alpha_0$")
    change = (swapped["alpha_after"] - swapped["alpha_before"]).sel(replacement="zero")
    np.testing.assert_allclose(drawn(cell, color=VERMILLION), [change.median("head").values])
    assert "median and all of the heads" in text_of(figure)
    assert "a dot per head" not in text_of(figure)
