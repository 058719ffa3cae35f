"""Files appear whole or not at all."""

from pathlib import Path

import pytest
from commands import listing

from probes.errors import InputError
from probes.results.tables import Report, Table, markdown, write_report
from probes.run.files import atomic, together


def test_atomic_write_replaces_the_file_or_keeps_it_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "new" / "result.txt"
    for text in ("first", "second"):
        with atomic(file) as temporary:
            assert temporary.parent == file.parent
            assert temporary.suffix == ".txt"
            temporary.write_text(text)
        assert file.read_text() == text

    def interrupted() -> None:
        with atomic(file) as temporary:
            temporary.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "second"
    assert [path.name for path in file.parent.iterdir()] == ["result.txt"]


def test_bars_and_line_breaks_in_a_table_end_no_cell(tmp_path):
    table = Table("Rows", ("|h_0|", "said"), [["1", "a | b"], ["2", "two\nlines"]])
    expected = [r"| \|h_0\| | said |", "| --- | --- |", r"| 1 | a \| b |", "| 2 | two lines |"]
    assert markdown(table) == expected
    write_report(Report("Title", "Said.", [table], []), tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text(encoding="utf-8").splitlines()[-4:] == expected


def write(path: Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def test_files_written_together_appear_together(tmp_path):
    write(tmp_path / "a", "old")
    with together():
        write(tmp_path / "a", "new")
        write(tmp_path / "deep" / "b", "new")
        with together():
            write(tmp_path / "c", "new")
        assert (tmp_path / "a").read_text(encoding="utf-8") == "old"
        assert not (tmp_path / "c").exists()
    assert listing(tmp_path) == {"a": b"new", "c": b"new", "deep": None, "deep/b": b"new"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None])
def test_of_files_written_together_none_appears_after_a_failure(tmp_path, error):
    """The last failure is a folder that stands where a file is to be."""
    write(tmp_path / "a", "old")
    (tmp_path / "folder").mkdir()

    def written() -> None:
        with together():
            write(tmp_path / "a", "new")
            write(tmp_path / "deep" / "b", "new")
            if error is not None:
                raise error
            write(tmp_path / "folder", "new")

    with pytest.raises((KeyboardInterrupt, InputError)) as raised:
        written()
    assert error is raised.value or "folder' is a folder" in str(raised.value)
    assert listing(tmp_path) == {"a": b"old", "deep": None, "folder": None}
    write(tmp_path / "a", "new")  # and what comes after takes its place at once
    assert listing(tmp_path)["a"] == b"new"
