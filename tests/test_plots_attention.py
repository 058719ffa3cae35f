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
    legends_of,
    several,
    text_of,
)
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from probes.errors import InputError
from probes.figures import BLUE, GREEN, VERMILLION, bos_figure
from probes.figures.bos import HIGHEST, PUBLISHED
from probes.figures.palette import GREY
from probes.figures.style import LARGEST

SIZES = {"small": (6, 4), "middle": (30, 9), "large": (80, 64)}  # blocks, heads


def results_of(size: str) -> dict[Any, xr.Dataset]:
    """A result for each figure."""
    blocks, heads = SIZES[size]
    sizes = {"layers": blocks, "heads": heads}
    made = (bos_result(**sizes),)
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
