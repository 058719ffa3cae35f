"""What a measurement will take, said before it begins: memory above the loaded model at its peak.

Memory is counted from shapes (`probes.models.memory`) and held to 25 % by `benchmarks/planner.py` on its models. Time
is measured (`probes.run.progress`); from here it has the sizes of units against each other (`weight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..errors import InputError
from ..measures.effect import LOGITS_AT_ONCE, ROWS, passes_in_all
from ..measures.estimators import KEPT_BYTES
from ..measures.forms import NUMBERS_AT_ONCE, OF_LAGS, OF_QUERIES
from ..measures.jacobian import PRODUCTS
from ..measures.leakage import LAGS
from ..measures.nulls import fresh_prompts
from ..measures.samples import TOKENS_AT_ONCE, blocks_of
from ..measures.trajectory import BITS
from ..models.fused import BLOCK_NUMBERS
from ..models.memory import Pace, Sizes, paced, weights_of
from ..models.pullback import FROZEN, Pathway
from ..models.view import View
from ..run.memory import available
from ..run.spool import GPU_SHARE, HELD

Name: TypeAlias = Literal["jacobian", "theory", "sinks", "trajectory", "leakage", "bos-swap"]
PROBES: tuple[Name, ...] = ("jacobian", "theory", "sinks", "trajectory", "leakage", "bos-swap")
MIB, GIB = 1 << 20, 1 << 30
KEPT_FREE = 1.3  # resident against living bytes: what the allocator keeps of tensors that are gone, as measured
KEPT_FREE_IN_STAGES = 2.4  # the same of leakage, whose stages make tensors of many sizes
# Forward passes that a prompt costs, about, as measured on small models and SmolLM2; of a Jacobian, per product. They only
# weigh units against each other, until the clock has seen them.
PASSES = {"product": 2.0, "sinks": 1.2, "trajectory": 2.5, "leakage": 4.0, "bos-swap": 10.0}
KERNEL_PASSES = {"config": 0.0, "uniform": 4.0, "values": 5.0, "score_path": 10.0}


@dataclass(frozen=True)
class Plan:
    """An estimate. `memory` is bytes at the peak above the loaded model, of a process that is warm; `weights` the model's.

    `chunk` and `keep` are how a Jacobian would be taken (`probes.models.memory.Pace`); None for the other probes.
    """

    probe: Name
    memory: int
    weights: int
    chunk: int | None = None
    keep: bool | None = None
    effects: float = 0.0  # forward passes that the heads' effects take

    def line(self, name: str) -> str:
        """One line for the terminal."""
        how = ""
        if self.chunk is not None:
            kept = "" if self.keep else ", blocks made again for each"
            how = f", {self.chunk} direction{'s' * (self.chunk > 1)} at once{kept}"
        if self.effects:
            how = f", effects of heads as long as {self.effects:,.0f} forward passes"
        return f"{name}: about {_bytes(self.memory)} above the model's {_bytes(self.weights)}{how}"


def plan(
    model: View,
    prompts: int,
    length: int,
    probe: Name,
    **options: Any,
) -> Plan:
    """Estimate what `probe` takes on so many prompts of so many positions.

    Args:
        model: any view.
        prompts: how many.
        length: positions per prompt.
        probe: "jacobian", "theory", "sinks", "trajectory", "leakage" or "bos-swap".
        options: of the probe, as far as they matter here: `method`, `products`, `pathway`, `chunk` (jacobian, theory),
            `keys`, `reacts`, `effect`, `effect_prompts` (sinks), `lags`, `bootstrap` (leakage, bos-swap), `fresh` (leakage).

    Raises:
        InputError: no such probe.
    """
    if probe not in PROBES:
        raise InputError(f"probe '{probe}' does not exist; use {', '.join(PROBES)}")
    sizes, weights = Sizes.of(model), weights_of(model)
    pace: Pace | None = None
    effects = 0.0
    if probe in ("jacobian", "theory"):
        pace = paced(model, length)
        if options.get("chunk"):
            pace = Pace(int(options["chunk"]), pace.keep)
        memory = _jacobian(sizes, length, pace, options)
        if probe == "theory":
            memory = max(memory, _theory(sizes, length))
    elif probe == "sinks":
        effects = passes_in_all(model, prompts, **options)
        every, twice = options.get("keys") == "all", options.get("reacts") is not None
        memory = _forward(sizes, length) * (1 + twice) + _patterns(sizes, length) * max(every, twice)
        if effects:  # a block's heads at once, all streams, and logits with their logarithms and products
            rows = min(sizes.heads, max(1, ROWS // length))
            streams = (2 * sizes.blocks + rows) * length * sizes.width * sizes.itemsize
            memory = max(memory, _forward(sizes, length) * rows + streams + 4 * 8 * LOGITS_AT_ONCE)
    elif probe == "trajectory":
        sorted_ = 32 * length * sizes.width + (8 << BITS) * (sizes.blocks + 1)  # magnitudes with places; histograms
        memory = _forward(sizes, length) + round(KEPT_FREE * sorted_)
    else:
        memory = _leakage(model, sizes, prompts, length, options)
        if probe == "leakage" and (fresh := fresh_prompts(model, options.get("fresh"), prompts)):
            memory = max(memory, weights + _leakage(model, sizes, fresh, length, options))  # the second copy goes first
        if probe == "bos-swap":
            memory = max(memory, _jacobian(sizes, length, paced(model, length), options))
    return Plan(probe, memory, weights, pace and pace.chunk, None if pace is None else pace.keep, effects)


def operations(model: View, length: int) -> float:
    """Of a forward pass on one prompt: what models are weighed by."""
    sizes = Sizes.of(model)
    rows = sizes.width * (2 * sizes.queries + 2 * sizes.keys + sizes.first + sizes.features)
    return 2.0 * sizes.blocks * length * (rows + length * sizes.queries)


def jacobian_passes(width: int, options: Mapping[str, Any]) -> float:
    """Forward passes that the Jacobian of a prompt costs, about; options as of `plan`."""
    return 1 + PASSES["product"] * _products(width, options) * len(FROZEN[options.get("pathway") or "total"])


# ------------------------------------------------------------------------------------------------------------ memory


def _products(width: int, options: Mapping[str, Any]) -> int:
    """Directions per prompt, by the options of a Jacobian; of "auto" those it begins with."""
    products = options.get("products")
    most = products if isinstance(products, int) else PRODUCTS
    return {"exact": width, "scalar": 1}.get(str(options.get("method", "sketch")), most)


def _jacobian(sizes: Sizes, length: int, pace: Pace, options: Mapping[str, Any]) -> int:
    """Bytes."""
    method = options.get("method", "sketch")
    pathway: Pathway = options.get("pathway") or "total"
    count = _products(sizes.width, options)
    chunk, flows = min(pace.chunk, count), len(FROZEN[pathway])
    one = length * sizes.width * sizes.itemsize  # a stream, or a cotangent at every position
    streams = (sizes.blocks + 1) * one
    if sizes.apart:
        kept = sizes.linearized(length) * (sizes.blocks if pace.keep else 1)
        passing = max(sizes.making(length), chunk * sizes.product(length) + (flows - 1) * chunk * one)
        folded = sizes.blocks * sizes.folded()
    else:  # the module's own graph
        kept, folded = 0, 0
        graph = 10 * sizes.width + 4 * (sizes.queries + sizes.keys) + 4 * sizes.features
        passing = chunk * graph * length * sizes.itemsize
    # What arrives: as it is, side by side, squared; of probes all that were pulled, for pairs, and doubles of one chunk.
    arrived = 3 * chunk * one
    if method == "sketch":
        probes = max(8, count - int(0.625 * count))
        each = 4 * length * sizes.width
        arrived = 2 * chunk * one + 16 * chunk * length * sizes.width + min(KEPT_BYTES, probes * each)
    return round(KEPT_FREE * (folded + streams + kept + max(passing, arrived)))


def _theory(sizes: Sizes, length: int) -> int:
    """Bytes of the kernel: a few T x T matrices in double precision, and every head's pattern."""
    patterns = (2 * sizes.heads + 8) * length * length * 4 + 6 * length * length * 8
    return sizes.blocks * sizes.folded() + (sizes.blocks + 1) * length * sizes.width * sizes.itemsize + patterns


def _forward(sizes: Sizes, length: int) -> int:
    """Bytes of a forward pass without gradients: streams before and after, and the wider of attention and feed-forward."""
    attention = 2 * (sizes.queries + 2 * sizes.keys) + 3 * sizes.queries
    feed = (3 if sizes.gated else 2) * sizes.features
    return round(KEPT_FREE * (5 * sizes.width + max(attention, feed)) * length * sizes.itemsize)


def _patterns(sizes: Sizes, length: int) -> int:
    """Bytes of a block of queries' patterns, of which three are alive."""
    rows = max(1, min(length, BLOCK_NUMBERS // (sizes.heads * length)))
    return round(KEPT_FREE * 3 * 4 * sizes.heads * rows * length)


def _leakage(model: View, sizes: Sizes, prompts: int, length: int, options: dict[str, Any]) -> int:
    """Bytes: what three spools hold, and the most that a pass, a chunk's logits or the resamples take beside them."""
    lags = options.get("lags")
    count = len(lags) if isinstance(lags, (tuple, list)) else len(LAGS)
    everything, half = prompts * length, -(-prompts // 2)
    kept = available(model.device) // GPU_SHARE if model.device.type == "cuda" else HELD
    samples = (
        8 * sizes.heads * (count + 6)
    )  # of a position: logits at the lags, three log Z, two parts, the means by lag
    pairs = (2 * sizes.queries + sizes.heads) * sizes.itemsize
    spools = sum(min(kept, everything * row) for row in (sizes.width * sizes.itemsize, pairs, samples))
    chunk = min(max(1, TOKENS_AT_ONCE // length), half)
    passing = _forward(sizes, chunk * length) / KEPT_FREE
    # The logits of a half's prompts, as far as they are held; of a chunk's block seven, as it is, in doubles, turned round
    # and with its rows shifted; what is read.
    blocks, held = blocks_of([chunk] * (half // chunk) + [half % chunk] * (half % chunk > 0), sizes.heads, 1, length)
    rows = max(end - start for start, end in blocks)
    block = 4 * chunk * sizes.heads * rows * length
    logits = chunk * length * (pairs + samples) + 7 * block + (half * block // chunk if held else block)
    # Rows of the quantities that are drawn from, of prompts or resamples: made, joined and made even.
    draws = 1 + int(options.get("bootstrap", 400))
    row = 2 * max(1, length // 2) * (len(OF_LAGS) * count + len(OF_QUERIES)) * sizes.heads
    drawn = 3 * 8 * min(NUMBERS_AT_ONCE, min(half, draws) * row) + 2 * draws * prompts
    return round(KEPT_FREE_IN_STAGES * (spools + max(passing, logits, drawn)))


def _bytes(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{max(1, round(size / MIB))} MiB"
