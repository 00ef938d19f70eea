"""One module's own forward as a graph of calls to its children, with all that the graph takes for granted.

A graph freezes what the forward looked up while it was traced. So every look-up is written down (`Assumptions`), to be
compared when the graph runs, and a forward that does what no graph can hold is refused with the reason.
"""

import dis
import functools
import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import nn

from micronorm.surgery import foreign_forward

# What a graph cannot follow: questions about types, which other layers answer differently, and about the state of the
# process, and output to the outside.
_UNSEEN_WORDS = """
    isinstance issubclass type print vars globals locals is_tensor is_grad_enabled is_inference_mode_enabled
    is_compiling is_dynamo_compiling is_exporting is_tracing is_autocast_enabled is_autocast_cpu_enabled
    is_in_onnx_export
"""
_UNSEEN = frozenset(_UNSEEN_WORDS.split())
_WITH = frozenset({"BEFORE_WITH", "BEFORE_ASYNC_WITH", "SETUP_WITH", "LOAD_SPECIAL"})
_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"})
# Frames of torch that may stand between a forward and the calls it makes; others (checkpointing, decorators that change
# the mode) do something that a graph would leave out.
_TRANSPARENT = ("torch.fx", "torch.nn.modules", "torch.nn.functional", "torch.functional", "torch._tensor")
_TRANSPARENT_EXACT = frozenset({"torch", "torch.overrides", "torch._jit_internal"})
# Who may ask a symbolic value for its type.
_MAY_ASK = ("torch.fx", "torch.overrides", "torch.nn.parameter", "torch.utils._pytree")
_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.memory_format, torch.layout)
_CONTAINERS = (list, dict, set, frozenset, tuple)


class NotTraceable(Exception):
    """The forward cannot be a graph; the message says why, in words that fit after a module's name."""


class Place(NamedTuple):
    """An attribute: the path of its module below the one that is traced, "" for that one itself, and its name."""

    path: str
    name: str

    @property
    def dotted(self) -> str:
        """path.name."""
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass
class Assumptions:
    """What a forward looked up while it was traced.

    `values` are plain values and functions, `methods` were found on the class, `tensors` are parameters and buffers,
    `keys` are the names of the children of modules that were iterated over, `children` the modules that were looked up,
    by dotted name (stand-ins, to be compared with each other only).
    """

    values: dict[Place, Any] = field(default_factory=dict)
    methods: dict[Place, None] = field(default_factory=dict)
    tensors: dict[Place, None] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    children: dict[str, nn.Module] = field(default_factory=dict)


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
    if foreign_forward(module):
        raise NotTraceable("has a forward of its own on the instance")
    arguments = _required_arguments(type(module).forward)
    streams = torch.get_rng_state(), random.getstate()
    twin = _twin(module, {})
    traced = []
    for training in (True, False):
        for part in twin.modules():
            part.training = training
        with torch.set_grad_enabled(training):
            traced.append(_trace(twin, arguments))
    if not torch.equal(streams[0], torch.get_rng_state()) or streams[1] != random.getstate():
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        raise NotTraceable("draws random numbers outside its layers")
    if _spelled(traced[0].graph) != _spelled(traced[1].graph):
        raise NotTraceable("does one thing in training and another in eval mode")
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


# --- the look-ups ----------------------------------------------------------------------------------------------------


class _Recorder:
    """Sees every attribute that is read from or written to the modules of one twin."""

    def __init__(self, twin: nn.Module) -> None:
        self.paths = {id(module): name for name, module in twin.named_modules()}
        self.found = Assumptions()
        self.codes: set[CodeType] = set()
        self.copies: list[tuple[str, Any, Any]] = []
        self.refusal: NotTraceable | None = None

    def refuse(self, why: str) -> NotTraceable:
        """The exception to raise. It is kept, for the forward may catch it."""
        self.refusal = self.refusal or NotTraceable(why)
        return self.refusal

    def close(self) -> Assumptions:
        """After the trace: what was found, or the reason to give up."""
        for name, lent, kept in self.copies:
            if lent != kept:
                self.refuse(f"changes self.{name}")
        for code in self.codes:
            why = _unfit(code)
            if why:
                self.refuse(why)
        if self.refusal is not None:
            raise self.refusal
        return self.found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, modules report what is read and written. Like torch.fx, it patches nn.Module itself."""
        write, delete = nn.Module.__setattr__, nn.Module.__delattr__
        if "__getattribute__" in vars(nn.Module):
            raise NotTraceable("is being watched by another tool")

        def on_read(module: nn.Module, name: str) -> Any:
            path = self.paths.get(id(module))
            reader = "" if path is None else sys._getframe(1).f_globals.get("__name__", "")
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if path is not None and not _is_machinery(reader):
                    self._registered(Place(path, name), object.__getattribute__(module, "__dict__"))
                raise
            return value if path is None or _is_machinery(reader) else self._read(module, Place(path, name), value)

        def on_write(module: nn.Module, name: str, *value: Any) -> None:
            if id(module) in self.paths and not _is_machinery(sys._getframe(1).f_globals.get("__name__", "")):
                raise self.refuse(f"writes to self.{name}")
            (write if value else delete)(module, name, *value)

        patched = {"__getattribute__": on_read, "__setattr__": on_write, "__delattr__": on_write}
        for name, function in patched.items():
            setattr(nn.Module, name, function)
        try:
            yield
        finally:
            del nn.Module.__getattribute__  # type: ignore[misc]
            nn.Module.__setattr__, nn.Module.__delattr__ = write, delete  # type: ignore[method-assign]

    def _registered(self, place: Place, attributes: dict[str, Any]) -> None:
        """A parameter, buffer or child: a tensor becomes part of the graph, the absence of one is a value."""
        for table in ("_modules", "_parameters", "_buffers"):
            if place.name in attributes.get(table, ()):
                value = attributes[table][place.name]
                if value is None:
                    self.found.values[place] = None
                elif isinstance(value, nn.Module):
                    self.found.children[place.dotted] = value
                else:
                    self.found.tensors[place] = None
                return
        raise self.refuse(f"asks for self.{place.dotted}, which it does not have")

    def _read(self, module: nn.Module, place: Place, value: Any) -> Any:
        name = place.name
        if name == "training":  # both modes are traced
            return value
        if name == "_modules":
            self._keys(place.path, value)
            return value
        if isinstance(value, MethodType) and value.__self__ is module:
            self._method(place, value.__func__, module)
            return value
        on_class = inspect.getattr_static(type(module), name, None)
        if isinstance(on_class, property):  # what it reads is seen by itself
            self.codes.add(on_class.fget.__code__)  # type: ignore[union-attr]
            return value
        if isinstance(on_class, staticmethod) and name not in object.__getattribute__(module, "__dict__"):
            self._method(place, on_class.__func__, module)
            return value
        return self._value(place, value)

    def _keys(self, path: str, children: dict[str, nn.Module | None]) -> None:
        self.found.keys[path] = tuple(children)
        for name, child in children.items():
            if child is not None:
                self.found.children[Place(path, name).dotted] = child

    def _method(self, place: Place, function: Any, module: nn.Module) -> None:
        owner = getattr(function, "__module__", "")
        if owner == "torch.nn.modules.module":
            if place.name not in ("children", "named_children"):
                raise self.refuse(f"calls self.{place.dotted}")
            self._keys(place.path, object.__getattribute__(module, "_modules"))
        elif owner != "torch.nn.modules.container":
            self.found.methods[place] = None
            self.codes.update(_codes_of(function))

    def _value(self, place: Place, value: Any) -> Any:
        if _is_plain(value):
            kept = lent = value
            if isinstance(value, list | dict | set):
                kept, lent = type(value)(value), type(value)(value)
                self.copies.append((place.dotted, lent, kept))
            self.found.values[place] = kept
            return lent
        if isinstance(value, nn.Module) or not callable(value) or place.name.startswith("__"):
            raise self.refuse(f"reads self.{place.dotted}, a {type(value).__name__}")
        self.found.values[place] = value
        if isinstance(value, FunctionType):
            self.codes.update(_codes_of(value))
        return value


def _is_machinery(reader: str) -> bool:
    """Whether an attribute is read by torch's or our own tracing, or by nn.Module itself, and not by the forward."""
    if reader.startswith("torch.nn.modules."):
        return reader == "torch.nn.modules.module"
    return reader == __name__ or reader.startswith("torch.")


def _is_plain(value: Any) -> bool:
    """Whether a value can be kept and compared."""
    if value is None or isinstance(value, _PLAIN):
        return True
    if type(value) is dict:
        return all(_is_plain(v) for item in value.items() for v in item)
    return (type(value) in _CONTAINERS or isinstance(value, torch.Size)) and all(map(_is_plain, value))


# --- the code --------------------------------------------------------------------------------------------------------


def _codes_of(function: Any) -> Iterator[CodeType]:
    """The code of a function and of what it wraps."""
    while function is not None:
        if isinstance(getattr(function, "__code__", None), CodeType):
            yield function.__code__
        function = getattr(function, "__wrapped__", None)


@functools.lru_cache(maxsize=1024)
def _unfit(code: CodeType) -> str:
    """Why a graph would not do what the code does; empty where it would."""
    words = sorted(_UNSEEN.intersection(code.co_names))
    if words:
        return f"uses {words[0]}"
    names = {instruction.opname for instruction in dis.get_instructions(code)}
    if names & _WITH:
        return "has a with statement"
    if names & _STORES:
        return "writes to attributes or globals"
    inner = (_unfit(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return next(filter(None, inner), "")


# --- torch.fx --------------------------------------------------------------------------------------------------------


def _trace(twin: nn.Module, arguments: tuple[str, ...]) -> Traced:
    recorder = _Recorder(twin)
    recorder.codes.update(code for code in _codes_of(type(twin).forward) if not _of_torch(type(twin).forward))
    tracer = _Tracer(recorder, arguments)
    try:
        with recorder.watching():
            graph = tracer.trace(twin)
    except NotTraceable:
        raise
    except Exception as fault:
        raise recorder.refusal or NotTraceable(f"cannot be traced ({_short(fault)})") from fault
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


def _short(fault: BaseException) -> str:
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0][:60]}" if text else type(fault).__name__


class _Value(torch.fx.Proxy):
    """A symbolic value that does not answer when it is asked what it is: a graph would keep the answer."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader == __name__ or reader.startswith(_MAY_ASK):
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

    def __init__(self, recorder: _Recorder, arguments: tuple[str, ...]) -> None:
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
            self._look(frame.f_code, frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        return super().create_node(*args, **kwargs)

    def _look(self, code: CodeType, room: str) -> None:
        if room == "torch" or room.startswith("torch."):
            if room not in _TRANSPARENT_EXACT and not room.startswith(_TRANSPARENT):
                raise self.recorder.refuse(f"runs layers inside {room}")
        elif room != __name__:
            self.recorder.codes.add(code)
