"""Attention as the adapters run it, with its log-sum-exp: one place for kernels, soft-caps, windows and ALiBi.

Fused kernels keep `log Z_i`, the log-sum-exp of a query's logits, for their backward pass and return it. With it any entry
of the pattern is `A_ij = exp(s_ij - log Z_i)`, so that a few columns of the pattern cost nothing beside the pass itself.
`scaled_dot_product_attention` throws it away; the operators underneath are called here.

Nothing is of the size of a whole pattern: windows go band by band, what no kernel knows goes block of queries by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional

from .view import Attention, sees

BAND = 512  # least queries per band of a sliding window; below, calls cost more than the keys outside the window
BLOCK_NUMBERS = 1 << 21  # logits per block of queries: 8 MiB in float32, near the cache


def attend(attention: Attention, *, normalizer: bool = False) -> Attention:
    """The same with its output, and with its log-sum-exp if `normalizer` is asked for; differentiable."""
    length = attention.query.shape[-2]
    if attention.softcap is not None or attention.slopes is not None:
        output, log_z = _written_out(attention)
    elif attention.window is not None and length > attention.window:
        output, log_z = _banded(attention, normalizer)
    else:
        output, log_z = _kernel(attention.query, attention.key, attention.value, None, attention.scale, normalizer)
    if normalizer and log_z is None:
        output, log_z = _written_out(attention)
    return replace(attention, output=output, normalizer=log_z if normalizer else None)


def query_blocks(attention: Attention, *, numbers: int = BLOCK_NUMBERS) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of queries whose logits number at most `numbers`, for going over a pattern piece by piece.

    A row alone may be more.
    """
    batch, heads, length, _ = attention.query.shape
    budget, start = numbers // (batch * heads), 0
    while start < length:
        before = start - attention.first_key(start)
        # The most rows with rows (before + rows) <= budget: a block's last row sees the keys of its own rows, too.
        rows = max(1, min(length - start, (isqrt(before**2 + 4 * budget) - before) // 2))
        yield start, start + rows
        start += rows


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, normalizer: bool
) -> tuple[Tensor, Tensor | None]:
    """(output, log-sum-exp or None where no kernel gives it here); causal unless a boolean mask is given."""
    causal = mask is None and query.shape[-2] > 1
    # The operators underneath do not look at the last stride, as what chooses among them does; an edit may give any.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if normalizer and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        added = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        if query.device.type == "cpu" and query.dtype != torch.float16:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=added, scale=scale
            )
        if query.device.type == "cuda" and query.dtype != torch.float64 and query.shape[-1] % 8 == 0:
            return _cuda_kernel(query, key, value, added, causal, scale)
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return output, None


def _cuda_kernel(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    length = query.shape[-2]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and added is None and torch.backends.cuda.flash_sdp_enabled() and query.shape[-1] <= 256:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return found[0], found[1][..., :length]
    if added is not None:  # this kernel wants the mask for every head, its rows beginning at multiples of 16 bytes
        columns = added.shape[-1]
        padded = functional.pad(added, (0, -columns % 16))
        added = padded[..., :columns].expand(*query.shape[:2], -1, -1)
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, added, True, 0.0, causal, scale=scale
    )
    return found[0], found[1][..., :length]


def _banded(attention: Attention, normalizer: bool) -> tuple[Tensor, Tensor | None]:
    """A sliding window, bands of queries against the keys they can see: T (band + window) logits instead of T T."""
    assert attention.window is not None
    length = attention.query.shape[-2]
    band = max(attention.window, BAND)
    outputs, normalizers = [], []
    for start in range(0, length, band):
        stop = min(start + band, length)
        first = attention.first_key(start)
        queries = torch.arange(start, stop, device=attention.query.device)[:, None]
        keys = torch.arange(first, stop, device=attention.query.device)[None, :]
        seen = sees(queries, keys, attention.window)
        key, value = attention.key[..., first:stop, :], attention.value[..., first:stop, :]
        query = attention.query[..., start:stop, :]
        output, log_z = _kernel(query, key, value, seen, attention.scale, normalizer)
        outputs.append(output)
        normalizers.append(log_z)
    found = [log_z for log_z in normalizers if log_z is not None]
    return torch.cat(outputs, -2), torch.cat(found, -1) if len(found) == len(normalizers) else None


def _written_out(attention: Attention) -> tuple[Tensor, Tensor]:
    """What no fused kernel knows (soft-caps, slopes), block of queries by block."""
    outputs, normalizers = [], []
    for start, stop in query_blocks(attention):
        logits = attention.logits(start, stop)
        log_z = logits.logsumexp(-1)
        value = attention.value[..., attention.first_key(start) : stop, :]
        outputs.append((logits - log_z[..., None]).exp().to(value.dtype) @ value)
        normalizers.append(log_z)
    return torch.cat(outputs, -2), torch.cat(normalizers, -1)
