"""The map of fresh models: places, curves, interruption, table, answer and chart."""

import math
from dataclasses import replace

import kept
import numpy as np
import pytest
import torch
from kept import Stop

import probes
from probes.measures.jacobian import jacobian
from probes.measures.map import COLUMNS, FACTOR, MAP, MODELS, STRENGTHS, Place, atlas, cells, places, rows
from probes.models.load import fresh
from probes.results.curves import relative_error
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
def measured():
    return atlas(CHOSEN, products=16)


def test_rows_hold_the_library_s_curves_and_make_the_table(measured):
    weak, strong, window, residual, bare = every = rows(measured)
    profiles, predicted = [], []
    for seed in range(2):
        model = fresh(CHOSEN[3].configuration(), seed, residual_scale=0.5)
        tokens = torch.randint(2, 4096, (1, 16), generator=torch.Generator().manual_seed(seed))
        profiles.append(jacobian(model, tokens, method="sketch", products=16, seed=seed)["sensitivity"].values[0])
        kernel = second_moment(model, tokens, attention="measured", score_path=True)
        predicted.append(kernel["sensitivity"].values[0])
    for name, values in (("measured", profiles), ("score_path", predicted)):
        np.testing.assert_allclose(residual[name], np.sqrt(np.mean(np.square(values), 0)), rtol=1e-6)  # kept in float32
    assert residual.error("score_path") == pytest.approx(relative_error(residual["score_path"], residual["measured"]))
    assert np.all(np.isnan(residual["config"]))  # a configuration says nothing of a residual scale
    beyond = slice(0, 16 - 1 - 2 * 3)  # the window's reach: two blocks, three positions back in each
    for name in ("measured", "uniform", "values", "score_path", "config", "cesaro"):
        assert np.all(window[name][beyond] == 0), name
        assert np.all(window[name][beyond.stop :] > 0), name
    # Rows are cut to their length and found by coordinate.
    assert [row["measured"].tolist() for row in rows(measured, group="no RoPE")] == [bare["measured"].tolist()]
    assert np.isfinite(bare["measured"]).tolist() == [True] * 12
    assert (bare["rope"], weak["rope"]) == (False, True)
    # Stronger logits move weight from the value path.
    assert strong.value_share < 0.8 < 0.99 < weak.value_share
    assert math.isnan(window.value_share)
    assert strong.error("values") > 3 * strong.error("score_path")

    table = [dict(zip(COLUMNS, cells(row), strict=True)) for row in every]
    assert table[0]["primacy"] == f"{weak.shape.primacy:.3g}"
    assert (table[0]["U"] == "U") == (min(weak.shape.primacy, weak.shape.recency) >= FACTOR)
    assert table[3]["config"] == "-"
    (shown,) = MAP.tables({"map": measured})
    assert sorted(shown.rows) == sorted(map(cells, every))
    weaker = [min(float(row[1]), float(row[2])) for row in shown.rows if row[1] != "no middle"]
    assert weaker == sorted(weaker, reverse=True)


def test_an_interrupted_map_goes_on_and_measures_nothing_twice(measured, tmp_path):
    def stop(label: str, done: float, total: float) -> None:
        if done == 2:
            raise Stop

    root = tmp_path / "unfinished" / "map"
    with pytest.raises(Stop):
        atlas(CHOSEN[:3], root, products=16, advance=stop)
    before = kept.written(tmp_path)
    assert len(before) == 2
    seen, remarks = [], []
    again = atlas(CHOSEN[:3], root, products=16, advance=lambda *call: seen.append(call), remark=remarks.append)
    assert before.items() <= kept.written(tmp_path).items()
    labels = f"{CHOSEN[0].label()}, {CHOSEN[1].label()}"
    assert remarks == [f"going on with '{root}': 2 of 3 are done ({labels})"]
    assert seen[-1] == ("map", 3, 3)
    for name in ("measured", "stderr", "score_path", "value", "cesaro", "alpha"):
        np.testing.assert_array_equal(again[name].values, measured[name].values[:3])
    other = atlas([SMALL], root, products=64, remark=remarks.append)  # of other settings: nothing is taken over
    assert not np.array_equal(other["measured"].values[0], again["measured"].values[0])
    assert np.all(other["stderr"].values == 0)  # 64 products are all there are


def test_the_whole_map_has_each_place_once_and_covers_the_ranges():
    chosen = places()
    assert len({place.label() for place in chosen}) == len(chosen) == 57
    assert {place.blocks for place in chosen} >= {4, 8, 12, 16, 32}
    assert {place.length for place in chosen} >= {64, 256, 1024}
    assert {place.window for place in chosen} > {None}
    assert (min(STRENGTHS), max(STRENGTHS)) == (0.05, 2)
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


def test_the_chart_and_the_answer_show_the_map(measured):
    figure = MAP.chart({"map": measured})
    _, primacy, errors = figure.axes
    (marks,) = [line for line in primacy.lines if line.get_marker() == "o"]
    expected = [(row["strength"], row.shape.primacy) for row in rows(measured, group="depth")]
    np.testing.assert_allclose(np.transpose(marks.get_data()), expected)
    for line, name in zip(errors.lines, ("score_path", "values", "uniform", "config"), strict=False):
        np.testing.assert_allclose(line.get_ydata(), [row.error(name) for row in rows(measured, group="depth")])
    number = sum(min(row.shape.primacy, row.shape.recency) >= 2 for row in rows(measured))
    assert MAP.answer({"map": measured})[0].startswith(f"map: {number} of 5 places have a U")
