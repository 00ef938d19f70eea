"""Base classes of layers with running statistics: parameters, buffers and state-dict keys of nn.BatchNorm2d."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from micronorm.nn.checkpointing import write_once
from micronorm.nn.inputs import check_count, check_eps, check_input, check_micro_batch, check_momentum
from micronorm.ops.batch import Running
from micronorm.ops.moments import compute_dtype


class WideBuffers(nn.Module):
    """A module whose floating-point buffers are at least float32: `.half()` and `.bfloat16()` do not change them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.is_floating_point() and new.dtype.itemsize < 4:
                # From the old buffer: the new one was rounded to half precision.
                self._buffers[name] = old.to(new.device, compute_dtype(old.dtype))
        return self

    def widen_buffers(self) -> None:
        """Convert the running statistics to float32 if they are narrower."""
        for name in ("running_mean", "running_var"):
            buffer = self._buffers[name]
            if buffer is not None:
                self._buffers[name] = buffer.to(compute_dtype(buffer.dtype))


class RunningNorm(WideBuffers):
    """Base class of layers with running statistics: the parameters and buffers of nn.BatchNorm2d.

    A subclass overrides `compute`.

    Args:
        num_channels: C.
        micro_batch: samples per micro-batch; the N samples of a training forward stand for ⌈N/m⌉ successive forwards.
            None: one batch of all samples.
        eps: added to variances, inside the root.
        momentum: the share of the new batch in the running statistics; None for the average of all batches.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    _version = 2  # of the state dict, as in torch: version 2 added num_batches_tracked

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_channels: int,
        *,
        micro_batch: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("num_channels", num_channels)
        check_micro_batch(micro_batch)
        check_eps(eps)
        check_momentum(momentum)
        super().__init__()
        self.num_channels = num_channels
        self.micro_batch = micro_batch
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        wide = compute_dtype(self.weight.dtype)
        self.register_buffer("running_mean", torch.empty(num_channels, device=device, dtype=wide))
        self.register_buffer("running_var", torch.empty(num_channels, device=device, dtype=wide))
        self.register_buffer("num_batches_tracked", torch.empty((), device=device, dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.num_batches_tracked.zero_()

    def running(self) -> Running:
        """Return the running statistics: the buffers themselves, not copies."""
        return Running(self.running_mean, self.running_var, self.num_batches_tracked)

    def compute(self, x: Tensor) -> tuple[Tensor, Running]:
        """Return the output, and the running statistics after this forward."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that the operations of all these layers take."""
        names = ("training", "micro_batch", "momentum", "eps")
        return {name: getattr(self, name) for name in names}

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.num_channels, type(self).__name__)
        y, new = self.compute(x)
        for buffer, value in zip(self.running(), new, strict=True):
            if value is not buffer:  # in eval mode and for an empty batch the ops return the buffers unchanged
                write_once(buffer, value)
        return y

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}, momentum={self.momentum}, micro_batch={self.micro_batch}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            here = self.num_batches_tracked
            state_dict.setdefault(prefix + "num_batches_tracked", torch.tensor(0) if here.is_meta else here)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        self.widen_buffers()  # load_state_dict(assign=True) may assign half-precision tensors
