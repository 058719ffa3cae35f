"""Surveys: one probe on several models, what they write, how they go on, what they refuse before they begin."""

from __future__ import annotations

import json
import math
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
from kept import Stop, listed, never, stopping_at

import probes
from probes.cli.console import WIDEST, print_report
from probes.data.prompts import prompts
from probes.errors import InputError
from probes.measures.leakage import CELLS, PARTS, SOURCES
from probes.results.dataset import dataset, load, provenance, tokens_hash
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
    assert listed(tmp_path) == ["size.md", "size.nc", "size.png", "size.svg"]
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
    heard: dict[str, list[tuple[float, float]]] = {}
    told: list[str] = []
    results = run(
        folder,
        tmp_path,
        "ape bee",
        SHIFTED,
        options={"shift": [5, "7"]},
        seed=3,
        advance=lambda label, *step: heard.setdefault(label, []).append(step),
        told=told.append,
    )
    assert list(heard) == ["ape size 5", "ape size 7", "bee size 5", "bee size 7"]
    assert all(steps == [(1.0, 4.0), (2.0, 4.0), (3.0, 4.0), (4.0, 4.0)] for steps in heard.values())
    assert told == []
    assert listed(tmp_path) == ["size-ape.nc", "size-bee.nc", "size.md", "size.png", "size.svg"]
    assert (tmp_path / "size.png").read_text(encoding="utf-8") == "ape, bee"
    for name, ds in results.items():
        xr.testing.assert_identical(probes.load_result(tmp_path / f"size-{name}.nc"), ds)
        assert (ds["norm"].dims, ds["mean"].dims) == (("shift", "prompt", "position"), ("shift",))
        assert ds["tokens"].dims == ("prompt", "position")
        assert list(ds["shift"].values) == ["5", "7"]
        assert json.loads(ds.attrs["options"]) == {"scale": 1.0, "shift": ["5", "7"]}
        model = probes.load(str(folder / name))
        for shift in (5, 7):
            own = size(model, torch.tensor(ds["tokens"].values), shift=shift)
            np.testing.assert_array_equal(ds["norm"].sel(shift=str(shift)), own["norm"])
    assert results["bee"].attrs["first_policy"] == "none"  # its BOS is its end token
    for given in ([5], 5):  # one value is no dimension
        (alone,) = run(folder, tmp_path / "alone", "ape", SHIFTED, options={"shift": given}, seed=3).values()
        np.testing.assert_array_equal(alone["norm"], results["ape"]["norm"].sel(shift="5"))


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
    assert listed(out) == listed(tmp_path / "whole")
    for name, ds in again.items():
        for variable in ds.variables:
            assert ds[variable].values.tobytes() == whole[name][variable].values.tobytes(), variable
        found, expected = ({k: v for k, v in one.attrs.items() if k != "created"} for one in (ds, whole[name]))
        assert found == expected


def test_an_unfinished_survey_with_other_settings_is_refused(folder, tmp_path):
    given: dict[str, Any] = {"options": {"scale": 2.0}}
    with pytest.raises(Stop):
        run(folder, tmp_path, "ape bee", advance=stopping_at("bee size"), **given)
    (file,) = kept.files(tmp_path)
    before = file.read_bytes()
    for changes, says in (
        ({"options": {"scale": 3.0}}, "scale"),
        ({"options": {}}, "scale"),
        ({"seed": 1}, "seed"),
        ({"prompts": 5}, "prompts"),
        ({"length": 20}, "length"),
        ({"first": "none"}, "first"),
        ({"dtype": "float64"}, "weights, dtype"),
        ({"backend": "transformer_lens"}, "backend"),
    ):
        with pytest.raises(
            InputError
        ) as raised:  # the model that was not begun stands first: nothing of it is measured
            run(folder, tmp_path, "bee ape", **{**given, "advance": never, **changes})
        assert f"'{tmp_path}' holds an unfinished study with other {says}; " in str(raised.value)
        assert "\n" not in str(raised.value)
    assert file.read_bytes() == before


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("names", "probe", "changes", "says"),
    [
        ("", SIZE, {}, "no model given"),
        ("ape gone", SIZE, {}, "gone' does not exist"),
        ("ape ape", SIZE, {}, "are both called 'ape'"),
        ("ape", SIZE, {"length": 129}, "length=129 is more than the 128 positions of ape"),
        ("ape bee", SIZE, {"first": "bos"}, "first=bos, but the tokenizer of bee never puts"),
        ("ape", SIZE, {"device": "tpu"}, "device 'tpu'"),
        ("ape ant", SIZE, {"options": {"shift": 10}}, "shift=10 leaves the vocabulary of ant"),
        ("ape", SHIFTED, {"options": {"shift": []}}, "names none or one twice"),
        ("ape", SHIFTED, {"options": {"shift": [1, 2, "1"]}}, "shift '1,2,1' names none or one twice"),
        ("ape", SHIFTED, {"options": {"shift": [1, 99]}}, "shift=99 leaves the vocabulary of ape"),
        ("ape ant", "sinks", {"options": {"reacts": 110}}, "110 is outside the vocabulary of ant"),
        ("ape ant", "trajectory", {"options": {"starts": 110}}, "starts=110"),
        ("ape", "leakage", {"prompts": 3}, "3 prompts cannot be split"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(folder, tmp_path, names, probe, changes, says):
    with pytest.raises(InputError) as raised:
        run(folder, tmp_path / "below" / "out", names, probe, **{"advance": never, **changes})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert listed(tmp_path) == []


def test_outputs_that_cannot_be_are_refused_at_once(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is no folder"):
        run(folder, tmp_path / "file" / "out")
    for name in ("size.nc", "size.svg", "size.md"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(InputError, match=f"{name}' is a folder"):
            run(folder, tmp_path / name, advance=never)


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
            out, told = tmp_path_factory.mktemp(probe), []
            done[probe] = out, run(folder, out, "ape bee", probe, options=SMALL[probe], told=told.append)
            assert [line.split(" MiB above the model's ")[0][:10] for line in told] == ["ape: about", "bee: about"]
        return done[probe]

    return get


@pytest.mark.parametrize("probe", list(PROBES))
def test_every_probe_writes_what_it_says(surveyed, probe):
    out, results = surveyed(probe)
    assert listed(out) == [f"{probe}{ending}" for ending in ("-ape.nc", "-bee.nc", ".md", ".png", ".svg")]
    assert (out / f"{probe}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / f"{probe}.png").stat().st_size < 300_000
    assert "</svg>" in (out / f"{probe}.svg").read_text(encoding="utf-8")
    for name, ds in results.items():
        xr.testing.assert_identical(probes.load_result(out / f"{probe}-{name}.nc"), ds)
    report = PROBES[probe].report(results)
    page = (out / f"{probe}.md").read_text(encoding="utf-8")
    for table in report.tables:
        assert {row[0] for row in table.rows} == {"ape", "bee"}
        for row in table.rows:
            assert len(row) == len(table.columns)
            assert "nan" not in " ".join(row)
            assert f"| {' | '.join(row)} |\n" in page
    assert all(f"- {line}\n" in page for line in report.lines)


REPORTED = Path(__file__).resolve().parent.parent / "reports" / "llm"


def committed(folder: str) -> dict[str, xr.Dataset]:
    """Results of the repository, in the order of their table."""
    written = next((REPORTED / folder).glob("*.md")).read_text(encoding="utf-8")
    results = {ds.attrs["model"]: ds for ds in map(load, (REPORTED / folder).glob("*.nc"))}
    return dict(sorted(results.items(), key=lambda item: written.index(f"| {item[0]} |")))


@pytest.mark.parametrize("folder", ["sinks", "trajectory", "leakage", "im-start/leakage", "bos-swap"])
def test_committed_tables_are_those_of_the_committed_results(folder):
    results, kind = committed(folder), folder.rpartition("/")[2]
    report = PROBES[kind].report(results)
    written = (REPORTED / folder / f"{kind}.md").read_text(encoding="utf-8")
    lines = [
        report.title,
        report.described,
        *report.lines,
        *(line for table in report.tables for line in markdown(table)),
    ]
    assert [line for line in lines if line not in written] == []
    assert len(lines) > 20


def test_sinks_that_are_not_as_usual():
    results = committed("sinks")
    assert any("reacts >" in line for line in sinks_report(results).lines)
    without = {name: ds.drop_vars("reacts") for name, ds in results.items()}
    assert not any("reacts >" in line for line in sinks_report(without).lines)
    assert len(sinks_report(results, top=2).tables[1].rows) == 2 * len(results)
    with pytest.raises(InputError, match="top=-1"):
        sinks_report(results, top=-1)
    ds = next(iter(results.values()))
    again = ds.assign_coords({"key": ds["key"].values + 8})
    more: xr.Dataset = xr.concat([ds, again], "key", data_vars="minimal")  # pyright: ignore
    report = sinks_report({"ape": more})
    assert report.lines[0] == "ape: 8 more keys in the result file"
    assert len(report.tables[0].rows) == 8


def test_trajectories_that_are_not_as_usual():
    moved = next(iter(committed("trajectory").values())).copy(deep=True)
    moved["later_difference"][0, 1] = 0.25
    assert "changes by up to 0.25 under other text" in trajectory_report({"ape": moved}).lines[0]
    course = np.full(moved.sizes["layer"], 0.9995)
    course[:3] = 0.1, 0.995, 0.999
    last = len(course) - 1
    for values, says in (
        (course, "above 0.99 from layer 1 on"),
        (np.where(course < 0.5, np.nan, course), "above 0.99 from layer 1 on, not known at layer 0"),
        (np.where(course > 0.5, np.nan, course), f"not above 0.99 where it is known, not known at layers 1-{last}"),
        (np.full_like(course, np.nan), "not known at any layer"),
        (course / 2, "never above 0.99"),
    ):
        moved["cosine"].loc[{"place": "position 0"}] = values
        assert trajectory_report({"ape": moved}).lines[1].endswith(f" before the final norm, {says}")


def test_swaps_that_are_not_as_usual():
    name, ds = next(iter(committed("bos-swap").items()))
    removed, left_in, effects = bos_report({name: ds}).tables
    single = ds.isel(replacement=1, drop=True).assign_attrs(replacement=str(ds["replacement"].values[1]))
    alone = bos_report({name: single})
    for table, whole in zip(alone.tables, (removed, left_in, effects), strict=True):
        assert table.rows == [row for row in whole.rows if row[1] == single.attrs["replacement"]]
    old = bos_report({name: single.drop_vars([name for name in single if "steady" in str(name)])}).tables
    assert all(row[3:] == ["-"] * 3 for row in old[0].rows)  # made before the constant sink was told apart
    assert old[1].rows == alone.tables[1].rows != alone.tables[0].rows


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


NAMES = ("tiny-llama", "tiny-llama-ntk", "tiny-mistral-window")  # standard RoPE, NTK scaling, sliding window


@pytest.mark.parametrize(
    ("plain", "ntk", "window", "said"),
    [
        ([0.2, 0.3, 0.2], [0.02, 0.02, 0.01], [0.3, 0.4, 0.5], "holds: yes, yes, yes, yes"),
        ([0.2, 0.3, 0.2], [0.02, 0.02, 0.01], [0.5, 0.4, 0.3], "does not hold: yes, yes, yes, no"),
        ([0.2, 0.3, 0.2], [0.5, 0.5, 0.5], [0.3, 0.4, 0.5], "does not hold: no, yes, no, yes"),
        ([0.2, 0.3, 0.2], [0.2, 0.2, 0.2], [0.3, 0.4, 0.5], "is not decided: not told apart, yes, yes, yes"),
        # Neighbours overlap, NTK scaling and the window do not, the wrong way round.
        ([0.3] * 3, [0.38, 0.38, 0.4], [0.2, 0.22, 0.24], "does not hold: not told apart, not told apart, no, yes"),
    ],
)
def test_ruscio_s_order_is_computed(plain, ntk, window, said):
    results = dict(zip(NAMES, map(constructed, (plain, ntk, window)), strict=True))
    verdict, _, answers = said.partition(": ")
    claims = (
        "NTK scaling below standard RoPE",
        "sliding window above standard RoPE",
        "NTK scaling below the sliding window",
        "growing with depth under the sliding window",
    )
    pairs = "; ".join(f"{claim}: {answer}" for claim, answer in zip(claims, answers.split(", "), strict=True))
    assert leakage_report(results).lines[2] == f"[Ruscio]'s order {verdict}: {pairs}"
    if verdict == "holds":
        assert leakage_report(results).lines[:2] == [
            "residual component, the constant sink left in: tiny-llama-ntk 0.0167 [-0.0333, 0.0667] "
            "< tiny-llama 0.233 [0.183, 0.283] < tiny-mistral-window 0.4 [0.35, 0.45]",
            "its rank correlation with depth: tiny-llama 0.00, tiny-llama-ntk -0.87, tiny-mistral-window 1.00",
        ]
    del results["tiny-llama"]
    assert not any("Ruscio" in line for line in leakage_report(results).lines)


@pytest.mark.parametrize(
    ("residual", "cells"),
    [
        ([0.0, 0.2], ["0.2 [0.15, 0.25]", "50% [45%, 55%]", "50% [45%, 55%]", "0.1 [0.05, 0.15]"]),
        ([0.0, -0.18], ["0.01 [-0.04, 0.06]", "-", "-", "-0.09 [-0.14, -0.04]"]),
        ([0.0, -1.0], ["-0.4 [-0.45, -0.35]", "-", "-", "-0.5 [-0.55, -0.45]"]),
        ([0.1, 0.1], ["0.2 [0.15, 0.25]", "-", "-", "0.1 [0.05, 0.15]"]),  # block 0 has a residual component
        ([-0.06, 0.26], ["0.2 [0.15, 0.25]", "-", "-", "0.1 [0.05, 0.15]"]),
    ],
)
def test_shares_of_nothing_are_not_printed(residual, cells):
    report = leakage_report({"ape": constructed(residual)})
    total, steady, left_in = (table.rows[0] for table in report.tables[:3])
    assert steady[2:] == total[3:] == ["-"] * 3
    assert [*total[:3], *left_in[2:]] == ["ape", "9-31", *cells]
    assert leakage_report({"ape": constructed([0.1])}).lines[1].endswith("ape -")  # one block has no depth


def test_what_is_printed_is_narrow_enough_to_read(capsys):
    report = leakage_report({"SmolLM2-135M-Instruct": constructed(np.linspace(-0.512, 0.4321, 30).tolist())})
    assert all(max(map(len, markdown(table))) <= WIDEST for table in report.tables)
    print_report(report)
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if line.startswith((" ", "─"))) <= WIDEST
    assert shown.index("Blocks, weight form") < shown.index("left in: SmolLM2")  # rows fill a screen
    described = "Mean norms, " + "and what they are, " * 20 + "end."
    table = Table("Means", ("model", "mean"), [["ape", "1"]])
    print_report(Report("Sizes", described, [replace(table, title="First"), table], ["ape: one"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Sizes"
    first = lines.index("First:")
    assert " ".join(lines[1:first]).split() == described.split()
    assert max(map(len, lines)) <= 120
    assert first < lines.index("Means:") < lines.index("ape: one") == len(lines) - 1


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


def test_numbers_as_text():
    said = {(): "", (4,): "4", (3, 4): "3-4", (3, 4, 5, 9, 12, 13): "3-5, 9, 12-13", (0, 2, 4): "0, 2, 4"}
    assert {numbers: ranges(numbers) for numbers in said} == said
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
