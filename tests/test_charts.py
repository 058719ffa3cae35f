"""Figures: every one can be read whatever models are called, what forms draw, and what is saved or put into a page."""

import base64
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache
from pathlib import Path

import matplotlib.text
import matplotlib.transforms
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from probes import charts
from probes.charts import Panel, Series, panels, save, sheet
from probes.errors import InputError
from probes.measure import measure, questions
from probes.measures.map import MAP
from probes.results.dataset import load
from toy.match import MEASURE as MATCH

REPORTS = Path(__file__).resolve().parent.parent / "reports"
BLOCKS = 30
LONG = ("some-laboratory-model-0.5b-instruct-a", "another.house_s_language-model-q4_k_m")  # of 37 characters each
# By name: the chart function and where committed results lie, of which one has 30 blocks of 9 heads.
CHARTS: dict[str, tuple[Callable[..., Figure], str]] = {
    name: (measure(name).chart, f"llm/{folder}")
    for name in questions()
    if (REPORTS / "llm" / (folder := name if name != "inspect" else "inspect/code/inspect")).is_dir()
} | {
    "interventions": (measure("bos-swap").chart, "llm/interventions/bos-swap"),
    "match": (MATCH.chart, "llm/match"),
    "map": (MAP.chart, "theory"),
}


@cache
def committed(folder: str) -> list[xr.Dataset]:
    return [load(file) for file in sorted((REPORTS / folder).glob("*.nc.xz"), reverse=True)]


def faults(figure: Figure, within: float = 1.0) -> list[str]:
    """Texts that leave the canvas, or cover each other, by more than `within` pixels.

    Texts are those that matplotlib draws, which leaves out ticks beyond an axis's ends.
    """
    shown: list[Text] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Text.draw
        patch.setattr(Text, "draw", lambda text, renderer: (shown.append(text), plain(text, renderer))[1])
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()
    shown = list(dict.fromkeys(text for text in shown if text.get_visible() and text.get_text().strip()))
    boxes, found = [_outline(text, within) for text in shown], []
    for n, (text, box) in enumerate(zip(shown, boxes, strict=True)):
        if box.vertices.min() < 0 or np.any(box.vertices.max(0) > figure.bbox.size):
            found.append(f"leaves the canvas: {text.get_text()!r}")
        others = zip(shown[:n], boxes[:n], strict=True)
        found += [
            f"{text.get_text()!r} covers {one.get_text()!r}" for one, other in others if box.intersects_path(other)
        ]
    return found


def _outline(text: Text, within: float) -> matplotlib.path.Path:
    """The corners of a text's box, which may be turned, `within` pixels inside it."""
    place, angle = Text.get_window_extent(text), text.get_rotation()
    text.set_rotation(0)
    flat = Text.get_window_extent(text).padded(-within)
    text.set_rotation(angle)
    corners = matplotlib.transforms.Affine2D().rotate_deg(angle).transform(flat.corners()[[0, 1, 3, 2, 0]])
    middle = (corners.min(0) + corners.max(0)) / 2
    return matplotlib.path.Path(corners - middle + [(place.x0 + place.x1) / 2, (place.y0 + place.y1) / 2])


def test_texts_that_leave_the_canvas_or_cover_another_are_faults():
    figure = Figure(figsize=(2, 2))
    for x, y, text in ((0.5, 0.5, "alone"), (0.52, 0.5, "upon it"), (0.95, 0.1, "beyond")):
        figure.text(x, y, text)
    figure.text(0.1, 0.9, "hidden", visible=False)
    for x in (0.3, 0.5):  # their boxes overlap, they do not
        figure.text(x, 0.1, "turned by", rotation=60)
    assert faults(figure) == ["'upon it' covers 'alone'", "leaves the canvas: 'beyond'"]


@pytest.mark.parametrize("names", [("ape",), (*LONG, "amodelwhosenameisonewordof36letterss", "ape", "bee")])
@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_can_be_read(name, names):
    chart, folder = CHARTS[name]
    results = committed(folder)
    for shown in (names, names[:2]):
        figure = chart({model: results[n % len(results)] for n, model in enumerate(shown)})
        assert faults(figure) == []
        assert str(figure.get_supxlabel()).count("\n") <= 1, "a caption has at most two lines"
        words = [text.get_text() for cell in figure.axes for text in cell.texts if text.get_gid() == charts.NAME]
        assert not any("_" in text for text in words)


# ------------------------------------------------------------------------------------------------ what forms draw


@pytest.fixture
def cell() -> Axes:
    return sheet(1, 1)[1][0, 0]


def test_curves_have_their_values_bands_and_words(cell):
    values, low, high = np.array([1.0, np.nan, 3.0]), np.array([0.5, 0.5, 0.5]), np.array([2.0, 3.0, 4.0])
    charts.curves(cell, [Series("of all heads", values, low=low, high=high, x=[2, 4, 6])])
    np.testing.assert_array_equal(cell.lines[0].get_xydata(), np.c_[[2, 4, 6], values])
    band = cell.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.5, 4)
    (text,) = cell.texts
    assert (text.get_text(), text.xy, text.get_color()) == ("of all heads", (1, 3.0), charts.BLUE)


def test_a_logarithmic_axis_leaves_out_what_is_not_above_zero_and_what_is_faint(cell):
    charts.curves(cell, [Series("", [0.0, 1e-9, 0.5, 1.0])], log=True)
    np.testing.assert_array_equal(cell.lines[0].get_ydata(), [np.nan, 1e-9, 0.5, 1.0])
    low, high = cell.get_ylim()
    assert np.log10(high / low) == pytest.approx(charts.DECADES)
    expected = ["0.01", "10,000", "−2", r"$2\cdot 10^{-7}$", "$10^{6}$"]
    assert [charts.numeral(value) for value in (0.01, 1e4, -2.0, 2e-7, 1e6)] == expected


def test_blocks_are_lines_beside_what_there_would_be_without_an_effect(cell):
    series = Series("a", np.arange(BLOCKS), x=np.arange(5, 5 + BLOCKS))
    charts.blocks(cell, [series], [Series("no position", [0.3], low=[0.2], high=[0.4])])
    null, line = cell.lines
    assert null.get_ydata()[0] == 0.3
    np.testing.assert_array_equal(line.get_xydata(), np.c_[series.x, series.y])
    assert cell.patches[0].get_bbox().intervaly.tolist() == [0.2, 0.4]
    assert (cell.get_xlim(), cell.get_xlabel()) == ((4.4, 34.6), "block")


def test_heat_maps_show_the_values_and_marks_on_their_cells(cell):
    values = np.array([[0.1, 0.9, np.nan], [0.3, 0.2, 0.4]])
    charts.heat(cell, values, "weight", {"reads": (values > 0.35, charts.GREEN), "no head": (values > 2, charts.BLUE)})
    np.testing.assert_array_equal(np.ma.filled(cell.images[0].get_array(), np.nan), values)
    assert cell.images[0].get_clim() == (0, 0.9)
    np.testing.assert_allclose(cell.lines[0].get_xydata(), [[1, 0], [2, 1]])
    assert [text.get_text() for text in cell.texts] == ["reads"]
    zero, most = charts.WEIGHTS(0.0), charts.WEIGHTS(1.0)
    assert (zero[3], most[3]) == (0, 1), "zero is the paper, white or dark"


def test_dots_stand_from_the_top_down_and_beyond_the_limits_are_arrowheads(cell):
    charts.dots(cell, ["mask", "stream"], [Series("", [0.5, 9.0], low=[0.1, -9], high=[0.9, 20])], limits=(-1.0, 2.0))
    inside, beyond = cell.lines[:2]
    assert (inside.get_xydata().tolist(), inside.get_marker()) == ([[0.5, 0]], "o")
    assert (beyond.get_xydata().tolist(), beyond.get_marker()) == ([[2, 1]], ">")
    assert [path.vertices[:, 0].tolist() for path in cell.collections[0].get_paths()] == [[0.1, 0.9], [-1, 2]]
    assert cell.get_ylim() == (1.5, -0.5)


# ------------------------------------------------------------------------------------------------------- figures


def test_figures_are_saved_as_png_and_svg_or_not_at_all(tmp_path):
    figure, _ = sheet(1, 1, caption="a caption")
    picture, drawing = save(figure, tmp_path / "new" / "model-0.5b.png")
    assert (picture.name, drawing.name) == ("model-0.5b.png", "model-0.5b.svg")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        save(figure, tmp_path / "file" / "figure")


def test_a_figure_in_a_page_is_its_svg():
    crowd = [Series(f"quantity number {n}", np.full(BLOCKS, 1.0), charts.CYCLE[n % 7]) for n in range(8)]
    rows = [Panel("quantity", lambda cell, _: charts.curves(cell, crowd))]
    figure = panels({"ape": xr.Dataset()}, rows, "a caption")
    assert faults(figure) == []  # eight curves that end in one point
    kind, _, content = charts.image(figure).partition(";base64,")
    assert kind == "data:image/svg+xml"
    text = "".join(ElementTree.fromstring(base64.b64decode(content)).itertext())
    assert all(words in text for words in ("ape", "quantity", "number 7", "a caption"))
    assert charts.image(figure) == charts.image(figure)
