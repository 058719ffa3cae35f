"""What fresh weights are drawn from: a rule that gives each kind of matrix its standard deviation.

Rules are listed in `docs/models.md`, "Fresh weights". A published one gives deviations for any model's depth and width.
Entries are independent, normal and of mean zero under every rule here; no recipe that could be read truncates the normal
(Qwen2.5's program is not public). Biases start at zero and norm weights at one.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import InputError

KINDS = ("embedding", "positions", "q", "k", "v", "o", "gate", "up", "down", "unembedding")
CONFIG = "config"  # the rule that is used unless another is given
ASSUMED = "initializer_range_assumed"  # set on a configuration whose file holds no initializer range
# Streams much smaller than the norms' epsilon (1e-6 to 1e-5 of the variance) are no longer normalized; a hundred times the
# usual 0.02, attention has long picked a single key everywhere.
SMALLEST, LARGEST = 1e-6, 10.0


@dataclass(frozen=True)
class Initialization:
    """Standard deviations of fresh weights by kind of matrix, under a name that results and captions have.

    `embedding` is that of the matrix as it is stored, before a family scales what it looks up; `unembedding` counts only
    where it is a matrix of its own, `positions` only where positions are learned, `gate` only in gated feed-forwards.

    Raises:
        InputError: a deviation that is not between `SMALLEST` and `LARGEST`.
    """

    name: str
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
        return self.name


Rule: TypeAlias = str | int | float | Initialization


def by_depth(sigma: float, blocks: int, **others: float) -> dict[str, float]:
    """One deviation, but what writes to the residual stream, twice per block, is divided by sqrt(2L): GPT-2's scheme."""
    into_stream = sigma / math.sqrt(2 * blocks)
    return dict.fromkeys(KINDS, sigma) | {"o": into_stream, "down": into_stream} | others


def published(blocks: int, width: int) -> dict[str, tuple[str, dict[str, float]]]:
    """The rules that models' makers published: where, and the deviations for a model of that depth and width.

    nanotron's RandomInit draws embeddings and column-parallel matrices (q, k, v, gate, up, unembedding) with
    `init_method.std` and row-parallel ones (output, down) with std / sqrt(2L). GPT-2's 1/sqrt(2L) is in the paper (Radford
    et al. 2019, section 2.3), the rest in the program. Pythia's are GPT-NeoX's "small_init" (Nguyen and Salazar, arXiv
    1910.05895) and, into the stream, "wang_init" (GPT-J). Gemma's is not known to us: the 0.02 of its config.json is
    transformers' default, and its makers' library (google-deepmind/gemma, gm/nn) draws by flax's, which is 0.01.
    """
    smollm2 = "huggingface/smollm, config_smollm2_{}.yaml; huggingface/nanotron, StandardParametrizator"
    small_init, wang_init = math.sqrt(2 / (5 * width)), 2 / (blocks * math.sqrt(width))
    pythia = dict.fromkeys(KINDS, small_init) | {"o": wang_init, "down": wang_init}
    qwen = "Qwen/Qwen2.5-0.5B, config.json; the training program is not public"
    return {
        "smollm2-135m": (smollm2.format("135M"), by_depth(1 / 24, blocks)),
        "smollm2-360m": (smollm2.format("360M"), by_depth(0.03227, blocks)),
        "smollm2-1.7b": (smollm2.format("1B"), by_depth(0.02, blocks)),
        "qwen2.5": (qwen, dict.fromkeys(KINDS, 0.02)),
        "gpt2": ("openai/gpt-2, src/model.py, and the paper", by_depth(0.02, blocks, positions=0.01)),
        "pythia": ("EleutherAI/pythia, models/*.yml; EleutherAI/gpt-neox, init_functions.py", pythia),
    }


PUBLISHED = tuple(published(1, 1))


def resolve(rule: Rule, blocks: int, width: int) -> Initialization:
    """What a rule means for a model of that depth and width, unless it is "config" (see `fresh.initialization_of`)."""
    if isinstance(rule, Initialization):
        return rule
    if isinstance(rule, str) and rule in PUBLISHED:
        source, deviations = published(blocks, width)[rule]
        return Initialization(f"{rule} (published: {source})", **deviations)
    return Initialization(f"uniform {rule}", **dict.fromkeys(KINDS, _number(rule)))


def check_rule(rule: Rule) -> None:
    """Refuse a rule that no model could be drawn by, before a model is loaded."""
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
