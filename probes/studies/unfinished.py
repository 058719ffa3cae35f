"""Results of studies kept by `probes.run.resume`: what their keys hold, and which differences of keys count.

Where a key holds the options that chose the prompts, the hash of the prompts decides whether these are the same (a text may
have moved), and the options only say why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from ..models.view import View
from ..results.dataset import from_bytes, provenance, to_bytes
from ..run.resume import Unfinished

CHOOSING = ("prompts", "length", "text", "dataset", "split", "column", "chat", "first")
HASH = "tokens_sha256"


def kept_units(out: str | Path, kind: str) -> Unfinished[xr.Dataset]:
    """The units of a kind of study in a folder.

    Raises:
        InputError: the folder cannot be written to.
    """
    return Unfinished(out, kind, pack=to_bytes, unpack=from_bytes, telling=_telling)


def measured_on(model: View, tokens: Any) -> dict[str, Any]:
    """The part of a key that is the model's, the prompts' and the program's."""
    made = provenance(model, tokens)
    return {name: made[name] for name in ("weights", "backend", "dtype", HASH, "headwater")}


def _telling(changed: list[str], key: Mapping[str, Any]) -> list[str]:
    if HASH in key and HASH not in changed:
        return [name for name in changed if name not in CHOOSING]
    if {*changed}.intersection({"seed", *CHOOSING}) and HASH in changed:
        return [name for name in changed if name != HASH]
    return changed
