"""Results as the probes make them, of random numbers and any size, and what figures of them hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.figures import bos_figure
from probes.measures.leakage import PARTS, SOURCES
from probes.results.dataset import dataset

BANDS = {"band": ["9-31", "32-63"], "band_first": (("band",), [9, 32]), "band_last": (("band",), [31, 63])}
LAYERS, HEADS, LENGTH = 3, 4, 64  # unless told


def made(variables: dict[str, tuple[Any, ...]], coords: dict[str, Any], **attrs: Any) -> xr.Dataset:
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    return dataset(variables, tokens=tokens, coords=coords, attrs={"model": "owner/tiny", "dtype": "float32", **attrs})


def result(condition: str, seed: int, *, length: int = LENGTH, zeros: int = 0) -> xr.Dataset:
    """One run of `jacobian`; sensitivity is 0 at the first `zeros` positions, as behind a window."""
    random = np.random.default_rng([seed, len(condition)])
    x = np.linspace(0, 1, length)
    sensitivity = (0.02 + np.exp(-20 * x) + 3 * np.exp(-40 * (1 - x))) * random.uniform(0.8, 1.25, (4, length))
    sensitivity[:, :zeros] = 0
    dims, options = ("prompt", "position"), {"method": "sketch", "products": 32}
    variables = {"sensitivity": (dims, sensitivity), "stderr": (dims, 0.1 * sensitivity)}
    weights = f"{condition} {seed}"
    return made(variables, {}, condition=condition, seed=seed, weights=weights, options=options)


def with_intervals(variables: dict[str, tuple[Any, np.ndarray]], width: float) -> dict[str, tuple[Any, ...]]:
    ends = {"": 0.0, "_low": -width, "_high": width}
    return {f"{name}{end}": (dims, x + by) for name, (dims, x) in variables.items() for end, by in ends.items()}


def leakage_result() -> xr.Dataset:
    sources = np.array([[0.1, 0.0], [0.2, 0.0], [0.0, 0.0]])
    parts = np.array([[0.3, 0.3], *[[0.0, 0.0]] * 4])
    variables = {
        "steady_source_of_model": (("source", "band"), sources),
        "log_form_of_model": (("part", "band"), parts),
    }
    return made(with_intervals(variables, 0.02), {"part": list(PARTS), "source": list(SOURCES), **BANDS})


def bos_result(replacement: str | int = "mean", *, layers: int = LAYERS, heads: int = HEADS) -> xr.Dataset:
    random = np.random.default_rng([layers, len(str(replacement))])
    variables = with_intervals(
        {
            "removed_of_model": (("band",), np.array([0.35, np.nan])),
            "residual_before_of_model": (("band",), random.uniform(size=2)),
            "residual_after_of_model": (("band",), random.uniform(size=2)),
            "loss_change": (("position",), np.append(random.normal(size=LENGTH - 1), np.nan)),
        },
        0.1,
    )
    for when in ("before", "after"):
        variables[f"alpha_{when}"] = (("layer", "head"), random.uniform(size=(layers, heads)))
        variables[f"sensitivity_{when}"] = (("position",), random.uniform(0.1, 1, LENGTH))
    coords = {**BANDS, "layer": range(layers)}
    return made(variables, coords, replacement=replacement, options={"profile_prompts": 4})


def several(*replacements: str | int, **sizes: int) -> xr.Dataset:
    """As the command line joins them: `replacement` leads on all variables but the tokens."""
    results = [bos_result(replacement, **sizes) for replacement in replacements]
    names = xr.DataArray([str(r) for r in replacements], dims="replacement", name="replacement")
    joined = xr.concat([ds.drop_vars("tokens") for ds in results], names, combine_attrs="drop_conflicts")
    return joined.assign(tokens=results[0]["tokens"])


DRAWN: list[tuple[Callable[..., Figure], Callable[[], xr.Dataset], str]] = [
    (bos_figure, bos_result, "bos-swap"),
]


def labelled(figure: Figure, label: str) -> Axes:
    """The panel, or the first one, of a row."""
    return next(axes for axes in figure.axes if axes.get_ylabel() == label)


def drawn(axes: Axes, **look: str) -> list[np.ndarray]:
    """Heights of the lines of a colour, marker or line style."""
    lines = [line for line in axes.lines if all(getattr(line, f"get_{name}")() == x for name, x in look.items())]
    return [np.array(line.get_ydata(), dtype=float) for line in lines]


def ends_of(lines: Any) -> np.ndarray:
    """Corners [line, end, x or y] of a collection of straight lines."""
    return np.array([path.vertices for path in lines.get_paths()], dtype=float)


def text_of(figure: Figure) -> str:
    return str(figure.get_supxlabel()).replace("\n", " ")


def legends_of(figure: Figure) -> set[str]:
    """Texts of all legends, in panels and beside them."""
    inside = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
    return {text.get_text() for legend in (*figure.legends, *inside) for text in legend.get_texts()}
