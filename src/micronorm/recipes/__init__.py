"""Named training recipes, one module per table and figure of the paper, with the paper's figures; and running them.

Data sets are in `micronorm.data`, losses and scores in `micronorm.tasks`, and the training loop in `micronorm.engine`.
"""

from micronorm.recipes.recipe import Recipe, Table
from micronorm.recipes.registry import find, find_table, tables

__all__ = ["Recipe", "Table", "find", "find_table", "tables"]
