"""The command line: quick help, one line per mistake, options that agree with the library."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from commands import call

import probes
from probes.cli.measures import OTHERS
from probes.errors import InputError
from probes.measure import measure, questions
from probes.results.dataset import load

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


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of what is given by name."""
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def test_defaults_are_those_of_the_library():
    for name in questions():
        one = measure(name)
        library, offered = defaults(probes.jacobian if name == "theory" else one.compute), one.options().values()
        chosen = {"method", "reacts", "replacement"}  # commands sketch, look at more of heads, and swap several times
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
        assert "headwater: read 2 prompts of 16 tokens, from 2 documents of bundled code\n" in done.stderr
        written = {"sinks.nc", "sinks.png", "sinks.svg", "sinks.md", "code"}
        assert {file.name for file in tmp_path.iterdir()} == written
        assert load(tmp_path / "sinks.nc").sizes["prompt"] == 2
