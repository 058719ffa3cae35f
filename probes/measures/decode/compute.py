"""Is what the residual stream knows of position used? Position read off it, and the same taken out of it.

Definitions stand on the measure's page (`docs/probes/decode.md`). Readers are those of `ridge`, erasures those of
`probes.models.erase`. Layer l is the stream that block l reads, so that layer 0 are the embeddings; the last one is what the
final norm reads. Readers behind an erasure (`r2_last`) are fitted anew within the half that is measured, on one part of its
documents for the other; those of the untouched model ("none") on as few. `residual` is V(X) of `probes.leakage`, mean over
blocks and heads, the mean of both halves, each on its own prompts.

Sources: [Belrose], LEACE, arXiv 2306.03819; [Chi], arXiv 2305.13571, and [Kazemnejad], arXiv 2305.19466, for position in
streams without encoding; the rest is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError, TooFew, plural
from ...models.checks import check_documents, check_logits, check_tokens
from ...models.erase import RANK, Where, check_where, erased
from ...models.load import takes_model
from ...models.view import View
from ...results.dataset import Variable, dataset, provenance, with_ends, with_low_high
from ...results.statistics import jackknife, unit_of
from ...run.memory import Retry, prompts_at_once
from ...run.progress import Progress, Tally, part
from ...run.store import Piece, Store
from ..consequences import RECALLED, check_recall, consequences, known_mean
from ..leakage.compute import LAGS, band_coordinates, check
from ..leakage.forms import resampling, splits
from ..retrieval import retrieval
from .ridge import TARGETS, Bands, Looked, bands_of, explained, looked_at, trained

WHATS = ("means", "random", "direction")
LIKE = {"random": "means", "cosines": "direction"}  # what a control is as large as
NONE = "none"  # the model as it is, among the interventions
CONTROLS = 16  # of "direction"
LEAST_DOCUMENTS = 8  # two halves, measured in two parts, each fitted in two parts
SUMS_BYTES = 1 << 30  # of products of streams that are added up together: layers beyond that take another pass
READ, CHANGED = 0.3, 0.7  # shares of the time
# Of the time of one half under an intervention.
STAGES = {"loss": (0.0, 0.2), "readers": (0.2, 0.5), "leakage": (0.5, 0.9), "recall": (0.9, 1.0)}


@takes_model
def decode(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    erase: Sequence[Where] = ("all",),
    rank: int = RANK,
    controls: int = CONTROLS,
    leakage: bool = True,
    bands: Any = None,
    lags: Any = LAGS,
    bootstrap: int = 400,
    recall: int = 16,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """How well position can be read off the stream of every layer, and what a model does without it.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], of at least 8 documents.
        erase: where position is erased: blocks, "all" for all of them together; none: nothing is erased.
        rank: dimensions that are erased at most, see `probes.erased`.
        controls: smooth directions that "direction" is held against, 2 or more; 0: none.
        leakage: whether V(X) is measured, on prompts that are enough and long enough for it.
        bands, lags, bootstrap: as in `probes.leakage`.
        recall: lists that recall is measured on under every intervention, a multiple of 4, half of them with what each half
            of the documents gave; 0: none. Left out where the tokenizer makes no lists.
        seed: of the null, the random subspaces and phases, the resampling and the lists.
        documents: what each prompt is a window of; without, or where there is one alone, every prompt is its own document.
        pieces: where parts are kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset. `r2 [layer, octave]`, `r2_shuffled`, `r2_chosen [octave]`, `r2_chosen_shuffled`, all with `..._low` and
        `..._high`; `r2_by_prompt [prompt, layer, octave]`, `r2_chosen_by_prompt` and `chosen [prompt, octave]`, the layer.
        With `erase`, along `intervention` ("none", "means all", "random all", "direction all", "means 4", ...): `loss`,
        `loss_change`, `kl`, `r2_last`, `r2_last_change`, where measured `residual [intervention, band]`, `recall_log_p` and
        `recall_exact`, all with a `..._change` and intervals; `loss_by_prompt`, `kl_by_prompt`, `r2_last_by_prompt`; `rank
        [intervention, layer]`, dimensions erased, `removed`, share of the stream's variance that goes, and `scale`, means
        of both halves; `control_loss_change_by_prompt [place, control, prompt]`, `control_scale [place, control]`. The
        attribute `not_measured` says what was not and why.

    Raises:
        InputError: too few documents or positions, no such block, an option that cannot be used, values that are not finite.

    Source: see the module's text.
    """
    check_tokens(model, tokens)
    count, length = tokens.shape
    names = _interventions(model, erase)
    if erase:
        check_logits(model)
    unit = units_of(documents, count)
    if length < 4:
        raise InputError(f"prompts of {length} positions leave too few behind position 0; give at least 4")
    if recall < 0 or recall % 4:
        raise InputError(
            f"recall={recall} is no multiple of 4 (couples of lists on both halves); give one, or 0 for none"
        )
    if controls < 0 or controls == 1:
        raise InputError(f"controls={controls} have no distribution; give 2 or more, or 0 for none")
    options: dict[str, Any] = {"rank": rank, "controls": controls, "bands": bands, "lags": lags, "bootstrap": bootstrap}
    options |= {"recall": recall, "seed": seed}
    said, not_measured = options | {"erase": [str(one) for one in erase], "leakage": leakage, "lags": list(lags)}, {}
    if not leakage or not erase:
        options["bands"] = None
    else:
        try:
            smaller = min((prompts_of(unit, half) for half in (0, 1)), key=len)
            options["bands"], options["lags"] = check(model, tokens[smaller], bands, lags)
        except InputError as error:
            if bands is not None:
                raise
            not_measured["V(X)"] = str(error)
    if recall and erase:
        try:
            check_recall(model, recall // 2)
        except InputError as error:
            not_measured["recall"], options["recall"] = str(error), 0
    measured, pieces = bool(erase), pieces or Store()
    halves = [[prompts_of(unit, half, quarter) for quarter in (0, 1)] for half in (0, 1)]
    whole, layers = part(progress, 0.0, READ if measured else 1.0), range(model.spec.blocks + 1)
    octaves = bands_of(length)
    variables = of_readers(_read(model, tokens, halves, layers, octaves, seed, pieces, whole), unit)
    coords: dict[str, Any] = {"layer": layers, "octave": list(octaves)}
    if measured:
        outcomes, views = dict[str, Piece](), dict[tuple[Any, ...], Any]()
        steps = len(names) + len(erase) * bool(controls)
        shares = (part(progress, *(READ + CHANGED * at / steps for at in (n, n + 1))) for n in range(steps))
        for (name, how), share in zip(names.items(), shares, strict=False):
            outcomes[name] = _outcome(model, how, tokens, unit, options, views, pieces.within(name), share)
        variables |= _of_outcomes(outcomes, unit)
        coords |= {"intervention": list(outcomes)}
        if controls:
            found = [
                _controls(model, where, tokens, unit, options, views, pieces.within(f"cosines {where}"), share)
                for where, share in zip(erase, shares, strict=True)
            ]
            variables |= _of_controls(found, outcomes[NONE]["loss"])
            coords |= {"place": [str(where) for where in erase], "control": range(controls)}
        coords |= {} if options["bands"] is None else band_coordinates(options["bands"])
    if progress is not None:
        progress(1.0, 1.0)
    why = "; ".join(f"{name}: {reason}" for name, reason in not_measured.items())
    attrs = provenance(model, tokens, measurement="decode", **said) | {"not_measured": why}
    return dataset(variables, tokens=tokens, coords=coords, attrs=attrs)


def _interventions(model: View, erase: Sequence[Where]) -> dict[str, dict[str, Any]]:
    """What is erased and where, by name; the model as it is first."""
    if len(set(erase)) < len(erase):
        raise InputError(f"erase {', '.join(map(str, erase))} repeats one; give each place once")
    for where in erase:
        check_where(model, where)
    return {NONE: {}} | {f"{what} {where}": {"what": what, "layer": where} for where, what in product(erase, WHATS)}


def units_of(documents: Sequence[str] | None, count: int) -> Int[np.ndarray, " prompt"]:
    """The number of each prompt's document. Its bits say in which half it is, in which part of that, and so on."""
    check_documents(documents, count)
    unit = unit_of(count, documents)
    if (known := len(np.unique(unit))) < LEAST_DOCUMENTS:
        few = plural(known, "prompt" if known == count else "document")
        raise TooFew(f"holding some out takes more than {few}; give prompts of at least {LEAST_DOCUMENTS}")
    return unit


def prompts_of(unit: Int[np.ndarray, " prompt"], *bits: int) -> list[int]:
    """Prompts of a half of the documents, of a part of it, of a part of that."""
    return [n for n, number in enumerate(unit) if all(number >> place & 1 == bit for place, bit in enumerate(bits))]


# ------------------------------------------------------------------------------------------------------------ readers


def _read(
    view: View,
    tokens: Tensor,
    groups: Sequence[Sequence[list[int]]],
    layers: range,
    bands: Bands,
    seed: int,
    store: Store,
    progress: Progress | None,
) -> Float[np.ndarray, "prompt layer band target"]:
    """R^2 on the prompts of two groups, each of two parts, in their order, by readers fitted on the other group."""
    at_once = max(1, SUMS_BYTES // ((2 + 2 * len(bands)) * 8 * view.spec.width**2))
    chunks = [layers[start : start + at_once] for start in range(0, len(layers), at_once)]
    group_of = {n: number for number, group in enumerate(groups) for some in group for n in some}
    prompts = sorted(group_of)
    report = Tally(progress, len(prompts) * (2 * len(chunks) + 1))
    retry = Retry(f"a prompt of {tokens.shape[1]} positions of '{view.identity.name}'", report)

    def looked(some: range) -> Looked:
        return partial(looked_at, view, tokens, some, seed, report)

    def fit(n: int) -> Piece:
        one, other = groups[n % 2]
        some = chunks[n // 2]
        return retry(lambda: trained(view, looked(some), (one, other), len(some), bands))

    pieces = store.each("fit", 2 * len(chunks), fit)
    readers = [
        {name: np.concatenate([piece[name] for piece in pieces[group::2]]) for name in pieces[0]} for group in (0, 1)
    ]

    def tried(numbers: Sequence[int]) -> list[Piece]:
        some = [prompts[at] for at in numbers]
        by = [1 - group_of[n] for n in some]
        r2 = retry(lambda: explained(view, looked(layers), some, readers, by, len(layers), bands))
        return [{"r2": each} for each in r2]

    at_once = prompts_at_once(view, tokens.shape[1])
    r2 = store.together("tried", len(prompts), tried, at_once).stacked("r2")
    report.finish()
    return r2


def chosen(r2: Float[np.ndarray, "prompt layer band"], unit: np.ndarray) -> Int[np.ndarray, "prompt band"]:
    """The layer that each prompt is judged at: the best one on the documents of the other part of its half."""
    found = np.zeros((len(r2), r2.shape[-1]), dtype=int)
    for half, part_of in product((0, 1), (0, 1)):
        found[prompts_of(unit, half, part_of)] = r2[prompts_of(unit, half, 1 - part_of)].mean(0).argmax(0)
    return found


def of_readers(r2: Float[np.ndarray, "prompt layer band target"], unit: np.ndarray) -> dict[str, tuple[Any, ...]]:
    said = "R^2 of log(1 + i) by ridge regression on the stream, documents held out"
    whole, within = (r2[..., TARGETS.index(name)] for name in TARGETS[1:])
    null = np.concatenate([whole[..., :1], within[..., 1:]], -1)  # all positions come first
    variables: dict[str, tuple[Any, ...]] = {}
    for end, values, more in (("", r2[..., 0], ""), ("_shuffled", null, ", positions shuffled within prompts")):
        layer = chosen(values, unit)
        best = np.take_along_axis(values, layer[:, None], 1)[:, 0]
        variables |= _over(f"r2{end}", Variable(("layer", "octave"), said + more), values, unit)
        at = Variable(("octave",), f"{said}, at the layer that other documents chose{more}")
        variables |= _over(f"r2_chosen{end}", at, best, unit)
        if not end:
            variables["r2_by_prompt"] = Variable(("prompt", "layer", "octave"), said).of(values)
            variables["r2_chosen_by_prompt"] = at._replace(dims=("prompt", "octave")).of(best)
            variables["chosen"] = Variable(("prompt", "octave"), "layer that other documents chose", "layer").of(layer)
    return variables


def _over(
    name: str, variable: Variable, values: Float[np.ndarray, "sample ..."], unit: Int[np.ndarray, " sample"]
) -> dict[str, tuple[Any, ...]]:
    """The mean over samples with the jackknife's ends."""
    return with_low_high(name, variable, jackknife(lambda some: some.mean(0), values, unit))


# ------------------------------------------------------------------------------------------------------- interventions


def _outcome(
    model: View,
    how: Mapping[str, Any],
    tokens: Tensor,
    unit: Int[np.ndarray, " prompt"],
    options: Mapping[str, Any],
    views: dict[tuple[Any, ...], Any],
    pieces: Store,
    progress: Progress | None,
) -> Piece:
    """Everything in `SAID` and `SIZES`, and `residual` [resample, band], under one intervention, where it was measured.

    `how` is what is erased; nothing: the model as it is. `views` has the changed models, by what, place and half.
    """
    last = model.spec.blocks
    found = {name: np.zeros(len(tokens)) for name in ("loss", "kl", "r2_last")}
    sizes = {name: np.full((2, last + 1), np.nan) for name in SIZES}
    by_half: dict[str, list[np.ndarray]] = {"recall_log_p": [], "recall_exact": [], "residual": []}
    for half in (0, 1):
        own, kept = prompts_of(unit, half), pieces.within(f"half {half}")
        view: Any = model
        if how:
            other = tokens[prompts_of(unit, 1 - half)]
            given = {"rank": options["rank"], "seed": options["seed"] + half}
            like = views.get((LIKE.get(how["what"]), how["layer"], half))
            views[how["what"], how["layer"], half] = view = erased(model, **how, **given, reference=other, like=like)
        heard = {name: part(part(progress, half / 2, (half + 1) / 2), *stage) for name, stage in STAGES.items()}
        loss, kl = consequences(view, tokens[own], model if how else None, heard["loss"], pieces=kept)
        found["loss"][own] = known_mean(loss[:, 1:])  # over positions whose next token the head knows
        found["kl"][own] = 0.0 if kl is None else kl[:, 1:].mean(1)
        quarters = [[prompts_of(unit, half, quarter, eighth) for eighth in (0, 1)] for quarter in (0, 1)]
        every = dict([next(iter(bands_of(tokens.shape[1]).items()))])
        r2 = _read(view, tokens, quarters, range(last, last + 1), every, options["seed"], kept, heard["readers"])
        found["r2_last"][own] = r2[:, 0, 0, TARGETS.index("position")]
        if options["bands"] is not None:
            drawn = resampling(len(own), options["bootstrap"], options["seed"] + half, list(map(str, unit[own])))
            forms = splits(view, tokens[own], options["bands"], options["lags"], drawn, heard["leakage"], pieces=kept)
            by_half["residual"].append(forms["steady_stream"][:, 0].mean((1, 2)))  # of [resample, 1, layer, head, band]
        if options["recall"]:
            lists = {"pairs": RECALLED, "contexts": options["recall"] // 2, "seed": options["seed"] + half}
            ds = retrieval(view, **lists, pieces=kept, progress=heard["recall"])
            for name in ("log_p", "exact"):
                by_half[f"recall_{name}"].append(ds[name].values.mean(1))
        for layer, eraser in (view.prepared if how else {}).items():
            for name, values in sizes.items():
                values[half, layer] = getattr(eraser, name)
    for name, values in by_half.items():
        if values:
            found[name] = np.mean(values, axis=0) if name == "residual" else np.concatenate(values)
    return found | {name: values.mean(0) for name, values in sizes.items()}


def _controls(
    model: View,
    where: Where,
    tokens: Tensor,
    unit: Int[np.ndarray, " prompt"],
    options: Mapping[str, Any],
    views: Mapping[tuple[Any, ...], Any],
    pieces: Store,
    progress: Progress | None,
) -> Piece:
    """`loss` [control, prompt] and `scale` [control] of the controls of "direction" at one place."""
    count = options["controls"]
    loss, scale = np.zeros((count, len(tokens))), np.zeros((2, count))
    for n, (half, control) in enumerate(product((0, 1), range(count))):
        own, other = prompts_of(unit, half), prompts_of(unit, 1 - half)
        like, seed = views["direction", where, half], options["seed"] + control  # one function for both halves
        view = erased(model, "cosines", layer=where, reference=tokens[other], seed=seed, like=like)
        heard = part(progress, n / (2 * count), (n + 1) / (2 * count))
        found, _ = consequences(view, tokens[own], None, heard, pieces=pieces.within(f"half {half} control {control}"))
        loss[control, own] = known_mean(found[:, 1:])
        scale[half, control] = np.median([eraser.scale for eraser in view.prepared.values()])
    return {"loss": loss, "scale": scale.mean(0)}


def _of_controls(found: Sequence[Piece], plain: Float[np.ndarray, " prompt"]) -> dict[str, tuple[Any, ...]]:
    said = "next-token loss without another smooth direction, change by the intervention"
    losses = np.stack([one["loss"] for one in found]) - plain
    scale = Variable(("place", "control"), "times that direction is taken to move the stream as far, median of blocks")
    return {
        "control_loss_change_by_prompt": Variable(("place", "control", "prompt"), said, "nat").of(losses),
        "control_loss_change": Variable(("place", "control"), said, "nat").of(losses.mean(-1)),
        "control_scale": scale.of(np.stack([one["scale"] for one in found])),
    }


SAID = {
    "loss": ("next-token loss, mean over positions from 1 on", "nat"),
    "kl": ("KL divergence of the next token from the model as it is, mean over positions from 1 on", "nat"),
    "r2_last": ("R^2 of log(1 + i) at the last layer, by readers fitted anew", "1"),
    "recall_log_p": ("log probability of a value in a list", "nat"),
    "recall_exact": ("share of exact answers of lists", "1"),
}
SIZES = {
    "rank": "dimensions that are erased before a block",
    "removed": "share of the stream's variance that is erased before a block",
    "scale": "times what was found is taken, to take as much as what it is the control of",
}


def _of_outcomes(outcomes: Mapping[str, Piece], unit: np.ndarray) -> dict[str, tuple[Any, ...]]:
    """The variables along `intervention`; changes are those from the first one, the model as it is."""
    found: dict[str, tuple[Any, ...]] = {}
    every = {name: np.stack([one[name] for one in outcomes.values()], 1) for name in outcomes[NONE]}
    for name in (name for name in SAID if name in every):
        said, measured = SAID[name]
        values, of_lists = every[name], name.startswith("recall")  # [sample, intervention]
        samples = np.arange(len(values)) // 2 if of_lists else unit
        along = Variable(("intervention",), said, measured)
        found |= _over(name, along, values, samples)
        if name != "kl":
            change = along._replace(long_name=f"{said}, change by the intervention")
            found |= _over(f"{name}_change", change, values - values[:, :1], samples)
        if not of_lists:
            found[f"{name}_by_prompt"] = Variable(("intervention", "prompt"), said, measured).of(values.T)
    for name, said in SIZES.items():
        found[name] = Variable(("intervention", "layer"), said).of(every[name].T)
    if "residual" in every:
        residual = every["residual"]  # [resample, intervention, band]
        said = "V(X), residual component of leakage without the constant sink"
        along = Variable(("intervention", "band"), said, "nat^2")
        found |= with_ends("residual", along, residual)
        change = along._replace(long_name=f"{said}, change by the intervention")
        found |= with_ends("residual_change", change, residual - residual[:, :1])
    return found
