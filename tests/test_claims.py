"""Statements: every function both ways, real results end to end, missing ones, the table."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
import xarray as xr
from claimed import CASES, HUB, along, committed, given, jacobian, judged, mapped, put, steps, swap, trio
from pages import held
from typer.main import get_command

from probes.claims.claim import APART, Claim, beside, claims_table, merged, origin
from probes.claims.evidence import never, parameters
from probes.claims.gu import TABLE
from probes.claims.sources import STATED, claims
from probes.cli.main import app
from probes.measures.map import Place, atlas
from probes.results.dataset import save
from probes.results.folder import Collected, collect
from probes.results.tables import write_report


def test_rules_hold_and_do_not():
    for name, both in CASES.items():
        for collected, verdict in zip(both, ("holds", "does not hold"), strict=True):
            row = judged(name, collected)
            assert row.verdict == verdict, row
            assert row.measured not in ("", "-"), row
            assert row.command.startswith("headwater "), row
            assert "nan" not in row.measured, row


def test_every_function_is_tried_but_those_that_need_accuracies():
    tried = {STATED[name].function for name in CASES}
    untried = {name for name, one in STATED.items() if one.function not in tried}
    assert untried == {name for name, one in STATED.items() if one.needs.judge is never}


def test_without_results_nothing_is_measured_and_a_command_that_exists_will():
    group: Any = get_command(app)
    rows = claims(Collected(Path("nowhere")))
    assert len(rows) == len(STATED) == len({row.id for row in rows})
    for row in rows:
        assert (row.verdict, row.measured, row.tiny) == ("not measured", "-", "-")
        assert row.population != "toys"
        assert re.fullmatch(r"[A-Z].*\.", row.claim)  # each row is read alone
        assert row.rule
        for program, *arguments in map(str.split, row.command.split(" && ")):
            assert program == "headwater"
            name, command, rest = group.resolve_command(None, arguments)
            command.make_context(name, rest)  # raises what it would refuse
    assert {origin(row) for row in rows} == {
        "[Chowdhury]",
        "[Ruscio]",
        "[Gu]",
        "[Wu]",
        "[Liu+]",
        "[Xiao]",
        "[headwater]",
    }


def check(name: str, collected: Collected, verdict: str | None = None, **beginnings: str) -> None:
    """The row of a statement has this verdict, and fields that begin so."""
    row = judged(name, collected)
    assert verdict in (None, row.verdict)
    for field, value in beginnings.items():
        assert getattr(row, field).startswith(value), field
    assert "nan" not in row.measured + row.tiny


def test_what_is_not_known_does_not_count_and_keeps_the_command_that_will_tell():
    known, unknown = swap(0.4), swap(0.4, off=np.inf)
    said, one = (
        "x: V(X): 40% [36%, 44%] (mean); V(X), the constant sink left in: 40% [36%, 44%] (mean)",
        known.isel(replacement=0, drop=True).assign_attrs(replacement="mean"),
    )
    check("ruscio-bos-removes-40", given(bos_swap=one), "holds", measured=said)
    both = given(bos_swap={"x": known, "y": unknown})
    check("ruscio-bos-removes-40", both, "holds", measured=f"{said}; y: V(X): ? (mean)", model="x")
    command = "headwater bos-swap gemma3-270m "
    check("ruscio-bos-removes-40", given(bos_swap=unknown), "not measured", measured="x: V(X): ?", command=command)
    check("ruscio-protocol-replacement", given(bos_swap=one), "not measured")


def test_windows_zeros_gaps_and_short_curves_give_no_numbers():
    birth, persists = "chowdhury-u-at-birth-bundled", "chowdhury-u-persists"
    whole, at = committed("jacobian"), along(range(256))
    cut = {name: xr.where(at < 190, 0.0, whole[name]) for name in ("sensitivity", "elasticity")}  # by a window
    windowed = put(whole, **cut).assign_attrs(config=whole.attrs["config"][:-1] + ', "sliding_window": 8}')
    assert "sliding_window" in json.loads(windowed.attrs["config"])
    for name in (birth, persists):
        check(name, given(jacobian={"x": whole, "y": windowed}), "holds", model="x")
        check(name, given(jacobian=windowed), "not measured")
    check(birth, jacobian(**cut), "not measured", measured="x: primacy: no middle, last:")
    check("chowdhury-u-at-birth", mapped(measured=along(range(1024)) >= 190), "not measured")
    gaps = put(whole, sensitivity=whole["sensitivity"].where(at != 3))
    for one in (gaps, whole.isel(position=slice(5)).assign_attrs(options="{}")):
        check(birth, given(jacobian=one), "not measured")


def test_only_large_pretrained_models_decide_about_language_models():
    assert parameters({"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}) == pytest.approx(
        134.5e6, rel=0.1
    )
    assert parameters({"n_embd": 768, "n_layer": 12, "vocab_size": 50257}) == pytest.approx(124e6, rel=0.01)
    large, name = committed("sinks"), "gu-sinks-in-small-models"
    tiny = put("sinks", alpha=0.0).assign_attrs(config='{"hidden_size": 9, "num_hidden_layers": 6, "vocab_size": 20}')
    of = {"smol": large, "tiny": tiny, "fresh": put("sinks", alpha=0.0).assign_attrs(condition="init")}
    said = {"measured": "smol: 0.5", "model": "smol", "tiny": "tiny: 0.000 [0.000, 0.000]; fresh: 0.000 "}
    check(name, given(sinks=of | {"other": large.drop_vars("alpha")}), "holds", **said)  # which lacks what is needed
    check(name, given(sinks={"tiny": tiny}), "not measured", measured="-", tiny="tiny: 0.000 ", model="smollm2-135m")


def test_sink_rates_are_compared_at_the_published_length_alone():
    name, command = "gu-sink-rates", f"headwater sinks {' '.join(TABLE)} --prompts 100 --length 64 --out runs/gu"
    said = f"{HUB}: 100.0 [100.0, 100.0] % at T = 256, published at T = 64"
    whole = put("sinks", alpha=1.0).assign_attrs(model=HUB)
    check(name, given(sinks={HUB: whole}), "not measured", measured=said, command=command)
    kept_no_prompts = whole.assign(sink_rate_of_model=0 * whole["sink_rate_of_model"] + 0.4).mean(
        "prompt", keep_attrs=True
    )
    check(name, given(sinks={HUB: kept_no_prompts}), "not measured", measured=f"{HUB}: 40.0 % at T = 256")


def test_training_is_judged_by_several_runs_and_the_steps_measured():
    check("gu-emerges-in-training", steps(False, False, False), "does not hold")
    found = steps(False, False, True)
    check("gu-emerges-when", found, "undecided")  # between step 1,000 and the end, which may be any
    alone = given(steps={name: ds for name, ds in found["steps"].items() if name.startswith("x")})
    said = {"measured": "x: 0.000 at step 0, 0.000 at step 1,000, 0.5", "model": "x over training"}
    check("gu-emerges-in-training", alone, "undecided", command="headwater pretrain tiny-llama --seed 1 ", **said)
    for kept in (["@step0"], ["@step1000", ""]):  # a course has its beginning and something after it
        few = given(steps={f"{run}{step}": found["steps"][f"{run}{step}"] for run in "xyz" for step in kept})
        check("gu-emerges-in-training", few, "not measured")
    two = given(controlled__leakage={name: ds for name, ds in trio()["controlled/leakage"].items() if "2" not in name})
    check("ruscio-architectures", two, "undecided", command="headwater pretrain tiny-llama-ntk --seed 1 ")


def test_what_cannot_be_compared_is_not_measured():
    whole = committed("jacobian")
    other = given(jacobian=whole, scalar=whole.assign_attrs(tokens_sha256="another"))
    check("chowdhury-objection-surrogate-pretrained", other, "not measured")
    check("chowdhury-baseline-persists", given(jacobian=whole.drop_vars("elasticity")), "not measured")
    # With 64 of 1,024: a cache and a text of other sizes than the source's.
    said = "x: (not counted, as caches are smaller or texts shorter than the source's: 1.1"
    check("xiao-window-attention-fails", given(evict__sinks=committed("evict/sinks")), "not measured", measured=said)


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
    ruled = row("ruled", "ape: 1", "holds", model="ape", rule="of then")
    write_report(claims_table([gone, tiny, fewer, anew, second, dropped, ruled]), tmp_path / "claims.md", "c")
    now = [row("gone"), replace(tiny, measured="big: 2", tiny="ape: 0.4 [0.1, 0.8]"), row("new"), row("ruled")]
    now += [replace(fewer, measured="ape: 3", model="ape"), replace(anew, measured="ape: 9", verdict="undecided")]
    found, kept = beside(now, tmp_path / "claims.md")
    assert kept == ["gone", "tiny", "fewer", "anew-2"]
    expected = {one.id: one for one in (gone, tiny, row("new"), row("ruled"), fewer, now[-1], second)}
    assert {claim.id: claim for claim in found} == expected
    assert beside(now, tmp_path / "none.md") == (now, [])


def test_the_table_is_sorted_counted_and_escaped(tmp_path):
    report = claims_table(
        [
            row("b", True, source="[Y] 2", population="pretrained", model="big, ape"),
            row("a", None, source="[X] Fig. 1", published="|x| = 2", command="headwater x"),
            row("c", False, source="[X] Fig. 1", population="controlled"),
            row("d", False, source="control", kind="theorem"),
        ]
    )
    assert [one[0] for one in report.tables[0].rows] == ["`a`", "`c`", "`b`", "`d`"]
    assert report.lines == [
        "[Y]: 1 sentence, 1 holds, 0 do not hold, 0 open; judged on big, ape",
        "[X]: 2 sentences, 0 hold, 1 does not hold, 1 open (1 undecided); judged on toys, controlled training",
        f"{APART['theorem']}: 1 sentence, 0 hold, 1 does not hold, 0 open; judged on toys",
    ]
    assert report.tables[0].rows[2][9] == "holds in the 2 models judged"
    write_report(report, tmp_path / "claims.md")
    cells = "published | toys | [X] Fig. 1 | claim | \\|x\\| = 2 | 5 | - | - | undecided | rule | `headwater x` |"
    assert f"| `a` | {cells}" in (tmp_path / "claims.md").read_text(encoding="utf-8")


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


def test_real_results_are_judged(reported, monkeypatch):
    assert not any(row.verdict != "not measured" for row in claims(reported) if row.population == "pretrained")
    monkeypatch.setattr("probes.claims.evidence.LARGE", 1)  # a few thousand parameters count as a language model
    rows = {row.id: row for row in claims(reported)}
    known = [name for name, row in rows.items() if row.verdict != "not measured"]
    assert Counter(name.split("-")[0] for name in known) == {"chowdhury": 14, "ruscio": 17, "gu": 6, "wu": 3}, known
    assert all("nan" not in row.measured + row.tiny for row in rows.values())
    assert rows["ruscio-position-0-closed"].verdict == "holds"
    assert rows["ruscio-isolation-design"].verdict == "holds"
    assert rows["ruscio-fingerprint-constant"].model == "ape"
