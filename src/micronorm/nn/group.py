"""Normalizations within one sample: group, layer and instance normalization, and their specs."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from micronorm.nn.backends import check_backend, resolve_backend
from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.inputs import check_eps, check_input, check_residual
from micronorm.nn.per_step.recorder import active
from micronorm.nn.spec import GroupedSpec, NormSpec
from micronorm.ops.activation import IDENTITY, Activation, check_activation
from micronorm.ops.bcn import elementwise_fused, group_norm_fused


class GroupNorm(Fingerprinted, nn.GroupNorm):
    """nn.GroupNorm that can also compute the residual addition and activation after it: act(GN(x) + residual).

    Arguments, state-dict keys and repr are those of torch's layer. On CUDA devices the kernels of Batch-Channel
    Normalization compute it, with constant estimates; elsewhere torch's own function. Unlike torch's layer it accepts
    groups with a single value, for which y = bias.

    Args:
        num_groups: G, which must divide C.
        num_channels: C, the size of axis 1 of the input.
        eps: added to the variance, inside the root.
        affine: whether there are weight and bias (C).
        device: as in torch.nn.
        dtype: as in torch.nn.
        backend: `"triton"`, fused kernels for CUDA devices; `"one-pass"` and `"reference"`, torch's own function;
            `"auto"`, kernels where they run, else torch's.

    Shape: N×C, N×C×L, N×C×H×W or N×C×D×H×W; the output has the input's shape, dtype and memory format.

    Example:
        >>> norm = GroupNorm(4, 16)
        >>> x = torch.randn(2, 16, 8, 8)
        >>> norm(x, residual=x, activation="relu").shape
        torch.Size([2, 16, 8, 8])
    """

    function = ("GN", "num_groups", "eps")

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        check_eps(eps)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.backend = check_backend(backend)

    @property
    def activation(self) -> None:
        """Return None: the layer has no activation of its own; a call may name one."""
        return None

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        activation: str | None = None,
        negative_slope: float = 0.01,
    ) -> Tensor:
        """Return act(GN(input) + residual).

        Args:
            input: N×C×….
            residual: added before the activation; it has the input's shape.
            activation: `"relu"`, `"leaky_relu"` or `"silu"`.
            negative_slope: the slope of `"leaky_relu"` for negative values.
        """
        act = check_activation(activation, negative_slope)
        check_input(input, self.num_channels, type(self).__name__)
        if residual is not None:
            check_residual(residual, input)
        if input.numel() != 0 and resolve_backend(self.backend, input) == "triton":
            return self._by_kernel(input, act, residual)
        # Not F.group_norm, which raises an error for one value per group.
        y = torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        return act.apply(y if residual is None else y + residual)

    def _by_kernel(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        if residual is not None and not (activation.keeps_sign and residual.dtype == x.dtype):
            # The kernels cannot add this residual: their backward reads the activation's derivative from the sign of
            # the output, and a sum of two dtypes has the wider one.
            return activation.apply(self._by_kernel(x, IDENTITY, None) + residual)
        options = {"groups": self.num_groups, "eps": self.eps, "activation": activation, "residual": residual}
        y, numbers = group_norm_fused(x, self.weight, self.bias, **options)
        recorder = active(self)
        if recorder is not None:
            sources = (x,) if residual is None else (x, residual)
            recorder.remember(y, partial(elementwise_fused, activation=activation), sources, (numbers,))
        return y

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.backend == "auto" else f"{text}, backend={self.backend!r}"


@dataclass(frozen=True)
class GN(GroupedSpec):
    """Group normalization: `mn.nn.GroupNorm`, y = γ_c (x − M_ng)/sqrt(S²_ng + eps) + β_c over C/G channels and space.

    Args:
        groups: the number of groups. A layer whose channels do not divide into so many gets fewer.
        min_channels_per_group: a group must have at least so many channels for `groups` to be taken.
        eps: added to the variance, inside the root.

    Example:
        >>> GN(groups=32)(48).num_groups
        12
    """

    layer = GroupNorm
    eps: float = 1e-5


@dataclass(frozen=True)
class LN(NormSpec):
    """Layer normalization over all channels and space of a sample, affine per channel: group normalization with G = 1.

    Args:
        eps: added to the variance, inside the root.

    Example:
        >>> LN()(48).num_groups
        1
    """

    layer = GroupNorm
    eps: float = 1e-5

    def __call__(self, num_channels: int, *, dims: int = 2) -> GroupNorm:
        """Return `mn.nn.GroupNorm` with one group. It takes any number of spatial dimensions."""
        return GroupNorm(1, num_channels, eps=self.eps)


@dataclass(frozen=True)
class IN(LN):
    """Instance normalization over the space of each channel, affine per channel: group normalization with G = C.

    Args:
        eps: added to the variance, inside the root.

    Example:
        >>> IN()(48).num_groups
        48
    """

    def __call__(self, num_channels: int, *, dims: int = 2) -> GroupNorm:
        """Return `mn.nn.GroupNorm` with one channel per group. It takes any number of spatial dimensions."""
        return GroupNorm(num_channels, num_channels, eps=self.eps)
