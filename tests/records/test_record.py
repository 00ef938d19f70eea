import pytest

from micronorm import records
from micronorm.records import Run, read
from tests.records.rows import FACTS, step_row


def test_what_was_written_is_read(run):
    steps = [step_row(step) for step in (1, 2, 3)]
    epoch = {"epoch": 0, "step": 3, "seconds": 1.5, "train": {"loss": 0.1}, "test": {"error": 3.2}}
    run.append_steps(steps[:2])
    run.append_steps(steps[2:])
    run.append_epoch(epoch)
    run.finish({"steps": 3, "figures": {"error": 3.2}})
    record = read(run.path)
    assert record.facts == {"format": 1, **FACTS} == run.facts
    assert record.steps == steps
    assert record.epochs == [epoch]
    assert record.outcome == {"steps": 3, "figures": {"error": 3.2}}


def test_facts_and_outcome_are_read_without_the_rows(run):
    run.append_steps([step_row(1)])
    run.append_epoch({"epoch": 0, "step": 1})
    run.finish({"steps": 1})
    record = read(run.path, rows=False)
    assert (record.steps, record.epochs) == ([], [])
    assert (record.facts, record.outcome) == (run.facts, {"steps": 1})


def test_a_run_that_has_not_ended_is_read_without_an_outcome(run):
    record = read(run.path)
    assert (record.steps, record.epochs, record.outcome) == ([], [], None)


def test_damaged_facts_and_outcomes_are_named(run):
    run.finish({"steps": 1})
    (run.path / records.OUTCOME).write_bytes(b'{"steps"')
    with pytest.raises(ValueError, match=r"outcome\.json: not JSON"):
        read(run.path)
    (run.path / records.FACTS).write_bytes(b"")
    with pytest.raises(ValueError, match=r"run\.json: not JSON"):
        read(run.path)


def test_a_folder_without_a_run_is_said_to_have_none(tmp_path):
    for open_ in (read, Run.open):
        with pytest.raises(FileNotFoundError, match=r"holds no run: there is no run\.json"):
            open_(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"give the directory of the run, not a file"):
        read(tmp_path / "model.safetensors")
