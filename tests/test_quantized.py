"""Quantized models: numbers against plain layers with the dequantized weights, in float32; what cannot run is one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import quantized
import torch
from quantized import KINDS, Codes, llama, plain, replaced
from safetensors.torch import load_file, save_file

import probes

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


def test_weights_and_passes_as_compressed_tensors_leaves_them_are_never_taken_for_plain_ones():
    """Codes until a hook on the whole model decompresses them, then layers whose forward pass rounds."""
    model = llama()
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda module, args: None)
    assert "decompresses this model in its first pass" in families.refused(probes.sinks, model, IDS)
    model.ct_decompress_hook.remove()
    del model.ct_decompress_hook
    for layer in families.blocks(model).modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = torch.no_grad()(layer.forward)
    assert np.isfinite(probes.sinks(model, IDS).alpha).all()
    assert "has no derivative" in families.refused(probes.jacobian, model, IDS[:1])


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
    model = torch.ao.quantization.quantize_dynamic(llama(), {"lm_head"}, dtype=torch.qint8)
    assert probes.jacobian(model, IDS[:1]).attrs["engine"] == "parts"
    assert "has no derivative" in families.refused(probes.jacobian, model, IDS[:1], readout="logits")


def test_a_kernel_without_derivative_is_refused_behind_a_cast():
    model = replaced(quantized.Packed)
    assert close(probes.sinks(model, IDS).alpha, probes.sinks(plain("codes", model), IDS).alpha, NOISE)
    assert "'quantized.Packed' has no derivative" in families.refused(probes.jacobian, model, IDS[:1])


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
    """Blocks of 128 x 128 weights with one scale each, as Qwen3's, against the product of codes and scales."""
    block = 128
    config: Any = families.small("qwen3", hidden_size=256, intermediate_size=256, head_dim=64, initializer_range=0.1)
    families.build(config).save_pretrained(tmp_path / "plain")
    stored, full, kept = {}, {}, load_file(tmp_path / "plain" / "model.safetensors")
    for name, weight in kept.items():
        stored[name] = weight.to(torch.bfloat16)
        full[name] = stored[name].float()
        if name.endswith("_proj.weight"):
            tiles = weight.reshape(weight.shape[0] // block, block, weight.shape[1] // block, block)
            scales = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            stored |= {name: codes.reshape(weight.shape).contiguous(), f"{name}_scale_inv": scales.contiguous()}
            full[name] = (codes.float() * scales[:, None, :, None]).reshape(weight.shape)
    folder = Path(shutil.copytree(tmp_path / "plain", tmp_path / "fp8"))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": how}))
    expected: Any = families.build(config)
    expected.load_state_dict(full)
    for dtype in ("auto", "float64", "float16"):
        view: Any = probes.load(folder, dtype=dtype)
        assert view.dtype == {"auto": torch.float32}.get(dtype, getattr(torch, dtype, None))
        for name, value in view.stored():
            assert close(value.detach().double(), full[name].double(), 1e-3 if dtype == "float16" else 1e-6)
    view = probes.load(folder)
    assert close(probes.sinks(view, IDS).alpha, probes.sinks(expected, IDS).alpha, NOISE)
