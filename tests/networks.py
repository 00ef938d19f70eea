"""The small residual network the laws are tested on, and one optimizer step with its samples cut up."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert import norm_act, register_block
from tests.tolerances import assert_close_to_max

SAMPLES = 24


class Block(nn.Module):
    def __init__(self, channels: int, norm: Any, weight: Any, activation: Any) -> None:
        super().__init__()
        self.activation = activation
        self.conv1 = weight(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        self.norm1 = norm(channels)
        self.conv2 = weight(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        self.norm2 = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm1(self.conv1(x)))
        return self.activation(x + self.norm2(self.conv2(y)))


class SmallResNet(nn.Module):
    """Stem, two residual blocks, a strided convolution between them, a linear classifier; any image size."""

    def __init__(
        self, norm: Any = None, weight: Any = None, *, channels: int = 8, classes: int = 5, activation: Any = F.relu
    ) -> None:
        super().__init__()
        self.activation = activation
        norm = norm or mn.BCN(groups=4)
        weight = weight or (lambda layer: layer)
        self.stem = weight(nn.Conv2d(3, channels, 3, padding=1, bias=False))
        self.norm = norm(channels)
        self.block1 = Block(channels, norm, weight, activation)
        self.down = weight(nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False))
        self.down_norm = norm(2 * channels)
        self.block2 = Block(2 * channels, norm, weight, activation)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(self.activation(self.norm(self.stem(x))))
        x = self.block2(self.activation(self.down_norm(self.down(x))))
        return self.head(x.mean((2, 3)))


def fused_block(self: Block, x: Tensor) -> Tensor:
    y = norm_act(self.norm1, self.conv1(x), self.activation)
    return norm_act(self.norm2, self.conv2(y), self.activation, residual=x)


def fused_network(self: SmallResNet, x: Tensor) -> Tensor:
    x = self.block1(norm_act(self.norm, self.stem(x), self.activation))
    x = self.block2(norm_act(self.down_norm, self.down(x), self.activation))
    return self.head(x.mean((2, 3)))


register_block(Block, fused_block, fuses={"norm1": "activation", "norm2": "add activation"})
register_block(SmallResNet, fused_network, fuses={"norm": "activation", "down_norm": "activation"})


def samples(dtype: torch.dtype = torch.float64, *, seed: int = 0, count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Images with a mean of their own, so that estimates have something to learn, and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64) * 1.5 + 0.5
    return x.to(dtype), torch.randint(5, (count,), generator=generator)


def pieces(cut: Iterable[int]) -> list[slice]:
    """The slices of a cut given by its sizes."""
    slices, start = [], 0
    for size in cut:
        slices.append(slice(start, start + size))
        start += size
    return slices


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor, cut: Sequence[int]) -> None:
    """One optimizer step over all samples: the loss is a sum over samples, divided once by their count."""
    optimizer.zero_grad()
    for part in pieces(cut):
        loss = F.cross_entropy(model(x[part]), labels[part], reduction="sum") / len(x)
        loss.backward()
    optimizer.step()


def train(
    model: nn.Module,
    cut: Callable[[int], Sequence[int]] | Sequence[int],
    *,
    steps: int = 1,
    lr: float = 0.02,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """A copy of the model trained with each step's samples cut as given; its state dict afterwards."""
    model = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    for k in range(steps):
        x, labels = samples(dtype, seed=k)
        step(model, optimizer, x, labels, cut(k) if callable(cut) else cut)
    return model.state_dict()


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], *, tol: float) -> None:
    """Every tensor of two state dicts agrees, relative to its own maximum."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        try:
            assert_close_to_max(actual[name].double(), value.double(), tol=tol)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
