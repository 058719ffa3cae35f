"""Models larger than one device: spread by accelerate over several devices, main memory and disk.

accelerate replaces the forward pass of modules by one that calls a hook before and after it. Before, the inputs go to
the device where the module runs ("execution device"), and weights that lie elsewhere ("offloaded") are fetched; after,
those are let go again. In between an offloaded parameter is on PyTorch's device "meta", where tensors have no values;
the hook's `weights_map` has them. This file holds what a view needs to know about that: where a module runs, what its
weights are, what a structural copy shares, a block's weights gathered on one device, and where a caller wants a model.

Only hooks that align devices are understood. Other hooks of accelerate move or cast the model's own weights in place,
which a view must not do to its caller.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook
from torch import Tensor, nn

from ..errors import InputError
from .structure import structure


def is_split(model: nn.Module) -> bool:
    """Whether accelerate runs this model: some module carries a hook of its."""
    return any("_hf_hook" in vars(module) for module in model.modules())


def hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """The hooks that align this module's devices."""
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else _flat(hook)


def _flat(hook: ModelHook) -> list[AlignDevicesHook]:
    if isinstance(hook, SequentialHook):
        return [inner for part in hook.hooks for inner in _flat(part)]
    if isinstance(hook, AlignDevicesHook):
        return [hook]
    raise InputError(
        f"the model carries accelerate's hook '{type(hook).__name__}', which changes its weights in place as it runs; "
        "remove it, or split the model by a device map"
    )


def only_aligned(module: nn.Module) -> bool:
    """Whether the forward pass on this module is accelerate's wrapper around the class's own."""
    forward, plain = vars(module).get("forward"), vars(module).get("_old_forward")
    return (
        bool(hooks(module))
        and isinstance(forward, functools.partial)
        and forward.func.__module__ == ModelHook.__module__
        and getattr(plain, "__self__", None) is module
        and getattr(plain, "__func__", None) is type(module).forward
    )


def execution_device(module: nn.Module) -> torch.device:
    """Where the module runs: as its first hook says, else where its first parameter is."""
    for part in module.modules():
        for hook in hooks(part):
            if hook.execution_device is not None:
                return torch.empty(0, device=hook.execution_device).device  # with its index
    return next(module.parameters()).device


@dataclass(frozen=True)
class Weight:
    """A parameter and, where it is offloaded, where its values are and under which key."""

    name: str
    parameter: nn.Parameter
    source: tuple[Any, str] | None  # (a hook's mapping from keys to values, the key)

    @property
    def there(self) -> bool:
        """Whether it has values at all."""
        return self.source is not None or not self.parameter.is_meta

    def value(self) -> Tensor:
        """The parameter itself, or its values wherever they are kept, in its dtype."""
        if self.source is None:
            return self.parameter
        values, key = self.source
        try:
            return values[key].to(self.parameter.dtype)
        except (KeyError, OSError) as error:
            raise InputError(
                f"the offloaded weight '{self.name}' cannot be read ({type(error).__name__}); "
                "keep checkpoint and offload folder as long as the model is used"
            ) from None


def weights(module: nn.Module, prefix: str = "", holder: tuple[Any, int] | None = None) -> Iterator[Weight]:
    """Every parameter of a model, under each of its names where it has several; no values are read yet.

    `prefix` and `holder` (what keeps the values of offloaded weights, and how much of a name it leaves out) are those of
    modules within it.
    """
    for hook in hooks(module):
        if hook.offload and hook.weights_map is not None:
            holder = (hook.weights_map, len(prefix))  # whose keys begin below this module
    for key, parameter in module._parameters.items():
        if parameter is not None:
            name = prefix + key
            offloaded = parameter.is_meta and holder is not None
            yield Weight(name, parameter, (holder[0], name[holder[1] :]) if offloaded and holder else None)
    for key, child in module._modules.items():
        if child is not None:
            yield from weights(child, f"{prefix}{key}.", holder)


@torch.no_grad()
def gathered(block: nn.Module, device: torch.device) -> Any:
    """A stand-in for a block, with all of its weights on one device; to be read, not run.

    Weights that are there already are the block's own, others are fetched and belong to the stand-in.
    """
    values = {weight.name: weight.value() for weight in weights(block)}
    values = {name: x if x.device == device else x.detach().to(device) for name, x in values.items()}

    bare = structure(block)
    for prefix, module in bare.named_modules():
        below = f"{prefix}." if prefix else ""
        held = vars(module)["_parameters"]
        held.update({key: values[below + key] for key, x in held.items() if x is not None})
    return bare


def dispatched(model: Any, like: Any) -> Any:
    """`model`, which is whole and in main memory, put where `like` runs; what waits on disk there stays in main memory."""
    root = [hook.execution_device for hook in hooks(like) if hook.execution_device is not None]
    main: Any = root[0] if root else execution_device(like)
    main = "cpu" if str(main) == "cpu" else main  # accelerate compares it with that string
    places: dict[str, Any] = dict(getattr(like, "hf_device_map", None) or {"": "cpu"})
    if "" in places:  # by this name accelerate finds no weights to offload
        places = {name: places[""] for name, _ in model.named_children()}
    places = {name: "cpu" if place == "disk" else place for name, place in places.items()}
    if {main, *places.values()} == {"cpu"}:
        return model
    skip = getattr(like, "_skip_keys_device_placement", None)
    return dispatch_model(model, places, main, skip_keys=skip, force_hooks=True)


def placement(device_map: Any, max_memory: Any, offload_folder: Any) -> dict[str, Any] | None:
    """Where a caller wants a model, as transformers takes it; None for nothing."""
    options = {"max_memory": max_memory, "offload_folder": offload_folder}
    options = {option: value for option, value in options.items() if value is not None}
    if device_map is None:
        for option, value in options.items():
            raise InputError(f"{option}={value!s:.60} goes with a device_map; give one, as 'auto'")
        return None
    return options | {"device_map": device_map}
