"""[Ruscio], arXiv 2606.06160, "Where does Absolute Position come from in decoder-only Transformers?".

And what its reviewers asked for: a protocol behind the 40 %, and the two channels isolated under control.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import xarray as xr

from ..measures.bos_swap import LEFT_IN, LEFT_OUT, TOTAL, V_X
from ..measures.leakage import ALL, PARTIES, null_fails
from ..measures.sinks.roles import REACTS, SHARE
from ..results.curves import spearman
from ..results.statistics import Interval, apart, units
from ..results.tables import interval, number, variance
from .evidence import Results, real, runs
from .ledger import Source
from .readings import OVER_RUNS, TENTH, UNKNOWN, estimated, over_training
from .rules import SURE, Test, Tested, Told, above, below, every, listed, near, nothing, some, told

ABOVE = "lies above 0 at early queries in every model"
WITH_BOS = "gemma3-270m"  # which was trained with a BOS first
NTK, PLAIN, WINDOW = "tiny-llama-ntk", "tiny-llama", "tiny-mistral-window"

ruscio = Source("[Ruscio]", "ruscio", real("leakage"), "abstract")
ours = ruscio.but(kind="ours")
isolation = ruscio.but(kind="request", where="reviewers: controlled isolation")
theorem = ruscio.but(kind="theorem", needs=real("trajectory"))

# -------------------------------------------------------------------------------------------------------- the two sources

SHUFFLED = "the median head's leakage (early queries) lies above the 97.5 % quantile of shuffled query labels"
ROUNDING, SUMS = 1e-12, 1e-6  # squared nats; relative
DESIGN = (
    f"all parties off, leakage is below {ROUNDING:g} nat²; their nine covariances sum to the leakage within {SUMS:g}"
)
MARGIN = 0.02  # of the band's total
NULL = f"block 0's V(X) (90 % interval) is within {MARGIN:g} of every band's leakage, or position 0's logits account for it"


def early(ds: xr.Dataset, variable: str, **where: str) -> Interval:
    """A variable at early queries."""
    return estimated(ds, variable, band=first_band(ds), **where)


def first_band(ds: xr.Dataset) -> str:
    """Early queries."""
    return str(ds["band"].values[0])


def mask(ds: xr.Dataset) -> Interval:
    return early(ds, "log_form_of_model", part="mask")


def positive(**components: Interval) -> Told:
    """Whether these components of leakage are above 0."""
    words = ", ".join(f"V({name}) {variance(*part[:3])} nat²" for name, part in components.items())
    return words, every(above(part, 0) for part in components.values())


@ruscio("absolute-position-leaks", rule=SHUFFLED)
def _(ds: xr.Dataset) -> Told:
    """Attention patterns of RoPE models depend on absolute position."""
    median, null = (early(ds, name, quantile="median") for name in ("log_form_of_heads", "null_shuffled"))
    return f"{told(median)} nat² at queries {first_band(ds)} (shuffled {number(null.value)})", above(median, null.value)


@ruscio("mask-is-a-source", rule=f"V(M), mean over heads, left without the stream's part, {ABOVE}", kind="theorem")
def _(ds: xr.Dataset) -> Told:
    """The causal mask's denominator is a source of absolute position, also with the residual stream's part removed."""
    return positive(M=mask(ds))


@ruscio("residual-stream-is-a-source", rule=f"V(X), mean over heads, the constant sink taken out, {ABOVE}")
def _(ds: xr.Dataset) -> Told:
    """The residual stream is a second source of absolute position beside the mask."""
    return positive(X=early(ds, "steady_stream_of_model"))


@ours("residual-stream-with-constant-sink", rule=f"V(X), mean over heads, the constant sink left in, {ABOVE}")
def _(ds: xr.Dataset) -> Told:
    """The residual stream is a source of position where the constant sink, which holds none, counts as its part."""
    return positive(X=early(ds, "log_stream_of_model"))


def of_head(ds: xr.Dataset, party: str) -> Interval:
    """What a party adds to the leakage: the sum of its row of covariances, median over heads."""
    return early(ds, "parties_of_heads", party=party, other=ALL)


@isolation("isolation-mask-dominates", rule="the row of the number of keys, median over heads, is above the stream's")
def _(ds: xr.Dataset) -> Told:
    """At early queries the mask contributes more to the leakage than the residual stream."""
    mask, stream = (of_head(ds, party) for party in ("keys", "stream"))
    return f"mask {told(mask)}, residual stream {told(stream)} nat²", above(apart(stream, mask), 0)


@isolation("isolation-design", rule=DESIGN, kind="theorem")
def _(ds: xr.Dataset) -> Told:
    """The two channels, mask and residual stream, can be switched off one by one, and account for all of the leakage."""
    neither, total = float(np.abs(ds["log_neither"]).max()), early(ds, "log_form_of_model", part="total").value
    parts = ds["parties_of_model"].sel(party=list(PARTIES), other=list(PARTIES), band=first_band(ds))
    off = abs(float(parts.sum()) - total) / float(np.abs(parts).max())
    return f"both off {neither:.1g} nat², sum off by {off:.1g}", neither < ROUNDING and off < SUMS


@isolation("isolation-null", rule=NULL)
def _(ds: xr.Dataset) -> Told:
    """In the first block, whose streams carry no position, the residual component is 0."""
    words, tests = [], list[Tested]()
    for band in map(str, ds["band"].values):
        stream = estimated(ds, "log_stream_by_block", layer=ds["layer"].values[0], band=band)
        total, fails = float(ds["log_form_of_model"].sel(part="total", band=band)), null_fails(ds, band)
        words.append(f"{told(stream)} at {band}" + " (fails)" * fails)
        if fails or stream.low > 0:
            tests.append(not fails)
        elif total > 0:
            tests.append(nothing(Interval(*(end / total for end in stream[:3])), MARGIN))
    return ", ".join(words), every(tests)


GONE = f"without its mask the median head's leakage is within {TENTH:g} of that with it (90 % interval), in every band"
BARE = real("unmasked/leakage", options="--unmasked --fresh 0 --prompts 128 --length 128")


@isolation("mask-removed", needs=BARE, rule=GONE)
def _(ds: xr.Dataset) -> Told:
    """With the causal mask of a pretrained model removed its attention no longer tells positions apart."""
    words, tests = [], list[Tested]()
    for band in map(str, ds["band"].values):
        own, bare = (
            estimated(ds, name, quantile="median", band=band) for name in ("log_form_of_heads", "null_unmasked")
        )
        words.append(f"{told(bare)} of {told(own)} nat² at {band}")
        tests.append(nothing(Interval(*(end / own.value for end in bare[:3])), TENTH))
    return ", ".join(words), every(tests)


# ---------------------------------------------------------------------------------------------------- controlled training

trained = partial(runs, "leakage", options="--prompts 1024 --length 128")
STEADY = "V(X) at early queries, mean over heads, the constant sink taken out,"
BOTH = f"V(M) and {STEADY} lie above 0 in all three, {OVER_RUNS} of each"
THREE = (NTK, PLAIN, WINDOW)  # what sets Qwen2.5-Coder 7B, Llama 3 8B and Mistral 7B apart, and nothing else
ORDER = (
    f"{STEADY} rises from {' to '.join(THREE)}, and with the block in {WINDOW} (rank correlation), {OVER_RUNS} of each"
)


def of_runs(results: Results, variable: str = "steady_stream_of_model", **where: str) -> list[float]:
    """A variable at early queries, of each run."""
    return [float(ds[variable].sel({"band": first_band(ds), **where})) for ds in results.values()]


@ruscio("architectures", rule=ORDER, needs=trained(*THREE))
def _(models: Sequence[Results]) -> Told:
    """NTK scaling suppresses leakage's residual component, a window lets it grow with depth, RoPE lies between."""
    values = [of_runs(results) for results in models]
    by_block = [ds["steady_stream_by_block"].sel(band=first_band(ds)).values for ds in models[-1].values()]
    ranks = [spearman(np.arange(len(of_run), dtype=float), of_run) for of_run in by_block]
    words = ", ".join(f"{name} {listed(of_model, '.3g')}" for name, of_model in zip(THREE, values, strict=True))
    tests = [above(over_training(more, less), 0) for less, more in pairwise(values)]
    tests.append(above(over_training(ranks), 0))
    return f"V(X) {words} nat²; rank correlation with the block {listed(ranks)}", every(tests)


@ruscio("both-in-all-architectures", rule=BOTH, needs=trained(*THREE))
def _(models: Sequence[Results]) -> Told:
    """Both components of leakage, mask and residual stream, appear under NTK-scaled RoPE, standard RoPE and a window."""
    words, tests = [], []
    for name, results in zip(THREE, models, strict=True):
        of = {"M": of_runs(results, "log_form_of_model", part="mask"), "X": of_runs(results)}
        words.append(f"{name} " + ", ".join(f"V({part}) {listed(values, '.3g')}" for part, values in of.items()))
        tests += [above(over_training(values), 0) for values in of.values()]
    return f"{'; '.join(words)} nat²", every(tests)


# ------------------------------------------------------------------------------------------------------ position 0 swapped

FORTY = 0.40  # published
STEADIED = "V(X), median over heads, the constant sink left in,"
FRACTION = f"the share removed of {STEADIED} at early queries lies"
NO_SHARE = "undecided where that is not clear of 0 before (?), since there is no share then"
BOS, TEXT = real("bos-swap", first="bos", model=WITH_BOS), real("bos-swap", first="none")
NEAR_40 = (
    f"the share removed at early queries lies within a quarter of {FORTY:g} in every model, by every replacement: by one "
    "of the definitions of the residual component, where what is there before is clear of 0"
)
SAME = "The fraction of the residual component that a swap at position 0 removes does not depend on"
BANDS = f"in every later band the share removed of {STEADIED} is below that of the early band; {NO_SHARE}"


def replacements(ds: xr.Dataset) -> dict[str, xr.Dataset]:
    """The parts of a result by what was put at position 0; nothing is where it was left out."""
    if "replacement" not in ds.dims:
        return {str(ds.attrs.get("replacement", "replaced")): ds}
    return {name: ds.sel(replacement=name) for name in map(str, ds["replacement"].values) if name != LEFT_OUT}


def removed(part: xr.Dataset, definition: str = LEFT_IN, **where: str) -> Interval:
    """The share with its interval, at early queries if nowhere else; unknown where nothing is clear of 0 before."""
    share = estimated(part, "component_share", **{"definition": definition, "band": first_band(part)} | where)
    return share if np.all(np.isfinite(share[:3])) else UNKNOWN


def share_told(fraction: Interval) -> str:
    return "?" if np.isnan(fraction.value) else told(fraction, ".0%")


def lost(part: xr.Dataset, definition: str) -> Interval:
    """What a replacement removes at early queries, before less after."""
    return estimated(part, "component_removed", definition=definition, band=first_band(part))


RESIDUAL = re.compile(r"V\(X\)|Shapley value")  # how definitions of the residual component begin


def removes(ds: xr.Dataset) -> Told:
    """Whether every replacement removes this fraction, by one definition of the residual component."""
    parts, words, tests = replacements(ds), [], list[Test]()
    for definition in filter(
        RESIDUAL.match, map(str, ds["definition"].values)
    ):  # what changes besides is no part of it
        shares = {name: removed(part, definition) for name, part in parts.items()}
        tests.append(every(near(share, FORTY) for share in shares.values()))
        if definition in (V_X, LEFT_IN) or tests[-1](SURE) != "not measured":
            words.append(f"{definition}: {', '.join(f'{share_told(x)} ({name})' for name, x in shares.items())}")
    return "; ".join(words), some(tests)


for source, who, needs, swap in (
    (ruscio, "bos", BOS, "the BOS embedding"),
    (ours, "text", TEXT, "the embedding of the token of text at position 0"),
):
    claim = f"Replacing {swap} removes 40 % of the residual component of leakage at early queries."
    source(f"{who}-removes-40", claim=claim, rule=NEAR_40, published="40 %", needs=needs)(removes)


def same_by_replacement(ds: xr.Dataset) -> Told:
    """Whether every replacement removes about as much: of the same component, shares are alike where amounts are."""
    amounts = {name: lost(part, LEFT_IN) for name, part in replacements(ds).items()}
    mean = float(np.mean([amount.value for amount in amounts.values()]))
    words = ", ".join(f"{name} {told(amount)} nat²" for name, amount in amounts.items())
    return words, every(near(amount, mean) for amount in amounts.values()) if len(amounts) > 1 else None


def same_by_form(ds: xr.Dataset) -> Told:
    """Whether as much is removed by every other definition of the residual component."""
    parts = replacements(ds)
    words, tests = [], list[Test]()
    for definition in map(str, ds["definition"].values):
        shares = {name: removed(part, definition) for name, part in parts.items()}
        known = {name: share for name, share in shares.items() if not np.isnan(share.value)}
        said = ", ".join(f"{share_told(share)} ({name})" for name, share in known.items())
        words.append(f"{definition} {said or 'not above 0 before'}")
        tests += [near(removed(parts[name]), share.value) for name, share in known.items() if definition != LEFT_IN]
    return "; ".join(words), known_or_undecided(tests)


def known_or_undecided(tests: Sequence[Test]) -> Test:
    """`every`, undecided where no share is known: the swap was measured."""
    return lambda level: "undecided" if (verdict := every(tests)(level)) == "not measured" else verdict


def leakage_rises(ds: xr.Dataset) -> Told:
    """Whether total leakage rises by the swap."""
    fall = {name: lost(part, TOTAL) for name, part in replacements(ds).items()}
    rise = {name: Interval(-change.value, -change.high, -change.low) for name, change in fall.items()}
    words = ", ".join(f"{told(change, '+.3g')} nat² ({name})" for name, change in rise.items())
    return words, every(above(change, 0) for change in rise.values())


protocol = ruscio.but(where="reviewers: protocol of the 40 %", kind="request", needs=BOS)
rule = f"what each of two replacements or more removes of {STEADIED} at early queries is within a quarter of their mean"
protocol("protocol-replacement", claim=f"{SAME} what is put there.", rule=rule)(same_by_replacement)
rule = f"{FRACTION} within a quarter of that by any other definition, in every model with a BOS; {NO_SHARE}"
protocol("protocol-form", claim=f"{SAME} how that component is defined.", rule=rule)(same_by_form)
for source, who, needs, those, without in (
    (ruscio, "", BOS, "with a BOS", "without the BOS"),
    (ours, "text-", TEXT, "without a BOS", "with another embedding than the text's own at position 0"),
):
    rule = f"total leakage (early queries, median over heads) rises by the swap, in every model {those}"
    claim = f"Attention sinks are stabilizers: {without}, attention patterns depend more on absolute position."
    source(f"{who}sinks-stabilize", claim=claim, rule=rule, needs=needs)(leakage_rises)


@protocol("protocol-band", rule=BANDS)
def _(ds: xr.Dataset) -> Told:
    """Behind early queries a swap at position 0 removes a smaller fraction of the residual component."""
    words, tests = [], list[Test]()
    for name, part in replacements(ds).items():
        shares = {band: removed(part, band=band) for band in map(str, part["band"].values)}
        words.append(", ".join(f"{band}: {share_told(share)}" for band, share in shares.items()) + f" ({name})")
        first, *later = shares.values()
        tests += [below(apart(first, share), 0) for share in later]
    return "; ".join(words), known_or_undecided(tests)


# ----------------------------------------------------------------------------------------------- position 0 and its readers

CONSTANT = "behind the same BOS the stream at position 0 does not change with the text, in every model with a BOS"
APART = 0.9  # cosine below which streams of different tokens have not become one: ours
VARIES = f"the mean cosine of different tokens' streams before the final norm is below {APART:g}, interval over tokens"
heads = ruscio.but(needs=real("sinks"))
IN_SOME = "in some head of every model, by intervals for so many heads"
READ = (
    f"the share of heads with the role *reads* (more than {SHARE:g} of their output comes from position 0, and no less than "
    "their block's median head writes) is above 0 in every model, interval over documents"
)
MOVED = f"with the embedding at 0 the pattern over other keys moves by more than {REACTS:g} (total variation) {IN_SOME}"


@theorem("position-0-closed", rule="the stream at position 0 is the same, bit for bit, under any other text behind it")
def closed(ds: xr.Dataset) -> Told:
    """The activation at position 0 is a closed dynamical system."""
    later = float(ds["later_difference"].max())
    return f"largest change by other text {later:.3g}", later == 0


@theorem("fingerprint-constant", rule=CONSTANT, needs=real("trajectory", model=WITH_BOS))
def _(ds: xr.Dataset) -> Told:
    """With an auto-prepended BOS the fingerprint at position 0 is constant across inputs."""
    return closed(ds.sel(first="bos"))


@ruscio("fingerprint-varies", rule=VARIES, needs=real("trajectory"))
def _(ds: xr.Dataset) -> Told:
    """Without an auto-prepended BOS the fingerprint at position 0 varies with the token there."""
    cosine = estimated(ds.isel(place=0, layer=-1), "cosine")
    return f"mean cosine {told(cosine, '.2f')}", below(cosine, APART)


@heads("sink-reading-heads", rule=READ)
def _(ds: xr.Dataset) -> Told:
    """Heads downstream read position 0: sink-reading heads."""
    share = estimated(ds, "role_share", role="reads")
    return f"{told(share, '.1%')} of {ds['attends'].size} heads", above(share, 0)


def heads_above(ds: xr.Dataset, variable: str, threshold: float) -> Told:
    """Whether a number of heads is above a threshold in some head; how many are, with the largest."""
    values, low, high = (ds[f"{variable}{end}"].values.ravel() for end in ("", "_low", "_high"))
    freedom = float(len(np.unique(units(ds))) - 1) if "prompt" in ds.sizes else np.inf
    known = (ends for ends in zip(values, low, high, strict=True) if np.isfinite(ends).all())
    tests = [above(Interval(*map(float, ends))._replace(freedom=freedom), threshold) for ends in known]
    most = np.nanargmax(values)
    words = f"{(values > threshold).sum()} of {values.size} heads, at most "
    return words + interval(values[most], low[most], high[most]), some(tests)


claim = "Attention downstream depends on the token at position 0."
heads("heads-react", claim=claim, rule=MOVED, variable="reacts", threshold=REACTS)(heads_above)


# ------------------------------------------------------------------------------------------- what position 0 is needed for

HIDING = "--replace drawn,without-0,held-log-z,constant-sink"
OPTIONS = f"{HIDING} --prompts 32 --length 128 --profile-prompts 0 --recall 12"
needed = ours.but(where="7", needs=real("interventions/bos-swap", options=OPTIONS))
LOSS = "change of the next-token loss under {}, interval over documents, above 0"
LESS = "KL divergence under {} less that under without-0: interval below 0"


def loss_rises(ds: xr.Dataset, replacement: str) -> Told:
    """Whether the next-token loss rises under an intervention."""
    change = estimated(ds, "loss_change_of_model", replacement=replacement)
    return f"{told(change, '+.3f')} nat", above(change, 0)


def matters_less(ds: xr.Dataset, replacement: str) -> Told:
    """Whether an intervention changes what is predicted less than position 0 hidden does."""
    change, hidden = (estimated(ds, "kl_of_model", replacement=name) for name in (replacement, "without-0"))
    # Both are of the same documents, so that the interval of two independent numbers is too wide if anything.
    return f"{told(change, '.3f')} against {told(hidden, '.3f')} nat", below(apart(hidden, change), 0)


for name, replacement, claim in (
    ("position-0-needed", "without-0", "Language models need position 0: hidden from later queries, the loss rises."),
    ("denominators-steadied", "held-log-z", "The trend of log Z with position is used: taken out, the loss rises."),
):
    needed(name, claim=claim, rule=LOSS.format(replacement), replacement=replacement)(loss_rises)
for name, replacement, claim in (
    ("token-at-0-matters-less", "drawn", "Which token stands at position 0 matters less than that one stands there."),
    ("constant-logit-suffices", "constant-sink", "A constant logit in place of position 0's costs less than none."),
):
    needed(name, claim=claim, rule=LESS.format(replacement), replacement=replacement)(matters_less)
