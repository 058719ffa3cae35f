"""Small models whose layers torch, or a caller, has quantized or adapted, and what plain layers make of their weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import torch
from gguf_files import original, write
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LEVELS = 127  # of 8 bits and a sign


def llama() -> Any:
    return families.build(families.small("llama"))


class Codes(nn.Module):
    """A linear layer that holds codes and scales as buffers, as GPTQ and AWQ have it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        weight = plain.weight.detach()
        scales = weight.abs().amax(1) / LEVELS
        self.register_buffer("codes", (weight / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def dequantized(self) -> Tensor:
        return self.codes.to(self.scales) * self.scales[:, None]  # type: ignore[operator, return-value, arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.dequantized().to(x).T


class Moving(nn.Linear):
    """A linear layer whose scales the first pass moves from the weight to the module, as that of bitsandbytes in 8 bits."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = nn.Parameter(plain.weight.detach() / 3)
        self.weight.scale, self.scale = torch.full((plain.out_features, 1), 3.0), None  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.scale is not None:  # type: ignore[attr-defined]
            self.scale, self.weight.scale = self.weight.scale, None  # type: ignore[attr-defined]
        return input @ (self.weight * self.scale).T


KERNELS = torch.library.Library("headwater_tests", "DEF")
KERNELS.define("multiplied(Tensor x, Tensor matrix) -> Tensor")
KERNELS.impl("multiplied", lambda x, matrix: x.detach() @ matrix.detach(), "CPU")  # without a derivative


class Packed(Codes):
    """A layer whose kernel has no derivative and another dtype, as that of bitsandbytes in 4 bits on processors."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.headwater_tests.multiplied(x.double(), self.dequantized().double().T).to(x)


def replaced(made: Callable[[nn.Linear], nn.Module]) -> Any:
    """A Llama with such layers in the place of its blocks' linear ones."""
    model = llama()
    for name, module in list(families.blocks(model).named_modules()):
        if isinstance(module, nn.Linear):
            families.blocks(model).set_submodule(name, made(module))
    return model


def dynamic(_: Path) -> Any:
    return torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear}, dtype=torch.qint8)


def adapted(model: Any) -> Any:
    """The model with LoRA on some of its layers, whose matrices depend on nothing else."""
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"])).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def rounding(_: Path) -> Any:
    """A Llama whose linear layers have a forward pass without a derivative, as compressed-tensors leaves it."""
    model = llama()
    for layer in families.blocks(model).modules():
        if isinstance(layer, nn.Linear):
            layer.forward = torch.no_grad()(layer.forward)
    return model


def waiting(_: Path) -> Any:
    """A Llama that a hook would decompress in its first pass."""
    model = llama()
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda module, args: None)
    return model


def fp8(folder: Path) -> tuple[Path, Any]:
    """A folder of blocks of 128 x 128 weights with one scale each, as Qwen3's, and the model of codes times scales."""
    block = 128
    config: Any = families.small("qwen3", hidden_size=256, intermediate_size=256, head_dim=64, initializer_range=0.1)
    families.build(config).save_pretrained(folder)
    stored, full = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight.to(torch.bfloat16)
        full[name] = stored[name].float()
        if name.endswith("_proj.weight"):
            tiles = weight.reshape(weight.shape[0] // block, block, weight.shape[1] // block, block)
            scales = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            stored |= {name: codes.reshape(weight.shape).contiguous(), f"{name}_scale_inv": scales.contiguous()}
            full[name] = (codes.float() * scales[:, None, :, None]).reshape(weight.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": how}))
    expected: Any = families.build(config)
    expected.load_state_dict(full)
    return folder, expected


KINDS: dict[str, Callable[[Path], Any]] = {
    "codes": lambda _: replaced(Codes),
    "moving": lambda _: replaced(Moving),
    "dynamic": dynamic,
    "LoRA": lambda _: adapted(llama()),
    "packed": lambda _: replaced(Packed),
    "rounding": rounding,
    "waiting": waiting,
    "FP8": lambda folder: fp8(folder)[0],
    "GGUF": lambda folder: write(folder / "small.gguf", original("llama")),
}
# By the rows of `headwater families`: the kind that computes as such layers do, in the place of packages that are not there.
ROWS = {
    "GGUF files": "GGUF",
    "folders in FP8, MXFP4, compressed-tensors": "FP8",
    "compressed-tensors in memory, before a first pass": "waiting",
    "compressed-tensors in memory, W4A16, W8A16": "codes",
    "compressed-tensors in memory, W8A8, FP8": "rounding",
    "bitsandbytes in 8 bits, also under LoRA": "moving",
    "bitsandbytes in 4 bits (NF4), QLoRA": "packed",
    "torchao, weights alone in int8 or FP8": "moving",
    "dynamic int8 of torchao and torch": "dynamic",
    "GPTQ and AWQ in 4 bits, in float32": "codes",
    "GPTQ and AWQ in 4 bits, in bfloat16": "packed",
}


def plain(kind: str, model: Any) -> Any:
    """The Llama that the weights of a model of this kind stand for, dequantized."""
    made = llama()
    for name, module in model.named_modules():
        if isinstance(module, (Codes, Moving)):
            full = module.dequantized() if isinstance(module, Codes) else module.weight.detach() * 3
            made.get_submodule(name).weight = nn.Parameter(full)  # type: ignore[assignment]
    return adapted(made).merge_and_unload() if "LoRA" in kind else made
