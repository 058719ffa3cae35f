"""LongRoPE, whose rotations depend on the text's length, against transformers' plain passes; texts beyond the limit."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import probes
from probes import InputError
from probes.measures.retrieval import scores
from probes.measures.retrieval.mechanism import Differentiable
from probes.models import behind
from probes.models.behind import Asked

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 48, "vocab_size": 64, "pad_token_id": None, "initializer_range": 0.6}
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4}
LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [2.0, 5.0, 9.0, 32.0]}
SHAPE |= {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": LONG}
IDS = torch.randint(3, 64, (1, 80), generator=torch.Generator().manual_seed(0))
# transformers' eager attention takes its softmax, and rotations, in float32; wrong frequencies are off by 0.1 and more.
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def fresh():
    torch.manual_seed(1)
    config = AutoConfig.for_model("phi3", **SHAPE)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()


def log_p(ids):
    """Of every next token, by a model that has seen no other text."""
    with torch.no_grad():
        return fresh()(torch.as_tensor(ids).reshape(1, -1), use_cache=False).logits[0].log_softmax(-1)


def test_lengths_in_any_order_are_those_of_a_fresh_model():
    model = fresh()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    view = probes.load(model, beyond=True)
    for length in (24, 80, 33, 32, 24):
        stream = view.residual(view.embed(IDS[:, :length]))
        found = view.unembed(view.norm(stream))[0].detach().log_softmax(-1)
        torch.testing.assert_close(found, log_p(IDS[:, :length]), **NEAR)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("length", [20, 28, 31])
def test_questions_behind_a_context_are_plain_passes(length):
    """With the answers of 3 tokens, questions of 2 and 4 end on either side of 32, in one pass, or at it."""
    view, context = probes.load(fresh(), beyond=True), IDS[0, :length].tolist()
    questions = [tuple(range(5, 5 + n)) for n in (2, 4, 2)]
    asked = [Asked(question, answer) for question in questions for answer in ((7, 8, 9), (7, 11, 12), (20, 21, 22))]
    alone, _ = scores(view, [context], [asked])
    for one, found in zip(asked, alone[0], strict=True):
        ids = [*context, *one.question, *one.answer]
        expected = sum(float(log_p(ids)[at - 1, ids[at]]) for at in range(len(ids) - 3, len(ids)))
        ran = behind.log_p(view, [one], Differentiable(view, context).streams([one.row]))[0].item()
        np.testing.assert_allclose([found, ran], expected, **NEAR)


def test_longer_texts_are_refused_by_name_unless_asked_for():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **SHAPE | {"max_position_embeddings": 32, "rope_parameters": None})
    )
    with pytest.raises(
        InputError, match=r"made for 32; give shorter prompts, or go beyond: --beyond, in Python beyond=True"
    ):
        probes.sinks(probes.load(model), IDS)
    assert probes.sinks(probes.load(model, beyond=True), IDS).sizes["position"] == 80
    assert probes.load(model, beyond=True).reinitialized(0).spec.max_length is None
    learned = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=32)
    made = AutoModelForCausalLM.from_config(learned)
    with pytest.raises(InputError, match=r"made for 32; give shorter prompts$"):
        probes.sinks(probes.load(made), IDS)
    with pytest.raises(InputError, match="beyond: in-memory gpt2 has 32 learned positions and no more; leave it out"):
        probes.load(made, beyond=True)
    with pytest.raises(InputError, match="beyond changes nothing in a view"):
        probes.load(probes.load(made), beyond=True)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(InputError, match="rope_type dynamic"):
        probes.fresh(AutoConfig.for_model("llama", **SHAPE | {"rope_parameters": dynamic}))
