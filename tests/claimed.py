"""Small results by hand, and for every statement's function those by which it holds and those by which it does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from probes.claims.claim import Claim
from probes.claims.ruscio import HUB, NTK, PLAIN, WINDOW
from probes.claims.sources import STATED
from probes.measures.leakage.compute import CELLS, PARTS, SOURCES
from probes.measures.map import CURVES
from probes.results.folder import Collected
from probes.theory.cesaro import cesaro_bins

LENGTH = 40
BANDS = ("9-31", "32-63")
Cases = Iterator[tuple[str, Collected, Collected]]
# As much of a configuration as tells that a model is no tiny one.
LARGE = {"hidden_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32, "vocab_size": 49152}


def given(**kinds: Mapping[str, xr.Dataset]) -> Collected:
    """Results as `collect` gives them; "code__bos_swap" is the kind "code/bos-swap"."""
    named = {kind.replace("__", "/").replace("_", "-"): dict(results) for kind, results in kinds.items()}
    return Collected(Path("reports"), named)


def judged(name: str, collected: Collected) -> Claim:
    """One statement, judged."""
    return STATED[name].judged(collected)


def real(**more: str) -> dict[str, str]:
    """Attributes of a result of a real language model."""
    return {"config": json.dumps(LARGE), "condition": "pretrained", "command": "headwater sinks x"} | more


def ended(off: float = 0.1, **variables: Any) -> dict[str, Any]:
    """Variables (values, *dims) by their whole names, with an interval of `off` of their size to either side."""
    arrays = {name: (dims, np.asarray(values, dtype=float)) for name, (values, *dims) in variables.items()}
    ends = (("", 0.0), ("_low", -off), ("_high", off))
    return {f"{n}{end}": (dims, x + by * np.abs(x) if by else x) for n, (dims, x) in arrays.items() for end, by in ends}


# ------------------------------------------------------------------------------------------------------------ profiles


def curve(first: float = 10.0, last: float = 10.0, *, length: int = LENGTH, fall: float = 2.0) -> np.ndarray:
    """Falls from `first` to 1, and ends in `last`."""
    values = 1 + (first - 1) * np.exp(-np.arange(length) / fall)
    values[-1] = last
    return values


VALLEY = curve(3, 5) + np.abs(np.arange(LENGTH) - LENGTH // 2) / LENGTH  # least in the middle
U, FLAT, OTHER = curve(), np.ones(LENGTH), np.random.default_rng(0).permutation(curve())


def profile(command: str = "headwater jacobian x", config: Any = None, **conditions: Any) -> xr.Dataset:
    """A result of `jacobian` or `theory`: by condition a curve, or curves by variable; three prompts, two fresh seeds."""
    each = {name: value if isinstance(value, dict) else {"sensitivity": value} for name, value in conditions.items()}
    variables: dict[str, Any] = {}
    for variable in dict.fromkeys(one for curves in each.values() for one in curves):
        values = np.full((len(each), 2, 3, LENGTH), np.nan)
        for n, name in enumerate(each):
            values[n, : 1 if name == "pretrained" else 2] = each[name][variable] * np.array([0.9, 1.0, 1.1])[:, None]
        variables[variable] = (("condition", "seed", "prompt", "position"), values)
    if "theory_cesaro" in variables:
        variables["theory_cesaro"] = (("condition", "position"), variables["theory_cesaro"][1][:, 0, 1])
    attrs = {"command": command, "options": json.dumps({"query": LENGTH - 1}), "tokens_sha256": "same"}
    attrs["config"] = json.dumps(LARGE | (config or {}))
    return xr.Dataset(variables, {"condition": list(each), "seed": [0, 1]}, attrs)


def born(values: np.ndarray) -> Collected:
    return given(jacobian={"x": profile(init=values)})


def pretrained(values: np.ndarray, name: str = "x") -> Collected:
    return given(jacobian={name: profile(pretrained=values)})


def trained(before: np.ndarray, after: np.ndarray) -> Collected:
    """Both conditions' elasticity."""
    both = {name: {"sensitivity": one, "elasticity": one} for name, one in (("init", before), ("pretrained", after))}
    return given(jacobian={"x": profile(**both)})


def scalar(condition: str, power: float) -> Collected:
    return given(jacobian={"x": profile(**{condition: U})}, scalar={"x": profile(**{condition: U**power})})


def theory(condition: str, kernel: float, cesaro: float, value: float = 1.0) -> Collected:
    curves = {"sensitivity": U, "theory_score_path": U**kernel, "theory_cesaro": U**cesaro, "value": value * U}
    return given(theory={"x": profile(**{condition: curves})})


# ----------------------------------------------------------------------------------------------------------------- maps


def place(measured: Any = U, **given: Any) -> dict[str, Any]:
    """One of a map; a kernel that is right, and N^L that is not, where they are not given."""
    sizes = {"group": "depth", "strength": 0.05, "width": 256, "blocks": 12, "residual_scale": 1.0, "rope": True}
    curves = dict.fromkeys(("score_path", "value", "config"), measured)
    curves |= dict.fromkeys(("cesaro", "amplitudes"), measured**1.2)
    return sizes | {"name": "", "window": 0, "alpha": 0.3, "measured": measured} | curves | given


def atlas(*found: dict[str, Any]) -> Collected:
    """A map of these places."""
    lengths = [len(one["measured"]) for one in found]
    curves = {name: np.full((len(found), max(lengths)), np.nan) for name in CURVES}
    for name, values in curves.items():
        for row, one, length in zip(values, found, lengths, strict=True):
            row[:length] = one.get(name, np.nan)
    fields = ("group", "strength", "width", "blocks", "residual_scale", "rope", "name", "window", "alpha")
    coords: dict[str, Any] = {field: ("place", [one[field] for one in found]) for field in fields}
    coords |= {"length": ("place", lengths), "label": ("place", [f"place {n}" for n in range(len(found))])}
    variables = {name: (("place", "position"), values) for name, values in curves.items()}
    return given(map={"map": xr.Dataset(variables, coords, {"command": "headwater map", "measurement": "map"})})


def usual(**both: Any) -> Collected:
    """A map of GPT-2 and Qwen2.5-0.5B alone."""
    return atlas(*(place(group="model", name=name, **both) for name in ("GPT-2", "Qwen2.5-0.5B")))


def deep(primacy: Mapping[int, float], strength: float = 0.05) -> list[dict[str, Any]]:
    return [place(curve(one), blocks=blocks, strength=strength) for blocks, one in primacy.items()]


def scaled(*recency: float) -> Collected:
    rows = zip((0.2, 1.0, 2.0), ("residual", "depth", "residual"), recency, strict=True)
    return atlas(*(place(curve(10, last), residual_scale=scale, group=group) for scale, group, last in rows))


def windows(narrow: float, wide: float) -> Collected:
    return atlas(place(), *(place(curve(x), group="window", window=w) for x, w in ((narrow, 32), (wide, 128))))


def of_profiles() -> Cases:
    yield "chowdhury-u-at-birth-gpt2", atlas(place(U, name="GPT-2")), atlas(place(FLAT, name="GPT-2"))
    for end, little in (("", FLAT), ("-strong", curve(1.5))):
        yield f"chowdhury-u-at-birth-everywhere{end}", atlas(place()), atlas(place(), place(little))
        yield f"chowdhury-u-persists{end}", pretrained(U), pretrained(little)
    yield "chowdhury-u-at-birth-bundled", born(U), born(FLAT)
    for end in ("", "-at-any-scale"):
        twins = [(place(strength=0.36), place(x, strength=0.36, rope=False, group="no RoPE")) for x in (U, OTHER)]
        yield f"chowdhury-same-without-rope{end}", atlas(*twins[0]), atlas(*twins[1])
    bundled = [given(jacobian={"x": profile(init=U, **{"init-nope": one})}) for one in (U, OTHER)]
    yield "chowdhury-same-without-rope-bundled", bundled[0], bundled[1]
    yield "chowdhury-cesaro-ranks", usual(), usual(cesaro=OTHER)
    yield "chowdhury-cesaro-exact", usual(cesaro=2 * U), usual()
    yield "chowdhury-continuous-limit", usual(measured=cesaro_bins(LENGTH, 12, alpha=0.3)), usual()
    yield "chowdhury-objection-powers-map", usual(), usual(config=U**1.5)
    yield "chowdhury-objection-powers-map-fitted", usual(), usual(score_path=U**1.5)
    for condition in ("init", "pretrained"):
        yield f"chowdhury-objection-powers-{condition}", theory(condition, 1.1, 1.2), theory(condition, 1.3, 1.2)
        yield f"chowdhury-objection-surrogate-{condition}", scalar(condition, 1.01), scalar(condition, 1.4)
    yield "chowdhury-primacy-tail", usual(), usual(measured=OTHER)
    yield "chowdhury-primacy-tail-everywhere", atlas(place()), atlas(place(), place(OTHER))
    yield "chowdhury-recency-isolated", usual(), usual(measured=curve(10, 1.5))
    longer = [place(curve(10, last, length=80), group="length") for last in (12, 30)]
    yield "chowdhury-recency-order-one", atlas(place(), longer[0]), atlas(place(), longer[1])
    yield "chowdhury-residual-makes-recency", scaled(9, 6, 3), scaled(9, 3, 6)
    yield "chowdhury-dead-zone-factorial", atlas(*deep({2: 5, 4: 30})), atlas(*deep({2: 5, 4: 9, 16: 30}))
    yield "chowdhury-score-path-vanishes-bundled", theory("init", 1, 1.2, 0.99), theory("init", 1, 1.2, 0.9)
    yield "chowdhury-score-path-vanishes-usual", usual(), usual(value=0.5 * U)
    yield "chowdhury-valley-persists", pretrained(VALLEY), pretrained(np.linspace(1, 2, LENGTH))
    yield "chowdhury-baseline-persists", trained(U, U + 0.1), trained(U, U[::-1])
    turns = np.arange(LENGTH)[:, None] * np.array([1, 0.5, 0.5]) * np.pi + [0, 0, np.pi / 2]
    apart = U * np.exp(0.3 * np.cos(turns.T))  # each prompt's spikes where no other's are
    yield "chowdhury-training-adds-spikes", trained(U, apart), trained(apart, U)
    yield "chowdhury-spikes-are-content", trained(U, apart), trained(U, apart[0])
    yield "wu-primacy-grows-with-depth", atlas(*deep({2: 5, 4: 9})), atlas(*deep({2: 5, 4: 4}))
    many = [atlas(*deep({2: 5, 4: 9}), *deep({2: 5, 4: one}, 1.0)) for one in (9, 4)]
    yield "wu-depth-does-not-undo-logits", many[0], many[1]
    yield "wu-window-slows", windows(2, 5), windows(5, 2)


# -------------------------------------------------------------------------------------------- leakage, swaps, trajectory


def leaks(
    *, total: float = 0.05, mask: float = 0.04, stream: Any = 0.02, share: float = 0.3, left: float = 0.0
) -> xr.Dataset:
    """A result of `leakage`, alike in all bands; `stream` is V(X) of the model, or by block."""
    by_block = np.array([0.0, stream, stream] if np.ndim(stream) == 0 else stream)
    tables: dict[str, tuple[str, Any]] = {
        "log_form_of_model": ("part", [total, 0.0, 2 * mask, 0.0, 0.0]),
        "steady_source_of_model": ("source", [total * (1 - share), total * share, 0.0]),
        "log_stream_by_block": ("layer", by_block),
        "steady_stream_by_block": ("layer", by_block),
        "log_sink_by_block": ("layer", 0 * by_block),
        "weight_form_of_model": ("cell", [1e-4, 0, 0, 0]),
        "weight_source_of_model": ("source", [6e-5, 3e-5, 1e-5]),
        "weight_share_of_model": ("source", [0.6, 0.3, 0.1]),
    }
    made = ended(**{name: (np.outer(values, [1, 1]), dim, "band") for name, (dim, values) in tables.items()})
    whole = [np.mean(stream)] * 2
    made |= ended(log_stream_of_model=(whole, "band"), steady_stream_of_model=(whole, "band"))
    made["log_neither"] = (("layer",), np.full(len(by_block), left))
    for what, dim, count in (("form", "cell", len(CELLS)), ("source", "source", len(SOURCES))):
        made[f"weight_{what}_by_block"] = (("layer", dim, "band"), np.full((len(by_block), count, 2), 1e-5))
    coords = {"part": list(PARTS), "source": list(SOURCES), "cell": list(CELLS), "band": list(BANDS)}
    return xr.Dataset(made, coords | {"layer": range(len(by_block))}, real(command="headwater leakage x"))


def leaking(**changes: Any) -> Collected:
    return given(leakage={"x": leaks(), "y": leaks(**changes)})


def thrice(model: str, make: Callable[[float], xr.Dataset]) -> dict[str, xr.Dataset]:
    """Three runs of controlled training, of results made by a factor."""
    return {name: make(by) for name, by in ((model, 1.0), (f"{model}-seed1", 0.95), (f"runs/{model}-seed2", 1.05))}


def trio(ntk: Any = 0.01, plain: Any = 0.02, window: Any = 0.04) -> Collected:
    """Three runs of each controlled model with these V(X)."""
    found: dict[str, xr.Dataset] = {}
    for name, value in ((NTK, ntk), (PLAIN, plain), (WINDOW, window)):
        found |= thrice(name, lambda by, value=value: leaks(mask=0.04 * by, stream=np.multiply(value, by)))
    bundled = {name: found.pop(name) for name in (NTK, PLAIN, WINDOW)}
    return given(leakage=bundled, controlled__leakage=found)


def swap(
    removed: Mapping[str, float], *, later: float = 0.2, forms: float = 0.4, total: float = 2.0, off: float = 0.1
) -> xr.Dataset:
    """A result of `bos_swap`: what replacements remove early and later, by other definitions, and the total after."""
    of_parts, of_sources = (("replacement", of, "layer", "band") for of in ("part", "source"))
    ones = np.ones((len(removed), len(PARTS), 2, len(BANDS)))
    after = ones * (1 - forms)
    after[:, 0] = total
    fractions = [[one, later] for one in removed.values()], "replacement", "band"
    made = ended(off, removed_of_model=fractions, removed_steady_of_model=fractions)
    made |= ended(leakage_change=(after - ones, *of_parts))
    made |= {"leakage_before": (of_parts, ones), "leakage_after": (of_parts, after)}
    for when, own, others in (("before", 1.0, -1.0), ("after", 1 - forms, -0.5)):  # below 0: no fraction to take
        made[f"residual_steady_{when}_of_model"] = ("replacement", "band"), ones[:, 0, 0] * own
        made |= {f"{name}_{when}": (of_sources, ones[:, :3] * others) for name in ("source", "weight")}
    coords = {"replacement": list(removed), "part": list(PARTS), "source": list(SOURCES), "band": list(BANDS)}
    return xr.Dataset(made, coords, real(command="headwater bos-swap x", first_policy="bos"))


def swapped(*removed: float, name: str = "x", kind: str = "bos_swap", first: str = "bos", **others: Any) -> Collected:
    ds = swap(dict(zip(("mean", "zero"), removed, strict=False)), **others)
    return given(**{kind: {name: ds.assign_attrs(first_policy=first)}})


def following(change: float = 0.0, cosine: float = 0.1, ratio: float = 5.0, massive: float = 1.0) -> Collected:
    """Results of `trajectory`: change by other text, cosine, ratio of norms and number of massive dimensions."""
    made = ended(0, cosine=(np.full((1, 3), cosine), "place", "layer"))
    for name, value in (("later_difference", change), ("norm_first", ratio), ("norm_others", 1)):
        made[name] = ("first", "layer"), np.full((2, 3), value)
    for name, dim, value in (("massive", "rule", massive), ("top_ratio", "rank", 2000.0)):
        made[name] = ("first", "layer", dim), np.full((2, 3, 2), value)
    coords = {"first": ["bos", "text"], "place": ["position 0"]}
    return given(trajectory={"x": xr.Dataset(made, coords, real(command="headwater trajectory x"))})


def intervened(**changes: float) -> Collected:
    """Change of loss and KL under interventions: 1 nat where no other is given."""
    names = ["drawn", "without-0", "held-log-z", "constant-sink"]
    values = [changes.get(name.replace("-", "_"), 1.0) for name in names], "replacement"
    made = ended(loss_change_of_model=values, kl_of_model=values)
    return given(interventions__bos_swap={"x": xr.Dataset(made, {"replacement": names}, real())})


def of_ruscio() -> Cases:
    for name, changes in (
        ("absolute-position-leaks", {"total": -0.01}),
        ("mask-is-a-source", {"mask": -0.01}),
        ("isolation-mask-alone", {"mask": -0.01}),
        ("residual-stream-is-a-source", {"stream": 0.0}),
        ("residual-stream-with-constant-sink", {"stream": 0.0}),
        ("residual-stream-adds", {"share": -0.2}),
        ("isolation-design", {"left": 1e-3}),
        ("isolation-mask-dominates", {"share": 0.7}),
        ("isolation-null", {"stream": [0.01, 0.02, 0.03]}),
    ):
        yield f"ruscio-{name}", leaking(), leaking(**changes)
    hub = [given(leakage={name: leaks(stream=stream) for name in HUB}) for stream in (0.02, 0.0)]
    yield "ruscio-both-in-published-models", hub[0], hub[1]
    yield "ruscio-both-in-all-architectures", trio(), trio(plain=0.0)
    yield "ruscio-ntk-suppresses", trio(), trio(ntk=0.05)
    yield "ruscio-standard-between", trio(), trio(plain=0.05)
    yield "ruscio-window-grows-with-depth", trio(window=[0.0, 0.01, 0.1]), trio(window=[0.1, 0.01, 0.0])
    yield "ruscio-bos-removes-40", swapped(0.41, 0.4), swapped(0.4, 0.8)
    yield "ruscio-bos-removes-40-mistral-7b", swapped(0.4, name=HUB[1]), swapped(0.8, name=HUB[1])
    yield "ruscio-text-removes-some", swapped(0.4, first="none"), swapped(0.4, -0.1, first="none")
    yield "ruscio-protocol-replacement", swapped(0.4, 0.41), swapped(0.3, 0.9)
    yield "ruscio-protocol-form", swapped(0.4, forms=0.41), swapped(0.4, forms=0.8)
    yield "ruscio-sinks-stabilize", swapped(0.4), swapped(0.4, total=0.5)
    yield "ruscio-protocol-band", swapped(0.4), swapped(0.4, later=0.8)
    yield "ruscio-position-0-closed", following(), following(change=1e-9)
    yield "ruscio-fingerprint-constant", following(), following(change=1e-9)
    yield "ruscio-fingerprint-varies", following(), following(cosine=0.95)
    yield "gu-stream-of-sink-large", following(), following(ratio=1.5)
    yield "gu-massive-activations", following(), following(massive=0.0)
    yield "ruscio-position-0-needed", intervened(without_0=2.0), intervened(without_0=-2.0)
    yield "ruscio-denominators-steadied", intervened(held_log_z=2.0), intervened(held_log_z=-2.0)
    yield "ruscio-token-at-0-matters-less", intervened(drawn=0.1), intervened(drawn=4.0)
    yield "ruscio-constant-logit-suffices", intervened(constant_sink=0.1), intervened(constant_sink=4.0)


# ------------------------------------------------------------------------------------------------------- sinks, recall


def sunk(rate: float = 0.5, other: float = 0.0, *, length: int = 64, bos: bool = True, **changes: float) -> xr.Dataset:
    """A result of `sinks`: keys 0 and 1 of five heads in two blocks, of which `rate` and `other` are sinks."""
    own = {"over": 0.2, "value": 0.2, "key": 0.5, "reads": 0.1, "written": 0.2, "reacts": 0.2} | changes
    alpha = np.full((4, 10, 2), [0.05, 0.02])
    for at, share in enumerate((rate, other)):  # of the heads, in every prompt alike
        alpha[:, : round(10 * share), at] = 0.6
    heads = ("layer", "head")
    made = ended(0.05, **{name: (np.full((2, 5), own[name]), *heads) for name in ("written", "reacts")})
    made |= {f"{name}_norm": ((*heads, "place"), np.full((2, 5, 2), [own[name], 1])) for name in ("value", "key")}
    made |= {"attends": (heads, np.full((2, 5), 0.4)), "reads": (heads, np.full((2, 5), own["reads"]))}
    made |= {
        "alpha": (("prompt", *heads, "key"), alpha.reshape(4, 2, 5, 2)),
        "sink_rate_of_model": ("key", [(alpha[..., 0] > 0.3).mean(), other]),
        "over_tau_of_model": ("key", [own["over"], 0.1]),
        "uniform": (("layer", "key"), np.full((2, 2), 0.06)),
        "tokens": (("prompt", "position"), np.zeros((4, length), np.int64)),
    }
    attrs = real(options='{"threshold": 0.3}', first_policy="bos" if bos else "none")
    return xr.Dataset(made, {"key": [0, 1], "place": ["sink", "rest"]}, attrs)


def sinking(*args: float, **changes: Any) -> Collected:
    return given(sinks={"x": sunk(bos=changes.get("bos", True)), "y": sunk(*args, **changes)})


def steps(*rates: float, last: str = "") -> Collected:
    """Three runs at step 0, step 1,000 and the end, or `last`."""
    names = [f"{run}{step}" for run in ("x", "y", "z") for step in ("@step0", "@step1000", last)]
    return given(steps={name: sunk(rate) for name, rate in zip(names, rates * 3, strict=True)})


def of_runs(kind: str, **rates: float) -> Collected:
    """Three runs of each of these models."""
    found: dict[str, xr.Dataset] = {}
    for name, rate in rates.items():
        found |= thrice(name.replace("_", "-"), lambda by, rate=rate: sunk(rate))
    return given(**{kind: found})


def cached(none: float, one: float, four: float, by_text: float = 1.0) -> Collected:
    """What caches cost with so many first keys and positions by the cache; `by_text` that of four by the text's."""
    dims, mean = ("first_keys", "last_keys", "numbering", "cache"), np.zeros((3, 2, 2, 2))
    mean[..., 1, 1] = np.array([none, one, four])[:, None]
    mean[..., 0, 1] = np.array([none, one, by_text])[:, None]
    made = ended(evict_loss_change=(mean, *dims))
    made["evict_loss_change_by_prompt"] = ("prompt", *dims), mean + np.array([-0.01, 0.0, 0.01]).reshape(3, 1, 1, 1, 1)
    coords = {
        "first_keys": [0, 1, 4],
        "last_keys": [64, 128],
        "numbering": ["text", "cache"],
        "cache": ["whole", "cut"],
    }
    return given(evict__sinks={"x": xr.Dataset(made, coords, real())})


def collecting(excess: float) -> Collected:
    """A result of `sinks` over all keys: two blocks, in each a token with so much above uniform attention."""
    made = ended(token_excess=([[excess, np.nan], [0.01, np.nan]], "layer", "collector"))
    made["token_id"] = ("layer", "collector"), np.array([[7, -1], [8, -1]])
    names = ("layer", "collector"), [[".", ""], [",", ""]]
    return given(all_keys__sinks={"x": xr.Dataset(made, {"layer": [0, 1], "collector_token": names}, real())})


def recalled(first: float, last: float) -> Collected:
    """Recall of 20 lists of 12 pairs, at either end so much above the middle, with a little noise."""
    values = 0.5 + 0.01 * np.random.default_rng(0).standard_normal((20, 12))
    values[:, 0] += 0.3 * first
    values[:, -1] += 0.3 * last
    attrs = real(options=json.dumps({"pairs": 12, "keys": "apart"}))
    made = {name: (("context", "depth"), values) for name in ("exact", "log_p")}
    return given(retrieval={"x": xr.Dataset(made, {"context": range(20), "depth": range(12)}, attrs)})


def traced(by: float, tells: float = 1.0) -> Collected:
    """A result with a mechanism: gain rises (or falls) with every profile, sensitivity with exact answers."""
    draw, depth = np.random.default_rng(0), np.arange(12)
    noise = 0.01 * draw.standard_normal((20, 12))
    exact = (draw.random((20, 12)) < 0.5).astype(float)
    own = tells * (exact[:12] - 0.5) + 0.01 * draw.standard_normal((12, 12)) + 2.0
    made: dict[str, Any] = {name: ("depth", 1 / (1.0 + depth)) for name in ("profile", "profile_init")}
    made |= {"gain": (("context", "depth"), noise + by * depth[::-1] / 12), "exact": (("context", "depth"), exact)}
    made |= {"sensitivity": (("traced", "traced_depth", "part"), own[:, :, None]), "place": ("depth", 12 * depth)}
    coords: dict[str, Any] = {"context": range(20), "depth": depth, "traced": range(12), "traced_depth": depth}
    attrs: dict[str, Any] = real() | {"query": 150}
    return given(mechanism__retrieval={"x": xr.Dataset(made, coords | {"part": ["pair"]}, attrs)})


def of_sinks() -> Cases:
    yield "ruscio-sink-reading-heads", sinking(), sinking(written=0.05)
    yield "ruscio-heads-react", sinking(), sinking(reacts=0.05)
    yield "gu-sink-rate-llama3-8b", given(sinks={HUB[0]: sunk(0.9)}), given(sinks={HUB[0]: sunk(0.5)})
    yield "gu-sinks-in-small-models", sinking(), sinking(0.0)
    inputs = [given(sinks={"x": sunk()}, code__sinks={"x": sunk(rate)}) for rate in (0.5, 0.0)]
    yield "gu-sinks-with-various-inputs", inputs[0], inputs[1]
    yield "gu-first-token-above-uniform", sinking(), sinking(0.0)
    yield "gu-first-token-alone", sinking(), sinking(0.5, 0.7)
    yield "gu-no-meaning-needed", sinking(bos=False), sinking(0.0, bos=False)
    yield "gu-no-token-collects", collecting(0.05), collecting(0.3)
    yield "gu-emerges-in-training", steps(0, 0, 0.5), steps(0.2, 0.5, 0.5)
    yield "gu-emerges-when", steps(0, 0, 0.5, last="@step2000"), steps(0, 0.5, 0.5)
    yield "gu-values-small", sinking(), sinking(value=0.9)
    yield "gu-keys-small", sinking(), sinking(key=1.5)
    yield "gu-stores-attention", sinking(), sinking(reads=0.5)
    plain, window = "tiny_llama", "tiny_mistral_window"
    yield "gu-window-absolute-first", of_runs("sinks", **{window: 0.5}), of_runs("sinks", **{window: 0.0})
    yes, no = (of_runs("sinks", **{plain: 0.5, window: rate}) for rate in (0.0, 0.5))
    yield "gu-window-prevents", yes, no
    learned = [of_runs("controlled__sinks", tiny_sink_logits=rate, tiny_no_sink_logits=0.5) for rate in (0.0, 0.5)]
    yield "gu-learned-sink-replaces-first", learned[0], learned[1]
    yield "wu-first-token-sink-pretrained", sinking(), sinking(over=0.05)
    yield "xiao-window-attention-fails", cached(2, 0.5, 0.1), cached(0.5, 0.5, 0.1)
    yield "xiao-first-keys-recover", cached(2, 0.5, 0.1), cached(2, 0.5, 0.4)
    yield "xiao-one-is-not-enough", cached(2, 0.5, 0.1), cached(2, 0.1, 0.2)
    yield "xiao-positions-within-the-cache", cached(2, 0.5, 0.1), cached(2, 0.5, 0.1, by_text=0.05)
    yield "liu-recall-primacy-exact", recalled(1.0, 1.0), recalled(-1.0, 1.0)
    yield "liu-recall-recency-probability", recalled(1.0, 1.0), recalled(1.0, -1.0)
    yield "liu-recall-follows-profile", traced(1.0), traced(-1.0)
    yield "liu-recall-follows-distance", traced(1.0), traced(-1.0)
    yield "liu-recall-predicted", traced(1.0, 1.0), traced(1.0, -1.0)


CASES = {name: (yes, no) for made in (of_profiles, of_ruscio, of_sinks) for name, yes, no in made()}
