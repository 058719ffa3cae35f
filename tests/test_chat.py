"""Conversations as prompts: what a chat may be, the model's own template, how many and how long, what is refused."""

import json
import re
from typing import Any

import families
import pytest
from commands import call

import probes
from probes.data.chat import conversations, named, rendered
from probes.data.prompts import draw, prompts
from probes.errors import InputError

# As real ones: special tokens around every message, roles that alternate, an opening for the assistant.
TEMPLATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('w9 alternates') }}"
    "{% endif %}<s> {{ m.content }} </s> {% endfor %}{% if add_generation_prompt %}<s> w99{% endif %}"
)


def message(role: str, *words: int) -> dict[str, str]:
    return {"role": role, "content": " ".join(f"w{word}" for word in words)}


ASKED = [message("user", 3, 4, 5)]
ANSWERED = [*ASKED, message("assistant", 6)]
LONG = [message("user", *range(10, 40))]


@pytest.fixture(scope="module")
def model() -> Any:
    tokenizer = families.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return probes.load(families.model("llama"), tokenizer=tokenizer)


def test_what_a_chat_may_be(tmp_path):
    assert conversations("w3 w4 w5") == [ASKED]
    assert conversations([ASKED, ANSWERED]) == [ASKED, ANSWERED]
    for name, held in (("one.json", ANSWERED), ("several.json", [ASKED, LONG]), ("no-ending", [ASKED])):
        (tmp_path / name).write_text(json.dumps(held), encoding="utf-8")
        expected = held if isinstance(held[0], list) else [held]
        assert conversations(str(tmp_path / name)) == conversations(tmp_path / name) == expected
    assert named("why " * 50) == f"chat '{'why ' * 14}w...'"


def test_the_model_s_template_writes_the_prompt(model):
    assert rendered(model, [ASKED, ANSWERED]) == ["<s> w3 w4 w5 </s> <s> w99", "<s> w3 w4 w5 </s> <s> w6 </s> "]
    tokens = prompts(model, chat=ASKED[0]["content"])
    assert tokens.tolist() == [[0, 3, 4, 5, 1, 0, 99]]  # one BOS, the template's own


def test_as_many_as_asked_for_and_as_long_as_they_all_are(model):
    def drawn(n: int, length: int) -> Any:
        return draw(model, n=n, length=length, chat=[ASKED, LONG, ANSWERED])

    both = drawn(2, 100)
    assert both.tokens.tolist() == [[0, *range(10, 17)], [0, 3, 4, 5, 1, 0, 6, 1]]  # the shortest is left out
    assert "chat 'w3 w4 w5' gives 2 prompts of 8 tokens, instead of 2 of 100; more or" in both.remarks[0]
    assert both.attributes == {"text_source": "chat 'w3 w4 w5'", "first_policy": "chat template", "first_id": 0}
    assert drawn(3, 5).tokens.tolist() == [[0, 3, 4, 5, 1], [0, 10, 11, 12, 13], [0, 3, 4, 5, 1]]
    assert drawn(3, 5).remarks == ()
    assert "gives 3 prompts of 7 tokens, instead of 9 of 7;" in drawn(9, 7).remarks[0]
    assert drawn(1, 100).tokens.shape == (1, 34)


def test_bad_chats_are_refused(model, tmp_path):
    (tmp_path / "chat.json").write_bytes(b"{")
    plain = probes.load(families.model("llama"), tokenizer=families.tokenizer())
    calls: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, "gone.json", {}, "chat 'gone.json' does not exist; give a JSON file of conversations, or a question"),
        (model, tmp_path / "chat.json", {}, r"chat\.json' cannot be read"),
        (model, [], {}, "holds no conversations"),
        (model, [ASKED, [{"role": "user"}]], {}, "conversation 2 of chat 'w3 w4 w5' is no list of"),
        (model, [{"role": "user", "content": 3}], {}, "with text in both; mend it"),
        (
            model,
            [message("assistant", 3)],
            {},
            r"template of in-memory llama refuses conversation 1 .*\(w9 alternates\)",
        ),
        (model, "w3", {"text": "t.txt"}, "give one of them"),
        (model, "w3", {"first": "bos"}, "leave it out"),
        (plain, "w3", {}, "in-memory llama has no chat template; give plain text instead"),
    ]
    for view, chat, given, says in calls:
        with pytest.raises(InputError, match=says):
            prompts(view, chat=chat, **given)


@pytest.mark.parametrize(
    ("command", "option"), [("jacobian", "--dataset"), ("inspect", "--chat"), ("report", "--text")]
)
def test_a_file_that_is_not_there_is_refused_before_a_model_is_read(tmp_path, monkeypatch, capfd, command, option):
    monkeypatch.setattr("probes.models.load.find", lambda *_: pytest.fail("a model is read"))
    (tmp_path / "ape").mkdir()
    words = [command, str(tmp_path / "ape"), option, str(tmp_path / "gone.json"), "--out", str(tmp_path / "out")]
    assert call(monkeypatch, *words) == 2
    assert re.fullmatch(r"[^\n]*gone.json' does not exist[^\n]*\n", capfd.readouterr().err)
    assert not (tmp_path / "out").exists()
