"""Training steps of a residual 3-D U-Net with two volumes of 128×128×128: time and peak memory by norm and layout.

    python benchmarks/volume_step.py --out benchmarks/results/volume_step.csv
    python benchmarks/volume_step.py --tiny --device cpu        # the same logic in seconds

The network has the widths and depths of nnU-Net's residual encoder for this patch size, LeakyReLU and deep supervision.
A step is forward, Dice + cross entropy, backward and SGD in bfloat16 autocast, on random volumes. The baseline is
torch's InstanceNorm3d and LeakyReLU in place, as in nnU-Net; ratios are to the faster of its two layouts by the same
route. Routes: "eager", "captured" (the whole step in a CUDA graph) and "compiled" (the network). Methods take turns,
round by round.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from training_step import allocator_memory

import micronorm as mn
from micronorm.bench.measure import one_line
from micronorm.bench.results import number, provenance, write_csv
from micronorm.bench.timing import Captured, device_ms, host_ms, spread, warm_up
from micronorm.recipes.unet3d import ResidualUNet3d
from micronorm.tasks.volumes import Volumes

TORCH = "IN of torch"
METHODS = {
    TORCH: None,
    "IN": (mn.IN(), None),
    "GN": (mn.GN(), None),
    "BCN": (mn.BCN(), None),
    "BCN+WS": (mn.BCN(), mn.WS()),
}
LAYOUTS = {"nhwc": torch.channels_last_3d, "nchw": torch.contiguous_format}
ROUTES = ("eager", "captured", "compiled")
NAMES = ("background", "Anterior", "Posterior")
LEARNING_RATE = 1e-4


class VolumeStep:
    """A network, its optimizer and two volumes; a call takes one step."""

    def __init__(self, method: str, layout: str, route: str, device: torch.device, *, tiny: bool) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.memory_before, _ = allocator_memory(device)
        torch.manual_seed(0)
        widths, blocks, side = ((8, 16, 16), (1, 1, 1), 16) if tiny else _RESIDUAL_ENCODER
        network: Any = ResidualUNet3d(widths=widths, blocks=blocks, classes=len(NAMES))
        if METHODS[method] is None:
            use_instance_norm(network)
        else:
            mn.convert(network, *METHODS[method])
        network = network.to(device).train().to(memory_format=LAYOUTS[layout])
        rate: Any = torch.tensor(LEARNING_RATE, device=device) if on_gpu else LEARNING_RATE
        self.optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.99, nesterov=True, fused=on_gpu)
        self.network = torch.compile(network, dynamic=False) if route == "compiled" else network
        volumes = torch.randn(2, 1, *[side] * 3, device=device).contiguous(memory_format=LAYOUTS[layout])
        self.batch = (volumes, torch.randint(0, len(NAMES), (2, *[side] * 3), device=device))
        self.task = Volumes(None, None, names=NAMES, patch=(side,) * 3)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # The cast weights that autocast keeps would outlive a capture.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = self.task.loss(self.network, self.batch)
        (loss.sum / loss.count).backward()
        self.optimizer.step()


_RESIDUAL_ENCODER = ((32, 64, 128, 256, 320, 320), (1, 3, 4, 6, 6, 6), 128)


def use_instance_norm(network: nn.Module) -> None:
    """Replace each BatchNorm3d by torch's InstanceNorm3d with an affine, as nnU-Net builds it."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm3d):
                setattr(module, name, nn.InstanceNorm3d(child.num_features, affine=True))


def prepare(step: VolumeStep, route: str, row: dict[str, Any]) -> Callable[[], object]:
    """Return what to time, and add the peak of its memory to the row."""
    if step.device.type != "cuda":
        step()
        return step
    warm_up(step)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step.optimizer.zero_grad(set_to_none=True)
    call: Callable[[], object] = Captured(step) if route == "captured" else step
    call()
    torch.cuda.synchronize()
    row["peak_mb"] = (torch.cuda.max_memory_allocated() - step.memory_before) / 1e6
    return call


def measure(route: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per method and layout, which take turns."""
    device = torch.device(options.device)
    clock: Callable[..., float] = device_ms if device.type == "cuda" else host_ms
    rows, calls, times = {}, {}, {}
    for key in ((method, layout) for layout in options.layout for method in METHODS):
        rows[key] = {"method": key[0], "layout": key[1], "route": route}
        try:
            step = VolumeStep(*key, route, device, tiny=options.tiny)
            calls[key], times[key] = prepare(step, route, rows[key]), []
        except Exception as error:  # the other methods are still measured
            rows[key]["fault"] = one_line(error)
    for _ in range(options.rounds):
        for key, call in calls.items():
            times[key].append(clock(call, options.repeats))
    for key, row in rows.items():
        if times.get(key):
            found = spread(times[key])
            row |= {"ms": found.median, "q25_ms": found.q25, "q75_ms": found.q75}
        yield row


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add each row's time and memory as a multiple of torch's, in the layout where torch is faster."""
    base = min((row for row in rows if row["method"] == TORCH and "ms" in row), key=lambda row: row["ms"], default=None)
    for row in rows if base is not None else ():
        for name in ("ms", "peak_mb"):
            if name in row:
                row[f"{name}_to_torch"] = row[name] / base[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3, help="steps per round and method")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network and small volumes, to try the script")
    parser.add_argument("--out", type=Path, help="write the results to this CSV file")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    routes = [route for route in options.route if options.device == "cuda" or route == "eager"]
    arguments = [a for a in sys.argv[1:] if not a.startswith("--out") and a != str(options.out)]
    command = shlex.join(["python", "benchmarks/volume_step.py", *arguments])
    facts = provenance(torch.device(options.device), command, packages=("triton",))
    rows: list[dict[str, Any]] = []
    for route in routes:
        new = list(measure(route, options))
        compare(new)
        rows += new
        for row in new:
            print({name: number(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    if options.out is not None:
        columns = ["ms", "q25_ms", "q75_ms", "ms_to_torch", "peak_mb", "peak_mb_to_torch"]
        named = ("method", "layout", "route")
        write_csv(
            options.out,
            [
                {name: row[name] for name in named}
                | {name: number(row.get(name), 3) for name in columns}
                | {"fault": row.get("fault", ""), **facts}
                for row in rows
            ],
        )


if __name__ == "__main__":
    main()
