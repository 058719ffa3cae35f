"""A command for every measure of the registry: its options, the loop over models, headlines and answers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..measure import measure, questions
from ..options import Loading, Prompts, Target
from .command import command
from .console import print_lines, print_table, print_written, progress, remark

if TYPE_CHECKING:
    from ..measure import Measure


# Measures that train toys, which the registry does not know: by name, what they answer; `toy.NAME` holds them.
ABOVE = {"match": "What of a model's sense of position do toys of its architecture share?"}


class Commands(TyperGroup):
    """The application's commands, those of measures among them, which are imported when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, those of measures first."""
        return [*questions(), *ABOVE, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Of a measure its question alone: what a list of commands shows."""
        if question := (questions() | ABOVE).get(cmd_name):
            return TyperCommand(cmd_name, help=question)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What is called; of a measure the command itself."""
        if args and args[0] in questions():
            return args[0], command_of(measure(args[0])), args[1:]
        if args and args[0] in ABOVE:
            return args[0], command_of(import_module(f"toy.{args[0]}").MEASURE), args[1:]
        return super().resolve_command(ctx, args)


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
    function = command(without=one.without, **{"out": Path(f"runs/{one.name}"), **one.defaults})(run)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(one.name, epilog=function.epilog)(function)
    made: Any = typer.main.get_command(alone)
    return made


def _run(one: Measure, target: Target, options: Any, prompts: Prompts, loading: Loading) -> None:
    from ..loop import run, written
    from ..table import SHOWN, headlines

    if not target.models:
        remark("no model given: measuring tiny-llama")
    with progress() as advance:
        results = run(one, target.sources, target.out, options, prompts, loading, advance=advance, remark=remark)
    shown = headlines(one, results, SHOWN)
    print_table(shown.columns, shown.rows)
    print_written(written(one, results, target.out))
    print_lines(one.answer(results))
