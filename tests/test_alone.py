"""Two runs never write to one folder at once: the second is refused by name, and a killed one leaves no lock."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import test_pretrain
from commands import bad_input, listing
from toy_runs import MIXED

from probes.run.files import alone
from probes.run.store import unfinished
from toy.train import train

HOLD = "import sys, pathlib; from probes.run.files import alone\n"
HOLD += "with alone(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"


@contextmanager
def another_run(path):
    """A process that writes at a path."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_second_run_is_refused_and_the_folder_is_free_after_a_kill_or_an_error(tmp_path):
    with another_run(tmp_path / "unfinished/kind"):
        before = listing(tmp_path)
        with bad_input("another run is writing to"), unfinished(tmp_path, "kind"):
            pass
        with alone(tmp_path / "unfinished/another"):
            pass
        assert listing(tmp_path) == before
    with pytest.raises(ZeroDivisionError) as kept, unfinished(tmp_path, "kind"):
        raise ZeroDivisionError
    assert kept is not None  # and with it the frames that held the lock
    assert listing(tmp_path) == {}
    with another_run(tmp_path / "unfinished/kind"):
        pass


def test_toys_and_pretraining_are_kept_apart_too(tmp_path):
    with another_run(tmp_path / "training"), bad_input("another run is writing to"):
        train(MIXED, 2, folder=tmp_path)
    out = tmp_path / "model"
    with another_run(out / "state/pretrain"):
        before = listing(out)
        with bad_input("another run is writing to"):
            test_pretrain.train(out)
        assert listing(out) == before
