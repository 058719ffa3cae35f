"""What is committed, made small: results and pictures.

    python tools/slim.py reports/toy/births.nc           # births.nc.xz, which is read where births.nc is not there
    python tools/slim.py reports/match reports/scalar-init  # all results and pictures of these folders
    python tools/slim.py reports/toy/births.png          # the same picture in 256 colours

Of a result it keeps what figures, tables, statements and notebooks read, floats with 5 significant digits. Its attribute
`left_out` names the rest; the command among its attributes measures it again. NAME.nc itself stays (git ignores it) and is
read before NAME.nc.xz.
"""

import argparse
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import xarray as xr
from PIL import Image

from probes.results.dataset import load, save

# By the folder that results lie in: variables that nothing reads from there.
UNREAD = {
    "jacobian": ("sensitivity_normed", "stderr_normed"),
    "scalar-init": ("stderr", "theory_*", "elasticity", "*_normed"),
    "sinks": (
        "pattern",
        "over_tau",
        "written_by_prompt",
        "output*_by_prompt",
        "reacts*_by_prompt",
        "effect_by_prompt",
        "loss_change_by_prompt",
    ),
    "bos-swap": ("sensitivity_*",),
}
READ_BY_HEAD = {"leakage": ("log_form", "log_neither", "position_share")}  # all others are read by block alone
DIGITS = 18  # bits of a float that are kept behind its first one: 5 decimal digits
EXACTER = {"leakage": 24}  # parts of a sum are held against it
# The same of weights by prompt, which are averaged over all heads. Where no effects were measured nothing is judged by
# single prompts, and other keys' mean over prompts stands at every prompt.
OF_POSITION_0, OF_OTHERS = 13, 6
TOY = "toy"  # results of which rules count right answers, so that they are kept as they are
FEW = 64  # different values take no room, and stay as they are


def slim(ds: xr.Dataset, kind: str) -> xr.Dataset:
    """What is kept of a result of that kind."""
    unread = {str(name) for name in ds.data_vars if any(fnmatch(str(name), one) for one in UNREAD.get(kind, ()))}
    unread |= {str(name) for name, values in ds.data_vars.items() if name == "tokens" and "prompt" in values.dims}
    if kind in READ_BY_HEAD:
        unread |= {str(name) for name, values in ds.data_vars.items() if "head" in values.dims} - {*READ_BY_HEAD[kind]}
    if kind == "sinks" and "sink_logit_share" not in ds:
        unread |= {"attends_by_prompt"} & {*ds.data_vars}
    kept = ds.drop_vars(unread)
    dims = {"prompt", "position", *(dim for values in kept.data_vars.values() for dim in values.dims)}
    kept = kept.drop_vars([name for name, values in kept.coords.items() if not {*values.dims} <= dims])
    for name, values in kept.data_vars.items():
        if kind == TOY or values.dtype.kind != "f" or len(np.unique(values)) <= FEW:
            continue
        data = rounded(values.values, EXACTER.get(kind, DIGITS))
        if name == "alpha" and {"prompt", "key"} <= {*values.dims}:
            first, others = (values.copy(data=rounded(values.values, bits)) for bits in (OF_POSITION_0, OF_OTHERS))
            if "effect" not in ds:
                others, unread = values.mean("prompt"), unread | {"alpha by prompt of keys but 0"}
            data = first.where(values["key"] == 0, others).transpose(*values.dims).values
        kept[name] = values.copy(data=data)
    left_out = sorted({*unread, *filter(None, str(ds.attrs.get("left_out", "")).split(", "))})
    return kept.assign_attrs({"left_out": ", ".join(left_out)} if left_out else {})


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """The nearest numbers of that many binary digits, in the type they had: bytes of zeros take no room."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(mantissa, digits + 1)), exponent - digits - 1).astype(values.dtype)


def made(path: Path) -> Iterator[Path]:
    """Make the small files of a file or a folder."""
    if path.is_dir():
        for file in sorted([*path.rglob("*.nc"), *path.rglob("*.png")]):
            yield from made(file)
    elif path.suffix == ".png":
        before = path.read_bytes()
        with Image.open(path) as picture:
            reduced = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
        path.write_bytes(min(before, path.read_bytes(), key=len))
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
