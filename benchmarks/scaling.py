"""How the probes' times grow with the prompt's length, the width, the depth and the number of prompts.

Exponents are slopes of log time over log size, by least squares, with Student's 95 % intervals. Beside them stand the same
slope of the counted operations (`benchmarks/work.py`), which the time would have if all work ran at one rate, and the
exponent of the leading term, which large sizes would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import work
from harness import Job, Row, Rows, Section, Settings, exponent, middle, table
from machine import turns
from models import llama, random_tokens

import probes

TITLE = "Scaling"
AXES = {"length": "T", "width": "width", "blocks": "depth", "prompts": "prompts"}
PROBES = {
    "exact": "`jacobian`, exact",
    "sketch": "`jacobian`, sketch of 64",
    "sinks": "`sinks`, 8 keys",
    "sinks all": '`sinks`, `keys="all"`',
    "trajectory": "`trajectory`",
    "leakage": "`leakage`, no intervals",
}
# Of large sizes: exact makes d products of T P operations and T^2 d; the others follow the pass, or all T^2 logits.
LEADING = {"length": "2", "width": "2", "blocks": "1", "prompts": "1"}
ROUNDS, SPEND = 3, 3.0
SHAPE = {"length": 128, "width": 128, "blocks": 4, "prompts": 1}
PASS = {"length": 512, "width": 256, "blocks": 4, "prompts": 2}  # of probes that cost a few passes


def sizes(name: str, settings: Settings) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """(the sizes that the others vary around, the values of every axis)."""
    if settings.quick:
        base = {"length": 48, "width": 64, "blocks": 2, "prompts": 4 if name == "leakage" else 1}
        prompts = (4, 8, 16) if name == "leakage" else (1, 2, 4)
        return base, {"length": (32, 64, 128), "width": (64, 128), "blocks": (1, 2, 4), "prompts": prompts}
    if name in ("exact", "sketch"):
        many = {"length": (64, 128, 256, 512), "width": (64, 128, 256, 384)}
        if name == "sketch":
            many = {"length": (64, 128, 256, 512, 1024), "width": (128, 256, 384, 512)}
        return SHAPE, {**many, "blocks": (2, 4, 8, 16), "prompts": (1, 2, 4, 8)}
    if name == "leakage":
        base = {**PASS, "length": 256, "width": 128, "prompts": 4}
        many = {"length": (128, 256, 512, 1024), "width": (64, 128, 256, 512)}
        return base, {**many, "blocks": (2, 4, 8, 16), "prompts": (4, 8, 16, 32)}
    many = {"length": (256, 512, 1024, 2048, 4096), "width": (128, 256, 512, 1024)}
    return PASS, {**many, "blocks": (2, 4, 8, 16), "prompts": (2, 4, 8, 16)}


def jobs(settings: Settings) -> list[Job]:
    """A job per probe; none on a GPU, where these sizes would be over before they began."""
    if settings.cuda:
        return []
    found = []
    for name in ("exact", "sinks", "leakage") if settings.quick else PROBES:
        base, axes = sizes(name, settings)
        points = {
            f"{AXES[axis]} {value}": {**base, axis: value, "axis": axis}
            for axis, values in axes.items()
            for value in values
        }
        found.append(Job("scaling", name, points))
    return found


def probe(name: str, view: Any, tokens: Any) -> Callable[[], Any]:
    """The call."""
    calls: dict[str, Callable[[], Any]] = {
        "exact": lambda: probes.jacobian(view, tokens),
        "sketch": lambda: probes.jacobian(view, tokens, method="sketch"),
        "sinks": lambda: probes.sinks(view, tokens),
        "sinks all": lambda: probes.sinks(view, tokens, keys="all"),
        "trajectory": lambda: probes.trajectory(view, tokens),
        "leakage": lambda: probes.leakage(view, tokens, bootstrap=0, fresh=0),
    }
    return calls[name]


def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Rows with the seconds of every round, operations, the axis and its value."""
    for label, point in job.points.items():
        view = probes.load(llama(point["width"], point["blocks"], point["length"], heads=point["width"] // 32))
        call = probe(job.name, view, random_tokens(point["prompts"], point["length"]))
        seconds = turns({"": call}, rounds=ROUNDS, device="cpu", spend=1.0 if settings.quick else SPEND)
        with work.Counting() as counted:
            call()
        axis = point["axis"]
        yield label, {"seconds": seconds[""], "flops": counted.flops, "axis": axis, "value": point[axis]}


# -------------------------------------------------------------------------------------------------------------- page


def curve(found: dict[str, Row], axis: str) -> tuple[list[float], list[float], list[float]]:
    """(sizes, median seconds, operations) along an axis."""
    rows = sorted((row for row in found.values() if row["axis"] == axis), key=lambda row: row["value"])
    return (
        [float(row["value"]) for row in rows],
        [middle(row["seconds"]) for row in rows],
        [row["flops"] for row in rows],
    )


def section(rows: Rows, settings: Settings) -> Section:
    if settings.cuda:
        return Section([], ["Not measured on GPU: these sizes are for a processor."])
    body = []
    for job in jobs(settings):
        found = rows.of(job)
        for axis, said in AXES.items():
            x, seconds, operations = curve(found, axis)
            if len(x) < 2:
                continue
            base, _ = sizes(job.name, settings)
            rest = ", ".join(f"{AXES[name]} {value}" for name, value in base.items() if name != axis)
            reach = f"{said} {x[0]:,.0f} to {x[-1]:,.0f} ({rest})"
            work_done = f"{exponent(x, operations).value:.2f}"
            leading = "3" if (job.name, axis) == ("exact", "width") else LEADING[axis]
            times = f"{seconds[0]:.2g} to {seconds[-1]:.2g} s"
            body.append([PROBES[job.name], reach, str(exponent(x, seconds)), work_done, leading, times])
    lines = [
        "Slope of log time over log size with its 95 % interval. Compare it with the slope of the operations over the same "
        "sizes; the leading term's exponent shows at larger ones. Time grows more slowly than operations where small sizes "
        "are mostly overhead (Python's calls), and faster where large ones outgrow caches.",
        "",
        *table(["probe", "over", "exponent of the time", "of the operations", "in the end", "times"], body),
        "",
        "Random Llama, heads of 32, float32.",
        "",
        "![Scaling](benchmarks/scaling.png)",
    ]
    return Section([], lines)
