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
score path, `theory_cesaro` N^L with its fitted `theory_alpha`. `judged` adds agreements and shapes. NaN is where there is
nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes import options
from probes.errors import InputError
from probes.measure import Headline, Measure, Unit
from probes.measures.agreement import BOOTSTRAP, PROMPTS, fractions, portrait
from probes.measures.bos_swap import removed
from probes.measures.leakage.samples import LEAST_PROMPTS
from probes.models.initialization import CONFIG, Rule
from probes.models.strength import frequencies, strength
from probes.models.view import View
from probes.results.curves import ESTIMATE, rms_profile
from probes.results.dataset import attributes, provenance
from probes.results.profiles import typical
from probes.results.statistics import jackknife
from probes.results.ushape import SHORTEST
from probes.run.precision import double
from probes.run.progress import Progress, Tally, part
from probes.run.store import Store
from probes.theory.cesaro import fit_alpha
from probes.theory.kernel import second_moment

from .match_result import CURVES, ENDS, STATES, TRAININGS, judged
from .match_shown import CAPTION, chart, sentences, tables
from .matching import MATCHED, QUICK, Matching, Member, Plan, Settings, Training

PRODUCTS = 16  # of a sketch, per prompt: over 8 prompts within 2 %
TOY_PROMPTS = 64  # of leakage in toys; of theirs, like the model's, `agreement.PROMPTS` for everything else
SHARED = ("elasticity", "alpha", "sink_rate")  # curves of the model and of toys
SCALARS = tuple(f"{name}{end}" for name in ("leakage_total", "removed", "reacts", "leakage_share") for end in ENDS)
LEARNT = {
    "loss": ("loss at the end of training", "nat"),
    "accuracy": ("accuracy on unseen sequences", "1"),
    "log_p": ("log p of the right answer on unseen sequences, mean", "nat"),
    "target": ("position asked for", "1"),
}
SWAPPED = "||J_j||_F / sqrt(d) * rms(x) / rms(h), position 0 swapped, geometric mean over prompts"
TOYS = "toys"  # folder of unfinished training
Toys: TypeAlias = Mapping[tuple[str, Training], Sequence[Member]]


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
    toys = maker.toys(plan, folder, None if half is None else lambda label, done, total: half(done, total))
    fresh = [model.reinitialized(n, initialization=initialization) for n in range(seeds)]
    steps = Tally(part(progress, 0.5, 1.0), seeds + 1 + sum(map(len, toys.values())) / 10)
    ds = of_model(model, tokens, fresh, steps, bootstrap=bootstrap, seed=seed, documents=documents)
    portraits = {of: [_portrait(one, of[1], tokens, seed, steps) for one in members] for of, members in toys.items()}
    found = ds.merge(of_toys(toys, portraits))
    for whose, newborn in (("model", fresh), ("toy", [one.view for one in toys[MATCHED, "init"]])):
        grown = [math.log(growth(view, tokens[:PROMPTS, : view.spec.max_length])) for view in newborn]
        said = f"rms of the last stream over that of the first, fresh weights, {whose}"
        found[f"{whose}_growth"] = (), np.exp(np.mean(grown)), {"long_name": said, "units": "1"}
    if documents is not None:
        found = found.assign_coords(document=("prompt", list(documents[:PROMPTS])))
    given = {"prompts": len(tokens), "length": tokens.shape[1], "seeds": seeds, "bootstrap": bootstrap, "seed": seed}
    refused = {
        f"{variant}, {training}": json.loads(some[0].attrs["refused"])
        for (variant, training), some in portraits.items()
    }
    attrs = {
        "measurement": "match",
        "few_prompts": len(tokens[:PROMPTS]),
        "blocks": model.spec.blocks,
        **{name: ds.attrs[name] for name in ("band", "lags", "refused")},
        "initialization": fresh[0].identity.initialization or "",
        "toys": asdict(maker.settings),
        "notes": list(plan.notes),
        **{f"toy_{name}": portraits[MATCHED, "retrieval"][0].attrs[name] for name in ("band", "lags")},
        "toy_refused": refused,
        "toy_blocks": {training: members[0].view.spec.blocks for (_, training), members in toys.items()},
    }
    found.attrs = provenance(model, tokens, **given) | attributes(attrs)
    return judged(found, bootstrap=bootstrap)


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


# -- the model's variables, and the toys'


def of_model(model: View, tokens: Tensor, fresh: Sequence[View], steps: Tally, **options: Any) -> xr.Dataset:
    """Variables of a model in its states, and of theory; attributes of the last portrait."""
    apart = all(model.parts(layer) is not None for layer in range(model.spec.blocks))

    def measured(view: View) -> xr.Dataset:
        ds = portrait(view, tokens, products=PRODUCTS, **options)
        ds["swapped"] = ("position",), typical(ds["elasticity_swapped"].values), {"long_name": SWAPPED, "units": "1"}
        if apart:
            kernel = second_moment(view, tokens[:PROMPTS], attention="measured", score_path=True)
            ds["kernel"] = ("prompt", "position"), kernel["sensitivity"].values
        steps(1.0)
        return ds

    views = dict(zip(STATES, (fresh, [model]), strict=True))
    states = {state: [measured(view) for view in some] for state, some in views.items()}
    seeds = [xr.concat(some, xr.IndexVariable("seed", range(len(some)))) for some in states.values()]
    every = xr.concat(seeds, xr.IndexVariable("state", list(STATES)), join="outer")
    names = [name for name in ("sensitivity", *SHARED, "swapped", *SCALARS) if name in every]
    ds = _named(every[names].astype(np.float32), "model").assign_coords(
        fraction=("position", fractions(tokens.shape[1]))
    )
    ds["model_uniform"] = every["uniform"].isel(state=0, seed=0, drop=True)
    if apart:
        said = "second-moment kernel, measured patterns, score path"
        ds["theory_kernel"] = every["kernel"].astype(np.float32).assign_attrs(long_name=said, units="1")
    curves, alphas = np.full((len(STATES), tokens.shape[1]), np.nan, np.float32), np.full(len(STATES), np.nan)
    for n, some in enumerate(states.values()):
        mean = np.sqrt(np.mean([rms_profile(one["sensitivity"].values).mean ** 2 for one in some], 0))
        if np.count_nonzero(mean) >= SHORTEST:
            fit = fit_alpha(mean, model.spec.blocks, window=model.spec.windows)
            curves[n], alphas[n] = fit.curve, fit.alpha
    ds["theory_cesaro"] = ("state", "position"), curves, {"long_name": "N^L, fitted", "units": "1"}
    ds["theory_alpha"] = ("state",), alphas, {"long_name": "alpha of N^L", "units": "1"}
    return ds.assign_attrs(states["pretrained"][0].attrs)


def _named(ds: xr.Dataset, whose: str) -> xr.Dataset:
    """The variables named by whose they are."""
    said = {name: f"{values.attrs['long_name']}, {whose}" for name, values in ds.data_vars.items()}
    named = {f"{whose}_{name}": ds[name].assign_attrs(long_name=text) for name, text in said.items()}
    return ds.drop_vars(list(said)).assign(named)


def of_toys(toys: Toys, portraits: Mapping[tuple[str, Training], Sequence[xr.Dataset]]) -> xr.Dataset:
    """Variables of toys by variant and training; NaN where there are none, and behind shorter ones."""
    rows = [of_runs(members, portraits[of]) for of, members in toys.items()]
    rows = [row.assign_coords({dim: range(size) for dim, size in row.sizes.items() if dim != "source"}) for row in rows]
    ds, variants, trainings = xr.concat(rows, "row", join="outer"), [of[0] for of in toys], [of[1] for of in toys]
    ds = ds.assign_coords(variant=("row", variants), training=("row", trainings))
    ds = ds.set_index(row=["variant", "training"]).unstack("row")
    ds = ds.reindex(variant=list(dict.fromkeys(variants)), training=list(TRAININGS))
    return _named(ds.drop_vars(["toy_seed", "toy_prompt", "member"]).transpose("variant", "training", ...), "toy")


def of_runs(members: Sequence[Member], portraits: Sequence[xr.Dataset]) -> xr.Dataset:
    """What portraits of toys say together: curves of every seed, numbers with their intervals over seeds."""
    seeds, first = [one.seed for one in members], portraits[0]
    runs = [np.flatnonzero(np.array(seeds) == n) for n in sorted(set(seeds))]

    def every(name: str) -> np.ndarray:
        return np.stack([ds[name].values for ds in portraits])

    each = every("elasticity").swapaxes(0, 1)  # prompt, member, point
    curves = {name: [every(name)[run].mean(0) for run in runs] for name in ("alpha", "sink_rate")}
    curves["elasticity"] = [np.stack([typical(prompt) for prompt in each[:, run]]) for run in runs]
    swapped = [typical(every("elasticity_swapped")[run]) for run in runs]
    dims = ("toy_seed", "toy_prompt", "point")
    ds = xr.Dataset(
        {name: (dims, np.stack(values).astype(np.float32), first[name].attrs) for name, values in curves.items()}
    )
    ds["swapped"] = ("toy_seed", "point"), np.stack(swapped).astype(np.float32), {"long_name": SWAPPED, "units": "1"}
    ds["uniform"] = ("point",), first["uniform"].values, first["uniform"].attrs
    for name, estimate, values in (
        *((name, _mean, every(name)) for name in ("leakage_total", "reacts")),
        ("removed", _removed, np.stack([every("residual"), every("residual_swapped")], -1)),
        ("leakage_share", _shares, every("leakage_source")),
    ):
        for end, value in zip(ENDS, over_seeds(estimate, values, seeds), strict=True):
            ds[f"{name}{end}"] = first[name].dims, value, first.get(f"{name}{end}", first[name]).attrs
    for name, (said, units) in LEARNT.items():
        values = [getattr(one, name) for one in members]
        ds[name] = ("member",), np.array(values, dtype=np.float64), {"long_name": said, "units": units}
    return ds.assign_coords(source=first["source"])


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
    answer=sentences,
    tables=tables,
    chart=chart,
    caption=CAPTION,
    units=_units,
    defaults={"prompts": 64},
    without=("device_map", "max_memory", "offload_folder", "ablate", "ablate_how"),
)
