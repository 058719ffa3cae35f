"""Structural copies: modules, their dictionaries of hooks and the configuration are the copy's own, tensors are the model's.

A copy costs no memory and isolates what a view changes. Only what a forward pass is made of is copied: modules, the
containers on them, bound methods of modules, the configuration, and the objects by which accelerate, and packages with
modules of their own (TransformerLens, bitsandbytes, PEFT), run modules. Whatever else a caller keeps on a module (a lock, an
open file, a recorder) is the very same object, and so is what a function that stands in the place of a forward pass calls.
"""

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from operator import is_
from types import MethodType
from typing import Any

import torch
from accelerate.hooks import ModelHook
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
NESTED = (*CONTAINERS, tuple)
KNOWN = ("torch", "transformers")  # packages whose modules a family's blocks are made of
PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # tensors that are their numbers and no more
FLAGS = (bool, int, float, str, type(None))  # what may be noted on such a tensor


def structure(root: nn.Module, tensor: Callable[[Tensor], Tensor] | None = None) -> Any:
    """The structural copy of a module.

    Args:
        root: stays as it is.
        tensor: what stands in the place of each parameter and buffer that has values; `usable` unless given.
    """
    return _Copy(root, usable if tensor is None else tensor).of(root)


def keeps_state(tensor: Tensor) -> bool:
    """Whether a tensor has more to it than its own numbers, such as the scales of its codes.

    Packages that quantize keep that on the tensor, some until the first pass, which moves it to the module.
    """
    if is_traceable_wrapper_subclass(tensor):
        return len(tensor.__tensor_flatten__()[0]) > 1
    return type(tensor) not in PLAIN or not all(isinstance(value, FLAGS) for value in vars(tensor).values())


def usable(tensor: Tensor) -> Tensor:
    """The tensor itself, or one over the same memory where it was made under inference mode, which autograd refuses."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return nn.Parameter(plain, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain


def moved(device: torch.device, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The tensor on another device, a parameter also in another dtype; buffers keep theirs, as in loading.

    Rotary frequencies rounded to bfloat16, as `model.to` would have them, turn keys by a wrong angle far into a prompt.
    """
    if not isinstance(tensor, nn.Parameter):
        return usable(tensor).to(device)
    there = usable(tensor).detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype)
    return nn.Parameter(there, requires_grad=tensor.requires_grad)


class Contents:
    """What a model was made of when it was copied, which tells whether another copy would be the same.

    A copy of two dozen blocks takes longer than a pass on a GPU. Where modules of other packages, accelerate's hooks,
    partial functions or tensors of inference mode stand in the model, nothing counts as the same.
    """

    def __init__(self, root: nn.Module) -> None:
        self._objects, self._configs = _objects(root)
        known = all(type(module).__module__.partition(".")[0] in KNOWN for module in root.modules())
        unclear = (ModelHook, functools.partial)
        clear = not any(isinstance(x, unclear) or (isinstance(x, Tensor) and x.is_inference()) for x in self._objects)
        self._known = known and clear
        self._tensors = [n for n, x in enumerate(self._objects) if isinstance(x, Tensor)]
        self._kinds = self._kinds_of(self._objects)
        self._fields = [copy.deepcopy(vars(config)) for config in self._configs]

    def still(self, root: nn.Module) -> bool:
        """Whether modules, what they keep, their hooks and configurations are those of then."""
        objects, configs = _objects(root) if self._known else ([], [])
        same = self._known and len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        if not same or self._kinds_of(objects) != self._kinds:
            return False
        try:
            return all(vars(now) == then for now, then in zip(configs, self._fields, strict=True))
        except (RuntimeError, ValueError):  # a caller's tensors among them are neither equal nor unequal as a whole
            return False

    def _kinds_of(self, objects: list[Any]) -> list[Any]:
        """Where tensors lie, and in what dtype: `Module.to` changes both in the same parameters."""
        return [(objects[n].device, objects[n].dtype) for n in self._tensors]


def _objects(root: nn.Module) -> tuple[list[Any], list[Any]]:
    """Everything on a model's modules and in their containers, in one order, and the configurations among it.

    Modules whose methods are there, as hooks, count as the model's.
    """
    found, configs, seen, waiting = list[Any](), list[Any](), set[int](), list[Any]([root])
    while waiting:
        whole = waiting.pop()
        if id(whole) in seen:
            continue
        seen.add(id(whole))
        if _is_configuration(type(whole)):
            configs.append(whole)
            continue
        fields = vars(whole) if isinstance(whole, nn.Module) else whole
        values = list(fields.values() if isinstance(fields, dict) else fields)
        found += [type(whole), *fields, *values]
        values = [x.__self__ if type(x) is MethodType else x for x in values]
        waiting += [x for x in values if _holds(type(x)) and (type(x) not in NESTED or x)]
    return found, configs


@functools.cache
def _holds(kind: type) -> bool:
    """Whether there are objects in it that a copy has anew."""
    return kind in NESTED or issubclass(kind, nn.Module) or _is_configuration(kind)


@functools.cache
def _is_configuration(kind: type) -> bool:
    """Whether it is transformers'."""
    return getattr(kind, "model_type", None) is not None and hasattr(kind, "to_dict")


class _Copy:
    """What was copied already, by id; the originals are kept, so that no id is used twice."""

    def __init__(self, root: nn.Module, tensor: Callable[[Tensor], Tensor]) -> None:
        self._tensor = tensor
        packages = {type(module).__module__.partition(".")[0] for module in root.modules()}
        self._packages = tuple(f"{package}." for package in packages.difference(KNOWN))
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, x: Any) -> Any:
        if id(x) in self._made:
            return self._made[id(x)][1]
        kind = type(x)
        if isinstance(x, nn.Module) and not isinstance(x, torch.jit.ScriptModule):
            return self._module(x)
        if kind in CONTAINERS:
            return self._container(x)
        if _is_configuration(kind):
            return self._keep(x, copy.deepcopy(x))
        if isinstance(x, nn.Parameter):  # accelerate makes new "meta" parameters in every pass: the copy has its own
            return self._keep(x, copy.deepcopy(x)) if x.is_meta else self._stored(x)
        runs = f"{kind.__module__}.".startswith(self._packages) and kind.__new__ is object.__new__
        if isinstance(x, ModelHook) or runs:
            return self._filled(x, vars(x))
        if kind is tuple:
            return tuple(map(self.of, x))  # type: ignore[arg-type]
        if kind is MethodType:
            return MethodType(x.__func__, self.of(x.__self__))
        if kind is functools.partial:
            made = functools.partial(
                x.func, *map(self.of, x.args), **{key: self.of(y) for key, y in x.keywords.items()}
            )
            vars(made).update(self.of(vars(x)))
            return made
        return x

    def _keep(self, x: Any, made: Any) -> Any:
        self._made[id(x)] = x, made
        return made

    def _stored(self, x: Tensor) -> Tensor:
        """A parameter or buffer: of one with state, another one over the same memory, whose state is the copy's own."""
        made = self._tensor(x)
        if made is not x or is_traceable_wrapper_subclass(x) or not keeps_state(x):
            return self._keep(x, made)
        self._keep(x, made := Tensor._make_subclass(type(x), x.detach(), x.requires_grad))
        vars(made).update({key: self.of(y) for key, y in vars(x).items()})
        return made

    def _container(self, x: Any) -> Any:
        made = self._keep(x, x.copy())
        if isinstance(x, dict):
            made.update({key: self.of(y) for key, y in x.items()})
        elif not isinstance(x, set):
            made.clear()
            made.extend(map(self.of, x))
        return made

    def _filled(self, x: Any, fields: dict[str, Any]) -> Any:
        made = self._keep(x, object.__new__(type(x)))
        vars(made).update({key: self.of(y) for key, y in fields.items()})
        return made

    def _module(self, module: nn.Module) -> Any:
        for buffer in vars(module)["_buffers"].values():
            if buffer is not None and not buffer.is_meta and id(buffer) not in self._made:
                self._stored(buffer)
        # What `module.compile()` keeps is bound to the original, and not in a module's state either.
        return self._filled(module, {key: x for key, x in vars(module).items() if key != "_compiled_call_impl"})
