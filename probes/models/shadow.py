"""What a view runs in the place of a caller's model: a structural copy, with the caller's hooks and without wrappers.

The copy is made when a measurement begins (see `huggingface`), so that it is the model as it is then. A caller's hooks and
forward passes are a part of the model's function and act in the copy, too: what they record, they record of a measurement.

Modules that compute in a way of their own (other packages', quantized ones, a caller's) run as they are. What their weights
say is not known, so that blocks with them stay whole. One that gives back no derivative, or torch's stand-in for one, is
refused where a derivative is asked for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..errors import InputError
from . import split
from .families import Family, runs_of
from .structure import KNOWN, keeps_state, structure

OBSERVING = "transformers.utils.output_capturing"  # whose hooks stay for good and change nothing
# Where PyTorch keeps a module's hooks; those of the backward pass change derivatives.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
REPLACED = ("torch.ao.", "torch.nn.quantized")  # modules of torch's that stand in the place of its plain ones


def shadow(model: Any) -> Any:
    """A structural copy sharing every parameter and buffer with `model`: costs no memory, isolates hooks and config.

    Forward passes that `torch.compile` put on its modules are gone.

    Raises:
        InputError: accelerate's hooks on it would change the parameters themselves, modules of it are compiled alone, or
            it is not decompressed yet.
    """
    if hasattr(model, "ct_decompress_hook"):  # a view runs the decoder, and would take codes for weights
        raise InputError(
            "compressed-tensors decompresses this model in its first pass; run one, or load it with "
            "CompressedTensorsConfig(dequantize=True)"
        )
    copied = structure(model)
    for module in copied.modules():
        if "_orig_mod" in module._modules:
            raise InputError("modules were compiled one by one; compile the whole model, or measure before compiling")
        if "forward" in vars(module) and not split.hooks(module) and replaced_forward(module) is None:
            del module.forward  # compiled, and bound to the caller's module
    return copied


def hooked(module: nn.Module) -> bool:
    """Whether it has hooks that may change what it computes or its derivative."""
    hooks = (hook for where in HOOKS for hook in vars(module)[where].values())
    return any(not str(getattr(hook, "__module__", "")).startswith(OBSERVING) for hook in hooks)


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
        for put, what in ((hooked(module), "hook"), (replaced_forward(module) is not None, "forward pass")):
            if put:
                return f"a caller's {what} on its {name or type(module).__name__}"
        if (other := unknown(module)) is not None:
            return f"{other} {name}"
    return None


def unwrapped(model: Any) -> Any:
    """The model inside, which is the model itself where nothing is around it; nothing is copied."""
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:  # compiled code is ignored: a view runs modules
        return unwrapped(model._orig_mod)
    if not (type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model")):
        return model
    adapted: Any = model
    for name, config in adapted.peft_config.items():
        if config.is_prompt_learning:
            raise InputError(
                f"adapter '{name}' of the {type(model).__name__} puts trained vectors before the tokens, which probes "
                "have no place for; give the model without it"
            )
    return unwrapped(adapted.get_base_model())


def replaced(module: nn.Module) -> bool:
    """Whether it is one of torch's that stands in the place of a plain one, quantized."""
    return type(module).__module__.startswith(REPLACED)


def unknown(module: nn.Module) -> str | None:
    """What makes a module compute in a way that its class, if it is one of torch's or transformers', does not say."""
    kind = type(module)
    # Quantized layers are linear in another way than nn.Linear; layers of other packages are not known here.
    if (
        kind.__module__.partition(".")[0] not in (*KNOWN, "transformer_lens")
        or replaced(module)
        or (isinstance(module, nn.Linear) and kind is not nn.Linear)
    ):
        return f"module '{kind.__module__}.{kind.__qualname__}' as its"
    for name, weight in module._parameters.items():
        if weight is not None and (keeps_state(weight) or not weight.is_floating_point() or weight.dtype.itemsize == 1):
            return f"'{type(weight).__module__}.{type(weight).__qualname__}' as the {name} of its"
    return None


def own_way(module: nn.Module) -> bool:
    """Whether it is not known what a module computes: it is unknown, or runs another forward pass than its class's."""
    return unknown(module) is not None or replaced_forward(module) is not None


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Passes within it are differentiated: a module that is not known and cuts the derivative, or has torch's stand-in for
    one, is an `InputError`. What flows through the stream beside it would pass for the whole derivative.
    """

    def check(module: nn.Module, args: Any, output: Any) -> None:
        asked = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        if not asked or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if not _leads_back(output, asked):
            put = "the forward pass put on " * (replaced_forward(module) is not None)
            kind = type(module.weight) if type(module) is nn.Linear and not put else type(module)
            raise InputError(
                f"{put}'{kind.__module__}.{kind.__qualname__}' has no derivative, which this measurement takes; measure "
                "what needs none (sinks, leakage), or give the model unquantized"
            )

    handles = [module.register_forward_hook(check) for module in model.modules() if own_way(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leads_back(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether a module's output has a derivative by its input: no step between them is torch's stand-in for a derivative."""
    begin = {get_gradient_edge(x).node for x in inputs}
    waiting, seen = [output.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "NotImplemented" in node.name():
            return False
        waiting += () if node in begin else (one for one, _ in node.next_functions)
    return not begin.isdisjoint(seen)


class Run(nn.ModuleList):
    """Layers of a hybrid as one block, which attends once."""

    def forward(self, stream: Tensor, **how: Any) -> Tensor:
        for layer in self:
            stream = layer(stream, **how)  # no text is padded, so that every layer's mask is None
        return stream


def running_blocks(decoder: Any, family: Family) -> nn.ModuleList:
    """The blocks of a shadow that a pass runs."""
    blocks, config = getattr(decoder, family.blocks), decoder.config
    if len(blocks) != config.num_hidden_layers:
        raise InputError(
            f"the model has {len(blocks)} blocks where its config says {config.num_hidden_layers}; "
            "make num_hidden_layers and the config's lists by block agree with it"
        )
    if len(runs := runs_of(config)) < len(blocks):
        blocks = nn.ModuleList(Run(blocks[n] for n in run) for run in runs)
        setattr(decoder, family.blocks, blocks)
    attentions = [attention_of(block, n, family) for n, block in enumerate(blocks)]
    if len(set(map(id, attentions))) < len(blocks):
        raise InputError("a block, or its attention, stands at two places of the model; give each a copy of its own")
    for one, on in zip(attentions, getattr(config, family.rotated or "", ()), strict=False):
        if getattr(getattr(one, "original_component", one), "use_rope", on) != on:
            raise InputError(f"blocks rotate otherwise than {family.rotated} of the model's config says; make it agree")
    return blocks


def attention_of(block: nn.Module, layer: int, family: Family) -> Any:
    """A block's attention itself, whatever modules of a caller's are around block or attention."""
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
    """What makes next-token logits of normed rows."""
    head, vocabulary = model.get_output_embeddings(), model.config.vocab_size
    if head is None or isinstance(head, nn.Identity) or getattr(head, "out_features", vocabulary) < vocabulary:
        raise InputError(
            f"the {type(model).__name__} has no output head, so that it gives no logits of next tokens; give the model with "
            "its head (AutoModelForCausalLM), or ask for what is read off the stream: readout residual or normed, no "
            "effect, no erase"
        )
    return head
