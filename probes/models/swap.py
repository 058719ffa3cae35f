"""A view of a model with another embedding at position 0; the model itself stays as it is."""

from __future__ import annotations

from numbers import Integral
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from .checks import check_id
from .given import takes_model
from .initialization import CONFIG, Rule
from .view import Identity, View

KINDS = ("mean", "zero", "random")
CHOICES = f"{', '.join(KINDS)} or a token id"
EMBEDDING_NUMBERS = 1 << 22  # of embeddings averaged at a time: 16 MiB in float32, however large the vocabulary


class Swapped:
    """`View` of another view's model in which position 0 holds a replacement; see `swapped`.

    `original` is the view it was made from, `replacement` and `replacement_seed` say what stands at position 0. All else,
    `identity` included, is the original's: the weights are.
    """

    def __init__(self, model: View, replacement: Replacement, *, seed: int = 0) -> None:
        self.original: View = model.original if isinstance(model, Swapped) else model
        self.replacement: Replacement = check_replacement(self.original, replacement)
        self.replacement_seed = seed
        self.spec, self.tokenizer = model.spec, model.tokenizer
        self.device, self.dtype, self.offloaded = model.device, model.dtype, model.offloaded
        self.trace, self.residual, self.watching = model.trace, model.residual, model.watching
        self.norm, self.unembed, self.parts = model.norm, model.unembed, model.parts
        self.output_weights = model.output_weights
        self._mean: Tensor | None = None

    @property
    def identity(self) -> Identity:
        return self.original.identity

    @property
    def bos(self) -> int | None:
        return self.original.bos

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"]:
        if isinstance(self.replacement, int):  # as a token, so that positions and scales are those of any token
            tokens = tokens.clone()
            tokens[:, :1] = self.replacement
            return self.original.embed(tokens)
        embedded = self.original.embed(tokens).clone()  # views may hand out what they keep
        embedded[:, :1] = self._vectors(embedded[:, :1])
        return embedded

    def _vectors(self, own: Float[Tensor, "batch one d"]) -> Tensor:
        """What takes the place of the prompts' own embeddings at position 0; broadcasts to them."""
        if self.replacement == "zero":
            return torch.zeros_like(own)
        if self.replacement == "mean":
            self._mean = mean_embedding(self.original) if self._mean is None else self._mean
            return self._mean.to(own)
        # The same direction for every prompt and batch: the other prompts of a batch make no difference.
        generator = torch.Generator().manual_seed(self.replacement_seed)
        direction = torch.randn(own.shape[-1], generator=generator, dtype=torch.float64)
        direction = (direction / direction.norm()).to(own.device)
        return (own.double().norm(dim=-1, keepdim=True) * direction).to(own)

    def reinitialized(self, seed: int, *, positional: bool = True, initialization: Rule = CONFIG) -> Swapped:
        """Fresh weights, position 0 replaced in the same way: "mean" is the fresh embeddings' own."""
        fresh = self.original.reinitialized(seed, positional=positional, initialization=initialization)
        return Swapped(fresh, self.replacement, seed=self.replacement_seed)


@takes_model
def swapped(model: View, replacement: Replacement, *, seed: int = 0) -> Swapped:
    """The same model with a replacement at position 0, as a view that every probe can be run on.

    Args:
        model: any view; it is not changed. A view that is swapped already is swapped anew, from the original.
        replacement: a token id, which takes the place of the token that a prompt has at position 0; or what block 0 reads
            there: "mean", the mean over the vocabulary of what it reads for a token at position 0 (scale and learned
            position included); "zero"; "random", a vector of normally distributed direction, the same for all prompts,
            and of the norm that block 0 would read in that prompt.
        seed: of the random direction.

    Raises:
        InputError: no such replacement, or an id outside the vocabulary.
    """
    return Swapped(model, replacement, seed=seed)


def parse_replacement(value: str) -> Replacement:
    """Read a replacement from the command line: "mean", "zero", "random", or a token id in digits.

    Raises:
        InputError: it is none of these.
    """
    if value in KINDS:
        return value
    if value.isascii() and value.isdigit() and len(value) < 20:  # Python reads no numbers of thousands of digits
        return int(value)
    raise InputError(f"replacement '{value}' is unknown; give {CHOICES}")


def check_replacement(model: View, replacement: Any) -> Replacement:
    """The replacement as a plain integer or one of `KINDS`.

    Raises:
        InputError: neither, or an id outside the model's vocabulary.
    """
    if isinstance(replacement, str) and replacement in KINDS:
        return replacement
    if isinstance(replacement, bool) or not isinstance(replacement, Integral):
        raise InputError(f"replacement '{replacement}' is unknown; give {CHOICES}")
    check_id(model, int(replacement), "replacement id")
    return int(replacement)


def mean_embedding(model: View) -> Float[Tensor, " d"]:
    """The mean over the vocabulary of block 0's input for a token at position 0, in float64."""
    total = torch.zeros(model.spec.width, dtype=torch.float64, device=model.device)
    ids = torch.arange(model.spec.vocabulary)[:, None]
    for some in ids.split(max(1, EMBEDDING_NUMBERS // model.spec.width)):
        total += model.embed(some).double().sum((0, 1))
    return total / model.spec.vocabulary


Replacement: TypeAlias = int | str  # a token id, or one of KINDS
