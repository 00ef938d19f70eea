"""The engine on one GPU: ms per step against BatchNorm, and one image at a time against the batched form.

    python benchmarks/engine_gpu.py --data FOLDER --out benchmarks/results/engine_gpu.csv

ResNet-110, CIFAR-10, 128 samples per step, augmentation included. Rows of one table come from one process; each figure
is the median of `--rounds` rounds of `--steps` steps, in turn over the methods: a clock that moves moves them all.
"""

import argparse
import copy
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tables import write_csv

import micronorm as mn
from micronorm.engine.environment import environment
from micronorm.engine.graph import GraphedStep
from micronorm.engine.microbatch import MicroBatch
from micronorm.engine.parallel import OneRank
from micronorm.engine.step import Step, StepInputs
from micronorm.ops.keyed import permutation, sample_keys
from micronorm.recipes.networks import build_network
from micronorm.tasks.classification import Classification, open_classification

CUDA = torch.device("cuda", 0)
METHODS: dict[str, tuple[Any, Any]] = {
    "BN": (None, None),
    "GN": (mn.GN(groups=32, min_channels_per_group=4), None),
    "GN+WS": (mn.GN(groups=32, min_channels_per_group=4), mn.WS()),
    "BCN+WS step": (mn.BCN(groups=32, min_channels_per_group=4), mn.WS()),
}


def build(method: str, network: str) -> torch.nn.Module:
    norm, weight = METHODS[method]
    torch.manual_seed(0)
    model = build_network(network, classes=10)
    return model if norm is None else mn.convert(model, norm, weight)


def make_step(
    model: torch.nn.Module,
    task: Classification,
    *,
    micro_batch: int,
    step_batch: int,
    dtype: torch.dtype,
    graph: bool,
    channels_last: bool = False,
    lr: float = 0.1,
) -> Step | GraphedStep:
    model = model.to(CUDA, torch.float64 if dtype == torch.float64 else torch.float32).train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ranks = OneRank(CUDA)
    ranks.prepare(model)
    rate: Any = torch.tensor(lr, device=CUDA) if graph else lr
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, fused=graph)
    step = Step(
        model,
        task,
        optimizer,
        parallel=ranks,
        micro_batch=MicroBatch(micro_batch),
        dtype=dtype,
        channels_last=channels_last,
        step_batch=step_batch,
    )
    return GraphedStep(step, step_batch) if graph else step


def portions(task: Classification, *, step_batch: int, steps: int, first: int = 0):
    """The portions of successive steps, as the loop makes them."""
    per_epoch = len(task.train) // step_batch
    shares = []
    for k in range(first, first + steps):
        epoch, within = divmod(k, per_epoch)
        order = permutation(len(task.train), seed=0, epoch=epoch)
        shares.append((epoch, order[within * step_batch : (within + 1) * step_batch]))
    for (epoch, indices), batch in zip(shares, task.train.load(iter(shares), seed=0), strict=True):
        keys = sample_keys(indices, seed=0, epoch=epoch).to(CUDA)
        yield StepInputs(batch, keys, step_batch, step_batch)


def seconds_per_step(step: Step | GraphedStep, ready: list[StepInputs]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for portion in ready:
        step(portion)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(ready)


def table(task: Classification, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for dtype, channels_last in ((torch.float32, False), (torch.bfloat16, True)):
        for graph in (False, True):
            steps = {}
            for method in METHODS:
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                step = make_step(
                    build(method, options.network),
                    task,
                    micro_batch=128,
                    step_batch=128,
                    dtype=dtype,
                    graph=graph,
                    channels_last=channels_last,
                )
                for portion in portions(task, step_batch=128, steps=5):
                    step(portion)
                torch.cuda.synchronize()
                steps[method] = step, torch.cuda.max_memory_allocated() - held
            ready = list(portions(task, step_batch=128, steps=options.steps))
            seconds: dict[str, list[float]] = {method: [] for method in METHODS}
            for _ in range(options.rounds):
                for method, (step, _) in steps.items():
                    seconds[method].append(seconds_per_step(step, ready))
            for method, (_, peak) in steps.items():
                ms = [1000 * s for s in seconds[method]]
                median = statistics.median(ms)
                bn = statistics.median(1000 * s for s in seconds["BN"])
                row = {
                    "what": "step",
                    "network": options.network,
                    "dtype": str(dtype).removeprefix("torch."),
                    "layout": "nhwc" if channels_last else "nchw",
                    "mode": "cuda graph" if graph else "eager",
                    "method": method,
                    "samples": 128,
                    "micro_batch": 128,
                    "ms": f"{median:.2f}",
                    "ms_min": f"{min(ms):.2f}",
                    "ms_max": f"{max(ms):.2f}",
                    "to_bn": f"{median / bn:.2f}",
                    "img_per_s": f"{128e3 / median:.0f}",
                    "peak_mb": f"{peak / 2**20:.0f}",
                }
                print(row, flush=True)
                rows.append(row)
            del steps
            torch.cuda.empty_cache()
    return rows


def literal(task: Classification, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One image per forward and backward, as a loop does it, against the batched form of the same step."""
    rows = []
    for micro_batch, graph, repeats in ((1, False, 2), (128, False, 10), (128, True, 50)):
        step = make_step(
            build("BCN+WS step", options.network),
            task,
            micro_batch=micro_batch,
            step_batch=128,
            dtype=torch.float32,
            graph=graph,
        )
        ready = list(portions(task, step_batch=128, steps=repeats + 1))
        step(ready[0])
        seconds = seconds_per_step(step, ready[1:])
        row = {
            "what": "literal" if micro_batch == 1 else "batched",
            "network": options.network,
            "dtype": "float32",
            "layout": "nchw",
            "mode": "cuda graph" if graph else "eager",
            "method": "BCN+WS step",
            "samples": 128,
            "micro_batch": micro_batch,
            "ms": f"{1000 * seconds:.2f}",
            "img_per_s": f"{128 / seconds:.0f}",
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    found = 0.0
    for name, expected in a.items():
        if expected.is_floating_point():
            size = expected.abs().max().item()
            found = max(found, (b[name] - expected).abs().max().item() / size if size else 0.0)
    return found


def compare(task: Classification, options: argparse.Namespace) -> list[dict[str, Any]]:
    """`--compared` steps one image at a time, and the same steps whole; and a control that began one ulp away.

    The loop is literal: a forward and a backward from Python for each image. The other two are captured.
    """
    size = options.compared_samples
    start = build("BCN+WS step", options.network).double()
    ended, rows = {}, []
    for name, micro_batch in (("whole", size), ("one ulp", size), ("literal", 1)):
        model = copy.deepcopy(start)
        if name == "one ulp":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
        step = make_step(
            model,
            task,
            micro_batch=micro_batch,
            step_batch=size,
            dtype=torch.float64,
            graph=name != "literal",
            lr=options.compared_lr,
        )
        began = time.perf_counter()
        for k, portion in enumerate(portions(task, step_batch=size, steps=options.compared), start=1):
            step(portion)
            if k in (1, 10, 50, 100, options.compared):
                ended[name, k] = {key: value.clone() for key, value in model.state_dict().items()}
        took = time.perf_counter() - began
        drift = {k: largest_difference(ended["whole", k], ended[name, k]) for other, k in ended if other == name}
        row = {
            "what": f"{options.compared} steps of {size}, lr {options.compared_lr:.3g}: {name}",
            "network": options.network,
            "dtype": "float64",
            "layout": "nchw",
            "mode": "eager" if name == "literal" else "cuda graph",
            "method": "BCN+WS step",
            "samples": size,
            "micro_batch": micro_batch,
            "ms": f"{1000 * took / options.compared:.1f}",
            "img_per_s": f"{size * options.compared / took:.0f}",
            "difference": "; ".join(f"step {k}: {d:.1e}" for k, d in drift.items() if name != "whole"),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


PARTS = {"table": table, "literal": literal, "compare": compare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where CIFAR-10 lies")
    parser.add_argument("--unverified", action="store_true", help="take CIFAR's files as they are: a part will do")
    parser.add_argument("--network", default="cifar-resnet110")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which of the three to run")
    parser.add_argument("--compared", type=int, default=200)
    # A power of two: the same number in float32, which is what a captured step has.
    parser.add_argument("--compared-lr", type=float, default=2.0**-20)
    parser.add_argument("--compared-samples", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device, and this measures nothing else")
    task = open_classification("cifar10", options.data, device=CUDA, verify=not options.unverified)
    rows = [row for part in options.parts for row in PARTS[part](task, options)]
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
