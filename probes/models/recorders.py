"""What callers' hooks keep (lists of activations, counters, running sums) is put back after a view's passes.

A hook is a part of the model's function, so that it runs in every pass of a view; but what it records is its caller's, and a
measurement makes passes that the caller knows nothing of. What hooks reach is remembered when a measurement begins: cells of
closures, names in their modules, defaults, objects that they are bound to, and containers within. It is put back at the
beginning of every pass, so that records do not pile up, and at the end. Within a pass hooks may hand things to each other.
What goes elsewhere (a file, a socket) cannot be put back; of tensors in lists only the lists are.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .hooks import hooks_on, own_forward

DEPTH = 6  # what hooks keep is nearer than so many containers within containers
COPIED = 1 << 26  # numbers of a tensor or array of the hooks' own that may be changed in place, such as a running sum
NEAR = 3  # how far such a one is from its hook: an object, its dictionary, the sum
# Whose objects are not put back: they change by themselves, or are no recorder's.
FOREIGN = {"torch", "transformers", "accelerate", "peft", "transformer_lens", "probes", *sys.stdlib_module_names} - {
    "__main__"
}


class Recorders:
    """What a caller's functions and objects on a model keep, as it was when the outermost `kept` was entered."""

    def __init__(self, model: nn.Module) -> None:
        modules, self._passing = list(model.modules()), False
        self._roots = [function for module in modules for _, function in hooks_on(module)]
        self._roots += [forward for module in modules if (forward := own_forward(module)) is not None]
        # Objects of packages that modules come from are the copy's own (see `structure`), and what quantized layers hold.
        packages = {type(module).__module__.partition(".")[0] for module in modules}
        objects = [x for module in modules for x in vars(module).values() if _own(x) and not isinstance(x, nn.Module)]
        self._roots += [x for x in objects if type(x).__module__.partition(".")[0] not in packages]
        self._before: list[Callable[[], None]] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, functions may record; on leaving, what they keep is what it was before."""
        if not self._roots or self._before is not None:
            yield
            return
        self._before = _remembered(self._roots)
        try:
            yield
        finally:
            self._put_back()
            self._before = None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """One pass: it finds what they kept before the measurement."""
        with self.kept():
            outermost, self._passing = not self._passing, True
            try:
                if outermost:
                    self._put_back()
                yield
            finally:
                self._passing = not outermost

    def _put_back(self) -> None:
        for undo in self._before or ():
            undo()


def _remembered(roots: Sequence[Any]) -> list[Callable[[], None]]:
    """What puts everything back that these reach."""
    undo: list[Callable[[], None]] = []
    seen: dict[int, Any] = {}  # kept, so that no id is used twice

    def look(x: Any, depth: int, *, listed: bool = False) -> None:
        if depth > DEPTH or id(x) in seen or isinstance(x, (str, int, float, type, ModuleType, nn.Module, type(None))):
            return
        seen[id(x)], within = x, ()
        if isinstance(x, FunctionType):
            within = _of_function(x, undo)
        elif isinstance(x, MethodType):
            within = (x.__self__, x.__func__)
        elif isinstance(x, functools.partial):
            within = (x.func, *x.args, *x.keywords.values())
        elif isinstance(x, (list, deque, set, dict)):
            within = list(x.values()) if isinstance(x, dict) else list(x)
            undo.append(functools.partial(_refill, x, copy.copy(x)))
        elif isinstance(x, tuple):
            within = x
        elif type(x) in (Tensor, np.ndarray):
            if not listed and depth <= NEAR and math.prod(x.shape) <= COPIED:
                undo.append(functools.partial(_overwrite, x, x.detach().clone() if isinstance(x, Tensor) else x.copy()))
        elif _own(x):
            within = [*vars(x).values(), *(y for y in vars(type(x)).values() if isinstance(y, FunctionType))]
            undo.append(functools.partial(_refill, vars(x), dict(vars(x))))
        for y in within:
            look(y, depth + 1, listed=listed or isinstance(x, (list, deque, tuple, set)))

    for root in roots:
        look(root, 0)
    return undo


def _own(x: Any) -> bool:
    """Whether an object is of a caller's making."""
    return hasattr(x, "__dict__") and (
        isinstance(x, SimpleNamespace) or type(x).__module__.partition(".")[0] not in FOREIGN
    )


def _of_function(function: FunctionType, undo: list[Callable[[], None]]) -> list[Any]:
    """What a function reaches by name, in other modules no functions; names that it may bind anew are noted."""
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
        undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
    names = function.__globals__
    for name in set(function.__code__.co_names) & set(names):
        x = names[name]
        if not isinstance(x, FunctionType) or x.__globals__ is names:
            held.append(x)
            undo.append(functools.partial(names.__setitem__, name, x))
    return held


def _refill(container: Any, before: Any) -> None:
    """Make the container hold what it held, where it does not."""
    now, then = ([*x.items()] if isinstance(x, dict) else [(y, None) for y in x] for x in (container, before))
    if len(now) == len(then) and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, then, strict=True)):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(before)
    else:
        container.update(before)


def _overwrite(values: Any, before: Any) -> None:
    if isinstance(values, np.ndarray):
        np.copyto(values, before)
    elif not torch.equal(values, before):
        with torch.inference_mode(values.is_inference()), torch.no_grad():
            values.copy_(before)
