"""How far absolute position reaches: log(1 + i) read off the stream, octave by octave, with its sources taken away in turn.

What is read, what d', the horizon and each arm are, and what would overturn the claim stand on the measure's page
(`docs/probes/horizon.md`). Readers are those of `decode`, erasures those of `probes.models.erase`. A prompt goes through the
model once for each arm; its streams of some layers wait in files while readers are fitted.

Source: science of the measurement, section 20; ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import InputError
from ...models.checks import check_tokens
from ...models.edited import passing
from ...models.erase import erased, log_position
from ...models.initialization import CONFIG, Rule
from ...models.load import takes_model
from ...models.view import View
from ...models.words import edited
from ...results.dataset import Variable, dataset, provenance, with_low_high
from ...results.statistics import jackknife
from ...run.memory import Retry, aside, batches
from ...run.precision import double
from ...run.progress import Progress, Tally, part
from ...run.store import Piece, Store
from ..attention import columns, run_watched
from ..consequences import compared, known_mean
from ..decode.compute import of_readers, prompts_of, units_of
from ..decode.ridge import Look, bands_of, explained, targets, trained
from ..leakage import leakage as leakage_of

AS_IT_IS, SECOND = "as it is", "second sink"
WORDS = {  # of `probes.edited`
    "sink held": "constant-sink",
    "log Z held": "held-log-z",
    "hidden": "without-0@{fifth}",
    "unmasked": "unmasked",
}
ARMS = (AS_IT_IS, "sink held", "log Z held", "hidden", SECOND, "unmasked", "fresh")
READ = 0.05  # the horizon is the last octave whose R^2 is surely above it
REFERENCE = 16  # prompts that an arm's means are taken over
WATCHED = 4  # prompts in which heads are counted that attend to the second sink
SINK = 0.3  # mean weight above which a key is a head's sink
AT_ONCE = 8  # prompts whose streams are in float64 together
LAGS, FIRST_BAND = (1, 2, 3, 4), 8  # of leakage, and the first octave of which lags leave the whole
ROWS = 2  # rows (prompts times positions) by width that an erasure is estimated on, at least


@takes_model
def horizon(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    arms: Sequence[str] = (AS_IT_IS,),
    every: int = 5,
    place: int | None = None,
    leakage: int = 0,
    erase: int = 0,
    controls: int = 4,
    initialization: Rule = CONFIG,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """How well log(1 + i) is read within each octave of positions, under some arms, and what of it is used.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position], of at least 8 documents.
        arms: of `ARMS`.
        every: blocks from one whose stream is read to the next; what the final norm reads is read, too.
        place: of the second sink; half of the length unless given.
        leakage: prompts, the first ones, on which leakage by octave is measured; 0: none.
        erase: prompts, the first ones, on which each octave's own direction is erased before all blocks; 0: none.
        controls: smooth directions that it is held against, 2 or more.
        initialization: what the fresh weights are drawn from.
        seed: of the null, of controls, resampling and fresh weights.
        documents: what each prompt is a window of.
        pieces: where finished arms are kept for an interrupted call.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset, by arm: `r2 [layer, octave]`, `r2_shuffled`, `r2_chosen [octave]`, `r2_chosen_shuffled`, `d_prime [octave]`,
        all with `..._low` and `..._high`; `r2_chosen_by_prompt [prompt, octave]`, `chosen`, the layer, and `reading
        [position]`. With a second sink `behind_...`, the same of log(1 + i - place) in octaves of `distance` behind it, with
        and without it, and `attending [key]`. `leakage [octave]`, `leakage_null`. `loss_change [erased_octave,
        erased_prompt]`, and of controls `control_loss_change [erased_octave, control, erased_prompt]`.

    Raises:
        InputError: no such arm or place, too few documents or positions, or values that are not finite.
    """
    check_tokens(model, tokens)
    unit, (count, length), blocks = units_of(documents, len(tokens)), tokens.shape, model.spec.blocks
    arms, place = list(dict.fromkeys(arms)), length // 2 if place is None else place
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise InputError(f"arm '{unknown[0]}' is unknown; give {', '.join(ARMS)}")
    if length < 8 or not 3 < place < length - 3:
        raise InputError(
            f"place={place} does not fit {length} positions; give 8 or more, and a place from 4 on, before their end"
        )
    if not (0 <= leakage <= count and 0 <= erase <= count) or controls < 2 or every < 1:
        raise InputError(
            f"leakage={leakage}, erase={erase}, controls={controls}, every={every}: give 0 to {count} prompts, 2 controls "
            "or more, and a step of 1 or more"
        )
    layers, pieces = sorted({*range(0, blocks, every), blocks}), pieces or Store()
    work = [*arms, *["leakage"] * bool(leakage), *["erase"] * bool(erase)]
    heard = {name: part(progress, n / len(work), (n + 1) / len(work)) for n, name in enumerate(work)}

    def of_arm(n: int) -> Piece:
        view, given = _changed(model, arms[n], tokens, place, initialization, seed)
        report = Tally(heard[arms[n]], 2 * count)
        retry = Retry(f"a prompt of {length} positions of '{model.identity.name}'", report)
        return retry(lambda: _arm(view, given, layers, unit, place * (SECOND in arms), arms[n], seed, report))

    found = [_of_arm(piece, unit, layers, place) for piece in pieces.each("arm", len(arms), of_arm)]
    ds = xr.concat(found, xr.Variable("arm", arms), data_vars="all", coords="minimal", join="outer")
    if leakage:
        named = None if documents is None else documents[:leakage]
        kept: dict[str, Any] = {"documents": named, "pieces": pieces.within("leakage"), "progress": heard["leakage"]}
        ds = ds.assign(_leakage(model, tokens[:leakage], seed, **kept))
    if erase:
        report = Tally(heard["erase"])
        ds = ds.merge(_erasing(model, tokens[:erase], unit[:erase], controls, seed, pieces, report))
    if progress is not None:
        progress(1.0, 1.0)
    said = {"arms": arms, "every": every, "place": place, "leakage": leakage, "erase": erase, "controls": controls}
    made = provenance(model, tokens, measurement="horizon", **said, seed=seed)
    variables, coords = (
        {str(n): (v.dims, v.values, v.attrs) for n, v in of.items()} for of in (ds.data_vars, ds.coords)
    )
    return dataset(variables, tokens=tokens, coords=coords, attrs=made)


def _ends(band: slice) -> tuple[int, int]:
    """First and last position of a band."""
    return band.start + 1, band.stop


def _changed(
    model: View, arm: str, tokens: Tensor, place: int, initialization: Rule, seed: int
) -> tuple[View, Int[Tensor, "prompt position"]]:
    """The view that an arm runs, and on what."""
    if arm == SECOND:
        tokens = tokens.clone()
        tokens[:, place] = tokens[:, 0]
    if arm == "fresh":
        return model.reinitialized(seed, initialization=initialization), tokens
    if arm in WORDS:
        return edited(model, WORDS[arm].format(fifth=model.spec.blocks // 5), reference=tokens[:REFERENCE]), tokens
    return model, tokens


# ------------------------------------------------------------------------------------------------------------- reading

Streams = list[list[Tensor]]  # [layer][prompt], each [position, d]


def _arm(
    view: View, tokens: Tensor, layers: list[int], unit: np.ndarray, place: int, arm: str, seed: int, report: Tally
) -> Piece:
    """What is read under one arm: of the whole text and, with a place, behind it."""
    kept: Streams = [[] for _ in layers]

    def keep(layer: int, streams: Tensor) -> None:
        if layer in layers:
            kept[layers.index(layer)] += [aside(stream) for stream in streams]

    for some in batches(range(len(tokens)), view, tokens.shape[1]):
        passing(view, tokens[some], keep)
        report(len(some))
    r2, reading = readings(view, kept, unit, 0, seed, report, skipped=place if arm == SECOND else None)
    found = {"r2": r2, "reading": reading}
    if place and arm in (AS_IT_IS, SECOND):
        found["behind"], _ = readings(view, kept, unit, place, seed, report)
        found["attending"] = _attending(view, tokens[:WATCHED], place)
    return found


def readings(
    model: View,
    streams: Streams,
    unit: Int[np.ndarray, " prompt"],
    first: int,
    seed: int,
    report: Callable[..., Any],
    skipped: int | None = None,
) -> tuple[Float[np.ndarray, "prompt layer band target"], Float[np.ndarray, "layer prompt position"]]:
    """R^2 of log(1 + i - first) behind `first`, held out, and what the readers of all positions read there.

    The octave that begins at `skipped` goes without it.
    """
    halves = [[prompts_of(unit, half, other) for other in (0, 1)] for half in (0, 1)]
    length, half_of = len(streams[0][0]) - first, (unit & 1).tolist()
    bands, z = bands_of(length), log_position(length).numpy()
    bands = {name: slice(band.start + (band.start + 1 == skipped), band.stop) for name, band in bands.items()}
    r2, read = list[np.ndarray](), list[np.ndarray]()
    for own in streams:

        def behind(some: Sequence[int], own: list[Tensor] = own) -> Float[Tensor, "some behind d"]:
            return double(torch.stack([own[n][first + 1 :] for n in some]))

        def looked(prompts: Sequence[int], look: Look, behind: Callable[..., Tensor] = behind) -> None:
            for start in range(0, len(prompts), AT_ONCE):
                x = behind(some := prompts[start : start + AT_ONCE])
                look(0, x, targets(length, some, seed, x.device), start)

        readers = [trained(model, looked, (one, other), 1, bands) for one, other in halves]
        others = [1 - half for half in half_of]
        r2.append(explained(model, looked, range(len(unit)), readers, others, 1, bands)[:, 0])
        each = []
        for n, half in enumerate(others):
            w, constant = readers[half]["weights"][0, 0, 0], readers[half]["constant"][0, 0, 0]
            each.append(np.clip(behind([n])[0].cpu().numpy() @ w + constant, z[0], z[-1]))
        read.append(np.stack(each))
        report(len(unit) / len(streams))
    return np.stack(r2, 1), np.stack(read)


def _attending(view: View, tokens: Tensor, place: int) -> Float[np.ndarray, " key"]:
    """The share of all heads whose mean weight on key 0, and on that at the place, is above `SINK`, of later queries."""
    weights: dict[int, list[Tensor]] = {}

    def watch(layer: int, attention: Any) -> None:
        of_keys = double(columns(attention, [0, place])[:, :, place + 1 :]).mean((0, 2))  # [head, key]
        weights.setdefault(layer, []).append(of_keys)

    for prompt in tokens:
        run_watched(view, view.embed(prompt[None]), watch)
    means = torch.cat([torch.stack(of_prompts).mean(0).cpu() for of_prompts in weights.values()])
    return (means > SINK).double().mean(0).numpy()


def d_prime(
    reading: Float[np.ndarray, "prompt position_from_1"], octaves: Sequence[slice]
) -> Float[np.ndarray, " octave"]:
    """How far apart the readings of i and 2i lie, in their standard deviations over prompts.

    The mean over an octave's i of (mean reading of 2i - that of i), over the root of both variances' mean; NaN where 2i
    is beyond the text.
    """
    mean, variance = reading.mean(0), reading.var(0, ddof=1)
    found = []
    for octave in octaves:
        i = np.arange(octave.start + 1, octave.stop + 1)
        i = i[2 * i <= reading.shape[1]]
        spread = np.sqrt((variance[i - 1] + variance[2 * i - 1]).mean() / 2) if len(i) else np.nan
        found.append((mean[2 * i - 1] - mean[i - 1]).mean() / spread if len(i) and spread > 0 else np.nan)
    return np.array(found)


def _told_apart(
    reading: Float[np.ndarray, "layer prompt position_from_1"], unit: Int[np.ndarray, " prompt"], octaves: list[slice]
) -> Float[np.ndarray, "estimate octave"]:
    """d' with its ends, each prompt's reading at the layer with the largest d' on its half's other documents."""
    chosen = np.zeros((len(unit), len(octaves)), dtype=int)
    for half, other in product((0, 1), (0, 1)):
        by_layer = np.stack([d_prime(one[prompts_of(unit, half, 1 - other)], octaves) for one in reading])
        chosen[prompts_of(unit, half, other)] = np.nan_to_num(by_layer, nan=-np.inf).argmax(0)
    best = np.stack([reading[chosen[:, n], np.arange(len(unit))] for n in range(len(octaves))], -1)

    def estimate(some: Float[np.ndarray, "some position_from_1 octave"]) -> np.ndarray:
        return np.array([d_prime(some[..., n], [octave])[0] for n, octave in enumerate(octaves)])

    return np.stack(jackknife(estimate, best, unit))


def _of_arm(piece: Piece, unit: np.ndarray, layers: list[int], place: int) -> xr.Dataset:
    """An arm's variables."""
    reading, length = piece["reading"], piece["reading"].shape[-1] + 1
    octaves = bands_of(length)
    told_apart = _told_apart(reading, unit, [*octaves.values()])
    told_apart[:, 0] = np.nan  # all positions are no octave
    said = "d' of the readings of positions i and 2i, i in the octave"
    of = of_readers(piece["r2"], unit)
    dims, chosen, attrs = of["chosen"]
    of["chosen"] = dims, np.array(layers)[chosen], attrs
    best = np.bincount(chosen[:, 0]).argmax()
    mean = np.concatenate([[np.nan], reading[best].mean(0)])
    of |= with_low_high("d_prime", Variable(("octave",), said), told_apart)
    of["reading"] = Variable(("position",), "log(1 + i) as it is read, mean over prompts, at the usual layer").of(mean)
    coords: dict[str, Any] = {"layer": layers, "octave": list(octaves)}
    if "behind" in piece:
        for name, (dims, *rest) in of_readers(piece["behind"], unit).items():
            of[f"behind_{name}"] = (tuple("distance" if dim == "octave" else dim for dim in dims), *rest)
        said = "share of heads whose mean weight on the key is above 0.3, queries behind the place"
        of["attending"] = Variable(("key",), said).of(piece["attending"])
        coords |= {"distance": list(bands_of(length - place)), "key": [0, place]}
    return dataset(
        {name: of[name] for name in of if name not in ("r2_by_prompt", "behind_r2_by_prompt")}, coords=coords
    )


# ----------------------------------------------------------------------------------------------------- leakage, erasing


def _leakage(model: View, tokens: Tensor, seed: int, **kept: Any) -> dict[str, xr.DataArray]:
    """Of the median head by octave, with its ends, and of uniform attention; of octaves that lags leave whole."""
    octaves = bands_of(tokens.shape[1])
    bands = [ends for ends in map(_ends, octaves.values()) if ends[0] >= FIRST_BAND]
    of = leakage_of(model, tokens, bands=bands, lags=LAGS, bootstrap=200, fresh=0, seed=seed, **kept)
    at = of.sel(quantile="median", drop=True).rename(band="octave").drop_vars(["band_first", "band_last"])
    at = at.reindex(octave=list(octaves))
    found = {f"leakage{end}": at[f"log_form_of_heads{end}"] for end in ("", "_low", "_high")}
    return found | {"leakage_null": at["null_uniform"]}


def _erasing(
    model: View, tokens: Tensor, unit: np.ndarray, controls: int, seed: int, pieces: Store, report: Tally
) -> xr.Dataset:
    """Of every octave with prompts enough: what its own direction costs there, and what controls do."""
    least, octaves = ROWS * model.spec.width, [*bands_of(tokens.shape[1]).items()][1:]
    made = {name: _ends(band) for name, band in octaves if len(tokens) // 2 * (band.stop - band.start) >= least}
    if not made:
        raise InputError(f"erase={len(tokens)} is too few for any octave; give more, or longer ones")
    report.expect(len(made) * (1 + controls) * len(tokens))
    ends = list(made.values())
    lost = pieces.each("erase", len(made), lambda n: _erased(model, tokens, unit, ends[n], controls, seed, report))
    losses, said = lost.stacked("loss"), "next-token loss within the octave, change by erasing"
    own = Variable(("erased_octave", "erased_prompt"), f"{said} its direction of log(1 + i)", "nat")
    other = Variable(("erased_octave", "control", "erased_prompt"), f"{said} another smooth direction", "nat")
    variables = {"loss_change": own.of(losses[:, 0]), "control_loss_change": other.of(losses[:, 1:])}
    return dataset(variables, coords={"erased_octave": list(made)})


def _erased(
    model: View, tokens: Tensor, unit: np.ndarray, octave: tuple[int, int], controls: int, seed: int, report: Tally
) -> Piece:
    """Changes of the loss within an octave, [1 + control, prompt]: its own direction erased there, then each control's."""
    (first, last), found = octave, np.zeros((1 + controls, len(tokens)))
    tokens = tokens[:, : last + 1]  # what follows changes nothing here
    for half in (0, 1):
        own, other = prompts_of(unit, half), prompts_of(unit, 1 - half)
        plain, given = _losses(model, model, tokens[own], first), {"reference": tokens[other], "positions": octave}
        like = erased(model, "direction", **given)
        for n in range(1 + controls):
            view = like if n == 0 else erased(model, "cosines", **given, like=like, seed=seed + n - 1)
            found[n, own] = _losses(view, model, tokens[own], first) - plain
            report(len(own))
    return {"loss": found}


@torch.no_grad()
def _losses(view: View, model: View, tokens: Tensor, first: int) -> Float[np.ndarray, " prompt"]:
    """Mean losses of the tokens behind the position `first`, read out by the model's head."""
    found = []
    for some in batches(range(len(tokens)), view, tokens.shape[1]):
        ids = tokens[some]
        normed = view.norm(view.residual(view.embed(ids))[:, first:-1])
        loss = compared(model, normed.flatten(0, 1)[None], ids[:, first + 1 :].flatten())[0][0]
        found.append(known_mean(loss.reshape(len(some), -1)))
    return np.concatenate(found)
