"""Public functions of a view also take everything that `probes.load` takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from .ambient import left
from .load import load
from .view import View

Rest = ParamSpec("Rest")
Returned = TypeVar("Returned")


def takes_model(function: Callable[Concatenate[View, Rest], Returned]) -> Callable[Concatenate[Any, Rest], Returned]:
    """The function of a view (its argument `model`), which now also takes a name, a folder or a model in memory."""

    @wraps(function)
    @left
    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            return function(_view(args[0]), *args[1:], **kwargs)
        return function(**kwargs | ({"model": _view(kwargs["model"])} if "model" in kwargs else {}))  # type: ignore[call-arg]

    return call


def _view(model: Any) -> View:
    # Not isinstance(model, View): that reads `identity`, which hashes all weights.
    return model if hasattr(model, "spec") and hasattr(model, "residual") else load(model)
