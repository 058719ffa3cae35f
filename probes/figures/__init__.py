"""Figures, each drawn by one function from results alone; nothing here measures.

Figures are matplotlib `Figure` objects with no pyplot state behind them, saved as PNG and SVG. Colours are Okabe and
Ito's, which colour-blind readers can tell apart; line styles repeat what colours say. One file per figure; `style` holds
what they share.
"""

from __future__ import annotations

from .bos import bos_figure as bos_figure
from .jacobian import jacobian_figure as jacobian_figure
from .leakage import leakage_figure as leakage_figure
from .map import map_figure as map_figure
from .match import match_figure as match_figure
from .overview import overview_figure as overview_figure
from .sinks import sinks_figure as sinks_figure
from .style import BLACK as BLACK
from .style import BLUE as BLUE
from .style import CONDITIONS as CONDITIONS
from .style import DECADES as DECADES
from .style import GREEN as GREEN
from .style import ORANGE as ORANGE
from .style import PURPLE as PURPLE
from .style import SKY as SKY
from .style import STYLE as STYLE
from .style import THEORIES as THEORIES
from .style import VERMILLION as VERMILLION
from .style import Style as Style
from .style import save_figure as save_figure
from .theory import theory_figure as theory_figure
from .trajectory import trajectory_figure as trajectory_figure
