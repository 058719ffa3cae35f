"""`headwater match`: a model, the theory of it, and toys of the same architecture, through the same probes.

One result per model; `docs/probes/match.md` says what it holds ("Result").
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import xarray as xr
from torch import Tensor

from probes import options
from probes.measure import Headline, Measure, Unit
from probes.measures.agreement import EXACT_WIDTH
from probes.measures.jacobian import jacobian
from probes.models.initialization import CONFIG, Rule
from probes.models.view import View
from probes.results.curves import rms_profile
from probes.results.dataset import attributes, provenance
from probes.results.ushape import SHORTEST, typical
from probes.run.progress import Progress, Tally, part
from probes.run.store import Store
from probes.theory.cesaro import fit_alpha
from probes.theory.kernel import second_moment

from .checks import at_least, changed
from .match_result import STATES, TRAININGS, chart, errors, sentences, tables
from .matching import QUICK, Matching, Member, Plan, Settings, Training, frequencies, strength

PRODUCTS = 16  # of a sketch, per prompt: over 8 prompts within 2 %
TOY_PROMPTS = 8  # of its task, that a trained toy is measured on
LEARNT = {
    "loss": ("loss at the end of training", "nat"),
    "accuracy": ("accuracy on unseen sequences", "1"),
    "target": ("position asked for", "1"),
}
TOYS = "toys"  # folder of unfinished training
Toys: TypeAlias = Mapping[tuple[str, Training], Sequence[Member]]


@dataclass(frozen=True)
class Options(options.Options):
    """Train toys of a model's architecture and compare both by their profiles.

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
    changed: list[str] | None = options.option(
        "Change a setting of the toys (`toy.matching.Settings`); may be repeated.",
        None,
        "--with",
        metavar="FIELD=VALUE",
    )

    def values(self) -> dict[str, Any]:
        """As `match` takes them."""
        settings = changed(QUICK if self.quick else Settings(), self.changed or (), "match")
        return {name: value for name, value in vars(self).items() if name != "changed"} | {"settings": settings}


def match(
    model: View,
    tokens: Tensor,
    *,
    settings: Settings | None = None,
    seeds: int = 2,
    initialization: Rule = CONFIG,
    seed: int = 0,
    documents: Sequence[str] | None = None,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Train toys that match a model, and measure both.

    Args:
        model: any view of a language model; toys are trained on its device.
        tokens: prompts [prompt, position].
        settings: of the toys; `Settings()` if not given.
        seeds: fresh models.
        initialization: what their weights are drawn from, as in `probes.fresh`.
        seed: of everything that is drawn.
        documents: what each prompt is a window of.
        pieces: where unfinished training is kept, beside the folder of this store.
        progress: called with (done, in all).

    Returns:
        A dataset; `docs/probes/match.md` says of what.

    Raises:
        InputError: options that cannot be used, found before anything is trained.
    """
    at_least("seeds", seeds, 1)
    at_least("length", tokens.shape[1], SHORTEST)
    maker = Matching(settings or Settings(), str(model.device))
    plan = planned(model, tokens, maker, seed=seed, initialization=initialization)
    folder = None if pieces is None or pieces.folder is None else pieces.folder.parent / TOYS
    toys = maker.toys(plan, folder, part(progress, 0.0, 0.5))
    fresh = [model.reinitialized(n, initialization=initialization) for n in range(seeds)]
    steps = Tally(part(progress, 0.5, 1.0), seeds + 1 + sum(map(len, toys.values())) / 10)
    found = of_model(model, tokens, fresh, steps, seed).merge(of_toys(toys, tokens, steps, seed))
    if documents is not None:
        found = found.assign_coords(document=("prompt", list(documents)))
    given = {"prompts": len(tokens), "length": tokens.shape[1], "seeds": seeds, "seed": seed}
    attrs = {
        "measurement": "match",
        "blocks": model.spec.blocks,
        "initialization": fresh[0].identity.initialization or "",
        "toys": asdict(maker.settings),
        "notes": list(plan.notes),
        "toy_blocks": {training: members[0].view.spec.blocks for (_, training), members in toys.items()},
    }
    found.attrs = provenance(model, tokens, **given) | attributes(attrs)
    return found


def planned(model: View, tokens: Tensor, maker: Matching, *, seed: int = 0, initialization: Rule = CONFIG) -> Plan:
    """The toys that match a model on these prompts; a first token that all prompts share counts as BOS."""
    bos = len(tokens) > 1 and bool((tokens[:, 0] == tokens[0, 0]).all())
    strengths = strength(model.reinitialized(seed, initialization=initialization), tokens)
    matching: dict[str, Any] = {"strengths": strengths, "frequencies": frequencies(model, tokens)}
    return maker.plan(model.spec, bos=bos, length=tokens.shape[1], parts=model.parts(0), **matching)


def profile(view: View, tokens: Tensor, seed: int) -> xr.Dataset:
    """`sensitivity` and `elasticity` [prompt, position] of a view: exact where it is narrow, else of a sketch."""
    how: dict[str, Any] = {"method": "exact"}
    if view.spec.width > EXACT_WIDTH:
        how = {"method": "sketch", "products": PRODUCTS}
    return jacobian(view, tokens, seed=seed, **how)[["sensitivity", "elasticity"]]


def of_model(model: View, tokens: Tensor, fresh: Sequence[View], steps: Tally, seed: int) -> xr.Dataset:
    """Variables of a model in its states, and of theory."""
    apart = all(model.parts(layer) is not None for layer in range(model.spec.blocks))

    def measured(view: View) -> xr.Dataset:
        ds = profile(view, tokens, seed)
        if apart:
            kernel = second_moment(view, tokens, attention="measured", score_path=True)
            ds["kernel"] = ("prompt", "position"), kernel["sensitivity"].values
        steps(1.0)
        return ds

    states = [[measured(view) for view in views] for views in (fresh, [model])]
    seeds = [xr.concat(some, xr.IndexVariable("seed", range(len(some)))) for some in states]
    every = xr.concat(seeds, xr.IndexVariable("state", list(STATES)), join="outer")
    ds = _named(every[["sensitivity", "elasticity"]].astype(np.float32), "model")
    if apart:
        said = "second-moment kernel, measured patterns, score path"
        ds["theory_kernel"] = every["kernel"].astype(np.float32).assign_attrs(long_name=said, units="1")
    curves = np.full((len(STATES), tokens.shape[1]), np.nan, np.float32)
    for curve, some in zip(curves, states, strict=True):
        mean = np.sqrt(np.mean([rms_profile(one["sensitivity"].values).mean ** 2 for one in some], 0))
        if np.count_nonzero(mean) >= SHORTEST:
            curve[:] = fit_alpha(mean, model.spec.blocks, window=model.spec.windows).curve
    ds["theory_cesaro"] = ("state", "position"), curves, {"long_name": "N^L, fitted", "units": "1"}
    return ds


def _named(ds: xr.Dataset, whose: str) -> xr.Dataset:
    """The variables named by whose they are."""
    said = {name: f"{values.attrs['long_name']}, {whose}" for name, values in ds.data_vars.items()}
    named = {f"{whose}_{name}": ds[name].assign_attrs(long_name=text) for name, text in said.items()}
    return ds.drop_vars(list(said)).assign(named)


def of_toys(toys: Toys, tokens: Tensor, steps: Tally, seed: int) -> xr.Dataset:
    """Variables of toys by variant and training; NaN where there are none, and behind shorter ones."""
    rows = [of_runs(members, tokens, steps, seed) for members in toys.values()]
    rows = [row.assign_coords({dim: range(size) for dim, size in row.sizes.items()}) for row in rows]
    ds, variants, trainings = xr.concat(rows, "row", join="outer"), [of[0] for of in toys], [of[1] for of in toys]
    ds = ds.assign_coords(variant=("row", variants), training=("row", trainings))
    ds = ds.set_index(row=["variant", "training"]).unstack("row")
    ds = ds.reindex(variant=list(dict.fromkeys(variants)), training=list(TRAININGS))
    return _named(ds.drop_vars(["toy_seed", "toy_prompt", "member"]).transpose("variant", "training", ...), "toy")


def of_runs(members: Sequence[Member], tokens: Tensor, steps: Tally, seed: int) -> xr.Dataset:
    """Profiles of toys of one variant and training by seed, and how well each toy does its task."""
    curves = []
    for one in members:
        read = tokens[:, : one.view.spec.max_length] if one.prompts is None else one.prompts[:TOY_PROMPTS]
        curves.append(profile(one.view, read, seed)["elasticity"])
        steps(0.1)
    of = np.array([one.seed for one in members])
    every = [np.stack(curves)[of == n].swapaxes(0, 1) for n in np.unique(of)]  # [prompt, position asked for, point]
    typically = np.stack([[typical(values) for values in run] for run in every]).astype(np.float32)
    ds = xr.Dataset({"elasticity": (("toy_seed", "toy_prompt", "point"), typically, curves[0].attrs)})
    for name, (said, units) in LEARNT.items():
        values = [getattr(one, name) for one in members]
        ds[name] = ("member",), np.array(values, dtype=np.float64), {"long_name": said, "units": units}
    return ds


# -- the measure


def _units(values: Mapping[str, Any]) -> list[Unit]:
    """One, which is marked where its toys are those of the quick setting."""
    given = dict(values)
    return [Unit(attributes={"quick": int(given.pop("quick"))}, options=given)]


MEASURE = Measure(
    name="match",
    question="What of a model's sense of position do toys of its architecture share?",
    compute=match,
    options=Options,
    headlines=(Headline("RMS log error of the profile", errors, ratio=True, form=".2f"),),
    answer=sentences,
    tables=tables,
    chart=chart,
    units=_units,
    defaults={"prompts": 8},
    without=("device_map", "max_memory", "offload_folder", "ablate"),
)
