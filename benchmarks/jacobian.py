"""The Jacobian's norm at every position: ours against other ways to the same numbers, `python benchmarks/jacobian.py`."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import MIB, llama, parser, peak_of, random_tokens, ratio, section, spread, turns
from torch import Tensor

import probes

PRODUCTS = 64  # of our sketch
AT_ONCE = 8  # copies of the prompt in jacobian-lens's scheme
CHUNK = 32  # directions at a time in torch.func.jacrev
SHORT = 16  # of the prompt that loads and compiles what is loaded once
ROUNDS = {32: 2, 64: 5, 256: 3, 512: 2}  # by length: the longest takes minutes a round
EXACT, SKETCH = "ours, exact", f"ours, sketch of {PRODUCTS} products"
TEXT = (
    "One prompt of random tokens, every position's norm of the derivative of the last stream at the last position; random "
    "Llama, heads of 64, float32. The difference is that of the norms from our exact ones, the largest over positions; of "
    "the sketch the root mean square. Memory is the peak above the loaded model. jacobian-lens's scheme is written out for "
    "one target position."
)


def contenders(model: Any, tokens: Tensor) -> dict[str, Callable[[], np.ndarray]]:
    """By name, a function that gives the norm at every position, [T], up to one factor."""
    view, embedded = probes.load(model), model.model.embed_tokens(tokens)
    # Under vmap the fused kernel's backward pass is run direction by direction, with a warning; written out it is not.
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")

    def ours(**options: Any) -> np.ndarray:
        return probes.jacobian(view, tokens, **options)["sensitivity"].values[0] * model.config.hidden_size**0.5

    return {
        EXACT: ours,
        SKETCH: lambda: ours(method="sketch", products=PRODUCTS),
        f"prompt repeated {AT_ONCE} times (jacobian-lens's scheme)": lambda: replicated(model, embedded),
        f"`torch.func.jacrev`, `chunk_size={CHUNK}`": lambda: by_jacrev(eager, embedded[0]),
    }


def last_stream(model: Any, embedded: Tensor) -> Tensor:
    """What the final norm reads, [batch, T, d]."""
    stream: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, arguments: stream.append(arguments[0]))
    try:
        model.model(inputs_embeds=embedded, use_cache=False)
    finally:
        handle.remove()
    return stream[0]


def replicated(model: Any, embedded: Tensor) -> np.ndarray:
    """Gradients of as many directions at a time as there are copies of the prompt: root of their summed squares, [T]."""
    repeated = embedded.expand(AT_ONCE, -1, -1).clone().requires_grad_()
    stream = last_stream(model, repeated)
    total, width = torch.zeros(embedded.shape[1], dtype=torch.float64), embedded.shape[2]
    for start in range(0, width, AT_ONCE):
        copies = torch.arange(AT_ONCE)
        cotangent = torch.zeros_like(stream)
        cotangent[copies, -1, start + copies] = 1
        (gradient,) = torch.autograd.grad(stream, repeated, cotangent, retain_graph=start + AT_ONCE < width)
        total += gradient.square().sum((0, 2)).double()
    return total.sqrt().numpy()


def by_jacrev(model: Any, embedded: Tensor) -> np.ndarray:
    """The whole Jacobian [d, T, d], then its norms [T]."""
    jacobian: Any = torch.func.jacrev(lambda x: last_stream(model, x[None])[0, -1], chunk_size=CHUNK)(embedded)
    return jacobian.square().sum((0, 2)).sqrt().double().numpy()


def measured(width: int, blocks: int, length: int) -> list[list[str]]:
    """The rows of one length."""
    model = llama(width, blocks)
    for call in contenders(model, random_tokens(SHORT)).values():
        call()
    calls = contenders(model, random_tokens(length))
    found = {name: peak_of(call) for name, call in calls.items()}  # warms up, too
    seconds = turns(calls, ROUNDS[length])
    exact, rows = found[EXACT][0], []
    for name, (norms, peak) in found.items():
        gap = norms / exact - 1
        off = f"{np.sqrt(np.mean(gap**2)):.1%}" if name == SKETCH else f"{np.abs(gap).max():.0e}"
        times = [spread(seconds[name]), ratio(seconds[name], seconds[EXACT])]
        rows.append([f"{length:,}", name, *times, off if name != EXACT else "", f"{peak / MIB:,.0f}"])
    return rows


def main() -> None:
    """Print the section."""
    quick = parser(__doc__).parse_args().quick
    width, blocks, lengths = (128, 4, (32,)) if quick else (256, 6, (64, 256, 512))
    rows = [row for length in lengths for row in measured(width, blocks, length)]
    columns = ["T", "", "seconds", "time / ours, exact", "difference", "MiB above the model"]
    print(section("Jacobian", f"Width {width}, {blocks} blocks. {TEXT}", columns, rows))


if __name__ == "__main__":
    main()
