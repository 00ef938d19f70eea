"""An exponential moving average of the weights and estimates, evaluated and saved beside the trained model."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from micronorm.engine.step import Step
from micronorm.ops.private_api import foreach_add_, foreach_copy_, foreach_mul_


class MovingAverage:
    """average ← decay · average + (1 − decay) · value, after each step, for every parameter and persistent buffer.

    Counters and other whole numbers are copied. Buffers are averaged too, so that the averaged model has the estimates
    that belong to its weights. Other ranks than 0 average their own buffers, which evaluation does not use.

    Args:
        step: holds the model.
        decay: between 0 and 1, such as 0.999.
    """

    def __init__(self, step: Step, decay: float) -> None:
        self.step, self.decay = step, decay
        state = step.model.state_dict(keep_vars=True)
        self.values = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.averages: list[Any] = [value.detach().clone() for value in self.values.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present values; after each step, outside a captured graph."""
        averages, values = self._local()
        floating = [k for k, value in enumerate(values) if value.is_floating_point()]
        moved = [averages[k] for k in floating]
        foreach_mul_(moved, self.decay)
        foreach_add_(moved, [values[k] for k in floating], alpha=1 - self.decay)
        for average, value in zip(averages, values, strict=True):
            if not value.is_floating_point():
                average.copy_(value)

    def _local(self) -> tuple[list[Tensor], list[Tensor]]:
        local = self.step.parallel.local
        return local(self.averages), local([value.detach() for value in self.values.values()])

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages within this block. Values are written in place, and restored to the bit."""
        averages, values = self._local()
        kept = [value.clone() for value in values]
        self._write(values, averages)
        try:
            yield
        finally:
            self._write(values, kept)

    @torch.no_grad()
    def _write(self, values: list[Tensor], new: list[Tensor]) -> None:
        foreach_copy_(values, new)
        self.step.parallel.release_gathered_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name, whole, on the CPU. Collective if the model is sharded."""
        whole = [average.full_tensor() if hasattr(average, "full_tensor") else average for average in self.averages]
        return {name: value.to("cpu", copy=True) for name, value in zip(self.values, whole, strict=True)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned. Collective if the model is sharded."""
        for name, average in zip(self.values, self.averages, strict=True):
            value = state[name]
            if hasattr(average, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(average.device), average.device_mesh, average.placements)
            average.copy_(value)
