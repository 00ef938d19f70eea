"""The score of a model on the test samples, over all ranks, as large a batch at a time as memory allows."""

from collections.abc import Iterator

import torch

from micronorm.engine.microbatch import is_out_of_memory, release_memory
from micronorm.engine.step import HALF, Step

CHUNK = 256


@torch.no_grad()
def evaluate(step: Step, *, seed: int) -> dict[str, float]:
    """The figures of `step.task` for `step.model`, which is in training mode again afterwards."""
    was_training = step.model.training
    step.model.eval()
    chunk = CHUNK
    try:
        while True:
            failed = False
            sums: dict[str, torch.Tensor] = {}
            try:
                sums = _sums(step, seed=seed, chunk=chunk)
            except Exception as error:
                if chunk == 1 or not is_out_of_memory(error):
                    raise
                failed = True
            if not failed:
                break
            release_memory()
            chunk //= 2
        names = max(step.parallel.gather(sorted(sums)), key=len)
        zero = torch.zeros((), dtype=torch.float64, device=step.device)
        vector = torch.stack([sums.get(name, zero) for name in names])
        totals = step.parallel.total(vector).tolist()
        return step.task.figures(dict(zip(names, totals, strict=True)))
    finally:
        step.model.train(was_training)


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
        if k * chunk < len(indices):
            for name, value in scores.items():
                wide = value.to(step.device, torch.float64)
                sums[name] = sums[name] + wide if name in sums else wide
    return sums
