"""A look at the law before the first step: is the loss of some samples the sum over its halves?

It is not where a loss is a mean, or where samples share statistics that the settings do not know of (`unit`). Such a
run is no error, but its result depends on the micro-batch, and its user should hear of it.
"""

import torch

from micronorm.engine.step import HALF, Portion, Step
from micronorm.nn.per_step.keyed_dropout import dropout_keys

SAMPLES = 8
# Above what rounding does to the loss of a deep network; a mean in place of a sum is off by half.
TOLERANCE, TOLERANCE_HALF = 1e-3, 0.05


@torch.no_grad()
def describe_dependence(step: Step, portion: Portion) -> str | None:
    """What to say where the loss is not the sum over its halves; None where it is, or cannot be asked.

    Takes three forwards of few samples, which leave no trace. Not asked where samples must stay together, and not on
    several ranks, whose forwards may be collective.
    """
    samples = min(portion.counted, step.micro_batch.size, SAMPLES)
    if step.micro_batch.unit > 1 or step.parallel.world > 1 or samples < 2:
        return None
    step.savepoint.take()
    try:
        with step.transaction.paused():
            whole = _loss(step, portion, slice(0, samples))
            halves = sum(_loss(step, portion, part) for part in (slice(0, samples // 2), slice(samples // 2, samples)))
    except Exception:
        return None  # whatever is wrong, the step is about to meet it, and knows what to do
    finally:
        step.savepoint.restore()
    tolerance = TOLERANCE_HALF if step.dtype in HALF else TOLERANCE
    if not abs(whole - halves) > tolerance * max(abs(whole), abs(halves)):
        return None
    return (
        f"the result depends on the micro-batch: the loss of {samples} samples at once is {whole:.4g}, the sum over "
        f"its halves {halves:.4g}. task.loss must give a sum over samples, not a mean; mn.check_cuts names what else "
        "it may be"
    )


def _loss(step: Step, portion: Portion, part: slice) -> float:
    batch = step.place(tuple(column[part] for column in portion.batch))
    half = torch.autocast(step.device.type, dtype=step.dtype, enabled=step.dtype in HALF)
    with dropout_keys(portion.keys[part]), half:
        return float(step.task.loss(step.model, batch).sum)
