"""Parquet out of results: every element is there with its coordinates, types and provenance stay, all files or none."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from pyarrow import parquet

from probes.errors import InputError
from probes.results import export as exporting
from probes.results.export import export


@pytest.fixture
def result() -> xr.Dataset:
    random = np.random.default_rng(0)
    ds = xr.Dataset(
        {
            "sensitivity": (("prompt", "position"), random.random((2, 3), dtype=np.float32), {"units": "1/sqrt(d)"}),
            "tokens": (("position", "prompt"), random.integers(0, 9, (3, 2))),  # the other way round
            "alpha": (("layer",), np.array([0.5, np.nan])),
            "loss": ((), 2.5),
        },
        coords={"position": [0, 1, 2], "layer": ["a", "b"], "document": ("prompt", ["moby", "dick"])},
        attrs={"headwater": "0.1.0", "options": json.dumps({"method": "exact"}), "seed": np.int64(3)},
    )
    return ds


def test_every_element_has_a_row_with_its_coordinates(result, tmp_path):
    files = export(result, tmp_path / "new", "small")
    assert [file.name for file in files] == [
        "small-prompt-position.parquet",
        "small-layer.parquet",
        "small-scalars.parquet",
    ]
    assert sorted((tmp_path / "new").iterdir()) == sorted(files)
    frame = pd.read_parquet(files[0])
    assert list(frame) == ["prompt", "position", "sensitivity", "tokens", "document"]
    assert len(frame) == 6
    for row in frame.itertuples():
        at = result.isel(prompt=row.prompt).sel(position=row.position)
        assert row.sensitivity == at["sensitivity"].item()
        assert row.tokens == at["tokens"].item()
        assert row.document == at["document"].item()
    assert frame["sensitivity"].dtype == np.float32
    assert pd.read_parquet(files[1])["layer"].tolist() == ["a", "b"]
    assert np.isnan(pd.read_parquet(files[1])["alpha"][1])
    assert pd.read_parquet(files[2]).to_dict("list") == {"loss": [2.5]}


def test_files_say_what_made_them(result, tmp_path):
    for file in export(result, tmp_path, "small"):
        schema = parquet.read_schema(file)
        attributes = json.loads(schema.metadata[exporting.METADATA])
        assert attributes["headwater"] == "0.1.0"
        assert json.loads(attributes["options"]) == {"method": "exact"}
    schema = parquet.read_schema(tmp_path / "small-prompt-position.parquet")
    assert schema.field("sensitivity").metadata == {b"units": b"1/sqrt(d)"}


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
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"to": "csv"}, "format 'csv' does not exist; use parquet"),
        ({"name": "a/b"}, "name 'a/b' is no beginning"),
        ({"name": ""}, "name '' is no beginning"),
        ({"ds": xr.Dataset()}, "no variables"),
    ],
)
def test_bad_input_is_refused(result, tmp_path, given, said):
    with pytest.raises(InputError, match=said):
        export(**{"ds": result, "out": tmp_path, "name": "small", **given})


def test_a_file_in_place_of_the_folder_is_refused(result, tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InputError):
        export(result, tmp_path / "file", "small")
