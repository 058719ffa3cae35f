"""What a change of a model does to its behaviour: next-token loss, divergence from the model as it is, recall."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..data.recall import Maker, Rung, read_template
from ..errors import InputError
from ..models.checks import not_finite
from ..models.view import View
from ..run.memory import Retry, batches, block_numbers, parts, prompts_at_once
from ..run.precision import double, precise
from ..run.progress import Progress, Tally
from ..run.store import Piece, Store

RECALLED = 12  # pairs of the lists that recall is measured on
LOGITS_AT_ONCE = 1 << 23  # next-token logits, in float64: 64 MiB
LIKE_THEM = 3  # what exists beside a logit takes as much memory as so many numbers of `block_numbers`


def consequences(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    original: View | None = None,
    progress: Progress | None = None,
    *,
    pieces: Store | None = None,
) -> tuple[Float[np.ndarray, "prompt predicted"], Float[np.ndarray, "prompt predicted"] | None]:
    """(`-log p` of every next token, `KL(p_i || p'_i)` of it from p of the `original`, if one is given), in nats.

    Next-token logits are read out for some positions at a time. The loss is NaN where the head excludes the token
    (logit minus infinity): toys may tell only some of the ids apart.
    """
    report, length = Tally(progress, len(tokens)), tokens.shape[1]
    retry = Retry(f"a prompt of {length} positions of '{model.identity.name}'", report)
    views = [model] if original is None else [original, model]

    @torch.no_grad()
    def measured(numbers: Sequence[int]) -> list[Piece]:
        found = list[np.ndarray]()
        for some in batches(numbers, model, length * len(views)):
            ids = tokens[some]
            normed = torch.stack([view.norm(view.residual(view.embed(ids)))[:, :-1] for view in views])
            each = np.stack(compared(model, normed.flatten(1, 2), ids[:, 1:].flatten()))[:, -1]
            found.append(each.reshape(2, len(some), -1))
            report(len(some))
        return [{"loss": loss, "kl": kl} for loss, kl in zip(*np.concatenate(found, 1), strict=True)]

    at_once = prompts_at_once(model, length * len(views))
    by_prompt = (pieces or Store()).together("loss", len(tokens), lambda some: retry(lambda: measured(some)), at_once)
    report.finish()
    loss = by_prompt.stacked("loss")
    check_losses(model, loss)
    return loss, None if original is None else by_prompt.stacked("kl")


@torch.no_grad()
def compared(
    model: View, normed: Float[Tensor, "stream position d"], following: Int[Tensor, " predicted"]
) -> tuple[Float[np.ndarray, "stream predicted"], Float[np.ndarray, "stream predicted"]]:
    """(`-log p` of every next token, KL divergence of it from that of the first stream), by stream, in nats.

    Args:
        model: which reads next-token logits out, for some positions at a time, of several streams where there is room.
        normed: streams after the final norm, of one prompt or of several, one behind the other.
        following: the token after each of the first positions. A loss is NaN where the head excludes its token, infinite
            where it is not finite otherwise.
    """
    numbers = max(LOGITS_AT_ONCE, block_numbers(normed.device) // LIKE_THEM) // parts()
    rows, found = max(1, numbers // model.spec.vocabulary), list[Tensor]()
    targets = following.to(precise(normed.device))

    def log_p(streams: Tensor) -> Tensor:
        return double(model.unembed(streams)).log_softmax(-1)

    def losses(own: Float[Tensor, "stream predicted token"], at: slice) -> Tensor:
        picked = own.gather(-1, targets[at].expand(len(own), -1)[..., None])[..., 0]
        never = torch.isneginf(own.flatten(0, 1).amax(0))[targets[at]]  # whatever it reads; a single one is a fault
        each = (-picked).masked_fill(~torch.isfinite(picked), torch.inf)
        return each.masked_fill(torch.isneginf(picked) & never, torch.nan)

    for start in range(0, len(targets), rows):
        at = slice(start, min(start + rows, len(targets)))
        first = log_p(normed[0, at])
        known, p = ~torch.isneginf(first), first.exp()
        loss = [losses(first[None], at)]
        kl = [torch.zeros_like(loss[0])]
        together = max(1, rows // (at.stop - at.start))
        for n in range(1, len(normed), together):
            own = log_p(normed[n : n + together, at])
            loss.append(losses(own, at))
            kl.append((first - own).mul_(p).where(known, 0).sum(-1))
        found.append(torch.stack([torch.cat(loss), torch.cat(kl)]))
    loss, kl = torch.cat(found, -1).cpu().numpy()
    return loss, kl


def known_mean(values: Float[np.ndarray, "*some predicted"]) -> Float[np.ndarray, "*some"]:
    """Means of what is known; NaN where nothing is."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0).sum(-1) / known.sum(-1)


def check_losses(model: View, loss: Float[np.ndarray, "..."]) -> None:
    """Refuse losses that are not finite; NaN stands for tokens that the head excludes."""
    if np.isinf(loss).any():
        raise not_finite(model, "a next-token loss")


def check_recall(model: View, contexts: int) -> None:
    """Refuse what recall of so many lists could not be measured on."""
    if contexts % 2:
        raise InputError(f"{contexts} lists are an odd number; they come in couples")
    Maker(model, Rung(RECALLED), read_template("sentences"))
