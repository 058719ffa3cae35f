"""From whatever names a model to a view of it: the only module that imports the adapters.

Weights are read from safetensors alone, and code that a repository brings is run only if the caller says so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import InputError
from ..files import what_is
from ..processes import launched, local_number
from .checkpoint import check_fields, check_weights, read_object
from .view import Birth, View

if TYPE_CHECKING:
    from .huggingface import HuggingFaceView

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"

GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
DType = Literal["auto", "float32", "float64", "bfloat16"]
Backend = Literal["transformers", "transformer_lens"]


def bundled() -> list[str]:
    """Names of the pretrained models that come with the package."""
    return sorted(folder.parent.name for folder in CHECKPOINTS.glob("*/config.json"))


def load(
    source: Any,
    backend: Backend = "transformers",
    *,
    device: str = "auto",
    dtype: DType = "auto",
    revision: str | None = None,
    tokenizer: Any | None = None,
    trust_remote_code: bool = False,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> View:
    """A view of a model.

    A model larger than one device is split by accelerate: `device_map` says where its modules go while it is read, so that
    it is whole nowhere. A model in memory that accelerate has split already is taken as it is. Probes see such a model on
    the device where its first block runs.

    Args:
        source: a bundled name ("tiny-llama"), a local folder in transformers' format, a hub id ("Qwen/Qwen2.5-0.5B"), a
            transformers model in memory, a `TransformerBridge`, or a view, such as a toy (returned as it is). A name may
            carry its revision: "tiny-llama@step0".
        backend: who runs it. Both give the same numbers; TransformerLens is for models with a lens user's hooks.
        device: "auto" takes CUDA if there is any, and leaves a model in memory where it is.
        dtype: "auto" is float32, and a model in memory stays as it is.
        revision: of a hub id; of a bundled model or folder, the subfolder that holds that step.
        tokenizer: for models in memory.
        trust_remote_code: run modelling code that comes with the checkpoint. Off unless asked for.
        device_map: in the place of `device`, for names and folders: "auto", "balanced", "balanced_low_0", "sequential"
            (accelerate finds devices), or devices by module ("model.layers.0": "cuda:0"; "" for the rest). On "cpu" or
            "disk" beside an accelerator, weights wait there until their module runs.
        max_memory: with a policy of accelerate's: bytes, or a size as "10GiB", by accelerator's number and "cpu".
        offload_folder: for weights on disk that cannot be read from the checkpoint as they are, and those of
            `reinitialized`; a temporary folder if not given.

    Raises:
        InputError: the source cannot be found, reached, read or is of an unsupported family; weights are missing, of the
            wrong shape, not finite, or not in safetensors; an option has an unknown value, or comes with a view; a device
            map has an unknown module or device or leaves weights out, or a split model would have to be moved.
    """
    from .split import Placement

    if backend not in ("transformers", "transformer_lens"):
        raise InputError(f"backend '{backend}' does not exist; use transformers or transformer_lens")
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"dtype '{dtype}' does not exist; use auto, {', '.join(DTYPES)}")
    placement = Placement.of(device_map, max_memory, offload_folder)
    if placement is not None:
        if backend == "transformer_lens":
            raise InputError(f"device_map={device_map!s:.60} goes with backend transformers; leave one of the two out")
        if device != "auto":
            raise InputError(f"device '{device}' and device_map={device_map!s:.60} say where the model goes; give one")
    place = _device(device)
    if isinstance(source, (str, os.PathLike)):
        model, found, name, revision = _from_name(os.fspath(source), revision, dtype, trust_remote_code, placement)
        if placement is None:
            model.to(place or _usual_device())
        return _view(model, backend, tokenizer or found, name, revision, own=True)
    if isinstance(source, View):
        given: dict[str, Any] = {"device": device, "dtype": dtype, "revision": revision, "tokenizer": tokenizer}
        for option, value in (given | {"device_map": device_map}).items():
            if value is not None and (option == "device_map" or value != "auto"):
                raise InputError(
                    f"{option}={value!s:.40} changes nothing in a view, which is there already; leave it out"
                )
        return source
    if placement is not None:
        raise InputError(
            f"device_map={device_map!s:.60} goes with a name or folder; split a model in memory by accelerate.dispatch_model"
        )
    return _from_memory(source, backend, place, dtype, tokenizer, revision)


OLDER_FIELDS = ("rope_theta", "rope_scaling", "torch_dtype")  # what transformers still takes and stores elsewhere


def born(config: Any) -> Birth:
    """What fresh weights of a configuration are drawn from; no weights are made or read.

    Args:
        config: a transformers configuration, a dictionary or config.json of one, a folder that holds that file, a bundled
            name, or a view; a `Birth` is returned as it is.

    Raises:
        InputError: nothing of that kind, or a family that is not supported.
    """
    from .huggingface import birth_of

    if isinstance(config, Birth):
        return config
    return birth_of(_configuration(config))


def fresh(config: Any, seed: int = 0, *, residual_scale: float = 1.0, positional: bool = True) -> View:
    """A model with fresh weights, from its configuration alone; on the CPU, in float32, without a tokenizer.

    Args:
        config: as in `born`.
        seed: of the weights.
        residual_scale: what the matrices that write to the residual stream (W_O and W_down) are multiplied by.
        positional: without it no positional encoding reaches the blocks.

    Raises:
        InputError: nothing of that kind, or a family that is not supported.
    """
    from .huggingface import HuggingFaceView, fresh_model

    described = _configuration(config)
    try:
        model = fresh_model(described, seed, positional=positional)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RuntimeError) as error:  # whatever it runs into
        reason = next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
        raise InputError(f"no model can be made of this {described.model_type} config ({reason}); check it") from None
    view = HuggingFaceView(
        model,
        name=None if not isinstance(config, (str, os.PathLike)) else Path(os.fspath(config)).name,
        condition="init" if positional else "init-nope",
    )
    if residual_scale != 1:
        with torch.no_grad():
            for layer in range(view.spec.blocks):
                parts = view.parts(layer)
                assert parts is not None  # nobody else holds this model
                parts.o.weight.mul_(residual_scale)
                parts.down.weight.mul_(residual_scale)
    return view


def _configuration(config: Any) -> Any:
    """A transformers configuration from whatever describes one, of a model that can be made."""
    from transformers import PreTrainedConfig

    from .huggingface import HuggingFaceView, check_sizes, family_of

    if isinstance(config, PreTrainedConfig):
        family_of(config)
        made = config
    elif isinstance(config, HuggingFaceView):
        made = _from_fields(json.loads(config.identity.config), strict=False)
    elif isinstance(config, (str, os.PathLike)):
        path = Path(os.fspath(config))
        path = CHECKPOINTS / path if str(path) in bundled() else path.expanduser()
        file = path / "config.json" if path.is_dir() else path
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(
                f"config '{config}' cannot be read ({type(error).__name__}); "
                f"give a config.json, a folder with one, or a bundled name ({', '.join(bundled())})"
            ) from None
        made = _from_fields(fields, strict=False)
    else:
        made = _from_fields(config, strict=True)
    check_sizes(made)
    return made


def _from_fields(fields: Any, *, strict: bool) -> Any:
    """A configuration from its fields; `strict` refuses names it does not know, which files of other origin may have."""
    from transformers import AutoConfig

    from .huggingface import family_of

    if not isinstance(fields, Mapping):
        raise InputError(
            f"cannot read a {type(fields).__name__} as a config; give a transformers config or config.json"
        )
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise InputError("the config names no model_type; give a transformers config.json")
    family_of(SimpleNamespace(model_type=kind))
    try:
        made = AutoConfig.for_model(**fields)
        plain = AutoConfig.for_model(kind)
    except Exception as error:  # transformers checks fields with errors of several libraries
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"the {kind} config is refused by transformers ({reason}); check it") from None
    known = {*plain.to_dict(), *OLDER_FIELDS}
    unknown = sorted(name for name in fields if not hasattr(plain, name) and name not in known)
    if strict and unknown:
        raise InputError(f"a {kind} config has no field '{unknown[0]}'; check its spelling")
    return made


def _device(device: str) -> torch.device | None:
    if device == "auto":
        return None
    try:
        probe = torch.zeros(1, device=device)
        probe.item()  # there, working, and holding values ("meta" holds none)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"device '{device}' cannot be used ({reason}); give cpu, cuda or auto") from None
    return probe.device  # with its index: "cuda" is where a model on "cuda:0" is


def _usual_device() -> str:
    """CUDA if there is any: of several processes on a machine, each its own GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{local_number() % torch.cuda.device_count()}" if launched() > 1 else "cuda"


def _from_memory(
    source: Any, backend: Backend, place: torch.device | None, dtype: DType, tokenizer: Any, revision: str | None
) -> View:
    import copy

    from transformers import PreTrainedModel

    from .hooks import Origin
    from .huggingface import cast
    from .split import is_split, weights
    from .wrappers import has_adapters, unwrapped

    source = given = unwrapped(source)
    is_bridge = type(source).__name__ == "TransformerBridge"
    if not is_bridge and not isinstance(source, PreTrainedModel):
        raise InputError(
            f"cannot load a {type(source).__name__}; "
            "give a name, a folder, a transformers model, a TransformerBridge or a view"
        )
    if is_bridge and backend != "transformer_lens":
        backend = "transformer_lens"  # a bridge is what TransformerLens runs, whatever the default says
    wanted = DTYPES.get(dtype)
    parameter = next(source.parameters())
    if not all(weight.there for weight in weights(source)):
        raise InputError(f"the {type(source).__name__} has no weights (device meta); load them before it is measured")
    if backend == "transformer_lens":
        from .lens import refuse_split

        refuse_split(source)
    elif is_split(source):
        view = _split_already(source, place, wanted, tokenizer, revision)
        view.origin = Origin(given, shared=True)
        return view
    moves = (place is not None and place != parameter.device) or (wanted is not None and wanted != parameter.dtype)
    if moves:
        source = copy.deepcopy(source)
        source.to(place or parameter.device)
        cast(source, wanted or parameter.dtype)
    _check_finite(source, type(source).__name__)
    if is_bridge:
        from .lens import LensView

        bridge: Any = source
        view = LensView(bridge, tokenizer=tokenizer, revision=revision)
    else:
        view = _view(source, backend, tokenizer, _name_of(source), revision, own=moves)
    # Bridges of fused projections hold copies of them, and layers with adapters have weights of their own in the view.
    copied = moves or has_adapters(given) or (backend == "transformer_lens" and not is_bridge)
    view.origin = Origin(given, shared=not copied)
    return view


def _split_already(
    source: Any, place: torch.device | None, dtype: torch.dtype | None, tokenizer: Any, revision: str | None
) -> HuggingFaceView:
    _check_finite(source, type(source).__name__)
    view = _view(source, "transformers", tokenizer, _name_of(source), revision, own=False)
    for wanted, found, option in ((place, view.device, "device"), (dtype, view.dtype, "dtype")):
        if wanted is not None and wanted != found:
            raise InputError(
                f"{option} '{wanted}' would move a {type(source).__name__} that accelerate has split; "
                "leave it out, or load the checkpoint's folder"
            )
    return view


def _name_of(model: Any) -> str:
    return model.config.name_or_path or f"in-memory {model.config.model_type}"


def _view(
    model: Any, backend: Backend, tokenizer: Any, name: str, revision: str | None, *, own: bool
) -> HuggingFaceView:
    from .huggingface import HuggingFaceView, family_of, shadow

    family_of(model.config)
    if backend == "transformers":
        return HuggingFaceView(model, tokenizer=tokenizer, name=name, revision=revision)
    from .lens import LensView, boot

    bridge = boot(model if own else shadow(model), name)
    return LensView(bridge, tokenizer=tokenizer, name=name, revision=revision)


def _from_name(
    source: str, revision: str | None, dtype: DType, trust: bool, placement: Any
) -> tuple[Any, Any, str, str | None]:
    if what_is(source) == "nothing" and "@" in source:
        source, _, suffix = source.rpartition("@")
        if revision not in (None, suffix):
            raise InputError(f"'{source}@{suffix}' and revision '{revision}' name two revisions; give one")
        revision = suffix
    if not source:
        raise InputError("the model's name is empty; give a bundled name, a folder or a hub id")
    try:
        folder = CHECKPOINTS / source if source in bundled() else Path(source).expanduser()
    except RuntimeError:  # nobody of that name
        raise InputError(f"model folder '{source}' does not exist; there is no such home folder") from None
    found = what_is(folder)
    if found == "folder":
        # A folder goes by its own name: its path is this machine's affair, and the weights' hash tells folders apart.
        name = source if source in bundled() else folder.resolve().name
        return _from_folder(folder, name, revision, dtype, trust, placement)
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or found != "nothing"
    if looks_like_path:
        raise InputError(f"model folder '{source}' does not exist; give a folder with config.json and *.safetensors")
    if "/" not in source:
        raise InputError(
            f"model '{source}' is neither bundled ({', '.join(bundled())}) nor a folder; hub ids are written owner/name"
        )
    return _from_hub(source, revision, dtype, trust, placement)


def _from_folder(
    folder: Path, name: str, revision: str | None, dtype: DType, trust: bool, placement: Any
) -> tuple[Any, Any, str, str | None]:
    if revision is not None:
        steps = sorted(path.parent.name for path in folder.glob("*/config.json"))
        if revision not in steps:
            raise InputError(f"'{name}' has no revision '{revision}'; it has {', '.join(steps) or 'none'}")
        folder = folder / revision
    if not (folder / "config.json").is_file():
        raise InputError(f"folder '{folder}' has no config.json; give a checkpoint in transformers' format")
    if not list(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
        reason = f"only {others[0]}, which may run code when read" if others else "no weights"
        raise InputError(f"folder '{folder}' holds {reason}; convert the weights to *.safetensors")
    _check_config(folder, name)
    model, tokenizer = _read(str(folder), None, dtype, trust, name, placement)
    return model, tokenizer, name, revision


def _check_config(folder: Path, name: str) -> None:
    """Refuse what can be refused from config.json alone, in words that name the field, before transformers does."""
    from .huggingface import family_of

    try:
        fields = read_object(folder / "config.json")
        kind = fields.get("model_type")
        if not isinstance(kind, str):
            raise InputError(f"config.json has model_type={json.dumps(kind)[:40]}; a family's name belongs there")
        if "auto_map" not in fields:  # a family of its own: transformers asks for the permission to run its code
            family_of(SimpleNamespace(model_type=kind))
        check_fields(fields)
    except InputError as error:
        raise InputError(f"model '{name}' cannot be loaded: {error}") from None


def _from_hub(
    source: str, revision: str | None, dtype: DType, trust: bool, placement: Any
) -> tuple[Any, Any, str, str | None]:
    """A hub id: from the local cache if it is there, else over the network, asked once before the long way round."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    commit = revision
    try:
        cached = huggingface_hub.try_to_load_from_cache(source, "config.json", revision=revision)
        if not isinstance(cached, str):
            commit = huggingface_hub.HfApi().model_info(source, revision=revision, timeout=10).sha
    except HFValidationError:
        raise InputError(f"'{source}' is no hub id; they are written owner/name, as Qwen/Qwen2.5-0.5B") from None
    except RevisionNotFoundError:
        raise InputError(f"'{source}' has no revision '{revision}'; look up its branches and tags") from None
    except RepositoryNotFoundError:
        raise InputError(f"'{source}' is not on the hub, or private; check the name, or log in") from None
    except Exception as error:  # whatever the network does
        reason = type(error).__name__
        raise InputError(
            f"'{source}' is not in the local cache and the hub cannot be reached ({reason}); "
            "check the network, or give a folder"
        ) from None
    model, tokenizer = _read(source, revision, dtype, trust, source, placement)
    return model, tokenizer, source, getattr(model.config, "_commit_hash", None) or commit


def _read(path: str, revision: str | None, dtype: DType, trust: bool, name: str, placement: Any) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    from .huggingface import family_of

    given: dict[str, Any] = {"revision": revision} if revision is not None else {}

    def structure() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust)

    with _quiet():
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust, **given)
            family_of(config)
            if Path(path).is_dir():
                check_weights(Path(path))
            where = {} if placement is None else placement.arguments(structure)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=DTYPES.get(dtype, torch.float32),
                use_safetensors=True,
                trust_remote_code=trust,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **where,
                **given,
            )
            model, loading = loaded
        except InputError as error:
            raise InputError(f"model '{name}' cannot be loaded: {error}") from None
        except Exception as error:  # safetensors, json, transformers and the hub each raise their own
            if "trust_remote_code" in str(error):
                raise InputError(
                    f"model '{name}' brings code of its own, which is not run; "
                    "read it, then call probes.load with trust_remote_code=True"
                ) from None
            reason = next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
            raise InputError(f"model '{name}' cannot be loaded ({reason}); check its files") from None
        wrong = [*loading["missing_keys"], *(str(key[0]) for key in loading["mismatched_keys"])]
        if wrong:
            raise InputError(
                f"model '{name}' lacks {len(wrong)} of its weights, or has them in another shape ({sorted(wrong)[0]}); "
                "the files do not fit the config"
            )
        unread = _unread(model, loading["unexpected_keys"])
        if unread:
            raise InputError(
                f"model '{name}' has {len(unread)} weights that its config has no place for ({unread[0]}); "
                "the files do not fit the config"
            )
        _check_finite(model, name)
        try:
            declared = get_tokenizer_config(path, **given).get("tokenizer_class")
            # For some model types (Qwen2) AutoTokenizer puts the family's splitting rules in the place of the file's
            # own, and other ids come out than the model was trained on. A generic class means: as the file says.
            kind = PreTrainedTokenizerFast if declared in GENERIC_TOKENIZERS else AutoTokenizer
            tokenizer = kind.from_pretrained(path, trust_remote_code=trust, **given)
        except Exception:  # a model can be probed without: prompts are then given as ids, and `prompts` says so
            tokenizer = None
    return model, tokenizer


def _unread(model: Any, names: Iterable[str]) -> list[str]:
    """Those of `names` that would be weights if the model had another block, or a bias.

    Leftovers of other kinds, such as the stored masks of GPT-2 and the frequencies of GPT-NeoX, do no harm.
    """

    def module(name: str) -> str:
        return re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0])

    known = {module(name) for name, _ in model.named_parameters()}
    return sorted(name for name in names if module(name) in known)


def _check_finite(model: Any, name: str) -> None:
    from .split import weights

    for weight in weights(model):
        if not torch.isfinite(weight.value()).all():
            raise InputError(f"model '{name}' has weights that are not finite ({weight.name}); check the checkpoint")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and notes, and accelerate's; their errors come out as ours."""
    from transformers.utils import logging

    from . import split

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with split.quiet():
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
