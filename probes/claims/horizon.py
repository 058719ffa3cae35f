"""Our own statements about the horizon of absolute position; what it is stands in `docs/probes/horizon.md`."""

from __future__ import annotations

import xarray as xr

from ..measures.horizon import AS_IT_IS, READ, horizons
from ..results.statistics import Interval, freedom, units
from .evidence import Results, real
from .readings import estimated
from .rules import Told, below, every, some, told
from .ruscio import ruscio

ours = ruscio.but(kind="ours", where="the horizon of absolute position", needs=real("horizon"))
BEHIND, STILL = 128, 0.1  # from this position on R^2 stays below that
AT_ANY_LENGTH = "t1024/horizon"


def octave_of(ds: xr.Dataset, octave: str) -> Interval:
    """R^2 within an octave of the model as it is, over documents."""
    found = estimated(ds, "r2_chosen", arm=AS_IT_IS, octave=octave)
    return found._replace(freedom=freedom(units(ds)))


@ours(
    "horizon-60",
    rule=f"R² of log(1 + i) (block chosen on other documents) is below {STILL:g} in every octave from {BEHIND}",
)
def _(ds: xr.Dataset) -> Told | None:
    """From position 128 on the stream no longer carries absolute position."""
    octaves = [octave for octave in map(str, ds["octave"].values[1:]) if int(octave.partition("-")[0]) >= BEHIND]
    found = {octave: octave_of(ds, octave) for octave in octaves}
    words = ", ".join(f"R² {told(one)} at {octave}" for octave, one in found.items())
    return (words, every(below(one, STILL) for one in found.values())) if found else None


@ours(
    "horizon-does-not-scale",
    needs=real("horizon", AT_ANY_LENGTH),
    rule=f"in the last octave of a text, or of one twice as long, R² is below {READ:g}; fails where both are above",
)
def _(kinds: Results) -> Told:
    """The reading of absolute position ends before a text of 512 tokens does, or before one of 1,024."""
    lengths = [kinds[kind].sel(arm=[AS_IT_IS]) for kind in ("horizon", AT_ANY_LENGTH)]
    last = [octave_of(ds, str(ds["octave"].values[-1])) for ds in lengths]
    reach = [float(horizons(ds).sel(estimate="value")[0]) for ds in lengths]
    words = (
        f"T = {ds.sizes['position']}: up to {end:.0f}, R² {told(one)} there"
        for ds, end, one in zip(lengths, reach, last, strict=True)
    )
    return "; ".join(words), some(below(one, READ) for one in last)
