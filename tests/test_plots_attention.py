"""Figures of the attention probes: what is drawn is what the results hold; other probes' results are refused."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

import probes
from probes.bos import bos_swap
from probes.errors import InputError
from probes.leakage import leakage
from probes.plots import BLACK, BLUE, GREEN, VERMILLION, bos_figure, leakage_figure, sinks_figure, trajectory_figure
from probes.plots.bos import HIGHEST, PUBLISHED
from probes.plots.leakage import PARTS, SHARES, SOURCES
from probes.plots.steady import steady
from probes.plots.style import GREY, LARGEST, ORANGE, points, save_figure, thinned
from probes.results import dataset
from probes.sinks import sinks
from probes.trajectory import trajectory

BANDS = {"band": ["9-31", "32-63"], "band_first": (("band",), [9, 32]), "band_last": (("band",), [31, 63])}
LAYERS, HEADS, LENGTH = 3, 4, 64


def made(variables: dict[str, tuple[Any, ...]], coords: dict[str, Any], **attrs: Any) -> xr.Dataset:
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    return dataset(variables, tokens=tokens, coords=coords, attrs={"model": "owner/tiny", "dtype": "float32", **attrs})


def sinks_result(*, layers: int = LAYERS, heads: int = HEADS, pictures: int = 3, keys: int = 8) -> xr.Dataset:
    random = np.random.default_rng(layers)
    attends = random.uniform(0, 0.8, (layers, heads))
    reading = (attends > 0.4).astype(np.int8)
    names = ["attends", "reads", "reacts", "sink-reading"]
    variables: dict[str, tuple[Any, ...]] = {
        "alpha": (
            ("prompt", "layer", "head", "key"),
            random.uniform(0.1, 3, (4, layers, heads, 1)) / (np.arange(keys) + 5),
        ),
        "sink_rate": (("layer", "key"), random.uniform(0, 1, (layers, 1)) * 0.5 ** np.arange(keys)),
        "sink_rate_of_model": (("key",), random.uniform(0, 1, keys)),
        "over_tau_of_model": (("key",), random.uniform(0, 1, keys)),
        "uniform": (("layer", "key"), np.tile(1 / (np.arange(keys) + 20), (layers, 1))),
        "attends": (("layer", "head"), attends),
        "selected": (("rule", "layer", "head"), np.stack([reading] * 4)),
    }
    for name in ("value", "key", "written"):
        variables[f"{name}_norm"] = (("layer", "head", "place"), random.uniform(0.1, 2, (layers, heads, 2)))
    coords: dict[str, Any] = {"key": range(keys), "rule": names, "place": ["sink", "rest"]}
    if pictures:
        logits = np.where(np.tri(128) > 0, random.normal(0, 4, (pictures, 128, 128)), -np.inf)
        pattern = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        variables["pattern"] = (("picture", "picture_query", "picture_key"), pattern)
        coords |= {
            "picture_layer": (("picture",), range(pictures)),
            "picture_head": (("picture",), [3, 2, 1][:pictures]),
        }
    options = {"threshold": 0.3, "tau": 0.2}
    return made(variables, coords, options=options, attends_threshold=0.3, reads_threshold=0.35)


def trajectory_result() -> xr.Dataset:
    random, layers = np.random.default_rng(1), LAYERS + 1
    along, pairs = (2, layers), (2, layers)
    cosine = random.uniform(0.2, 0.6, pairs)
    return made(
        {
            "later_difference": (("first", "layer"), np.zeros(along)),
            "norm_first": (("first", "layer"), random.uniform(1, 100, along)),
            "norm_others": (("first", "layer"), random.uniform(1, 100, along)),
            "top_ratio": (("first", "layer", "rank"), random.uniform(1, 2000, (*along, 5))),
            "cosine": (("place", "layer"), cosine),
            "cosine_low": (("place", "layer"), cosine - 0.1),
            "cosine_high": (("place", "layer"), cosine + 0.1),
            "cosine_with_bos": (("layer",), random.uniform(0, 0.2, layers)),
        },
        {
            "first": ["bos", "text"],
            "place": ["position 0", "position 1 behind BOS"],
            "layer": range(layers),
            "rank": range(5),
        },
        options={"starts": 64},
    )


def with_intervals(variables: dict[str, tuple[Any, np.ndarray]], width: float) -> dict[str, tuple[Any, ...]]:
    ends = {"": 0.0, "_low": -width, "_high": width}
    return {f"{name}{end}": (dims, x + by) for name, (dims, x) in variables.items() for end, by in ends.items()}


def leakage_result() -> xr.Dataset:
    random, bands = np.random.default_rng(2), 2
    parts = random.normal(0, 0.1, (5, LAYERS, bands))
    parts[0] = parts[1:].sum(0)
    share = np.array([[0.25, np.nan], [0.75, np.nan], [0, np.nan]])
    variables = with_intervals(
        {
            "log_form_by_block": (("part", "layer", "band"), parts),
            "log_stream_by_block": (("layer", "band"), random.normal(0, 0.1, (LAYERS, bands))),
            "weight_source_by_block": (("source", "layer", "band"), random.normal(0, 1e-3, (3, LAYERS, bands))),
            "log_share_of_model": (("source", "band"), share),
            "log_form_of_model": (("part", "band"), np.array([[0.3, 0.3], *[[0.0, 0.0]] * 4])),
            "weight_form_of_model": (("cell", "band"), np.array([[0.3, 0.3], *[[0.0, 0.0]] * 3])),
            "weight_share_of_model": (("source", "band"), np.where(share == 0.25, -7.0, share)),
        },
        0.02,
    )
    variables["log_noise"] = (("layer", "head", "band"), random.uniform(0.01, 0.02, (LAYERS, HEADS, bands)))
    variables["log_stream_by_block"][1][0] = 0  # block 0 passes the null check
    for end, width in (("_low", -0.02), ("_high", 0.02)):
        variables[f"log_stream_by_block{end}"][1][0] = width
    cells = ["both", "mask", "residual", "neither"]
    return made(
        variables, {"cell": cells, "part": ["total", *PARTS], "source": list(SOURCES), **BANDS, "layer": range(LAYERS)}
    )


def bos_result(replacement: str | int = "mean", *, layers: int = LAYERS, heads: int = HEADS) -> xr.Dataset:
    random = np.random.default_rng([layers, len(str(replacement))])
    variables = with_intervals(
        {
            "removed_of_model": (("band",), np.array([0.35, np.nan])),
            "residual_before_of_model": (("band",), random.uniform(size=2)),
            "residual_after_of_model": (("band",), random.uniform(size=2)),
            "loss_change": (("position",), np.append(random.normal(size=LENGTH - 1), np.nan)),
        },
        0.1,
    )
    for when in ("before", "after"):
        variables[f"alpha_{when}"] = (("layer", "head"), random.uniform(size=(layers, heads)))
        variables[f"sensitivity_{when}"] = (("position",), random.uniform(0.1, 1, LENGTH))
    coords = {**BANDS, "layer": range(layers)}
    return made(variables, coords, replacement=replacement, options={"profile_prompts": 4})


def several(*replacements: str | int) -> xr.Dataset:
    """As the command line joins them: `replacement` leads on all variables but the tokens."""
    results = [bos_result(replacement) for replacement in replacements]
    names = xr.DataArray([str(r) for r in replacements], dims="replacement", name="replacement")
    joined = xr.concat([ds.drop_vars("tokens") for ds in results], names, combine_attrs="drop_conflicts")
    return joined.assign(tokens=results[0]["tokens"])


DRAWN: list[tuple[Callable[..., Figure], Callable[[], xr.Dataset], str]] = [
    (sinks_figure, sinks_result, "sinks"),
    (trajectory_figure, trajectory_result, "trajectory"),
    (leakage_figure, leakage_result, "leakage"),
    (bos_figure, bos_result, "bos-swap"),
]


def labelled(figure: Figure, label: str) -> Axes:
    (found,) = [axes for axes in figure.axes if axes.get_ylabel() == label]
    return found


def drawn(axes: Axes, **look: str) -> list[np.ndarray]:
    """Heights of the lines of a colour, marker or line style."""
    lines = [line for line in axes.lines if all(getattr(line, f"get_{name}")() == x for name, x in look.items())]
    return [np.array(line.get_ydata(), dtype=float) for line in lines]


def ends_of(lines: Any) -> np.ndarray:
    """Corners [line, end, x or y] of a collection of straight lines."""
    return np.array([path.vertices for path in lines.get_paths()], dtype=float)


def text_of(figure: Figure) -> str:
    return str(figure.get_supxlabel()).replace("\n", " ")


# ------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(("draw", "result", "command"), DRAWN)
def test_results_of_another_probe_are_refused(draw, result, command):
    with pytest.raises(InputError, match="no results to draw; give at least one"):
        draw({})
    for _, other, theirs in DRAWN:
        if theirs != command:
            with pytest.raises(InputError, match=rf"the result of 'a' has no .*; give one of headwater {command}$"):
                draw({"fine": result(), "a": other()})
    folded = result().expand_dims(condition=["init"])
    with pytest.raises(InputError, match="the result of 'tiny' has no"):
        draw(folded)


@pytest.mark.parametrize(("draw", "result", "command"), DRAWN)
def test_one_column_per_model_says_what_it_rests_on(draw, result, command, tmp_path):
    before = result()
    figure = draw({"one": before, "two": before}, path=tmp_path / command)
    xr.testing.assert_identical(before, result())
    titles = [axes.get_title() for axes in figure.axes if axes.get_title() in ("one", "two")]
    assert titles == ["one", "two"]
    for part in ("T = 64", "4 prompts", "float32"):
        assert part in text_of(figure)
    png, svg = tmp_path / f"{command}.png", tmp_path / f"{command}.svg"
    assert png.stat().st_size < LARGEST
    assert svg.stat().st_size < LARGEST
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert imread(png).shape[1] > 900


def test_texts_lie_inside_and_clear_of_each_other():
    for draw, result, _ in DRAWN:
        figure = draw({name: result() for name in ("one", "two")})
        figure.draw_without_rendering()
        (caption,) = [text.get_window_extent() for text in figure.texts]
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert box is not None
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
            assert not caption.overlaps(box)


def test_results_as_the_probes_make_them():
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=8, length=40)
    few: dict[str, Any] = {"lags": (1, 2), "bootstrap": 20}
    found = {
        sinks_figure: sinks(model, tokens, pictures=2),
        trajectory_figure: trajectory(model, tokens, starts=8),
        leakage_figure: leakage(model, tokens, **few),
        bos_figure: bos_swap(model, tokens, replacement=5, profile_prompts=1, products=8, **few),
    }
    for draw, ds in found.items():
        figure = draw(ds)
        assert figure.axes[0].get_title() == "tiny-llama"
    legend = labelled(bos_figure(found[bos_figure]), "share removed").figure.axes
    texts = {text.get_text() for axes in legend if (made := axes.get_legend()) for text in made.get_texts()}
    assert "token 5" in texts
    bare = leakage(model, tokens, lags=(1, 2), bootstrap=0)
    assert not labelled(leakage_figure(bare), "leakage (nat²)").collections[1:]  # noise alone, no intervals


# ------------------------------------------------------------------------------------------------------------- sinks


def test_heads_that_read_the_sink_are_outlined():
    ds = sinks_result()
    figure = sinks_figure(ds)
    heads = labelled(figure, "block")
    np.testing.assert_allclose(np.asarray(heads.images[0].get_array()), ds["attends"].values)
    (outlined,) = heads.patches
    corners = np.asarray(outlined.get_path().vertices).reshape(-1, 5, 2)
    places = {(round(y), round(x)) for x, y in corners[:, [0, 2]].mean(1)}
    assert places == set(map(tuple, np.argwhere(ds["selected"].sel(rule="sink-reading").values).tolist()))
    assert places
    assert to_hex(outlined.get_edgecolor()) == VERMILLION.lower()
    assert (np.ptp(corners, axis=1) < 1).all()  # around one cell each
    written = [text.get_text() for text in heads.texts]
    assert written == [f"{value:.2f}".removeprefix("0") for value in ds["attends"].values.ravel()]
    assert heads.get_xlabel() == f"head ({len(places)} of 12 sink-reading)"
    assert "weight on 0 > 0.3 and output read from 0 > 0.35" in text_of(figure)


def test_weights_on_keys_and_shares_of_sinks():
    ds = sinks_result()
    figure = sinks_figure(ds)
    alpha = labelled(figure, r"mean weight $\alpha_k$")
    np.testing.assert_allclose(drawn(alpha, linestyle="-"), ds["alpha"].mean(("prompt", "head")).values)
    np.testing.assert_allclose(drawn(alpha, color=GREY, linestyle="--"), ds["uniform"].values[:1])  # once per window
    assert alpha.get_yscale() == "log"
    rate = labelled(figure, "share that is a sink")
    np.testing.assert_allclose(drawn(rate, color=BLACK), [ds["sink_rate_of_model"].values])
    np.testing.assert_allclose(drawn(rate, color=BLUE), [ds["over_tau_of_model"].values])
    ratio = labelled(figure, "norm, 0 / rest")
    norms = ds["written_norm"]
    expected = (norms.sel(place="sink") / norms.sel(place="rest")).values.ravel()
    np.testing.assert_allclose(np.sort(np.concatenate(drawn(ratio, color=GREEN, marker="s"))), np.sort(expected))
    averaged = ds.assign(alpha=ds["alpha"].mean("prompt"))  # as keys="all" gives it
    again = labelled(sinks_figure(averaged), r"mean weight $\alpha_k$")
    np.testing.assert_allclose(drawn(again, linestyle="-"), ds["alpha"].mean(("prompt", "head")).values)


def test_pictures_are_the_patterns_and_named():
    ds = sinks_result()
    figure = sinks_figure(ds)
    pictures = [axes for axes in figure.axes[0].figure.findobj(Axes) if axes.get_title() in ("0.3", "1.2", "2.1")]
    assert len(pictures) == 3
    for n, picture in enumerate(pictures):
        np.testing.assert_allclose(np.asarray(picture.images[0].get_array()), ds["pattern"].values[n])
    assert "pictures" not in text_of(sinks_figure(sinks_result(pictures=0)))


def test_large_models_and_many_keys_stay_small_and_exact(tmp_path):
    ds = sinks_result(layers=24, heads=14, keys=1000)
    figure = sinks_figure({"one": ds, "two": ds, "three": ds}, path=tmp_path / "large")
    assert (tmp_path / "large.png").stat().st_size < LARGEST
    assert (tmp_path / "large.svg").stat().st_size < LARGEST
    root = ElementTree.parse(tmp_path / "large.svg").getroot()
    assert any("two" in "".join(element.itertext()) for element in root.iter() if element.tag.endswith("text"))
    assert not labelled_first(figure, "block").texts  # no values in so many cells
    pixels = imread(tmp_path / "large.png")[..., :3]
    for color in ("#ffffff", VERMILLION):  # the paper is white, and rare colours are not replaced by others
        assert (np.abs(pixels - to_rgb(color)).max(-1) < 1 / 255).any()
    assert (pixels[:5] == 1).all()


def labelled_first(figure: Figure, label: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_ylabel() == label)


# -------------------------------------------------------------------------------------------------------- trajectory


def test_the_stream_at_position_0_is_drawn_with_and_without_bos():
    ds = steady(trajectory_result())
    figure = trajectory_figure(ds)
    norms = labelled(figure, r"norm $\|h\|_2$")
    for first, color in (("bos", VERMILLION), ("text", BLUE)):
        at = ds.sel(first=first)
        np.testing.assert_allclose(drawn(norms, color=color, linestyle="-"), [at["norm_first"].values])
        np.testing.assert_allclose(drawn(norms, color=color, linestyle="--"), [at["norm_others"].values])
        top = drawn(labelled(figure, "largest $|h|$ at 0 / median"), color=color)
        np.testing.assert_allclose(top, at["top_ratio"].values.T)
    lines = drawn(labelled(figure, "largest $|h|$ at 0 / median"), color=GREY)
    assert sorted(line[0] for line in lines) == [100, 1000]
    cosine = labelled(figure, "cosine of pairs")
    np.testing.assert_allclose(drawn(cosine, color=BLACK), [ds["cosine"].sel(place="position 0").values])
    np.testing.assert_allclose(drawn(cosine, color=VERMILLION), [ds["cosine_with_bos"].values])
    band = np.asarray(cosine.collections[1].get_paths()[0].vertices)[:, 1]
    control = ds["cosine"].sel(place="position 1 behind BOS").values
    assert band.max() == pytest.approx(control.max() + 0.1)
    assert band.min() == pytest.approx(control.min() - 0.1)
    assert "by other text behind it: 0;" in text_of(figure)


def test_models_without_bos_have_no_control():
    ds = trajectory_result().isel(first=[1], place=[0])
    ds["cosine_with_bos"] = ds["cosine_with_bos"] * np.nan
    figure = trajectory_figure({"none": ds})
    legends = [axes.get_legend() for axes in figure.axes]
    texts = {text.get_text() for legend in legends if legend for text in legend.get_texts()}
    assert "text at position 0" in texts
    assert not any("BOS" in text for text in texts)


# ----------------------------------------------------------------------------------------------------------- leakage


def test_bars_are_the_parts_and_negative_ones_hang_down():
    ds = leakage_result()
    figure = leakage_figure(ds)
    for label, name, dim, colors in (
        ("leakage (nat²)", "log_form_by_block", "part", PARTS),
        ("leakage (weight²)", "weight_source_by_block", "source", SOURCES),
    ):
        cell = labelled(figure, label)
        assert cell.get_xlabel() == "block, queries 9-31"
        for entry, color in colors.items():
            bars = [p for p in cell.patches if isinstance(p, Rectangle) and to_hex(p.get_facecolor()) == color.lower()]
            heights = [bar.get_height() for bar in bars]
            np.testing.assert_allclose(heights, ds[name].sel({dim: entry}).isel(band=0).values)
            assert all(bar.get_y() == 0 for bar in bars)
    cell = labelled(figure, "leakage (nat²)")
    total = ds["log_form_by_block"].sel(part="total").isel(band=0).values
    assert any(np.allclose(dots, total) for dots in drawn(cell, marker="o"))
    alone = ds["log_stream_by_block"].isel(band=0).values
    assert any(np.allclose(dots, alone) for dots in drawn(cell, color=ORANGE, marker="D"))
    noise_lines, intervals = (ends_of(lines)[..., 1] for lines in cell.collections[:2])
    noise = ds["log_noise"].isel(band=0).mean("head").values
    np.testing.assert_allclose(noise_lines[:, 0], noise)
    np.testing.assert_allclose(intervals, np.stack([total - 0.02, total + 0.02], -1))


def test_shares_beyond_the_axis_are_arrowheads_and_none_is_said():
    ds = leakage_result()
    log, weight = (
        axes for axes in leakage_figure(ds).axes if axes.get_ylabel() == "share of total"
    )  # in the order of rows
    assert [text.get_text() for text in log.texts] == ["no total"]
    np.testing.assert_allclose(drawn(log, color=BLUE, marker="o"), [[0.25]])
    np.testing.assert_allclose(drawn(log, color=VERMILLION, marker="o"), [[0.75]])
    assert not drawn(log, color=GREEN)  # the log form has no spread
    np.testing.assert_allclose(drawn(weight, color=BLUE, marker="v"), [[SHARES[0]]])
    np.testing.assert_allclose(drawn(weight, color=GREEN, marker="o"), [[0]])


def test_shares_are_drawn_where_the_table_prints_them():
    def share_cells(**changes: Any) -> list[Axes]:
        ds = leakage_result()
        for form in ("log", "weight"):
            ds[f"{form}_share_of_model"][:] = 0.5
        for name, band, value in changes.values():
            ds[name][..., band] = value
        return [axes for axes in leakage_figure(ds).axes if axes.get_ylabel() == "share of total"]

    for cell in share_cells():
        assert not cell.texts
        np.testing.assert_allclose(drawn(cell, color=BLUE, marker="o"), [[0.5, 0.5]])
    log, weight = share_cells(vague=("log_form_of_model_low", 1, -0.1))
    assert [text.get_text() for text in log.texts] == ["no total"]
    np.testing.assert_allclose(drawn(log, color=BLUE, marker="o"), [[0.5]])
    assert not weight.texts
    for cell in share_cells(noisy=("log_stream_by_block_low", 0, 0.01)):  # the null check fails
        assert [text.get_position()[0] for text in cell.texts] == [0]
        np.testing.assert_allclose(drawn(cell, color=BLUE, marker="o"), [[0.5]])


# --------------------------------------------------------------------------------------------------------------- bos


def test_every_replacement_has_its_colour():
    ds = several("mean", "zero", 7)
    figure = bos_figure({"one": ds, "two": bos_result("mean")})
    share = labelled(figure, "share removed")
    assert [drawn(share, color=color, marker="o")[0].tolist() for color in (BLUE, VERMILLION)] == [[0.35], [0.35]]
    dashed = [ends_of(lines) for lines in share.collections if to_hex(lines.get_color()) == GREY]  # pyright: ignore
    np.testing.assert_allclose(np.concatenate(dashed)[..., 1], PUBLISHED)
    np.testing.assert_allclose(np.concatenate(dashed)[..., 0].mean(-1), [0])  # early queries alone
    assert [text.get_text() for text in share.texts] == ["none"]
    change = labelled(figure, r"change of $\alpha_0$")
    expected = (ds["alpha_after"] - ds["alpha_before"]).sel(replacement="zero").values.ravel()
    np.testing.assert_allclose(drawn(change, color=VERMILLION), [expected])
    legends = [axes.get_legend() for axes in figure.axes]
    texts = {text.get_text() for legend in legends if legend for text in legend.get_texts()}
    assert {"mean", "zero", "token 7", "before", "[Ruscio], early"} <= texts


def test_one_replacement_is_drawn_as_one_of_several():
    single, (one,) = bos_result("zero"), [several("zero")]
    for label in ("share removed", r"change of $\alpha_0$", "change of loss (nat)"):
        first, second = (labelled(bos_figure(ds), label) for ds in (single, one))
        np.testing.assert_equal(drawn(first), drawn(second))


def test_loss_and_sensitivity_before_and_after():
    ds = bos_result("random")
    ds["sensitivity_after"][0] = 1e9
    figure = bos_figure(ds)
    loss = labelled(figure, "change of loss (nat)")
    (curve,) = drawn(loss, color=GREEN)
    np.testing.assert_allclose(curve[:8], ds["loss_change"].values[:8])
    assert np.isfinite(curve).all()
    assert loss.get_xscale() == "log"
    sensitivity = labelled(figure, r"$\|J_j\|_F\,/\,\sqrt{d}$")
    after = drawn(sensitivity, color=GREEN, marker="None")[0]
    np.testing.assert_allclose(after, [np.nan, *ds["sensitivity_after"].values[1:]])
    (arrow,) = drawn(sensitivity, color=GREEN, marker="^")
    assert arrow.tolist() == [HIGHEST * float(ds["sensitivity_before"].max())]
    assert sensitivity.get_ylim()[1] < 1e3


# ------------------------------------------------------------------------------------------------------------- style


def test_thinned_curves_keep_the_first_positions_and_all_of_the_mean():
    x, y = np.arange(5000), np.random.default_rng(0).normal(size=(2, 5000))
    places, means = thinned(x, y, most=64, exact=16)
    assert places.size <= 64
    assert (np.diff(places) > 0).all()
    np.testing.assert_array_equal(places[:16], x[:16])
    np.testing.assert_array_equal(means[:, :16], y[:, :16])
    whole = thinned(x, np.ones(5000), most=64, exact=16)[1]
    np.testing.assert_array_equal(whole, np.ones_like(places))
    y[0, 4999] = np.nan
    assert np.isfinite(thinned(x, y)[1]).all()
    np.testing.assert_array_equal(thinned(x[:50], y[:, :50])[1], y[:, :50])


def test_intervals_that_say_nothing_are_pale():
    axes = Figure().add_subplot()
    x, values = np.arange(3.0), np.array([0.5, 0.2, np.nan])
    low, high = np.array([0.4, -9.0, 0.0]), np.array([0.6, 9.0, 1.0])
    points(axes, x, values, (low, high), color=BLUE, limits=(0.0, 1.0))
    certain, vague = axes.collections
    assert ends_of(certain)[..., 1].tolist() == [[0.4, 0.6]]
    assert ends_of(vague)[..., 1].tolist() == [[0.0, 1.0]]
    assert (vague.get_alpha(), certain.get_alpha()) == (0.25, 1.0)
    assert drawn(axes, marker="o")[0].tolist() == [0.5, 0.2]


def test_small_figures_are_saved_as_they_are(tmp_path: Path):
    figure = Figure(figsize=(2, 2))
    figure.add_subplot().plot([0, 1], [0, 0.123456])
    png, svg = save_figure(figure, tmp_path / "small")
    assert imread(png).shape == (340, 340, 4)
    assert "<!--" in svg.read_text(encoding="utf-8")
