"""How strongly what follows a list depends on its lines, measured beside recall in the same lists.

Variables stand on the measure's page (`docs/probes/retrieval.md`), "Mechanism". The norm is reported per *relative* change
of the embeddings, from random normal directions z: E |z^T J_j|^2 = ||J_j||_F^2.

Profiles by depth are of every list or prompt by itself, root mean squares over the tokens of a pair's line.

Source: ours; [Chowdhury] for the Jacobian norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...data.recall import Couple
from ...models.behind import behind
from ...models.checks import not_finite
from ...models.initialization import Rule
from ...models.view import View
from ...results.dataset import Variable
from ...run.memory import PROMPT_NUMBERS, prompts_at_once
from ...run.precision import double
from ...run.progress import Tally
from ...run.store import Piece, Store
from ..jacobian import jacobian

SPLITS = 2  # of all questions
PASS = 4  # plain questions behind a context that take as long as one backward pass, about
COST = PASS * 2 * SPLITS  # of the norm behind a context, in plain questions
# Of heads over a context's tokens: what a block keeps, about, of all questions' attention for a backward pass.
PATTERNS = 6
PROFILE_PROMPTS, PROFILE_PRODUCTS = 8, 24
OF_SHOCKS = ("shock", "traced", "depth")
VARIABLES = {
    "norm_profile": Variable(OF_SHOCKS[1:], "||J_j||_F / |h| * rms(x) of the lists, questions for other lines"),
    "norm_shocked": Variable(OF_SHOCKS, "`norm_profile` of the changed model"),
    "log_p_shocked": Variable(OF_SHOCKS, "log probability of the value in the changed model", "nat"),
    "profile": Variable(("profile_prompt", "depth"), "elasticity behind ordinary text"),
    "profile_init": Variable(("profile_prompt", "depth"), "elasticity behind ordinary text, fresh weights"),
}


class Differentiable:
    """A context that ran once with its history kept, for gradients of what follows it.

    Of `copies` of it, which run side by side, each has gradients of its own, and one backward pass gives all of them.
    """

    def __init__(self, model: View, context: Sequence[int], copies: int = 1) -> None:
        once = model.embed(torch.tensor([list(context)])).detach()
        self.unit, self.copies = double(once[0, 1:]).pow(2).mean().sqrt(), copies
        self.x = once.repeat(copies, 1, 1).requires_grad_()
        self.streams = behind(model, self.x)  # of rows, as many of each copy

    def gradients(self, numbers: Sequence[Float[Tensor, " question"]]) -> Iterator[Float[Tensor, "position d"]]:
        """Of sums of numbers by the embeddings, per relative change of them; sum n is of copy n modulo all copies."""
        for start in range(0, len(numbers), self.copies):
            of = torch.stack([double(one.sum()) for one in numbers[start : start + self.copies]]).sum()
            (gradient,) = torch.autograd.grad(of, self.x, retain_graph=True)
            yield from double(gradient) * self.unit


def profiles(
    model: View, text: Tensor, couple: Couple, *, initialization: Rule, seed: int, pieces: Store
) -> dict[str, np.ndarray]:
    """Profiles at the lines of lists of ordinary text, ids [prompt, position] as long as a context with its question."""
    how: Any = {"method": "sketch", "products": min(PROFILE_PRODUCTS, model.spec.width), "seed": seed}
    fresh, values = model.reinitialized(seed, initialization=initialization), {}
    for name, view in {"profile": model, "profile_init": fresh}.items():
        curves = jacobian(view, text, pieces=pieces.within(name.replace("_", " ")), **how)["elasticity"].values
        values[name] = np.sqrt((_by_line(curves, couple) ** 2).mean(-1))
    return values


def behind_lists(model: View, couple: Couple, side: int, *, seed: Sequence[int], report: Tally) -> Piece:
    """Of one context `norm` [depth]: the root mean square of a line's norm over the questions for all other lines.

    A line's own question reads that very line. `SPLITS` times, the questions are split into random halves. One product per
    half, of independent directions z_k, gives E |sum_k z_k^T J_kj|^2 = sum_k ||J_kj||_F^2, which counts for the lines that
    the other half asks for. So any two pairs meet equally often, and the mean over splits is unbiased.
    """
    draw, count = np.random.default_rng(seed), len(couple.starts)
    half = np.stack([draw.permutation(count) % 2 for _ in range(SPLITS)])  # [split, question]
    context = couple.contexts[side]
    own = torch.from_numpy(np.stack([half == which for which in (0, 1)], 1)).to(model.device)  # [split, half, question]
    z = directions(draw, (count, SPLITS), model)
    spec, length = model.spec, len(context)
    history = spec.blocks * (PROMPT_NUMBERS * spec.width * length + PATTERNS * spec.heads * length**2)
    copies = 2 * SPLITS if prompts_at_once(model, length, history) >= 2 * SPLITS else 1
    with torch.enable_grad():
        ran = Differentiable(model, context, copies)
        h = ran.streams(couple.questions[side] * copies)[:, -1].unflatten(0, (copies, -1))
        size = h.detach().norm(dim=-1, keepdim=True)
        dots = [
            (z[:, split] * h[n % copies] / size[n % copies]).sum(-1) * own[split, which]
            for n, (split, which) in enumerate(product(range(SPLITS), (0, 1)))
        ]
        found = [gradient.pow(2).sum(-1) for gradient in ran.gradients(dots)]
        report(PASS * len(found))
    total = torch.stack(found).unflatten(0, (SPLITS, 2))
    squares = _by_line(total.cpu().numpy(), couple).mean(-1)  # [split, half, line]
    squares /= np.stack([(half == which).sum(1) for which in (0, 1)], 1)[..., None]
    lines = np.take_along_axis(squares, 1 - half[:, None], 1).mean((0, 1))
    if not np.isfinite(lines).all():
        raise not_finite(model, "gradients behind lists")
    return {"norm": np.sqrt(lines)}


def directions(draw: np.random.Generator, size: tuple[int, int], model: View) -> Float[Tensor, "place product d"]:
    """Independent standard normal numbers, the same on every device."""
    return torch.from_numpy(draw.standard_normal((*size, model.spec.width))).to(model.device, model.dtype)


def _by_line(values: Float[np.ndarray, "*rows position"], couple: Couple) -> Float[np.ndarray, "*rows line token"]:
    """Values at the tokens of every line; all lines have as many."""
    starts = np.array([start for start, _ in couple.starts])
    return values[..., starts[:, None] + np.arange(starts[1] - starts[0])]
