"""Runs killed and runs cut, by the scripts that write results/kills.md and results/cuts.md.

The scripts run short here. tests/cli/test_train.py kills and signals runs too; the recorded tables have all cases.
"""

import csv
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(monkeypatch, script: str, *arguments: str, out: Path) -> tuple[list[dict[str, str]], str]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # of the processes that the script starts
    assert importlib.import_module(script).main([*arguments, "--out", str(out)]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file)), out.with_suffix(".md").read_text()


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_happened_also_on_other_ranks(monkeypatch, tmp_path):
    # Seed 3 draws 0.24 and 0.54 of the run: it is still alive then, on a machine of changing speed too.
    rows, page = run(monkeypatch, "kills", "--quick", "--kills", "1", "--seed", "3", out=tmp_path / "kills.csv")
    alone, sharded = rows
    assert (alone["exit_code"], sharded["exit_code"]) == ("-9", "-9")
    assert alone["digest"] == alone["expected"]
    assert float(sharded["distance"]) <= 1e-10
    assert "| SIGKILL | 1 | 1 | 1 of 1 |" in page
    assert "| SIGKILL | 1 | 2 (fsdp) | 1 of 1, at most" in page


@pytest.mark.slow
def test_cuts_stay_within_their_limits_and_the_drift_stands_beside_the_control(monkeypatch, tmp_path):
    rows, page = run(monkeypatch, "cuts", "--quick", out=tmp_path / "cuts.csv")
    assert {(row["dtype"], row["limit"]) for row in rows} == {
        ("float64", "1e-10"),
        ("float32", "1e-05"),
        ("float32", ""),
    }
    assert all(float(row["distance"]) <= float(row["limit"]) for row in rows if row["limit"])
    assert "one-ulp control" in page


def test_a_resumed_run_that_differs_does_not_count_as_good(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    row = {"kind": "KILL 1 ddp > 1 ddp", "distance": "0.5", "steps": "3", "torn": "0", "exit_code": "-9"}
    row |= {"command": "here", "provenance": "now"}
    page = importlib.import_module("kills").page([row | {"good": "True"}, row | {"good": "False"}])
    assert "| SIGKILL | 1 | 1 | 1 of 2 |" in page
