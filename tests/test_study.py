"""The study behind `headwater jacobian`: what it writes, how it goes on after an interruption, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import kept
import numpy as np
import pytest
import torch
import xarray as xr

import probes
from probes.data.prompts import prompts
from probes.errors import InputError
from probes.measures.jacobian import jacobian
from probes.results.curves import band, profiles
from probes.results.dataset import tokens_hash
from probes.studies.study import (
    AGREEMENT_COLUMNS,
    COLUMNS,
    Settings,
    agreement_cells,
    agreements,
    cells,
    rope_correlations,
    study,
    summarize,
)
from probes.theory.cesaro import fit_alpha
from probes.theory.kernel import second_moment, second_moment_from_config

LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, "ape" and "bee", one of them with an earlier step, and a text for them."""
    made = tmp_path_factory.mktemp("models")
    for name, family, seed in (("ape", "llama", 0), ("ape/step0", "llama", 1), ("bee", "gpt2", 0)):
        families.model(family, seed=seed).save_pretrained(made / name)
        families.tokenizer("prepended" if family == "llama" else "end").save_pretrained(made / name)
    words = np.random.default_rng(0).integers(3, families.VOCABULARY, 400)
    (made / "text.txt").write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    (made / "short.txt").write_text("w5 w6 w7 w8 w9", encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def settings(folder: Path) -> Settings:
    return Settings(seeds=2, prompts=2, length=LENGTH, products=8, text=str(folder / "text.txt"))


def ape(folder: Path) -> str:
    return str(folder / "ape")


def files(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*"))


class Stop(Exception):
    """Pulls the plug."""


def stopping_at(label: str) -> Callable[[str, float, float], None]:
    def advance(running: str, done: float, total: float) -> None:
        if running == label:
            raise Stop

    return advance


# -------------------------------------------------------------------------------------------------- what it writes


@pytest.fixture(scope="module")
def whole(folder: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    """A study without an interruption: its folder and result."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, study([ape(folder)], out, settings)["ape"]


def test_files_and_their_content(whole, folder, settings):
    out, result = whole
    assert files(out) == ["jacobian.nc", "jacobian.png", "jacobian.svg"]
    assert (out / "jacobian.png").read_bytes().startswith(b"\x89PNG")
    xr.testing.assert_identical(probes.load_result(out / "jacobian.nc"), result)
    assert result["sensitivity"].dims == result["stderr"].dims == ("condition", "seed", "prompt", "position")
    assert result["sensitivity"].shape == (2, 2, 2, LENGTH)
    assert list(result["condition"].values) == ["pretrained", "init"]
    assert list(result["seed"].values) == [0, 1]
    assert list(result["runs"].values) == [1, 2]
    values = result["sensitivity"]
    assert values.sel(condition="init").notnull().all()
    assert values.sel(condition="pretrained", seed=0).notnull().all()
    assert values.sel(condition="pretrained", seed=1).isnull().all()
    assert (values.sel(condition="init") > 0).all()


def test_provenance(whole, folder, settings):
    _, result = whole
    model = probes.load(ape(folder))
    tokens = prompts(model, n=2, length=LENGTH, text=folder / "text.txt")
    assert np.array_equal(result["tokens"], tokens)
    assert result.attrs["tokens_sha256"] == tokens_hash(tokens)
    assert result.attrs["model"] == "ape"
    assert result.attrs["text_source"] == f"text '{folder / 'text.txt'}'"
    assert (result.attrs["first_policy"], result.attrs["first_id"]) == ("bos", 0)
    assert result.attrs["prompts_seed"] == 0
    assert "command" in result.attrs
    assert "study" not in result.attrs
    options = json.loads(result.attrs["options"])
    expected = {"method": "sketch", "products": 8, "readout": "residual", "from_layer": 0, "query": LENGTH - 1}
    assert expected.items() <= options.items()
    weights = result["weights"]
    assert str(weights.sel(condition="pretrained", seed=0).values) == model.identity.weights
    for seed in (0, 1):
        assert str(weights.sel(condition="init", seed=seed).values) == model.reinitialized(seed).identity.weights


def test_numbers_are_those_of_the_library(whole, folder):
    _, result = whole
    model = probes.load(ape(folder))
    tokens = prompts(model, n=2, length=LENGTH, text=folder / "text.txt")
    own = jacobian(model, tokens, method="sketch", products=8)
    found = result["sensitivity"].sel(condition="pretrained", seed=0).values
    assert np.array_equal(found, own["sensitivity"].values)
    own = jacobian(model.reinitialized(1), tokens, method="sketch", products=8)
    assert np.array_equal(result["sensitivity"].sel(condition="init", seed=1).values, own["sensitivity"].values)


def test_summary(whole):
    _, result = whole
    rows = {row.condition: row for row in summarize({"ape": result})}
    assert {name: row.seeds for name, row in rows.items()} == {"pretrained": 1, "init": 2}
    for row in rows.values():
        shown = list(cells(row))
        assert len(shown) == len(COLUMNS)
        assert shown[:3] == ["ape", row.condition, str(row.seeds)]
        assert 0 < row.error < 1
        assert shown[-1].endswith("%")
    assert rope_correlations({"ape": result}) == {}


@pytest.mark.slow
def test_progress(folder, settings, tmp_path):
    heard: dict[str, list[tuple[float, float]]] = {}

    def advance(label: str, done: float, total: float) -> None:
        heard.setdefault(label, []).append((done, total))

    study([ape(folder)], tmp_path, settings, advance=advance)
    assert list(heard) == ["ape pretrained", "ape init 0", "ape init 1"]
    for steps in heard.values():
        done = [step for step, _ in steps]
        assert done == sorted(done)
        assert steps[-1][0] == steps[-1][1]


@pytest.mark.slow
def test_two_models_and_no_positions(folder, settings, tmp_path):
    results = study([ape(folder), str(folder / "bee")], tmp_path, replace(settings, no_rope=True, seeds=1))
    assert files(tmp_path) == ["jacobian-ape.nc", "jacobian-bee.nc", "jacobian.png", "jacobian.svg"]
    assert list(results) == ["ape", "bee"]
    for result in results.values():
        assert list(result["condition"].values) == ["pretrained", "init", "init-nope"]
    correlations = rope_correlations(results)
    assert list(correlations) == ["ape", "bee"]
    assert all(-1 <= value <= 1 for value in correlations.values())
    assert results["bee"].attrs["first_policy"] == "none"  # its BOS is its end token
    assert len(summarize(results)) == 6


@pytest.mark.slow
def test_revisions_have_names_of_their_own(folder, settings, tmp_path):
    only = replace(settings, conditions=("pretrained",))
    results = study([ape(folder), f"{folder / 'ape'}@step0"], tmp_path, only)
    assert list(results) == ["ape", "ape@step0"]
    assert files(tmp_path) == ["jacobian-ape.nc", "jacobian-ape@step0.nc", "jacobian.png", "jacobian.svg"]
    weights = [str(result["weights"].values.item()) for result in results.values()]
    assert len(set(weights)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"conditions": ("init",)},
        {"conditions": ("pretrained",), "prompts": 1},
        {"method": "exact", "products": None},
        {"method": "scalar", "products": None},
        {"products": "auto", "relative_error": 0.5},
        {"readout": "logits"},
        {"readout": "normed", "from_layer": 2},
        {"query": 8},
        {"first": 7},
        {"first": "none"},
        {"length": 8},
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in its jvp
def test_every_setting_runs_to_the_end(folder, settings, tmp_path, changes):
    result = study([ape(folder)], tmp_path, replace(settings, **{"seeds": 1, **changes}))["ape"]
    for row in summarize({"ape": result}):
        assert len(list(cells(row))) == len(COLUMNS)
    assert files(tmp_path) == ["jacobian.nc", "jacobian.png", "jacobian.svg"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_backends_and_dtypes(folder, settings, tmp_path, whole, backend):
    result = study([ape(folder)], tmp_path, replace(settings, seeds=1), backend=backend, dtype="float64")["ape"]
    assert (result.attrs["backend"], result.attrs["dtype"]) == (backend, "float64")
    found, expected = (x["sensitivity"].sel(condition="pretrained", seed=0).values for x in (result, whole[1]))
    # The sketch's basis differs by rounding, in float32 amplified by weights twenty times too wide.
    assert np.abs(found - expected).max() < 0.05 * expected.max()


# ---------------------------------------------------------------------------------------------------- going on


@pytest.mark.slow
def test_an_interrupted_study_goes_on(folder, settings, whole, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        study([ape(folder)], out, settings, advance=stopping_at("ape init 1"))
    assert files(out) == ["unfinished", "unfinished/jacobian-0.sqlite"]
    made = kept.written(out)
    assert [label for label, _ in made] == ["ape init 0", "ape pretrained"]

    heard: dict[str, list[tuple[float, float]]] = {}
    seen: list[dict[tuple[str, str], int]] = []

    def advance(label: str, done: float, total: float) -> None:
        heard.setdefault(label, []).append((done, total))
        if label == "ape init 1":
            seen.append(kept.written(out))

    result = study([ape(folder)], out, settings, advance=advance)["ape"]
    assert heard["ape pretrained"] == heard["ape init 0"] == [(1.0, 1.0)]  # said to be done, at once
    assert len(heard["ape init 1"]) > 1
    assert seen[0] == made  # neither written again
    assert files(out) == ["jacobian.nc", "jacobian.png", "jacobian.svg"]
    for name in ("sensitivity", "stderr", "products", "tokens"):
        assert np.array_equal(result[name], whole[1][name], equal_nan=True), name  # bit for bit
    assert {k: v for k, v in result.attrs.items() if k != "created"} == {
        k: v for k, v in whole[1].attrs.items() if k != "created"
    }


@pytest.mark.slow
def test_an_interruption_in_the_second_model_keeps_the_first(folder, settings, tmp_path):
    sources, once = [ape(folder), str(folder / "bee")], replace(settings, seeds=1)
    with pytest.raises(Stop):
        study(sources, tmp_path, once, advance=stopping_at("bee pretrained"))
    assert kept.units(tmp_path) == {"ape init 0": True, "ape pretrained": True}
    heard = []
    study(sources, tmp_path, once, advance=lambda label, done, total: heard.append((label, done, total)))
    assert heard[:2] == [("ape pretrained", 1.0, 1.0), ("ape init 0", 1.0, 1.0)]
    assert files(tmp_path) == ["jacobian-ape.nc", "jacobian-bee.nc", "jacobian.png", "jacobian.svg"]


@pytest.fixture(scope="module")
def half(folder: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("half")
    with pytest.raises(Stop):
        study([ape(folder)], out, settings, advance=stopping_at("ape init 0"))
    return out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "exact", "products": None}, "method, products"),
        ({"products": 16}, "products"),
        ({"relative_error": 0.1}, "relative_error"),
        ({"readout": "normed"}, "readout"),
        ({"query": -2}, "query"),
        ({"from_layer": 1}, "from_layer"),
        ({"seed": 1}, "seed"),
        ({"prompts": 3}, "prompts"),
        ({"length": 16}, "length"),
        ({"first": "none"}, "first"),
        ({"text": None}, "text"),
    ],
)
def test_an_unfinished_study_with_other_settings_is_refused(folder, settings, half, changes, says):
    if "text" in changes:
        other = folder / "other.txt"
        other.write_text(" ".join(f"w{3 + i % 99}" for i in range(300)), encoding="utf-8")
        changes = {"text": str(other)}
    before = {path: path.read_bytes() for path in kept.files(half)}
    with pytest.raises(InputError) as raised:
        study([ape(folder)], half, replace(settings, **changes))
    message = str(raised.value)
    assert f"'{half}' holds an unfinished study with other {says}; " in message
    assert f"delete '{half / 'unfinished'}'" in message
    assert before
    assert {path: path.read_bytes() for path in kept.files(half)} == before


def test_other_weights_dtypes_and_backends_are_refused(folder, settings, half, tmp_path):
    with pytest.raises(InputError, match="unfinished study with other weights, dtype;"):
        study([ape(folder)], half, settings, dtype="float64")
    with pytest.raises(InputError, match="unfinished study with other backend;"):
        study([ape(folder)], half, settings, backend="transformer_lens")
    shutil.copytree(folder / "ape" / "step0", tmp_path / "ape")
    with pytest.raises(InputError, match="unfinished study with other weights;"):
        study([str(tmp_path / "ape")], half, settings)


@pytest.mark.slow
def test_more_seeds_and_the_same_text_elsewhere_go_on(folder, settings, half, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(half, out)
    text = tmp_path / "elsewhere" / "text.txt"
    text.parent.mkdir()
    shutil.copy(folder / "text.txt", text)
    heard: list[tuple[str, float, float]] = []
    more = replace(settings, seeds=3, text=str(text))
    study([ape(folder)], out, more, advance=lambda *step: heard.append(step))
    assert heard[0] == ("ape pretrained", 1.0, 1.0)
    assert heard[1][0] == "ape init 0"


def test_a_damaged_file_is_named(folder, settings, half, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(half, out)
    (out / "unfinished" / "jacobian-0.sqlite").write_bytes(b"nothing" * 1000)
    with pytest.raises(InputError, match=r"jacobian-0\.sqlite' cannot be read \(file is not a database\); delete it"):
        study([ape(folder)], out, settings)


@pytest.mark.slow
def test_the_study_s_own_folder_is_all_it_removes(folder, settings, tmp_path):
    (tmp_path / "unfinished").mkdir(parents=True)
    (tmp_path / "unfinished" / "notes.txt").touch()
    study([ape(folder)], tmp_path, replace(settings, seeds=1))
    assert files(tmp_path) == ["jacobian.nc", "jacobian.png", "jacobian.svg", "unfinished", "unfinished/notes.txt"]


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conditions": ("init", "trained")}, "condition 'trained' does not exist; use init and pretrained"),
        ({"conditions": ()}, "name none or one twice"),
        ({"conditions": ("init", "init")}, "conditions 'init,init' name none or one twice"),
        ({"conditions": ("pretrained",), "no_rope": True}, "--no-rope repeats the init condition"),
        ({"seeds": 0}, "seeds=0"),
        ({"length": 7}, "length=7 leaves no middle"),
        ({"length": families.MAX_LENGTH + 1}, f"length=129 is more than the {families.MAX_LENGTH} positions of ape"),
        ({"prompts": 0}, "n=0 prompts"),
        ({"text": "gone.txt"}, "'gone.txt' does not exist"),
        ({"dataset": "nobody/nothing"}, "both text"),
        ({"dataset": "nobody/nothing", "text": None}, "nobody/nothing"),
        ({"first": "begin"}, "first token 'begin' is unknown"),
        ({"first": 128}, "first token id 128"),
        ({"seed": -1}, "seed=-1 is negative"),
        ({"method": "quick"}, "method 'quick' does not exist; use exact, sketch, scalar"),
        ({"readout": "loss"}, "readout 'loss' does not exist"),
        ({"products": 1}, "products=1 is too few for a sketch"),
        ({"products": 0}, "products=0 is too few for a sketch"),
        ({"products": -3}, "products=-3"),
        ({"method": "exact"}, "products=8 goes with method 'sketch', not 'exact'"),
        ({"relative_error": 0.0, "products": "auto"}, "relative_error=0.0"),
        ({"query": 3}, "query=3 leaves no middle"),
        ({"query": LENGTH}, f"query {LENGTH} is outside the prompt of {LENGTH} tokens"),
        ({"query": -LENGTH - 1}, "is outside the prompt"),
        ({"from_layer": 3}, "from_layer 3 does not exist"),
        ({"from_layer": -1}, "from_layer -1 does not exist"),
    ],
)
def test_bad_settings_leave_nothing_behind(folder, settings, tmp_path, changes, says, unchecked):
    out = tmp_path / "below" / "out"
    with pytest.raises(InputError) as raised:
        study([ape(folder)], out, replace(settings, **changes))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not out.parent.exists()


def test_texts_shorter_than_a_prompt_are_refused(folder, settings, tmp_path):
    with pytest.raises(InputError, match=r"no document of text .*short\.txt' has 12 tokens \(the longest has 5\)"):
        study([ape(folder)], tmp_path / "out", replace(settings, text=str(folder / "short.txt")))
    assert not (tmp_path / "out").exists()


def test_bad_models_are_refused_before_the_first_is_measured(folder, settings, tmp_path):
    def advance(*_: Any) -> None:
        raise AssertionError("something was measured")

    for sources, says in (
        ([], "no model given"),
        ([ape(folder), "/nowhere"], "'/nowhere' does not exist"),
        ([ape(folder), ape(folder)], "are both called 'ape'"),
        ([ape(folder), f"{folder / 'ape'}@step9"], "has no revision 'step9'"),
    ):
        with pytest.raises(InputError, match=says):
            study(sources, tmp_path / "out", settings, advance=advance)
    shallow = tmp_path / "shallow"
    config = families.FAMILIES["llama"]()
    config.num_hidden_layers = 1
    families.build(config).save_pretrained(shallow)
    families.tokenizer().save_pretrained(shallow)
    with pytest.raises(InputError, match="from_layer 2 does not exist in shallow; it has blocks 0 to 0"):
        study([ape(folder), str(shallow)], tmp_path / "out", replace(settings, from_layer=2), advance=advance)
    assert not (tmp_path / "out").exists()


def test_a_model_without_tokenizer_is_refused(settings, tmp_path):
    families.model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match="bare has no tokenizer"):
        study([str(tmp_path / "bare")], tmp_path / "out", settings)


def test_an_output_that_cannot_be_is_refused_at_once(folder, settings, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is no folder"):
        study([ape(folder)], tmp_path / "file" / "out", settings)


def test_an_older_result_survives_an_error(folder, settings, tmp_path):
    (tmp_path / "jacobian.nc").write_bytes(b"older")
    with pytest.raises(Stop):
        study([ape(folder)], tmp_path, settings, advance=stopping_at("ape pretrained"))
    assert files(tmp_path) == ["jacobian.nc"]
    assert (tmp_path / "jacobian.nc").read_bytes() == b"older"


# ------------------------------------------------------------------------------------------------------------- theories


def test_the_kernel_stands_beside_the_measurement(whole, folder):
    _, result = whole
    assert result["theory_score_path"].dims == ("condition", "seed", "prompt", "position")
    model = probes.load(ape(folder))
    for condition, seed, view in (("pretrained", 0, model), ("init", 1, model.reinitialized(1))):
        one = result.sel(condition=condition).isel(seed=seed)
        expected = second_moment(view, torch.tensor(one["tokens"].values), attention="measured", score_path=True)
        np.testing.assert_allclose(one["theory_score_path"], expected["sensitivity"], rtol=1e-5)  # float32


def test_n_to_the_l_is_fitted_to_the_mean_profile(whole):
    _, result = whole
    for number, condition in enumerate(("pretrained", "init")):
        mean = band([run.mean for run in profiles(result)[condition]]).centre
        fit = fit_alpha(mean, families.BLOCKS)
        assert float(result["alpha"][number]) == pytest.approx(fit.alpha)
        np.testing.assert_allclose(result["theory_cesaro"][number], fit.curve, rtol=1e-5)


@pytest.fixture(scope="module")
def theories(folder: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    out = tmp_path_factory.mktemp("theories") / "out"
    every = replace(settings, theories=("uniform", "values", "score_path", "config"), by_path=True)
    return out, study([ape(folder)], out, every, name="theory")["ape"]


@pytest.mark.slow
def test_a_study_of_theories(theories, whole, folder):
    out, result = theories
    assert files(out) == ["theory.nc", "theory.png", "theory.svg"]
    same = whole[1]["sensitivity"].values  # the same directions were pulled
    np.testing.assert_allclose(result["sensitivity"].values, same, rtol=1e-5)  # in float32, in other batches
    assert {"theory_uniform", "theory_values", "theory_score_path", "theory_config", "value", "score"} <= set(result)
    model = probes.load(ape(folder))
    one = result.sel(condition="pretrained").isel(seed=0)
    tokens = torch.tensor(one["tokens"].values)
    for path in ("value", "score"):
        expected = jacobian(model, tokens, method="sketch", products=8, pathway=path)
        np.testing.assert_allclose(one[path], expected["sensitivity"], rtol=1e-4)  # float32
    from_config = second_moment_from_config(model, tokens=tokens)["sensitivity"]
    np.testing.assert_allclose(one["theory_config"], from_config, rtol=1e-5)


@pytest.mark.slow
def test_agreements_are_computed_from_the_result(theories):
    _, result = theories
    found = {row.condition: row for row in agreements({"ape": result})}
    assert list(found) == ["pretrained", "init"]
    for condition, row in found.items():
        measured = band([run.mean for run in profiles(result)[condition]]).centre
        for theory, error in row.errors.items():
            predicted = band([run.mean for run in profiles(result, f"theory_{theory}")[condition]]).centre
            assert error == pytest.approx(np.mean(np.abs(predicted / measured - 1)))
        value = band([run.mean for run in profiles(result, "value")[condition]]).centre
        assert row.shares["value"] == pytest.approx(np.mean(value / measured))
        np.testing.assert_allclose(
            row.shapes["score_path"],
            np.std(
                np.log(band([run.mean for run in profiles(result, "theory_score_path")[condition]]).centre / measured)
            ),
        )
        assert row.shapes["cesaro"] > 0
        assert len(list(agreement_cells(row))) == len(AGREEMENT_COLUMNS)
    bare = result.drop_vars(["theory_config", "score"])
    (first, _) = agreements({"ape": bare})
    assert "config" not in first.errors
    assert list(agreement_cells(first)).count("-") == 2
    large = replace(found["init"], errors={"uniform": 15.2, "values": 0.674})
    assert list(agreement_cells(large))[2:4] == ["1,520%", "67.4%"]  # one unit for all of a row


@pytest.mark.slow
def test_pathways_have_the_theory_that_belongs_to_them(folder, settings, tmp_path):
    value = study([ape(folder)], tmp_path / "value", replace(settings, seeds=1, pathway="value"))["ape"]
    assert "theory_values" in value
    assert "theory_score_path" not in value
    score = study([ape(folder)], tmp_path / "score", replace(settings, seeds=1, pathway="score"))["ape"]
    assert [name for name in score if str(name).startswith("theory_")] == ["theory_cesaro"]
    one = score.sel(condition="pretrained").isel(seed=0)
    expected = jacobian(
        probes.load(ape(folder)), torch.tensor(one["tokens"].values), method="sketch", products=8, pathway="score"
    )
    np.testing.assert_allclose(one["sensitivity"], expected["sensitivity"], rtol=1e-6)


@pytest.mark.slow
def test_models_that_cannot_be_taken_apart_are_measured_without_theory(folder, settings, tmp_path):
    short = replace(settings, seeds=1, prompts=1)
    lens = study([ape(folder)], tmp_path, short, backend="transformer_lens")["ape"]
    assert "theory_score_path" not in lens
    wanted = replace(short, theories=("uniform",))
    with pytest.raises(InputError, match=r"block 0 of 'ape' .* cannot be taken apart"):
        study([ape(folder)], tmp_path / "two", wanted, backend="transformer_lens")
