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

from typing import Any

import torch
from step_rounds import parse_arguments, run
from training_step import allocator_memory, with_fast_pooling

import micronorm as mn
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.ops.keyed import sample_keys
from micronorm.recipes.rcnn import build_rcnn
from micronorm.recipes.recipe import parts_to_convert
from micronorm.tasks.detection import detection_losses

METHODS = {
    "frozen BN": None,
    "BN": None,
    "GN": (mn.GN(), None),
    "GN+WS": (mn.GN(), mn.WS()),
    "BCN+WS": (mn.BCN(), mn.WS()),
}
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


def build(row: dict[str, Any], device: torch.device, tiny: bool) -> tuple[DetectorStep, float | None]:
    """Return the step of a row, and the peak of its memory in MB."""
    step = DetectorStep(row["method"], row["route"], device, tiny=tiny)
    for _ in range(3):
        step()
    if not step.on_gpu:
        return step, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return step, (torch.cuda.max_memory_allocated() - step.memory_before) / 1e6


def main() -> None:
    options = parse_arguments(__doc__, {"method": list(METHODS)})
    keys = [{"method": method} for method in options.method]
    run("detector_step.py", options, [keys], build, base="frozen BN", suffix="frozen_bn")


if __name__ == "__main__":
    main()
