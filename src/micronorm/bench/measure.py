"""All contestants at one shape and layout: built, checked, and timed in turn."""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from micronorm.bench import correct
from micronorm.bench.cases import Case
from micronorm.bench.peers import Method, computed_by
from micronorm.bench.rows import Row
from micronorm.bench.timing import (
    GRAPH_PASSES,
    LARGE,
    Captured,
    Inputs,
    Neighbours,
    device_ms,
    floor_ms,
    host_ms,
    repeats_for,
    spread,
    warm_up,
)
from micronorm.commit import attach

WARM_UP = 3  # rounds: the first calls allocate, and the estimates leave where they began
SEED = 0


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    device: torch.device
    dtype: torch.dtype
    routes: Sequence[str]
    rounds: int
    bandwidth: float | None = None
    """Of a copy on this device, in bytes per second; without it no floor is told."""

    @property
    def dtype_name(self) -> str:
        """As in tables: bfloat16."""
        return str(self.dtype).removeprefix("torch.")


class Wrong(Exception):
    """A contestant of ours does not compute what it should."""


class Contestant:
    """A method's layer at one shape."""

    def __init__(self, method: Method, case: Case, settings: Settings) -> None:
        self.method = method
        self.layer = method.build(case.channels, settings.dtype).to(settings.device)
        # Of this process alone: another contestant may have opened a process group.
        self.handle = attach(self.layer, process_group=None) if method.is_ours else None
        self.call: Callable[[Tensor], Tensor] = self.layer
        if method.is_compiled:
            self.call = torch.compile(self.layer, dynamic=False)

    def one_pass(self, x: Tensor, grad_y: Tensor) -> None:
        """The timed function, the same for every method; it leaves no gradient behind."""
        self.call(x).backward(grad_y)
        x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None

    def settle(self) -> None:
        """What an optimizer step would do between two rounds: move the estimates of "step" layers."""
        if self.handle is not None:
            self.handle.commit()

    def check(self, x: Tensor) -> float:
        """The worst error as a share of what is allowed, of ours; raises `Wrong` where it is more than that."""
        correct.spread_state(correct.find_norm(self.layer))
        found = correct.deviations(self.layer, x)
        self.settle()
        wrong = [deviation for deviation in found if deviation.is_wrong]
        if wrong:
            raise Wrong("; ".join(map(str, wrong)))
        return max(deviation.error / deviation.tolerance for deviation in found)


def saved_bytes(layer: Callable[[Tensor], object], parameters: Sequence[nn.Parameter], x: Tensor) -> int:
    """Bytes one forward keeps for its backward: every distinct storage once, without the parameters."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    # Storages, not addresses alone: what is held here cannot be freed and its address given to another tensor.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor.detach()  # an output with its graph would hold itself, and its leaves' nodes of this stream

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storage.nbytes() for storage in saved.values())


def peak_bytes(one_pass: Callable[[], None]) -> int:
    """What one eager forward and backward adds at its peak to what is allocated on the GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_pass()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, layout: str, methods: Sequence[Method], settings: Settings) -> Iterator[Row]:
    """Rows without ratios, by route. In each round every method once, in an order drawn anew."""
    if any(method.is_compiled for method in methods):
        torch.compiler.reset()  # torch counts compilations by function, and all sequences share one `forward`
    inputs = Inputs(case, layout, dtype=settings.dtype, device=settings.device, seed=SEED)
    ready: list[tuple[Contestant, Row]] = []
    for method in methods:
        row = Row(case, layout, "", method, settings.dtype_name, settings.dtype.itemsize, settings.rounds)
        if settings.bandwidth is not None:
            row.floor_ms = floor_ms(case.elements, settings.dtype.itemsize, settings.bandwidth)
        with _fault_of(row):
            contestant = Contestant(method, case, settings)
            _prepare(contestant, row, inputs, settings)
            ready.append((contestant, row))
        if row.fault:
            yield from (replace(row, route=route) for route in settings.routes)
    for route in settings.routes:
        yield from _measure_route(route, ready, inputs, settings)
    ready.clear()
    if settings.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _prepare(contestant: Contestant, row: Row, inputs: Inputs, settings: Settings) -> None:
    x, grad_y = inputs.next()
    row.backend = computed_by(contestant.method, x)
    if contestant.method.is_ours:
        row.error = contestant.check(x)
    contestant.one_pass(x, grad_y)  # compiles, and tells early what does not run
    if not contestant.method.is_compiled:  # whose graphs would be compiled anew under the hooks
        row.saved_bytes = saved_bytes(contestant.call, list(contestant.layer.parameters()), x)
    if settings.device.type == "cuda":
        row.peak_bytes = peak_bytes(lambda: contestant.one_pass(x, grad_y))
    contestant.settle()


def _measure_route(
    route: str, ready: Sequence[tuple[Contestant, Row]], inputs: Inputs, settings: Settings
) -> list[Row]:
    rows = [(contestant, replace(row, route=route)) for contestant, row in ready]
    timers: dict[Contestant, Callable[[], float]] = {}
    for contestant, row in rows:
        with _fault_of(row):
            timers[contestant] = _timer(contestant, route, inputs, settings)
    taken: dict[Contestant, list[float]] = {contestant: [] for contestant in timers}
    order = random.Random(SEED)
    neighbours = Neighbours()
    for number in range(WARM_UP + settings.rounds):
        for contestant in order.sample(list(timers), len(timers)):
            milliseconds = timers[contestant]()
            contestant.settle()
            if number >= WARM_UP:
                taken[contestant].append(milliseconds)
    busy = neighbours.cores()
    for contestant, row in rows:
        if contestant in taken:
            row.time, row.busy_elsewhere = spread(taken[contestant]), busy
    return [row for _, row in rows]


def _timer(contestant: Contestant, route: str, inputs: Inputs, settings: Settings) -> Callable[[], float]:
    """A function that times the contestant's pass once: several passes between two events on a GPU."""

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
    contestant.settle()
    one = min(device_ms(call) for _ in range(3))
    repeats = repeats_for(one)
    contestant.settle()
    return lambda: device_ms(call, repeats) / passes


@contextlib.contextmanager
def _fault_of(row: Row) -> Iterator[None]:
    """What one contestant raises becomes its row's fault: the others are measured all the same."""
    try:
        yield
    except Wrong as fault:
        row.fault = f"wrong: {fault}"
    except Exception as error:
        row.fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]
