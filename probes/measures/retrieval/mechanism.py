r"""Why a pair is recalled or not: what a value's log odds depend on, measured beside recall in the same lists.

Of a context, and of the question for the pair at one of its depths, let v be the right value and w the others that are
compared. What is differentiated is

    odds = log p(v) - logsumexp_w log p(w),

log p summed over a value's tokens, each behind the right ones before it; for values of one token this is
`logit(v) - logsumexp_w logit(w)`. (The gradient of log p(v) itself vanishes as p goes to 1: success would predict itself.)
One product gives the gradient g_j at every position j of the context. It is reported per *relative* change of the
embeddings, in nat: |g_j| times the rms of the context's embeddings over positions from 1 on, the elasticity of section 8.
Each variable has three parts: "pair", the root of the sum of squares over the tokens of the pair's line; "others", the mean
of the same over the other lines; "position 0". (Where no first token is put first, position 0 is in the first line, too.)

- `sensitivity`: of the odds; `sensitivity_control`: of the same odds behind the other context of the couple, which lacks the
  key, at the same places.
- `cut`: of the odds, with the weight A_i0 of every query i from 1 on held constant in every head: all paths but those
  through attention to position 0. `through_first`: the norm of the difference of the two gradients. Norms do not add.
- `norm`: answer-free. `||J_j||_F / |h|` times the same rms, h the last block's stream that the value's first token is
  predicted from; from `PRODUCTS` random normal directions z, E |z^T J_j|^2 = ||J_j||_F^2.

Holding A_i0. With r_i = logsumexp_{j>0} s_ij, the logit s_i0 becomes `stop(s_i0 - r_i) + r_i`. No weight changes, and
A_i0 = sigmoid(s_i0 - r_i) has no derivative; it stays exact where A_i0 is 1 in float32.

Profiles by depth, root mean squares over the tokens of a pair's line: `norm_profile`, of `norm` behind the questions for all
other pairs, the asked pair's own line left out (`behind_lists`); `profile` and `profile_init`, of `probes.jacobian`
(elasticity, geometric mean over prompts) at the question's place behind ordinary text of the same length, pretrained and
with fresh weights; `kernel`, what the second-moment kernel predicts for the same text from the pretrained weights' own
scales and patterns (`probes.theory.second_moment`).

Sources: science of the measurement, sections 8 and 11; [Chowdhury] for the Jacobian norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...data.recall import Couple
from ...errors import InputError
from ...models.behind import Asked, Row, continues
from ...models.checks import not_finite
from ...models.initialization import Rule
from ...models.view import Edit, View
from ...results.curves import band
from ...results.variables import Variable
from ...run.precision import double, precise
from ...run.progress import Tally
from ...run.store import Piece, Store
from ...theory.kernel import second_moment
from ..jacobian import jacobian

DEPTHS, PRODUCTS = 5, 4  # of a context that are traced; directions of each question, and splits of all questions
PASS = 4  # plain questions behind a context that take as long as one backward pass, about
PROFILE_PROMPTS, PROFILE_PRODUCTS = 4, 24
PARTS = ("pair", "others", "position 0")
AT = ("traced", "traced_depth", "part")
VARIABLES = {
    "sensitivity": Variable(AT, "log odds per relative change of the embeddings", "nat"),
    "sensitivity_control": Variable(AT, "the same behind a context without the key", "nat"),
    "cut": Variable(AT, "the same, weights on position 0 held constant", "nat"),
    "through_first": Variable(AT, "what passes through attention to position 0", "nat"),
    "norm": Variable(AT, "||J_j||_F / |h| * rms(x)"),
    "norm_profile": Variable(("depth",), "||J_j||_F / |h| * rms(x) of the lists"),
    "profile": Variable(("depth",), "elasticity behind ordinary text"),
    "profile_init": Variable(("depth",), "elasticity behind ordinary text, fresh weights"),
    "kernel": Variable(("depth",), "predicted sensitivity behind ordinary text"),
}


def cost(depths: int) -> int:
    """Of tracing one context, in plain questions: each of its backward passes takes about as long as `PASS` of them."""
    return PASS * (depths * (3 + PRODUCTS) + 2 * PRODUCTS)


def constant_first(logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """A `Reweigh` that leaves all weights as they are, but those of queries from 1 on on key 0 have no derivative."""
    first = (queries > 0) & (keys == 0)
    rest = logits.masked_fill(first, float("-inf")).logsumexp(-1, keepdim=True)
    logits = torch.where(first, (logits - rest).detach() + rest, logits)
    return logits, logits.logsumexp(-1, keepdim=True)


class Differentiable:
    """A context that ran once with its history kept, for gradients of what follows it.

    Views that cannot continue a context run the whole text for every answer.
    """

    def __init__(self, model: View, context: Sequence[int], edits: Sequence[Edit] = ()) -> None:
        self.model, self.context, self.edits = model, list(context), edits
        self.x = model.embed(torch.tensor([self.context])).detach().requires_grad_()
        self.unit = float(double(self.x.detach()[0, 1:]).pow(2).mean().sqrt())
        self.continues = continues(model)
        self._run = model.behind(self.x, edits=edits) if continues(model) else None

    def streams(self, row: Row) -> Float[Tensor, "token d"]:
        """The stream after the last block at the row's tokens."""
        if self._run is not None:
            return self._run(*(one[None] for one in row.padded(len(row.tokens))))[0]
        count, found = len(row.asked.question), {}
        for answer in row.asked.answers:
            nodes = [*range(count), *(row.nodes[answer[:n]] for n in range(1, len(answer)))]
            if not set(nodes) <= set(found):
                text = torch.tensor([[*self.context, *row.asked.question, *answer]])
                behind = self.model.embed(text).detach()[:, len(self.context) :]
                stream = self.model.residual(torch.cat([self.x, behind], 1), edits=self.edits)
                found |= dict(zip(nodes, stream[0, len(self.context) : -1], strict=True))
        return torch.stack([found[n] for n in range(len(found))])

    def ends(self, questions: Sequence[tuple[int, ...]]) -> Float[Tensor, "question d"]:
        """The stream after the last block at the last token of each question; all have one length."""
        rows = [Row(Asked(one, ((0,),))) for one in questions]  # an answer of one token adds none
        if self._run is None:
            return torch.stack([self.streams(row)[-1] for row in rows])
        padded = zip(*(row.padded(len(row.tokens)) for row in rows), strict=True)
        return self._run(*(torch.stack(tensors) for tensors in padded))[:, -1]

    def odds(self, row: Row, streams: Float[Tensor, "token d"]) -> Float[Tensor, ""]:
        """Log odds of the row's first answer against the others."""
        log_p, _ = row.log_p(self.model, streams)
        return log_p[0] - log_p[1:].logsumexp(0)

    def gradient(self, of: Float[Tensor, ""]) -> Float[Tensor, "position d"]:
        """Of a number by the embeddings, per relative change of them."""
        return double(torch.autograd.grad(of, self.x, retain_graph=True)[0][0]) * self.unit


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
    """All variables of one context, [place, part].

    Args:
        couple, side: which context.
        depths, asked: the places: which pairs, and the questions for them with the values that are compared.
        seed: of the directions.
        report: hears of every backward pass.
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


def behind_lists(
    model: View, couple: Couple, side: int, depths: np.ndarray, *, seed: Sequence[int], report: Tally
) -> Piece:
    """Of one context `lines` [depth]: the mean square of `norm` at a line over the questions for all others of the depths.

    A line's own question reads that very line. `PRODUCTS` times, the questions are split into random halves. One product per
    half, of independent directions z_k, gives E |sum_k z_k^T J_kj|^2 = sum_k ||J_kj||_F^2, which counts for the lines that
    the other half asks for. So any two pairs meet equally often, and the mean over splits is unbiased.

    Args:
        model, couple, side, seed, report: as in `traced`.
        depths: the pairs, two or more.
    """
    draw, count = np.random.default_rng(seed), len(depths)
    half = np.stack([draw.permutation(count) % 2 for _ in range(PRODUCTS)])  # [split, question]
    with torch.enable_grad():
        ran = Differentiable(model, couple.contexts[side])
        total = torch.zeros(PRODUCTS, 2, *ran.x.shape[1:], dtype=torch.float64, device=precise(model.device))
        for some in [np.arange(count)] if ran.continues else np.arange(count)[:, None]:
            h = ran.ends([couple.questions[side][depths[n]] for n in some])
            z = torch.stack([torch.stack([direction(draw, one) for _ in range(PRODUCTS)]) for one in h], 1)
            dots = (z * h / h.detach().norm(dim=-1, keepdim=True)).sum(-1)  # [split, question]
            for split, which in product(range(PRODUCTS), (0, 1)):
                if (own := half[split, some] == which).any():
                    total[split, which] += ran.gradient(dots[split, torch.from_numpy(own)].sum()).to(total)
                    report(PASS)
    squares = _by_line(total.pow(2).sum(-1).cpu().numpy(), couple).mean(-1)[..., depths]  # [split, half, depth]
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
    ran = Differentiable(model, context, edits)
    gradients = []
    norms = torch.zeros(len(asked), len(context), dtype=torch.float64, device=precise(model.device))
    for place, one in enumerate(asked):
        row = Row(one)
        streams = ran.streams(row)
        gradients.append(ran.gradient(ran.odds(row, streams)))
        report(PASS)
        if draw is None:
            continue
        h = streams[len(one.question) - 1]
        for _ in range(PRODUCTS):
            norms[place] += ran.gradient(h @ direction(draw, h)).pow(2).sum(-1).to(norms)
            report(PASS)
        norms[place] = norms[place] / PRODUCTS / double(h.detach()).pow(2).sum().to(norms)
    return torch.stack(gradients), norms


def direction(draw: np.random.Generator, like: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Independent standard normal numbers, the same on every device."""
    return torch.from_numpy(draw.standard_normal(len(like))).to(like)


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


def profiles(
    model: View,
    tokens: Tensor,
    couple: Couple,
    depths: np.ndarray,
    *,
    initialization: Rule,
    seed: int,
    pieces: Store,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """`profile`, `profile_init` and `kernel` by depth, from ordinary text; attributes that say why one is missing.

    Args:
        tokens: ids [prompt, position] of the length of a context with its question.
        couple: says where lines stand.
        depths: the pairs.
        initialization: what fresh weights are drawn from, as in `View.reinitialized`.
        seed: of the fresh weights and of the sketch.
        pieces: keeps what each prompt gave.
    """

    def by_depth(curves: Any) -> np.ndarray:
        mean: Any = band(curves.values).centre
        return np.sqrt((_by_line(mean, couple)[depths] ** 2).mean(-1))

    found, missing = {}, {}
    how: dict[str, Any] = {"method": "sketch", "products": min(PROFILE_PRODUCTS, model.spec.width), "seed": seed}
    found["profile"] = by_depth(jacobian(model, tokens, pieces=pieces.within("profile"), **how)["elasticity"])
    fresh = model.reinitialized(seed, initialization=initialization)
    found["profile_init"] = by_depth(jacobian(fresh, tokens, pieces=pieces.within("profile init"), **how)["elasticity"])
    try:
        kernel = second_moment(model, tokens, attention="measured", score_path=True, pieces=pieces)
        found["kernel"] = by_depth(kernel["sensitivity"])
    except InputError as error:  # blocks that cannot be taken apart
        missing["kernel_missing"] = str(error)
    return found, missing
