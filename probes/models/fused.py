"""Attention as views run it, with its log-sum-exp: one place for kernels, soft-caps, windows and ALiBi; and who listens.

Fused kernels keep `log Z_i`, the log-sum-exp of a query's logits, for their backward pass and return it. With it any entry
of the pattern is `A_ij = exp(s_ij - log Z_i)`, so that a few columns of the pattern cost nothing beside the pass itself.
`scaled_dot_product_attention` throws it away; the operators underneath are called here.

No tensor has the size of a whole pattern. What no kernel supports goes block of queries by block.

`in_parts` makes blocks smaller after memory ran out (`probes.run.memory.Retry`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from ..errors import InputError
from ..run.memory import block_numbers, parts
from .behind import Past
from .view import Attention, Edit, Spec, Watcher, never_fired

SITES = ("residual", "query", "key", "value", "output", "logits", "mask")
# What transformers tells an attention function beside queries, keys and values. Any value of these says what is computed
# (the fourth are gpt-oss's learned sink logits) or changes nothing, as positions have entered by rotation or addition
# already, a pass begins at position 0, and the decoder decides what is kept or collected.
FREE = ("scaling", "softcap", "sliding_window", "s_aux", "position_ids", "cache_position", "use_cache")
FREE += ("output_attentions", "output_hidden_states")
# Of these, None or one value is known here.
FIXED: dict[str, Any] = {"dropout": 0.0, "is_causal": True, "head_mask": None, "past_key_values": None}


def attend(attention: Attention, *, normalizer: bool = False) -> Attention:
    """The attention with its output and, with `normalizer`, its log-sum-exp; differentiable."""
    length, window, prefix = attention.query.shape[-2], attention.window, attention.prefix
    # All queries see key 0 as it is: a prefix of one is none.
    usual = (window is None or length <= window) and (prefix is None or prefix <= 1)
    usual = usual and attention.softcap is None and attention.slopes is None and attention.sink is None
    output, log_z = None, None
    if usual and not attention.reweigh:
        output, log_z = _kernel(attention, normalizer)
    if output is None or (normalizer and log_z is None):
        output, log_z = _written_out(attention)
    return replace(attention, output=output, normalizer=log_z if normalizer else None)


def query_blocks(attention: Attention, *, numbers: int | None = None) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of queries that have at most `numbers` logits each, or one row.

    As many as the device is fast at unless given; within `in_parts` that part of it.
    """
    batch, heads, length, _ = attention.query.shape
    numbers = block_numbers(attention.query.device) if numbers is None else numbers
    budget, start = numbers // (parts() * batch * heads), 0
    while start < length:
        before = start - attention.first_key(start)
        # The most rows with rows (before + rows) <= budget: a block's last row sees the keys of its own rows, too.
        rows = (isqrt(before**2 + 4 * budget) - before) // 2
        if attention.last_key(start + rows) > start + rows:  # a prefix reaches beyond them: all see its end
            rows = budget // (attention.last_key(start + rows) - attention.first_key(start))
        rows = max(1, min(length - start, rows))
        yield start, start + rows
        start += rows


def _kernel(attention: Attention, normalizer: bool) -> tuple[Tensor, Tensor | None]:
    """(output, log-sum-exp or None where no kernel gives it here) of causal attention."""
    query, key, value, scale = attention.query, attention.key, attention.value, attention.scale
    # The operators do not check the last stride, as the function that chooses among them does; an edit may give any.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if (narrower := query.shape[-1] - value.shape[-1]) > 0:  # latent keys: kernels want one width
        whole, log_z = _kernel(replace(attention, value=functional.pad(value, (0, narrower))), normalizer)
        return whole[..., :-narrower], log_z
    if normalizer and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        if query.device.type == "cpu" and query.dtype != torch.float16:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
        if query.device.type == "cuda" and query.dtype != torch.float64 and query.shape[-1] % 8 == 0:
            return _cuda_kernel(query, key, value, scale)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale), None


def _cuda_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """By the kernel that PyTorch chooses for these tensors on this card."""
    kernels: Any = torch
    chosen = SDPBackend(kernels._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scale))
    if chosen == SDPBackend.CUDNN_ATTENTION:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        found = cudnn(query, key, value, None, True, 0.0, True, False, scale=scale)
    elif chosen == SDPBackend.FLASH_ATTENTION:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)
    else:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, None, True, 0.0, True, scale=scale)
    return found[0], found[1].flatten(2)[..., : query.shape[-2]]


def _written_out(attention: Attention) -> tuple[Tensor, Tensor]:
    """What no fused kernel knows (windows, soft-caps, slopes, prefixes, learned sink logits, edits), block by block."""
    outputs, normalizers = [], []
    for start, stop in query_blocks(attention):
        keys = attention.kept_keys(start, stop)
        logits, log_z = attention.weighed(start, stop, keys)
        value = attention.value[..., keys, :]
        outputs.append((logits - log_z).exp().to(value.dtype) @ value)
        normalizers.append(log_z[..., 0])
    return torch.cat(outputs, -2), torch.cat(normalizers, -1)


def check_told(module: nn.Module, mask: Tensor | None, told: Mapping[str, Any]) -> None:
    """Refuse a keyword that would make the attention differ from what `attend` computes."""
    what = f"{type(module).__qualname__} gives its attention"
    if mask is not None:
        raise InputError(f"{what} a mask of its own, which probes do not follow")
    causal = told.get("is_causal")
    told = {**told, "is_causal": getattr(module, "is_causal", True) if causal is None else causal}
    for name, value in told.items():
        if name not in FREE and (name not in FIXED or not (value is None or value == FIXED[name])):
            raise InputError(f"{what} {name}={value!s:.40}, which probes do not follow; give a model without it")


class Listening:
    """One view's pass: its edits are applied, its watcher is told on `device`, and what is recorded of it is kept.

    Behind a context (`past`), edits of one position, which is the context's, are no business of it.
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
        for edit in edits:
            if edit.site not in SITES:
                raise InputError(f"edit site '{edit.site}' does not exist; use one of {', '.join(SITES)}")
            if not 0 <= edit.layer < spec.blocks:
                raise InputError(f"edit of block {edit.layer}: the model has blocks 0 to {spec.blocks - 1}")
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

    def multiplied(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        prefix: Any = None,
        **how: Any,
    ) -> Attention:
        """What a block's attention multiplies, keys and values repeated for query heads; a scale of None is c^-1/2."""
        self.fired |= {(layer, "logits"), (layer, "mask")}
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        exact = query.shape[-1] ** -0.5 if scale is None else float(scale)
        changes = tuple(edit.function for edit in self.edits if (edit.layer, edit.site) == (layer, "logits"))
        for edit in self.edits:
            if (edit.layer, edit.site) == (layer, "mask"):
                prefix = edit.function(query.shape[-2])
        return Attention(query, key, value, exact, **how, reweigh=changes, prefix=prefix)

    def attended(self, layer: int, attention: Attention) -> None:
        """Keep what a block's attention multiplied, and tell it to the watcher, where that is asked for."""
        if not self.heard:
            return
        if (layer, "attention") in self.fired:
            raise InputError(
                f"block {layer} attends twice in one pass, and probes measure it once per block; list it twice instead"
            )
        self.fired.add((layer, "attention"))
        tensors = {name: x.detach().to(self._device) for name, x in vars(attention).items() if isinstance(x, Tensor)}
        attention = replace(attention, **tensors)
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
