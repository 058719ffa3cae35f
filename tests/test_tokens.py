"""Ids as tokenizers make them: what they put before a text, padding, and what is no tokenizer."""

import json
from contextlib import nullcontext

import families
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import probes
from probes import InputError
from probes.data.prompts import draw
from probes.models.checks import first_ids
from probes.models.named import CHECKPOINTS

TEXTS = (
    "def f(x):\n    return x + 1\n",
    "class A:\n    pass\n",
    "import os\nfor name in os.listdir('.'):\n    print(name)\n",
)
BOS, EOS = "<|bos|>", "<|eos|>"
TEXT = [475, 70, 401, 401, 72, 505, 33, 44, 55, 66]


def tokenizer(before=(BOS,), after=(), **named):
    """tiny-llama's, which surrounds texts with these tokens, and names those special tokens alone."""
    built = json.loads((CHECKPOINTS / "tiny-llama/tokenizer.json").read_text())
    put = [[{"SpecialToken": {"id": one, "type_id": 0}} for one in some] for some in (before, after)]
    known = {one: {"id": one, "ids": [n], "tokens": [one]} for n, one in enumerate((BOS, EOS))}
    single = [*put[0], {"Sequence": {"id": "A", "type_id": 0}}, *put[1]]
    built["post_processor"] |= {"single": single, "special_tokens": known}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(built)), **named)


@pytest.fixture(scope="module")
def model():
    return probes.load("tiny-llama")._model


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ((BOS,), (), {"bos_token": EOS}),
        ((EOS, BOS), (EOS,), {"bos_token": BOS}),
        ((), (EOS,), {"bos_token": BOS, "eos_token": EOS}),
    ],
)
def test_prompts_begin_as_the_tokenizer_begins_texts(model, tmp_path, before, after, named):
    own = tokenizer(before, after, **named)
    expected = tuple([BOS, EOS].index(one) for one in before)
    view = probes.load(model, tokenizer=own)
    assert view.first_ids == expected
    assert view.bos == (expected[0] if expected else None)
    text = tmp_path / "text.txt"
    text.write_text("".join(TEXTS) * 4)
    found, plain = (draw(view, n=2, length=12, text=text, first=first) for first in ("auto", "none"))
    assert found.tokens[:, : len(before)].tolist() == [[*expected]] * 2
    assert torch.equal(found.tokens[:, len(before) :], plain.tokens[:, : 12 - len(before)])
    assert json.loads(found.attributes.get("first_ids", "[]")) == ([*expected] if len(before) > 1 else [])
    told = probes.inspect(view, TEXTS[0], baseline="none")
    assert told["tokens"].values[0].tolist() == [*expected, *own(TEXTS[0], add_special_tokens=False).input_ids]


def test_a_slow_tokenizer_that_ends_texts_puts_nothing_first(model):
    assert first_ids(ByT5Tokenizer()) == ()
    view = probes.load(model, tokenizer=ByT5Tokenizer())
    assert probes.prompts(view, n=2, length=8)[:, 0].min() > 2  # no special id


@pytest.mark.parametrize(("pad", "side"), [(BOS, "left"), (EOS, "right")])
def test_padded_batches_are_refused_and_texts_of_one_length_are_not(pad, side):
    own = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny-llama", padding_side=side)
    own.pad_token = pad
    batch = own(list(TEXTS), padding=True, return_tensors="pt")
    hidden = (batch.attention_mask == 0).sum(1)
    row = int(hidden.nonzero()[0])
    says = f"prompt {row} {'begins' if side == 'left' else 'ends'} with {hidden[row]} pads .id {own.pad_token_id}."
    for probe, ids in ((probes.sinks, batch.input_ids), (probes.inspect, batch.input_ids[row])):
        with pytest.raises(InputError, match=says):
            probe("tiny-llama", ids)
    hiding_nothing = r"text .* pads .*; give an attention_mask that is 0 there"
    with pytest.raises(InputError, match=hiding_nothing):
        probes.loss("tiny-llama", batch.input_ids, attention_mask=torch.ones_like(batch.input_ids))
    probes.sinks("tiny-llama", batch.input_ids[:, :7] if side == "right" else batch.input_ids[:, -7:])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[0, *TEXT]], None),
        ([[0, 0, *TEXT]] * 2, None),  # BOS twice, as a template and a tokenizer put it together
        ([[0, *TEXT[:9], 1], [0, *TEXT]], None),  # a text that has ended
        ([[0, *TEXT[:9], 2], [0, *TEXT]], "prompt 0 ends with 1 pad .id 2"),  # a token that does nothing but pad
        ([[1] * 11, [0, *TEXT]], "prompt 0 begins with 11 pads"),
        ([[3, 3, 3, 0, *TEXT[:7]], [0, *TEXT]], "prompt 0 begins with 3 pads .id 3"),
        ([[3, 3, 0, *TEXT[:8]], [0, 3, 3, 3, *TEXT[:7]]], None),  # UNK in texts
    ],
)
def test_where_a_run_begins_to_be_padding(model, rows, says):
    own = tokenizer(eos_token=EOS, bos_token=BOS)
    own.pad_token, own.unk_token = own.convert_ids_to_tokens([2, 3])
    read(probes.load(model, tokenizer=own), torch.tensor(rows), says)


def read(view, tokens, says):
    """Reads them, or refuses them with these words."""
    with nullcontext() if says is None else pytest.raises(InputError, match=says):
        probes.sinks(view, tokens)


def test_zeros_behind_texts_are_padding_where_the_tokenizer_writes_no_such_run():
    batch = pad_sequence([torch.tensor([2, 3] * 4), torch.tensor([2, 3, 3, 2])], batch_first=True)
    for merges, says in (([("!", "!")], "prompt 1 ends with 4 pads .id 0."), ([], None)):
        made = Tokenizer(BPE({"!": 0, "?": 1, "a": 2, "b": 3, "!!": 4}, merges))
        view = probes.load(families.model("gpt2"), tokenizer=PreTrainedTokenizerFast(tokenizer_object=made))
        read(view, batch, says)


def test_what_is_no_tokenizer_or_not_the_models(model):
    with pytest.raises(InputError, match="a Tokenizer is no tokenizer of transformers"):
        probes.load(model, tokenizer=tokenizer().backend_tokenizer)
    large = tokenizer()
    large.add_tokens([" word"])
    with pytest.raises(InputError, match=r"the tokenizer gives id 1024, but .* has 1024 embeddings"):
        probes.inspect(probes.load(model, tokenizer=large), " word" * 9)
