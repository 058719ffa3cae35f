"""Two devices on a machine that has none: tensors of the CPU which say that they lie elsewhere, and behave so.

    with Simulated():
        model = probes.load(families.model("llama"), device="lazy:0")

Everything is computed on the CPU. What a device adds is what a GPU would: operands that lie apart raise, results lie where
their operands do, `to` and `copy_` alone move, NumPy sees nothing, and a random generator belongs to one device. Scalars
and indices of the CPU may meet tensors of any device, as on CUDA. A kernel is chosen by its operands' device, so that
branches for "cpu" are not taken. Eigenvectors, singular vectors and columns of QR have other signs than the CPU's.

PyTorch calls these devices "lazy:0" and "lazy:1". It knows the name, no build has any, and their backward pass runs on the
caller's thread. A backend of one's own ("privateuse1") would change the whole process for good, and has one device.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from probes.run.precision import precise

KIND = "lazy"
HERE, ONE, OTHER = torch.device("cpu"), torch.device("lazy:0"), torch.device("lazy:1")
MEMORY = 1 << 33  # bytes of each device that are free
aten: Any = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default)
# Which axis of each result is turned: decompositions leave signs open.
TURNED = {
    aten._linalg_eigh.default: (None, -1),
    aten._linalg_svd.default: (-1, None, -2),
    aten.linalg_qr.default: (-1, -2),
}
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


class Elsewhere(Tensor):
    """Data of the CPU that say they lie on another device."""

    own: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, own: Tensor, place: torch.device | None = None, /, requires_grad: bool = False, **_: Any) -> Any:
        if place is None:  # accelerate makes parameters by the type of those that were there
            return nn.Parameter(own, requires_grad)
        more: Any = {"strides": own.stride(), "storage_offset": own.storage_offset(), "dtype": own.dtype}
        made: Any = torch.Tensor._make_wrapper_subclass(cls, own.size(), **more, device=place)
        made.own = own
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        """As on a GPU, which copies first."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """What accelerate knows tied weights by."""
        return self.own.data_ptr()

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:  # with these two, Module.to keeps ties
        return ["own"], self.device

    @staticmethod
    def __tensor_unflatten__(parts: Any, device: torch.device, *_: Any) -> Elsewhere:
        return Elsewhere(parts["own"], device)


def _place(func: Any, args: Any, kwargs: Any) -> torch.device:
    """Where the result lies.

    Raises:
        RuntimeError: operands lie apart.
    """
    wanted = kwargs.get("device")
    given = tree_leaves((args, kwargs))
    if func in INDEXED and args[0].device != HERE:
        given = [args[0], *args[2:3], *(x for x in args[1] if x is not None and x.device != HERE)]
    places = {x.device for x in given if isinstance(x, Tensor) and (x.dim() or x.device != HERE)}
    if len(places) > 1 and func not in MOVES:
        raise RuntimeError(f"{func}: operands lie on {sorted(map(str, places))}")
    if wanted is not None:
        return ONE if torch.device(wanted) == torch.device(KIND) else torch.device(wanted)
    return args[0].device if func in MOVES else next(iter(places), HERE)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    place = _place(func, args, kwargs)
    own_args, own = tree_map_only(Elsewhere, lambda x: x.own, (args, kwargs))
    if own.get("device") is not None and place.type == KIND:
        own["device"] = HERE
    made = func(*own_args, **own)
    if place.type == KIND:
        for one, axis in zip(made, TURNED[func], strict=True) if func in TURNED else ():
            if axis is not None:
                one.transpose(axis, -1)[..., ::2].neg_()
        made = tree_map_only(Tensor, lambda x: Elsewhere(x, place), made)
    if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments):
        return return_and_correct_aliasing(func, args, kwargs, made)
    return made


class Memory(TorchDispatchMode):
    """So many bytes fit into the CPU's memory, and no more, one tensor at a time; `largest` is the largest there was."""

    def __init__(self, bytes_: float = float("inf")) -> None:
        super().__init__()
        self.bytes, self.largest, self.refused = bytes_, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor._base is None:
                if tensor.numel() * tensor.itemsize > self.bytes:
                    self.refused += 1
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
                self.largest = max(self.largest, tensor.numel() * tensor.itemsize)
        return made


NO_KERNEL = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")  # beside views
READ = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")


class Launched(TorchDispatchMode):
    """Counts `operations` on tensors of such a device, and `reads`: how often the host waits for one's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        there = any(isinstance(x, Elsewhere) for x in tree_leaves((args, kwargs, made)))
        if there and not view and name not in NO_KERNEL:
            self.operations += 1
            here = isinstance(made, Tensor) and not isinstance(made, Elsewhere)
            masked = func in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
            self.reads += here or masked or name in READ
        return made


_Generator: Any = torch.Generator


class _Kind(type(torch.Generator)):
    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, _Generator)


class Generator(_Generator, metaclass=_Kind):
    """A generator of the CPU's numbers that says it belongs to a device."""

    def __new__(cls, device: Any = HERE) -> Any:
        made = super().__new__(cls)
        made.place = torch.device(device)
        return made

    def __init__(self, device: Any = HERE) -> None:
        pass

    device: Any = property(lambda self: self.place)


class _Draws(TorchFunctionMode):
    """A generator draws on its own device alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = (kwargs or {}).get("generator")
        if drawn is not None:
            place = kwargs.get("device") or next((x.device for x in args[:1] if isinstance(x, Tensor)), HERE)
            if torch.device(place) != drawn.device:
                raise RuntimeError(f"{func}: expected a generator of {place}, found one of {drawn.device}")
        return func(*args, **(kwargs or {}))


class Simulated(TorchDispatchMode):
    """Inside, "lazy:0" and "lazy:1" are devices. Each says that `memory` bytes are free, and no tensor may have more than
    `largest`. Without `float64` they refuse such numbers, as MPS does.
    """

    def __init__(self, memory: int = MEMORY, largest: int = MEMORY, float64: bool = True) -> None:
        super().__init__()
        self.memory, self.largest, self.float64, self._stack = memory, largest, float64, ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _computed(func, args, kwargs or {})
        for one in tree_leaves(made):
            if isinstance(one, Elsewhere) and not self.float64 and one.dtype in (torch.float64, torch.complex128):
                raise TypeError("Cannot convert a tensor to float64, which the device has not")
            if isinstance(one, Elsewhere) and one.own.untyped_storage().nbytes() > self.largest:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        return made

    def __enter__(self) -> Any:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        lifted, enabled = torch._C._only_lift_cpu_tensors(), torch.is_autocast_enabled
        torch._C._set_only_lift_cpu_tensors(True)  # without it, torch.tensor(1, device=...) bypasses every mode
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        patch.setattr(torch, "is_autocast_enabled", lambda *kind: KIND not in kind and enabled(*kind))
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(
            sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: ["cpu", KIND]
        )
        module = SimpleNamespace(mem_get_info=lambda device: (self.memory, MEMORY), is_available=lambda: True)
        module.memory_reserved = module.memory_allocated = lambda device: 0
        patch.setattr(torch, KIND, module, raising=False)
        self._stack.callback(precise.cache_clear)
        precise.cache_clear()
        self._stack.enter_context(_Draws())
        return super().__enter__()

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)
        self._stack.close()
