"""The statistics of one optimizer step as a transaction: gathered and committed whole, or not at all."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from micronorm.commit.handle import attach
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.private_api import foreach_copy_


class Transaction:
    """What the layers of a model gather in one step, for loops that may have to take a step back.

    `begin` remembers the windows as they are, which need not be empty: a step that a GradScaler skipped leaves its own
    to the next. `roll_back` puts them back to that, as often as it is called. The commit itself is the optimizer's, as
    always. A model without such layers has a transaction too, with nothing in it.

    Example:
        >>> model = nn.Sequential(BatchChannelNorm(8))
        >>> transaction = Transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> transaction.begin()
        >>> _ = model(torch.randn(2, 8, 4, 4))
        >>> transaction.roll_back()
        >>> transaction.windows[0].forwards, float(transaction.windows[0].sums.abs().sum())
        (0, 0.0)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, max_forwards: int | None = None) -> None:
        layers = [module for module in model.modules() if isinstance(module, BatchChannelNorm)]
        self.windows = [layer._window for layer in layers]
        limit = {} if max_forwards is None else {"max_forwards": max_forwards}
        self.handle = attach(model, optimizer, **limit) if layers else None
        self._forwards: list[int] = []
        self._passes: list[list[Any]] = []
        self._saved: list[Tensor] = []

    def begin(self) -> None:
        """Remember the windows as they are."""
        tensors = self._tensors()
        if [(t.shape, t.device, t.dtype) for t in tensors] != [(t.shape, t.device, t.dtype) for t in self._saved]:
            self._saved = [torch.empty_like(t) for t in tensors]
        if tensors:
            foreach_copy_(self._saved, tensors)
        self._forwards = [window.forwards for window in self.windows]
        self._passes = [list(window.passes) for window in self.windows]

    def roll_back(self) -> None:
        """Put the windows back to where `begin` found them."""
        if self._saved:
            foreach_copy_(self._tensors(), self._saved)
        for window, forwards, passes in zip(self.windows, self._forwards, self._passes, strict=True):
            window.ticket[0] = forwards
            window.passes.clear()
            window.passes.extend(passes)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Within this block training forwards leave no trace."""
        return contextlib.nullcontext() if self.handle is None else self.handle.paused()

    def refresh(self) -> None:
        """Write the current rates to the device; before the replay of a CUDA graph that holds a commit."""
        if self.handle is not None:
            self.handle.refresh()

    def state_dict(self) -> dict[str, Any]:
        """What was gathered and not yet committed, on the CPU, for a checkpoint between two steps."""
        return {
            "sums": [window.sums.to("cpu", copy=True) for window in self.windows],
            "lost": [window.lost.to("cpu", copy=True) for window in self.windows],
            "forwards": [window.forwards for window in self.windows],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, for the same layers in the same order."""
        sizes = [len(sums) for sums in state["sums"]]
        if sizes != [len(window.sums) for window in self.windows]:
            raise ValueError(
                f"the checkpoint has the windows of {len(sizes)} layers, the model has {len(self.windows)}, or they "
                "differ in channels; build the model the checkpoint was made with"
            )
        for window, sums, lost, forwards in zip(
            self.windows, state["sums"], state["lost"], state["forwards"], strict=True
        ):
            window.sums.copy_(sums)
            window.lost.copy_(lost)
            window.ticket[0] = forwards

    def close(self) -> None:
        """Give the layers back: from here on any optimizer that holds them commits them, as by default."""
        if self.handle is not None:
            self.handle.detach()

    def _tensors(self) -> list[Tensor]:
        return [tensor for window in self.windows for tensor in (window.sums, window.lost)]


def merge_states(like: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state for what several ranks gathered; an empty one of the layers of `like` where there are no `states`.

    Example:
        >>> mine = {"sums": [torch.ones(3)], "lost": [torch.zeros(2)], "forwards": [2]}
        >>> merge_states([mine], [mine, mine])
        {'sums': [tensor([2., 2., 2.])], 'lost': [tensor([0., 0.])], 'forwards': [4]}
    """
    if not states:
        return {name: [value - value for value in values] for name, values in like[0].items()}
    return {
        name: [sum(values[1:], values[0]) for values in zip(*(s[name] for s in states), strict=True)]
        for name in like[0]
    }
