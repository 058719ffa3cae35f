"""The attention function that transformers calls in a view's shadow, and the pass of a view that listens to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .fused import attend, check_told
from .view import Attention, Edit, Site, Watcher

ATTENTION = "headwater"  # the name under which our attention function is registered with transformers


class Listening:
    """One view's pass: its edits are applied, its attention is recorded, and its watcher is told."""

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
        self.watched = watcher is not None  # then the log-sum-exp is wanted
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
            self._sites[layer].fired.append(brought(attention.detached(), self._device))
        if self._watcher is not None:
            self._watcher(layer, brought(attention.detached(), self._device))
        for edit in self._edits:
            if (edit.layer, edit.site) == (layer, "output"):
                output = edit.function(output.to(self._device)).to(output.device)
        return output


def brought(attention: Attention, device: torch.device) -> Attention:
    """The same on that device."""
    moved = {name: x.to(device) for name, x in vars(attention).items() if isinstance(x, Tensor)}
    return replace(attention, **moved)


listening: ContextVar[Listening | None] = ContextVar("headwater_attention_listener", default=None)


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls in a shadow: the listening view may change q, k, v, then this attends as the model would.

    Raises:
        InputError: a keyword that is not known here, or a value by which the model attends in another way.
    """
    check_told(module, attention_mask, kwargs)
    heard = listening.get()
    if heard is not None:
        query, key, value = heard.receive(module, query, key, value)
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
    attention = attend(given, normalizer=heard is not None and heard.watched)
    output = attention.output if heard is None else heard.attended(module, attention)
    assert output is not None
    return output.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks follow from positions here: causal, within the window that the attention function is told; no padding."""


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, _no_mask)  # type: ignore[arg-type]
