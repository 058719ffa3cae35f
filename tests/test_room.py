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
from commands import no_file_larger_than, program
from sim import Memory
from torch import Tensor

import probes
from probes.errors import InputError
from probes.models.fused import query_blocks
from probes.models.linear import LinearizedBlock
from probes.run.memory import Retry, aside, in_parts, share_of, shares
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


# At this length what qwen3's theory holds whole, T x T and T x c^2 numbers, is more than its blocks of patterns.
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "qwen3") for name in PROBES if "theory" not in name),
        *(pytest.param(name, "gemma2", marks=pytest.mark.slow) for name in PROBES),
    ],
)
def test_what_does_not_fit_is_measured_in_smaller_blocks(name, family, monkeypatch):
    monkeypatch.setattr(query_blocks, "__kwdefaults__", {"numbers": 1 << 15})  # several blocks; those of models, too
    model, probe = probes.load(families.model(family)), PROBES[name]
    tokens = torch.randint(3, model.spec.vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    assert model.identity.weights  # hashed beforehand, in blocks of another size
    with Memory() as memory:
        whole = probe(model, tokens)
    rooms, begin = list[Retry](), Retry.__init__
    monkeypatch.setattr(Retry, "__init__", lambda retry, *args: (begin(retry, *args), rooms.append(retry))[0])
    with Memory(memory.largest - 1) as less:
        found = probe(model, tokens)
    assert less.refused
    assert [room.parts for room in rooms] == [1 << less.refused]  # it stayed there for the prompts that came after
    for name, expected in whole.data_vars.items():  # the same but for rounding
        most = np.nanmax(np.abs(expected.values.astype(float)), where=np.isfinite(expected.values), initial=0)
        np.testing.assert_allclose(found[name].values, expected.values, rtol=1e-4, atol=1e-5 * most, err_msg=str(name))


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Lets no more cotangents than this fit into one call, and returns how many each call was given."""
    real = LinearizedBlock.vjp

    def limit(count: int) -> list[int]:
        seen: list[int] = []

        def small(self: Any, cotangent: Tensor, *args: Any, **options: Any) -> Any:
            seen.append(len(cotangent))
            if len(cotangent) > count:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
            return real(self, cotangent, *args, **options)

        monkeypatch.setattr(LinearizedBlock, "vjp", small)
        return seen

    return limit


def test_a_sketch_that_does_not_fit_takes_fewer_directions_at_a_time(most, monkeypatch):
    model = probes.load("tiny-llama")
    sketch = partial(probes.jacobian, model, probes.prompts(model, n=1, length=24), method="sketch", products=40)
    expected = sketch()
    with monkeypatch.context() as patch:  # blocks made again for every chunk
        patch.setattr("probes.models.pullback.KEPT_SHARE", -1.0)
        xr.testing.assert_equal(sketch(), expected)
    seen = most(5)
    found = sketch()
    assert min(seen) <= 5 < max(seen)
    for name in ("sensitivity", "stderr"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    most(0)
    with pytest.raises(InputError, match="a prompt of 24 positions of 'tiny-llama' does not fit into memory"):
        sketch()


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


def test_what_is_put_aside_comes_back_as_it_was_and_a_full_disk_is_one_line(tmp_path):
    drawn = torch.randn(4, 300, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with no_file_larger_than(3000):
        for tensor in (drawn[:2, 3:9], drawn.T[:100], drawn[0].bfloat16(), torch.ones(1).expand(3, 2)):
            found = aside(tensor, tmp_path)
            assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, False)
            assert found.is_contiguous()
            assert torch.equal(found, tensor)
        with pytest.raises(InputError, match=rf"no room for temporary files in '{tmp_path}' \(.*\); make room"):
            aside(drawn, tmp_path)
    assert list(tmp_path.iterdir()) == []  # files have no name
