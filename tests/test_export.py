"""Parquet out of results: every element is there with its coordinates, types and provenance stay, all files or none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from pyarrow import parquet

from probes.errors import InputError
from probes.results.export import METADATA, export


@pytest.fixture
def result() -> xr.Dataset:
    random = np.random.default_rng(0)
    return xr.Dataset(
        {
            "sensitivity": (("prompt", "position"), random.random((2, 3), dtype=np.float32), {"units": "1/sqrt(d)"}),
            "tokens": (("position", "prompt"), random.integers(0, 9, (3, 2))),  # the other way round
            "alpha": (("layer",), np.array([0.5, np.nan])),
            "loss": ((), 2.5),
        },
        coords={"position": [0, 1, 2], "layer": ["a", "b"], "document": ("prompt", ["moby", "dick"])},
        attrs={"headwater": "0.1.0", "options": json.dumps({"method": "exact"}), "seed": np.int64(3)},
    )


def test_every_element_has_a_row_with_its_coordinates(result, tmp_path):
    files = export(result, tmp_path / "new", "small")
    names = [f"small-{of}.parquet" for of in ("prompt-position", "layer", "scalars")]
    assert [file.name for file in files] == names
    assert sorted((tmp_path / "new").iterdir()) == sorted(files)
    frame = pd.read_parquet(files[0])
    assert list(frame) == ["prompt", "position", "sensitivity", "tokens", "document"]
    assert len(frame) == 6
    for row in frame.to_dict("records"):
        at = result.isel(prompt=row["prompt"]).sel(position=row["position"])
        assert all(row[name] == at[name].item() for name in ("sensitivity", "tokens", "document"))
    assert frame["sensitivity"].dtype == np.float32
    assert pd.read_parquet(files[1])["layer"].tolist() == ["a", "b"]
    assert np.isnan(pd.read_parquet(files[1])["alpha"][1])
    assert pd.read_parquet(files[2]).to_dict("list") == {"loss": [2.5]}
    for file in files:  # what made them
        attributes = json.loads(parquet.read_schema(file).metadata[METADATA])
        assert attributes["headwater"] == "0.1.0"
        assert json.loads(attributes["options"]) == {"method": "exact"}
    assert parquet.read_schema(files[0]).field("sensitivity").metadata == {b"units": b"1/sqrt(d)"}


def test_a_failure_leaves_no_file(result, tmp_path, monkeypatch):
    real, made = parquet.write_table, []

    def fails(table, path, **more):
        if made:
            raise OSError(28, "No space left on device")
        made.append(path)
        real(table, path, **more)

    monkeypatch.setattr(parquet, "write_table", fails)
    with pytest.raises(InputError, match="No space left"):
        export(result, tmp_path, "small")
    assert made
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused(result, tmp_path):
    for given, said in (
        ({"to": "csv"}, "format 'csv' does not exist; use parquet"),
        ({"name": "a/b"}, "name 'a/b' is no beginning"),
        ({"name": ""}, "name '' is no beginning"),
        ({"ds": xr.Dataset()}, "no variables"),
        ({"out": Path(__file__)}, "cannot write"),
    ):
        with pytest.raises(InputError, match=said):
            export(**{"ds": result, "out": tmp_path, "name": "small", **given})
