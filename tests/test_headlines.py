"""Headlines: numbers with their intervals by places, the registry, and what a new measure gets of itself."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import t as student
from transformers import AutoModelForCausalLM

import probes
from probes.headlines import described, headlines, numbers, read
from probes.measure import Headline, Measure, measure, measure_of, questions
from probes.models.named import CHECKPOINTS
from probes.options import Options
from probes.results.curves import with_interval


@pytest.fixture(scope="module")
def model() -> Any:
    return probes.load("tiny-llama")


def of(*headlines: Headline) -> Measure:
    return Measure("some", "?", lambda: xr.Dataset(), Options, headlines, lambda results: [], lambda results: None, "")  # type: ignore[arg-type,return-value]


@pytest.fixture
def result() -> xr.Dataset:
    random = np.random.default_rng(0)
    values = random.lognormal(size=(6, 2, 5))
    own = xr.DataArray([1.0, 0.5], dims="band", coords={"band": ["a", "b"]})
    variables = {"own": own, "own_low": own - 0.1, "own_high": own + 0.2}
    coords = {"condition": ["init", "pretrained"], "document": ("prompt", list("aabbcc"))}
    return xr.Dataset(variables | {"size": (("prompt", "condition", "position"), values)}, coords)


def test_the_mean_over_prompts_has_the_jackknifes_interval_over_documents(result):
    headline = Headline("mean", lambda ds: ds["size"].mean("position"))
    first, second = numbers(of(headline), result)
    assert (first.where, second.where) == ("init", "pretrained")
    by_document = result["size"].values[:, 0].reshape(3, 10).mean(1)
    reach = student.ppf(0.975, 2) * by_document.std(ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(first.interval[:3], by_document.mean() + np.array([0, -reach, reach]), rtol=1e-12)


def test_a_size_is_taken_by_its_logarithm_and_what_follows_the_places_is_averaged_over(result):
    def largest(values: np.ndarray) -> np.ndarray:
        return np.exp(np.log(values).mean(0)).max(-1)

    headline = Headline("largest", lambda ds: ds["size"], mean=largest, ratio=True)
    number = numbers(of(headline), result)[1]
    values = result["size"].values[:, 1]
    logs = [np.log(largest(np.delete(values, [2 * n, 2 * n + 1], axis=0))) for n in range(3)]
    reach = student.ppf(0.975, 2) * np.sqrt(2) * np.std(logs)
    expected = largest(values) * np.exp([0, -reach, reach])
    np.testing.assert_allclose(number.interval[:3], expected, rtol=1e-12)


def test_a_results_own_interval_is_kept_and_what_a_result_lacks_is_left_out(result):
    shown = (Headline("own", lambda ds: with_interval(ds, "own")), Headline("lacking", lambda ds: ds["nothing"]))
    found = numbers(of(*shown), result)
    assert [(n.name, n.where, n.text) for n in found] == [("own", "a", "1 [0.9, 1.2]"), ("own", "b", "0.5 [0.4, 0.7]")]
    table = headlines(of(*shown), {"one": result, "other": result.isel(band=[0])})
    assert table.columns == ("number", "of", "one", "other")
    assert table.rows[1] == ["own", "b", "0.5 [0.4, 0.7]", "-"]


@pytest.mark.parametrize(("count", "said"), [(1, "1 prompt, 9 tokens each"), (2, "2 prompts, 9 tokens each")])
def test_one_prompt_is_told_in_the_singular(model, count, said):
    tokens = probes.prompts(model, n=count, length=9)
    assert described(measure("loss"), {"tiny": probes.loss(model, tokens)}).startswith(f"{said}, ")


@pytest.mark.parametrize(
    ("names", "wide"),
    [("aa", "2 prompts"), ("aabb", "2 documents"), ("abc", "3 documents"), ("abcd", None), ("a", None)],
)
def test_few_documents_are_the_reason_for_wide_intervals(model, names, wide):
    tokens = probes.prompts(model, n=len(names), length=9)
    ds = probes.loss(model, tokens).assign_coords(document=("prompt", list(names)))
    results = {"tiny": ds.assign_attrs(text_source="some text")}
    shown = headlines(measure("loss"), results)
    said = [] if wide is None else [f"intervals over {wide} are wide; more --prompts make them narrower"]
    assert read(results, shown)[1:] == said
    assert read(results, replace(shown, rows=[["bare", "1.5"]]))[1:] == []


def test_every_measure_of_the_registry_has_a_question_and_numbers(model):
    tokens = probes.prompts(model, n=8, length=32)
    for name in questions():
        one = measure(name)
        assert one.name == name
        assert one.question == questions()[name]
        for call in one.trials.values():
            ds = call(model, tokens)
            if measure_of(ds) is not one:  # a part of it
                continue
            assert numbers(one, ds), name
            assert all(line.startswith(f"{model.identity.name}: ") for line in one.answer({"tiny-llama": ds})), name
            assert all(len(row) == len(table.columns) for table in one.tables({"a": ds}) for row in table.rows), name


def test_the_loss_is_that_of_transformers(model):
    tokens = probes.prompts(model, n=3, length=40)
    ds = measure("loss").compute(model, tokens)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "tiny-llama", dtype=torch.float32)
        logits = plain(tokens).logits.double()
    expected = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    np.testing.assert_allclose(ds["loss"], expected, rtol=2e-6, atol=2e-6)
    assert ds["predicted"].values.tolist() == list(range(1, 40))
