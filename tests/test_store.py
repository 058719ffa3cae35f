"""The store of pieces: kept, read back, told apart by keys and scopes, whole or not there, removed at the end."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import bad_input
from kept import Stop, listed, never, piece_files

from probes.errors import InputError
from probes.run.store import RESULT, Pieces, Store, going_on, groups, unfinished

KEY: dict[str, Any] = {"weights": "abc", "text": None, "seed": 0, "lags": (1, 2)}


def square(n: int) -> dict[str, np.ndarray]:
    return {"square": np.array(n * n), "row": np.full((2, n + 1), n / 3, np.float32), "none": np.zeros((0, 2), np.int8)}


def squares(limit: int | None = None, made: list[int] | None = None) -> Any:
    def measure(n: int) -> dict[str, np.ndarray]:
        if n == limit:
            raise Stop
        if made is not None:
            made.append(n)
        return square(n)

    return measure


def bits(piece: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in piece.items()}


def values(pieces: Pieces) -> list[Any]:
    return [bits(piece) for piece in pieces]


def test_what_was_kept_is_not_measured_again(tmp_path):
    made: list[int] = []
    with pytest.raises(Stop):
        Store(tmp_path, "ape", KEY).each("x", 5, squares(limit=3, made=made))
    assert made == [0, 1, 2]
    shares: list[list[int]] = []
    found = Store(tmp_path, "ape", KEY).each("x", 5, squares(made=made), before=lambda own: shares.append(list(own)))
    assert (made, shares) == ([0, 1, 2, 3, 4], [[3, 4]])
    for pieces in (found, Store().each("x", 5, squares())):
        assert values(pieces) == [bits(square(n)) for n in range(5)]
        assert pieces.stacked("square").tolist() == [0, 1, 4, 9, 16]
        assert (pieces.stacked("none").shape, pieces.stacked("none").dtype) == ((5, 0, 2), np.int8)
        assert [int(piece["square"]) for piece in pieces[1::2]] == [1, 9]
        assert pieces[3]["row"].flags.writeable


def test_units_and_scopes_are_told_apart(tmp_path):
    given = [("ape", KEY), ("ape", KEY | {"seed": 1}), ("ape-", KEY), ("ape", KEY | {"more": 1})]
    assert len({Store(tmp_path, *unit).folder for unit in given}) == len(given)
    assert Store(tmp_path, "ape", dict(reversed(KEY.items()))).folder == Store(tmp_path, "ape", KEY).folder
    store = Store(tmp_path, "ape", KEY)
    for scope, number in (("before", 10), ("after", 20)):
        store.within(scope).each("x", 2, lambda n, number=number: {"y": np.array(number + n)})
    with pytest.raises(ValueError, match="this store has made 'after/x' before"):  # of which call would its pieces be?
        store.within("after").each("x", 2, never)
    again = Store(tmp_path, "ape", KEY).within("after")  # the other scope is not needed this time
    assert again.each("x", 2, never).stacked("y").tolist() == [20, 21]
    assert Store(tmp_path, "ape", KEY | {"seed": 1}).each("x", 1, squares()).stacked("square").tolist() == [0]


@pytest.mark.parametrize("moment", ["begun", "half", "whole", "moved"])
def test_a_piece_is_whole_or_not_there_wherever_a_kill_meets_it(tmp_path, moment):
    child = os.fork()
    if child == 0:
        die_in_the_writing_of(tmp_path, 2, moment)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    made: list[int] = []
    with unfinished(tmp_path, "mine") as root:
        assert values(Store(root).each("x", 4, squares(made=made))) == [bits(square(n)) for n in range(4)]
    assert made == ([3] if moment == "moved" else [2, 3])
    assert listed(tmp_path) == []  # nor what the kill has left


def die_in_the_writing_of(out: Path, number: int, moment: str) -> None:
    real, count = np.savez, 0

    def write(file: Any, **piece: Any) -> None:
        nonlocal count
        count += 1
        real(file, **piece)
        if count > number:
            if moment in ("begun", "half"):
                file.truncate(0 if moment == "begun" else file.tell() // 2)
            if moment != "moved":
                os._exit(9)

    np.savez = write
    Store(out / "unfinished" / "mine").each("x", number + 1, squares())
    os._exit(9)


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    store = Store(tmp_path)
    store.put("x", square(2))
    (file,) = piece_files(tmp_path)
    content, noticed = file.read_bytes(), 0
    for at in range(len(content)):
        for bit in (at % 8, (at + 3) % 8):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            try:
                piece = store.get("x")
            except InputError as error:
                noticed += (
                    re.fullmatch(rf"'{file}' is damaged \(.+\); remove it, and measure again .+", str(error))
                    is not None
                )
            else:  # a date or a permission
                assert piece is not None
                assert bits(piece) == bits(square(2))
    assert noticed > len(content)  # of twice as many
    file.write_bytes(content[: len(content) // 2])
    with bad_input(f"'{file}' is damaged (File is not a zip file); remove it"):
        store.get("x")


def test_a_unit_is_measured_once_and_its_pieces_go(tmp_path):
    def unit(label: str = "ape one") -> Store:
        return Store(tmp_path / "mine", label, KEY)

    def measure(limit: int | None = None) -> Any:
        store = unit()
        return store.once(lambda: {"sum": store.within("x").each("x", 3, squares(limit)).stacked("square")})

    stores = {label: unit(label) for label in ("ape one", "ape two")}
    assert going_on(stores) is None
    with pytest.raises(Stop):
        measure(limit=2)
    assert going_on(stores) == f"going on with '{tmp_path / 'mine'}': 0 of 2 are done, ape one begun"
    assert measure()["sum"].tolist() == unit().once(never)["sum"].tolist() == [0, 1, 4]
    assert [file.name for file in piece_files(tmp_path)] == [f"{RESULT}.npz"]
    assert len(listed(tmp_path)) == 3  # in the unit's folder
    assert going_on(stores) == f"going on with '{tmp_path / 'mine'}': 1 of 2 are done (ape one)"
    more = {str(n): unit(str(n)) for n in range(8)}
    for store in more.values():
        store.once(lambda: square(0))
    assert str(going_on(more)).endswith(": 8 of 8 are done (0, 1, 2, 3, 4, 5 and 2 more)")
    assert Store().once(lambda: square(2))["square"] == 4  # in memory


def test_a_finished_command_removes_its_folder_alone(tmp_path):
    out = tmp_path / "out"
    for kind in ("mine", "other"):
        with pytest.raises(Stop), unfinished(out, kind) as root:
            Store(root, "other settings").each("x", 2, squares(1))
    (out / "unfinished" / "notes.txt").touch()
    (out / ".mine-ape-abcd1234.nc").touch()  # which a kill has left of a result
    with unfinished(out, "mine") as root:
        Store(root).each("x", 1, squares())
    assert [path.name for path in out.iterdir()] == ["unfinished"]
    assert sorted(path.name for path in (out / "unfinished").iterdir()) == ["notes.txt", "other"]
    (out / "unfinished" / "notes.txt").unlink()
    with unfinished(out, "other"):
        pass
    assert not (out / "unfinished").exists()


def test_groups_cover_all_prompts_in_order():
    for count, first, pieces in ((1, 1, 1), (64, 1, 64), (65, 2, 33), (1000, 16, 63)):
        found = groups(count)
        assert [n for group in found for n in group] == list(range(count))
        assert (len(found[0]), len(found)) == (first, pieces)
