"""Transformers models behind the view.

The caller's model is never touched. A view works on a *shadow* of it: a structural copy whose parameters and buffers are
the very same tensors, but whose modules, hooks and configuration are its own. Hooks and the attention function below live
on the shadow, so there is nothing to put back after an error or an interruption.

Where the families differ stands in one table, `FAMILIES`; the code below it has no branches by family.

A model may be split over devices by accelerate (see `split`). What a view takes and gives then lies on the device where
block 0 runs, whichever device a block ran on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN

from ..errors import InputError
from . import split
from .fused import attend, check_edits, check_told
from .hooks import Origin, obstacle, own_forward, version
from .initialization import ASSUMED, CONFIG, KINDS, Initialization, Rule, of_config, resolve
from .view import (
    Attention,
    Birth,
    Edit,
    Identity,
    Linear,
    Norm,
    Parts,
    PositionalEncoding,
    Site,
    Spec,
    Trace,
    Watcher,
    weights_hash,
)
from .wrappers import unwrap_within

ATTENTION = "headwater"  # the name under which our attention function is registered with transformers


# ---------------------------------------------------------------------------------------------------- families


def _rms(module: Any, *, plus_one: bool = False) -> Norm:
    eps = getattr(module, "variance_epsilon", None)
    weight = module.weight
    return Norm("rms", weight + 1 if plus_one else weight, None, module.eps if eps is None else eps)


def _layer_norm(module: nn.LayerNorm) -> Norm:
    return Norm("layer", module.weight, module.bias, module.eps)


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _llama_parts(block: Any, *, plus_one: bool = False, **more: Any) -> Parts:
    attention, mlp = block.self_attn, block.mlp
    return Parts(
        attention_norm=_rms(block.input_layernorm, plus_one=plus_one),
        mlp_norm=more.pop("mlp_norm", None) or _rms(block.post_attention_layernorm, plus_one=plus_one),
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        **more,
    )


def _qwen3_parts(block: Any) -> Parts:
    return _llama_parts(block, q_norm=_rms(block.self_attn.q_norm), k_norm=_rms(block.self_attn.k_norm))


def _gemma_parts(block: Any) -> Parts:
    return _llama_parts(block, plus_one=True)


def _gemma2_parts(block: Any) -> Parts:
    return _llama_parts(
        block,
        plus_one=True,
        mlp_norm=_rms(block.pre_feedforward_layernorm, plus_one=True),
        post_attention_norm=_rms(block.post_attention_layernorm, plus_one=True),
        post_mlp_norm=_rms(block.post_feedforward_layernorm, plus_one=True),
        softcap=block.self_attn.attn_logit_softcapping,
    )


def _gpt2_parts(block: Any) -> Parts:
    attention, mlp = block.attn, block.mlp
    # Conv1D stores [input, output], and q, k, v side by side.
    weights, biases = attention.c_attn.weight.T.chunk(3), attention.c_attn.bias.chunk(3)
    scale = attention.head_dim**-0.5 if attention.scale_attn_weights else 1.0
    if attention.scale_attn_by_inverse_layer_idx:
        scale /= attention.layer_idx + 1
    return Parts(
        attention_norm=_layer_norm(block.ln_1),
        mlp_norm=_layer_norm(block.ln_2),
        q=Linear(weights[0], biases[0]),
        k=Linear(weights[1], biases[1]),
        v=Linear(weights[2], biases[2]),
        o=Linear(attention.c_proj.weight.T, attention.c_proj.bias),
        gate=None,
        up=Linear(mlp.c_fc.weight.T, mlp.c_fc.bias),
        down=Linear(mlp.c_proj.weight.T, mlp.c_proj.bias),
        activation=mlp.act,
        head_dim=attention.head_dim,
        scale=scale,
    )


def _gpt_neox_parts(block: Any) -> Parts:
    attention, mlp = block.attention, block.mlp
    fused = attention.query_key_value
    # Rows are grouped by head: c of q, c of k, c of v, then the next head.
    weight = fused.weight.unflatten(0, (-1, 3, attention.head_size))
    bias = None if fused.bias is None else fused.bias.unflatten(0, (-1, 3, attention.head_size))
    q, k, v = (Linear(weight[:, i].flatten(0, 1), None if bias is None else bias[:, i].flatten()) for i in range(3))
    return Parts(
        attention_norm=_layer_norm(block.input_layernorm),
        mlp_norm=_layer_norm(block.post_attention_layernorm),
        q=q,
        k=k,
        v=v,
        o=_linear(attention.dense),
        gate=None,
        up=_linear(mlp.dense_h_to_4h),
        down=_linear(mlp.dense_4h_to_h),
        activation=mlp.act,
        head_dim=attention.head_size,
        scale=attention.scaling,
        parallel=block.use_parallel_residual,
    )


def _gpt_neox_fused(block: Any) -> dict[str, Tensor]:
    fused = block.attention.query_key_value.weight.unflatten(0, (-1, 3, block.attention.head_size))
    return dict(zip("qkv", fused.unbind(1), strict=True))


def _gemma2_born(config: Any) -> dict[str, Any]:
    return {"activation": config.hidden_activation, "post_norm": True}


def _gpt_neox_born(config: Any) -> dict[str, Any]:
    plain = {"gate": None, "norm": "layer", "eps": config.layer_norm_eps}
    return plain | {"parallel": config.use_parallel_residual}


def _gpt2_born(config: Any) -> dict[str, Any]:
    return {
        "gate": None,
        "norm": "layer",
        "eps": config.layer_norm_epsilon,
        "features": config.n_inner or 4 * config.n_embd,
        "activation": config.activation_function,
    }


@dataclass(frozen=True)
class Family:
    """Where a family keeps what the view needs, and the block class that `parts` knows how to take apart."""

    block: str
    parts: Callable[[Any], Parts]
    blocks: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    output: str = "o_proj"  # of the attention
    positional: PositionalEncoding = "rope"
    learned: str | None = None  # the embedding of absolute positions
    born: Callable[[Any], dict[str, Any]] = lambda config: {}  # how the fields of `Birth` differ from Llama's
    depth_scaled: bool = False  # transformers draws output and down projections more narrowly the deeper the model is
    root_scaled: bool = False  # embeddings are multiplied by sqrt(d) in the forward pass
    fused: Callable[[Any], dict[str, Tensor]] = lambda block: {}  # a block's matrices of which `parts` has copies


FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "llama": Family("LlamaDecoderLayer", _llama_parts),
        "mistral": Family("MistralDecoderLayer", _llama_parts),
        "qwen2": Family("Qwen2DecoderLayer", _llama_parts),
        "qwen3": Family("Qwen3DecoderLayer", _qwen3_parts),
        "gemma": Family("GemmaDecoderLayer", _gemma_parts, root_scaled=True),
        "gemma2": Family("Gemma2DecoderLayer", _gemma2_parts, born=_gemma2_born, root_scaled=True),
        "gpt2": Family("GPT2Block", _gpt2_parts, "h", "ln_f", "attn", "c_proj", "learned", "wpe", _gpt2_born, True),
        "gpt_neox": Family(
            "GPTNeoXLayer",
            _gpt_neox_parts,
            final_norm="final_layer_norm",
            attention="attention",
            output="dense",
            born=_gpt_neox_born,
            fused=_gpt_neox_fused,
        ),
    }
)


def family_of(config: Any) -> Family:
    """The table's row for a configuration.

    Raises:
        InputError: the model type is not in the table.
    """
    if config.model_type not in FAMILIES:
        raise InputError(
            f"model type '{config.model_type}' is not supported; supported families: {', '.join(FAMILIES)}"
        )
    return FAMILIES[config.model_type]


# ---------------------------------------------------------------------------------------------------- attention


class _Listener(Protocol):
    """Who listens to a pass: sees and changes q, k, v as projected, then sees what was attended and changes its output."""

    watched: bool  # whether `attended` wants the log-sum-exp

    def receive(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def attended(self, module: nn.Module, attention: Attention) -> Tensor: ...


_listener: ContextVar[_Listener | None] = ContextVar("headwater_attention_listener", default=None)
# Of whom a pass was asked to be watched, by view: a view's passes may be run inside another's watcher.
_watchers: ContextVar[MappingProxyType[int, Watcher]] = ContextVar("headwater_watchers", default=MappingProxyType({}))


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls in a shadow: lets a listener see and change q, k, v, then attends as the model would.

    Raises:
        InputError: a keyword that is not known here, or a value by which the model attends in another way.
    """
    check_told(module, attention_mask, kwargs)
    listener = _listener.get()
    if listener is not None:
        query, key, value = listener.receive(module, query, key, value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = kwargs.get("scaling")
    given = Attention(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=kwargs.get("softcap"),
        window=kwargs.get("sliding_window"),
    )
    attention = attend(given, normalizer=listener is not None and listener.watched)
    output = attention.output if listener is None else listener.attended(module, attention)
    assert output is not None
    return output.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks follow from positions here: causal, within the window that the attention function is told; no padding."""


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, _no_mask)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- the view


def shadow(model: Any) -> Any:
    """A structural copy sharing every parameter and buffer with `model`: costs no memory, isolates hooks and config.

    Modules stand in it without the wrappers of `torch.compile` and PEFT; layers with adapters have weights of their own.

    Raises:
        InputError: accelerate's hooks on it would change the parameters themselves, or an adapter cannot be merged.
    """
    copied = copy.deepcopy(model, split.shared(model))
    split.unbind(copied)
    unwrap_within(copied)
    for module in copied.modules():
        if "forward" in vars(module) and not split.hooks(module) and own_forward(module) is None:
            del module.forward  # compiled, and bound to the caller's module
    return copied


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in another dtype, in place; buffers stay, as in loading.

    Rotary frequencies rounded to bfloat16, as `model.to` would have them, turn keys by a wrong angle far into a prompt.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


class _Reached(Exception):
    """Ends a forward pass early, once what was wanted has been seen."""


class _Listening:
    """One view's pass, listened to."""

    def __init__(
        self,
        modules: Mapping[int, int],
        edits: Sequence[Edit],
        sites: list[Site[Attention]] | None,
        watcher: Watcher | None,
        device: torch.device,
    ) -> None:
        self._modules, self._edits, self._sites, self._watcher = modules, edits, sites, watcher
        self._device = device  # where edits and the watcher find the tensors
        self.watched = watcher is not None
        self.fired: set[int] = set()

    def receive(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self._modules.get(id(module))
        if layer is None:  # another view's pass, run by an edit or a watcher of this one
            return query, key, value
        self.fired.add(layer)
        for edit in self._edits:
            if edit.layer == layer:
                query, key, value = (
                    edit.function(tensor.to(self._device)).to(tensor.device) if edit.site == name else tensor
                    for name, tensor in (("query", query), ("key", key), ("value", value))
                )
        return query, key, value

    def attended(self, module: nn.Module, attention: Attention) -> Tensor:
        layer, output = self._modules.get(id(module)), attention.output
        assert output is not None
        if layer is None:
            return output
        if self._sites is not None:
            self._sites[layer].fired.append(_brought(attention.detached(), self._device))
        if self._watcher is not None:
            self._watcher(layer, _brought(attention.detached(), self._device))
        for edit in self._edits:
            if (edit.layer, edit.site) == (layer, "output"):
                output = edit.function(output.to(self._device)).to(output.device)
        return output


def _brought(attention: Attention, device: torch.device) -> Attention:
    """The same on that device."""
    moved = {name: x.to(device) for name, x in vars(attention).items() if isinstance(x, Tensor)}
    return replace(attention, **moved)


class HuggingFaceView:
    """`View` over a transformers causal language model of a family in `FAMILIES`.

    `offloaded` says whether parameters of blocks lie elsewhere than on `device`, so that `parts` fetches them anew each
    time: who keeps the parts of all blocks then holds the whole model there.

    Args:
        model: left as it is; this view works on a shadow.
        tokenizer: optional; without it prompts must be given as token ids.
        name, revision, weights_file: for provenance, as in `Identity`.
        condition: "pretrained", "init" or "init-nope".
        initialization: what fresh weights were drawn from.

    Raises:
        InputError: the family is not supported, or accelerate's hooks on the model change its weights in place.
    """

    backend = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any | None = None,
        name: str | None = None,
        revision: str | None = None,
        weights_file: str | None = None,
        condition: str = "pretrained",
        initialization: Initialization | None = None,
    ) -> None:
        self.initialization = initialization
        family_of(model.config)
        self._weights_file = weights_file
        self._wrap(shadow(model), model.config, tokenizer, name, revision, condition)
        self._model.set_attn_implementation(ATTENTION)

    def _wrap(
        self, model: Any, config: Any, tokenizer: Any, name: str | None, revision: str | None, condition: str
    ) -> None:
        self._model = model.eval()
        self._family = family_of(config)
        self._decoder: Any = model.get_decoder()
        self._blocks: nn.ModuleList = getattr(self._decoder, self._family.blocks)
        self._final_norm: nn.Module = getattr(self._decoder, self._family.final_norm)
        self._name = name or config.name_or_path or f"in-memory {config.model_type}"
        self._revision, self._condition = revision, condition
        self.tokenizer = tokenizer
        self.origin: Origin | None = None  # the caller's model, where there is one
        self._identified: tuple[tuple[int, ...], Identity] | None = None
        self.spec = spec_of(config)
        parameter = next(model.parameters())
        self._split = split.is_split(model)
        self.device: torch.device = split.execution_device(self._blocks[0]) if self._split else parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.offloaded: bool = any(parameter.device != self.device for parameter in self._blocks.parameters())

    @property
    def identity(self) -> Identity:
        # The weights are the caller's, who may change them. Those that accelerate offloads are made anew in every pass.
        state = () if self._split else tuple(map(version, self._model.parameters()))
        if self._identified is None or self._identified[0] != state:
            self._identified = state, self._identity()
        return self._identified[1]

    def _identity(self) -> Identity:
        described = self._model.config.to_dict()
        for key in ("transformers_version", "_attn_implementation", "_name_or_path", "dtype"):
            described.pop(key, None)
        return Identity(
            name=self._name,
            revision=self._revision,
            condition=self._condition,
            weights=weights_hash(self._weights()),
            config=json.dumps(described, sort_keys=True, default=str),
            backend=self.backend,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            initialization=None if self.initialization is None else str(self.initialization),
            weights_file=self._weights_file,
        )

    @property
    def bos(self) -> int | None:
        """The token that the tokenizer puts first: training did, too.

        Many name a BOS that they never put there: GPT-2 and Pythia the token between texts, SmolLM2 and Qwen2.5 one of
        their chats'.
        """
        tokenizer = self._as_trained()
        if tokenizer is None or tokenizer.bos_token_id is None:
            return None
        bos = int(tokenizer.bos_token_id)
        return bos if tokenizer("a").input_ids[:1] == [bos] else None

    def _as_trained(self) -> Any | None:
        """The tokenizer as it was when the model was trained."""
        return self.tokenizer

    def _weights(self) -> Iterable[Tensor]:
        """What the weights' hash is taken over."""
        return split.distinct(self._model) if self._split else self._model.parameters()

    def _check_origin(self) -> None:
        if self.origin is not None:
            self.origin.check()

    # -- forward passes

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"]:
        self._check_origin()
        seen: Site[Tensor] = Site("residual", 0)

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.fired.append(_hidden(args, kwargs))
            raise _Reached

        handle = self._blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad():
                self._decoder(input_ids=tokens.to(self.device), use_cache=False)
        except _Reached:
            pass
        finally:
            handle.remove()
        return seen.value(self.spec.family).to(self.device)

    def residual(
        self, embeddings: Float[Tensor, "batch position d"], *, edits: Sequence[Edit] = ()
    ) -> Float[Tensor, "batch position d"]:
        with self._passing(embeddings, edits, None, record=False) as (_, last):
            self._forward(embeddings)
        return last.value(self.spec.family)

    @torch.no_grad()
    def trace(
        self,
        embeddings: Float[Tensor, "batch position d"],
        *,
        attention: bool = False,
        edits: Sequence[Edit] = (),
    ) -> Trace:
        sites: list[Site[Attention]] = [Site("attention", layer) for layer in range(self.spec.blocks)]
        with self._passing(embeddings, edits, sites if attention else None) as (calls, last):
            self._forward(embeddings)
        streams, blocks, rotary = [], [], []
        for layer in range(self.spec.blocks):
            args, kwargs = calls[layer]
            stream, block, rotation = _recorded_block(self._blocks[layer], args, kwargs, self.device)
            streams.append(stream)
            blocks.append(self._listened(layer, block, [edit for edit in edits if edit.layer == layer]))
            rotary.append(rotation)
        recorded = tuple(site.value(self.spec.family) for site in sites) if attention else ()
        return Trace((*streams, last.value(self.spec.family)), tuple(blocks), tuple(rotary), recorded)

    def _listened(
        self, layer: int, block: Callable[[Tensor], Tensor], edits: Sequence[Edit]
    ) -> Callable[[Tensor], Tensor]:
        """A recorded block that keeps the pass's edits of its queries, keys, values and output, and can be watched."""

        def listened(stream: Tensor) -> Tensor:
            with self._attending(None, edits, (layer,)):
                return block(stream)

        return listened

    def norm(self, residual: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        return self._final_norm(residual).to(self.device)

    def unembed(self, normed: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows vocabulary"]:
        logits = self._model.get_output_embeddings()(normed).to(self.device)
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _forward(self, embeddings: Tensor) -> None:
        # The hook at block 0 puts `embeddings` where the blocks begin, past any scaling or added positions. What the
        # decoder itself is given only fixes the shape.
        self._decoder(inputs_embeds=torch.zeros_like(embeddings), use_cache=False)

    @contextmanager
    def _passing(
        self, embeddings: Tensor, edits: Sequence[Edit], sites: list[Site[Attention]] | None, *, record: bool = True
    ) -> Iterator[tuple[list[Any], Site[Tensor]]]:
        """Hooks for one pass: inject at block 0, apply edits, record every block's call, attention at `sites`, the end.

        Without `record` only that a block was called is kept, not its stream.
        """
        self._check_origin()
        calls: list[Any] = [None] * self.spec.blocks
        last: Site[Tensor] = Site("final residual", self.spec.blocks)
        check_edits(edits, self.spec)
        changes = [[e for e in edits if e.site == "residual" and e.layer == at] for at in range(self.spec.blocks)]

        def before(layer: int) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                stream = embeddings if layer == 0 else _hidden(args, kwargs)
                for edit in changes[layer]:
                    stream = edit.function(stream.to(self.device))
                args, kwargs = _with_hidden(stream, args, kwargs)
                calls[layer] = (args, kwargs) if record else True
                return args, kwargs

            return hook

        def at_end(module: nn.Module, args: tuple[Any, ...]) -> None:
            last.fired.append(args[0].to(self.device))

        handles = [block.register_forward_pre_hook(before(i), with_kwargs=True) for i, block in enumerate(self._blocks)]
        handles.append(self._final_norm.register_forward_pre_hook(at_end))
        try:
            with self._attending(sites, edits, range(self.spec.blocks)):
                yield calls, last
            for layer, call in enumerate(calls):
                Site("residual", layer, [] if call is None else [call]).value(self.spec.family)
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        token = _watchers.set(MappingProxyType({**_watchers.get(), id(self): watcher}))
        try:
            yield
        finally:
            _watchers.reset(token)

    def _watcher(self) -> Watcher | None:
        return _watchers.get().get(id(self))

    @contextmanager
    def _attending(
        self, sites: list[Site[Attention]] | None, edits: Sequence[Edit], layers: Sequence[int]
    ) -> Iterator[None]:
        """Listen to the attention of `layers`: record it at `sites`, apply edits, call the watcher if there is one."""
        changed, watcher = [edit for edit in edits if edit.site != "residual"], self._watcher()
        if sites is None and not changed and watcher is None:
            yield
            return
        modules = {id(getattr(self._blocks[layer], self._family.attention)): layer for layer in layers}
        listening = _Listening(modules, changed, sites, watcher, self.device)
        token = _listener.set(listening)
        try:
            yield
        finally:
            _listener.reset(token)
        for layer in layers if watcher is not None else ():
            Site("attention", layer, [True] if layer in listening.fired else []).value(self.spec.family)
        for edit in changed:  # an edit that was never asked for must not pass for one without effect
            if edit.layer not in listening.fired:
                Site(edit.site, edit.layer).value(self.spec.family)

    def output_weights(self, layer: int) -> Float[Tensor, "head c d"]:
        self._check_origin()
        return _columns_of(self._output_projection(layer), self.spec, self.device, self.dtype)

    def _output_projection(self, layer: int) -> nn.Module:
        return getattr(getattr(self._blocks[layer], self._family.attention), self._family.output)

    # -- taking apart and starting afresh

    def parts(self, layer: int) -> Parts | None:
        if self.obstacle(layer) is not None:
            return None
        block = self._blocks[layer]
        if self._split:
            block = split.gathered(block, self.device)
        return replace(self._family.parts(block), window=self.spec.windows[layer])

    def obstacle(self, layer: int) -> str | None:
        """What about the block may make it compute something else than its weights say; None where nothing may."""
        block = self._blocks[layer]
        if type(block).__name__ != self._family.block:
            return f"class '{type(block).__qualname__}', where {self._family.block} is known"
        return obstacle(block)

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Rule = CONFIG) -> HuggingFaceView:
        """As `View` says. A split model's twin is split in the same way, drawn whole in main memory before that."""
        rule = initialization_of(self._model.config, initialization)
        model = cast(fresh_model(self._model.config, seed, rule, positional=positional), self.dtype)
        model = split.dispatched(model, self._model) if self._split else model.to(self.device)
        return type(self)(
            model,
            tokenizer=self.tokenizer,
            name=self._name,
            revision=self._revision,
            weights_file=self._weights_file,
            condition="init" if positional else "init-nope",
            initialization=rule,
        )


def initialization_of(config: Any, rule: Rule = CONFIG) -> Initialization:
    """What a rule means for a configuration.

    Raises:
        InputError: no such rule.
    """
    blocks, width = config.num_hidden_layers, config.hidden_size

    def own() -> Initialization:
        default = AutoConfig.for_model(config.model_type).initializer_range
        scheme = {"assumed": getattr(config, ASSUMED, False), "depth_scaled": family_of(config).depth_scaled}
        return of_config(config.initializer_range, default, blocks, width, **scheme)

    return resolve(rule, blocks, width, own)


def fresh_model(config: Any, seed: int, rule: Initialization, *, positional: bool = True) -> PreTrainedModel:
    """Fresh float32 weights from a configuration, drawn on the CPU so that a seed means the same on every device.

    They are drawn as transformers draws them. All entries are normal with mean zero, so that multiplying a matrix by the
    ratio of its deviations is a draw by another rule, from the same noise; by the configuration's own nothing is touched.

    Without `positional`: rotations are replaced by the identity (times the scaling that some RoPE types apply to the
    logits), learned positions by zeros.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _rescale(model, rule)
    if positional:
        return model
    family = family_of(config)
    decoder = model.get_decoder()
    if family.learned is not None:
        nn.init.zeros_(getattr(decoder, family.learned).weight)
        return model

    def unrotated(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = output
        return torch.sqrt(cos**2 + sin**2), torch.zeros_like(sin)

    decoder.rotary_emb.register_forward_hook(unrotated)
    return model


@torch.no_grad()
def _rescale(model: Any, rule: Initialization) -> None:
    """Matrices as drawn by the model's configuration become those of `rule`, in place."""
    own, family, decoder = initialization_of(model.config), family_of(model.config), model.get_decoder()
    matrices = [("embedding", model.get_input_embeddings().weight)]
    if model.get_output_embeddings().weight is not matrices[0][1]:
        matrices.append(("unembedding", model.get_output_embeddings().weight))
    if family.learned is not None:
        matrices.append(("positions", getattr(decoder, family.learned).weight))
    for block in getattr(decoder, family.blocks):
        parts = family.parts(block)
        linear = {kind: getattr(parts, kind, None) for kind in KINDS}
        matrices += ({k: x.weight for k, x in linear.items() if x is not None} | family.fused(block)).items()
    for kind, matrix in matrices:
        if getattr(rule, kind) != getattr(own, kind):
            matrix.mul_(getattr(rule, kind) / getattr(own, kind))


def spec_of(config: Any) -> Spec:
    """The architecture a transformers configuration describes."""
    family = family_of(config)
    heads, blocks, width = config.num_attention_heads, config.num_hidden_layers, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):  # Qwen2 and Qwen3 carry the number without using it
        window = None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * blocks
    return Spec(
        family=config.model_type,
        blocks=blocks,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        width=width,
        vocabulary=config.vocab_size,
        positional=(family.positional,) * blocks,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        max_length=getattr(config, "max_position_embeddings", None),
        initializer_range=getattr(config, "initializer_range", None),
    )


def check_sizes(config: Any) -> None:
    """Refuse what transformers would take and no model can be made of, or none with fresh weights.

    Raises:
        InputError: a size that is not positive, heads that do not share keys evenly, no initializer range, an activation
            that transformers does not have.
    """
    family_of(config)
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    for name in sizes:
        value = getattr(config, name, None)
        if value is not None and value < 1:
            raise InputError(f"the config has {name}={value}; give at least 1")
    spec = spec_of(config)
    if spec.heads % spec.kv_heads:
        raise InputError(f"{spec.heads} query heads cannot share {spec.kv_heads} key heads evenly; give a divisor")
    if not (spec.initializer_range or 0) > 0:
        raise InputError(f"the config has initializer_range={spec.initializer_range}; give a positive number, as 0.02")
    activation = _structure(config)["activation"]
    if activation not in ACT2FN:
        raise InputError(f"the config's activation '{activation}' is none of transformers'; give one, as gelu or silu")


def birth_of(config: Any, rule: Initialization) -> Birth:
    """What fresh weights of this configuration are drawn from under a rule."""
    family, found = family_of(config), _structure(config)
    drawn = {kind: getattr(rule, kind) for kind in ("embedding", "positions", "v", "o", "gate", "up", "down")}
    if family.root_scaled:
        drawn["embedding"] *= config.hidden_size**0.5
    if family.learned is None:
        drawn["positions"] = 0.0
    found["activation"] = ACT2FN[found["activation"]]
    return Birth(spec_of(config), **drawn | found, initialization=str(rule))


def _structure(config: Any) -> dict[str, Any]:
    """The fields of `Birth` that are no deviations, nor its spec; the activation by name."""
    found: dict[str, Any] = {"norm": "rms", "features": getattr(config, "intermediate_size", None)}
    found |= {"eps": getattr(config, "rms_norm_eps", None), "activation": getattr(config, "hidden_act", None)}
    return found | family_of(config).born(config)


@torch.no_grad()
def _columns_of(projection: nn.Module, spec: Spec, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A projection's matrix by head, [H, c, d], asked of the module itself: adapters and other storage count, too."""
    ones = torch.eye(spec.heads * spec.head_dim, device=device, dtype=dtype)[None]  # [1, H c, H c]
    nothing = projection(torch.zeros_like(ones[:, :1]))
    return (projection(ones) - nothing)[0].unflatten(0, (spec.heads, spec.head_dim)).to(device)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _with_hidden(stream: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return ((stream, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": stream})


def _recorded_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """(the stream it read, the block as a function of its stream, its rotation), taken and given on that device."""
    recorded = _hidden(args, kwargs).detach().to(device)
    args, kwargs = _with_hidden(recorded.new_empty(0), args, kwargs)  # so that a kept block does not keep its stream

    def block(stream: Tensor) -> Tensor:
        given, named = _with_hidden(stream, args, kwargs)
        output = module(*given, **named)
        return (output[0] if isinstance(output, tuple) else output).to(device)

    pair = kwargs.get("position_embeddings")
    rotation = None if pair is None else (pair[0][0].to(device), pair[1][0].to(device))
    return recorded, block, rotation


Backend = Literal["transformers", "transformer_lens"]
