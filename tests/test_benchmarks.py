"""The benchmarks: contenders end with the same numbers as ours, times are compared by round, the page keeps its sections."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
NAMES = ("common", "run", "jacobian", "sinks", "toys", "costs")


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    """Their modules import each other by their bare names, as scripts of one folder do; none of these names stays."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before, threads = set(sys.modules), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for name in set(NAMES) & (set(sys.modules) - before):
        del sys.modules[name]


def module(name):
    return importlib.import_module(name)


def test_all_ways_to_the_jacobian_give_its_norms():
    common, jacobian = module("common"), module("jacobian")
    calls = jacobian.contenders(common.llama(64, 2, heads=2), common.random_tokens(12))
    exact = calls.pop(jacobian.EXACT)()
    assert (exact > 0).all()
    for name, call in calls.items():
        np.testing.assert_allclose(call(), exact, rtol=1e-5, err_msg=name)  # float32; 64 products are all directions


def test_all_ways_to_sinks_give_one_alpha():
    common, sinks = module("common"), module("sinks")
    model, tokens = common.llama(48, 2, heads=2), common.random_tokens(24)
    with torch.no_grad():
        alphas = {name: sinks.contender(name, model)(tokens) for name in sinks.CONTENDERS if name != "plain"}
    assert alphas["eager"].shape == (2, 2, sinks.KEYS)
    for name, alpha in alphas.items():
        torch.testing.assert_close(alpha.double(), alphas["eager"].double(), atol=1e-6, rtol=0, msg=name)  # float32


def test_turns_alternate_and_ratios_are_those_of_rounds():
    common, order = module("common"), []
    seconds = common.turns({name: lambda name=name: order.append(name) for name in "ab"}, 2, clock=lambda: len(order))
    assert order == ["a", "b"] * 2
    assert seconds == {"a": [1, 1], "b": [1, 1]}
    # The machine was four times slower in the second round; the ratio of every round is 2.
    assert common.ratio([2.0, 8.0, 2.0], [1.0, 4.0, 1.0]) == "2 (2 to 2)"
    assert common.spread([2.0, 8.0, 3.0]) == "3 (2.5 to 5.5)"
    assert common.spread([12345.0]) == "12,345"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_is_the_peak_above_what_was_there():
    common, before = module("common"), torch.ones(1 << 22)  # 16 MiB that are there already
    total, peak = common.peak_of(lambda: float(torch.ones(1 << 24).sum()))  # 64 MiB
    assert total == 1 << 24
    assert 56 * common.MIB < peak < 96 * common.MIB
    assert before.sum() > 0


@pytest.mark.slow
def test_a_benchmark_runs_and_its_section_is_put_into_the_page(tmp_path):
    page = tmp_path / "benchmarks.md"
    command = [sys.executable, str(FOLDER / "run.py"), "--quick", "--out", str(page), "--only"]
    subprocess.run([*command, "toys"], check=True, stdout=subprocess.PIPE)
    assert page.read_text(encoding="utf-8").count("torch.nn loop, one by one") == 2  # at two widths
    run = subprocess.run([*command, "jacobians"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "--only jacobians does not exist" in run.stderr
