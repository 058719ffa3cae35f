"""What every measure costs beside plain forward passes over the same prompts: `python benchmarks/costs.py`.

One thread; processor time of this process, which other work on the machine disturbs least; the least of three repetitions.
Ratios are to the passes of one prompt at a time that the model itself makes, without gradients. Of a model this small much
of a pass is overhead, so that ratios of measures made of large matrix products (jacobian, theory) are lower on large models.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import parser, section, turns

import probes
from probes.theory import second_moment

MODEL, PROMPTS, LENGTH, REPETITIONS = "tiny-llama", 8, 128, 3
FEW = 2  # prompts of what takes many products
CALLS: dict[str, tuple[Callable[..., Any], int, dict[str, Any]]] = {
    "jacobian, exact": (probes.jacobian, FEW, {}),
    "jacobian, sketch of 64": (probes.jacobian, FEW, {"method": "sketch"}),
    "jacobian, sketch of 32": (probes.jacobian, FEW, {"method": "sketch", "products": 32}),
    "jacobian, scalar": (probes.jacobian, FEW, {"method": "scalar"}),
    "theory, uniform": (second_moment, FEW, {}),
    "theory, measured": (second_moment, FEW, {"attention": "measured"}),
    "theory, score path": (second_moment, FEW, {"attention": "measured", "score_path": True}),
    "sinks, 8 keys": (probes.sinks, PROMPTS, {}),
    "sinks, 8 keys, reacts": (probes.sinks, PROMPTS, {"reacts": "mean"}),
    "sinks, all keys": (probes.sinks, PROMPTS, {"keys": "all"}),
    "trajectory": (probes.trajectory, PROMPTS, {}),
    "leakage, 400 resamples": (probes.leakage, PROMPTS, {"fresh": 0}),
    "leakage, no intervals": (probes.leakage, PROMPTS, {"bootstrap": 0, "fresh": 0}),
    "bos_swap, profile of 1": (probes.bos_swap, PROMPTS, {"profile_prompts": 1}),
}


def main() -> None:
    """Print the section."""
    quick = parser(__doc__).parse_args().quick
    model = probes.load(MODEL, device="cpu")
    tokens = probes.prompts(model, n=PROMPTS, length=32 if quick else LENGTH)

    @torch.no_grad()
    def plain() -> None:
        for prompt in tokens:
            model.residual(model.embed(prompt[None]))

    def seconds(call: Callable[[], Any]) -> float:
        return min(turns({"": call}, 1 if quick else REPETITIONS, time.process_time)[""])

    probes.jacobian(model, tokens[:FEW])  # compiles and allocates what the first call alone does
    per_pass, rows = seconds(plain) / PROMPTS, []
    for name, (call, prompts, options) in CALLS.items():
        spent = seconds(lambda call=call, some=tokens[:prompts], options=options: call(model, some, **options))
        rows.append([name, f"{spent / prompts / per_pass:.1f}"])
    text = f"Time of a measure for each prompt, in plain forward passes of a prompt: `{MODEL}`, T = {tokens.shape[1]}."
    print(section("Cost of every measure", text, ["measure", "plain passes of a prompt"], rows))


if __name__ == "__main__":
    main()
