"""What fresh weights are drawn from: a rule that gives each kind of matrix its standard deviation.

A rule is one of these: "config", the model's configuration as transformers reads it; a number, the same deviation
for every matrix ("0.02", "1/24"); or the name of a rule that a model's makers published (`PUBLISHED`). A published rule
can be applied to any model: it gives deviations for that depth and width. In Python an `Initialization` of your own
works, too.

Entries are independent, normal and of mean zero under every rule here; no recipe that could be read truncates the normal
(Qwen2.5's program is not public). Biases start at zero and norm weights at one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from ..errors import InputError

KINDS = ("embedding", "positions", "q", "k", "v", "o", "gate", "up", "down", "unembedding")
CONFIG = "config"  # the rule that is used unless another is given
ASSUMED = "initializer_range_assumed"  # set on a configuration whose file holds no initializer range
# Streams much smaller than the norms' epsilon (1e-6 to 1e-5 of the variance) are no longer normalized; a hundred times the
# usual 0.02, attention has long picked a single key everywhere.
SMALLEST, LARGEST = 1e-6, 10.0

Standing = Literal["published", "config", "default", "given"]


@dataclass(frozen=True)
class Initialization:
    """Standard deviations of fresh weights by kind of matrix, with where they come from.

    `embedding` is that of the matrix as it is stored, before a family scales what it looks up; `unembedding` counts only
    where it is a matrix of its own, `positions` only where positions are learned, `gate` only in gated feed-forwards.
    `standing` says whether the rule was published for a model, is what the configuration itself says, is the library's
    default because the configuration says nothing, or was given by the caller. As text it is what results and captions say.

    Raises:
        InputError: a deviation that is not between `SMALLEST` and `LARGEST`.
    """

    name: str
    standing: Standing
    source: str
    embedding: float
    positions: float
    q: float
    k: float
    v: float
    o: float
    gate: float
    up: float
    down: float
    unembedding: float

    def __post_init__(self) -> None:
        for kind in KINDS:
            deviation = getattr(self, kind)
            if not SMALLEST <= deviation <= LARGEST:  # nor NaN
                raise InputError(
                    f"initialization '{self.name}' has deviation {deviation:g} ({kind}); "
                    f"give a number from {SMALLEST:g} to {LARGEST:g}, as 0.02 or 1/24"
                )

    def __str__(self) -> str:
        if self.standing == "published":
            return f"{self.name} (published: {self.source})"
        return self.name if self.standing == "given" else self.source


Rule: TypeAlias = str | int | float | Initialization
Scheme: TypeAlias = Callable[[int, int], dict[str, float]]  # (blocks, width) -> deviation by kind


def by_depth(sigma: float, **others: float) -> Scheme:
    """One deviation, but what writes to the residual stream, twice per block, is divided by sqrt(2L): GPT-2's scheme."""

    def scheme(blocks: int, width: int) -> dict[str, float]:
        into_stream = sigma / math.sqrt(2 * blocks)
        return dict.fromkeys(KINDS, sigma) | {"o": into_stream, "down": into_stream} | others

    return scheme


def _small_and_wang(blocks: int, width: int) -> dict[str, float]:
    """GPT-NeoX's "small_init" (Nguyen and Salazar, arXiv 1910.05895) and, into the stream, "wang_init" (GPT-J)."""
    into_stream = 2 / (blocks * math.sqrt(width))
    return dict.fromkeys(KINDS, math.sqrt(2 / (5 * width))) | {"o": into_stream, "down": into_stream}


class Published(NamedTuple):
    """A rule that a model's makers published, and where."""

    source: str
    scheme: Scheme


# nanotron's RandomInit draws embeddings and column-parallel matrices (q, k, v, gate, up, unembedding) with `init_method.std`
# and row-parallel ones (output, down) with std / sqrt(2L).
_SMOLLM2 = "huggingface/smollm, config_smollm2_{}.yaml; huggingface/nanotron, StandardParametrizator"

PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "smollm2-135m": Published(_SMOLLM2.format("135M"), by_depth(1 / 24)),
        "smollm2-360m": Published(_SMOLLM2.format("360M"), by_depth(0.03227)),
        "smollm2-1.7b": Published(_SMOLLM2.format("1B"), by_depth(0.02)),
        "qwen2.5": Published(
            "Qwen/Qwen2.5-0.5B, config.json; the training program is not public",
            lambda blocks, width: dict.fromkeys(KINDS, 0.02),
        ),
        # 1/sqrt(2L) is in the paper (Radford et al. 2019, section 2.3), the rest in the program.
        "gpt2": Published("openai/gpt-2, src/model.py, and the paper", by_depth(0.02, positions=0.01)),
        "pythia": Published("EleutherAI/pythia, models/*.yml; EleutherAI/gpt-neox, init_functions.py", _small_and_wang),
    }
)


def resolve(rule: Rule, blocks: int, width: int) -> Initialization:
    """What a rule means for a model of that depth and width, unless it is "config" (see `fresh.initialization_of`).

    Raises:
        InputError: no such rule, or a number that is no usable deviation.
    """
    if isinstance(rule, Initialization):
        return rule
    if isinstance(rule, str) and rule in PUBLISHED:
        source, scheme = PUBLISHED[rule]
        return Initialization(rule, "published", source, **scheme(blocks, width))
    return Initialization(f"uniform {rule}", "given", "the caller", **dict.fromkeys(KINDS, _number(rule)))


def check_rule(rule: Rule) -> None:
    """Refuse a rule that no model could be drawn by, before a model is loaded.

    Raises:
        InputError: as `resolve` does.
    """
    if rule != CONFIG:
        resolve(rule, 1, 1)


def _number(rule: object) -> float:
    """A deviation from a number, or from a number or a fraction as text."""
    parts = rule.split("/") if isinstance(rule, str) else [rule]
    try:
        if isinstance(rule, bool) or len(parts) > 2:
            raise ValueError
        above, below = float(parts[0]), float(parts[1]) if len(parts) == 2 else 1.0  # type: ignore[arg-type]
        return above / below
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise InputError(
            f"initialization '{rule!s:.40}' is no rule; give {CONFIG}, a deviation as 0.02 or 1/24, "
            f"or a published rule ({', '.join(PUBLISHED)})"
        ) from None
