"""Surveys: one probe on several models, what they write, how they go on, what they refuse before they begin."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import kept
import numpy as np
import pytest
import torch
import xarray as xr

import probes
from probes.cli.console import WIDEST, print_report
from probes.data.prompts import prompts
from probes.errors import InputError
from probes.measures.leakage import CELLS, PARTS, SOURCES
from probes.measures.roles import role_names
from probes.results.dataset import dataset, provenance, tokens_hash
from probes.results.tables import Report, Table, interval, markdown, number, ranges
from probes.studies.reports import bos_report, leakage_report, sinks_report, trajectory_report
from probes.studies.survey import PROBES, Probe, survey

LENGTH = 24
COMMON: dict[str, Any] = {"prompts": 4, "length": LENGTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, "ape" (with BOS) and "bee" (without), "ant" of a small vocabulary, and a text for them."""
    made = tmp_path_factory.mktemp("models")
    families.checkpoints(made, ape=("llama", "prepended"), bee=("gpt2", "end"))
    config = families.FAMILIES["llama"]()
    config.vocab_size = 100
    families.build(config).save_pretrained(made / "ant")
    families.tokenizer().save_pretrained(made / "ant")
    return made


def files(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*"))


class Stop(Exception):
    """Pulls the plug."""


def stopping_at(label: str) -> Callable[[str, float, float], None]:
    def advance(running: str, done: float, total: float) -> None:
        if running == label:
            raise Stop

    return advance


# ------------------------------------------------------------------------------------------------ a probe of our own


def size(model: Any, tokens: Any, *, scale: float = 1.0, shift: Any = 0, progress: Any = None) -> xr.Dataset:
    """Mean size of the last stream, times `scale`, with tokens moved by `shift` ids."""
    if scale <= 0:
        raise InputError(f"scale={scale} is no scale; give more than 0")
    if int(shift) + int(tokens.max()) >= model.spec.vocabulary:
        raise InputError(f"shift={shift} leaves the vocabulary of {model.identity.name}; give less")
    norms = []
    for done, prompt in enumerate(tokens):
        norms.append(scale * model.trace(model.embed(prompt[None] + int(shift))).residual[-1][0].norm(dim=-1))
        if progress is not None:
            progress(done + 1, len(tokens))
    return dataset(
        {"norm": (("prompt", "position"), torch.stack(norms)), "mean": ((), torch.stack(norms).mean())},
        tokens=tokens,
        attrs=provenance(model, tokens, scale=scale, shift=shift),
    )


def draw(results: Any, *, path: Path) -> None:
    for ending in (".png", ".svg"):
        path.with_suffix(ending).write_text(", ".join(results), encoding="utf-8")


def told_of(results: Any, *, digits: int = 3) -> Report:
    rows = [[name, f"{float(np.mean(ds['mean'])):.{digits}f}"] for name, ds in results.items()]
    first = Table("Names", ("model",), [[name] for name in results])
    return Report("Sizes", "Mean norms.", [first, Table("Means", ("model", "mean"), rows)], ["one", "two"])


SIZE = Probe("size", size, draw, told_of)
SHIFTED = Probe("size", size, draw, told_of, along="shift")


def run(folder: Path, out: Path, names: str = "ape", probe: Any = SIZE, **given: Any) -> dict[str, xr.Dataset]:
    text = {"text": str(folder / "text.txt")} if "text" not in given else {}
    sources = [str(folder / name) for name in names.split()]
    return survey(sources, out, probe, **{**COMMON, **text, **given})


@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_files_and_their_content(folder, tmp_path, backend):
    (result,) = run(folder, tmp_path, options={"scale": 2.0}, reporting={"digits": 1}, backend=backend).values()
    assert files(tmp_path) == ["size.md", "size.nc", "size.png", "size.svg"]
    xr.testing.assert_identical(probes.load_result(tmp_path / "size.nc"), result)
    model = probes.load(str(folder / "ape"), backend)
    tokens = prompts(model, n=4, length=LENGTH, text=folder / "text.txt")
    own = size(model, tokens, scale=2.0)
    np.testing.assert_array_equal(result["norm"], own["norm"])
    np.testing.assert_array_equal(result["tokens"], tokens)
    assert result.attrs["tokens_sha256"] == tokens_hash(tokens)
    assert result.attrs["backend"] == backend
    assert result.attrs["text_source"] == f"text '{folder / 'text.txt'}'"
    assert (result.attrs["first_policy"], result.attrs["first_id"], result.attrs["prompts_seed"]) == ("bos", 0, 0)
    page = (tmp_path / "size.md").read_text(encoding="utf-8").splitlines()
    assert page[0] == "# Sizes"
    assert page[-3:] == ["| model | mean |", "| --- | --- |", f"| ape | {float(own['mean']):.1f} |"]
    assert "| model |" in page
    assert "- two" in page


def test_several_models_and_values(folder, tmp_path):
    results = run(folder, tmp_path, "ape bee", SHIFTED, options={"shift": [5, "7"]}, seed=3)
    assert files(tmp_path) == ["size-ape.nc", "size-bee.nc", "size.md", "size.png", "size.svg"]
    assert (tmp_path / "size.png").read_text(encoding="utf-8") == "ape, bee"
    for name, ds in results.items():
        xr.testing.assert_identical(probes.load_result(tmp_path / f"size-{name}.nc"), ds)
        assert ds["norm"].dims == ("shift", "prompt", "position")
        assert ds["mean"].dims == ("shift",)
        assert ds["tokens"].dims == ("prompt", "position")
        assert list(ds["shift"].values) == ["5", "7"]
        assert json.loads(ds.attrs["options"]) == {"scale": 1.0, "shift": ["5", "7"]}
        model = probes.load(str(folder / name))
        for shift in (5, 7):
            own = size(model, torch.tensor(ds["tokens"].values), shift=shift)
            np.testing.assert_array_equal(ds["norm"].sel(shift=str(shift)), own["norm"])
    assert results["bee"].attrs["first_policy"] == "none"  # its BOS is its end token


@pytest.mark.slow
def test_what_values_share_is_measured_once_per_model(folder, tmp_path):
    """And not at all for a single value, nor for a model whose units were all measured before."""
    made, told = [], []

    def share(model: Any, tokens: Any, *, scale: float = 1.0, progress: Any) -> float:
        made.append(model.identity.name)
        progress(1, 1)
        return 10 * scale

    def measure(model: Any, tokens: Any, *, base: float = 0.0, **given: Any) -> xr.Dataset:
        return size(model, tokens, **given).assign(base=base)

    probe = Probe("size", measure, draw, told_of, along="shift", shared=("base", share))
    options = {"shift": [5, 7], "scale": 2.0}
    results = run(folder, tmp_path, "ape bee", probe, options=options, advance=lambda *said: told.append(said))
    assert made == ["ape", "bee"]
    assert [ds["base"].values.tolist() for ds in results.values()] == [[20.0, 20.0]] * 2
    assert {said[0] for said in told if said[0].endswith("base")} == {"ape size 5 base", "bee size 5 base"}
    (alone,) = run(folder, tmp_path / "alone", "ape", probe, options={"shift": 5}).values()
    assert float(alone["base"]) == 0
    with pytest.raises(Stop):
        run(folder, tmp_path / "cut", "ape bee", probe, options=options, advance=stopping_at("bee size 7"))
    made.clear()
    run(folder, tmp_path / "cut", "ape bee", probe, options=options)
    assert made == ["bee"]


def test_one_value_is_no_dimension(folder, tmp_path):
    (result,) = run(folder, tmp_path, "ape", SHIFTED, options={"shift": [5]}).values()
    assert result["norm"].dims == ("prompt", "position")
    (same,) = run(folder, tmp_path, "ape", SHIFTED, options={"shift": 5}).values()
    np.testing.assert_array_equal(result["norm"], same["norm"])


def test_progress(folder, tmp_path):
    heard: dict[str, list[tuple[float, float]]] = {}
    told: list[str] = []
    run(
        folder,
        tmp_path,
        "ape bee",
        SHIFTED,
        options={"shift": [5, 7]},
        advance=lambda label, *step: heard.setdefault(label, []).append(step),
        told=told.append,
    )
    assert list(heard) == ["ape size 5", "ape size 7", "bee size 5", "bee size 7"]
    assert all(steps == [(1.0, 4.0), (2.0, 4.0), (3.0, 4.0), (4.0, 4.0)] for steps in heard.values())
    assert told == []


# -------------------------------------------------------------------------------------------------------- going on


@pytest.mark.slow
def test_an_interrupted_survey_goes_on(folder, tmp_path):
    def given(out: Path, **more: Any) -> dict[str, xr.Dataset]:
        return run(folder, out, "ape bee", SHIFTED, options={"shift": [5, 7]}, **more)

    whole = given(tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(Stop):
        given(out, advance=stopping_at("bee size 5"))
    made = kept.written(out)
    assert [label for label, _ in made] == ["ape size 5", "ape size 7"]
    heard: list[tuple[str, float, float]] = []
    told: list[str] = []

    def advance(*step: Any) -> None:
        heard.append(step)
        assert made.items() <= kept.written(out).items()  # not written again

    again = given(out, advance=advance, told=told.append)
    assert told == [f"going on with '{out / 'unfinished'}': 2 of 4 are done (ape size 5, ape size 7)"]
    assert heard[:3] == [("ape size 5", 1.0, 1.0), ("ape size 7", 1.0, 1.0), ("bee size 5", 1.0, 4.0)]
    assert files(out) == files(tmp_path / "whole")
    for name, ds in again.items():
        for variable in ds.variables:
            assert ds[variable].values.tobytes() == whole[name][variable].values.tobytes(), variable
        found, expected = ({k: v for k, v in one.attrs.items() if k != "created"} for one in (ds, whole[name]))
        assert found == expected


@pytest.mark.slow
def test_a_killed_process_goes_on(folder, surveyed, tmp_path):
    """Between two models the process is killed outright; nothing is cleaned up."""
    out = tmp_path / "out"
    program = f"""
import os, signal
from probes.studies.survey import survey

def advance(label, done, total):
    if label.startswith("bee"):
        os.kill(os.getpid(), signal.SIGKILL)

survey({[str(folder / name) for name in ("ape", "bee")]!r}, {str(out)!r}, "trajectory",
       prompts=4, length={LENGTH}, text={str(folder / "text.txt")!r}, options={{"starts": 8}}, advance=advance)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == -9
    assert files(out) == ["unfinished", "unfinished/trajectory-0.sqlite"]
    before = kept.result(out, "trajectory", "ape trajectory")
    told: list[str] = []
    undrawn = replace(PROBES["trajectory"], figure=draw)
    results = run(folder, out, "ape bee", undrawn, options={"starts": 8}, told=told.append)
    assert len(told) == 2  # what is there, and what the other model will take
    assert told[0].startswith("going on with")
    assert told[1].startswith("bee: about ")
    _, whole = surveyed("trajectory")
    for name, ds in results.items():
        for variable in ds.variables:
            assert ds[variable].values.tobytes() == whole[name][variable].values.tobytes(), variable
    np.testing.assert_array_equal(results["ape"]["norm"], before["norm"])


@pytest.fixture(scope="module")
def half(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a survey interrupted after "ape"."""
    out = tmp_path_factory.mktemp("half")
    with pytest.raises(Stop):
        run(folder, out, "ape bee", options={"scale": 2.0}, advance=stopping_at("bee size"))
    return out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"options": {"scale": 3.0}}, "scale"),
        ({"options": {}}, "scale"),
        ({"seed": 1}, "seed"),
        ({"prompts": 5}, "prompts"),
        ({"length": 20}, "length"),
        ({"first": "none"}, "first"),
        ({"dtype": "float64"}, "weights, dtype"),
        ({"backend": "transformer_lens"}, "backend"),
    ],
)
def test_an_unfinished_survey_with_other_settings_is_refused(folder, half, changes, says):
    (file,) = kept.files(half)
    before = file.read_bytes()

    def never(*_: Any) -> None:
        raise AssertionError("something was measured")

    with pytest.raises(InputError) as raised:  # the model that was not begun stands first: nothing of it is measured
        run(folder, half, "bee ape", **{"options": {"scale": 2.0}, "advance": never, **changes})
    assert f"'{half}' holds an unfinished study with other {says}; " in str(raised.value)
    assert "\n" not in str(raised.value)
    assert file.read_bytes() == before


def test_figures_that_fail_cost_no_measurement(folder, tmp_path):
    def fail(*_: Any, **__: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        run(folder, tmp_path, probe=Probe("size", size, fail, told_of))
    assert kept.units(tmp_path) == {"ape size": True}


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("names", "probe", "changes", "says"),
    [
        ("", SIZE, {}, "no model given"),
        ("ape gone", SIZE, {}, "gone' does not exist"),
        ("ape ape", SIZE, {}, "are both called 'ape'"),
        ("ape", SIZE, {"length": 129}, "length=129 is more than the 128 positions of ape"),
        ("ape", SIZE, {"length": 1}, "length=1 is too short"),
        ("ape", SIZE, {"prompts": 0}, "n=0 prompts"),
        ("ape", SIZE, {"seed": -1}, "seed=-1"),
        ("ape bee", SIZE, {"first": "bos"}, "first=bos, but the tokenizer of bee never puts"),
        ("ape", SIZE, {"first": 200}, "first token id 200"),
        ("ape", SIZE, {"text": "gone.txt"}, "'gone.txt' does not exist"),
        ("ape", SIZE, {"dataset": "a/b"}, "both text"),
        ("ape", SIZE, {"device": "tpu"}, "device 'tpu'"),
        ("ape", SIZE, {"options": {"scale": -1.0}}, "scale=-1.0"),
        ("ape ant", SIZE, {"options": {"shift": 10}}, "shift=10 leaves the vocabulary of ant"),
        ("ape", SHIFTED, {"options": {"shift": []}}, "names none or one twice"),
        ("ape", SHIFTED, {"options": {"shift": [1, 2, "1"]}}, "shift '1,2,1' names none or one twice"),
        ("ape", SHIFTED, {"options": {"shift": [1, 99]}}, "shift=99 leaves the vocabulary of ape"),
        ("ape", "sinks", {"options": {"keys": (0, LENGTH)}}, f"key {LENGTH} is outside the prompts"),
        ("ape ant", "sinks", {"options": {"reacts": 110}}, "110 is outside the vocabulary of ant"),
        ("ape", "sinks", {"options": {"threshold": 1.5}}, "threshold=1.5"),
        ("ape ant", "trajectory", {"options": {"starts": 110}}, "starts=110"),
        ("ape", "leakage", {"options": {"bands": ((9, LENGTH),)}}, f"band 9-{LENGTH} does not fit"),
        ("ape", "leakage", {"prompts": 3}, "3 prompts cannot be split"),
        ("ape", "leakage", {"options": {"bootstrap": -1}}, "bootstrap=-1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(folder, tmp_path, names, probe, changes, says):
    def never(*_: Any) -> None:
        raise AssertionError("something was measured")

    with pytest.raises(InputError) as raised:
        run(folder, tmp_path / "below" / "out", names, probe, **{"advance": never, **changes})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == []


def test_outputs_that_cannot_be_are_refused_at_once(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is no folder"):
        run(folder, tmp_path / "file" / "out")
    with pytest.raises(InputError, match="cannot write to"):
        run(folder, tmp_path / ("a" * 300))
    for name in ("size.nc", "size.svg", "size.md"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(InputError, match=f"{name}' is a folder"):
            run(folder, tmp_path / name, advance=stopping_at("ape size"))


# ------------------------------------------------------------------------------------------------- the probes here

SMALL: dict[str, dict[str, Any]] = {
    "sinks": {"reacts": "mean", "pictures": 1},
    "trajectory": {"starts": 8},
    "leakage": {"bootstrap": 20, "lags": (1, 2)},
    "bos-swap": {"replacement": ["mean", 17], "bootstrap": 20, "lags": (1, 2), "profile_prompts": 1, "products": 8},
}


@pytest.fixture(scope="module")
def surveyed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """By probe: its folder and results, for both models; measured when first asked for."""
    done: dict[str, tuple[Path, Any]] = {}

    def get(probe: str) -> tuple[Path, Any]:
        if probe not in done:
            out = tmp_path_factory.mktemp(probe)
            done[probe] = out, run(folder, out, "ape bee", probe, options=SMALL[probe])
        return done[probe]

    return get


@pytest.mark.parametrize("probe", list(PROBES))
def test_every_probe_writes_what_it_says(surveyed, probe):
    out, results = surveyed(probe)
    endings = ["-ape.nc", "-bee.nc", ".md", ".png", ".svg"]
    assert files(out) == [f"{probe}{ending}" for ending in endings]
    assert (out / f"{probe}.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (out / f"{probe}.svg").read_text(encoding="utf-8")
    assert (out / f"{probe}.png").stat().st_size < 300_000
    for name, ds in results.items():
        xr.testing.assert_identical(probes.load_result(out / f"{probe}-{name}.nc"), ds)
    report = PROBES[probe].report(results)
    page = (out / f"{probe}.md").read_text(encoding="utf-8")
    for table in report.tables:
        assert {row[0] for row in table.rows} == {"ape", "bee"}
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert all("nan" not in cell for row in table.rows for cell in row)
        for row in table.rows:
            assert f"| {' | '.join(row)} |\n" in page
    for line in report.lines:
        assert f"- {line}\n" in page


@pytest.mark.slow
@pytest.mark.parametrize("probe", list(PROBES))
def test_every_probe_runs_on_the_other_backend(folder, surveyed, tmp_path, probe):
    _, results = surveyed(probe)
    options = SMALL[probe] | ({"replacement": ["mean"]} if probe == "bos-swap" else {})
    undrawn = replace(PROBES[probe], figure=draw)
    (lens,) = run(folder, tmp_path, "ape", undrawn, options=options, backend="transformer_lens").values()
    assert lens.attrs["backend"] == "transformer_lens"
    expected = results["ape"].sel(replacement="mean") if probe == "bos-swap" else results["ape"]
    name = {"sinks": "alpha", "trajectory": "norm", "leakage": "log_source", "bos-swap": "removed"}[probe]
    np.testing.assert_allclose(lens[name], expected[name], rtol=1e-2, atol=1e-3)


def test_report_of_sinks(surveyed):
    _, results = surveyed("sinks")
    report = sinks_report(results, top=2)
    rates, heads = report.tables
    for name, ds in results.items():
        rows = [row for row in rates.rows if row[0] == name]
        assert [row[1] for row in rows] == [str(key) for key in range(8)]
        assert rows[0][2] == f"{float(ds['sink_rate_of_model'][0]):.4f}"
        assert rows[0][3] == f"{float(ds['over_tau_of_model'][0]):.4f}"
        assert rows[0][4] == f"{float(ds['alpha'].sel(key=0).mean()):.4f}"
        assert rows[0][5] == f"{sum(1 / i for i in range(1, LENGTH + 1)) / LENGTH:.4f}"  # no windows here
        scores = ds["written"].values
        layer, head = np.unravel_index(scores.argmax(), scores.shape)
        chosen = [row for row in heads.rows if row[0] == name]
        assert len(chosen) == 2
        assert chosen[0][1:4] == [
            str(layer),
            str(head),
            str(role_names(ds)[layer, head]) + "?" * (not ds["role_sure"].values[layer, head]),
        ]
        (line,) = [line for line in report.lines if line.startswith(f"{name}: ") and " by rule: " in line]
        assert f"reads > 0.3: {int((ds['reads'] > 0.3).sum())}," in line
        assert line.endswith(f"(attends and reads): {int(((ds['reads'] > 0.3) & (ds['attends'] > 0.3)).sum())}")
    without = {name: ds.drop_vars("reacts") for name, ds in results.items()}
    assert not any("reacts >" in line for line in sinks_report(without).lines)
    with pytest.raises(InputError, match="top=-1"):
        sinks_report(results, top=-1)


@pytest.mark.slow
def test_report_of_trajectories(surveyed):
    _, results = surveyed("trajectory")
    report = trajectory_report(results)
    (table,) = report.tables
    assert len(table.rows) == 3 * (families.BLOCKS + 1)  # two beginnings with BOS, one without
    assert "ape: the stream at position 0 is the same, bit for bit, under other text behind it; " in report.lines[0]
    moved = results["ape"].copy(deep=True)
    moved["later_difference"][0, 1] = 0.25
    assert "changes by up to 0.25 under other text" in trajectory_report({"ape": moved}).lines[0]
    course = np.array([0.1, 0.995, 0.999, 0.9995])[: families.BLOCKS + 1]
    for values, says in (
        (course, "above 0.99 from layer 1 on"),
        (np.where(course < 0.5, np.nan, course), "above 0.99 from layer 1 on, not known at layer 0"),
        (np.where(course > 0.5, np.nan, course), "not above 0.99 where it is known, not known at layers 1-3"),
        (np.full_like(course, np.nan), "not known at any layer"),
        (course / 2, "never above 0.99"),
    ):
        moved["cosine"].loc[{"place": "position 0"}] = values
        line = trajectory_report({"ape": moved}).lines[1]
        assert line.endswith(f" before the final norm, {says}")
        assert "nan" not in line


@pytest.mark.slow
def test_report_of_leakage(surveyed):
    _, results = surveyed("leakage")
    report = leakage_report(results)
    logs, weights, blocks = report.tables[:4], report.tables[4], report.tables[5:]
    assert [[row[:2] for row in table.rows] for table in logs] == [[["ape", "3-23"], ["bee", "3-23"]]] * 4
    assert not any("-" in row[2:] for table in (logs[0], logs[3]) for row in table.rows)
    assert [row[:3] for row in weights.rows] == [
        [name, "3-23", counted] for name in ("ape", "bee") for counted in ("denominator", "terms")
    ]
    assert [len(table.rows) for table in blocks] == [2 * families.BLOCKS] * 3
    total = 1e6 * results["ape"]["weight_form_by_block"].sel(cell="both").isel(band=0, layer=0).item()
    assert float(blocks[2].rows[0][2].replace(",", "")) == pytest.approx(total, rel=1e-2)
    lines = [line for line in report.lines if "NOT 0" not in line and "V(K)" not in line]
    for form, said in (("steady", ""), ("log", ", the constant sink left in")):
        residual = {name: float(ds[f"{form}_stream_of_model"].isel(band=0)) for name, ds in results.items()}
        (order, depth), lines = lines[:2], lines[2:]
        low, high = sorted(residual, key=residual.__getitem__)
        assert order.startswith(f"residual component{said}: {low} {residual[low]:.3g} [")
        assert f"] < {high} {residual[high]:.3g} [" in order
        assert depth.startswith("its rank correlation with depth: ape ")
    nulls = lines
    assert [line.split(":")[0] for line in nulls] == ["ape", "bee"]
    assert all("null check, should be 0: log form with both sources removed " in line for line in nulls)
    assert all(" in 3-23" in line for line in nulls)


@pytest.mark.slow
def test_report_of_swaps(surveyed):
    _, results = surveyed("bos-swap")
    removed, left_in, effects = bos_report(results).tables
    bands = [str(band) for band in results["ape"]["band"].values]
    assert [row[:3] for row in removed.rows] == [
        [name, replacement, band] for name in ("ape", "bee") for replacement in ("mean", "17") for band in bands
    ]
    single = results["ape"].sel(replacement="17", drop=True).assign_attrs(replacement=17)
    alone = bos_report({"ape": single})
    for table, whole in zip(alone.tables, (removed, left_in), strict=False):
        assert table.rows == [row for row in whole.rows if row[:2] == ["ape", "17"]]
    old = bos_report({"ape": single.drop_vars([name for name in single if "steady" in str(name)])}).tables
    assert all(row[3:] == ["-"] * 3 for row in old[0].rows)  # made before the constant sink was told apart
    assert old[1].rows == alone.tables[1].rows != alone.tables[0].rows
    (row,) = alone.tables[2].rows
    assert row == next(row for row in effects.rows if row[:2] == ["ape", "17"])
    shown = dict(zip(effects.columns[2:4], row[2:4], strict=True))
    assert shown["sink rate"] == f"{float(single['sink_rate_before'].mean()):.3f}"
    assert float(row[5]) - float(row[4]) == pytest.approx(float(single["loss_change_of_model"]), abs=1.1e-3)
    before, after = (single[f"sensitivity_{when}"].values[1:] for when in ("before", "after"))
    assert len(set(effects.columns)) == len(effects.columns)
    assert row[7] == f"{np.mean(np.abs(after / before - 1)):.1%}"


def constructed(residual: list[float], mask: float = 0.1, spread: float = 0.05) -> xr.Dataset:
    """A result of leakage with a given residual component per block, its interval `spread` to both sides, one band."""
    at = np.array(residual)
    source = np.stack([np.full(len(at), mask), at, np.zeros(len(at))])[..., None]
    variables: dict[str, tuple[Any, ...]] = {}

    def add(name: str, dims: tuple[str, ...], values: np.ndarray) -> None:
        by_block, of_model = (*dims, "layer", "band"), (*dims, "band")
        for level, at_level, found in (("by_block", by_block, values), ("of_model", of_model, values.mean(-2))):
            for end, shift in (("", 0.0), ("_low", -spread), ("_high", spread)):
                variables[f"{name}_{level}{end}"] = (at_level, found + shift)

    for form, (entry, names) in {
        "log": ("part", PARTS),
        "weight": ("cell", CELLS),
        "terms": ("cell", CELLS),
    }.items():
        total = np.concatenate([source.sum(0, keepdims=True), np.zeros((len(names) - 1, len(at), 1))])
        add(f"{form}_form", (entry,), total)
        add(f"{form}_source", ("source",), source)
        share = source.mean(1) / source.mean(1).sum(0)
        for end, shift in (("", 0.0), ("_low", -spread), ("_high", spread)):
            variables[f"{form}_share_of_model{end}"] = (("source", "band"), share + shift)
    add("log_stream", (), at[:, None])
    variables["log_sink_by_block"] = (("layer", "band"), np.zeros((len(at), 1)))
    for name in ("log_noise", "log_rest"):
        add(name, (), np.zeros((len(at), 1)))
    variables["log_neither"] = (("layer", "head", "band"), np.zeros((len(at), 1, 1)))
    coords = {
        "part": list(PARTS),
        "cell": list(CELLS),
        "source": list(SOURCES),
        "layer": range(len(at)),
        "band": ["9-31"],
    }
    attrs = {"backend": "transformers", "dtype": "float32", "device": "cpu"}
    return dataset(variables, coords=coords, attrs=attrs, tokens=torch.zeros(4, 40, dtype=torch.int64))


def test_ruscio_s_order_is_computed():
    holds = {
        "tiny-llama": constructed([0.2, 0.3, 0.2]),
        "tiny-llama-ntk": constructed([0.02, 0.02, 0.01]),
        "tiny-mistral-window": constructed([0.3, 0.4, 0.5]),
    }
    said = "sliding window above standard RoPE: yes; NTK scaling below the sliding window: yes"
    lines = leakage_report(holds).lines
    assert lines[0] == (
        "residual component, the constant sink left in: tiny-llama-ntk 0.0167 [-0.0333, 0.0667] "
        "< tiny-llama 0.233 [0.183, 0.283] < tiny-mistral-window 0.4 [0.35, 0.45]"
    )
    assert lines[1] == (
        "its rank correlation with depth: tiny-llama 0.00, tiny-llama-ntk -0.87, tiny-mistral-window 1.00"
    )
    assert lines[2] == (
        f"[Ruscio]'s order holds: NTK scaling below standard RoPE: yes; {said}; "
        "growing with depth under the sliding window: yes"
    )
    fails = holds | {"tiny-mistral-window": constructed([0.5, 0.4, 0.3])}
    assert leakage_report(fails).lines[2] == (
        f"[Ruscio]'s order does not hold: NTK scaling below standard RoPE: yes; {said}; "
        "growing with depth under the sliding window: no"
    )
    turned = holds | {"tiny-llama-ntk": constructed([0.5, 0.5, 0.5])}
    assert "NTK scaling below standard RoPE: no;" in leakage_report(turned).lines[2]
    vague = holds | {"tiny-llama-ntk": constructed([0.2, 0.2, 0.2])}
    assert (
        leakage_report(vague)
        .lines[2]
        .startswith("[Ruscio]'s order is not decided: NTK scaling below standard RoPE: not told apart; ")
    )
    ends = {  # neighbours overlap, NTK scaling and the window do not, the wrong way round
        "tiny-llama-ntk": constructed([0.38, 0.38, 0.4]),
        "tiny-llama": constructed([0.3, 0.3, 0.3]),
        "tiny-mistral-window": constructed([0.2, 0.22, 0.24]),
    }
    (line,) = [line for line in leakage_report(ends).lines if "Ruscio" in line]
    assert line == (
        "[Ruscio]'s order does not hold: NTK scaling below standard RoPE: not told apart; sliding window above standard "
        "RoPE: not told apart; NTK scaling below the sliding window: no; growing with depth under the sliding window: yes"
    )
    del fails["tiny-llama"]
    assert not any("Ruscio" in line for line in leakage_report(fails).lines)


def test_shares_of_nothing_are_not_printed():
    def cells_of(ds: xr.Dataset) -> list[str]:
        """Total, shares and component of a result without what newer ones have beside them."""
        total, steady, left_in = (table.rows[0] for table in leakage_report({"ape": ds}).tables[:3])
        assert steady[2:] == total[3:] == ["-"] * 3
        return [*total[:3], *left_in[2:]]

    cells = {name: cells_of(ds) for name, ds in {
        "clear": constructed([0.0, 0.2]),
        "none": constructed([0.0, -0.18]),  # 0.01 in all, -0.04 to 0.06
        "negative": constructed([0.0, -1.0]),
        "of noise": constructed([0.1, 0.1]),  # block 0 has a residual component
        "below": constructed([-0.06, 0.26]),
    }.items()}  # fmt: skip
    assert cells["clear"] == [
        "ape", "9-31", "0.2 [0.15, 0.25]", "50% [45%, 55%]", "50% [45%, 55%]", "0.1 [0.05, 0.15]"
    ]  # fmt: skip
    for failing in ("of noise", "below"):
        assert cells[failing][2:] == ["0.2 [0.15, 0.25]", "-", "-", "0.1 [0.05, 0.15]"]
    assert cells["none"][2:5] == ["0.01 [-0.04, 0.06]", "-", "-"]
    assert cells["negative"][2:5] == ["-0.4 [-0.45, -0.35]", "-", "-"]
    single = leakage_report({"ape": constructed([0.1])})
    assert single.lines[1].endswith("ape -")  # one block has no depth


def test_tables_of_many_blocks_are_narrow_enough_to_read(capsys):
    report = leakage_report({"SmolLM2-135M-Instruct": constructed(np.linspace(-0.512, 0.4321, 30).tolist())})
    for table in report.tables:
        assert max(map(len, markdown(table))) <= WIDEST
    print_report(report)
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith((" ", "─"))]
    assert max(map(len, rows)) <= WIDEST
    assert printed.index("Blocks, weight form") < printed.index("left in: SmolLM2")  # rows fill a screen


def test_neighbours_are_given_as_ranges():
    said = {(): "", (4,): "4", (3, 4): "3-4", (3, 4, 5, 9, 12, 13): "3-5, 9, 12-13", (0, 2, 4): "0, 2, 4"}
    assert {numbers: ranges(numbers) for numbers in said} == said


def test_failing_null_checks_are_named_band_by_band():
    sound, noisy = constructed([0.04, 0.2]), constructed([0.06, 0.2]).assign_coords(band=["128-255"])
    both = xr.concat([sound, noisy], "band", data_vars="minimal")
    passed, *_ = [line for line in leakage_report({"ape": sound}).lines if "null check" in line]
    assert passed.endswith("V(X) in block 0, where streams carry no position: 0.04 [-0.01, 0.09] in 9-31")
    assert not any("NOT 0" in line for line in leakage_report({"ape": sound}).lines)
    report = leakage_report({"ape": both})
    assert report.lines[-2].endswith(": 0.04 [-0.01, 0.09] in 9-31, 0.06 [0.01, 0.11] in 128-255")
    remark = "ape: NOT 0 in band 128-255: more prompts are needed before its numbers mean anything"
    assert report.lines[-1] == remark
    assert [row[2] == "-" for row in report.tables[2].rows] == [False, True]
    assert [row[4] == "-" for row in report.tables[4].rows] == [False] * 2 + [True] * 2
    twice = xr.concat([noisy.assign_coords(band=["9-31"]), noisy], "band", data_vars="minimal")
    assert "NOT 0 in bands 9-31, 128-255: " in leakage_report({"ape": twice}).lines[-1]
    # Position 0's own logits differ behind BOS: where they account for all of it, nothing is wrong.
    for end, value in (("", 0.05), ("_low", 0.02), ("_high", 0.08)):
        noisy[f"log_sink_by_block{end}"] = xr.full_like(noisy["log_stream_by_block"], value)
    lines = leakage_report({"ape": noisy}).lines
    assert not any("NOT 0" in line for line in lines)
    own = "V(K) = 0.05 [0.02, 0.08]"
    assert lines[-1] == f"ape: in band 128-255 position 0's own logits account for it, {own}: no noise"
    noisy["log_sink_by_block_high"][:] = 0.005
    assert leakage_report({"ape": noisy}).lines[-1] == remark


@pytest.mark.slow
def test_more_keys_than_shown_are_said(surveyed):
    _, results = surveyed("sinks")
    ds = results["ape"]
    more: xr.Dataset = xr.concat([ds, ds.assign_coords({"key": ds["key"].values + 8})], "key", data_vars="minimal")  # pyright: ignore
    report = sinks_report({"ape": more})
    assert report.lines[0] == "ape: 8 more keys in the result file"
    assert len(report.tables[0].rows) == 8
    assert not any("more keys" in line for line in sinks_report(results).lines)


def test_reports_are_printed_with_what_their_columns_are(capsys):
    table = Table("Means", ("model", "mean"), [["ape", "1"]])
    described = "Mean norms, " + "and what they are, " * 20 + "end."
    print_report(Report("Sizes", described, [replace(table, title="First"), table], ["ape: one"]))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Sizes"
    first = shown.index("First:")
    assert " ".join(shown[1:first]).split() == described.split()
    assert max(map(len, shown)) <= 120
    assert first < shown.index("Means:") < shown.index("ape: one") == len(shown) - 1


def test_numbers_as_text():
    assert [number(value) for value in (0.12345, -2, math.nan, np.float32(1e-7), 0)] == [
        "0.123", "-2", "-", "1e-07", "0"
    ]  # fmt: skip
    assert [number(value) for value in (999.6, -25_123, 1.2e6)] == ["1,000", "-25,100", "1.2e+06"]
    assert number(-0.125, ".0%") == "-12%"
    assert interval(0.5, 0.25, 0.75) == "0.5 [0.25, 0.75]"
    assert interval(-0.5, -1.25, 0.75, form=".0%") == "-50% [-125%, 75%]"
    assert interval(0.5) == interval(0.5, math.nan, 0.75) == "0.5"
    assert interval(math.nan, 0.25, 0.75) == "-"
    for low, high in ((-math.inf, math.inf), (-math.inf, 0.3), (0.1, math.inf)):
        assert interval(0.17, low, high, form=".0%") == "?"
