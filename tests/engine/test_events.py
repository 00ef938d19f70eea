"""TensorBoard events of a run: figures at their steps, and none without the package."""

import math
import sys

import pytest

from micronorm import records
from micronorm.engine import journal
from tests.engine.tiny import STEPS, run


def test_a_run_without_the_tensorboard_package_writes_everything_but_events(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if not installed
    run(tmp_path)
    assert len(records.read(tmp_path).steps) == STEPS
    assert not (tmp_path / journal.EVENTS).exists()


def test_events_hold_the_figures_of_the_record_and_steps_of_before_a_resume_from_the_start_are_hidden(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for loss in (1.0, math.nan):
        events = journal.open_events(tmp_path, resumed_at=0)
        events.add_scalar("loss", loss, 1)
        events.close()
    (shown,) = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert shown.step == 1
    assert math.isnan(shown.value)
