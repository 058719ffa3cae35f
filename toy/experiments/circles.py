"""Tokens on a circle: how round it is, how evenly they stand, and when two of them change places.

- a circle is fitted to the rows of a table (least squares of `|p|^2 = 2 p . c + const`): `roundness`, the deviation of the
  radius over its mean, and `gap_spread`, that of the angles between neighbours (0 where they are even, near 1 where angles
  are drawn at random);
- an exchange is a pair of tokens of which one was more than half a mean gap ahead of the other and is then as far behind it,
  without going round: tokens that only jostle do not count. It is dated halfway between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Exchange(NamedTuple):
    """Two tokens that changed places, and when: the index of a kept step."""

    at: int
    one: int
    other: int


def circle(
    rows: Float[np.ndarray, "step token axis"],
) -> tuple[Float[np.ndarray, " step"], Float[np.ndarray, " step"], Float[np.ndarray, "step token"]]:
    """(roundness, spread of gaps, angles about the centre) of the circle fitted to the points of each step."""
    fit = np.concatenate([2 * rows, np.ones_like(rows[..., :1])], -1)
    centre = (np.linalg.pinv(fit) @ np.square(rows).sum(-1)[..., None])[:, None, :2, 0]
    off = rows - centre
    radius, angles = np.hypot(off[..., 0], off[..., 1]), np.arctan2(off[..., 1], off[..., 0])
    order = np.sort(angles, 1)
    gaps = np.diff(np.concatenate([order, order[:, :1] + 2 * np.pi], 1), axis=1)
    return radius.std(1) / radius.mean(1), gaps.std(1) / gaps.mean(1), angles


def exchanges(angles: Float[np.ndarray, "step token"]) -> list[Exchange]:
    """Pairs that change places, by date: by more than half a mean gap before and after, and not around the far side."""
    count = angles.shape[1]
    found = []
    for one in range(count - 1):
        ahead = angles[:, one, None] - angles[:, one + 1 :]
        ahead = (ahead + np.pi) % (2 * np.pi) - np.pi
        for other, lead in enumerate(ahead.T, one + 1):
            clear = np.flatnonzero(np.abs(lead) > np.pi / count)
            turned = np.flatnonzero(np.sign(lead[clear[1:]]) != np.sign(lead[clear[:-1]]))
            for before, after in zip(clear[turned], clear[turned + 1], strict=True):
                if max(abs(lead[before]), abs(lead[after])) < np.pi / 2:
                    found.append(Exchange(int(before + after) // 2, one, other))
    return sorted(found)


def passing(
    found: Sequence[Exchange], by_token: Float[np.ndarray, "step token"], lags: np.ndarray
) -> tuple[Float[np.ndarray, "who lag"], Float[np.ndarray, " exchange"]]:
    """(mean loss of the two tokens and of all others around exchanges, what each exchange cost its two tokens).

    The cost is their loss on the day less that in the outer half of the window. Exchanges too near to the end have NaN.
    """
    curves, costs = [], np.full(len(found), np.nan)
    outer = np.abs(lags) > lags[-1] / 2
    for n, one in enumerate(found):
        if one.at + lags[0] < 0 or one.at + lags[-1] >= len(by_token):
            continue
        around = by_token[one.at + lags]
        own = around[:, [one.one, one.other]].mean(1)
        costs[n] = own[lags == 0][0] - own[outer].mean()
        curves.append([own, (around.sum(1) - 2 * own) / (around.shape[1] - 2)])
    return (np.mean(curves, 0) if curves else np.full((2, len(lags)), np.nan)), costs
