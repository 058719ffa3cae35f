"""Every figure can be read: no text leaves the canvas or covers another, whatever the models are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from legible import faults
from matplotlib.figure import Figure

import toy.experiments.experiment as experiment
from probes import charts
from probes.measures.map import MAP
from probes.results.dataset import load
from toy.match import MEASURE as MATCH

REPORTS = Path(__file__).resolve().parent.parent / "reports"
LONG = ("some-laboratory-model-0.5b-instruct-a", "another.house_s_language-model-q4_k_m")  # of 37 characters each


@pytest.mark.parametrize("names", [("ape",), LONG])
def test_texts_of_toys_beside_models(names):
    assert faults(MATCH.chart(dict.fromkeys(names, load(REPORTS / "llm" / "match" / "match.nc")))) == []


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
