"""The report's first picture: every mark is a number of the results, and what was not measured is said."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.image import imread
from test_plots import result
from test_plots_attention import bos_result, leakage_result, several

from probes.errors import InputError
from probes.figures import BLACK, BLUE, VERMILLION, overview_figure
from probes.figures.overview import MOST, ROWS
from probes.figures.palette import ORANGE
from probes.figures.style import LARGEST
from probes.results.curves import band, smooth_between
from probes.results.dataset import combine
from probes.results.profiles import mean_profiles

SOURCES = {"mask": 0.4, "residual": -0.1, "spread": 0.0}


@pytest.fixture(scope="module")
def sensitivity() -> xr.Dataset:
    return combine([result("pretrained", 0), *(result("init", seed) for seed in range(3))])


@pytest.fixture(scope="module")
def leakage() -> xr.Dataset:
    made = leakage_result()
    values = np.array([[one, 9.0] for one in SOURCES.values()])  # the later band is not drawn
    for end, by in (("", 0), ("_low", -0.03), ("_high", 0.03)):
        made[f"log_source_of_model{end}"] = ("source", "band"), values + by
    return made


def marks(cell: Axes) -> dict[float, tuple[float, str, str]]:
    """Height, colour and filling of the marks of a lower panel, by place."""
    return {
        float(np.asarray(line.get_xdata())[0]): (
            float(np.asarray(line.get_ydata())[0]),
            to_hex(line.get_color()),
            to_hex(line.get_markerfacecolor()),
        )
        for line in cell.lines
        if line.get_marker() == "o"
    }


def panels_of(figure, names: int) -> tuple[list[Axes], list[Axes]]:
    shown = [axes for axes in figure.axes if axes.axison]
    return shown[:names], shown[names:]


def test_profiles_are_those_of_the_result(sensitivity):
    (above,), _ = panels_of(overview_figure({"ape": sensitivity}, {}, {}), 1)
    found = mean_profiles(sensitivity)
    curves = [(to_hex(line.get_color()), np.asarray(line.get_ydata())) for line in above.lines]
    lines = {color: curve for color, curve in curves if curve.size > 2}  # dots at both ends are lines, too
    np.testing.assert_allclose(lines[BLUE.lower()], band([run.mean for run in found["init"]]).centre)
    np.testing.assert_allclose(lines[VERMILLION.lower()], smooth_between(found["pretrained"][0].mean))
    assert above.get_yscale() == "log"


def test_prediction_is_drawn_where_there_is_one(sensitivity):
    told = sensitivity.assign(theory_score_path=sensitivity["sensitivity"] * 1.1)
    for ds, expected in ((sensitivity, 0), (told, 1)):
        (above,), _ = panels_of(overview_figure({"ape": ds}, {}, {}), 1)
        black = [line for line in above.lines if line.get_color() == BLACK]
        assert len(black) == expected
        for line in black:
            curve = band([run.mean for run in mean_profiles(told, "theory_score_path")["init"]]).centre
            np.testing.assert_allclose(np.asarray(line.get_ydata()), curve)


def test_sources_and_swap_are_those_of_the_results(sensitivity, leakage):
    for swap in (bos_result(), several("mean", 17)):
        first = bos_result()
        _, (below,) = panels_of(overview_figure({"ape": sensitivity}, {"ape": leakage}, {"ape": swap}), 1)
        found = marks(below)
        total = float(leakage["log_form_of_model"].sel(part="total", band="9-31"))
        ends = [float(first[f"residual_{when}_of_model"][0]) for when in ("before", "after")]
        heights = [SOURCES["mask"], SOURCES["residual"], total, *ends]
        assert [found[place][0] for place in range(len(ROWS))] == pytest.approx(heights)
        assert [found[place][1] for place in range(len(ROWS))] == [color.lower() for _, _, color, _ in ROWS]
        assert found[3][2] == ORANGE.lower()
        assert found[4][2] == "#ffffff"


def test_what_was_not_measured_is_said(sensitivity, leakage):
    figure = overview_figure({"ape": sensitivity, "bee": sensitivity}, {"ape": leakage}, {})
    _, (ape, bee) = panels_of(figure, 2)
    assert set(marks(ape)) == {0, 1, 2}
    assert marks(bee) == {}
    assert [text.get_text() for text in bee.texts] == ["not measured"]
    assert not ape.texts


def test_small_print_names_bands_replacements_and_models_left_out(sensitivity, leakage):
    many = {f"model {n}": sensitivity for n in range(MOST + 2)}
    figure = overview_figure(many, dict.fromkeys(many, leakage), {"model 0": several(17, "mean")})
    said = str(figure.get_supxlabel()).replace("\n", " ")
    measured = ("above: T = 64, 4 prompts", "queries 9-31, T = 64, 4 prompts", "swapped for: 17")
    for part in (*measured, f"the first {MOST} of {MOST + 2} models"):
        assert part in said
    assert sum(axes.get_title() != "" for axes in figure.axes) == MOST


def test_a_window_s_zeros_are_left_out():
    cut = combine([result("pretrained", 0, zeros=20), result("init", 0, zeros=20)])
    (above,), _ = panels_of(overview_figure({"ape": cut}, {}, {}), 1)
    for line in above.lines:
        values = np.asarray(line.get_ydata(), dtype=float)
        assert np.all(np.isnan(values) | (values > 0))


def test_files(sensitivity, leakage, tmp_path):
    overview_figure({"ape": sensitivity}, {"ape": leakage}, {"ape": bos_result()}, path=tmp_path / "overview.png")
    for end in ("png", "svg"):
        assert 0 < (tmp_path / f"overview.{end}").stat().st_size < LARGEST
    assert imread(tmp_path / "overview.png").std() > 0.05


def test_nothing_to_draw_is_refused():
    with pytest.raises(InputError, match="no results of jacobian to draw"):
        overview_figure({}, {}, {})
