"""Documents from files, folders, datasets, the standard library, and those that come with the package."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import families
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import probes
from probes.data import documents as reader
from probes.data.prompts import check_source, draw
from probes.errors import InputError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_files_and_folders_are_read_in_name_order(tmp_path):
    file = write(tmp_path / "sub" / "a.txt", "first line\r\nsecond – line\r")
    assert reader.read_documents(file) == [reader.Document("a.txt", "first line\nsecond – line\n")]
    write(tmp_path / "b.md", "b")
    write(tmp_path / "a.py", "pass")
    write(tmp_path / "image.png", b"\x89PNG\0")
    names = [document.name for document in reader.read_documents(tmp_path)]
    assert names == ["a.py", "b.md", "sub/a.txt"]
    lines = [{"name": "one", "text": "eins"}, {"text": "zwei\u2028still zwei"}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
    file = write(tmp_path / "docs.jsonl", text)
    assert reader.read_documents(file) == [
        reader.Document("one", "eins"),
        reader.Document("docs.jsonl:3", "zwei\u2028still zwei"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", " \n", "empty.txt' is empty"),
        ("latin.txt", b"caf\xe9", "latin.txt' is not UTF-8 text (byte 3)"),
        ("nul.txt", b"a\0b", "nul.txt' holds NUL bytes"),
        ("rows.jsonl", '{"text": "a"}\n{"body": "b"}\n', "rows.jsonl' line 2"),
        ("nowhere", None, "nowhere' does not exist"),
        ("", None, "' holds no text files"),
    ],
)
def test_unusable_text_is_refused_by_name(tmp_path, name, content, says):
    write(tmp_path / "x.bin", b"1")
    if content is not None:
        write(tmp_path / name, content)
    assert says in families.refused(reader.read_documents, tmp_path / name)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=200)  # halves of characters included
ENTRIES = st.dictionaries(st.sampled_from(["text", "name", "x"]), st.one_of(st.none(), st.floats(), ANY_TEXT))
LINES = st.lists(ENTRIES, max_size=4).map(lambda values: "\n".join(map(json.dumps, values)).encode())
CONTENT = st.one_of(st.binary(max_size=300), ANY_TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")), LINES)


@settings(max_examples=200, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(CONTENT, st.booleans())
def test_any_text_file_is_read_or_refused(tmp_path, content, lines):
    file = tmp_path / ("any.jsonl" if lines else "any.txt")
    file.write_bytes(content)
    with suppress(InputError):
        documents = reader.read_documents(file)
        assert any(document.text.strip() for document in documents)
        for document in documents:
            document.text.encode("utf-8")
        if lines:
            held = [json.loads(line)["text"] for line in content.decode().split("\n") if line.strip()]
            assert [document.text for document in documents] == held


def test_datasets_are_read_from_local_files_and_folders(tmp_path):
    (tmp_path / "folder").mkdir()
    table = pyarrow.table({"text": ["one", "two"], "id": [1, 2]})
    for file in (tmp_path / "rows.parquet", tmp_path / "folder" / "rows.parquet"):
        pyarrow.parquet.write_table(table, file)
    lines = write(tmp_path / "rows.jsonl", '{"body": "one"}\n{"body": "two"}\n')
    for name, column in ((tmp_path / "rows.parquet", "text"), (tmp_path / "folder", "text"), (lines, "body")):
        documents = list(reader.stream_dataset(str(name), column=column))
        assert documents == [reader.Document(f"{name}[0]", "one"), reader.Document(f"{name}[1]", "two")]
    again = [list(reader.stream_dataset(str(tmp_path / "rows.parquet"), seed=seed)) for seed in range(8)]
    assert {tuple(text for _, text in found) for found in again} == {("one", "two"), ("two", "one")}


@pytest.mark.slow
def test_stdlib_is_source_of_this_interpreter_without_tests_and_tables():
    texts = dict(reader.stdlib_documents())
    assert texts["json/decoder.py"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert not {part for name in texts for part in name.split("/")} & {"test", "tests", "encodings", "site-packages"}
    assert sum(map(len, texts.values())) > 5_000_000
    assert reader.stdlib_name() == f"CPython {'.'.join(map(str, sys.version_info[:3]))} standard library"


def test_heldout_split_is_disjoint_complete_and_independent_of_order():
    documents = [reader.Document(f"d{i}", "x" * (20 + 7 * i % 50)) for i in range(200)] + [
        reader.Document("long", "y" * 900)
    ]
    training, heldout = reader.split_heldout(documents, characters=1000)
    assert sorted(training + heldout) == sorted(documents)
    assert 900 < sum(len(document.text) for document in heldout) <= 1000
    assert "long" not in {document.name for document in heldout}  # more than a fifth of what is held out
    assert [d for d in documents if d in training] == training
    assert set(reader.split_heldout(documents[::-1], characters=1000)[1]) == set(heldout)


def test_long_text_is_the_prose_with_four_documents_joined():
    joined, prose = reader.bundled("long"), reader.bundled("prose")
    assert len(joined) == 25
    assert "".join(document.text for document in joined).replace("\n", "") == "".join(
        document.text for document in prose
    ).replace("\n", "")
    assert min(len(document.text) for document in joined) >= 40_000


def test_bundled_texts_are_a_hundred_long_documents_each(tmp_path, monkeypatch):
    for name in ("prose", "code"):
        documents = reader.read_documents(reader.BUNDLED[name])
        assert len({document.name for document in documents}) == 100
        assert all(10_000 <= len(document.text) <= 20_000 for document in documents)
    monkeypatch.chdir(tmp_path)
    Path("prose").write_text("word " * 200, encoding="utf-8")
    check_source(text="prose")
    model = probes.load("tiny-llama")
    for text, source in (("prose", "bundled prose"), ("./prose", "text './prose'")):  # a file by its path
        assert draw(model, n=1, length=16, text=text).attributes["text_source"] == source
