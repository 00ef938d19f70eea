import importlib
import re
import struct
import xml.etree.ElementTree as ET

import pytest

from micronorm.report import write_plots
from micronorm.report.page import plots_of
from tests.report.build import EVIL, full_run

SMALL = {"epochs": 2, "steps_per_epoch": 3, "layers": 2}
SVG = "{http://www.w3.org/2000/svg}"


def test_every_plot_of_the_page_is_a_whole_svg_and_a_png(tmp_path):
    runs = [full_run(tmp_path / "a", evil=EVIL, name=EVIL, paper={"top1": 6.3}, **SMALL)]
    files = write_plots(tmp_path / "plots", runs=runs)
    names = [plot.name for plot in plots_of(runs)]
    assert len(set(names)) == len(names) >= 10
    assert [file.name for file in files] == [f"{name}.{suffix}" for name in names for suffix in ("svg", "png")]
    assert all(re.fullmatch(r"[A-Za-z0-9.-]+", file.name) for file in files)
    for svg, png in zip(files[::2], files[1::2], strict=True):
        root = ET.fromstring(svg.read_bytes())
        assert root.tag == f"{SVG}svg"
        assert {element.tag for element in root.iter()} <= {f"{SVG}{tag}" for tag in _ELEMENTS}
        data = png.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert (width, height) == (3 * float(root.get("width")), pytest.approx(3 * float(root.get("height")), abs=2))


_ELEMENTS = ("svg", "style", "path", "circle", "text", "title")


def test_a_file_shows_what_the_page_shows_with_caption_and_legend(tmp_path):
    runs = {name: full_run(tmp_path / name, looks=False, **SMALL) for name in ("first", "second")}
    svg = next(file for file in write_plots(tmp_path / "plots", runs=runs) if file.name == "training-loss.svg")
    root = ET.fromstring(svg.read_bytes())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"Training loss", "first", "second", "epoch"} <= set(texts)
    drawing = next(plot.drawing for plot in plots_of(runs) if plot.name == "training-loss")
    lines = [e for e in root.iter(f"{SVG}path") if e.get("class") == "line c0"]
    on_page = next(item for item in drawing.items if item.role == "line")
    assert len(lines[0].get("d", "").split()) == 2 * len(on_page.pieces[0])


def test_without_matplotlib_the_svg_files_are_written_and_what_the_others_need_is_said(tmp_path, monkeypatch):
    def refuse(name: str):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    run = full_run(tmp_path / "a", **SMALL)
    with pytest.raises(ImportError, match=r"plots as SVG; plots as PNG need .* pip install 'micronorm"):
        write_plots(tmp_path / "plots", runs=[run])
    written = sorted(file.name for file in (tmp_path / "plots").iterdir())
    assert written == sorted(f"{plot.name}.svg" for plot in plots_of([run]))
