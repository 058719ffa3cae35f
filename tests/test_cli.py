"""The command line: quick help, one line per mistake, options that agree with the library."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from probes import __main__ as cli
from probes.errors import InputError
from toy.pretrain import Options, run
from toy.recipes import RECIPES

HEAVY = ("torch", "transformers", "transformer_lens", "datasets", "xarray", "matplotlib", "numpy", "scipy")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `headwater ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["headwater", *arguments])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    code = raised.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("arguments", [["--help"], ["pretrain", "--help"], ["--version"], ["pretrain", "--bogus"], []])
def test_answers_that_need_no_library_import_none(arguments):
    program = (
        "import sys, probes.__main__ as cli\n"
        f"sys.argv = ['headwater', *{arguments!r}]\n"
        "try:\n    cli.main()\n"
        f"finally:\n    print('imported:', *sorted(set(sys.modules) & set({HEAVY!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "imported:"


def test_help_names_commands_and_ends_with_examples(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    assert call(monkeypatch, "--help") == 0
    top = capsys.readouterr().out
    assert "pretrain" in top
    commands = [
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    ]
    assert "pretrain" in commands
    for command in commands:
        assert command in top
        assert call(monkeypatch, command, "--help") == 0
        shown = capsys.readouterr().out
        assert f"headwater {command} " in shown[shown.index("Examples:") :]


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
        ("--bogus", "--bogus"),
        ("pretrian", "'pretrian'. Did you mean 'pretrain'?"),
        ("pretrain tiny-llama", "Missing option '--out'"),
        ("pretrain tiny-llama --out OUT --steps many", "'--steps': Input should be a valid integer"),
        ("pretrain tiny-llama --out OUT --steps many", "--steps many"),
        ("pretrain tiny-llama --out OUT --compute float16", "float16"),
        ("pretrain tiny-llama --out OUT --device tpu", "tpu"),
        ("pretrain tiny-llama tiny-qwen2 --out OUT", "tiny-qwen2"),
        ("pretrain --out OUT", "neither given; give a recipe (tiny-llama,"),
        ("pretrain tiny-lama --out OUT", "recipe 'tiny-lama' is unknown; choose one of tiny-llama,"),
        ("pretrain tiny-llama --config c.json --out OUT", "both 'tiny-llama' and 'c.json' given"),
        ("pretrain --config gone.json --out OUT", "'gone.json' is not readable"),
        ("pretrain tiny-llama --out OUT --keep-steps 0,x", "keep-steps '0,x'"),
        ("pretrain tiny-llama --out OUT --keep-steps 2400", "keep_steps=2400"),
        ("pretrain tiny-llama --out OUT --peak-lr -1", "peak_lr=-1.0"),
        ("pretrain tiny-llama --out OUT --length 257", "length=257"),
        ("pretrain tiny-llama --out OUT --text gone.txt", "'gone.txt' does not exist"),
        ("pretrain tiny-llama --out OUT --text a.txt --dataset b", "--text and --dataset given"),
        ("pretrain tiny-llama --out OUT --dataset nobody/nothing", "nobody/nothing"),
        ("pretrain tiny-llama --out FILE/below", "is no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capfd, tmp_path, arguments, says):
    (tmp_path / "file").touch()
    words = arguments.replace("OUT", str(tmp_path / "out")).replace("FILE", str(tmp_path / "file")).split()
    assert call(monkeypatch, *words) == cli.BAD_INPUT == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headwater: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (InputError("x is 1;\n  give 2"), 2, "headwater: x is 1; give 2\n"),
        (KeyboardInterrupt(), 130, "headwater: interrupted\n"),
    ],
)
def test_errors_within_a_command_end_in_one_line(monkeypatch, capfd, tmp_path, error, code, shown):
    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("toy.pretrain.run", stop)
    assert call(monkeypatch, "pretrain", "tiny-llama", "--out", str(tmp_path / "out")) == code
    assert capfd.readouterr().err == shown


def test_a_defect_keeps_its_traceback(monkeypatch, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("toy.pretrain.run", fail)
    monkeypatch.setattr(sys, "argv", ["headwater", "pretrain", "tiny-llama", "--out", str(tmp_path / "out")])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_defaults_of_pretrain_are_those_of_the_library():
    # Written out twice, because help may not import torch.
    shown = {name: parameter.default for name, parameter in inspect.signature(cli.pretrain).parameters.items()}
    options = {field.name: field.default for field in dataclasses.fields(Options) if field.name != "bos"}
    assert {name: shown[name] for name in options} == options
    library = {name: p.default for name, p in inspect.signature(run).parameters.items() if p.kind is p.KEYWORD_ONLY}
    del library["command"]
    assert {name: shown[name] for name in library} == library


def test_recipes_named_in_the_help_are_all_there_are(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    call(monkeypatch, "pretrain", "--help")
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "tiny-llama, " in line)
    assert [word.strip(",.") for word in line.split() if word.startswith("tiny-")] == list(RECIPES)


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
    assert f"headwater {' '.join(words)}\n" in (out / "README.md").read_text(encoding="utf-8")
