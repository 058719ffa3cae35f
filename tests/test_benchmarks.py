"""What the benchmarks rest on: statistics, rows that outlive an interruption, limits, tables, and operations by formula."""

import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import probes

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    """Their modules import each other by their bare names, as scripts of one folder do; none of these names stays."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "." not in name and (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


def module(name):
    return importlib.import_module(name)


def test_scripts_import_without_running_and_every_case_has_jobs_with_labels_of_their_own():
    assert all(module(name).__doc__ for name in ("page", "plots", "estimators", "theory", "costs"))
    run, harness = module("run"), module("harness")
    for quick, device in ((False, "cpu"), (True, "cpu"), (False, "cuda")):
        settings = harness.Settings(device=device, quick=quick)
        keys = [job.key(label) for name in run.CASES for job in run.case(name).jobs(settings) for label in job.points]
        assert len(set(keys)) == len(keys) > 10
        json.dumps(keys)


def test_exponent_of_a_power_law_is_exact_and_its_interval_covers_under_noise():
    exponent = module("harness").exponent
    x = [64, 128, 256, 512, 1024]
    found = exponent(x, [3e-6 * n**1.7 for n in x])
    assert found.value == pytest.approx(1.7)
    assert found.high - found.low < 1e-6  # 1 - r^2 is rounded, and the root of that is taken
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        noisy = exponent(x, [n**1.7 * np.exp(0.1 * random.standard_normal()) for n in x])
        inside += noisy.low <= 1.7 <= noisy.high
    assert 0.91 < inside / 300 < 0.99  # 95 %, three standard errors of 1.3 % each way
    assert exponent([1, 2], [1.0, 8.0]).value == pytest.approx(3)
    assert exponent([1, 2], [1.0, 8.0]).high == np.inf
    for x, y in (([1], [1.0]), ([1, 2], [0.0, 1.0])):
        with pytest.raises(ValueError, match="no exponent"):
            exponent(x, y)


def test_ratios_are_those_of_rounds_not_of_medians_and_tables_hold_them():
    harness = module("harness")
    # The machine was four times slower in the second round; the ratio of every round is 2.
    assert harness.ratios([2.0, 8.0, 2.0], [1.0, 4.0, 1.0]) == [2.0, 2.0, 2.0]
    assert harness.spread([2.0, 8.0, 3.0], ".1f") == "3.0 (2.5 to 5.5)"
    assert harness.spread([2.0, 4.0], ".1f") == "3.0"
    assert harness.spread([12345.0]) == "12,345"
    assert harness.table(["a", "b"], [["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]
    with pytest.raises(ValueError, match="does not fit"):
        harness.table(["a", "b"], [["1"]])


def test_turns_alternate_and_a_long_first_round_counts(monkeypatch):
    machine, order = module("machine"), []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = machine.turns(calls, rounds=2, device="cpu")
    assert order == ["a", "b"] * 3  # one to warm up
    assert {name: len(times) for name, times in found.items()} == {"a": 2, "b": 2}
    order.clear()
    long = {"a": 20.0, "b": 30.0}
    found = machine.turns(calls, rounds=5, device="cpu", spend=60.0, first=long)
    assert order == []
    assert found == {"a": [20.0], "b": [30.0]}
    machine.turns(calls, rounds=3, device="cpu", first=long)
    assert order == ["a", "b"] * 2


def test_rows_are_taken_up_again_on_the_same_machine_only(tmp_path):
    harness = module("harness")
    path, job = tmp_path / "rows.json", harness.Job("case", "job", {"one": {}, "two": {}})
    rows = harness.Rows(path, {"processor": "x", "threads": 1})
    rows.put(job.key("one"), {"seconds": [1.0]})
    rows.put(job.key("two"), {"failed": "not installed (pip install y)"})
    again = harness.Rows(path, {"processor": "x", "threads": 1})
    assert again.get(job, "one") == {"seconds": [1.0]}
    assert not again.differs
    assert again.get(job, "two") is None  # it may be installed by now
    again.drop(["other"])
    assert again.get(job, "one") is not None
    again.drop(["case"])
    assert again.get(job, "one") is None
    other = harness.Rows(path, {"processor": "x", "threads": 2})
    assert other.get(job, "one") is None
    as_it_is = harness.Rows(path, None)
    assert as_it_is.get(job, "one") == {"seconds": [1.0]}
    assert as_it_is.machine == {"processor": "x", "threads": 1}
    assert other.differs == ["threads 1 is now 2"]


CHILD = """
import json, os, signal, sys, time
sys.path.insert(0, FOLDER)
from harness import Job, Settings, serve

class Case:
    def measure(job, settings):
        with open("asked.txt", "a") as file:
            file.write(" ".join(job.points) + "\\n")
        for label, point in job.points.items():
            if point.get("do") == "hang":
                time.sleep(60)
            if point.get("do") == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if point.get("do") == "raise":
                raise SystemExit(3)
            print("noise", flush=True)
            yield label, {"seconds": [0.5]}

order = json.loads(sys.argv[2])
serve(Case, Job(**order["job"]), Settings(**order["settings"]), order["until"])
"""


@pytest.mark.parametrize(
    ("do", "failed"), [("hang", "time, limit 1 s"), ("die", "memory, killed by the system"), ("raise", None)]
)
def test_what_was_measured_before_a_child_fell_is_kept_and_not_measured_again(tmp_path, monkeypatch, do, failed):
    harness = module("harness")
    (tmp_path / "run.py").write_text(f"FOLDER = {str(FOLDER)!r}\n{CHILD}", encoding="utf-8")
    monkeypatch.setattr(harness, "__file__", str(tmp_path / "harness.py"))
    monkeypatch.chdir(tmp_path)
    points = {"short": {}, "long": {"do": do}, "longer": {}}
    job = harness.Job("case", "job", points, rising=True)
    rows = harness.Rows(tmp_path / "rows.json", {})
    settings = harness.Settings(time_limit=1.0 if do == "hang" else 30.0)

    def ran(seconds: float = 60) -> bool:
        return harness.run_job(job, rows, settings, {"commit": "abc"}, time.time() + seconds)

    assert ran(0.01)  # out of time, not too slow: nothing is said
    assert not rows.found
    (tmp_path / "asked.txt").unlink(missing_ok=True)
    assert ran() is (failed is not None)
    kept = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert kept[job.key("short")] == {"seconds": [0.5], "commit": "abc"}
    assert job.key("longer") not in kept
    if failed is None:
        assert job.key("long") not in kept  # a defect is no result: the next run tries again
        return
    assert kept[job.key("long")] == {"failed": failed, "commit": "abc"}
    # More of what was too much is not tried, and nothing is measured twice.
    assert ran()
    assert (tmp_path / "asked.txt").read_text().splitlines() == ["short long longer"]
    # What is less, and missing since it was taken out, is.
    del rows.found[job.key("short")]
    assert ran()
    assert (tmp_path / "asked.txt").read_text().splitlines() == ["short long longer", "short"]
    assert rows.get(job, "short") == {"seconds": [0.5], "commit": "abc"}


def test_memory_sees_the_peak_and_not_what_was_there():
    if not sys.platform.startswith("linux"):
        pytest.skip("resident memory is read from /proc")
    machine = module("machine")
    before = torch.ones(1 << 22)  # 16 MiB that are there already
    memory = machine.Memory("cpu")
    large = torch.ones(1 << 24)  # 64 MiB
    del large
    assert 56 * machine.MIB < memory.above() < 96 * machine.MIB
    assert before.sum() > 0


def test_operations_and_bytes_are_counted():
    work = module("work")
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    with work.Counting() as counted:
        product = a @ b
        product.T  # noqa: B018 - a view costs nothing
    assert counted.flops == 2 * 4 * 8 * 16
    assert counted.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    q = torch.ones(1, 2, 8, 4)
    with work.Counting() as counted:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert counted.flops == 2 * 2 * (8 * 9 // 2) * (4 + 4)


def test_every_probe_runs_under_the_counter():
    models, scaling, work = module("models"), module("scaling"), module("work")
    view = probes.load(models.llama(96, 2, 48, heads=3))
    weights = 2 * (4 + 3 * 11 / 4) * 96**2  # of two blocks
    for name in scaling.PROBES:
        with work.Counting() as counted:
            assert scaling.probe(name, view, models.random_tokens(4, 48))().sizes
        assert counted.flops > 4 * 48 * 2 * weights  # more than a pass
        assert counted.bytes > 0


def test_the_other_ways_to_the_jacobian_give_our_numbers():
    models, jacobian = module("models"), module("jacobian")
    model = models.llama(48, 2, 12, heads=2)
    view, tokens = probes.load(model), models.random_tokens(1, 12)
    calls = jacobian._calls(model, view, tokens, 20)  # 20 of 48 directions
    truth = calls["exact"]()
    for name in jacobian.SAME:
        assert torch.allclose(calls[name](), truth, rtol=1e-4), name  # float32


def test_all_contenders_end_with_one_alpha():
    models, attention = module("models"), module("attention")
    model = models.llama(48, 2, 24, heads=2)
    tokens = models.random_tokens(1, 24)
    with torch.no_grad():
        patterns = attention.contender("eager", model)(tokens)
        assert patterns.shape == (2, 2, attention.KEYS)
        for name in ("sinks", "sinks all", "hooks", "cache"):
            found = attention.contender(name, model)(tokens)
            assert torch.allclose(found.double(), patterns.double(), atol=1e-6), name  # float32


def test_page_says_what_was_not_run_and_draws_from_rows_alone(tmp_path):
    run, harness, page = module("run"), module("harness"), module("page")
    settings = harness.Settings(quick=True)
    machine = module("machine").identity("cpu") | {"sizes": "quick"}
    rows = harness.Rows(tmp_path / "benchmarks" / "cpu.json", machine)
    stamp = {"command": "python benchmarks/run.py --quick", "date": "2026-01-01", "commit": "abc"}
    attention = run.case("attention")
    for job in attention.jobs(settings):
        for label, point in job.points.items():
            if job.name == "cache" and point["length"] > 128:
                rows.put(job.key(label), {"failed": "memory, limit 1.0 GiB", **stamp})
                break
            row = {"seconds": {"contender": [2.0, 2.2, 2.4], "plain": [1.0, 1.1, 1.2]}, "above": 1 << 24}
            rows.put(job.key(label), {**row, "weights": 1, "alpha of key 0": [0.5], "nnsight": None, **stamp})
    path = page.write_page(tmp_path, rows, settings, {name: run.case(name) for name in ("attention", "scaling")})
    text = path.read_text(encoding="utf-8")
    assert "2.00 (2.00 to 2.00)" in text
    assert "did not survive (memory, limit 1.0 GiB)" in text
    assert "Not run: Scaling (all)." in text
    assert "Not measured on GPU" in text
    assert "commit abc" in text
    assert 0 < (tmp_path / "benchmarks" / "attention.png").stat().st_size < 300_000
    assert not (tmp_path / "benchmarks" / "scaling.png").exists()
