"""The forms that all figures are drawn with: matplotlib, one style, words at the curves instead of legends.

A chart function takes results by their model's name and returns a `Figure`; it saves nothing:

    def chart(results):
        return panels(results, [Panel("norm of the stream", lambda cell, ds: curves(cell, [Series("all", ds.norm)]))], "...")

`panels` lays results of models out; `sheet` gives empty panels to a figure of another shape. The forms are `curves` (over
positions, blocks or anything else, with bands), `blocks` (a quantity by block, with intervals and nulls), `heat` (blocks by
heads), `dots` (with intervals, by category) and `stacks` (bars of parts).
"""

from __future__ import annotations

from .figures import Panel as Panel
from .figures import image as image
from .figures import panels as panels
from .figures import save as save
from .figures import sheet as sheet
from .forms import Series as Series
from .forms import blocks as blocks
from .forms import curves as curves
from .forms import dots as dots
from .forms import heat as heat
from .forms import stacks as stacks
from .style import BLUE as BLUE
from .style import CYCLE as CYCLE
from .style import DASHED as DASHED
from .style import DOTTED as DOTTED
from .style import FAINT as FAINT
from .style import FRESH as FRESH
from .style import GREEN as GREEN
from .style import GREY as GREY
from .style import INK as INK
from .style import ORANGE as ORANGE
from .style import PURPLE as PURPLE
from .style import SKY as SKY
from .style import THEORY as THEORY
from .style import TRAINED as TRAINED
from .style import VERMILLION as VERMILLION
from .style import block_axis as block_axis
from .style import depth_color as depth_color
from .style import level as level
from .style import numeral as numeral
from .style import position_axis as position_axis
from .style import words as words
from .style import wrapped as wrapped
