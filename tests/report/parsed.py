"""Pages taken apart."""

import re
from html.parser import HTMLParser
from pathlib import Path

from micronorm.report import write_page

VOID = {"meta", "img", "br", "link", "wbr"}


class Parsed(HTMLParser):
    """The elements of a page, its text, and whether every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def count(self, tag: str, of_class: str | None = None) -> int:
        return sum(t == tag and (of_class is None or of_class in a.get("class", "").split()) for t, a in self.tags)

    def sections(self) -> list[str]:
        """The anchors of the sections."""
        return [a["id"] for tag, a in self.tags if tag == "section"]


def page(tmp_path: Path, runs, **options) -> tuple[str, Parsed]:
    text = write_page(tmp_path / "out" / "report.html", runs=runs, **options).read_text("utf-8")
    parsed = Parsed(text)
    assert parsed.open == []
    return text, parsed


def section(text: str, key: str) -> str:
    found = re.search(rf'<section id="{key}".*?</section>', text, re.DOTALL)
    assert found is not None, key
    return found[0]


def table_rows(text: str) -> dict[str, list[str]]:
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", text):
        first, *rest = (re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?>.*?</t[hd]>", row))
        found[first] = rest
    return found
