"""Does the U of initialization cause the trained profile? Language models of 1 M parameters from several initializations.

[Chowdhury] finds the U in fresh weights and leaves open whether it is why trained models have one. Here the bundled models'
recipe (`toy.pretrain`) is trained from fresh weights that differ in their profile alone: the text, its order and all
options are the same, and only the draw of the weights differs between seeds. A kind "PROFILE-STRENGTH" of initialization
has the strength d sigma^2, sigma the deviation of every matrix but those that the profile singles out:

- `uniform`: none. The strength changes both ends of the profile, and with them the size of logits and of the stream.
- `branches`: output and down projections divided by sqrt(2L), as GPT-2 has them: the last position stands out further.
- `flat`: as flat a profile as theory finds. `flattest` scales kinds of matrices by powers of two and takes what gives the
  second-moment kernel with its score path the least spread over positions. The configuration-only kernel has no score path,
  so that fresh weights are drawn and their patterns measured; no derivative is taken.

At each checkpoint: the elasticity profile with its primacy and recency (science of the measurement, section 8), loss on
text held out, the sink rate of position 0, and how much a pair of a short list adds to its value's log probability. The
unit is the run; ends of trained profiles are regressed on those at initialization.

Models are kept in `births-runs` beside the result, one folder each, which every probe can load. Calls with other kinds or
seeds use what is there; two processes may train different ones at the same time.
"""

from .slopes import charts, claims, tables
from .training import ORDER, PROBED, QUICK, Settings, measure, rule_of

__all__ = ["ORDER", "PROBED", "QUICK", "Settings", "charts", "claims", "measure", "rule_of", "tables"]
