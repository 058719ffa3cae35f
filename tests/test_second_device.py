"""Everything on a second device, which `sim` makes of the CPU: an operand left behind raises, and numbers are the CPU's.

Attention's kernels are written out there. Numbers differ by float32's rounding (6e-8), amplified by wide weights.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from measured import SOME
from sim import HERE, ONE, OTHER, Simulated
from toy_runs import MIXED, SMALL, copying

import probes
from probes.models.pullback import Pace
from probes.models.view import View
from probes.run.memory import aside, available
from probes.theory.kernel import second_moment
from toy.train import train

NOISE = 1e-3  # of a variable's largest number; what a wrong device would have left out is of that size itself
ZERO = 1e-12  # what is nothing but rounding, in either
LENGTH, PROMPTS = 24, 8


@cache
def tokens(prompts: int = PROMPTS, length: int = LENGTH) -> torch.Tensor:
    drawn = torch.from_numpy(np.random.default_rng(4).integers(3, families.VOCABULARY, (prompts, length)))
    drawn[:, 0] = 0
    return drawn


def reader(**options: Any) -> Any:
    """A view of a small Llama that reads text."""
    tokenizer = probes.load("tiny-llama").tokenizer
    model = families.build(families.small("llama", vocab_size=len(tokenizer), max_position_embeddings=256))
    return probes.load(model, tokenizer=tokenizer, **options)


def near(found: xr.Dataset, expected: xr.Dataset, noise: float = NOISE) -> None:
    """The same variables, whole numbers equal, others within noise (an interval's of its high end); gaps as they were."""
    assert list(found.data_vars) == list(expected.data_vars)
    for name, there in expected.data_vars.items():
        if there.dtype.kind == "f":
            far = expected[str(name).replace("_low", "_high")].values
            most = np.abs(np.nan_to_num([there.values, far], posinf=0, neginf=0)).max(initial=0)
            np.testing.assert_allclose(found[name].values, there.values, 0, noise * most + ZERO, err_msg=str(name))
        else:
            np.testing.assert_array_equal(found[name].values, there.values, err_msg=str(name))


def test_a_simulated_device_is_one():
    with Simulated():
        ones = torch.ones(3, device=ONE)
        for wrong in (
            lambda: ones + torch.ones(3),
            lambda: ones + torch.ones(3, device=OTHER),
            lambda: torch.rand(3, generator=torch.Generator(), device=ONE),
        ):
            with pytest.raises(RuntimeError, match=r"lie on|generator of"):
                wrong()
        square = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        here, there = torch.linalg.eigh(square)[1], torch.linalg.eigh(square.to(ONE))[1].cpu()
        assert torch.equal(here.abs(), there.abs())
        assert not torch.equal(here, there)  # signs are the device's own


SKETCH: dict[str, Any] = {"method": "sketch", "products": 8}
EVICTED: dict[str, Any] = {"evict": (0, 1), "keep": (8,)}
LEAKS: dict[str, Any] = {"bands": [(9, 16)], "bootstrap": 5}
SWAP: dict[str, Any] = LEAKS | {"profile_prompts": 1, "products": 8}
RECALL: dict[str, Any] = {"pairs": 4, "keys": "apart", "digits": 3, "contexts": 2}
PROBES: dict[str, Callable[[View], xr.Dataset]] = {
    "jacobian, exact": lambda view: probes.jacobian(view, tokens(1), pathway="all"),
    "jacobian, sketch": lambda view: probes.jacobian(view, tokens(2), **SKETCH, from_layer="all", readout="normed"),
    "jacobian, autograd": lambda view: probes.jacobian(
        view, tokens(1, 8), **SKETCH, engine="autograd", pathway="score"
    ),
    "jacobian, scalar": lambda view: probes.jacobian(view, tokens(2), method="scalar", readout="logits"),
    "jacobian, fresh": lambda view: probes.jacobian(view.reinitialized(3, positional=False), tokens(2), **SKETCH),
    "theory": lambda view: second_moment(view, tokens(2), attention="measured", score_path=True, from_layer="all"),
    "sinks": lambda view: probes.sinks(view, tokens(), keys="all", reacts="mean", effect=2, **EVICTED),
    "trajectory": lambda view: probes.trajectory(view, tokens(), starts=3),
    "leakage": lambda view: probes.leakage(view, tokens(), **LEAKS, fresh=4),
    "bos_swap": lambda view: probes.bos_swap(view, tokens(4), **SWAP),
    "bos_swap, log Z": lambda view: probes.bos_swap(view, tokens(4), **SWAP, replacement="held-log-z"),
    "decode": lambda view: probes.decode(view, tokens(), controls=2, leakage=False, bootstrap=5, recall=0),
    "inspect": lambda view: probes.inspect(view, "def add(first, second):", **SKETCH, seeds=1),
    "retrieval": lambda view: probes.retrieval(view, **RECALL, mechanism=2, profile_prompts=1),
}


@pytest.mark.parametrize("float64", [True, pytest.param(False, marks=pytest.mark.slow)])  # some devices have none
@pytest.mark.parametrize("probe", PROBES)
def test_every_probe_gives_the_cpu_s_numbers(probe, float64):
    """And on the CPU the same bits twice, whatever random numbers the caller draws in between."""
    expected = PROBES[probe](reader())
    if not float64:
        torch.rand(1000)
        xr.testing.assert_identical(PROBES[probe](reader()).drop_attrs(), expected.drop_attrs())
    with Simulated(float64=float64):
        found = PROBES[probe](reader(device=str(ONE)))
    assert found.attrs["device"] == str(ONE)
    near(found, expected)


@pytest.mark.parametrize("place", [str(ONE), pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "backend"), SOME)
def test_every_family(name, backend, place):
    """A pass, a backward pass and, where blocks can be taken apart, the theory."""

    def measured(device: str) -> list[xr.Dataset]:
        view = probes.load(families.model(name), backend, device=device)
        found = [probes.sinks(view, tokens(2, 12), keys="all"), probes.jacobian(view, tokens(1, 12), **SKETCH)]
        return found if view.parts(0) is None else [*found, second_moment(view, tokens(1, 12), attention="measured")]

    expected = measured("cpu")
    with Simulated(float64=False) if place == str(ONE) else nullcontext():
        found = measured(place)
    for one, other in zip(found, expected, strict=True):
        # Sketches take TF32 on CUDA, which moves qwen2's by 1.5e-3.
        near(one, other, NOISE if place == str(ONE) else 5e-3)


def test_what_follows_from_a_device_s_own_memory():
    """Chunks of directions, what is put aside: from what is free there, not here."""
    few, much = 1 << 20, 1 << 33
    with Simulated(much):
        view = probes.load(families.model("llama"), device=str(ONE))
        assert available(ONE) == much
        assert Pace.of(view, 64) == Pace(families.WIDTH, True)
        assert aside(torch.ones(2, device=ONE)).device == ONE
    with Simulated(few):
        assert aside(torch.ones(2, device=ONE)).device == HERE
        assert Pace.of(view, 64) == Pace(1, True)


RUNS = [*MIXED, copying(architecture=replace(SMALL, positional="rope", norm="rms", feed_forward=True))]


@pytest.mark.parametrize("float64", [True, False])
def test_toys_train_there_as_here(float64):
    expected = train(RUNS, 3, record=(0, 3))
    with Simulated(float64=float64):
        found = train(RUNS, 3, record=(0, 3), device=ONE)
    for one, other in zip(found, expected, strict=True):
        assert one.losses.device == HERE
        assert torch.allclose(one.losses, other.losses, rtol=0, atol=1e-6)
        assert all(torch.allclose(one.weights[name], w, rtol=0, atol=1e-6) for name, w in other.weights.items())
