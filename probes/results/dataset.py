"""Results: labelled arrays that say what made them, in one NetCDF file that any tool opens.

A measurement is an `xarray.Dataset` with named dimensions; its attributes say which model, prompts, options and
versions it came from (`provenance`), and the token ids are stored inside it. `combine` joins the conditions and seeds of
one model. Results that are kept in a repository may lack some of it, which their attribute `left_out` names
(`tools/slim.py`): such a file is called NAME.nc.xz, and is read wherever NAME.nc is asked for and not there.
"""

import hashlib
import io
import json
import lzma
import os
import platform
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from ..errors import InputError, reason
from ..run.files import atomic, what_is
from ..run.precision import coarse
from ..run.store import RESULT, Store
from .statistics import ends

CONDITIONS = ("pretrained", "init", "init-nope")  # the order in combined results and on figures
QUICK = "quick"  # the attribute of results that `headwater report --quick` made
PACKED = ".xz"  # what a compressed file's name ends in
SIGNATURE = b"\x89HDF\r\n\x1a\n"  # the first bytes of a NetCDF-4 file
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 2, "pb": 2}]  # for numbers of four or eight bytes
COMPRESSION = 4  # zlib's level; above it files of float noise get no smaller, only slower

_command = ""  # how the command line was called; empty for results made from Python

Attribute: TypeAlias = str | int | float
Result: TypeAlias = xr.Dataset | str | os.PathLike[str]  # or the path of its file


def set_command(arguments: Sequence[str]) -> None:
    """Record the command line (without the program's path) in the provenance of all results made from here on."""
    global _command
    _command = shlex.join(["headwater", *arguments])


def provenance(model: Any, tokens: Int[Tensor, "prompt position"], **options: Any) -> dict[str, Attribute]:
    """Attributes that say what made a result of `model`, any `probes.models.view.View`.

    `model`, `revision` ("null" if there is none), `condition`, `weights` (their hash), `config` (JSON), `backend`, `dtype`,
    `device`; of fresh weights `initialization`, what they were drawn from; `tokens_sha256`; `options` (JSON); `headwater`,
    `torch`, `transformers`, `python` (versions) and `platform`; `command` (empty when called from Python); `created` (UTC,
    ISO 8601). For a model with a replacement at position 0 (`probes.swapped`) also `replacement`, for one that is changed
    otherwise (`probes.ablated`) `changed`; for one out of a GGUF file `weights_file` (JSON: its name, SHA-256 and number of
    tensors by type), from which the weights were dequantized; of a float32 model on a GPU that knows TF32
    `float32_products`, where it is used; of a hybrid `unmeasured_layers`, those without softmax attention.
    """
    identity = model.identity
    names = ("revision", "condition", "weights", "config", "backend", "dtype", "device")
    found = {"model": identity.name, **{name: getattr(identity, name) for name in names}}
    more = {"initialization": identity.initialization, "replacement": getattr(model, "replacement", None)}
    more |= {"unmeasured_layers": model.spec.left_out}
    more |= {"weights_file": identity.weights_file, "changed": getattr(model, "said", None) or None}
    found |= {"tokens_sha256": tokens_hash(tokens), "options": options}
    if coarse(model.device, model.dtype):
        more |= {"float32_products": "TF32 in sketches, else float32"}
    return attributes(found | {name: value for name, value in more.items() if value is not None}) | made_with()


def made_with() -> dict[str, Attribute]:
    """The part of `provenance` that belongs to no model: versions, platform, command and time."""
    versions: dict[str, Attribute] = {name: _version(name) for name in ("headwater", "torch", "transformers")}
    return versions | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": _command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commands_in(made: str) -> list[str]:
    """The commands of a result that was made in parts, which "; " joins."""
    return re.split("; (?=headwater )", made)


def replaced(files: Iterable[Path]) -> list[str]:
    """Which of these files hold results of other commands, which this one will replace: a line for each command."""
    made: dict[str, list[str]] = {}
    for file in files:
        if what_is(file) == "file":
            with suppress(Exception), h5py.File(file) as held:  # each defect raises its own, and loses nothing
                made.setdefault(held.attrs["command"], []).append(str(file))
    others = {f"`{command}`" if command else "Python": found for command, found in made.items() if command != _command}
    return [f"will replace {', '.join(found)}, made by {by}; another --out keeps both" for by, found in others.items()]


def attributes(values: Mapping[str, Any]) -> dict[str, Attribute]:
    """Attribute values as NetCDF keeps them: text, integers and floats as they are, anything else as JSON text.

    Lists become JSON too: NetCDF gives a list of one back as a scalar.
    """
    return {name: _attribute(value) for name, value in values.items()}


def dataset(
    variables: Mapping[str, tuple[Any, ...]],
    *,
    tokens: Int[Tensor, "prompt position"] | None = None,
    coords: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Make a result of arrays.

    Args:
        variables: by name, `(dimensions, array)` or `(dimensions, array, {"long_name": ..., "units": ...})`; tensors on
            any device are welcome, bfloat16 becomes float32.
        tokens: stored as `tokens`, so that the result can be repeated from its file alone.
        coords: by name, a sequence for a dimension of that name, or as in `variables`. `prompt` and `position` are
            numbered from 0 where they are not given.
        attrs: what made the result; see `provenance`.
    """
    made = {name: _variable(*variable) for name, variable in variables.items()}
    if tokens is not None:
        made["tokens"] = _variable(("prompt", "position"), tokens, {"long_name": "token id", "units": "1"})
    given = {
        name: _variable(*coord) if isinstance(coord, tuple) else _variable((name,), coord)
        for name, coord in (coords or {}).items()
    }
    sizes = {dim: size for dims, values, _ in made.values() for dim, size in zip(dims, values.shape, strict=True)}
    for name in ("prompt", "position"):
        if name in sizes:
            given.setdefault(name, ((name,), np.arange(sizes[name]), {}))
    return xr.Dataset(made, coords=given, attrs=attributes(attrs or {}))


def by_block(spec: Any, layers: Iterable[int] | None = None) -> dict[str, Any]:
    """Coordinates of results by block: their numbers and, where blocks differ in it, their positional encoding."""
    numbers = list(range(spec.blocks) if layers is None else layers)
    if len(set(spec.positional)) == 1:
        return {"layer": numbers}
    encodings = [spec.positional[layer] for layer in numbers]
    return {"layer": numbers, "positional": (("layer",), encodings, {"long_name": "positional encoding", "units": "1"})}


def save(ds: xr.Dataset, path: str | Path) -> None:
    """Write one NetCDF-4 file, floats compressed; an interruption or a full disk leaves what was there before.

    To a path that ends in .xz: NetCDF-3, all of it compressed, which takes less room where a result has many variables.

    Raises:
        InputError: the path cannot be written to.
    """
    # Through memory: on a full disk HDF5 itself raises once and then crashes the interpreter when it closes its file.
    content = to_bytes(ds) if Path(path).suffix != PACKED else _packed(ds)
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def _packed(ds: xr.Dataset) -> bytes:
    ds = ds.copy()
    ds.attrs = attributes(ds.attrs)
    return lzma.compress(bytes(ds.to_netcdf(engine="scipy", format="NETCDF3_64BIT")), filters=FILTERS)


def to_bytes(ds: xr.Dataset) -> bytes:
    """The content of a result's file."""
    ds = ds.drop_encoding()  # of the file that it was read from, before it was changed
    ds.attrs = attributes(ds.attrs)
    compress = {"zlib": True, "complevel": COMPRESSION}
    encoding = {name: compress for name, v in ds.variables.items() if v.dtype.kind == "f" and v.ndim > 0}
    return bytes(ds.to_netcdf(engine="h5netcdf", encoding=encoding))


def from_bytes(content: bytes) -> xr.Dataset:
    """The result that a file's content holds."""
    ds = xr.load_dataset(io.BytesIO(content), engine="h5netcdf" if content.startswith(SIGNATURE) else "scipy")
    ds.attrs = {name: value.item() if isinstance(value, np.generic) else value for name, value in ds.attrs.items()}
    return ds


def kept(pieces: Store, measure: Callable[[], xr.Dataset]) -> xr.Dataset:
    """A unit's result as it was measured and kept before, or as it is measured and kept now."""
    content = pieces.once(lambda: {RESULT: np.frombuffer(to_bytes(measure()), dtype=np.uint8)})
    return from_bytes(content[RESULT].tobytes())


def opened(result: Result) -> xr.Dataset:
    """The result itself, or that of a file."""
    if isinstance(result, (str, os.PathLike)):
        return load(os.fspath(result))
    if not isinstance(result, xr.Dataset):
        raise InputError(
            f"cannot read a {type(result).__name__} as a result; give one of headwater's, or its file's path"
        )
    return result


def stored(path: str | Path) -> Path:
    """Where the result of that name is: the path itself, else the compressed file beside it, if that is there."""
    path = Path(path)
    packed = path.with_name(path.name + PACKED)
    return packed if what_is(path) == "nothing" and what_is(packed) == "file" else path


def load(path: str | Path) -> xr.Dataset:
    """Read a result, or what NAME.nc.xz keeps of it; everything is in memory and the file is closed.

    Raises:
        InputError: there is no such file, it is damaged, or it is not a result of this package.
    """
    path = stored(path)
    found = what_is(path)
    if found != "file":
        missing = {"neither": "is a pipe or a device", "folder": "is a folder"}.get(found, "does not exist")
        raise InputError(f"result '{path}' {missing}; give a NetCDF file that headwater wrote")
    try:
        content = path.read_bytes()
        content = lzma.decompress(content) if path.suffix == PACKED else content
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise InputError(f"result '{path}' cannot be read ({reason(error)}); make it again") from None
    if not content.startswith((SIGNATURE, b"CDF")):
        raise InputError(f"result '{path}' cannot be read: it is no NetCDF file; give one that headwater wrote")
    try:
        ours = content.startswith(b"CDF")
        if not ours:
            with h5py.File(io.BytesIO(content)) as file:  # first: h5netcdf leaves noise behind when it fails halfway
                ours = "headwater" in dict(file.attrs)
        with warnings.catch_warnings():
            warnings.simplefilter("error", xr.SerializationWarning)  # values that contradict each other
            ds = from_bytes(content) if ours else xr.Dataset()
    except Exception as error:  # each reader raises its own
        raise InputError(f"result '{path}' cannot be read ({reason(error)}); make it again") from None
    if "headwater" not in ds.attrs:
        raise InputError(f"'{path}' was not written by headwater (no such attribute); give a result of this package")
    return ds


def combine(datasets: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join results of one model that differ in condition and seed.

    Each dataset says which it is by its attributes `condition` and `seed` (an integer; ignored for "pretrained", which
    has none). In the result every variable but `tokens` has the dimensions [condition, seed] in front of its own. `seed`
    holds the seeds of all fresh models in rising order; pretrained weights stand at seed index 0. Where a condition lacks
    a seed there is NaN; integers become floats.

    Attributes that agree stay attributes; those that differ between runs (`weights` always, `options`, ...) become text
    coordinates [condition, seed], empty where there is no run. `created` stays an attribute, the time of the last run: it is
    no part of what was measured, which is what `equals` compares.

    Raises:
        InputError: nothing to combine; no condition or seed; a run given twice; other tokens, another config, or
            variables or coordinates that do not match.
    """
    if not datasets:
        raise InputError("no results to combine; give at least one")
    first, runs = datasets[0], [_run(ds) for ds in datasets]
    for (condition, seed), ds in zip(runs, datasets, strict=True):
        said = f"condition '{condition}'" if seed is None else f"condition '{condition}', seed {seed}"
        if runs.count((condition, seed)) > 1:
            raise InputError(f"two results of {said}; give each condition and seed once")
        for what, held in _held(ds).items():
            if held != _held(first)[what]:
                raise InputError(f"{said} has other {what} than the first result; combine results of one call")
    seeds = sorted({seed for _, seed in runs if seed is not None}) or [0]
    names = dict.fromkeys(name for ds in datasets for name in ds.attrs if name not in ("condition", "seed", "created"))
    by_run = {name: [ds.attrs.get(name, "") for ds in datasets] for name in names}
    differing = [name for name, values in by_run.items() if name == "weights" or len(set(map(repr, values))) > 1]
    placed = []
    for (condition, seed), ds in zip(runs, datasets, strict=True):
        place = {"condition": [condition], "seed": [seeds[0] if seed is None else seed]}
        texts = {name: (("condition", "seed"), [[str(ds.attrs.get(name, ""))]]) for name in differing}
        placed.append(ds.drop_vars("tokens").expand_dims(place).assign_coords(texts))
    joined = xr.merge(placed, join="outer", compat="no_conflicts", combine_attrs="override")
    known = {condition: n for n, condition in enumerate(CONDITIONS)}
    conditions = sorted({condition for condition, _ in runs}, key=lambda one: (known.get(one, len(known)), one))
    joined = joined.sel(condition=conditions, seed=seeds).assign_coords(condition=conditions)
    joined = joined.assign_coords({name: joined[name].fillna("").astype(str) for name in differing})
    joined = joined.assign(tokens=first["tokens"])
    times = [str(ds.attrs["created"]) for ds in datasets if "created" in ds.attrs]  # ISO 8601: as text, as in time
    joined.attrs = {name: values[0] for name, values in by_run.items() if name not in differing}
    return joined.assign_attrs({"created": max(times)} if times else {})


def _held(ds: xr.Dataset) -> dict[str, Any]:
    """What results that are combined have in common."""
    return {
        "tokens": ds["tokens"].values.tolist() if "tokens" in ds else None,
        "config": ds.attrs.get("config"),
        "variables": {name: (values.dims, values.shape) for name, values in ds.variables.items()},
        "coordinates": {name: values.values.tolist() for name, values in ds.coords.items()},
    }


def check_prompts(ds: xr.Dataset, what: str = "the result") -> None:
    """Refuse a result of texts of different lengths where one is read whose numbers are means over prompts."""
    if "text" in ds.dims:
        raise InputError(
            f"{what} is of texts that were measured alone (attention_mask, --whole), with no mean over prompts; read its "
            "numbers in Python, or measure prompts of one length"
        )


def quickly(results: Iterable[xr.Dataset]) -> list[str]:
    """Words for results of quick reports (`headwater report --quick`), where any of these is one; else nothing."""
    return ["QUICK measurement"] if any(ds.attrs.get(QUICK) for ds in results) else []


def recorded(ds: xr.Dataset, name: str) -> list[str]:
    """The values of an attribute, which is a coordinate of the runs where they differ (`results.combine`)."""
    if name in ds.attrs:
        return [str(ds.attrs[name])]
    return [value for value in dict.fromkeys(map(str, ds[name].values.flat)) if value] if name in ds.coords else []


def options_of(ds: xr.Dataset) -> dict[str, Any]:
    """The options that a result was made with; of combined runs the first one's, {} where it says nothing."""
    return json.loads(next(iter(recorded(ds, "options")), "{}"))


def number_types(ds: xr.Dataset) -> list[str]:
    """The dtypes a result was computed in and, for a GGUF file, what its quantized tensors were stored as."""
    drawn = all(condition.startswith("init") for condition in recorded(ds, "condition") or [""])
    files = [json.loads(text)["types"] for text in recorded(ds, "weights_file") if text and not drawn]
    named = dict.fromkeys(" + ".join(kind for kind in types if kind[0] not in "FB") for types in files)
    stored = " / ".join(filter(None, named))
    return [f"{dtype} dequantized from {stored}" if stored else dtype for dtype in recorded(ds, "dtype")]


def by_name(results: xr.Dataset | Mapping[str, xr.Dataset]) -> dict[str, xr.Dataset]:
    """Results by their model's name, the last part of its hub id or path."""
    if not isinstance(results, xr.Dataset):
        return dict(results)
    name = str(results.attrs.get("model", "model"))
    return {Path(name).name or name: results}


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _attribute(value: Any) -> Attribute:
    value = value.item() if isinstance(value, np.generic) else str(value) if isinstance(value, Path) else value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _text(value: str) -> str:
    r"""Text as files can keep it: UTF-8 without zeros; other bytes, which paths and prompts may hold, as \xNN."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def _plain(value: Any) -> Any:
    """What JSON has no form for: arrays and tensors as lists, the rest as text."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic, Tensor)) else str(value)


def _variable(dims: Sequence[str], values: Any, attrs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    values = np.asarray(values)
    if values.dtype.kind == "U":
        values = np.array([_text(value) for value in values.flat], dtype=str).reshape(values.shape)
    return tuple(dims), values, attributes(attrs or {})


def _run(ds: xr.Dataset) -> tuple[str, int | None]:
    condition, seed = ds.attrs.get("condition"), ds.attrs.get("seed")
    if not isinstance(condition, str):
        raise InputError("a result has no attribute 'condition'; combine results that headwater made")
    if condition == "pretrained":
        return condition, None
    if not isinstance(seed, (int, np.integer)):
        raise InputError(
            f"a result of condition '{condition}' has seed {seed!r}; set its attribute 'seed' to an integer"
        )
    return condition, int(seed)


def tokens_hash(tokens: Int[Tensor, "prompt position"]) -> str:
    """SHA-256 (hex) over the shape and the ids as little-endian int64: the same on every device and machine."""
    values = tokens.detach().cpu().numpy().astype("<i8")
    return hashlib.sha256(json.dumps(list(values.shape)).encode() + values.tobytes()).hexdigest()


def drawn_from(results: Mapping[str, xr.Dataset]) -> str:
    """What the fresh weights in these results, and theory from the config alone, were drawn from; "" where none says."""
    found = [value for ds in results.values() for value in recorded(ds, "initialization")]
    found += [str(variable.attrs.get("initialization", "")) for ds in results.values() for variable in ds.values()]
    return " / ".join(dict.fromkeys(filter(None, found)))


class Variable(NamedTuple):
    """A variable's dimensions, its name in words (none where it is empty) and its unit."""

    dims: tuple[str, ...]
    long_name: str
    units: str = "1"

    def of(self, values: Any) -> tuple[Any, ...]:
        """As `dataset` takes it."""
        named = {"long_name": self.long_name} if self.long_name else {}
        return self.dims, values, named | {"units": self.units}


def labelled(table: Mapping[str, Variable], values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The table's variables that have values, in the table's order, as `dataset` takes them."""
    return {name: variable.of(values[name]) for name, variable in table.items() if name in values}


def with_low_high(name: str, variable: Variable, interval: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    """An estimate, and the low and high ends of its interval as `NAME_low` and `NAME_high`."""
    return {f"{name}{end}": variable.of(values) for end, values in zip(("", "_low", "_high"), interval, strict=True)}


def with_ends(name: str, variable: Variable, resamples: Float[ndarray, "resample ..."]) -> dict[str, tuple[Any, ...]]:
    """`with_low_high` of the estimate and its resamples; the estimate alone where there are none."""
    if len(resamples) == 1:
        return {name: variable.of(resamples[0])}
    return with_low_high(name, variable, (resamples[0], *ends(resamples)))
