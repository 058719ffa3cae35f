"""Where the U-shape at initialization holds: profiles of fresh models over a map of configurations, beside theory.

What decides is d sigma^2, width times the square of the initializer range: about the standard deviation of the attention
logits of a fresh model, and with it how far patterns are from uniform and how much flows through queries and keys instead
of values (`theory.py`). The map moves it from 0.05 to 2 and, one at a time, everything else: depth, prompt length, width at
equal d sigma^2, residual scale, rotation, sliding windows; and it holds the usual models' own configurations.

Every place is a unit of its own (`probes.run.store`), so that an interrupted map resumes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr

from ..errors import InputError
from ..measures.jacobian import jacobian
from ..models.load import fresh
from ..results.curves import rms_profile
from ..results.dataset import dataset, made_with, save
from ..results.theory_map import BLOCKS, CURVES, FACTOR
from ..run.files import together
from ..run.progress import Advance
from ..run.store import Store, going_on, unfinished
from ..theory.cesaro import fit_alpha
from ..theory.kernel import second_moment, second_moment_from_config
from .runner import Told, kept, require_free

Group = Literal["depth", "length", "width", "residual", "no RoPE", "window", "model"]

PRODUCTS = 64  # of the sketch; its error is then about 1 %
STRENGTHS = (0.05, 0.1, 0.2, 0.36, 0.6, 1.0, 1.64, 2.0)  # d sigma^2; 0.36 is Qwen2.5-0.5B's, 1.64 that of width 4096
SOME = (0.05, 0.36, 1.64)  # of them, where something else is moved
WIDTH, LENGTH = 256, 256  # of places where they are not what is moved


@dataclass(frozen=True)
class Place:
    """One configuration of the map, a Qwen2 (with a window a Mistral) unless `config` says otherwise."""

    group: Group
    strength: float  # d sigma^2
    width: int = WIDTH
    blocks: int = BLOCKS
    length: int = LENGTH
    residual_scale: float = 1.0
    rope: bool = True
    window: int | None = None
    name: str = ""
    config: str = ""  # JSON; empty: as the other fields say

    def configuration(self) -> dict[str, Any]:
        """As transformers takes it."""
        if self.config:
            return json.loads(self.config)
        made = {
            "vocab_size": 4096,
            "hidden_size": self.width,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.width // 64,
            "num_key_value_heads": max(1, self.width // 128),
            "intermediate_size": 3 * self.width,
            "initializer_range": math.sqrt(self.strength / self.width),
            "max_position_embeddings": 2048,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if self.window is None:
            return {"model_type": "qwen2"} | made
        return {"model_type": "mistral", "sliding_window": self.window} | made

    def label(self) -> str:
        """What is moved here, as progress and file names say it."""
        if self.name:
            return self.name
        changed = {
            "depth": f"{self.blocks} blocks",
            "length": f"T = {self.length}",
            "width": f"width {self.width}",
            "residual": f"branches times {self.residual_scale:g}",
            "no RoPE": "no RoPE",
            "window": f"window {self.window}",
        }
        return f"{changed[self.group]}, d sigma^2 {self.strength:g}"


# Configurations as published; the 7B one with fewer blocks than its 32, which would not fit.
_GPT2 = {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 12}
_QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
}
MODELS = tuple(
    Place("model", width * 0.02**2, width, blocks, length, name=name, config=json.dumps(config))
    for name, width, blocks, length, config in (
        ("GPT-2", 768, 12, 256, _GPT2),
        ("Qwen2.5-0.5B", 896, 24, 256, _QWEN),
        ("Llama-7B width", 4096, 4, 128, _LLAMA),
    )
)


def places(*, quick: bool = False) -> list[Place]:
    """The map's places in the order they are measured; `quick` is a few small ones that show the same within a minute."""
    if quick:
        small = [Place("depth", s, 128, 4, 64) for s in (0.05, 0.36, 1.64)]
        return [*small, Place("length", 0.05, 128, 4, 128), Place("window", 0.05, 128, 4, 64, window=16)]
    found = [Place("depth", s) for s in STRENGTHS]
    found += MODELS
    found += [Place("length", s, length=length) for length in (64, 512, 1024) for s in SOME]
    found += [Place("window", s, window=window) for window in (32, 128) for s in SOME]
    found += [Place("residual", s, residual_scale=scale) for scale in (0.2, 2.0) for s in SOME]
    found += [Place("no RoPE", s, rope=False) for s in SOME]
    found += [Place("width", s, width=width) for width in (128, 512) for s in SOME]
    return found + [Place("depth", s, blocks=blocks) for blocks in (4, 8, 16, 32) for s in (0.05, 0.36, 1.0, 2.0)]


def atlas(
    chosen: Sequence[Place],
    out: str | Path,
    *,
    seeds: int = 2,
    products: int = PRODUCTS,
    advance: Advance = lambda label, done, total: None,
    told: Told | None = None,
    finish: Callable[[xr.Dataset], object] = lambda result: None,
) -> xr.Dataset:
    """Measure every place and its theories; write `map.nc`; return it.

    Args:
        chosen: as `places` gives them.
        out: folder; places measured before are read from its `unfinished`.
        seeds: fresh models per place, each with its own prompt of random tokens.
        products: of the sketch, per prompt.
        advance: called before every place, with ("map", places done, places in all).
        told: called with one line where places of an interrupted map are there.
        finish: called with the result before the places' own files are removed: an interruption in it costs nothing.

    Returns:
        Dataset with, for every `place`, curves over `position` (NaN beyond the place's length): `measured` and its
        `stderr`, the second-moment kernel with `uniform` patterns, with measured ones (`values`), with the `score_path`,
        from the `config` alone, with the same coefficients `amplitudes` added up instead, and the best-fitting `cesaro` row
        with its `alpha`; where depth is moved up to 12 blocks and for the usual models also `value`, the measured Jacobian
        with constant patterns. All are root mean squares over seeds. The fields of `Place` are coordinates.

    Raises:
        InputError: no places, or a folder that cannot be written to.
    """
    if not chosen:
        raise InputError("no places on the map; give at least one")
    if seeds < 1:
        raise InputError(f"seeds={seeds} leaves no fresh model; give at least 1")
    out = Path(out)
    with unfinished(out, "map") as root:
        require_free([out / f"map.{ending}" for ending in ("nc", "png", "svg", "md")])
        more = {"seeds": seeds, "products": products, "headwater": made_with()["headwater"]}
        stores = {place.label(): Store(root, place.label(), asdict(place) | more) for place in chosen}
        if told is not None and (line := going_on(stores)):
            told(line)
        measured = []
        for place in chosen:
            advance("map", float(len(measured)), float(len(chosen)))
            measured.append(kept(stores[place.label()], partial(_measure, place, seeds, products)))
        result = _join(chosen, measured, seeds, products)
        with together():
            save(result, out / "map.nc")
            finish(result)
    advance("map", float(len(chosen)), float(len(chosen)))
    return result


def _measure(place: Place, seeds: int, products: int, pieces: Store) -> xr.Dataset:
    config = place.configuration()
    found: dict[str, list[np.ndarray]] = {}
    errors = []
    for seed in range(seeds):
        store = pieces.within(str(seed))
        model = fresh(config, seed, residual_scale=place.residual_scale, positional=place.rope)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(2, model.spec.vocabulary, (1, place.length), generator=generator)
        sketch: Any = {"method": "sketch", "products": products, "seed": seed}
        measured = jacobian(model, tokens, pieces=store, **sketch)
        results = {
            "measured": measured,
            "uniform": second_moment(model, tokens),
            "values": second_moment(model, tokens, attention="measured"),
            "score_path": second_moment(model, tokens, attention="measured", score_path=True),
        }
        if place.name or (place.group == "depth" and place.blocks <= BLOCKS):  # elsewhere d sigma^2 says it
            results["value"] = jacobian(model, tokens, pathway="value", pieces=store.within("value"), **sketch)
        if place.residual_scale == 1:  # a configuration has no such number
            results["config"] = second_moment_from_config(config, tokens=tokens)
            results["amplitudes"] = second_moment_from_config(config, tokens=tokens, adding="amplitudes")
        for name, ds in results.items():
            found.setdefault(name, []).append(ds["sensitivity"].values[0])
        errors.append(measured["stderr"].values[0])
    curves = {name: rms_profile(np.stack(values)).mean for name, values in found.items()}
    fit = fit_alpha(curves["measured"], place.blocks, window=place.window)
    curves["cesaro"] = fit.curve
    curves["stderr"] = rms_profile(np.stack(found["measured"]), np.stack(errors)).stderr
    variables: dict[str, tuple[Any, ...]] = {name: (("position",), curve) for name, curve in curves.items()}
    return dataset(variables | {"alpha": ((), np.array(fit.alpha))}, attrs=made_with())


def _join(chosen: Sequence[Place], rows: Sequence[xr.Dataset], seeds: int, products: int) -> xr.Dataset:
    longest = max(place.length for place in chosen)
    variables: dict[str, tuple[Any, ...]] = {}
    for name in (*CURVES, "stderr"):
        values = np.full((len(rows), longest), np.nan, dtype=np.float32)
        for row, ds in zip(values, rows, strict=True):
            if name in ds:
                row[: ds.sizes["position"]] = ds[name].values
        variables[name] = (("place", "position"), values, {"long_name": name, "units": "1"})
    variables["alpha"] = (("place",), np.array([float(ds["alpha"]) for ds in rows]), {"units": "1"})
    fields = ("group", "strength", "width", "blocks", "length", "residual_scale", "rope", "name")
    coords: dict[str, Any] = {field: (("place",), [getattr(place, field) for place in chosen]) for field in fields}
    coords["window"] = (("place",), [place.window or 0 for place in chosen], {"comment": "0: none"})
    coords["label"] = (("place",), [place.label() for place in chosen])
    coords["place"] = list(range(len(chosen)))
    attrs = made_with() | {"measurement": "map", "seeds": seeds, "products": products, "factor": FACTOR}
    return dataset(variables, coords=coords, attrs=attrs)
