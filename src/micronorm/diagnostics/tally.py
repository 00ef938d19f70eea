"""What is gathered of the layers during one optimizer step, on their devices, and read from there in one transfer.

Everything adds up over micro-batches by counts, so it does not depend on how the step was cut into them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from micronorm.diagnostics.channels import (
    RunningMoments,
    dead_channels,
    distance_to_bn,
    positives,
    rare_channels,
)
from micronorm.diagnostics.layers import over_rows, rows_of
from micronorm.diagnostics.lipschitz import gradient_shares
from micronorm.diagnostics.norms import NormLayer
from micronorm.diagnostics.statdiff import stat_diff
from micronorm.nn.reparameterized import _CWN, _WN, _WS
from micronorm.nn.weight import WS
from micronorm.ops.bcn import batch_channel_norm
from micronorm.ops.moments import Moments, as_ncs, compute_dtype, moments, wide_dtype
from micronorm.ops.private_api import foreach_norm

_SAMPLE = 1024  # weights of a layer that a histogram is drawn from

Figures = dict[str, Any]


class NormTally:
    """The inputs, normalized channels and positive outputs of one norm layer."""

    def __init__(self, norm: NormLayer) -> None:
        self.norm = norm
        self._moments = RunningMoments()  # side by side, of the input, what is normalized together, and the result
        self._positive: Tensor | None = None
        self._outputs = 0  # per channel

    @property
    def is_empty(self) -> bool:
        """Whether nothing was seen."""
        return self._moments.count == 0

    def add(self, x: Tensor, output: Tensor, *, alone: bool) -> None:
        """Take up one forward; `alone` says that nothing was added to the output within it."""
        x = self.norm.channels_first(x)
        data = _moments(x)
        passage = self.norm.pass_through(x, data)
        positions = x.numel() // data.mean.numel()
        # Of Batch-Channel Normalization what is normalized together is no longer the input.
        parts = [data, passage.normalized] if passage.grouped is data else [data, passage.grouped, passage.normalized]
        self._moments.add(Moments(*(torch.cat(part, 1) for part in zip(*parts, strict=True))), positions=positions)
        y = self.norm.channels_first(output) if alone else _own_output(self.norm, x, data)
        if y is not None and y.shape == x.shape:
            positive = positives(y)
            self._positive = positive if self._positive is None else self._positive + positive
            self._outputs += data.mean.shape[0] * positions

    def numbers(self) -> list[Tensor]:
        """What `figures` needs, on the device."""
        found = list(self._moments.moments)
        return found if self._positive is None else [*found, self._positive]

    def figures(self, numbers: Sequence[Tensor]) -> Figures:
        """The row of kind "norm" of `micronorm.records`, from the numbers on the host."""
        channels = self.norm.channels
        means, variances = (part.split(channels) for part in numbers[:2])
        difference = stat_diff(means[-2], variances[-2], self.norm.groups)
        distance = distance_to_bn(means[-1], variances[-1], eps=self.norm.eps)
        row: Figures = {
            "kind": "norm",
            "norm": type(self.norm.module).__name__,
            "channels": channels,
            "groups": self.norm.groups,
            "stat_diff": float(difference.mean()),
            "stat_diff_worst": float(difference.max()),
            "sigma_mean": distance.sigma_mean,
            "sigma_std": distance.sigma_std,
        }
        if len(numbers) > 2:
            rate = numbers[2] / self._outputs
            row |= {
                "active": float(rate.mean()),
                "dead": int(dead_channels(rate).sum()),
                "rare": int(rare_channels(rate).sum()),
            }
        return row

    def channel_means(self, numbers: Sequence[Tensor]) -> Tensor:
        """Those of the input, C numbers, on the host."""
        return numbers[0][: self.norm.channels]


def _moments(x: Tensor) -> Moments:
    """As `moments`; on a GPU by one launch, whose accuracy will do for a look."""
    if x.device.type == "cpu":
        return moments(x)
    var, mean = torch.var_mean(as_ncs(x).to(compute_dtype(x.dtype)), -1, correction=0)
    wide = wide_dtype(x.device)
    return Moments(mean.to(wide), var.to(wide))


def _own_output(norm: NormLayer, x: Tensor, data: Moments) -> Tensor | None:
    """What the norm gives by itself, where its forward was asked to add something; computed without a trace."""
    layer = norm.module
    if norm.family == "group":
        return torch.group_norm(x, layer.num_groups, layer.weight, layer.bias, layer.eps)
    if norm.family != "batch-channel":
        return None
    estimates = None if norm.uses_batch else norm.estimates()
    affine = (layer.weight, layer.bias, layer.group_weight, layer.group_bias)
    options: dict[str, Any] = {"groups": layer.num_groups, "eps": layer.eps, "blend": layer.blend}
    return batch_channel_norm(x, estimates, *affine, **options, data=data)


class WeightTally:
    """The gradient of the weight that a layer computes with, where that is not the gradient of its parameter."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._kept: dict[int, tuple[Tensor, Any]] = {}

    def watch(self, weight: Tensor) -> None:
        """See the gradient of an effective weight, when it comes."""
        if torch.compiler.is_compiling() or not weight.requires_grad or id(weight) in self._kept:
            return
        handle = weight.register_hook(self._add)
        if weight.is_leaf:  # a weight that micro-batches share lives on, and would show every gradient again
            self._kept[id(weight)] = weight, handle

    def _add(self, grad: Tensor) -> None:
        # A copy: the tensor may become .grad itself, and be added to by the next backward pass.
        wide = grad.detach().to(compute_dtype(grad.dtype), copy=self._sum is None)
        self._sum = wide if self._sum is None else self._sum.add_(wide)

    def clear(self) -> None:
        """Forget the gradients."""
        self._sum = None

    def close(self) -> None:
        """See no more of them."""
        for _, handle in self._kept.values():
            handle.remove()
        self._kept.clear()

    def gradient(self) -> Tensor | None:
        """The sum; None where none came."""
        return self._sum


class _Standardization(NamedTuple):
    """What gradients are divided into shares by: one computation for layers of an equal one with rows of one length."""

    method: str
    center: bool
    scale: bool
    eps: float


def _standardization(layer: Any, g: Tensor) -> tuple[_Standardization, Tensor]:
    """That of a layer, and the gradient of Ŵ from that of the weight the layer computes with, by rows.

    A plain layer is seen as if it were standardized, with its mean and scale absorbed: ∇Ŵ is a multiple of what it has.
    """
    if isinstance(layer, _WS):
        kinds = {(True, True): "WS", (True, False): "WS center", (False, True): "WS scale"}
        if layer.absorbed_scale is not None:  # the layer computes with scale·Ŵ + mean
            g = g * over_rows(layer.absorbed_scale, g)
        method = kinds.get((layer.center, layer.scale), "none")
        return _Standardization(method, layer.center, layer.scale, layer.eps), g
    if isinstance(layer, _WN | _CWN):  # length·W/‖W‖ is Ŵ·length/√I
        g = g * over_rows(layer.length.detach() / g[0].numel() ** 0.5, g)
        centered = isinstance(layer, _CWN)
        return _Standardization("CWN" if centered else "WN", centered, True, 0.0), g
    return _Standardization("none", True, True, WS().eps), g


_SHARES = ("along", "mean", "rest", "residual")


class WeightNumbers:
    """The shares and norms of all weights that have a gradient, as they are before the optimizer moves them.

    Rows of one length are divided into shares together, whichever layers they belong to: a network has few lengths, and
    the cost of a look is that of launching its operations.
    """

    def __init__(self, layers: Mapping[str, Any], tallies: Mapping[str, WeightTally], *, samples: bool) -> None:
        self._tallied = set(tallies)
        members: dict[Any, list[tuple[str, Tensor, Tensor]]] = {}
        for name, layer in layers.items():
            gradient = tallies[name].gradient() if name in tallies else layer.weight.grad
            if gradient is not None and layer.weight.grad is not None:
                kind, g = _standardization(layer, rows_of(layer, gradient))
                w, g = rows_of(layer, layer.weight.detach()).flatten(1), g.flatten(1)
                members.setdefault((kind, w.shape[1], w.device, w.dtype, g.dtype), []).append((name, w, g))
        self._members = [(key[0], [(name, len(w)) for name, w, _ in parts]) for key, parts in members.items()]
        self._shares = [_shares(key[0], parts) for key, parts in members.items()]
        self._names = [name for _, parts in self._members for name, _ in parts]
        weights = [layers[name].weight for name in self._names]
        # The gradient's own norm: what was seen of the effective weight may carry a loss scale, or be a sum.
        self._norms: list[Tensor] = []
        if weights:
            self._norms = [*foreach_norm(weights), *foreach_norm([weight.grad for weight in weights])]
        self._samples = [_sample(weight) for weight in weights] if samples else []

    def numbers(self) -> list[Tensor]:
        """What `figures` and `samples` need, on the device."""
        return [*self._shares, *self._norms, *self._samples]

    def figures(self, numbers: Sequence[Tensor], *, loss_scale: float) -> dict[str, Figures]:
        """The rows of kind "weight" of `micronorm.records`, by layer, from the numbers on the host."""
        first, count = len(self._shares), len(self._names)
        norms, grads = numbers[first : first + count], numbers[first + count : first + 2 * count]
        rows: dict[str, Figures] = {}
        squares: dict[str, Tensor] = {}
        for (kind, parts), shares in zip(self._members, numbers, strict=False):
            sizes = [size for _, size in parts]
            for (name, _), totals in zip(parts, _totals(shares, sizes), strict=True):
                rows[name] = {"kind": "weight", "weight": kind.method, **dict(zip(_SHARES, totals, strict=True))}
            squares |= {name: square for (name, _), square in zip(parts, shares[-1].split(sizes), strict=True)}
        for name, norm, grad in zip(self._names, norms, grads, strict=True):
            rows[name] |= {"norm": float(norm), "grad": float(grad) / loss_scale}
        if any(grad.isfinite() and not squares[n].isfinite().all() for n, grad in zip(self._names, grads, strict=True)):
            # A step that was skipped left gradients behind, and those of other layers may be finite: none can be told.
            rows = {name: row for name, row in rows.items() if name not in self._tallied}
        return rows

    def samples(self, numbers: Sequence[Tensor]) -> dict[str, Tensor]:
        """Some of each layer's weights, where they were asked for."""
        drawn = numbers[len(self._shares) + len(self._norms) :]
        return dict(zip(self._names, drawn, strict=True)) if drawn else {}


def _shares(kind: _Standardization, parts: Sequence[tuple[str, Tensor, Tensor]]) -> Tensor:
    """The four shares of every row and its ‖∇Ŵ‖², 5×R."""
    w, g = (torch.cat(values) for values in list(zip(*parts, strict=True))[1:])
    shares = gradient_shares(w, g, center=kind.center, scale=kind.scale, eps=kind.eps)
    return torch.stack([*(getattr(shares, name) for name in _SHARES), shares.square])


def _totals(shares: Tensor, sizes: Sequence[int]) -> list[list[float]]:
    """The shares of each layer's ‖∇Ŵ‖²: rows weighed by their own, those without a gradient left out."""
    terms, square = shares[:-1], shares[-1]
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    weighed = torch.where(square == 0, 0.0, terms * square)  # 0/0 where there is no gradient; NaN stays
    sums = torch.zeros(len(terms), len(sizes), dtype=terms.dtype).index_add_(1, index, weighed)
    return (sums / torch.zeros(len(sizes), dtype=terms.dtype).index_add_(0, index, square)).T.tolist()


def _sample(weight: Tensor) -> Tensor:
    """Up to `_SAMPLE` numbers at equal distances in memory; a copy, since the optimizer is about to move them."""
    flat = weight.detach()
    if not flat.is_contiguous():  # any dense layout holds the same numbers; a view of them costs nothing
        flat = flat.permute(sorted(range(flat.ndim), key=flat.stride, reverse=True))
    flat = flat.reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLE)].clone()


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors in float64 on the CPU, by one transfer per device."""
    tensors = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    found: dict[int, Tensor] = {}
    for device, places in by_device.items():
        parts = [tensors[i] for i in places]
        flat = torch.cat([part.reshape(-1).to(wide_dtype(device)) for part in parts]).to("cpu", torch.float64)
        sizes = [part.numel() for part in parts]
        for i, part, values in zip(places, parts, flat.split(sizes), strict=True):
            found[i] = values.reshape(part.shape)
    return [found[i] for i in range(len(tensors))]
