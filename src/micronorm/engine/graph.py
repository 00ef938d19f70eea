"""The whole step as one CUDA graph: micro-batches, division, optimizer and commit, replayed without Python.

Warm-up and capture take real steps and undo them: parameters, optimizer state, buffers, windows and random states are
restored to the bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from micronorm.commit.snapshot import Snapshot
from micronorm.engine.parallel import NO_FLAGS, Flags
from micronorm.engine.sampling import StepInputs
from micronorm.engine.step import Step, StepResult

WARM_UP = 3  # steps until the allocator, cuDNN's choice of algorithms and the optimizer's lazy state have settled


class GraphedStep:
    """A `Step` that is captured for inputs of `samples` samples and replayed; inputs of other sizes run eagerly.

    The first step of that size also runs eagerly, because it finds the micro-batch that memory holds. The optimizer
    must be SGD(fused=True) or AdamW(fused=True, capturable=True) with the learning rate in a tensor on the device,
    which the schedule fills.
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

    def __call__(self, inputs: StepInputs, requests: Flags = NO_FLAGS) -> StepResult:
        """Take one step, as `Step` does."""
        if inputs.own_samples != self._samples or not self._tried:
            self._tried = self._tried or inputs.own_samples == self._samples
            return self.step(inputs, requests)
        if self._graph is None:
            self._capture(inputs)
        for static, value in zip(self._inputs, [*inputs.batch, inputs.keys], strict=True):
            static.copy_(value, non_blocking=True)
        assert self._graph is not None
        assert self._sums is not None
        self._graph.replay()
        return StepResult(self.step.names, self._sums.clone(), self.step.micro_batch.size, requests)

    def _capture(self, inputs: StepInputs) -> None:
        if not all(isinstance(column, Tensor) for column in inputs.batch):
            raise ValueError("a captured step takes batches of tensors of one size; leave --cuda-graph out")
        step = self.step
        placed = step.place(inputs.batch)
        self._inputs = [*(column.clone() for column in placed), inputs.keys.to(step.device, copy=True)]
        static = StepInputs(tuple(self._inputs[:-1]), self._inputs[-1], inputs.step_samples, inputs.own_samples)
        before = _StepSnapshot(step)
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
        before.restore()  # capturing computes nothing, but moves counters on the host
        # Write constant rates once. The captured commit reads learning rates from the device. Writing them before every
        # replay would cost two launches per layer, which take as long as the whole step of a ResNet-110.
        step.transaction.refresh()
        self._graph = graph

    def _run(self, inputs: StepInputs) -> Tensor:
        sums = self.step.flatten(self.step.accumulate(inputs))
        self.step.apply(sums)
        return sums


class _StepSnapshot(Snapshot):
    """A copy of everything that a step changes: the snapshot of the model, and the optimizer's state."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.model, parameters=True)
        self.optimizer = step.optimizer
        self._kept = {id(tensor): (tensor, tensor.clone()) for tensor in _optimizer_tensors(step.optimizer)}

    @torch.no_grad()
    def restore(self) -> None:
        super().restore()
        for tensor in _optimizer_tensors(self.optimizer):
            # State that the optimizer created meanwhile starts at zero, as momenta, moments and step counters do.
            tensor.copy_(self._kept[id(tensor)][1]) if id(tensor) in self._kept else tensor.zero_()


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state, such as its momentum."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
