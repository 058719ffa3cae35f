"""The toys' pass against a slow twin in float64, for every combination of switches; side by side, too."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import made_toys as toys
import pytest
import reference_toys
import torch
from commands import bad_input
from made_toys import EXACT, LOOKS, OTHERS, moved, named, switches_of, tolerance
from torch import Tensor

from toy.model import Architecture, forward, initial
from toy.train import stacked

VOCABULARY, OUTPUTS, PROMPTS = 6, 3, 2
architecture = partial(toys.architecture, length=6, vocabulary=VOCABULARY, outputs=OUTPUTS)


def some_inputs(a: Architecture, models: int = 1) -> Tensor:
    """Token ids [E, B, T]."""
    return torch.randint(VOCABULARY, (models, PROMPTS, a.length), generator=torch.Generator().manual_seed(7))


def close(found: Tensor, expected: Tensor, noise: float = EXACT) -> None:
    torch.testing.assert_close(found, expected, rtol=noise, atol=noise)


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_every_combination_of_switches_is_the_twin_s(look):
    seen = set()
    for n, other in enumerate(OTHERS):
        a = architecture(**look, **other)
        weights, inputs = moved(a, n), some_inputs(a)
        truth = torch.stack([reference_toys.toy_pass(a, weights, ids)[1] for ids in inputs[0]])
        batched, switches = stacked([weights]), switches_of(a)
        close(forward(a, batched, switches, inputs)[0], truth, tolerance(a))
        del batched["embedding"]
        vectors = weights["embedding"][inputs]
        close(forward(replace(a, vocabulary=None), batched, switches, vectors)[0], truth, tolerance(a))
        seen.add(round(float(truth.sum()), 9))
    assert len(seen) == len(OTHERS)  # every switch does something


RICH: dict[str, Any] = {"norm": "rms", "feed_forward": True}
FOUR: dict[str, Any] = RICH | {"heads": 4, "width": 16}
OTHER_SHAPES: list[dict[str, Any]] = [
    {"attention": "sigmoid", "mask": "window", "window": 4},
    {"attention": "relu", "positional": "rope", "feed_forward": True},
    *({"blocks": n, "heads": h, "width": 8, "positional": "learned"} | RICH for n, h in ((1, 1), (3, 4))),
    *(FOUR | {"kv_heads": n, "positional": "rope", "frequencies": (0.5, 0.02)} for n in (1, 2)),
    FOUR | {"kv_heads": 1, "positional": "rope", "qk_norm": True, "post_norm": True},
]


@pytest.mark.parametrize("switches", OTHER_SHAPES, ids=str)
def test_other_shapes_and_kinds_of_attention_are_the_twin_s(switches):
    a = architecture(**switches)
    weights, inputs = moved(a), some_inputs(a)
    assert weights["0.k"].shape == weights["0.v"].shape == (a.width, a.head_dim * (a.kv_heads or a.heads))
    truth = torch.stack([reference_toys.toy_pass(a, weights, ids)[1] for ids in inputs[0]])
    leaves = {name: tensor.requires_grad_() for name, tensor in stacked([weights]).items()}
    found = forward(a, leaves, switches_of(a), inputs)
    close(found[0], truth, tolerance(a))
    slopes = torch.autograd.grad(found.sum(), list(leaves.values()))
    assert all(slope.isfinite().all() for slope in slopes)  # where a query does not look, too
    plain = replace(a, attention="softmax", frequencies=None, qk_norm=False, post_norm=False)
    if plain != a:
        drawn, old = initial(a, 0), initial(plain, 0)
        assert all(torch.equal(drawn[name], tensor) for name, tensor in old.items())  # norms draw nothing
        leaves = {name: leaves[name] for name in old}
        assert not torch.allclose(forward(plain, leaves, switches_of(plain), inputs)[0], truth)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("other", [OTHERS[0], OTHERS[13], OTHERS[-1]])
def test_models_of_mixed_switches_side_by_side_are_each_alone(learned, other):
    looks = [look | {"residual": on} for look in LOOKS for on in (True, False)]
    mixed = [architecture(**(other | look)) for look in looks if (look["positional"] == "learned") == learned]
    assert len({a.shape for a in mixed}) == 1
    every, inputs = [moved(a, seed) for seed, a in enumerate(mixed)], some_inputs(mixed[0], len(mixed))
    together = forward(mixed[0], stacked(every), switches_of(*mixed), inputs)
    for n, a in enumerate(mixed):
        close(together[n], forward(a, stacked([every[n]]), switches_of(a), inputs[n : n + 1])[0])


def test_fresh_weights_depend_on_seed_and_shape_alone_and_factors_multiply_those_of_their_kind():
    plain = partial(architecture, feed_forward=True, norm="layer", head="mlp")
    state = torch.random.get_rng_state()
    first, other = initial(plain(), 3), initial(plain(), 4)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's numbers are used up
    assert not torch.equal(first["0.q"], other["0.q"])
    for look in (look | {"residual": on} for look in LOOKS if look["positional"] != "learned" for on in (True, False)):
        found = initial(plain(**look), 3)
        assert list(found) == list(first)
        assert all(torch.equal(first[name], found[name]) for name in first)
    assert {*initial(plain(positional="learned"), 3)} == {*first, "positions"}
    factors = {"embedding": 0.5, "bias": 0.0, "down": 2.0}
    for name, tensor in initial(plain(factors=tuple(factors.items())), 3).items():
        assert torch.equal(tensor, first[name] * factors.get(name.rpartition(".")[2], 1.0))


def test_fresh_weights_have_torch_s_own_sizes():
    a = Architecture(blocks=1, width=64, length=50, vocabulary=300, outputs=64, positional="learned", feed_forward=True)
    found = initial(a, 0)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    inputs = {"0.q": 64, "0.o": 64, "0.up": 64, "0.down": 256, "0.up.bias": 64, "unembedding": 64}
    for name, number in inputs.items():
        bound = number**-0.5
        assert float(found[name].abs().max()) <= bound
        assert float(found[name].std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)  # uniform
    for name in ("embedding", "positions"):
        assert float(found[name].std()) == pytest.approx(1, rel=0.05)
    assert found["0.up"].shape == (64, 256)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"mask": "casual"}, "mask='casual' is unknown; give one of full, causal, window, prefix"),
    ({"heads": 3}, "3 heads do not divide a width of 4; give a divisor of it"),
    ({"heads": 4, "width": 8, "kv_heads": 3}, "3 key-value heads do not divide 4 heads"),
    ({"positional": "rope", "heads": 4}, "rope turns pairs, and a head of width 1 is odd; give heads an even width"),
    ({"positional": "sinusoidal", "width": 5, "heads": 1}, "fills pairs, and width 5 is odd; give an even width"),
    ({"positional": "rope", "frequencies": (1.0, 0.1)}, "are not those of 1 planes of rope"),
    ({"mask": "window"}, "mask is 'window' and window is None; give both or neither"),
    ({"mask": "prefix", "prefix": 7}, "prefix=7 does not fit 6 positions"),
    ({"post_norm": True}, "qk_norm and post_norm are norms, and norm is 'none'; give norm='rms' or 'layer'"),
    ({"positional": "decay", "decay": 0.1, "mask": "full"}, "mask 'full' shows later tokens; give mask='causal' or"),
]


def test_impossible_combinations_are_refused():
    for switches, said in IMPOSSIBLE:
        with bad_input(said):
            architecture(**switches)
    assert architecture(mask="window", window=6).window == architecture(mask="prefix", prefix=6).prefix == 6
