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
it (`docs/scale.md`). Passes, patterns and attention's products stay in float32.

Elasticity, the readout after the final norm and pathways are defined in `docs/probes/jacobian.md`. Documents are not known
here: in rms(h) one that gives several prompts counts as often; of a single prompt mu is the mean over its positions. Beside
the stream the sketch of the normed readout takes half as many products: its basis are the images that were pushed forward
for the stream, taken through the norm's Jacobian, and need no forward products. For the pathway `score` every direction is
pulled back twice, and the difference of the two is what is squared, so that each estimate stays exact or unbiased as above.

`scalar`: one product, the gradient of the sum of the readout's entries (the all-ones direction), the surrogate used by
[Chowdhury]; unbiased over random signs only, and without a standard error.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

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
NORMED = "_normed"  # ends the names of variables of the readout after the final norm, where it stands beside the stream
_AT = ("pathway", "prompt", "layer", "position")  # where a single pathway or layer was asked for, it is no dimension
VARIABLES = {
    f"{name}{end}": Variable(_AT, f"{words}{said}")
    for end, said in (("", ""), (NORMED, ", after the final norm"))
    for name, words in (
        ("sensitivity", "||J_j||_F / sqrt(d)"),
        ("stderr", "standard error of the sensitivity"),
        ("elasticity", "sensitivity * rms(x) / rms(h), h centred"),
    )
}


@takes_model
def jacobian(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    method: Method = "exact",
    products: int | None = None,
    readout: Readout = "residual",
    beside: bool = False,
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
        tokens: ids [prompt, position], position 0 included; of other lengths with `attention_mask` (`docs/prompts.md`).
        method: "exact", "sketch" or "scalar", see the module's text.
        products: sketch only. Vector-Jacobian products per prompt, 64 unless given.
        readout: "residual", the stream after the last block; "normed", after the final norm; "logits", next-token logits
            (their norm is taken over the vocabulary, through the d x d Gram matrix; still divided by sqrt(d)).
        beside: readout "residual" alone: also measure "normed", in the same batches; with a sketch by half as many products.
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
        alone compares models or conditions of different scale (what rms is taken of: see the module's text). With `beside`
        the same of the readout after the final norm, as `sensitivity_normed` and so on. All are [prompt, position]; with
        `from_layer="all"` there is `layer` before `position`, with `pathway="all"` `pathway` in front; `tokens`; attributes
        that say what made it.

    Raises:
        InputError: tokens, query, layer, products or an option the model cannot take; values that are not finite.

    Source: [Chowdhury], arXiv 2603.10123, section 3; estimators are ours, see the module's text.
    """
    at, layers = check_place(model, tokens, query, from_layer)
    check_choice("method", method, ("exact", "sketch", "scalar"))
    check_choice("readout", readout, ("residual", "normed", "logits"))
    check_choice("engine", engine, ("auto", "parts", "autograd"))
    check_choice("pathway", pathway, (*PATHWAYS, "all"))
    if beside and readout != "residual":
        raise InputError(f"beside=True goes with readout 'residual', not '{readout}'; leave one of them out")
    readouts: list[Readout] = [readout, "normed"] if beside else [readout]
    most = _budget(method, products, model.spec.width, chunk)
    width, length = model.spec.width, tokens.shape[1]
    apart = Apart(model, layers[0], engine)
    if apart.obstacle is not None:
        warnings.warn(f"jacobian takes the slower engine autograd for {apart.obstacle}", stacklevel=4)
    # No query that leads to the readout sees what follows.
    end = at + 1 if model.spec.prefix is None else max(at + 1, min(model.spec.prefix, length))
    planned, checked = min(width, most), False
    each = planned + (_fewer(planned, width) if method == "sketch" else planned) * beside  # products
    # Of "score" the difference of two near numbers counts.
    rough = planned < width and method == "sketch" and pathway in ("total", "value")
    rough = rough and engine != "autograd" and coarse(model.device, model.dtype)
    pace, report = Pace.of(model, end, chunk, len(layers)), Tally(progress)

    def attempt(n: int, check: bool) -> Piece:
        ids, own = tokens[n : n + 1, :end], int(np.random.SeedSequence([seed, n]).generate_state(1)[0])
        prompt = Prompt(ids, readouts, layers, apart, pace, check=check, pathway=pathway, query=at, coarse=rough)
        if method == "scalar":  # its gradient's squared norm stands for the whole
            pulled = prompt.pull(prompt.ones())
            estimates = [(_lengths(pulled[:, n : n + 1]), math.nan) for n in range(len(readouts))]
            report(len(readouts))
        elif planned == width:
            every = [(torch.eye(width, dtype=torch.float64), top) for top in prompt.tops]
            estimates = [(squared, 0.0) for squared in _summed(_pulled(prompt, every, report))]
        else:
            estimates = _sketched(prompt, width, planned, torch.Generator().manual_seed(own), report)
        piece = {"engines": np.array([engine in prompt.used for engine in ENGINES])}
        piece["input"] = prompt.input_squares().cpu().numpy()
        for name, one, (squared, variance) in zip(("", NORMED), readouts, estimates, strict=False):
            piece[f"squared{name}"] = squared.cpu().numpy()
            piece[f"variance{name}"] = (torch.zeros_like(squared) + variance).cpu().numpy()
            piece[f"output{name}"] = prompt.outputs(one).cpu().numpy()
        return piece

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
        stage, len(tokens), measured, before=lambda numbers: report.expect(float(len(list(numbers)) * each))
    )
    report.finish()
    used = by_prompt.stacked("engines")
    place = {"readout": readout, "pathway": pathway, "query": at, "from_layer": from_layer}
    place |= {"beside": beside} if beside else {}
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


def _fewer(products: int, width: int) -> int:
    """Products of a sketch of the readout that stands beside the one with so many; it finds its basis in passing."""
    return products if products == width else min(width, max(LEAST_PROBES, products // 2))


Group: TypeAlias = tuple[Float[Tensor, "d _"], Float[Tensor, "d d"]]  # directions of a readout, and its rows


def _pulled(prompt: Prompt, groups: Sequence[Group], report: Tally) -> Iterator[tuple[int, Tensor]]:
    """Pull groups of directions back in the same batches: a group's number, some of its [source, k, position, d]."""
    rows = torch.cat([directions.T.to(top) @ top for directions, top in groups])
    ends, start = list(accumulate((directions.shape[1] for directions, _ in groups), initial=0)), 0
    # Even chunks: a last chunk of one probe would have no pairs.
    for piece in torch.tensor_split(rows, math.ceil(len(rows) / prompt.pace.chunk)):
        pulled, stop = prompt.pull(piece), start + len(piece)
        for n, (low, high) in enumerate(pairwise(ends)):
            if max(low, start) < min(high, stop):
                yield n, pulled[:, max(low, start) - start : min(high, stop) - start]
        start = stop
        report(len(piece))


def _sketched(
    prompt: Prompt, width: int, budget: int, generator: torch.Generator, report: Tally
) -> list[tuple[Tensor, Tensor | float]]:
    """||J_j||_F^2 of each readout, exactly on a basis and by probes on the rest, and the variance of the sum.

    The first readout has so many products, another `_fewer`; its basis are images that were pushed forward for the first.
    """
    basis, exact = torch.zeros(width, 0, dtype=torch.float64), torch.zeros(())
    size, pushed = min(round(SHARE * budget), (budget - LEAST_PROBES) // (2 + FORWARD)), torch.zeros(())
    if size > 0:
        basis = haar(basis, size, generator)
        kept = [pulled for _, pulled in _pulled(prompt, [(basis, prompt.tops[0])], report)]
        (exact,) = _summed((0, pulled) for pulled in kept)
        pushed = torch.cat([_images(prompt, pulled, exact, report) for pulled in kept])
        del kept
    groups, left = list[Group](), list[int]()
    for n, top in enumerate(prompt.tops):
        known = basis if n == 0 else basis[:, :0]
        if size > 0:
            known = torch.cat([known, _leading(known, double(pushed @ top.T))], 1)
        count = budget - FORWARD * max(size, 0) if n == 0 else _fewer(budget, width)
        new = known[:, basis.shape[1] :] if n == 0 else known
        groups += [(new, top), (haar(known, count - known.shape[1], generator), top)]
        left.append(width - known.shape[1])
    sums, probes = [exact, torch.zeros(())][: len(left)], [Probes() for _ in left]
    for n, pulled in _pulled(prompt, groups, report):
        if n % 2:
            probes[n // 2].add(pulled)
        else:
            sums[n // 2] = sums[n // 2] + _lengths(pulled)
    found = list[tuple[Tensor, Tensor | float]]()
    for one, exactly, directions in zip(probes, sums, left, strict=True):
        squared, variance = one.estimate(directions)
        found.append((exactly + squared, variance))
    return found


def _leading(known: Float[Tensor, "d m"], images: Float[Tensor, "k d"]) -> Float[Tensor, "d n"]:
    """Orthonormal columns of the images, made orthonormal to what is known, those left out that are as good as known."""
    found = (images / images.norm(dim=1, keepdim=True).clamp_min(torch.finfo(images.dtype).tiny)).cpu().T
    left, values, _ = torch.linalg.svd(found - known @ (known.T @ found), full_matrices=False)
    return orthonormal(known, left[:, values > NEGLIGIBLE])


def _images(prompt: Prompt, pulled: Tensor, squares: Tensor, report: Tally) -> Float[Tensor, "k d"]:
    """Forward products of products [source, k, position, d], every position weighted by its square over all of them."""
    paths = len(pulled) // len(prompt.layers)  # the first of which is the whole derivative, or the only one
    squares = torch.maximum(squares[::paths], FLOOR * squares[::paths].median(-1, keepdim=True).values)
    weights = squares[:, None, :, None].to(pulled)
    pushed = prompt.push(torch.where(weights > 0, pulled[::paths] / weights, 0))
    report(FORWARD * len(pushed))
    return pushed


class Probes:
    """What is orthonormal to a basis, by Haar-random probes, with its variance; that is estimated itself, and widened."""

    def __init__(self) -> None:
        self.squares: Tensor | float = 0.0
        self.pairs: Tensor | float = 0.0  # sum over them of S_kl^2
        self.pair_count, self.count = 0, 0
        self.kept = list[Tensor]()  # pulled probes, for pairs across chunks

    def add(self, pulled: Float[Tensor, "source k position d"]) -> None:
        """Count these probes, and their pairs among each other (each once) and with earlier ones."""
        self.squares = self.squares + _lengths(pulled)
        gram = _gram(pulled, pulled)  # at every layer and position
        within = gram.square().sum((-2, -1)) - gram.diagonal(dim1=-2, dim2=-1).square().sum(-1)
        self.pairs = sum(
            (_gram(pulled, earlier).square().sum((-2, -1)) for earlier in self.kept), self.pairs + within / 2
        )
        size, before = pulled.shape[1], sum(earlier.shape[1] for earlier in self.kept)
        self.pair_count += size * (size - 1) // 2 + size * before
        self.count += size
        if (before + size) * pulled[:, 0].numel() * 4 <= KEPT_BYTES:
            self.kept.append(pulled)

    def estimate(self, width: int) -> tuple[Tensor, Tensor | float]:
        """The sum of squares over `width` orthonormal directions that the probes were drawn from, and its variance."""
        assert isinstance(self.squares, Tensor)
        squared = self.squares * (width / self.count)
        if not isinstance(self.pairs, Tensor) or not self.pair_count:
            return squared, math.nan
        widening = float(stdtrit(self.count - 1, 0.975) / ndtri(0.975))
        scatter = 2 * width * (width - self.count) / self.count * widening**2
        return squared, scatter * self.pairs / self.pair_count


def _summed(chunks: Iterable[tuple[int, Tensor]]) -> list[Float[Tensor, "source position"]]:
    """`_lengths` of all chunks, by group."""
    found: dict[int, Tensor] = {}
    for n, pulled in chunks:
        found[n] = found[n] + _lengths(pulled) if n in found else _lengths(pulled)
    return list(found.values())


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
    width, found = model.spec.width, dict[str, Any]()
    inputs = torch.from_numpy(pieces.stacked("input")).mean(0)  # mean squares over prompts, by layer
    for end in ("", NORMED) if f"squared{NORMED}" in pieces[0] else ("",):
        # Both [prompt, source, position]; sources are layers by pathways.
        squared, variance = (torch.from_numpy(pieces.stacked(f"{name}{end}")) for name in ("squared", "variance"))
        if not (finite := torch.isfinite(squared)).all():
            place = int((~finite).nonzero()[0, -1])
            raise InputError(
                f"model '{model.identity.name}' gives sensitivities that are not finite (position {place}); check its "
                "weights and what stands there (norms of a zero stream multiply to infinity), or use dtype float32 or "
                "float64"
            )
        sensitivity = (squared.clamp_min(0) / width).sqrt()
        spread = torch.where(squared > 0, variance.sqrt() / (2 * sensitivity * width), torch.zeros_like(squared))
        # [pathway, prompt, layer, position]; zero at the positions that were left out.
        sensitivity, spread = (
            torch.nn.functional.pad(x.unflatten(1, (layers, -1)).permute(2, 0, 1, 3), (0, length - x.shape[-1]))
            for x in (sensitivity, spread)
        )
        outputs = centred_squares(pieces.stacked(f"output{end}")) / width
        unit = (inputs / torch.from_numpy(outputs)[:, None]).sqrt()[None, :, :, None]
        for name, values in (("sensitivity", sensitivity), ("stderr", spread), ("elasticity", sensitivity * unit)):
            found[f"{name}{end}"] = values
    return found


def centred_squares(outputs: Float[np.ndarray, "prompt two number"]) -> Float[np.ndarray, " prompt"]:
    """Squared length of each prompt's readout at the query, the mean of all prompts' means over positions taken out."""
    at_query, means = outputs.swapaxes(0, 1)
    return np.square(at_query - means.mean(0)).sum(-1)
