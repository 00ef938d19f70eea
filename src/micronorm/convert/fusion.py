"""Which norms compute the activation, and the addition, that follow them, and the forwards that make them do so.

The layers keep their state and their place. Only the forward of the module that calls them is rewritten: it hands the
norm `activation=` and `residual=` and leaves out what the norm then does. The class's own forward stays right.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from micronorm.convert.branches import join_branches
from micronorm.convert.lookups import NotTraceable
from micronorm.convert.rewrite import Conditions, add_fused, copy_traced, norm_add, write_forward
from micronorm.convert.rules import CONVOLUTIONS
from micronorm.convert.surgery import foreign_forward
from micronorm.convert.tracing import IN_PLACE, Traced, short, trace_alone
from micronorm.nn.norm_act import fusible_activation, has_hooks
from micronorm.nn.pool import max_pool
from micronorm.ops.activation import Activation

_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    F.silu: "silu",
    F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu",
}
_ADDITIONS = {operator.add: False, torch.add: False, "add": False, IN_PLACE["iadd"]: True, "add_": True}  # in place?
_FRESH = (*CONVOLUTIONS, nn.Linear)  # their output is a new tensor
_SPOKEN = {"relu": "ReLU", "leaky_relu": "LeakyReLU", "silu": "SiLU"}


@dataclass
class Fusions:
    """The rewritten forwards by module, and for each norm what it was fused with and why it was not.

    Both hold one entry per call of the norm, and `joined` one per call of a convolution that adds a branch. `pools` are
    the max-pooling layers beside them that go by a kernel.
    """

    forwards: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    fused: dict[nn.Module, list[str]] = field(default_factory=dict)
    unfused: dict[nn.Module, list[str]] = field(default_factory=dict)
    joined: list[nn.Module] = field(default_factory=list)
    pools: set[nn.Module] = field(default_factory=set)


def spoken(activation: Activation) -> str:
    """An activation in words, for the plan: by the name of torch's layer.

    Example:
        >>> spoken(Activation("silu"))
        'SiLU'
    """
    assert activation.kind is not None
    return _SPOKEN[activation.kind]


def find_fusions(
    model: nn.Module,
    norms: Iterable[nn.Module],
    pointwise: Iterable[nn.Module] = (),
    pools: Iterable[nn.Module] = (),
) -> Fusions:
    """Look for what follows each of `norms`, and stands beside each of `pointwise`, in the modules that call them.

    Nothing is changed.

    Args:
        model: the model.
        norms: layers that are, or will be when the forwards are put in place, of a type in `nn.norm_act.FUSIBLE`.
        pointwise: 1×1 convolutions that are, or will be, of a type in `nn.branch.JOINING`.
        pools: max-pooling layers that `nn.pool` can compute; those that the same modules call.
    """
    wanted, beside, pooling = set(norms), set(pointwise), set(pools)
    found = Fusions()
    known: dict[type, list[tuple[Traced, Conditions]]] = {}
    for caller, held in _callers(model, wanted, beside).items():
        try:
            traced = _traced_like_one_before(caller, known.setdefault(type(caller), []))
        except NotTraceable as why:
            for norm in held:
                found.unfused.setdefault(norm, []).append(f"{type(caller).__name__} {why}")
            continue
        _Fuser(caller, traced, wanted, found).fuse(beside, pooling)
    for norm in wanted - found.fused.keys() - found.unfused.keys():
        found.unfused[norm] = ["nothing was seen to call it"]
    return found


def _callers(model: nn.Module, norms: set[nn.Module], pointwise: set[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Each module that has some of these as children, or in lists and dictionaries of modules, with its norms."""
    callers = {}
    for module in model.modules():
        held = set(_held(module))
        in_a_row = type(module).forward is nn.Sequential.forward  # nothing stands beside anything
        if not _is_list(module) and (held & norms or (held & pointwise and not in_a_row)):
            callers[module] = [norm for norm in _held(module) if norm in norms]
    return callers


def _held(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield child
        if _is_list(child):
            yield from _held(child)


def _is_list(module: nn.Module) -> bool:
    """Whether a module only holds others: it has no forward."""
    return getattr(type(module).forward, "__name__", "") == "_forward_unimplemented"


def _traced_like_one_before(module: nn.Module, known: list[tuple[Traced, Conditions]]) -> Traced:
    """The trace of a module; networks repeat their blocks, and where all that a trace looked up is equal, so is it."""
    if foreign_forward(module):
        raise NotTraceable("has a forward of its own on the instance")
    for traced, conditions in known:
        if conditions.hold(module):
            return copy_traced(traced)
    try:
        traced, conditions = trace_alone(module), Conditions()
    except NotTraceable:
        raise
    except Exception as fault:  # whatever other people's classes do to those who copy them
        raise NotTraceable(f"cannot be traced ({short(fault)})") from fault
    conditions.assume(traced.assumptions)
    known.append((traced, conditions))
    return copy_traced(traced)


@dataclass
class _Tail:
    """What follows a norm: nodes that go, an operand that is added (and the node that adds it), an activation."""

    nodes: list[torch.fx.Node] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    add: torch.fx.Node | None = None
    residual: torch.fx.Node | None = None
    in_place: bool = False
    activation: Activation | None = None
    module: str | None = None
    why_not: str = ""

    @property
    def text(self) -> str:
        """In words, for the plan."""
        parts = ["the add"] if self.add is not None else []
        if self.activation is not None and self.activation.kind is not None:
            parts.append(f"the {spoken(self.activation)}")
        return f"with {' and '.join(parts)} after it"


class _Fuser:
    """One caller and its graph, which `fuse` edits."""

    def __init__(self, caller: nn.Module, traced: Traced, norms: set[nn.Module], found: Fusions) -> None:
        self.caller, self.traced, self.norms, self.found = caller, traced, norms, found
        self.graph = traced.graph

    def fuse(self, pointwise: Collection[nn.Module], pools: Collection[nn.Module]) -> None:
        """Fuse what can be, join the branches beside these convolutions, pool by kernel, and write the forward."""
        conditions = Conditions()
        conditions.assume(self.traced.assumptions)
        tails: list[tuple[nn.Module, _Tail]] = []
        # The last first: of two norms that are added, the later one is called where it was.
        for node in reversed(list(self.graph.nodes)):
            norm = self._module(node)
            if norm is None or norm not in self.norms:
                continue
            tail = self._tail(node, norm)
            tails.append((norm, tail))
            if not tail.why_not:
                self._rewrite(node, tail)
                activation = (tail.module, tail.activation) if tail.module and tail.activation else None
                add_fused(conditions, str(node.target), tail.identities, activation)
        for norm, tail in reversed(tails):
            table = self.found.unfused if tail.why_not else self.found.fused
            table.setdefault(norm, []).append(tail.why_not or tail.text)
        joined = join_branches(self.caller, self.graph, pointwise)
        self.found.joined += joined
        pooled = [self._pool(node) for node in list(self.graph.nodes) if self._is_one_of(pools, node)]
        if joined or pooled or any(not tail.why_not for _, tail in tails):
            self.graph.lint()
            self.found.forwards[self.caller] = write_forward(self.caller, self.traced, conditions)

    def _module(self, node: torch.fx.Node) -> nn.Module | None:
        return self.caller.get_submodule(str(node.target)) if node.op == "call_module" else None

    # --- what follows ------------------------------------------------------------------------------------------------

    def _tail(self, node: torch.fx.Node, norm: nn.Module) -> _Tail:
        tail = _Tail()
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], torch.fx.Node):
            tail.why_not = "it is not called with one tensor"
        elif has_hooks(norm) or "forward" in vars(norm):
            tail.why_not = "hooks look at its output"
        elif getattr(norm, "activation", None) is not None:
            tail.why_not = "it has an activation of its own"
        else:
            self._follow(node, tail)
        return tail

    def _follow(self, node: torch.fx.Node, tail: _Tail) -> None:
        last = self._past_identities(node, tail)
        user = self._sole_user(last)
        if user is None:
            tail.why_not = "its output is used more than once" if len(last.users) > 1 else "its output is not used"
            return
        if self._take_addition(last, user, tail):
            tail.why_not = self._why_not_later(node, user, tail)
            last = self._past_identities(user, tail)
            user = self._sole_user(last)
            if user is not None and self._is_activation(last, user, tail, after_add=True):
                tail.nodes.append(user)
        elif self._is_activation(last, user, tail, after_add=False):
            tail.nodes.append(user)
        elif user.op == "output":
            tail.why_not = "its module returns its output"
        else:
            tail.why_not = tail.why_not or f"it is followed by {self._label(user)}"

    def _past_identities(self, node: torch.fx.Node, tail: _Tail) -> torch.fx.Node:
        while (user := self._sole_user(node)) is not None:
            module = self._module(user)
            if type(module) is not nn.Identity or has_hooks(module) or user.args != (node,) or user.kwargs:
                break
            tail.identities.append(str(user.target))
            tail.nodes.append(user)
            node = user
        return node

    @staticmethod
    def _sole_user(node: torch.fx.Node) -> torch.fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _take_addition(self, node: torch.fx.Node, user: torch.fx.Node, tail: _Tail) -> bool:
        in_place = _ADDITIONS.get(user.target) if user.op in ("call_function", "call_method") else None
        if in_place is None or len(user.args) != 2 or user.kwargs not in ({}, {"alpha": 1}):
            return False
        left, right = user.args
        other = right if left is node else left
        if not isinstance(other, torch.fx.Node) or other is node or (in_place and left is not node):
            return False
        if other.op == "get_attr":  # a parameter is added to every sample: of another shape
            return False
        tail.add, tail.residual, tail.in_place = user, other, in_place
        tail.nodes.append(user)
        return True

    def _is_activation(self, node: torch.fx.Node, user: torch.fx.Node, tail: _Tail, *, after_add: bool) -> bool:
        module = self._module(user)
        if module is not None:
            activation = fusible_activation(module) if user.args == (node,) and not user.kwargs else None
            if activation is None and has_hooks(module) and not after_add:
                tail.why_not = f"hooks look at the {type(module).__name__} after it"
        else:
            activation = _called_activation(node, user)
        # What the activation's derivative needs is its own input, which no one has kept when something was added.
        if activation is None or (after_add and not activation.keeps_sign):
            return False
        tail.activation, tail.module = activation, str(user.target) if module is not None else None
        return True

    def _why_not_later(self, node: torch.fx.Node, add: torch.fx.Node, tail: _Tail) -> str:
        """The norm is called where the addition stands. That is the same if its input cannot have changed by then."""
        between = []
        step = node.next
        while step is not add:
            if step not in tail.nodes and step.op != "get_attr":
                between.append(step)
            step = step.next
        if not between:
            return ""
        source: Any = node.args[0]
        norm, before = self._module(node), self._module(source)
        fresh = isinstance(before, _FRESH) and len(source.users) == 1
        again = any(norm in set(module.modules()) for step in between if (module := self._module(step)) is not None)
        return "" if fresh and not again else f"{self._label(between[0])} runs between it and the add"

    def _label(self, node: torch.fx.Node) -> str:
        module = self._module(node)
        if module is not None:
            return type(module).__name__
        if node.target is norm_add:
            return "an add that another norm takes"
        return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))

    def _is_one_of(self, layers: Collection[nn.Module], node: torch.fx.Node) -> bool:
        """Whether a node calls one of these layers with one tensor."""
        return self._module(node) in layers and len(node.args) == 1 and not node.kwargs

    # --- the graph ---------------------------------------------------------------------------------------------------

    def _pool(self, node: torch.fx.Node) -> None:
        """The layer is handed to `max_pool`, which sees at every call what can compute it."""
        with self.graph.inserting_before(node):
            layer = self.graph.create_node("get_attr", str(node.target))
            made = self.graph.call_function(max_pool, (layer, node.args[0]))
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)
        self.found.pools.add(self.caller.get_submodule(str(node.target)))

    def _rewrite(self, node: torch.fx.Node, tail: _Tail) -> None:
        options: dict[str, Any] = {}
        if tail.activation is not None:
            options["activation"] = tail.activation.kind
            if tail.activation.kind == "leaky_relu":
                options["negative_slope"] = tail.activation.slope
        last = tail.nodes[-1]
        if tail.add is None:
            node.kwargs = options
            last.replace_all_uses_with(node)
        else:
            with self.graph.inserting_before(tail.add):
                norm = self.graph.create_node("get_attr", str(node.target))
                args: Any = (norm, node.args[0], tail.residual)
                if tail.in_place:
                    options["in_place"] = True
                made = self.graph.call_function(norm_add, args, options)
            last.replace_all_uses_with(made)
        for gone in reversed(tail.nodes):
            self.graph.erase_node(gone)
        if tail.add is not None:
            self.graph.erase_node(node)


def _called_activation(node: torch.fx.Node, user: torch.fx.Node) -> Activation | None:
    kind = _FUNCTIONS.get(user.target) if user.op in ("call_function", "call_method") else None
    if kind is None or not user.args or user.args[0] is not node or user.all_input_nodes != [node]:
        return None
    if kind != "leaky_relu":
        return Activation(kind)
    slope = user.kwargs.get("negative_slope", user.args[1] if len(user.args) > 1 else 0.01)
    if isinstance(slope, bool) or not isinstance(slope, int | float) or not math.isfinite(slope):
        return None
    return Activation(kind, float(slope))
