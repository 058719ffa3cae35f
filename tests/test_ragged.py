"""Texts of different lengths: each gets the numbers it gets alone, from the padding's either side; what is refused."""

import json
from functools import partial
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from commands import call, listing
from measured import close, complete, drawn_tokens, refused, view
from scipy.stats import t as student
from test_chat import ANSWERED, ASKED, LONG, TEMPLATE

import probes
from probes.data.prompts import whole
from probes.run.store import Store
from probes.theory.kernel import second_moment

LENGTHS, WIDEST = (5, 14, 9), 14
TEXTS = [drawn_tokens(1, length, least=3, first=0, seed=length) for length in LENGTHS]
MEASURES: dict[str, Any] = {
    "portrait": partial(probes.portrait, products=4),
    "sinks": partial(probes.sinks, keys="all", evict=(0,), keep=(4,), reacts=0),
    "sink_factorial": partial(probes.sink_factorial, lists=0),
    "jacobian": partial(probes.jacobian, from_layer="all", beside=True),
    "trajectory": probes.trajectory,
    "loss": probes.loss,
    "second_moment": second_moment,
}


def padded(side: str, pad: int = 0) -> dict[str, Any]:
    tokens, mask = torch.full((len(TEXTS), WIDEST), pad), torch.zeros(len(TEXTS), WIDEST, dtype=torch.bool)
    for row, text in enumerate(TEXTS):
        at = slice(WIDEST - text.shape[1], None) if side == "left" else slice(text.shape[1])
        tokens[row, at], mask[row, at] = text, True
    return {"tokens": tokens, "attention_mask": mask}


@pytest.mark.parametrize("name", MEASURES)
def test_each_text_gets_the_numbers_that_it_gets_alone(name, tmp_path):
    side, backend = ("left", "transformer_lens") if name in ("jacobian", "loss") else ("right", "transformers")
    model, measure, told = view("llama", backend), MEASURES[name], []
    more: dict[str, Any] = {"documents": ["a", "b", "c"]} if name == "sinks" else {}
    more |= {"pieces": Store(tmp_path), "progress": lambda *so_far: told.append(so_far)}
    found = measure(model, **padded(side), **more)
    assert found.attrs["texts"] == found.sizes["text"] == len(TEXTS)
    assert told == sorted(told)
    assert told[-1][0] > 0.9
    complete(found, tmp_path / "found.nc")
    for n, text in enumerate(TEXTS):
        alone = measure(model, text).squeeze("prompt", drop=True)
        assert found["tokens_sha256"].values[n] == alone.attrs["tokens_sha256"]
        for variable, values in alone.items():
            here = found[variable].sel(text=n)
            close(here.sel({dim: alone[dim] for dim in values.dims if dim in alone.coords}), values, 1e-6, 1e-12)
            assert here.notnull().sum() == values.notnull().sum(), variable  # and no others


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_they_are_those_of_transformers_under_its_own_mask(name):
    model, plain, given = view(name), families.model(name), padded("left", 7)
    plain.set_attn_implementation("eager")
    mask, at = given["attention_mask"].long(), (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        truth = plain(given["tokens"], attention_mask=mask, position_ids=at, output_attentions=True)
    losses, sinks = probes.loss(model, **given).loss, probes.sinks(model, **given, effect=0).alpha
    for n, length in enumerate(LENGTHS):
        logs = truth.logits[n, -length:-1].log_softmax(-1).gather(1, given["tokens"][n, 1 - length :, None])
        close(losses[n, : length - 1], -logs[:, 0], 1e-4)
        first = torch.stack(truth.attentions)[:, n, :, -length:, -length].mean(-1)  # [layer, head], on the first token
        close(sinks.sel(text=n, key=0), first, 1e-4)


MASKS: list[tuple[Any, tuple[str, ...]]] = [
    ([[1, 1, 1, 1], [1, 0, 1, 1]], ("row 1 of attention_mask is 0 at position 1", "within the text")),
    ([[1, 1, 1, 1], [0] * 4], ("row 1", "all 0", "leave the row out")),
    ([[0, -1e9, 0, 0]] * 2, ("row 0", "-1000000000.0 at position 1", "give 1 for text")),
    ([[1, 1]] * 2, (r"shape \[2, 2\] and tokens have \[2, 4\]",)),
    ([[1], [1, 1]], ("attention_mask is no array", "give 0 or 1")),
    ([[0, 0, 0, 1], [1] * 4], ("text 0 alone: tokens have shape", "give at least 1 prompt of at least 2")),
]


def test_masks_that_say_no_text_and_measures_of_several_prompts_at_once_are_refused():
    for mask, words in MASKS:
        with refused(*words):
            probes.loss(view("llama"), drawn_tokens(2, 4, least=3), attention_mask=mask)
    for measure in (probes.leakage, probes.bos_swap, probes.decode, probes.horizon):
        with refused(f"{measure.__name__} needs several prompts at once", "cut the texts to one length"):
            measure(view("llama"), **padded("left"))


def test_batches_of_texts_and_of_conversations(tmp_path):
    tokenizer = families.tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = probes.load(families.model("llama"), tokenizer=tokenizer)
    made = probes.batch(model, ["w5 w6", "w7 w8 w9 w10 w11"], length=5)
    assert made["tokens"].tolist() == [[0, 5, 6, 0, 0], [0, 7, 8, 9, 10]]
    assert made["attention_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    (tmp_path / "a.jsonl").write_text('{"text": "w5"}\n{"text": "w6 w7"}\n')
    assert probes.batch(model, tmp_path / "a.jsonl", first=9)["tokens"].tolist() == [[9, 5, 0], [9, 6, 7]]
    lengths = probes.batch(model, chat=[ASKED, LONG, ANSWERED], length=30)["attention_mask"].sum(1)
    assert lengths.tolist() == [7, 30, 8]
    assert np.isfinite(probes.loss(model, **made).loss).sum() == 2 + 4
    bad: dict[str, Any] = {"give that, or a chat": "w5", "give at least one": [], "text 1 has 129": ["w5", "w5 " * 128]}
    for words, given in (bad | {"text 0 has 1 token; give at least 2": [""]}).items():
        with refused(words):
            probes.batch(model, given)
    more: dict[str, Any] = {"n": 2, "length": 30}
    talks = whole(model, chat=[ASKED, LONG, ANSWERED], **more | {"n": 3})
    assert [(one.tokens.shape, one.documents) for one in talks] == [
        ((1, length), (f"conversation {n}",)) for n, length in enumerate((7, 30, 8))
    ]
    streamed = whole(model, dataset=str(tmp_path / "a.jsonl"), **more)
    assert sorted(one.tokens.tolist() for one in streamed) == [[[0, 5]], [[0, 6, 7]]]
    lines = [{"name": name, "text": text} for name, text in (("a", "w5"), ("", "w6 w7"), ("a", "w8 w9"), ("b", ""))]
    (tmp_path / "same.jsonl").write_text("\n".join(map(json.dumps, lines)))
    named = whole(model, text=tmp_path / "same.jsonl", n=9, length=9, first="none")
    assert [(*(one.documents or ()), one.tokens.tolist()) for one in named] == [("[1]", [[6, 7]]), ("a [2]", [[8, 9]])]
    (left,) = {line for one in named for line in one.remarks if "left out" in line}
    assert left.endswith("left out, for fewer than 2 tokens: a [0], b")
    (tmp_path / "short.txt").write_text("w5")
    with refused("no text of text ", "has 2 tokens"):
        whole(model, text=tmp_path / "short.txt", n=9, length=9, first="none")
    chosen = {whole(model, text=tmp_path / "a.jsonl", n=1, length=9, seed=seed)[0].documents for seed in range(9)}
    assert len(chosen) == 2


def test_a_command_measures_whole_texts_alone_and_tells_their_means(tmp_path, monkeypatch, capfd):
    families.checkpoints(tmp_path, ape=("llama", "prepended"))
    (tmp_path / "texts").mkdir()
    texts = {"a.txt": "w5 w6 w7 w8", "b.txt": "w9 w10 " * 9, "c.txt": "w4 w11 w6 w8 w12 w4"}
    for name, text in texts.items():
        (tmp_path / "texts" / name).write_text(text)
    given = [str(tmp_path / "ape"), "--text", str(tmp_path / "texts"), "--out", str(tmp_path / "out"), "--length", "12"]
    assert call(monkeypatch, "sinks", *given, "--whole", "--keys", "0-2") == 0
    printed = capfd.readouterr()
    assert "read 3 whole texts of 5 to 12 tokens" in printed.err
    model = probes.load(str(tmp_path / "ape"))
    batch = probes.batch(model, [*texts.values()], length=12)
    expected, ds = (
        probes.sinks(model, **batch, keys=(0, 1, 2)),
        probes.load_result(tmp_path / "out/sinks.nc"),
    )
    assert ds["text_name"].values.tolist() == [*texts]
    for name in ("alpha", "reads", "uniform"):
        close(ds[name], expected[name], 1e-6)
    alpha = expected["alpha"].sel(key=0).mean(("layer", "head")).values
    reach = student.ppf(0.975, 2) * np.log(alpha).std(ddof=1) / 3**0.5
    mean = [f"{x:.3g}" for x in np.exp(np.log(alpha).mean() + reach * np.array([0, -1, 1]))]
    assert f"{mean[0]} [{mean[1]}, {mean[2]}]" in printed.out
    table = (tmp_path / "out/sinks.md").read_text()
    assert f"| ape, b.txt | 12 | alpha of position 0 |  | {alpha[1]:.3g} |" in table
    assert call(monkeypatch, "sinks", *given[:2], str(tmp_path / "texts/b.txt"), *given[3:], "--whole") == 0
    assert probes.load_result(tmp_path / "out/sinks.nc")["text_name"].values.tolist() == ["b.txt"]
    assert "read 1 whole text of 12 tokens" in capfd.readouterr().err
    before = listing(tmp_path / "out")
    assert call(monkeypatch, "leakage", *given, "--whole") == 2
    assert "leakage needs several prompts at once, and each text is alone; leave out --whole" in capfd.readouterr().err
    assert listing(tmp_path / "out") == before
    assert call(monkeypatch, "sinks", *given) == 2
    assert "take whole texts (--whole" in capfd.readouterr().err


def test_readers_of_means_over_prompts_refuse_them(tmp_path, monkeypatch, capfd):
    ds, folder = probes.jacobian(view("llama"), **padded("left")), tmp_path / "jacobian"
    folder.mkdir()
    for name in "ab":
        probes.save_result(ds, folder / f"{name}.nc")
    for reader in (probes.chart, probes.shape):
        with refused("the result is of texts that were measured alone", "measure prompts of one length"):
            reader(ds)
    for words in (["compare", str(folder / "a.nc"), str(folder / "b.nc")], ["report", "--out", str(tmp_path)]):
        assert call(monkeypatch, *words) == 2
        assert "measured alone" in capfd.readouterr().err


def test_what_a_tokenizer_of_transformers_gives_is_taken_as_it_names_it():
    given = padded("left")
    named = {"input_ids": given["tokens"], "attention_mask": given["attention_mask"]}
    xr.testing.assert_equal(probes.loss(view("llama"), **named), probes.loss(view("llama"), **given))
