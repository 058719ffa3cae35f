"""Transformers models behind the view.

The caller's model is never touched. A view works on a *shadow* of it: a structural copy whose parameters and buffers are
the very same tensors, but whose modules, hooks and configuration are its own. Hooks and our attention function live on the
shadow, so there is nothing to put back after an error or an interruption. A table (`families`) says where
the families differ.

The shadow is made anew when a measurement begins, so that hooks and modules are those that the caller's model has then, as
its weights are. Where weights are copies (another device or dtype, merged adapters, a bridge of a transformers model), a
view is the model as it was loaded.

A model may be split over devices by accelerate (see `split`). What a view takes and gives then lies on the device where
block 0 runs, whichever device a block ran on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from ..errors import InputError
from . import split
from .behind import Continuation, Past, padded
from .checks import first_ids
from .families import POST_NORM, family_of, rope_types, spec_of
from .fresh import fresh_model, initialization_of
from .fused import Listening, attend, check_told
from .identity import Stored, stored, weights_hash
from .initialization import CONFIG, Initialization, Rule
from .shadow import attention_of, differentiable, obstacle, output_head, own_way, running_blocks, shadow
from .structure import Contents, moved, structure
from .view import Edit, Identity, Norm, Parts, Trace, Watched, never_fired

ATTENTION = "headwater"  # the name under which our attention function is registered with transformers
# Of a configuration: what says nothing about which model it is.
UNSAID = ("transformers_version", "_attn_implementation", "_experts_implementation", "_name_or_path", "dtype")


class _Reached(Exception):
    """Ends a forward pass early, once what was wanted has been seen."""


@dataclass(frozen=True)
class Described:
    """What a view is told about its model, for the model's provenance; the tokenizer is optional.

    Without a tokenizer prompts must be given as token ids.
    """

    tokenizer: Any | None = None
    name: str | None = None
    revision: str | None = None
    weights_file: str | None = None
    condition: str = "pretrained"  # "init" or "init-nope" with fresh weights
    initialization: Initialization | None = None  # what fresh weights were drawn from
    beyond: bool = False  # whether texts may be longer than the model was made for


def hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The stream among a block's arguments."""
    return args[0] if args else kwargs["hidden_states"]


def with_hidden(stream: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """A block's arguments with another stream."""
    return ((stream, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": stream})


class HuggingFaceView(Watched):
    """`View` over a transformers causal language model of a family in `families.FAMILIES`.

    Raises:
        InputError: the family is not supported, attention is a function that the user registered, or accelerate's hooks on
            the model change its weights in place.
    """

    backend = "transformers"

    def __init__(self, model: Any, **described: Any) -> None:
        self._described = Described(**described)
        self._identified: tuple[Any, Any, Identity] | None = None
        self.caller: Any = None  # the model that the view follows: every measurement begins with it as it is then
        self._contents: Contents | None = None  # what it was made of when it was last taken
        self._wrap(model)

    def renew(self) -> None:
        """Take the caller's model as it is now."""
        if self.caller is not None and (self._contents is None or not self._contents.still(self.caller)):
            self._contents = None  # a model that is refused is refused again
            self._wrap(self.caller)
            self._contents = Contents(self.caller)

    def _wrap(self, model: Any) -> None:
        family_of(model.config)
        name, known = getattr(model.config, "_attn_implementation", None), AttentionInterface()
        if name in known and name != ATTENTION and not known[name].__module__.startswith("transformers."):
            raise InputError(  # views compute softmax attention, whatever the function does
                f"the model's attention is the registered function '{name}', and probes compute softmax attention; if it is "
                "that, too, call model.set_attn_implementation('sdpa') first"
            )
        self._use(shadow(model))
        self._model.set_attn_implementation(ATTENTION)
        for module in self._model.modules():  # blocks of other models have other configurations
            if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                config._attn_implementation = ATTENTION
        for attention, window in zip(self._attentions, self.spec.windows, strict=True):
            if hasattr(attention, "sliding_window"):  # of a block in another's place; masks go by the place
                attention.sliding_window = window
        for attention in self._attentions if self._family.gated else ():
            attention.q_proj.register_forward_hook(partial(_keep_gate, attention))

    def _use(self, model: Any) -> None:
        """Run this shadow."""
        config, described = model.config, self._described
        self._model: Any = model.eval()
        self._family = family_of(config)
        self._decoder: Any = model.get_decoder()
        self._blocks = running_blocks(self._decoder, self._family)
        self._attentions = [attention_of(block, layer, self._family) for layer, block in enumerate(self._blocks)]
        self._final_norm: nn.Module = getattr(self._decoder, self._family.final_norm)
        self._name = described.name or config.name_or_path or f"in-memory {config.model_type}"
        self.initialization, self.tokenizer = described.initialization, described.tokenizer
        self._unknown = any(map(own_way, model.modules()))
        self.spec = spec_of(config)
        if described.beyond:  # texts longer than the checkpoint was made for
            if "learned" in self.spec.positional:
                most = self.spec.max_length
                raise InputError(f"beyond: {self._name} has {most} learned positions and no more; leave it out")
            self.spec = replace(self.spec, max_length=None)
        if self.spec.left_out is not None:  # recurrent layers would have to continue, too
            self.behind = None  # type: ignore[assignment, method-assign]
        if "longrope" in rope_types(config):  # frequencies are those of the whole text's length, written in every pass
            self.behind = None  # type: ignore[assignment, method-assign]
            for module in self._decoder.rotary_emb.modules():
                for name, buffer in list(module.named_buffers(recurse=False)):
                    module.register_buffer(name, buffer.clone(), persistent=False)
        parameter = next(model.parameters())
        self._split = split.is_split(model)
        self._held = () if self._split else tuple(model.parameters())
        self.device: torch.device = split.execution_device(self._blocks[0]) if self._split else parameter.device
        self.dtype: torch.dtype = parameter.dtype
        if self.dtype == torch.float64 and getattr(config, "_experts_implementation", None) is not None:
            model.set_experts_implementation("eager")  # the grouped products that are usual know no float64
        self.offloaded: bool = any(parameter.device != self.device for parameter in self._blocks.parameters())

    @property
    def identity(self) -> Identity:
        # The caller may change the weights. Those that accelerate offloads are new tensors in every pass.
        state = [(id(x), x.dtype, x.device, 0 if x.is_inference() else x._version) for x in self._held]
        if self._identified is None or self._identified[0] != state:
            self._identified = state, self._held, self._identity()  # kept, so that no id is used twice
        return self._identified[2]

    def _identity(self) -> Identity:
        config = {key: value for key, value in self._model.config.to_dict().items() if key not in UNSAID}
        return Identity(
            name=self._name,
            revision=self._described.revision,
            condition=self._described.condition,
            weights=weights_hash(self.stored()),
            config=json.dumps(config, sort_keys=True, default=str),
            backend=self.backend,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            initialization=None if self.initialization is None else self.initialization.name,
            weights_file=self._described.weights_file,
        )

    @property
    def first_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text, as training did.

        Many tokenizers name a BOS that they never put there: GPT-2 and Pythia the token between texts, SmolLM2 and Qwen2.5
        a token of their chats. Others put one there without a name for it, or several tokens.
        """
        return first_ids(self.tokenizer)

    def stored(self) -> Stored:
        """All numbers of the model by transformers' names, which its hash is taken over."""
        if self.spec.left_out is None:
            return stored(self._model)
        name, running = self._family.blocks, self._blocks
        setattr(self._decoder, name, nn.ModuleList(layer for run in running for layer in run.children()))
        try:
            return iter(list(stored(self._model)))
        finally:
            setattr(self._decoder, name, running)

    # -- forward passes

    def _deriving(self, module: nn.Module, given: Tensor) -> AbstractContextManager[None]:
        """Within it, modules that cut a derivative that is asked for are refused."""
        asked = self._unknown and given.requires_grad and torch.is_grad_enabled()
        return differentiable(module) if asked else nullcontext()

    def embed(self, tokens: Int[Tensor, "batch position"], **more: Tensor) -> Float[Tensor, "batch position d"]:
        """As `View`; `more` goes to the decoder."""
        seen: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(hidden(args, kwargs))
            raise _Reached

        handle = self._blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad(), suppress(_Reached):
                self._decoder(input_ids=tokens.to(self.device), use_cache=False, **more)
        finally:
            handle.remove()
        if not seen:
            raise never_fired(self.spec.family, "residual", 0)
        return seen[0].to(self.device)

    def residual(
        self, embeddings: Float[Tensor, "batch position d"], *, edits: Sequence[Edit] = ()
    ) -> Float[Tensor, "batch position d"]:
        return self._pass(embeddings, self._listening(edits))

    @torch.no_grad()
    def trace(
        self, embeddings: Float[Tensor, "batch position d"], *, attention: bool = False, edits: Sequence[Edit] = ()
    ) -> Trace:
        heard, calls = self._listening(edits, recording=attention), dict[int, Any]()
        last = self._pass(embeddings, heard, calls)
        streams, blocks, rotary = [], [], []
        for layer in range(self.spec.blocks):
            args, kwargs = calls[layer]
            stream = hidden(args, kwargs).detach().to(self.device)
            call = with_hidden(stream.new_empty(0), args, kwargs)  # so that a kept block does not keep its stream
            streams.append(stream)
            within = [edit for edit in edits if edit.layer == layer and edit.site != "residual"]
            blocks.append(partial(self._recorded, layer, call, within))
            rotary.append(self._rotation(layer, kwargs.get("position_embeddings"), stream))
        recorded = tuple(heard.attention[layer] for layer in range(self.spec.blocks)) if attention else ()
        return Trace((*streams, last), tuple(blocks), tuple(rotary), recorded)

    def _recorded(self, layer: int, call: tuple[Any, Any], edits: Sequence[Edit], stream: Tensor) -> Tensor:
        """A recorded block as a function of its stream, with the pass's edits of what attention reads and gives."""
        args, kwargs = with_hidden(stream, *call)
        heard = self._listening(edits)
        with self._attending(heard, (layer,)), self._deriving(self._blocks[layer], stream):
            output = self._blocks[layer](*args, **kwargs)
        heard.check((layer,))
        return (output[0] if isinstance(output, tuple) else output).to(self.device)

    def _rotation(self, layer: int, pair: Any, stream: Tensor) -> tuple[Tensor, Tensor] | None:
        if pair is None or self.spec.positional[layer] != "rope":
            return None
        cos, sin = (part[0].to(stream) for part in pair)  # OLMo's are in float32
        return (torch.cat([cos] * 2, -1), torch.cat([sin] * 2, -1)) if self._family.planes else (cos, sin)

    def behind(self, embeddings: Float[Tensor, "context position d"], *, edits: Sequence[Edit] = ()) -> Continuation:
        """As `Continues`."""
        kept: dict[tuple[str, int], Tensor] = {}

        def keep(site: str, layer: int, tensor: Tensor) -> Tensor:
            kept[site, layer] = tensor
            return tensor

        layers = range(self.spec.blocks)
        sites: tuple[Literal["key"], Literal["value"]] = ("key", "value")
        keeping = [Edit(site, layer, partial(keep, site, layer)) for layer in layers for site in sites]
        self.residual(embeddings, edits=[*edits, *keeping])
        keys, values = (tuple(kept[site, layer] for layer in layers) for site in sites)

        def run(rows: Sequence[Sequence[int]]) -> Tensor:
            tokens, length = padded(rows), embeddings.shape[1]
            at = torch.arange(length, length + tokens.shape[1], device=self.device).expand(len(tokens), -1)
            embedded = self.embed(tokens, position_ids=at)
            return self._pass(embedded, self._listening(edits, past=Past(keys, values)), position_ids=at)

        return run

    def norm(self, residual: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        return self._final_norm(residual).to(self.device)

    def unembed(self, normed: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows vocabulary"]:
        head = output_head(self._model)
        with self._deriving(head, normed):
            logits = head(normed).to(self.device)
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _listening(self, edits: Sequence[Edit], **more: Any) -> Listening:
        return Listening(self.spec, edits, self._watcher, self.device, **more)

    def _pass(
        self, embeddings: Tensor, heard: Listening, calls: dict[int, Any] | None = None, **more: Tensor
    ) -> Tensor:
        """The stream after the last block of one pass, with its edits; `calls` gets how every block was called."""
        layers, last = range(self.spec.blocks), list[Tensor]()

        def before(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            stream = embeddings if layer == 0 else hidden(args, kwargs)
            call = with_hidden(heard.edited(layer, "residual", stream), args, kwargs)
            if calls is not None:
                calls[layer] = call
            return call

        def at_end(module: nn.Module, args: tuple[Any, ...]) -> None:
            heard.fired.add((len(layers), "final residual"))
            last.append(args[0].to(self.device))

        with ExitStack() as ends:
            for layer in layers:
                hook = self._blocks[layer].register_forward_pre_hook(partial(before, layer), with_kwargs=True)
                ends.callback(hook.remove)
            ends.callback(self._final_norm.register_forward_pre_hook(at_end).remove)
            with self._attending(heard, layers), self._deriving(self._decoder, embeddings):
                # The hook at block 0 puts `embeddings` where the blocks begin, after scaling and added positions. What the
                # decoder itself receives only sets the shape.
                self._decoder(inputs_embeds=torch.zeros_like(embeddings), use_cache=False, **more)
        heard.check(layers, *((layer, "residual") for layer in layers), (len(layers), "final residual"))
        return last[-1]

    @contextmanager
    def _attending(self, heard: Listening, layers: Sequence[int]) -> Iterator[None]:
        """Listen to the attention of `layers`: record it, apply edits, call the watcher, as far as these are asked for."""
        heard.modules = {id(self._attentions[layer]): layer for layer in layers}
        token = listening.set(heard)
        try:
            yield
        finally:
            listening.reset(token)

    @torch.no_grad()
    def output_weights(self, layer: int) -> Float[Tensor, "head c d"]:
        # As the module itself computes it, adapters and other storage included.
        heads, projection = (self.spec.heads, self.spec.head_dim), self._output_projection(layer)
        ones = torch.eye(heads[0] * heads[1], device=self.device, dtype=self.dtype)[None]  # [1, H c, H c]
        nothing, all_of_it = projection(torch.zeros_like(ones[:, :1])), projection(ones)
        return (all_of_it - nothing)[0].unflatten(0, heads).to(self.device)

    @torch.no_grad()
    def output_norm(self, layer: int) -> tuple[Norm, Float[Tensor, " d"]] | None:
        module: Any = getattr(self._blocks[layer], POST_NORM, None)
        if self._family.post_norm is None or not hasattr(module, "weight"):  # a caller's stand-in for none has none
            return None
        bare: Any = split.gathered(module, self.device) if self._split else module
        nothing = torch.zeros(1, 1, self.spec.heads * self.spec.head_dim, device=self.device, dtype=self.dtype)
        bias = self._output_projection(layer)(nothing)[0, 0].to(self.device)
        return self._family.post_norm(getattr(bare, "original_component", bare)), bias

    def _output_projection(self, layer: int) -> nn.Module:
        return getattr(self._attentions[layer], self._family.output)

    # -- taking apart and starting afresh

    def parts(self, layer: int) -> Parts | None:
        if self.obstacle(layer) is not None:
            return None
        assert self._family.parts is not None
        block = self._blocks[layer]
        if self._split:
            block = split.gathered(block, self.device)
        return replace(self._family.parts(block), window=self.spec.windows[layer])

    def obstacle(self, layer: int) -> str | None:
        """What may keep the block from computing what its weights say; None if nothing does."""
        block = self._blocks[layer]
        if self._family.parts is None:
            return f"blocks of {self.spec.family} run whole"
        if type(block).__name__ != self._family.block:
            return f"class '{type(block).__qualname__}', where {self._family.block} is known"
        return obstacle(block)

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Rule = CONFIG) -> HuggingFaceView:
        """As `View` says. A split model's twin is split in the same way, drawn whole in main memory before that."""
        rule = initialization_of(self._model.config, initialization)
        model = fresh_model(self._model.config, seed, rule, positional=positional)
        model = structure(model, partial(moved, torch.device("cpu"), self.dtype))
        model = split.dispatched(model, self._model) if self._split else model.to(self.device)
        condition = "init" if positional else "init-nope"
        own = {"tokenizer": self.tokenizer, "name": self._name, "condition": condition, "initialization": rule}
        return self._twin(model, vars(self._described) | own)

    def _twin(self, model: Any, described: dict[str, Any]) -> HuggingFaceView:
        return type(self)(model, **described)


listening: ContextVar[Listening] = ContextVar("headwater_attention_listener")


def _keep_gate(attention: Any, module: nn.Module, args: Any, output: Tensor) -> None:
    """Until the attention function is called, which is not told the gates: each head has its queries, then its gates."""
    attention.gates = output.unflatten(-1, (-1, 2, attention.head_dim))[..., 1, :].transpose(1, 2)


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls in a shadow: the listening view may change q, k, v; attention is the model's."""
    check_told(module, attention_mask, kwargs)
    heard = listening.get()
    layer = heard.modules[id(module)]
    query, key, value = (heard.edited(layer, site, x) for site, x in (("query", query), ("key", key), ("value", value)))
    how = {"softcap": kwargs.get("softcap"), "window": kwargs.get("sliding_window"), "sink": kwargs.get("s_aux")}
    how["gate"] = None if (gates := vars(module).pop("gates", None)) is None else gates.sigmoid()
    attention = heard.multiplied(layer, query, key, value, kwargs.get("scaling"), **how)
    if heard.past is not None:
        attention = heard.past.attend(layer, attention)
    else:
        attention = attend(attention, normalizer=heard.watcher is not None)
    assert attention.output is not None
    heard.attended(layer, attention)
    return heard.edited(layer, "output", attention.output).transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks follow from positions here: causal, within the window that the attention function is told; no padding."""


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, _no_mask)  # type: ignore[arg-type]
