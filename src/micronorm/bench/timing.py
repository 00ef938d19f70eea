"""Clocks of host and device, captured graphs, inputs to time with, and the bandwidth of a copy."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from micronorm.bench.cases import Case, lay_out

FOOTPRINT = 120e6
"""Bytes of inputs that the timed passes of a large case rotate over: more than twice a large GPU's L2 cache."""

LARGE = 64e6
"""Bytes of input and gradient together from which a case rotates. A training step finds smaller tensors in the cache,
because the layer before has just written them. Smaller cases therefore reuse one pair of tensors."""

CHUNK_MS = 2.0  # work between two events; the events themselves take microseconds
MOST_REPEATS = 100
GRAPH_PASSES = 20  # forward-backward passes captured in one graph if a pass is short

PASSES_AT_LEAST = 5
"""Passes over memory, forward and backward: 1 read and 1 write, then 2 reads and 1 write."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles, in milliseconds."""

    q25: float
    median: float
    q75: float


def spread(milliseconds: Sequence[float]) -> Spread:
    """Return median and quartiles of at least two values.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
        Spread(q25=2.0, median=3.0, q75=4.0)
    """
    return Spread(*statistics.quantiles(milliseconds, n=4, method="inclusive"))


def floor_ms(elements: int, itemsize: int, bandwidth: float) -> float:
    """Return the milliseconds of the least memory traffic of a forward and backward, at a bandwidth in bytes/s.

    Example:
        >>> floor_ms(10**9, 2, 4e12)
        2.5
    """
    return 1e3 * PASSES_AT_LEAST * elements * itemsize / bandwidth


def input_sets(case: Case, itemsize: int) -> int:
    """Return how many pairs of input and gradient the passes rotate over.

    Example:
        >>> [input_sets(Case(shape, ""), 2) for shape in ((64, 64, 112, 112), (64, 512, 28, 28), (16, 256, 56, 56))]
        [1, 2, 1]
    """
    pair = 2 * case.elements * itemsize
    return max(1, -(-int(FOOTPRINT) // pair)) if pair >= LARGE else 1


class Inputs:
    """Pairs of input and gradient in a layout, standard normal; `next` returns them in turn."""

    def __init__(self, case: Case, layout: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def draw() -> torch.Tensor:
            return lay_out(torch.randn(case.shape, device=device, generator=generator).to(dtype), layout)

        sets = input_sets(case, dtype.itemsize) if device.type == "cuda" else 1
        self.pairs = [(draw().requires_grad_(), draw()) for _ in range(sets)]
        self._turn = 0

    def __len__(self) -> int:
        return len(self.pairs)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next pair."""
        self._turn = (self._turn + 1) % len(self.pairs)
        return self.pairs[self._turn]


def host_ms(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the milliseconds of one call by the host's clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return 1e3 * (time.perf_counter() - start) / repeats


def device_ms(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the milliseconds of one call by the device's clock, between an event before the first and after the last.

    This includes the time in which the device waits for the host, as it does in an eager training step.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def repeats_for(milliseconds: float) -> int:
    """Return how many calls fill the time between two events.

    Example:
        >>> repeats_for(0.1), repeats_for(30.0)
        (20, 1)
    """
    return min(MOST_REPEATS, max(1, round(CHUNK_MS / max(milliseconds, 1e-6))))


def warm_up(one_pass: Callable[[], object], passes: int = 3) -> None:
    """Run passes on a side stream before a capture, so that allocations, lazy loading and autotuning happen first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(passes):
            one_pass()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


class Captured:
    """Passes captured in one CUDA graph; a call replays them all. Call `warm_up` first."""

    def __init__(self, one_pass: Callable[[], object], passes: int = 1) -> None:
        self.passes = passes
        self.one_pass = one_pass  # the graph reads the memory of its tensors, which must not be freed
        try:
            self.graph = self._capture(one_pass, passes)
        except RuntimeError:
            # The first capture in a process can fail while libraries are still being loaded.
            torch.cuda.synchronize()
            self.graph = self._capture(one_pass, passes)

    @staticmethod
    def _capture(one_pass: Callable[[], object], passes: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a watchdog thread, such as NCCL's, may query events during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(passes):
                one_pass()
        return graph

    def __call__(self) -> None:
        """Replay the graph."""
        self.graph.replay()


def copy_bandwidth(device: torch.device, *, size: int = 2**30, rounds: int = 20) -> float:
    """Return the bandwidth of a copy in bytes per second, read and written, as the median of some rounds.

    Two copies are tried, torch's own and an elementwise kernel, and the faster one counts. On an H200 the driver's copy
    reaches only two thirds of what kernels reach; a traffic floor computed from it would be too high.
    """
    source = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    clock = device_ms if device.type == "cuda" else host_ms
    best = 0.0
    for copy in (lambda: target.copy_(source), lambda: torch.neg(source, out=target)):
        for _ in range(3):
            copy()
        taken = statistics.median(clock(copy) for _ in range(rounds))
        best = max(best, 2 * size / (1e-3 * taken))
    return best
