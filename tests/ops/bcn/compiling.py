"""Compile the kernels for a GPU of compute capability 9.0 on a machine without one, as far as Triton's TTGIR.

The planner runs on tensors without data. Triton gets a driver that names a GPU, and a compiler that only records what
it would compile. The records are then lowered through the passes that choose layouts. The passes after them (LLVM,
ptxas) are not tested here.

It needs a process in which Triton is not in interpreter mode. `python -m tests.ops.bcn.compiling 300` lowers 300
specializations, the same each time, and prints those that fail.
"""

# What Triton passes around has no types, and its compiler is no public interface.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver

from micronorm.ops import launch
from micronorm.ops.bcn.triton import plans, run
from micronorm.ops.bcn.triton.layout import Estimates
from micronorm.ops.moments import Moments

PROCESSORS = 132


class Case(NamedTuple):
    """A layer and its input."""

    shape: tuple[int, ...]
    groups: int
    estimates: Estimates = Estimates.KEPT
    dtype: torch.dtype = torch.bfloat16
    channels_last: bool = True
    activation: str = "relu"
    residual: bool = False
    from_batch: bool = False
    micro_batch: int | None = None
    """0 for the moments of the whole batch; None: the estimates are not computed."""


# The first failed to compile with Triton 3.6. The others have kernels that it does not have.
FIRST = [
    Case((32, 16, 64, 64), 4, residual=True),
    Case((8, 32, 56, 56), 8, Estimates.PER_SAMPLE, micro_batch=1),
    Case((64, 512, 28, 28), 32, channels_last=False),
    Case((2, 64, 16, 16), 32, Estimates.SHARED, torch.float32, from_batch=True, micro_batch=0),
    Case((1, 24, 7, 7), 4, Estimates.NONE, channels_last=False),
]


def narrow_cases() -> Iterator[Case]:
    """Yield layers like the first: few channels, in a pass that does its own arithmetic before its loop."""
    for channels, size, side in itertools.product((16, 32, 64), (4, 8), (32, 64, 112)):
        yield Case((32, channels, side, side), channels // size)


def random_cases(count: int) -> Iterator[Case]:
    """Yield layers of realistic sizes, the same each time."""
    choose = random.Random(0).choice
    for _ in range(count):
        channels, side = (
            choose((8, 16, 24, 32, 48, 64, 96, 128, 256, 512)),
            choose((4, 7, 8, 14, 16, 28, 56, 64, 112, 224)),
        )
        groups = choose([g for g in (1, 2, 4, 8, 16, 32) if channels % g == 0])
        case = Case((choose((1, 2, 4, 8, 16, 32)), channels, side, side), groups, choose(list(Estimates)))
        case = case._replace(dtype=choose((torch.bfloat16, torch.bfloat16, torch.float32)))
        case = case._replace(channels_last=choose((True, True, False)), residual=choose((False, True)))
        case = case._replace(activation=choose(("relu", "relu", "identity") if case.residual else ("relu", "silu")))
        if case.estimates == Estimates.SHARED:
            case = case._replace(from_batch=True, micro_batch=0)
        elif case.estimates == Estimates.PER_SAMPLE:
            case = case._replace(micro_batch=choose((1, 2)))
        yield case


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_all(case: Case) -> None:
    """Launch a forward and a backward."""
    n, c = case.shape[:2]
    x = _empty(*case.shape, dtype=case.dtype)
    if case.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    rule = run.rule(case.estimates, case.groups, 1e-5, case.activation, 0.01)
    parts, mean, var, blend, lost = None, _empty(c), _empty(c), _empty(1), _empty(2, dtype=torch.int64)
    if case.micro_batch is not None:
        parts, (mean, var), _ = run.estimates(x, Moments(mean, var), lost, 0.1, case.groups, case.micro_batch, True)
    affine = (_empty(c), _empty(c), _empty(case.groups), _empty(case.groups))
    if case.estimates == Estimates.NONE:
        norm = (None, None, None, None, *affine[:2], None)
    else:
        norm = (mean, var, *affine, blend)
    y, numbers = run.forward(x, torch.empty_like(x) if case.residual else None, parts, rule, norm)
    space = x.numel() // (n * c)
    if parts is None:
        run.gather(numbers, mean, _empty(1 + 2 * c, dtype=torch.float64), lost, (n, c, space), case.groups)
    run.recompute(x, None, numbers, rule.activation)
    gate = y if case.residual and case.activation != "identity" else None
    run.backward(x, torch.empty_like(x), gate, numbers, rule, (*norm[:6], None), case.from_batch)


class _Driver:
    """A driver of Triton for a GPU that does not exist."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiled:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None: ...

    def run(self, *args: Any) -> None: ...


class Specialization(NamedTuple):
    """A kernel and all that it is compiled for."""

    case: Case
    source: Any
    options: dict[str, Any]

    def __str__(self) -> str:
        """Name the kernel, its constants and the layer it is launched for."""
        names = self.source.fn.arg_names
        constants = {names[path[0]]: value for path, value in self.source.constants.items()}
        return f"{self.source.fn.__name__} {constants} warps={self.options['num_warps']} {self.case}"

    def lower(self) -> None:
        """Raise a RuntimeError if Triton's passes fail."""
        target = _Driver().get_current_target()
        backend = make_backend(target)
        options = backend.parse_options(self.options)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, self.source.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module = self.source.make_ir(target, options, functions, modules, context)
        stages["ttgir"](stages["ttir"](module, {}), {})


def specializations(cases: Iterable[Case]) -> Iterator[Specialization]:
    """Yield what would be compiled for these layers, each once."""
    recorded: list[tuple[Any, dict[str, Any]]] = []

    def record(source: Any, target: Any, options: dict[str, Any], **_: Any) -> _Compiled:
        recorded.append((source, options))
        return _Compiled()

    driver.set_active(_Driver())
    triton.compiler.compile = record
    plans.processors = lambda device: PROCESSORS
    launch.starts_early = lambda device: True
    for case in cases:
        launch_all(case)
        yield from (Specialization(case, *found) for found in recorded)
        recorded.clear()


def main(count: int) -> None:
    """Print the specializations that fail, then how many of how many."""
    cases = itertools.chain(FIRST, narrow_cases(), random_cases(20 * count))
    done, failed = 0, 0
    for each in itertools.islice(specializations(cases), count):
        done += 1
        try:
            each.lower()
        except RuntimeError as fault:
            failed += 1
            sys.stdout.write(f"{fault}: {each}\n")
    sys.stdout.write(f"{failed} of {done} failed\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
