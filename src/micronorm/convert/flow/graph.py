"""A graph of calls: layers and the functions between them, whichever way it was recorded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn


@dataclass(eq=False)
class Node:
    """One call. `name` is the module's name in the model, or the function's own.

    `args` and `kwargs` are those of a function, with nodes where it was given tensors; `shape` is the output's where
    the model was run. `reads` names the parameters and buffers that the call is given from outside it, as far as
    symbolic tracing saw them.
    """

    name: str
    module: nn.Module | None = None
    inputs: tuple["Node", ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    reads: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For messages: the module's type and name, or the function's name."""
        return f"{type(self.module).__name__} {self.name!r}" if self.module is not None else self.name


@dataclass
class Flow:
    """The calls of one forward, in the order of execution, and how they were learned.

    `method` is "fx" (symbolic tracing), "execution" (a run on example inputs) or "order" (registration order, a guess);
    `detail` says on what it ran, or why nothing better was possible. `complete` is False where a run used or returned
    tensors in ways that could not be followed: what is there is right, but a consumer may be missing.
    """

    nodes: list[Node]
    method: str
    detail: str = ""
    complete: bool = True

    @cached_property
    def calls(self) -> dict[nn.Module, list[Node]]:
        """Each module's calls."""
        calls: dict[nn.Module, list[Node]] = {}
        for node in self.nodes:
            if node.module is not None:
                calls.setdefault(node.module, []).append(node)
        return calls

    @cached_property
    def consumers(self) -> dict[Node, list[Node]]:
        """Each node's consumers, one entry per use."""
        consumers: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in node.inputs:
                consumers[source].append(node)
        return consumers

    def downstream(self, start: Node, passes: Callable[[Node], bool]) -> Iterator[Node]:
        """What the output of `start` meets first: nodes that do not let it pass, each once, in order of distance."""
        queue, seen = list(self.consumers[start]), set()
        while queue:
            node = queue.pop(0)
            if node in seen:
                continue
            seen.add(node)
            if passes(node):
                queue.extend(self.consumers[node])
            else:
                yield node

    def sole_source(self, node: Node) -> Node | None:
        """The call whose output goes into `node` and nowhere else; Identity layers count as nothing."""
        while len(node.inputs) == 1:
            source = node.inputs[0]
            if len(self.consumers[source]) != 1:
                return None
            module = source.module
            if not isinstance(module, nn.Identity) or module._forward_hooks or module._forward_pre_hooks:
                return source
            node = source
        return None
