"""Options of pretraining, and recipes of tiny models of one shape: four bundled ones, each unlike `tiny-llama` in the one
thing it is named for, and two that differ in learned sink logits.

The shape fits all that is bundled, four trained models and three steps of one, compressed, in 12 MB. Neither torch nor
transformers is imported here: the command's help shows these options.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from probes.errors import InputError
from probes.options import argument, option

from .checks import Settings, above_zero

CONTEXT = 256  # long enough for a middle that is neither primacy nor recency, short enough for two CPU cores
VOCABULARY = 1024  # at about 3 characters a token, 256 tokens are some 800 characters: several functions of code

SHAPE: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,  # twice the width, not 8/3: seven checkpoints have to fit in 12 MB
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    vocab_size=VOCABULARY,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Recipe:
    """One model: what to build, whether windows start with BOS, and which steps to keep."""

    model_type: str
    difference: str  # for `training.json`
    bos: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    keep_steps: tuple[int, ...] = (0,)
    bundled: bool = True


# gpt-oss's attention in tiny-llama: no window, no biases, the usual RoPE, and one expert, which is a plain feed-forward
# (of gpt-oss's kind, clamped). Its window has to be a number, which no block uses.
SINK_LOGITS: dict[str, Any] = dict(
    head_dim=32,
    attention_bias=False,
    sliding_window=CONTEXT,
    layer_types=["full_attention"] * SHAPE["num_hidden_layers"],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    num_local_experts=1,
    num_experts_per_tok=1,
)

RECIPES: Mapping[str, Recipe] = {
    "tiny-llama": Recipe(
        "llama",
        "standard RoPE, BOS first in every window; the model the others are compared with",
        keep_steps=(0, 100, 300, 1000),  # before, during and after the loss's first fall
    ),
    "tiny-llama-ntk": Recipe(
        "llama",
        "RoPE scaled by wavelength (llama3 type): long wavelengths stretched 8 times, short ones kept",
        config={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": CONTEXT // 8,
            }
        },
    ),
    "tiny-mistral-window": Recipe(
        "mistral",
        "sliding-window attention over the last 32 positions, an eighth of the context, in every block",
        config={"sliding_window": CONTEXT // 8},
    ),
    "tiny-qwen2": Recipe(
        "qwen2",
        "no BOS, as in Qwen2 checkpoints: position 0 holds ordinary text (and q, k, v have biases, zero at step 0)",
        bos=False,
    ),
    "tiny-sink-logits": Recipe(
        "gpt_oss",
        "learned sink logits in every head, beside tiny-no-sink-logits, which differs in nothing else",
        config=SINK_LOGITS,
        keep_steps=(0, 100, 300, 1000),
        bundled=False,
    ),
    "tiny-no-sink-logits": Recipe(
        "gpt_oss",
        "no learned sink logits (held where they weigh nothing), beside tiny-sink-logits, which differs in nothing else",
        config=SINK_LOGITS | {"sink_logits": False},
        keep_steps=(0, 100, 300, 1000),
        bundled=False,
    ),
}


def recipe_config(recipe: Recipe) -> Any:
    """The recipe's transformers config."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[recipe.model_type](**(SHAPE | dict(recipe.config)))


@dataclass(frozen=True)
class Options(Settings):
    """How to train; all of it enters the fingerprint that a resumed run must match."""

    LEAST: ClassVar = {"length": 2}
    steps: int = option("Updates of the weights.", 2400)
    batch: int = option("Windows per step.", 16)
    length: int = option("Tokens per window.", CONTEXT)
    peak_lr: float = option("Learning rate after warm-up; it decays to a tenth.", 3e-3)
    warmup: int = option("Steps of linear warm-up.", 100)
    # Decay is known to help sinks form [Gu, section 4].
    weight_decay: float = option("Weight decay of AdamW, on matrices only.", 0.1)
    clip: float = option("Largest norm of the gradient.", 1.0)
    seed: int = option("Decides the initial weights and the order of the data.", 0)
    compute: Literal["float32", "bfloat16"] = option("Weights stay float32; bfloat16 is autocast.", "float32")
    bos: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("peak_lr", "clip"):
            above_zero(name, getattr(self, name))

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine decay to a tenth of the peak at the last step."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        fraction = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * fraction)))


@dataclass(frozen=True, kw_only=True)
class Pretraining(Options):
    """What `headwater pretrain` takes, and `toy.pretrain.run`."""

    recipe: str | None = argument(f"One of {', '.join(RECIPES)}.")
    out: Path = option("New or empty folder; an unfinished run in it is continued.", ...)
    config: Path | None = option("Instead of a recipe: a transformers config.json.")
    text: Path | None = option(
        "Train on a text file, .jsonl file or folder of them; on the standard library of this Python if none is given."
    )
    dataset: str | None = option("Train on a dataset: owner/name, owner/name:config, or a parquet or JSON file.")
    split: str | None = option("Split of the dataset; 'train' if not given.")
    column: str | None = option("Column of the dataset that holds the text; 'text' if not given.")
    characters: int | None = option("Characters of the dataset to read; 50 million if not given.")
    heldout_characters: int = option("Text kept out of training, for validation.", 240_000)
    keep_steps: str | None = option("Steps whose weights are kept, as in 0,100; the recipe's own if not given.")
    save_every: int = option("Steps between the states that a run resumes from.", 200)
    bos: bool | None = option(  # type: ignore[assignment]
        "Start windows with BOS; if not given, as the recipe says, or yes for a config.", None, "--bos/--no-bos"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto: cuda if there is one.", "auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.recipe is None) == (self.config is None):
            given = "neither" if self.recipe is None else f"both '{self.recipe}' and '{self.config}'"
            raise InputError(f"{given} given; give a recipe ({', '.join(RECIPES)}) or --config FILE")
        if self.recipe is not None and self.recipe not in RECIPES:
            raise InputError(f"recipe '{self.recipe}' is unknown; choose one of {', '.join(RECIPES)}")

    @property
    def row(self) -> Recipe:
        """The recipe; of a config one that says nothing."""
        return Recipe("", "") if self.recipe is None else RECIPES[self.recipe]

    def training(self) -> Options:
        """How to train."""
        values: dict[str, Any] = {of.name: getattr(self, of.name) for of in fields(Options)}
        values["bos"] = self.row.bos if self.bos is None else self.bos
        return Options(**values)

    def kept(self) -> list[int]:
        """The steps whose weights are kept; those of a recipe as far as training goes."""
        if self.keep_steps is None:
            return [step for step in self.row.keep_steps if step < self.steps]
        try:
            return [int(part) for part in self.keep_steps.split(",")]
        except ValueError:
            raise InputError(
                f"keep-steps '{self.keep_steps}' is not a list of steps; give whole numbers, as in 0,100"
            ) from None
