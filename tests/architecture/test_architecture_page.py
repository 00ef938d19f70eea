"""docs/architecture.md: its generated parts are up to date, and the files it names exist."""

import re

from tests.architecture.page import PAGE, generated, graph
from tests.architecture.sources import PACKAGE, ROOT


def test_the_generated_parts_are_up_to_date():
    assert PAGE.read_text("utf-8") == generated(), "run `python -m tests.architecture.page`"


def test_every_file_named_on_the_page_exists():
    named = re.findall(r"`([\w./]+\.(?:py|md))`", PAGE.read_text("utf-8"))
    assert len(named) > 20
    # A room's docstring names its files without the room.
    found = {
        name for name in named if (PACKAGE / name).exists() or (ROOT / name).exists() or any(PACKAGE.glob(f"*/{name}"))
    }
    assert [name for name in named if name not in found] == []


def test_the_graph_has_imports_and_callbacks():
    sources = {
        "nn/bcn.py": "from micronorm.ops import moments",
        "ops/moments.py": "import torch",
        "cli/__init__.py": "import micronorm.nn",
    }
    drawn = graph(sources)
    assert "    nn --> ops\n" in drawn
    assert "nn -. call_at_first_window .-> commit" in drawn
    assert "cli" not in drawn
