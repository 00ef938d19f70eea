"""Errors of commands: which end in a line, with which exit code, and which show a traceback."""

import errno
import json
import os

import pytest
from typer.testing import CliRunner, Result

from micronorm.cli import app, report
from micronorm.cli.printing import LONGEST, TargetError, one_line
from micronorm.records.files import parse


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Result:
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(report, "_find", fail)
    return CliRunner().invoke(app, ["report", "runs"])


@pytest.mark.parametrize(
    "error, code, line",
    [
        (TargetError("no\nmodel \x1b[31m"), 2, "no model [31m"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "place"), 2, "place: Permission denied"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "place"), 1, "place: Read-only file system"),
        (OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "n/" * 3000), 1, "File name too long"),
        (MemoryError(), 1, "MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "can't allocate memory"),
    ],
)
def test_an_error_of_the_user_or_the_machine_ends_in_one_line(monkeypatch, error, code, line):
    result = fail_with(monkeypatch, error)
    assert result.exit_code == code
    assert result.stderr.startswith("micronorm report: ")
    assert result.stderr.endswith(f"{line}\n")
    assert len(result.stderr) < LONGEST + 50
    assert len(result.stderr.splitlines()) == 1


def test_a_message_of_our_own_checks_ends_in_one_line(monkeypatch):
    monkeypatch.setattr(report, "_find", lambda places: parse(b"{", "run.json"))
    result = CliRunner().invoke(app, ["report", "runs"])
    assert result.exit_code == 2
    assert result.stderr.startswith("micronorm report: run.json: not JSON ")


@pytest.mark.parametrize("error", [AttributeError("x"), AssertionError("x"), KeyError("x"), RuntimeError("x")])
def test_a_bug_of_ours_shows_its_traceback(monkeypatch, error):
    assert fail_with(monkeypatch, error).exception is error


def test_a_value_error_that_another_library_raises_is_a_bug_of_ours(monkeypatch):
    monkeypatch.setattr(report, "_find", lambda places: json.loads("{"))
    assert isinstance(CliRunner().invoke(app, ["report", "runs"]).exception, json.JSONDecodeError)


def test_the_reader_of_a_pipe_may_leave(monkeypatch):
    result = fail_with(monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert result.stderr == ""


def test_a_long_message_keeps_its_two_ends():
    text = one_line(ValueError("begin" + "x" * 5000 + "end"))
    assert len(text) < LONGEST + 5
    assert text.startswith("begin")
    assert text.endswith("end")


OWN = """
from dataclasses import dataclass
from torch import nn
import micronorm as mn

class Fails(nn.Module):
    def __init__(self, num_channels):
        raise KeyError(num_channels)

@dataclass(frozen=True)
class Failing(mn.NormSpec):
    layer = Fails

@dataclass(frozen=True)
class Nothing(mn.NormSpec):
    def __call__(self, num_channels, *, dims=2):
        return None

def make():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
"""


@pytest.mark.parametrize(
    "norm, reason", [("Failing", "fails (KeyError: 1)"), ("Nothing", "must build an nn.Module, got NoneType")]
)
def test_a_norm_of_the_users_own_that_fails_ends_in_one_line(tmp_path, norm, reason):
    (tmp_path / "own_norms.py").write_text(OWN)
    file = tmp_path / "own_norms.py"
    result = CliRunner().invoke(app, ["plan", f"{file}:make", "--norm", f"{file}:{norm}"])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert result.stderr == f"micronorm plan: {file}:{norm} {reason}\n"


def test_a_pipe_as_the_table_of_a_benchmark_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "pipe")])
    assert result.exit_code == 2
    assert result.stderr == f"micronorm bench: --out must be a file, {tmp_path / 'pipe'} is a pipe\n"
