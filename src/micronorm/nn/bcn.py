"""Batch-Channel Normalization (BCN, Sec. `sec:norm` of the paper) as a layer, and its spec.

The mathematics is in `micronorm.ops.bcn`, saving and loading in `micronorm.nn.bcn_state`, and what a training forward
does with its statistics in `micronorm.nn.gather`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from micronorm.nn.backends import check_backend, resolve_backend
from micronorm.nn.bcn_state import BatchChannelNormState, UnfusableEps
from micronorm.nn.gather import estimates_from_input, estimates_from_moments, gather, gather_numbers, run
from micronorm.nn.inputs import (
    check_count,
    check_eps,
    check_flag,
    check_groups,
    check_input,
    check_rate,
    check_residual,
)
from micronorm.nn.per_step.recorder import active
from micronorm.nn.spec import GroupedSpec
from micronorm.ops.activation import IDENTITY, KINDS, Activation, ActivationKind, check_activation
from micronorm.ops.bcn import (
    batch_channel_norm,
    batch_channel_norm_fused,
    batch_channel_norm_reference,
    elementwise,
    elementwise_fused,
    no_grad_unless_traced,
)
from micronorm.ops.group import choose_groups
from micronorm.ops.moments import Moments, compute_dtype, moments, over_space

Statistics = Literal["batch", "sequential", "step"]
STATISTICS = ("batch", "sequential", "step")


class BatchChannelNorm(BatchChannelNormState):
    r"""Normalize each channel by estimated statistics, then each group of channels of a sample by its own statistics.

    .. math::
        \dot x = \gamma^b_c \frac{x - \hat\mu_c}{\sqrt{\hat\sigma^2_c + \epsilon}} + \beta^b_c, \qquad
        y = \gamma^c_g \frac{\dot x - M_{ng}}{\sqrt{V_{ng} + \epsilon}} + \beta^c_g

    (labels `eq:bcnbn`, `eq:bcngn`; M and V are the mean and variance of ẋ over one sample's group of channels).

    Args:
        num_channels: C, the size of axis 1 of the input.
        num_groups: G, which must divide C; None chooses it as `mn.BCN()` does.
        statistics: the estimates that a training forward normalizes with. `"step"`: they are constant within an
            optimizer step and move once, by all samples of the step, so the step does not depend on its split.
            `"sequential"`: each micro-batch first moves them and is then normalized, as in Algorithm 1 of the paper.
            `"batch"`: the batch's own moments, CN(BN(x)).
        rate: how far the estimates move: `"lr"`, the learning rate of the weight's parameter group, or a float in
            [0, 1]. In `"batch"` mode `"lr"` means nn.BatchNorm2d's momentum of 0.1.
        micro_batch: the number of samples in one micro-batch of `"sequential"`.
        bias_correction: for `"step"`. Estimates are the weighted average of the windows seen so far, without the
            initial values (0, 1): the first window sets them, and the k-th moves them by r/(1 − (1−r)^k). The state
            dict then contains `estimates_weight`, 1 − (1−r)^k.
        affine: False fixes the affines of the channels and of the groups at the identity. The four tensors remain
            parameters, without requires_grad. An optimizer that holds them still commits the estimates, and the state
            dict has the same keys. `requires_grad_(False)` does not freeze such a layer.
        eps: added to both variances, inside the roots.
        backend: `"triton"`, fused kernels for CUDA devices; `"one-pass"`, the same passes in PyTorch operations;
            `"reference"`, the plain equations differentiated by autograd; `"auto"`, kernels where they run, else
            one-pass.
        activation: `"relu"`, `"leaky_relu"` or `"silu"`, computed in the same passes without saving more.
        negative_slope: the slope of `"leaky_relu"` for negative values.
        device: as in torch.nn.
        dtype: as in torch.nn.

    Shape: N×C, N×C×L, N×C×H×W or N×C×D×H×W; the output has the input's shape, dtype and memory format.

    Parameters: weight, bias (C) and group_weight, group_bias (G). Buffers: running_mean, running_var (C), float32 at
    least. The state dict of a BatchNorm can be loaded; the group affine is then the identity.

    Example:
        >>> norm = BatchChannelNorm(64, num_groups=32)
        >>> norm(torch.randn(1, 64, 8, 8)).shape
        torch.Size([1, 64, 8, 8])
    """

    function = ("BCN", "num_groups", "eps")

    def __init__(
        self,
        num_channels: int,
        num_groups: int | None = None,
        *,
        statistics: Statistics = "step",
        rate: float | str = "lr",
        micro_batch: int = 1,
        bias_correction: bool = False,
        affine: bool = True,
        eps: float = 1e-5,
        backend: str = "auto",
        activation: str | None = None,
        negative_slope: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.num_groups = choose_groups(num_channels) if num_groups is None else num_groups
        self.statistics: Statistics = statistics
        self.rate = rate
        self.micro_batch = micro_batch
        self.bias_correction = bias_correction
        self.affine = affine
        self.eps = eps
        self.backend = backend
        self.activation = activation
        self.negative_slope = negative_slope
        self.warm_steps = 0
        self._check_arguments()
        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_channels, **factory), requires_grad=affine)
        self.bias = nn.Parameter(torch.empty(num_channels, **factory), requires_grad=affine)
        self.group_weight = nn.Parameter(torch.empty(self.num_groups, **factory), requires_grad=affine)
        self.group_bias = nn.Parameter(torch.empty(self.num_groups, **factory), requires_grad=affine)
        estimates = {"device": device, "dtype": compute_dtype(self.weight.dtype)}
        self.register_buffer("running_mean", torch.empty(num_channels, **estimates))
        self.register_buffer("running_var", torch.empty(num_channels, **estimates))
        # α, see `warm`. Not persistent: only the state dict of a layer that is warmed up contains it.
        self.register_buffer("blend", torch.empty((), **estimates), persistent=False)
        if bias_correction:
            self.register_buffer("estimates_weight", torch.empty((), **estimates))
        self._window = self._new_window()
        self.reset_parameters()

    def _check_arguments(self) -> None:
        check_groups(self.num_channels, self.num_groups)
        if self.statistics not in STATISTICS:
            raise ValueError(f"statistics must be one of {STATISTICS}, got {self.statistics!r}")
        check_backend(self.backend)
        check_activation(self.activation, self.negative_slope)
        check_count("micro_batch (samples per micro-batch)", self.micro_batch)
        if self.micro_batch != 1 and self.statistics != "sequential":
            raise ValueError(
                f'micro_batch={self.micro_batch} is for statistics="sequential"; leave it out with "{self.statistics}"'
            )
        check_flag("bias_correction", self.bias_correction)
        check_flag("affine", self.affine)
        if self.bias_correction and self.statistics != "step":
            raise ValueError(f'bias_correction=True is for statistics="step", got {self.statistics!r}')
        check_eps(self._eps)

    @property
    def eps(self) -> float:
        """Return ε, as a float that no other tool can fold into a convolution; see `UnfusableEps`."""
        return UnfusableEps(self._eps)

    @eps.setter
    def eps(self, eps: float) -> None:
        self._eps = eps

    @property
    def rate(self) -> float | str:
        """Return how far the estimates move: "lr" or a float in [0, 1]."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | str) -> None:
        if isinstance(rate, str) and rate != "lr":
            raise ValueError(f'rate must be "lr" or a float in [0, 1], got {rate!r}')
        self._rate = rate if isinstance(rate, str) else check_rate(rate)

    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        activation: str | None = None,
        negative_slope: float = 0.01,
    ) -> Tensor:
        """Return act(BCN(x) + residual).

        Args:
            x: N×C×….
            residual: added before the activation; it has the shape of x.
            activation: the activation of this call, for a layer without one; as in the class.
            negative_slope: the slope of `"leaky_relu"` for negative values.
        """
        own = Activation(KINDS[self.activation], self.negative_slope)
        if activation is None:
            return self._normalize(x, own, residual)
        if own.kind is not ActivationKind.IDENTITY:
            raise ValueError(f"the layer has its own activation {own.kind!r}; {activation!r} would be a second one")
        return self._normalize(x, check_activation(activation, negative_slope), residual)

    def _normalize(self, x: Tensor, activation: Activation, residual: Tensor | None = None) -> Tensor:
        check_input(x, self.num_channels, "BatchChannelNorm")
        if residual is not None:
            check_residual(residual, x)
        if x.numel() == 0:
            return self._empty(x) if residual is None else self._empty(x) + residual
        backend = resolve_backend(self.backend, x)
        if backend == "triton":
            return self._normalize_by_kernel(x, activation, residual)
        with no_grad_unless_traced():
            data = moments(x)
        estimates = self._estimates(data, elements=x.numel() // (x.shape[0] * self.num_channels))
        affine = (self.weight, self.bias, self.group_weight, self.group_bias)
        options: dict[str, Any] = {"groups": self.num_groups, "eps": self._eps, "blend": self.blend}
        if backend == "reference":
            y = batch_channel_norm_reference(x, estimates, *affine, **options)
            return activation.apply(y if residual is None else y + residual)
        relu_inside = activation.kind is ActivationKind.RELU and residual is None
        recorder, numbers = active(self), []
        y = batch_channel_norm(
            x, estimates, *affine, **options, relu=relu_inside, data=data, numbers=None if recorder is None else numbers
        )
        if recorder is not None:
            recorder.remember(y, partial(elementwise, relu=relu_inside), (x,), tuple(numbers))
        if relu_inside or (residual is None and activation.kind is ActivationKind.IDENTITY):
            return y
        result = activation.apply(y if residual is None else y + residual)
        if recorder is not None:
            sources = (x,) if residual is None else (x, residual)
            recorder.remember(result, partial(_repeat, activation, len(sources)), sources, tuple(numbers))
        return result

    def _normalize_by_kernel(self, x: Tensor, activation: Activation, residual: Tensor | None) -> Tensor:
        if residual is not None and not (activation.keeps_sign and residual.dtype == x.dtype):
            # The kernels cannot add this residual: their backward reads the activation's derivative from the sign of
            # the output, and a sum of two dtypes has the wider one.
            return activation.apply(self._normalize_by_kernel(x, IDENTITY, None) + residual)
        elements = x.numel() // (x.shape[0] * self.num_channels)
        running_mean, running_var, blend, *affine = self._tensors()
        training = self.training and (self.statistics == "batch" or self._gathers())
        parts = None
        estimates = Moments(running_mean, running_var)
        if training and self.statistics != "step":
            micro_batch = self.micro_batch if self.statistics == "sequential" else None
            state = (self._window.lost, self._window.counter)
            parts, *found = run(
                estimates_from_input, x.detach(), running_mean, running_var, self.num_groups, micro_batch, *state
            )
            estimates = Moments(*found)
        y, numbers = batch_channel_norm_fused(
            x,
            estimates,
            *affine,
            groups=self.num_groups,
            eps=self._eps,
            blend=blend,
            activation=activation,
            residual=residual,
            parts=parts,
            from_batch=training and self.statistics == "batch",
        )
        recorder = active(self)
        if recorder is not None:
            sources = (x,) if residual is None else (x, residual)
            recorder.remember(y, partial(elementwise_fused, activation=activation), sources, (numbers,))
        if training and self.statistics == "step":
            window, sizes = self._window, (x.shape[0], self.num_channels, elements, self.num_groups)
            state = (window.sums, window.lost, window.counter)
            run(gather_numbers, numbers.detach(), window.reference, *sizes, *state)
        return y

    def _tensors(self) -> tuple[Any, ...]:
        """Return the estimates, the blend and the affine parameters."""
        buffers, parameters = self._buffers, self._parameters
        try:
            # Reading nn.Module's tables directly saves a few microseconds per forward, which small layers need. Not by
            # an itemgetter: torch.compile does not trace one.
            estimates = (buffers["running_mean"], buffers["running_var"], buffers["blend"])
            affine = (parameters["weight"], parameters["bias"], parameters["group_weight"], parameters["group_bias"])
            return *estimates, *affine
        except KeyError:  # an attribute is computed, for example by torch.nn.utils.parametrize
            affine = (self.weight, self.bias, self.group_weight, self.group_bias)
            return self.running_mean, self.running_var, self.blend, *affine

    @torch.no_grad()
    def _estimates(self, data: Moments, *, elements: int) -> Moments | None:
        """Return the estimates to normalize with, or None for the batch's own moments. Gather `data` in training."""
        data = Moments(*(m.detach() for m in data))
        running = Moments(self.running_mean, self.running_var)
        from_batch, window = self.statistics == "batch", self._window
        if not self.training or not (from_batch or self._gathers()):
            return running
        if self.statistics == "step":
            run(gather, *data, window.reference, elements, self.num_groups, window.sums, window.lost, window.counter)
            return running
        options = (elements, self.num_groups, None if from_batch else self.micro_batch, window.lost, window.counter)
        found = run(estimates_from_moments, *data, *running, *options)
        return None if from_batch else Moments(*found)

    def _gathers(self) -> bool:
        """Return whether a training forward is gathered. A frozen layer only notes that it ran, for a warning."""
        trainable = self.is_trainable()
        if not trainable and not self._window.paused:
            self._window.ran = True  # compiled code repeats this assignment in each forward
        return trainable

    def _empty(self, x: Tensor) -> Tensor:
        """Return the output for an empty batch, with zero gradients for every parameter."""
        y = x * over_space(self.weight[None], x) + over_space(self.bias[None], x)
        return (y + (self.group_weight + self.group_bias).sum()).to(x.dtype)

    def extra_repr(self) -> str:
        shown = ["statistics", "rate", *(["micro_batch"] if self.statistics == "sequential" else []), "eps"]
        shown += ["bias_correction"] if self.bias_correction else []
        shown += [] if self.affine else ["affine"]
        shown += ["backend"] if self.backend != "auto" else []
        shown += ["activation"] if self.activation else []
        shown += ["negative_slope"] if self.activation == "leaky_relu" else []
        shown += ["warm_steps"] if self.warm_steps else []
        options = "".join(f", {name}={getattr(self, name)!r}" for name in shown)
        return f"{self.num_channels}, num_groups={self.num_groups}{options}"


def _repeat(activation: Activation, sources: int, x: Tensor, *rest: Tensor) -> Tensor:
    """Compute act(BCN(x) + residual) again by the operations of the one-pass forward; `rest`: residual and numbers."""
    residual, numbers = rest[: sources - 1], rest[sources - 1 :]
    return activation.apply(sum(residual, elementwise(x, *numbers, relu=False)))


@dataclass(frozen=True)
class BCN(GroupedSpec):
    """Batch-Channel Normalization; see `mn.nn.BatchChannelNorm`.

    Args:
        groups: the number of groups. A layer whose channels do not divide into so many gets fewer.
        min_channels_per_group: a group must have at least so many channels for `groups` to be taken.
        statistics: `"step"`, `"sequential"` or `"batch"`: which estimates a training forward normalizes with.
        rate: how far the estimates move: `"lr"`, the learning rate, or a float in [0, 1].
        eps: added to both variances, inside the roots.
        micro_batch: the number of samples in one micro-batch of `"sequential"`.
        bias_correction: for `"step"`: the first windows set the estimates, without the initial values (0, 1).

    Example:
        >>> BCN(groups=32)(48).num_groups
        12
    """

    layer = BatchChannelNorm
    statistics: Statistics = "step"
    rate: float | str = "lr"
    eps: float = 1e-5
    micro_batch: int = 1
    bias_correction: bool = False

    def __repr__(self) -> str:
        # Recorded definitions of recipes contain this text, and those from before `bias_correction` must stay valid.
        shown = {name: value for name, value in vars(self).items() if name != "bias_correction" or value}
        return f"BCN({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
