"""What a checkpoint's folder says about itself, read before transformers makes anything of it.

The headers of safetensors files, which name dtype and shape of every tensor, and the config alone show whether the files
fit together. A config that asks for more than any memory holds, or an index that leads elsewhere, is refused before it is
tried.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ..errors import InputError, reason
from ..run.files import what_is

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
POINTER, POINTER_BYTES = b"version https://git-lfs", 1024  # how git-lfs's stand-ins begin, and their greatest size
# What the families of `probes` call the sizes that must be found among the tensors' own.
BLOCKS = ("num_hidden_layers", "n_layer")
WIDTHS = ("hidden_size", "n_embd", "intermediate_size", "n_inner", "vocab_size", "n_positions")
WHOLE = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
COUNTS = ("num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "max_position_embeddings")


class Tensor(NamedTuple):
    """One tensor as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check the sizes of a configuration, as far as that is possible without the weights.

    Raises:
        InputError: one is no whole number, or none of at least 1, or heads do not divide what they share.
    """
    for name in (*BLOCKS, *WIDTHS, *COUNTS):
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"the config has {name}={json.dumps(value)[:40]}; a whole number belongs there")
        if value < 1:
            raise InputError(f"the config has {name}={value}; give at least 1")
    heads, shared, width = (fields.get(name) for name in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if heads and shared and heads % shared:
        raise InputError(f"the config has num_attention_heads={heads}, which cannot share {shared} key heads evenly")
    if heads and width and fields.get("head_dim") is None and width % heads:
        raise InputError(f"the config has hidden_size={width}, no multiple of num_attention_heads={heads}")


def refuse_pointers(*files: Path) -> None:
    """Raises InputError where one of these files is what git leaves in the place of a large file that was not fetched."""
    for file in files:
        if what_is(file) == "file" and file.stat().st_size <= POINTER_BYTES and file.read_bytes().startswith(POINTER):
            raise InputError(
                f"{file.name} is a pointer of git-lfs, not the file itself; run git lfs pull in its folder"
            )


def refuse_adapter(folder: Path) -> None:
    """Raises InputError where a folder holds an adapter of another model."""
    if os.path.lexists(folder / ADAPTER):
        raise InputError(
            f"{ADAPTER} makes this an adapter of another model; merge it into that model and save the result"
        )


def check_weights(folder: Path) -> None:
    """Check the headers of the weights' files, and the config's sizes against them.

    Raises:
        InputError: sizes that no tensor has; weights of whole numbers; weights that are no regular files, no safetensors,
            or lie elsewhere; an adapter.
    """
    fields = read_object(folder / CONFIG)
    refuse_adapter(folder)
    tensors = [tensor for file in weight_files(folder) for tensor in _tensors(file)]
    largest = max((size for tensor in tensors for size in tensor.shape), default=0)
    if not largest:
        return
    for tensor in tensors:  # leftovers such as stored masks may be of any kind
        if tensor.name.endswith(".weight") and tensor.dtype in WHOLE and "quantization_config" not in fields:
            raise InputError(f"{tensor.name} holds whole numbers ({tensor.dtype}) instead of weights")
    for name in BLOCKS:
        if (value := fields.get(name)) is not None and value > len(tensors):
            raise InputError(f"{CONFIG} has {name}={value}, and the files hold {len(tensors)} tensors in all")
    sizes = {f"{name}={fields[name]}": fields[name] for name in WIDTHS if fields.get(name) is not None}
    heads, size = fields.get("num_attention_heads") or 0, fields.get("head_dim") or 0
    for what, value in (sizes | {f"{heads} heads of head_dim={size}": heads * size}).items():
        if value > largest:
            raise InputError(f"{CONFIG} has {what}, and no tensor in the files is larger than {largest}")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a small file.

    Raises:
        InputError: there is none.
    """
    if what_is(file) != "file":
        raise InputError(f"{file} is no regular file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no JSON, or none that ends
        raise InputError(f"{file} cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise InputError(f"{file} holds a {type(value).__name__} instead of a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The weights' files, there or not: the one, or those that the index names.

    Raises:
        InputError: neither is there, or the index leads elsewhere.
    """
    if os.path.lexists(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        there = ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))[:3])
        raise InputError(f"there is {there}, but neither {WEIGHTS} nor {INDEX}")
    places = read_object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{INDEX} has no weight_map from tensors to files")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{INDEX} names '{name}', which is no *.safetensors file in the folder itself")
    return [folder / name for name in names]


def _tensors(file: Path) -> list[Tensor]:
    """What a safetensors file says in its header."""
    kind = what_is(file)  # a pipe would be waited for
    if kind != "file":
        raise InputError(f"{file.name} is {'not there' if kind == 'nothing' else 'no regular file'}")
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            return [Tensor(name, str(part.get_dtype()), tuple(part.get_shape())) for name, part in parts.items()]
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file.name} is cut short or damaged ({reason(error)}); get it again") from None
