"""Texts of any content: they give documents and prompts, or an InputError; examples are the same in every run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import probes
from probes.data.documents import read_documents
from probes.data.prompts import draw
from probes.errors import InputError


def tried(examples: int) -> Any:
    """So many examples, the same ones each time."""
    usual: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=examples, derandomize=True, **usual)


def read(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What the function gives, or None where it refuses."""
    try:
        return function(*given, **options)
    except InputError:
        return None


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=200)  # halves of characters included
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats())
ENTRIES = st.dictionaries(st.sampled_from(["text", "name", "x"]), st.one_of(SCALARS, ANY_TEXT))
LINES = st.lists(ENTRIES, max_size=4).map(lambda values: "\n".join(map(json.dumps, values)).encode())
CONTENT = st.one_of(st.binary(max_size=300), ANY_TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")), LINES)


@tried(300)
@given(CONTENT, st.booleans())
def test_any_text_file_is_read_or_refused(tmp_path, content, lines):
    file = tmp_path / ("any.jsonl" if lines else "any.txt")
    file.write_bytes(content)
    documents = read(read_documents, file)
    assert documents is None or any(document.text.strip() for document in documents)
    for document in documents or ():
        document.text.encode("utf-8")
    if documents and lines:
        held = [json.loads(line)["text"] for line in content.decode().split("\n") if line.strip()]
        assert [document.text for document in documents] == held


@pytest.fixture(scope="module")
def model() -> Any:
    """A bundled model with its own byte-level tokenizer."""
    return probes.load("tiny-llama", device="cpu")


FIRST = st.sampled_from(["auto", "bos", "none", 5])


@tried(60)
@given(ANY_TEXT, st.integers(1, 3), st.integers(-1, 9), FIRST, st.integers(-1, 2**70))
def test_prompts_of_any_text_are_ids_of_the_vocabulary(tmp_path, model, text, n, length, first, seed):
    file = tmp_path / "any.txt"
    file.write_bytes((text * 3).encode("utf-8", "surrogatepass"))
    found = read(draw, model, n=n, length=length, text=file, first=first, seed=seed)
    if found is not None:
        assert found.tokens.shape == (n, length)
        assert 0 <= int(found.tokens.min()) <= int(found.tokens.max()) < model.spec.vocabulary
    # One that is long enough is never refused.
    text = text.replace("\0", "").encode("utf-8", "ignore").decode() + " and so on and on and on"
    file.write_text(text, encoding="utf-8")
    assert draw(model, n=1, length=4, text=file).tokens.shape == (1, 4)
