"""Read the sources of the package, its rooms and their imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "micronorm"


def read_sources() -> dict[str, str]:
    """Return the text of every file of the package by its path relative to it."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(path: str) -> str:
    """The room of a file given relative to the package: 'ops/bcn/reference.py' and 'ops.py' are both in 'ops'."""
    return path.split("/")[0].removesuffix(".py")


def imported_modules(path: str, source: str, rooms: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) for each import, wherever it stands: in functions, under TYPE_CHECKING."""
    package = ["micronorm", *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from micronorm import nn` imports a room; `from micronorm import BCN` the package's own file.
                is_room = base == "micronorm" and alias.name in rooms
                yield node.lineno, f"{base}.{alias.name}" if is_room else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value
