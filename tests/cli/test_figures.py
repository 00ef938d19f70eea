"""`micronorm reproduce fig:…`: what is listed, printed, measured and drawn, and what the exit code says."""

import json

import pytest
from typer.testing import CliRunner

from micronorm.cli import app, reproduce
from micronorm.recipes import figures
from tests.recipes.runs import write_run


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "RECORDED", tmp_path / "recorded")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing replaced by nothing, where a test is about numbers."""
    monkeypatch.setattr(figures.Figure, "save", lambda *args: [])


def run(*arguments: str):
    return CliRunner().invoke(app, ["reproduce", *arguments])


def test_tables_and_figures_are_listed_together():
    assert " fig:stat_diff " in run().output
    listed = json.loads(run("--json").stdout)
    assert [row["figure"] for row in listed if "figure" in row] == list(figures.FIGURES)
    assert listed[0]["table"] == "abl"


@pytest.mark.usefixtures("undrawn")
def test_json_is_null_until_the_figure_is_measured_and_then_its_data_file():
    result = run("fig:dist_exp", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, None)
    measured = run("fig:dist_exp")
    assert measured.exit_code == 0, measured.output
    found = json.loads(run("fig:dist_exp", "--json").stdout)
    assert found["figure"] == "fig:dist_exp"
    assert found["command"] == "micronorm reproduce fig:dist_exp"
    assert len(found["numbers"]["examples"]) == 3


@pytest.mark.usefixtures("undrawn")
def test_what_is_measured_is_not_measured_again(monkeypatch):
    run("fig:dist_exp")
    monkeypatch.setattr(figures.Figure, "run", lambda *a, **k: pytest.fail("measured again"))
    result = run("fig:dist_exp")
    assert result.exit_code == 0, result.output
    assert "Numbers: runs/figures/dist_exp.json" in result.output


def test_a_drawing_needs_no_numbers(tmp_path):
    result = run("fig:ws_eqn")
    assert result.exit_code == 0, result.output
    assert json.loads(run("fig:ws_eqn", "--json").stdout) is None
    assert sorted(path.name for path in (tmp_path / "runs" / "figures").iterdir()) == ["ws_eqn.png", "ws_eqn.svg"]


@pytest.mark.usefixtures("undrawn")
def test_recorded_numbers_are_found_where_the_folder_of_runs_has_none(tmp_path):
    run("fig:front", "--runs", "elsewhere")
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    (tmp_path / "elsewhere" / "figures" / "front.json").rename(recorded / "front.json")
    assert json.loads(run("fig:front", "--json").stdout)["figure"] == "fig:front"


def test_a_measurement_that_is_stopped_says_how_to_go_on(monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(figures.Figure, "run", stop)
    result = run("fig:dist", "--epochs", "1")
    assert result.exit_code == 130
    assert "fig:dist was stopped; run the same command to continue." in result.output


@pytest.mark.usefixtures("undrawn")
def test_records_that_are_there_are_looked_up_anew(monkeypatch, tmp_path):
    monkeypatch.setattr("micronorm.recipes.figures.recorded.packaged", list)
    write_run(tmp_path / "runs" / "a", "digits/gn", figures={"top1": 7.0})
    run("fig:front")
    write_run(tmp_path / "runs" / "b", "digits/bn-64", figures={"top1": 6.0})
    run("fig:front")
    panels = json.loads(run("fig:front", "--json").stdout)["numbers"]["panels"]
    assert [bar["ours"] for bar in panels[-1]["bars"]] == [6.0, 7.0, None, None]


@pytest.mark.usefixtures("undrawn")
def test_a_row_that_is_not_finished_is_said_to_be_missing(tmp_path):
    write_run(tmp_path / "own" / "a", "digits/gn")
    write_run(tmp_path / "own" / "b", "digits/gn-ws")
    write_run(tmp_path / "own" / "c", "digits/bcn-ws", finished=False)
    result = run("fig:imagenet", "--runs", "own")
    assert result.exit_code == 0, result.output
    said = [line for line in result.output.splitlines() if line.startswith("Missing")]
    assert said == ["Missing: digits/bcn-ws (not finished); drawn without it."]


def test_the_name_of_the_command_is_kept_without_the_folders_it_used(tmp_path):
    request = figures.Request(dataset="cifar10", epochs=3, data=tmp_path, runs=tmp_path)
    assert reproduce._command("fig:dist", request) == "micronorm reproduce fig:dist --dataset cifar10 --epochs 3"
