"""Build, check and time all methods at one shape and layout.

Before our layer is timed, it is compared with the plain equations in float64, at that shape, layout and dtype.
An error is measured against the tensor's maximum, as in the library's tests, with the same tolerances:

- half types are computed in float32 and rounded once: 2 eps for outputs, 4 for gradients;
- float32 sums of n elements err by log2(n) eps at worst: 16 eps for outputs and 64 for gradients up to n = 2¹⁶, and
  in proportion to log2(n) above;
- the expected values come from the input *as rounded* to the dtype.

The gradient of a parameter may cancel to zero: a shift of a channel that is a group by itself changes no output.
Such a gradient consists of rounding errors. Its error is measured against the size of its terms if that is larger than
its maximum: √n times the gradient's size for a sum of n terms, and the largest sum over a channel.
"""

import contextlib
import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from micronorm.bench.cases import Case, NormMethod, lay_out
from micronorm.bench.results import BenchResult, BenchSettings
from micronorm.bench.timing import (
    GRAPH_PASSES,
    LARGE,
    Captured,
    Inputs,
    device_ms,
    host_ms,
    repeats_for,
    spread,
    warm_up,
)
from micronorm.commit import attach
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.bcn import algorithm1, batch_channel_norm_reference
from micronorm.ops.moments import Moments

WARM_UP = 3  # rounds that are not counted: the first calls allocate memory
SEED = 0


class WrongResult(Exception):
    """Our layer computes something else than the plain equations."""


class Contestant:
    """A method's layer at one shape."""

    def __init__(self, method: NormMethod, case: Case, settings: BenchSettings) -> None:
        self.method = method
        self.layer = method.build(case.channels, settings.dtype).to(settings.device)
        self.handle = attach(self.layer, process_group=None) if method.is_ours else None
        self.call: Callable[[Tensor], Tensor] = self.layer
        if method.is_compiled:
            self.call = torch.compile(self.layer, dynamic=False)

    def one_pass(self, x: Tensor, grad_y: Tensor) -> None:
        """Run the timed function, which is the same for every method, and delete all gradients."""
        self.call(x).backward(grad_y)
        x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None

    def commit(self) -> None:
        """Move the estimates of a "step" layer, as an optimizer step would between two rounds."""
        if self.handle is not None:
            self.handle.commit()

    def check(self, x: Tensor) -> float:
        """Return the worst error of our layer as a share of the tolerance.

        Raises:
            WrongResult: an error exceeds its tolerance.
        """
        randomize_state(find_norm(self.layer))
        found = deviations(self.layer, x)
        self.commit()
        wrong = [deviation for deviation in found if deviation.is_wrong]
        if wrong:
            raise WrongResult("; ".join(map(str, wrong)))
        return max(deviation.error / deviation.tolerance for deviation in found)


def saved_bytes(layer: Callable[[Tensor], object], parameters: Sequence[nn.Parameter], x: Tensor) -> int:
    """Return the bytes that one forward stores for its backward: each storage once, without the parameters."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    # Hold the storages: the address of a freed one could be given to another tensor and be counted once for both.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor.detach()  # a tensor with its graph would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storage.nbytes() for storage in saved.values())


def peak_bytes(one_pass: Callable[[], None]) -> int:
    """Return the peak of GPU memory that one eager forward and backward adds to what is allocated."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_pass()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, layout: str, methods: Sequence[NormMethod], settings: BenchSettings) -> Iterator[BenchResult]:
    """Yield the results of all methods by each route, without ratios.

    Every method takes part once in each round, in a new random order. What disturbs the machine for a while therefore
    disturbs all methods.
    """
    if any(method.is_compiled for method in methods):
        torch.compiler.reset()  # torch limits recompilations per function, and all sequences share one `forward`
    inputs = Inputs(case, layout, dtype=settings.dtype, device=settings.device, seed=SEED)
    ready: list[tuple[Contestant, BenchResult]] = []
    for method in methods:
        result = BenchResult(case, layout, "", method, settings)
        with _record_fault(result):
            contestant = Contestant(method, case, settings)
            _prepare(contestant, result, inputs, settings)
            ready.append((contestant, result))
        if result.fault:
            yield from (replace(result, route=route) for route in settings.routes)
    for route in settings.routes:
        yield from _measure_route(route, ready, inputs, settings)
    ready.clear()
    if settings.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _prepare(contestant: Contestant, result: BenchResult, inputs: Inputs, settings: BenchSettings) -> None:
    x, grad_y = inputs.next()
    result.backend = contestant.method.computed_by(x.device)
    if contestant.method.is_ours:
        result.error = contestant.check(x)
    contestant.one_pass(x, grad_y)  # compiles the layer, and fails early
    if not contestant.method.is_compiled:  # the hooks would cause a second compilation
        result.saved_bytes = saved_bytes(contestant.call, list(contestant.layer.parameters()), x)
    if settings.device.type == "cuda":
        result.peak_bytes = peak_bytes(lambda: contestant.one_pass(x, grad_y))
    contestant.commit()


def _measure_route(
    route: str, ready: Sequence[tuple[Contestant, BenchResult]], inputs: Inputs, settings: BenchSettings
) -> list[BenchResult]:
    results = [(contestant, replace(result, route=route)) for contestant, result in ready]
    timers: dict[Contestant, Callable[[], float]] = {}
    for contestant, result in results:
        with _record_fault(result):
            timers[contestant] = _timer(contestant, route, inputs, settings)
    taken: dict[Contestant, list[float]] = {contestant: [] for contestant in timers}
    order = random.Random(SEED)
    for number in range(WARM_UP + settings.rounds):
        for contestant in order.sample(list(timers), len(timers)):
            milliseconds = timers[contestant]()
            contestant.commit()
            if number >= WARM_UP:
                taken[contestant].append(milliseconds)
    for contestant, result in results:
        if contestant in taken:
            result.time = spread(taken[contestant])
    return [result for _, result in results]


def _timer(contestant: Contestant, route: str, inputs: Inputs, settings: BenchSettings) -> Callable[[], float]:
    """Return a function that times one pass: on a GPU the mean of several passes between two events."""

    def one_pass() -> None:
        contestant.one_pass(*inputs.next())

    if settings.device.type != "cuda":
        return lambda: host_ms(one_pass)
    call: Callable[[], object] = one_pass
    passes = 1
    if route == "graph":
        x, _ = inputs.pairs[0]
        passes = len(inputs) if 2 * x.nbytes >= LARGE else GRAPH_PASSES
        warm_up(one_pass)
        call = Captured(one_pass, passes)
    contestant.commit()
    one = min(device_ms(call) for _ in range(3))
    repeats = repeats_for(one)
    contestant.commit()
    return lambda: device_ms(call, repeats) / passes


@contextlib.contextmanager
def _record_fault(result: BenchResult) -> Iterator[None]:
    """Store an exception of one method as its result's fault, so that the other methods are still measured."""
    try:
        yield
    except WrongResult as fault:
        result.fault = f"wrong: {fault}"
    except Exception as error:
        result.fault = one_line(error)


def one_line(error: Exception) -> str:
    """Return an exception's type and message in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- comparison with float64 -----------------------------------------------------------------------------------------

_EPS = {"output": {True: 2, False: 16}, "gradient": {True: 4, False: 64}}  # by whether it is a half type
_SUMMED = 2**16  # elements of a sum up to which the factors for float32 hold

KINK = 1e-3
"""Outputs this close to zero get no gradient. Rounding may move them across ReLU's kink, which changes the derivative
from 0 to 1 and is no error of the layer. float32 errs by less than 1e-5."""


@dataclass(frozen=True)
class Deviation:
    """Error of one tensor relative to its size, and the tolerance."""

    name: str
    error: float
    tolerance: float

    @property
    def is_wrong(self) -> bool:
        """Whether the error exceeds the tolerance or is not a number."""
        return not self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{self.name} is {self.error:.2e} from float64, {self.tolerance:.2e} allowed"


def tolerance(kind: str, dtype: torch.dtype, *, summed: int) -> float:
    """Return the tolerance for an "output" or a "gradient" of this dtype that sums `summed` elements.

    Example:
        >>> tolerance("output", torch.bfloat16, summed=2**20) == 2 * torch.finfo(torch.bfloat16).eps
        True
        >>> tolerance("gradient", torch.float32, summed=2**20) == 80 * torch.finfo(torch.float32).eps
        True
    """
    is_half = dtype.itemsize < 4
    size = 1.0 if is_half else max(1.0, math.log2(summed) / math.log2(_SUMMED))
    return size * _EPS[kind][is_half] * torch.finfo(dtype).eps


def find_norm(layer: nn.Module) -> BatchChannelNorm:
    """Return the BatchChannelNorm inside a method's layer."""
    return next(module for module in layer.modules() if isinstance(module, BatchChannelNorm))


def randomize_state(norm: BatchChannelNorm, *, seed: int = 0) -> None:
    """Set affines and estimates that differ between channels, so that every term of the equations matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor, low, high in (
            (norm.weight, 0.5, 1.5),
            (norm.bias, -0.5, 0.5),
            (norm.group_weight, 0.5, 1.5),
            (norm.group_bias, -0.5, 0.5),
            (norm.running_mean, -0.2, 0.2),
            (norm.running_var, 0.5, 1.5),
        ):
            tensor.copy_(torch.empty(tensor.shape).uniform_(low, high, generator=generator))


def deviations(layer: nn.Module, x: Tensor) -> list[Deviation]:
    """Compare output, input gradient and affine gradients of one forward and backward pass with float64.

    Args:
        layer: computes one BatchChannelNorm, followed by a ReLU.
        x: the input, in the dtype and layout to be timed.
    """
    norm = find_norm(layer)
    x64 = x.detach().double().requires_grad_()
    affine64 = [p.detach().double().requires_grad_() for p in _affine(norm)]
    before = _reference(norm, x64, affine64)
    generator = torch.Generator(x.device).manual_seed(1)
    # Noise alone adds up to almost zero over a large map. The gradient through the statistics would then be smaller
    # than the rounding of half types. Adding the output gives these sums the size of the gradient itself.
    grad_y = (torch.randn(x.shape, device=x.device, generator=generator) + before.detach()).to(x.dtype)
    grad_y = torch.where(before.detach().abs() < KINK, 0, grad_y)
    grad_y = lay_out(grad_y, "nchw" if x.is_contiguous() else "nhwc")
    y64 = before.relu()
    expected = (y64.detach(), *torch.autograd.grad(y64, (x64, *affine64), grad_y.double()))
    del before, y64, x64
    x = x.detach().requires_grad_()
    y = layer(x)
    actual = (y.detach(), *torch.autograd.grad(y, (x, *_affine(norm)), grad_y))
    return list(_compare(actual, expected, grad_y))


def _affine(norm: BatchChannelNorm) -> list[nn.Parameter]:
    return [norm.weight, norm.bias, norm.group_weight, norm.group_bias]


def _reference(norm: BatchChannelNorm, x: Tensor, affine: list[Tensor]) -> Tensor:
    """Compute the plain equations of the mode that the layer is in."""
    estimates = Moments(norm.running_mean.double(), norm.running_var.double())
    options = {"groups": norm.num_groups, "eps": float(norm.eps)}
    if norm.training and norm.statistics == "sequential":
        assert isinstance(norm.rate, float)
        return algorithm1(x, estimates, norm.rate, *affine, micro_batch=norm.micro_batch, **options)[0]
    given = None if norm.training and norm.statistics == "batch" else estimates
    return batch_channel_norm_reference(x, given, *affine, **options)


def _compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], grad_y: Tensor) -> Iterator[Deviation]:
    names = ("output", "input gradient", "weight gradient", "bias gradient", "group_weight gradient", "group_bias")
    size = grad_y.double().square().mean().sqrt().item()
    summed_up = expected[-1].abs().max().item() * expected[-1].numel() / grad_y.shape[1]
    for name, a, e in zip(names, actual, expected, strict=True):
        is_sum = e.ndim == 1
        # An output sums at most a sample's elements (a group has fewer), or in "batch" mode a channel's.
        summed = grad_y.numel() // (e.numel() if is_sum else min(grad_y.shape[:2]))
        scale = max(e.abs().max().item(), math.sqrt(summed) * size if is_sum else 0.0, summed_up if is_sum else 0.0)
        worst = (a.double() - e).abs().max().item()
        error = worst / scale if scale else (0.0 if worst == 0 else math.inf)
        yield Deviation(name, error, tolerance("output" if name == "output" else "gradient", a.dtype, summed=summed))
