"""A quantized GGUF file with noise of half a quantization step, as F32: what of a finding could quantization have made?

    python tools/noise.py FILE.gguf OUT.gguf --seed 0

Every weight of a quantized tensor gets noise, uniform within half a step of its block on either side: about the error that
quantization itself made. Tensors that are not quantized, and all metadata, stay as they are. Types: Q4_0, Q4_1, Q8_0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

WEIGHTS = 32  # of a block, in all three types
BYTES = {GGMLQuantizationType.Q4_0: 18, GGMLQuantizationType.Q4_1: 20, GGMLQuantizationType.Q8_0: 34}  # of a block
PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def noisy(data: np.ndarray, kind: GGMLQuantizationType, random: np.random.Generator) -> np.ndarray:
    """A tensor's weights, float32, with noise where it is quantized; each block begins with its step, a float16."""
    weights = np.asarray(dequantize(data, kind), dtype=np.float32)
    if kind in PLAIN:
        return weights
    if kind not in BYTES:
        raise SystemExit(f"tensors of type {kind.name} are not supported; give a file of Q4_0, Q4_1 or Q8_0")
    blocks = np.ascontiguousarray(data).reshape(-1, BYTES[kind])
    steps = np.abs(blocks[:, :2].copy().view(np.float16).astype(np.float32))  # [block, 1]
    noise = random.uniform(-0.5, 0.5, (len(blocks), WEIGHTS)).astype(np.float32) * steps
    return weights + noise.reshape(weights.shape)


def written(source: Path, target: Path, seed: int) -> None:
    """Copy `source` to `target` with noise."""
    reader, random = GGUFReader(source), np.random.default_rng(seed)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, noisy(tensor.data, tensor.tensor_type, random))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description="A GGUF file with noise of half a quantization step.")
    asked.add_argument("source", type=Path)
    asked.add_argument("target", type=Path)
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    written(given.source, given.target, given.seed)
