"""The tensors of a GGUF file as transformers reads them, none of them missing, dropped or of another shape.

That reader leaves out what its model has no place for, and a model keeps fresh weights for what a file lacks. So names and
shapes are compared first, on a model without weights, and again with what was read.
"""

from __future__ import annotations

import copy
import io
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor

from ...errors import reason
from .config import ROPE_FACTORS
from .header import Header

TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")  # GPT-2's, which transformers stores [input, output]


def check_tensors(header: Header, config: Any) -> None:
    """Compare names and shapes in the header with those of the configuration's model.

    Raises:
        InputError: a tensor is missing, of another shape, or one that the model has no place for.
    """
    model = _without_weights(header, config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    places = {name: own for name, own in _names(model).items() if own not in tied}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, place in places.items():
        wanted = shapes[place][::-1] if config.model_type == "gpt2" and _is_transposed(name) else shapes[place]
        if name not in header.tensors:
            raise header.refuse(f"lacks the tensor {name}, which its {config.model_type} model has; get it again")
        if header.tensors[name].shape != wanted:
            found = list(header.tensors[name].shape)
            raise header.refuse(f"has {name} in the shape {found}, and its model in {list(wanted)}; get it again")
    unread = sorted(set(header.tensors) - set(places) - _applied(header))
    if unread:
        raise header.refuse(
            f"has {len(unread)} tensors that a {config.model_type} model has no place for ({unread[0]:.60}); "
            "give the checkpoint's own folder"
        )


def read_tensors(header: Header, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The file's tensors in a dtype by their names in transformers, as the configuration's model has them.

    Raises:
        InputError: they are not what `check_tensors` found.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = _without_weights(header, config)
    try:
        with redirect_stderr(io.StringIO()):  # its bar
            read = load_gguf_checkpoint(str(header.path), return_tensors=True, model_to_load=model, torch_dtype=dtype)
    except Exception as error:  # gguf and transformers raise whatever they run into
        raise header.refuse(f"cannot be read by transformers ({reason(error)}); convert the model again") from None
    tensors: dict[str, Tensor] = {name: tensor.contiguous() for name, tensor in read["tensors"].items()}
    if header.architecture == "mistral" or (header.architecture == "llama" and not _knows_kv_heads(header)):
        _unpermute(tensors, config)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        wanted = {name: shape for name, shape in wanted.items() if name in tensors or name != "lm_head.weight"}
    for name in wanted.keys() | tensors.keys():
        if name not in wanted or name not in tensors or tensors[name].shape != wanted[name]:
            raise header.refuse(f"is read by this transformers with another {name}; install one that fits headwater")
    return tensors


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


def _is_transposed(name: str) -> bool:
    return name.endswith(".weight") and any(part in name.split(".") for part in TRANSPOSED)


def _applied(header: Header) -> set[str]:
    """Tensors that are in the configuration instead."""
    return {ROPE_FACTORS} if header.architecture in ("llama", "mistral") else set()


def _knows_kv_heads(header: Header) -> bool:
    return "llama.attention.head_count_kv" in header.values


def _unpermute(tensors: dict[str, Tensor], config: Any) -> None:
    """Rows of queries and keys in transformers' order, where its reader leaves them in llama.cpp's.

    llama.cpp rotates neighbours, transformers the two halves of a head.
    """
    for name, tensor in tensors.items():
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f".{part}." in name:
                pairs = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2)
                tensors[name] = pairs.reshape(tensor.shape).contiguous()
