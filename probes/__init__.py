"""headwater: where does a pretrained language model's sense of position come from?

    import probes
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=16, length=256)
    result = probes.jacobian(model, tokens, method="sketch")

This file is a table of contents. Names are imported when they are first used, so that `import probes` costs nothing.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import theory as theory
    from .compare import compare_results as compare_results
    from .data.prompts import batch as batch
    from .data.prompts import draw as draw
    from .data.prompts import prompts as prompts
    from .errors import InputError as InputError
    from .measure import chart as chart
    from .measures.agreement import agreement as agreement
    from .measures.agreement import portrait as portrait
    from .measures.bos_swap import bos_swap as bos_swap
    from .measures.decode import decode as decode
    from .measures.horizon import horizon as horizon
    from .measures.inspect import inspect as inspect
    from .measures.jacobian import jacobian as jacobian
    from .measures.leakage import leakage as leakage
    from .measures.loss import loss as loss
    from .measures.retrieval import retrieval as retrieval
    from .measures.sink_factorial import sink_factorial as sink_factorial
    from .measures.sinks import sinks as sinks
    from .measures.trajectory import trajectory as trajectory
    from .models.ablate import ablated as ablated
    from .models.ablate import reweighed as reweighed
    from .models.erase import erased as erased
    from .models.initialization import Initialization as Initialization
    from .models.load import born as born
    from .models.load import fresh as fresh
    from .models.load import load as load
    from .models.named import bundled as bundled
    from .models.swap import revalued as revalued
    from .models.swap import swapped as swapped
    from .models.view import View as View
    from .models.words import edited as edited
    from .results.curves import relative_error as relative_error
    from .results.curves import rms_profile as rms_profile
    from .results.dataset import combine as combine
    from .results.dataset import load as load_result  # noqa: F401
    from .results.dataset import save as save_result  # noqa: F401
    from .results.ushape import shape as shape

# By name, (module, name there), as the lines above say it to type checkers.
_IMPORTS = re.findall(
    r"^    from \.(\S+) import (\w+) as (\w+)", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE
)
_WHERE = {name: (module, there) for module, there, name in _IMPORTS}

__all__ = sorted([*_WHERE, "theory"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "theory":  # the module itself
        return import_module(".theory", __name__)
    if name not in _WHERE:
        raise AttributeError(f"module 'probes' has no attribute '{name}'")
    module, attribute = _WHERE[name]
    globals()[name] = value = getattr(import_module(f".{module}", __name__), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
