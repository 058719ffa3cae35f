"""What is committed, made small: results, pictures, checkpoints.

    python tools/slim.py reports/toy/births.nc           # births.nc.xz, which is read where births.nc is not there
    python tools/slim.py reports/match reports/no-rope   # all results and pictures of these folders
    python tools/slim.py reports/toy/births.png          # the same picture in 256 colours
    python tools/slim.py runs/tiny-llama                 # what `headwater pretrain` wrote, as the package holds it

Of a result it keeps what figures, tables, statements and notebooks read, floats with 5 significant digits. Its attribute
`left_out` names the rest; the command among its attributes measures it again. NAME.nc itself stays (git ignores it) and is
read before NAME.nc.xz.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import xarray as xr

from probes.figures.style import reduce_colors
from probes.models.packed import BESIDE, LAST, PACKED
from probes.results.dataset import load, save

# By the folder that results lie in: variables that nothing reads from there.
PROFILES = ("stderr", "theory_*", "elasticity")
ENDS_OF_SWAPS = ("after_low", "after_high", "before_low", "before_high")
UNREAD = {
    "no-rope": PROFILES,
    "scalar-init": PROFILES,
    "sinks": (
        "pattern",
        "over_tau",
        "written_by_prompt",
        "output*_by_prompt",
        "reacts*_by_prompt",
        "*effect_by_prompt",
    ),
    "trajectory": ("norm", "median_magnitude", "massive_others"),
    "bos-swap": (
        *("kl", "kl_low", "kl_high"),
        *(f"{of}_{when}" for of in ("leakage", "weight", "source", "residual*") for when in ENDS_OF_SWAPS),
    ),
}
READ_BY_HEAD = {"leakage": ("log_form", "log_neither", "steady_source")}  # all others are read by block alone
DIGITS = 18  # bits of a float that are kept behind its first one: 5 decimal digits
EXACTER = {"leakage": 24}  # parts of a sum are held against it
# The same of weights by prompt, which are averaged over all heads. Where no effects were measured nothing is judged by
# single prompts, and other keys' mean over prompts stands at every prompt.
OF_POSITION_0, OF_OTHERS = 13, 6
TOY = "toy"  # results of which rules count right answers, so that they are kept as they are
FEW = 64  # different values take no room, and stay as they are
WEIGHTS = ".safetensors"


def slim(ds: xr.Dataset, kind: str) -> xr.Dataset:
    """What is kept of a result of that kind."""
    unread = {str(name) for name in ds.data_vars if any(fnmatch(str(name), one) for one in UNREAD.get(kind, ()))}
    unread |= {str(name) for name, values in ds.data_vars.items() if name == "tokens" and "prompt" in values.dims}
    if kind in READ_BY_HEAD:
        unread |= {str(name) for name, v in ds.data_vars.items() if "head" in v.dims} - {*READ_BY_HEAD[kind]}
    if kind == "sinks" and "sink_logit_share" not in ds:
        unread |= {"attends_by_prompt"} & {*ds.data_vars}
    kept = ds.drop_vars(unread)
    kept = kept.drop_vars(
        [name for name in kept.coords if not {*kept[name].dims} <= {*_dims(kept), "prompt", "position"}]
    )
    for name, values in kept.data_vars.items():
        if kind != TOY and values.dtype.kind == "f" and len(np.unique(values)) > FEW:
            data = rounded(values.values, EXACTER.get(kind, DIGITS))
            if name == "alpha" and {"prompt", "key"} <= {*values.dims}:
                first, others = (values.copy(data=rounded(values.values, bits)) for bits in (OF_POSITION_0, OF_OTHERS))
                if "effect" not in ds:
                    others, unread = values.mean("prompt"), unread | {"alpha by prompt of keys but 0"}
                data = first.where(values["key"] == 0, others).transpose(*values.dims).values
            kept[name] = values.copy(data=data)
    left_out = sorted({*unread, *filter(None, str(ds.attrs.get("left_out", "")).split(", "))})
    return kept.assign_attrs({"left_out": ", ".join(left_out)} if left_out else {})


def _dims(ds: xr.Dataset) -> set[str]:
    """Of the variables; a coordinate of another dimension says nothing any more."""
    return {str(dim) for values in ds.data_vars.values() for dim in values.dims}


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """The nearest numbers of that many binary digits, in the type they had: bytes of zeros take no room."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(mantissa, digits + 1)), exponent - digits - 1).astype(values.dtype)


def packed(folder: Path) -> Iterator[Path]:
    """Write a trained folder as the package holds it: `probes.models.packed`; what the parts share is kept once."""
    files = {file.parent.name: file for file in folder.glob(f"step*/{LAST}{WEIGHTS}")} | {
        LAST: folder / f"{LAST}{WEIGHTS}"
    }
    order = sorted(files, key=lambda name: (name == LAST, len(name), name))
    content = {name: files[name].read_bytes() for name in order}
    said = {"seed": json.loads((folder / "training.json").read_text(encoding="utf-8"))["options"]["seed"]}
    for name in order:
        (folder / f"{name}{WEIGHTS}.xz").unlink(missing_ok=True)
        if name != "step0":
            filters = [
                {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}
            ]  # two bytes
            (folder / f"{name}{WEIGHTS}.xz").write_bytes(lzma.compress(content[name], filters=filters))
            yield folder / f"{name}{WEIGHTS}.xz"
        files[name].unlink()
        for other in BESIDE if name != LAST else ():
            (files[name].parent / other).unlink(missing_ok=True)
        if name != LAST:
            files[name].parent.rmdir()
    said["sha256"] = {name: hashlib.sha256(content[name]).hexdigest() for name in order}
    (folder / PACKED).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def recolored(picture: bytes) -> bytes:
    """A PNG in 256 colours, or as it is where it has few."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        file.write_bytes(picture)
        reduce_colors(file)
        return min(picture, file.read_bytes(), key=len)


def made(path: Path) -> Iterator[Path]:
    """Make the small files of a file or a folder."""
    if (path / "training.json").is_file():
        yield from packed(path)
    elif path.is_dir():
        for file in sorted([*path.rglob("*.nc"), *path.rglob("*.png")]):
            yield from made(file)
    elif path.suffix == ".png":
        path.write_bytes(recolored(path.read_bytes()))
        yield path
    else:
        target = path.with_name(f"{path.name}.xz")
        save(slim(load(path), TOY if TOY in path.parts else path.parent.name), target)
        yield target


def main() -> None:
    """Make them all, and say how large they are."""
    given = argparse.ArgumentParser(description="Make what is committed small.")
    given.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="a result, a picture, a checkpoint, or a folder"
    )
    for path in given.parse_args().paths:
        for file in made(path):
            print(f"{file.stat().st_size:11,}  {file}", flush=True)


if __name__ == "__main__":
    main()
