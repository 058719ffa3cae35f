"""Loss of retrieving the token at one position, against that position [Liu-7].

Ten random tokens, and a model of its own for each position k that is trained to predict the k-th of them behind the last
one; no positional encoding, one causal head. What a model cannot know shows as a loss that stays up: the post's curves are
single runs, here each point has several seeds. Settings that the post does not give (optimizer, steps) have a value
whose choice is written beside it.

"Converged" is a model whose loss no longer falls: the mean loss of the last twentieth of the training is at most `STILL`
nats below that of the twentieth before the last quarter. A model that still falls is trained anew with twice the steps, the
learning rate falling more slowly, at most `rounds` times.
"""

from .curves import charts, tables
from .statements import claims
from .training import QUICK, Settings, measure

__all__ = ["QUICK", "Settings", "charts", "claims", "measure", "tables"]
