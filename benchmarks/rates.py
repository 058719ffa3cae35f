"""How much of the machine each probe uses: operations and bytes over its time, against what the machine does at best.

At best: a large square matrix product, and a triad a = b + 2 c over arrays that no cache holds, timed in turn with the
probe in the same process. Operations are those of matrix products, by formula (`benchmarks/work.py`), beside them as torch
counts them while the probe runs. Bytes are counted: every operation's inputs and outputs, as if no cache held them, so that
a probe whose tensors stay in cache can show more than the memory's rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import work
from harness import Headline, Job, Row, Rows, Section, Settings, middle, ratios, spread, table
from machine import GEMM_SIZE, GIB, gemm, seconds_of, triad, turns
from models import made, random_tokens
from scaling import PROBES, probe

import probes

TITLE = "Share of the machine"
ROUNDS, SPEND = 5, 8.0


def jobs(settings: Settings) -> list[Job]:
    """One job; every probe at a size that takes it a second or more."""
    if settings.cuda:
        exact = {"size": "0.5B", "length": 512, "prompts": 1}
        long = {"size": "0.5B", "length": 8192, "prompts": 2}
        sized = {"exact": exact, "leakage": {**long, "length": 2048, "prompts": 4}}
    elif settings.quick:
        exact = long = {"width": 128, "blocks": 2, "heads": 4, "length": 64, "prompts": 1}
        sized = {"leakage": {**long, "prompts": 4}}
    else:
        exact = {"width": 256, "blocks": 6, "length": 256, "prompts": 1}
        long = {"width": 512, "blocks": 4, "heads": 8, "length": 4096, "prompts": 1}
        sized = {
            "leakage": {**long, "length": 1024, "prompts": 4},
            "trajectory": {**long, "length": 2048, "prompts": 2},
        }
    points = {name: sized.get(name, exact if name in ("exact", "sketch") else long) for name in PROBES}
    return [Job("rates", "all", points)]


def measure(job: Job, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Rows with the seconds of probe, product and triad in every round, and the probe's operations and bytes."""
    device = settings.device
    for label, point in job.points.items():
        view = probes.load(made(point, device))
        tokens = random_tokens(point["prompts"], point["length"], device=device)
        call, operations = probe(label, view, tokens)
        product, product_flops = gemm(GEMM_SIZE if not settings.quick else 512, view.dtype, device)
        copy, copy_bytes = triad(device)
        found: dict[str, Any] = {}
        calls = {"probe": lambda call=call, found=found: found.update(ds=call()), "gemm": product, "triad": copy}
        # The probe warms up by itself: its first round counts where it is long, those of the others do not.
        first = {name: seconds_of(one, device) for name, one in calls.items()}
        spend = SPEND if not settings.quick else 1.0
        first |= {name: seconds_of(one, device) for name, one in calls.items() if name != "probe"}
        seconds = turns(calls, rounds=ROUNDS, device=device, spend=spend, first=first)
        with work.Counting() as counted:
            call()
        yield (
            label,
            {
                "seconds": seconds,
                "flops": operations(found["ds"]),
                "counted flops": counted.flops,
                "bytes": counted.bytes,
                "gemm flops": product_flops,
                "triad bytes": copy_bytes,
            },
        )
        del view, tokens, call, operations, calls, found, product, copy
        if settings.cuda:
            torch.cuda.empty_cache()


def shares(row: Row) -> tuple[list[float], list[float]]:
    """(share of the product's rate, share of the triad's), round by round."""
    seconds = row["seconds"]
    work_share = [x * row["flops"] / row["gemm flops"] for x in ratios(seconds["gemm"], seconds["probe"])]
    byte_share = [x * row["bytes"] / row["triad bytes"] for x in ratios(seconds["triad"], seconds["probe"])]
    return work_share, byte_share


def section(rows: Rows, settings: Settings, folder: Path) -> Section:
    (job,) = jobs(settings)
    found = rows.of(job)
    body, headlines = [], []
    for name, row in found.items():
        point = job.points[name]
        by_work, by_bytes = shares(row)
        shape = f"{point['size']} shape" if "size" in point else f"width {point['width']}, {point['blocks']} blocks"
        where = f"{shape}, T = {point['length']:,}, {point['prompts']} prompt{'s' * (point['prompts'] > 1)}"
        seconds = middle(row["seconds"]["probe"])
        body.append(
            [
                PROBES[name],
                where,
                f"{seconds:.3g}",
                f"{row['flops'] / 1e9:,.3g}",
                f"{row['counted flops'] / row['flops']:.2f}",
                spread(by_work, ".0%"),
                f"{row['bytes'] / GIB:,.2g}",
                spread(by_bytes, ".0%"),
            ]
        )
        if name == "exact":
            rate, best = (f"{x / 1e9:,.0f} GFLOP/s" for x in _rates(row))
            headlines.append(
                Headline(
                    f"exact Jacobian, {where}: rate against a {_square(settings)} product",
                    rate,
                    best,
                    spread(by_work, ".0%"),
                )
            )
    products, triads = [], []
    for row in found.values():
        products += [row["gemm flops"] / x for x in row["seconds"]["gemm"]]
        triads += [row["triad bytes"] / x for x in row["seconds"]["triad"]]
    lines = [
        "Operations of matrix products by formula, and what torch counts while the probe runs as a multiple of it; bytes of "
        "every operation's inputs and outputs, as if nothing stayed in a cache (more than the memory's rate means that it "
        "did). Shares are of a matrix product's and a triad's rates, timed in turn with the probe: medians (quartiles).",
        "",
    ]
    columns = [
        "probe",
        "at",
        "seconds",
        "GFLOP",
        "counted / formula",
        "of the product's rate",
        "GiB",
        "of the memory's rate",
    ]
    lines += table(columns, body)
    if products:
        lines += [
            "",
            f"Matrix product {_square(settings)}: {spread([x / 1e9 for x in products], '.0f')} GFLOP/s; triad: "
            f"{spread([x / GIB for x in triads], '.1f')} GiB/s.",
        ]
    return Section(headlines, lines)


def _rates(row: Row) -> tuple[float, float]:
    """Operations per second of the probe and of the product."""
    return row["flops"] / middle(row["seconds"]["probe"]), row["gemm flops"] / middle(row["seconds"]["gemm"])


def _square(settings: Settings) -> str:
    return f"{512 if settings.quick else GEMM_SIZE:,}^3"
