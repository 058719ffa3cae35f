"""Positions and ranges of them, as they are written on the command line."""

from __future__ import annotations

from ..errors import InputError

MOST = 1 << 24  # positions in one range, so that a slip of the finger does not fill the memory


def read_ranges(text: str, what: str, example: str) -> list[tuple[int, int]]:
    """Read "0-7", "0,5" or "0-3,8" as (first, last), ends included; a single position is a range of one.

    Raises:
        InputError: it is no such list, a range runs backwards or is longer than any prompt; `what` and `example` say so.
    """
    ranges = []
    for piece in text.split(","):
        ends = [end.strip() for end in piece.split("-")]
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() and len(end) < 20 for end in ends):
            raise InputError(f"{what} '{text}' are no positions; write them as {example}")
        first, last = int(ends[0]), int(ends[-1])
        if first > last:
            raise InputError(f"{what} '{piece.strip()}' run backwards; give {last}-{first}")
        if last - first >= MOST:
            raise InputError(f"{what} '{piece.strip()}' are more than any prompt has; give a shorter range")
        ranges.append((first, last))
    return ranges
