"""What a model does without its first token: something else at position 0, or nothing there (`compute`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ... import charts, options
from ...measure import Headline, Measure
from ...results.curves import estimate, with_interval
from ...results.tables import Table, estimated, interval
from ..jacobian import PRODUCTS
from .compute import ANCHORS, DEFINITIONS, PROFILE_PROMPTS, V_X, WHAT, anchoring, bos_swap
from .compute import LEFT_IN as LEFT_IN
from .compute import TOTAL as TOTAL

EFFECTS = {  # by variable: a number for each replacement, how it is called, and how it is written
    "loss_change_of_model": ("loss, change (nat)", "+.4f"),
    "kl_of_model": ("KL (nat)", ".4f"),
    "recall_log_p_change": ("log p of values, change (nat)", "+.2f"),
    "recall_exact_change": ("exact answers, change", "+.2f"),
}
BESIDE = {  # in tables alone, likewise
    "loss_before_of_model": ("loss (nat)", ".3f"),
    "recall_log_p_before": ("log p of values (nat)", ".2f"),
    "recall_exact_before": ("exact answers", ".2f"),
    "profile_change": ("profile, change", ".1%"),
}
LEFT_OUT = "without-0"  # the replacement that leaves position 0 out

OVER = "Intervals: 95 % over documents, of recall over lists."
BANDS = "Bands: 95 % over documents; of the loss, means of the positions' own."
FEW = 6  # replacements that have a colour each; more of them have a line each
SMALL = 0.1  # nats; the axis of the loss is linear below: first positions lose a hundred times what later ones do
OUTCOMES = {  # of many replacements, by variable: the panel's words, and up to where its axis is linear
    "sink_rate_after_of_model": ("sink rate after; dotted: before", 1.0),
    "loss_change_of_model": ("change of loss (nat)", 0.01),
    "kl_of_model": ("KL of the next token (nat)", 0.01),
    "recall_log_p_change": ("change of recall, log p (nat)", 1.0),
}
LINE = 0.17  # inches of a replacement's line
ACROSS = 1.6  # inches of words below a panel, one of four side by side


@dataclass(frozen=True)
class Options(options.Bands):
    """Put something else at position 0, or take it out of attention, and see what changes.

    Writes bos-swap.nc, bos-swap.md and the chart: for every replacement what it does to sink rate, loss, KL divergence,
    recall, Jacobian profile and the residual component of leakage, and whether the model's sink is anchored to the place or
    the token. Without an option: another embedding (mean, random, zero), and the first token left out. If interrupted, the
    same command resumes.

    Examples:
      headwater bos-swap tiny-llama
      headwater bos-swap tiny-llama tiny-qwen2 --replace mean,zero,random,17
      headwater bos-swap tiny-llama@step0 tiny-llama@step1000 tiny-llama
      headwater bos-swap ./checkpoint --bands 9-31 --profile-prompts 2
      headwater bos-swap smollm2-135m --replace "mean@4,mean:keys,mean*0.4,without-0@8,held-log-z" --recall 12
    """

    replace: str = options.option(
        "What to do at position 0, one after another: mean, zero, random, drawn, token ids, each with @BLOCK, :PART (keys, "
        "values, both), *DOSE if wanted; without-0, without-value-0, constant-sink, held-log-z, each with @BLOCK if wanted.",
        "mean,random,zero,without-0",
    )
    profile_prompts: int = options.option("Prompts of the Jacobian profile; 0: none.", PROFILE_PROMPTS)
    products: int = options.option("Products of the profile's sketch, per prompt.", PRODUCTS, max=options.MOST_PRODUCTS)
    recall: int = options.option("Lists of keys and values that recall is measured on; 0: none.", 0)

    def values(self) -> dict[str, Any]:
        """As `bos_swap` takes them."""
        values = super().values()
        chosen = values.pop("replace").split(",")
        return values | {"replacement": chosen if chosen[1:] else chosen[0]}


# ------------------------------------------------------------------------------------------------------------- numbers


def of_several(ds: xr.Dataset) -> xr.Dataset:
    """With the dimension `replacement` in front, of length one where the result is of a single one."""
    if "replacement" in ds.dims or "replacement" not in ds.attrs:
        return ds
    return ds.drop_vars("tokens", errors="ignore").expand_dims(replacement=[str(ds.attrs["replacement"])])


def each(ds: xr.Dataset) -> Iterator[tuple[str, xr.Dataset]]:
    """(replacement, its result)."""
    several = of_several(ds)
    yield from ((name, several.sel(replacement=name)) for name in map(str, several["replacement"].values))


def _own(ds: xr.Dataset, name: str) -> xr.DataArray:
    """A variable of each replacement with its interval."""
    return with_interval(of_several(ds), name)


def _rate(ds: xr.Dataset, when: str, key: int = 0) -> xr.DataArray:
    """The sink rate of a key, with its interval."""
    return _own(ds, f"sink_rate_{when}_of_model").sel(key=key, drop=True)


def _before(ds: xr.Dataset) -> xr.DataArray:
    """Position 0's sink rate, which is the same before every replacement."""
    return _rate(ds, "before").isel(replacement=0, drop=True)


def _by_prompt(ds: xr.Dataset, when: str, key: int = 0) -> xr.DataArray:
    return of_several(ds)[f"sink_rate_{when}_by_prompt"].sel(key=key, drop=True)


def _chosen(ds: xr.Dataset, *names: str) -> xr.Dataset:
    """The result of these replacements."""
    return of_several(ds).sel(replacement=list(names))


def _elsewhere(ds: xr.Dataset) -> xr.DataArray:
    """The largest sink rate that another of the first keys has after each replacement, `key` which."""
    others = _own(ds, "sink_rate_after_of_model").isel(key=slice(1, None))
    return others.isel(key=others.sel(estimate="value", drop=True).argmax("key"))


def _removed(ds: xr.Dataset) -> xr.DataArray:
    """V(X) before less after [replacement, band]."""
    return _own(ds, "component_removed").sel(definition=V_X, drop=True)


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Whether the sink is anchored to place or token, and what the first replacement does to loss and V(X)."""
    return [f"{model}: {'; '.join(_answer(of_several(ds)))}." for model, ds in results.items()]


def _answer(ds: xr.Dataset) -> Iterator[str]:
    first = ds.isel(replacement=0)
    name, rates = first["replacement"].item(), [f"sink_rate_{when}_of_model" for when in ("before", "after")]
    before, after = (estimated(first, rate, ".0%", key=0) for rate in rates)
    yield f"with {name} at position 0 the sink rate goes from {before} to {after}"
    if verdict := anchoring(ds):
        shares = " and ".join(estimated(ds, "sink_rate_kept", ".0%", replacement=name) for name in ANCHORS)
        yield f"{verdict} ({shares} of it kept under {' and '.join(ANCHORS)})" if "anchored" in verdict else verdict
    if LEFT_OUT in ds["replacement"]:
        left = estimated(ds, rates[1], ".0%", replacement=LEFT_OUT, key=1)
        yield f"left out, the first token left has {left}"
    yield f"by {name} the loss changes by {estimated(first, 'loss_change_of_model', '+.3g')} nat"
    yield _component(first.isel(band=0))
    if (count := ds.sizes["replacement"]) > 1:
        costly = int((ds["loss_change_of_model_low"] > 0).sum())
        yield f"{costly or 'none'} of {count} replacements clearly cost loss"


def _component(ds: xr.Dataset) -> str:
    """What becomes of the residual component in a band, or that it is undecided."""
    value, low, high = estimate(ds, "component_removed", definition=V_X)
    component = f"the residual component of leakage (queries {ds['band'].item()})"
    if not (low > 0 or high < 0):
        return f"whether {component} changes is undecided"
    ends = (value, low, high) if low > 0 else (-value, -high, -low)
    share = estimated(ds, "component_share", ".0%", definition=V_X)
    said = f"{component} {'falls' if low > 0 else 'grows'} by {interval(*ends)} nat²"
    return f"{said}, {share} of it" if low > 0 and share != "-" else said


# -------------------------------------------------------------------------------------------------------------- tables


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """What each replacement does to sinks and behaviour, and what it removes by every definition."""
    at = ("model", "replacement")
    shown = {name: words for name, words in (EFFECTS | BESIDE).items() if any(name in ds for ds in results.values())}
    words = ("sink rate", "after", "kept", "another key's, after", *(words for words, _ in shown.values()))
    effects, components = [], []
    anchors = [_anchor(model, of_several(ds)) for model, ds in results.items() if anchoring(of_several(ds))]
    for model, name, ds in ((model, *one) for model, whole in results.items() for one in each(whole)):
        rates = [estimated(ds, f"sink_rate_{when}_of_model", ".3f", key=0) for when in ("before", "after")]
        most = _elsewhere(ds.expand_dims("replacement")).isel(replacement=0)
        other = f"{interval(*most.values, form='.3f')} (key {int(most['key'])})"
        more = [estimated(ds, one, form) if one in ds else "-" for one, (_, form) in shown.items()]
        effects.append([model, name, *rates, estimated(ds, "sink_rate_kept", ".0%"), other, *more])
        components += [[model, name, *row] for row in definitions(ds)]
    columns = (*at, "queries", "definition", "before", "after", "removed", "share removed")
    kept = ("model", "sink rate", *(f"kept under {name}" for name in ANCHORS), "of the first token left", "anchor")
    title = "What is removed, by every definition of the residual component (nat²; of the sink and patterns, shares)"
    found = [Table("Sinks and behaviour", (*at, *words), effects), Table(title, columns, components)]
    return [Table("What the sink is anchored to", kept, anchors), *found] if anchors else found


def _anchor(model: str, ds: xr.Dataset) -> list[str]:
    """A model's sink rate, what is kept of it, that of the first token left, and the verdict."""
    before = estimated(ds.isel(replacement=0), "sink_rate_before_of_model", ".3f", key=0)
    shares = [estimated(ds, "sink_rate_kept", ".0%", replacement=name) for name in ANCHORS]
    left = {"replacement": LEFT_OUT, "key": 1}
    first = estimated(ds, "sink_rate_after_of_model", ".3f", **left) if LEFT_OUT in ds["replacement"] else "-"
    return [model, before, *shares, first, anchoring(ds)]


def definitions(ds: xr.Dataset) -> Iterator[list[str]]:
    """Rows of one replacement: every definition at early queries, the first one at later ones."""
    for band in ds["band"].values:
        early = band == ds["band"].values[0]
        for one in DEFINITIONS if early else (V_X,):
            there, left, removed, share = (
                estimate(ds, f"component_{what}", definition=one, band=band) for what in WHAT
            )
            if not np.isnan([removed[0], share[0]]).all():
                lost = "undecided" if np.isnan(share[0]) else interval(*share, form=".0%")
                yield [str(band), one, *(interval(*three) for three in (there, left, removed)), lost]


# --------------------------------------------------------------------------------------------------------------- chart


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """What a swap does to loss and sinks; of many, the outcomes of each, line by line; of many models, a line of each."""
    several = {model: of_several(ds) for model, ds in results.items()}
    most = max(ds.sizes["replacement"] for ds in several.values())
    of_each = [list(map(str, ds["replacement"].values)) for ds in several.values()]
    shared = [name for name in of_each[0] if all(name in names for names in of_each)][: FEW - 1]
    if shared and len(several) > charts.MOST_PANELS:
        return _models(several, shared)
    rows = [
        charts.Panel("change of loss (nat)", _losses, note=BANDS),
        charts.Panel("sink rate of position 0", _sink_rates, True),
    ]
    if most > FEW:
        names = [name for name in OUTCOMES if all(name in ds for ds in several.values())]
        rows = [charts.Panel("", partial(_outcome, name=name), height=LINE * most + 0.6) for name in names]
    return charts.panels(several, rows, OVER * (most > FEW))


def _losses(cell: Axes, ds: xr.Dataset) -> None:
    """Changes of the loss, means over positions 1, 2-3, 4-7, ...; the last position predicts nothing that is known."""
    first = 2 ** np.arange(int(np.log2(ds.sizes["position"] - 2)) + 1)
    drawn = []
    for (name, at), color in zip(each(ds), charts.CYCLE, strict=False):
        parts = np.split(with_interval(at, "loss_change").values[:, :-1], first, axis=1)[1:]
        y, low, high = np.stack([part.mean(1) for part in parts], 1)
        drawn.append(charts.Series(name, y, color, low, high, first, marker="o"))
    charts.curves(cell, drawn)
    cell.axhline(0, color=charts.GREY, linewidth=0.8, zorder=1)
    cell.set_yscale("symlog", linthresh=SMALL, linscale=0.6)
    cell.set_xscale("log", base=2)
    for axis in (cell.xaxis, cell.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: charts.numeral(value)))
    cell.set_xlabel("query, means up to the next mark")


def _sink_rates(cell: Axes, ds: xr.Dataset) -> None:
    """Sink rates by block, before and after."""
    x = ds["layer"].values
    sides = [("as it is", "before", ds.isel(replacement=0)), *((name, "after", at) for name, at in each(ds))]
    drawn = []
    for (name, when, at), color in zip(sides, (charts.INK, *charts.CYCLE), strict=False):
        y, low, high = with_interval(at, f"sink_rate_{when}").values
        drawn.append(charts.Series(name, y, color, low, high, x))
    charts.blocks(cell, drawn)
    cell.set_ylim(-0.03, 1.03)


def _models(results: Mapping[str, xr.Dataset], shown: list[str]) -> Figure:
    """Sink rates and changes of the loss under these replacements, a line of each model, as of steps of training."""
    figure, cells = charts.sheet(1, 2, height=2 * LINE * len(results) + 0.9, caption="Intervals: 95 % over documents.")
    drawn: list[list[charts.Series]] = [[], []]
    for name, color in zip(("as it is", *shown), (charts.INK, *charts.CYCLE), strict=False):
        several = [ds.sel(replacement=shown[0] if name == "as it is" else name) for ds in results.values()]
        of_rates = f"sink_rate_{'before' if name == 'as it is' else 'after'}_of_model"
        for n, variable in enumerate((of_rates, "loss_change_of_model")[: 1 if name == "as it is" else 2]):
            where = {} if n else {"key": 0}
            y, low, high = np.transpose([estimate(ds, variable, **where) for ds in several])
            drawn[n].append(charts.Series(name if n == 0 else "", y, color, low, high))
    with rc_context(charts.STYLE):
        for cell, series, label in zip(
            cells[0], drawn, ("sink rate of position 0", "change of loss (nat)"), strict=True
        ):
            charts.dots(cell, list(results), series)
            cell.set_xlabel(label)
    cells[0, 1].set_yticklabels([])
    return figure


def _outcome(cell: Axes, ds: xr.Dataset, name: str) -> None:
    """One outcome of every replacement, in their order."""
    words, linear = OUTCOMES[name]
    rates = name == "sink_rate_after_of_model"
    y, low, high = (_rate(ds, "after") if rates else with_interval(ds, name)).values
    charts.dots(cell, list(map(str, ds["replacement"].values)), [charts.Series("", y, charts.BLUE, low, high)])
    if rates:
        cell.axvline(float(_before(ds)[0]), color=charts.INK, linewidth=0.9, linestyle=charts.DOTTED)
        cell.set_xlim(-0.03, 1.03)
    else:
        cell.set_xscale("symlog", linthresh=linear)
        cell.xaxis.set_major_formatter(FuncFormatter(lambda value, _: charts.numeral(value)))
        if not (ds[name] < -linear).any():
            cell.set_xlim(left=-linear / 2)
    cell.set_xlabel(charts.wrapped(words, ACROSS, charts.TEXT))


RESAMPLED = {"bootstrap": 50}
MEASURE = Measure(
    name="bos-swap",
    question="What changes when something else stands at position 0?",
    compute=bos_swap,
    options=Options,
    headlines=(
        Headline(
            "sink rate, before", _before, by_prompt=lambda ds: _by_prompt(ds, "before").isel(replacement=0, drop=True)
        ),
        Headline("sink rate, after", partial(_rate, when="after"), by_prompt=partial(_by_prompt, when="after")),
        Headline("sink rate kept", lambda ds: _own(_chosen(ds, *ANCHORS), "sink_rate_kept")),
        Headline("sink rate of the first token left", lambda ds: _rate(_chosen(ds, LEFT_OUT), "after", 1)),
        *(
            Headline(words, partial(_own, name=name), ratio=name == "kl_of_model", form=form)
            for name, (words, form) in EFFECTS.items()
        ),
        Headline("sink rate, change", partial(_rate, when="change"), form="+.3g"),
        Headline("largest sink rate of another first key, after", lambda ds: _elsewhere(ds).drop_vars("key")),
        Headline("V(X), median head, removed (nat²)", _removed),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    defaults={"prompts": 128},
    trials={
        "bos-swap, mean@1:keys": partial(
            bos_swap, replacement="mean@1:keys", profile_prompts=1, products=32, recall=2, **RESAMPLED
        ),
        "bos-swap, held-log-z": partial(bos_swap, replacement="held-log-z", profile_prompts=0, **RESAMPLED),
    },
)
