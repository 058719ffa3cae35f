"""Experiment remarks: distance kernels against a slow twin, weights that do the task on a line, shares, rates."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from toy.experiments import remarks
from toy.experiments.copied import evaluated
from toy.experiments.remarks import CASES, Settings, length_rank
from toy.model import Architecture, Switches, forward, initial
from toy.tasks import Copying
from toy.train import Run, Trained, train


def test_distance_kernels_are_distances():
    a = Architecture(
        blocks=2, heads=2, width=4, length=5, vocabulary=6, outputs=6, positional="learned", position_width=1,
        kernel="distance", readout="distance",
    )  # fmt: skip
    w = {name: 2 * tensor.double() for name, tensor in initial(a, 0).items()}
    assert w["positions"].shape == (5, 1)
    tokens = torch.randint(6, (3, 5), generator=torch.Generator().manual_seed(0))
    weights = {name: tensor[None] for name, tensor in w.items()}
    found = forward(a, weights, Switches.of([a]), tokens[None])[0].log_softmax(-1)
    for row, ids in zip(found, tokens, strict=True):
        x = w["embedding"][ids].clone()
        x[:, 0] += w["positions"][:, 0]
        for layer in range(2):
            q, k, v = (x @ w[f"{layer}.{name}"] for name in "qkv")
            mixed = torch.zeros_like(x)
            for head, i in ((h, i) for h in range(2) for i in range(5)):
                own = slice(2 * head, 2 * head + 2)
                far = torch.stack([(q[i, own] - k[j, own]).square().sum() for j in range(i + 1)])
                mixed[i, own] = (-far / (2 * math.sqrt(2))).softmax(0) @ v[: i + 1, own]
            x = x + mixed @ w[f"{layer}.o"]
        expected = (-(x[-1] - w["unembedding"].T).square().sum(1) / 2).log_softmax(0)
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)  # masks are float32


@pytest.mark.parametrize("case", ["width 1 with distance readout", "width 1 with both by distance"])
def test_weights_on_a_line_do_the_task(case):
    s = Settings(vocabulary=30)
    run = remarks._run(s, CASES[case], 0.01, 0)
    tokens = torch.arange(30.0) - 14.5
    # Tokens move keys by 14.5 at most. By distance, queries of 0 find the key near 0. By inner product, queries far
    # below 0 find the only key that is there, too.
    distance = CASES[case].kernel == "distance"
    found, lost = (0.0, 1000.0) if distance else (-1000.0, 1000.0)
    places = torch.tensor([lost, lost, found, lost])[:, None]
    one = torch.ones(1, 1)
    weights = {"embedding": tokens[:, None], "positions": places, "unembedding": 8 * (tokens + found)[None]}
    weights |= {"0.q": 0 * one if distance else -one, "0.k": one, "0.v": one, "0.o": 8 * one}
    ((found,), (right,)) = evaluated([Trained(run, torch.zeros(1), weights)], 4096)
    assert 0 <= found < 1e-9
    assert right == 1


def test_tokens_are_drawn_by_their_shares():
    task = Copying(5, 4, -2, 1000, zipf=1.0)
    expected = 1 / np.arange(1, 6) / np.sum(1 / np.arange(1, 6))
    np.testing.assert_allclose(task.shares, expected, rtol=1e-6)
    drawn = task.draw(None, torch.Generator().manual_seed(0), 20).inputs
    found = np.bincount(drawn.flatten().numpy(), minlength=5) / drawn.numel()
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / math.sqrt(drawn.numel()))  # four standard errors
    even = replace(task, zipf=0.0)
    np.testing.assert_allclose(even.shares, 0.2)


def test_a_tokens_rate_follows_its_share():
    s = Settings(share_vocabulary=6)
    plain = remarks._run(s, CASES["width 2"], 0.01, 0, vocabulary=6)
    task = Copying(6, 4, -2, zipf=1.0)
    runs = [replace(plain, task=task, by_share=power) for power in (0.0, -0.5, 1.0)]
    fresh = initial(plain.architecture, 0)
    for run, model in zip(runs, train(runs, 1), strict=True):
        # Adam's first step is the rate, whatever the gradient.
        factor = (task.shares / task.shares.mean()) ** run.by_share
        for name, expected in (("embedding", factor[:, None]), ("unembedding", factor), ("0.v", torch.ones(2, 2))):
            moved = (model.weights[name] - fresh[name]).abs()
            torch.testing.assert_close(moved, 0.01 * expected.expand_as(moved), rtol=1e-3, atol=1e-6)


def test_lengths_are_about_the_mean_embedding():
    run = Run(Architecture(width=2, length=4, vocabulary=4, outputs=4), Copying(4, 4, -2, zipf=1.0))
    rows = torch.tensor([[10.0, 0], [-6, 0], [-3, 0], [-1, 0]]) + 50
    assert length_rank(Trained(run, torch.zeros(1), {"embedding": rows})) == pytest.approx(1.0)
    assert length_rank(Trained(run, torch.zeros(1), {"embedding": rows.flip(0)})) == pytest.approx(-1.0)
