"""One optimizer step as a transaction: samples in micro-batches, gradients and statistics applied whole or not at all.

The loss of a step is a sum over its samples, divided once by their count. Micro-batches add up the gradients of sums.
When every rank has reported success, gradients are reduced, divided and applied, and the optimizer commits the
statistics. If a rank ran out of memory, every rank rolls the attempt back and repeats it with half the micro-batch.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.commit.handle import Handle
from micronorm.commit.snapshot import Snapshot
from micronorm.engine.optimization import build_optimizer
from micronorm.engine.parallel import NO_FLAGS, Flags, OneRank, ShardedRanks
from micronorm.engine.sampling import MicroBatch, StepInputs, is_out_of_memory, release_memory
from micronorm.engine.settings import Execution, Settings
from micronorm.engine.task import Task, check_batch, check_loss
from micronorm.nn.per_step.keyed_dropout import dropout_keys
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.ops.private_api import foreach_copy_, foreach_div_

HALF = (torch.bfloat16, torch.float16)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout with the channels last, by the number of axes."""


class StepFailed(RuntimeError):
    """Another rank raised an error; its own message says which."""


class ShardOutOfMemory(MemoryError):
    """A rank of a sharded run ran out of memory; `micro_batch` is the size to resume with."""

    def __init__(self, message: str, micro_batch: int) -> None:
        super().__init__(message)
        self.micro_batch = micro_batch


@dataclass
class StepResult:
    """The sums of a step, which stay on the device until the record is written, and what else it reports."""

    names: list[str]
    sums: Tensor
    micro_batch: int
    requests: Flags
    messages: list[str] = field(default_factory=list)


class Step:
    """Takes optimizer steps.

    Args:
        model: is moved to the device of the ranks, and prepared for them.
        task: computes the loss.
        settings: the optimizer, the dtype, and how many samples a step has.
        execution: the first size of the micro-batch, which is halved when memory runs out; layout and compilation.
        parallel: the ranks.
    """

    def __init__(
        self, model: nn.Module, task: Task, settings: Settings, execution: Execution, parallel: OneRank
    ) -> None:
        self.task, self.parallel, self.device = task, parallel, parallel.device
        self.dtype, self.channels_last = settings.dtype, execution.channels_last
        sharded, half = isinstance(parallel, ShardedRanks), settings.dtype == torch.float16
        if sharded and half:
            raise ValueError("float16's loss scaling does not support shards; use bfloat16 or parallel='ddp'")
        model = model.to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)
        if self.channels_last:
            for parameter in model.parameters():  # nn.Module.to raises if networks have weights of both ranks
                if parameter.ndim in CHANNELS_LAST:
                    parameter.data = parameter.data.to(memory_format=CHANNELS_LAST[parameter.ndim])
        self.model = parallel.prepare(model.train())
        if execution.compile:
            self.model.compile()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.model, settings.optimizer, settings.groups, captured=execution.cuda_graph)
        size = execution.micro_batch or parallel.largest_share(settings.step_batch, unit=settings.unit)
        self.micro_batch = MicroBatch(size, unit=settings.unit, largest=settings.largest)
        # A step may take as many forwards as it has samples, and float16 may skip steps until its scale has been
        # halved to zero. More forwards without a commit are a fault.
        self.transaction = Handle(self.model, [self.optimizer], max_forwards=32 * settings.step_batch + 1024)
        self.savepoint = Snapshot(self.model)  # allocates now: a step that ran out of memory could not
        # A shard is gathered for its forward only: no whole weight exists between micro-batches.
        self.weights = None if sharded else SharedWeights(self.model)
        # Losses are sums over samples, so the usual scale is divided by the count.
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**16 / settings.step_batch, enabled=half)
        self.names: list[str] = []
        self.observation: Any = None
        """What `mn.observe` returned, if the run is observed."""

    def __call__(self, inputs: StepInputs, requests: Flags = NO_FLAGS) -> StepResult:
        """Take one step. The result holds the requests of all ranks."""
        messages: list[str] = []
        while True:
            sums, flags = self._attempt(inputs, requests)
            if sums is not None:
                break
            before = self.micro_batch.size
            messages.append(
                f"out of memory with {before} samples per micro-batch; the step was rolled back and is repeated with "
                f"{self.micro_batch.halve()}"
            )
        self.parallel.reduce_gradients()
        totals = self.parallel.total(self.flatten(sums))
        self.apply(totals)
        return StepResult(self.names, totals, self.micro_batch.size, flags, messages)

    def _attempt(self, inputs: StepInputs, requests: Flags) -> tuple[dict[str, Any] | None, Flags]:
        """Compute the micro-batches. If any rank runs out of memory, roll all of them back and return None."""
        self.savepoint.take()
        if self.observation is not None:
            self.observation.discard()  # measured in an earlier attempt or in a trial run
        sums, error, out_of_memory = None, None, False
        try:
            sums = self.accumulate(inputs)
        except Exception as caught:
            out_of_memory = is_out_of_memory(caught)
            if out_of_memory and isinstance(self.parallel, ShardedRanks):
                raise self.shard_out_of_memory() from caught
            # The traceback holds the activations: drop it if the step is to be repeated.
            error = None if out_of_memory else caught
        except BaseException:  # a second Ctrl-C: leave the model between two steps
            self.roll_back()
            raise
        own = requests._replace(out_of_memory=out_of_memory, failed=error is not None)
        flags = self.parallel.agree(own)
        if flags.out_of_memory or flags.failed:
            self.roll_back()
        if error is not None:
            raise error
        if flags.failed:
            raise StepFailed("the step failed on another rank, and was rolled back on this one")
        return (None if flags.out_of_memory else sums), flags

    def shard_out_of_memory(self) -> ShardOutOfMemory:
        """Halve the micro-batch and return the error that ends a sharded run."""
        size = self.micro_batch.halve()
        return ShardOutOfMemory(
            f"rank {self.parallel.rank} ran out of memory in a collective forward, and cannot inform the other ranks "
            f"there. Resume the run: it will continue with {size} samples per micro-batch",
            size,
        )

    def roll_back(self) -> None:
        """Undo the attempt: gradients, buffers, windows, random states."""
        self.optimizer.zero_grad(set_to_none=True)
        release_memory()
        self.savepoint.restore()

    def accumulate(self, inputs: StepInputs) -> dict[str, Any]:
        """Sum losses and gradients over this rank's micro-batches."""
        check_batch(inputs.batch, len(inputs.keys))
        self.optimizer.zero_grad(set_to_none=True)
        pieces = self.micro_batch.pieces(inputs.own_samples)
        unit, size = self.micro_batch.unit, self.micro_batch.size
        empty = max(self.parallel.forward_count(inputs.step_samples, unit=unit, size=size) - len(pieces), 0)
        sums: dict[str, Any] = {}
        with self._shared_weights(len(pieces), empty):
            for k, piece in enumerate(pieces):
                with self.parallel.accumulating(last=k + 1 == len(pieces) + empty):
                    loss = self._backward(inputs, piece)
                for name, value in {"loss": loss.sum, "count": loss.count, **loss.counts}.items():
                    value = value.detach() if isinstance(value, Tensor) else value
                    sums[name] = sums[name] + value if name in sums else value
            for k in range(empty):
                self._empty_pass(inputs, last=k + 1 == empty)
        new = sums.keys() - set(self.names) if self.names else ()
        if new:
            raise ValueError(
                f"the loss counts {', '.join(sorted(new))}, which the first step did not; return the same counts in "
                "each step, zero if there is nothing to count"
            )
        return sums

    def flatten(self, sums: dict[str, Any]) -> Tensor:
        """Return the sums as one vector on the device, ordered by `names`. The first call gathers the names."""
        if not self.names:
            names = ["count", "loss", *sorted(sums.keys() - {"count", "loss"})]
            self.names = max(self.parallel.gather(names), key=len)  # a rank without samples has no names
        vector = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        for i, name in enumerate(self.names):
            vector[i] += sums.get(name, 0)
        return vector

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass, which computes in the half types if the settings say so."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype in HALF)

    def _backward(self, inputs: StepInputs, piece: slice) -> Any:
        part = self.place(tuple(column[piece] for column in inputs.batch))
        with dropout_keys(inputs.keys[piece]):  # for the backward, too, which may recompute
            with self.autocast():
                loss = self.task.loss(self.model, part)
            check_loss(loss)
            self.scaler.scale(loss.sum).backward()
        return loss

    def _empty_pass(self, inputs: StepInputs, *, last: bool) -> None:
        """Join the collectives of the other ranks with a pass that counts for nothing and leaves no trace."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        part = self.place(tuple(column[:1] for column in inputs.batch))
        unseen = contextlib.nullcontext() if self.observation is None else self.observation.paused()
        collective = self.parallel.accumulating(last=last)
        with collective, self.transaction.paused(), unseen, dropout_keys(inputs.keys[:1]), self.autocast():
            (self.task.loss(self.model, part).sum * 0).backward()
        with torch.no_grad():
            foreach_copy_(list(self.model.buffers()), buffers)

    def apply(self, sums: Tensor) -> None:
        """Divide the gradients once and step; the optimizer commits the statistics. `sums` are totals over ranks."""
        gradients = self.parallel.local([p.grad for p in self.parameters if p.grad is not None])
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if gradients:
            count = sums[self.names.index("count")] / self.parallel.world  # reduced gradients are means over ranks
            foreach_div_(gradients, torch.where(count > 0, count, 1.0).to(gradients[0].dtype))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def place(self, part: Any) -> Any:
        """Copy a part of a batch to the device, floating-point tensors in the dtype of the parameters.

        Always a copy: a model may write to its input, and a repeated step must start from the original.
        """
        if isinstance(part, Tensor):
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            dtype = wide if part.is_floating_point() else part.dtype
            images = self.channels_last and part.is_floating_point()  # labels of volumes have four axes, too
            layout = CHANNELS_LAST.get(part.ndim, torch.preserve_format) if images else torch.preserve_format
            return part.to(self.device, dtype, non_blocking=True, copy=True, memory_format=layout)
        if isinstance(part, dict):
            return {key: self.place(value) for key, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):  # a named tuple takes its values one by one
            return type(part)(*map(self.place, part))
        if isinstance(part, (tuple, list)):
            return type(part)(map(self.place, part))
        return part

    @contextlib.contextmanager
    def _shared_weights(self, pieces: int, empty: int) -> Iterator[None]:
        """Compute standardized weights once for all micro-batches of the step."""
        weights = self.weights
        # A single micro-batch gains from it only if one kernel launch computes the weights of all layers.
        if weights is None or not weights.layers or pieces < 1 or (pieces == 1 and not weights.by_kernel):
            yield
            return
        # Gradients are summed over micro-batches in float32; those of a single one are not summed.
        single = pieces + empty == 1 and self.dtype in HALF
        with weights.shared(dtype=self.dtype if single else None):
            yield
