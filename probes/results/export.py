"""A result as tidy tables in Parquet, for readers without xarray: data frames, databases, hubs of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import xarray as xr

from ..errors import InputError, check_choice
from ..run.files import atomic, together

METADATA = b"headwater"  # the key of a file's metadata under which the attributes of the result stand, as JSON
COMPRESSION = "zstd"


def export(ds: xr.Dataset, out: str | Path, name: str, to: Literal["parquet"] = "parquet") -> list[Path]:
    """Write `OUT/NAME-DIMENSIONS.parquet`, a file per set of dimensions (`scalars` for none), all of them or none.

    A file has a row per element: its coordinates, and a column for each variable that has these dimensions. Dimensions
    without coordinates are counted from 0. Numbers keep their type and NaN stays NaN. Each file's metadata has the
    attributes of the result, its provenance, under `headwater` (JSON); a column's has its attributes (units), as text.

    Args:
        ds: a result.
        out: the folder; it is made if need be.
        name: what file names begin with.
        to: the format.

    Returns:
        The files, in the order of the result's variables.

    Raises:
        InputError: the format is none of these, the result has no variables, the name is a path or empty, or the folder
            cannot be written to.
    """
    check_choice("format", to, ("parquet",))
    if not ds.data_vars:
        raise InputError("the result has no variables; give one that has")
    if not name or Path(name).name != name:
        raise InputError(f"name '{name}' is no beginning of a file name; give one without slashes")
    import pyarrow  # not above: results are read and written without it
    from pyarrow import parquet

    shapes: dict[tuple[str, ...], list[str]] = {}
    for variable, values in ds.data_vars.items():
        dims = tuple(str(dim) for dim in ds.dims if dim in values.dims)  # one order, whatever the variable's own
        shapes.setdefault(dims, []).append(str(variable))
    provenance = json.dumps(ds.attrs, ensure_ascii=False, default=str).encode()
    files = []
    with together():
        for dims, variables in shapes.items():
            some = ds[variables] if dims else ds[variables].expand_dims("row")
            frame = some.to_dataframe(dim_order=list(dims) or None).reset_index(drop=not dims)
            table = pyarrow.Table.from_pandas(frame, preserve_index=False)
            said = {name: {key: str(value) for key, value in v.attrs.items()} for name, v in ds.variables.items()}
            fields = [field.with_metadata(said.get(field.name) or None) for field in table.schema]
            metadata = {**(table.schema.metadata or {}), METADATA: provenance}
            table = table.cast(pyarrow.schema(fields, metadata=metadata))
            files.append(Path(out) / f"{name}-{'-'.join(dims) or 'scalars'}.parquet")
            with atomic(files[-1]) as temporary:
                parquet.write_table(table, temporary, compression=COMPRESSION)
    return files
