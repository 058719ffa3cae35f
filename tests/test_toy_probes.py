"""Every probe on toys of every kind, against patterns and Jacobians written out."""

from typing import Any

import made_toys as toys
import numpy as np
import pytest
import reference
import reference_toys
import torch
from made_toys import LOOKS, TOKENS, close, made, named, own
from torch import Tensor

import probes
from toy.view import Toy


def brute_force(toy: Toy, prompt: Tensor, query: int, readout: str) -> Tensor:
    """||J_j||_F / sqrt(d) for every position of the prompt, one output at a time."""
    source = toy.embed(prompt[None]).clone().requires_grad_()
    out = toy.residual(source)[0, query]
    if readout != "residual":
        out = toy.norm(out)
    if readout == "logits":
        out = toy.unembed(out)
        out = out[out.isfinite()]
    return reference.jacobian_norms(out, source) / toys.WIDTH**0.5


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_exact_jacobians_are_brute_force(look):
    others: list[dict[str, Any]] = [{}, toys.STANDARD, {"residual": False, "head": "mlp", "norm": "layer"}]
    for n, other in enumerate(others):
        toy, query = made(**look, **other), (-1, 1, 6)[(n + LOOKS.index(look)) % 3]
        ds = probes.jacobian(toy, TOKENS[:1], query=query)
        close(ds.sensitivity[0], brute_force(toy, TOKENS[0], query, "residual"), 1e-9)
        for readout in ("normed", "logits") if query == 1 else ():
            ds = probes.jacobian(toy, TOKENS[:1], query=query, readout=readout)
            # Through a square root of eigenvalues, where logits are read out.
            close(ds.sensitivity[0], brute_force(toy, TOKENS[0], query, readout), 1e-6 if readout == "logits" else 1e-9)
            assert ds.attrs["engine"] == ("parts" if toy.parts(0) is not None else "autograd")
        felt = (ds.sensitivity.values > 0).any(0)
        at, prefix = query % toys.LENGTH, toy.spec.prefix or 0
        assert not felt[max(at + 1, prefix) :].any()
        assert felt[at + 1 : prefix].all()  # later positions of a prefix do matter


@pytest.mark.parametrize("look", LOOKS, ids=named)
def test_sinks_are_those_of_patterns_written_out(look):
    toy = made(**look, output_projection=False)
    every = [toy.trace(toy.embed(prompt[None]), attention=True).attention for prompt in TOKENS]
    patterns = [[attention.pattern()[0] for attention in one] for one in every]
    truth = reference.sinks_of_keys(patterns, toy.spec.windows, toy.spec.prefix, threshold=0.3, tau=0.2)
    whole = probes.sinks(toy, TOKENS, keys="all")
    some = probes.sinks(toy, TOKENS, keys=(5, 0, 2))
    for found, of in ((whole.alpha, truth["alpha"].mean(0)), (some.alpha, truth["alpha"][..., [5, 0, 2]])):
        close(found, of)
    for name in ("over_tau", "sink_rate", "uniform"):
        close(whole[name], truth[name])
        close(some[name], truth[name][..., [5, 0, 2]])
    assert 0 < float(whole.over_tau.mean()) < 1
    # Reading, over the queries from 1 on that see position 0.
    seeing = slice(1, toy.architecture.window)
    for layer in range(toys.BLOCKS):
        seen = torch.stack([p[layer][:, seeing] for p in patterns], 1)  # [H, prompt, query, key]
        close(whole.attends[layer], seen[..., 0].mean((1, 2)))
        values = torch.stack([one[layer].value[0] for one in every], 1)  # [H, prompt, T, c]
        read, out = seen[..., :1] * values[:, :, :1], seen @ values
        close(whole.reads[layer], (read.pow(2).sum((1, 2, 3)) / out.pow(2).sum((1, 2, 3))).sqrt())


@pytest.mark.parametrize("look", [toys.CAUSAL[0], toys.CAUSAL[5], *toys.AHEAD[::3]], ids=named)
def test_reactions_of_toys(look):
    toy = made(**look)
    ds = probes.sinks(toy, TOKENS, reacts="zero")
    end = toy.architecture.window or toys.LENGTH
    traces = [view.trace(view.embed(TOKENS), attention=True).attention for view in (toy, probes.swapped(toy, "zero"))]
    for layer in range(toys.BLOCKS):
        before, after = (attention[layer].pattern() for attention in traces)
        close(ds.reacts[layer], (before - after)[:, :, 2:end, 1:].abs().sum(-1).mean((0, 2)) / 2)


@pytest.mark.parametrize("look", LOOKS[::4], ids=named)
def test_position_0_is_closed_under_a_causal_mask_alone(look):
    toy = made(**look)
    ds = probes.trajectory(toy, TOKENS, starts=5)
    later = ds.later_difference.values[0]
    assert later[0] == 0
    mixed = torch.cat([TOKENS[:, :1], TOKENS.roll(-1, 0)[:, 1:]], 1)
    streams, others = (torch.stack(toy.trace(toy.embed(tokens)).residual)[:, :, 0] for tokens in (TOKENS, mixed))
    close(later, (streams - others).abs().amax((1, 2)))
    assert (later[1:] > 1e-3).all() if toy.spec.prefix else not later.any()
    every = [reference_toys.toy_pass(toy.architecture, own(toy), prompt)[0] for prompt in TOKENS]
    close(ds.norm_first[0], np.median([[float(s[0].norm()) for s in streams] for streams in every], 0), 1e-6)
