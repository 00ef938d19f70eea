"""The self-tests of `micronorm doctor`: the law, the implementations of BCN, checkpoints and process groups."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from micronorm.check import check_cuts
from micronorm.cli.check import summed_cross_entropy
from micronorm.cli.cuts import largest_difference
from micronorm.data.memory import MemorySamples
from micronorm.data.pixels import Standardization
from micronorm.engine import checkpoint
from micronorm.engine.loop import train
from micronorm.engine.optimization import SGD
from micronorm.engine.schedules import Cosine
from micronorm.engine.settings import Execution, Settings
from micronorm.nn import BatchChannelNorm
from micronorm.nn.backends import KERNELS, kernel_problem
from micronorm.recipes import find
from micronorm.tasks.classification import Classification

# Largest differences relative to each tensor's maximum, in float64: one step split differently, and BCN's outputs and
# gradients against the plain equations.
STEP_TOLERANCE, FORM_TOLERANCE = 1e-12, 1e-10
_SAMPLES, _MICRO_BATCH = 24, 5


class Failed(Exception):
    """Raised by a self-test that fails; the message says what is wrong."""


class Absent(Exception):
    """Raised by a self-test that does not apply to this machine; the message says why."""


@dataclass(frozen=True)
class SelfTestResult:
    """The result of one self-test."""

    name: str
    status: Literal["passed", "failed", "absent"]
    detail: str
    seconds: float


SelfTest = tuple[str, Callable[[], str]]


def self_tests(devices: Sequence[torch.device]) -> list[SelfTest]:
    """Return the tests for these devices: a name and a function that returns a description of its result, or raises."""
    tests: list[SelfTest] = []
    for device in devices:
        tests += [
            (f"law, one network ({device.type})", partial(check_law, device)),
            (f"law, one step of the engine ({device.type})", partial(check_step, device)),
            (f"BCN against its equations ({device.type})", partial(check_form, "auto", device)),
            (f"kernels ({device.type})", partial(check_kernels, device)),
        ]
    tests += [("checkpoint", check_checkpoint), ("process group (gloo)", partial(check_group, "gloo", devices[0]))]
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return tests if gpu is None else [*tests, ("process group (nccl)", partial(check_group, "nccl", gpu))]


def run_tests(tests: Sequence[SelfTest]) -> list[SelfTestResult]:
    """Run all tests in order and return their results. An exception counts as a failure of that test."""
    results = []
    for name, test in tests:
        started = time.perf_counter()
        try:
            status, detail = "passed", test()
        except Absent as reason:
            status, detail = "absent", str(reason)
        except Failed as fault:
            status, detail = "failed", str(fault)
        except Exception as error:  # a broken installation may raise anything
            status, detail = "failed", " ".join(f"{type(error).__name__}: {error}".split())
        results.append(SelfTestResult(name, status, detail, time.perf_counter() - started))  # type: ignore[arg-type]
    return results


def check_law(device: torch.device) -> str:
    """Run `mn.check_cuts` on the digits' network with BCN and WS, in float64."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 1, 8, 8, generator=generator).to(device)
    model = find("digits/bcn-ws").build(seed=0).to(device).train()
    report = check_cuts(model, (images, torch.arange(6, device=device)), summed_cross_entropy)
    if not report.ok:
        raise Failed("; ".join(str(report).splitlines()[:2]))
    return f"{report.compared} tensors agree within {report.worst:.1e}, whole, halved and one by one"


def check_step(device: torch.device) -> str:
    """Compare one float64 step of the engine, whole and in micro-batches."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (_SAMPLES, 1, 8, 8), dtype=torch.uint8, generator=generator)
    scale = Standardization((127.5,), (74.0,))
    samples = MemorySamples(images, torch.arange(_SAMPLES) % 10, standardization=scale, device=device)
    task = Classification(samples, samples, classes=10)
    settings = Settings(epochs=1, step_batch=_SAMPLES, optimizer=SGD(lr=0.02), schedule=Cosine(), dtype=torch.float64)
    states = []
    for micro_batch in (_SAMPLES, _MICRO_BATCH):
        model = find("digits/bcn-ws").build(seed=0)
        train(model, task, settings, Execution(micro_batch=micro_batch, device=device))
        states.append(model.state_dict())
    worst = largest_difference(states[1], states[0])
    found = f"{_SAMPLES} samples at once and {_MICRO_BATCH} at a time differ by {worst:.1e}"
    if not worst <= STEP_TOLERANCE:  # also if it is NaN
        raise Failed(f"{found}, more than {STEP_TOLERANCE}")
    return found


def check_form(backend: str, device: torch.device) -> str:
    """Compare BCN's outputs and gradients by `backend` with the plain equations, in float64, in every mode."""
    generator = torch.Generator().manual_seed(0)
    x, outer = (torch.randn(4, 8, 5, 5, dtype=torch.float64, generator=generator).to(device) for _ in range(2))
    found: dict[str, dict[str, Tensor]] = {backend: {}, "reference": {}}
    for statistics in ("step", "sequential", "batch"):
        for form, tensors in found.items():
            layer = BatchChannelNorm(
                8, 4, statistics=statistics, rate=0.1, backend=form, device=device, dtype=torch.float64
            )
            inputs = x.clone().requires_grad_()
            y = layer(inputs)
            gradients = torch.autograd.grad(y, (inputs, *layer.parameters()), outer)
            tensors |= {f"{statistics} {k}": tensor.detach() for k, tensor in enumerate((y, *gradients))}
    worst = largest_difference(found[backend], found["reference"])
    if not worst <= FORM_TOLERANCE:  # also if it is NaN
        raise Failed(f"outputs or gradients differ from the plain equations by {worst:.1e}")
    return f"outputs and gradients agree within {worst:.1e}"


def check_kernels(device: torch.device) -> str:
    """Compare every kernel with the plain equations, if the device can run kernels."""
    problem = kernel_problem(device.type, device.index)
    if problem is not None:
        raise Absent(problem)
    return "; ".join(f"{name}: {check_form(name, device)}" for name in KERNELS)


def check_checkpoint() -> str:
    """Check that a checkpoint loads as it was saved, and that one with a changed byte is refused."""
    state = {"model": find("digits/bcn-ws").build(seed=0).state_dict()}
    with tempfile.TemporaryDirectory(prefix="micronorm-doctor-") as folder:
        path = checkpoint.save(Path(folder), 1, state)
        content = path.read_bytes()
        if checkpoint.digest(checkpoint.load(path)["model"]) != checkpoint.digest(state["model"]):
            raise Failed("the loaded checkpoint differs from the saved one")
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        try:
            checkpoint.load(path)
        except checkpoint.CheckpointError:
            return f"{len(content):,} bytes written and read back; a changed byte is detected"
    raise Failed("a changed byte was not detected")


def check_group(backend: str, device: torch.device) -> str:
    """Open a process group of one rank and run one all-reduce."""
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise Absent(f"this torch is built without {backend}")
    if dist.is_initialized():
        raise Absent("a process group is open already")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        total = torch.full((3,), 2.0, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        if total.tolist() != [2.0] * 3:
            raise Failed(f"the sum of [2, 2, 2] over one rank is {total.tolist()}")
    finally:
        dist.destroy_process_group()
    return "one rank, one all-reduce"
