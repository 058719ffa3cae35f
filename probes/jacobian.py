"""Jacobian-norm sensitivity of the output to each input position.

Definition (science of the measurement: [Chowdhury], arXiv 2603.10123). With x_j the input of block 0 at position j and h the
readout at the query position, J_j = dh/dx_j is a d x d matrix and

    sensitivity_j = ||J_j||_F / sqrt(d),    ||J_j||_F^2 = sum over orthonormal output directions z of ||z^T J_j||^2.

One vector-Jacobian product ("product") gives z^T J_j at every position j at once.

`exact`: all d products. Each block is linearized once per prompt (`probes.linear`), and all directions are pulled back
through it together; replicating the prompt per direction, as jacobian-lens does, repeats the forward pass instead.

`sketch`: far fewer products, unbiased in ||J_j||_F^2. The output directions are split by an orthonormal basis Q of m
directions: on Q the sum is exact, on its complement of dimension D = d - m it is estimated from p Haar-random orthonormal
probes z_k as (D/p) sum_k ||z_k^T J_j||^2. With S_kl = z_k^T J_j J_j^T z_l, its variance is estimated without bias by
2 D (D - p)/p times the mean of S_kl^2 over pairs k < l, which uses p (p - 1)/2 numbers where the probes' own scatter has p
(the fourth moments of Haar frames: Var = 2 D (D - p)/(p (D - 1)(D + 2)) ||A - tr A/D||_F^2 for A = J J^T, and
E S_kl^2 = ||A - tr A/D||_F^2/((D - 1)(D + 2))). At m + p = d nothing is left to estimate. A variance estimated from few
probes is often too small, so the standard error is widened as Student's t does it, by t_{p-1}(0.975)/1.96 (1.21 at 8 probes,
1.09 at 16): sensitivity +- 1.96 stderr then covers the exact value in 92 to 94 % of cases at 8 to 20 probes on the
checkpoint stories260K, 88 to 92 % without.

Q decides the error. J J^T has a low effective rank, but the subspace differs from prompt to prompt, and sketching it with
forward-mode products costs as many products as it has columns. It can be had almost for nothing: every path from an earlier
position enters the query position through some block's attention, so that the output directions that matter are the images
of those attention outputs under the query position's *own* path to the top. That path involves one position instead of T:
all d directions of it cost about d/T products per block. Q spans the leading eigenvectors of

    M = sum over blocks l and sampled positions i of  r_l^2 E_li E_li^T / (sum_l r_l^2 ||E_li||_F^2),

where E_li is the derivative of the readout with respect to block l's stream at i through block l's attention alone and
then the query position's own path, and r_l the stream's rms (how far the stream has grown since block 0). M depends on
no probe, so the estimate stays unbiased whatever its quality. What M costs is counted in products and taken off the budget.

`scalar`: one product, the gradient of the sum of the readout's entries (the all-ones direction), the surrogate used by
[Chowdhury]; unbiased over random signs only, and without a standard error.

Pathways. J = J_value + J_score: `value` is the Jacobian with every block's attention pattern held constant, the sum over
all paths through values, feed-forwards and the residual stream; `score` is the rest, all paths that pass at least once
through a pattern's dependence on its queries and keys. Every direction is pulled back twice for `score`, and the
difference of the two is what is squared, so that each of the three estimates stays exact or unbiased as above. Norms do not
add: ||J||^2 = ||J_value||^2 + ||J_score||^2 + 2 <J_value, J_score>; at initialization the last term is small.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from scipy.special import ndtri, stdtrit
from torch import Tensor

from .errors import InputError
from .linear import AutogradBlock, Folded, LinearizedBlock, close, flops, local_flops
from .memory import out_of_memory, paced
from .models.view import Edit, Parts, Trace, View, obstacle
from .pieces import OWN, Piece, Pieces, each
from .prompts import check_tokens
from .results import dataset, provenance

Method = Literal["exact", "sketch", "scalar"]
Readout = Literal["residual", "normed", "logits"]
Engine = Literal["auto", "parts", "autograd"]
Pathway = Literal["total", "value", "score", "all"]
PATHWAYS: tuple[Pathway, ...] = ("total", "value", "score")
Progress = Callable[[float, float], None]  # (products done, products in all)

PRODUCTS = 64  # the sketch's default budget per prompt
LOCAL_POSITIONS = (
    32  # sampled positions i of M; 8 cost a tenth to a half more error on the bundled models, at two products less
)
LOCAL_FEATURES = 64  # random combinations of each E_li's input directions kept for M's Gram matrix
BASIS_SHARE = 0.625  # of the budget spent on Q, the rest on probes; the error hardly changes from 0.5 to 0.75
LEAST_PROBES = 8  # below it the standard error rests on too few pairs
KEPT_BYTES = 1 << 28  # of pulled probes per prompt, so that pairs across chunks count too
ENGINES = ("autograd", "parts")
# Whether patterns are held constant, for each flow of cotangents that a pathway needs; of two, the difference counts.
FROZEN: dict[Pathway, tuple[bool, ...]] = {
    "total": (False,),
    "value": (True,),
    "score": (False, True),
    "all": (False, True),
}
# Slopes, as `linear.OUTPUT_TOLERANCE` outputs, may differ by rounding only.
SLOPE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-1, torch.float64: 1e-3, torch.float16: 1e-1}


def jacobian(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    method: Method = "exact",
    products: int | Literal["auto"] | None = None,
    relative_error: float = 0.02,
    readout: Readout = "residual",
    pathway: Pathway = "total",
    query: int = -1,
    from_layer: int | Literal["all"] = 0,
    engine: Engine = "auto",
    seed: int = 0,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Sensitivity of the readout at one query position to the input at every position.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], position 0 included.
        method: "exact", "sketch" or "scalar", see the module's text.
        products: sketch only. Vector-Jacobian products per prompt, what finding Q costs included (64 unless given), or
            "auto": add probes until the mean profile's relative standard error, rms over positions, is `relative_error`.
        readout: "residual", the stream after the last block; "normed", after the final norm; "logits", next-token logits
            (their norm is taken over the vocabulary, through the d x d Gram matrix; still divided by sqrt(d)).
        pathway: "total"; "value", attention patterns held constant; "score", what is left, see the module's text; or "all"
            three from the same directions. Each direction counts as one product, although the last two pull it back twice.
        query: the position read out; negative counts from the end. Later positions have sensitivity 0, but those of a
            prefix that all queries see.
        from_layer: differentiate with respect to this block's input instead of block 0's, or "all" for every block.
        engine: "parts" for the linearized blocks, "autograd" for the model's own modules, "auto" for parts where the
            model is known well enough and their output and slope agree with the model's own, else autograd. A hook or the
            like that keeps a block from being taken apart is named in a warning and in the attribute `fallback`.
        seed: of the sketch's probes.
        chunk: directions pulled back at once; chosen for speed and the memory there is unless given. Where memory runs out
            nevertheless, the prompt is begun anew with half of it, and its blocks are made again for every chunk.
        progress: called with (products done, products in all) as they are done.

    Returns:
        Dataset with `sensitivity` and `stderr` (one standard error of it: zero for exact, NaN for scalar), both
        [prompt, position]; with `from_layer="all"` there is `layer` before `position`, with `pathway="all"` `pathway` in
        front; `tokens`; `products [prompt]`, what was spent on each prompt, with the share `basis_products` for finding
        Q; attributes that say what made it.

    Raises:
        InputError: tokens, query, layer, products or an option the model cannot take; values that are not finite.

    Source: [Chowdhury], arXiv 2603.10123, section 3; estimators are ours, see the module's text.
    """
    at, layers = check_place(model, tokens, query, from_layer)
    check_choice("method", method, ("exact", "sketch", "scalar"))
    check_choice("readout", readout, ("residual", "normed", "logits"))
    check_choice("engine", engine, ("auto", "parts", "autograd"))
    check_choice("pathway", pathway, (*PATHWAYS, "all"))
    width, length = model.spec.width, tokens.shape[1]
    if products is not None and method != "sketch":
        raise InputError(f"products={products} goes with method 'sketch', not '{method}'; leave it out")
    budget: int | Literal["auto"] = PRODUCTS if products is None else products
    if budget != "auto" and not isinstance(budget, int):
        raise InputError(f"products={products} is no number of products; give an integer, or 'auto'")
    if budget != "auto" and method == "sketch" and budget < 2:
        raise InputError(f"products={budget} is too few for a sketch; give at least 2, or method 'scalar'")
    if not 0 < relative_error < np.inf:
        raise InputError(f"relative_error={relative_error} cannot be reached; give a positive number, as 0.02")
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk={chunk} is not positive; give at least 1, or leave it out")

    apart = _Apart.of(model, layers[0], engine)
    if apart.obstacle is not None:
        warnings.warn(f"jacobian takes the slower engine autograd for {apart.obstacle}", stacklevel=2)
    # What follows is seen by no query that leads there.
    end = at + 1 if model.spec.prefix is None else max(at + 1, min(model.spec.prefix, length))
    # One process's share of the prompts, of which the first is checked most closely.
    pace = _Pace.of(model, end, apart.lowest, chunk)
    checked = False
    report = _Reporter(progress, 0.0)

    def prompt_of(n: int) -> _Prompt:
        nonlocal checked
        ids = tokens[n : n + 1, :end]
        made = _Prompt(model, ids, readout, layers, apart, pace, check=not checked, pathway=pathway, query=at)
        checked = True
        return made

    def worked(n: int, begun: Callable[[int], _Estimate], work: Callable[[_Estimate, _Prompt], None]) -> _Estimate:
        nonlocal checked
        while True:
            estimate, prompt, before = begun(n), prompt_of(n), report.done
            try:
                with prompt.linearized():
                    work(estimate, prompt)
                estimate.used |= prompt.used
                return estimate
            except (RuntimeError, MemoryError) as error:
                pace.slow_down(error, model, end)
            report.done, checked = before, False  # out of memory: once more, in smaller pieces

    planned = _planned(method, budget, width)
    auto = method == "sketch" and budget == "auto"

    def fresh(n: int) -> _Estimate:
        state = np.random.SeedSequence([seed, n]).generate_state(1)[0]
        return _Estimate(width, torch.Generator().manual_seed(int(state)))

    def first(estimate: _Estimate, prompt: _Prompt) -> None:
        if method == "exact":
            estimate.add_exact(prompt, torch.eye(width, dtype=torch.float64), report)
        elif method == "scalar":
            estimate.add_scalar(prompt, report)
        else:
            _sketch(estimate, prompt, planned, report)

    def further(n: int, rounds: Sequence[Pieces], count: int) -> Piece:
        def begun(n: int) -> _Estimate:
            estimate = fresh(n)
            for known in rounds:
                estimate.take(known[n])
            return estimate

        added = worked(n, begun, lambda estimate, prompt: estimate.add_probes(prompt, count, report))
        return added.piece(goes_on=True)

    def expect(numbers: Iterable[int]) -> None:
        report.total = float(len(list(numbers)) * planned)

    pieces = each("jacobian", len(tokens), lambda n: worked(n, fresh, first).piece(goes_on=auto), before=expect)
    if auto:
        pieces = _refined(pieces, further, relative_error, report)
    report.finish()

    # Both [prompt, layer, position].
    squared, variance = (torch.from_numpy(pieces.stacked(name)) for name in ("squared", "variance"))
    used = pieces.stacked("engines")
    engines = [name for at, name in enumerate(ENGINES) if used[:, at].any()]
    if not torch.isfinite(squared).all():
        raise InputError(
            f"model '{model.identity.name}' gives sensitivities that are not finite; "
            "check its weights, or use dtype float32 or float64"
        )
    sensitivity = (squared.clamp_min(0) / width).sqrt()
    spread = torch.where(squared > 0, variance.sqrt() / (2 * sensitivity * width), torch.zeros_like(squared))
    pathways = PATHWAYS if pathway == "all" else (pathway,)
    # Sources are layers by pathways; [pathway, prompt, layer, position] with the positions left out as zeros.
    sensitivity, spread = (
        torch.nn.functional.pad(x.unflatten(1, (len(layers), -1)).permute(2, 0, 1, 3), (0, length - end))
        for x in (sensitivity, spread)
    )
    dims: tuple[str, ...] = ("pathway", "prompt", "layer", "position")
    coords: dict[str, list[Any]] = {"pathway": list(pathways), "layer": layers}
    for dim, kept in (("layer", from_layer == "all"), ("pathway", pathway == "all")):
        if not kept:
            sensitivity, spread = (x.select(dims.index(dim), 0) for x in (sensitivity, spread))
            dims = tuple(name for name in dims if name != dim)
            del coords[dim]
    unit = "1"
    return dataset(
        {
            "sensitivity": (dims, sensitivity, {"long_name": "||J_j||_F / sqrt(d)", "units": unit}),
            "stderr": (dims, spread, {"long_name": "standard error of the sensitivity", "units": unit}),
            "products": (("prompt",), pieces.stacked("products"), {"units": "vector-Jacobian products"}),
            "basis_products": (("prompt",), pieces.stacked("basis_products"), {"units": "products"}),
        },
        tokens=tokens,
        coords=coords,
        attrs=provenance(
            model,
            tokens,
            measurement="jacobian",
            method=method,
            products=budget if method == "sketch" else (width if method == "exact" else 1),
            relative_error=relative_error if budget == "auto" and method == "sketch" else None,
            readout=readout,
            pathway=pathway,
            query=at,
            from_layer=from_layer,
            seed=seed,
        )
        | {"engine": "+".join(engines)}
        | ({} if apart.obstacle is None else {"fallback": apart.obstacle}),
    )


def check_place(model: View, tokens: Any, query: int, from_layer: Any) -> tuple[int, list[int]]:
    """(the query counted from the front, the source blocks in rising order).

    Raises:
        InputError: tokens, query or block that the model cannot take.
    """
    check_tokens(model, tokens)
    blocks, length = model.spec.blocks, tokens.shape[1]
    at = query + length if query < 0 else query
    if not 0 <= at < length:
        raise InputError(f"query {query} is outside the prompt of {length} tokens; give {-length} to {length - 1}")
    if from_layer != "all" and not (isinstance(from_layer, int) and 0 <= from_layer < blocks):
        raise InputError(
            f"from_layer {from_layer} does not exist; the model has blocks 0 to {blocks - 1}, or give 'all'"
        )
    return at, list(range(blocks)) if from_layer == "all" else [from_layer]


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} '{value}' does not exist; use {', '.join(choices)}")


def _planned(method: Method, budget: int | str, width: int) -> int:
    """Products for every prompt; of "auto" those of its first round."""
    if method == "sketch":
        return min(width, PRODUCTS // 2 if budget == "auto" else int(budget))
    return width if method == "exact" else 1


class _Reporter:
    """Counts products; the total grows when "auto" asks for more."""

    def __init__(self, progress: Progress | None, total: float) -> None:
        self.progress, self.total, self.done = progress, float(total), 0.0

    def __call__(self, products: float | int) -> None:
        self.done += products
        self.total = max(self.total, self.done)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        if self.progress is not None:
            self.total = max(self.total, 1.0)  # nothing to do here: all was there
            self.progress(self.total, self.total)


# ---------------------------------------------------------------------------------------------------- one prompt


@dataclass
class _Apart:
    """The model's blocks from `lowest` on, taken apart where that is wanted and possible; one for all prompts.

    A block that the first prompt's check rejects has its parts removed here, and so for the others, too.
    """

    model: View
    lowest: int
    engine: Engine
    known: dict[int, bool]  # whether a block can be taken apart
    obstacle: str | None = None  # what a caller put on a block that keeps engine "auto" from taking it apart
    _parts: dict[int, Parts] = field(default_factory=dict)
    _folded: dict[int, Folded] = field(default_factory=dict)

    @classmethod
    def of(cls, model: View, lowest: int, engine: Engine) -> _Apart:
        made = cls(model, lowest, engine, {})
        for layer in range(lowest, model.spec.blocks):
            parts = None if engine == "autograd" else model.parts(layer)
            made.known[layer] = parts is not None
            if engine != "autograd" and parts is None and made.obstacle is None:
                found = obstacle(model, layer)
                made.obstacle = None if found is None else f"block {layer} ({found})"
            if parts is not None and made.held:
                made._parts[layer] = parts
        if engine == "parts" and not all(made.known.values()):
            raise InputError(
                f"engine 'parts' does not know the blocks of '{model.identity.name}' "
                f"({made.obstacle or model.identity.backend}); use engine 'auto' or 'autograd'"
            )
        return made

    @property
    def held(self) -> bool:
        """Whether all blocks' parts are held; not those of a model that is fetched block by block from elsewhere."""
        return not self.model.offloaded

    def parts(self, layer: int) -> Parts | None:
        """The block's parts, or None where it is not known or was rejected."""
        if not self.known[layer]:
            return None
        return self._parts[layer] if self.held else self.model.parts(layer)

    def folded(self, layer: int, parts: Parts) -> Folded:
        """Its matrices as `LinearizedBlock` wants them."""
        if not self.held:
            return Folded.of(parts)
        if layer not in self._folded:
            self._folded[layer] = Folded.of(parts)
        return self._folded[layer]

    def reject(self, layer: int) -> None:
        """The block does something else than its parts say."""
        self.known[layer] = False
        self._parts.pop(layer, None)
        self._folded.pop(layer, None)


@dataclass
class _Pace:
    """How many directions go through at once, and whether a prompt's blocks are kept or made again for every chunk.

    Making them again is gradient checkpointing: the streams between blocks are what is kept.
    """

    chunk: int
    keep: bool

    @classmethod
    def of(cls, model: View, length: int, lowest: int, chunk: int | None) -> _Pace:
        planned = paced(model, length, lowest)
        return cls(chunk or planned.chunk, planned.keep)

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


class _Prompt:
    """One prompt, and how cotangents at its query position are pulled back to the sources."""

    def __init__(
        self,
        model: View,
        tokens: Tensor,
        readout: Readout,
        layers: list[int],
        apart: _Apart,
        pace: _Pace,
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

    def ones(self) -> Float[Tensor, "1 d"]:
        """The gradient of the readout's sum with respect to the last stream at the query position."""
        assert self._trace is not None
        residual = self._trace.residual[-1][0, self.query].detach().clone().requires_grad_()
        with torch.enable_grad():
            output = residual if self.readout == "residual" else self.model.norm(residual)
            output = self.model.unembed(output) if self.readout == "logits" else output
            (gradient,) = torch.autograd.grad(output.sum(), residual)
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

    def local_gram(self, most: float | int = math.inf) -> tuple[Tensor, float] | None:
        """M of the module's text [d, d], and its cost in products; None above `most`, or where blocks have no parts."""
        layers = range(self.apart.lowest, self.model.spec.blocks)
        if not all(isinstance(self.block(layer), LinearizedBlock) for layer in layers):
            return None
        assert self._trace is not None
        spec = self.model.spec
        # Spread over what the query sees in some block; elsewhere E_li is zero.
        windows = spec.windows[self.apart.lowest :]
        seen_from = 0 if None in windows else max(0, self.length - max(w for w in windows if w is not None))
        count = min(LOCAL_POSITIONS, self.length - seen_from)
        positions = torch.linspace(seen_from, self.query, count).round().long().unique()
        positions = positions.to(self.model.device)
        own_path = sum(local_flops(p, length=self.length, positions=len(positions)) for p in self._every_parts())
        cost = spec.width * own_path / self.product_flops()
        if cost > most:
            return None
        generator = torch.Generator().manual_seed(0)
        keep = min(LOCAL_FEATURES, spec.width)
        mixes = [
            torch.linalg.qr(torch.randn(spec.width, keep, generator=generator))[0].to(self._trace.residual[0])
            for _ in layers
        ]
        rms = [self._trace.residual[layer].float().pow(2).mean().sqrt() for layer in layers]
        seen = []
        # Of one position instead of all, so that many more go through at once where blocks have to be made again.
        size = self.pace.chunk if self.pace.keep else spec.width
        for start in range(0, spec.width, size):
            own = self.top()[start : start + size, None, None, :]
            images = []
            for layer, mix, scale in zip(reversed(layers), reversed(mixes), reversed(rms), strict=True):
                block = self.block(layer)
                assert isinstance(block, LinearizedBlock)
                reached, own = block.direct(own, self.query, positions)
                images.append(reached[:, 0] @ mix * scale.to(reached))
            seen.append(torch.cat(images, -1))
        images = torch.cat(seen)  # [d, positions, blocks * keep]
        seen.clear()
        images = images.double()
        norms = images.pow(2).sum((0, 2), keepdim=True)
        images /= torch.where(norms > 0, norms.sqrt(), torch.ones_like(norms))  # in place: the largest there is here
        images = images.flatten(1)
        return images @ images.T, cost

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

    For logits W n the directions are those of the d x d factor R with R^T R = W^T W, which has the same norms.
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
    values, vectors = torch.linalg.eigh((columns @ columns.T).double())
    factor = (values.clamp_min(0).sqrt()[:, None] * vectors.T).to(rows)
    return factor @ rows


# ---------------------------------------------------------------------------------------------------- estimates


@dataclass
class _Estimate:
    """What is known of ||J_j||_F^2 of one prompt, [layer, position]: an exact part and a probed one."""

    width: int
    generator: torch.Generator
    basis: Tensor | None = None  # [d, m]: exact directions
    probes: Tensor | None = None  # [d, p]: orthonormal, in the complement of the basis
    exact: Tensor | None = None
    probed: Tensor | None = None  # sum over probes
    pairs: Tensor | None = None  # sum over pairs of S_kl^2
    kept: list[Tensor] = field(default_factory=list)  # pulled probes, for pairs across chunks
    pair_count: int = 0
    products: float = 0.0
    basis_cost: float = 0.0
    scalar: bool = field(default=False)
    used: set[str] = field(default_factory=set)
    # Of what earlier pieces hold: directions of the basis, probes, and chunks of `kept`.
    taken: tuple[int, int, int] = (0, 0, 0)

    def piece(self, *, goes_on: bool = False) -> Piece:
        """What is kept of the prompt; where it `goes_on`, also what there is beside the pieces taken, for `take`."""
        piece = {
            "squared": self.squared().numpy(),
            "variance": self.variance().numpy(),
            "products": np.array(self.products),
            "basis_products": np.array(self.basis_cost),
            "engines": np.array([engine in self.used for engine in ENGINES]),
        }
        if not goes_on:
            return piece
        piece |= {"left": np.array(self.left), "probes": np.array(0 if self.probes is None else self.probes.shape[1])}
        if self.left == 0:
            return piece
        directions, probes, chunks = self.taken
        own: dict[str, Tensor | None] = {
            "generator": self.generator.get_state(),
            "basis": None if self.basis is None else self.basis[:, directions:],
            "probes": None if self.probes is None else self.probes[:, probes:],
            "exact": self.exact,
            "probed": self.probed,
            "pairs": self.pairs,
            "pair_count": torch.tensor(self.pair_count),
        }
        own |= {f"kept{n}": pulled for n, pulled in enumerate(self.kept[chunks:])}
        return piece | {OWN + name: _bits(x) for name, x in own.items() if x is not None}

    def take(self, piece: Piece) -> None:
        """Come to where the estimate was when it gave this piece, after those it gave before have been taken."""
        own = {name.removeprefix(OWN): _numbers(x) for name, x in piece.items() if name.startswith(OWN)}
        self.generator.set_state(own["generator"])
        for name in ("basis", "probes"):
            if name in own:
                known = getattr(self, name)
                setattr(self, name, own[name] if known is None else torch.cat([known, own[name]], 1))
        self.exact, self.probed, self.pairs = (own.get(name) for name in ("exact", "probed", "pairs"))
        self.pair_count = int(own["pair_count"])
        chunks = sum(name.startswith("kept") for name in own)
        self.kept += [own[f"kept{n}"] for n in range(chunks)]
        self.products, self.basis_cost = float(piece["products"]), float(piece["basis_products"])
        self.used = {engine for engine, was in zip(ENGINES, piece["engines"], strict=True) if was}
        columns = (0 if x is None else x.shape[1] for x in (self.basis, self.probes))
        self.taken = (*columns, len(self.kept))  # type: ignore[assignment]

    def add_exact(self, prompt: _Prompt, directions: Tensor, report: _Reporter) -> None:
        """Add orthonormal directions [d, m] of the readout to the exact part."""
        self.basis = directions if self.basis is None else torch.cat([self.basis, directions], 1)
        for pulled in self._pull(prompt, directions, report):
            squared = pulled.pow(2).sum((1, 3), dtype=torch.float64).cpu()
            self.exact = squared if self.exact is None else self.exact + squared

    def add_scalar(self, prompt: _Prompt, report: _Reporter) -> None:
        """The sum of the readout's entries alone; its gradient's squared norm stands for the whole."""
        self.scalar, self.products = True, 1.0
        self.exact = prompt.pull(prompt.ones()).pow(2).sum((1, 3), dtype=torch.float64).cpu()
        report(1)

    def add_probes(self, prompt: _Prompt, count: int, report: _Reporter) -> None:
        """Add Haar-random probes, orthonormal to the basis and to each other."""
        known = [x for x in (self.basis, self.probes) if x is not None]
        fresh = _orthonormal_to(torch.cat(known, 1) if known else None, self.width, count, self.generator)
        self.probes = fresh if self.probes is None else torch.cat([self.probes, fresh], 1)
        for pulled in self._pull(prompt, fresh, report):
            own = pulled.pow(2).sum((1, 3), dtype=torch.float64).cpu()
            self.probed = own if self.probed is None else self.probed + own
            # Pairs within the chunk (each once) and with earlier chunks: Gram matrices at every layer and position.
            within = _gram_squares(pulled, pulled) - pulled.double().pow(2).sum(-1).pow(2).sum(1).cpu()
            found = within / 2
            for earlier in self.kept:
                found = found + _gram_squares(pulled, earlier.to(pulled))
            self.pairs = found if self.pairs is None else self.pairs + found
            size, before = pulled.shape[1], sum(earlier.shape[1] for earlier in self.kept)
            self.pair_count += size * (size - 1) // 2 + size * before
            if (before + size) * pulled[:, 0].numel() * 4 <= KEPT_BYTES:
                self.kept.append(pulled.cpu())

    def _pull(self, prompt: _Prompt, directions: Tensor, report: _Reporter) -> Iterator[Tensor]:
        """Pull directions [d, m] of the readout back, [layer, k, position, d] at a time."""
        top = prompt.top()
        # Even chunks: a last chunk of one probe would have no pairs.
        count = directions.shape[1]
        pieces = math.ceil(count / prompt.pace.chunk)
        for piece in torch.tensor_split(directions, max(1, pieces), dim=1):
            self.products += piece.shape[1]
            yield prompt.pull(piece.T.to(top) @ top)
            report(piece.shape[1])

    @property
    def left(self) -> int:
        """Directions neither in the basis nor probed."""
        return self.width - sum(x.shape[1] for x in (self.basis, self.probes) if x is not None)

    def squared(self) -> Tensor:
        """The unbiased estimate of ||J_j||_F^2."""
        total = torch.zeros(()) if self.exact is None else self.exact
        if self.probed is None or self.probes is None:
            return total
        probes = self.probes.shape[1]
        return total + self.probed * (self.left + probes) / probes

    def variance(self) -> Tensor:
        """Its variance, estimated and widened for that; zero when every direction was taken, NaN when nothing tells."""
        like = self.squared()
        if self.scalar:
            return torch.full_like(like, math.nan)
        if self.left == 0:
            return torch.zeros_like(like)
        if self.pairs is None or self.probes is None or self.pair_count == 0:
            return torch.full_like(like, math.nan)
        probes = self.probes.shape[1]
        dimension = self.left + probes
        unbiased = 2 * dimension * (dimension - probes) / probes * self.pairs / self.pair_count
        widening = float(stdtrit(probes - 1, 0.975) / ndtri(0.975))
        return unbiased * widening**2


def _gram_squares(a: Tensor, b: Tensor) -> Float[Tensor, "layer position"]:
    """Sum over k, m of (a_k . b_m)^2 at every layer and position, of [layer, k, position, d] each."""
    return torch.einsum("lkpd,lmpd->lpkm", a, b).double().pow(2).sum((-2, -1)).cpu()


def _orthonormal_to(known: Tensor | None, width: int, count: int, generator: torch.Generator) -> Tensor:
    """[width, count] Haar-distributed orthonormal columns in the complement of `known` (orthonormal columns)."""
    fresh = torch.randn(width, count, generator=generator, dtype=torch.float64)
    for _ in range(2):  # twice: one projection leaves rounding of the order of what it removed
        if known is not None:
            fresh = fresh - known @ (known.T @ fresh)
        fresh, upper = torch.linalg.qr(fresh)
        fresh = fresh * upper.diagonal().sign()  # Householder's signs are not Haar's
    return fresh


def _sketch(estimate: _Estimate, prompt: _Prompt, budget: int, report: _Reporter) -> None:
    """Spend `budget` products on one prompt: basis from the query's own path, the rest on probes."""
    width = estimate.width
    if budget >= width:
        estimate.add_exact(prompt, torch.eye(width, dtype=torch.float64), report)
        return
    found = prompt.local_gram(budget - 2 * LEAST_PROBES)
    if found is not None:
        gram, cost = found
        estimate.basis_cost = cost
        estimate.products += cost
        report(cost)
        budget -= math.ceil(cost)
        size = min(round(BASIS_SHARE * budget), budget - LEAST_PROBES)
        _, vectors = torch.linalg.eigh(gram.cpu())
        estimate.add_exact(prompt, vectors[:, -size:], report)
        budget -= size
    estimate.add_probes(prompt, budget, report)


def _refined(
    first: Pieces,
    further: Callable[[int, Sequence[Pieces], int], Piece],
    target: float,
    report: _Reporter,
) -> Pieces:
    """Add probes to all prompts in rounds until the mean profile's relative standard error is `target`.

    How many is decided by all prompts together. A round is a stage of pieces that hold what it added to each prompt:
    `further(n, rounds, count)` puts prompt n's estimate together from those of all rounds before and adds `count` probes.
    Where pieces are on disk, one estimate at a time is in memory. There a prompt takes, however many rounds it has, its
    pulled probes (`KEPT_BYTES` at most, of four-byte numbers), its directions (8 d^2 bytes at most), and per round 5 kB
    and a few numbers for every position.
    """
    rounds = [first]
    while more := _more_probes(rounds[-1], target):
        counts = [min(more, int(left)) for left in rounds[-1].stacked("left")]

        def expect(numbers: Iterable[int], counts: list[int] = counts) -> None:
            report.total += float(sum(counts[n] for n in numbers))

        def measured(n: int, counts: list[int] = counts) -> Piece:
            return further(n, rounds, counts[n]) if counts[n] else rounds[-1][n]

        rounds.append(each("jacobian", len(first), measured, before=expect))
    return rounds[-1]


def _more_probes(known: Pieces, target: float) -> int:
    """How many probes every prompt is to have beside those it has, to come to `target`; 0 where that is reached."""
    squared, variance = (torch.from_numpy(known.stacked(name)).sum(0) for name in ("squared", "variance"))
    seen = squared > 0
    reached = (variance[seen].sqrt() / (2 * squared[seen])).pow(2).mean().sqrt().item() if seen.any() else 0.0
    left, probes = (known.stacked(name) for name in ("left", "probes"))
    if reached <= target or not (left > 0).any():
        return 0
    # The error falls as 1/sqrt(probes) at least; what is missing is added at once, at most doubling the probes.
    have = int(probes[left > 0].max())
    return max(2, min(have, math.ceil(have * ((reached / target) ** 2 - 1))))


def _bits(x: Tensor) -> np.ndarray:
    """A tensor's numbers, those of bfloat16 as integers of its bits: numpy has no such type."""
    x = x.detach().cpu().contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def _numbers(bits: np.ndarray) -> Tensor:
    """The tensor of `_bits`, in memory of its own that torch has aligned: the rounding of a sum may depend on that."""
    made = torch.from_numpy(bits).clone()
    return made.view(torch.bfloat16) if made.dtype == torch.int16 else made
