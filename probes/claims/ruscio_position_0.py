"""[Ruscio] on position 0: what its embedding is needed for, who reads it, and the protocol behind the 40 %."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr

from ..measures.roles import LARGE, REACTS
from ..results.statistics import Interval, apart, units
from ..results.tables import interval, number, variance
from .evidence import real
from .readings import estimated
from .rules import Test, Told, above, below, every, near, never_refuted, some, told
from .ruscio import HUB, first_band, ours, ruscio, share_told

WITH_BOS = "meta-llama/Llama-3.2-1B"  # a small model whose tokenizer puts a BOS first
theorem = ruscio.but(kind="theorem", needs=real("trajectory"))

# ------------------------------------------------------------------------------------------------------ position 0 swapped

FORTY = 0.40  # published
FRACTION = "the interval of the fraction of V(X) removed at early queries"
BOS, TEXT = real("bos-swap", first="bos", model=WITH_BOS), real("bos-swap", first="none")


def replacements(ds: xr.Dataset) -> Iterator[tuple[str, xr.Dataset]]:
    """What was put at position 0, in words, with its part of a result."""
    if "replacement" in ds.dims:
        yield from ((str(name), ds.sel(replacement=name)) for name in ds["replacement"].values)
    else:
        yield str(ds.attrs.get("replacement", "replaced")), ds


def removed(part: xr.Dataset, band: str = "", variable: str = "removed_of_model") -> Interval | None:
    """The fraction with its interval, at early queries if not in another band; None where it takes more prompts."""
    fraction = estimated(part, variable, band=band or first_band(part))
    return fraction if np.all(np.isfinite(fraction[:3])) else None


def removes(ds: xr.Dataset, fraction: float = FORTY, variable: str = "removed_of_model") -> Told:
    """Whether every replacement removes this fraction; 0: anything at all."""
    of = {name: removed(part, variable=variable) for name, part in replacements(ds)}
    words = ", ".join(f"{share_told(share)} ({name})" for name, share in of.items())
    return words, every(near(share, fraction) if fraction else above(share, 0) for share in of.values() if share)


for who, needs, swap in (
    ("bos", BOS, "Replacing the BOS embedding"),
    ("text", TEXT, "Replacing the embedding of the token of text at position 0"),
    ("im-start", real("im-start/bos-swap", more="--first 1"), "Replacing <|im_start|> at position 0"),
):
    for name, what, lies, fraction in (
        ("40", "40 %", f"within a quarter of {FORTY:g}", FORTY),
        ("some", "a part", "above 0", 0.0),
    ):
        claim, rule = (
            f"{swap} removes {what} of the residual component at early queries",
            f"{FRACTION} lies {lies}, in every model",
        )
        published = (who, name) == ("bos", "40")
        source = ruscio if published else ours
        swapped = source.but(needs=needs, published="40 %")
        swapped(f"{who}-removes-{name}", "", f"{claim}, the constant sink left in.", rule=rule, fraction=fraction)(
            removes
        )
        if published:
            steady = {"variable": "removed_steady_of_model", "fraction": fraction}
            swapped(f"{who}-removes-{name}-steady", "", f"{claim}, the constant sink taken out.", rule=rule, **steady)(
                removes
            )

for short, model in zip(("llama-3-8b", "mistral-7b", "qwen2.5-coder-7b"), HUB, strict=True):
    claim = (
        f"In {model.partition('/')[2]} replacing the embedding at position 0 removes 40 % of the residual component."
    )
    options = "--prompts 256 --length 128 --replace mean,zero,random"
    needs = real("bos-swap", only=[model], options=options, out=f"runs/{short}")
    rule = f"{FRACTION} lies within a quarter of {FORTY:g}"
    ruscio(f"bos-removes-40-{short}", "", claim, rule=rule, published="40 %", needs=needs)(removes)


def same_by_replacement(ds: xr.Dataset) -> Told:
    """Whether every replacement removes about as much."""
    of = {name: removed(part) for name, part in replacements(ds)}
    known = [share for share in of.values() if share]
    middle = float(np.mean([share.value for share in known])) if known else np.nan
    words = ", ".join(f"{name} {share_told(share)}" for name, share in of.items())
    return words, every(near(share, middle) for share in known) if len(known) > 1 else None


FORMS = {  # other things that "residual component" may be read as: variable, place
    "V(X) without the constant sink": ("residual_steady", {}),
    "logits' V(S)": ("leakage", {"part": "logits"}),
    "denominators' V(D)": ("leakage", {"part": "denominator"}),
    "Shapley value of the log form": ("source", {"source": "residual"}),
    "Shapley value of the weight form": ("weight", {"source": "residual"}),
}


def left(part: xr.Dataset, name: str, /, **where: str) -> float | None:
    """1 - after / before, means over blocks; None where there is nothing above 0 to take a fraction of."""
    if f"{name}_before" not in part:
        return None
    before, after = (float(part[f"{name}_{when}"].sel(where).mean()) for when in ("before", "after"))
    return 1 - after / before if before > 0 else None


def same_by_form(ds: xr.Dataset) -> Told:
    """Whether as much is removed by every other definition of the residual component."""
    parts = dict(replacements(ds))
    of = {name: removed(part) for name, part in parts.items()}
    words, tests = ["V(X) " + ", ".join(f"{share_told(share)} ({name})" for name, share in of.items())], []
    for form, (variable, where) in FORMS.items():
        others = {name: left(part, variable, band=first_band(part), **where) for name, part in parts.items()}
        known = {name: other for name, other in others.items() if other is not None}
        words.append(f"{form} {', '.join(f'{x:.0%} ({name})' for name, x in known.items()) or 'not above 0 before'}")
        tests += [near(share, other) for name, other in known.items() if (share := of[name])]
    return "; ".join(words), every(tests)


def leakage_rises(ds: xr.Dataset) -> Told:
    """Whether total leakage rises by the swap."""
    words, tests = [], []
    for name, part in replacements(ds):
        # Of single blocks alone there are intervals; their mean's is no wider than the mean of theirs.
        at = part.sel(part="total", band=first_band(part))
        ends = ("before", "after", "change", "change_low", "change_high")
        before, after, *change = (float(at[f"leakage_{end}"].mean()) for end in ends)
        words.append(f"{variance(before)} to {variance(after)} nat² ({name})")
        tests.append(above(Interval(*change), 0))
    return ", ".join(words), every(tests)


SAME = "The fraction of the residual component that a swap at position 0 removes does not depend on"
for who, needs, those, without in (
    ("", BOS, "with a BOS", "without the BOS"),
    ("text-", TEXT, "without a BOS", "with another embedding than the text's own at position 0"),
):
    published = (ours if who else ruscio).but(needs=needs)
    protocol = published.but(where="reviewers: protocol of the 40 %", kind="ours" if who else "request")
    rule = f"{FRACTION} by each replacement (two at least) lies within a quarter of their mean in every model {those}"
    protocol(f"{who}protocol-replacement", "", f"{SAME} what is put there.", rule=rule)(same_by_replacement)
    rule = f"{FRACTION} lies within a quarter of that by any other definition above 0 before, in every model {those}"
    protocol(f"{who}protocol-form", "", f"{SAME} how that component is defined.", rule=rule)(same_by_form)
    rule = f"total leakage (log form, early queries, mean over blocks) rises by the swap, in every model {those}"
    claim = f"Attention sinks are stabilizers: {without}, attention patterns depend more on absolute position."
    published(f"{who}sinks-stabilize", "", claim, rule=rule)(leakage_rises)

BANDS = "in every later band the fraction of V(X) removed is below that of the early band"


@ruscio("protocol-band", "reviewers: protocol of the 40 %", rule=BANDS, kind="request", needs=BOS)
def _(ds: xr.Dataset) -> Told:
    """The fraction that a swap at position 0 removes of the residual component is less behind early queries."""
    words, tests = [], list[Test]()
    for name, part in replacements(ds):
        of = {str(band): removed(part, str(band)) for band in part["band"].values}
        words.append(", ".join(f"{band}: {share_told(share)}" for band, share in of.items()) + f" ({name})")
        first, *later = of.values()
        tests += [below(apart(first, share), 0) for share in later if share and first]
    return "; ".join(words), every(tests)


# ----------------------------------------------------------------------------------------------- position 0 and its readers


@theorem("position-0-closed", rule="the stream at position 0 is the same, bit for bit, under any other text behind it")
def closed(ds: xr.Dataset) -> Told:
    """The activation at position 0 is a closed dynamical system."""
    later = float(ds["later_difference"].max())
    return f"largest change by other text {later:.3g}", later == 0


CONSTANT = "behind the same BOS the stream at position 0 does not change with the text, in every model with a BOS"


@theorem("fingerprint-constant", rule=CONSTANT, needs=real("trajectory", model=WITH_BOS))
def _(ds: xr.Dataset) -> Told:
    """With an auto-prepended BOS the fingerprint at position 0 is constant across inputs."""
    return closed(ds.sel(first="bos"))


APART = 0.9  # cosine below which streams of different tokens have not become one: ours
VARIES = (
    f"the cosine of different tokens' streams before the final norm is below {APART:g} in every model (90 % of pairs)"
)


@ruscio("fingerprint-varies", rule=VARIES, needs=real("trajectory"))
def _(ds: xr.Dataset) -> Told:
    """Without an auto-prepended BOS the fingerprint at position 0 varies with the token there."""
    cosine = estimated(ds.isel(place=0, layer=-1), "cosine")
    return f"cosine {told(cosine, '.2f')} (90 % of pairs)", below(cosine, APART)


def heads_above(ds: xr.Dataset, name: str, threshold: float) -> Told:
    """Whether a number of heads is above a threshold in some head; how many are, surely or not, with the largest."""
    values, low, high = (ds[f"{name}{end}"].values.ravel() for end in ("", "_low", "_high"))
    freedom = float(len(np.unique(units(ds))) - 1) if "prompt" in ds.sizes else np.inf
    each = [
        Interval(*map(float, ends))._replace(freedom=freedom)
        for ends in zip(values, low, high, strict=True)
        if np.isfinite(ends).all()
    ]
    most, above_it = int(np.nanargmax(values)), int((values > threshold).sum())
    words = f"{above_it} of {values.size} heads ({int((low > threshold).sum())} surely), at most "
    return words + interval(values[most], low[most], high[most]), never_refuted(some(above(x, threshold) for x in each))


IN_SOME = "in some head of every model, by intervals for so many heads (threshold ours: below it undecided)"


@ruscio(
    "sink-reading-heads", rule=f"above {LARGE:g} of the stream is taken from position 0 {IN_SOME}", needs=real("sinks")
)
def _(ds: xr.Dataset) -> Told:
    """Heads downstream read position 0: sink-reading heads."""
    words, test = heads_above(ds, "written", LARGE)
    if "effect" in ds and np.isfinite(ds["effect"]).any():
        words += f"; largest effect on the next token {number(ds['effect'].max())} nat"
    return words, test


MOVED = f"with the embedding at 0 the pattern over other keys moves by more than {REACTS:g} (total variation) {IN_SOME}"


@ruscio("heads-react", rule=MOVED, needs=real("sinks"))
def _(ds: xr.Dataset) -> Told:
    """Attention downstream depends on the token at position 0."""
    return heads_above(ds, "reacts", REACTS)


# ------------------------------------------------------------------------------------------- what position 0 is needed for

SWAPS = "--replace drawn,without-0,held-log-z,equal-log-z,constant-sink"
OPTIONS = f"{SWAPS} --prompts 32 --length 128 --profile-prompts 0 --recall 12"
needed = ours.but(where="7", needs=real("interventions/bos-swap", options=OPTIONS))


def loss_rises(ds: xr.Dataset, replacement: str) -> Told:
    """Whether the next-token loss rises under an intervention."""
    change = estimated(ds, "loss_change_of_model", replacement=replacement)
    return f"{told(change, '+.3f')} nat", above(change, 0)


def matters_less(ds: xr.Dataset, replacement: str) -> Told:
    """Whether an intervention changes what is predicted less than position 0 hidden does."""
    change, hidden = (estimated(ds, "kl_of_model", replacement=name) for name in (replacement, "without-0"))
    # Both are of the same documents, so that the interval of two independent numbers is too wide if anything.
    return f"{told(change, '.3f')} against {told(hidden, '.3f')} nat", below(apart(hidden, change), 0)


LOSS = "change of the next-token loss under {}, interval over documents, above 0"
LESS = "KL divergence under {} less that under without-0: interval below 0"
for name, replacement, claim, rule, function in (
    ("position-0-needed", "without-0", "Position 0 hidden from every later query, the loss rises.", LOSS, loss_rises),
    ("denominators-steadied", "held-log-z", "The trend of log Z taken out, the loss rises.", LOSS, loss_rises),
    ("token-at-0-matters-less", "drawn", "Another token at position 0 matters less than none.", LESS, matters_less),
    ("constant-logit-suffices", "constant-sink", "A constant logit at 0 costs less than none.", LESS, matters_less),
):
    needed(name, "", claim, rule=rule.format(replacement), replacement=replacement)(function)
