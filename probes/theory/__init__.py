"""Predictions with nothing fitted: the second-moment kernel, Cesàro averaging, and rollout with its bounds."""

from .cesaro import CesaroFit as CesaroFit
from .cesaro import cesaro_bins as cesaro_bins
from .cesaro import cesaro_density as cesaro_density
from .cesaro import cesaro_point_mass as cesaro_point_mass
from .cesaro import cesaro_row as cesaro_row
from .cesaro import fit_alpha as fit_alpha
from .kernel import second_moment as second_moment
from .kernel import second_moment_from_config as second_moment_from_config
from .rollout import Bounds as Bounds
from .rollout import causal_bound as causal_bound
from .rollout import decay_bounds as decay_bounds
from .rollout import decay_peak as decay_peak
from .rollout import decay_rollout as decay_rollout
from .rollout import rollout as rollout
from .rollout import rope_peak as rope_peak
from .rollout import shares as shares
from .rollout import turned_bounds as turned_bounds
from .rollout import turned_loss as turned_loss
from .rollout import turned_rates as turned_rates
from .rollout import visible as visible
from .rollout import window_bound as window_bound
