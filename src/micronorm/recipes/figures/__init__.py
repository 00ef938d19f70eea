"""The figures of the paper as recipes: how each is measured and drawn. Training itself is `micronorm.engine`.

`find(name)` returns a figure. `Figure.run` measures its numbers into a JSON file, `Figure.save` draws them.

| file | holds |
|---|---|
| `figure.py` | `Figure`, `Request`, captions, and the JSON file of a figure |
| `methods.py` | training one network with several methods, with measurements at every epoch |
| `stat_diff.py`, `mean_div.py` | figures of such trainings |
| `dist.py` | the grid of networks with preset channel statistics |
| `dist_exp.py` | histograms of two channels |
| `recorded.py` | figures of recorded runs: `fig:front` and `fig:imagenet` |
| `drawings.py` | figures without numbers: `fig:all` and `fig:ws_eqn` |
"""

from pathlib import Path

from micronorm.recipes import unknown
from micronorm.recipes.figures import dist, dist_exp, drawings, mean_div, recorded, stat_diff
from micronorm.recipes.figures.figure import Figure, Request

__all__ = ["FIGURES", "RECORDED", "Figure", "Request", "find"]

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        recorded.FRONT,
        drawings.ALL,
        drawings.WS_EQN,
        mean_div.FIGURE,
        dist.FIGURE,
        stat_diff.FIGURE,
        dist_exp.FIGURE,
        recorded.IMAGENET,
    )
}
"""Every figure by its name, in the order of the paper."""

RECORDED = Path(__file__).parents[4] / "results" / "figures"
"""The data files in a checkout; an installed package does not have them."""


def find(name: str) -> Figure:
    """Return the figure with this name.

    Raises:
        ValueError: there is no such figure; the message has the most similar names.

    Example:
        >>> find("fig:dist").datasets
        ('digits', 'cifar10')
    """
    if name in FIGURES:
        return FIGURES[name]
    raise ValueError(unknown(f"no figure {name!r}", name, list(FIGURES)))
