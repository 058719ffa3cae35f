"""The study behind `headwater jacobian`: what it writes, how it goes on after an interruption, what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import kept
import numpy as np
import pytest
import torch
import xarray as xr
from kept import Stop, listed, never, stopping_at

import probes
from probes.data.prompts import prompts
from probes.errors import InputError
from probes.measures.jacobian import jacobian
from probes.results.curves import band, rms_profiles
from probes.results.dataset import tokens_hash
from probes.studies import study as studied
from probes.studies.study import COLUMNS, Settings, agreement_cells, agreements, cells, study, summarize
from probes.theory.cesaro import fit_alpha
from probes.theory.kernel import second_moment, second_moment_from_config

LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, "ape" and "bee", one of them with an earlier step, and a text for them."""
    made = families.checkpoints(tmp_path_factory.mktemp("models"), ape=("llama", "prepended"), bee=("gpt2", "end"))
    families.model("llama", seed=1).save_pretrained(made / "ape/step0")
    families.tokenizer().save_pretrained(made / "ape/step0")
    return made


@pytest.fixture(scope="module")
def settings(folder: Path) -> Settings:
    return Settings(seeds=2, prompts=2, length=LENGTH, products=8, text=str(folder / "text.txt"))


def ape(folder: Path) -> str:
    return str(folder / "ape")


@pytest.fixture(scope="module")
def whole(folder: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    """A study without an interruption: its folder and result."""
    out = tmp_path_factory.mktemp("whole") / "out"
    heard: dict[str, list[tuple[float, float]]] = {}
    result = study([ape(folder)], out, settings, advance=lambda label, *step: heard.setdefault(label, []).append(step))
    assert list(heard) == ["ape pretrained", "ape init 0", "ape init 1"]
    for steps in heard.values():
        done = [step for step, _ in steps]
        assert done == sorted(done)
        assert steps[-1][0] == steps[-1][1]
    return out, result["ape"]


def test_files_provenance_and_numbers_of_the_library(whole, folder):
    out, result = whole
    assert listed(out) == ["jacobian.nc", "jacobian.png", "jacobian.svg"]
    assert (out / "jacobian.png").read_bytes().startswith(b"\x89PNG")
    xr.testing.assert_identical(probes.load_result(out / "jacobian.nc"), result)
    values = result["sensitivity"]
    assert values.dims == result["stderr"].dims == ("condition", "seed", "prompt", "position")
    assert values.shape == (2, 2, 2, LENGTH)
    assert (list(result["condition"].values), list(result["seed"].values)) == (["pretrained", "init"], [0, 1])
    assert list(result["runs"].values) == [1, 2]
    assert (values.sel(condition="init") > 0).all()
    assert values.sel(condition="pretrained", seed=1).isnull().all()

    model, attrs = probes.load(ape(folder)), result.attrs
    tokens = prompts(model, n=2, length=LENGTH, text=folder / "text.txt")
    assert np.array_equal(result["tokens"], tokens)
    assert (attrs["tokens_sha256"], attrs["model"]) == (tokens_hash(tokens), "ape")
    assert attrs["text_source"] == f"text '{folder / 'text.txt'}'"
    assert (attrs["first_policy"], attrs["first_id"], attrs["prompts_seed"]) == ("bos", 0, 0)
    expected = {"method": "sketch", "products": 8, "readout": "residual", "from_layer": 0, "query": LENGTH - 1}
    assert expected.items() <= json.loads(attrs["options"]).items()

    for condition, seed, view in (
        ("pretrained", 0, model),
        ("init", 0, model.reinitialized(0)),
        ("init", 1, model.reinitialized(1)),
    ):
        assert str(result["weights"].sel(condition=condition, seed=seed).values) == view.identity.weights
        own = jacobian(view, tokens, method="sketch", products=8)["sensitivity"]
        assert np.array_equal(values.sel(condition=condition, seed=seed).values, own.values)


def test_summary(whole):
    rows = summarize({"ape": whole[1]})
    assert {row.condition: row.seeds for row in rows} == {"pretrained": 1, "init": 2}
    for row in rows:
        shown = list(cells(row))
        assert len(shown) == len(COLUMNS)
        assert shown[:3] == ["ape", row.condition, str(row.seeds)]
        assert 0 < row.error < 1
        assert shown[-1].endswith("%")
    assert studied.rope_correlations({"ape": whole[1]}) == {}


@pytest.mark.slow
def test_several_models_revisions_and_no_positions(folder, settings, tmp_path):
    once = replace(settings, no_rope=True, seeds=1)
    results = study([ape(folder), f"{folder / 'ape'}@step0", str(folder / "bee")], tmp_path, once)
    figures = ["jacobian.png", "jacobian.svg"]
    assert listed(tmp_path) == ["jacobian-ape.nc", "jacobian-ape@step0.nc", "jacobian-bee.nc", *figures]
    assert list(results) == ["ape", "ape@step0", "bee"]
    assert all(list(ds["condition"].values) == ["pretrained", "init", "init-nope"] for ds in results.values())
    correlations = studied.rope_correlations(results)
    assert list(correlations) == list(results)
    assert all(-1 <= value <= 1 for value in correlations.values())
    assert results["bee"].attrs["first_policy"] == "none"  # its BOS is its end token
    assert len(summarize(results)) == 9
    weights = {str(ds["weights"].sel(condition="pretrained", seed=0).values) for ds in results.values()}
    assert len(weights) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in its jvp
def test_every_setting_runs_to_the_end(folder, settings, tmp_path):
    for changes in (
        {"conditions": ("init",), "method": "exact", "products": None, "query": 8},
        {"conditions": ("pretrained",), "prompts": 1, "method": "scalar", "products": None, "first": 7},
        {"products": "auto", "relative_error": 0.5, "readout": "logits"},
        {"readout": "normed", "from_layer": 2, "first": "none", "length": 8},
    ):
        result = study([ape(folder)], tmp_path, replace(settings, **{"seeds": 1, **changes}))["ape"]
        assert all(len(list(cells(row))) == len(COLUMNS) for row in summarize({"ape": result}))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["transformers", "transformer_lens"])
def test_backends_and_dtypes(folder, settings, tmp_path, whole, backend):
    given: dict[str, Any] = {"backend": backend, "dtype": "float64"}
    result = study([ape(folder)], tmp_path, replace(settings, seeds=1), **given)["ape"]
    assert (result.attrs["backend"], result.attrs["dtype"]) == (backend, "float64")
    found, expected = (x["sensitivity"].sel(condition="pretrained", seed=0).values for x in (result, whole[1]))
    # The sketch's basis differs by rounding, in float32 amplified by weights twenty times too wide.
    assert np.abs(found - expected).max() < 0.05 * expected.max()
    apart = backend == "transformers"
    assert ("theory_score_path" in result) == apart  # others are measured without theory
    if not apart:
        with pytest.raises(InputError, match=r"block 0 of 'ape' .* cannot be taken apart"):
            study([ape(folder)], tmp_path / "two", replace(settings, theories=("uniform",)), **given)


@pytest.fixture(scope="module")
def half(folder: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("half")
    with pytest.raises(Stop):
        study([ape(folder)], out, replace(settings, seeds=1), advance=stopping_at("ape init 0"))
    return out


@pytest.mark.slow
def test_an_interrupted_study_goes_on_with_more_seeds_and_the_same_text_elsewhere(
    folder, settings, whole, half, tmp_path
):
    out, text = tmp_path / "out", tmp_path / "elsewhere" / "text.txt"
    shutil.copytree(half, out)
    text.parent.mkdir()
    shutil.copy(folder / "text.txt", text)
    made = kept.written(out)
    assert [file.parent.name.rpartition("-")[0] for file in made] == ["ape-pretrained"]
    heard: dict[str, list[tuple[float, float]]] = {}

    def advance(label: str, done: float, total: float) -> None:
        heard.setdefault(label, []).append((done, total))
        if label == "ape init 0":
            assert kept.written(out) == made  # not written again

    result = study([ape(folder)], out, replace(settings, text=str(text)), advance=advance)["ape"]
    assert "ape pretrained" not in heard
    assert len(heard["ape init 1"]) > 1
    assert listed(out) == ["jacobian.nc", "jacobian.png", "jacobian.svg"]
    for name in ("sensitivity", "stderr", "products", "tokens"):
        np.testing.assert_array_equal(result[name], whole[1][name])  # bit for bit
    attrs, expected = result.attrs, whole[1].attrs
    assert {k for k in attrs | expected if attrs.get(k) != expected.get(k)} <= {"created", "text_source"}


@pytest.mark.slow
def test_units_measured_with_other_settings_are_not_taken_for_these(folder, settings, half, tmp_path):
    (tmp_path / "other.txt").write_text(" ".join(f"w{3 + i % 99}" for i in range(300)), encoding="utf-8")
    other: dict[str, Any] = {"products": 16, "relative_error": 0.1, "readout": "normed", "query": -2, "from_layer": 1}
    other |= {"seed": 1, "prompts": 3, "length": 16, "first": "none", "text": str(tmp_path / "other.txt")}
    shutil.copytree(folder / "ape" / "step0", tmp_path / "ape")
    runs: list[tuple[str, Settings, dict[str, Any]]] = [
        *((ape(folder), replace(settings, **{name: value}), {}) for name, value in other.items()),
        (ape(folder), replace(settings, method="exact", products=None), {}),
        (ape(folder), settings, {"dtype": "float64"}),
        (ape(folder), settings, {"backend": "transformer_lens"}),
        (str(tmp_path / "ape"), settings, {}),
    ]
    for source, changed, given in runs:
        with pytest.raises(Stop):  # what the folder holds is not there for these
            study([source], half, changed, advance=stopping_at("ape pretrained"), **given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conditions": ("init", "trained")}, "condition 'trained' does not exist; use init and pretrained"),
        ({"conditions": ()}, "name none or one twice"),
        ({"conditions": ("init", "init")}, "conditions 'init,init' name none or one twice"),
        ({"conditions": ("pretrained",), "no_rope": True}, "--no-rope repeats the init condition"),
        ({"seeds": 0}, "seeds=0"),
        ({"length": 7}, "length=7 leaves no middle"),
        ({"prompts": 0}, "n=0 prompts"),
        ({"method": "quick"}, "method 'quick' does not exist; use exact, sketch, scalar"),
        ({"readout": "loss"}, "readout 'loss' does not exist"),
        ({"products": 1}, "products=1 is too few for a sketch"),
        ({"method": "exact"}, "products=8 goes with method 'sketch', not 'exact'"),
        ({"relative_error": 0.0, "products": "auto"}, "relative_error=0.0"),
        ({"query": 6}, "query=6 leaves no middle"),
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


def test_bad_models_are_refused_before_the_first_is_measured(folder, settings, tmp_path):
    config = families.FAMILIES["llama"]()
    config.num_hidden_layers = 1
    for name in ("shallow", "bare"):
        families.build(config).save_pretrained(tmp_path / name)
    families.tokenizer().save_pretrained(tmp_path / "shallow")
    for source, says in (
        (f"{folder / 'ape'}@step9", "has no revision 'step9'"),
        (str(tmp_path / "shallow"), "from_layer 2 does not exist in shallow; it has blocks 0 to 0"),
        (str(tmp_path / "bare"), "bare has no tokenizer"),
    ):
        with pytest.raises(InputError, match=says):
            study([ape(folder), source], tmp_path / "out", replace(settings, from_layer=2), advance=never)
    assert not (tmp_path / "out").exists()


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
        mean = band([run.mean for run in rms_profiles(result)[condition]]).centre
        fit = fit_alpha(mean, families.BLOCKS)
        assert float(result["alpha"][number]) == pytest.approx(fit.alpha)
        np.testing.assert_allclose(result["theory_cesaro"][number], fit.curve, rtol=1e-5)


@pytest.mark.slow
def test_a_study_of_theories(whole, folder, settings, tmp_path):
    every = replace(settings, theories=("uniform", "values", "score_path", "config"), by_path=True)
    result = study([ape(folder)], tmp_path, every, name="theory")["ape"]
    assert listed(tmp_path) == ["theory.nc", "theory.png", "theory.svg"]
    same = whole[1]["sensitivity"].values  # the same directions were pulled
    np.testing.assert_allclose(result["sensitivity"].values, same, rtol=1e-5)  # in float32, in other batches
    model = probes.load(ape(folder))
    one = result.sel(condition="pretrained").isel(seed=0)
    tokens = torch.tensor(one["tokens"].values)
    for path in ("value", "score"):
        expected = jacobian(model, tokens, method="sketch", products=8, pathway=path)
        np.testing.assert_allclose(one[path], expected["sensitivity"], rtol=1e-4)  # float32
    kernels = {name: second_moment(model, tokens, **given) for name, given in studied.KERNELS.items()}
    kernels["config"] = second_moment_from_config(model, tokens=tokens)
    for name, predicted in kernels.items():
        np.testing.assert_allclose(one[f"theory_{name}"], predicted["sensitivity"], rtol=1e-5)


def test_committed_agreements_are_those_of_the_committed_results():
    reported = Path(__file__).resolve().parent.parent / "reports" / "llm" / "theory"
    result = probes.load_result(next(reported.glob("*.nc.xz")))
    found = agreements({result.attrs["model"]: result})
    written = (reported / "theory.md").read_text(encoding="utf-8")
    rows = ["| " + " | ".join(agreement_cells(row)) + " |" for row in found]
    assert [row for row in rows if row not in written] == []
    assert studied.described({"a": result}) in written
    assert [row.condition for row in found] == ["pretrained", "init"]
    bare, *_ = agreements({"ape": result.drop_vars(["theory_config", "score"])})
    assert len(bare.errors) == len(found[0].errors) - 1
    assert [cell == "-" for cell in agreement_cells(bare)][5::5] == [True, True]  # config, score
    assert len(list(agreement_cells(bare))) == len(studied.AGREEMENT_COLUMNS)
    large = replace(found[0], errors={"uniform": 15.2, "values": 0.674})
    assert list(agreement_cells(large))[2:4] == ["1,520%", "67.4%"]  # one unit for all of a row


@pytest.mark.slow
def test_pathways_have_the_theory_that_belongs_to_them(folder, settings, tmp_path):
    model = probes.load(ape(folder))
    for pathway, theory in (("value", ["theory_values"]), ("score", [])):
        result = study([ape(folder)], tmp_path / pathway, replace(settings, seeds=1, pathway=pathway))["ape"]
        assert [name for name in result if str(name).startswith("theory_")] == [*theory, "theory_cesaro"]
        one = result.sel(condition="pretrained").isel(seed=0)
        own = jacobian(model, torch.tensor(one["tokens"].values), method="sketch", products=8, pathway=pathway)
        np.testing.assert_allclose(one["sensitivity"], own["sensitivity"], rtol=1e-6)
