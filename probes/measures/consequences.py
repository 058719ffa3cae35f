"""What a change of a model does to its predictions: next-token loss, and divergence from the model as it is."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..models.checks import not_finite
from ..models.view import View
from ..run.reporting import Progress, Report
from ..run.resume import Piece, each

LOGITS_AT_ONCE = 1 << 24  # next-token logits: 64 MiB in float32


def consequences(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    original: View | None = None,
    progress: Progress | None = None,
) -> tuple[Float[np.ndarray, "prompt predicted"], Float[np.ndarray, "prompt predicted"] | None]:
    """(`-log p` of every next token, `KL(p_i || p'_i)` of it from p of the `original`, if one is given), in nats.

    Prompt by prompt, next-token logits for some positions at a time. The loss is NaN where the head excludes the token
    (logit minus infinity): toys may tell only some of the ids apart.

    Raises:
        InputError: values that are not finite.
    """
    rows = max(1, LOGITS_AT_ONCE // model.spec.vocabulary)
    report = Report(progress, len(tokens))

    @torch.no_grad()
    def measured(n: int) -> Piece:
        views = [model] if original is None else [model, original]
        found = {name: np.zeros(tokens.shape[1] - 1) for name in ("loss", "kl")}
        never = np.zeros(tokens.shape[1] - 1, dtype=bool)
        normed = [view.norm(view.residual(view.embed(tokens[n : n + 1])))[0, :-1] for view in views]
        targets = tokens[n, 1:].to(normed[0].device)
        for start in range(0, len(targets), rows):
            at = slice(start, start + rows)
            logits = [view.unembed(own[at]) for view, own in zip(views, normed, strict=True)]
            log_p = [x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1) for x in logits]
            loss = functional.nll_loss(log_p[0], targets[at], reduction="none").double()
            excluded = torch.isneginf(log_p[0].gather(-1, targets[at][:, None])[:, 0])
            excluded &= torch.isneginf(log_p[0]).all(0)[targets[at]]  # whatever it reads; a single one is a fault
            found["loss"][at] = loss.masked_fill(excluded, torch.nan).cpu().numpy()
            never[at] = excluded.cpu().numpy()
            if original is not None:
                terms = log_p[1].exp() * (log_p[1] - log_p[0])
                found["kl"][at] = terms.where(torch.isfinite(log_p[1]), 0).sum(-1, dtype=torch.float64).cpu().numpy()
        report()
        return found | {"never": never}

    pieces = each("loss", len(tokens), measured)
    report.finish()
    loss, never = pieces.stacked("loss"), pieces.stacked("never")
    if not (np.isfinite(loss) | never).all():
        raise not_finite(model, "a next-token loss")
    return loss, None if original is None else pieces.stacked("kl")
