"""A run that is observed ends as one that is not, and its looks do not depend on what happened to it."""

from typing import Any

import pytest
import torch

import micronorm as mn
from micronorm import records
from micronorm.engine import journal
from micronorm.engine.parallel import Flags
from micronorm.engine.sampling import StepInputs
from micronorm.engine.settings import Execution
from tests.diagnostics.observed import assert_same_figures
from tests.engine.tasks import Failures, Toy, make_step, step_inputs
from tests.engine.test_resume import kill_at, without_times
from tests.engine.tiny import STEPS, run
from tests.networks import SmallResNet
from tests.tolerances import tolerance

EVERY = 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> records.Record:
    """The record of an observed run that nothing happened to."""
    out = tmp_path_factory.mktemp("observed")
    run(out, observe=EVERY, observer=mn.observe)
    return records.read(out)


def test_an_observed_run_ends_with_the_digest_of_one_that_is_not(tmp_path, reference):
    run(tmp_path)
    alone = records.read(tmp_path)
    assert reference.outcome == alone.outcome
    assert without_times(reference.steps) == without_times(alone.steps)
    assert alone.diagnostics == []


def test_looks_are_in_the_record_with_their_steps_and_epochs(reference):
    steps_per_epoch = STEPS // 2
    steps = list(range(1, STEPS + 1, EVERY))
    assert [row["step"] for row in reference.diagnostics] == steps
    assert [row["epoch"] for row in reference.diagnostics] == [(step - 1) // steps_per_epoch for step in steps]
    for row in reference.diagnostics:
        assert {name: layer["kind"] for name, layer in row["layers"].items()} == {
            "0": "weight",
            "1": "norm",
            "6": "weight",
        }
    assert reference.facts["execution"]["observe"] == EVERY


@pytest.mark.parametrize("step", [1, 3, 4, STEPS])
def test_a_run_that_was_killed_and_resumed_has_the_looks_of_one_that_was_not(tmp_path, reference, step):
    kill_at(step, tmp_path, observe=EVERY, observer=mn.observe)
    run(tmp_path, resume=True, observe=EVERY, observer=mn.observe)
    record = records.read(tmp_path)
    assert record.diagnostics == reference.diagnostics
    assert record.outcome == reference.outcome


def test_looks_are_events_too(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, observe=EVERY, observer=mn.observe)
    events = accumulator.EventAccumulator(str(tmp_path / journal.EVENTS), size_guidance={"scalars": 0}).Reload()
    steps = list(range(1, STEPS + 1, EVERY))
    assert [event.step for event in events.Scalars("stat_diff/1")] == steps
    assert [event.step for event in events.Scalars("weight_rest/0")] == steps


def seen_step(size: int, *fail_at: int, idle: bool = False) -> dict[str, Any]:
    """The layers of a look at one step of the engine, of which attempts fail at these operations."""
    torch.manual_seed(0)
    task = Toy(8)
    step = make_step(SmallResNet(mn.BCN(groups=4), mn.WS()), task, size)
    rows: list[dict[str, Any]] = []
    with mn.observe(step.model, sink=rows.append) as step.observation, Failures(step, *fail_at):
        if idle:
            step._attempt(step_inputs(task, torch.arange(8)), Flags())  # forgotten when the step begins
            step.roll_back()
            accumulate = step.accumulate

            def with_empty_pass(chosen: StepInputs) -> Any:
                sums = accumulate(chosen)
                step._empty_pass(step_inputs(task, torch.arange(3)), last=True)
                return sums

            step.accumulate = with_empty_pass  # type: ignore[method-assign]
        step(step_inputs(task, torch.arange(8)))
    assert step.micro_batch.size == size // 2 ** len(fail_at)
    return rows[0]["layers"]


@pytest.mark.parametrize("fail_at", [(300,), (900,), (200, 500)])
def test_a_step_that_ran_out_of_memory_and_was_repeated_is_seen_once(fail_at):
    found = seen_step(4, *fail_at)
    assert_same_figures(found, seen_step(4 // 2 ** len(fail_at)), tol=0.0)


def test_a_pass_for_the_sake_of_other_ranks_is_not_seen():
    assert_same_figures(seen_step(4, idle=True), seen_step(4), tol=tolerance("one_step", torch.float64))


def test_an_observed_run_needs_an_observer_and_a_place_to_write_to(tmp_path):
    with pytest.raises(ValueError, match=r"observe=2 needs an observer, observer=mn\.observe, as well"):
        run(tmp_path, observe=2)
    with pytest.raises(ValueError, match="observe=2 needs a run directory to write to as well"):
        run(None, observe=2, observer=mn.observe)


@pytest.mark.parametrize("other", ["compile", "cuda_graph"])
def test_what_runs_no_hooks_cannot_be_observed(other):
    with pytest.raises(ValueError, match="observe needs hooks, which neither compiled nor captured code runs"):
        Execution(observe=50, **{other: True})


def test_a_model_that_the_observer_refuses_ends_the_run_before_its_first_step(tmp_path):
    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        run(tmp_path, observe=2, observer=refuse)
    assert records.read(tmp_path).steps == []
