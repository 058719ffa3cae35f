"""All statements about language models; those about toys are with the toys (`toy.experiments.experiment.claims_of`)."""

from ..results.folder import Collected
from . import horizon as horizon  # its statements come into the list of [Ruscio]
from . import objections as objections  # its statements come into the list of [Chowdhury]
from .chowdhury import chowdhury
from .claim import Claim
from .gu import gu
from .liu import liu
from .own import own
from .ruscio import ruscio
from .wu import wu
from .xiao import xiao

SOURCES = (chowdhury, ruscio, gu, wu, liu, xiao, own)
STATED = {stated.statement.id: stated for source in SOURCES for stated in source.statements}


def claims(collected: Collected) -> list[Claim]:
    """All claims about language models, judged by a folder's results, in the order of the sources' files."""
    return [stated.judged(collected) for stated in STATED.values()]
