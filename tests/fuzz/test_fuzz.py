"""A seeded part of `python -m tests.fuzz`, and a longer one in the slow lane."""

import pytest

from micronorm.cli import report
from tests.fuzz import fuzz, run_case

FEW = {"command-line": 60, "run-directory": 3, "checkpoint": 3, "names": 2, "data-set": 6, "trained-run": 4}


@pytest.mark.parametrize("kind", FEW)
def test_hostile_input_ends_in_one_line(kind):
    done, failures = fuzz(0, count=FEW[kind], kinds=(kind,))
    assert done == FEW[kind]
    assert failures == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_more_hostile_input_ends_in_one_line(kind):
    _, failures = fuzz(1, seconds=9, kinds=(kind,))
    assert failures == []


@pytest.mark.parametrize("error", [AttributeError("a bug"), KeyError("a bug"), ZeroDivisionError("a bug")])
def test_a_bug_of_ours_is_found_and_shows_its_traceback(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(report.records, "find_runs", fail)
    failure = run_case("names", 0, 0)
    assert failure is not None
    assert failure.what.startswith(f"{type(error).__name__} at ")
