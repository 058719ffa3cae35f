"""Commands killed at random moments: given again they go on, and end with the bytes of an uninterrupted run."""

from pathlib import Path

import pytest
from commands import program

from probes.results.dataset import load

SMALL = ["--prompts", "4", "--length", "32"]
TOY = "layers=1 width=2 residual=no feed_forward=no target=0,9 seeds=1 batch=32 steps=300"
KILLS = 3  # of each
TELLING = {"created", "command", "seconds"}  # of a run, not of its numbers
COMMANDS = {
    "jacobian": ["jacobian", *SMALL, "--seeds", "1", "--products", "40"],
    "theory": ["theory", "tiny-llama", "--prompts", "2", "--length", "24", "--seeds", "1", "--products", "40"],
    "sinks": ["sinks", "tiny-llama", "tiny-qwen2", "--prompts", "6", "--length", "48"],
    "trajectory": ["trajectory", "tiny-llama", "--prompts", "6", "--length", "48", "--starts", "4"],
    "leakage": ["leakage", "tiny-llama", "--prompts", "8", "--length", "48", "--bootstrap", "50"],
    "bos-swap": ["bos-swap", "--replace", "mean,zero", *SMALL, "--bootstrap", "9"],
    "decode": ["decode", "tiny-llama", "--prompts", "8", "--length", "32", "--erase", "2", "--recall", "0", "--controls=2"],
    "retrieval": ["retrieval", "tiny-llama", "--pairs", "8", "--keys", "apart", "--digits", "3", "--contexts", "6"],
    "toys": ["toy", "retrieval", *(word for setting in TOY.split() for word in ("--with", setting))],
    "inspect": ["inspect", "tiny-llama", "--prompt", "def add(first, second):", "--seeds", "2", "--products", "40"],
}  # fmt: skip


def numbers(folder: Path) -> dict[str, bytes]:
    """The bytes of every variable, attributes included, of all results below a folder, and of weights."""
    found = {file.name: file.read_bytes() for file in folder.rglob("*.safetensors")}
    for file in sorted(folder.rglob("*.nc")):
        ds = load(file)
        found |= {f"{file.name} {name}": v.values.tobytes() for name, v in ds.variables.items() if name not in TELLING}
        found |= {f"{file.name} .{k}": repr(v).encode() for k, v in ds.attrs.items() if k not in TELLING}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COMMANDS))
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path, name):
    script = str(Path(__file__).with_name("killed.py"))
    _, seconds = program(script, "0", "0", "1", "--", *COMMANDS[name], "--out", str(tmp_path / "whole")).split()
    kills = program(script, str(KILLS), "7", seconds, "--", *COMMANDS[name], "--out", str(tmp_path / "killed")).split()[
        0
    ]
    assert int(kills) > 0
    expected, found = numbers(tmp_path / "whole"), numbers(tmp_path / "killed")
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left == {path.name for path in (tmp_path / "whole").iterdir()}
