"""Experiment position-bias: `training` says what is trained and measured, `statements` what a result says."""

from __future__ import annotations

from .chart import charts as charts
from .statements import claims as claims
from .statements import tables as tables
from .training import DATA as DATA
from .training import POSITIONAL as POSITIONAL
from .training import QUICK as QUICK
from .training import RESIDUAL as RESIDUAL
from .training import SCALES as SCALES
from .training import Settings as Settings
from .training import architecture_of as architecture_of
from .training import measure as measure
