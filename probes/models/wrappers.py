"""The transformers model inside other packages' wrappers: `torch.compile`, data parallelism and PEFT.

Compiled code is ignored, since a view runs the modules themselves. PEFT's layers with adapters run as they are, like any
module that is not known (`foreign`): the adapters count, and their blocks are differentiated as they run.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import InputError


def unwrapped(model: Any) -> Any:
    """The model inside, which is the model itself where nothing is around it; nothing is copied.

    Raises:
        InputError: a PEFT model with trained vectors before the tokens (prompt tuning and its relatives).
    """
    if _is_compiled(model):
        return unwrapped(model._orig_mod)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    if not (type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model")):
        return model
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise InputError(
                f"adapter '{name}' of the {type(model).__name__} puts trained vectors before the tokens, which probes "
                "have no place for; give the model without it"
            )
    return unwrapped(model.get_base_model())


def unwrap_within(copied: nn.Module) -> None:
    """Within a structural copy, put modules in the place of their compiled wrappers."""
    for name, child in copied._modules.items():
        if child is not None:
            inner: Any = child._orig_mod if _is_compiled(child) else child
            copied._modules[name] = inner
            unwrap_within(inner)


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
