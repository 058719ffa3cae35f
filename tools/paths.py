"""What attention adds along its values and along its scores, block by block, at initialization and after training.

    python tools/paths.py MODEL --initialization RULE --out runs/llm/paths

The derivative of the last stream splits into a value path, with every pattern held constant, and a score path, the rest
(`probes.jacobian(pathway="all", from_layer="all")`). Written are the sizes of both against the total, for the sensitivity
to each block's input: the root of the sum over earlier positions of squared norms, per prompt, then the geometric mean
over prompts with its 95 % interval over documents (jackknife). The query's own position, which has the identity path,
stands apart. The two sizes need not add up to 1: paths may cancel. Interrupted, it resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import xarray as xr

import probes
from probes.figures.palette import BLUE, VERMILLION
from probes.figures.style import save_figure
from probes.results.dataset import dataset, load, save
from probes.results.statistics import jackknife, units

PATHS = {"value": BLUE, "score": VERMILLION}


def measured(given: argparse.Namespace) -> dict[str, list[xr.Dataset]]:
    """A result per condition and fresh model, kept in the folder as they come."""
    view = probes.load(given.model)
    found: dict[str, list[xr.Dataset]] = {}
    drawn = probes.draw(view, n=given.prompts, length=given.length)
    for condition, seed in [("pretrained", 0), *(("init", seed) for seed in range(given.seeds))]:
        file = given.out / "unfinished" / f"{condition}-{seed}.nc"
        if not file.is_file():
            model = view.reinitialized(seed, initialization=given.initialization) if condition == "init" else view
            ds = probes.jacobian(
                model, drawn.tokens, method="sketch", products=given.products, pathway="all", from_layer="all"
            )
            ds = ds.assign_coords(document=("prompt", list(drawn.documents or ())))
            ds.attrs |= drawn.attributes
            save(ds, file)
            print(f"{condition} {seed}", flush=True)
        found.setdefault(condition, []).append(load(file))
    return found


def shares(runs: dict[str, list[xr.Dataset]]) -> xr.Dataset:
    """Sizes of both paths against the total, [condition, pathway, layer], with low and high ends."""
    first = next(iter(runs.values()))[0]
    found: dict[str, np.ndarray] = {}
    for own, name in ((slice(None, -1), "share"), (slice(-1, None), "share_of_query")):
        made = []
        for of_seeds in runs.values():
            each = [(ds["sensitivity"].isel(position=own) ** 2).sum("position") ** 0.5 for ds in of_seeds]
            logs = [xr.ufuncs.log(size.sel(pathway=list(PATHS)) / size.sel(pathway="total")) for size in each]
            values = np.mean([x.transpose("prompt", "pathway", "layer").values for x in logs], axis=0)
            made.append(np.exp(jackknife(lambda some: some.mean(0), values, units(first))))
        for end, values in zip(("", "_low", "_high"), np.stack(made, axis=1), strict=True):
            found[name + end] = values
    dims = ("condition", "pathway", "layer")
    return dataset(
        {name: (dims, values, {"units": "share of the total's norm"}) for name, values in found.items()},
        coords={"condition": list(runs), "pathway": list(PATHS), "layer": first["layer"].values.tolist()},
        attrs=first.attrs,
    )


def drawn(ds: xr.Dataset, path: Path) -> None:
    """The shares over source blocks, a panel per condition."""
    figure, cells = plt.subplots(1, ds.sizes["condition"], figsize=(7.2, 2.8), sharey=True, squeeze=False)
    for cell, condition in zip(cells[0], ds["condition"].values, strict=True):
        for name, color in PATHS.items():
            at = ds.sel(condition=condition, pathway=name)
            cell.plot(at["layer"], at["share"], color=color, label=f"{name} path")
            cell.fill_between(at["layer"], at["share_low"], at["share_high"], color=color, alpha=0.2, linewidth=0)
        cell.set(title=str(condition), xlabel="input of block")
    cells[0, 0].set(ylabel="norm against the total's,\nearlier positions", ylim=(0, None))
    cells[0, 0].legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, path)


def main() -> None:
    """Measure, write, draw."""
    told = argparse.ArgumentParser(description="Value and score paths, block by block.")
    told.add_argument("model")
    told.add_argument("--initialization", default="config")
    told.add_argument("--prompts", type=int, default=16)
    told.add_argument("--seeds", type=int, default=2)
    told.add_argument("--length", type=int, default=128)
    told.add_argument("--products", type=int, default=24)
    told.add_argument("--out", type=Path, required=True)
    given = told.parse_args()
    torch.set_num_threads(1)
    ds = shares(measured(given))
    save(ds, given.out / "paths.nc")
    drawn(ds, given.out / "paths.png")


if __name__ == "__main__":
    main()
