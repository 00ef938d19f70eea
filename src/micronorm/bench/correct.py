"""Our layer against the plain equations in float64, at the very shape, layout and dtype that is about to be timed.

An error is measured against the tensor's maximum, as in the library's tests, and for the same reasons:

- outputs and gradients of half types are computed in float32 and rounded once: 2 eps for outputs, 4 for gradients;
- float32 sums of n elements err by log2(n) eps at worst: 16 eps for outputs and 64 for gradients up to n = 2¹⁶, and
  in proportion to log2(n) above;
- the expected values come from the input *as rounded* to the dtype.

A parameter's gradient may cancel to nothing (a shift of a channel that is a group of its own changes no output), and
then has the size of its rounding errors. So it is measured against what cancels, where that is more than its maximum:
what a sum of that many terms of either sign comes to, √n times the gradient's own size, and the largest sum over a
channel, which is a channel's part of the gradient of β^c.

Where a group or, in "batch" mode, a channel has few elements, more cancels: two elements are normalized to their signs,
which no small change of them changes. A gradient is then what is left of a much larger one, the one that would be if
all statistics were held: A·g for an input (dx = A·g + Q·(x − m) + R with A = γ^c·a/S), sums of γ^c/S·g and γ^c/S·g·x̂
for β^b and γ^b. Of those it may err by as many eps of the computation's dtype as an output may. Measured by shapes with
four to eight elements in a group and two to six in a channel, every mode, 12 to 60 draws: one-pass up to 0.1 of what is
allowed, kernels up to 0.5. Where groups and channels are large this allows less than the above. Below four elements in
a group float32 outputs themselves lose their digits; `cases.py` refuses such shapes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from micronorm.bench.cases import lay_out
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.bcn import algorithm1, batch_channel_norm_reference
from micronorm.ops.moments import Moments, as_ncs, compute_dtype

_EPS = {"output": {True: 2, False: 16}, "gradient": {True: 4, False: 64}}  # by: is it a half type
_SUMMED = 2**16  # elements of a sum up to which the factors for float32 hold

KINK = 1e-3
"""Around zero, where the rectifier's derivative jumps, no gradient is sent: rounding decides there on which side an
element lies, and a derivative of 1 where float64 has 0 is no error of the layer. float32 errs by less than 1e-5."""


@dataclass(frozen=True)
class Deviation:
    """One tensor's distance from what it should be, relative to its size, and how far it may be."""

    name: str
    error: float
    tolerance: float

    @property
    def is_wrong(self) -> bool:
        """Beyond the tolerance, or no number."""
        return not self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{self.name} is {self.error:.2e} from float64, {self.tolerance:.2e} allowed"


def tolerance(kind: str, dtype: torch.dtype, *, summed: int) -> float:
    """What is allowed for an "output" or a "gradient" of a dtype that holds sums of `summed` elements.

    Example:
        >>> tolerance("output", torch.bfloat16, summed=2**20) == 2 * torch.finfo(torch.bfloat16).eps
        True
        >>> tolerance("gradient", torch.float32, summed=2**20) == 80 * torch.finfo(torch.float32).eps
        True
    """
    is_half = dtype.itemsize < 4
    size = 1.0 if is_half else max(1.0, math.log2(summed) / math.log2(_SUMMED))
    return size * _EPS[kind][is_half] * torch.finfo(dtype).eps


def find_norm(layer: nn.Module) -> BatchChannelNorm:
    """The BatchChannelNorm of a method's layer."""
    return next(module for module in layer.modules() if isinstance(module, BatchChannelNorm))


def spread_state(norm: BatchChannelNorm, *, seed: int = 0) -> None:
    """Affines and estimates that differ from channel to channel, so that no term of the equations is idle."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor, low, high in (
            (norm.weight, 0.5, 1.5),
            (norm.bias, -0.5, 0.5),
            (norm.group_weight, 0.5, 1.5),
            (norm.group_bias, -0.5, 0.5),
            (norm.running_mean, -0.2, 0.2),
            (norm.running_var, 0.5, 1.5),
        ):
            tensor.copy_(torch.empty(tensor.shape).uniform_(low, high, generator=generator))


def deviations(layer: nn.Module, x: Tensor, *, relu: bool = True) -> list[Deviation]:
    """Output, input gradient and affine gradients of one forward and backward, against float64 on the same device.

    Args:
        layer: holds one BatchChannelNorm; what it computes is that norm, and a rectifier where `relu`.
        x: the input, in the dtype and layout to be timed.
        relu: whether the layer rectifies.
    """
    norm = find_norm(layer)
    x64 = x.detach().double().requires_grad_()
    parameters64 = [p.detach().double().requires_grad_() for p in _affine(norm)]
    before = _plain(norm, x64, parameters64)
    generator = torch.Generator(x.device).manual_seed(1)
    # Noise alone sums to nothing over a large map: all that flows back through the statistics would be below what half
    # types may err. The part that follows the output gives those sums the size of the gradient itself.
    outer = (torch.randn(x.shape, device=x.device, generator=generator) + before.detach()).to(x.dtype)
    if relu:
        outer = torch.where(before.detach().abs() < KINK, 0, outer)
    layout = "nchw" if x.is_contiguous() else "nhwc"
    outer = lay_out(outer, layout)
    y64 = before.relu() if relu else before
    held = _held(norm, x64.detach(), torch.where(before.detach() > 0, outer.double(), 0) if relu else outer.double())
    expected = (y64.detach(), *torch.autograd.grad(y64, (x64, *parameters64), outer.double()))
    del before, y64, x64
    x = x.detach().requires_grad_()
    y = layer(x)
    actual = (y.detach(), *torch.autograd.grad(y, (x, *_affine(norm)), outer))
    return list(_compare(actual, expected, outer, held=held))


def _affine(norm: BatchChannelNorm) -> list[nn.Parameter]:
    return [norm.weight, norm.bias, norm.group_weight, norm.group_bias]


def _plain(norm: BatchChannelNorm, x: Tensor, affine: list[Tensor]) -> Tensor:
    """The plain equations of the mode that the layer is in."""
    estimates = Moments(norm.running_mean.double(), norm.running_var.double())
    options = {"groups": norm.num_groups, "eps": norm.eps}
    if norm.training and norm.statistics == "sequential":
        assert isinstance(norm.rate, float)
        return algorithm1(x, estimates, norm.rate, *affine, micro_batch=norm.micro_batch, **options)[0]
    given = None if norm.training and norm.statistics == "batch" else estimates
    return batch_channel_norm_reference(x, given, *affine, **options)


def _held(norm: BatchChannelNorm, x: Tensor, g: Tensor) -> dict[str, float]:
    """How large gradients would be if all statistics were held: the largest of the input's, and of the sums' sizes."""
    weight, bias, group_weight, _ = (p.detach().double() for p in _affine(norm))
    mean, var = (values.unsqueeze(-1) for values in _statistics(norm, x))
    rstd = (var + norm.eps).rsqrt()
    hat_ncs = (as_ncs(x) - mean) * rstd
    dot_ngs = (weight[:, None] * hat_ncs + bias[:, None]).unflatten(1, (norm.num_groups, -1)).flatten(2)
    gain_ng = group_weight / (dot_ngs.var(2, correction=0) + norm.eps).sqrt()
    dot_grad_ncs = gain_ng.repeat_interleave(norm.num_channels // norm.num_groups, 1).unsqueeze(-1) * as_ncs(g)
    return {
        "input gradient": (dot_grad_ncs * weight[:, None] * rstd).abs().max().item(),
        "weight gradient": (dot_grad_ncs * hat_ncs).square().sum((0, 2)).max().sqrt().item(),
        "bias gradient": dot_grad_ncs.square().sum((0, 2)).max().sqrt().item(),
    }


def _statistics(norm: BatchChannelNorm, x: Tensor) -> Moments:
    """What every sample's channels are normalized with in the mode that the layer is in: N×C or 1×C numbers."""
    estimates = Moments(norm.running_mean.double(), norm.running_var.double())
    if norm.training and norm.statistics == "batch":
        channels = as_ncs(x).transpose(0, 1).flatten(1)
        return Moments(channels.mean(1)[None], channels.var(1, correction=0)[None])
    if not norm.training or norm.statistics != "sequential":
        return Moments(estimates.mean[None], estimates.var[None])
    assert isinstance(norm.rate, float)
    affine = [p.detach().double() for p in _affine(norm)]
    rows: list[Moments] = []
    for part in x.split(norm.micro_batch):
        estimates = algorithm1(part, estimates, norm.rate, *affine, groups=norm.num_groups, micro_batch=len(part))[1]
        rows += [estimates] * len(part)
    return Moments(torch.stack([row.mean for row in rows]), torch.stack([row.var for row in rows]))


def _compare(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], outer: Tensor, *, held: Mapping[str, float]
) -> Iterator[Deviation]:
    names = ("output", "input gradient", "weight gradient", "bias gradient", "group_weight gradient", "group_bias")
    size = outer.double().square().mean().sqrt().item()
    summed_up = expected[-1].abs().max().item() * expected[-1].numel() / outer.shape[1]
    for name, a, e in zip(names, actual, expected, strict=True):
        is_sum = e.ndim == 1
        # Of an output: at most a sample's elements (a group's are fewer), or in "batch" mode a channel's.
        summed = outer.numel() // (e.numel() if is_sum else min(outer.shape[:2]))
        scale = max(e.abs().max().item(), math.sqrt(summed) * size if is_sum else 0.0, summed_up if is_sum else 0.0)
        worst = (a.double() - e).abs().max().item()
        error = worst / scale if scale else (0.0 if worst == 0 else math.inf)
        kind = "output" if name == "output" else "gradient"
        allowed = tolerance(kind, a.dtype, summed=summed)
        if name in held and scale:
            allowed = max(allowed, held[name] / scale * tolerance("output", compute_dtype(a.dtype), summed=summed))
        yield Deviation(name, error, allowed)
