"""Recall by depth: contexts of one shape, passes behind a context against plain ones, and models whose recall is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from lookup import Lookup

import probes
from probes.data.recall import RUNGS, Maker, Rung, Template, in_chat, read_template
from probes.errors import InputError
from probes.measures.retrieval.compute import Asked, asked_depths, ladder, one_by_one, retrieval, scores
from probes.measures.retrieval.recall_numbers import repeats, shape
from probes.models.behind import continues
from probes.models.view import View
from probes.results.statistics import couples

SMALL: dict[str, Any] = {"pairs": 9, "keys": "apart", "digits": 3, "contexts": 4, "candidates": 4}


@cache
def tiny(name: str = "tiny-llama") -> View:
    return probes.load(name, dtype="float64")


# ---------------------------------------------------------------------------------------------- passes behind a context


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox", "mistral", "gemma2", "qwen3", "gpt_oss"])
def test_a_tree_behind_a_context_is_what_plain_passes_give(family):
    """Rotations, learned positions, windows and soft-caps; two branches behind one beginning, another row beside it."""
    view = probes.load(families.model(family).double())
    assert continues(view)
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(view.spec.vocabulary, (20,), generator=generator)
    rows = torch.randint(view.spec.vocabulary, (3, 4), generator=generator)
    places = torch.tensor([[0, 1, 2, 2]] * 3)
    seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]).bool().expand(3, 4, 4)
    found = view.behind(view.embed(context[None]))(rows, places, seen)
    for row, streams in zip(rows, found, strict=True):
        for branch in ([0, 1, 2], [0, 1, 3]):
            plain = view.residual(view.embed(torch.cat([context, row[branch]])[None]))[0, 20:].detach()
            torch.testing.assert_close(streams[branch], plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral-window"])
def test_questions_together_score_as_one_pass_each(name, monkeypatch):
    model = tiny(name)
    couple = Maker(model, Rung(9, digits=3), read_template("sentences")).couple(0, 0)
    answers = couple.answers[0]
    asked = [Asked(q, (answers[n], *answers[n + 1 : n + 4])) for n, q in enumerate(couple.questions[0])]
    asked.append(Asked(couple.questions[1][0], couple.answers[1][:1]))  # a control, whose row is shorter
    plain = [one_by_one(model, couple.contexts[0], one) for one in asked]
    for numbers in (1, 1 << 30):  # a row at a time, and all at once
        monkeypatch.setattr("probes.measures.retrieval.compute.NUMBERS_AT_ONCE", numbers)
        for (found, greedy), (expected, said) in zip(scores(model, couple.contexts[0], asked), plain, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
            assert greedy == said


# -------------------------------------------------------------------------------------------------------------- contexts


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
        for depth, (question, value) in enumerate(zip(couple.questions[side], values, strict=True)):
            assert len(value.strip('" ')) == rung.digits
            line, at = couple.starts[depth]
            ids = couple.contexts[side]
            assert tokenizer.decode(ids[at:]).startswith(value)
            key = tokenizer.decode(question).strip().removesuffix('"\nValue: "').removesuffix(" is").split("for ")[-1]
            key = key.removeprefix('Key: "')
            assert key in tokenizer.decode(ids[line:at])
            assert f"{key} " not in texts[1 - side]
            assert f'"{key}"' not in texts[1 - side]
    if rung.keys == "alike":
        words = [tokenizer.decode(q).split("for ")[-1].split(" is")[0].split() for q in couple.questions[0]]
        if template == "sentences":
            assert max(len({*column}) for column in zip(*words, strict=True)) <= 4  # of 8 keys


def test_orders_have_the_same_pairs_and_announced_keys_stand_where_they_stood():
    model, rung = tiny(), Rung(9, digits=3)
    for template in map(read_template, ("sentences", "announced")):
        maker, plain = (Maker(model, rung, template, orders=orders) for orders in (2, 1))
        one, two, other = map(maker.couple, (4, 4, 4), (0, 1, 2))
        assert (one, other) == (plain.couple(4, 0), plain.couple(4, 1))
        assert one.pairs == (tuple(range(9)),) * 2
        assert one.starts == two.starts
        for side in (0, 1):
            assert sorted(two.pairs[side]) == list(range(9)) != list(two.pairs[side])
            for name in ("questions", "answers"):
                first, again = getattr(one, name)[side], getattr(two, name)[side]
                assert again == tuple(first[n] for n in two.pairs[side])
        before = one.starts[0][0]
        assert one.contexts[0][:before] == two.contexts[0][:before]
        keys = [model.tokenizer.decode(q).split("for ")[-1].split(" is")[0] for q in one.questions[0]]
        said = model.tokenizer.decode(one.contexts[0][:before])
        assert (", ".join(sorted(keys)) in said) == (template == read_template("announced"))


def test_values_are_nouns_that_are_nothing_else():
    model, tokenizer = tiny(), tiny().tokenizer
    maker = Maker(model, Rung(6, digits=0), read_template("reworded"))
    couple = maker.couple(1, 0)
    asked = [tokenizer.decode(q).split("belongs to ")[-1].split("?")[0] for side in couple.questions for q in side]
    values = [tokenizer.decode(answer).strip() for side in couple.answers for answer in side]
    assert len({*asked, *values}) == 24
    text = tokenizer.decode(couple.contexts[0])
    assert all(f"The code for {key} is {value}.\n" in text for key, value in zip(asked[:6], values[:6], strict=True))
    assert str(maker.rung) == "6 pairs, keys apart, values are nouns"


def test_pairs_are_known_again_in_another_order():
    options: Any = SMALL | {"contexts": 24, "orders": 3, "candidates": 1}
    ds = retrieval(tiny(), **options)
    draw = np.random.default_rng(0)
    assert (np.sort(ds["pair"].values, -1) == np.arange(9)).all()
    own, noise = draw.normal(size=(4, 2, 9)), draw.normal(size=(24, 9))
    for share in (0.0, 0.5, 1.0):
        for n in range(24):  # contexts by group, order and side
            own_part = own[n // 6, n % 2][ds["pair"].values[n]]
            ds["log_p"][n] = share**0.5 * own_part + (1 - share) ** 0.5 * noise[n]
        found = repeats(ds)
        assert abs(found.value - share) < 0.2
        assert share in (0.0, 1.0) or 0 < found.low < found.value < found.high < 1
    assert (couples(ds) == np.arange(24) // 6).all()
    with pytest.raises(InputError, match="measure with orders=2"):
        repeats(retrieval(tiny(), **options | {"orders": 1}))


def test_the_first_token_and_the_chat_template_stand_where_they_are_asked_for():
    model = tiny()
    assert model.bos is not None
    for first, ids in (("auto", (model.bos,)), ("none", ()), (7, (7,))):
        made = Maker(model, Rung(4), read_template("sentences"), first=first)
        couple = made.couple(0, 0)
        assert couple.contexts[0][: len(ids)] == ids
        assert couple.starts[0][0] == len(ids)
        assert made.length() == len(couple.contexts[0]) + len(couple.questions[0][0]) + len(couple.answers[0][0])
    with pytest.raises(InputError, match="has no chat template"):
        in_chat(model, read_template("sentences"))


def test_a_chat_puts_the_list_in_the_user_s_turn(tmp_path):
    model = Lookup(tiny().tokenizer)
    turn = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    model.tokenizer.chat_template = turn + "{% if add_generation_prompt %}<me>{% endif %}"
    try:
        form = in_chat(model, Template("", "{key}: {value}\n", "", "{key}: {value}"))
        assert form.head.startswith("<user>")
        assert form.question.endswith("</><me>{key}: {value}")
        assert form.question.count("{key}") == 2
    finally:
        model.tokenizer.chat_template = None


# ---------------------------------------------------------------------------------------------------- known recall


def test_a_lookup_recalls_every_depth_and_climbs_the_ladder_to_its_end(monkeypatch):
    monkeypatch.setattr("probes.measures.retrieval.compute.RUNGS", (Rung(8), Rung(8, "alike"), Rung(10, "alike", 6)))
    ds = retrieval(Lookup(tiny().tokenizer), contexts=4, pilot=2, candidates=5)
    assert ds["pilot_exact"].values.tolist() == [1, 1, 1]
    assert list(ds["rung"].values)[-1] == "10 pairs, keys alike, 6 digits"
    assert ds["exact"].shape == (4, 10)
    assert float(ds["exact"].min()) == 1
    assert float(ds["rank"].max()) == 1
    assert float(ds["log_p"].min()) > -1e-6
    assert float(ds["control"].max()) < -5  # the key is not there
    assert float(shape(ds).exact.value) == 1


def test_the_ladder_ends_below_what_does_not_fit_the_model(monkeypatch):
    monkeypatch.setattr("probes.measures.retrieval.compute.RUNGS", (Rung(8), Rung(9), Rung(60)))
    model = Lookup(tiny().tokenizer)
    model.spec = replace(model.spec, max_length=200)
    ds = retrieval(model, contexts=2, pilot=2, candidates=1)
    assert ds["pilot_exact"].values.tolist() == [1, 1]
    assert ds.sizes["depth"] == 9


@pytest.mark.parametrize("window", [45, 60])
def test_a_window_recalls_what_it_reaches_and_nothing_else(window):
    ds = retrieval(Lookup(tiny().tokenizer, window=window), **SMALL)
    reached = ds.attrs["query"] - ds["place"].values < window
    assert 0 < reached.sum() < 9
    assert (ds["exact"].values == reached).all()
    assert (ds["gain"].values[:, reached] > 1).all()
    assert (ds["log_p"].values[:, ~reached] < -5).all()
    found = shape(ds)
    assert found.recency.low > 1
    assert found.trough.high < 0.5


def test_the_ladder_stops_where_answers_are_wrong():
    ds = retrieval(Lookup(tiny().tokenizer, memory=1), contexts=2, pilot=2, candidates=1, depths=3)
    assert list(ds["rung"].values) == [str(RUNGS[0])]
    assert float(ds["pilot_exact"][0]) < 0.9
    assert "rank" not in ds
    assert ds["depth"].values.tolist() == [0, 6, 11]
    assert [str(one) for one in ladder(20, None, None)][1:] == [
        "20 pairs, keys alike, 4 digits",
        "20 pairs, keys alike, 8 digits",
    ]
    assert ladder(20, "apart", 5) == [Rung(20, "apart", 5)]
    assert asked_depths(5, 99).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"contexts": 3}, "contexts=3 is no multiple of 2: lists come in couples; give one, as 4"),
        ({"orders": 3}, "contexts=100 is no multiple of 6: lists come in couples, each in 3 orders; give one, as 102"),
        ({"pairs": 1}, "pairs=1 is too few"),
        ({"digits": 1}, "2 to 15 digits"),
        ({"pairs": 8, "depths": 20}, "depths=20 is more than there are pairs; give at most 8"),
        ({"initialization": "0.02"}, "initialization=0.02 does nothing without mechanism"),
        ({"mechanism": 102}, "mechanism=102 is more than there are contexts; give at most 100"),
        ({"mechanism": 2, "candidates": 1}, "candidates=1 leaves no value to compare with"),
        ({"template": "verse"}, "template 'verse' is none of sentences, json"),
        ({"pairs": 5000, "keys": "apart", "digits": 5}, "5000 are asked for"),
        ({"pairs": 40, "keys": "apart", "digits": 4}, "was made for 256"),
        ({"first": 10**9}, "first token id 1000000000 is outside the vocabulary"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, said):
    with pytest.raises(InputError) as refused:
        retrieval(tiny(), **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
