"""The map of fresh models: places, curves, interruption, table and figure."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import kept
import numpy as np
import pytest
import torch
import xarray as xr

import probes
from probes.errors import InputError
from probes.figures import map_figure
from probes.measures.jacobian import jacobian
from probes.models.load import fresh
from probes.results.curves import relative_error
from probes.results.dataset import load as load_result
from probes.results.theory_map import COLUMNS, CURVES, FACTOR, cells, rows
from probes.studies.atlas import MODELS, STRENGTHS, Place, atlas, places
from probes.theory.kernel import second_moment

SMALL = Place("depth", 0.05, 64, 2, 16)
CHOSEN = [
    SMALL,
    replace(SMALL, strength=1.64),
    Place("window", 0.05, 64, 2, 16, window=4),
    Place("residual", 0.05, 64, 2, 16, residual_scale=0.5),
    Place("no RoPE", 0.05, 64, 2, 12, rope=False),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    out = tmp_path_factory.mktemp("map")
    return out, atlas(CHOSEN, out, seeds=2, products=16)


def test_the_file_holds_what_was_returned(made):
    out, result = made
    assert sorted(path.name for path in out.iterdir()) == ["map.nc"]
    xr.testing.assert_identical(load_result(out / "map.nc"), result)
    assert result.sizes == {"place": len(CHOSEN), "position": 16}
    assert result.attrs["factor"] == FACTOR
    assert result.attrs["seeds"] == 2


def test_curves_are_those_of_the_library(made):
    _, result = made
    row = rows(result, group="residual")[0]
    measured, predicted = [], []
    for seed in range(2):
        model = fresh(CHOSEN[3].configuration(), seed, residual_scale=0.5)
        tokens = torch.randint(2, 4096, (1, 16), generator=torch.Generator().manual_seed(seed))
        measured.append(jacobian(model, tokens, method="sketch", products=16, seed=seed)["sensitivity"].values[0])
        kernel = second_moment(model, tokens, attention="measured", score_path=True)
        predicted.append(kernel["sensitivity"].values[0])
    for name, values in (("measured", measured), ("score_path", predicted)):
        np.testing.assert_allclose(row[name], np.sqrt(np.mean(np.square(values), 0)), rtol=1e-6)  # kept in float32
    assert row.error("score_path") == pytest.approx(relative_error(row["score_path"], row["measured"]))
    assert np.all(np.isnan(row["config"]))  # a configuration says nothing of a residual scale
    assert not np.any(np.isnan(rows(result, group="window")[0]["config"]))


def test_rows_are_cut_to_their_length_and_found_by_coordinate(made):
    _, result = made
    assert len(rows(result)) == len(CHOSEN)
    (row,) = rows(result, group="no RoPE")
    assert len(row["measured"]) == 12
    assert not np.any(np.isnan(row["measured"]))
    assert {row["rope"], rows(result, group="depth")[0]["rope"]} == {False, True}
    assert set(CURVES) <= set(row)
    assert len(row) == len(list(row))


def test_the_window_s_reach_is_zero_beyond(made):
    _, result = made
    (row,) = rows(result, group="window")
    beyond = slice(0, 16 - 1 - 2 * 3)  # two blocks, three positions back in each
    for name in ("measured", "uniform", "values", "score_path", "config", "cesaro"):
        assert np.all(row[name][beyond] == 0), name
        assert np.all(row[name][beyond.stop :] > 0), name


def test_stronger_logits_move_weight_from_the_value_path(made):
    _, result = made
    weak, strong = rows(result, group="depth")
    assert weak.value_share > 0.99
    assert strong.value_share < 0.8
    assert math.isnan(rows(result, group="window")[0].value_share)
    assert strong.error("values") > 3 * strong.error("score_path")


def test_table(made):
    _, result = made
    table = [list(cells(row)) for row in rows(result)]
    assert all(len(line) == len(COLUMNS) for line in table)
    first = dict(zip(COLUMNS, table[0], strict=True))
    row = rows(result)[0]
    assert first["primacy"] == f"{row.shape.primacy:.3g}"
    assert (first["U"] == "U") == (min(row.shape.primacy, row.shape.recency) >= FACTOR)
    assert dict(zip(COLUMNS, table[3], strict=True))["config"] == "-"
    assert len({line[0] for line in table}) == len(CHOSEN)  # labels tell places apart


@pytest.mark.slow
def test_an_interrupted_map_goes_on_and_measures_nothing_twice(made, tmp_path, monkeypatch):
    _, whole = made

    class Stop(Exception):
        pass

    def stop(label: str, done: float, total: float) -> None:
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        atlas(CHOSEN, tmp_path, seeds=2, products=16, advance=stop)
    before = kept.written(tmp_path)
    assert len(before) == 3
    seen = []

    def watch(label: str, done: float, total: float) -> None:
        assert before.items() <= kept.written(tmp_path).items() or done == len(CHOSEN)
        seen.append((done, total))

    again = atlas(CHOSEN, tmp_path, seeds=2, products=16, advance=watch)
    assert seen[-1] == (len(CHOSEN), len(CHOSEN))
    for name in (*CURVES, "stderr", "alpha"):
        np.testing.assert_array_equal(again[name].values, whole[name].values)
    assert not (tmp_path / "unfinished").exists()


def test_places_measured_otherwise_are_measured_again(tmp_path):
    first = atlas([SMALL], tmp_path, seeds=1, products=16)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "note.txt").write_text("mine", encoding="utf-8")
    second = atlas([SMALL], tmp_path, seeds=1, products=64)
    assert not np.array_equal(first["measured"].values, second["measured"].values)
    assert np.all(second["stderr"].values == 0)  # 64 products are all there are
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["note.txt"]


def test_the_whole_map_has_each_place_once_and_covers_the_ranges():
    chosen = places()
    assert len({place.label() for place in chosen}) == len(chosen)
    assert {place.blocks for place in chosen} >= {4, 8, 12, 16, 32}
    assert min(STRENGTHS) <= 0.05
    assert max(STRENGTHS) >= 2
    assert {place.length for place in chosen} >= {64, 256, 1024}
    assert {place.window for place in chosen} > {None}
    for place in (*chosen, *places(quick=True)):
        config = place.configuration()
        sigma, width = config.get("initializer_range", 0.02), config.get("hidden_size", config.get("n_embd"))
        assert width * sigma**2 == pytest.approx(place.strength)


def test_the_usual_models_have_their_published_shapes():
    specs = {}
    for place in MODELS:
        birth = probes.born(place.configuration())
        spec = birth.spec
        specs[place.name] = (spec.family, spec.width, spec.blocks, spec.heads, spec.kv_heads, birth.features)
        assert spec.initializer_range == 0.02
        assert (spec.width, spec.blocks) == (place.width, place.blocks)
    assert specs["GPT-2"] == ("gpt2", 768, 12, 12, 12, 3072)
    assert specs["Qwen2.5-0.5B"] == ("qwen2", 896, 24, 14, 2, 4864)
    assert specs["Llama-7B width"] == ("llama", 4096, 4, 32, 32, 11008)


def test_nothing_and_nonsense_are_refused(tmp_path):
    with pytest.raises(InputError, match="no places on the map"):
        atlas([], tmp_path)
    with pytest.raises(InputError, match="seeds=0 leaves no fresh model"):
        atlas([SMALL], tmp_path, seeds=0)
    assert list(tmp_path.iterdir()) == []


def test_the_figure_shows_the_map(made, tmp_path):
    _, result = made
    figure = map_figure(result, path=tmp_path / "map")
    titles = [title for cell in figure.axes if (title := cell.get_title(loc="left"))]
    assert [title[0] for title in titles] == list("abcdef")
    primacies = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    shown = np.sort(np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in primacies]))
    np.testing.assert_allclose(shown, np.sort([row.shape.primacy for row in rows(result, group="depth")]))
    assert list(np.asarray(primacies[0].get_xdata())) == [row["strength"] for row in rows(result, group="depth")]
    assert (tmp_path / "map.png").stat().st_size < 300_000
    with pytest.raises(InputError, match="no map"):
        map_figure(xr.Dataset({"sensitivity": (("position",), np.ones(8))}))
