"""The tensors of a GGUF file as transformers has them, none of them missing, left out or of another shape."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import reason
from .config import ROPE_FACTORS
from .header import Header

TRANSPOSED = (".attn_qkv.weight", ".attn_output.weight", ".ffn_up.weight", ".ffn_down.weight")  # in a GPT-2


def checked_names(header: Header, config: Any) -> dict[str, str]:
    """The name in transformers of every tensor in the header, once it is one of the configuration's model.

    Raises:
        InputError: a tensor is missing, of another shape, or one that the model has no place for.
    """
    model = _without_weights(header, config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    names = {name: own for name, own in _names(model).items() if own not in tied}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, own in names.items():
        wanted = shapes[own][::-1] if config.model_type == "gpt2" and name.endswith(TRANSPOSED) else shapes[own]
        if name not in header.tensors:
            raise header.refuse(f"lacks the tensor {name}, which its {config.model_type} model has; get it again")
        if header.tensors[name].shape != wanted:
            found = list(header.tensors[name].shape)
            raise header.refuse(f"has {name} in the shape {found}, and its model in {list(wanted)}; get it again")
    applied = {ROPE_FACTORS} if header.architecture in ("llama", "mistral") else set()  # in the configuration instead
    unread = sorted(set(header.tensors) - set(names) - applied)
    if unread:
        raise header.refuse(
            f"has {len(unread)} tensors that a {config.model_type} model has no place for ({unread[0]:.60}); "
            "give the checkpoint's own folder"
        )
    return names


def read_tensors(header: Header, config: Any, names: Mapping[str, str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The file's tensors in a dtype by their `checked_names`, as the configuration's model has them.

    Raises:
        InputError: the file cannot be read any more.
    """
    from gguf import GGMLQuantizationType, dequantize

    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": getattr(config, "num_key_value_heads", None)}
    found = {}
    for name, own in names.items():
        _, kind, start, size = header.tensors[name]
        try:
            rows = np.fromfile(header.path, np.uint8, size, offset=start).reshape(*header.tensors[name].shape[:-1], -1)
        except (OSError, ValueError) as error:
            raise header.refuse(f"cannot be read ({reason(error)}); get it again") from None
        tensor = torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))
        if config.model_type == "gpt2" and name.endswith(TRANSPOSED):  # stored [output, input]
            tensor = tensor.T
        if config.model_type == "gemma2" and name.endswith("norm.weight"):  # stored with 1 added
            tensor = tensor - 1
        for part, count in heads.items():
            # llama.cpp rotates neighbours of its own architecture's heads, transformers their two halves.
            if part in name and header.architecture in ("llama", "mistral"):
                tensor = tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        found[own] = tensor.to(dtype).contiguous()
    return found


def _without_weights(header: Header, config: Any) -> Any:
    """The configuration's model on the meta device, a Mistral under the name that its tensors go by."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception as error:  # whatever sizes lead to
        raise header.refuse(
            f"describes no {config.model_type} model ({reason(error)}); convert the model again"
        ) from None
    if config.model_type == "mistral":
        model.config.model_type = "llama"
    return model


def _names(model: Any) -> dict[str, str]:
    """Of every tensor of a model its name in transformers by its name in a GGUF file."""
    import gguf

    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == model.config.model_type)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {own: names.get_name(own, try_suffixes=(".weight", ".bias")) for own in model.state_dict()}
    return {name or own: own for own, name in found.items()}
