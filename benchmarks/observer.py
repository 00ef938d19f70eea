"""Measure the cost of `mn.observe`: the same training loop with and without it, on the CPU or on a GPU.

    python benchmarks/observer.py --blocks 6 --out benchmarks/results/observer_cpu.csv
    python benchmarks/observer.py --device cuda --network resnet50 --batch 64 --size 224 --dtype bfloat16 \
        --blocks 20 --out benchmarks/results/observer_gpu.csv

Three training loops with equal networks take turns: without an observer, with one, and with one that also writes
TensorBoard events. A block of each has `every` steps, one of them observed. On the CPU the loops take turns step by
step, on a GPU block by block, because a turn starts and ends with an idle device. Their order is reversed each time, so
that drift cancels. On a GPU the batch is already on the device, and the layout is channels_last.

Columns: `overhead` is the median over blocks of observed/bare − 1 of a block's time. `cpu_overhead` is the same for CPU
time, which other processes disturb less (on a GPU it includes waiting). `look_ms` is the mean time of an observed step,
`step_ms` that of another step (CPU time if the CPU computes), and `by_look` is (look − step)/(every·step). The target
is 0.03 at every = 50.
"""

import argparse
import datetime
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.bench.results import write_csv
from micronorm.bench.timing import QUIET, BackgroundLoad
from micronorm.engine.environment import environment
from micronorm.engine.settings import DTYPES
from micronorm.recipes.networks import build_network

METHODS: dict[str, tuple[Any, Any] | None] = {"BN": None, "GN+WS": (mn.GN(), mn.WS()), "BCN+WS": (mn.BCN(), mn.WS())}
WARM_UP = 5
SINGLES = 5  # single steps of each loop after each block
TARGET = 0.03


class Loop:
    """A training loop, observed or not."""

    def __init__(self, args: argparse.Namespace, method: str, writer: Callable[[], Any] | None, observed: bool) -> None:
        torch.manual_seed(0)
        model = build_network(args.network, classes=10)
        specs = METHODS[method]
        model = model if specs is None else mn.convert(model, *specs)
        self.device, self.dtype = torch.device(args.device), DTYPES[args.dtype]
        images = torch.randn(args.batch, 3, args.size, args.size)
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self.images = images.to(self.device, memory_format=layout)
        self.labels = torch.randint(10, (args.batch,), device=self.device)
        self.model: nn.Module = model.to(self.device, memory_format=layout).train()  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.writer = None if writer is None else writer()
        self.observed, self.rows = observed, 0

    def watched(self, every: int) -> AbstractContextManager[Any]:
        if not self.observed:
            return nullcontext()
        # Count on as in one run: every tenth row has histograms.
        start, self.rows = self.rows * every, self.rows + 1
        return mn.observe(self.model, every=every, writer=self.writer, sink=lambda row: None, start=start)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def turn(self, steps: int) -> tuple[float, float]:
        """Wall and CPU seconds of so many steps."""
        self.settle()
        began = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        self.settle()
        return time.perf_counter() - began[0], time.process_time() - began[1]


def take_turns(loops: dict[str, Loop], *, every: int, turn: int) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of one block of each loop."""
    spent: dict[str, tuple[float, float]] = dict.fromkeys(loops, (0.0, 0.0))
    with ExitStack() as stack:
        for loop in loops.values():
            stack.enter_context(loop.watched(every))
        for index in range(every // turn):
            for name in list(loops) if index % 2 == 0 else list(reversed(loops)):
                wall, cpu = loops[name].turn(turn)
                spent[name] = spent[name][0] + wall, spent[name][1] + cpu
    return spent


def measure(args: argparse.Namespace, method: str, folder: str) -> list[dict[str, object]]:
    def writer() -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(folder)

    loops = {
        "none": Loop(args, method, None, observed=False),
        "rows": Loop(args, method, None, observed=True),
        "rows and events": Loop(args, method, writer, observed=True),
    }
    take_turns(loops, every=WARM_UP, turn=1)
    on_gpu = args.device == "cuda"
    neighbours = BackgroundLoad()
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    singles: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(args.blocks):
        order = loops if index % 2 == 0 else dict(reversed(loops.items()))
        for name, spent in take_turns(order, every=args.every, turn=args.every if on_gpu else 1).items():
            blocks[name].append(spent)
        for _ in range(SINGLES):
            for name, spent in take_turns(loops, every=1, turn=1).items():
                singles[name].append(spent[0 if on_gpu else 1])
    busy = neighbours.cores()
    rows = []
    for name in ("rows", "rows and events"):
        pairs = [(o[0] / b[0] - 1, o[1] / b[1] - 1) for o, b in zip(blocks[name], blocks["none"], strict=True)]
        # Means, because one of ten observed steps writes histograms.
        step, observed = (statistics.fmean(singles[kind]) for kind in ("none", name))
        rows.append(
            {
                "method": method,
                "network": args.network,
                "batch": args.batch,
                "size": args.size,
                "dtype": args.dtype,
                "gives": name,
                "every": args.every,
                "blocks": args.blocks,
                "step_ms": f"{1e3 * step:.3f}",
                "look_ms": f"{1e3 * observed:.3f}",
                "by_look": f"{(observed / step - 1) / args.every:.4f}",
                "overhead": f"{statistics.median(wall for wall, _ in pairs):.4f}",
                "cpu_overhead": f"{statistics.median(cpu for _, cpu in pairs):.4f}",
                "busy_elsewhere": "" if busy is None else f"{busy:.2f}",
            }
        )
    return rows


def facts(device: str) -> dict[str, object]:
    found = environment()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else found["cpu"]["model"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "micronorm": mn.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/observer.py {shlex.join(sys.argv[1:])}".strip(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=METHODS, help="a method; all by default")
    parser.add_argument("--network", default="cifar-resnet20", help="as the recipes name them")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--dtype", choices=[name for name in DTYPES if name != "float64"], default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--every", type=int, default=50, help="steps between two observed steps")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each loop")
    parser.add_argument("--out", type=Path, help="also write the rows to this CSV file")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = args.device == "cuda"
    rows: list[dict[str, object]] = []
    for method in args.method or METHODS:
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(args, method, folder):
                busy = float(str(row["busy_elsewhere"] or 0))
                note = f"; preliminary: other processes kept {busy:.1f} cores busy" if busy > QUIET else ""
                over = "" if float(str(row["overhead"])) <= TARGET else f", above the target of {TARGET}"
                print(
                    f"{method}, {row['gives']}: step {row['step_ms']} ms, observed {row['look_ms']} ms "
                    f"({row['by_look']}), overhead {row['overhead']}, of CPU time {row['cpu_overhead']}{over}{note}",
                    flush=True,
                )
                rows.append(row | facts(args.device))
    if args.out is not None:
        write_csv(args.out, rows)


if __name__ == "__main__":
    main()
