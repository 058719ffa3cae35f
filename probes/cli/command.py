"""How commands are declared: options are fields of dataclasses (`probes.options`), of which typer makes a command line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


def command(*, without: Collection[str] = (), **defaults: Any) -> Callable[[Callable[..., None]], Any]:
    """Give a function the signature that typer makes a command from.

    A parameter whose type is a dataclass becomes an option for each of its fields, and the function gets an instance. The
    docstring is the help; its section "Examples:" ends it, below the options. The command line is recorded in the
    provenance of results.

    Args:
        without: fields that this command does not offer; they keep their default.
        defaults: defaults of fields that differ in this command.

    Raises:
        TypeError: `without` or `defaults` names something that is no field, or two fields have one name.
    """

    def flattened(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        options: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        unknown = {*without, *defaults}
        for name, parameter in inspect.signature(function).parameters.items():
            group = hints[name]
            if is_dataclass(group):
                types = get_type_hints(group, include_extras=True)
                offered = [one for one in fields(group) if one.name not in without]
                options += [_parameter(one.name, types[one.name], one, **defaults) for one in offered]
                groups[name] = group, [one.name for one in offered]
                unknown -= types.keys()
            else:
                options.append(_parameter(name, group, parameter.default))
        names = [one.name for one in options]
        if unknown or len(set(names)) < len(names):
            wrong = unknown or {name for name in names if names.count(name) > 1}
            raise TypeError(f"{function.__name__}: no option, or two, of the name {', '.join(sorted(wrong))}")

        @wraps(function)
        def run(**values: Any) -> None:
            from ..results.dataset import set_command

            set_command(sys.argv[1:])
            for name, (group, names) in groups.items():
                changed = {one: defaults[one] for one in defaults if one in get_type_hints(group)}
                values[name] = group(**changed | {option: values.pop(option) for option in names})
            function(**values)

        run.__annotations__ = {one.name: one.annotation for one in options}
        run.__dict__["__signature__"] = inspect.Signature(options)
        text, heading, lines = (inspect.getdoc(function) or "").partition("Examples:")
        # Where a line of the docstring ends says nothing: the terminal breaks lines.
        run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        run.__dict__["epilog"] = heading + lines
        return run

    return flattened


def _parameter(name: str, kind: Any, declared: Any, **defaults: Any) -> inspect.Parameter:
    """What typer reads an option from: `declared` is a field, or the default where the type carries the rest."""
    if isinstance(declared, Field):
        kind = Annotated[kind, _typer(declared)] if "option" in declared.metadata else kind
        declared = declared.default
    default = defaults.get(name, inspect.Parameter.empty if declared is MISSING else declared)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _typer(declared: Field[Any]) -> Any:
    names, how = declared.metadata["option"]
    given = dict(how)
    return typer.Argument(**given) if given.pop("argument", False) else typer.Option(*names, **given)
