"""`probes.load`, `probes.born`, `probes.fresh`: from a name, a folder or a model to a view; only this imports adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import torch

from ..errors import InputError, check_choice, reason
from ..run.hardware import named
from ..run.precision import left
from ..run.processes import launched, local_number
from .checkpoint import CONFIG as CONFIG_FILE
from .checkpoint import read_object
from .families import check_sizes, family_of
from .gguf import is_gguf
from .initialization import ASSUMED, CONFIG, Rule
from .named import CHECKPOINTS as CHECKPOINTS
from .named import DTYPES, DType, Found, Reading, bundled, check_finite, find, located, read_tokenizer
from .ragged import by_text
from .view import Birth, View, obstacle

if TYPE_CHECKING:
    from .huggingface import HuggingFaceView

Backend = Literal["transformers", "transformer_lens"]


@left
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
    beyond: bool = False,
) -> View:
    """A view of a model.

    A model larger than one device is split by accelerate: `device_map` says where its modules go while it is read, so that
    it is whole nowhere. A model in memory that accelerate has split already is taken as it is. Probes see such a model on
    the device where its first block runs.

    Args:
        source: a bundled name ("tiny-llama"), "smollm2-135m", "gemma3-270m", a local folder in transformers' format, a GGUF
            file, a hub id ("Qwen/Qwen2.5-0.5B", a GGUF file there as "owner/name:FILE.gguf"), a transformers model in
            memory, a `TransformerBridge`, or a view, such as a toy (returned as it is). A name may carry its revision:
            "tiny-llama@step0".
        backend: what runs it. Both give the same numbers; TransformerLens is for models with a lens user's hooks.
        device: "auto" takes CUDA if there is any, and leaves a model in memory where it is.
        dtype: "auto" is float32, to which a GGUF file's weights are dequantized, and a model in memory stays as it is.
        revision: of a hub id; of a bundled model, a step; of a folder, the subfolder that holds that step.
        tokenizer: in the place of the model's own, and for models in memory, which have none; or a folder that has one.
        trust_remote_code: run modelling code that comes with the checkpoint. Off unless asked for.
        device_map: in the place of `device`, for names and folders: "auto", "balanced", "balanced_low_0", "sequential"
            (accelerate finds devices), or devices by module ("model.layers.0": "cuda:0"), none inside another. On
            "cpu" or "disk" beside an accelerator, weights wait there until their module runs.
        max_memory: with a policy of accelerate's: bytes, or a size as "10GiB", by accelerator's number and "cpu".
        offload_folder: for weights on disk that cannot be read from the checkpoint as they are.
        beyond: take texts longer than the model was made for (`max_position_embeddings`).

    Raises:
        InputError: the source cannot be found, reached, read or is of an unsupported family; weights are missing, of the
            wrong shape, not finite, or not in safetensors; a GGUF file is damaged or states what cannot be followed; an
            option has an unknown value, or comes with a view; a device map cannot be followed, or a split model would
            have to be moved; `beyond` with learned positions.
    """
    check_choice("backend", backend, get_args(Backend))
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if isinstance(source, View):
        options = {"device": device != "auto", "dtype": dtype != "auto", "beyond": beyond, "device_map": device_map}
        for option, value in (options | {"revision": revision, "tokenizer": tokenizer}).items():
            if value:
                raise InputError(f"{option} changes nothing in a view, which is there already; leave it out")
        return source
    from transformers import PreTrainedTokenizerBase

    from .split import placement

    named_source = isinstance(source, (str, os.PathLike))
    split = placement(device_map, max_memory, offload_folder)
    beside = {
        f"device '{device}'": device != "auto",
        "backend transformer_lens": backend == "transformer_lens",
        "a model in memory, which accelerate.dispatch_model splits": not named_source,
    }
    for what, there in beside.items() if split is not None else ():
        if there:
            raise InputError(f"device_map={device_map!s:.60} does not go with {what}; leave one of the two out")
    place = None if device == "auto" else named(device)
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = read_tokenizer(tokenizer)
    if not isinstance(tokenizer, (PreTrainedTokenizerBase, type(None))):
        raise InputError(
            f"a {type(tokenizer).__name__} is no tokenizer of transformers; give one that AutoTokenizer.from_pretrained "
            "gives, or a folder with tokenizer.json"
        )
    if not named_source:
        return _from_memory(source, backend, place, dtype, tokenizer, revision, beyond)
    place = place or torch.device(_usual_device())
    named_model = find(os.fspath(source), revision, Reading(dtype, trust_remote_code, split, tokenizer, place))
    return _view(named_model, backend, own=True, beyond=beyond)


# What transformers still takes and stores elsewhere, and what `load` adds.
OTHER_FIELDS = ("rope_theta", "rope_scaling", "torch_dtype", ASSUMED)


@left
def born(config: Any, *, initialization: Rule | None = None) -> Birth:
    """What fresh weights of a configuration are drawn from; no weights are made or read.

    Args:
        config: a transformers configuration, a dictionary or config.json of one, a folder that holds that file, a GGUF
            file, a bundled or packaged name, or a view; a `Birth` is returned as it is.
        initialization: the rule; if not given, the one that a view's fresh weights were drawn by, else "config".

    Raises:
        InputError: nothing of that kind, a family that is not supported, or no such rule.
    """
    from .fresh import birth_of, initialization_of

    if isinstance(config, Birth):
        if initialization is not None:
            raise InputError(f"initialization '{initialization!s:.40}' changes nothing in a Birth; leave it out")
        return config
    if initialization is None:
        initialization = getattr(config, "initialization", None)
    described = _configuration(config)
    return birth_of(described, initialization_of(described, CONFIG if initialization is None else initialization))


@left
def fresh(
    config: Any, seed: int = 0, *, residual_scale: float = 1.0, positional: bool = True, initialization: Rule = CONFIG
) -> View:
    """A model with fresh weights, from its configuration alone; on the CPU, in float32, without a tokenizer.

    Args:
        config: as in `born`.
        seed: of the weights.
        residual_scale: what the matrices that write to the residual stream (W_O and W_down) are multiplied by.
        positional: without it no positional encoding reaches the blocks.
        initialization: what the weights are drawn from: "config", a deviation ("0.02", "1/24"), the name of a published
            rule, or an `Initialization`.

    Raises:
        InputError: nothing of that kind, a family that is not supported, or no such rule.
    """
    from .fresh import fresh_model, initialization_of
    from .huggingface import HuggingFaceView

    described = _configuration(config)
    rule = initialization_of(described, initialization)
    model = fresh_model(described, seed, rule, positional=positional)
    view = HuggingFaceView(
        model,
        name=None if not isinstance(config, (str, os.PathLike)) else Path(os.fspath(config)).name,
        condition="init" if positional else "init-nope",
        initialization=rule,
    )
    if residual_scale != 1:
        with torch.no_grad():
            for layer in range(view.spec.blocks):
                parts = view.parts(layer)
                if parts is None:
                    raise InputError(
                        f"residual_scale={residual_scale:g} changes parts of blocks, and {obstacle(view, layer)}"
                    )
                parts.o.weight.mul_(residual_scale)
                parts.down.weight.mul_(residual_scale)
    return view


def _configuration(config: Any) -> Any:
    """A transformers configuration from whatever describes one, of a model that can be made."""
    from transformers import PreTrainedConfig

    from .huggingface import HuggingFaceView

    described = config._model.config if isinstance(config, HuggingFaceView) else config
    if isinstance(config, (str, os.PathLike)):
        path = located(os.fspath(config))
        if is_gguf(path):
            from .gguf.config import config_of
            from .gguf.header import read_header

            return config_of(read_header(path))
        try:
            described = _from_fields(read_object(path / CONFIG_FILE if path.is_dir() else path))
        except InputError as error:
            raise InputError(
                f"config '{config}' cannot be used: {error}; "
                f"give a config.json, a folder with one, or a bundled name ({', '.join(bundled())})"
            ) from None
    elif isinstance(config, Mapping):
        described = _from_fields(config)
        # transformers takes any name without a word; files have fields of other origin, too
        plain = type(described)()
        known = {*plain.to_dict(), *OTHER_FIELDS}
        unknown = next((name for name in config if name not in known and not hasattr(plain, name)), None)
        if unknown is not None:
            raise InputError(f"a {described.model_type} config has no field '{unknown}'; check its spelling")
    if not isinstance(described, PreTrainedConfig):
        raise InputError(
            f"cannot read a {type(config).__name__} as a config; give a transformers config or config.json"
        )
    family_of(described)
    check_sizes(described)
    if not (described.initializer_range or 0) > 0:
        raise InputError(
            f"the config has initializer_range={described.initializer_range}; give a positive number, as 0.02"
        )
    return described


def _from_fields(fields: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = str(fields.get("model_type"))
    family_of(kind)
    try:
        described = AutoConfig.for_model(**fields)
    except Exception as error:  # transformers checks fields with errors of several libraries
        raise InputError(f"the {kind} config is refused by transformers ({reason(error)}); check it") from None
    if "initializer_range" not in fields:
        setattr(described, ASSUMED, True)
    return described


def _usual_device() -> str:
    """CUDA if there is any: of several processes on a machine, each its own GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{local_number() % torch.cuda.device_count()}" if launched() > 1 else "cuda"


def _from_memory(
    source: Any,
    backend: Backend,
    place: torch.device | None,
    dtype: DType,
    tokenizer: Any,
    revision: str | None,
    beyond: bool,
) -> View:
    from transformers import PreTrainedModel

    from .shadow import replaced, unwrapped
    from .split import execution_device, is_split, weights
    from .structure import keeps_state, moved, structure

    source = caller = unwrapped(source)
    kind, is_bridge = type(source).__name__, type(source).__name__ == "TransformerBridge"
    if not is_bridge and not isinstance(source, PreTrainedModel):
        raise InputError(
            f"cannot load a {kind}; give a name, a folder, a transformers model, a TransformerBridge or a view"
        )
    if not all(weight.there for weight in weights(source)):
        raise InputError(f"the {kind} has no weights (device meta); load them before it is measured")
    # A bridge is what TransformerLens runs, whatever the default says.
    lens = is_bridge or backend == "transformer_lens"
    if lens and is_split(source):
        raise InputError(
            f"the {kind} is split by accelerate, which TransformerLens's modules do not follow; use backend transformers"
        )
    here, parameter = execution_device(source), next(source.parameters())
    place, wanted = place or here, DTYPES.get(dtype, parameter.dtype)
    moves = (place, wanted) != (here, parameter.dtype)
    quantized = any(map(keeps_state, source.parameters())) or any(map(replaced, source.modules()))
    if moves and (is_split(source) or quantized):
        raise InputError(
            f"the {kind} is split or quantized, and is neither moved nor cast to {place}, {wanted}; leave device and dtype "
            "out, or load its folder with them"
        )
    if moves:
        source = structure(source, partial(moved, place, wanted))
        source.to(place)  # a bridge takes note of it
    if is_bridge:
        from .lens import LensView

        view = LensView(source, tokenizer=tokenizer, revision=revision, beyond=beyond)  # type: ignore[arg-type]
    else:
        name = source.config.name_or_path or f"in-memory {source.config.model_type}"
        view = _view(Found(source, tokenizer, name, revision), backend, own=moves, beyond=beyond)
    check_finite(view.stored(), kind)
    if not (moves or (lens and not is_bridge)):  # weights of its own
        view.caller = caller
    return view


def _view(found: Found, backend: Backend, *, own: bool, beyond: bool) -> HuggingFaceView:
    from .huggingface import HuggingFaceView, shadow

    model, described = found.model, {name: value for name, value in found._asdict().items() if name != "model"}
    described["beyond"] = beyond
    family_of(model.config)
    if backend == "transformers":
        return HuggingFaceView(model, **described)
    from .lens import LensView, boot

    return LensView(boot(model if own else shadow(model), found.name), **described)


Rest = ParamSpec("Rest")
Returned = TypeVar("Returned")


def takes_model(function: Callable[Concatenate[View, Rest], Returned]) -> Callable[Concatenate[Any, Rest], Returned]:
    """The function of a view (its argument `model`), which now also takes a name, a folder or a model in memory.

    If it takes `tokens`, it also takes `attention_mask` (`probes.models.ragged`).
    """
    measure = by_text(function)

    @wraps(measure)
    @left
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Not isinstance(model, View): that reads `identity`, which hashes all weights.
        view = model if hasattr(model, "spec") and hasattr(model, "residual") else load(model)
        inner: Any = view
        while hasattr(inner, "original"):
            inner = inner.original
        if hasattr(inner, "renew"):  # a view of a caller's model takes it as it is now
            inner.renew()
        return measure(view, *args, **kwargs)

    return call
