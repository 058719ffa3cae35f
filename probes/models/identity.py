"""By what results tell one set of weights from another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

Stored = Iterable[tuple[str, Tensor]]  # numbers by the name of what they are


def values(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def weights_hash(weights: Stored) -> str:
    """SHA-256 over names and the tensors' own hashes (dtype, shape, bytes of the values), in the order of the names.

    Which matrix stands where counts, therefore: two models of the same matrices in other blocks are two.
    """
    digests: dict[int, bytes] = {}  # of parameters, which live as long as their model: a tied one is read once
    named = []
    for name, tensor in weights:
        digest = digests.get(id(tensor))
        if digest is None:
            hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            hashed.update(values(tensor))
            digest = hashed.digest()
            if isinstance(tensor, nn.Parameter):
                digests[id(tensor)] = digest
        named.append(name.encode() + b"\n" + digest)
    return hashlib.sha256(b"".join(sorted(named))).hexdigest()
