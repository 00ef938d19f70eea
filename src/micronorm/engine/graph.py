"""The whole step as one CUDA graph: micro-batches, division, optimizer and commit, replayed without Python.

Warm-up and capture need real steps. They are taken on the side and undone: parameters, optimizer state, buffers,
windows and random states end where they began, to the bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from micronorm.engine.parallel import NO_WISHES, Wishes
from micronorm.engine.step import Portion, Step, StepResult

WARM_UP = 3  # allocator, cuDNN's choice of algorithms and the optimizer's lazy state settle


class GraphedStep:
    """A `Step` that replays itself for portions of `samples` samples, and computes others as they come.

    The first of that size is computed as it comes too: it finds the micro-batch that memory holds. The optimizer must
    be SGD(fused=True) or AdamW(fused=True, capturable=True) with the learning rate in a tensor on the device, which the
    schedule fills.
    """

    def __init__(self, step: Step, samples: int) -> None:
        if step.device.type != "cuda":
            raise ValueError(
                f"a CUDA graph needs a CUDA device, this run computes on {step.device}; leave --cuda-graph out"
            )
        if step.parallel.world > 1:
            raise ValueError(
                f"a captured step is for one rank, this run has {step.parallel.world}; leave --cuda-graph out"
            )
        if step.scaler.is_enabled():
            raise ValueError("a captured step cannot skip, as float16's loss scaling must; use --dtype bfloat16")
        self.step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._sums: Tensor | None = None
        self._samples = samples
        self._tried = False

    def __call__(self, portion: Portion, wishes: Wishes = NO_WISHES) -> StepResult:
        """As `Step`."""
        if portion.counted != self._samples or not self._tried:
            self._tried = self._tried or portion.counted == self._samples
            return self.step(portion, wishes)
        if self._graph is None:
            self._capture(portion)
        for static, value in zip(self._inputs, [*portion.batch, portion.keys], strict=True):
            static.copy_(value, non_blocking=True)
        assert self._graph is not None
        assert self._sums is not None
        self._graph.replay()
        return StepResult(self.step.names, self._sums.clone(), self.step.micro_batch.size, wishes)

    def _capture(self, portion: Portion) -> None:
        if not all(isinstance(column, Tensor) for column in portion.batch):
            raise ValueError("a captured step takes batches of tensors of one size; leave --cuda-graph out")
        step = self.step
        placed = step.place(portion.batch)
        self._inputs = [*(column.clone() for column in placed), portion.keys.to(step.device, copy=True)]
        static = Portion(tuple(self._inputs[:-1]), self._inputs[-1], portion.samples, portion.counted)
        before = _Whole(step)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run(static)
        torch.cuda.current_stream().wait_stream(stream)
        before.restore()
        step.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._sums = self._run(static)
        before.restore()  # capturing computes nothing, but counts on the host
        # Rates that are constants. Learning rates lie on the device, where the captured commit reads them: writing them
        # before every replay would cost two launches per layer, as long as the whole step of a ResNet-110.
        step.transaction.refresh()
        self._graph = graph

    def _run(self, portion: Portion) -> Tensor:
        sums = self.step.flatten(self.step.accumulate(portion))
        self.step.apply(sums)
        return sums


class _Whole:
    """Everything a step changes, copied."""

    def __init__(self, step: Step) -> None:
        self.step = step
        step.savepoint.take()
        self.tensors: list[Tensor] = [*step.model.parameters(), *_optimizer_tensors(step.optimizer)]
        self.copies = [tensor.detach().clone() for tensor in self.tensors]

    @torch.no_grad()
    def restore(self) -> None:
        known = {id(tensor): copy for tensor, copy in zip(self.tensors, self.copies, strict=True)}
        now: list[Any] = [*self.step.model.parameters(), *_optimizer_tensors(self.step.optimizer)]
        for tensor in now:
            # State that the optimizer made meanwhile begins at zero: momenta, moments and step counters do.
            tensor.copy_(known[id(tensor)]) if id(tensor) in known else tensor.zero_()
        self.step.savepoint.restore()


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state, such as its momentum."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
