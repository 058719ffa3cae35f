"""One transformer with switches; one pass runs many models of it.

A block is pre-norm: attention reads the (normalized) stream and writes to it, then a feed-forward may; every part but
attention can be switched off. Weights of E models of one shape lie side by side in tensors with a leading model dimension,
and one pass runs all of them: `[E, in, out]` matrices against inputs `[E, B, T, d]`, or `[1, B, T, d]` that all models
share.

Mask, rotation, decay, sinusoidal encoding and residual stream change no shape. They are numbers that enter the pass
(`Switches`), so that models that differ in them train in one batch.

When only the last position is read out, the last block computes one query, and by associativity neither keys nor values:
`q . (n_j W_K) = (q W_K^T) . n_j` and `sum_j A_j (n_j W_V) = (sum_j A_j n_j) W_V`, which take d products instead of T d.

Defaults are the ones of torch's own layers, which the sources' programs use: matrices uniform within 1/sqrt(inputs), token
and position embeddings standard normal.

Shapes in docstrings: E models, B sequences, T positions, d width, H heads, c head width, V vocabulary, f feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from probes.models.masks import sees

from .checks import at_least, one_of, refuse

Mask = Literal["full", "causal", "window", "prefix"]
PositionalSwitch = Literal["none", "learned", "sinusoidal", "rope", "decay"]
NormSwitch = Literal["none", "rms", "layer"]
Head = Literal["linear", "mlp"]

THETA = 10_000.0  # base of the wavelengths of RoPE and of sinusoidal encodings
NORM_EPS = 1e-5
HEAD_LAYERS = 3  # ReLU layers of the "mlp" head before its linear one, as in [Wu]
FEED_FORWARD_FACTOR = 4

Weights = Mapping[str, Tensor]  # by name, each [E, ...]


@dataclass(frozen=True)
class Architecture:
    """All switches of one toy transformer.

    `mask`: "causal"; "window" (the last `window` keys, the query included); "prefix" (causal, and the first `prefix`
    tokens are seen by every query); "full". `positional`: "learned" and "sinusoidal" are added to the embeddings, "rope"
    rotates queries and keys, "decay" takes `decay` per token of distance off the logits. `vocabulary` None: the inputs are
    vectors. `head`: "linear" unembeds, "mlp" is three ReLU layers and a linear one [Wu].

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
    output_projection: bool = True  # W_O; [Wu] has none
    head: Head = "linear"

    def __post_init__(self) -> None:
        for name in (
            "blocks",
            "heads",
            "width",
            "length",
            "outputs",
            *(["vocabulary"] if self.vocabulary is not None else []),
        ):
            at_least(name, getattr(self, name), 1)
        for name, kind in {"mask": Mask, "positional": PositionalSwitch, "norm": NormSwitch, "head": Head}.items():
            one_of(name, getattr(self, name), get_args(kind))
        head = self.width // self.heads
        reasons: dict[str, object] = {
            f"{self.heads} heads do not divide a width of {self.width}; give a divisor of it": self.width % self.heads,
            f"rope turns pairs, and a head of width {head} is odd; give heads an even width": (
                self.positional == "rope" and head % 2
            ),
            f"sinusoidal encoding fills pairs, and width {self.width} is odd; give an even width": (
                self.positional == "sinusoidal" and self.width % 2
            ),
        }
        for name, value in (("window", self.window), ("prefix", self.prefix)):
            given = "none is given" if value is None else f"{name}={value} is given"
            alone = f"mask is '{self.mask}' and {given}; give {name}=N with mask='{name}', and only there"
            fits = f"{name}={value} does not fit {self.length} positions; give from 1 to {self.length}"
            reasons |= {alone: (value is not None) != (self.mask == name)}
            reasons |= {fits: value is not None and not 1 <= value <= self.length}
        decays = self.positional == "decay"
        reasons |= {
            f"positional is '{self.positional}' and decay is {self.decay}; give decay=M with positional='decay', "
            "and only there": (self.decay is not None) != decays,
            f"decay={self.decay} is no rate; give a finite number of nats per token, 0 or more": (
                self.decay is not None and not 0 <= self.decay < math.inf
            ),
            f"decay is a loss per token of distance into the past, and mask '{self.mask}' shows later tokens; "
            "give mask='causal' or 'window'": decays and self.mask in ("full", "prefix"),
        }
        refuse(reasons)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def shape(self) -> Architecture:
        """The same with every switch that changes no shape at its default: models of equal `shape` train in one batch."""
        positional = "learned" if self.positional == "learned" else "none"
        return replace(self, mask="causal", window=None, prefix=None, positional=positional, decay=None, residual=True)

    def described(self) -> dict[str, object]:
        """All fields, as they enter provenance and the fingerprints of checkpoints."""
        return asdict(self)


def initial(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Fresh weights of one model, without model dimension, float32 on the CPU: the same on every machine.

    What a weight is does not depend on switches that change no shape.
    """
    generator = torch.Generator().manual_seed(seed)
    a, found = architecture, {}

    def matrix(name: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        for part, size in ((name, (inputs, outputs)), (f"{name}.bias", (outputs,)))[: 1 + bias]:
            found[part] = (torch.rand(size, generator=generator) * 2 - 1) * inputs**-0.5

    def norm(name: str) -> None:
        if a.norm != "none":
            found[name] = torch.ones(a.width)
        if a.norm == "layer":
            found[f"{name}.bias"] = torch.zeros(a.width)

    if a.vocabulary is not None:
        found["embedding"] = torch.randn(a.vocabulary, a.width, generator=generator)
    if a.positional == "learned":
        found["positions"] = torch.randn(a.length, a.width, generator=generator)
    for layer in range(a.blocks):
        norm(f"{layer}.attention_norm")
        for name in ("q", "k", "v", *(["o"] if a.output_projection else [])):
            matrix(f"{layer}.{name}", a.width, a.width)
        if a.feed_forward:
            norm(f"{layer}.mlp_norm")
            matrix(f"{layer}.up", a.width, FEED_FORWARD_FACTOR * a.width, bias=True)
            matrix(f"{layer}.down", FEED_FORWARD_FACTOR * a.width, a.width, bias=True)
    norm("norm")
    for n in range(HEAD_LAYERS if a.head == "mlp" else 0):
        matrix(f"head.{n}", a.width, a.width, bias=True)
    matrix("unembedding", a.width, a.outputs, bias=a.head == "mlp")
    return found


@dataclass(frozen=True)
class Switches:
    """What distinguishes models of one shape, as numbers; None where no model of the batch has the part.

    `bias [E, 1, 1, T, T]` is added to the logits: minus infinity where a query does not look, decay. `cos`, `sin`
    `[E, 1, 1, T, c]` rotate (1 and 0: not at all). `added [E, 1, T, d]` are sinusoidal encodings. `keep [E, 1, 1, 1]` is 1
    with a residual stream, 0 without.
    """

    bias: Tensor
    cos: Tensor | None
    sin: Tensor | None
    added: Tensor | None
    keep: Tensor

    @classmethod
    def of(cls, architectures: Sequence[Architecture], device: torch.device | str = "cpu") -> Switches:
        """Of models side by side, which must have the same `shape`."""

        def side_by_side(tensors: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(tensors))[:, None].to(device)

        positional = {a.positional for a in architectures}
        cos = sin = added = None
        if "rope" in positional:
            cos, sin = (side_by_side(part)[:, None] for part in zip(*map(rotation, architectures), strict=True))
        if "sinusoidal" in positional:
            added = side_by_side(sinusoids(a) * (a.positional == "sinusoidal") for a in architectures)
        keep = torch.tensor([float(a.residual) for a in architectures], device=device)[:, None, None, None]
        return cls(side_by_side(map(logit_bias, architectures))[:, None], cos, sin, added, keep)


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
    frequency = THETA ** (-torch.arange(0, a.head_dim, 2, dtype=torch.float64) / a.head_dim)
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
    x = embedded(weights, switches, inputs)
    for layer in range(architecture.blocks - 1):
        x = block(architecture, weights, switches, layer, x)
    x = last_block(architecture, weights, switches, x)
    return head(architecture, weights, normed(architecture, weights, "norm", x))[:, :, 0]


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
        x = x + weights["positions"][:, None]
    return x if switches.added is None else x + switches.added


def block(
    architecture: Architecture,
    weights: Weights,
    switches: Switches,
    layer: int,
    x: Float[Tensor, "model batch position d"],
) -> Float[Tensor, "model batch position d"]:
    """One block, all positions."""
    q, k, v = queries_keys_values(architecture, weights, switches, layer, x)
    logits = (q * architecture.head_dim**-0.5) @ k.transpose(-1, -2) + switches.bias  # [E, B, H, T, T]
    return written(architecture, weights, switches, layer, x, joined(logits.softmax(-1) @ v))


def queries_keys_values(
    architecture: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of a block that reads the stream x, each [E, B, H, T, c]; queries and keys are rotated where RoPE is on."""
    n = normed(architecture, weights, f"{layer}.attention_norm", x)
    q, k, v = (split(architecture, times(n, weights[f"{layer}.{name}"])) for name in "qkv")
    return rotated(switches, q), rotated(switches, k), v


def last_block(
    architecture: Architecture, weights: Weights, switches: Switches, x: Float[Tensor, "model batch position d"]
) -> Float[Tensor, "model batch 1 d"]:
    """The last block at the last position."""
    a, layer = architecture, architecture.blocks - 1
    n = normed(a, weights, f"{layer}.attention_norm", x)
    q = split(a, times(n[:, :, -1:], weights[f"{layer}.q"])) * a.head_dim**-0.5  # [E, B, H, 1, c]
    if switches.cos is None:
        to_key = by_head(a, weights[f"{layer}.k"])  # [E, H, d, c]
        asked = torch.einsum("ebhc,ehdc->ebhd", q[..., 0, :], to_key)
        logits = asked @ n.transpose(-1, -2)  # [E, B, H, T]
    else:
        k = rotated(switches, split(a, times(n, weights[f"{layer}.k"])))
        logits = (rotated(switches, q, last=True) @ k.transpose(-1, -2))[..., 0, :]
    pattern = (logits + switches.bias[..., -1, :]).softmax(-1)
    read = torch.einsum("ebhd,ehdc->ebhc", pattern @ n, by_head(a, weights[f"{layer}.v"]))
    return written(a, weights, switches, layer, x[:, :, -1:], read.flatten(-2)[:, :, None])


def written(
    architecture: Architecture, weights: Weights, switches: Switches, layer: int, x: Tensor, mixed: Tensor
) -> Float[Tensor, "model batch position d"]:
    """The stream after a block: what its heads mixed, projected and added, and then the feed-forward."""
    out = times(mixed, weights[f"{layer}.o"]) if f"{layer}.o" in weights else mixed
    x = x * switches.keep + out
    if not architecture.feed_forward:
        return x
    kept = x * switches.keep  # before the norm: the order of sums in the backward pass decides a gradient's last bits
    inner = affine(normed(architecture, weights, f"{layer}.mlp_norm", x), weights, f"{layer}.up")
    return kept + affine(functional.gelu(inner), weights, f"{layer}.down")


def head(architecture: Architecture, weights: Weights, x: Float[Tensor, "model batch row d"]) -> Tensor:
    """Logits [E, B, row, outputs] of (normed) rows of the stream."""
    if architecture.head == "linear":
        return times(x, weights["unembedding"])
    for n in range(HEAD_LAYERS):
        x = affine(x, weights, f"head.{n}").relu()
    return affine(x, weights, "unembedding")


def normed(architecture: Architecture, weights: Weights, name: str, x: Tensor) -> Float[Tensor, "model batch row d"]:
    """A norm by its name, or x itself where norms are off."""
    if architecture.norm == "none":
        return x
    if architecture.norm == "layer":
        x = functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
        return x * weights[name][:, None, None] + weights[f"{name}.bias"][:, None, None]
    return functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS) * weights[name][:, None, None]


def times(x: Float[Tensor, "model batch row inputs"], matrix: Float[Tensor, "model inputs outputs"]) -> Tensor:
    """`x @ matrix` for every model, its rows in one product; x may have one model for all."""
    rows = x.flatten(1, 2)
    return torch.matmul(rows, matrix).unflatten(1, x.shape[1:3])


def affine(x: Tensor, weights: Weights, name: str) -> Tensor:
    """A linear layer with its bias."""
    rows = x.flatten(1, 2).expand(len(weights[name]), -1, -1)
    return torch.baddbmm(weights[f"{name}.bias"][:, None], rows, weights[name]).unflatten(1, x.shape[1:3])


def split(architecture: Architecture, x: Float[Tensor, "model batch position d"]) -> Tensor:
    """Heads apart: [E, B, H, T, c]."""
    return x.unflatten(-1, (architecture.heads, architecture.head_dim)).transpose(2, 3)


def joined(x: Float[Tensor, "model batch head position c"]) -> Tensor:
    """Heads side by side again: [E, B, T, d]."""
    return x.transpose(2, 3).flatten(-2)


def by_head(architecture: Architecture, matrix: Float[Tensor, "model d d"]) -> Tensor:
    """A projection's columns by head: [E, H, d, c]."""
    return matrix.unflatten(-1, (architecture.heads, architecture.head_dim)).transpose(1, 2)


def rotated(switches: Switches, x: Float[Tensor, "model batch head position c"], *, last: bool = False) -> Tensor:
    """RoPE: the first half of a head turned against the second. `last`: x holds the last position alone."""
    if switches.cos is None or switches.sin is None:
        return x
    cos, sin = (y[..., -1:, :] if last else y for y in (switches.cos, switches.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
