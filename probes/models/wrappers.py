"""The transformers model inside other packages' wrappers: `torch.compile`, data parallelism and PEFT.

Compiled code is ignored, since a view runs the modules themselves. PEFT adapters are merged into weights that belong to the
view: they count, and blocks can be taken apart like those of a plain model. The caller's model stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import InputError, reason
from .foreign import unknown


def unwrapped(model: Any) -> Any:
    """The model inside, which is the model itself where nothing is around it; nothing is copied.

    Raises:
        InputError: a PEFT model with trained vectors before the tokens (prompt tuning and its relatives).
    """
    if _is_compiled(model):
        return unwrapped(model._orig_mod)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    if not (_is_adapter(model) and hasattr(model, "get_base_model")):
        return model
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise InputError(
                f"adapter '{name}' of the {type(model).__name__} puts trained vectors before the tokens, which probes "
                "have no place for; give the model without it"
            )
    return unwrapped(model.get_base_model())


def has_adapters(model: nn.Module) -> bool:
    """Whether some module is one of PEFT's."""
    return any(map(_is_adapter, model.modules()))


def unwrap_within(copied: nn.Module, prefix: str = "") -> None:
    """Within a structural copy, put modules in the place of their wrappers, with adapters merged.

    Raises:
        InputError: an adapter cannot be merged.
    """
    for name, child in copied._modules.items():
        if child is not None:
            inner: Any = child._orig_mod if _is_compiled(child) else child
            inner = _merged(inner, prefix + name) if _is_adapter(inner) else inner
            copied._modules[name] = inner
            unwrap_within(inner, f"{prefix}{name}.")


def unpack(module: Any) -> None:
    """A 4-bit layer of bitsandbytes in a structural copy comes to compute as it does on any device.

    Its packed form for some CPUs, made in the first pass, rounds to bfloat16 and has no derivative.
    """
    if not getattr(module, "support_avx512bf16_for_cpu", False):
        return
    module.support_avx512bf16_for_cpu = False
    weight, state = module.weight, module.weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        state.original_nested = False  # scales stay as they are instead of being rounded again
        module._save_to_state_dict(
            {}, "", keep_vars=True
        )  # the package's own way back, but for the order of its scales
        weight.quant_state.absmax = weight.quant_state.absmax.T.reshape(-1).float()


def _is_compiled(module: Any) -> bool:
    return isinstance(module, nn.Module) and "_orig_mod" in module._modules


def _is_adapter(module: Any) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def _merged(layer: Any, name: str) -> nn.Module:
    """The layer that adapters are on, with weights of its own that hold the active ones, as the wrapped layer runs now."""
    bases = [part.base_layer for part in layer.modules() if hasattr(part, "base_layer")]
    if any(unknown(base) is not None for base in bases):  # codes would have to be rounded anew: it runs as it is
        return layer
    try:
        for base in bases:
            _own(base)
        if hasattr(layer, "unload_and_optionally_merge_module"):  # a second layer in the place of the first
            if layer.disable_adapters:
                return layer.original_module
            return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        if layer.disable_adapters and layer.merged:
            layer.unmerge()
        elif not (layer.disable_adapters or layer.merged):  # of a layer with merged adapters the others do not count
            layer.merge()
        return layer.get_base_layer()
    except Exception as error:  # PEFT's kinds of adapters raise whatever they do where they cannot be merged
        raise InputError(
            f"the adapter {type(layer).__qualname__} on '{name}' cannot be merged ({reason(error)}); give a model without it"
        ) from None


@torch.no_grad()
def _own(layer: nn.Module) -> None:
    """Give a layer of a structural copy weights of its own."""
    for key, weight in layer._parameters.items():
        if weight is not None:
            if weight.is_meta:
                raise InputError("its weights are offloaded")
            layer._parameters[key] = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
