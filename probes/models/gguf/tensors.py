"""The tensors of a GGUF file as transformers has them, none of them missing, left out or of another shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from .config import LLAMAS, ROPE_FACTORS
from .header import Header

TRANSPOSED = (".attn_qkv.weight", ".attn_output.weight", ".ffn_up.weight", ".ffn_down.weight")  # in a GPT-2


def checked_names(header: Header, config: Any) -> dict[str, str]:
    """The name in transformers of every tensor in the header, once it is one of the configuration's model.

    Raises:
        InputError: a tensor is missing, of another shape, or one that the model has no place for.
    """
    import gguf

    from ..fresh import without_weights

    try:
        model = without_weights(config)
    except InputError as error:
        raise header.refuse(f"cannot be followed: {error}") from None
    kind = "llama" if config.model_type == "mistral" else config.model_type
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names = {}
    for own, tensor in model.state_dict().items():
        name = known.get_name(own, try_suffixes=(".weight", ".bias")) or own
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        turned = config.model_type == "gpt2" and name.endswith(TRANSPOSED)
        wanted = tuple(tensor.shape)[::-1] if turned else tuple(tensor.shape)
        if name not in header.tensors:
            raise header.refuse(f"lacks the tensor {name}, which its {config.model_type} model has; get it again")
        if header.tensors[name].shape != wanted:
            shape = list(header.tensors[name].shape)
            raise header.refuse(f"has {name} in the shape {shape}, and its model in {list(wanted)}; get it again")
        names[name] = own
    applied = {ROPE_FACTORS} if header.architecture in LLAMAS else set()  # in the configuration instead
    unread = sorted(set(header.tensors) - set(names) - applied)
    if unread:
        raise header.refuse(
            f"has {len(unread)} tensors that a {config.model_type} model has no place for ({unread[0]:.60}); "
            "give the checkpoint's own folder"
        )
    return names


def tensors_of(header: Header, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The file's tensors in a dtype, as the configuration's model has them.

    Raises:
        InputError: as `checked_names`, or the file cannot be read any more.
    """
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": getattr(config, "num_key_value_heads", None)}
    tensors = {}
    for name, own in checked_names(header, config).items():
        tensor = torch.from_numpy(header.read(name))
        if config.model_type == "gpt2" and name.endswith(TRANSPOSED):  # stored [output, input]
            tensor = tensor.T
        if config.model_type == "gemma2" and name.endswith("norm.weight"):  # stored with 1 added
            tensor = tensor - 1
        for part, count in heads.items() if header.architecture in LLAMAS else ():
            if part in name:
                tensor = tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        tensors[own] = tensor.to(dtype).contiguous()
    return tensors
