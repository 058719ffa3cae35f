"""Quantized models: numbers against plain layers with the dequantized weights, in float32; what cannot run is one line."""

from inspect import signature
from typing import Any

import families
import gguf_files
import numpy as np
import pytest
import quantized
import torch
from commands import call
from quantized import KINDS, Codes, llama, plain, replaced
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import probes
from probes.errors import InputError
from probes.models.families import QUANTIZED

IDS = torch.randint(3, families.VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
# Of the largest number; float32's rounding behind three wide blocks (see `test_models`).
NOISE = 1e-3

pytestmark = pytest.mark.filterwarnings(
    "ignore:jacobian takes the slower engine",
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:torch.quantize_per_tensor",
)


def close(a: Any, b: Any, noise: float) -> bool:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max()) <= noise * float(np.abs(np.asarray(b)).max())


@pytest.mark.parametrize("kind", ["codes", "moving", "LoRA"])
def test_numbers_are_those_of_the_dequantized_weights(kind, tmp_path):
    model = KINDS[kind](tmp_path)
    expected = plain(kind, model)
    for _ in range(2):  # the first measurement leaves nothing that changes a second one
        assert close(probes.sinks(model, IDS).alpha, probes.sinks(expected, IDS).alpha, NOISE)
        ours, theirs = (probes.jacobian(one, IDS[:1], method="exact") for one in (model, expected))
        assert close(ours.sensitivity, theirs.sensitivity, NOISE)
        assert ours.attrs["engine"] == "autograd"


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.layers)
def test_the_table_of_quantized_layers_says_what_happens(row, tmp_path):
    for method in row.methods:
        assert "dequantize" in signature(AUTO_QUANTIZATION_CONFIG_MAPPING[method]).parameters
    if row.layers not in quantized.ROWS:
        assert set(row.measured) == {"not tried"}
        return
    kind = quantized.ROWS[row.layers]
    model = KINDS[kind](tmp_path)
    measurements = {
        "yes": lambda: probes.sinks(model, IDS).alpha.notnull().all() and "yes",
        "by": lambda: f"by {probes.jacobian(model, IDS[:1], method='scalar').attrs['engine']}",
        "theory": lambda: probes.theory.second_moment(model, IDS[:1]).sensitivity.notnull().all() and "yes",
    }
    found, said = [], []
    for measured in measurements.values():
        try:
            found.append(measured())
        except InputError as error:
            found.append("refused")
            said.append(str(error))
    assert tuple(found) == row.measured
    first = {"yes": "cannot be taken apart", "waiting": "decompresses this model in its first pass"}
    first |= {"packed": "'quantized.Packed' has no derivative"}
    assert not said or first.get(kind, "has no derivative" if "refused" in found[1] else first["yes"]) in said[0]


def test_the_command_lists_quantized_layers_and_what_comes_from_gguf_files(monkeypatch, capsys):
    assert call(monkeypatch, "families") == 0
    told = capsys.readouterr().out
    assert all(" ".join((row.layers, *row.measured, row.why)).strip() in " ".join(told.split()) for row in QUANTIZED)
    families_told = [line.split() for line in told.split("Quantized layers")[0].splitlines()]
    assert {words[0] for words in families_told if words[-1:] == ["yes"]} == set(gguf_files.ARCHITECTURES)
    assert call(monkeypatch, "families", "llama") == 0
    assert "uantized" not in capsys.readouterr().out


def test_a_bridge_over_quantized_layers_is_the_same_model():
    model = replaced(Codes)
    own, bridged = probes.load(model), probes.load(model, "transformer_lens")
    assert bridged.identity.weights == own.identity.weights
    assert close(probes.sinks(bridged, IDS).alpha, probes.sinks(own, IDS).alpha, NOISE)


def test_what_has_no_derivative_is_measured_without_and_refused_with(tmp_path):
    model = KINDS["dynamic"](tmp_path)
    view = probes.load(model)
    with torch.no_grad():
        assert torch.equal(view.unembed(view.norm(view.residual(view.embed(IDS)))), model(IDS, use_cache=False).logits)
    assert np.isfinite(probes.sinks(model, IDS).alpha).all()
    assert "has no derivative" in families.refused(probes.jacobian, model, IDS[:1])
    assert "neither moved nor cast" in families.refused(probes.load, model, dtype="float64")
    model = replaced(quantized.Packed)
    assert close(probes.sinks(model, IDS).alpha, probes.sinks(plain("codes", model), IDS).alpha, NOISE)
    model = torch.ao.quantization.quantize_dynamic(llama(), {"lm_head"}, dtype=torch.qint8)
    assert probes.jacobian(model, IDS[:1]).attrs["engine"] == "parts"
    assert "has no derivative" in families.refused(probes.jacobian, model, IDS[:1], readout="logits")


def test_quantized_weights_are_named_by_codes_and_scales_and_neither_moved_nor_cast():
    model = replaced(Codes)
    seen = {probes.load(model).identity.weights}
    for name in ("codes", "scales"):
        with torch.no_grad():
            getattr(families.blocks(model)[0].self_attn.q_proj, name)[3] += 1
        seen.add(probes.load(model).identity.weights)
    assert len(seen) == 3
    assert "neither moved nor cast" in families.refused(probes.load, replaced(quantized.Moving), dtype="bfloat16")


def test_fp8_checkpoints_are_dequantized_to_the_dtype_asked_for(tmp_path):
    """Against the product of codes and scales."""
    folder, expected = quantized.fp8(tmp_path)
    full = expected.state_dict()
    for dtype in ("auto", "float64", "float16"):
        view: Any = probes.load(folder, dtype=dtype)
        assert view.dtype == {"auto": torch.float32}.get(dtype, getattr(torch, dtype, None))
        for name, value in view.stored():
            assert close(value.detach().double(), full[name].double(), 1e-3 if dtype == "float16" else 1e-6)
    view = probes.load(folder)
    assert close(probes.sinks(view, IDS).alpha, probes.sinks(expected, IDS).alpha, NOISE)
