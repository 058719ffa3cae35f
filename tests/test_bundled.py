"""The bundled models: what their training.json claims is measured again, from the files in the repository alone."""

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import probes
from probes.data.documents import HELDOUT, read_documents
from probes.errors import InputError
from probes.models.load import CHECKPOINTS
from toy import recipes
from toy.corpus import Windows, pack
from toy.pretrain import validation_loss

RECIPES = {name: recipe for name, recipe in recipes.RECIPES.items() if recipe.bundled}


def training(name: str) -> dict[str, Any]:
    return json.loads((CHECKPOINTS / name / "training.json").read_text())


def test_weights_that_are_not_those_that_were_trained_are_refused(tmp_path):
    """A damaged file, and random numbers that are drawn otherwise."""
    folder = Path(shutil.copytree(CHECKPOINTS / "tiny-llama", tmp_path / "tiny"))
    whole = (folder / "step100.safetensors.xz").read_bytes()
    (folder / "step100.safetensors.xz").write_bytes(lzma.compress(lzma.decompress(whole)[:-1] + b"x"))
    (folder / "step300.safetensors.xz").write_bytes(whole[:1000])
    said = json.loads((folder / "packed.json").read_text())
    (folder / "packed.json").write_text(json.dumps(said | {"seed": 1}))
    for step, why in (("step100", "is damaged"), ("step300", "is damaged"), ("step0", "seed 1 draws others here")):
        with pytest.raises(InputError, match=rf"'tiny@{step}' is not what was trained \(.*{why}\); install"):
            probes.load(folder, revision=step)


def test_they_differ_in_the_named_thing_alone_and_are_small():
    assert set(probes.bundled()) == set(RECIPES)
    assert sum(file.stat().st_size for file in CHECKPOINTS.rglob("*") if file.is_file()) < 12_000_000
    reference = training("tiny-llama")
    for name, recipe in RECIPES.items():
        own = training(name)
        assert own["data"] == reference["data"]  # the hash of the training stream
        assert own["options"] | {"bos": True} == reference["options"]
        assert own["options"]["bos"] == recipe.bos
    # Qwen2's biases take their turn at the random numbers, so that its initial weights are others of the same kind.
    start = {probes.load(name, revision="step0").identity.weights for name, recipe in RECIPES.items() if recipe.bos}
    assert len(start) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_they_have_learned_and_their_tokenizers_split_as_in_training(name: str):
    view: Any = probes.load(name, device="cpu")
    windows = Windows(
        pack(view.tokenizer, read_documents(HELDOUT)), length=256, seed=0, bos=view.tokenizer.bos_token_id
    )
    said = training(name)
    assert len(windows.stream) == said["heldout_tokens"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CHECKPOINTS / name), dtype=torch.float32).eval()
    model.load_state_dict(view._model.state_dict())
    windows.stream = windows.stream[: 256 * 100]  # a hundred windows bound the time
    loss = validation_loss(model, windows)
    # Other windows than the card's, hence other text: a tenth of a nat apart at most, far from a bigram.
    assert loss == pytest.approx(said["validation_loss"], abs=0.15)
    assert loss < said["bigram_validation_loss"] - 1
