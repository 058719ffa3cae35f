"""The study behind `headwater selftest`: every probe on a device against the CPU, in one run.

Both sides measure the same bundled models on the same prompts in float32. Whatever is random is drawn on the CPU from seeds,
so that results differ by rounding alone. They are compared variable by variable, entry by entry:

- Smooth numbers by the largest difference over the largest value of the variable on the CPU, up to `SMOOTH`. Float32 rounds
  at 6e-8, and sums and differences of near numbers multiply that. Between float32 and float64 on the CPU the 855 variables
  of all cases differ by 4e-7 in the median and by 7e-5 at most; other orders of summation have room for fourteen times that.
  With one matrix of one block 1 % off (queries, values, outputs, feed-forward, norm; blocks 0, 3 and 5), the worst variable
  of `sinks` was 7 to 38 times beyond what is allowed, and most other probes that read the block were beyond it, too.
- A variable below `SMALL` everywhere, such as a small change of the loss, comes from larger numbers, whose rounding may be
  of its own size: the difference is taken over `SMALL`.
- Numbers that a comparison decides (`DECIDED`: counts, shares above a threshold, ranks, choices), integers and words by the
  share of entries that differ, up to `FEW` or one entry: what is nearly at a threshold falls on either side. Entries that
  are not finite on one side alone count in the same way. Means of such shares over all heads (`MEANS`) are smooth numbers:
  they round, and one decision among thousands hardly moves them.
- Medians read off a histogram (`BINNED`) may move by a bin.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ..data.prompts import prompts
from ..errors import reason
from ..measure import measure, questions
from ..measures.bos_swap import bos_swap
from ..measures.inspect import inspect
from ..measures.leakage import leakage
from ..measures.sinks import sinks
from ..models.load import load
from ..models.view import View
from ..results.dataset import made_with
from ..results.tables import Report, Table, number
from ..run.hardware import devices, hardware, named
from ..run.progress import Advance

Measurement: TypeAlias = Callable[[], xr.Dataset]

PROMPTS, LENGTH = 8, 64
SMOOTH, FEW, SMALL = 1e-3, 0.02, 1e-2
TOLD = 6  # variables of a probe that are named
DECIDED = ("sink_rate", "over_tau", "massive", "exact", "rank", "strength")  # parts of names
MEANS = "_of_model"  # how their names end
BINNED = {"median_magnitude": 4e-3, "top_ratio": 4e-3}  # two bins, each up to 0.2 % wide

SKETCH: dict[str, Any] = {"method": "sketch", "products": 32}
RESAMPLED = {"bootstrap": 50}
TEXT = "def area(width, height):\n    return width * height\n"
MEASURES: dict[str, Callable[[View, Tensor], xr.Dataset]] = {
    "sinks": partial(
        sinks, keys="all", reacts="mean", effect="all", effect_prompts=2, pictures=2, evict=(0, 1), keep=(16,)
    ),
    "leakage": partial(leakage, **RESAMPLED),
    "bos-swap, mean@1:keys": partial(
        bos_swap, replacement="mean@1:keys", profile_prompts=1, products=32, recall=2, **RESAMPLED
    ),
    "bos-swap, held-log-z": partial(bos_swap, replacement="held-log-z", profile_prompts=0, **RESAMPLED),
    "inspect": lambda model, tokens: inspect(model, TEXT, seeds=1, products=32),
}
MEASURES |= {trial: call for name in questions() for trial, call in measure(name).trials.items()}
# Attention behind a window takes another path: of that model, what reads attention.
MODELS = {
    "tiny-llama": tuple(MEASURES),
    "tiny-mistral-window": ("jacobian, sketch", "theory", "sinks", "leakage", "bos-swap, mean@1:keys"),
}


@dataclass(frozen=True)
class Difference:
    """How far apart two results are in one variable: over its largest value or, `decided`, in a share of its entries."""

    variable: str
    size: float
    allowed: float
    decided: bool = False

    @property
    def excess(self) -> float:
        """Above 1 it is more than is allowed."""
        return self.size / self.allowed

    def said(self, size: float) -> str:
        """`size` or `allowed` as text."""
        return f"{100 * size:.2g} % of entries" if self.decided else f"{size:.1e}"


@dataclass(frozen=True)
class Row:
    """One case on both devices: its variables, seconds on either, and the error of the side that failed."""

    case: str
    found: tuple[Difference, ...] = ()  # the worst first
    seconds: tuple[float, float] = (math.nan, math.nan)
    failed: str = ""

    @property
    def beyond(self) -> list[Difference]:
        """What is more than is allowed, the worst first; NaN is."""
        return [one for one in self.found if not one.excess <= 1]

    @property
    def verdict(self) -> str:
        """In a word."""
        return "failed" if self.failed else "differs" if self.beyond else "ok"


def differences(here: xr.Dataset, there: xr.Dataset) -> Iterator[Difference]:
    """Of every variable and coordinate of a result, how far another result of the same call is from it.

    A variable that only one of them has, or has in another shape, is infinitely far away.
    """
    for name in map(str, {**here.variables, **there.variables}):
        a, b = (np.asarray(ds.variables[name].values if name in ds.variables else np.nan) for ds in (here, there))
        if a.shape != b.shape or (name in here.variables) != (name in there.variables):
            yield Difference(name, math.inf, SMOOTH)
            continue
        if not a.size:
            continue
        same = a == b
        if a.dtype.kind == "f":
            known = np.isfinite(a) & np.isfinite(b)
            same |= np.isnan(a) & np.isnan(b)
            if name.endswith(MEANS) or not any(part in name for part in DECIDED):
                a, b = a[known].astype(np.float64), b[known].astype(np.float64)
                apart = np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), SMALL)
                yield Difference(name, float(apart), BINNED.get(name, SMOOTH))
                same |= known
        yield Difference(name, float((~same).mean()), max(FEW, 1 / same.size), decided=True)


def chosen(name: str) -> torch.device:
    """The device of that name; of "auto", the machine's accelerator, or the CPU where there is none.

    Raises:
        InputError: it is not there.
    """
    return named(devices()[0] if name == "auto" else name)


def cases(device: torch.device, more: Mapping[str, Callable[[torch.device], xr.Dataset]]) -> dict[str, Any]:
    """By name, what makes a measurement ready on a device: every measure on its models, and `more`."""

    @cache
    def loaded(name: str) -> tuple[View, Tensor]:
        model = load(name, device=str(device))
        return model, prompts(model, n=PROMPTS, length=LENGTH)

    def ready(name: str, measure: str) -> Measurement:
        return partial(MEASURES[measure], *loaded(name))

    found = {f"{name}: {one}": partial(ready, name, one) for name, measures in MODELS.items() for one in measures}
    return found | {name: partial(partial, measure, device) for name, measure in more.items()}


def selftest(
    device: torch.device,
    more: Mapping[str, Callable[[torch.device], xr.Dataset]] = MappingProxyType({}),
    advance: Advance | None = None,
) -> list[Row]:
    """Run every probe on the CPU, in one thread, and on a device; what a probe raises on either is its row's.

    Args:
        device: any that torch knows (`chosen`).
        more: further measurements by name, which take the device.
        advance: hears how many are done.
    """
    with one_thread():
        return _rows(device, more, advance)


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more threads, and beside other work wait for them: 25 times as long as alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rows(
    device: torch.device, more: Mapping[str, Callable[[torch.device], xr.Dataset]], advance: Advance | None
) -> list[Row]:
    rows, sides = [], {side: cases(on, more) for side, on in (("CPU", torch.device("cpu")), (str(device), device))}
    names = list(sides["CPU"])
    for n, name in enumerate(names):
        results, seconds = [], []
        for side, ready in sides.items():
            if advance is not None:
                advance("probes", n + 0.5 * len(results), len(names))
            try:
                measure = ready[name]()
                started = time.perf_counter()
                results.append(measure())
                seconds.append(time.perf_counter() - started)
            except Exception as error:  # whatever it is, it is what the test is for
                rows.append(Row(name, failed=f"{name} on {side}: {type(error).__name__}: {reason(error)}"))
                break
        else:
            found = sorted(differences(*results), key=lambda one: one.excess, reverse=True)
            rows.append(Row(name, tuple(found), (seconds[0], seconds[1])))
    if advance is not None:
        advance("probes", 1, 1)
    return rows


def selftest_report(rows: Sequence[Row], device: torch.device) -> Report:
    """Where it ran, the table, the variables that differ, the errors, and last which probes agree."""
    described = (
        f"Every probe on {device} against the CPU, in float32. Worst variable: the one that is furthest off for what is "
        "allowed. Difference: the largest one over the variable's largest value or, where a comparison decides numbers, the "
        "share of entries that differ. Ratio: time on the CPU over time on the device, whose first row has its start in it."
    )
    columns = ("probe", "worst variable", "difference", "allowed", "CPU, s", f"{device}, s", "ratio", "verdict")
    tables = [
        Table("Where it ran", ("what", "which"), [list(row) for row in _place(device).items()]),
        Table(f"{device} against the CPU", columns, [_cells(row) for row in rows]),
    ]
    return Report("Probes on a device and on the CPU", described, tables, _lines(rows, device))


def _lines(rows: Sequence[Row], device: torch.device) -> list[str]:
    found = []
    for row in rows:
        if row.beyond:
            worst = ", ".join(f"{one.variable} {one.said(one.size)}" for one in row.beyond[:TOLD])
            found.append(f"{row.case}: {len(row.beyond)} of {len(row.found)} comparisons differ: {worst}")
    found += [row.failed for row in rows if row.failed]
    if device.type == "cpu":
        found.append(
            "this compares the CPU with itself and shows only what differs from run to run; give another --device"
        )
    wrong = {word: [row.case for row in rows if row.verdict == word] for word in ("differs", "failed")}
    ended = [f"{word}: {', '.join(names)}" for word, names in wrong.items() if names]
    return [*found, "; ".join(ended) or f"all {len(rows)} agree"]


def _cells(row: Row) -> list[str]:
    here, there = row.seconds
    times = [number(seconds, ".2f") for seconds in (here, there, here / there)]
    worst = row.found[0] if row.found else None
    if worst is None or not worst.size:  # a failure, or the same bits
        return [row.case, "-", "-" if worst is None else "0", "-", *times, row.verdict]
    return [row.case, worst.variable, worst.said(worst.size), worst.said(worst.allowed), *times, row.verdict]


def _place(device: torch.device) -> dict[str, str]:
    """What a report of a bug needs to say of the machine."""
    made = {name: str(value) for name, value in made_with().items() if name not in ("command", "created")}
    with one_thread():
        here = hardware(torch.device("cpu"))
    backends: Any = torch.backends
    return made | {
        "device": f"{device}: {hardware(device)}",
        "CPU": here,
        "devices": ", ".join(devices()),
        "CUDA, cuDNN": f"{torch.version.cuda}, {backends.cudnn.version() if backends.cudnn.is_available() else None}",
        "fp32_precision, CUDA, CPU": f"{backends.cuda.matmul.fp32_precision}, {backends.mkldnn.matmul.fp32_precision}",
        "PYTORCH_ENABLE_MPS_FALLBACK": os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK", "not set"),
    }
