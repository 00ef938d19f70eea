"""Figure `fig:ws_eqn`: the computation graph of WS, forward and backward. A drawing."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from micronorm.recipes.figures.figure import Figure
from micronorm.recipes.figures.style import COLOURS, TEXT, caption

_FORWARD, _BACKWARD = COLOURS[0], COLOURS[1]
_NODES = ((0.0, "$W$"), (3.6, "$\\dot{W}$"), (8.6, "$\\hat{W}$"), (11.6, "$y$"), (13.8, "$\\mathcal{L}$"))
_STEPS = (
    ("$W - \\frac{1}{I}\\mathbf{1}\\langle\\mathbf{1},W\\rangle$", "eq:9"),
    ("$\\dot{W}\\,/\\,\\sqrt{\\frac{1}{I}\\langle\\mathbf{1},\\dot{W}^{\\circ 2}\\rangle}$", "eq:10"),
    ("$x\\,\\hat{W}$", "eq:11"),
    ("", ""),
)
_BACK = (
    (
        "$\\nabla_W\\mathcal{L}=\\nabla_{\\dot{W}}\\mathcal{L}$\n"
        "$-\\,\\frac{1}{I}\\mathbf{1}\\langle\\mathbf{1},\\nabla_{\\dot{W}}\\mathcal{L}\\rangle$",
        "eq:13",
    ),
    (
        "$\\nabla_{\\dot{W}}\\mathcal{L}=\\frac{1}{\\sigma_W}\\left(\\nabla_{\\hat{W}}\\mathcal{L}"
        "-\\frac{1}{I}\\langle\\hat{W},\\nabla_{\\hat{W}}\\mathcal{L}\\rangle\\,\\hat{W}\\right)$",
        "eq:12",
    ),
    ("$\\nabla_{\\hat{W}}\\mathcal{L}$", ""),
    ("", ""),
)


def draw(pyplot: Any, sheet: Mapping[str, Any]) -> Any:
    """W to the loss from left to right above, its gradient from right to left below."""
    figure, axis = pyplot.subplots(figsize=(11.6, 3.5), layout="constrained")
    for x, name in _NODES:
        axis.text(
            x,
            0,
            name,
            ha="center",
            va="center",
            fontsize=17,
            color=TEXT,
            bbox={"boxstyle": "circle,pad=0.35", "facecolor": "white", "edgecolor": TEXT, "linewidth": 1.1},
            zorder=3,
        )
    for number, ((left, _), (right, _)) in enumerate(pairwise(_NODES)):
        middle = (left + right) / 2
        _arrow(axis, left + 0.55, right - 0.55, 0.16, _FORWARD)
        _arrow(axis, right - 0.55, left + 0.55, -0.16, _BACKWARD)
        for (text, label), y, side, colour in (
            (_STEPS[number], 0.55, "bottom", _FORWARD),
            (_BACK[number], -0.55, "top", _BACKWARD),
        ):
            named = f"{text}\n{label}" if label and side == "top" else f"{label}\n{text}" if label else text
            axis.text(middle, y, named, ha="center", va=side, fontsize=11.5, color=colour, linespacing=1.7)
    axis.set_xlim(-0.9, 14.6)
    axis.set_ylim(-2.5, 2.3)
    axis.axis("off")
    lines = (
        "Blue: forward. Orange: backward. One output channel, I its fan-in, ε = 0; with ε the root is that of the "
        "variance plus ε, and σ stands for it. Labels are those of the paper's equations.",
    )
    return caption(figure, "Weight Standardization, forward and backward", lines, width=165)


def _arrow(axis: Any, start: float, end: float, y: float, colour: str) -> None:
    axis.annotate(
        "", (end, y), xytext=(start, y), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6}, zorder=2
    )


FIGURE = Figure(
    name="fig:ws_eqn",
    title="The computation graph of WS, forward and backward; a drawing",
    paper="W, Ẇ and Ŵ of eq:9 to eq:11, feed-forwarding and back-propagation in two colours.",
    ours=("the drawing; the gradients of eq:12 and eq:13 are written on it",),
    draw=draw,
)
