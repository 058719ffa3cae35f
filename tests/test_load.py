"""What names a model, and what is said about a name or a file that is no use."""

import logging as python_logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from damage import Q, config_has, tensors_are
from measured import BACKENDS
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer
from transformers.utils import logging

import probes
from probes.models.huggingface import HuggingFaceView
from probes.models.lens import LensView

IDS = torch.arange(3, 15)[None]


def saved(folder: Path, name: str = "llama", *, seed: int = 0, tokenizer: bool = True, **save: Any) -> Path:
    families.model(name, seed=seed).save_pretrained(folder, **save)
    if tokenizer:
        families.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return saved(tmp_path_factory.mktemp("kept") / "small")


refused = partial(families.refused, probes.load)


# ------------------------------------------------------------------------------------------------- what is loaded


def test_paths_of_every_kind_and_both_backends(kept, tmp_path, monkeypatch):
    own = probes.load(families.model("llama"))
    monkeypatch.chdir(kept.parent)
    monkeypatch.setenv("HOME", str(kept.parent))
    for source in ("small", "~/small", Path("small"), saved(tmp_path / "small", max_shard_size="50KB")):
        for backend, kind in zip(BACKENDS, (HuggingFaceView, LensView), strict=True):
            model = probes.load(source, backend)
            assert isinstance(model, kind)
            assert (model.identity.weights, model.bos) == (own.identity.weights, 0)
            assert (model.identity.name, model.identity.revision) == ("small", None)
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(("dtype", "backend"), [("float64", "transformer_lens"), ("bfloat16", "transformers")])
def test_dtypes(kept, dtype, backend):
    own = families.model("llama")
    found = [probes.load(source, backend, dtype=dtype) for source in (kept, own)]
    for model in found:
        assert str(model.dtype) == f"torch.{model.identity.dtype}" == f"torch.{dtype}"
    assert torch.equal(*(model.residual(model.embed(IDS)) for model in found))
    assert next(own.parameters()).dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotations_are_not_rounded_with_the_weights(backend):
    """Frequencies in bfloat16 would be off by up to 0.4 %: half a radian at position 127."""
    model = families.model("llama")
    ids = torch.arange(families.MAX_LENGTH)[None]
    wide: Any = probes.load(model)
    expected = wide.trace(wide.embed(ids)).rotary[0]
    narrow: Any = probes.load(model, backend, dtype="bfloat16")
    for seen in (narrow, narrow.reinitialized(0)):
        pair = seen.trace(seen.embed(ids)).rotary[0]
        assert torch.equal(pair[0], expected[0].bfloat16())
        assert torch.equal(pair[1], expected[1].bfloat16())


def test_bridges_booted_by_transformer_lens_itself(tmp_path):
    families.tokenizer("end").save_pretrained(tmp_path)
    given: Any = {"hf_model": families.model("llama"), "tokenizer": AutoTokenizer.from_pretrained(tmp_path)}
    bridge = TransformerBridge.boot_transformers(str(tmp_path), **given, device="cpu")
    seen, own = probes.load(bridge), probes.load(families.model("llama"))
    found, expected = (one.residual(own.embed(IDS)) for one in (seen, own))
    assert (found - expected).abs().max() < 1e-3 * expected.std()  # float32's rounding, as in test_models
    assert seen.tokenizer is not None
    assert seen.bos is seen.reinitialized(0).bos is None  # TransformerLens makes every tokenizer prepend


def test_loading_says_nothing_and_leaves_transformers_and_random_numbers_as_they_were(kept, capfd):
    logging.set_verbosity_info()
    before = torch.get_rng_state()
    for backend in BACKENDS:
        probes.load(kept, backend)
    assert logging.get_verbosity() == python_logging.INFO
    assert logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------------------------- revisions


def test_revisions_are_subfolders(tmp_path, kept):
    steps = tmp_path / "run"
    for revision, seed in (("step0", 0), ("step300", 1), (None, 2)):
        saved(steps / (revision or "."), seed=seed)
        own = probes.load(families.model("llama", seed=seed)).identity.weights
        for named in (probes.load(steps, revision=revision), probes.load(f"{steps}{f'@{revision}' * bool(revision)}")):
            assert (named.identity.name, named.identity.revision, named.identity.weights) == ("run", revision, own)
    assert "@step0' and revision 'step300' name two revisions; give one" in refused(
        f"{steps}@step0", revision="step300"
    )
    assert refused(f"{steps}@step7") == "'run' has no revision 'step7'; it has step0, step300"
    assert refused(kept, revision="main") == "'small' has no revision 'main'; it has none"


# --------------------------------------------------------------------------------------------------- bad input


def test_unknown_options_are_refused(kept):
    assert refused(kept, backend="jax") == "backend 'jax' does not exist; use transformers, transformer_lens"
    assert "dtype 'float8' does not exist; use auto, float32, float64, bfloat16" in refused(kept, dtype="float8")
    assert refused(kept, device="cuda:99").endswith("cpu or auto")
    view = probes.load(kept)  # is given back as it is, and takes no options
    assert probes.load(view) is view
    assert refused(view, dtype="float64").startswith("dtype changes nothing in a view")
    assert "cannot load a Linear; give a name, a folder" in refused(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("./nowhere", "model './nowhere' does not exist"),
        ("tiny-lama", "model 'tiny-lama' (did you mean tiny-llama?) is neither bundled (tiny-llama,"),
        ("no body/no:thing", "'no body/no' is no hub id"),
    ],
)
def test_unknown_names_are_refused(source, says):
    assert says in refused(source)


# `test_bad_inputs` has many more, from the command line.
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (config_has(num_hidden_layers=4), "lacks, or has in another shape 9 weights"),
        # transformers leaves the third block, or the biases, out without a word.
        (config_has(num_hidden_layers=2), "has, without a place in its config, 9 weights (model.layers.2."),
        (tensors_are(lambda x: x.update({f"{Q[:-6]}bias": torch.ones(64)})), f"1 weight ({Q[:-6]}bias)"),
    ],
)
def test_spoilt_folders_are_refused(kept, tmp_path, spoil, says):
    copied = shutil.copytree(kept, tmp_path / "small")
    spoil(tmp_path)
    assert says in refused(copied)


def test_masks_stored_with_old_checkpoints_do_no_harm_and_bloom_is_refused_before_weights_are_read(tmp_path):
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.0.attn.masked_bias": torch.ones(())}
    folder = saved(tmp_path / "small", "gpt2")
    tensors_are(lambda weights: weights.update(masks))(tmp_path)
    assert probes.load(folder).identity.weights == probes.load(families.model("gpt2")).identity.weights
    config_has(model_type="bloom")(tmp_path)
    (folder / "model.safetensors").write_bytes(b"unreadable")
    assert "model type 'bloom' is not supported; supported families: llama, mistral" in refused(folder)


def test_models_in_memory_without_weights_or_with_such_that_are_not_finite_are_refused():
    model = families.model("llama")
    for value in (float("nan"), -torch.inf):
        with torch.no_grad():
            model.get_parameter(Q)[3, 3] = value
        assert f"has weights that are not finite ({Q})" in refused(model)
    with torch.device("meta"):
        assert "has no weights (device meta)" in refused(families.model("llama"))
