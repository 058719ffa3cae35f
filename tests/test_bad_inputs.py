"""What a user can get wrong, and what damage files can have: each ends in one line that names it, and writes nothing.

A row is a name, a command with placeholders (SMALL: a folder with a model, TEXT: a text for it, HERE: the folder of both,
OUT: where results of an earlier run lie), what the line must say, and what is done to the files first.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import families
import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import load_file, save_file

from probes.cli import main as cli
from probes.results import dataset as results

Spoil = Callable[[Path], object]

# What every command is given before a row's own options, which count where both are given.
SHORT = "--length 12 --device cpu --text TEXT --out OUT"
DEFAULTS = {
    "jacobian": f"--prompts 2 --products 8 --seeds 1 {SHORT}",
    "theory": f"--prompts 2 --products 8 --seeds 1 {SHORT}",
    "sinks": f"--prompts 4 {SHORT}",
    "trajectory": f"--prompts 4 --starts 8 {SHORT}",
    "leakage": f"--prompts 4 --bootstrap 10 --lags 1,2 --bands 3-11 {SHORT}",
    "bos-swap": f"--prompts 4 --bootstrap 10 --lags 1,2 --bands 3-11 --products 8 --profile-prompts 1 {SHORT}",
    "inspect": "--device cpu --products 8 --seeds 1 --out OUT",
    "match": f"--quick --prompts 4 --seeds 1 --bootstrap 10 {SHORT}",
    "map": "--quick --out OUT",
    "toy": "--quick --device cpu --out OUT",
    "report": f"--prompts 4 {SHORT}",
    "pretrain": "--text TEXT --steps 2 --batch 1 --device cpu --out HERE/new",
}
WORDS = "w3 w4 w5 w6 w7 w8 w9 w10 w11 w12"


class Row(NamedTuple):
    """One mistake."""

    name: str
    command: str | tuple[str, ...]  # a tuple where a word holds what a line of text cannot
    says: str
    spoil: Spoil | None = None


# ------------------------------------------------------------------------------------------------ damage to files


def weights_are(change: Callable[[bytes], bytes]) -> Spoil:
    """Other bytes in the place of the weights' file."""

    def spoil(here: Path) -> None:
        file = here / "small" / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return spoil


def header_is(change: Callable[[dict[str, Any]], object] | str) -> Spoil:
    """Another JSON header before the same data."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        if isinstance(change, str):
            header = change
        else:
            fields = json.loads(content[8 : 8 + length])
            change(fields)
            header = json.dumps(fields)
        return struct.pack("<Q", len(header)) + header.encode() + content[8 + length :]

    return weights_are(changed)


def tensors_are(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Other tensors in a sound file."""

    def spoil(here: Path) -> None:
        file = here / "small" / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return spoil


def config_has(**changes: Any) -> Spoil:
    """Other values in config.json; those given as None are left out."""

    def spoil(here: Path) -> None:
        file = here / "small" / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))

    return spoil


def file_is(name: str, content: str | bytes) -> Spoil:
    """A file with this content."""

    def spoil(here: Path) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def both(*spoils: Spoil) -> Spoil:
    """One after the other."""
    return lambda here: [spoil(here) for spoil in spoils]


def without(*names: str) -> Spoil:
    """Files removed from the model's folder."""
    return lambda here: [(here / "small" / name).unlink() for name in names]


def index_is(content: str, *, shards: tuple[str, ...] = ()) -> Spoil:
    """Weights in several files, of which there are `shards`, with this index."""

    def spoil(here: Path) -> None:
        folder = here / "small"
        for shard in shards:
            shutil.copy(folder / "model.safetensors", folder / shard)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)

    return spoil


class Late(BaseException):
    """No error of the system, which the suite may take for one about a file."""


class Bomb:
    """What a pickle may do to its reader: leave a file where it is told to."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


MARKER = "somebody-else-s-code-was-run"  # no row may leave it


def bomb(name: str) -> Spoil:
    """A pickle of that name in the model's folder that leaves the marker when it is read."""
    return lambda here: (here / "small" / name).write_bytes(pickle.dumps(Bomb(here / MARKER)))


def own_code(**auto: str) -> Spoil:
    """A module in the model's folder that leaves the marker when it is imported, asked for by config.json."""

    def spoil(here: Path) -> None:
        program = f"open({str(here / MARKER)!r}, 'w').close()\nfrom transformers import *\n"
        (here / "small" / "own.py").write_text(program)
        config_has(model_type="own-kind", architectures=None, auto_map=auto)(here)

    return spoil


def tokenizer_with_large_ids(here: Path) -> None:
    file = here / "small" / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    described["model"]["vocab"]["w3"] = 5000
    file.write_text(json.dumps(described))


def other_result(here: Path) -> None:
    xr.Dataset({"x": ("a", [1.0])}).to_netcdf(here / "out" / "other.nc", engine="h5netcdf")


def result_of(**attrs: Any) -> Spoil:
    """A file that says it is a result, in a folder where results are looked for."""

    def spoil(here: Path) -> None:
        (here / "out" / "jacobian").mkdir()
        ds = xr.Dataset({"x": ("a", [1.0])}, attrs={"headwater": "0.1.0", **attrs})
        results.save(ds, here / "out" / "jacobian" / "jacobian.nc")

    return spoil


def cut_result(here: Path) -> None:
    result_of()(here)
    file = here / "out" / "jacobian" / "jacobian.nc"
    file.write_bytes(file.read_bytes()[:-200])


def circle(name: str) -> Spoil:
    """A link that leads to itself."""
    return lambda here: (here / name).symlink_to(name)


Q = "model.layers.1.self_attn.q_proj.weight"


def overlapping(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q][0, 0] = torch.inf


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][-1, -1] = torch.nan


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q] = tensors[Q][:, :-1].clone()


def whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q] = tensors[Q].to(torch.int8)


DEEP = "[" * 100_000
FAR = "1000000000000"

# ------------------------------------------------------------------------------------------------------ the table

WEIGHTS = [
    Row("weights cut in their data", "jacobian SMALL", "'small' cannot be loaded", weights_are(lambda b: b[:-100])),
    Row("weights cut in their header", "sinks SMALL", "'small' cannot be loaded", weights_are(lambda b: b[:100])),
    Row("weights cut in their first number", "theory SMALL", "'small' cannot be loaded", weights_are(lambda b: b[:5])),
    Row("weights of no bytes", "trajectory SMALL", "'small' cannot be loaded", weights_are(lambda b: b"")),
    Row("weights with more than they say", "leakage SMALL", "'small' cannot be loaded", weights_are(lambda b: b + b)),
    Row(
        "weights whose header is longer than the file",
        "bos-swap SMALL",
        "'small' cannot be loaded",
        weights_are(lambda b: struct.pack("<Q", 2**62) + b[8:]),
    ),
    Row("weights with a header of no JSON", "jacobian SMALL", "'small' cannot be loaded", header_is("{'a': 1}")),
    Row("weights with a list for a header", "jacobian SMALL", "'small' cannot be loaded", header_is("[1, 2, 3]")),
    Row("weights with a header too deep", "jacobian SMALL", "'small' cannot be loaded", header_is(DEEP)),
    Row("weights with overlapping tensors", "jacobian SMALL", "'small' cannot be loaded", header_is(overlapping)),
    Row(
        "weights with a negative offset",
        "jacobian SMALL",
        "'small' cannot be loaded",
        header_is(lambda header: header[Q].update(data_offsets=[-8, 0])),
    ),
    Row(
        "weights with an unknown number format",
        "jacobian SMALL",
        "'small' cannot be loaded",
        header_is(lambda header: header[Q].update(dtype="F12")),
    ),
    Row(
        "weights with a shape beyond all counting",
        "jacobian SMALL",
        "'small' cannot be loaded",
        header_is(lambda header: header[Q].update(shape=[2**40, 2**40])),
    ),
    Row("weights of text", "jacobian SMALL", "'small' cannot be loaded", weights_are(lambda b: b"version https://git")),
    Row("a missing tensor", "jacobian SMALL", Q, tensors_are(lambda tensors: tensors.pop(Q))),
    Row("no tensor at all", "match SMALL", "lacks", tensors_are(lambda tensors: tensors.clear())),
    Row("a tensor of another shape", ("inspect", "SMALL", "--prompt", WORDS), Q, tensors_are(narrower)),
    Row("weights of whole numbers", "jacobian SMALL", Q, tensors_are(whole_numbers)),
    Row("NaN among the weights", "sinks SMALL", "not finite (lm_head.weight)", tensors_are(not_a_number)),
    Row("an infinity among the weights", "report SMALL", f"not finite ({Q})", tensors_are(infinite)),
    Row(
        "an index of no JSON",
        "jacobian SMALL",
        "model.safetensors.index.json",
        index_is("{", shards=("a.safetensors",)),
    ),
    Row(
        "an index that is a list",
        "jacobian SMALL",
        "model.safetensors.index.json",
        index_is("[]", shards=("a.safetensors",)),
    ),
    Row(
        "an index without a map",
        "jacobian SMALL",
        "model.safetensors.index.json",
        index_is("{}", shards=("a.safetensors",)),
    ),
    Row(
        "an index that names a file that is not there",
        "jacobian SMALL",
        "gone.safetensors",
        index_is(json.dumps({"metadata": {}, "weight_map": {Q: "gone.safetensors"}}), shards=("a.safetensors",)),
    ),
    Row(
        "an index that leads out of the folder",
        "jacobian SMALL",
        "'../other/a.safetensors'",
        index_is(json.dumps({"metadata": {}, "weight_map": {Q: "../other/a.safetensors"}}), shards=("a.safetensors",)),
    ),
    Row(
        "an index that leads to a pickle",
        "jacobian SMALL",
        "'pytorch_model.bin'",
        both(
            bomb("pytorch_model.bin"),
            index_is(json.dumps({"metadata": {}, "weight_map": {Q: "pytorch_model.bin"}}), shards=("a.safetensors",)),
        ),
    ),
    Row(
        "only a pickle",
        "jacobian SMALL",
        "holds only pytorch_model.bin, which may run code",
        both(bomb("pytorch_model.bin"), without("model.safetensors")),
    ),
    Row(
        "only a pickle of another ending",
        "sinks SMALL",
        "holds only model.pt",
        both(bomb("model.pt"), without("model.safetensors")),
    ),
    Row(
        "a pickle under the name of safetensors",
        "jacobian SMALL",
        "'small' cannot be loaded",
        bomb("model.safetensors"),
    ),
    Row(
        "a folder under the name of the weights",
        "jacobian SMALL",
        "model.safetensors",
        both(without("model.safetensors"), lambda here: (here / "small" / "model.safetensors").mkdir()),
    ),
    Row(
        "weights that are a link to nothing",
        "jacobian SMALL",
        "model.safetensors",
        both(without("model.safetensors"), lambda here: (here / "small" / "model.safetensors").symlink_to("gone")),
    ),
    Row(
        "weights that are a pipe",
        "jacobian SMALL",
        "model.safetensors",
        both(without("model.safetensors"), lambda here: os.mkfifo(here / "small" / "model.safetensors")),
    ),
    Row(
        "an adapter for another model",
        "jacobian SMALL",
        "adapter_config.json",
        file_is("small/adapter_config.json", '{"base_model_name_or_path": "nobody/nothing", "peft_type": "LORA"}'),
    ),
]

CONFIGS = [
    Row("no config", "jacobian SMALL", "has no config.json", without("config.json")),
    Row("a config cut short", "jacobian SMALL", "config.json", file_is("small/config.json", '{"model_type": "lla')),
    Row("a config of no bytes", "theory SMALL", "config.json", file_is("small/config.json", "")),
    Row("a config that is a list", "sinks SMALL", "config.json", file_is("small/config.json", "[1]")),
    Row("a config that is a number", "sinks SMALL", "config.json", file_is("small/config.json", "17")),
    Row("a config in another encoding", "sinks SMALL", "config.json", file_is("small/config.json", b"\xff\xfe{\0}\0")),
    Row("a config too deep", "sinks SMALL", "config.json", file_is("small/config.json", DEEP)),
    Row("a config without a model type", "leakage SMALL", "model_type", config_has(model_type=None)),
    Row("a model type that is a number", "leakage SMALL", "model_type", config_has(model_type=3)),
    Row("a family that reads both ways", "jacobian SMALL", "'t5' is not supported", config_has(model_type="t5")),
    Row("a family without attention", "match SMALL", "'mamba' is not supported", config_has(model_type="mamba")),
    Row("a family nobody knows", "report SMALL", "'llama9' is not supported", config_has(model_type="llama9")),
    Row("a width that heads do not divide", "jacobian SMALL", "hidden_size", config_has(hidden_size=65, head_dim=None)),
    Row("a negative width", "jacobian SMALL", "hidden_size=-64", config_has(hidden_size=-64)),
    Row("no blocks", "jacobian SMALL", "num_hidden_layers=0", config_has(num_hidden_layers=0)),
    Row("more blocks than tensors", "jacobian SMALL", FAR, config_has(num_hidden_layers=10**12)),
    Row("a vocabulary of no words", "jacobian SMALL", "vocab_size=0", config_has(vocab_size=0)),
    Row("a width beyond any memory", "jacobian SMALL", "hidden_size=1048576", config_has(hidden_size=2**20)),
    Row("a vocabulary beyond any memory", "jacobian SMALL", f"vocab_size={FAR}", config_has(vocab_size=10**12)),
    Row("inner width beyond any memory", "sinks SMALL", FAR, config_has(intermediate_size=10**12)),
    Row(
        "heads that do not share keys",
        "jacobian SMALL",
        "num_attention_heads=4, which cannot share 3",
        config_has(num_key_value_heads=3),
    ),
    Row("no heads", "jacobian SMALL", "num_attention_heads=0", config_has(num_attention_heads=0)),
    Row("text where a number belongs", "jacobian SMALL", "hidden_size", config_has(hidden_size="wide")),
    Row("a fraction where a number belongs", "jacobian SMALL", "num_hidden_layers", config_has(num_hidden_layers=1.5)),
    Row("a list where a number belongs", "jacobian SMALL", "vocab_size", config_has(vocab_size=[128])),
    Row("an unknown activation", "jacobian SMALL", "'loud'", config_has(hidden_act="loud")),
    Row("an unknown rotation", "jacobian SMALL", "spiral", config_has(rope_parameters={"rope_type": "spiral"})),
    Row("an epsilon that is no number", "jacobian SMALL", "rms_norm_eps", config_has(rms_norm_eps="small")),
    Row(
        "code in the repository",
        "jacobian SMALL",
        "trust_remote_code",
        own_code(AutoConfig="own.LlamaConfig", AutoModelForCausalLM="own.LlamaForCausalLM"),
    ),
    Row(
        "code in the repository for the model alone",
        "jacobian SMALL",
        "own-kind",
        own_code(AutoModelForCausalLM="own.LlamaForCausalLM"),
    ),
    Row("pretraining a config of no JSON", "pretrain --config HERE/c.json", "c.json", file_is("c.json", "{")),
    Row("pretraining a config too deep", "pretrain --config HERE/c.json", "c.json", file_is("c.json", DEEP)),
    Row("pretraining a config from a pipe", "pretrain --config HERE/c", "HERE/c", lambda here: os.mkfifo(here / "c")),
    Row(
        "pretraining a negative width",
        "pretrain --config SMALL/config.json",
        "hidden_size=-64",
        config_has(hidden_size=-64, vocab_size=258),
    ),
    Row(
        "pretraining with no heads",
        "pretrain --config SMALL/config.json",
        "num_attention_heads=0",
        config_has(num_attention_heads=0, vocab_size=258),
    ),
]

TOKENIZERS = [
    Row("no tokenizer", "jacobian SMALL", "small has no tokenizer", without("tokenizer.json", "tokenizer_config.json")),
    Row(
        "a tokenizer cut short", "sinks SMALL", "small has no tokenizer", file_is("small/tokenizer.json", '{"version"')
    ),
    Row(
        "a tokenizer of other JSON",
        ("inspect", "SMALL", "--prompt", WORDS),
        "small has no tokenizer",
        file_is("small/tokenizer.json", "[]"),
    ),
    Row(
        "ids beyond the embeddings",
        "jacobian SMALL",
        "id 5000",
        both(tokenizer_with_large_ids, file_is("text.txt", "w3 " * 99)),
    ),
    Row(
        "ids beyond the embeddings in a text",
        ("inspect", "SMALL", "--prompt", "w3 " * 9),
        "5000",
        tokenizer_with_large_ids,
    ),
    Row(
        "code that a tokenizer asks for",
        "jacobian SMALL",
        "small has no tokenizer",
        both(
            own_code(),
            config_has(model_type="llama"),
            without("tokenizer.json"),
            file_is(
                "small/tokenizer_config.json",
                '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}',
            ),
        ),
    ),
]

TEXTS = [
    Row("an empty text", "jacobian SMALL --text HERE/t.txt", "t.txt' is empty", file_is("t.txt", "")),
    Row("a text of white space", "sinks SMALL --text HERE/t.txt", "t.txt' is empty", file_is("t.txt", " \n\t\u3000 ")),
    Row("a text of bytes", "leakage SMALL --text HERE/t.txt", "byte 0", file_is("t.txt", bytes(range(128, 256)))),
    Row("a text with NUL", "leakage SMALL --text HERE/t.txt", "NUL", file_is("t.txt", "w3 w4\0 w5")),
    Row(
        "a text in another encoding",
        "theory SMALL --text HERE/t.txt",
        "byte 0",
        file_is("t.txt", "w3".encode("utf-16")),
    ),
    Row("a text that ends within a character", "theory SMALL --text HERE/t", "byte 3", file_is("t", b"w3 \xe2\x82")),
    Row("a text that is not there", "match SMALL --text HERE/gone", "gone' does not exist"),
    Row(
        "a text too short",
        "trajectory SMALL --text HERE/t.txt",
        "has 12 tokens (the longest has 3)",
        file_is("t.txt", "w3 w4 w5"),
    ),
    Row("a folder without texts", "jacobian SMALL --text HERE/f", "holds no text files", file_is("f/x.png", b"\x89")),
    Row(
        "a folder with one broken text",
        "jacobian SMALL --text HERE/f",
        "b.txt' is not UTF-8",
        both(file_is("f/a.txt", "w3 " * 99), file_is("f/b.txt", b"\xff")),
    ),
    Row(
        "JSON lines with a broken one",
        "jacobian SMALL --text HERE/t.jsonl",
        "line 2",
        file_is("t.jsonl", '{"text": "a"}\n{'),
    ),
    Row(
        "JSON lines without text", "jacobian SMALL --text HERE/t.jsonl", "line 1", file_is("t.jsonl", '{"body": "a"}\n')
    ),
    Row("JSON lines that are lists", "jacobian SMALL --text HERE/t.jsonl", "line 1", file_is("t.jsonl", "[1]\n")),
    Row("JSON lines too deep", "jacobian SMALL --text HERE/t.jsonl", "line 1", file_is("t.jsonl", DEEP)),
    Row(
        "JSON lines with a number for text",
        "jacobian SMALL --text HERE/t.jsonl",
        "line 1",
        file_is("t.jsonl", '{"text": 7}'),
    ),
    Row(
        "JSON lines with half a character",
        "jacobian SMALL --text HERE/t.jsonl",
        "line 1",
        file_is("t.jsonl", '{"text": "w3 \\ud800 w4"}\n' * 99),
    ),
    Row("a text that is a pipe", "sinks SMALL --text HERE/t", "HERE/t'", lambda here: os.mkfifo(here / "t")),
    Row("a text that is a device", "sinks SMALL --text /dev/null", "'/dev/null'"),
    Row("a text that never ends", "sinks SMALL --text /dev/zero", "'/dev/zero'"),
    Row("a text that is a link to itself", "sinks SMALL --text HERE/t", "HERE/t'", circle("t")),
    Row("a text from a pipe to read", "inspect SMALL --text HERE/t", "HERE/t'", lambda here: os.mkfifo(here / "t")),
    Row("a text from a device to read", "inspect SMALL --text /dev/zero", "'/dev/zero'"),
    Row("an empty text to read", ("inspect", "SMALL", "--prompt", ""), "text"),
    Row("a short text to read", ("inspect", "SMALL", "--prompt", "w3 w4"), "tokens"),
    Row(
        "a folder of several texts to read",
        "inspect SMALL --text HERE/f",
        "holds 2 texts",
        both(file_is("f/a.txt", WORDS), file_is("f/b.txt", WORDS)),
    ),
    Row("nothing to read", "inspect SMALL --text HERE/gone", "gone' does not exist"),
    Row("ids that are none", "inspect SMALL --ids 3,four", "'3,four'"),
    Row("ids outside the vocabulary", "inspect SMALL --ids 3,4,5,6,7,8,9,128", "token id 128"),
    Row("bytes to read", "inspect SMALL --text HERE/t", "HERE/t'", file_is("t", b"\xff\xfe\0\1")),
    Row("half a character to read", ("inspect", "SMALL", "--prompt", f"{WORDS} \udcff"), "UTF-8"),
    Row("prompt and text to read", "inspect SMALL --prompt w3 --text TEXT", "both --prompt and --text"),
    Row("text and dataset", "jacobian SMALL --text TEXT --dataset HERE/t.jsonl", "t.jsonl", file_is("t.jsonl", "{}")),
    Row(
        "a dataset that is no parquet",
        "jacobian SMALL --dataset HERE/t.parquet",
        "t.parquet' cannot be streamed",
        file_is("t.parquet", b"PAR1" + b"\1" * 80 + b"PAR1"),
    ),
    Row("a dataset of no bytes", "jacobian SMALL --dataset HERE/t.parquet", "t.parquet", file_is("t.parquet", "")),
    Row(
        "a dataset without the column",
        "sinks SMALL --dataset HERE/t.jsonl --column body",
        "'body'",
        file_is("t.jsonl", json.dumps({"text": WORDS})),
    ),
    Row(
        "a dataset with an empty column",
        "sinks SMALL --dataset HERE/t.jsonl",
        "has 12 tokens (the longest has 0)",
        file_is("t.jsonl", '{"text": ""}\n' * 9),
    ),
    Row(
        "a dataset without values",
        "sinks SMALL --dataset HERE/t.jsonl",
        "t.jsonl[0]",
        file_is("t.jsonl", '{"text": null}\n' * 999),
    ),
    Row("a dataset of an unknown kind", "sinks SMALL --dataset HERE/t.xml", "t.xml", file_is("t.xml", "<x/>")),
    Row(
        "a split that is not there",
        "sinks SMALL --dataset HERE/t.jsonl --split nope",
        "nope",
        file_is("t.jsonl", json.dumps({"text": WORDS})),
    ),
    Row("a dataset nobody has", "report SMALL --dataset nobody/nothing", "nobody/nothing"),
    Row(
        "a dataset with a loading script",
        "sinks SMALL --dataset HERE/d",
        "HERE/d",
        both(file_is("d/d.py", "raise SystemExit('ran')\n"), file_is("d/README.md", "")),
    ),
    Row(
        "a dataset that is a pipe",
        "sinks SMALL --dataset HERE/t.jsonl",
        "t.jsonl",
        lambda here: os.mkfifo(here / "t.jsonl"),
    ),
    Row("pretraining on an empty text", "pretrain tiny-llama --text HERE/t", "t' is empty", file_is("t", "\n")),
    Row("pretraining on too little", "pretrain tiny-llama --text TEXT", "too short to hold out"),
    Row(
        "pretraining on JSON lines too deep",
        "pretrain tiny-llama --text HERE/t.jsonl",
        "line 1",
        file_is("t.jsonl", DEEP),
    ),
]

NAMES = [
    Row("a path out of here", "jacobian ../../etc", "'../../etc'"),
    Row("the folder above", "jacobian ..", "'..'"),
    Row("the folder itself", "sinks ./", "config.json"),
    Row("the root", "sinks /", "config.json"),
    Row("no name", ("jacobian", ""), "name is empty"),
    Row("white space for a name", ("jacobian", " "), "' '"),
    Row("a revision alone", "jacobian @step0", "name is empty"),
    Row("no revision behind the sign", "jacobian tiny-llama@", "'tiny-llama' has no revision ''"),
    Row("a revision that is a path", "jacobian tiny-llama@../tiny-qwen2", "'../tiny-qwen2'"),
    Row("an unknown revision", "theory tiny-llama@step1", "'step1'"),
    Row("a bundled name with a way out", "jacobian tiny-llama/../tiny-qwen2", "'tiny-llama/../tiny-qwen2'"),
    Row("a name of three parts", "jacobian a/b/c", "'a/b/c'"),
    Row("a misspelt name", "report tiny-lama", "'tiny-lama'"),
    Row("letters that look alike", "jacobian tiny-ⅼⅼama", "'tiny-ⅼⅼama'"),
    Row("a look-alike for the hub", "jacobian Qwen/Qwеn2.5-0.5B", "'Qwen/Qwеn2.5-0.5B'"),
    Row("a name with NUL", ("jacobian", "tiny\0llama"), "tiny"),
    Row("a name with a line's end", ("jacobian", "tiny\nllama"), "tiny llama"),
    Row("a hub id with a line's end", ("jacobian", "tiny/llama\nHost: x"), "tiny/llama"),
    Row("half a character in a name", ("jacobian", "tiny/\udcff"), "tiny/"),
    Row("a name longer than names are", ("sinks", "x" * 5000), "xxx"),
    Row("a path longer than paths are", ("sinks", "./" + "x/" * 5000), "x/x"),
    Row("a hub id longer than ids are", ("sinks", "a/" + "x" * 5000), "a/xxx"),
    Row("somebody else's home", "jacobian ~nobody-of-this-name/model", "'~nobody-of-this-name/model'"),
    Row("a file for a model", "jacobian SMALL/model.safetensors", "model.safetensors'"),
    Row("a folder without a model", "match HERE/f", "config.json", file_is("f/x", "")),
    Row("a link to itself for a model", "sinks HERE/loop", "loop", circle("loop")),
    Row("a model on nobody's hub", "leakage nobody/nothing", "'nobody/nothing'"),
    Row("a hub id with a scheme", "leakage https://example.org/model", "'https://example.org/model'"),
    Row("one model twice", "jacobian SMALL SMALL", "both called 'small'"),
    Row("one model twice by two ways", "leakage SMALL HERE/./small", "both called 'small'"),
    Row("two models to inspect", "inspect SMALL tiny-llama --prompt w3", "tiny-llama"),
    Row("an unknown toy", "toy petroglyphs", "'petroglyphs'"),
    Row("a toy that is a path", "toy ../experiments", "'../experiments'"),
    Row("all toys and one", "toy all retrieval", "'all'"),
    Row("an unknown recipe", "pretrain tiny-lama", "'tiny-lama'"),
]

VALUES = [
    Row("a length beyond the model's", f"jacobian SMALL --length {FAR}", FAR),
    Row("a length beyond integers", f"sinks SMALL --length {10**30}", str(10**30)),
    Row("a length of nothing", "leakage SMALL --length 0", "length=0"),
    Row("a negative length", "match SMALL --length -5", "length=-5"),
    Row("no prompts", "jacobian SMALL --prompts 0", "n=0"),
    Row("negative prompts", "sinks SMALL --prompts -1", "n=-1"),
    Row("more prompts than any text has", f"trajectory SMALL --prompts {FAR}", FAR),
    Row("more prompts than integers count", f"trajectory SMALL --prompts {10**40}", str(10**40)),
    Row("no fresh models", "theory SMALL --seeds 0", "seeds=0"),
    Row(
        "no rule of initialization", "jacobian SMALL --initialization smollm2", "published rule (smollm2-135m, smollm2"
    ),
    Row("no rule to match by", "match SMALL --initialization smollm2", "initialization 'smollm2' is no rule"),
    Row("no rule to report by", "report SMALL --initialization smollm2", "initialization 'smollm2' is no rule"),
    Row("a deviation of nothing", "theory SMALL --initialization 0", "'uniform 0' has deviation 0"),
    Row(
        "a rule without fresh weights",
        "jacobian SMALL --conditions pretrained --initialization 0.02",
        "initialization '0.02' has no use without fresh weights",
    ),
    Row(
        "a rule that the baseline does not use",
        ("inspect", "SMALL", "--prompt", WORDS, "--baseline", "text", "--initialization", "0.02"),
        "initialization '0.02' has no use with baseline text",
    ),
    Row("more fresh models than time", f"jacobian SMALL --seeds {FAR}", f"--seeds {FAR}"),
    Row("more fresh models to match than time", f"match SMALL --seeds {FAR}", f"--seeds {FAR}"),
    Row(
        "more fresh models to inspect than time",
        ("inspect", "SMALL", "--prompt", WORDS, "--seeds", FAR),
        f"--seeds {FAR}",
    ),
    Row("more models per place than time", f"map --seeds {FAR}", f"--seeds {FAR}"),
    Row("more products than memory", f"jacobian SMALL --products {FAR}", f"products={FAR}"),
    Row("more products per place than memory", f"map --products {FAR}", f"--products {FAR}"),
    Row("more products to swap than memory", f"bos-swap SMALL --products {FAR}", f"--products {FAR}"),
    Row("negative products", "jacobian SMALL --products -8", "products=-8"),
    Row("half a product", "jacobian SMALL --products 0.5", "'0.5'"),
    Row("more resamples than memory", f"leakage SMALL --bootstrap {FAR}", f"--bootstrap {FAR}"),
    Row("more resamples to match than memory", f"match SMALL --bootstrap {FAR}", f"--bootstrap {FAR}"),
    Row("a relative error of NaN", "jacobian SMALL --products auto --relative-error nan", "nan"),
    Row("an endless relative error", "jacobian SMALL --products auto --relative-error inf", "inf"),
    Row("a negative relative error", "jacobian SMALL --products auto --relative-error -0.1", "-0.1"),
    Row("a relative error that nothing asks for", "jacobian SMALL --relative-error nan", "nan"),
    Row("a threshold of NaN", "sinks SMALL --threshold nan", "threshold=nan"),
    Row("a tau of infinity", "sinks SMALL --tau inf", "tau=inf"),
    Row("a threshold in words", "sinks SMALL --threshold high", "high"),
    Row("a negative seed", "jacobian SMALL --seed -1", "seed=-1"),
    Row("a seed beyond 64 bits", f"jacobian SMALL --seed {2**70}", f"--seed {2**70}"),
    Row("a seed beyond 64 bits for sinks", f"sinks SMALL --seed {2**64}", f"--seed {2**64}"),
    Row(
        "a seed beyond 64 bits to inspect",
        ("inspect", "SMALL", "--prompt", WORDS, "--seed", str(2**70)),
        f"--seed {2**70}",
    ),
    Row("a seed beyond 64 bits for a report", f"report SMALL --seed {2**70}", f"--seed {2**70}"),
    Row("bands of words", "leakage SMALL --bands early", "'early'"),
    Row("bands of half a range", "leakage SMALL --bands 3-", "'3-'"),
    Row("bands beyond any prompt", f"leakage SMALL --bands 3-{FAR}", f"'3-{FAR}'"),
    Row("bands of other digits", "leakage SMALL --bands ٣-٩", "'٣-٩'"),
    Row("lags beyond any prompt", f"bos-swap SMALL --lags 1-{FAR}", f"'1-{FAR}'"),
    Row("a lag of nothing", "leakage SMALL --lags 0", "[0]"),
    Row("negative lags", "leakage SMALL --lags=-1", "'-1'"),
    Row("keys of nothing", ("sinks", "SMALL", "--keys", ""), "keys ''"),
    Row("keys beyond any prompt", f"sinks SMALL --keys 0-{FAR}", f"'0-{FAR}'"),
    Row("a key beyond the prompts", "sinks SMALL --keys 12", "key 12"),
    Row("a key twice", "sinks SMALL --keys 1,1", "1"),
    Row("a replacement in words", "bos-swap SMALL --replace nothing", "'nothing'"),
    Row("a replacement beyond the vocabulary", "bos-swap SMALL --replace 128", "128"),
    Row("a replacement of five thousand digits", ("bos-swap", "SMALL", "--replace", "9" * 5000), "'999"),
    Row("a reaction beyond the vocabulary", "sinks SMALL --reacts 5000", "5000"),
    Row("a first token in words", "theory SMALL --first begin", "'begin'"),
    Row("a first token beyond the vocabulary", "theory SMALL --first 128", "128"),
    Row("a first token before the vocabulary", "theory SMALL --first=-1", "-1"),
    Row("a first token of five thousand digits", ("theory", "SMALL", "--first", "9" * 5000), "'999"),
    Row("a query beyond the prompt", "jacobian SMALL --query 12", "12"),
    Row("a query before the prompt", "jacobian SMALL --query -13", "-13"),
    Row("a block that is not there", "jacobian SMALL --from-layer 3", "from_layer 3"),
    Row("a block before the first", "jacobian SMALL --from-layer -1", "from_layer -1"),
    Row("an unknown token to explain", ("inspect", "SMALL", "--prompt", WORDS, "--of", "128"), "128"),
    Row("a token of five thousand digits", ("inspect", "SMALL", "--prompt", WORDS, "--of", "9" * 5000), "999"),
    Row("something unknown to explain", ("inspect", "SMALL", "--prompt", WORDS, "--of", "why"), "'why'"),
    Row("starts beyond the vocabulary", f"trajectory SMALL --starts {FAR}", FAR),
    Row("negative patterns", "sinks SMALL --pictures -1", "pictures=-1"),
    Row("profile prompts of nothing", "bos-swap SMALL --profile-prompts 0", "profile_prompts=0"),
    Row("an unknown device", "jacobian SMALL --device tpu", "'tpu'"),
    Row("a device without values", "sinks SMALL --device meta", "'meta'"),
    Row("a device that is not there", "trajectory SMALL --device cuda:99", "'cuda:99'"),
    Row("a device of no name", ("leakage", "SMALL", "--device", ""), "device ''"),
    Row("an unknown number format", "jacobian SMALL --dtype float16", "float16"),
    Row("an unknown backend", "bos-swap SMALL --backend jax", "jax"),
    Row("an unknown method", "jacobian SMALL --method quick", "quick"),
    Row("an unknown condition", "jacobian SMALL --conditions trained", "'trained'"),
    Row("an unknown option", "leakage SMALL --bandz 3-9", "--bandz"),
    Row("a setting no toy has", "toy retrieval --with colour=red", "'colour=red'"),
    Row("a setting of another kind", "toy retrieval --with steps=many", "'steps=many'"),
    Row("a setting of five thousand digits", ("toy", "retrieval", "--with", "steps=" + "9" * 5000), "steps=999"),
    Row("training for negative steps", "pretrain tiny-llama --steps -1", "steps=-1"),
    Row("a learning rate of NaN", "pretrain tiny-llama --peak-lr nan", "peak_lr=nan"),
    Row("a decay of infinity", "pretrain tiny-llama --weight-decay inf", "weight_decay=inf"),
    Row("a training seed beyond 32 bits", f"pretrain tiny-llama --seed {2**40}", f"seed={2**40}"),
    Row("steps to keep in words", "pretrain tiny-llama --keep-steps first", "'first'"),
    Row("windows longer than the model", f"pretrain tiny-llama --length {FAR}", FAR),
]

FOLDERS = [
    Row("a file for a folder", "jacobian SMALL --out TEXT", "text.txt"),
    Row("a folder below a file", "sinks SMALL --out TEXT/deep/deeper", "text.txt"),
    Row("a folder's name too long", ("theory", "SMALL", "--out", "HERE/" + "x" * 300), "xxx"),
    Row("a folder's name with NUL", ("leakage", "SMALL", "--out", "HERE/a\0b"), "HERE/a"),
    Row("a folder that is a link to itself", "trajectory SMALL --out HERE/loop", "loop", circle("loop")),
    Row("a folder that the system keeps", "bos-swap SMALL --out /proc/1/results", "/proc/1/results"),
    Row("a device for a folder", "match SMALL --out /dev/null", "/dev/null"),
    Row(
        "a folder where a result belongs",
        "jacobian SMALL",
        "jacobian.nc' is a folder",
        lambda here: (here / "out" / "jacobian.nc").mkdir(),
    ),
    Row(
        "a folder where a figure belongs",
        "sinks SMALL",
        "sinks.png' is a folder",
        lambda here: (here / "out" / "sinks.png").mkdir(),
    ),
    Row(
        "a folder where a page belongs",
        ("inspect", "SMALL", "--prompt", WORDS),
        "inspect.html' is a folder",
        lambda here: (here / "out" / "inspect.html").mkdir(),
    ),
    Row("a folder where the map belongs", "map", "map.nc' is a folder", lambda here: (here / "out" / "map.nc").mkdir()),
    Row("a file where unfinished work belongs", "leakage SMALL", "unfinished", file_is("out/unfinished", "")),
    Row(
        "unfinished work of others",
        "jacobian SMALL",
        "small-pretrained.nc",
        file_is("out/unfinished/small-pretrained.nc", "x"),
    ),
    Row("pretraining where other things are", "pretrain tiny-llama --out OUT", "holds other files"),
    Row("toys in a file", "toy retrieval --out TEXT", "text.txt"),
    Row("a report of nothing", "report --out OUT", "holds no results"),
    Row("a quick report of no model", "report --out OUT --quick", "--quick measures models, and none is named"),
    Row("a report of a folder that is not there", "report --out HERE/gone", "gone' is no folder"),
    Row("a report of no results", "report --out OUT", "not written by headwater", other_result),
    Row("a report of a result cut short", "report --out OUT", "jacobian.nc' cannot be read", cut_result),
    Row("a report of a result of no bytes", "report --out OUT", "x.nc' cannot be read", file_is("out/x.nc", "")),
    Row("a report of a pipe", "report --out OUT", "p.nc", lambda here: os.mkfifo(here / "out" / "p.nc")),
    Row("a report of a result that lacks everything", "report --out OUT", "no sensitivity", result_of(model="m")),
    Row(
        "a report of a result with garbage for options",
        "report --out OUT",
        "no sensitivity",
        result_of(model="m", options="{"),
    ),
    Row(
        "a report of two results of one model",
        "report --out OUT",
        "both of 'm'",
        both(
            result_of(model="m"),
            lambda here: shutil.copy(here / "out/jacobian/jacobian.nc", here / "out/jacobian/jacobian-m.nc"),
        ),
    ),
]

ROWS = [*WEIGHTS, *CONFIGS, *TOKENIZERS, *TEXTS, *NAMES, *VALUES, *FOLDERS]
# In a process of their own: one of every kind.
APART = (
    "a pickle under the name of safetensors",
    "a width beyond any memory",
    "a text that never ends",
    "half a character in a name",
    "more resamples than memory",
    "a report of a result cut short",
)

LONGEST = 90  # seconds, imports included; a row that waits for a pipe would wait for ever


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder "small" with a model, and a text for it, to be copied and spoilt."""
    folder = tmp_path_factory.mktemp("kept")
    families.model("llama").save_pretrained(folder / "small")
    families.tokenizer().save_pretrained(folder / "small")
    words = np.random.default_rng(0).integers(3, 100, 600)
    (folder / "text.txt").write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    (folder / "out").mkdir()
    (folder / "out" / "jacobian.svg").write_text("what an earlier run has left\n")
    return folder


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of one command: its own copy of model, text and earlier results."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder, with the content of files and the target of links."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        kept = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder).as_posix()] = kept
    return found


def words_of(row: Row, here: Path) -> list[str]:
    given = list(row.command) if isinstance(row.command, tuple) else row.command.split()
    command, own = given[0], given[1:]
    usual = DEFAULTS[command].split()
    if ("--dataset" in own and "--text" not in own) or row.name == "a report of nothing":
        at = usual.index("--text")
        del usual[at : at + 2]
    if command == "report" and own[:1] == ["--out"]:
        usual = []
    places = {"SMALL": here / "small", "TEXT": here / "text.txt", "OUT": here / "out", "HERE": here}
    words = [command, *usual, *own]
    for name, path in places.items():
        words = [word.replace(name, str(path)) for word in words]
    return words


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Late(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(code: Any, out: str, err: str, row: Row, here: Path, before: dict[str, Any]) -> None:
    assert code == cli.BAD_INPUT == 2
    assert out == ""
    assert err.startswith("headwater: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert len(err) < 1000 or max(map(len, row.command)) > 1000
    assert row.says.replace("HERE", str(here)) in err
    assert listing(here) == before


def test_names_are_told_apart():
    assert len({row.name for row in ROWS}) == len(ROWS) >= 60
    assert set(APART) <= {row.name for row in ROWS}
    assert {row.command.split()[0] if isinstance(row.command, str) else row.command[0] for row in ROWS} == set(DEFAULTS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_a_bad_input_is_one_line_and_leaves_everything_as_it_was(row, here, monkeypatch, capfd, unchecked):
    if row.spoil is not None:
        row.spoil(here)
    before = listing(here)
    monkeypatch.setattr(sys, "argv", ["headwater", *words_of(row, here)])
    with in_time(LONGEST), pytest.raises(SystemExit) as raised:
        cli.main()
    shown = capfd.readouterr()
    check(raised.value.code, shown.out, shown.err, row, here, before)


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in APART[1:]]  # five seconds each, to start


@pytest.mark.slow
@pytest.mark.parametrize("name", [APART[0], *SLOWER], ids=lambda name: name.replace(" ", "-"))
def test_in_a_process_of_its_own(name, here):
    (row,) = (row for row in ROWS if row.name == name)
    if row.spoil is not None:
        row.spoil(here)
    before = listing(here)
    done = subprocess.run(
        [sys.executable, "-m", "probes", *words_of(row, here)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])},
    )
    check(done.returncode, done.stdout, done.stderr, row, here, before)
