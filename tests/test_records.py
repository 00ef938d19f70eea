import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from micronorm import records
from micronorm.records import Run, find_runs, read, remove_partials, write_atomically

FACTS = {
    "recipe": "digits",
    "settings": {"epochs": 2, "step_batch": 32, "seed": 0, "dtype": "float32"},
    "execution": {"micro_batch": None},
    "data": {"name": "digits", "train": 1297, "test": 500},
    "environment": {"python": "3.11"},
    "revision": None,
    "command": "micronorm train digits",
    "date": "2025-01-01T00:00:00+00:00",
}


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", FACTS)


def step_row(step: int) -> dict:
    return {"step": step, "epoch": 0, "loss": 1 / step, "lr": 0.1, "memory": None}


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


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, 2**0.5, math.inf, -math.inf])
def test_a_float_is_read_back_as_it_was(run, value):
    run.append_steps([{"step": 1, "loss": value}])
    found = read(run.path).steps[0]["loss"]
    assert type(found) is float
    assert found.hex() == value.hex()


def test_not_a_number_survives_in_rows_facts_and_outcome_as_valid_json(run):
    run.append_steps([{"step": 1, "deep": [{"loss": math.nan}]}])
    run.add_facts(worst=math.nan)
    run.finish({"loss": math.nan})
    record = read(run.path)
    assert math.isnan(record.steps[0]["deep"][0]["loss"])
    assert math.isnan(record.facts["worst"])
    assert record.outcome is not None
    assert math.isnan(record.outcome["loss"])

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    for file in run.path.iterdir():
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=refuse)


def test_text_of_any_kind_survives_and_stays_on_its_line(run):
    text = "line\nline\r\u2028\x00 ×σ² \udcff \U0001f40d"
    run.append_steps([{"step": 1, "note": text}, {"step": 2, "note": text}])
    assert [row["note"] for row in read(run.path).steps] == [text, text]


@pytest.mark.parametrize(
    "value, error, message",
    [
        (Path("weights"), TypeError, r"row\['loss'\]: a PosixPath is no JSON value"),
        ([{1: 2}], TypeError, r"row\['loss'\]\[0\]: keys must be str, got 1"),
        ({"float": "nan"}, ValueError, "would be read back as a float"),
    ],
)
def test_a_value_that_would_not_survive_is_refused_and_nothing_is_written(run, value, error, message):
    with pytest.raises(error, match=message):
        run.append_steps([step_row(1), {"step": 2, "loss": value}])
    assert read(run.path).steps == []


def test_a_mapping_that_only_resembles_a_coded_float_is_kept(run):
    rows = [{"step": 1, "a": {"float": "nano"}, "b": {"float": ["nan"]}, "c": {"float": "nan", "more": 1}}]
    run.append_steps(rows)
    assert read(run.path).steps == rows


def append(run: Run, name: str, rows: list[dict]) -> None:
    if name == records.STEPS:
        run.append_steps(rows)
    else:
        one = run.append_epoch if name == records.EPOCHS else run.append_diagnostics
        for row in rows:
            one(row)


def rows_of(run: Run, name: str) -> list[dict]:
    record = read(run.path)
    return {records.STEPS: record.steps, records.EPOCHS: record.epochs}.get(name, record.diagnostics)


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("name", [records.STEPS, records.EPOCHS, records.DIAGNOSTICS])
def test_a_kill_at_any_byte_of_the_last_two_lines_loses_at_most_the_line_it_tore(run, name, rewound):
    rows = [step_row(step) for step in range(1, 6)]
    append(run, name, rows)
    file = run.path / name
    whole = file.read_bytes()
    first_three = len(b"".join(whole.splitlines(keepends=True)[:3]))
    for size in range(first_three, len(whole) + 1):
        file.write_bytes(whole[:size])
        complete = rows[: whole[:size].count(b"\n")]
        assert rows_of(run, name) == complete
        # What is appended after the kill must not be glued to the torn line.
        resumed = Run.open(run.path)
        if rewound:
            resumed.rewind(5)
            assert file.read_bytes() == whole[: whole.rfind(b"\n", 0, size) + 1]
        append(resumed, name, [step_row(9)])
        assert rows_of(run, name) == [*complete, step_row(9)]


def test_rows_written_before_a_sigkill_are_there(tmp_path):
    code = textwrap.dedent(
        """
        import json, os, signal, sys
        from micronorm.records import Run
        run = Run.create(sys.argv[1], json.loads(sys.argv[2]))
        run.append_steps([{"step": 1}, {"step": 2}])
        run.append_epoch({"step": 2, "epoch": 0})
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    env = {**os.environ, "PYTHONPATH": str(Path(records.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run"), json.dumps(FACTS)], env=env, timeout=120)
    assert done.returncode == -signal.SIGKILL
    record = read(tmp_path / "run")
    assert record.steps == [{"step": 1}, {"step": 2}]
    assert record.epochs == [{"step": 2, "epoch": 0}]


def test_a_full_disk_leaves_no_half_line(run, monkeypatch):
    run.append_steps([step_row(1)])

    class Full:
        def __init__(self, *arguments, **options):
            self.file = open(*arguments, **options)  # noqa: SIM115

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            return self.file.write(data[:7])

    with monkeypatch.context() as patch:
        patch.setattr(records, "open", Full, raising=False)
        with pytest.raises(OSError, match=r"7 of \d+ bytes written; is the disk full"):
            run.append_steps([step_row(2)])
    run.append_steps([step_row(2)])
    assert read(run.path).steps == [step_row(1), step_row(2)]


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


def test_a_resumed_run_that_repeats_steps_without_rewinding_is_refused(run):
    run.append_steps([step_row(1), step_row(2)])
    for writer in (run, Run.open(run.path)):
        with pytest.raises(ValueError, match=r"step 2 follows step 2 .* rewind first"):
            writer.append_steps([step_row(2)])
    assert len(read(run.path).steps) == 2


@pytest.mark.parametrize("step", [None, "1", 1.0, True, -1])
def test_a_row_without_a_proper_step_is_refused(run, step):
    with pytest.raises(ValueError, match="needs its step"):
        run.append_epoch({"step": step})


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b"", "not JSON"),
        (b'{"step": 2', "not JSON"),
        (b'{"step": 2, "loss": NaN}', "NaN is not JSON"),
        (b"[2]", "a JSON object was expected, got list"),
        (b'{"float": "nan"}', "a JSON object was expected, got float"),
        (b"\xff", "not JSON"),
        (b'{"loss": 1}', "step None after step 1"),
        (b'{"step": 1}', "step 1 after step 1"),
    ],
)
def test_a_damaged_line_that_is_not_the_torn_last_is_named_with_its_file(run, line, complaint):
    (run.path / records.STEPS).write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=rf"steps\.jsonl, line 2: .*{complaint}"):
        read(run.path)


def test_damaged_facts_and_outcomes_are_named(run):
    run.finish({"steps": 1})
    (run.path / records.OUTCOME).write_bytes(b'{"steps"')
    with pytest.raises(ValueError, match=r"outcome\.json: not JSON"):
        read(run.path)
    (run.path / records.FACTS).write_bytes(b"")
    with pytest.raises(ValueError, match=r"run\.json: not JSON"):
        read(run.path)


def test_a_newer_format_is_refused_rather_than_misread(run):
    (run.path / records.FACTS).write_text(json.dumps({**FACTS, "format": 2}))
    with pytest.raises(ValueError, match="format 2; this version of micronorm knows format 1 only"):
        Run.open(run.path)


@pytest.mark.parametrize("name", FACTS)
def test_a_missing_fact_is_named(tmp_path, name):
    facts = {key: value for key, value in FACTS.items() if key != name}
    with pytest.raises(ValueError, match=f"the fact '{name}' must be .*, got nothing"):
        Run.create(tmp_path / "run", facts)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run_is_said_to_have_none(tmp_path):
    for open_ in (read, Run.open):
        with pytest.raises(FileNotFoundError, match=r"holds no run: there is no run\.json"):
            open_(tmp_path)


def test_a_run_is_not_overwritten_unless_asked(run):
    run.append_steps([step_row(1)])
    run.finish({"steps": 1})
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="already holds a run"):
        Run.create(run.path, FACTS)
    assert len(read(run.path).steps) == 1
    with pytest.raises(TypeError, match="is no JSON value"):
        Run.create(run.path, {**FACTS, "bad": object()}, replace=True)
    assert len(read(run.path).steps) == 1
    Run.create(run.path, {**FACTS, "recipe": "other"}, replace=True)
    record = read(run.path)
    assert (record.facts["recipe"], record.steps, record.outcome) == ("other", [], None)
    assert (run.path / "notes.txt").read_text() == "mine"


def test_a_run_may_begin_in_a_folder_that_holds_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert read(Run.create(tmp_path, FACTS).path).facts["recipe"] == "digits"


def test_facts_are_added_and_those_the_format_needs_cannot_be_spoiled(run):
    run.add_facts(resumptions=[{"date": "2025-01-02", "ranks": 2}])
    again = Run.open(run.path)
    again.add_facts(resumptions=[*again.facts["resumptions"], {"date": "2025-01-03", "ranks": 1}])
    assert [each["ranks"] for each in read(run.path).facts["resumptions"]] == [2, 1]
    with pytest.raises(ValueError, match="the fact 'command' must be str, got NoneType"):
        run.add_facts(command=None)
    assert read(run.path).facts["command"] == FACTS["command"]


def test_syncing_reaches_every_file_of_rows(run, monkeypatch):
    run.sync()  # none yet
    run.append_steps([step_row(1)])
    run.append_epoch({"step": 1})
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    run.sync()
    assert synced == [(run.path / name).stat().st_ino for name in (records.STEPS, records.EPOCHS)]


def test_runs_are_found_at_any_depth_in_order(tmp_path):
    for name in ("b", "a/2", "a/1"):
        Run.create(tmp_path / name, FACTS)
    (tmp_path / "empty").mkdir()
    assert find_runs(tmp_path) == [tmp_path / "a" / "1", tmp_path / "a" / "2", tmp_path / "b"]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    assert find_runs(tmp_path / "empty") == []
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_runs(tmp_path / "nowhere")


def test_an_atomic_write_takes_bytes_or_a_function_and_replaces_what_was_there(tmp_path):
    file = tmp_path / "file"
    write_atomically(file, b"old")
    assert file.read_bytes() == b"old"
    write_atomically(file, lambda out: [out.write(b"ne"), out.seek(1), out.write(b"ow")])
    assert file.read_bytes() == b"now"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_during_an_atomic_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def fail(out):
        out.write(b"half")
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        write_atomically(file, fail)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor):
        calls.append("folder" if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino else "content")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: [calls.append("replace"), replace(*paths)])
    write_atomically(tmp_path / "file", b"new")
    assert calls == ["content", "replace", "folder"]


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_a_partial_that_is_recognised(tmp_path):
    code = textwrap.dedent(
        """
        import os, signal, sys
        from micronorm.records import write_atomically
        def die(out):
            out.write(b"half")
            out.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(sys.argv[1], die)
        """
    )
    file = tmp_path / "file"
    file.write_bytes(b"old")
    env = {**os.environ, "PYTHONPATH": str(Path(records.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code, str(file)], env=env, timeout=120, check=False)
    assert file.read_bytes() == b"old"
    (left,) = (path for path in tmp_path.iterdir() if path != file)
    assert left.read_bytes() == b"half"
    assert remove_partials(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [file]


def test_looks_into_the_network_are_read_back_and_rewound_with_the_steps_they_belong_to(tmp_path):
    run = Run.create(tmp_path, FACTS)
    looks = [{"step": step, "epoch": 0, "layers": {"bn": {"kind": "norm", "stat_diff": 0.5}}} for step in (0, 2, 4)]
    for look in looks:
        run.append_diagnostics(look)
    assert records.read(tmp_path).diagnostics == looks
    assert records.read(tmp_path, rows=False).diagnostics == []
    run.rewind(2)
    assert records.read(tmp_path).diagnostics == looks[:2]


@pytest.mark.parametrize(
    "layers, complaint", [(7, "layers must be an object, got int"), ({"bn": 3}, "'bn' must be an object, got int")]
)
def test_a_look_of_the_wrong_shape_is_refused_in_writing_and_in_reading(run, layers, complaint):
    look = {"step": 1, "epoch": 0, "layers": layers}
    with pytest.raises(ValueError, match=complaint):
        run.append_diagnostics(look)
    (run.path / records.DIAGNOSTICS).write_text(json.dumps(look) + "\n")
    with pytest.raises(ValueError, match=rf"diagnostics\.jsonl, line 1: .*{complaint}"):
        read(run.path)


def sample(**changes) -> dict:
    whole = {"height": 2, "width": 1, "channels": 3, "pixels": "AAECAwQF", "label": "3", "prediction": "5"}
    return {**whole, "probability": 0.5, **changes}


def test_predictions_are_read_back_and_go_when_the_run_goes_on(run):
    records.write_predictions(run.path, [sample(), sample(label="<b>")])
    assert read(run.path).predictions == [sample(), sample(label="<b>")]
    assert read(run.path, rows=False).predictions == []
    run.rewind(0)
    assert read(run.path).predictions == []
    records.write_predictions(run.path, [sample()])
    again = Run.create(run.path, FACTS, replace=True)
    assert read(again.path).predictions == []


@pytest.mark.parametrize(
    "bad, complaint",
    [
        (sample(height=0), "sample 0: height and width from 1 on"),
        (sample(channels=4), "1 or 3 channels"),
        (sample(label=3), "label must be str, got int"),
        (sample(pixels="AAEC"), "3 bytes of pixels where its size gives 6"),
        (sample(pixels="<svg onload=x>"), "no base64"),
        ("text", "sample 0: height and width"),
    ],
)
def test_pictures_that_are_none_are_refused_in_writing_and_in_reading(run, bad, complaint):
    if isinstance(bad, dict):
        with pytest.raises(ValueError, match=complaint):
            records.write_predictions(run.path, [bad])
    (run.path / records.PREDICTIONS).write_text(json.dumps({"samples": [bad]}))
    with pytest.raises(ValueError, match=complaint):
        read(run.path)


def test_predictions_without_a_run_or_without_a_list_are_refused(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        records.write_predictions(tmp_path, [])
    (run.path / records.PREDICTIONS).write_text("{}")
    with pytest.raises(ValueError, match="a list of samples was expected"):
        read(run.path)
