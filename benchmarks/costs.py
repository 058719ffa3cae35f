"""What every probe costs beside plain forward passes over the same prompts: `python benchmarks/costs.py`.

One thread; processor time of this process, which other work on the machine disturbs least; the least of three repetitions.
Ratios are to the passes of one prompt at a time that the model itself makes, without gradients. Of a model this small much
of a pass is overhead, so that ratios of probes made of large matrix products (jacobian, theory) are lower on large models.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import probes

MODEL, PROMPTS, LENGTH, REPETITIONS = "tiny-llama", 8, 128, 3
TEXT = "def area(width, height): return width *"


def seconds(call: Callable[[], Any]) -> float:
    spent = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return min(spent)


def main() -> None:
    torch.set_num_threads(1)
    model = probes.load(MODEL, device="cpu")
    tokens = probes.prompts(model, n=PROMPTS, length=LENGTH)
    few = tokens[:2]

    @torch.no_grad()
    def plain() -> None:
        for prompt in tokens:
            model.residual(model.embed(prompt[None]))

    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "jacobian, exact": (2, lambda: probes.jacobian(model, few)),
        "jacobian, sketch of 64": (2, lambda: probes.jacobian(model, few, method="sketch")),
        "jacobian, sketch of 32": (2, lambda: probes.jacobian(model, few, method="sketch", products=32)),
        "jacobian, scalar": (2, lambda: probes.jacobian(model, few, method="scalar")),
        "theory, uniform": (2, lambda: probes.theory.second_moment(model, few)),
        "theory, measured": (2, lambda: probes.theory.second_moment(model, few, attention="measured")),
        "theory, score path": (
            2,
            lambda: probes.theory.second_moment(model, few, attention="measured", score_path=True),
        ),
        "sinks, 8 keys": (PROMPTS, lambda: probes.sinks(model, tokens)),
        "sinks, 8 keys, reacts": (PROMPTS, lambda: probes.sinks(model, tokens, reacts="mean")),
        "sinks, all keys": (PROMPTS, lambda: probes.sinks(model, tokens, keys="all")),
        "trajectory": (PROMPTS, lambda: probes.trajectory(model, tokens)),
        "leakage, 400 resamples": (PROMPTS, lambda: probes.leakage(model, tokens, fresh=0)),
        "leakage, no intervals": (PROMPTS, lambda: probes.leakage(model, tokens, bootstrap=0, fresh=0)),
        "bos_swap, profile of 1": (PROMPTS, lambda: probes.bos_swap(model, tokens, profile_prompts=1)),
    }
    calls["jacobian, exact"][1]()  # compiles and allocates what the first call alone does
    per_pass = seconds(plain) / PROMPTS
    print(f"| {MODEL}, T = {LENGTH}, one thread | plain passes of a prompt |\n|---|---|")
    for name, (prompts, call) in calls.items():
        print(f"| {name} | {seconds(call) / prompts / per_pass:.1f} |", flush=True)


if __name__ == "__main__":
    main()
