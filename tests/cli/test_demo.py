import errno
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import micronorm
from micronorm import records
from micronorm.cli import app, bench, check, demo, diagnose, doctor, fold, plan, predict, report, reproduce, train
from micronorm.cli.demo import RECIPES, make_room
from micronorm.engine import Listener
from tests.cli.few import TEST_IMAGES, keep_few_digits

NAMES = [
    "BatchNorm, 64 at a time",
    "BatchNorm, 1 at a time",
    "GroupNorm, 1 at a time",
    "GroupNorm + WS, 1 at a time",
    "BCN + WS, 1 at a time",
]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def rows(output: str) -> dict[str, list[str]]:
    """Return the cells of the printed table by the name in the first column."""
    lines = iter(output.splitlines())
    next(line for line in lines if "──" in line)
    found = {}
    for line in lines:
        if not line.strip():
            break
        first, *rest = re.split(r"\s{2,}", line.strip())
        found[first] = rest
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> tuple[str, Path]:
    """The output of a quick demo away from a terminal, and its folder."""
    out = tmp_path_factory.mktemp("demo") / "runs"
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_few_digits(monkeypatch)
        result = invoke("demo", "--epochs", "2", "--seed", "7", "--out", str(out))
    assert result.exit_code == 0, result.output
    return result.output, out


@pytest.fixture
def quick(monkeypatch) -> None:
    """Train on few digits, and do not measure what a split changes."""
    keep_few_digits(monkeypatch)
    monkeypatch.setattr(demo, "split_difference", lambda *args, **options: 0.0)


def errors_by_run(output: str) -> dict[str, str]:
    return dict(re.findall(r"^(.+): ([\d.]+) % test error", output, re.MULTILINE))


def test_the_table_has_a_row_per_method_with_the_figures_of_its_record(shown):
    output, out = shown
    table = rows(output)
    assert list(table) == NAMES
    for recipe, (loss, error, seconds) in zip(RECIPES, table.values(), strict=True):
        record = records.read(out / recipe.row)
        assert record.facts["recipe"] == recipe.name
        assert record.outcome is not None
        assert record.outcome["steps"] == 4
        assert error == f"{record.outcome['figures']['top1']:.2f}"
        assert loss == f"{record.epochs[-1]['train']['loss']:.4f}"
        assert seconds == f"{sum(row['seconds'] for row in record.steps):.1f}"


def test_without_a_terminal_there_are_plain_lines_only(shown):
    output, _ = shown
    assert "\x1b" not in output
    assert list(errors_by_run(output)) == NAMES


def test_at_most_twelve_lines_follow_the_table_and_the_findings_come_first(quick, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "Console", partial(Console, force_terminal=True, force_interactive=False, width=80))
    result = invoke("demo", "--epochs", "1")
    assert result.exit_code == 0, result.output
    printed = result.output.splitlines()
    table_end = max(k for k, line in enumerate(printed) if line.startswith(f"  {NAMES[-1]}  "))
    lines = printed[table_end + 2 :]
    assert len(lines) <= 12
    assert (
        "Trained one image at a time, BatchNorm gets " in lines[0]
    )  # after the sequences that hide and show the cursor
    assert lines[-1] == "Results with curves: runs/demo/report.html"


def test_the_methods_are_trained_as_micronorm_train_would(shown, tmp_path, monkeypatch):
    keep_few_digits(monkeypatch)
    result = invoke("train", "digits", "--epochs", "2", "--seed", "7", "--out", str(tmp_path / "one"))
    assert result.exit_code == 0, result.output
    digests = [records.read(folder).outcome for folder in (tmp_path / "one", shown[1] / "bcn-ws")]
    assert digests[0] == digests[1] is not None


def test_the_findings_say_what_a_split_changes(shown):
    kept = re.search(r"With BCN \+ WS the weights after 20 steps agree to (\d+) digits, whether ", shown[0])
    broken = re.search(r"With BatchNorm the same split changes weights or running statistics by (\d+) %\.", shown[0])
    assert kept is not None
    assert broken is not None
    assert int(kept[1]) >= 10  # the tolerance of fifty steps in float64
    assert int(broken[1]) > 10


def test_the_page_contains_the_printed_findings(shown):
    output, out = shown
    *_, first, second, third, blank, how, measure, last = output.splitlines()
    assert last == f"Results with curves: {out / 'report.html'}"
    assert not blank
    page = unescape((out / "report.html").read_text("utf-8"))
    for text in (*NAMES, first, second, third, how, measure):
        assert text in page
    assert page.count("<svg") > 2  # curves


def test_the_findings_count_the_wrong_images(shown):
    errors = errors_by_run(shown[0])
    found = re.search(
        rf"BatchNorm gets (\d+) of {TEST_IMAGES} test images wrong and BCN \+ WS gets (\d+), .* \((\d+)\)\.", shown[0]
    )
    assert found is not None
    assert [f"{100 * int(count) / TEST_IMAGES:.2f}" for count in found.groups()] == [
        errors[name] for name in (NAMES[1], NAMES[-1], NAMES[0])
    ]


@pytest.mark.slow
def test_a_demo_replaces_an_older_one_and_gives_the_same_figures_again(quick, tmp_path):
    out = tmp_path / "again"
    first = invoke("demo", "--epochs", "1", "--seed", "7", "--out", str(out))
    (out / "mine.txt").write_text("kept")
    before = (out / "gn" / "model.safetensors").stat().st_mtime_ns
    second = invoke("demo", "--epochs", "1", "--seed", "7", "--out", str(out))
    assert first.exit_code == second.exit_code == 0, second.output
    assert errors_by_run(second.output) == errors_by_run(first.output)
    assert len(records.read(out / "gn").epochs) == 1
    assert (out / "gn" / "model.safetensors").stat().st_mtime_ns > before
    assert (out / "mine.txt").read_text() == "kept"


def place(folder: Path, *, command: str = "micronorm demo --epochs 1", damaged: bool = False) -> None:
    """A run directory."""
    facts = {"recipe": "digits/gn", "settings": {}, "execution": {}, "data": {}, "environment": {}}
    records.Run.create(folder, {**facts, "revision": None, "command": command, "date": "2025-01-01"})
    if damaged:
        (folder / records.FACTS).write_text("{")


@pytest.mark.parametrize("what", ["own run", "damaged", "file", "link", "other folder", "page"])
def test_what_no_demo_has_made_is_not_removed(what, tmp_path):
    out, elsewhere = tmp_path / "demo", tmp_path / "elsewhere"
    place(out / "bn")
    target = out / ("report.html" if what == "page" else "gn")
    if what == "own run":
        place(target, command="micronorm train digits/gn --out runs/demo/gn")
    elif what == "damaged":
        place(target, damaged=True)
    elif what == "link":
        place(elsewhere)
        target.symlink_to(elsewhere)
    elif what == "other folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target.write_text("mine")
    result = invoke("demo", "--out", str(out))
    assert result.exit_code == 2
    assert f"{target} was not made by a demo and would be lost; name another folder with --out" in result.output
    assert target.exists()
    assert (out / "bn" / records.FACTS).exists()  # everything is checked before anything is removed


def test_room_is_made_by_removing_what_demos_have_made(tmp_path):
    place(tmp_path / "gn")
    place(tmp_path / "another")
    (tmp_path / "bn").mkdir()  # a demo was killed before it wrote anything
    (tmp_path / "report.html").write_text("<footer>Made by micronorm from the records of 5 runs.</footer>")
    make_room(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["another"]
    make_room(tmp_path / "not there yet")


def test_an_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    result = invoke("demo", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "is a file; name a folder with --out" in result.output


def test_a_place_that_cannot_be_written_to_is_refused_with_one_sentence(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path / "demo"))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    result = CliRunner().invoke(app, ["demo", "--epochs", "1", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 2
    assert result.stderr == f"micronorm demo: {tmp_path / 'demo'}: Permission denied\n"


def test_a_full_disk_ends_the_demo_with_the_file_and_the_space_it_needed(monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("micronorm.records.files.os.fsync", full)
    result = invoke("demo", "--epochs", "1", "--out", str(tmp_path))
    assert result.exit_code == 1
    file = re.escape(str(tmp_path / "bn-64" / "run.json"))
    assert re.fullmatch(
        rf"micronorm demo: {file}: No space left on device \([\d,]+ bytes needed, [\d,]+ free\); .*\n", result.stderr
    )


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_within_a_run_leaves_what_has_finished(quick, monkeypatch, tmp_path, number, code):
    class Press(Listener):
        def on_start(self, total_steps, start_step, description):
            self.description = description

        def on_step(self, row):
            if self.description == "digits/gn-ws" and row["step"] == 1:
                signal.raise_signal(number)

    monkeypatch.setattr(demo, "Listener", Press)
    result = invoke("demo", "--epochs", "2", "--out", str(tmp_path))
    assert result.exit_code == code
    assert list(errors_by_run(result.output)) == NAMES[:3]
    assert result.output.splitlines()[-1] == (
        f"Interrupted: 3 of 5 methods had finished. Records are in {tmp_path}; the next demo replaces them."
    )
    assert not (tmp_path / "report.html").exists()
    make_room(tmp_path)  # the run that was cut short is a demo's too
    assert not list(tmp_path.iterdir())


def test_ctrl_c_between_runs_is_an_interruption_too(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "make_room", lambda out: signal.raise_signal(signal.SIGINT))
    result = invoke("demo", "--out", str(tmp_path / "demo"))
    assert result.exit_code == 130
    assert result.output.startswith("Interrupted: 0 of 5 methods had finished.")
    assert not (tmp_path / "demo").exists()


def test_a_terminal_gets_live_progress_and_no_lines_of_finished_runs(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "Console", partial(Console, force_terminal=True, force_interactive=True, width=120))
    result = invoke("demo", "--epochs", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "━" in result.output
    assert all(result.output.count(name) > 1 for name in NAMES)  # while it trains, and in the table
    assert errors_by_run(result.output) == {}
    assert "\x1b[?25h" in result.output  # the cursor is back


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output == f"micronorm {micronorm.__version__}\n"


def test_help_lists_the_commands_that_exist():
    rooms = (demo, train, reproduce, check, diagnose, plan, predict, fold, bench, report, doctor)
    expected = [getattr(room, room.__name__.rpartition(".")[2]) for room in rooms]
    assert [command.callback for command in app.registered_commands] == expected
    result = invoke("--help")
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "--version" in result.output


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["demo", "--epochs", "0"], "--epochs"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--speed", "3"], "--speed"),
        (["demonstrate"], "demonstrate"),
    ],
)
def test_a_bad_option_is_named_and_nothing_runs(arguments, named):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert "Training" not in result.output


def test_importing_the_command_line_loads_nothing_heavy():
    tell = "import json, sys, micronorm.cli; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    heavy = ("sklearn", "scipy", "triton", "torchvision", "timm", "torch._dynamo")
    assert [name for name in loaded if name.startswith(heavy)] == []


def test_help_fills_the_lines_of_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text, _, _ = invoke("train", "--help").output.partition("Arguments")
    paragraph = text[text.index("The first group") : text.index("Exit code")].strip().splitlines()
    assert all(len(line.strip()) > 60 for line in paragraph[:-1])
