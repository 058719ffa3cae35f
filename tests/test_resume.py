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
from probes.run.store import Store


@pytest.fixture(scope="module")
def prompted() -> tuple[Any, torch.Tensor]:
    model = probes.load("tiny-llama")
    return model, probes.prompts(model, n=4, length=24)


PROBES: dict[str, dict[str, Any]] = {
    "jacobian": {"method": "sketch", "products": 40},
    "sinks": {"reacts": "mean", "effect": 2, "evict": 0, "keep": 8},
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
def test_a_probe_stopped_anywhere_ends_with_the_same_bytes(tmp_path, prompted, name):
    model, tokens = prompted
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


def test_memory_that_runs_out_halves_the_chunk_and_the_numbers_stay(prompted, monkeypatch):
    model, tokens = prompted[0], prompted[1][:1]
    expected = measure("jacobian", model, tokens, None)
    with monkeypatch.context() as patch:  # blocks made again for every chunk
        patch.setattr("probes.models.pullback.KEPT_SHARE", -1.0)
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
