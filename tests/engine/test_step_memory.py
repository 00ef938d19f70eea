"""Out of memory at any operation of a step: the step is taken back whole and repeated in halves."""

import copy
import functools
import random
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from micronorm.engine.evaluate import largest_fitting
from micronorm.engine.sampling import StepInputs
from micronorm.engine.step import Step
from tests.engine.tasks import (
    Dropping,
    Failures,
    Sum,
    Toy,
    Zoo,
    make_step,
    operations,
    random_places,
    state_digest,
    step_inputs,
)
from tests.networks import SmallResNet, assert_same_state
from tests.tolerances import assert_close_to_max, tolerance

PARTS, RUNS, STEPS = 4, 5, 10  # 200 steps, and a failure in each
REPEATED = "out of memory with 2 samples per micro-batch; the step was rolled back and is repeated with 1"


def zoo_step(task: Toy, size: int) -> Step:
    torch.manual_seed(3)
    return make_step(Zoo(), task, size)


@functools.cache
def clean_run() -> tuple[StepInputs, list[str], list[str]]:
    """A step's samples, the phases of its operations, and the digests of a run that computes it in single samples."""
    task = Toy(train=3)
    chosen = step_inputs(task, torch.arange(3))
    phases = operations(zoo_step(task, 2), chosen)
    clean, digests = zoo_step(task, 1), []
    for _ in range(STEPS):
        clean(chosen)
        digests.append(state_digest(clean))
    return chosen, phases, digests


@pytest.mark.parametrize("part", range(PARTS))
def test_failures_at_200_random_operations_change_nothing_that_a_run_keeps(part):
    chosen, phases, expected = clean_run()
    places = random_places(phases, RUNS * STEPS, seed=part)
    for run in range(RUNS):
        failing = zoo_step(Toy(train=3), 2)
        for at, digest in zip(places[run * STEPS :], expected, strict=False):
            failing.micro_batch.size = 2
            with Failures(failing, at):
                assert failing(chosen).messages == [REPEATED]
            assert state_digest(failing) == digest, f"operation {at} of {len(phases)}, {phases[at]}"
    hit = Counter(phases[at] for at in places)
    assert hit.keys() == {"weights", "placement", "forward", "backward", "weights' backward"}
    assert min(hit["forward"], hit["backward"]) > RUNS * STEPS // 5


@pytest.mark.slow
@pytest.mark.parametrize("norm", [mn.BCN(groups=2), mn.GN(groups=2)], ids=["BCN", "GN"])
def test_a_step_that_ran_out_of_memory_ends_as_the_whole_one_would_have(norm):
    torch.manual_seed(5)
    task, model = Toy(), Dropping(norm)
    chosen = step_inputs(task, torch.arange(12))
    whole = make_step(copy.deepcopy(model), task, 12)
    whole(chosen)
    expected = whole.model.state_dict()
    phases = operations(make_step(copy.deepcopy(model), task, 12), chosen)
    for at in random_places(phases, 6)[1:]:
        failing = make_step(copy.deepcopy(model), task, 12)
        with Failures(failing, at, at, at):  # 12, 6 and 3 samples do not fit
            result = failing(chosen)
        assert (result.micro_batch, len(result.messages)) == (1, 3)
        assert_same_state(failing.model.state_dict(), expected, tol=tolerance("one_step", torch.float64))


def test_a_step_that_recomputes_is_taken_back_and_repeated_as_any_other():
    chosen, _, digests = clean_run()
    counted = zoo_step(Toy(train=3), 2)
    mn.recompute(counted.model)
    phases = operations(counted, chosen)
    for at in [place for place in random_places(phases, 6) if phases[place] in ("forward", "backward")]:
        recomputing = zoo_step(Toy(train=3), 2)
        mn.recompute(recomputing.model)
        with Failures(recomputing, at):
            assert recomputing(chosen).messages == [REPEATED]
        assert state_digest(recomputing) == digests[0]


def test_memory_that_cannot_hold_one_sample_ends_the_run_as_it_was_before_the_step():
    task = Toy(train=4)
    chosen = step_inputs(task, torch.arange(4))
    step = zoo_step(task, 4)
    step(chosen)
    before = state_digest(step)
    with (
        Failures(step, 300, 200, 100) as failures,
        pytest.raises(MemoryError, match="out of memory with 1 sample per micro-batch, the least possible"),
    ):
        step(chosen)
    assert not failures.left
    assert state_digest(step) == before
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_statistics_that_stay_together_are_never_cut():
    step = make_step(SmallResNet(mn.BN()), task := Toy(), 24, unit=4)
    with Failures(step, 50, 50, 50), pytest.raises(MemoryError, match=r"with 4 samples .* statistics are over 4"):
        step(step_inputs(task, torch.arange(24)))
    assert step.micro_batch.size == 4


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried 8 TB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_allocation_failures_of_every_library_halve_the_micro_batch(error):
    step = make_step(SmallResNet(), task := Toy(), 8)
    with Failures(step, 40, error=error):
        assert step(step_inputs(task, torch.arange(8))).micro_batch == 4


def test_an_error_that_is_no_lack_of_memory_is_raised_and_leaves_no_trace():
    step = zoo_step(task := Toy(train=4), 2)
    chosen = step_inputs(task, torch.arange(4))
    step(chosen)
    before = state_digest(step)
    with Failures(step, 400, error=KeyError("a column")), pytest.raises(KeyError, match="a column"):
        step(chosen)
    assert state_digest(step) == before
    assert step.micro_batch.size == 2


def gpu_with(monkeypatch: pytest.MonkeyPatch, *, peaks: list[int]) -> None:
    """Stand in for a GPU with 12,000 free bytes, on which trial runs need these."""
    answers = {"mem_get_info": (10_000, 20_000), "memory_reserved": 2_000}
    for name, value in {**answers, "synchronize": None, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks.pop(0))


@pytest.mark.parametrize(
    "peaks, fits",
    [
        ([1_000, 1_600], (0.85 * 12_000 - 800) // 200),  # 200 each on top of 800
        ([11_000, 14_000], 1),  # too much already: begin with the least, the step will tell
    ],
)
def test_what_fits_lies_on_the_line_through_two_readings(monkeypatch, peaks, fits):
    gpu_with(monkeypatch, peaks=peaks)
    step = make_step(SmallResNet(), task := Toy(), 8)
    assert largest_fitting(step, step_inputs(task, torch.arange(8)), 1, 4) == fits


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_looking_for_what_fits_leaves_no_trace(recompute, monkeypatch):
    gpu_with(monkeypatch, peaks=[1_000, 1_600])
    step = zoo_step(task := Toy(train=8), 8)
    if recompute:
        mn.recompute(step.model)
    chosen = step_inputs(task, torch.arange(8))
    before = state_digest(step)
    assert largest_fitting(step, chosen, 1, 4) == (0.85 * 12_000 - 800) // 200
    with Failures(step, 300):
        assert largest_fitting(step, chosen, 1, 4) == 1  # even one did not fit
    gpu_with(monkeypatch, peaks=[1_000])
    with Failures(step, 10**9, 300):
        assert largest_fitting(step, chosen, 2, 4) == 2
    assert state_digest(step) == before
    assert step.micro_batch.size == 8


class Drawing(Toy):
    """Draws from every generator of the process, as sampling in a loss may."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, float, float]] = []

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> Sum:
        self.drawn.append((random.random(), numpy.random.random(), torch.rand(()).item()))
        return super().loss(model, batch)


def test_a_batch_that_is_written_to_is_repeated_as_it_was():
    def run(size: int, *at: int) -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.ReLU(inplace=True), SmallResNet())
        step, part = make_step(model, task := Toy(), size), step_inputs(task, torch.arange(8))
        before = part.batch[0].clone()
        with Failures(step, *at):
            step(part)
        assert torch.equal(part.batch[0], before)
        return step

    assert state_digest(run(4, 300)) == state_digest(run(2))


def test_an_interrupted_step_leaves_no_trace():
    step = make_step(Dropping(mn.BCN(groups=2)), task := Toy(), 4)
    before = state_digest(step)
    with pytest.raises(KeyboardInterrupt), Failures(step, 700, error=KeyboardInterrupt()):
        step(step_inputs(task, torch.arange(8)))
    assert state_digest(step) == before
    assert all(parameter.grad is None for parameter in step.model.parameters())


class Remaking(nn.Module):
    """Puts a longer tensor in its buffer's place in every forward, and makes two others when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().sum().reshape(1)])
        if self.first is None:
            self.first = x.detach()[:1].clone()
            self.register_buffer("shape", torch.tensor(x.shape))
        return x


def test_buffers_that_a_failed_attempt_made_or_replaced_are_as_before():
    def run(size: int, *at: int) -> Step:
        torch.manual_seed(0)
        step = make_step(nn.Sequential(Remaking(), SmallResNet()), task := Toy(), size)
        with Failures(step, *at):
            step(step_inputs(task, torch.arange(8)))
        return step

    assert state_digest(run(4, 300)) == state_digest(run(2))


def test_a_repeated_step_draws_the_same_random_numbers_from_every_generator():
    step = make_step(SmallResNet(), task := Drawing(), 8)
    with Failures(step, 500):
        step(step_inputs(task, torch.arange(8)))
    assert len(task.drawn) == 3
    assert task.drawn[0] == task.drawn[1]
    assert not set(task.drawn[2]) & set(task.drawn[1])


def test_remembering_the_beginning_of_a_step_takes_no_memory():
    step = zoo_step(Toy(train=4), 2)
    addresses = [kept.data_ptr() for kept in step.savepoint._copies]
    step.savepoint.take()
    assert [kept.data_ptr() for kept in step.savepoint._copies] == addresses
    assert len(addresses) > 10


class Overflowing(Toy):
    """Its loss overflows while `overflow` is set, as float16 does."""

    overflow = False

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> Sum:
        loss = super().loss(model, batch)
        return Sum(loss.sum * float("inf"), loss.count, loss.counts) if self.overflow else loss


def test_the_window_of_a_skipped_step_survives_a_rollback():
    def run(*at: int) -> Step:
        torch.manual_seed(0)
        task = Overflowing()
        step = make_step(SmallResNet(), task, 4, dtype=torch.float16)
        task.overflow = True
        step(step_inputs(task, torch.arange(8)))
        assert [window.forwards for window in step.transaction.windows] == [2] * 6
        assert not step.model.norm.running_mean.any()  # skipped: nothing was committed
        task.overflow = False
        step.micro_batch.size = 4 if at else 2
        with Failures(step, *at):
            step(step_inputs(task, torch.arange(8, 16)))
        return step

    step = run(900)
    assert step.micro_batch.size == 2
    assert state_digest(step) == state_digest(run())
    # The first layer saw the same weights in both steps: its estimate has moved by the mean over all of their samples.
    torch.manual_seed(0)
    images = step_inputs(Toy(), torch.arange(16)).batch[0].float()
    with torch.autocast("cpu", torch.float16):
        seen = SmallResNet().stem(images).double().mean((0, 2, 3))
    assert_close_to_max(step.model.norm.running_mean, 0.02 * seen, tol=1e-5)


def test_steps_skipped_in_a_row_do_not_look_like_a_loop_that_never_commits():
    step = make_step(SmallResNet(), task := Toy(), 8, dtype=torch.float16, step_batch=4096)
    for window in step.transaction.windows:
        window.counter[0] = 16 * 4096  # as many as bring the loss scale from 2**16 to 1, in single samples
    assert step(step_inputs(task, torch.arange(8))).micro_batch == 8
