"""What all commands of `headwater` have in common, and how options declared in dataclasses become commands."""

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import call
from typer.main import get_command

from probes.cli.main import app
from probes.cli.measures import command
from probes.cli.training import Pretraining
from probes.measure import measure, questions
from probes.options import Loading, Options, Prompts, option

PROGRAM: Any = get_command(app)
CONTEXT = typer.Context(PROGRAM)
NAMES = PROGRAM.list_commands(CONTEXT)


def options(name: str) -> dict[str, Any]:
    """The options and arguments of a command by name."""
    return {one.name: one for one in called(name).params if one.name != "help"}


def called(name: str) -> Any:
    """The command that is called by a name."""
    return PROGRAM.resolve_command(CONTEXT, [name])[1]


@pytest.mark.parametrize("name", NAMES)
def test_help_ends_with_commands_that_parse(monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "120")
    assert call(monkeypatch, "--help") == 0
    assert f" {name} " in capsys.readouterr().out
    for asked in ("--help", "-h"):
        assert call(monkeypatch, name, asked) == 0
        shown = capsys.readouterr().out
        assert f"Usage: headwater {name} " in shown
        examples = shown[shown.index("Examples:") :]
        assert re.findall(r"headwater (\S+)", examples) == [name] * examples.count("headwater ") != []
    assert called(name).help
    for one in options(name).values():
        assert one.help, f"{name} {one.name} has no help"
        assert one.help[-1] in ".…", f"{name} {one.name}: {one.help}"


def groups(of: type = Options) -> list[Any]:
    """All groups of options, those of every measure among them."""
    for name in questions():
        measure(name)
    known = [one for below in of.__subclasses__() for one in (below, *groups(below))]
    # Not those of toys, where these were imported.
    return [one for one in known if one.__module__.startswith("probes.")]


@pytest.mark.parametrize("group", groups())
def test_no_option_of_a_group_is_lost(group):
    """What a group hands to the library is named as its options are."""
    made = group(out=Path("out")) if group is Pretraining else group()
    apart = {
        "probes.options": {"device_map", "max_memory", "offload_folder", "ablate", "whole"},
        "probes.measures.inspect": {"text"},  # a prompt
    }
    own = {field.name for field in fields(group)} - apart.get(group.__module__, set())
    renamed = {"prompts": "n"} if group is Prompts else {"replace": "replacement"}
    added = {"theories", "by_path"} if group.__module__ == "probes.measures.theory" else set()
    assert {renamed.get(name, name) for name in own} | added == set(made.values())


def test_options_that_are_handed_on_otherwise():
    loading = Loading(device_map="auto", max_memory="0=20GiB, cpu=8GiB", ablate="18.8, 2.0")
    assert str(loading.changes()) == "18.8+2.0"
    assert loading.values()["max_memory"] == {0: "20GiB", "cpu": "8GiB"}
    read = Prompts(prompts=1, text=Path("a/b"), first="7").values()
    assert (read["n"], read["text"], read["first"]) == (1, "a/b", 7)


@dataclass(frozen=True)
class Group(Options):
    """Options of a test."""

    name: str = option("What it is called.", ...)
    size: int = option("How large.", 3, max=9)
    kept: bool = option("Whether.", True)


def test_a_dataclass_becomes_options_in_its_place():
    seen = []

    @command(without=("kept",), size=4)
    def study(first: str = option("One."), *, group: Group, last: int = option("Two.", 2)) -> None:
        """Do it.

        Examples:
          headwater study
        """
        seen.append((first, group, last))

    shown = inspect.signature(study).parameters
    defaults = {"first": None, "name": inspect.Parameter.empty, "size": 4, "last": 2}
    assert {name: one.default for name, one in shown.items()} == defaults
    info = shown["size"].annotation.__metadata__[0]
    assert (info.help, info.max, shown["size"].annotation.__origin__) == ("How large.", 9, int)
    study(first="a", size=5, name="b", last=6)
    assert seen == [("a", Group(size=5, name="b", kept=True), 6)]
    assert study.__doc__.strip() == "Do it."
    assert study.epilog == "Examples:\n  headwater study"
