"""Values of quantized tensors, by the same operations as the `gguf` package's and so with the same bits, on any device."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ...run.memory import piece_numbers
from . import CPU

PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


def dequantized(data: Tensor, kind: Kind, device: torch.device = CPU) -> Tensor:
    """Float32 values of a tensor of a kind that is `known`, in memory of their own; only its codes go to the device."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks, values, place = data.view(-1).view(torch.uint8).view(-1, size), _values(kind), device
    if values is None:  # gguf's own, of what no one else knows
        numpy_values: Any = gguf.dequantize
        values, place = lambda some: torch.from_numpy(numpy_values(some.flatten()[None].numpy(), kind)), CPU
    most = max(1, piece_numbers(place) // numbers)
    made = torch.empty(len(blocks), numbers, device=place)
    for some, into in zip(blocks.to(place).split(most), made.split(most), strict=True):
        into.copy_(values(some).view_as(into))
    return made.to(device)


@cache
def known(kind: Kind) -> bool:
    """Whether it can be dequantized."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _values(kind: Kind) -> Callable[[Tensor], Tensor] | None:
    """By torch's operations."""
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    if kind in PLAIN:
        return lambda blocks: blocks.view(PLAIN[kind]).float()
    if kind in (Kind.Q5_0, Kind.Q5_1):
        return partial(_five_bits, kind == Kind.Q5_1)
    return (lambda blocks: dequantize(blocks.flatten(), kind)) if kind in GGML_BLOCK else None


def _five_bits(shifted: bool, blocks: Tensor) -> Tensor:
    """Q5_0 (scale, the fifth bits, four bits of two numbers a byte), or Q5_1, where a least value follows the scale."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    halves, high, low = blocks.split((2 + 2 * shifted, 4, 16), 1)
    halves, high = halves.view(torch.float16).float(), (high[:, :, None] >> bits) & 1  # [block, byte, bit]
    codes = torch.cat([low & 15, low >> 4], 1) | (high.flatten(1) << 4)
    return halves[:, :1] * codes + halves[:, 1:] if shifted else halves * (codes.to(torch.int8) - 16)
