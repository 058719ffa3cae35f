"""Results of a folder: which kind and name each has, and what is left out or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from probes.errors import InputError
from probes.results.collected import collect
from probes.results.dataset import save
from probes.run.unfinished import FOLDER


def put(path: Path, value: float = 0.0, **attrs: str) -> None:
    save(xr.Dataset({"x": ((), np.float64(value))}, attrs={"headwater": "0", **attrs}), path)


def test_kinds_and_names(tmp_path):
    put(tmp_path / "jacobian/jacobian-tiny-llama.nc", 1.0, model="tiny-llama")
    put(tmp_path / "jacobian/jacobian-tiny-llama-ntk.nc", 2.0, model="tiny-llama-ntk")
    put(tmp_path / "jacobian/jacobian-Qwen-Qwen2.5-0.5B.nc", 3.0, model="Qwen/Qwen2.5-0.5B")
    put(tmp_path / "sinks/sinks.nc", 4.0, model="alone")
    put(tmp_path / "steps/sinks-tiny-llama@step100.nc", 5.0, model="tiny-llama")
    put(tmp_path / "theory/map.nc", 6.0, measurement="map")
    put(tmp_path / "toy/retrieval.nc", 7.0)
    put(tmp_path / "toy/depth/position-bias.nc", 8.0)
    put(tmp_path / "leakage.nc", 9.0, model="at/the top")
    put(tmp_path / "llm/jacobian/jacobian-smollm2-135m.nc", 10.0, model="smollm2-135m")
    put(tmp_path / "llm/code/sinks/sinks-smollm2-135m.nc", 11.0, model="smollm2-135m")
    found = collect(tmp_path)
    values = {kind: {name: float(ds["x"]) for name, ds in found[kind].items()} for kind in found}
    assert values == {
        "jacobian": {"Qwen/Qwen2.5-0.5B": 3.0, "smollm2-135m": 10.0, "tiny-llama": 1.0, "tiny-llama-ntk": 2.0},
        "sinks": {"alone": 4.0},
        "steps": {"tiny-llama@step100": 5.0},
        "map": {"map": 6.0},
        "toy": {"retrieval": 7.0},
        "toy/depth": {"position-bias": 8.0},
        "leakage": {"at/the top": 9.0},
        "code/sinks": {"smollm2-135m": 11.0},
    }
    assert list(found["jacobian"]) == [
        "Qwen/Qwen2.5-0.5B",
        "smollm2-135m",
        "tiny-llama",
        "tiny-llama-ntk",
    ]  # not the files' order
    assert found.files["map", "map"] == tmp_path / "theory/map.nc"
    assert set(found.files) == {(kind, name) for kind in found for name in found[kind]}


def test_what_is_not_there_is_empty(tmp_path):
    found = collect(tmp_path)
    assert (len(found), dict(found["jacobian"])) == (0, {})


def test_unfinished_and_hidden_work_is_left_out(tmp_path):
    put(tmp_path / "sinks" / FOLDER / "tiny-llama-sinks.nc", model="tiny-llama")
    put(tmp_path / "toy/.unfinished-retrieval/x.nc")
    assert len(collect(tmp_path)) == 0


def test_two_results_of_one_name_are_refused(tmp_path):
    put(tmp_path / "sinks/sinks.nc", model="tiny-llama")
    put(tmp_path / "sinks/sinks-tiny-llama.nc", model="tiny-llama")
    with pytest.raises(InputError, match="both of 'tiny-llama'; remove"):
        collect(tmp_path)


def test_bad_folders_and_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere' is no folder"):
        collect(tmp_path / "nowhere")
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks/sinks.nc").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        collect(tmp_path)
