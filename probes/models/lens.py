"""TransformerLens models behind the view: `TransformerBridge` of TransformerLens 4.

A bridge keeps the transformers decoder and puts its own modules with hook points in the places of the original ones. The
view runs that decoder, bridge modules and all, so that what is measured is what a TransformerLens user's hooks see. As
with plain transformers models it works on a shadow; the bridge given stays as it is.

Weights must be as loaded: folding layer norms or centring weights changes the residual stream that is measured.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoTokenizer

from ..errors import InputError, reason
from .checks import first_ids
from .families import family_of, spec_of
from .fused import Listening, attend
from .huggingface import HuggingFaceView
from .identity import Stored
from .shadow import output_head, shadow
from .view import Attention, Parts, Spec, never_fired

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
        self._lens_tokenizer = tokenizer is None
        tokenizer = bridge.tokenizer if tokenizer is None else tokenizer
        super().__init__(bridge, tokenizer=tokenizer, **described)

    def _wrap(self, model: Any) -> None:
        config = model.original_model.config
        if family_of(config).parts is None:
            raise InputError(
                f"blocks of {config.model_type} run whole, by transformers alone; use backend transformers"
            )
        if getattr(model, "compatibility_mode", False):
            raise InputError(
                "this TransformerBridge is in compatibility mode (folded, centred weights); "
                "give it as booted, with raw weights"
            )
        if getattr(config, "scale_attn_weights", True) is False:
            raise InputError("a bridge scales logits in spite of scale_attn_weights=False; give the model itself")
        self._use(_unwired(shadow(model)).original_model)

    def stored(self) -> Stored:
        """By transformers' names: what a bridge's own modules hold is the original ones', or made of it."""
        held = dict(super().stored())
        zeros = getattr(self._model.get_output_embeddings().original_component, "bias", None)
        bridges = {name[: at.start()] for name in held for at in re.finditer(re.escape(ORIGINAL), name)}
        for name, tensor in held.items():
            beside = any(name.startswith(f"{one}.") and not name.startswith(one + ORIGINAL) for one in bridges)
            # A bridge adds a buffer of zeros, as if the unembedding had a bias.
            if not beside and (tensor is not zeros or isinstance(tensor, nn.Parameter)):
                yield name.replace(ORIGINAL, ""), tensor

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

    @property
    def first_ids(self) -> tuple[int, ...]:
        """TransformerLens makes the tokenizers it reads prepend BOS: that says nothing, their files do."""
        tokenizer = self.tokenizer
        if self._lens_tokenizer and tokenizer is not None:
            try:
                tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path, local_files_only=True)
            except Exception:  # no longer there; what put nothing first as far as we know has no BOS
                tokenizer = None
        return first_ids(tokenizer)

    @contextmanager
    def _attending(self, heard: Listening, layers: Sequence[int]) -> Iterator[None]:
        """Hook points instead of an attention function: after rotation where there is one, else after projection."""
        edited = {(edit.layer, edit.site) for edit in heard.edits if edit.site != "residual"}
        listened = layers if heard.heard else sorted({layer for layer, _ in edited})
        with ExitStack() as ends:
            for layer in listened:
                attention: Any = self._blocks[layer].attn
                block = _Heard(self.spec, attention, heard, layer)
                hooks = {attention.v.hook_out: block.at("value", self.spec.kv_heads)}
                if sites := {site for at, site in edited if at == layer} & {"output", "logits", "mask"}:
                    hooks[attention.o.hook_in] = block.mixed(sites != {"output"})
                if self.spec.positional[layer] != "rope":
                    hooks[attention.q.hook_out] = block.at("query", self.spec.heads)
                    hooks[attention.k.hook_out] = block.at("key", self.spec.kv_heads)
                elif hasattr(attention, ROTATION):  # fused projections: hook_rot_q and hook_rot_k exist, but never fire
                    setattr(attention, ROTATION, block.rotating(getattr(attention, ROTATION)))
                    ends.callback(delattr, attention, ROTATION)
                else:
                    hooks[attention.hook_rot_q], hooks[attention.hook_rot_k] = block.at("query"), block.at("key")
                for point, hook in hooks.items():
                    ends.callback(point.register_forward_hook(hook).remove)
                ends.callback(attention.register_forward_hook(block.attended).remove)
            yield

    def _output_projection(self, layer: int) -> nn.Module:
        return self._blocks[layer].attn.o  # type: ignore[union-attr, return-value]


class _Heard:
    """One block's attention in a pass, as its hook points give it."""

    def __init__(self, spec: Spec, attention: Any, heard: Listening, layer: int) -> None:
        self.spec, self.original, self.heard, self.layer = spec, attention.original_component, heard, layer
        self.sites: dict[str, Tensor] = {}

    def receive(self, site: str, tensor: Tensor) -> Tensor:  # [B, H, T, c]
        self.sites[site] = tensor = self.heard.edited(self.layer, site, tensor)
        return tensor

    def at(self, site: str, heads: int | None = None) -> Callable[..., Tensor]:
        """For [B, T, heads c] or [B, T, heads, c]; without `heads`, for [B, H, T, c]."""

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if heads is None:
                return self.receive(site, output)
            return self.receive(site, _by_head(output, heads)).transpose(1, 2).reshape(output.shape)

        return hook

    def rotating(self, rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def method(*args: Tensor) -> tuple[Tensor, Tensor]:
            query, key = rotate(*args)
            return self.receive("query", query), self.receive("key", key)

        return method

    def mixed(self, anew: bool) -> Callable[..., Tensor]:
        """What reaches W_O: under edited logits attended anew, since not every bridge reads its own pattern again."""

        def hook(module: nn.Module, args: Any, given: Tensor) -> Tensor:
            output: Any = attend(self.attention()).output if anew else _by_head(given, self.spec.heads)
            return self.heard.edited(self.layer, "output", output).transpose(1, 2).reshape(given.shape)

        return hook

    def attended(self, module: nn.Module, args: Any, output: Any) -> None:
        self.heard.attended(self.layer, self.attention())
        self.sites.clear()  # not needed any more: the next block's take their place

    def attention(self) -> Attention:
        for site in ("query", "key", "value"):
            if site not in self.sites:
                raise never_fired(self.spec.family, site, self.layer)
        how = {"softcap": "attn_logit_softcapping", "sink": "sinks", "scale": "scaling"}
        told: dict[str, Any] = {name: getattr(self.original, attribute, None) for name, attribute in how.items()}
        return self.heard.multiplied(self.layer, **self.sites, **told, window=self.spec.windows[self.layer])


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """[B, T, heads c] or [B, T, heads, c] as [B, heads, T, c]."""
    return (tensor.unflatten(-1, (heads, -1)) if tensor.ndim == 3 else tensor).transpose(1, 2)


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


def boot(model: Any, name: str) -> TransformerBridge:
    """Wrap a transformers model that belongs to the caller alone: bridging changes it in place.

    A bridge may drop what a configuration says, so that its logits are held against the model's.

    The bridge gets no tokenizer. TransformerLens would read it again from disk or the hub, make it prepend BOS, and give
    the caller's own new special tokens; the views keep the tokenizer themselves.
    """
    output_head(model)  # TransformerLens runs none without
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # it warns about every name that is none of its own
    try:
        with redirect_stdout(StringIO()), torch.random.fork_rng(devices=[]):
            model.set_attn_implementation("eager")  # under others its hooks on scores and patterns never fire
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
