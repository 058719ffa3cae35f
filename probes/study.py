"""The study behind `headwater jacobian`: models x conditions x seeds, kept run by run, so that it can be interrupted.

Every finished run is a file in the folder `unfinished` of the output; the same study started again reads what is there and
goes on. At the end the runs of a model become one result, and the folder is removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from torch import Tensor

from .errors import InputError
from .files import require_writable
from .jacobian import Method, Readout, jacobian
from .models.load import DType, load
from .models.view import View
from .plots import jacobian_figure
from .prompts import FirstToken, describe, prompts
from .results import combine, provenance, save
from .results import load as load_result
from .summary import SHORTEST, UShape, band, profiles, spearman, ushape

Condition = Literal["init", "pretrained"]
Advance = Callable[[str, float, float], None]  # (what is running, products done, products in all)


@dataclass(frozen=True)
class Settings:
    """What is measured on every model; the fields are the options of `headwater jacobian`."""

    conditions: tuple[Condition, ...] = ("init", "pretrained")
    no_rope: bool = False
    seeds: int = 3
    prompts: int = 16
    length: int = 256
    method: Method = "sketch"
    products: int | Literal["auto"] | None = None
    relative_error: float = 0.02
    readout: Readout = "residual"
    query: int = -1
    from_layer: int = 0
    text: str | None = None
    dataset: str | None = None
    split: str = "train"
    column: str = "text"
    first: FirstToken | int = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for condition in self.conditions:
            if condition not in ("init", "pretrained"):
                raise InputError(f"condition '{condition}' does not exist; use init and pretrained")
        if not self.conditions or len(set(self.conditions)) < len(self.conditions):
            raise InputError(f"conditions '{','.join(self.conditions)}' name none or one twice; as in init,pretrained")
        if self.length < SHORTEST:
            raise InputError(f"length={self.length} leaves no middle to compare with; give at least {SHORTEST}")
        at = self.query + self.length if self.query < 0 else self.query
        if 0 <= at < SHORTEST - 1:
            raise InputError(f"query={self.query} leaves no middle to compare with; give at least {SHORTEST - 1}")
        if self.seeds < 1:
            raise InputError(f"seeds={self.seeds} leaves no fresh model; give at least 1")
        if self.no_rope and "init" not in self.conditions:
            raise InputError("--no-rope repeats the init condition, which is not among the conditions; add init")

    def source(self) -> dict[str, Any]:
        """Where prompts come from, as `prompts` and `describe` take it."""
        return {name: getattr(self, name) for name in ("text", "dataset", "split", "column", "first", "seed")}

    def runs(self) -> list[tuple[str, int | None]]:
        """(condition, seed of the fresh weights) in the order they are measured."""
        fresh: list[tuple[str, int | None]] = (
            [("init", seed) for seed in range(self.seeds)] if "init" in self.conditions else []
        )
        without: list[tuple[str, int | None]] = (
            [("init-nope", seed) for seed in range(self.seeds)] if self.no_rope else []
        )
        trained: list[tuple[str, int | None]] = [("pretrained", None)] if "pretrained" in self.conditions else []
        return trained + fresh + without


@dataclass(frozen=True)
class Row:
    """One line of the summary: a condition of a model."""

    model: str
    condition: str
    seeds: int
    shape: UShape  # of the mean profile; geometric mean over seeds
    error: float  # relative standard error of the mean profile, rms over positions (first seed)


def study(
    sources: Sequence[str],
    out: str | Path,
    settings: Settings = Settings(),
    *,
    backend: Literal["transformers", "transformer_lens"] = "transformers",
    device: str = "auto",
    dtype: DType = "auto",
    advance: Advance | None = None,
) -> dict[str, xr.Dataset]:
    """Measure every model under every condition, write results and the figure, return the results by model name.

    Writes `jacobian.nc` for one model or `jacobian-NAME.nc` for each of several, `jacobian.png` and
    `jacobian.svg`; all of it at the end.

    Raises:
        InputError: bad input, or an unfinished study with other settings in `out` (the message says which).
    """
    out = Path(out)
    require_writable(out)
    if not sources:
        raise InputError("no model given; name one, as tiny-llama")
    # Everything that can be refused is, before the first product. Of several models only prompts are kept meanwhile:
    # two large ones need not fit into memory together.
    checked: list[tuple[View | None, str, Tensor]] = []
    for source in sources:
        model, name, tokens = _prepare(source, settings, backend, device, dtype)
        checked.append((model if len(sources) == 1 else None, name, tokens))
    named: dict[str, str] = {}
    for source, (_, name, _) in zip(sources, checked, strict=True):
        other = named.setdefault(_slug(name), source)
        if other is not source:
            raise InputError(
                f"'{other}' and '{source}' are both called '{name}'; give each model once, or rename a folder"
            )
    results: dict[str, xr.Dataset] = {}
    unfinished = out / "unfinished"
    for source, (kept, name, tokens) in zip(sources, checked, strict=True):
        model = load(source, backend, device=device, dtype=dtype) if kept is None else kept
        runs = [_run(model, name, tokens, run, settings, unfinished, advance) for run in settings.runs()]
        results[name] = combine(runs)
    for result, file in zip(results.values(), result_files(results, out), strict=True):
        save(result, file)
    jacobian_figure(results, path=out / "jacobian.png")
    for file in unfinished.glob("*.nc"):
        file.unlink()
    with suppress(OSError):  # somebody else's file is in it
        unfinished.rmdir()
    return results


def result_files(results: Mapping[str, xr.Dataset], out: Path) -> list[Path]:
    """Where `study` writes the results of these models, in their order."""
    if len(results) == 1:
        return [out / "jacobian.nc"]
    return [out / f"jacobian-{_slug(name)}.nc" for name in results]


def _run(
    model: View,
    name: str,
    tokens: Any,
    run: tuple[str, int | None],
    settings: Settings,
    folder: Path,
    advance: Advance | None,
) -> xr.Dataset:
    condition, seed = run
    measured = model if seed is None else model.reinitialized(seed, positional=condition != "init-nope")
    label = f"{name} {condition}" + ("" if seed is None else f" {seed}")
    file = folder / f"{_slug(label)}.nc"
    key = _key(measured, tokens, settings)
    if file.exists():
        before = load_result(file)
        _check_same(json.loads(str(before.attrs.pop("study"))), key, folder.parent)
        if advance is not None:
            advance(label, 1.0, 1.0)
        return before
    result = jacobian(
        measured,
        tokens,
        method=settings.method,
        products=settings.products,
        relative_error=settings.relative_error,
        readout=settings.readout,
        query=settings.query,
        from_layer=settings.from_layer,
        seed=settings.seed,
        progress=None if advance is None else lambda done, total: advance(label, done, total),
    )
    result.attrs |= describe(model, **settings.source())
    if seed is not None:
        result.attrs["seed"] = seed
    save(result.assign_attrs(study=json.dumps(key)), file)
    return result


# Options that decide the prompts. Their hash says whether these are the same; the options only say why not.
CHOOSING = ("prompts", "length", "text", "dataset", "split", "column", "first")
MEASURING = ("method", "products", "relative_error", "readout", "query", "from_layer", "seed")


def _key(model: View, tokens: Any, settings: Settings) -> dict[str, Any]:
    """What an unfinished run must share with the study that goes on with it."""
    made = provenance(model, tokens)
    kept = {name: made[name] for name in ("weights", "backend", "dtype", "tokens_sha256")}
    options = asdict(settings)
    return kept | {name: options[name] for name in (*MEASURING, *CHOOSING)}


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    changed = [name for name in now if before.get(name) != now[name]]
    if "tokens_sha256" not in changed:
        changed = [name for name in changed if name not in CHOOSING]
    elif {*changed}.intersection({"seed", *CHOOSING}):
        changed.remove("tokens_sha256")
    if changed:
        raise InputError(
            f"'{out}' holds an unfinished study with other {', '.join(changed)}; "
            f"give the same settings to go on with it, delete '{out / 'unfinished'}', or give another folder"
        )


def _prepare(source: str, settings: Settings, backend: Any, device: str, dtype: DType) -> tuple[View, str, Tensor]:
    """(the model, its name in results, its prompts)."""
    model = load(source, backend, device=device, dtype=dtype)
    name, revision = model.identity.name, model.identity.revision
    tokens = prompts(model, n=settings.prompts, length=settings.length, **settings.source())
    if settings.from_layer >= model.spec.blocks:  # another model may have it, and would be measured first
        raise InputError(
            f"from_layer {settings.from_layer} does not exist in {name}; it has blocks 0 to {model.spec.blocks - 1}"
        )
    given = "@" in source and revision is not None  # a hub id has the commit as its revision, which names no curve
    return model, f"{name}@{source.rpartition('@')[2]}" if given else name, tokens


def _slug(name: str) -> str:
    """A file name for a model's name, which may be a path or a hub id."""
    return "".join(c if c.isalnum() or c in "-_.@" else "-" for c in name).strip("-.")


def summarize(results: Mapping[str, xr.Dataset]) -> list[Row]:
    """The U-shape of every model's conditions, from results, over the positions up to the query."""
    rows = []
    for name, result in results.items():
        end = json.loads(str(result.attrs["options"]))["query"] + 1
        for condition, runs in profiles(result).items():
            curve = band([run.mean[:end] for run in runs]).centre
            seen = runs[0].mean > 0
            error = float(np.sqrt(np.mean((runs[0].stderr[seen] / runs[0].mean[seen]) ** 2)))
            rows.append(Row(name, condition, len(runs), ushape(curve), error))
    return rows


def rope_correlations(results: Mapping[str, xr.Dataset]) -> dict[str, float]:
    """Spearman's correlation of the fresh models' profiles with and without positional encoding, where both were run."""
    found = {}
    for name, result in results.items():
        runs = profiles(result)
        if "init-nope" in runs and "init" in runs:
            found[name] = spearman(*(band([run.mean for run in runs[c]]).centre for c in ("init", "init-nope")))
    return found


def cells(row: Row) -> Iterator[str]:
    """A summary row as text: model, condition, seeds, primacy, recency, trough, error."""
    yield from (row.model, row.condition, str(row.seeds))
    for value in (row.shape.primacy, row.shape.recency):
        yield "no middle" if not np.isfinite(value) else f"{value:.3g}"
    yield f"{row.shape.trough} ({row.shape.trough_fraction:.2f})"
    yield "-" if np.isnan(row.error) else f"{row.error:.2%}"


COLUMNS = ("model", "condition", "seeds", "primacy", "recency", "trough", "error")
