"""The pretraining program: order of the data, what is measured, continuation, what is written."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import bad_input, listing
from families import sized
from kept import interrupting
from reference_toys import bigram_loss as reference_bigram_loss
from safetensors.torch import load_file
from sim import ONE, Simulated
from transformers import AutoModelForCausalLM, AutoTokenizer

from probes.data.documents import Document
from probes.errors import InputError
from toy.corpus import Windows, hold_out, pack, train_tokenizer
from toy.pretrain import bigram_loss, pretrain, run, validation_loss
from toy.recipes import Options

VOCABULARY = 300
SMALL = Options(steps=24, batch=4, length=32, warmup=4, peak_lr=1e-2)


def text_documents() -> list[Document]:
    """Made-up text that is easy to learn: lines of a few words in a fixed grammar."""
    random = np.random.default_rng(0)
    who, what = ("the river", "a stone", "this wind"), ("the sea", "a valley", "time")
    does = ("moves", "finds", "keeps")
    lines = [f"{random.choice(who)} {random.choice(does)} {random.choice(what)}.\n" for _ in range(900)]
    return [Document(f"part{i}", "".join(lines[30 * i : 30 * i + 30])) for i in range(30)]


def small_config(kind: str = "llama", **changes: Any) -> Any:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return sized(32, 64, VOCABULARY, kind=kind, **(shape | {"intermediate_size": 48} | changes))


def train(out: Path, options: Options = SMALL, config: Any = None, first: int = 0, **more: Any) -> dict[str, Any]:
    documents = text_documents()
    parts: dict[str, Any] = {"training": documents[first:-6], "heldout": documents[-6:]}
    return pretrain(small_config() if config is None else config, out, options=options, **parts, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SimpleNamespace:
    out = tmp_path_factory.mktemp("trained") / "model"
    return SimpleNamespace(out=out, report=train(out, keep_steps=(0, 10), save_every=10))


def interrupted(out: Path, **more: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(out, save_every=10, advance=interrupting(17), **more)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_loss_falls_and_the_log_and_training_json_say_so(trained):
    log = [json.loads(line) for line in (trained.out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [0, 10, 20, 23]
    assert abs(log[0]["loss"] - math.log(VOCABULARY)) < 0.2  # fresh weights know nothing
    assert log[-1]["loss"] < log[0]["loss"] - 1
    report = trained.report
    assert json.loads((trained.out / "training.json").read_text(encoding="utf-8")) == report
    assert report["tokens_seen"] == 24 * 4 * 32
    assert (report["training_documents"], report["heldout_documents"]) == (24, 6)
    assert report["options"] == dataclasses.asdict(SMALL)
    assert not (trained.out / "state").exists()


def test_interrupted_run_continues_to_the_same_bits(tmp_path):
    # With dropout the steps draw random numbers; those too have to follow from seed and step alone.
    whole, out, built = tmp_path / "whole", tmp_path / "model", small_config(attention_dropout=0.2)
    train(whole, config=built, keep_steps=(0, 10), save_every=10)
    interrupted(out, config=built, keep_steps=(0, 10))
    assert not (out / "model.safetensors").exists()
    assert [file.name for file in (out / "state").rglob("*.npz")] == ["result.npz"]
    train(out, config=built, keep_steps=(0, 10), save_every=10)
    for folder in (".", "step0", "step10"):
        assert weights(out / folder) == weights(whole / folder)
    assert (out / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()
    first, second = (json.loads((folder / "training.json").read_text()) for folder in (out, whole))
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_another_device_trains_the_same(tmp_path, trained):
    with Simulated(float64=False):
        interrupted(tmp_path, device=str(ONE))
        found = train(tmp_path, save_every=10, device=str(ONE))
    assert found["device"] == str(ONE)
    assert found["validation_loss"] == pytest.approx(trained.report["validation_loss"], abs=1e-3)


def test_continuing_with_other_settings_is_refused_by_name(tmp_path):
    interrupted(tmp_path)
    before = listing(tmp_path / "state")
    for changes, more, named in (
        ({"peak_lr": 2e-2, "clip": 0.5}, {}, "clip, peak_lr"),
        ({}, {"config": small_config(rope_theta=500.0)}, "rope"),
        ({}, {"first": 1}, "data"),
    ):
        with pytest.raises(InputError, match=rf"unfinished run with other .*{named}.*another folder"):
            train(tmp_path, dataclasses.replace(SMALL, **changes), save_every=10, **more)
    assert listing(tmp_path / "state") == before


def test_windows_with_and_without_bos_show_the_same_text_and_each_pass_every_window_once():
    stream = np.arange(2, 1002)
    plain, first = (Windows(stream, length=16, seed=3, bos=bos) for bos in (None, 0))
    passes = [plain.starts(n * plain.per_pass, plain.per_pass) for n in (0, 1, 2)]
    for starts in passes:
        assert starts == first.starts(passes.index(starts) * first.per_pass, first.per_pass)
        (inputs, targets), (inputs_bos, targets_bos) = plain.at(starts), first.at(starts)
        assert inputs.shape == targets.shape == inputs_bos.shape == targets_bos.shape == (len(starts), 16)
        assert (inputs[:, 0] == torch.tensor(starts) + 2).all()
        assert (targets == inputs + 1).all()
        assert (inputs_bos[:, 0] == 0).all()
        assert (inputs_bos[:, 1:] == inputs[:, :-1]).all()
        assert (targets_bos == inputs).all()
        assert len({start % 16 for start in starts}) == 1
        assert len(set(starts)) == plain.per_pass == 61  # of 62 at phase 0, so that there is one for every phase
    assert passes[0] != passes[1]
    assert Windows(stream, length=16, seed=1, bos=None).starts(0, 5) != passes[0][:5]


def test_bigram_loss_is_that_of_the_slow_twin():
    random = np.random.default_rng(0)
    training, held = random.integers(0, 20, size=400), random.integers(0, 25, size=150)  # some pairs never trained on
    windows = Windows(held, length=12, seed=0, bos=None)
    assert len(windows.side_by_side()) == 12
    expected = reference_bigram_loss(training.tolist(), held.tolist(), length=12, vocabulary=25)
    # Both are sums of about a hundred float64 logarithms, in another order.
    assert bigram_loss(training, windows, 25) == pytest.approx(expected, rel=1e-12)


def test_step0_is_the_bfloat16_rounded_start(trained):
    torch.manual_seed(SMALL.seed)
    config = AutoModelForCausalLM.from_pretrained(trained.out / "step0").config
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    saved = load_file(trained.out / "step0" / "model.safetensors")
    assert set(fresh) - set(saved) == {"lm_head.weight"}  # tied to the embedding
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, fresh[name].bfloat16()), name


def test_saved_folder_loads_with_transformers_and_repeats_its_validation_loss(trained):
    model = AutoModelForCausalLM.from_pretrained(trained.out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained.out)
    assert tokenizer("the river moves time.").input_ids[0] == tokenizer.bos_token_id == model.config.bos_token_id == 0
    assert tokenizer.decode(tokenizer("the river – é").input_ids, skip_special_tokens=True) == "the river – é"
    windows = Windows(pack(tokenizer, text_documents()[-6:]), length=32, seed=0, bos=0)
    assert len(windows.stream) == trained.report["heldout_tokens"]
    assert validation_loss(model, windows, batch=5) == pytest.approx(trained.report["validation_loss"], abs=1e-4)


def test_tokenizer_without_bos_adds_none_and_eos_ends_documents():
    tokenizer = train_tokenizer(text_documents(), vocabulary=VOCABULARY, bos=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 1)
    assert tokenizer.decode(pack(tokenizer, [Document("a", "time"), Document("b", "sea")])) == "time<|eos|>sea<|eos|>"


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path):
    long = {"options": dataclasses.replace(SMALL, length=6000)}
    for changes, more, says in (
        ({"vocab_size": 257}, {}, "vocab_size=257 cannot hold the 256 bytes, BOS and EOS; give 258 or more"),
        ({"max_position_embeddings": 31}, {}, "length=32 exceeds"),
        ({"max_position_embeddings": 6000}, long, "is too short for windows of length=6000"),
        ({}, {"keep_steps": (0, 24)}, "keep_steps=24"),
    ):
        with bad_input(says):
            train(tmp_path / "out", config=small_config(**changes), **more)
    assert list(tmp_path.iterdir()) == []


def test_learning_rate_rises_to_its_peak_and_decays_to_a_tenth():
    options = Options(steps=1000, warmup=10, peak_lr=1.0)
    rates = [options.learning_rate(step) for step in range(1001)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[505] == pytest.approx(0.55)
    assert rates[1000] == pytest.approx(0.1)


@pytest.mark.parametrize("documents", [text_documents(), [Document("book", "".join(d.text for d in text_documents()))]])
def test_hold_out_keeps_all_text_and_needs_no_short_documents(documents):
    training, heldout = hold_out(documents, characters=5000)
    assert 2500 <= sum(len(d.text) for d in heldout) <= 5000
    assert sum(len(d.text) for d in training + heldout) == sum(len(d.text) for d in documents)
    before, after = ({line for d in some for line in d.text.splitlines()} for some in (documents, training + heldout))
    assert before == after  # cut at line ends only
    with pytest.raises(InputError, match=r"text of 12 characters .*heldout_characters=10"):
        hold_out([Document("a", "abc\n" * 3)], characters=10)


FEW: dict[str, Any] = dict(steps=2, batch=2, length=16, warmup=1, heldout_characters=3000, device="cpu")


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """The working folder, with a config file and the text as a jsonl file."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"text": document.text}) + "\n" for document in text_documents())
    Path("rows.jsonl").write_text(rows)
    small_config().to_json_file("config.json")
    return tmp_path


def test_run_trains_on_a_dataset_and_says_so(source):
    given: dict[str, Any] = {"config": "config.json", "dataset": "rows.jsonl", "bos": False} | FEW
    report = run(None, "out", **given)
    assert report["options"]["bos"] is False
    assert report["data_description"].endswith("rows.jsonl', split 'train'")
    with pytest.raises(InputError, match="holds a finished model"):
        run(None, "out", **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": "rows.jsonl"}, "--text and --dataset given"),
        ({"split": "test"}, "split=test is for --dataset only"),
        ({"config": "gone.json"}, r"gone\.json' cannot be used"),
        ({"config": "odd.json"}, r"model_type='perceptron'"),
        ({"config": "wrong.json"}, r"wrong\.json' is refused by transformers .*hidden_size"),
        ({"config": "t5.json"}, "'t5' is no causal language model"),
        ({"recipe": "tiny-llama"}, "both 'tiny-llama' and"),
        ({"recipe": "tiny-lama", "config": None}, "'tiny-lama' is unknown; choose one of tiny-llama,"),
    ],
)
def test_run_refuses_unusable_input_and_writes_nothing(source, given, says):
    Path("odd.json").write_text('{"model_type": "perceptron"}')
    Path("wrong.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    Path("t5.json").write_text('{"model_type": "t5", "vocab_size": 300}')
    before = sorted(source.rglob("*"))
    given = {"recipe": None, "config": "config.json", "text": "rows.jsonl"} | FEW | given
    with pytest.raises(InputError, match=says):
        run(given.pop("recipe"), "out", **given)
    assert sorted(source.rglob("*")) == before
