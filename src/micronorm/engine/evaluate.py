"""Passes of the model that leave no trace: the evaluation, and trial runs before the first step.

The evaluation gives the score on the test samples, over all ranks, in batches as large as memory allows. Trial runs
find how many samples fit into memory, and whether the loss is a sum over samples. Gradients, buffers, windows and
random states are restored.
"""

from collections.abc import Callable

import torch

from micronorm.commit.snapshot import RandomState
from micronorm.engine.parallel import Flags, ShardedRanks
from micronorm.engine.sampling import StepInputs, is_out_of_memory, release_memory
from micronorm.engine.step import HALF, Step, StepFailed
from micronorm.engine.task import Score, check_score
from micronorm.nn.per_step.keyed_dropout import dropout_keys


class EvaluationStopped(Exception):
    """A signal or another rank stopped the evaluation."""


def _unwatched(done: int, samples: int) -> bool:
    return False


@torch.no_grad()
def evaluate(step: Step, *, seed: int, watch: Callable[[int, int], bool] = _unwatched) -> dict[str, float]:
    """Return the figures of `step.model` on the test samples of `step.task`. Collective; leaves no trace.

    Args:
        step: the model, its task and its device.
        seed: of the random numbers that the model draws.
        watch: called before each batch with the numbers of scored and of all test samples of this rank; True stops.

    Raises:
        EvaluationStopped: `watch` returned True on some rank. Shards are evaluated to the end.
    """
    was_training = step.model.training
    step.model.eval()
    score, error, stopped = step.task.new_score(), None, False
    check_score(score)
    try:
        # A model may draw random numbers in evaluation, too.
        with RandomState.preserved([step.device]), step.parallel.buffers_of_rank_0():
            score = _score_share(step, seed=seed, watch=watch)
    except EvaluationStopped:
        stopped = True
    except Exception as caught:
        if isinstance(step.parallel, ShardedRanks):
            raise  # the other ranks are in a collective forward, and cannot agree on a status
        error = caught
    finally:
        step.model.train(was_training)
    # No rank may wait for the score of a rank that failed.
    flags = step.parallel.agree(Flags(failed=error is not None, stop=stopped))
    if error is not None:
        raise error
    if flags.failed:
        raise StepFailed("the evaluation failed on another rank")
    if flags.stop:
        raise EvaluationStopped
    return _gather(step, score).figures()


def _gather(step: Step, score: Score) -> Score:
    """Merge the scores of all ranks."""
    if step.parallel.world == 1:
        return score
    total = step.task.new_score()
    for state in step.parallel.gather(score.state_dict()):
        part = step.task.new_score()
        part.load_state_dict(state)
        total.merge(part)
    return total


def _score_share(step: Step, *, seed: int, watch: Callable[[int, int], bool]) -> Score:
    """Return the score of this rank's test samples. Halve the batches while memory runs out."""
    # Forwards of shards are collective, so no rank can halve alone: use the size that training fits into memory.
    sharded = isinstance(step.parallel, ShardedRanks)
    size = step.task.evaluation_batch
    size = min(size, step.micro_batch.size) if sharded else size
    while True:
        try:
            return _score_in_batches(step, seed=seed, size=size, watch=watch)
        except Exception as error:
            if sharded or not is_out_of_memory(error):
                raise
        if size == 1:
            raise MemoryError("out of memory in evaluating a single sample; use smaller inputs or --dtype bfloat16")
        release_memory()
        size //= 2


def _score_in_batches(step: Step, *, seed: int, size: int, watch: Callable[[int, int], bool]) -> Score:
    samples = len(step.task.test)
    own = step.parallel.share(samples)
    count = own.stop - own.start
    own_indices = [torch.arange(k, min(k + size, own.stop)) for k in range(own.start, own.stop, size)]
    # A rank with fewer samples joins collective forwards with the first sample, whose score it drops.
    unscored = step.parallel.forward_count(samples, unit=1, size=size) - len(own_indices)
    shares = [(0, part) for part in (*own_indices, *[torch.zeros(1, dtype=torch.int64)] * unscored)]
    total = step.task.new_score()
    for k, batch in enumerate(step.task.test.load(shares, seed=seed)):
        if watch(min(k * size, count), count) and not isinstance(step.parallel, ShardedRanks):
            raise EvaluationStopped
        with step.autocast():
            score = step.task.score(step.model, step.place(batch))
        check_score(score)
        if k < len(own_indices):
            total.merge(score)
    return total


# The share of the free memory that the first guess may take: fragmentation, workspaces and larger images need the rest.
MARGIN = 0.85

CHECKED_SAMPLES = 8
# Larger than the rounding errors in the loss of a deep network; a mean instead of a sum is off by half.
TOLERANCE, TOLERANCE_HALF = 1e-3, 0.05


def choose_micro_batch(step: Step, inputs: StepInputs) -> None:
    """Set the micro-batch to the largest that memory seems to hold, on a GPU. A wrong guess costs one repeated step."""
    micro_batch, parallel = step.micro_batch, step.parallel
    unit = micro_batch.unit
    # Shares may differ by a unit, but all ranks must take the same branch.
    if step.device.type != "cuda" or min(micro_batch.size, *parallel.gather(inputs.own_samples)) <= 4 * unit:
        return
    fitting = min(parallel.gather(largest_fitting(step, inputs, unit, 4 * unit)))
    micro_batch.size = max(unit, min(micro_batch.size, fitting) // unit * unit)


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
