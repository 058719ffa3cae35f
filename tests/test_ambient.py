"""Inference mode, autocast and the like around a call: numbers are those outside, and what was in force stays in force."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import families
import pytest
import torch

import probes

IDS = torch.randint(3, families.VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1))
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "bfloat16": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


def state() -> tuple[object, ...]:
    autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), *autocast


def measured(model: Any, tokens: torch.Tensor = IDS) -> list[Any]:
    """Numbers of passes, of both engines, of taps inside a block, of a changed model, and of fresh weights."""
    jacobian = partial(probes.jacobian, method="sketch", products=8)
    found = [probes.sinks(model, tokens)["alpha"], probes.trajectory(model, tokens, starts=4)["cosine"]]
    found += [jacobian(model, tokens[:1], engine=engine)["sensitivity"] for engine in ("parts", "autograd")]
    found.append(jacobian(probes.load(model).reinitialized(0), tokens[:1])["sensitivity"])
    found.append(probes.inspect(model, tokens[0].tolist(), seeds=1)["ratio"])
    return found


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_numbers_are_those_outside(around, backend):
    model = families.model("llama")
    given: Any = model if backend == "transformers" else probes.load(model, backend)
    run = measured if backend == "transformers" else lambda view, ids: [probes.sinks(view, ids)["alpha"]]
    expected = run(given, IDS)
    with AROUND[around]():
        before = state()
        found = run(given, IDS.clone())
        assert state() == before
        with pytest.raises(probes.InputError):
            probes.sinks(given, IDS[:0])
        assert state() == before
    for one, other in zip(found, expected, strict=True):
        assert one.equals(other)


def test_weights_made_in_inference_mode_are_the_weights():
    expected = measured(families.model("llama"))
    with torch.inference_mode():
        model = families.model("llama")
        tokens = IDS.clone()
    weight = next(model.parameters())
    for one, other in zip(measured(model, tokens), expected, strict=True):
        assert one.equals(other)
    seen: Any = probes.load(model)
    assert next(seen._model.parameters()).data_ptr() == weight.data_ptr()  # not a second copy in memory
    assert next(model.parameters()) is weight
    assert weight.is_inference()
