"""Run one optimizer step on a private copy of the model, in any cut, and record every call of every module."""

import contextlib
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from micronorm.check.compare import Tree, is_finite, pack
from micronorm.check.inputs import copy_together, named_members, owner_of, read_loss, select, to_float64
from micronorm.commit import attach
from micronorm.commit.snapshot import RandomState
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.checkpointing import inside_backward
from micronorm.ops.private_api import TorchDispatchMode

LOSS = "loss"
Cut = Sequence[Sequence[int]]
"""The sample indices of each part."""

_RATE = 0.1  # replaces rate="lr", because no optimizer runs here; any rate shows whether two windows differ


# --- the record of one forward ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One call of a module, or of the loss function at the root.

    `index` counts the calls of one module in one part. `before` and `after` are fingerprints of the random states.
    """

    name: str
    type: str
    index: int = 0
    inputs: Tree = None
    output: Tree = None
    children: list["Call"] = field(default_factory=list)
    before: int = 0
    after: int = 0
    ended: bool = False

    @property
    def draws(self) -> bool:
        """Return whether the call's own code, without its children, drew random numbers."""
        inner = [state for child in self.children for state in (child.before, child.after)]
        states = [self.before, *inner, self.after]
        return any(a != b for a, b in zip(states[::2], states[1::2], strict=True))


@dataclass(eq=False)
class Trace:
    """The calls of one part, as a tree and by module. `open` lists the running calls, also after an exception."""

    samples: int
    root: Call
    by_name: dict[str, list[Call]] = field(default_factory=dict)
    open: list[Call] = field(default_factory=list)

    def calls(self, name: str) -> list[Call]:
        """Return the calls of one module, or the call of the loss if no module has its name."""
        return self.by_name.get(name, [self.root] if name == LOSS else [])

    def first_not_finite(self) -> Call | None:
        """Return the first, innermost call with finite inputs and an output that is not finite."""

        def search(call: Call) -> Call | None:
            for child in call.children:
                if is_finite(child.inputs) and not is_finite(child.output):
                    return search(child) or child
            return None

        return search(self.root)


class Tracer:
    """Record all calls of a private copy by hooks. Forwards that a backward pass recomputes are not recorded."""

    def __init__(self, model: nn.Module, loss: Any, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.names = named_members(model, loss)
        self.traces: list[Trace] = []
        self.coarsest = torch.finfo(torch.float64).eps  # of all dtypes that modules computed in
        self._packed: dict[int, tuple[weakref.ref, int, Tree]] = {}
        self._hooks = [
            hook
            for module in self.names
            for hook in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            )
        ]

    def close(self) -> None:
        """Remove the hooks. Their reference cycle would keep the copy in memory until the next garbage collection."""
        for hook in self._hooks:
            hook.remove()
        self.names = {}

    @contextlib.contextmanager
    def part(self, samples: int) -> Iterator[Trace]:
        """Record one evaluation of the loss."""
        trace = Trace(samples, Call(LOSS, "loss function", before=_random_fingerprint(self.devices)))
        trace.open.append(trace.root)
        self.traces.append(trace)
        yield trace
        trace.root.after = _random_fingerprint(self.devices)
        trace.open.clear()
        self._packed.clear()

    def note_dtype(self, tensor: Tensor) -> None:
        """Remember the coarsest dtype, which limits how closely two runs can agree."""
        if tensor.is_floating_point() or tensor.is_complex():
            self.coarsest = max(self.coarsest, torch.finfo(tensor.dtype).eps)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if inside_backward() or not self.traces or not self.traces[-1].open:
            return
        trace = self.traces[-1]
        calls = trace.by_name.setdefault(self.names[module], [])
        inputs = self._pack([*args, kwargs])
        call = Call(self.names[module], type(module).__name__, len(calls), inputs)
        calls.append(call)
        trace.open[-1].children.append(call)
        trace.open.append(call)
        call.before = call.after = _random_fingerprint(self.devices)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if inside_backward() or not self.traces:
            return
        trace = self.traces[-1]
        name = self.names[module]
        depth = next((i for i in reversed(range(len(trace.open))) if trace.open[i].name == name), 0)
        if depth:  # calls above `depth` ended in an exception that the model caught
            call = trace.open[depth]
            call.ended = True
            call.after = _random_fingerprint(self.devices)
            call.output = self._pack(output)
            del trace.open[depth:]

    def _pack(self, value: Any) -> Tree:
        """Pack tensors, each once: the output of one module is the input of the next."""
        if isinstance(value, (list, tuple)):
            return [self._pack(v) for v in value]
        if not isinstance(value, Tensor):
            return pack(value)
        self.note_dtype(value)
        known = self._packed.get(id(value))
        if known is not None and known[0]() is value and known[1] == value._version:
            return known[2]
        tree = pack(value)
        self._packed[id(value)] = (weakref.ref(value), value._version, tree)
        return tree


def _random_fingerprint(devices: Sequence[torch.device]) -> int:
    """Return a number that changes when code draws from one of the global generators."""
    states = [torch.get_rng_state()] + [torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"]
    _, keys, position, *_ = np.random.get_state()
    return hash((*(s.numpy().tobytes() for s in states), random.getstate(), np.asarray(keys).tobytes(), position))


# --- the step --------------------------------------------------------------------------------------------------------


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
    """A model, its batch in float64 and its loss. Each run starts from the same state."""

    def __init__(self, model: nn.Module, batch: tuple, loss: Callable) -> None:
        self.model, self.loss = model, loss
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
        evaluating: str | None = None,
    ) -> Run:
        """Run a step.

        Args:
            cut: the sample indices of each part.
            seed: for all random generators, set once before the first part.
            backward: compute gradients and commit. Otherwise record only the calls and the loss.
            fresh: use a new copy of the model for each part.
            perturbed: move every parameter by one unit in the last place, and record every dtype.
            evaluating: the name of a module to put in eval mode.
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
                if evaluating is not None:
                    (model if evaluating == "model" else model.get_submodule(evaluating)).eval()
                _seed_own_generators(model, seed)
                with _Dtypes(run) if perturbed else contextlib.nullcontext():
                    self._run_parts(run, model, loss, parts, backward=backward)
        return run

    def _run_parts(self, run: Run, model: nn.Module, loss: Callable, parts: Cut, *, backward: bool) -> None:
        handle = _attach(nn.ModuleList(m for m in (model, owner_of(loss)) if m is not None))
        tracer = Tracer(model, loss, self.devices)
        try:
            for indices in parts:
                with tracer.part(len(indices)):
                    total, count = read_loss(loss(model, select(self.batch, indices)))
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
        if handle is not None:
            handle.commit()
        if run.count == 0:
            raise ValueError("the counts of a step must not add up to 0, the loss returned 0 for every part")
        _collect(run, model, loss)


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


def _attach(holder: nn.Module) -> Any:
    layers = [m for m in holder.modules() if isinstance(m, BatchChannelNorm)]
    for layer in layers:
        if layer.rate == "lr":
            layer.rate = _RATE
    # Without merging: the ranks of a job do not all run the check at the same time.
    return attach(holder, process_group=None, max_forwards=2**31) if layers else None


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        p = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        up = torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p.device) < 0.5
        moved = torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p.dtype))
        p.copy_(torch.where(p == 0, p, moved))  # a zero has no rounding error, and 5e-324 would break ties
