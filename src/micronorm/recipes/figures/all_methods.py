"""Figure `fig:all`: which entries share their statistics, in four normalizations and in WS. A drawing."""

from collections.abc import Callable, Mapping
from typing import Any

from micronorm.recipes.figures.figure import Figure
from micronorm.recipes.figures.style import COLOURS, QUIET, TEXT, caption

_PLAIN = "#ffffff"
_SHIFT = 0.34  # of a step into the depth, right and up


def draw(pyplot: Any, sheet: Mapping[str, Any]) -> Any:
    """Blocks of N×C×(H, W) activations, and one of weights; coloured is one set of entries that is normalized."""
    figure, axes = pyplot.subplots(1, 5, figsize=(12.4, 3.1), layout="constrained")
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
        "Coloured: one set of entries with a common mean and deviation; every other set of the same shape has its own. "
        "Blue: activations of a layer. Orange: weights of a convolution, standardized for each output channel.",
    )
    return caption(figure, "What is normalized together", lines, width=170)


def _block(axis: Any, size: tuple[int, int, int], inside: Callable[[int, int, int], bool], colour: str) -> None:
    """A block seen from the front: depth is the first axis, width the second, height the third."""
    depth, width, height = size
    for column in range(width):
        for row in range(height):
            _face(axis, _front(column, row), inside(0, column, row), colour)
    for layer in range(depth):
        for column in range(width):
            _face(axis, _top(layer, column, height), inside(layer, column, height - 1), colour, shade=0.85)
        for row in range(height):
            _face(axis, _side(layer, width, row), inside(layer, width - 1, row), colour, shade=0.7)
    axis.set_xlim(-0.9, width + depth * _SHIFT + 0.5)
    axis.set_ylim(-1.0, height + depth * _SHIFT + 0.6)
    axis.set_aspect("equal")
    axis.axis("off")


def _front(x: int, y: int) -> list[tuple[float, float]]:
    return [(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)]


def _top(layer: int, x: int, height: int) -> list[tuple[float, float]]:
    near, far = layer * _SHIFT, (layer + 1) * _SHIFT
    return [
        (x + near, height + near),
        (x + 1 + near, height + near),
        (x + 1 + far, height + far),
        (x + far, height + far),
    ]


def _side(layer: int, width: int, y: int) -> list[tuple[float, float]]:
    near, far = layer * _SHIFT, (layer + 1) * _SHIFT
    return [(width + near, y + near), (width + far, y + far), (width + far, y + 1 + far), (width + near, y + 1 + near)]


def _face(axis: Any, corners: list[tuple[float, float]], lit: bool, colour: str, *, shade: float = 1.0) -> None:
    axis.fill(
        *zip(*corners, strict=True),
        facecolor=colour if lit else _PLAIN,
        alpha=shade if lit else 1.0,
        edgecolor=TEXT,
        linewidth=0.7,
    )


def _label(axis: Any, title: str, names: tuple[str, str, str], size: tuple[int, int, int]) -> None:
    depth, width, height = size
    first, second, third = names
    axis.set_title(title, fontsize=11, color=TEXT)
    axis.text(width / 2, -0.25, second, ha="center", va="top", fontsize=10, color=QUIET)
    axis.text(-0.2, height / 2, third, ha="right", va="center", rotation=90, fontsize=10, color=QUIET)
    middle = depth * _SHIFT / 2
    axis.text(width + middle + 0.3, middle - 0.25, first, ha="left", va="top", fontsize=10, color=QUIET)


FIGURE = Figure(
    name="fig:all",
    title="Which entries BN, LN, IN, GN and WS normalize together; a drawing",
    paper="Normalizations of activations in blue, Weight Standardization in orange.",
    ours=("the drawing",),
    draw=draw,
)
