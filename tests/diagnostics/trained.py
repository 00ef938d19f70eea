"""A small network with every kind of layer, fresh or after a few steps on real digits, in float64."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.data.digits import read_digits

EPS = (0.0, 1e-5, 0.1)


@functools.cache
def images() -> tuple[Tensor, Tensor]:
    train = read_digits().train
    return train.images.double(), train.labels


class Network(nn.Module):
    """Convolutions, in groups and transposed, with a norm after each; `weight` wraps every layer but the head."""

    def __init__(self, weight: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.stem = weight(nn.Conv2d(1, 6, 3, padding=1, bias=False))
        self.norm1 = nn.GroupNorm(2, 6)
        self.grouped = weight(nn.Conv2d(6, 6, 3, stride=2, groups=3, bias=False))
        self.norm2 = mn.nn.BatchChannelNorm(6, 2)
        self.up = weight(nn.ConvTranspose2d(6, 4, 2, groups=2, bias=False))
        self.norm3 = nn.BatchNorm2d(4)
        self.narrow = weight(nn.Linear(4 * 4 * 4, 8, bias=False))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(self.norm2(self.grouped(x)))
        x = F.relu(self.norm3(self.up(x)))
        return self.head(F.layer_norm(self.narrow(x.flatten(1)), (8,)))


LAYERS = ("stem", "grouped", "up", "narrow")


def network(weight: Callable[[nn.Module], nn.Module] = lambda layer: layer, *, steps: int = 0) -> Network:
    """A network in float64 after so many steps of descent."""
    model = Network(weight).double()
    if steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        x, labels = images()
        for step in range(steps):
            part = slice(32 * step, 32 * step + 32)
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), labels[part]).backward()
            optimizer.step()
        optimizer.zero_grad()
    return model


def loss_of(model: nn.Module, *, samples: int = 16) -> Callable[[], Tensor]:
    """The loss of the last images, which training has not met."""
    x, labels = images()
    return lambda: F.cross_entropy(model(x[-samples:]), labels[-samples:])
