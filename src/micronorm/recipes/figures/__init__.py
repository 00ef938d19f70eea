"""The paper's figures as recipes: `find(name)` gives one, `paint` draws it from its data file."""

from micronorm.recipes.figures.figure import Figure, Request
from micronorm.recipes.figures.registry import RECORDED, figures, find, paint

__all__ = ["RECORDED", "Figure", "Request", "figures", "find", "paint"]
