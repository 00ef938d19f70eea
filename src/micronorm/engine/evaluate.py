"""The score of a model on the test samples, over all ranks, in batches as large as memory allows."""

from collections.abc import Callable, Iterator

import torch

from micronorm.commit.snapshot import RandomState
from micronorm.engine.microbatch import is_out_of_memory, release_memory
from micronorm.engine.parallel import Flags, ShardedRanks
from micronorm.engine.step import Step, StepFailed
from micronorm.engine.task import Score, check_score


class EvaluationStopped(Exception):
    """A signal or another rank stopped the evaluation."""


def _never() -> bool:
    return False


@torch.no_grad()
def evaluate(step: Step, *, seed: int, stop: Callable[[], bool] = _never) -> dict[str, float]:
    """Return the figures of `step.model` on the test samples of `step.task`. Collective; leaves no trace.

    Raises:
        EvaluationStopped: `stop()` was true on some rank, between two batches. Shards are evaluated to the end.
    """
    was_training = step.model.training
    random_state = RandomState.get(step.device)  # a model may draw random numbers in evaluation too
    step.model.eval()
    score, error, stopped = step.task.new_score(), None, False
    check_score(score)
    try:
        with step.parallel.buffers_of_rank_0():
            score = _score_share(step, seed=seed, stop=stop)
    except EvaluationStopped:
        stopped = True
    except Exception as caught:
        if isinstance(step.parallel, ShardedRanks):
            raise  # the other ranks are in a collective forward, and cannot agree on a status
        error = caught
    finally:
        step.model.train(was_training)
        RandomState.set(random_state, step.device)
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


def _score_share(step: Step, *, seed: int, stop: Callable[[], bool]) -> Score:
    """Return the score of this rank's test samples. Halve the batches while memory runs out."""
    # Forwards of shards are collective, so no rank can halve alone: use the size that training fits into memory.
    sharded = isinstance(step.parallel, ShardedRanks)
    size = step.task.evaluation_batch
    size = min(size, step.micro_batch.size) if sharded else size
    stop = _never if sharded else stop
    while True:
        try:
            return _score_in_batches(step, seed=seed, size=size, stop=stop)
        except Exception as error:
            if sharded or not is_out_of_memory(error):
                raise
        if size == 1:
            raise MemoryError("out of memory in evaluating a single sample; use smaller inputs or --dtype bfloat16")
        release_memory()
        size //= 2


def _score_in_batches(step: Step, *, seed: int, size: int, stop: Callable[[], bool]) -> Score:
    samples = len(step.task.test)
    own = step.parallel.share(samples)
    indices = torch.arange(own.start, own.stop)
    count = step.parallel.forward_count(samples, unit=1, size=size)

    def shares() -> Iterator[tuple[int, torch.Tensor]]:
        for k in range(count):
            part = indices[k * size : (k + 1) * size]
            # A rank with fewer samples joins collective forwards with its first sample, which is not scored again.
            yield 0, part if len(part) else torch.zeros(1, dtype=torch.int64)

    total = step.task.new_score()
    for k, batch in enumerate(step.task.test.load(shares(), seed=seed)):
        if stop():
            raise EvaluationStopped
        with step.autocast():
            score = step.task.score(step.model, step.place(batch))
        check_score(score)
        if k * size < len(indices):
            total.merge(score)
    return total
