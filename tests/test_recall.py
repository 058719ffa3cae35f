"""Recall by depth: contexts of one shape, passes behind a context against plain ones, and models whose recall is known."""

import re
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from commands import bad_input
from lookup import Lookup

import probes
from probes.data.recall import Maker, Rung, read_template
from probes.measures.retrieval import retrieval, scores
from probes.measures.retrieval.numbers import shape
from probes.models.behind import Asked, behind, continues
from probes.models.view import View

SMALL: dict[str, Any] = {"pairs": 9, "keys": "apart", "digits": 3, "contexts": 4}


@cache
def tiny(name: str = "tiny-llama") -> View:
    return probes.load(name, dtype="float64")


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gpt2", "gpt_neox", "mistral", "gemma2", "gemma3_text", "qwen3", "gpt_oss"]
)
def test_rows_behind_a_context_are_what_plain_passes_give(family, monkeypatch):
    """Rotations, learned positions, windows and soft-caps; a shorter row between others."""
    view = probes.load(families.model(family).double())
    assert continues(view)
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(view.spec.vocabulary, (20,), generator=generator)
    rows = [
        row[:n]
        for row, n in zip(torch.randint(view.spec.vocabulary, (3, 4), generator=generator), (4, 2, 4), strict=True)
    ]
    ids = [row.tolist() for row in rows]
    found = [behind(view, view.embed(context[None]))(ids)]
    monkeypatch.setattr("probes.models.behind.continues", lambda model: False)
    found.append(behind(view, view.embed(context[None]))(ids))
    for n, row in enumerate(rows):
        plain = view.residual(view.embed(torch.cat([context, row])[None]))[0, 20:].detach()
        for streams in found:
            torch.testing.assert_close(streams[n, : len(row)], plain, rtol=1e-10, atol=1e-10)


def one_by_one(model: View, context: tuple[int, ...], asked: Asked) -> tuple[float, bool]:
    """Log probability of the answer, and whether it is the greedy one, by a plain pass."""
    stream = model.residual(model.embed(torch.tensor([[*context, *asked.question, *asked.answer]])))
    logits = model.unembed(model.norm(stream[0, -len(asked.answer) - 1 : -1])).log_softmax(-1).detach()
    picked = float(logits[range(len(asked.answer)), list(asked.answer)].sum())
    return picked, logits.argmax(-1).tolist() == list(asked.answer)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral-window"])
def test_questions_together_score_as_one_pass_each(name, monkeypatch):
    model = tiny(name)
    couple = Maker(model, Rung(9, digits=3), read_template("sentences")).couple(0, 0)
    context = couple.contexts[0]
    asked = [Asked(*pair) for pair in zip(couple.questions[0], couple.answers[0], strict=True)]
    said = model.residual(model.embed(torch.tensor([[*context, *asked[0].question]])))[0, -1:]
    likely = int(model.unembed(model.norm(said)).argmax())
    asked.append(Asked(asked[0].question, (likely,)))  # a row that is shorter, and what a greedy reader says
    plain = [one_by_one(model, context, one) for one in asked]
    for numbers in (1, 1 << 30):  # a row at a time, and all at once
        monkeypatch.setattr("probes.measures.retrieval.NUMBERS_AT_ONCE", numbers)
        (found,), (greedy,) = scores(model, [context], [asked])
        np.testing.assert_allclose(found, [log_p for log_p, _ in plain], rtol=0, atol=1e-9)
        assert greedy.astype(bool).tolist() == [said for _, said in plain]
        assert greedy[-1]


@pytest.mark.parametrize("template", ["sentences", "json"])
@pytest.mark.parametrize("rung", [Rung(9), Rung(8, "alike", 6)])
def test_contexts_are_text_of_one_shape_in_couples_without_a_common_key(template, rung):
    model = tiny()
    maker = Maker(model, rung, read_template(template), first="none")
    tokenizer: Any = model.tokenizer
    couple, other = maker.couple(3, 0), maker.couple(3, 1)
    assert couple == Maker(model, rung, read_template(template), first="none").couple(3, 0)
    assert couple.contexts[0] != other.contexts[0]
    assert len({len(ids) for ids in (*couple.contexts, *other.contexts)}) == 1
    texts = [tokenizer.decode(ids) for ids in couple.contexts]
    for ids, text in zip(couple.contexts, texts, strict=True):
        assert tuple(tokenizer(text, add_special_tokens=False).input_ids) == ids  # what a reader of the text would see
    for side in (0, 1):
        values = [tokenizer.decode(answer) for answer in couple.answers[side]]
        assert len({*values}) == rung.pairs
        assert len({len(answer) for answer in couple.answers[side]}) == 1
        assert len({len(question) for question in couple.questions[side]}) == 1
        keys = [tokenizer.decode(question) for question in couple.questions[side]]
        keys = [re.search(r'(?:for |Key: ")(.*?)(?: is|")', key)[1] for key in keys]  # type: ignore[index]
        for key, value, (line, at) in zip(keys, values, couple.starts, strict=True):
            assert len(value.strip('" ')) == rung.digits
            assert tokenizer.decode(couple.contexts[side][at:]).startswith(value)
            assert key in tokenizer.decode(couple.contexts[side][line:at])
            assert not re.search(rf'{key}[ "]', texts[1 - side])
        if rung.keys == "alike":
            assert max(len({*column}) for column in zip(*(key.split() for key in keys), strict=True)) <= 4  # of 8 keys


def test_keys_are_announced_and_values_are_nouns_that_are_nothing_else():
    decode, couples = tiny().tokenizer.decode, {}
    for template, digits in (("sentences", 3), ("announced", 3), ("reworded", 0)):
        couples[template] = couple = Maker(tiny(), Rung(6, digits=digits), read_template(template)).couple(4, 0)
        keys = [decode(q).split("for ")[-1].split(" is")[0] for q in couple.questions[0]]
        said = decode(couple.contexts[0][: couple.starts[0][0]])
        assert (", ".join(sorted(keys)) in said) == (template == "announced")
    asked = [decode(q).split("belongs to ")[-1].split("?")[0] for side in couple.questions for q in side]
    values = [decode(answer).strip() for side in couple.answers for answer in side]
    assert len({*asked, *values}) == 24
    text = decode(couple.contexts[0])
    assert all(f"The code for {key} is {value}.\n" in text for key, value in zip(asked[:6], values[:6], strict=True))


def test_the_first_token_stands_where_it_is_asked_for():
    for first, ids in (("auto", (tiny().bos,)), ("none", ()), (7, (7,))):
        made = Maker(tiny(), Rung(4), read_template("sentences"), first=first)
        couple = made.couple(0, 0)
        assert couple.contexts[0][: len(ids)] == ids
        assert couple.starts[0][0] == len(ids)
        assert made.length() == len(couple.contexts[0]) + len(couple.questions[0][0]) + len(couple.answers[0][0])


def test_a_lookup_recalls_every_depth_unless_it_forgets():
    ds = retrieval(Lookup(tiny().tokenizer), pairs=10, keys="alike", digits=6, contexts=4)
    assert ds["exact"].shape == (4, 10)
    assert float(ds["exact"].min()) == 1
    assert float(ds["log_p"].min()) > -1e-6
    assert float(ds["control"].max()) < -5  # the key is not there
    np.testing.assert_array_equal(ds["gain"], ds["log_p"] - ds["control"])
    assert float(shape(ds).exact.value) == 1
    assert float(retrieval(Lookup(tiny().tokenizer, memory=1), contexts=2)["exact"].mean()) < 0.9


@pytest.mark.parametrize("window", [45, 60])
def test_a_window_recalls_what_it_reaches_and_nothing_else(window):
    ds = retrieval(Lookup(tiny().tokenizer, window=window), **SMALL)
    reached = ds.attrs["query"] - ds["place"].values < window
    assert 0 < reached.sum() < 9
    assert (ds["exact"].values == reached).all()
    assert (ds["gain"].values[:, reached] > 1).all()
    assert (ds["log_p"].values[:, ~reached] < -5).all()
    found = shape(ds)
    assert found.last.low > 1
    assert found.trough.high < 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"contexts": 3}, "contexts=3 is odd, but lists come in couples; give one, as 4"),
        ({"digits": 1}, "2 to 15 digits"),
        ({"initialization": "0.02"}, "initialization=0.02 does nothing without mechanism"),
        ({"mechanism": 102}, "mechanism=102 is more than there are contexts; give at most 100"),
        ({"template": "verse"}, "template 'verse' is none of sentences, json"),
        ({"pairs": 5000, "digits": 5}, "5000 are asked for"),
        ({"pairs": 40}, "was made for 256"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, said):
    with bad_input(said):
        retrieval(tiny(), **options)
