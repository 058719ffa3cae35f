"""By what results tell one set of weights from another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_hash(weights: Iterable[Tensor]) -> str:
    """SHA-256 over the tensors' own hashes (dtype, shape, bytes of the values), sorted.

    Names do not enter: the same weights have the same hash behind TransformerLens, which renames modules.
    """
    digests = []
    for tensor in weights:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()
