"""From a name to a model and its tokenizer: bundled and packaged ones, folders, GGUF files, the hub.

Weights are read from safetensors and GGUF alone, and code that a repository brings is run only if the caller says so.
"""

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, near, plural, reason
from ..run.files import what_is
from ..run.memory import own_memory
from .checkpoint import ADAPTER, CONFIG, INDEX, WEIGHTS, packed, read_object, refuse_adapter, refuse_codes, unpacked
from .families import QUANTIZED, check_sizes, family_of
from .gguf import CPU, SUFFIX, is_gguf
from .identity import Stored, stored
from .initialization import ASSUMED
from .packaged import PACKAGED, packaged

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"

GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of which every tokenizer has
WITH_HEAD = ("CausalLM", "LMHead")  # in names of classes that give next-token logits
DEQUANTIZED = {method for kind in QUANTIZED for method in kind.methods}
PATIENCE = 10  # seconds that the hub has to answer
BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.py")  # files that a model is made of beside its weights
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True)
class Reading:
    """How a named model is read, as in `probes.load`."""

    dtype: DType = "auto"
    trust: bool = False
    split: Mapping[str, Any] | None = None  # as `split.placement` gives it, for transformers
    tokenizer: Any = None
    device: torch.device = CPU  # where the caller wants a whole one

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype, torch.float32)


class Found(NamedTuple):
    """What a name led to."""

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    weights_file: str | None = None  # as in `Identity`


def bundled() -> list[str]:
    """Names of the pretrained models that come with the package."""
    return sorted(folder.parent.name for folder in CHECKPOINTS.glob("*/config.json"))


def located(name: str) -> Path:
    """Where a model is on this machine: a bundled one's folder, a packaged one's file, or the path itself."""
    if name in bundled():
        return CHECKPOINTS / name
    if name in PACKAGED:
        return packaged(name)
    return Path(os.path.expanduser(name))  # Path's own raises where there is no such user


def find(source: str, revision: str | None, how: Reading) -> Found:
    """The model of that name."""
    if what_is(source) == "nothing" and "@" in source:
        source, _, suffix = source.rpartition("@")
        if revision not in (None, suffix):
            raise InputError(f"'{source}@{suffix}' and revision '{revision}' name two revisions; give one")
        revision = suffix
    path = located(source)
    kind = what_is(path)
    if is_gguf(path):
        if revision is not None:
            raise InputError(f"'{source}' is one file and has no revision '{revision}'; leave it out")
        name = path.stem if path.suffix.lower() == SUFFIX else path.name
        return _from_gguf(path, source if source in PACKAGED else name, how)
    if kind == "folder":
        # A folder is named by its last part: the path differs between machines, and the weights' hash tells folders apart.
        name = source if source in bundled() else path.resolve().name
        return _from_folder(path, name, revision, how)
    if kind != "nothing":
        raise InputError(f"'{source}' is no folder and no GGUF file; {GIVE}")
    repository, _, file = source.partition(":")
    if repository.lower().endswith(SUFFIX) or source.startswith((".", "/", "~")) or source.count("/") > 1:
        give = "give a hub id without the address, as owner/name" if "://" in source else GIVE
        raise InputError(f"model '{source}' does not exist; {give}")
    if "/" not in source:
        raise InputError(
            f"model '{source}'{near(source, (*bundled(), *PACKAGED))} is neither bundled ({', '.join(bundled())}) nor "
            f"{', '.join(PACKAGED)}, a folder or a GGUF file; hub ids are written owner/name"
        )
    folder = _from_hub(repository, revision, file)
    if file:
        return _from_gguf(folder / file, source, how)._replace(revision=folder.name)
    refuse_adapter(folder)
    return Found(*_read(folder, how, source), source, folder.name)


def _from_hub(source: str, revision: str | None, file: str) -> Path:
    """The folder of a model, or of this GGUF file, in the local cache, which its commit names; fetched if not all there."""
    import huggingface_hub
    from huggingface_hub import errors

    weights = file or "model*.safetensors"
    options: dict[str, Any] = {"revision": revision, "allow_patterns": (*BESIDE, weights), "ignore_patterns": "*/*"}
    try:
        folder = Path(huggingface_hub.snapshot_download(source, local_files_only=True, **options))
        if (folder / file).is_file() if file else _whole(folder):
            return folder
    except errors.HFValidationError:
        raise InputError(f"'{source}' is no hub id; they are written owner/name, as Qwen/Qwen2.5-0.5B") from None
    except errors.LocalEntryNotFoundError:
        pass
    log_in = "log in (hf auth login, or HF_TOKEN)"
    try:
        told = huggingface_hub.HfApi().model_info(source, revision=revision, timeout=PATIENCE)
        there = [one.rfilename for one in told.siblings or ()]
        if ADAPTER not in there and not fnmatch.filter(there, weights):
            others = ", ".join(f"{source}:{name}" for name in there if name.lower().endswith(SUFFIX))
            instead = f"give {others}" if others else "convert its weights to *.safetensors"
            raise InputError(f"'{source}' has no {weights}; {instead:.300}")
        return Path(huggingface_hub.snapshot_download(source, etag_timeout=PATIENCE, **options))
    except InputError:
        raise
    except errors.RevisionNotFoundError:
        raise InputError(f"'{source}' has no revision '{revision}'; look up its branches and tags") from None
    except errors.GatedRepoError:
        raise InputError(f"'{source}' is gated; accept its terms on its page on the hub, and {log_in}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"'{source}' is no folder here, and no model on the hub, or private; check the name, or {log_in}"
        ) from None
    except Exception as error:  # whatever the network and the disk do
        raise InputError(
            f"'{source}' is not in the local cache, or not all of it, and cannot be fetched "
            f"({reason(error.__cause__ or error)}); check the network and try again (whole files are kept), or give a folder"
        ) from None


def _whole(folder: Path) -> bool:
    """Whether all files of the weights are there, as a fetch that was stopped leaves them not."""
    index = folder / INDEX
    names = read_object(index)["weight_map"].values() if index.exists() else [WEIGHTS]
    return all((folder / name).exists() for name in names)


GIVE = "give a folder with config.json and *.safetensors, or a GGUF file"


def _from_gguf(path: Path, name: str, how: Reading) -> Found:
    """A GGUF file: what it says, unless a tokenizer beside it, or given, says it better."""
    from .gguf.config import config_of, tensors_of, tokenizer_of
    from .gguf.header import read_header

    header = read_header(path)
    with _quiet(), ThreadPoolExecutor(1) as beside:
        config, tokenizer = config_of(header), how.tokenizer
        provenance = beside.submit(header.provenance)  # of the whole file, while the model is made
        if tokenizer is None:
            there = any((path.parent / file).is_file() for file in TOKENIZER_FILES)
            tokenizer = read_tokenizer(path.parent) if there else tokenizer_of(header)
        device = CPU  # from where transformers moves them to the places of a split, or `load` the whole
        if how.split is None and own_memory(how.device) is not None:
            device, how = how.device, replace(how, split={"device_map": {"": how.device}})
        model = _model(config, how, name, tensors_of(header, config, device))
    model.config.name_or_path = name
    return Found(model, tokenizer, name, None, provenance.result())


def read_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder."""
    try:
        with _quiet():
            return _tokenizer(Path(path))
    except Exception as error:  # tokenizers and transformers raise whatever they run into
        raise InputError(f"the tokenizer in '{path}' cannot be read ({reason(error)}); give its folder") from None


def _from_folder(folder: Path, name: str, revision: str | None, how: Reading) -> Found:
    steps = compressed = packed(folder)
    if steps is None:
        steps = sorted((path.parent.name for path in folder.glob("*/config.json")), key=lambda step: (len(step), step))
    if revision not in (None, *steps):
        raise InputError(f"'{name}' has no revision '{revision}'; it has {', '.join(steps) or 'none'}")
    if compressed is not None:
        model, tokenizer = _read(folder, how, name, unpacked(folder, name, revision))
        model.config.name_or_path = str(folder)
        return Found(model, tokenizer, name, revision)
    folder = folder / (revision or ".")
    refuse_adapter(folder)
    if not (folder / CONFIG).is_file():
        files = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
        instead = f"its file {files[0]} itself" if files else "a checkpoint in transformers' format"
        raise InputError(f"folder '{folder}' has no config.json; give {instead}")
    if not list(folder.glob("*.safetensors")):
        others = [path.name for kind in ("*.bin", "*.pt") for path in sorted(folder.glob(kind))]
        what = f"only {others[0]}, which may run code when read" if others else "no weights"
        raise InputError(f"folder '{folder}' holds {what}; convert the weights to *.safetensors")
    return Found(*_read(folder, how, name), name, revision)


def _read(folder: Path, how: Reading, name: str, tensors: dict[str, Tensor] | None = None) -> tuple[Any, Any]:
    """The model in a folder, of these tensors where its files are others, and its tokenizer or None."""
    from transformers import AutoConfig

    with _quiet():
        with _refusing(name):
            fields = read_object(folder / CONFIG)
            if "auto_map" not in fields:  # a family of its own: transformers asks for the permission to run its code
                family_of(str(fields.get("model_type")))
            config = AutoConfig.from_pretrained(folder, trust_remote_code=how.trust)
            check_sizes(config)
            if tensors is None and "quantization_config" not in fields:
                refuse_codes(folder)
        if "initializer_range" not in fields:
            setattr(config, ASSUMED, True)
        model = _model(config, how, name, folder if tensors is None else tensors)
        if how.tokenizer is not None:
            return model, how.tokenizer
        try:
            return model, _tokenizer(folder, trust_remote_code=how.trust)
        except Exception:  # a model can be probed without: prompts are then given as ids, and `prompts` says so
            return model, None


def _model(config: Any, how: Reading, name: str, source: Path | dict[str, Any]) -> Any:
    """The model of a configuration with the weights of a folder, or with these (tensors, or what is read as one)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    from .structure import keeps_state

    quantized, where = getattr(config, "quantization_config", None), dict(how.split or {})
    with _refusing(name):
        if isinstance(quantized, dict) and quantized.get("quant_method") in DEQUANTIZED:
            quantized["dequantize"] = True
        kind: Any = AutoModelForCausalLM
        if isinstance(source, Path):
            where |= {"trust_remote_code": how.trust}
        else:
            kind, where = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], where | {"state_dict": source}
        model, loading = kind.from_pretrained(
            source if isinstance(source, Path) else None,
            config=config,
            dtype=how.torch_dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **where,
        )
    wrong = sorted([*loading["missing_keys"], *(str(key[0]) for key in loading["mismatched_keys"])])
    written = " ".join(config.architectures or ())
    if wrong == ["lm_head.weight"] and written and not any(kind in written for kind in WITH_HEAD):
        model.lm_head, wrong = None, []  # a decoder, or a classifier
    unread = _unread(model, loading["unexpected_keys"])
    for what, names in (("lacks, or has in another shape", wrong), ("has, without a place in its config,", unread)):
        if names:
            raise InputError(
                f"model '{name}' {what} {plural(len(names), 'weight')} ({names[0]}); the files do not fit the config"
            )
    places: Any = where.get("device_map")
    for pair in model.all_tied_weights_keys.items() if isinstance(places, Mapping) else ():
        if len({str(places[key]) for key in places for name in pair if f"{name}.".startswith(f"{key}.")}) > 1:
            raise InputError(f"device_map parts {' and '.join(pair)}, which are one weight; put both on one device")
    for parameter in model.parameters() if quantized else ():  # what it has beside its codes keeps its dtype
        if parameter.is_floating_point() and not keeps_state(parameter):
            parameter.data = parameter.data.to(how.torch_dtype)
    if how.split is None:
        model.to(how.device)
    check_finite(stored(model), name)
    return model


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Whatever safetensors, json, transformers and the hub raise about a model becomes one line that names it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"model '{name}' cannot be loaded: {error}") from None
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"model '{name}' brings code of its own, which no command runs; "
                "read it, then load it in Python with trust_remote_code=True"
            ) from None
        raise InputError(
            f"model '{name}' cannot be loaded ({reason(error)}); check its files, or get them again (git lfs pull, "
            "if they are git-lfs pointers)"
        ) from None


def _tokenizer(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    declared = get_tokenizer_config(folder).get("tokenizer_class")
    # For some model types (Qwen2) AutoTokenizer puts the family's splitting rules in the place of the file's
    # own, and other ids come out than the model was trained on. A generic class means: as the file says.
    kind = PreTrainedTokenizerFast if declared in GENERIC_TOKENIZERS else AutoTokenizer
    return kind.from_pretrained(folder, **options)


def _unread(model: Any, names: Iterable[str]) -> list[str]:
    """Those of `names` that would be weights if the model had another block, or a bias.

    Leftovers of other kinds, such as the stored masks of GPT-2 and the frequencies of GPT-NeoX, do no harm.
    """

    def module(name: str) -> str:
        return re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0])

    known = {module(name) for name, _ in model.named_parameters()}
    return sorted(name for name in names if module(name) in known)


def check_finite(weights: Stored, name: str) -> None:
    """Raises InputError where a weight is not finite. Devices are read once, not once a weight."""
    ends: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for key, value in weights:
        if not value.is_floating_point() or not value.numel():  # codes, of which the scales are checked
            continue
        value = value.float() if value.dtype.itemsize == 1 else value  # torch compares no numbers of 8 bits
        # Least and greatest pass on what is not a number, in a tenth of the time that a look at every weight takes.
        ends.setdefault((value.device, value.dtype), {})[key] = torch.stack(torch.aminmax(value.detach()))
    for (_, dtype), found in ends.items():
        finite = torch.stack([*found.values()]).isfinite().all(1).tolist()
        for key in (key for key, well in zip(found, finite, strict=True) if not well):
            more = "float16 ends at 65504, use another dtype, or " if dtype == torch.float16 else ""
            raise InputError(f"model '{name}' has weights that are not finite ({key}); {more}check the checkpoint")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and notes."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
