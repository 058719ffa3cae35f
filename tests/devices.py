"""Several devices on a machine that has one: tensors carry the name of the device they would lie on.

Everything is computed on the CPU. What the names add is what several devices would add: an operation whose operands lie
apart raises, results lie where their operands do, and `to` alone moves. PyTorch has names to spare for that ("cpu:1" is a
device to it, and not equal to "cpu:2"), so that kernels are still chosen by the type "cpu".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

HERE, META = torch.device("cpu"), torch.device("meta")
BY_VALUE = (Tensor.__repr__, Tensor.__deepcopy__)


def lies_on(tensor: Tensor) -> torch.device:
    """Where a tensor lies: its storage knows, which a parameter shares with its data and a view with what it shows."""
    return META if tensor.is_meta else getattr(tensor.untyped_storage(), "_lies_on", HERE)


def _put(found: Any, device: torch.device) -> Any:
    for x in tree_flatten(found)[0]:
        if isinstance(x, Tensor) and not x.is_meta:
            x.untyped_storage()._lies_on = device  # type: ignore[attr-defined]
    return found


def _device(x: Any) -> torch.device | None:
    """A name as a device, if it is that of one on the CPU."""
    if isinstance(x, torch.device):
        return x if x.type == "cpu" else None
    return torch.device(x) if isinstance(x, str) and x.startswith("cpu") else None


class NamedDevices(TorchFunctionMode):
    """Inside, devices of type "cpu" with different numbers are different devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return lies_on(args[0])
        given, tree = tree_flatten((args, kwargs))
        named = next((device for device in map(_device, given) if device is not None), None)
        args, kwargs = tree_unflatten([x if _device(x) is None else HERE for x in given], tree)
        operands = [x for x in given if isinstance(x, Tensor)]
        if func is Tensor.to:
            place = named or lies_on(operands[-1])
            found = func(*args, **kwargs)
            if found is operands[0] and place not in (lies_on(found), META):
                found = found.clone()
            return _put(found, place)
        # A number may come from anywhere, as on real devices.
        places = {lies_on(x) for x in operands if x.dim() > 0} or {lies_on(x) for x in operands[:1]} or {HERE}
        if len(places) > 1 and func not in BY_VALUE:
            raise RuntimeError(f"{getattr(func, '__name__', func)}: operands lie on {sorted(map(str, places))}")
        return _put(func(*args, **kwargs), named or places.pop())
