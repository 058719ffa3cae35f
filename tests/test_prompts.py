"""Prompts: windows of real text, the first-token policy, and what is refused."""

import hashlib

import families
import made_toys as toys
import numpy as np
import pytest
import torch
from bigram import WORDS, bigram

from probes.data.prompts import draw, first_policy, parse_first, prompts
from probes.errors import InputError
from probes.models.checks import check_tokens
from probes.results.dataset import tokens_hash

WITH_BOS, WITHOUT_BOS = bigram(bos=True), bigram(bos=False)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(np.random.default_rng(5).choice(WORDS, 3000)), encoding="utf-8")
    return file


def ids_of(model, text) -> list[int]:
    return model.tokenizer(text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]


def places(stream: list[int], window: list[int]) -> list[int]:
    return [at for at in range(len(stream) - len(window) + 1) if stream[at : at + len(window)] == window]


def test_windows_are_pieces_of_the_text_and_every_offset_is_used_once(text, tmp_path):
    tokens = prompts(WITHOUT_BOS, n=5, length=40, text=text)
    assert (tokens.dtype, tokens.shape, tokens.device.type) == (torch.int64, (5, 40), "cpu")
    stream = ids_of(WITHOUT_BOS, text)
    starts = [places(stream, window) for window in tokens.tolist()]
    assert all(len(found) == 1 for found in starts)  # 40 random words occur once
    assert len({found[0] for found in starts}) == 5
    (tmp_path / "t.txt").write_text("ABCDEFGHIJ")  # capitals are not merged: 10 bytes, 10 tokens
    stream = ids_of(WITHOUT_BOS, tmp_path / "t.txt")
    tokens = draw(WITHOUT_BOS, n=7, length=4, text=tmp_path / "t.txt").tokens
    assert sorted(places(stream, window)[0] for window in tokens.tolist()) == list(range(7))
    with pytest.raises(InputError, match="gives 10 tokens in 1 document, which hold 7 windows of 4, and 8 are asked"):
        prompts(WITHOUT_BOS, n=8, length=4, text=tmp_path / "t.txt")


def test_first_token_policies_share_their_text(text):
    def cut(first, seed=3):
        return draw(WITH_BOS, n=4, length=20, text=text, first=first, seed=seed).tokens

    plain, bos, other = cut("none"), cut("bos"), cut(17)
    assert WITH_BOS.bos == 0
    assert (bos[:, 0] == 0).all()
    assert (other[:, 0] == 17).all()
    assert torch.equal(bos[:, 1:], plain[:, :-1])
    assert torch.equal(other[:, 1:], plain[:, :-1])
    assert not (plain == 0).any()
    assert torch.equal(cut("auto"), bos)  # although its id is 0
    assert not torch.equal(cut("bos", seed=4), bos)
    auto, none = (prompts(WITHOUT_BOS, text=text, length=30, first=first) for first in ("auto", "none"))
    assert torch.equal(auto, none)  # where there is no BOS


def test_special_tokens_spelled_out_in_a_text_are_read_as_such(tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the <|bos|> cat <|eos|> sat " * 20 + "<|eos|>")
    drawn = draw(WITH_BOS, n=3, length=50, text=file, first="none")
    stream = WITH_BOS.tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]
    assert all(places(stream, window) for window in drawn.tokens.tolist())
    assert (drawn.tokens == WITH_BOS.bos).sum() > 10
    told = bigram(bos=True)
    told.tokenizer.split_special_tokens = True
    assert torch.equal(draw(told, n=3, length=50, text=file, first="none").tokens, drawn.tokens)
    assert told.tokenizer.split_special_tokens  # the caller's is left as it was


def test_bundled_text():
    """Prose for models that others trained, code for ours, which read nothing else."""
    tokens = prompts(WITH_BOS, length=64)
    assert tokens.shape == (16, 64)
    assert torch.equal(tokens, prompts(WITH_BOS, length=64))
    ours = bigram(bos=True, name="tiny-llama")
    for model, name in ((WITH_BOS, "prose"), (ours, "code")):
        drawn = draw(model, n=16, length=64)
        assert drawn.attributes["text_source"] == f"bundled {name}"
        assert torch.equal(drawn.tokens, prompts(model, length=64, text=name))
        assert len(set(drawn.documents)) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n=0), "n=0 prompts is too few"),
        (dict(length=1), "length=1 is too short"),
        (dict(length=65), "length=65, but bigram was made for 64; ask for fewer"),
        (dict(first=WITH_BOS.spec.vocabulary), "is outside the vocabulary of bigram; ids run from 0 to"),
        (dict(first=True), "first=True is no token id"),
        (dict(dataset="owner/name"), "are given; give one of them"),
    ],
)
def test_bad_options_are_refused(text, options, message):
    given = {"text": text, "length": 20, **options}
    assert message in families.refused(prompts, bigram(bos=True, max_length=64), **given)


def test_models_that_cannot_read_text_are_refused(text):
    with pytest.raises(InputError, match="of bigram puts no BOS first; give none or a token id"):
        prompts(WITHOUT_BOS, text=text, first="bos")
    with pytest.raises(InputError, match=r"toy has no tokenizer; put its .* beside the weights, or in Python"):
        prompts(toys.made(), text=text)
    with pytest.raises(InputError, match=r"the tokenizer gives id \d+, but bigram has 50 embeddings"):
        prompts(bigram(bos=True, vocabulary=50), text=text, length=20)


def test_results_are_told_where_prompts_come_from(text):
    told = {"text_source": f"text '{text}'", "first_policy": "bos", "first_id": 0, "prompts_seed": 2}
    assert draw(WITH_BOS, n=1, length=20, text=text, seed=2).attributes == told | {"windows_overlap": 0.0}
    plain = draw(WITHOUT_BOS, n=1, length=20, text=text).attributes
    assert (plain["first_policy"], plain.get("first_id")) == ("none", None)
    assert first_policy(WITHOUT_BOS, 7) == {"first_policy": "id", "first_id": 7}
    assert [parse_first(value) for value in ("auto", "bos", "none", "0", "12")] == ["auto", "bos", "none", 0, 12]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int32), "dtype int32; convert them with .long()"),
        (torch.ones(0, 3, dtype=torch.int64), "shape [0, 3]; give at least 1 prompt"),
        (torch.ones(2, 1, dtype=torch.int64), "shape [2, 1]; give at least 1 prompt of at least 2"),
        (torch.ones(2, 65, dtype=torch.int64), "65 positions, but bigram was made for 64"),
        (torch.tensor([[0, -1]]), "token id -1 is outside the vocabulary of bigram"),
    ],
)
def test_check_tokens_refuses(tokens, message):
    model = bigram(bos=True, max_length=64)
    assert message in families.refused(check_tokens, model, tokens)
    check_tokens(model, torch.arange(model.spec.vocabulary)[-64:].view(1, -1))  # up to the last id


def test_tokens_hash_is_of_shape_and_little_endian_values():
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    bytes_ = b"[2, 3]" + b"".join(i.to_bytes(8, "little") for i in range(1, 7))
    assert tokens_hash(tokens) == tokens_hash(tokens.T.contiguous().T) == hashlib.sha256(bytes_).hexdigest()
