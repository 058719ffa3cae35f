"""Prompts: windows of real text, the first-token policy, and what is refused."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from bigram import WORDS, bigram

from probes.data.prompts import NOTABLE_OVERLAP, draw, first_policy, parse_first, prompts
from probes.errors import InputError
from probes.models.checks import check_tokens
from probes.results.dataset import tokens_hash


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


def test_windows_are_pieces_of_the_text_and_every_offset_is_used_once(without_bos, text, tmp_path):
    tokens = prompts(without_bos, n=5, length=40, text=text)
    assert (tokens.dtype, tokens.shape, tokens.device.type) == (torch.int64, (5, 40), "cpu")
    stream = ids_of(without_bos, text)
    starts = [places(stream, window) for window in tokens.tolist()]
    assert all(len(found) == 1 for found in starts)  # 40 random words occur once
    assert len({found[0] for found in starts}) == 5
    (tmp_path / "t.txt").write_text("ABCDEFGHIJ")  # capitals are not merged: 10 bytes, 10 tokens
    stream = ids_of(without_bos, tmp_path / "t.txt")
    tokens = draw(without_bos, n=7, length=4, text=tmp_path / "t.txt").tokens
    assert sorted(places(stream, window)[0] for window in tokens.tolist()) == list(range(7))
    with pytest.raises(InputError, match="gives 10 tokens in 1 document, which hold 7 windows of 4, and 8 are asked"):
        prompts(without_bos, n=8, length=4, text=tmp_path / "t.txt")


def test_first_token_policies_share_their_text(with_bos, without_bos, text):
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
    assert not torch.equal(cut("bos", seed=4), bos)
    auto, none = (prompts(without_bos, text=text, length=30, first=first) for first in ("auto", "none"))
    assert torch.equal(auto, none)  # where there is no BOS


def test_special_tokens_spelled_out_in_a_text_are_read_as_such(with_bos, tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the <|bos|> cat <|eos|> sat " * 20 + "<|eos|>")
    drawn = draw(with_bos, n=3, length=50, text=file, first="none")
    stream = with_bos.tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]
    assert all(places(stream, window) for window in drawn.tokens.tolist())
    assert (drawn.tokens == with_bos.bos).sum() > 10
    told = bigram(bos=True)
    told.tokenizer.split_special_tokens = True
    assert torch.equal(draw(told, n=3, length=50, text=file, first="none").tokens, drawn.tokens)
    assert told.tokenizer.split_special_tokens  # the caller's is left as it was


def test_windows_that_overlap_are_said_to(without_bos, text, tmp_path):
    few = draw(without_bos, n=4, length=20, text=text)
    assert (few.remarks, few.attributes["windows_overlap"]) == ((), 0)
    short = tmp_path / "short.txt"
    short.write_text(" ".join(text.read_text().split()[:80]))
    many = draw(without_bos, n=4, length=60, text=short)
    starts = [places(ids_of(without_bos, short), window)[0] for window in many.tokens.tolist()]
    held = Counter(at for start in starts for at in range(start, start + 60))
    overlap = sum(count for count in held.values() if count > 1) / (4 * 60)
    assert many.attributes["windows_overlap"] == pytest.approx(overlap)
    assert overlap > NOTABLE_OVERLAP
    (said,) = many.remarks
    assert "of the tokens stand in more than one of the 4 windows of 60" in said
    with pytest.warns(UserWarning, match="stand in more than one of the 4 windows"):
        prompts(without_bos, n=4, length=60, text=short)


def test_bundled_text(with_bos):
    """Prose for models that others trained, code for ours, which read nothing else."""
    tokens = prompts(with_bos, length=64)
    assert tokens.shape == (16, 64)
    assert torch.equal(tokens, prompts(with_bos, length=64))
    ours = replace(with_bos, identity=replace(with_bos.identity, name="tiny-llama"))
    for model, name in ((with_bos, "prose"), (ours, "code")):
        drawn = draw(model, n=16, length=64)
        assert drawn.attributes["text_source"] == f"bundled {name}"
        assert torch.equal(drawn.tokens, prompts(model, length=64, text=name))
        assert len(set(drawn.documents)) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n=0), "n=0 prompts is too few"),
        (dict(length=1), "length=1 is too short"),
        (dict(length=65), "length=65, but bigram was made for 64; ask for fewer, or go beyond"),
        (dict(first=300), "first token id 300 is outside the vocabulary of bigram; ids run from 0 to"),
        (dict(first=True), "first=True is no token id"),
        (dict(dataset="owner/name"), "are given; give one of them"),
    ],
)
def test_bad_options_are_refused(text, options, message):
    with pytest.raises(InputError, match=message) as raised:
        prompts(bigram(bos=True, max_length=64), **{"text": text, "length": 20, **options})
    assert "\n" not in str(raised.value)


def test_models_that_cannot_read_text_are_refused(with_bos, without_bos, text):
    with pytest.raises(InputError, match="bigram has no BOS token; use --first none"):
        prompts(without_bos, text=text, first="bos")
    with pytest.raises(InputError, match=r"bigram has no tokenizer; pass token ids \[prompt, position\] directly"):
        prompts(replace(with_bos, tokenizer=None), text=text)
    with pytest.raises(InputError, match=r"the tokenizer gives id \d+, but bigram has 50 embeddings"):
        prompts(bigram(bos=True, vocabulary=50), text=text, length=20)


def test_results_are_told_where_prompts_come_from(with_bos, without_bos, text):
    told = {"text_source": f"text '{text}'", "first_policy": "bos", "first_id": 0, "prompts_seed": 2}
    assert draw(with_bos, n=1, length=20, text=text, seed=2).attributes == told | {"windows_overlap": 0.0}
    plain = draw(without_bos, n=1, length=20, text=text).attributes
    assert plain["first_policy"] == "none"
    assert "first_id" not in plain
    assert first_policy(without_bos, 7) == {"first_policy": "id", "first_id": 7}
    assert [parse_first(value) for value in ("auto", "bos", "none", "0", "12")] == ["auto", "bos", "none", 0, 12]
    with pytest.raises(InputError, match="first token 'yes' is unknown; give auto, bos, none or a token id"):
        parse_first("yes")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int32), r"dtype int32; convert them with \.long\(\)"),
        (torch.ones(0, 3, dtype=torch.int64), r"shape \[0, 3\]; give at least 1 prompt"),
        (torch.ones(2, 1, dtype=torch.int64), r"shape \[2, 1\]; give at least 1 prompt of at least 2"),
        (torch.ones(2, 65, dtype=torch.int64), "65 positions, but bigram was made for 64"),
        (torch.tensor([[0, -3]]), "token id -3 is outside the vocabulary of bigram"),
    ],
)
def test_check_tokens_refuses(tokens, message):
    model = bigram(bos=True, max_length=64)
    with pytest.raises(InputError, match=message):
        check_tokens(model, tokens)
    check_tokens(model, torch.arange(model.spec.vocabulary)[-60:].view(2, -1))  # up to the last id


def test_tokens_hash_is_of_shape_and_little_endian_values():
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    bytes_ = b"[2, 3]" + b"".join(i.to_bytes(8, "little") for i in range(1, 7))
    assert tokens_hash(tokens) == hashlib.sha256(bytes_).hexdigest()
    assert tokens_hash(tokens) != tokens_hash(tokens.reshape(3, 2))
    assert tokens_hash(tokens.T.contiguous().T) == tokens_hash(tokens)
