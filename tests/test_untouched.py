"""The caller's model is what it was, after every probe, with hooks of the caller's own on it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from fingerprint import difference, fingerprint
from quantized import KINDS

import probes
import probes.measures.inspect  # not in a probe's own time: beartype draws random numbers where it reads a module
from probes.errors import InputError
from probes.models.lens import boot
from probes.models.view import View
from probes.theory.kernel import second_moment

Progress = Callable[[Any, Any], None]
Run = Callable[[View, torch.Tensor, Progress], object]
MADE = ("transformers", "bridge", "plain", "compiled")

PROMPTS, LENGTH = 4, 14
BANDS = ((4, 7), (8, 13))


def _of(probe: Callable[..., object], prompts: int = PROMPTS, **options: Any) -> Run:
    return lambda view, tokens, heard: probe(view, tokens[:prompts], progress=heard, **options)


def _inspect(**options: Any) -> Run:
    text = " ".join(f"w{n}" for n in range(3, 3 + LENGTH))
    return lambda view, tokens, heard: probes.inspect(view, text, seeds=1, progress=heard, **options)


def _swapped(inner: Run, replacement: Any) -> Run:
    return lambda view, tokens, heard: inner(probes.swapped(view, replacement), tokens, heard)


_jacobian, _moments = partial(_of, probes.jacobian, 2), partial(_of, second_moment, 2)
SKETCH: dict[str, Any] = {"method": "sketch", "products": 8}
ANYWHERE: dict[str, Run] = {
    "jacobian, exact": _jacobian(),
    "jacobian, autograd": _jacobian(engine="autograd", **SKETCH),
    "jacobian, all pathways": _jacobian(pathway="all", readout="normed", **SKETCH),
    "sinks": _of(probes.sinks, reacts="mean"),
    "trajectory": _of(probes.trajectory, starts=8),
    "leakage": _of(probes.leakage, bootstrap=4, lags=(1, 2), bands=BANDS),
    "bos swap": _of(probes.bos_swap, bands=BANDS, lags=(1, 2), bootstrap=4, profile_prompts=1, products=8),
    "inspect": _inspect(baseline="none"),
    "swapped, sinks": _swapped(_of(probes.sinks), 17),
}
TAKEN_APART: dict[str, Run] = {  # blocks of transformers without hooks of the caller's: those might change what they do
    "jacobian, parts": _jacobian(engine="parts", **SKETCH),
    "second moment": _moments(attention="measured", score_path=True, from_layer="all"),
    "swapped, second moment": _swapped(_moments(attention="measured"), "mean"),
    "inspect, against the kernel": _inspect(baseline="kernel"),
}


LAYERS = [kind for kind in KINDS if kind not in ("FP8", "GGUF", "waiting")]  # of models in memory that are measured

# Signatures are not checked here: beartype draws from Python's random numbers, whose state is part of the fingerprint.
pytestmark = [
    pytest.mark.filterwarnings("ignore:jacobian takes the slower engine"),  # the caller's hooks are meant to be here
]


def _given(kind: str, folder: Path) -> tuple[Any, View]:
    """A model and a view of it; "transformers" and "bridge" bear traces of their caller's work."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model: Any = KINDS[kind](folder) if kind in KINDS else families.build(families.small("llama", **sizes))
    model = boot(model, "llama") if kind == "bridge" else torch.compile(model) if kind == "compiled" else model.eval()
    if kind in ("transformers", "bridge"):
        parameters = list(model.parameters())
        for parameter in parameters[::2]:
            parameter.requires_grad_(False)
        parameters[1].grad = torch.ones_like(parameters[1])
        list(model.modules())[-1].train()
        for module in list(model.modules())[2:6]:
            module.register_forward_hook(lambda *_: None)
            module.register_forward_pre_hook(lambda *_: None)
    return model, probes.load(model, tokenizer=families.tokenizer())


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    drawn = torch.from_numpy(np.random.default_rng(3).integers(3, families.VOCABULARY, (PROMPTS, LENGTH)))
    drawn[:, 0] = 0
    return drawn


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow) if kind in ("compiled", "codes") else kind
        for kind in (*MADE, *LAYERS)
    ],
)
def test_nothing_is_left_changed_at_the_end_of_every_probe(kind, tokens, tmp_path):
    """Outputs bit for bit, and all that a fingerprint holds."""
    model, view = _given(kind, tmp_path)
    _logits(model, tokens)  # some packages arrange their weights in a first pass
    logits, before, heard, refused = _logits(model, tokens), fingerprint(model), [], []
    for name, run in (TAKEN_APART if kind == "plain" else ANYWHERE).items():
        heard.clear()
        try:
            run(view, tokens, lambda *done: heard.append(done))
            assert heard
        except InputError as error:
            refused.append(str(error))
        assert difference(before, fingerprint(model)) == [], name
    assert all(kind in KINDS and ("no derivative" in said or "window" in said) for said in refused)
    assert torch.equal(_logits(model, tokens), logits)


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found = model(tokens)
    return getattr(found, "logits", found)
