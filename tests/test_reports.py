"""Tables and sentences of surveys: what is not as usual, what decides, what is too uncertain to be printed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from probes.cli.console import WIDEST, print_report
from probes.measures.leakage import CELLS, PARTS, SOURCES
from probes.results.dataset import dataset, load
from probes.results.tables import Report, Table, interval, markdown, number, ranges
from probes.studies.bos_report import bos_report
from probes.studies.reports import leakage_report
from probes.studies.survey import PROBES

REPORTED = Path(__file__).resolve().parent.parent / "reports" / "llm"


def committed(folder: str) -> dict[str, xr.Dataset]:
    """Results of the repository, in the order of their table."""
    written = next((REPORTED / folder).glob("*.md")).read_text(encoding="utf-8")
    results = {ds.attrs["model"]: ds for ds in map(load, (REPORTED / folder).glob("*.nc.xz"))}
    return dict(sorted(results.items(), key=lambda item: written.index(f"| {item[0]} |")))


@pytest.mark.parametrize("folder", ["leakage", "im-start/leakage", "bos-swap"])
def test_committed_tables_are_those_of_the_committed_results(folder):
    results, kind = committed(folder), folder.rpartition("/")[2]
    report = PROBES[kind].report(results)
    written = (REPORTED / folder / f"{kind}.md").read_text(encoding="utf-8")
    lines = [report.title, report.described, *report.lines]
    lines += [line for table in report.tables for line in markdown(table)]
    assert [line for line in lines if line not in written] == []
    assert len(lines) > 20


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
        for end, shift in (("", 0.0), ("_low", -spread), ("_high", spread)):
            variables[f"{name}{end}"] = (dims, values + shift)

    def add_both(name: str, dims: tuple[str, ...], values: np.ndarray) -> None:
        add(f"{name}_by_block", (*dims, "layer", "band"), values)
        add(f"{name}_of_model", (*dims, "band"), values.mean(-2))

    coords: dict[str, Any] = {"part": list(PARTS), "cell": list(CELLS), "source": list(SOURCES)}
    for form, entry in {"log": "part", "weight": "cell", "terms": "cell"}.items():
        rest = np.zeros((len(coords[entry]) - 1, len(at), 1))
        scaled = source * (1 if form == "log" else 0.5)  # no weight varies by more than 1/4
        add_both(f"{form}_form", (entry,), np.concatenate([scaled.sum(0, keepdims=True), rest]))
        add_both(f"{form}_source", ("source",), scaled)
        add(f"{form}_share_of_model", ("source", "band"), source.mean(1) / source.mean(1).sum(0))
    add_both("log_stream", (), at[:, None])
    variables["log_sink_by_block"] = (("layer", "band"), np.zeros((len(at), 1)))
    for name in ("log_noise", "log_rest"):
        add_both(name, (), np.zeros((len(at), 1)))
    variables["log_neither"] = (("layer", "head", "band"), np.zeros((len(at), 1, 1)))
    attrs = {"backend": "transformers", "dtype": "float32", "device": "cpu"}
    tokens = torch.zeros(4, 40, dtype=torch.int64)
    return dataset(variables, coords=coords | {"layer": range(len(at)), "band": ["9-31"]}, attrs=attrs, tokens=tokens)


NAMES = ("tiny-llama", "tiny-llama-ntk", "tiny-mistral-window")  # standard RoPE, NTK scaling, sliding window


def test_models_are_ordered_by_the_residual_component():
    each = map(constructed, ([0.2, 0.3, 0.2], [0.02, 0.02, 0.01], [0.3, 0.4, 0.5]))
    assert leakage_report(dict(zip(NAMES, each, strict=True))).lines[:2] == [
        "residual component, the constant sink left in: tiny-llama-ntk 0.0167 [-0.0333, 0.0667] "
        "< tiny-llama 0.233 [0.183, 0.283] < tiny-mistral-window 0.4 [0.35, 0.45]",
        "its rank correlation with depth: tiny-llama 0.00, tiny-llama-ntk -0.87, tiny-mistral-window 1.00",
    ]


@pytest.mark.parametrize(
    ("residual", "cells"),
    [
        ([0.0, 0.2], ["0.2 [0.15, 0.25]", "50% [45%, 55%]", "50% [45%, 55%]", "0.1 [0.05, 0.15]"]),
        ([0.0, -0.18], ["within noise [-0.04, 0.06]", "-", "-", "within noise [-0.14, -0.04]"]),
        ([0.0, -1.0], ["within noise [-0.45, -0.35]", "-", "-", "within noise [-0.55, -0.45]"]),
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
    at = [lines.index(line) for line in ("Sizes", "First:", "Means:", "ape: one")]
    assert at == sorted(at)
    assert (at[0], at[-1]) == (0, len(lines) - 1)
    assert " ".join(lines[1 : at[1]]).split() == described.split()
    assert max(map(len, lines)) <= 120


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
    values = (0.12345, -2, math.nan, np.float32(1e-7), 0, 999.6, -25_123, 1.2e6)
    assert [number(value) for value in values] == ["0.123", "-2", "-", "1e-07", "0", "1,000", "-25,100", "1.2e+06"]
    assert number(-0.125, ".0%") == "-12%"
    assert interval(0.5, 0.25, 0.75) == "0.5 [0.25, 0.75]"
    assert interval(-0.5, -1.25, 0.75, form=".0%") == "-50% [-125%, 75%]"
    assert interval(0.5) == interval(0.5, math.nan, 0.75) == "0.5"
    assert interval(math.nan, 0.25, 0.75) == "-"
    for low, high in ((-math.inf, math.inf), (-math.inf, 0.3), (0.1, math.inf)):
        assert interval(0.17, low, high, form=".0%") == "?"
