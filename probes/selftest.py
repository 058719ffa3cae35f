"""Every measure on a device against the CPU, in one run: what `headwater selftest` prints, and a report of a bug needs.

Both sides measure the same bundled models on the same prompts in float32. Whatever is random is drawn on the CPU from seeds,
so that results differ by rounding alone. They are compared variable by variable, entry by entry: which numbers how, and why
so, stands in `docs/probes/selftest.md`.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from .data.prompts import prompts
from .errors import reason
from .measure import measure, questions
from .models.load import load
from .models.view import View
from .results.dataset import made_with
from .results.tables import Report, Table, number
from .run.hardware import devices, hardware
from .run.progress import Advance

PROMPTS, LENGTH = 8, 64
SMOOTH, SPREAD, FEW, SMALL = 1e-3, 0.02, 0.02, 1e-2
ROUNDED = 1e-5  # of a share: what the means round that it is made with; a decision moves it by more
NAMED = 6  # variables of a case that are named
DECIDED = ("sink_rate", "over_tau", "massive", "exact", "rank", "strength")  # parts of names
MEANS = "_of_model"  # how their names end

TRIALS: dict[str, Callable[[View, Tensor], xr.Dataset]] = {
    trial: call for name in questions() for trial, call in measure(name).trials.items()
}
# Attention behind a window takes another path: of that model, what reads attention, each way once.
WINDOWED = ("jacobian, sketch", "theory", "sinks", "leakage")
MODELS = {"tiny-llama": tuple(TRIALS), "tiny-mistral-window": tuple(name for name in TRIALS if name in WINDOWED)}
COLUMNS = ("probe", "worst variable", "difference", "allowed", "CPU, s", "device, s", "ratio", "verdict")
ABOUT = (
    "Every measure on {device} against the CPU, in float32. Worst variable: the one furthest off for what is allowed. "
    "Difference: the largest one over the variable's largest value or, where a comparison decides numbers, the share of "
    "entries that differ. Ratio: time on the CPU over time on the device, whose first row has its start in it."
)


class Difference(NamedTuple):
    """How far apart two results are in one variable: over its largest value or, `decided`, in a share of its entries."""

    variable: str
    size: float
    allowed: float
    decided: bool = False

    def excess(self) -> float:
        """Above 1 it is more than is allowed."""
        return self.size / self.allowed

    def text(self, size: float) -> str:
        """`size` or `allowed` in words."""
        return f"{100 * size:.2g} % of entries" if self.decided else f"{size:.1e}"


class Row(NamedTuple):
    """One case on both devices: its line of the table, in a word how it ended, and what more there is to say."""

    cells: list[str]
    verdict: str
    line: str


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
                yield Difference(name, float(apart), SPREAD if "stderr" in name else SMOOTH)
                same |= known
            else:
                same |= np.isclose(a, b, ROUNDED, 0)
        yield Difference(name, float((~same).mean()), max(FEW, 1 / same.size), decided=True)


def compared(name: str, results: Sequence[xr.Dataset], seconds: Sequence[float]) -> Row:
    """The row of a case that was measured on both devices."""
    every = sorted(differences(*results), key=Difference.excess, reverse=True)
    beyond = [one for one in every if not one.excess() <= 1]  # NaN is beyond
    worst = every[0]
    cells = [worst.variable, worst.text(worst.size), worst.text(worst.allowed)] if worst.size else ["-", "0", "-"]
    times = [number(value, ".2f") for value in (*seconds, seconds[0] / seconds[1])]
    verdict = "differs" if beyond else "ok"
    named = ", ".join(f"{one.variable} {one.text(one.size)}" for one in beyond[:NAMED])
    line = f"{name}: {len(beyond)} of {len(every)} comparisons differ: {named}" if beyond else ""
    return Row([name, *cells, *times, verdict], verdict, line)


def cases(device: torch.device, more: Mapping[str, Callable[[torch.device], xr.Dataset]]) -> dict[str, Any]:
    """By name, what makes a measurement ready on a device: every trial on its models, and `more`."""

    @cache
    def loaded(name: str) -> tuple[View, Tensor]:
        model = load(name, device=str(device))
        return model, prompts(model, n=PROMPTS, length=LENGTH)

    def ready(name: str, trial: str) -> Callable[[], xr.Dataset]:
        return partial(TRIALS[trial], *loaded(name))

    trials = {f"{name}: {trial}": partial(ready, name, trial) for name, chosen in MODELS.items() for trial in chosen}
    return trials | {name: partial(partial, measurement, device) for name, measurement in more.items()}


def selftest(
    device: torch.device,
    more: Mapping[str, Callable[[torch.device], xr.Dataset]],
    advance: Advance = lambda label, done, total: None,
) -> list[Row]:
    """Run every trial, and `more`, on the CPU in one thread and on a device; what it raises on either is its row's."""
    rows, sides = [], {side: cases(on, more) for side, on in (("CPU", torch.device("cpu")), (str(device), device))}
    names = list(sides["CPU"])
    with one_thread():
        for n, name in enumerate(names):
            results, seconds = [], []
            for side, ready in sides.items():
                advance("probes", n + 0.5 * len(results), len(names))
                try:
                    measurement = ready[name]()
                    started = time.perf_counter()
                    results.append(measurement())
                    seconds.append(time.perf_counter() - started)
                except Exception as error:  # whatever it is, it is what the test is for
                    line = f"{name} on {side}: {type(error).__name__}: {reason(error)}"
                    rows.append(Row([name, *["-"] * 6, "failed"], "failed", line))
                    break
            else:
                rows.append(compared(name, results, seconds))
    advance("probes", 1, 1)
    return rows


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more threads, and beside other work wait for them: 25 times as long as alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def report(rows: Sequence[Row], device: torch.device) -> Report:
    """Where it ran, the table, the variables that differ, the errors, and last which cases agree."""
    with one_thread():
        here = hardware(torch.device("cpu"))
    backends: Any = torch.backends
    place = {name: value for name, value in made_with().items() if name not in ("command", "created")} | {
        "device": f"{device}: {hardware(device)}",
        "CPU": here,
        "devices": ", ".join(devices()),
        "CUDA, cuDNN": f"{torch.version.cuda}, {backends.cudnn.version() if backends.cudnn.is_available() else None}",
        "fp32_precision, CUDA, CPU": f"{backends.cuda.matmul.fp32_precision}, {backends.mkldnn.matmul.fp32_precision}",
        "PYTORCH_ENABLE_MPS_FALLBACK": os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK", "not set"),
    }
    tables = [
        Table("Where it ran", ("what", "which"), [[name, str(value)] for name, value in place.items()]),
        Table(f"{device} against the CPU", COLUMNS, [row.cells for row in rows]),
    ]
    lines = [row.line for row in rows if row.line]
    wrong = {word: [row.cells[0] for row in rows if row.verdict == word] for word in ("differs", "failed")}
    verdicts = [f"{word}: {', '.join(names)}" for word, names in wrong.items() if names]
    return Report(
        "Probes on a device and on the CPU",
        ABOUT.format(device=device),
        tables,
        [*lines, "; ".join(verdicts) or f"all {len(rows)} agree"],
    )
