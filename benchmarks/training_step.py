"""A training step of a network with BatchNorm, or converted to BCN + WS or GN, for steps_gpu.py.

Forward, cross entropy, backward and SGD with momentum, in bfloat16 autocast and channels_last, on random images. The
learning rate is a tensor on the device, as a captured step with a schedule needs it. All networks use the same
max-pooling kernel, so that ratios compare normalization alone.
"""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.bench.timing import Captured
from micronorm.convert import pool_by_kernel
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.recipes.networks import build_network


@dataclass(frozen=True)
class Workload:
    """A network and a batch."""

    network: str
    samples: int
    size: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.network}-{self.samples}x{self.size[0]}x{self.size[1]}"


WORKLOADS = (
    Workload("resnet50", 64, (224, 224)),
    Workload("resnet50", 2, (800, 1344)),
    Workload("resnet50", 1, (224, 224)),
    Workload("cifar-resnet110", 128, (32, 32)),
)
FEW = (  # images: enough for the time of one, if they are taken one at a time
    Workload("resnet50", 8, (224, 224)),
    Workload("cifar-resnet110", 8, (32, 32)),
    Workload("cifar-resnet20", 8, (32, 32)),
)
TINY = (Workload("resnet18", 2, (64, 64)), Workload("cifar-resnet20", 4, (16, 16)))

_BCN, _WS = mn.BCN(), mn.WS()


@dataclass(frozen=True)
class StepMethod:
    """What a step computes: with BatchNorm (no `norm`) or converted; and how.

    Weights are shared or not, activations recomputed or not, and images taken at once or one at a time (`literal`).
    """

    name: str
    norm: mn.BCN | mn.GN | None = _BCN
    weight: mn.WS | None = _WS
    shares: bool = False
    recomputes: bool = False
    literal: bool = False


BN = StepMethod("BN", norm=None, weight=None)
METHODS = {
    method.name: method
    for method in (
        BN,
        StepMethod("BCN+WS"),
        StepMethod("BCN+WS shared", shares=True),
        StepMethod("BCN+WS recompute", recomputes=True),
        StepMethod("BCN+WS shared recompute", shares=True, recomputes=True),
        StepMethod("BCN+WS batch", norm=mn.BCN(statistics="batch")),
        StepMethod("BCN+WS sequential", norm=mn.BCN(statistics="sequential")),
        StepMethod("GN one at a time", norm=mn.GN(), weight=None, literal=True),
        StepMethod("GN+WS one at a time", norm=mn.GN(), literal=True),
        StepMethod("BCN+WS one at a time", literal=True),
        StepMethod("BCN+WS shared one at a time", shares=True, literal=True),
    )
}


class TrainingStep:
    """A model, its optimizer and a batch; a call takes one step."""

    def __init__(self, workload: Workload, method: StepMethod, device: torch.device, *, compiled: bool = False) -> None:
        self.workload, self.method, self.device = workload, method, device
        self.memory_before, _ = allocator_memory(device)
        torch.manual_seed(0)
        model = build_model(workload, method).to(device).train()
        self.model: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.recomputation: Any = mn.recompute(self.model) if method.recomputes else None
        self.weights = SharedWeights(self.model) if method.shares else None
        self.call: Callable[..., torch.Tensor] = torch.compile(self.model, dynamic=False) if compiled else self.model
        on_gpu = device.type == "cuda"
        rate: Any = torch.tensor(0.01, device=device) if on_gpu else 0.01
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, fused=on_gpu
        )
        if isinstance(method.norm, mn.BCN) and method.norm.statistics == "sequential":
            mn.attach(self.model, self.optimizer)  # the forward needs the learning rate
        images = torch.randn(workload.samples, 3, *workload.size, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (workload.samples,), device=device)
        self.loss = torch.zeros((), device=device)

    def __call__(self) -> None:
        if self.method.literal:
            self.literal()
            return
        self.optimizer.zero_grad(set_to_none=True)
        with self._shared(torch.bfloat16):  # as the engine does for a step of one forward: no layer casts its weight
            self.loss.copy_(self.backward(self.images, self.labels))
        self.optimizer.step()

    def _shared(self, dtype: torch.dtype | None = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.weights is None else self.weights.shared(dtype=dtype)

    def backward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of some samples; the loss is divided by the samples of the whole step."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.call(images), labels, reduction="sum") / self.workload.samples
        loss.backward()
        return loss.detach()

    def literal(self) -> None:
        """Take the same step one image at a time."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._shared():
            for image, label in zip(self.images.split(1), self.labels.split(1), strict=True):
                self.backward(image, label)
        self.optimizer.step()

    def capture(self) -> Callable[[], object]:
        """Return the step as a CUDA graph; one image at a time, the graph of an image and that of the update."""
        if not self.method.literal:
            self.optimizer.zero_grad(set_to_none=True)
            return Captured(self)
        image, label = self.images[:1].clone(), self.labels[:1].clone()
        one_image = Captured(lambda: self.backward(image, label))  # adds to the gradients, which the update clears
        update = Captured(lambda: (self.optimizer.step(), self.optimizer.zero_grad(set_to_none=False)))

        def call() -> None:
            for k in range(self.workload.samples):
                image.copy_(self.images[k : k + 1])
                label.copy_(self.labels[k : k + 1])
                one_image()
            update()

        return call


def build_model(workload: Workload, method: StepMethod) -> nn.Module:
    """Return the network with BatchNorm, or converted."""
    norm = method.norm
    if workload.network.startswith("cifar"):
        model = build_network(workload.network, classes=10)
        norm = None if norm is None else replace(norm, min_channels_per_group=4)  # as the paper has it
    else:
        import torchvision

        model = torchvision.models.get_model(workload.network, weights=None)
    return with_fast_pooling(model) if norm is None else mn.convert(model, norm, method.weight)


def with_fast_pooling(model: nn.Module) -> nn.Module:
    """Let BatchNorm's network use the max-pooling kernel that `mn.convert` gives ours; return the model."""
    pool_by_kernel(model)
    return model


def allocator_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes that the CUDA allocator has given out and holds, after freeing what is unused."""
    if device.type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
