"""The commands: one for every measure of the registry, with the loop over models, headlines and answers; and the others."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ..measure import measure, questions
from ..options import Loading, Prompts, Target
from .console import print_colored, print_lines, print_table, print_written, progress, remark

if TYPE_CHECKING:
    from ..measure import Measure


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


# The other commands, by the module of this folder that has them.
OTHERS: dict[str, str] = dict.fromkeys(("map", "toy", "pretrain"), "training")
OTHERS |= dict.fromkeys(("report", "compare", "families", "selftest"), "pages")
# Measures that train toys, which the registry does not know: by name, what they answer; `toy.NAME` holds them.
ABOVE = {"match": "What of a model's sense of position do toys of its architecture share?"}


class Commands(TyperGroup):
    """All commands; each is imported when it is called."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        sentences = questions() | ABOVE | {name: _begins(name) for name in OTHERS}
        self.commands = {name: TyperCommand(name, help=sentence) for name, sentence in sentences.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, those of measures first."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What is called, whole."""
        name, *rest = args
        if name in OTHERS:
            module = vars(import_module(f".{OTHERS[name]}", __package__))
            return name, _alone(name, module.get(name) or module[f"{name}_"]), rest
        if name in questions():
            return name, command_of(measure(name)), rest
        if name in ABOVE:
            return name, command_of(import_module(f"toy.{name}").MEASURE), rest
        return super().resolve_command(ctx, args)


def _begins(name: str) -> str:
    """The sentence with which a command's docstring begins."""
    text = Path(__file__).with_name(f"{OTHERS[name]}.py").read_text(encoding="utf-8")
    (sentence,) = re.findall(rf'^def {name}_?\(.*?^    """(.+?)$', text, re.MULTILINE | re.DOTALL)
    return sentence


def _alone(name: str, function: Any) -> TyperCommand:
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, epilog=function.epilog)(function)
    made: Any = typer.main.get_command(alone)
    return made


def command_of(one: Measure) -> TyperCommand:
    """The command of a measure."""

    def prompted(target: Target, options: Any, prompts: Any, loading: Any) -> None:
        _run(one, target, options, prompts, loading)

    def unprompted(target: Target, options: Any, loading: Any) -> None:
        _run(one, target, options, Prompts(), loading)

    run = prompted if one.prompted else unprompted
    groups = {"target": Target, "options": one.options, "prompts": Prompts, "loading": Loading}
    run.__annotations__ = {name: groups[name] for name in run.__annotations__ if name in groups}
    run.__doc__, run.__name__ = one.options.__doc__, one.name
    return _alone(one.name, command(without=one.without, **{"out": Path(f"runs/{one.name}"), **one.defaults})(run))


def _run(one: Measure, target: Target, options: Any, prompts: Prompts, loading: Loading) -> None:
    from ..headlines import SHOWN, headlines, read, texts_of
    from ..loop import run, written

    if not target.models:
        remark("no model given: measuring tiny-llama")
    with progress() as advance:
        results = run(one, target.sources, target.out, options, prompts, loading, advance=advance, remark=remark)
    shown = headlines(one, results, SHOWN)
    for line in read(results, shown):
        remark(line)
    if one.shown is not None:
        print_colored(map(one.shown, results.values()))
    print_table(shown.columns, shown.rows)
    texts = texts_of(results)
    print_written(written(one, texts or results, target.out))
    print_lines([] if texts else one.answer(results))
