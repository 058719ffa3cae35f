"""Figures of the attention probes: what is drawn is what the results hold; other probes' results are refused."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
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
    several,
    sinks_result,
    text_of,
    trajectory_result,
    with_roles,
)
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

import probes
from probes.errors import InputError
from probes.figures import BLACK, BLUE, GREEN, VERMILLION, bos_figure, leakage_figure, sinks_figure, trajectory_figure
from probes.figures.bos import HIGHEST, PUBLISHED
from probes.figures.leakage import SHARES
from probes.figures.palette import GREY, ORANGE, PARTS, SOURCES
from probes.figures.steady import steady
from probes.figures.style import LARGEST, points, save_figure, thinned
from probes.measures.bos_swap import bos_swap
from probes.measures.leakage import leakage
from probes.measures.sinks import sinks
from probes.measures.trajectory import trajectory

# ------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(("draw", "result", "command"), DRAWN)
def test_results_of_another_probe_are_refused(draw, result, command):
    with pytest.raises(InputError, match="no results to draw; give at least one"):
        draw({})
    for _, other, theirs in DRAWN:
        if theirs != command:
            with pytest.raises(InputError, match=rf"the result of 'a' has no .*; give one of headwater {command}$"):
                draw({"fine": result(), "a": other()})
    folded = result().expand_dims(condition=["init"])
    with pytest.raises(InputError, match="the result of 'tiny' has no"):
        draw(folded)


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "result", "command"), DRAWN)
def test_one_column_per_model_says_what_it_rests_on(draw, result, command, tmp_path):
    before = result()
    figure = draw({"one": before, "two": before}, path=tmp_path / command)
    xr.testing.assert_identical(before, result())
    titles = [axes.get_title() for axes in figure.axes if axes.get_title() in ("one", "two")]
    assert titles == ["one", "two"]
    for part in ("T = 64", "4 prompts", "float32"):
        assert part in text_of(figure)
    png, svg = tmp_path / f"{command}.png", tmp_path / f"{command}.svg"
    assert png.stat().st_size < LARGEST
    assert svg.stat().st_size < LARGEST
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert imread(png).shape[1] > 900


@pytest.mark.slow
def test_texts_lie_inside_and_clear_of_each_other():
    for draw, result, _ in DRAWN:
        figure = draw({name: result() for name in ("one", "two")})
        figure.draw_without_rendering()
        (caption,) = [text.get_window_extent() for text in figure.texts]
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert box is not None
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
            assert not caption.overlaps(box)


@pytest.mark.slow
def test_results_as_the_probes_make_them():
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=8, length=40)
    few: dict[str, Any] = {"lags": (1, 2), "bootstrap": 20}
    found = {
        sinks_figure: sinks(model, tokens, pictures=2),
        trajectory_figure: trajectory(model, tokens, starts=8),
        leakage_figure: leakage(model, tokens, **few),
        bos_figure: bos_swap(model, tokens, replacement=5, profile_prompts=1, products=8, **few),
    }
    for draw, ds in found.items():
        figure = draw(ds)
        assert figure.axes[0].get_title() == "tiny-llama"
    legend = labelled(bos_figure(found[bos_figure]), "share removed").figure.axes
    texts = {text.get_text() for axes in legend if (made := axes.get_legend()) for text in made.get_texts()}
    assert "token 5" in texts
    bare = leakage(model, tokens, lags=(1, 2), bootstrap=0)
    assert not labelled(leakage_figure(bare), "leakage (nat²)").collections[1:]  # noise alone, no intervals


# ------------------------------------------------------------------------------------------------------------- sinks


def test_heads_are_outlined_by_role():
    ds = with_roles(sinks_result())
    figure = sinks_figure(ds)
    heads = labelled(figure, "block")
    found = {to_hex(patch.get_edgecolor()): np.asarray(patch.get_path().vertices) for patch in heads.patches}
    for role, color in (("reads", VERMILLION), ("parks", GREEN)):
        corners = found[color.lower()].reshape(-1, 5, 2)
        places = {(round(y), round(x)) for x, y in corners[:, [0, 2]].mean(1)}
        assert places == set(map(tuple, np.argwhere(ds["has_role"].sel(role=role).values).tolist()))
        assert places
    counts = [int(ds["has_role"].sel(role=role).sum()) for role in ("reads", "parks", "reacts")]
    assert heads.get_xlabel() == f"head\n{counts[0]} read, {counts[1]} park, {counts[2]} react"
    assert "takes from 0 more than 0.1 of the stream" in text_of(figure)
    assert "sink-reading" not in text_of(figure)


def test_heads_that_read_the_sink_are_outlined():
    ds = sinks_result()
    figure = sinks_figure(ds)
    heads = labelled(figure, "block")
    np.testing.assert_allclose(np.asarray(heads.images[0].get_array()), ds["attends"].values)
    (outlined,) = heads.patches
    corners = np.asarray(outlined.get_path().vertices).reshape(-1, 5, 2)
    places = {(round(y), round(x)) for x, y in corners[:, [0, 2]].mean(1)}
    assert places == set(map(tuple, np.argwhere(ds["selected"].sel(rule="sink-reading").values).tolist()))
    assert places
    assert to_hex(outlined.get_edgecolor()) == VERMILLION.lower()
    assert (np.ptp(corners, axis=1) < 1).all()  # around one cell each
    written = [text.get_text() for text in heads.texts]
    assert written == [f"{value:.2f}".removeprefix("0") for value in ds["attends"].values.ravel()]
    assert heads.get_xlabel() == f"head\n{len(places)} of 12 sink-reading"
    assert "weight on 0 > 0.3 and output read from 0 > 0.35" in text_of(figure)


def test_weights_on_keys_and_shares_of_sinks():
    ds = sinks_result()
    figure = sinks_figure(ds)
    alpha = labelled(figure, r"mean weight $\alpha_k$")
    np.testing.assert_allclose(drawn(alpha, linestyle="-"), ds["alpha"].mean(("prompt", "head")).values)
    np.testing.assert_allclose(drawn(alpha, color=GREY, linestyle="--"), ds["uniform"].values[:1])  # once per window
    assert alpha.get_yscale() == "log"
    rate = labelled(figure, "share that is a sink")
    np.testing.assert_allclose(drawn(rate, color=BLACK), [ds["sink_rate_of_model"].values])
    np.testing.assert_allclose(drawn(rate, color=BLUE), [ds["over_tau_of_model"].values])
    ratio = labelled(figure, "norm, 0 / rest")
    norms = ds["written_norm"]
    expected = (norms.sel(place="sink") / norms.sel(place="rest")).values.ravel()
    np.testing.assert_allclose(np.sort(np.concatenate(drawn(ratio, color=GREEN, marker="s"))), np.sort(expected))
    averaged = ds.assign(alpha=ds["alpha"].mean("prompt"))  # as keys="all" gives it
    again = labelled(sinks_figure(averaged), r"mean weight $\alpha_k$")
    np.testing.assert_allclose(drawn(again, linestyle="-"), ds["alpha"].mean(("prompt", "head")).values)


def test_pictures_are_the_patterns_and_named():
    ds = sinks_result()
    figure = sinks_figure(ds)
    pictures = [axes for axes in figure.axes[0].figure.findobj(Axes) if axes.get_title() in ("0.3", "1.2", "2.1")]
    assert len(pictures) == 3
    for n, picture in enumerate(pictures):
        np.testing.assert_allclose(np.asarray(picture.images[0].get_array()), ds["pattern"].values[n])
    assert "pictures" not in text_of(sinks_figure(sinks_result(pictures=0)))


@pytest.mark.slow
def test_large_models_and_many_keys_stay_small_and_exact(tmp_path):
    ds = sinks_result(layers=24, heads=14, keys=1000)
    figure = sinks_figure({"one": ds, "two": ds, "three": ds}, path=tmp_path / "large")
    assert (tmp_path / "large.png").stat().st_size < LARGEST
    assert (tmp_path / "large.svg").stat().st_size < LARGEST
    root = ElementTree.parse(tmp_path / "large.svg").getroot()
    assert any("two" in "".join(element.itertext()) for element in root.iter() if element.tag.endswith("text"))
    assert not labelled_first(figure, "block").texts  # no values in so many cells
    pixels = imread(tmp_path / "large.png")[..., :3]
    for color in ("#ffffff", VERMILLION):  # the paper is white, and rare colours are not replaced by others
        assert (np.abs(pixels - to_rgb(color)).max(-1) < 1 / 255).any()
    assert (pixels[:5] == 1).all()


def labelled_first(figure: Figure, label: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_ylabel() == label)


# -------------------------------------------------------------------------------------------------------- trajectory


def test_the_stream_at_position_0_is_drawn_with_and_without_bos():
    ds = steady(trajectory_result())
    figure = trajectory_figure(ds)
    norms = labelled(figure, r"norm $\|h\|_2$")
    for first, color in (("bos", VERMILLION), ("text", BLUE)):
        at = ds.sel(first=first)
        np.testing.assert_allclose(drawn(norms, color=color, linestyle="-"), [at["norm_first"].values])
        np.testing.assert_allclose(drawn(norms, color=color, linestyle="--"), [at["norm_others"].values])
        top = drawn(labelled(figure, "largest $|h|$ at 0 / median"), color=color)
        np.testing.assert_allclose(top, at["top_ratio"].values.T)
    lines = drawn(labelled(figure, "largest $|h|$ at 0 / median"), color=GREY)
    assert sorted(line[0] for line in lines) == [100, 1000]
    cosine = labelled(figure, "cosine of pairs")
    np.testing.assert_allclose(drawn(cosine, color=BLACK), [ds["cosine"].sel(place="position 0").values])
    np.testing.assert_allclose(drawn(cosine, color=VERMILLION), [ds["cosine_with_bos"].values])
    band = np.asarray(cosine.collections[1].get_paths()[0].vertices)[:, 1]
    control = ds["cosine"].sel(place="position 1 behind BOS").values
    assert band.max() == pytest.approx(control.max() + 0.1)
    assert band.min() == pytest.approx(control.min() - 0.1)
    assert "by other text behind it: 0;" in text_of(figure)


def test_models_without_bos_have_no_control():
    ds = trajectory_result().isel(first=[1], place=[0])
    ds["cosine_with_bos"] = ds["cosine_with_bos"] * np.nan
    figure = trajectory_figure({"none": ds})
    legends = [axes.get_legend() for axes in figure.axes]
    texts = {text.get_text() for legend in legends if legend for text in legend.get_texts()}
    assert "text at position 0" in texts
    assert not any("BOS" in text for text in texts)


# ----------------------------------------------------------------------------------------------------------- leakage


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
    noise_lines, intervals = (ends_of(lines)[..., 1] for lines in cell.collections[:2])
    np.testing.assert_allclose(noise_lines[:, 0], early["log_noise"].mean("head").values)
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
    def share_cells(**changes: Any) -> list[Axes]:
        ds = leakage_result()
        for form in ("log", "weight"):
            ds[f"{form}_share_of_model"][:] = 0.5
        for name, band, value in changes.values():
            ds[name][..., band] = value
        return [axes for axes in leakage_figure(ds).axes if axes.get_ylabel() == "share of total"]

    for cell in share_cells():
        assert not cell.texts
        np.testing.assert_allclose(drawn(cell, color=BLUE, marker="o"), [[0.5, 0.5]])
    log, weight = share_cells(vague=("log_form_of_model_low", 1, -0.1))
    assert [text.get_text() for text in log.texts] == ["no total"]
    np.testing.assert_allclose(drawn(log, color=BLUE, marker="o"), [[0.5]])
    assert not weight.texts
    for cell in share_cells(noisy=("log_stream_by_block_low", 0, 0.01)):  # the null check fails
        assert [text.get_position()[0] for text in cell.texts] == [0]
        np.testing.assert_allclose(drawn(cell, color=BLUE, marker="o"), [[0.5]])


# --------------------------------------------------------------------------------------------------------------- bos


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
    legends = [axes.get_legend() for axes in figure.axes]
    texts = {text.get_text() for legend in legends if legend for text in legend.get_texts()}
    assert {"mean", "zero", "token 7", "before", "[Ruscio], early"} <= texts


def test_one_replacement_is_drawn_as_one_of_several():
    single, (one,) = bos_result("zero"), [several("zero")]
    for label in ("share removed", r"change of $\alpha_0$", "change of loss (nat)"):
        first, second = (labelled(bos_figure(ds), label) for ds in (single, one))
        np.testing.assert_equal(drawn(first), drawn(second))


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


# ------------------------------------------------------------------------------------------------------------- style


def test_thinned_curves_keep_the_first_positions_and_all_of_the_mean():
    x, y = np.arange(5000), np.random.default_rng(0).normal(size=(2, 5000))
    places, means = thinned(x, y, most=64, exact=16)
    assert places.size <= 64
    assert (np.diff(places) > 0).all()
    np.testing.assert_array_equal(places[:16], x[:16])
    np.testing.assert_array_equal(means[:, :16], y[:, :16])
    whole = thinned(x, np.ones(5000), most=64, exact=16)[1]
    np.testing.assert_array_equal(whole, np.ones_like(places))
    y[0, 4999] = np.nan
    assert np.isfinite(thinned(x, y)[1]).all()
    np.testing.assert_array_equal(thinned(x[:50], y[:, :50])[1], y[:, :50])


def test_intervals_that_say_nothing_are_left_out_and_their_values_are_pale():
    axes = Figure().add_subplot()
    x, values = np.arange(3.0), np.array([0.5, 0.2, np.nan])
    low, high = np.array([0.4, -9.0, 0.0]), np.array([0.6, 9.0, 1.0])
    points(axes, x, values, (low, high), color=BLUE, limits=(0.0, 1.0))
    (certain,) = axes.collections
    assert ends_of(certain)[..., 1].tolist() == [[0.4, 0.6]]
    assert [one.tolist() for one in drawn(axes, marker="o")] == [[0.5], [0.2]]
    assert [line.get_alpha() for line in axes.lines] == [1.0, 0.35]


def test_small_figures_are_saved_as_they_are(tmp_path: Path):
    figure = Figure(figsize=(2, 2))
    figure.add_subplot().plot([0, 1], [0, 0.123456])
    png, svg = save_figure(figure, tmp_path / "small")
    assert imread(png).shape == (340, 340, 4)
    assert "<!--" in svg.read_text(encoding="utf-8")
