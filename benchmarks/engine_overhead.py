"""What the engine costs: its step, record and meter included, against the loop one would write by hand. On the CPU.

    python benchmarks/engine_overhead.py --steps 100 --out benchmarks/results/engine_overhead.csv

ResNet-20, 32 images of 3×32×32 per step, float32, one thread. The engine runs the whole of `engine.loop.train`, with
a run directory. Its data set hands out batches that lie ready; before each it lets the bare loop take one step of its
own on the same batch. So the two take turns, step by step, and what disturbs the machine disturbs both.

`ratio` is the median over steps of engine/bare, `cpu_ratio` the same of CPU time, which other processes disturb less.
"""

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tables import write_csv
from torch import Tensor, nn

import micronorm as mn
from micronorm.bench.timing import QUIET, Neighbours
from micronorm.engine.environment import environment
from micronorm.engine.loop import train
from micronorm.engine.optimization import SGD, Constant
from micronorm.engine.settings import Execution, Settings
from micronorm.recipes.networks import build_network
from micronorm.tasks.classification import Classification

BATCH = 32
WARM_UP = 5  # steps: the first allocate, and open the record
METHODS: dict[str, tuple[Any, Any] | None] = {"BN": None, "BCN+WS": (mn.BCN(), mn.WS())}
Batch = tuple[Tensor, Tensor]


def build(method: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_network("cifar-resnet20", classes=10)
    specs = METHODS[method]
    return model if specs is None else mn.convert(model, *specs)


class Bare:
    """The loop one would write by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels, reduction="sum") / len(labels)
        loss.backward()
        self.optimizer.step()


@dataclass
class Clock:
    """Wall and CPU seconds of the steps of one kind."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _started: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall.append(time.perf_counter() - self._started[0])
        self.cpu.append(time.process_time() - self._started[1])

    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.wall[WARM_UP:])


class Turns:
    """Samples whose loading times the engine's steps, and takes a bare step between any two of them."""

    def __init__(self, samples: int, bare: Bare) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(samples, 3, 32, 32, generator=generator)
        self.labels = torch.randint(10, (samples,), generator=generator)
        self.bare, self.engine_clock, self.bare_clock = bare, Clock(), Clock()

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, shares: Iterable[tuple[int, Tensor]], *, seed: int) -> Iterator[Batch]:
        for _, indices in shares:
            batch = self.images[indices], self.labels[indices]
            if torch.is_grad_enabled():  # not in evaluation
                self.bare_clock.start()
                self.bare.step(*batch)
                self.bare_clock.stop()
            self.engine_clock.start()
            yield batch
            self.engine_clock.stop()


def measure(method: str, *, steps: int) -> dict[str, object]:
    samples = Turns(BATCH * (WARM_UP + steps + 1), Bare(build(method)))  # one step is left: no epoch ends in between
    task = Classification(samples, Turns(BATCH, samples.bare), classes=10)
    settings = Settings(epochs=1, step_batch=BATCH, optimizer=SGD(0.1), schedule=Constant())
    execution = Execution(device=torch.device("cpu"), steps=WARM_UP + steps)
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        train(build(method), task, settings, execution, out=Path(folder))
    busy = neighbours.cores()
    # The last step's clock ran on through evaluation and checkpoint.
    pairs = [
        [e / b for e, b in zip(engine[WARM_UP:-1], bare[WARM_UP:], strict=False)]
        for engine, bare in (
            (samples.engine_clock.wall, samples.bare_clock.wall),
            (samples.engine_clock.cpu, samples.bare_clock.cpu),
        )
    ]
    return {
        "method": method,
        "network": "cifar-resnet20",
        "batch": BATCH,
        "dtype": "float32",
        "steps": steps,
        "bare_ms": f"{samples.bare_clock.median_ms():.3f}",
        "engine_ms": f"{samples.engine_clock.median_ms():.3f}",
        "ratio": f"{statistics.median(pairs[0]):.4f}",
        "cpu_ratio": f"{statistics.median(pairs[1]):.4f}",
        "busy_elsewhere": "" if busy is None else f"{busy:.2f}",
    }


def facts(args: argparse.Namespace) -> dict[str, object]:
    return {
        "cpu": environment()["cpu"]["model"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "micronorm": mn.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/engine_overhead.py --steps {args.steps}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="timed steps of each loop")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file; without it they are only printed")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}")
    torch.set_num_threads(1)
    rows = []
    for method in METHODS:
        row = measure(method, steps=args.steps) | facts(args)
        busy = float(str(row["busy_elsewhere"] or 0))
        note = f"; preliminary: other processes kept {busy:.1f} cores busy" if busy > QUIET else ""
        print(
            f"{method}: bare {row['bare_ms']} ms, engine {row['engine_ms']} ms, ratio {row['ratio']}, "
            f"of CPU time {row['cpu_ratio']}{note}",
            flush=True,
        )
        rows.append(row)
    if args.out is not None:
        write_csv(args.out, rows)


if __name__ == "__main__":
    main()
