"""The one loop, by the measure with most units: what it writes, how it goes on after an interruption, what it refuses."""

import json
import shlex
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
from commands import call
from kept import Stop, listed, never, stopping_at

import probes
from probes.data.prompts import prompts
from probes.errors import InputError
from probes.loop import run
from probes.measure import measure
from probes.measures.jacobian import KERNELS, Options, jacobian
from probes.options import Loading, Prompts
from probes.results.curves import band, rms_profiles
from probes.results.dataset import replaced, save, set_command, tokens_hash
from probes.theory.cesaro import fit_alpha
from probes.theory.kernel import second_moment, second_moment_from_config

LENGTH = 12
FEW = Options(seeds=2, products=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, "ape" and "bee", one of them with an earlier step, and a text for them."""
    made = families.checkpoints(tmp_path_factory.mktemp("models"), ape=("llama", "prepended"), bee=("gpt2", "end"))
    families.model("llama", seed=1).save_pretrained(made / "ape/step0")
    families.tokenizer().save_pretrained(made / "ape/step0")
    return made


def study(folder: Path, out: Path, options: Options = FEW, name: str = "jacobian", **given: Any) -> xr.Dataset:
    """The result of "ape", or of the model `source`; `given` are fields of prompts and of loading, and `advance`."""
    source, advance = given.pop("source", str(folder / "ape")), given.pop("advance", None)
    loading = {key: given.pop(key) for key in ("backend", "dtype") if key in given}
    chosen = Prompts(**{"prompts": 2, "length": LENGTH, "text": folder / "text.txt", **given})
    results = run(measure(name), [source], out, options, chosen, Loading(**loading), advance=advance)
    return next(iter(results.values()))


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    """A run without an interruption: its folder and result."""
    out = tmp_path_factory.mktemp("whole") / "out"
    heard: dict[str, list[tuple[float, float]]] = {}
    result = study(folder, out, advance=lambda label, *step: heard.setdefault(label, []).append(step))
    assert list(heard) == ["ape pretrained", "ape init 0", "ape init 1"]
    for steps in heard.values():
        done = [step for step, _ in steps]
        assert done == sorted(done)
        assert steps[-1][0] == steps[-1][1]
    return out, result


def test_files_provenance_and_numbers_of_the_library(whole, folder):
    out, result = whole
    assert listed(out) == ["jacobian.md", "jacobian.nc", "jacobian.png", "jacobian.svg"]
    xr.testing.assert_identical(probes.load_result(out / "jacobian.nc"), result)
    values = result["sensitivity"]
    assert values.dims == result["stderr"].dims == ("condition", "seed", "prompt", "position")
    assert (list(result["condition"].values), list(result["seed"].values)) == (["pretrained", "init"], [0, 1])
    assert result["sensitivity"].notnull().all(("prompt", "position")).sum("seed").values.tolist() == [1, 2]
    assert values.sel(condition="pretrained", seed=1).isnull().all()

    model, attrs = probes.load(str(folder / "ape")), result.attrs
    tokens = prompts(model, n=2, length=LENGTH, text=folder / "text.txt")
    assert np.array_equal(result["tokens"], tokens)
    assert (attrs["tokens_sha256"], attrs["model"], attrs["measure"]) == (tokens_hash(tokens), "ape", "jacobian")
    assert attrs["text_source"] == f"text '{folder / 'text.txt'}'"
    assert (attrs["first_policy"], attrs["first_id"], attrs["prompts_seed"]) == ("bos", 0, 0)
    expected = {"method": "sketch", "products": 8, "readout": "residual", "from_layer": 0, "query": LENGTH - 1}
    assert expected.items() <= json.loads(attrs["options"]).items()

    fresh = {("init", seed): model.reinitialized(seed) for seed in (0, 1)}
    for (condition, seed), view in {("pretrained", 0): model, **fresh}.items():
        assert str(result["weights"].sel(condition=condition, seed=seed).values) == view.identity.weights
        own = jacobian(view, tokens, method="sketch", products=8)["sensitivity"]
        assert np.array_equal(values.sel(condition=condition, seed=seed).values, own.values)


def test_a_result_is_drawn_by_its_measure_and_nothing_else_is_drawn(whole, tmp_path):
    probes.chart(whole[1], path=tmp_path / "drawn")
    assert listed(tmp_path) == ["drawn.png", "drawn.svg"]
    with pytest.raises(InputError, match="no results of one measure to draw"):
        probes.chart({"ape": whole[1], "bee": xr.Dataset(attrs={"measure": "sinks"})})


def test_theories_stand_beside_the_measurement(whole, folder):
    _, result = whole
    model = probes.load(str(folder / "ape"))
    tokens = torch.tensor(result["tokens"].values)
    for condition, seed, view in (("pretrained", 0, model), ("init", 1, model.reinitialized(1))):
        one = result.sel(condition=condition).isel(seed=seed)
        expected = second_moment(view, tokens, attention="measured", score_path=True)
        np.testing.assert_allclose(one["theory_score_path"], expected["sensitivity"], rtol=1e-5)  # float32
    for number, condition in enumerate(("pretrained", "init")):
        mean = band([one.mean for one in rms_profiles(result)[condition]]).centre
        fit = fit_alpha(mean, families.BLOCKS)
        assert float(result["alpha"][number]) == pytest.approx(fit.alpha)
        np.testing.assert_allclose(result["theory_cesaro"][number], fit.curve, rtol=1e-5)


@pytest.mark.slow
def test_theory_has_every_kernel_and_both_paths(whole, folder, tmp_path):
    theory = measure("theory")
    result = study(folder, tmp_path, theory.options(seeds=1, products=8), "theory")
    assert listed(tmp_path) == ["theory.md", "theory.nc", "theory.png", "theory.svg"]
    one, before = (ds.sel(condition="pretrained").isel(seed=0) for ds in (result, whole[1]))
    np.testing.assert_allclose(one["sensitivity"], before["sensitivity"], rtol=1e-5)  # in float32, in other batches
    model, tokens = probes.load(str(folder / "ape")), torch.tensor(one["tokens"].values)
    for path in ("value", "score"):
        expected = jacobian(model, tokens, method="sketch", products=8, pathway=path)
        np.testing.assert_allclose(one[path], expected["sensitivity"], rtol=1e-4)  # float32
    kernels = {name: second_moment(model, tokens, **given) for name, given in KERNELS.items()}
    kernels["config"] = second_moment_from_config(model, tokens=tokens)
    for name, predicted in kernels.items():
        np.testing.assert_allclose(one[f"theory_{name}"], predicted["sensitivity"], rtol=1e-5)
    assert "off the measured profile" in theory.answer({"ape": result})[0]


@pytest.mark.slow
def test_several_models_revisions_and_no_positions(folder, tmp_path):
    sources = [str(folder / "ape"), f"{folder / 'ape'}@step0", str(folder / "bee")]
    chosen = Prompts(prompts=2, length=LENGTH, text=folder / "text.txt")
    results = run(measure("jacobian"), sources, tmp_path, replace(FEW, no_rope=True, seeds=1), chosen)
    files = ["jacobian-ape.nc", "jacobian-ape@step0.nc", "jacobian-bee.nc"]
    assert listed(tmp_path) == [*files, "jacobian.md", "jacobian.png", "jacobian.svg"]
    assert list(results) == ["ape", "ape@step0", "bee"]
    assert all(list(ds["condition"].values) == ["pretrained", "init", "init-nope"] for ds in results.values())
    assert results["bee"].attrs["first_policy"] == "none"  # its BOS is its end token
    assert len({str(ds["weights"].sel(condition="pretrained", seed=0).values) for ds in results.values()}) == 3


def test_a_result_of_another_command_is_named_before_it_is_replaced(folder, tmp_path, monkeypatch, capsys):
    words = ["loss", str(folder / "ape"), "--length", "12", "--text", str(folder / "text.txt"), "--out", str(tmp_path)]
    first = [*words, "--prompts", "2"]
    file, said = tmp_path / "loss.nc", []
    for given in (first, [*words, "--prompts", "3"]):
        assert call(monkeypatch, *given) == 0
        said.append([line for line in capsys.readouterr().err.splitlines() if "replace" in line])
    line = f"headwater: will replace {file}, made by `{shlex.join(['headwater', *first])}`; another --out keeps both"
    assert said == [[], [line]]
    assert replaced([file, tmp_path / "loss.md", tmp_path, tmp_path / "gone.nc"]) == []  # by the command that made it
    set_command([])
    save(probes.load_result(file).assign_attrs(command=""), file)
    assert replaced([file]) == [f"will replace {file}, made by Python; another --out keeps both"]


@pytest.fixture(scope="module")
def half(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("half")
    with pytest.raises(Stop):
        study(folder, out, replace(FEW, seeds=1), advance=stopping_at("ape init 0"))
    return out


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_more_seeds_and_the_same_text_elsewhere(folder, whole, half, tmp_path):
    out, text = tmp_path / "out", tmp_path / "elsewhere" / "text.txt"
    shutil.copytree(half, out)
    text.parent.mkdir()
    shutil.copy(folder / "text.txt", text)
    assert [file.parent.name.rpartition("-")[0] for file in kept.written(out)] == ["ape-pretrained"]
    heard: list[str] = []
    result = study(folder, out, text=text, advance=lambda label, *_: heard.append(label))
    assert "ape pretrained" not in heard
    assert listed(out) == ["jacobian.md", "jacobian.nc", "jacobian.png", "jacobian.svg"]
    for name in ("sensitivity", "stderr", "tokens"):
        np.testing.assert_array_equal(result[name], whole[1][name])  # bit for bit


@pytest.mark.parametrize(
    ("changes", "given", "says"),
    [
        ({"conditions": "init,trained"}, {}, "conditions 'init,trained' are not init, pretrained or both"),
        ({}, {"length": 7}, "7 tokens, query -1: no middle"),
        ({"method": "exact"}, {}, "products=8 goes with method 'sketch', not 'exact'"),
        ({"query": 12}, {}, "query 12 is outside the prompt"),
    ],
)
def test_bad_settings_leave_nothing_behind(folder, tmp_path, changes, given, says):
    out = tmp_path / "below" / "out"
    with pytest.raises(InputError) as raised:
        study(folder, out, replace(FEW, **changes), **given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not out.parent.exists()


def test_bad_models_are_refused_before_the_first_is_measured(folder, tmp_path):
    families.build(families.FAMILIES["llama"]()).save_pretrained(tmp_path / "bare")
    for source, says in (
        (f"{folder / 'ape'}@step9", "has no revision 'step9'"),
        (str(tmp_path / "bare"), "bare has no tokenizer"),
        (str(folder / "ape"), "are both called 'ape'"),
    ):
        sources = [str(folder / "ape"), source]
        with pytest.raises(InputError, match=says):
            run(measure("jacobian"), sources, tmp_path / "out", FEW, Prompts(length=LENGTH), advance=never)
    assert not (tmp_path / "out").exists()
