"""A training step of a network with BatchNorm or with BCN + WS, to be measured: steps_gpu.py and profile_steps.py.

Forward, cross entropy, backward and SGD with momentum, in bfloat16 autocast and channels_last, on random images; the
learning rate is a tensor on the device, as a captured step with a schedule has it.
"""

import contextlib
import gc
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from engine_gpu import build as build_cifar
from torch import nn

import micronorm as mn
from micronorm.engine.environment import environment
from micronorm.nn.per_step.shared_weights import SharedWeights

CLASSES = {"resnet50": 1000, "resnet18": 1000}


@dataclass(frozen=True)
class Workload:
    network: str
    samples: int
    size: tuple[int, int]
    time_target: float | None = None
    memory_target: float | None = None
    recompute_target: float | None = None

    @property
    def name(self) -> str:
        return f"{self.network}-{self.samples}x{self.size[0]}x{self.size[1]}"

    @property
    def is_cifar(self) -> bool:
        return self.network.startswith("cifar")


WORKLOADS = (
    Workload("resnet50", 64, (224, 224), 0.9, 1.0, 0.75),
    Workload("resnet50", 2, (800, 1344), 0.9),
    Workload("resnet50", 1, (224, 224), 1.1),
    Workload("cifar-resnet110", 128, (32, 32), 1.0),
)
TINY = (Workload("resnet18", 2, (64, 64), 0.9, 1.0, 0.75), Workload("cifar-resnet20", 4, (16, 16), 1.0))


@dataclass(frozen=True)
class Method:
    name: str
    is_ours: bool = False
    shares: bool = False
    recomputes: bool = False
    compiled: bool = False


BN = Method("BN")
BN_COMPILED = Method("BN compiled", compiled=True)
PLAIN = Method("BCN+WS", is_ours=True)
SHARED = Method("BCN+WS shared", is_ours=True, shares=True)
SHARED_COMPILED = Method("BCN+WS shared compiled", is_ours=True, shares=True, compiled=True)


class TrainingStep:
    """A model, its optimizer and a batch; a call takes one step."""

    def __init__(self, workload: Workload, method: Method, device: torch.device) -> None:
        self.workload, self.method, self.device = workload, method, device
        self.held = held_memory(device)
        torch.manual_seed(0)
        model = build_model(workload, method).to(device).train()
        self.model: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.handle: Any = mn.recompute(self.model) if method.recomputes else None
        self.weights = SharedWeights(self.model) if method.shares else None
        self.call: Callable[..., torch.Tensor] = (
            torch.compile(self.model, dynamic=False) if method.compiled else self.model
        )
        on_gpu = device.type == "cuda"
        rate: Any = torch.tensor(0.01, device=device) if on_gpu else 0.01
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, fused=on_gpu
        )
        images = torch.randn(workload.samples, 3, *workload.size, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (workload.samples,), device=device)
        self.loss = torch.zeros((), device=device)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self._shared(torch.bfloat16):  # as the engine does where a step is one forward: no layer casts its weight
            self.loss.copy_(self.backward(self.images, self.labels))
        self.optimizer.step()

    def _shared(self, dtype: torch.dtype | None = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.weights is None else self.weights.shared(dtype=dtype)

    def backward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward and backward; the gradients are those of the step's mean loss, whatever part of it this is."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.call(images), labels, reduction="sum") / self.workload.samples
        loss.backward()
        return loss.detach()

    def literal(self) -> None:
        """The same step one image at a time: as many forwards and backwards as there are samples."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._shared():
            for image, label in zip(self.images.split(1), self.labels.split(1), strict=True):
                self.backward(image, label)
        self.optimizer.step()


def build_model(workload: Workload, method: Method) -> nn.Module:
    if workload.is_cifar:
        return build_cifar("BCN+WS step" if method.is_ours else "BN", workload.network)
    import torchvision

    model = torchvision.models.get_model(workload.network, weights=None, num_classes=CLASSES[workload.network])
    return mn.convert(model) if method.is_ours else model


def held_memory(device: torch.device) -> tuple[int, int]:
    """What the allocator has given out and what it holds, once all that nobody needs is gone."""
    if device.type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def facts(device: torch.device, command: str) -> dict[str, object]:
    """Where figures come from; no host name and no path."""
    found = environment()
    gpu = found["gpu"] if device.type == "cuda" else None
    triton = importlib.metadata.version("triton") if gpu else ""
    return {
        "gpu": gpu["name"] if gpu else "",
        "cpu": found["cpu"]["model"],
        "torch": found["torch"],
        "torchvision": importlib.metadata.version("torchvision"),
        "triton": triton,
        "cuda": gpu["cuda"] if gpu else "",
        "cudnn": gpu["cudnn"] if gpu else "",
        "micronorm": found["micronorm"],
        "date": found["date"],
        "revision": found["revision"] or "",
        "command": command,
    }
