"""Inspecting one text: tokens as one sees them, colours, tables, the page, and the command."""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from commands import call
from measured import STORIES, view
from rich.console import Console

import probes
from probes.cli import main as cli
from probes.measures.reading import FURTHER, visible
from probes.report import inspection
from probes.report.inspection import COLORS, LABELS, all_rows, inspection_page, ratio_class, top_rows

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
    """Out of reach there is no ratio; the parts are found within reach."""
    model = probes.load("tiny-mistral-window", device="cpu")
    ds = probes.inspect(model, Path(cli.__file__).read_text(encoding="utf-8")[:580], seeds=1)
    reach = 6 * 31  # blocks times window - 1
    assert ds.sizes["position"] > reach + 10
    beyond = np.arange(ds.sizes["position"]) < ds.sizes["position"] - 1 - reach
    np.testing.assert_array_equal(np.isfinite(ds["ratio"]), ~beyond)
    assert math.isfinite(float(ds.attrs["trend"]))
    assert inspection_page(ds).count('ratio -"') == beyond.sum()
    assert all(row[4] == "-" for row in all_rows(ds)[: beyond.sum()])
    assert len(top_rows(ds, 1000)) == (~beyond & (ds["part_of"].values == "rest")).sum()


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
        "\x00\r\x7f": "\\x00\\r\\x7f",
        "a\u202eb\u2028": "a\\u202eb\\u2028",
        "漢字 é 👩\u200d💻": "漢字 é 👩\u200d💻",
    }
    assert {text: visible(text) for text in shown} == shown
    text = "  " + WORDS.replace(" ", "   ") + " "
    ds = probes.inspect(view("llama"), text, of="top", baseline="none")
    assert "".join(map(str, ds["token"].values[1:])) == text


def test_classes_are_symmetric_and_each_has_its_colour():
    assert [ratio_class(r) for r in (0.1, 0.3, 0.6, 1.0, 1.5, 3.0, 10.0, math.inf)] == [*range(7), 6]
    assert ratio_class(math.nan) is None
    np.testing.assert_allclose(np.array(inspection.EDGES) * np.array(inspection.EDGES)[::-1], 1)
    assert len(COLORS) == len(LABELS) == len(inspection.EDGES) + 1
    assert inspection.color_of(1.0) is inspection.color_of(math.nan) is None
    assert [inspection.color_of(r) for r in (0.1, 3.0)] == [("#0072b2", "#ffffff"), ("#f0a46c", "#000000")]


def printed(ds: xr.Dataset, **given: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, emoji=False, **given)
    inspection.print_inspection(ds, top=3, console=console)
    return out.getvalue()


COLORED: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor"}


def test_colours_follow_the_ratio(seen):
    text, console = inspection.colored_text(seen), Console()
    at = 1  # behind the sink's bracket
    for piece, ratio, part in zip(seen["token"].values, seen["ratio"].values, seen["part_of"].values, strict=True):
        color = inspection.color_of(float(ratio))
        written = str(piece).replace("⏎", "⏎\n")
        assert text.plain[at : at + len(written)] == written
        for offset in (at + n for n, character in enumerate(written) if character != "\n"):
            style = text.get_style_at_offset(console, offset)
            assert (style.bgcolor.name if style.bgcolor else None) == (color[0] if color else None)
            assert (bool(style.underline), bool(style.bold)) == (part == "recency", part == "sink")
        at += len(written) + (part == "sink")
    shown = printed(seen, **COLORED)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "48;2;" in shown
    assert text.plain in plain
    assert f"[<|bos|>]{AS_SHOWN}" == text.plain
    assert all(label in plain for label in (*LABELS, "sink", "recency", "[red]"))


@pytest.mark.parametrize("given", [{}, {**COLORED, "no_color": True}])
def test_numbers_where_there_are_no_colours(seen, given):
    shown = printed(seen, **given)
    assert "48;2" not in shown
    for row in all_rows(seen):
        cells = r"\s+".join(re.escape(cell.strip()) for cell in row if cell.strip())
        assert re.search(rf"^\s*{cells}\s*$", shown, re.M), row


def test_tables_and_sentences(seen):
    rows = top_rows(seen, 3)
    ratios = [float(row[4]) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    rest = seen["ratio"].values[seen["part_of"].values == "rest"]
    assert ratios[0] == pytest.approx(rest.max(), rel=1e-2)
    at = int(rows[0][0])
    assert rows[0][1] == str(seen["token"].values[at])
    assert [row[0] for row in inspection.part_rows(seen)] == ["sink", "recency", "rest"]
    assert inspection.part_rows(seen)[0][1] == "0"
    assert float(inspection.part_rows(seen)[0][2].rstrip("%")) == pytest.approx(
        100 * float(seen["share"].sel(part="sink")), abs=0.06
    )
    said = " ".join(inspection.sentences(seen))
    assert "tiny-llama reads" in said
    assert f"'{seen['next_token'].values[0]}' {float(seen['probability'][0]):.1%}" in said
    assert "fresh weights, 1 seed, initializer_range 0.02 of the config" in said
    trend = seen.assign_attrs(trend=-0.9)
    assert "falls with position" in " ".join(inspection.sentences(trend))
    assert "with position" not in " ".join(inspection.sentences(seen.assign_attrs(trend=0.1)))


def test_page(tiny, seen):
    page = inspection_page(seen, top=2)
    tags = Counter(re.findall(r"<(/?\w+)", page))
    assert not {"script", "b"} & set(tags)
    assert all(tags[name] == tags[name[1:]] for name in tags if name.startswith("/"))
    assert not re.search(r"<[^>]* (on\w+|src)=|href=\"(?!#|data:)", page)
    (text,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.S)
    assert html.unescape(re.sub(r"<[^>]*>", "", text)) == f"<|bos|>{AS_SHOWN}"
    assert page.count('title="position') == seen.sizes["position"]
    assert page.count('"sink" title') == 1
    assert page.count('"recency" title') == int((seen["part_of"] == "recency").sum())
    assert "prefers-color-scheme: dark" in page
    ratio = float(seen["ratio"][3])
    assert f"ratio {ratio:.3g}" in page
    assert f"background: {inspection.color_of(ratio)[0]}" in page
    names = [str(t) for t in seen["next_token"].values]
    assert all(f">{name}<" in page for name in names if name.isalnum())
    bare = inspection_page(probes.inspect(tiny, CODE, of="top", baseline="none"))
    assert "divided by nothing" in bare
    assert "scaled to it" not in bare


def test_kept_on_disk(seen, tmp_path):
    probes.save_result(seen, tmp_path / "inspect.nc")
    again = probes.load_result(tmp_path / "inspect.nc")
    for name in seen.variables:
        np.testing.assert_array_equal(again[name], seen[name])
    assert inspection_page(again) == inspection_page(seen)
    nul = probes.inspect(view("llama"), WORDS.replace(" ", " \x00 ", 1), of="top", baseline="none")
    probes.save_result(nul, tmp_path / "nul.nc")  # HDF5's texts end at a zero byte
    assert json.loads(str(probes.load_result(tmp_path / "nul.nc").attrs["text"])).count("\x00") == 1


def test_command_end_to_end(monkeypatch, capsys, tmp_path):
    words = ["inspect", "tiny-llama", "--prompt", CODE, "--out", str(tmp_path), "--seeds", "1", "--top", "2"]
    assert call(monkeypatch, *words, "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "tiny-llama reads" in said
    assert said.rstrip().endswith(f"wrote {tmp_path / 'inspect.html'}, {tmp_path / 'inspect.nc'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inspect.html", "inspect.nc"]
    ds = probes.load_result(tmp_path / "inspect.nc")
    assert (tmp_path / "inspect.html").read_text(encoding="utf-8") == inspection_page(ds, top=2)
    assert str(ds.attrs["command"]).startswith("headwater inspect tiny-llama --prompt 'def area(width")
    assert json.loads(str(ds.attrs["text"])) == CODE
    assert all(row[2] in said for row in top_rows(ds, 2))
    own = probes.inspect(probes.load("tiny-llama", device="cpu"), CODE, seeds=1)
    np.testing.assert_allclose(ds["sensitivity"], own["sensitivity"], rtol=1e-4)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the checkpoint stories260K is not here")
def test_a_checkpoint_of_another_kind():
    """A published model with a sentencepiece tokenizer."""
    model = probes.load(str(STORIES), device="cpu")
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside. One day,"
    ds = probes.inspect(model, text, method="exact")
    tokens = [str(token) for token in ds["token"].values]
    assert "".join(tokens[1:] if model.bos is not None else tokens) == text
    assert ds.attrs["baseline_by"] == "theory"
    assert np.isfinite(ds["ratio"]).all()
