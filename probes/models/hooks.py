"""What callers put on a model: hooks, forward passes and layers of their own; and whether that changed since `probes.load`.

A view works on a structural copy made by `probes.load`. What was on the model then acts in the copy, too. What is put on
the model or removed later does not. `Origin` remembers what was there, and refuses a copy that no longer stands for the
model.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import InputError
from . import split
from .foreign import unknown

# Modules whose hooks are no caller's. Those by which transformers collects `output_hidden_states` and `output_attentions`
# are set when these are first asked for, stay for good, and change nothing that passes; TransformerLens's belong to its
# bridges, which set some of them in their first pass.
OBSERVING = ("transformers.utils.output_capturing", "transformer_lens.model_bridge.")
# Where PyTorch keeps a module's hooks, and what they are called here. Those of the backward pass change derivatives.
KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # what a layer of PEFT's keeps about its own


def hooks_on(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(kind, function) of every hook that may change what the module computes or its derivative."""
    if not any(vars(module)[where] for where in KINDS):
        return
    # What a hook point of TransformerLens gives PyTorch is wrapped; it knows what its user gave.
    handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
    given = {handle.hook.id: handle.user_hook for handle in handles}
    for where, kind in KINDS.items():
        for key, function in vars(module)[where].items():
            if not str(getattr(function, "__module__", "")).startswith(OBSERVING):
                yield kind, given.get(key, function)


def own_forward(module: nn.Module) -> Any:
    """A forward pass put in the place of the class's own, or None; neither accelerate's nor a compiled one counts."""
    found = vars(module).get("forward")
    if found is None or split.only_aligned(module):
        return None
    within = getattr(found, "_torchdynamo_orig_callable", found)
    return None if getattr(within, "__func__", None) is type(module).forward else found


def obstacle(block: nn.Module) -> str | None:
    """What may keep a block of a known class from computing what its weights say; None if nothing does."""
    for name, module in block.named_modules():
        kind = type(module)
        for hook, function in hooks_on(module):
            return f"{hook} '{named(function)}' on its {name or kind.__name__}"
        forward = own_forward(module)
        if forward is not None:
            return f"forward pass '{named(forward)}' on its {name or kind.__name__}"
        if (other := unknown(module)) is not None:
            return f"{other} {name}"
    return None


def named(function: Any) -> str:
    """A hook by its module and name, as its author wrote it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None)}.{name}"


class _Noted(NamedTuple):
    """One module of the caller's model as it was."""

    module: weakref.ref[nn.Module]
    hooks: list[tuple[str, Any]]
    forward: Any
    adapters: list[str]
    weights: list[tuple[Any, ...]]

    @classmethod
    def of(cls, module: nn.Module, shared: bool) -> _Noted:
        own = vars(module)
        # accelerate makes new parameters in every pass
        held = () if "_hf_hook" in own else [weight for weight in own["_parameters"].values() if weight is not None]
        weights = [(id(weight), weight.dtype, weight.device, 0 if shared else version(weight)) for weight in held]
        adapters = [str(own[key]) for key in ADAPTERS if key in own]
        return cls(weakref.ref(module), list(hooks_on(module)), own_forward(module), adapters, weights)


class Origin:
    """The caller's model behind a view: remembered as it was, not kept alive.

    Args:
        model: the caller's.
        shared: whether the view's copy has the very same parameters, so that it follows changes in place.
    """

    def __init__(self, model: nn.Module, *, shared: bool) -> None:
        self._model, self._shared = weakref.ref(model), shared
        self._before = self._noted(model)

    @property
    def model(self) -> nn.Module | None:
        """The caller's model, as long as the caller keeps it."""
        return self._model()

    def _noted(self, model: nn.Module) -> dict[str, _Noted]:
        return {name: _Noted.of(module, self._shared) for name, module in model.named_modules()}

    def check(self) -> None:
        """Refuse a model that has changed in a way the view's copy does not follow.

        Raises:
            InputError: a hook, a forward pass or a module was put there or taken away, or weights were replaced.
        """
        model = self._model()
        now = self._before if model is None else self._noted(model)
        for name in () if now == self._before else self._before | now:
            found = _difference(name, self._before.get(name), now.get(name))
            if found:
                raise InputError(
                    f"the {type(model).__name__} was changed after it was loaded ({found}), and its view does not follow; "
                    "load it again"
                )


def _difference(name: str, before: _Noted | None, after: _Noted | None) -> str | None:
    if before is None or after is None or before.module != after.module:
        return f"{'new' if before is None else 'removed' if after is None else 'replaced'} module {name}"
    place = f"on its {name}" if name else "on it"
    for word, some, others in (("new", after.hooks, before.hooks), ("removed", before.hooks, after.hooks)):
        for kind, function in some:
            if (kind, function) not in others:
                return f"{word} {kind} '{named(function)}' {place}"
    if before.hooks != after.hooks:
        return f"hooks in another order {place}"
    for what in ("forward", "adapters", "weights"):
        if getattr(before, what) != getattr(after, what):
            return f"other {'forward pass' if what == 'forward' else what} {place}"
    return None


def version(weight: Tensor) -> int:
    """How often the weight was changed in place, as PyTorch counts; changes through `.data` are not counted."""
    return 0 if weight.is_inference() else weight._version
