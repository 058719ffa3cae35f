"""Two processes share the prompts and end with the bytes of one: every study, every probe, and a real launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shared
from commands import program

from probes.results.dataset import load

LAUNCHED = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCHED += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "probes"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of one process and of two."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    shared.everything(one)
    shared.begin(two)
    program(*TORCHRUN, shared.__file__, str(two))
    return one, two


@pytest.mark.slow
@pytest.mark.parametrize("name", shared.RUNS)
def test_results_of_two_processes_are_those_of_one(both, name):
    one, two = (folder / name for folder in both)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}  # no journal is left
    (file,) = one.glob("*.nc")
    expected, found = load(file), load(two / file.name)
    assert set(expected.variables) == set(found.variables)
    for variable in expected.variables:
        assert found[variable].values.dtype == expected[variable].values.dtype
        assert found[variable].values.tobytes() == expected[variable].values.tobytes(), variable
    assert expected.attrs["options"] == found.attrs["options"]


@pytest.mark.slow
def test_every_process_has_the_whole_result_in_memory(both):
    expected = shared.in_memory()
    for number in (0, 1):
        assert json.loads((both[1] / f"process-{number}.json").read_text()) == expected


@pytest.mark.slow
def test_a_launcher_starts_the_command_line(tmp_path):
    out, arguments = tmp_path / "out", ["sinks", "tiny-llama", "--prompts", "3", "--length", "24", "--reacts", "off"]
    assert program(*LAUNCHED, *arguments, "--out", str(out)).count("wrote ") == 1  # one process speaks
    assert sorted(path.name for path in out.iterdir()) == ["sinks.md", "sinks.nc", "sinks.png", "sinks.svg"]
    assert load(out / "sinks.nc").attrs["command"].startswith("headwater sinks tiny-llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sinks", "nobody"], "model 'nobody' is neither bundled"),
        (["map", "--quick"], "headwater map runs in one process, not in 2; start it without the launcher"),
    ],
)
def test_bad_input_is_said_once(tmp_path, arguments, says):
    command = [sys.executable, *TORCHRUN, "-m", "probes", *arguments, "--out", str(tmp_path / "out")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode != 0
    assert sum(line.startswith("headwater") for line in done.stderr.splitlines()) == 1
    assert f"headwater: {says}" in done.stderr
    assert not (tmp_path / "out").exists()
