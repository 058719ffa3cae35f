"""Results of a folder: which kind and name each has, and what is left out or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from probes.errors import InputError
from probes.results.dataset import save
from probes.results.folder import collect
from probes.run.store import FOLDER


def put(path: Path, value: float = 0.0, **attrs: str) -> None:
    save(xr.Dataset({"x": ((), np.float64(value))}, attrs={"headwater": "0", **attrs}), path)


def test_kinds_and_names(tmp_path):
    for number, (file, attrs) in enumerate(
        {
            "jacobian/jacobian-tiny-llama": {"model": "tiny-llama"},
            "jacobian/jacobian-tiny-llama-ntk": {"model": "tiny-llama-ntk"},
            "jacobian/jacobian-Qwen-Qwen2.5-0.5B": {"model": "Qwen/Qwen2.5-0.5B"},
            "sinks/sinks": {"model": "alone"},
            "steps/sinks-tiny-llama@step100": {"model": "tiny-llama"},
            "theory/map": {"measurement": "map"},
            "toy/retrieval": {},
            "toy/long/position-bias": {},
            "leakage": {"model": "at/the top"},
            "llm/jacobian/jacobian-smollm2-135m": {"model": "smollm2-135m"},
            "llm/code/sinks/sinks-smollm2-135m": {"model": "smollm2-135m"},
        }.items()
    ):
        put(tmp_path / f"{file}.nc", number, **attrs)
    put(tmp_path / "sinks" / FOLDER / "tiny-llama-sinks.nc", model="tiny-llama")  # unfinished work is left out,
    put(tmp_path / "toy/.unfinished-retrieval/x.nc")  # and hidden
    found = collect(tmp_path)
    values = {kind: {name: float(ds["x"]) for name, ds in found[kind].items()} for kind in found}
    assert values == {
        "jacobian": {"Qwen/Qwen2.5-0.5B": 2, "smollm2-135m": 9, "tiny-llama": 0, "tiny-llama-ntk": 1},
        "sinks": {"alone": 3},
        "steps": {"tiny-llama@step100": 4},
        "map": {"map": 5},
        "toy": {"retrieval": 6},
        "toy/long": {"position-bias": 7},
        "leakage": {"at/the top": 8},
        "code/sinks": {"smollm2-135m": 10},
    }
    assert list(found["jacobian"]) == ["Qwen/Qwen2.5-0.5B", "smollm2-135m", "tiny-llama", "tiny-llama-ntk"]
    assert found.files["map", "map"] == tmp_path / "theory/map.nc"  # the order above is not the files'
    assert set(found.files) == {(kind, name) for kind in found for name in found[kind]}


def test_what_is_not_there_is_empty_and_what_cannot_be_is_refused(tmp_path):
    found = collect(tmp_path)
    assert (len(found), dict(found["jacobian"])) == (0, {})
    with pytest.raises(InputError, match=r"nowhere' is no folder"):
        collect(tmp_path / "nowhere")
    for file in ("sinks", "sinks-tiny-llama"):
        put(tmp_path / f"sinks/{file}.nc", model="tiny-llama")
    with pytest.raises(InputError, match="both of 'tiny-llama'; remove"):
        collect(tmp_path)
    (tmp_path / "sinks/sinks.nc").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        collect(tmp_path)
