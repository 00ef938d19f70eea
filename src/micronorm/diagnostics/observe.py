"""`mn.observe`: record statistics of a network while it trains, at every Nth optimizer step.

Only observed steps have hooks on modules. A hook that returns at once costs 1.2 µs, since torch calls a module with
hooks by a slower path. For the 43 layers of a ResNet-20 that is 2.6 ms in fifty steps, times the number of
micro-batches. Adding and removing the hooks costs 0.6 ms once. Between observed steps two optimizer hooks remain, which
cost 2 µs per step.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from micronorm.convert.surgery import refuse_wrappers
from micronorm.diagnostics.norms import as_norm_layer, refuse_compiled
from micronorm.diagnostics.step_stats import Row, StepRecorder, observable_weights
from micronorm.ops.private_api import disable_dynamo

_REFUSED = {
    "DataParallel": "its replicas run in other threads; use DistributedDataParallel",
    "OptimizedModule": "compiled code does not run hooks; observe the model for a while without torch.compile",
}


def observe(
    model: nn.Module,
    *,
    every: int = 50,
    writer: Any = None,
    sink: Callable[[Row], object] | None = None,
    start: int = 0,
) -> "StepObserver":
    """Record statistics of a network at every Nth optimizer step, in any training loop.

    For each norm layer: StatDiff, the distance of its normalized channels to BN, the share of positive outputs, and the
    number of dead and rare channels. For each convolution and linear layer: the shares of its gradient that Weight
    Standardization removes (or would remove), and the norms of weight and gradient. `micronorm.records` describes the
    rows. A row covers all micro-batches of one step and does not depend on how the step was cut, if the norms do not.
    Observation changes no parameter, gradient, running statistic or random number.

    Steps 1, 1 + every, 1 + 2·every, … are observed. A step ends when a torch.optim optimizer that holds parameters of
    the model steps (with several optimizers, the first one counts), or with `observer.step()`. Only forwards in
    training mode count. Compiled code and CUDA graphs do not run hooks: a compiled model raises an error, and a step
    without any forward warns once. Under DistributedDataParallel each rank observes its own samples, and rank 0 writes.

    Args:
        model: the network, plain or in DistributedDataParallel.
        every: the number of steps between two observed steps.
        writer: a torch.utils.tensorboard.SummaryWriter, or another object with its `add_scalar`.
        sink: called with each row. Rows are then not kept.
        start: the number of steps done before, for a resumed run.

    Returns:
        A context manager: `with mn.observe(model) as observer:`. `observer.rows` holds the rows so far and
        `observer.latest` the last one. Set `observer.epoch` to write it into the rows.

    Raises:
        ValueError: `every` or `start` is out of range, or the model is compiled or has no layer to observe.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
        >>> x = torch.randn(4, 3, 8, 8)
        >>> _ = model(x)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with observe(model, every=2) as observer:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        >>> [row["step"] for row in observer.rows], sorted(observer.latest["layers"])
        ([1, 3], ['0', '1', '4'])
        >>> observer.latest["layers"]["1"]["groups"]
        4
    """
    for name, value, least in (("every", every, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a number of steps, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    refuse_wrappers(model, _REFUSED)
    refuse_compiled(model)
    return StepObserver(model, every, writer, sink, start)


class StepObserver:
    """The context manager that `mn.observe` returns. It observes the model inside its `with` block."""

    def __init__(
        self, model: nn.Module, every: int, writer: Any, sink: Callable[[Row], object] | None, start: int
    ) -> None:
        wrapped = any(base.__name__ == "DistributedDataParallel" for base in type(model).__mro__)
        self.model: nn.Module = model.module if wrapped else model  # type: ignore[assignment]
        self.every = every
        self._steps = start
        self._skips: Tensor | None = None  # on the device: counted steps that the optimizer may have skipped
        self.epoch = 0
        self.rows: list[Row] = []
        self.latest: Row | None = None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._writer = None if distributed and torch.distributed.get_rank() else writer
        self._sink = sink
        self._recorder: StepRecorder | None = None
        self._paused = 0
        self._warned = False
        self._hooks: list[Any] = []
        self._counting: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._parameters: set[int] = set()
        if not any(as_norm_layer(module) for module in self.model.modules()) and not observable_weights(self.model):
            raise ValueError(f"{type(self.model).__name__} has neither norm layers nor weights to observe")

    # --- the block -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._hooks:
            raise RuntimeError("this observer is already in use; call mn.observe again for another one")

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._before_step(optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._after_step(optimizer)

        # A compiled optimizer step leaves its graph for these hooks, which must be plain functions.
        self._hooks = [
            register_optimizer_step_pre_hook(disable_dynamo(before)),
            register_optimizer_step_post_hook(disable_dynamo(after)),
        ]
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._close_recorder()

    @property
    def steps(self) -> int:
        """Return the number of steps so far. With a GradScaler and a fused optimizer this waits for the device."""
        self._subtract_skipped()
        return self._steps

    def step(self) -> None:
        """Count a step in a loop without a torch.optim optimizer. Call it after the last backward pass of the step.

        Raises:
            RuntimeError: an optimizer counts the steps already, or the `with` block is not open.
        """
        if not self._hooks:
            raise RuntimeError("call step() inside the `with` block of its observer")
        if self._counting is not None and self._counting() is not None:
            raise RuntimeError("a torch.optim optimizer steps the model and counts the steps; do not call step()")
        self._compute(scale=None, weights=True)
        self._advance()

    def discard(self) -> None:
        """Forget the present step so far, for example before it is repeated."""
        if self._recorder is not None:
            self._recorder.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the forwards in this block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    # --- steps ---------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._recorder is not None and self._counts(optimizer) and self._recorder.forwards:
            # Before the step changes the weights. A fused optimizer removes the loss scale itself.
            self._compute(scale=getattr(optimizer, "grad_scale", None), weights=True)

    def _after_step(self, optimizer: Optimizer) -> None:
        if not self._counts(optimizer):
            if self._holds(optimizer):
                self._others.add(optimizer)
            return
        recorder = self._recorder
        if recorder is not None and (not recorder.computed or recorder.forwards > recorder.computed):
            # LBFGS and closures run forwards inside the step, and the weights have changed since.
            self._compute(scale=None, weights=False)
        skipped = _skipped(optimizer)
        if skipped is None:
            self._advance()
        elif recorder is not None:  # reading the statistics waits for the device as well
            if skipped.any():
                recorder.clear_gradients()
            else:
                self._advance()
        else:
            self._skips = skipped if self._skips is None else self._skips + skipped
            self._advance()

    def _subtract_skipped(self) -> None:
        if self._skips is not None:
            self._steps -= int(self._skips)
            self._skips = None

    def _counts(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer counts the steps: the first one, until another steps twice without it."""
        counting = None if self._counting is None else self._counting()
        if counting is optimizer:
            return True
        if not self._holds(optimizer) or (counting is not None and optimizer not in self._others):
            return False
        self._counting = weakref.ref(optimizer)
        return True

    def _holds(self, optimizer: Optimizer) -> bool:
        ids = self._parameters
        return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])

    def _advance(self) -> None:
        self._steps += 1
        self._others.clear()
        if self._recorder is not None and self._recorder.computed:
            self._emit(self._recorder.read())
        self._close_recorder()
        self._prepare()

    def _prepare(self) -> None:
        """Add hooks if the next step is to be observed."""
        due = self._steps % self.every == 0
        if due:
            self._subtract_skipped()
            due = self._steps % self.every == 0
        if due or not self._parameters:
            self._parameters = {id(parameter) for parameter in self.model.parameters()}
        if due:
            self._recorder = StepRecorder(self.model, is_active=lambda: not self._paused and self.model.training)

    def _close_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # --- rows ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _compute(self, *, scale: Tensor | None, weights: bool) -> None:
        """Compute the statistics of this step on the devices, without waiting for them."""
        recorder = self._recorder
        if recorder is None:
            return
        if recorder.forwards:
            recorder.compute(scale=scale, weights=weights)
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"mn.observe saw no forward of the model in step {self.steps + 1}: compiled code and CUDA graphs do "
                "not run hooks, and forwards in eval mode do not count. This warning appears once.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _emit(self, layers: dict[str, Row]) -> None:
        row: Row = {"step": self.steps, "epoch": self.epoch, "layers": layers}
        self.latest = row
        if self._sink is None:
            self.rows.append(row)
        else:
            self._sink(row)
        if self._writer is not None:
            _write(self._writer, self.steps, layers)


def _skipped(optimizer: Optimizer) -> Tensor | None:
    """Return 1, on the device, if the optimizer skipped its last step, else 0. Return None if it cannot skip.

    Under a GradScaler, a fused optimizer is always called and skips the step on the device.
    """
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, Tensor) or (found.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return (found.detach() > 0).int()


def _write(writer: Any, step: int, layers: Mapping[str, Row]) -> None:
    for name, row in layers.items():
        prefix = "" if row["kind"] == "norm" else "weight_"
        for figure, value in row.items():
            if isinstance(value, float) or figure in ("dead", "rare"):
                writer.add_scalar(f"{prefix}{figure}/{name}", value, step)
