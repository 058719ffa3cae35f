"""The command line: quick help, one line per mistake, options that agree with the library."""

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import families
import kept
import pytest

from probes.cli import main as cli
from probes.errors import InputError
from probes.studies.atlas import Place
from probes.studies.study import Settings, study
from probes.studies.survey import PROBES, survey
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["pretrain", "--help"],
        ["jacobian", "--help"],
        ["theory", "--help"],
        ["map", "--help"],
        ["sinks", "--help"],
        ["trajectory", "--help"],
        ["leakage", "--help"],
        ["bos-swap", "--help"],
        ["inspect", "--help"],
        ["match", "--help"],
        ["compare", "--help"],
        ["report", "--help"],
        ["sinks", "--top", "-1"],
        ["--version"],
        ["pretrain", "--bogus"],
        [],
    ],
)
def test_answers_that_need_no_library_import_none(arguments):
    program = (
        "import sys, probes.cli.main as cli\n"
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
        (MemoryError(), 2, "headwater: memory ran out (headwater pretrain "),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            2,
            "headwater: memory ran out (headwater ",
        ),
    ],
)
def test_errors_within_a_command_end_in_one_line(monkeypatch, capfd, tmp_path, error, code, shown):
    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("toy.pretrain.run", stop)
    assert call(monkeypatch, "pretrain", "tiny-llama", "--out", str(tmp_path / "out")) == code
    said = capfd.readouterr().err
    assert said.startswith(shown)
    assert said.count("\n") == 1


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


# -------------------------------------------------------------------------------------------------- headwater jacobian


@pytest.fixture(scope="module")
def ape(tmp_path_factory):
    """A folder with a tiny model "ape" and a text for it."""
    folder = tmp_path_factory.mktemp("models")
    families.model("llama").save_pretrained(folder / "ape")
    families.tokenizer().save_pretrained(folder / "ape")
    (folder / "text.txt").write_text(" ".join(f"w{3 + i * i % 125}" for i in range(300)), encoding="utf-8")
    return folder


SMALL = "--prompts 2 --length 12 --products 8 --seeds 1 --device cpu"


def test_jacobian_from_the_command_line(monkeypatch, capfd, tmp_path, ape):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "out"
    words = f"jacobian {ape / 'ape'} --out {out} --text {ape / 'text.txt'} --no-rope {SMALL}".split()
    assert call(monkeypatch, *words) == 0
    shown = capfd.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.split()[:1] == ["ape"]] == [
        "pretrained",
        "init",
        "init-nope",
    ]
    assert "ape: rank correlation of init with and without positional encoding " in shown
    written = [out / f"jacobian.{ending}" for ending in ("nc", "png", "svg")]
    assert shown.endswith(f"wrote {', '.join(map(str, written))}\n")
    assert sorted(out.iterdir()) == written
    import probes

    result = probes.load_result(out / "jacobian.nc")
    assert result.attrs["command"] == f"headwater {' '.join(words)}"


@pytest.mark.slow
def test_jacobian_overlays_models_and_says_what_it_wrote(monkeypatch, capfd, tmp_path, ape):
    (tmp_path / "jacobian-older.nc").touch()
    monkeypatch.chdir(tmp_path)
    words = f"jacobian {ape / 'ape'} tiny-llama --out . --first none --conditions pretrained {SMALL}"
    words += f" --text {Path(__file__)}"
    assert call(monkeypatch, *words.split()) == 0
    said = capfd.readouterr().out.splitlines()[-1]
    assert said == "wrote jacobian-ape.nc, jacobian-tiny-llama.nc, jacobian.png, jacobian.svg"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("/nowhere", "model folder '/nowhere' does not exist"),
        ("tiny-lama", "model 'tiny-lama' is neither bundled"),
        ("nobody/nothing", "'nobody/nothing' is not in the local cache"),
        ("APE APE", "are both called 'ape'"),
        ("APE --conditions trained", "condition 'trained' does not exist; use init and pretrained"),
        ("APE --conditions ,", "name none or one twice"),
        ("APE --conditions pretrained --no-rope", "--no-rope repeats the init condition"),
        ("APE --products many", "products 'many' is not a number; give a whole number, or auto"),
        ("APE --products 1", "products=1 is too few for a sketch"),
        ("APE --method exact --products 5", "products=5 goes with method 'sketch', not 'exact'"),
        ("APE --method quick", "quick"),
        ("APE --readout loss", "loss"),
        ("APE --seeds 0", "seeds=0"),
        ("APE --prompts 0", "n=0 prompts"),
        ("APE --length 129", "length=129 is more than the 128 positions of ape"),
        ("APE --length 7", "length=7 leaves no middle"),
        ("APE --length long", "'--length': Input should be a valid integer"),
        ("APE --text gone.txt", "'gone.txt' does not exist"),
        ("APE --text TEXT --dataset a/b", "both text"),
        ("APE --text SHORT", "has 12 tokens (the longest has 3)"),
        ("APE --first begin", "first token 'begin' is unknown"),
        ("APE --query 999 --text TEXT", "query 999 is outside the prompt"),
        ("APE --from-layer 3 --text TEXT", "from_layer 3 does not exist"),
        ("APE --device tpu", "device 'tpu' cannot be used"),
        ("APE --device cuda:99", "device 'cuda:99' cannot be used"),
        ("APE --dtype float16", "float16"),
        ("APE --backend jax", "jax"),
        ("APE@step9", "'ape' has no revision 'step9'; it has none"),
        ("--out FILE/below APE", "is no folder"),
    ],
)
def test_bad_input_to_jacobian_is_one_line_and_exit_code_2(
    monkeypatch, capfd, tmp_path, ape, arguments, says, unchecked
):
    (tmp_path / "file").touch()
    (tmp_path / "short").write_text("w3 w4 w5", encoding="utf-8")
    if "--length" not in arguments:
        arguments += " --length 12"
    places = {
        "APE": ape / "ape",
        "TEXT": ape / "text.txt",
        "SHORT": tmp_path / "short",
        "FILE": tmp_path / "file",
    }
    for name, path in places.items():
        arguments = arguments.replace(name, str(path))
    out = "" if "--out" in arguments else f" --out {tmp_path / 'out'}"
    assert call(monkeypatch, *f"jacobian {arguments}{out}".split()) == cli.BAD_INPUT
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headwater: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "short"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("APE --length 100000", "length=100000 is more than the 128 positions of ape; ask for at most 128"),
        ("/nowhere", "model folder '/nowhere' does not exist"),
    ],
)
def test_bad_input_in_a_process_of_its_own(tmp_path, ape, arguments, says):
    words = f"jacobian {arguments} --out {tmp_path / 'out'}".replace("APE", str(ape / "ape")).split()
    done = subprocess.run([sys.executable, "-m", "probes", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interrupted_jacobian_ends_in_one_line_and_goes_on(monkeypatch, tmp_path, ape):
    words = f"jacobian {ape / 'ape'} --out {tmp_path / 'out'} --text {ape / 'text.txt'} --device cpu".split()
    words += ["--prompts", "2", "--length", "12", "--products", "32", "--seeds", "200", "--conditions", "init"]
    process = subprocess.Popen(
        [sys.executable, "-m", "probes", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # What a shell runs in the background ignores the signal, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    unfinished = tmp_path / "out" / "unfinished"
    try:
        while process.poll() is None and not kept.units(unfinished).get("ape init 0"):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == cli.INTERRUPTED
    assert out == ""
    assert err.strip().splitlines()[-1] == "headwater: interrupted"
    assert "Traceback" not in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unfinished"]
    seeds = sum(kept.units(unfinished).values())
    assert seeds >= 1
    words[words.index("200")] = str(seeds)
    assert call(monkeypatch, *words) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["jacobian.nc", "jacobian.png", "jacobian.svg"]


def test_defaults_of_jacobian_are_those_of_the_library():
    shown = {name: parameter.default for name, parameter in inspect.signature(cli.jacobian).parameters.items()}
    settings: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert shown["conditions"] == ",".join(settings.pop("conditions"))
    assert (settings.pop("theories"), settings.pop("by_path")) == (None, False)  # those of `headwater theory`
    assert {name: shown[name] for name in settings} == settings
    library = {name: p.default for name, p in inspect.signature(study).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for name in ("advance", "told", "name", "finish", "write", "split_over"):
        del library[name]
    assert {name: shown[name] for name in library} == library


def test_theory_from_the_command_line(monkeypatch, capfd, tmp_path, ape):
    words = [
        "theory",
        str(ape / "ape"),
        "--text",
        str(ape / "text.txt"),
        "--out",
        str(tmp_path / "out"),
        *SMALL.split(),
    ]
    assert call(monkeypatch, *words) == 0
    shown = capfd.readouterr().out
    written = ["theory.md", "theory.nc", "theory.png", "theory.svg"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == written
    assert all(name in shown for name in written)
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith("ape")]
    assert [row[1] for row in rows] == ["pretrained", "init"]
    table = (tmp_path / "out" / "theory.md").read_text(encoding="utf-8").splitlines()
    assert table[0].startswith("# ")
    assert table[2].startswith("`headwater theory ")
    assert [line.strip("| ").split(" | ") for line in table if line.startswith("| ape")] == rows


def test_map_from_the_command_line(monkeypatch, capfd, tmp_path):
    small = [Place("depth", strength, 64, 2, 16) for strength in (0.05, 1.64)]
    monkeypatch.setattr(
        "probes.studies.atlas.places", lambda *, quick: small if quick else pytest.fail("not asked for")
    )
    assert call(monkeypatch, "map", "--quick", "--out", str(tmp_path), "--seeds", "1", "--products", "16") == 0
    shown = capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.md", "map.nc", "map.png", "map.svg"]
    assert all(place.label() in shown for place in small)
    assert call(monkeypatch, "map", "--quick", "--out", str(tmp_path / "x"), "--seeds", "0") == 2
    assert capfd.readouterr().err == "headwater: seeds=0 leaves no fresh model; give at least 1\n"
    assert call(monkeypatch, "map", "--quick", "--out", str(tmp_path / "x"), "--products", "1") == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("headwater: products=1 is too few for a sketch")


# ------------------------------------------------------------------------------- headwater sinks, trajectory, leakage, ...

SURVEYS = {
    "sinks": "--top 2 --pictures 1",
    "trajectory": "--starts 8",
    "leakage": "--bootstrap 20 --lags 1,2 --bands 3-11,12-19",
    "bos-swap": "--replace mean,17 --bootstrap 20 --lags 1-2 --bands 3-19 --profile-prompts 1 --products 8",
}


SLOW = ("leakage", "bos-swap")


@pytest.mark.parametrize(
    "probe", [pytest.param(probe, marks=pytest.mark.slow) if probe in SLOW else probe for probe in SURVEYS]
)
def test_surveys_from_the_command_line(monkeypatch, capfd, tmp_path, ape, probe):
    out = tmp_path / "out"
    words = f"{probe} {ape / 'ape'} --out {out} --text {ape / 'text.txt'} --prompts 4 --length 20 {SURVEYS[probe]}"
    assert call(monkeypatch, *words.split()) == 0
    shown = capfd.readouterr().out
    written = [out / f"{probe}.{ending}" for ending in ("nc", "png", "svg", "md")]
    assert shown.endswith(f"wrote {', '.join(map(str, written))}\n")
    assert sorted(out.iterdir()) == sorted(written)
    import probes

    result = probes.load_result(out / f"{probe}.nc")
    assert result.attrs["command"] == f"headwater {words}"
    page = (out / f"{probe}.md").read_text(encoding="utf-8").splitlines()
    assert page[2] == f"`headwater {words}`"
    assert shown.splitlines()[0] == page[0].removeprefix("# ")
    assert page[4] in " ".join(shown.split())  # what was measured, and what the columns are
    rows = [line.split()[1:] for line in page if line.startswith("| ape ")]
    printed = [line.split() for line in shown.splitlines() if line.startswith(" ape ")]
    assert len(rows) >= 2
    assert sorted(printed) == sorted([word for word in row if word != "|"] for row in rows)


@pytest.mark.slow
def test_an_interrupted_survey_says_what_it_goes_on_with(monkeypatch, capfd, tmp_path, ape):
    words = (
        f"trajectory {ape / 'ape'} tiny-llama --out {tmp_path} --text {Path(__file__)} --prompts 2 --length 20".split()
    )
    words += ["--starts", "8", "--first", "none"]

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("probes.studies.survey.write_results", stop)
        assert call(patched, *words) == cli.INTERRUPTED
    capfd.readouterr()
    assert call(monkeypatch, *words, "--starts", "9") == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert err.startswith(f"headwater: '{tmp_path}' holds an unfinished study with other starts; ")
    assert err.count("\n") == 1
    assert call(monkeypatch, *words) == 0
    first = capfd.readouterr().err.splitlines()[0]
    done = "2 of 2 are done (ape trajectory, tiny-llama trajectory)"
    assert first == f"headwater: going on with '{tmp_path / 'unfinished'}': {done}"
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("sinks /nowhere", "model folder '/nowhere' does not exist"),
        ("sinks APE APE", "are both called 'ape'"),
        ("sinks APE --keys seven", "keys 'seven' are no positions; write them as all, 0-7 or 0,5"),
        ("sinks APE --keys 0,12", "key 12 is outside the prompts; positions run from 0 to 11"),
        ("sinks APE --keys 7-0", "run backwards"),
        ("sinks APE --reacts nothing", "replacement 'nothing' is unknown"),
        ("sinks APE --reacts 128", "128 is outside the vocabulary of ape"),
        ("sinks APE --threshold 2", "threshold=2.0"),
        ("sinks APE --tau -1", "tau=-1.0"),
        ("sinks APE --pictures -1", "pictures=-1"),
        ("sinks APE --top -1", "--top"),
        ("sinks APE --length 129", "length=129 is more than the 128 positions of ape"),
        ("sinks APE --first begin", "first token 'begin' is unknown"),
        ("sinks APE --backend jax", "jax"),
        ("sinks APE --dtype float16", "float16"),
        ("sinks --out FILE/below APE", "is no folder"),
        ("trajectory APE --starts 1", "starts=1"),
        ("trajectory APE --starts 1000", "starts=1000"),
        ("trajectory APE --prompts 0", "n=0 prompts"),
        ("leakage APE --bands early", "bands 'early'"),
        ("leakage APE --bands 3-40 --lags 1", "band 3-40 does not fit"),
        ("leakage APE --bands 9-5", "bands '9-5' run backwards; give 5-9"),
        ("leakage APE --lags 0", "lags [0]"),
        ("leakage APE --lags 1-11", "leave no queries behind lag 11"),
        ("leakage APE --prompts 2", "2 prompts cannot be split in two halves"),
        ("leakage APE --bootstrap -1", "bootstrap=-1"),
        ("leakage APE --seed -1", "seed=-1 is negative"),
        ("leakage APE --device tpu", "device 'tpu' cannot be used"),
        ("bos-swap APE --replace nothing", "replacement 'nothing' is unknown"),
        ("bos-swap APE --replace mean,", "replacement '' is unknown"),
        ("bos-swap APE --replace mean,mean", "replacement 'mean,mean' names none or one twice"),
        ("bos-swap APE --replace mean,128", "128 is outside the vocabulary of ape"),
        ("bos-swap APE --products 1", "products=1"),
        ("bos-swap APE --profile-prompts 0", "profile_prompts=0"),
    ],
)
def test_bad_input_to_surveys_is_one_line_and_exit_code_2(monkeypatch, capfd, tmp_path, ape, arguments, says):
    (tmp_path / "file").touch()
    if "--length" not in arguments:
        arguments += " --length 12"
    if "--prompts" not in arguments:
        arguments += " --prompts 4"
    out = "" if "--out" in arguments else f" --out {tmp_path / 'out'}"
    arguments = arguments.replace("APE", str(ape / "ape")).replace("FILE", str(tmp_path / "file"))
    assert call(monkeypatch, *f"{arguments} --text {ape / 'text.txt'}{out}".split()) == cli.BAD_INPUT
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headwater: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_defaults_of_surveys_are_those_of_the_library():
    commands = {"sinks": cli.sinks, "trajectory": cli.trajectory, "leakage": cli.leakage, "bos-swap": cli.bos_swap}
    assert set(commands) == set(PROBES)
    library = {name: p.default for name, p in inspect.signature(survey).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for name in ("options", "reporting", "advance", "told", "write", "split_over"):
        assert library.pop(name) is None
    # What the command line writes differently, or chooses otherwise.
    text = {"keys": None, "reacts": "mean", "pictures": 3, "effect": "off", "lags": "1-8"}
    many = {"leakage": 256, "bos-swap": 128}  # prompts: differences of variances need more than means
    for probe, command in commands.items():
        shown = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
        assert {name: shown[name] for name in library} == library | {"prompts": many.get(probe, 32)}
        assert shown["out"] == Path("runs") / probe
        shown["replacement"] = shown.get("replace")
        measured = inspect.signature(PROBES[probe].measure).parameters.values()
        own = {p.name: p.default for p in measured if p.kind is p.KEYWORD_ONLY}
        for name in own.keys() - {"progress", "per_prompt", "before", "documents"}:
            assert shown[name] == text.get(name, own[name]), name
    assert tuple(range(1, 9)) == inspect.signature(PROBES["leakage"].measure).parameters["lags"].default
