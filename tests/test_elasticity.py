"""Scale-free sensitivities against streams recorded by hand."""

from __future__ import annotations

import families
import numpy as np
import pytest
import torch

import probes


def view(**options):
    return probes.load(families.model("llama"), dtype="float64", **options)


def tokens(count: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, families.VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("readout", ["residual", "normed", "logits"])
@pytest.mark.parametrize("query", [-1, 5])
@torch.no_grad()
def test_it_is_the_sensitivity_in_units_of_input_and_output(readout, query):
    model, ids = view(), tokens()
    found = probes.jacobian(model, ids, readout=readout, query=query, from_layer="all", method="exact")
    streams = [model.trace(model.embed(one[None])).residual for one in ids]
    at = query % ids.shape[1]
    for layer in range(model.spec.blocks):
        inputs = torch.cat([one[layer][0, 1 : at + 1] for one in streams])
        size = inputs.pow(2).mean().sqrt()
        for n, one in enumerate(streams):
            output = one[-1][0, at] if readout == "residual" else model.norm(one[-1][0, at])
            output = model.unembed(output) if readout == "logits" else output
            unit = size * model.spec.width**0.5 / output.norm()
            expected = found.sensitivity[n, layer] * float(unit)
            np.testing.assert_allclose(found.elasticity[n, layer], expected, rtol=1e-4)  # RMS norms are float32's
            own = one[layer][0].pow(2).mean(-1)
            assert float(found.first_rms[n, layer]) == pytest.approx(float(own[0].sqrt()), rel=1e-5)
            assert float(found.input_rms[n, layer]) == pytest.approx(float(own[1 : at + 1].mean().sqrt()), rel=1e-5)


def test_pathways_share_the_unit_and_auto_has_one():
    model, ids = view(), tokens()
    found = probes.jacobian(model, ids, pathway="all", method="exact")
    ratio = found.elasticity / found.sensitivity.where(found.sensitivity > 0)
    np.testing.assert_allclose(ratio.max("pathway"), ratio.min("pathway"), rtol=1e-6)
    auto = probes.jacobian(model, ids, method="sketch", products="auto", relative_error=0.2)
    units = auto.elasticity / auto.sensitivity
    np.testing.assert_allclose(units, ratio.isel(pathway=0), rtol=1e-6)
