"""Windows within documents: which are read, how windows are spread over them, and where they begin."""

from collections import Counter

import numpy as np
import pytest
from bigram import WORDS, bigram
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.data.documents import Document
from probes.data.prompts import draw, prompts
from probes.data.windows import CHARACTERS_PER_TOKEN, MARGIN, SHORT, Tokenized, _starts, cut, passage_of, tokenize
from probes.errors import InputError

MODEL = bigram(bos=False)


def read_of(sizes):
    """Documents of so many tokens; each token names its document and its place."""
    return [Tokenized(str(n), 1000 * n + np.arange(size)) for n, size in enumerate(sizes)]


@settings(deadline=None)
@given(st.lists(st.integers(9, 60), min_size=1, max_size=9), st.integers(1, 20), st.integers(2, 9), st.integers(0, 99))
def test_windows_lie_in_one_document_and_halves_share_none(sizes, n, length, seed):
    if sum(size - length + 1 for size in sizes) < n:
        with pytest.raises(InputError, match=f"and {n} are asked for"):
            cut(read_of(sizes), n, length, np.random.default_rng(seed), "this")
        return
    windows, places, twice = cut(read_of(sizes), n, length, np.random.default_rng(seed), "this")
    assert windows.shape == (n, length)
    assert (np.diff(windows, axis=1) == 1).all()  # in one document: 1000s lie between
    assert (windows[:, 0] // 1000).tolist() == places
    assert len(set(windows[:, 0].tolist())) == n
    seen = Counter(windows.ravel().tolist())
    assert twice == pytest.approx(sum(count for count in seen.values() if count > 1) / (n * length))
    counts = Counter(places)
    for place, count in counts.items():  # side by side where they fit
        if count * length <= sizes[place]:
            assert all(seen[token] <= 1 for token in range(1000 * place, 1000 * place + sizes[place]))
    half, middle = n // 2, len(sizes) // 2
    room = [size - length + 1 for size in sizes]
    if half and sum(room[:middle]) >= half and sum(room[middle:]) >= n - half:
        assert not set(places[:half]) & set(places[half:])


def test_documents_take_turns_and_places_side_by_side_are_uniform():
    places = cut(read_of([50, 50, 12, 50, 50, 50]), 14, 10, np.random.default_rng(0), "this")[1]
    assert places == [0, 1, 2, 0, 1, 2, 0, 3, 4, 5, 3, 4, 5, 3]
    # All placements of 2 windows of 3 in 8 tokens: starts a < b with b >= a + 3 and b <= 5, in either order.
    random = np.random.default_rng(0)
    seen = Counter(tuple(_starts(8, 3, 2, random).tolist()) for _ in range(6000))
    every = {(a, b) for a in range(6) for b in range(6) if abs(a - b) >= 3}
    assert set(seen) == every
    assert all(abs(count - 500) < 5 * 500**0.5 for count in seen.values())


def test_prompts_carry_their_document(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 40)
    (tmp_path / "short.txt").write_text("xyz")
    drawn = draw(MODEL, n=9, length=10, text=tmp_path)
    for row, document in zip(drawn.tokens.tolist(), drawn.documents, strict=True):
        assert MODEL.tokenizer.decode(row) == document[0] * 10
    assert not set(drawn.documents[:4]) & set(drawn.documents[4:])
    assert set(Counter(drawn.documents).values()) <= {2, 3}
    with pytest.raises(InputError, match=r"no document of .* has 41 tokens \(the longest has 40\)"):
        prompts(MODEL, n=1, length=41, text=tmp_path)


def test_reading_stops_when_there_is_enough():
    def endless(text):
        while True:
            looked_at.append(1)
            yield Document("d", text)

    looked_at: list[int] = []
    asked = {"source": "this", "wanted": 5, "n": 5, "length": 10, "random": np.random.default_rng(0)}
    read = tokenize(MODEL, endless("ABCDEFGHIJ"), **asked)
    assert len(looked_at) == 5
    assert [len(ids) for _, ids in read] == [10] * 5
    looked_at.clear()
    with pytest.raises(InputError, match="the longest has 9"):  # a stream that never gives one is left
        tokenize(MODEL, endless("ABCDEFGHI"), **asked)
    assert len(looked_at) == SHORT


def test_a_long_document_is_read_from_a_random_place_where_a_word_begins(tmp_path):
    text = " ".join(WORDS * 1000)
    passages = [passage_of(text, characters=400, random=np.random.default_rng(seed)) for seed in range(8)]
    for passage in passages:
        assert 300 <= len(passage) <= 400
        assert passage in text
        assert passage.split()[0] in WORDS
    assert len({*passages}) > 1
    assert passage_of(text, characters=len(text), random=np.random.default_rng(0)) == text
    assert len(passage_of("字" * 5000, characters=400, random=np.random.default_rng(0))) == 400
    file, lengths = tmp_path / "long.txt", []
    file.write_text("x" * 200_000)  # x is a token

    def counting(text, **options):
        lengths.append(len(text))
        return MODEL.tokenizer(text, **options)

    counted = bigram(bos=False)
    counted.tokenizer = counting
    prompts(counted, n=2, length=10, text=file)
    assert sum(lengths) == CHARACTERS_PER_TOKEN * MARGIN * 2 * 10
