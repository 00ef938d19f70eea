import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from micronorm.records import Run
from micronorm.report import Cuts, Table, write_page

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br", "link"}


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
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def count(self, tag: str, of_class: str | None = None) -> int:
        return sum(t == tag and (of_class is None or of_class in a.get("class", "").split()) for t, a in self.tags)


def make_run(folder: Path, *, epochs: int = 3, outcome: dict | None = None, evil: str = "", **facts) -> Path:
    base = {
        "recipe": "digits",
        "settings": {"epochs": epochs, "step_batch": 32, "seed": 0, "note": evil},
        "execution": {"micro_batch": 1},
        "data": {"name": f"digits{evil}", "train": 1297, "test": 500},
        "environment": {"torch": "2.11", "cpu": {"model": f"a processor{evil}"}},
        "revision": "0123abc",
        "command": f"micronorm train digits {evil}",
        "date": "2025-01-02T03:04:05+00:00",
    }
    run = Run.create(folder, {**base, **facts})
    for epoch in range(epochs):
        run.append_steps(
            [{"step": epoch + 1, "epoch": epoch, "loss": 2.0 / (epoch + 1), "samples": 32, "seconds": 0.5}]
        )
        figures = {"error": 12.5 - epoch, "loss": 0.25}
        run.append_epoch({"epoch": epoch, "step": epoch + 1, "train": {"loss": 2.0 / (epoch + 1)}, "test": figures})
    if outcome is not None:
        run.finish(outcome)
    return run.path


def page(tmp_path: Path, runs, **options) -> tuple[str, Parsed]:
    text = write_page(tmp_path / "out" / "report.html", runs=runs, **options).read_text("utf-8")
    parsed = Parsed(text)
    assert parsed.open == []
    return text, parsed


def table_rows(text: str) -> dict[str, list[str]]:
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", text):
        first, *rest = (re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?>.*?</t[hd]>", row))
        found[first] = rest
    return found


def test_results_charts_findings_and_facts_are_on_the_page(tmp_path):
    runs = [
        make_run(tmp_path / "a", name="GN", outcome={"finished": True}),
        make_run(tmp_path / "b", name="BCN+WS", epochs=2, command="micronorm train other", outcome={"finished": False}),
        make_run(tmp_path / "c", name="BN", epochs=1),
    ]
    text, parsed = page(tmp_path, runs, title="The title", findings=["First finding.", "Second finding."])
    rows = table_rows(text)
    assert rows["run"] == ["test error", "test loss", "steps", "seconds", "seed", "state"]
    assert rows["GN"] == ["10.5", "0.25", "3", "1.5", "0", "finished"]
    assert rows["BCN+WS"] == ["11.5", "0.25", "2", "1.0", "0", "ended early"]
    assert rows["BN"] == ["12.5", "0.25", "1", "0.5", "0", "not ended"]
    words = " ".join(parsed.text)
    for expected in (
        "The title",
        "First finding.",
        "Second finding.",
        "Training loss",
        "Test error",
        "micronorm train other",
        "0123abc",
        "a processor",
        "3 runs, data: digits, 2025-01-02",
    ):
        assert expected in words
    assert parsed.count("figure") == 2
    # a line and its marks for each run in each chart, and a line in the legend
    assert parsed.count("path", "line") == 3 * 3
    assert parsed.count("circle") == 2 * (3 + 2 + 1)
    assert parsed.count("title") == 1 + 2 * (3 + 2 + 1)


def test_errors_are_called_errors(tmp_path):
    run = make_run(tmp_path / "a", epochs=0, name="GN")
    Run.open(run).append_epoch({"epoch": 0, "step": 1, "test": {"loss": 0.5, "top1": 12.5, "top5": 1.5}})
    text, parsed = page(tmp_path, [run])
    assert table_rows(text)["run"][:3] == ["test error %", "test loss", "test top-5 error %"]
    assert "Test error %" in parsed.text


def test_points_stand_at_completed_epochs_with_their_values(tmp_path):
    text, _ = page(tmp_path, [make_run(tmp_path / "a", name="GN", epochs=2)])
    assert re.findall(r"<title>(GN.*?)</title>", text) == ["GN, 1: 2", "GN, 2: 1", "GN, 1: 12.5", "GN, 2: 11.5"]


def test_text_from_runs_is_text_wherever_it_stands(tmp_path):
    run = make_run(tmp_path / "a", name=EVIL, evil=EVIL, outcome={"finished": True})
    other = make_run(tmp_path / "b", recipe=EVIL)
    writer = Run.open(run)
    writer.append_epoch({"epoch": 3, "step": 4, "test": {EVIL: 1.0}})
    writer.add_facts(**{EVIL: {EVIL: EVIL}})
    text, parsed = page(
        tmp_path,
        [run, other],
        title=EVIL,
        findings=[EVIL],
        tables=[Table(EVIL, [EVIL, "b"], [[EVIL, EVIL]])],
        cuts=Cuts(1e-6, 1e-6, EVIL),
    )
    assert parsed.count("script") == parsed.count("img") == 0
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert "<script" not in text
    assert "alert(1)" in " ".join(parsed.text)


def test_a_run_named_by_the_caller_is_escaped_too(tmp_path):
    _, parsed = page(tmp_path, {EVIL: make_run(tmp_path / "a")})
    assert parsed.count("script") == parsed.count("img") == 0
    assert EVIL in parsed.text


def test_no_request_leaves_the_page(tmp_path):
    text, parsed = page(tmp_path, [make_run(tmp_path / "a")], cuts=Cuts(1e-6, 1e-6))
    assert not re.search(r"https?:|url\(|@import|//", text)
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
    assert not [(tag, attributes) for tag, attributes in parsed.tags if loading & attributes.keys()]
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"link", "script", "iframe", "object", "embed", "base", "form"})
    (policy,) = (a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_light_and_dark_and_phones_are_provided_for(tmp_path):
    text, parsed = page(tmp_path, [make_run(tmp_path / "a")])
    assert "@media (prefers-color-scheme: dark)" in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [a for _, a in parsed.tags]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one/x", "two/x", "y")]
    text, _ = page(tmp_path, runs)
    assert list(table_rows(text))[1:] == ["digits (x) (1)", "digits (x) (2)", "digits (y)"]


def test_the_cut_section_shows_both_numbers_and_is_absent_without_them(tmp_path):
    run = make_run(tmp_path / "a")
    _, parsed = page(tmp_path, [run], cuts=Cuts(3.14e-6, 2.72e-6, "Cut in sevens."))
    assert {"Cut invariance", "Cut in sevens.", "3.1e-06", "2.7e-06"} <= set(parsed.text)
    _, parsed = page(tmp_path, [run])
    assert "Cut invariance" not in parsed.text


def test_facts_that_are_the_same_stand_once(tmp_path):
    runs = [make_run(tmp_path / name, name=name, command=f"run {name}") for name in ("a", "b")]
    _, parsed = page(tmp_path, runs)
    assert sum("a processor" in text for text in parsed.text) == 1
    assert parsed.count("details") == 2
    assert {"run a", "run b", "The same in all 2 runs:"} <= set(parsed.text)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_break_the_line_and_are_counted(tmp_path, bad):
    run = Run.open(make_run(tmp_path / "a", epochs=0))
    for epoch, loss in enumerate((3.0, bad, 2.0, 1.5)):
        run.append_epoch({"epoch": epoch, "step": epoch, "train": {"loss": loss}})
    text, parsed = page(tmp_path, [run.path])
    assert parsed.count("circle") == 3
    (path,) = re.findall(r'<figure>.*?<path class="line c0" d="(.*?)"', text)
    assert re.sub("[^ML]", "", path) == "MML"
    assert "1 values that are not finite left out" in text


def test_a_run_without_a_finite_value_has_a_page(tmp_path):
    run = Run.open(make_run(tmp_path / "a", epochs=0))
    run.append_epoch({"epoch": 0, "step": 1, "train": {"loss": math.nan}, "test": {"error": math.nan}})
    text, parsed = page(tmp_path, [run.path])
    assert parsed.text.count("No finite values.") == 2
    assert table_rows(text)["digits"][0] == "nan"


def test_a_run_that_has_only_begun_has_a_page_without_charts(tmp_path):
    text, parsed = page(tmp_path, [make_run(tmp_path / "a", epochs=0)])
    assert parsed.count("figure") == 0
    assert table_rows(text)["digits"] == ["0", "–", "0", "not ended"]


def test_the_loss_of_an_epoch_without_a_row_is_the_mean_over_samples_of_its_steps(tmp_path):
    run = Run.open(make_run(tmp_path / "a", name="GN", epochs=0))
    run.append_steps(
        [{"step": 1, "epoch": 0, "loss": 3.0, "samples": 30}, {"step": 2, "epoch": 0, "loss": 1.0, "samples": 10}]
    )
    text, _ = page(tmp_path, [run.path])
    assert "<title>GN, 1: 2.5</title>" in text


def test_small_values_are_not_hidden_by_large_ones(tmp_path):
    numbers = [[1, 123.456, 3e-7], [2, 1.5, 123456.0], [3, None, math.inf]]
    text, _ = page(tmp_path, [make_run(tmp_path / "a")], tables=[Table("Numbers", ["n", "near", "far"], numbers)])
    rows = table_rows(text)
    assert [rows[key] for key in "123"] == [["123.5", "3e-07"], ["1.5", "1.235e+05"], ["–", "inf"]]


@pytest.mark.parametrize("span, scale", [((0.02, 2.0), True), ((0.2, 2.0), False), ((0.0, 2.0), False)])
def test_values_over_several_magnitudes_get_a_logarithmic_scale(tmp_path, span, scale):
    run = Run.open(make_run(tmp_path / "a", epochs=0))
    for epoch, loss in enumerate(span):
        run.append_epoch({"epoch": epoch, "step": epoch, "train": {"loss": loss}})
    text, _ = page(tmp_path, [run.path])
    assert ("logarithmic scale" in text) is scale


@pytest.mark.parametrize(
    "values",
    [
        (0.0,),
        (5.0,),
        (0.0, 0.0),
        (-3.0, 2.0),
        (1e-12, 1e12),
        (1e300, 2e300),
        (99.9, 100.0),
        (-5.0, -5.0),
        (5e-324, 1.0),
        (1e-3, 0.9),
        (1.0, 31.0),
    ],
)
def test_every_mark_lies_within_the_frame_and_ticks_do_not_crowd(tmp_path, values):
    run = Run.open(make_run(tmp_path / "a", epochs=0))
    for epoch, loss in enumerate(values):
        run.append_epoch({"epoch": epoch, "step": epoch, "train": {"loss": loss}})
    _, parsed = page(tmp_path, [run.path])
    marks = [(float(a["cx"]), float(a["cy"])) for tag, a in parsed.tags if tag == "circle"]
    assert len(marks) == len(values)
    assert all(46 <= x <= 410 and 12 <= y <= 222 for x, y in marks)
    labels = [float(a["y"]) for tag, a in parsed.tags if tag == "text" and a.get("text-anchor") == "end"]
    assert 1 <= len(labels) <= 9
    assert all(abs(a - b) >= 12 for a, b in pairwise(labels))


def test_a_figure_other_than_the_error_is_charted_where_there_is_no_error(tmp_path):
    run = Run.open(make_run(tmp_path / "a", epochs=0))
    run.append_epoch({"epoch": 0, "step": 1, "test": {"loss": 1.0, "box_map": 30.0}})
    _, parsed = page(tmp_path, [run.path])
    assert "Test box map" in parsed.text


def test_what_cannot_be_put_on_a_page_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_page(tmp_path / "page.html", runs=[])
    with pytest.raises(FileNotFoundError, match="holds no run"):
        write_page(tmp_path / "page.html", runs=[tmp_path])
    with pytest.raises(ValueError, match="table 'x': 1 cells under 2 headings"):
        Table("x", ["a", "b"], [[1]])
    assert not (tmp_path / "page.html").exists()


def test_text_that_is_no_text_spoils_nothing(tmp_path):
    text, _ = page(tmp_path, [make_run(tmp_path / "a", command="run \udcff")])
    assert "run ?" in text
