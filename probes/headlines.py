"""A result's headlines as numbers with intervals: what every reader of results shows.

An interval is the result's own where the headline brings one, else jackknifed over documents (bootstrapped for a number that
jumps, `probes.results.statistics`), else there is none.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import xarray as xr

from .errors import plural
from .measure import Headline, Measure
from .results.curves import ESTIMATE
from .results.dataset import number_types, options_of, quickly, recorded
from .results.statistics import Interval, ends, freedom, jackknife, over_runs, resampling, units
from .results.tables import Report, Table, interval, write_report

DRAWS = 1000  # resamples of a number that jumps
TEXT = "text_name"  # attribute of the result of one text among several that are measured alone: its name

Mean: TypeAlias = Callable[[np.ndarray], np.ndarray]


class Samples(NamedTuple):
    """A headline's values [prompt, ...] at one place, and what makes the number of any choice of prompts."""

    values: np.ndarray
    mean: Callable[[np.ndarray], float]


class Number(NamedTuple):
    """A headline at one of its places."""

    name: str
    where: str  # "pretrained, band 9-31"; empty where there is one place
    interval: Interval
    headline: Headline
    samples: Samples | None  # where there are values by prompt

    @property
    def text(self) -> str:
        """With its interval, "0.3 [0.2, 0.4]"."""
        return interval(*self.interval[:3], form=self.headline.form)


def numbers(measure: Measure, ds: xr.Dataset) -> list[Number]:
    """All headlines of a result; those that it lacks are left out, as are places without a number."""
    found: list[Number] = []
    for headline in measure.headlines:
        values = array_of(headline, ds)
        if values is not None:
            by_prompt = values if headline.by_prompt is None else headline.by_prompt(ds)
            found += list(_numbers(headline, values, by_prompt, ds))
    return found


def array_of(headline: Headline, ds: xr.Dataset) -> xr.DataArray | None:
    """The headline's array; None where the result lacks what it reads."""
    try:
        return headline.of(ds)
    except KeyError:
        return None


def _numbers(headline: Headline, values: xr.DataArray, by_prompt: xr.DataArray, ds: xr.Dataset) -> Iterator[Number]:
    drawn = sampled(headline, by_prompt) if "prompt" in by_prompt.dims else None
    samples = {} if drawn is None else _by_place(*drawn)
    degrees = np.inf
    if "estimate" in values.dims:
        estimates = values.sel(estimate=list(ESTIMATE)).transpose("estimate", ...)
        whole, low, high = estimates.values
        names = places(estimates[0])
    elif drawn is not None and by_prompt is values:
        every, names, mean = drawn
        unit = units(ds)
        whole, low, high = spread_over(headline, every, mean, unit)
        degrees = np.inf if headline.jumps else freedom(unit)
    else:
        whole, names = np.asarray(values.values), places(values)
        low = high = np.full(whole.shape, np.nan)
    for where, value, start, stop in zip(names, np.ravel(whole), np.ravel(low), np.ravel(high), strict=True):
        if not np.isnan(value):
            interval_of = Interval(float(value), float(start), float(stop), degrees)
            yield Number(headline.name, where, interval_of, headline, samples.get(where))


def _by_place(values: np.ndarray, names: Sequence[str], mean: Mean) -> dict[str, Samples]:
    return {
        where: Samples(values, lambda some, at=at: float(np.ravel(mean(some))[at])) for at, where in enumerate(names)
    }


def spread_over(
    headline: Headline, samples: np.ndarray, mean: Mean, unit: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The number and the ends of its interval over units, of values [prompt, ...]."""
    if headline.jumps:
        drawn = resampling(len(samples), DRAWS, 0, documents=list(map(str, unit)))
        prompts = np.arange(len(samples))
        whole = np.stack([np.asarray(mean(samples[np.repeat(prompts, counts)])) for counts in drawn])
        low, high = ends(whole) if len(np.unique(unit)) > 1 else np.full((2, *whole.shape[1:]), np.nan)
        return np.asarray(whole[0]), low, high
    if not headline.ratio:
        return jackknife(mean, samples, unit)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = jackknife(lambda some: np.log(mean(some)), samples, unit)
    return np.asarray(mean(samples)), np.asarray(np.exp(logs[1])), np.asarray(np.exp(logs[2]))


def sampled(headline: Headline, values: xr.DataArray) -> tuple[np.ndarray, list[str], Mean]:
    """Values [prompt, ...], the names of the headline's places, and what makes the number of any choice of prompts."""
    samples = values.transpose("prompt", ...)
    mean: Mean = headline.mean or partial(np.mean, axis=0)
    count = np.ndim(mean(samples.values[:1]))  # what follows the places is averaged over
    first = samples.isel({dim: 0 for dim in ("prompt", *samples.dims[1 + count :])}, drop=True)
    return samples.values.astype(np.float64), places(first), mean


def places(values: xr.DataArray) -> list[str]:
    """A name of each element in words, by its coordinates, in the array's order."""
    shape = values.shape
    names = [[] for _ in range(int(np.prod(shape)))]
    for axis, dim in enumerate(values.dims):
        labels = values[dim].values
        said = [str(label) if labels.dtype.kind in "UO" else f"{dim} {label}" for label in labels]
        for n, at in enumerate(np.ndindex(*shape)):
            names[n].append(said[at[axis]])
    return [", ".join(parts) for parts in names]


def texts_of(results: Mapping[str, xr.Dataset]) -> dict[str, dict[str, xr.Dataset]]:
    """Results of whole texts, which are measured alone, by model and text; empty where these are of prompts together."""
    found: dict[str, dict[str, xr.Dataset]] = {}
    for name, ds in results.items():
        if TEXT in ds.attrs:
            found.setdefault(name.removesuffix(f", {ds.attrs[TEXT]}"), {})[ds.attrs[TEXT]] = ds
    return found


def over_texts(measure: Measure, texts: Collection[xr.Dataset]) -> list[Number]:
    """Every number's mean over the texts that have it, with Student's t; each text counts once, whatever its length.

    A number that a single one of several texts has, such as that of its last positions, is left out.
    """
    by_place: dict[tuple[str, str], list[Number]] = {}
    for one in (one for ds in texts for one in numbers(measure, ds)):
        if one.interval.value > 0 or not one.headline.ratio:
            by_place.setdefault((one.name, one.where), []).append(one)
    found = []
    for (name, where), some in by_place.items():
        if len(some) == 1 < len(texts):
            continue
        if len(some) < len(texts):
            where = f"{where} ({len(some)} of {len(texts)} texts)".lstrip()
        headline, values = some[0].headline, np.array([one.interval.value for one in some])
        mean = over_runs(np.log(values) if headline.ratio else values)
        back = math.exp if headline.ratio else float
        interval_of = mean._replace(value=back(mean.value), low=back(mean.low), high=back(mean.high))
        found.append(Number(name, where, interval_of, headline, None))
    return found


def headlines(measure: Measure, results: Mapping[str, xr.Dataset], most: int | None = None) -> Table:
    """A row for each number, `most` of them at most (a last row counts what is left out), a column for each model."""
    found = {name: over_texts(measure, texts.values()) for name, texts in texts_of(results).items()}
    found = found or {name: numbers(measure, ds) for name, ds in results.items()}
    by_model = {name: {(n.name, n.where): n.text for n in every} for name, every in found.items()}
    rows = dict.fromkeys(key for found in by_model.values() for key in found)
    cells: Sequence[list[str]] = [
        [name, where, *(found.get((name, where), "-") for found in by_model.values())] for name, where in rows
    ]
    keep = [0, *([1] if any(row[1] for row in cells) else []), *range(2, 2 + len(by_model))]
    columns = ("number", "of", *by_model)
    if most is not None and (left := len(cells) - most) > 1:
        cells = [*cells[:most], [f"... {left} more in {measure.name}.md", *[""] * (len(columns) - 1)]]
    return Table("Headlines", tuple(columns[n] for n in keep), [[row[n] for n in keep] for row in cells])


SHOWN = 12  # rows of headlines in the terminal
FEW = 4  # documents, below which the terminal says why intervals are wide
WIDE = "intervals over {} are wide; more {} make them narrower"


def described(measure: Measure, results: Mapping[str, xr.Dataset]) -> str:
    """What results rest on, in one line: prompts, their length, text, number types and the options."""
    every = list(results.values())
    # Places of a map have lengths of their own, and so have whole texts.
    alike = [ds for ds in every if "length" not in ds.coords and TEXT not in ds.attrs]
    sizes = {name: dict.fromkeys(ds.sizes[dim] for ds in alike if dim in ds.sizes) for dim, name in DIMS.items()}
    parts = [*quickly(every), *(" / ".join(map(str, n)) + name[[*n] == [1]] for name, n in sizes.items() if n)]
    for name in ("text_source", "backend", "device"):
        parts += [" / ".join(dict.fromkeys(value for ds in every for value in recorded(ds, name)))]
    parts.append(" / ".join(dict.fromkeys(kind for ds in every for kind in number_types(ds))))
    options = {name: value for name, value in options_of(every[0]).items() if name != "measurement"}
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in options.items() if value is not None]
    return ", ".join(filter(None, parts))


def read(results: Mapping[str, xr.Dataset], shown: Table) -> list[str]:
    """Which texts were read, a line each: how many prompts of how many tokens, of what.

    And why the intervals that are shown are wide, where they rest on few documents.
    """
    lines, wide = dict[str, list[str]](), dict[str, None]()
    first = 2 if "of" in shown.columns[:2] else 1
    intervals = any("[" in cell or cell == "?" for row in shown.rows for cell in row[first:])
    for model, texts in texts_of(results).items():
        sizes = sorted({ds.sizes["position"] for ds in texts.values()})
        of = " / ".join(recorded(next(iter(texts.values())), "text_source"))
        long = " to ".join(map(str, sizes[:: max(1, len(sizes) - 1)]))
        lines.setdefault(f"read {plural(len(texts), 'whole text')} of {long} tokens, from {of}", []).append(model)
        if intervals and 1 < len(texts) < FEW:
            wide[WIDE.format(plural(len(texts), "text"), "texts")] = None
    for model, ds in results.items():
        if TEXT in ds.attrs or "tokens" not in ds or not (source := recorded(ds, "text_source")):
            continue
        count, length = ds["tokens"].shape
        documents = len(np.unique(ds["document"])) if "document" in ds.coords else 0
        of = f"{plural(documents, 'document')} of " * bool(documents) + " / ".join(source)
        wrote = f", the last {answer} written by the model" if (answer := options_of(ds).get("answer")) else ""
        said = f"read {plural(count, 'prompt')} of {length} tokens{wrote}, from {of}"
        lines.setdefault(said, []).append(model)
        independent = len(np.unique(units(ds))) if "prompt" in ds.sizes else FEW
        if intervals and 1 < independent < FEW:
            over = plural(independent, "prompt" if independent > documents else "document")
            wide[WIDE.format(over, "--prompts")] = None
    return [*(f"{said} ({', '.join(models)})" if len(lines) > 1 else said for said, models in lines.items()), *wide]


# What a result's sizes count: of several, of one.
DIMS = {"prompt": (" prompts", " prompt"), "position": (" tokens each",) * 2, "context": (" lists", " list")}


def tables(measure: Measure, results: Mapping[str, xr.Dataset]) -> Report:
    """Everything there is to tell of results."""
    left = [
        f"{name}: {ds.attrs['unmeasured_layers']}." for name, ds in results.items() if "unmeasured_layers" in ds.attrs
    ]
    if texts_of(results):
        rows = [
            [name, str(ds.sizes["position"]), one.name, one.where, one.text]
            for name, ds in results.items()
            for one in numbers(measure, ds)
        ]
        every = Table("Every text alone", ("text", "tokens", "number", "of", "value"), rows)
        means = replace(headlines(measure, results), title="Means over texts, each counting once")
        said = [*read(results, means), *left]
        return Report(measure.question, described(measure, results), [means, every], said)
    found = [headlines(measure, results), *measure.tables(results)]
    return Report(measure.question, described(measure, results), found, [*measure.answer(results), *left])


def write_tables(measure: Measure, results: Mapping[str, xr.Dataset], path: Path) -> None:
    """NAME.md: the answers, the headlines, the full tables, under the command that made them."""
    write_report(tables(measure, results), path)
