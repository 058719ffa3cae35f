"""The rule for [Liu+], arXiv 2307.03172, "Lost in the Middle": its accuracies are not among this suite's measurements."""

from __future__ import annotations

from ..results.folder import Collected


def unmeasured(collected: Collected) -> None:
    """No result that this suite makes holds such an accuracy."""
