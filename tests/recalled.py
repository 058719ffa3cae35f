"""Small results of recall and of interventions, for the ledger's rules."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr

# As much of a configuration as tells that a model is no tiny one.
LARGE = {"hidden_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32, "vocab_size": 49152}


def real(**more: str) -> dict[str, str]:
    """Attributes of a result of a real language model."""
    return {"config": json.dumps(LARGE), "condition": "pretrained"} | more


def recalled(first: float, last: float) -> xr.Dataset:
    """Recall of 20 lists of 12 pairs, at either end so much above the middle, with a little noise."""
    noise = 0.01 * np.random.default_rng(0).standard_normal((20, 12))
    values = noise + np.where(np.arange(12) == 0, 0.3 * first, np.where(np.arange(12) == 11, 0.3 * last, 0.0)) + 0.5
    variables = {name: (("context", "depth"), values) for name in ("exact", "log_p")}
    attrs = real(options=json.dumps({"pairs": 12, "keys": "apart"}), command="headwater retrieval x")
    return xr.Dataset(variables, {"context": range(20), "depth": range(12)}, attrs)


def traced(by: float, tells: float = 1.0) -> xr.Dataset:
    """A result with a mechanism: gain rises (or falls) with every profile, sensitivity with exact answers."""
    draw, depth = np.random.default_rng(0), np.arange(12)
    noise = 0.01 * draw.standard_normal((20, 12))
    exact = (draw.random((20, 12)) < 0.5).astype(float)
    own = tells * (exact[:12] - 0.5) + 0.01 * draw.standard_normal((12, 12)) + 2.0
    values: dict[str, Any] = {
        "gain": (("context", "depth"), noise + by * depth[::-1] / 12),
        "log_p": (("context", "depth"), noise),
        "exact": (("context", "depth"), exact),
        "sensitivity": (("traced", "traced_depth", "part"), own[:, :, None]),
        "place": (("depth",), 12 * depth),
        "profile": (("depth",), 1 / (1.0 + depth)),
        "profile_init": (("depth",), 1 / (1.0 + depth)),
    }
    coords: dict[str, Any] = {"context": range(20), "depth": depth, "traced": range(12), "traced_depth": depth}
    attrs = real(command="headwater retrieval x") | {"query": 150}
    return xr.Dataset(values, coords | {"part": ["pair"]}, attrs)


def interventions(**changes: float) -> xr.Dataset:
    """Change of loss and KL under interventions: 1 nat with an interval of a tenth, where no other is given."""
    names = ["drawn", "without-0", "held-log-z", "constant-sink"]
    values = np.array([changes.get(name.replace("-", "_"), 1.0) for name in names])
    found: dict[str, Any] = {}
    for name in ("loss_change_of_model", "kl_of_model"):
        for end, by in (("", 0.0), ("_low", -0.1), ("_high", 0.1)):
            found[f"{name}{end}"] = (("replacement",), values + by)
    return xr.Dataset(found, {"replacement": names}, real(command="headwater bos-swap x"))
