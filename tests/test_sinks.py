"""Sinks against full patterns in float64, reading on models of known answer, and what cannot be asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
import reference_heads
import torch
from measured import (
    EVERY,
    SOME,
    STORIES,
    TEXT,
    TOKENS,
    close,
    complete,
    drawn_tokens,
    known_model,
    known_tokens,
    recorded,
    refused,
    sinks,
    view,
)
from torch import Tensor
from transformers import MistralConfig

import probes
from probes.headlines import numbers
from probes.measures.sinks import MEASURE, Options
from probes.measures.sinks.roles import COLUMNS, PLACES, head_rows
from probes.measures.sinks.sums import uniform_alpha
from probes.models.huggingface import HuggingFaceView
from probes.models.swap import swapped
from probes.models.view import View

LENGTH = 12  # longer than the windows
KEYS = (3, 0, 11)  # neither sorted nor beginning with 0; the last one has a single query
BOTH = ("alpha", "sink_rate", "sink_rate_of_model", "over_tau", "over_tau_of_model")
HEADS = ("attends", "reads")
NORMS = ("value_norm", "key_norm")

# Float64 against float64: sums in another order.
SAME = 1e-10
# Float32: s_ij are up to 60 with weights this wide, each by two kernels that sum in another order. Sizes are quotients of
# sums over all queries, their errors relative.
ALPHA, SIZES = 1e-5, 1e-4


def expected(model: View, tokens: Tensor, chosen: Sequence[int], threshold: float = 0.3, tau: float = 0.2) -> Any:
    found = recorded(model, tokens)
    weights = [model.output_weights(layer) for layer in range(model.spec.blocks)]
    parts = {name: [one[name] for one in found] for name in ("patterns", "keys", "values")}
    return reference_heads.sinks(
        **parts, weights=weights, windows=model.spec.windows, chosen=chosen, threshold=threshold, tau=tau
    )


# ------------------------------------------------------------------------------------------- against full patterns


@pytest.mark.parametrize(
    ("name", "length"), [*((name, LENGTH) for name in families.FAMILIES), ("llama", 2), ("gemma2", 3), ("gemma2", 40)]
)
def test_everything_equals_full_patterns_in_float64(name, length):
    model, tokens = view(name, dtype="float64"), drawn_tokens(3, length)
    chosen = [key for key in KEYS if key < length]
    truth = expected(model, tokens, chosen)
    found, every = sinks(model, tokens, keys=chosen), sinks(model, tokens, keys="all")
    for variable in (*BOTH, *HEADS, *NORMS):
        close(found[variable], truth[variable], SAME, 1e-13)
        own = every[variable].isel(key=chosen) if "key" in every[variable].dims else every[variable]
        close(own, found[variable].mean("prompt") if variable == "alpha" else found[variable], 0, 1e-12)
    assert (every.alpha.dims, every.sizes["key"]) == (("layer", "head", "key"), length)
    assert sinks(model, tokens).key.values.tolist() == list(range(min(8, length)))
    assert length != LENGTH or 0 < float(found.sink_rate.mean()) < 1  # there is something to count


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_both_backends_in_float32(name, backend):
    model, chosen = view(name, backend), tuple(range(LENGTH))
    truth, found = expected(model, TOKENS, chosen), sinks(model, TOKENS, keys=chosen)
    close(found.alpha, truth["alpha"], 0, ALPHA)
    for variable in (*HEADS, *NORMS):
        close(found[variable], truth[variable], SIZES, 1e-5)
    # Counts agree where no alpha or weight is so near its limit that rounding decides.
    assert (truth["alpha"] - 0.3).abs().min() > ALPHA
    for variable in BOTH[1:]:
        close(found[variable], truth[variable], 0, 1e-12)


def test_means_over_prompts_and_strict_thresholds():
    model = view("gpt2")
    each, mean = sinks(model, TOKENS), sinks(model, TOKENS, per_prompt=False)
    assert each.alpha.dims == ("prompt", "layer", "head", "key")
    close(mean.alpha, each.alpha.mean("prompt"), 1e-12)
    assert sinks(model, TOKENS, keys="all", per_prompt=True).alpha.dims[0] == "prompt"
    # Decided per prompt: a head above in some prompts alone counts for those.
    close(each.sink_rate, (each.alpha > 0.3).mean(("prompt", "head")), 1e-12)
    assert not np.array_equal(each.sink_rate, (each.alpha.mean("prompt") > 0.3).mean("head"))
    close(each.sink_rate_of_model, (each.alpha > 0.3).mean(("prompt", "layer", "head")), 1e-12)
    alpha = sinks(model, TOKENS, keys=(0,)).alpha.values
    at = float(np.sort(alpha, axis=None)[alpha.size // 2])
    for threshold, share in ((at, np.mean(alpha > at)), (np.nextafter(at, 0), np.mean(alpha >= at))):
        found = sinks(model, TOKENS, keys=(0,), threshold=float(threshold))
        assert float(found.sink_rate_of_model[0]) == pytest.approx(share)
    # More prompts than pieces are kept: sums are those of all.
    many = drawn_tokens(70, 4)
    parts = [sinks(model, many[some], per_prompt=False) for some in (slice(0, 35), slice(35, 70))]
    for name in ("alpha", "sink_rate", "over_tau", "value_norm"):
        close(sinks(model, many, per_prompt=False)[name], (parts[0][name] + parts[1][name]) / 2, 1e-6)


def test_a_window_of_one_sees_no_other():
    config = MistralConfig(**families._GROUPED | {"sliding_window": 1})
    found = sinks(probes.load(families.build(config), device="cpu"), TOKENS, keys=(0, 5))
    close(found.alpha[..., 0], 1 / LENGTH, 1e-5)
    close(found.over_tau, 1, 0)
    assert np.isnan(found.attends).all()
    assert head_rows(found)[0][2:5] == ["ignores?", "-", "-"]


def test_uniform_baseline():
    for length, published in ((64, 0.074), (256, 0.024), (4096, 0.0022)):
        (value,) = uniform_alpha(length, [0], None)
        assert float(f"{value:.2g}") == published
    for window in (None, 1, 8, 500):
        truth = [reference.uniform_alpha(40, key, window) for key in range(40)]
        close(uniform_alpha(40, range(40), window), truth, 1e-12)
    original: Any = families.model("gemma2")
    with torch.no_grad():
        for block in original.get_decoder().layers:
            block.self_attn.q_proj.weight.zero_()
    found = sinks(HuggingFaceView(original), drawn_tokens(2, 40), keys="all")
    assert found.uniform.dims == ("layer", "key")
    close(found.alpha - found.uniform, 0, 0, 1e-6)


# ------------------------------------------------------------------------------------------------- known answers


@pytest.mark.parametrize("length", [2, 64])
def test_reading_of_uniform_attention(length):
    found = sinks(known_model(sink_value=[0, 1, 0, 0], text_value=[0, 0, 2, 0]), known_tokens(length))
    i = np.arange(1, length)
    own, whole = np.sum((i + 1.0) ** -2), np.sum((1 + 4.0 * i**2) / (i + 1) ** 2)
    assert found.attends.item() == pytest.approx(np.mean(1 / (i + 1)), rel=1e-5)
    assert found.reads.item() == pytest.approx(np.sqrt(own / whole), rel=1e-5)
    close(found.value_norm[0, 0], [1, 2], 1e-5)
    assert found.place.values.tolist() == list(PLACES)


def test_a_share_that_the_rest_cancels():
    """v_0 = 2 u, all others -u: at query 1 o = u / 2, of which position 0 brought u, and the rest -u / 2."""
    found = sinks(known_model(sink_value=[0, 2, 0, 0], text_value=[0, -1, 0, 0]), known_tokens(2))
    assert found.reads.item() == pytest.approx(2, rel=1e-5)


def test_a_no_op_sink_attends_and_reads_nothing():
    found = sinks(known_model(sink_value=[0, 0, 0, 0], text_value=[0, 0, 1, 0], sharp=8.0), known_tokens(64))
    assert found.reads.item() == 0
    assert found.attends.item() > 0.9
    alpha = np.mean(1 / (1 + np.arange(64) * np.exp(-8.0)))
    close(found.alpha[:, 0, 0, 0], [alpha, alpha], 1e-5)


def test_sizes_are_those_behind_w_o():
    """The first value dimension is written three times as large, and a head that writes nothing has no share."""
    found = sinks(known_model(sink_value=[1, 0, 0, 0], text_value=[0, 1, 0, 0]), known_tokens(8))
    close(found.value_norm[0, 0], [1, 1], 1e-5)
    own, whole = sum((3 / (i + 1)) ** 2 for i in range(1, 8)), sum((9 + i**2) / (i + 1) ** 2 for i in range(1, 8))
    assert found.reads.item() == pytest.approx(np.sqrt(own / whole), rel=1e-5)
    silent = sinks(known_model(sink_value=[0] * 4, text_value=[0] * 4), known_tokens(8))
    assert np.isnan(silent.reads).all()
    (row,) = head_rows(silent)
    shown = dict(zip(COLUMNS, row, strict=True))
    assert [shown[name] for name in ("role", "written", "own output", "value 0/rest")] == ["ignores", "0.000", "-", "-"]


# ------------------------------------------------------------------------------------------------------- reacting


@pytest.mark.parametrize(
    ("name", "replacement"), [("llama", "zero"), ("mistral", "mean"), ("gpt2", "random"), ("gemma2", 7)]
)
def test_reactions_equal_full_patterns(name, replacement):
    model = view(name, dtype="float64")
    found, alone = sinks(model, TOKENS, reacts=replacement), sinks(model, TOKENS)
    for variable in (*BOTH, *HEADS, *NORMS):  # the rest is as it is
        close(found[variable], alone[variable], 1e-5, 1e-7)
    before, after = recorded(model, TOKENS), recorded(swapped(model, replacement), TOKENS)
    truth = np.zeros((families.BLOCKS, families.HEADS))
    for b, a in zip(before, after, strict=True):
        for layer, window in enumerate(model.spec.windows):
            for head in range(families.HEADS):
                both = (b["patterns"][layer][head], a["patterns"][layer][head])
                truth[layer, head] += reference_heads.reaction(*both, window) / len(TOKENS)
    # RMS norms of transformers compute in float32, and a batch of two may round otherwise than a prompt alone.
    close(found.reacts, truth, 1e-4, 1e-6)
    assert found.reacts.min() > 0


def test_reactions_of_known_size():
    """Uniform over the others, A_i0 = e^s / (e^s + i): a plain token at position 0 makes all of it 1 / (i + 1)."""
    model = known_model(sink_value=[0, 1, 0, 0], text_value=[0, 0, 1, 0], sharp=3.0)
    found, i = sinks(model, known_tokens(40), reacts=TEXT), np.arange(2, 40)
    moved = i / 2 * (1 / (i + 1) - 1 / (np.exp(3.0) + i))
    assert found.reacts.item() == pytest.approx(moved.mean(), rel=1e-4)
    # Behind a sink that takes everything: weights on the others underflow in float32, and all there is moves to them.
    model = known_model(sink_value=[0, 1, 0, 0], text_value=[0, 0, 1, 0], sharp=300.0)
    found, i = sinks(model, known_tokens(10), reacts=TEXT), np.arange(2, 10)
    assert found.reacts.item() == pytest.approx(np.mean(i / 2 / (i + 1)), rel=1e-4)
    assert np.isnan(sinks(view("llama"), drawn_tokens(2, 2), reacts="zero").reacts).all()


# ------------------------------------------------------------------------------------------------------ the table


def test_the_table_of_heads_and_the_headlines():
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=4, length=32)
    ds = sinks(model, tokens, reacts="mean")
    alpha = np.stack([[x.double()[:, :, 0].mean(-1) for x in one["patterns"]] for one in recorded(model, tokens)])
    found = {(one.name, one.where): one.interval.value for one in numbers(MEASURE, ds)}
    assert found["alpha of position 0", ""] == pytest.approx(alpha.mean(), rel=1e-5)
    assert found["sink rate of position 0", ""] == pytest.approx((alpha > 0.3).mean())
    assert found["alpha of uniform attention", ""] == pytest.approx(sum(1 / n for n in range(1, 33)) / 32)
    assert sum(value for (name, _), value in found.items() if name == "share of heads") == pytest.approx(1)
    mean = alpha.mean(0)
    block, head = np.unravel_index(mean.argmax(), mean.shape)
    (sentence,) = MEASURE.answer({"it": ds})
    assert f"sink in {(mean > 0.3).sum()} of {mean.size} heads, most of all in block {block}, head {head} " in sentence
    assert "with uniform attention it would be in 0 " in sentence
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in head_rows(ds)]
    assert len(rows) == mean.size
    assert [float(row["attends"]) for row in rows] == sorted(ds.attends.values.ravel().round(3), reverse=True)
    for row in rows:
        at = ds.sel(layer=int(row["block"]), head=int(row["head"]))
        assert at.has_role.sel(role=row["role"].strip("?")) == 1
        assert row["role"].endswith("?") == (at.role_sure == 0)
        shown = {"own output": at.output_own, "reacts": at.reacts, "value 0/rest": at.value_norm[0] / at.value_norm[1]}
        for name, value in shown.items():
            assert float(row[name]) == pytest.approx(float(value), 0.01, 1e-3)
        assert row["effect"] == "-"


# ------------------------------------------------------------------------------------------------- what is asked


def test_options_are_read():
    read = {text: Options(keys=text).values()["keys"] for text in ("all", "5,0", "0-2, 9 ,20-21")}
    assert read == {"all": "all", "5,0": (5, 0), "0-2, 9 ,20-21": (0, 1, 2, 9, 20, 21)}
    assert [Options(effect=text).values()["effect"] for text in ("off", "all", "12")] == [None, "all", 12]
    for options, says in ((Options(keys="1-2-3"), "keys '1-2-3'"), (Options(effect="-1"), "give off, all or a number")):
        with refused(says):
            options.values()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keys": (0, LENGTH)}, "keys=12 cannot be used with prompts of 12 positions; give whole numbers from 0 to 11"),
        ({"keys": (-1,)}, "keys=-1 cannot be used"),
        ({"keys": (0, 0)}, "keys=0,0 name a number twice"),
        ({"keys": ()}, "keys= name none"),
        ({"keys": (0.5,)}, "keys=0.5 cannot be used"),
        ({"keys": (True,)}, "keys=True cannot be used"),
        ({"keys": "0-7"}, "keys=0-7 cannot be used .*, or 'all'"),
        ({"threshold": 1.0}, "threshold=1.0 is no share"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"tau": -0.1}, "tau=-0.1"),
        ({"reacts": "nothing"}, "replacement 'nothing' is unknown"),
        ({"documents": ["a", "b"]}, "2 documents are named for 3 prompts; name one for each"),
        ({"effect": 0}, "effect=0 cannot be used; give a whole number, 1 or more, or all"),
        ({"effect": "some"}, "effect=some cannot be used"),
        ({"effect_prompts": 0}, "effect_prompts=0 cannot be used; give a whole number, 1 or more"),
        ({"evict": (0, -1), "keep": 4}, "evict=-1 cannot be used with prompts of 12 positions"),
        (
            {"evict": 0, "keep": 0},
            "keep=0 cannot be used with prompts of 12 positions; give whole numbers from 1 to 11",
        ),
        ({"keep": (4, 8)}, "keep=.* has no use without evict"),
        ({"evict": 0}, "prompts of 12 positions lose no key with the usual 64 kept; give keep"),
    ],
)
def test_what_cannot_be_asked(options, says, unchecked):
    with refused(says):
        sinks(view("llama"), TOKENS, **options)


def test_weights_that_are_not_finite():
    broken: Any = families.model("llama")
    with torch.no_grad():
        broken.get_decoder().layers[1].self_attn.k_proj.weight[0] = float("nan")
    with refused("not finite"):
        sinks(HuggingFaceView(broken), TOKENS)


def test_result(tmp_path):
    model = view("gemma2")
    seen: list[tuple[float, float]] = []
    found = sinks(model, TOKENS, keys=(0, 2), reacts=7, tau=0.1, progress=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == pytest.approx(np.arange(1, 10) / families.BLOCKS)
    assert seen[-1] == (3.0, 3.0)
    options = json.loads(found.attrs["options"])
    assert (options["keys"], options["tau"], options["reacts"], options["per_prompt"]) == ([0, 2], 0.1, 7, True)
    assert json.loads(sinks(model, TOKENS, keys="all").attrs["options"])["keys"] == "all"
    complete(found, tmp_path / "sinks.nc")


# ------------------------------------------------------------------------------------------------- trained models


@pytest.mark.parametrize("name", ["tiny-mistral-window", STORIES])
def test_trained_models_and_their_roundings(name):
    if isinstance(name, Path) and not name.is_dir():
        pytest.skip("the checkpoint stories260K is not here")
    model, coarse = (probes.load(name, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16"))
    tokens = probes.prompts(model, n=2, length=64)
    found, truth = sinks(model, tokens, reacts="mean"), expected(model, tokens, range(8))
    for variable in (*BOTH, *HEADS):
        close(found[variable], truth[variable], 1e-4, ALPHA)
    # In bfloat16 the model rounds to 8 bits at every step: weights of attention agree to a few hundredths at worst.
    rough = sinks(coarse, tokens, reacts="mean")
    for variable, near in {"alpha": 2e-2, **dict.fromkeys((*HEADS, "reacts"), 3e-2)}.items():
        close(rough[variable], found[variable], 0, near)
    for variable in NORMS:
        close(rough[variable], found[variable], 3e-2)
    # Against its own queries and keys, rounded once, there is only float32's rounding left.
    close(rough.alpha, expected(coarse, tokens, range(8))["alpha"], 0, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_on_a_gpu(name, backend):
    there = probes.load(families.model(name), backend, device="cuda")
    # Products run through three of TF32 there: a few bits less.
    for keys in ((0, 3), "all"):
        found = sinks(there, TOKENS, keys=keys, reacts="zero", per_prompt=True)
        chosen = range(LENGTH) if keys == "all" else keys
        close(found.alpha, sinks(view(name, backend), TOKENS, keys=tuple(chosen)).alpha, 0, 1e-3)
