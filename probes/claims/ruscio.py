"""[Ruscio], arXiv 2606.06160, "Where does Absolute Position come from in decoder-only Transformers?", and what its reviewers
asked for: a protocol behind the 40 %, and the two channels isolated under control.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import xarray as xr

from ..measures.leakage import null_fails, overflow, resolved
from ..measures.roles import LARGE, REACTS
from ..results.collected import Collected
from ..results.curves import spearman
from ..results.statistics import Interval, units
from ..results.tables import interval, number
from .claim import Judged, Kind
from .rules import (
    CONTROLLED,
    RUNS,
    SURE,
    VARIANCE,
    Results,
    Source,
    Stated,
    Told,
    above,
    as_test,
    below,
    commands,
    estimated,
    every,
    having,
    in_real,
    listed,
    measuring,
    minus,
    near,
    never_refuted,
    nothing,
    over_training,
    runs,
    some,
    sure,
    told,
    training,
    with_bos,
)

STATED: Stated = []
of_source = Source("ruscio", "[Ruscio]", STATED)
PROTOCOL = "reviewers: protocol of the 40 %"
ISOLATION = "reviewers: controlled isolation"

REMOVED = 0.40  # published
NOTHING = 1e-12  # squared nats; rounding leaves less
SUMS = 1e-6  # relative, of parts that make up a total exactly
APART = 0.9  # mean cosine below which streams of different tokens have not become one: ours
NTK, PLAIN, WINDOW = CONTROLLED
PUBLISHED_MODELS = {
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B",
}
BOS_MODEL = "meta-llama/Llama-3.2-1B"  # a small one whose tokenizer puts a BOS first
ARCHITECTURES = ", ".join(CONTROLLED)
STREAM = "steady_stream_of_model"  # V(X), the constant sink on the mask's side


def _early(ds: xr.Dataset) -> str:
    return str(ds["band"].values[0])


def _leaking(results: Results) -> dict[str, xr.Dataset]:
    return having(results, "log_form_of_model", "log_source_of_model", STREAM)


def _share_told(found: Interval | None) -> str:
    return told(found, ".0%") if found else "?"


# -------------------------------------------------------------------------------------------------------- the two sources


def _total(ds: xr.Dataset) -> Told:
    total = estimated(ds, "log_form_of_model", part="total", band=_early(ds))
    null = float(ds["null_shuffled"].sel(band=_early(ds))) if "null_shuffled" in ds else 0.0
    return f"{told(total)} nat² at queries {_early(ds)} (shuffled {number(null)})", above(total, null)


def _mask(ds: xr.Dataset) -> Told:
    own = estimated(ds, "log_form_of_model", part="mask", band=_early(ds))
    return f"V(M) {told(own)} nat²", above(own, 0)


def _stream(variable: str, ds: xr.Dataset) -> Told:
    own = estimated(ds, variable, band=_early(ds))
    return f"V(X) {told(own)} nat²", above(own, 0)


def _two(ds: xr.Dataset) -> Told:
    (mask, one), (stream, other) = _mask(ds), _stream(STREAM, ds)
    return f"{mask}, {stream}", every([as_test(one), as_test(other)])


def _share(ds: xr.Dataset) -> Told:
    band = _early(ds)
    if not resolved(ds, "log", band):
        return "not resolved", None
    own = estimated(ds, "steady_source_of_model", source="residual", band=band)
    total = estimated(ds, "log_form_of_model", part="total", band=band)
    return f"{told(own)} of {told(total)} nat²", above(own, 0)


_rest = "(log form, early queries) lies above 0 in every model"
for _id, _where, _claim, _rule, _kind, _tell, _needed in (
    (
        "absolute-position-leaks",
        "abstract",
        "Attention patterns of RoPE models depend on absolute position.",
        "the interval of total leakage (log form, early queries) lies above what shuffled query labels give (97.5 % "
        "quantile) in every model",
        "published",
        _total,
        (),
    ),
    (
        "mask-is-a-source",
        "abstract",
        "The causal mask's denominator is a source of absolute position.",
        f"the interval of V(M), what the mask leaves with the residual stream's part removed, {_rest}",
        "published",
        _mask,
        (),
    ),
    (
        "residual-stream-is-a-source",
        "abstract",
        "The residual stream is a second source of absolute position beside the mask.",
        f"the interval of the residual component V(X), the constant sink taken out, {_rest}",
        "published",
        partial(_stream, STREAM),
        (),
    ),
    (
        "residual-stream-with-constant-sink",
        "abstract",
        "The residual stream is a source of absolute position where the constant sink, which holds no position, "
        "counts as its "
        "part.",
        f"the interval of the residual component V(X), the constant sink left in, {_rest}",
        "ours",
        partial(_stream, "log_stream_of_model"),
        ("log_stream_of_model",),
    ),
    (
        "residual-stream-adds",
        "abstract",
        "The residual stream supplies a share of the leakage of absolute position.",
        f"the interval of the residual stream's Shapley value, the constant sink on the mask's side, {_rest} "
        "where shares are "
        "resolved",
        "ours",
        _share,
        ("steady_source_of_model", "log_stream_by_block", "log_sink_by_block"),
    ),
    (
        "isolation-mask-alone",
        ISOLATION,
        "With the residual stream's part removed, the causal mask alone makes leakage.",
        f"the interval of V(M), what is left of the log form, {_rest}",
        "request",
        _mask,
        (),
    ),
):
    of_source(_id, _where, _claim, _rule, "pretrained", "leakage", kind=cast(Kind, _kind))(
        lambda collected, tell=_tell, needed=_needed: in_real(having(_leaking(collected["leakage"]), *needed), tell)
    )


@of_source(
    "both-in-published-models",
    "abstract",
    "Both components of leakage, mask and residual stream, appear in the three architectures of the paper.",
    "the intervals of both components (log form, early queries, the constant sink taken out of the stream) lie "
    "above 0 in all "
    "three models",
    "pretrained",
    f"headwater leakage {' '.join(PUBLISHED_MODELS.values())} --prompts 1024 --length 128 --out runs/ruscio",
    model=", ".join(PUBLISHED_MODELS.values()),
)
def _both_published(collected: Collected) -> Judged | None:
    found = _leaking(collected["leakage"])
    there = {name: found[name] for name in PUBLISHED_MODELS.values() if name in found}
    return in_real(there, _two) if len(there) == len(PUBLISHED_MODELS) else None


# ---------------------------------------------------------------------------------------------------- controlled training

LEAKAGE = ("leakage", "--prompts 1024 --length 128")
_over = f"Student's t over {RUNS} runs or more of each"


def _trained(collected: Collected, *models: str) -> list[dict[str, xr.Dataset]]:
    """Their runs; none where one has none."""
    found = [_leaking(runs(collected, "leakage", model)) for model in models]
    return found if all(found) else []


def _streams(results: Results) -> list[float]:
    """V(X) of each run."""
    return [float(ds[STREAM].sel(band=_early(ds))) for ds in results.values()]


def _over_runs(found: list[dict[str, xr.Dataset]], said: str, test: Callable[[float], Any]) -> Judged:
    used = [ds for one in found for ds in one.values()]
    return Judged(said, test(SURE), ", ".join(name for one in found for name in one), commands(used))


def _ordered(models: tuple[str, ...], collected: Collected) -> Judged | None:
    """Whether the residual component rises from model to model."""
    found = _trained(collected, *models)
    if not found:
        return None
    values = [_streams(one) for one in found]
    steps = [above(over_training(after, before), 0) for before, after in pairwise(values)]
    said = ", ".join(f"{name} {listed(own, '.3g')}" for name, own in zip(models, values, strict=True))
    return _over_runs(found, f"V(X) {said} nat²", every(steps))


for _id, _claim, _models in (
    ("ntk-suppresses", "NTK scaling suppresses the residual component of leakage.", (NTK, PLAIN)),
    (
        "window-accumulates",
        "A sliding window lets the residual component of leakage grow beyond standard RoPE's.",
        (PLAIN, WINDOW),
    ),
    (
        "ntk-below-window",
        "NTK scaling leaves less of the residual component of leakage than a sliding window.",
        (NTK, WINDOW),
    ),
    (
        "standard-between",
        "The residual component of leakage under standard RoPE lies between those under NTK scaling and a sliding window.",
        CONTROLLED,
    ),
):
    of_source(
        _id,
        "abstract",
        _claim,
        f"V(X) at early queries, the constant sink taken out, rises from {' to '.join(_models)}, {_over}",
        "controlled",
        training(_models, *LEAKAGE),
        model=", ".join(_models),
    )(partial(_ordered, _models))


@of_source(
    "both-in-all-architectures",
    "abstract",
    "Both components of leakage, mask and residual stream, appear under NTK-scaled RoPE, standard RoPE and a "
    "sliding window.",
    f"V(M) and V(X) at early queries, the constant sink taken out of the stream, lie above 0 in all three, {_over}",
    "controlled",
    training(CONTROLLED, *LEAKAGE),
    model=ARCHITECTURES,
)
def _both(collected: Collected) -> Judged | None:
    found = _trained(collected, *CONTROLLED)
    if not found:
        return None
    said, tests = [], []
    for name, one in zip(CONTROLLED, found, strict=True):
        mask = [float(ds["log_form_of_model"].sel(part="mask", band=_early(ds))) for ds in one.values()]
        stream = _streams(one)
        said.append(f"{name} V(M) {listed(mask, '.3g')}, V(X) {listed(stream, '.3g')}")
        tests += [above(over_training(values), 0) for values in (mask, stream)]
    return _over_runs(found, f"{'; '.join(said)} nat²", every(tests))


@of_source(
    "window-grows-with-depth",
    "abstract",
    "Under a sliding window the residual component accumulates with depth.",
    "rank correlation of V(X) with the block, the constant sink taken out, and the last block's V(X) less the "
    "first's are above "
    f"0, {_over}",
    "controlled",
    training([WINDOW], *LEAKAGE),
    model=WINDOW,
)
def _grows(collected: Collected) -> Judged | None:
    found = [having(one, "steady_stream_by_block") for one in _trained(collected, WINDOW)]
    if not found or not found[0]:
        return None
    blocks = [ds["steady_stream_by_block"].sel(band=_early(ds)).values for ds in found[0].values()]
    if len(blocks[0]) < 2:
        return None
    ranks = [spearman(np.arange(len(one), dtype=float), one) for one in blocks]
    steps = [float(one[-1] - one[0]) for one in blocks]
    said = f"rank correlation {listed(ranks)}; last block less first {listed(steps, '.3g')} nat²"
    return _over_runs(found, said, every([above(over_training(values), 0) for values in (ranks, steps)]))


# ------------------------------------------------------------------------------------------------------ position 0 swapped


def _replacements(ds: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    if "replacement" in ds.dims:
        return [(str(name), ds.sel(replacement=name)) for name in ds["replacement"].values]
    return [(str(ds.attrs.get("replacement", "replaced")), ds)]


def _removed(ds: xr.Dataset, band: str, variable: str = "removed_of_model") -> Interval | None:
    """The fraction with its interval; None where it takes more prompts to know it."""
    found = estimated(ds, variable, band=band)
    return found if np.all(np.isfinite(found[:3])) else None


def _each(ds: xr.Dataset, variable: str, judge: Callable[[Interval], Any]) -> Told:
    """A rule for the fraction that every replacement removes at early queries."""
    said, tests = [], []
    for name, one in _replacements(ds):
        found = _removed(one, _early(one), variable)
        said.append(f"{_share_told(found)} ({name})")
        tests += [judge(found)] if found else []
    return ", ".join(said), every(tests) if tests else None


def _forty(found: Interval) -> Any:
    return near(found, REMOVED)


def _some(found: Interval) -> Any:
    return above(found, 0)


def _behind_bos(results: Results, *needed: str) -> dict[str, xr.Dataset]:
    return with_bos(having(results, "removed_of_model", *needed))


def _behind_text(results: Results, *needed: str) -> dict[str, xr.Dataset]:
    found = having(results, "removed_of_model", *needed)
    return {name: ds for name, ds in found.items() if ds.attrs.get("first_policy") == "none"}


def _any(results: Results, *needed: str) -> dict[str, xr.Dataset]:
    return having(results, "removed_of_model", *needed)


CONSTANT = {  # whether the constant sink is a part of what is removed
    "": ("removed_of_model", "the constant sink left in"),
    "-steady": ("removed_steady_of_model", "the constant sink taken out"),
}
SWAPS: dict[str, tuple[str, Callable[..., dict[str, xr.Dataset]], str, str]] = {
    "bos": ("bos-swap", _behind_bos, "Replacing the BOS embedding", "in every model with a BOS"),
    "text": (
        "bos-swap",
        _behind_text,
        "Replacing the embedding of the token of text at position 0",
        "in every model without a BOS",
    ),
    "im-start": ("im-start/bos-swap", _any, "Replacing <|im_start|> at position 0", "in every model"),
}
for _who, (_folder, _those, _said, _in) in SWAPS.items():
    _command = measuring("bos-swap", BOS_MODEL) if _who == "bos" else measuring("bos-swap")
    if _who == "im-start":
        _command = measuring("bos-swap", more="--first 1", variant="im-start")
    for _id, (_variable, _with) in CONSTANT.items():
        for _end, _claim, _rule, _judge in (
            (
                "removes-40",
                f"{_said} removes 40 % of the residual component at early queries, {_with}.",
                "within a quarter of 40 %",
                _forty,
            ),
            (
                "removes-some",
                f"{_said} removes a part of the residual component at early queries, {_with}.",
                "above 0",
                _some,
            ),
        ):
            of_source(
                f"{_who}-{_end}{_id}",
                "abstract",
                _claim,
                f"the interval of the fraction of V(X) removed, {_with}, lies {_rule} {_in} and by every replacement",
                "pretrained",
                _command,
                kind="published" if _who == "bos" and _end == "removes-40" else "ours",
                published="40 %",
                model=BOS_MODEL if _who == "bos" else "",
            )(
                lambda collected, folder=_folder, those=_those, variable=_variable, judge=_judge: in_real(
                    those(collected[folder], variable), lambda ds: _each(ds, variable, judge)
                )
            )


def _of_published(model: str, collected: Collected) -> Judged | None:
    found = {name: ds for name, ds in _any(collected["bos-swap"]).items() if name == model}
    return in_real(found, lambda ds: _each(ds, "removed_of_model", _forty))


for _id, _model in PUBLISHED_MODELS.items():
    of_source(
        f"bos-removes-40-{_id}",
        "abstract",
        f"In {_model.partition('/')[2]} replacing the embedding at position 0 removes 40 % of the residual component.",
        "the interval of the fraction of V(X) removed at early queries lies within a quarter of 40 %, by every replacement",
        "pretrained",
        f"headwater bos-swap {_model} --prompts 256 --length 128 --replace mean,zero,random --out runs/{_id}",
        published="40 %",
        model=_model,
    )(partial(_of_published, _model))


def _by_replacement(ds: xr.Dataset) -> Told:
    found = {name: _removed(one, _early(one)) for name, one in _replacements(ds)}
    said = ", ".join(f"{name} {_share_told(one)}" for name, one in found.items())
    known = [one for one in found.values() if one]
    if len(known) < 2:
        return said, None
    middle = float(np.mean([one.value for one in known]))
    return said, every([near(one, middle) for one in known])


def _by_band(ds: xr.Dataset) -> Told:
    said, tests = [], []
    for name, one in _replacements(ds):
        found = {str(band): _removed(one, str(band)) for band in one["band"].values}
        said.append(", ".join(f"{band}: {_share_told(x)}" for band, x in found.items()) + f" ({name})")
        first, *later = found.values()
        tests += [below(minus(x, first), 0) for x in later if x and first]
    return "; ".join(said), every(tests) if tests else None


def _fraction(one: xr.Dataset, name: str, **where: str) -> float | None:
    """1 - after / before, means over blocks; None where there is nothing above 0 to take a fraction of."""
    if f"{name}_before" not in one:
        return None
    before, after = (float(one[f"{name}_{when}"].sel(where).mean()) for when in ("before", "after"))
    return 1 - after / before if before > 0 else None


FORMS = {  # other things that "residual component" may be read as: variable, place
    "V(X) without the constant sink": ("residual_steady", {}),
    "logits' V(S)": ("leakage", {"part": "logits"}),
    "denominators' V(D)": ("leakage", {"part": "denominator"}),
    "Shapley value of the log form": ("source", {"source": "residual"}),
    "Shapley value of the weight form": ("weight", {"source": "residual"}),
}


def _by_form(ds: xr.Dataset) -> Told:
    all_of_them = _replacements(ds)
    own = {name: _removed(one, _early(one)) for name, one in all_of_them}
    said = ["V(X) " + ", ".join(f"{_share_told(x)} ({name})" for name, x in own.items())]
    tests = []
    for form, (variable, where) in FORMS.items():
        fractions = {name: _fraction(one, variable, band=_early(one), **where) for name, one in all_of_them}
        known = {name: fraction for name, fraction in fractions.items() if fraction is not None}
        said.append(f"{form} {', '.join(f'{x:.0%} ({name})' for name, x in known.items()) or 'not above 0 before'}")
        tests += [near(x, fraction) for name, fraction in known.items() if (x := own[name])]
    return "; ".join(said), every(tests) if tests else None


def _stabilizes(ds: xr.Dataset) -> Told:
    said, tests = [], []
    for name, one in _replacements(ds):
        at = {"part": "total", "band": _early(one)}
        before, after = (float(one[f"leakage_{when}"].sel(at).mean()) for when in ("before", "after"))
        # Of single blocks alone there are intervals; their mean's is no wider than the mean of theirs.
        change = (float(one[f"leakage_change{end}"].sel(at).mean()) for end in ("", "_low", "_high"))
        said.append(f"{number(before)} to {number(after)} nat² ({name})")
        tests.append(above(Interval(*change), 0))
    return ", ".join(said), every(tests)


_changes = ("leakage_before", "leakage_after", "leakage_change", "leakage_change_low", "leakage_change_high")
for _id, _where, _claim, _rule, _kind, _tell, _needed in (
    (
        "protocol-replacement",
        PROTOCOL,
        "The fraction of the residual component that a swap removes does not depend on what is put at position 0.",
        "the fraction of V(X) removed by each replacement (two at least) lies within a quarter of their mean at "
        "early queries",
        "request",
        _by_replacement,
        (),
    ),
    (
        "protocol-band",
        PROTOCOL,
        "The fraction of the residual component that a swap at position 0 removes is one of early queries: "
        "behind them less is "
        "removed.",
        "in every later band the fraction of V(X) removed is below that of the early band",
        "request",
        _by_band,
        (),
    ),
    (
        "protocol-form",
        PROTOCOL,
        "The fraction of the residual component that a swap at position 0 removes does not depend on how that component is "
        "defined.",
        "the interval of the fraction of V(X) removed lies within a quarter of the fraction by every other "
        "definition that is "
        "above 0 before the swap, at early queries",
        "request",
        _by_form,
        (),
    ),
    (
        "sinks-stabilize",
        "abstract",
        "Attention sinks are stabilizers: without the BOS, attention patterns depend more on absolute position.",
        "total leakage (log form, early queries, mean over blocks) rises by the swap",
        "published",
        _stabilizes,
        _changes,
    ),
):
    of_source(
        _id,
        _where,
        _claim,
        f"{_rule}, in every model with a BOS",
        "pretrained",
        measuring("bos-swap", BOS_MODEL),
        kind=cast(Kind, _kind),
        model=BOS_MODEL,
    )(lambda collected, tell=_tell, needed=_needed: in_real(_behind_bos(collected["bos-swap"], *needed), tell))
    if _id != "protocol-band":
        of_source(
            f"text-{_id}",
            _where,
            _claim.replace("without the BOS", "with another embedding than the text's own at position 0"),
            f"{_rule}, in every model without a BOS, text at position 0",
            "pretrained",
            "bos-swap",
            kind="ours",
        )(lambda collected, tell=_tell, needed=_needed: in_real(_behind_text(collected["bos-swap"], *needed), tell))


# ----------------------------------------------------------------------------------------------- position 0 and its readers


def _followed(collected: Collected) -> dict[str, xr.Dataset]:
    return having(collected["trajectory"], "later_difference", "cosine")


def _closed_told(ds: xr.Dataset) -> Told:
    later = float(ds["later_difference"].max())
    return f"largest change by other text {later:.3g}", later == 0


@of_source(
    "position-0-closed",
    "abstract",
    "The activation at position 0 is a closed dynamical system.",
    "the stream at position 0 is the same, bit for bit, under any other text behind it, in every model and block",
    "pretrained",
    "trajectory",
)
def _closed(collected: Collected) -> Judged | None:
    return in_real(_followed(collected), _closed_told)


@of_source(
    "fingerprint-constant",
    "abstract",
    "With an auto-prepended BOS the fingerprint at position 0 is constant across inputs.",
    "behind the same BOS the stream at position 0 does not change with the text, in every model with a BOS",
    "pretrained",
    measuring("trajectory", BOS_MODEL),
    model=BOS_MODEL,
)
def _constant(collected: Collected) -> Judged | None:
    there = {name: ds for name, ds in _followed(collected).items() if "bos" in ds["first"].values}
    return in_real(there, lambda ds: _closed_told(ds.sel(first="bos")))


@of_source(
    "fingerprint-varies",
    "abstract",
    "Without an auto-prepended BOS the fingerprint at position 0 varies with the token there.",
    f"the cosine of the streams of different tokens before the final norm is below {APART:g} in every model, the "
    "middle 90 % of "
    "pairs as its interval",
    "pretrained",
    "trajectory",
)
def _varies(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        at = ds.isel(place=0, layer=-1)
        found = Interval(
            *(float(at[name]) if name in at else np.nan for name in ("cosine", "cosine_low", "cosine_high"))
        )
        return f"cosine {told(found, '.2f')} (90 % of pairs)", below(found, APART)

    return in_real(_followed(collected), judge)


def _heads_above(ds: xr.Dataset, name: str, threshold: float) -> Told:
    """Whether a number of heads is above a threshold in some head; and how many are, surely or not, with the largest.

    A threshold of ours can confirm what a source says, which gives none, and not refute it.
    """
    low, high = (ds[f"{name}_{end}"].values.ravel() for end in ("low", "high"))
    values, freedom = ds[name].values.ravel(), len(np.unique(units(ds))) - 1 if "prompt" in ds.sizes else np.inf
    tests = [
        above(Interval(*map(float, one))._replace(freedom=float(freedom)), threshold)
        for one in zip(values, low, high, strict=True)
        if np.isfinite(one).all()
    ]
    told = f"{int((values > threshold).sum())} of {values.size} heads ({int((low > threshold).sum())} surely)"
    first = int(np.nanargmax(values))
    said = f"{told}, at most {interval(values[first], low[first], high[first])}"
    return said, never_refuted(some(tests)) if tests else None


@of_source(
    "sink-reading-heads",
    "abstract",
    "Heads downstream read position 0: sink-reading heads.",
    f"in every model at least one head takes from position 0 more than {LARGE:g} of the stream that it is added to "
    "(threshold ours: below it the statement is undecided; intervals over documents, for so many heads)",
    "pretrained",
    "sinks",
)
def _sink_reading(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        told, test = _heads_above(ds, "written", LARGE)
        if "effect" in ds and np.isfinite(ds["effect"]).any():
            told += f"; largest effect on the next token {number(ds['effect'].max())} nat"
        return told, test

    return in_real(having(collected["sinks"], "written", "written_low"), judge)


@of_source(
    "heads-react",
    "abstract",
    "Attention downstream depends on the token at position 0.",
    f"in every model at least one head's pattern over the other keys changes by more than {REACTS:g} (total variation; "
    "threshold ours: below it the statement is undecided) with the embedding at position 0",
    "pretrained",
    "sinks",
)
def _react(collected: Collected) -> Judged | None:
    return in_real(having(collected["sinks"], "reacts", "reacts_low"), lambda ds: _heads_above(ds, "reacts", REACTS))


# ---------------------------------------------------------------------------------------------------- isolating the channels


@of_source(
    "isolation-design",
    ISOLATION,
    "The two channels, mask and residual stream, can be switched off one by one, and account for all of the leakage.",
    f"with both off the log form is 0 (below {NOTHING:g} nat²), and the 2 x 2 design's parts, mask, residual "
    "stream and spread, "
    f"add up to the weight form's total within {SUMS:g} of it",
    "pretrained",
    "leakage",
    kind="request",
)
def _design(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        band = _early(ds)
        neither = float(np.abs(ds["log_neither"]).max())
        parts = ds["weight_source_of_model"].sel(band=band)
        whole = float(ds["weight_form_of_model"].sel(cell="both", band=band))
        off = abs(float(parts.sum()) - whole) / max(float(np.abs(parts).max()), abs(whole))
        shares = [
            f"{source} {_share_told(estimated(ds, 'weight_share_of_model', source=source, band=band))}"
            for source in map(str, ds["source"].values)
        ]
        if overflow(ds, band):  # the parts' sum says nothing
            return f"both off {neither:.1g} nat²; weights without the mask overflow", None
        said = ", ".join(shares) if resolved(ds, "weight", band) else "shares not resolved"
        return f"both off {neither:.1g} nat², sum off by {off:.1g}; {said}", neither < NOTHING and off < SUMS

    needed = ("log_neither", "weight_source_of_model", "weight_form_of_model", "weight_share_of_model")
    return in_real(having(_leaking(collected["leakage"]), *needed, "log_sink_by_block"), judge)


@of_source(
    "isolation-mask-dominates",
    ISOLATION,
    "At early queries the mask contributes more to the leakage than the residual stream.",
    "the mask's Shapley value (log form, the constant sink on its side) is above the residual stream's in every "
    "model where shares "
    "are resolved",
    "pretrained",
    "leakage",
    kind="request",
)
def _dominates(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        band = _early(ds)
        if not resolved(ds, "log", band):
            return "not resolved", None
        mask, stream = (estimated(ds, "steady_source_of_model", source=x, band=band) for x in ("mask", "residual"))
        return f"mask {told(mask)}, residual stream {told(stream)} nat²", above(minus(mask, stream), 0)

    needed = ("steady_source_of_model", "log_stream_by_block", "log_sink_by_block")
    return in_real(having(_leaking(collected["leakage"]), *needed), judge)


@of_source(
    "isolation-null",
    ISOLATION,
    "In the first block, whose streams carry no position, the residual component is 0.",
    f"the 90 % interval of the first block's V(X) lies within {VARIANCE:g} of the band's total leakage, or "
    "position 0's own logits "
    "account for it, in every model and band",
    "pretrained",
    "leakage",
    kind="request",
)
def _null(collected: Collected) -> Judged | None:
    def judge(ds: xr.Dataset) -> Told:
        first = ds["layer"].values[0]
        said, tests = [], []
        for band in map(str, ds["band"].values):
            own = estimated(ds, "log_stream_by_block", layer=first, band=band)
            total = float(ds["log_form_of_model"].sel(part="total", band=band))
            said.append(f"{told(own)} at {band}" + " (fails)" * null_fails(ds, band))
            if null_fails(ds, band) or own.low > 0:
                tests.append(sure(not null_fails(ds, band)))
            elif total > 0:
                tests.append(nothing(Interval(*(end / total for end in own[:3])), VARIANCE))
        return ", ".join(said), every(tests)

    needed = ("log_form_of_model", "log_stream_by_block", "log_sink_by_block")
    return in_real(having(collected["leakage"], *needed), judge)
