"""Public functions of a model take a name, a folder or a model in memory as well as a view."""

from __future__ import annotations

from typing import Any

import families
import numpy as np
import pytest
import torch

import probes
from probes.errors import InputError

TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, families.VOCABULARY, (4, 16)))
SPLIT: Any = {"bands": ((3, 15),), "lags": (1, 2), "bootstrap": 0}
SMALL: dict[str, Any] = {
    "jacobian": lambda model: probes.jacobian(model, TOKENS, method="scalar")["sensitivity"].values,
    "sinks": lambda model: probes.sinks(model, TOKENS)["alpha"].values,
    "trajectory": lambda model: probes.trajectory(model, TOKENS, starts=4)["norm_first"].values,
    "leakage": lambda model: probes.leakage(model, TOKENS, **SPLIT)["log_source"].values,
    "bos swap": lambda model: (
        probes.bos_swap(model, TOKENS, **SPLIT, profile_prompts=1, products=4)["leakage_after"].values
    ),
    "swapped": lambda model: probes.swapped(model, "zero").embed(TOKENS).numpy(),
    "inspect": lambda model: probes.inspect(model, TOKENS[0], of="top", baseline="none")["sensitivity"].values,
    "portrait": lambda model: probes.portrait(model, TOKENS)["alpha"].values,
    "second moment": lambda model: probes.theory.second_moment(model, TOKENS)["sensitivity"].values,
}


@pytest.mark.parametrize("name", SMALL)
def test_a_model_in_memory_does_as_its_view_and_anything_else_is_one_line(name):
    model = families.model("llama")
    np.testing.assert_array_equal(SMALL[name](model), SMALL[name](probes.load(model)))
    for wrong in ("tiny-lama", 7, None, torch.nn.Linear(2, 2)):
        with pytest.raises(InputError, match=r"model 'tiny-lama' is neither bundled|cannot load a \w+; give a name"):
            SMALL[name](wrong)


def test_a_name_and_a_folder_do(tmp_path):
    families.checkpoints(tmp_path, ape=("llama", "prepended"))
    view = probes.load(tmp_path / "ape", device="cpu")
    found = probes.sinks(str(tmp_path / "ape"), TOKENS)
    np.testing.assert_allclose(found["alpha"], probes.sinks(view, TOKENS)["alpha"], rtol=1e-5)
    assert found.attrs["model"] == "ape"
    assert torch.equal(probes.prompts("tiny-llama", n=2, length=9), probes.prompts(model="tiny-llama", n=2, length=9))  # type: ignore[call-arg]


def test_weights_are_not_hashed_to_tell_a_view(unchecked):
    """They may change until a result needs their hash; checking a signature would take it, too."""
    model = families.model("llama")
    view = probes.load(model, tokenizer=families.tokenizer())
    probes.prompts(view, n=1, length=8)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert view.identity.weights == probes.load(model).identity.weights
