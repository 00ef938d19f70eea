"""Figures that are drawn from what was recorded."""

import pytest

from micronorm import records
from micronorm.recipes import figures
from micronorm.recipes.figures import recorded
from micronorm.recipes.figures.figure import Request
from tests.recipes.runs import write_run


@pytest.fixture(autouse=True)
def nothing_packaged(monkeypatch):
    monkeypatch.setattr(recorded, "packaged", list)


def measured(name, folder, **options):
    return figures.find(name).run(Request(runs=folder, **options), folder / "figures" / "x.json", command="test")


def test_front_has_the_papers_figures_and_those_of_runs_that_count(tmp_path):
    write_run(tmp_path / "a", "digits/gn", seed=3, figures={"top1": 7.0})
    write_run(tmp_path / "b", "digits/gn-ws", settings={"epochs": 1}, figures={"top1": 1.0})
    panels = {panel["title"]: panel["bars"] for panel in measured("fig:front", tmp_path)["numbers"]["panels"]}
    imagenet = {bar["method"]: (bar["paper"], bar["ours"]) for bar in panels["ImageNet, ResNet-50"]}
    assert imagenet == {"BN": (24.3, None), "GN": (24.81, None), "GN+WS": (23.72, None), "BCN+WS": (23.09, None)}
    digits = {bar["method"]: bar for bar in panels["digits, small ResNet"]}
    assert (digits["GN"]["ours"], digits["GN"]["seeds"], digits["GN"]["paper"]) == (7.0, [3], None)
    assert digits["GN+WS"]["ours"] is None


def test_curves_come_from_run_directories(tmp_path):
    run = records.Run.open(write_run(tmp_path / "a", "digits/gn"))
    for epoch in range(2):
        run.append_epoch({"epoch": epoch, "step": 10 * epoch, "train": {"top1": 50.0 - epoch}, "test": {"top1": 40.0}})
    curves = measured("fig:imagenet", tmp_path)["numbers"]["curves"]
    assert list(curves) == ["GN"]
    assert curves["GN"]["epoch"] == [1, 2]
    assert curves["GN"]["train"] == [50.0, 49.0]
    assert curves["GN"]["test"] == [40.0, 40.0]
    assert curves["GN"]["paper"] is None


def test_rows_without_a_run_that_counts_are_named_with_the_reason(tmp_path):
    write_run(tmp_path / "a", "digits/gn")
    write_run(tmp_path / "b", "digits/gn-ws", finished=False)
    missing = measured("fig:imagenet", tmp_path)["numbers"]["missing"]
    assert missing == {"digits/gn-ws": "not finished", "digits/bcn-ws": "no finished run"}


def test_without_a_run_the_command_that_makes_them_is_told(tmp_path):
    with pytest.raises(ValueError, match="micronorm reproduce digits --rows gn,gn-ws,bcn-ws"):
        measured("fig:imagenet", tmp_path)
