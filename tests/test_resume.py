"""Probes that end the same wherever they stop, and where memory runs out on the way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from kept import interrupting, piece_files

import probes
from probes.errors import InputError
from probes.models.linear import LinearizedBlock
from probes.models.pullback import Prompt
from probes.run.store import Store


@pytest.fixture(scope="module")
def prompted() -> tuple[Any, torch.Tensor]:
    model = probes.load("tiny-llama")
    return model, probes.prompts(model, n=4, length=24)


@pytest.fixture(scope="module")
def longer() -> tuple[Any, torch.Tensor]:
    """Long enough that the search for a basis is worth its products."""
    model = probes.load("tiny-llama")
    return model, probes.prompts(model, n=3, length=64)


PROBES: dict[str, dict[str, Any]] = {
    "jacobian": {"method": "sketch", "products": 40},
    "jacobian auto": {"method": "sketch", "products": "auto", "relative_error": 0.02, "pathway": "all", "chunk": 9},
    "sinks": {"reacts": "mean"},
    "trajectory": {"starts": 4},
    "leakage": {"bootstrap": 5},
    "bos_swap": {"bootstrap": 5, "products": 20},
    "second_moment": {},
}


def measure(name: str, model: Any, tokens: torch.Tensor, progress: Any, folder: Path | None = None) -> Any:
    probe = getattr(probes.theory if name == "second_moment" else probes, name.partition(" ")[0])
    return probe(model, tokens, progress=progress, pieces=Store(folder), **PROBES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_stopped_anywhere_ends_with_the_same_bytes(tmp_path, prompted, longer, name):
    model, tokens = longer if "auto" in name else prompted
    whole = measure(name, model, tokens, None)
    calls: list[tuple[float, ...]] = []
    on_disk = measure(name, model, tokens, lambda *step: calls.append(step), tmp_path / "counted")
    assert len(calls) > 2
    for at in (1, len(calls) // 2, len(calls) - 1):
        folder = tmp_path / f"stopped-{at}"
        with pytest.raises(KeyboardInterrupt):
            measure(name, model, tokens, interrupting(at), folder)
        assert piece_files(folder) or at < len(calls) - 1
        again = measure(name, model, tokens, None, folder)
        for variable in whole.data_vars:
            expected = whole[variable].values
            for found in (on_disk, again):
                assert found[variable].values.dtype == expected.dtype
                assert found[variable].values.tobytes() == expected.tobytes(), variable


def test_the_next_round_of_probes_begins_with_what_was_kept_of_the_last(tmp_path, longer, monkeypatch):
    model, tokens = longer
    pulled = refused(monkeypatch, Prompt, "pull", 10**9, MemoryError())  # none is
    whole = measure("jacobian auto", model, tokens, None, tmp_path)
    directions = sum(pulled)
    assert directions == round(float((whole["products"] - whole["basis_products"]).sum()))
    rounds = len(piece_files(tmp_path)) // len(tokens)
    assert rounds > 2

    # Cut off within the last round: its first prompt is there, the others begin it anew, all rounds before are there.
    for file in piece_files(tmp_path):
        if file.stem in [f"jacobian-round-{rounds - 1}-{n}" for n in range(1, len(tokens))]:
            file.unlink()
    pulled.clear()
    calls: list[tuple[float, float]] = []
    again = measure("jacobian auto", model, tokens, lambda *done: calls.append(done), tmp_path)
    assert 0 < sum(pulled) < directions / 2
    assert calls[-1] == (sum(pulled), sum(pulled))  # in all: what was left to do
    xr.testing.assert_identical(again.drop_attrs(), whole.drop_attrs())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_is_kept_of_a_round_has_the_models_precision(tmp_path, longer, dtype):
    model, tokens = probes.load("tiny-llama", dtype=dtype), longer[1][:2]
    whole = measure("jacobian auto", model, tokens, None)
    on_disk = measure("jacobian auto", model, tokens, None, tmp_path)
    xr.testing.assert_identical(on_disk.drop_attrs(), whole.drop_attrs())


def refused(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, most: int, error: Exception, *, free: int = 0
) -> list[int]:
    """How many cotangents a method is given in each call; more than `most` of them do not fit after `free` calls."""
    real, seen = getattr(owner, method), []

    def small(self: Any, cotangent: Any, *args: Any, **options: Any) -> Any:
        seen.append(cotangent.shape[0])
        if len(seen) > free and cotangent.shape[0] > most:
            raise error
        return real(self, cotangent, *args, **options)

    monkeypatch.setattr(owner, method, small)
    return seen


@pytest.mark.slow
def test_memory_that_runs_out_between_rounds_begins_the_prompts_round_anew(longer, monkeypatch):
    model, tokens = longer
    expected = measure("jacobian auto", model, tokens[:2], None)
    # In the first round each prompt's basis and probes are pulled.
    seen = refused(monkeypatch, Prompt, "pull", 3, MemoryError(), free=4)
    found = measure("jacobian auto", model, tokens[:2], None)
    assert seen[4] > 3 >= seen[-1]
    close_to(found, expected)


def test_memory_that_runs_out_halves_the_chunk_and_the_numbers_stay(prompted, monkeypatch):
    model, tokens = prompted[0], prompted[1][:1]
    expected = measure("jacobian", model, tokens, None)
    with monkeypatch.context() as patch:  # blocks made again for every chunk
        patch.setattr("probes.models.memory.KEPT_SHARE", 0.0)
        xr.testing.assert_equal(measure("jacobian", model, tokens, None), expected)
    allocator = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
    with monkeypatch.context() as patch:
        seen = refused(patch, LinearizedBlock, "vjp", 5, allocator)
        found = measure("jacobian", model, tokens, None)
    assert min(seen) <= 5 < max(seen)
    close_to(found, expected)
    refused(monkeypatch, LinearizedBlock, "vjp", 0, MemoryError())
    with pytest.raises(InputError, match="a prompt of 24 positions of 'tiny-llama' does not fit into memory"):
        measure("jacobian", model, tokens, None)


def close_to(found: xr.Dataset, expected: xr.Dataset) -> None:
    for name in ("sensitivity", "stderr"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    assert found["products"].values.tolist() == expected["products"].values.tolist()
