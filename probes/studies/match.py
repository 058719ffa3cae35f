"""The study behind `headwater match`: a model, the theory of it, and toys of the same architecture, through the same probes.

One result per model. Its dimensions:

- `state`: "init" (fresh weights, `seed` of them) and "pretrained" (seed 0 alone) of the model; `prompt`, with its `document`
  where there are any; `position`, with `fraction` = j / (T - 1).
- `variant`: "matched", and toys that lack one ingredient ("no residual", "no causal mask", "no positions", "no window");
  `training`: "init", "grown", "retrieval", "in-context"; `toy_seed`; `toy_prompt`; `point`, a toy's
  positions, with `point_fraction`.
  "grown" are fresh matched toys whose embeddings are scaled so that the stream grows through the blocks as it does in the
  fresh model (`toy_scale`, the factor): how much branches weigh against the stream decides the shape at birth.
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
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ..data.prompts import FirstToken
from ..errors import InputError
from ..measures.agreement import BOOTSTRAP, PROMPTS, fractions, portrait
from ..measures.bos_swap import removed
from ..measures.leakage import LEAST_PROMPTS, SOURCES
from ..models.initialization import CONFIG, Rule, check_rule
from ..models.load import Backend, DType
from ..models.view import Spec, View
from ..results.curves import mean_profile
from ..results.dataset import dataset, provenance
from ..results.profiles import typical
from ..results.statistics import jackknife
from ..results.ushape import SHORTEST
from ..run.files import together
from ..run.progress import Advance
from ..theory.cesaro import fit_alpha
from ..theory.kernel import second_moment
from .runner import Loading, Study, Subject, Tell, Unit, run, write_results

NAME = "match"
STATES = ("init", "pretrained")
TRAININGS = ("init", "grown", "retrieval", "in-context")
TOY_PROMPTS = 64  # of leakage in toys; of theirs, like the model's, `compare.PROMPTS` for everything else
SCALARS = ("leakage_total", "removed", "reacts")
TOYS = ".unfinished-toys"
SCALES = (1e-3, 1e3)  # of a fresh toy's embeddings
HALVINGS = 16  # to a fifth of a thousandth of the factor


@runtime_checkable
class Member(Protocol):
    """One trained toy, as `toy.matching.Member`."""

    @property
    def view(self) -> View: ...

    @property
    def fresh(self) -> View: ...

    @property
    def prompts(self) -> Callable[[int], Tensor]: ...

    @property
    def seed(self) -> int: ...

    @property
    def target(self) -> int | None: ...

    @property
    def loss(self) -> float: ...

    @property
    def accuracy(self) -> float: ...

    def scaled(self, factor: float) -> View: ...


@runtime_checkable
class Group(Protocol):
    """The toys of one variant and task, as `toy.matching.Group`."""

    @property
    def variant(self) -> str: ...

    @property
    def task(self) -> str: ...

    @property
    def members(self) -> Sequence[Member]: ...

    @property
    def key(self) -> str: ...


@runtime_checkable
class Maker(Protocol):
    """Who makes toys, as `toy.matching.Matching`."""

    @property
    def described(self) -> dict[str, Any]: ...

    def plan(self, spec: Spec, *, bos: bool, length: int, norm: Literal["rms", "layer"]) -> Any: ...

    def toys(self, plans: Sequence[Any], folder: Path, advance: Advance | None) -> Sequence[Sequence[Group]]: ...

    def finish(self, folder: Path) -> None: ...


def match(
    sources: Sequence[str],
    out: str | Path,
    maker: Maker,
    *,
    quick: bool = False,
    prompts: int = 128,
    length: int = 256,
    seeds: int = 2,
    initialization: Rule = CONFIG,
    bootstrap: int = BOOTSTRAP,
    text: str | None = None,
    dataset: str | None = None,
    split: str = "train",
    column: str = "text",
    chat: str | None = None,
    first: FirstToken | int = "auto",
    seed: int = 0,
    backend: Backend = "transformers",
    device: str = "auto",
    dtype: DType = "auto",
    advance: Advance | None = None,
    told: Callable[[str], object] | None = None,
) -> dict[str, xr.Dataset]:
    """Measure every model beside toys that match it; write results, figure and table, return the results by model name.

    Writes `match.nc` for one model or `match-MODEL.nc` for each of several, `match.png`, `match.svg` and `match.md`, all of
    it at the end. What was trained and measured before an interruption is taken up again.

    Args:
        sources: models, as `probes.load` takes them.
        out: folder.
        maker: of toys, a `Maker`.
        quick: marks the results of a small setting.
        prompts: windows of text for leakage; the first 8 of them for everything else. The arguments up to `seed` are those
            of `probes.prompts`.
        length: positions per prompt.
        seeds: fresh models per model.
        initialization: what their weights are drawn from, as in `probes.fresh`.
        bootstrap: resamples for the intervals of a model's leakage and of troughs.
        backend: who runs the models; as `device` and `dtype`, see `probes.load`.
        advance: hears (what is running, done, in all).
        told: hears in one line which models are done already.

    Raises:
        InputError: bad input, found before anything is trained, or unfinished work with other settings in `out`.
    """
    out = Path(out)
    if seeds < 1:
        raise InputError(f"seeds={seeds} leaves no fresh model; give at least 1")
    check_rule(initialization)
    if bootstrap < 0:
        raise InputError(f"bootstrap={bootstrap} is no number of resamples; give 0 or more")
    if prompts < LEAST_PROMPTS:
        raise InputError(f"prompts={prompts} are too few for leakage; give at least {LEAST_PROMPTS}")
    if length < SHORTEST:
        raise InputError(f"length={length} leaves no middle to compare with; give at least {SHORTEST}")
    source = dict(text=text, dataset=dataset, split=split, column=column, chat=chat, first=first, seed=seed)
    options = dict(prompts=prompts, length=length, seeds=seeds, initialization=initialization, bootstrap=bootstrap)
    options |= {**source, "toys": maker.described, "quick": quick}
    plans: dict[str, Any] = {}
    trained: dict[str, Sequence[Group]] = {}
    cache: dict[str, tuple[xr.Dataset, ...]] = {}
    judged: dict[str, xr.Dataset] = {}

    def check(model: View, name: str, tokens: Tensor) -> None:
        if len(tokens) < LEAST_PROMPTS or tokens.shape[1] < SHORTEST:
            least = f"{LEAST_PROMPTS} of {SHORTEST}"
            raise InputError(f"{len(tokens)} prompts of {tokens.shape[1]} tokens are too few; give at least {least}")
        plans[name] = planned(model, tokens, maker)

    def prepare(models: Sequence[Subject]) -> None:
        groups = maker.toys([plans[one.name] for one in models], out / TOYS, advance)
        trained.update((one.name, own) for one, own in zip(models, groups, strict=True))

    def measure(model: View, one: Subject, tell: Tell) -> xr.Dataset:
        sizes: dict[str, Any] = {"seeds": seeds, "initialization": initialization, "bootstrap": bootstrap, "seed": seed}
        given: dict[str, Any] = {"documents": one.drawn.documents, "cache": cache, "progress": tell}
        made = measured(model, one.tokens, trained[one.name], **sizes, **given)
        notes, toys = json.dumps(list(plans[one.name].notes)), json.dumps(maker.described)
        return made.assign_attrs(notes=notes, toys=toys, quick=int(quick))

    study = Study(
        NAME,
        lambda model, name, tokens: [Unit(name, options, measure)],
        lambda results: judged.update(write(results, out, bootstrap=bootstrap)),
        check=check,
        prepare=prepare,
        files=[f"{NAME}.md"],
    )
    asked = {"n": prompts, "length": length, **source}
    run(study, sources, out, asked, Loading(backend, device, dtype), advance=advance, told=told)
    maker.finish(out / TOYS)
    return judged


def write(results: Mapping[str, xr.Dataset], out: Path, *, bootstrap: int = BOOTSTRAP) -> dict[str, xr.Dataset]:
    """Write results with what `judged` adds, figure and table; returns them so."""
    from ..figures.match import match_figure
    from ..measures.matched import judged
    from ..results.tables import write_report
    from .matched import match_report

    whole = {name: judged(ds, bootstrap=bootstrap) for name, ds in results.items()}
    with together():
        write_results(whole, out, NAME, match_figure)
        write_report(match_report(whole), out / f"{NAME}.md")
    return whole


def planned(model: View, tokens: Tensor, maker: Maker) -> Any:
    """The toys that match a model on these prompts; a first token that all prompts share counts as BOS."""
    parts = model.parts(0)
    norm = "rms" if parts is None else parts.attention_norm.kind
    bos = len(tokens) > 1 and bool((tokens[:, 0] == tokens[0, 0]).all())
    return maker.plan(model.spec, bos=bos, length=tokens.shape[1], norm=norm)


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
    """A model and its toys, measured; the layout is the module's text."""
    cache = {} if cache is None else cache
    total = float(1 + seeds + sum(len(group.members) / 10 for group in groups))
    done = 0.0

    def step(more: float) -> None:
        nonlocal done
        done += more
        progress(done, total)

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
    variables = _of_model(model, portraits, kernels, seeds)

    fresh: dict[tuple[str, str], list[tuple[int, xr.Dataset]]] = {}
    scales: list[float] = []
    toys: dict[tuple[str, str], list[xr.Dataset]] = {}
    for group in groups:
        if group.key not in cache:
            found = []
            for member in group.members:
                found.append(
                    portrait(
                        member.view,
                        member.prompts(TOY_PROMPTS),
                        stationary=group.task == "retrieval",
                        bootstrap=0,
                        seed=seed,
                    )
                )
                step(0.1)
            cache[group.key] = tuple(found)
        else:
            step(0.1 * len(group.members))
        toys[group.variant, group.task] = list(cache[group.key])
        if group.task == "retrieval":
            fresh_key = f"fresh {group.key}"
            newborn = {member.seed: member for member in group.members}
            if fresh_key not in cache:
                cache[fresh_key] = tuple(
                    portrait(member.fresh, member.prompts(TOY_PROMPTS), bootstrap=0, seed=seed)
                    for member in newborn.values()
                )
            fresh[group.variant, "init"] = list(zip(newborn, cache[fresh_key], strict=True))
            if group.variant == groups[0].variant:
                target = float(np.mean([growth(views["init", n], few) for n in range(seeds)]))
                for member in newborn.values():
                    factor = matching_scale(member, target)
                    scales.append(factor)
                    drawn = portrait(member.scaled(factor), member.prompts(TOY_PROMPTS), bootstrap=0, seed=seed)
                    fresh.setdefault((group.variant, "grown"), []).append((member.seed, drawn))
    variables |= _of_toys(groups, fresh, toys)
    said = {"long_name": "factor on the embeddings of toys that grow as the model does, geometric mean", "units": "1"}
    variables["toy_scale"] = ((), np.exp(np.log(scales).mean()), said)
    points = next(iter(toys.values()))[0].sizes["position"]
    variants = list(dict.fromkeys(group.variant for group in groups))
    return dataset(
        variables,
        tokens=None,
        coords={
            "state": list(STATES),
            "seed": range(seeds),
            "variant": variants,
            "training": list(TRAININGS),
            "source": list(SOURCES),
            "position": range(tokens.shape[1]),
            "fraction": (("position",), fractions(tokens.shape[1])),
            "point": range(points),
            "point_fraction": (("point",), fractions(points)),
        }
        | ({} if documents is None else {"document": (("prompt",), list(documents[:PROMPTS]))}),
        attrs=provenance(
            model, tokens, prompts=len(tokens), length=tokens.shape[1], seeds=seeds, bootstrap=bootstrap, seed=seed
        )
        | {
            "measurement": NAME,
            "initialization": views["init", 0].identity.initialization or "",
            "few_prompts": len(few),
            "band": portraits["pretrained", 0].attrs["band"],
            "lags": portraits["pretrained", 0].attrs["lags"],
            "refused": portraits["pretrained", 0].attrs["refused"],
            "toy_band": toys[variants[0], "retrieval"][0].attrs["band"],
            "toy_lags": toys[variants[0], "retrieval"][0].attrs["lags"],
            "toy_refused": json.dumps(
                {f"{v}, {t}": json.loads(str(many[0].attrs["refused"])) for (v, t), many in toys.items()}
            ),
        },
    )


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
    return {"long_name": f"{SAID[name]}, {of}", "units": "nat^2" if name == "leakage_total" else "1"}


def _of_model(
    model: View,
    portraits: Mapping[tuple[str, int], xr.Dataset],
    kernels: Mapping[tuple[str, int], np.ndarray],
    seeds: int,
) -> dict[str, tuple[Any, ...]]:
    variables: dict[str, tuple[Any, ...]] = {}
    one = portraits["pretrained", 0]

    def gathered(values: Mapping[tuple[str, int], np.ndarray]) -> np.ndarray:
        found = np.full((len(STATES), seeds, *next(iter(values.values())).shape), np.nan, np.float32)
        for (state, n), value in values.items():
            found[STATES.index(state), n] = value
        return found

    for name in ("sensitivity", "elasticity", "alpha", "sink_rate"):
        values = gathered({place: ds[name].values for place, ds in portraits.items()})
        variables[f"model_{name}"] = (("state", "seed", "prompt", "position"), values, _described(name, "the model"))
    swapped = {place: typical(ds["elasticity_swapped"].values) for place, ds in portraits.items()}
    variables["model_swapped"] = (
        ("state", "seed", "position"),
        gathered(swapped),
        _described("elasticity", "the model, position 0 swapped, geometric mean over prompts"),
    )
    variables["model_uniform"] = (("position",), one["uniform"].values, _described("alpha", "uniform attention"))
    for name in (*SCALARS, "leakage_share"):
        dims = ("state", "seed", "source") if name == "leakage_share" else ("state", "seed")
        for end in ("", "_low", "_high"):
            if f"{name}{end}" in one:
                values = gathered({place: ds[f"{name}{end}"].values for place, ds in portraits.items()})
                variables[f"model_{name}{end}"] = (dims, values, _described(name, f"the model{_end(end)}"))
    if kernels:
        variables["theory_kernel"] = (
            ("state", "seed", "prompt", "position"),
            gathered(kernels),
            {"long_name": "second-moment kernel, measured patterns, score path", "units": "1"},
        )
    length = one.sizes["position"]
    curves, alphas = np.full((len(STATES), length), np.nan, np.float32), np.full(len(STATES), np.nan)
    for n, state in enumerate(STATES):
        means = [mean_profile(ds["sensitivity"].values).mean for (of, _), ds in portraits.items() if of == state]
        mean = np.sqrt(np.mean(np.square(means), 0))
        if np.count_nonzero(mean) >= SHORTEST:
            fit = fit_alpha(mean, model.spec.blocks, window=model.spec.windows)
            curves[n], alphas[n] = fit.curve, fit.alpha
    variables["theory_cesaro"] = (("state", "position"), curves, {"long_name": "N^L, fitted", "units": "1"})
    variables["theory_alpha"] = (("state",), alphas, {"long_name": "alpha of N^L", "units": "1"})
    return variables


def _of_toys(
    groups: Sequence[Group],
    fresh: Mapping[tuple[str, str], Sequence[tuple[int, xr.Dataset]]],
    toys: Mapping[tuple[str, str], Sequence[xr.Dataset]],
) -> dict[str, tuple[Any, ...]]:
    variants = list(dict.fromkeys(group.variant for group in groups))
    most = max(len(group.members) for group in groups)
    seeds = max(len({member.seed for member in group.members}) for group in groups)
    any_one = next(iter(toys.values()))[0]
    size = (len(variants), len(TRAININGS))
    sizes = (any_one.sizes["prompt"], any_one.sizes["position"])
    curves = {
        name: np.full((*size, seeds, *sizes), np.nan, np.float32) for name in ("elasticity", "alpha", "sink_rate")
    }
    swapped = np.full((*size, seeds, sizes[1]), np.nan, np.float32)
    uniform = np.full((len(variants), sizes[1]), np.nan)
    scalars = {
        f"{name}{end}": np.full((*size, *((len(SOURCES),) if name == "leakage_share" else ())), np.nan)
        for name in (*SCALARS, "leakage_share")
        for end in ("", "_low", "_high")
    }
    singles = {name: np.full((*size, most), np.nan) for name in ("loss", "accuracy", "target")}

    def put(variant: str, training: str, numbers: Sequence[int], found: Sequence[xr.Dataset]) -> None:
        at = (variants.index(variant), TRAININGS.index(training))
        order = sorted(set(numbers))
        for place, number in enumerate(order):
            own = [ds for n, ds in zip(numbers, found, strict=True) if n == number]
            together = {name: np.stack([ds[name].values for ds in own]) for name in (*curves, "elasticity_swapped")}
            by_prompt = together["elasticity"].swapaxes(0, 1)
            curves["elasticity"][(*at, place)] = np.stack([typical(one) for one in by_prompt])
            swapped[(*at, place)] = typical(together["elasticity_swapped"])
            for name in ("alpha", "sink_rate"):
                curves[name][(*at, place)] = together[name].mean(0)
        uniform[at[0]] = found[0]["uniform"].values
        single = {name: np.array([ds[name].values for ds in found]) for name in ("leakage_total", "reacts")}
        streams = np.array([[float(ds[name]) for name in ("residual", "residual_swapped")] for ds in found])
        parts = np.array([ds["leakage_source"].values for ds in found])
        for name, estimate, values in (
            *((name, _mean, values) for name, values in single.items()),
            ("removed", _removed, streams),
            ("leakage_share", _shares, parts),
        ):
            for end, value in zip(("", "_low", "_high"), over_seeds(estimate, values, numbers), strict=True):
                scalars[f"{name}{end}"][at] = value

    for (variant, training), newborn in fresh.items():
        put(variant, training, [number for number, _ in newborn], [ds for _, ds in newborn])
    for group in groups:
        put(group.variant, group.task, [member.seed for member in group.members], toys[group.variant, group.task])
        at = (variants.index(group.variant), TRAININGS.index(group.task))
        for n, member in enumerate(group.members):
            singles["loss"][(*at, n)], singles["accuracy"][(*at, n)] = member.loss, member.accuracy
            singles["target"][(*at, n)] = np.nan if member.target is None else member.target
    dims = ("variant", "training")
    variables: dict[str, tuple[Any, ...]] = {
        f"toy_{name}": ((*dims, "toy_seed", "toy_prompt", "point"), values, _described(name, "toys"))
        for name, values in curves.items()
    }
    variables["toy_swapped"] = (
        (*dims, "toy_seed", "point"),
        swapped,
        _described("elasticity", "toys, position 0 swapped, geometric mean over prompts"),
    )
    variables["toy_uniform"] = (
        ("variant", "point"),
        uniform,
        _described("alpha", "uniform attention under toys' masks"),
    )
    for name, values in scalars.items():
        bare = name.removesuffix("_low").removesuffix("_high")
        of = (*dims, "source") if bare == "leakage_share" else dims
        variables[f"toy_{name}"] = (of, values, _described(bare, f"toys{_end(name.removeprefix(bare))}"))
    for name, said, units in (
        ("loss", "loss at the end of training", "nat"),
        ("accuracy", "accuracy on unseen sequences", "1"),
        ("target", "position asked for", "1"),
    ):
        variables[f"toy_{name}"] = ((*dims, "member"), singles[name], {"long_name": said, "units": units})
    return variables


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


def _end(end: str) -> str:
    return f", {end[1:]} end of the 95 % interval" if end else ""
