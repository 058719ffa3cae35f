"""What was found, in five items of plain sentences, each number computed from the results at hand.

Where a folder has results of real language models, they alone speak; else the models that are there do. A number of one
model stands with its 95 % interval; those of two or three models stand in the order of their names, those of more as a
range. Where a probe has not been run the sentence names the command that runs it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xarray as xr

from ..claims.claim import DECIDED, HEADLINE, POPULATIONS, Claim, said
from ..claims.evidence import is_real
from ..measures.leakage import resolved
from ..measures.roles import ATTENDS, LARGE, SMALL, role_names, withheld
from ..results.curves import band, estimate, relative_error, rms_profiles, three_digits
from ..results.dataset import options_of
from ..results.folder import Collected
from ..results.profiles import change, shapes
from ..results.statistics import Interval
from ..results.tables import NOISE, variance
from ..results.ushape import Shape

Results = Mapping[str, xr.Dataset]

RATIOS = ("primacy", "recency")
LISTED = 3  # models that are named one by one, and their numbers
STRONG, WEAK = 2.0, 1.25  # how many times the middle both ends stand in a strong and in a weak U


def sentences(collected: Collected, claims: Sequence[Claim]) -> list[str]:
    """Five items: what attention knows of position, position 0, initialization, training, and how claims fare."""
    naming = Naming()
    sinks, swaps, trajectories = (leading(collected[kind]) for kind in ("sinks", "bos-swap", "trajectory"))
    return [
        _sources(leading(collected["leakage"]), naming),
        _position_zero(sinks, swaps, trajectories, naming),
        _initialization(leading(collected["jacobian"]), naming),
        _training(leading(collected["jacobian"]), naming),
        _claims(claims),
    ]


class Naming:
    """Models by name where they are first spoken of, "these models" as long as it is the same ones."""

    def __init__(self) -> None:
        self.named: list[str] = []

    def __call__(self, results: Mapping[str, object]) -> str:
        """Few models by name, more by number."""
        if list(results) == self.named:
            return "this model" if len(results) == 1 else "these models"
        self.named = list(results)
        return listed(results) if len(results) <= LISTED else f"{len(results)} models"


def leading(results: Results) -> Results:
    """The results of real language models, or all where there is none of these."""
    real = {name: ds for name, ds in results.items() if is_real(ds)}
    return real or results


def _sources(results: Results, naming: Naming) -> str:
    if not results:
        return "Absolute position in attention patterns: not measured here (headwater leakage MODEL)."
    known = {name: ds for name, ds in results.items() if resolved(ds, "log", _early(ds))}
    if not known:
        return "Absolute position in attention patterns is within noise here: it takes more prompts."
    first = next(iter(known.values()))
    lags, at = options_of(first)["lags"], _early(first)
    blocks = [np.nanmedian(ds["log_form_by_block"].sel(part="total", band=_early(ds)).values) for ds in known.values()]
    said = (
        f"Attention depends on absolute position. In {naming(known)} the log-weight on the token {min(lags)} to {max(lags)} "
        f"places back varies with the place of the query by {_of(known, 'log_form_of_model', part='total')} nat² "
        f"(queries {at}; median block {over([float(median) for median in blocks])}). "
    )
    nulls = [float(ds["null_uniform"].sel(band=_early(ds))) for ds in known.values() if "null_uniform" in ds]
    if nulls:
        said += f"Uniform attention under the same mask would give {over(nulls)}. "
    form = "steady" if all("steady_share_of_model" in ds for ds in known.values()) else "log"
    mask, stream = (
        [_of(known, f"{one}_share_of_model", ".0%", source=source) for one in (form, "log")]
        for source in ("mask", "residual")
    )
    said += f"The causal mask accounts for {mask[0]}, the residual stream for {stream[0]}"
    if form == "steady":
        said += (
            ", if the constant part of position 0's logit counts with the mask "
            f"({mask[1]} and {stream[1]} if it counts with the stream)"
        )
    return f"{said}."


def _position_zero(sinks: Results, swaps: Results, trajectories: Results, naming: Naming) -> str:
    parts = []
    if sinks:
        rate = over([float(ds["sink_rate_of_model"].values[0]) for ds in sinks.values()], ".0%")
        where = f"(sink rate of [Gu], {_length(sinks)})"
        parts.append(f"Position 0 is an attention sink in {rate} of the heads of {naming(sinks)} {where}")
        parts += _roles({name: ds for name, ds in sinks.items() if "has_role" in ds})
        if without := {name: ds for name, ds in sinks.items() if withheld(ds)}:
            parts.append(f"Of {naming(without)}, {withheld(next(iter(without.values())))}")
    if trajectories:
        same = [float(ds["later_difference"].max()) == 0 for ds in trajectories.values()]
        some = ", as under any causal mask" if all(same) else f" in {sum(same)} of {len(same)} models"
        parts.append(f"Its own residual stream is the same whatever text follows, bit for bit{some}")
    if swaps:
        parts.append(_swapped(swaps, naming))
    if not parts:
        return "What position 0 carries: not measured here (headwater sinks MODEL, headwater bos-swap MODEL)."
    return ". ".join(parts) + "."


def _roles(sinks: Results) -> list[str]:
    """Which heads attend to position 0, and what of it they use; nothing without results that tell roles."""
    if not sinks:
        return []
    roles = {name: role_names(ds) for name, ds in sinks.items()}
    reads, parks = (sum(int((of == role).sum()) for of in roles.values()) for role in ("reads", "parks"))
    own = np.concatenate([ds["output_own"].values[ds["attends"].values > ATTENDS] for ds in sinks.values()])
    every = sum(of.size for of in roles.values())
    said = f"{len(own)} of {every} heads attend{'s' * (len(own) == 1)} to it (mean weight above {ATTENDS:g})"
    if len(own):
        percent = f"{np.nanmedian(own):.0%}".removesuffix("%")
        said += f"; the median one of these writes {percent} % of what it would write with position 0 hidden"
    takes, stands = (f"{many or 'none'} {verb}{'s' * (many < 2)}" for many, verb in ((reads, "read"), (parks, "park")))
    used = (
        f"{takes.capitalize()} it (they take more than {LARGE:g} of the residual stream's size from it), and {stands} "
        f"there (they write less than {SMALL:g} of what they would write with it hidden)"
    )
    return [said, used]


def _swapped(swaps: Results, naming: Naming) -> str:
    first = {
        name: (ds.isel(replacement=0) if "replacement" in ds.dims else ds).isel(band=0) for name, ds in swaps.items()
    }
    put = dict.fromkeys(
        str(ds["replacement"].values if "replacement" in ds.coords else ds.attrs.get("replacement", "another"))
        for ds in first.values()
    )
    before, after = (
        over([float(ds[f"sink_rate_{when}"].mean()) for ds in first.values()], ".0%") for when in ("before", "after")
    )
    said = f"With the {' or '.join(put)} embedding at position 0 of {naming(first)} "
    said += f"the sink rate goes from {before} to {after} ({_length(first)})"
    form = "residual_steady" if all("residual_steady_before_of_model" in ds for ds in first.values()) else "residual"
    stream = " nat² to ".join(_of(first, f"{form}_{when}_of_model", of_variance=True) for when in ("before", "after"))
    return f"{said}, and what the residual stream alone would leak, V(X), from {stream} nat²"


def _shapes(results: Results, condition: str) -> dict[str, Shape]:
    """Of each model's profile, where that condition was measured."""
    return {name: found[condition] for name, ds in results.items() if condition in (found := shapes(ds))}


def _initialization(results: Results, naming: Naming) -> str:
    found = _shapes(results, "init")
    if not found:
        return "At initialization: not measured here (headwater jacobian MODEL)."
    said = f"At initialization {_ends(found, naming)}"
    errors = []
    for name in found:
        ds = results[name]
        if "theory_score_path" in ds:
            curves = [rms_profiles(ds, variable)["init"] for variable in ("theory_score_path", "sensitivity")]
            end = int(options_of(ds)["query"]) + 1
            errors.append(relative_error(*(band([run.mean[:end] for run in runs]).centre for runs in curves)))
    errors = [error for error in errors if math.isfinite(error)]
    if errors:
        said += (
            f" A theory with no fitted parameter predicts the whole profile to {over(errors, '.1%')} (mean relative "
            "error over positions)."
        )
    return said


def _training(results: Results, naming: Naming) -> str:
    trained = _shapes(results, "pretrained")
    if not trained:
        return "After pretraining: not measured here (headwater jacobian MODEL)."
    said = f"After pretraining {_ends(trained, naming)}"
    grown = {name: change(results[name]) for name in trained}
    grown = {name: numbers for name, numbers in grown.items() if numbers and 0 < numbers["primacy"].value < math.inf}
    if grown:
        parts = [
            f"{what} {_changed([numbers[key] for numbers in grown.values()])}"
            for key, what in (("middle", "scale-free sensitivity to the middle"), *zip(RATIOS, RATIOS, strict=True))
        ]
        said += f" Compared with initialization, {parts[0]}, {parts[1]}, and {parts[2]}."
    return said


def _ends(found: Mapping[str, Shape], naming: Naming) -> str:
    """Primacy and recency of several models, and how many of them are a U."""
    known = {name: shape for name, shape in found.items() if shape.primacy.value > 0}
    if not known:
        return "no model's attention reaches back from the last position to the first."
    first, last = ([getattr(shape, key) for shape in known.values()] for key in RATIOS)
    shapes = [
        "strong" if least >= STRONG else "weak" if least >= WEAK else "no"
        for least in (min(shape.primacy.low, shape.recency.low) for shape in known.values())
    ]
    told = [f"a {kind} U" if kind != "no" else "not clearly a U" for kind in shapes]
    which = each_or_counted(told)
    return (
        f"the last output of {naming(known)} depends {_told(first)} times as strongly on the first 5 % of positions as on "
        f"the middle half (primacy), and {_told(last)} times as strongly on the last position itself (recency): {which}."
    )


def _changed(found: Sequence[Interval]) -> str:
    """What became of a size in all models, by its intervals."""
    if all(one.high < 1 for one in found):
        return f"falls to {_told(found)} of what it was"
    if all(one.low > 1 for one in found):
        return f"rises to {_told(found)} times what it was"
    ways = ["a fall" if one.high < 1 else "a rise" if one.low > 1 else "no sure change" for one in found]
    return f"is {_told(found)} times what it was ({each_or_counted(ways)})"


def _claims(claims: Sequence[Claim]) -> str:
    found = [claim for claim in claims if claim.kind == "published" and claim.population in HEADLINE]
    if not found:
        return "No statement of a source was judged."
    parts = []
    for population in HEADLINE:
        own = Counter(claim.verdict for claim in found if claim.population == population)
        if any(own[one] for one in (*DECIDED, "undecided")):
            told = ", ".join(f"{own[one]} {said(one, own[one])}" for one in DECIDED)
            parts.append(f"of {own.total()} about {POPULATIONS[population]} {told}, {own['undecided']} undecided")
    left = sum(claim.verdict not in (*DECIDED, "undecided") for claim in found)
    left_out, rest = f"; {left or 'none'} could not be judged on these results", ""
    apart = Counter(claim.verdict for claim in claims if claim.kind == "published" and claim.population not in HEADLINE)
    if apart:
        rest += f". Apart from these, {apart.total()} are about what one ingredient of training causes"
    if not parts:
        return f"Of {len(found)} statements that the sources publish, none could be judged on these results{rest}."
    return f"Of {len(found)} statements that the sources publish: {'; '.join(parts)}{left_out}{rest}."


# ---------------------------------------------------------------------------------------------------------- in words


def over(values: Iterable[float], form: str = ".3g") -> str:
    """Of two or three models each, "2.9 and 1.3", of more their range, "1.3–2.9"; one number where they agree as printed."""
    numbers = list(values)
    percent = " %" * form.endswith("%")
    shown = [format(number, f"z{form}").removesuffix("%") for number in numbers]
    if len(numbers) <= LISTED or len(set(shown)) == 1:
        return listed(shown if len(set(shown)) > 1 else shown[:1]) + percent
    ends = [shown[numbers.index(extreme)] for extreme in (min(numbers), max(numbers))]
    return (" to " if min(numbers) < 0 else "–").join(ends) + percent


def each_or_counted(told: Sequence[str]) -> str:
    """What is said of each model: once where it is the same, in their order where they are few, else how often."""
    if len(set(told)) == 1:
        return told[0]
    if len(told) <= LISTED:
        return listed(told)
    return ", ".join(f"{one} in {count}" for one, count in Counter(told).most_common())


def listed(words: Iterable[str]) -> str:
    """As in "one, two and three"."""
    *rest, last = words
    return " and ".join(filter(None, (", ".join(rest), last)))


def _of(results: Results, name: str, form: str = ".3g", *, of_variance: bool = False, **where: object) -> str:
    """An estimate of early queries: of one model with its interval, of several as a range.

    Of a `variance`, those within noise are counted apart.
    """
    found = []
    for ds in results.values():
        at = where | ({"band": _early(ds)} if "band" in ds[name].dims else {})
        found.append(Interval(*estimate(ds, name, **at)))
    if not of_variance:
        return _told(found, form)
    if len(found) == 1:
        return variance(*found[0][:3])
    sure = [one for one in found if not variance(*one[:3]).startswith(NOISE)]
    noise = f"{NOISE} in {len(found) - len(sure)} of {len(found)}"
    return noise if not sure else _told(sure, form) + (f" ({noise})" if len(sure) < len(found) else "")


def _told(found: Sequence[Interval], form: str = ".3g") -> str:
    if len(found) > 1:
        return over([one.value for one in found], form)
    percent = " %" * form.endswith("%")
    value, low, high = (
        three_digits(end) if form == ".3g" else format(end, form).removesuffix("%") for end in found[0][:3]
    )
    return f"{value}{percent}" + ("" if math.isnan(found[0].low) else f" [{low}, {high}]")


def _length(results: Results) -> str:
    """Of the prompts."""
    lengths = {float(ds.sizes["position"]) for ds in results.values() if "position" in ds.sizes}
    return f"T = {over(sorted(lengths), ',.0f')}" if lengths else "T not kept"


def _early(ds: xr.Dataset) -> str:
    return str(ds["band"].values[0])
