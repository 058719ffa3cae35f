"""Recall by depth: ours beside what one would write with transformers, `python benchmarks/recall.py [MODEL] [--pairs 36]`.

One list, every pair asked for once. One thread; processor time of this process, which other work disturbs least. The
log probabilities are compared: the largest difference.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from common import parser, ratio, section, spread, turns
from torch import Tensor

import probes
from probes.data.recall import Maker, Rung, read_template
from probes.measures.retrieval.compute import Asked, scores


def score(logits: Tensor, answer: tuple[int, ...]) -> float:
    """Log probability of an answer from the logits [1, T, vocabulary] of a text that ends with it."""
    return float(logits[0, :-1].log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].sum())


@torch.no_grad()
def pass_per_question(model: Any, context: tuple[int, ...], questions: list[Asked]) -> list[float]:
    """A pass over the whole text per question."""
    log_p = []
    for asked in questions:
        (answer,) = asked.answers
        text = torch.tensor([[*context, *asked.question, *answer]])
        log_p.append(score(model(text, logits_to_keep=len(answer) + 1).logits, answer))
    return log_p


@torch.no_grad()
def cache_copied(model: Any, context: tuple[int, ...], questions: list[Asked]) -> list[float]:
    """The context once, its cache copied for every question."""
    cache, log_p = model(torch.tensor([context]), use_cache=True, logits_to_keep=1).past_key_values, []
    for asked in questions:
        (answer,) = asked.answers
        rest, behind = torch.tensor([[*asked.question, *answer]]), copy.deepcopy(cache)
        log_p.append(score(model(rest, past_key_values=behind, logits_to_keep=len(answer) + 1).logits, answer))
    return log_p


def main() -> None:
    """Print the section."""
    options = parser(__doc__)
    options.add_argument("model", nargs="?", help="smollm2-135m if not given; tiny-llama with --quick")
    options.add_argument("--pairs", type=int, default=12)
    given = options.parse_args()
    name = given.model or ("tiny-llama" if given.quick else "smollm2-135m")
    view: Any = probes.load(name)
    couple = Maker(view, Rung(given.pairs), read_template("sentences")).couple(0, 0)
    context = couple.contexts[0]
    pairs = zip(couple.questions[0], couple.answers[0], strict=True)
    questions = [Asked(question, (answer,)) for question, answer in pairs]
    model: Any = copy.deepcopy(view._model)
    model.set_attn_implementation("sdpa")
    calls = {
        "ours": lambda: [float(log_p[0]) for log_p, _ in scores(view, context, questions)],
        "a pass per question": lambda: pass_per_question(model, context, questions),
        "the cache copied for each question": lambda: cache_copied(model, context, questions),
    }
    log_p = {way: torch.tensor(call()) for way, call in calls.items()}  # warms up, too
    seconds, rows = turns(calls, 3, time.process_time), []
    for way, times in seconds.items():
        off = f"{float((log_p[way] - log_p['ours']).abs().max()):.1g}"
        rows.append([way, spread(times), ratio(times, seconds["ours"]), off])
    text = f"`{name}`, {given.pairs} pairs in {len(context)} tokens, every pair asked for once."
    print(section("Recall by depth", text, ["", "CPU seconds", "time / ours", "largest difference, nat"], rows))


if __name__ == "__main__":
    main()
