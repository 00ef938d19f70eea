"""Charts as elements of a page and as files: whole, harmless, the same each time."""

import re
import struct
import xml.etree.ElementTree as ET

import matplotlib
import pytest

from micronorm.report import write_plots
from micronorm.report.charts import Line, line_chart
from micronorm.report.page import sections_of
from micronorm.report.plots import COLOURS, DARK, LIGHT, METHOD_COLOURS, apply_style, save_figure, subplots, to_svg
from tests.report.build import EVIL, full_run

SMALL = {"epochs": 2, "steps_per_epoch": 3, "layers": 2}


def test_every_chart_of_the_page_is_a_whole_svg_and_a_png(tmp_path):
    runs = [full_run(tmp_path / "a", evil=EVIL, name=EVIL, paper={"top1": 6.3}, **SMALL)]
    files = write_plots(tmp_path / "plots", runs=runs)
    names = [chart.name for section in sections_of(runs) for chart in section.charts]
    assert len(set(names)) == len(names) >= 10
    assert [file.name for file in files] == [f"{name}.{suffix}" for name in names for suffix in ("svg", "png")]
    assert all(re.fullmatch(r"[A-Za-z0-9.-]+", file.name) for file in files)
    for svg, png in zip(files[::2], files[1::2], strict=True):
        root = ET.fromstring(svg.read_bytes())
        assert {element.tag.rpartition("}")[2] for element in root.iter()}.isdisjoint({"script", "a", "foreignObject"})
        data = png.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert width > 700
        assert height > 100


def test_a_file_has_caption_and_legend(tmp_path):
    runs = {name: full_run(tmp_path / name, looks=False, **SMALL) for name in ("first", "second")}
    svg = next(file for file in write_plots(tmp_path / "plots", runs=runs) if file.name == "training-loss.svg")
    texts = set(re.findall("<!-- (.*?) -->", svg.read_text("utf-8")))  # text is drawn as paths, named in comments
    assert {"Training loss", "first", "second", "epoch"} <= texts


def test_a_page_gets_colours_as_variables_and_no_styles_of_the_figure():
    figure, axes = subplots(figsize=(4, 3))
    apply_style(axes).plot([1, 2], [3, 4], color=METHOD_COLOURS["GN"], marker="o", gid="line")
    element = to_svg(figure, name="mine", label="two <points>", hover={"line": ["a <b>", "c"]})
    root = ET.fromstring(element)
    assert (root.tag, root.get("aria-label"), root.get("viewBox")) == ("svg", "two <points>", "0 0 288 216")
    assert "style" not in element
    assert not re.search("#[0-9a-f]{6}", element)
    assert element.count("var(--c1)") >= 2
    assert [title.text for title in root.iter("title")] == ["a <b>", "c"]
    assert all(each.get("id", "mine-").startswith("mine-") for each in root.iter())


@pytest.mark.parametrize("name", ["$a^2$ $", "\x00 \x1b", "\udcff", "層 \U0001f600", EVIL])
def test_a_line_may_have_any_name(name):
    chart = line_chart("x", [Line(name, "c0", [(1, 2.0), (2, 3.0)])], caption=name, x_label=name)
    assert chart is not None
    root = ET.fromstring(chart.svg())
    titles = [title.text or "" for title in root.iter("title")]
    assert titles[0] == (name if name.isprintable() else re.sub(r"[^ ]", "?", name))
    assert len(titles) == 3


def test_files_are_the_same_each_time(tmp_path):
    contents = []
    for place in ("a", "b"):
        figure, axes = subplots(figsize=(4, 3))
        apply_style(axes).plot([1, 2, 3], [3, 1, 2], color=COLOURS[0], marker="o")
        contents.append([file.read_bytes() for file in save_figure(figure, tmp_path / place)])
    assert contents[0] == contents[1]


def test_every_colour_has_one_name_in_both_schemes():
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)
    assert set(METHOD_COLOURS.values()) <= set(COLOURS)


def test_drawing_leaves_the_settings_of_matplotlib_alone():
    before = matplotlib.rcParams.copy()
    figure, _ = subplots(figsize=(1, 1))
    to_svg(figure, name="x")
    assert matplotlib.rcParams.copy() == before
