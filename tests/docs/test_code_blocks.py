"""Every Python block of the README and the docs runs, in order, in one namespace per page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


# Lightning's advice where there are more than two cores, or a GPU
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_code_of_a_page_runs(page):
    namespace: dict[str, object] = {}
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match.group(1), str(page.name), "exec"), namespace)
    assert text.strip()


def test_links_between_the_pages_lead_somewhere():
    broken = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *ROOT.glob("src/**/README.md"), *ROOT.glob("benchmarks/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
