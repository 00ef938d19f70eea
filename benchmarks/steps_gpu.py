"""Whole training steps on one GPU: BatchNorm against BCN + WS, time and peak memory; and one image at a time.

    python benchmarks/steps_gpu.py --out benchmarks/results/steps_gpu.csv
    python benchmarks/steps_gpu.py --tiny --device cpu          # the same logic in seconds, without graphs
    python benchmarks/steps_gpu.py --workload cifar-resnet110-128x32x32 --method BN BCN+WS "BCN+WS batch" --repeats 20

A step is that of training_step.py. Routes: "eager", "captured" (the whole step in a CUDA graph), "compiled" (the
network), and "compiled+captured". Methods take turns, round by round. The networks of a workload are in memory at once.
A method "one at a time" takes the same step image by image: from Python, or by replaying the graph of one image.
"""

from collections.abc import Callable
from typing import Any

import torch
from step_rounds import parse_arguments, prepare, run
from training_step import BN, FEW, METHODS, TINY, WORKLOADS, TrainingStep

ROUTES = ("eager", "captured", "compiled", "compiled+captured")
USUAL = ("BN", "BCN+WS", "BCN+WS shared")
_WORKLOADS = {workload.name: workload for workload in (*WORKLOADS, *FEW, *TINY)}


def build(row: dict[str, Any], device: torch.device, tiny: bool) -> tuple[Callable[[], object], float | None]:
    """Return what to time for a row, and the peak of its memory in MB."""
    compiled, captured = row["route"].startswith("compiled"), row["route"].endswith("captured")
    step = TrainingStep(_WORKLOADS[row["workload"]], METHODS[row["method"]], device, compiled=compiled)
    return prepare(step, captured=captured)


def main() -> None:
    choices = {"workload": list(_WORKLOADS), "method": list(METHODS), "route": ROUTES}
    usual = {"workload": [workload.name for workload in WORKLOADS], "method": USUAL}
    options = parse_arguments(__doc__, choices, usual)
    names = [workload.name for workload in TINY] if options.tiny else options.workload
    groups = [[{"workload": name, "method": method} for method in options.method] for name in names]
    run("steps_gpu.py", options, groups, build, base=BN.name, suffix="bn")


if __name__ == "__main__":
    main()
