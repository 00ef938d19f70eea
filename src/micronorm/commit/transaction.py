"""The windows of a model during one optimizer step, for a training loop that checkpoints and replays steps."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from micronorm.commit.handle import attach
from micronorm.nn.bcn import BatchChannelNorm


class Transaction:
    """The windows that the layers of a model fill during one step, for a training loop that saves checkpoints.

    The optimizer commits the windows, as it always does. A model without BatchChannelNorm layers has an empty
    transaction. `micronorm.commit.snapshot.Snapshot` takes a step back.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, max_forwards: int | None = None) -> None:
        layers = [module for module in model.modules() if isinstance(module, BatchChannelNorm)]
        self.windows = [layer._window for layer in layers]
        limit = {} if max_forwards is None else {"max_forwards": max_forwards}
        self.handle = attach(model, optimizer, **limit) if layers else None

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Within this block, training forwards change neither windows nor estimates."""
        return contextlib.nullcontext() if self.handle is None else self.handle.paused()

    def refresh(self) -> None:
        """Write the current rates to the device. Call it before replaying a CUDA graph that contains a commit."""
        if self.handle is not None:
            self.handle.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered and not yet committed, on the CPU, for a checkpoint between two steps."""
        return {
            # Measured from the estimates, which the checkpoint contains, and not from each rank's reference.
            "sums": [torch.cat(window.sums_around(window.layer.running_mean)).cpu() for window in self.windows],
            "lost": [window.lost.to("cpu", copy=True) for window in self.windows],
            "forwards": [window.forwards for window in self.windows],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, for the same layers in the same order."""
        sizes = [len(sums) for sums in state["sums"]]
        if sizes != [len(window.sums) for window in self.windows]:
            raise ValueError(
                f"the checkpoint has the windows of {len(sizes)} layers, the model has {len(self.windows)}, or they "
                "differ in channels; build the model the checkpoint was made with"
            )
        for window, sums, lost, forwards in zip(
            self.windows, state["sums"], state["lost"], state["forwards"], strict=True
        ):
            window.clear()
            window.sums.copy_(sums)
            window.lost.copy_(lost)
            window.counter[0] = forwards

    def close(self) -> None:
        """Detach from the layers. Any optimizer that holds them commits them again, as by default."""
        if self.handle is not None:
            self.handle.detach()


def merge_states(like: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the states of several ranks; without `states`, an empty state of the layers of `like`."""
    if not states:
        return {name: [value - value for value in values] for name, values in like[0].items()}
    return {
        name: [sum(values[1:], values[0]) for values in zip(*(s[name] for s in states), strict=True)]
        for name in like[0]
    }
