"""The study behind `headwater match`: a model, the theory of it, and toys of the same architecture, through the same probes.

One result per model. Its dimensions:

- `state`: "init" (fresh weights, `seed` of them) and "pretrained" (seed 0 alone) of the model; `prompt`, with its `document`
  where there are any; `position`, with `fraction` = j / (T - 1).
- `variant`: "matched", and toys that lack one ingredient ("no residual", "no causal mask", "no positions", "no window");
  `training`: "init", "retrieval", "in-context"; `toy_seed`; `toy_prompt`; `point`, a toy's positions: toys of a training may
  have fewer than those of another, and NaN behind them.
- `member`: single toys of a variant and training, one for each seed and position asked for, seed by seed.

Its variables, all with long_name and units, NaN where there is nothing:

- curves, sample by sample: `model_sensitivity`, `model_elasticity`, `model_alpha`, `model_sink_rate` [state, seed, prompt,
  position]; `toy_elasticity` (geometric mean over the positions asked for), `toy_alpha`, `toy_sink_rate` [variant, training,
  toy_seed, toy_prompt, point]; `model_swapped` [state, seed, position] and `toy_swapped` [variant, training, toy_seed,
  point], elasticities, geometric means over prompts, with something else at position 0; `model_uniform` [position],
  `toy_uniform` [variant, training, point];
- `model_growth`, `toy_growth`: how many times larger the stream of fresh weights is in the end, geometric means over seeds;
- theory of the model: `theory_kernel` [state, seed, prompt, position], the second-moment kernel with measured patterns and
  score path; `theory_cesaro` [state, position] and `theory_alpha` [state], N^L and its fitted alpha;
- `model_leakage_total`, `model_removed`, `model_reacts` [state, seed], `model_leakage_share` [state, seed, source], and the
  same of toys as means over members, `toy_...` [variant, training (, source)]; each with `_low` and `_high`, for the model
  over documents (of `reacts` none), for toys over runs, which are seeds;
- `toy_loss`, `toy_accuracy`, `toy_log_p`, `toy_target` [variant, training, member];
- `recall_gain` [context, depth] with `recall_fraction`, of the model's `headwater retrieval` where it was given;
- what `matched.judged` adds: `agreement_spearman`, `agreement_error` [curve, state, other] with `_low` and `_high`, and
  `agreement_apart`: a model's "sensitivity" or "alpha" in a state against the `other` one ("second-moment kernel", "N^L,
  best alpha", "toy init", "retrieval toy", "no residual, retrieval toy", ...); `recall_spearman` [variant]; `model_primacy`,
  `model_recency`, `model_trough` [state] and `toy_...` [variant, training], with `_low` and `_high`.

The study knows no toys itself: it is handed who makes them (`Maker`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ..errors import InputError
from ..figures.match import match_figure
from ..measures.agreement import BOOTSTRAP, PROMPTS, fractions, portrait
from ..measures.leakage import LEAST_PROMPTS, SOURCES
from ..measures.match_result import judged
from ..measures.mechanism_numbers import couples
from ..models.initialization import CONFIG, Rule, check_rule
from ..models.strength import Strength, frequencies, strength
from ..models.view import Spec, View
from ..results.dataset import dataset, load, provenance
from ..results.tables import write_report
from ..results.ushape import SHORTEST
from ..run.precision import double
from ..run.progress import Advance
from ..run.store import Store
from ..theory.kernel import second_moment
from .match_layout import STATES, TRAININGS, Variables, of_model, of_runs, of_toys
from .match_report import match_report
from .runner import Given, Results, Study, Subject, Tell, Told, Unit, run, write_results

NAME = "match"
PRODUCTS = 16  # of a sketch, per prompt: over 8 prompts within 2 %
TOY_PROMPTS = 64  # of leakage in toys; of theirs, like the model's, `agreement.PROMPTS` for everything else
TOYS = ".unfinished-toys"


if TYPE_CHECKING:
    from toy.matching import Group, Member, Plan
else:  # checked signatures need the names, and nothing here imports toys
    Group = Member = Plan = Any


@runtime_checkable
class Maker(Protocol):
    """Who makes toys, as `toy.matching.Matching`."""

    @property
    def described(self) -> dict[str, Any]: ...

    def plan(
        self,
        spec: Spec,
        *,
        bos: bool,
        length: int,
        norm: Literal["rms", "layer"],
        strengths: Strength | None,
        frequencies: tuple[float, ...] | None,
    ) -> Plan: ...

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
    recall: str | Path | None = None,
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
        recall: a result of `headwater retrieval`, or a folder of them; toys' recall by depth is compared with those of the
            models' own weights.
        advance: hears (what is running, done, in all).
        told: hears in one line which models are done already.
        given: fields of `Given`: which prompts, 64 if not given, and how models are loaded. All prompts are for leakage,
            the first 8 for everything else.

    Raises:
        InputError: bad input, found before anything is trained.
    """
    out, asked = Path(out), Given(**{"prompts": 64, **given})
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
    recalled = {} if recall is None else recalls(recall)
    toys, plans, trained = maker.described, dict[str, Plan](), dict[str, Sequence[Group]]()
    cache: dict[str, tuple[xr.Dataset, ...]] = {}
    weights: set[str] = set()
    results: Results = {}

    def check(model: View, name: str, tokens: Tensor) -> None:
        if len(tokens) < LEAST_PROMPTS or tokens.shape[1] < SHORTEST:
            least = f"{LEAST_PROMPTS} of {SHORTEST}"
            raise InputError(f"{len(tokens)} prompts of {tokens.shape[1]} tokens are too few; give at least {least}")
        if recalled:
            weights.add(model.identity.weights)
        plans[name] = planned(model, tokens, maker, seed=asked.seed, initialization=initialization)

    def prepare(models: Sequence[Subject]) -> None:
        if recalled and not recalled.keys() & weights:
            raise InputError(
                f"recall '{recall}' is of none of these models' weights; give results of {', '.join(plans)}"
            )
        groups = maker.toys([plans[one.name] for one in models], out / TOYS, advance)
        trained.update((one.name, own) for one, own in zip(models, groups, strict=True))

    def measure(model: View, one: Subject, tell: Tell, pieces: Store) -> xr.Dataset:
        beside: dict[str, Any] = {"documents": one.drawn.documents, "cache": cache, "progress": tell, "pieces": pieces}
        made = measured(model, one.tokens, trained[one.name], seed=asked.seed, **options, **beside)
        notes = json.dumps(list(plans[one.name].notes))
        return made.assign_attrs(notes=notes, toys=json.dumps(toys), quick=int(quick))

    def write(found: Results) -> None:
        for name, ds in found.items():
            own = recalled.get(str(ds.attrs["weights"]), {})
            results[name] = judged(ds.assign(own), bootstrap=bootstrap)
        write_results(results, out, NAME, match_figure)
        write_report(match_report(results), out / f"{NAME}.md")

    def units(model: View, name: str, tokens: Tensor) -> list[Unit]:
        return [Unit(name, {**options, "seed": asked.seed, "toys": toys, "quick": quick}, measure)]

    study = Study(NAME, units, write, check=check, prepare=prepare, files=[f"{NAME}.md"])
    run(study, sources, out, asked, asked.loading(), advance=advance, told=told)
    maker.finish(out / TOYS)
    return results


def planned(model: View, tokens: Tensor, maker: Maker, *, seed: int = 0, initialization: Rule = CONFIG) -> Plan:
    """The toys that match a model on these prompts; a first token that all prompts share counts as BOS."""
    parts, few = model.parts(0), tokens[:PROMPTS]
    own = None if parts is None else parts.attention_norm or parts.post_attention_norm
    norm = "rms" if own is None else own.kind
    bos = len(tokens) > 1 and bool((tokens[:, 0] == tokens[0, 0]).all())
    strengths = strength(model.reinitialized(seed, initialization=initialization), few)
    matching: dict[str, Any] = {"strengths": strengths, "frequencies": frequencies(model, few)}
    return maker.plan(model.spec, bos=bos, length=tokens.shape[1], norm=norm, **matching)


def recalls(path: str | Path) -> dict[str, Variables]:
    """By the hash of their weights, what models recall by depth, of a result of `headwater retrieval` or a folder of them.

    Raises:
        InputError: nothing of that kind.
    """
    path, found = Path(path), {}
    for file in sorted(path.glob("retrieval*.nc*")) if path.is_dir() else [path]:
        ds = load(file)
        if "gain" not in ds or "depth" not in ds["gain"].dims:
            raise InputError(f"'{file}' is no result of `headwater retrieval`; give one, or a folder of them")
        said = {"long_name": "log p of the value less that of the control", "units": "nat"}
        fraction = {"long_name": "place of the pair in the context, as a fraction", "units": "1"}
        found[str(ds.attrs["weights"])] = {
            "recall_gain": (("context", "depth"), ds["gain"].transpose("context", "depth").values, said),
            "recall_unit": (
                ("context",),
                couples(ds),
                {"long_name": "contexts that are each other's control", "units": "1"},
            ),
            "recall_fraction": (("depth",), ds["fraction"].values, fraction),
        }
    if not found:
        raise InputError(f"'{path}' has no retrieval*.nc; give a result of `headwater retrieval`, or a folder of them")
    return found


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
    pieces: Store | None = None,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> xr.Dataset:
    """A model and its toys, measured; the layout is the module's text. `cache` holds toys that several models share."""
    cache, pieces = {} if cache is None else cache, pieces or Store()
    done, total = 0.0, 1 + seeds + sum(len(group.members) / 10 for group in groups if group.key not in cache)

    def step(more: float) -> None:
        nonlocal done
        done += more
        progress(done, total)

    def of_toy(member: Member, training: str, kept: Store) -> xr.Dataset:
        view, read = member.view, member.prompts
        own = tokens[:TOY_PROMPTS, : view.spec.max_length] if read is None else read(TOY_PROMPTS)
        made = portrait(view, own, stationary=training != "in-context", bootstrap=0, seed=seed, pieces=kept)
        step(0.1)
        return made

    views = {("init", n): model.reinitialized(n, initialization=initialization) for n in range(seeds)}
    views |= {("pretrained", 0): model}
    few = tokens[:PROMPTS]
    portraits, kernels = {}, {}
    apart = all(model.parts(layer) is not None for layer in range(model.spec.blocks))
    options: dict[str, Any] = {"products": PRODUCTS, "bootstrap": bootstrap, "seed": seed, "documents": documents}
    theory: dict[str, Any] = {"attention": "measured", "score_path": True}
    for place, view in views.items():
        kept = pieces.within("{} {}".format(*place))
        portraits[place] = portrait(view, tokens, pieces=kept, **options)
        if apart:
            kernels[place] = second_moment(view, few, pieces=kept, **theory)["sensitivity"].values
        step(1.0)

    toys: dict[tuple[str, str], Sequence[xr.Dataset]] = {}
    runs: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for group in groups:
        of, members = (group.variant, group.training), group.members
        if group.training == "init" or group.key not in cache:  # fresh toys read the model's own prompts
            kept = pieces.within(f"{group.variant} {group.training}")
            cache[group.key] = tuple(of_toy(one, group.training, kept.within(str(n))) for n, one in enumerate(members))
        toys[of] = cache[group.key]
        runs[of] = of_runs([member.seed for member in members], toys[of])
        for name in ("loss", "accuracy", "log_p", "target") if group.training != "init" else ():
            values = [getattr(member, name) for member in members]
            runs[of][name] = np.array([np.nan if value is None else value for value in values])

    variants = list(dict.fromkeys(group.variant for group in groups))
    own, asked_for = portraits["pretrained", 0], toys[variants[0], "retrieval"][0]
    length, points = tokens.shape[1], max(ds.sizes["position"] for many in toys.values() for ds in many)
    variables = of_model(model, portraits, kernels, seeds) | of_toys(variants, runs)
    born = next(group.members for group in groups if (group.variant, group.training) == (variants[0], "init"))
    for whose, fresh in (
        ("model", [views["init", n] for n in range(seeds)]),
        ("toy", [one.view for one in born]),
    ):
        grown = np.exp(np.mean([math.log(growth(view, few[:, : view.spec.max_length])) for view in fresh]))
        said = {"long_name": f"rms of the {whose}'s last stream over that of the first, fresh weights", "units": "1"}
        variables[f"{whose}_growth"] = ((), grown, said)
    coords: dict[str, Any] = {
        "state": list(STATES),
        "seed": range(seeds),
        "variant": variants,
        "training": list(TRAININGS),
        "source": list(SOURCES),
        "position": range(length),
        "fraction": (("position",), fractions(length)),
        "point": range(points),
    }
    coords |= {} if documents is None else {"document": (("prompt",), list(documents[:PROMPTS]))}
    options = {"prompts": len(tokens), "length": length, "seeds": seeds, "bootstrap": bootstrap, "seed": seed}
    blocks = {group.training: group.members[0].view.spec.blocks for group in groups}
    refused = {f"{v}, {t}": json.loads(str(many[0].attrs["refused"])) for (v, t), many in toys.items()}
    attrs = {
        "measurement": NAME,
        "initialization": views["init", 0].identity.initialization or "",
        "few_prompts": len(few),
        **{name: own.attrs[name] for name in ("band", "lags", "refused")},
        **{f"toy_{name}": asked_for.attrs[name] for name in ("band", "lags")},
        "toy_refused": json.dumps(refused),
        "blocks": model.spec.blocks,
        "toy_blocks": json.dumps(blocks),
    }
    return dataset(variables, coords=coords, attrs=provenance(model, tokens, **options) | attrs)


@torch.no_grad()
def growth(view: View, tokens: Tensor) -> float:
    """How many times larger (rms) the stream is after the last block than before the first, at the last position."""
    streams = view.trace(view.embed(tokens)).residual
    first, last = (float(double(stream[:, -1]).square().mean().sqrt()) for stream in (streams[0], streams[-1]))
    return last / first
