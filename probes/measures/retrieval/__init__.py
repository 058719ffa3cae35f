"""What a model recalls of a list of keys and values, by the depth at which the pair stands (`compute`, `mechanism`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import xarray as xr

from ... import options
from ...data.recall import Rung
from ...measure import Headline, Measure
from ...results.curves import ESTIMATE
from ...results.dataset import options_of
from ...results.tables import Table, interval, number
from ...results.ushape import SHORTEST
from ..jacobian import of_curve, trough
from . import mechanism_numbers
from .chart import CAPTION, chart
from .compute import retrieval as retrieval
from .recall_numbers import Recall, repeats, shape

SHOWN = ("pair", "control", "others", "position 0", "through_first", "norm")
BY_PART = ("depth", "pair", "key not there", "other pairs", "position 0", "through attention to position 0", "norm")
FORMS = {"log_p": "log p (nat)", "gain": "gain (nat)", "exact": "exact answers"}


@dataclass(frozen=True)
class Options(options.Options):
    """Measure what a model recalls of a list of keys and values, by the depth at which the pair stands.

    Writes retrieval.nc, retrieval.md and the chart: recall by depth, with the first and the last pairs against the middle.
    Lists get harder until the model answers no more than nine of ten questions, unless --pairs, --keys and --digits say how
    hard they are. There is no --backend: lists run once, and questions behind them, through the modules of transformers. If
    interrupted, the same command resumes.

    With --mechanism it is also measured, in some of the lists, what the value's log odds depend on: the pair asked for, the
    other pairs, position 0, the paths through attention to it; and what that says of recall by depth.

    Examples:
      headwater retrieval smollm2-135m --pairs 36 --contexts 24
      headwater retrieval smollm2-135m --pairs 36 --mechanism 24
      headwater retrieval ./checkpoint --template json --chat
      headwater retrieval Qwen/Qwen2.5-0.5B --pairs 144 --keys alike --depths 12
    """

    pairs: int | None = options.option("Pairs of a list; if not given, lists get harder, from 12 pairs to 288.")
    keys: Literal["apart", "alike"] | None = options.option("Different nouns, or colours and nouns that recur.")
    digits: int | None = options.option("Digits of a value, 2 to 15; 0: values are nouns.")
    contexts: int = options.option("Lists, an even number: each is the control of another one.", 100)
    orders: int = options.option(
        "Orders in which each couple of lists is asked; contexts is a multiple of twice as many.", 1
    )
    depths: int | None = options.option("Pairs asked for in each list, evenly spaced; all if not given.")
    template: str = options.option("sentences, json, reworded, or announced (keys before the list).", "sentences")
    chat: bool = options.flag(
        "--chat", "The list is the user's, the answer the assistant's, by the model's chat template."
    )
    candidates: int = options.option(
        "Values whose probabilities are ranked for each question; 1: none, which is faster.", 36
    )
    pilot: int = options.option("Lists that are tried before lists get harder.", 8)
    mechanism: int = options.option(
        "Lists of which it is also measured what the value's log odds depend on; 0: none.", 0
    )
    mechanism_depths: int = options.option("Pairs of each of these lists that are asked for, evenly spaced.", 5)
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
    found = mechanism_numbers.statements(ds)
    coords = {"number": [one.name for one in found], "estimate": list(ESTIMATE)}
    return xr.DataArray([list(one.number[:3]) for one in found], coords, ("number", "estimate"))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Whether recall by depth is a U, and what was asked."""
    lines = []
    for model, ds in results.items():
        chosen = options_of(ds)
        rung = Rung(chosen["pairs"], chosen["keys"], chosen["digits"])
        lines.append(
            f"{model}: of {rung}, {interval(*shape(ds).exact[:3])} are answered exactly; {_verdict(shape(ds))}."
        )
    return lines


def _verdict(recall: Recall) -> str:
    """Whether recall is a U, in a sentence."""
    sides = {"first pairs": recall.primacy, "last pair": recall.recency}
    if any(np.isnan(side.low) for side in sides.values()):
        return f"no U can be told: that takes {SHORTEST} depths and two couples of lists (with other pairs), or more"
    ways = {name: "better" if side.low > 1 else "worse" if side.high < 1 else "" for name, side in sides.items()}
    parts = [f"the {name} {way} than the middle" for name, way in ways.items() if way]
    unclear = [f"the {name}" for name, way in ways.items() if not way]
    parts += [f"no clear difference between {' or '.join(unclear)} and the middle"] * bool(unclear)
    return f"recall: {', '.join(parts)}: {'a U' if set(ways.values()) == {'better'} else 'not clearly a U'}"


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Recall by depth, the ladder, repeats, and what the log odds depend on with what that says."""
    curve, more, parts, verdicts = [], [], [], []
    for model, ds in results.items():
        chosen = options_of(ds)
        for depth in ds["depth"].values:
            at = ds.sel(depth=depth)
            cells = [f"{float(at[one].mean()):.2f}" for one in ("log_p", "control", "exact")]
            curve.append([model, str(depth), str(int(at["place"])), *cells])
        if "pair" in ds and ds.sizes["depth"] == chosen["pairs"] and chosen.get("orders", 1) > 1:
            said = "correlation of a pair's log p with its own in another order, depth means taken out"
            more.append([model, said, interval(*repeats(ds)[:3])])
        more += [
            [model, f"exact in the pilot, {rung}", number(share, ".2f")]
            for rung, share in zip(ds["rung"].values, ds["pilot_exact"].values, strict=True)
        ]
        if "sensitivity" in ds:
            columns = [mechanism_numbers.by_depth(ds, one) for one in SHOWN]
            for n, depth in enumerate(ds["traced_depth"].values):
                parts.append([model, str(depth), *(interval(*(end[n] for end in column)) for column in columns)])
            statements = mechanism_numbers.statements(ds)
            verdicts += [[model, one.name, interval(*one.number[:3]), one.verdict] for one in statements]
    found = [
        Table("What it says of recall", ("model", "number", "value", "verdict"), verdicts),
        Table("Sensitivity of the value's log odds (nat)", ("model", *BY_PART), parts),
        Table("Lists", ("model", "number", "value"), more),
        Table("Recall by depth", ("model", "depth", "token", "log p", "log p without key", "exact"), curve),
    ]
    return [table for table in found if table.rows]


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
