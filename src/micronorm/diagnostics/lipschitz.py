"""The Lipschitz constant of the loss: the share of a gradient that Weight Standardization removes (Sec. `sec:eowot`).

For one output channel with fan-in I, let g = ∇Ŵ be the gradient of the effective weight, σ² = var + ε, and
ρ = ‖Ŵ‖²/I = var/(var + ε). The backward of WS is σ·∇W = g − (1/I)⟨1, g⟩·1 − (1/I)⟨Ŵ, g⟩·Ŵ, and ⟨1, Ŵ⟩ = 0, so

    σ²‖∇W‖² = ‖g‖² − (1/I)⟨1, g⟩² − (2 − ρ)·(1/I)⟨Ŵ, g⟩².

The factor 2 − ρ comes from the mixed product (2) and the square of the last term (−ρ). It is 1 at ε = 0, where the
three terms are the paper's. Divided by ‖g‖² they are `mean`, `along` and, on the left, `rest`:

| | along | mean | rest |
|---|---|---|---|
| center and scale | (2 − ρ)·(1/I)⟨Ŵ, g⟩², ρ = var/(var + ε) | (1/I)⟨1, g⟩² | (var + ε)‖∇W‖² |
| center | 0 | (1/I)⟨1, g⟩² | ‖∇W‖² |
| scale | (2 − ρ)·(1/I)⟨Ŵ, g⟩², ρ = q/(q + ε), q = mean W² | 0 | (q + ε)‖∇W‖² |

`residual` is 1 minus the three shares.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from micronorm.convert.surgery import names_of
from micronorm.nn.inputs import check_eps, check_flag
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.reparameterized import _CWN, _WN, _WS, Reparameterized, rows_of
from micronorm.nn.weight import WS, counterpart_kind, is_standardized_by_timm
from micronorm.ops.moments import compute_dtype, wide_dtype
from micronorm.ops.weight import over_rows, row_statistics, weight_standardize
from micronorm.ops.weight.reference import check_weight, gradient

TERMS = ("along", "mean", "rest", "residual")


class Shares(NamedTuple):
    """The shares of ‖∇Ŵ‖² of a layer, one number per output channel.

    A channel without gradient has NaN shares. The layer's totals ignore it, because they weigh each channel by its
    ‖∇Ŵ‖².

    Args:
        along: removed by scaling, the part along Ŵ: (2 − ρ)·(1/I)⟨Ŵ, ∇Ŵ⟩².
        mean: removed by centering: (1/I)⟨1, ∇Ŵ⟩².
        rest: what remains: σ²‖∇W‖².
        residual: 1 − along − mean − rest. This is rounding, or the error of a measured ∇W.
        square: ‖∇Ŵ‖².
        factor: 2 − ρ. `along / factor` is the paper's (1/I)⟨Ŵ, ∇Ŵ⟩².
    """

    along: Tensor
    mean: Tensor
    rest: Tensor
    residual: Tensor
    square: Tensor
    factor: Tensor

    def totals(self) -> dict[str, float]:
        """Return the shares of the layer's ‖∇Ŵ‖². All are NaN if no channel has a gradient."""
        terms = torch.stack(self[: len(TERMS)])
        sums = torch.where(self.square > 0, terms * self.square, 0.0).sum(1) / self.square.sum()
        return dict(zip(TERMS, sums.tolist(), strict=True))

    def channel_means(self) -> dict[str, float]:
        """Return the plain means over the channels with a gradient."""
        terms = torch.stack(self[: len(TERMS)])
        return dict(zip(TERMS, terms.nanmean(1).tolist(), strict=True))


def gradient_shares(
    weight: Tensor,
    grad_effective: Tensor,
    *,
    center: bool = True,
    scale: bool = True,
    eps: float = 1e-5,
    grad: Tensor | None = None,
) -> Shares:
    """Return the shares of ‖∇Ŵ‖² that standardization removes from the gradient of a weight, by output channel.

    The computation is in float64 if the device has it, and does not wait for the device. At ε = 0 a row of equal
    weights has NaN shares.

    Args:
        weight: the raw W, O×….
        grad_effective: ∇Ŵ, the gradient of the loss by the standardized weight, of the same shape.
        center: whether the mean is subtracted.
        scale: whether the weight is divided by its deviation, or without `center` by its root mean square.
        eps: added inside the root.
        grad: the measured ∇W for `rest`. By default it is computed from ∇Ŵ.

    Example:
        >>> shares = gradient_shares(torch.randn(8, 3, 3, 3), torch.randn(8, 3, 3, 3), eps=0.0)
        >>> shares.along.shape, bool((shares.along + shares.mean + shares.rest - 1).abs().max() < 1e-12)
        (torch.Size([8]), True)
    """
    check_weight(weight)
    check_flag("center", center)
    check_flag("scale", scale)
    check_eps(eps)
    for name, other in (("grad_effective", grad_effective), ("grad", grad)):
        if other is not None and other.shape != weight.shape:
            raise ValueError(
                f"{name} must have the weight's shape {tuple(weight.shape)}, got {tuple(other.shape)}; for transposed "
                "convolutions pass micronorm.nn.reparameterized.rows_of(layer, tensor)"
            )
    wide = wide_dtype(weight.device)
    w, g = (t.detach().flatten(1).to(wide) for t in (weight, grad_effective))
    options: dict[str, Any] = {"center": center, "scale": scale, "eps": eps}
    raw = gradient(w, g, **options) if grad is None else grad.detach().flatten(1).to(wide)
    what = weight_standardize(w, **options, backend="reference")
    _, sigma = row_statistics(w, **options)
    fan_in = w.shape[1]
    square = g.square().sum(1)
    factor = 2 - what.square().sum(1) / fan_in if scale else torch.ones_like(square)
    along = factor * (what * g).sum(1).square() / fan_in if scale else torch.zeros_like(square)
    mean = g.sum(1).square() / fan_in if center else torch.zeros_like(square)
    rest = sigma.square() * raw.square().sum(1)
    along, mean, rest = (term / square for term in (along, mean, rest))
    return Shares(along, mean, rest, 1 - along - mean - rest, square, factor)


def layer_shares(layer: Any, grad: Tensor) -> tuple[str, Shares]:
    """Return the name of a layer's standardization, and its shares from the gradient of the weight it computes with.

    - WS layers are described as they are. An absorbed mean and scale do not change the shares.
    - WN and CWN are WS without ε, and WN without centering. What they remove along Ŵ goes to their learnable length.
    - A plain layer, "none", is treated as if it were converted to WS with its mean and scale absorbed. ∇Ŵ is then a
      multiple of its gradient, and the shares are the same.
    """
    g = rows_of(layer, grad)
    method, center, scale, eps = "none", True, True, WS().eps
    if isinstance(layer, _WS):
        if layer.absorbed_scale is not None:  # the layer computes with scale·Ŵ + mean
            g = g * over_rows(layer.absorbed_scale, g)
        names = {(True, True): "WS", (True, False): "WS center", (False, True): "WS scale"}
        center, scale, eps = layer.center, layer.scale, layer.eps
        method = names.get((center, scale), "none")
    elif isinstance(layer, _WN | _CWN):
        # length·W/‖W‖ is Ŵ·length/√I
        g = g * over_rows(layer.length.detach() / g[0].numel() ** 0.5, g)
        center, eps = isinstance(layer, _CWN), 0.0
        method = "CWN" if center else "WN"
    weight = rows_of(layer, layer.weight.detach())
    return method, gradient_shares(weight, g, center=center, scale=scale, eps=eps)


# --- gradients of effective weights ----------------------------------------------------------------------------------


class GradientSum:
    """The sum of the gradients that reach one layer's effective weight. `total` is None before the first."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._hooked: dict[int, tuple[Tensor, Any]] = {}

    def watch(self, weight: Tensor) -> None:
        """Add the gradient of this weight when a backward pass computes it."""
        if torch.compiler.is_compiling() or not weight.requires_grad or id(weight) in self._hooked:
            return
        handle = weight.register_hook(self._add)
        if weight.is_leaf:  # parameters, and weights that micro-batches share, live on: hook them once
            self._hooked[id(weight)] = weight, handle

    def _add(self, grad: Tensor) -> None:
        # A copy, because the tensor may become .grad, and the next backward pass would add to it.
        wide = grad.detach().to(compute_dtype(grad.dtype), copy=self.total is None)
        self.total = wide if self.total is None else self.total.add_(wide)

    def close(self) -> None:
        """Remove the hooks."""
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


def observe_weight(layer: Any, observe: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call `observe` with the effective weight of every forward of a layer. Return a function that stops it."""
    hook = PassiveHook(observe)
    layer.weight_observers = (*layer.weight_observers, hook)

    def stop() -> None:
        remaining = tuple(other for other in layer.weight_observers if other is not hook)
        if remaining:
            layer.weight_observers = remaining
        else:
            vars(layer).pop("weight_observers", None)

    return stop


@contextlib.contextmanager
def effective_gradients(model: nn.Module) -> Iterator[dict[str, GradientSum]]:
    """Record ∇Ŵ of every convolution and linear layer during the forwards and backwards in this block, by name.

    Gradients of several passes are summed, without what `.grad` held before. This works with `SharedWeights`,
    activation checkpointing and autocast. A loss scale scales all gradients. Compiled models and replayed CUDA graphs
    do not run hooks. Under DDP the gradients are those of this rank.

    Example:
        >>> from micronorm.nn import WSConv2d
        >>> model = WSConv2d(3, 8, 3)
        >>> with effective_gradients(model) as gradients:
        ...     model(torch.randn(1, 3, 5, 5)).square().sum().backward()
        >>> gradients[""].total.shape
        torch.Size([8, 3, 3, 3])
    """
    layers = {name: m for name, m in weight_layers(model).items() if m.weight.requires_grad}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no convolution or linear layer with a known forward, a trainable weight and a "
            "fan-in of at least 2"
        )
    gradients = {name: GradientSum() for name in layers}
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(gradients[name].close)
            if isinstance(layer, Reparameterized):
                stack.callback(observe_weight(layer, gradients[name].watch))
            else:
                gradients[name].watch(layer.weight)
        yield gradients


def weight_shares(model: nn.Module, gradients: Mapping[str, GradientSum]) -> dict[str, Shares]:
    """Return the shares of every layer that got a gradient, by name. See `layer_shares` for each kind of layer.

    Args:
        model: the network.
        gradients: what `effective_gradients` recorded.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 2))
        >>> with effective_gradients(model) as gradients:
        ...     model(torch.randn(4, 3, 5, 5)).square().sum().backward()
        >>> list(weight_shares(model, gradients))
        ['0', '2']
    """
    shares = {}
    for name, layer in weight_layers(model).items():
        total = gradients[name].total if name in gradients else None
        if total is not None:
            shares[name] = layer_shares(layer, total)[1]
    if not shares:
        raise RuntimeError(
            f"none of {len(gradients)} layers has a gradient; run forward and backward inside "
            "`with effective_gradients(model) as gradients:`, on the model itself and not on a compiled one"
        )
    return shares


# --- layers with a weight --------------------------------------------------------------------------------------------


def weight_layers(model: nn.Module) -> dict[str, Any]:
    """Return convolutions and linear layers by name, plain or reparameterized by this library.

    Layers of fan-in 1 are left out. So are layers whose `weight` is not a parameter (parametrizations, old weight_norm)
    and layers with an unknown forward, because they may compute with another weight than their parameter.

    Example:
        >>> list(weight_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8))))
        ['0']
    """
    found: dict[str, Any] = {}
    for module, names in names_of(model).items():
        weight = module._parameters.get("weight")
        if weight is None or isinstance(weight, UninitializedParameter) or not _is_known(module):
            continue
        rows = rows_of(module, weight)
        if rows.numel() >= 2 * rows.shape[0] > 0:
            found[names[0]] = module
    return found


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, Reparameterized):
        return True
    return counterpart_kind(module) is not None and not is_standardized_by_timm(module)
