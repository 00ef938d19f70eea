"""What a plot consists of, in pixels of its own frame: the one source of the page's SVG, of SVG files and of PNG files.

An item has a role, which says how it is drawn, and perhaps a colour of the palette, its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Look:
    """How a role is drawn: what strokes and fills it (a name in the palette, "own", or None), and how."""

    stroke: str | None = None
    fill: str | None = None
    width: float = 1.0
    opacity: float = 1.0
    dashes: tuple[float, ...] = ()


LOOKS: Mapping[str, Look] = {
    "line": Look(stroke="own", width=2),
    "dashed": Look(stroke="own", width=2, dashes=(6, 3)),
    "dotted": Look(stroke="own", width=2, dashes=(1.5, 3.5)),
    "trace": Look(stroke="own", width=1, opacity=0.45),
    "band": Look(fill="own", opacity=0.18),
    "area": Look(fill="own", stroke="card", width=0.8),
    "edge": Look(),
    "cell": Look(fill="own"),
    "mark": Look(fill="own", stroke="card", width=0.8),
    "ring": Look(fill="card", stroke="own", width=1.6),
    "grid": Look(stroke="rule"),
    "axis": Look(stroke="quiet"),
    "sheet": Look(fill="card"),
    "label": Look(fill="quiet"),
    "name": Look(fill="text"),
}


@dataclass(frozen=True)
class Hover:
    """What a line says under the pointer: its name, and by vertex what stands below and its value."""

    name: str
    xs: Sequence[str]
    ys: Sequence[str]


@dataclass(frozen=True)
class Path:
    """Lines from point to point, in one or several pieces."""

    pieces: Sequence[Sequence[Point]]
    role: str
    colour: str | None = None
    closed: bool = False
    title: str = ""
    hover: Hover | None = None


@dataclass(frozen=True)
class Circle:
    """A mark."""

    x: float
    y: float
    r: float
    role: str = "mark"
    colour: str | None = None
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text; y is its baseline."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    role: str = "label"


Item = Path | Circle | Text


@dataclass(frozen=True)
class Grid:
    """What the cells of a table of colours say under the pointer."""

    left: float
    top: float
    width: float
    height: float
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[str]
    """Row by row."""


@dataclass(frozen=True)
class Drawing:
    """Items on a sheet of so many pixels."""

    width: float
    height: float
    items: Sequence[Item]
    label: str
    """What it shows, for readers who do not see it."""
    below: str = ""
    """What the horizontal axis is of, for the pointer."""
    grid: Grid | None = None


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    text: str
    colour: str
    role: str = "line"


@dataclass(frozen=True)
class Plot:
    """A drawing with its words; `name` is that of its files."""

    name: str
    caption: str
    drawing: Drawing
    note: str = ""
    keys: Sequence[Key] | None = None
    """Its legend in a file; None for that of its section."""


def box(left: float, top: float, width: float, height: float) -> list[Point]:
    """The corners of a rectangle."""
    return [(left, top), (left + width, top), (left + width, top + height), (left, top + height)]


def to_svg(drawing: Drawing, *, extra: str = "", attributes: str = "") -> str:
    """The drawing as an SVG element whose colours and roles are classes of a style sheet."""
    payload = "" if drawing.grid is None else _grid_attributes(drawing.grid)
    below = f' data-below="{escape(drawing.below)}"' if drawing.below else ""
    size = f'viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}"'
    body = "".join(map(_item, drawing.items))
    return (
        f'<svg {size} role="img" aria-label="{escape(drawing.label)}"{below}{payload}{attributes}>{extra}{body}</svg>'
    )


def _item(item: Item) -> str:
    classes = item.role if isinstance(item, Text) or item.colour is None else f"{item.role} {item.colour}"
    if isinstance(item, Text):
        anchor = "" if item.anchor == "start" else f' text-anchor="{item.anchor}"'
        return f'<text class="{classes}" x="{_n(item.x)}" y="{_n(item.y)}"{anchor}>{escape(item.text)}</text>'
    title = f"<title>{escape(item.title)}</title>" if item.title else ""
    if isinstance(item, Circle):
        return f'<circle class="{classes}" cx="{_n(item.x)}" cy="{_n(item.y)}" r="{_n(item.r)}">{title}</circle>'
    shape = f'<path class="{classes}"{_hover_attributes(item.hover)} d="{_outline(item)}"'
    return f"{shape}>{title}</path>" if title else f"{shape}/>"


def _outline(path: Path) -> str:
    end = "Z" if path.closed else ""
    return "".join("M" + " ".join(f"{_n(x)} {_n(y)}" for x, y in piece) + end for piece in path.pieces if piece)


def _hover_attributes(hover: Hover | None) -> str:
    if hover is None:
        return ""
    return f' data-n="{escape(hover.name)}" data-x="{_joined(hover.xs)}" data-y="{_joined(hover.ys)}"'


def _grid_attributes(grid: Grid) -> str:
    frame = " ".join(map(_n, (grid.left, grid.top, grid.width, grid.height)))
    columns, rows, values = map(_joined, (grid.columns, grid.rows, grid.values))
    return f' data-frame="{frame}" data-columns="{columns}" data-rows="{rows}" data-values="{values}"'


def _joined(texts: Iterable[str]) -> str:
    return escape("|".join(text.replace("|", "¦") for text in texts))


def _n(value: float) -> str:
    """A tenth of a pixel is as fine as anyone sees."""
    return f"{round(value, 1) + 0.0:g}"
