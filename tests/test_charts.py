"""The forms of figures: what they draw, that every figure can be read, and what is saved or put into a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from legible import LONG, faults
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes import charts
from probes.charts import NULL, Panel, Series, panels, save, sheet, svg
from probes.errors import InputError
from probes.measure import measure, questions
from probes.results.dataset import load

REPORTS = Path(__file__).resolve().parent.parent / "reports" / "llm"
LARGE, OTHER = "smollm2-135m", "q4_k_m"  # 30 blocks of 9 heads; another model where there is a result of it
# By name: the chart function and the folder of a result to draw.
CHARTS: dict[str, tuple[Callable[..., Figure], str]] = {
    name: (measure(name).chart, folder)
    for name in questions()
    if (REPORTS / (folder := name if name != "inspect" else "inspect/code/inspect")).is_dir()
} | {"interventions": (measure("bos-swap").chart, "interventions/bos-swap")}


@cache
def committed(folder: str, model: str) -> xr.Dataset:
    return load(next((REPORTS / folder).glob(f"*{model}.nc*")))


def results(folder: str, names: tuple[str, ...]) -> dict[str, xr.Dataset]:
    """Of the large model and, where there is one, of another, by turns."""
    models = [LARGE, *([OTHER] if list((REPORTS / folder).glob(f"*{OTHER}.nc*")) else [])]
    return {name: committed(folder, models[n % len(models)]) for n, name in enumerate(names)}


@pytest.mark.parametrize("names", [("ape",), LONG, (*LONG, "amodelwhosenameisonewordof36letterss", "ape", "bee")])
@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_can_be_read(name, names):
    chart, folder = CHARTS[name]
    figure = chart(results(folder, names))
    assert faults(figure) == []
    assert len([cell for cell in figure.axes if cell.get_label() != "<colorbar>"]) <= charts.figures.MOST_PANELS
    assert str(figure.get_supxlabel()).count("\n") <= 1, "a caption has at most two lines"
    assert all("$" not in text and "_" not in text for text in _words(figure))


def _words(figure: Figure) -> list[str]:
    return [text.get_text() for cell in figure.axes for text in cell.texts if text.get_gid() == charts.style.NAME]


# A form drawn with more than there is room for: its panel, and what must be in it.
BLOCKS, HEADS = 30, 9
NOISE = np.random.default_rng(0)
CROWD = [Series(f"quantity number {n}", np.full(BLOCKS, 1.0), charts.CYCLE[n % 7]) for n in range(8)]
MANY = [
    Series(f"{one.label} of many words", 3 + NOISE.normal(size=BLOCKS), one.color, one.y - 1, one.y + 9)
    for one in CROWD
]
NAMES = [f"intervention at block {n} of the keys alone" for n in range(9)]
MARKS = {
    "reads position 0": (np.eye(BLOCKS, HEADS), charts.VERMILLION),
    "parks there": (np.eye(BLOCKS, HEADS, 1), NULL),
}
FORMS: dict[str, Callable[[Axes], object]] = {
    "curves": lambda cell: charts.curves(cell, CROWD),
    "log curves": lambda cell: charts.curves(cell, MANY[:5], log=True),
    "blocks": lambda cell: charts.blocks(cell, MANY[:3], [Series("no position", [0.1], NULL, [0.0], [0.2])]),
    "few blocks": lambda cell: charts.blocks(cell, [Series("total", [1.0, 2], low=[0.0, 1], high=[2.0, 3])]),
    "heat": lambda cell: charts.heat(cell, np.abs(NOISE.normal(size=(BLOCKS, HEADS))), "weight on position 0", MARKS),
    "signed heat": lambda cell: charts.heat(cell, NOISE.normal(size=(4, 4)), "change", signed=True),
    "dots": lambda cell: charts.dots(cell, NAMES, [Series(one.label, one.y[:9]) for one in MANY[:2]]),
    "stacks": lambda cell: charts.stacks(cell, MANY[:4]),
    "pictures": lambda cell: charts.pictures(cell, [np.tri(64)] * 3, [f"block {n}, head {n}" for n in range(10, 13)]),
}


@pytest.mark.parametrize("names", [("ape",), LONG, (*LONG, "bee")])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_can_be_read(form, names):
    height = 3.6 if form == "dots" else 2.3  # two lines of words for each of nine categories
    rows = [Panel("a quantity with a long name (nat²)", lambda cell, _: FORMS[form](cell), height=height)] * 4
    assert faults(panels(dict.fromkeys(names, xr.Dataset()), rows, "word " * 45)) == []


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
    assert np.log10(high / low) == pytest.approx(charts.style.DECADES)
    assert [charts.numeral(value) for value in (0.01, 1e4, -2.0, 2e-7, 1e6)] == [
        "0.01", "10,000", "−2", r"$2\cdot 10^{-7}$", "$10^{6}$",
    ]  # fmt: skip


def test_few_blocks_are_marks_beside_each_other_and_many_are_lines(cell):
    few = [Series("a", [1.0, 2]), Series("b", [1.0, 2])]
    charts.blocks(cell, few, [Series("no position", [0.3], low=[0.2], high=[0.4])])
    null, first, second = cell.lines
    assert (first.get_linestyle(), first.get_marker()) == ("None", "o")
    assert first.get_xdata()[0] < 0 < second.get_xdata()[0]
    assert null.get_ydata()[0] == 0.3
    assert cell.get_xlabel() == "block"
    other = sheet(1, 1)[1][0, 0]
    charts.blocks(other, [Series("a", np.arange(BLOCKS), x=np.arange(5, 5 + BLOCKS))])
    assert other.lines[0].get_linestyle() == "-"
    assert other.get_xlim() == (4.4, 34.6)


def test_heat_maps_show_the_values_and_marks_on_their_cells(cell):
    values = np.array([[0.1, 0.9, np.nan], [0.3, 0.2, 0.4]])
    charts.heat(cell, values, "weight", {"reads": (values > 0.35, charts.GREEN), "no head": (values > 2, charts.BLUE)})
    np.testing.assert_array_equal(np.ma.filled(cell.images[0].get_array(), np.nan), values)
    assert cell.images[0].get_clim() == (0, 0.9)
    np.testing.assert_allclose(cell.lines[0].get_xydata(), [[1, 0.36], [2, 1.36]])
    assert [text.get_text() for text in cell.texts] == [".10", ".90", "", ".30", ".20", ".40", "reads"]
    zero, most = charts.style.WEIGHTS(0.0), charts.style.WEIGHTS(1.0)
    assert (zero[3], most[3]) == (0, 1), "zero is the paper, white or dark"


def test_dots_stand_from_the_top_down_and_beyond_the_limits_are_arrowheads(cell):
    charts.dots(cell, ["mask", "stream"], [Series("", [0.5, 9.0], low=[0.1, -9], high=[0.9, 20])], limits=(-1.0, 2.0))
    inside, beyond = cell.lines[:2]
    assert (inside.get_xydata().tolist(), inside.get_marker()) == ([[0.5, 0]], "o")
    assert (beyond.get_xydata().tolist(), beyond.get_marker()) == ([[2, 1]], ">")
    assert [path.vertices[:, 0].tolist() for path in cell.collections[0].get_paths()] == [[0.1, 0.9], [-1, 2]]
    assert cell.get_ylim() == (1.5, -0.5)


def test_parts_are_stacked_up_to_the_total_and_negative_ones_hang_down(cell):
    charts.stacks(cell, [Series("a", [1.0, -1]), Series("b", [2.0, 3]), Series("c", [-1.0, -2])])
    bars = [(bar.get_y(), bar.get_height()) for bar in cell.patches]
    assert bars == [(0, 1), (0, -1), (1, 2), (0, 3), (0, -1), (-1, -2)]


# ------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(("models", "quantities", "expected"), [(1, 5, 4), (1, 3, 3), (2, 3, 4), (3, 2, 3), (6, 1, 4)])
def test_a_figure_has_at_most_four_panels_the_first_quantities_first(models, quantities, expected):
    rows = [Panel(f"quantity {n}", lambda cell, ds: cell.plot([ds.attrs["n"]])) for n in range(quantities)]
    figure = panels({f"model {n}": xr.Dataset(attrs={"n": n}) for n in range(models)}, rows, "")
    assert len(figure.axes) == expected
    assert figure.axes[0].get_ylabel() == "quantity 0"
    assert [cell.lines[0].get_ydata()[0] for cell in figure.axes[:models]] == [*range(models)][
        : len(figure.axes[:models])
    ] or models == 1
    assert (str(figure.get_suptitle()) == "the first 4 of 6 models") is (models > 4)


def test_panels_side_by_side_say_words_once_and_label_equal_axes_once():
    def draw(cell: Axes, ds: xr.Dataset) -> None:
        charts.dots(cell, ["mask", "stream"], [Series("share", ds["x"])])
        charts.words(cell, str(ds.attrs["of"]), 0.0, NULL)

    models = {name: xr.Dataset({"x": ("i", [0.0, n])}, attrs={"of": name}) for n, name in enumerate("ab")}
    first, second = panels(models, [Panel("", draw)], "").axes
    assert [text.get_text() for text in first.texts] == ["a"]
    assert [text.get_text() for text in second.texts] == ["share", "b"]
    assert first.yaxis.get_tick_params()["labelleft"]
    assert not second.yaxis.get_tick_params()["labelleft"]


@pytest.mark.parametrize(
    ("text", "inches", "lines"), [("", 1.0, 1), ("a name_of-parts", 0.5, 3), ("m" * 40, 1.0, 5), ("a\nb", 9.0, 2)]
)
def test_texts_are_broken_where_they_may_be_and_say_the_same(text, inches, lines):
    broken = charts.wrapped(text, inches, 9.0)
    assert broken.count("\n") + 1 == lines
    assert re.sub(r"\s", "", broken) == re.sub(r"\s", "", text)


def test_figures_are_saved_as_png_and_svg_or_not_at_all(tmp_path):
    figure, _ = sheet(1, 1, caption="a caption")
    assert [path.name for path in save(figure, tmp_path / "new" / "model-0.5b.png")] == [
        "model-0.5b.png",
        "model-0.5b.svg",
    ]
    assert (tmp_path / "new" / "model-0.5b.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "new" / "model-0.5b.svg").getroot().tag.endswith("svg")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        save(figure, tmp_path / "file" / "figure")


def test_a_figure_in_a_page_is_small_takes_the_pages_colours_and_shares_no_id(tmp_path):
    draw = partial(charts.heat, values=np.eye(4), label="weight")

    def figure(name: str) -> Figure:
        rows = [
            Panel("block", lambda cell, _: draw(cell)),
            Panel("quantity", lambda cell, _: charts.curves(cell, CROWD)),
        ]
        return panels({name: xr.Dataset()}, rows, "the caption stands beside it in the page")

    first, again, other = (svg(figure(name)) for name in ("ape", "ape", "bee"))
    assert first == again
    root: Any = ElementTree.fromstring(first)
    assert "viewBox" in root.attrib
    assert "width" not in root.attrib
    text = "".join(root.itertext())
    assert "ape" in text
    assert "quantity number 7" in text
    assert "caption" not in text
    assert not re.search(rf"(?<!, ){charts.BLUE}|{charts.INK}", first)
    assert "currentColor" in first
    assert "var(--c-0072b2, #0072b2)" in first
    ids, others = (set(re.findall(r' id="([^"]*)"', one)) for one in (first, other))
    assert ids
    assert not ids & others
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', first)) == ids
    assert not re.search(r'(?:href="|url\()(?!#|data:)', first)
    saved = save(figure("ape"), tmp_path / "figure")[1].read_text(encoding="utf-8")
    assert charts.inline(saved) == first
    assert "the caption stands beside it" in saved
    left_out = float(re.findall(r'viewBox="0 0 \S+ (\S+)"', saved)[0]) - float(root.attrib["viewBox"].split()[3])
    assert left_out == charts.figures.LINE, "the caption's one line"
