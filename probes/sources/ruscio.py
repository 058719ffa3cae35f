"""[Ruscio], arXiv 2606.06160, "Where does Absolute Position come from in decoder-only Transformers?", and what its reviewers
asked for: a protocol behind the 40 %, and the two channels isolated under control.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import xarray as xr

from ..claims import Judged, Statement
from ..leakage import null_fails, resolved
from ..sinks import RULES
from ..studies.collected import Collected
from ..studies.tables import CONTROLLED, interval, number
from ..summary import estimate, spearman
from .judging import COMMANDS, Results, Stated, Told, commands, having, in_each, stated, with_bos

SOURCE = "[Ruscio]"
PROTOCOL = "[Ruscio], reviewers: protocol of the 40 %"
ISOLATION = "[Ruscio], reviewers: controlled isolation"
STATED: Stated = []

REMOVED = 0.40  # published
NOTHING = 1e-12  # squared nats; rounding leaves less
SUMS = 1e-6  # relative, of parts that make up a total exactly
APART = 0.9  # mean cosine below which streams of different tokens have not become one
NTK, PLAIN, WINDOW = CONTROLLED
PUBLISHED_MODELS = {
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B",
}
ARCHITECTURES = ", ".join(CONTROLLED)


def _early(ds: xr.Dataset) -> str:
    return str(ds["band"].values[0])


def _leaking(collected: Collected) -> dict[str, xr.Dataset]:
    return having(collected["leakage"], "log_form_of_model", "log_source_of_model", "log_stream_of_model")


def _chosen(collected: Collected, *names: str) -> dict[str, xr.Dataset]:
    """These models' leakage; nothing where one is missing."""
    found = {name: ds for name, ds in _leaking(collected).items() if name in names}
    return found if len(found) == len(names) else {}


# -------------------------------------------------------------------------------------------------------- the two sources


@stated(
    Statement(
        "ruscio-absolute-position-leaks",
        f"{SOURCE} abstract",
        "Attention patterns of RoPE models depend on absolute position.",
        "the interval of total leakage (log form, early queries) lies above 0 in every model",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _leaks(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        total = estimate(ds, "log_form_of_model", part="total", band=_early(ds))
        return f"{interval(*total)} nat² at queries {_early(ds)}", total[1] > 0

    return in_each(_leaking(collected), judge)


def _mask_told(ds: xr.Dataset) -> Told:
    own = estimate(ds, "log_source_of_model", source="mask", band=_early(ds))
    return f"mask {interval(*own)} nat²", own[1] > 0


def _stream_told(ds: xr.Dataset) -> Told:
    own = estimate(ds, "log_stream_of_model", band=_early(ds))
    return f"residual component {interval(*own)} nat²", own[1] > 0


def _both_told(ds: xr.Dataset) -> Told:
    (mask, one), (stream, other) = _mask_told(ds), _stream_told(ds)
    return f"{mask}, {stream}", bool(one and other)


@stated(
    Statement(
        "ruscio-mask-is-a-source",
        f"{SOURCE} abstract",
        "The causal mask's denominator is a source of absolute position.",
        "the interval of the mask's part (Shapley value, log form, early queries) lies above 0 in every model",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _mask(collected: Collected) -> Judged | None:
    return in_each(_leaking(collected), _mask_told)


@stated(
    Statement(
        "ruscio-residual-stream-is-a-source",
        f"{SOURCE} abstract",
        "The residual stream is a second source of absolute position beside the mask, whether or not the model has a "
        "BOS.",
        "the interval of the residual component V(X) (log form, early queries) lies above 0 in every model",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _stream(collected: Collected) -> Judged | None:
    return in_each(_leaking(collected), _stream_told)


@stated(
    Statement(
        "ruscio-both-in-all-architectures",
        f"{SOURCE} abstract",
        "Both components of leakage, mask and residual stream, appear under NTK-scaled RoPE, standard RoPE and a "
        "sliding window.",
        "the intervals of both components (log form, early queries) lie above 0 in all three controlled models",
        model=ARCHITECTURES,
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _both(collected: Collected) -> Judged | None:
    return in_each(_chosen(collected, *CONTROLLED), _both_told)


@stated(
    Statement(
        "ruscio-both-in-published-models",
        f"{SOURCE} abstract",
        "Both components of leakage, mask and residual stream, appear in the three architectures of the paper.",
        "the intervals of both components (log form, early queries) lie above 0 in all three models",
        model=", ".join(PUBLISHED_MODELS.values()),
        command=f"headwater leakage {' '.join(PUBLISHED_MODELS.values())} --prompts 1024 --length 128 --out runs/ruscio",
    ),
    STATED,
)
def _both_published(collected: Collected) -> Judged | None:
    return in_each(_chosen(collected, *PUBLISHED_MODELS.values()), _both_told)


@stated(
    Statement(
        "ruscio-residual-stream-adds",
        f"{SOURCE} abstract",
        "The residual stream supplies a share of the leakage of absolute position.",
        "the interval of the residual stream's share (Shapley value, log form, early queries) lies above 0 in every "
        "model where shares are resolved",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _share(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        band = _early(ds)
        if not resolved(ds, "log", band):
            return "not resolved", None
        own = estimate(ds, "log_share_of_model", source="residual", band=band)
        return interval(*own, form=".0%"), own[1] > 0

    return in_each(having(_leaking(collected), "log_share_of_model", "log_sink_by_block"), judge)


# ------------------------------------------------------------------------------------------------ order of architectures


def _ordered(lower: str, upper: str, collected: Collected) -> Judged | None:
    """Whether the residual component of one model is below that of the other, intervals apart."""
    found = _chosen(collected, lower, upper)
    if not found:
        return None
    one, other = (estimate(found[name], "log_stream_of_model", band=_early(found[name])) for name in (lower, upper))
    apart = "" if one[2] < other[1] or other[2] < one[1] else ": not told apart"
    said = f"{lower} {interval(*one)}, {upper} {interval(*other)} nat²{apart}"
    return Judged(said, one[2] < other[1], f"{lower}, {upper}", commands([found[lower], found[upper]]))


for _id, _claim, _lower, _upper in (
    ("ntk-suppresses", "NTK scaling suppresses the residual component of leakage.", NTK, PLAIN),
    (
        "window-accumulates",
        "A sliding window lets the residual component of leakage grow beyond standard RoPE's.",
        PLAIN,
        WINDOW,
    ),
    (
        "ntk-below-window",
        "NTK scaling leaves less of the residual component of leakage than a sliding window.",
        NTK,
        WINDOW,
    ),
):
    stated(
        Statement(
            f"ruscio-{_id}",
            f"{SOURCE} abstract",
            _claim,
            f"V(X) at early queries of {_lower} is below that of {_upper}, with intervals apart",
            model=f"{_lower}, {_upper}",
            command=COMMANDS["leakage"],
        ),
        STATED,
    )(partial(_ordered, _lower, _upper))


@stated(
    Statement(
        "ruscio-standard-between",
        f"{SOURCE} abstract",
        "The residual component of leakage under standard RoPE lies between those under NTK scaling and a sliding "
        "window.",
        "V(X) at early queries rises from NTK scaling to standard RoPE to the sliding window, with intervals apart",
        model=ARCHITECTURES,
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _between(collected: Collected) -> Judged | None:
    found = _chosen(collected, *CONTROLLED)
    if not found:
        return None
    own = [estimate(found[name], "log_stream_of_model", band=_early(found[name])) for name in CONTROLLED]
    said = ", ".join(f"{name} {interval(*one)}" for name, one in zip(CONTROLLED, own, strict=True))
    holds = own[0][2] < own[1][1] and own[1][2] < own[2][1]
    return Judged(f"{said} nat²", holds, ARCHITECTURES, commands(found[name] for name in CONTROLLED))


@stated(
    Statement(
        "ruscio-window-grows-with-depth",
        f"{SOURCE} abstract",
        "Under a sliding window the residual component accumulates with depth.",
        "rank correlation of V(X) with the block above 0, and the last block's interval above the first block's",
        model=WINDOW,
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _grows(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        by_block = ds["log_stream_by_block"].sel(band=_early(ds))
        if by_block.sizes["layer"] < 2:
            return "-", None
        rho = spearman(np.arange(by_block.sizes["layer"], dtype=float), by_block.values)
        first, last = (
            estimate(ds, "log_stream_by_block", band=_early(ds), layer=ds["layer"].values[n]) for n in (0, -1)
        )
        said = f"rank correlation {number(rho, '.2f')}; first block {interval(*first)}, last {interval(*last)} nat²"
        return said, bool(rho > 0 and first[2] < last[1])

    return in_each(having(_chosen(collected, WINDOW), "log_stream_by_block"), judge)


# -------------------------------------------------------------------------------------------------------------- BOS swap


def _swapped(collected: Collected) -> dict[str, xr.Dataset]:
    return with_bos(having(collected["bos-swap"], "removed_of_model"))


def _replacements(ds: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    if "replacement" in ds.dims:
        return [(str(name), ds.sel(replacement=name)) for name in ds["replacement"].values]
    return [(str(ds.attrs.get("replacement", "replaced")), ds)]


def _removed(ds: xr.Dataset, band: str) -> tuple[float, float, float] | None:
    """The fraction with its interval; None where it takes more prompts to know it."""
    found = estimate(ds, "removed_of_model", band=band)
    return found if np.all(np.isfinite(found)) else None


def _forty(ds: xr.Dataset) -> Told:
    said, right = [], []
    for name, one in _replacements(ds):
        found = _removed(one, _early(one))
        said.append(f"{interval(*found, form='.0%') if found else '?'} ({name})")
        if found:
            right.append(found[1] <= REMOVED <= found[2])
    return ", ".join(said), all(right) if right else None


@stated(
    Statement(
        "ruscio-bos-removes-40",
        f"{SOURCE} abstract",
        "Replacing the BOS embedding removes 40 % of the residual component at early queries.",
        "40 % lies in the 95 % interval of the fraction of V(X) removed, in every model with a BOS and by every replacement",
        published="40 %",
        model="bundled models with BOS",
        command=COMMANDS["bos-swap"],
    ),
    STATED,
)
def _bos_forty(collected: Collected) -> Judged | None:
    return in_each(_swapped(collected), _forty)


@stated(
    Statement(
        "ruscio-bos-removes-some",
        f"{SOURCE} abstract",
        "Part of the residual component at early queries hangs on the embedding at position 0.",
        "the interval of the fraction of V(X) removed at early queries lies above 0 in every model with a BOS, by "
        "every replacement",
        published="40 %",
        model="bundled models with BOS",
        command=COMMANDS["bos-swap"],
    ),
    STATED,
)
def _bos_some(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        told, _ = _forty(ds)
        known = [found for _, one in _replacements(ds) if (found := _removed(one, _early(one)))]
        return told, all(low > 0 for _, low, _ in known) if known else None

    return in_each(_swapped(collected), judge)


def _bos_forty_of(model: str, collected: Collected) -> Judged | None:
    found = {name: ds for name, ds in having(collected["bos-swap"], "removed_of_model").items() if name == model}
    return in_each(found, _forty)


for _id, _model in PUBLISHED_MODELS.items():
    stated(
        Statement(
            f"ruscio-bos-removes-40-{_id}",
            f"{SOURCE} abstract",
            f"In {_model.partition('/')[2]} replacing the embedding at position 0 removes 40 % of the residual component.",
            "40 % lies in the 95 % interval of the fraction of V(X) removed at early queries, by every replacement",
            published="40 %",
            model=_model,
            command=f"headwater bos-swap {_model} --prompts 256 --length 128 --replace mean,zero,random --out runs/{_id}",
        ),
        STATED,
    )(partial(_bos_forty_of, _model))


@stated(
    Statement(
        "ruscio-protocol-replacement",
        PROTOCOL,
        "The fraction of the residual component that a swap removes does not depend on what is put at position 0.",
        "intervals of the fraction of V(X) removed by all replacements (two at least) overlap in every model with a "
        "BOS, at early queries",
        model="bundled models with BOS",
        command=COMMANDS["bos-swap"],
    ),
    STATED,
)
def _by_replacement(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        found = {name: _removed(one, _early(one)) for name, one in _replacements(ds)}
        said = ", ".join(f"{name} {interval(*one, form='.0%') if one else '?'}" for name, one in found.items())
        known = [one for one in found.values() if one]
        if len(known) < 2:
            return said, None
        return said, max(low for _, low, _ in known) <= min(high for *_, high in known)

    several = {name: ds for name, ds in _swapped(collected).items() if len(_replacements(ds)) > 1}
    return in_each(several, judge)


@stated(
    Statement(
        "ruscio-protocol-band",
        PROTOCOL,
        "The fraction of the residual component that a swap at position 0 removes is one of early queries: behind "
        "them less is removed.",
        "in every later band whose interval is apart from that of the early band the fraction of V(X) removed is "
        "below it",
        model="bundled models with BOS",
        command=COMMANDS["bos-swap"].replace("--prompts 256", "--prompts 4096").replace("reports/", "runs/"),
    ),
    STATED,
)
def _by_band(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        said, right = [], []
        for name, one in _replacements(ds):
            found = {str(band): _removed(one, str(band)) for band in one["band"].values}
            told = ", ".join(f"{band}: {interval(*x, form='.0%') if x else '?'}" for band, x in found.items())
            said.append(f"{told} ({name})")
            first, *later = found.values()
            for x in later:
                if x and first and (x[2] < first[1] or x[1] > first[2]):  # else nobody can tell
                    right.append(x[2] < first[1])
        return "; ".join(said), all(right) if right else None

    return in_each(_swapped(collected), judge)


def _fraction(one: xr.Dataset, name: str, **where: str) -> float | None:
    """1 - after / before, means over blocks; None where there is nothing above 0 to take a fraction of."""
    if f"{name}_before" not in one:
        return None
    before, after = (float(one[f"{name}_{when}"].sel(where).mean()) for when in ("before", "after"))
    return 1 - after / before if before > 0 else None


FORMS = {  # other things that "residual component" may be read as: variable, place
    "logits' V(S)": ("leakage", {"part": "logits"}),
    "denominators' V(D)": ("leakage", {"part": "denominator"}),
    "Shapley value of the log form": ("source", {"source": "residual"}),
    "Shapley value of the weight form": ("weight", {"source": "residual"}),
}


@stated(
    Statement(
        "ruscio-protocol-form",
        PROTOCOL,
        "The fraction of the residual component that a swap at position 0 removes does not depend on how that "
        "component is defined.",
        "by every other definition that is above 0 before the swap the fraction removed at early queries lies in the "
        "interval of that of V(X), in every model with a BOS",
        model="bundled models with BOS",
        command=COMMANDS["bos-swap"],
    ),
    STATED,
)
def _by_form(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        all_of_them = _replacements(ds)
        own = {name: _removed(one, _early(one)) for name, one in all_of_them}
        said = ["V(X) " + ", ".join(f"{interval(*x, form='.0%') if x else '?'} ({name})" for name, x in own.items())]
        right = []
        for form, (variable, where) in FORMS.items():
            fractions = {name: _fraction(one, variable, band=_early(one), **where) for name, one in all_of_them}
            known = {name: fraction for name, fraction in fractions.items() if fraction is not None}
            told = ", ".join(f"{fraction:.0%} ({name})" for name, fraction in known.items())
            said.append(f"{form} {told or 'not above 0 before'}")
            right += [x[1] <= fraction <= x[2] for name, fraction in known.items() if (x := own[name])]
        return "; ".join(said), all(right) if right else None

    return in_each(_swapped(collected), judge)


@stated(
    Statement(
        "ruscio-sinks-stabilize",
        f"{SOURCE} abstract",
        "Attention sinks are stabilizers: without the BOS, attention patterns depend more on absolute position.",
        "total leakage (log form, early queries, mean over blocks) rises by the swap, in every model with a BOS",
        model="bundled models with BOS",
        command=COMMANDS["bos-swap"],
    ),
    STATED,
)
def _stabilize(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        said, right = [], []
        for name, one in _replacements(ds):
            at = {"part": "total", "band": _early(one)}
            before, after = (float(one[f"leakage_{when}"].sel(at).mean()) for when in ("before", "after"))
            said.append(f"{number(before)} to {number(after)} nat² ({name})")
            right.append(after > before)
        return ", ".join(said), all(right)

    return in_each(having(_swapped(collected), "leakage_before", "leakage_after"), judge)


# ----------------------------------------------------------------------------------------------- position 0 and its readers


def _followed(collected: Collected) -> dict[str, xr.Dataset]:
    return having(collected["trajectory"], "later_difference", "cosine")


def _closed_told(ds: xr.Dataset) -> Told:
    later = float(ds["later_difference"].max())
    return f"largest change by other text {later:.3g}", later == 0


@stated(
    Statement(
        "ruscio-position-0-closed",
        f"{SOURCE} abstract",
        "The activation at position 0 is a closed dynamical system.",
        "the stream at position 0 is the same, bit for bit, under any other text behind it, in every model and block",
        model="bundled models, pretrained",
        command=COMMANDS["trajectory"],
    ),
    STATED,
)
def _closed(collected: Collected) -> Judged | None:
    return in_each(_followed(collected), _closed_told)


@stated(
    Statement(
        "ruscio-fingerprint-constant",
        f"{SOURCE} abstract",
        "With an auto-prepended BOS the fingerprint at position 0 is constant across inputs.",
        "behind the same BOS the stream at position 0 does not change with the text, in every model with a BOS",
        model="bundled models with BOS",
        command=COMMANDS["trajectory"],
    ),
    STATED,
)
def _constant(collected: Collected) -> Judged | None:
    there = {name: ds for name, ds in _followed(collected).items() if "bos" in ds["first"].values}
    return in_each(there, lambda ds: _closed_told(ds.sel(first="bos")))


@stated(
    Statement(
        "ruscio-fingerprint-varies",
        f"{SOURCE} abstract",
        "Without an auto-prepended BOS the fingerprint at position 0 varies with the token there.",
        f"mean cosine of the streams of different tokens before the final norm below {APART:g} in every model",
        model="bundled models, pretrained",
        command=COMMANDS["trajectory"],
    ),
    STATED,
)
def _varies(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        at = ds.isel(place=0, layer=-1)
        cosine = float(at["cosine"])
        if np.isnan(cosine):
            return "-", None
        low, high = (float(at[name]) if name in at else np.nan for name in ("cosine_low", "cosine_high"))
        return f"cosine {interval(cosine, low, high, '.2f')} (90 % of pairs)", cosine < APART

    return in_each(_followed(collected), judge)


@stated(
    Statement(
        "ruscio-sink-reading-heads",
        f"{SOURCE} abstract",
        "Heads downstream read position 0: sink-reading heads.",
        "in every model with a BOS at least one head has mean weight above 0.3 on position 0 and takes above 0.3 of the "
        "size of its output from there",
        model="bundled models with BOS",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _sink_reading(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        counts = {rule: int(ds["selected"].sel(rule=rule).sum()) for rule in RULES if rule in ds["rule"].values}
        said = ", ".join(f"{rule} {count}" for rule, count in counts.items())
        return f"of {ds['attends'].size} heads: {said}", counts.get("sink-reading", 0) > 0

    return in_each(with_bos(having(collected["sinks"], "selected", "attends")), judge)


@stated(
    Statement(
        "ruscio-heads-react",
        f"{SOURCE} abstract",
        "Attention downstream depends on the token at position 0.",
        "in every model with a BOS at least one head's pattern over the other keys changes by more than 0.1 (total "
        "variation) with the embedding at position 0",
        model="bundled models with BOS",
        command=COMMANDS["sinks"],
    ),
    STATED,
)
def _react(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        count = int(ds["selected"].sel(rule="reacts").sum())
        return f"{count} of {ds['reacts'].size} heads, at most {number(ds['reacts'].max())}", count > 0

    return in_each(with_bos(having(collected["sinks"], "selected", "reacts")), judge)


# ---------------------------------------------------------------------------------------------------- isolating the channels


@stated(
    Statement(
        "ruscio-isolation-design",
        ISOLATION,
        "The two channels, mask and residual stream, can be switched off one by one, and account for all of the "
        "leakage.",
        f"with both off the log form is 0 (below {NOTHING:g} nat²), and the 2 x 2 design's parts, mask, residual stream and "
        f"spread, add up to the weight form's total within {SUMS:g} of it",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _design(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        band = _early(ds)
        neither = float(np.abs(ds["log_neither"]).max())
        parts = ds["weight_source_of_model"].sel(band=band)
        whole = float(ds["weight_form_of_model"].sel(cell="both", band=band))
        off = abs(float(parts.sum()) - whole) / max(float(np.abs(parts).max()), abs(whole))
        shares = [
            f"{source} {interval(*estimate(ds, 'weight_share_of_model', source=source, band=band), form='.0%')}"
            for source in map(str, ds["source"].values)
        ]
        told = ", ".join(shares) if resolved(ds, "weight", band) else "shares not resolved"
        return f"both off {neither:.1g} nat², sum off by {off:.1g}; {told}", neither < NOTHING and off < SUMS

    needed = ("log_neither", "weight_source_of_model", "weight_form_of_model", "weight_share_of_model")
    return in_each(having(_leaking(collected), *needed, "log_sink_by_block"), judge)


@stated(
    Statement(
        "ruscio-isolation-mask-alone",
        ISOLATION,
        "With the residual stream's part removed, the causal mask alone makes leakage.",
        "the interval of V(M), what is left of the log form at early queries, lies above 0 in every model",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _mask_alone(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        own = estimate(ds, "log_form_of_model", part="mask", band=_early(ds))
        return f"V(M) {interval(*own)} nat²", own[1] > 0

    return in_each(_leaking(collected), judge)


@stated(
    Statement(
        "ruscio-isolation-mask-dominates",
        ISOLATION,
        "At early queries the mask contributes more to the leakage than the residual stream.",
        "the mask's share (Shapley value, log form) is above the residual stream's, intervals apart, in every model where "
        "shares are resolved",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _dominates(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        band = _early(ds)
        if not resolved(ds, "log", band):
            return "not resolved", None
        mask, stream = (estimate(ds, "log_share_of_model", source=one, band=band) for one in ("mask", "residual"))
        said = f"mask {interval(*mask, form='.0%')}, residual stream {interval(*stream, form='.0%')}"
        return said, mask[1] > stream[2]

    return in_each(having(_leaking(collected), "log_share_of_model", "log_sink_by_block"), judge)


@stated(
    Statement(
        "ruscio-isolation-null",
        ISOLATION,
        "In the first block, whose streams carry no position, the residual component is 0.",
        "the interval of the first block's V(X) holds 0, or position 0's own logits account for it, in every model "
        "and band",
        model="bundled models, pretrained",
        command=COMMANDS["leakage"],
    ),
    STATED,
)
def _null(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        first = ds["layer"].values[0]
        bands = [str(band) for band in ds["band"].values]
        said = ", ".join(f"{interval(*estimate(ds, 'log_stream_by_block', layer=first, band=b))} at {b}" for b in bands)
        failing = [band for band in bands if null_fails(ds, band)]
        return said + (f", fails at {', '.join(failing)}" if failing else ""), not failing

    return in_each(_nullable(collected["leakage"]), judge)


def _nullable(results: Results) -> dict[str, xr.Dataset]:
    return having(results, "log_stream_by_block", "log_sink_by_block")
