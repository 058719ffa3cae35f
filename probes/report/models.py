"""Which models were measured, and what made each result: two tables, from attributes of results alone."""

from __future__ import annotations

import json
from typing import Any

import xarray as xr

from ..results.dataset import quickly, recorded
from ..results.folder import Collected
from ..results.tables import Table

HASH = 12  # characters of a hash that are shown
OF_TOYS = "toy"
MODEL_COLUMNS = ("model", "family", "blocks", "heads", "width", "position 0 holds", "weights", "measured")
PROVENANCE_COLUMNS = ("result", "command", "when (UTC)", "with", "on", "weights", "tokens")


def models(collected: Collected) -> Table:
    """Every model that something was measured on: what its configuration says, and which weights these are."""
    kinds: dict[str, list[str]] = {}
    for kind in collected:
        if kind.split("/")[0] != OF_TOYS and "/" not in kind:
            for name, ds in collected[kind].items():
                if "config" in ds.attrs:
                    kinds.setdefault(name, []).append(kind)
    return Table("Models", MODEL_COLUMNS, [_model(collected, name, measured) for name, measured in kinds.items()])


def _model(collected: Collected, name: str, kinds: list[str]) -> list[str]:
    results = [collected[kind][name] for kind in kinds]
    config: dict[str, Any] = json.loads(str(results[0].attrs["config"]))

    def first(*names: str) -> str:
        """The first of the names under which families keep the same fact."""
        return str(next((config[name] for name in names if config.get(name) is not None), "-"))

    hashes = dict.fromkeys(value[:HASH] for ds in results for value in pretrained_weights(ds))
    return [
        name,
        first("model_type"),
        first("num_hidden_layers", "n_layer", "num_layers"),
        first("num_attention_heads", "n_head", "num_heads"),
        first("hidden_size", "n_embd", "d_model"),
        next((_first(ds) for ds in results if "first_policy" in ds.attrs), "-"),
        ", ".join(hashes) or "-",
        ", ".join(kinds),
    ]


def _first(ds: xr.Dataset) -> str:
    policy = str(ds.attrs["first_policy"])
    token = ds.attrs.get("first_ids", ds.attrs.get("first_id"))
    return "text" if policy == "none" else f"{'BOS' if policy == 'bos' else 'a chosen token'}, id {token}"


def pretrained_weights(ds: xr.Dataset) -> list[str]:
    """The hash of the model's own weights, as far as the result is of these."""
    if "weights" in ds.coords and "condition" in ds.coords:
        ds = ds.isel(condition=ds["condition"].values == "pretrained")
    elif str(ds.attrs.get("condition", "pretrained")) != "pretrained":
        return []
    return [value for value in recorded(ds, "weights") if value]


def provenance(collected: Collected) -> Table:
    """What made every result."""
    rows = []
    for kind in collected:
        for name, ds in collected[kind].items():
            packages = [package for package in ("headwater", "torch", "transformers") if package in ds.attrs]
            place = recorded(ds, "hardware") or [v for key in ("backend", "dtype", "device") for v in recorded(ds, key)]
            rows.append(
                [
                    f"{kind}: {name}",
                    str(ds.attrs.get("command", "")) or "called from Python",
                    max(recorded(ds, "created"), default="").replace("T", " ").removesuffix("+00:00"),
                    ", ".join(f"{package} {ds.attrs[package]}" for package in packages),
                    ", ".join(dict.fromkeys(place)),
                    ", ".join(value[:HASH] for value in recorded(ds, "weights") if value),
                    str(ds.attrs.get("tokens_sha256", ""))[:HASH],
                ]
            )
    return Table("What made each result; hashes are SHA-256, of weights and of token ids", PROVENANCE_COLUMNS, rows)


def quick_remarks(collected: Collected) -> list[str]:
    """A sentence where some of the results are of a quick report: which, and how they are measured in full."""
    quick: dict[str, list[str]] = {}
    for kind in collected:
        for name, ds in collected[kind].items():
            if kind != "match" and quickly([ds]):  # a match is quick in a way of its own
                quick.setdefault(name, []).append(kind)
    which = "; ".join(f"{', '.join(kinds)} of {name}" for name, kinds in quick.items())
    return [f"Quick: few prompts, wide intervals ({which}). headwater report without --quick measures in full."] * bool(
        quick
    )
