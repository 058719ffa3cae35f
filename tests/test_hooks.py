"""What callers have put on a model or around it: observers and compilers change nothing, adapters and hooks count."""

from collections.abc import Callable
from functools import partial
from typing import Any

import families
import numpy as np
import peft
import pytest
import torch
from families import BLOCKS, FAMILIES, VOCABULARY, attention, blocks
from torch import Tensor, nn
from transformers import AttentionInterface

import probes
from probes.errors import InputError
from probes.models.huggingface import ATTENTION
from probes.models.lens import boot
from probes.theory.kernel import second_moment

IDS = torch.randint(3, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))


# what torch.compile imports is outdated by torch's own account
outdated = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def halved(module: nn.Module, args: Any, output: Any) -> Any:
    return output / 2 if isinstance(output, Tensor) else (output[0] / 2, *output[1:])


def logits(seen: Any) -> torch.Tensor:
    return seen.unembed(seen.norm(seen.residual(seen.embed(IDS)))).detach()


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_model_that_was_asked_for_its_states_and_patterns_is_measured_as_before(name):
    model = families.model(name)
    model.set_attn_implementation("eager")
    early = probes.load(model)
    expected = probes.jacobian(early, IDS, method="sketch", products=8)
    with torch.no_grad():
        model(IDS, output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in blocks(model).modules())  # transformers keeps them there
    for view in (early, probes.load(model)):
        found = probes.jacobian(view, IDS, method="sketch", products=8)
        assert (found.attrs["engine"], found.attrs.get("fallback")) == ("parts", None)
        assert found["sensitivity"].equals(expected["sensitivity"])


def louder(module: nn.Module) -> None:
    """Another class; of a linear layer, one that is linear in another way than its weight says."""

    class Louder(type(module)):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    module.__class__ = Louder


PUT: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (lambda block: block.mlp.register_forward_hook(halved), "hook on its mlp"),
    "pre-hook": (
        lambda block: block.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:])),
        "hook on its LlamaDecoderLayer",
    ),
    "backward hook": (
        lambda block: block.mlp.register_full_backward_hook(lambda module, into, out: (into[0] * 2,)),
        "hook on its mlp",
    ),
    "forward": (
        lambda block: setattr(block.mlp, "forward", partial(lambda own, x: 2 * own(x), block.mlp.forward)),
        "forward pass on its mlp",
    ),
    "linear": (lambda block: louder(block.self_attn.q_proj), r"module '.*\.Louder' as its self_attn\.q_proj"),
    "class": (lambda block: louder(block.mlp), r"module '.*\.Louder' as its mlp"),
}


@pytest.mark.parametrize("put", PUT)
def test_what_may_change_a_block_keeps_it_whole_and_is_named(put):
    model = families.model("llama")
    act, says = PUT[put]
    act(blocks(model)[1])
    seen = probes.load(model)
    assert [seen.parts(layer) is None for layer in range(BLOCKS)] == [False, True, False]
    with pytest.warns(UserWarning, match=rf"engine autograd for block 1 \(.*{says}\)"):
        found = probes.jacobian(seen, IDS[:1])
    assert found.attrs["engine"] == "autograd+parts"
    assert found.attrs["fallback"].startswith("block 1 (")
    own = probes.jacobian(seen, IDS[:1], engine="autograd")  # asked for: nothing to say
    assert "fallback" not in own.attrs
    # float32's rounding through blocks with logits around 60, beside changes by a factor of two
    np.testing.assert_allclose(found["sensitivity"], own["sensitivity"], rtol=1e-3)
    plain = probes.jacobian(probes.load(families.model("llama")), IDS[:1])
    assert not np.allclose(found["sensitivity"], plain["sensitivity"], rtol=1e-2)
    for refused in (
        lambda: second_moment(seen, IDS),
        lambda: second_moment(probes.swapped(seen, "zero"), IDS),  # through views of the view, too
        lambda: probes.jacobian(seen, IDS, engine="parts"),
    ):
        with pytest.raises(InputError, match=says):
            refused()


@pytest.mark.parametrize("bridged", [False, True])
def test_a_view_is_its_caller_s_model_as_it_is_when_a_measurement_begins(bridged):
    model: Any = boot(families.model("gpt2"), "gpt2") if bridged else families.model("llama")
    seen, probe = probes.load(model), lambda given: probes.sinks(given, IDS)["alpha"]
    plain, wide = probe(seen), probes.load(model, dtype="float64")
    place = model.blocks[1].attn.v.hook_out if bridged else attention(blocks(model)[1])
    handle = place.register_forward_hook(halved)
    assert probe(seen).equals(probe(probes.load(model)))
    assert not probe(seen).equals(plain)
    # Through views of it, too.
    assert not probe(probes.swapped(seen, "zero")).equals(probe(probes.swapped(wide, "zero")))
    handle.remove()
    assert probe(seen).equals(plain)
    decoder = seen._decoder  # pyright: ignore[reportAttributeAccessIssue]
    assert probe(seen).equals(plain)
    assert bridged or seen._decoder is decoder  # pyright: ignore[reportAttributeAccessIssue]  # nothing changed, no copy
    before = seen.identity.weights, probe(wide)
    if bridged:
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    else:
        other = families.model("llama", seed=1)
        model.load_state_dict(other.state_dict(), assign=True)
        assert probe(seen).equals(probe(other))
        model.config.num_hidden_layers = 2
        for _ in range(2):  # once refused, refused again
            with pytest.raises(InputError, match="3 blocks where its config says 2"):
                probe(seen)
        model.config.num_hidden_layers = BLOCKS
        model.model.layers[2].mlp = nn.Identity()
        assert probe(seen).equals(probe(model))
    assert not probe(seen).equals(plain)
    assert seen.identity.weights != before[0]
    assert probe(wide).equals(before[1])  # in another precision it has weights of its own


class Scales(nn.Module):
    """What a caller hangs on a model by its method."""

    by = 1.0

    def scaled(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output * self.by


@pytest.mark.parametrize("change", ["hook", "class", "dtype", "config"])
def test_a_change_is_seen_that_leaves_modules_and_what_they_keep_the_same(change):
    model, scales = families.model("gpt2"), Scales()
    mlp = blocks(model)[0].mlp
    mlp.register_forward_hook(scales.scaled)
    seen = probes.load(model)
    before = probes.sinks(seen, IDS)["alpha"], seen.identity
    if change == "hook":
        scales.by = 3.0
    elif change == "class":
        forward = type(mlp).forward
        mlp.__class__ = type("Greater", (type(mlp),), {"forward": lambda self, x: 3 * forward(self, x)})
    elif change == "dtype":  # GPT-2 has no buffer that would be another one
        model.double()
        assert probes.sinks(seen, IDS).attrs["dtype"] == seen.identity.dtype == "float64"
        assert seen.identity.weights != before[1].weights
    else:
        model.config.class_weights = torch.ones(2)  # neither equal nor unequal as a whole
        probes.sinks(seen, IDS)
    found = probes.sinks(seen, IDS)["alpha"]
    assert found.equals(probes.sinks(probes.load(model), IDS)["alpha"])
    assert (change in ("dtype", "config")) == np.allclose(found, before[0], rtol=1e-4)


def tell(name: str, **told: Any) -> Any:
    """A view of a model, the attention of whose block 1 gives these to its attention function."""
    model = families.model(name)
    attention(blocks(model)[1]).register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | told), with_kwargs=True
    )
    return probes.load(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_refuses_what_it_does_not_know_by_name(name):
    for told, says in (
        ({"sinks": torch.zeros(4)}, r"\w*Attention gives its attention sinks=tensor"),
        ({"head_mask": torch.zeros(4)}, r"head_mask=tensor"),
        ({"is_causal": False}, r"is_causal=False"),
        ({"attention_mask": torch.zeros(2, 1, 10, 10)}, "a mask of its own"),
    ):
        seen = tell(name, **told)
        with pytest.raises(InputError, match=says):
            seen.residual(seen.embed(IDS))
    same = tell(name, head_mask=None, is_causal=True, output_attentions=True)
    assert torch.equal(logits(same), logits(probes.load(families.model(name))))


def test_attention_refuses_dropout_what_looks_ahead_and_functions_that_the_user_registered():
    given = torch.randn(3, 1, 2, 5, 8)
    attend: Any = AttentionInterface()[ATTENTION]
    with pytest.raises(InputError, match=r"dropout=0\.1, which probes do not follow"):
        attend(nn.Identity(), *given, None, dropout=0.1)
    config: Any = FAMILIES["llama"]()
    config.is_causal = False  # how transformers makes an encoder of a decoder
    with pytest.raises(InputError, match="is_causal=False"):
        logits(probes.load(families.build(config)))
    model = families.model("llama")
    AttentionInterface.register("sigmoid", lambda *_, **__: pytest.fail("probes would put softmax in its place"))
    try:
        model.set_attn_implementation("sigmoid")
        with pytest.raises(InputError, match=r"registered function 'sigmoid'.*set_attn_implementation\('sdpa'\)"):
            probes.load(model)
    finally:
        AttentionInterface._global_mapping.pop("sigmoid")  # pyright: ignore[reportAttributeAccessIssue]


def _compiled(model: Any, how: str) -> Any:
    if how == "model":
        return torch.compile(model)
    for module in (model, model.model, model.model.layers[1]):
        if how == "forward":
            module.forward = torch.compile(module.forward)
        if how == "in place":
            module.compile()
    return model


@pytest.mark.parametrize("how", ["model", "forward", "in place"])
@outdated
def test_a_compiled_model_is_the_model_that_was_compiled(how):
    for backend in ("transformers", "transformer_lens"):
        plain: Any = probes.load(families.model("llama"), backend)
        seen: Any = probes.load(_compiled(families.model("llama"), how), backend)
        assert torch.equal(logits(seen), logits(plain))
        assert seen.identity == plain.identity
        assert (seen.parts(1) is None) == (plain.parts(1) is None)
    alone: Any = families.model("llama")
    alone.model.layers[1].mlp = torch.compile(alone.model.layers[1].mlp)
    assert "compile the whole model" in families.refused(probes.load, alone)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft's own arguments
@outdated
def test_adapters_run_as_they_are_and_trained_prompts_are_refused():
    tied: Any = FAMILIES["llama"]()
    tied.tie_word_embeddings = True
    for config, options in (
        (FAMILIES["llama"](), {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}),
        (FAMILIES["llama"](), {"target_modules": ["q_proj"], "use_dora": True}),
        (tied, {"target_modules": ["embed_tokens"]}),  # not the output embedding, which has the same weights without
    ):
        base = families.build(config)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            for name, weight in model.named_parameters():
                if "lora_" in name or "modules_to_save" in name:  # adapters begin at zero
                    nn.init.normal_(weight, std=0.3)
            expected = model(IDS).logits
        before = {key: value.clone() for key, value in model.state_dict().items()}
        seen = probes.load(torch.compile(model))
        assert torch.equal(logits(seen), expected)
        assert (logits(probes.load(families.build(config))) - expected).abs().max() > 0.1 * expected.std()
        assert probes.jacobian(seen, IDS[:1], method="sketch", products=8)["sensitivity"].notnull().all()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    prompted = peft.get_peft_model(
        families.model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(InputError, match=r"adapter 'default' .*puts trained vectors before the tokens"):
        probes.load(prompted)
