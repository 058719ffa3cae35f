"""The header of a GGUF file, read by the `gguf` package within bounds: a damaged one must not take the machine's memory."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...errors import InputError, reason
from ..checkpoint import refuse_pointers
from . import MAGIC

VERSIONS = (2, 3)  # 3 also admits big-endian files; 1 counted in 32 bits and was in use for a few months
MOST_KEYS = 1 << 16  # and tensors; the largest models in use have some thousands
LONGEST_ARRAY = 1 << 20  # entries; the merges of the largest vocabularies in use (260,000 tokens) are half as many
READ = ("general.architecture", "general.type")  # of all general keys: names and descriptions do no harm
DAMAGED = (ValueError, LookupError, OverflowError, TypeError, struct.error)  # from readers of what is damaged


class Stored(NamedTuple):
    """One tensor as the header describes it."""

    shape: tuple[int, ...]  # in torch's order
    type: str  # "F32", "Q4_1", ...
    start: int  # of its bytes in the file
    size: int  # in bytes


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself."""

    path: Path
    values: Mapping[str, Any]  # by key: numbers, truth values, text, lists of these
    tensors: Mapping[str, Stored]

    @property
    def architecture(self) -> str:
        return self.values["general.architecture"]

    def refuse(self, why: str) -> InputError:
        """The error that this file cannot be loaded, to be raised."""
        return InputError(f"GGUF file '{self.path.name}' {why}")

    def provenance(self) -> str:
        """JSON: the file's name, its SHA-256, and how many tensors it has of each type; reads the file once."""
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        types = Counter(tensor.type for tensor in self.tensors.values())
        return json.dumps({"name": self.path.name, "sha256": digest, "types": dict(types.most_common())})

    def read(self, name: str) -> np.ndarray:
        """A tensor's values in float32, dequantized.

        Raises:
            InputError: the file cannot be read any more, or the tensor's type cannot be dequantized.
        """
        from gguf import GGMLQuantizationType, dequantize

        shape, kind, start, size = self.tensors[name]
        try:
            rows = np.fromfile(self.path, np.uint8, size, offset=start).reshape(*shape[:-1], -1)
            return dequantize(rows, GGMLQuantizationType[kind])
        except NotImplementedError:
            raise self.refuse(
                f"stores {name!r:.60} as {kind}, which cannot be dequantized; give another quantization"
            ) from None
        except (OSError, ValueError) as error:
            raise self.refuse(f"cannot be read ({reason(error)}); get it again") from None


def read_header(path: str | Path) -> Header:
    """Read a GGUF file's header.

    Raises:
        InputError: the file cannot be read, is no GGUF file, one of several parts, cut short or damaged, of a version, byte
            order or tensor type that is not known, or holds no language model.
    """
    path = Path(path)
    blank = Header(path, {}, {})
    try:
        with path.open("rb") as file:
            start = file.read(24)
        _check_start(blank, start)
        reader = _reader(path)
        fields = {
            key: field
            for key, field in reader.fields.items()
            if not key.startswith(("general.", "GGUF.")) or key in READ
        }
        values = {key: field.contents() for key, field in fields.items()}
        tensors = {
            tensor.name: Stored(
                tuple(tensor.shape.tolist())[::-1], tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes
            )
            for tensor in reader.tensors
        }
    except OSError as error:
        raise blank.refuse(f"cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except DAMAGED as error:
        raise blank.refuse(f"is cut short, or its header is damaged ({reason(error)}); get it again") from None
    header = Header(path, MappingProxyType(values), MappingProxyType(tensors))
    _check_model(header)
    return header


def _check_start(blank: Header, start: bytes) -> None:
    if start[:4] != MAGIC:
        refuse_pointers(blank.path)
        begins = repr(start[:8])[1:] if start else "nothing"
        raise blank.refuse(f"is no GGUF file (it begins with {begins}); give a file that llama.cpp can read")
    version, tensors, keys = struct.unpack("<IQQ", start[4:])
    if version not in VERSIONS:
        order = "is big-endian" if version >> 24 in VERSIONS else f"is of version {version}"
        raise blank.refuse(f"{order}; convert the model again, to little-endian, with a current llama.cpp")
    if max(tensors, keys) > MOST_KEYS:
        raise ValueError(f"{keys:,} keys and {tensors:,} tensors")


def _check_model(header: Header) -> None:
    """Refuse a file that holds no whole language model."""
    parts = header.values.get("split.count", 0)
    if parts not in (0, 1):
        raise header.refuse(
            f"is one of {parts!s:.9} parts; merge them first: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    if not isinstance(header.values.get("general.architecture"), str):
        raise header.refuse("names no general.architecture; convert the model again with a current llama.cpp")
    kind = header.values.get("general.type", "model")
    if kind != "model":
        raise header.refuse(f"holds no model but a part of one (general.type={kind!s:.40}); give the model's own file")
    if not header.tensors:
        raise header.refuse("holds no tensors; give a file with the model's weights")


def _reader(path: Path) -> Any:
    """The package's reader, with a list read as one array.

    The package makes an array of every entry: 8 seconds and half a gigabyte for a vocabulary of 150,000, and as much as a
    damaged count says.
    """
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = memoryview(self.data)  # type: ignore[arg-type]
            at = orig_offs + 12
            kind, count = struct.unpack("<IQ", data[orig_offs:at])
            if count > LONGEST_ARRAY or kind == GGUFValueType.ARRAY:
                raise ValueError(f"a list of {count:,} entries of type {kind}")
            if kind != GGUFValueType.STRING:
                part = self._get(at, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
                return 12 + part.nbytes, [part], [0], [GGUFValueType.ARRAY, GGUFValueType(kind)]
            texts = []
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", data, at)
                texts.append(str(data[at + 8 : at + 8 + length], "utf-8"))
                at += 8 + length
            part = np.array(texts, dtype=object)
            return at - orig_offs, [part], [0], [GGUFValueType.ARRAY, GGUFValueType.INT32]

    return Reader(path)
