"""A sink's brake and bias, taken off one by one and together, by block.

What they are, what each set of three arms does, how the interaction is judged and what would overturn the claim stand on
the measure's page (`docs/probes/sink-factorial.md`).

Source: science of the measurement, section 18; ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .. import options
from ..charts import GREY, VERMILLION, Panel, Series, depth_color, dots, panels
from ..data.recall import Keys, Maker, Rung, read_template
from ..errors import InputError
from ..measure import Headline, Measure
from ..models.checks import check_logits, check_tokens
from ..models.load import takes_model
from ..models.view import View
from ..models.words import edited
from ..results.curves import ESTIMATE
from ..results.dataset import Variable, dataset, provenance
from ..results.statistics import Interval, holm, jackknife, jackknifed, numbered
from ..results.tables import Table, interval
from ..run.memory import Retry
from ..run.progress import Progress, Tally, part
from ..run.store import Piece, Store
from .consequences import consequences, known_mean
from .retrieval import answered, couples_at_once

ARMS = ("bias off", "brake off", "both off")
SETS = {  # words of `probes.edited`, of each arm; the first is the claim's, the others are its controls
    "position 0": ("without-value-0", "released", "without-0"),
    "constant gain": ("without-value-0", "gain", "gain+without-value-0"),
    "key 1": ("without-value-1", "released-1", "without-1"),
    "sink heads": ("without-value-0:sinks", "released:sinks", "without-0:sinks"),
    "other heads": ("without-value-0:others", "released:others", "without-0:others"),
    "mean value": ("value-mean", "released", "released+value-mean"),
    "random value": ("value-random", "released", "released+value-random"),
}
SECOND = ("without-value-{0}", "released-{0}", "without-{0}")  # of a second sink at a place
HALF = "of the half of the documents (or couples of lists) that did not choose the block"
LOSS, FIRST, REST, COPY = "loss", "log p, first pair", "log p, other pairs", "loss of a copy"
OF_LISTS = (FIRST, REST)
EXACT = ("exact, first pair", "exact, other pairs")  # shown beside them, not judged
STEPS = 5  # parts of the depth at whose beginnings blocks stand
VARIABLES = {
    "loss": Variable(("prompt",), "next-token loss", "nat"),
    "recall": Variable(("list", "pair"), "recall, log p of values", "nat"),
    "exact": Variable(("list", "pair"), "share of exact answers"),
    "copy": Variable(("copy",), "next-token loss of a copy", "nat"),
}


@takes_model
def sink_factorial(
    model: View,
    tokens: Int[Tensor, "prompt position"],
    *,
    blocks: Sequence[int] | None = None,
    sets: Sequence[str] = ("position 0",),
    lists: int = 24,
    pairs: int = 12,
    keys: Keys = "apart",
    asked: int = 12,
    copies: int = 0,
    place: int | None = None,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """What the bias of position 0, its brake and both together are worth, from a block on.

    Args:
        model: any view; it is not changed.
        tokens: ids [prompt, position]; means that an arm needs are taken over them. Of other lengths with
            `attention_mask` (`docs/prompts.md`): each text's means over itself.
        blocks: from which on arms act, several or one; from 0 on in fifths of the depth unless given.
        sets: of `SETS`; all but the first are controls.
        lists: that recall is measured on, an even number; 0: none.
        pairs, keys: of these lists, as in `probes.retrieval`; they begin as the prompts do.
        asked: pairs of each list that are asked for, evenly spaced, the first one among them.
        copies: prompts, the first ones, of which the loss on a second copy of their first half is measured, too.
        place: at which the token of position 0 stands once more in all prompts; adds the set "second sink". Without lists.
        seed: of the lists and of random values.
        documents: what each prompt is a window of.
        pieces: where finished parts are kept for an interrupted call.
        progress: called with (share of the work done, 1).

    Returns:
        Dataset: by outcome (`loss`, mean over positions from 1 on; `recall`, log p of the first pair and the mean of the
        others; `exact`, their shares of exact answers; `copy`) `..._before` [sample] and `..._change` [set, arm, block,
        sample], in nats; samples are prompts or lists.

    Raises:
        InputError: no such set or block, an odd number of lists, or values that are not finite.
    """
    chosen, sets = _blocks(model, blocks), list(dict.fromkeys(sets))
    if unknown := [name for name in sets if name not in SETS]:
        raise InputError(f"set '{unknown[0]}' is unknown; give {', '.join(SETS)}, or all")
    if lists % 2 or lists < 0:
        raise InputError(f"lists={lists}: lists come in couples; give an even number, or 0 for none")
    if not 2 <= asked <= pairs:
        raise InputError(f"asked={asked} is out of range; give 2 to {pairs}, the pairs of a list")
    most = len(tokens) if tokens.shape[1] > 3 else 0  # in a half of one token there is nothing to repeat
    if not 0 <= copies <= most:
        raise InputError(f"copies={copies} is out of range; give 0 to {most}, the prompts of 4 tokens or more")
    check_tokens(model, tokens)
    check_logits(model)
    if place is not None:
        if lists or not 1 < place < tokens.shape[1] - 1:
            wrong = "goes without lists; give lists=0" if lists else f"is out of range; give 2 to {tokens.shape[1] - 2}"
            raise InputError(f"place={place} {wrong}")
        tokens = tokens.index_copy(1, torch.tensor([place]), tokens[:, :1])
    maker = _maker(model, tokens, Rung(pairs, keys)) if lists else None
    words = {name: SETS[name] for name in sets}
    words |= {} if place is None else {"second sink": tuple(word.format(place) for word in SECOND)}
    names = dict.fromkeys(_at(word, block) for own in words.values() for word in own for block in chosen)
    pieces, of = pieces or Store(), {"lists": lists, "pairs": pairs, "keys": keys, "asked": asked}
    of |= {"copies": copies, "place": place, "seed": seed}
    shares = np.linspace(0, 1, len(names) + 2)
    heard = [part(progress, *ends) for ends in pairwise(shares)]
    before = _outcomes(model, tokens, maker, of, pieces.within("before"), heard[0])
    after = {
        name: _outcomes(edited(model, name, reference=tokens, seed=seed), tokens, maker, of, pieces.within(name), told)
        for name, told in zip(names, heard[1:], strict=True)
    }
    variables = {}
    for name, values in before.items():
        words_of = VARIABLES[name]
        dims = words_of.dims
        every = [[[after[_at(word, block)][name] for block in chosen] for word in own] for own in words.values()]
        change = words_of._replace(dims=("set", "arm", "block", *dims), long_name=f"{words_of.long_name}, change")
        variables |= {f"{name}_before": words_of.of(values), f"{name}_change": change.of(np.array(every) - values)}
    made = provenance(model, tokens, measurement="sink_factorial", blocks=list(chosen), sets=list(words), **of)
    coords = {"set": list(words), "arm": list(ARMS), "block": list(chosen), "pair": list(OF_LISTS)}
    return dataset(variables, tokens=tokens, coords=coords, attrs=made)


def _blocks(model: View, blocks: Sequence[int] | None) -> list[int]:
    count = model.spec.blocks
    found = sorted({count * n // STEPS for n in range(STEPS)} if blocks is None else set(blocks))
    for block in found:
        if not 0 <= block < count:
            raise InputError(f"block {block} does not exist; the model has blocks 0 to {count - 1}")
    return found


def _maker(model: View, tokens: Tensor, rung: Rung) -> Maker:
    """Of lists that begin as all prompts do."""
    first = tokens[:, 0].unique()
    begin: Any = int(first) if len(first) == 1 < len(tokens) else "none"
    return Maker(model, rung, read_template("sentences"), first=begin)


def _at(word: str, block: int) -> str:
    """A word, or several, from a block on."""
    return "+".join(
        f"{what}@{block}{colon}{group}" for what, colon, group in (w.partition(":") for w in word.split("+"))
    )


def _outcomes(
    model: View, tokens: Tensor, maker: Maker | None, of: Mapping[str, Any], pieces: Store, progress: Progress | None
) -> dict[str, np.ndarray]:
    """By prompt the mean loss; by list what is recalled of the first pair and of the others; by copied prompt its loss."""
    losses, _ = consequences(model, tokens, None, part(progress, 0.0, 0.5), pieces=pieces)
    if of["place"] is not None:
        losses[:, of["place"] - 1] = np.nan  # no text goes on with the token that was put there
    found = {"loss": known_mean(losses[:, 1:])}
    if maker is not None:
        by_list = _answered(model, maker, of, pieces.within("lists"), part(progress, 0.5, 1.0))
        found |= {name: np.stack([each[:, 0], each[:, 1:].mean(1)], 1) for name, each in by_list.items()}
    if of["copies"]:
        some, half = tokens[: of["copies"]], tokens.shape[1] // 2
        twice = torch.cat([some[:, :half], some[:, 1:half]], 1)
        losses, _ = consequences(model, twice, pieces=pieces.within("copies"))
        found["copy"] = known_mean(losses[:, half:])  # from the copy's second token on
    return found


def _answered(
    model: View, maker: Maker, of: Mapping[str, Any], pieces: Store, progress: Progress | None
) -> dict[str, Float[np.ndarray, "list asked"]]:
    """What is recalled of lists, by the pairs that are asked for."""
    depths = np.linspace(0, of["pairs"] - 1, of["asked"]).round().astype(int).tolist()
    report = Tally(progress, of["lists"] * len(depths))
    retry = Retry(f"a context of {maker.length()} tokens of '{model.identity.name}'", report)

    def several(numbers: Sequence[int]) -> Sequence[Piece]:
        return retry(lambda: answered(model, [maker.couple(of["seed"], n) for n in numbers], report, depths))

    at_once = couples_at_once(model, maker.couple(of["seed"], 0))
    by_couple = pieces.together("contexts", of["lists"] // 2, several, at_once)
    report.finish()
    return {
        name: np.concatenate(by_couple.stacked(of_pieces))
        for name, of_pieces in (("recall", "log_p"), ("exact", "exact"))
    }


# ------------------------------------------------------------------------------------------------------------- numbers


def outcomes(ds: xr.Dataset, *, exact: bool = False) -> dict[str, tuple[xr.DataArray, Int[np.ndarray, " sample"]]]:
    """Changes [set, arm, block, sample as prompt] by outcome, and each sample's unit; `exact`: shares of answers, too."""
    unit = numbered(ds["document"].values) if "document" in ds.coords else np.arange(ds.sizes["prompt"])
    found = {LOSS: (ds["loss_change"], unit)}
    if "recall_change" in ds:
        recall, couple = ds["recall_change"].rename(list="prompt"), np.arange(ds.sizes["list"]) // 2
        found |= {name: (recall.sel(pair=name, drop=True), couple) for name in OF_LISTS}
        if exact and "exact_change" in ds:
            shares = ds["exact_change"].rename(list="prompt")
            found |= {name: (shares.isel(pair=n, drop=True), couple) for n, name in enumerate(EXACT)}
    if "copy_change" in ds:
        found[COPY] = (ds["copy_change"].rename(copy="prompt"), unit[: ds.sizes["copy"]])
    return {name: (values.transpose("set", "arm", "block", "prompt"), of) for name, (values, of) in found.items()}


def interactions(changes: xr.DataArray) -> xr.DataArray:
    """Both off, less what each alone does; 0 where they add up."""
    bias, brake, both = (changes.sel(arm=arm, drop=True) for arm in ARMS)
    return both - bias - brake


def at_chosen(
    values: Float[np.ndarray, "block sample"],
    unit: Int[np.ndarray, " sample"],
    chosen_by: Float[np.ndarray, "block sample"] | None = None,
) -> tuple[int, Interval]:
    """(block, mean of the values there): one half of the units chooses the block, the other half is the sample.

    The block is that of the largest mean, to either side of 0, of the values or of what they are `chosen_by`. A single block
    is tested on the same half: another result of these units may have chosen it.
    """
    second = np.isin(unit, np.unique(unit)[1::2])
    ranks = (values if chosen_by is None else chosen_by)[:, ~second]
    block = int(np.abs(ranks.mean(1)).argmax()) if ranks.size else 0
    own = values[block, second]
    return block, jackknifed(np.mean, own, unit[second]) if len(own) else Interval(*[np.nan] * 3)


def judged(ds: xr.Dataset) -> dict[tuple[str, str], tuple[int, Interval, bool]]:
    """By (outcome, set): the block, the interaction there, and whether it differs from 0 after Holm over all of these."""
    each = {}
    for outcome, (changes, unit) in outcomes(ds).items():
        both = interactions(changes)
        each |= {(outcome, str(own)): at_chosen(both.sel(set=own).values, unit) for own in ds["set"].values}
    every: Any = Interval(*np.array([found for _, found in each.values()]).T)
    differs = holm(every, every.freedom)
    return {
        key: (int(ds["block"].values[block]), found, bool(sure))
        for (key, (block, found)), sure in zip(each.items(), differs, strict=True)
    }


def beyond(ds: xr.Dataset, control: str) -> Interval:
    """The interaction on the loss at position 0 less that of a control, document by document, at position 0's block."""
    changes, unit = outcomes(ds)[LOSS]
    both = interactions(changes)
    own, other = (both.sel(set=name).values for name in (next(iter(SETS)), control))
    return at_chosen(own - other, unit, own)[1]


def recalled(ds: xr.Dataset, arm: str = "brake off") -> tuple[int, Interval]:
    """(block, change of log p of other pairs than the first by an arm there), the block chosen on other couples.

    Where it changes most, to either side, which says nothing of other blocks.
    """
    changes, unit = outcomes(ds)[REST]
    block, found = at_chosen(changes.sel(arm=arm).isel(set=0).values, unit)
    return int(ds["block"].values[block]), found


def _interaction(ds: xr.Dataset) -> xr.DataArray:
    """[set and outcome, estimate], each at the block that the other half of the units chose."""
    rows = {f"{own}, {outcome}": list(one[:3]) for (outcome, own), (_, one, _) in judged(ds).items()}
    return xr.DataArray(list(rows.values()), {"number": list(rows), "estimate": list(ESTIMATE)}, ("number", "estimate"))


def _effect(ds: xr.Dataset, *, outcome: str) -> xr.DataArray:
    """[set, arm, block, estimate] of an outcome."""
    values, unit = outcomes(ds, exact=True)[outcome]
    ends = jackknife(partial(np.mean, axis=0), np.moveaxis(values.values, -1, 0), unit)
    coords = {name: values[name].values for name in ("set", "arm", "block")} | {"estimate": list(ESTIMATE)}
    return xr.DataArray(np.stack(ends, -1), coords, ("set", "arm", "block", "estimate"))


def at_block(ds: xr.Dataset, *, outcome: str) -> xr.DataArray:
    """[set, arm, estimate] of an outcome, from the block on at which the loss is tested."""
    block = judged(ds)[LOSS, str(ds["set"].values[0])][0]
    return _effect(ds, outcome=outcome).sel(block=block, drop=True)


def _recalled(ds: xr.Dataset) -> xr.DataArray:
    """[arm, estimate] of recall of other pairs than the first, each at the block that other couples chose."""
    if REST not in outcomes(ds):
        raise KeyError(REST)
    rows = [list(recalled(ds, arm)[1][:3]) for arm in ARMS]
    return xr.DataArray(rows, {"arm": list(ARMS), "estimate": list(ESTIMATE)}, ("arm", "estimate"))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Whether brake and bias add up in the loss, and what the released brake does to recall."""
    lines = []
    for model, ds in results.items():
        every = judged(ds)
        block, found, sure = every[LOSS, str(ds["set"].values[0])]
        told = interval(*found[:3], form="+.3g")
        way = f"both together cost {'less' if found.value < 0 else 'more'} than the sum of each alone"
        line = (
            f"{model}: from block {block} on the interaction on the loss is {told} nat, {way if sure else 'undecided'}"
        )
        if "recall_change" in ds:
            change = at_block(ds, outcome=REST).sel(arm="brake off").isel(set=0).values
            line += "; with the brake off there, recall of other pairs than the first changes by "
            line += f"{interval(*change, form='+.3g')} nat"
        lines.append(line + ".")
    return lines


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Interactions, and what every arm does."""
    rows, arms = [], []
    for model, ds in results.items():
        for (outcome, own), (block, found, sure) in judged(ds).items():
            rows.append([model, own, outcome, str(block), interval(*found[:3], form="+.3g"), "yes" if sure else "no"])
        for outcome in outcomes(ds, exact=True):
            effect = _effect(ds, outcome=outcome)
            for place in np.ndindex(*effect.shape[:-1]):
                own, arm, block = (str(effect[dim].values[n]) for dim, n in zip(effect.dims, place, strict=False))
                arms.append([model, own, outcome, block, arm, interval(*effect.values[place], form="+.3g")])
    of = ("model", "set", "outcome", "from block")
    return [
        Table(f"Interactions, {HALF}", (*of, "both off, less each alone (nat)", "differs from 0 after Holm"), rows),
        Table("Changes", (*of, "arm", "change (nat, or share)"), arms),
    ]


CAPTION = "95 % over documents and couples of lists."
OF_ARMS = f"Changes by an arm from a block on, dark blocks are late ones; {CAPTION}"
LOOKS = {"bias off": "s", "brake off": "^", "both off": "o"}


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Loss against recall, a mark for each arm and block, and the interaction by outcome."""

    def plane(cell: Axes, ds: xr.Dataset) -> None:
        if "recall_change" not in ds:
            return cell.set_axis_off()
        effects = [_effect(ds, outcome=name).isel(set=0) for name in (LOSS, REST)]
        for n, block in enumerate(ds["block"].values):
            color = depth_color(n, ds.sizes["block"])
            for arm, marker in LOOKS.items():
                x, y = (one.sel(arm=arm, block=block).values for one in effects)
                cell.annotate("", (x[0], y[0]), (0, 0), arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.35})
                bars: Any = {"xerr": [[x[0] - x[1]], [x[2] - x[0]]], "yerr": [[y[0] - y[1]], [y[2] - y[0]]]}
                label = arm if n == len(ds["block"]) - 1 else None
                cell.errorbar(x[0], y[0], **bars, fmt=marker, color=color, markersize=4.5, elinewidth=0.9, label=label)
        for line in (cell.axhline, cell.axvline):
            line(0, color=GREY, linewidth=0.8, zorder=1)
        cell.legend(frameon=False, fontsize=7.5, handletextpad=0.2)
        cell.set_xlabel("change of loss (nat)")

    def interaction(cell: Axes, ds: xr.Dataset) -> None:
        main, every = str(ds["set"].values[0]), judged(ds)
        shown = {outcome: found for (outcome, own), (_, found, _) in every.items() if own == main}
        shown |= {f"loss, {own}": every[LOSS, own][1] for own in map(str, ds["set"].values[1:])}
        value, low, high = (np.array([found[n] for found in shown.values()]) for n in range(3))
        dots(cell, list(shown), [Series("", value, VERMILLION, low, high)])
        cell.set_xlabel("both off, less each alone (nat)")

    rows, lists = [Panel("", interaction)], any("recall_change" in ds for ds in results.values())
    rows = [Panel("change of recall, other pairs (nat)", plane, height=3.2)] * lists + rows
    return panels(results, rows, OF_ARMS if lists else CAPTION)


@dataclass(frozen=True)
class Options(options.Options):
    """Take a sink's brake and bias off, one by one and together, from several blocks on.

    Writes sink-factorial.nc, sink-factorial.md and the chart: what each arm does to the next-token loss and to recall from
    lists, and whether the two add up. If interrupted, the same command resumes.

    Examples:
      headwater sink-factorial tiny-llama --prompts 8 --length 64 --lists 0
      headwater sink-factorial smollm2-135m --lists 48 --pairs 36
      headwater sink-factorial smollm2-135m --blocks 8 --sets all
    """

    blocks: str | None = options.option("From which blocks on, as in 0,6,12; in fifths of the depth if not given.")
    sets: str = options.option(f"position 0, or controls beside it: {', '.join(list(SETS)[1:])}; or all.", "position 0")
    lists: int = options.option("Lists that recall is measured on, an even number; 0: none.", 24)
    pairs: int = options.option("Pairs of a list.", 12)
    keys: Literal["apart", "alike"] = options.option("Different nouns, or colours and nouns that recur.", "apart")
    asked: int = options.option("Pairs of each list that are asked for, evenly spaced.", 12)
    copies: int = options.option("Prompts of which the loss on a second copy is measured, too.", 0)
    place: int | None = options.option("Where position 0's token stands once more, as a second sink; without lists.")

    def values(self) -> dict[str, Any]:
        """As `sink_factorial` takes them."""
        ranges = options.read_ranges(self.blocks, "blocks", "0,6,12") if self.blocks is not None else ()
        blocks = [n for low, high in ranges for n in range(low, high + 1)] or None
        chosen = tuple(SETS if self.sets == "all" else (name.strip() for name in self.sets.split(",")))
        return vars(self) | {"blocks": blocks, "sets": chosen}


MEASURE = Measure(
    name="sink-factorial",
    question="What do a sink's brake and its bias do, apart and together?",
    compute=sink_factorial,
    options=Options,
    headlines=(
        Headline("interaction (nat)", _interaction, form="+.3g"),
        *(
            Headline(
                f"change of {name}{'' if name in EXACT else ' (nat)'}", partial(at_block, outcome=name), form="+.3g"
            )
            for name in (LOSS, *OF_LISTS, *EXACT, COPY)
        ),
        Headline(f"change of {REST}, block chosen on other couples (nat)", _recalled, form="+.3g"),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    defaults={"prompts": 32},
    trials={"sink_factorial": lambda m, tokens: sink_factorial(m, tokens[:4], blocks=[1], lists=0)},
)
