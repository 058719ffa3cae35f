"""Why a pair is recalled or not: what a value's log odds depend on, measured beside recall in the same lists.

Variables stand on the measure's page (`docs/probes/retrieval.md`), "Mechanism". log p is summed over a value's tokens, each
behind the right ones before it. One product gives the gradient at every position of the context, reported per *relative*
change of the embeddings, in nat. Each variable has three parts: "pair", the root of the sum of squares over the tokens of
the pair's line; "others", the mean of the same over the other lines; "position 0". (Where no first token is put first,
position 0 is in the first line, too.) `norm` is from `PRODUCTS` random normal directions z, E |z^T J_j|^2 = ||J_j||_F^2.

Holding A_i0. With r_i = logsumexp_{j>0} s_ij, the logit s_i0 becomes `stop(s_i0 - r_i) + r_i`. No weight changes, and
A_i0 = sigmoid(s_i0 - r_i) has no derivative; it stays exact where A_i0 is 1 in float32.

Profiles by depth are of every list or prompt by itself, root mean squares over the tokens of a pair's line.

Source: ours; [Chowdhury] for the Jacobian norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...data.recall import Couple
from ...models.behind import Asked, Row, behind, log_p, padded
from ...models.checks import not_finite
from ...models.initialization import Rule
from ...models.view import Edit, View
from ...models.words import edited
from ...results.dataset import Variable
from ...run.memory import PROMPT_NUMBERS, Retry, prompts_at_once
from ...run.precision import double
from ...run.progress import Tally
from ...run.store import Piece, Store
from ..jacobian import jacobian

DEPTHS, PRODUCTS, SPLITS = 5, 4, 2  # of a context that are traced; directions of each question; splits of all questions
PASS = 4  # plain questions behind a context that take as long as one backward pass, about
PATTERNS = 6  # of a block's heads, that a backward pass needs where weights are held
PROFILE_PROMPTS, PROFILE_PRODUCTS = 8, 24
PARTS = ("pair", "others", "position 0")
AT, OF_SHOCKS = ("traced", "traced_depth", "part"), ("shock", "traced", "depth")
VARIABLES = {
    "sensitivity": Variable(AT, "log odds per relative change of the embeddings", "nat"),
    "sensitivity_control": Variable(AT, "the same behind a context without the key", "nat"),
    "cut": Variable(AT, "the same, weights on position 0 held constant", "nat"),
    "through_first": Variable(AT, "what passes through attention to position 0", "nat"),
    "norm": Variable(AT, "||J_j||_F / |h| * rms(x)"),
    "norm_profile": Variable(("traced", "depth"), "||J_j||_F / |h| * rms(x) of the lists, questions for other lines"),
    "norm_shocked": Variable(OF_SHOCKS, "`norm_profile` of the changed model"),
    "log_p_shocked": Variable(OF_SHOCKS, "log probability of the value in the changed model", "nat"),
    "profile": Variable(("profile_prompt", "depth"), "elasticity behind ordinary text"),
    "profile_init": Variable(("profile_prompt", "depth"), "elasticity behind ordinary text, fresh weights"),
}


def cost(depths: int, shocks: int) -> int:
    """Of tracing one context, in plain questions: each of its backward passes takes about as long as `PASS` of them."""
    return PASS * (depths * (3 + PRODUCTS) + 2 * SPLITS * (1 + shocks))


def constant_first(logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """A `Reweigh` that leaves all weights as they are, but those of queries from 1 on on key 0 have no derivative."""
    first = (queries > 0) & (keys == 0)
    rest = logits.masked_fill(first, float("-inf")).logsumexp(-1, keepdim=True)
    logits = torch.where(first, (logits - rest).detach() + rest, logits)
    return logits, logits.logsumexp(-1, keepdim=True)


class Differentiable:
    """A context that ran once with its history kept, for gradients of what follows it.

    Of `copies` of it, which run side by side, each has gradients of its own, and one backward pass gives all of them.
    """

    def __init__(self, model: View, context: Sequence[int], edits: Sequence[Edit] = (), copies: int = 1) -> None:
        self.model = model
        once = model.embed(torch.tensor([list(context)])).detach()
        self.unit = double(once[0, 1:]).pow(2).mean().sqrt()
        self.x = once.repeat(copies, 1, 1).requires_grad_()
        self._run = behind(model, self.x, edits=edits)

    def streams(self, *rows: Row) -> Float[Tensor, "row token d"]:
        """The stream after the last block at the tokens of rows of one length, as many of each copy."""
        return self._run(*padded(rows))

    def odds(self, rows: Sequence[Row], streams: Float[Tensor, "row token d"]) -> Float[Tensor, " row"]:
        """Log odds of each row's first answer against the others."""
        values, _ = log_p(self.model, rows, streams)
        return values[:, 0] - values[:, 1:].logsumexp(-1)

    def gradients(
        self, numbers: Sequence[Float[Tensor, " place"]], copies: int
    ) -> Iterator[Float[Tensor, "place position d"]]:
        """Of numbers by the embeddings, per relative change of them.

        Each place has so many copies, one behind the other, and number n is made from copy n modulo `copies`.
        """
        for start in range(0, len(numbers), copies):
            of = torch.stack([double(one.sum()) for one in numbers[start : start + copies]]).sum()
            (gradient,) = torch.autograd.grad(of, self.x, retain_graph=True)
            yield from (double(gradient) * self.unit).unflatten(0, (-1, copies)).unbind(1)


def together(model: View, length: int, places: int, numbers: int) -> tuple[int, int]:
    """How many places are worked on at once, and how many copies of the context each of them has: one, or one a number."""
    spec = model.spec
    history = spec.blocks * (PROMPT_NUMBERS * spec.width * length + PATTERNS * spec.heads * length**2)
    count = prompts_at_once(model, length, history)
    copies = numbers if count >= numbers else 1
    return min(places, max(1, count // copies)), copies


def measured(
    model: View,
    couple: Callable[[int], Couple],
    contexts: int,
    depths: np.ndarray,
    candidates: int,
    text: Tensor | None,
    *,
    shocks: Sequence[str],
    initialization: Rule,
    seed: int,
    retry: Retry,
    report: Tally,
    pieces: Store,
) -> dict[str, np.ndarray]:
    """`VARIABLES` of so many contexts, and profiles by depth; arguments but for these as in `retrieval`.

    `couple` makes the couple of a number; `depths` are the pairs of each context that are traced; without any, the norm
    behind the lists is all that is measured of them. Without `text`, ids [prompt, position] of ordinary text as long as a
    context with its question, there are no profiles of it. `shocks` are words of `probes.edited`.
    """

    def lines(of: View, number: int) -> Piece:  # the same directions, whatever the shock
        return behind_lists(of, couple(number // 2), number % 2, seed=[seed, number, 1], report=report)

    def one(number: int) -> Piece:
        if not len(depths):
            return lines(model, number)
        made, side = couple(number // 2), number % 2
        draw, asked = np.random.default_rng([seed, number // 2, side]), []
        for question, answer in zip(made.questions[side], made.answers[side], strict=True):
            others = [other for other in made.answers[side] if other != answer]
            chosen = [others[n] for n in draw.permutation(len(others))[: candidates - 1]]
            asked.append(Asked(question, (answer, *chosen)))
        own = [asked[depth] for depth in depths]
        found = traced(model, made, side, depths, own, seed=[seed, number], report=report)
        return found | lines(model, number)

    by_context = pieces.each("mechanism", contexts, lambda number: retry(lambda: one(number)))
    values = {name: by_context.stacked(name) for name in by_context[0]}
    values["norm_profile"] = np.sqrt(values.pop("lines"))
    shocked: dict[str, list[np.ndarray]] = {"norm_shocked": [], "log_p_shocked": []}
    for shock in shocks:
        view = edited(model, shock, reference=torch.tensor(couple(0).contexts), seed=seed)

        def both(number: int, view: View = view) -> Piece:
            return {"log_p": recalled(view, couple(number // 2), number % 2)} | lines(view, number)

        by_context = pieces.within(shock).each("shock", contexts, lambda number, do=both: retry(lambda: do(number)))
        shocked["norm_shocked"].append(np.sqrt(by_context.stacked("lines")))
        shocked["log_p_shocked"].append(by_context.stacked("log_p"))
    values |= {name: np.stack(found) for name, found in shocked.items() if found}
    if text is None:
        return values
    how: Any = {"method": "sketch", "products": min(PROFILE_PRODUCTS, model.spec.width), "seed": seed}
    fresh = model.reinitialized(seed, initialization=initialization)
    for name, view in {"profile": model, "profile_init": fresh}.items():
        curves = jacobian(view, text, pieces=pieces.within(name.replace("_", " ")), **how)["elasticity"].values
        values[name] = np.sqrt((_by_line(curves, couple(0)) ** 2).mean(-1))
    return values


@torch.no_grad()
def recalled(model: View, couple: Couple, side: int) -> Float[np.ndarray, " depth"]:
    """Log probabilities of a context's own values."""
    asked = zip(couple.questions[side], couple.answers[side], strict=True)
    rows = [Row(Asked(question, (answer,))) for question, answer in asked]
    run = behind(model, model.embed(torch.tensor([couple.contexts[side]])))
    return log_p(model, rows, run(*padded(rows)))[0][:, 0].cpu().numpy()


def traced(
    model: View,
    couple: Couple,
    side: int,
    depths: Sequence[int] | np.ndarray,
    asked: Sequence[Asked],
    *,
    seed: Sequence[int],
    report: Tally,
) -> Piece:
    """All variables of the context of a couple on a side, [place, part].

    Places are the pairs at `depths`, and the questions for them with the values that are compared.
    """
    held = [Edit("logits", layer, constant_first) for layer in range(model.spec.blocks)]
    with torch.enable_grad():
        whole, norm = _gradients(model, couple.contexts[side], asked, report, draw=np.random.default_rng(seed))
        cut, _ = _gradients(model, couple.contexts[side], asked, report, held)
        control, _ = _gradients(model, couple.contexts[1 - side], asked, report)
    squares: dict[str, Tensor] = {"sensitivity": whole.pow(2).sum(-1), "cut": cut.pow(2).sum(-1), "norm": norm}
    squares |= {"through_first": (whole - cut).pow(2).sum(-1), "sensitivity_control": control.pow(2).sum(-1)}
    piece = {name: _parts(values.cpu().numpy(), couple, depths) for name, values in squares.items()}
    if not all(np.isfinite(values).all() for values in piece.values()):
        raise not_finite(model, "gradients of log odds")
    return piece


def behind_lists(model: View, couple: Couple, side: int, *, seed: Sequence[int], report: Tally) -> Piece:
    """Of one context `lines` [depth]: the mean square of `norm` at a line over the questions for all other lines.

    A line's own question reads that very line. `SPLITS` times, the questions are split into random halves. One product per
    half, of independent directions z_k, gives E |sum_k z_k^T J_kj|^2 = sum_k ||J_kj||_F^2, which counts for the lines that
    the other half asks for. So any two pairs meet equally often, and the mean over splits is unbiased.
    """
    draw, count = np.random.default_rng(seed), len(couple.starts)
    half = np.stack([draw.permutation(count) % 2 for _ in range(SPLITS)])  # [split, question]
    context = couple.contexts[side]
    own = torch.from_numpy(np.stack([half == which for which in (0, 1)], 1)).to(model.device)  # [split, half, question]
    z = directions(draw, (count, SPLITS), model)
    copies = together(model, len(context), 1, 2 * SPLITS)[1]
    with torch.enable_grad():
        ran = Differentiable(model, context, copies=copies)
        # An answer of one token adds none to its row.
        rows = [Row(Asked(question, ((0,),))) for question in couple.questions[side]]
        h = ran.streams(*(rows * copies))[:, -1].unflatten(0, (copies, -1))
        size = h.detach().norm(dim=-1, keepdim=True)
        dots = [
            (z[:, split] * h[n % copies] / size[n % copies]).sum(-1) * own[split, which]
            for n, (split, which) in enumerate(product(range(SPLITS), (0, 1)))
        ]
        found = [gradient[0].pow(2).sum(-1) for gradient in ran.gradients(dots, copies)]
        report(PASS * len(found))
    total = torch.stack(found).unflatten(0, (SPLITS, 2))
    squares = _by_line(total.cpu().numpy(), couple).mean(-1)  # [split, half, line]
    squares /= np.stack([(half == which).sum(1) for which in (0, 1)], 1)[..., None]
    lines = np.take_along_axis(squares, 1 - half[:, None], 1).mean((0, 1))
    if not np.isfinite(lines).all():
        raise not_finite(model, "gradients behind lists")
    return {"lines": lines}


def _gradients(
    model: View,
    context: Sequence[int],
    asked: Sequence[Asked],
    report: Tally,
    edits: Sequence[Edit] = (),
    *,
    draw: np.random.Generator | None = None,
) -> tuple[Float[Tensor, "place position d"], Float[Tensor, "place position"]]:
    """Gradients of every question's odds; from the same pass squares of `norm`, 0 where no directions are drawn."""
    products, at = 0 if draw is None else PRODUCTS, len(asked[0].question) - 1
    z = None if draw is None else directions(draw, (len(asked), products), model)
    size, copies = together(model, len(context), len(asked), 1 + products)
    gradients, norms, ran = list[Tensor](), list[Tensor](), dict[int, Differentiable]()
    for start in range(0, len(asked), size):
        rows, some = [Row(one) for one in asked[start : start + size]], slice(start, start + size)
        if len(rows) not in ran:
            ran[len(rows)] = Differentiable(model, context, edits, copies * len(rows))
        run = ran[len(rows)]
        streams = run.streams(*(row for row in rows for _ in range(copies))).unflatten(0, (-1, copies))
        h = streams[:, :, at]  # [place, copy, d]
        numbers = [run.odds(rows, streams[:, 0])]
        numbers += [] if z is None else [(h[:, n % copies] * z[some, n - 1]).sum(-1) for n in range(1, 1 + products)]
        gradient, *others = run.gradients(numbers, copies)
        squares = sum((other.pow(2).sum(-1) for other in others), torch.zeros_like(gradient[..., 0]))
        gradients.append(gradient)
        norms.append(squares / PRODUCTS / double(h[:, 0].detach()).pow(2).sum(-1, keepdim=True))
        report(PASS * len(rows) * len(numbers))
    return torch.cat(gradients), torch.cat(norms)


def directions(draw: np.random.Generator, size: tuple[int, int], model: View) -> Float[Tensor, "place product d"]:
    """Independent standard normal numbers, the same on every device."""
    return torch.from_numpy(draw.standard_normal((*size, model.spec.width))).to(model.device, model.dtype)


def _by_line(values: Float[np.ndarray, "*rows position"], couple: Couple) -> Float[np.ndarray, "*rows line token"]:
    """Values at the tokens of every line; all lines have as many."""
    starts = np.array([start for start, _ in couple.starts])
    return values[..., starts[:, None] + np.arange(starts[1] - starts[0])]


def _parts(
    squares: Float[np.ndarray, "place position"], couple: Couple, depths: Sequence[int] | np.ndarray
) -> Float[np.ndarray, "place part"]:
    """Roots of squares, of the pair's line, over the other lines, and at position 0."""
    lines = np.sqrt(_by_line(squares, couple).sum(-1))  # [place, line]
    own = lines[np.arange(len(lines)), np.asarray(depths)]
    others = (lines.sum(-1) - own) / (lines.shape[-1] - 1)
    return np.stack([own, others, np.sqrt(squares[:, 0])], axis=-1)
