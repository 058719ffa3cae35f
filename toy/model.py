"""One transformer with switches; one pass runs many models of it.

In a block attention reads the (normalized) stream and writes to it, then a feed-forward may; every part but attention can be
switched off, and what both write can have a norm, too. Weights of E models of one shape lie side by side in tensors with a
leading model dimension, and one pass runs all of them: `[E, in, out]` matrices against inputs `[E, B, T, d]`, or
`[1, B, T, d]` that all models share.

Mask, rotation, decay, sinusoidal encoding and residual stream change no shape. They are numbers that enter the pass
(`Switches`), so that models that differ in them train in one batch.

The last block computes one query, that of the last position, which alone is read out.

Defaults are the ones of torch's own layers, which the sources' programs use: matrices uniform within 1/sqrt(inputs), token
and position embeddings standard normal.

Shapes in docstrings: E models, B sequences, T positions, d width, H heads, c head width, V vocabulary, f feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from probes.errors import InputError
from probes.models.view import sees

from .checks import Settings, refuse

Mask = Literal["full", "causal", "window", "prefix"]
PositionalSwitch = Literal["none", "learned", "sinusoidal", "rope", "decay"]
NormSwitch = Literal["none", "rms", "layer"]
Head = Literal["linear", "mlp"]
AttentionSwitch = Literal["softmax", "sigmoid", "relu"]
Kernel = Literal["inner", "distance"]

THETA = 10_000.0  # base of the wavelengths of RoPE and of sinusoidal encodings
NORM_EPS = 1e-5
HEAD_LAYERS = 3  # ReLU layers of the "mlp" head before its linear one, as in [Wu]
FEED_FORWARD_FACTOR = 4

Weights = Mapping[str, Tensor]  # by name, each [E, ...]


@dataclass(frozen=True)
class Architecture(Settings):
    """All switches of one toy transformer.

    `kv_heads`: so many heads of keys and values, each shared by as many neighbouring query heads. `mask`: "causal"; "window"
    (the last `window` keys, the query included); "prefix" (causal, and the first `prefix` tokens are seen by every query);
    "full". `positional`: "learned" and "sinusoidal" are added to the embeddings, "rope" rotates queries and keys, "decay"
    takes `decay` per token of distance off the logits. `frequencies`: radians per position of RoPE's planes, if not those of
    base 10,000. `vocabulary` None: inputs are vectors. `head`: "linear" unembeds, "mlp" is three ReLU layers and a linear
    one [Wu]. `factors`: fresh weights of a kind, the last part of their names ("embedding", "q", "down", "bias"), are
    multiplied by these numbers.
    `attention`: what makes weights of logits; those of "sigmoid" and "relu" are each key's own, and a query's do not sum to
    1. `kernel`: attention's logits are `q . k / sqrt(c)`, or with "distance" `-|q - k|^2 / (2 sqrt(c))`; `readout`: the
    head's are `x . u`, or `-|x - u|^2 / 2`.
    `qk_norm`: each head's queries and keys have an RMS norm before they are turned; `post_norm`: what attention and the
    feed-forward write has the block's norm before it is added.

    Raises:
        InputError: a combination that cannot be.
    """

    blocks: int = 1
    heads: int = 1
    width: int = 2
    length: int = 10  # T, the number of positions
    vocabulary: int | None = 10
    outputs: int = 10  # classes, or tokens, that the head tells apart
    mask: Mask = "causal"
    window: int | None = None
    prefix: int | None = None
    positional: PositionalSwitch = "none"
    decay: float | None = None  # nats per token of distance
    residual: bool = True
    feed_forward: bool = False
    norm: NormSwitch = "none"
    qk_norm: bool = False
    post_norm: bool = False
    output_projection: bool = True  # W_O; [Wu] has none
    head: Head = "linear"
    attention: AttentionSwitch = "softmax"
    kernel: Kernel = "inner"
    readout: Kernel = "inner"
    position_width: int | None = None  # the first axes of the stream that learned positions are added to; None: all
    kv_heads: int | None = None  # None: every query head has its own keys and values
    frequencies: tuple[float, ...] | None = None
    factors: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, switch in (("window", "mask"), ("prefix", "mask"), ("decay", "positional")):
            value, chosen = getattr(self, name), getattr(self, switch)
            if (value is not None) != (chosen == name):
                raise InputError(
                    f"{switch} is '{chosen}' and {name} is {value}; give both or neither of '{name}' and {name}=N"
                )
        planes = self.head_dim // 2
        seen = {f"{name}={getattr(self, name)}": getattr(self, name) or 1 for name in ("window", "prefix")}
        far = [said for said, size in seen.items() if size > self.length]
        refuse(
            {
                f"{''.join(far)} does not fit {self.length} positions; give from 1 to {self.length}": far,
                f"{self.heads} heads do not divide a width of {self.width}; give a divisor of it": self.width
                % self.heads,
                f"{self.groups} key-value heads do not divide {self.heads} heads; give a divisor": self.heads
                % self.groups,
                f"rope turns pairs, and a head of width {self.head_dim} is odd; give heads an even width": (
                    self.positional == "rope" and self.head_dim % 2
                ),
                f"sinusoidal encoding fills pairs, and width {self.width} is odd; give an even width": (
                    self.positional == "sinusoidal" and self.width % 2
                ),
                f"frequencies={self.frequencies} are not those of {planes} planes of rope; give one for each": (
                    self.frequencies is not None and (self.positional, len(self.frequencies)) != ("rope", planes)
                ),
                "qk_norm and post_norm are norms, and norm is 'none'; give norm='rms' or 'layer'": self.norm == "none"
                and (self.qk_norm or self.post_norm),
                f"decay is a loss per token of distance into the past, and mask '{self.mask}' shows later tokens; give "
                "mask='causal' or 'window'": self.positional == "decay" and self.mask in ("full", "prefix"),
            }
        )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def shape(self) -> Architecture:
        """The same with every switch that changes no shape at its default: models of equal `shape` train in one batch."""
        plain: Any = {"window": None, "prefix": None, "decay": None, "frequencies": None, "factors": ()}
        positional = self.positional if self.positional == "learned" else "none"
        return replace(self, mask="causal", positional=positional, residual=True, **plain)


def initial(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Fresh weights of one model, without model dimension, float32 on the CPU: the same on every machine.

    What a weight is does not depend on switches that change no shape, but for `factors`.
    """
    generator = torch.Generator().manual_seed(seed)
    a, found = architecture, {}

    def matrix(name: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        for part, size in ((name, (inputs, outputs)), (f"{name}.bias", (outputs,)))[: 1 + bias]:
            found[part] = (torch.rand(size, generator=generator) * 2 - 1) * inputs**-0.5

    def norm(name: str, on: bool = a.norm != "none") -> None:
        if on:
            found[name] = torch.ones(a.width)
        if on and a.norm == "layer":
            found[f"{name}.bias"] = torch.zeros(a.width)

    if a.vocabulary is not None:
        found["embedding"] = torch.randn(a.vocabulary, a.width, generator=generator)
    if a.positional == "learned":
        found["positions"] = torch.randn(a.length, a.position_width or a.width, generator=generator)
    for layer in range(a.blocks):
        norm(f"{layer}.attention_norm")
        for name in ("q", "k", "v", *(["o"] if a.output_projection else [])):
            matrix(f"{layer}.{name}", a.width, a.head_dim * a.groups if name in "kv" else a.width)
            if name in "qk" and a.qk_norm:
                found[f"{layer}.{name}_norm"] = torch.ones(a.head_dim)
        norm(f"{layer}.post_attention_norm", a.post_norm)
        if a.feed_forward:
            norm(f"{layer}.mlp_norm")
            matrix(f"{layer}.up", a.width, FEED_FORWARD_FACTOR * a.width, bias=True)
            matrix(f"{layer}.down", FEED_FORWARD_FACTOR * a.width, a.width, bias=True)
            norm(f"{layer}.post_mlp_norm", a.post_norm)
    norm("norm")
    for n in range(HEAD_LAYERS if a.head == "mlp" else 0):
        matrix(f"head.{n}", a.width, a.width, bias=True)
    matrix("unembedding", a.width, a.outputs, bias=a.head == "mlp")
    for kind, factor in a.factors:
        found |= {name: tensor * factor for name, tensor in found.items() if name.rpartition(".")[2] == kind}
    return found


@dataclass(frozen=True)
class Switches:
    """What distinguishes models of one shape, as numbers; None where no model of the batch has the part.

    `bias [E, 1, 1, T, T]` is added to the logits: minus infinity where a query does not look, decay. `turns
    [2, E, 1, 1, T, c]`, cosines and sines, rotate (1 and 0: not at all). `added [E, 1, T, d]` are sinusoidal encodings.
    `keep [E, 1, 1, 1]` is 1 with a residual stream, 0 without.
    """

    bias: Tensor
    turns: Tensor | None
    added: Tensor | None
    keep: Tensor

    @classmethod
    def of(cls, architectures: Sequence[Architecture], device: torch.device | str = "cpu") -> Switches:
        """Of models side by side, which must have the same `shape`."""

        def side_by_side(tensors: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(tensors))[:, None].to(device)

        positional = {a.positional for a in architectures}
        turns = added = None
        if "rope" in positional:
            turns = torch.stack(
                [side_by_side(part)[:, None] for part in zip(*map(rotation, architectures), strict=True)]
            )
        if "sinusoidal" in positional:
            added = side_by_side(sinusoids(a) * (a.positional == "sinusoidal") for a in architectures)
        keep = torch.tensor([float(a.residual) for a in architectures], device=device)[:, None, None, None]
        return cls(side_by_side(map(logit_bias, architectures))[:, None], turns, added, keep)


def logit_bias(architecture: Architecture) -> Float[Tensor, "query key"]:
    """What is added to every head's logits: minus infinity where the query does not look, and decay with distance."""
    a = architecture
    i, j = torch.arange(a.length)[:, None], torch.arange(a.length)[None, :]
    seen = sees(i, j, a.window, a.length if a.mask == "full" else a.prefix)
    return (-(a.decay or 0.0) * (i - j).float()).masked_fill(~seen, float("-inf"))


def rotation(architecture: Architecture) -> tuple[Float[Tensor, "position c"], Float[Tensor, "position c"]]:
    """(cos, sin) of RoPE's angles, each twice, as halves of a head are turned against one another; (1, 0) without RoPE."""
    a = architecture
    if a.positional != "rope":
        return torch.ones(a.length, a.head_dim), torch.zeros(a.length, a.head_dim)
    if a.frequencies is None:
        frequency = THETA ** (-torch.arange(0, a.head_dim, 2, dtype=torch.float64) / a.head_dim)
    else:
        frequency = torch.tensor(a.frequencies, dtype=torch.float64)
    angle = (torch.arange(a.length)[:, None] * frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def sinusoids(architecture: Architecture) -> Float[Tensor, "position d"]:
    """Sines at even and cosines at odd places, wavelengths from 2 pi to 10,000 times that."""
    a = architecture
    frequency = THETA ** (-torch.arange(0, a.width, 2, dtype=torch.float64) / a.width)
    angle = torch.arange(a.length)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : a.width].float()


def forward(
    architecture: Architecture, weights: Weights, switches: Switches, inputs: Tensor
) -> Float[Tensor, "model batch outputs"]:
    """The head's logits at the last position.

    Args:
        architecture: of any of the models: only their common `shape` is read.
        weights: each [E, ...].
        switches: of the E models.
        inputs: token ids [E, B, T], or vectors [E, B, T, d]; E may be 1 where all models read the same.
    """
    a, x = architecture, embedded(weights, switches, inputs)
    for layer in range(a.blocks):
        x = block(a, weights, switches, layer, x, last=layer == a.blocks - 1)
    return head(a, weights, normed(weights, "norm", x))[:, :, 0]


def embedded(weights: Weights, switches: Switches, inputs: Tensor) -> Float[Tensor, "model batch position d"]:
    """The stream that block 0 reads."""
    if "embedding" in weights:
        table = weights["embedding"]
        # One table of all models' rows: the lookup's gradient is far faster than that of indexing by [model, id].
        rows = torch.arange(len(table), device=table.device)[:, None, None] * table.shape[1]
        x = functional.embedding(inputs + rows, table.flatten(0, 1))  # [E, B, T, d]
    else:
        x = inputs
    if "positions" in weights:
        table = weights["positions"][:, None]  # [E, 1, T, axes]
        x = x + functional.pad(table, (0, x.shape[-1] - table.shape[-1]))
    return x if switches.added is None else x + switches.added


def block(
    architecture: Architecture,
    weights: Weights,
    switches: Switches,
    layer: int,
    x: Float[Tensor, "model batch position d"],
    *,
    last: bool = False,
) -> Float[Tensor, "model batch query d"]:
    """One block at all positions, or at the last one alone."""
    a, rows = architecture, x[:, :, -1:] if last else x
    q, k, v = queries_keys_values(a, weights, switches, layer, x, last=last)
    k, v = shared(a, k), shared(a, v)
    logits = (q * a.head_dim**-0.5) @ k.mT  # [E, B, H, query, T]
    if a.kernel == "distance":  # inner products less this order keys by their distance from the query
        logits = logits - k.square().sum(-1)[..., None, :] * (0.5 * a.head_dim**-0.5)
    pattern = weighed(a, logits + switches.bias[..., -rows.shape[2] :, :])
    return written(a, weights, switches, layer, rows, joined(pattern @ v))


def weighed(architecture: Architecture, logits: Tensor) -> Tensor:
    """The weights of keys, from logits that are minus infinity where a query does not look."""
    if architecture.attention == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if architecture.attention == "sigmoid" else logits.relu()


def queries_keys_values(
    architecture: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor, *, last: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of a block that reads the stream x, [E, B, H, T, c], keys and values by their own heads; RoPE has acted.

    With `last` the query is that of the last position alone.
    """
    a, n = architecture, normed(weights, f"{layer}.attention_norm", x)
    rows = {"q": n[:, :, -1:] if last else n, "k": n, "v": n}
    parts = (times(of, weights[f"{layer}.{name}"]) for name, of in rows.items())
    q, k, v = (part.unflatten(-1, (-1, a.head_dim)).transpose(2, 3) for part in parts)
    q, k = (turned(switches, normed(weights, f"{layer}.{name}_norm", part)) for name, part in (("q", q), ("k", k)))
    return q, k, v


def turned(switches: Switches, x: Float[Tensor, "model batch head row c"]) -> Tensor:
    """Queries or keys of the last rows after RoPE, which turns the halves of a head against one another."""
    if switches.turns is None:
        return x
    cos, sin = switches.turns[..., -x.shape[-2] :, :]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def written(
    architecture: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor, mixed: Tensor
) -> Float[Tensor, "model batch position d"]:
    """The stream after a block: what its heads mixed, projected and added, and then the feed-forward."""
    out = times(mixed, weights[f"{layer}.o"]) if f"{layer}.o" in weights else mixed
    x = x * switches.keep + normed(weights, f"{layer}.post_attention_norm", out)
    if not architecture.feed_forward:
        return x
    kept = x * switches.keep  # before the norm: the order of sums in the backward pass decides a gradient's last bits
    inner = affine(normed(weights, f"{layer}.mlp_norm", x), weights, f"{layer}.up")
    return kept + normed(weights, f"{layer}.post_mlp_norm", affine(functional.gelu(inner), weights, f"{layer}.down"))


def head(architecture: Architecture, weights: Weights, x: Float[Tensor, "model batch row d"]) -> Tensor:
    """Logits [E, B, row, outputs] of (normed) rows of the stream."""
    if architecture.head == "linear":
        out, table = times(x, weights["unembedding"]), weights["unembedding"]
        return out if architecture.readout == "inner" else out - 0.5 * table.square().sum(1)[:, None, None]
    for n in range(HEAD_LAYERS):
        x = affine(x, weights, f"head.{n}").relu()
    return affine(x, weights, "unembedding")


def normed(weights: Weights, name: str, x: Tensor) -> Float[Tensor, "model *rows d"]:
    """A norm by its name, that of layers if it has a bias; x itself where there is no norm of this name."""
    if name not in weights:
        return x
    aligned = (-1, *[1] * (x.ndim - 2), x.shape[-1])
    weight, bias = weights[name].reshape(aligned), weights.get(f"{name}.bias")
    if bias is None:
        return functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS) * weight
    return functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * weight + bias.reshape(aligned)


def times(x: Float[Tensor, "model batch row inputs"], matrix: Float[Tensor, "model inputs outputs"]) -> Tensor:
    """`x @ matrix` for every model, its rows in one product; x may have one model for all."""
    rows = x.flatten(1, 2)
    return torch.matmul(rows, matrix).unflatten(1, x.shape[1:3])


def affine(x: Tensor, weights: Weights, name: str) -> Tensor:
    """A linear layer with its bias."""
    rows = x.flatten(1, 2).expand(len(weights[name]), -1, -1)
    return torch.baddbmm(weights[f"{name}.bias"][:, None], rows, weights[name]).unflatten(1, x.shape[1:3])


def shared(architecture: Architecture, x: Float[Tensor, "*rows group n c"]) -> Float[Tensor, "*rows head n c"]:
    """Keys or values as each query head reads them."""
    a = architecture
    return x if a.groups == a.heads else x.repeat_interleave(a.heads // a.groups, -3)


def joined(x: Float[Tensor, "model batch head position c"]) -> Tensor:
    """Heads side by side again: [E, B, T, d]."""
    return x.transpose(2, 3).flatten(-2)
