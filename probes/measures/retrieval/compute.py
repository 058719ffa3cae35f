r"""What a model can retrieve: key-value recall by depth.

A context lists N pairs (`probes.data.recall`), and every pair is asked for behind it. Of the pair at depth k of context c:

- `log_p`: log of the probability of its value, summed over the value's tokens, each behind the right ones before it;
- `exact`: whether each of these is the most probable token, so that a greedy reader says the value;
- `rank`: 1 + how many of the other values are more probable; `candidates` - 1 others of the context are compared, drawn anew
  for each question (all of them where there are no more);
- `control`: `log_p` of the same question behind another context of the same shape that lacks the key; `gain` is what the
  pair adds, `log_p` - `control`.

`recall_numbers.shape` says whether recall is a U in depth, in the words of profiles (`results.ushape`): geometric means of
the value's probability over contexts, the first 5 % of the pairs and the last pair against the median of the middle half.

**Difficulty.** A model that recalls everything says as little about depth as one that recalls nothing. `pilot` contexts are
asked rung by rung of the ladder (`recall.RUNGS`), from the easiest on, until at most `EASY` of the answers are exact or the
next rung does not fit the model; that rung is measured. With `pairs`, the ladder is that of so many pairs: keys apart, keys
alike, longer values.

**Cost.** A context runs once. All questions and answers run behind its keys and values (`probes.models.behind`): a question
is a row, and the values that are compared share their beginnings in a tree. The naive way, a pass over the whole text for
each question, is what views do that cannot continue a context (`docs/probes/retrieval.md` has both costs).

Source: ours; the task is that of [Liu+], arXiv 2307.03172; science of the measurement, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ...data.prompts import FirstToken, prompts
from ...data.recall import RUNGS, Couple, Keys, Maker, Rung, read_template
from ...errors import InputError
from ...models.behind import Asked, Row, continues
from ...models.checks import not_finite
from ...models.initialization import CONFIG, Rule
from ...models.load import takes_model
from ...models.view import View
from ...results.dataset import dataset, provenance
from ...results.variables import Variable, labelled
from ...run.memory import Retry, parts
from ...run.precision import double
from ...run.progress import Progress, Tally
from ...run.store import Piece, Store
from . import mechanism as mechanisms

CONTEXTS, PILOT, CANDIDATES = 100, 8, 36
PILOT_DEPTHS = 12
EASY = 0.9  # of a rung's answers, which a harder one may still be asked
LEAST = {"contexts": 2, "candidates": 1, "pilot": 0, "orders": 1, "depths": 2, "pairs": 2, "seed": 0}
LEAST |= {"mechanism": 0, "mechanism_depths": 2, "profile_prompts": 0}
NUMBERS_AT_ONCE = 1 << 25  # logits or attention weights of the rows that run together: 128 MiB in float32
MEASURED = ("log_p", "control", "exact", "rank")
BY_DEPTH = ("context", "depth")
VARIABLES = {
    "log_p": Variable(BY_DEPTH, "log probability of the value", "nat"),
    "control": Variable(BY_DEPTH, "log probability of the value behind a context without the key", "nat"),
    "gain": Variable(BY_DEPTH, "what the pair adds to the value's log probability", "nat"),
    "exact": Variable(BY_DEPTH, "whether every token of the value is the most probable one"),
    "rank": Variable(BY_DEPTH, "rank of the value among the context's values that are compared"),
    "pilot_exact": Variable(("rung",), "share of exact answers in the pilot"),
    "pair": Variable(BY_DEPTH, "number of the pair among those of the contexts that share them"),
    "place": Variable(("depth",), "position of the value's first token", "token"),
}


Scored: TypeAlias = tuple[np.ndarray, bool]  # log probabilities [answer]; whether the first answer is the greedy one


@takes_model
def retrieval(
    model: View,
    *,
    pairs: int | None = None,
    keys: Keys | None = None,
    digits: int | None = None,
    contexts: int = CONTEXTS,
    orders: int = 1,
    depths: int | None = None,
    template: str = "sentences",
    chat: bool = False,
    first: FirstToken | int = "auto",
    candidates: int = CANDIDATES,
    pilot: int = PILOT,
    mechanism: int = 0,
    mechanism_depths: int = mechanisms.DEPTHS,
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
        pairs: of a context; with `keys` ("apart", "alike") and `digits` (of a value; 0: values are nouns) it pins the rung
            of the ladder, as far as they are given.
        contexts: how many; they come in couples that are each other's control.
        orders: so many successive couples have the same pairs, each in an order of its own.
        depths: so many of the pairs are asked for, evenly spaced, first and last among them; all if not given.
        template: "sentences", "json", "reworded" or "announced".
        chat: the list stands in the user's turn of the model's chat template, the answer in the assistant's.
        first: what stands at position 0, as in `probes.prompts`.
        candidates: values whose probabilities are compared for `rank`; 1: no comparison, which is faster.
        pilot: contexts asked on every rung while the ladder is climbed; 0, or a single rung: no pilot.
        mechanism: of so many contexts, the first ones, the value's log odds are differentiated (`mechanism`), at
            `mechanism_depths` of the depths that are asked for. One such question takes as long as a context with all its
            plain ones, or longer; 0: none.
        profile_prompts: prompts of ordinary text from which, with `mechanism`, profiles are taken; 0: no such profiles.
        initialization: what the fresh weights of `profile_init` are drawn from, as in `View.reinitialized`.
        seed: decides the contexts, and all else that is drawn.
        pieces: where what each context gave is kept for an interrupted call (`probes.run.store`); in memory unless given.
        progress: called with (questions done, questions in all); a backward pass of the mechanism counts as several.

    Returns:
        Dataset with the variables of the module's text, [context, depth], where `depth` counts pairs from 0 and `fraction`
        goes from 0 to 1; `place`, where the value stands, and the attribute `query`, the position that its first token is
        predicted at; of the rungs that were climbed `pilot_exact`; with `mechanism` the variables of
        `mechanism`, [traced, traced_depth, part], where `traced` and `traced_depth` hold numbers of contexts and
        pairs; attributes that say what made it.

    Raises:
        InputError: an option that cannot be used, no tokenizer, a context longer than the model was made for, values that
            are not finite.

    Source: see the module's text.
    """
    options: dict[str, Any] = {"contexts": contexts, "orders": orders, "depths": depths, "template": template}
    options |= {"chat": chat, "first": first, "candidates": candidates, "pilot": pilot}
    tracing: dict[str, Any] = {"mechanism": mechanism, "mechanism_depths": mechanism_depths}
    tracing |= {"profile_prompts": profile_prompts, "initialization": str(initialization)}
    check(options | tracing | {"pairs": pairs, "seed": seed})
    form, rungs = read_template(template), ladder(pairs, keys, digits)
    make = partial(Maker, model, template=form, first=first, chat=chat, orders=orders)
    report = Tally(progress, contexts * asked_depths(rungs[-1].pairs, depths).size)
    pieces = pieces or Store()
    maker, piloted = _climbed(rungs, make, pilot, partial(_Asking, model, PILOT_DEPTHS, 1, seed + 1, report, pieces))
    ask, rung = _Asking(model, depths, candidates, seed, report, pieces, maker), maker.rung
    query = len(ask.couple(0).contexts[0]) + len(ask.couple(0).questions[0][0]) - 1
    chosen = asked_depths(len(ask.depths), mechanism_depths)
    drawn = bool(mechanism and profile_prompts)
    text = prompts(model, n=profile_prompts, length=query + 1, first=first, seed=seed) if drawn else None
    report.expect(contexts * len(ask.depths) + mechanism * mechanisms.cost(len(chosen)))
    found = ask.run("contexts", contexts)
    more, missing = ask.explain(mechanism, chosen, text, initialization) if mechanism else ({}, {})
    report.finish()
    if not np.isfinite(found["log_p"]).all():
        raise not_finite(model, "probabilities")
    starts = ask.couple(0).starts
    values = found | more | {"gain": found["log_p"] - found["control"], "pilot_exact": np.array(piloted)}
    values["place"] = np.array([starts[depth][1] for depth in ask.depths])
    if candidates == 1:
        del values["rank"]
    if orders > 1:
        couples = [ask.couple(n) for n in range(contexts // 2)]
        values["pair"] = np.array([side for one in couples for side in one.pairs])[:, ask.depths]
    coords: dict[str, Any] = {
        "context": range(contexts),
        "depth": ask.depths,
        "fraction": (("depth",), ask.depths / (rung.pairs - 1)),
        "rung": [str(one) for one in rungs[: len(piloted)]],
    }
    options = rung._asdict() | options
    if mechanism:
        options |= tracing
        coords |= {"traced": range(mechanism), "traced_depth": ask.depths[chosen], "part": list(mechanisms.PARTS)}
    tokens = torch.tensor([ids for n in range(contexts // 2) for ids in ask.couple(n).contexts])
    attrs = provenance(model, tokens, measurement="retrieval", **options, seed=seed)
    attrs |= maker.policy | {"query": query} | missing
    return dataset(labelled(VARIABLES | mechanisms.VARIABLES, values), coords=coords, attrs=attrs)


def check(given: Mapping[str, Any]) -> None:
    """Refuse numbers that cannot be used.

    Raises:
        InputError: one of them is out of range, or does nothing.
    """
    for name, lowest in LEAST.items():
        if given[name] is not None and given[name] < lowest:
            raise InputError(f"{name}={given[name]} is too few; give at least {lowest}")
    orders, mechanism, candidates = (given[name] for name in ("orders", "mechanism", "candidates"))
    for name, of in {"contexts": 2 * orders, "pilot": 2, "mechanism": 2}.items():
        if given[name] % of:
            couples = "lists come in couples" + (f", each in {orders} orders" if of > 2 else "")
            raise InputError(
                f"{name}={given[name]} is no multiple of {of}: {couples}; give one, as {-(-given[name] // of) * of}"
            )
    for name, of in {"depths": "pairs", "mechanism": "contexts"}.items():
        if None not in (given[name], given[of]) and given[name] > given[of]:
            raise InputError(f"{name}={given[name]} is more than there are {of}; give at most {given[of]}")
    if mechanism and candidates < 2:
        raise InputError(f"candidates={candidates} leaves no value to compare with; give at least 2 with mechanism")
    rule = given["initialization"]
    if not mechanism and rule != CONFIG:
        raise InputError(f"initialization={rule} does nothing without mechanism; give mechanism=24, or leave it out")


def _climbed(
    rungs: Sequence[Rung], make: Callable[[Rung], Maker], pilot: int, asking: Callable[[Maker], _Asking]
) -> tuple[Maker, list[float]]:
    """What makes the lists of the rung that is measured, and the share of exact answers on every rung up to it."""
    maker, piloted = make(rungs[0]), []
    for n, rung in enumerate(rungs if len(rungs) > 1 and pilot else ()):
        try:
            maker = make(rung) if n else maker
        except InputError:  # too long for the model, or too many keys: the ladder ends below it
            break
        piloted.append(float(asking(maker).run(f"pilot {n}", pilot)["exact"].mean()))
        if piloted[-1] <= EASY:
            break
    return maker, piloted


def ladder(pairs: int | None, keys: Keys | None, digits: int | None) -> list[Rung]:
    """The rungs that are climbed, the easiest first; a single one where number, kind and digits are all given."""
    rungs = RUNGS if pairs is None else (Rung(pairs), Rung(pairs, "alike"), Rung(pairs, "alike", 8))
    chosen = [Rung(one.pairs, keys or one.keys, one.digits if digits is None else digits) for one in rungs]
    return list(dict.fromkeys(chosen))


def asked_depths(pairs: int, depths: int | None) -> np.ndarray:
    """The pairs that are asked for: all, or so many of them, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, pairs - 1, min(depths or pairs, pairs)).round().astype(int))


class _Asking:
    """Asks contexts of one rung, couple by couple."""

    def __init__(
        self,
        model: View,
        depths: int | None,
        candidates: int,
        seed: int,
        report: Tally,
        pieces: Store,
        maker: Maker,
    ) -> None:
        self.pieces = pieces
        self.model, self.maker, self.candidates, self.seed, self.report = model, maker, candidates, seed, report
        self.depths = asked_depths(maker.rung.pairs, depths)
        self.retry = Retry(f"a context of {maker.length()} tokens of '{model.identity.name}'", report)

    def couple(self, number: int) -> Couple:
        return self.maker.couple(self.seed, number)

    def run(self, stage: str, contexts: int) -> dict[str, np.ndarray]:
        """Every variable by context and depth."""
        pieces = self.pieces.each(stage, contexts // 2, lambda number: self.retry(lambda: self._piece(number)))
        return {name: pieces.stacked(name).reshape(contexts, -1) for name in MEASURED}

    def _piece(self, number: int) -> Piece:
        """Both contexts of a couple, [context, depth]: behind each run its own questions and, as controls, the other's."""
        couple, found = self.couple(number), {name: np.zeros((2, len(self.depths))) for name in MEASURED}
        asked = [self._asked(couple, number, side) for side in (0, 1)]
        count = len(self.depths)
        for side in (0, 1):
            controls = [Asked(one.question, one.answers[:1]) for one in asked[1 - side]]
            scored = scores(self.model, couple.contexts[side], [*asked[side], *controls])
            own = np.stack([log_p for log_p, _ in scored[:count]])
            found["log_p"][side], found["rank"][side] = own[:, 0], 1 + (own[:, 1:] > own[:, :1]).sum(1)
            found["exact"][side] = [greedy for _, greedy in scored[:count]]
            found["control"][1 - side] = [log_p[0] for log_p, _ in scored[count:]]
            self.report(count)
        return found

    def explain(
        self, contexts: int, chosen: np.ndarray, text: Tensor | None, initialization: Rule
    ) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """The mechanism behind the answers of these depths, by number, and profiles; attributes beside them."""
        depths = self.depths[chosen]

        def one(number: int) -> Piece:
            couple, side = self.couple(number // 2), number % 2
            every, seed = self._asked(couple, number // 2, side), [self.seed, number]
            asked = [every[n] for n in chosen]
            return mechanisms.traced(self.model, couple, side, depths, asked, seed=seed, report=self.report)

        pieces = self.pieces.each("mechanism", contexts, lambda number: self.retry(lambda: one(number)))
        names = [name for name in mechanisms.VARIABLES if name in pieces[0]]
        found = {name: pieces.stacked(name) for name in names}
        found["norm_profile"] = self.norm_profile(contexts)
        if text is None:
            return found, {}
        how: Any = {"initialization": initialization, "seed": self.seed, "pieces": self.pieces}
        curves, missing = mechanisms.profiles(self.model, text, self.couple(0), self.depths, **how)
        return found | curves, missing

    def norm_profile(self, contexts: int) -> np.ndarray:
        """`norm` by depth, behind the questions for all other depths of the first contexts."""

        def one(number: int) -> Piece:
            couple, seed = self.couple(number // 2), [self.seed, number, 1]
            return mechanisms.behind_lists(self.model, couple, number % 2, self.depths, seed=seed, report=self.report)

        pieces = self.pieces.each("behind lists", contexts, lambda number: self.retry(lambda: one(number)))
        return np.sqrt(pieces.stacked("lines").mean(0))

    def _asked(self, couple: Couple, number: int, side: int) -> list[Asked]:
        """The questions of one context, each with the values that are compared, its own first."""
        draw, answers, found = np.random.default_rng([self.seed, number, side]), couple.answers[side], []
        for depth in self.depths:
            others = draw.permutation([n for n in range(len(answers)) if n != depth])[: self.candidates - 1]
            found.append(Asked(couple.questions[side][depth], (answers[depth], *(answers[n] for n in others))))
        return found


@torch.no_grad()
def scores(model: View, context: Sequence[int], asked: Sequence[Asked]) -> list[Scored]:
    """For every question its answers' log probabilities, and whether the first is what a greedy reader says.

    Views that cannot continue a context make a plain pass over the whole text for every answer.
    """
    if not continues(model):
        return [one_by_one(model, context, one) for one in asked]
    run = model.behind(model.embed(torch.tensor([list(context)])))
    rows = [Row(one) for one in asked]
    widest = max(len(row.tokens) for row in rows)
    numbers = widest * max(model.spec.vocabulary, model.spec.heads * (len(context) + widest))
    at_once = max(1, NUMBERS_AT_ONCE // (parts() * numbers))
    found = []
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        padded = [row.padded(max(len(row.tokens) for row in some)) for row in some]
        streams = run(*(torch.stack(tensors) for tensors in zip(*padded, strict=True)))
        read = [row.log_p(model, stream) for row, stream in zip(some, streams, strict=True)]
        found += [(log_p.cpu().numpy(), greedy) for log_p, greedy in read]
    return found


@torch.no_grad()
def one_by_one(model: View, context: Sequence[int], asked: Asked) -> Scored:
    """One of `scores`, by plain passes."""
    log_p, greedy = [], False
    for n, answer in enumerate(asked.answers):
        text = torch.tensor([[*context, *asked.question, *answer]])
        stream = model.residual(model.embed(text))[0, -len(answer) - 1 : -1]
        logits = double(model.unembed(model.norm(stream))).log_softmax(-1).cpu()
        log_p.append(float(logits[torch.arange(len(answer)), torch.tensor(answer)].sum()))
        greedy = greedy or (n == 0 and logits.argmax(-1).tolist() == list(answer))
    return np.array(log_p), greedy
