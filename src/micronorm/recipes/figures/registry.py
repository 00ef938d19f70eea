"""Every figure by its name."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from micronorm.bench.plot import load_pyplot
from micronorm.recipes.figures import all_methods, dist, dist_exp, front, imagenet, mean_div, stat_diff, ws_eqn
from micronorm.recipes.figures.figure import Figure

_FIGURES = {
    module.FIGURE.name: module.FIGURE
    for module in (front, all_methods, ws_eqn, mean_div, dist, stat_diff, dist_exp, imagenet)
}

RECORDED = Path(__file__).parents[4] / "results" / "figures"
"""The data files that lie in a checkout; an installed package has none."""


def figures() -> dict[str, Figure]:
    """Every figure by its name, in the paper's order.

    Example:
        >>> list(figures())[:3]
        ['fig:front', 'fig:all', 'fig:ws_eqn']
    """
    return dict(_FIGURES)


def find(name: str) -> Figure:
    """The figure of that name. ValueError where there is none, with those that there are.

    Example:
        >>> find("fig:dist").datasets
        ('digits', 'cifar10')
    """
    if name in _FIGURES:
        return _FIGURES[name]
    near = difflib.get_close_matches(name, _FIGURES, n=3, cutoff=0.6)
    nearest = f"near it: {', '.join(near)}; " if near else ""
    raise ValueError(f"no figure {name!r}; {nearest}there are {', '.join(_FIGURES)}")


def paint(figure: Figure, sheet: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw the figure from its data file's content into `folder`, as SVG and PNG; returns the files.

    Raises:
        ImportError: matplotlib is not installed, with the command that installs it.
    """
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figure.draw(pyplot, sheet)
    written = []
    for suffix in ("svg", "png"):
        path = folder / f"{stem}.{suffix}"
        drawn.savefig(path, dpi=130, facecolor="white", metadata={"Date": None} if suffix == "svg" else None)
        written.append(path)
    pyplot.close(drawn)
    return written
