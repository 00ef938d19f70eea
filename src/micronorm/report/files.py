"""The plots of a page as files: the same drawings, with caption and legend, as SVG and as PNG. PNG needs matplotlib."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as File
from typing import Any

from micronorm.records import write_atomically
from micronorm.report.drawing import LOOKS, Circle, Drawing, Item, Path, Plot, Text, box, to_svg
from micronorm.report.page import plots_of, swatch
from micronorm.report.palette import DARK, LIGHT, variables
from micronorm.report.runs import Runs
from micronorm.report.style import plot_rules

_LETTER = 6.8  # pixels that a letter of the legend takes, about
_ROW = 18
_MARGIN = 10
_TEXT = 12
_SCALE = 3  # pixels of a PNG per pixel of the drawing

_STYLE = (
    f"svg{{color-scheme:light dark;{variables(LIGHT)}font:{_TEXT}px system-ui,'Segoe UI',Roboto,Arial,sans-serif}}"
    f"@media (prefers-color-scheme: dark){{svg{{{variables(DARK)}}}}}{plot_rules()}"
)


def write_plots(folder: str | os.PathLike[str], *, runs: Runs) -> list[File]:
    """Write every plot that a page about the runs has, as SVG (light and dark) and PNG (light), and return the files.

    Raises:
        ImportError: matplotlib, which draws the PNG files, is not installed. The SVG files were written.

    Example:
        >>> import tempfile
        >>> from micronorm.records import Run
        >>> place = tempfile.TemporaryDirectory()
        >>> facts = {"recipe": "digits", "settings": {}, "execution": {}, "data": {}, "environment": {}}
        >>> facts |= {"revision": None, "command": "micronorm train digits", "date": "2025-01-01"}
        >>> run = Run.create(f"{place.name}/run", facts)
        >>> run.append_epoch({"epoch": 0, "step": 41, "train": {"loss": 0.8}})
        >>> [file.name for file in write_plots(f"{place.name}/plots", runs=[run.path])]
        ['training-loss.svg', 'training-loss.png']
        >>> place.cleanup()
    """
    plots = plots_of(runs)
    try:
        figure, fault = _load_figure(), None
    except ImportError as error:
        figure, fault = None, error
    target = File(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in plots:
        sheet = with_words(plot)
        contents = {"svg": _svg(sheet)} if figure is None else {"svg": _svg(sheet), "png": _png(sheet, figure)}
        for suffix, content in contents.items():
            file = target / f"{plot.name}.{suffix}"
            write_atomically(file, content)
            written.append(file)
    if fault is not None:
        raise ImportError(f"{folder} has the {len(written)} plots as SVG; {fault}") from fault
    return written


def with_words(plot: Plot) -> Drawing:
    """The drawing on a sheet of its own, caption and note above it, its legend below."""
    drawing = plot.drawing
    words: list[Item] = [Text(_MARGIN, 20, plot.caption, role="name")]
    top = 26.0
    for line in _wrapped(plot.note, drawing.width - 2 * _MARGIN):
        top += 14
        words.append(Text(_MARGIN, top, line))
    top += 10
    items, y, x = [_moved(item, top) for item in drawing.items], top + drawing.height + 14, float(_MARGIN)
    for key in plot.keys or ():
        width = 30 + _LETTER * len(key.text) + 14
        if x + width > drawing.width and x > _MARGIN:
            x, y = float(_MARGIN), y + _ROW
        items += [swatch(key, x, y - 9), Text(x + 30, y, key.text)]
        x += width
    height = y + _MARGIN if plot.keys else top + drawing.height + 4
    sheet: list[Item] = [Path([box(0, 0, drawing.width, height)], "sheet", closed=True)]
    return Drawing(drawing.width, height, [*sheet, *words, *items], f"{plot.caption}. {drawing.label}")


def _wrapped(text: str, width: float) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and _LETTER * len(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _moved(item: Item, by: float) -> Item:
    if isinstance(item, Path):
        return replace(item, pieces=[[(x, y + by) for x, y in piece] for piece in item.pieces], hover=None)
    return replace(item, y=item.y + by)


def _svg(drawing: Drawing) -> bytes:
    size = f' xmlns="http://www.w3.org/2000/svg" width="{drawing.width:g}" height="{drawing.height:g}"'
    return to_svg(drawing, extra=f"<style>{_STYLE}</style>", attributes=size).encode("utf-8", "replace") + b"\n"


def _load_figure() -> Any:
    try:
        importlib.import_module("matplotlib.backends.backend_agg")
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            "plots as PNG need matplotlib, which is not installed: pip install 'micronorm[plot]'"
        ) from error


def _png(drawing: Drawing, figure_class: Any) -> Any:
    """A function that writes the drawing, in its light colours, into a file."""
    patches = importlib.import_module("matplotlib.patches")
    outlines = importlib.import_module("matplotlib.path")
    figure = figure_class(figsize=(drawing.width / 72, drawing.height / 72), dpi=72 * _SCALE)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.set_axis_off()
    for order, item in enumerate(drawing.items):
        if isinstance(item, Text):
            anchor = {"start": "left", "middle": "center", "end": "right"}[item.anchor]
            colour = LIGHT[LOOKS[item.role].fill or "text"]
            plain = item.text.encode("utf-8", "replace").decode()
            axes.text(
                item.x, item.y, plain, ha=anchor, va="baseline", color=colour, size=10.5, zorder=order, parse_math=False
            )
        elif isinstance(item, Circle):
            axes.add_patch(patches.Circle((item.x, item.y), item.r, zorder=order, **_paint(item.role, item.colour)))
        elif any(item.pieces):
            outline = outlines.Path.make_compound_path(*(_outline(p, item.closed, outlines.Path) for p in item.pieces))
            axes.add_patch(patches.PathPatch(outline, zorder=order, **_paint(item.role, item.colour)))
    return lambda file: figure.savefig(file, format="png", dpi=72 * _SCALE)


def _outline(piece: Sequence[tuple[float, float]], closed: bool, path: Any) -> Any:
    return path([*piece, piece[0]], closed=True) if closed else path(list(piece))


def _paint(role: str, colour: str | None) -> dict[str, Any]:
    look = LOOKS[role]

    def named(name: str | None) -> str:
        return "none" if name is None else LIGHT[(colour or "text") if name == "own" else name]

    return {
        "facecolor": named(look.fill),
        "edgecolor": named(look.stroke),
        "linewidth": look.width if look.stroke else 0,
        "alpha": look.opacity,
        "linestyle": (0, look.dashes) if look.dashes else "solid",
        "capstyle": "round",
        "joinstyle": "round",
    }
