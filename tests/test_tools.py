"""The scripts in tools/: every step of `make llm` is a command that exists; noise stays within half a quantization step."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from typer.main import get_command

from probes.cli.main import app

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_are_commands_with_results_of_their_own():
    steps = tool("llm").STEPS
    assert len({step.name for step in steps}) == len({step.result for step in steps}) == len(steps)
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for step in steps:
        if step.kind == "paths":
            assert (TOOLS.parent / step.arguments[0]).is_file()
            continue
        _, _, command, *arguments = step.arguments
        commands[command].make_context(command, arguments)  # raises for an option or a value that does not exist


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_noise_is_uniform_within_half_a_step(kind):
    random = np.random.default_rng(0)
    weights = random.normal(size=(64, 256)).astype(np.float32)
    data = quantize(weights, kind)
    noisy = tool("noise").noisy(data, kind, random)
    values = dequantize(data, kind).reshape(-1, 32)
    step = np.array([np.diff(np.unique(block)).min() for block in values])[:, None]
    moved = (noisy.reshape(-1, 32) - values) / step
    assert 0.48 < np.abs(moved).max() < 0.51  # values are multiples of the step, up to float16
    assert abs(moved.std() - 12**-0.5) < 0.005


def test_what_is_not_quantized_stays():
    weights = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    found = tool("noise").noisy(weights, GGMLQuantizationType.F32, np.random.default_rng(1))
    np.testing.assert_array_equal(found, weights)
