"""Surveys: one probe on several models, what they write, how they go on, what they refuse before they begin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from kept import Stop, listed, never, stopping_at

import probes
from probes.data.prompts import prompts
from probes.errors import InputError
from probes.results.dataset import dataset, provenance, tokens_hash
from probes.results.tables import Report, Table
from probes.studies.survey import Probe, survey

LENGTH = 24
COMMON: dict[str, Any] = {"prompts": 4, "length": LENGTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, "ape" (with BOS) and "bee" (without), "ant" of a small vocabulary, and a text for them."""
    made = tmp_path_factory.mktemp("models")
    families.checkpoints(made, ape=("llama", "prepended"), bee=("gpt2", "end"))
    config = families.FAMILIES["llama"]()
    config.vocab_size = 100
    families.build(config).save_pretrained(made / "ant")
    families.tokenizer().save_pretrained(made / "ant")
    return made


def size(
    model: Any, tokens: Any, *, scale: float = 1.0, shift: Any = 0, pieces: Any = None, progress: Any = None
) -> xr.Dataset:
    """Mean size of the last stream, times `scale`, with tokens moved by `shift` ids."""
    if scale <= 0:
        raise InputError(f"scale={scale} is no scale; give more than 0")
    if int(shift) + int(tokens.max()) >= model.spec.vocabulary:
        raise InputError(f"shift={shift} leaves the vocabulary of {model.identity.name}; give less")
    norms = []
    for done, prompt in enumerate(tokens):
        norms.append(scale * model.trace(model.embed(prompt[None] + int(shift))).residual[-1][0].norm(dim=-1))
        if progress is not None:
            progress(done + 1, len(tokens))
    return dataset(
        {"norm": (("prompt", "position"), torch.stack(norms)), "mean": ((), torch.stack(norms).mean())},
        tokens=tokens,
        attrs=provenance(model, tokens, scale=scale, shift=shift),
    )


def draw(results: Any, *, path: Path) -> None:
    for ending in (".png", ".svg"):
        path.with_suffix(ending).write_text(", ".join(results), encoding="utf-8")


def told_of(results: Any, *, digits: int = 3) -> Report:
    rows = [[name, f"{float(np.mean(ds['mean'])):.{digits}f}"] for name, ds in results.items()]
    first = Table("Names", ("model",), [[name] for name in results])
    return Report("Sizes", "Mean norms.", [first, Table("Means", ("model", "mean"), rows)], ["one", "two"])


SIZE = Probe("size", size, draw, told_of)
SHIFTED = Probe("size", size, draw, told_of, along="shift")


def run(folder: Path, out: Path, names: str = "ape", probe: Any = SIZE, **given: Any) -> dict[str, xr.Dataset]:
    text = {"text": str(folder / "text.txt")} if "text" not in given else {}
    sources = [str(folder / name) for name in names.split()]
    return survey(sources, out, probe, **{**COMMON, **text, **given})


@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_files_and_their_content(folder, tmp_path, backend):
    (result,) = run(folder, tmp_path, options={"scale": 2.0}, reporting={"digits": 1}, backend=backend).values()
    assert listed(tmp_path) == ["size.md", "size.nc", "size.png", "size.svg"]
    xr.testing.assert_identical(probes.load_result(tmp_path / "size.nc"), result)
    model = probes.load(str(folder / "ape"), backend)
    tokens = prompts(model, n=4, length=LENGTH, text=folder / "text.txt")
    own = size(model, tokens, scale=2.0)
    np.testing.assert_array_equal(result["norm"], own["norm"])
    np.testing.assert_array_equal(result["tokens"], tokens)
    assert result.attrs["tokens_sha256"] == tokens_hash(tokens)
    assert result.attrs["backend"] == backend
    assert result.attrs["text_source"] == f"text '{folder / 'text.txt'}'"
    assert (result.attrs["first_policy"], result.attrs["first_id"], result.attrs["prompts_seed"]) == ("bos", 0, 0)
    page = (tmp_path / "size.md").read_text(encoding="utf-8").splitlines()
    assert page[0] == "# Sizes"
    assert page[-3:] == ["| model | mean |", "| --- | --- |", f"| ape | {float(own['mean']):.1f} |"]
    assert "| model |" in page
    assert "- two" in page


def test_several_models_and_values(folder, tmp_path):
    heard: dict[str, list[tuple[float, float]]] = {}
    told: list[str] = []
    given: dict[str, Any] = {"advance": lambda label, *step: heard.setdefault(label, []).append(step), "seed": 3}
    results = run(folder, tmp_path, "ape bee", SHIFTED, options={"shift": [5, "7"]}, told=told.append, **given)
    assert list(heard) == ["ape size 5", "ape size 7", "bee size 5", "bee size 7"]
    assert all(steps == [(1.0, 4.0), (2.0, 4.0), (3.0, 4.0), (4.0, 4.0)] for steps in heard.values())
    assert told == []
    assert listed(tmp_path) == ["size-ape.nc", "size-bee.nc", "size.md", "size.png", "size.svg"]
    assert (tmp_path / "size.png").read_text(encoding="utf-8") == "ape, bee"
    for name, ds in results.items():
        xr.testing.assert_identical(probes.load_result(tmp_path / f"size-{name}.nc"), ds)
        assert (ds["norm"].dims, ds["mean"].dims) == (("shift", "prompt", "position"), ("shift",))
        assert ds["tokens"].dims == ("prompt", "position")
        assert list(ds["shift"].values) == ["5", "7"]
        assert json.loads(ds.attrs["options"]) == {"scale": 1.0, "shift": ["5", "7"]}
        model = probes.load(str(folder / name))
        for shift in (5, 7):
            own = size(model, torch.tensor(ds["tokens"].values), shift=shift)
            np.testing.assert_array_equal(ds["norm"].sel(shift=str(shift)), own["norm"])
    assert results["bee"].attrs["first_policy"] == "none"  # its BOS is its end token
    for shift in ([5], 5):  # one value is no dimension
        (alone,) = run(folder, tmp_path / "alone", "ape", SHIFTED, options={"shift": shift}, seed=3).values()
        np.testing.assert_array_equal(alone["norm"], results["ape"]["norm"].sel(shift="5"))


@pytest.mark.slow
def test_what_values_share_is_measured_once_per_model(folder, tmp_path):
    """And not at all for a single value, nor for a model whose units were all measured before."""
    made, told = [], []

    def share(model: Any, tokens: Any, *, scale: float = 1.0, pieces: Any, progress: Any) -> float:
        made.append(model.identity.name)
        progress(1, 1)
        return 10 * scale

    def measure(model: Any, tokens: Any, *, base: float = 0.0, **given: Any) -> xr.Dataset:
        return size(model, tokens, **given).assign(base=base)

    probe = Probe("size", measure, draw, told_of, along="shift", shared=("base", share))
    options = {"shift": [5, 7], "scale": 2.0}
    results = run(folder, tmp_path, "ape bee", probe, options=options, advance=lambda *said: told.append(said))
    assert made == ["ape", "bee"]
    assert [ds["base"].values.tolist() for ds in results.values()] == [[20.0, 20.0]] * 2
    assert {said[0] for said in told if said[0].endswith("base")} == {"ape size 5 base", "bee size 5 base"}
    (alone,) = run(folder, tmp_path / "alone", "ape", probe, options={"shift": 5}).values()
    assert float(alone["base"]) == 0
    with pytest.raises(Stop):
        run(folder, tmp_path / "cut", "ape bee", probe, options=options, advance=stopping_at("bee size 7"))
    made.clear()
    run(folder, tmp_path / "cut", "ape bee", probe, options=options)
    assert made == ["bee"]


def test_a_unit_measured_with_other_settings_is_not_taken_for_this_one(folder, tmp_path):
    given: dict[str, Any] = {"options": {"scale": 2.0}}
    with pytest.raises(Stop):
        run(folder, tmp_path, "ape bee", advance=stopping_at("bee size"), **given)
    said: list[str] = []
    with pytest.raises(Stop):
        run(folder, tmp_path, "ape bee", advance=stopping_at("bee size"), told=said.append, **given)
    assert said == [f"going on with '{tmp_path / 'unfinished' / 'size'}': 1 of 2 are done (ape size)"]
    for changes in (
        {"options": {"scale": 3.0}},
        {"options": {}},
        {"seed": 1},
        {"length": 20},
        {"dtype": "float64"},
        {"backend": "transformer_lens"},
    ):
        with pytest.raises(Stop):
            run(folder, tmp_path, "ape bee", **{**given, "advance": stopping_at("ape size"), **changes})


@pytest.mark.parametrize(
    ("names", "probe", "changes", "says"),
    [
        ("", SIZE, {}, "no model given"),
        ("ape gone", SIZE, {}, "gone' does not exist"),
        ("ape ape", SIZE, {}, "are both called 'ape'"),
        ("ape bee", SIZE, {"first": "bos"}, "first=bos, but the tokenizer of bee never puts"),
        ("ape ant", SIZE, {"options": {"shift": 10}}, "shift=10 leaves the vocabulary of ant"),
        ("ape", SHIFTED, {"options": {"shift": []}}, "shift names none"),
        ("ape", SHIFTED, {"options": {"shift": [1, 2, "1"]}}, "shift '1' is named twice"),
        ("ape", SHIFTED, {"options": {"shift": [1, 99]}}, "shift=99 leaves the vocabulary of ape"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(folder, tmp_path, names, probe, changes, says):
    with pytest.raises(InputError) as raised:
        run(folder, tmp_path / "below" / "out", names, probe, **{"advance": never, **changes})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert listed(tmp_path) == []
