"""How much of the machine each probe uses: operations and bytes over its time, against what the machine does at best.

At best: a large square matrix product, and a triad a = b + 2 c over arrays that no cache holds, timed in turn with the
probe in the same process. Operations are those of matrix products, and bytes are every operation's inputs and outputs as if
no cache held them (`benchmarks/work.py`). A probe whose tensors stay in cache can show more than the memory's rate.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        call = probe(label, view, random_tokens(point["prompts"], point["length"], device=device))
        product, product_flops = gemm(GEMM_SIZE if not settings.quick else 512, view.dtype, device)
        copy, copy_bytes = triad(device)
        calls = {"probe": call, "gemm": product, "triad": copy}
        # The probe warms up by itself: its first round counts where it is long, those of the others do not.
        first = {name: seconds_of(one, device) for name, one in calls.items()}
        first |= {name: seconds_of(calls[name], device) for name in ("gemm", "triad")}
        spend = SPEND if not settings.quick else 1.0
        row: Row = {"seconds": turns(calls, rounds=ROUNDS, device=device, spend=spend, first=first)}
        with work.Counting() as counted:
            call()
        row |= {"flops": counted.flops, "bytes": counted.bytes}
        yield label, row | {"gemm flops": product_flops, "triad bytes": copy_bytes}
        del view, call, calls, product, copy
        if settings.cuda:
            torch.cuda.empty_cache()


def shares(row: Row) -> tuple[list[float], list[float]]:
    """(share of the product's rate, share of the triad's), round by round."""
    seconds = row["seconds"]
    work_share = [x * row["flops"] / row["gemm flops"] for x in ratios(seconds["gemm"], seconds["probe"])]
    byte_share = [x * row["bytes"] / row["triad bytes"] for x in ratios(seconds["triad"], seconds["probe"])]
    return work_share, byte_share


def section(rows: Rows, settings: Settings) -> Section:
    (job,) = jobs(settings)
    found = rows.of(job)
    square = f"{512 if settings.quick else GEMM_SIZE:,}^3"
    body, headlines, products, triads = [], [], [], []
    for name, row in found.items():
        point = job.points[name]
        by_work, by_bytes = shares(row)
        shape = f"{point['size']} shape" if "size" in point else f"width {point['width']}, {point['blocks']} blocks"
        where = f"{shape}, T = {point['length']:,}, {point['prompts']} prompt{'s' * (point['prompts'] > 1)}"
        seconds = middle(row["seconds"]["probe"])
        products += [row["gemm flops"] / x / 1e9 for x in row["seconds"]["gemm"]]
        triads += [row["triad bytes"] / x / GIB for x in row["seconds"]["triad"]]
        done = [f"{row['flops'] / 1e9:,.3g}", spread(by_work, ".0%"), f"{row['bytes'] / GIB:,.2g}"]
        body.append([PROBES[name], where, f"{seconds:.3g}", *done, spread(by_bytes, ".0%")])
        if name == "exact":
            rates = row["flops"] / seconds, row["gemm flops"] / middle(row["seconds"]["gemm"])
            what = f"exact Jacobian, {where}: rate against a {square} product"
            headlines.append(Headline(what, *(f"{x / 1e9:,.0f} GFLOP/s" for x in rates), spread(by_work, ".0%")))
    columns = ["probe", "at", "seconds", "GFLOP", "of the product's rate", "GiB", "of the memory's rate"]
    lines = [
        "Operations of matrix products, and bytes of every operation's inputs and outputs as if nothing stayed in a cache, "
        "counted while the probe runs. More than the memory's rate means that something did. Shares are of a matrix "
        "product's and a triad's rates, timed in turn with the probe: medians (quartiles).",
        "",
        *table(columns, body),
    ]
    if products:
        rates = f"{spread(products, '.0f')} GFLOP/s; triad: {spread(triads, '.1f')} GiB/s"
        lines += ["", f"Matrix product {square}: {rates}."]
    return Section(headlines, lines)
