"""What `micronorm doctor` tries out on this machine: the law, the forms of BCN, checkpoints and process groups."""

import math
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
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.check import check_cuts
from micronorm.data.memory import MemorySamples
from micronorm.data.pixels import Standardization
from micronorm.engine import checkpoint
from micronorm.engine.loop import train
from micronorm.engine.optimization import SGD, Cosine
from micronorm.engine.settings import Execution, Settings
from micronorm.nn import BatchChannelNorm
from micronorm.nn.backends import KERNELS, kernel_problem
from micronorm.recipes import find
from micronorm.tasks.classification import Classification

STEP_TOLERANCE = 1e-12
"""Of one step in float64, cut differently: relative to each tensor's maximum."""

_FORM_TOLERANCE = 1e-10
_SAMPLES, _CUT = 24, 5


class Failed(Exception):
    """A self-test found what must not be; the message says what."""


class Absent(Exception):
    """There is nothing here to be tested; the message says why. No fault."""


@dataclass(frozen=True)
class Result:
    """How one self-test went."""

    name: str
    status: Literal["passed", "failed", "absent"]
    detail: str
    seconds: float


SelfTest = tuple[str, Callable[[], str]]


def self_tests(devices: Sequence[torch.device]) -> list[SelfTest]:
    """The tests for these devices by name, each a function that returns what it found, or raises."""
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


def run_tests(tests: Sequence[SelfTest]) -> list[Result]:
    """Run them one after the other. Whatever one raises is its result; the others run all the same."""
    results = []
    for name, test in tests:
        started = time.perf_counter()
        try:
            status, detail = "passed", test()
        except Absent as reason:
            status, detail = "absent", str(reason)
        except Failed as fault:
            status, detail = "failed", str(fault)
        except Exception as error:  # a machine can be broken in any way
            status, detail = "failed", " ".join(f"{type(error).__name__}: {error}".split())
        results.append(Result(name, status, detail, time.perf_counter() - started))  # type: ignore[arg-type]
    return results


def check_law(device: torch.device) -> str:
    """`mn.check_cuts` of the digits' network with BCN and WS, in float64."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 1, 8, 8, generator=generator).to(device)
    model = find("digits/bcn-ws").build(seed=0).to(device).train()
    report = check_cuts(model, (images, torch.arange(6, device=device)), _summed_cross_entropy)
    if not report.ok:
        raise Failed("; ".join(str(report).splitlines()[:2]))
    return f"{report.compared} tensors agree within {report.worst:.1e}, whole, halved and one by one"


def _summed_cross_entropy(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    images, labels = part
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def check_step(device: torch.device) -> str:
    """One optimizer step of the engine in float64, whole and in micro-batches."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (_SAMPLES, 1, 8, 8), dtype=torch.uint8, generator=generator)
    scale = Standardization((127.5,), (74.0,))
    samples = MemorySamples(images, torch.arange(_SAMPLES) % 10, standardization=scale, device=device)
    task = Classification(samples, samples, classes=10)
    settings = Settings(epochs=1, step_batch=_SAMPLES, optimizer=SGD(lr=0.02), schedule=Cosine(), dtype=torch.float64)
    states = []
    for micro_batch in (_SAMPLES, _CUT):
        model = find("digits/bcn-ws").build(seed=0)
        train(model, task, settings, Execution(micro_batch=micro_batch, device=device))
        states.append(model.state_dict())
    worst = max(_deviation(states[0][name], states[1][name]) for name in states[0])
    if worst > STEP_TOLERANCE:
        raise Failed(f"{_SAMPLES} samples at once and {_CUT} at a time end {worst:.1e} apart, beyond {STEP_TOLERANCE}")
    return f"{_SAMPLES} samples at once and {_CUT} at a time end {worst:.1e} apart"


def check_form(backend: str, device: torch.device) -> str:
    """BCN's output and gradients by `backend` against the plain equations, in float64, in every mode."""
    generator = torch.Generator().manual_seed(0)
    x, outer = (torch.randn(4, 8, 5, 5, dtype=torch.float64, generator=generator).to(device) for _ in range(2))
    worst = 0.0
    for statistics in ("step", "sequential", "batch"):
        found = []
        for form in (backend, "reference"):
            layer = BatchChannelNorm(
                8, 4, statistics=statistics, rate=0.1, backend=form, device=device, dtype=torch.float64
            )
            inputs = x.clone().requires_grad_()
            y = layer(inputs)
            found.append((y.detach(), *torch.autograd.grad(y, (inputs, *layer.parameters()), outer)))
        worst = max([worst, *(_deviation(b, a) for a, b in zip(*found, strict=True))])
    if worst > _FORM_TOLERANCE:
        raise Failed(f"outputs or gradients are {worst:.1e} from those of the plain equations")
    return f"outputs and gradients within {worst:.1e}"


def check_kernels(device: torch.device) -> str:
    """As `check_form`, for every kernel of our own; absent where a device cannot run them."""
    problem = kernel_problem(device.type, device.index)
    if problem is not None:
        raise Absent(problem)
    return "; ".join(f"{name}: {check_form(name, device)}" for name in KERNELS)


def check_checkpoint() -> str:
    """A checkpoint comes back as it was written, and is refused when a byte of it has changed."""
    state = {"model": find("digits/bcn-ws").build(seed=0).state_dict()}
    with tempfile.TemporaryDirectory(prefix="micronorm-doctor-") as folder:
        path = checkpoint.save(Path(folder), 1, state)
        content = path.read_bytes()
        if checkpoint.digest(checkpoint.load(path)["model"]) != checkpoint.digest(state["model"]):
            raise Failed("what was read back is not what was written")
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        try:
            checkpoint.load(path)
        except checkpoint.CheckpointError:
            return f"{len(content):,} bytes written and read back; a changed byte is noticed"
    raise Failed("a changed byte was not noticed")


def check_group(backend: str, device: torch.device) -> str:
    """A process group of one rank opens and adds up."""
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


def _deviation(expected: Tensor, actual: Tensor) -> float:
    """The largest deviation, relative to the largest entry; infinite where a number is none."""
    error = (actual.double() - expected.double()).abs().max().item()
    size = expected.abs().max().item()
    if math.isnan(error):  # which `max` would pass over
        return math.inf
    return error / size if error and size else error
