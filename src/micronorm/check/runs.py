"""Run one optimizer step on a private copy of the model, in any cut, and keep its gradients, buffers and calls."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.check.inputs import copy_together, named_members, owner_of, read_loss, select, to_float64
from micronorm.check.trace import Trace, Tracer
from micronorm.commit import Handle
from micronorm.commit.snapshot import RandomState
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.private_api import TorchDispatchMode

Cut = Sequence[Sequence[int]]
"""The sample indices of each part."""

_RATE = 0.1  # replaces rate="lr", because no optimizer runs here; any rate shows whether two windows differ
_FORWARDS = 10  # the work of a check in forward passes: three steps, and a repetition with another seed
_LONG = 120.0  # seconds


@dataclass(eq=False)
class Run:
    """The results of one step. `error` is the exception that ended the run, if a part raised one.

    `aliased` holds pairs of parameters whose gradients share memory.
    """

    cut: Cut
    traces: list[Trace] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    counts: list[float | None] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliased: dict[str, str] = field(default_factory=dict)
    coarsest: float = 0.0
    error: Exception | None = None

    @property
    def sizes(self) -> list[int]:
        """Return the number of samples of each part."""
        return [len(part) for part in self.cut]

    @property
    def count(self) -> float:
        """Return the divisor of the step: the sum of the parts' counts, or the number of samples."""
        return sum(n if c is None else c for n, c in zip(self.sizes, self.counts, strict=True))


class Experiment:
    """A model, its batch in float64 and its loss. Each run starts from the same state. `modules` has all by name."""

    def __init__(self, model: nn.Module, batch: tuple, loss: Callable) -> None:
        self.model, self.loss = model, loss
        self.modules = {name: module for module, name in named_members(model, loss).items()}
        self.batch = to_float64(batch)
        tensors = [*model.parameters(), *model.buffers(), *(t for t in batch if isinstance(t, Tensor))]
        self.devices = list({t.device for t in tensors})
        self.runs = 0

    def run(
        self,
        cut: Cut,
        *,
        seed: int = 0,
        backward: bool = True,
        fresh: bool = False,
        perturbed: bool = False,
    ) -> Run:
        """Run a step.

        Args:
            cut: the sample indices of each part.
            seed: for all random generators, set once before the first part.
            backward: compute gradients and commit. Otherwise record only the calls and the loss.
            fresh: use a new copy of the model for each part.
            perturbed: move every parameter by one unit in the last place, and record every dtype.
        """
        run = Run(cut)
        self.runs += 1
        with _isolated(self.devices), warnings.catch_warnings():
            if self.runs > 1:
                warnings.simplefilter("ignore")  # the first run has already shown them
            for device in self.devices:
                RandomState.seed(seed, device)
            for parts in [[p] for p in cut] if fresh else [cut]:
                model, loss = copy_together(self.model, self.loss)
                if perturbed:
                    _perturb(model)
                _seed_own_generators(model, seed)
                with _Dtypes(run) if perturbed else contextlib.nullcontext():
                    self._run_parts(run, model, loss, parts, backward=backward)
        return run

    def _run_parts(self, run: Run, model: nn.Module, loss: Callable, parts: Cut, *, backward: bool) -> None:
        handle = _attach(nn.ModuleList(m for m in (model, owner_of(loss)) if m is not None))
        tracer = Tracer(model, loss, self.devices)
        try:
            for indices in parts:
                started = time.perf_counter()
                with tracer.part(len(indices)):
                    total, count = read_loss(loss(model, select(self.batch, indices)))
                if self.runs == 1:
                    _warn_if_long(_FORWARDS * (time.perf_counter() - started))
                tracer.note_dtype(total)
                run.sums.append(total.item())
                run.counts.append(count)
                if backward:
                    total.backward()
        except Exception as error:
            run.error = error
        tracer.close()
        run.traces += tracer.traces
        run.coarsest = max(run.coarsest, tracer.coarsest)
        if not backward or run.error is not None:
            return
        handle.commit()
        if run.count == 0:
            raise ValueError("the counts of a step must not add up to 0, the loss returned 0 for every part")
        _collect(run, model, loss)


def _warn_if_long(seconds: float) -> None:
    if seconds > _LONG:
        warnings.warn(
            f"check_cuts will take about {seconds / 60:.0f} minutes: it runs several steps in float64. A batch of two "
            "or three samples, or smaller images, gives the same answer sooner",
            stacklevel=2,
        )


@contextlib.contextmanager
def _isolated(devices: Sequence[torch.device]) -> Iterator[None]:
    """Compute in float64 with gradients and without autocast; restore random states and modes when the block ends."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(RandomState.preserved(devices))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)  # torch.zeros(n) inside a forward must match the float64 weights
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in {"cpu", *(device.type for device in devices)}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


class _Dtypes(TorchDispatchMode):
    """Record the coarsest floating-point dtype of all operations, also of those between modules."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.run.coarsest = max(self.run.coarsest, torch.finfo(t.dtype).eps)
        return out


def _seed_own_generators(model: nn.Module, seed: int) -> None:
    """Seed the generators that modules hold as attributes."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                value.manual_seed(value.initial_seed() + seed)


def _collect(run: Run, model: nn.Module, loss: Callable) -> None:
    """Store the gradients and buffers of the model, and of a loss that is a module, each once."""
    seen: set[int] = set()
    memory: dict[int, str] = {}
    for prefix, owner in (("", model), ("loss.", owner_of(loss))):
        for name, p in owner.named_parameters() if owner is not None else ():
            if p.grad is not None and id(p) not in seen:
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                run.gradients[prefix + name] = grad / run.count
                other = memory.setdefault(grad.data_ptr(), prefix + name)
                if other != prefix + name and grad.numel():
                    run.aliased |= {prefix + name: other, other: prefix + name}
            if not p.requires_grad and id(p) not in seen:  # a forward may have written to it, as to a buffer
                run.buffers[prefix + name] = p.detach().clone()
            seen.add(id(p))
        for name, b in owner.named_buffers() if owner is not None else ():
            if id(b) not in seen:
                run.buffers[prefix + name] = b.detach().clone()
            seen.add(id(b))
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type != "meta" and not value.requires_grad:
                run.buffers[f"{name}.{attribute}" if name else attribute] = value.detach().clone()


def _attach(holder: nn.Module) -> Handle:
    for layer in holder.modules():
        if isinstance(layer, BatchChannelNorm) and layer.rate == "lr":
            layer.rate = _RATE
    # Without merging: the ranks of a job do not all run the check at the same time.
    return Handle(holder, process_group=None, max_forwards=2**31)


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        p = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        up = torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p.device) < 0.5
        moved = torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p.dtype))
        p.copy_(torch.where(p == 0, p, moved))  # a zero has no rounding error, and 5e-324 would break ties
