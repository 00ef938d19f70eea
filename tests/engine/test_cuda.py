"""The engine on a GPU: captured steps, real out-of-memory errors, no waiting for the device."""

import copy
import gc
from typing import Any

import pytest
import torch

import micronorm as mn
from micronorm.engine.evaluate import largest_fitting
from micronorm.engine.graph import GraphedStep
from micronorm.engine.loop import train
from micronorm.engine.optimization import SGD, AdamW, Constant
from micronorm.engine.parallel import OneRank
from micronorm.engine.sampling import StepInputs
from micronorm.engine.settings import Execution, Settings
from micronorm.engine.step import Step
from micronorm.ops.keyed import sample_keys
from micronorm.recipes.networks import build_network
from micronorm.tasks.classification import open_classification
from tests.networks import assert_same_state
from tests.tolerances import tolerance

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
STEPS = 25

METHODS: dict[str, tuple[Any, Any]] = {
    "BN": (None, None),
    "GN+WS": (mn.GN(), mn.WS()),
    "BCN+WS": (mn.BCN(), mn.WS()),
    "BCN sequential": (mn.BCN(statistics="sequential"), mn.WS()),
    "BCN batch": (mn.BCN(statistics="batch"), mn.WS()),
}


def network(method: str = "BCN+WS") -> torch.nn.Module:
    norm, weight = METHODS[method]
    torch.manual_seed(0)
    model = build_network("digits", classes=10)
    return model if norm is None else mn.convert(model, norm, weight)


@pytest.fixture(scope="module")
def task():
    return open_classification("digits", device=CUDA)


def settings(**changes: Any) -> Settings:
    # A captured step has its learning rate in float32; this one is the same number in float64.
    base: dict[str, Any] = {"epochs": 3, "step_batch": 64, "optimizer": SGD(2.0**-6), "schedule": Constant()}
    return Settings(**{**base, "dtype": torch.float64, **changes})


def run(model: torch.nn.Module, task: Any, *, what: Settings | None = None, **how: Any) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    train(model, task, what or settings(), Execution(device=CUDA, **{"steps": STEPS, **how}))
    return model.state_dict()


@pytest.mark.parametrize("method", METHODS)
def test_a_captured_step_ends_where_the_eager_one_does(task, method):
    model = network(method)
    eager = run(model, task)
    graphed = run(model, task, cuda_graph=True)  # the 21st step, the epoch's short one, is computed eagerly
    assert_same_state(graphed, eager, tol=tolerance("fifty_steps", torch.float64))


def test_a_captured_adamw_step_ends_where_the_eager_one_does(task):
    model = network()
    what = settings(optimizer=AdamW(2.0**-10))
    assert_same_state(
        run(model, task, what=what, cuda_graph=True),
        run(model, task, what=what),
        tol=tolerance("fifty_steps", torch.float64),
    )


@pytest.mark.parametrize("micro_batch", [7, 16])
def test_a_captured_step_may_be_cut(task, micro_batch):
    model = network()
    cut = run(model, task, cuda_graph=True, micro_batch=micro_batch)
    assert_same_state(cut, run(model, task), tol=tolerance("fifty_steps", torch.float64))


def test_capturing_leaves_no_trace(task):
    model = network().to(CUDA, torch.float64)
    before = copy.deepcopy(model.state_dict())
    graphed = GraphedStep(make_step(model, task, cuda_graph=True), 64)
    graphed._capture(step_inputs(task))
    assert_same_state(model.state_dict(), before, tol=0.0)
    assert all(float(w.sums.abs().sum()) == 0 and w.forwards == 0 for w in graphed.step.transaction.windows)
    assert all(
        not value.any()
        for state in graphed.step.optimizer.state.values()
        for value in state.values()
        if value is not None
    )


def test_a_captured_run_resumes(task, tmp_path):
    model = network()
    whole = run(model, task, cuda_graph=True)
    first = copy.deepcopy(model)
    train(first, task, settings(), Execution(device=CUDA, steps=10, cuda_graph=True), out=tmp_path)
    second = copy.deepcopy(model)
    train(second, task, settings(), Execution(device=CUDA, steps=STEPS, cuda_graph=True), out=tmp_path, resume=True)
    assert_same_state(second.state_dict(), whole, tol=tolerance("fifty_steps", torch.float64))


def make_step(model: torch.nn.Module, task: Any, **options: Any) -> Step:
    chosen = settings(dtype=next(model.parameters()).dtype)
    return Step(model, task, chosen, Execution(**{"micro_batch": 64, **options}), OneRank(CUDA))


def step_inputs(task: Any, first: int = 0) -> StepInputs:
    indices = torch.arange(first, first + 64)
    (batch,) = task.train.load([(0, indices)], seed=0)
    return StepInputs(batch, sample_keys(indices, seed=0, epoch=0).to(CUDA), 64, 64)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("micro_batch", [64, 16])
def test_a_step_does_not_wait_for_the_device(task, micro_batch):
    step = make_step(network().to(CUDA), task, micro_batch=micro_batch)
    ready = [step_inputs(task, first) for first in (0, 64, 128)]
    step(ready[0])
    try:
        torch.cuda.set_sync_debug_mode("error")
        results = [step(each) for each in ready[1:]]  # whatever waits raises
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.sums.isfinite().all() for result in results)


def peak_of_a_step(model: torch.nn.Module, task: Any) -> int:
    step = make_step(copy.deepcopy(model).to(CUDA), task)
    torch.cuda.reset_peak_memory_stats()
    step(step_inputs(task))
    return torch.cuda.max_memory_allocated()


class Hungry(torch.nn.Module):
    """Changes nothing, and keeps two MiB (in float64) of every sample for the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = x.new_zeros(len(x), 2**18)
        return x + (nothing * x.flatten(1).sum(1, keepdim=True)).sum()


def test_a_real_out_of_memory_error_is_survived(task):
    model = torch.nn.Sequential(Hungry(), network()).double()
    expected = run(model, task, steps=3)
    gc.collect()
    torch.cuda.empty_cache()
    peak = peak_of_a_step(model, task)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    # Room for a third of the activations, which are more than what the allocator may have in reserve.
    assert peak - held > 128 * 2**20
    ballast = torch.empty(int(0.5 * 2**30), dtype=torch.uint8, device=CUDA)
    limit = ballast.numel() + held + (peak - held) // 3
    torch.cuda.set_per_process_memory_fraction(limit / total)
    messages = []
    try:
        limited = copy.deepcopy(model)
        listener: Any = _Messages(messages)
        train(limited, task, settings(), Execution(device=CUDA, steps=3, micro_batch=64), listener=listener)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("out of memory" in message for message in messages)
    assert_same_state(limited.state_dict(), expected, tol=tolerance("fifty_steps", torch.float64))


class _Messages:
    def __init__(self, messages: list[str]) -> None:
        self.messages = messages

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def test_the_first_guess_fits_and_leaves_no_trace(task):
    model = network().to(CUDA, torch.float64)
    step = make_step(model, task)
    before = copy.deepcopy(model.state_dict())
    fits = largest_fitting(step, step_inputs(task), 1, 4)
    assert fits > 64  # a network this small fits a hundred times into any GPU
    assert_same_state(model.state_dict(), before, tol=0.0)
    assert step.micro_batch.size == 64
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_compute_under_autocast_and_keep_wide_parameters(task, dtype):
    model = network()
    half = run(model, task, what=settings(dtype=dtype), steps=1, channels_last=True)
    wide = run(model, task, what=settings(dtype=torch.float32), steps=1)
    assert all(half[name].dtype == value.dtype for name, value in wide.items())
    start = {name: value.to(CUDA) for name, value in model.state_dict().items()}
    moved, error = (
        torch.stack([(state[name] - other[name]).double().square().sum() for name in start]).sum().sqrt().item()
        for state, other in ((wide, start), (half, wide))
    )
    # The gradients of the whole network carry the half type's rounding through seven layers and their ReLUs.
    assert 0 < error < 64 * torch.finfo(dtype).eps * moved


def test_a_compiled_run_ends_where_the_eager_one_does(task):
    model = network()
    compiled = run(model, task, compile=True, steps=3)
    assert_same_state(compiled, run(model, task, steps=3), tol=tolerance("fifty_steps", torch.float64))
