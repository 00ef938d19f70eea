"""Modules and losses with a fault that can be switched on, for the table in faults.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 6


def images(samples: int = SAMPLES, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 3, size, size, generator=generator)
    return x, torch.randint(5, (samples,), generator=generator)


def ragged() -> tuple[list[Tensor], list[int]]:
    generator = torch.Generator().manual_seed(4)
    sizes = [(9, 7), (6, 8), (12, 5), (7, 7), (8, 10), (5, 5)]
    return [torch.randn(3, *size, generator=generator) for size in sizes], [0, 1, 2, 3, 4, 0]


def summed(model: nn.Module, part: Any) -> tuple[Tensor, int]:
    x, labels = part
    labels = torch.as_tensor(labels)
    return F.cross_entropy(model(x), labels, reduction="sum"), len(labels)


class Net(nn.Module):
    """A stem, a module under test in the middle, a head; `head` sees one vector per sample."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.middle = middle
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(self.stem(x)))
        return self.head(self.block(x).mean((2, 3)))


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class FunctionalMixing(nn.Module):
    """Children that are right, and code between them that need not be."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes
        self.first = nn.Conv2d(8, 8, 1)
        self.second = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y - y.mean(self.axes, keepdim=True))


class MovingBatchNorm(nn.Module):
    """A batch normalization of nobody's library: functional, with estimates of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_estimate: Tensor
        self.var_estimate: Tensor
        self.register_buffer("mean_estimate", torch.zeros(8))
        self.register_buffer("var_estimate", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean_estimate, self.var_estimate, training=self.training)


class Codebook(nn.Module):
    """Pulls features towards the nearest code; `moving` codes follow the features within the forward."""

    def __init__(self, moving: bool) -> None:
        super().__init__()
        self.moving = moving
        self.codes: Tensor
        self.register_buffer("codes", torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.movedim(1, -1)
        nearest = torch.cdist(tokens.reshape(-1, 8), self.codes).argmin(1)
        y = x + (self.codes[nearest].reshape(tokens.shape)).movedim(-1, 1)
        if self.moving:
            with torch.no_grad():
                for k in range(4):
                    if (nearest == k).any():
                        self.codes[k].lerp_(tokens.reshape(-1, 8)[nearest == k].mean(0), 0.1)
        return y


class RunningMax(nn.Module):
    """An observer: moves a buffer that no forward reads."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.abs().max(), self.momentum)
        return x


class PerSampleDropout(nn.Module):
    """Dropout whose masks are keyed by what is in the sample: the same in every cut and from every seed."""

    def forward(self, x: Tensor) -> Tensor:
        masks = []
        for sample in x:
            key = int(sample.detach().abs().sum() * 1e4) % 2**31
            generator = torch.Generator().manual_seed(key)
            masks.append(torch.rand(sample.shape, generator=generator) < 0.8)
        return x * torch.stack(masks) / 0.8


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
        return x * keep / 0.5


class OwnStream(nn.Module):
    """Noise from a generator that the module keeps: a stream is no key."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


class Padding(nn.Module):
    """Takes a list of images; stacks them padded to the largest of the list, or to one size for all."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size
        self.net = Net(nn.Identity())

    def forward(self, x: list[Tensor]) -> Tensor:
        height = self.size or max(t.shape[1] for t in x)
        width = self.size or max(t.shape[2] for t in x)
        padded = [F.pad(t, (0, width - t.shape[2], 0, height - t.shape[1])) for t in x]
        return self.net(torch.stack(padded))


class ChoosesSize(Padding):
    """Draws the size it pads to from a list with one entry, as torchvision's detectors do with `min_size`."""

    def forward(self, x: list[Tensor]) -> Tensor:
        sizes = [self.size]
        self.size = sizes[int(torch.rand(()) * len(sizes))]
        return super().forward(x)


class ReturnsLoss(nn.Module):
    """Computes its own loss, as detectors do."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.net, self.criterion = Net(nn.Identity()), nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"classification": self.criterion(self.net(x), labels)}


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, per_batch: bool) -> Tensor:
        ctx.per_batch = per_batch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        g = grads[0]
        return g / (g.norm() if ctx.per_batch else 2.0), None


def contrastive(model: nn.Module, part: Any, *, between_samples: bool) -> tuple[Tensor, int]:
    z = F.normalize(model(part[0]), dim=1)
    w = F.normalize(model(part[0].flip(-1)), dim=1)
    logits = z @ w.T / 0.1
    if between_samples:
        return F.cross_entropy(logits, torch.arange(len(z)), reduction="sum"), len(z)
    return -logits.diagonal().sum(), len(z)


def batch_hard(model: nn.Module, part: Any) -> tuple[Tensor, int]:
    z, labels = model(part[0]), part[1]
    distance = torch.cdist(z, z)
    same = labels[:, None] == labels[None]
    hardest = distance.masked_fill(~same, 0).amax(1) - distance.masked_fill(same, 9.0).amin(1) + 10
    return hardest.mean(), len(z)


def pixel_loss(reduction: str) -> Callable[..., Any]:
    """Cross-entropy over pixels, some ignored; samples have different counts."""

    def loss(model: nn.Module, part: Any) -> tuple[Tensor, int]:
        x, labels = part
        targets = torch.stack([torch.full(x.shape[2:], int(label)) for label in labels])
        targets[:, 0, :][x[:, 0, 0] > 0] = -100
        logits = model.norm(model.stem(x))
        total = F.cross_entropy(logits, targets, ignore_index=-100, reduction=reduction)
        return total, int((targets != -100).sum())

    return loss


def noisy_input(model: nn.Module, part: Any) -> tuple[Tensor, int]:
    return summed(model, (part[0] + 0.1 * torch.randn_like(part[0]), part[1]))


def mixup(model: nn.Module, part: Any) -> tuple[Tensor, int]:
    return summed(model, (0.7 * part[0] + 0.3 * part[0].flip(0), part[1]))


def pads_in_loss(model: nn.Module, part: Any) -> tuple[Tensor, int]:
    x, labels = part
    height, width = (max(t.shape[k] for t in x) for k in (1, 2))
    return summed(model, (torch.stack([F.pad(t, (0, width - t.shape[2], 0, height - t.shape[1])) for t in x]), labels))


def one_by_one(model: nn.Module, part: Any) -> tuple[Tensor, int]:
    x, labels = part
    terms = [summed(model, (t[None], [label]))[0] for t, label in zip(x, labels, strict=True)]
    return torch.stack(terms).sum(), len(terms)


class CenteredLoss(nn.Module):
    """A loss with a centre of its own, which may move in every call."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(5))

    def forward(self, model: nn.Module, part: Any) -> tuple[Tensor, int]:
        logits = model(part[0])
        total = F.cross_entropy(logits - self.centre, part[1], reduction="sum")
        with torch.no_grad():
            self.centre.lerp_(logits.mean(0), self.momentum)
        return total, len(logits)


def refuse(x: Tensor) -> Tensor:
    raise RuntimeError(f"an even number of samples is needed, got {len(x)}")


class SummedViews(nn.Module):
    """Adds views of two parameters, whose gradients torch then stores in one tensor; or takes a view of their sum."""

    def __init__(self, *, before):
        super().__init__()
        self.before = before
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        total = (self.a + self.b).view(8, 1, 1) if self.before else self.a.view(8, 1, 1) + self.b.view(8, 1, 1)
        return x * total


class ProposalsPerImage(nn.Module):
    """Returns a list with one tensor of many rows per image, as detectors do; or all rows in one tensor.

    An image with a negative mean has the first number of rows, any other the second.
    """

    def __init__(self, rows, *, joined, mixes):
        super().__init__()
        self.rows, self.joined, self.mixes = rows, joined, mixes
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        seen = x + (x - x.mean(0) if self.mixes else 0)
        boxes = [
            torch.linspace(0, 1, self.rows[int(image.mean() > 0)])[:, None] * self.scale * value
            for image, value in zip(x, seen.mean((1, 2, 3)), strict=True)
        ]
        return torch.cat(boxes) if self.joined else boxes
