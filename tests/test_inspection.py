"""Inspecting one text: what is measured, by algebra and by brute force; parts; what is shown; bad input; the command."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from commands import call
from measured import refused, view
from rich.console import Console

import probes
from probes.data.prompts import draw
from probes.errors import InputError
from probes.measures.inspect import BASELINES, EDGES, LABELS, MEASURE, TEXT, Options, color_of, colored_text
from probes.measures.inspect.compute import WINDOWS, Readout, divided, readout
from probes.measures.jacobian import jacobian
from probes.measures.reading import FURTHER, visible
from probes.results.curves import rms_log_error
from probes.results.ushape import parts_of
from probes.theory.kernel import second_moment

TEMPLATE = "{% for m in messages %}<s> {{ m.content }} {% endfor %}</s>"
ROUNDING = 1e-5  # transformers' norms compute in float32, whatever the model's type
WORDS = " ".join(f"w{n}" for n in (5, 9, 17, 9, 33, 60, 101, 5, 9, 17, 88, 41))

CODE = (
    "def area(width, height):\n\treturn width * height  # <b>é漢</b> [red]\n\n\ndef volume(width, height):\n    return "
)
AS_SHOWN = visible(CODE).replace("漢", "漢··").replace("é", "é·").replace("⏎", "⏎\n")  # bytes that nobody has merged


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


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])  # the last caps its logits
def test_prediction_is_the_gradient_of_every_token_weighted_by_its_probability(family):
    model = small(family, torch.float64)
    tokens = torch.tensor([[0, 5, 9, 17, 9, 33, 60, 101, 5]])
    log_p, rows = gradients(model, tokens)
    expected = (log_p.exp()[:, None] * rows.pow(2).sum(-1)).sum(0).div(families.WIDTH).sqrt()
    found = jacobian(readout(model, tokens, "prediction"), tokens, readout="logits")["sensitivity"].values[0]
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


def test_a_token_is_its_own_gradient():
    model = small("llama", torch.float64)
    ds = probes.inspect(model, WORDS, of=7, baseline="none")
    log_p, rows = gradients(model, torch.tensor(ds["tokens"].values))
    np.testing.assert_allclose(ds["sensitivity"], rows[7].norm(dim=-1) / math.sqrt(families.WIDTH), rtol=ROUNDING)
    assert not ds["stderr"].any()
    assert json.loads(str(ds.attrs["options"]))["method"] == "exact"
    best = int(log_p.argmax())
    top, same = (probes.inspect(model, WORDS, of=of, baseline="none") for of in ("top", best))
    np.testing.assert_array_equal(top["sensitivity"], same["sensitivity"])
    np.testing.assert_array_equal(ds["next_id"], log_p.topk(5).indices)
    np.testing.assert_allclose(ds["probability"], log_p.topk(5).values.exp(), rtol=ROUNDING)
    assert ds.attrs["entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum()))


def test_logits_are_those_of_jacobian_and_shifts_of_all_of_them_change_no_prediction():
    model = small("llama", torch.float64)
    tokens = torch.tensor([[0, 5, 9, 17, 9, 33, 60, 101, 5]])
    common = torch.randn(families.WIDTH, dtype=torch.float64)
    shifted = Readout(model, lambda normed: model.unembed(normed) + (normed @ common)[..., None])
    ways = [readout(view, tokens, "prediction") for view in (model, shifted)]
    own, other, plain, moved = (
        jacobian(view, tokens, readout="logits")["sensitivity"].values for view in (*ways, model, shifted)
    )
    np.testing.assert_allclose(other, own, rtol=ROUNDING)
    assert np.all(np.abs(moved / plain - 1) > 1e-3)
    ds = probes.inspect(model, tokens, of="logits", baseline="none", method="exact")
    np.testing.assert_array_equal(ds["sensitivity"], plain[0])


def test_what_equals_its_baseline_has_ratio_1():
    profile = np.array([9.0, 4, 3, 2, 1, 1, 1, 1, 1, 2, 3, 30])
    ratio, scaled, parts = divided(7 * profile, profile)
    np.testing.assert_allclose(ratio, 1)
    np.testing.assert_allclose(scaled, 7 * profile)
    assert list(parts) == ["sink", *["rest"] * 9, "recency", "recency"]
    content = np.where(np.arange(12) == 5, 8.0, 1.0)
    ratio, _, _ = divided(profile * content, profile)
    rest = parts == "rest"
    assert np.exp(np.log(ratio[rest]).mean()) == pytest.approx(1)
    assert ratio[5] / ratio[4] == pytest.approx(8)
    bare, _, own = divided(profile, np.ones(12), bare=True)
    np.testing.assert_allclose(bare / bare[4], profile)
    np.testing.assert_array_equal(own, parts)


def test_a_model_that_is_its_own_baseline_has_ratio_1():
    """A newborn without known parts, held against the one of the same seed, which is then measured, too."""
    config = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"intermediate_size": 96, "max_position_embeddings": 128}
    newborn = probes.fresh({"model_type": "llama", **config}, seed=0)
    whole = Readout(newborn, newborn.unembed)
    whole.parts, whole.tokenizer = lambda layer: None, families.tokenizer()
    ds = probes.inspect(whole, WORDS, seeds=1)
    assert ds.attrs["baseline_by"] == "measurement"
    np.testing.assert_allclose(ds["ratio"], 1, rtol=1e-5)
    np.testing.assert_allclose(ds["baseline"], ds["sensitivity"], rtol=1e-5)
    np.testing.assert_allclose(ds["share"], ds["baseline_share"], rtol=1e-5)


def test_theory_is_the_baseline_of_a_newborn_and_not_of_a_trained_model(tiny):
    newborn = probes.inspect(tiny.reinitialized(seed=5), WORDS, seeds=2, method="exact")
    assert newborn.attrs["baseline_by"] == "theory"
    trained = probes.inspect(tiny, WORDS, seeds=1)
    assert rms_log_error(newborn["ratio"].values, np.ones(newborn.sizes["position"])) < 0.15  # of single models
    assert rms_log_error(trained["ratio"].values, np.ones(trained.sizes["position"])) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("baseline", BASELINES)
def test_every_baseline(tiny, baseline):
    ds = probes.inspect(tiny, WORDS, baseline=baseline, seeds=1)
    rest = ds["part_of"].values == "rest"
    np.testing.assert_allclose(ds["ratio"], ds["sensitivity"] / ds["baseline"], rtol=1e-6)
    assert np.exp(np.log(ds["ratio"].values[rest]).mean()) == pytest.approx(1)
    assert float(ds["share"].sum()) == pytest.approx(1)
    assert float(ds["baseline_share"].sum()) == pytest.approx(1)
    profile = ds["sensitivity"] if baseline == "none" else ds["baseline"]
    np.testing.assert_array_equal(parts_of(profile.values), ds["part_of"])
    assert bool(np.ptp(ds["baseline"].values) == 0) is (baseline == "none")


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


@pytest.mark.parametrize(
    ("profile", "recency"),
    [
        ([1] * 12, 1),  # flat: the last position all the same
        ([1] * 9 + [1.9, 2.1, 5], 2),
        ([1] * 9 + [3, 1, 5], 1),  # not beyond a gap
        ([9] * 3 + [1] * 6 + [3, 3, 3], 3),
        ([0] * 8 + [1, 1, 1, 1, 1, 3, 3, 9], 3),  # the middle is of what is reached
        ([0] * 15 + [1], 1),
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
        (WORDS + "\udcff", {}, "not valid Unicode"),
        (WORDS, {"of": "everything"}, "of 'everything' is unknown; give prediction, logits, top or a token id"),
        (WORDS, {"of": 5, "products": 9}, "products=9 has no use with of=5"),
        (WORDS, {"seeds": 0}, "seeds=0"),
        ([3.5] * 9, {}, "tokens have dtype float32"),
        (torch.full((2, 9), 5), {}, "the ids of 2 prompts are given"),
        ([5] * 9, {"first": "bos"}, "first=bos has no use with token ids"),
        (None, {"chat": [[{"role": "user", "content": WORDS}]] * 2}, "the chat holds 2 conversations"),
        (WORDS, {"chat": "w3"}, "both prompt and chat are given; give one of them"),
        (None, {"chat": "w3", "first": "none"}, "first=none has no use with a chat"),
    ],
)
def test_bad_input(prompt, given, says, unchecked):
    model = small()
    model.tokenizer.chat_template = TEMPLATE
    with pytest.raises(InputError, match=says) as raised:
        probes.inspect(model, prompt, **given)
    assert "\n" not in str(raised.value)


def test_special_tokens_in_a_text_are_read_as_such_and_a_bos_is_not_doubled():
    model = small()
    plain = probes.inspect(model, WORDS, of="top", baseline="none")
    spelled = probes.inspect(model, f"<s> {WORDS} </s>", of="top", baseline="none")
    assert plain["tokens"].values.tolist()[0] == spelled["tokens"].values.tolist()[0][:-1]
    assert spelled["token"].values[[0, -1]].tolist() == ["<s>", " </s>"]
    doubled = probes.inspect(model, f"<s> {WORDS}", of="top", baseline="none", first=0)
    assert doubled["tokens"].values.tolist()[0][:3] == [0, 0, 5]  # who names an id gets it
    bare = probes.inspect(model, WORDS, of="top", baseline="none", first="none")
    np.testing.assert_array_equal(plain["tokens"][0, 1:], bare["tokens"][0])
    assert (plain.attrs["first_policy"], bare.attrs["first_policy"]) == ("bos", "none")


def test_ids_are_read_as_they_are():
    model = small()
    ids = probes.inspect(model, WORDS)["tokens"].values[0]
    told, seen = (probes.inspect(model, one, of="top", baseline="none") for one in (WORDS, ids.tolist()))
    for same in (ids, torch.from_numpy(ids), torch.from_numpy(ids)[None]):
        xr.testing.assert_equal(probes.inspect(model, same, of="top", baseline="none"), seen)
    np.testing.assert_array_equal(seen["sensitivity"], told["sensitivity"])
    np.testing.assert_array_equal(seen["tokens"], told["tokens"])
    assert json.loads(str(seen.attrs["text"])) == f"<s> {WORDS}"
    assert (seen.attrs["first_policy"], seen.attrs["first_id"]) == ("given ids", 0)
    other = probes.inspect(model, [9, 5, 17, 9, 33, 60, 101, 5], of="top", baseline="none")  # no BOS before them
    assert other["tokens"].values.tolist() == [[9, 5, 17, 9, 33, 60, 101, 5]]


def test_models_that_cannot_be_inspected_and_ids_that_need_no_tokenizer():
    bare = probes.load(families.model("llama"))
    ds = probes.inspect(bare, [0, 5, 9, 17, 9, 33, 60, 101], of="top", baseline="none")
    assert ds["token"].values.tolist() == ["0", "5", "9", "17", "9", "33", "60", "101"]
    assert ds["next_token"].values.tolist() == [str(i) for i in ds["next_id"].values]
    with pytest.raises(InputError, match="has no tokenizer"):
        probes.inspect(bare, WORDS)
    config = families.FAMILIES["llama"]()
    config.vocab_size = 50
    narrow = probes.load(families.build(config), tokenizer=families.tokenizer())
    with pytest.raises(InputError, match="the tokenizer gives id 101"):
        probes.inspect(narrow, WORDS)
    broken = families.model("llama")
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = math.nan  # type: ignore[index]
    with pytest.raises(InputError, match="not finite"):
        probes.inspect(probes.load(broken, tokenizer=families.tokenizer()), WORDS)


def test_a_conversation_is_read_by_the_model_s_template():
    model = small()
    model.tokenizer.chat_template = TEMPLATE
    ds = probes.inspect(model, chat=WORDS, of="top", baseline="none")
    assert json.loads(str(ds.attrs["text"])) == f"<s> {WORDS} </s>"
    assert ds["token"].values[[0, 1, -1]].tolist() == ["<s>", " w5", " </s>"]
    assert ds.attrs["first_policy"] == "chat template"


# ----------------------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_tokens_give_the_text_back(name):
    model = probes.load(name, device="cpu")
    ds = probes.inspect(model, CODE, of="top", baseline="none")
    tokens = [str(token) for token in ds["token"].values]
    if model.bos is not None:
        assert tokens.pop(0) == "<|bos|>"
        assert int(ds["tokens"][0, 0]) == model.bos
    assert "".join(token for token in tokens if token != FURTHER) == visible(CODE)
    assert tokens.count(FURTHER) == 3  # é and 漢 are two and three bytes, which nobody has merged
    assert json.loads(str(ds.attrs["text"])) == CODE


def test_what_would_not_be_seen_is_made_visible_and_spaces_are_kept():
    shown = {
        "a\nb\tc": "a⏎b⇥c",
        "\x1b[31m": "\\x1b[31m",
        "a\u202eb\u2028": "a\\u202eb\\u2028",
        "漢字 é 👩\u200d💻": "漢字 é 👩\u200d💻",
    }
    assert {text: visible(text) for text in shown} == shown
    text = "  " + WORDS.replace(" ", "   ") + " "
    ds = probes.inspect(view("llama"), text, of="top", baseline="none")
    assert "".join(map(str, ds["token"].values[1:])) == text


def test_colours_follow_the_ratio(seen):
    np.testing.assert_allclose(np.array(EDGES) * np.array(EDGES)[::-1], 1)
    assert color_of(1.0) is color_of(math.nan) is None
    colors = [color_of(ratio) for ratio in (0.1, 0.3, 0.6, 1.5, 3.0, math.inf)]
    assert [color and color[0] for color in colors] == [
        "#0072b2",
        "#72b2d8",
        "#c9e2f1",
        "#fadcc5",
        "#f0a46c",
        "#d55e00",
    ]
    text, console = colored_text(seen), Console()
    at = 1  # behind the sink's bracket
    for piece, ratio, part in zip(seen["token"].values, seen["ratio"].values, seen["part_of"].values, strict=True):
        color = color_of(float(ratio))
        written = str(piece).replace("⏎", "⏎\n")
        assert text.plain[at : at + len(written)] == written
        for offset in (at + n for n, character in enumerate(written) if character != "\n"):
            style = text.get_style_at_offset(console, offset)
            assert (style.bgcolor.name if style.bgcolor else None) == (color[0] if color else None)
            assert (bool(style.underline), bool(style.bold)) == (part == "recency", part == "sink")
        at += len(written) + (part == "sink")
    assert text.plain.startswith(f"[<|bos|>]{AS_SHOWN}")
    assert all(label in text.plain for label in (*LABELS, "sink", "recency", "[red]"))


@pytest.mark.slow
def test_beyond_a_window_there_is_no_ratio():
    model = probes.load("tiny-mistral-window", device="cpu")
    ds = probes.inspect(model, Path(__file__).read_text(encoding="utf-8")[:580], seeds=1)
    beyond = np.arange(ds.sizes["position"]) < ds.sizes["position"] - 1 - 6 * 31  # blocks times window - 1
    np.testing.assert_array_equal(np.isfinite(ds["ratio"]), ~beyond)
    assert beyond.sum() > 10
    (table,) = MEASURE.tables({"m": ds})
    assert sum(row[5] == "-" for row in table.rows) == beyond.sum()


def test_the_table_and_the_answer_name_what_stands_out_most(tiny, seen):
    (table,) = MEASURE.tables({"tiny-llama": seen})
    rest = [row for row in table.rows if row[-1] == "rest"]
    assert table.rows[: len(rest)] == rest
    assert [float(row[5]) for row in rest] == sorted((float(row[5]) for row in rest), reverse=True)
    values = {int(row[1]): row for row in table.rows}
    assert sorted(values) == list(range(seen.sizes["position"]))
    for at, (_, _, token, *numbers, part) in values.items():
        expected = [float(seen[name][at]) for name in ("sensitivity", "baseline", "ratio")]
        assert [float(x.replace(",", "")) for x in numbers] == pytest.approx(expected, rel=1e-2)
        assert (token, part) == (str(seen["token"].values[at]), str(seen["part_of"].values[at]))
    (line,) = MEASURE.answer({"tiny-llama": seen})
    assert line.startswith(f"tiny-llama: '{rest[0][2]}' {rest[0][5]}, '{rest[1][2]}' {rest[1][5]}, ")
    assert f"next comes '{seen['next_token'].values[0]}' {float(seen['probability'][0]):.1%}, " in line
    bare = probes.inspect(tiny, CODE, of="top", baseline="none")
    assert {row[4] for row in MEASURE.tables({"m": bare})[0].rows} == {"-"}
    assert "baseline" not in MEASURE.answer({"m": bare})[0]


def test_what_the_command_reads(tmp_path):
    (tmp_path / "a.txt").write_text("wide 漢\n", encoding="utf-8")
    talk = [{"role": "user", "content": "why?"}]
    (tmp_path / "c.json").write_text(json.dumps(talk), encoding="utf-8")
    assert Options(text=tmp_path / "a.txt").values()["prompt"] == "wide 漢\n"
    assert [Options(chat=chat).values()["chat"] for chat in ("why?", str(tmp_path / "c.json"))] == [[talk]] * 2
    assert Options(ids="0, 17,3", of="7").values().items() >= {"of": 7, "prompt": [0, 17, 3]}.items()
    assert (Options().values()["prompt"], Options(prompt="").values()["prompt"]) == (TEXT, "")
    (tmp_path / "b.txt").write_text("another", encoding="utf-8")
    with refused("holds 2 texts, and one is inspected"):
        Options(text=tmp_path).values()


def test_a_command_in_a_pipe_and_in_a_terminal(monkeypatch, capsys, tmp_path):
    words = ["inspect", "tiny-llama", "--prompt", CODE, "--out", str(tmp_path), "--seeds", "1", "--device", "cpu"]
    assert call(monkeypatch, *words) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert "area" not in plain.partition("tiny-llama: ")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"inspect.{end}" for end in ("md", "nc", "png", "svg")]
    ds = probes.load_result(tmp_path / "inspect.nc")
    assert json.loads(str(ds.attrs["text"])) == CODE
    own = probes.inspect(probes.load("tiny-llama", device="cpu"), CODE, seeds=1)
    np.testing.assert_allclose(ds["sensitivity"], own["sensitivity"], rtol=1e-4)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert call(monkeypatch, *words) == 0
    colored = capsys.readouterr().out
    assert "\x1b[38;2;0;0;0;48;2;" in colored.partition("sensitivity")[0]
