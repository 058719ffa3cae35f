"""The benchmarks: contenders end with the same numbers as ours, times are compared by round."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """Imports a script; they import each other by their bare names, as scripts of one folder do, and none of these stays."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before, threads = set(sys.modules), torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in {"common", "jacobian", "sinks"} & (set(sys.modules) - before):
        del sys.modules[name]


def test_all_ways_to_the_jacobian_give_its_norms(module):
    common, jacobian = module("common"), module("jacobian")
    calls = jacobian.contenders(common.llama(64, 2, heads=2), common.random_tokens(12))
    exact = calls.pop(jacobian.EXACT)()
    for name, call in calls.items():
        np.testing.assert_allclose(call(), exact, rtol=1e-5, err_msg=name)  # float32; 64 products are all directions


def test_all_ways_to_sinks_give_one_alpha(module):
    common, sinks = module("common"), module("sinks")
    model, tokens = common.llama(48, 2, heads=2), common.random_tokens(24)
    with torch.no_grad():
        alphas = {name: sinks.contender(name, model)(tokens) for name in sinks.CONTENDERS if name != "plain"}
    assert alphas["eager"].shape == (2, 2, sinks.KEYS)
    for name, alpha in alphas.items():
        torch.testing.assert_close(alpha.double(), alphas["eager"].double(), atol=1e-6, rtol=0, msg=name)  # float32


def test_turns_alternate_and_ratios_are_those_of_rounds(module):
    common, order = module("common"), []
    seconds = common.turns({name: lambda name=name: order.append(name) for name in "ab"}, 2, clock=lambda: len(order))
    assert order == ["a", "b"] * 2
    assert seconds == {"a": [1, 1], "b": [1, 1]}
    assert common.ratio([2.0, 8.0, 2.0], [1.0, 4.0, 1.0]) == "2 (2 to 2)"
    assert common.spread([2.0, 8.0, 3.0]) == "3 (2.5 to 5.5)"
    assert common.spread([12345.0]) == "12,345"


@pytest.mark.slow
def test_a_benchmark_runs_and_prints_its_section():
    run = subprocess.run(
        [sys.executable, str(FOLDER / "toys.py"), "--quick"], check=True, capture_output=True, text=True
    )
    assert run.stdout.count("torch.nn loop, one by one") == 2  # at two widths
