"""What `headwater decode` prints: R^2 of position by layer, and what a model does without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import xarray as xr

from ..measures.decode import erases_nothing
from ..results.curves import estimate
from ..results.dataset import options_of
from ..results.tables import Report, Table, estimated, number, variance
from .reports import measured

Results: TypeAlias = Mapping[str, xr.Dataset]
OUTCOMES = {
    "loss": "loss_change",
    "KL": "kl",
    "R^2 last": "r2_last",
    "log p of values": "recall_log_p_change",
    "exact": "recall_exact",
}


def decode_report(results: Results) -> Report:
    """R^2 of every layer beside its null, and what every erasure changes."""
    layers, outcomes, components, lines = [], [], [], []
    for name, ds in results.items():
        for layer in ds["layer"].values:
            layers.append([name, str(layer), *(estimated(ds, one, layer=layer) for one in ("r2", "r2_shuffled"))])
        lines.append(_best(name, ds))
        if why := ds.attrs.get("not_measured"):
            lines.append(f"{name}: not measured: {why}")
        for done in map(str, ds["intervention"].values) if "intervention" in ds.coords else ():
            at = ds.sel(intervention=done)
            sizes = [_over_layers(at[one]) for one in ("rank", "removed")]
            if nothing := erases_nothing(at):
                lines.append(f"{name}: {done}: no direction is more than noise on these documents; give more prompts")
            cells = [estimated(at, one) if one in ds and not nothing else "-" for one in OUTCOMES.values()]
            outcomes.append([name, done, *sizes, *cells])
            if (
                done.startswith("direction")
                and (control := done.replace("direction", "shuffled")) in ds["intervention"].values
            ):
                low, high = estimate(at, "loss_change")[1], estimate(ds.sel(intervention=control), "loss_change")[2]
                if not low > high:
                    lines.append(f"{name}: {done}: costs not clearly more than its control ({control}): no sign of use")
            for band in ds["band"].values if "residual" in ds else ():
                left = estimated(at, "residual", said=variance, band=band)
                components.append([name, done, str(band), left, estimated(at, "residual_change", band=band)])
    options = options_of(next(iter(results.values())))
    described = (
        f"{measured(results)}. R^2 of log(1 + i) by ridge regression on the stream, on documents other than those it was "
        "fitted on; layer l is what block l reads; null: positions shuffled within prompts. Erased before a block, or all "
        f"of them, at every position but 0: means, the span of the position means (at most {options['rank']} dimensions, as "
        "many as are more than noise); random, as many random ones; direction, the one that moves with log(1 + i) (LEACE); "
        "shuffled, what the same estimate gives of shuffled positions; all estimated on other documents. Rank and removed: "
        "dimensions, and share of the stream's variance, mean over the blocks. Loss and log p: change, in nat; R^2 last: at "
        "the last layer, by readers fitted anew on fewer documents; "
        "95 % intervals over documents, of recall over couples of lists."
    )
    tables = [Table("What each erasure changes", ("model", "erased", "rank", "removed", *OUTCOMES), outcomes)] * bool(
        outcomes
    )
    v_x = ("model", "erased", "band", "V(X) (nat^2)", "change")
    tables += [Table("Residual component of leakage, without the constant sink", v_x, components)] * bool(components)
    tables.append(Table("Position in the stream", ("model", "layer", "R^2", "null"), layers))
    return Report("Is what the stream knows of position used?", described, tables, lines)


def _over_layers(values: xr.DataArray) -> str:
    known = values.values[np.isfinite(values.values)]
    return number(known.mean()) if known.size else "-"


def _best(name: str, ds: xr.Dataset) -> str:
    """Where position is read best, beside the embeddings and the last layer."""
    best, last = int(ds["r2"].argmax("layer")), int(ds["layer"].values[-1])
    return (
        f"{name}: R^2 {estimated(ds, 'r2', layer=0)} of the embeddings, at most {estimated(ds, 'r2', layer=best)} (layer "
        f"{best}), {estimated(ds, 'r2', layer=last)} at the last layer"
    )
