"""What a value's log odds depend on: gradients against plain passes, held weights, known models, known numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from lookup import Lookup
from torch import Tensor

import probes
from probes.data.recall import Couple, Maker, Rung, read_template
from probes.measures.retrieval import mechanism, retrieval
from probes.measures.retrieval.mechanism import constant_first, traced
from probes.models.behind import Asked
from probes.models.view import Edit, View
from probes.run.progress import Tally

LINES, LINE, VALUE = 4, 6, 2  # lines of so many tokens, the last ones but one the value's
DEPTHS = [0, 2, 3]
# Relative rounding: transformers computes RMS norms in float32, whatever the model's dtype.
NORMS = {"gpt2": 1e-9, "gpt_neox": 1e-9, "llama": 3e-6, "mistral": 3e-6, "gemma2": 3e-6, "qwen3": 3e-6, "gpt_oss": 3e-6}
SMALL: dict[str, Any] = {"pairs": 9, "keys": "apart", "digits": 3, "contexts": 4}
TRACED: dict[str, Any] = {"mechanism": 2, "mechanism_depths": 3, "candidates": 4, "profile_prompts": 2}


@cache
def view(family: str) -> View:
    return probes.load(families.model(family).double())


@cache
def couple(vocabulary: int) -> Couple:
    """Random tokens in the shape of lists; the same values' first tokens twice, so that answers share a beginning."""
    draw = np.random.default_rng(0)
    contexts, questions, answers = [], [], []
    for _ in (0, 1):
        ids = [int(draw.integers(vocabulary)) for _ in range(1 + LINES * LINE)]
        ids[1 + LINE + 3] = ids[1 + 3]
        lines = [tuple(ids[1 + n * LINE : 1 + (n + 1) * LINE]) for n in range(LINES)]
        contexts.append(tuple(ids))
        questions.append(tuple(line[:3] for line in lines))
        answers.append(tuple(line[3 : 3 + VALUE] for line in lines))
    starts = tuple((1 + n * LINE, 1 + n * LINE + 3) for n in range(LINES))
    return Couple(tuple(contexts), tuple(questions), tuple(answers), starts)  # type: ignore[arg-type]


def asked(made: Couple, side: int = 0) -> list[Asked]:
    own = made.answers[side]
    return [Asked(made.questions[side][n], (own[n], *(one for m, one in enumerate(own) if m != n))) for n in DEPTHS]


def plain_odds(model: View, x: Tensor, context: tuple[int, ...], one: Asked, edits: Sequence[Edit] = ()) -> Tensor:
    """The log odds, a plain pass over the whole text for every value."""
    log_p = []
    for answer in one.answers:
        text = torch.tensor([[*context, *one.question, *answer]])
        whole = torch.cat([x, model.embed(text).detach()[:, len(context) :]], 1)
        stream = model.residual(whole, edits=edits)[0, -len(answer) - 1 : -1]
        logits = model.unembed(model.norm(stream)).log_softmax(-1)
        log_p.append(logits[range(len(answer)), list(answer)].sum())
    return log_p[0] - torch.stack(log_p[1:]).logsumexp(0)


def in_parts(gradient: np.ndarray, depth: int) -> np.ndarray:
    """Of the pair, the mean other pair, position 0; from [position, d]."""
    lines = [np.sqrt((gradient[1 + n * LINE : 1 + (n + 1) * LINE] ** 2).sum()) for n in range(LINES)]
    others = [lines[n] for n in range(LINES) if n != depth]
    return np.array([lines[depth], np.mean(others), np.sqrt((gradient[0] ** 2).sum())])


def embedded(model: View, context: tuple[int, ...]) -> tuple[Tensor, float]:
    x = model.embed(torch.tensor([list(context)])).detach().requires_grad_()
    return x, float(x.detach()[0, 1:].pow(2).mean().sqrt())


def measured(model: View, made: Couple) -> dict[str, np.ndarray]:
    return traced(model, made, 0, DEPTHS, asked(made), seed=[1, 2], report=Tally(None))


@pytest.mark.parametrize("family", list(NORMS))
def test_gradients_are_those_of_plain_passes_one_value_at_a_time(family):
    model = view(family)
    made = couple(model.spec.vocabulary)
    found = measured(model, made)
    for n, (depth, one) in enumerate(zip(DEPTHS, asked(made), strict=True)):
        for side, name in enumerate(("sensitivity", "sensitivity_control")):
            x, unit = embedded(model, made.contexts[side])
            expected = plain_odds(model, x, made.contexts[side], one)
            (gradient,) = torch.autograd.grad(expected, x)
            close: Any = {"rtol": NORMS[family], "atol": NORMS[family] * unit * float(gradient.norm())}
            np.testing.assert_allclose(found[name][n], in_parts(unit * gradient[0].numpy(), depth), **close)


def frozen(logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The same weights, those of later queries on key 0 numbers without a history."""
    weights = (logits - log_z).exp()
    first = torch.where(queries > 0, weights[..., :1].detach(), weights[..., :1])
    rest = weights[..., 1:] / weights[..., 1:].sum(-1, keepdim=True).clamp_min(1e-30)  # query 0 sees itself alone
    return torch.cat([first, (1 - first) * rest], -1).clamp_min(1e-300).log(), torch.zeros_like(log_z)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "gemma2", "gpt_oss"])
def test_cut_is_the_derivative_with_weights_on_position_0_frozen(family):
    model = view(family)
    made = couple(model.spec.vocabulary)
    found, depth = measured(model, made), DEPTHS[1]
    x, unit = embedded(model, made.contexts[0])
    held = [Edit("logits", layer, frozen) for layer in range(model.spec.blocks)]
    odds = [plain_odds(model, x, made.contexts[0], asked(made)[1], edits) for edits in ((), held)]
    np.testing.assert_allclose(odds[1].item(), odds[0].item(), rtol=NORMS[family])
    total, cut = (unit * torch.autograd.grad(value, x)[0][0].numpy() for value in odds)
    assert np.abs(total - cut).max() > 1e-3 * np.abs(total).max()  # the cut paths are there
    close: Any = {"rtol": NORMS[family], "atol": NORMS[family] * np.linalg.norm(total)}
    np.testing.assert_allclose(found["cut"][1], in_parts(cut, depth), **close)
    np.testing.assert_allclose(found["through_first"][1], in_parts(total - cut, depth), **close)


@pytest.mark.parametrize("sink", [0.0, 40.0, -40.0, float("-inf")])
def test_held_weights_have_no_derivative_wherever_they_are(sink):
    """Key 0 has all of the weight in float32, none, or is out of the window's reach; query 0 sees itself alone."""
    draw = torch.Generator().manual_seed(0)
    logits, value, cotangent = (torch.randn(1, 2, 5, n, generator=draw) for n in (5, 3, 3))
    logits = logits.masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    logits[:, :, 1:, 0] = sink

    def fast(s: Tensor, v: Tensor) -> Tensor:
        changed, log_z = constant_first(
            s, s.logsumexp(-1, keepdim=True), torch.arange(5)[:, None], torch.arange(5)[None]
        )
        return (changed - log_z).exp() @ v

    def slow(s: Tensor, v: Tensor) -> Tensor:
        first = s.softmax(-1)[:, :, 1:, :1].detach()
        later = first * v[:, :, :1] + (1 - first) * (s[:, :, 1:, 1:].softmax(-1) @ v[:, :, 1:])
        return torch.cat([v[:, :, :1], later], 2)

    def gradients(way: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype) -> list[Tensor]:
        given = [x.to(kind, copy=True).requires_grad_() for x in (logits, value)]
        return [x.double() for x in torch.autograd.grad(way(*given), given, cotangent.to(kind))]

    for kind, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for found, expected in zip(gradients(fast, kind), gradients(slow, torch.float64), strict=True):
            torch.testing.assert_close(found, expected, rtol=close, atol=close)


def test_the_norm_is_of_the_drawn_directions():
    model = view("llama")
    made = couple(model.spec.vocabulary)
    one, context = asked(made)[0], made.contexts[0]
    x, unit = embedded(model, context)
    text = torch.tensor([[*context, *one.question]])
    h = model.residual(torch.cat([x, model.embed(text).detach()[:, len(context) :]], 1))[0, -1]
    scale = unit / h.detach().norm().item()
    draw, squares = np.random.default_rng([1, 2]), []
    for _ in range(mechanism.PRODUCTS):
        number = h @ torch.from_numpy(draw.standard_normal(model.spec.width))
        squares.append(torch.autograd.grad(number, x, retain_graph=True)[0][0].pow(2).sum(-1))
    rooted = torch.stack(squares).mean(0).sqrt()[:, None].numpy()
    np.testing.assert_allclose(measured(model, made)["norm"][0], in_parts(rooted * scale, DEPTHS[0]), rtol=1e-7)


def test_the_norm_behind_lists_is_of_lines_that_are_not_asked_for(monkeypatch):
    """Exact Jacobians, question by question, against 1500 splits: the mean over all questions but the line's own."""
    monkeypatch.setattr(mechanism, "SPLITS", 1500)
    model, depths = view("llama"), range(LINES)
    made = couple(model.spec.vocabulary)
    context, squares = made.contexts[0], np.zeros((2, len(depths)))
    x, unit = embedded(model, context)
    for asks in depths:
        question = made.questions[0][asks]
        text = torch.tensor([[*context, *question]])
        exact = probes.jacobian(model, text, method="exact")["sensitivity"].values[0] ** 2 * model.spec.width
        h = model.residual(torch.cat([x, model.embed(text).detach()[:, len(context) :]], 1))[0, -1].detach()
        for n, depth in enumerate(depths):
            line = exact[1 + depth * LINE : 1 + (depth + 1) * LINE].mean() * unit**2 / float(h @ h)
            squares[:, n] += line / (len(depths) - 1) * (asks != depth), line / len(depths)
    found = mechanism.behind_lists(model, made, 0, seed=[4], report=Tally(None))
    np.testing.assert_allclose(found["lines"], squares[0], rtol=0.1)
    assert not np.allclose(found["lines"], squares[1], rtol=0.1)


def test_shocks_measure_the_changed_model_and_norms_come_alone():
    model = probes.load("tiny-llama")
    plain: dict[str, Any] = {**SMALL, "mechanism": 2, "mechanism_depths": 0, "profile_prompts": 0}
    ds = retrieval(model, **plain, shocks=("released@2", "without-0@1"))
    assert {*ds} - {*retrieval(model, **SMALL)} == {"norm_profile", "norm_shocked", "log_p_shocked"}
    changed = retrieval(probes.edited(model, "without-0@1"), **plain)
    np.testing.assert_array_equal(ds["norm_shocked"][1], changed["norm_profile"])
    np.testing.assert_allclose(ds["log_p_shocked"][1], changed["log_p"][:2], rtol=1e-5)
    np.testing.assert_array_equal(ds["norm_profile"], retrieval(model, **plain | TRACED, seed=0)["norm_profile"])


def test_of_a_lookup_the_pair_is_everything():
    """Its stream is the embedding of the token found: J_j is the identity there and 0 elsewhere."""
    model = Lookup(probes.load("tiny-llama").tokenizer)
    ds = retrieval(model, **SMALL, mechanism=2, profile_prompts=0, mechanism_depths=9)
    assert ds["sensitivity"].dims == ("traced", "traced_depth", "part")
    pair, others, first = (ds["sensitivity"].sel(part=part).values for part in mechanism.PARTS)
    assert (others < 1e-6 * pair).all()
    assert (first < 1e-6 * pair).all()
    assert float(ds["through_first"].max()) == 0
    np.testing.assert_array_equal(ds["cut"], ds["sensitivity"])
    # Elasticity of an identity from a one-hot vector: |J|_F = sqrt(V), rms(x) = 1 / sqrt(V), |h| = 1.
    np.testing.assert_allclose(ds["norm"].sel(part="pair"), 1, atol=0.1)
    assert float(ds["norm"].isel(part=slice(1, 3)).max()) < 1e-6
    assert float(ds["norm_profile"].max()) < 1e-6  # a line that is not asked for is not looked up
    lost = retrieval(Lookup(model.tokenizer, window=45), **SMALL, mechanism=2, profile_prompts=0, mechanism_depths=9)
    reached = ds.attrs["query"] - ds["place"].values < 45
    assert 0 < reached.sum() < 9
    np.testing.assert_array_equal(lost["norm"].sel(part="pair").values > 0.5, np.tile(reached, (2, 1)))


def test_profiles_are_those_of_jacobian_at_the_lines():
    model = probes.load("tiny-llama", dtype="float64")
    ds = retrieval(model, **SMALL, **TRACED, seed=3)
    text = probes.prompts(model, n=2, length=ds.attrs["query"] + 1, seed=3)
    starts = Maker(model, Rung(9, digits=3), read_template("sentences")).couple(3, 0).starts
    line = starts[1][0] - starts[0][0]
    assert ds["place"].values.tolist() == [place for _, place in starts]
    how: dict[str, Any] = {"method": "sketch", "products": mechanism.PROFILE_PRODUCTS, "seed": 3}
    for name, seen in (("profile", model), ("profile_init", model.reinitialized(3))):
        curves = probes.jacobian(seen, text, **how)["elasticity"].values
        lines = [np.sqrt((curves[:, at : at + line] ** 2).mean(1)) for at, _ in starts]
        np.testing.assert_allclose(ds[name].T, lines, rtol=1e-7)
    assert ds["traced_depth"].values.tolist() == [0, 4, 8]
    np.testing.assert_array_equal(retrieval(model, **SMALL, seed=3)["log_p"], ds["log_p"])
