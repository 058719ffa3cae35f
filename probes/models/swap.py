"""Position 0 replaced: its embedding, its stream from some block on, or what others read of it alone.

`headwater bos-swap --replace` takes interventions by name: a replacement ("mean", "zero", "random", "drawn", a token id), if
wanted with `@BLOCK` (from which block on), `:PART` (keys, values, both) and `*DOSE`, in this order, as in "mean@4",
"mean:keys", "17@8:both*0.2"; or one of `WAYS`, if wanted with `@BLOCK`, as in "without-0@8".
"""

from __future__ import annotations

import re
from functools import partial, reduce
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..run.memory import batches
from ..run.precision import double, precise
from .ablate import Weights, reweighed
from .checks import check_id
from .edited import Change, Edited, unheard
from .load import takes_model
from .view import Edit, View

KINDS = ("mean", "zero", "random", "drawn")
CHOICES = f"{', '.join(KINDS)} or a token id"
Replacement: TypeAlias = int | str  # a token id, or one of KINDS
Part: TypeAlias = Literal["stream", "keys", "values", "both"]
PARTS: tuple[str, ...] = get_args(Part)
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

    values: dict[int, Tensor] = {}  # position 0's own, which it goes on reading itself

    def give(site: str, layer: int, tensor: Tensor) -> Tensor:
        if site == "value":
            values[layer] = tensor
        return taken[site, layer].to(tensor).expand_as(tensor)

    def keep(layer: int, output: Tensor) -> Tensor:
        return values[layer].repeat_interleave(output.shape[1] // values[layer].shape[1], 1)

    given = [Edit(site, layer, partial(give, site, layer), position=0) for layer in layers for site in wanted]
    kept = [Edit("output", layer, partial(keep, layer), position=0) for layer in layers if "value" in wanted]
    return [*given, *kept]


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
    if not 0 <= layer < model.spec.blocks:
        raise InputError(f"layer={layer} does not exist; the model has blocks 0 to {model.spec.blocks - 1}")
    if part not in PARTS:
        raise InputError(f"part '{part}' is unknown; give {', '.join(PARTS)}")
    if not 0 <= dose <= 1:
        raise InputError(f"dose={dose:g} is out of range; give 0 to 1")
    if part != "stream" and ((model.spec.prefix or 0) > 1 or model.spec.sink_logits):
        raise InputError(
            f"part '{part}': position 0 of {model.identity.name} shares its attention with later positions or learned sink "
            "logits, and would not keep its stream; give stream"
        )
    if replacement == "drawn" and (layer or part != "stream"):
        raise InputError(
            "replacement 'drawn' is a token for every prompt, at layer 0, part stream; give an id elsewhere"
        )
    if replacement == "mean" and layer and reference is None:
        raise InputError(
            f"the mean of what block {layer} reads is taken over prompts; give reference=probes.prompts(model)"
        )
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


def unswapped(model: View) -> View:
    """The same view with the model's own position 0; other changes of it stay."""
    if not (isinstance(model, Edited) and any(change.replacement is not None for change in model.changes)):
        return model
    return reduce(Edited, [change for change in model.changes if change.replacement is None], model.original)


def parse_replacement(value: str, choices: str = CHOICES) -> Replacement:
    """Read a replacement from the command line: one of `KINDS`, or a token id; `choices` is what an error names."""
    if value in KINDS:
        return value
    if value.isdecimal() and len(value) <= 12:  # Python reads no numbers of thousands of digits
        return int(value)
    raise InputError(f"replacement '{value}' is unknown; give {choices}")


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


# ----------------------------------------------------------------------------------------------------------------- names

WAYS: tuple[Weights, ...] = get_args(Weights)
FORM = re.compile(rf"([^@:*]+)(?:@([0-9]{{1,5}}))?(?::({'|'.join(PARTS)}))?(?:\*([0-9]*[.]?[0-9]+))?")


class Intervention(NamedTuple):
    """What is done at position 0; `what` is a replacement or one of `WAYS`."""

    what: Replacement
    layer: int = 0
    part: str = "stream"
    dose: float = 1.0

    @property
    def label(self) -> Replacement:
        """As results have it: the replacement itself where that is all."""
        plain = self == Intervention(self.what)
        return str(self) if not plain else self.what if isinstance(self.what, str) else int(self.what)

    @property
    def embeds(self) -> bool:
        """Whether block 0 reads another vector, and nothing else is changed."""
        return self.what not in WAYS and (self.layer, self.part) == (0, "stream")

    def __str__(self) -> str:
        layer, part = f"@{self.layer}" if self.layer else "", "" if self.part == "stream" else f":{self.part}"
        return f"{self.what}{layer}{part}{'' if self.dose == 1 else f'*{self.dose:g}'}"

    def on(self, model: View, reference: Int[Tensor, "prompt position"], *, seed: int = 0) -> Edited:
        """The model under the intervention; means are taken over `reference`."""
        if self.what in WAYS:
            return reweighed(model, self.what, layer=self.layer, reference=reference)
        options: dict[str, Any] = {"layer": self.layer, "part": self.part, "dose": self.dose}
        return swapped(model, self.what, seed=seed, reference=reference, **options)


def intervention(given: Any) -> Intervention:
    """An intervention from its name, or from a replacement alone."""
    if isinstance(given, Intervention):
        return given
    if not isinstance(given, str):  # a token id, or what `swapped` refuses
        return Intervention(given)
    written = FORM.fullmatch(given.strip())
    if written is None or (written[1] in WAYS and (written[3] or written[4])):  # they act on weights
        raise InputError(f"'{given}' is no replacement; give one as mean, mean@4, mean:keys, 17*0.2 or without-0@8")
    name, layer, part, dose = written.groups()
    what = name if name in WAYS else parse_replacement(name, f"{CHOICES}, or {', '.join(WAYS)}")
    return Intervention(what, int(layer or 0), part or "stream", float(dose or 1))
