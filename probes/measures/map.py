"""Where the U-shape at initialization holds: profiles of fresh models over a map of configurations, beside theory.

What decides is d sigma^2, width times the square of the initializer range: about the standard deviation of the attention
logits of a fresh model, and with it how far patterns are from uniform and how much flows through queries and keys instead
of values (`probes.theory.kernel`). The map moves it from 0.05 to 2 and, one at a time, everything else: depth, prompt
length, width at equal d sigma^2, residual scale, rotation, sliding windows; and it holds the usual models' own
configurations. It measures no model that is named, so that its command is its own (`probes.cli.training`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ..charts import DOTTED, GREEN, INK, ORANGE, PURPLE, SKY, Panel, Series, depth_color, level, panels, position_axis
from ..charts import curves as draw
from ..measure import Headline, Measure
from ..models.load import fresh
from ..options import Options
from ..results.curves import relative_error, rms_log_error, rms_profile, smooth
from ..results.dataset import dataset, kept, made_with
from ..results.tables import Table, number
from ..results.ushape import Shape, shape_of
from ..run.progress import Advance
from ..run.store import Store, going_on
from ..theory.cesaro import fit_alpha
from ..theory.kernel import second_moment, second_moment_from_config
from .agreement import fractions
from .jacobian import jacobian

PRODUCTS = 64  # of the sketch; its error is then about 3 %
STRENGTHS = (0.05, 0.1, 0.2, 0.36, 0.6, 1.0, 1.64, 2.0)  # d sigma^2; 0.36 is Qwen2.5-0.5B's, 1.64 that of width 4096
SOME = (0.05, 0.36, 1.64)  # of them, where something else is moved
WIDTH, LENGTH, BLOCKS = 256, 256, 12  # of places where they are not what is moved
FACTOR = 2.0  # how far an end has to stand above the middle to count
CURVES = ("measured", "uniform", "values", "score_path", "config", "amplitudes", "cesaro", "value")


@dataclass(frozen=True)
class Place:
    """One configuration of the map, a Qwen2 (with a window a Mistral) unless `config` says otherwise."""

    group: str  # what is moved beside d sigma^2; "model": a usual model
    strength: float  # d sigma^2
    width: int = WIDTH
    blocks: int = BLOCKS
    length: int = LENGTH
    residual_scale: float = 1.0
    rope: bool = True
    window: int | None = None
    name: str = ""  # of a usual model, with its own configuration

    def configuration(self) -> dict[str, Any]:
        """As transformers takes it."""
        if self.name:
            return CONFIGURATIONS[self.name]
        config = {
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
            return {"model_type": "qwen2"} | config
        return {"model_type": "mistral", "sliding_window": self.window} | config

    def label(self) -> str:
        """As progress, files and tables say it."""
        moved = {
            "depth": f"{self.blocks} blocks",
            "length": f"T = {self.length}",
            "width": f"width {self.width}",
            "residual": f"branches times {self.residual_scale:g}",
            "no RoPE": "no RoPE",
            "window": f"window {self.window}",
        }
        return self.name or f"{moved[self.group]}, d sigma^2 {self.strength:g}"


# As published; the 7B one with fewer blocks than its 32, which would not fit.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "GPT-2": {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 12},
    "Qwen2.5-0.5B": {
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
    },
    "Llama-7B width": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
    },
}
MODELS = (
    Place("model", 768 * 0.02**2, 768, 12, 256, name="GPT-2"),
    Place("model", 896 * 0.02**2, 896, 24, 256, name="Qwen2.5-0.5B"),
    Place("model", 4096 * 0.02**2, 4096, 4, 128, name="Llama-7B width"),
)


def places(*, quick: bool = False) -> list[Place]:
    """The map's places in the order they are measured; `quick` is a few small ones that show the same within a minute."""
    if quick:
        small = [Place("depth", s, 128, 4, 64) for s in SOME]
        return [*small, Place("length", 0.05, 128, 4, 128), Place("window", 0.05, 128, 4, 64, window=16)]
    return [
        *(Place("depth", s) for s in STRENGTHS),
        *MODELS,
        *(Place("length", s, length=length) for length in (64, 512, 1024) for s in SOME),
        *(Place("window", s, window=window) for window in (32, 128) for s in SOME),
        *(Place("residual", s, residual_scale=scale) for scale in (0.2, 2.0) for s in SOME),
        *(Place("no RoPE", s, rope=False) for s in SOME),
        *(Place("width", s, width=width) for width in (128, 512) for s in SOME),
        *(Place("depth", s, blocks=blocks) for blocks in (4, 8, 16, 32) for s in (0.05, 0.36, 1.0, 2.0)),
    ]


def atlas(
    chosen: Sequence[Place],
    root: Path | None = None,
    *,
    seeds: int = 2,
    products: int = PRODUCTS,
    advance: Advance = lambda label, done, total: None,
    remark: Callable[[str], object] = lambda line: None,
) -> xr.Dataset:
    """Measure every place and its theories.

    Args:
        chosen: as `places` gives them.
        root: folder in which places that are done are kept for an interrupted call.
        seeds: fresh models per place, each with its own prompt of random tokens.
        products: of the sketch, per prompt.
        advance: called before every place, with ("map", places done, places in all).
        remark: called with one line where places of an interrupted map are there.

    Returns:
        Dataset with, for every `place`, curves over `position` (NaN beyond the place's length): `measured`, the
        second-moment kernel with `uniform` patterns, with measured ones (`values`), with the `score_path`, from the
        `config` alone, with the same coefficients `amplitudes` added up instead, and the best-fitting `cesaro` row with its
        `alpha`; where depth is moved up to 12 blocks and for the usual models also `value`, the measured Jacobian with
        constant patterns. All are root mean squares over seeds. The fields of `Place` are coordinates.
    """
    key = {"seeds": seeds, "products": products, "headwater": made_with()["headwater"]}
    stores = {place.label(): Store(root, place.label(), asdict(place) | key) for place in chosen}
    if line := going_on(stores):
        remark(line)
    results = []
    for place in chosen:
        advance("map", float(len(results)), float(len(chosen)))
        pieces = stores[place.label()]
        results.append(kept(pieces, lambda at=place, pieces=pieces: _measure(at, seeds, products, pieces)))
    advance("map", float(len(chosen)), float(len(chosen)))
    return _joined(chosen, results, seeds, products)


def _measure(place: Place, seeds: int, products: int, pieces: Store) -> xr.Dataset:
    config = place.configuration()
    profiles: dict[str, list[np.ndarray]] = {}
    for seed in range(seeds):
        store = pieces.within(str(seed))
        model = fresh(config, seed, residual_scale=place.residual_scale, positional=place.rope)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(2, model.spec.vocabulary, (1, place.length), generator=generator)
        sketch: Any = {"method": "sketch", "products": products, "seed": seed}
        results = {
            "measured": jacobian(model, tokens, pieces=store, **sketch),
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
            profiles.setdefault(name, []).append(ds["sensitivity"].values[0])
    curves = {name: rms_profile(np.stack(values)).mean for name, values in profiles.items()}
    fit = fit_alpha(curves["measured"], place.blocks, window=place.window)
    curves["cesaro"] = fit.curve
    variables: dict[str, tuple[Any, ...]] = {name: (("position",), curve) for name, curve in curves.items()}
    return dataset(variables | {"alpha": ((), np.array(fit.alpha))}, attrs=made_with())


def _joined(chosen: Sequence[Place], results: Sequence[xr.Dataset], seeds: int, products: int) -> xr.Dataset:
    variables: dict[str, tuple[Any, ...]] = {}
    for name in CURVES:
        values = np.full((len(chosen), max(place.length for place in chosen)), np.nan, dtype=np.float32)
        for row, ds in zip(values, results, strict=True):
            if name in ds:
                row[: ds.sizes["position"]] = ds[name].values
        variables[name] = (("place", "position"), values, {"long_name": name, "units": "1"})
    variables["alpha"] = (("place",), np.array([float(ds["alpha"]) for ds in results]), {"units": "1"})
    fields = ("group", "strength", "width", "blocks", "length", "residual_scale", "rope", "name")
    coords: dict[str, Any] = {field: (("place",), [getattr(place, field) for place in chosen]) for field in fields}
    coords["window"] = (("place",), [place.window or 0 for place in chosen], {"comment": "0: none"})
    coords["label"] = (("place",), [place.label() for place in chosen])
    coords["place"] = list(range(len(chosen)))
    attrs = made_with() | {"measurement": "map", "seeds": seeds, "products": products, "factor": FACTOR}
    return dataset(variables, coords=coords, attrs=attrs)


# ------------------------------------------------------------------------------------------------------ what a map says


class Row(dict[str, Any]):
    """One place of a map: its curves, cut to its length, and its coordinates."""

    @cached_property
    def shape(self) -> Shape:
        """Of the measured profile."""
        return shape_of(self["measured"])

    def error(self, theory: str) -> float:
        """Mean over positions of |predicted / measured - 1|; NaN where that theory was not computed.

        Of "cesaro", N^L with its best alpha, the RMS log error with a free scale, where both reach.
        """
        predicted, measured = self[theory], self["measured"]
        if theory != "cesaro":
            return relative_error(predicted, measured)
        seen = (predicted > 0) & (measured > 0)
        return rms_log_error(predicted[seen], measured[seen], free_scale=True)

    @property
    def value_share(self) -> float:
        """Mean over positions of the value path's norm against the whole."""
        seen = self["measured"] > 0
        return float(np.mean(self["value"][seen] / self["measured"][seen]))

    @property
    def weaker(self) -> float:
        """How far the lower of primacy and last, the ends of [Chowdhury]'s U, stands above the middle; NaN without one."""
        return min(self.shape.primacy, self.shape.last)


def rows(ds: xr.Dataset, **where: Any) -> list[Row]:
    """The places of a map with the given coordinates, as in `rows(ds, group="depth", blocks=12)`."""
    every = []
    for at in range(ds.sizes["place"]):
        values = {str(name): variable.values for name, variable in ds.isel(place=at).variables.items()}
        length = int(values["length"])
        every.append(Row({name: value[:length] if value.ndim else value.item() for name, value in values.items()}))
    return [row for row in every if all(row[name] == value for name, value in where.items())]


def ends(ds: xr.Dataset, *, name: str) -> xr.DataArray:
    """A number of the shape of every place [place]."""
    return xr.DataArray([getattr(row.shape, name) for row in rows(ds)], {"place": ds["label"].values}, ("place",))


NUMBERS = ("first", "primacy", "recency", "last")
COLUMNS = ("place", *NUMBERS, "U", "uniform", "values", "score path", "config", "N^L", "value share")


def cells(row: Row) -> list[str]:
    """A place as text, in the order of `COLUMNS`."""
    return [
        row["label"],
        *(f"{end:.3g}" if math.isfinite(end) else "no middle" for end in row.shape[: len(NUMBERS)]),
        "U" if row.weaker >= FACTOR else "-",
        *(number(row.error(theory), ".1%") for theory in ("uniform", "values", "score_path", "config", "cesaro")),
        number(row.value_share, ".3f"),
    ]


def tables(results: Mapping[str, xr.Dataset]) -> list[Table]:
    """Every place of each map, where the U stands out most first."""
    title = (
        "Every place of the map. First, primacy, recency, last: against the middle, of root mean squares over models; U, as "
        f"[Chowdhury] has it: primacy and last at least {FACTOR:g}. Kernels: mean over positions of |predicted / measured - "
        "1|; N^L: RMS log error with its best alpha and a free scale. Value share: the value path's norm against the whole"
    )
    return [
        Table(title, COLUMNS, [cells(row) for row in sorted(rows(ds), key=lambda row: -np.nan_to_num(row.weaker))])
        for ds in results.values()
    ]


def usual_places(ds: xr.Dataset) -> list[Row]:
    """Where only d sigma^2 is moved, in its order: the places of the deepest column of at most 12 blocks."""
    depths = [row for row in rows(ds, group="depth") if row["blocks"] <= BLOCKS]
    base = max(row["blocks"] for row in depths)
    return sorted((row for row in depths if row["blocks"] == base), key=lambda row: row["strength"])


def answer(results: Mapping[str, xr.Dataset]) -> list[str]:
    """How many places have a U."""
    lines = []
    for name, ds in results.items():
        every = rows(ds)
        ends, arms = (
            sum(x >= FACTOR for x in xs) for xs in ([r.weaker for r in every], [r.shape.recency for r in every])
        )
        said = f"at {ends} of {len(every)} places primacy and last are at least {FACTOR:g} times the middle"
        lines.append(f"{name}: {said}, [Chowdhury]'s U; recency is so at {arms}.")
    return lines


CAPTION = (
    "Fresh models, random tokens. Profiles over their middle, smoothed; lines and marks: measured, dotted: second-moment "
    f"kernel with score path, nothing fitted. Primacy: positions 1 to 16 over the middle; grey: {FACTOR:g}."
)
STRENGTH = "$d\\,\\sigma^2$"
PROFILES = (0.05, 0.36, 1.0, 2.0)  # strengths whose profiles are drawn
THEORIES = {
    "score_path": ("kernel, with score path", INK),
    "values": ("kernel, values only", GREEN),
    "uniform": ("kernel, even attention", ORANGE),
    "config": ("kernel, configuration alone", SKY),
    "cesaro": ("$N^L$, fitted scale", PURPLE),
}


def chart(results: Mapping[str, xr.Dataset]) -> Figure:
    """Profiles, primacy by depth, and errors of theories, of each map."""
    shown = [Panel("sensitivity / middle", _profiles), Panel("primacy", _primacy), Panel("relative error", _errors)]
    return panels(results, shown, CAPTION)


def _strengths(cell: Axes) -> None:
    cell.set_xscale("log")
    cell.set_xlabel(f"{STRENGTH}, about the deviation of the logits")


def _profiles(cell: Axes, ds: xr.Dataset) -> None:
    usual, lines = usual_places(ds), []
    shown = [row for row in usual if row["strength"] in PROFILES] or usual
    for n, row in enumerate(shown):
        measured, predicted = (smooth(row[name]) / row.shape.middle for name in ("measured", "score_path"))
        x, color = fractions(len(measured)), to_hex(depth_color(n, len(shown)))
        lines.append(Series(f"{STRENGTH} = {row['strength']:g}", measured, color, x=x))
        lines.append(Series("", predicted, INK, x=x, line=DOTTED, width=1.2))
    draw(cell, lines, log=True)
    position_axis(cell)


def _primacy(cell: Axes, ds: xr.Dataset) -> None:
    """By d sigma^2, a column of places for each depth."""
    depths, lines = sorted({row["blocks"] for row in rows(ds, group="depth")}), []
    for n, depth in enumerate(depths):
        column = sorted(rows(ds, group="depth", blocks=depth), key=lambda row: row["strength"])
        x, color = [row["strength"] for row in column], to_hex(depth_color(n, len(depths)))
        predicted = [shape_of(row["score_path"]).primacy for row in column]
        lines.append(Series("", predicted, color, x=x, line=DOTTED, width=1.2))
        lines.append(Series(f"{depth} blocks", [row.shape.primacy for row in column], color, x=x, line=""))
    draw(cell, lines, log=True)
    level(cell, FACTOR)
    _strengths(cell)


def _errors(cell: Axes, ds: xr.Dataset) -> None:
    usual, lines = usual_places(ds), []
    for name, (label, color) in THEORIES.items():
        values, x = [row.error(name) for row in usual], [row["strength"] for row in usual]
        lines.append(Series(label, values, color, x=x, marker="o", width=1.2))
    draw(cell, lines, log=True)
    _strengths(cell)


MAP = Measure(
    name="map",
    question="Where does the U-shape of fresh models hold?",
    compute=atlas,
    options=Options,
    headlines=tuple(Headline(f"{name} (root mean square)", partial(ends, name=name), ratio=True) for name in NUMBERS),
    answer=answer,
    chart=chart,
    tables=tables,
)
