"""The same figure gives the same file: what rounds differently from run to run, or between processors, is cut off."""

from __future__ import annotations

import numpy as np
import xarray as xr

DIGITS = 3  # significant; float32 agrees to more of them between processors, and 1/10 point on most axes is less


def steady(ds: xr.Dataset) -> xr.Dataset:
    """A result to `DIGITS` digits, for figures that draw numbers as one processor rounded them, and no means of many."""

    def rounded(values: np.ndarray) -> np.ndarray:
        found = values.copy()
        some = np.isfinite(values) & (values != 0)
        steps = 10.0 ** (np.floor(np.log10(np.abs(values[some]))) - (DIGITS - 1))
        found[some] = np.round(values[some] / steps) * steps
        return found

    return ds.assign({name: ds[name].copy(data=rounded(ds[name].values)) for name in ds if ds[name].dtype.kind == "f"})
