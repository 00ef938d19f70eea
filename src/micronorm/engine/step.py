"""One optimizer step as a transaction: its samples in micro-batches, its gradients and statistics whole or not at all.

The loss of a step is a sum over its samples divided once by their count. Micro-batches add up gradients of sums; when
every rank has said that its own came through, gradients are reduced, divided and applied, and the optimizer commits the
statistics. When a rank ran out of memory, every rank takes the attempt back and repeats it in halves.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.commit.snapshot import Snapshot
from micronorm.commit.transaction import Transaction
from micronorm.engine.inputs import check_batch, check_loss
from micronorm.engine.microbatch import MemoryProbe, MicroBatch, is_out_of_memory, release_memory
from micronorm.engine.observer import Watch
from micronorm.engine.parallel import NO_WISHES, Alone, Sharded, Verdict, Wishes
from micronorm.engine.task import Batch, Task
from micronorm.nn.per_step.keyed_dropout import dropout_keys
from micronorm.nn.per_step.shared_weights import SharedWeights

HALF = (torch.bfloat16, torch.float16)


class StepFailed(RuntimeError):
    """Another rank met an error; its own message says which."""


class ShardOutOfMemory(MemoryError):
    """A rank of a sharded run ran out of memory; `micro_batch` is the size to resume with."""

    def __init__(self, message: str, micro_batch: int) -> None:
        super().__init__(message)
        self.micro_batch = micro_batch


@dataclass
class StepResult:
    """What a step came to; `sums` lies on the device and is read when the record is written."""

    names: list[str]
    sums: Tensor
    micro_batch: int
    wishes: Wishes
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Portion:
    """This rank's share of one step: its batch, the keys of its samples, and the size of the whole step."""

    batch: Batch
    keys: Tensor
    samples: int
    """Of the whole step, over all ranks."""
    counted: int
    """Of this rank's batch: 0 where its one sample is there only to keep collective forwards in step."""


class Step:
    """Takes optimizer steps.

    Args:
        model: on its device, as the ranks compute with it.
        task: gives the loss.
        optimizer: holds the model's parameters.
        parallel: the ranks.
        micro_batch: how large a micro-batch may be; halved when memory runs out.
        dtype: of the computation; parameters have it too, but for the half types.
        channels_last: whether images are laid out so.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        *,
        parallel: Alone,
        micro_batch: MicroBatch,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        step_batch: int = 1,
    ) -> None:
        self.model, self.task, self.optimizer = model, task, optimizer
        self.parallel, self.micro_batch = parallel, micro_batch
        self.dtype, self.channels_last = dtype, channels_last
        self.device = parallel.device
        # A step may take as many forwards as it has samples, and float16 may skip as many steps as it takes to halve
        # its scale down to nothing: only more than that is a fault.
        self.transaction = Transaction(model, optimizer, max_forwards=32 * step_batch + 1024)
        self.savepoint = Snapshot(model)  # allocates now: a step that ran out of memory could not
        # A shard is gathered for its forward only: there is no whole weight to keep between micro-batches.
        self.weights = None if isinstance(parallel, Sharded) else SharedWeights(model)
        # Losses are sums over samples: what a mean would divide by is taken off the scale.
        scale = 2.0**16 / max(step_batch, 1)
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=scale, enabled=dtype == torch.float16)
        self.names: list[str] = []
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.watch: Watch | None = None

    def __call__(self, portion: Portion, wishes: Wishes = NO_WISHES) -> StepResult:
        """Take one step; the wishes are told to the other ranks, and theirs come back with these."""
        messages: list[str] = []
        while True:
            sums, verdict = self._attempt(portion, wishes)
            if sums is not None:
                break
            before = self.micro_batch.size
            messages.append(
                f"out of memory with {before} samples per micro-batch; the step was taken back and is repeated with "
                f"{self.micro_batch.halve()}"
            )
        self.parallel.reduce_gradients()
        totals = self.parallel.total(self.flatten(sums))
        self.apply(totals)
        return StepResult(self.names, totals, self.micro_batch.size, verdict.wishes, messages)

    def _attempt(self, portion: Portion, wishes: Wishes) -> tuple[dict[str, Any] | None, Verdict]:
        """Compute the micro-batches. None where a rank ran out of memory: then all of them are where they were."""
        self.savepoint.take()
        if self.watch is not None:
            self.watch.discard()  # of an attempt before this one, or of a look ahead
        sums, error, failed = None, None, False
        try:
            sums = self.accumulate(portion)
        except Exception as caught:
            failed = is_out_of_memory(caught)
            if failed and isinstance(self.parallel, Sharded):
                raise self._out_of_memory_in_a_shard() from caught
            # Nothing of the traceback may be kept where the step is to be repeated: it holds the activations.
            error = None if failed else caught
        except BaseException:  # a second Ctrl-C: whoever catches it finds the model between two steps
            self.roll_back()
            raise
        verdict = self.parallel.agree(Verdict(failed, error is not None, wishes))
        if verdict.failed or verdict.broken:
            self.roll_back()
        if error is not None:
            raise error
        if verdict.broken:
            raise StepFailed("the step failed on another rank, and was taken back on this one")
        return (None if verdict.failed else sums), verdict

    def _out_of_memory_in_a_shard(self) -> ShardOutOfMemory:
        size = self.micro_batch.halve()
        return ShardOutOfMemory(
            f"rank {self.parallel.rank} ran out of memory in a collective forward, which the others cannot be told; "
            f"resume the run: it goes on with {size} samples per micro-batch",
            size,
        )

    def roll_back(self) -> None:
        """Take the attempt back: gradients, buffers, windows, random states."""
        self.optimizer.zero_grad(set_to_none=True)
        release_memory()
        self.savepoint.restore()

    def accumulate(self, portion: Portion) -> dict[str, Any]:
        """Sum losses and gradients over this rank's micro-batches."""
        check_batch(portion.batch, len(portion.keys))
        self.optimizer.zero_grad(set_to_none=True)
        pieces = self.micro_batch.pieces(portion.counted)
        unit, size = self.micro_batch.unit, self.micro_batch.size
        idle = max(self.parallel.passes(portion.samples, unit=unit, size=size) - len(pieces), 0)
        sums: dict[str, Any] = {}
        with self._shared_weights(len(pieces), idle):
            for k, piece in enumerate(pieces):
                with self.parallel.accumulating(last=k + 1 == len(pieces) + idle):
                    loss = self._backward(portion, piece)
                for name, value in {"loss": loss.sum, "count": loss.count, **loss.counts}.items():
                    value = value.detach() if isinstance(value, Tensor) else value
                    sums[name] = sums[name] + value if name in sums else value
            for k in range(idle):
                self._idle(portion, last=k + 1 == idle)
        new = sums.keys() - set(self.names) if self.names else ()
        if new:
            raise ValueError(
                f"the loss counts {', '.join(sorted(new))}, which the first step did not; count the same in each step, "
                "zero where there is nothing to count"
            )
        return sums

    def flatten(self, sums: dict[str, Any]) -> Tensor:
        """The sums in one vector on the device, by `names`; a rank without samples learns those from the others."""
        if not self.names:
            names = ["count", "loss", *sorted(sums.keys() - {"count", "loss"})]
            self.names = max(self.parallel.gather(names), key=len)
        vector = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        for i, name in enumerate(self.names):
            vector[i] += sums.get(name, 0)
        return vector

    def _backward(self, portion: Portion, piece: slice) -> Any:
        part = self.place(tuple(column[piece] for column in portion.batch))
        with dropout_keys(portion.keys[piece]):
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype in HALF):
                loss = self.task.loss(self.model, part)
            check_loss(loss)
            self.scaler.scale(loss.sum).backward()
        return loss

    def _idle(self, portion: Portion, *, last: bool) -> None:
        """A pass for the sake of the other ranks' collectives: its loss counts for nothing, and it leaves no trace."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        part = self.place(tuple(column[:1] for column in portion.batch))
        half = torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype in HALF)
        keys = dropout_keys(portion.keys[:1])  # without them dropout would draw from the global generator
        unseen = contextlib.nullcontext() if self.watch is None else self.watch.paused()
        with self.parallel.accumulating(last=last), self.transaction.paused(), unseen, half, keys:
            (self.task.loss(self.model, part).sum * 0).backward()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.buffers()), buffers)

    def apply(self, sums: Tensor) -> None:
        """Divide once, step, and let the optimizer commit the statistics. `sums` are totals over ranks, by `names`."""
        gradients = self.parallel.local([p.grad for p in self.parameters if p.grad is not None])
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if gradients:
            count = sums[self.names.index("count")] / self.parallel.world  # reduced gradients are means over ranks
            torch._foreach_div_(gradients, torch.where(count > 0, count, 1.0).to(gradients[0].dtype))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def place(self, part: Any) -> Any:
        """A copy of a part of a batch on the device, floating numbers in the dtype of the parameters.

        A copy, because a model may write to its input, and a step that is repeated must find it as it was.
        """
        if isinstance(part, Tensor):
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            dtype = wide if part.is_floating_point() else part.dtype
            layout = torch.channels_last if self.channels_last and part.ndim == 4 else torch.preserve_format
            return part.to(self.device, dtype, non_blocking=True, copy=True, memory_format=layout)
        if isinstance(part, dict):
            return {key: self.place(value) for key, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):  # a named one takes its values apart
            return type(part)(*map(self.place, part))
        if isinstance(part, (tuple, list)):
            return type(part)(map(self.place, part))
        return part

    @contextlib.contextmanager
    def _shared_weights(self, pieces: int, idle: int) -> Iterator[None]:
        weights = self.weights
        # One micro-batch gains from it where the weights of all layers are one launch.
        if weights is None or not weights.layers or pieces < 1 or (pieces == 1 and not weights.by_kernel):
            yield
            return
        # Gradients are summed over micro-batches in float32; those of a single one are not summed.
        single = pieces + idle == 1 and self.dtype in HALF
        with weights.shared(dtype=self.dtype if single else None):
            yield

    def fit(self, portion: Portion, sizes: Sequence[int], *, measure: Callable[[], MemoryProbe] | None = None) -> int:
        """The largest micro-batch that fits, by trial runs of two sizes which leave no trace. On a GPU only."""
        probe = (measure or (lambda: MemoryProbe(self.device)))()
        size, fits = self.micro_batch.size, min(sizes)
        try:
            for trial in sizes:
                self.micro_batch.size = trial
                if not self._try(portion, trial, probe):
                    return fits
                fits = trial
        finally:
            self.micro_batch.size = size
        return probe.fitting()

    def _try(self, portion: Portion, trial: int, probe: MemoryProbe) -> bool:
        """Whether so many samples at once fit."""
        self.savepoint.take()
        probe.begin()
        part = Portion(tuple(c[:trial] for c in portion.batch), portion.keys[:trial], trial, trial)
        failed = False
        try:
            self.accumulate(part)
            probe.end(trial)
        except Exception as caught:
            failed = is_out_of_memory(caught)
            if not failed:
                raise
            if isinstance(self.parallel, Sharded):
                raise self._out_of_memory_in_a_shard() from caught
        self.roll_back()
        return not failed
