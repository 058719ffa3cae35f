"""Pieces and units: kept, read back, refused, removed; and probes that end the same wherever they stop."""

import os
from pathlib import Path
from typing import Any

import kept
import numpy as np
import pytest
import torch
import xarray as xr
from commands import bad_input, no_file_larger_than
from kept import Stop, interrupting, listed, never

import probes
from probes.errors import InputError
from probes.models.linear import LinearizedBlock
from probes.models.pullback import Prompt
from probes.results.dataset import made_with, save
from probes.run import resume
from probes.run.resume import BLOCK, Pieces, Store, Stores, each, groups, keeping, store_files, within
from probes.run.unfinished import Unfinished
from probes.studies.runner import kept_units

KEY_OF_TESTS = {"kind": "mine", "key": {"a": 1}}


def squares(limit: int | None = None, made: list[int] | None = None) -> Any:
    def measure(n: int) -> dict[str, np.ndarray]:
        if n == limit:
            raise Stop
        if made is not None:
            made.append(n)
        return {"square": np.array(n * n), "row": np.full((2, n + 1), n / 3, dtype=np.float32)}

    return measure


def values(pieces: Pieces) -> list[tuple[int, bytes]]:
    return [(int(piece["square"]), piece["row"].tobytes()) for piece in pieces]


def test_what_was_kept_is_not_measured_again(tmp_path):
    path, made = tmp_path / "unit", []
    path.with_name("unit-0.sqlite").touch()  # which a kill left empty
    assert Stores(path).key("") is None
    with pytest.raises(Stop), keeping(path, KEY_OF_TESTS):
        each("x", 5, squares(limit=3, made=made))
    assert made == [0, 1, 2]
    assert Stores(path).key("") == KEY_OF_TESTS
    with keeping(path, KEY_OF_TESTS):
        found = each("x", 5, squares(made=made))
        assert values(found) == values(each("x", 5, squares()))  # a second stage of that name is another one
    assert made == [0, 1, 2, 3, 4]
    assert values(found) == values(each("x", 5, squares()))  # without a file pieces stay in memory
    assert [piece["row"].shape for piece in found] == [(2, n + 1) for n in range(5)]
    assert found[0]["square"].shape == ()
    assert found.stacked("square").tolist() == [0, 1, 4, 9, 16]


def test_stages_are_told_apart_by_their_scope_not_by_what_ran_before_them(tmp_path):
    path = tmp_path / "unit"
    with keeping(path, KEY_OF_TESTS):
        for stage, number in (("before", 10), ("after", 20)):
            with within(stage):
                each("x", 2, lambda n, number=number: {"y": np.array(number + n)})
    with keeping(path, KEY_OF_TESTS), within("after"):  # the other was not needed this time
        assert each("x", 2, never).stacked("y").tolist() == [20, 21]


def test_a_piece_is_whole_or_not_there_wherever_a_kill_meets_it(tmp_path):
    """A process ends without a word in the transaction of piece 2, after so many of SQLite's steps."""
    ends = []
    for step in range(1, 20):
        path = tmp_path / f"unit{step}"
        child = os.fork()
        if child == 0:
            with keeping(path, KEY_OF_TESTS):
                die_in_the_transaction_of(2, step)
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        made: list[int] = []
        with keeping(path, KEY_OF_TESTS):
            found = each("x", 5, squares(made=made))
        assert made == ([2, 3, 4] if ends[-1] else [])
        assert values(found) == values(each("x", 5, squares()))
    assert ends.count(9) > 5
    assert set(ends) <= {0, 9}


def die_in_the_transaction_of(piece: int, step: int) -> None:
    left = step

    def count() -> int:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(9)
        return 0

    def measure(n: int) -> dict[str, np.ndarray]:
        if n == piece:
            kept_now = resume._kept.get()
            assert kept_now is not None
            kept_now.stores.own._connection().set_progress_handler(count, 3)
        return squares()(n)

    each("x", 5, measure)


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "unit"
    with keeping(path, KEY_OF_TESTS):
        each("x", 3, squares())
    (file,) = store_files(path)
    kept.rows(file, "UPDATE arrays SET content = CAST(X'01' || substr(content, 2) AS BLOB) WHERE piece = '1/x/1'")
    with keeping(path, KEY_OF_TESTS):
        found = each("x", 3, never)
        assert int(found[2]["square"]) == 4
        with pytest.raises(
            InputError, match=r"unit-0\.sqlite' is damaged \(row of .* is not as it was .*\); delete it"
        ):
            found.stacked("row")


def test_large_arrays_are_kept_in_blocks(tmp_path, monkeypatch):
    assert BLOCK < 10**9
    monkeypatch.setattr("probes.run.resume.BLOCK", 100)
    with keeping(tmp_path / "unit", KEY_OF_TESTS):
        found = each("x", 3, lambda n: {"long": np.arange(n, n + 200.0), "short": np.array([n])})
        assert found.stacked("long").tolist() == [list(range(n, n + 200)) for n in range(3)]
        assert [int(piece["short"][0]) for piece in found] == [0, 1, 2]
        assert found[2]["long"].flags.writeable


def test_one_array_of_every_piece_is_read_without_the_others(tmp_path, monkeypatch):
    with keeping(tmp_path / "unit", KEY_OF_TESTS):
        found = each("x", 5, lambda n: squares()(n) | {"heavy": np.zeros(10_000), "empty": np.zeros((0, 2), np.int8)})
    whole = found[3]
    assert {name: (x.dtype, x.shape) for name, x in whole.items()} == {
        "square": (np.dtype(np.int64), ()),
        "row": (np.dtype(np.float32), (2, 4)),
        "heavy": (np.dtype(np.float64), (10_000,)),
        "empty": (np.dtype(np.int8), (0, 2)),
    }
    real = Store.piece
    monkeypatch.setattr(Store, "piece", lambda self, *names: real(self, *names) if len(names) == 3 else None)
    assert found.stacked("square").tolist() == [0, 1, 4, 9, 16]
    assert found.stacked("empty").shape == (5, 0, 2)


def test_files_of_more_processes_are_read_and_left(tmp_path):
    path, made = tmp_path / "unit", []
    with pytest.raises(Stop), keeping(path, KEY_OF_TESTS):
        each("x", 4, squares(limit=2))
    store_files(path)[0].rename(tmp_path / "unit-7.sqlite")
    with keeping(path, KEY_OF_TESTS):
        assert values(each("x", 4, squares(made=made))) == values(each("x", 4, squares()))
    assert made == [2, 3]
    assert [file.name for file in store_files(path)] == ["unit-0.sqlite", "unit-7.sqlite"]
    assert store_files(tmp_path / "uni") == store_files(tmp_path / "unit-0") == []


def test_a_full_disk_is_one_line_and_keeps_what_was_there(tmp_path):
    file, full = tmp_path / "unit-0.sqlite", r"cannot write '.*unit-0\.sqlite' \(File too large\); free some space"
    with no_file_larger_than(40_000), pytest.raises(InputError, match=full), keeping(tmp_path / "unit", {}):
        each("x", 9, lambda n: {"row": np.full(1000, n, dtype=np.float64)})
    assert kept.pieces(file) == ["1/x/0", "1/x/1"]
    assert file.stat().st_size <= 40_000


def test_groups_cover_all_prompts_in_order():
    for count, first, pieces in ((1, 1, 1), (64, 1, 64), (65, 2, 33), (1000, 16, 63)):
        found = groups(count)
        assert [n for group in found for n in group] == list(range(count))
        assert (len(found[0]), len(found)) == (first, pieces)


KEY: dict[str, Any] = {"weights": "abc", "tokens_sha256": "123", "text": None, "seed": 0, "lags": (1, 2)}


def made(value: float = 1.0) -> xr.Dataset:
    return xr.Dataset({"x": ("layer", np.full(3, value))}, attrs=made_with())


@pytest.fixture
def begun(tmp_path: Path) -> Unfinished:
    unfinished = kept_units(tmp_path, "mine")
    unfinished.unit("ape one", KEY, made)
    return unfinished


def test_a_unit_is_measured_once_and_read_back(tmp_path, begun):
    assert kept.units(begun.folder) == {"ape one": True}
    heard = []
    again = kept_units(tmp_path, "mine").unit("ape one", KEY, never, advance=lambda *step: heard.append(step))
    xr.testing.assert_identical(again.drop_attrs(), made().drop_attrs())
    assert set(again.attrs) == set(made().attrs)
    assert heard == [("ape one", 1.0, 1.0)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights": "abd", "lags": (1,)}, "weights, lags"),
        ({"tokens_sha256": "124"}, "tokens_sha256"),
        ({"tokens_sha256": "124", "text": "a.txt"}, "text"),  # what says why the tokens differ
        ({"tokens_sha256": "124", "seed": 1}, "seed"),
        ({"seed": 1}, "seed"),
        ({"bands": [(9, 31)]}, "bands"),  # an option that was not given then
    ],
)
def test_another_key_is_refused_by_what_differs(tmp_path, begun, changes, says):
    with bad_input(f"'{tmp_path}' holds an unfinished study with other {says}; ") as raised:
        begun.unit("ape one", KEY | changes, never)
    assert f"delete '{tmp_path / 'unfinished'}'" in str(raised.value)


def test_what_makes_no_difference_goes_on(begun):
    now = {name: value for name, value in KEY.items() if name != "lags"}
    with pytest.raises(InputError, match="with other lags;"):  # an option no longer given
        begun.check("ape one", now)
    begun.check("ape one", now, without=("lags",))
    begun.check("ape one", KEY | {"text": "moved.txt"})  # the same prompts
    begun.check("ape one", KEY | {"weights": "not known yet"}, without=("weights",))
    begun.check("ape two", {})  # not there


def test_damaged_and_older_files_are_named(tmp_path, begun):
    begun._stores.close()
    (begun.folder / "mine-0.sqlite").write_bytes(b"nothing" * 1000)
    with pytest.raises(InputError, match=r"mine-0\.sqlite' cannot be read \(file is not a database\); delete it"):
        begun.unit("ape one", KEY, never)
    for name in ("ape-one.nc", "ape-one.part12"):
        save(made(), begun.folder / name)
        with pytest.raises(InputError, match="is unfinished work of an older version; remove"):
            kept_units(tmp_path, "mine")
        (begun.folder / name).unlink()


def test_pieces_go_when_their_unit_is_done(tmp_path):
    unfinished = kept_units(tmp_path, "mine")

    def in_pieces(values: tuple[float, ...] = (0.0, 1.0, 2.0)) -> xr.Dataset:
        found = each("x", 3, lambda n: {"y": np.array(values[n])})
        return made(float(found.stacked("y").sum()))

    with pytest.raises(IndexError):
        unfinished.unit("ape", KEY, lambda: in_pieces((0.0, 1.0)))
    assert (unfinished.has("ape"), unfinished.done("ape")) == (True, False)
    assert unfinished.going_on(["ape"]) == f"going on with '{unfinished.folder}': 0 of 1 are done, ape begun"
    assert kept.units(tmp_path) == {"ape": False}
    assert float(unfinished.unit("ape", KEY, in_pieces)["x"][0]) == 3.0
    (file,) = kept.files(tmp_path)
    assert kept.pieces(file) == ["result"]


def test_clear_removes_its_own_kind_alone(tmp_path, begun):
    other = kept_units(tmp_path, "other")
    other.unit("bee", KEY, made)
    (tmp_path / "unfinished" / "notes.txt").touch()
    (tmp_path / "unfinished" / "mine-1.sqlite-journal").touch()
    (tmp_path / "unfinished" / "mine-1.sqlite").touch()  # killed before it wrote anything
    kept_units(tmp_path, "mine").clear()  # an older run's, whose labels are not known
    left = ["mine.lock", "notes.txt", "other-0.sqlite", "other.lock"]  # two of this process still hold theirs
    assert sorted(path.name for path in begun.folder.iterdir()) == left
    begun.clear()
    other.clear()
    assert [path.name for path in begun.folder.iterdir()] == ["notes.txt"]
    (begun.folder / "notes.txt").unlink()
    for _ in range(2):
        other.clear()
        assert not begun.folder.exists()


def test_one_line_says_what_is_there(begun):
    assert begun.going_on(["bee"]) is None
    line = begun.going_on(["ape one", "ape two"])
    assert line == f"going on with '{begun.folder}': 1 of 2 are done (ape one)"
    for number in range(7):
        begun.unit(str(number), KEY, made)
    line = begun.going_on(["ape one", "bee", *map(str, range(7))])
    assert line is not None
    assert line.endswith(": 8 of 9 are done (ape one, 0, 1, 2, 3, 4 and 2 more)")


def test_folders_that_cannot_be_are_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="is no folder"):
        kept_units(tmp_path / "file" / "out", "mine")
    for name in ("loop", "dangling", "a" * 300, "loop/below"):
        with bad_input("cannot write to"):
            kept_units(tmp_path / name, "mine")
    if Path("/proc/self").exists():  # permissions of the superuser do not tell
        with pytest.raises(InputError, match="cannot write to '/proc/nothing/out"):
            kept_units("/proc/nothing/out", "mine")
    assert listed(tmp_path) == ["dangling", "file", "loop"]
    (tmp_path / "c" / "unfinished").mkdir(parents=True)
    for name in ("a/b", "c"):
        kept_units(tmp_path / name, "mine")  # trying leaves nothing behind and takes nothing away
    assert listed(tmp_path) == ["c", "c/unfinished", "dangling", "file", "loop"]


@pytest.fixture(scope="module")
def prompted() -> tuple[Any, torch.Tensor]:
    model = probes.load("tiny-llama")
    return model, probes.prompts(model, n=4, length=24)


@pytest.fixture(scope="module")
def longer() -> tuple[Any, torch.Tensor]:
    """Long enough that the search for a basis is worth its products."""
    model = probes.load("tiny-llama")
    return model, probes.prompts(model, n=3, length=64)


PROBES: dict[str, dict[str, Any]] = {
    "jacobian": {"method": "sketch", "products": 40},
    "jacobian auto": {"method": "sketch", "products": "auto", "relative_error": 0.02, "pathway": "all", "chunk": 9},
    "sinks": {"reacts": "mean"},
    "trajectory": {"starts": 4},
    "leakage": {"bootstrap": 5},
    "bos_swap": {"bootstrap": 5, "products": 20},
    "second_moment": {},
}


def measure(name: str, model: Any, tokens: torch.Tensor, progress: Any) -> Any:
    probe = getattr(probes.theory if name == "second_moment" else probes, name.partition(" ")[0])
    return probe(model, tokens, progress=progress, **PROBES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_stopped_anywhere_ends_with_the_same_bytes(tmp_path, prompted, longer, name):
    model, tokens = longer if "auto" in name else prompted
    whole = measure(name, model, tokens, None)
    calls: list[tuple[float, ...]] = []
    with keeping(tmp_path / "counted", {}):
        kept = measure(name, model, tokens, lambda *step: calls.append(step))
    assert len(calls) > 2
    for at in (1, len(calls) // 2, len(calls) - 1):
        path = tmp_path / f"stopped-{at}"
        with pytest.raises(KeyboardInterrupt), keeping(path, {}):
            measure(name, model, tokens, interrupting(at))
        assert store_files(path) or at < len(calls) - 1
        for file in store_files(path):  # as if another process had measured them
            file.rename(path.with_name(f"{path.name}-3.sqlite"))
        with keeping(path, {}):
            again = measure(name, model, tokens, None)
        for variable in whole.data_vars:
            expected = whole[variable].values
            for found in (kept, again):
                assert found[variable].values.dtype == expected.dtype
                assert found[variable].values.tobytes() == expected.tobytes(), variable


def test_the_next_round_of_probes_begins_with_what_was_kept_of_the_last(tmp_path, longer, monkeypatch):
    model, tokens = longer
    pulled = refused(monkeypatch, Prompt, "pull", 10**9, MemoryError())  # none is
    with keeping(tmp_path / "unit", {}):
        whole = measure("jacobian auto", model, tokens, None)
    directions = sum(pulled)
    assert directions == round(float((whole["products"] - whole["basis_products"]).sum()))
    file = tmp_path / "unit-0.sqlite"
    names = kept.pieces(file)
    rounds = len({name.split("/")[0] for name in names})
    assert rounds > 2
    assert len(names) == rounds * len(tokens)

    # Cut off within the last round: its first prompt is there, the others begin it anew, all rounds before are there.
    for name in names[names.index(f"{rounds}/jacobian/0") + 1 :]:
        kept.rows(file, "DELETE FROM arrays WHERE piece = ?", name)
    pulled.clear()
    calls: list[tuple[float, float]] = []
    with keeping(tmp_path / "unit", {}):
        again = measure("jacobian auto", model, tokens, lambda *done: calls.append(done))
    assert 0 < sum(pulled) < directions / 2
    assert calls[-1] == (sum(pulled), sum(pulled))  # in all: what was left to do
    xr.testing.assert_identical(again.drop_attrs(), whole.drop_attrs())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_is_kept_of_a_round_has_the_models_precision(tmp_path, longer, dtype):
    model, tokens = probes.load("tiny-llama", dtype=dtype), longer[1][:2]
    whole = measure("jacobian auto", model, tokens, None)
    with keeping(tmp_path / "unit", {}):
        kept = measure("jacobian auto", model, tokens, None)
    xr.testing.assert_identical(kept.drop_attrs(), whole.drop_attrs())


def refused(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, most: int, error: Exception, *, free: int = 0
) -> list[int]:
    """How many cotangents a method is given in each call; more than `most` of them do not fit after `free` calls."""
    real, seen = getattr(owner, method), []

    def small(self: Any, cotangent: Any, *args: Any, **options: Any) -> Any:
        seen.append(cotangent.shape[0])
        if len(seen) > free and cotangent.shape[0] > most:
            raise error
        return real(self, cotangent, *args, **options)

    monkeypatch.setattr(owner, method, small)
    return seen


@pytest.mark.slow
def test_memory_that_runs_out_between_rounds_begins_the_prompts_round_anew(longer, monkeypatch):
    model, tokens = longer
    expected = measure("jacobian auto", model, tokens[:2], None)
    # In the first round each prompt's basis and probes are pulled.
    seen = refused(monkeypatch, Prompt, "pull", 3, MemoryError(), free=4)
    found = measure("jacobian auto", model, tokens[:2], None)
    assert seen[4] > 3 >= seen[-1]
    close_to(found, expected)


def test_memory_that_runs_out_halves_the_chunk_and_the_numbers_stay(prompted, monkeypatch):
    model, tokens = prompted[0], prompted[1][:1]
    expected = measure("jacobian", model, tokens, None)
    with monkeypatch.context() as patch:  # blocks made again for every chunk
        patch.setattr("probes.models.memory.KEPT_SHARE", 0.0)
        xr.testing.assert_equal(measure("jacobian", model, tokens, None), expected)
    allocator = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
    with monkeypatch.context() as patch:
        seen = refused(patch, LinearizedBlock, "vjp", 5, allocator)
        found = measure("jacobian", model, tokens, None)
    assert min(seen) <= 5 < max(seen)
    close_to(found, expected)
    refused(monkeypatch, LinearizedBlock, "vjp", 0, MemoryError())
    with pytest.raises(InputError, match="a prompt of 24 positions of 'tiny-llama' does not fit into memory"):
        measure("jacobian", model, tokens, None)


def close_to(found: xr.Dataset, expected: xr.Dataset) -> None:
    for name in ("sensitivity", "stderr"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    assert found["products"].values.tolist() == expected["products"].values.tolist()
