import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import micronorm
from micronorm.engine.events import Events

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def shown(path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a name."""
    events = accumulator.EventAccumulator(str(path)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_scalars_are_shown_at_their_steps_and_none_is_left_out(tmp_path):
    events = Events(tmp_path)
    assert events.available
    events.scalars(1, {"train/loss": 2.5, "memory": None})
    events.scalars(2, {"train/loss": 1.25, "memory": 1024})
    events.close()
    assert shown(tmp_path, "train/loss") == [(1, 2.5), (2, 1.25)]
    assert shown(tmp_path, "memory") == [(2, 1024)]


def test_not_a_number_is_shown_without_a_warning(tmp_path, caplog):
    events = Events(tmp_path)
    events.scalars(1, {"loss": math.nan})
    events.close()
    ((step, value),) = shown(tmp_path, "loss")
    assert step == 1
    assert math.isnan(value)
    assert caplog.records == []


def test_steps_repeated_after_a_resume_are_shown_once(tmp_path):
    killed = Events(tmp_path)
    for step in (1, 2, 3, 4):
        killed.scalars(step, {"loss": float(step)})
    killed.flush()  # and no close: it was killed
    resumed = Events(tmp_path, resumed_at=2)
    for step in (3, 4, 5):
        resumed.scalars(step, {"loss": 10.0 * step})
    resumed.close()
    killed.close()
    assert shown(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_a_resume_from_the_very_start_shows_nothing_of_before(tmp_path):
    first = Events(tmp_path)
    first.scalars(1, {"loss": 1.0})
    first.close()
    again = Events(tmp_path, resumed_at=0)
    again.scalars(1, {"loss": 2.0})
    again.close()
    assert shown(tmp_path, "loss") == [(1, 2.0)]


def test_flushed_events_are_in_the_file_before_the_end(tmp_path):
    events = Events(tmp_path)
    events.scalars(1, {"loss": 1.0})
    events.flush()
    assert shown(tmp_path, "loss") == [(1, 1.0)]
    events.close()


def test_closing_twice_does_no_harm(tmp_path):
    events = Events(tmp_path)
    events.scalars(1, {"loss": 1.0})
    events.close()
    events.close()
    assert shown(tmp_path, "loss") == [(1, 1.0)]


def test_without_the_tensorboard_package_nothing_happens(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if not installed
    events = Events(tmp_path / "events")
    assert not events.available
    events.scalars(1, {"loss": 1.0})
    events.flush()
    events.close()
    assert not (tmp_path / "events").exists()


def test_importing_the_module_does_not_import_tensorboard():
    code = "import micronorm.engine.events, sys; sys.exit('tensorboard' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(micronorm.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 0
