"""The caller's model is what it was, after every probe and every way out of it: an end, an error, an interruption.

A model has hooks and gradients of the caller's own here, parameters that are frozen and one module in training mode; a
fingerprint holds all of that, and the state of torch that a probe could leave changed.
"""

from __future__ import annotations

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

PROMPTS, LENGTH = 4, 14
BANDS = ((4, 7), (8, 13))


def _of(probe: Callable[..., object], prompts: int = PROMPTS, **options: Any) -> Run:
    return lambda view, tokens, heard: probe(view, tokens[:prompts], progress=heard, **options)


_jacobian, _moments = partial(_of, probes.jacobian, 2), partial(_of, second_moment, 2)
_sinks, _trajectory = partial(_of, probes.sinks), partial(_of, probes.trajectory, starts=8)
_leakage = partial(_of, probes.leakage, bootstrap=4, lags=(1, 2))


def _inspect(**options: Any) -> Run:
    text = " ".join(f"w{n}" for n in range(3, 3 + LENGTH))
    return lambda view, tokens, heard: probes.inspect(view, text, seeds=1, progress=heard, **options)


def _swapped(inner: Run, replacement: Any) -> Run:
    return lambda view, tokens, heard: inner(probes.swapped(view, replacement), tokens, heard)


ANYWHERE: dict[str, Run] = {
    "jacobian, exact": _jacobian(),
    "jacobian, autograd": _jacobian(engine="autograd", method="sketch", products=8),
    "jacobian, all pathways": _jacobian(pathway="all", method="sketch", products=8, readout="normed"),
    "sinks": _sinks(reacts="mean"),
    "trajectory": _trajectory(),
    "leakage": _leakage(bands=BANDS),
    "bos swap": _of(probes.bos_swap, bands=BANDS, lags=(1, 2), bootstrap=4, profile_prompts=1, products=8),
    "inspect": _inspect(baseline="none"),
    "swapped, sinks": _swapped(_sinks(), 17),
}
TAKEN_APART: dict[str, Run] = {  # blocks of transformers without hooks of the caller's: those might change what they do
    "jacobian, parts": _jacobian(engine="parts", method="sketch", products=8),
    "second moment": _moments(attention="measured", score_path=True, from_layer="all"),
    "swapped, second moment": _swapped(_moments(attention="measured"), "mean"),
    "inspect, against the kernel": _inspect(baseline="kernel"),
}


# Signatures are not checked here: beartype draws from Python's random numbers, whose state is part of the fingerprint.
pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:jacobian takes the slower engine"),  # the caller's hooks are meant to be here
]


# ------------------------------------------------------------------------------------------------------ the models


def _given(kind: str, within: Callable[..., None] = lambda *_: None) -> tuple[torch.nn.Module, View]:
    """A model with traces of its caller's work on it, and a view of it; "plain" has no hooks, others have `within`."""
    config: Any = families.FAMILIES["llama"]()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = 32, 48, 2, 8
    model: Any = families.build(config)
    if kind == "bridge":
        model = boot(model, "llama")
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    parameters[1].grad = torch.ones_like(parameters[1])
    if kind != "plain":
        list(model.modules())[-1].train()
        for module in list(model.modules())[2:6]:
            module.register_forward_hook(lambda *_: None)
            module.register_forward_pre_hook(lambda *_: None)
        writers = [module for name, module in model.named_modules() if name.endswith((".o_proj", ".attn.o"))]
        writers[-1].register_forward_hook(within)
    return model, probes.load(model, tokenizer=families.tokenizer())


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[torch.nn.Module, View]]:
    """The same models for all tests: what one probe left would show in the fingerprint of the next, too."""
    return {kind: _given(kind) for kind in ("transformers", "bridge", "plain")}


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    drawn = torch.from_numpy(np.random.default_rng(3).integers(3, families.VOCABULARY, (PROMPTS, LENGTH)))
    drawn[:, 0] = 0
    return drawn


@pytest.mark.parametrize("kind", ["transformers", "bridge", "plain"])
def test_nothing_is_left_changed_at_the_end_of_every_probe(models, tokens, kind):
    model, view = models[kind]
    before, heard = fingerprint(model), []
    for name, run in (TAKEN_APART if kind == "plain" else ANYWHERE).items():
        heard.clear()
        run(view, tokens, lambda *done: heard.append(done))
        assert difference(before, fingerprint(model)) == [], name
        assert heard


@pytest.mark.parametrize("kind", ["transformers", "bridge"])
def test_nothing_is_left_changed_by_an_interruption_within_a_block(tokens, kind):
    """Not where the suite hears of progress, but in the middle of the model's own forward pass."""
    armed: list[BaseException] = []

    def fail(*_: object) -> None:
        if armed:
            raise armed[0]

    model, view = _given(kind, within=fail)
    before = fingerprint(model)
    for name in ("jacobian, exact", "sinks", "bos swap", "inspect", "swapped, sinks"):
        armed.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            ANYWHERE[name](view, tokens, lambda *_: None)
        armed.clear()
        assert difference(before, fingerprint(model)) == [], name


# ------------------------------------------------------------------------------------------- every kind of model there is


MODELS: dict[str, Callable[[Path], Any]] = {
    "llama": lambda _: families.model("llama"),
    "gpt2, bridge": lambda _: boot(families.model("gpt2"), "gpt2"),
    "compiled": lambda _: torch.compile(families.model("llama")),
    **KINDS,
}
SLOW = ("compiled", "codes")
PASSES = ("jacobian, autograd", "jacobian, all pathways", "sinks", "trajectory", "leakage", "bos swap", "inspect")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in MODELS]
)
def test_every_kind_of_model_is_what_it_was_after_every_probe(kind, tokens, tmp_path):
    """Outputs bit for bit, and all that a fingerprint holds."""
    model = MODELS[kind](tmp_path).eval()
    _logits(model, tokens)  # some packages arrange their weights in a first pass
    logits, view, refused = _logits(model, tokens), probes.load(model, tokenizer=families.tokenizer()), []
    before = fingerprint(model)
    for name in PASSES:
        try:
            ANYWHERE[name](view, tokens, lambda *_: None)
        except InputError as error:
            refused.append(str(error))
        assert difference(before, fingerprint(model)) == [], name
    assert all("no derivative" in said or "window" in said for said in refused)
    assert torch.equal(_logits(model, tokens), logits)


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found = model(tokens)
    return getattr(found, "logits", found)
