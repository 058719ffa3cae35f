"""The study behind `headwater match`: a model, the theory of it, and toys of the same architecture, through the same probes.

One result per model. Its dimensions:

- `state`: "init" (fresh weights, `seed` of them) and "pretrained" (seed 0 alone) of the model; `prompt`, with its `document`
  where there are any; `position`, with `fraction` = j / (T - 1).
- `variant`: "matched", and toys that lack one ingredient ("no residual", "no causal mask", "no positions", "no window");
  `training`: "init", "grown", "retrieval", "in-context"; `toy_seed`; `toy_prompt`; `point`, a toy's
  positions, with `point_fraction`.
  "grown" are fresh matched toys whose embeddings are scaled so that the stream grows through the blocks as it does in the
  fresh model (`toy_scale`, the factor): how much branches weigh against the stream decides the shape at initialization.
- `member`: single toys of a variant and training, one for each seed and position asked for.

Its variables, all with long_name and units, NaN where there is nothing:

- curves, sample by sample: `model_sensitivity`, `model_elasticity`, `model_alpha`, `model_sink_rate` [state, seed, prompt,
  position]; `toy_elasticity` (geometric mean over the positions asked for), `toy_alpha`, `toy_sink_rate` [variant, training,
  toy_seed, toy_prompt, point]; `model_swapped` [state, seed, position] and `toy_swapped` [variant, training, toy_seed,
  point], elasticities, geometric means over prompts, with something else at position 0; `model_uniform` [position],
  `toy_uniform` [variant, point]. Results made before have no elasticities: `toy_sensitivity`, and root mean squares in place
  of geometric means over the positions asked for and in what is swapped;
- theory of the model: `theory_kernel` [state, seed, prompt, position], the second-moment kernel with measured patterns and
  score path; `theory_cesaro` [state, position] and `theory_alpha` [state], N^L and its fitted alpha;
- `model_leakage_total`, `model_removed`, `model_reacts` [state, seed], `model_leakage_share` [state, seed, source], and the
  same of toys as means over members, `toy_...` [variant, training (, source)]; each with `_low` and `_high`, for the model
  over documents (of `reacts` none), for toys over runs, which are seeds;
- `toy_loss`, `toy_accuracy`, `toy_target` [variant, training, member];
- what `matched.judged` adds: `agreement_spearman`, `agreement_error` [curve, state, other] with `_low` and `_high`, and
  `agreement_apart`: a model's "sensitivity" or "alpha" in a state against the `other` one ("second-moment kernel", "N^L,
  best alpha", "toy init", "retrieval toy", "no residual, retrieval toy", ...); `model_primacy`, `model_recency`,
  `model_trough` [state] and `toy_...` [variant, training], with `_low` and `_high`.

The study knows no toys itself: it is handed who makes them (`Maker`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ..errors import InputError
from ..figures.match import match_figure
from ..measures.agreement import BOOTSTRAP, PROMPTS, fractions, portrait
from ..measures.bos_swap import removed
from ..measures.leakage import LEAST_PROMPTS, SOURCES
from ..measures.match_result import judged
from ..models.initialization import CONFIG, Rule, check_rule
from ..models.view import Spec, View
from ..results.curves import mean_profile
from ..results.dataset import dataset, provenance
from ..results.profiles import typical
from ..results.statistics import jackknife
from ..results.tables import write_report
from ..results.ushape import SHORTEST
from ..run.progress import Advance
from ..theory.cesaro import fit_alpha
from ..theory.kernel import second_moment
from .match_report import match_report
from .runner import Given, Results, Study, Subject, Tell, Told, Unit, run, write_results

NAME = "match"
STATES = ("init", "pretrained")
TRAININGS = ("init", "grown", "retrieval", "in-context")
TOY_PROMPTS = 64  # of leakage in toys; of theirs, like the model's, `agreement.PROMPTS` for everything else
CURVES = ("elasticity", "alpha", "sink_rate")
SCALARS = ("leakage_total", "removed", "reacts", "leakage_share")
ENDS = ("", "_low", "_high")
TOYS = ".unfinished-toys"
SCALES = (1e-3, 1e3)  # of a fresh toy's embeddings
HALVINGS = 16  # to a fifth of a thousandth of the factor

Row: TypeAlias = Mapping[str, np.ndarray]  # what is known of one model, or of the toys of a variant and training
Variables: TypeAlias = dict[str, tuple[Any, ...]]


if TYPE_CHECKING:
    from toy.matching import Group, Member, Plan
else:  # checked signatures need the names, and nothing here imports toys
    Group = Member = Plan = Any


@runtime_checkable
class Maker(Protocol):
    """Who makes toys, as `toy.matching.Matching`."""

    @property
    def described(self) -> dict[str, Any]: ...

    def plan(self, spec: Spec, *, bos: bool, length: int, norm: Literal["rms", "layer"]) -> Plan: ...

    def toys(self, plans: Sequence[Plan], folder: Path, advance: Advance | None) -> Sequence[Sequence[Group]]: ...

    def finish(self, folder: Path) -> None: ...


def match(
    sources: Sequence[str],
    out: str | Path,
    maker: Maker,
    *,
    quick: bool = False,
    seeds: int = 2,
    initialization: Rule = CONFIG,
    bootstrap: int = BOOTSTRAP,
    advance: Advance | None = None,
    told: Told | None = None,
    **given: Any,
) -> Results:
    """Measure every model beside toys that match it; write results, figure and table, return the results by model name.

    Writes `match.nc` for one model or `match-MODEL.nc` for each of several, `match.png`, `match.svg` and `match.md`, all of
    it at the end. After an interruption it resumes with what was trained and measured before.

    Args:
        sources: models, as `probes.load` takes them.
        out: folder.
        maker: of toys, a `Maker`.
        quick: marks the results of a small setting.
        seeds: fresh models per model.
        initialization: what their weights are drawn from, as in `probes.fresh`.
        bootstrap: resamples for the intervals of a model's leakage and of troughs.
        advance: hears (what is running, done, in all).
        told: hears in one line which models are done already.
        given: fields of `Given`: which prompts, 128 if not given, and how models are loaded. All prompts are for leakage,
            the first 8 for everything else.

    Raises:
        InputError: bad input, found before anything is trained, or unfinished work with other settings in `out`.
    """
    out, asked = Path(out), Given(**{"prompts": 128, **given})
    if seeds < 1:
        raise InputError(f"seeds={seeds} leaves no fresh model; give at least 1")
    check_rule(initialization)
    if bootstrap < 0:
        raise InputError(f"bootstrap={bootstrap} is no number of resamples; give 0 or more")
    if asked.prompts < LEAST_PROMPTS:
        raise InputError(f"prompts={asked.prompts} are too few for leakage; give at least {LEAST_PROMPTS}")
    if asked.length < SHORTEST:
        raise InputError(f"length={asked.length} leaves no middle to compare with; give at least {SHORTEST}")
    options: dict[str, Any] = {"seeds": seeds, "initialization": initialization, "bootstrap": bootstrap}
    toys, plans, trained = maker.described, dict[str, Plan](), dict[str, Sequence[Group]]()
    cache: dict[str, tuple[xr.Dataset, ...]] = {}
    results: Results = {}

    def check(model: View, name: str, tokens: Tensor) -> None:
        if len(tokens) < LEAST_PROMPTS or tokens.shape[1] < SHORTEST:
            least = f"{LEAST_PROMPTS} of {SHORTEST}"
            raise InputError(f"{len(tokens)} prompts of {tokens.shape[1]} tokens are too few; give at least {least}")
        plans[name] = planned(model, tokens, maker)

    def prepare(models: Sequence[Subject]) -> None:
        groups = maker.toys([plans[one.name] for one in models], out / TOYS, advance)
        trained.update((one.name, own) for one, own in zip(models, groups, strict=True))

    def measure(model: View, one: Subject, tell: Tell) -> xr.Dataset:
        beside: dict[str, Any] = {"documents": one.drawn.documents, "cache": cache, "progress": tell}
        made = measured(model, one.tokens, trained[one.name], seed=asked.seed, **options, **beside)
        notes = json.dumps(list(plans[one.name].notes))
        return made.assign_attrs(notes=notes, toys=json.dumps(toys), quick=int(quick))

    def write(found: Results) -> None:
        results.update((name, judged(ds, bootstrap=bootstrap)) for name, ds in found.items())
        write_results(results, out, NAME, match_figure)
        write_report(match_report(results), out / f"{NAME}.md")

    def units(model: View, name: str, tokens: Tensor) -> list[Unit]:
        return [Unit(name, {**asked.chosen(), **options, "toys": toys, "quick": quick}, measure)]

    study = Study(NAME, units, write, check=check, prepare=prepare, files=[f"{NAME}.md"])
    run(study, sources, out, asked, asked.loading(), advance=advance, told=told)
    maker.finish(out / TOYS)
    return results


def planned(model: View, tokens: Tensor, maker: Maker) -> Plan:
    """The toys that match a model on these prompts; a first token that all prompts share counts as BOS."""
    parts = model.parts(0)
    norm = None if parts is None else parts.attention_norm or parts.post_attention_norm
    bos = len(tokens) > 1 and bool((tokens[:, 0] == tokens[0, 0]).all())
    return maker.plan(model.spec, bos=bos, length=tokens.shape[1], norm="rms" if norm is None else norm.kind)


def measured(
    model: View,
    tokens: Tensor,
    groups: Sequence[Group],
    *,
    seeds: int,
    initialization: Rule = CONFIG,
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    cache: dict[str, tuple[xr.Dataset, ...]] | None = None,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> xr.Dataset:
    """A model and its toys, measured; the layout is the module's text. `cache` holds toys that several models share."""
    cache = {} if cache is None else cache
    done, total = 0.0, 1 + seeds + sum(len(group.members) / 10 for group in groups if group.key not in cache)

    def step(more: float) -> None:
        nonlocal done
        done += more
        progress(done, total)

    def of_toy(member: Member, view: View, *, stationary: bool = True, share: float = 0.0) -> xr.Dataset:
        made = portrait(view, member.prompts(TOY_PROMPTS), stationary=stationary, bootstrap=0, seed=seed)
        step(share)
        return made

    views = {("init", n): model.reinitialized(n, initialization=initialization) for n in range(seeds)}
    views |= {("pretrained", 0): model}
    few = tokens[:PROMPTS]
    portraits, kernels = {}, {}
    apart = all(model.parts(layer) is not None for layer in range(model.spec.blocks))
    for place, view in views.items():
        portraits[place] = portrait(view, tokens, bootstrap=bootstrap, seed=seed, documents=documents)
        if apart:
            kernels[place] = second_moment(view, few, attention="measured", score_path=True)["sensitivity"].values
        step(1.0)

    toys: dict[tuple[str, str], Sequence[xr.Dataset]] = {}
    runs: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    scales: list[float] = []
    for group in groups:
        variant, members, retrieval = group.variant, group.members, group.task == "retrieval"
        newborn = {member.seed: member for member in members} if retrieval else {}
        if group.key not in cache:
            cache[group.key] = tuple(of_toy(one, one.view, stationary=retrieval, share=0.1) for one in members)
            cache[f"fresh {group.key}"] = tuple(of_toy(one, one.fresh) for one in newborn.values())
        toys[variant, group.task] = cache[group.key]
        runs[variant, group.task] = _of_runs([member.seed for member in members], cache[group.key]) | {
            "loss": np.array([member.loss for member in members]),
            "accuracy": np.array([member.accuracy for member in members]),
            "target": np.array([np.nan if member.target is None else member.target for member in members]),
        }
        if retrieval:
            runs[variant, "init"] = _of_runs(list(newborn), cache[f"fresh {group.key}"])
        if retrieval and variant == groups[0].variant:
            target = float(np.mean([growth(views["init", n], few) for n in range(seeds)]))
            scales = [matching_scale(member, target) for member in newborn.values()]
            grown = [of_toy(one, one.scaled(x)) for one, x in zip(newborn.values(), scales, strict=True)]
            runs[variant, "grown"] = _of_runs(list(newborn), grown)

    variants = list(dict.fromkeys(group.variant for group in groups))
    uniform = {group.variant: toys[group.variant, group.task][0]["uniform"].values for group in groups}
    own, of_toys = portraits["pretrained", 0], toys[variants[0], "retrieval"][0]
    length, points = tokens.shape[1], of_toys.sizes["position"]
    said = {"long_name": "factor on the embeddings of toys that grow as the model does, geometric mean", "units": "1"}
    variables = _of_model(model, portraits, kernels, seeds) | _of_toys(variants, runs, uniform)
    variables["toy_scale"] = ((), np.exp(np.log(scales).mean()), said)
    coords: dict[str, Any] = {
        "state": list(STATES),
        "seed": range(seeds),
        "variant": variants,
        "training": list(TRAININGS),
        "source": list(SOURCES),
        "position": range(length),
        "fraction": (("position",), fractions(length)),
        "point": range(points),
        "point_fraction": (("point",), fractions(points)),
    }
    coords |= {} if documents is None else {"document": (("prompt",), list(documents[:PROMPTS]))}
    options = {"prompts": len(tokens), "length": length, "seeds": seeds, "bootstrap": bootstrap, "seed": seed}
    refused = {f"{v}, {t}": json.loads(str(many[0].attrs["refused"])) for (v, t), many in toys.items()}
    attrs = {
        "measurement": NAME,
        "initialization": views["init", 0].identity.initialization or "",
        "few_prompts": len(few),
        **{name: own.attrs[name] for name in ("band", "lags", "refused")},
        **{f"toy_{name}": of_toys.attrs[name] for name in ("band", "lags")},
        "toy_refused": json.dumps(refused),
    }
    return dataset(variables, coords=coords, attrs=provenance(model, tokens, **options) | attrs)


@torch.no_grad()
def growth(view: View, tokens: Tensor) -> float:
    """How many times larger (rms) the stream is after the last block than before the first, at the last position."""
    streams = view.trace(view.embed(tokens)).residual
    first, last = (float(stream[:, -1].double().square().mean().sqrt()) for stream in (streams[0], streams[-1]))
    return last / first


def matching_scale(member: Member, target: float) -> float:
    """The factor on a fresh toy's embeddings at which its stream grows so many times; the nearest there is within limits.

    Growth falls as embeddings grow, since blocks read a normalized stream: halving the interval finds it.
    """
    low, high = (math.log(limit) for limit in SCALES)
    tokens = member.prompts(PROMPTS)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if growth(member.scaled(math.exp(middle)), tokens) > target:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


SAID = {
    "sensitivity": "||J_j||_F / sqrt(d)",
    "elasticity": "||J_j||_F / sqrt(d) * rms(x) / rms(h)",
    "alpha": "mean weight on the position over the queries from it on [Gu], mean over blocks and heads",
    "sink_rate": "share of heads with alpha > 0.3",
    "leakage_total": "leakage of the early band, log form, mean over blocks and heads",
    "leakage_share": "share of each source in it",
    "removed": "fraction of its residual component that the swap at position 0 removes",
    "reacts": "attention to keys >= 1 changed by the swap at position 0, total variation, mean over blocks and heads",
}


def _described(name: str, of: str) -> dict[str, str]:
    if name.endswith(ENDS[1:]):
        name, _, end = name.rpartition("_")
        of = f"{of}, {end} end of the 95 % interval"
    if name == "swapped":
        name, of = "elasticity", f"{of}, position 0 swapped, geometric mean over prompts"
    return {"long_name": f"{SAID[name]}, {of}", "units": "nat^2" if name == "leakage_total" else "1"}


def _filled(sizes: Sequence[int], values: Mapping[tuple[int, ...], np.ndarray], dtype: Any) -> np.ndarray:
    """Values by their place in an array [*sizes, ...]; NaN where there is none, and behind shorter ones."""
    longest = np.max([value.shape for value in values.values()], axis=0).astype(int)
    found = np.full((*sizes, *longest), np.nan, dtype)
    for place, value in values.items():
        found[(*place, *map(slice, value.shape))] = value
    return found


def _laid_out(
    rows: Mapping[tuple[int, ...], Row], sizes: Sequence[int], dims: Mapping[str, tuple[str, ...]], of: str
) -> Variables:
    """The variables of rows by their place, in the order of `dims`, which holds the dimensions of each."""
    found: Variables = {}
    for name, own in dims.items():
        values = {place: row[name] for place, row in rows.items()}
        exact = of == "toys" and name not in (*CURVES, "swapped")
        found[name] = own, _filled(sizes, values, np.float64 if exact else np.float32), _described(name, of)
    return found


def _of_model(
    model: View,
    portraits: Mapping[tuple[str, int], xr.Dataset],
    kernels: Mapping[tuple[str, int], np.ndarray],
    seeds: int,
) -> Variables:
    one, at, sizes = portraits["pretrained", 0], ("state", "seed"), (len(STATES), seeds)
    numbers = [f"{name}{end}" for name in SCALARS for end in ENDS if f"{name}{end}" in one]
    dims = {name: (*at, "prompt", "position") for name in ("sensitivity", *CURVES)} | {"swapped": (*at, "position")}
    dims |= {name: (*at, "source") if "share" in name else at for name in numbers}
    rows = {
        (STATES.index(state), n): {"swapped": typical(ds["elasticity_swapped"].values)}
        | {name: ds[name].values for name in dims if name != "swapped"}
        for (state, n), ds in portraits.items()
    }
    found = {f"model_{name}": variable for name, variable in _laid_out(rows, sizes, dims, "the model").items()}
    found["model_uniform"] = (("position",), one["uniform"].values, _described("alpha", "uniform attention"))
    if kernels:
        values = {(STATES.index(state), n): value for (state, n), value in kernels.items()}
        said = {"long_name": "second-moment kernel, measured patterns, score path", "units": "1"}
        found["theory_kernel"] = ((*at, "prompt", "position"), _filled(sizes, values, np.float32), said)
    curves, alphas = np.full((len(STATES), one.sizes["position"]), np.nan, np.float32), np.full(len(STATES), np.nan)
    for n, state in enumerate(STATES):
        means = [mean_profile(ds["sensitivity"].values).mean for (of, _), ds in portraits.items() if of == state]
        mean = np.sqrt(np.mean(np.square(means), 0))
        if np.count_nonzero(mean) >= SHORTEST:
            fit = fit_alpha(mean, model.spec.blocks, window=model.spec.windows)
            curves[n], alphas[n] = fit.curve, fit.alpha
    found["theory_cesaro"] = (("state", "position"), curves, {"long_name": "N^L, fitted", "units": "1"})
    found["theory_alpha"] = (("state",), alphas, {"long_name": "alpha of N^L", "units": "1"})
    return found


def _of_runs(seeds: Sequence[int], found: Sequence[xr.Dataset]) -> dict[str, np.ndarray]:
    """What portraits of toys say together: curves of every seed, numbers with their intervals over seeds."""

    def stack(name: str, number: int) -> np.ndarray:
        return np.stack([ds[name].values for n, ds in zip(seeds, found, strict=True) if n == number])

    numbers = sorted(set(seeds))
    row = {name: np.stack([stack(name, number).mean(0) for number in numbers]) for name in ("alpha", "sink_rate")}
    each = [stack("elasticity", number).swapaxes(0, 1) for number in numbers]  # prompt, run, point
    row["elasticity"] = np.stack([np.stack([typical(prompt) for prompt in one]) for one in each])
    row["swapped"] = np.stack([typical(stack("elasticity_swapped", number)) for number in numbers])
    streams = np.array([[float(ds[name]) for name in ("residual", "residual_swapped")] for ds in found])
    for name, estimate, values in (
        *((name, _mean, np.array([ds[name].values for ds in found])) for name in ("leakage_total", "reacts")),
        ("removed", _removed, streams),
        ("leakage_share", _shares, np.array([ds["leakage_source"].values for ds in found])),
    ):
        row |= dict(zip((f"{name}{end}" for end in ENDS), over_seeds(estimate, values, seeds), strict=True))
    return row


def _of_toys(
    variants: Sequence[str], runs: Mapping[tuple[str, str], Row], uniform: Mapping[str, np.ndarray]
) -> Variables:
    at, sizes = ("variant", "training"), (len(variants), len(TRAININGS))
    dims = {name: (*at, "toy_seed", "toy_prompt", "point") for name in CURVES} | {"swapped": (*at, "toy_seed", "point")}
    dims |= {f"{name}{end}": (*at, "source") if "share" in name else at for name in SCALARS for end in ENDS}
    rows = {(variants.index(variant), TRAININGS.index(training)): row for (variant, training), row in runs.items()}
    found = {f"toy_{name}": variable for name, variable in _laid_out(rows, sizes, dims, "toys").items()}
    values = np.stack([uniform[variant] for variant in variants]).astype(np.float64)
    found["toy_uniform"] = (("variant", "point"), values, _described("alpha", "uniform attention under toys' masks"))
    for name, said, units in (
        ("loss", "loss at the end of training", "nat"),
        ("accuracy", "accuracy on unseen sequences", "1"),
        ("target", "position asked for", "1"),
    ):
        each = {place: row[name] for place, row in rows.items() if name in row}
        attrs = {"long_name": said, "units": units}
        found[f"toy_{name}"] = ((*at, "member"), _filled(sizes, each, np.float64), attrs)
    return found


def over_seeds(
    estimate: Callable[[np.ndarray], Any], values: np.ndarray, seeds: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`jackknife` over seeds of an estimate from members [member, ...]; those that are not finite do not count."""
    known = np.isfinite(values).reshape(len(values), -1).all(1)
    if not known.any():
        nothing = np.full(values.shape[1:], np.nan) if estimate is _shares else np.array(np.nan)
        return nothing, nothing, nothing
    return jackknife(estimate, values[known], np.asarray(seeds)[known])


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _removed(streams: np.ndarray) -> float:
    """Of residual components [member, before and after]: the fraction that is gone of their sum."""
    sums = streams.sum(0, keepdims=True)
    return float(removed(sums[:, :1], sums[:, 1:])[0][0])


def _shares(parts: np.ndarray) -> np.ndarray:
    """Of parts [member, source]: each source's share of the sum over members; a single toy's may be next to nothing."""
    whole = parts.sum()
    return parts.sum(0) / whole if whole > 0 else np.full(parts.shape[1], np.nan)
