"""For the tests of fusion: a converted model beside itself without the rewritten forwards."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import micronorm as mn
from micronorm.convert.surgery import restore_forwards
from tests.export.networks import randomized

WAYS = (torch.float64, torch.float32)


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


def assert_same_bits(model: nn.Module, *inputs: Tensor) -> None:
    """Outputs, gradients and what the norms gather equal those of the unfused copy, in both modes and dtypes."""
    for dtype in WAYS:
        for training in (True, False):
            results = []
            for one in (copy.deepcopy(model), unfused(model)):
                one.to(dtype).train(training)
                arguments = [x.detach().clone().to(dtype).requires_grad_() for x in inputs]
                torch.manual_seed(1)
                outputs = [leaf for leaf in tree_leaves(one(*arguments)) if isinstance(leaf, Tensor)]
                sum((y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum() for y in outputs).backward()  # type: ignore[union-attr]
                windows = [m._window.sums for m in one.modules() if isinstance(m, mn.nn.BatchChannelNorm)]
                results.append([*outputs, *(p.grad for p in one.parameters()), *(x.grad for x in arguments), *windows])
            for fused, plain in zip(*results, strict=True):
                assert (fused is None) == (plain is None)
                assert fused is None or torch.equal(fused, plain), (dtype, training)


def calls(model: nn.Module, *inputs: Tensor) -> list[dict[str, Any]]:
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
