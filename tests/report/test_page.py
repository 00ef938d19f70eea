import base64
import hashlib
import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

from micronorm.records import STEPS, Run
from micronorm.report import Lead, write_page
from micronorm.report.html import table_html
from micronorm.report.plots import LIGHT, METHOD_COLOURS
from micronorm.report.results import verdict
from micronorm.report.runs import read_runs
from tests.report.build import EVIL, begin, full_run
from tests.report.parsed import page, section, table_rows


def make_run(folder: Path, *, epochs: int = 3, outcome: dict | None = None, **facts) -> Path:
    run = begin(folder, **facts)
    for epoch in range(epochs):
        run.append_steps(
            [{"step": epoch + 1, "epoch": epoch, "loss": 2.0 / (epoch + 1), "samples": 32, "seconds": 0.5}]
        )
        figures = {"error": 12.5 - epoch, "loss": 0.25}
        run.append_epoch({"epoch": epoch, "step": epoch + 1, "train": {"loss": 2.0 / (epoch + 1)}, "test": figures})
    if outcome is not None:
        run.finish(outcome)
    return run.path


def test_results_charts_tables_and_facts_are_on_the_page(tmp_path):
    runs = [
        make_run(tmp_path / "a", name="GN", outcome={"finished": True}),
        make_run(tmp_path / "b", name="BCN+WS", epochs=2, command="micronorm train other", outcome={"finished": False}),
        make_run(tmp_path / "c", name="BN", epochs=1),
    ]
    text, parsed = page(tmp_path, runs, title="The title")
    rows = table_rows(text)
    assert rows["run"] == ["test error", "test loss", "steps", "seconds", "seed", "state"]
    assert rows["GN"] == ["10.5", "0.25", "3", "1.5", "0", "finished"]
    assert rows["BCN+WS"] == ["11.5", "0.25", "2", "1.0", "0", "ended early"]
    assert rows["BN"] == ["12.5", "0.25", "1", "0.5", "0", "not ended"]
    words = " ".join(parsed.text)
    for expected in (
        "The title",
        "Training loss",
        "Test error",
        "micronorm train other",
        "0123abc",
        "a processor",
        "3 runs, data: digits, 2025-01-02",
    ):
        assert expected in words
    # loss and error by epoch, loss and speed by step
    assert parsed.count("figure") == 4
    # in each chart a point for each epoch or step, with its value under the pointer, and a title for each line
    assert parsed.count("use") == 4 * (3 + 2 + 1)
    assert parsed.count("title") == 1 + 4 * (3 + 2 + 1) + 4 * 3
    assert parsed.count("i", "key") == 2 * 3  # the legends of both sections


def test_errors_are_called_errors(tmp_path):
    run = make_run(tmp_path / "a", epochs=0, name="GN")
    Run.open(run).append_epoch({"epoch": 0, "step": 1, "test": {"loss": 0.5, "top1": 12.5, "top5": 1.5}})
    text, parsed = page(tmp_path, [run])
    assert table_rows(text)["run"][:3] == ["test error %", "test loss", "test top-5 error %"]
    assert "Test error %" in parsed.text


def test_points_stand_at_completed_epochs_with_their_values(tmp_path):
    text, _ = page(tmp_path, [make_run(tmp_path / "a", name="GN", epochs=2)])
    found = re.findall(r"<title>(GN, .*?)</title>", section(text, "training"))
    assert found[:4] == ["GN, 1: 2", "GN, 2: 1", "GN, 1: 12.5", "GN, 2: 11.5"]


def test_text_from_runs_is_text_wherever_it_stands(tmp_path):
    run = full_run(tmp_path / "a", name=EVIL, evil=EVIL, recipe=f"{EVIL}/{EVIL}", paper={"top1": 1.0, EVIL: 2.0})
    other = make_run(tmp_path / "b", recipe=EVIL)
    writer = Run.open(run)
    writer.append_epoch({"epoch": 6, "step": 240, "test": {EVIL: 1.0, "top1": 2.0}})
    writer.add_facts(**{EVIL: {EVIL: EVIL}})
    for runs in ([run, other], [run]):
        text, parsed = page(
            tmp_path,
            runs,
            title=EVIL,
            left_out=[EVIL],
        )
        assert_harmless(text, parsed)
        assert "alert(1)" in " ".join(parsed.text)
        assert "absent" not in parsed.sections()
    text, parsed = page(tmp_path, [run, other], lead=Lead(EVIL, EVIL, EVIL, EVIL, EVIL))
    assert_harmless(text, parsed)


def assert_harmless(text: str, parsed) -> None:
    assert parsed.count("script") == text.count("<script") == 0
    assert all(a["src"].startswith("data:image/png;base64,") for tag, a in parsed.tags if tag == "img")
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]


def test_a_run_named_by_the_caller_is_escaped_too(tmp_path):
    text, parsed = page(tmp_path, {EVIL: make_run(tmp_path / "a"), "b": make_run(tmp_path / "b")})
    assert_harmless(text, parsed)
    assert EVIL in "".join(parsed.text)


def test_no_request_leaves_the_page(tmp_path):
    text, parsed = page(tmp_path, [full_run(tmp_path / "a")])
    shown = re.sub(r'(src|href)="data:image/png;base64, ?[A-Za-z0-9+/=\s]*"', "", text)
    shown = re.sub(r"url\(#[\w.-]+\)", "", shown)
    shown = re.sub(r"'sha256-[A-Za-z0-9+/=]*'", "", shown)
    assert not re.search(r"https?:|url\(|@import|//|fetch|XMLHttp|import\(", shown)
    loading = {"href", "srcset", "data", "action", "poster", "xlink:href", "style"}
    assert {tag for tag, attributes in parsed.tags if loading & attributes.keys()} == {"a", "use"}
    links = [attributes["href"] for _, attributes in parsed.tags if "href" in attributes]
    assert all(link.startswith(("#", "data:image/png;")) for link in links)
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"link", "iframe", "object", "embed", "base", "form"})


def test_the_policy_allows_the_one_style_and_no_script(tmp_path):
    text, parsed = page(tmp_path, [full_run(tmp_path / "a")])
    (policy,) = (a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    named = dict(part.split(" ", 1) for part in policy.split("; "))
    (content,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert named == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_ids_are_unique_and_every_reference_has_its_target(tmp_path):
    text, parsed = page(tmp_path, {name: full_run(tmp_path / name, epochs=2) for name in ("a", "b")})
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 20
    wanted = re.findall(r'href="#(.+?)"', text) + re.findall(r"url\(#(.+?)\)", text)
    assert set(wanted) <= set(ids)


def test_the_same_runs_give_the_same_bytes(tmp_path):
    runs = [full_run(tmp_path / "a", epochs=2)]
    assert page(tmp_path, runs)[0] == page(tmp_path, runs)[0]


def test_light_and_dark_and_phones_are_provided_for(tmp_path):
    text, parsed = page(tmp_path, [make_run(tmp_path / "a")])
    assert "@media screen and (prefers-color-scheme: dark)" in text
    assert "@media print" in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [a for _, a in parsed.tags]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one/x", "two/x", "y")]
    text, _ = page(tmp_path, runs)
    assert list(table_rows(text))[1:] == ["digits (x) (1)", "digits (x) (2)", "digits (y)"]


def test_a_lead_shows_one_finding_one_picture_one_number_and_folds_the_rest(tmp_path):
    runs = {"first": make_run(tmp_path / "a"), "second": make_run(tmp_path / "b", epochs=2)}
    lead = Lead("First beats second.", "Test error", "7e-15", "A step changes by this much.", "Twenty steps, twice.")
    text, parsed = page(tmp_path, runs, lead=lead)
    shown = text[text.index('<section id="lead" class="lead">') : text.index("<h2>Details</h2>")]
    words = ("First beats second.", "Test error", "7e-15", "A step changes by this much.", "Twenty steps, twice.")
    assert all(word in shown for word in (*words, ">first<", ">second<", "10.5 %", "11.5 %"))
    assert shown.count("<svg") == 1
    assert shown.index("First beats") < shown.index("<svg") < shown.index("7e-15") < shown.index("Twenty steps")
    folded = [key for key in parsed.sections() if f'<section id="{key}" class="folded">\n<details><summary>' in text]
    assert folded == ["results", "training", "resources", "facts"]  # sections without data are left out


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
    assert parsed.count("use") == 3
    lines = [a["d"] for tag, a in parsed.tags if tag == "path" and a.get("stroke") == "var(--c0)" and "d" in a]
    assert sorted(line.count("M") for line in lines if line.count("L")) == [2]
    assert "1 values that are not finite left out" in text


def test_a_run_without_a_finite_value_has_a_page(tmp_path):
    run = Run.open(make_run(tmp_path / "a", epochs=0))
    run.append_epoch({"epoch": 0, "step": 1, "train": {"loss": math.nan}, "test": {"error": math.nan}})
    text, parsed = page(tmp_path, [run.path])
    assert "No finite values: Training loss, Test error." in parsed.text
    assert "digits: training diverged, the test figure is not finite." in parsed.text
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


def test_small_values_are_not_hidden_by_large_ones():
    numbers = [[1, 123.456, 3e-7], [2, 1.5, 123456.0], [3, None, math.inf]]
    rows = table_rows(table_html(["n", "near", "far"], numbers))
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
    marks = [(float(a["x"]), float(a["y"])) for tag, a in parsed.tags if tag == "use"]
    assert len(marks) == len(values)
    assert all(52 <= x <= 408 and 10 <= y <= 220 for x, y in marks)
    labels = sorted(float(a["y"]) for tag, a in parsed.tags if tag == "text" and a.get("text-anchor") == "end")
    assert 1 <= len(labels) <= 9
    assert all(b - a >= 12 for a, b in pairwise(labels))


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
    assert not (tmp_path / "page.html").exists()


def test_text_that_is_no_text_spoils_nothing(tmp_path):
    text, _ = page(tmp_path, [make_run(tmp_path / "a", command="run \udcff")])
    assert "run ?" in text


def test_every_section_is_there_and_the_page_says_once_how_to_get_those_without_data(tmp_path):
    keys = ["results", "paper", "training", "stat-diff", "shares", "resources", "predictions", "facts"]
    text, parsed = page(tmp_path, [full_run(tmp_path / "full", paper={"top1": 6.31})])
    assert parsed.sections() == keys
    links = [a["href"] for tag, a in parsed.tags if tag == "a"]
    assert links == [f"#{key}" for key in keys]
    text, parsed = page(tmp_path, [begin(tmp_path / "empty").path])
    assert parsed.sections() == ["results", "facts", "absent"]
    lines = re.findall("<li>(.*?): (.*?)</li>", section(text, "absent"))
    ways = {heading: way for headings, way in lines for heading in headings.split(", ")}
    assert len(ways) == len(keys) - 2
    assert "micronorm reproduce" in ways["The paper and our runs"]
    assert "predictions.json" in ways["Sample predictions"]
    assert all("micronorm train" in ways[heading] for heading in ("Training", "Memory and speed"))
    assert section(text, "absent").count("--observe 50") == 1


def test_a_run_of_a_hundred_thousand_steps_has_a_page_under_three_megabytes(tmp_path):
    path = full_run(tmp_path / "long", epochs=8, steps_per_epoch=0, layers=40)
    rows = [
        {"step": k, "epoch": k // 1251, "loss": 2.0 + (k == 54_321) * 7.5, "samples": 64, "seconds": 0.1}
        for k in range(1, 100_001)
    ]
    (path / STEPS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, parsed = page(tmp_path, [path])
    assert len(text.encode()) < 3_000_000
    assert "2.03 (2 to 9.5)" in text  # the one high value among 250 is on the page
    assert {"training", "stat-diff", "shares"} <= set(parsed.sections())


def test_a_page_of_many_runs_shows_less_detail(tmp_path):
    run = Run.open(make_run(tmp_path / "a", epochs=0))
    run.append_steps({"step": k, "loss": 1.0 + k % 7} for k in range(1, 401))
    one, _ = page(tmp_path, [run.path])
    assert "means of up to" not in one
    many, _ = page(tmp_path, [run.path] * 50)
    assert "means of up to 3 points" in many


def test_a_fact_as_long_as_a_book_is_cut(tmp_path):
    text, _ = page(tmp_path, [begin(tmp_path / "a", command="x" * 10_000).path])
    assert "(8,000 more characters)" in text
    assert "x" * 2001 not in text


def test_a_run_has_the_same_colour_in_every_section(tmp_path):
    paths = {name: full_run(tmp_path / name, looks=name != "first") for name in ("first", "second")}
    text, _ = page(tmp_path, paths)
    entries = re.findall(r'<i class="key solid (c\d)"></i>(\w+)</li>', text)
    assert set(entries) == {("c0", "first"), ("c1", "second")}
    assert "var(--c0)" not in section(text, "stat-diff")
    assert "var(--c1)" in section(text, "stat-diff")


def test_the_first_run_of_a_method_has_the_colour_of_the_method_and_no_two_runs_share_one(tmp_path):
    methods = [("BN(eps=1e-05)", None), (None, None), ("GN(groups=32)", "WS(center=True)"), ("FRN()", None)]
    paths = [
        make_run(tmp_path / str(k), definition={"norm": norm, "weight": weight})
        for k, (norm, weight) in enumerate(methods)
    ]
    unknown = [make_run(tmp_path / "own loop"), make_run(tmp_path / "text", definition="BN()")]
    runs = read_runs([*paths, *unknown])
    assert [run.colour for run in runs] == ["c4", "c0", "c2", "c1", "c3", "c5"]
    assert LIGHT["c4"] == METHOD_COLOURS["BN"]
    assert LIGHT["c2"] == METHOD_COLOURS["GN+WS"]
    more = read_runs(paths * 5)
    assert len({(run.colour, run.style) for run in more[:16]}) == 16


def verdict_on(runs) -> str:
    return verdict(read_runs(runs))


@pytest.mark.parametrize(
    "facts, sentence",
    [
        ({}, "6.60 % test error after 120 steps in 2.9 s."),
        ({"paper": {"top1": 6.31}}, "6.60 % test error after 120 steps in 2.9 s; the paper reports 6.31 %."),
        (
            {"paper": {"top1": 6.31}, "definition": {"epochs": 200, "step_batch": 64}},
            "the paper reports 6.31 %, under other conditions: epochs 3 where the recipe has 200.",
        ),
    ],
)
def test_the_verdict_on_one_run_is_its_figure_beside_the_papers(tmp_path, facts, sentence):
    assert verdict_on([full_run(tmp_path / "a", epochs=3, **facts)]).endswith(sentence)


def test_the_verdict_on_several_runs_names_the_best_and_what_is_not_finished(tmp_path):
    paths = {name: full_run(tmp_path / name, level=level, finished=name != "b", recipe=name)
             for name, level in (("a", 2.0), ("b", 1.0), ("c", 3.0))}  # fmt: skip
    lowest = "Lowest test error of 3 runs: b with 3.19 %."
    assert verdict_on(paths) == f"{lowest} One seed each. Not finished: b."
    text, _ = page(tmp_path, [begin(tmp_path / "d").path])
    assert '<p class="verdict">No evaluation yet.</p>' in text


def test_the_verdict_says_where_runs_were_not_trained_for_equally_long(tmp_path):
    runs = {name: full_run(tmp_path / name, epochs=2, steps_per_epoch=steps, level=steps) for name, steps in
            (("d", 2), ("e", 3))}  # fmt: skip
    assert verdict_on(runs).endswith("The runs took 4 to 6 steps.")


def test_figures_that_read_alike_are_equally_good(tmp_path):
    runs = {name: full_run(tmp_path / name, epochs=3) for name in ("a", "b")}
    runs["c"] = full_run(tmp_path / "c", epochs=3, level=2.0)
    assert verdict_on(runs) == "Lowest test error of 3 runs: a and b with 6.60 %."


@pytest.mark.parametrize(
    "figure, sentence",
    [
        ("miou", "Highest test mIoU of 2 runs: a with 40.00 %."),
        ("AP", "Highest test AP of 2 runs: a with 40.00."),
        ("pixel_error", "Lowest test pixel error of 2 runs: b with 30.00 %."),
    ],
)
def test_the_best_run_comes_first_whether_a_low_or_a_high_figure_is_good(tmp_path, figure, sentence):
    runs = {name: begin(tmp_path / name) for name in ("a", "b")}
    for run, value in zip(runs.values(), (40.0, 30.0), strict=True):
        run.append_epoch({"epoch": 0, "step": 4, "test": {figure: value, "loss": 1.0}})
    assert sentence in verdict_on({name: run.path for name, run in runs.items()})


def test_the_recalls_of_coco_are_left_to_the_record(tmp_path):
    run = begin(tmp_path / "a")
    run.append_epoch({"epoch": 0, "step": 4, "test": {"AP": 40.123, "AR1": 50.0, "mask_AP": 30.0, "mask_ARl": 20.0}})
    text, _ = page(tmp_path, [run.path])
    (headings,) = re.findall("<thead>(.*?)</thead>", section(text, "results"))
    assert re.findall(">(test .*?)<", headings) == ["test AP", "test mask AP"]
    assert "40.12" in section(text, "results")


def test_names_break_between_words_on_narrow_screens(tmp_path):
    runs = {"digits/bcn-ws": full_run(tmp_path / "a"), "<b>/c": full_run(tmp_path / "b")}
    text, _ = page(tmp_path, runs)
    assert '<i class="dot c0"></i>digits/<wbr>bcn-<wbr>ws</th>' in section(text, "results")
    assert "&lt;b&gt;/<wbr>c</li>" in section(text, "training")
