"""The tensors of a GGUF file as transformers has them, none of them left out or of another shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from .config import LLAMAS, ROPE_FACTORS
from .header import Header


def tensors_of(header: Header, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The file's tensors in a dtype, as the configuration's model has them; some may be missing.

    Raises:
        InputError: a tensor of another shape, of a type that cannot be dequantized, or that the model has no place for.
    """
    import gguf

    from ..fresh import without_weights

    try:
        wanted = without_weights(config).state_dict()
    except InputError as error:
        raise header.refuse(f"cannot be followed: {error}") from None
    kind = "llama" if config.model_type == "mistral" else config.model_type
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names = {known.get_name(own, try_suffixes=(".weight", ".bias")) or own: own for own in wanted}
    applied = {ROPE_FACTORS} if header.architecture in LLAMAS else set()  # in the configuration instead
    if unread := sorted(set(header.tensors) - set(names) - applied):
        raise header.refuse(
            f"has {len(unread)} tensors that a {config.model_type} model has no place for ({unread[0]:.60}); "
            "give the checkpoint's own folder"
        )
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    tensors = {}
    for name in header.tensors:
        if name in applied:
            continue
        own, shape = wanted[names[name]].shape, header.shape(name)
        if shape != own:
            raise header.refuse(f"has {name} in the shape {list(shape)}, and its model in {list(own)}; get it again")
        tensor = torch.from_numpy(header.read(name))
        if config.model_type == "gemma2" and name.endswith("norm.weight"):  # stored with 1 added
            tensor = tensor - 1
        for part, count in heads.items() if header.architecture in LLAMAS else ():
            if part in name:
                tensor = tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        tensors[names[name]] = tensor.to(dtype).contiguous()
    return tensors
