"""Interventions at position 0 by their name, as `headwater bos-swap --replace` takes them.

A name is a replacement ("mean", "zero", "random", "drawn", a token id), if wanted with `@BLOCK` (from which block on),
`:PART` (keys, values, both) and `*DOSE`, in this order, as in "mean@4", "mean:keys", "17@8:both*0.2"; or one of `WAYS`, if
wanted with `@BLOCK`, as in "without-0@8".
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

from jaxtyping import Int
from torch import Tensor

from ..errors import InputError
from .ablate import Weights, reweighed
from .edited import Edited
from .swap import CHOICES, PARTS, Replacement, parse_replacement, swapped
from .view import View

WAYS: tuple[Weights, ...] = get_args(Weights)
FORM = re.compile(r"([^@:*]+?) *(?:@ *([^@:*]+?))? *(?:: *([^@:*]+?))? *(?:\* *([^@:*]+?))?")


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

    def __str__(self) -> str:
        layer, part = f"@{self.layer}" if self.layer else "", "" if self.part == "stream" else f":{self.part}"
        return f"{self.what}{layer}{part}{'' if self.dose == 1 else f'*{self.dose:g}'}"

    def on(self, model: View, reference: Int[Tensor, "prompt position"], *, seed: int = 0) -> Edited:
        """The model under the intervention; means are taken over `reference`.

        Raises:
            InputError: as `swapped` and `reweighed`.
        """
        if self.what in WAYS:
            return reweighed(model, self.what, layer=self.layer, reference=reference)
        options: dict[str, Any] = {"layer": self.layer, "part": self.part, "dose": self.dose}
        return swapped(model, self.what, seed=seed, reference=reference, **options)


def intervention(given: Any) -> Intervention:
    """An intervention from its name, or from a replacement alone.

    Raises:
        InputError: not written as the module says.
    """
    if isinstance(given, Intervention):
        return given
    if not isinstance(given, str):  # a token id, or what `swapped` refuses
        return Intervention(given)
    written = FORM.fullmatch(given.strip())
    if written is None:
        raise InputError(f"'{given}' is no replacement; give one as mean, mean@4, mean:keys, 17*0.2 or without-0@8")
    name, layer, part, dose = (
        group or usual for group, usual in zip(written.groups(), ("", "0", "stream", "1"), strict=True)
    )
    if not (layer.isascii() and layer.isdigit() and len(layer) < 6):
        raise InputError(f"'{given}': block '{layer}' does not exist; give a number, as in mean@4")
    if name in WAYS:
        if written[3] or written[4]:
            raise InputError(f"'{given}': {name} acts on weights; give it a block, but no part and no dose")
        return Intervention(name, int(layer))
    what = parse_replacement(name, f"{CHOICES}, or {', '.join(WAYS)}")
    if part not in PARTS:
        raise InputError(f"'{given}': part '{part}' is unknown; give {', '.join(PARTS)}")
    try:
        return Intervention(what, int(layer), part, float(dose))
    except ValueError:
        raise InputError(f"'{given}': dose '{dose}' is no number; give 0 to 1") from None
