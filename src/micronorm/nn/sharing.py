"""Reparameterized weights computed once and shared by the micro-batches of an optimizer step.

The effective weight Ŵ = f(W) is the same in every micro-batch of a step, and the product of a vector with f's Jacobian
is linear in the vector: Σ_t J·g_t = J·Σ_t g_t. So each layer's Ŵ is computed once, its gradient is summed over the
micro-batches as that of a leaf, and one backward pass through f at the end gives W the gradient that as many passes
would have given it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.nn.weight import Reparameterized


class SharedWeights:
    """Hands every reparameterized layer of a model one effective weight for all forwards within `shared`.

    Example:
        >>> from micronorm.nn import WSConv2d
        >>> model = nn.Sequential(WSConv2d(3, 8, 3), nn.Flatten())
        >>> weights = SharedWeights(model)
        >>> with weights.shared():
        ...     for image in torch.randn(4, 1, 3, 8, 8):
        ...         model(image).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([8, 3, 3, 3])
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Any] = [module for module in model.modules() if isinstance(module, Reparameterized)]
        self._leaves: list[Tensor] = []

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Within this block the weights stand still; raw weights get their gradients when it is left without error."""
        weights = [layer.effective_weight() for layer in self.layers]
        self._fill(weights)
        for layer, leaf in zip(self.layers, self._leaves, strict=True):
            layer.shared_weight = leaf
        try:
            yield
            used = [(w, leaf.grad) for w, leaf in zip(weights, self._leaves, strict=True) if leaf.grad is not None]
            if used:
                torch.autograd.backward(*map(list, zip(*used, strict=True)))  # type: ignore[arg-type]
        finally:
            for layer, leaf in zip(self.layers, self._leaves, strict=True):
                layer.shared_weight = leaf.grad = None

    def _fill(self, weights: list[Tensor]) -> None:
        """Copy the weights into leaves that stay where they are: compiled code and CUDA graphs know their addresses."""
        now = [(w.shape, w.dtype, w.device, w.requires_grad) for w in weights]
        if [(w.shape, w.dtype, w.device, w.requires_grad) for w in self._leaves] != now:
            self._leaves = [torch.empty_like(w).requires_grad_(w.requires_grad) for w in weights]
        if weights:
            with torch.no_grad():
                torch._foreach_copy_(self._leaves, weights)
