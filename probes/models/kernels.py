"""Kernels for CUDA, in Triton, which CUDA builds of PyTorch bring along; where it is not, importing this fails.

The twin of each, and what is used elsewhere, is the code that calls it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .view import Attention

TILE_BYTES = 1 << 15  # of a tile of queries or keys: three of them fit into the shared memory of a small card


def column_sums(attention: Attention, log_z: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Of every column of the patterns the sum of its weights, and how many are above a threshold, in one pass.

    Each program takes a few keys, makes the weights `exp(s_ij - log Z_i)` anew for all queries that see them, tile by tile,
    and writes its columns alone: of the pattern nothing reaches memory.

    Args:
        attention: causal, with or without a window; whatever else changes logits is not known here.
        log_z: `[B, H, T]`.

    Returns:
        Both `[B, H, T]`, summed and counted in float32.
    """
    length, channels = attention.query.shape[-2:]
    query, key = attention.query.contiguous(), attention.key.contiguous()
    width = max(16, triton.next_power_of_2(channels))
    tile = max(16, min(64, TILE_BYTES // (width * query.itemsize)))
    window = length if attention.window is None else min(attention.window, length)
    total, over = (torch.empty(log_z.shape, dtype=torch.float32, device=query.device) for _ in range(2))
    kernel: Any = columns
    tensors = query, key, log_z.float().contiguous(), total, over
    with torch.cuda.device_of(query):
        kernel[log_z.numel() // length, triton.cdiv(length, tile)](
            *(*tensors, length, window, channels, attention.scale, threshold), WIDTH=width, TILE=tile, num_stages=2
        )
    return total, over


@triton.jit
def columns(
    query, key, log_z, total, over, length, window, channels, scale, threshold, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    features, tile = tl.arange(0, WIDTH), tl.arange(0, TILE)
    j, inside, at = first + tile, features < channels, row * length * channels
    of_keys = at + j[None, :] * channels + features[:, None]
    keys = tl.load(key + of_keys, mask=(j < length)[None, :] & inside[:, None], other=0.0)
    sums, counts = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(first, tl.minimum(length, first + TILE - 1 + window), TILE):
        i = start + tile
        of_queries = at + i[:, None] * channels + features[None, :]
        queries = tl.load(query + of_queries, mask=(i < length)[:, None] & inside[None, :], other=0.0)
        z = tl.load(log_z + row * length + i, mask=i < length, other=float("inf"))
        logits = tl.dot(queries, keys, input_precision="ieee") * scale - z[:, None]
        seen = (j[None, :] <= i[:, None]) & (i[:, None] - j[None, :] < window)
        weights = tl.where(seen, tl.exp(logits), 0.0)
        sums += tl.sum(weights, 0)
        counts += tl.sum(tl.where(weights > threshold, 1.0, 0.0), 0)
    tl.store(total + row * length + j, sums, mask=j < length)
    tl.store(over + row * length + j, counts, mask=j < length)


def scale(x: Tensor, *by: Tensor) -> list[Tensor]:
    """x [..., K, d] times one or two others [..., d] in one pass; the last product is written over `x`."""
    count, width = x.shape[-2:]
    made = torch.empty_like(x) if len(by) == 2 else x
    rows, columns_ = min(8, triton.next_power_of_2(count)), 512 if width > 128 else 128  # few kinds: each is compiled
    grid = x.numel() // (count * width), triton.cdiv(count, rows), triton.cdiv(width, columns_)
    kernel: Any = scale_rows
    with torch.cuda.device_of(x):
        kernel[grid](x, by[0], by[-1], made, count, width, TWO=len(by) == 2, ROWS=rows, WIDTH=columns_)
    return [made, x] if len(by) == 2 else [x]


@triton.jit
def scale_rows(x, one, other, made, count, width, TWO: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    k, at = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = (k < count)[:, None] & (at < width)[None, :]
    places = (place * count + k)[:, None] * width + at[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    last = tl.load(other + place * width + at, mask=at < width, other=0.0).to(tl.float32)
    if TWO:
        first = tl.load(one + place * width + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(made + places, values * first[None, :], mask=inside)
    tl.store(x + places, values * last[None, :], mask=inside)


def project(total: Tensor, weighted: Tensor, unit: Tensor, inverse: Tensor, out: Tensor) -> Tensor:
    """out = total + (g - unit <g, unit>/d) inverse for g [B, T, K, d], summed in float32, in one pass."""
    count, width = weighted.shape[-2:]
    size = triton.next_power_of_2(width)
    kernel: Any = project_rows
    grid = (weighted.numel() // width,)
    with torch.cuda.device_of(out):
        kernel[grid](total, weighted, unit, inverse, out, count, width, WIDTH=size, num_warps=4 if size <= 2048 else 8)
    return out


@triton.jit
def project_rows(total, weighted, unit, inverse, out, count, width, WIDTH: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    place, inside = row // count, at < width
    g = tl.load(weighted + row * width + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(unit + place * width + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(total + row * width + at, mask=inside, other=0.0).to(tl.float32)
    across = (g - u * (tl.sum(g * u, 0) / width)) * tl.load(inverse + place).to(tl.float32)
    tl.store(out + row * width + at, before + across, mask=inside)


def group(given: Tensor, mixed: Tensor, out: Tensor) -> Tensor:
    """out [B, G, R, H/G, K, size] = given [B, R, K, H c], and its products with mixed [B, G, R, H/G, c] in column c."""
    batch, kv, rows, groups, count, size = out.shape
    kernel: Any = group_rows
    grid = batch * rows, kv * groups, triton.cdiv(count, 32)
    of = rows, count, kv * groups, groups, mixed.shape[-1], size
    with torch.cuda.device_of(out):
        kernel[grid](given, mixed, out, *of, ROWS=32, WIDTH=triton.next_power_of_2(size))
    return out


@triton.jit
def _grouped(rows, heads, groups):
    """Places of this program's position and head in [B, R] and in [B, G, R, H/G]."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv = place // rows * (heads // groups) + head // groups
    return place, head, (kv * rows + place % rows) * groups + head % groups


@triton.jit
def group_rows(given, mixed, out, rows, count, heads, groups, channels, size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    place, head, here = _grouped(rows, heads, groups)
    k, at = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there, inside = (k < count)[:, None], (at < channels)[None, :]
    places = ((place * count + k) * heads + head)[:, None] * channels + at[None, :]
    values = tl.load(given + places, mask=there & inside, other=0.0).to(tl.float32)
    by = tl.load(mixed + here * channels + at, mask=at < channels, other=0.0).to(tl.float32)
    products = tl.sum(values * by[None, :], 1)
    values = tl.where((at == channels)[None, :], products[:, None], values)
    tl.store(out + (here * count + k)[:, None] * size + at[None, :], values, mask=there & (at < size)[None, :])


def turn_back(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """out [B, R, K, H c] = x [B, G, R, H/G, K, c], rotated back by angles [R, rotated]."""
    _, kv, rows, groups, count, channels = x.shape
    kernel: Any = turn_rows
    grid = len(out) * rows, kv * groups, triton.cdiv(count, 32)
    of = rows, count, kv * groups, groups, channels, cos.shape[-1], out.stride(2)
    with torch.cuda.device_of(out):
        kernel[grid](x, cos, sin, out, *of, ROWS=32, WIDTH=triton.next_power_of_2(channels))


@triton.jit
def turn_rows(
    x, cos, sin, out, rows, count, heads, groups, channels, turned, step, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    place, head, here = _grouped(rows, heads, groups)
    k, at = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    half, inside = turned // 2, (k < count)[:, None] & (at < channels)[None, :]
    partner = tl.where(at < half, at + half, at - half)  # of the pair that a rotation mixes
    from_row = (here * count + k)[:, None] * channels
    angle = place % rows * turned
    own = tl.load(x + from_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + from_row + partner[None, :], mask=inside & (at < turned)[None, :], other=0.0).to(tl.float32)
    near = tl.load(cos + angle + at, mask=at < turned, other=1.0).to(tl.float32)
    far = tl.load(sin + angle + partner, mask=at < turned, other=0.0).to(tl.float32)
    values = own * near[None, :] + other * tl.where(at < half, far, -far)[None, :]
    tl.store(out + (place * count + k)[:, None] * step + (head * channels + at)[None, :], values, mask=inside)
