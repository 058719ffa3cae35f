"""Two results held against each other: known factors, explicit loops, pairing, refusals, the command."""

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

import probes
from probes.compare import compare_results, comparison_report, pairing
from probes.errors import InputError
from probes.measures.leakage import leakage
from probes.results.dataset import dataset, save
from probes.results.statistics import apart, jackknifed, paired
from probes.results.ushape import shape_of

LENGTH = 20
EXACT = 1e-10


def profile(
    values: np.ndarray, tokens: np.ndarray | None = None, documents: list[str] | None = None, **attrs: Any
) -> Any:
    """A result of jacobian that holds these elasticities [prompt, position]."""
    ids = np.arange(values.size).reshape(values.shape) if tokens is None else tokens
    dims, options = ("prompt", "position"), {"measurement": "jacobian", "method": "exact", "query": values.shape[1] - 1}
    usual = {"headwater": "0", "model": "made", "condition": "pretrained", "dtype": "float64", "options": options}
    made = dataset({"elasticity": (dims, values), "tokens": (dims, ids)}, attrs=usual | attrs)
    return made if documents is None else made.assign_coords(document=("prompt", documents))


def drawn(random: np.random.Generator, prompts: int = 12, own: float = 0.3, shared: float = 0.8) -> tuple[Any, Any]:
    """Two profiles of the same prompts, both around 1: what a prompt does to both, to each alone, and to each position."""
    common = shared * random.standard_normal((prompts, 1))
    alone = ((prompts, 1), (prompts, LENGTH))
    both = [sum(own * size * random.standard_normal(x) for size, x in zip((1, 0.3), alone, strict=True)) for _ in "ab"]
    return np.exp(common + both[0]), np.exp(common + both[1])


@pytest.fixture(scope="module")
def measured():
    """Small results of tiny-llama by measurement."""
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=4, length=32)
    return {
        "jacobian": probes.jacobian(model, tokens, method="scalar"),
        "trajectory": probes.trajectory(model, tokens, starts=8),
        "leakage": leakage(model, tokens, bootstrap=20),
        "retrieval": probes.retrieval(model, pairs=9, digits=3, keys="apart", contexts=4),
    }


def test_scaled_copy_has_that_factor_without_doubt(measured):
    whole = measured["jacobian"]
    found = compare_results(whole, whole.assign(elasticity=2 * whole["elasticity"]))
    factors = {"middle": 2, "first": 1, "primacy": 1, "recency": 1, "last": 1}
    for name, factor in factors.items():
        np.testing.assert_allclose(found.row(name).change[:3], factor, rtol=EXACT)
    assert found.row("trough").change.value == 0
    assert found.remarks == []
    assert {row.how for row in found.rows if row.name != "trough"} == {"by prompt"}
    # What prompts do to both cancels.
    a, b = drawn(np.random.default_rng(3), own=0.1)
    same = compare_results(profile(a), profile(b)).row("middle")
    other = compare_results(profile(a), profile(b, np.full(b.shape, 7))).row("middle")
    assert (same.how, other.how) == ("by prompt", "unpaired")
    by_document = profile(b, np.full(b.shape, 7), documents=list("xyz" * 4))
    assert "12 prompts in A and 3 documents in B" in compare_results(profile(a), by_document).paired
    assert same.change.value == pytest.approx(other.change.value)

    def middle(some: np.ndarray) -> float:
        return math.log(slowly(some, list(range(len(some))))["middle"])

    own = apart(*(jackknifed(middle, x, np.arange(len(x))) for x in (a, b)))
    np.testing.assert_allclose(np.log(other.change[:3]), own[:3], atol=EXACT)
    assert math.log(same.change.high / same.change.low) < 0.3 * math.log(other.change.high / other.change.low)


def slowly(values: np.ndarray, chosen: list[int]) -> dict[str, float]:
    """The numbers of a profile from some prompts, with loops."""
    length = values.shape[1]
    curve = [math.exp(sum(math.log(values[p, j]) for p in chosen) / len(chosen)) for j in range(length)]
    inner = sorted(curve[math.ceil(length / 4) : math.ceil(3 * length / 4)])
    half = len(inner) // 2
    middle = inner[half] if len(inner) % 2 else (inner[half - 1] + inner[half]) / 2
    arm = length // 4 - 1
    ends = {"first": curve[:1], "primacy": curve[1 : 1 + arm], "recency": curve[-1 - arm : -1], "last": curve[-1:]}
    return {"middle": middle} | {name: sum(end) / len(end) / middle for name, end in ends.items()}


def test_numbers_and_paired_intervals_are_those_of_loops():
    random = np.random.default_rng(41)
    a, b = (np.exp(random.standard_normal((6, 41))) for _ in range(2))
    documents = ["x", "y", "x", "z", "y", "x"]
    found = compare_results(profile(a, documents=documents), profile(b, documents=documents))
    assert "units are 3 documents" in found.paired
    everyone = list(range(6))
    one, other = slowly(a, everyone), slowly(b, everyone)
    assert set(one) | {"trough"} == {row.name for row in found.rows}
    kept = [[p for p in everyone if documents[p] != left_out] for left_out in "xyz"]
    for name in one:
        row = found.row(name)
        assert (row.a, row.b) == (pytest.approx(one[name]), pytest.approx(other[name]))
        without = [math.log(slowly(b, rest)[name] / slowly(a, rest)[name]) for rest in kept]
        reach = student.ppf(0.975, 2) * math.sqrt(2 / 3) * np.linalg.norm(np.subtract(without, np.mean(without)))
        change = math.log(other[name] / one[name])
        np.testing.assert_allclose(np.log(row.change[:3]), change + float(reach) * np.array([0, -1, 1]), atol=EXACT)


def test_trough_is_the_smoothed_minimum_and_its_interval_holds_it():
    random = np.random.default_rng(5)
    bowl = np.exp(0.3 * np.abs(np.arange(60) - 20) / 10)
    a, b = (np.roll(bowl, shift) * np.exp(0.02 * random.standard_normal((10, 60))) for shift in (0, 15))
    row = compare_results(profile(a), profile(b)).row("trough")
    assert row.a == shape_of(np.exp(np.log(a).mean(0))).trough
    assert not row.ratio
    assert row.change.value == row.b - row.a
    assert row.change.low <= 15 <= row.change.high
    assert row.change.high - row.change.low < 10


def test_conditions_seeds_and_pathways_are_compared_like_with_like():
    runs = np.random.default_rng(6).lognormal(size=(2, 2, 3, 2, LENGTH))  # condition, seed, pathway, prompt, position
    runs[0, 1] = np.nan  # a single pretrained model
    whole = profile(runs[0, 0, 0])
    dims = ("condition", "seed", "pathway", "prompt", "position")
    names = {"condition": ["pretrained", "init"], "seed": [0, 1], "pathway": ["total", "value", "score"]}
    several = whole.assign(elasticity=(dims, runs)).assign_coords(names)
    del several.attrs["condition"]
    found = compare_results(several, several.assign(elasticity=3 * several["elasticity"]))
    both = np.exp(np.log(runs[1, :, 2]).mean((0, 1)))  # fresh models: geometric mean over seeds, too
    assert found.row("middle", "init, score").a == pytest.approx(np.median(both[5:15]))
    assert found.row("middle", "init, score").change.value == pytest.approx(3)
    alone = compare_results(whole, several.sel(pathway="total", drop=True))
    assert {row.of for row in alone.rows} == {"pretrained"}
    assert any(line.startswith("only in B, or known only there: first (init)") for line in alone.remarks)


def test_positions_cut_off_stay_zero_and_outside_logarithms():
    a, b = drawn(np.random.default_rng(8))
    for x in (a, b):
        x[:, :16] = 0  # a window that reaches four positions back: no middle
    found = compare_results(profile(a), profile(2 * b))
    assert found.row("middle").a == 0
    assert math.isnan(found.row("middle").change.value)
    cells = {row[0]: row[2:] for row in comparison_report(found).tables[0].rows}
    assert cells["middle"] == ["0", "0", "-", "none"]
    assert "recency" not in cells  # a ratio to nothing
    alone = compare_results(*map(profile, drawn(np.random.default_rng(11), prompts=1)))
    assert all(math.isnan(row.change.low) and math.isfinite(row.change.value) for row in alone.rows)


def test_documents_pair_where_tokens_differ():
    random = np.random.default_rng(9)
    a, b = (np.exp(random.standard_normal((n, LENGTH))) for n in (5, 7))
    one, other = profile(a, documents=list("ppqrr")), profile(b, documents=list("rqpqrrq"))
    how, unit, other_unit = pairing(one, other)
    assert (how, unit.tolist(), other_unit.tolist()) == ("by document", [0, 0, 1, 2, 2], [2, 1, 0, 1, 2, 2, 1])
    found = compare_results(one, other)
    assert "other tokens of the same 3 documents" in found.paired
    middle = paired(lambda x: math.log(slowly(x, list(range(len(x))))["middle"]), (a, unit), (b, other_unit))
    np.testing.assert_allclose(np.log(found.row("middle").change[:3]), middle[:3], atol=EXACT)
    assert pairing(one, profile(b, documents=list("rqpqrrs")))[0] == "unpaired"
    assert pairing(profile(a, documents=list("ppppp")), profile(b, documents=list("ppppppp")))[0] == "unpaired"


def test_a_path_stands_for_its_result(tmp_path):
    one, other = drawn(np.random.default_rng(5))
    file = tmp_path / "a.nc"
    save(profile(one), file)
    found, expected = (compare_results(a, profile(other)).rows for a in (str(file), profile(one)))
    assert [row.change for row in found] == [row.change for row in expected]
    with pytest.raises(InputError, match="are the same file"):
        compare_results(file, file)


def test_a_result_beside_itself_differs_in_nothing(measured):
    for kind, ds in measured.items():
        found = compare_results(ds, ds.copy(deep=True))
        assert (found.measurement, found.remarks) == (kind, [])
        known = [row for row in found.rows if math.isfinite(row.change.value)]
        assert known
        assert all(row.a == row.b and row.change.value == float(row.ratio) for row in known)


def test_leakage_is_compared_by_its_own_intervals(measured):
    ds = measured["leakage"]
    ends = [f"log_form_of_heads{end}" for end in ("", "_low", "_high")]
    total = abs(ds[ends[0]]) + 0.01
    known = {name: total * factor for name, factor in zip(ends, (1, 0.8, 1.5), strict=True)}
    one, other = ds.assign(known), ds.assign({name: 3 * values for name, values in known.items()})
    row = compare_results(one, other).row("leakage V(l), median head (nat²)")
    assert (row.how, row.ratio) == ("own", True)
    reach = math.hypot(math.log(0.8), math.log(1.5))
    np.testing.assert_allclose(np.log(row.change[:3]), math.log(3) + reach * np.array([0, -1, 1]), rtol=1e-5)
    change = compare_results(one.assign(log_form_of_heads_low=-total), other).row("leakage V(l), median head (nat²)")
    assert (change.ratio, change.change.value) == (False, change.b - change.a)  # it may be zero: no logarithm


def test_recall_is_paired_by_couples_of_the_same_lists(measured):
    ds = measured["retrieval"]
    more = ds.assign(log_p=ds["log_p"] + np.random.default_rng(15).uniform(0, 1, ds["log_p"].shape))
    found = compare_results(ds, more)
    a, b = (x["log_p"].values.reshape(2, 2, 9) for x in (ds, more))  # couples, each with two lists
    expected = paired(lambda v: float(v.mean()), (a, np.arange(2)), (b, np.arange(2)))[:3]
    np.testing.assert_allclose(found.row("log p (nat)").change[:3], expected, rtol=1e-9)
    first = [shape_of(np.exp(x["log_p"].values.mean(0))).first for x in (ds, more)]
    np.testing.assert_allclose([found.row("first pair").a, found.row("first pair").b], first)
    assert "both have the same 4 lists; units are 2 sets" in found.paired
    longer = measured["retrieval"].assign_attrs(tokens_sha256="other", options=ds.attrs["options"].replace("9", "12"))
    apart = compare_results(ds, longer)
    assert apart.paired.startswith("unpaired: other lists, 2 sets")
    assert "differs: pairs: 9 in A, 12 in B" in apart.remarks


def test_settings_that_differ_are_named(measured):
    ds = measured["leakage"]
    options = '{"measurement": "leakage", "lags": [1, 2], "bootstrap": 7, "seed": 3}'
    other = ds.assign_attrs(text_source="prose", options=options, weights_file='{"types": {"Q4_0": 3, "F32": 1}}')
    said = " ".join(compare_results(ds, other).remarks)
    for part in (
        "text source: not said in A, prose in B",
        "float32 dequantized from Q4_0 in B",
        "8] in A, [1, 2] in B",
    ):
        assert part in said
    assert not re.search("bootstrap|seed|weights of that name", said)
    quantized = " ".join(compare_results(ds, ds.assign_attrs(weights="0123456789abcdef")).remarks)
    assert re.search(r"weights of that name: \w+ in A, 0123456789ab in B", quantized)


def test_what_cannot_be_compared_is_refused(measured):
    a, b = drawn(np.random.default_rng(13))
    leaking = measured["leakage"]
    other = leaking.assign_coords(band=["1-2"] * leaking.sizes["band"])
    for one, two, says in (
        (measured["jacobian"], measured["trajectory"], "A is a result of jacobian, B of trajectory; compare two "),
        (profile(a), profile(b[:, :18]), "prompts of A have 20 tokens, those of B 18"),
        (profile(a, options={"measurement": "match"}), profile(b), "a result of match holds no numbers to compare; "),
        (leaking, other, "no number in common"),
    ):
        with pytest.raises(InputError, match=says):
            compare_results(one, two)
