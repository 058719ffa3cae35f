"""What the command line prints of a result of `bos-swap`: what every replacement removes, and what it does to behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import xarray as xr

from ..results.curves import estimate, relative_error
from ..results.dataset import options_of, quickly
from ..results.tables import Report, Table, estimated, number, variance

Results: TypeAlias = Mapping[str, xr.Dataset]


def measured(results: Results) -> str:
    """Prompts, their length, dtype and device; the same for all models but for the dtype of models in memory."""
    ds = next(iter(results.values()))
    found = [*quickly(results.values()), f"{ds.sizes['prompt']} prompt{'s' * (ds.sizes['prompt'] != 1)}"]
    found += [f"T = {ds.sizes['position']}", *(ds.attrs[name] for name in ("backend", "dtype", "device"))]
    return ", ".join(found)


def bos_report(results: Results) -> Report:
    """What every replacement removes per band, and what it does to sinks, loss and sensitivity."""
    both = {(name, replacement): ds for name, whole in results.items() for replacement, ds in _by_replacement(whole)}
    described = (
        f"{measured(results)}. Residual component: V(X), the log form of leakage in squared nats that would be left if "
        "the mask made none, mean over blocks and heads; position 0's logit, as far as it is the same for all queries (the "
        "constant sink), counts with the mask, or, left in, with the residual stream. Removed: 1 - after / before, negative "
        "where the swap adds to it, - where there is nothing before or position 0 is hidden; 95 % bootstrap intervals over "
        "documents, ? where it takes more prompts to know it. Sink rate of position 0, mean over blocks; loss in nats per "
        "token; KL of the next "
        "token from the model as it is, in nats; recall: of values in lists of keys and values, log p in nats and share of "
        "exact answers, 95 % over couples of lists; profile: "
        "|after / before - 1| of the Jacobian's, both means over positions from 1 on."
    )
    at = ("model", "replacement")
    tables = [
        Table(
            f"Residual component removed{said}",
            (*at, "band", "before", "after", "removed"),
            [
                [*names, str(band), *_removed(ds, sink, band)]
                for names, ds in both.items()
                for band in ds["band"].values
            ],
        )
        for sink, said in (("_steady", ""), ("", ", the constant sink left in"))
    ]
    effects = ["sink rate", "after", "loss", "after", "change", "KL", "profile"]
    recalled = all("recall_log_p_change" in ds for ds in both.values())
    effects += ["recall, log p", "after", "change", "exact", "after"] * recalled
    rows = [[*names, *_effects(ds), *(_recall(ds) if recalled else [])] for names, ds in both.items()]
    tables.append(Table("Sinks, loss, next token and profile, before and after", (*at, *effects), rows))
    tables += _recalled_by_depth(both)
    if all("removed_by" in ds for ds in both.values()):
        tables.append(_definitions(both))
    return Report("Position 0 swapped", described, tables, _published(both))


def _recalled_by_depth(both: Mapping[tuple[str, str], xr.Dataset]) -> list[Table]:
    """Log p of values by the depth of the pair; of results that hold it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for (model, replacement), ds in both.items():
        for name, when in (("-", "before"), (replacement, "after")):
            if (of := f"recall_by_depth_log_p_{when}") in ds:
                rows[model, name] = [number(value, ".2f") for value in ds[of]]
    depths = tuple(str(n) for n in range(max(map(len, rows.values()), default=0)))
    columns = ("model", "replacement", *depths)
    return [Table("Recall, log p by the depth of the pair", columns, [[*of, *row] for of, row in rows.items()])] * bool(
        rows
    )


def _definitions(both: Mapping[tuple[str, str], xr.Dataset]) -> Table:
    """What every definition of "removed" says, in the first band."""
    names = [str(name) for name in next(iter(both.values()))["definition"].values]
    rows = [
        [*of, *(estimated(ds.isel(band=0), "removed_by", ".0%", definition=name) for name in names)]
        for of, ds in both.items()
    ]
    band = next(iter(both.values()))["band"].values[0]
    return Table(f"Removed under every definition, band {band}", ("model", "replacement", *names), rows)


def _published(both: Mapping[tuple[str, str], xr.Dataset]) -> list[str]:
    """Which definitions and replacements remove [Ruscio]'s 40 % within a quarter, interval and all, in the first band."""
    found, asked = [], 0
    for (model, replacement), ds in both.items():
        for name in map(str, ds["definition"].values) if "removed_by" in ds else ():
            value, low, high = estimate(ds.isel(band=0), "removed_by", definition=name)
            asked += bool(np.isfinite(value))
            if low >= 0.3 and high <= 0.5:
                found.append(f"{model}, {replacement}, by {name}: {value:.0%} [{low:.0%}, {high:.0%}]")
    if not asked:
        return []
    return [
        f"[Ruscio]'s 40 %, within a quarter: of {asked} combinations of replacement and definition {len(found) or 'none'} "
        f"{'have' if len(found) > 1 else 'has'} its interval within 30 to 50 %{': ' * bool(found)}{'; '.join(found)}"
    ]


def _removed(ds: xr.Dataset, sink: str, band: str) -> list[str]:
    sizes = [estimated(ds, f"residual{sink}_{when}_of_model", said=variance, band=band) for when in ("before", "after")]
    return [*sizes, estimated(ds, f"removed{sink}_of_model", ".0%", band=band)]


def _effects(ds: xr.Dataset) -> list[str]:
    means = (
        float(ds[f"{name}_{when}"][first:].mean())  # a NaN at the last is left out
        for name, first in (("sink_rate", 0), ("loss", 1))
        for when in ("before", "after")
    )
    change = estimated(ds, "loss_change_of_model", "+.4f")
    kl = estimated(ds, "kl_of_model", ".4f") if "kl_of_model" in ds else "-"
    return [*(number(mean, ".3f") for mean in means), change, kl, _profile_change(ds)]


def _recall(ds: xr.Dataset) -> list[str]:
    names = ("log_p_before", "log_p_after", "log_p_change", "exact_before", "exact_after")
    return [estimated(ds, f"recall_{name}", ".2f") for name in names]


def _by_replacement(ds: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    if "replacement" not in ds.dims:
        return [(str(ds.attrs.get("replacement", options_of(ds)["replacement"])), ds)]
    return [(str(value), ds.sel(replacement=value)) for value in ds["replacement"].values]


def _profile_change(ds: xr.Dataset) -> str:
    if "sensitivity_before" not in ds:
        return "-"
    before, after = (ds[f"sensitivity_{when}"].values for when in ("before", "after"))
    return number(relative_error(after[1:], before[1:]), ".1%")  # at position 0 stands something else
