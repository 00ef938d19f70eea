"""Compute effective weights once and share them between the micro-batches of an optimizer step.

The effective weight Ŵ = f(W) is the same in every micro-batch of a step, and backpropagation through f is linear:
Σ_t J·g_t = J·Σ_t g_t. So each layer's Ŵ is computed once and used as a leaf, which sums its gradient over the
micro-batches. One backward pass through f at the end gives W the same gradient as one pass per micro-batch.

If a kernel standardizes the weights, one launch serves all layers, and one more all their gradients.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.private_api import foreach_copy_
from micronorm.ops.weight import launch


class _Group(NamedTuple):
    """Layers whose weights one launch computes, by their index in the list of layers."""

    indices: list[int]
    center: bool
    scale: bool
    eps: float


class _Launch(torch.autograd.Function):
    """Write the weights of a group into its leaves. The backward reads the gradients from the leaves.

    The result is an empty scalar that only connects the graph. Gradients of the raw weights then come from a node of
    the graph and become `.grad` without a copy; tensors given to `torch.autograd.backward` would be copied.
    """

    @staticmethod
    def forward(ctx: Any, group: _Group, leaves: list[Tensor], *weights: Tensor) -> Tensor:
        found = launch.forward(weights, leaves, center=group.center, scale=group.scale, eps=group.eps, lasting=True)
        torch.autograd.graph.increment_version(leaves)  # autograd does not notice writes by a kernel
        ctx.save_for_backward(*weights, found)
        ctx.group, ctx.leaves = group, leaves
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        *weights, found = ctx.saved_tensors
        grads = [leaf.grad for leaf in ctx.leaves]
        return None, None, *launch.backward(grads, weights, found, center=ctx.group.center, scale=ctx.group.scale)


class SharedWeights:
    """Give every reparameterized layer of a model one effective weight for all forwards within `shared`.

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
        # One set per dtype, kept for good: a captured CUDA graph contains the addresses of its set.
        self._leaves_by_dtype: dict[torch.dtype | None, list[Tensor]] = {}

    @property
    def by_kernel(self) -> bool:
        """Return whether a kernel computes some weights. Sharing is then faster for a single micro-batch too."""
        return bool(self._groups())

    @contextlib.contextmanager
    def shared(self, *, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Share the weights within this block. Raw weights get their gradients at its end, unless it raises.

        Args:
            dtype: the dtype of the shared weights; None for that of the raw weights. Give autocast's dtype if the block
                has a single forward under autocast: no layer then casts its weight. Gradients are summed in this dtype,
                so do not give it for several micro-batches.
        """
        groups = self._groups()
        by_kernel = {i for group in groups for i in group.indices}
        others = {i: layer.effective_weight() for i, layer in enumerate(self.layers) if i not in by_kernel}
        if dtype is not None:
            others = {i: w.to(dtype) for i, w in others.items()}
        self._prepare_leaves(others, dtype)
        results: list[tuple[Any, list[Tensor]]] = [(w, [self._leaves[i]]) for i, w in others.items()]
        if others:
            with torch.no_grad():
                foreach_copy_([self._leaves[i] for i in others], list(others.values()))
        for group in groups:
            leaves = [self._leaves[i] for i in group.indices]
            results.append((_Launch.apply(group, leaves, *(self.layers[i].weight for i in group.indices)), leaves))
        for layer, leaf in zip(self.layers, self._leaves, strict=True):
            layer.shared_weight = leaf
        try:
            yield
            used = [(result, leaves) for result, leaves in results if any(leaf.grad is not None for leaf in leaves)]
            if used:
                # The scalar of a launch needs no gradient: its backward reads those of the leaves.
                torch.autograd.backward(
                    [result for result, _ in used],
                    [None if result.ndim == 0 else leaves[0].grad for result, leaves in used],
                )
        finally:
            for layer, leaf in zip(self.layers, self._leaves, strict=True):
                layer.shared_weight = leaf.grad = None

    def _groups(self) -> list[_Group]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.by_kernel():
                key = (layer.center, layer.scale, layer.eps, layer.weight.device, layer.weight.dtype)
                groups.setdefault(key, []).append(i)
        return [_Group(indices, *key[:3]) for key, indices in groups.items()]

    def _prepare_leaves(self, others: dict[int, Tensor], dtype: torch.dtype | None) -> None:
        """Make the leaves, or reuse those of earlier blocks: compiled code and CUDA graphs contain their addresses."""
        models = ({i: layer.weight for i, layer in enumerate(self.layers)} | others).values()
        graph = torch.is_grad_enabled()
        now = [
            (w.shape, w.stride(), w.dtype if dtype is None else dtype, w.device, w.requires_grad and graph)
            for w in models
        ]
        self._leaves = self._leaves_by_dtype.get(dtype, [])
        if [(w.shape, w.stride(), w.dtype, w.device, w.requires_grad) for w in self._leaves] != now:
            self._leaves = [
                torch.empty_strided(shape, stride, dtype=own, device=device).requires_grad_(needs)
                for shape, stride, own, device, needs in now
            ]
            self._leaves_by_dtype[dtype] = self._leaves
