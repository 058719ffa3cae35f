"""The weights' hash against its formula in whole numbers, what it has to tell apart, and how it is read on a device."""

import hashlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sim import HERE, ONE, Simulated
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from probes.errors import InputError
from probes.models import identity
from probes.models.identity import WORDS, keys, weights_hash
from probes.models.named import check_finite

ROW = 4 * WORDS  # bytes
NUMBERS = torch.Generator().manual_seed(0)


def hashed(*tensors: Tensor) -> str:
    return weights_hash((f"w{n}", tensor) for n, tensor in enumerate(tensors))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=NUMBERS)


def formula(tensor: Tensor) -> bytes:
    """By Python's integers, a row after the other."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    for start in range(0, len(content), ROW):
        row = content[start : start + ROW].ljust(ROW, b"\0")
        words = [int.from_bytes(row[n : n + 4], "little", signed=True) for n in range(0, ROW, 4)]
        for lane in keys().tolist():
            total = sum(key * word for key, word in zip(lane, words, strict=True))
            digest.update((total % 2**64).to_bytes(8, "little"))
    return digest.digest()


KINDS: dict[str, Tensor] = {
    "whole rows and an end": drawn(3, 2 * WORDS // 3 + 5),
    "odd bfloat16": drawn(2 * WORDS + 1).bfloat16(),
    "float16": drawn(7, 3).half(),
    "float64": drawn(WORDS).double(),
    "codes": torch.randint(0, 256, (ROW + 3,), generator=NUMBERS, dtype=torch.uint8),
    "truth": drawn(5) > 0,
    "float8": drawn(9).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": drawn(40, 90).T,
    "within a word": drawn(2 * WORDS + 4).bfloat16()[1:],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hash_is_its_formula_s(kind, monkeypatch):
    """Every dtype and layout, in pieces, on another device, and once more as a contiguous copy."""
    tensor = KINDS[kind]
    expected = hashlib.sha256(b"w0\n" + formula(tensor)).hexdigest()
    assert hashed(tensor) == hashed(tensor.clone(memory_format=torch.contiguous_format)) == expected
    with Simulated():
        assert hashed(tensor.to(ONE)) == expected
    monkeypatch.setattr(identity, "piece_numbers", lambda device: 1)  # a row at a time
    assert hashed(tensor) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_seen(kind):
    tensor = KINDS[kind].contiguous()
    content, seen = tensor.view(-1).view(torch.uint8), {hashed(tensor)}
    places = sorted({0, 1, 5, ROW - 1, ROW, len(content) - 1} & set(range(len(content))))
    for place, bit in itertools.product(places, range(8)):
        content[place] ^= 1 << bit
        seen.add(hashed(tensor))
        content[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(places)


def test_any_two_signs_are_seen_and_what_stands_where():
    low = torch.stack([keys(), -keys()], 1).flatten(1) % (1 << 33)
    assert all(len(lane.unique()) == 2 * WORDS for lane in low)  # for all pairs of a row's words, in each lane
    assert (keys() % 2 == 1).all()
    a, b = drawn(64, 96), drawn(64, 96)
    turned = a.clone()
    turned[0, 0], turned[0, 1] = -a[0, 0], -a[0, 1]
    others = [turned, a.roll(1, 0), a.roll(1, 1), a.T, a.view(96, 64), a.view(torch.int32), torch.cat([a, 0 * a[:1]])]
    assert len({hashed(one, b) for one in (a, b, *others)} | {hashed(b, a), hashed(a)}) == len(others) + 4


class Reads(TorchDispatchMode):
    """How often the host waits for a device, and operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        there = isinstance(args[0], Tensor) and args[0].device == ONE
        self.count += name == "_local_scalar_dense" or (name == "_to_copy" and there and made.device == HERE)
        self.operations += name in ("mul", "sum", "constant_pad_nd", "aminmax", "stack", "cat")
        return made


def test_a_device_is_read_once_and_tied_weights_too():
    with Simulated():
        some = [drawn(50, 70).to(ONE) for _ in range(20)]
        for work in (weights_hash, lambda weights: check_finite(weights, "ape")):
            with Reads() as few:
                work([(f"w{n}", one) for n, one in enumerate(some[:4])])
            with Reads() as many:
                work([(f"w{n}", one) for n, one in enumerate(some)])
            assert few.count == many.count <= 1
            assert many.operations - few.operations <= 3 * 16
        with Reads() as tied:
            weights_hash([(f"w{n}", some[0]) for n in range(20)])
        assert tied.operations < 10
        some[7][3, 3] = torch.inf
        with pytest.raises(InputError, match=r"not finite \(w7\)"):
            check_finite([(f"w{n}", one) for n, one in enumerate(some)], "ape")


def test_offloaded_weights_are_there_one_at_a_time():
    before: list[weakref.ref[Tensor]] = []

    def fetched() -> Iterator[tuple[str, Tensor]]:
        for n in range(6):
            assert all(one() is None for one in before[:-1])  # the last one is the caller's until the next is asked for
            tensor = torch.full((WORDS + 1,), float(n))
            before.append(weakref.ref(tensor))
            yield f"w{n}", tensor

    assert weights_hash(fetched()) == hashed(*(torch.full((WORDS + 1,), float(n)) for n in range(6)))
