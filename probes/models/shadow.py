"""What a view runs in the place of a caller's model: a structural copy, with the caller's hooks and without wrappers.

The copy is made when a measurement begins (see `huggingface`), so that it is the model as it is then. A caller's hooks and
forward passes are a part of the model's function and act in the copy, too. What they record is the caller's: a pass puts
back what it changed of that. What goes elsewhere (a file, a socket) cannot be put back.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from . import split
from .families import Family
from .foreign import unknown
from .structure import structure
from .wrappers import unpack, unwrap_within

# Modules whose hooks are no caller's: transformers collects `output_hidden_states` by hooks that stay for good, and bridges
# of TransformerLens set some in their first pass.
OBSERVING = ("transformers.utils.output_capturing", "transformer_lens.model_bridge.")
# Where PyTorch keeps a module's hooks, and what they are called here. Those of the backward pass change derivatives.
KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
DEPTH = 6  # what hooks keep is nearer than so many containers within containers
# Whose objects are not put back: they change by themselves, or are no recorder's.
FOREIGN = {"torch", "transformers", "accelerate", "peft", "transformer_lens", "probes", *sys.stdlib_module_names} - {
    "__main__"
}


def shadow(model: Any) -> Any:
    """A structural copy sharing every parameter and buffer with `model`: costs no memory, isolates hooks and config.

    Its modules have lost the wrappers of `torch.compile` and PEFT; layers with adapters have weights of their own.

    Raises:
        InputError: accelerate's hooks on it would change the parameters themselves, or an adapter cannot be merged.
    """
    copied = structure(model)
    split.unbind(copied)
    unwrap_within(copied)
    for module in copied.modules():
        unpack(module)
        if "forward" in vars(module) and not split.hooks(module) and replaced_forward(module) is None:
            del module.forward  # compiled, and bound to the caller's module
    return copied


def hooks_on(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(kind, function) of every hook that may change what the module computes or its derivative."""
    # What a hook point of TransformerLens gives PyTorch is wrapped; it knows what its user gave.
    handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
    given = {handle.hook.id: handle.user_hook for handle in handles}
    for where, kind in KINDS.items():
        for key, function in vars(module)[where].items():
            if not str(getattr(function, "__module__", "")).startswith(OBSERVING):
                yield kind, given.get(key, function)


def replaced_forward(module: nn.Module) -> Any:
    """A forward pass put in the place of the class's own, or None; neither accelerate's nor a compiled one counts."""
    forward = vars(module).get("forward")
    if forward is None or split.only_aligned(module):
        return None
    within = getattr(forward, "_torchdynamo_orig_callable", forward)
    return None if getattr(within, "__func__", None) is type(module).forward else forward


def obstacle(block: nn.Module) -> str | None:
    """What may keep a block of a known class from computing what its weights say; None if nothing does."""
    for name, module in block.named_modules():
        forward, place = replaced_forward(module), name or type(module).__name__
        put = [*hooks_on(module), *([] if forward is None else [("forward pass", forward)])]
        if put:
            return f"{put[0][0]} '{_named(put[0][1])}' on its {place}"
        if (other := unknown(module)) is not None:
            return f"{other} {name}"
    return None


def _named(function: Any) -> str:
    """A hook by its module and name, as its author wrote it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None)}.{name}"


# -------------------------------------------------------------------------------------------------------------- blocks


def running_blocks(decoder: Any, family: Family) -> nn.ModuleList:
    """The blocks of a shadow that a pass runs; its configuration comes to say so, too.

    A block, or a part of one, may stand at several places: each gets modules of its own, over the same weights.

    Raises:
        InputError: no block, or more than the configuration says.
    """
    listed, config = getattr(decoder, family.blocks), decoder.config
    if not isinstance(listed, nn.Module):
        raise InputError(f"the model's blocks are in a {type(listed).__name__}; put them into a torch.nn.ModuleList")
    if not 0 < len(listed._modules) <= config.num_hidden_layers:
        raise InputError(
            f"the model has {len(listed._modules)} blocks where its config says {config.num_hidden_layers}; "
            "make num_hidden_layers and the config's lists by block agree with it"
        )
    seen: set[int] = set()
    for name, block in listed._modules.items():
        if seen & set(map(id, block.modules())):  # type: ignore[union-attr]
            listed._modules[name] = structure(block)  # type: ignore[arg-type]
        seen |= set(map(id, listed._modules[name].modules()))  # type: ignore[union-attr]
    blocks: list[Any] = list(listed._modules.values())
    kinds, config.num_hidden_layers = getattr(config, "layer_types", None), len(blocks)
    if kinds is not None:
        config.layer_types = kinds[: len(blocks)]
    if family.rotated is not None:  # blocks keep that wherever they stand
        attentions = [attention_of(block, n, family) for n, block in enumerate(blocks)]
        flags = [int(getattr(one, "original_component", one).use_rope) for one in attentions]
        setattr(config, family.rotated, flags)
    return listed if isinstance(listed, nn.ModuleList) else nn.ModuleList(blocks)


def attention_of(block: nn.Module, layer: int, family: Family) -> Any:
    """A block's attention itself, whatever modules of a caller's are around block or attention.

    Raises:
        InputError: the block has none.
    """
    outer = next((part for part in block.modules() if family.attention in part._modules), None)
    within = () if outer is None else getattr(outer, family.attention).modules()
    attention = next((part for part in within if {family.output, "o"} & set(part._modules)), None)
    if attention is None:
        raise InputError(
            f"block {layer} is a {type(block).__qualname__} without attention ('{family.attention}'); take what does "
            "nothing out of the model's list, or give a model whose blocks have attention"
        )
    return attention


def output_head(model: Any) -> nn.Module:
    """What makes next-token logits of normed rows.

    Raises:
        InputError: the model has no such thing.
    """
    head, vocabulary = model.get_output_embeddings(), model.config.vocab_size
    if head is None or isinstance(head, nn.Identity) or getattr(head, "out_features", vocabulary) < vocabulary:
        raise InputError(
            f"the {type(model).__name__} has no output head, so that it gives no logits of next tokens; give the model with "
            "its head (AutoModelForCausalLM), or ask for what is read off the stream: readout residual or normed, no "
            "effect, no erase"
        )
    return head


# ----------------------------------------------------------------------------------------------------------- recorders


def recorders(model: nn.Module) -> list[Any]:
    """A caller's functions and objects on a model, which may keep what passes."""
    modules = list(model.modules())
    roots = [function for module in modules for _, function in hooks_on(module)]
    roots += [forward for module in modules if (forward := replaced_forward(module)) is not None]
    # Objects of packages that modules come from are the copy's own (see `structure`), and what quantized layers hold.
    packages = {type(module).__module__.partition(".")[0] for module in modules}
    objects = [x for module in modules for x in vars(module).values() if not isinstance(x, nn.Module) and _of_caller(x)]
    return roots + [x for x in objects if type(x).__module__.partition(".")[0] not in packages]


@contextmanager
def unrecorded(roots: Sequence[Any]) -> Iterator[None]:
    """On leaving, containers, objects and running sums that these reach hold what they held before."""
    before = _reached(roots)
    try:
        yield
    finally:
        for x, held in before:
            _put_back(x, held)


def _reached(roots: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(container or tensor, a copy of it) for all that functions and objects lead to."""
    seen: dict[int, Any] = {}  # kept, so that no id is used twice
    left, copies = [(root, 0) for root in roots], []
    while left:
        x, depth = left.pop()
        if depth > DEPTH or id(x) in seen or isinstance(x, (str, int, float, type, ModuleType, nn.Module, type(None))):
            continue
        seen[id(x)], within = x, []
        if isinstance(x, FunctionType):
            within = _of_function(x)
        elif isinstance(x, MethodType):
            within = [x.__self__, x.__func__]
        elif isinstance(x, functools.partial):
            within = [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, dict):
            within = list(x.values())
        elif isinstance(x, (list, tuple, deque, set)):
            within = [y for y in x if not isinstance(y, Tensor)]  # those are too many to copy
        elif type(x) is not Tensor and _of_caller(x):
            within = [vars(x), *(y for y in vars(type(x)).values() if isinstance(y, FunctionType))]
        if isinstance(x, (dict, list, deque, set)):
            copies.append((x, copy.copy(x)))
        elif type(x) is Tensor:
            copies.append((x, x.detach().clone()))
        left += [(y, depth + 1) for y in within]
    return copies


def _of_caller(x: Any) -> bool:
    """Whether an object is of a caller's making."""
    return hasattr(x, "__dict__") and (
        isinstance(x, SimpleNamespace) or type(x).__module__.partition(".")[0] not in FOREIGN
    )


def _of_function(function: FunctionType) -> list[Any]:
    """What a function reaches: its defaults, its closure, and by name; in other modules no functions."""
    names, cells = function.__globals__, function.__closure__ or ()
    by_name = [names[name] for name in set(function.__code__.co_names) & set(names)]
    within = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    within += [x for x in by_name if not isinstance(x, FunctionType) or x.__globals__ is names]
    for cell in cells:
        with suppress(ValueError):  # not bound yet
            within.append(cell.cell_contents)
    return within


def _put_back(x: Any, held: Any) -> None:
    """What never changed is left alone, so that others may be going through it."""
    if isinstance(x, Tensor):
        if not torch.equal(x, held):
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                x.copy_(held)
        return
    now, then = ([*y.items()] if isinstance(y, dict) else [(z, None) for z in y] for y in (x, held))
    if len(now) != len(then) or any(a[0] is not b[0] or a[1] is not b[1] for a, b in zip(now, then, strict=True)):
        x.clear()
        (x.extend if isinstance(x, (list, deque)) else x.update)(held)
