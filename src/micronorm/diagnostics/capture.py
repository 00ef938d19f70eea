"""The gradients of effective weights, which a backward pass computes and forgets."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.layers import Filter, weight_layers
from micronorm.diagnostics.onlooker import watch_weight
from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.moments import compute_dtype


@dataclass(eq=False)
class Captured:
    """Gradients of one layer, in the layout of its weight; None where none came."""

    effective: Tensor | None = None
    """∇Ŵ, by the weight that the layer computes with."""
    raw: Tensor | None = None
    """∇W, by its parameter; the same as `effective` for plain layers."""

    def _add(self, name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            # A copy: the tensor may become .grad itself, and be added to by the next backward pass.
            new = grad.detach().to(compute_dtype(grad.dtype), copy=True)
            old = getattr(self, name)
            setattr(self, name, new if old is None else old + new)

        return hook


@contextlib.contextmanager
def effective_gradients(model: nn.Module, *, filter: Filter | None = None) -> Iterator[dict[str, Captured]]:
    """Within this block forward and backward leave every layer's ∇Ŵ and ∇W in the dictionary given, by name.

    Gradients of several passes are summed, as `.grad` is, and what lay in `.grad` before does not count. Works with
    `SharedWeights` inside the block, or around it (∇W, which comes when the sharing ends, is then not seen); with
    activation checkpointing and autocast. A loss scale scales all of them. Compiled models and replayed CUDA graphs run
    no hooks and are not seen; under DDP the gradients are those of this rank before they are averaged.

    Example:
        >>> from micronorm.nn import WSConv2d
        >>> model = WSConv2d(3, 8, 3)
        >>> with effective_gradients(model) as captured:
        ...     model(torch.randn(1, 3, 5, 5)).square().sum().backward()
        >>> captured[""].effective.shape, captured[""].raw.equal(model.weight.grad)
        (torch.Size([8, 3, 3, 3]), True)
    """
    layers = {name: m for name, m in weight_layers(model, filter).items() if m.weight.requires_grad}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} holds no convolution or linear layer to look at: none with a trainable weight of "
            "fan-in 2 or more and a forward that is known"
        )
    captured = {name: Captured() for name in layers}
    owners = Counter(id(module._parameters.get("weight")) for module in model.modules())
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            seen = captured[name]
            if not isinstance(layer, Reparameterized):
                stack.callback(layer.weight.register_hook(_both(seen)).remove)
                continue
            stack.enter_context(_watched(layer, seen))
            if owners[id(layer.weight)] == 1:  # of a parameter in several layers ∇W is the sum over them
                stack.callback(layer.weight.register_hook(seen._add("raw")).remove)
        yield captured


def _both(seen: Captured) -> Callable[[Tensor], None]:
    effective = seen._add("effective")

    def hook(grad: Tensor) -> None:
        effective(grad)
        seen.raw = seen.effective

    return hook


@contextlib.contextmanager
def _watched(layer: Any, seen: Captured) -> Iterator[None]:
    """Put a hook on each effective weight the layer computes with; a shared one gets it once."""
    shared: dict[int, Tensor] = {}
    with contextlib.ExitStack() as stack:

        def see(weight: Tensor) -> None:
            if torch.compiler.is_compiling() or not weight.requires_grad or id(weight) in shared:
                return
            handle = weight.register_hook(seen._add("effective"))
            if weight.is_leaf:  # lives on after this pass
                shared[id(weight)] = weight
                stack.callback(handle.remove)

        stack.callback(watch_weight(layer, see))
        yield
