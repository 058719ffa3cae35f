"""Signatures say what functions are given and give: shapes by jaxtyping, all other types by beartype, in every probe."""

import pytest
from commands import program

PROGRAM = """
from jaxtyping import TypeCheckError, install_import_hook
with install_import_hook(["probes"], "beartype.beartype"):
    import torch, probes
    from probes.measure import measure, questions
    from toy.selftest import training
    model = probes.load("tiny-llama", device="cpu")
    tokens = probes.prompts(model, n=8, length=24)
    for name in questions():
        for trial in measure(name).trials.values():
            trial(model, tokens)
    training(torch.device("cpu"))
    try:
        probes.jacobian(model, torch.zeros(2, 3, 4, dtype=torch.int64))
    except TypeCheckError:
        print("held")
"""


@pytest.mark.slow
def test_every_probe_keeps_its_signatures():
    assert program("-c", PROGRAM).endswith("held\n")
