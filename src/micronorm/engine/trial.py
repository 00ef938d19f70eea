"""Trial runs before the first step: how many samples fit into memory, and whether the loss is a sum over samples.

They leave no trace: gradients, buffers, windows and random states are restored.
"""

from collections.abc import Callable, Sequence

import torch

from micronorm.engine.microbatch import is_out_of_memory
from micronorm.engine.parallel import ShardedRanks
from micronorm.engine.step import HALF, Step, StepInputs

# The share of the free memory that the first guess may take: fragmentation, workspaces and larger images need the rest.
MARGIN = 0.85

CHECKED_SAMPLES = 8
# Larger than the rounding errors in the loss of a deep network; a mean instead of a sum is off by half.
TOLERANCE, TOLERANCE_HALF = 1e-3, 0.05


class MemoryProbe:
    """Measures the peak memory of micro-batches on a GPU, and extrapolates how many samples fit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Call before a trial run."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def end(self, samples: int) -> None:
        """Call after a trial run with this many samples."""
        torch.cuda.synchronize(self.device)
        self.readings.append((samples, torch.cuda.max_memory_allocated(self.device)))

    def fitting(self) -> int:
        """Return the samples that fit, by a straight line through the two readings."""
        (few, low), (many, high) = self.readings
        slope = max((high - low) / (many - few), 1.0)
        free, _ = torch.cuda.mem_get_info(self.device)
        available = MARGIN * (free + torch.cuda.memory_reserved(self.device))
        return max(few, int((available - low) / slope) + few)


def choose_micro_batch(step: Step, inputs: StepInputs) -> None:
    """Set the micro-batch to the largest that memory seems to hold, on a GPU. A wrong guess costs one repeated step."""
    cut, parallel = step.micro_batch, step.parallel
    # Shares may differ by a unit, but all ranks must take the same branch.
    if step.device.type != "cuda" or min(cut.size, parallel.smallest(inputs.own_samples)) <= 4 * cut.unit:
        return
    fits = parallel.smallest(largest_fitting(step, inputs, (cut.unit, 4 * cut.unit)))
    cut.size = max(cut.unit, min(cut.size, fits) // cut.unit * cut.unit)


def largest_fitting(
    step: Step, inputs: StepInputs, sizes: Sequence[int], *, measure: Callable[[], MemoryProbe] | None = None
) -> int:
    """Return the largest micro-batch that fits, by trial runs of two sizes."""
    probe = (measure or (lambda: MemoryProbe(step.device)))()
    size, fits = step.micro_batch.size, min(sizes)
    try:
        for trial in sizes:
            step.micro_batch.size = trial
            if not _try(step, inputs, trial, probe):
                return fits
            fits = trial
    finally:
        step.micro_batch.size = size
    return probe.fitting()


def _try(step: Step, inputs: StepInputs, trial: int, probe: MemoryProbe) -> bool:
    """Return whether this many samples fit at once."""
    step.savepoint.take()
    probe.begin()
    part = StepInputs(tuple(c[:trial] for c in inputs.batch), inputs.keys[:trial], trial, trial)
    failed = False
    try:
        step.accumulate(part)
        probe.end(trial)
    except Exception as caught:
        failed = is_out_of_memory(caught)
        if not failed:
            raise
        if isinstance(step.parallel, ShardedRanks):
            raise step.shard_out_of_memory() from caught
    step.roll_back()
    return not failed


@torch.no_grad()
def check_loss_is_a_sum(step: Step, inputs: StepInputs) -> str | None:
    """Return a warning if the loss of some samples is not the sum over its halves, None if it is.

    The cause is a loss that is a mean, or samples that share statistics although the settings say `unit=1`. The result
    of such a run depends on the micro-batch. The check takes three forward passes over few samples. It is left out if
    samples must stay together, and on several ranks, because their forward passes may be collective.
    """
    samples = min(inputs.own_samples, step.micro_batch.size, CHECKED_SAMPLES)
    if step.micro_batch.unit > 1 or step.parallel.world > 1 or samples < 2:
        return None
    step.savepoint.take()
    try:
        with step.transaction.paused():
            whole = _loss(step, inputs, slice(0, samples))
            halves = sum(_loss(step, inputs, part) for part in (slice(0, samples // 2), slice(samples // 2, samples)))
    except Exception:
        return None  # the step itself is about to meet the same error, and handles it
    finally:
        step.savepoint.restore()
    tolerance = TOLERANCE_HALF if step.dtype in HALF else TOLERANCE
    if not abs(whole - halves) > tolerance * max(abs(whole), abs(halves)):
        return None
    return (
        f"the result depends on the micro-batch: the loss of {samples} samples at once is {whole:.4g}, the sum over "
        f"its halves {halves:.4g}. task.loss must return a sum over samples, not a mean; mn.check_cuts names other "
        "causes"
    )


def _loss(step: Step, inputs: StepInputs, part: slice) -> float:
    with step.computing(inputs.keys[part]):
        return float(step.task.loss(step.model, step.place(tuple(column[part] for column in inputs.batch))).sum)
