"""The state of a BatchChannelNorm: how its parameters, estimates and window are reset, copied, saved and loaded."""

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.inputs import check_count
from micronorm.nn.running import WideBuffers
from micronorm.nn.window import Window, list_names


class BatchChannelNormState(Fingerprinted, WideBuffers):
    """Base class of BatchChannelNorm, which registers the parameters and buffers and makes the window."""

    num_channels: int
    num_groups: int
    bias_correction: bool
    affine: bool = True  # a value of the class, for layers pickled before there was the argument
    warm_steps: int
    weight: nn.Parameter
    bias: nn.Parameter
    group_weight: nn.Parameter
    group_bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    blend: Tensor
    estimates_weight: Tensor
    _window: Window

    def reset_parameters(self) -> None:
        """Set the affine parameters to the identity and the estimates to (0, 1), and empty the window."""
        for tensor, value in (
            (self.weight, 1),
            (self.bias, 0),
            (self.group_weight, 1),
            (self.group_bias, 0),
            (self.running_mean, 0),
            (self.running_var, 1),
            (self.blend, 1),
        ):
            nn.init.constant_(tensor, value)
        self.warm_steps = 0
        self._window.clear()
        self.update_estimates_weight()

    def update_estimates_weight(self) -> None:
        """Restart bias correction if the estimates are (0, 1); otherwise treat them as an average of past windows.

        Call it after the estimates were set. It has an effect only with `bias_correction`, and synchronizes with the
        device.
        """
        if self.bias_correction and not self.running_mean.is_meta:
            fresh = (self.running_mean == 0).all() & (self.running_var == 1).all()
            nn.init.constant_(self.estimates_weight, 0.0 if fresh else 1.0)

    def warm(self, steps: int) -> None:
        """Start as a BatchNorm in eval mode and become BCN over `steps` commits.

        y = γ^c·((1−α)·ẋ + α·(ẋ − M)/S) + β^c, where α = `blend` goes from 0 to 1.
        """
        check_count("steps", steps)
        self.warm_steps = steps
        nn.init.zeros_(self.blend)

    def _new_window(self) -> Window:
        return Window(self.num_channels, self.running_mean.device, weakref.ref(self))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._window.to(self.running_mean.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_window"]  # a copy gets a window of its own
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = self.__new__(type(self))
        # Not self.__getstate__: torch.nn.utils.parametrize replaces it by one that raises.
        new.__setstate__(copy.deepcopy(BatchChannelNormState.__getstate__(self), memo))
        # Otherwise a rank that alone trains on with a copy would compare itself with ranks that do not.
        new._window.agreements.update(self._window.agreements)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._window = self._new_window()
        if type(self.running_mean) is Tensor:  # a fake tensor of a tracer does not mix with the window's
            self._window.follow_estimates()  # measured from zero, data far from zero would lose their variance

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._window.warn_of_losses(prefix.removesuffix("."))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.warm_steps:
            destination[prefix + "blend"] = self.blend if keep_vars else self.blend.detach()
            destination[prefix + "warm_steps"] = torch.tensor(self.warm_steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if prefix + "running_mean" in state_dict:
            state_dict.pop(prefix + "num_batches_tracked", None)  # BatchNorm's; no estimate here depends on it
            blend, steps = (state_dict.pop(prefix + name, None) for name in ("blend", "warm_steps"))
            if prefix + "group_weight" not in state_dict and prefix + "group_bias" not in state_dict:
                # The state of a BatchNorm: the group affine is the identity, and a warm-up starts at its beginning.
                like = state_dict.get(prefix + "weight", self.weight)
                state_dict[prefix + "group_weight"] = like.new_ones(self.num_groups)
                state_dict[prefix + "group_bias"] = like.new_zeros(self.num_groups)
                if not self.affine:
                    state_dict.setdefault(prefix + "weight", torch.ones_like(self.weight))
                    state_dict.setdefault(prefix + "bias", torch.zeros_like(self.bias))
                blend = None if self.warm_steps == 0 else torch.zeros(())
            else:
                self.warm_steps = 0 if steps is None else int(steps)
            if self.blend.is_meta:  # nothing can be written to it
                self.blend = torch.empty_like(self.blend, device=state_dict[prefix + "running_mean"].device)
            with torch.no_grad():  # in place, as parameters are loaded: averages and graphs hold this tensor
                self.blend.copy_(torch.ones(()) if blend is None else blend)
        weightless = self.bias_correction and prefix + "estimates_weight" not in state_dict
        if weightless:  # the state of a BatchNorm, or of a layer without the correction
            state_dict[prefix + "estimates_weight"] = torch.ones((), device=self.estimates_weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.widen_buffers()  # load_state_dict(assign=True) may assign half-precision tensors
        self._window.to(self.running_mean.device)
        self._window.follow_estimates()
        if weightless:
            self.update_estimates_weight()
        if prefix + "weight" in state_dict and self.has_zero_weight():
            # Without the layer's name: Python shows equal warnings once, and a network has many such layers.
            warn_of_zero_weights(["a BatchChannelNorm in the state dict"])

    def weight_parameters(self) -> Sequence[nn.Parameter]:
        """Return the weight, or the parameters it is computed from (nn.utils.parametrize, prune, weight_norm, …)."""
        own = self._parameters.get("weight")
        if own is not None:
            return (own,)
        return [p for name, p in self.named_parameters() if name.startswith(("weight", "parametrizations.weight."))]

    def is_trainable(self) -> bool:
        """Return whether the weight requires grad. A layer whose weight does not is frozen: its estimates stay.

        A layer with `affine=False` is never frozen: nothing about its weight could say so.
        """
        return not self.affine or any(p.requires_grad for p in self.weight_parameters())

    def has_zero_weight(self) -> bool:
        """Return whether a trainable γ^b is all zero, so that gradients are divided by sqrt(eps). Reads the device."""
        # The type excludes sharded weights: reading one is a collective operation that other ranks need not join.
        readable = type(self.weight) is nn.Parameter and not self.weight.is_meta
        return readable and self.weight.requires_grad and not self.weight.any()

    def _replicate_for_data_parallel(self) -> Self:
        if not self.training:
            return super()._replicate_for_data_parallel()  # type: ignore[misc]
        raise RuntimeError(
            "nn.DataParallel with several GPUs deletes its replicas after each forward, and with them the statistics "
            "that BatchChannelNorm collected. Use torch.nn.parallel.DistributedDataParallel."
        )


class UnfusableEps(float):
    """A float that raises when it is added to a tensor.

    Code that folds BatchNorm into convolutions (torch.nn.utils.fusion, Ultralytics' `fuse`, mmcv) recognizes a norm by
    its running statistics, and computes `running_var + eps` first. Applied to Batch-Channel Normalization it would give
    wrong results without an error. torch's operations call `__torch_function__` of every argument that has it.

    Example:
        >>> UnfusableEps(1e-5) == 1e-5
        True
        >>> torch.ones(1) + UnfusableEps(1e-5)
        Traceback (most recent call last):
        ...
        RuntimeError: Batch-Channel Normalization cannot be folded into a convolution like BatchNorm...
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(
            "Batch-Channel Normalization cannot be folded into a convolution like BatchNorm, with running_var + eps: "
            "fold the whole model with mn.fold(model) before you use other tools. To compute with eps, use float(eps)."
        )


def warn_of_zero_weights(names: Sequence[str]) -> None:
    """Warn once about the named layers, whose weight is all zero. Do nothing if `names` is empty."""
    if names:
        warnings.warn(
            f"the weight of {list_names(names)} is all zero: its groups have no variance, and gradients become "
            "hundreds of times too large. To start a residual branch at zero, leave weight at one and set group_weight "
            "to zero (zero_init_residual=False in torchvision, zero_init_last=False in timm).",
            UserWarning,
            stacklevel=3,
        )
