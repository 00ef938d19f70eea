"""Rows of a record: every step once, in order, with the figures of its own samples; an epoch's over all of them."""

import torch

from micronorm.engine import loop as module
from micronorm.engine.loop import Meter
from micronorm.engine.parallel import Flags
from micronorm.engine.step import StepResult
from tests.engine.tasks import CPU, Toy

NAMES = ["count", "loss", "wrong"]


def result(*values, micro_batch=4):
    return StepResult(NAMES, torch.tensor(values, dtype=torch.float64), micro_batch, Flags())


def test_a_row_has_the_figures_of_its_step_and_an_epoch_those_of_all_its_samples():
    meter = Meter(Toy(), CPU)
    (first,) = meter.add({"step": 1}, result(8, 4, 2))
    (second,) = meter.add({"step": 2}, result(2, 4, 2, micro_batch=2))
    assert (first["step"], first["loss"], first["top1"], first["micro_batch"]) == (1, 0.5, 25, 4)
    assert (second["step"], second["loss"], second["top1"], second["micro_batch"]) == (2, 2, 100, 2)
    assert first["memory"] is None
    assert meter.epoch_figures() == {"loss": 0.8, "top1": 40}
    meter.epoch_sums = {}
    assert meter.epoch_figures() == {}


def test_steps_of_a_gpu_are_read_in_bundles_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 3600.0)
    monkeypatch.setattr(Meter, "_memory", lambda self: 7)
    meter = Meter(Toy(), torch.device("cuda"))
    rows = [meter.add({"step": k}, result(1, k, 0)) for k in range(module.AT_MOST + 2)]
    assert [len(bundle) for bundle in rows] == [0] * (module.AT_MOST - 1) + [module.AT_MOST, 0, 0]
    rest = meter.flush()
    assert meter.flush() == []
    assert [row["step"] for row in (*rows[module.AT_MOST - 1], *rest)] == list(range(module.AT_MOST + 2))
    assert [row["loss"] for row in rest] == [module.AT_MOST, module.AT_MOST + 1]
    assert rest[0]["memory"] == 7


def test_a_slow_gpu_step_is_read_at_once(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", -1.0)
    monkeypatch.setattr(Meter, "_memory", lambda self: 7)
    assert len(Meter(Toy(), torch.device("cuda")).add({"step": 1}, result(1, 1, 0))) == 1


def test_time_that_went_into_something_else_is_not_counted(monkeypatch):
    now = iter([0.0, 10.0, 10.5, 11.0, 11.0, 13.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    meter = Meter(Toy(), CPU)  # at 0
    meter.restart()  # at 10
    (row,) = meter.add({"step": 1}, result(1, 1, 0))  # asked at 10.5, read at 11
    assert row["seconds"] == 1.0
    (row,) = meter.add({"step": 2}, result(1, 1, 0))
    assert row["seconds"] == 2.0
