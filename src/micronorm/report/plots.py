"""The one way of drawing: matplotlib in the library's style, as SVG for a page or as SVG and PNG files.

Figures are made without pyplot, so drawing changes no global state: neither the user's backend nor their settings.
matplotlib is loaded when the first figure is made, not when micronorm is imported.
"""

import io
import os
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from micronorm.records import write_atomically
from micronorm.report.html import plain

_SCHEMES = {  # by name, light and dark
    "page": ("#f5f6f8", "#12151a"),
    "card": ("#ffffff", "#1b2027"),
    "text": ("#1b1f24", "#e6e9ed"),
    "quiet": ("#5b6570", "#a0aab5"),
    "rule": ("#dde1e6", "#323943"),
    "bad": ("#b3261e", "#ff8a80"),
    "c0": ("#0b62b8", "#5aa9f5"),
    "c1": ("#d45500", "#ff8f4a"),
    "c2": ("#00916a", "#2fbf8f"),
    "c3": ("#a3248c", "#f088cf"),
    "c4": ("#2b2f36", "#f2f3f5"),
    "c5": ("#2b95c9", "#a9e3fb"),
    "c6": ("#a88400", "#e3c84f"),
    "c7": ("#7b8490", "#8a939e"),
    "s1": ("#e08a3c", "#d98a45"),
    "s2": ("#7fb8a4", "#4f8f7b"),
    "s3": ("#c9ced6", "#565e69"),
}
LIGHT: Mapping[str, str] = {name: light for name, (light, _) in _SCHEMES.items()}
"""The colours of a page by name; figures are drawn in these. Each value occurs once, so `to_svg` can name it.

The first five colours of lines (c0 to c4) differ by at least 14 in CIELAB for readers with any kind of colour vision
(simulated after Machado and others, 2009). s1 to s3 fill areas.
"""
DARK: Mapping[str, str] = {name: dark for name, (_, dark) in _SCHEMES.items()}
"""The same names in a dark scheme."""

COLOURS = tuple(LIGHT[f"c{k}"] for k in range(8))
"""Colours of lines and bars in the order in which to use them."""

METHOD_COLOURS: Mapping[str, str] = {
    "BCN+WS": LIGHT["c0"],
    "GN": LIGHT["c1"],
    "GN+WS": LIGHT["c2"],
    "BN": LIGHT["c4"],
    "BCN": LIGHT["c5"],
    "SyncBN": LIGHT["c7"],
}
"""The colour that a method has in every picture of the library."""

TEXT, QUIET, RULE = LIGHT["text"], LIGHT["quiet"], LIGHT["rule"]

_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and the page's font applies
    "svg.hashsalt": "micronorm",  # with the missing date, the same figure gives the same bytes
    "text.color": TEXT,
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_NOT_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
_SVG = "{http://www.w3.org/2000/svg}"
_FILES = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 144}}


def load_matplotlib() -> Any:
    """Return the module matplotlib, loaded on first use."""
    import matplotlib.figure

    return matplotlib


@contextmanager
def plot_style(**settings: Any) -> Iterator[None]:
    """Apply the library's style to what is drawn and saved in this context.

    Args:
        settings: further matplotlib settings, with `_` for `.`: `text_parse_math=False`.
    """
    given = {name.replace("_", ".", 1): value for name, value in settings.items()}
    with load_matplotlib().rc_context({**_SETTINGS, **given}), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is measured wrongly, but the browser's fonts show it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def subplots(
    rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], layout: Any = None, **options: Any
) -> Any:
    """Return a new figure and its axes, as `pyplot.subplots` does, in the library's style.

    Example:
        >>> figure, axes = subplots(figsize=(6, 4))
        >>> apply_style(axes).plot([1, 2], [3, 4])
        [<matplotlib.lines.Line2D object at ...>]
        >>> to_svg(figure, name="example").startswith("<svg")
        True
    """
    with plot_style():
        figure = load_matplotlib().figure.Figure(figsize=figsize, layout=layout)
        return figure, figure.subplots(rows, columns, **options)


def apply_style(axes: Any, *, grid: str = "both") -> Any:
    """Give axes light grid lines, quiet labels and no box; return them.

    Args:
        axes: matplotlib axes.
        grid: "x", "y", "both", or "" for no grid lines.
    """
    if grid:
        axes.grid(axis=grid, color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(RULE)
    axes.tick_params(colors=QUIET, length=0, which="both")
    axes.xaxis.label.set_color(QUIET)
    axes.yaxis.label.set_color(QUIET)
    return axes


def to_svg(figure: Any, *, name: str, label: str = "", hover: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the figure as an SVG element to place in an HTML page that defines the colours as CSS variables.

    The element has no style attributes, which a strict content security policy forbids, and loads nothing.

    Args:
        figure: a matplotlib figure, drawn in the colours of `LIGHT`.
        name: prefix of all ids, so that several figures can share a page.
        label: what the figure shows, for screen readers.
        hover: texts to show under the pointer, by the `gid` of an artist. One text belongs to the whole artist,
            several belong to its markers in order.
    """
    with plot_style():
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        root = ET.fromstring(_render(figure, format="svg", metadata=metadata))
    for gid, texts in (hover or {}).items():
        _add_titles(root, gid, texts)
    kept = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": plain(label)}
    _clean(root, name, _references(root))
    root.attrib = kept
    return ET.tostring(root, encoding="unicode")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> list[Path]:
    """Write the figure as `path`.svg and `path`.png on white, and return both files."""
    written = []
    for suffix, options in _FILES.items():
        with plot_style(svg_fonttype="path"):  # a file stands alone: formulas need matplotlib's own fonts
            image = _render(figure, format=suffix, facecolor=LIGHT["card"], bbox_inches="tight", **options)
        written.append(Path(f"{os.fspath(path)}.{suffix}"))
        write_atomically(written[-1], image)
    return written


def _render(figure: Any, *, format: str, **options: Any) -> bytes:
    """Return the figure as a file. Question marks replace control characters, which fonts lack and XML forbids."""
    for text in figure.findobj(load_matplotlib().text.Text):
        text.set_text(plain(text.get_text()))
    file = io.BytesIO()
    figure.savefig(file, format=format, **options)
    return _NOT_XML.sub(b"?", file.getvalue()) if format == "svg" else file.getvalue()


def _add_titles(root: ET.Element, gid: str, texts: Sequence[str]) -> None:
    group = next(element for element in root.iter(f"{_SVG}g") if element.get("id") == gid)
    owners = [group] if len(texts) == 1 else list(group.iter(f"{_SVG}use"))
    for owner, text in zip(owners, texts, strict=True):
        title = ET.Element(f"{_SVG}title")
        title.text = plain(text)
        owner.insert(0, title)


def _references(root: ET.Element) -> set[str]:
    """Return the ids that some attribute refers to."""
    values = (value for element in root.iter() for value in element.attrib.values())
    return {found[1] for value in values if (found := re.search(r"^(?:url\()?#([\w.-]+)", value))}


def _clean(element: ET.Element, name: str, wanted: set[str]) -> None:
    """Drop what a page does not need, and turn styles into attributes and colours into CSS variables."""
    element.tag = element.tag.removeprefix(_SVG)
    element.text = element.text if element.tag in ("text", "tspan", "title") else None
    element.tail = None
    given, element.attrib = element.attrib, {}
    for key, value in given.items():
        if key == "style":
            element.attrib |= _attributes(value)
        elif key != "id" or value in wanted:
            element.set(key.rpartition("}")[2], value)
    for key, value in element.attrib.items():
        if key == "id":
            element.set(key, f"{name}-{value}")
        else:
            value = re.sub(r"(^#|url\(#)", rf"\g<1>{name}-", value) if key in ("href", "clip-path") else value
            element.set(key, _short_numbers(value) if key == "d" else _named_colour(value))
    for child in list(element):
        if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
            element.remove(child)
        else:
            _clean(child, name, wanted)


def _attributes(style: str) -> dict[str, str]:
    """Return CSS declarations as SVG attributes; the page's style sheet chooses the font."""
    pairs = [(part[0].strip(), part[1].strip()) for text in style.split(";") if len(part := text.split(":", 1)) == 2]
    found = {key: value for key, value in pairs if key not in ("font", "font-family")}
    for key, value in pairs:
        if key == "font" and (size := re.search(r"[\d.]+px", value)):
            found["font-size"] = size[0]
    return found


def _named_colour(value: str) -> str:
    return f"var(--{_NAMES[value]})" if value in _NAMES else value


def _short_numbers(path: str) -> str:
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), path)


_NAMES = {colour: name for name, colour in LIGHT.items()}
