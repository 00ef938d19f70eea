"""`micronorm reproduce` with real training behind it: what it runs, keeps and shows of the digits."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from micronorm import records
from micronorm.cli import app, reproduce, row_queue
from micronorm.recipes.digits import EPOCHS


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch, tmp_path):
    """An empty package and an empty folder, so that the tests do not depend on what has been measured since."""
    monkeypatch.setattr(reproduce, "packaged", list)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", "digits", "--rows", "gn", "--runs", "kept", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def row() -> dict:
    (found,) = json.loads(run("--json"))
    return found


def test_a_short_run_is_recorded_and_is_not_ours():
    run("--epochs", "1")
    place = Path("kept/digits/gn/seed-0-epochs-1")
    record = records.read(place)
    assert record.facts["recipe"] == "digits/gn"
    assert record.facts["settings"]["epochs"] == 1
    assert record.facts["command"] == f"micronorm train digits/gn --seed 0 --out {place} --epochs 1"
    assert record.outcome is not None
    assert record.outcome["finished"] is True
    found = row()
    assert (found["ours"], found["seeds"], found["run"]) == (None, [], None)
    assert found["reason"] == f"{place} does not count: epochs 1 where the recipe has {EPOCHS}"


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_and_a_whole_one_is_ours_and_not_run_again(monkeypatch):
    place = Path("kept/digits/gn/seed-2")
    whole = "train digits/gn --seed 2 --steps 5 --device cpu --out"
    stopped = CliRunner().invoke(app, [*whole.split(), str(place)])
    assert stopped.exit_code == 0, stopped.output
    assert row()["reason"] == f"{place} does not count: not finished"

    shown = run("--seed", "2")
    record = records.read(place)
    assert record.outcome is not None
    steps = [step["step"] for step in record.steps]
    assert steps == list(range(1, len(steps) + 1))
    found = row()
    assert found["ours"] == record.outcome["figures"]
    assert math.isfinite(found["ours"]["loss"])
    assert 0 <= found["ours"]["top1"] < 50  # chance is 90
    assert (found["seeds"], found["run"]) == ([2], [str(place)])
    assert "reason" not in found
    assert f"{found['ours']['top1']:.2f}" in shown

    monkeypatch.setattr(row_queue, "run_recipe", lambda *args, **options: pytest.fail("it was run again"))
    assert "To run" not in run()
