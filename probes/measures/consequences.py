"""What a change of a model does to its behaviour: next-token loss, divergence from the model as it is, recall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..data.recall import Maker, Rung, read_template
from ..errors import InputError
from ..models.checks import not_finite
from ..models.view import View
from ..run.precision import double, precise
from ..run.progress import Progress, Tally
from ..run.store import Piece, Store

RECALLED = 12  # pairs of the lists that recall is measured on
LOGITS_AT_ONCE = 1 << 23  # next-token logits, in float64: 64 MiB


def consequences(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    original: View | None = None,
    progress: Progress | None = None,
    *,
    pieces: Store | None = None,
) -> tuple[Float[np.ndarray, "prompt predicted"], Float[np.ndarray, "prompt predicted"] | None]:
    """(`-log p` of every next token, `KL(p_i || p'_i)` of it from p of the `original`, if one is given), in nats.

    Prompt by prompt, next-token logits for some positions at a time. The loss is NaN where the head excludes the token
    (logit minus infinity): toys may tell only some of the ids apart.

    Raises:
        InputError: values that are not finite.
    """
    report = Tally(progress, len(tokens))

    @torch.no_grad()
    def measured(n: int) -> Piece:
        views = [model] if original is None else [original, model]
        normed = [view.norm(view.residual(view.embed(tokens[n : n + 1])))[0] for view in views]
        loss, kl = compared(model, normed, tokens[n, 1:])
        report()
        return {"loss": loss[-1], "kl": kl[-1]}

    by_prompt = (pieces or Store()).each("loss", len(tokens), measured)
    report.finish()
    loss = by_prompt.stacked("loss")
    check_losses(model, loss)
    return loss, None if original is None else by_prompt.stacked("kl")


@torch.no_grad()
def compared(
    model: View, normed: Sequence[Float[Tensor, "position d"]], following: Int[Tensor, " predicted"]
) -> tuple[Float[np.ndarray, "stream predicted"], Float[np.ndarray, "stream predicted"]]:
    """(`-log p` of every next token of a prompt, KL divergence of it from that of the first stream), by stream, in nats.

    Args:
        model: which reads next-token logits out, for some positions at a time.
        normed: streams of the prompt after the final norm.
        following: the token after each of the first positions. A loss is NaN where the head excludes its token, infinite
            where it is not finite otherwise.
    """
    rows = max(1, LOGITS_AT_ONCE // model.spec.vocabulary)
    loss, kl = np.zeros((2, len(normed), len(following)))
    targets = following.to(precise(normed[0].device))

    def log_p(stream: Tensor) -> Tensor:
        return double(model.unembed(stream)).log_softmax(-1)

    for start in range(0, len(targets), rows):
        at = slice(start, min(start + rows, len(targets)))
        first = log_p(normed[0][at])
        known, p = ~torch.isneginf(first), first.exp()
        for n, stream in enumerate(normed):
            own = log_p(stream[at]) if n else first
            each = functional.nll_loss(own, targets[at], reduction="none")
            excluded = torch.isneginf(own.gather(-1, targets[at][:, None])[:, 0])
            if excluded.any():
                excluded &= torch.isneginf(own).all(0)[targets[at]]  # whatever it reads; a single one is a fault
            each = each.masked_fill(~torch.isfinite(each), torch.inf).masked_fill(excluded, torch.nan)
            loss[n, at] = each.cpu().numpy()
            if n:
                terms = (first - own).mul_(p).where(known, 0)
                kl[n, at] = terms.sum(-1).cpu().numpy()
    return loss, kl


def known_mean(values: Float[np.ndarray, "*some predicted"]) -> Float[np.ndarray, "*some"]:
    """Means of what is known; NaN where nothing is."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0).sum(-1) / known.sum(-1)


def check_losses(model: View, loss: Float[np.ndarray, ...]) -> None:
    """Refuse losses that are not finite; NaN stands for tokens that the head excludes.

    Raises:
        InputError: some are infinite.
    """
    if np.isinf(loss).any():
        raise not_finite(model, "a next-token loss")


def check_recall(model: View, contexts: int) -> None:
    """Refuse what recall of so many lists could not be measured on.

    Raises:
        InputError: an odd number, or a model whose tokenizer makes no lists.
    """
    if contexts % 2:
        raise InputError(f"recall={contexts} is odd; lists come in couples")
    Maker(model, Rung(RECALLED), read_template("sentences"))
