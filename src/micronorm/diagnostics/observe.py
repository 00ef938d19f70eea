"""`mn.observe`: a look into a network while it trains, every so many optimizer steps.

Hooks are in place for the steps that are looked at and no others. A hook that returns at once still costs 1.2 µs, since
a module with hooks is called the slow way: for the 43 layers of a ResNet-20 2.6 ms in fifty steps of one forward each,
and as many times that as there are micro-batches. To put hooks there and take them away again costs 0.6 ms, once.
Between looks two hooks on optimizers' steps are left, 2 µs a step.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from micronorm.convert.surgery import refuse_wrappers
from micronorm.diagnostics.hooks import Look, Taken, whole_weights
from micronorm.diagnostics.norms import read_norm
from micronorm.ops.private_api import disable_dynamo

Row = dict[str, Any]

# A histogram costs ten times what a scalar does, and looks like the one before it: every so many looks give some.
_DRAWN = 10
_BINS = 32

_REFUSED = {
    "DataParallel": "its replicas run in threads of their own; use DistributedDataParallel",
    "OptimizedModule": "compiled code runs no hooks; observe the model without torch.compile, for a while",
}


class Writer(Protocol):
    """What is needed of torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write a number."""
        ...

    def add_histogram(self, tag: str, values: Any, global_step: int, bins: Any) -> object:
        """Write a histogram of a tensor."""
        ...


def observe(
    model: nn.Module,
    *,
    every: int = 50,
    writer: Writer | None = None,
    sink: Callable[[Row], object] | None = None,
    start: int = 0,
) -> "Watch":
    """Look into a network every so many optimizer steps of any training loop.

    A look covers one whole step, all its micro-batches, and gives of each norm layer StatDiff, the distance of its
    normalized channels to BN, the share of positive outputs and the channels that are dead or rare; of each convolution
    and linear layer the shares of its gradient that Weight Standardization takes (for a plain weight, would take), the
    norm of the weight and that of its gradient. The figures are those of `micronorm.records`, and up to rounding they
    do not depend on how the step was cut into micro-batches, where the norms themselves do not. A run with an observer
    computes what it computes without, to the bit: parameters, gradients, statistics, random numbers.

    Steps 1, 1 + every, 1 + 2·every, … are looked at. A step is counted when a torch.optim optimizer that holds
    parameters of the model steps (of several the first one counts), or by `watch.step()`. Forwards count where the
    model is in training mode, so evaluation may take place within. Code that was compiled or captured in a CUDA graph
    runs no hooks: a compiled model is refused, and a step in which nothing was seen warns once. Gradients that
    `torch.autograd.grad` sends through a standardized weight within the step count as those of `backward` do. Under
    DistributedDataParallel every rank sees its own samples, and rank 0 writes.

    Args:
        model: the network, also in DistributedDataParallel.
        every: steps from one look to the next.
        writer: such as torch.utils.tensorboard.SummaryWriter: gets the figures as scalars, and of every tenth look
            histograms of weights (1,024 of a layer's, or all) and of the channels' means before normalization.
        sink: is called with each row; the rows are then not kept.
        start: steps that were done before, in a run that is resumed.

    Returns:
        A context manager: `with mn.observe(model) as watch:`. `watch.rows` are the looks so far, `watch.latest` is the
        last; `watch.epoch` is written into them, and yours to set.

    Raises:
        ValueError: `every` or `start` is out of range, the model has no layer to look at, or is compiled.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
        >>> x = torch.randn(4, 3, 8, 8)
        >>> _ = model(x)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with observe(model, every=2) as watch:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        >>> [row["step"] for row in watch.rows], sorted(watch.latest["layers"])
        ([1, 3], ['0', '1', '4'])
        >>> watch.latest["layers"]["1"]["groups"]
        4
    """
    for name, value, least in (("every", every, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is a number of steps, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    refuse_wrappers(model, _REFUSED)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    if compiled:
        where = "the model was" if compiled[0] == "" else f"{len(compiled)} modules were, the first is {compiled[0]!r};"
        raise ValueError(f"compiled code runs no hooks, and {where} compiled; observe it without, for a while")
    return Watch(model, every=every, writer=writer, sink=sink, start=start)


class Watch:
    """What `mn.observe` returns: looks at the model while its `with` block lasts."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        writer: Writer | None,
        sink: Callable[[Row], object] | None,
        start: int,
    ) -> None:
        wrapped = any(base.__name__ == "DistributedDataParallel" for base in type(model).__mro__)
        self.model: nn.Module = model.module if wrapped else model  # type: ignore[assignment]
        self.every = every
        self._steps = start
        self._skips: Tensor | None = None  # steps that were counted and may not have been taken, on the device
        self.epoch = 0
        self.rows: list[Row] = []
        self.latest: Row | None = None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._writer = None if distributed and torch.distributed.get_rank() else writer
        self._sink = sink
        self._look: Look | None = None
        self._taken: Taken | None = None
        self._paused = 0
        self._warned = False
        self._hooks: list[Any] = []
        self._counting: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._parameters: set[int] = set()
        if not any(read_norm(module) for module in self.model.modules()) and not whole_weights(self.model):
            raise ValueError(f"{type(self.model).__name__} has neither norm layers nor weights to look at")

    # --- the block -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._hooks:
            raise RuntimeError("this observer is at work already; call mn.observe again for another")

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._before_step(optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._after_step(optimizer)

        # As the commit's hooks: a compiled optimizer step leaves the graph for them. That wants plain functions.
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
        self._hooks, self._taken = [], None
        self._end_look()

    @property
    def steps(self) -> int:
        """The steps so far. Under a GradScaler with a fused optimizer this waits for the device."""
        self._settle()
        return self._steps

    def step(self) -> None:
        """Count a step where no torch.optim optimizer does: after its last backward, before the weights move.

        Raises:
            RuntimeError: an optimizer counts the steps already, or the block is not open.
        """
        if not self._hooks:
            raise RuntimeError("watch.step() belongs into the `with` block of its observer")
        if self._counting is not None and self._counting() is not None:
            raise RuntimeError("a torch.optim optimizer steps the model and is counted; leave watch.step() out")
        self._take(scale=None, weights=True)
        self._advance()

    def discard(self) -> None:
        """Forget what was seen of the present step, such as where it is done again from its beginning."""
        if self._look is not None:
            self._look.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards within this block are not looked at."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    # --- steps ---------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._look is not None and self._counts(optimizer) and self._look.has_seen:
            # Now: the step moves the weights that the gradients belong to. A fused one takes the loss scale off itself.
            self._take(scale=getattr(optimizer, "grad_scale", None), weights=True)

    def _after_step(self, optimizer: Optimizer) -> None:
        if not self._counts(optimizer):
            if self._holds(optimizer):
                self._others.add(optimizer)
            return
        if self._look is not None and (self._taken is None or self._look.forwards > self._taken.forwards):
            # Forwards within the step, as LBFGS and closures have them: the weights have moved since.
            self._take(scale=None, weights=False)
        skipped = _skipped(optimizer)
        if skipped is None:
            self._advance()
        elif self._look is not None:  # to read what was seen waits for the device too
            if skipped.any():
                self._taken = None
                self._look.clear_gradients()
            else:
                self._advance()
        else:
            self._skips = skipped if self._skips is None else self._skips + skipped
            self._advance()

    def _settle(self) -> None:
        """Take back the steps that were counted and skipped."""
        if self._skips is not None:
            self._steps -= int(self._skips)
            self._skips = None

    def _counts(self, optimizer: Optimizer) -> bool:
        """Whether this one's steps are the model's: the first seen, until another steps twice while it does not."""
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
        taken, self._taken = self._taken, None
        if taken is not None:
            self._emit(taken)
        self._end_look()
        self._prepare()

    def _prepare(self) -> None:
        """Put hooks in place if the coming step is to be looked at."""
        due = self._steps % self.every == 0
        if due:
            self._settle()
            due = self._steps % self.every == 0
        if due or not self._parameters:
            self._parameters = {id(parameter) for parameter in self.model.parameters()}
        if due:
            self._look = Look(self.model, is_open=lambda: not self._paused and self.model.training)

    def _end_look(self) -> None:
        if self._look is not None:
            self._look.close()
            self._look = None

    # --- looks ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _take(self, *, scale: Tensor | None, weights: bool) -> None:
        """Gather what was seen of this step on the devices; nothing waits for them."""
        look = self._look
        if look is None:
            return
        if look.has_seen:
            draws = self._writer is not None and self.steps // self.every % _DRAWN == 0
            self._taken = Taken(look, scale=scale, weights=weights, draws=draws)
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"mn.observe saw no forward of the model in step {self.steps + 1}: code that was compiled or captured "
                "in a CUDA graph runs no hooks, and forwards in eval mode do not count. This is said once.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _emit(self, taken: Taken) -> None:
        figures, pictures = taken.read()
        row: Row = {"step": self.steps, "epoch": self.epoch, "layers": figures}
        self.latest = row
        if self._sink is None:
            self.rows.append(row)
        else:
            self._sink(row)
        if self._writer is not None:
            _write(self._writer, self.steps, figures, pictures)


def _skipped(optimizer: Optimizer) -> Tensor | None:
    """1 where the step that an optimizer has just made was none, on the device; None where that cannot be.

    A fused optimizer under a GradScaler is called in any case, and leaves the parameters alone by itself.
    """
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, Tensor) or (found.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return (found.detach() > 0).int()


def _write(writer: Writer, step: int, layers: Mapping[str, Row], pictures: Mapping[str, Tensor]) -> None:
    for name, row in layers.items():
        prefix = "" if row["kind"] == "norm" else "weight_"
        for figure, value in row.items():
            if isinstance(value, float) or figure in ("dead", "rare"):
                writer.add_scalar(f"{prefix}{figure}/{name}", value, step)
    for name, values in pictures.items():
        if values.isfinite().all():  # numpy refuses to draw others
            writer.add_histogram(name, values, step, bins=_BINS)
