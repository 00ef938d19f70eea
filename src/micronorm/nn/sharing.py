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

from micronorm.nn.weight import Reparameterized
from micronorm.ops.weight import launch


class _Launch(NamedTuple):
    """Layers whose weights one launch computes, by their place in the list of layers."""

    places: list[int]
    center: bool
    scale: bool
    eps: float


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
        return bool(self._launches())

    @contextlib.contextmanager
    def shared(self, *, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Within this block the weights stand still; raw weights get their gradients when it is left without error.

        Args:
            dtype: of the shared weights: autocast's, where the block holds one forward under it, so that no layer casts
                its weight. Gradients are summed in this dtype, so for several micro-batches leave it out: they are then
                summed in the dtype of the raw weights.
        """
        launches = self._launches()
        fused = {place for group in launches for place in group.places}
        apart = {i: layer.effective_weight() for i, layer in enumerate(self.layers) if i not in fused}
        if dtype is not None:
            apart = {i: w.to(dtype) for i, w in apart.items()}
        self._settle(apart, dtype)
        statistics = [self._launch(group) for group in launches]
        with torch.no_grad():
            if apart:
                torch._foreach_copy_([self._leaves[i] for i in apart], list(apart.values()))
        for layer, leaf in zip(self.layers, self._leaves, strict=True):
            layer.shared_weight = leaf
        try:
            yield
            used = [(w, self._leaves[i].grad) for i, w in apart.items()]
            for group, found in zip(launches, statistics, strict=True):
                used += self._gradients(group, *found)
            used = [(w, gradient) for w, gradient in used if gradient is not None]
            if used:
                torch.autograd.backward(*map(list, zip(*used, strict=True)))  # type: ignore[arg-type]
        finally:
            for layer, leaf in zip(self.layers, self._leaves, strict=True):
                layer.shared_weight = leaf.grad = None

    def _launches(self) -> list[_Launch]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.by_kernel():
                key = (layer.center, layer.scale, layer.eps, layer.weight.device, layer.weight.dtype)
                groups.setdefault(key, []).append(i)
        return [_Launch(places, *key[:3]) for key, places in groups.items()]

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

    def _launch(self, group: _Launch) -> tuple[Tensor, list[int]]:
        """Write this group's weights into its leaves; returns what the backward needs, and the weights' versions."""
        weights = [self.layers[i].weight for i in group.places]
        leaves = [self._leaves[i] for i in group.places]
        with torch.no_grad():
            found = launch.forward(weights, leaves, center=group.center, scale=group.scale, eps=group.eps, lasting=True)
        torch.autograd.graph.increment_version(leaves)  # autograd sees no kernel write
        return found, [w._version for w in weights]

    def _gradients(self, group: _Launch, found: Tensor, versions: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        """The raw weights of a group with their gradients."""
        weights = [self.layers[i].weight for i in group.places]
        if [w._version for w in weights] != versions:
            raise RuntimeError(
                "a weight was changed in place while it was shared, and its gradient can no longer be computed; step "
                "the optimizer after the block of `shared`"
            )
        grads = [self._leaves[i].grad for i in group.places]
        with torch.no_grad():
            gradients = launch.backward(grads, weights, found, center=group.center, scale=group.scale)
        return list(zip(weights, gradients, strict=True))
