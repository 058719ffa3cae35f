r"""What a model can retrieve: key-value recall by depth.

A context lists N pairs (`probes.data.recall`), and every pair is asked for behind it. Of the pair at depth k of context c:

- `log_p`: log of the probability of its value, summed over the value's tokens, each behind the right ones before it;
- `exact`: whether each of these is the most probable token, so that a greedy reader says the value;
- `rank`: 1 + how many of the other values are more probable; beside the value itself `candidates` - 1 others of the context
  are compared, drawn anew for each context (all of them where there are no more);
- `control`: `log_p` of the same question behind another context of the same shape that lacks the key; `gain` is what the pair
  adds, `log_p` - `control`.

**Difficulty.** A model that recalls everything says as little about depth as one that recalls nothing. `pilot` contexts are
asked rung by rung of the ladder (`recall.RUNGS`), from the easiest on, until at most `EASY` of the answers are exact; that
rung is measured. With `pairs`, the ladder is that of so many pairs: keys apart, keys alike, longer values.

**Cost.** A context runs once. All questions and answers run behind its keys and values (`probes.models.behind`): a question is
a row, and the values that are compared share their beginnings in a tree. The naive way, a pass over the whole text for each
question, costs about N times as much. Views that cannot continue a context go the naive way.

Source: ours; the task is that of [Liu+], arXiv 2307.03172; science of the measurement, section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from ..data.prompts import FirstToken
from ..data.recall import RUNGS, Couple, Keys, Maker, Rung, read_template
from ..errors import InputError
from ..models.behind import Continues
from ..models.checks import not_finite
from ..models.given import takes_model
from ..models.view import View
from ..results.dataset import dataset, provenance
from ..results.variables import Variable, labelled
from ..run.memory import Retry, parts
from ..run.reporting import Progress, Report
from ..run.resume import Piece, each

CONTEXTS, PILOT, CANDIDATES = 100, 8, 36
EASY = 0.9  # of a rung's answers, which a harder one may still be asked
NUMBERS_AT_ONCE = 1 << 25  # logits or attention weights of the rows that run together: 128 MiB in float32
BY_DEPTH = ("context", "depth")
VARIABLES = {
    "log_p": Variable(BY_DEPTH, "log probability of the value", "nat"),
    "control": Variable(BY_DEPTH, "log probability of the value behind a context without the key", "nat"),
    "gain": Variable(BY_DEPTH, "what the pair adds to the value's log probability", "nat"),
    "exact": Variable(BY_DEPTH, "whether every token of the value is the most probable one"),
    "rank": Variable(BY_DEPTH, "rank of the value among the context's values that are compared"),
    "pilot_exact": Variable(("rung",), "share of exact answers in the pilot"),
    "pilot_log_p": Variable(("rung",), "mean log probability of the value in the pilot", "nat"),
    "place": Variable(("depth",), "position of the value's first token", "token"),
    "line": Variable(("depth",), "position of the first token of the pair's line", "token"),
}


@dataclass(frozen=True)
class Asked:
    """One question behind a context: its ids, and the answers that are scored, the right one first."""

    question: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@takes_model
def retrieval(
    model: View,
    *,
    pairs: int | None = None,
    keys: Keys | None = None,
    digits: int | None = None,
    contexts: int = CONTEXTS,
    depths: int | None = None,
    template: str | Path = "sentences",
    chat: bool = False,
    first: FirstToken | int = "auto",
    candidates: int = CANDIDATES,
    pilot: int = PILOT,
    seed: int = 0,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Ask for every pair of lists of pairs: what a model recalls by the depth at which it stands.

    Args:
        model: any view; it is not changed. One that can continue a context (a transformers model) takes a small part of
            the time.
        pairs: of a context; with `keys` ("apart", "alike") and `digits` (of a value) it pins the rung of the ladder, as far
            as they are given.
        contexts: how many; they come in couples that are each other's control.
        depths: so many of the pairs are asked for, evenly spaced, first and last among them; all if not given.
        template: "sentences", "json", or a TOML file (`recall.read_template`).
        chat: the list stands in the user's turn of the model's chat template, the answer in the assistant's.
        first: what stands at position 0, as in `probes.prompts`.
        candidates: values whose probabilities are compared for `rank`; 1: no comparison, which is faster.
        pilot: contexts asked on every rung while the ladder is climbed; 0, or a single rung: no pilot.
        seed: decides the contexts.
        progress: called with (questions done, questions in all).

    Returns:
        Dataset with the variables of the module's text, [context, depth], where `depth` counts pairs from 0 and `fraction`
        goes from 0 to 1; `place`, where the value stands, and the attribute `query`, the position that its first token is
        predicted at; of the rungs that were climbed `pilot_exact` and `pilot_log_p`; attributes that say what made it.

    Raises:
        InputError: an option that cannot be used, no tokenizer, a context longer than the model was made for, values that
            are not finite.

    Source: see the module's text.
    """
    for name, value, least in (("contexts", contexts, 2), ("candidates", candidates, 1), ("pilot", pilot, 0)):
        if value < least:
            raise InputError(f"{name}={value} is too few; give at least {least}")
    if contexts % 2 or pilot % 2:
        raise InputError(f"contexts={contexts}, pilot={pilot}: contexts come in couples; give even numbers")
    if seed < 0:
        raise InputError(f"seed={seed} is negative; give 0 or more")
    if depths is not None and depths < 2:
        raise InputError(f"depths={depths} is too few; give at least 2, or leave it out")
    form = read_template(template)
    rungs = ladder(pairs, keys, digits)
    makers = [Maker(model, rungs[0], form, first=first, chat=chat)]
    report = Report(progress, contexts * asked_depths(rungs[-1].pairs, depths).size)
    ask = _Asking(model, makers[0], depths, candidates, seed, report)
    piloted: list[tuple[float, float]] = []
    if len(rungs) > 1 and pilot:
        for n, rung in enumerate(rungs):
            if n:
                makers.append(Maker(model, rung, form, first=first, chat=chat))
            found = _Asking(model, makers[-1], PILOT_DEPTHS, 1, seed + 1, report).run(f"pilot {n}", pilot)
            piloted.append((float(found["exact"].mean()), float(found["log_p"].mean())))
            if piloted[-1][0] <= EASY:
                break
        ask = _Asking(model, makers[-1], depths, candidates, seed, report)
    report.expect(contexts * len(ask.depths))
    found = ask.run("contexts", contexts)
    report.finish()
    if not np.isfinite(found["log_p"]).all():
        raise not_finite(model, "probabilities")
    maker, starts = makers[-1], ask.couple(0).starts
    rung = maker.rung
    values = found | {
        "gain": found["log_p"] - found["control"],
        "pilot_exact": np.array([exact for exact, _ in piloted]),
        "pilot_log_p": np.array([log_p for _, log_p in piloted]),
        "line": np.array([starts[d][0] for d in ask.depths]),
        "place": np.array([starts[d][1] for d in ask.depths]),
    }
    if candidates == 1:
        del values["rank"]
    query = len(ask.couple(0).contexts[0]) + len(ask.couple(0).questions[0][0]) - 1
    options = {"pairs": rung.pairs, "keys": rung.keys, "digits": rung.digits, "contexts": contexts, "depths": depths}
    options |= {"template": str(template), "chat": chat, "first": first, "candidates": candidates, "pilot": pilot}
    coords: dict[str, Any] = {
        "context": range(contexts),
        "depth": ask.depths,
        "fraction": (("depth",), ask.depths / (rung.pairs - 1)),
        "rung": [str(one) for one in rungs[: len(piloted)]],
    }
    tokens = torch.tensor([ids for n in range(contexts // 2) for ids in ask.couple(n).contexts])
    attrs = provenance(model, tokens, measurement="retrieval", **options, seed=seed)
    return dataset(labelled(VARIABLES, values), coords=coords, attrs=attrs | maker.policy | {"query": query})


PILOT_DEPTHS = 12


def ladder(pairs: int | None, keys: Keys | None, digits: int | None) -> list[Rung]:
    """The rungs that are climbed, the easiest first; a single one where number, kind and digits are all given.

    Raises:
        InputError: numbers out of range.
    """
    if pairs is not None and pairs < 2:
        raise InputError(f"pairs={pairs} is too few; give at least 2")
    if digits is not None and not 2 <= digits <= 15:
        raise InputError(f"digits={digits} is out of range; give 2 to 15")
    rungs = RUNGS if pairs is None else (Rung(pairs), Rung(pairs, "alike"), Rung(pairs, "alike", 8))
    chosen = [Rung(one.pairs, keys or one.keys, digits or one.digits) for one in rungs]
    return list(dict.fromkeys(chosen))


def asked_depths(pairs: int, depths: int | None) -> np.ndarray:
    """The pairs that are asked for: all, or so many of them, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, pairs - 1, min(depths or pairs, pairs)).round().astype(int))


class _Asking:
    """Asks contexts of one rung, couple by couple."""

    def __init__(
        self, model: View, maker: Maker, depths: int | None, candidates: int, seed: int, report: Report
    ) -> None:
        self.model, self.maker, self.candidates, self.seed, self.report = model, maker, candidates, seed, report
        self.depths = asked_depths(maker.rung.pairs, depths)
        self.retry = Retry(f"a context of {maker.length()} tokens of '{model.identity.name}'", report)

    def couple(self, number: int) -> Couple:
        return self.maker.couple(self.seed, number)

    def run(self, stage: str, contexts: int) -> dict[str, np.ndarray]:
        """Every variable by context and depth."""
        pieces = each(stage, contexts // 2, lambda number: self.retry(lambda: self._piece(number)))
        return {name: pieces.stacked(name).reshape(contexts, -1) for name in ("log_p", "control", "exact", "rank")}

    def _piece(self, number: int) -> Piece:
        """Both contexts of a couple, [context, depth]."""
        couple, rows = self.couple(number), []
        for side in (0, 1):
            draw = np.random.default_rng([self.seed, number, side])
            asked, answers = [], couple.answers[side]
            for depth in self.depths:
                others = draw.permutation([n for n in range(len(answers)) if n != depth])[: self.candidates - 1]
                compared = (answers[depth], *(answers[n] for n in others))
                asked.append(Asked(couple.questions[side][depth], compared))
            own, exact = scores(self.model, couple.contexts[side], asked)
            alone = [Asked(one.question, one.answers[:1]) for one in asked]
            control, _ = scores(self.model, couple.contexts[1 - side], alone)
            rank = 1 + (own[:, 1:] > own[:, :1]).sum(1)
            rows.append({"log_p": own[:, 0], "control": control[:, 0], "exact": exact.astype(float), "rank": rank})
            self.report(len(asked))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@torch.no_grad()
def scores(
    model: View, context: Sequence[int], asked: Sequence[Asked]
) -> tuple[Float[np.ndarray, "question answer"], Bool[np.ndarray, " question"]]:
    """Log probabilities of every answer behind context and question, and whether the first is what a greedy reader says.

    All questions must have one length, and all answers.
    """
    embedded = model.embed(torch.tensor([list(context)]))
    if not isinstance(model, Continues):
        return one_by_one(model, context, asked)
    run = model.behind(embedded)
    rows = [_Row(one) for one in asked]
    widest = max(len(row.tokens) for row in rows)
    numbers = widest * max(model.spec.vocabulary, model.spec.heads * (len(context) + widest))
    at_once = max(1, NUMBERS_AT_ONCE // (parts() * numbers))
    log_p, exact = [], []
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        padded = [row.padded(max(len(row.tokens) for row in some)) for row in some]
        streams = run(*(torch.stack(tensors) for tensors in zip(*padded, strict=True)))
        for row, stream in zip(some, streams, strict=True):
            found, greedy = row.read(model, stream)
            log_p.append(found)
            exact.append(greedy)
    return np.stack(log_p), np.array(exact)


def one_by_one(
    model: View, context: Sequence[int], asked: Sequence[Asked]
) -> tuple[Float[np.ndarray, "question answer"], Bool[np.ndarray, " question"]]:
    """`scores` by a plain pass over the whole text for every answer."""
    log_p, exact = [], []
    for one in asked:
        found = []
        for n, answer in enumerate(one.answers):
            text = [*context, *one.question, *answer]
            stream = model.residual(model.embed(torch.tensor([text])))[0, -len(answer) - 1 : -1]
            logits = model.unembed(model.norm(stream)).double().log_softmax(-1).cpu()
            at = torch.arange(len(answer))
            found.append(float(logits[at, torch.tensor(answer)].sum()))
            if n == 0:
                exact.append(logits.argmax(-1).tolist() == list(answer))
        log_p.append(found)
    return np.array(log_p), np.array(exact)


class _Row:
    """A question and the tree of its answers: every beginning of an answer that another token follows is one node."""

    def __init__(self, asked: Asked) -> None:
        self.asked, count = asked, len(asked.question)
        self.tokens, self.parents = list(asked.question), [*range(-1, count - 1)]
        nodes: dict[tuple[int, ...], int] = {(): count - 1}
        for answer in asked.answers:
            for n in range(1, len(answer)):
                if answer[:n] not in nodes:
                    nodes[answer[:n]] = len(self.tokens)
                    self.tokens.append(answer[n - 1])
                    self.parents.append(nodes[answer[: n - 1]])
        self.nodes = nodes

    def padded(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, places, seen); what is filled up sees itself alone and is read by nobody."""
        places, seen = torch.zeros(size, dtype=torch.long), torch.eye(size, dtype=torch.bool)
        for n, parent in enumerate(self.parents):
            if parent >= 0:
                places[n] = places[parent] + 1
                seen[n] |= seen[parent]
        tokens = torch.zeros(size, dtype=torch.long)
        tokens[: len(self.tokens)] = torch.tensor(self.tokens)
        return tokens, places, seen

    def read(self, model: View, stream: Float[Tensor, "token d"]) -> tuple[Float[np.ndarray, " answer"], bool]:
        """Log probabilities of the answers, and whether the first is the greedy one, from the row's streams."""
        start = len(self.asked.question) - 1
        logits = model.unembed(model.norm(stream[start : len(self.tokens)])).log_softmax(-1, dtype=torch.float64)
        at = [[self.nodes[answer[:n]] - start for n in range(len(answer))] for answer in self.asked.answers]
        picked = logits[torch.tensor(at), torch.tensor(self.asked.answers)]  # [answer, token]
        best = logits[torch.tensor(at[0])].argmax(-1).tolist()
        return picked.sum(-1).cpu().numpy(), best == list(self.asked.answers[0])
