"""What callers have put on a model: observers do not count, hooks do and are named, and so are changes after loading."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import BLOCKS, FAMILIES, VOCABULARY
from torch import Tensor, nn
from transformers import AttentionInterface

import probes
from probes.errors import InputError
from probes.models.lens import boot
from probes.models.listening import ATTENTION
from probes.theory.kernel import second_moment

IDS = torch.randint(3, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))


def blocks(model: Any) -> Any:
    return next(child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList))


def attention(block: Any) -> Any:
    return next(getattr(block, name) for name in ("self_attn", "attn", "attention") if hasattr(block, name))


def halved(module: nn.Module, args: Any, output: Any) -> Any:
    return output / 2 if isinstance(output, Tensor) else (output[0] / 2, *output[1:])


# ------------------------------------------------------------------------------------------------------- observers


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_was_asked_for_its_states_and_patterns_is_measured_as_before(name):
    model = families.model(name)
    model.set_attn_implementation("eager")
    early = probes.load(model)
    expected = probes.jacobian(early, IDS, method="sketch", products=8)
    theory = second_moment(early, IDS[:1], attention="measured")
    with torch.no_grad():
        found = model(IDS, output_hidden_states=True, output_attentions=True)
    assert len(found.attentions) == BLOCKS
    assert any(module._forward_hooks for module in blocks(model).modules())  # transformers keeps them there
    for view in (early, probes.load(model)):
        assert all(view.parts(layer) is not None for layer in range(BLOCKS))
        measured = probes.jacobian(view, IDS, method="sketch", products=8)
        assert measured.attrs["engine"] == "parts"
        assert "fallback" not in measured.attrs
        np.testing.assert_array_equal(measured["sensitivity"], expected["sensitivity"])
        np.testing.assert_array_equal(
            second_moment(view, IDS[:1], attention="measured")["sensitivity"], theory["sensitivity"]
        )


# ----------------------------------------------------------------------------------- what may change what a block does


class Scaled(nn.Linear):
    """Linear in another way than its weight says."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _subclass(block: Any) -> None:
    class Louder(type(block.mlp)):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    block.mlp.__class__ = Louder


def _forward(block: Any) -> None:
    own = block.mlp.forward
    block.mlp.forward = lambda x: 2 * own(x)


PUT: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (lambda block: block.mlp.register_forward_hook(halved), r"forward hook 'test_hooks\.halved' on its mlp"),
    "pre-hook": (
        lambda block: block.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:])),
        r"forward pre-hook 'test_hooks\..*<lambda>' on its LlamaDecoderLayer",
    ),
    "backward hook": (
        lambda block: block.mlp.register_full_backward_hook(lambda module, into, out: (into[0] * 2,)),
        r"backward hook 'test_hooks\..*<lambda>' on its mlp",
    ),
    "forward": (_forward, r"forward pass 'test_hooks\._forward\.<locals>\.<lambda>' on its mlp"),
    "linear": (
        lambda block: setattr(block.self_attn.q_proj, "__class__", Scaled),
        r"module 'test_hooks\.Scaled' as its self_attn\.q_proj",
    ),
    "class": (_subclass, r"module 'test_hooks\._subclass\.<locals>\.Louder' as its mlp"),
}


@pytest.mark.parametrize("put", PUT)
def test_what_may_change_a_block_keeps_it_whole_and_is_named(put):
    model = families.model("llama")
    act, says = PUT[put]
    act(blocks(model)[1])
    seen = probes.load(model)
    assert [seen.parts(layer) is None for layer in range(BLOCKS)] == [False, True, False]
    with pytest.warns(UserWarning, match=rf"engine autograd for block 1 \({says}\)"):
        found = probes.jacobian(seen, IDS[:1])
    assert found.attrs["engine"] == "autograd+parts"
    assert found.attrs["fallback"].startswith("block 1 (")
    own = probes.jacobian(seen, IDS[:1], engine="autograd")  # asked for: nothing to say
    assert "fallback" not in own.attrs
    # float32's rounding through blocks with logits around 60, beside changes by a factor of two
    np.testing.assert_allclose(found["sensitivity"], own["sensitivity"], rtol=1e-3)
    plain = probes.jacobian(probes.load(families.model("llama")), IDS[:1])
    assert not np.allclose(found["sensitivity"], plain["sensitivity"], rtol=1e-2)
    for refused in (lambda: second_moment(seen, IDS), lambda: probes.jacobian(seen, IDS, engine="parts")):
        with pytest.raises(InputError, match=says):
            refused()
    with pytest.raises(InputError, match=says):  # through views of the view, too
        second_moment(probes.swapped(seen, "zero"), IDS)


# ------------------------------------------------------------------------------------------- changed after loading


def _view(model: Any, backend: Any = "transformers", **options: Any) -> Any:
    seen = probes.load(model, backend, **options)
    seen.embed(IDS)
    return seen


def refused(seen: Any, says: str) -> None:
    embeddings = torch.zeros(1, 4, families.WIDTH)
    for call in (lambda: seen.embed(IDS), lambda: seen.trace(embeddings), lambda: probes.sinks(seen, IDS)):
        with pytest.raises(InputError, match=rf"was changed after it was loaded \({says}\).*load it again"):
            call()


@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_hook_set_or_removed_after_loading_is_refused_by_name(name, backend):
    model = families.model(name)
    seen = _view(model, backend)
    handle = attention(blocks(model)[1]).register_forward_hook(halved)
    refused(seen, r"new forward hook 'test_hooks\.halved' on its .*1\.(self_)?attn")
    hooked = _view(model, backend)
    assert not torch.equal(hooked.residual(hooked.embed(IDS)), _view(families.model(name), backend).embed(IDS))
    handle.remove()
    seen.embed(IDS)  # as it was loaded
    refused(hooked, r"removed forward hook 'test_hooks\.halved' on its .*1\.(self_)?attn")


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_bridge_s_hooks_after_loading_are_refused_by_name(name):
    bridge: Any = boot(families.model(name), name)
    seen = _view(bridge)
    bridge(IDS)  # in its first pass a bridge sets hooks of its own
    bridge.run_with_cache(IDS)
    seen.embed(IDS)

    def doubled(tensor: Tensor, hook: Any) -> Tensor:
        return 2 * tensor

    bridge.add_hook("blocks.1.attn.hook_pattern", doubled)
    refused(seen, r"new forward hook 'test_hooks\..*\.doubled' on its blocks\.1\..*hook_pattern")
    bridge.reset_hooks()
    seen.embed(IDS)


def _other_module(model: Any) -> None:
    model.model.layers[2].mlp = families.model("llama").model.layers[2].mlp  # type: ignore[union-attr]


CHANGED: dict[str, tuple[Callable[[Any], object], str]] = {
    "forward": (lambda model: _forward(model.model.layers[0]), r"other forward pass on its model\.layers\.0\.mlp"),
    "module": (_other_module, r"replaced module model\.layers\.2\.mlp"),
    "fewer modules": (lambda model: model.model.layers.__delitem__(2), r"removed module model\.layers\.2"),
    "dtype": (lambda model: model.to(torch.bfloat16), r"other weights on its model\.embed_tokens"),
    "weights": (
        lambda model: model.load_state_dict(families.model("llama", seed=1).state_dict(), assign=True),
        r"other weights on its model\.embed_tokens",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_a_view_does_not_follow_is_refused(change):
    model = families.model("llama")
    seen = _view(model)
    act, says = CHANGED[change]
    act(model)
    refused(seen, says)


def test_weights_changed_in_place_are_followed_where_they_are_shared():
    model = families.model("llama")
    seen, copied = _view(model), _view(model, dtype="float64")
    before, name = seen.embed(IDS), seen.identity.weights
    model.train().requires_grad_(False)  # neither changes what a view computes
    model.load_state_dict(families.model("llama", seed=1).state_dict())
    expected = _view(families.model("llama", seed=1))
    assert not torch.equal(seen.embed(IDS), before)
    assert torch.equal(seen.residual(seen.embed(IDS)), expected.residual(expected.embed(IDS)))
    assert seen.identity.weights == expected.identity.weights != name
    refused(copied, r"other weights on its model\.embed_tokens")
    lens = _view(families.model("gpt2"), "transformer_lens")  # its caller's model is gone, and cannot change
    assert lens.identity.weights


def test_a_view_does_not_keep_its_caller_s_model_alive():
    model = families.model("llama")
    seen, alive = _view(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    seen.embed(IDS)


# ------------------------------------------------------------------------------------- what the attention is told


def tell(model: Any, **told: Any) -> Any:
    """The model, the attention of whose block 1 gives these to its attention function."""

    def telling(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | told

    attention(blocks(model)[1]).register_forward_pre_hook(telling, with_kwargs=True)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_refuses_what_it_does_not_know_by_name(name):
    for told, says in (
        ({"s_aux": torch.zeros(4)}, r"\w*Attention gives its attention 's_aux', which probes do not know"),
        ({"head_mask": torch.zeros(4)}, r"head_mask=tensor"),
        ({"is_causal": False}, r"is_causal=False"),
        ({"attention_mask": torch.zeros(2, 1, 10, 10)}, "a mask of its own"),
    ):
        seen = probes.load(tell(families.model(name), **told))
        embeddings = seen.embed(IDS)
        for call in (seen.residual, seen.trace):
            with pytest.raises(InputError, match=says):
                call(embeddings)
    same = probes.load(tell(families.model(name), head_mask=None, is_causal=True, output_attentions=True))
    plain = probes.load(families.model(name))
    assert torch.equal(same.residual(same.embed(IDS)), plain.residual(plain.embed(IDS)))


def test_attention_refuses_dropout_and_what_looks_ahead():
    given = torch.randn(3, 1, 2, 5, 8)
    attend: Any = AttentionInterface()[ATTENTION]
    output, _ = attend(nn.Identity(), *given, None, scaling=0.5, dropout=0.0, position_ids=None, use_cache=False)
    assert output.shape == (1, 5, 2, 8)
    with pytest.raises(InputError, match=r"dropout=0\.1, which probes do not follow"):
        attend(nn.Identity(), *given, None, dropout=0.1)
    config: Any = FAMILIES["llama"]()
    config.is_causal = False  # how transformers makes an encoder of a decoder
    seen = probes.load(families.build(config))
    with pytest.raises(InputError, match="is_causal=False"):
        seen.residual(seen.embed(IDS))
