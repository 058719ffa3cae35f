"""The toys' pass, in both layouts, against a slow twin in float64, for every combination of switches; side by side, too."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from probes.errors import InputError
from toy import narrow
from toy.model import Architecture, Switches, block, embedded, forward, initial, last_block

LENGTH, WIDTH, VOCABULARY, OUTPUTS, PROMPTS = 5, 4, 6, 3, 2
EXACT = 1e-12  # float64, sums in another order
# Cosines, sines and decays enter the pass as they were rounded to float32.
ROUNDED = 1e-6
MASKS: tuple[dict[str, Any], ...] = (
    {"mask": "causal"},
    {"mask": "window", "window": 2},
    {"mask": "prefix", "prefix": 3},
    {"mask": "full"},
)
POSITIONS: tuple[dict[str, Any], ...] = (
    {"positional": "none"},
    {"positional": "learned"},
    {"positional": "sinusoidal"},
    {"positional": "rope"},
    {"positional": "decay", "decay": 0.3},
)
# Those that can be together: decay is a loss per token into the past.
LOOKS = [m | p for m in MASKS for p in POSITIONS if p["positional"] != "decay" or m["mask"] in ("causal", "window")]
OTHERS = [
    dict(zip(("feed_forward", "norm", "output_projection", "head"), values, strict=True))
    for values in product((False, True), ("none", "rms", "layer"), (True, False), ("linear", "mlp"))
]


def named(look: dict[str, Any]) -> str:
    return f"{look['mask']}, {look['positional']}"


def architecture(**switches: Any) -> Architecture:
    """Two blocks of two heads of width 2."""
    plain: dict[str, Any] = {
        "blocks": 2,
        "heads": 2,
        "width": WIDTH,
        "length": LENGTH,
        "vocabulary": VOCABULARY,
        "outputs": OUTPUTS,
    }
    return Architecture(**(plain | switches))


def moved(a: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Fresh weights, norms' ones and zeros moved and attention far from uniform, so that nothing hides; float64."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in initial(a, seed).items():
        wide = 4.0 if name.endswith((".q", ".k")) else 1.0
        alive = 1.0 if name.startswith("head.") and name.endswith(".bias") else 0.0  # of so few ReLUs all could be off
        found[name] = wide * tensor.double() + 0.2 * torch.randn(tensor.shape, generator=generator).double() + alive
    return found


def side_by_side(every: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([weights[name] for weights in every]) for name in every[0]}


def switches_of(*architectures: Architecture) -> Switches:
    """In float64."""
    made = Switches.of(architectures)
    named = {name: getattr(made, name) for name in ("bias", "cos", "sin", "added", "keep")}
    return replace(made, **{name: x.double() for name, x in named.items() if x is not None})


def some_inputs(a: Architecture, models: int = 1, prompts: int = PROMPTS) -> Tensor:
    """Token ids [E, B, T], or vectors [E, B, T, d]."""
    generator = torch.Generator().manual_seed(7)
    if a.vocabulary is None:
        return torch.randn(models, prompts, a.length, a.width, generator=generator).double()
    return torch.randint(a.vocabulary, (models, prompts, a.length), generator=generator)


def in_columns(a: Architecture, weights: dict[str, Tensor], switches: Switches, ids: Tensor) -> Tensor:
    """The narrow layout's logits [E, B, outputs]."""
    columns = narrow.one_hot(ids, a.vocabulary or 0).double()
    return narrow.forward(a, weights, switches, columns).transpose(1, 2)


def slopes_of(run: Any, a: Architecture, weights: dict[str, Tensor], switches: Switches, inputs: Tensor) -> Any:
    """Of one random functional of the logits, by every weight."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    out = run(a, leaves, switches, inputs)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    return torch.autograd.grad((out * slope).sum(), list(leaves.values()))


@pytest.fixture(params=["at once", "by query"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrow layout's two ways through attention, which sizes decide between; all of this file's are small."""
    monkeypatch.setattr(narrow, "FEW", 0 if request.param == "by query" else 10**9)


def tolerance(a: Architecture) -> float:
    return EXACT if a.positional in ("none", "learned") else ROUNDED


def close(found: Tensor, expected: Tensor, noise: float) -> None:
    torch.testing.assert_close(found, expected, rtol=noise, atol=noise)


# ------------------------------------------------------------------------------------------------ against the twin


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_every_combination_of_switches_is_the_twin_s(look, residual):
    seen = set()
    for n, other in enumerate(OTHERS):
        a = architecture(**look, residual=residual, **other)
        weights, inputs = moved(a, n), some_inputs(a)
        truth = torch.stack([reference.toy_pass(a, weights, ids)[1] for ids in inputs[0]])
        batched, switches = side_by_side([weights]), switches_of(a)
        noise = tolerance(a)
        close(forward(a, batched, switches, inputs)[0], truth, noise)
        close(in_columns(a, batched, switches, inputs)[0], truth, noise)
        vectors = replace(a, vocabulary=None)
        del batched["embedding"]
        close(forward(vectors, batched, switches, weights["embedding"][inputs])[0], truth, noise)
        seen.add(round(float(truth.sum()), 9))
    assert len(seen) == len(OTHERS)  # every switch does something


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_layouts_have_the_same_gradients(look, residual):
    for n, other in enumerate(OTHERS[::2]):
        a = architecture(**look, residual=residual, **other)
        weights, inputs, switches = side_by_side([moved(a, n)]), some_inputs(a), switches_of(a)
        found = [slopes_of(run, a, weights, switches, inputs) for run in (forward, in_columns)]
        assert all(float(one.abs().max()) > 0 for one in found[0])
        for one, other_layout in zip(*found, strict=True):
            close(one, other_layout, EXACT * 100)  # of slopes up to about 100


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_other_depths_and_heads(blocks, heads):
    for look in ({"mask": "causal"}, {"mask": "prefix", "prefix": 2, "positional": "learned"}):
        a = architecture(blocks=blocks, heads=heads, width=8, norm="rms", feed_forward=True, **look)
        weights, inputs = moved(a), some_inputs(a)
        truth = torch.stack([reference.toy_pass(a, weights, ids)[1] for ids in inputs[0]])
        batched, switches = side_by_side([weights]), switches_of(a)
        close(forward(a, batched, switches, inputs)[0], truth, EXACT)
        close(in_columns(a, batched, switches, inputs)[0], truth, EXACT)


@pytest.mark.parametrize("look", LOOKS, ids=named)
@pytest.mark.parametrize("blocks", [1, 2])
def test_one_query_of_the_last_block_is_the_last_row_of_all(look, blocks):
    for residual, norm, projected in product((True, False), ("none", "layer"), (True, False)):
        a = architecture(
            **look, blocks=blocks, residual=residual, norm=norm, output_projection=projected, feed_forward=projected
        )
        weights, switches = side_by_side([moved(a)]), switches_of(a)
        x = embedded(weights, switches, some_inputs(a))
        whole = block(a, weights, switches, blocks - 1, x)
        close(last_block(a, weights, switches, x), whole[:, :, -1:], EXACT)


# ------------------------------------------------------------------------------------------------------ side by side


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("other", [OTHERS[0], OTHERS[-1]])
def test_models_of_mixed_switches_side_by_side_are_each_alone(learned, other):
    mixed = [
        architecture(**look, residual=residual, **other)
        for look in LOOKS
        for residual in (True, False)
        if (look["positional"] == "learned") == learned
    ]
    assert len({a.shape for a in mixed}) == 1
    every = [moved(a, seed) for seed, a in enumerate(mixed)]
    weights, switches, inputs = side_by_side(every), switches_of(*mixed), some_inputs(mixed[0], len(mixed))
    together, columns = forward(mixed[0], weights, switches, inputs), in_columns(mixed[0], weights, switches, inputs)
    assert together.shape == (len(mixed), PROMPTS, OUTPUTS)
    for n, a in enumerate(mixed):
        alone = forward(a, side_by_side([every[n]]), switches_of(a), inputs[n : n + 1])[0]
        close(together[n], alone, EXACT)
        close(columns[n], alone, EXACT)
    for one, two in zip(
        *(slopes_of(run, mixed[0], weights, switches, inputs) for run in (forward, in_columns)), strict=True
    ):
        close(one, two, EXACT * 100)


@pytest.mark.parametrize("counts", [[2, 2], [3, 1]])
def test_models_that_read_one_stream_take_one_copy_of_it(counts):
    a = architecture(norm="rms")
    every, switches = [moved(a, seed) for seed in range(4)], switches_of(*[a] * 4)
    weights, streams = side_by_side(every), some_inputs(a, 2)
    which = [0] * counts[0] + [1] * counts[1]
    columns = narrow.one_hot(streams, VOCABULARY).double()
    found = narrow.forward(a, weights, switches, columns, counts).transpose(1, 2)
    close(found, forward(a, weights, switches, streams[which]), EXACT)


def test_inputs_that_all_models_share():
    a = architecture(vocabulary=None, norm="layer", feed_forward=True, head="mlp")
    weights = side_by_side([moved(a, seed) for seed in range(3)])
    shared, switches = some_inputs(a), switches_of(a, a, a)
    close(forward(a, weights, switches, shared), forward(a, weights, switches, shared.expand(3, -1, -1, -1)), EXACT)


def test_a_query_that_sees_less_is_moved_by_less():
    """Every mask from its definition: which inputs the last position's logits depend on in one block."""
    for look, felt in zip(MASKS, ([0, 1, 2, 3, 4], [3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), strict=True):
        a = architecture(vocabulary=None, blocks=1, **look)
        inputs = some_inputs(a).requires_grad_()
        out = forward(a, side_by_side([moved(a)]), switches_of(a), inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs)
        assert slope[0].abs().amax((0, 2)).nonzero().flatten().tolist() == felt
    # In two blocks position 0 hears from the prefix through others, and from nothing behind it.
    a = architecture(vocabulary=None, blocks=1, mask="prefix", prefix=3)
    x = some_inputs(a).requires_grad_()
    first = block(a, side_by_side([moved(a)]), switches_of(a), 0, x)[:, :, 0]
    (slope,) = torch.autograd.grad(first.sum(), x)
    assert slope[0].abs().amax((0, 2)).nonzero().flatten().tolist() == [0, 1, 2]


# ---------------------------------------------------------------------------------------------------- fresh weights


def test_fresh_weights_depend_on_seed_and_shape_alone():
    a = architecture(feed_forward=True, norm="layer", head="mlp")
    state = torch.random.get_rng_state()
    first, again, other = initial(a, 3), initial(a, 3), initial(a, 4)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's numbers are used up
    assert list(first) == list(again)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.q"], other["0.q"])
    same = [
        architecture(feed_forward=True, norm="layer", head="mlp", residual=residual, **look)
        for look in LOOKS
        for residual in (True, False)
        if look["positional"] != "learned"
    ]
    assert {one.shape for one in same} == {a.shape}
    for one in same:
        found = initial(one, 3)
        assert all(torch.equal(first[name], found[name]) for name in first)
        assert set(found) == set(first)
    learned = initial(architecture(positional="learned", feed_forward=True, norm="layer", head="mlp"), 3)
    assert set(learned) == {*first, "positions"}


def test_fresh_weights_have_torch_s_own_sizes():
    a = Architecture(blocks=1, width=64, length=50, vocabulary=300, outputs=64, positional="learned", feed_forward=True)
    found = initial(a, 0)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    for name, inputs in (
        ("0.q", 64),
        ("0.o", 64),
        ("0.up", 64),
        ("0.down", 256),
        ("0.up.bias", 64),
        ("unembedding", 64),
    ):
        bound = inputs**-0.5
        assert float(found[name].abs().max()) <= bound
        assert float(found[name].std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)  # uniform
    for name in ("embedding", "positions"):
        assert float(found[name].std()) == pytest.approx(1, rel=0.05)
    assert found["0.up"].shape == (64, 256)
    # torch's own layers begin alike.
    assert float(torch.nn.Linear(64, 64).weight.detach().abs().max()) <= 64**-0.5


# ------------------------------------------------------------------------------------------------------- what cannot be

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"blocks": 0}, "blocks=0 is too few; give at least 1"),
    ({"heads": 0}, "heads=0 is too few"),
    ({"width": 0}, "width=0 is too few"),
    ({"length": 0}, "length=0 is too few"),
    ({"outputs": 0}, "outputs=0 is too few"),
    ({"vocabulary": 0}, "vocabulary=0 is too few"),
    ({"heads": 3}, "3 heads do not divide a width of 4; give a divisor of it"),
    ({"mask": "casual"}, "mask='casual' is unknown; give one of full, causal, window, prefix"),
    ({"positional": "alibi"}, "positional='alibi' is unknown; give one of none, learned, sinusoidal, rope, decay"),
    ({"norm": "batch"}, "norm='batch' is unknown; give one of none, rms, layer"),
    ({"head": "deep"}, "head='deep' is unknown; give one of linear, mlp"),
    ({"positional": "rope", "heads": 4}, "rope turns pairs, and a head of width 1 is odd; give heads an even width"),
    ({"positional": "sinusoidal", "width": 5, "heads": 1}, "fills pairs, and width 5 is odd; give an even width"),
    ({"mask": "window"}, "mask is 'window' and none is given; give window=N with mask='window', and only there"),
    ({"mask": "prefix"}, "mask is 'prefix' and none is given; give prefix=N"),
    ({"window": 2}, "mask is 'causal' and window=2 is given; give window=N with mask='window', and only there"),
    ({"prefix": 2}, "mask is 'causal' and prefix=2 is given"),
    ({"mask": "full", "prefix": 2}, "mask is 'full' and prefix=2 is given"),
    ({"mask": "window", "window": 2, "prefix": 2}, "mask is 'window' and prefix=2 is given"),
    ({"mask": "window", "window": 0}, "window=0 does not fit 5 positions; give from 1 to 5"),
    ({"mask": "window", "window": 6}, "window=6 does not fit 5 positions"),
    ({"mask": "prefix", "prefix": 0}, "prefix=0 does not fit 5 positions"),
    ({"mask": "prefix", "prefix": 6}, "prefix=6 does not fit 5 positions"),
    ({"positional": "decay"}, "positional is 'decay' and decay is None; give decay=M with positional='decay'"),
    ({"decay": 0.1}, "positional is 'none' and decay is 0.1; give decay=M with positional='decay', and only there"),
    (
        {"positional": "decay", "decay": -0.1},
        "decay=-0.1 is no rate; give a finite number of nats per token, 0 or more",
    ),
    ({"positional": "decay", "decay": math.inf}, "decay=inf is no rate"),
    ({"positional": "decay", "decay": math.nan}, "decay=nan is no rate"),
    ({"positional": "decay", "decay": 0.1, "mask": "full"}, "mask 'full' shows later tokens; give mask='causal' or"),
    ({"positional": "decay", "decay": 0.1, "mask": "prefix", "prefix": 2}, "mask 'prefix' shows later tokens"),
]


@pytest.mark.parametrize(("switches", "said"), IMPOSSIBLE, ids=[said[:40] for _, said in IMPOSSIBLE])
def test_impossible_combinations_are_refused(switches, said):
    with pytest.raises(InputError) as refused:
        architecture(**switches)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
