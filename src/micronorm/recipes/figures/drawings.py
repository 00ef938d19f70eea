"""Figures without numbers: `fig:all`, what is normalized together, and `fig:ws_eqn`, the computation of WS."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from micronorm.recipes.figures.figure import Figure, add_caption
from micronorm.report.plots import COLOURS, QUIET, TEXT, subplots

# --- fig:all ----------------------------------------------------------------------------------------------------------

_SHIFT = 0.34  # offset to the right and up of each layer in the depth


def _draw_all(data: Mapping[str, Any]) -> Any:
    """Draw blocks of N×C×(H, W) activations and one of weights, with one set of normalized entries in colour."""
    figure, axes = subplots(1, 5, figsize=(12.4, 3.1), layout="constrained")
    samples, channels, places = 4, 6, 4
    chosen: tuple[tuple[str, Callable[[int, int, int], bool]], ...] = (
        ("Batch Norm", lambda n, c, s: c == 0),
        ("Layer Norm", lambda n, c, s: n == 0),
        ("Instance Norm", lambda n, c, s: n == 0 and c == 0),
        ("Group Norm", lambda n, c, s: n == 0 and c < 3),
    )
    for axis, (title, inside) in zip(axes, chosen, strict=False):
        _block(axis, (samples, channels, places), inside, COLOURS[0])
        _label(axis, title, ("N", "C", "H, W"), (samples, channels, places))
    outputs, inputs, kernel = 4, 6, 4
    _block(axes[4], (outputs, inputs, kernel), lambda o, i, k: o == 0, COLOURS[1])
    _label(axes[4], "Weight Standardization", ("$C_{out}$", "$C_{in}$", "kernel"), (outputs, inputs, kernel))
    lines = (
        "Coloured: one set of entries that share a mean and a deviation. "
        "Blue: activations of a layer. Orange: weights of a convolution, standardized for each output channel.",
    )
    return add_caption(figure, "What is normalized together", lines, width=170)


def _block(axis: Any, size: tuple[int, int, int], inside: Callable[[int, int, int], bool], colour: str) -> None:
    """Draw a block from the front: depth is the first axis, width the second, height the third."""
    depth, width, height = size
    for column in range(width):
        for row in range(height):
            _face(axis, (column, row), (1, 0), (0, 1), inside(0, column, row), colour)
    for layer in range(depth):
        near = layer * _SHIFT
        for column in range(width):
            lit = inside(layer, column, height - 1)
            _face(axis, (column + near, height + near), (1, 0), (_SHIFT, _SHIFT), lit, colour, shade=0.85)
        for row in range(height):
            lit = inside(layer, width - 1, row)
            _face(axis, (width + near, row + near), (0, 1), (_SHIFT, _SHIFT), lit, colour, shade=0.7)
    axis.set_xlim(-0.9, width + depth * _SHIFT + 0.5)
    axis.set_ylim(-1.0, height + depth * _SHIFT + 0.6)
    axis.set_aspect("equal")
    axis.axis("off")


def _face(
    axis: Any,
    corner: tuple[float, float],
    first: tuple[float, float],
    second: tuple[float, float],
    lit: bool,
    colour: str,
    *,
    shade: float = 1.0,
) -> None:
    """Draw the parallelogram between two edges that start at a corner."""
    x, y = ([c, c + a, c + a + b, c + b] for c, a, b in zip(corner, first, second, strict=True))
    face = colour if lit else "white"
    axis.fill(x, y, facecolor=face, alpha=shade if lit else 1.0, edgecolor=TEXT, linewidth=0.7)


def _label(axis: Any, title: str, names: tuple[str, str, str], size: tuple[int, int, int]) -> None:
    depth, width, height = size
    first, second, third = names
    axis.set_title(title, fontsize=11, color=TEXT)
    axis.text(width / 2, -0.25, second, ha="center", va="top", fontsize=10, color=QUIET)
    axis.text(-0.2, height / 2, third, ha="right", va="center", rotation=90, fontsize=10, color=QUIET)
    middle = depth * _SHIFT / 2
    axis.text(width + middle + 0.3, middle - 0.25, first, ha="left", va="top", fontsize=10, color=QUIET)


ALL = Figure(
    name="fig:all",
    title="Which entries BN, LN, IN, GN and WS normalize together; a drawing",
    paper="Normalizations of activations in blue, Weight Standardization in orange.",
    ours=("the drawing",),
    draw=_draw_all,
)


# --- fig:ws_eqn -------------------------------------------------------------------------------------------------------

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


def _draw_ws_eqn(data: Mapping[str, Any]) -> Any:
    """Draw the way from W to the loss above, from left to right, and the gradient below, from right to left."""
    figure, axis = subplots(figsize=(11.6, 3.5), layout="constrained")
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
        "Blue: forward. Orange: backward. For one output channel with fan-in I and ε = 0; otherwise σ is the root of "
        "the variance plus ε. Labels are those of the paper's equations.",
    )
    return add_caption(figure, "Weight Standardization, forward and backward", lines, width=180)


def _arrow(axis: Any, start: float, end: float, y: float, colour: str) -> None:
    axis.annotate(
        "", (end, y), xytext=(start, y), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6}, zorder=2
    )


WS_EQN = Figure(
    name="fig:ws_eqn",
    title="The computation graph of WS, forward and backward; a drawing",
    paper="W, Ẇ and Ŵ of eq:9 to eq:11, feed-forwarding and back-propagation in two colours.",
    ours=("the drawing; the gradients of eq:12 and eq:13 are written on it",),
    draw=_draw_ws_eqn,
)
