"""Position 0's path: independence from later text, norms, massive activations and convergence against plain loops."""

import json
import math
import statistics
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import BLOCKS
from measured import SOME, complete, drawn_tokens, refused, view
from scipy.stats import t
from torch import Tensor
from torch.nn import functional

import probes
from probes.measures.trajectory import PLACES, answer, rows, trajectory
from probes.models.huggingface import HuggingFaceView
from probes.models.view import Edit

LENGTH = 12  # longer than the windows
BOS = 0  # an id that is false as a truth value


def some_tokens(prompts: int = 3, length: int = LENGTH, first: int | None = BOS) -> Tensor:
    return drawn_tokens(prompts, length, least=3, first=first)


def streams(model: Any, tokens: Tensor) -> Tensor:
    """[prompt, layer, position, d] in float64, each prompt run alone."""
    traces = [model.trace(model.embed(prompt[None])).residual for prompt in tokens]
    return torch.stack([torch.stack(trace, 1)[0] for trace in traces]).double()


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_nothing_after_position_0_reaches_it(name, backend):
    found = trajectory(view(name, backend), some_tokens(), starts=4)
    assert found["first"].values.tolist() == ["bos", "text"]
    assert found.layer.values.tolist() == list(range(BLOCKS + 1))
    assert (found.later_difference.values == 0).all()


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_model_that_looks_ahead_is_found(prompts):
    class Ahead(HuggingFaceView):
        """Values of block 1 carry the mean over all positions, later ones too."""

        def residual(self, embeddings: Tensor, *, edits: Any = ()) -> Tensor:
            ahead = Edit("value", 1, lambda value: value + value.mean(2, keepdim=True))
            return super().residual(embeddings, edits=(*edits, ahead))

    model = Ahead(families.model("llama"), tokenizer=families.tokenizer())
    found = trajectory(model, some_tokens(prompts), starts=4)
    assert (found.later_difference.values[:, :2] == 0).all()
    assert (found.later_difference.values[:, 2:] > 1e-2).all()


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_norms_and_largest_dimensions_are_those_of_the_streams(name):
    model, tokens = view(name), some_tokens(4)
    found = trajectory(model, tokens, starts=4)
    for first, given in (("bos", tokens), ("text", tokens[:, 1:])):
        got, expected = found.sel(first=first), streams(model, given)
        norms = expected.norm(dim=-1).numpy()  # [prompt, layer, position]
        np.testing.assert_allclose(got.norm_first, np.median(norms[:, :, 0], 0), rtol=1e-5)
        for layer in range(BLOCKS + 1):
            at, magnitudes = got.sel(layer=layer), expected[:, layer, 0].abs().mean(0)
            median = statistics.mean(statistics.median_low(one.abs().flatten().tolist()) for one in expected[:, layer])
            np.testing.assert_allclose(at.norm_others, statistics.median(norms[:, layer, 1:].flatten()), rtol=1e-5)
            order = magnitudes.argsort(descending=True)[:5]
            assert at.top_dimension.values.tolist() == order.tolist()
            np.testing.assert_allclose(at.top_ratio, magnitudes[order] / median, rtol=1e-4)


def test_counts_of_a_constructed_stream():
    model, tokens = families.model("llama"), drawn_tokens(4, 9, least=20, first=BOS)
    with torch.no_grad():
        for block in model.get_decoder().layers:  # the stream is the embedding, all the way up
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        weight = model.get_input_embeddings().weight
        weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))  # median about 1
        weight[BOS, 3], weight[BOS, 10], weight[BOS, 40], weight[BOS, 41] = -5000.0, 1500.0, 400.0, 60.0
        for massive in (2.0, 0.0):
            found = trajectory(probes.load(model, tokenizer=families.tokenizer()), tokens, starts=4).sel(first="bos")
            assert found.massive.values.tolist() == [[massive, 4.0]] * (BLOCKS + 1)
            assert found.top_dimension.values[:, :4].tolist() == [[3, 10, 40, 41]] * (BLOCKS + 1)
            weight /= 100  # 50,000 medians are above 1,000, but 50 is below 100


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cosines_are_those_of_every_pair(name):
    model = view(name, dtype="float64")
    found = trajectory(model, some_tokens(), starts=7, seed=3)
    ids = json.loads(found.attrs["start_ids"])
    assert len(set(ids)) == 7
    assert not {0, 1, 2} & set(ids)  # BOS, end of text, unknown words
    for place, given in zip(PLACES, ([[i] for i in ids], [[BOS, i] for i in ids]), strict=True):
        directions = functional.normalize(streams(model, torch.tensor(given))[:, :, -1], dim=-1)
        for layer in range(BLOCKS + 1):
            one, at = directions[:, layer], found.sel(place=place, layer=layer)
            cosines, every = (one @ one.T).numpy(), np.arange(7)
            parts = [cosines[np.ix_(some, some)] for some in (every, *(np.delete(every, n) for n in every))]
            means = [of[np.tril_indices(len(of), -1)].mean() for of in parts]
            reach = t.ppf(0.975, 6) * np.sqrt(6 / 7 * np.sum((np.array(means[1:]) - np.mean(means[1:])) ** 2))
            expected = [means[0], max(means[0] - reach, -1), min(means[0] + reach, 1)]
            np.testing.assert_allclose([at.cosine, at.cosine_low, at.cosine_high], expected, atol=1e-12)


def test_seed_decides_the_starts():
    model, tokens = view("llama"), some_tokens()
    found = [trajectory(model, tokens, starts=5, seed=seed) for seed in (0, 0, 1)]
    ids = [json.loads(one.attrs["start_ids"]) for one in found]
    assert ids[0] == ids[1] != ids[2]
    assert found[0].cosine.equals(found[1].cosine)
    # They are of the prompts, all of them where these have fewer; special ones wherever they stand are none.
    tokens[0, 1:4], tokens[1, 5], words = torch.tensor([1, 2, BOS]), 50, families.tokenizer()
    words.pad_token = "w50"
    padded = trajectory(probes.load(families.model("llama"), tokenizer=words), tokens, starts=1000)
    assert sorted(json.loads(padded.attrs["start_ids"])) == sorted({*tokens.unique().tolist()} - {0, 1, 2, 50})


def test_what_stands_first_is_told_and_without_bos_there_is_no_control():
    model, mixed = view("qwen2", bos="none"), some_tokens()
    mixed[1, 0] = 9
    kinds = {"text": some_tokens(first=None), "id": some_tokens(first=17)}
    for kind, tokens in kinds.items():
        found = trajectory(model, tokens, starts=4)
        assert (found["first"].values.tolist(), found.place.values.tolist()) == ([kind], [PLACES[0]])
    assert trajectory(model, some_tokens(prompts=1, first=17), starts=4)["first"].values.tolist() == ["text"]
    assert [row[-1] for row in rows({"ape": found})[0].rows] == ["-"] * (BLOCKS + 1)
    found = trajectory(view("llama"), mixed, starts=4)  # prompts without BOS are taken as they are
    assert (found["first"].values.tolist(), found.place.values.tolist()) == (["text"], list(PLACES))


def test_result_is_complete_and_later_tokens_that_change_it_are_told(tmp_path):
    calls: list[tuple[float, float]] = []
    found = trajectory(view("mistral"), some_tokens(), starts=4, progress=lambda *call: calls.append(call))
    assert json.loads(found.attrs["options"]) == {"measurement": "trajectory", "starts": 4, "seed": 0}
    assert calls[-1] == (14, 14)  # two passes of each prompt and kind of first token, and two for the starts
    complete(found, tmp_path / "found.nc")
    assert "no later token changes it" in answer({"ape": found})[0]
    found["later_difference"][0, 1] = 0.25
    assert "later tokens change an entry by up to 0.25" in answer({"ape": found})[0]


def test_bad_input_is_refused():
    model, tokens = view("llama"), some_tokens()
    for starts, given in ((1, tokens), (64, torch.full((2, 5), 7))):
        with refused(f"starts={starts} of ", "give 2 or more"):
            trajectory(model, given, starts=starts)
    with refused("2 positions", "at least 3"):
        trajectory(model, tokens[:, :2])
    broken = families.model("llama")
    with torch.no_grad():
        broken.get_decoder().layers[1].mlp.down_proj.weight[0, 0] = math.inf
    with refused("not finite", "float32"):
        trajectory(HuggingFaceView(broken, tokenizer=families.tokenizer()), tokens)
