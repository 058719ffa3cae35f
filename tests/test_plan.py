"""How many directions a Jacobian takes at once, and whether blocks are kept, by the memory there is."""

from typing import Any

import pytest

import probes
from probes.models import memory
from probes.models.memory import block_bytes, paced


@pytest.fixture(scope="module")
def model() -> Any:
    return probes.load("tiny-llama")


def test_blocks_are_kept_where_there_is_room(model, monkeypatch):
    length = 128
    needed = block_bytes(model, length)[0] * model.spec.blocks
    for free, kept in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(memory, "available", lambda device, free=free: free)
        assert paced(model, length).keep is kept
    assert paced(model, length).chunk == memory.CPU_ROWS // length
