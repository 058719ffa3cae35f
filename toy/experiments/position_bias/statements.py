"""What a result of position-bias says: headlines and tables, the statements of [Wu], section 5 and K.4.

Only toys that retrieve count: their accuracy on novel classes is `TRAINED` or more by the 95 % interval over runs. Answers
of its sequences stand anywhere, whatever a model was trained on: who copies the label of one place is blind to content, and
has `BLIND`. Statements are judged at both scales of the data, by toys without residual stream, as in the paper, and by those
with it where the others lack what is needed; what the paper says of depth, by the former alone.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import xarray as xr

from probes.claims.claim import Claim, Verdict
from probes.claims.ledger import Source
from probes.claims.rules import SURE, Test, Told, above, below, every, nothing, some
from probes.measure import Headline
from probes.measures.sinks import TAU
from probes.results.gate import TRAINED, blind_reader
from probes.results.statistics import Interval

from ...tasks import InContext
from .. import reading as read
from ..in_context import ITEMS, architecture_of, uniform_sink
from ..reading import OVER_RUNS, Bound, each, judge, known, lacking, learnt, means, need, over, places, together, under

DIMS = ("scale", "data", "depth", "mask", "positional", "residual", "training", "seed")
SCALES = ("text", "program")  # of the vectors: as in the paper's text, as in its program
FIRST, MIDDLE, LAST = 0, ITEMS // 2, ITEMS - 1  # "middle" is item n/2 counted from 0, as in the published program
PAIRS = {"first-middle": (FIRST, MIDDLE), "first-last": (FIRST, LAST), "middle-last": (MIDDLE, LAST)}
BLIND = blind_reader(InContext.items // InContext.burst, InContext.labels)
STREAMS = {"off": "without residual stream", "on": "with residual stream"}
SAME = 0.01  # of accuracy; a smaller change of a gap is nothing
EVEN = 0.02  # of accuracy; a smaller gap is no bias: of three runs' 10,000 sequences chance alone gives half of that
Tell = Callable[[xr.Dataset], Told]


# -- headlines


def kept_from(ds: xr.Dataset) -> xr.DataArray:
    """The step of the first check from which on accuracy on novel classes stays at the gate or above."""
    good = (ds["course_novel"] >= TRAINED).astype(int).isel(step=slice(None, None, -1)).cumprod("step")
    return ds["step"].where(good.isel(step=slice(None, None, -1)) > 0).min("step")


def size_of(mask: str) -> int:
    """N of window-N and prefix-N, 0 of other masks."""
    return int(mask.partition("-")[2] or 0)


def sink(ds: xr.Dataset) -> xr.DataArray:
    """The metric by key, mean over blocks."""
    return ds["over_tau"].mean("layer")


def even(ds: xr.Dataset) -> xr.DataArray:
    """The metric of even weights at the first token, by mask."""
    masks = ds["mask"].values.tolist()
    of = [uniform_sink(architecture_of(1, mask, "none", "off", 2), TAU)[0] for mask in masks]
    return xr.DataArray(of, {"mask": masks}, "mask")


HEADLINES = (
    Headline("gap", lambda ds: ds["gap"], form="+.3f"),
    Headline(
        "accuracy by the answer's item", lambda ds: ds["accuracy_by_position"].sel(position=[FIRST, MIDDLE, LAST])
    ),
    Headline(f"accuracy on novel classes (blind to content: {BLIND:.3f})", lambda ds: ds["novel_accuracy"], form=".3f"),
    Headline(f"step of {TRAINED:g}", kept_from, form=".0f"),
    Headline("answers a label of the context", lambda ds: ds["course_copied"].isel(step=-1), form=".3f"),
    Headline("by heart", lambda ds: ds["by_heart"], form=".3f"),
    Headline("training loss", lambda ds: ds["training_loss"].isel(step=-1), form=".2f"),
    Headline("sink at the first token", lambda ds: sink(ds).isel(key=0), form=".3f"),
    Headline("before training", lambda ds: ds["fresh"].isel(key=0), form=".3f"),
    Headline("alpha [Gu]", lambda ds: ds["alpha"].isel(key=0).mean("layer"), form=".3f"),
    Headline("highest other sink", lambda ds: sink(ds).isel(key=slice(1, None)).max("key"), form=".3f"),
    Headline("sink of even weights", even, form=".3f"),
)


# -- statements

wu, ungated = Source("[Wu]", "wu-toy"), Source("[Wu]", "wu-toy", kind="ours")
ours = wu.but(kind="ours")
TASK = "In the in-context retrieval task"
GAP = "gap (accuracy with the earlier of two identical items right, less that with the later right)"
PASSED = f"Only toys with an accuracy on novel classes of {TRAINED:g} or more count, {OVER_RUNS}"
GATE = f"{PASSED}, whatever data they were trained on"
UNDER_SOME = f"{OVER_RUNS}, under some encoding and depth"
SCALED = "With vectors scaled as in the paper's text and as in its program, where either was measured"


def claims(ds: xr.Dataset) -> list[Claim]:
    """The statements, judged."""
    ds = ds[[name for name, values in ds.items() if "step" not in values.dims]]  # what rules read
    return [*judge(ungated, ds), *judge(wu, ds, learnt(ds, ds["novel_accuracy"]))]


def by_stream(tell: Tell, streams: Mapping[str, str]) -> Tell:
    """By toys without residual stream, by those with it where the others lack what is needed."""

    def judged(ds: xr.Dataset) -> Told:
        for residual, words in streams.items():
            told = known(lambda of=residual: tell(ds.sel(residual=of)))
            if told is not None:
                return (f"{words}: {told[0]}", told[1]) if residual == "on" else told
        raise KeyError

    return judged


def stated(
    name: str,
    where: str,
    claim: str,
    rule: str,
    tell: Tell,
    source: Source = wu,
    *,
    streams: Mapping[str, str] | None = STREAMS,
    by: Sequence[str] = ("scale",),
) -> None:
    """State something that has to hold at every place `by`; `streams` that count, of which None takes all at once."""
    judged = tell if streams is None else by_stream(tell, streams)

    def everywhere(ds: xr.Dataset) -> Told:
        found = {", ".join(map(str, labels)): known(judged, of) for labels, of in places(ds, *by)}
        return together({name: told for name, told in found.items() if told})

    source(name, where, f"{claim}.", rule=f"{rule}. {SCALED}")(everywhere)


def gaps(
    name: str,
    where: str,
    claim: str,
    what: str,
    values: Callable[[xr.Dataset], xr.DataArray],
    bound: Bound,
    source: Source = wu,
    section: str = "section 5",
    **fields: Any,
) -> None:
    """State on which side of a bound numbers lie that gaps give."""
    rule, where = f"{what} {bound.words}, {OVER_RUNS}, everywhere. {GATE}", f"{section}, {where}"

    def tell(ds: xr.Dataset) -> Told:
        return each(values(ds), bound.test, *bound.than, form="+.3f")

    stated(name, where, f"{TASK} {claim}", rule, tell, source, **fields)


def gap(ds: xr.Dataset, training: Any = "unbiased", mask: str = "causal", **at: Any) -> xr.DataArray:
    """[positional, depth, seed, pair] of Gaussian data."""
    return ds["gap"].sel(data="gaussian", mask=mask, training=training, **at)


def deepened(of: xr.DataArray) -> xr.DataArray:
    """Its change from the least depth to the largest."""
    of = of.dropna("depth", how="all").sortby("depth")
    need(of.sizes["depth"] > 1)
    return of.isel(depth=-1, drop=True) - of.isel(depth=0, drop=True)


def rise(ds: xr.Dataset, positional: str) -> xr.DataArray:
    """By how much depth raises the mean gap."""
    return deepened(gap(ds, positional=positional).mean("pair"))


def amplified(ds: xr.Dataset) -> xr.DataArray:
    """By how much depth enlarges the mean gap of a fixed vocabulary, either way, by encoding."""
    of = ds["gap"].sel(data="fixed", mask="causal", training="unbiased", residual="on")
    return deepened(abs(of.mean("pair")))


def lowered(ds: xr.Dataset, positional: str) -> xr.DataArray:
    """The mean gap with an encoding less that without any."""
    mean = gap(ds).mean("pair")
    return mean.sel(positional=positional) - mean.sel(positional="none")


def shifted(ds: xr.Dataset, training: str, signs: Mapping[str, int]) -> xr.DataArray:
    """Gaps after biased training less those after unbiased, by the signs that they ought to have."""
    ways = xr.DataArray(list(signs.values()), {"pair": list(signs)})
    return (gap(ds, training) - gap(ds)).sel(pair=list(signs)) * ways


def without_mask(ds: xr.Dataset, positional: Sequence[str]) -> xr.DataArray:
    """Gaps under a full mask."""
    of = gap(ds, mask="full")
    return of.sel(positional=of["positional"].isin(positional))


def learns(ds: xr.Dataset) -> Told:
    """Every kind of toy on unbiased data, under a causal mask, passes the gate."""
    return each(ds["novel_accuracy"].sel(data="gaussian", mask="causal", training="unbiased"), above, TRAINED)


_text = "toys under a causal mask learn to retrieve from unbiased data, with every encoding, with and without residual"
_text, _rule = f"{_text} stream", f"accuracy on novel classes is {TRAINED:g} or more, {OVER_RUNS}, in every setting"
stated("learns", "section 5, setting", f"{TASK} {_text}", _rule, learns, ungated, streams=None)
_text = "a causal mask alone favours earlier items, also after unbiased training"
gaps("causal-favours-earlier", "no encoding", _text, f"the {GAP}", partial(gap, positional="none"), over(0))
_text = "a causal mask without positional encoding cannot follow answers that stand last in training"
_last = partial(gap, training="last", positional="none", pair=["first-last", "middle-last"])
_what = f"trained so, the {GAP} for first and last and for middle and last"
gaps("data-last", "biased data", _text, _what, _last, over(-EVEN))
BACK = "more depth moves the bias back to earlier items"
_grows = "the bias of a causal mask alone toward earlier items grows with depth"
_what = f"without residual stream, as in the paper, the mean {GAP} at the largest depth less that at the least"
_off = {"off": STREAMS["off"]}
for _id, _where, _positional, _text in (
    ("causal-grows-with-depth", "no encoding", "none", _grows),
    ("decay-depth-favours-earlier", "decay mask", "decay", f"under a decay mask {BACK}"),
    ("rope-depth-favours-earlier", "RoPE", "rope", f"with RoPE {BACK}"),
):
    gaps(_id, _where, _text, _what, partial(rise, positional=_positional), over(0), streams=_off)
_text = "with a fixed vocabulary and residual streams depth consistently amplifies the position bias"
_what = f"the size of the mean {GAP} at the largest depth less that at the least, with residual stream,"
gaps("residual-amplifies", "Fig. 14", _text, _what, amplified, over(0), section="App. L", streams=None)
for _positional, _where, _encoding in (("decay", "decay mask", "a decay mask"), ("rope", "RoPE", "RoPE")):
    _text, _what = f"{_encoding} moves the bias toward recent items", f"the mean {GAP} less that without encoding"
    gaps(f"{_positional}-favours-recent", _where, _text, _what, partial(lowered, positional=_positional), under(0))
_what = f"the shift of the {GAP} that way, against unbiased data,"
for _answers, _words, _signs in (
    ("first", "first in training pull the bias to the first item", {"first-middle": 1, "first-last": 1}),
    ("middle", "in the middle in training pull the bias to the middle", {"first-middle": -1, "middle-last": 1}),
):
    _shift = partial(shifted, training=_answers, signs=_signs)
    gaps(f"data-{_answers}", "biased data", f"answers that stand {_words}", _what, _shift, over(0))
_after = f"after unbiased training every {GAP}"
_text = "a full mask without positional encoding has no position bias"
gaps("full-even", "full mask", _text, _after, partial(without_mask, positional=["none"]), read.no_more(EVEN), ours)
_text = "a full mask has no position bias after unbiased training, with sinusoidal encodings and with RoPE"
_encoded = partial(without_mask, positional=["sinusoidal", "rope"])
gaps("full-even-encoded", "full mask", _text, _after, _encoded, read.no_more(EVEN), ours)


def lost(ds: xr.Dataset, training: Any) -> xr.DataArray:
    """By how much the first wins over the middle, and the last [..., end]."""
    of = gap(ds, training)
    return xr.concat([of.sel(pair="first-middle", drop=True), -of.sel(pair="middle-last", drop=True)], "end")


def worse(ds: xr.Dataset, training: str) -> xr.DataArray:
    """How much better either end is answered than the middle items [..., position]."""
    curve = ds["accuracy_by_position"].sel(data="gaussian", mask="causal", training=training)
    return curve.sel(position=[FIRST, LAST]) - curve.sel(position=[MIDDLE - 1, MIDDLE]).mean("position")


def in_some(differences: xr.DataArray, *dims: str) -> Told:
    """Whether all differences at some place are above 0."""
    parts = {}
    for labels, of in places(differences, *dims):
        if of.notnull().any():
            parts[", ".join(map(str, labels))] = each(of, above, 0, form="+.3f")
    return together(parts, some)


def never_lost(ds: xr.Dataset) -> Told:
    """Under no encoding and depth, with or without residual stream, does the middle lose against both ends."""
    trainings = ds["training"].isin(["unbiased", "first", "middle", "last"])
    words, test = in_some(lost(ds, ds["training"][trainings].values), "training", "residual", "positional", "depth")
    return words, {"holds": False, "does not hold": True}.get(test(SURE))  # type: ignore[operator]


def lost_in_the_middle(ds: xr.Dataset) -> Told:
    """By gaps, and by accuracies, after training on answers first or last."""
    of = {"gap": lost(ds, "first-and-last"), "accuracy": worse(ds, "first-and-last")}
    return together({name: in_some(values, "positional", "depth") for name, values in of.items()})


_where = "section 5, lost in the middle"
_text = f"{TASK} the middle loses against both ends after training on answers first or last, under some encodings"
_rule = (
    f"the {GAP} is against the middle item both with the first and with the last, and accuracy at the middle items is below "
    f"that at either end, each {UNDER_SOME}. {GATE}"
)
stated("lost-in-the-middle", _where, _text, _rule, lost_in_the_middle)
_text = f"{TASK} the middle does not lose against both ends unless answers stand at both ends in training"
_rule = (
    f"trained on answers that stand anywhere, first, in the middle or last, the {GAP} is never against the middle item "
    f"with both the first and the last, {OVER_RUNS}, under a causal mask with every encoding and depth, with and without "
    f"residual stream. {GATE}"
)
stated("lost-in-the-middle-two-ends", _where, _text, _rule, never_lost, ours, streams=None)


def residual_weaker(ds: xr.Dataset) -> Told:
    """Residual streams change the size of some bias; where a gap changes its sign they do something else."""
    changes: list[Interval] = []
    turned = 0
    for _, here in places(gap(ds), "positional", "depth"):
        without, those = (here.sel(residual=residual, drop=True) for residual in STREAMS)
        same = known(agreement, without, those)
        if same is not None and same[1](SURE) == "does not hold":  # type: ignore[operator]
            turned += 1
        elif same is not None:
            changes += means(abs(those.mean("pair")) - abs(without.mean("pair"))).values()
    need(changes or turned)
    more, less = ([test(change, 0) for change in changes] for test in (above, below))
    up, down = (sum(test(SURE) == "holds" for test in tests) for tests in (more, less))
    same_size = every([nothing(change, SAME) for change in changes])(SURE) == "holds"
    words = (
        f"kinds of models: {len(changes) + turned}; with residual streams mean gap further from 0: {up}, nearer: {down}"
    )
    verdict = None if not changes else False if same_size else some([*more, *less])
    return f"{words}; a gap changes its sign: {turned}", verdict


def agreement(one: xr.DataArray, other: xr.DataArray) -> Told:
    """Whether every gap has the same sign in both, or is none in both."""
    both = one.notnull().any("seed") & other.notnull().any("seed")
    pairs = zip(means(one.where(both)).values(), means(other.where(both)).values(), strict=True)
    tests = [same_sign(*ends) for ends in pairs]
    same, turned = (sum(test(SURE) == verdict for test in tests) for verdict in ("holds", "does not hold"))
    words = f"gaps: {len(tests)}; same sign in both, or near 0 in both: {same}; opposite signs: {turned}"
    return words, every(tests)


def same_sign(one: Interval, other: Interval) -> Test:
    """Whether both lie on the same side of 0, or both near it."""
    near = every([nothing(end, EVEN) for end in (one, other)])

    def test(level: float) -> Verdict:
        if near(level) == "holds":
            return "holds"
        ways = [[side(end, 0)(level) == "holds" for side in (above, below)] for end in (one, other)]
        return "undecided" if [False, False] in ways else "holds" if ways[0] == ways[1] else "does not hold"

    return test


def alike(ds: xr.Dataset, dim: str, names: Sequence[str], **at: str) -> Told:
    """Two kinds of data give the same biases."""
    return agreement(*(ds["gap"].sel({"mask": "causal", **at, dim: name}, drop=True) for name in names))


_text = f"{TASK} residual streams amplify or reduce the position bias after unbiased training"
_rule = (
    f"with them the mean {GAP} is further from 0 or nearer to it, {UNDER_SOME} where no gap changes its sign; it does not "
    f"hold where all 90 % intervals lie within {SAME:g}. {GATE}"
)
stated("residual-weaker", "section 5, residual", _text, _rule, residual_weaker, streams=None)
_rule = (
    f"in both kinds of models every {GAP} has the same sign, {OVER_RUNS}, or lies within {EVEN:g} of 0, by the 90 % "
    f"interval. {GATE}"
)
_text = f"{TASK} a fixed vocabulary with anisotropy 0.75 gives the same position biases as Gaussian data"


def alike_after(ds: xr.Dataset, unbiased: bool) -> Told:
    """A fixed vocabulary and Gaussian data, after unbiased training or after biased."""
    return alike(ds.sel(training=(ds["training"] == "unbiased") == unbiased), "data", ("gaussian", "fixed"))


for _id, _where, _after, _unbiased in (
    ("fixed-vocabulary", "section 5", "unbiased", True),
    ("fixed-vocabulary-biased", "App. L, Fig. 15 to 18", "biased", False),
):
    _tell = partial(alike_after, unbiased=_unbiased)
    stated(_id, _where, f"{_text} after {_after} training", _rule, _tell, streams=None)
_text = "vectors of standard deviation 1/sqrt(d), as in the paper's text, and 1/d, as in its program, give the same position"
_scales = ours("text-and-program", "section 5, text and program", f"{TASK} {_text} biases.", rule=_rule)
_scales(partial(alike, dim="scale", names=SCALES, data="gaussian"))


METRIC = "sink metric (fraction of queries that give a position a weight above tau)"


def under_masks(ds: xr.Dataset, kind: str) -> xr.Dataset:
    """What was measured under the masks of a kind, rising; `sink` [mask, seed, key] among it."""
    names = sorted((str(name) for name in ds["mask"].values if str(name).startswith(kind)), key=size_of)
    of = ds.sel(mask=names).dropna("mask", how="all", subset=["fresh"])
    return of.assign(sink=sink(of))


def beyond_others(
    ds: xr.Dataset, kind: str, first: Callable[[str], int] = lambda mask: 1, only: slice = slice(None)
) -> Told:
    """The least metric of the first tokens is above that of every other, under each mask of a kind, or some of them."""
    of = under_masks(ds, kind)["sink"].isel(mask=only)
    parts = {mask: (here, first(mask)) for (mask,), here in places(of, "mask")}
    least = {
        mask: x.isel(key=slice(n)).min("key") - x.isel(key=slice(n, None)).max("key") for mask, (x, n) in parts.items()
    }
    return together({mask: each(x, above, 0, form="+.3f") for mask, x in least.items()})


def made_by_training(ds: xr.Dataset) -> Told:
    """Fresh weights give the first token less."""
    of = under_masks(ds, "causal").isel(key=0)
    return each(of["sink"] - of["fresh"], above, 0, form="+.3f")


def weaker_with_window(ds: xr.Dataset) -> Told:
    """The metric at the first token rises with the window."""
    return each(under_masks(ds, "window")["sink"].isel(key=0).diff("mask"), above, 0, form="+.3f")


FIRST_TOKEN = f"the {METRIC} at the first token"
LARGEST = f"{FIRST_TOKEN} is above that of every other, {OVER_RUNS}"
SINKS: dict[str, tuple[str, str, Tell]] = {
    "first-token": (
        "In toys under a causal mask the sink is the first token",
        LARGEST,
        partial(beyond_others, kind="causal"),
    ),
    "made-by-training": (
        "The sink of toys under a causal mask, their first token, is made by training: fresh weights give less",
        f"{FIRST_TOKEN} rises in training, {OVER_RUNS}",
        made_by_training,
    ),
    "first-token-window": (
        "In toys under sliding windows the first token tends to be the sink where the window is larger",
        f"{LARGEST}, under the widest window",
        partial(beyond_others, kind="window", only=slice(-1, None)),
    ),
    "weaker-with-window": (
        "The smaller a toy's sliding window, the weaker the sink at the first token",
        f"{FIRST_TOKEN}, of the queries that see it, rises with every wider window, {OVER_RUNS}",
        weaker_with_window,
    ),
    "shared-by-prefix": (
        "In toys under a prefix mask all tokens of the prefix are sinks",
        f"the least {METRIC} within the prefix is above the highest after it, {OVER_RUNS}, for every prefix",
        partial(beyond_others, kind="prefix", first=size_of),
    ),
}


def of_sinks(ds: xr.Dataset, tell: Tell) -> Told:
    """Of toys without encoding on unbiased Gaussian data."""
    return tell(ds.sel(data="gaussian", positional="none", training="unbiased"))


for _id, (_text, _rule, _tell) in SINKS.items():
    _where, _of = ("K.4, read on", ours) if _id == "made-by-training" else ("K.4", wu)
    _by = ("scale", "depth")
    stated(f"sink-{_id}", _where, _text, f"{_rule}. {PASSED}", partial(of_sinks, tell=_tell), _of, by=_by)

_text = "data biased to both ends give the biases of Fig. 3 without a mask"
_rule = "not judged: no toy passes the gate without encoding, as the order of items and labels, which binds them, is unknown"
wu("two-ends-unmasked", "section 5, Fig. 3", f"{TASK} {_text}.", rule=_rule)(lacking)
_text = "RoPE decays much less with distance than a decay mask"
_rule = "not judged: what a logit loses to RoPE depends on its size and angles"
wu("rope-decays-less", "section 4", f"{TASK} {_text}.", rule=_rule)(lacking)
