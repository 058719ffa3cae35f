"""Signatures are checked at first calls in every test and at one in so many later on, and really are checked then."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from sampling import FIRST, THEN, sampled
from torch import Tensor

import probes


def first(x: Float[Tensor, "a b"], y: Float[Tensor, " b"]) -> int:
    return len(y)


first = sampled(typechecker=beartype)(first)
MATRIX, WRONG = torch.zeros(2, 3), torch.zeros(2)


def refused() -> bool:
    try:
        first(MATRIX, WRONG)
    except TypeCheckError:
        return True
    return False


@pytest.mark.parametrize("again", [1, 2])  # first calls in every test
def test_first_calls_and_one_in_so_many_are_checked(again):
    found = [refused() for _ in range(2 * THEN + 1)]
    assert found == [n <= FIRST or n % THEN == 0 for n in range(1, 2 * THEN + 2)]


def test_the_library_is_checked():
    model = probes.load("tiny-llama", device="cpu")
    with pytest.raises(TypeCheckError):
        model.embed(torch.zeros(3))
    with pytest.raises(TypeCheckError):
        probes.jacobian(model, torch.zeros(2, 3, 4, dtype=torch.int64))
