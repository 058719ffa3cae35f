"""Inspecting one text: what is measured, by algebra and by brute force; parts; what is shown; bad input; the command."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from commands import call
from measured import view

import probes
from probes.data.chat import contents, rendered
from probes.data.prompts import draw
from probes.errors import InputError
from probes.measures.inspect import ANSWER, MEASURE, TEXT, Options
from probes.measures.inspect.compute import WINDOWS, Readout, readout
from probes.measures.jacobian import jacobian
from probes.measures.reading import FURTHER, visible
from probes.results.curves import spearman
from probes.results.ushape import parts_of
from probes.theory.kernel import second_moment

TEMPLATE = "{% for m in messages %}<s> {{ m.content }} {% endfor %}</s>"
ROUNDING = 1e-5  # transformers' norms compute in float32, whatever the model's type
WORDS = " ".join(f"w{n}" for n in (5, 9, 17, 9, 33, 60, 101, 5, 9, 17, 88, 41))

CODE = (
    "def area(width, height):\n\treturn width * height  # <b>é漢</b> [red]\n\n\ndef volume(width, height):\n    return "
)


def small(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return probes.load(families.model(family, dtype=dtype), tokenizer=families.tokenizer())


@pytest.fixture(scope="module")
def tiny() -> Any:
    return probes.load("tiny-llama", device="cpu")


@pytest.fixture(scope="module")
def seen(tiny: Any) -> xr.Dataset:
    """A short text of code under the default options, but for fewer seeds."""
    return probes.inspect(tiny, CODE, seeds=1)


def gradients(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p [vocabulary], their gradients by the embeddings [vocabulary, position, d]), one backward pass each."""
    embedded = model.embed(tokens).requires_grad_()
    log_p = model.unembed(model.norm(model.residual(embedded)))[0, -1].log_softmax(-1)
    rows = [torch.autograd.grad(value, embedded, retain_graph=True)[0][0] for value in log_p]
    return log_p.detach(), torch.stack(rows)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])  # the last caps its logits
def test_prediction_is_the_gradient_of_every_token_weighted_by_its_probability(family):
    model = small(family, torch.float64)
    tokens = torch.tensor([[0, 5, 9, 17, 9, 33, 60, 101, 5]])
    log_p, rows = gradients(model, tokens)
    expected = (log_p.exp()[:, None] * rows.pow(2).sum(-1)).sum(0).div(families.WIDTH).sqrt()
    found = jacobian(readout(model, tokens, "prediction"), tokens, readout="logits")["sensitivity"].values[0]
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


def test_a_token_is_its_own_gradient_and_logits_are_those_of_jacobian():
    model = small("llama", torch.float64)
    ds = probes.inspect(model, WORDS, of=7, baseline="none")
    log_p, rows = gradients(model, torch.tensor(ds["tokens"].values))
    np.testing.assert_allclose(ds["sensitivity"], rows[7].norm(dim=-1) / math.sqrt(families.WIDTH), rtol=ROUNDING)
    assert json.loads(str(ds.attrs["options"]))["method"] == "exact"
    contrast = probes.inspect(model, WORDS, of=(7, 9), baseline="none")  # log p of two differ as their logits do
    np.testing.assert_allclose(
        contrast["sensitivity"], (rows[7] - rows[9]).norm(dim=-1) / math.sqrt(families.WIDTH), rtol=ROUNDING
    )
    for of in ("7-9", '"w7"-"w9"', '7-"w9"', ("w7", 9)):
        np.testing.assert_array_equal(
            probes.inspect(model, WORDS, of=of, baseline="none")["sensitivity"], contrast["sensitivity"]
        )
    best = int(log_p.argmax())
    top, same = (probes.inspect(model, WORDS, of=of, baseline="none") for of in ("top", best))
    np.testing.assert_array_equal(top["sensitivity"], same["sensitivity"])
    np.testing.assert_array_equal(ds["next_id"], log_p.topk(5).indices)
    np.testing.assert_allclose(ds["probability"], log_p.topk(5).values.exp(), rtol=ROUNDING)
    assert ds.attrs["entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum()))
    of_all = probes.inspect(model, WORDS, of="logits", baseline="none", method="exact")
    plain = jacobian(model, torch.tensor(ds["tokens"].values), readout="logits")["sensitivity"]
    np.testing.assert_array_equal(of_all["sensitivity"], plain[0])


def test_a_model_that_is_its_own_baseline_has_ratio_1():
    """A newborn without known parts, held against the one of the same seed, which is then measured, too."""
    newborn = probes.fresh(families.sized(64, 128, 128, num_hidden_layers=3), seed=0)
    whole = Readout(newborn, newborn.unembed)
    whole.parts, whole.tokenizer = lambda layer: None, families.tokenizer()
    ds = probes.inspect(whole, WORDS, seeds=1)
    assert ds.attrs["baseline_by"] == "measurement"
    np.testing.assert_allclose(ds["ratio"], 1, rtol=1e-5)


@pytest.mark.parametrize("baseline", ["kernel", "none"])
def test_ratios_and_shares_are_of_the_scaled_baseline(baseline):
    model = small()
    ds = probes.inspect(model, WORDS, baseline=baseline)
    rest = ds["part_of"].values == "rest"
    np.testing.assert_allclose(ds["ratio"], ds["sensitivity"] / ds["baseline"], rtol=1e-6)
    assert np.exp(np.log(ds["ratio"].values[rest]).mean()) == pytest.approx(1)
    assert ds.attrs["trend"] == pytest.approx(spearman(np.flatnonzero(rest), ds["ratio"].values[rest]))
    squares = ds["sensitivity"].values ** 2
    assert float(ds["share"].sel(part="sink")) == pytest.approx(squares[0] / squares.sum())
    assert float(ds["baseline_share"].sum()) == pytest.approx(1)
    tokens = torch.tensor(ds["tokens"].values)
    known: Any = {"attention": "measured", "score_path": True, "readout": "logits"}
    expected = second_moment(readout(model, tokens, "prediction"), tokens, **known)["sensitivity"].values[0]
    factor = ds["baseline"].values / (1 if baseline == "none" else expected)
    np.testing.assert_allclose(factor, factor[0], rtol=1e-6)
    np.testing.assert_array_equal(
        parts_of(ds["sensitivity" if baseline == "none" else "baseline"].values), ds["part_of"]
    )


@pytest.mark.parametrize("baseline", ["init", "text"])
def test_baselines_are_geometric_means(baseline):
    """From single curves, by loops: over fresh models, or over windows and then neighbours, but for both ends."""
    model = small()
    ids = [0, *range(3, 50)]
    ds = probes.inspect(model, ids, of=7, baseline=baseline, seeds=2)
    tokens = torch.tensor([ids])
    if baseline == "init":
        twins = [readout(model.reinitialized(n), tokens, 7) for n in range(2)]
        known: Any = {"attention": "measured", "score_path": True, "readout": "logits"}
        curves = [second_moment(twin, tokens, **known)["sensitivity"].values[0] for twin in twins]
    else:
        windows = draw(model, n=WINDOWS, length=len(ids)).tokens
        some: Any = {"method": "scalar", "readout": "logits"}
        curves = [jacobian(readout(model, one[None], 7), one[None], **some)["sensitivity"].values[0] for one in windows]
    expected = [float(np.prod([curve[j] ** (1 / len(curves)) for curve in curves])) for j in range(len(ids))]
    if baseline == "text":
        inner = range(2, len(ids) - 2)  # a window of three
        near = {j: math.prod(expected[j - 1 : j + 2]) ** (1 / 3) for j in inner}
        expected = [near.get(j, expected[j]) for j in range(len(ids))]
    factor = ds["baseline"].values / expected
    np.testing.assert_allclose(factor, factor[0], rtol=1e-4)
    assert np.ptp(np.log(expected)) > 0.1
    assert ds.attrs["baseline_by"] == ("theory" if baseline == "init" else "measurement")


@pytest.mark.parametrize(
    ("profile", "recency"),
    [
        ([1] * 12, 1),  # flat: the last position all the same
        ([1] * 9 + [1.9, 2.1, 5], 2),
        ([1] * 9 + [3, 1, 5], 1),  # not beyond a gap
        ([0] * 8 + [1, 1, 1, 1, 1, 3, 3, 9], 3),  # the middle is of what is reached
        (list(2.0 ** np.arange(16)), 7),  # above twice the middle, which is 192
    ],
)
def test_parts(profile: Sequence[float], recency: int):
    expected = ["sink"] + ["rest"] * (len(profile) - 1 - recency) + ["recency"] * recency
    assert list(parts_of(np.array(profile, dtype=float))) == expected


@pytest.mark.parametrize(
    ("prompt", "given", "says"),
    [
        (None, {}, "no prompt is given"),
        ("w3", {}, "the text gives 2 tokens, the first one included; between sink and recency it takes at least 8"),
        ("w3 " * 200, {}, "the text gives 201 tokens, .* was made for 128; shorten it"),
        (WORDS, {"of": "everything"}, "of 'everything' is unknown; give prediction, logits, top, a token id"),
        (
            "w3",
            {"of": "predicton"},
            r"of 'predicton' is unknown \(did you mean prediction\?\)",
        ),  # before the text is read
        (WORDS, {"of": (5, 5)}, "compares a token with itself"),
        (
            WORDS,
            {"of": '"w5 w7"'},
            r"'w5 w7' is not one token of .* but 'w5' \(id 5\) and 'w7' \(id 7\); give a text that",
        ),
        (WORDS, {"of": ("w7", "Paris")}, r"'Paris' is not one token of .*, but '<unk>' \(id 2\)"),
        (WORDS, {"of": '""'}, "'' is not one token of .*, but none; give"),
        (WORDS, {"of": "w7"}, "of 'w7' is unknown; .* a token's text in double quotes"),
        (WORDS, {"of": "1-2-3"}, "of '1-2-3' is unknown"),
        (WORDS, {"of": 5, "products": 9}, "products=9 has no use with of=5"),
        (WORDS, {"seeds": 0}, "seeds=0"),
        (torch.full((2, 9), 5), {}, "the ids of 2 prompts are given"),
        ([5] * 9, {"first": "bos"}, "first=bos has no use with token ids"),
        (None, {"chat": [[{"role": "user", "content": WORDS}]] * 2}, "the chat holds 2 conversations"),
    ],
)
def test_bad_input(prompt, given, says):
    model = small()
    model.tokenizer.chat_template = TEMPLATE
    with pytest.raises(InputError, match=says):
        probes.inspect(model, prompt, **given)


def test_texts_ids_and_conversations():
    """Special tokens in a text are read as such, and a BOS is not doubled."""
    model = small()
    model.tokenizer.chat_template = TEMPLATE

    def read(prompt: Any = None, **given: Any) -> xr.Dataset:
        return probes.inspect(model, prompt, of="top", baseline="none", **given)

    plain = read(WORDS)
    ids = plain["tokens"].values
    for given, origin in ((ids[0].tolist(), "given ids"), (ids, "given ids"), (f"<s> {WORDS}", "bos")):
        same = read(given)
        np.testing.assert_array_equal(same["tokens"], ids)
        np.testing.assert_array_equal(same["sensitivity"], plain["sensitivity"])
        assert json.loads(str(same.attrs["text"])).replace("<s> ", "") == WORDS
        assert (same.attrs["first_policy"], same.attrs["first_id"]) == (origin, 0)
    assert read(f"<s> {WORDS}", first=0)["tokens"].values[0, :3].tolist() == [0, 0, 5]  # who names an id gets it
    np.testing.assert_array_equal(read(WORDS, first="none")["tokens"][0], ids[0, 1:])
    talk = read(chat=WORDS)
    assert json.loads(str(talk.attrs["text"])) == f"<s> {WORDS} </s>"
    assert talk["token"].values[[0, 1, -1]].tolist() == ["<s>", " w5", " </s>"]
    assert talk.attrs["first_policy"] == "chat template"
    model = probes.load(families.model("llama"))  # ids need no tokenizer
    assert read(ids)["token"].values.tolist() == [str(one) for one in ids[0]]
    with pytest.raises(InputError, match="has no tokenizer"):
        read(WORDS)


def test_what_the_command_reads(tmp_path):
    (tmp_path / "a.txt").write_text("wide 漢\n", encoding="utf-8")
    talk = [{"role": "user", "content": "why?"}]
    assert Options(text=tmp_path / "a.txt").values()["prompt"] == "wide 漢\n"
    assert Options(chat="why?").values()["chat"] == [talk]
    assert (Options().values()["prompt"], Options(prompt="").values()["prompt"]) == (TEXT, "")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_tokens_give_the_text_back(name):
    model = probes.load(name, device="cpu")
    ds = probes.inspect(model, CODE, of="top", baseline="none")
    tokens = [str(token) for token in ds["token"].values]
    if model.bos is not None:
        assert tokens.pop(0) == "<|bos|>"
    assert "".join(token for token in tokens if token != FURTHER) == visible(CODE)
    assert tokens.count(FURTHER) == 3  # é and 漢 are two and three bytes, which nobody has merged
    assert json.loads(str(ds.attrs["text"])) == CODE


def test_what_would_not_be_seen_is_made_visible_and_spaces_are_kept():
    shown = {
        "a\nb\tc": "a⏎b⇥c",
        "\x1b[31m": "\\x1b[31m",
        "a\u202eb\u2028": "a\\u202eb\\u2028",
        "漢 👩\u200d💻": "漢 👩\u200d💻",
    }
    assert {text: visible(text) for text in shown} == shown
    text = "  " + WORDS.replace(" ", "   ") + " "
    ds = probes.inspect(view("llama"), text, of="top", baseline="none")
    assert "".join(map(str, ds["token"].values[1:])) == text


def test_beyond_a_window_there_is_no_ratio():
    model = probes.load("tiny-mistral-window", device="cpu")
    ds = probes.inspect(model, Path(__file__).read_text(encoding="utf-8")[:580], of="top", baseline="kernel")
    beyond = np.arange(ds.sizes["position"]) < ds.sizes["position"] - 1 - 6 * 31  # blocks times window - 1
    np.testing.assert_array_equal(np.isfinite(ds["ratio"]), ~beyond)
    assert beyond.sum() > 10
    table, *_ = MEASURE.tables({"m": ds})
    assert sum(row[5] == "-" for row in table.rows) == beyond.sum()


def test_a_contrast_names_its_tokens_wherever_it_is_told():
    model = small()
    contrast = probes.inspect(model, WORDS, of=(7, 9), baseline="none", answer=2)
    said = "the logit of 'w7' less that of 'w9'"
    (line,) = MEASURE.answer({"m": contrast})
    assert line.startswith(f"m: for {said}, '")
    assert "times the geometric mean of their sensitivities stand out" in line
    assert line.endswith(" The model wrote the last 2 tokens.")
    assert MEASURE.shown is not None
    shown = MEASURE.shown(contrast).plain
    assert f"Orange: {said} depends more on the token than on the others. Blue: less." in shown
    assert shown.partition(ANSWER)[2].startswith("".join(contrast["token"].values[-2:]) + "\n\nratio")
    assert shown.count(ANSWER) == 2  # in the text, and what it is
    figure = MEASURE.chart({"m": contrast})
    assert f"sensitivity of {said}" in {cell.get_ylabel().replace("\n", " ") for cell in figure.axes}


def test_words_lines_and_paragraphs_add_up_over_their_tokens(seen):
    text = ["<s>", "Q", ": a", " b", "⏎", "A:", " c", "⏎⏎", "Q:", " d", "⏎"]
    count = len(text)
    ds = seen.isel(position=slice(count)).assign_coords(token=("position", text)).assign_attrs(first_policy="bos")
    ds = ds.assign(sensitivity=("position", np.arange(1.0, count + 1)), baseline=("position", np.ones(count)))
    found = {one.title.split(",")[0]: one.rows for one in MEASURE.tables({"tiny": ds})[1:]}
    said = {kind: sorted((row[1], row[2]) for row in rows) for kind, rows in found.items()}
    lines = [("0-0", "<s>"), ("1-4", "Q: a b⏎"), ("5-7", "A: c⏎⏎"), ("8-10", "Q: d⏎")]
    assert said["Lines"] == lines
    assert said["Paragraphs"] == [lines[0], ("1-7", "Q: a b⏎A: c⏎⏎"), lines[3]]
    assert [text for _, text in said["Words"]] == ["<s>", "Q: a", " b⏎", "A:", " c⏎⏎", "Q:", " d⏎"]
    (_, at, _, share, even, ratio) = found["Lines"][0]
    assert (at, share, even, ratio) == ("8-10", f"{302 / 506:.1%}", f"{3 / 11:.1%}", "10")


CHATML = (
    "{% if messages[0].role != 'system' %}system: You are a tool.\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content | trim }}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_turns_of_a_chat_are_units_wherever_their_words_stand_elsewhere():
    """The template's own words, also those that a message says too, are no part of a turn."""
    model = probes.load("tiny-llama", device="cpu")
    model.tokenizer.chat_template = CHATML
    said = [("user", " a\n"), ("assistant", "user: You"), ("user", "def f(x):\n    return x")]
    talk = [{"role": role, "content": text} for role, text in said]
    ds = probes.inspect(model, chat=talk, of="top", baseline="none", answer=2)
    (table,) = (one for one in MEASURE.tables({"tiny": ds}) if one.title.startswith("Turns"))
    rows = {row[1]: (row[2], row[5]) for row in sorted(table.rows, key=lambda row: int(row[1].split("-")[0]))}
    words = [text for text, _ in rows.values()]
    assert words[:4] == [
        "template: system: You are a tool.⏎user:",
        "user:  a",
        "template: ⏎assistant:",
        "assistant:  user: You",
    ]
    assert words[5:7] == ["user:  def f(x):⏎    return x", "template: ⏎assistant: "]
    (last,) = (at for at, (text, _) in rows.items() if text.startswith("answer: "))
    assert last == f"{ds.sizes['position'] - 2}-{ds.sizes['position'] - 1}"
    alone = probes.inspect(model, str(json.loads(str(ds.attrs["text"]))), of="top", baseline="none", first="none")
    assert "turn" not in alone.coords
    assert not [one for one in MEASURE.tables({"tiny": alone}) if one.title.startswith("Turns")]
    for template, known in (("upper", False), ("trim if m.role == 'user' else m.content", True)):
        text = f"{{% for m in messages %}}{{{{ m.content | {template} }}}}.{{% endfor %}}"
        model.tokenizer.chat_template = text
        (made,) = rendered(model, [talk])
        assert [made[start:stop] for _, start, stop in contents(model, talk, made)] == (
            ["a", "user: You", said[2][1]] if known else []
        )
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"  # says other words
    assert "turn" not in probes.inspect(model, chat=talk, of="top", baseline="none").coords


def test_a_command_in_a_pipe_and_in_a_terminal(monkeypatch, capsys, tmp_path):
    words = ["inspect", "tiny-llama", "--prompt", CODE, "--out", str(tmp_path), "--seeds", "1", "--device", "cpu"]
    assert call(monkeypatch, *words) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out
    assert re.search(r"^headwater: read 1 prompt of \d+ tokens, from text 'def area\(width", printed.err, re.MULTILINE)
    ds = probes.load_result(tmp_path / "inspect.nc")
    own = probes.inspect(probes.load("tiny-llama", device="cpu"), CODE, seeds=1)
    np.testing.assert_allclose(ds["sensitivity"], own["sensitivity"], rtol=1e-4)
    page = (tmp_path / "inspect.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("background-color: #d55e00", "漢", "&lt;", "depends more on the token"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert call(monkeypatch, *words) == 0
    assert "\x1b[38;2;0;0;0;48;2;" in capsys.readouterr().out.partition("sensitivity")[0]
