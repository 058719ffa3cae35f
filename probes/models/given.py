"""Public functions of a view also take everything that `probes.load` takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..run.precision import left
from .checks import check_mask
from .load import load
from .view import View

Rest = ParamSpec("Rest")
Returned = TypeVar("Returned")


def takes_model(function: Callable[Concatenate[View, Rest], Returned]) -> Callable[Concatenate[Any, Rest], Returned]:
    """The function of a view (its argument `model`), which now also takes a name, a folder or a model in memory.

    It also takes an attention mask that hides nothing.
    """

    @wraps(function)
    @left
    def call(*args: Any, **kwargs: Any) -> Any:
        check_mask(kwargs.pop("attention_mask", None))
        if not args and "model" not in kwargs:
            return function(**kwargs)  # type: ignore[call-arg]
        view = _view(args[0] if args else kwargs.pop("model"))
        with _measuring(view):
            return function(view, *args[1:], **kwargs)

    return call


def _measuring(view: Any) -> AbstractContextManager[None]:
    """A view of a caller's model takes it as it is now."""
    while hasattr(view, "original"):
        view = view.original
    return view.measuring() if hasattr(view, "measuring") else nullcontext()


def _view(model: Any) -> View:
    # Not isinstance(model, View): that reads `identity`, which hashes all weights.
    return model if hasattr(model, "spec") and hasattr(model, "residual") else load(model)
