"""Committed results with a change by hand: for every statement's function some by which it holds, and some by which not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from scipy.special import gamma

from probes.claims.claim import Claim
from probes.claims.gu import TABLE
from probes.claims.own import FORMS
from probes.claims.ruscio import NTK, PLAIN, WINDOW
from probes.claims.sources import STATED
from probes.measures.bos_swap import LEFT_IN, TOTAL, V_X
from probes.measures.bos_swap.compute import ANCHORS
from probes.measures.decode.ridge import bands_of
from probes.measures.leakage import ALL, PARTIES, QUANTILES
from probes.measures.sink_factorial import ARMS
from probes.results.dataset import load
from probes.results.folder import Collected
from probes.theory.cesaro import cesaro_bins

HUB = list(TABLE)[-1]
LLM = Path(__file__).resolve().parent.parent / "reports" / "llm"
Cases = Iterator[Any]  # a name, what it holds by, and what it does not hold by


@cache
def committed(kind: str) -> xr.Dataset:
    """The result of SmolLM2-135M, which has no BOS."""
    return load(next((LLM / kind).glob("*-smollm2-135m.nc.xz")))


def put(ds: xr.Dataset | str, off: float = 0.1, **values: Any) -> xr.Dataset:
    """A result (or the committed one) with other values, and intervals of `off` of their size to either side."""
    ds = committed(ds) if isinstance(ds, str) else ds
    new = {}
    for name, value in values.items():
        new[name] = (0.0 * ds[name] + value).transpose(*ds[name].dims)  # what is NaN stays so
        ends = {f"{name}{end}": new[name] + by * abs(new[name]) for end, by in (("_low", -off), ("_high", off))}
        new |= {end: x for end, x in ends.items() if end in ds}
    return ds.assign(new)


def given(**kinds: xr.Dataset | Mapping[str, xr.Dataset]) -> Collected:
    """Results as `collect` gives them, alone that of "x"; "code__bos_swap" is the kind "code/bos-swap"."""
    named = {kind.replace("__", "/").replace("_", "-"): results for kind, results in kinds.items()}
    return Collected(LLM, {k: {"x": of} if isinstance(of, xr.Dataset) else dict(of) for k, of in named.items()})


def judged(name: str, collected: Collected) -> Claim:
    return STATED[name].judged(collected)


def along(values: Any, dim: str = "position") -> xr.DataArray:
    return xr.DataArray(np.asarray(values, dtype=float), dims=dim)


def curve(first: Any = 10.0, last: Any = 10.0, *, x: xr.DataArray | int) -> xr.DataArray:
    """Falls from `first` to 1, and ends in `last`; over positions from 0 to 1, or so many of them."""
    x = along(np.linspace(0, 1, x)) if isinstance(x, int) else x
    return xr.where(x == 1, last, 1 + (first - 1) * np.exp(-20 * x))


# ----------------------------------------------------------------------------------------------------------------- maps


def mapped(**values: Any) -> Collected:
    return given(map={"map": put(load(LLM.parent / "theory" / "map.nc"), **values)})


def of_maps() -> Cases:
    whole = mapped()["map"]["map"]
    x = (along(range(1024)) / (whole["length"] - 1)).clip(max=1)
    u, measured, scale, depth = curve(x=x), whole["measured"], whole["residual_scale"], whole["blocks"]
    yield "chowdhury-u-at-birth", mapped(), mapped(measured=1.0)
    for end, little in (("", 0.5), ("-strong", 1.5)):
        some = xr.where(whole["blocks"] == 32, curve(little, x=x), u)
        yield f"chowdhury-u-at-birth-everywhere{end}", mapped(measured=u), mapped(measured=some)
    for end in ("", "-at-any-scale"):
        other = xr.where(whole["rope"], u, curve(x=1 - x))
        yield f"chowdhury-same-without-rope{end}", mapped(measured=u), mapped(measured=other)
    yield "chowdhury-cesaro-ranks", mapped(), mapped(cesaro=1 / measured)
    yield "chowdhury-cesaro-wasserstein", mapped(cesaro=measured + 1e-6), mapped()
    limits = {place: cesaro_bins(256, blocks, alpha=0.3) for place, blocks in ((8, 12), (9, 24))}
    places = [limits.get(n, np.ones(256)) for n in range(57)]
    limit = xr.DataArray(np.pad(places, ((0, 0), (0, 768))), dims=("place", "position"))
    yield "chowdhury-cesaro-exact", mapped(measured=limit, cesaro=limit, alpha=0.3), mapped()
    yield "chowdhury-objection-powers-map", mapped(), mapped(config=measured**2)
    yield "chowdhury-primacy-tail", mapped(), mapped(measured=1 / measured)
    yield "chowdhury-primacy-tail-everywhere", mapped(measured=u), mapped()
    yield "chowdhury-recency-order-one", mapped(measured=u), mapped()
    yield "chowdhury-recency-isolated", mapped(), mapped(measured=curve(last=1.5, x=x))
    made = [mapped(measured=curve(last=last, x=x)) for last in (9 / scale, 9 * scale)]
    yield "chowdhury-residual-makes-recency", made[0], made[1]
    factorial = xr.apply_ufunc(lambda blocks: gamma(blocks.astype(float)), depth)
    yield "chowdhury-dead-zone-factorial", mapped(measured=xr.where(x < 0.2, factorial, 1.0)), mapped()
    yield "chowdhury-score-path-vanishes-usual", mapped(), mapped(value=0.5 * measured)
    deeper = [mapped(measured=curve(first, x=x)) for first in (5 * depth, xr.where(depth == 4, 200, 5 * depth))]
    yield "wu-primacy-grows-with-depth", deeper[0], deeper[1]
    strong = xr.where(whole["strength"] > 0.9, 300 / depth, 5 * depth)
    yield "wu-depth-does-not-undo-logits", deeper[0], mapped(measured=curve(strong, x=x))
    width = xr.where(whole["window"] == 0, 512, whole["window"])
    yield "wu-window-slows", *(mapped(measured=curve(first, x=x)) for first in (width, 1e4 / width))


# ------------------------------------------------------------------------------------------------------------ profiles


def jacobian(**values: Any) -> Collected:
    return given(jacobian=put("jacobian", **values))


def theory(kernel: float, value: float = 1.0) -> Collected:
    """N^L is U^1.2 where U was measured."""
    u = curve(x=128)
    powers = {"theory_score_path": u**kernel, "theory_cesaro": u**1.2, "value": value * u}
    return given(theory=put("theory", sensitivity=u, **powers))


def of_profiles() -> Cases:
    whole, u = committed("jacobian"), curve(x=256)
    for end, little in (("", 1.0), ("-strong", curve(1.5, x=256))):
        yield f"chowdhury-u-persists{end}", jacobian(elasticity=u), jacobian(elasticity=little)
    yield "chowdhury-u-at-birth-bundled", jacobian(), jacobian(elasticity=1.0)
    surrogate = [given(jacobian=put(whole, sensitivity=u), scalar=put(whole, sensitivity=u**x)) for x in (1.01, 1.4)]
    for condition in ("init", "pretrained"):
        yield f"chowdhury-objection-powers-{condition}", theory(1.1), theory(1.3)
        yield f"chowdhury-objection-surrogate-{condition}", surrogate[0], surrogate[1]
    yield "chowdhury-score-path-vanishes-bundled", theory(1, 0.99), theory(1, 0.9)
    yield "chowdhury-valley-persists", jacobian(), jacobian(sensitivity=along(np.linspace(1, 2, 256)))
    yield "chowdhury-baseline-persists", jacobian(elasticity=u), jacobian()
    swapped = whole.assign_coords(condition=whole["condition"].values[::-1])
    yield "chowdhury-training-adds-spikes", jacobian(), given(jacobian=swapped)
    yield "chowdhury-spikes-are-content", jacobian(), jacobian(elasticity=whole["elasticity"].isel(prompt=0))


# -------------------------------------------------------------------------------------------- leakage, swaps, trajectory


def leak() -> xr.Dataset:
    """The committed result, with medians over heads and a matrix of the parties whose mean sums to its total."""
    ds = committed("leakage")
    total = ds["log_form_of_model"].sel(part="total", drop=True)
    names = [*PARTIES, ALL]
    weights = xr.DataArray(np.ones((4, 4)), {"party": names, "other": names}, ("party", "other"))
    new = {
        "log_form_of_heads": along([1, 1, 1], "quantile") * total,
        "null_shuffled": along([0, 0, 0], "quantile") * total,
    }
    new |= dict.fromkeys(("parties_of_model", "parties_of_heads"), weights * total / 9)
    ends = {f"{name}_{end}": values for name, values in new.items() for end in ("low", "high")}
    return put(ds.drop_vars("null_shuffled").assign(new | ends).assign_coords(quantile=list(QUANTILES)), **new)


def leaking(**values: Any) -> Collected:
    return given(leakage={"x": leak(), "y": put(leak(), **values)})


def thrice(model: str, ds: xr.Dataset, *scaled: str) -> dict[str, xr.Dataset]:
    """Three runs of controlled training, alike but for the size of some variables."""
    names = {model: 1.0, f"{model}-seed1": 0.95, f"runs/{model}-seed2": 1.05}
    return {name: put(ds, **{variable: by * ds[variable] for variable in scaled}) for name, by in names.items()}


def trio(ntk: float = 0.01, plain: float = 0.02, window: float = 0.04) -> Collected:
    """Three runs of each controlled model with this V(X), and as much more in each block."""
    runs: dict[str, xr.Dataset] = {}
    variables = ("steady_stream_of_model", "steady_stream_by_block", "log_form_of_model")
    for name, value in ((NTK, ntk), (PLAIN, plain), (WINDOW, window)):
        by_block = value * along(np.arange(30), "layer")
        ds = put("leakage", steady_stream_of_model=value, steady_stream_by_block=by_block)
        runs |= thrice(name, ds, *variables)
    return given(controlled__leakage=runs)


def swap(*removed: float, later: float = 0.2, first: str = "bos", off: float = 0.1, **others: float) -> xr.Dataset:
    """A result of `bos-swap`: what replacements remove at early queries, and later, as shares and nat^2."""
    names, bands = ["mean", "random"][: len(removed)], ["9-31", "32-63"]
    given = {V_X: removed, LEFT_IN: removed} | {name: [by] * len(removed) for name, by in others.items()}
    early = np.array([given[name] for name in given]).T[..., None]
    shares = np.concatenate([early, np.full_like(early, later)], -1)
    variables = {f"component_{what}": shares for what in ("share", "removed")}
    ends = {
        f"{name}{end}": x + by * off * abs(x)
        for name, x in variables.items()
        for end, by in (("_low", -1), ("_high", 1))
    }
    dims = ("replacement", "definition", "band")
    coords = {"replacement": names, "definition": list(given), "band": bands}
    attrs = committed("bos-swap").attrs | {"first_policy": first}
    return xr.Dataset({name: (dims, x) for name, x in (variables | ends).items()}, coords, attrs)


def swapped(*removed: float, name: str = "x", **others: Any) -> Collected:
    return given(bos_swap={name: swap(*removed, **others)})


def following(first: str = "bos", **values: float) -> Collected:
    ds = committed("trajectory").assign_coords(first=[first])
    usual = {"later_difference": 0.0, "cosine": 0.1, "norm_first": 5.0, "norm_others": 1.0, "massive": 1.0}
    return given(trajectory=put(ds, 0.0, **usual | values))


def intervened(replacement: str = "", kl: float = 1.0, loss: float = 1.0) -> Collected:
    """The change of loss, and the KL divergence of one intervention: 1 nat by any other."""
    ds = committed("interventions/bos-swap")
    divergence = xr.where(ds["replacement"] == replacement, kl, 1.0)
    return given(interventions__bos_swap=put(ds, loss_change_of_model=loss, kl_of_model=divergence))


def reaching(*lengths: int, last: float = 0.3) -> Collected:
    """R^2 of 0.5 in all octaves but the last, by length."""
    found = {}
    for kind, length in zip(("horizon", "t1024__horizon"), lengths, strict=False):
        octaves = [*bands_of(length)]
        values = np.array([[*[0.5] * (len(octaves) - 1), last]])
        variables = {
            f"r2_chosen{end}": (("arm", "octave"), values + by)
            for end, by in (("", 0), ("_low", -0.01), ("_high", 0.01))
        }
        coords = {"arm": ["as it is"], "octave": octaves, "prompt": range(16), "position": range(length)}
        found[kind] = xr.Dataset(variables, coords, committed("bos-swap").attrs)
    return given(**found)


def of_ruscio() -> Cases:
    yield "ruscio-horizon-60", reaching(256, last=0.05), reaching(256, last=0.2)
    yield "ruscio-horizon-does-not-scale", reaching(512, 1024, last=0.02), reaching(512, 1024)
    for name, changes in (
        ("absolute-position-leaks", {"log_form_of_heads": -0.01}),
        ("mask-is-a-source", {"log_form_of_model": -0.01}),
        ("residual-stream-is-a-source", {"steady_stream_of_model": 0.0}),
        ("residual-stream-with-constant-sink", {"log_stream_of_model": 0.0}),
        ("isolation-design", {"log_neither": 1e-3}),
    ):
        yield f"ruscio-{name}", leaking(), leaking(**changes)
    sources = [put(leak(), parties_of_heads=along(x, "party")) for x in ([3, 0, 1, 4], [1, 0, 3, 4])]
    yield "ruscio-isolation-mask-dominates", given(leakage=sources[0]), given(leakage=sources[1])
    null = [put("leakage", log_stream_by_block=x, log_sink_by_block=0.0) for x in (0.0, 0.05)]
    yield "ruscio-isolation-null", given(leakage=null[0]), given(leakage=null[1])
    ends = {f"null_unmasked{end}": f"log_form_of_heads{end}" for end in ("", "_low", "_high")}
    bare = [leak().assign({name: by * leak()[of] for name, of in ends.items()}) for by in (0.01, 0.5)]
    yield "ruscio-mask-removed", given(unmasked__leakage=bare[0]), given(unmasked__leakage=bare[1])
    yield "ruscio-both-in-all-architectures", trio(), trio(plain=0.0)
    yield "ruscio-architectures", trio(), trio(plain=0.05)
    yield "ruscio-bos-removes-40", swapped(0.9, **{LEFT_IN: 0.4}), swapped(0.9, **{TOTAL: 0.4})
    yield "ruscio-protocol-replacement", swapped(0.4, 0.41), swapped(0.3, 0.9)
    yield "ruscio-protocol-form", swapped(0.4, **{TOTAL: 0.41}), swapped(0.4, **{TOTAL: 0.8})
    yield "ruscio-sinks-stabilize", swapped(0.4, **{TOTAL: -1.0}), swapped(0.4, **{TOTAL: 0.5})
    yield "ruscio-protocol-band", swapped(0.4), swapped(0.4, later=0.8)
    yield "ruscio-position-0-closed", following("text"), following("text", later_difference=1e-9)
    yield "ruscio-fingerprint-constant", following(), following(later_difference=1e-9)
    yield "ruscio-fingerprint-varies", following(), following(cosine=0.95)
    yield "gu-stream-of-sink-large", following(), following(norm_first=1.5)
    yield "gu-massive-activations", following(), following(massive=0.0)
    yield "ruscio-position-0-needed", intervened(loss=2.0), intervened(loss=-2.0)
    yield "ruscio-denominators-steadied", intervened(loss=2.0), intervened(loss=-2.0)
    yield "ruscio-token-at-0-matters-less", intervened("drawn", 0.1), intervened("drawn", 4.0)
    yield "ruscio-constant-logit-suffices", intervened("constant-sink", 0.1), intervened("constant-sink", 4.0)
    yield "own-brake-and-bias", apart(-9.0), apart(9.0)
    yield "own-brake-off-helps-recall", apart(recall=9.0), apart(recall=-9.0)
    for name in ("own-brake-by-query", "own-brake-of-the-sink"):
        yield name, apart(-9.0, kind="controls__sink_factorial"), apart(9.0, kind="controls__sink_factorial")


def apart(interaction: float = 0.0, recall: float = 0.0, kind: str = "sink_factorial") -> Collected:
    """What both arms together change beyond their sum, at position 0 and not in its controls, and recall by every arm."""
    ds = committed("sink-factorial").drop_dims("set")
    coords = {"set": ["position 0", "constant gain", "key 1"], "arm": list(ARMS)}
    beyond = xr.DataArray(np.outer([interaction, 0, 0], [0, 0, 1.0]), coords, ("set", "arm")) + 0.0 * ds["block"]
    changes = {name: 0.01 * ds[f"{name}_before"] + beyond for name in ("loss", "recall")}
    return given(**{kind: ds.assign(loss_change=changes["loss"], recall_change=changes["recall"] + recall)})


# ------------------------------------------------------------------------------------------------------- sinks, recall


def sinking(**values: Any) -> Collected:
    return given(sinks={"x": committed("sinks"), "y": put("sinks", **values)})


def steps(*there: bool, last: str = "") -> Collected:
    """Three runs at step 0, step 1,000 and the end, or `last`, with their sink or without."""
    names = [f"{run}{step}" for run in ("x", "y", "z") for step in ("@step0", "@step1000", last)]
    at = [committed("sinks") if one else put("sinks", alpha=0.0) for one in there]
    return given(steps=dict(zip(names, at * 3, strict=True)))


def of_runs(kind: str, **there: bool) -> Collected:
    """Three runs of each of these models, with a sink or without."""
    runs: dict[str, xr.Dataset] = {}
    for name, one in there.items():
        runs |= thrice(name.replace("_", "-"), put("sinks", alpha=one * along([1] + [0.3] * 7, "key")), "uniform")
    return given(**{kind: runs})


def cached(none: float, one: float, four: float, by_text: float = 1.0) -> Collected:
    """What caches cost with so many first keys and positions by the cache; `by_text` that of four by the text's."""
    ds = committed("evict/sinks").isel(last_keys=[0]).assign_coords(last_keys=[1020])
    ds = ds.drop_dims("position").assign_coords(position=range(8192))
    cost = xr.where(
        (ds["numbering"] == "text") & (ds["first_keys"] == 4), by_text, along([none, one, four], "first_keys")
    )
    return given(evict__sinks=put(ds, evict_loss_change=cost, evict_loss_change_by_prompt=cost))


def of_sinks() -> Cases:
    sinks, last = committed("sinks"), committed("sinks").assign_coords(key=range(7, -1, -1))
    shares = [along([reads, 0, 0, 1 - reads], "role") for reads in (0.01, 0)]
    reading = [sinks.assign({f"role_share{end}": of for end in ("", "_low", "_high")}) for of in shares]
    yield "ruscio-sink-reading-heads", *(given(sinks=ds) for ds in reading)
    yield "ruscio-heads-react", given(sinks=put(sinks, reacts=0.2)), sinking(reacts=0.05)
    short = [put("t64/sinks", alpha=along(range(9), "head") >= first) for first in (0, 4)]
    yield "gu-sink-rates", *(given(sinks={HUB: ds.assign_attrs(model=HUB)}) for ds in short)
    yield "gu-sinks-in-small-models", sinking(), sinking(alpha=0.0)
    inputs = [given(sinks=sinks, code__sinks=put(sinks, alpha=alpha)) for alpha in (1.0, 0.0)]
    yield "gu-sinks-with-various-inputs", inputs[0], inputs[1]
    yield "gu-first-token-above-uniform", sinking(), sinking(alpha=0.02)
    yield "gu-first-token-alone", sinking(), given(sinks=last)
    anchor = xr.DataArray(np.ones((2, 8)), {"replacement": [*ANCHORS], "key": range(8)}, ("replacement", "key"))
    ends = [{f"sink_rate_after_of_model{end}": x * anchor for end in ("", "_low", "_high")} for x in (0.5, 0.0)]
    yield "gu-no-meaning-needed", *(given(bos_swap=xr.Dataset(of, attrs=committed("bos-swap").attrs)) for of in ends)
    yield "gu-no-token-collects", *(given(all_keys__sinks=put("all-keys/sinks", token_excess=x)) for x in (0.05, 0.3))
    yield "gu-emerges-in-training", steps(False, False, True), steps(True, True, True)
    yield "gu-emerges-when", steps(False, False, True, last="@step2000"), steps(False, True, True)
    yield "gu-values-small", sinking(), sinking(value_norm=1.0)
    yield "gu-keys-small", sinking(), sinking(key_norm=along([1.5, 1], "place"))
    yield "gu-stores-attention", given(sinks=put(sinks, reads=0.1)), sinking(reads=1.0)
    yield "gu-window-absolute-first", *(of_runs("sinks", tiny_mistral_window=there) for there in (True, False))
    yield "gu-window-prevents", *(of_runs("sinks", tiny_llama=True, tiny_mistral_window=x) for x in (False, True))
    learned = [of_runs("controlled__sinks", tiny_sink_logits=x, tiny_no_sink_logits=True) for x in (False, True)]
    yield "gu-learned-sink-replaces-first", learned[0], learned[1]
    yield "wu-first-token-sink-pretrained", sinking(), given(sinks=last)
    yield "xiao-window-attention-fails", cached(2, 0.5, 0.1), cached(0.5, 0.5, 0.1)
    yield "xiao-first-keys-recover", cached(2, 0.5, 0.1), cached(2, 0.5, 0.4)
    yield "xiao-one-is-not-enough", cached(2, 0.5, 0.1), cached(2, 0.1, 0.2)
    yield "xiao-positions-within-the-cache", cached(2, 0.5, 0.1), cached(2, 0.5, 0.1, by_text=0.05)
    recall = committed("retrieval")
    yield "liu-recall-primacy", *(given(retrieval=put(recall, exact=x * recall["exact"])) for x in (1, -1))
    follows = [given(mechanism__retrieval=put(recall, gain=sign * recall["place"])) for sign in (-1, 1)]
    yield "liu-recall-follows-distance", follows[0], follows[1]


def in_context(sign: float) -> Collected:
    """Three models whose gain and changes of log p are so many times the log norm, and noise."""
    draw, kinds = np.random.default_rng(0), dict[str, Any]()
    plain, shocked, place = ("context", "depth"), ("shock", "traced", "depth"), ("depth", 6 + 12 * np.arange(24))
    for kind in FORMS:
        of = kinds.setdefault(kind.replace("-", "_").replace("/", "__"), {})
        for model in "xyz":
            norm, change = draw.normal(size=24) + draw.normal(size=(12, 24)), draw.normal(size=(2, 12, 24))
            log_p = sign * norm + draw.normal(size=norm.shape)
            after = log_p + sign * change + draw.normal(size=change.shape)
            values = {
                "gain": (plain, log_p),
                "log_p": (plain, log_p),
                "log_p_shocked": (shocked, after),
                "place": place,
            }
            values |= {"norm_profile": (shocked[1:], np.exp(norm)), "norm_shocked": (shocked, np.exp(norm + change))}
            coords = {"context": range(12), "traced": range(12)}
            of[model] = xr.Dataset(values, coords, committed("retrieval").attrs | {"query": 300})
    return given(**kinds)


def of_contexts() -> Cases:
    yield "own-sensitivity-in-context", in_context(1), in_context(0)
    for name in ("within", "shocks"):
        yield f"own-sensitivity-{name}", in_context(1), in_context(-1)


CASES = {
    name: (yes, no) for made in (of_maps, of_profiles, of_ruscio, of_sinks, of_contexts) for name, yes, no in made()
}
