"""Named training recipes, one module per table of the paper, with the paper's figure beside each."""

from micronorm.recipes.recipe import Recipe, Table
from micronorm.recipes.registry import find, find_table, tables

__all__ = ["Recipe", "Table", "find", "find_table", "tables"]
