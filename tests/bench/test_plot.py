"""The plots: one per group of cases and route, as SVG and PNG."""

from micronorm.bench import plot
from micronorm.bench.cases import CASES
from micronorm.bench.methods import BN, BN_GN, FUSED, GN, ON_GPU
from micronorm.bench.results import compare
from tests.bench.made import result


def test_a_figure_per_group_and_route_as_svg_and_png(tmp_path):
    results = [
        result(method, 1.0 + 0.1 * k, case=case, layout=layout, route=route)
        for case, route in ((CASES["large"][0], "graph"), (CASES["small"][0], "eager"))
        for k, method in enumerate((BN, *FUSED, BN_GN))
        for layout in ("nhwc", "nchw")
    ]
    compare(results)
    written = plot.draw(results, tmp_path / "plots", caption="Some GPU")
    names = ("bench_large_graph", "bench_small_eager")
    assert {path.name for path in written} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    svg = (tmp_path / "plots" / "bench_large_graph.svg").read_text()
    assert "<!-- BCN+ReLU (step) -->" in svg
    assert "<!-- Some GPU -->" in svg


def test_a_table_without_batch_norm_has_no_figure(tmp_path):
    alone = [result(FUSED[0], 1.0), result(GN, 2.0)]
    compare(alone)
    assert plot.draw(alone, tmp_path) == []


def test_no_two_methods_have_the_same_colour_and_hatch():
    styles = plot.bar_styles(ON_GPU)
    assert list(styles) == list(ON_GPU)
    assert len({tuple(style.values()) for style in styles.values()}) == len(ON_GPU)
