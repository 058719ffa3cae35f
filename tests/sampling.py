"""How often signatures are checked while tests run: every function's first calls in each test, then one in a few.

What jaxtyping and beartype do on every call costs more than many of the functions do themselves, and a function defined
inside another is prepared for it anew, compiled code and all, whenever its definition is run. Checked at every call,
signatures cost two fifths of the time of an end-to-end test, nearly all of it in loops that call the same functions with
the same shapes thousands of times.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import jaxtyping

FIRST = 8  # calls of a function that are checked in each test ...
THEN = 64  # ... and of the later ones one in so many
DEFINITIONS = 2  # of a nested function that are checked in each test

_calls: Counter[CodeType] = Counter()
_definitions: Counter[CodeType] = Counter()
_checking: Any = jaxtyping.jaxtyped


def restart() -> None:
    """From now on first calls are checked again."""
    _calls.clear()
    _definitions.clear()


def _due(times: int) -> bool:
    return times <= FIRST or times % THEN == 0


def sampled(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """`jaxtyping.jaxtyped` for what `--jaxtyping-packages` names, with functions checked as often as this module says."""
    if function is None:
        return functools.partial(sampled, typechecker=typechecker)
    if not isinstance(function, FunctionType):  # a class or a descriptor
        return _checking(function, typechecker=typechecker)
    code = function.__code__
    if "<locals>" in function.__qualname__:
        _definitions[code] += 1
        if _definitions[code] > DEFINITIONS:
            return function
    checked = _checking(function, typechecker=typechecker)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        _calls[code] += 1
        return (checked if _due(_calls[code]) else function)(*args, **kwargs)

    return call


def install() -> None:
    """Before anything of the packages is imported."""
    jaxtyping.jaxtyped = sampled
