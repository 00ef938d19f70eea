"""A module's forward written anew from its graph, which calls the class's own wherever the graph may not hold."""

import functools
import itertools
import keyword
import linecache
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert.lookups import Assumptions, Place
from micronorm.convert.tracing import Traced
from micronorm.nn.norm_act import fusible_activation, has_hooks, takes_over
from micronorm.ops.activation import Activation
from micronorm.ops.private_api import has_any_global_hook

_numbers = itertools.count()


def passes(module: Any) -> bool:
    """Whether a module hands on what it is given, unseen."""
    return type(module) is nn.Identity and not has_hooks(module) and "forward" not in module.__dict__


def activates(module: Any, activation: Activation) -> bool:
    """Whether a module is this activation and need not be called."""
    return module is not None and fusible_activation(module) == activation


def norm_add(
    norm: Any,
    x: Tensor,
    residual: Any,
    *,
    in_place: bool = False,
    activation: str | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    """act(norm(x) + residual), in the norm where the two are of one kind; otherwise as torch promotes and broadcasts.

    `in_place` says that the sum was to be written to the norm's output, which fixes its dtype and shape.
    """
    if isinstance(residual, Tensor) and residual.shape == x.shape and residual.dtype == x.dtype:
        return norm(x, residual=residual, activation=activation, negative_slope=negative_slope)
    y = norm(x)
    if in_place:
        y += residual
    else:
        y = y + residual
    return Activation(activation, negative_slope)(y)


class Conditions:
    """Expressions over `self` that must all be true for a graph to stand for the class's own forward.

    They are text, because they are asked in every forward: as one expression they cost a few µs.
    """

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}  # ordered, each once
        self.constants: dict[str, Any] = {}

    def __str__(self) -> str:
        return " and ".join(self._lines) or "True"

    def add(self, *lines: str) -> None:
        """Take up conditions."""
        self._lines.update(dict.fromkeys(lines))

    def constant(self, value: Any) -> str:
        """The name of a value in the conditions."""
        for name, known in self.constants.items():
            if known is value or (type(known) is type(value) and known == value):
                return name
        name = f"_c{len(self.constants)}"
        self.constants[name] = value
        return name

    def module(self, path: str) -> str:
        """The expression for a module below `self`; that it exists becomes a condition."""
        expression = "self"
        for name in path.split(".") if path else ():
            self.add(f"{expression}._modules.get({name!r}) is not None")
            expression = f"{expression}._modules[{name!r}]"
        return expression

    def assume(self, found: Assumptions) -> None:
        """Everything that the trace has looked up is as it was."""
        for path, names in found.keys.items():
            self.add(f"tuple({self.module(path)}._modules) == {names!r}")
        same: dict[nn.Module, str] = {}
        for path, child in found.children.items():
            expression = self.module(path)
            first = same.setdefault(child, expression)
            if first != expression:
                self.add(f"{expression} is {first}")
        for place in found.methods:
            self.add(f"{place.name!r} not in {self.module(place.path)}.__dict__")
        for place in found.tensors:
            self.add(f"{self._attribute(place)} is not None")
        for place, value in found.values.items():
            self._same(self._attribute(place), value)
        for (_, names), (scope, value) in found.outside.items():
            self._same(".".join([f"{self._scope(scope)}[{names[0]!r}]", *names[1:]]), value)

    def _same(self, now: str, value: Any) -> None:
        """An expression has this value."""
        then = self._literal(value)
        if value is None or isinstance(value, bool) or callable(value):
            self.add(f"{now} is {then}")
        else:  # the type first: a tensor in a number's place would compare element by element
            self.add(f"type({now}) is {self.constant(type(value))}", f"{now} == {then}")

    def _scope(self, scope: dict[str, Any]) -> str:
        """The name of a file's globals: these themselves, which `constant` might take for others that look alike."""
        found = next((name for name, known in self.constants.items() if known is scope), None)
        name = found or f"_c{len(self.constants)}"
        self.constants[name] = scope
        return name

    def _attribute(self, place: Place) -> str:
        module = self.module(place.path)
        plain = place.name.isidentifier() and not keyword.iskeyword(place.name)
        return f"{module}.{place.name}" if plain else f"getattr({module}, {place.name!r})"

    def _literal(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return repr(value) if type(value) is float and math.isfinite(value) else self.constant(value)

    def hold(self, module: nn.Module) -> bool:
        """Whether they are true of a module now."""
        try:
            return bool(eval(str(self), dict(self.constants), {"self": module}))
        except Exception:  # properties of other people's classes may raise anything
            return False


def write_forward(module: nn.Module, traced: Traced, conditions: Conditions) -> Callable[..., Any]:
    """The forward of `module`'s class as its graph does it, under conditions; otherwise the class's own."""
    original = type(module).forward
    body = traced.graph.python_code("self")
    tests = [
        "not kwargs",
        f"len(args) == {traced.arguments}",
        *(f"isinstance(args[{i}], Tensor)" for i in range(traced.arguments)),  # torch.fx's symbols are none
        "type(self).forward is original",
        "not has_global_hooks()",
        str(conditions),
    ]
    guard = (
        "def guarded(self, *args, **kwargs):\n"
        f"    if {' and '.join(tests)}:\n"
        "        return forward(self, *args)\n"
        "    return type(self).forward(self, *args, **kwargs)\n"
    )
    known: dict[str, Any] = {
        "Tensor": Tensor,
        "has_global_hooks": has_any_global_hook,
        "takes_over": takes_over,
        "passes": passes,
        "activates": activates,
        "original": original,
    }
    scope = {**body.globals, **known, **conditions.constants}
    made = _compile(f"{body.src}\n\n{guard}", scope, type(module).__name__)
    return functools.wraps(original)(made["guarded"])


def _compile(source: str, scope: dict[str, Any], label: str) -> dict[str, Any]:
    """Run generated source, which tracebacks can show."""
    filename = f"<micronorm forward of {label} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
    return scope


def add_fused(
    conditions: Conditions, norm: str, identities: Iterable[str], activation: tuple[str, Activation] | None
) -> None:
    """The conditions under which the norm at a path computes what follows, and the modules that did are left out."""
    conditions.add(f"takes_over({conditions.module(norm)})")
    for path in identities:
        conditions.add(f"passes({conditions.module(path)})")
    if activation is not None:
        path, kind = activation
        conditions.add(f"activates({conditions.module(path)}, {conditions.constant(kind)})")


def copy_traced(traced: Traced) -> Traced:
    """The same with a graph of its own."""
    graph = torch.fx.Graph()
    output = graph.graph_copy(traced.graph, {})
    graph.output(output)
    return Traced(graph, traced.arguments, traced.assumptions)
