"""Inspecting one text: tokens as one sees them, colours, tables, the page, and the command."""

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from commands import call
from measured import view
from rich.console import Console

import probes
from probes.cli import main as cli
from probes.measures.reading import FURTHER, visible
from probes.report.inspection import EDGES, LABELS, color_of, colored_text, inspection_page, rows, sentences, tables

WORDS = " ".join(f"w{n}" for n in (5, 9, 17, 9, 33, 60, 101, 5, 9, 17, 88, 41))
CODE = (
    "def area(width, height):\n\treturn width * height  # <b>é漢</b> [red]\n\n\ndef volume(width, height):\n    return "
)
AS_SHOWN = visible(CODE).replace("漢", "漢··").replace("é", "é·").replace("⏎", "⏎\n")  # bytes that nobody has merged


@pytest.fixture(scope="module")
def tiny() -> Any:
    return probes.load("tiny-llama", device="cpu")


@pytest.fixture(scope="module")
def seen(tiny: Any) -> xr.Dataset:
    """A short text of code under the default options, but for fewer seeds."""
    return probes.inspect(tiny, CODE, seeds=1)


@pytest.mark.slow
def test_sliding_window():
    """Out of reach there is no ratio; the parts are within reach."""
    model = probes.load("tiny-mistral-window", device="cpu")
    ds = probes.inspect(model, Path(cli.__file__).read_text(encoding="utf-8")[:580], seeds=1)
    reach = 6 * 31  # blocks times window - 1
    beyond = np.arange(ds.sizes["position"]) < ds.sizes["position"] - 1 - reach
    np.testing.assert_array_equal(np.isfinite(ds["ratio"]), ~beyond)
    assert beyond.sum() > 10
    assert math.isfinite(float(ds.attrs["trend"]))
    assert inspection_page(ds, 3).count('ratio -"') == beyond.sum()
    assert all(row[4] == "-" for row in rows(ds)[: beyond.sum()])
    assert len(tables(ds, 1000)[1].rows) == (~beyond & (ds["part_of"].values == "rest")).sum()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_tokens_give_the_text_back(name):
    model = probes.load(name, device="cpu")
    ds = probes.inspect(model, CODE, of="top", baseline="none")
    tokens = [str(token) for token in ds["token"].values]
    if model.bos is not None:
        assert tokens.pop(0) == "<|bos|>"
        assert int(ds["tokens"][0, 0]) == model.bos
    assert "".join(token for token in tokens if token != FURTHER) == visible(CODE)
    assert tokens.count(FURTHER) == 3  # é and 漢 are two and three bytes, which nobody has merged
    assert json.loads(str(ds.attrs["text"])) == CODE


def test_what_would_not_be_seen_is_made_visible_and_spaces_are_kept():
    shown = {
        "a\nb\tc": "a⏎b⇥c",
        "\x1b[31m": "\\x1b[31m",
        "a\u202eb\u2028": "a\\u202eb\\u2028",
        "漢字 é 👩\u200d💻": "漢字 é 👩\u200d💻",
    }
    assert {text: visible(text) for text in shown} == shown
    text = "  " + WORDS.replace(" ", "   ") + " "
    ds = probes.inspect(view("llama"), text, of="top", baseline="none")
    assert "".join(map(str, ds["token"].values[1:])) == text


def test_colours_follow_the_ratio(seen):
    np.testing.assert_allclose(np.array(EDGES) * np.array(EDGES)[::-1], 1)
    assert color_of(1.0) is color_of(math.nan) is None
    colors = [color_of(ratio) for ratio in (0.1, 0.3, 0.6, 1.5, 3.0, math.inf)]
    assert [color and color[0] for color in colors] == [
        "#0072b2",
        "#72b2d8",
        "#c9e2f1",
        "#fadcc5",
        "#f0a46c",
        "#d55e00",
    ]
    text, console = colored_text(seen), Console()
    at = 1  # behind the sink's bracket
    for piece, ratio, part in zip(seen["token"].values, seen["ratio"].values, seen["part_of"].values, strict=True):
        color = color_of(float(ratio))
        written = str(piece).replace("⏎", "⏎\n")
        assert text.plain[at : at + len(written)] == written
        for offset in (at + n for n, character in enumerate(written) if character != "\n"):
            style = text.get_style_at_offset(console, offset)
            assert (style.bgcolor.name if style.bgcolor else None) == (color[0] if color else None)
            assert (bool(style.underline), bool(style.bold)) == (part == "recency", part == "sink")
        at += len(written) + (part == "sink")
    assert text.plain.startswith(f"[<|bos|>]{AS_SHOWN}")
    assert all(label in text.plain for label in (*LABELS, "sink", "recency", "[red]"))


def test_tables_and_sentences(seen):
    parts, top = (table.rows for table in tables(seen, 3))
    ratios = [float(row[4]) for row in top]
    assert ratios == sorted(ratios, reverse=True)
    rest = seen["ratio"].values[seen["part_of"].values == "rest"]
    assert ratios[0] == pytest.approx(rest.max(), rel=1e-2)
    assert top[0][1] == str(seen["token"].values[int(top[0][0])])
    assert [row[0] for row in parts] == ["sink", "recency", "rest"]
    assert parts[0][1] == "0"
    assert parts[0][2] == f"{float(seen['share'].sel(part='sink')):.1%}"
    text = " ".join(sentences(seen))
    assert "tiny-llama reads" in text
    assert f"'{seen['next_token'].values[0]}' {float(seen['probability'][0]):.1%}" in text
    assert "fresh weights, 1 seed, initializer_range 0.02 of the config" in text
    assert "falls with position" in " ".join(sentences(seen.assign_attrs(trend=-0.9)))
    assert "with position" not in " ".join(sentences(seen.assign_attrs(trend=0.1)))


def test_page(tiny, seen):
    page = inspection_page(seen, 2)
    (text,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.S)
    assert html.unescape(re.sub(r"<[^>]*>", "", text)) == f"<|bos|>{AS_SHOWN}"
    assert "<b>" not in page
    assert "<script" not in page
    assert page.count('title="position') == seen.sizes["position"]
    assert page.count('"recency" title') == int((seen["part_of"] == "recency").sum())
    ratio = float(seen["ratio"][3])
    assert f"ratio {ratio:.3g}" in page
    assert f"background: {color_of(ratio)[0]}" in page
    bare = inspection_page(probes.inspect(tiny, CODE, of="top", baseline="none"), 2)
    assert "divided by nothing" in bare
    assert "scaled to it" not in bare


def test_command_end_to_end(monkeypatch, capsys, tmp_path):
    words = ["inspect", "tiny-llama", "--prompt", CODE, "--out", str(tmp_path), "--seeds", "1", "--top", "2"]
    assert call(monkeypatch, *words, "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "tiny-llama reads" in shown
    assert shown.rstrip().endswith(f"wrote {tmp_path / 'inspect.html'}, {tmp_path / 'inspect.nc'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inspect.html", "inspect.nc"]
    ds = probes.load_result(tmp_path / "inspect.nc")
    assert (tmp_path / "inspect.html").read_text(encoding="utf-8") == inspection_page(ds, 2)
    assert json.loads(str(ds.attrs["text"])) == CODE
    for row in rows(ds):  # numbers, where there are no colours
        cells = r"\s+".join(re.escape(cell.strip()) for cell in row if cell.strip())
        assert re.search(rf"^\s*{cells}\s*$", shown, re.M), row
    own = probes.inspect(probes.load("tiny-llama", device="cpu"), CODE, seeds=1)
    np.testing.assert_allclose(ds["sensitivity"], own["sensitivity"], rtol=1e-4)
