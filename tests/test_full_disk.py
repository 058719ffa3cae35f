"""A disk that fills up: a command ends in one line and leaves what was there before.

Files may not grow beyond a limit, which needs no privilege and fails in the middle of a write as a full disk does.
"""

from pathlib import Path
from typing import Any

import pytest
from commands import call, listing, no_file_larger_than

from probes.cli import main as cli

pytestmark = pytest.mark.slow

# What the loop of measures writes, and a command that writes for itself.
COMMANDS = {
    "jacobian": "jacobian tiny-llama --prompts 2 --length 12 --products 8 --seeds 1 --device cpu",
    "retrieval": "toy retrieval --quick --device cpu --with steps=20 --with seeds=1",
}


def finished(out: Path) -> dict[str, Any]:
    """What is there beside unfinished work, which the same command goes on with."""
    return {name: kept for name, kept in listing(out).items() if not name.startswith(("unfinished", ".unfinished"))}


# Bytes: no unit of unfinished work, no result; a unit and a result, and no figure. Less than that, and what the commands
# say has no room, either: while tests run it goes to a file.
@pytest.mark.parametrize(("name", "limit"), [("jacobian", 4_000), ("jacobian", 60_000), ("retrieval", 4_000)])
def test_a_write_that_fails_leaves_the_earlier_results(tmp_path, monkeypatch, capfd, name, limit):
    for ending in ("nc", "png"):
        (tmp_path / f"{name}.{ending}").write_bytes(b"earlier")
    before, arguments = finished(tmp_path), [*COMMANDS[name].split(), "--out", str(tmp_path)]
    with no_file_larger_than(limit):
        assert call(monkeypatch, *arguments) == cli.BAD_INPUT
    shown = capfd.readouterr()
    said = shown.err.splitlines()[-1]
    assert shown.out == ""
    assert said.startswith("headwater: cannot write")
    assert "File too large" in said
    assert "Traceback" not in shown.err
    assert finished(tmp_path) == before
    if limit == 60_000:  # with room again the same command goes on
        assert call(monkeypatch, *arguments) == 0
        assert "going on with" in capfd.readouterr().err
        assert (tmp_path / "jacobian.nc").read_bytes()[:4] == b"\x89HDF"
