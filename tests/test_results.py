"""Results: what they say about their making, round trips through files, damage, joining, folders of them, and tables."""

import json
import math
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from bigram import bigram
from measured import refused

from probes.errors import InputError
from probes.results import dataset as results
from probes.results.dataset import combine, dataset, load, provenance, save
from probes.results.folder import collect
from probes.results.tables import interval, number, ranges
from probes.run.store import FOLDER

TOKENS = torch.arange(6).reshape(2, 3)


def run(condition: str, seed: int | None, **changes) -> xr.Dataset:
    """A small result, its values telling condition and seed apart."""
    number = {"pretrained": 100.0, "init": 200.0, "init-nope": 300.0}[condition] + (seed or 0)
    attrs = {"condition": condition, "weights": f"{condition}/{seed}", "config": "{}", "headwater": "0", "model": "m"}
    attrs |= {} if seed is None else {"seed": seed}
    variables = {
        "sensitivity": (("prompt", "position"), np.full((2, 3), number, dtype=np.float32), {"units": "1"}),
        "heads": (("position",), np.full(3, 7)),
    }
    return dataset(variables, tokens=changes.pop("tokens", TOKENS), attrs=attrs | changes)


def test_dataset_takes_tensors_and_numbers_its_dimensions():
    ds = dataset(
        {
            "sensitivity": (("prompt", "position"), torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)),
            "share": (("lag",), [0.5, 0.25], {"long_name": "share of the norm", "units": "1"}),
        },
        tokens=TOKENS,
        coords={"lag": [1, 4], "band": (("position",), ["early", "early", "late"])},
        attrs={"none": None, "table": {"a": [1]}},
    )
    assert ds["sensitivity"].dtype == np.float32
    assert ds["share"].attrs == {"long_name": "share of the norm", "units": "1"}
    expected = xr.DataArray(TOKENS.numpy(), {"prompt": [0, 1], "position": [0, 1, 2]}, ("prompt", "position"))
    xr.testing.assert_equal(ds["tokens"].drop_vars("band"), expected)
    assert ds.sel(lag=4)["share"].item() == 0.25
    assert ds["band"].dims == ("position",)
    assert ds.attrs == {"none": "null", "table": '{"a": [1]}'}
    assert "position" not in dataset({"share": (("lag",), [1.0])}).coords


def test_provenance_says_what_made_a_result():
    model = bigram(bos=True)
    found = provenance(model, TOKENS, method="sketch", products=32, chunk=None)
    assert (found["model"], found["condition"], found["revision"]) == ("bigram", "pretrained", "null")
    assert found["tokens_sha256"] == results.tokens_hash(TOKENS)
    assert json.loads(str(found["options"])) == {"method": "sketch", "products": 32, "chunk": None}
    assert str(found["torch"]) in (torch.__version__, torch.__version__.split("+")[0])
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    age = datetime.now(UTC) - datetime.fromisoformat(str(found["created"]))
    assert timedelta(seconds=-1) < age < timedelta(minutes=1)
    assert found["command"] == ""
    results.set_command(["jacobian", "a model", "--n", "4"])
    assert provenance(model, TOKENS)["command"] == "headwater jacobian 'a model' --n 4"
    twin = provenance(model.reinitialized(3), TOKENS)
    assert (twin["condition"], twin["weights"] == found["weights"]) == ("init", False)


def test_a_saved_result_comes_back_whole(tmp_path):
    ds = run("pretrained", None, number=3, nothing=None, text="é\nü", odd="d\0\udc80")
    ds["scalar"] = ((), 1.5)
    ds["mask"] = (("position",), np.array([True, False, True]))
    path = tmp_path / "new" / "result.nc"
    save(ds, path)
    back = load(path)
    path.unlink()  # it is in memory
    save(back, path)  # what was loaded can be saved again
    for one in (back, load(path)):
        xr.testing.assert_identical(one, ds)
    assert type(back.attrs["number"]) is int
    assert back.attrs["odd"] == "d\\x00\\udc80"  # as files can keep it
    assert back["mask"].dtype == bool
    assert [p.name for p in path.parent.iterdir()] == ["result.nc"]
    zeros = xr.Dataset({"x": (("a", "b"), np.zeros((300, 300)))}, attrs={"headwater": "0", "list": [1, 2]})
    save(zeros, path)
    assert zeros.attrs["list"] == [1, 2]  # as it was
    assert load(path).attrs["list"] == "[1, 2]"
    assert path.stat().st_size < 300 * 300 * 8 / 10


def test_files_that_are_no_results_are_refused_in_one_line(tmp_path):
    (tmp_path / "text.nc").write_text("no NetCDF")
    (tmp_path / "empty.nc").touch()
    xr.Dataset({"x": ("a", [1.0])}).to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    said = {"none.nc": "does not exist", ".": "is a folder; give a NetCDF file", "text.nc": "cannot be read"}
    for name, says in (said | {"empty.nc": "cannot be read", "other.nc": "was not written by headwater"}).items():
        with refused(says):
            load(tmp_path / name)


def test_combine_places_conditions_and_seeds():
    runs = [run("init", 5), run("pretrained", None), run("init-nope", 5), run("init", 2)]
    both = combine(runs)
    assert both["sensitivity"].dims == ("condition", "seed", "prompt", "position")
    assert both["sensitivity"].dtype == np.float32
    assert both["sensitivity"].attrs == {"units": "1"}
    assert both["condition"].values.tolist() == ["pretrained", "init", "init-nope"]
    assert both["seed"].values.tolist() == [2, 5]
    first = both["sensitivity"].isel(prompt=0, position=0).values
    np.testing.assert_array_equal(first, [[100, np.nan], [202, 205], [np.nan, 305]])
    assert both["heads"].sel(condition="init", seed=2).values.tolist() == [7, 7, 7]
    assert both["tokens"].dims == ("prompt", "position")
    assert both["weights"].values.tolist() == [["pretrained/None", ""], ["init/2", "init/5"], ["", "init-nope/5"]]
    assert both.attrs == {"config": "{}", "headwater": "0", "model": "m"}


def test_combined_results_survive_a_file(tmp_path):
    both = combine([run("pretrained", None), run("init", 0, engine="this"), run("init", 1, engine="that")])
    assert both["engine"].values.tolist() == [["", ""], ["this", "that"]]
    save(both, tmp_path / "both.nc")
    xr.testing.assert_equal(load(tmp_path / "both.nc"), both)
    assert load(tmp_path / "both.nc").attrs == both.attrs
    assert combine([run("pretrained", None)])["seed"].values.tolist() == [0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: run("init", 1, tokens=TOKENS + 1), "condition 'init', seed 1 has other tokens than the first result"),
        (lambda: run("init", 0), "two results of condition 'init', seed 0"),
        (lambda: run("init", None), "condition 'init' has seed None; set its attribute 'seed'"),
        (lambda: run("init", 1).assign_coords(position=[1, 2, 3]), "other coordinates"),
        (lambda: run("init", 1).drop_attrs(), "no attribute 'condition'"),
    ],
)
def test_combine_refuses(other, message):
    with pytest.raises(InputError, match=message):
        combine([run("init", 0), other()])
    with pytest.raises(InputError, match="no results to combine"):
        combine([])


def test_dtypes_say_what_a_gguf_file_stored_but_for_fresh_weights():
    file = '{"types": {"Q4_0": 3, "F32": 1, "BF16": 1}}'
    for condition, said in (("pretrained", "float32 dequantized from Q4_0"), ("init", "float32")):
        ds = xr.Dataset(attrs={"condition": condition, "dtype": "float32", "weights_file": file})
        assert results.number_types(ds) == [said]


def put(path: Path, value: float = 0.0, **attrs: str) -> None:
    save(xr.Dataset({"x": ((), np.float64(value))}, attrs={"headwater": "0", **attrs}), path)


def test_kinds_and_names(tmp_path):
    for n, (file, attrs) in enumerate(
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
            "leakage-ape": {"model": "ape", "measure": "leakage"},  # of several models, written to the root itself
            "llm/jacobian/jacobian-smollm2-135m": {"model": "smollm2-135m"},
            "llm/code/sinks/sinks-smollm2-135m": {"model": "smollm2-135m"},
        }.items()
    ):
        put(tmp_path / f"{file}.nc", n, **attrs)
    put(tmp_path / "sinks" / FOLDER / "tiny-llama-sinks.nc", model="tiny-llama")  # unfinished work is left out,
    put(tmp_path / "toy/.unfinished-retrieval/x.nc")  # and hidden
    found = collect(tmp_path)
    values = {kind: {name: float(ds["x"]) for name, ds in found[kind].items()} for kind in found}
    assert values == {
        "jacobian": {"Qwen/Qwen2.5-0.5B": 2, "smollm2-135m": 10, "tiny-llama": 0, "tiny-llama-ntk": 1},
        "sinks": {"alone": 3},
        "steps": {"tiny-llama@step100": 4},
        "map": {"map": 5},
        "toy": {"retrieval": 6},
        "toy/long": {"position-bias": 7},
        "leakage": {"ape": 9, "at/the top": 8},
        "code/sinks": {"smollm2-135m": 11},
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


def test_numbers_as_text():
    said = {(): "", (4,): "4", (3, 4): "3-4", (3, 4, 5, 9, 12, 13): "3-5, 9, 12-13", (0, 2, 4): "0, 2, 4"}
    assert {numbers: ranges(numbers) for numbers in said} == said
    values = (0.12345, -2, math.nan, np.float32(1e-7), 0, 999.6, -25_123, 1.2e6)
    assert [number(value) for value in values] == ["0.123", "-2", "-", "1e-07", "0", "1,000", "-25,100", "1.2e+06"]
    assert number(-0.125, ".0%") == "-12%"
    assert interval(0.5, 0.25, 0.75) == "0.5 [0.25, 0.75]"
    assert interval(-0.5, -1.25, 0.75, form=".0%") == "-50% [-125%, 75%]"
    assert interval(0.5) == interval(0.5, math.nan, 0.75) == "0.5"
    assert interval(math.nan, 0.25, 0.75) == "-"
    for low, high in ((-math.inf, math.inf), (-math.inf, 0.3), (0.1, math.inf)):
        assert interval(0.17, low, high, form=".0%") == "?"
