"""Position read off the stream and erased: against plain sums and loops, and on toys whose answer is known."""

from __future__ import annotations

import inspect
from typing import Any

import made_toys
import numpy as np
import pytest
import torch
from measured import close, drawn_tokens, refused, view
from torch import Tensor

import probes
from probes.figures import decode_figure
from probes.measures.decode import STRENGTHS, decode
from probes.models.behind import Continues
from probes.models.erase import Moments, directions, erased, moments, place
from probes.studies.decode_report import decode_report

TOKENS = drawn_tokens(16, 24, least=3, first=0)
FEW: dict[str, Any] = {"bootstrap": 20, "rank": 2}


def streams(model: Any, tokens: Tensor, layer: int) -> np.ndarray:
    """[prompt, position from 1 on, d]."""
    return np.stack([model.trace(model.embed(row[None])).residual[layer][0, 1:].double().numpy() for row in tokens])


def fitted(x: np.ndarray, t: np.ndarray, strength: float) -> tuple[np.ndarray, float]:
    """Slopes and offset of a ridge regression, the strength in units of the mean variance."""
    centred, target = x - x.mean(0), t - t.mean()
    covariance = centred.T @ centred / len(x)
    covariance += strength * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    slopes = np.linalg.solve(covariance, centred.T @ target / len(x))
    return slopes, t.mean() - x.mean(0) @ slopes


def test_documents_are_held_out_as_in_plain_loops():
    model, layer = view("gpt2", dtype="float64"), 2
    x, t = streams(model, TOKENS, layer), np.log1p(np.arange(1, 24))
    errors, deviations = [], []
    for half in (0, 1):
        train, test = np.arange(1 - half, 16, 2), np.arange(half, 16, 2)
        folds = [train[0::2], train[1::2]]
        losses = []
        for strength in STRENGTHS:
            loss = 0.0
            for one, other in (folds, folds[::-1]):
                slopes, offset = fitted(np.concatenate(x[one]), np.tile(t, len(one)), strength)
                loss += float(((x[other] @ slopes + offset - t) ** 2).sum())
            losses.append(loss)
        slopes, offset = fitted(np.concatenate(x[train]), np.tile(t, len(train)), STRENGTHS[int(np.argmin(losses))])
        errors.append(((x[test] @ slopes + offset - t) ** 2).sum())
        deviations.append(((np.tile(t, (len(test), 1)) - t.mean()) ** 2).sum())
    # The permuted target has a say in the strength, too: the least of both losses; here both agree or lie beside.
    found = decode(model, TOKENS, **FEW)
    assert abs(float(found.r2[layer]) - (1 - sum(errors) / sum(deviations))) < 0.02
    assert (found.r2_low <= found.r2).all()
    assert float(found.r2_shuffled.max()) < 0.1


def test_least_squares_erasure_leaves_no_covariance_and_changes_least():
    model = view("gpt2", dtype="float64")
    before = moments(model, TOKENS, [1])[1]
    mean, reading, writing = directions(before, "direction", 1, 0)
    x = torch.from_numpy(np.concatenate(streams(model, TOKENS, 1)))
    t = torch.from_numpy(np.tile(np.log1p(np.arange(1, 24)), len(TOKENS)))
    y = x - (x - mean) @ reading @ writing.T
    covariance = ((y - y.mean(0)) * (t - t.mean())[:, None]).mean(0)
    scale = ((x - x.mean(0)) * (t - t.mean())[:, None]).mean(0).abs().max()
    assert float(covariance.abs().max()) < 1e-8 * float(scale)
    # Any other rank-one erasure of the same direction moves the stream further in the metric of its inverse covariance.
    values, vectors = torch.linalg.eigh(before.covariance)
    whitened = vectors / values.clamp_min(1e-12).sqrt() * (values > 1e-8 * values[-1])

    def moved(read: Tensor) -> float:
        return float((((x - mean) @ read @ writing.T) @ whitened).square().sum())

    other = writing / (writing * writing).sum()  # the orthogonal projection
    assert moved(reading) < moved(other)


def test_spans_of_means_are_those_of_a_decomposition():
    model = view("llama", dtype="float64")
    found = moments(model, TOKENS, [1])[1]
    x = streams(model, TOKENS, 1)
    means = x.mean(0)
    _, _, rows = np.linalg.svd(means - means.mean(0), full_matrices=False)
    _, basis, _ = directions(found, "means", 3, 0)
    close(basis @ basis.T, rows[:3].T @ rows[:3], 1e-6, 1e-8)
    close(found.mean, x.mean((0, 1)), 1e-9, 1e-12)
    permuted = directions(found, "permuted", 3, 0)[1]
    assert not torch.allclose(permuted @ permuted.T, basis @ basis.T, atol=0.1)
    drawn = directions(found, "random", 3, 5)[1]
    close(drawn.T @ drawn, torch.eye(3), 1e-9, 1e-12)
    assert not torch.equal(drawn, directions(found, "random", 3, 6)[1])


@pytest.mark.parametrize("what", ["means", "permuted", "random", "direction"])
@pytest.mark.parametrize("layer", [1, None])
def test_an_erasure_is_a_view_that_leaves_position_0_alone(what, layer):
    model = view("llama", dtype="float64")
    found = erased(model, what, reference=TOKENS, layer=layer, rank=2)
    with torch.no_grad():
        one, two = (m.residual(m.embed(TOKENS[:2])) for m in (model, found))
        assert torch.equal(one[:, 0], two[:, 0])
        assert not torch.allclose(one[:, 1:], two[:, 1:], rtol=1e-3)
        assert isinstance(found, Continues)
        n = TOKENS.shape[1] - 9
        ahead = found.behind(found.embed(TOKENS[:1, :9]))
        behind = ahead(TOKENS[:1, 9:], torch.arange(n)[None], torch.ones(n, n, dtype=torch.bool).tril()[None])
    close(behind, two[:1, 9:], 1e-6, 1e-9)
    assert what in found.said


def test_learned_positions_are_read_off_and_used():
    switches = {"positional": "learned", "width": 16, "heads": 2, **made_toys.STANDARD}
    toy = made_toys.made(**switches)
    weights = made_toys.moved(toy.architecture)
    name = next(name for name in weights if "position" in name)
    weights[name] = 4 * weights[name]  # far above the tokens
    toy = made_toys.Toy(toy.architecture, weights)
    tokens = torch.randint(made_toys.VOCABULARY, (24, made_toys.LENGTH), generator=torch.Generator().manual_seed(1))
    found = decode(toy, tokens, rank=8, bootstrap=20)
    assert float(found.r2[0]) > 0.95
    change = found.kl.sel(erasure="means"), found.kl.sel(erasure="direction")
    assert float(change[0]) > 0.1
    assert float(change[0]) > float(change[1])


def test_nothing_is_read_off_where_there_is_no_position():
    toy = made_toys.made(positional="none", width=16, heads=2, **made_toys.STANDARD)
    tokens = torch.randint(made_toys.VOCABULARY, (24, made_toys.LENGTH), generator=torch.Generator().manual_seed(1))
    assert (
        float(decode(toy, tokens, rank=4, bootstrap=20).r2[0]) < 0.05
    )  # at the embeddings; the causal mask tells later
    full = made_toys.made(positional="none", mask="full", width=16, heads=2, **made_toys.STANDARD)
    found = decode(full, tokens, rank=4, bootstrap=20)
    assert float(found.r2.max()) < 0.05
    assert "residual_after" not in found
    mean, reading, writing = directions(moments(toy, tokens, [0])[0], "direction", 1, 0)
    assert torch.isfinite(reading).all()
    assert mean.shape == writing[:, 0].shape


def test_the_report_and_the_figure_say_what_the_result_holds(tmp_path):
    model = view("llama", dtype="float64")
    found = decode(model, TOKENS, documents=[f"text {n // 2}" for n in range(16)], **FEW)
    report = decode_report({"ape": found})
    assert [len(table.rows) for table in report.tables] == [model.spec.blocks + 1, 4]
    assert "permuted positions" in report.lines[-1]
    decode_figure({"ape": found}, path=tmp_path / "decode.png")
    assert (tmp_path / "decode.png").stat().st_size > 10_000
    close(found.residual_change, found.residual_after - found.residual_before, 1e-9, 1e-12)
    again = decode(model, TOKENS, documents=[f"text {n // 2}" for n in range(16)], **FEW)
    assert found.drop_attrs().equals(again.drop_attrs())


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_decoded_is_refused():
    model, plain, erase = view("llama"), inspect.unwrap(decode), inspect.unwrap(erased)
    for call, words in (
        (lambda: plain(model, TOKENS[:4]), ("4 prompts", "at least 8")),
        (lambda: plain(model, TOKENS, rank=23), ("rank=23 ", "1 to 22")),
        (lambda: plain(model, TOKENS, layer=9), ("layer=9 ",)),
        (lambda: plain(model, TOKENS, bootstrap=-1), ("bootstrap=-1 ",)),
        (lambda: erase(model, "all", reference=TOKENS), ("what 'all'", "means")),
    ):
        with refused(*words):
            call()
    assert probes.decode is decode


def test_moments_add_up():
    x = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    both = Moments.of(x[0], place(9)) + Moments.of(x[1], place(9))
    kept = x[:, 1:].reshape(-1, 3)
    close(both.covariance, torch.from_numpy(np.cov(kept.numpy().T, bias=True)), 1e-9)
    t = place(9)[1:].repeat(2, 1)
    close(both.with_targets, (kept - kept.mean(0)).T @ (t - t.mean()) / 16, 1e-9, 1e-12)
