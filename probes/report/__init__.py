"""The page: all results under a folder as one HTML file that opens from disk, with no network, on any screen.

`measuring` runs the studies of a report; `answer` has its first five sentences, `sections` decides what is said and shown
below, `charts` draws from results alone, `formulas` holds the methods' mathematics, `cards` tells which models and results
these are, `page` puts it together; templates, style and script stand in `templates`.
"""

from __future__ import annotations

from .page import build as build
