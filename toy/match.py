"""`headwater match`: a model, the theory of it, and toys of the same architecture, through the same probes.

One result per model. Its dimensions:

- `state`: "init" (fresh weights, `seed` of them) and "pretrained" (seed 0 alone) of the model; `prompt`, with its `document`
  where there are any; `position`, with `fraction` = j / (T - 1).
- `variant`: "matched", and toys that lack one ingredient ("no residual", "no causal mask", "no positions", "no window");
  `training`: "init", "retrieval", "in-context"; `toy_seed`; `toy_prompt`; `point`, a toy's positions: toys of a training may
  have fewer than those of another, and NaN behind them.
- `member`: single toys of a variant and training, one for each seed and position asked for, seed by seed.

Curves are kept sample by sample, `model_...` [state, seed, prompt, position] and `toy_...` [variant, training, toy_seed,
toy_prompt, point] (over the positions asked for the geometric mean); with something else at position 0 as geometric means
over prompts, `..._swapped`. Numbers of leakage and of the swap have `_low` and `_high`, for the model over documents (of
`reacts` none), for toys over runs, which are seeds. `theory_kernel` is the second-moment kernel with measured patterns and
score path, `theory_cesaro` N^L with its fitted `theory_alpha`. `match_result.judged` adds agreements and shapes. NaN is
where there is nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes import options
from probes.errors import InputError
from probes.figures.match import CAPTION, match_figure
from probes.measure import Headline, Measure, Unit
from probes.measures.agreement import BOOTSTRAP, PROMPTS, fractions, portrait
from probes.measures.bos_swap import removed
from probes.measures.leakage import LEAST_PROMPTS, SOURCES
from probes.measures.match_result import CURVES, ENDS, STATES, TRAININGS, judged
from probes.models.initialization import CONFIG, Rule
from probes.models.strength import frequencies, strength
from probes.models.view import View
from probes.results.curves import ESTIMATE, rms_profile
from probes.results.dataset import dataset, provenance
from probes.results.profiles import typical
from probes.results.statistics import jackknife
from probes.results.ushape import SHORTEST
from probes.run.precision import double
from probes.run.progress import Progress, Tally, part
from probes.run.store import Store
from probes.studies.match_report import sentences, tables
from probes.theory.cesaro import fit_alpha
from probes.theory.kernel import second_moment

from .matching import QUICK, Matching, Member, Plan, Settings

PRODUCTS = 16  # of a sketch, per prompt: over 8 prompts within 2 %
TOY_PROMPTS = 64  # of leakage in toys; of theirs, like the model's, `agreement.PROMPTS` for everything else
MEASURED = ("elasticity", "alpha", "sink_rate")  # curves of the model and of toys
SCALARS = ("leakage_total", "removed", "reacts", "leakage_share")
TOYS = "toys"  # folder of unfinished training
Row: TypeAlias = Mapping[str, Any]  # what is known of one model, or of the toys of a variant and training
Variables: TypeAlias = dict[str, tuple[Any, ...]]

SAID = {
    "sensitivity": "||J_j||_F / sqrt(d)",
    "elasticity": "||J_j||_F / sqrt(d) * rms(x) / rms(h)",
    "swapped": "||J_j||_F / sqrt(d) * rms(x) / rms(h), position 0 swapped, geometric mean over prompts",
    "alpha": "mean weight on the position over the queries from it on [Gu], mean over blocks and heads",
    "sink_rate": "share of heads with alpha > 0.3",
    "uniform": "alpha of uniform attention under the mask",
    "leakage_total": "leakage of the early band, log form, mean over blocks and heads",
    "leakage_share": "share of each source in it",
    "removed": "fraction of its residual component that the swap at position 0 removes",
    "reacts": "attention to keys >= 1 changed by the swap at position 0, total variation, mean over blocks and heads",
    "loss": "loss at the end of training",
    "accuracy": "accuracy on unseen sequences",
    "log_p": "log p of the right answer on unseen sequences, mean",
    "target": "position asked for",
    "growth": "rms of the last stream over that of the first, fresh weights",
}
UNITS = {"leakage_total": "nat^2", "loss": "nat", "log_p": "nat"}


@dataclass(frozen=True)
class Options(options.Options):
    """Train toys of a model's architecture and compare both: profiles, sinks, leakage, position 0 swapped.

    Writes match.nc, match.md and the chart, and prints how far the model's profile agrees with those of the toys and of
    theory. The tables say which ingredient (residual stream, mask, positional encoding, window) makes which feature of it.
    If interrupted, the same command resumes.

    Examples:
      headwater match tiny-llama --quick
      headwater match tiny-llama tiny-mistral-window --out runs/two
      headwater match smollm2-135m --quick
      headwater match tiny-qwen2 --with seeds=3 --with positions=65
      headwater match ./checkpoint --length 512 --device cuda
    """

    quick: bool = options.flag("--quick", "Small toys, few steps, no ablations: a minute or two, marked as quick.")
    seeds: int = options.option("Fresh models per model.", 2, min=1, max=options.MOST_SEEDS)
    initialization: str = options.initialization()
    bootstrap: int = options.option("Resamples for intervals.", BOOTSTRAP, min=0, max=options.MOST_RESAMPLES)
    changed: list[str] | None = options.option(
        "Change a setting of the toys (`toy.matching.Settings`); may be repeated.",
        None,
        "--with",
        metavar="FIELD=VALUE",
    )

    def values(self) -> dict[str, Any]:
        """As `match` takes them."""
        from .experiments.experiment import changed

        settings = changed(QUICK if self.quick else Settings(), self.changed or (), "match")
        return {name: value for name, value in vars(self).items() if name != "changed"} | {"settings": settings}


def match(
    model: View,
    tokens: Tensor,
    *,
    settings: Settings | None = None,
    seeds: int = 2,
    initialization: Rule = CONFIG,
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Train toys that match a model, and measure both.

    Args:
        model: any view of a language model; toys are trained on its device.
        tokens: prompts [prompt, position]; all are for leakage, the first 8 for everything else.
        settings: of the toys; `Settings()` if not given.
        seeds: fresh models.
        initialization: what their weights are drawn from, as in `probes.fresh`.
        bootstrap: resamples for the intervals of the model's leakage and of troughs.
        seed: of everything that is drawn.
        documents: what each prompt is a window of.
        pieces: where unfinished training is kept, beside the folder of this store.
        progress: called with (done, in all).

    Returns:
        A dataset; the module's text says of what.

    Raises:
        InputError: options that cannot be used, found before anything is trained.
    """
    for name, value, least in (("seeds", seeds, 1), ("bootstrap", bootstrap, 0)):
        if value < least:
            raise InputError(f"{name}={value} is too few; give at least {least}")
    if len(tokens) < LEAST_PROMPTS or tokens.shape[1] < SHORTEST:
        least = f"prompts={LEAST_PROMPTS} of length={SHORTEST}"
        raise InputError(f"prompts={len(tokens)} of length={tokens.shape[1]} are too few; give at least {least}")
    maker = Matching(settings or Settings(), str(model.device))
    plan = planned(model, tokens, maker, seed=seed, initialization=initialization)
    folder = None if pieces is None or pieces.folder is None else pieces.folder.parent / TOYS
    half = part(progress, 0.0, 0.5)
    groups = maker.toys(plan, folder, None if half is None else lambda label, done, total: half(done, total))
    fresh = [model.reinitialized(n, initialization=initialization) for n in range(seeds)]
    views = {("init", n): view for n, view in enumerate(fresh)} | {("pretrained", 0): model}
    members = {(group.variant, group.training): group.members for group in groups}
    steps = Tally(part(progress, 0.5, 1.0), len(views) + sum(map(len, members.values())) / 10)
    more = {"bootstrap": bootstrap, "seed": seed, "documents": documents}
    found, attrs = of_model(model, tokens, views, steps, **more)
    of_toys = {of: [_portrait(one, of[1], tokens, seed, steps) for one in toys] for of, toys in members.items()}
    variants = list(dict.fromkeys(variant for variant, _ in members))
    found |= of_variants(variants, members, of_toys)
    first, born = of_toys[variants[0], "retrieval"][0], members[variants[0], "init"]
    few = tokens[:PROMPTS]
    for whose, newborn in (("model", fresh), ("toy", [one.view for one in born])):
        grown = [math.log(growth(view, few[:, : view.spec.max_length])) for view in newborn]
        found[f"{whose}_growth"] = ((), np.exp(np.mean(grown)), _described("growth", whose))
    coords: dict[str, Any] = {
        "state": list(STATES),
        "seed": range(seeds),
        "variant": variants,
        "training": list(TRAININGS),
        "source": list(SOURCES),
        "position": range(tokens.shape[1]),
        "fraction": (("position",), fractions(tokens.shape[1])),
        "point": range(found["toy_uniform"][1].shape[-1]),
    }
    coords |= {} if documents is None else {"document": (("prompt",), list(documents[:PROMPTS]))}
    given = {"prompts": len(tokens), "length": tokens.shape[1], "seeds": seeds, "bootstrap": bootstrap, "seed": seed}
    refused = {f"{v}, {t}": json.loads(str(many[0].attrs["refused"])) for (v, t), many in of_toys.items()}
    attrs |= {
        "initialization": fresh[0].identity.initialization or "",
        "toys": json.dumps(maker.settings.described()),
        "notes": json.dumps(list(plan.notes)),
        **{f"toy_{name}": first.attrs[name] for name in ("band", "lags")},
        "toy_refused": json.dumps(refused),
        "toy_blocks": json.dumps({training: toys[0].view.spec.blocks for (_, training), toys in members.items()}),
    }
    ds = dataset(found, coords=coords, attrs=provenance(model, tokens, **given) | attrs)
    return judged(ds, bootstrap=bootstrap)


def planned(model: View, tokens: Tensor, maker: Matching, *, seed: int = 0, initialization: Rule = CONFIG) -> Plan:
    """The toys that match a model on these prompts; a first token that all prompts share counts as BOS."""
    parts, few = model.parts(0), tokens[:PROMPTS]
    own = None if parts is None else parts.attention_norm or parts.post_attention_norm
    bos = len(tokens) > 1 and bool((tokens[:, 0] == tokens[0, 0]).all())
    strengths = strength(model.reinitialized(seed, initialization=initialization), few)
    matching: dict[str, Any] = {"strengths": strengths, "frequencies": frequencies(model, few)}
    return maker.plan(model.spec, bos=bos, length=tokens.shape[1], norm="rms" if own is None else own.kind, **matching)


def _portrait(member: Member, training: str, tokens: Tensor, seed: int, steps: Tally) -> xr.Dataset:
    view, read = member.view, member.prompts
    own = tokens[:TOY_PROMPTS, : view.spec.max_length] if read is None else read(TOY_PROMPTS)
    found = portrait(view, own, stationary=training != "in-context", bootstrap=0, seed=seed)
    steps(0.1)
    return found


# -- how it is laid out: samples by their place


def _described(name: str, of: str) -> dict[str, str]:
    bare, end = next((name.removesuffix(end), end) for end in reversed(ENDS) if name.endswith(end))
    more = f", {end[1:]} end of the 95 % interval" if end else ""
    return {"long_name": f"{SAID[bare]}, {of}{more}", "units": UNITS.get(bare, "1")}


def _laid_out(
    rows: Mapping[tuple[int, ...], Row], sizes: Sequence[int], dims: Mapping[str, tuple[str, ...]], of: str
) -> Variables:
    """The variables of rows by their place, in the order of `dims`; NaN where there is none, and behind shorter ones."""
    found: Variables = {}
    for name, own in dims.items():
        values = {place: np.asarray(row[name]) for place, row in rows.items() if name in row}
        longest = np.max([value.shape for value in values.values()], axis=0).astype(int)
        exact = of == "toys" and name not in (*MEASURED, "swapped")
        array = np.full((*sizes, *longest), np.nan, np.float64 if exact else np.float32)
        for place, value in values.items():
            array[(*place, *map(slice, value.shape))] = value
        found[name] = own, array, _described(name, of)
    return found


def of_model(
    model: View, tokens: Tensor, views: Mapping[tuple[str, int], View], steps: Tally, **more: Any
) -> tuple[Variables, dict[str, Any]]:
    """(variables, attributes) of a model in its states, and of theory."""
    rows: dict[tuple[int, ...], dict[str, np.ndarray]] = {}
    squares: dict[str, list[np.ndarray]] = {state: [] for state in STATES}
    apart = all(model.parts(layer) is not None for layer in range(model.spec.blocks))
    ds = xr.Dataset()
    for (state, n), view in views.items():
        ds = portrait(view, tokens, products=PRODUCTS, **more)
        row = {str(name): ds[name].values for name in ds} | {"swapped": typical(ds["elasticity_swapped"].values)}
        squares[state].append(rms_profile(ds["sensitivity"].values).mean ** 2)
        if apart:
            kernel = second_moment(view, tokens[:PROMPTS], attention="measured", score_path=True)
            row["kernel"] = kernel["sensitivity"].values
        rows[STATES.index(state), n] = row
        steps(1.0)
    at, sizes = ("state", "seed"), (len(STATES), 1 + max(n for _, n in views))
    numbers = [f"{name}{end}" for name in SCALARS for end in ENDS if f"{name}{end}" in ds]
    dims = {name: (*at, "prompt", "position") for name in ("sensitivity", *MEASURED)} | {"swapped": (*at, "position")}
    dims |= {name: (*at, "source") if "share" in name else at for name in numbers}
    found = {f"model_{name}": variable for name, variable in _laid_out(rows, sizes, dims, "the model").items()}
    found["model_uniform"] = (("position",), ds["uniform"].values, _described("alpha", "uniform attention"))
    if apart:
        kernels = {place: {"sensitivity": row["kernel"]} for place, row in rows.items()}
        (_, array, _), *_ = _laid_out(kernels, sizes, {"sensitivity": ()}, "the model").values()
        said = {"long_name": "second-moment kernel, measured patterns, score path", "units": "1"}
        found["theory_kernel"] = ((*at, "prompt", "position"), array, said)
    curves, alphas = np.full((len(STATES), tokens.shape[1]), np.nan, np.float32), np.full(len(STATES), np.nan)
    for n, state in enumerate(STATES):
        mean = np.sqrt(np.mean(squares[state], 0))
        if np.count_nonzero(mean) >= SHORTEST:
            fit = fit_alpha(mean, model.spec.blocks, window=model.spec.windows)
            curves[n], alphas[n] = fit.curve, fit.alpha
    found["theory_cesaro"] = (("state", "position"), curves, {"long_name": "N^L, fitted", "units": "1"})
    found["theory_alpha"] = (("state",), alphas, {"long_name": "alpha of N^L", "units": "1"})
    attrs = {name: ds.attrs[name] for name in ("band", "lags", "refused")}
    return found, attrs | {"measurement": "match", "few_prompts": len(tokens[:PROMPTS]), "blocks": model.spec.blocks}


def of_variants(
    variants: Sequence[str],
    members: Mapping[tuple[str, str], Sequence[Member]],
    portraits: Mapping[tuple[str, str], Sequence[xr.Dataset]],
) -> Variables:
    """Variables of toys by variant and training."""
    at, sizes = ("variant", "training"), (len(variants), len(TRAININGS))
    dims = {name: (*at, "toy_seed", "toy_prompt", "point") for name in MEASURED} | {
        "swapped": (*at, "toy_seed", "point")
    }
    dims |= {"uniform": (*at, "point")}
    dims |= {f"{name}{end}": (*at, "source") if "share" in name else at for name in SCALARS for end in ENDS}
    dims |= {name: (*at, "member") for name in ("loss", "accuracy", "log_p", "target")}
    rows = {}
    for (variant, training), toys in members.items():
        row = of_runs([one.seed for one in toys], portraits[variant, training])
        if training != "init":
            for name in ("loss", "accuracy", "log_p", "target"):
                values = [getattr(one, name) for one in toys]
                row[name] = np.array([np.nan if value is None else value for value in values])
        rows[variants.index(variant), TRAININGS.index(training)] = row
    return {f"toy_{name}": variable for name, variable in _laid_out(rows, sizes, dims, "toys").items()}


def of_runs(seeds: Sequence[int], found: Sequence[xr.Dataset]) -> dict[str, np.ndarray]:
    """What portraits of toys say together: curves of every seed, numbers with their intervals over seeds."""

    def stack(name: str, number: int) -> np.ndarray:
        return np.stack([ds[name].values for n, ds in zip(seeds, found, strict=True) if n == number])

    numbers = sorted(set(seeds))
    row = {name: np.stack([stack(name, number).mean(0) for number in numbers]) for name in ("alpha", "sink_rate")}
    each = [stack("elasticity", number).swapaxes(0, 1) for number in numbers]  # prompt, run, point
    row["uniform"] = found[0]["uniform"].values
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


@torch.no_grad()
def growth(view: View, tokens: Tensor) -> float:
    """How many times larger (rms) the stream is after the last block than before the first, at the last position."""
    streams = view.trace(view.embed(tokens)).residual
    first, last = (float(double(stream[:, -1]).square().mean().sqrt()) for stream in (streams[0], streams[-1]))
    return last / first


# -- the measure


def _agreement(ds: xr.Dataset) -> xr.DataArray:
    """RMS log errors of the profile [estimate, state, other]."""
    errors = [ds[f"agreement_error{end}"].sel(curve=CURVES[0], drop=True) for end in ENDS]
    return xr.concat(errors, xr.Variable("estimate", list(ESTIMATE)))


def _units(values: Mapping[str, Any]) -> list[Unit]:
    """One, which is marked where its toys are those of the quick setting."""
    given = dict(values)
    return [Unit(attributes={"quick": int(given.pop("quick"))}, options=given)]


MEASURE = Measure(
    name="match",
    question="What of a model's sense of position do toys of its architecture share?",
    compute=match,
    options=Options,
    headlines=(Headline("RMS log error of the profile", _agreement, ratio=True, form=".2f"),),
    answer=lambda results: list(sentences(results)),
    tables=tables,
    chart=match_figure,
    caption=CAPTION,
    units=_units,
    defaults={"prompts": 64},
    without=("device_map", "max_memory", "offload_folder", "ablate", "ablate_how"),
)
