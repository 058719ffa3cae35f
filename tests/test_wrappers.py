"""Models inside the wrappers of `torch.compile` and PEFT are measured as what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import BLOCKS, FAMILIES, VOCABULARY
from torch import nn

import probes
from probes.errors import InputError
from probes.theory.kernel import second_moment

IDS = torch.randint(3, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))
# what torch.compile imports is outdated by torch's own account
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
NOISE = 1e-3  # float32's rounding through three wide blocks, in units of the logits' spread


def logits(seen: Any) -> torch.Tensor:
    return seen.unembed(seen.norm(seen.residual(seen.embed(IDS)))).detach()


# ------------------------------------------------------------------------------------------------------ torch.compile


def _block(model: Any) -> Any:
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def _forward(model: Any) -> Any:
    for module in (model, model.model, model.model.layers[1]):
        module.forward = torch.compile(module.forward)
    return model


def _in_place(model: Any) -> Any:
    model.compile()
    model.model.layers[0].compile()
    return model


COMPILED: dict[str, Callable[[Any], Any]] = {
    "model": torch.compile,
    "block": _block,
    "forward": _forward,
    "in place": _in_place,
}


@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_is_the_model_that_was_compiled(how, backend):
    plain: Any = probes.load(families.model("llama"), backend)
    compiled = COMPILED[how](families.model("llama"))
    seen: Any = probes.load(compiled, backend)
    assert torch.equal(logits(seen), logits(plain))
    assert seen.identity == plain.identity
    if backend == "transformers":
        assert all(seen.parts(layer) is not None for layer in range(BLOCKS))
        found, expected = (probes.jacobian(view, IDS, method="sketch", products=8) for view in (seen, plain))
        assert found.attrs["engine"] == "parts"
        np.testing.assert_array_equal(found["sensitivity"], expected["sensitivity"])
    inner = getattr(compiled, "_orig_mod", compiled)
    inner.get_decoder().register_forward_hook(print)
    with pytest.raises(InputError, match=r"new forward hook 'builtins\.print'"):
        seen.embed(IDS)


# ------------------------------------------------------------------------------------------------------------- PEFT

# peft tells of arguments of its own that are outdated
ignored = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LAYERS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h"]}


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def adapted(peft: Any, base: Any, **options: Any) -> Any:
    """The model with adapters whose weights are far from zero, where they start."""
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(weight, std=0.3)
    return model


def check(seen: Any, model: Any, base: Any) -> None:
    """A view of the model gives its logits, which are not the base model's, and blocks can be taken apart."""
    with torch.no_grad():
        expected = model(IDS).logits
    assert (logits(seen) - expected).abs().max() < NOISE * expected.std()
    assert (logits(probes.load(base)) - expected).abs().max() > 0.1 * expected.std()
    assert all(seen.parts(layer) is not None for layer in range(BLOCKS))


@pytest.mark.slow
@ignored
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_count_and_stay_as_they_are(peft, name):
    layers = LAYERS.get(name, ["q_proj", "v_proj", "o_proj", "down_proj"])
    model = adapted(peft, families.model(name), target_modules=layers)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seen = probes.load(torch.compile(model))
    check(seen, model, families.model(name))
    assert probes.jacobian(seen, IDS[:1], method="sketch", products=8).attrs["engine"] == "parts"
    assert np.isfinite(second_moment(seen, IDS[:1])["sensitivity"]).all()
    lens = probes.load(model, "transformer_lens")
    assert (logits(lens) - logits(seen)).abs().max() < NOISE * logits(seen).std()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert any("lora" in type(module).__module__ for module in model.modules())
    with model.disable_adapter():
        off = probes.load(model)
        assert (logits(off) - logits(probes.load(families.model(name)))).abs().max() < NOISE
        with pytest.raises(InputError, match=r"other adapters on its .*load it again"):
            seen.embed(IDS)
    seen.embed(IDS)
    with pytest.raises(InputError, match="other adapters on its"):
        off.embed(IDS)
    with torch.no_grad():  # weights of the view's own cannot follow
        next(weight for key, weight in model.named_parameters() if "lora_A" in key).mul_(2)
    with pytest.raises(InputError, match="other weights on its"):
        seen.embed(IDS)


@ignored
def test_every_kind_of_adapter_counts(peft):
    tied: Any = FAMILIES["llama"]()
    tied.tie_word_embeddings = True
    for config, options in (
        (FAMILIES["llama"](), {"target_modules": ["q_proj"], "use_dora": True}),
        (tied, {"target_modules": ["embed_tokens"]}),  # not the output embedding, which has the same weights without
        (FAMILIES["llama"](), {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    ):
        model = adapted(peft, families.build(config), **options)
        if "modules_to_save" in options:
            with torch.no_grad():
                model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
        check(probes.load(model), model, families.build(config))
    model.merge_adapter()
    check(probes.load(model), model, families.build(config))
    native = families.model("llama")  # transformers' own way to add one
    native.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), "mine")
    check(probes.load(native), native.eval(), families.model("llama"))


@ignored
def test_adapters_that_cannot_be_merged_are_refused(peft):
    prompted = peft.get_peft_model(
        families.model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(InputError, match=r"adapter 'default' .*puts trained vectors before the tokens"):
        probes.load(prompted)
    biased = adapted(peft, families.model("llama"), target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(InputError, match=r"on 'model\.layers\.0\.\w+\.q_proj' cannot be merged .*no bias"):
        probes.load(biased)
