"""A disk that fills up: every command ends in one line and leaves what was there before.

Files may not grow beyond a limit, which needs no privilege and fails in the middle of a write as a full disk does.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import kept
import pytest
from commands import call, listing, no_file_larger_than

from probes.cli import main as cli
from probes.measures.map import Place
from toy import match as matching

pytestmark = pytest.mark.slow

SHORT = "--length 12 --device cpu --text TEXT"
# What the loop of measures writes, and every command that writes for itself.
COMMANDS = {
    "jacobian": f"jacobian SMALL --prompts 2 --products 8 --seeds 1 {SHORT}",
    "loss": f"loss SMALL --prompts 4 {SHORT}",
    "match": f"match SMALL --quick --prompts 4 --seeds 1 {SHORT}",
    "map": "map --quick --seeds 1 --products 8",
    "toy": "toy retrieval --quick --device cpu --with steps=20 --with seeds=1",
    "pretrain": "pretrain --config SMALL/own.json --text LONG --steps 2 --batch 1 --length 12 "
    "--heldout-characters 4000 --device cpu",
}
LARGE = ("jacobian", "map", "pretrain")  # have files that do not fit under the higher limit
# Bytes: no unit of unfinished work, no result; a unit and a result, and no figure. Less than that, and what the commands
# say has no room, either: while tests run it goes to a file.
LIMITS = (4_000, 60_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model "small", texts for it, and a configuration to pretrain."""
    folder = families.checkpoints(tmp_path_factory.mktemp("model"), small=("llama", "prepended"))
    config: Any = families.FAMILIES["llama"]()
    config.vocab_size = 260
    config.to_json_file(folder / "small" / "own.json")
    lines = (f"{n} times {n + 1} is {n * n + n}, said the {n % 7}th of them.\n" for n in range(1500))
    (folder / "long.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places of the map, and toys of a step."""
    few = [Place("depth", strength, 64, 2, 16) for strength in (0.05, 1.64)]
    monkeypatch.setattr("probes.measures.map.places", lambda *, quick: few)
    monkeypatch.setattr(matching, "QUICK", replace(matching.QUICK, steps=2))


def words(name: str, model: Path, out: Path) -> list[str]:
    places = {"SMALL": "small", "TEXT": "text.txt", "LONG": "long.txt"}
    command = COMMANDS[name]
    for place, file in places.items():
        command = command.replace(place, str(model / file))
    return [*command.split(), "--out", str(out)]


def finished(out: Path) -> dict[str, Any]:
    """What is there beside unfinished work, which the same command goes on with."""
    unfinished = ("unfinished", ".unfinished", "toys", "state", "step0")
    return {name: kept for name, kept in listing(out).items() if not name.startswith(unfinished)}


def check(capfd: pytest.CaptureFixture[str], code: int, says: str) -> str:
    """One line, beside the bars of progress and what the command said it would take; all that was said."""
    out, err = capfd.readouterr()
    assert code == cli.BAD_INPUT, err
    assert out == ""
    lines = (line for line in err.splitlines() if line.startswith("headwater:"))
    said = [line for line in lines if not any(takes in line for takes in (" above the model's ", " as measured "))]
    assert len(said) == 1
    assert said == err.splitlines()[-1:]
    assert says in said[0]
    assert "cannot write" in said[0]
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("name", "limit"), [(name, limit) for name in COMMANDS for limit in LIMITS if name in LARGE or limit == 4_000]
)
def test_a_write_that_fails_leaves_the_earlier_results(model, tmp_path, monkeypatch, capfd, name, limit):
    out = tmp_path / "out"
    if name != "pretrain":  # which wants an empty folder
        out.mkdir()
        for ending in ("nc", "png"):
            (out / f"{'retrieval' if name == 'toy' else name}.{ending}").write_bytes(b"earlier")
    before = finished(out)
    arguments = words(name, model, out)
    with no_file_larger_than(limit):
        code = call(monkeypatch, *arguments)
    check(capfd, code, "File too large")
    assert finished(out) == before
    assert not [file for file in out.rglob(".*-*") if file.is_file() and not file.parent.name.startswith(".unfinished")]
    if (name, limit) == ("jacobian", 60_000):  # with room again the same command goes on
        assert "small-pretrained" in [file.parent.name.rpartition("-")[0] for file in kept.written(out)]
        assert call(monkeypatch, *arguments) == 0
        assert "going on with" in capfd.readouterr().err
        assert {path.name for path in out.iterdir()} == {f"jacobian.{ending}" for ending in ("md", "nc", "png", "svg")}
        assert (out / "jacobian.nc").read_bytes()[:4] == b"\x89HDF"
