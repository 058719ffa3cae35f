"""`headwater selftest`: what counts as a difference, errors that are planted on one side, and the whole of it."""

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from commands import call
from sim import Simulated

from probes import selftest
from probes.models.load import load
from probes.selftest import MODELS, TRIALS, compared, differences

ENTRIES = np.linspace(1.0, 2.0, 100)


def verdict(variable: str, here: Any, there: Any) -> str:
    one, other = (xr.Dataset({variable: ("x", np.asarray(values))}) for values in (here, there))
    return compared("", (one, other), (1.0, 1.0)).verdict


def changed(values: np.ndarray, count: int, by: float) -> np.ndarray:
    return np.concatenate([values[:count] + by, values[count:]])


def test_what_counts_as_a_difference():
    for variable, by, few, many in (
        ("alpha", 1.9e-3, 100, None),  # of a largest value of 2
        ("alpha", 2.1e-3, 0, 1),
        ("stderr", 0.03, 100, None),
        ("sensitivity_stderr", 0.05, 0, 1),
        ("sink_rate", 0.5, 2, 3),  # a threshold decides it
        ("over_tau", 9e-6, 100, None),  # the same share, made with other sums
        ("sink_rate_of_model", 1.9e-3, 100, None),  # a mean over heads, which rounds
        ("over_tau_of_model", 2.1e-3, 0, 1),
        ("alpha", np.nan, 2, 3),
        ("alpha", np.inf, 2, 3),
    ):
        assert verdict(variable, ENTRIES, changed(ENTRIES, few, by)) == "ok"
        assert many is None or verdict(variable, ENTRIES, changed(ENTRIES, many, by)) == "differs"
    assert verdict("loss_change", [1e-7, -2e-7], [-3e-7, 4e-7]) == "ok"  # rounding of losses of size 1
    assert verdict("loss_change", [1e-4, -2e-4], [2e-4, -2e-4]) == "differs"
    assert verdict("role", list("abcd"), list("abcx")) == "ok"  # one entry may
    assert verdict("role", list("abcd"), list("abyx")) == "differs"
    assert verdict("alpha", [np.nan, np.inf], [np.nan, np.inf]) == "ok"
    assert verdict("alpha", ENTRIES, ENTRIES[1:]) == "differs"
    (lost,) = differences(xr.Dataset({"alpha": 1.0}), xr.Dataset())
    assert lost.excess() == np.inf


@pytest.fixture
def few(monkeypatch):
    """Two measures and a short training."""
    monkeypatch.setattr("toy.selftest.STEPS", 2)
    monkeypatch.setattr(selftest, "MODELS", {"tiny-llama": ("theory", "sinks")})


def test_a_matrix_that_is_1_percent_off_on_one_side_is_found(monkeypatch, capsys, few, tmp_path):
    sides = []

    def loaded(name: str, **given: Any) -> Any:
        model = load(name, **given)
        sides.append(model)
        if len(sides) == 2:
            with torch.no_grad():
                model.parts(5).down.weight.mul_(1.01)
        return model

    monkeypatch.setattr(selftest, "load", loaded)
    assert call(monkeypatch, "selftest", "--device", "cpu", "--out", str(tmp_path)) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "differs: tiny-llama: theory, tiny-llama: sinks"
    assert "comparisons differ: " in shown
    page = (tmp_path / "selftest.md").read_text(encoding="utf-8")
    assert page.count("| differs |") == 2
    assert page.count("| ok |") == 1
    assert f"| torch | {torch.__version__} |" in page


def test_an_error_on_the_device_is_a_row(monkeypatch, capsys, few):
    def measured(model: Any, tokens: torch.Tensor) -> xr.Dataset:
        calls.append(model)
        if len(calls) == 2:
            raise NotImplementedError("no such kernel\n  here")
        return xr.Dataset({"alpha": 1.0})

    calls: list[Any] = []
    monkeypatch.setitem(TRIALS, "sinks", measured)
    assert call(monkeypatch, "selftest", "--device", "cpu") == 1
    *_, failed, last = capsys.readouterr().out.splitlines()
    assert failed == "tiny-llama: sinks on cpu: NotImplementedError: no such kernel here"
    assert last == "failed: tiny-llama: sinks"


@pytest.mark.parametrize("float64", [True, False])
def test_another_device_agrees(monkeypatch, capsys, few, float64):
    with Simulated(float64=float64):
        assert call(monkeypatch, "selftest", "--device", "lazy:0") == 0
    shown = capsys.readouterr().out
    assert "lazy:0 against the CPU" in shown
    assert shown.splitlines()[-1] == "all 3 agree"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_probe_agrees(monkeypatch, capsys, device):
    assert call(monkeypatch, "selftest", "--device", device) == 0
    shown = capsys.readouterr().out
    count = sum(map(len, MODELS.values())) + 1
    assert shown.splitlines()[-1] == f"all {count} agree"
    assert [f"{name}: {one}" in shown for name in MODELS for one in MODELS[name]] == [True] * (count - 1)
