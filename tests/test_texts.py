"""The texts that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

import probes
from probes.data.documents import BUNDLED, read_documents
from probes.data.prompts import check_source, draw


@pytest.mark.parametrize("name", ["prose", "code"])
def test_there_are_a_hundred_long_documents_of_each(name):
    documents = read_documents(BUNDLED[name])
    assert len({document.name for document in documents}) == 100
    assert min(len(document.text) for document in documents) >= 10_000
    assert max(len(document.text) for document in documents) <= 20_000
    drawn = draw(probes.load("tiny-llama"), n=2, length=16, text=name)
    assert drawn.attributes["text_source"] == f"bundled {name}"


def test_they_are_small_and_their_licences_lie_beside_them():
    folder = BUNDLED["prose"].parent
    assert sum(file.stat().st_size for file in BUNDLED.values()) < 4e6
    said = (folder / "README.md").read_text(encoding="utf-8") + (folder / "LICENSES.txt").read_text(encoding="utf-8")
    for source in (
        "datasets-sotu",
        "datasets-moby-dick",
        "networkx 3.4.2",
        "Django 5.2",
        "SQLAlchemy 2.0.40",
        "SymPy 1.13.3",
    ):
        assert source in said


def test_a_file_of_that_name_is_given_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prose").write_text("word " * 200, encoding="utf-8")
    check_source(text="prose")
    drawn = draw(probes.load("tiny-llama"), n=1, length=16, text="./prose")
    assert drawn.attributes["text_source"] == "text './prose'"
