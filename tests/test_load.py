"""What names a model, and what is said about a name or a file that is no use."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig

import probes
from probes.errors import InputError
from probes.models.huggingface import HuggingFaceView
from probes.models.lens import LensView, boot
from probes.models.load import CHECKPOINTS

ROOT = Path(__file__).parent.parent
STORIES = ROOT.parent / "shared" / "checkpoints" / "stories260K"
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


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(kept, tmp_path / "small"))


def refused(source: Any, **options: Any) -> str:
    with pytest.raises(InputError) as raised:
        probes.load(source, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


# ------------------------------------------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_folder_is_the_model_that_was_saved(name, tmp_path):
    own = families.model(name)
    model = probes.load(str(saved(tmp_path / "some model", name)))
    assert isinstance(model, HuggingFaceView)
    assert model.spec.family == name
    assert model.identity.name == "some model"
    assert model.identity.revision is None
    in_memory = probes.load(own)
    assert model.identity.weights == in_memory.identity.weights
    assert torch.equal(model.residual(model.embed(IDS)), in_memory.residual(in_memory.embed(IDS)))
    assert model.tokenizer is not None
    assert model.bos == 0


def test_paths_of_every_kind(kept, monkeypatch):
    weights = probes.load(kept).identity.weights
    monkeypatch.chdir(kept.parent)
    monkeypatch.setenv("HOME", str(kept.parent))
    for source in ("small", "./small", "~/small", "small/", Path("small")):
        model = probes.load(source)
        assert (model.identity.weights, model.identity.name) == (weights, "small")


def test_weights_in_several_files(tmp_path, kept):
    folder = saved(tmp_path / "split", max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert probes.load(folder).identity.weights == probes.load(kept).identity.weights


def test_backends(kept):
    first, second = probes.load(kept), probes.load(kept, "transformer_lens")
    assert isinstance(second, LensView)
    assert first.identity.weights == second.identity.weights
    assert second.identity.name == "small"
    assert second.bos == first.bos == 0
    bridge = boot(families.model("llama"), "llama")
    assert isinstance(probes.load(bridge), LensView)
    assert probes.load(first) is first


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_dtypes(kept, dtype, backend):
    from_folder = probes.load(kept, backend, dtype=dtype)
    own = families.model("llama")
    in_memory = probes.load(own, backend, dtype=dtype)
    for model in (from_folder, in_memory):
        assert model.dtype == getattr(torch, dtype)
        assert model.identity.dtype == dtype
        assert model.residual(model.embed(IDS)).dtype == model.dtype
    assert torch.equal(*(model.residual(model.embed(IDS)) for model in (from_folder, in_memory)))
    assert next(own.parameters()).dtype == torch.float32


def test_auto_dtype_is_float32_for_files_and_the_model_s_own_in_memory(tmp_path):
    half = families.model("llama", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    assert probes.load(tmp_path / "half").dtype == torch.float32
    assert probes.load(half).dtype == torch.bfloat16


def test_devices(kept):
    assert probes.load(kept, device="cpu").device == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert probes.load(kept).device.type == expected
    assert probes.load(families.model("llama")).device.type == "cpu"  # stays where it is
    assert probes.load(families.model("llama"), device="cpu").identity.device == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_on_a_gpu(kept, backend):
    own = families.model("gemma2")
    here, there = probes.load(own, backend), probes.load(own, backend, device="cuda")
    assert there.device.type == "cuda"
    assert next(own.parameters()).device.type == "cpu"
    found = there.trace(there.embed(IDS.cuda())).residual[-1].cpu()
    expected = here.trace(here.embed(IDS)).residual[-1]
    assert (found - expected).abs().max() < 1e-2 * expected.std()  # TF32 or another order of sums
    assert there.reinitialized(0).identity.weights == here.reinitialized(0).identity.weights
    assert there.reinitialized(0).device.type == "cuda"


def test_in_memory_models_take_a_tokenizer_and_a_revision():
    tokenizer = families.tokenizer()
    model = probes.load(families.model("llama"), tokenizer=tokenizer, revision="mine")
    assert model.tokenizer is tokenizer
    assert model.identity.revision == "mine"


def test_a_checkpoint_without_tokenizer_loads_but_has_no_prompts(tmp_path):
    model = probes.load(saved(tmp_path / "bare", tokenizer=False))
    assert model.tokenizer is None
    assert model.bos is None
    assert model.trace(model.embed(IDS)).residual[-1].isfinite().all()
    with pytest.raises(InputError, match="bare has no tokenizer; pass token ids"):
        probes.prompts(model, n=1, length=8)
    twin = probes.load(tmp_path / "bare", "transformer_lens").reinitialized(0)
    assert twin.tokenizer is None


def test_loading_says_nothing_and_leaves_transformers_as_it_was(kept, capfd):
    import logging as python_logging

    from transformers.utils import logging

    logging.set_verbosity_info()
    try:
        for backend in ("transformers", "transformer_lens"):
            probes.load(kept, backend)
        assert logging.get_verbosity() == python_logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_loading_leaves_the_random_numbers_alone(kept):
    before = torch.get_rng_state()
    probes.load(kept)
    probes.load(kept, "transformer_lens")
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------------------------- revisions


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Two steps of a run: the last in the folder itself."""
    folder = saved(tmp_path / "run", seed=2)
    for step, seed in (("step0", 0), ("step300", 1)):
        saved(folder / step, seed=seed)
    return folder


def test_revisions_are_subfolders(steps):
    expected = {"step0": 0, "step300": 1, None: 2}
    for revision, seed in expected.items():
        own = probes.load(families.model("llama", seed=seed)).identity.weights
        given = probes.load(steps, revision=revision)
        named = probes.load(str(steps) if revision is None else f"{steps}@{revision}")
        for model in (given, named):
            assert (model.identity.name, model.identity.revision) == ("run", revision)
            assert model.identity.weights == own
    assert probes.load(f"{steps}@step0", revision="step0").identity.revision == "step0"


def test_a_folder_whose_name_holds_an_at_sign(tmp_path):
    folder = saved(tmp_path / "a@b")
    assert probes.load(folder).identity.name == "a@b"
    shutil.copytree(folder, tmp_path / "copy" / "step0")
    saved(tmp_path / "a@b" / "step0")
    assert probes.load(f"{folder}@step0").identity.revision == "step0"


def test_two_revisions_are_refused(steps):
    message = refused(f"{steps}@step0", revision="step300")
    assert f"'{steps}@step0' and revision 'step300' name two revisions; give one" in message


def test_unknown_revisions_are_refused(steps, kept):
    assert refused(f"{steps}@step7") == "'run' has no revision 'step7'; it has step0, step300"
    assert refused(kept, revision="main") == "'small' has no revision 'main'; it has none"
    assert "'..'" in refused(steps, revision="..")


# ----------------------------------------------------------------------------------------------------- bundled


def test_the_bundled_models_are_all_there():
    assert probes.bundled() == ["tiny-llama", "tiny-llama-ntk", "tiny-mistral-window", "tiny-qwen2"]


@pytest.mark.parametrize(
    ("name", "family", "has_bos"),
    [
        ("tiny-llama", "llama", True),
        ("tiny-llama-ntk", "llama", True),
        ("tiny-mistral-window", "mistral", True),
        ("tiny-qwen2", "qwen2", False),
    ],
)
def test_bundled_models(name, family, has_bos, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # bundled names work from anywhere
    model = probes.load(name)
    assert model.spec.family == family
    assert (model.identity.name, model.identity.revision) == (name, None)
    assert (model.bos is not None) == has_bos
    tokens = probes.prompts(model, n=2, length=32)
    assert tokens.shape == (2, 32)
    if has_bos:
        assert (tokens[:, 0] == model.bos).all()
    stream = model.residual(model.embed(tokens))
    assert stream.isfinite().all()
    # Pretrained: text is predicted better than by chance.
    logits = model.unembed(model.norm(stream))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss < 0.8 * torch.tensor(float(model.spec.vocabulary)).log()
    assert model.reinitialized(0).identity.weights != model.identity.weights


def test_step_0_of_a_bundled_model_is_another_revision():
    folder = CHECKPOINTS / "tiny-llama"
    for step in sorted(path.parent.name for path in folder.glob("*/config.json")):
        model = probes.load(f"tiny-llama@{step}")
        assert (model.identity.name, model.identity.revision) == ("tiny-llama", step)
        assert model.identity.weights != probes.load("tiny-llama").identity.weights
    assert "'tiny-llama' has no revision 'step1'; it has step0" in refused("tiny-llama@step1")


@pytest.mark.skipif(not STORIES.is_dir(), reason="shared checkpoints are not here")
@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_the_shared_checkpoint(backend):
    from transformers import AutoModelForCausalLM

    model = probes.load(STORIES, backend)
    assert model.identity.name == "stories260K"
    tokens = probes.prompts(model, n=1, length=24, text=ROOT / "README.md") if model.tokenizer else IDS
    own = AutoModelForCausalLM.from_pretrained(STORIES, use_safetensors=True)
    with torch.no_grad():
        expected = own(tokens).logits
    found = model.unembed(model.norm(model.residual(model.embed(tokens))))
    assert (found - expected).abs().max() < 1e-4 * expected.std()  # float32, another attention kernel


# --------------------------------------------------------------------------------------------------- bad input


def test_unknown_options_are_refused(kept, unchecked):
    assert refused(kept, backend="jax") == "backend 'jax' does not exist; use transformers or transformer_lens"
    assert "dtype 'float16' does not exist; use auto, float32, float64, bfloat16" in refused(kept, dtype="float16")
    for device in ("tpu", "gpu", "cuda:99", "", "cpu:x", "meta"):
        message = refused(kept, device=device)
        assert f"device '{device}'" in message
        assert "give cpu, cuda or auto" in message


@pytest.mark.parametrize(
    ("option", "value"), [("device", "cpu"), ("dtype", "float64"), ("revision", "step0"), ("tokenizer", object())]
)
def test_a_view_is_given_back_as_it_is_and_takes_no_options(kept, option, value):
    view = probes.load(kept)
    assert probes.load(view) is view
    assert refused(view, **{option: value}).startswith(f"{option}={value!s:.40} changes nothing in a view")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/nowhere/at/all", "model folder '/nowhere/at/all' does not exist"),
        ("./nowhere", "model folder './nowhere' does not exist"),
        ("~/nowhere", "model folder '~/nowhere' does not exist"),
        ("a/b/c", "model folder 'a/b/c' does not exist"),
        ("tiny-lama", "model 'tiny-lama' is neither bundled (tiny-llama,"),
        ("", "the model's name is empty"),
        ("@step0", "the model's name is empty"),
        ("nobody/nothing", "'nobody/nothing' is not in the local cache and the hub cannot be reached"),
        ("nobody/nothing@main", "'nobody/nothing' is not in the local cache"),
        ("no body/no:thing", "'no body/no:thing' is no hub id"),
        ("owner/", "owner/"),
    ],
)
def test_unknown_names_are_refused(source, says):
    assert says in refused(source)


@pytest.mark.parametrize("source", [3, None, torch.nn.Linear(2, 2), {"model": 1}])
def test_things_that_are_no_models_are_refused(source):
    assert f"cannot load a {type(source).__name__}; give a name, a folder" in refused(source)


def test_a_file_in_place_of_a_folder(kept):
    file = kept / "model.safetensors"
    assert f"'{file}'" in refused(file)


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def pickle_only(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def corrupt_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 40) + b"not json at all" * 20)


def huge_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**60) + file.read_bytes()[8:])


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def change_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), encoding="utf-8")

    return spoil


def config_is(text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "config.json").write_text(text, encoding="utf-8")

    return spoil


Q = "model.layers.1.self_attn.q_proj.weight"


def missing(weights: dict[str, torch.Tensor]) -> None:
    del weights[Q]


def misshapen(weights: dict[str, torch.Tensor]) -> None:
    weights[Q] = weights[Q][:32].clone()


def not_a_number(weights: dict[str, torch.Tensor]) -> None:
    weights[Q][3, 3] = float("nan")


def infinite(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"][0, 0] = float("-inf")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_config, "has no config.json"),
        (
            pickle_only,
            "holds only pytorch_model.bin, which may run code when read; convert the weights to *.safetensors",
        ),
        (no_weights, "holds no weights"),
        (truncated, "cannot be loaded"),
        (empty_weights, "cannot be loaded"),
        (corrupt_header, "cannot be loaded"),
        (huge_header, "cannot be loaded"),
        (change_weights(missing), f"lacks 1 of its weights, or has them in another shape ({Q})"),
        (change_weights(misshapen), Q),
        (change_weights(dict.clear), "lacks"),
        (change_weights(not_a_number), f"has weights that are not finite ({Q})"),
        (change_weights(infinite), "has weights that are not finite (lm_head.weight)"),
        (change_config(num_hidden_layers=4), "lacks 9 of its weights"),
        (change_config(intermediate_size=100), "in another shape"),
        (change_config(model_type="bloom"), "'bloom' is not supported; supported families: llama, mistral"),
        (change_config(model_type="no-such-type"), "cannot be loaded"),
        (change_config(model_type=None), "cannot be loaded"),
        (change_config(hidden_act="no-such-act"), "cannot be loaded"),
        (config_is("{"), "cannot be loaded"),
        (config_is(""), "cannot be loaded"),
        (config_is("[1, 2]"), "cannot be loaded"),
    ],
)
def test_spoilt_folders_are_refused(copied, spoil, says):
    spoil(copied)
    message = refused(copied)
    assert says in message
    assert "small" in message


def test_weights_that_nothing_reads_are_refused(tmp_path, copied):
    # transformers leaves the third block, or the biases, out without a word.
    change_config(num_hidden_layers=2)(copied)
    assert "model 'small' has 9 weights that its config has no place for (model.layers.2." in refused(copied)
    biased = saved(tmp_path / "biased", "qwen2")
    change_config(model_type="llama")(biased)
    assert "has 9 weights that its config has no place for (model.layers.0.self_attn.k_proj.bias)" in refused(biased)


def test_masks_stored_with_old_checkpoints_do_no_harm(tmp_path):
    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)

    folder = saved(tmp_path / "old", "gpt2")
    change_weights(add)(folder)
    assert probes.load(folder).identity.weights == probes.load(families.model("gpt2")).identity.weights


def test_a_bloom_checkpoint_is_refused_before_its_weights_are_read(tmp_path):
    families.build(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"unreadable")
    assert "model type 'bloom' is not supported" in refused(tmp_path)


def test_weights_that_are_not_finite_are_refused_in_memory():
    model = families.model("llama")
    with torch.no_grad():
        model.get_parameter(Q)[0, 0] = float("nan")
    assert f"has weights that are not finite ({Q})" in refused(model)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = families.model("llama")
    assert "has no weights (device meta)" in refused(model)


def test_a_spoilt_tokenizer_is_none(copied):
    (copied / "tokenizer.json").write_text("{", encoding="utf-8")
    assert probes.load(copied).tokenizer is None


def test_code_that_comes_with_a_checkpoint_is_not_run(copied, monkeypatch):
    witness = copied / "ran"
    (copied / "own.py").write_text(
        f"open({str(witness)!r}, 'w').close()\n"
        "from transformers import LlamaConfig as OwnConfig, LlamaForCausalLM as OwnModel\n",
        encoding="utf-8",
    )
    asking = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change_config(model_type="own", auto_map=asking)(copied)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the caller was asked a question"))
    message = refused(copied)
    assert "small" in message
    assert "trust_remote_code" in message
    assert not witness.exists()
    # With a family transformers knows, its own code is used and theirs is not.
    change_config(model_type="llama", auto_map=asking)(copied)
    try:
        probes.load(copied)
    except InputError as error:
        assert "trust_remote_code" in str(error)  # noqa: PT017
    assert not witness.exists()
