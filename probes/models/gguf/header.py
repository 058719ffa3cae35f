"""The header of a GGUF file, read within bounds before any other reader sees the file.

A GGUF file begins with its magic, version and two counts; then come keys with values, then names, shapes, types and places
of the tensors, then their data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The header decides how much
memory any reader takes, so every count and length in it is held against what the file can hold before it is believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np

from ...errors import InputError
from ...run.files import what_is
from ..checkpoint import refuse_pointers

MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)  # 3 also admits big-endian files; 1 counted in 32 bits and was in use for a few months
LONGEST_HEADER = 1 << 26  # bytes; the largest vocabularies in use (260,000 tokens and their merges) take 20 MB
LONGEST_ARRAY = 1 << 20  # entries; merges of those vocabularies are half as many
LONGEST_NAME = 1 << 16  # bytes of a key, the format's own bound
MOST_DIMENSIONS = 4  # of a tensor, the format's own bound
ALIGNMENT = 32  # of the tensors' data, where the header does not say

_NUMBERS = MappingProxyType(  # by the format's number of a type
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
)
_BOOL, _STRING, _ARRAY = 7, 8, 9


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

    def refuse(self, reason: str) -> InputError:
        """The error that this file cannot be loaded, to be raised."""
        return InputError(f"GGUF file '{self.path.name}' {reason}")

    def provenance(self) -> str:
        """JSON: the file's name, its SHA-256, and how many tensors it has of each type; reads the file once."""
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        types = Counter(tensor.type for tensor in self.tensors.values())
        return json.dumps({"name": self.path.name, "sha256": digest, "types": dict(types.most_common())})

    def numbers(self, name: str) -> list[float]:
        """The values of a small tensor that is stored as it is.

        Raises:
            InputError: it is quantized.
        """
        tensor = self.tensors[name]
        if tensor.type != "F32":
            raise self.refuse(f"stores {name} as {tensor.type}; convert the model again with a current llama.cpp")
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            return np.frombuffer(file.read(tensor.size), "<f4").tolist()


def is_gguf(path: str | Path) -> bool:
    """Whether an existing file is to be read as GGUF: by its first bytes, else by its name, whatever it holds."""
    if what_is(path) != "file":
        return False
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or str(path).lower().endswith(SUFFIX)
    except OSError:
        return str(path).lower().endswith(SUFFIX)


def read_header(path: str | Path) -> Header:
    """Read a GGUF file's header and check it against the file's size.

    Raises:
        InputError: the file cannot be read, is no GGUF file, one of several parts, cut short or damaged, of a version, byte
            order or tensor type that is not supported, or holds no language model.
    """
    path = Path(path)
    blank = Header(path, {}, {})
    try:
        with path.open("rb") as file:
            header = _Reading(file, path.stat().st_size, blank).header()
    except OSError as error:
        raise blank.refuse(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise blank.refuse("has a damaged header (text that is no UTF-8); get it again") from None
    parts = header.values.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        number = header.values.get("split.no", 0)
        raise header.refuse(
            f"is part {number + 1 if isinstance(number, int) else '?'} of {parts}; "
            "merge them first: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    if not isinstance(header.values.get("general.architecture"), str):
        raise header.refuse("names no general.architecture; convert the model again with a current llama.cpp")
    kind = header.values.get("general.type", "model")
    if kind != "model":
        raise header.refuse(f"holds no model but a part of one (general.type={kind!s:.40}); give the model's own file")
    if not header.tensors:
        raise header.refuse("holds no tensors; give a file with the model's weights")
    return header


class _Reading:
    """A header as it is read: where we are, and what has been found."""

    def __init__(self, file: IO[bytes], size: int, blank: Header) -> None:
        self._file, self._size, self._at, self._refuse = file, size, 0, blank.refuse
        self._path, self._errors = blank.path, "strict"

    def header(self) -> Header:
        self._begin()
        tensors, keys = self._number("<Q"), self._number("<Q")
        self._fits(keys, 13, "keys")  # the least a key takes: its length, its type, a value
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text(LONGEST_NAME)
            if key in values:
                raise self._damaged(f"{key!r:.60} occurs twice")
            self._errors = "replace" if key.startswith("general.") else "strict"  # names and descriptions do no harm
            values[key] = self._value(self._number("<I"))
        self._errors = "strict"
        self._fits(tensors, 24, "tensors")
        described = [self._tensor() for _ in range(tensors)]
        return Header(self._path, MappingProxyType(values), MappingProxyType(self._placed(values, described)))

    def _begin(self) -> None:
        start = self._file.read(8)
        self._at = 8
        if start[:4] != MAGIC:
            refuse_pointers(self._path)
            found = repr(start[:8])[1:] if start else "nothing"
            raise self._refuse(f"is no GGUF file (it begins with {found}); give a file that llama.cpp can read")
        version = int.from_bytes(start[4:8], "little")
        if int.from_bytes(start[4:8], "big") in VERSIONS:
            raise self._refuse("is big-endian; convert it to little-endian: gguf-convert-endian FILE little")
        if len(start) < 8 or version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise self._refuse(
                f"is of version {version}, and {known} are supported; convert the model again with a current llama.cpp"
            )

    def _damaged(self, what: str) -> InputError:
        return self._refuse(f"has a damaged header ({what}); get it again")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise self._refuse(f"is cut short: {self._size:,} bytes, and its header goes on; get it again")
        if self._at + count > LONGEST_HEADER:
            raise self._damaged(f"longer than {LONGEST_HEADER:,} bytes")
        self._at += count
        found = self._file.read(count)
        if len(found) < count:  # it has become shorter since
            raise self._refuse("is cut short; get it again")
        return found

    def _fits(self, count: int, least: int, what: str) -> None:
        if count * least > min(self._size, LONGEST_HEADER) - self._at:
            raise self._damaged(f"{count:,} {what} in {self._size:,} bytes")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self, longest: int = LONGEST_HEADER) -> str:
        length = self._number("<Q")
        if length > longest:
            raise self._damaged(f"a name of {length:,} bytes")
        return self._take(length).decode("utf-8", self._errors)

    def _value(self, kind: int, *, within: bool = False) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind == _BOOL:
            found = self._number("<B")
            if found > 1:
                raise self._damaged(f"a truth value of {found}")
            return bool(found)
        if kind != _ARRAY or within:
            raise self._damaged(f"a value of type {kind}")
        kind, count = self._number("<I"), self._number("<Q")
        if count > LONGEST_ARRAY:
            raise self._damaged(f"a list of {count:,} entries")
        if kind in _NUMBERS:
            form = f"<{count}{_NUMBERS[kind][1]}"
            return list(struct.unpack(form, self._take(struct.calcsize(form))))
        self._fits(count, 8 if kind == _STRING else 1, "entries of a list")
        return [self._value(kind, within=True) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._text(LONGEST_NAME), self._number("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._damaged(f"{name!r:.60} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]  # the file has the fastest first
        return name, shape, self._number("<I"), self._number("<Q")

    def _placed(self, values: Mapping[str, Any], described: list[Any]) -> dict[str, Stored]:
        """Tensors by name with their places, which have to follow upon each other and end within the file."""
        alignment = values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment={alignment!s:.40}")
        data = _padded(self._at, alignment)
        end, found = 0, {}
        for name, shape, number, offset in described:
            type_name, block, stored = self._type(name, number)
            if name in found:
                raise self._damaged(f"{name!r:.60} occurs twice")
            if min(shape) < 1 or shape[-1] % block:
                raise self._damaged(f"{name!r:.60} has the shape {list(shape)!s:.60} as {type_name}")
            if offset != end:
                raise self._damaged(f"{name!r:.60} begins at {offset:,} instead of {end:,}")
            size = math.prod(shape) // block * stored
            if data + offset + size > self._size:
                raise self._refuse(
                    f"is cut short: {self._size:,} bytes, and {name!r:.60} ends at {data + offset + size:,}; get it again"
                )
            found[name] = Stored(shape, type_name, data + offset, size)
            end = _padded(offset + size, alignment)
        return found

    def _type(self, name: str, number: int) -> tuple[str, int, int]:
        """A tensor type's name, and how many entries a block of it holds in how many bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        try:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
            dequantize(np.zeros(size, np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            known = number in GGMLQuantizationType.__members__.values()
            stored = GGMLQuantizationType(number).name if known else f"type {number}"
            raise self._refuse(
                f"stores {name!r:.60} as {stored}, which cannot be dequantized; give another quantization"
            ) from None
        return kind.name, block, size


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
