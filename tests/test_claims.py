"""Statements: every function both ways on small results, real results end to end, missing ones, the table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import claimed
import numpy as np
import pages
import pytest
import xarray as xr
from claimed import CASES, HUB, LENGTH, U, given, judged, leaks, profile, scalar, steps, sunk, swap, trained, trio
from pages import held
from typer.main import get_command

from probes.claims.claim import Claim, beside, claims_table, merged, origin
from probes.claims.sources import STATED, claims
from probes.cli.main import app
from probes.measures.map import Place, atlas
from probes.results.dataset import save
from probes.results.folder import Collected, collect
from probes.results.tables import write_report
from probes.results.ushape import shape_of

NEVER_REFUTED = ("ruscio-sink-reading-heads", "ruscio-heads-react")  # thresholds of ours


@pytest.mark.parametrize("source", ["chowdhury", "ruscio", "gu", "wu", "liu", "xiao"])
def test_rules_hold_and_do_not(source):
    for name in (name for name in CASES if name.startswith(source)):
        for collected, verdict in zip(CASES[name], ("holds", "does not hold"), strict=True):
            row = judged(name, collected)
            assert row.verdict == ("undecided" if name in NEVER_REFUTED and verdict != "holds" else verdict), row
            assert row.measured not in ("", "-"), row
            assert row.command.startswith("headwater "), row
            assert "nan" not in row.measured, row


def test_every_function_is_tried_but_those_that_need_accuracies():
    tried = {STATED[name].function for name in CASES}
    untried = {name for name, one in STATED.items() if one.function not in tried}
    assert untried == {name for name in STATED if name.startswith("liu-") and "recall" not in name}


def test_without_results_nothing_is_measured_and_a_command_that_exists_will():
    group: Any = get_command(app)
    rows = claims(Collected(Path("nowhere")))
    assert len(rows) == len(STATED) == len({row.id for row in rows})
    for row in rows:
        assert (row.verdict, row.measured, row.tiny) == ("not measured", "-", "-")
        assert row.population != "toys"
        assert re.fullmatch(r"[A-Z].*\.", row.claim)  # each row is read alone
        assert row.rule
        assert row.model != "-"
        for program, *arguments in map(str.split, row.command.split(" && ")):
            assert program == "headwater"
            name, command, rest = group.resolve_command(None, arguments)
            command.make_context(name, rest)  # raises what it would refuse
    assert {origin(row) for row in rows} == {"[Chowdhury]", "[Ruscio]", "[Gu]", "[Wu]", "[Liu+]", "[Xiao]"}


def check(name: str, collected: Collected, verdict: str | None = None, **beginnings: str) -> None:
    """The row of a statement has this verdict, and fields that begin so."""
    row = judged(name, collected)
    assert verdict in (None, row.verdict)
    for field, value in beginnings.items():
        assert getattr(row, field).startswith(value), field
    assert "nan" not in row.measured + row.tiny


def test_what_is_not_known_does_not_count_and_keeps_the_command_that_will_tell():
    unknown, known = swap({"mean": 0.4}, off=np.inf), swap({"mean": 0.4})
    one = known.isel(replacement=0, drop=True).assign_attrs(replacement="mean")
    said = "x: 40% [36%, 44%] (mean)"
    check("ruscio-bos-removes-40", given(bos_swap={"x": one}), "holds", measured=said)
    both = given(bos_swap={"x": known, "y": unknown})
    check("ruscio-bos-removes-40", both, "holds", measured=f"{said}; y: ? (mean)", model="x, y")
    command = "headwater bos-swap meta-llama/"
    check("ruscio-bos-removes-40", given(bos_swap={"y": unknown}), "not measured", measured="y: ?", command=command)
    check("ruscio-protocol-replacement", given(bos_swap={"x": one}), "not measured")
    ds = leaks()
    ds["weight_source_by_block"] = ds["weight_source_by_block"] + xr.DataArray([1e9, -1e9, 0], dims="source")
    said = "x: both off 0 nat²; weights without the mask overflow"
    check("ruscio-isolation-design", given(leakage={"x": ds}), "not measured", measured=said)


CUT = np.where(np.arange(LENGTH) < 30, 0.0, U)  # what a window leaves: no beginning, no middle
PRIMACY = f"{shape_of(U).primacy:.3g}"


def test_windows_zeros_gaps_and_short_curves_give_no_numbers():
    birth, persists = "chowdhury-u-at-birth-bundled", "chowdhury-u-persists"
    windowed = profile(init=CUT, pretrained=CUT, config={"sliding_window": 8})  # no case of full attention
    for name in (birth, persists):
        check(name, given(jacobian={"x": profile(init=U, pretrained=U), "y": windowed}), "holds", model="x")
        check(name, given(jacobian={"y": windowed}), "not measured")
    check(birth, given(jacobian={"x": profile(init=CUT)}), "not measured", measured="x: primacy: no middle, recency:")
    check("chowdhury-u-at-birth-gpt2", claimed.atlas(claimed.place(CUT, name="GPT-2")), "not measured")
    gaps = profile(init=np.where(np.arange(LENGTH) == 3, np.nan, U))
    for one in (gaps, profile(init=U).isel(position=slice(5)).assign_attrs(options="{}")):
        check(birth, given(jacobian={"x": one}), "not measured")


def test_sink_rates_are_compared_at_the_published_length_alone():
    name, command = "gu-sink-rate-llama3-8b", f"headwater sinks {HUB[0]} --prompts 100 --length 64 --out runs/llama3-8b"
    said = f"{HUB[0]}: 100.0 [100.0, 100.0] % at T = 256, published at T = 64"
    check(name, given(sinks={HUB[0]: sunk(0.99, length=256)}), "not measured", measured=said, command=command)
    without = given(sinks={HUB[0]: sunk(1.0).isel(prompt=0, drop=True)})  # its prompts were not kept
    check(name, without, measured=f"{HUB[0]}: 100.0 % at T = 64")


def test_training_is_judged_by_several_runs_and_the_steps_measured():
    check("gu-emerges-in-training", steps(0, 0, 0), "does not hold")
    check("gu-emerges-when", steps(0, 0, 0.5), "undecided")  # between step 1,000 and the end, which may be any
    found = steps(0, 0, 0.5)["steps"]
    alone = given(steps={name: ds for name, ds in found.items() if name.startswith("x")})
    said = {"measured": "x: 0.000 at step 0, 0.000 at step 1,000, 0.500 at the end", "model": "x over training"}
    check("gu-emerges-in-training", alone, "undecided", command="headwater pretrain tiny-llama --seed 1 ", **said)
    for kept in (["@step0"], ["@step1000", ""]):  # a course has its beginning and something after it
        few = given(steps={f"{run}{step}": found[f"{run}{step}"] for run in "xyz" for step in kept})
        check("gu-emerges-in-training", few, "not measured")
    two = trio()
    two.results["controlled/leakage"] = {name: ds for name, ds in two["controlled/leakage"].items() if "seed1" in name}
    check("ruscio-ntk-suppresses", two, "undecided", command="headwater pretrain tiny-llama-ntk --seed 1 ")


def test_measured_rows_have_the_commands_of_their_results_if_these_have_any():
    two = given(jacobian={name: profile(f"headwater jacobian {name}", pretrained=U) for name in ("x", "y")})
    said = f"x: primacy {PRIMACY} [{PRIMACY}, {PRIMACY}], recency 9.99 [9.99, 9.99]; y: primacy"
    check("chowdhury-u-persists", two, measured=said, command="headwater jacobian x && headwater jacobian y")
    python = given(jacobian={"x": profile("", pretrained=U)})
    check("chowdhury-u-persists", python, "holds", command="headwater jacobian smollm2-135m ")


def test_what_cannot_be_compared_is_not_measured():
    other, older = scalar("pretrained", 1.01), trained(U, U + 0.1)  # without the scale-free sensitivity
    other.results["scalar"]["x"].attrs["tokens_sha256"] = "another"
    check("chowdhury-objection-surrogate-pretrained", other, "not measured")
    older.results["jacobian"]["x"] = older["jacobian"]["x"].drop_vars("elasticity")
    check("chowdhury-baseline-persists", older, "not measured")


def row(name: str, holds: bool | None, **fields: Any) -> Claim:
    return Claim(name, fields.pop("source", "[X] 1"), "claim", "rule", **fields).judged("5", holds)


def test_merged_keeps_what_was_decided():
    known = (("a", None), ("b", True), ("a", False), ("c", None), ("c", None), ("b", None), ("b", False))
    got = [(one.id, held(one)) for one in merged([row(name, holds) for name, holds in known])]
    assert got == [("a", False), ("b", True), ("b-2", False), ("c", None)]
    unknown = replace(row("c", None), measured="-")
    assert merged([unknown, row("c", None)])[0].measured == "5"  # what is known of it, though it decides nothing


def test_rows_for_which_more_was_measured_are_kept(tmp_path):
    """What an earlier table knew of models whose results are gone stays; what was measured anew does not."""
    told = {"source": "[Gu] 1", "claim": "a | b.", "rule": "r", "command": "headwater x", "model": "fresh models"}

    def row(name: str, measured: str = "-", verdict: Any = "not measured", **more: str) -> Claim:
        return Claim(name, **told | more, measured=measured, verdict=verdict)

    gone = row("gone", "tiny: 1 | 2 nat", "undecided", model="tiny")
    tiny = row("tiny", "big: 1", "holds", model="big", tiny="ape: 0.5 [0.1, 0.9]; bee: 0.7")
    fewer = row("fewer", "ape: 1; bee: 2", "holds", model="ape, bee", command="headwater x && headwater y")
    anew = row("anew", "ape: 1", "holds", model="ape")
    second = row("anew-2", "bee: 1", "does not hold", model="bee")
    dropped = row("anew-strong", "ape: 1", "holds", model="ape")  # no statement any more
    write_report(claims_table([gone, tiny, fewer, anew, second, dropped]), tmp_path / "claims.md", "c")
    now = [row("gone"), replace(tiny, measured="big: 2", tiny="ape: 0.4 [0.1, 0.8]"), row("new")]
    now += [replace(fewer, measured="ape: 3", model="ape"), replace(anew, measured="ape: 9", verdict="undecided")]
    found, kept = beside(now, tmp_path / "claims.md")
    assert kept == ["gone", "tiny", "fewer", "anew-2"]
    expected = {one.id: one for one in (gone, tiny, row("new"), fewer, now[-1], second)}
    assert {claim.id: claim for claim in found} == expected
    assert beside(found, tmp_path / "claims.md")[1] == []
    assert beside(now, tmp_path / "none.md") == (now, [])


def test_the_table_is_sorted_counted_and_escaped(tmp_path):
    report = claims_table(
        [
            row("b", True, source="[Y] 2", command="headwater y"),
            row("a", None, source="[X] Fig. 1", published="|x| = 2", command="headwater x"),
            row("c", False, source="[X] Fig. 1", population="controlled"),
            row("d", False, source="control", kind="theorem"),
        ]
    )
    assert [one[0] for one in report.tables[0].rows] == ["`a`", "`c`", "`b`", "`d`"]
    assert report.lines == [
        "published, toys: 2 statements, 1 holds, 1 undecided",
        "published, controlled training: 1 statements, 1 does not hold",
        "theorems and identities: 1 statements, 1 does not hold",
    ]
    write_report(report, tmp_path / "claims.md")
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    cells = "published | toys | [X] Fig. 1 | claim | \\|x\\| = 2 | 5 | - | - | undecided | rule | `headwater x` |"
    assert f"| `a` | {cells}" in page
    assert page.splitlines()[2].startswith("Each verdict is computed")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    """What a report leaves of a tiny model, and once more as if its prompts began with text; a map of two depths."""
    found, folder = collect(pages.shared(tmp_path_factory) / "report"), tmp_path_factory.mktemp("map")
    chosen = [Place("depth", 0.05, 64, blocks, 16) for blocks in (2, 4)]
    save(atlas(chosen, seeds=1, products=16), folder / "map.nc")
    of_text = {"sinks": {}, "bos-swap": {}, "trajectory": {"first": ["text"]}}
    results = {kind: dict(found[kind]) for kind in pages.KINDS} | {"map": dict(collect(folder)["map"])}
    for kind, chosen in of_text.items():
        results[kind][pages.ROGUE] = found[kind]["ape"].sel(chosen).assign_attrs(first_policy="none")
    return Collected(found.root, results)


# Known of a tiny model whose name is nobody's and that was not trained, taken for a language model, and of two depths.
KNOWN = {
    "chowdhury": "u-at-birth-bundled u-at-birth-everywhere primacy-tail-everywhere dead-zone-factorial "
    "score-path-vanishes-bundled objection-powers-map objection-powers-map-fitted objection-powers-init u-persists "
    "valley-persists baseline-persists objection-powers-pretrained objection-surrogate-pretrained",
    "ruscio": "position-0-closed fingerprint-constant fingerprint-varies absolute-position-leaks mask-is-a-source "
    "residual-stream-is-a-source sink-reading-heads heads-react sinks-stabilize text-sinks-stabilize "
    "isolation-mask-alone isolation-null",
    "gu": "sinks-in-small-models first-token-above-uniform no-meaning-needed stream-of-sink-large massive-activations",
    "wu": "primacy-grows-with-depth depth-does-not-undo-logits first-token-sink-pretrained",
}


def test_real_results_are_judged(reported, monkeypatch):
    assert not any(row.verdict != "not measured" for row in claims(reported) if row.population == "pretrained")
    monkeypatch.setattr("probes.claims.evidence.LARGE", 1)  # a few thousand parameters count as a language model
    rows = {row.id: row for row in claims(reported)}
    known = {name for name, row in rows.items() if row.verdict != "not measured"}
    assert known >= {f"{source}-{name}" for source, names in KNOWN.items() for name in names.split()}
    assert not any(name.startswith(("liu-", "gu-sink-rate", "gu-emerges")) for name in known)
    assert all("nan" not in row.measured + row.tiny for row in rows.values())
    assert rows["ruscio-position-0-closed"].verdict == "holds"
    # Logits of these untrained models are hundreds:
    assert "weights without the mask overflow" in rows["ruscio-isolation-design"].measured
    assert rows["ruscio-fingerprint-constant"].model == "ape"
    assert rows["gu-no-meaning-needed"].model == pages.ROGUE
