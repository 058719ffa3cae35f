"""By what results tell one set of weights from another, in whatever way the package that made its layers keeps them.

Weights are summed where they lie, with keys, and only sums come to the host: a model on a GPU is named at the speed of its
memory. Integers wrap, so that the order of a sum does not matter, and every device gives the same number.

A row is 8 KiB, read as words x_i of 32 bits; a lane is sum_i k_i x_i modulo 2^64 with fixed odd keys k_i of 64 bits. A word
that changes, by 0 < |d| < 2^32, is always seen, since k d is then no multiple of 2^64. Changes of several words cancel with
a chance of 2^-63 where their lowest bits take part, and of 2^-32 where only the highest do, such as signs: 2^31 (k_i +- k_j)
is 0 only if k_i and -+k_j agree in 33 bits, and no two keys of a lane do. (Words of 64 bits would be blind there: any two
signs could change, since 2^63 (k_i +- k_j) is 0 for all odd keys.) The second lane squares these chances. The keys are no
secret: this tells weights apart, and is no defence against someone who makes two that are alike.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from ..run.memory import piece_numbers

Stored = Iterable[tuple[str, Tensor]]  # numbers by the name of what they are

LANES, WORDS, WORD = 2, 2048, 4  # of a row; bytes of a word


def weights_hash(weights: Stored) -> str:
    """SHA-256 over names and the tensors' own hashes (dtype, shape, keyed sums of the bytes), in the order of the names.

    Which matrix stands where counts, therefore: two models of the same matrices in other blocks are two. Tied weights are
    read once.
    """
    places: dict[torch.device, _Sums] = {}
    known = WeakTensorKeyDictionary()  # no mere addresses: those of weights that were let go come again
    named = []
    for name, tensor in weights:
        if tensor not in known:
            if tensor.device not in places:
                places[tensor.device] = _Sums(tensor.device)
            known[tensor] = places[tensor.device].add(tensor)
        named.append((name.encode(), f"{tensor.dtype} {tuple(tensor.shape)}\n".encode(), tensor.device, known[tensor]))
    read = {device: sums.read() for device, sums in places.items()}
    digests = []
    for name, kind, device, rows in named:
        digest = hashlib.sha256(kind)
        for some, part in zip(read[device], rows, strict=True):
            digest.update(some[part].tobytes())
        digests.append(name + b"\n" + digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


@cache
def keys() -> Tensor:
    """Odd numbers of 64 bits `[lane, word]`, the same everywhere."""
    drawn = bytearray(hashlib.shake_256(b"weights").digest(LANES * WORDS * 8))
    return torch.frombuffer(drawn, dtype=torch.int64).view(LANES, WORDS) | 1


class _Sums:
    """Keyed sums of the weights on one device, where they stay until all are there."""

    def __init__(self, device: torch.device) -> None:
        self._keys, self._most = keys().to(device), max(1, piece_numbers(device) // (LANES * WORDS))
        self._rows: list[Tensor] = []
        self._ends: list[Tensor] = []  # of each tensor what is left behind its whole rows, with zeros; summed together
        self._count = 0

    def add(self, tensor: Tensor) -> tuple[slice, slice]:
        """Which rows are the tensor's, and which of the ends."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.storage_offset() % WORD:
            flat = flat.clone()  # words begin where a storage's do
        size, rows, ends = WORD * WORDS, self._count, len(self._ends)
        whole = flat.numel() // size * size
        for some in flat[:whole].view(torch.int32).view(-1, WORDS).split(self._most) if whole else ():
            self._rows.append(self._sums(some))
            self._count += len(some)
        if whole < flat.numel():
            self._ends.append(pad(flat[whole:], (0, size - flat.numel() + whole)).view(torch.int32))
        return slice(rows, self._count), slice(ends, len(self._ends))

    def _sums(self, words: Tensor) -> Tensor:
        return (words[:, None] * self._keys).sum(-1)  # [row, lane]

    def read(self) -> tuple[Any, Any]:
        """The sums of rows and of ends, read by the host once."""
        parts = range(0, len(self._ends), self._most)
        ends = [self._sums(torch.stack(self._ends[start : start + self._most])) for start in parts]
        read = torch.cat([*self._rows, *ends, self._keys[:0, :LANES]]).cpu().numpy()
        return read[: self._count], read[self._count :]


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a model would save, wherever its values lie, one read after another; tied ones by each name.

    Of quantized weights these are codes, scales and whatever else their package keeps beside them, on the weight or on its
    module: what it saves is its own word for what the weights are.
    """
    from . import split  # not needed by toys, whose weights are hashed too

    offloaded = {weight.name: weight for weight in split.weights(model) if weight.source is not None}
    for name, value in model.state_dict(keep_vars=True).items():
        yield from _plain(name, offloaded[name].value() if name in offloaded else value)


def _plain(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that a saved value is made of."""
    if isinstance(value, (tuple, list)):
        for n, entry in enumerate(value):
            yield from _plain(f"{name}.{n}", entry)
    elif isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        keys = value.__tensor_flatten__()[0]
        for key in keys:
            yield from _plain(f"{name}.{key}" if len(keys) > 1 else name, getattr(value, key))
    elif isinstance(value, Tensor) and value.is_quantized:  # of torch's own quantized layers
        yield name, value.dequantize()
    elif isinstance(value, Tensor):
        yield name, value
