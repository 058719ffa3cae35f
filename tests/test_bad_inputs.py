"""What a user can get wrong, and what damage files can have: each ends in one line that names it, and writes nothing.

A row is what follows a command, what the line must say, and what is done to the files first. Placeholders: SMALL, a folder
with a model; TEXT, a text for it; HERE, the folder of both; OUT, where results of an earlier run lie.
"""

import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import damage
import families
import pytest
import torch
from commands import call, listing
from damage import LAST, WEIGHTS, Q, Spoil

from probes.cli import main as cli

Row = tuple[str, str] | tuple[str, str, Spoil] | tuple[str, str, Spoil, Spoil]

# What every command is given before a row's own options, which count where both are given.
SHORT = "--length 12 --device cpu --text TEXT --out OUT"
SPLIT = f"--prompts 4 --bootstrap 10 --lags 1,2 --bands 3-11 {SHORT}"
DEFAULTS = {
    "jacobian": f"--prompts 2 --products 8 --seeds 1 {SHORT}",
    "theory": f"--prompts 2 --products 8 --seeds 1 {SHORT}",
    "sinks": f"--prompts 4 {SHORT}",
    "trajectory": f"--prompts 4 --starts 8 {SHORT}",
    "leakage": SPLIT,
    "bos-swap": f"{SPLIT} --products 8 --profile-prompts 1",
    "inspect": "--device cpu --products 8 --seeds 1 --out OUT",
    "compare": "",
    "families": "",
    "selftest": "",
    "toy": "--quick --device cpu --out OUT",
    "report": f"--prompts 4 {SHORT}",
    "pretrain": "--text TEXT --steps 2 --batch 1 --device cpu --out HERE/new",
}

LARGE_IDS = damage.edited("small/tokenizer.json", lambda content: re.sub(rb'"w3": *\d+', b'"w3": 5000', content))


LOADED: dict[str, list[Row]] = {
    "sinks SMALL": [  # weights
        ("", "'small' cannot be loaded", damage.edited(WEIGHTS[1], lambda b: b[:-100])),
        ("", "not finite (lm_head.weight)", damage.tensors_are(lambda tensors: tensors[LAST][0].fill_(torch.nan))),
    ],
    "jacobian SMALL": [
        ("", Q, damage.tensors_are(lambda tensors: tensors.pop(Q))),
        ("", f"{Q} holds whole numbers (I8)", damage.tensors_are(lambda held: held.update({Q: held[Q].char()}))),
        ("", "gone.safetensors", damage.index_names("gone.safetensors")),
        ("", "pytorch_model.bin, which may run", damage.bomb("pytorch_model.bin"), damage.without(WEIGHTS[0])),
        ("", "adapter_config.json", damage.file_is("small/adapter_config.json", '{"peft_type": "LORA"}')),
    ],
}
CONFIGS: dict[str, list[Row]] = {
    "jacobian SMALL": [
        ("", "has no config.json", damage.without("config.json")),
        ("", "config.json", damage.file_is("small/config.json", '{"model_type": "lla')),
        ("", "trust_remote_code", damage.own_code),
    ]
}
TOKENIZERS: dict[str, list[Row]] = {
    "jacobian SMALL": [
        ("", "small has no tokenizer", damage.without("tokenizer.json", "tokenizer_config.json")),
        ("", "id 5000", LARGE_IDS, damage.file_is("text.txt", "w3 " * 99)),
    ],
    "inspect SMALL": [("--chat w3", "no chat template")],
}
TEXTS: dict[str, list[Row]] = {
    "theory SMALL --text": [
        ("HERE/t", "has 12 tokens (the longest has 3)", damage.file_is("t", "w3 w4 w5")),
        ("HERE/f", "b.txt' is not UTF-8", damage.file_is("f/a.txt", "w3 " * 99), damage.file_is("f/b.txt", b"\xff")),
    ],
    "inspect SMALL": [("--prompt w3 --text TEXT", "both --prompt and --text")],
    "sinks SMALL --dataset": [
        ("HERE/t.jsonl --column body", "'body'", damage.file_is("t.jsonl", '{"text": "w3 w4"}')),
        ("nobody/nothing", "nobody/nothing"),
    ],
    "pretrain tiny-llama --text": [("TEXT", "too short to hold out")],
}
NAMES: dict[str, list[Row]] = {
    "jacobian": [
        ("/nowhere", "model '/nowhere' does not exist"),
        ("SMALL/model.safetensors", "model.safetensors'"),
        ("SMALL HERE/./small", "both called 'small'"),
    ]
}
VALUES: dict[str, list[Row]] = {
    "jacobian SMALL": [
        ("--length 129", "length=129, but small was made for 128; ask for fewer, or go beyond: --beyond"),
        ("--initialization smollm2", "published rule (smollm2-135m, smollm2"),
        ("--conditions pretrained --initialization 0.02", "initialization '0.02' has no use without fresh weights"),
        ("--products many", "Invalid value for '--products'"),
        ("--device cuda:99", "device 'cuda:99' cannot be used"),
    ],
    "theory SMALL": [
        ("--initialization 0", "'uniform 0' has deviation 0"),
        ("--first begin", "first token 'begin' is unknown"),
    ],
    "sinks SMALL": [
        ("--keys seven", "keys 'seven' are no positions; write them as all, 0-7 or 0,5"),
        ("--keys 0,12", "keys=12 cannot be used with prompts of 12 positions; give whole numbers from 0 to 11"),
    ],
    "leakage SMALL": [("--bands 3-40", "band 3-40 does not fit"), ("--lags 0", "lags [0]")],
    "bos-swap SMALL": [
        ("--profile-prompts -1", "profile_prompts=-1"),
    ],
    "pretrain tiny-llama": [
        ("--steps many", "'--steps': Input should be a valid integer"),
        ("--peak-lr nan", "peak_lr=nan"),
        ("--length 257", "length=257"),
    ],
}
FOLDERS: dict[str, list[Row]] = {
    "jacobian SMALL": [("--out TEXT", "text.txt")],
    "pretrain tiny-llama": [("--out OUT", "holds other files"), ("--out TEXT/below", "is no folder")],
    "compare": [
        ("gone.nc OUT/other.nc", "result 'gone.nc' does not exist; give a NetCDF file that headwater wrote"),
        ("OUT/other.nc", "Missing argument 'B.nc'"),
    ],
    "families": [("llama bloom", "model type 'bloom' is not supported; supported families: llama, mistral, ministral")],
    "selftest": [("--device cuda:99", "device 'cuda:99' cannot be used")],
    "report --out": [
        ("OUT", "holds no results"),
        ("OUT --quick", "--quick measures models, and none is named"),
        ("OUT", "jacobian.nc' cannot be read", damage.file_is("out/jacobian/jacobian.nc", "torn")),
    ],
}


def rows_of(*tables: dict[str, list[Row]]) -> Iterator[Any]:
    """A command and what follows it, what is said, and what is spoilt."""
    for table in tables:
        for command, rows in table.items():
            for given, says, *spoils in rows:
                whole = f"{command} {given}"
                yield pytest.param(whole, says, spoils, id=f"{whole[:60]!a} {says[:30]!a}")


LONGEST = 90  # seconds, imports included; a row that waits for a pipe would wait for ever


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder "small" with a model, and a text for it, to be copied and spoilt."""
    folder = families.checkpoints(tmp_path_factory.mktemp("kept"), small=("llama", "prepended"))
    (folder / "out").mkdir()
    (folder / "out" / "jacobian.svg").write_text("what an earlier run has left\n")
    return folder


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of one command: its own copy of model, text and earlier results."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, late)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def words_of(line: str, here: Path) -> list[str]:
    """A row's words, behind the command's defaults."""
    command, *own = shlex.split(line)
    usual = DEFAULTS[command]
    if "--dataset" in own and "--text" not in own:
        usual = usual.replace("--text TEXT", "")
    if own[:1] == ["--out"] and command == "report":
        usual = ""
    words = [command, *usual.split(), *own]
    for name, path in {"SMALL": here / "small", "TEXT": here / "text.txt", "OUT": here / "out", "HERE": here}.items():
        words = [word.replace(name, str(path)) for word in words]
    return words


def late(*_: object) -> None:
    pytest.fail(f"still busy after {LONGEST} s")


@pytest.mark.parametrize(
    ("line", "says", "spoils"), list(rows_of(LOADED, CONFIGS, TOKENIZERS, TEXTS, NAMES, VALUES, FOLDERS))
)
def test_a_bad_input_is_one_line_and_leaves_everything_as_it_was(line, says, spoils, here, monkeypatch, capfd):
    for spoil in spoils:
        spoil(here)
    before = listing(here)
    signal.alarm(LONGEST)
    assert call(monkeypatch, *words_of(line, here)) == cli.BAD_INPUT == 2
    signal.alarm(0)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headwater: ")
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    assert len(shown.err) < 1000
    assert says.replace("HERE", str(here)) in shown.err
    assert listing(here) == before
