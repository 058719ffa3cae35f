"""Small models whose layers torch, or a caller, has quantized or adapted, and what plain layers make of their weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import torch
from peft import LoraConfig, get_peft_model
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


KINDS: dict[str, Callable[[Path], Any]] = {
    "codes": lambda _: replaced(Codes),
    "moving": lambda _: replaced(Moving),
    "dynamic": dynamic,
    "LoRA": lambda _: adapted(llama()),
}


def plain(kind: str, model: Any) -> Any:
    """The Llama that the weights of a model of this kind stand for, dequantized."""
    made = llama()
    for name, module in model.named_modules():
        if isinstance(module, (Codes, Moving)):
            full = module.dequantized() if isinstance(module, Codes) else module.weight.detach() * 3
            made.get_submodule(name).weight = nn.Parameter(full)  # type: ignore[assignment]
    return adapted(made).merge_and_unload() if "LoRA" in kind else made
