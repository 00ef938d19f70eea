"""Recognize from training losses alone that a network collapsed: its loss jumped, and then it stopped learning."""

import statistics
from collections.abc import Sequence

INTERVAL = 100  # steps after which `CollapseWatch` looks for a collapse, again and again
LAST = 1000  # losses after which it stops looking
SAMPLES = 32  # losses of fewer samples are averaged: a single image says little about the network

# Measured on ResNet-18 and ResNet-110 with BN, GN+WS and BCN+WS: collapsed networks peak at 7 to 13 times the first
# loss, end at 0.48 to 0.92 of it, and fall by less than 6 % in the last quarter; healthy ones fall by a quarter.
JUMP = 3.0  # the peak over the first loss
_LEVEL = 0.3  # the last quarter of the losses over the first loss
_PROGRESS = 0.9  # the last quarter over the quarter before it


def find_collapse(losses: Sequence[float]) -> str | None:
    """Return a warning if these losses are those of a collapsed network, or None.

    The loss of a collapsed network jumps in its first steps. Then it stays at the loss of constant outputs, which is
    close to that of an untrained network. So three things must hold. The peak lies far above the first loss. The last
    quarter of the losses is close to the first loss. And it is close to the quarter before it.

    Args:
        losses: the mean training losses of steps from the first on, at least 40.

    Example:
        >>> find_collapse([2.4, 9.0, 31.0, 12.0, *[2.3] * 96]).partition(";")[0]
        'the network collapsed: its loss rose from 2.4 to 31 at step 3, and now stays at 2.3'
        >>> find_collapse([2.4 * 0.98**step for step in range(100)]) is None
        True
    """
    quarter = len(losses) // 4
    if quarter < 10:
        return None
    first, peak = losses[0], max(losses)
    before, last = (statistics.median(part) for part in (losses[-2 * quarter : -quarter], losses[-quarter:]))
    if not (peak > JUMP * first and last > _LEVEL * first and last > _PROGRESS * before):
        return None
    return (
        f"the network collapsed: its loss rose from {first:.3g} to {peak:.3g} at step {losses.index(peak) + 1}, and "
        f"now stays at {last:.3g}; start again with residual branches at zero (zero_init_residual=True), with a "
        "warm-up, or with both (one of them may not be enough), or lower the learning rate"
    )


class CollapseWatch:
    """Collects the losses of a run as they are read, and looks for a collapse every hundred steps at the start.

    Example:
        >>> watch = CollapseWatch()
        >>> found = [watch.add(loss, samples=64) for loss in [2.4, 31.0, *[2.3] * 198]]
        >>> [step + 1 for step, text in enumerate(found) if text]
        [100]
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._steps, self._samples, self._sum = 0, 0, 0.0
        self._found = False

    def add(self, loss: float, *, samples: int) -> str | None:
        """Add the mean loss of a step. Return a warning, once, if the losses so far are those of a collapse."""
        if self._found or len(self._losses) >= LAST:
            return None
        self._steps, self._samples, self._sum = self._steps + 1, self._samples + samples, self._sum + loss * samples
        if self._samples >= SAMPLES:
            self._losses.append(self._sum / self._samples)
            self._samples, self._sum = 0, 0.0
        text = find_collapse(self._losses) if self._steps % INTERVAL == 0 else None
        self._found = text is not None
        return text
