"""How far position is read: readings, d', arms and erasures against numpy and plain transformers."""

from __future__ import annotations

from itertools import product
from typing import Any

import families
import made_toys as toys
import numpy as np
import pytest
import torch
from measured import close, complete, drawn_tokens, refused
from test_decode import plain_r2, streams

import probes
from probes.measures.consequences import consequences
from probes.measures.horizon import MEASURE, answer, horizons
from probes.measures.horizon.compute import ARMS, SECOND, d_prime, horizon
from probes.models.view import View

LENGTH, PLACE = 24, 8


def prompts(count: int) -> torch.Tensor:
    return torch.randint(toys.VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def model() -> View:
    return toys.made(positional="rope", norm="rms", feed_forward=True, length=LENGTH)


@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_without_its_mask_a_model_is_plain_transformers_under_a_full_mask(backend):
    tokens, at, given = drawn_tokens(4, 12), torch.arange(12), {"bands": [(4, 10)], "lags": (1, 2), "fresh": 0}
    back = at[:, None] - at
    for name, prefix in product(("mistral", "gemma3_text"), ("-5", "")):  # with windows
        plain = families.model(name, dtype=torch.float64)
        model = probes.load(plain, backend, tokenizer=families.tokenizer(), device="cpu")
        view, mask = probes.edited(model, f"unmasked{prefix}"), dict[str, Any]()
        for kind, window in {"full_attention": 12, "sliding_attention": families.WINDOW}.items():
            seen = (at < (5 if prefix else 12)) | ((back >= 0) & (back < window))
            mask[kind] = torch.zeros(4, 1, 12, 12, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        plain.set_attn_implementation("eager")
        with torch.no_grad():
            found = view.residual(view.embed(tokens))
            of: Any = mask if name == "gemma3_text" else mask["sliding_attention"]
            truth = plain(tokens, attention_mask=of, output_attentions=True)
            close(view.unembed(view.norm(found)), truth.logits, 1e-4, 1e-4)
            assert (found - model.residual(model.embed(tokens))).abs().amax() > 1e-3
    log_a = torch.stack(truth.attentions).log().unflatten(1, (2, 2)).mean(2)  # [layer, half, head, query, key]
    lagged = torch.stack([log_a[..., at[4:11], at[4:11] - lag] for lag in (1, 2)])
    one, other = (lagged - lagged.mean(-1, keepdim=True)).unbind(2)
    found = probes.leakage(model, tokens, unmasked=True, bootstrap=0, **given).null_unmasked.sel(quantile="median")
    close(found, np.median((one * other).mean((0, -1))), 1e-4, 1e-9)
    with refused("lets every query see a prefix"):
        probes.leakage(view, tokens)


def by_layer(x: np.ndarray, unit: np.ndarray, rows: slice) -> np.ndarray:
    """R^2 [prompt, layer] of streams [prompt, layer, position, d] from position 1 on, by numpy alone."""
    z = np.tile(np.log1p(np.arange(1, x.shape[2] + 1)), (len(x), 1))
    return np.stack([plain_r2(x[:, layer], z, unit, rows) for layer in range(x.shape[1])], 1)


def test_arms_are_read_as_numpy_reads_them(model, tmp_path):
    tokens, names = prompts(16), [f"d{n // 2}" for n in range(16)]
    arms = ["as it is", "hidden", SECOND, "unmasked", "fresh"]
    ds = horizon(model, tokens, arms=arms, every=1, place=PLACE, documents=names)
    complete(ds, tmp_path / "horizon.nc")
    twice, unit = tokens.clone(), np.arange(16) // 2
    twice[:, PLACE] = twice[:, 0]
    views: dict[str, Any] = {"as it is": model, SECOND: model, "fresh": model.reinitialized(0)}
    views |= {"hidden": probes.edited(model, "without-0"), "unmasked": probes.edited(model, "unmasked")}
    for arm in ds.arm.values:
        x = streams(views[arm], twice if arm == SECOND else tokens)
        for name, rows in {"4-7": slice(3, 7), "8-15": slice(7 + (arm == SECOND), 15)}.items():
            found = by_layer(x, unit, rows)
            close(ds.r2.sel(arm=arm, octave=name), found.mean(0), 0, 1e-6)
            best = found[np.arange(16), ds.chosen.sel(arm=arm, octave=name).values]
            close(ds.r2_chosen_by_prompt.sel(arm=arm, octave=name), best, 0, 1e-6)
        if arm in ("as it is", SECOND):
            at = ds.sel(arm=arm, distance="4-7")
            close(at.behind_r2, by_layer(x[:, :, PLACE:], unit, slice(3, 7)).mean(0), 0, 1e-6)
    assert "unmasked: " in answer({"toy": ds})[0]


def test_readings_of_a_known_slope_lie_as_far_apart_as_their_noise_says():
    noise, z = np.random.default_rng(0).normal(0, 0.5, (4000, 31)), np.log(np.arange(1, 32))
    found = d_prime(z + noise, [slice(1, 3), slice(7, 15), slice(15, 31)])
    close(found[:2], np.log(2) / 0.5, 0.02)
    assert np.isnan(found[2])  # 2i is beyond the text


def test_an_octave_is_erased_alone_and_by_what_it_knows_itself(model):
    tokens, first, last = prompts(64), 8, 15
    ds = horizon(model, tokens, erase=64, controls=2)
    assert ds.erased_octave.values.tolist()[-1] == "16-23"
    own, other = tokens[::2], tokens[1::2]
    view = probes.erased(model, "direction", reference=other[:, : last + 1], positions=(first, last))
    plain, changed = (one.trace(one.embed(own)).residual for one in (model, view))
    assert torch.equal(plain[1][:, :first], changed[1][:, :first])
    x, z = streams(model, other)[:, 0, first - 1 : last], np.log1p(np.arange(first, last + 1))
    flat = (x - x.mean((0, 1))).reshape(-1, x.shape[-1])
    c = np.tile(z - z.mean(), len(x)) @ flat / len(flat)
    read = np.linalg.pinv(flat.T @ flat / len(flat), hermitian=True) @ c
    here = streams(model, own)[:, 0, first - 1 : last]
    expected = here - ((here - x.mean((0, 1))) @ read)[..., None] * c / (c @ read)
    close(view.prepared[0](torch.from_numpy(here)), expected, 1e-7, 1e-9)
    change = (consequences(view, own)[0] - consequences(model, own)[0])[:, first:last].mean(1)
    close(ds.loss_change.sel(erased_octave="8-15")[::2], change, 1e-6, 1e-9)


def test_horizons_are_sure_and_what_may_be_is_undecided(model):
    ds = horizon(model, prompts(16), every=2)
    for n, (end, says) in enumerate(((7, "up to 7, undecided up to 15"), (23, "up to 23 (the end"))):
        for name, values in {"low": [0, 1, 1, n - 1, n], "high": [0, 1, 1, 1, n]}.items():
            ds[f"r2_chosen_{name}"][:] = [values]
        assert horizons(ds).values.tolist() == [[end, end, max(end, 15)]]
        assert says in answer({"toy": ds})[0]


def test_what_cannot_be_measured_is_refused(model):
    bad: dict[str, Any] = {"arms": ["none"], "place": 2, "erase": 9, "controls": 1}
    for name, says in {"arms": "arm 'none'", "place": "place=2", "erase": "erase=9", "controls": "controls=1"}.items():
        with refused(says):
            horizon(model, prompts(8), **{name: bad[name]})
    with refused("too few for any octave"):
        horizon(model, prompts(8)[:, :8], erase=2)
    with refused("unmasked is of all blocks"):
        probes.edited(model, "unmasked@1")
    assert MEASURE.options(arms="all").values()["arms"] == ARMS
