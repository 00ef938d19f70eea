import os

import pytest

from micronorm import records
from micronorm.records import Run, read
from tests.records.rows import FACTS, step_row


def test_rewinding_drops_later_rows_of_both_files_and_the_outcome(run):
    run.append_steps([step_row(step) for step in range(1, 7)])
    for epoch, step in enumerate((2, 4, 6)):
        run.append_epoch({"epoch": epoch, "step": step})
    run.finish({"steps": 6})
    run.rewind(4)
    record = read(run.path)
    assert [row["step"] for row in record.steps] == [1, 2, 3, 4]
    assert [row["step"] for row in record.epochs] == [2, 4]
    assert record.outcome is None
    run.append_steps([step_row(5)])
    assert read(run.path).steps == [step_row(step) for step in range(1, 6)]


def test_rewinding_to_the_start_leaves_no_rows_and_a_run_without_rows_is_rewound(run):
    run.rewind(0)
    run.append_steps([step_row(1)])
    run.rewind(0)
    assert read(run.path).steps == []


def test_a_run_is_not_overwritten(run):
    run.append_steps([step_row(1)])
    run.finish({"steps": 1})
    with pytest.raises(FileExistsError, match="already holds a run"):
        Run.create(run.path, FACTS)
    assert len(read(run.path).steps) == 1


def test_a_run_may_begin_in_a_folder_that_holds_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert read(Run.create(tmp_path, FACTS).path).facts["recipe"] == "digits"


def test_syncing_reaches_every_file_of_rows(run, monkeypatch):
    run.sync()  # none yet
    run.append_steps([step_row(1)])
    run.append_epoch({"step": 1})
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    run.sync()
    assert synced == [(run.path / name).stat().st_ino for name in (records.STEPS, records.EPOCHS)]


@pytest.mark.parametrize("name", ["steps.jsonl", "run.json", "outcome.json"])
def test_a_run_with_a_linked_file_is_not_continued(tmp_path, name):
    """Rows would be appended to a file outside of the run."""
    run = Run.create(tmp_path / "run", FACTS)
    run.append_steps([{"step": 1}])
    run.finish({})
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{name} is a link"):
        Run.open(tmp_path / "run")
    assert (tmp_path / "elsewhere").read_bytes() == before
