"""The Lipschitz constant of the loss: what standardization takes from the gradient of a weight (Sec. `sec:eowot`).

For one output channel with fan-in I let g = ∇Ŵ be the gradient of the effective weight, σ² = var + ε, and
ρ = ‖Ŵ‖²/I = var/(var + ε). The backward of WS is σ·∇W = g − (1/I)⟨1, g⟩·1 − (1/I)⟨Ŵ, g⟩·Ŵ, and ⟨1, Ŵ⟩ = 0, so

    σ²‖∇W‖² = ‖g‖² − (1/I)⟨1, g⟩² − (2 − ρ)·(1/I)⟨Ŵ, g⟩².

The last factor is 2 from the mixed product and −ρ from the square of the last term; at ε = 0 it is one, and the three
terms are those of the paper. Divided by ‖g‖² they are `mean`, `along` and, on the left, `rest`:

| | along | mean | rest |
|---|---|---|---|
| center and scale | (2 − ρ)·(1/I)⟨Ŵ, g⟩², ρ = var/(var + ε) | (1/I)⟨1, g⟩² | (var + ε)‖∇W‖² |
| center | 0 | (1/I)⟨1, g⟩² | ‖∇W‖² |
| scale | (2 − ρ)·(1/I)⟨Ŵ, g⟩², ρ = q/(q + ε), q = mean W² | 0 | (q + ε)‖∇W‖² |

Nothing is renormalized: `residual` is what the three lack to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.capture import Captured
from micronorm.diagnostics.layers import Filter, over_rows, rows_of, weight_layers
from micronorm.nn.inputs import check_eps, check_flag
from micronorm.nn.reparameterized import _CWN, _WN, _WS, Reparameterized
from micronorm.nn.weight import WS
from micronorm.ops.moments import wide_dtype
from micronorm.ops.weight import row_statistics, weight_standardize
from micronorm.ops.weight.reference import check_weight, gradient

TERMS = ("along", "mean", "rest", "residual")


@dataclass(frozen=True, eq=False)
class Shares:
    """The shares of ‖∇Ŵ‖² of a layer; O numbers each, one per output channel.

    A channel without gradient has shares of 0/0, NaN; the layer's figures leave it out, since they weigh each channel
    by its ‖∇Ŵ‖².
    """

    along: Tensor
    """What scaling takes: the part along Ŵ, (2 − ρ)·(1/I)⟨Ŵ, ∇Ŵ⟩² of ‖∇Ŵ‖²."""
    mean: Tensor
    """What centering takes: (1/I)⟨1, ∇Ŵ⟩²."""
    rest: Tensor
    """What is left: σ²‖∇W‖²."""
    residual: Tensor
    """1 − along − mean − rest: rounding, where `rest` comes from the formula; else the error of the measured ∇W too."""
    square: Tensor
    """‖∇Ŵ‖²."""
    factor: Tensor
    """2 − ρ: `along / factor` is the paper's (1/I)⟨Ŵ, ∇Ŵ⟩², which is the same at ε = 0."""
    weight_norm: Tensor
    """‖W‖ of the whole layer."""
    grad_norm: Tensor
    """‖∇W‖ of the whole layer."""
    method: str = "WS"
    """The layer's reparameterization: "WS", "WS center", "WS scale", "WN", "CWN", or "none"."""

    def totals(self) -> dict[str, float]:
        """The shares of the layer's ‖∇Ŵ‖²: channels weighed by their own. All NaN where no channel has a gradient."""
        return dict(zip(TERMS, self._totals().tolist(), strict=True))

    def channel_means(self) -> dict[str, float]:
        """The plain means over the channels that have a gradient."""
        terms = torch.stack([getattr(self, name) for name in TERMS])
        return dict(zip(TERMS, terms.nanmean(1).tolist(), strict=True))

    def figures(self) -> dict[str, Any]:
        """The row of kind "weight" of `micronorm.records`, as far as it is known here. One read of the device."""
        values = torch.cat([self._totals(), torch.stack([self.weight_norm, self.grad_norm])]).tolist()
        return {"kind": "weight", "weight": self.method, **dict(zip((*TERMS, "norm", "grad"), values, strict=True))}

    def _totals(self) -> Tensor:
        terms = torch.stack([getattr(self, name) for name in TERMS])
        return torch.where(self.square > 0, terms * self.square, 0.0).sum(1) / self.square.sum()


def gradient_shares(
    weight: Tensor,
    grad_effective: Tensor,
    *,
    center: bool = True,
    scale: bool = True,
    eps: float = 1e-5,
    grad: Tensor | None = None,
) -> Shares:
    """The shares of ‖∇Ŵ‖² that standardization takes from the gradient of one weight, by output channel.

    Computed in float64 (where the device has it), without waiting for the device. At ε = 0 a row of equal weights has
    no Ŵ, and NaN for its shares.

    Args:
        weight: the raw W, O×….
        grad_effective: ∇Ŵ, the gradient of the loss by the standardized weight, of the same shape.
        center: whether the mean is subtracted.
        scale: whether the weight is divided by its deviation (without `center`, its root mean square).
        eps: added inside the root.
        grad: ∇W as it was measured, for `rest`; where none is given it is computed from ∇Ŵ.

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
                f"{name} must have the weight's shape {tuple(weight.shape)}, got {tuple(other.shape)}; transposed "
                "convolutions are seen by rows, see micronorm.diagnostics.layers.rows_of"
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
    terms = [term / square for term in (along, mean, rest)]
    method = {(True, True): "WS", (True, False): "WS center", (False, True): "WS scale"}.get((center, scale), "none")
    return Shares(*terms, 1 - sum(terms), square, factor, w.norm(), raw.norm(), method)  # type: ignore[arg-type]


def weight_shares(
    model: nn.Module,
    captured: Mapping[str, Captured] | None = None,
    *,
    plain: WS | None = WS(),  # noqa: B008  (frozen)
    filter: Filter | None = None,
) -> dict[str, Shares]:
    """The shares of every convolution and linear layer that got a gradient, by name.

    - WS layers: the shares of what the layer does, `rest` from the ∇W that was measured. Absorbed means and scales are
      part of the layer's function; they change no share.
    - WN and CWN: as WS without ε, without and with centering; what they take along Ŵ goes to their learnable length.
    - Plain layers, method "none": what `plain` *would* take from this gradient, were the layer standardized at this
      moment with its mean and scale absorbed, so that it computes what it does now. ∇Ŵ is then a multiple of the
      gradient the layer has, and shares are the same for all multiples. `grad` is the norm of that gradient itself.

    ∇Ŵ is an intermediate result which a backward pass leaves nowhere: `effective_gradients` keeps it. Without
    `captured`, plain layers are seen by their `.grad`, and a model with reparameterized ones is refused.

    Args:
        model: the network.
        captured: what `effective_gradients` gave.
        plain: the standardization that plain layers are seen through; None leaves them out.
        filter: says of a layer and its name whether to take it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(2))
        >>> model(torch.randn(4, 3, 5, 5)).square().sum().backward()
        >>> list(weight_shares(model))
        ['0', '2']
    """
    layers = weight_layers(model, filter)
    if captured is None:
        captured = _from_parameters(layers)
    shares = {}
    for name, layer in layers.items():
        seen = captured.get(name)
        if seen is None or seen.effective is None or (plain is None and not isinstance(layer, Reparameterized)):
            continue
        shares[name] = _layer_shares(layer, seen.effective, seen.raw, plain)
    if not shares:
        raise RuntimeError(
            f"none of the {len(layers)} convolutions and linear layers looked at has a gradient; run forward and "
            "backward inside `with effective_gradients(model) as captured:`, on the model itself rather than a "
            "compiled one"
        )
    return shares


def average_shares(shares: Mapping[str, Shares]) -> dict[str, float]:
    """The mean over layers of each layer's shares (`Shares.totals`).

    Layers without gradient are left out. `micronorm reproduce fig:mean_div` averages `Shares.channel_means` instead,
    where all channels weigh alike; the paper says "average" and not of which.

    Example:
        >>> both = {name: gradient_shares(torch.randn(8, 27), torch.randn(8, 27)) for name in "ab"}
        >>> sorted(average_shares(both))
        ['along', 'mean', 'residual', 'rest']
    """
    if not shares:
        raise ValueError("there are no layers to average over")
    by_layer = torch.tensor([list(s.totals().values()) for s in shares.values()], dtype=torch.float64)
    return dict(zip(TERMS, by_layer.nanmean(0).tolist(), strict=True))


def _from_parameters(layers: Mapping[str, Any]) -> dict[str, Captured]:
    ours = [name for name, layer in layers.items() if isinstance(layer, Reparameterized)]
    if ours:
        raise ValueError(
            f"{len(ours)} layers compute with a weight made from their parameter (the first is {ours[0]!r}), and a "
            "backward pass keeps the gradient of the parameter only; run it inside "
            "`with effective_gradients(model) as captured:` and give `captured`"
        )
    return {name: Captured(layer.weight.grad, None) for name, layer in layers.items()}


def _layer_shares(layer: Any, effective: Tensor, raw: Tensor | None, plain: WS | None) -> Shares:
    weight, g = rows_of(layer, layer.weight.detach()), rows_of(layer, effective)
    grad = None if raw is None else rows_of(layer, raw)
    if isinstance(layer, _WS):
        if layer.absorbed_scale is not None:  # the layer computes with scale·Ŵ + mean
            g = g * over_rows(layer.absorbed_scale, g)
        return gradient_shares(weight, g, center=layer.center, scale=layer.scale, eps=layer.eps, grad=grad)
    if isinstance(layer, _WN | _CWN):
        # length·W/‖W‖ is Ŵ·length/√I
        g = g * over_rows(layer.length.detach() / weight[0].numel() ** 0.5, g)
        centered = isinstance(layer, _CWN)
        shares = gradient_shares(weight, g, center=centered, eps=0.0, grad=grad)
        return replace(shares, method="CWN" if centered else "WN")
    assert plain is not None, "plain layers were left out above"
    shares = gradient_shares(weight, g, center=plain.center, scale=plain.scale, eps=plain.eps)
    return replace(shares, method="none", grad_norm=g.to(shares.square.dtype).norm())
