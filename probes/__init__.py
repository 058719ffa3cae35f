"""headwater: where does a pretrained language model's sense of position come from?

    import probes
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=16, length=256)
    result = probes.jacobian(model, tokens, method="sketch")

This file is a table of contents. Names are imported when they are first used, so that `import probes` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import theory as theory
    from .bos import bos_swap as bos_swap
    from .bos import swapped as swapped
    from .compare import agreement as agreement
    from .compare import portrait as portrait
    from .errors import InputError as InputError
    from .inspection import inspect as inspect
    from .jacobian import jacobian as jacobian
    from .leakage import leakage as leakage
    from .models.initialization import Initialization as Initialization
    from .models.load import born as born
    from .models.load import fresh as fresh
    from .models.load import load as load
    from .models.named import bundled as bundled
    from .models.view import View as View
    from .plots import bos_figure as bos_figure
    from .plots import jacobian_figure as jacobian_figure
    from .plots import leakage_figure as leakage_figure
    from .plots import map_figure as map_figure
    from .plots import match_figure as match_figure
    from .plots import sinks_figure as sinks_figure
    from .plots import theory_figure as theory_figure
    from .plots import trajectory_figure as trajectory_figure
    from .prompts import draw as draw
    from .prompts import prompts as prompts
    from .results import combine as combine
    from .results import load as load_result  # noqa: F401
    from .results import save as save_result  # noqa: F401
    from .sinks import sinks as sinks
    from .studies.paired import compare_results as compare_results
    from .summary import mean_profile as mean_profile
    from .summary import relative_error as relative_error
    from .summary import ushape as ushape
    from .trajectory import trajectory as trajectory

_WHERE = {
    "Initialization": ("models.initialization", "Initialization"),
    "InputError": ("errors", "InputError"),
    "View": ("models.view", "View"),
    "agreement": ("compare", "agreement"),
    "born": ("models.load", "born"),
    "bos_figure": ("plots", "bos_figure"),
    "bos_swap": ("bos", "bos_swap"),
    "bundled": ("models.named", "bundled"),
    "combine": ("results", "combine"),
    "compare_results": ("studies.paired", "compare_results"),
    "draw": ("prompts", "draw"),
    "fresh": ("models.load", "fresh"),
    "inspect": ("inspection", "inspect"),
    "jacobian": ("jacobian", "jacobian"),
    "jacobian_figure": ("plots", "jacobian_figure"),
    "leakage": ("leakage", "leakage"),
    "leakage_figure": ("plots", "leakage_figure"),
    "load": ("models.load", "load"),
    "load_result": ("results", "load"),
    "map_figure": ("plots", "map_figure"),
    "match_figure": ("plots", "match_figure"),
    "mean_profile": ("summary", "mean_profile"),
    "portrait": ("compare", "portrait"),
    "prompts": ("prompts", "prompts"),
    "relative_error": ("summary", "relative_error"),
    "save_result": ("results", "save"),
    "sinks": ("sinks", "sinks"),
    "sinks_figure": ("plots", "sinks_figure"),
    "swapped": ("bos", "swapped"),
    "theory": ("theory", None),  # the module itself
    "theory_figure": ("plots", "theory_figure"),
    "trajectory": ("trajectory", "trajectory"),
    "trajectory_figure": ("plots", "trajectory_figure"),
    "ushape": ("summary", "ushape"),
}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'probes' has no attribute '{name}'")
    module, attribute = _WHERE[name]
    value = import_module(f".{module}", __name__)
    value = value if attribute is None else getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


class _Package(ModuleType):
    """Keeps `probes.jacobian` the function when the import system would put the submodule of that name in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)) or _WHERE[name][1] is None:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
