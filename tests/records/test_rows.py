import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from micronorm import records
from micronorm.records import Run, read
from micronorm.records import run as writing
from tests.records.rows import FACTS, step_row


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


@pytest.mark.parametrize("name", [records.STEPS, records.EPOCHS, records.DIAGNOSTICS])
def test_a_kill_at_any_byte_of_the_last_two_lines_loses_at_most_the_line_it_tore(run, name):
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
    env = {**os.environ, "PYTHONPATH": str(Path(records.__file__).parents[2])}
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
        patch.setattr(writing, "open", Full, raising=False)
        with pytest.raises(OSError, match=r"No space left on device \(\d+ bytes needed, .* free\).*steps\.jsonl"):
            run.append_steps([step_row(2)])
    run.append_steps([step_row(2)])
    assert read(run.path).steps == [step_row(1), step_row(2)]


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
        (b'{"step": true}', "step True after step 1"),
        (b'{"step": 2.0}', "step 2.0 after step 1"),
        (b'{"step": ' + b"9" * 400 + b"}", "an integer of 400 digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"step": 2, "epoch": 1.5}', "epoch must be an int from 0 on, got float 1.5"),
        (b'{"step": 2, "loss": "low"}', "loss must be a number, got str low"),
        (b'{"step": 2, "seconds": {"float": "nan"}}', "seconds must be a finite number from 0 on, got float nan"),
        (b'{"step": 2, "test": [1]}', "test must be an object, got list"),
    ],
)
def test_a_damaged_line_that_is_not_the_torn_last_is_named_with_its_file(run, line, complaint):
    (run.path / records.STEPS).write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=rf"steps\.jsonl, line 2: .*{complaint}"):
        read(run.path)


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
