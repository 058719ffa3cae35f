"""What the rules of all sources share: tests of an interval, one verdict for several models, who counts for what.

A rule asks for intervals, and a `Test` says what an interval means at a level of confidence. A statement **holds** where the
whole 95 % interval lies on its side, **does not hold** where it lies on the other, else it is **undecided**. About models in
general: it holds if it holds in each model by its own 95 % interval, and fails if it fails in one of m at level 1 - 0.05/m
(`every`); "in some model" is the reverse (`some`). A number holds within a quarter of it, a correlation within 0.01
(`near`); that there is nothing holds where the 90 % interval lies within margins fixed beforehand (`nothing`).

Who counts (`probes.claims.claim.Population`): fresh weights of any model decide about initialization (`in_each`);
language models that others trained, of `LARGE` parameters and more, about pretrained ones (`in_real`), beside which the
small ones' numbers stand as `tiny`; three runs and more of each of our controlled models about an ingredient of
training (`runs`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xarray as xr

from ..results.collected import Collected
from ..results.curves import band, estimate
from ..results.profiles import typical
from ..results.statistics import Interval, between_runs, jackknifed, over_runs, units
from ..results.tables import interval, number
from ..results.theory_map import Row, rows
from ..results.ushape import SHORTEST, UShape, ushape
from .claim import Judged, Kind, Population, Rule, Statement, Verdict, verdict_of

Results: TypeAlias = Mapping[str, xr.Dataset]
Stated: TypeAlias = list[tuple[Statement, Rule]]
Test: TypeAlias = Callable[[float], Verdict]  # at a level of confidence
Told: TypeAlias = tuple[str, Test | bool | None]  # of one model: what was measured, and its test; None: nothing to test

SURE = 0.95
QUARTER, HUNDREDTH = 0.25, 0.01  # how far from a published number, from a published correlation
MOST, HALF = 0.9, 0.5  # of heads
TENTH = 0.1  # within which a place of the map is known
RANKS, VARIANCE, SLOPE = 0.3, 0.02, 0.1  # margins of "nothing there": rank correlation, explained variance, slope
LARGE = 100_000_000  # parameters of a language model that counts as one
RUNS = 3  # of controlled training, at the least
BUNDLED = "tiny-llama tiny-llama-ntk tiny-mistral-window tiny-qwen2"
REAL = "smollm2-135m"  # what decides about pretrained language models where nothing else is at hand
COMMANDS = {  # as `make report` gives them
    "jacobian": f"headwater jacobian {BUNDLED} --out reports/jacobian",
    "no-rope": f"headwater jacobian {BUNDLED} --conditions init --no-rope --out reports/no-rope",
    "scalar": f"headwater jacobian {BUNDLED} --method scalar --conditions init --out reports/scalar-init",
    "theory": f"headwater theory {BUNDLED} --prompts 2 --out reports/theory",
    "map": "headwater map --out reports/theory",
}
MEASURED = {  # on `REAL`, as `make llm` does
    "jacobian": "--prompts 16 --seeds 2 --products 32 --initialization smollm2-135m",
    "scalar": "--method scalar --conditions pretrained --prompts 16",
    "theory": "--prompts 2 --seeds 2 --length 128 --initialization smollm2-135m",
    "sinks": "--prompts 32 --length 256",
    "trajectory": "--prompts 32 --length 256",
    "leakage": "--prompts 512 --length 128",
    "bos-swap": "--replace mean,random --prompts 64 --length 128 --profile-prompts 4 --products 32",
}
SEEDS = (1, 2)  # of controlled runs beside the bundled models
LISTED = 8  # numbers that a reader takes in one by one
# Families whose feed-forward has two matrices; all others are gated and have three.
UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "falcon", "bloom", "starcoder2")


def measuring(kind: str, model: str = REAL, *, more: str = "", variant: str = "") -> str:
    """The command that measures a pretrained language model."""
    name = "jacobian" if kind == "scalar" else kind
    folder = "/".join(part for part in ("reports/llm", variant, kind) if part)
    return " ".join(part for part in ("headwater", name, model, MEASURED[kind], more, "--out", folder) if part)


def training(models: Iterable[str], kind: str, options: str = "", steps: Sequence[str] = ("",)) -> str:
    """The commands that train the missing controlled runs of these recipes, and measure them, at some steps if given."""
    folders = {f"runs/{model}-seed{seed}": (model, seed) for model in models for seed in SEEDS}
    trained = [f"headwater pretrain {model} --seed {seed} --out {out}" for out, (model, seed) in folders.items()]
    measured = " ".join(f"{folder}{step}" for folder in folders for step in steps)
    command = "sinks" if kind == "steps" else kind
    said = " ".join(one for one in ("headwater", command, measured, options, f"--out reports/controlled/{kind}") if one)
    return " && ".join([*trained, said])


class Source:
    """A source's statements: `of_it(...)` puts one beside the rule that it decorates, in `among`."""

    def __init__(self, prefix: str, name: str, among: Stated) -> None:
        self.prefix, self.name, self.among = prefix, name, among

    def __call__(
        self,
        name: str,
        where: str,
        claim: str,
        rule: str,
        population: Population,
        command: str,
        *,
        kind: Kind = "published",
        published: str = "-",
        model: str = "",
    ) -> Callable[[Rule], Rule]:
        """`command` may be one of `COMMANDS` or, for pretrained models, of `MEASURED`."""
        by_name = {one: measuring(one) for one in MEASURED} if population == "pretrained" else COMMANDS
        usual = REAL if population == "pretrained" else "fresh models"
        statement = Statement(
            f"{self.prefix}-{name}",
            f"{self.name} {where}",
            claim,
            rule,
            published,
            model or usual,
            by_name.get(command, command),
            kind,
            population,
        )

        def keep(decides: Rule) -> Rule:
            self.among.append((statement, decides))
            return decides

        return keep


def listed(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """A few numbers as they are; of more their median, range and count, "0.3 (0.2 to 0.5 in 12 heads)"."""
    if len(values) <= LISTED:
        return ", ".join(format(value, form) for value in values)
    middle, low, high = (format(float(end), form) for end in (np.median(values), np.min(values), np.max(values)))
    return f"{middle} ({low} to {high} in {len(values)} heads)"


def having(results: Results, *names: str) -> dict[str, xr.Dataset]:
    """Those that hold all of these variables."""
    return {name: ds for name, ds in results.items() if all(one in ds for one in names)}


# --------------------------------------------------------------------------------------------------------------- tests


def between(found: Interval, low: float | int, high: float | int) -> Test:
    """Holds where the interval lies within [low, high], fails where it lies outside."""

    def test(level: float) -> Verdict:
        if math.isnan(found.value):
            return "not measured"
        least, most = found.at(level)
        if low <= least and most <= high:
            return "holds"
        return "does not hold" if most < low or least > high else "undecided"

    return test


def above(found: Interval, threshold: float | int) -> Test:
    """Holds where the whole interval lies above, fails where none of it does."""
    return between(found, math.nextafter(threshold, math.inf), math.inf)


def below(found: Interval, threshold: float | int) -> Test:
    """The reverse."""
    return between(found, -math.inf, math.nextafter(threshold, -math.inf))


def near(found: Interval, published: float, *, correlation: bool = False) -> Test:
    """Within a quarter of a number, or 0.01 of a correlation."""
    if not correlation:
        return between(found, published - abs(QUARTER * published), published + abs(QUARTER * published))
    low, high = published - HUNDREDTH, published + HUNDREDTH
    # An interval's end may lie beyond what a correlation can be.
    return between(found, -math.inf if low <= -1 else low, math.inf if high >= 1 else high)


def nothing(found: Interval, margin: float) -> Test:
    """Equivalence by two one-sided tests: at 95 % the 90 % interval lies within the margin."""

    def test(level: float) -> Verdict:
        inside = between(found, -margin, margin)
        return (
            "holds" if inside(2 * level - 1) == "holds" else "undecided" if inside(level) == "holds" else inside(level)
        )

    return test


def sure(holds: bool | None) -> Test:
    """Of what has no interval: bits that are compared. None: nothing is known."""
    return lambda level: "not measured" if holds is None else verdict_of(holds)


def in_most(of_heads: np.ndarray) -> Test:
    """Of heads, which are what a model has, not a sample: nine tenths or more of them; under half, for it not to hold."""
    share = float(np.mean(of_heads)) if of_heads.size else math.nan
    return lambda level: "holds" if share >= MOST else "does not hold" if share < HALF else "undecided"


def every(tests: Sequence[Test]) -> Test:
    """Of several that all have to hold; those not measured do not count."""

    def test(level: float) -> Verdict:
        known = [one for one in tests if one(level) != "not measured"]
        if not known:
            return "not measured"
        if all(one(level) == "holds" for one in known):
            return "holds"
        stricter = 1 - (1 - level) / len(known)
        return "does not hold" if any(one(stricter) == "does not hold" for one in known) else "undecided"

    return test


def some(tests: Sequence[Test]) -> Test:
    """Of several of which one has to hold."""

    def test(level: float) -> Verdict:
        known = [one for one in tests if one(level) != "not measured"]
        if not known:
            return "not measured"
        stricter = 1 - (1 - level) / len(known)
        if any(one(stricter) == "holds" for one in known):
            return "holds"
        return "does not hold" if all(one(level) == "does not hold" for one in known) else "undecided"

    return test


def never_refuted(test: Test) -> Test:
    """Undecided where it does not hold."""
    return lambda level: "undecided" if test(level) == "does not hold" else test(level)


def as_test(found: Test | bool | None) -> Test:
    """What a rule gave, as a test."""
    return found if callable(found) else sure(found)


# ------------------------------------------------------------------------------------------------------- who counts


def in_each(results: Results, judge: Callable[[xr.Dataset], Told]) -> Judged | None:
    """One verdict for all models: the statement has to hold in each in which it can be judged. None without any."""
    if not results:
        return None
    found = {name: judge(ds) for name, ds in results.items()}
    verdict = every([as_test(test) for _, test in found.values()])(SURE)
    return Judged(_told(found), verdict, ", ".join(found), commands(results.values()))


def in_real(results: Results, judge: Callable[[xr.Dataset], Told]) -> Judged | None:
    """The same for real language models; what small ones say stands beside and decides nothing."""
    large = {name: ds for name, ds in results.items() if is_real(ds)}
    tiny = {name: judge(ds) for name, ds in results.items() if name not in large}
    beside = _told(tiny) if tiny else "-"
    found = in_each(large, judge)
    if found is not None:
        return found._replace(tiny=beside)
    return Judged("-", "not measured", "", "", beside) if tiny else None


def _told(found: Mapping[str, Told]) -> str:
    return "; ".join(f"{name}: {told}" for name, (told, _) in found.items())


def is_real(ds: xr.Dataset) -> bool:
    """Whether a result tells of a pretrained language model of `LARGE` parameters or more."""
    conditions = ds["condition"].values if "condition" in ds.coords else [ds.attrs.get("condition")]
    return "pretrained" in conditions and parameters(config(ds)) >= LARGE


def parameters(config: Mapping[str, Any]) -> int:
    """Weights of a model's matrices, from its configuration; of routed experts one's. 0 where it says too little.

    Norms and biases are left out: less than a thousandth.
    """

    def given(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    width, blocks, vocabulary = (
        given("hidden_size", "n_embd"),
        given("num_hidden_layers", "n_layer"),
        given("vocab_size"),
    )
    heads = given("num_attention_heads", "n_head")
    if not (width and blocks and vocabulary and heads):
        return 0
    size = given("head_dim") or width // heads
    attention = 2 * width * size * (heads + (given("num_key_value_heads") or heads))
    gated = config.get("model_type") not in UNGATED
    forward = (2 + gated) * width * (given("intermediate_size", "n_inner") or 4 * width)
    tied = config.get("tie_word_embeddings", not gated)
    return blocks * (attention + forward) + (2 - bool(tied)) * vocabulary * width


def runs(collected: Collected, kind: str, model: str) -> dict[str, xr.Dataset]:
    """Controlled runs of a bundled model: its own, and those of other seeds, "MODEL-seed1", under "controlled/KIND"."""
    found = {**collected[kind], **collected[f"controlled/{kind}"]}
    same = re.compile(rf"{re.escape(model)}(-seed\d+)?")
    return {name: ds for name, ds in found.items() if same.fullmatch(PurePath(name).name)}


def over_training(*groups: Sequence[float]) -> Interval:
    """Mean over one group's runs, or the difference of two groups', by Student's t; no interval below `RUNS` runs."""
    found = over_runs(groups[0]) if len(groups) == 1 else between_runs(*groups)
    enough = min(map(len, groups)) >= RUNS
    return found if enough else Interval(found.value, math.nan, math.nan)


def estimated(ds: xr.Dataset, name: str, **where: object) -> Interval:
    """A variable at a place with the bootstrap's interval that its result holds."""
    return Interval(*estimate(ds, name, **where))


def told(found: Interval, form: str = ".3g", change: Callable[[float], float] = float) -> str:
    """In words; `change` undoes a logarithm."""
    return interval(*(change(end) for end in found[:3]), form=form)


def commands(results: Iterable[xr.Dataset]) -> str:
    """The commands that made results, each once; empty where one was made from Python."""
    found = [str(ds.attrs.get("command", "")) for ds in results]
    return " && ".join(dict.fromkeys(found)) if all(found) else ""


def with_bos(results: Results) -> dict[str, xr.Dataset]:
    """Those whose prompts begin with the model's BOS."""
    return {name: ds for name, ds in results.items() if ds.attrs.get("first_policy") == "bos"}


def options(ds: xr.Dataset) -> dict[str, Any]:
    """What the measurement was given."""
    return json.loads(str(ds.attrs.get("options", "{}")))


def config(ds: xr.Dataset) -> dict[str, Any]:
    """Of the model."""
    return json.loads(str(ds.attrs.get("config", "{}")))


def window(ds: xr.Dataset) -> int | None:
    """Positions a query of the model sees, itself included; None for all."""
    found = config(ds)
    width = found.get("sliding_window")
    return int(width) if width and found.get("use_sliding_window", True) else None


# -------------------------------------------------------------------------------------------------------------- curves


def prompted(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> list[np.ndarray]:
    """Profiles [prompt, position] up to the query, one array per seed; none where the result lacks the condition."""
    if variable not in ds or not {"prompt", "position"} <= set(ds[variable].dims):
        return []
    if "condition" not in ds[variable].dims:
        found = [ds] if condition == ds.attrs.get("condition", "pretrained") else []
    elif condition in ds["condition"].values:
        found = [ds.sel(condition=condition).isel(seed=seed) for seed in range(ds.sizes["seed"])]
    else:
        found = []
    arrays = [one[variable].transpose("prompt", "position").values[:, : _end(ds)].astype(float) for one in found]
    return [values for values in arrays if not np.all(np.isnan(values))]


def curves(ds: xr.Dataset, condition: str, variable: str = "sensitivity") -> list[np.ndarray]:
    """Root mean squares over prompts [position], one per seed: what a kernel predicts."""
    return [root_mean_square(values) for values in prompted(ds, condition, variable)]


def root_mean_square(values: np.ndarray) -> np.ndarray:
    """[position] of [prompt, position]."""
    return np.sqrt(np.mean(values**2, axis=0))


def of_profiles(
    found: Sequence[Sequence[np.ndarray]],
    tell: Callable[..., float],
    unit: np.ndarray,
    mean: Callable[[np.ndarray], np.ndarray] = typical,
) -> Interval:
    """A number of mean profiles: over fresh models where there are several, else over documents.

    Args:
        found: by seed the profiles [prompt, position], as many as `tell` takes.
        tell: of the mean profiles [position]; NaN where they have no such number.
        unit: of every prompt.
        mean: over prompts.
    """
    if len(found) > 1:
        return over_runs([tell(*map(mean, profiles)) for profiles in found])
    if not found:
        return Interval(math.nan, math.nan, math.nan)
    together = np.stack([np.asarray(values) for values in found[0]], axis=1)
    return jackknifed(lambda values: float(tell(*(mean(one) for one in np.moveaxis(values, 1, 0)))), together, unit)


def of_profile(
    ds: xr.Dataset, condition: str, tell: Callable[[np.ndarray], float], variable: str = "sensitivity"
) -> Interval:
    """The same of one result's profile, geometric over prompts."""
    return of_profiles([[values] for values in prompted(ds, condition, variable)], tell, units(ds))


def together(found: list[np.ndarray]) -> np.ndarray | None:
    """Several seeds' profiles as one, the geometric mean; None where there is none without gaps."""
    found = [curve for curve in found if np.all(np.isfinite(curve))]
    return band(np.stack(found)).centre if found else None


def shape(curve: np.ndarray) -> UShape | None:
    """None where a curve is too short or has gaps."""
    return ushape(curve) if len(curve) >= SHORTEST and np.all(np.isfinite(curve) & (curve >= 0)) else None


def seen_whole(results: Results) -> dict[str, xr.Dataset]:
    """Those whose queries see all positions before them: no sliding window."""
    return {name: ds for name, ds in results.items() if window(ds) is None}


def end_of(name: str) -> Callable[[np.ndarray], float]:
    """The logarithm of a curve's "primacy" or "recency"."""

    def tell(curve: np.ndarray) -> float:
        found = shape(curve)
        value = getattr(found, name) if found else math.nan
        return math.log(value) if 0 < value < math.inf else math.nan

    return tell


def ends_told(ds: xr.Dataset, condition: str) -> tuple[str, list[Interval]]:
    """Primacy and recency of the mean profile in words, and their logarithms."""
    ends = {name: of_profile(ds, condition, end_of(name)) for name in ("primacy", "recency")}
    said = (
        f"{name} {told(end, change=math.exp)}" if math.isfinite(end.value) else f"{name}: no middle"
        for name, end in ends.items()
    )
    return ", ".join(said), list(ends.values())


def range_told(values: npt.ArrayLike, form: str = ".3g") -> str:
    """Median and range of what is finite, "0.3 (0.2 to 0.5)", since brackets hold intervals; "-" where nothing is."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2:
        return number(known[0], form) if len(known) else "-"
    middle, low, high = (number(value, form) for value in (np.median(known), known.min(), known.max()))
    return f"{middle} ({low} to {high})"


def _end(ds: xr.Dataset) -> int | None:
    query = options(ds).get("query")
    return None if query is None else int(query) + 1


# ----------------------------------------------------------------------------------------------------------------- map


def places(collected: Collected, **where: Any) -> list[Row]:
    """The places of all maps with these coordinates."""
    found = []
    for ds in collected["map"].values():
        fits = np.ones(ds.sizes["place"], dtype=bool)
        for name, value in where.items():
            fits &= ds[name].values == value
        found += rows(ds.isel(place=np.flatnonzero(fits)))
    return found


def place_told(row: Row) -> str:
    """What is moved at a place of a map, with the logit scale written as in claims."""
    return str(row["label"]).replace("d sigma^2", "d σ²")


def on_map(collected: Collected, found: Mapping[str, Told], model: str) -> Judged | None:
    """One verdict for places of the map; None for none."""
    if not found:
        return None
    verdict = every([as_test(test) for _, test in found.values()])(SURE)
    return Judged(_told(found), verdict, model, map_command(collected))


def roughly(value: float, share: float = TENTH) -> Interval:
    """The logarithm of a ratio that has no interval, taken as known within `share` of it.

    The map keeps the mean of each place's two fresh models alone: a tenth is more than their scatter in primacy, 4 % in
    the bundled models. A sink's sizes and [Wu]'s measure are kept as means over prompts: a quarter.
    """
    log = math.log(value) if 0 < value < math.inf else math.nan
    return Interval(log, log - math.log1p(share), log + math.log1p(share))


def minus(one: Interval, other: Interval) -> Interval:
    """The difference of two estimates, their errors independent."""
    value = one.value - other.value
    low = math.hypot(one.value - one.low, other.high - other.value)
    high = math.hypot(one.high - one.value, other.value - other.low)
    return Interval(value, value - low, value + high)


def map_command(collected: Collected) -> str:
    """Of all maps."""
    return commands(collected["map"].values())


CONTROLLED = ("tiny-llama-ntk", "tiny-llama", "tiny-mistral-window")  # in [Ruscio]'s order
