"""What tests of the measurements share: prompts, views of every family, twins of what heads do, heads of known answer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
import reference_heads
import torch
import xarray as xr
from torch import Tensor

import probes
from probes.errors import InputError
from probes.models.families import FAMILIES as ROWS
from probes.models.huggingface import HuggingFaceView
from probes.models.linear import LinearizedBlock
from probes.models.view import Attention, Parts, Trace, View
from probes.results.dataset import load, save

BACKENDS = ("transformers", "transformer_lens")


def backends(name: str) -> tuple[str, ...]:
    """TransformerLens takes for granted that GPT-NeoX has biases."""
    family, _, variant = name.partition(", ")
    return BACKENDS if ROWS[family].no_lens is None and variant != "no biases" else BACKENDS[:1]


EVERY = [(name, backend) for name in families.FAMILIES for backend in backends(name)]
BOTH = [name for name in families.FAMILIES if len(backends(name)) == 2]
# Every family but in one backend, and two families in both.
SOME = [
    *((name, backends(name)[n % len(backends(name))]) for n, name in enumerate(families.FAMILIES)),
    ("llama", BACKENDS[1]),
    ("gpt2", BACKENDS[1]),
]
LAYER_NORM = ("gpt2", "gpt_neox")  # the others' RMS norms compute in float32, even in float64 models
BRUTE = {name: 1e-11 if name in LAYER_NORM else 5e-5 for name in families.FAMILIES}


def drawn_tokens(prompts: int = 3, length: int = 12, *, least: int = 0, first: Any = None, seed: int = 5) -> Tensor:
    """Random ids from `least` on, longer than the windows; `first` at position 0 if given."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(least, families.VOCABULARY, (prompts, length), generator=generator)
    tokens[:, 0] = tokens[:, 0] if first is None else first
    return tokens


TOKENS = drawn_tokens()


@cache
def view(name: str, backend: Any = "transformers", dtype: str = "float32", bos: Any = "prepended") -> Any:
    """Not to be changed: several tests have the same."""
    made = families.model(name, dtype=getattr(torch, dtype))
    return probes.load(made, backend, tokenizer=families.tokenizer(bos), device="cpu")


def close(got: Any, truth: Any, rtol: float, atol: float = 0.0) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(truth), rtol=rtol, atol=atol)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


def refused(*words: str) -> Any:
    """An error of one line with these words in this order."""
    return pytest.raises(InputError, match=r"\A[^\n]*" + "[^\n]*".join(words) + r"[^\n]*\Z")


def watched(seen: Any, embeddings: Tensor, **options: Any) -> list[tuple[int, Attention]]:
    found: list[tuple[int, Attention]] = []
    with seen.watching(lambda layer, attention: found.append((layer, attention))):
        seen.residual(embeddings, **options)
    return found


def hooks_of(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m)))
        for name, m in model.named_modules()
    }


def complete(ds: xr.Dataset, path: Path) -> None:
    """Every variable says what it is and in which unit, and the file gives all of it back."""
    for name, variable in ds.data_vars.items():
        assert name == "tokens" or (variable.attrs["long_name"] and variable.attrs["units"]), name
    save(ds, path)
    assert load(path).identical(ds)


def parts_of(model: View, layer: int) -> Parts:
    parts = model.parts(layer)
    assert parts is not None
    return parts


def linearized(model: View, trace: Trace, layer: int) -> LinearizedBlock:
    return LinearizedBlock(parts_of(model, layer), trace.residual[layer], trace.rotary[layer])


def brute_model(name: str) -> Any:
    config = families.FAMILIES[name]()
    config._attn_implementation = "sdpa" if name in LAYER_NORM else "eager"
    return families.build(config, dtype=torch.float64)


def brute(
    model: Any, tokens: Tensor, query: int, readout: str = "residual", layer: int = 0, summed: bool = False
) -> np.ndarray:
    """Sensitivities of one prompt by autograd through the whole transformers model, one output at a time."""
    decoder = model.get_decoder()
    final = next(getattr(decoder, n) for n in ("ln_f", "final_layer_norm", "norm") if hasattr(decoder, n))
    held: dict[str, Tensor] = {}

    def before_block(module: Any, args: Any, kwargs: Any) -> Any:
        held["source"] = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        return ((held["source"], *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": held["source"]})

    def at_norm(module: Any, args: Any, output: Tensor) -> None:
        held["residual"], held["normed"] = args[0], output

    handles = [
        families.blocks(model)[layer].register_forward_pre_hook(before_block, with_kwargs=True),
        final.register_forward_hook(at_norm),
    ]
    held["logits"] = model(tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    outputs = held[readout][0, query]
    outputs = outputs.sum()[None] if summed else outputs
    return reference.jacobian_norms(outputs, held["source"]).numpy() / families.WIDTH**0.5


def by_readout(model: View, last: Tensor, readout: str) -> Tensor:
    """The derivative [output, d] of a readout by the last position's stream after the last block."""
    readouts: Any = {"residual": lambda x: x, "normed": model.norm, "logits": lambda x: model.unembed(model.norm(x))}
    return torch.autograd.functional.jacobian(readouts[readout], last).detach()  # pyright: ignore[reportAttributeAccessIssue]


def recorded(model: View, tokens: Tensor) -> list[dict[str, list[Tensor]]]:
    """By prompt, each run alone: patterns, keys and values by block, of queries and keys taken to float64.

    And "learned" [H, T], the weights on learned sink logits.
    """

    def learned(a: Attention) -> Tensor:
        none = torch.zeros_like(a.query[0, ..., 0])
        return none if a.sink is None else (a.sink[:, None] - a.weighed()[1][0, ..., 0]).exp()

    found = []
    for prompt in tokens:
        trace = model.trace(model.embed(prompt[None]), attention=True)
        exact = [replace(a, query=a.query.double(), key=a.key.double()) for a in trace.attention]
        parts = {"patterns": [a.pattern()[0] for a in exact], "keys": [a.key[0] for a in exact]}
        found.append(parts | {"values": [a.value[0].double() for a in exact], "learned": list(map(learned, exact))})
    return found


def behind(model: View, run: dict[str, list[Tensor]], layer: int) -> Tensor:
    """The derivative [T, d, d] of the norm on a block's attention, of one prompt as `recorded`; the identity without one."""
    parts, weights = parts_of(model, layer), model.output_weights(layer).double()
    branch = ((run["patterns"][layer].double() @ run["values"][layer]) @ weights).sum(0).detach()
    bias = 0 if parts.o.bias is None else parts.o.bias.detach()
    return reference_heads.derivatives(parts.post_attention_norm, branch + bias).detach()


# ------------------------------------------------------------------------------------------- a head of known answer

SINK, TEXT = 0, 1  # ids


def known_model(*, sink_value: Sequence[float], text_value: Sequence[float], sharp: float = 0.0) -> HuggingFaceView:
    """One head, one block, no positions: v is a given vector for the sink's token and for all others.

    The logit of every query on the sink's token exceeds the others' by `sharp`; at 0 attention is uniform. W_O triples
    the first value dimension.
    """
    config = families.sized(4, 256, 4, num_attention_heads=1, rms_norm_eps=1e-30, tie_word_embeddings=False)
    view = probes.fresh(config, positional=False)
    assert isinstance(view, HuggingFaceView)
    parts = view.parts(0)
    assert parts is not None
    assert parts.attention_norm is not None
    assert parts.attention_norm.weight.tolist() == [1] * 4
    with torch.no_grad():
        table = view._model.get_input_embeddings().weight
        table.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 1.0, 0, 0], [0, 1.0, 0, 0]]))
        # The norm makes both vectors 2 long, in their own directions.
        parts.v.weight.zero_()
        parts.v.weight[:, 0] = torch.tensor(sink_value) / 2
        parts.v.weight[:, 1] = torch.tensor(text_value) / 2
        parts.q.weight.zero_()
        parts.q.weight[0, :] = 0.5 * torch.tensor([1.0, 1, 0, 0])  # 1 for every token
        parts.k.weight.zero_()
        parts.k.weight[0, 0] = sharp / 2 / parts.scale
        parts.o.weight.copy_(torch.diag(torch.tensor([3.0, 1, 1, 1])))
    return view


def known_tokens(length: int) -> Tensor:
    tokens = torch.full((2, length), TEXT)
    tokens[:, 0] = SINK
    tokens[1, 1:] = 2
    return tokens
