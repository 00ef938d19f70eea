"""Training steps of a Mask R-CNN (ResNet-50, FPN) with two images of 800×1344: time and peak memory by norm.

    python benchmarks/detector_step.py --out benchmarks/results/detector_step.csv
    python benchmarks/detector_step.py --tiny --device cpu        # the same logic in seconds

A step is forward, `detection_losses`, backward and SGD in bfloat16 autocast and channels_last, on random images with
eight objects each. Both images share one forward of backbone and pyramid; proposals and heads run image by image.
Routes: "eager"; "captured", where backbone and pyramid are a CUDA graph; and "compiled", where torch compiles them.
Proposals and heads are eager in all of them. Both images share the standardized weights of the heads, as in training
by `micronorm train`. Methods take turns, round by round. Ratios are to frozen BatchNorm by the same route. "frozen BN"
has FrozenBatchNorm in the backbone and no norm elsewhere, as is usual from pretrained weights.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from training_step import allocator_memory, with_fast_pooling

import micronorm as mn
from micronorm.bench.measure import one_line
from micronorm.bench.results import number, provenance, write_csv
from micronorm.bench.timing import device_ms, host_ms, spread
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.ops.keyed import sample_keys
from micronorm.recipes.rcnn import build_rcnn, parts_to_convert
from micronorm.tasks.detection import detection_losses

METHODS = {
    "frozen BN": None,
    "BN": None,
    "GN": (mn.GN(), None),
    "GN+WS": (mn.GN(), mn.WS()),
    "BCN+WS": (mn.BCN(), mn.WS()),
}
ROUTES = ("eager", "captured", "compiled")
CLASSES = 81
OBJECTS = 8


class DetectorStep:
    """A detector, its optimizer and two images; a call takes one step."""

    def __init__(self, method: str, route: str, device: torch.device, *, tiny: bool) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.memory_before, _ = allocator_memory(device)
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"blocks": (1, 1, 1, 1), "channels": 32, "hidden": 64} if tiny else {}
        sizes = {"blocks": (3, 4, 6, 3), **sizes}
        model = build_rcnn(classes=CLASSES, masks=True, keep_size=True, frozen=method == "frozen BN", **sizes)
        if method == "frozen BN":
            _tame(model.backbone.body)
        if METHODS[method] is None:
            with_fast_pooling(model)
        else:
            norm, weight = METHODS[method]
            for part, own_norm in parts_to_convert(model, norm):
                mn.convert(part, own_norm, weight)
        self.model: Any = model.to(device).train().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=self.on_gpu)
        height, width = (64, 96) if tiny else (800, 1344)
        self.images = [torch.rand(3, height, width, device=device) for _ in range(2)]
        self.targets = [_objects(height, width, device) for _ in self.images]
        self.keys = sample_keys(torch.arange(2), seed=0, epoch=0).to(device)
        # A graph or compiled code of the backbone standardizes its own weights.
        self.weights = SharedWeights(self.model if route == "eager" else self.model.roi_heads)
        if route == "captured":
            self._capture_backbone(height, width)
        elif route == "compiled":
            self.model.backbone = torch.compile(self.model.backbone, dynamic=False)

    def _capture_backbone(self, height: int, width: int) -> None:
        sample = torch.rand(2, 3, height, width, device=self.device).to(memory_format=torch.channels_last)
        # The cast weights that autocast keeps would outlive the capture.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False):
            torch.cuda.make_graphed_callables(self.model.backbone, (sample,))

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.weights.shared():
            with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False):
                losses = detection_losses(self.model, self.images, self.targets, self.keys)
            (torch.stack(list(losses.values())).sum() / len(self.images)).backward()
        self.optimizer.step()


def _tame(body: torch.nn.Module) -> None:
    """Give frozen norms the scale of trained ones: with initial statistics, features grow by orders of magnitude."""
    for name, module in body.named_modules():
        if name.endswith("bn3"):
            module.weight.zero_()


def _objects(height: int, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return eight random boxes with full masks."""
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(OBJECTS, 2, generator=generator) * torch.tensor([0.6 * width, 0.6 * height])
    size = (0.1 + 0.25 * torch.rand(OBJECTS, 2, generator=generator)) * torch.tensor([width, height])
    boxes = torch.cat([corner, corner + size], 1).round()
    masks = torch.zeros(OBJECTS, height, width, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.long().tolist(), strict=True):
        mask[y1:y2, x1:x2] = 1
    labels = torch.randint(1, CLASSES, (OBJECTS,), generator=generator)
    return {"boxes": boxes.to(device), "labels": labels.to(device), "masks": masks.to(device)}


def measure(route: str, methods: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per method, which take turns."""
    device = torch.device(options.device)
    clock: Callable[..., float] = device_ms if device.type == "cuda" else host_ms
    steps, rows, times = {}, {}, {}
    for method in methods:
        rows[method] = {"method": method, "route": route}
        try:
            step = DetectorStep(method, route, device, tiny=options.tiny)
            for _ in range(3):
                step()
            if step.on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                step()
                torch.cuda.synchronize()
                rows[method]["peak_mb"] = (torch.cuda.max_memory_allocated() - step.memory_before) / 1e6
        except Exception as error:  # the other methods are still measured
            rows[method]["fault"] = one_line(error)
            continue
        steps[method], times[method] = step, []
    for _ in range(options.rounds):
        for method, step in steps.items():
            times[method].append(clock(step, options.repeats))
    for method, row in rows.items():
        if times.get(method):
            found = spread(times[method])
            row |= {"ms": found.median, "q25_ms": found.q25, "q75_ms": found.q75}
        yield row


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add each row's time and memory as a multiple of frozen BatchNorm's."""
    base = next((row for row in rows if row["method"] == "frozen BN" and "ms" in row), None)
    for row in rows if base is not None else ():
        for name in ("ms", "peak_mb"):
            if name in row:
                row[f"{name}_to_frozen_bn"] = row[name] / base[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3, help="steps per round and method")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network and small images, to try the script")
    parser.add_argument("--out", type=Path, help="write the results to this CSV file")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    routes = [route for route in options.route if options.device == "cuda" or route == "eager"]
    arguments = [a for a in sys.argv[1:] if not a.startswith("--out") and a != str(options.out)]
    command = shlex.join(["python", "benchmarks/detector_step.py", *arguments])
    facts = provenance(torch.device(options.device), command, packages=("torchvision", "triton"))
    rows: list[dict[str, Any]] = []
    for route in routes:
        new = list(measure(route, list(METHODS), options))
        compare(new)
        rows += new
        for row in new:
            print({name: number(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    if options.out is not None:
        columns = ["ms", "q25_ms", "q75_ms", "ms_to_frozen_bn", "peak_mb", "peak_mb_to_frozen_bn"]
        write_csv(
            options.out,
            [
                {"method": row["method"], "route": row["route"]}
                | {name: number(row.get(name), 3) for name in columns}
                | {"fault": row.get("fault", ""), **facts}
                for row in rows
            ],
        )


if __name__ == "__main__":
    main()
