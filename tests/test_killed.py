"""Commands killed at random moments: given again they go on, and end with the bytes of an uninterrupted run.

`HEADWATER_KILLS=20 pytest tests/test_killed.py` kills every command that often, those that take longer too; by default the
quick ones share 24 kills.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from probes.results.dataset import load

SMALL = ["--prompts", "4", "--length", "32"]
KILLS = int(os.environ.get("HEADWATER_KILLS", "3"))
TELLING = {"created", "command", "seconds"}  # of a run, not of its numbers
COMMANDS = {
    "jacobian": ["jacobian", *SMALL, "--seeds", "1", "--products", "40"],
    "auto": ["jacobian", "tiny-llama", *SMALL, "--conditions", "pretrained", "--products", "auto"],
    "theory": ["theory", "tiny-llama", "--prompts", "2", "--length", "24", "--seeds", "1", "--products", "40"],
    "sinks": ["sinks", "tiny-llama", "tiny-qwen2", "--prompts", "6", "--length", "48"],
    "trajectory": ["trajectory", "tiny-llama", "--prompts", "6", "--length", "48", "--starts", "4"],
    "leakage": ["leakage", "tiny-llama", "--prompts", "8", "--length", "48", "--bootstrap", "50"],
    "bos-swap": ["bos-swap", "--replace", "mean,zero", *SMALL, "--bootstrap", "9"],
    "inspect": ["inspect", "tiny-llama", "--prompt", "def add(first, second):", "--seeds", "2", "--products", "40"],
}  # fmt: skip
LONGER = {
    "map": ["map", "--quick", "--seeds", "1", "--products", "16"],
    "report": ["report", "tiny-llama", "--prompts", "4", "--length", "32"],
    "toy": ["toy", "petroglyph", "--quick"],
    "pretrain": ["pretrain", "tiny-llama", "--steps", "12", "--save-every", "3", "--batch", "2", "--length", "32"],
}
if "HEADWATER_KILLS" in os.environ:
    COMMANDS |= LONGER


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ)


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
    command = COMMANDS[name]
    whole = run(script, "0", "0", "1", "--", *command, "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    seconds = float(whole.stdout.split()[1])
    done = run(script, str(KILLS), "7", str(seconds), "--", *command, "--out", str(tmp_path / "killed"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
    expected, found = numbers(tmp_path / "whole"), numbers(tmp_path / "killed")
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left == {path.name for path in (tmp_path / "whole").iterdir()}
