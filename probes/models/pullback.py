"""One prompt, taken apart for products with its Jacobian: what `jacobian` pulls back and pushes forward.

`Apart` holds a model's blocks taken apart, `Prompt` the recorded pass of one prompt and its linearized blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import InputError
from ..run.precision import double, precise
from .linear import AutogradBlock, Folded, LinearizedBlock, flops, own_flops
from .memory import Pace
from .pointwise import close
from .view import Edit, Parts, Trace, View, obstacle

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
OWN_POSITIONS = 8  # at which tangents enter a block's attention in `own_path`: their projections are most of its cost

# Slopes, as `linear.OUTPUT_TOLERANCE` outputs, may differ by rounding only.
SLOPE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-1, torch.float64: 1e-3, torch.float16: 1e-1}


class Apart:
    """The model's blocks from `lowest` on, taken apart where that is wanted and possible; one for all prompts.

    A block that the first prompt's check rejects has its parts removed here, and so for the others, too. `obstacle` says
    what a caller put on a block that keeps engine "auto" from taking it apart.

    Raises:
        InputError: engine "parts" does not know some block.
    """

    def __init__(self, model: View, lowest: int, engine: Engine) -> None:
        self.model, self.lowest, self.engine = model, lowest, engine
        self.obstacle: str | None = None
        # None: this block's parts are not held, since its weights are fetched from elsewhere
        self._parts: dict[int, Parts | None] = {}
        self._folded: dict[int, Folded] = {}
        for layer in range(lowest, model.spec.blocks) if engine != "autograd" else ():
            parts = model.parts(layer)
            if parts is not None:
                self._parts[layer] = None if model.offloaded else parts
            elif self.obstacle is None and (found := obstacle(model, layer)) is not None:
                self.obstacle = f"block {layer} ({found})"
        if engine == "parts" and len(self._parts) < model.spec.blocks - lowest:
            raise InputError(
                f"engine 'parts' does not know the blocks of '{model.identity.name}' "
                f"({self.obstacle or model.identity.backend}); use engine 'auto' or 'autograd'"
            )

    def parts(self, layer: int) -> Parts | None:
        """The block's parts, or None where it is not known or was rejected."""
        return self._parts.get(layer) or (self.model.parts(layer) if layer in self._parts else None)

    def folded(self, layer: int, parts: Parts) -> Folded:
        """Its matrices as `LinearizedBlock` wants them."""
        if self.model.offloaded:
            return Folded.of(parts)
        if layer not in self._folded:
            self._folded[layer] = Folded.of(parts)
        return self._folded[layer]

    def reject(self, layer: int) -> None:
        """The block does something else than its parts say."""
        self._parts.pop(layer, None)
        self._folded.pop(layer, None)


class Prompt:
    """One prompt, and how cotangents at its query position are pulled back to the sources."""

    def __init__(
        self,
        model: View,
        tokens: Tensor,
        readout: Readout,
        layers: list[int],
        apart: Apart,
        pace: Pace,
        *,
        check: bool,
        pathway: Pathway = "total",
        query: int | None = None,  # the last position
    ) -> None:
        self.model, self.tokens, self.check = model, tokens, check
        self.readout: Readout = readout
        self.pathway: Pathway = pathway
        self.layers, self.apart = layers, apart
        self.length = tokens.shape[1]
        self.query = self.length - 1 if query is None else query
        self.used: set[str] = set()
        self._agreed: set[int] = set()
        self._blocks: dict[int, LinearizedBlock | AutogradBlock] = {}
        self.pace = pace
        self._trace: Trace | None = None
        self._frozen: Trace | None = None  # the same pass with constant patterns; made where autograd needs it
        self._top: Tensor | None = None

    @contextmanager
    def linearized(self) -> Iterator[None]:
        """Within this context the prompt's recorded pass and its linearized blocks are held in memory."""
        self._trace = self.model.trace(self.model.embed(self.tokens))
        try:
            yield
        finally:
            self._trace = self._frozen = self._top = None
            self._blocks.clear()

    def top(self) -> Float[Tensor, "d d"]:
        """Rows: cotangents of the last stream at the query position for d orthonormal directions of the readout."""
        if self._top is None:
            assert self._trace is not None
            self._top = readout_rows(self.model, self._trace.residual[-1][0, self.query], self.readout)
        return self._top

    def _read_out(self, stream: Tensor) -> Tensor:
        output = stream if self.readout == "residual" else self.model.norm(stream)
        return self.model.unembed(output) if self.readout == "logits" else output

    @torch.no_grad()
    def scales(self) -> Float[Tensor, "layer three"]:
        """Mean squares for each source layer: its stream at positions 1 to the query, and at 0; the readout, per d."""
        assert self._trace is not None
        output = self._read_out(self._trace.residual[-1][0, self.query])
        of_output = double(output).pow(2).sum().cpu() / self.model.spec.width
        found = []
        for layer in self.layers:
            squares = double(self._trace.residual[layer][0, : self.query + 1]).pow(2).mean(-1).cpu()
            found.append(torch.stack([squares[1:].mean(), squares[0], of_output]))
        return torch.stack(found)

    def ones(self) -> Float[Tensor, "1 d"]:
        """The gradient of the readout's sum with respect to the last stream at the query position."""
        assert self._trace is not None
        residual = self._trace.residual[-1][0, self.query].detach().clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self._read_out(residual).sum(), residual)
        return gradient[None]

    def block(self, layer: int) -> LinearizedBlock | AutogradBlock:
        if layer in self._blocks:
            return self._blocks[layer]
        assert self._trace is not None
        stream, after = self._trace.residual[layer], self._trace.residual[layer + 1]
        parts = self.apart.parts(layer)
        made: LinearizedBlock | AutogradBlock | None = None
        own = AutogradBlock(self._trace.blocks[layer], stream)
        if parts is not None:
            made = LinearizedBlock(parts, stream, self._trace.rotary[layer], self.apart.folded(layer, parts))
            if layer not in self._agreed and not self._agrees(made, own, after):
                if self.apart.engine == "parts":
                    raise InputError(
                        f"block {layer} of '{self.model.identity.name}' does not do what its parts say; "
                        "use engine 'auto' or 'autograd'"
                    )
                made = None
                self.apart.reject(layer)
            self._agreed.add(layer)
        if made is None:
            made = own
            if self.pathway != "total":
                made.frozen_block = self._with_frozen_patterns().blocks[layer]
        self.used.add("parts" if isinstance(made, LinearizedBlock) else "autograd")
        if self.pace.keep:
            self._blocks[layer] = made
        return made

    def _with_frozen_patterns(self) -> Trace:
        """The prompt's pass, its queries and keys cut off from what they were made of; the same numbers come out."""
        if self._frozen is None:
            assert self._trace is not None
            sites: tuple[Literal["query", "key"], ...] = ("query", "key")
            cut = [Edit(site, layer, Tensor.detach) for layer in range(self.model.spec.blocks) for site in sites]
            self._frozen = self.model.trace(self._trace.residual[0], edits=cut)
        return self._frozen

    def _agrees(self, made: LinearizedBlock, own: AutogradBlock, after: Tensor) -> bool:
        """Does the block as taken apart do what the model did, and (first prompt) have its slope along one direction?"""
        if not made.gives(after):
            return False
        if not self.check:
            return True
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(after.shape, generator=generator).to(after)[None]
        return close(made.vjp(probe), own.vjp(probe), SLOPE_TOLERANCE[after.dtype])

    def pull(self, cotangent: Tensor) -> Float[Tensor, "source k position d"]:
        """Pull [k, d] cotangents at the query position back to the source layers, each by every pathway asked for."""
        found = {}
        flows = {frozen: cotangent[:, None, None, :] for frozen in FROZEN[self.pathway]}
        for layer in reversed(range(self.apart.lowest, self.model.spec.blocks)):
            first = self.query if layer == self.model.spec.blocks - 1 else None
            flows = {frozen: self.block(layer).vjp(flow, first, frozen=frozen) for frozen, flow in flows.items()}
            if layer in self.layers:
                total, *value = (flow[:, 0] for flow in flows.values())
                score = [total - value[0]] if value else []
                found[layer] = [total, *value, *score] if self.pathway == "all" else (score or [total])
        return torch.stack([pulled for layer in self.layers for pulled in found[layer]])

    def own_path(
        self, columns: int, most: float, generator: torch.Generator
    ) -> tuple[Float[Tensor, "columns d"], float] | None:
        """Random images of what reaches the query through any block's attention, and their cost in products.

        Gaussian tangents as large as the stream enter every block's attention at a few positions, drawn anew for every
        block, and follow the query's own path to the readout. Fewer than `columns` where they would cost more than `most`;
        None where a block is not taken apart.
        """
        layers = range(self.apart.lowest, self.model.spec.blocks)
        if not all(isinstance(self.block(layer), LinearizedBlock) for layer in layers):
            return None
        assert self._trace is not None
        spec = self.model.spec
        positions = min(OWN_POSITIONS, self.query + 1)
        one = sum(own_flops(parts, length=self.length, positions=positions) for parts in self._every_parts())
        columns = min(columns, int(most * self.product_flops() / one))
        own = self._trace.residual[0].new_zeros(columns, 1, 1, spec.width)
        for layer in layers:
            block, stream, window = self.block(layer), self._trace.residual[layer], spec.windows[layer]
            assert isinstance(block, LinearizedBlock)
            least = 0 if window is None else max(0, self.query + 1 - window)
            others = torch.randperm(self.query - least, generator=generator)[: OWN_POSITIONS - 1] + least
            at = torch.cat([others.sort().values, torch.tensor([self.query])])
            entering = torch.randn(columns, 1, len(at), spec.width, generator=generator)
            entering *= stream.float().pow(2).mean().sqrt().cpu()
            own = block.own_jvp(own, entering.to(stream), self.query, at.to(stream.device))
        return own[:, 0, 0] @ self.top().T, columns * one / self.product_flops()

    def push(self, tangents: Float[Tensor, "layer k position d"]) -> Float[Tensor, "k d"]:
        """The readout's change under tangents at the source layers together; patterns are constant in the value path."""
        flow = torch.zeros_like(tangents[0])[:, None]
        top = self.model.spec.blocks - 1
        for layer in range(self.apart.lowest, top + 1):
            if layer in self.layers:
                flow = flow + tangents[self.layers.index(layer)][:, None]
            flow = self.block(layer).jvp(flow, self.query if layer == top else None, frozen=self.pathway == "value")
        return flow[:, 0, -1] @ self.top().T

    def product_flops(self) -> int:
        """Matrix-product operations of one product, as performed; needs parts."""
        top = self.model.spec.blocks - 1 - self.apart.lowest
        return sum(
            flops(parts, length=self.length, rows=1 if n == top else None)
            for n, parts in enumerate(self._every_parts())
        )

    def _every_parts(self) -> Iterator[Parts]:
        for layer in range(self.apart.lowest, self.model.spec.blocks):
            parts = self.apart.parts(layer)
            if parts is None:
                raise ValueError(f"block {layer} is not taken apart; its operations are not known")
            yield parts


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
