"""The score of a model on the test samples, over all ranks, as large a batch at a time as memory allows."""

from collections.abc import Iterator

import torch

from micronorm.commit.snapshot import RandomState
from micronorm.engine.inputs import check_scores
from micronorm.engine.microbatch import is_out_of_memory, release_memory
from micronorm.engine.parallel import NO_WISHES, Sharded, Verdict
from micronorm.engine.step import HALF, Step, StepFailed

CHUNK = 256


@torch.no_grad()
def evaluate(step: Step, *, seed: int) -> dict[str, float]:
    """The figures of `step.task` for `step.model`. Afterwards nothing tells that it was evaluated. Collective."""
    was_training = step.model.training
    random_state = RandomState.get(step.device)  # a model may draw in evaluation too, and training go on from there
    step.model.eval()
    sums: dict[str, torch.Tensor] = {}
    error = None
    try:
        with step.parallel.one_model():
            sums = _sums_in_chunks(step, seed=seed)
    except Exception as caught:
        if isinstance(step.parallel, Sharded):
            raise  # the others are in a collective forward, and cannot be told
        error = caught
    finally:
        step.model.train(was_training)
        RandomState.set(random_state, step.device)
    # Nobody may wait for the sums of a rank that has none to give.
    verdict = step.parallel.agree(Verdict(failed=False, broken=error is not None, wishes=NO_WISHES))
    if error is not None:
        raise error
    if verdict.broken:
        raise StepFailed("the evaluation failed on another rank")
    names = max(step.parallel.gather(sorted(sums)), key=len)
    zero = torch.zeros((), dtype=torch.float64, device=step.device)
    totals = step.parallel.total(torch.stack([sums.get(name, zero) for name in names])).tolist()
    return step.task.figures(dict(zip(names, totals, strict=True)))


def _sums_in_chunks(step: Step, *, seed: int) -> dict[str, torch.Tensor]:
    """The sums over this rank's share; the chunks are halved as long as memory runs out."""
    # Shards go through collective forwards, so nobody can halve alone: what training holds, evaluation does too.
    chunk = min(CHUNK, step.micro_batch.size) if isinstance(step.parallel, Sharded) else CHUNK
    while True:
        try:
            return _sums(step, seed=seed, chunk=chunk)
        except Exception as error:
            if isinstance(step.parallel, Sharded) or not is_out_of_memory(error):
                raise
        if chunk == 1:
            raise MemoryError("out of memory in evaluating a single sample; use smaller inputs or --dtype bfloat16")
        release_memory()
        chunk //= 2


def _sums(step: Step, *, seed: int, chunk: int) -> dict[str, torch.Tensor]:
    samples = len(step.task.test)
    own = step.parallel.share(samples)
    indices = torch.arange(own.start, own.stop)
    passes = step.parallel.passes(samples, unit=1, size=chunk)

    def shares() -> Iterator[tuple[int, torch.Tensor]]:
        for k in range(passes):
            part = indices[k * chunk : (k + 1) * chunk]
            # A rank with fewer samples goes through its first again where forwards are collective; it is not counted.
            yield 0, part if len(part) else torch.zeros(1, dtype=torch.int64)

    sums: dict[str, torch.Tensor] = {}
    for k, batch in enumerate(step.task.test.load(shares(), seed=seed)):
        with torch.autocast(step.device.type, dtype=step.dtype, enabled=step.dtype in HALF):
            scores = step.task.score(step.model, step.place(batch))
        check_scores(scores)
        if k * chunk < len(indices):
            for name, value in scores.items():
                wide = value.to(step.device, torch.float64)
                sums[name] = sums[name] + wide if name in sums else wide
    return sums
