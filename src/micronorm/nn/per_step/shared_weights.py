"""Reparameterized weights computed once and shared by the micro-batches of an optimizer step.

The effective weight Ŵ = f(W) is the same in every micro-batch of a step, and the product of a vector with f's Jacobian
is linear in the vector: Σ_t J·g_t = J·Σ_t g_t. So each layer's Ŵ is computed once, its gradient is summed over the
micro-batches as that of a leaf, and one backward pass through f at the end gives W the gradient that as many passes
would have given it.

Standardized weights that a kernel computes take one launch for all layers, and one for all their gradients.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.weight import launch


class _Group(NamedTuple):
    """Layers whose weights one launch computes, by their place in the list of layers."""

    places: list[int]
    center: bool
    scale: bool
    eps: float


class _Launch(torch.autograd.Function):
    """Writes the weights of a group into its leaves; the backward takes the leaves' gradients from there.

    What it returns holds no number, only the way back. By that way the raw weights' gradients come from a node of the
    graph, and become `.grad` as they are; tensors handed to `torch.autograd.backward` would be copied.
    """

    @staticmethod
    def forward(ctx: Any, group: _Group, leaves: list[Tensor], *weights: Tensor) -> Tensor:
        found = launch.forward(weights, leaves, center=group.center, scale=group.scale, eps=group.eps, lasting=True)
        torch.autograd.graph.increment_version(leaves)  # autograd does not see what a kernel writes
        ctx.save_for_backward(*weights, found)
        ctx.group, ctx.leaves = group, leaves
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        *weights, found = ctx.saved_tensors
        grads = [leaf.grad for leaf in ctx.leaves]
        return None, None, *launch.backward(grads, weights, found, center=ctx.group.center, scale=ctx.group.scale)


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
        # By dtype, and for good: a CUDA graph may know the addresses of one set while another is in use.
        self._kept: dict[torch.dtype | None, list[Tensor]] = {}

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel computes some of the weights: then sharing pays for a single micro-batch too."""
        return bool(self._groups())

    @contextlib.contextmanager
    def shared(self, *, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Within this block the weights stand still; raw weights get their gradients when it is left without error.

        Args:
            dtype: of the shared weights: autocast's, where the block holds one forward under it, so that no layer casts
                its weight. Gradients are summed in this dtype, so for several micro-batches leave it out: they are then
                summed in the dtype of the raw weights.
        """
        groups = self._groups()
        fused = {place for group in groups for place in group.places}
        apart = {i: layer.effective_weight() for i, layer in enumerate(self.layers) if i not in fused}
        if dtype is not None:
            apart = {i: w.to(dtype) for i, w in apart.items()}
        self._settle(apart, dtype)
        results: list[tuple[Any, list[Tensor]]] = [(w, [self._leaves[i]]) for i, w in apart.items()]
        if apart:
            with torch.no_grad():
                torch._foreach_copy_([self._leaves[i] for i in apart], list(apart.values()))
        for group in groups:
            leaves = [self._leaves[i] for i in group.places]
            results.append((_Launch.apply(group, leaves, *(self.layers[i].weight for i in group.places)), leaves))
        for layer, leaf in zip(self.layers, self._leaves, strict=True):
            layer.shared_weight = leaf
        try:
            yield
            used = [(way, leaves) for way, leaves in results if any(leaf.grad is not None for leaf in leaves)]
            if used:
                # A launch finds the gradients itself.
                torch.autograd.backward(
                    [way for way, _ in used], [None if way.ndim == 0 else leaves[0].grad for way, leaves in used]
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
        return [_Group(places, *key[:3]) for key, places in groups.items()]

    def _settle(self, apart: dict[int, Tensor], dtype: torch.dtype | None) -> None:
        """Leaves that stay where they are from block to block: compiled code and CUDA graphs know their addresses."""
        models = ({i: layer.weight for i, layer in enumerate(self.layers)} | apart).values()
        graph = torch.is_grad_enabled()
        now = [
            (w.shape, w.stride(), w.dtype if dtype is None else dtype, w.device, w.requires_grad and graph)
            for w in models
        ]
        self._leaves = self._kept.get(dtype, [])
        if [(w.shape, w.stride(), w.dtype, w.device, w.requires_grad) for w in self._leaves] != now:
            self._leaves = [
                torch.empty_strided(shape, stride, dtype=own, device=device).requires_grad_(needs)
                for shape, stride, own, device, needs in now
            ]
            self._kept[dtype] = self._leaves
