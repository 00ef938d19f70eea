"""The windows of a model during one optimizer step, for a training loop that checkpoints and replays steps."""

from collections.abc import Sequence
from typing import Any

import torch

from micronorm.commit.handle import Handle


class Transaction(Handle):
    """The handle of a training loop that saves checkpoints. A model without BatchChannelNorm layers has one, too.

    The optimizer commits the windows, as it always does. `micronorm.commit.snapshot.Snapshot` takes a step back.
    """

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


def merge_states(like: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the states of several ranks; without `states`, an empty state of the layers of `like`."""
    if not states:
        return {name: [value - value for value in values] for name, values in like[0].items()}
    return {
        name: [sum(values[1:], values[0]) for values in zip(*(s[name] for s in states), strict=True)]
        for name in like[0]
    }
