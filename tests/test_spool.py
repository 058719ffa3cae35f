"""Tensors put aside: what comes back is what went in, from memory or from a file that nobody sees."""

from contextlib import closing
from pathlib import Path

import families
import pytest
import torch
import xarray as xr
from commands import no_file_larger_than

from probes.errors import InputError
from probes.measures.leakage import leakage
from probes.models.load import load
from probes.run.spool import Spool

SOME = {
    "whole": torch.arange(24, dtype=torch.float32).view(2, 3, 4),
    "turned": torch.arange(24, dtype=torch.float64).view(4, 6).T,
    "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "a slice": torch.arange(1000)[3:7],
    "one for all": torch.ones(1).expand(3, 2),
    "nothing": torch.zeros(0, 3),
    "yes or no": torch.tensor([True, False]),
}


@pytest.mark.parametrize("held", [0, 100, 1 << 20])
def test_what_comes_back_is_what_went_in(held, tmp_path):
    with closing(Spool(held, tmp_path)) as spool:
        for name, tensor in SOME.items():
            spool[name, 1] = tensor
        assert len(spool) == len(SOME)
        assert set(spool) == {(name, 1) for name in SOME}
        for name, tensor in SOME.items():
            found = spool[name, 1]
            assert (found.dtype, found.shape, found.is_contiguous()) == (tensor.dtype, tensor.shape, True)
            assert torch.equal(found, tensor)
        assert list(tmp_path.iterdir()) == []  # the file has no name
        with pytest.raises(KeyError):
            spool["whole"]


@pytest.mark.parametrize("held", [0, 1 << 20])
def test_what_is_replaced_takes_no_more_room(held, tmp_path):
    with closing(Spool(held, tmp_path)) as spool:
        for n in range(50):
            spool["x"] = torch.full((100,), float(n))
            spool["y"] = torch.full((3,), -float(n))
        assert (spool["x"][0], spool["y"][0]) == (49, -49)
        if not held:
            assert spool._end == 412
        spool["x"] = torch.arange(7)  # of another size
        assert spool["x"].tolist() == list(range(7))
        del spool["x"]
        assert list(spool) == ["y"]
        spool.clear()
        assert len(spool) == 0
        spool["z"] = torch.ones(2)
        assert spool["z"].tolist() == [1, 1]


def in_memory(spool: Spool) -> int:
    return sum(x.untyped_storage().nbytes() for x in spool._entries.values() if isinstance(x, torch.Tensor))


def test_what_is_held_stays_within_its_bounds():
    with closing(Spool(1000)) as spool:
        for n in range(10):
            spool[n] = torch.full((100,), n, dtype=torch.float32)
        assert in_memory(spool) == 800
        spool["slice"] = torch.zeros(10_000)[:25]  # 100 bytes, of which the rest is not kept
        assert in_memory(spool) == 900
        assert [int(spool[n][0]) for n in range(10)] == list(range(10))
        spool["graph"] = torch.ones(3, requires_grad=True) * 2
        assert not spool["graph"].requires_grad


def test_a_full_disk_is_one_line(tmp_path):
    with no_file_larger_than(1000), closing(Spool(0, tmp_path)) as spool:
        spool["x"] = torch.zeros(100)
        with pytest.raises(InputError, match=rf"no room for temporary files in '{tmp_path}' \(.*\); make room"):
            spool["y"] = torch.zeros(1000)
        assert torch.equal(spool["x"], torch.zeros(100))
    with closing(Spool(0, Path("/proc/nowhere"))) as spool, pytest.raises(InputError, match="'/proc/nowhere'"):
        spool["x"] = torch.zeros(3)


def test_leakage_is_the_same_to_the_byte_when_all_of_it_is_put_aside(monkeypatch):
    model = load(families.model("qwen2"))
    tokens = torch.randint(3, families.VOCABULARY, (11, 24), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("probes.measures.leakage.samples.TOKENS_AT_ONCE", 48)
    held = leakage(model, tokens, bootstrap=5)
    monkeypatch.setattr("probes.run.spool.HELD", 0)
    xr.testing.assert_identical(leakage(model, tokens, bootstrap=5).drop_attrs(), held.drop_attrs())
