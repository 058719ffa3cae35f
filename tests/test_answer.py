"""Tokens that a model writes after a prompt: against transformers' own greedy generation and attention."""

import re

import families
import numpy as np
import pytest
import torch
from measured import close, drawn_tokens, refused, view

import probes
from probes.measures.inspect import inspect
from probes.measures.sinks import MEASURE, sinks
from probes.models.behind import continued

TOKENS = drawn_tokens(3, 12)
FAMILIES = ("llama", "gemma3_text", "gpt2", "mistral")  # windows, soft-caps, learned positions


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_what_generate_writes(family):
    own = families.model(family)
    length = {"max_new_tokens": 6, "min_new_tokens": 6}
    truth = own.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, pad_token_id=0, **length)
    heard = []
    assert continued(view(family), TOKENS, 6, heard.append).tolist() == truth[:, 12:].tolist()
    assert sum(heard) == 6 * len(TOKENS) * view(family).spec.blocks


@pytest.mark.parametrize("keys", [(0, 3, 14), "all"])
def test_alpha_of_the_answer_is_the_mean_over_its_queries(keys):
    own, seen = families.model("llama", dtype=torch.float64), view("llama", dtype="float64")
    found = sinks(seen, TOKENS, keys=keys, answer=6)
    whole = torch.cat([TOKENS, continued(seen, TOKENS, 6)], 1)
    assert found["tokens"].values.tolist() == whole.tolist()
    own.set_attn_implementation("eager")
    with torch.no_grad():
        patterns = torch.stack(own(whole, output_attentions=True).attentions, 1).numpy()  # [prompt, layer, head, i, j]
    keys = range(18) if keys == "all" else keys
    for n, key in enumerate(keys):
        truth = patterns[..., max(12, key) :, key].mean(-1)
        truth = truth if "prompt" in found["answer_alpha"].dims else truth.mean(0)
        close(found["answer_alpha"].isel(key=n), truth, 1e-5, 1e-7)  # rotations are float32
        even = np.mean([1 / (i + 1) for i in range(max(12, key), 18)])
        close(found["answer_uniform"].isel(key=n), even, 1e-6)
    assert "for the 6 tokens that the model wrote" in MEASURE.answer({"tiny": found})[0]
    none, *_ = MEASURE.answer(
        {"tiny": found.assign(alpha=found["alpha"] / 99, answer_alpha=found["answer_alpha"] / 99)}
    )
    assert re.search(
        r"a sink in none of \d+ heads: alpha is at most .* that the model wrote it is one in no head ", none
    )
    drawn = [line.get_ydata() for cell in MEASURE.chart({"tiny": found}).axes for line in cell.lines]
    mean = found["answer_alpha"].mean([dim for dim in found["answer_alpha"].dims if dim != "key"])
    assert sum(len(y) == mean.size and np.allclose(y, mean) for y in drawn) == 1


def test_inspect_reads_what_the_model_wrote():
    model = probes.load("tiny-llama")
    found = inspect(model, "def area(width, height):", answer=4, baseline="none", of="top")
    ids = found["tokens"].values[0].tolist()
    written = continued(model, torch.tensor([ids[:-4]]), 4)[0].tolist()
    assert ids[-4:] == written
    same = inspect(model, ids, baseline="none", of="top")
    np.testing.assert_array_equal(found["sensitivity"], same["sensitivity"])
    assert found["token"].values.tolist() == same["token"].values.tolist()


def test_an_answer_that_does_not_fit_is_refused():
    with refused("answer=0 tokens are too few", "give 1 or more"):
        sinks(view("llama"), TOKENS, answer=0)
    with refused("queries see keys behind them", "leave answer out"):
        sinks(probes.edited(view("llama"), "unmasked"), TOKENS, answer=2)
    longest = view("gpt2").spec.max_length
    with refused("prompts of 12 tokens and an answer of", "ask for fewer"):
        sinks(view("gpt2"), TOKENS, answer=longest)
