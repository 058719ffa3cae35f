"""TransformerLens models behind the view: `TransformerBridge` of TransformerLens 4.

A bridge keeps the transformers decoder and puts its own modules with hook points in the places of the original ones. The
view runs that decoder, bridge modules and all, so that what is measured is what a TransformerLens user's hooks see. As
with plain transformers models it works on a shadow; the bridge given stays as it is.

Weights must be as loaded: folding layer norms or centring weights changes the residual stream that is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from ..errors import InputError
from .huggingface import HuggingFaceView, family_of, fresh_model, shadow
from .view import Attention, Edit, Parts, Site


class LensView(HuggingFaceView):
    """`View` over a `TransformerBridge` with raw weights.

    Args:
        bridge: left as it is.
        tokenizer, name, revision, condition: as for `HuggingFaceView`; the bridge's own tokenizer unless given.

    Raises:
        InputError: the family is not supported, or weights were folded or centred.
    """

    backend = "transformer_lens"

    def __init__(
        self,
        bridge: TransformerBridge,
        *,
        tokenizer: Any | None = None,
        name: str | None = None,
        revision: str | None = None,
        condition: str = "pretrained",
    ) -> None:
        config = bridge.original_model.config
        family_of(config)
        if getattr(bridge, "compatibility_mode", False):
            raise InputError(
                "this TransformerBridge is in compatibility mode (folded, centred weights); give it as booted, with raw weights"
            )
        self._bridge = shadow(bridge)
        tokenizer = bridge.tokenizer if tokenizer is None else tokenizer
        self._wrap(self._bridge.original_model, config, tokenizer, name, revision, condition)

    def parts(self, layer: int) -> Parts | None:
        """None: derivatives go through the bridge's own modules, with whatever hooks they carry."""
        return None

    def reinitialized(self, seed: int, *, positional: bool = True) -> LensView:
        model = fresh_model(self._model.config, seed, positional=positional).to(self.device, self.dtype)
        return type(self)(
            boot(model, self.tokenizer, self._name),
            name=self._name,
            revision=self._revision,
            condition="init" if positional else "init-nope",
        )

    @contextmanager
    def _attending(self, sites: list[Site] | None, edits: Sequence[Edit]) -> Iterator[None]:
        """Hook points instead of an attention function: after rotation where there is one, else after projection."""
        changed = [edit for edit in edits if edit.site != "residual"]
        if sites is None and not changed:
            yield
            return
        handles, seen = [], [dict[str, Tensor]() for _ in self._blocks]

        def listen(layer: int, name: str, heads: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                # Projections come flat or split by head, positions first; rotated tensors have heads first.
                flat, rotated = output.ndim == 3, output.ndim == 4 and output.shape[1] == heads != output.shape[2]
                tensor = output.unflatten(-1, (heads, -1)) if flat else output
                tensor = tensor if rotated else tensor.transpose(1, 2)
                for edit in changed:
                    if (edit.layer, edit.site) == (layer, name):
                        tensor = edit.function(tensor)
                seen[layer][name] = tensor
                tensor = tensor if rotated else tensor.transpose(1, 2)
                return tensor.flatten(2) if flat else tensor

            return hook

        rotated = self._family.positional == "rope"
        for layer, block in enumerate(self._blocks):
            attention: Any = block.attn
            points = {
                "query": (attention.hook_rot_q if rotated else attention.q.hook_out, self.spec.heads),
                "key": (attention.hook_rot_k if rotated else attention.k.hook_out, self.spec.kv_heads),
                "value": (attention.v.hook_out, self.spec.kv_heads),
            }
            for name, (point, heads) in points.items():
                handles.append(point.register_forward_hook(listen(layer, name, heads)))
        try:
            yield
            for layer, found in enumerate(seen):
                for name in ("query", "key", "value"):
                    Site(name, layer, [found[name]] if name in found else []).value(self.spec.family)
                if sites is not None:
                    sites[layer].fired.append(self._lens_attention(layer, found))  # type: ignore[arg-type]
        finally:
            for handle in handles:
                handle.remove()

    def _lens_attention(self, layer: int, found: dict[str, Tensor]) -> Attention:
        original: Any = self._blocks[layer].attn.original_component  # type: ignore[union-attr]
        scale = getattr(original, "scaling", None)
        kwargs = {"scaling": scale, "softcap": getattr(original, "attn_logit_softcapping", None)}
        return self._attention(layer, found["query"], found["key"], found["value"], kwargs)


def boot(model: Any, tokenizer: Any | None, name: str) -> TransformerBridge:
    """Wrap a transformers model that nobody else holds: bridging changes it in place.

    Raises:
        InputError: there is no tokenizer, without which TransformerLens would look for one on the hub.
    """
    if tokenizer is None:
        raise InputError(f"'{name}' has no tokenizer, which TransformerLens asks for; give one, or use backend transformers")
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # it warns about every name that is none of its own
    try:
        with redirect_stdout(StringIO()), torch.random.fork_rng(devices=[]):
            return TransformerBridge.boot_transformers(
                name, hf_model=model, tokenizer=tokenizer, device=str(next(model.parameters()).device)
            )
    finally:
        logging.getLogger().setLevel(level)
