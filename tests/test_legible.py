"""Every figure can be read: no text leaves the canvas or covers another, whatever the models are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import xarray as xr
from legible import faults
from matplotlib.figure import Figure

import toy.experiments.experiment as experiment
from probes import charts, figures
from probes.measures.map import MAP
from probes.results.dataset import load
from toy.match import MEASURE as MATCH

REPORTS = Path(__file__).resolve().parent.parent / "reports"
LONG = ("some-laboratory-model-0.5b-instruct-a", "another.house_s_language-model-q4_k_m")  # of 37 characters each
# Results of a model of 30 blocks and 9 heads, by whose figure draws them.
DRAWN: dict[str, tuple[Callable[..., Figure], str]] = {
    "bos-swap": (figures.bos_figure, "bos-swap"),
    "interventions": (figures.bos_figure, "interventions/bos-swap"),
}


@cache
def committed(folder: str, model: str = "smollm2-135m") -> xr.Dataset:
    return load(next((REPORTS / "llm" / folder).glob(f"*{model}.nc*")))


def results(folder: str, names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Of the model of 30 blocks and, where there is one, of another whose logits go far beyond all others, by turns."""
    both = [committed(folder)]
    if list((REPORTS / "llm" / folder).glob("*q4_k_m.nc*")):
        both.append(committed(folder, "q4_k_m"))
    return {name: both[n % len(both)] for n, name in enumerate(names)}


def drawn(figure: str, names: Sequence[str]) -> Figure:
    if figure == "match":
        return MATCH.chart(dict.fromkeys(names[:2], load(REPORTS / "llm" / "match" / "match.nc")))
    draw, folder = DRAWN[figure]
    return draw(results(folder, names))


@pytest.mark.parametrize("figure", [*DRAWN, "match"])
def test_texts_at_two_long_names(figure):
    assert faults(drawn(figure, LONG)) == []


@pytest.mark.slow
@pytest.mark.parametrize("names", [("ape",), (*LONG, "amodelwhosenameisonewordof36letterss", "ape", "bee")])
@pytest.mark.parametrize("figure", [*DRAWN, "match"])
def test_texts_at_other_names(figure, names):
    assert faults(drawn(figure, names)) == []


def test_texts_of_the_map():
    assert faults(MAP.chart({"map": load(REPORTS / "theory" / "map.nc")})) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", experiment.EXPERIMENTS)
def test_texts_of_toys_figures(name, monkeypatch, tmp_path):
    found: list[Figure] = []
    monkeypatch.setattr(charts, "save", lambda figure, path: found.append(figure) or ())
    experiment.draw(name, load(REPORTS / "toy" / f"{name}.nc"), tmp_path / name)
    assert found
    assert [fault for figure in found for fault in faults(figure)] == []


def test_texts_that_leave_the_canvas_or_cover_another_are_faults():
    figure = Figure(figsize=(2, 2))
    figure.text(0.5, 0.5, "alone")
    assert faults(figure) == []
    figure.text(0.52, 0.5, "upon it")
    figure.text(0.95, 0.1, "beyond")
    figure.text(0.1, 0.9, "hidden", visible=False)
    assert faults(figure) == ["'upon it' covers 'alone'", "leaves the canvas: 'beyond'"]
    turned = Figure(figsize=(2, 2))
    for x in (0.3, 0.5):  # their boxes overlap, they do not
        turned.text(x, 0.2, "turned by some", rotation=60)
    assert faults(turned) == []
