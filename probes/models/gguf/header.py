"""The header of a GGUF file, read by the `gguf` package and checked."""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError, reason
from . import CPU
from .tensors import dequantized, known

READ = ("general.architecture", "general.type")  # of all general keys: names and descriptions do no harm


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself."""

    path: Path
    values: Mapping[str, Any]  # by key: numbers, truth values, text, lists of these
    tensors: Mapping[str, Any]  # by name: `ReaderTensor` of the `gguf` package, over the file itself

    @property
    def architecture(self) -> Any:
        return self.values.get("general.architecture")

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's sizes in torch's order."""
        return tuple(self.tensors[name].shape.tolist())[::-1]

    def refuse(self, why: str) -> InputError:
        """The error that this file cannot be loaded, to be raised."""
        return InputError(f"GGUF file '{self.path.name}' {why}")

    def provenance(self) -> str:
        """JSON: the file's name, its SHA-256, and how many tensors it has of each type; reads the file once."""
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        types = Counter(tensor.tensor_type.name for tensor in self.tensors.values())
        return json.dumps({"name": self.path.name, "sha256": digest, "types": dict(types.most_common())})

    def check(self, name: str) -> None:
        """Raises InputError where a tensor's type cannot be dequantized."""
        kind = self.tensors[name].tensor_type
        if not known(kind):
            raise self.refuse(
                f"stores {name!r:.60} as {kind.name}, which cannot be dequantized; give another quantization"
            )

    def read(self, name: str, device: torch.device = CPU) -> Tensor:
        """A tensor's values in float32, dequantized on a device."""
        self.check(name)
        tensor = self.tensors[name]
        return dequantized(torch.from_numpy(tensor.data), tensor.tensor_type, device).view(self.shape(name))


def read_header(path: str | Path) -> Header:
    """Read a GGUF file's header."""
    path = Path(path)
    try:
        reader = _reader(path)
        values = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith(("general.", "GGUF.")) or key in READ
        }
    except Exception as error:  # whatever a reader meets in what is damaged
        raise Header(path, {}, {}).refuse(
            f"is no GGUF file, cut short or damaged ({reason(error)}); get it again (git-lfs pointers: git lfs pull)"
        ) from None
    header = Header(path, values, {tensor.name: tensor for tensor in reader.tensors})
    parts, kind = values.get("split.count", 0), values.get("general.type", "model")
    if parts not in (0, 1):
        raise header.refuse(
            f"is one of {parts!s:.9} parts; merge them first: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    if kind != "model":
        raise header.refuse(f"holds no model but a part of one (general.type={kind!s:.40}); give the model's own file")
    return header


def _reader(path: Path) -> Any:
    """The package's reader, with a list read as one array; its own makes 150,000 arrays of as many tokens, in 8 s."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
            if self.byte_order != "I":
                raise ValueError("it is big-endian")
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = memoryview(self.data)  # type: ignore[arg-type]
            at = orig_offs + 12
            kind, count = struct.unpack("<IQ", data[orig_offs:at])
            if kind != GGUFValueType.STRING:
                part = self._get(at, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
                return 12 + part.nbytes, [part], [0], [GGUFValueType.ARRAY, GGUFValueType(kind)]
            texts = []
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", data, at)
                texts.append(str(data[at + 8 : at + 8 + length], "utf-8"))
                at += 8 + length
            return at - orig_offs, [np.array(texts, object)], [0], [GGUFValueType.ARRAY, GGUFValueType.INT32]

    return Reader(path, "c")  # as torch wants memory: nothing writes there
