"""Which module was called with what and gave what: the tree of calls of one evaluation of the loss."""

import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from micronorm.check.digest import Leaf, Tree, pack
from micronorm.check.inputs import named_members
from micronorm.nn.checkpointing import inside_backward

LOSS = "loss"


@dataclass(eq=False)
class Call:
    """One call of a module; of the loss function at the root. `index` counts the calls of one module in one part."""

    name: str
    type: str
    index: int = 0
    inputs: Tree = None
    output: Tree = None
    children: list["Call"] = field(default_factory=list)
    before: int = 0
    after: int = 0
    """Fingerprints of the random states when the call began and ended."""
    ended: bool = False

    @property
    def draws(self) -> bool:
        """Whether the call's own code, that of its children left out, drew random numbers."""
        inner = [state for child in self.children for state in (child.before, child.after)]
        states = [self.before, *inner, self.after]
        return any(a != b for a, b in zip(states[::2], states[1::2], strict=True))


@dataclass(eq=False)
class Trace:
    """The calls of one part, as a tree and by module."""

    samples: int
    root: Call
    by_name: dict[str, list[Call]] = field(default_factory=dict)
    open: list[Call] = field(default_factory=list)
    """The calls now running; after an exception, those it came out of."""

    def calls(self, name: str) -> list[Call]:
        """The calls of one module; of the loss itself by its own name, unless a module has taken that."""
        return self.by_name.get(name, [self.root] if name == LOSS else [])


class Tracer:
    """Hooks on every module of a private copy. Recomputed forwards are not recorded: they repeat what was."""

    def __init__(self, model: nn.Module, loss: Any, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.names = named_members(model, loss)
        self.traces: list[Trace] = []
        self.coarsest = torch.finfo(torch.float64).eps
        """Of the dtypes that modules computed in."""
        self._digests: dict[int, tuple[weakref.ref, int, Tree]] = {}
        self._hooks = [
            hook
            for module in self.names
            for hook in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            )
        ]

    def close(self) -> None:
        """Let go of the copy: hooks make a cycle that would keep its memory until the next garbage collection."""
        for hook in self._hooks:
            hook.remove()
        self.names = {}

    @contextmanager
    def part(self, samples: int) -> Iterator[Trace]:
        """Record one evaluation of the loss."""
        trace = Trace(samples, Call(LOSS, "loss function", before=random_fingerprint(self.devices)))
        trace.open.append(trace.root)
        self.traces.append(trace)
        yield trace
        trace.root.after = random_fingerprint(self.devices)
        trace.open.clear()
        self._digests.clear()

    def saw(self, tensor: Tensor) -> None:
        """Remember the coarsest dtype, which bounds what agreement can be asked for."""
        if tensor.is_floating_point() or tensor.is_complex():
            self.coarsest = max(self.coarsest, torch.finfo(tensor.dtype).eps)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if inside_backward() or not self.traces or not self.traces[-1].open:
            return
        trace = self.traces[-1]
        calls = trace.by_name.setdefault(self.names[module], [])
        inputs = [self._pack(v, trace.samples) for v in args] + [self._pack(kwargs, trace.samples)]
        call = Call(self.names[module], type(module).__name__, len(calls), inputs)
        calls.append(call)
        trace.open[-1].children.append(call)
        trace.open.append(call)
        call.before = call.after = random_fingerprint(self.devices)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if inside_backward() or not self.traces:
            return
        trace = self.traces[-1]
        name = self.names[module]
        depth = next((i for i in reversed(range(len(trace.open))) if trace.open[i].name == name), 0)
        if depth:  # calls above it were left by an exception that the model caught
            trace.open[depth].ended = True
            trace.open[depth].after = random_fingerprint(self.devices)
            trace.open[depth].output = self._pack(output, trace.samples)
            del trace.open[depth:]

    def _pack(self, value: Any, samples: int) -> Tree:
        """As `pack`; what one module returns the next one takes, so the digest of a tensor is made once."""
        if not isinstance(value, Tensor):
            if isinstance(value, (list, tuple)):
                return [self._pack(v, samples) for v in value]
            return pack(value, samples)
        self.saw(value)
        known = self._digests.get(id(value))
        if known is not None and known[0]() is value and known[1] == value._version:
            return known[2]
        tree = pack(value, samples)
        self._digests[id(value)] = (weakref.ref(value), value._version, tree)
        return tree


def random_fingerprint(devices: Sequence[torch.device]) -> int:
    """A number that changes when random numbers are drawn from a generator that every module shares."""
    states = [torch.get_rng_state()] + [torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"]
    _, keys, position, *_ = np.random.get_state()
    return hash((*(s.numpy().tobytes() for s in states), random.getstate(), np.asarray(keys).tobytes(), position))


def first_not_finite(trace: Trace) -> Call | None:
    """The innermost call, first in execution order, whose output is not finite although its inputs are."""

    def search(call: Call) -> Call | None:
        for child in call.children:
            if _finite(child.inputs) and not _finite(child.output):
                return search(child) or child
        return None

    return search(trace.root)


def _finite(tree: Tree) -> bool:
    if isinstance(tree, Leaf):
        return tree.first is None or bool(tree.first.isfinite().all())
    if isinstance(tree, (list, dict)):
        return all(_finite(t) for t in (tree.values() if isinstance(tree, dict) else tree))
    return True
