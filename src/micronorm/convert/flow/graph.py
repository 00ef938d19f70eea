"""The graph of a model's calls: its layers, and the functions between them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn


@dataclass(eq=False)
class Node:
    """One call.

    Attributes:
        name: the module's name in the model, or the function's name.
        module: the module; None for a function.
        inputs: the calls whose outputs it takes.
        shape: the shape of the output; None if it is unknown.
        reads: names of the parameters and buffers that are passed to the call.
    """

    name: str
    module: nn.Module | None = None
    inputs: tuple["Node", ...] = ()
    shape: tuple[int, ...] | None = None
    reads: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The module's type and name, or the function's name, for messages."""
        return f"{type(self.module).__name__} {self.name!r}" if self.module is not None else self.name


@dataclass
class Flow:
    """The calls of one forward, in the order of execution.

    Attributes:
        nodes: the calls.
        method: how they were found: "fx" (symbolic tracing), "execution" (a run on example inputs) or "order" (a guess
            from the order of registration).
        detail: what the model was run on, or why a better method was not possible.
        complete: False if a run used or returned tensors that could not be followed, so that consumers may be missing.
    """

    nodes: list[Node]
    method: str
    detail: str = ""
    complete: bool = True

    @cached_property
    def calls(self) -> dict[nn.Module, list[Node]]:
        """The calls of each module."""
        calls: dict[nn.Module, list[Node]] = {}
        for node in self.nodes:
            if node.module is not None:
                calls.setdefault(node.module, []).append(node)
        return calls

    @cached_property
    def consumers(self) -> dict[Node, list[Node]]:
        """The consumers of each node, one entry per use."""
        consumers: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in node.inputs:
                consumers[source].append(node)
        return consumers

    def downstream(self, start: Node, passes: Callable[[Node], bool]) -> Iterator[Node]:
        """Yield the first nodes after `start` for which `passes` is False, each once, in order of distance."""
        return _search(start, self.consumers.__getitem__, passes)

    def upstream(self, start: Node, passes: Callable[[Node], bool]) -> Iterator[Node]:
        """Yield the first nodes before `start` for which `passes` is False, each once, in order of distance."""
        return _search(start, lambda node: node.inputs, passes)

    def sole_source(self, node: Node) -> Node | None:
        """Return the call whose output goes into `node` alone, skipping Identity layers, or None."""
        while len(node.inputs) == 1:
            source = node.inputs[0]
            if len(self.consumers[source]) != 1:
                return None
            module = source.module
            if not isinstance(module, nn.Identity) or module._forward_hooks or module._forward_pre_hooks:
                return source
            node = source
        return None


def _search(
    start: Node, neighbours: Callable[[Node], Iterable[Node]], passes: Callable[[Node], bool]
) -> Iterator[Node]:
    queue, seen = list(neighbours(start)), set()
    while queue:
        node = queue.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if passes(node):
            queue.extend(neighbours(node))
        else:
            yield node
