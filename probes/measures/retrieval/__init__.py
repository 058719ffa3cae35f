"""What a model recalls of a list of keys and values, by the depth at which the pair stands (`compute`, `mechanism`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import GREY, VERMILLION, Panel, Series, curves, panels
from ...data.recall import Rung
from ...measure import Headline, Measure
from ...results.curves import ESTIMATE
from ...results.dataset import options_of
from ...results.statistics import couples, jackknife
from ...results.tables import Table, interval
from ...results.ushape import SHORTEST
from ..jacobian import of_curve, trough
from .compute import retrieval as retrieval
from .numbers import SHOWN, Recall, by_depth, shape, statements

CAPTION = "Bands: 95 % over couples of lists. Without key: the same question behind another list."
FORMS = {"log_p": "log p (nat)", "gain": "gain (nat)", "exact": "exact answers"}


@dataclass(frozen=True)
class Options(options.Options):
    """Measure what a model recalls of a list of keys and values, by the depth at which the pair stands.

    Writes retrieval.nc, retrieval.md and the chart: recall by depth, with the first and the last pairs against the middle.
    --pairs, --keys and --digits say how hard lists are: depth shows where a model recalls a part of them. There is no
    --backend: lists run once, and questions behind them, through the modules of transformers. If interrupted, the same
    command resumes.

    With --mechanism it is also measured, in some of the lists, what the value's log odds depend on: the pair asked for, the
    other pairs, position 0, the paths through attention to it; and what that says of recall by depth.

    Examples:
      headwater retrieval smollm2-135m --pairs 36 --contexts 24
      headwater retrieval smollm2-135m --pairs 36 --mechanism 24
      headwater retrieval Qwen/Qwen2.5-0.5B --pairs 144 --keys alike --template json
    """

    pairs: int = options.option("Pairs of a list.", 12)
    keys: Literal["apart", "alike"] = options.option("Different nouns, or colours and nouns that recur.", "apart")
    digits: int = options.option("Digits of a value, 2 to 15; 0: values are nouns.", 4)
    contexts: int = options.option("Lists, an even number: each is the control of another one.", 100)
    template: str = options.option("sentences, json, reworded, or announced (keys before the list).", "sentences")
    mechanism: int = options.option(
        "Lists of which it is also measured what the value's log odds depend on; 0: none.", 0
    )
    mechanism_depths: int = options.option("Pairs of each of these lists that are asked for, evenly spaced.", 5)
    candidates: int = options.option("With --mechanism, values that the log odds compare.", 36)
    profile_prompts: int = options.option("With --mechanism, prompts of ordinary text for profiles; 0: no profiles.", 4)
    initialization: str = options.initialization()
    first: str = options.first()
    seed: int = options.seed()

    def values(self) -> dict[str, Any]:
        """As `retrieval` takes them."""
        from ...data.prompts import parse_first

        return vars(self) | {"first": parse_first(self.first)}


def by_list(ds: xr.Dataset, *, name: str) -> xr.DataArray:
    """Means over depths by list, which stands in the place of a prompt."""
    return ds[name].mean("depth").rename(context="prompt")


def _exact(ds: xr.Dataset) -> xr.DataArray:
    """The share of exact answers with its interval over couples of lists, within 0 and 1."""
    return xr.DataArray(list(shape(ds).exact[:3]), {"estimate": list(ESTIMATE)}, ("estimate",))


def _by_depth(ds: xr.Dataset) -> xr.DataArray:
    """Log p by list and depth [prompt, depth]."""
    if ds.sizes["depth"] < SHORTEST:
        raise KeyError("a middle")
    return ds["log_p"].rename(context="prompt").transpose("prompt", "depth")


def least_at(values: np.ndarray) -> np.ndarray:
    """Where recall is lowest, from 0 (first) to 1 (last), of values [prompt, depth]."""
    return np.asarray(trough(values) / (values.shape[-1] - 1))


def _statements(ds: xr.Dataset) -> xr.DataArray:
    """What a mechanism says of recall [number, estimate]; its interval is its own."""
    if "sensitivity" not in ds:
        raise KeyError("sensitivity")
    found = statements(ds)
    coords = {"number": list(found), "estimate": list(ESTIMATE)}
    return xr.DataArray([list(number[:3]) for number in found.values()], coords, ("number", "estimate"))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Whether recall by depth is a U, and what was asked."""
    lines = []
    for model, ds in results.items():
        recall, chosen = shape(ds), options_of(ds)
        rung = Rung(chosen["pairs"], chosen["keys"], chosen["digits"])
        lines.append(f"{model}: of {rung}, {interval(*recall.exact[:3])} are answered exactly; {_verdict(recall)}.")
    return lines


def _verdict(recall: Recall) -> str:
    """Whether recall is a U, in a sentence."""
    sides = {"first pairs": recall.primacy, "last pair": recall.recency}
    if any(np.isnan(side.low) for side in sides.values()):
        return f"no U can be told: that takes {SHORTEST} pairs and two couples of lists, or more"
    ways = [
        "better than" if side.low > 1 else "worse than" if side.high < 1 else "not clearly other than"
        for side in sides.values()
    ]
    said = ", ".join(f"the {name} {way} the middle" for name, way in zip(sides, ways, strict=True))
    return f"recall: {said}: {'a U' if set(ways) == {'better than'} else 'not clearly a U'}"


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """What the log odds depend on, and recall by depth."""
    parts, curve = [], []
    for model, ds in results.items():
        if "sensitivity" in ds:
            columns = [by_depth(ds, name) for name in SHOWN]
            for n, depth in enumerate(ds["traced_depth"].values):
                parts.append([model, str(depth), *(interval(*(end[n] for end in column)) for column in columns)])
        for depth in ds["depth"].values:
            at = ds.sel(depth=depth)
            cells = [f"{float(at[name].mean()):.2f}" for name in ("log_p", "control", "exact")]
            curve.append([model, str(depth), str(int(at["place"])), *cells])
    shown = ("model", "depth", *(words for *_, words in SHOWN.values()))
    found = [
        Table("Sensitivity of the value's log odds (nat)", shown, parts),
        Table("Recall by depth", ("model", "depth", "token", "log p", "log p without key", "exact"), curve),
    ]
    return [table for table in found if table.rows]


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Log probability of the value and exact answers over depth: means over lists, with intervals."""

    def recalled(cell: Axes, ds: xr.Dataset, looks: Mapping[str, tuple[str, str]]) -> None:
        drawn = []
        for name, (label, color) in looks.items():
            mean, low, high = jackknife(lambda some: some.mean(0), ds[name].values, couples(ds))
            drawn.append(Series(label, mean, color, low, high, ds["fraction"].values))
        curves(cell, drawn)
        cell.set_xlim(-0.02, 1.02)
        cell.set_xlabel("depth of the pair, first to last")
        if "exact" in looks:
            cell.set_ylim(-0.03, 1.03)

    values = {"log_p": ("value", VERMILLION), "control": ("without key", GREY)}
    rows = [
        Panel("log p of the value (nat)", partial(recalled, looks=values)),
        Panel("exact answers", partial(recalled, looks={"exact": ("", VERMILLION)}), share=True),
    ]
    return panels(results, rows, CAPTION)


def _trial(model: Any, tokens: Any) -> xr.Dataset:
    how: dict[str, Any] = {"mechanism": 2, "mechanism_depths": 2, "profile_prompts": 1}
    return retrieval(model, pairs=8, contexts=4, candidates=4, **how)


MEASURE = Measure(
    name="retrieval",
    question="What does a model recall of a list, by the depth at which it stands?",
    compute=retrieval,
    options=Options,
    headlines=(
        Headline(FORMS["exact"], _exact, by_prompt=partial(by_list, name="exact")),
        *(Headline(FORMS[name], partial(by_list, name=name)) for name in ("log_p", "gain")),
        *(Headline(name, _by_depth, partial(of_curve, name=name), ratio=True) for name in ("primacy", "recency")),
        Headline("least at", _by_depth, least_at, jumps=True),
        Headline("what it says of recall", _statements),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    caption=CAPTION,
    prompted=False,
    without=("backend",),
    trials={"retrieval": _trial},
)
