"""Results as measures make them, of random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr

from probes.measures.leakage import PARTS, SOURCES
from probes.results.dataset import dataset

BANDS = {"band": ["9-31", "32-63"], "band_first": (("band",), [9, 32]), "band_last": (("band",), [31, 63])}
LENGTH = 64


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


def bos_result(seed: int = 0) -> xr.Dataset:
    """The residual component before and after, by band, of one replacement."""
    sizes = np.random.default_rng(seed).uniform(size=(2, 2))
    variables = {
        f"residual_steady_{when}_of_model": (("band",), sizes[n]) for n, when in enumerate(("before", "after"))
    }
    return made(with_intervals(variables, 0.1), BANDS)
