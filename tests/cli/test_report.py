import os

import pytest
from typer.testing import CliRunner, Result

from micronorm.cli import app, report
from tests.report.build import begin, full_run

SMALL = {"epochs": 1, "steps_per_epoch": 1, "looks": False}


def invoke(*arguments) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_runs_become_a_page_and_files(tmp_path):
    runs = [full_run(tmp_path / "runs" / name, **SMALL) for name in ("one", "two")]
    result = invoke(*runs, "--out", tmp_path / "page.html", "--plots", tmp_path / "plots")
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'page.html'}: 2 runs" in result.output
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<h1>2 runs</h1>" in page
    assert (tmp_path / "plots" / "training-loss.png").exists()
    assert f"{len(list((tmp_path / 'plots').iterdir()))} files" in result.output


def test_a_folder_stands_for_the_runs_below_it_each_once(tmp_path, monkeypatch):
    first, _ = (full_run(tmp_path / "runs" / name, **SMALL) for name in ("one", "two"))
    monkeypatch.chdir(tmp_path)
    result = invoke("runs", first)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("report.html: 2 runs")


def test_a_single_run_gives_the_page_its_name_unless_another_is_given(tmp_path):
    path = full_run(tmp_path / "<b>run", **SMALL)
    assert invoke(path, "--out", tmp_path / "a.html").exit_code == 0
    assert "<h1>&lt;b&gt;run</h1>" in (tmp_path / "a.html").read_text("utf-8")
    assert invoke(path, "--out", tmp_path / "b.html", "--title", "Mine").exit_code == 0
    assert "<h1>Mine</h1>" in (tmp_path / "b.html").read_text("utf-8")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: folder, "holds no run: there is no run.json in it or below"),
        (lambda folder: folder / "nowhere", "no folder"),
        (lambda folder: damaged(folder), "not JSON"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, damage, message):
    result = invoke(damage(tmp_path), "--out", tmp_path / "page.html")
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def damaged(folder):
    run = begin(folder / "run")
    (run.path / "epochs.jsonl").write_text("{\n")
    return run.path


def test_of_several_runs_a_damaged_one_is_left_out_and_named(tmp_path):
    full_run(tmp_path / "runs" / "good", **SMALL)
    damaged(tmp_path / "runs" / "bad")
    wrong = begin(tmp_path / "runs" / "wrong").path
    (wrong / "diagnostics.jsonl").write_text('{"step": 1, "layers": 7}\n')
    result = invoke(tmp_path / "runs", "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'page.html'}: 1 run," in result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith("micronorm report: left out: ")
    assert "epochs.jsonl, line 1: not JSON" in first
    assert "diagnostics.jsonl, line 1: layers must be an object" in second
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count('<p class="about">Left out: ') == 2
    assert "layers must be an object" in page


def test_several_runs_that_are_all_damaged_make_no_page(tmp_path):
    for name in ("one", "two"):
        damaged(tmp_path / name)
    result = invoke(tmp_path, "--out", tmp_path / "page.html")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 2)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--out", "folder"], "report: folder: Is a directory"),
        (["--out", f"new/{'n' * 300}.html"], ".html: File name too long"),
        (["--out", "file/page.html"], "report: file: File exists"),
        (["--plots", "file"], "report: file: File exists"),
        (["--plots", "file/plots"], "report: file/plots: Not a directory"),
    ],
)
def test_a_path_that_cannot_be_written_ends_in_one_line_that_names_it(tmp_path, monkeypatch, options, reason):
    run = full_run(tmp_path / "run", **SMALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    result = invoke(run, *options)
    assert result.exit_code in (1, 2), result.output
    (line,) = result.stderr.splitlines()
    assert reason in line
    assert ".partial" not in line
    assert [path for path in tmp_path.rglob("*") if ".partial" in path.name] == []


def test_a_pipe_in_place_of_the_record_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.json")
    result = invoke(tmp_path, "--out", tmp_path / "page.html")
    assert result.exit_code == 2
    assert result.stderr == f"micronorm report: {tmp_path / 'run' / 'run.json'} is not a regular file\n"


def test_the_page_is_opened_only_when_asked(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(report.webbrowser, "open", opened.append)
    path = full_run(tmp_path / "a", **SMALL)
    assert invoke(path, "--out", tmp_path / "page.html").exit_code == 0
    assert opened == []
    assert invoke(path, "--out", tmp_path / "page.html", "--open").exit_code == 0
    assert opened == [(tmp_path / "page.html").as_uri()]
