"""The README and the docs: code blocks run, links and anchors exist, and the README stays short."""

import re
from pathlib import Path

import pytest

from micronorm.nn import SPECS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("src/**/README.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "results").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]*?)(?:#([^)]*))?\)")


@pytest.fixture(autouse=True)
def specs_as_they_were():
    """Remove the specs that a page registers."""
    before = dict(SPECS)
    yield
    SPECS.clear()
    SPECS.update(before)


# Lightning's advice where there are more than two cores, or a GPU
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda p: p.name)
def test_the_code_of_a_page_runs_in_order_in_one_namespace(page):
    namespace: dict[str, object] = {}
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match.group(1), str(page.name), "exec"), namespace)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page, and those written as HTML."""
    text = ANY_BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_an_anchor(page):
    broken = []
    for target, anchor in LINK.findall(ANY_BLOCK.sub("", page.read_text())):
        linked = page.parent / target if target else page
        missing_anchor = anchor and linked.suffix == ".md" and linked.exists() and anchor not in anchors(linked)
        if not linked.exists() or missing_anchor:
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert broken == []


def test_the_readme_fits_on_one_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert len(text.split()) <= 600


def test_every_page_is_listed_in_get_started():
    listed = (ROOT / "docs" / "get_started.md").read_text()
    missing = [page.name for page in PAGES[1:] if f"]({page.name})" not in listed and page.name != "get_started.md"]
    assert missing == []
