"""Position read off the stream and erased: against plain twins, for models whose answer is known, and behind a context."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import made_toys as toys
import numpy as np
import pytest
import torch
import xarray as xr
from commands import bad_input, call
from measured import complete
from torch import Tensor

import probes
from probes.measures.consequences import consequences
from probes.measures.decode import MEASURE, acting, controls, parse_erase
from probes.measures.decode.compute import chosen
from probes.measures.decode.ridge import STRENGTHS, targets
from probes.models.erase import cosines, log_position
from probes.models.view import View
from toy.model import initial
from toy.view import Toy

LENGTH, VOCABULARY, ASKED = toys.LENGTH, toys.VOCABULARY, 3
QUICK: dict[str, Any] = {"leakage": False, "recall": 0, "controls": 2}


def prompts(count: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def streams(model: View, tokens: Tensor) -> np.ndarray:
    """[prompt, layer, position, d], position 0 left out."""
    found = [torch.stack([x[0, 1:] for x in model.trace(model.embed(row[None])).residual]) for row in tokens]
    return torch.stack(found).double().numpy()


@cache
def pointer() -> Toy:
    """Copies the token at position 3 by its learned absolute position: one head attends there, whatever the tokens are."""
    width = LENGTH + 2 * VOCABULARY  # one-hot positions, one-hot tokens, what the head writes
    a = toys.architecture(blocks=1, heads=1, width=width, positional="learned", norm="none", feed_forward=False)
    weights = {name: torch.zeros_like(x).double() for name, x in initial(a, 0).items()}
    place, token, written = range(LENGTH), range(LENGTH, LENGTH + VOCABULARY), range(LENGTH + VOCABULARY, width)
    weights["positions"][:, place] = torch.eye(LENGTH).double()
    weights["embedding"][:, token] = torch.eye(VOCABULARY).double()
    weights["0.q"][place, 0] = 20 * width**0.5
    weights["0.k"][ASKED, 0] = 1
    for n in range(VOCABULARY):
        weights["0.v"][token[n], n] = weights["0.o"][n, written[n]] = 1
        weights["unembedding"][written[n], n] = 10
    return Toy(a, weights)


def test_absolute_positions_are_read_and_what_needs_them_is_destroyed():
    ds = probes.decode(pointer(), prompts(48), rank=LENGTH, **QUICK)
    assert ds.octave.values.tolist() == ["1-11", "2-3", "4-7", "8-11"]
    assert float(ds.r2.min()) > 0.999 > 0.99 > float(ds.r2_chosen_shuffled.max())
    assert float(ds.r2_shuffled_low.max()) < 0.05
    ranks = ds["rank"].sel(layer=0)
    assert float(ranks.sel(intervention="means all")) == float(ranks.sel(intervention="random all")) >= 10
    at = ds.sel(intervention="means all")
    assert float(at.kl_low) > 1
    assert float(at.r2_last) < 0.3 < 0.99 < float(ds.r2_last.sel(intervention="none"))
    assert float(ds.r2_last.sel(intervention="direction all")) < 0.1
    sizes = ds["removed"].sel(intervention=["means all", "random all"])
    np.testing.assert_allclose(sizes[0], sizes[1])


def test_position_is_read_in_the_octaves_that_have_it():
    """log(1 + i) stands in the stream up to position 31; beyond, the stream knows that it is beyond, and nothing else."""
    a = toys.architecture(blocks=1, heads=1, width=5, length=128, positional="learned", norm="none", feed_forward=False)
    weights = {name: torch.zeros_like(x).double() for name, x in initial(a, 0).items()}
    places = torch.arange(128).double()
    weights["positions"][:, 0] = torch.where(places < 32, places.log1p(), 0.0)
    weights["positions"][:, 1] = (places < 32).double()
    weights["embedding"][:, 2:] = torch.randn(VOCABULARY, 3, generator=torch.Generator().manual_seed(0)).double()
    tokens = torch.randint(VOCABULARY, (16, 128), generator=torch.Generator().manual_seed(1))
    ds = probes.decode(Toy(a, weights), tokens, erase=())
    assert ds.octave.values.tolist() == ["1-127", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127"]
    r2, high = ds.r2_chosen.values, ds.r2_chosen_high.values
    logs = np.log1p(np.arange(1, 128))
    # 0.86: the first ones make it.
    assert r2[0] == pytest.approx(1 - 96 * logs[31:].var() / (127 * logs.var()), abs=0.01)
    assert (r2[1:5] > 0.99).all()
    assert (np.abs(r2[5:]) < 0.02).all()
    assert (high[5:] < 0.05).all()


def test_the_layer_is_chosen_on_other_documents():
    r2, unit = np.random.default_rng(0).normal(size=(16, 3, 2)), np.arange(16) // 2
    for n in range(16):
        others = [m for m in range(16) if unit[m] % 2 == unit[n] % 2 and unit[m] // 2 % 2 != unit[n] // 2 % 2]
        assert chosen(r2, unit)[n].tolist() == r2[others].mean(0).argmax(0).tolist()


def test_what_the_direction_costs_beyond_its_controls():
    """Documents alone, then controls alone: half-widths by Student's t, and both in quadrature."""
    draw, t7, t3 = np.random.default_rng(0), 2.3646, 3.1824
    own, of = draw.normal(1.0, 0.1, 8), np.array([0.2, 0.3, 0.1, 0.2])
    losses = {"loss_by_prompt": (("intervention", "prompt"), [np.zeros(8), own])}
    losses |= {"control_loss_change_by_prompt": (("place", "control", "prompt"), np.tile(of[None, :, None], (1, 1, 8)))}
    ds = xr.Dataset(losses, {"intervention": ["none", "direction all"], "place": ["all"]})
    one, more = controls(ds, "all")
    scatter = t3 * of.std(ddof=1) * np.sqrt(1 + 1 / 4)
    assert one[:3] == pytest.approx((0.2, 0.2 - scatter, 0.2 + scatter), rel=1e-4)
    assert more.value == pytest.approx(own.mean() - 0.2)
    assert more.high - more.value == pytest.approx(np.hypot(t7 * own.std(ddof=1) / 8**0.5, scatter), rel=1e-4)


def test_without_encoding_and_mask_nothing_knows_of_position():
    model = toys.made(mask="full", positional="none", norm="rms", feed_forward=True)
    ds = probes.decode(model, prompts(64), **QUICK)
    assert np.abs(ds.r2.values).max() < 0.02
    assert (ds.r2_low.values < 0.005).all()
    assert (ds["rank"].sel(intervention="means all").values[:-1] < 1).all()  # at most a false one in one half
    assert abs(float(ds.loss_change.sel(intervention="direction all"))) < 0.05


def plain_fit(x: np.ndarray, z: np.ndarray, strength: float) -> tuple[np.ndarray, float]:
    centred = x - x.mean(0)
    s = centred.T @ centred
    ridge = strength * np.trace(s) / len(s) * np.eye(len(s))
    w = np.linalg.solve(s + ridge, centred.T @ (z - z.mean()))
    return w, float(z.mean() - w @ x.mean(0))


def plain_reader(parts: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    best, chosen = np.inf, 0.0
    for strength in STRENGTHS:
        error = 0.0
        for (x, z), (other, truth) in (parts, parts[::-1]):
            w, constant = plain_fit(x, z, strength)
            error += float(np.sum((truth - np.clip(other @ w + constant, z.min(), z.max())) ** 2))
        if error <= best * (1 + 1e-9):
            best, chosen = error, strength
    (x, z), (other, truth) = parts
    return plain_fit(np.concatenate([x, other]), np.concatenate([z, truth]), chosen), best, chosen


def plain_scaled(whole: Any, own: Any, found: Any, least: float, chosen: float) -> tuple[np.ndarray, float]:
    """The reader of all positions, scaled to an octave by what it predicts of the other part, if that reads better."""
    pairs = list[tuple[np.ndarray, np.ndarray]]()
    for fitted, (x, z) in zip(whole[::-1], own, strict=True):
        w, constant = plain_fit(*fitted, chosen)
        p = x @ w + constant
        pairs.append((p - p.mean(), z - z.mean()))
    p, z = map(np.concatenate, zip(*pairs, strict=True))
    scale = max(p @ z / (p @ p), 0)
    if z @ z - scale * (p @ z) >= least:
        return found
    (x, z), (w, _) = (
        map(np.concatenate, zip(*own, strict=True)),
        plain_fit(*map(np.concatenate, zip(*whole, strict=True)), chosen),
    )
    return scale * w, float(z.mean() - scale * w @ x.mean(0))


def plain_r2(x: np.ndarray, every: np.ndarray, unit: np.ndarray, rows: slice) -> np.ndarray:
    """Of each prompt, in some rows, of streams [prompt, position, d] and targets [prompt, position]."""
    by_prompt, z = np.zeros(len(x)), every[:, rows]
    for half in (0, 1):
        of = [[n for n in range(len(x)) if unit[n] % 2 == half and unit[n] // 2 % 2 == part] for part in (0, 1)]
        sets = [
            [(x[some][:, at].reshape(-1, x.shape[-1]), np.ravel(every[some][:, at])) for some in of]
            for at in (slice(None), rows)
        ]
        (w, constant), least, _ = plain_reader(sets[1])
        if z.shape[1] < x.shape[1]:  # an octave
            w, constant = plain_scaled(*sets, (w, constant), least, plain_reader(sets[0])[2])
        for n in np.flatnonzero(unit % 2 != half):
            left = z[n] - np.clip(x[n, rows] @ w + constant, z[n].min(), z[n].max())
            by_prompt[n] = 1 - np.sum(left**2) / np.sum((z[n] - z[n].mean()) ** 2)
    return by_prompt


def test_cross_fitted_readers_are_those_of_plain_loops(tmp_path, monkeypatch):
    model, tokens = toys.made(positional="learned", norm="rms", feed_forward=True), prompts(20)
    names = [f"d{n // 2}" for n in range(20)]
    ds = probes.decode(model, tokens, erase=(), documents=names, seed=4)
    complete(ds, tmp_path / "decode.nc")
    found, unit = streams(model, tokens), np.arange(20) // 2
    every, octaves = targets(LENGTH, range(20), 4, torch.device("cpu")).numpy(), [(0, 11), (1, 3), (3, 7), (7, 11)]
    cases = [(0, "r2", n) for n in range(4)] + [(1, "r2_shuffled", 0)] + [(2, "r2_shuffled", n) for n in (1, 2, 3)]
    for target, variable, octave in cases:
        rows = slice(*octaves[octave])
        z = every[:, rows, target]
        assert np.allclose(np.sort(z[7]), np.log(1 + np.arange(1, LENGTH))[rows])
        for layer in range(toys.BLOCKS + 1):
            by_prompt = plain_r2(found[:, layer], every[..., target], unit, rows)
            assert float(ds[variable][layer, octave]) == pytest.approx(by_prompt.mean(), abs=1e-6)
            if variable == "r2":
                np.testing.assert_allclose(ds.r2_by_prompt[:, layer, octave], by_prompt, atol=1e-6)
    best = np.take_along_axis(ds.r2_by_prompt.values, ds.chosen.values[:, None], 1)[:, 0]
    np.testing.assert_array_equal(ds.r2_chosen_by_prompt, best)
    np.testing.assert_allclose(ds.r2_chosen, best.mean(0))
    monkeypatch.setattr("probes.measures.decode.compute.SUMS_BYTES", 1)  # a pass for every layer
    again = probes.decode(model, tokens, erase=(), documents=names, seed=4)
    np.testing.assert_allclose(again.r2, ds.r2, rtol=0, atol=1e-12)


def test_the_direction_is_least_squares_concept_erasure():
    model, reference = toys.made(positional="learned"), prompts(12)
    x = streams(model, reference)[:, 1].reshape(-1, toys.WIDTH)
    z = np.tile(np.log(1 + np.arange(1, LENGTH)), 12)
    mean, cov = x.mean(0), np.cov(x.T, bias=True)
    sizes, axes = np.linalg.eigh(cov)
    whitening = axes @ np.diag(sizes**-0.5) @ axes.T
    whitened = whitening @ ((x - mean).T @ (z - z.mean()) / len(z))
    onto = np.outer(whitened, whitened) / (whitened @ whitened)
    expected = x - (x - mean) @ (np.linalg.inv(whitening) @ onto @ whitening).T

    view = probes.erased(model, "direction", layer=1, reference=reference)
    eraser = view.prepared[1]
    found = eraser(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    moved = np.square(found - x).sum() / np.square(x - mean).sum()
    assert eraser.removed == pytest.approx(moved, rel=1e-9)
    # As the pass has it: position 0 stays, the block before is as it was.
    traced, plain = (one.trace(one.embed(reference[:1])).residual for one in (view, model))
    assert torch.equal(traced[1], plain[1])
    stream = plain[1].clone()
    stream[:, 1:] = eraser(stream[:, 1:])
    torch.testing.assert_close(traced[2], model.trace(model.embed(reference[:1])).blocks[1](stream), rtol=0, atol=1e-12)


def test_all_blocks_read_streams_without_the_direction():
    """Each is estimated behind the changes of those before it; its controls are as large, and along cosines of i."""
    model, reference = toys.made(positional="rope", norm="rms", feed_forward=True), prompts(16)
    view = probes.erased(model, "direction", layer="all", reference=reference, seed=2)
    logs = log_position(LENGTH)
    z = logs.repeat(16)
    traced = [view.trace(view.embed(row[None])).residual for row in reference]  # before each block's change
    for layer in range(toys.BLOCKS):
        x = torch.cat([view.prepared[layer](streams[layer][0, 1:]) for streams in traced])
        covariance = (x - x.mean(0)).T @ (z - z.mean()) / len(z)
        assert float(covariance.abs().max()) < 1e-10
    control, y = probes.erased(model, "cosines", reference=reference, seed=2, like=view), cosines(logs, 2)
    assert abs(float(y @ (logs - logs.mean()))) < 1e-12
    assert not torch.allclose(y, cosines(logs, 3))
    for layer, eraser in control.prepared.items():
        assert eraser.removed == pytest.approx(view.prepared[layer].removed, rel=1e-12)
    x, first = torch.from_numpy(streams(model, reference)[:, 0]).flatten(0, 1), control.prepared[0]
    moved, whole = x - first(x), (x - x.mean(0)).square().sum()
    assert float(moved.square().sum() / whole) == pytest.approx(first.removed, rel=1e-9)
    covariance = (x - x.mean(0)).T @ y.repeat(16)
    assert float(torch.cosine_similarity(first.write[0], covariance, dim=0)) == pytest.approx(1, abs=1e-9)
    left = covariance - (moved / first.scale).T @ y.repeat(16)
    assert float(left.abs().max()) < 1e-9  # what is taken once is what a reader of y finds


def test_spans_are_projected_out():
    model, reference = pointer(), prompts(40)
    made = {}
    for what in ("means", "random"):
        made[what] = one = probes.erased(model, what, layer=0, reference=reference, rank=4, seed=3).prepared[0]
        assert one.rank == 4
        torch.testing.assert_close(one.write @ one.read, one.scale * torch.eye(4).double(), rtol=0, atol=1e-10)
        x = torch.from_numpy(streams(model, reference)[:, 0]).flatten(0, 1)
        gone = (x - one(x)).square().sum() / (x - x.mean(0)).square().sum()
        assert one.removed == pytest.approx(float(gone), rel=1e-9)
        left = (1 - one.scale) * (x - one.mean) @ one.read
        torch.testing.assert_close((one(x) - one.mean) @ one.read, left, rtol=0, atol=1e-10)
    assert made["means"].scale == 1 != made["random"].scale
    assert made["means"].removed == pytest.approx(made["random"].removed)
    by_position = x.unflatten(0, (len(reference), -1)).mean(0) - x.mean(0)
    held = {what: float(((by_position @ one.read).norm() / by_position.norm()).square()) for what, one in made.items()}
    assert held["means"] > 0.3 > 2 * held["random"]
    again = probes.erased(model, "random", layer=0, reference=reference, rank=4, seed=4).prepared[0]
    assert not torch.allclose(again.read, made["random"].read)
    fewer = probes.erased(model, "means", layer=0, reference=reference, rank=2)
    like = probes.erased(model, "random", layer=0, reference=reference, rank=4, like=fewer)
    # Fresh weights have means of their own.
    assert [view.prepared[0].rank for view in (like, like.reinitialized(1))] == [2, 4]


def test_outcomes_are_measured_on_the_documents_that_were_not_used():
    model, tokens = toys.made(positional="learned", norm="rms", feed_forward=True), prompts(16)
    ds = probes.decode(
        model, tokens, erase=(1,), rank=2, controls=2, bands=toys.BANDS, lags=toys.LAGS, bootstrap=10, recall=0, seed=5
    )
    assert ds.intervention.values.tolist() == ["none", "means 1", "random 1", "direction 1"]
    plain, _ = consequences(model, tokens)
    np.testing.assert_allclose(ds.loss_by_prompt[0], plain[:, 1:].mean(1), rtol=1e-9)
    for half in (0, 1):
        own, others = tokens[half::2], tokens[1 - half :: 2]
        view = probes.erased(model, "means", layer=1, reference=others, rank=2, seed=5 + half)
        loss, kl = consequences(view, own, model)
        assert kl is not None
        at = ds.sel(intervention="means 1")
        np.testing.assert_allclose(at.loss_by_prompt[half::2], loss[:, 1:].mean(1), rtol=1e-9)
        np.testing.assert_allclose(at.kl_by_prompt[half::2], kl[:, 1:].mean(1), rtol=1e-9)
        # Readers anew: the other part of the same half, through the changed model, as `decode` of it alone would.
        for part in (0, 1):
            rows = streams(view, own)[:, -1]
            z = np.log(1 + np.arange(1, LENGTH))
            fit = [[n for n in range(8) if n % 2 != part and n // 2 % 2 == eighth] for eighth in (0, 1)]
            (w, constant), *_ = plain_reader([(np.concatenate(rows[some]), np.tile(z, len(some))) for some in fit])
            left = [np.sum((z - np.clip(rows[n] @ w + constant, z[0], z[-1])) ** 2) for n in range(part, 8, 2)]
            expected = 1 - np.array(left) / np.sum((z - z.mean()) ** 2)
            np.testing.assert_allclose(at.r2_last_by_prompt[half::2][part::2], expected, atol=1e-6)
    for half in (0, 1):  # one function of i for both halves
        own, others = tokens[half::2], tokens[1 - half :: 2]
        for control in (0, 1):
            loss, _ = consequences(probes.erased(model, "cosines", layer=1, reference=others, seed=5 + control), own)
            found = ds.control_loss_change_by_prompt[0, control, half::2] + ds.loss_by_prompt[0, half::2]
            np.testing.assert_allclose(found, loss[:, 1:].mean(1), rtol=1e-9)
    assert float(ds.loss_change[1]) == pytest.approx(float((ds.loss_by_prompt[1] - ds.loss_by_prompt[0]).mean()))
    how: dict[str, Any] = {"bands": toys.BANDS, "lags": toys.LAGS, "bootstrap": 0, "fresh": 0}
    leaks = [probes.leakage(model, tokens[half::2], **how).steady_stream_of_model.values for half in (0, 1)]
    np.testing.assert_allclose(ds.residual[0], np.mean(leaks, axis=0), rtol=1e-6)
    assert (ds.residual_change[0] == 0).all()
    assert (ds.residual_low[1] <= ds.residual_high[1]).all()


def test_an_erasure_of_nothing_has_no_effect_to_show():
    """A rank of 0 says that no span was found, not that position is not used."""
    model = toys.made(positional="learned", norm="rms", feed_forward=True)
    ds = probes.decode(model, prompts(8), rank=2, **QUICK)
    assert "means all" in acting(ds)["intervention"]
    ds["rank"].loc[{"intervention": "means all"}] = [0, 0, np.nan]
    (row,) = (row for row in MEASURE.tables({"toy": ds})[0].rows if row[1] == "means all")
    assert set(row[4:]) == {"-"}
    assert "means all" not in acting(ds)["intervention"]
    ds["rank"][:] = 0
    assert "nothing is erased" in MEASURE.answer({"toy": ds})[0]


def test_the_command_measures_recall(monkeypatch, capsys, tmp_path):
    words = f"decode tiny-llama --erase 3 --controls 2 --prompts 8 --length 16 --no-leakage --recall 4 --out {tmp_path}"
    assert call(monkeypatch, *words.split(), "--device", "cpu") == 0
    ds = probes.load_result(tmp_path / "decode.nc")
    assert ds.recall_log_p.shape == ds.recall_exact.shape == (4,)
    assert ds.attrs["not_measured"] == ""
    assert "without the direction 3 the loss changes by" in " ".join(capsys.readouterr().out.split())
    assert "Position in the stream" in (tmp_path / "decode.md").read_text(encoding="utf-8")


def test_what_cannot_be_measured_is_said():
    left = probes.decode(toys.made(mask="full"), prompts(16), rank=2)
    assert "lets every query see a prefix" in left.attrs["not_measured"]
    assert "has no tokenizer" in left.attrs["not_measured"]
    assert not {"residual", "recall_log_p"} & set(left)


def test_what_cannot_be_decoded_is_refused():
    toy, tokens = toys.made(), prompts(8)
    wrong: Any = "mean"
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: parse_erase("1,x"), "erase '1,x' names no blocks"),
        (lambda: probes.decode(toy, tokens[:7]), "holding some out takes more than 7 prompts"),
        (lambda: probes.decode(toy, tokens, documents=["a"]), "1 document named for 8 prompts"),
        (lambda: probes.decode(toy, tokens, erase=(2,)), "layer '2' does not exist; toy has blocks 0 to 1"),
        (lambda: probes.decode(toy, tokens, erase=(1, 1)), "erase 1, 1 repeats one"),
        (lambda: probes.decode(toy, tokens, recall=6), "recall=6 is no multiple of 4"),
        (lambda: probes.decode(toy, tokens, controls=1), "controls=1 have no distribution"),
        (lambda: probes.erased(toy, wrong, reference=tokens), "erasure 'mean' is unknown; give means, random"),
        (lambda: probes.erased(toy, reference=tokens[:1]), "reference has shape [1, 12]; give at least 2 prompts"),
    ]
    for refused, said in calls:
        with bad_input(said):
            refused()
    assert (parse_erase("off"), parse_erase("all, 0,12")) == ((), ("all", 0, 12))
