"""From recorded numbers to pictures, and what the numbers in the repository say."""

import pytest

from micronorm.recipes import figures
from micronorm.recipes.figures import dist
from micronorm.recipes.figures.figure import Request
from micronorm.recipes.figures.figure import read as read_numbers
from micronorm.recipes.figures.methods import mean_over_seeds

recorded = pytest.mark.skipif(not figures.RECORDED.is_dir(), reason="a source without results/")


def read(name) -> dict:
    figure = figures.find(name)
    return read_numbers(figures.RECORDED / f"{figure.stem(Request())}.json", figure.settings(Request())) or {}


@recorded
@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_is_drawn_from_its_recorded_numbers(name):
    figure = figures.find(name)
    found = read(name)
    if figure.measure is not None:
        assert found["figure"] == name  # or its settings have changed since it was measured
    figure.draw(found).draw_without_rendering()


def test_a_figure_is_saved_as_svg_and_png(tmp_path):
    written = figures.find("fig:all").save({}, tmp_path / "out", "x")
    assert [path.name for path in written] == ["x.svg", "x.png"]
    assert all(path.stat().st_size > 5000 for path in written)


def test_a_cell_below_70_is_a_cross_and_any_other_a_circle():
    cells = [
        {"sigma_mean": float(m), "sigma_std": 0.0, "seed": seed, "accuracy": accuracy}
        for m, pair in enumerate([(99.0, 97.0), (60.0, 79.8), (60.0, 80.0)])
        for seed, accuracy in enumerate(pair)
    ]
    settings = {"dataset": "digits", "seeds": 2, "training": {"epochs": 1}}
    drawn = dist.draw({"numbers": {"cells": cells}, "settings": settings})
    marks = [c for c in drawn.axes[0].collections if len(c.get_offsets())]
    circles = [c for c in marks if c.get_linewidths()[0] == 0]
    crosses = [c for c in marks if c not in circles]
    assert [c.get_offsets()[0].tolist() for c in circles] == [[0, 0], [2, 0]]
    assert [c.get_offsets()[0].tolist() for c in crosses] == [[1, 0]]
    assert circles[0].get_sizes()[0] > circles[1].get_sizes()[0]


@recorded
@pytest.mark.parametrize("norm", ["GN", "LN"])
def test_ws_pulls_stat_diff_toward_zero_in_the_recorded_numbers(norm):
    methods = read("fig:stat_diff")["numbers"]["methods"]
    for plain, standardized in zip(methods[norm], methods[f"{norm}+WS"], strict=True):  # seed by seed
        assert all(ws["mean"] < row["mean"] for row, ws in zip(plain, standardized, strict=True))


@recorded
def test_accuracy_falls_with_the_distance_to_bn_in_the_recorded_numbers():
    accuracy = dist.mean_accuracies(read("fig:dist")["numbers"])
    near = [value for (m, s), value in accuracy.items() if m <= 2 and s <= 0.6]
    far = [value for (m, s), value in accuracy.items() if m >= 5 or s >= 1.8]
    assert min(near) > dist.FAILED
    assert max(far) < min(near)


@recorded
def test_scaling_takes_less_than_centering_in_the_recorded_numbers():
    both = read("fig:mean_div")["numbers"]["methods"]["GN + both"]
    along, mean = (mean_over_seeds(both, "shares", part) for part in ("along", "mean"))
    assert all(a < m for a, m in zip(along, mean, strict=True))
