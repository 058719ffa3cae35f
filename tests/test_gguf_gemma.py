"""GGUF files of Gemma, which leave much to their readers: windows, rotations, scales, caps."""

from dataclasses import replace

import families
import pytest
import torch
from gguf_files import GEMMA3, IDS, LOCAL, REMOVED, original, read, write
from transformers import AutoModelForCausalLM, AutoTokenizer

import probes
from probes.errors import InputError
from probes.models.families import spec_of
from probes.models.gguf.config import config_of
from probes.models.gguf.header import read_header
from probes.models.named import located


@pytest.mark.parametrize(("name", "blocks"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_scale_of_gemma_27b(name, blocks, tmp_path):
    small = read_header(write(tmp_path / "tiny.gguf", original(name)))
    larger = {"block_count": blocks, "attention.key_length": 8, "attention.value_length": 8}
    larger = {f"{small.architecture}.{key}": value for key, value in larger.items()}
    scale = config_of(replace(small, values={**small.values, **larger})).query_pre_attn_scalar
    assert scale == families.WIDTH // families.HEADS  # not 8, the head's


def test_gemma3_s_windows_and_rotations_where_the_file_does_not_say(tmp_path):
    """Every block against transformers' own: bases of two kinds, scaling in full blocks alone, windows in five of six."""
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
    model = original("gemma3_text", rope_parameters={"full_attention": scaled, "sliding_attention": LOCAL})
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    seen = read(write(tmp_path / "tiny.gguf", model, keys=keys))
    trace = seen.trace(seen.embed(IDS), attention=True)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, output_attentions=True)
    for kind, mine, theirs in zip(GEMMA3, trace.attention, expected.attentions, strict=True):
        pattern = mine.pattern()
        assert (pattern - theirs).abs().max() < 1e-4
        assert (pattern[..., families.WINDOW :, 0].amax() > 0) == (kind == "full_attention")
    assert (seen.unembed(seen.norm(trace.residual[-1])) - expected.logits).abs().max() < 1e-3
    for changed, windows in (
        ({"attention.sliding_window": REMOVED}, [None] * 7),
        ({"attention.sliding_window_pattern": 2}, [8, None, 8, None, 8, None, 8]),
    ):
        said = changed | {"rope.freq_base_swa": 77.0}
        config = config_of(read_header(write(tmp_path / "tiny.gguf", model, keys=said)))
        assert list(spec_of(config).windows) == windows
        assert config.rope_parameters["sliding_attention"]["rope_theta"] == 77.0


def test_gemma2_s_window_and_caps_where_the_file_does_not_say(tmp_path):
    model = original("gemma2")
    unsaid = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    config = config_of(read_header(write(tmp_path / "bare.gguf", model, keys=dict.fromkeys(unsaid, REMOVED))))
    assert (config.sliding_window, config.attn_logit_softcapping, config.final_logit_softcapping) == (4096, 50.0, 30.0)


@pytest.mark.slow
def test_gemma3_itself_is_what_transformers_reads():
    """Beyond its windows of 512; its reader takes what this file says, and no more: weights, tokens, patterns and logits."""
    try:
        path = located("gemma3-270m")
    except InputError:
        pytest.skip("make gemma")
    seen, given = read("gemma3-270m"), {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32, attn_implementation="eager")
    tokenizer, tokens = AutoTokenizer.from_pretrained(**given), probes.prompts(seen, n=1, length=1024)
    assert all(torch.equal(seen._model.state_dict()[key], value) for key, value in model.state_dict().items())
    texts = ["12 345.67", "a\n\n\n\tb", "x  y" + " " * 40 + "z", "naïve 日本 𓀀\x01", "<table><bos></td>", ""]
    for some in (seen.tokenizer.decode(tokens[0, 1:]), *texts):
        assert seen.tokenizer(some).input_ids == tokenizer(some).input_ids
    assert tokens[0, 0] == seen.bos == 2
    trace = seen.trace(seen.embed(tokens), attention=True)
    with torch.no_grad():
        expected = model(tokens, output_attentions=True)
    for window, mine, theirs in zip(seen.spec.windows, trace.attention, expected.attentions, strict=True):
        assert (mine.pattern() - theirs).abs().max() < 1e-4
        assert (theirs[..., 512:, 0].amax() > 0) == (window is None)
    logits = seen.unembed(seen.norm(trace.residual[-1]))
    assert (logits - expected.logits).abs().max() < 1e-3 * expected.logits.abs().max()
