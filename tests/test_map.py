"""The map of fresh models: places, curves, interruption, table and figure."""

from __future__ import annotations

import math
from dataclasses import replace

import kept
import numpy as np
import pytest
import torch
import xarray as xr
from kept import Stop, listed

import probes
from probes.errors import InputError
from probes.figures import map_figure
from probes.measures.jacobian import jacobian
from probes.models.load import fresh
from probes.results.curves import relative_error
from probes.results.dataset import load as load_result
from probes.results.theory_map import COLUMNS, CURVES, FACTOR, cells, rows
from probes.studies.map import MODELS, STRENGTHS, Place, atlas, places
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
def made(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    out = tmp_path_factory.mktemp("map")
    result = atlas(CHOSEN, out, seeds=2, products=16)
    assert listed(out) == ["map.nc"]
    xr.testing.assert_identical(load_result(out / "map.nc"), result)
    assert result.sizes == {"place": len(CHOSEN), "position": 16}
    assert (result.attrs["factor"], result.attrs["seeds"]) == (FACTOR, 2)
    return result


def test_rows_hold_the_library_s_curves_and_make_the_table(made):
    weak, strong, window, residual, bare = found = rows(made)
    measured, predicted = [], []
    for seed in range(2):
        model = fresh(CHOSEN[3].configuration(), seed, residual_scale=0.5)
        tokens = torch.randint(2, 4096, (1, 16), generator=torch.Generator().manual_seed(seed))
        measured.append(jacobian(model, tokens, method="sketch", products=16, seed=seed)["sensitivity"].values[0])
        kernel = second_moment(model, tokens, attention="measured", score_path=True)
        predicted.append(kernel["sensitivity"].values[0])
    for name, values in (("measured", measured), ("score_path", predicted)):
        np.testing.assert_allclose(residual[name], np.sqrt(np.mean(np.square(values), 0)), rtol=1e-6)  # kept in float32
    assert residual.error("score_path") == pytest.approx(relative_error(residual["score_path"], residual["measured"]))
    assert np.all(np.isnan(residual["config"]))  # a configuration says nothing of a residual scale
    beyond = slice(0, 16 - 1 - 2 * 3)  # the window's reach: two blocks, three positions back in each
    for name in ("measured", "uniform", "values", "score_path", "config", "cesaro"):
        assert np.all(window[name][beyond] == 0), name
        assert np.all(window[name][beyond.stop :] > 0), name
    # Rows are cut to their length and found by coordinate.
    assert [row["measured"].tolist() for row in rows(made, group="no RoPE")] == [bare["measured"].tolist()]
    assert np.isfinite(bare["measured"]).tolist() == [True] * 12
    assert (bare["rope"], weak["rope"]) == (False, True)
    assert set(CURVES) <= set(weak)
    assert len(weak) == len(list(weak))
    # Stronger logits move weight from the value path.
    assert strong.value_share < 0.8 < 0.99 < weak.value_share
    assert math.isnan(window.value_share)
    assert strong.error("values") > 3 * strong.error("score_path")

    table = [dict(zip(COLUMNS, cells(row), strict=True)) for row in found]
    assert table[0]["primacy"] == f"{weak.shape.primacy:.3g}"
    assert (table[0]["U"] == "U") == (min(weak.shape.primacy, weak.shape.recency) >= FACTOR)
    assert table[3]["config"] == "-"
    assert len({line[COLUMNS[0]] for line in table}) == len(CHOSEN)  # labels tell places apart


def test_an_interrupted_map_goes_on_and_measures_nothing_twice(made, tmp_path):
    chosen, given = CHOSEN[:3], {"seeds": 2, "products": 16}

    def stop(label: str, done: float, total: float) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        atlas(chosen, tmp_path, **given, advance=stop)
    before = kept.written(tmp_path)
    assert len(before) == 2
    seen, told = [], []

    def watch(label: str, done: float, total: float) -> None:
        assert before.items() <= kept.written(tmp_path).items() or done == len(chosen)
        seen.append((done, total))

    again = atlas(chosen, tmp_path, **given, advance=watch, told=told.append)
    labels = f"{chosen[0].label()}, {chosen[1].label()}"
    assert told == [f"going on with '{tmp_path / 'unfinished' / 'map'}': 2 of 3 are done ({labels})"]
    assert seen[-1] == (3, 3)
    for name in (*CURVES, "stderr", "alpha"):
        np.testing.assert_array_equal(again[name].values, made[name].values[:3])
    assert listed(tmp_path) == ["map.nc"]


def test_places_measured_otherwise_are_measured_again_and_nonsense_is_refused(tmp_path):
    first = atlas([SMALL], tmp_path, seeds=1, products=16)
    second = atlas([SMALL], tmp_path, seeds=1, products=64)
    assert not np.array_equal(first["measured"].values, second["measured"].values)
    assert np.all(second["stderr"].values == 0)  # 64 products are all there are
    (tmp_path / "map.png").mkdir()
    for chosen, seeds, says in (
        ([], 1, "no places on the map"),
        ([SMALL], 0, "seeds=0 leaves no fresh model"),
        ([SMALL], 1, r"map\.png' is a folder"),
    ):
        with pytest.raises(InputError, match=says):
            atlas(chosen, tmp_path, seeds=seeds)
    assert listed(tmp_path) == ["map.nc", "map.png"]


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
    specs = {}
    for place in MODELS:  # which have their published shapes
        birth = probes.born(place.configuration())
        spec = birth.spec
        specs[place.name] = (spec.family, spec.width, spec.blocks, spec.heads, spec.kv_heads, birth.features)
        assert (spec.width, spec.blocks, spec.initializer_range) == (place.width, place.blocks, 0.02)
    assert specs["GPT-2"] == ("gpt2", 768, 12, 12, 12, 3072)
    assert specs["Qwen2.5-0.5B"] == ("qwen2", 896, 24, 14, 2, 4864)
    assert specs["Llama-7B width"] == ("llama", 4096, 4, 32, 32, 11008)


def test_the_figure_shows_the_map(made, tmp_path):
    figure = map_figure(made, path=tmp_path / "map")
    titles = [title for cell in figure.axes if (title := cell.get_title(loc="left"))]
    assert [title[0] for title in titles] == list("abcdef")
    primacies = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    shown = np.sort(np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in primacies]))
    np.testing.assert_allclose(shown, np.sort([row.shape.primacy for row in rows(made, group="depth")]))
    assert list(np.asarray(primacies[0].get_xdata())) == [row["strength"] for row in rows(made, group="depth")]
    assert (tmp_path / "map.png").stat().st_size < 300_000
    with pytest.raises(InputError, match="no map"):
        map_figure(xr.Dataset({"sensitivity": (("position",), np.ones(8))}))
