"""Interventions by name: what `--replace`, `--ablate` and `probes.edited` take. The grammar stands in `docs/changing.md`.

A word is `WHAT@BLOCK:PART*NUMBER`, of which all but the first may be left out; words are joined by `+`.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, get_args

from jaxtyping import Int
from torch import Tensor

from ..errors import InputError, near
from .ablate import WAY, WAYS, Group, ablated, reweighed
from .edited import Edited
from .load import takes_model
from .swap import KINDS, PARTS, VALUES, Replacement, revalued, swapped
from .view import View

HEAD = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
GROUPS: tuple[str, ...] = get_args(Group)
FORM = re.compile(rf"([^@:*+]+)(?:@([0-9]{{1,5}}))?(?::({'|'.join((*PARTS, *GROUPS))}))?(?:\*([0-9]*[.]?[0-9]+))?")
CHOICES = (*KINDS, *VALUES, *WAYS)


class Word(NamedTuple):
    """One change of a model."""

    what: Replacement  # at position 0; or one of `VALUES` or `WAYS`, or a head (as "18.8") that writes nothing
    layer: int = 0
    part: str = ""  # of a replacement one of `PARTS`, of a way one of `GROUPS`
    number: float | None = None  # the dose of a replacement, the factor of a gain

    @property
    def kind(self) -> Literal["replacement", "value", "way", "head"]:
        if WAY.fullmatch(str(self.what)):
            return "way"
        return "value" if self.what in VALUES else "head" if HEAD.fullmatch(str(self.what)) else "replacement"

    def __str__(self) -> str:
        layer, part = f"@{self.layer}" if self.layer else "", f":{self.part}" if self.part else ""
        return f"{self.what}{layer}{part}{'' if self.number is None else f'*{self.number:g}'}"

    def on(self, model: View, reference: Tensor | None, seed: int) -> Edited:
        """The model so changed; heads are `Intervention`'s."""
        given: dict[str, Any] = {"layer": self.layer, "reference": reference}
        if self.kind == "way":
            group: Any = self.part or None
            return reweighed(model, str(self.what), heads=group, factor=self.number, **given)
        if self.kind == "value":
            return revalued(model, str(self.what), seed=seed, **given)
        given |= {"part": self.part or "stream", "dose": 1.0 if self.number is None else self.number}
        return swapped(model, self.what, seed=seed, **given)


class Intervention(NamedTuple):
    """What is done to a model, word by word."""

    words: tuple[Word, ...]

    @property
    def label(self) -> Replacement:
        """As results have it: a token id as a number where that is all."""
        what = self.words[0].what
        return what if self.words == (Word(what),) else str(self)

    @property
    def embeds(self) -> bool:
        """Whether block 0 reads another vector, and nothing else is changed."""
        return all(word.kind == "replacement" and (word.layer, word.part) == (0, "") for word in self.words)

    @property
    def leaks(self) -> bool:
        """Whether leakage means something: logits and denominators are still those that mask and stream make."""
        return all(word.kind != "way" or word.what == "constant-sink" for word in self.words)

    def __str__(self) -> str:
        return "+".join(map(str, self.words))

    def on(self, model: View, reference: Int[Tensor, "prompt position"] | None = None, *, seed: int = 0) -> View:
        """The model under the intervention, word after word, but heads first.

        Raises:
            InputError: as `ablated`, `swapped`, `revalued` and `reweighed`.
        """
        if heads := [parts for word in self.words if (parts := HEAD.fullmatch(str(word.what)))]:
            model = ablated(model, [(int(parts[1]), int(parts[2])) for parts in heads])
        for word in self.words:
            model = model if word.kind == "head" else word.on(model, reference, seed)
        return model


@takes_model
def edited(model: View, given: Any, *, reference: Int[Tensor, "prompt position"] | None = None, seed: int = 0) -> View:
    """The same model under an intervention by its name, as a view that every probe can be run on.

    Args:
        model: any view; it is not changed.
        given: as "released@8", "mean@4:keys", "without-0:sinks+18.8", or a token id; see `docs/changing.md`.
        reference: prompts that means are taken over.
        seed: of random directions and drawn tokens.

    Raises:
        InputError: not written as the grammar says, or as `ablated`, `swapped`, `revalued` and `reweighed`.
    """
    return intervention(given).on(model, reference, seed=seed)


def intervention(given: Any) -> Intervention:
    """An intervention from its name, or from a token id.

    Raises:
        InputError: not written as the grammar says.
    """
    if isinstance(given, Intervention):
        return given
    if not isinstance(given, str):  # a token id, or what `swapped` refuses
        return Intervention((Word(given),))
    made = Intervention(tuple(_word(one.strip(), given) for one in given.split("+")))
    if sum(word.kind in ("replacement", "value") for word in made.words) > 1:
        raise InputError(f"'{given}' puts two things at position 0; give one")
    return made


def _word(one: str, given: str) -> Word:
    """Read a word of what was given."""
    written = FORM.fullmatch(one)
    what, layer, part, number = written.groups() if written else ("", None, None, None)
    word = Word(
        what, int(layer or 0), "" if part in (None, "stream") else part, None if number is None else float(number)
    )
    right = {
        "way": part in (None, *GROUPS) and (number is None or what.startswith("gain")),
        "value": part is None and number is None,
        "head": (layer, part, number) == (None, None, None),
        "replacement": (what in KINDS or (what.isdecimal() and len(what) <= 12)) and part not in GROUPS,
    }[word.kind]
    if not right:
        raise InputError(
            f"'{given}' is no intervention{near(what or one, CHOICES)}; give one as mean, mean@4, mean:keys, 17*0.2, "
            f"without-0@8, released@8:sinks, 18.8 or released@8+zero@8:values, of {', '.join(CHOICES)}, a token id or a head"
        )
    if word.kind == "replacement":
        word = word._replace(
            what=what if what in KINDS else int(what), number=None if word.number == 1 else word.number
        )
    return word
