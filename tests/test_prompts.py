"""Prompts: windows of real text, the first-token policy, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from importlib import import_module
from itertools import islice
from tempfile import TemporaryFile

import numpy as np
import pytest
import torch
from bigram import WORDS, bigram

from probes.errors import InputError
from probes.prompts import (
    ID,
    MARGIN,
    NOTABLE_OVERLAP,
    SKIP,
    _passage,
    _skip_some,
    _slices,
    _tokenize,
    check_tokens,
    draw,
    first_policy,
    overlap,
    parse_first,
    prompts,
    tokens_hash,
)
from probes.text import HELDOUT, Document


@pytest.fixture(scope="module")
def with_bos():
    return bigram(bos=True)


@pytest.fixture(scope="module")
def without_bos():
    return bigram(bos=False)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(np.random.default_rng(5).choice(WORDS, 3000)), encoding="utf-8")
    return file


def ids_of(model, text) -> list[int]:
    return model.tokenizer(text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]


def places(stream: list[int], window: list[int]) -> list[int]:
    return [at for at in range(len(stream) - len(window) + 1) if stream[at : at + len(window)] == window]


def test_windows_are_pieces_of_the_text(without_bos, text):
    tokens = prompts(without_bos, n=5, length=40, text=text)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (5, 40)
    assert tokens.device.type == "cpu"
    stream = ids_of(without_bos, text)
    starts = [places(stream, window) for window in tokens.tolist()]
    assert all(len(found) == 1 for found in starts)  # 40 random words occur once
    assert len({found[0] for found in starts}) == 5


def test_every_offset_is_used_once_when_there_are_no_others(without_bos, tmp_path):
    (tmp_path / "t.txt").write_text("ABCDEFGHIJ")  # capitals are not merged: 10 bytes, 10 tokens
    stream = ids_of(without_bos, tmp_path / "t.txt")
    assert len(stream) == 10
    tokens = draw(without_bos, n=7, length=4, text=tmp_path / "t.txt").tokens
    assert sorted(places(stream, window)[0] for window in tokens.tolist()) == list(range(7))
    with pytest.raises(InputError, match="gives 10 tokens; 8 windows of 4 need at least 11"):
        prompts(without_bos, n=8, length=4, text=tmp_path / "t.txt")


def test_first_token_policies_share_their_text(with_bos, text):
    def cut(first, seed=3):
        return draw(with_bos, n=4, length=20, text=text, first=first, seed=seed).tokens

    plain, bos, other = cut("none"), cut("bos"), cut(17)
    assert with_bos.bos == 0
    assert (bos[:, 0] == 0).all()
    assert (other[:, 0] == 17).all()
    assert torch.equal(bos[:, 1:], plain[:, :-1])
    assert torch.equal(other[:, 1:], plain[:, :-1])
    assert not (plain == 0).any()
    assert torch.equal(cut("auto"), bos)  # although its id is 0
    assert torch.equal(cut("bos"), bos)
    assert not torch.equal(cut("bos", seed=4), bos)


def test_auto_is_text_where_there_is_no_bos(without_bos, text):
    assert torch.equal(
        prompts(without_bos, text=text, length=30), prompts(without_bos, text=text, length=30, first="none")
    )
    with pytest.raises(InputError, match="bigram has no BOS token; use --first none"):
        prompts(without_bos, text=text, first="bos")


def test_end_of_text_stands_between_documents_and_nowhere_else(without_bos, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 5)
    tokens = prompts(without_bos, n=1, length=17, text=tmp_path)[0].tolist()  # 15 letters, 2 ends: all there is
    end = without_bos.tokenizer.eos_token_id
    assert [i for i, token in enumerate(tokens) if token == end] == [5, 11]
    tokenizer = bigram(bos=False).tokenizer
    tokenizer.eos_token = None
    silent = replace(without_bos, tokenizer=tokenizer)
    assert end not in prompts(silent, n=1, length=15, text=tmp_path)[0].tolist()


def test_special_tokens_spelled_out_in_a_text_are_read_as_such_and_named(with_bos, tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the <|bos|> cat <|eos|> sat " * 20 + "<|eos|>")
    drawn = draw(with_bos, n=3, length=50, text=file, first="none")
    assert json.loads(str(drawn.attributes["special_tokens"])) == {"<|eos|>": 21, "<|bos|>": 20}
    assert drawn.remarks[-1].endswith("the text spells out are read as such: <|eos|> (21), <|bos|> (20)")
    stream = with_bos.tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]
    assert all(places(stream, window) for window in drawn.tokens.tolist())
    assert (drawn.tokens == with_bos.bos).sum() > 10
    with pytest.warns(UserWarning, match="bigram: ") as warned:
        assert torch.equal(prompts(with_bos, n=3, length=50, text=file, first="none"), drawn.tokens)
    assert [str(one.message) for one in warned] == list(drawn.remarks)


def test_a_tokenizer_told_to_split_special_tokens_does_not(with_bos, tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the <|bos|> cat " * 20)
    told = bigram(bos=True)
    told.tokenizer.split_special_tokens = True
    one, other = (draw(model, n=2, length=9, text=file, first="none").tokens for model in (told, with_bos))
    assert torch.equal(one, other)
    assert told.tokenizer.split_special_tokens  # the caller's is left as it was


def test_overlap_is_the_share_of_tokens_that_stand_in_two_windows():
    random = np.random.default_rng(0)
    for n, length, offsets in ((1, 5, 1), (2, 5, 3), (7, 4, 7), (9, 11, 60), (30, 8, 500)):
        starts = random.choice(offsets, size=n, replace=False)
        seen = Counter(start + i for start in starts.tolist() for i in range(length))
        assert overlap(starts, length) == pytest.approx(sum(c for c in seen.values() if c > 1) / (n * length))
    assert overlap(np.array([0, 5, 10]), 5) == 0.0


def test_windows_that_overlap_are_said_to(without_bos, text, tmp_path):
    few = draw(without_bos, n=4, length=20, text=text)
    assert few.remarks == ()
    assert 0 <= float(few.attributes["windows_overlap"]) <= NOTABLE_OVERLAP
    short = tmp_path / "short.txt"
    short.write_text(" ".join(text.read_text().split()[:80]))
    many = draw(without_bos, n=4, length=60, text=short)
    starts = [places(ids_of(without_bos, short), window)[0] for window in many.tokens.tolist()]
    assert many.attributes["windows_overlap"] == pytest.approx(overlap(np.array(starts), 60))
    assert overlap(np.array(starts), 60) > NOTABLE_OVERLAP
    assert len(many.remarks) == 1
    assert "of the tokens stand in more than one of the 4 windows of 60" in many.remarks[0]
    with pytest.warns(UserWarning, match="stand in more than one of the 4 windows"):
        prompts(without_bos, n=4, length=60, text=short)


def test_bundled_text(with_bos):
    if not HELDOUT.exists():
        pytest.skip("the held-out text is not bundled yet")
    tokens = prompts(with_bos)
    assert tokens.shape == (16, 256)
    assert torch.equal(tokens, prompts(with_bos))
    assert draw(with_bos, n=16, length=256).attributes["text_source"] == "bundled held-out text"


def test_dataset_file_gives_the_same_kind_of_windows(with_bos, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    rows = [" ".join(np.random.default_rng(i).choice(WORDS, 50)) for i in range(40)]  # fewer than are skipped, mostly
    file.write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    tokens = prompts(with_bos, n=3, length=24, dataset=str(file), column="body")
    assert tokens.shape == (3, 24)
    assert torch.equal(tokens, prompts(with_bos, n=3, length=24, dataset=str(file), column="body"))
    words = with_bos.tokenizer.decode(tokens[0, 3:-2].tolist()).replace("<|eos|>", " ").split()
    assert set(words[1:-1]) <= {a + b for a in ["", *WORDS] for b in WORDS}  # two may touch where a document ends
    with pytest.raises(InputError, match="no column 'text'"):
        prompts(with_bos, dataset=str(file))


def test_reading_stops_when_there_is_enough(without_bos):
    def endless():
        while True:
            read.append(1)
            yield Document("d", "ABCDEFGHIJ")

    read: list[int] = []
    random = np.random.default_rng(0)
    with TemporaryFile() as file:
        tokens, highest, special = _tokenize(without_bos, endless(), file, budget=95, random=random)
        file.seek(0)
        ids = np.frombuffer(file.read(), dtype=ID)
    assert len(read) == 11  # ten documents are enough; one more is looked at
    assert tokens == len(ids) == 10 * 10 + 9  # with an end between two
    assert highest == ids.max()
    assert special == {}  # the ends are ours


def test_a_very_long_text_is_tokenized_in_passages(without_bos, monkeypatch):
    text = " ".join(WORDS * 40)
    whole, passages = ([*_slices(text)], [])
    monkeypatch.setattr(import_module("probes.prompts"), "AT_ONCE", 97)
    passages = [*_slices(text)]
    assert whole == [text]
    assert "".join(passages) == text
    assert len(passages) > 5
    assert max(map(len, passages)) <= 97
    assert all(passage.startswith(" ") for passage in passages[1:])  # cut where words begin
    assert "".join(_slices("x" * 1000)) == "x" * 1000  # a script without spaces


def test_skipping_loses_no_document():
    documents = [Document(str(i), "") for i in range(SKIP + 50)]
    seen = [int(document.name) for document in _skip_some(iter(documents), np.random.default_rng(1))]
    assert sorted(seen) == list(range(SKIP + 50))
    assert 0 < seen[0] < SKIP
    assert seen == [(seen[0] + i) % (SKIP + 50) for i in range(SKIP + 50)]
    endless = (Document(str(i), "") for i in iter(int, 1))
    assert len(list(islice(_skip_some(endless, np.random.default_rng(1)), 3))) == 3


def test_a_long_document_is_read_from_a_random_place_where_a_word_begins(with_bos):
    text = " ".join(WORDS * 1000)
    starts = set()
    for seed in range(8):
        passage = _passage(text, characters=400, random=np.random.default_rng(seed))
        assert 300 <= len(passage) <= 400
        assert passage in text
        assert passage.split()[0] in WORDS
        starts.add(text.index(passage))
    assert len(starts) > 1
    assert _passage(text, characters=len(text), random=np.random.default_rng(0)) == text
    assert len(_passage("字" * 5000, characters=400, random=np.random.default_rng(0))) == 400


def test_a_long_text_is_not_tokenized_whole(without_bos, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("x" * 200_000)  # x is a token
    lengths = []

    def counting(text, **options):
        lengths.append(len(text))
        return without_bos.tokenizer(text, **options)

    prompts(replace(without_bos, tokenizer=counting), n=2, length=10, text=file)
    assert sum(lengths) == 16 * MARGIN * 2 * 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n=0), "n=0 prompts is too few"),
        (dict(length=1), "length=1 is too short"),
        (dict(seed=-1), "seed=-1 is negative"),
        (dict(length=65), "length=65 is more than the 64 positions of bigram"),
        (dict(first=300), "first token id 300 is outside the vocabulary of bigram; ids run from 0 to"),
        (dict(first=-1), "first token id -1 is outside"),
        (dict(first=True), "first=True is no token id"),
        (dict(dataset="owner/name"), "are given; give one of them"),
        (dict(n=40000, length=60), r"gives \d+ tokens; 40000 windows of 60 need at least 40059"),
    ],
)
def test_bad_options_are_refused(text, options, message):
    with pytest.raises(InputError, match=message) as raised:
        prompts(bigram(bos=True, max_length=64), **{"text": text, "length": 20, **options})
    assert "\n" not in str(raised.value)


def test_models_that_cannot_read_text_are_refused(with_bos, text):
    with pytest.raises(InputError, match=r"bigram has no tokenizer; pass token ids \[prompt, position\] directly"):
        prompts(replace(with_bos, tokenizer=None), text=text)
    with pytest.raises(InputError, match=r"the tokenizer gives id \d+, but bigram has 50 embeddings"):
        prompts(bigram(bos=True, vocabulary=50), text=text, length=20)


def test_parse_first():
    assert [parse_first(value) for value in ("auto", "bos", "none", "0", "12")] == ["auto", "bos", "none", 0, 12]
    with pytest.raises(InputError, match="first token 'yes' is unknown; give auto, bos, none or a token id"):
        parse_first("yes")


def test_results_are_told_where_prompts_come_from(with_bos, without_bos, text):
    assert draw(with_bos, n=1, length=20, text=text, seed=2).attributes == {
        "text_source": f"text '{text}'",
        "first_policy": "bos",
        "first_id": 0,
        "prompts_seed": 2,
        "windows_overlap": 0.0,
    }
    plain = draw(without_bos, n=1, length=20, text=text).attributes
    assert plain["first_policy"] == "none"
    assert "first_id" not in plain
    assert first_policy(without_bos, 7) == {"first_policy": "id", "first_id": 7}
    with pytest.raises(InputError, match="no BOS"):
        first_policy(without_bos, "bos")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], "tokens are a list; give a torch tensor"),
        (torch.ones(2, 3, dtype=torch.int32), r"dtype int32; convert them with \.long\(\)"),
        (torch.ones(2, 3), "dtype float32"),
        (torch.ones(3, dtype=torch.int64), r"shape \[3\]; give two dimensions"),
        (torch.ones(0, 3, dtype=torch.int64), r"shape \[0, 3\]; give at least 1 prompt"),
        (torch.ones(2, 1, dtype=torch.int64), r"shape \[2, 1\]; give at least 1 prompt of at least 2"),
        (torch.ones(2, 65, dtype=torch.int64), "65 positions, bigram was made for 64"),
        (torch.tensor([[0, -3]]), "token id -3 is outside the vocabulary of bigram"),
        (torch.tensor([[0, 10**6]]), "token id 1000000 is outside"),
    ],
)
def test_check_tokens_refuses(tokens, message):
    with pytest.raises(InputError, match=message):
        check_tokens(bigram(bos=True, max_length=64), tokens)


def test_check_tokens_accepts_the_whole_vocabulary(with_bos):
    check_tokens(with_bos, torch.arange(with_bos.spec.vocabulary)[None])


def test_tokens_hash_is_of_shape_and_little_endian_values():
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    bytes_ = b"[2, 3]" + b"".join(i.to_bytes(8, "little") for i in range(1, 7))
    assert tokens_hash(tokens) == hashlib.sha256(bytes_).hexdigest()
    assert tokens_hash(tokens) != tokens_hash(tokens.reshape(3, 2))
    assert tokens_hash(tokens.T.contiguous().T) == tokens_hash(tokens)
