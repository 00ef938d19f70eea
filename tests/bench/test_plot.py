"""The plots: one per group and route, twice; and what is said without matplotlib."""

import sys

import pytest

from micronorm.bench import plot
from micronorm.bench.cases import CASES
from micronorm.bench.peers import BN, BN_GN, FUSED, GN, ON_GPU
from micronorm.bench.rows import compare
from tests.bench.rows import row


def rows():
    made = []
    for case in (CASES["large"][0], CASES["small"][0]):
        at = [
            row(method, 1.0 + 0.1 * k, case=case, layout=layout, route=route)
            for k, method in enumerate((BN, *FUSED, BN_GN))
            for layout in ("nhwc", "nchw")
            for route in ("graph", "eager")
        ]
        compare(at)
        made += at
    return made


def test_a_figure_per_group_and_route_as_svg_and_png(tmp_path):
    pytest.importorskip("matplotlib")
    written = plot.draw(rows(), tmp_path / "plots", caption="Some GPU")
    names = {f"bench_{group}_{route}" for group in ("large", "small") for route in ("graph", "eager")}
    assert {path.name for path in written} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert all(path.stat().st_size > 1000 for path in written)
    svg = (tmp_path / "plots" / "bench_large_graph.svg").read_text()
    assert svg.count("<!-- target, 0.5 -->") == 1
    assert "<!-- BCN+ReLU (step) -->" in svg
    assert "Some GPU" in svg


def test_a_table_without_batch_norm_has_no_figure(tmp_path):
    pytest.importorskip("matplotlib")
    alone = [row(FUSED[0], 1.0), row(GN, 2.0)]
    compare(alone)
    assert plot.draw(alone, tmp_path) == []


def test_ours_and_peers_never_look_alike():
    made = [row(method, 1.0) for method in ON_GPU]
    labels = [method.label for method in ON_GPU]
    looks = plot._looks(made, labels)
    assert list(looks) == labels
    assert len({tuple(look.values()) for look in looks.values()}) == len(labels)


def test_without_matplotlib_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'micronorm\[plot\]'"):
        plot.load_pyplot()
