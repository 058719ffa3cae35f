"""Brake and bias, apart and together: against edited views measured by hand, and how interactions are judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from measured import close, drawn_tokens, refused

import probes
from probes.measures.consequences import consequences
from probes.measures.sink_factorial import ARMS, LOSS, OF_LISTS, REST, SETS, answer, judged, sink_factorial


@pytest.fixture(scope="module")
def model() -> Any:
    return probes.load("tiny-llama", dtype="float64", device="cpu")


def test_arms_are_edited_views(model):
    tokens = probes.prompts(model, n=4, length=32)
    found = sink_factorial(model, tokens, blocks=[2], sets=[*SETS, "position 0"], lists=2, asked=4, copies=2)
    plain = consequences(model, tokens)[0][:, 1:].mean(1)
    close(found.loss_before, plain, 1e-9)
    for arm, word in zip(ARMS, ("without-value-0@2", "released@2", "without-0@2"), strict=True):
        view, at = probes.edited(model, word), {"set": "position 0", "arm": arm, "block": 2}
        close(found.loss_change.sel(at), consequences(view, tokens)[0][:, 1:].mean(1) - plain, 1e-9, 1e-12)
        recalled = probes.retrieval(view, contexts=2)
        recalled = (
            (recalled - probes.retrieval(model, contexts=2))[["log_p", "exact"]].sel(depth=[4, 7, 11]).mean("depth")
        )
        close(found.recall_change.sel({**at, "pair": REST}), recalled.log_p, 1e-9, 1e-9)
        close(found.exact_change.sel({**at, "pair": REST}), recalled.exact, 1e-9, 1e-9)
    gained = found.loss_change.sel(set="constant gain", arm="brake off")
    view = probes.edited(model, "gain@2", reference=tokens)
    close(gained[0], consequences(view, tokens)[0][:, 1:].mean(1) - plain, 1e-9)
    assert found.loss_change.sel(arm="brake off").std("set").max() > 0
    assert (found.copy_before < found.loss_before[:2]).all()  # what was read once is told more easily


def synthetic(interaction: float) -> xr.Dataset:
    """A result of 40 documents whose arms cost 0.5 and 0.7 nat, and both together as much more; two lists decide nothing."""
    draw = np.random.default_rng(0)
    change = draw.normal([[[0.5]], [[0.7]], [[0]]], 0.05, (3, 2, 40))[None]
    change[0, 2] += change[0, 0] + change[0, 1] + [[0], [interaction]]
    dims = ("set", "arm", "block", "prompt")
    recall = (*dims[:3], "list", "pair"), np.zeros((1, 3, 2, 2, 2))
    coords = {"set": ["position 0"], "arm": list(ARMS), "block": [0, 8], "pair": list(OF_LISTS)}
    return xr.Dataset({"loss_change": (dims, change), "recall_change": recall}, coords)


@pytest.mark.parametrize(("interaction", "says"), [(-0.9, "cost less"), (0.9, "cost more"), (0.0, "undecided")])
def test_interactions_are_judged_on_the_half_that_did_not_choose_the_block(interaction, says):
    ds = synthetic(interaction)
    block, found, sure = judged(ds)[LOSS, "position 0"]
    assert sure == bool(interaction)
    assert block == 8 or not interaction
    assert found.low < interaction < found.high
    own = ds.loss_change.sel(block=block).isel(set=0, prompt=slice(1, None, 2)).mean("prompt").values
    close(found.value, own[2] - own[0] - own[1], 1e-9)
    assert says in answer({"model": ds})[0]


def test_what_cannot_be_measured_is_refused(model):
    tokens = drawn_tokens(2, 12)
    for given, says in {"sets": "set 'key 2'", "blocks": "block 6", "copies": "copies=3", "lists": "even"}.items():
        bad: dict[str, Any] = {"sets": ["key 2"], "blocks": [6], "copies": 3, "lists": 3}
        with refused(says):
            sink_factorial(model, tokens, **{"lists": 0, given: bad[given]})


def test_a_second_sink_is_the_first_token_once_more(model):
    """Its arms act on the key at the place, of prompts whose token there is put, which is no target."""
    tokens = probes.prompts(model, n=3, length=24)
    found = sink_factorial(model, tokens, blocks=[1], lists=0, place=10)
    there = torch.cat([tokens[:, :10], tokens[:, :1], tokens[:, 11:]], 1)
    counted = np.delete(np.arange(1, 23), 8)  # the loss of position 9 is that of the token at 10
    plain = consequences(model, there)[0][:, counted].mean(1)
    close(found.loss_before, plain, 1e-9)
    for arm, word in zip(ARMS, ("without-value-10@1", "released-10@1", "without-10@1"), strict=True):
        changed = consequences(probes.edited(model, word), there)[0][:, counted].mean(1) - plain
        close(found.loss_change.sel(set="second sink", arm=arm, block=1), changed, 1e-9, 1e-12)
    with refused("place=23 is out of range; give 2 to 22"):
        sink_factorial(model, tokens, blocks=[1], lists=0, place=23)
