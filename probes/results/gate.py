"""Whether toys do their task: what they pass before statements about them are judged.

An in-context toy has learnt to retrieve if it names the labels of classes that it never saw. Until then it has what a reader
has that copies a label of the sequence, whatever the items are, and its position biases are those of a model that guesses.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from .statistics import over_runs

Learnt = Literal["trained", "partly trained", "not trained"]
TRAINED = 0.75  # accuracy on novel classes


def blind_reader(classes: int, labels: int) -> float:
    """Accuracy of a reader blind to content, which copies the label of a random item of its context.

    The item is of the query's class in one of `classes` cases, of which a sequence has as many items each; else its label is
    the right one by chance, in one of `labels`. With two classes nobody blind to content and position does better.
    """
    return 1 / classes + (1 - 1 / classes) / labels


def learnt(accuracy: Sequence[float] | Float[np.ndarray, " run"], blind: float) -> Learnt:
    """What toys of one kind have learnt, by the lower end of the 95 % interval over runs of their accuracy.

    A single run has no interval, and is partly trained at the most.
    """
    found = over_runs(accuracy)
    if found.low >= TRAINED:
        return "trained"
    return "partly trained" if (found.value if np.isnan(found.low) else found.low) >= blind else "not trained"
