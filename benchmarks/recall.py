"""Recall by depth: ours beside what one would write with transformers, `python benchmarks/recall.py [MODEL] [--pairs 12]`.

One context, every pair asked for once. Contenders: ours; a pass over the whole text per question; the context's cache, a
copy for every question. One thread; processor time of this process, which other work disturbs least; the least of
so many repetitions. Ratios are to ours, and log probabilities are compared: the largest difference.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import probes
from probes.data.recall import Maker, Rung, read_template
from probes.measures.retrieval import Asked, scores


def score(logits: torch.Tensor, answer: tuple[int, ...]) -> float:
    """Log probability of an answer from the logits that predict its tokens."""
    return float(logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].sum())


@torch.no_grad()
def plain(model: Any, context: tuple[int, ...], asked: list[Asked]) -> list[float]:
    """A pass over the whole text per question."""
    found = []
    for one in asked:
        answer = one.answers[0]
        logits = model(torch.tensor([[*context, *one.question, *answer]]), logits_to_keep=len(answer) + 1).logits[0]
        found.append(score(logits[:-1], answer))
    return found


@torch.no_grad()
def cached(model: Any, context: tuple[int, ...], asked: list[Asked]) -> list[float]:
    """The context once, its cache copied for every question."""
    cache, found = model(torch.tensor([context]), use_cache=True, logits_to_keep=1).past_key_values, []
    for one in asked:
        answer, own = one.answers[0], copy.deepcopy(cache)
        rest = torch.tensor([[*one.question, *answer]])
        logits = model(rest, past_key_values=own, logits_to_keep=len(answer) + 1).logits[0]
        found.append(score(logits[:-1], answer))
    return found


def least(call: Callable[[], Any], repetitions: int) -> tuple[float, Any]:
    """(seconds of processor time, what came out)."""
    times, found = [], None
    for _ in range(repetitions):
        began = time.process_time()
        found = call()
        times.append(time.process_time() - began)
    return min(times), found


def main() -> None:
    """Print one row per contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    view: Any = probes.load(given.model)
    couple = Maker(view, Rung(given.pairs), read_template("sentences")).couple(0, 0)
    context = couple.contexts[0]
    pairs = zip(couple.questions[0], couple.answers[0], strict=True)
    asked = [Asked(question, (answer,)) for question, answer in pairs]
    other: Any = copy.deepcopy(view._model)
    other.set_attn_implementation("sdpa")
    print(f"{given.model}, {given.pairs} pairs, context of {len(context)} tokens, {torch.__version__}, one thread\n")
    print("| contender | CPU seconds | time / ours | largest difference, nat |\n|---|---|---|---|")
    ours, mine = least(lambda: [float(log_p[0]) for log_p, _ in scores(view, context, asked)], given.repetitions)
    print(f"| ours | {ours:.3g} | 1 | |", flush=True)
    for name, call in (("a pass per question", plain), ("the cache copied for each question", cached)):
        seconds, found = least(lambda call=call: call(other, context, asked), given.repetitions)
        apart = max(abs(a - b) for a, b in zip(mine, found, strict=True))
        print(f"| {name} | {seconds:.3g} | {seconds / ours:.2g} | {apart:.1g} |", flush=True)


if __name__ == "__main__":
    main()
