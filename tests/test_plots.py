"""Figures of sensitivity: what is drawn is what the results hold; files are whole, small and the same every time."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
import xarray as xr
from drawn import drawn, ends_of, leakage_result, legends_of, result, text_of
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from probes.errors import InputError
from probes.figures import (
    BLACK,
    BLUE,
    DECADES,
    VERMILLION,
    jacobian_figure,
    save_figure,
    theory_figure,
)
from probes.figures.draw import draw
from probes.figures.palette import Style
from probes.figures.series import Curve
from probes.figures.style import LARGEST, STYLE, coinciding, legend_columns, numeral, thinned
from probes.results.curves import band, rms_profiles
from probes.results.dataset import combine
from probes.results.profiles import profiles


@pytest.fixture(scope="module")
def combined() -> xr.Dataset:
    return combine([result("pretrained", 0), *(result("init", s) for s in range(3)), result("init-nope", 0)])


@pytest.fixture(scope="module")
def told(combined) -> xr.Dataset:
    """The same with theories."""
    curve = combined["sensitivity"] * 1.1
    fitted = ("condition", "position"), np.ones((3, 64))
    return combined.assign(theory_score_path=curve, theory_cesaro=fitted, theory_config=2 * curve)


def curves_in(axes: Axes) -> list[Line2D]:
    """Without the dots at their ends."""
    return [line for line in axes.lines if line.get_marker() == "None"]


def lines_of(axes: Axes, color: str, *, dashed: bool = False) -> list[np.ndarray]:
    lines = [line for line in curves_in(axes) if line.get_color() == color and line.is_dashed() >= dashed]
    return [np.asarray(line.get_ydata()) for line in lines]


def band_of(axes: Axes, color: str) -> np.ndarray:
    """Heights of the corners of the band of a colour."""
    (area,) = [area for area in axes.collections if to_hex(np.asarray(area.get_facecolor())[0]) == color.lower()]
    return np.asarray(area.get_paths()[0].vertices)[:, 1]


def test_lines_and_bands_are_those_of_the_results(combined):
    before = dict(matplotlib.rcParams)
    axes = jacobian_figure(combined).axes[0]
    assert dict(matplotlib.rcParams) == before
    found = profiles(combined)
    np.testing.assert_allclose(lines_of(axes, VERMILLION), [found["pretrained"][0].mean])
    expected = band([run.mean for run in found["init"]])
    np.testing.assert_allclose(lines_of(axes, BLUE), [expected.centre])
    assert band_of(axes, BLUE).max() == pytest.approx(expected.high.max())
    assert band_of(axes, BLUE).min() == pytest.approx(expected.low.min())
    single = found["pretrained"][0]
    widest = (single.mean * np.exp(2 * single.stderr / single.mean)).max()
    assert band_of(axes, VERMILLION).max() == pytest.approx(widest)
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == 3
    assert all(np.array_equal(line.get_xdata(), [0, 1]) for line in dots)
    assert axes.get_yscale() == "log"


def test_text_says_what_is_shown_and_names_an_unusual_place(combined):
    figure = jacobian_figure(combined)
    said = text_of(figure)
    assert figure.axes[0].get_title() == "tiny"
    assert all(part in said for part in ("T = 64", "4 prompts", "sketch, 32 products", "float32"))
    assert {"pretrained", "init (3 seeds)", "init, no positional encoding"} == legends_of(figure)
    assert {"pretrained"} == legends_of(jacobian_figure(result("pretrained", 0)))
    assert not any(word in said for word in ("readout", "path", "query", "block"))
    options = {"method": "exact", "readout": "logits", "pathway": "value", "query": 5, "from_layer": 2}
    moved = text_of(jacobian_figure(combined.assign_attrs(options=json.dumps(options))))
    assert all(words in moved for words in ("readout: logits", "value path", "query at 5", "from block 2"))


def test_one_panel_per_model_on_shared_axes(combined):
    for models, rows, columns in ((2, 1, 2), (4, 2, 2), (5, 2, 3)):
        figure = jacobian_figure({f"model {i}": combined for i in range(models)})
        shown = [axes for axes in figure.axes if axes.get_visible()]
        assert [axes.get_title() for axes in shown] == [f"model {i}" for i in range(models)]
        figure.draw_without_rendering()  # places the panels
        places = [axes.get_position() for axes in shown]
        assert [len({round(at, 2) for at in x}) for x in ([p.y0 for p in places], [p.x0 for p in places])] == [
            rows,
            columns,
        ]
        assert len({axes.get_ylim() for axes in shown}) == 1
        assert [bool(axes.get_ylabel()) for axes in shown] == [n % columns == 0 for n in range(models)]


def test_theories_are_drawn_beside_what_they_predict(combined, told):
    figure = jacobian_figure(told)
    for condition, color in (("init", BLACK), ("pretrained", VERMILLION)):
        expected = band([p.mean for p in profiles(told, "theory_score_path")[condition]]).centre
        assert any(np.allclose(one, expected) for one in lines_of(figure.axes[0], color, dashed=True))
    names = {"second-moment kernel, predicted", "second-moment kernel of the trained weights"}
    assert names <= legends_of(figure)
    plain, more = (jacobian_figure(ds, overlay=True).axes[0] for ds in (combined, told))
    assert len(curves_in(plain)) == len(curves_in(more))


def test_the_figure_of_theories(combined, told, tmp_path):
    figure = theory_figure({"one": told, "two": told}, path=tmp_path / "theory")
    rows = {axes.get_ylabel(): axes for axes in figure.axes if axes.get_ylabel()}
    init = [p.mean for p in rms_profiles(combined)["init"]]
    kernel = band([p.mean for p in rms_profiles(told, "theory_score_path")["init"]]).centre
    ratio = band([mean / kernel for mean in init]).centre
    assert any(np.allclose(one, ratio) for one in lines_of(rows["measured / kernel"], BLUE))
    predicted = lines_of(rows["predicted / measured"], BLACK)
    assert any(np.allclose(one, kernel / band(init).centre) for one in predicted)
    assert (tmp_path / "theory.png").stat().st_size < LARGEST


def test_overlay_draws_all_models_in_one_panel(combined):
    figure = jacobian_figure({"one": combined, "two": combined}, overlay=True)
    (axes,) = figure.axes
    curves = curves_in(axes)
    assert len(curves) == 6
    assert len({line.get_color() for line in curves}) == 2
    assert len({str(line.get_linestyle()) for line in curves if line.get_color() == curves[0].get_color()}) == 3
    assert {"one", "two", "pretrained", "init"} <= legends_of(figure)


def test_zeros_are_left_out_and_the_axis_stays_readable():
    faded = result("pretrained", 0, zeros=20)
    faded["sensitivity"][:, 20] = 1e-12
    axes = jacobian_figure(faded).axes[0]
    (line,) = lines_of(axes, VERMILLION)
    np.testing.assert_array_equal(np.isnan(line), np.arange(64) < 20)
    low, high = axes.get_ylim()
    assert high / low == pytest.approx(10**DECADES)
    assert len(axes.get_yticks()) >= 3
    faded["sensitivity"][:] = np.linspace(1.1, 4, 64)  # a narrow range still has labels
    axes = jacobian_figure(faded).axes[0]
    low, high = axes.get_ylim()
    labels = {axes.yaxis.get_major_formatter()(tick) for tick in axes.get_yticks() if low <= tick <= high}
    assert {"2", "3"} <= labels


def test_nothing_to_draw_is_refused(combined, tmp_path):
    (tmp_path / "file").touch()
    silent, other = result("pretrained", 0, zeros=64), xr.Dataset({"leakage": ("lag", [1.0])})
    for draw_it, says in (
        (lambda: jacobian_figure({}), "no results to draw"),
        (lambda: jacobian_figure({"silent": silent}), "'silent' has no sensitivity above zero"),
        (lambda: jacobian_figure(other), "has no sensitivity above zero"),
        (lambda: theory_figure(combined), "no theories in the results to draw"),
        (lambda: jacobian_figure(result("pretrained", 0), path=tmp_path / "file" / "figure"), "cannot write"),
    ):
        with pytest.raises(InputError, match=says):
            draw_it()


def test_legends_are_as_wide_as_there_is_room():
    kernels = ["second-moment kernel, predicted", "second-moment kernel of the trained weights"]
    labels = ["pretrained", "init (3 seeds)", *kernels]
    for count, width in ((1, 6.2), (2, 7.0), (3, 10.3), (4, 6.2), (5, 7.0), (6, 10.3), (7, 6.2)):
        handles = [Line2D([], [], label=label) for label in (labels * 2)[:count]]
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(width, 3), layout="constrained")
            figure.subplots()
            figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns(handles, width))
            figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1


@pytest.mark.slow
def test_saved_files_are_whole_small_and_the_same_every_time(combined, tmp_path):
    models, folder = {f"qwen2.{i}": combined for i in range(4)}, tmp_path / "new"
    jacobian_figure(models, path=folder / "fig1.5.png")
    png, svg = files = [folder / "fig1.5.png", folder / "fig1.5.svg"]
    assert sorted(folder.iterdir()) == files
    assert png.stat().st_size < LARGEST
    assert imread(png).shape[1] > 1000
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    again = save_figure(jacobian_figure(models), tmp_path / "again.v2")
    assert [path.name for path in again] == ["again.v2.png", "again.v2.svg"]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]


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


def test_ticks_are_read_as_numbers():
    said = {0.01: "0.01", 0.0: "0", 2e4: "20,000", 1e5: "$10^{5}$", 2e-5: r"$2\cdot 10^{-5}$", -0.1: "−0.1"}
    assert {value: numeral(value) for value in said} == said


def test_thinned_curves_keep_the_first_positions_and_all_of_the_mean():
    x, y = np.arange(5000), np.random.default_rng(0).normal(size=(2, 5000))
    places, means = thinned(x, y, most=64, exact=16)
    assert places.size <= 64
    assert (np.diff(places) > 0).all()
    np.testing.assert_array_equal(places[:16], x[:16])
    np.testing.assert_array_equal(means[:, :16], y[:, :16])
    assert (thinned(x, np.ones(5000), most=64, exact=16)[1] == 1).all()
    y[0, 4999] = np.nan
    assert np.isfinite(thinned(x, y)[1]).all()
    np.testing.assert_array_equal(thinned(x[:50], y[:, :50])[1], y[:, :50])


def test_intervals_that_say_nothing_are_left_out_and_their_values_are_pale():
    axes = Figure().add_subplot()
    x, values = np.arange(3.0), np.array([0.5, 0.2, np.nan])
    low, high = np.array([0.4, -9.0, 0.0]), np.array([0.6, 9.0, 1.0])
    draw(axes, [Curve(x, values, Style("", BLUE), low, high, kind="points")], limits=(0.0, 1.0))
    (certain,) = axes.collections
    assert ends_of(certain)[..., 1].tolist() == [[0.4, 0.6]]
    assert [one.tolist() for one in drawn(axes, marker="o")] == [[0.5], [0.2]]
    assert [line.get_alpha() for line in axes.lines] == [1.0, 0.35]


def test_only_what_is_too_large_is_saved_smaller(tmp_path):
    figure = Figure(figsize=(2, 2))
    cell = figure.add_subplot()
    cell.plot([0, 1], [0, 0.123456], color=VERMILLION)
    png, svg = save_figure(figure, tmp_path / "small")
    assert imread(png).shape == (340, 340, 4)
    assert "<!--" in svg.read_text(encoding="utf-8")
    cell.imshow(np.random.default_rng(0).uniform(size=(99, 99, 3)), extent=(0, 1, 0, 1), alpha=0.5, zorder=0)
    png, svg = save_figure(figure, tmp_path / "large", largest=20_000)
    assert "<!--" not in svg.read_text(encoding="utf-8")
    pixels = imread(png)[..., :3]
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) <= 256
    for color in ("#ffffff", VERMILLION):  # the paper is white, and rare colours are not replaced by others
        assert (np.abs(pixels - to_rgb(color)).max(-1) < 1 / 255).any()
    assert (pixels[:5] == 1).all()


SOURCES = {"mask": 0.4, "residual": -0.1, "spread": 0.0}


@pytest.fixture(scope="module")
def leakage() -> xr.Dataset:
    made = leakage_result()
    values = np.array([[one, 9.0] for one in SOURCES.values()])  # the later band is not drawn
    for end, by in (("", 0), ("_low", -0.03), ("_high", 0.03)):
        made[f"log_source_of_model{end}"] = ("source", "band"), values + by
    return made
