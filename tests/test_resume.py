"""Pieces: kept, read back, whole or not there; and probes that end the same wherever they stop."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import kept
import numpy as np
import pytest
import torch
import xarray as xr

import probes
from probes.errors import InputError
from probes.run import resume
from probes.run.resume import BLOCK, Pieces, Store, Stores, each, groups, keeping, store_files, within

KEY_OF_TESTS = {"kind": "mine", "key": {"a": 1}}


class Stopped(Exception):
    """What interrupts a measurement in these tests."""


def squares(limit: int | None = None, made: list[int] | None = None) -> Any:
    def measure(n: int) -> dict[str, np.ndarray]:
        if n == limit:
            raise Stopped
        if made is not None:
            made.append(n)
        return {"square": np.array(n * n), "row": np.full((2, n + 1), n / 3, dtype=np.float32)}

    return measure


def values(pieces: Pieces) -> list[tuple[int, bytes]]:
    return [(int(piece["square"]), piece["row"].tobytes()) for piece in pieces]


def test_without_a_file_pieces_stay_in_memory():
    assert values(each("x", 4, squares())) == values(Pieces([squares()(n) for n in range(4)]))


def test_what_was_kept_is_not_measured_again(tmp_path):
    path, made = tmp_path / "unit", []
    with pytest.raises(Stopped), keeping(path, KEY_OF_TESTS):
        each("x", 5, squares(limit=3, made=made))
    assert made == [0, 1, 2]
    assert Stores(path).key("") == KEY_OF_TESTS
    with keeping(path, KEY_OF_TESTS):
        found = each("x", 5, squares(made=made))
        assert values(found) == values(each("x", 5, squares()))  # a second stage of that name is another one
    assert made == [0, 1, 2, 3, 4]
    assert [piece["row"].shape for piece in found] == [(2, n + 1) for n in range(5)]
    assert found[0]["square"].shape == ()
    assert found.stacked("square").tolist() == [0, 1, 4, 9, 16]


def test_stages_are_told_apart_by_their_scope_not_by_what_ran_before_them(tmp_path):
    path = tmp_path / "unit"
    with keeping(path, KEY_OF_TESTS):
        with within("before"):
            each("x", 2, lambda n: {"y": np.array(10 + n)})
        with within("after"):
            each("x", 2, lambda n: {"y": np.array(20 + n)})

    def never(n: int) -> dict[str, np.ndarray]:
        raise AssertionError(n)

    with keeping(path, KEY_OF_TESTS), within("after"):  # the other was not needed this time
        assert each("x", 2, never).stacked("y").tolist() == [20, 21]


def test_a_piece_is_whole_or_not_there_wherever_a_kill_meets_it(tmp_path):
    """A process ends without a word in the transaction of piece 2, after so many of SQLite's steps."""
    ends = []
    for step in range(1, 20):
        path = tmp_path / f"unit{step}"
        child = os.fork()
        if child == 0:
            with keeping(path, KEY_OF_TESTS):
                die_in_the_transaction_of(2, step)
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        made: list[int] = []
        with keeping(path, KEY_OF_TESTS):
            found = each("x", 5, squares(made=made))
        assert made == ([2, 3, 4] if ends[-1] else [])
        assert values(found) == values(each("x", 5, squares()))
    assert ends.count(9) > 5
    assert set(ends) <= {0, 9}


def die_in_the_transaction_of(piece: int, step: int) -> None:
    left = step

    def count() -> int:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(9)
        return 0

    def measure(n: int) -> dict[str, np.ndarray]:
        if n == piece:
            kept_now = resume._kept.get()
            assert kept_now is not None
            kept_now.stores.own._connection().set_progress_handler(count, 3)
        return squares()(n)

    each("x", 5, measure)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "unit"
    with pytest.raises(Stopped), keeping(path, KEY_OF_TESTS):
        each("x", 5, squares(limit=4))
    (file,) = store_files(path)
    file.write_bytes(b"nothing of ours" * 100)
    with pytest.raises(InputError, match=r"unit-0\.sqlite' cannot be read \(file is not a database\); delete it"):
        Stores(path).key("")


def test_large_arrays_are_kept_in_blocks(tmp_path, monkeypatch):
    assert BLOCK < 10**9
    monkeypatch.setattr("probes.run.resume.BLOCK", 100)
    with keeping(tmp_path / "unit", KEY_OF_TESTS):
        found = each("x", 3, lambda n: {"long": np.arange(n, n + 200.0), "short": np.array([n])})
        assert found.stacked("long").tolist() == [list(range(n, n + 200)) for n in range(3)]
        assert [int(piece["short"][0]) for piece in found] == [0, 1, 2]
        assert found[2]["long"].flags.writeable


def test_one_array_of_every_piece_is_read_without_the_others(tmp_path, monkeypatch):
    with keeping(tmp_path / "unit", KEY_OF_TESTS):
        found = each("x", 5, lambda n: squares()(n) | {"heavy": np.zeros(10_000), "empty": np.zeros((0, 2), np.int8)})
    whole = found[3]
    assert {name: (x.dtype, x.shape) for name, x in whole.items()} == {
        "square": (np.dtype(np.int64), ()),
        "row": (np.dtype(np.float32), (2, 4)),
        "heavy": (np.dtype(np.float64), (10_000,)),
        "empty": (np.dtype(np.int8), (0, 2)),
    }
    real = Store.piece
    monkeypatch.setattr(Store, "piece", lambda self, *names: real(self, *names) if len(names) == 3 else None)
    assert found.stacked("square").tolist() == [0, 1, 4, 9, 16]
    assert found.stacked("empty").shape == (5, 0, 2)


def test_a_file_that_a_kill_left_empty_belongs_to_nothing(tmp_path):
    path = tmp_path / "unit"
    path.with_name("unit-0.sqlite").touch()
    assert Stores(path).key("") is None
    with keeping(path, KEY_OF_TESTS):
        each("x", 1, squares())
    assert Stores(path).key("") == KEY_OF_TESTS


def test_files_of_more_processes_are_read_and_left(tmp_path):
    path, made = tmp_path / "unit", []
    with pytest.raises(Stopped), keeping(path, KEY_OF_TESTS):
        each("x", 4, squares(limit=2))
    store_files(path)[0].rename(tmp_path / "unit-7.sqlite")
    with keeping(path, KEY_OF_TESTS):
        assert values(each("x", 4, squares(made=made))) == values(each("x", 4, squares()))
    assert made == [2, 3]
    assert [file.name for file in store_files(path)] == ["unit-0.sqlite", "unit-7.sqlite"]
    assert store_files(tmp_path / "uni") == store_files(tmp_path / "unit-0") == []


def test_a_full_disk_is_one_line_and_keeps_what_was_there(tmp_path):
    script = f"""
import resource, signal, numpy as np
from pathlib import Path
from probes.errors import InputError
from probes.run.resume import each, keeping
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))
try:
    with keeping(Path({str(tmp_path / "unit")!r}), {{}}):
        each("x", 9, lambda n: {{"row": np.full(1000, n, dtype=np.float64)}})
except InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    file = tmp_path / "unit-0.sqlite"
    assert done.stdout.startswith(f"cannot write '{file}' (File too large); free some space")
    assert kept.pieces(file) == ["1/x/0", "1/x/1"]
    assert file.stat().st_size <= 40000


@pytest.mark.parametrize(("count", "first", "pieces"), [(1, 1, 1), (64, 1, 64), (65, 2, 33), (1000, 16, 63)])
def test_groups_cover_all_prompts_in_order(count, first, pieces):
    found = groups(count)
    assert [n for group in found for n in group] == list(range(count))
    assert (len(found[0]), len(found)) == (first, pieces)


# ------------------------------------------------------------------------------------------------------------ probes


@pytest.fixture(scope="module")
def prompted() -> tuple[Any, torch.Tensor]:
    model = probes.load("tiny-llama")
    return model, probes.prompts(model, n=4, length=24)


@pytest.fixture(scope="module")
def longer() -> tuple[Any, torch.Tensor]:
    """Long enough that the search for a basis is worth its products."""
    model = probes.load("tiny-llama")
    return model, probes.prompts(model, n=3, length=64)


def measure(name: str, model: Any, tokens: torch.Tensor, progress: Any) -> Any:
    probe = getattr(importlib.import_module("probes"), name.partition(" ")[0], None)
    options: dict[str, Any] = {
        "jacobian": {"method": "sketch", "products": 40},
        "jacobian auto": {"method": "sketch", "products": "auto", "relative_error": 0.02, "pathway": "all", "chunk": 9},
        "sinks": {"reacts": "mean"},
        "trajectory": {"starts": 4},
        "leakage": {"bootstrap": 5},
        "bos_swap": {"bootstrap": 5, "products": 20},
        "second_moment": {},
    }[name]
    if name in ("leakage", "bos_swap", "second_moment"):
        module = "theory.kernel" if name == "second_moment" else f"measures.{name}"
        probe = getattr(importlib.import_module(f"probes.{module}"), name)
    assert probe is not None
    return probe(model, tokens, progress=progress, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["jacobian", "jacobian auto", "sinks", "trajectory", "leakage", "bos_swap", "second_moment"]
)
def test_a_probe_stopped_anywhere_ends_with_the_same_bytes(tmp_path, prompted, longer, name):
    model, tokens = longer if "auto" in name else prompted
    whole = measure(name, model, tokens, None)
    calls = 0

    def counted(*_: float) -> None:
        nonlocal calls
        calls += 1

    with keeping(tmp_path / "counted", {}):
        kept = measure(name, model, tokens, counted)
    assert calls > 2
    for at in (1, calls // 2, calls - 1):
        left = at

        def stopping(*_: float) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

        path = tmp_path / f"stopped-{at}"
        with pytest.raises(KeyboardInterrupt), keeping(path, {}):
            measure(name, model, tokens, stopping)
        assert store_files(path) or at < calls - 1
        for file in store_files(path):  # as if another process had measured them
            file.rename(path.with_name(f"{path.name}-3.sqlite"))
        with keeping(path, {}):
            again = measure(name, model, tokens, None)
        for variable in whole.data_vars:
            expected = whole[variable].values
            for found in (kept, again):
                assert found[variable].values.dtype == expected.dtype
                assert found[variable].values.tobytes() == expected.tobytes(), variable


def test_the_next_round_of_probes_begins_with_what_was_kept_of_the_last(tmp_path, longer, monkeypatch):
    model, tokens = longer
    pulled: list[int] = []
    prompt = importlib.import_module("probes.models.pullback").Prompt
    real = prompt.pull

    def pull(self: Any, cotangent: Any) -> Any:
        pulled.append(cotangent.shape[0])
        return real(self, cotangent)

    monkeypatch.setattr(prompt, "pull", pull)
    with keeping(tmp_path / "unit", {}):
        whole = measure("jacobian auto", model, tokens, None)
    directions = sum(pulled)
    assert directions == round(float((whole["products"] - whole["basis_products"]).sum()))
    file = tmp_path / "unit-0.sqlite"
    names = kept.pieces(file)
    rounds = len({name.split("/")[0] for name in names})
    assert rounds > 2
    assert len(names) == rounds * len(tokens)

    # Cut off within the last round: its first prompt is there, the others begin it anew, all rounds before are there.
    for name in names[names.index(f"{rounds}/jacobian/0") + 1 :]:
        kept.rows(file, "DELETE FROM arrays WHERE piece = ?", name)
    pulled.clear()
    calls: list[tuple[float, float]] = []
    with keeping(tmp_path / "unit", {}):
        again = measure("jacobian auto", model, tokens, lambda *done: calls.append(done))
    assert 0 < sum(pulled) < directions / 2
    assert calls[-1] == (sum(pulled), sum(pulled))  # in all: what was left to do
    xr.testing.assert_identical(again.drop_attrs(), whole.drop_attrs())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_is_kept_of_a_round_has_the_models_precision(tmp_path, longer, dtype):
    model, tokens = probes.load("tiny-llama", dtype=dtype), longer[1][:2]
    whole = measure("jacobian auto", model, tokens, None)
    with keeping(tmp_path / "unit", {}):
        kept = measure("jacobian auto", model, tokens, None)
    xr.testing.assert_identical(kept.drop_attrs(), whole.drop_attrs())


@pytest.mark.slow
def test_memory_that_runs_out_between_rounds_begins_the_prompts_round_anew(longer, monkeypatch):
    model, tokens = longer
    expected = measure("jacobian auto", model, tokens[:2], None)
    prompt = importlib.import_module("probes.models.pullback").Prompt
    real, seen = prompt.pull, []

    def small(self: Any, cotangent: Any) -> Any:
        seen.append(cotangent.shape[0])
        if len(seen) > 4 and cotangent.shape[0] > 3:  # in the first round each prompt's basis and probes are pulled
            raise MemoryError
        return real(self, cotangent)

    monkeypatch.setattr(prompt, "pull", small)
    found = measure("jacobian auto", model, tokens[:2], None)
    assert seen[4] > 3 >= seen[-1]
    for name in ("sensitivity", "stderr"):
        torch.testing.assert_close(*(torch.from_numpy(ds[name].values) for ds in (found, expected)), rtol=1e-4, atol=0)
    assert found["products"].values.tolist() == expected["products"].values.tolist()


def test_memory_that_runs_out_halves_the_chunk_and_the_numbers_stay(prompted, monkeypatch):
    model, tokens = prompted
    linear = importlib.import_module("probes.models.linear")
    expected = measure("jacobian", model, tokens[:1], None)
    real, seen = linear.LinearizedBlock.vjp, []

    def small(self: Any, cotangent: Any, first: Any = None, *, frozen: bool = False) -> Any:
        seen.append(cotangent.shape[0])
        if cotangent.shape[0] > 5:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return real(self, cotangent, first, frozen=frozen)

    monkeypatch.setattr(linear.LinearizedBlock, "vjp", small)
    found = measure("jacobian", model, tokens[:1], None)
    assert min(seen) <= 5 < max(seen)
    for name in ("sensitivity", "stderr"):
        torch.testing.assert_close(*(torch.from_numpy(ds[name].values) for ds in (found, expected)), rtol=1e-4, atol=0)
    assert found["products"].values.tolist() == expected["products"].values.tolist()

    def nothing(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(linear.LinearizedBlock, "vjp", nothing)
    with pytest.raises(InputError, match="a prompt of 24 positions of 'tiny-llama' does not fit into memory"):
        measure("jacobian", model, tokens[:1], None)


def test_blocks_made_again_for_every_chunk_give_the_same_numbers(prompted, monkeypatch):
    model, tokens = prompted
    kept = measure("jacobian", model, tokens[:1], None)
    monkeypatch.setattr(importlib.import_module("probes.models.memory"), "KEPT_SHARE", 0.0)
    made_again = measure("jacobian", model, tokens[:1], None)
    for name in kept.data_vars:
        np.testing.assert_array_equal(kept[name].values, made_again[name].values)
