"""Weight Standardization of all ResNet-50 convolutions on one GPU: forward and backward, in a CUDA graph.

    python benchmarks/ws_gpu.py --out benchmarks/results/ws_gpu.csv

53 weights, 23.5 million float32 parameters; bfloat16 out, bfloat16 gradients in, float32 gradients out. Every method is
checked against float64 before it is timed. A figure is the median of `--replays` replays, with the quartiles; methods
take turns over `--rounds` rounds, so that a clock that moves moves them all. `to_floor` is the multiple of the time
that one read of W, g and W again and one write of Ŵ and dW take at the bandwidth of a copy measured in this run.
"""

import argparse
import functools
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tables import write_csv
from torch import Tensor

from micronorm.engine.environment import environment
from micronorm.ops.weight import launch, tables, weight_standardize, weight_standardize_many

CUDA = torch.device("cuda", 0)
EPS = 1e-5
Standardize = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def resnet50_shapes() -> list[tuple[int, int, int, int]]:
    """O×I×k×k of its convolutions: the stem, and four stages of bottlenecks."""
    shapes = [(64, 3, 7, 7)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                shapes.append((4 * width, channels, 1, 1))
            channels = 4 * width
    return shapes


def timms(weights: Sequence[Tensor]) -> list[Tensor]:
    """The functional form of timm's StdConv2d, and autocast's cast after it."""
    whats = []
    for w in weights:
        rows = F.batch_norm(w.reshape(1, w.shape[0], -1), None, None, training=True, momentum=0.0, eps=EPS)
        whats.append(rows.reshape_as(w).bfloat16())
    return whats


METHODS: dict[str, Standardize] = {
    "ours, one launch": lambda ws: weight_standardize_many(ws, dtype=torch.bfloat16, backend="triton"),
    "ours, per layer": lambda ws: [weight_standardize(w, dtype=torch.bfloat16, backend="triton") for w in ws],
    "timm StdConv2d": timms,
    "reference": lambda ws: [weight_standardize(w, dtype=torch.bfloat16, backend="reference") for w in ws],
}


class Problem:
    """The weights, and gradients to go with them."""

    def __init__(self, *, channels_last: bool) -> None:
        torch.manual_seed(0)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.weights = [
            (torch.randn(shape, device=CUDA) * 0.05 + 0.01).to(memory_format=layout).requires_grad_()
            for shape in resnet50_shapes()
        ]
        self.grads = [torch.randn_like(w, dtype=torch.bfloat16) for w in self.weights]

    def run(self, method: Standardize) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        whats = method(self.weights)
        return whats, torch.autograd.grad(whats, self.weights, self.grads)

    def errors(self, method: Standardize) -> tuple[float, float]:
        """The largest errors of Ŵ and of dW, each against the maximum of its float64 value."""
        found = [0.0, 0.0]
        whats, dws = self.run(method)
        for w, g, what, dw in zip(self.weights, self.grads, whats, dws, strict=True):
            wide = w.detach().double().requires_grad_()
            exact = weight_standardize(wide, backend="reference")
            (exact_dw,) = torch.autograd.grad(exact, wide, g.double())
            for k, (a, b) in enumerate(((what, exact), (dw, exact_dw))):
                error = (a.double() - b).abs().max() / b.abs().max()
                found[k] = max(found[k], error.item()) if error.isfinite() else float("nan")
        return found[0], found[1]


class Leaves:
    """What `SharedWeights` does: write into tensors that stay, gradients of which come from elsewhere."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.leaves = [torch.empty_like(w, dtype=torch.bfloat16) for w in problem.weights]

    @torch.no_grad()
    def __call__(self) -> None:
        weights = self.problem.weights
        stats = launch.forward(weights, self.leaves, center=True, scale=True, eps=EPS, lasting=True)
        launch.backward(self.problem.grads, weights, stats, center=True, scale=True)


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """By the device's clock, one figure per call."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def eager_milliseconds(run: Callable[[], Any], repeats: int = 10) -> float:
    """By the host's clock: what a loop without a graph waits for."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of a copy too large for the cache."""
    source = torch.empty(2**29, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(milliseconds(lambda: target.copy_(source), 20))


def check(name: str, errors: tuple[float, float]) -> None:
    """bfloat16 rounds Ŵ by half an eps; dW is float32, and the terms of its sums are larger than itself."""
    limits = torch.finfo(torch.bfloat16).eps, 64 * torch.finfo(torch.float32).eps
    if name == "timm StdConv2d":
        limits = limits[0], 1e-4  # torch's BatchNorm adds up in its own order
    if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
        raise SystemExit(f"{name} is wrong: errors {errors[0]:.2e} and {errors[1]:.2e}, allowed {limits}")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    return [row for last in (False, True) for row in measure_layout(options, bandwidth, channels_last=last)]


def measure_layout(options: argparse.Namespace, bandwidth: float, *, channels_last: bool) -> list[dict[str, Any]]:
    problem = Problem(channels_last=channels_last)
    floor = sum(w.numel() for w in problem.weights) * (4 + 2 + 4 + 2 + 4) / bandwidth
    runs: dict[str, Callable[[], Any]] = {}
    facts: dict[str, dict[str, str]] = {}
    for name, method in METHODS.items():
        errors = problem.errors(method)
        check(name, errors)
        facts[name] = {"error": f"{errors[0]:.2e}", "error_dw": f"{errors[1]:.2e}"}
        runs[name] = functools.partial(problem.run, method)
    runs["ours, into leaves"], facts["ours, into leaves"] = Leaves(problem), {}
    for name, run in runs.items():
        facts[name]["eager_ms"] = f"{eager_milliseconds(run):.3f}"
    graphs = {name: captured(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(options.rounds):
        for name, graph in graphs.items():
            times[name] += milliseconds(graph.replay, options.replays)
    rows = []
    for name, ms in times.items():
        low, median, high = statistics.quantiles(ms, n=4)
        row = {
            "weights": f"ResNet-50, {len(problem.weights)} convolutions",
            "layout": "channels_last" if channels_last else "contiguous",
            "method": name,
            "ms": f"{median:.4f}",
            "ms_q1": f"{low:.4f}",
            "ms_q3": f"{high:.4f}",
            "to_floor": f"{median / floor:.2f}",
            "copy_tb_per_s": f"{bandwidth / 1e9:.2f}",
            **facts[name],
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def split(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The two launches apart, without tables and allocations around them."""
    problem = Problem(channels_last=True)
    leaves = [torch.empty_like(w, dtype=torch.bfloat16) for w in problem.weights]
    settings = {"center": True, "scale": True}

    @torch.no_grad()
    def forward() -> Tensor:
        return launch.forward(problem.weights, leaves, **settings, eps=EPS, lasting=True)

    stats = forward()

    @torch.no_grad()
    def backward() -> Any:
        return launch.backward(problem.grads, problem.weights, stats, **settings)

    rows = []
    for name, run in (("forward", forward), ("backward", backward)):
        low, median, high = statistics.quantiles(milliseconds(captured(run).replay, options.replays), n=4)
        row = {"method": f"ours, {name} alone", "ms": f"{median:.4f}", "ms_q1": f"{low:.4f}", "ms_q3": f"{high:.4f}"}
        row["layout"] = f"channels_last; tile {tables.TILE}"
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device, and this measures nothing else")
    rows = measure(options) + split(options)
    found = environment()
    facts = {
        "gpu": found["gpu"]["name"],
        "torch": found["torch"],
        "cuda": found["gpu"]["cuda"],
        "date": found["date"][:10],
        "command": shlex.join(["python", *sys.argv]),
    }
    if options.out is not None:
        write_csv(options.out, [{**row, **facts} for row in rows])


if __name__ == "__main__":
    main()
