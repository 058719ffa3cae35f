"""Attention sinks, and what every head does with position 0 (`compute`, `roles`, `effect`, `collectors`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import BLUE, DASHED, GREEN, GREY, INK, ORANGE, VERMILLION, Panel, Series, curves, heat, panels
from ...errors import InputError, plural
from ...measure import Headline, Measure
from ...models.words import intervention
from ...results.curves import ESTIMATE, estimate, with_interval
from ...results.dataset import options_of
from ...results.tables import Table, estimated, number
from .collectors import COLUMNS as TOKEN_COLUMNS
from .collectors import token_rows
from .compute import EFFECT_PROMPTS
from .compute import sinks as sinks
from .effect import DIMS, REMOVED
from .roles import ATTENDS, COLUMNS, SENSITIVITY, counts, head_rows, role_names, sensitivity_rows, strongest
from .secondary import COLUMNS as LEVEL_COLUMNS
from .secondary import level_rows, most
from .sums import TAU as TAU
from .sums import THRESHOLD as THRESHOLD

COLORS = {"reads": VERMILLION, "parks": GREEN, "reacts": ORANGE}
NOTE = "A key is a sink in a head where its alpha, the mean weight on it, is above the threshold. Dashed: uniform attention."
CACHE_COLUMNS = ("first", "last", "positions by", "loss", "change", "KL")
EFFECT_COLUMNS = ("block", "head", "effect (KL)", "change of loss", "rises (Holm)", "prompts")
LOST = {0: "without key 0", 1: "with key 0"}  # what caches of so many first keys have of it


@dataclass(frozen=True)
class Options(options.Options):
    """Find attention sinks, and what every head does with position 0: reads, parks, reacts or ignores.

    Writes sinks.nc, sinks.md and the chart: the sink rate of keys beside uniform attention and Wu's fraction, and all heads
    with their roles, the strongest sinks first.

    Examples:
      headwater sinks tiny-llama tiny-qwen2 --keys 0,1,5
      headwater sinks ./checkpoint --keys all --reacts off --length 1024
      headwater sinks tiny-qwen2 --effect all --prompts 16 --length 64
      headwater sinks tiny-llama --evict 0,1,4 --keep 16,64 --prompts 8
      headwater sinks ./chat-model --chat "Why is the sky blue?" --answer 32
      headwater sinks ./checkpoint --device-map auto --max-memory 0=20GiB,cpu=60GiB --offload-folder offload
    """

    keys: str | None = options.option("Positions that may be sinks: all, 0-7, 0,5; the first 8 if not given.")
    reacts: str = options.option("What to put at position 0: mean, zero, random, a token id, or off.", "mean")
    effect: str = options.option(
        "Heads whose effect is measured by removing what they take from position 0: off, all, or how many of "
        "those that take most; half a pass per head and prompt. And all sink heads at once; 0: these alone.",
        "off",
    )
    effect_prompts: int = options.option("Prompts for effects of single heads: the first ones.", EFFECT_PROMPTS, min=1)
    evict: str | None = options.option(
        "Numbers of first keys that a cache keeps beside the last, as in 0,1,4: loss and KL against all keys; "
        "with 1, also without the value of key 0."
    )
    keep: str | None = options.option(
        "With --evict: numbers of last keys; 64,128,256 if not given; those not shorter than the prompts are skipped."
    )

    answer: int | None = options.option(
        "Tokens that the model writes after each prompt; alpha of their queries is told apart.", min=1
    )

    def values(self) -> dict[str, Any]:
        """As `sinks` takes them."""
        reacts = None if self.reacts == "off" else intervention(self.reacts).label
        keys = "all" if self.keys == "all" else numbers(self.keys, "keys", "all, 0-7 or 0,5")
        kept = {"evict": numbers(self.evict, "evict", "0,1,4"), "keep": numbers(self.keep, "keep", "64,128,256")}
        return vars(self) | {"keys": keys, "reacts": reacts, "effect": _effect(self.effect), **kept}


def numbers(text: str | None, name: str, example: str) -> tuple[int, ...] | None:
    """Whole numbers and ranges of them, ends included: "0-7", "0,5", "0-3,8"."""
    ranges = [] if text is None else options.read_ranges(text, name, example)
    return tuple(number for first, last in ranges for number in range(first, last + 1)) or None


def _effect(text: str) -> int | str | None:
    """A number of heads, "all", or "off"."""
    if text in ("off", "all"):
        return None if text == "off" else "all"
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise InputError(f"effect '{text}' is unknown; give off, all or a number of heads")


# ------------------------------------------------------------------------------------------------------------ headlines


def _alpha(ds: xr.Dataset) -> xr.DataArray:
    """Position 0's mean weight, by prompt where it was kept."""
    return ds["alpha"].sel(key=0, drop=True).mean(("layer", "head"))


def _written(ds: xr.Dataset) -> xr.DataArray:
    """The same over the queries of the answer alone."""
    return ds["answer_alpha"].sel(key=0, drop=True).mean(("layer", "head"))


def _rate(ds: xr.Dataset) -> xr.DataArray:
    """The share of heads in which position 0 is a sink, by prompt where alpha was kept by prompt."""
    if "prompt" not in ds["alpha"].dims:
        return ds["sink_rate_of_model"].sel(key=0, drop=True)
    return (ds["alpha"].sel(key=0, drop=True) > THRESHOLD).mean(("layer", "head"))


def _over_heads(ds: xr.Dataset, *, name: str) -> xr.DataArray:
    """A mean over heads, by prompt where it was kept."""
    return ds.get(f"{name}_by_prompt", ds[name]).mean(("layer", "head"))


def _prompts(ds: xr.Dataset) -> int:
    """On how many prompts effects of single heads were measured."""
    return int(options_of(ds)["effect_prompts"])


def _largest(ds: xr.Dataset) -> xr.DataArray:
    """The largest effect of a single head's reading, with its interval."""
    (layer, head), tried = strongest(ds["effect"], 1)[0], int(ds["effect"].notnull().sum())
    ends = estimate(ds, "effect", layer=layer, head=head)
    where = [f"{tried} tried, {plural(_prompts(ds), 'prompt')}"]
    return xr.DataArray([[end] for end in ends], {"estimate": list(ESTIMATE), "of": where}, ("estimate", "of"))


def _rising(ds: xr.Dataset) -> xr.DataArray:
    """How many heads' change of loss is above 0, after Holm over those tried."""
    return _largest(ds).isel(estimate=0).copy(data=[float(ds["loss_rises"].sum())])


def _lost(ds: xr.Dataset) -> xr.DataArray:
    """What a cache that has lost keys costs, by how many first keys it keeps; positions by the cache where known.

    With one, also without its value, and what this costs more.
    """
    change = ds["evict_loss_change_by_prompt"]
    kept = {int(first): change.sel(first_keys=first, drop=True) for first in change["first_keys"].values}
    costs = {LOST.get(first, f"with the first {first} keys"): cost for first, cost in kept.items()}
    if 1 in kept and "evict_value_loss_change_by_prompt" in ds:
        valueless = ds["evict_value_loss_change_by_prompt"]
        costs[f"{LOST[1]}, without its value"] = valueless
        costs["by the value of key 0 alone"] = valueless - kept[1]
    each = xr.concat(list(costs.values()), "lost").sel(cache="cut", drop=True)
    known = each.sel(numbering="cache", drop=True).fillna(each.sel(numbering="text", drop=True))
    return known.assign_coords(lost=list(costs), last_keys=[f"last {last}" for last in ds["last_keys"].values])


# ------------------------------------------------------------------------------------------------- sentences and tables


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """In how many heads position 0 is a sink, in which most, what its heads do, and whether prompts lack a BOS."""
    told = [
        (f"{model}: {_sink(ds)}{_roles(ds)}{_removed(ds)}.", ds.attrs.get("lacks_bos")) for model, ds in results.items()
    ]
    return [line for lines in told for line in lines if line]


def _sink(ds: xr.Dataset) -> str:
    if 0 not in ds["key"].values:
        return "position 0 was not among the keys"
    at = ds.sel(key=0)
    alpha = at["alpha"].mean([dim for dim in at["alpha"].dims if dim == "prompt"])
    strongest = alpha.argmax(("layer", "head"))
    block, head = (int(ds[dim][int(strongest[dim])]) for dim in ("layer", "head"))
    even, count = int((at["uniform"] > THRESHOLD).sum()) * ds.sizes["head"], int((alpha > THRESHOLD).sum())
    of, most = f"of {alpha.size} heads", number(alpha.max())
    said = f"{count} {of}, most of all in block {block}, head {head} (alpha {most}); with uniform attention it would be"
    if not count:
        said = (
            f"none {of}: alpha is at most {most}, in block {block}, head {head}; with uniform attention it would be one"
        )
    return f"position 0 is a sink in {said} in {even} (alpha {number(at['uniform'].mean())}){_wrote(ds)}"


def _wrote(ds: xr.Dataset) -> str:
    if "answer_alpha" not in ds:
        return ""
    alpha = at_0.mean("prompt") if "prompt" in (at_0 := ds["answer_alpha"].sel(key=0)).dims else at_0
    even, count = number(ds["answer_uniform"].sel(key=0).mean()), int((alpha > THRESHOLD).sum())
    return (
        f"; for the {plural(options_of(ds)['answer'], 'token')} that the model wrote it is one in {count or 'no'} "
        f"head{'s' * (count > 1)} (mean alpha {number(alpha.mean())}, of uniform attention {even})"
    )


def _roles(ds: xr.Dataset) -> str:
    """How many heads have which role."""
    return f"; of the heads {', '.join(f'{count} {role[:-1]}' for role, count in counts(ds).items())}"


def _removed(ds: xr.Dataset) -> str:
    """What it costs to remove what heads take from position 0, all sink heads at once and the head of the largest effect."""
    if "joint_kl" not in ds or not int(ds["group_heads"][0]):
        return ""
    alone, both = (estimated(ds, "joint_loss_change", "+.3g", group="sink heads", removed=of) for of in REMOVED)
    told = (
        f"; without what all {int(ds['group_heads'][0])} heads that attend to it above {ATTENDS:g} take from it, the loss "
        f"changes by {alone} nat (the value alone) and {both} (value and weight)"
    )
    if "effect" not in ds:
        return told
    (block, head), rising = strongest(ds["effect"], 1)[0], _rising(ds)
    largest = estimated(ds, "effect", layer=block, head=head)
    return (
        f"{told}; of single heads ({rising['of'].item()}) {block}.{head} has the largest effect, {largest} nat of KL, and "
        f"the loss rises for {int(rising.item())} of them (after Holm)"
    )


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """All heads, the strongest sinks first; effects, keys, collectors and caches where measured."""
    parts = (
        ("Heads, the strongest sinks first", COLUMNS, head_rows),
        ("Heads that read position 0, by threshold", SENSITIVITY, sensitivity_rows),
        ("Heads without what they take from position 0, one at a time", EFFECT_COLUMNS, effect_rows),
        ("Keys", ("key", "sink rate", "over tau", "alpha", "uniform"), _keys),
        (
            "Keys, by the queries of the tokens that the model wrote",
            ("key", "sink rate", "alpha", "uniform"),
            _answered,
        ),
        ("Tokens behind position 0 that collect attention, mean over heads", TOKEN_COLUMNS, token_rows),
        (
            "Secondary sinks: positions whose stream takes position 0's direction; norm beside position 0's, excess of the "
            "weight on them over uniform attention's",
            LEVEL_COLUMNS,
            level_rows,
        ),
        ("A cache of the first and the last keys, positions that have lost some", CACHE_COLUMNS, cache_rows),
    )
    listed = []
    for title, columns, rows_of in parts:
        rows = [[model, *row] for model, ds in results.items() for row in rows_of(ds)]
        listed += [Table(title, ("model", *columns), rows)] * bool(rows)
    return listed


def _keys(ds: xr.Dataset) -> list[list[str]]:
    alpha = ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim != "key"])
    columns = (ds["sink_rate_of_model"], ds["over_tau_of_model"], alpha, ds["uniform"].mean("layer"))
    return [[str(key), *(number(column.sel(key=key), ".4f") for column in columns)] for key in ds["key"].values]


def _answered(ds: xr.Dataset) -> list[list[str]]:
    if "answer_alpha" not in ds:
        return []
    alpha, uniform = ds["answer_alpha"], ds["answer_uniform"].mean("layer")
    other = [dim for dim in alpha.dims if dim != "key"]
    columns = ((alpha > THRESHOLD).mean(other), alpha.mean(other), uniform)
    return [[str(key), *(number(column.sel(key=key), ".4f") for column in columns)] for key in ds["key"].values]


def effect_rows(ds: xr.Dataset) -> list[list[str]]:
    """The heads whose effects were measured, largest first, in nats, with `EFFECT_COLUMNS`."""
    rows = []
    for block, head in strongest(ds["effect"], int(ds["effect"].notnull().sum())) if "loss_rises" in ds else ():
        at: dict[str, Any] = {"layer": block, "head": head}
        both = estimated(ds, "effect", **at), estimated(ds, "loss_change", "+.3g", **at)
        rows.append([str(block), str(head), *both, "yes" if int(ds["loss_rises"].sel(at)) else "no", str(_prompts(ds))])
    return rows


def cache_rows(ds: xr.Dataset) -> list[list[str]]:
    """What each cache costs where it has lost keys, in nats, with `CACHE_COLUMNS`; none where it was not measured."""
    rows, measured = [], [of for of in ("evict", "evict_value") if f"{of}_kl" in ds]
    for *place, of in product(*(ds[dim].values for dim in DIMS[:-1]), measured) if measured else ():
        at = ds.sel(dict(zip(DIMS[:-1], place, strict=True)), drop=True).sel(cache="cut")
        if (of == "evict" or place[0] == 1) and not np.isnan(at[f"{of}_kl"]):
            losses = (number(at["evict_loss_before"], ".3f"), estimated(at, f"{of}_loss_change", "+.3f"))
            first = f"{place[0]}{', without its value' * (of != 'evict')}"
            rows.append([first, *map(str, place[1:]), *losses, estimated(at, f"{of}_kl", ".3f")])
    return rows


# --------------------------------------------------------------------------------------------------------------- chart


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Which heads attend to position 0 and what they do with it, and which keys are sinks."""
    rows = [
        Panel("block", _heads, height=3.0, note="Dots: what heads do with position 0, by our rules."),
        Panel("alpha, mean over heads", _alphas, note=NOTE),
        Panel("share", _rates, share=True),
    ]
    return panels(results, rows)


def _heads(cell: Axes, ds: xr.Dataset) -> None:
    roles = role_names(ds)
    marks = {role: (roles == role, color) for role, color in COLORS.items()}
    heat(cell, ds["attends"], "mean weight on position 0", marks)


def _alphas(cell: Axes, ds: xr.Dataset) -> None:
    alpha = ds["alpha"].mean([dim for dim in ds["alpha"].dims if dim not in ("layer", "key")])
    low, high = alpha.min("layer"), alpha.max("layer")
    uniform = Series("uniform", ds["uniform"].mean("layer"), GREY, x=ds["key"], line=DASHED)
    drawn = [uniform, Series("mean, range of blocks", alpha.mean("layer"), INK, low, high, x=ds["key"])]
    if "answer_alpha" in ds:
        written = ds["answer_alpha"].mean([dim for dim in ds["answer_alpha"].dims if dim != "key"])
        drawn.append(Series("mean, for the tokens that the model wrote", written, BLUE, x=ds["key"]))
    curves(cell, drawn, log=True)
    _key_axis(cell, ds)


def _rates(cell: Axes, ds: xr.Dataset) -> None:
    marker = "o" if ds.sizes["key"] <= 16 else ""
    rate = Series("of heads: alpha above the threshold", ds["sink_rate_of_model"], INK, x=ds["key"], marker=marker)
    over = Series("of queries: weight above tau", ds["over_tau_of_model"], BLUE, x=ds["key"], marker=marker)
    curves(cell, [rate, over])
    _key_axis(cell, ds)


def _key_axis(cell: Axes, ds: xr.Dataset) -> None:
    if ds.sizes["key"] > 16:
        cell.set_xscale("symlog", linthresh=1)
    else:
        cell.set_xticks(ds["key"].values)
    cell.set_xlabel("key position")


MEANS = {"attends": "mean weight on 0", "reads": "reads", "reacts": "reacts", "sink_logit_share": "sink logit's weight"}
MEASURE = Measure(
    name="sinks",
    question="Which heads attend to position 0, and what do they do with it?",
    compute=sinks,
    options=Options,
    headlines=(
        Headline("sink rate of position 0", _rate),
        Headline("alpha of position 0", _alpha, ratio=True),
        Headline("alpha of uniform attention", lambda ds: ds["uniform"].sel(key=0, drop=True).mean("layer")),
        Headline("alpha of position 0 for tokens that the model wrote", _written),
        Headline("over tau at position 0", lambda ds: ds["over_tau_of_model"].sel(key=0, drop=True)),
        Headline("share of heads", partial(with_interval, name="role_share")),
        Headline("largest effect of a head's reading (KL, nat)", _largest),
        Headline("heads whose reading lowers the loss, after Holm", _rising),
        Headline(
            "change of loss, position 0 not read (nat)", lambda ds: ds["joint_loss_change_by_prompt"], form="+.3g"
        ),
        Headline("KL, position 0 not read (nat)", lambda ds: ds["joint_kl_by_prompt"]),
        Headline("heads in the group", lambda ds: ds["group_heads"]),
        Headline("change of loss by a cache that has lost keys (nat)", _lost, form="+.3g"),
        Headline(
            "positions with position 0's direction, share in the block of most", lambda ds: ds["aligned_share"], most
        ),
        *(Headline(f"{words}, mean over heads", partial(_over_heads, name=name)) for name, words in MEANS.items()),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    trials={
        "sinks": partial(
            sinks, keys="all", reacts="mean", effect="all", effect_prompts=2, evict=(0, 1), keep=(16,), answer=2
        )
    },
)
