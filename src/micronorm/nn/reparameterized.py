"""Mixins for layers that compute an effective weight in each forward: by the kind of layer, and by the method.

`micronorm.nn.weight` combines both with a layer of torch.nn: WSConv2d is _WS, _Conv and nn.Conv2d.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted, report_unabsorbed
from micronorm.nn.inputs import check_eps, check_flag
from micronorm.nn.passive_hook import PassiveHook
from micronorm.ops.moments import compute_dtype
from micronorm.ops.weight import (
    centered_weight_normalize,
    check_fan_in,
    choose_backend,
    over_rows,
    row_statistics,
    standardize_by_kernel,
    weight_normalize,
    weight_standardize,
)

# --- how a layer uses its weight, by the kind of layer ---------------------------------------------------------------


def rows_of(layer: Any, weight: Tensor) -> Tensor:
    """Return a tensor in the weight's layout as O×…, or one of rows in the weight's layout.

    Transposed convolutions keep O in axis 1, per group: (groups·I)×(O/groups)×kernel. The exchange of the axes is its
    own inverse.
    """
    # A tuple: torch.compile of torch 2.8 and older does not trace a union of types.
    if not isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return weight
    return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)


class Reparameterized(Fingerprinted):
    """Base of all kinds: `weight` is seen as one row per output channel."""

    # Any: torch declares these attributes with different types.
    weight: Any
    bias: Any
    shared_weight: Tensor | None = None
    """The effective weight while `per_step.shared_weights` shares it between several forwards, else None."""
    _loading = _weight_replaced = False
    weight_observers: tuple[PassiveHook, ...] = ()
    """Called with the effective weight of every forward, for example to read its gradient in the backward."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, unless BatchNorm is being folded into `weight`.

        Tools that do so (torch.nn.utils.fusion) take a layer in eval mode, scale its weight, and then set its bias.
        Here the layer would standardize the scaled weight, which removes the scale without a word.
        """
        layer: Any = self
        old = layer._parameters.get(name, param)
        evaluates = not layer.training
        if name == "weight" and old is not param and evaluates and not self._loading:
            self._weight_replaced = old.shape == param.shape  # type: ignore[union-attr]
        if name == "bias" and param is not None and evaluates and (old is None or self._weight_replaced):
            raise RuntimeError(
                f"{type(self).__name__} computes with another weight than `weight`, so BatchNorm cannot be folded into "
                "it: fold the whole model with mn.fold(model) before you use other tools. To set a bias yourself, call "
                ".train() first."
            )
        super().register_parameter(name, param)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._loading = True  # load_state_dict(assign=True) may replace the parameters
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            self._loading = False

    def effective_weight(self) -> Tensor:
        """Return the weight the layer computes with, in the layout of `weight`."""
        raise NotImplementedError

    def by_kernel(self) -> bool:
        """Return whether a kernel standardizes `weight` directly, without a change of its layout."""
        return False

    def weight_in_use(self) -> Tensor:
        """Return the effective weight of this forward: the shared one, if there is one."""
        weight = self.shared_weight
        # A weight that was shared in autocast's dtype is not used in forwards outside of autocast.
        if weight is None or (weight.dtype != self.weight.dtype and not torch.is_autocast_enabled(weight.device.type)):
            weight = self.new_weight()
        for observer in self.weight_observers:
            observer(weight)
        return weight

    def new_weight(self) -> Tensor:
        """Return the effective weight, computed for this forward."""
        return self.effective_weight()


class _Conv(Reparameterized):
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight_in_use(), self.bias)  # type: ignore[attr-defined]


class _SameConv(Reparameterized):
    """Convolution with TensorFlow's SAME padding, computed from the input's size, as in timm's `tf_` models."""

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        pads = []
        for size, kernel, stride, dilation in zip(
            reversed(input.shape[-2:]),
            reversed(layer.kernel_size),
            reversed(layer.stride),
            reversed(layer.dilation),
            strict=True,
        ):
            missing = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            pads += [missing // 2, missing - missing // 2]
        return layer._conv_forward(F.pad(input, pads), self.weight_in_use(), self.bias)


class _Linear(Reparameterized):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight_in_use(), self.bias)


class _ConvTranspose(Reparameterized):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        layer: Any = self
        if layer.padding_mode != "zeros":
            raise ValueError(f'transposed convolutions pad with "zeros" only, got {layer.padding_mode!r}')
        dims = self.weight.ndim - 2
        output_padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation
        )
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        return convolve(
            input,
            self.weight_in_use(),
            self.bias,
            layer.stride,
            layer.padding,
            output_padding,
            layer.groups,
            layer.dilation,
        )


# --- the methods -----------------------------------------------------------------------------------------------------


class _WS(Reparameterized):
    """Weight Standardization over the fan-in of each output channel.

    `absorb()` stores the present mean and scale of each row in the buffers `absorbed_mean` and `absorbed_scale`. The
    effective weight is then scale·Ŵ + mean, which at first equals the weight itself.
    """

    function = ("WS", "center", "scale", "eps")
    absorbed_mean: Tensor | None
    absorbed_scale: Tensor | None
    backend: str = "auto"
    """Which implementation standardizes the weight: "auto", "reference" or "triton"; see `micronorm.ops.weight`."""

    def __init__(self, *args: Any, center: bool = True, scale: bool = True, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._standardize(center=center, scale=scale, eps=eps)

    def _standardize(self, *, center: bool, scale: bool, eps: float) -> None:
        check_fan_in(rows_of(self, self.weight)[0].numel())
        check_flag("center", center)
        check_flag("scale", scale)
        check_eps(eps)
        self.center, self.scale, self.eps = center, scale, eps
        layer: Any = self
        layer.register_buffer("absorbed_mean", None)
        layer.register_buffer("absorbed_scale", None)

    def new_weight(self) -> Tensor:
        if not self.by_kernel():
            return self.effective_weight()
        weight = self.weight
        dtype, device = weight.dtype, "cuda" if weight.is_cuda else "cpu"
        if dtype == torch.float32 and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)  # the kernel writes what autocast would cast Ŵ to
        return standardize_by_kernel([weight], self.center, self.scale, self.eps, dtype)[0]

    def by_kernel(self) -> bool:
        plain = (self.center or self.scale) and self.absorbed_mean is None and rows_of(self, self.weight) is self.weight
        return plain and choose_backend(self.weight, self.backend) == "triton"

    def effective_weight(self) -> Tensor:
        options: dict[str, Any] = {"center": self.center, "scale": self.scale, "eps": self.eps, "backend": self.backend}
        rows = rows_of(self, self.weight)
        if self.absorbed_mean is None or self.absorbed_scale is None:
            return rows_of(self, weight_standardize(rows, **options))
        wide = rows.to(compute_dtype(rows.dtype))  # round once, after scaling
        mean, scale = (over_rows(b.to(wide.dtype), rows) for b in (self.absorbed_mean, self.absorbed_scale))
        return rows_of(self, torch.addcmul(mean, weight_standardize(wide, **options), scale).to(rows.dtype))

    def absorb(self) -> None:
        """Store the mean and scale that standardization removes, so that the layer's output does not change."""
        options = {"center": self.center, "scale": self.scale, "eps": self.eps}
        with torch.no_grad():
            mean, scale = row_statistics(rows_of(self, self.weight), **options)  # type: ignore[arg-type]
        self.absorbed_mean, self.absorbed_scale = mean, scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("absorbed_mean", "absorbed_scale"):
            saved = state_dict.get(prefix + name)
            if saved is not None and getattr(self, name) is None:  # saved by a layer after `absorb()`
                setattr(self, name, torch.empty_like(saved, device=self.weight.device))
        if self.absorbed_mean is not None and prefix + "absorbed_mean" not in state_dict:
            report_unabsorbed(state_dict, prefix, args[-2])  # torch passes the lists by position
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]

    def extra_repr(self) -> str:
        switches = "".join(f", {name}=False" for name in ("center", "scale") if not getattr(self, name))
        absorbed = "" if self.absorbed_mean is None else ", absorbed"
        backend = "" if self.backend == "auto" else f', backend="{self.backend}"'
        return f"{super().extra_repr()}{switches}, eps={self.eps}{absorbed}{backend}"  # type: ignore[misc]


class _WithLength(Reparameterized):
    """A learnable length g per output channel. Its initial value is the length of the weight."""

    length: nn.Parameter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._standardize()

    def _standardize(self) -> None:
        check_fan_in(rows_of(self, self.weight)[0].numel())
        self.length = nn.Parameter(self._natural_length(self.weight), requires_grad=self.weight.requires_grad)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        if hasattr(self, "length"):  # the base class calls this before `length` exists
            with torch.no_grad():
                self.length.copy_(self._natural_length(self.weight))

    def _natural_length(self, weight: Tensor) -> Tensor:
        return rows_of(self, weight.detach()).flatten(1).norm(dim=1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape == self.weight.shape:
            # The state dict of a plain layer has no length.
            state_dict.setdefault(prefix + "length", self._natural_length(weight))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


class _WN(_WithLength):
    """Weight Normalization: g·W/‖W‖."""

    function = ("WN",)

    def effective_weight(self) -> Tensor:
        return rows_of(self, weight_normalize(rows_of(self, self.weight), self.length))


class _CWN(_WithLength):
    """Centered Weight Normalization: g·(W − mean)/‖W − mean‖."""

    function = ("CWN",)

    def effective_weight(self) -> Tensor:
        return rows_of(self, centered_weight_normalize(rows_of(self, self.weight), self.length))

    def _natural_length(self, weight: Tensor) -> Tensor:
        rows = rows_of(self, weight.detach()).flatten(1)
        return (rows - rows.mean(1, keepdim=True)).norm(dim=1)
