"""Build, check and time all methods at one shape and layout."""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from micronorm.bench import accuracy
from micronorm.bench.cases import Case
from micronorm.bench.methods import NormMethod
from micronorm.bench.results import BenchResult
from micronorm.bench.timing import (
    GRAPH_PASSES,
    LARGE,
    Captured,
    Inputs,
    device_ms,
    floor_ms,
    host_ms,
    repeats_for,
    spread,
    warm_up,
)
from micronorm.commit import attach

WARM_UP = 3  # rounds that are not counted: the first calls allocate memory
SEED = 0


@dataclass(frozen=True)
class BenchSettings:
    """How to measure. `bandwidth` is that of a copy in bytes per second; without it no traffic floor is computed."""

    device: torch.device
    dtype: torch.dtype
    routes: Sequence[str]
    rounds: int
    bandwidth: float | None = None

    @property
    def dtype_name(self) -> str:
        """The dtype as in tables: bfloat16."""
        return str(self.dtype).removeprefix("torch.")


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
        accuracy.randomize_state(accuracy.find_norm(self.layer))
        found = accuracy.deviations(self.layer, x)
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
        result = BenchResult(case, layout, "", method, settings.dtype_name, settings.dtype.itemsize, settings.rounds)
        if settings.bandwidth is not None:
            result.floor_ms = floor_ms(case.elements, settings.dtype.itemsize, settings.bandwidth)
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
