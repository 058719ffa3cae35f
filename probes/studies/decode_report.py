"""The table of `headwater decode`: what the stream says of position, and whether it is used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import xarray as xr

from ..results.curves import estimate
from ..results.dataset import options_of
from ..results.tables import Report, Table, estimated

SHOWN = {
    "loss change": ("loss_change", "+.4f"),
    "KL": ("kl", ".4f"),
    "R^2 after": ("r2_after", ".3f"),
    "V(X)": ("residual_before", ".4f"),
    "V(X) after": ("residual_after", ".4f"),
    "V(X) change": ("residual_change", "+.4f"),
    "recall, log p": ("recall_log_p_change", "+.2f"),
    "exact": ("recall_exact_change", "+.2f"),
}


def decode_report(results: Mapping[str, xr.Dataset]) -> Report:
    """R^2 by layer, what each erasure does, and in a sentence what is best decoded where."""
    decoded, erased, lines = [], [], []
    for name, ds in results.items():
        for layer in ds["layer"].values:
            say = partial(estimated, ds, layer=layer)
            decoded.append([name, str(layer), say("r2", ".3f"), say("r2_shuffled", ".3f")])
        for what in map(str, ds["erasure"].values):
            cells = [
                estimated(ds, variable, form, erasure=what) if variable in ds else "-"
                for variable, form in SHOWN.values()
            ]
            erased.append([name, what, *cells])
        best = int(ds["layer"].values[int(np.argmax(ds["r2"].values))])
        said = estimated(ds, "r2", ".3f", layer=best)
        lines.append(f"{name}: position is decoded best from layer {best}, R^2 {said}")
        lines.append(f"{name}: {_used(ds)}")
    ds = next(iter(results.values()))
    options = options_of(ds)
    where = "every block" if options["layer"] is None else f"block {options['layer']}"
    described = (
        f"{ds.sizes['prompt']} prompts, T = {ds.sizes['position']}, {ds.attrs['backend']}, {ds.attrs['dtype']}, "
        f"{ds.attrs['device']}. R^2: share of the variance of log(1 + i), i >= 1, that a ridge regression on the stream "
        "predicts in documents that it has not seen; permuted: the same with every prompt's positions permuted. Erased at "
        f"{where}: the {options['rank']} leading directions of the position means, those of means over permuted positions, "
        "as many random ones, or log(1 + i) alone by least squares. Loss, KL and V(X) of leakage in nats (V(X) in squared "
        "nats), recall: change of log p and of the share of exact answers in lists. 95 % intervals over documents, of "
        "recall over couples of lists."
    )
    tables = [
        Table("Position in the stream", ("model", "layer", "R^2", "R^2, permuted"), decoded),
        Table("Position erased", ("model", "erased", *SHOWN), erased),
    ]
    return Report("What the stream knows of position, and whether it is used", described, tables, lines)


def _used(ds: xr.Dataset) -> str:
    """Whether erasing position costs more than erasing as much text that holds none."""
    means, drawn = (estimate(ds, "loss_change", erasure=what) for what in ("means", "permuted"))
    more = "more than" if means[1] > drawn[2] else "less than" if means[2] < drawn[1] else "about as much as"
    alone, low, high = estimate(ds, "loss_change", erasure="direction")
    single = f"log(1 + i) alone changes the loss by {alone:+.4f} [{low:+.4f}, {high:+.4f}] nat"
    return f"erasing the span of the position means costs {more} erasing that of permuted positions; {single}"
