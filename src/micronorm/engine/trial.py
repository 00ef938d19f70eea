"""Trial runs before the first step: how many samples fit into memory, and whether the loss is a sum over samples.

They leave no trace: gradients, buffers, windows and random states are restored.
"""

import torch

from micronorm.engine.microbatch import is_out_of_memory
from micronorm.engine.parallel import ShardedRanks
from micronorm.engine.step import HALF, Step, StepInputs
from micronorm.nn.per_step.keyed_dropout import dropout_keys

# The share of the free memory that the first guess may take: fragmentation, workspaces and larger images need the rest.
MARGIN = 0.85

CHECKED_SAMPLES = 8
# Larger than the rounding errors in the loss of a deep network; a mean instead of a sum is off by half.
TOLERANCE, TOLERANCE_HALF = 1e-3, 0.05


def choose_micro_batch(step: Step, inputs: StepInputs) -> None:
    """Set the micro-batch to the largest that memory seems to hold, on a GPU. A wrong guess costs one repeated step."""
    cut, parallel = step.micro_batch, step.parallel
    # Shares may differ by a unit, but all ranks must take the same branch.
    if step.device.type != "cuda" or min(cut.size, parallel.smallest(inputs.own_samples)) <= 4 * cut.unit:
        return
    fits = parallel.smallest(largest_fitting(step, inputs, cut.unit, 4 * cut.unit))
    cut.size = max(cut.unit, min(cut.size, fits) // cut.unit * cut.unit)


def largest_fitting(step: Step, inputs: StepInputs, few: int, many: int) -> int:
    """Return the largest micro-batch that fits, by a straight line through the peak memory of two trial runs."""
    low = _peak_memory(step, inputs, few)
    high = None if low is None else _peak_memory(step, inputs, many)
    if low is None or high is None:
        return few
    slope = max((high - low) / (many - few), 1.0)
    free, _ = torch.cuda.mem_get_info(step.device)
    available = MARGIN * (free + torch.cuda.memory_reserved(step.device))
    return max(few, int((available - low) / slope) + few)


def _peak_memory(step: Step, inputs: StepInputs, samples: int) -> int | None:
    """Return the bytes that this many samples at once need, or None if they do not fit."""
    size, peak = step.micro_batch.size, None
    part = StepInputs(tuple(c[:samples] for c in inputs.batch), inputs.keys[:samples], samples, samples)
    step.savepoint.take()
    torch.cuda.synchronize(step.device)
    torch.cuda.reset_peak_memory_stats(step.device)
    try:
        step.micro_batch.size = samples
        step.accumulate(part)
        torch.cuda.synchronize(step.device)
        peak = torch.cuda.max_memory_allocated(step.device)
    except Exception as caught:
        if not is_out_of_memory(caught):
            raise
        if isinstance(step.parallel, ShardedRanks):
            raise step.shard_out_of_memory() from caught
    finally:
        step.micro_batch.size = size
    step.roll_back()
    return peak


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
    with dropout_keys(inputs.keys[part]), step.autocast():
        return float(step.task.loss(step.model, step.place(tuple(column[part] for column in inputs.batch))).sum)
