"""The Jacobian norm, exact and sketched, against three other ways to it.

All but TransformerLens's tool give ||dh/dx_j||_F of one prompt, h the last stream at the last position and x_j the
embedding at j:

- jacobian-lens's scheme, written out here: the prompt repeated once per output direction of a batch, one forward pass that
  records the graph, one backward pass per batch of directions (8 in its default; 32, too).
- `torch.func.jacrev` with a chunk size over the transformers model as a function of its embeddings.

TransformerLens's `JacobianLens.fit` computes something else: for a source block l the d x d matrix

    J_l = mean over source positions t of  sum over target positions t' >= t of  dh_{t'} / dx_{l+1, t},

all targets at once and sources averaged, so that sensitivities of single positions cannot be had from it. Its cost is that
of the first scheme: a forward pass and d / 8 backward passes over the blocks above l, here all but block 0. What can be
compared is time per (prompt, block, direction); the two mean the same for prompts of two tokens with the second left out,
where their numbers are held against each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from harness import Headline, Job, Row, Rows, Section, Settings, middle, ratios, spread, table
from machine import MIB, Memory, out_of_memory, seconds_of, turns
from models import HEAD_WIDTH, made, random_tokens
from torch import Tensor
from transformers import AutoTokenizer

import probes
from probes.models.huggingface import shadow
from probes.models.linear import LinearizedBlock
from probes.models.load import CHECKPOINTS

TITLE = "Jacobian"
PRODUCTS = 64  # of the sketch, its default
ACCURACY = 0.02  # asked for with products="auto"
CHUNK = 32  # of jacrev: as fast as any here
SHORT = 8  # of the prompt, and directions, that are run before anything is measured
AT_ONCE = 16  # directions, where not all are taken
ROUNDS, SPEND = 5, 40.0  # rounds wanted, and seconds of one size within which they are begun
NAMES = {
    "exact": "ours, exact",
    "sketch": f"ours, sketch, {PRODUCTS} products",
    "auto": f'ours, sketch, `products="auto"`, {ACCURACY:.0%}',
    "replicated 8": "prompt repeated 8 times (jacobian-lens's scheme)",
    "replicated 32": "prompt repeated 32 times",
    "jacrev": f"`torch.func.jacrev`, `chunk_size={CHUNK}`",
    "lens": "TransformerLens `JacobianLens.fit`, `dim_batch=8`; another quantity, see above",
}
SAME = ("replicated 8", "replicated 32", "jacrev")  # that give the same numbers as ours


def jobs(settings: Settings) -> list[Job]:
    """One job of several sizes; `directions` where not all d are taken."""
    if settings.cuda:
        points = {
            "Qwen2.5-0.5B shape, bf16, T = 512": {"size": "0.5B", "length": 512},
            "Qwen2.5-0.5B shape, bf16, T = 4,096": {"size": "0.5B", "length": 4096, "directions": 64},
            "Qwen2.5-7B shape, bf16, T = 4,096": {"size": "7B", "length": 4096, "directions": 64},
        }
    elif settings.quick:
        points = {
            f"width 128, 4 blocks, T = {length}": {"width": 128, "blocks": 4, "length": length} for length in (32, 64)
        }
    else:
        points = {
            f"width 256, 6 blocks, T = {n}": {"width": 256, "blocks": 6, "length": n} for n in (64, 128, 256, 512)
        }
    return [Job("jacobian", "all", points)]


def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    for label, point in job.points.items():
        yield label, _row(point, settings)


def _row(point: dict[str, Any], settings: Settings) -> Row:
    device, length = settings.device, point["length"]
    model = made(point, device)
    view = probes.load(model)
    width, blocks = view.spec.width, view.spec.blocks
    directions = point.get("directions", width)
    tokens = random_tokens(1, length, device=device)
    for call in _calls(model, view, tokens[:, :SHORT], SHORT).values():
        call()  # what is loaded once is then no contender's memory
    probes.jacobian(view, tokens[:, :SHORT])
    spent: list[float] = []
    calls = _calls(model, view, tokens, directions, spent)
    found: dict[str, Tensor] = {}
    row: Row = {"above": {}, "gap": {}, "lost": {}, "width": width, "blocks": blocks, "directions": directions}
    first: dict[str, float] = {}
    for name, call in calls.items():
        memory = Memory(device)
        try:
            first[name] = seconds_of(lambda name=name, call=call: found.update({name: call()}), device)
            row["above"][name] = memory.above()
        except (RuntimeError, MemoryError) as error:
            asked = out_of_memory(error)
            if asked is None:
                raise
            row["lost"][name] = f"memory{asked and ', ' + asked}"
    truth = found["exact"]
    for name in found:
        if name != "lens":
            row["gap"][name] = _gap(found[name], truth, largest=name in SAME)
    if "auto" in found:
        row["auto products"] = spent[-1]
    if "lens" in found and not settings.cuda:
        row["gap"]["lens"] = _two_tokens(point, view, model)
    survived = {name: calls[name] for name in first}
    spend = SPEND if not settings.quick else 3.0
    row["seconds"] = turns(survived, rounds=ROUNDS, device=device, spend=spend, first=first)
    return row


def _gap(squared: Tensor, truth: Tensor, *, largest: bool) -> float:
    """Relative difference of the norms over positions: the largest, or (of estimates) the root mean square."""
    gap = (squared.double().cpu() / truth.double().cpu()).sqrt() - 1
    return float(gap.abs().max() if largest else gap.square().mean().sqrt())


def _calls(
    model: Any, view: Any, tokens: Tensor, directions: int, spent: list[float] | None = None
) -> dict[str, Callable[[], Tensor]]:
    """By name: a function that gives ||J_j||_F^2 [T] over so many directions (the lens: its matrix).

    The sketch that goes on until it is accurate appends to `spent` how many products that took.
    """
    whole = directions == view.spec.width

    def ours(**options: Any) -> Tensor:
        ds = probes.jacobian(view, tokens, **options)
        if options.get("products") == "auto" and spent is not None:
            spent.append(float(ds["products"].mean()))
        return torch.from_numpy(np.asarray(ds["sensitivity"].values[0], dtype=np.float64) ** 2 * view.spec.width)

    found: dict[str, Callable[[], Tensor]] = {"exact": ours if whole else lambda: products(view, tokens, directions)}
    if whole:
        found["sketch"] = lambda: ours(method="sketch", products=PRODUCTS)
        found["auto"] = lambda: ours(method="sketch", products="auto", relative_error=ACCURACY)
    embedded = view.embed(tokens).detach()
    found["replicated 8"] = lambda: replicated(model, embedded, directions, 8)
    found["replicated 32"] = lambda: replicated(model, embedded, directions, 32)
    # Under vmap the fused kernel's backward pass is run direction by direction, with a warning; written out it is not.
    eager: Any = shadow(model)
    eager.set_attn_implementation("eager")
    found["jacrev"] = lambda: by_jacrev(eager, embedded[0], directions)
    if whole:
        found["lens"] = lens(model, tokens.shape[1])
    return found


def products(view: Any, tokens: Tensor, directions: int) -> Tensor:
    """What our exact one does, for the first directions alone: sum of the products' squared norms, [T]."""
    trace = view.trace(view.embed(tokens))
    blocks = [
        LinearizedBlock(view.parts(layer), trace.residual[layer], trace.rotary[layer])
        for layer in range(view.spec.blocks)
    ]
    length, width = tokens.shape[1], view.spec.width
    total = torch.zeros(length, dtype=torch.float64, device=tokens.device)
    identity = torch.eye(width, dtype=view.dtype, device=tokens.device)[:directions]
    for some in identity.split(AT_ONCE):
        flow, first = some[:, None, None, :], length - 1
        for block in reversed(blocks):
            flow, first = block.vjp(flow, first), None
        total += flow.float().pow(2).sum((0, 1, 3)).double()
    return total.cpu()


def _last_stream(model: Any, embedded: Tensor) -> Tensor:
    """What the final norm reads, [batch, position, d]."""
    last: dict[str, Tensor] = {}
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.update(stream=args[0]))
    try:
        model.model(inputs_embeds=embedded, use_cache=False)
    finally:
        handle.remove()
    return last["stream"]


def replicated(model: Any, embedded: Tensor, directions: int, batch: int) -> Tensor:
    """jacobian-lens's scheme for one target position: sum over directions of the gradients' squared norms, [T]."""
    repeated = embedded.expand(batch, -1, -1).clone().requires_grad_()
    stream = _last_stream(model, repeated)
    total = torch.zeros(embedded.shape[1], dtype=torch.float64, device=embedded.device)
    for start in range(0, directions, batch):
        rows = torch.arange(min(batch, directions - start), device=embedded.device)
        cotangent = torch.zeros_like(stream)
        cotangent[rows, -1, start + rows] = 1
        more = start + batch < directions
        (gradient,) = torch.autograd.grad(stream, repeated, cotangent, retain_graph=more)
        total += gradient.float().pow(2).sum((0, 2)).double()
    return total.cpu()


def by_jacrev(model: Any, embedded: Tensor, directions: int) -> Tensor:
    """The whole Jacobian [direction, T, d], then its norms [T]."""

    def function(x: Tensor) -> Tensor:
        return _last_stream(model, x[None])[0, -1, :directions]

    whole: Any = torch.func.jacrev(function, chunk_size=CHUNK)(embedded)
    return whole.float().pow(2).sum((0, 2)).double().cpu()


def lens(model: Any, length: int) -> Callable[[], Tensor]:
    """TransformerLens's own tool on this model: source block 0, nothing skipped, one prompt of text of `length` tokens."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.tools.analysis import JacobianLens

    alone: Any = shadow(model)
    alone.set_attn_implementation("eager")
    # Its ids are below 1,024, those of the text below the model's vocabulary: see `_fitting`.
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny-llama")
    bridge = build_bridge_from_module(
        alone, type(model).__name__, hf_config=alone.config, tokenizer=tokenizer, model_name="random"
    )
    text = _fitting(tokenizer, model.config.vocab_size, length)
    options: dict[str, Any] = {"source_layers": [0], "dim_batch": 8, "skip_first_positions": 0, "show_progress": False}

    def fit() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that bfloat16 is coarse
            found = JacobianLens.fit(bridge, [text], corpus="random", max_seq_len=length, **options)
        return found.jacobians[0]

    return fit


def _fitting(tokenizer: Any, vocabulary: int, length: int) -> str:
    """A text of at least `length` tokens, all of which the model has."""
    text = "the same words again, "
    ids = tokenizer(text * length)["input_ids"]
    if len(ids) < length or max(ids) >= vocabulary:
        raise SystemExit(f"the tokenizer gives {len(ids)} ids up to {max(ids)}; the model has {vocabulary}")
    return text * length


def _two_tokens(point: dict[str, Any], view: Any, model: Any) -> float:
    """Relative difference between the lens and our sensitivity where both mean the same: two tokens, the first's own."""
    matrix = lens(model, 2)().double()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny-llama")
    ids = tokenizer(_fitting(tokenizer, model.config.vocab_size, point["length"]))["input_ids"]
    first = [tokenizer.bos_token_id] if ids[0] != tokenizer.bos_token_id else []
    tokens = torch.tensor([[*first, *ids][:2]])
    own = probes.jacobian(view, tokens, query=0, from_layer=1)["sensitivity"].values[0, 0]
    return float(abs(matrix.norm() / view.spec.width**0.5 / own - 1))


# -------------------------------------------------------------------------------------------------------------- page


def _per_direction(name: str, row: Row) -> float:
    """Seconds for each direction and block, on the median."""
    blocks = row["blocks"] - (name == "lens")
    return middle(row["seconds"][name]) / (row["directions"] * blocks)


def section(rows: Rows, settings: Settings) -> Section:
    (job,) = jobs(settings)
    lines = [
        "One prompt, every position's norm of the derivative of the last stream at the last position. Time against ours, "
        "exact: medians (quartiles) of the rounds' ratios, above 1 where ours is faster. The difference is that of the "
        "norms, the largest over positions, for sketches the root mean square: what they are off by. jacobian-lens's "
        "scheme is written out for one target position (`benchmarks/jacobian.py`).",
        "",
        "TransformerLens's `JacobianLens.fit` computes a d x d matrix per source block: the derivatives of *all* later last "
        "streams summed, averaged over source positions. No position's sensitivity can be had from it, but it makes "
        "products of the same kind: compared is time per (block, direction), from the output of block 0 on. Its number is "
        "held against ours where both mean the same (two tokens, the first one's own path).",
    ]
    headlines: list[Headline] = []
    for label, row in rows.of(job).items():
        part = "" if row["directions"] == row["width"] else f", {row['directions']} of {row['width']:,} directions"
        body = []
        for name, said in NAMES.items():
            if name in row["lost"]:
                body.append([said, f"did not survive ({row['lost'][name]})", "", "", ""])
            elif name in row["seconds"]:
                times = spread(row["seconds"][name])
                body.append([said, times, _against(name, row), _off(name, row), f"{row['above'][name] / MIB:,.0f}"])
        columns = ["", "seconds", "time / ours, exact", "difference", "MiB above the model"]
        lines += ["", f"### {label}{part}", "", *table(columns, body)]
        headlines = _headlines(f"{label}{part}", row)  # those of the largest size that was measured
    if rows.of(job):
        lines += ["", f"![Jacobian: time against our exact one](benchmarks/{settings.figure('jacobian')})"]
    weights = "Random weights, bfloat16" if settings.cuda else f"Random Llama, heads of {HEAD_WIDTH}, float32"
    return Section(headlines, [*lines, "", f"{weights}."])


def against_exact(name: str, row: Row) -> list[float]:
    """Time of a way over ours, round by round; of the lens once, per direction and block."""
    if name == "lens":
        return [_per_direction(name, row) / _per_direction("exact", row)]
    return ratios(row["seconds"][name], row["seconds"]["exact"])


def _against(name: str, row: Row) -> str:
    said = spread(against_exact(name, row), ".2f")
    return "1" if name == "exact" else said + " per (block, direction)" * (name == "lens")


def _off(name: str, row: Row) -> str:
    if name == "exact" or name not in row["gap"]:
        return ""
    shown = f"{row['gap'][name]:{'.1%' if name in ('sketch', 'auto') else '.0e'}}"
    return shown + (f", {row['auto products']:.0f} products" if name == "auto" else "")


def _headlines(label: str, row: Row) -> list[Headline]:
    seconds = {name: middle(times) for name, times in row["seconds"].items()}
    exact, found = seconds["exact"], []
    best = min((name for name in ("replicated 8", "replicated 32") if name in seconds), key=lambda name: seconds[name])
    for name in (best, "jacrev"):
        if name in seconds:
            what = f"exact Jacobian norm, {label}: time against {NAMES[name]}"
            found.append(Headline(what, f"{exact:.3g} s", f"{seconds[name]:.3g} s", _against(name, row)))
    if "lens" in seconds:
        ours, other = (_per_direction(name, row) * 1e3 for name in ("exact", "lens"))
        what = "a product per block and direction: time against TransformerLens's Jacobian lens"
        found.append(Headline(what, f"{ours:.2g} ms", f"{other:.2g} ms", f"{other / ours:.2f}"))
    if "sketch" in seconds:
        gain = spread(ratios(row["seconds"]["exact"], row["seconds"]["sketch"]), ".2f")
        what = f"sketch of {PRODUCTS} products, {row['gap']['sketch']:.1%} off: time against our exact one"
        found.append(Headline(what, f"{seconds['sketch']:.3g} s", f"{exact:.3g} s", gain))
    return found
