"""The report of `retrieval`, for the page."""

from __future__ import annotations

from collections.abc import Mapping

import xarray as xr

from ..measures.retrieval import MEASURE
from ..results.tables import Report
from ..table import tables


def retrieval_report(results: Mapping[str, xr.Dataset]) -> Report:
    """Everything there is to tell of results."""
    return tables(MEASURE, results)
