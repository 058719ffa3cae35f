"""Sinks against full patterns in float64, reading on models of known answer, and what cannot be asked."""

import json
from typing import Any

import families
import measured
import numpy as np
import pytest
import reference_heads
import torch
from measured import TEXT, TOKENS, close, complete, drawn_tokens, known_model, known_tokens, recorded, refused, view
from transformers import MistralConfig

import probes
from probes.cli.console import print_table
from probes.data.prompts import draw
from probes.headlines import numbers
from probes.measures.sinks import MEASURE, Options, secondary, sinks
from probes.measures.sinks.collectors import LEAST, collectors, named, token_rows
from probes.measures.sinks.roles import COLUMNS, PLACES, counts, head_rows
from probes.measures.sinks.sums import uniform_alpha
from probes.models.huggingface import HuggingFaceView
from probes.models.swap import swapped

LENGTH = 12  # longer than the windows
KEYS = (3, 0, 11)  # neither sorted nor beginning with 0; the last one has a single query
BOTH = ("alpha", "sink_rate", "sink_rate_of_model", "over_tau", "over_tau_of_model")
HEADS = ("attends", "reads")
NORMS = ("value_norm", "key_norm")
SAME = 1e-10  # float64 against float64: sums in another order


def expected(model: Any, tokens: Any, chosen: Any) -> Any:
    found = recorded(model, tokens)
    parts = {name: [one[name] for one in found] for name in ("patterns", "keys", "values")}
    weights = [model.output_weights(layer) for layer in range(model.spec.blocks)]
    through = [[measured.behind(model, one, layer) for layer in range(model.spec.blocks)] for one in found]
    limits = {"behind": through, "chosen": chosen, "threshold": 0.3, "tau": 0.2}
    return reference_heads.sinks(**parts, weights=weights, windows=model.spec.windows, **limits)


# ------------------------------------------------------------------------------------------------ secondary sinks


def test_positions_are_aligned_by_the_streams_that_transformers_has(monkeypatch):
    monkeypatch.setattr(secondary, "COSINE", 0.3)  # in a small random model 0.9 would count none
    model, tokens = families.model("llama", dtype=torch.float64), drawn_tokens(3, LENGTH)
    found = sinks(HuggingFaceView(model), tokens, keys="all")["aligned_share"]
    with torch.no_grad():
        streams = model(tokens, output_hidden_states=True).hidden_states
    for layer in range(1, families.BLOCKS):
        x = streams[layer].numpy()
        for rule, centre in zip(secondary.RULES, (x[:, 1:].mean(1, keepdims=True), 0.0), strict=True):
            y = x - centre
            cosines = (y[:, 1:] @ y[:, 0, :, None])[..., 0] / np.linalg.norm(y[:, 1:], axis=-1)
            cosines /= np.linalg.norm(y[:, 0], axis=-1)[:, None]
            share = ((cosines if rule == secondary.RULES[0] else np.abs(cosines)) > 0.3).mean(1)
            np.testing.assert_allclose(found.sel(rule=rule, layer=layer), share)
    assert 0 < float(found.mean()) < 1
    assert not found.sel(layer=0).any()  # which reads embeddings


def test_what_all_streams_have_in_common_hides_no_direction_once_it_is_taken_out():
    streams = torch.eye(16, dtype=torch.float64)[None, :8].clone()
    streams[0, 3] = 2 * streams[0, 0]  # the direction of position 0, and nothing else has it
    np.testing.assert_array_equal(secondary.aligned(streams)[0].sum(-1), [1, 1])
    moved = streams + 100 * torch.eye(16, dtype=torch.float64)[15]
    by_rule = secondary.aligned(moved)[0]
    assert by_rule[0].nonzero().ravel().tolist() == [3]
    assert int(by_rule[1].sum()) == 7  # as published, all of them


def test_levels_are_where_alignments_arise_and_how_long_they_last():
    prompts, blocks, length = LEAST + 1, 6, 10
    there = np.zeros((prompts, blocks, 2, length), dtype=bool)
    there[:LEAST, 2:5, 0, 4] = True  # a level of three prompts
    there[:LEAST, 1:3, 0, 8] = True  # behind T/2: no weight is told
    there[0, 4:, 0, 3] = True  # one of a single prompt
    alpha, uniform = np.full((prompts, blocks, length // 2 + 1), 0.25), np.full((blocks, length), 0.25)
    alpha[:LEAST, 2:5, 4] += np.array([0.1, 0.2, 0.3])[:, None]
    norms = np.ones((prompts, blocks, length))
    norms[:, :, 4] = 0.5
    tokens = np.tile(np.arange(length), (prompts, 1))
    found, words = secondary.secondary(there, norms, alpha, uniform, tokens, None, None)
    assert np.stack([found[f"level_{name}"] for name in ("block", "blocks", "positions", "prompts")], 1).tolist() == [
        [1, 2, LEAST, LEAST],
        [2, 3, LEAST, LEAST],
    ]
    assert np.isnan(found["level_excess"][0])
    np.testing.assert_allclose([found["level_excess"][1], found["level_elsewhere"][1]], [0.2, 0], atol=1e-12)
    assert found["level_excess_low"][1] < 0.2 < found["level_excess_high"][1]
    np.testing.assert_allclose(found["level_norm"], [1, 0.5])
    assert [word.split()[-1] for word in words] == [str(LEAST)] * 2


# ------------------------------------------------------------------------------------------- against full patterns


@pytest.mark.parametrize(
    ("name", "length"), [*((name, LENGTH) for name in families.FAMILIES), ("llama", 2), ("gemma2", 40)]
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


def test_rates_over_prompts_and_strict_thresholds(monkeypatch):
    model = view("gpt2")
    each = sinks(model, TOKENS)
    assert each.alpha.dims == ("prompt", "layer", "head", "key")
    # Decided per prompt: a head above in some prompts alone counts for those.
    close(each.sink_rate, (each.alpha > 0.3).mean(("prompt", "head")), 1e-12)
    assert not np.array_equal(each.sink_rate, (each.alpha.mean("prompt") > 0.3).mean("head"))
    close(each.sink_rate_of_model, (each.alpha > 0.3).mean(("prompt", "layer", "head")), 1e-12)
    alpha = sinks(model, TOKENS, keys=(0,)).alpha.values
    at = float(np.sort(alpha, axis=None)[alpha.size // 2])
    for threshold, share in ((at, np.mean(alpha > at)), (np.nextafter(at, 0), np.mean(alpha >= at))):
        with monkeypatch.context() as changed:
            changed.setattr("probes.measures.sinks.sums.THRESHOLD", float(threshold))
            found = sinks(model, TOKENS, keys=(0,))
        assert float(found.sink_rate_of_model[0]) == pytest.approx(share)
    # More prompts than pieces are kept: sums are those of all.
    many = drawn_tokens(70, 4)
    parts = [sinks(model, many[some]) for some in (slice(0, 35), slice(35, 70))]
    for name in ("sink_rate", "over_tau", "value_norm"):
        close(sinks(model, many)[name], (parts[0][name] + parts[1][name]) / 2, 1e-6)


def test_a_window_of_one_sees_no_other():
    config = MistralConfig(**families._GROUPED | {"sliding_window": 1})
    found = sinks(probes.load(families.build(config), device="cpu"), TOKENS, keys=(0, 5))
    close(found.alpha[..., 0], 1 / LENGTH, 1e-5)
    close(found.over_tau, 1, 0)
    assert np.isnan(found.attends).all()
    assert head_rows(found)[0][2:5] == ["ignores?", "-", "-"]


def test_uniform_baseline():
    for length, published in ((64, 0.074), (256, 0.024), (4096, 0.0022)):
        assert float(f"{uniform_alpha(length, [0], None)[0]:.2g}") == published
    original: Any = families.model("gemma2")
    with torch.no_grad():
        for block in original.get_decoder().layers:
            block.self_attn.q_proj.weight.zero_()
    found = sinks(HuggingFaceView(original), drawn_tokens(2, 40), keys="all")
    close(found.alpha - found.uniform, 0, 0, 1e-6)


# ------------------------------------------------------------------------------------------------- known answers


@pytest.mark.parametrize("length", [2, 64])
def test_reading_of_uniform_attention(length):
    """Behind W_O: the first value dimension is written three times as large."""
    found = sinks(known_model(sink_value=[1, 0, 0, 0], text_value=[0, 0, 2, 0]), known_tokens(length))
    i = np.arange(1, length)
    own, whole = np.sum(9 / (i + 1.0) ** 2), np.sum((9 + 4.0 * i**2) / (i + 1) ** 2)
    assert found.attends.item() == pytest.approx(np.mean(1 / (i + 1)), rel=1e-5)
    assert found.reads.item() == pytest.approx(np.sqrt(own / whole), rel=1e-5)
    close(found.value_norm[0, 0], [1, 2], 1e-5)
    assert found.place.values.tolist() == list(PLACES)


def test_a_share_that_the_rest_cancels_and_a_head_that_writes_nothing():
    """v_0 = 2 u, all others -u: at query 1 o = u / 2, of which position 0 brought u, and the rest -u / 2."""
    found = sinks(known_model(sink_value=[0, 2, 0, 0], text_value=[0, -1, 0, 0]), known_tokens(2))
    assert found.reads.item() == pytest.approx(2, rel=1e-5)
    silent = sinks(known_model(sink_value=[0] * 4, text_value=[0] * 4), known_tokens(8))
    assert np.isnan(silent.reads).all()
    (row,) = head_rows(silent)
    shown = dict(zip(COLUMNS, row, strict=True))
    named = ("role", "written", "own output", "value 0/rest")
    assert [shown[name] for name in named] == ["ignores?", "0.000", "-", "-"]


# ------------------------------------------------------------------------------------------------------- reacting


@pytest.mark.parametrize(("name", "replacement"), [("mistral", "mean"), ("gpt2", "random"), ("gemma2", 7)])
def test_reactions_equal_full_patterns(name, replacement):
    model = view(name, dtype="float64")
    found, alone = sinks(model, TOKENS, reacts=replacement), sinks(model, TOKENS)
    for variable in (*BOTH, *HEADS, *NORMS):  # the rest is as it is
        close(found[variable], alone[variable], 1e-5, 1e-7)
    before, after = recorded(model, TOKENS), recorded(swapped(model, replacement), TOKENS)
    truth = np.zeros((families.BLOCKS, families.HEADS))
    for b, a in zip(before, after, strict=True):
        for layer, head in np.ndindex(truth.shape):
            both = (b["patterns"][layer][head], a["patterns"][layer][head])
            truth[layer, head] += reference_heads.reaction(*both, model.spec.windows[layer]) / len(TOKENS)
    # RMS norms of transformers compute in float32, and a batch of two may round otherwise than a prompt alone.
    close(found.reacts, truth, 1e-4, 1e-6)
    assert found.reacts.min() > 0


def test_reactions_of_known_size():
    """Uniform over the others, A_i0 = e^s / (e^s + i): a plain token at position 0 makes all of it 1 / (i + 1).

    Behind a sink that takes everything weights on the others underflow in float32, and all there is moves to them.
    """
    for sharp, length in ((3.0, 40), (300.0, 10)):
        model = known_model(sink_value=[0, 1, 0, 0], text_value=[0, 0, 1, 0], sharp=sharp)
        found, i = sinks(model, known_tokens(length), reacts=TEXT), np.arange(2, length)
        moved = i / 2 * (1 / (i + 1) - 1 / (np.exp(sharp) + i))
        assert found.reacts.item() == pytest.approx(moved.mean(), rel=1e-4)
    assert np.isnan(sinks(view("llama"), drawn_tokens(2, 2), reacts="zero").reacts).all()


# ---------------------------------------------------------------------------------------------- what is shown and asked


def test_the_headlines_and_the_answer():
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
    assert list(counts(ds).values()) == ds.has_role.sum(("layer", "head")).values.tolist()


@pytest.mark.parametrize(("name", "first"), [("tiny-llama", "auto"), ("tiny-llama", "none"), ("tiny-qwen2", "auto")])
def test_a_line_where_prompts_lack_the_model_s_bos(name, first):
    model = probes.load(name)
    drawn = draw(model, n=2, length=16, first=first)
    ds = sinks(model, drawn.tokens)
    lacking = (ds.attrs["lacks_bos"],) if first == "none" else ()
    assert drawn.remarks == tuple(MEASURE.answer({"it": ds})[1:]) == lacking
    assert first != "none" or "was trained with <|bos|> in front, and 2 of 2 prompts lack it" in lacking[0]
    tokens = drawn_tokens(3, first=torch.tensor([0, 5, 0]))
    assert "1 of 3 prompts" in sinks(view("llama"), tokens).lacks_bos
    assert "lacks_bos" not in sinks(view("llama", bos="dedicated"), tokens).attrs  # a token that is not put first


def test_options_are_read():
    read = {text: Options(keys=text).values()["keys"] for text in ("all", "0-2, 9 ,20-21")}
    assert read == {"all": "all", "0-2, 9 ,20-21": (0, 1, 2, 9, 20, 21)}
    assert [Options(effect=text).values()["effect"] for text in ("off", "all", "12")] == [None, "all", 12]
    with refused("give off, all or a number"):
        Options(effect="-1").values()


def test_what_cannot_be_asked():
    for options, says in (
        ({"keys": (0, 0)}, "keys=0,0 name a number twice"),
        ({"documents": ["a", "b"]}, "2 documents named for 3 prompts; name one for each"),
        ({"keep": (4, 8)}, "keep=.* has no use without evict"),
        ({"evict": 0}, "keep= name none; give whole numbers from 1 to 11"),
    ):
        with refused(says):
            sinks(view("llama"), TOKENS, **options)


def test_result(tmp_path):
    model, seen = view("gemma2"), list[tuple[float, float]]()
    found = sinks(model, TOKENS, keys=(0, 2), reacts=7, progress=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == pytest.approx(np.arange(1, 10) / families.BLOCKS)
    assert seen[-1] == (3.0, 3.0)
    options = json.loads(found.attrs["options"])
    assert (options["keys"], options["reacts"]) == ([0, 2], 7)
    complete(found, tmp_path / "sinks.nc")


def test_a_trained_model_and_its_roundings():
    model, coarse = (probes.load("tiny-mistral-window", device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16"))
    tokens = probes.prompts(model, n=2, length=64)
    # In bfloat16 the model rounds to 8 bits at every step: weights of attention agree to a few hundredths at worst.
    found, rough = (sinks(seen, tokens, reacts="mean") for seen in (model, coarse))
    for variable, near in {"alpha": 2e-2, **dict.fromkeys((*HEADS, "reacts"), 3e-2)}.items():
        close(rough[variable], found[variable], 0, near)
    # Against its own queries and keys, rounded once, there is only float32's rounding left.
    close(rough.alpha, expected(coarse, tokens, range(8))["alpha"], 0, 1e-4)


# ------------------------------------------------------------------------------------- tokens that collect attention


def test_tokens_are_those_with_the_largest_excess(tmp_path):
    tokens = drawn_tokens(6, 16, least=3)
    tokens[:, 1:9] = tokens[:, 1:9] % 5 + 3  # few kinds, so that each stands in several prompts
    model, stories = view("llama"), np.arange(6) // 2
    found = sinks(model, tokens, keys="all", documents=[f"story {n}" for n in stories])
    alpha = sinks(model, tokens, keys=range(16)).alpha.mean("head").values  # [prompt, layer, key]
    excess, ids = (alpha - found.uniform.values)[:, :, 1:9], tokens[:, 1:9].numpy()
    for layer in range(model.spec.blocks):
        at, of_layer = found.isel(layer=layer), excess[:, layer]
        common = [t for t in np.unique(ids) if (ids == t).any(1).sum() >= LEAST]
        mean = {t: of_layer[ids == t].mean() for t in common}
        first = sorted(mean, key=lambda token: -mean[token])[:5]
        assert at.token_id.values[: len(first)].tolist() == first
        close(at.token_excess[: len(first)], [mean[token] for token in first], 1e-4, 1e-7)
        # The jackknife of a ratio, written out.
        places = [(ids == first[0]) & (stories != n)[:, None] for n in range(3)]
        if all(where.any() for where in places):
            without = np.array([of_layer[where].mean() for where in places])
            reach = 4.302653 * np.sqrt(2 / 3 * np.sum((without - without.mean()) ** 2))
            close(at.token_excess_high[0] - at.token_excess[0], reach, 1e-3, 1e-6)
    complete(found, tmp_path / "sinks.nc")
    assert token_rows(found)[0][:2] == ["0", f"w{found.token_id[0, 0].item()}"]


def test_where_there_is_little_there_are_fewer_and_no_intervals(capsys):
    alpha, uniform = np.array([[[0.1, 0.5, 0.2]]]), np.zeros((1, 4))
    assert collectors(alpha, uniform, np.array([[0, 7, 7, 9]]), None)["token_id"].tolist() == [[-1] * 5]  # one prompt
    three = collectors(np.repeat(alpha, 3, 0), uniform, np.array([[0, 7, 8, 9]] * 3), ["a", "a", "a"])
    close(three["token_excess"][0, :2], [0.5, 0.2], 1e-12)
    close(three["token_excess_low"][0, :2], [0.5, 0.2], 1e-12)
    assert named(three["token_id"], None)[1].tolist() == [["7", "8", "", "", ""]]
    print_table(("token",), [["[/b]␣語"]])  # no markup, and twice as wide as it is long
    assert "[/b]␣語" in capsys.readouterr().out
