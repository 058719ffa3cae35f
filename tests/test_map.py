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
from probes.measures.map import MAP, MODELS, Place, atlas, places, rows
from probes.models.load import fresh
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


def test_rows_hold_the_library_s_curves(measured):
    weak, strong, window, residual, bare = rows(measured)
    profiles, predicted = [], []
    for seed in range(2):
        model = fresh(CHOSEN[3].configuration(), seed, residual_scale=0.5)
        tokens = torch.randint(2, 4096, (1, 16), generator=torch.Generator().manual_seed(seed))
        profiles.append(jacobian(model, tokens, method="sketch", products=16, seed=seed)["sensitivity"].values[0])
        kernel = second_moment(model, tokens, attention="measured", score_path=True)
        predicted.append(kernel["sensitivity"].values[0])
    for name, values in (("measured", profiles), ("score_path", predicted)):
        np.testing.assert_allclose(residual[name], np.sqrt(np.mean(np.square(values), 0)), rtol=1e-6)  # kept in float32
    assert np.all(np.isnan(residual["config"]))  # a configuration says nothing of a residual scale
    beyond = 16 - 1 - 2 * 3  # the window's reach: two blocks, three positions back in each
    for name in ("measured", "uniform", "values", "score_path", "config", "cesaro"):
        assert np.flatnonzero(window[name]).tolist() == list(range(beyond, 16)), name
    # Rows are cut to their length and found by coordinate.
    assert [row["measured"].tolist() for row in rows(measured, group="no RoPE")] == [bare["measured"].tolist()]
    assert (len(bare["measured"]), bare["rope"], weak["rope"]) == (12, False, True)
    # Stronger logits move weight from the value path.
    assert strong.value_share < 0.8 < 0.99 < weak.value_share
    assert math.isnan(window.value_share)
    assert strong.error("values") > 3 * strong.error("score_path")


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
    assert [remark.partition(" (")[0] for remark in remarks] == [f"going on with '{root}': 2 of 3 are done"]
    assert seen[-1] == ("map", 3, 3)
    for name in ("measured", "score_path", "value", "cesaro", "alpha"):
        np.testing.assert_array_equal(again[name].values, measured[name].values[:3])
    other = atlas([SMALL], root, products=64)  # of other settings: nothing is taken over
    assert not np.array_equal(other["measured"].values[0], again["measured"].values[0])


def test_the_whole_map_has_each_place_once_and_published_shapes():
    chosen = places()
    assert len({place.label() for place in chosen}) == len(chosen) == 57
    for place in (*chosen, *places(quick=True)):
        config = place.configuration()
        sigma, width = config.get("initializer_range", 0.02), config.get("hidden_size", config.get("n_embd"))
        assert width * sigma**2 == pytest.approx(place.strength)
    births = {place.name: probes.born(place.configuration()) for place in MODELS}
    specs = {name: (one.spec.family, one.spec.kv_heads, one.features) for name, one in births.items()}
    assert specs["GPT-2"] == ("gpt2", 12, 3072)
    assert specs["Qwen2.5-0.5B"] == ("qwen2", 2, 4864)
    assert specs["Llama-7B width"] == ("llama", 32, 11008)
    for place in MODELS:
        spec = births[place.name].spec
        assert (spec.width, spec.blocks, spec.initializer_range) == (place.width, place.blocks, 0.02)


def test_the_chart_and_the_answer_show_the_map(measured):
    figure = MAP.chart({"map": measured})
    _, primacy, errors = figure.axes
    (marks,) = [line for line in primacy.lines if line.get_marker() == "o"]
    expected = [(row["strength"], row.shape.primacy) for row in rows(measured, group="depth")]
    np.testing.assert_allclose(np.transpose(marks.get_data()), expected)
    for line, name in zip(errors.lines, ("score_path", "values", "uniform", "config"), strict=False):
        np.testing.assert_allclose(line.get_ydata(), [row.error(name) for row in rows(measured, group="depth")])
    number = sum(min(row.shape.primacy, row.shape.last) >= 2 for row in rows(measured))
    assert MAP.answer({"map": measured})[0].startswith(f"map: at {number} of 5 places primacy and last")
