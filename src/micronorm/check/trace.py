"""Record every call of every module of a private copy, by hooks: inputs, outputs, and drawn random numbers."""

import contextlib
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from micronorm.check.compare import Tree, is_finite, pack
from micronorm.check.inputs import named_members
from micronorm.nn.checkpointing import inside_backward

LOSS = "loss"


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
