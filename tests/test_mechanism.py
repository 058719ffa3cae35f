"""The norm behind lists: gradients against plain passes, exact Jacobians, a known model; shocks and profiles."""

from __future__ import annotations

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
from probes.measures.retrieval.mechanism import Differentiable
from probes.models.view import View
from probes.run.progress import Tally

LINES, LINE, VALUE = 4, 6, 2  # lines of so many tokens, the last ones but one the value's
# Relative rounding: transformers computes RMS norms in float32, whatever the model's dtype.
NORMS = {"gpt2": 1e-9, "gpt_neox": 1e-9, "llama": 3e-6, "mistral": 3e-6, "gemma2": 3e-6, "qwen3": 3e-6, "gpt_oss": 3e-6}
SMALL: dict[str, Any] = {"pairs": 9, "keys": "apart", "digits": 3, "contexts": 4}


@cache
def view(family: str) -> View:
    return probes.load(families.model(family).double())


@cache
def couple(vocabulary: int) -> Couple:
    """Random tokens in the shape of lists."""
    draw = np.random.default_rng(0)
    contexts, questions, answers = [], [], []
    for _ in (0, 1):
        ids = [int(draw.integers(vocabulary)) for _ in range(1 + LINES * LINE)]
        lines = [tuple(ids[1 + n * LINE : 1 + (n + 1) * LINE]) for n in range(LINES)]
        contexts.append(tuple(ids))
        questions.append(tuple(line[:3] for line in lines))
        answers.append(tuple(line[3 : 3 + VALUE] for line in lines))
    starts = tuple((1 + n * LINE, 1 + n * LINE + 3) for n in range(LINES))
    return Couple(tuple(contexts), tuple(questions), tuple(answers), starts)  # type: ignore[arg-type]


def embedded(model: View, context: tuple[int, ...]) -> tuple[Tensor, float]:
    x = model.embed(torch.tensor([list(context)])).detach().requires_grad_()
    return x, float(x.detach()[0, 1:].pow(2).mean().sqrt())


def last(model: View, x: Tensor, context: tuple[int, ...], question: tuple[int, ...]) -> Tensor:
    """The last stream of a plain pass over the whole text, whose context has the embeddings x."""
    text = torch.tensor([[*context, *question]])
    return model.residual(torch.cat([x, model.embed(text).detach()[:, len(context) :]], 1))[0, -1]


@pytest.mark.parametrize("family", list(NORMS))
def test_gradients_are_those_of_plain_passes_one_question_at_a_time(family):
    """Four questions behind two copies of a context: every copy has two of the sums."""
    model = view(family)
    made = couple(model.spec.vocabulary)
    z = torch.from_numpy(np.random.default_rng(0).standard_normal(model.spec.width))
    ran = Differentiable(model, made.contexts[0], 2)
    h = ran.streams(made.questions[0] * 2)[:, -1].unflatten(0, (2, -1))
    x, unit = embedded(model, made.contexts[0])
    for n, found in enumerate(ran.gradients([h[n % 2, n : n + 1] @ z for n in range(LINES)])):
        (expected,) = torch.autograd.grad(last(model, x, made.contexts[0], made.questions[0][n]) @ z, x)
        close: Any = {"rtol": NORMS[family], "atol": NORMS[family] * unit * float(expected.abs().max())}
        torch.testing.assert_close(found, unit * expected[0], **close)


def test_the_norm_behind_lists_is_of_lines_that_are_not_asked_for(monkeypatch):
    """Exact Jacobians, question by question, against 1500 splits: the mean over all questions but the line's own."""
    monkeypatch.setattr(mechanism, "SPLITS", 1500)
    model, depths = view("llama"), range(LINES)
    made = couple(model.spec.vocabulary)
    context, squares = made.contexts[0], np.zeros((2, len(depths)))
    x, unit = embedded(model, context)
    for asks in depths:
        text = torch.tensor([[*context, *made.questions[0][asks]]])
        exact = probes.jacobian(model, text, method="exact")["sensitivity"].values[0] ** 2 * model.spec.width
        h = last(model, x, context, made.questions[0][asks]).detach()
        for n, depth in enumerate(depths):
            line = exact[1 + depth * LINE : 1 + (depth + 1) * LINE].mean() * unit**2 / float(h @ h)
            squares[:, n] += line / (len(depths) - 1) * (asks != depth), line / len(depths)
    found = mechanism.behind_lists(model, made, 0, seed=[4], report=Tally(None))
    np.testing.assert_allclose(found["norm"] ** 2, squares[0], rtol=0.1)
    assert not np.allclose(found["norm"] ** 2, squares[1], rtol=0.1)


def test_shocks_measure_the_changed_model_and_norms_come_alone():
    model = probes.load("tiny-llama")
    plain: dict[str, Any] = {**SMALL, "mechanism": 2, "profile_prompts": 0}
    ds = retrieval(model, **plain, shocks=("released@2", "without-0@1"))
    assert {*ds} - {*retrieval(model, **SMALL)} == {"norm_profile", "norm_shocked", "log_p_shocked"}
    changed = retrieval(probes.edited(model, "without-0@1"), **plain)
    np.testing.assert_array_equal(ds["norm_shocked"][1], changed["norm_profile"])
    np.testing.assert_allclose(ds["log_p_shocked"][1], changed["log_p"][:2], rtol=1e-5)


def test_of_a_lookup_no_line_counts_that_is_not_asked_for():
    ds = retrieval(Lookup(probes.load("tiny-llama").tokenizer), **SMALL, mechanism=2, profile_prompts=0)
    assert float(ds["norm_profile"].max()) < 1e-6


def test_profiles_are_those_of_jacobian_at_the_lines():
    model = probes.load("tiny-llama", dtype="float64")
    ds = retrieval(model, **SMALL, mechanism=2, profile_prompts=2, seed=3)
    text = probes.prompts(model, n=2, length=ds.attrs["query"] + 1, seed=3)
    starts = Maker(model, Rung(9, digits=3), read_template("sentences")).couple(3, 0).starts
    line = starts[1][0] - starts[0][0]
    assert ds["place"].values.tolist() == [place for _, place in starts]
    how: dict[str, Any] = {"method": "sketch", "products": mechanism.PROFILE_PRODUCTS, "seed": 3}
    for name, seen in (("profile", model), ("profile_init", model.reinitialized(3))):
        curves = probes.jacobian(seen, text, **how)["elasticity"].values
        lines = [np.sqrt((curves[:, at : at + line] ** 2).mean(1)) for at, _ in starts]
        np.testing.assert_allclose(ds[name].T, lines, rtol=1e-7)
    np.testing.assert_array_equal(retrieval(model, **SMALL, seed=3)["log_p"], ds["log_p"])
