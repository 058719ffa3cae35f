"""Units kept until all are done: read back, refused, removed; and whether a folder can be written to at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from kept import files, pieces, units

from probes.errors import InputError
from probes.results.dataset import made_with, save
from probes.run.resume import each
from probes.run.unfinished import Unfinished
from probes.studies.atlas import Place, atlas
from probes.studies.runner import kept_units

KEY: dict[str, Any] = {"weights": "abc", "tokens_sha256": "123", "text": None, "seed": 0, "lags": (1, 2)}


def made(value: float = 1.0) -> xr.Dataset:
    return xr.Dataset({"x": ("layer", np.full(3, value))}, attrs=made_with())


def never() -> xr.Dataset:
    raise AssertionError("measured again")


@pytest.fixture
def kept(tmp_path: Path) -> Unfinished:
    unfinished = kept_units(tmp_path, "mine")
    unfinished.unit("ape one", KEY, made)
    return unfinished


def test_a_unit_is_measured_once_and_read_back(tmp_path, kept):
    assert units(kept.folder) == {"ape one": True}
    heard = []
    again = kept_units(tmp_path, "mine").unit("ape one", KEY, never, advance=lambda *step: heard.append(step))
    xr.testing.assert_identical(again.drop_attrs(), made().drop_attrs())
    assert set(again.attrs) == set(made().attrs)
    assert heard == [("ape one", 1.0, 1.0)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights": "abd"}, "weights"),
        ({"lags": (1, 2, 3)}, "lags"),
        ({"weights": "abd", "lags": (1,)}, "weights, lags"),
        ({"tokens_sha256": "124"}, "tokens_sha256"),
        ({"tokens_sha256": "124", "text": "a.txt"}, "text"),  # what says why the tokens differ
        ({"tokens_sha256": "124", "seed": 1}, "seed"),
        ({"seed": 1}, "seed"),
        ({"bands": [(9, 31)]}, "bands"),  # an option that was not given then
    ],
)
def test_another_key_is_refused_by_what_differs(tmp_path, kept, changes, says):
    with pytest.raises(InputError) as raised:
        kept.unit("ape one", KEY | changes, never)
    message = str(raised.value)
    assert message.startswith(f"'{tmp_path}' holds an unfinished study with other {says}; ")
    assert f"delete '{tmp_path / 'unfinished'}'" in message
    assert "\n" not in message


def test_an_option_no_longer_given_is_refused(kept):
    now = {name: value for name, value in KEY.items() if name != "lags"}
    with pytest.raises(InputError, match="with other lags;"):
        kept.check("ape one", now)
    kept.check("ape one", now, without=("lags",))


def test_the_same_prompts_from_another_text_go_on(kept):
    kept.check("ape one", KEY | {"text": "moved.txt"})
    kept.check("ape two", {})  # not there


def test_what_is_not_known_yet_is_not_compared(kept):
    kept.check("ape one", KEY | {"weights": "unknown"}, without=("weights",))


def test_a_damaged_file_is_named(kept):
    kept._stores.close()
    (kept.folder / "mine-0.sqlite").write_bytes(b"nothing" * 1000)
    with pytest.raises(InputError, match=r"mine-0\.sqlite' cannot be read \(file is not a database\); delete it"):
        kept.unit("ape one", KEY, never)


@pytest.mark.parametrize("name", ["ape-one.nc", "ape-one.part0", "ape-one.part12"])
def test_work_of_an_older_version_is_refused(tmp_path, name):
    save(made(), tmp_path / "unfinished" / name)
    with pytest.raises(InputError, match="is unfinished work of an older version; remove"):
        kept_units(tmp_path, "mine")


def test_pieces_go_when_their_unit_is_done(tmp_path):
    unfinished = kept_units(tmp_path, "mine")

    def in_pieces() -> xr.Dataset:
        found = each("x", 3, lambda n: {"y": np.array(float(n))})
        return made(float(found.stacked("y").sum()))

    def in_pieces_until_stopped() -> xr.Dataset:
        each("x", 3, lambda n: {"y": np.array([0.0, 1.0][n])})
        return made()

    with pytest.raises(IndexError):
        unfinished.unit("ape", KEY, in_pieces_until_stopped)
    assert (unfinished.has("ape"), unfinished.done("ape")) == (True, False)
    assert unfinished.going_on(["ape"]) == f"going on with '{unfinished.folder}': 0 of 1 are done, ape begun"
    assert units(tmp_path) == {"ape": False}
    assert float(unfinished.unit("ape", KEY, in_pieces)["x"][0]) == 3.0
    (file,) = files(tmp_path)
    assert pieces(file) == ["result"]


def test_clear_removes_its_own_kind_alone(tmp_path, kept):
    other = kept_units(tmp_path, "other")
    other.unit("bee", KEY, made)
    (tmp_path / "unfinished" / "notes.txt").touch()
    (tmp_path / "unfinished" / "mine-1.sqlite-journal").touch()
    (tmp_path / "unfinished" / "mine-1.sqlite").touch()  # killed before it wrote anything
    kept_units(tmp_path, "mine").clear()  # an older run's, whose labels are not known
    assert sorted(path.name for path in kept.folder.iterdir()) == ["notes.txt", "other-0.sqlite"]
    other.clear()
    assert [path.name for path in kept.folder.iterdir()] == ["notes.txt"]
    (kept.folder / "notes.txt").unlink()
    other.clear()
    assert not kept.folder.exists()
    other.clear()


def test_one_line_says_what_is_there(kept):
    assert kept.going_on(["bee"]) is None
    line = kept.going_on(["ape one", "ape two"])
    assert line == f"going on with '{kept.folder}': 1 of 2 are done (ape one)"
    for number in range(7):
        kept.unit(str(number), KEY, made)
    line = kept.going_on(["ape one", "bee", *map(str, range(7))])
    assert line is not None
    assert line.endswith(": 8 of 9 are done (ape one, 0, 1, 2, 3, 4 and 2 more)")


def test_folders_that_cannot_be_are_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="is no folder"):
        kept_units(tmp_path / "file" / "out", "mine")
    for name in ("loop", "dangling", "a" * 300, "loop/below"):
        with pytest.raises(InputError, match="cannot write to") as raised:
            kept_units(tmp_path / name, "mine")
        assert "\n" not in str(raised.value)
    if Path("/proc/self").exists():  # permissions of the superuser do not tell
        with pytest.raises(InputError, match="cannot write to '/proc/nothing/out"):
            kept_units("/proc/nothing/out", "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "loop"]


def test_trying_leaves_nothing_behind_and_takes_nothing_away(tmp_path):
    kept_units(tmp_path / "a" / "b", "mine")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    (tmp_path / "c" / "unfinished").mkdir(parents=True)
    for name in "abc":
        kept_units(tmp_path / name, "mine")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "c", "c/unfinished"]


def test_an_unfinished_map_with_other_settings_is_refused(tmp_path):
    place = Place("depth", 0.05, 64, 2, 16)

    def stop(label: str, done: float, total: float) -> None:
        if done == 1:
            raise KeyboardInterrupt

    chosen = [place, replace(place, strength=1.64)]
    with pytest.raises(KeyboardInterrupt):
        atlas(chosen, tmp_path, seeds=1, products=16, advance=stop)
    with pytest.raises(InputError, match="unfinished study with other products;"):
        atlas(chosen, tmp_path, seeds=1, products=32)
    with pytest.raises(InputError, match="unfinished study with other length;"):
        atlas([replace(chosen[0], length=12)], tmp_path, seeds=1, products=16)
    told: list[str] = []
    atlas(chosen, tmp_path, seeds=1, products=16, told=told.append)
    assert told == [f"going on with '{tmp_path / 'unfinished'}': 1 of 2 are done ({place.label()})"]
    assert [path.name for path in tmp_path.iterdir()] == ["map.nc"]
    (tmp_path / "map.png").mkdir()
    with pytest.raises(InputError, match=r"map\.png' is a folder"):
        atlas([place], tmp_path, seeds=1, products=16)
