"""A figure drawn again, or from numbers that another processor rounded differently, gives the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure

import probes
from probes.figures import jacobian_figure
from probes.figures.layout import Layout
from probes.figures.steady import steady

IDS = torch.randint(3, families.VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(2))
ROUNDING = 1e-7  # float32's, relative


def files(path: Path) -> tuple[bytes, bytes]:
    return path.with_suffix(".png").read_bytes(), path.with_suffix(".svg").read_bytes()


def test_rounding_keeps_three_digits_of_numbers_of_every_size():
    values = np.array([[0.0, 123456.0, -0.00098765], [np.nan, np.inf, 0.99999]])
    found = steady(xr.Dataset({"x": (("a", "b"), values), "n": (("a",), [12345, 7])}, attrs={"model": "m"}))
    np.testing.assert_allclose(found["x"], [[0.0, 123000.0, -0.000988], [np.nan, np.inf, 1.0]], rtol=1e-12)
    assert found["n"].values.tolist() == [12345, 7]
    assert found.attrs == {"model": "m"}
    assert values[0, 1] == 123456.0


def test_a_figure_drawn_again_gives_the_same_files(tmp_path):
    found = probes.jacobian(probes.load(families.model("llama")), IDS, method="scalar")
    # As many panels as the report has: the solver's order of summation is a matter of memory addresses.
    results = {name: found for name in "abcd"}
    jacobian_figure(results, path=tmp_path / "first.png")
    for n in range(4):
        kept = [Figure() for _ in range(n)]  # other addresses
        jacobian_figure(results, path=tmp_path / "again.png")
        assert files(tmp_path / "again") == files(tmp_path / "first")
        del kept


def test_the_layout_is_the_constrained_one(tmp_path):
    def made(layout: Any) -> Figure:
        figure = Figure(figsize=(5, 3), layout=layout)
        for n, cell in enumerate(figure.subplots(2, 2).flat):
            cell.set_ylabel("y" * (n + 1))
            figure.colorbar(cell.imshow(np.eye(3)), ax=cell)
        return figure

    plain, settled = made("constrained"), made(Layout())
    plain.savefig(tmp_path / "plain.png", dpi=100)
    settled.savefig(tmp_path / "settled.png", dpi=100)
    for own, cell in zip(plain.axes, settled.axes, strict=True):
        np.testing.assert_allclose(cell.get_position().bounds, own.get_position().bounds, atol=0.02)
        assert cell.get_position(original=True).x0 == round(cell.get_position(original=True).x0, 6)
