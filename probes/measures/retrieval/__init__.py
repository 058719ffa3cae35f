"""What a model can retrieve: key-value recall by depth.

Variables and how to read them stand on the measure's page (`docs/probes/retrieval.md`). A context (`probes.data.recall`)
runs once, on a GPU together with others. All questions and answers run behind its keys and values (`probes.models.behind`),
each a row; views that cannot continue a context take a pass over the whole text for each question.

Source: ours; the task is that of [Liu+], arXiv 2307.03172.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ... import options
from ...charts import GREY, VERMILLION, Panel, Series, curves, panels
from ...data.prompts import FirstToken, parse_first, prompts
from ...data.recall import Couple, Keys, Maker, Rung, read_template
from ...errors import InputError
from ...measure import Headline, Measure
from ...models.behind import Asked, behind, log_p
from ...models.checks import not_finite
from ...models.initialization import CONFIG, Rule
from ...models.load import takes_model
from ...models.view import View
from ...models.words import edited
from ...results.curves import ESTIMATE
from ...results.dataset import Variable, dataset, labelled, options_of, provenance
from ...results.statistics import couples, jackknife
from ...results.tables import Table, interval
from ...results.ushape import SHORTEST
from ...run.memory import Retry, block_numbers, parts, prompts_at_once
from ...run.progress import Progress, Tally
from ...run.store import Piece, Store
from ..jacobian import of_curve, trough
from . import mechanism as mechanisms
from .context import answers
from .numbers import Recall, shape, statements

CONTEXTS = 100
LEAST = {"contexts": 2, "seed": 0, "mechanism": 0, "profile_prompts": 0}
# Logits or attention weights of the rows that run together: 128 MiB in float32, or a block of a device's own memory.
NUMBERS_AT_ONCE = 1 << 25
BY_DEPTH = ("context", "depth")
VARIABLES = {
    "log_p": Variable(BY_DEPTH, "log probability of the value", "nat"),
    "control": Variable(BY_DEPTH, "log probability of the value behind a context without the key", "nat"),
    "exact": Variable(BY_DEPTH, "whether every token of the value is the most probable one"),
    "gain": Variable(BY_DEPTH, "what the pair adds to the value's log probability", "nat"),
    "place": Variable(("depth",), "position of the value's first token", "token"),
}
MEASURED = ("log_p", "control", "exact")


@takes_model
def retrieval(
    model: View,
    *,
    pairs: int = 12,
    keys: Keys = "apart",
    digits: int = 4,
    contexts: int = CONTEXTS,
    template: str = "sentences",
    first: FirstToken | int = "auto",
    mechanism: int = 0,
    shocks: Sequence[str] = (),
    profile_prompts: int = mechanisms.PROFILE_PROMPTS,
    initialization: Rule = CONFIG,
    seed: int = 0,
    pieces: Store | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Ask for every pair of lists of pairs: what a model recalls by the depth at which it stands.

    Args:
        model: any view; it is not changed. One that can continue a context (a transformers model) takes a small part of
            the time.
        pairs: of a context.
        keys: "apart", different nouns, or "alike", colours and nouns that recur.
        digits: of a value; 0: values are nouns.
        contexts: how many; they come in couples that are each other's control.
        template: "sentences", "json", "reworded" or "announced".
        first: what stands at position 0, as in `probes.prompts`.
        mechanism: behind so many contexts, the first ones, the norm is measured at every depth (`mechanism`); 0: none.
        shocks: interventions as in `probes.edited`, under which recall and norm of the `mechanism` contexts are measured
            again.
        profile_prompts: prompts of ordinary text from which, with `mechanism`, profiles are taken; 0: no such profiles.
        initialization: what the fresh weights of `profile_init` are drawn from, as in `View.reinitialized`.
        seed: decides the contexts, and all else that is drawn.
        pieces: where what each context gave is kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (questions done, questions in all); a backward pass of the mechanism counts as several.

    Returns:
        Dataset with the variables of `VARIABLES`, [context, depth], where `depth` counts pairs from 0 and `fraction`
        goes from 0 to 1; `place`, where the value stands, and the attribute `query`, the position that its first token is
        predicted at; with `mechanism` the variables of `mechanism`, [traced or profile_prompt, depth], where `traced`
        holds numbers of contexts; attributes that say what made it.

    Raises:
        InputError: an option that cannot be used, no tokenizer, a context longer than the model was made for, values that
            are not finite.

    Source: see the module's text.
    """
    rung, given = Rung(pairs, keys, digits), {"contexts": contexts, "template": template, "first": first}
    tracing: dict[str, Any] = {"mechanism": mechanism, "shocks": ",".join(shocks), "profile_prompts": profile_prompts}
    tracing |= {"initialization": str(initialization)}
    check(given | tracing | {"seed": seed})
    maker, pieces = Maker(model, rung, read_template(template), first=first), pieces or Store()
    couple = cache(lambda number: maker.couple(seed, number))
    query = len(couple(0).contexts[0]) + len(couple(0).questions[0][0]) - 1
    traced = mechanism * (1 + len(shocks)) * mechanisms.COST + mechanism * len(shocks) * pairs
    report = Tally(progress, contexts * pairs + traced)
    retry = Retry(f"a context of {maker.length()} tokens of '{model.identity.name}'", report)
    at_once = couples_at_once(model, couple(0))

    def recalled(view: View, kept: Store, lists: int, depths: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        def several(numbers: Sequence[int]) -> Sequence[Piece]:
            return retry(lambda: answered(view, [couple(n) for n in numbers], report, depths))

        by_couple = kept.together("contexts", lists // 2, several, at_once)
        return {name: by_couple.stacked(name).reshape(lists, -1) for name in MEASURED}

    def norms(view: View, kept: Store) -> np.ndarray:  # the same directions, whatever the shock
        def one(number: int) -> Piece:
            how: Any = {"seed": [seed, number, 1], "report": report}
            return retry(lambda: mechanisms.behind_lists(view, couple(number // 2), number % 2, **how))

        return kept.each("mechanism", mechanism, one).stacked("norm")

    of: Any = {"reference": torch.tensor(couple(0).contexts), "seed": seed}
    shocked = {shock: edited(model, shock, **of) for shock in shocks}  # refused, if so, before anything is measured
    values = recalled(model, pieces, contexts)
    if mechanism:
        values["norm_profile"], changed = norms(model, pieces), list[tuple[np.ndarray, np.ndarray]]()
        for shock, view in shocked.items():
            kept = pieces.within(shock)
            changed.append((norms(view, kept), recalled(view, kept, mechanism, range(pairs))["log_p"]))
        if changed:
            values["norm_shocked"], values["log_p_shocked"] = map(np.stack, zip(*changed, strict=True))
        if profile_prompts:
            text = prompts(model, n=profile_prompts, length=query + 1, first=first, seed=seed)
            how: Any = {"initialization": initialization, "seed": seed, "pieces": pieces}
            values |= mechanisms.profiles(model, text, couple(0), **how)
    report.finish()
    if not np.isfinite(values["log_p"]).all():
        raise not_finite(model, "probabilities")
    values |= {"gain": values["log_p"] - values["control"], "place": np.array([at for _, at in couple(0).starts])}
    coords: dict[str, Any] = {"context": range(contexts), "depth": range(pairs)}
    coords |= {"fraction": (("depth",), np.arange(pairs) / (pairs - 1))}
    if mechanism:
        coords |= {"traced": range(mechanism)} | ({"shock": list(shocks)} if shocks else {})
        coords |= {"profile_prompt": range(profile_prompts)} if profile_prompts else {}
    tokens = torch.tensor([ids for n in range(contexts // 2) for ids in couple(n).contexts])
    said = rung._asdict() | given | (tracing if mechanism else {})
    attrs = provenance(model, tokens, measurement="retrieval", **said, seed=seed)
    attrs |= maker.policy | {"query": query}
    return dataset(labelled(VARIABLES | mechanisms.VARIABLES, values), coords=coords, attrs=attrs)


def check(given: Mapping[str, Any]) -> None:
    """Refuse numbers that cannot be used."""
    for name, lowest in LEAST.items():
        if given[name] < lowest:
            raise InputError(f"{name}={given[name]} is too few; give at least {lowest}")
    for name in ("contexts", "mechanism"):
        if given[name] % 2:
            raise InputError(f"{name}={given[name]} is odd, but lists come in couples; give one, as {given[name] + 1}")
    if given["mechanism"] > (most := given["contexts"]):
        raise InputError(f"mechanism={given['mechanism']} is more than there are contexts; give at most {most}")
    for name, usual in (("initialization", CONFIG), ("shocks", "")):
        if not given["mechanism"] and given[name] != usual:
            raise InputError(f"{name}={given[name]} does nothing without mechanism; give mechanism=24, or leave it out")


def answered(model: View, couples: Sequence[Couple], report: Tally, depths: Sequence[int] | None = None) -> list[Piece]:
    """Both contexts of each couple, [context, depth]: behind each run its own questions and, as controls, the other's.

    Where `depths` are given, questions for these, without controls.
    """
    sides = [_asked(couple, side, depths) for couple in couples for side in (0, 1)]
    count, start, found = len(couples[0].starts if depths is None else depths), 0, list[np.ndarray]()
    while start < len(sides):
        some = sides[start : start + _at_once(model, *sides[0])]
        found.append(np.stack(scores(model, *zip(*some, strict=True))))
        start += len(some)
        report(count * len(some))
    log_p, greedy = np.concatenate(found, 1).reshape(2, len(couples), 2, -1)  # [couple, side, question]
    made = zip(log_p, greedy, strict=True)
    return [{"log_p": p[:, :count], "control": p[::-1, count:], "exact": said[:, :count]} for p, said in made]


def _asked(couple: Couple, side: int, depths: Sequence[int] | None = None) -> tuple[tuple[int, ...], list[Asked]]:
    """A context, its questions and, as controls, those of the other one."""
    pairs = [pair for n in (side, 1 - side) for pair in zip(couple.questions[n], couple.answers[n], strict=True)]
    pairs = pairs if depths is None else [pairs[n] for n in depths]
    return couple.contexts[side], [Asked(*pair) for pair in pairs]


def _of_row(model: View, context: Sequence[int], asked: Sequence[Asked]) -> int:
    """Numbers of the largest tensor, by row."""
    widest = max(len(one.row) for one in asked)
    return widest * max(model.spec.vocabulary, model.spec.heads * (len(context) + widest))


def _at_once(model: View, context: Sequence[int], asked: Sequence[Asked]) -> int:
    """How many contexts go through the model together."""
    return prompts_at_once(model, len(context), len(asked) * _of_row(model, context, asked))


def couples_at_once(model: View, couple: Couple) -> int:
    """How many couples go through the model together."""
    return max(1, _at_once(model, *_asked(couple, 0)) // 2)


@torch.no_grad()
def scores(
    model: View, contexts: Sequence[Sequence[int]], asked: Sequence[Sequence[Asked]]
) -> tuple[Float[np.ndarray, "context question"], Float[np.ndarray, "context question"]]:
    """For every question its answer's log probability, and whether that is what a greedy reader says.

    Contexts have one length, and as many questions each.
    """
    run = behind(model, model.embed(torch.tensor([list(context) for context in contexts])))
    numbers = len(contexts) * _of_row(model, contexts[0], [one for some in asked for one in some])
    at_once = max(1, max(NUMBERS_AT_ONCE, block_numbers(model.device)) // (parts() * numbers))
    found = []
    for start in range(0, len(asked[0]), at_once):
        rows = [one for some in asked for one in some[start : start + at_once]]
        values, greedy = (
            each.unflatten(0, (len(contexts), -1)) for each in log_p(model, rows, run([one.row for one in rows]))
        )
        found.append(torch.stack([values, greedy.to(values)]))
    values, greedy = torch.cat(found, -1).cpu().numpy()
    return values, greedy


# ----------------------------------------------------------------------------------------------------- what is reported

CAPTION = "Bands: 95 % over couples of lists. Without key: the same question behind another list."
FORMS = {"log_p": "log p (nat)", "gain": "gain (nat)", "exact": "exact answers"}


@dataclass(frozen=True)
class Options(options.Options):
    """Measure what a model recalls of a list of keys and values, by the depth at which the pair stands.

    Writes retrieval.nc, retrieval.md and the chart: recall by depth, with the first and the last pairs against the middle.
    --pairs, --keys and --digits say how hard lists are: depth shows where a model recalls a part of them. There is no
    --backend: lists run once, and questions behind them, through the modules of transformers. If interrupted, the same
    command resumes.

    With --mechanism it is also measured, behind some of the lists, how strongly the stream depends on every line (the norm);
    and what that says of recall by depth.

    Examples:
      headwater retrieval smollm2-135m --pairs 36 --contexts 24
      headwater retrieval smollm2-135m --pairs 36 --mechanism 24
      headwater retrieval Qwen/Qwen2.5-0.5B --pairs 144 --keys alike --template json
    """

    pairs: int = options.option("Pairs of a list.", 12)
    keys: Literal["apart", "alike"] = options.option("Different nouns, or colours and nouns that recur.", "apart")
    digits: int = options.option("Digits of a value, 2 to 15; 0: values are nouns.", 4)
    contexts: int = options.option("Lists, an even number: each is the control of another one.", 100)
    template: str = options.option("sentences, json, reworded, or announced (keys before the list).", "sentences")
    mechanism: int = options.option("Lists behind which the norm is measured at every depth; 0: none.", 0)
    shocks: str = options.option(
        "With --mechanism, interventions to repeat it under, as in released@8,without-0@8.", ""
    )
    profile_prompts: int = options.option("With --mechanism, prompts of ordinary text for profiles; 0: no profiles.", 8)
    initialization: str = options.initialization()
    first: str = options.first()
    seed: int = options.seed()

    def values(self) -> dict[str, Any]:
        """As `retrieval` takes them."""
        shocks = tuple(word.strip() for word in self.shocks.split(",") if word.strip())
        return vars(self) | {"first": parse_first(self.first), "shocks": shocks}


def by_list(ds: xr.Dataset, *, name: str) -> xr.DataArray:
    """Means over depths by list, which stands in the place of a prompt."""
    return ds[name].mean("depth").rename(context="prompt")


def _exact(ds: xr.Dataset) -> xr.DataArray:
    """The share of exact answers with its interval over couples of lists, within 0 and 1."""
    return xr.DataArray(list(shape(ds).exact[:3]), {"estimate": list(ESTIMATE)}, ("estimate",))


def _by_depth(ds: xr.Dataset) -> xr.DataArray:
    """Log p by list and depth [prompt, depth]."""
    if ds.sizes["depth"] < SHORTEST:
        raise KeyError("a middle")
    return ds["log_p"].rename(context="prompt").transpose("prompt", "depth")


def least_at(values: np.ndarray) -> np.ndarray:
    """Where recall is lowest, from 0 (first) to 1 (last), of values [prompt, depth]."""
    return np.asarray(trough(values) / (values.shape[-1] - 1))


def _statements(ds: xr.Dataset) -> xr.DataArray:
    """What a mechanism says of recall [number, estimate]; its interval is its own."""
    if "traced" not in ds.dims:
        raise KeyError("traced")
    found = statements(ds)
    coords = {"number": list(found), "estimate": list(ESTIMATE)}
    return xr.DataArray([list(number[:3]) for number in found.values()], coords, ("number", "estimate"))


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Whether recall by depth is a U, and what was asked."""
    lines = []
    for model, ds in results.items():
        recall, chosen = shape(ds), options_of(ds)
        rung = Rung(chosen["pairs"], chosen["keys"], chosen["digits"])
        lines.append(f"{model}: of {rung}, {interval(*recall.exact[:3])} are answered exactly; {_verdict(recall)}.")
    return lines + answers({name: ds for name, ds in results.items() if "norm_profile" in ds})


def _verdict(recall: Recall) -> str:
    """Whether recall is a U, in a sentence."""
    sides = {"first pair": recall.first, "last pair": recall.last}
    if any(np.isnan(side.low) for side in sides.values()):
        return f"no U can be told: that takes {SHORTEST} pairs and two couples of lists, or more"
    ways = [
        "better than" if side.low > 1 else "worse than" if side.high < 1 else "not clearly other than"
        for side in sides.values()
    ]
    said = ", ".join(f"the {name} {way} the middle" for name, way in zip(sides, ways, strict=True))
    return f"recall: {said}: {'a U' if set(ways) == {'better than'} else 'not clearly a U'}"


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Recall by depth."""
    curve = []
    for model, ds in results.items():
        for depth in ds["depth"].values:
            at = ds.sel(depth=depth)
            cells = [f"{float(at[name].mean()):.2f}" for name in ("log_p", "control", "exact")]
            curve.append([model, str(depth), str(int(at["place"])), *cells])
    return [Table("Recall by depth", ("model", "depth", "token", "log p", "log p without key", "exact"), curve)]


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Log probability of the value and exact answers over depth: means over lists, with intervals."""

    def recalled(cell: Axes, ds: xr.Dataset, looks: Mapping[str, tuple[str, str]]) -> None:
        drawn = []
        for name, (label, color) in looks.items():
            mean, low, high = jackknife(lambda some: some.mean(0), ds[name].values, couples(ds))
            drawn.append(Series(label, mean, color, low, high, ds["fraction"].values))
        curves(cell, drawn)
        cell.set_xlim(-0.02, 1.02)
        cell.set_xlabel("depth of the pair, first to last")
        if "exact" in looks:
            cell.set_ylim(-0.03, 1.03)

    values = {"log_p": ("value", VERMILLION), "control": ("without key", GREY)}
    rows = [
        Panel("log p of the value (nat)", partial(recalled, looks=values)),
        Panel("exact answers", partial(recalled, looks={"exact": ("", VERMILLION)}), share=True),
    ]
    return panels(results, rows, CAPTION)


MEASURE = Measure(
    name="retrieval",
    question="What does a model recall of a list, by the depth at which it stands?",
    compute=retrieval,
    options=Options,
    headlines=(
        Headline(FORMS["exact"], _exact, by_prompt=partial(by_list, name="exact")),
        *(Headline(FORMS[name], partial(by_list, name=name)) for name in ("log_p", "gain")),
        *(Headline(f"{x} pair", _by_depth, partial(of_curve, name=x), ratio=True) for x in ("first", "last")),
        Headline("least at", _by_depth, least_at, jumps=True),
        Headline("what it says of recall", _statements),
    ),
    answer=answer,
    tables=tables,
    chart=chart,
    prompted=False,
    without=("backend",),
    trials={"retrieval": lambda model, _: retrieval(model, pairs=8, contexts=4, mechanism=2, profile_prompts=1)},
)
