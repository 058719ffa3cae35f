"""Position 0 replaced: its embedding, its stream from some block on, or what others read of it alone."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..run.memory import batches
from ..run.precision import double, precise
from .ablate import check_reference
from .checks import check_id
from .edited import Change, Edited, unheard
from .load import takes_model
from .view import Edit, View

KINDS = ("mean", "zero", "random", "drawn")
CHOICES = f"{', '.join(KINDS)} or a token id"
Replacement: TypeAlias = int | str  # a token id, or one of KINDS
Part: TypeAlias = Literal["stream", "keys", "values", "both"]
PARTS: tuple[str, ...] = get_args(Part)
VALUES = ("value-mean", "value-random")
TOKENS = 100  # whose values are averaged
EMBEDDING_NUMBERS = 1 << 22  # of embeddings averaged at a time: 16 MiB in float32, however large the vocabulary


class _Other:
    """What stands at position 0 instead: a vector for prompts, as far as the dose leaves their own."""

    def __init__(
        self, model: View, replacement: Replacement, layer: int, dose: float, seed: int, reference: Any
    ) -> None:
        self.replacement, self.dose, self.seed = replacement, dose, seed
        if isinstance(replacement, int):
            self.vector = model.trace(model.embed(torch.tensor([[replacement]]))).residual[layer][0, 0]
        elif replacement == "mean" and layer:
            kept = model.spec.blocks * reference.shape[1] * model.spec.width  # by a trace
            some = batches(range(len(reference)), model, reference.shape[1], kept)
            streams = (model.trace(model.embed(reference[own])).residual[layer][:, 1:] for own in some)
            self.vector = torch.cat([double(stream).mean(1) for stream in streams]).mean(0)
        elif replacement == "mean":
            self.vector = mean_embedding(model)

    def ids(self, model: View, tokens: Int[Tensor, "batch position"]) -> Tensor:
        """Tokens: "drawn" is another one for every prompt, whatever the other prompts of its batch."""
        if isinstance(self.replacement, int):
            return torch.full_like(tokens[:, 0], self.replacement)
        seeds = [[self.seed, *row] for row in tokens.tolist()]
        return torch.tensor([int(np.random.default_rng(seed).integers(model.spec.vocabulary)) for seed in seeds])

    def embedded(self, model: View, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d"]:
        """What block 0 reads."""
        if isinstance(self.replacement, int) or self.replacement == "drawn":
            changed = tokens.clone()
            changed[:, 0] = self.ids(model, tokens)
            other = model.embed(changed)  # positions and scales are those of any token
            return other if self.dose == 1 else torch.lerp(model.embed(tokens), other, self.dose)
        embedded = model.embed(tokens).clone()  # views may hand out what they keep
        embedded[:, :1] = self(embedded[:, :1])
        return embedded

    def __call__(self, prompts: Float[Tensor, "batch one d"]) -> Float[Tensor, "batch one d"]:
        """In the place of the prompts' own vectors."""
        if self.replacement == "zero":
            other = torch.zeros_like(prompts)
        elif self.replacement == "random":
            # The same direction for every prompt and batch: the other prompts of a batch make no difference.
            generator = torch.Generator().manual_seed(self.seed)
            direction = torch.randn(prompts.shape[-1], generator=generator, dtype=torch.float64)
            direction = (direction / direction.norm()).to(precise(prompts.device))
            other = (double(prompts).norm(dim=-1, keepdim=True) * direction).to(prompts)
        else:
            other = self.vector.to(prompts).expand_as(prompts)
        return other if self.dose == 1 else torch.lerp(prompts, other, self.dose)


def _read_alone(model: View, stream: Edit, part: Part, embeddings: Float[Tensor, "batch position d"]) -> list[Edit]:
    """Edits by which other positions read keys or values of another stream at position 0, which itself stays as it is."""
    taken: dict[tuple[str, int], Tensor] = {}

    def take(site: str, layer: int, tensor: Tensor) -> Tensor:
        taken[site, layer] = tensor.detach()
        return tensor

    # Position 0 sees itself alone, so that a pass of it alone makes the keys and values that it would have had.
    wanted: Any = [site for site in ("key", "value") if part in ("both", f"{site}s")]
    layers = range(stream.layer, model.spec.blocks)
    taking = [Edit(site, layer, partial(take, site, layer)) for layer in layers for site in wanted]
    with unheard(model):
        model.residual(embeddings[:, :1], edits=[stream, *taking])

    return _given(layers, wanted, lambda site, layer, own: taken[site, layer].to(own).expand_as(own))


def _given(layers: Sequence[int], sites: Sequence[Any], other: Callable[[str, int, Tensor], Tensor]) -> list[Edit]:
    """Edits by which later positions read `other(site, block, own)` at position 0, which goes on reading its own values."""
    values: dict[int, Tensor] = {}

    def give(site: str, layer: int, tensor: Tensor) -> Tensor:
        if site == "value":
            values[layer] = tensor
        return other(site, layer, tensor)

    def keep(layer: int, output: Tensor) -> Tensor:
        return values[layer].repeat_interleave(output.shape[1] // values[layer].shape[1], 1)

    given = [Edit(site, layer, partial(give, site, layer), position=0) for layer in layers for site in sites]
    kept = [Edit("output", layer, partial(keep, layer), position=0) for layer in layers if "value" in sites]
    return [*given, *kept]


@takes_model
def revalued(
    model: View,
    how: str,
    *,
    layer: int = 0,
    seed: int = 0,
    reference: Int[Tensor, "prompt position"] | None = None,
) -> Edited:
    """The same model in which later positions read another value of position 0, with the weights that they had.

    Args:
        model: any view; it is not changed. A view that is swapped already is changed anew.
        how: "value-mean": the mean of the values that 100 tokens of `reference` would have at position 0; "value-random": a
            vector of the same norm in every prompt, of normally distributed direction, for each block and key-value head.
        layer: the first block that is changed.
        seed: of the drawn tokens and directions.
        reference: prompts whose tokens, from position 1 on, are drawn from.

    Raises:
        InputError: no such block or way, no prompts, or position 0 does not attend to itself alone.
    """
    if how not in VALUES:
        raise InputError(f"how '{how}' is unknown; give {', '.join(VALUES)}")
    model = unswapped(model)
    _check_alone(model, layer, how)
    if how == "value-mean":
        check_reference(model, reference)
    layers = range(layer, model.spec.blocks)

    def prepared(model: View) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        if how == "value-random":
            return found

        def take(layer: int, value: Tensor) -> Tensor:
            found[layer] = double(value).mean(0, keepdim=True)
            return value

        tokens: Any = reference
        drawn = np.random.default_rng(seed).choice(tokens[:, 1:].flatten().cpu(), TOKENS)
        edits = [Edit("value", layer, partial(take, layer)) for layer in layers]
        model.residual(model.embed(torch.from_numpy(drawn)[:, None]), edits=edits)
        return found

    def other(means: dict[int, Tensor], site: str, layer: int, own: Tensor) -> Tensor:
        if means:
            return means[layer].to(own).expand_as(own)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % 2**63)
        direction = torch.randn(own.shape[1:], generator=generator, dtype=torch.float64)
        direction = (direction / direction.norm(dim=-1, keepdim=True)).to(own)
        return own.norm(dim=-1, keepdim=True) * direction

    def edits(model: View, prepared: Any, embeddings: Tensor) -> list[Edit]:
        return _given(layers, ["value"], partial(other, prepared))

    return Edited(model, Change(f"{how} of position 0 from block {layer}", edits, prepared, replacement=how))


@takes_model
def swapped(
    model: View,
    replacement: Replacement,
    *,
    seed: int = 0,
    layer: int = 0,
    part: Part = "stream",
    dose: float = 1.0,
    reference: Int[Tensor, "prompt position"] | None = None,
) -> Edited:
    """The same model with a replacement at position 0, as a view that every probe can be run on.

    Args:
        model: any view; it is not changed. A view that is swapped already is swapped anew.
        replacement: a token id, which takes the place of the token that a prompt has at position 0; or what block `layer`
            reads there: "mean", the mean of what block 0 reads over the vocabulary (scale and learned position included),
            and of what later blocks read over the positions from 1 on of `reference`; "zero"; "random", a vector of normally
            distributed direction, the same for all prompts, and of the norm that the block would read in that prompt;
            "drawn", a token drawn for each prompt from the vocabulary.
        seed: of the random direction and the drawn tokens.
        layer: the block from which on position 0 is another one; before it, it is the prompt's own.
        part: "stream", all of it; or what other positions read of it alone: "keys", "values" or "both". Position 0 then
            keeps its stream, and its keys or values in the blocks from `layer` on are those that the replacement would have
            there. They are constants: no derivative passes through them.
        dose: how much of the replacement, from 0 to 1; the rest is the prompt's own vector.
        reference: prompts that "mean" is taken over from block 1 on.

    Raises:
        InputError: no such replacement, block, part or dose, an id outside the vocabulary, or no prompts for a mean; another
            part than the stream where position 0 does not attend to itself alone (a prefix, learned sink logits).
    """
    model = unswapped(model)
    replacement = check_replacement(model, replacement)
    if part not in PARTS:
        raise InputError(f"part '{part}' is unknown; give {', '.join(PARTS)}")
    if not 0 <= dose <= 1:
        raise InputError(f"dose={dose:g} is out of range; give 0 to 1")
    _check_alone(model, layer, "" if part == "stream" else f"part '{part}'")
    if replacement == "drawn" and (layer or part != "stream"):
        raise InputError(
            "replacement 'drawn' is a token for every prompt, at layer 0, part stream; give an id elsewhere"
        )
    if replacement == "mean" and layer:
        check_reference(model, reference)
    whole = part == "stream"

    def edits(model: View, other: _Other, embeddings: Tensor) -> list[Edit]:
        stream = Edit("residual", layer, other, position=0)
        return ([stream] if layer else []) if whole else _read_alone(model, stream, part, embeddings)

    def prepared(model: View) -> _Other:
        return _Other(model, replacement, layer, float(dose), seed, reference)

    share = "" if dose == 1 else f"{dose:g} of "
    usual = (layer, part, dose) == (0, "stream", 1)  # which results say as `replacement`
    said = "" if usual else f"{share}{replacement} as {part} of position 0 from block {layer}"
    embedded = None if layer or not whole else lambda model, other, tokens: other.embedded(model, tokens)
    return Edited(model, Change(said, edits, prepared, embedded, replacement))


def _check_alone(model: View, layer: int, said: str) -> None:
    """Whether a block exists and, where others alone are to read something else (`said`), position 0 sees itself alone.

    Raises:
        InputError: it does not.
    """
    if not 0 <= layer < model.spec.blocks:
        raise InputError(f"layer={layer} does not exist; the model has blocks 0 to {model.spec.blocks - 1}")
    if said and ((model.spec.prefix or 0) > 1 or model.spec.sink_logits):
        raise InputError(
            f"{said}: position 0 of {model.identity.name} shares its attention with later positions or learned sink "
            "logits, and would not keep its stream; give stream"
        )


def unswapped(model: View) -> View:
    """The same view with the model's own position 0; other changes of it stay."""
    if not (isinstance(model, Edited) and any(change.replacement is not None for change in model.changes)):
        return model
    return reduce(Edited, [change for change in model.changes if change.replacement is None], model.original)


def check_replacement(model: View, replacement: Any) -> Replacement:
    """The replacement as a plain integer or one of `KINDS`."""
    if isinstance(replacement, str) and replacement in KINDS:
        return replacement
    if isinstance(replacement, bool) or not isinstance(replacement, Integral):
        raise InputError(f"replacement '{replacement}' is unknown; give {CHOICES}")
    check_id(model, int(replacement), "replacement id")
    return int(replacement)


def mean_embedding(model: View) -> Float[Tensor, " d"]:
    """The mean over the vocabulary of block 0's input for a token at position 0, in float64."""
    total = torch.zeros(model.spec.width, dtype=torch.float64, device=precise(model.device))
    ids = torch.arange(model.spec.vocabulary)[:, None]
    for some in ids.split(max(1, EMBEDDING_NUMBERS // model.spec.width)):
        total += double(model.embed(some)).sum((0, 1))
    return total / model.spec.vocabulary
