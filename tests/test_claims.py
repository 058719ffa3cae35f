"""Published claims: every rule both ways on small results, real results end to end, missing ones, the table."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import families
import numpy as np
import pytest
import xarray as xr
from pages import held

import probes
from probes.claims import liu
from probes.claims.claim import SLUG, Claim, Statement, claims_table, merged, origin
from probes.claims.rules import CONTROLLED
from probes.claims.sources import STATED, claims, stated
from probes.data.prompts import draw
from probes.measures.leakage import CELLS, PARTS, SOURCES
from probes.measures.sinks import RULES
from probes.results.collected import Collected, collect
from probes.results.dataset import load, save
from probes.results.tables import write_report
from probes.results.theory_map import CURVES
from probes.studies.atlas import Place, atlas
from probes.studies.study import Settings, Theory, study
from probes.theory.cesaro import cesaro_bins

LENGTH = 40
NTK, PLAIN, WINDOW = CONTROLLED
BANDS = ("9-31", "32-63")


def given(**kinds: Mapping[str, xr.Dataset]) -> Collected:
    """Results as `collect` gives them; "code__bos_swap" is the kind "code/bos-swap"."""
    named = {kind.replace("__", "/").replace("_", "-"): dict(results) for kind, results in kinds.items()}
    return Collected(Path("reports"), named)


# As much of a configuration as tells that a model is no tiny one.
LARGE = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "vocab_size": 49152}
LARGE |= {"intermediate_size": 1536, "num_key_value_heads": 3, "tie_word_embeddings": True}


def real(**more: str) -> dict[str, str]:
    """Attributes of a result of a real language model."""
    return {"config": json.dumps(LARGE), "condition": "pretrained"} | more


def thrice(model: str, make: Any) -> dict[str, xr.Dataset]:
    """Three runs of controlled training, of results made by a factor."""
    return {name: make(by) for name, by in ((model, 1.0), (f"{model}-seed1", 0.95), (f"runs/{model}-seed2", 1.05))}


def judged(name: str, collected: Collected) -> Claim:
    (row,) = (row for row in claims(collected) if row.id == name)
    return row


# ------------------------------------------------------------------------------------------------ small results by hand


def curve(first: float = 10.0, last: float = 10.0, *, length: int = LENGTH, fall: float = 2.0) -> np.ndarray:
    """Falls from `first` to 1, and ends in `last`."""
    values = 1 + (first - 1) * np.exp(-np.arange(length) / fall)
    values[-1] = last
    return values


VALLEY = curve(3, 5) + np.abs(np.arange(LENGTH) - LENGTH // 2) / LENGTH  # least in the middle
U, FLAT = curve(), np.ones(LENGTH)


def profile(command: Any = "headwater jacobian x", config: Any = None, **conditions: Any) -> xr.Dataset:
    """A result of `jacobian` or `theory`: by condition a curve, or curves by variable; three prompts, two fresh seeds."""
    names = list(conditions)
    each = {name: value if isinstance(value, dict) else {"sensitivity": value} for name, value in conditions.items()}
    variables: dict[str, Any] = {}
    for variable in dict.fromkeys(one for curves in each.values() for one in curves):
        values = np.full((len(names), 2, 3, LENGTH), np.nan)
        for n, name in enumerate(names):
            seeds = 1 if name == "pretrained" else 2
            values[n, :seeds] = each[name][variable] * np.array([0.9, 1.0, 1.1])[:, None]
        variables[variable] = (("condition", "seed", "prompt", "position"), values)
    if "theory_cesaro" in variables:
        variables["theory_cesaro"] = (("condition", "position"), variables["theory_cesaro"][1][:, 0, 1])
    attrs = {
        "command": command,
        "options": json.dumps({"query": LENGTH - 1}),
        "config": json.dumps(LARGE | (config or {})),
    }
    return xr.Dataset(variables, {"condition": names, "seed": [0, 1]}, attrs | {"tokens_sha256": "same"})


def place(measured: Any = U, **given: Any) -> dict[str, Any]:
    """One of a map; a kernel that is right, and N^L that is not, where they are not given."""
    usual = {"group": "depth", "strength": 0.05, "width": 256, "blocks": 12, "residual_scale": 1.0, "rope": True}
    curves = {"score_path": measured, "cesaro": measured**1.2, "value": measured}
    curves |= {"config": measured, "amplitudes": measured**1.2}
    return usual | {"name": "", "window": 0, "alpha": 0.3, "measured": measured} | curves | given


def atlas_of(*found: dict[str, Any]) -> dict[str, xr.Dataset]:
    longest = max(len(one["measured"]) for one in found)
    variables: dict[str, Any] = {"alpha": (("place",), [one["alpha"] for one in found])}
    for name in CURVES:
        values = np.full((len(found), longest), np.nan)
        for row, one in zip(values, found, strict=True):
            row[: len(one["measured"])] = one.get(name, np.nan)
        variables[name] = (("place", "position"), values)
    fields = ("group", "strength", "width", "blocks", "residual_scale", "rope", "name", "window")
    coords: dict[str, Any] = {field: (("place",), [one[field] for one in found]) for field in fields}
    coords["length"] = (("place",), [len(one["measured"]) for one in found])
    coords["label"] = (("place",), [f"place {n}" for n in range(len(found))])
    return {"map": xr.Dataset(variables, coords, {"command": "headwater map", "measurement": "map"})}


def usual(**both: Any) -> Collected:
    """A map of GPT-2 and Qwen2.5-0.5B alone."""
    return given(map=atlas_of(*(place(group="model", name=name, **both) for name in ("GPT-2", "Qwen2.5-0.5B"))))


def around(variables: dict[str, Any], name: str, dims: tuple[str, ...], values: Any, off: float = 0.1) -> None:
    """A variable with an interval of `off` of its size to either side."""
    values = np.asarray(values, dtype=float)
    variables[name] = (dims, values)
    variables[f"{name}_low"] = (dims, values - off * np.abs(values))
    variables[f"{name}_high"] = (dims, values + off * np.abs(values))


def leaks(
    *, total: float = 0.05, mask: float = 0.04, stream: Any = 0.02, share: float = 0.3, left: float = 0.0, **attrs: str
) -> xr.Dataset:
    """A result of `leakage` in its early band; `stream` is V(X) of the model, or by block."""
    by_block = np.broadcast_to(np.atleast_1d(stream), 3) if np.ndim(stream) == 0 else np.asarray(stream)
    made: dict[str, Any] = {"log_neither": (("layer",), np.full(len(by_block), left))}
    bands = np.ones(len(BANDS))
    around(made, "log_form_of_model", ("part", "band"), np.outer([total, 0.0, 2 * mask, 0.0, 0.0], bands))
    around(made, "log_source_of_model", ("source", "band"), np.outer([mask, total - mask, 0.0], bands))
    around(made, "log_share_of_model", ("source", "band"), np.outer([1 - share, share, 0.0], bands))
    for kind in ("log_", "steady_"):
        around(made, f"{kind}stream_of_model", ("band",), by_block.mean() * bands)
    parts = [total * (1 - share), total * share, 0.0]
    around(made, "steady_source_of_model", ("source", "band"), np.outer(parts, bands))
    blocks = np.outer(by_block, bands)
    if np.ndim(stream) == 0:
        blocks[0] = 0.0
    for kind in ("log_", "steady_"):
        around(made, f"{kind}stream_by_block", ("layer", "band"), blocks)
    around(made, "log_sink_by_block", ("layer", "band"), np.zeros_like(blocks))
    around(made, "weight_form_of_model", ("cell", "band"), np.outer([1e-4, 0, 0, 0], bands))
    around(made, "weight_source_of_model", ("source", "band"), np.outer([6e-5, 3e-5, 1e-5], bands))
    around(made, "weight_share_of_model", ("source", "band"), np.outer([0.6, 0.3, 0.1], bands))
    coords = {"part": list(PARTS), "source": list(SOURCES), "cell": list(CELLS), "band": list(BANDS)}
    return xr.Dataset(made, coords | {"layer": range(len(by_block))}, real(command="headwater leakage", **attrs))


def swap(
    removed: Mapping[str, float],
    *,
    later: float = 0.2,
    forms: float = 0.4,
    total: float = 2.0,
    off: float = 0.1,
    first: str = "bos",
) -> xr.Dataset:
    """A result of `bos_swap`: what replacements remove early and later, by other definitions, and the total after."""
    made: dict[str, Any] = {}
    for kind in ("", "steady_"):
        fractions = [[one, later] for one in removed.values()]
        around(made, f"removed_{kind}of_model", ("replacement", "band"), fractions, off)
    for when, value in (("before", 1.0), ("after", 1 - forms)):
        made[f"residual_steady_{when}"] = (("replacement", "layer", "band"), np.full((len(removed), 2, 2), value))
    ones = np.ones((len(removed), len(PARTS), 2, len(BANDS)))
    dims = ("replacement", "part", "layer", "band")
    made["leakage_before"], after = (dims, ones), ones * (1 - forms)
    after[:, 0] = total
    made["leakage_after"] = (dims, after)
    around(made, "leakage_change", dims, after - ones)
    for name in ("source", "weight"):
        shape = (len(removed), len(SOURCES), 2, len(BANDS))
        for when, value in (("before", -1.0), ("after", -0.5)):  # below 0: no fraction to take
            made[f"{name}_{when}"] = (("replacement", "source", "layer", "band"), np.full(shape, value))
    coords = {"replacement": list(removed), "part": list(PARTS), "source": list(SOURCES), "band": list(BANDS)}
    return xr.Dataset(made, coords, real(command="headwater bos-swap x", first_policy=first))


def followed(
    *,
    change: float = 0.0,
    cosine: float = 0.1,
    ratio: float = 5.0,
    massive: float = 1.0,
    first: Any = ("bos", "text"),
) -> xr.Dataset:
    shape = (len(first), 3)
    made: dict[str, Any] = {
        "later_difference": (("first", "layer"), np.full(shape, change)),
        **{f"cosine{end}": (("place", "layer"), np.full((1, 3), cosine)) for end in ("", "_low", "_high")},
        "norm_first": (("first", "layer"), np.full(shape, ratio)),
        "norm_others": (("first", "layer"), np.ones(shape)),
        "massive": (("first", "layer", "rule"), np.full((*shape, 2), massive)),
        "top_ratio": (("first", "layer", "rank"), np.full((*shape, 1), 2000.0)),
    }
    return xr.Dataset(made, {"first": list(first), "place": ["position 0"]}, real(command="headwater trajectory x"))


def sunk(
    rate: float = 0.5,
    other: float = 0.0,
    *,
    over: float = 0.2,
    length: int = 64,
    bos: bool = True,
    window: int | None = None,
    value: float = 0.2,
    key: float = 0.5,
    reads: float = 0.1,
    attending: bool = True,
    reading: bool = True,
    reacting: bool = True,
) -> xr.Dataset:
    """A result of `sinks`: keys 0 and 1 of two heads in two blocks, of which `rate` are sinks."""  # fmt: skip
    alpha = np.zeros((4, 2, 5, 2))
    by_head = alpha.reshape(4, 10, 2)
    by_head[...] = [0.05, 0.02]
    for at, share in enumerate((rate, other)):  # of the heads, in every prompt alike
        by_head[:, : round(10 * share), at] = 0.6
    flags = np.zeros((len(RULES), 2, 5), np.int8)
    flags[:, 0, 0] = [attending, reading, reacting, reading]
    norms = np.ones((2, 5, 2))
    made: dict[str, Any] = {
        "alpha": (("prompt", "layer", "head", "key"), alpha),
        "sink_rate_of_model": (("key",), [(alpha[..., 0] > 0.3).mean(), other]),
        "over_tau_of_model": (("key",), [over, 0.1]),
        "uniform": (("layer", "key"), np.full((2, 2), 0.06)),
        "attends": (("layer", "head"), np.full((2, 5), 0.4)),
        "reads": (("layer", "head"), np.full((2, 5), reads)),
        **{
            f"{name}{end}": (("layer", "head"), np.full((2, 5), value + by))
            for name, value in (("written", 0.2 if reading else 0.05), ("reacts", 0.2 if reacting else 0.05))
            for end, by in (("", 0.0), ("_low", -0.01), ("_high", 0.01))
        },
        "selected": (("rule", "layer", "head"), flags),
        "value_norm": (("layer", "head", "place"), norms * [value, 1]),
        "key_norm": (("layer", "head", "place"), norms * [key, 1]),
        "tokens": (("prompt", "position"), np.zeros((4, length), np.int64)),
    }
    attrs = real(command="headwater sinks x", options='{"threshold": 0.3}', first_policy="bos" if bos else "none")
    attrs["config"] = json.dumps(LARGE | {"sliding_window": window})
    return xr.Dataset(made, {"key": [0, 1], "rule": list(RULES), "place": ["sink", "rest"]}, attrs)


# ----------------------------------------------------------------------------------------------- every rule, both ways

HUB = ("meta-llama/Meta-Llama-3-8B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-Coder-7B")
HALF = ({"strength": 0.36}, {"strength": 0.36, "rope": False, "group": "no RoPE"})


def trio(**by_name: Any) -> Collected:
    """Three runs of each controlled model; "_0" to "_2" are V(X) of theirs in the order of `CONTROLLED`."""
    streams = {NTK: 0.01, PLAIN: 0.02, WINDOW: 0.04} | {CONTROLLED[int(n[1])]: value for n, value in by_name.items()}
    found: dict[str, xr.Dataset] = {}
    for name, value in streams.items():
        found |= thrice(name, lambda by, value=value: leaks(mask=0.04 * by, stream=np.multiply(value, by)))
    own = {name: ds for name, ds in found.items() if name in CONTROLLED}
    return given(leakage=own, controlled__leakage={name: ds for name, ds in found.items() if name not in own})


def theory(condition: str, kernel: float, cesaro: float, value: float = 1.0) -> Collected:
    curves = {
        "sensitivity": U,
        "theory_score_path": U**kernel,
        "theory_values": U,
        "theory_cesaro": U**cesaro,
        "value": value * U,
    }
    return given(theory={"x": profile(**{condition: curves})})


def deep(primacy: Mapping[int, float], strength: float = 0.05) -> list[dict[str, Any]]:
    return [place(curve(one), blocks=blocks, strength=strength) for blocks, one in primacy.items()]


def lengths(last: float, strength: float = 0.05) -> Collected:
    return given(
        map=atlas_of(place(strength=strength), place(curve(10, last, length=80), strength=strength, group="length"))
    )


def scaled(*recency: float) -> Collected:
    scales = (0.2, 1.0, 2.0)
    groups = ("residual", "depth", "residual")
    rows = zip(scales, groups, recency, strict=True)
    return given(
        map=atlas_of(*(place(curve(10, last), residual_scale=scale, group=group) for scale, group, last in rows))
    )


def windows(narrow: float, wide: float) -> Collected:
    widths = ((narrow, 32), (wide, 128))
    return given(map=atlas_of(place(), *(place(curve(first), group="window", window=w) for first, w in widths)))


def steps(*rates: float, last: str = "") -> Collected:
    """Three runs at step 0, step 1,000 and the end, or `last`."""
    names = [f"{run}{step}" for run in ("x", "y", "z") for step in ("@step0", "@step1000", last)]
    return given(steps={name: sunk(rate) for name, rate in zip(names, rates * 3, strict=True)})


def pretrained(values: np.ndarray, name: str = "x") -> Collected:
    return given(jacobian={name: profile(pretrained=values)})


def trained(before: np.ndarray, after: np.ndarray) -> Collected:
    """Both conditions' elasticity."""
    both = {name: {"sensitivity": one, "elasticity": one} for name, one in (("init", before), ("pretrained", after))}
    return given(jacobian={"x": profile(**both)})


def scalar(condition: str, power: float) -> Collected:
    return given(jacobian={"x": profile(**{condition: U})}, scalar={"x": profile(**{condition: U**power})})


def cases() -> Iterator[Any]:
    """(id, results by which it holds, results by which it does not)."""
    for end, little in (("", FLAT), ("-strong", curve(1.5))):
        for slug, name in (("gpt2", "GPT-2"), ("qwen2", "Qwen2.5-0.5B"), ("7b", "Llama-7B width")):
            yes, no = (given(map=atlas_of(place(one, name=name, group="model"))) for one in (U, little))
            yield f"chowdhury-u-at-birth-{slug}{end}", yes, no
        yes, no = (given(jacobian={"x": profile(init=one)}) for one in (U, little))
        yield f"chowdhury-u-at-birth-bundled{end}", yes, no
        yield f"chowdhury-u-at-birth-window{end}", windows(8, 9), windows(1, 9)
        yes, no = given(map=atlas_of(place())), given(map=atlas_of(place(), place(little)))
        yield f"chowdhury-u-at-birth-everywhere{end}", yes, no
        yield f"chowdhury-u-persists{end}", pretrained(U), pretrained(little)
        for slug, name in (("qwen2-0.5b", "Qwen/Qwen2-0.5B"), ("gpt2", "openai-community/gpt2")):
            yield f"chowdhury-u-persists-{slug}{end}", pretrained(U, name), pretrained(little, name)
    other = np.random.default_rng(0).permutation(U)
    for name in ("chowdhury-same-without-rope", "chowdhury-same-without-rope-at-any-scale"):
        yield name, *(given(map=atlas_of(place(**HALF[0]), place(one, **HALF[1]))) for one in (U, other))
    yes, no = (given(jacobian={"x": profile(init=U, **{"init-nope": one})}) for one in (U, other))
    yield "chowdhury-same-without-rope-bundled", yes, no
    yield "chowdhury-cesaro-ranks", usual(), usual(cesaro=other)
    yield "chowdhury-cesaro-exact", usual(cesaro=2 * U), usual()
    density = cesaro_bins(LENGTH, 12, alpha=0.3)
    yield "chowdhury-continuous-limit", usual(measured=density), usual()
    yield "chowdhury-objection-powers-map", usual(), usual(config=U**1.5)
    yield "chowdhury-objection-powers-map-fitted", usual(), usual(score_path=U**1.5)
    for condition in ("init", "pretrained"):
        yield f"chowdhury-objection-powers-{condition}", theory(condition, 1.1, 1.2), theory(condition, 1.3, 1.2)
        yield f"chowdhury-objection-surrogate-{condition}", scalar(condition, 1.01), scalar(condition, 1.4)
    yield "chowdhury-primacy-tail", usual(), usual(measured=other)
    yield "chowdhury-primacy-tail-everywhere", given(map=atlas_of(place())), given(map=atlas_of(place(), place(other)))
    yield "chowdhury-recency-isolated", usual(), usual(measured=curve(10, 1.5))
    yield "chowdhury-recency-order-one", lengths(12), lengths(30)
    yield "chowdhury-residual-makes-recency", scaled(9, 6, 3), scaled(9, 3, 6)
    yield "chowdhury-dead-zone-deepens", *(given(map=atlas_of(*deep({2: 5, 4: one}))) for one in (9, 4))
    yield "chowdhury-dead-zone-factorial", *(given(map=atlas_of(*deep({2: 5, 4: 9, few: 30}))) for few in (5, 16))
    yield "chowdhury-score-path-vanishes-bundled", theory("init", 1, 1.2, 0.99), theory("init", 1, 1.2, 0.9)
    yield "chowdhury-score-path-vanishes-usual", usual(), usual(value=0.5 * U)
    wide = {"name": "Llama-7B width", "group": "model"}
    yield (
        "chowdhury-score-path-vanishes-7b",
        *(given(map=atlas_of(place(**wide, **m))) for m in ({}, {"value": 0.5 * U})),
    )
    yield "chowdhury-valley-persists", pretrained(VALLEY), pretrained(np.linspace(1, 2, LENGTH))
    yield "chowdhury-baseline-persists", trained(U, U + 0.1), trained(U, U[::-1])
    turns = np.arange(LENGTH)[:, None] * np.array([1, 0.5, 0.5]) * np.pi + [0, 0, np.pi / 2]
    apart = U * np.exp(0.3 * np.cos(turns.T))  # each prompt's spikes where no other's are
    yield "chowdhury-training-adds-spikes", trained(U, apart), trained(apart, U)
    yield "chowdhury-spikes-are-content", trained(U, apart), trained(U, apart[0])

    def leaking(**changes: Any) -> Collected:
        return given(leakage={"x": leaks(), "y": leaks(**changes)})

    yield "ruscio-absolute-position-leaks", leaking(), leaking(total=-0.01)
    yield "ruscio-mask-is-a-source", leaking(), leaking(mask=-0.01)
    for name in ("ruscio-residual-stream-is-a-source", "ruscio-residual-stream-with-constant-sink"):
        yield name, leaking(), leaking(stream=0.0)
    yield "ruscio-both-in-all-architectures", trio(), trio(_1=0.0)
    yes, no = (given(leakage={name: leaks(stream=stream) for name in HUB}) for stream in (0.02, 0.0))
    yield "ruscio-both-in-published-models", yes, no
    yield "ruscio-residual-stream-adds", leaking(), leaking(share=-0.2)
    yield "ruscio-ntk-suppresses", trio(), trio(_0=0.05)
    yield "ruscio-window-accumulates", trio(), trio(_2=0.005)
    yield "ruscio-ntk-below-window", trio(), trio(_0=0.05)
    yield "ruscio-standard-between", trio(), trio(_1=0.05)
    yield "ruscio-window-grows-with-depth", *(trio(_2=one) for one in ([0.0, 0.01, 0.1], [0.1, 0.01, 0.0]))

    def swapped(*removed: float, name: str = "x", kind: str = "bos_swap", **others: Any) -> Collected:
        return given(**{kind: {name: swap(dict(zip(("mean", "zero"), removed, strict=False)), **others)}})

    for who, others in (
        ("bos", {}),
        ("text", {"first": "none"}),
        ("im-start", {"first": "id", "kind": "im_start__bos_swap"}),
    ):
        for end in ("", "-steady"):
            yield f"ruscio-{who}-removes-40{end}", swapped(0.41, 0.4, **others), swapped(0.4, 0.8, **others)
            yield f"ruscio-{who}-removes-some{end}", swapped(0.4, **others), swapped(0.4, -0.1, **others)
    for slug, name in zip(("llama-3-8b", "mistral-7b", "qwen2.5-coder-7b"), HUB, strict=True):
        yield f"ruscio-bos-removes-40-{slug}", swapped(0.4, name=name), swapped(0.8, name=name)
    for who, first in (("", "bos"), ("text-", "none")):
        yes, no = (swapped(*removed, first=first) for removed in ((0.4, 0.41), (0.3, 0.9)))
        yield f"ruscio-{who}protocol-replacement", yes, no
        yes, no = (swapped(0.4, forms=forms, first=first) for forms in (0.41, 0.8))
        yield f"ruscio-{who}protocol-form", yes, no
        yes, no = (swapped(0.4, total=total, first=first) for total in (2.0, 0.5))
        yield f"ruscio-{who}sinks-stabilize", yes, no
    yield "ruscio-protocol-band", swapped(0.4), swapped(0.4, later=0.8)
    changed: tuple[tuple[str, Any], ...] = (
        ("ruscio-position-0-closed", {"change": 1e-9}),
        ("ruscio-fingerprint-constant", {"change": 1e-9}),
        ("ruscio-fingerprint-varies", {"cosine": 0.95}),
        ("gu-stream-of-sink-large", {"ratio": 1.5}),
        ("gu-massive-activations", {"massive": 0.0}),
    )
    for name, changes in changed:
        yield name, given(trajectory={"x": followed()}), given(trajectory={"x": followed(), "y": followed(**changes)})
    yield "ruscio-isolation-design", leaking(), leaking(left=1e-3)
    yield "ruscio-isolation-mask-alone", leaking(), leaking(mask=-0.01)
    yield "ruscio-isolation-mask-dominates", leaking(), leaking(share=0.7)
    yield "ruscio-isolation-null", leaking(), leaking(stream=[0.01, 0.02, 0.03])

    def sinking(*args: float, **changes: Any) -> Collected:
        return given(sinks={"x": sunk(), "y": sunk(*args, **changes)})

    yield "ruscio-sink-reading-heads", sinking(), sinking(reading=False)
    yield "ruscio-heads-react", sinking(), sinking(reacting=False)
    for slug, name, percent in (
        ("gpt2-xl", "openai-community/gpt2-xl", 77),
        ("mistral-7b", HUB[1], 97.49),
        ("llama2-7b", "meta-llama/Llama-2-7b-hf", 92.47),
        ("llama2-13b", "meta-llama/Llama-2-13b-hf", 91.69),
        ("llama3-8b", HUB[0], 99.02),
    ):
        yield f"gu-sink-rate-{slug}", *(given(sinks={name: sunk(rate)}) for rate in (percent / 100, 0.5))
    yield "gu-sinks-in-small-models", sinking(), sinking(0.0)
    yes, no = (given(sinks={"x": sunk()}, code__sinks={"x": sunk(rate)}) for rate in (0.5, 0.0))
    yield "gu-sinks-with-various-inputs", yes, no
    yield "gu-first-token-above-uniform", sinking(), sinking(0.0)
    yield "gu-first-token-alone", sinking(), sinking(0.5, 0.7)
    yield "gu-no-meaning-needed", sinking(bos=False), sinking(0.0, bos=False)
    yield "gu-emerges-in-training", steps(0, 0, 0.5), steps(0.2, 0.5, 0.5)
    yield "gu-emerges-when", steps(0, 0, 0.5, last="@step2000"), steps(0, 0.5, 0.5)
    yield "gu-values-small", sinking(), sinking(value=0.9)
    yield "gu-keys-small", sinking(), sinking(key=1.5)
    yield "gu-stores-attention", sinking(), sinking(reads=0.5)
    yes, no = (given(sinks=thrice(WINDOW, lambda by, rate=rate: sunk(rate, window=32))) for rate in (0.5, 0.0))
    yield "gu-window-absolute-first", yes, no
    runs = [thrice(PLAIN, lambda by: sunk()) | thrice(WINDOW, lambda by, rate=rate: sunk(rate)) for rate in (0.0, 0.5)]
    yield "gu-window-prevents", *(given(sinks=found) for found in runs)
    yield "wu-first-token-sink-pretrained", sinking(), sinking(over=0.05)
    yield "wu-primacy-grows-with-depth", *(given(map=atlas_of(*deep({2: 5, 4: one}))) for one in (9, 4))
    both = (given(map=atlas_of(*deep({2: 5, 4: 9}), *deep({2: 5, 4: one}, 1.0))) for one in (9, 4))
    yield "wu-depth-does-not-undo-logits", *both
    yield "wu-window-slows", windows(2, 5), windows(5, 2)


NEVER_REFUTED = ("ruscio-sink-reading-heads", "ruscio-heads-react")  # thresholds of ours
CASES: dict[str, tuple[Collected, Collected]] = {name: (yes, no) for name, yes, no in cases()}


@pytest.mark.parametrize("name", CASES)
def test_rule_holds_and_does_not(name):
    for collected, verdict in zip(CASES[name], (True, False), strict=True):
        row = judged(name, collected)
        if name in NEVER_REFUTED and not verdict:
            assert row.verdict == "undecided"
        else:
            assert held(row) is verdict, row
        assert row.measured not in ("", "-")
        assert row.command.startswith("headwater ")
        assert "nan" not in row.measured


def test_every_statement_is_tried_but_those_that_need_accuracies():
    untried = {statement.id for statement, _ in STATED} - set(CASES)
    assert untried == {statement.id for statement, _ in STATED if statement.source.startswith("[Liu+]")}
    assert set(CASES) <= {statement.id for statement, _ in STATED}


def test_parts_of_weights_that_overflow_decide_nothing():
    good = copy.deepcopy(CASES["ruscio-isolation-design"][0])
    assert judged("ruscio-isolation-design", good).verdict == "holds"
    for ds in good["leakage"].values():
        ds["weight_source_of_model"] = ds["weight_source_of_model"] + xr.DataArray([1e9, -1e9, 0.0], dims="source")
    row = judged("ruscio-isolation-design", good)
    assert (row.verdict, "overflow" in row.measured) == ("not measured", True)


# ------------------------------------------------------------------------------------------------------- rows in general


def test_without_results_nothing_is_measured_and_a_command_will():
    rows = claims(Collected(Path("nowhere")))
    assert len(rows) >= 30
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert (held(row), row.verdict, row.measured) == (None, "not measured", "-")
        assert re.fullmatch(
            r"headwater (jacobian|theory|map|sinks|trajectory|leakage|bos-swap|pretrain) ?.*", row.command
        )
        assert row.population != "toys"
        assert SLUG.fullmatch(row.id)
        assert row.rule
        assert re.fullmatch(r"[A-Z].*\.", row.claim)  # each row is read alone
        assert row.model != "-"
        assert re.match(r"\[(Chowdhury|Ruscio|Gu|Wu|Liu\+)\]", row.source)
    assert {origin(row) for row in rows} == {"[Chowdhury]", "[Ruscio]", "[Gu]", "[Wu]", "[Liu+]"}


def test_commands_are_ones_that_the_command_line_takes():
    from typer.main import get_command

    from probes.cli.main import app

    group: Any = get_command(app)
    for row in claims(Collected(Path("nowhere"))):
        for called in row.command.split(" && "):
            _, name, *arguments = called.split()
            group.commands[name].make_context(name, arguments)  # raises what it would refuse


def test_logit_scales_in_labels_of_a_map_are_written_as_in_claims():
    ds = atlas_of(place(U, window=32))["map"].assign_coords(label=("place", ["window 32, d sigma^2 0.05"]))
    measured = judged("chowdhury-u-at-birth-window", given(map={"map": ds})).measured
    assert measured.startswith("window 32, d σ² 0.05: primacy ")


def test_a_bad_id_is_refused():
    with pytest.raises(ValueError, match="id 'No slug' is no slug"):
        Statement("No slug", "[X]", "a", "b")


TABLE = {"where": "1", "claim": "A {word}.", "rule": "below {limit:g}", "limit": 0.5, "command": "sinks"}
READ = {"source": "[X]", "population": "pretrained", "judge": "unmeasured", "words": [{"word": "b"}, {"word": "c"}]}


def test_tables_are_repeated_for_each_entry_and_like_others(monkeypatch):
    tables = {"x-{word}": TABLE | {"each": ["words"]}, "{like}-again": {"like": ["x-{word}"], "claim": "So {word}."}}
    monkeypatch.setattr("tomllib.loads", lambda text: READ | tables)
    found = [(statement.id, statement.claim) for statement, _ in stated(liu)]
    assert found == [("x-b", "A b."), ("x-c", "A c."), ("x-b-again", "So b."), ("x-c-again", "So c.")]
    (first, _), *_ = stated(liu)
    assert (first.source, first.rule, first.model) == ("[X] 1", "below 0.5", "smollm2-135m")


def test_a_key_that_nothing_uses_is_refused(monkeypatch):
    monkeypatch.setattr("tomllib.loads", lambda text: READ | {"x-a": TABLE | {"word": "b", "wrod": "c"}})
    with pytest.raises(ValueError, match=r"liu\.toml: nothing uses wrod of 'x-a'"):
        list(stated(liu))


def test_models_of_which_nothing_is_known_do_not_count():
    unknown = swap({"mean": 0.4}, off=np.inf)
    row = judged("ruscio-bos-removes-40", given(bos_swap={"x": swap({"mean": 0.4}), "y": unknown}))
    assert (held(row), row.model) == (True, "x, y")
    assert row.measured.endswith("y: ? (mean)")
    row = judged("ruscio-bos-removes-40", given(bos_swap={"y": unknown}))
    assert (held(row), row.measured) == (None, "y: ? (mean)")
    assert row.command.startswith("headwater bos-swap meta-llama/")  # what will measure it, not what did not


def test_overlapping_bands_decide_nothing():
    row = judged("ruscio-protocol-band", given(bos_swap={"x": swap({"mean": 0.4}, later=0.39)}))
    assert row.verdict == "undecided"
    assert row.measured == "x: 9-31: 40% [36%, 44%], 32-63: 39% [35%, 43%] (mean)"


def test_one_replacement_alone_compares_nothing():
    one = swap({"mean": 0.4}).isel(replacement=0, drop=True).assign_attrs(replacement="mean")
    found = given(bos_swap={"x": one})
    assert judged("ruscio-bos-removes-40", found).measured == "x: 40% [36%, 44%] (mean)"
    assert held(judged("ruscio-protocol-replacement", found)) is None


def test_windows_are_no_case_of_full_attention():
    cut = np.where(np.arange(LENGTH) < 30, 0.0, U)  # what a window leaves: no beginning, no middle
    windowed = profile(init=cut, pretrained=cut, config={"sliding_window": 8})
    rows = {row.id: row for row in claims(given(jacobian={"x": profile(init=U, pretrained=U), "y": windowed}))}
    for name in ("chowdhury-u-at-birth-bundled", "chowdhury-u-persists"):
        assert (held(rows[name]), rows[name].model) == (True, "x")
    rows = {row.id: row for row in claims(given(jacobian={"y": windowed}))}
    assert held(rows["chowdhury-u-persists"]) is None
    not_used = profile(init=U, config={"sliding_window": 8, "use_sliding_window": False})
    assert judged("chowdhury-u-at-birth-bundled", given(jacobian={"z": not_used})).model == "z"


def test_zeros_without_a_window_give_no_numbers_that_are_none():
    cut = np.where(np.arange(LENGTH) < 30, 0.0, U)
    row = judged("chowdhury-u-at-birth-bundled", given(jacobian={"x": profile(init=cut)}))
    assert (row.verdict, row.measured) == ("not measured", "x: primacy: no middle, recency: no middle")
    rows = claims(given(map=atlas_of(place(cut), place(cut, window=32), place(cut, name="GPT-2", group="model"))))
    assert all("nan" not in row.measured for row in rows)
    assert not held(judged("chowdhury-u-at-birth-gpt2", given(map=atlas_of(place(cut, name="GPT-2")))))


def test_gaps_and_short_curves_are_not_judged():
    gaps = np.where(np.arange(LENGTH) == 3, np.nan, U)
    for one in (profile(init=gaps), profile(init=U).isel(position=slice(5)).assign_attrs(options="{}")):
        assert held(judged("chowdhury-u-at-birth-bundled", given(jacobian={"x": one}))) is None


def test_the_interval_over_prompts_is_the_jackknife_s():
    ds = profile(pretrained=U)
    primacy = probes.ushape(U).primacy
    assert (
        f"primacy {primacy:.3g} [{primacy:.3g}, {primacy:.3g}]"
        in judged("chowdhury-u-persists", pretrained(U)).measured
    )
    values = ds["sensitivity"].values
    values[0, 0, 0, :2] *= 3  # one prompt reads the beginning
    found = judged("chowdhury-u-persists", given(jacobian={"x": ds})).measured
    low, high = (float(x) for x in re.search(r"primacy \S+ \[(\S+), (\S+)\]", found).groups())  # pyright: ignore
    assert low < probes.ushape(np.exp(np.log(values[0, 0]).mean(0))).primacy < high


def test_sink_rates_are_compared_at_the_published_length_alone():
    row = judged("gu-sink-rate-llama3-8b", given(sinks={HUB[0]: sunk(0.99, length=256)}))
    assert held(row) is None
    assert row.measured.endswith("% at T = 256, published at T = 64")
    assert row.command == f"headwater sinks {HUB[0]} --prompts 100 --length 64 --out runs/llama3-8b"
    many = sunk(1.0).isel(prompt=0, drop=True)
    assert judged("gu-sink-rate-llama3-8b", given(sinks={HUB[0]: many})).measured == f"{HUB[0]}: 100.0 % at T = 64"


def test_other_prompts_say_nothing_of_a_surrogate():
    found = scalar("pretrained", 1.01)
    found.results["scalar"]["x"].attrs["tokens_sha256"] = "another"
    assert held(judged("chowdhury-objection-surrogate-pretrained", found)) is None


def test_steps_that_never_have_a_sink():
    assert held(judged("gu-emerges-in-training", steps(0, 0, 0))) is False
    assert judged("gu-emerges-when", steps(0, 0, 0)).verdict == "undecided"
    alone = steps(0, 0, 0.5)
    alone.results["steps"] = {name: ds for name, ds in alone["steps"].items() if name.startswith("x")}
    row = judged("gu-emerges-in-training", alone)  # one run is no evidence
    assert row.verdict == "undecided"
    assert row.command.startswith("headwater pretrain tiny-llama --seed 1 ")


def test_steps_too_far_apart_leave_open_when_sinks_emerge():
    row = judged("gu-emerges-when", steps(0, 0, 0.5))  # between step 1,000 and the end, which may be any
    assert held(row) is None
    assert "0.500 at the end" in row.measured


def test_measured_rows_have_the_commands_of_their_results():
    two = given(
        jacobian={
            "x": profile("headwater jacobian x", pretrained=U),
            "y": profile("headwater jacobian y", pretrained=U),
        }
    )
    assert judged("chowdhury-u-persists", two).command == "headwater jacobian x && headwater jacobian y"
    python = given(jacobian={"x": profile("", pretrained=U)})
    assert judged("chowdhury-u-persists", python).command.startswith("headwater jacobian smollm2-135m ")


def test_tiny_models_decide_nothing_about_language_models():
    tiny = sunk(0.0).assign_attrs(config="{}")
    row = judged("gu-sinks-in-small-models", given(sinks={"tiny-llama": tiny}))
    assert (row.verdict, row.measured, row.tiny) == ("not measured", "-", "tiny-llama: 0.000 [0.000, 0.000]")
    assert row.command.startswith("headwater sinks smollm2-135m ")
    row = judged("gu-sinks-in-small-models", given(sinks={"tiny-llama": tiny, "x": sunk()}))
    assert (row.verdict, row.model) == ("holds", "x")
    assert row.tiny.startswith("tiny-llama: ")


def test_two_runs_decide_nothing_about_training():
    found = trio()
    found.results["controlled/leakage"] = {
        name: ds for name, ds in found["controlled/leakage"].items() if "seed1" in name
    }
    row = judged("ruscio-ntk-suppresses", found)
    assert row.verdict == "undecided"
    assert row.command.startswith("headwater pretrain tiny-llama-ntk --seed 1 ")


def test_old_results_without_the_scale_free_sensitivity_compare_no_conditions():
    found = trained(U, U + 0.1)
    found.results["jacobian"]["x"] = found["jacobian"]["x"].drop_vars("elasticity")
    assert judged("chowdhury-baseline-persists", found).verdict == "not measured"


def test_every_threshold_of_the_u_is_counted():
    row = judged("chowdhury-u-at-birth-everywhere", given(map=atlas_of(place(), place(curve(2)))))
    assert row.measured == (
        "both ends stand above the middle 2 of 2 at 1.25, 2 of 2 at 1.5, 1 of 2 at 2 times; below 2 from d σ² = 0.05 on"
    )


# ---------------------------------------------------------------------------------------------------- merged, and the table


def row(name: str, holds: bool | None, **fields: Any) -> Claim:
    return Statement(name, fields.pop("source", "[X] 1"), "claim", "rule", **fields).judged("5", holds)


def test_merged_keeps_what_was_decided():
    found = [
        row("a", None),
        row("b", True),
        row("a", False),
        row("c", None),
        row("c", None),
        row("b", None),
        row("b", False),
    ]
    got = [(one.id, held(one)) for one in merged(found)]
    assert got == [("a", False), ("b", True), ("b-2", False), ("c", None)]
    assert merged([]) == []
    unknown = replace(row("c", None), measured="-")
    assert merged([unknown, row("c", None)])[0].measured == "5"  # what is known of it, though it decides nothing


def test_the_table_is_sorted_counted_and_escaped(tmp_path):
    found = [
        row("b", True, source="[Y] 2", command="headwater y"),
        row("a", None, source="[X] Fig. 1", published="|x| = 2", command="headwater x"),
        row("c", False, source="[X] Fig. 1", population="controlled"),
        row("d", False, source="control", kind="ours"),
    ]
    report = claims_table(found)
    assert [one[0] for one in report.tables[0].rows] == ["`a`", "`c`", "`b`", "`d`"]
    assert report.lines == [
        "published, toys: 2 statements, 1 holds, 1 undecided",
        "published, controlled training: 1 statements, 1 does not hold",
        "our own generalisations and controls: 1 statements, 1 does not hold",
    ]
    write_report(report, tmp_path / "claims.md")
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert (
        "| `a` | published | toys | [X] Fig. 1 | claim | \\|x\\| = 2 | 5 | - | - | undecided | rule | `headwater x` |"
        in page
    )
    assert page.splitlines()[2].startswith("Each verdict is computed")
    assert "Brackets hold 95 % intervals: over documents, or by Student's t over runs" in page


# -------------------------------------------------------------------------------------------------------- real results


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make report` leaves, of two tiny checkpoints, with and without BOS, and a map of two depths."""
    root = tmp_path_factory.mktemp("reports")
    for name, family in (("ape", "llama"), ("bee", "gpt2")):
        families.model(family).save_pretrained(root / ".models" / name)
        families.tokenizer("prepended" if family == "llama" else "end").save_pretrained(root / ".models" / name)
    words = np.random.default_rng(0).integers(3, 60, 600)
    (root / ".models/text.txt").write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    text = root / ".models/text.txt"
    sources = [str(root / ".models" / name) for name in ("ape", "bee")]
    settings = Settings(
        seeds=2, products=8, prompts=2, length=24, text=str(text), by_path=True, theories=get_args(Theory)
    )
    with pytest.MonkeyPatch.context() as patch:  # claims are judged by results; figures are drawn in other tests
        patch.setattr("probes.studies.study.FIGURES", dict.fromkeys(("jacobian", "theory"), lambda results, path: None))
        study(sources, root / "theory", settings, name="theory")
        study(sources, root / "scalar", replace(settings, method="scalar", products=None, by_path=False, theories=()))
    (root / "jacobian").mkdir()
    for name, source in zip(("ape", "bee"), sources, strict=True):
        shutil.copy(root / f"theory/theory-{name}.nc", root / f"jacobian/jacobian-{name}.nc")  # its curves are the same
        model = probes.load(source)
        drawn = draw(model, n=4, length=24, text=text)
        tokens, said = drawn.tokens, drawn.attributes
        found = {
            "sinks": probes.sinks(model, tokens, reacts="mean", pictures=0),
            "trajectory": probes.trajectory(model, tokens, starts=4),
            "leakage": probes.leakage(model, tokens, bootstrap=20),
            "bos-swap": probes.bos_swap(model, tokens, bootstrap=20, profile_prompts=1, products=8),
        }
        for kind, ds in found.items():
            save(ds.assign_attrs(said), root / kind / f"{kind}-{name}.nc")
    atlas([Place("depth", 0.05, 64, 2, 16), Place("depth", 0.05, 64, 4, 16)], root / "theory", seeds=1, products=16)
    return root


FRESH = {  # of tiny models whose names are nobody's, a map of two depths, and no training
    *("chowdhury-u-at-birth-bundled", "chowdhury-u-at-birth-everywhere", "chowdhury-primacy-tail-everywhere"),
    *("chowdhury-dead-zone-deepens", "chowdhury-dead-zone-factorial"),
    *("chowdhury-objection-powers-map", "chowdhury-objection-powers-map-fitted", "chowdhury-objection-powers-init"),
    *("chowdhury-objection-surrogate-init", "chowdhury-score-path-vanishes-bundled"),
    *("wu-primacy-grows-with-depth", "wu-depth-does-not-undo-logits"),
}
PRETRAINED = {
    *("chowdhury-u-persists", "chowdhury-valley-persists", "chowdhury-baseline-persists"),
    *("chowdhury-objection-powers-pretrained", "chowdhury-objection-surrogate-pretrained"),
    *("ruscio-position-0-closed", "ruscio-fingerprint-constant", "ruscio-fingerprint-varies"),
    *("ruscio-absolute-position-leaks", "ruscio-mask-is-a-source", "ruscio-residual-stream-is-a-source"),
    *("ruscio-sink-reading-heads", "ruscio-heads-react", "ruscio-sinks-stabilize", "ruscio-text-sinks-stabilize"),
    *("ruscio-isolation-design", "ruscio-isolation-mask-alone", "ruscio-isolation-null"),
    *("gu-sinks-in-small-models", "gu-first-token-above-uniform", "gu-no-meaning-needed"),
    *("gu-stream-of-sink-large", "gu-massive-activations", "wu-first-token-sink-pretrained"),
}


@pytest.fixture
def as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few thousand parameters count as language models."""
    monkeypatch.setattr("probes.claims.rules.LARGE", 1)


def test_real_results_are_judged(reports, tmp_path):
    rows = {row.id: row for row in claims(collect(reports))}
    known = {name for name, row in rows.items() if row.verdict != "not measured"}
    assert known >= FRESH
    assert not known & PRETRAINED
    assert {name for name, row in rows.items() if row.tiny != "-"} >= PRETRAINED
    assert all("nan" not in row.measured + row.tiny for row in rows.values())
    write_report(claims_table(list(rows.values())), tmp_path / "claims.md")


@pytest.mark.usefixtures("as_large")
def test_real_results_of_language_models_are_judged(reports):
    rows = {row.id: row for row in claims(collect(reports))}
    known = {name for name, row in rows.items() if row.verdict != "not measured"}
    assert known >= PRETRAINED - {"ruscio-isolation-design"}  # logits of these untrained models are hundreds
    assert not any(name.startswith(("liu-", "gu-sink-rate", "gu-emerges")) for name in known)
    assert rows["ruscio-position-0-closed"].verdict == "holds"
    assert "weights without the mask overflow" in rows["ruscio-isolation-design"].measured
    assert rows["ruscio-fingerprint-constant"].model == "ape"
    assert rows["gu-no-meaning-needed"].model == "bee"


@pytest.mark.slow
@pytest.mark.usefixtures("as_large")
def test_a_changed_result_changes_the_verdict(reports, tmp_path):
    shutil.copytree(reports / "trajectory", tmp_path / "trajectory")
    assert held(judged("ruscio-position-0-closed", collect(tmp_path))) is True
    (file,) = (tmp_path / "trajectory").glob("*bee.nc")
    ds = load(file)
    ds["later_difference"][0, 1] = 0.25
    save(ds, file)
    row = judged("ruscio-position-0-closed", collect(tmp_path))
    assert held(row) is False
    assert row.measured.endswith("bee: largest change by other text 0.25")
    file.unlink()
    assert judged("ruscio-position-0-closed", collect(tmp_path)).model == "ape"


@pytest.mark.slow
@pytest.mark.usefixtures("as_large")
def test_any_one_kind_alone_is_judged_as_among_all(reports):
    whole = collect(reports)
    rows = {row.id: row for row in claims(whole)}
    alone = [row for kind in whole for row in claims(Collected(reports, {kind: whole.results[kind]}))]
    for row in merged(alone):
        both = row.id.startswith("chowdhury-objection-surrogate")  # compares two kinds
        assert (row.verdict == "not measured") if both else (row == rows[row.id])
