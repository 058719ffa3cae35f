"""README and findings: each number with an interval stands in the table that it was taken from, which today's code makes."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FINDINGS = ROOT / "docs/findings.md"
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%? \[[-+.,\d%e ]+\]")
SOURCE = re.compile(r"^\(Rows of `(\S+)`\.\)$", re.MULTILINE)


def headed(text: str, heading: str) -> str:
    """The section under a heading."""
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


def test_every_number_of_readme_is_a_finding() -> None:
    stated = NUMBER.findall(headed((ROOT / "README.md").read_text(encoding="utf-8"), "## What it found"))
    found = FINDINGS.read_text(encoding="utf-8")
    assert stated
    assert not [number for number in stated if number not in found]


def test_every_number_of_a_finding_stands_in_its_table() -> None:
    _, *parts = SOURCE.split(FINDINGS.read_text(encoding="utf-8"))
    assert parts
    for source, text in zip(parts[::2], parts[1::2], strict=True):
        table, stated = (ROOT / source).read_text(encoding="utf-8"), NUMBER.findall(text.partition("\n## ")[0])
        assert stated, source
        assert not [number for number in stated if number not in table], source


def test_the_table_is_what_the_committed_results_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.chdir(ROOT)
    import_module("llm").side_by_side(tmp_path / "table.md")
    sys.modules.pop("llm")
    assert (tmp_path / "table.md").read_text() == (ROOT / "reports/llm/table.md").read_text()
