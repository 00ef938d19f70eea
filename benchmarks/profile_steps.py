"""Where the time of a training step goes on one GPU: the kernels of BatchNorm's steps beside those of BCN + WS.

    python benchmarks/profile_steps.py --out benchmarks/results/profile_steps.csv

The steps are those of training_step.py, captured as CUDA graphs. torch's profiler gives the time of every kernel of a
few replays. The times are summed by purpose, which the kernel's name shows. `idle` is the rest of a replay's wall time
without the profiler: the gaps between kernels, less what overlapped.
"""

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from training_step import BN, BN_COMPILED, SHARED, SHARED_COMPILED, WORKLOADS, TrainingStep, Workload

from micronorm.bench.results import provenance, write_csv
from micronorm.bench.timing import Captured, device_ms, spread, warm_up

METHODS = {method.name: method for method in (BN, BN_COMPILED, SHARED, SHARED_COMPILED)}
REPLAYS = 5
KINDS = (
    ("weights", r"^(forward|backward)_(one|many)"),
    (
        "norm, per element",
        r"^((forward|backward)_(whole|twice|apply|part)|moments_part|triton_|.*(batch_norm|bn_(fw|bw)))",
    ),
    ("norm, per channel", r"^((forward|backward)_numbers|\w+_estimates|check_batches|gather_|sum_samples|commit)"),
    ("optimizer", r"multi_tensor_apply|FusedSgd"),
    ("pooling", r"pool"),
    (
        "convolution, matmul",
        r"conv|gemm|cutlass|xmma|cudnn|nvjet|dgrad|wgrad|fprop|splitK|cublas|nchwToNhwc|nhwcToNchw|product_and_other",
    ),
    ("sums, casts, copies", r"elementwise|Memcpy|Memset|copy|fill|reduce|cat"),
)
"""Purposes of kernels, by the first pattern that matches the name. Inductor's kernels are BatchNorm's."""


def kind_of(name: str) -> str:
    """Return the purpose of a kernel.

    Example:
        >>> kind_of("forward_apply"), kind_of("sm90_xmma_fprop_implicit_gemm"), kind_of("mystery")
        ('norm, per element', 'convolution, matmul', 'rest')
    """
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "rest")


@dataclass(frozen=True)
class Profile:
    """Microseconds and counts of a step's kernels by name, and the microseconds of a step without the profiler."""

    wall: float
    times: Counter[str]
    counts: Counter[str]

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """Return microseconds and number of kernels of every kind, the largest first, then the idle rest."""
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for name, time in self.times.items():
            times[kind_of(name)] += time
            counts[kind_of(name)] += self.counts[name]
        found = {kind: (time, counts[kind]) for kind, time in times.most_common()}
        return found | {"idle": (self.wall - sum(times.values()), 0)}


def measure(workload: Workload, method: str) -> Profile:
    """Capture one method's step, time its replays, and profile some."""
    step = TrainingStep(workload, METHODS[method], torch.device("cuda"))
    warm_up(step)
    step.optimizer.zero_grad(set_to_none=True)
    replay = Captured(step)
    wall = spread([device_ms(replay, 10) for _ in range(5)]).median
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiler.key_averages():
        if event.self_device_time_total:
            times[event.key] += event.self_device_time_total / REPLAYS
            counts[event.key] += event.count / REPLAYS
    return Profile(1e3 * wall, times, counts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workload", nargs="+", choices=names, default=names)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--top", type=int, default=0, help="also print this many kernels of each step, by their names")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device, and this script profiles GPU kernels")
    torch.backends.cudnn.benchmark = True
    command = shlex.join(["python", "benchmarks/profile_steps.py", "--workload", *options.workload])
    rows: list[dict[str, object]] = []
    for workload in (w for w in WORKLOADS if w.name in options.workload):
        for method in options.method:
            torch.compiler.reset()
            found = measure(workload, method)
            print(f"{workload.name}  {method}: {found.wall / 1e3:.3f} ms", flush=True)
            for kind, (time, count) in found.by_kind().items():
                print(f"    {kind:<22}{time:>10.1f} µs {count:>8.1f} kernels", flush=True)
                row = {"workload": workload.name, "method": method, "step_us": f"{found.wall:.1f}", "kind": kind}
                rows.append(row | {"us": f"{time:.1f}", "kernels": f"{count:.1f}"})
            for name, time in found.times.most_common(options.top):
                print(f"        {time:>9.1f} µs {found.counts[name]:>7.1f}  {name[:110]}", flush=True)
            if options.out is not None:
                known = provenance(torch.device("cuda"), command, packages=("torchvision", "triton"))
                write_csv(options.out, [{**row, **known} for row in rows])


if __name__ == "__main__":
    sys.exit(main())
