"""A head in detail: what a click on the page's heat map of heads shows."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from ..measures.roles import role_names, withheld
from ..measures.sinks import RULES
from ..results.dataset import recorded

Results: TypeAlias = Mapping[str, xr.Dataset]

IN_NATS = ("effect", "loss_change")
NAMES = {
    "effect": "effect: KL of the next token without what comes from 0 (nat)",
    "loss_change": "change of the loss without it (nat)",
    "attends": "attends: mean weight on position 0",
    "written": "written: size of what comes from 0 beside the stream",
    "output": "size of the whole output beside the stream",
    "output_own": "size of the output beside its own with 0 hidden",
    "reads": "reads: size of what comes from 0 against the output",
    "reads_along": "part of the output along what comes from 0",
    "reacts": "reacts: attention to other keys changed by a swap at 0",
    "reacts_among_others": "the same among the other keys alone",
    "reacts_output": "size of the output's change by that swap beside the stream",
}


def heads_data(results: Results) -> dict[str, Any]:
    """By model: numbers of every head by "block.head", patterns as bytes in base64, and which command keeps more of them."""
    found = {}
    for name, ds in results.items():
        patterns = {
            f"{layer}.{head}": {"size": len(values), "bytes": base64.b64encode(values.tobytes()).decode("ascii")}
            for (layer, head), values in pattern_bytes(ds).items()
        }
        numbers = {f"{layer}.{head}": rows for (layer, head), rows in head_numbers(ds).items()}
        more = shlex.join(["headwater", "sinks", loaded_from(ds, name), "--pictures", str(ds["attends"].size)])
        best = ds["attends"].transpose("layer", "head").stack(cell=("layer", "head")).argmax("cell").item()
        layer, head = divmod(best, ds.sizes["head"])
        first = f"{ds['layer'].values[layer]}.{ds['head'].values[head]}"
        found[name] = {"heads": numbers, "patterns": patterns, "more": more, "first": first}
    return found


def pattern_bytes(ds: xr.Dataset) -> dict[tuple[int, int], np.ndarray]:
    """The patterns that a result of `sinks` holds, by (block, head): square roots of weights as bytes [query, key].

    A byte holds small weights finely that way: w = (b / 255)^2.
    """
    if "pattern" not in ds or not ds.sizes.get("picture"):
        return {}
    found = {}
    for n in range(ds.sizes["picture"]):
        one = ds.isel(picture=n)
        weights = np.clip(np.nan_to_num(one["pattern"].values.astype(np.float64)), 0, 1)
        place = int(one["picture_layer"]), int(one["picture_head"])
        found[place] = np.round(255 * np.sqrt(weights)).astype(np.uint8)
    return found


def head_numbers(ds: xr.Dataset) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """What a result of `sinks` says of every head, by (block, head): names and values as text."""
    scalars = [name for name in NAMES if name in ds]
    roles, ending = role_names(ds), [f"{name}_{end}" for name in NAMES for end in ("low", "high")]
    ending = {name for name in ending if name in ds}
    alpha = ds["alpha"].mean("prompt") if "prompt" in ds["alpha"].dims else ds["alpha"]
    found: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for layer, block in enumerate(ds["layer"].values.tolist()):
        for number, head in enumerate(ds["head"].values.tolist()):
            at = ds.isel(layer=layer, head=number)
            rows = []
            if "has_role" in ds:
                sure = "" if int(at["role_sure"]) else ", not surely"
                rows.append(("role at position 0", f"{roles[layer, number]}{sure}"))
            elif withheld(ds):
                rows.append(("role at position 0", withheld(ds)))
            for name in scalars:
                said = f"{float(at[name]):.3g}" if name in IN_NATS else f"{float(at[name]):.3f}"
                if f"{name}_low" in ending and np.isfinite(float(at[f"{name}_low"])):
                    said += f" [{float(at[f'{name}_low']):.3g}, {float(at[f'{name}_high']):.3g}]"
                rows.append((NAMES[name], said))
            for what, name in (("value_norm", "value"), ("written_norm", "head's output"), ("key_norm", "key")):
                sink, rest = (float(at[what].sel(place=place)) for place in ("sink", "rest"))
                ratio = f"{sink / rest:.3g}" if rest else "-"
                rows.append((f"size of the {name} at 0 / elsewhere", ratio))
            weights = alpha.isel(layer=layer, head=number).values.tolist()
            shown = zip(ds["key"].values.tolist(), weights, strict=True)
            listed = ", ".join(f"{key}: {value:.3f}" for key, value in list(shown)[:4])
            rows.append(("mean weight α by key", listed))
            chosen = [rule for rule in RULES if int(at["selected"].sel(rule=rule))]
            rows.append(("selected by the rules", ", ".join(chosen) or "none"))
            found[int(block), int(head)] = rows
    return found


def loaded_from(ds: xr.Dataset, name: str) -> str:
    """How the model of a result was named when it was loaded; its own name where the result does not say."""
    return next(iter(recorded(ds, "loaded_from")), name)
