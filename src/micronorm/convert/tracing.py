"""One module's own forward as a graph of calls to its children, with all that the graph takes for granted.

A graph freezes what the forward looked up while it was traced. So every look-up is written down (`Assumptions`), to be
compared when the graph runs, and a forward that does what no graph can hold is refused with the reason.
"""

import inspect
import operator
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy
import torch
import torch.fx
from torch import nn

from micronorm.convert.lookups import OURS, Assumptions, NotTraceable, Recorder, codes_of

# Frames of torch that may stand between a forward and the calls it makes; others (checkpointing, decorators that change
# the mode) do something that a graph would leave out.
_TRANSPARENT = ("torch.fx", "torch.nn.modules", "torch.nn.functional", "torch.functional", "torch._tensor")
_TRANSPARENT_EXACT = frozenset({"torch", "torch.overrides", "torch._jit_internal"})
# Who may ask a symbolic value for its type.
_MAY_ASK = ("torch.fx", "torch.overrides", "torch.nn.parameter", "torch.utils._pytree")


@dataclass
class Traced:
    """The graph of a forward that takes `arguments` tensors, and what it assumes."""

    graph: torch.fx.Graph
    arguments: int
    assumptions: Assumptions


def trace_alone(module: nn.Module) -> Traced:
    """Trace the forward of `module`'s class with every child as one call. The module is left as it was.

    Raises:
        NotTraceable: where no graph does what the forward does in training and in eval mode.
    """
    arguments = _required_arguments(type(module).forward)
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=True)
    twin = _twin(module, {})
    traced = []
    for training in (True, False):
        for part in twin.modules():
            part.training = training
        with torch.set_grad_enabled(training):
            traced.append(_trace(twin, arguments))
    same = torch.equal(streams[0], torch.get_rng_state()) and streams[1] == random.getstate()
    if not same or not all(map(numpy.array_equal, streams[2], numpy.random.get_state(legacy=True))):
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        numpy.random.set_state(streams[2])
        raise NotTraceable("draws random numbers outside its layers")
    if _spelled(traced[0].graph) != _spelled(traced[1].graph):
        raise NotTraceable("does one thing in training and another in eval mode")
    traced[0].assumptions.update(traced[1].assumptions)
    return traced[0]


def _required_arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise NotTraceable("takes any number of arguments")
    required = [p for p in parameters if p.default is p.empty]
    if not required or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise NotTraceable("takes no positional argument" if not required else "takes required keyword arguments")
    return tuple(p.name for p in required)


def _twin(module: nn.Module, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module and all below it as new objects around the same attributes: a forward may write to what it finds."""
    if module not in memo:
        twin = memo[module] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        children = module._modules
        new = {name: None if child is None else _twin(child, memo) for name, child in children.items()}
        twin.__dict__["_modules"] = type(children)(new)  # type: ignore[call-arg]
        twin.__dict__.pop("forward", None)
    return memo[module]


def _spelled(graph: torch.fx.Graph) -> list[Any]:
    """A graph in terms that compare equal for equal graphs."""
    return [
        (n.op, n.name, n.target, torch.fx.node.map_arg((n.args, n.kwargs), lambda m: ("node", m.name)))  # type: ignore[arg-type, return-value]
        for n in graph.nodes
    ]


# --- torch.fx --------------------------------------------------------------------------------------------------------


def _trace(twin: nn.Module, arguments: tuple[str, ...]) -> Traced:
    recorder = Recorder(twin)
    recorder.codes.update(found for found in codes_of(type(twin).forward) if not _of_torch(type(twin).forward))
    tracer = _Tracer(recorder, arguments)
    try:
        with recorder.watching():
            graph = tracer.trace(twin)
    except NotTraceable:
        raise
    except Exception as fault:
        raise recorder.refusal or NotTraceable(f"cannot be traced ({short(fault)})") from fault
    found = recorder.close()
    for node in graph.nodes:
        target = str(node.target)
        if node.op == "call_module":
            found.children[target] = twin.get_submodule(target)
        elif node.op == "get_attr" and "_tensor_constant" in target:
            raise NotTraceable("computes a constant")
    return Traced(graph, len(arguments), found)


def _of_torch(function: Any) -> bool:
    return function.__module__.startswith("torch.")


def short(fault: BaseException) -> str:
    """An exception in few words."""
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0][:60]}" if text else type(fault).__name__


class _Value(torch.fx.Proxy):
    """A symbolic value that does not answer when it is asked what it is: a graph would keep the answer."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader in OURS or reader.startswith(_MAY_ASK):
            return torch.fx.Proxy
        tracer: Any = object.__getattribute__(self, "tracer")
        raise tracer.recorder.refuse("looks at the type of its input")


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    operation = getattr(operator, name)

    def apply(a: Any, b: Any) -> Any:
        return operation(a, b)

    apply.__name__ = apply.__qualname__ = name
    return apply


# torch.fx takes x += y for x + y, which leaves other names of x as they were and may have another dtype. As functions
# of ours they are one call each; operator's own it would spell as statements, which rebind the names of numbers.
_IN_PLACE_WORDS = """
    iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
"""
IN_PLACE = {name: _in_place(name) for name in _IN_PLACE_WORDS.split()}
for _name, _function in IN_PLACE.items():

    def _symbolic(self: _Value, other: Any, function: Any = _function) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Value, f"__{_name}__", _symbolic)


class _Tracer(torch.fx.Tracer):
    """Every child is one call, buffers are symbols too, and arguments with a default keep it."""

    proxy_buffer_attributes = True

    def __init__(self, recorder: Recorder, arguments: tuple[str, ...]) -> None:
        super().__init__()
        self.recorder = recorder
        self._arguments = arguments
        self._grad = torch.is_grad_enabled()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self._arguments)]

    def create_arg(self, a: Any) -> Any:
        known = type(a) in (list, tuple, dict, torch.Size) or type(a).__module__.startswith("torch.fx")
        if isinstance(a, list | tuple | dict) and not known:  # torch.fx would pass on its plain relative
            raise self.recorder.refuse(f"passes on a {type(a).__name__}")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if torch.is_grad_enabled() is not self._grad:
            raise self.recorder.refuse("turns gradients on or off")
        frame = sys._getframe(1)
        while frame is not None and not (frame.f_code.co_name == "trace" and "tracer_cls" in frame.f_locals):
            self._look(frame.f_code, frame.f_globals)
            frame = frame.f_back
        return super().create_node(*args, **kwargs)

    def _look(self, code: CodeType, scope: dict[str, Any]) -> None:
        room = scope.get("__name__", "")
        if room == "torch" or room.startswith("torch."):
            if room not in _TRANSPARENT_EXACT and not room.startswith(_TRANSPARENT):
                raise self.recorder.refuse(f"runs layers inside {room}")
        elif room not in OURS:
            self.recorder.codes[code] = scope
