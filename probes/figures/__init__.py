"""Figures, each declared by one function from results alone; nothing here measures.

`series` computes the curves of results, `palette` has their colours and lines, `draw` draws them with matplotlib. Figures
are matplotlib `Figure` objects with no pyplot state behind them, saved as PNG and SVG.
"""

from __future__ import annotations

from .bos import bos_figure as bos_figure
from .palette import BLACK as BLACK
from .palette import BLUE as BLUE
from .palette import CONDITIONS as CONDITIONS
from .palette import GREEN as GREEN
from .palette import ORANGE as ORANGE
from .palette import PURPLE as PURPLE
from .palette import SKY as SKY
from .palette import THEORIES as THEORIES
from .palette import VERMILLION as VERMILLION
from .palette import Style as Style
from .style import DECADES as DECADES
from .style import STYLE as STYLE
from .style import save_figure as save_figure
