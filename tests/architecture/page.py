"""Write the generated parts of docs/architecture.md: `python -m tests.architecture.page`.

The parts stand between the markers `<!-- NAME -->` and `<!-- end of NAME -->`. The list of rooms comes from the
docstring of each room, the graph from the import statements.
"""

import ast
import re
from collections.abc import Mapping

from tests.architecture.sources import PACKAGE, ROOT, imported_modules, read_sources, room_of
from tests.architecture.test_imports import ALLOWED, CALLBACKS

PAGE = ROOT / "docs" / "architecture.md"

# They may import every room, so that their edges would only hide the others.
LEFT_OUT = frozenset(room for room, allowed in ALLOWED.items() if allowed is None) | {"__main__"}


def rooms(sources: Mapping[str, str]) -> str:
    """Return a list of the rooms with what their docstrings say."""
    lines = []
    for room in sorted({room_of(path) for path in sources} - {"__init__", "__main__"}):
        is_package = (PACKAGE / room).is_dir()
        source = sources[f"{room}/__init__.py" if is_package else f"{room}.py"]
        text = ast.get_docstring(ast.parse(source)) or ""
        paragraphs = text.partition("\n|")[0].split("\n\n")[:2]  # a table may follow
        lines.append(f"- **`{room}{'/' if is_package else '.py'}`** {' '.join(' '.join(paragraphs).split())}")
    return "\n".join(lines)


def graph(sources: Mapping[str, str]) -> str:
    """Return the imports between rooms as a Mermaid graph, with callbacks as dotted edges."""
    known = frozenset(map(room_of, sources))
    edges = set()
    for path, source in sources.items():
        for _, module in imported_modules(path, source, known):
            package, _, rest = module.partition(".")
            target = rest.split(".")[0]
            if package == "micronorm" and target in known and target != room_of(path):
                edges.add((room_of(path), target))
    lines = [f"    {room} --> {target}" for room, target in sorted(edges) if not {room, target} & LEFT_OUT]
    lines += [f"    {room} -. {function} .-> {target}" for (room, target), function in CALLBACKS.items()]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def generated() -> str:
    """Return the page with its generated parts as the sources have them now."""
    sources, text = read_sources(), PAGE.read_text("utf-8")
    for name, part in (("rooms", rooms(sources)), ("graph", graph(sources))):
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)"
        text, count = re.subn(pattern, lambda m, part=part: m[1] + part + m[2], text, flags=re.DOTALL)
        assert count == 1, f"docs/architecture.md needs the markers of {name!r} once, found {count}"
    return text


if __name__ == "__main__":
    PAGE.write_text(generated(), "utf-8")
