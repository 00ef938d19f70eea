"""Named training recipes: the rows of the paper's tables and of ours, a module per kind of data; and running them.

Data sets are in `micronorm.data`, losses and scores in `micronorm.tasks`, and the training loop in `micronorm.engine`.
"""

from micronorm.recipes.recipe import Recipe, Table
from micronorm.recipes.registry import find, find_table, tables

__all__ = ["Recipe", "Table", "find", "find_table", "tables"]
