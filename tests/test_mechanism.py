"""What a value's log odds depend on: gradients against plain passes, held weights, known models, known numbers."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import families
import numpy as np
import pytest
import torch
from commands import call
from lookup import Lookup
from torch import Tensor

import probes
from probes.data.recall import Couple, Maker, Rung, read_template
from probes.measures.retrieval import mechanism, retrieval
from probes.measures.retrieval.mechanism import Differentiable, constant_first, traced
from probes.measures.retrieval.numbers import by_depth
from probes.models.behind import Asked, Row
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


def plain_odds(model: View, x: Tensor, context: tuple[int, ...], one: Asked, edits: Any = lambda text: ()) -> Tensor:
    """The log odds, a plain pass over the whole text for every value."""
    log_p = []
    for answer in one.answers:
        text = torch.tensor([[*context, *one.question, *answer]])
        whole = torch.cat([x, model.embed(text).detach()[:, len(context) :]], 1)
        stream = model.residual(whole, edits=edits(tuple(text[0].tolist())))[0, -len(answer) - 1 : -1]
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


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "gemma2", "gpt_oss"])
def test_cut_is_the_derivative_with_weights_on_position_0_frozen(family):
    """Finite differences of passes in which A_i0 has the numbers that it had at the point itself."""
    model = view(family)
    made, one = couple(model.spec.vocabulary), asked(couple(model.spec.vocabulary))[1]
    held = [Edit("logits", layer, constant_first) for layer in range(model.spec.blocks)]
    ran = Differentiable(model, made.contexts[0], held)
    row = Row(one)
    gradient = ran.gradient(ran.odds(row, ran.streams(row)[0])).numpy() / ran.unit
    frozen: dict[Any, Tensor] = {}

    def freeze(key: Any, logits: Tensor, log_z: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        weights = (logits - log_z).exp()
        first = frozen.setdefault(key, weights[..., :1])
        rest = weights[..., 1:] / weights[..., 1:].sum(-1, keepdim=True)
        mixed = torch.cat([first, (1 - first) * rest], -1)
        mixed[:, :, 0] = weights[:, :, 0]  # query 0 sees itself alone
        return mixed.log(), torch.zeros_like(log_z)

    def edits(text: tuple[int, ...]) -> list[Edit]:
        return [
            Edit("logits", layer, lambda *given, layer=layer: freeze((text, layer), *given))
            for layer in range(model.spec.blocks)
        ]

    whole = Differentiable(model, made.contexts[0])
    total = whole.gradient(whole.odds(row, whole.streams(row)[0])).numpy() / whole.unit
    assert np.abs(total - gradient).max() > 1e-3 * np.abs(total).max()  # the cut paths are there
    x, rounding = embedded(model, made.contexts[0])[0].detach(), NORMS[family]
    with torch.no_grad():
        base = plain_odds(model, x, made.contexts[0], one, edits).item()
        np.testing.assert_allclose(base, ran.odds(row, ran.streams(row)[0]).item(), rtol=rounding)
        np.testing.assert_allclose(base, plain_odds(model, x, made.contexts[0], one).item(), rtol=rounding)
        # The error of a central difference of step h is of the order of h^2 + rounding / h.
        size = rounding ** (1 / 3)
        for towards in (gradient, total - gradient):
            step = torch.from_numpy(towards * size / (towards**2).sum())[None]
            ends = [plain_odds(model, x + sign * step, made.contexts[0], one, edits).item() for sign in (1, -1)]
            np.testing.assert_allclose((ends[0] - ends[1]) / 2, (gradient * step[0].numpy()).sum(), atol=30 * size**3)
    found, depth = measured(model, made), DEPTHS[1]
    np.testing.assert_allclose(found["cut"][1], in_parts(gradient * ran.unit, depth), rtol=1e-6)
    np.testing.assert_allclose(found["through_first"][1], in_parts((total - gradient) * ran.unit, depth), rtol=1e-6)


@pytest.mark.parametrize("sink", [0.0, 40.0, -40.0, float("-inf")])
def test_held_weights_have_no_derivative_wherever_they_are(sink):
    """Key 0 has all of the weight in float32, none, or is out of the window's reach; query 0 sees itself alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 5, 5, generator=generator).masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    logits[:, :, 1:, 0] = sink
    value = torch.randn(1, 2, 5, 3, generator=generator)
    at, of = torch.arange(5)[:, None], torch.arange(5)[None]
    cotangent = torch.randn(1, 2, 5, 3, generator=generator)

    def gradient(kind: torch.dtype, *, slow: bool) -> tuple[Tensor, Tensor]:
        s, v = (x.to(kind).clone().requires_grad_() for x in (logits, value))
        if slow:
            first = s.softmax(-1)[..., :1].detach()
            rest = s[:, :, 1:, 1:].softmax(-1) @ v[:, :, 1:]
            later = first[:, :, 1:] * v[:, :, :1] + (1 - first[:, :, 1:]) * rest
            output = torch.cat([v[:, :, :1], later], 2)
        else:
            changed, log_z = constant_first(s, s.logsumexp(-1, keepdim=True), at, of)
            output = (changed - log_z).exp() @ v
        output.backward(cotangent.to(kind))
        assert s.grad is not None
        assert v.grad is not None
        return s.grad.double(), v.grad.double()

    for kind, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for found, expected in zip(gradient(kind, slow=False), gradient(torch.float64, slow=True), strict=True):
            torch.testing.assert_close(found, expected, rtol=close, atol=close)


def test_the_norm_is_of_the_drawn_directions_and_right_in_the_mean(monkeypatch):
    """1500 directions: squares of one direction vary by a few times their mean, so that roots are off by a few percent."""
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
    monkeypatch.setattr(mechanism, "PRODUCTS", 1500)
    found = traced(model, made, 0, DEPTHS[:1], [one], seed=[3], report=Tally(None))
    exact = probes.jacobian(model, text, method="exact")["sensitivity"].values[0, : len(context), None]
    np.testing.assert_allclose(found["norm"][0], in_parts(exact * scale * model.spec.width**0.5, DEPTHS[0]), rtol=0.06)


def test_the_norm_behind_lists_is_of_lines_that_are_not_asked_for(monkeypatch):
    """Exact Jacobians, question by question, against 1500 splits: the mean over all questions but the line's own."""
    monkeypatch.setattr(mechanism, "PRODUCTS", 1500)
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


# ---------------------------------------------------------------------------------------------------------- known models


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
    expected = {
        "profile": probes.jacobian(model, text, **how)["elasticity"],
        "profile_init": probes.jacobian(model.reinitialized(3), text, **how)["elasticity"],
    }
    for name, profile in expected.items():
        mean = np.exp(np.log(profile.values).mean(0))
        lines = [np.sqrt((mean[at : at + line] ** 2).mean()) for at, _ in starts]
        np.testing.assert_allclose(ds[name], lines, rtol=1e-7)
    assert ds["traced_depth"].values.tolist() == [0, 4, 8]
    options = json.loads(ds.attrs["options"])
    assert (options["mechanism"], options["initialization"]) == (2, "config")
    plain = retrieval(model, **SMALL, seed=3)
    assert "mechanism" not in plain.attrs["options"]
    np.testing.assert_array_equal(plain["log_p"], ds["log_p"])


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_command_shows_sensitivities_and_what_they_say(tmp_path, monkeypatch, capsys):
    options = ["--pairs", "9", "--keys", "apart", "--digits", "3", "--contexts", "4", "--candidates", "3"]
    options += ["--mechanism", "4", "--mechanism-depths", "2", "--profile-prompts", "1"]
    assert call(monkeypatch, "retrieval", "tiny-llama", *options, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "what it says of recall" in shown
    assert "are answered exactly" in shown
    assert {"retrieval.nc", "retrieval.png", "retrieval.svg", "retrieval.md"} == {p.name for p in tmp_path.iterdir()}
    table = (tmp_path / "retrieval.md").read_text()
    assert "Sensitivity of the value's log odds (nat):" in table
    assert table.count("rank correlation over depth of gain with") == 4
    ds = probes.load_result(tmp_path / "retrieval.nc")
    assert ds.attrs["command"].startswith("headwater retrieval tiny-llama --pairs 9")
    pair = np.exp(np.log(ds["sensitivity"].sel(part="pair").values).mean(0))
    np.testing.assert_allclose(by_depth(ds, "pair")[0], pair)
    assert f"{pair[0]:.3g} [" in table
