r"""What the residual stream says of position, and whether the model uses it.

**Decoded.** At each layer, t = log(1 + i) is regressed on the stream at the positions i >= 1 (ridge; the strength is chosen
within the training documents). Documents are held out: each half of them is predicted by a fit to the other. `r2` is
1 - (squared errors) / (squared deviations from the training mean). `r2_shuffled` is the same with the positions of every
prompt permuted, which nothing can predict. Layer l is what block l reads, the last one what the final norm reads.

**Used.** What the stream says of position is erased (`probes.models.erase`), by statistics of the *other* half of the
documents, and the half is measured: `loss_change` and `kl` of the next token, means over positions from 1 on; `r2_after`,
the last layer decoded anew; `residual_..`, V(X) of leakage without its constant sink (`probes.leakage`), of its first band,
of causal models; `recall_..` of lists (`probes.retrieval`), where it was asked for. "permuted" erases what "means" would if
positions were permuted, "random" as many directions that are drawn: position means over few prompts are means of text as
well, and what "means" costs beyond "permuted" is position's.

Intervals (95 %) are over documents, those of recall over couples of lists.

Sources: ours; science of the measurement, section 12; LEACE, arXiv 2306.03819, for "direction".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..models.checks import check_tokens
from ..models.edited import Edited
from ..models.erase import WHATS, Moments, erased, place
from ..models.given import takes_model
from ..models.view import View
from ..results.dataset import dataset, provenance
from ..results.statistics import INTERVAL, jackknife, jackknifed
from ..results.variables import Variable
from ..run.reporting import Progress, part
from ..run.resume import within
from .bos_swap import RECALLED, check_recall
from .consequences import consequences
from .leakage import LAGS, band_coordinates, check
from .leakage_forms import resampling, splits
from .retrieval import retrieval

STRENGTHS = tuple(10.0**n for n in range(-7, 5))  # of the ridge, in units of the stream's mean variance
RANK, BOOTSTRAP = 8, 200
FEWEST = 8  # prompts, so that each half has enough for leakage
VARIABLES = {
    "r2": Variable(("layer",), "variance of log(1 + i) that the stream predicts, documents held out"),
    "r2_shuffled": Variable(("layer",), "the same of permuted positions"),
    "loss_change": Variable(("erasure",), "change of the next-token loss", "nat"),
    "kl": Variable(("erasure",), "KL divergence of the next token from the model as it is", "nat"),
    "r2_after": Variable(("erasure",), "R^2 of the last layer, decoded anew"),
    "residual_before": Variable(("erasure",), "V(X), constant sink out, as the model is", "nat^2"),
    "residual_after": Variable(("erasure",), "V(X), constant sink out, erased", "nat^2"),
    "residual_change": Variable(("erasure",), "change of V(X), constant sink out", "nat^2"),
    "recall_log_p_change": Variable(("erasure",), "change of the log probability of values in lists", "nat"),
    "recall_exact_change": Variable(("erasure",), "change of the share of exact answers"),
}


@takes_model
def decode(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    layer: int | None = None,
    rank: int = RANK,
    recall: int = 0,
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """How well position can be read off the stream, layer by layer, and what erasing it does.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], at least 8 prompts.
        layer: the block before which position is erased; None: before every block.
        rank: directions that all but "direction" erase.
        recall: how many lists recall is measured on, an even number; 0: none.
        bootstrap: resamples of the documents for V(X).
        seed: of permutations, random directions, resamples and lists.
        documents: what each prompt is a window of; if not given, or all of one, each prompt counts as one.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset with the variables of the module's text, `..._low` and `..._high` for each, over `layer` (0 to the number of
        blocks) and `erasure` ("means", "permuted", "random", "direction").

    Raises:
        InputError: an option that cannot be used, fewer than 8 prompts, values that are not finite.

    Source: see the module's text.
    """
    check_tokens(model, tokens)
    causal = (model.spec.prefix or 0) <= 1  # leakage is split for causal masks alone
    bands, lags = check(model, tokens, None, LAGS) if causal else ([], LAGS)
    if len(tokens) < FEWEST:
        raise InputError(f"{len(tokens)} prompts are too few; give at least {FEWEST}")
    for name, value in (("recall", recall), ("bootstrap", bootstrap), ("seed", seed)):
        if value < 0:
            raise InputError(f"{name}={value} is negative; give 0 or more")
    if recall:
        check_recall(model, recall)
    erased(model, reference=tokens, layer=layer, rank=rank)
    unit, drawn = _units(tokens, documents), (bootstrap, seed)
    halves = [np.flatnonzero(unit % 2 == side) for side in (0, 1)]  # no document is in both
    layers = list(range(model.spec.blocks + 1))
    values: dict[str, Any] = _decoded(model, tokens, halves, unit, layers, seed, part(progress, 0.0, 0.2))
    leaking = partial(_leaking, tokens=tokens, halves=halves, documents=documents, where=(bands[:1], lags), drawn=drawn)
    found = []
    with within("before"):
        before = leaking([model, model]) if causal else None
        recalled = _recalled(model, recall, seed)
    for n, what in enumerate(WHATS):
        stage = part(progress, 0.3 + 0.7 * n / len(WHATS), 0.3 + 0.7 * (n + 1) / len(WHATS))
        options = {"layer": layer, "rank": rank, "seed": seed}
        with within(what):
            views = [erased(model, what, reference=tokens[other], **options) for other in halves[::-1]]
            whole = erased(model, what, reference=tokens, **options)
            found.append(_consequences(model, views, tokens, halves, unit, stage))
            found[-1] |= {"r2_after": _decoded_after(views, tokens, halves, unit, layers[-1])}
            found[-1] |= {} if before is None else _leaked(before, leaking(views))
            found[-1] |= _changed(recalled, _recalled(whole, recall, seed))
    for name in found[0]:
        values[name] = tuple(np.array(ends) for ends in zip(*(one[name] for one in found), strict=True))
    variables = {
        f"{name}{end}": variable._replace(long_name=f"{variable.long_name}{said}").of(value)
        for name, variable in VARIABLES.items()
        if name in values
        for end, said, value in zip(("", "_low", "_high"), ("", ", low end", ", high end"), values[name], strict=True)
    }
    given = {"layer": layer, "rank": rank, "recall": recall, "bootstrap": bootstrap, "seed": seed}
    if progress is not None:
        progress(1.0, 1.0)
    first = {"leakage_band": str(band_coordinates(bands[:1])["band"][0])} if bands else {}
    return dataset(
        variables,
        tokens=tokens,
        coords={"layer": layers, "erasure": list(WHATS)},
        attrs=provenance(model, tokens, measurement="decode", **given) | first,
    )


def _units(tokens: Tensor, documents: Sequence[str] | None) -> np.ndarray:
    """The document of each prompt by number; where there are fewer than two, each prompt counts as one."""
    names = list(dict.fromkeys(documents or []))
    if documents is None or len(names) < 2:
        return np.arange(len(tokens))
    return np.array([names.index(name) for name in documents])


# ------------------------------------------------------------------------------------------------------------- decoding


def ridge(found: Moments, strength: float) -> Float[Tensor, "d targets"]:
    """Slopes of the targets on the stream, both around their means."""
    covariance = found.covariance
    covariance.diagonal().add_(strength * float(covariance.diagonal().mean()))
    return torch.linalg.solve(covariance, found.with_targets)


def errors(found: Moments, slopes: Tensor, trained: Moments) -> Float[Tensor, "two targets"]:
    """Squared errors of a fit to `trained` on other prompts, and squared deviations from the training mean; sums."""
    offset = trained.targets[0] / trained.count - trained.mean @ slopes  # [targets]
    fitted = (slopes * (found.second @ slopes)).sum(0) + 2 * offset * (found.first @ slopes) + found.count * offset**2
    crossed = (slopes * found.along).sum(0) + offset * found.targets[0]
    centre = trained.targets[0] / trained.count
    deviation = found.targets[1] - 2 * centre * found.targets[0] + found.count * centre**2
    return torch.stack([found.targets[1] - 2 * crossed + fitted, deviation])


def chosen(folds: Sequence[Moments]) -> Tensor:
    """Slopes by the strength whose fit to one fold predicts the other best, both ways together."""
    one, other = folds
    losses = [(errors(other, ridge(one, s), one) + errors(one, ridge(other, s), other))[0].sum() for s in STRENGTHS]
    return ridge(one + other, STRENGTHS[int(torch.stack(losses).argmin())])


def _decoded(
    model: View,
    tokens: Tensor,
    halves: Sequence[np.ndarray],
    unit: np.ndarray,
    layers: Sequence[int],
    seed: int,
    progress: Progress | None = None,
    view_of: Mapping[int, View] | None = None,
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """R^2 with its ends over documents, [layer], of positions and of permuted ones.

    Of another view for each half that is predicted, if `view_of` says so.
    """
    sums = np.zeros((len(tokens), len(layers), 2, 2))  # [prompt, layer, error or deviation, target]
    draw = torch.Generator().manual_seed(seed)
    length = tokens.shape[1]
    # The same permutation for every prompt would be a target like any other: each has its own.
    orders = [1 + torch.randperm(length - 1, generator=draw) for _ in range(len(tokens))]

    def targets(n: int) -> Tensor:
        own = place(length)
        return torch.cat([own, torch.cat([own[:1], own[orders[n]]])], 1)

    def streams(n: int, view: View) -> Sequence[Tensor]:
        traced = view.trace(view.embed(tokens[n : n + 1])).residual
        return [traced[layer][0] for layer in layers]

    done = 0
    for side, half in enumerate(halves):
        view = model if view_of is None else view_of[side]
        slopes, trained = _fitted(halves[1 - side], unit, lambda n, view=view: (streams(n, view), targets(n)))
        for n in half:
            for at, stream in enumerate(streams(int(n), view)):
                sums[n, at] = errors(Moments.of(stream, targets(int(n))), slopes[at], trained[at]).numpy()
            done += 1
            if progress is not None:
                progress(done, len(tokens))

    def explained(some: np.ndarray) -> np.ndarray:
        error, deviation = some.sum(0).transpose(1, 0, 2)
        return 1 - error / deviation  # [layer, target]

    value, low, high = jackknife(explained, sums, unit)
    return {name: (value[:, t], low[:, t], high[:, t]) for t, name in enumerate(("r2", "r2_shuffled"))}


def _fitted(half: np.ndarray, unit: np.ndarray, given: Any) -> tuple[list[Tensor], list[Moments]]:
    """Slopes and moments by layer, of one half's prompts; the strength by its documents in two folds."""
    documents = list(dict.fromkeys(unit[half].tolist()))
    folds: list[list[Moments] | None] = [None, None]
    for count, n in enumerate(half):
        fold = documents.index(unit[n]) % 2 if len(documents) > 1 else count % 2
        streams, targets = given(int(n))
        own = [Moments.of(stream, targets) for stream in streams]
        before = folds[fold]
        folds[fold] = own if before is None else [one + two for one, two in zip(before, own, strict=True)]
    one, other = (fold if fold is not None else folds[1 - n] for n, fold in enumerate(folds))
    assert one is not None
    assert other is not None
    return [chosen(pair) for pair in zip(one, other, strict=True)], [a + b for a, b in zip(one, other, strict=True)]


# -------------------------------------------------------------------------------------------------------------- erasing


def _consequences(
    model: View,
    views: Sequence[Edited],
    tokens: Tensor,
    halves: Sequence[np.ndarray],
    unit: np.ndarray,
    progress: Progress | None,
) -> dict[str, tuple[float, float, float]]:
    """Change of loss, and KL, means over positions from 1 on, with ends over documents."""
    change, kl = np.zeros(len(tokens)), np.zeros(len(tokens))
    for side, (half, view) in enumerate(zip(halves, views, strict=True)):
        with within(f"half {side}"):
            before, _ = consequences(model, tokens[half])
            with within("after"):
                after, divergence = consequences(
                    view, tokens[half], model, part(progress, 0.2 * side, 0.2 * side + 0.2)
                )
        assert divergence is not None
        change[half], kl[half] = np.nanmean((after - before)[:, 1:], 1), divergence[:, 1:].mean(1)
    found = {"loss_change": change, "kl": kl}
    return {name: _ends(jackknifed(lambda some: float(some.mean()), values, unit)) for name, values in found.items()}


def _decoded_after(
    views: Sequence[Edited], tokens: Tensor, halves: Sequence[np.ndarray], unit: np.ndarray, last: int
) -> tuple[float, float, float]:
    found = _decoded(views[0], tokens, halves, unit, [last], 0, view_of=dict(enumerate(views)))["r2"]
    return tuple(float(end[0]) for end in found)  # type: ignore[return-value]


def _leaking(
    views: Sequence[View],
    *,
    tokens: Tensor,
    halves: Sequence[np.ndarray],
    documents: Sequence[str] | None,
    where: tuple[Any, Any],
    drawn: tuple[int, int],
) -> Float[np.ndarray, " resample"]:
    """V(X) of each half by its view, mean over blocks, heads and both halves; the estimate, then the resamples."""
    found = []
    for side, (half, view) in enumerate(zip(halves, views, strict=True)):
        named = None if documents is None else [str(documents[n]) for n in half]
        weights = resampling(len(half), *drawn, named)
        with within(f"leakage {side}"):
            split = splits(view, tokens[half], *where, weights)["steady_stream"]  # [resample, 1, layer, head, band]
        found.append(split.mean((1, 2, 3, 4)))
    return np.mean(found, 0)


def _leaked(before: np.ndarray, after: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """V(X) before and after, and its change, with percentiles of the paired resamples; NaN without any."""
    named = {"residual_before": before, "residual_after": after, "residual_change": after - before}
    found = {}
    for name, x in named.items():
        low, high = np.percentile(x[1:], INTERVAL) if len(x) > 1 else (np.nan, np.nan)
        found[name] = float(x[0]), float(low), float(high)
    return found


def _recalled(view: View, lists: int, seed: int) -> xr.Dataset | None:
    """Recall of lists, which are other text than the erasure was fitted to; None for none."""
    if not lists:
        return None
    asked: dict[str, Any] = {"pairs": RECALLED, "keys": "apart", "digits": 4, "candidates": 1, "contexts": lists}
    return retrieval(view, **asked, seed=seed)


def _changed(before: xr.Dataset | None, after: xr.Dataset | None) -> dict[str, tuple[float, float, float]]:
    """Change of recall, with ends over couples of lists."""
    if before is None or after is None:
        return {}
    unit, found = before["context"].values // 2, {}
    for name in ("log_p", "exact"):
        change = after[name].values - before[name].values
        found[f"recall_{name}_change"] = _ends(jackknifed(lambda some: float(some.mean()), change, unit))
    return found


def _ends(found: Any) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def memory(model: View, prompts: int, length: int, **options: Any) -> int:
    """Bytes above the loaded model at the peak, about: sums of both folds, by layer."""
    return 8 * (model.spec.blocks + 1) * 4 * (model.spec.width**2 + length * model.spec.width)
