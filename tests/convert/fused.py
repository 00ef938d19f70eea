"""For the tests of fusion: a block of their own, and a converted model beside itself without fused forwards."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import micronorm as mn
from micronorm.convert import norm_act, register_block
from micronorm.convert.surgery import restore_forwards
from tests.export.networks import randomized

IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))


class Residual(nn.Module):
    """Two convolutions with norms, a shared rectifier and an addition in place; registered below."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.scale = 1.0

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out) * (2 * self.scale if twice else self.scale)


def fused_residual(self: Any, x: Tensor, *, twice: bool = False) -> Tensor:
    out = norm_act(self.bn1, self.conv1(x), self.relu)
    out = norm_act(self.bn2, self.conv2(out), self.relu, residual=x, inplace=True)
    return out * (2 * self.scale if twice else self.scale)


register_block(Residual, fused_residual, fuses={"bn1": "relu", "bn2": "add relu"})


def unfused(model: Any) -> Any:
    """A copy of the model that runs the forwards of its classes."""
    made = copy.deepcopy(model)
    restore_forwards(made)
    assert not any("forward" in vars(module) for module in made.modules())
    return made


def converted(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, dict[str, Any]]:
    """The converted model, and for each of its norms what the plan says of fusion: the text, or why not."""
    torch.manual_seed(0)
    plan = mn.plan(randomized(build()), **options)
    said = {d.name: d.fused[0] if d.fused else d.unfused[0] for d in plan.decisions if d.fused or d.unfused}
    return plan.apply(), said


def leaf_of(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return x.detach().clone().to(dtype).requires_grad_()


def assert_same_bits(model: nn.Module, *inputs: Any) -> None:
    """Outputs, gradients and what the norms gather equal those of the unfused copy, in both modes and dtypes."""
    for dtype in (torch.float64, torch.float32):
        for training in (True, False):
            results = []
            for one in (copy.deepcopy(model), unfused(model)):
                one.to(dtype).train(training)
                arguments = [tree_map(partial(leaf_of, dtype=dtype), value) for value in inputs]
                torch.manual_seed(1)
                outputs = [leaf for leaf in tree_leaves(one(*arguments)) if isinstance(leaf, Tensor)]
                sum((y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum() for y in outputs).backward()  # type: ignore[union-attr]
                windows = [m._window.sums for m in one.modules() if isinstance(m, mn.nn.BatchChannelNorm)]
                grads = [p.grad for p in one.parameters()] + [x.grad for x in tree_leaves(arguments)]
                results.append([*outputs, *grads, *windows])
            for fused, plain in zip(*results, strict=True):
                assert (fused is None) == (plain is None)
                assert fused is None or torch.equal(fused, plain), (dtype, training)


def calls(model: nn.Module, *inputs: Any) -> list[dict[str, Any]]:
    """The keywords with which each BatchChannelNorm is called in one forward, in order."""
    seen: list[dict[str, Any]] = []
    original = mn.nn.BatchChannelNorm.forward

    def forward(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return original(self, x, **kwargs)

    mn.nn.BatchChannelNorm.forward = forward  # type: ignore[method-assign]
    try:
        model(*inputs)
    finally:
        mn.nn.BatchChannelNorm.forward = original  # type: ignore[method-assign]
    return seen
