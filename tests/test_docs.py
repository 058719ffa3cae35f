"""The documentation: its examples run and print what it says, every public name and command is on a page, links resolve.

Fenced blocks of `python` and `sh` run in the order of their page, in an empty folder, unless an HTML comment right above
says "not run" and why. A block of `text` behind one is what it printed: words have to come again in that order; numbers,
which depend on the machine, need not, and lines may be left out.
"""

import pkgutil
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
from commands import call

import probes
import probes.measures
from probes import measure as registry
from probes.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"(?:<!-- (?P<note>.*?) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
NAMED = re.compile(r"^::: (\S+)$", re.MULTILINE)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).with_suffix("").as_posix())


class Block(NamedTuple):
    """One fenced block; `note` is the comment right above it."""

    kind: str
    body: str
    note: str

    @property
    def runs(self) -> bool:
        return self.kind in ("python", "sh") and not self.note.startswith("not run: ")


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(found["kind"], found["body"], found["note"] or "") for found in BLOCK.finditer(text)]


def commands(block: Block) -> list[list[str]]:
    """Arguments of every `headwater` line; everything else is refused, so that no line of a page goes unnoticed."""
    lines = [shlex.split(line, comments=True) for line in block.body.splitlines()]
    assert all(words[0] == "headwater" for words in lines if words), block.body
    return [words[1:] for words in lines if words]


def prints(stated: str, printed: str) -> bool:
    """Whether the words of `stated` come in `printed` in this order."""
    words = [word for word in stated.split() if not any(c.isdigit() for c in word) and any(c.isalpha() for c in word)]
    rest = iter(printed.split())
    return all(word in rest for word in words)


DOCUMENTED = [path for page in PAGES for path in NAMED.findall(page.read_text(encoding="utf-8"))]


def test_there_are_pages_and_the_menu_has_all_of_them():
    menu = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


@pytest.mark.slow
@every_page
def test_examples_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, Any] = {"__name__": page.stem}
    printed: str | None = None  # by the block before; None: it did not run
    for block in blocks(page):
        if block.kind == "text":
            if printed is not None:
                assert prints(block.body, printed), (block.body, printed)
            printed = None
        elif not block.runs:
            printed = None
        elif block.kind == "python":
            exec(compile(block.body, str(page), "exec"), names)
            printed = capsys.readouterr().out
        else:
            code = int(block.note.removeprefix("fails with ")) if block.note else 0
            assert [call(monkeypatch, *arguments) for arguments in commands(block)] == [code] * len(commands(block))
            shown = capsys.readouterr()
            printed = shown.err if code else shown.out


@every_page
def test_outputs_follow_what_made_them_links_resolve_and_options_exist(page):
    found, program = blocks(page), typer.main.get_command(cli.app)
    assert {block.kind for block in found} <= {"python", "sh", "text", "toml"}
    for before, block in zip([None, *found], found, strict=False):
        assert block.kind != "text" or (before is not None and before.kind in ("python", "sh"))
        assert not block.note or block.note.startswith(("not run: ", "fails with ")), block.note
        for line in block.body.splitlines() if block.kind == "sh" and not block.runs else ():
            parsed(program, line)
    for target, _ in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        assert "://" not in target, f"{target}: pages lead nowhere else"
        assert (page.parent / target).is_file(), target


def parsed(program: Any, line: str) -> None:
    """Fails where a line of `headwater` has options that its command lacks; nothing is run."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["headwater"]:
        name, command, rest = program.resolve_command(typer.Context(program), words[1:])
        command.make_context(name, rest)


def test_readme_is_short_its_links_resolve_and_its_table_has_every_command():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    for target, _ in LINK.findall(BLOCK.sub("", text)):
        assert (ROOT / target).exists(), target
    named = re.findall(r"^\| \[?`headwater ([a-z-]+)", text, re.MULTILINE)
    program: Any = typer.main.get_command(cli.app)
    assert sorted(named) == sorted(program.list_commands(typer.Context(program)))
    for line in re.findall(r"`(headwater [^`]*smollm2[^`]*)`", text):  # findings stand beside commands that exist
        parsed(program, line)


@pytest.mark.slow
def test_readme_prints_what_it_says(capsys):
    ours = [block for block in blocks(README) if block.kind in ("python", "text")]
    assert [block.kind for block in ours] == ["python", "text"]
    exec(compile(ours[0].body, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert prints(ours[1].body, printed), printed


def test_every_public_name_is_on_a_page():
    shown = [pkgutil.resolve_name(path) for path in DOCUMENTED]
    missing = [name for name in probes.__all__ if not any(getattr(probes, name) is value for value in shown)]
    assert missing == []
    assert len(DOCUMENTED) == len(set(DOCUMENTED)), "a name stands on two pages"


def test_every_command_has_a_page():
    program: Any = typer.main.get_command(cli.app)
    own = sorted((DOCS / "probes").glob("*.md"))
    shown = {words[0] for page in own for block in blocks(page) if block.kind == "sh" for words in commands(block)}
    names = set(program.list_commands(typer.Context(program)))
    assert shown == names
    assert {page.stem for page in own} == names - {"toy"}


def test_the_example_of_a_measure_is_a_command(tmp_path, monkeypatch, capsys):
    (example,) = (block.body for block in blocks(DOCS / "adding-a-measure.md") if block.kind == "python")
    assert len(example.splitlines()) <= 80
    (tmp_path / "distance.py").write_text(example, encoding="utf-8")
    out = tmp_path / "out"
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    monkeypatch.setattr(probes.measures, "__path__", [*probes.measures.__path__, str(tmp_path)])
    registry.questions.cache_clear()
    try:
        assert call(monkeypatch, *f"distance tiny-llama --prompts 2 --length 16 --out {out}".split()) == 0
    finally:
        registry.questions.cache_clear()
        sys.modules.pop("probes.measures.distance", None)
    assert "of the distance that even attention has" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {f"distance.{kind}" for kind in ("nc", "md", "png", "svg")}


def test_the_figures_of_the_sources_name_rows_of_the_ledger():
    judged = runpy.run_path(str(DOCS / "hooks" / "ledger.py"))["judged"]
    page, ledger = (path.read_text(encoding="utf-8") for path in (DOCS / "figures.md", ROOT / "reports" / "claims.md"))
    assert "`wu-thm-4.1-limit` *holds*" in judged(page, ledger)
    for wrong in (page.replace("wu-thm-4.1-limit", "wu-thm-4.1"), page.replace("`wu-thm-4.1-limit`, ", "")):
        with pytest.raises(ValueError, match="wu-thm"):
            judged(wrong, ledger)
