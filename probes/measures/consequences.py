"""What a change of a model does to its behaviour: next-token loss, divergence from the model as it is, recall."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ..data.recall import Maker, Rung, read_template
from ..errors import InputError
from ..models.checks import not_finite
from ..models.view import View
from ..results.statistics import jackknife
from ..results.variables import Variable
from ..run.reporting import Progress, Report
from ..run.resume import Piece, each

RECALLED = 12  # pairs of the lists that recall is measured on
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


def check_recall(model: View, contexts: int) -> None:
    """Refuse what recall of so many lists could not be measured on.

    Raises:
        InputError: an odd number, or a model whose tokenizer makes no lists.
    """
    if contexts % 2:
        raise InputError(f"recall={contexts} is odd; lists come in couples")
    Maker(model, Rung(RECALLED), read_template("sentences"))


def recalled(before: xr.Dataset | None, after: xr.Dataset | None) -> dict[str, tuple[Any, ...]]:
    """Recall before and after, and its change, with intervals over couples of lists: over all depths, and by depth.

    Nothing where it was not measured.
    """
    if before is None or after is None:
        return {}
    found: dict[str, tuple[Any, ...]] = {}
    couples = before["context"].values // 2
    for name, what, unit in (
        ("log_p", "log probability of the value", "nat"),
        ("exact", "share of exact answers", "1"),
    ):
        one, other = before[name].values, after[name].values
        for when, values in (("before", one), ("after", other), ("change", other - one)):
            said = f"recall, {what}, {when}{' by' if when == 'change' else ''} the swap"
            for of, dims, over in (("recall", (), None), ("recall_by_depth", ("depth",), 0)):
                interval = jackknife(lambda some, over=over: some.mean(over), values, couples)
                for end, value in zip(("", "_low", "_high"), interval, strict=True):
                    found[f"{of}_{name}_{when}{end}"] = Variable(dims, said, unit).of(value)
    return found
