"""Models and losses that keep the law, of the kinds that users train."""

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from tests.check.parts import Net, images, ragged, summed
from tests.networks import SmallResNet


class Shared(nn.Module):
    """One module called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 1), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = F.relu(self.block(x))
        return self.head(x.mean((2, 3)))


class Loop(nn.Module):
    """One forward of the network per sample: the number of calls depends on the cut, the statistics of BN do not."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Tensor:
        return torch.cat([self.net(sample[None]) for sample in x])


class Checkpointed(nn.Module):
    def __init__(self, net: SmallResNet, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Any) -> Tensor:
        net = self.net
        x = F.relu(net.norm(net.stem(x)))
        x = checkpoint(net.block1, x, use_reentrant=self.reentrant)
        x = F.relu(net.down_norm(net.down(x)))
        x = checkpoint(net.block2, x, use_reentrant=self.reentrant)
        return net.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """Tokens are rows of pixels; batch first, or sequence first as torch's layers had it first."""

    def __init__(self, batch_first: bool, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(24, 12)
        self.norm = norm or nn.LayerNorm(12)
        self.block = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.permute(0, 2, 1, 3).flatten(2)
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        return self.head(self.block(self.norm(self.embed(tokens))).mean(1 if self.batch_first else 0))


class Detector(nn.Module):
    """A list of images of any size in, a list of predictions out, as many per image as its boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.boxes = nn.Linear(8, 4)

    def forward(self, x: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        features = [self.backbone(sample[None]).mean((0, 2, 3)) for sample in x]
        rows = torch.cat([f.expand(len(t["boxes"]), -1) for f, t in zip(features, targets, strict=True)])
        wanted = torch.cat([t["boxes"] for t in targets])
        return {"boxes": F.l1_loss(self.boxes(rows), wanted, reduction="sum")}


def detection_batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    x, _ = ragged()
    return x, [{"boxes": torch.rand(1 + k % 3, 4), "labels": torch.arange(1 + k % 3)} for k in range(len(x))]


def detection_loss(model: nn.Module, part: Any) -> tuple[Tensor, int]:
    return model(*part)["boxes"], sum(len(t["boxes"]) for t in part[1])


def biased_before_instance_norm() -> nn.Module:
    """The bias's gradient is zero but for rounding."""
    layers = [nn.Conv2d(3, 8, 3), mn.IN()(8), nn.SiLU(), nn.Conv2d(8, 8, 3), mn.IN()(8), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 16, 5))


CLEAN = {
    "GN": (lambda: SmallResNet(mn.GN(groups=4)), images, summed),
    "BCN and WS": (lambda: SmallResNet(mn.BCN(groups=4), mn.WS()), images, summed),
    "FRN": (lambda: SmallResNet(mn.FRN()), images, summed),
    "torchvision's resnet18": (
        lambda: torchvision.models.resnet18(norm_layer=mn.GN(), num_classes=5),
        lambda: images(4, 32),
        summed,
    ),
    "a detector": (Detector, detection_batch, detection_loss),
    "a shared module": (Shared, images, summed),
    "a loop over samples with BN inside": (lambda: Loop(Net(nn.BatchNorm2d(8))), ragged, summed),
    "checkpointing": (lambda: Checkpointed(SmallResNet(), False), images, summed),
    "reentrant checkpointing": (
        lambda: Checkpointed(SmallResNet(mn.BCN(groups=4), mn.WS()), True),
        images,
        summed,
    ),
    "a transformer": (lambda: Transformer(True), images, summed),
    "a transformer, sequence first": (lambda: Transformer(False), images, summed),
    "in-place activations": (
        lambda: Net(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1), nn.SiLU(inplace=True))),
        images,
        summed,
    ),
    "a gradient that cancels": (biased_before_instance_norm, images, summed),
    "two samples": (lambda: SmallResNet(), lambda: images(2), summed),
}
