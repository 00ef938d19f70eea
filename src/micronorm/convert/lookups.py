"""What a forward looks up while it is traced: attributes, methods and children, and the code that it runs."""

import copy
import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from micronorm.convert.outside import Names, globals_of, resolve

OURS = ("micronorm.convert.lookups", "micronorm.convert.tracing")
"""The rooms that look at modules and symbols for the tracing's own sake."""

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
    by dotted name (stand-ins, to be compared with each other only). `outside` are plain values of globals, by the id of
    the scope and the names that lead there.
    """

    values: dict[Place, Any] = field(default_factory=dict)
    methods: dict[Place, None] = field(default_factory=dict)
    tensors: dict[Place, None] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    children: dict[str, nn.Module] = field(default_factory=dict)
    outside: dict[tuple[int, Names], tuple[dict[str, Any], Any]] = field(default_factory=dict)

    def update(self, other: "Assumptions") -> None:
        """Take up what another trace of the same twin looked up."""
        for name in ("values", "methods", "tensors", "keys", "children", "outside"):
            getattr(self, name).update(getattr(other, name))


class Recorder:
    """Sees every attribute that is read from or written to the modules of one twin."""

    def __init__(self, twin: nn.Module) -> None:
        self.paths = {id(module): name for name, module in twin.named_modules()}
        self.found = Assumptions()
        self.codes: dict[CodeType, dict[str, Any]] = {}  # with the globals it sees
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
        for code, scope in self.codes.items():
            why = _unfit(code)
            if why:
                self.refuse(why)
            for names in globals_of(code):
                self._outside(names, scope)
        if self.refusal is not None:
            raise self.refusal
        return self.found

    def _outside(self, names: Names, scope: dict[str, Any]) -> None:
        used, value = resolve(names, scope)
        if not used or isinstance(value, ModuleType) or (callable(value) and not _is_plain(value)):
            return
        if not _is_plain(value):
            self.refuse(f"reads the global {'.'.join(used)}, a {type(value).__name__}")
        else:
            self.found.outside[id(scope), used] = scope, copy.deepcopy(value)

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
            self.codes.update(codes_of(on_class.fget))
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
            self.codes.update(codes_of(function))

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
            self.codes.update(codes_of(value))
        return value


def _is_machinery(reader: str) -> bool:
    """Whether an attribute is read by torch's or our own tracing, or by nn.Module itself, and not by the forward."""
    if reader.startswith("torch.nn.modules."):
        return reader == "torch.nn.modules.module"
    return reader in OURS or reader.startswith("torch.")


def _is_plain(value: Any) -> bool:
    """Whether a value can be kept and compared."""
    if value is None or isinstance(value, _PLAIN):
        return True
    if type(value) is dict:
        return all(_is_plain(v) for item in value.items() for v in item)
    return (type(value) in _CONTAINERS or isinstance(value, torch.Size)) and all(map(_is_plain, value))


# --- the code --------------------------------------------------------------------------------------------------------


def codes_of(function: Any) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The code of a function and of what it wraps, each with the globals it sees."""
    while function is not None:
        if isinstance(getattr(function, "__code__", None), CodeType):
            yield function.__code__, function.__globals__
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
