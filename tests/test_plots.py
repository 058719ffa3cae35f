"""Figures: what is drawn is what the results hold, and files are whole, small and the same every time."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from probes.errors import InputError
from probes.figures import BLACK, BLUE, CONDITIONS, DECADES, VERMILLION, jacobian_figure, save_figure, theory_figure
from probes.figures.style import STYLE, legend_columns
from probes.results.curves import band, profiles
from probes.results.dataset import combine, dataset
from probes.results.profiles import mean_profiles


def result(condition: str, seed: int, *, length: int = 64, zeros: int = 0) -> xr.Dataset:
    random = np.random.default_rng([seed, len(condition)])
    x = np.linspace(0, 1, length)
    sensitivity = (0.02 + np.exp(-20 * x) + 3 * np.exp(-40 * (1 - x))) * random.uniform(0.8, 1.25, (4, length))
    sensitivity[:, :zeros] = 0
    dims = ("prompt", "position")
    return dataset(
        {"sensitivity": (dims, sensitivity), "stderr": (dims, 0.1 * sensitivity)},
        tokens=torch.zeros(4, length, dtype=torch.int64),
        attrs={
            "model": "owner/tiny",
            "condition": condition,
            "seed": seed,
            "weights": f"{condition} {seed}",
            "dtype": "float32",
            "options": {"method": "sketch", "products": 32},
        },
    )


@pytest.fixture(scope="module")
def combined() -> xr.Dataset:
    return combine([result("pretrained", 0), *(result("init", s) for s in range(3)), result("init-nope", 0)])


def lines_of(axes: Axes, color: str) -> list[np.ndarray]:
    """The curves (not the dots at their ends) of a colour."""
    return [np.asarray(line.get_ydata()) for line in curves_in(axes) if line.get_color() == color]


def curves_in(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if line.get_marker() == "None"]


def band_of(axes: Axes, color: str) -> np.ndarray:
    """Heights of the corners of the band of a colour."""
    (area,) = [area for area in axes.collections if to_hex(np.asarray(area.get_facecolor())[0]) == color.lower()]
    return np.asarray(area.get_paths()[0].vertices)[:, 1]


def texts_of(figure: Figure) -> str:
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return " | ".join([*legends, figure.get_supxlabel(), *(axes.get_title() for axes in figure.axes)])


def test_lines_and_bands_are_those_of_the_results(combined):
    axes = jacobian_figure(combined).axes[0]
    found = mean_profiles(combined)
    np.testing.assert_allclose(lines_of(axes, VERMILLION), [found["pretrained"][0].mean])
    expected = band([run.mean for run in found["init"]])
    np.testing.assert_allclose(lines_of(axes, BLUE), [expected.centre])
    assert band_of(axes, BLUE).max() == pytest.approx(expected.high.max())
    assert band_of(axes, BLUE).min() == pytest.approx(expected.low.min())
    single = found["pretrained"][0]
    assert band_of(axes, VERMILLION).max() == pytest.approx(
        (single.mean * np.exp(2 * single.stderr / single.mean)).max()
    )
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == 3
    assert all(np.array_equal(line.get_xdata(), [0, 1]) for line in dots)
    assert axes.get_yscale() == "log"


def test_text_says_what_is_shown(combined):
    text = texts_of(jacobian_figure(combined)).replace("\n", " ")
    for part in ("tiny", "T = 64", "4 prompts", "sketch, 32 products", "float32", "pretrained", "init (3 seeds)"):
        assert part in text
    assert "owner" not in text
    assert "no positional" in text
    assert "no positional" not in texts_of(jacobian_figure(result("pretrained", 0)))


@pytest.mark.parametrize(("models", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (5, 2, 3)])
def test_one_panel_per_model_on_shared_axes(combined, models, rows, columns):
    figure = jacobian_figure({f"model {i}": combined for i in range(models)})
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [f"model {i}" for i in range(models)]
    figure.draw_without_rendering()  # places the panels
    assert len({round(axes.get_position().y0, 2) for axes in shown}) == rows
    assert len({round(axes.get_position().x0, 2) for axes in shown}) == columns
    assert len({axes.get_ylim() for axes in shown}) == 1


def test_an_unusual_place_is_named(combined):
    usual = str(jacobian_figure(combined).get_supxlabel()).replace("\n", " ")
    assert not any(word in usual for word in ("readout", "path", "query", "block"))
    options = {"method": "exact", "readout": "logits", "pathway": "value", "query": 5, "from_layer": 2}
    moved = combined.assign_attrs(options=json.dumps(options))
    text = str(jacobian_figure(moved).get_supxlabel()).replace("\n", " ")
    for words in ("readout: logits", "value path", "query at 5", "from block 2"):
        assert words in text


def test_theories_are_drawn_beside_what_they_predict(combined):
    curve = combined["sensitivity"] * 1.1
    fitted = ("condition", "position"), np.ones((3, 64))
    with_theory = combined.assign(theory_score_path=curve, theory_cesaro=fitted, theory_config=2 * curve)
    figure = jacobian_figure(with_theory)
    expected = band([p.mean for p in mean_profiles(with_theory, "theory_score_path")["init"]]).centre
    drawn = [np.asarray(line.get_ydata()) for line in lines_of_theory(figure.axes[0], BLACK)]
    assert any(np.allclose(one, expected) for one in drawn)
    baseline = band([p.mean for p in mean_profiles(with_theory, "theory_score_path")["pretrained"]]).centre
    drawn = [np.asarray(line.get_ydata()) for line in lines_of_theory(figure.axes[0], VERMILLION)]
    assert any(np.allclose(one, baseline) for one in drawn)
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert "second-moment kernel, predicted" in labels
    assert "second-moment kernel of the trained weights" in labels
    assert len(curves_in(jacobian_figure(with_theory, overlay=True).axes[0])) == len(
        curves_in(jacobian_figure(combined, overlay=True).axes[0])
    )


def test_the_figure_of_theories(combined, tmp_path):
    curve = combined["sensitivity"] * 1.1
    fitted = ("condition", "position"), np.ones((3, 64))
    with_theory = combined.assign(theory_score_path=curve, theory_cesaro=fitted)
    figure = theory_figure({"one": with_theory, "two": with_theory}, path=tmp_path / "theory")
    rows = {axes.get_ylabel(): axes for axes in figure.axes if axes.get_ylabel()}
    told, below = rows["predicted / measured"], rows["measured / kernel"]
    init = [p.mean for p in profiles(combined)["init"]]
    kernel = band([p.mean for p in profiles(with_theory, "theory_score_path")["init"]]).centre
    ratio = band([mean / kernel for mean in init]).centre
    assert any(np.allclose(one, ratio) for one in lines_of(below, BLUE))
    measured = band(init).centre
    assert any(np.allclose(one, kernel / measured) for one in lines_of(told, BLACK))
    assert (tmp_path / "theory.png").stat().st_size < 300_000
    with pytest.raises(InputError, match="no theories in the results to draw"):
        theory_figure(combined)


def lines_of_theory(axes: Axes, color: str) -> list[Line2D]:
    return [line for line in curves_in(axes) if line.get_color() == color and line.is_dashed()]


def test_overlay_draws_all_models_in_one_panel(combined):
    figure = jacobian_figure({"one": combined, "two": combined}, overlay=True)
    assert len(figure.axes) == 1
    curves = curves_in(figure.axes[0])
    assert len(curves) == 6
    assert len({line.get_color() for line in curves}) == 2
    assert len({str(line.get_linestyle()) for line in curves if line.get_color() == curves[0].get_color()}) == 3
    assert {"one", "two", "pretrained", "init"} <= {t.get_text() for t in figure.legends[0].get_texts()}


@pytest.mark.slow
def test_texts_lie_inside_the_figure_and_clear_of_the_data(combined):
    for figure in (jacobian_figure(combined), jacobian_figure({n: combined for n in "abcd"}, overlay=True)):
        figure.draw_without_rendering()
        frame = figure.bbox
        legend = figure.legends[0].get_window_extent()
        (caption,) = [text.get_window_extent() for text in figure.texts]
        for box in (legend, caption, *(axes.get_tightbbox() for axes in figure.axes)):
            assert box is not None
            assert frame.x0 <= box.x0 < box.x1 <= frame.x1
            assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        for axes in figure.axes:
            assert not legend.overlaps(axes.get_window_extent())
            outside = axes.get_tightbbox()
            assert outside is not None
            assert not caption.overlaps(outside)


@pytest.mark.parametrize("width", [6.2, 7.0, 10.3])
@pytest.mark.parametrize("count", range(1, 8))
def test_legends_are_as_wide_as_there_is_room(width, count):
    labels = [
        "pretrained",
        "init (3 seeds)",
        "second-moment kernel, predicted",
        "second-moment kernel of the trained weights",
    ]
    handles = [Line2D([], [], label=label) for label in (labels * 2)[:count]]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 3), layout="constrained")
        figure.subplots()
        figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns(handles, width))
        figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1


def test_zeros_are_left_out_and_the_axis_stays_readable():
    faded = result("pretrained", 0, zeros=20)
    faded["sensitivity"][:, 20] = 1e-12
    axes = jacobian_figure(faded).axes[0]
    (line,) = lines_of(axes, VERMILLION)
    assert np.isnan(line[:20]).all()
    assert not np.isnan(line[20:]).any()
    low, high = axes.get_ylim()
    assert high / low == pytest.approx(10**DECADES)
    assert len(axes.get_yticks()) >= 3


def test_a_narrow_range_still_has_labels():
    flat = result("pretrained", 0)
    flat["sensitivity"][:] = np.linspace(1.1, 4, 64)
    axes = jacobian_figure(flat).axes[0]
    low, high = axes.get_ylim()
    labels = [axes.yaxis.get_major_formatter()(tick) for tick in axes.get_yticks() if low <= tick <= high]
    assert {"2", "3"} <= set(labels)


@pytest.mark.slow
def test_saved_files_are_whole_small_and_the_same_every_time(combined, tmp_path):
    models = {f"qwen2.{i}": combined for i in range(4)}
    jacobian_figure(models, path=tmp_path / "new" / "fig1.5.png")
    folder = tmp_path / "new"
    assert sorted(os.listdir(folder)) == ["fig1.5.png", "fig1.5.svg"]
    png, svg = folder / "fig1.5.png", folder / "fig1.5.svg"
    assert png.stat().st_size < 300_000
    assert imread(png).shape[1] > 1000
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    again = save_figure(jacobian_figure(models), tmp_path / "again.v2")
    assert [path.name for path in again] == ["again.v2.png", "again.v2.svg"]
    assert again[0].read_bytes() == png.read_bytes()
    assert again[1].read_bytes() == svg.read_bytes()


def test_drawing_leaves_matplotlib_as_it_was(combined):
    before = dict(matplotlib.rcParams)
    jacobian_figure(combined)
    assert dict(matplotlib.rcParams) == before


def test_colours_differ_in_lightness_or_line_for_those_who_see_none():
    looks = {(style.color, str(style.line)) for style in CONDITIONS.values()}
    assert len(looks) == len(CONDITIONS)
    assert len({style.color for style in CONDITIONS.values()}) == len(CONDITIONS)


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(InputError, match="no results to draw"):
        jacobian_figure({})
    with pytest.raises(InputError, match="'silent' has no sensitivity above zero"):
        jacobian_figure({"silent": result("pretrained", 0, zeros=64)})
    with pytest.raises(InputError, match="has no sensitivity above zero"):
        jacobian_figure(xr.Dataset({"leakage": ("lag", [1.0])}))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        jacobian_figure(result("pretrained", 0), path=tmp_path / "file" / "figure")
