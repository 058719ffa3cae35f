"""The command line: quick help, one line per mistake, options that agree with the library."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import call

import probes
from probes.cli import main as cli
from probes.cli.measures import OTHERS
from probes.errors import InputError
from probes.measure import measure, questions
from probes.measures.map import Place
from probes.results.dataset import load
from toy.recipes import RECIPES

HEAVY = ("torch", "transformers", "transformer_lens", "datasets", "xarray", "matplotlib", "numpy", "scipy")


def test_answers_that_need_no_library_import_none():
    given = [[], ["--help"], ["--version"], ["pretrain", "--bogus"]]
    given += [[command, "--help"] for command in OTHERS]
    program = f"""
import sys, probes.cli.main as cli
for words in {given!r}:
    sys.argv = ["headwater", *words]
    try:
        cli.main()
    except SystemExit as end:
        print("ended:", end.code)
print("imported:", *sorted(set(sys.modules) & set({HEAVY!r})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "imported:"
    assert done.stdout.count("ended:") == len(given) > 10


def test_version_is_the_distribution_s(monkeypatch, capsys):
    assert call(monkeypatch, "--version") == 0
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    word, version = capsys.readouterr().out.split()
    assert word == "headwater"
    assert f'\nversion = "{version}"\n' in project


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "Missing command"),
        ("pretrian", "'pretrian'. Did you mean 'pretrain'"),
        ("pretrain tiny-llama", "Missing option '--out'"),
    ],
)
def test_no_command_is_one_line_and_exit_code_2(monkeypatch, capfd, arguments, says):
    assert call(monkeypatch, *arguments.split()) == cli.BAD_INPUT == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headwater: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (InputError("x is 1;\n  give 2"), 2, "x is 1; give 2\n"),
        (KeyboardInterrupt(), 130, "interrupted; the same command resumes\n"),
        (MemoryError(), 2, "memory ran out (headwater pretrain "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "memory ran out (headwater "),
    ],
)
def test_errors_within_a_command_end_in_one_line(monkeypatch, capfd, error, code, shown):
    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("toy.pretrain.run", stop)
    assert call(monkeypatch, "pretrain", "tiny-llama", "--out", "out") == code
    said = capfd.readouterr().err
    assert said.startswith(f"headwater: {shown}")
    assert said.count("\n") == 1


def test_a_defect_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("toy.pretrain.run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, "pretrain", "tiny-llama", "--out", "out")


def test_pretrain_from_the_command_line(monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n + 1} is {n * n + n}, said the {n % 7}th of them.\n" for n in range(3000)))
    out = tmp_path / "out"
    arguments = f"pretrain tiny-qwen2 --text {text} --out {out} --steps 2 --batch 1 --length 16 --warmup 1"
    words = f"{arguments} --heldout-characters 5000 --device cpu".split()
    assert call(monkeypatch, *words) == 0
    assert capsys.readouterr().out.startswith(f"{out}: validation loss ")
    assert (out / "step0" / "model.safetensors").exists()
    training = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert training["options"]["bos"] is False  # the recipe's own policy
    assert training["difference"] == RECIPES["tiny-qwen2"].difference
    assert training["command"] == f"headwater {' '.join(words)}"


def test_map_from_the_command_line(monkeypatch, capfd, tmp_path):
    small = [Place("depth", strength, 64, 2, 16) for strength in (0.05, 1.64)]
    monkeypatch.setattr("probes.measures.map.places", lambda *, quick: small if quick else pytest.fail("not asked for"))
    assert call(monkeypatch, "map", "--quick", "--out", str(tmp_path), "--seeds", "1", "--products", "16") == 0
    shown = capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.md", "map.nc", "map.png", "map.svg"]
    assert all(place.label() in shown for place in small)


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of what is given by name."""
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def test_defaults_are_those_of_the_library():
    for name in questions():
        one = measure(name)
        library, offered = defaults(probes.jacobian if name == "theory" else one.compute), one.options().values()
        chosen = {"method", "reacts"}  # commands sketch, and look at more of heads
        both = (set(offered) & set(library)) - chosen
        assert {key: offered[key] for key in both} == {key: library[key] for key in both}, name


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        (">/dev/full", 2, "headwater: cannot write to stdout (No space left on device); files are written whole\n"),
        (">&-", 0, ""),
        ("| head -1", 0, ""),
    ],
)
def test_whoever_stops_listening_gets_whole_files_and_no_traceback(target, code, says, tmp_path):
    words = f"sinks tiny-llama --prompts 2 --length 16 --out {tmp_path}" if "full" in target else "families"
    command = f"( {sys.executable} -m probes {words}; echo $? >{tmp_path}/code ) {target}"
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, check=False)
    assert (tmp_path / "code").read_text() == f"{code}\n"
    assert "".join(line for line in done.stderr.splitlines(True) if "cannot" in line or "rror" in line) == says
    if "full" in target:
        written = {"sinks.nc", "sinks.png", "sinks.svg", "sinks.md", "code"}
        assert {file.name for file in tmp_path.iterdir()} == written
        assert load(tmp_path / "sinks.nc").sizes["prompt"] == 2
