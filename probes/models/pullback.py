"""One prompt, taken apart for products with its Jacobian: what `jacobian` pulls back.

`Apart` holds a model's blocks taken apart, `Prompt` the recorded pass of one prompt and its linearized blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import InputError
from ..run.memory import available, out_of_memory, own_memory
from ..run.precision import double, precise, products
from .linear import OUTPUT_TOLERANCE, AutogradBlock, LinearizedBlock, apart, largest
from .view import Edit, Trace, View, obstacle

Readout = Literal["residual", "normed", "logits"]
Engine = Literal["auto", "parts", "autograd"]
Pathway = Literal["total", "value", "score", "all"]

# Whether patterns are held constant, for each flow of cotangents that a pathway needs; of two, the difference counts.
FROZEN: dict[Pathway, tuple[bool, ...]] = {
    "total": (False,),
    "value": (True,),
    "score": (False, True),
    "all": (False, True),
}

# Slopes, as `linear.OUTPUT_TOLERANCE` outputs, may differ by rounding only.
SLOPE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-1, torch.float64: 1e-3, torch.float16: 1e-1}

CPU_ROWS = 4096  # rows of a matrix product; fewer would remake patterns for too few directions from T = 1,024 on
KEPT_SHARE = 0.5  # of the memory that was free, for a prompt's blocks; those above are made again for every chunk
CHUNK_SHARE = 0.4  # of a GPU's free memory, for the directions on their way
# Numbers of a direction on its way through a block, by position and width: cotangents of the stream (3), of a feed-forward
# four times as wide (12), of heads' outputs, queries, keys and values, each twice (8), of a band's patterns (1). For each
# source layer: what came down to it, and once more beside those of the others (2).
NUMBERS, SOURCE_NUMBERS = 24, 2

MOVED = 0.005  # of a stream's size, in `push`
AT_ONCE = 64  # positions whose logits are there at once


@dataclass
class Pace:
    """Directions at once, and whether a prompt's linearized blocks may be kept or are made again for every chunk.

    Making them again is gradient checkpointing: the streams between blocks are what is kept.
    """

    chunk: int
    keep: bool

    @classmethod
    def of(cls, model: View, length: int, chunk: int | None = None, sources: int = 1) -> Pace:
        """For prompts of `length` positions: full-rate products on a CPU, bounded memory on a GPU, or `chunk` directions.

        On a GPU that is all directions where memory suffices, and they fill it: one prompt has d T rows of a product.
        """
        fitting = CPU_ROWS // length
        if own_memory(model.device):
            numbers = NUMBERS + SOURCE_NUMBERS * (sources - 1)
            product = numbers * model.spec.width * length * model.dtype.itemsize
            fitting = min(model.spec.width, int(CHUNK_SHARE * available(model.device)) // product)
        return cls(chunk or max(1, fitting), not model.offloaded)

    def slow_down(self, error: Exception, model: View, length: int) -> None:
        """Take less memory from now on.

        Raises:
            InputError: less is not possible.
            RuntimeError: the error, where it was no lack of memory.
        """
        if not out_of_memory(error):
            raise error
        if self.chunk == 1 and not self.keep:
            raise InputError(
                f"a prompt of {length} positions of '{model.identity.name}' does not fit into memory, a product at a time; "
                "give a shorter length, dtype bfloat16, or a device map"
            ) from None
        self.chunk, self.keep = max(1, self.chunk // 2), False


class Apart:
    """Which of the model's blocks from `lowest` on are taken apart, where that is wanted and possible; one for all prompts.

    A block that the first prompt's check rejects stays whole for the others, too. `obstacle` says what a caller put on a
    block that keeps engine "auto" from taking it apart.
    """

    def __init__(self, model: View, lowest: int, engine: Engine) -> None:
        self.model, self.lowest, self.engine = model, lowest, engine
        layers = range(lowest, model.spec.blocks)
        self.known = set() if engine == "autograd" else {at for at in layers if model.parts(at) is not None}
        found = [(at, obstacle(model, at)) for at in layers if at not in self.known and engine != "autograd"]
        self.obstacle = next((f"block {at} ({what})" for at, what in found if what is not None), None)
        if engine == "parts" and len(self.known) < len(layers):
            raise InputError(
                f"engine 'parts' does not know the blocks of '{model.identity.name}' "
                f"({self.obstacle or model.identity.backend}); use engine 'auto' or 'autograd'"
            )


class Disagreement(Exception):
    """A block's parts turned out not to do what the model does; the prompt is to be begun anew."""


class Prompt:
    """One prompt's recorded pass, and how cotangents at its query position are pulled back to the source layers.

    Several readouts share it: they differ in the cotangents that their directions begin with (`tops`) alone.
    It holds the prompt's linearized blocks, as far as memory allows. Outputs are held against the model's, with `check` the
    slope of the first block of each kind, too. With `coarse` cotangents meet their weights in TF32.
    """

    def __init__(
        self,
        tokens: Tensor,
        readouts: Sequence[Readout],
        layers: list[int],
        apart: Apart,
        pace: Pace,
        *,
        check: bool,
        pathway: Pathway,
        query: int,
        coarse: bool = False,
    ) -> None:
        self.model, self.apart, self.pace, self.check, self.coarse = apart.model, apart, pace, check, coarse
        self.readouts = readouts
        self.pathway: Pathway = pathway
        self.layers, self.query = layers, query
        self.used: set[str] = set()
        self._agreed, self._kinds = set[int](), dict[tuple[Any, ...], int]()
        # (block, tolerance, difference, size, size of what was given); numbers of the model's device, which nothing waits
        # for before all blocks are on their way.
        self._found = list[tuple[int, float, Tensor, Tensor, Tensor]]()
        self._blocks: dict[int, LinearizedBlock | AutogradBlock] = {}
        self._least = (1 - KEPT_SHARE) * available(self.model.device)
        self._trace = self.model.trace(self.model.embed(tokens))
        self._last = self._trace.residual[-1][0, query].detach()

    @cached_property
    def _weights(self) -> Float[Tensor, " direction"]:
        """Of directions in the mixture that slopes are checked along."""
        count = len(self.readouts) * self.model.spec.width
        drawn = torch.randn(count, generator=torch.Generator().manual_seed(0))
        return drawn.to(self._last)

    @cached_property
    def tops(self) -> list[Float[Tensor, "d d"]]:
        """Of each readout, rows: cotangents of the last stream at the query position for d orthonormal directions of it."""
        return [readout_rows(self.model, self._last, readout) for readout in self.readouts]

    def _read_out(self, stream: Tensor, readout: Readout) -> Tensor:
        output = stream if readout == "residual" else self.model.norm(stream)
        return self.model.unembed(output) if readout == "logits" else output

    @torch.no_grad()
    def input_squares(self) -> Float[Tensor, " layer"]:
        """Mean squares of the source layers' streams at positions 1 to the query."""
        streams = (self._trace.residual[layer][0, 1 : self.query + 1] for layer in self.layers)
        return torch.stack([double(stream).pow(2).mean() for stream in streams])

    @torch.no_grad()
    def outputs(self, readout: Readout) -> Float[Tensor, "two number"]:
        """A readout at the query, and its mean over positions 1 to the query."""
        stream = self._trace.residual[-1][0, 1 : self.query + 1]
        parts = stream.split(AT_ONCE) if readout == "logits" else [stream]
        total = sum((double(self._read_out(some, readout)).sum(0) for some in parts), torch.zeros(()))
        return torch.stack([double(self._read_out(self._last, readout)), total / len(stream)])

    def ones(self) -> Float[Tensor, "readout d"]:
        """The gradients of each readout's sum with respect to the last stream at the query position."""
        residual = self._last.clone().requires_grad_()
        with torch.enable_grad():
            sums = [self._read_out(residual, readout).sum() for readout in self.readouts]
            return torch.stack([torch.autograd.grad(one, residual, retain_graph=True)[0] for one in sums])

    def block(self, layer: int) -> LinearizedBlock | AutogradBlock:
        """A block, linearized; from its parts where these do what the model does."""
        if layer in self._blocks:
            return self._blocks[layer]
        stream, parts = self._trace.residual[layer], None
        if layer in self.apart.known:
            parts = self.model.parts(layer)
        made: LinearizedBlock | AutogradBlock
        if parts is None:
            made = self._whole(layer)
        else:
            made = LinearizedBlock(parts, stream, self._trace.rotary[layer])
            if layer not in self._agreed:
                after = self._trace.residual[layer + 1]
                difference, size = apart(made.output, after)
                self._found.append((layer, OUTPUT_TOLERANCE[after.dtype], difference, size, size))
        self.used.add("autograd" if parts is None else "parts")
        if self.pace.keep and available(self.model.device) > self._least:
            self._blocks[layer] = made
        return made

    def _whole(self, layer: int) -> AutogradBlock:
        """The block as the model's own module."""
        whole = AutogradBlock(self._trace.blocks[layer], self._trace.residual[layer])
        if self.pathway != "total":
            whole.frozen_block = self._with_frozen_patterns.blocks[layer]
        return whole

    @cached_property
    def _with_frozen_patterns(self) -> Trace:
        """The prompt's pass, its queries and keys cut off from what they were made of; the same numbers come out."""
        sites: tuple[Literal["query", "key"], ...] = ("query", "key")
        cut = [Edit(site, layer, Tensor.detach) for layer in range(self.model.spec.blocks) for site in sites]
        return self.model.trace(self._trace.residual[0], edits=cut)

    def _is_first_of_its_kind(self, layer: int, block: LinearizedBlock) -> bool:
        """Whether no block with the same parts was looked at before: their slopes are right or wrong together."""
        kind = tuple(x if isinstance(x, int | float | None) else type(x) for x in vars(block.parts).values())
        return layer not in self._agreed and self._kinds.setdefault(kind, layer) == layer

    def _compare(self, layer: int, cotangents: Tensor, pulled: Tensor, first: int | None, frozen: bool) -> None:
        """Hold a block's product against the model's own, for a mixture of the cotangents [K, 1, rows, d] that it read."""
        weights = self._weights[: len(cotangents)].to(cotangents)
        mixed, expected = ((weights @ x.permute(1, 2, 0, 3))[None] for x in (cotangents, pulled))
        difference, size = apart(expected, self._whole(layer).vjp(mixed, first, frozen=frozen))
        self._found.append((layer, SLOPE_TOLERANCE[mixed.dtype], difference, size, largest(mixed)))

    def _look(self) -> None:
        """Wait for what was found out about blocks since the last look.

        Raises:
            InputError: engine "parts", and a block does not do what its parts say.
            Disagreement: the same with engine "auto"; the prompt is to be begun anew, with that block as the model's own.
        """
        if not self._found:
            return
        layers, tolerances, *numbers = zip(*self._found, strict=True)
        found = zip(layers, tolerances, *torch.stack(sum(numbers, ())).view(3, -1).tolist(), strict=True)
        # What is not finite where a block begins was made so by another, and says nothing about this one.
        wrong = {
            n for n, most, difference, size, given in found if not difference <= most * size and math.isfinite(given)
        }
        self._agreed.update(layers)
        self._found = []
        if not wrong:
            return
        if self.apart.engine == "parts":
            raise InputError(
                f"block {max(wrong)} of '{self.model.identity.name}' does not do what its parts say; "
                "use engine 'auto' or 'autograd'"
            )
        self.apart.known -= wrong
        raise Disagreement

    def pull(self, cotangent: Tensor) -> Float[Tensor, "source k position d"]:
        """Pull [k, d] cotangents at the query position back to the source layers, each by every pathway asked for."""
        found = {}
        flows = {frozen: cotangent[:, None, None, :] for frozen in FROZEN[self.pathway]}
        for layer in reversed(range(self.apart.lowest, self.model.spec.blocks)):
            first = self.query if layer == self.model.spec.blocks - 1 else None
            block, before = self.block(layer), flows
            with products("tf32" if self.coarse and isinstance(block, LinearizedBlock) else "ieee"):
                flows = {frozen: block.vjp(flow, first, frozen=frozen) for frozen, flow in before.items()}
            if self.check and isinstance(block, LinearizedBlock) and self._is_first_of_its_kind(layer, block):
                frozen, flow = next(iter(flows.items()))
                self._compare(layer, before[frozen], flow, first, frozen)
            if layer in self.layers:
                total, *value = (flow[:, 0] for flow in flows.values())
                score = [total - value[0]] if value else []
                found[layer] = [total, *value, *score] if self.pathway == "all" else (score or [total])
        self._look()
        return torch.stack([pulled for layer in self.layers for pulled in found[layer]])

    @torch.no_grad()
    def push(self, tangents: Float[Tensor, "layer k position d"]) -> Float[Tensor, "k d"]:
        """The last stream's change at the query under tangents at the source layers together, up to a factor for each.

        The difference between the recorded pass and one whose streams are moved by `MOVED` of their size: enough to choose
        directions by. A smaller step would be nearer to first order, and rounding would choose with it.
        """
        sizes = (self._trace.residual[layer].pow(2).mean() for layer in self.layers)
        step = MOVED * torch.stack([*sizes]).min().sqrt()
        moved = step * tangents / tangents.pow(2).mean((0, 2, 3), keepdim=True).sqrt().clamp_min(1e-30)
        edits = [Edit("residual", layer, by.add) for layer, by in zip(self.layers, moved, strict=True)]
        embedded = self._trace.residual[0].expand(tangents.shape[1], -1, -1)
        return (self.model.residual(embedded, edits=edits)[:, self.query] - self._last) / step


def readout_rows(model: View, residual: Float[Tensor, " d"], readout: Readout) -> Float[Tensor, "d d"]:
    """[direction, d] cotangents of the stream for d orthonormal directions of the readout.

    For logits W n the directions are those of R = (W^T W)^(1/2), which has the same norms. The symmetric root does not
    depend on the signs of eigenvectors, which differ between devices: a sketch's probes mean the same directions on all.
    """
    identity = torch.eye(model.spec.width, dtype=residual.dtype, device=residual.device)
    if readout == "residual":
        return identity
    repeated = residual.detach().expand_as(identity).clone().requires_grad_()
    with torch.enable_grad():
        normed = model.norm(repeated)
        (rows,) = torch.autograd.grad(normed, repeated, identity)  # d normed_i / d residual
    if readout == "normed":
        return rows
    normed = normed.detach()
    # Reverse mode twice: torch's forward mode warns of a deprecation of its own when it is first used.
    _, columns = torch.autograd.functional.jvp(model.unembed, normed, identity)  # [d, vocabulary]
    assert isinstance(columns, Tensor)
    # Summed in float64: of an eigenvalue that is nearly zero float32 misses 1e-7 of the largest, whose root is 3e-4.
    gram = torch.zeros_like(identity, dtype=torch.float64, device=precise(identity.device))
    for some in columns.split(len(columns), 1):
        gram.addmm_(double(some), double(some).T)
    values, vectors = torch.linalg.eigh(gram)
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).to(rows) @ rows
