"""Runs killed and runs cut, by the scripts that write results/kills.md and results/cuts.md."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, out: Path) -> tuple[list[dict[str, str]], str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    with out.open(newline="") as file:
        return list(csv.DictReader(file)), out.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("signal, kills", [("KILL", 10), ("TERM", 3)])
def test_killed_runs_end_with_the_digest_of_one_that_nothing_happened_to(tmp_path, signal, kills):
    rows, page = run("kills.py", "--kills", str(kills), "--signal", signal, out=tmp_path / "kills.csv")
    assert [row["run"] for row in rows] == [str(number) for number in range(1, kills + 1)]
    assert all(row["digest"] == row["expected"] for row in rows)
    assert {row["exit_code"] for row in rows} <= (
        {"-9"} if signal == "KILL" else {"-15", "143", "0"}
    )  # 0: it came in the last step
    assert f"| SIG{signal} | 1 | 1 | {kills} of {kills} |" in page


@pytest.mark.slow
def test_killed_runs_go_on_with_other_ranks(tmp_path):
    rows, page = run("kills.py", "--kills", "1", "--rank-changes", out=tmp_path / "kills.csv")
    assert all(float(row["distance"]) <= 1e-10 for row in rows)
    assert len(rows) == 7
    assert page.count("1 of 1, at most") == 7


@pytest.mark.slow
def test_cuts_stay_within_their_limits_and_the_drift_stands_beside_the_control(tmp_path):
    rows, page = run("cuts.py", "--quick", out=tmp_path / "cuts.csv")
    assert {(row["dtype"], row["limit"]) for row in rows} == {
        ("float64", "1e-10"),
        ("float32", "1e-05"),
        ("float32", ""),
    }
    assert all(float(row["distance"]) <= float(row["limit"]) for row in rows if row["limit"])
    assert "one-ulp control" in page
