"""By what results tell one set of weights from another, in whatever way the package that made its layers keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Stored = Iterable[tuple[str, Tensor]]  # numbers by the name of what they are


def values(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def weights_hash(weights: Stored) -> str:
    """SHA-256 over names and the tensors' own hashes (dtype, shape, bytes of the values), in the order of the names.

    Which matrix stands where counts, therefore: two models of the same matrices in other blocks are two.
    """
    named = []
    for name, tensor in weights:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(values(tensor))
        named.append(name.encode() + b"\n" + digest.digest())
    return hashlib.sha256(b"".join(sorted(named))).hexdigest()


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
