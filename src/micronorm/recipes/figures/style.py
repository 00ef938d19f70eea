"""The look of the figures: the colours of the library's pages, on white."""

import textwrap
from collections.abc import Sequence
from typing import Any

COLOURS = ("#0b62b8", "#c2540a", "#0b7f55", "#b0297c", "#6a4fc4", "#8a6d00", "#0a7f91", "#59626c")
TEXT, QUIET, RULE = "#1b1f24", "#5b6570", "#dde1e6"


def tidy(axis: Any, *, grid: str = "both") -> Any:
    """Light rules, no box, quiet ticks."""
    axis.grid(axis=grid, color=RULE, zorder=0, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(RULE)
    axis.tick_params(colors=QUIET, length=0, labelsize=8.5, which="both")
    axis.xaxis.label.set(color=QUIET, fontsize=9.5)
    axis.yaxis.label.set(color=QUIET, fontsize=9.5)
    return axis


def panel(axis: Any, title: str) -> None:
    """The title of one of several axes."""
    axis.set_title(title, loc="left", fontsize=10, color=TEXT)


def caption(figure: Any, title: str, lines: Sequence[str], *, width: int = 96) -> Any:
    """A title above and the caption below; returns the figure."""
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.09)
    figure.suptitle(title, fontsize=11.5, color=TEXT, x=0.02, ha="left", fontweight="bold")
    text = "\n".join("\n".join(textwrap.wrap(line[:1].upper() + line[1:], width)) for line in lines)
    figure.supxlabel(text, fontsize=8, color=QUIET, x=0.02, ha="left", linespacing=1.45)
    return figure
