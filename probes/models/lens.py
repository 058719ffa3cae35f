"""TransformerLens models behind the view: `TransformerBridge` of TransformerLens 4.

A bridge keeps the transformers decoder and puts its own modules with hook points in the places of the original ones. The
view runs that decoder, bridge modules and all, so that what is measured is what a TransformerLens user's hooks see. As
with plain transformers models it works on a shadow; the bridge given stays as it is.

Weights must be as loaded: folding layer norms or centring weights changes the residual stream that is measured.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoTokenizer

from ..errors import InputError, reason
from .families import family_of, spec_of
from .fused import attend
from .huggingface import Described, HuggingFaceView, shadow
from .identity import Stored, values
from .listening import Listening
from .recorders import Recorders
from .split import is_split
from .structure import output_head
from .view import Attention, Parts, Site

LEAST, MOST = 8, 64  # tokens of the text on which a bridge is held against its model
ORIGINAL = "._original_component"  # under which a bridge keeps the module in whose place it stands
ROTATION = "_apply_rotary_pos_emb"  # the method by which bridges of fused projections rotate queries and keys


class LensView(HuggingFaceView):
    """`View` over a `TransformerBridge` with raw weights.

    Args:
        bridge: left as it is.
        tokenizer, name, revision, weights_file, condition, initialization: as for `HuggingFaceView`; the bridge's own
            tokenizer unless given.

    Raises:
        InputError: the family is not supported, or weights were folded or centred.
    """

    backend = "transformer_lens"
    behind = None  # type: ignore[assignment]  # a bridge's own attention does not read keys and values of before

    def __init__(self, bridge: TransformerBridge, *, tokenizer: Any | None = None, **described: Any) -> None:
        config = bridge.original_model.config
        refuse_family(config, next(bridge.original_model.parameters()).dtype)
        if getattr(bridge, "compatibility_mode", False):
            raise InputError(
                "this TransformerBridge is in compatibility mode (folded, centred weights); "
                "give it as booted, with raw weights"
            )
        refuse_split(bridge)
        self._bridge, self._lens_tokenizer = _unwired(shadow(bridge)), tokenizer is None
        tokenizer = bridge.tokenizer if tokenizer is None else tokenizer
        self._wrap(self._bridge.original_model, Described(tokenizer, **described))
        self._whole = self._bridge

    def stored(self) -> Stored:
        """By transformers' names: a bridge's own modules hold the weights of the original ones a second time.

        Of fused projections it runs copies, which count beside these names as soon as they are copies no more.
        """
        copies: set[int] = set()
        for block in self._blocks:
            attention: Any = block.attn
            mlp: Any = getattr(block, "mlp", None)
            for module, names in ((attention, ("q", "k", "v")), (mlp, ("gate", "in"))):
                apart: Any = getattr(module, "split_qkv_matrix", None) or getattr(module, "split_gate_up_matrix", None)
                if apart is None or (module is attention and not hasattr(module, "qkv")):
                    continue
                with torch.random.fork_rng(devices=[]):  # layers are made for them, which draw their weights first
                    parts = apart(module.original_component)
                own = [tensor for name in names for tensor in getattr(module, name).parameters()]
                fused = [tensor for part in parts for tensor in part.parameters()]
                if all(torch.equal(a, b) for a, b in zip(own, fused, strict=True)):
                    copies |= {id(tensor) for tensor in own}
        held = dict(super().stored())
        zeros = getattr(self._model.get_output_embeddings().original_component, "bias", None)
        if not isinstance(zeros, nn.Parameter):  # a buffer that a bridge adds, as if the unembedding had a bias
            held = {name: tensor for name, tensor in held.items() if tensor is not zeros}
        bridges = {name[: at.start()] for name in held for at in re.finditer(re.escape(ORIGINAL), name)}
        within = {name: name.replace(ORIGINAL, "") for name in held if not _beside(name, bridges)}
        yield from ((plain, held[name]) for name, plain in within.items())
        seen = copies | {id(held[name]) for name in within}
        # What a package makes when it saves (a format's number, scales' types) is another tensor under each name.
        made = {bytes(values(held[name])) for name in within if not isinstance(held[name], nn.Parameter)}
        for name, tensor in held.items():
            if id(tensor) not in seen and (isinstance(tensor, nn.Parameter) or bytes(values(tensor)) not in made):
                yield name, tensor

    def parts(self, layer: int) -> Parts | None:
        """None: derivatives go through the bridge's own modules, with whatever hooks they carry."""
        return None

    def obstacle(self, layer: int) -> str | None:
        """None: it is not a caller's doing that blocks stay whole."""
        return None

    def _twin(self, model: Any, described: dict[str, Any]) -> LensView:
        twin = type(self)(boot(model, self._name), **described)
        twin._lens_tokenizer = self._lens_tokenizer
        return twin

    def _as_trained(self) -> Any | None:
        """TransformerLens makes the tokenizers it reads prepend BOS: that says nothing, their files do."""
        if not self._lens_tokenizer or self.tokenizer is None:
            return self.tokenizer
        try:
            return AutoTokenizer.from_pretrained(self.tokenizer.name_or_path, local_files_only=True)
        except Exception:  # no longer there; what put nothing first as far as we know has no BOS
            return None

    @contextmanager
    def _connected(self, listener: Listening, layers: Sequence[int]) -> Iterator[None]:
        """Hook points instead of an attention function: after rotation where there is one, else after projection."""
        seen: list[dict[str, Tensor]] = [{} for _ in self._blocks]

        def receive(layer: int, site: str, tensor: Tensor) -> Tensor:  # [B, H, T, c]
            seen[layer][site] = tensor = listener.edited(layer, site, tensor)
            return tensor

        def heads_first(layer: int, site: str) -> Callable[..., Tensor]:
            return lambda module, args, output: receive(layer, site, output)

        def projected(layer: int, site: str, heads: int) -> Callable[..., Tensor]:  # [B, T, H * c] or [B, T, H, c]
            def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                split = output.unflatten(-1, (heads, -1)) if output.ndim == 3 else output
                return receive(layer, site, split.transpose(1, 2)).transpose(1, 2).reshape(output.shape)

            return hook

        def rotating(layer: int, rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
            def method(*args: Tensor) -> tuple[Tensor, Tensor]:
                query, key = rotate(*args)
                return receive(layer, "query", query), receive(layer, "key", key)

            return method

        def attended(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                attention = self._lens_attention(layer, seen[layer])
                listener.attended(layer, replace(attention, reweigh=listener.reweighing(layer)))
                seen[layer].clear()  # not needed any more: the next block's take their place

            return hook

        def mixed(layer: int) -> Callable[..., Tensor]:
            """What reaches W_O: under edited logits attended anew, since not every bridge reads its own pattern again."""

            def hook(module: nn.Module, args: Any, given: Tensor) -> Tensor:
                output = given.unflatten(-1, (self.spec.heads, -1)) if given.ndim == 3 else given  # [B, T, H, c]
                attention = self._lens_attention(layer, seen[layer])
                if (layer, "logits") in edited:
                    made = attend(replace(attention, reweigh=listener.reweighing(layer))).output
                    assert made is not None
                    output = made.transpose(1, 2)
                return listener.edited(layer, "output", output.transpose(1, 2)).transpose(1, 2).reshape(given.shape)

            return hook

        edited = {(edit.layer, edit.site) for edit in listener.edits}
        watched = layers if listener.heard else sorted({layer for layer, _ in edited})
        with ExitStack() as ends:
            for layer in watched:
                attention: Any = self._blocks[layer].attn
                hooks = {attention.v.hook_out: projected(layer, "value", self.spec.kv_heads)}
                if edited & {(layer, "output"), (layer, "logits")}:
                    hooks[attention.o.hook_in] = mixed(layer)
                if self.spec.positional[layer] != "rope":
                    hooks[attention.q.hook_out] = projected(layer, "query", self.spec.heads)
                    hooks[attention.k.hook_out] = projected(layer, "key", self.spec.kv_heads)
                elif hasattr(attention, ROTATION):  # fused projections: hook_rot_q and hook_rot_k exist, but never fire
                    setattr(attention, ROTATION, rotating(layer, getattr(attention, ROTATION)))
                    ends.callback(delattr, attention, ROTATION)
                else:
                    hooks[attention.hook_rot_q] = heads_first(layer, "query")
                    hooks[attention.hook_rot_k] = heads_first(layer, "key")
                for point, hook in hooks.items():
                    ends.callback(point.register_forward_hook(hook).remove)
                ends.callback(attention.register_forward_hook(attended(layer)).remove)
            yield
            for layer in watched:
                self._check_seen(layer, {site for at, site in listener.fired if at == layer})

    def _check_seen(self, layer: int, found: Iterable[str]) -> None:
        for site in ("query", "key", "value"):
            Site(site, layer, [True] if site in found else []).value(self.spec.family)

    def _lens_attention(self, layer: int, found: dict[str, Tensor]) -> Attention:
        self._check_seen(layer, found)
        original: Any = self._blocks[layer].attn.original_component  # type: ignore[union-attr]
        scale = getattr(original, "scaling", None)
        query, key, value = (found[site] for site in ("query", "key", "value"))
        groups = query.shape[1] // key.shape[1]
        return Attention(
            query=query,
            key=key.repeat_interleave(groups, 1),
            value=value.repeat_interleave(groups, 1),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=getattr(original, "attn_logit_softcapping", None),
            window=self.spec.windows[layer],
            sink=getattr(original, "sinks", None),
        )

    def _output_projection(self, layer: int) -> nn.Module:
        return self._blocks[layer].attn.o  # type: ignore[union-attr, return-value]


def _unwired(copied: TransformerBridge) -> TransformerBridge:
    """Without the hooks that blocks of a bridge set in their first pass: those are tied to the original's modules.

    The copy's blocks set their own in their own first pass.
    """
    for module in copied.modules():
        wired = {handle.id for handle in vars(module).get("_capture_hook_handles", ())}
        if wired:
            vars(module).update(_capture_hook_handles=[], _capture_hooks_wired=False)
            for held in (held for part in module.modules() for held in (part._forward_pre_hooks, part._forward_hooks)):
                for key in wired & set(held):
                    del held[key]
    return copied


def _beside(name: str, bridges: set[str]) -> bool:
    """Whether a tensor is held by one of the bridges' own modules, not by the one that it stands for."""
    return any(name.startswith(f"{bridge}.") and not name.startswith(bridge + ORIGINAL) for bridge in bridges)


def refuse_family(config: Any, dtype: torch.dtype) -> None:
    """Raises InputError for a family that TransformerLens does not run, or not in that precision."""
    why = family_of(config).no_lens or family_of(config).lens_drops(config)
    if why is None and dtype in (torch.bfloat16, torch.float16) and not family_of(config).lens_halves:
        why = f"its rotations are in float32, which a bridge multiplies with values in {str(dtype).removeprefix('torch.')}"
    if why is not None:
        raise InputError(f"TransformerLens cannot run this {config.model_type}: {why}; use backend transformers")


def refuse_split(model: nn.Module) -> None:
    """Raises InputError for a model that accelerate runs: bridging takes modules apart, and their hooks with them."""
    if is_split(model):
        raise InputError(
            f"the {type(model).__name__} is split by accelerate, which TransformerLens's modules do not follow; "
            "use backend transformers"
        )


def boot(model: Any, name: str) -> TransformerBridge:
    """Wrap a transformers model that belongs to the caller alone: bridging changes it in place.

    A bridge may drop what a configuration says, so that its logits are held against the model's.

    The bridge gets no tokenizer. TransformerLens would read it again from disk or the hub, make it prepend BOS, and give
    the caller's own new special tokens; the views keep the tokenizer themselves.
    """
    refuse_family(model.config, next(model.parameters()).dtype)
    output_head(model)  # TransformerLens runs none without
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # it warns about every name that is none of its own
    try:
        with redirect_stdout(StringIO()), torch.random.fork_rng(devices=[]):
            model.set_attn_implementation("eager")  # under others its hooks on scores and patterns never fire
            with Recorders(model).kept():
                before = _logits(model)
                bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, model_name=name)
                off = float((_logits(model) - before).norm() / before.norm())
    except Exception as error:  # TransformerLens raises whatever it runs into
        raise InputError(
            f"TransformerLens cannot run this {model.config.model_type} ({reason(error)}); use backend transformers"
        ) from None
    finally:
        logging.getLogger().setLevel(level)
    # Rounding grows through the blocks, most where logits are large; rotations and norms are in float32 at best.
    if off > max(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5:
        raise InputError(
            f"TransformerLens runs another model than this {model.config.model_type}: its logits are {off:.1%} off (it "
            "drops hooks and forward passes inside attention, and what its bridges do not know); use backend transformers"
        )
    return bridge


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """Of some tokens, more than a window of the model holds, where that is short."""
    config, windows = model.config, [window or 0 for window in spec_of(model.config).windows]
    length = min(max(windows, default=0) + LEAST, MOST, config.max_position_embeddings)
    ids = torch.arange(length, device=next(model.parameters()).device)[None] % config.vocab_size
    return model.eval()(ids, use_cache=False).logits
