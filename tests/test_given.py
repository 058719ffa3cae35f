"""Public functions of a model take a name, a folder or a model in memory as well as a view."""

from typing import Any

import families
import numpy as np
import pytest
import torch

import probes
from probes.errors import InputError

TOKENS = torch.randint(3, families.VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
SPLIT: Any = {"bands": ((3, 15),), "lags": (1, 2), "bootstrap": 0}
SMALL: dict[str, Any] = {
    "jacobian": lambda model: probes.jacobian(model, TOKENS, method="scalar").sensitivity,
    "sinks": lambda model: probes.sinks(model, TOKENS).alpha,
    "trajectory": lambda model: probes.trajectory(model, TOKENS, starts=4).norm_first,
    "leakage": lambda model: probes.leakage(model, TOKENS, **SPLIT).log_form,
    "swapped": lambda model: probes.swapped(model, "zero").embed(TOKENS),
    "inspect": lambda model: probes.inspect(model, TOKENS[0], of="top", baseline="none").sensitivity,
    "second moment": lambda model: probes.theory.second_moment(model, TOKENS).sensitivity,
}


@pytest.mark.parametrize("name", SMALL)
def test_a_model_in_memory_does_as_its_view_and_anything_else_is_one_line(name):
    model = families.model("llama")
    np.testing.assert_array_equal(SMALL[name](model), SMALL[name](probes.load(model)))
    with pytest.raises(InputError, match=r"cannot load a Linear; give a name"):
        SMALL[name](torch.nn.Linear(2, 2))


def test_a_name_and_a_folder_do(tmp_path):
    families.checkpoints(tmp_path, ape=("llama", "prepended"))
    found = probes.sinks(str(tmp_path / "ape"), TOKENS)
    np.testing.assert_allclose(found["alpha"], probes.sinks(families.model("llama"), TOKENS)["alpha"], rtol=1e-5)
    assert found.attrs["model"] == "ape"
    assert torch.equal(probes.prompts("tiny-llama", n=2, length=9), probes.prompts(model="tiny-llama", n=2, length=9))  # type: ignore[call-arg]
