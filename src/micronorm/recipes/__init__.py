"""Named training recipes: the rows of the paper's tables and of ours, a module per kind of data; and running them.

Data sets are in `micronorm.data`, losses and scores in `micronorm.tasks`, and the training loop in `micronorm.engine`.
"""

import difflib
from collections.abc import Sequence

from micronorm.recipes import cifar, detection, digits, imagenet, segmentation, video
from micronorm.recipes.recipe import Recipe, Table

__all__ = ["Recipe", "Table", "find", "find_table", "tables"]

_MODULES = (imagenet, cifar, digits, detection, segmentation, video)
# The paper's tables come first: one of their rows has a figure of the paper.
_TABLES = {
    table.name: table
    for table in sorted(
        (table for module in _MODULES for table in module.TABLES),
        key=lambda table: all(recipe.paper is None for recipe in table.rows),
    )
}


def tables() -> dict[str, Table]:
    """Return every table by its name: the paper's in its order, then ours.

    Example:
        >>> list(tables())[:3]
        ['abl', 'imagenet_ws', 'cwn']
    """
    return dict(_TABLES)


def find_table(name: str) -> Table:
    """Return the table of that name. Raise ValueError with the most similar names if it is unknown.

    Example:
        >>> find_table("cwn").rows[0].name
        'cwn/gn'
    """
    if name in _TABLES:
        return _TABLES[name]
    if name.startswith("fig:"):
        raise ValueError(f"{name!r} is a figure, not a table: micronorm reproduce {name}")
    if name.removeprefix("tab:") in _TABLES:
        raise ValueError(f"no table {name!r}; names go without tab:, write {name.removeprefix('tab:')!r}")
    raise ValueError(unknown(f"no table {name!r}", name, list(_TABLES)))


def find(name: str) -> Recipe:
    """Return the recipe "table/row"; "digits" alone is "digits/bcn-ws".

    Raise ValueError with the most similar names if the name is unknown.

    Example:
        >>> find("cifar1/c10-micro-bcn-ws").paper
        {'top1': 6.31}
        >>> find("cifar1/c10-bcn")
        Traceback (most recent call last):
        ...
        ValueError: no recipe 'cifar1/c10-bcn'; near it: cifar1/c10-bn, ...; `micronorm reproduce` lists the tables
    """
    recipes = {recipe.name: recipe for table in _TABLES.values() for recipe in table.rows}
    if name in recipes:
        return recipes[name]
    if name in _TABLES:
        table = _TABLES[name]
        if table.default is not None:
            return recipes[f"{name}/{table.default}"]
        rows = ", ".join(recipe.name for recipe in table.rows)
        raise ValueError(f"{name!r} is a table, not a recipe; its recipes are {rows}")
    table_name, slash, _ = name.partition("/")
    if name.startswith((".", "/", "~")):
        raise ValueError(f"{name!r} is a path, not a recipe; write TABLE/ROW, or file.py:NAME for a recipe of your own")
    if slash and table_name not in _TABLES:
        find_table(table_name)  # raises an error that says what is wrong
    rows = [recipe.name for recipe in _TABLES[table_name].rows] if slash else [f"{table}/…" for table in _TABLES]
    raise ValueError(
        unknown(f"no recipe {name!r}", name, list(recipes), rows) + "; `micronorm reproduce` lists the tables"
    )


def unknown(message: str, name: str, known: Sequence[str], listed: Sequence[str] | None = None) -> str:
    """Extend a message about an unknown name by the most similar known names; if none is similar, by all of `listed`.

    Example:
        >>> unknown("no fruit 'aple'", "aple", ["apple", "fig"]), unknown("no fruit 'zz'", "zz", ["apple", "fig"])
        ("no fruit 'aple'; near it: apple", "no fruit 'zz', nor one like it; there are apple, fig")
    """
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    if near:
        return f"{message}; near it: {', '.join(near)}"
    listed = known if listed is None else listed
    return f"{message}, nor one like it" + (f"; there are {', '.join(listed)}" if len(listed) <= 40 else "")
