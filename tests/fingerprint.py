"""All of a model and of torch that a measurement could leave changed."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from probes.models import split


def _of_tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if is_traceable_wrapper_subclass(tensor) and len(keys := tensor.__tensor_flatten__()[0]) > 1:  # codes and scales
        return [id(tensor), *(_of_tensor(getattr(tensor, key)) for key in keys)]
    data = None if tensor.is_meta or not tensor.numel() else tensor.detach().cpu().reshape(-1).contiguous()
    content = hashlib.sha256(b"" if data is None else data.view(torch.uint8).numpy().tobytes()).hexdigest()
    kept = (id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad, str(tensor.dtype), str(tensor.device))
    return (*kept, tuple(tensor.shape), content, _of_tensor(tensor.grad) if tensor.is_leaf else None)


def _of_value(value: Any) -> Any:
    """Plain values as they are, tensors by content, dictionaries (hooks, modules) entry by entry, the rest as itself."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, dict):
        return [(repr(key), _of_value(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [_of_value(entry) for entry in value]
    return type(value).__qualname__, id(value)


def fingerprint(model: torch.nn.Module) -> dict[str, Any]:
    """All that a probe could leave changed: every attribute of every module, the configuration, and torch's own state."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        label = f"{name} ({type(module).__qualname__})"
        found |= {f"{label}.{attribute}": _of_value(value) for attribute, value in vars(module).items()}
        found[f"{label}, accelerate's hooks"] = [_of_value(vars(hook)) for hook in split.hooks(module)]
    for name in ("config", "generation_config", "cfg"):
        config = getattr(model, name, None)
        if config is not None and hasattr(config, "to_dict"):
            found[name] = repr(sorted(config.to_dict().items(), key=lambda item: item[0]))
            found[f"{name}, attention"] = getattr(config, "_attn_implementation", None)
    of_all = {name: len(x) for name, x in vars(torch.nn.modules.module).items() if name.startswith("_global_") and x}
    random_numbers = torch.get_rng_state().numpy().tobytes(), np.random.get_state(legacy=True)[1].tobytes()  # type: ignore[union-attr]  # noqa: NPY002
    settings = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()]
    settings += [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    kernels = [torch.get_num_threads(), torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()]
    drawn = (*random_numbers, hash(random.getstate()))
    return found | {"torch": [*settings, *kernels], "hooks on all modules": of_all, "random numbers": drawn}


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name, "absent") != after.get(name, "absent")]
