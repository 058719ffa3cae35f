"""Small results by hand, and for every published statement those by which it holds and those by which it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from recalled import LARGE, interventions, real, recalled, traced

from probes.claims.claim import Claim
from probes.claims.ruscio import NTK, PLAIN, WINDOW
from probes.claims.sources import STATED
from probes.measures.leakage import CELLS, PARTS, SOURCES
from probes.measures.sinks import RULES
from probes.results.folder import Collected
from probes.results.theory_map import CURVES
from probes.theory.cesaro import cesaro_bins

LENGTH = 40
CONTROLLED = (NTK, PLAIN, WINDOW)
BANDS = ("9-31", "32-63")


def given(**kinds: Mapping[str, xr.Dataset]) -> Collected:
    """Results as `collect` gives them; "code__bos_swap" is the kind "code/bos-swap"."""
    named = {kind.replace("__", "/").replace("_", "-"): dict(results) for kind, results in kinds.items()}
    return Collected(Path("reports"), named)


def thrice(model: str, make: Any) -> dict[str, xr.Dataset]:
    """Three runs of controlled training, of results made by a factor."""
    return {name: make(by) for name, by in ((model, 1.0), (f"{model}-seed1", 0.95), (f"runs/{model}-seed2", 1.05))}


def judged(name: str, collected: Collected) -> Claim:
    """One statement, judged."""
    return STATED[name].judged(collected)


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


def around(values: Any, *dims: str, off: float = 0.1) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """A variable by the ends of its name, with an interval of `off` of its size to either side."""
    values = np.asarray(values, dtype=float)
    return {end: (dims, values + by * off * np.abs(values)) for end, by in (("", 0), ("_low", -1), ("_high", 1))}


def ended(**variables: Any) -> dict[str, Any]:
    """Variables, each made by `around`, by their whole names."""
    return {f"{name}{end}": one for name, ends in variables.items() for end, one in ends.items()}


def leaks(
    *, total: float = 0.05, mask: float = 0.04, stream: Any = 0.02, share: float = 0.3, left: float = 0.0, **attrs: str
) -> xr.Dataset:
    """A result of `leakage` in its early band; `stream` is V(X) of the model, or by block."""
    by_block = np.array([0.0, stream, stream] if np.ndim(stream) == 0 else stream)
    tables = {
        "log_form_of_model": ("part", [total, 0.0, 2 * mask, 0.0, 0.0]),
        "log_source_of_model": ("source", [mask, total - mask, 0.0]),
        "steady_source_of_model": ("source", [total * (1 - share), total * share, 0.0]),
        "log_share_of_model": ("source", [1 - share, share, 0.0]),
        "log_stream_by_block": ("layer", by_block),
        "steady_stream_by_block": ("layer", by_block),
        "log_sink_by_block": ("layer", 0 * by_block),
        "weight_form_of_model": ("cell", [1e-4, 0, 0, 0]),
        "weight_source_of_model": ("source", [6e-5, 3e-5, 1e-5]),
        "weight_share_of_model": ("source", [0.6, 0.3, 0.1]),
    }
    made = ended(**{name: around(np.outer(values, [1, 1]), dim, "band") for name, (dim, values) in tables.items()})
    whole = around([np.mean(stream)] * 2, "band")
    made |= ended(log_stream_of_model=whole, steady_stream_of_model=whole)
    made["log_neither"] = (("layer",), np.full(len(by_block), left))
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
    whole, of_parts, of_sources = (("replacement", *more, "layer", "band") for more in ((), ("part",), ("source",)))
    fractions = around([[one, later] for one in removed.values()], "replacement", "band", off=off)
    ones = np.ones((len(removed), len(PARTS), 2, len(BANDS)))
    after = ones * (1 - forms)
    after[:, 0] = total
    change = around(after - ones, *of_parts)
    made = ended(removed_of_model=fractions, removed_steady_of_model=fractions, leakage_change=change)
    made |= {"leakage_before": (of_parts, ones), "leakage_after": (of_parts, after)}
    for when, own, others in (("before", 1.0, -1.0), ("after", 1 - forms, -0.5)):  # below 0: no fraction to take
        made[f"residual_steady_{when}"] = whole, ones[:, 0] * own
        for name in ("source", "weight"):
            made[f"{name}_{when}"] = of_sources, ones[:, :3] * others
    coords = {"replacement": list(removed), "part": list(PARTS), "source": list(SOURCES), "band": list(BANDS)}
    return xr.Dataset(made, coords, real(command="headwater bos-swap x", first_policy=first))


def followed(**changes: float) -> xr.Dataset:
    """A result of `trajectory`: `change` by other text, `cosine`, `ratio` of norms and number of `massive` dimensions."""
    own = {"change": 0.0, "cosine": 0.1, "ratio": 5.0, "massive": 1.0} | changes
    made = ended(cosine=around(np.full((1, 3), own["cosine"]), "place", "layer", off=0))
    for name, value in (("later_difference", own["change"]), ("norm_first", own["ratio"]), ("norm_others", 1)):
        made[name] = ("first", "layer"), np.full((2, 3), value)
    for name, dim, value in (("massive", "rule", own["massive"]), ("top_ratio", "rank", 2000.0)):
        made[name] = ("first", "layer", dim), np.full((2, 3, 2), value)
    coords = {"first": ["bos", "text"], "place": ["position 0"]}
    return xr.Dataset(made, coords, real(command="headwater trajectory x"))


def sunk(rate: float = 0.5, other: float = 0.0, *, length: int = 64, bos: bool = True, **changes: float) -> xr.Dataset:
    """A result of `sinks`: keys 0 and 1 of five heads in two blocks, of which `rate` and `other` are sinks."""
    own = {"over": 0.2, "value": 0.2, "key": 0.5, "reads": 0.1, "written": 0.2, "reacts": 0.2} | changes
    alpha = np.full((4, 10, 2), [0.05, 0.02])
    for at, share in enumerate((rate, other)):  # of the heads, in every prompt alike
        alpha[:, : round(10 * share), at] = 0.6
    selected = np.zeros((len(RULES), 2, 5), np.int8)
    selected[:, 0, 0] = 1
    heads = ("layer", "head")
    made = ended(**{name: around(np.full((2, 5), own[name]), *heads, off=0.05) for name in ("written", "reacts")})
    made |= {
        "alpha": (("prompt", *heads, "key"), alpha.reshape(4, 2, 5, 2)),
        "sink_rate_of_model": ("key", [(alpha[..., 0] > 0.3).mean(), other]),
        "over_tau_of_model": ("key", [own["over"], 0.1]),
        "uniform": (("layer", "key"), np.full((2, 2), 0.06)),
        "attends": (heads, np.full((2, 5), 0.4)),
        "reads": (heads, np.full((2, 5), own["reads"])),
        "selected": (("rule", *heads), selected),
        "value_norm": ((*heads, "place"), np.full((2, 5, 2), [own["value"], 1])),
        "key_norm": ((*heads, "place"), np.full((2, 5, 2), [own["key"], 1])),
        "tokens": (("prompt", "position"), np.zeros((4, length), np.int64)),
    }
    attrs = real(command="headwater sinks x", options='{"threshold": 0.3}', first_policy="bos" if bos else "none")
    return xr.Dataset(made, {"key": [0, 1], "rule": list(RULES), "place": ["sink", "rest"]}, attrs)


def cached(none: float, one: float, four: float, *, by_text: float = 0.5) -> Collected:
    """A result of `sinks` with caches of 0, 1 and 4 first keys: what their loss rises by, by the cache and by the text."""
    change = np.zeros((4, 3, 2, 2, 2))  # [prompt, first_keys, last_keys, numbering, cache]
    change[..., 0, 1], change[..., 1, 1] = (np.array(x)[:, None] for x in ([none, one, by_text], [none, one, four]))
    change *= np.array([0.95, 0.98, 1.02, 1.05])[:, None, None, None, None]
    dims = ("first_keys", "last_keys", "numbering", "cache")
    ends = {name: (dims, change.mean(0) + by) for name, by in (("", 0), ("_low", -0.1), ("_high", 0.1))}
    made = {f"evict_loss_change{name}": one for name, one in ends.items()}
    made["evict_loss_change_by_prompt"] = ("prompt", *dims), change
    coords: dict[str, Any] = {"first_keys": [0, 1, 4], "last_keys": [64, 128]}
    coords |= {"numbering": ["text", "cache"], "cache": ["whole", "cut"]}
    return given(evict__sinks={"x": xr.Dataset(made, coords, real(command="headwater sinks x --evict 0,1,4"))})


def collecting(excess: float) -> Collected:
    """A result of `sinks` over all keys: two blocks, in each a token with so much above uniform attention."""
    made = ended(token_excess=around([[excess, np.nan], [0.01, np.nan]], "layer", "collector"))
    made |= {"token_id": (("layer", "collector"), np.array([[7, -1], [8, -1]]))}
    names = (("layer", "collector"), [[".", ""], [",", ""]])
    ds = xr.Dataset(made, {"layer": [0, 1], "collector_token": names}, real(command="headwater sinks x --keys all"))
    return given(all_keys__sinks={"x": ds})


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
    for slug, name in (("gpt2", "GPT-2"), ("qwen2", "Qwen2.5-0.5B"), ("7b", "Llama-7B width")):
        yes, no = (given(map=atlas_of(place(one, name=name, group="model"))) for one in (U, FLAT))
        yield f"chowdhury-u-at-birth-{slug}", yes, no
    for end, little in (("", FLAT), ("-strong", curve(1.5))):
        yes, no = given(map=atlas_of(place())), given(map=atlas_of(place(), place(little)))
        yield f"chowdhury-u-at-birth-everywhere{end}", yes, no
        yield f"chowdhury-u-persists{end}", pretrained(U), pretrained(little)
    yield "chowdhury-u-at-birth-bundled", *(given(jacobian={"x": profile(init=one)}) for one in (U, FLAT))
    for slug, name in (("qwen2-0.5b", "Qwen/Qwen2-0.5B"), ("gpt2", "openai-community/gpt2")):
        yield f"chowdhury-u-persists-{slug}", pretrained(U, name), pretrained(FLAT, name)
    other = np.random.default_rng(0).permutation(U)
    turns = np.arange(LENGTH)[:, None] * np.array([1, 0.5, 0.5]) * np.pi + [0, 0, np.pi / 2]
    apart = U * np.exp(0.3 * np.cos(turns.T))  # each prompt's spikes where no other's are
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
    yield "chowdhury-dead-zone-factorial", *(given(map=atlas_of(*deep({2: 5, 4: 9, few: 30}))) for few in (5, 16))
    yield "chowdhury-score-path-vanishes-bundled", theory("init", 1, 1.2, 0.99), theory("init", 1, 1.2, 0.9)
    yield "chowdhury-score-path-vanishes-usual", usual(), usual(value=0.5 * U)
    yield "chowdhury-valley-persists", pretrained(VALLEY), pretrained(np.linspace(1, 2, LENGTH))
    yield "chowdhury-baseline-persists", trained(U, U + 0.1), trained(U, U[::-1])
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

    of_text, of_chat = {"first": "none"}, {"first": "id", "kind": "im_start__bos_swap"}
    for who, others in (("bos", {}), ("text", of_text), ("im-start", of_chat)):
        yield f"ruscio-{who}-removes-some", swapped(0.4, **others), swapped(0.4, -0.1, **others)
        for end in ("", "-steady") if who == "bos" else ("",):
            yield f"ruscio-{who}-removes-40{end}", swapped(0.41, 0.4, **others), swapped(0.4, 0.8, **others)
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

    def following(**changes: float) -> Collected:
        return given(trajectory={"x": followed(), "y": followed(**changes)})

    yield "ruscio-position-0-closed", following(), following(change=1e-9)
    yield "ruscio-fingerprint-constant", following(), following(change=1e-9)
    yield "ruscio-fingerprint-varies", following(), following(cosine=0.95)
    yield "gu-stream-of-sink-large", following(), following(ratio=1.5)
    yield "gu-massive-activations", following(), following(massive=0.0)
    yield "ruscio-isolation-design", leaking(), leaking(left=1e-3)
    yield "ruscio-isolation-mask-alone", leaking(), leaking(mask=-0.01)
    yield "ruscio-isolation-mask-dominates", leaking(), leaking(share=0.7)
    yield "ruscio-isolation-null", leaking(), leaking(stream=[0.01, 0.02, 0.03])

    def sinking(*args: float, **changes: Any) -> Collected:
        return given(sinks={"x": sunk(), "y": sunk(*args, **changes)})

    yield "ruscio-sink-reading-heads", sinking(), sinking(written=0.05)
    yield "ruscio-heads-react", sinking(), sinking(reacts=0.05)
    llama2 = {f"llama2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b")}
    rates = {"gpt2-xl": "openai-community/gpt2-xl", "mistral-7b": HUB[1], "llama3-8b": HUB[0]} | llama2
    for slug, name in rates.items():
        yield f"gu-sink-rate-{slug}", *(given(sinks={name: sunk(rate)}) for rate in (0.9, 0.5))
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
    yes, no = (given(sinks=thrice(WINDOW, lambda by, rate=rate: sunk(rate))) for rate in (0.5, 0.0))
    yield "gu-window-absolute-first", yes, no
    runs = [thrice(PLAIN, lambda by: sunk()) | thrice(WINDOW, lambda by, rate=rate: sunk(rate)) for rate in (0.0, 0.5)]
    yield "gu-window-prevents", *(given(sinks=found) for found in runs)
    share = {"sink_logit_share": (("layer", "head"), np.full((2, 5), 0.3))}
    plain, own = thrice("tiny-no-sink-logits", lambda by: sunk()), "tiny-sink-logits"
    runs = [thrice(own, lambda by, rate=rate: sunk(rate).assign(share)) for rate in (0.0, 0.5)]
    yield "gu-learned-sink-replaces-first", *(given(controlled__sinks=found | plain) for found in runs)
    yield "wu-first-token-sink-pretrained", sinking(), sinking(over=0.05)
    yield "wu-primacy-grows-with-depth", *(given(map=atlas_of(*deep({2: 5, 4: one}))) for one in (9, 4))
    both = (given(map=atlas_of(*deep({2: 5, 4: 9}), *deep({2: 5, 4: one}, 1.0))) for one in (9, 4))
    yield "wu-depth-does-not-undo-logits", *both
    yield "wu-window-slows", windows(2, 5), windows(5, 2)
    for short in ("exact", "probability"):
        for kind, ends in (("primacy", (-1.0, 1.0)), ("recency", (1.0, -1.0))):
            yes, no = (given(retrieval={"x": recalled(*either)}) for either in ((1.0, 1.0), ends))
            yield f"liu-recall-{kind}-{short}", yes, no
    for short in ("profile", "birth", "distance"):
        yield f"liu-recall-follows-{short}", *(given(mechanism__retrieval={"x": traced(by)}) for by in (1.0, -1.0))
    yield "liu-recall-predicted", *(given(mechanism__retrieval={"x": traced(1.0, tells)}) for tells in (1.0, -1.0))

    yield "gu-no-token-collects", collecting(0.05), collecting(0.3)
    yield "xiao-window-attention-fails", cached(2, 0.5, 0.1), cached(0.5, 0.5, 0.1)
    yield "xiao-first-keys-recover", cached(2, 0.5, 0.1), cached(2, 0.5, 0.4)
    yield "xiao-one-is-not-enough", cached(2, 0.5, 0.1), cached(2, 0.1, 0.2)
    yield "xiao-positions-within-the-cache", cached(2, 0.5, 0.1), cached(2, 0.5, 0.1, by_text=0.05)

    def intervened(**changes: float) -> Collected:
        return given(interventions__bos_swap={"x": interventions(**changes)})

    yield "ruscio-position-0-needed", intervened(without_0=2.0), intervened(without_0=-2.0)
    yield "ruscio-denominators-steadied", intervened(held_log_z=2.0), intervened(held_log_z=-2.0)
    yield "ruscio-token-at-0-matters-less", intervened(drawn=0.1), intervened(drawn=4.0)
    yield "ruscio-constant-logit-suffices", intervened(constant_sink=0.1), intervened(constant_sink=4.0)


CASES: dict[str, tuple[Collected, Collected]] = {name: (yes, no) for name, yes, no in cases()}
