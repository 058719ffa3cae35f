"""Roles of heads at the sink: sizes against full patterns, heads of known answer, and what is sure."""

from __future__ import annotations

import math
from typing import Any

import families
import numpy as np
import pytest
import reference_heads
import torch
from measured import BACKENDS, TOKENS, close, drawn_tokens, known_model, known_tokens, recorded, sinks, view

from probes.measures.sinks import MEASURE
from probes.measures.sinks.roles import BESIDE, ROLES, WITHHELD, assigned, counts, role_names
from probes.models.swap import swapped
from probes.models.view import View
from probes.results.statistics import Interval, jackknifed


def expected(model: View, tokens: Any, other: View) -> dict[str, np.ndarray]:
    """Sizes of every prompt [prompt, layer, head], entry by entry in float64."""
    found: dict[str, list[float]] = {}
    for prompt, own, after in zip(tokens, recorded(model, tokens), recorded(other, tokens), strict=True):
        streams = model.trace(model.embed(prompt[None])).residual
        for layer, head in np.ndindex(families.BLOCKS, families.HEADS):
            (pattern, value), (new, moved) = (
                (x["patterns"][layer][head], x["values"][layer][head]) for x in (own, after)
            )
            weights, window = model.output_weights(layer)[head].double(), model.spec.windows[layer]
            stream, swap = streams[layer][0].double(), new.double() @ moved @ weights
            learned = own["learned"][layer][head]
            sizes = reference_heads.written_beside(pattern.double(), value @ weights, stream, window, swap, learned)
            for name, size in sizes.items():
                found.setdefault(name, []).append(size)
    return {name: np.reshape(sizes, (len(tokens), families.BLOCKS, families.HEADS)) for name, sizes in found.items()}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_sizes_equal_full_patterns_in_float64(name):
    model = view(name, dtype="float64")
    found, truth = sinks(model, TOKENS, reacts="mean"), expected(model, TOKENS, swapped(model, "mean"))
    assert ("has_role" in found) == (model.parts(0).post_attention_norm is None)
    for size, each in truth.items():
        if "has_role" not in found and size in BESIDE:
            continue
        close(found[size], np.sqrt(np.mean(each**2, 0)), 1e-10, 1e-13)
        close(found[f"{size}_by_prompt"], each, 1e-6)
    for size in ("attends", "reacts"):
        close(found[size], found[f"{size}_by_prompt"].mean("prompt"), 1e-5)
    if name in ("gemma2", "gpt2"):
        close(sinks(view(name, "transformer_lens"), TOKENS).output_own, found.output_own, 1e-4)


@pytest.mark.parametrize(
    ("name", "backend"), [("gemma2", BACKENDS[1]), *((name, BACKENDS[0]) for name in ("gemma2", "olmo2", "llama"))]
)
def test_no_role_is_said_where_a_norm_follows_on_the_output(name, backend):
    """In the result, tables and the answer; the rest stays."""
    ds = sinks(view(name, backend), TOKENS, reacts="mean", effect=2)
    norm = name != "llama"
    assert {name for name in (*BESIDE, "has_role") if name in ds} == set(() if norm else (*BESIDE, "has_role"))
    (answered,) = MEASURE.answer({"it": ds})
    assert [WITHHELD in answered, " park" in answered] == [norm, not norm]
    table = MEASURE.tables({"it": ds})[0]
    for row in table.rows:
        cell = dict(zip(table.columns, row, strict=True))
        empty = [cell[column] == "-" for column in ("role", "written", "output", "attends", "reads")]
        assert empty == [norm] * 3 + [False] * 2
    assert ds.alpha.notnull().all()
    assert int(ds.effect.notnull().sum()) == 2


# -------------------------------------------------------------------------------------------------- known answers


def role(found: Any) -> str:
    return str(role_names(found)[0, 0])


def test_a_head_without_a_value_at_0_parks():
    """Its output is (1 - A_i0) of what it would be, and nothing comes from position 0."""
    found = sinks(known_model(sink_value=[0, 0, 0, 0], text_value=[0, 0, 5, 0], sharp=8.0), known_tokens(64))
    weights = 1 / (1 + np.arange(1, 64) * np.exp(-8.0))
    assert (role(found), found.written.item()) == ("parks", 0)
    own = np.sqrt(np.sum(weights * (1 - weights) ** 2) / np.sum(weights))
    assert found.output_own.item() == pytest.approx(own, rel=1e-4)
    assert found.output.item() == pytest.approx(np.sqrt(np.mean(25 * (1 - weights) ** 2)), rel=1e-4)  # |x_i| = 1
    # 1 - A_i0 is 0 in float32: what it would write elsewhere is known all the same.
    found = sinks(known_model(sink_value=[0, 0.05, 0, 0], text_value=[0, 0, 5, 0], sharp=300.0), known_tokens(64))
    assert found.attends.item() == 1
    assert found.output_own.item() == pytest.approx(0.01, rel=1e-4)
    assert (role(found), found.reads.item()) == ("parks", pytest.approx(1))


def test_a_head_that_copies_what_stands_at_0_reads():
    found = sinks(known_model(sink_value=[0, 2, 0, 0], text_value=[0, 0, 1, 0], sharp=8.0), known_tokens(64))
    weights = 1 / (1 + np.arange(1, 64) * np.exp(-8.0))
    assert (role(found), found.role_sure.item()) == ("reads", 1)  # of two prompts that do the same
    assert found.written.item() == pytest.approx(2 * np.sqrt(np.mean(weights**2)), rel=1e-4)


def test_a_uniform_head_ignores():
    """In a long prompt: of two positions, half of what it writes comes from 0."""
    model = known_model(sink_value=[0, 1, 0, 0], text_value=[0, 0, 1, 0])
    found, i = sinks(model, known_tokens(200)), np.arange(1, 200)
    assert found.written.item() == pytest.approx(np.sqrt(np.mean((i + 1.0) ** -2)), rel=1e-4)
    assert (role(found), role(sinks(model, known_tokens(2)))) == ("ignores", "reads")


def test_a_head_that_follows_what_stands_at_0_reacts():
    """Little comes from 0, and the head does not park; another token there takes its attention away, or its output."""
    model = known_model(sink_value=[0, 0.05, 0, 0], text_value=[0, 0, 0.1, 0], sharp=3.0)
    assert role(sinks(model, known_tokens(64))) == "ignores"
    found = sinks(model, known_tokens(64), reacts=1)
    assert (role(found), found.role_sure.item()) == ("reacts", 1)
    weights = 1 / (1 + np.arange(1, 64) * np.exp(-3.0))
    # o' = text_value whatever is attended to.
    change = np.sqrt(np.mean((0.05 * weights) ** 2 + (0.1 * weights) ** 2))
    assert found.reacts_output.item() == pytest.approx(change, rel=1e-4)


@torch.no_grad()
def test_a_stream_of_zeros_has_no_size_beside_it():
    model: Any = known_model(sink_value=[0, 2, 0, 0], text_value=[0, 0, 1, 0], sharp=8.0)
    model._model.get_input_embeddings().weight[2] = 0
    found = sinks(model, known_tokens(8))
    close(found.written_by_prompt[1], 0, 0)
    assert found.written_by_prompt[0].item() > 0


# ------------------------------------------------------------------------------------------------------ what is sure


SURELY = {"attends": (0.9, 0.8, 1.0), "written": (0.05, 0.04, 0.06), "output_own": (0.8, 0.7, 0.9)}


@pytest.mark.parametrize(
    ("changed", "is_role", "sure"),
    [
        ({}, "ignores", True),
        ({"written": (0.2, 0.15, 0.25)}, "reads", True),
        ({"written": (0.2, 0.05, 0.25)}, "reads", False),
        ({"output_own": (0.1, 0.05, 0.2)}, "parks", True),
        ({"output_own": (0.1, 0.05, 0.35)}, "parks", False),
        ({"output_own": (0.1, 0.05, 0.2), "attends": (0.4, 0.2, 0.6)}, "parks", False),
        ({"output_own": (0.1, 0.05, 0.2), "written": (0.09, 0.08, 0.11)}, "parks", False),
        ({"output_own": (0.4, 0.2, 0.6)}, "ignores", False),
        ({"output_own": (0.4, 0.2, 0.6), "attends": (0.1, 0.0, 0.2)}, "ignores", True),
        ({"written": (0.05, math.nan, math.nan)}, "ignores", False),
        ({"reacts": (0.2, 0.15, 0.3), "reacts_output": (0.0, 0.0, 0.0)}, "reacts", True),
        ({"reacts": (0.0, 0.0, 0.0), "reacts_output": (0.2, 0.05, 0.3)}, "reacts", False),
        ({"reacts": (0.05, 0.0, 0.2), "reacts_output": (0.0, 0.0, 0.0)}, "ignores", False),
    ],
)
def test_roles_and_whether_they_are_sure(changed, is_role, sure):
    made: Any = {name: Interval(*(np.array([[x]]) for x in ends)) for name, ends in (SURELY | changed).items()}  # type: ignore[arg-type]
    roles, known = assigned(made)
    assert [name for name, has in zip(ROLES, roles[:, 0, 0], strict=True) if has] == [is_role]
    assert known.item() == sure


def test_intervals_are_over_documents():
    model, tokens = view("llama"), drawn_tokens(6)
    plain, found = sinks(model, tokens), sinks(model, tokens, documents=["a", "a", "b", "b", "c", "c"])
    unit = np.array([0, 0, 1, 1, 2, 2])
    for layer, head in np.ndindex(families.BLOCKS, families.HEADS):
        each = plain.written_by_prompt.values[:, layer, head].astype(float)
        ends = jackknifed(lambda x: float(np.sqrt(np.mean(x**2))), each, unit)
        at = {"layer": layer, "head": head}
        close([found.written_low[at], found.written_high[at]], [max(0, ends.low), ends.high], 1e-4, 1e-7)
    assert np.array_equal(found.written, plain.written)
    alone = sinks(model, tokens[:1])
    assert np.isnan(alone.written_low).all()
    assert not alone.role_sure.any()


def test_counts_of_a_result():
    found = sinks(view("llama"), TOKENS, reacts="zero")
    names, by_role = role_names(found), counts(found)
    assert all(found.has_role.sel(role=names[at], layer=at[0], head=at[1]) == 1 for at in np.ndindex(names.shape))
    assert sum(count for count, _ in by_role.values()) == families.BLOCKS * families.HEADS
    assert sum(sure for _, sure in by_role.values()) == found.role_sure.sum()
    (table,) = [table for table in MEASURE.tables({"ape": found}) if table.title == "Heads by role"]
    assert table.rows == [["ape", role, *map(str, by_role[role])] for role in ROLES]
