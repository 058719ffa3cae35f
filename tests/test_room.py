"""Probes that go on where memory runs out: in smaller blocks, to the same numbers, and down to a limit."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from commands import program
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import probes
from probes.models.fused import query_blocks
from probes.run.memory import Retry, in_parts, share_of, shares
from probes.theory.kernel import second_moment

LENGTH = 96
Probe = Callable[[Any, Tensor], xr.Dataset]

PROBES: dict[str, Probe] = {
    "sinks, all keys": partial(probes.sinks, keys="all"),
    "sinks, many keys": partial(probes.sinks, keys=tuple(range(1, LENGTH))),
    "sinks, reactions": partial(probes.sinks, reacts="mean"),
    "theory, uniform": partial(second_moment, from_layer="all"),
    "theory, scores": partial(second_moment, attention="measured", score_path=True, from_layer="all"),
}


class Memory(TorchDispatchMode):
    """So many numbers fit into memory, and no more, one tensor at a time."""

    def __init__(self, bytes_: float = float("inf")) -> None:
        super().__init__()
        self.bytes, self.largest, self.refused = bytes_, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor) and tensor._base is None:
                if tensor.numel() * tensor.itemsize > self.bytes:
                    self.refused += 1
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
                self.largest = max(self.largest, tensor.numel() * tensor.itemsize)
        return made


def refusing(monkeypatch: pytest.MonkeyPatch) -> list[Retry]:
    """Every `Retry` that is made from now on."""
    made: list[Retry] = []
    begin = Retry.__init__

    def noted(retry: Retry, *args: Any) -> None:
        begin(retry, *args)
        made.append(retry)

    monkeypatch.setattr(Retry, "__init__", noted)
    return made


def held_against(found: xr.Dataset, whole: xr.Dataset) -> None:
    """The same but for rounding."""
    for name, expected in whole.data_vars.items():
        if expected.dtype.kind in "iub":
            np.testing.assert_array_equal(found[name].values, expected.values, err_msg=str(name))
        else:
            most = float(np.nanmax(np.abs(expected.values))) if np.isfinite(expected.values).any() else 0.0
            np.testing.assert_allclose(
                found[name].values, expected.values, rtol=1e-4, atol=1e-5 * most, err_msg=str(name)
            )


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROBES)
def test_what_does_not_fit_is_measured_in_smaller_blocks(name, family, monkeypatch):
    monkeypatch.setattr(query_blocks, "__kwdefaults__", {"numbers": 1 << 14})  # several blocks; those of models, too
    model, probe = probes.load(families.model(family)), PROBES[name]
    tokens = torch.randint(3, model.spec.vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with Memory() as memory:
        whole = probe(model, tokens)
    rooms = refusing(monkeypatch)
    with Memory(memory.largest - 1) as less:
        found = probe(model, tokens)
    assert less.refused
    assert [room.parts for room in rooms] == [1 << less.refused]  # it stayed there for the prompts that came after
    held_against(found, whole)


def test_other_errors_pass_and_what_an_attempt_had_made_is_gone_before_the_next():
    calls: list[int] = []
    held: list[weakref.ref[Tensor]] = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("shapes do not match")

    def work() -> bool:
        if held:
            return held[0]() is None
        made = torch.zeros(8)
        held.append(weakref.ref(made))
        raise MemoryError

    with pytest.raises(RuntimeError, match="shapes do not match"):
        Retry("a prompt of 8 positions of 'tiny'")(fail)
    assert len(calls) == 1
    assert Retry("a prompt of 8 positions of 'tiny'")(work)


def test_shares_are_everything_once():
    for parts in (1, 2, 3, 64):
        with in_parts(parts):
            for count in (1, 2, 7, 64, 100):
                found = [n for some in shares(count) for n in range(count)[some]]
                assert found == list(range(count))
                assert all(some.stop - some.start <= share_of(count) for some in shares(count))
            assert share_of(100) == -(-100 // parts)


def test_available_memory_is_within_the_limit_of_the_system():
    script = """
import resource, torch
from probes.run.memory import available
before, room = available(torch.device("cpu")), 64 << 20
size = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.RLIM_INFINITY))
print(0 < available(torch.device("cpu")) <= room < before)
"""
    assert program("-c", script).strip() == "True"
