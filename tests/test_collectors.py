"""Tokens behind position 0 that collect attention, against loops, and how they are told."""

from __future__ import annotations

import numpy as np
from measured import close, complete, drawn_tokens, sinks, view

from probes.cli.console import print_table
from probes.measures.sinks.collectors import COLUMNS, LEAST, collectors, named, token_rows


def test_tokens_are_those_with_the_largest_excess(tmp_path):
    tokens = drawn_tokens(6, 16, least=3)
    tokens[:, 1:9] = tokens[:, 1:9] % 5 + 3  # few kinds, so that each stands in several prompts
    model, names = view("llama"), [f"story {n // 2}" for n in range(6)]
    found = sinks(model, tokens, keys="all", documents=names)
    alpha = sinks(model, tokens, keys=range(16)).alpha.mean("head").values  # [prompt, layer, key]
    excess = alpha - found.uniform.values
    for layer in range(model.spec.blocks):
        at = found.isel(layer=layer)
        by_token: dict[int, list[tuple[int, float, float]]] = {}
        for p, k in np.ndindex(6, 8):
            at_key = (p, excess[p, layer, k + 1], alpha[p, layer, k + 1])
            by_token.setdefault(int(tokens[p, k + 1]), []).append(at_key)
        common = {t: some for t, some in by_token.items() if len({p for p, *_ in some}) >= LEAST}
        mean = {t: np.mean([value for _, value, _ in some]) for t, some in common.items()}
        first = sorted(mean, key=lambda token: -mean[token])[:5]
        assert at.token_id.values[: len(first)].tolist() == first
        close(at.token_excess[: len(first)], [mean[token] for token in first], 1e-4, 1e-7)
        # The jackknife of a ratio, written out.
        without = [np.mean([v for p, v, _ in common[first[0]] if p // 2 != story]) for story in range(3)]
        reach = 4.302653 * np.sqrt(2 / 3 * np.sum((np.array(without) - np.mean(without)) ** 2))
        if np.isfinite(reach):
            close(at.token_excess_high[0] - at.token_excess[0], reach, 1e-3, 1e-6)
    complete(found, tmp_path / "sinks.nc")
    row = token_rows(found)[0]
    assert (row[:2], len(row)) == (["0", f"w{row[2]}"], len(COLUMNS))


def test_where_there_is_little_there_are_fewer_and_no_intervals(capsys):
    alpha, uniform = np.array([[[0.1, 0.5, 0.2]]]), np.zeros((1, 4))
    assert collectors(alpha, uniform, np.array([[0, 7, 7, 9]]), None)["token_id"].tolist() == [[-1] * 5]  # one prompt
    three = collectors(np.repeat(alpha, 3, 0), uniform, np.array([[0, 7, 8, 9]] * 3), ["a", "a", "a"])
    close(three["token_excess"][0, :2], [0.5, 0.2], 1e-12)
    close(three["token_excess_low"][0, :2], [0.5, 0.2], 1e-12)
    assert named(three["token_id"], None)[1].tolist() == [["7", "8", "", "", ""]]
    print_table(("token",), [["[/b]␣語"]])  # no markup, and twice as wide as it is long
    assert "[/b]␣語" in capsys.readouterr().out
