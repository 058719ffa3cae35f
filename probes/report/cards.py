"""Which models were measured, and what made each result: facts for cards and the table of provenance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import xarray as xr

from ..claims.evidence import config
from ..results.dataset import drawn_from, quickly, recorded
from ..results.folder import Collected

OF_MODELS = ("jacobian", "theory", "sinks", "trajectory", "leakage", "bos-swap", "scalar", "match")
HASH = 12  # characters of a hash that are shown; the whole is in its title, or in the result


class Card(NamedTuple):
    """A model: what its configuration says, which weights these are, what was measured on it."""

    name: str
    facts: list[tuple[str, str]]
    weights: list[str]  # SHA-256
    kinds: list[str]


class Made(NamedTuple):
    """What made one result."""

    kind: str
    name: str
    file: str
    command: str
    created: str
    versions: str
    device: str
    weights: list[str]
    tokens: str


def cards(collected: Collected) -> list[Card]:
    """Every model that something was measured on, in the order of the kinds."""
    found: dict[str, list[str]] = {}
    for kind in OF_MODELS:
        for name in collected[kind]:
            found.setdefault(name, []).append(kind)
    return [_card(name, kinds, [collected[kind][name] for kind in kinds]) for name, kinds in found.items()]


def quick_remarks(collected: Collected) -> list[str]:
    """A sentence where some of the results are of a quick report: which, and how they are measured in full."""
    quick: dict[str, list[str]] = {}
    for kind in OF_MODELS[:-1]:  # a match is quick in a way of its own
        for name, ds in collected[kind].items():
            if quickly([ds]):
                quick.setdefault(name, []).append(kind)
    which = "; ".join(f"{', '.join(kinds)} of {name}" for name, kinds in quick.items())
    return [
        f"Quick measurement, few prompts and wide intervals: {which}. headwater report without --quick measures in full."
    ] * bool(quick)


def _card(name: str, kinds: list[str], results: list[xr.Dataset]) -> Card:
    known: dict[str, Any] = next((found for ds in results if (found := config(ds))), {})
    prompted = next((ds for ds in results if "first_policy" in ds.attrs), None)
    hashes = dict.fromkeys(value for ds in results for value in pretrained_weights(ds))
    revision = next((value for ds in results if (value := str(ds.attrs.get("revision", "null"))) != "null"), "")
    told = {
        "family": str(known.get("model_type", "")),
        "blocks": _number(known, "num_hidden_layers", "n_layer", "num_layers"),
        "width": _number(known, "hidden_size", "n_embd", "n_embed", "d_model"),
        "heads": _heads(known),
        "feed-forward": _number(known, "intermediate_size", "n_inner", "ffn_dim"),
        "vocabulary": _number(known, "vocab_size"),
        "longest context": _number(known, "max_position_embeddings", "n_positions", "max_seq_len"),
        "positions": positional(known),
        "attention": _mask(known),
        "position 0 holds": _first(prompted),
        "revision": revision,
        "fresh weights": drawn_from(dict(zip(kinds, results, strict=True))),
        "dequantized from": _file(results),
    }
    return Card(name, [(key, value) for key, value in told.items() if value], list(hashes), kinds)


def _file(results: list[xr.Dataset]) -> str:
    """The GGUF file that the weights came from, with its tensors by type; empty for others."""
    text = next((value for ds in results if (value := str(ds.attrs.get("weights_file", "")))), "")
    if not text:
        return ""
    file = json.loads(text)
    types = ", ".join(f"{number} {kind}" for kind, number in file["types"].items())
    return f"{file['name']} (tensors: {types}; SHA-256 {file['sha256'][:HASH]}...)"


def _value(config: Mapping[str, Any], *names: str) -> Any:
    """The first of the names under which families keep the same fact."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Mapping[str, Any], *names: str) -> str:
    value = _value(config, *names)
    return f"{value:,}" if isinstance(value, int) else ""


def _heads(config: Mapping[str, Any]) -> str:
    heads = _value(config, "num_attention_heads", "n_head", "num_heads")
    shared = _value(config, "num_key_value_heads")
    if heads is None:
        return ""
    return f"{heads}, keys and values of {shared}" if shared not in (None, heads) else str(heads)


def positional(config: Mapping[str, Any]) -> str:
    """The positional encoding in words, from a configuration; empty where it does not say."""
    rope = _value(config, "rope_parameters", "rope_scaling")
    rope = dict(rope) if isinstance(rope, Mapping) else {}
    bare = list(config.get("no_rope_layers") or []).count(0)  # 1 there means with rotation
    if bare:
        return f"{positional({**config, 'no_rope_layers': None})}; none in {bare} of {len(config['no_rope_layers'])} blocks"
    if rope and all(isinstance(one, Mapping) for one in rope.values()):  # by the type of block
        kinds = [f"{positional({'rope_parameters': one})} ({kind.replace('_', ' ')})" for kind, one in rope.items()]
        return "; ".join(dict.fromkeys(kinds))
    theta = rope.get("rope_theta", _value(config, "rope_theta", "rotary_emb_base"))
    if theta is not None or rope:
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        scaled = "" if kind == "default" else f", {kind} scaling"
        factor = rope.get("factor")
        scaled += f" by {factor:g}" if scaled and isinstance(factor, (int, float)) else ""
        base = f", base {theta:,.0f}" if isinstance(theta, (int, float)) else ""
        return f"RoPE{base}{scaled}"
    if config.get("alibi") or config.get("position_embedding_type") == "alibi" or config.get("model_type") == "bloom":
        return "ALiBi"
    return "learned" if config.get("model_type") in ("gpt2", "opt", "gpt_neo") else ""


def _mask(config: Mapping[str, Any]) -> str:
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return "causal" if config else ""
    layers = config.get("layer_types")
    if isinstance(layers, list) and "full_attention" in layers and "sliding_attention" in layers:
        return f"causal; window of {window} in {layers.count('sliding_attention')} of {len(layers)} blocks"
    return f"causal, window of {window}"


def _first(ds: xr.Dataset | None) -> str:
    if ds is None:
        return ""
    policy, token = str(ds.attrs["first_policy"]), ds.attrs.get("first_ids", ds.attrs.get("first_id"))
    if policy == "none":
        return "text (no BOS)"
    return f"{'BOS' if policy == 'bos' else 'a chosen token'}, id {token}"


def pretrained_weights(ds: xr.Dataset) -> list[str]:
    """The hash of the model's own weights, as far as the result is of these."""
    if "weights" in ds.coords and "condition" in ds.coords:
        ds = ds.isel(condition=ds["condition"].values == "pretrained")
    elif str(ds.attrs.get("condition", "pretrained")) != "pretrained":
        return []
    return [value for value in recorded(ds, "weights") if value]


def provenance(collected: Collected) -> list[Made]:
    """What made every result, as its attributes say."""
    return [_made(collected, kind, name, ds) for kind in collected for name, ds in collected[kind].items()]


def _made(collected: Collected, kind: str, name: str, ds: xr.Dataset) -> Made:
    file = collected.files.get((kind, name))
    created = max(recorded(ds, "created"), default="")
    packages = [one for one in ("headwater", "torch", "transformers", "python") if one in ds.attrs]
    place = recorded(ds, "hardware") or [value for key in ("backend", "dtype", "device") for value in recorded(ds, key)]
    return Made(
        kind,
        name,
        file="" if file is None else str(file.relative_to(collected.root)),
        command=str(ds.attrs.get("command", "")) or "called from Python",
        created=created.replace("T", " ").removesuffix("+00:00"),
        versions=" · ".join(f"{package} {ds.attrs[package]}" for package in packages),
        device=", ".join(dict.fromkeys(place)),
        weights=[value for value in recorded(ds, "weights") if value],
        tokens=str(ds.attrs.get("tokens_sha256", "")),
    )


def is_number(cell: str) -> bool:
    """Whether a table's cell is a number (perhaps with an interval or a unit of share), which is set to the right."""
    word = cell.strip().split(" ")[0].removesuffix("%").replace(",", "")
    if cell.strip() in ("-", "?", ""):
        return True
    try:
        return not math.isnan(float(word))
    except ValueError:
        return False
