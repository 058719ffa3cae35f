"""Jacobian-norm sensitivity of the output to each input position.

Definition (science of the measurement: [Chowdhury], arXiv 2603.10123). With x_j the input of block 0 at position j and h the
readout at the query position, J_j = dh/dx_j is a d x d matrix and

    sensitivity_j = ||J_j||_F / sqrt(d),    ||J_j||_F^2 = sum over orthonormal output directions z of ||z^T J_j||^2.

One vector-Jacobian product ("product") gives z^T J_j at every position j at once.

`exact`: all d products. Each block is linearized once per prompt (`probes.models.linear`), and all directions are
pulled back through it together; replicating the prompt per direction, as jacobian-lens does, repeats the forward pass
instead.

`sketch`: far fewer products, unbiased in ||J_j||_F^2, with a standard error. With m directions q of a basis that depends on
no probe, and p Haar-random orthonormal probes z_k of their complement, of dimension D = d - m,

    ||J_j||_F^2  ~  sum over q of ||q^T J_j||^2  +  (D/p) sum_k ||z_k^T J_j||^2.

With S_kl = z_k^T J_j J_j^T z_l the second part's variance is estimated without bias by 2 D (D - p)/p times the mean of
S_kl^2 over pairs k < l, which uses p (p - 1)/2 numbers where the probes' own scatter has p (the fourth moments of Haar
frames: Var = 2 D (D - p)/(p (D - 1)(D + 2)) ||A - tr A/D||_F^2 for A = J J^T, and
E S_kl^2 = ||A - tr A/D||_F^2/((D - 1)(D + 2))). A variance estimated from few probes is often too small, so the standard
error is widened as for Student's t, by t_{p-1}(0.975)/1.96 (1.21 at 8 probes, 1.09 at 16).

The basis decides the error. The sum of J_j J_j^T over positions has a low effective rank (9 to 17 of 576 on SmolLM2-135M):
positions share their leading directions, which differ from prompt to prompt. One round of subspace iteration finds them:
from random directions E, whose products V_j = E^T J_j are there at all positions, the forward products
Y = sum_j J_j w_j V_j^T, w_j = 1/||V_j||_F^2 so that positions count alike. The basis is E and Y, made orthonormal.
A forward product is a difference of passes (`Prompt.push`) and counts as `FORWARD` products.

On a GPU that knows TF32 a float32 model's sketches, but those of the score path, take products of cotangents and weights in
it: sensitivities move by up to 1e-3, a tenth of a standard error (TF32 imitated on a CPU, SmolLM2 and Qwen2.5-0.5B). Passes,
patterns and attention's products stay in float32.

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
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from scipy.special import ndtri, stdtrit
from torch import Tensor

from ...errors import InputError, check_choice
from ...models.checks import check_place
from ...models.load import takes_model
from ...models.pullback import Apart, Disagreement, Engine, Pace, Pathway, Prompt, Readout
from ...models.view import View
from ...results.dataset import Variable, by_block, dataset, labelled, provenance
from ...run.precision import coarse, double, wide
from ...run.progress import Progress, Tally
from ...run.store import Piece, Pieces, Store

Method = Literal["exact", "sketch", "scalar"]
PATHWAYS: tuple[Pathway, ...] = ("total", "value", "score")
PRODUCTS = 64  # the sketch's default budget per prompt
SHARE = 1 / 8  # of the products: random directions, and as many forward ones; so half of all go to the basis
FORWARD = 2  # products that a forward one counts as: it takes a pass, a product about half of that
FLOOR = 0.01  # of the median square: positions below count less, since they would have to be moved furthest of all
NEGLIGIBLE = 0.1  # of images of length 1: rounding would choose shorter directions, and another one on every device
LEAST_PROBES = 8  # below it the standard error rests on too few pairs
KEPT_BYTES = 1 << 28  # of pulled probes per prompt, so that pairs across chunks count too
ENGINES = ("autograd", "parts")
_AT = ("pathway", "prompt", "layer", "position")  # where a single pathway or layer was asked for, it is no dimension
VARIABLES = {
    "sensitivity": Variable(_AT, "||J_j||_F / sqrt(d)"),
    "stderr": Variable(_AT, "standard error of the sensitivity"),
    "elasticity": Variable(_AT, "sensitivity * rms(x) / rms(h)"),
}


@takes_model
def jacobian(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    method: Method = "exact",
    products: int | None = None,
    readout: Readout = "residual",
    pathway: Pathway = "total",
    query: int = -1,
    from_layer: int | Literal["all"] = 0,
    engine: Engine = "auto",
    seed: int = 0,
    chunk: int | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Sensitivity of the readout at one query position to the input at every position.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], position 0 included.
        method: "exact", "sketch" or "scalar", see the module's text.
        products: sketch only. Vector-Jacobian products per prompt, 64 unless given.
        readout: "residual", the stream after the last block; "normed", after the final norm; "logits", next-token logits
            (their norm is taken over the vocabulary, through the d x d Gram matrix; still divided by sqrt(d)).
        pathway: "total"; "value", attention patterns held constant; "score", what is left, see the module's text; or "all"
            three from the same directions. Each direction counts as one product, although the last two pull it back twice.
        query: the position read out; negative counts from the end. Later positions have sensitivity 0, but those of a
            prefix that all queries see.
        from_layer: differentiate with respect to this block's input instead of block 0's, or "all" for every block.
        engine: "parts" for the linearized blocks, "autograd" for the model's own modules, "auto" for parts where the
            model is known well enough, and their outputs and the slope of the first block of each kind agree with the
            model's own, else autograd. A hook or the like that keeps a block from being taken apart is named in a warning
            and in the attribute `fallback`.
        seed: of the sketch's probes.
        chunk: directions pulled back at once; chosen for speed and the memory there is unless given. Where memory runs out
            nevertheless, the prompt is begun anew with half of it, and its blocks are made again for every chunk.
        pieces: where what each prompt gave is kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (products done, products in all) as they are done.

    Returns:
        Dataset with `sensitivity`, `stderr` (one standard error of it: zero for exact, NaN for scalar) and `elasticity`, the
        sensitivity times rms(x) / rms(h): the relative change of the output under a relative change of an input, which
        alone compares models or conditions of different scale. All are [prompt, position]; with `from_layer="all"` there is
        `layer` before `position`, with `pathway="all"` `pathway` in front; `tokens`; attributes that say what made it.

    Raises:
        InputError: tokens, query, layer, products or an option the model cannot take; values that are not finite.

    Source: [Chowdhury], arXiv 2603.10123, section 3; estimators are ours, see the module's text.
    """
    at, layers = check_place(model, tokens, query, from_layer)
    check_choice("method", method, ("exact", "sketch", "scalar"))
    check_choice("readout", readout, ("residual", "normed", "logits"))
    check_choice("engine", engine, ("auto", "parts", "autograd"))
    check_choice("pathway", pathway, (*PATHWAYS, "all"))
    most = _budget(method, products, model.spec.width, chunk)
    width, length = model.spec.width, tokens.shape[1]
    apart = Apart(model, layers[0], engine)
    if apart.obstacle is not None:
        warnings.warn(f"jacobian takes the slower engine autograd for {apart.obstacle}", stacklevel=4)
    # No query that leads to the readout sees what follows.
    end = at + 1 if model.spec.prefix is None else max(at + 1, min(model.spec.prefix, length))
    planned, checked = min(width, most), False
    # Of "score" the difference of two near numbers counts.
    rough = planned < width and method == "sketch" and pathway in ("total", "value")
    rough = rough and engine != "autograd" and coarse(model.device, model.dtype)
    pace, report = Pace.of(model, end, chunk, len(layers)), Tally(progress)

    def attempt(n: int, check: bool) -> Piece:
        ids, own = tokens[n : n + 1, :end], int(np.random.SeedSequence([seed, n]).generate_state(1)[0])
        prompt = Prompt(ids, readout, layers, apart, pace, check=check, pathway=pathway, query=at, coarse=rough)
        variance: Tensor | float = math.nan if method == "scalar" else 0.0
        if method == "scalar":  # its gradient's squared norm stands for the whole
            squared = _lengths(prompt.pull(prompt.ones())).cpu()
            report(1)
        elif planned == width:
            every = torch.eye(width, dtype=torch.float64)
            squared = _summed(_pulled(prompt, every, report)).cpu()
        else:
            squared, variance = _sketched(prompt, width, planned, torch.Generator().manual_seed(own), report)
        return {
            "squared": squared.numpy(),
            "variance": (torch.zeros_like(squared) + variance).numpy(),
            "engines": np.array([engine in prompt.used for engine in ENGINES]),
            "scales": prompt.scales().numpy(),
        }

    def measured(n: int) -> Piece:
        """Prompt n's estimate, again in smaller chunks where memory runs out; the first is checked closely."""
        nonlocal checked
        while True:
            before = report.done
            try:
                piece = attempt(n, check=not checked)
                checked = True
                return piece
            except Disagreement:
                pass
            except (RuntimeError, MemoryError) as error:
                pace.slow_down(error, model, end)
            report.done = before

    stage = "jacobian in TF32" if rough else "jacobian"
    by_prompt = (pieces or Store()).each(
        stage, len(tokens), measured, before=lambda numbers: report.expect(float(len(list(numbers)) * planned))
    )
    report.finish()
    used = by_prompt.stacked("engines")
    place = {"readout": readout, "pathway": pathway, "query": at, "from_layer": from_layer}
    made = dataset(
        labelled(VARIABLES, _values(model, by_prompt, len(layers), length)),
        tokens=tokens,
        coords={"pathway": list(PATHWAYS if pathway == "all" else (pathway,)), **by_block(model.spec, layers)},
        attrs=provenance(model, tokens, measurement="jacobian", method=method, products=most, **place, seed=seed)
        | {"engine": "+".join(name for n, name in enumerate(ENGINES) if used[:, n].any())}
        | ({} if apart.obstacle is None else {"fallback": apart.obstacle}),
    )
    single = [dim for dim, asked in (("layer", from_layer), ("pathway", pathway)) if asked != "all"]
    return made.isel(dict.fromkeys(single, 0), drop=True)


def _budget(method: Method, products: Any, width: int, chunk: Any) -> int:
    """Products per prompt, once the numbers were found to be such."""
    if products is not None and method != "sketch":
        raise InputError(f"products={products} goes with method 'sketch', not '{method}'; leave it out")
    if products is not None and not (isinstance(products, int) and products >= 2):
        raise InputError(f"products={products} is no number for a sketch; give at least 2, or method 'scalar'")
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk={chunk} is not positive; give at least 1, or leave it out")
    return {"exact": width, "scalar": 1, "sketch": products or PRODUCTS}[method]


def _pulled(prompt: Prompt, directions: Float[Tensor, "d m"], report: Tally) -> Iterator[Tensor]:
    """Pull directions of the readout back, [layer, k, position, d] at a time."""
    top = prompt.top
    # Even chunks: a last chunk of one probe would have no pairs.
    for piece in torch.tensor_split(directions, math.ceil(directions.shape[1] / prompt.pace.chunk), dim=1):
        yield prompt.pull(piece.T.to(top) @ top)
        report(piece.shape[1])


def _sketched(
    prompt: Prompt, width: int, budget: int, generator: torch.Generator, report: Tally
) -> tuple[Tensor, Tensor | float]:
    """||J_j||_F^2 by so many products, exactly on a basis and by probes on the rest, and the variance of the sum."""
    basis, exact = torch.zeros(width, 0, dtype=torch.float64), torch.zeros(())
    size = min(round(SHARE * budget), (budget - LEAST_PROBES) // (2 + FORWARD))
    if size > 0:
        basis = haar(basis, size, generator)
        kept = list(_pulled(prompt, basis, report))
        exact = _summed(kept)
        found = torch.cat([_images(prompt, pulled, exact, report) for pulled in kept]).cpu().T
        del kept
        left, values, _ = torch.linalg.svd(found - basis @ (basis.T @ found), full_matrices=False)
        more = orthonormal(basis, left[:, values > NEGLIGIBLE])
        exact = exact + _summed(_pulled(prompt, more, report))
        basis = torch.cat([basis, more], 1)
    count = budget - FORWARD * max(size, 0) - basis.shape[1]
    squared, variance = _probed(prompt, basis, haar(basis, count, generator), report)
    return (exact + squared).cpu(), variance


def _images(prompt: Prompt, pulled: Tensor, squares: Tensor, report: Tally) -> Float[Tensor, "k d"]:
    """Forward products of products [source, k, position, d], every position weighted by its square over all of them."""
    paths = len(pulled) // len(prompt.layers)  # the first of which is the whole derivative, or the only one
    squares = torch.maximum(squares[::paths], FLOOR * squares[::paths].median(-1, keepdim=True).values)
    weights = squares[:, None, :, None].to(pulled)
    pushed = double(prompt.push(torch.where(weights > 0, pulled[::paths] / weights, 0)))
    report(FORWARD * len(pushed))
    return pushed / pushed.norm(dim=1, keepdim=True).clamp_min(torch.finfo(pushed.dtype).tiny)


def _probed(
    prompt: Prompt, basis: Float[Tensor, "d m"], probes: Float[Tensor, "d p"], report: Tally
) -> tuple[Tensor, Tensor | float]:
    """What is orthonormal to the basis, by Haar-random probes, with its variance; that is estimated itself, and widened."""
    count, width = probes.shape[1], len(probes) - basis.shape[1]
    probed, pairs = 0, 0  # pairs: sum over them of S_kl^2
    pair_count, kept = 0, list[Tensor]()  # pulled probes, for pairs across chunks
    for pulled in _pulled(prompt, probes, report):
        probed = probed + _lengths(pulled)
        # Pairs within the chunk (each once) and with earlier chunks: Gram matrices at every layer and position.
        gram = _gram(pulled, pulled)
        within = gram.square().sum((-2, -1)) - gram.diagonal(dim1=-2, dim2=-1).square().sum(-1)
        pairs = sum((_gram(pulled, earlier).square().sum((-2, -1)) for earlier in kept), pairs + within / 2)
        size, before = pulled.shape[1], sum(earlier.shape[1] for earlier in kept)
        pair_count += size * (size - 1) // 2 + size * before
        if (before + size) * pulled[:, 0].numel() * 4 <= KEPT_BYTES:
            kept.append(pulled)
    assert isinstance(probed, Tensor)
    squared = probed * (width / count)
    if not isinstance(pairs, Tensor) or not pair_count:
        return squared, math.nan
    widening = float(stdtrit(count - 1, 0.975) / ndtri(0.975))
    return squared, (2 * width * (width - count) / count * pairs / pair_count * widening**2).cpu()


def _summed(chunks: Iterable[Tensor]) -> Float[Tensor, "source position"]:
    """`_lengths` of all chunks."""
    first, *others = map(_lengths, chunks)
    return sum(others, first)


def _lengths(pulled: Tensor) -> Float[Tensor, "source position"]:
    """Sum over directions of squared lengths, of [source, k, position, d]; it stays on the device, as all sums do."""
    lengths = torch.linalg.vector_norm(pulled, dim=-1, dtype=torch.promote_types(pulled.dtype, torch.float32))
    return double(lengths).square().sum(1)


def _gram(a: Tensor, b: Tensor) -> Float[Tensor, "layer position k m"]:
    """a_k . b_m at every layer and position, of [layer, k, position, d] each."""
    return double(torch.einsum("lkpd,lmpd->lpkm", wide(a), wide(b)))


def haar(known: Float[Tensor, "d m"], count: int, generator: torch.Generator) -> Float[Tensor, "d count"]:
    """Haar-distributed orthonormal columns in the complement of `known` (orthonormal columns)."""
    return orthonormal(known, torch.randn(len(known), count, generator=generator, dtype=torch.float64))


def orthonormal(known: Float[Tensor, "d m"], columns: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """The columns, made orthonormal to `known` and to each other, with their own signs and not Householder's."""
    for _ in range(2):  # twice: one projection leaves rounding of the order of what it removed
        columns, upper = torch.linalg.qr(columns - known @ (known.T @ columns))
        columns = columns * upper.diagonal().sign()
    return columns


def _values(model: View, pieces: Pieces, layers: int, length: int) -> dict[str, Any]:
    """The arrays of `VARIABLES`, put together from all prompts."""
    width = model.spec.width
    # Both [prompt, source, position]; sources are layers by pathways.
    squared, variance = (torch.from_numpy(pieces.stacked(name)) for name in ("squared", "variance"))
    if not (finite := torch.isfinite(squared)).all():
        place = int((~finite).nonzero()[0, -1])
        raise InputError(
            f"model '{model.identity.name}' gives sensitivities that are not finite (position {place}); check its weights "
            "and what stands there (norms of a zero stream multiply to infinity), or use dtype float32 or float64"
        )
    sensitivity = (squared.clamp_min(0) / width).sqrt()
    spread = torch.where(squared > 0, variance.sqrt() / (2 * sensitivity * width), torch.zeros_like(squared))
    # [pathway, prompt, layer, position]; zero at the positions that were left out.
    sensitivity, spread = (
        torch.nn.functional.pad(x.unflatten(1, (layers, -1)).permute(2, 0, 1, 3), (0, length - x.shape[-1]))
        for x in (sensitivity, spread)
    )
    # The elasticity's unit: rms of the input over prompts and positions from 1 on, one number; of the output, each prompt's.
    of_input, of_output = torch.from_numpy(pieces.stacked("scales")).unbind(-1)  # mean squares [prompt, layer]
    unit_of = (of_input.mean(0) / of_output).sqrt()
    return {"sensitivity": sensitivity, "stderr": spread, "elasticity": sensitivity * unit_of[None, :, :, None]}
