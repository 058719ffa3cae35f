"""The attention function that transformers calls in a view's shadow, and the pass of a view that listens to attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..errors import InputError
from .behind import Past
from .fused import attend, check_edits, check_told
from .view import Attention, Edit, Reweigh, Spec, Watcher, never_fired

ATTENTION = "headwater"  # the name under which our attention function is registered with transformers


class Listening:
    """One view's pass: its edits are applied, its watcher is told, and what is recorded of it is kept.

    Args:
        spec: the view's.
        edits, past: of the pass. Behind a context, edits of one position, which is the context's, are no business of it.
        watcher: the view's.
        device: where edits and the watcher find the tensors.
        recording: whether attention is kept.
    """

    def __init__(
        self,
        spec: Spec,
        edits: Sequence[Edit],
        watcher: Watcher | None,
        device: torch.device,
        *,
        recording: bool = False,
        past: Past | None = None,
    ) -> None:
        check_edits(edits, spec)
        self.spec = spec
        self.edits = [edit for edit in edits if past is None or edit.position is None]
        self.watcher, self.past, self.recording, self._device = watcher, past, recording, device
        self.fired: set[tuple[int, str]] = set()
        self.modules: Mapping[int, int] = {}  # blocks by the id of their attention
        self.attention: dict[int, Attention] = {}

    @property
    def heard(self) -> bool:
        """Whether anything is to be heard of every block's attention."""
        return self.recording or self.watcher is not None

    def edited(self, layer: int, site: str, tensor: Tensor) -> Tensor:
        """What stands at that site after its edits."""
        self.fired.add((layer, site))
        for edit in self.edits:
            if (edit.layer, edit.site) == (layer, site):
                tensor = edit(tensor.to(self._device)).to(tensor.device)
        return tensor

    def reweighing(self, layer: int) -> tuple[Reweigh, ...]:
        """The block's edits of logits."""
        self.fired.add((layer, "logits"))
        return tuple(edit.function for edit in self.edits if (edit.layer, edit.site) == (layer, "logits"))

    def attended(self, layer: int, attention: Attention) -> None:
        """Keep what a block's attention multiplied, and tell it to the watcher, where that is asked for."""
        if not self.heard:
            return
        if (layer, "attention") in self.fired:
            raise InputError(
                f"block {layer} attends twice in one pass, and probes measure it once per block; list it twice instead"
            )
        self.fired.add((layer, "attention"))
        attention = attention.detached(self._device)
        if self.recording:
            self.attention[layer] = attention
        if self.watcher is not None:
            self.watcher(layer, attention)

    def check(self, layers: Iterable[int], *sites: tuple[int, str]) -> None:
        """Check that these sites fired, every layer's attention where that is to be heard, and whatever is edited.

        Raises:
            RuntimeError: a site did not fire, naming the block and the site.
        """
        attention = [(layer, "attention") for layer in layers if self.heard]
        for layer, site in (*attention, *((edit.layer, edit.site) for edit in self.edits), *sites):
            if (layer, site) not in self.fired:
                raise never_fired(self.spec.family, site, layer)


listening: ContextVar[Listening] = ContextVar("headwater_attention_listener")


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls in a shadow: the listening view may change q, k, v, then this attends as the model would.

    Raises:
        InputError: a keyword that is not known here, or a value by which the model attends in another way.
    """
    check_told(module, attention_mask, kwargs)
    heard = listening.get()
    layer = heard.modules[id(module)]
    query, key, value = (heard.edited(layer, site, x) for site, x in (("query", query), ("key", key), ("value", value)))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = kwargs.get("scaling")
    attention = Attention(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=kwargs.get("softcap"),
        window=kwargs.get("sliding_window"),
        sink=kwargs.get("s_aux"),
        reweigh=heard.reweighing(layer),
    )
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


def refuse_other_attention(config: Any) -> None:
    """Raise InputError where a model's attention is a function that is not transformers' own.

    Views compute softmax attention, whatever the model's own function does: the numbers would be another model's.
    """
    name, known = getattr(config, "_attn_implementation", None), AttentionInterface()
    if name in known and name != ATTENTION and not known[name].__module__.startswith("transformers."):
        raise InputError(
            f"the model's attention is the registered function '{name}', and probes compute softmax attention; if it is "
            "that, too, call model.set_attn_implementation('sdpa') first"
        )
