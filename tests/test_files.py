"""Files appear whole or not at all."""

import os
import stat

import pytest

from probes.errors import InputError
from probes.run.files import atomic, require_writable, table_lines, write_json, write_table


def test_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "new" / "result.txt"
    for text in ("first", "second"):
        with atomic(file) as temporary:
            assert temporary.parent == file.parent
            assert temporary.suffix == ".txt"
            temporary.write_text(text)
        assert file.read_text() == text
        assert [path.name for path in file.parent.iterdir()] == ["result.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_write_keeps_the_old_file(tmp_path, error):
    file = tmp_path / "result.txt"
    file.write_text("old")

    def write() -> None:
        with atomic(file) as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises(error):
        write()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_permissions_are_those_of_any_other_file(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    plain.touch()
    with atomic(ours) as temporary:
        temporary.touch()
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_write_below_a_file_is_bad_input_that_names_the_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/out\.json.*choose a folder"):
        write_json(tmp_path / "file" / "out.json", {})


def test_json_is_indented_and_keeps_its_characters(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "é": [\n    1\n  ]\n}\n'


def test_bars_and_line_breaks_in_a_table_end_no_cell(tmp_path):
    columns, rows = ("|h_0|", "said"), [["1", "a | b"], ["2", "two\nlines"]]
    expected = [r"| \|h_0\| | said |", "| --- | --- |", r"| 1 | a \| b |", "| 2 | two lines |"]
    assert table_lines(columns, rows) == expected
    write_table(tmp_path / "page.md", "Title", ["Said."], columns, rows)
    assert (tmp_path / "page.md").read_text(encoding="utf-8").splitlines()[-4:] == expected


def test_writable_check_makes_nothing(tmp_path):
    require_writable(tmp_path / "a" / "b")
    require_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_writable_check_refuses_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "b" / "c"):
        with pytest.raises(InputError, match=r"file' is no folder"):
            require_writable(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_writable_check_refuses_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(InputError, match="gives no permission"):
            require_writable(tmp_path / "a")
    finally:
        tmp_path.chmod(0o755)
