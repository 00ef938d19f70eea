"""Find the residual branches of a model in its data flow: their first layers, and their last norms to start at zero."""

import re
from collections.abc import Iterator

from torch import nn

from micronorm.convert.flow import Flow, Node
from micronorm.convert.flow.graph import function_name
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.weight import PLAIN

_ADDITIONS = frozenset({"add", "iadd", "radd"})
# What may lie between the last norm of a branch and the addition: dropout, stochastic depth, gates and scales. A ReLU
# may not: its gradient at zero is zero, so that a branch that starts there would never train.
_BETWEEN_WORDS = """
    Identity Dropout DropPath StochasticDepth
    dropout drop_path stochastic_depth mul imul rmul div truediv clone contiguous to
"""
_BETWEEN = frozenset(_BETWEEN_WORDS.split())


class _Branches:
    """The residual branches of a flow. Sets of calls are integers with one bit per call.

    One side of a residual addition, the shortcut, has at most one layer that the other side does not have; the branch
    has more.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.bits = {node: 1 << i for i, node in enumerate(flow.nodes)}
        self.upstream: dict[Node, int] = {}  # the node itself and all before it
        for node in flow.nodes:  # in the order of execution: inputs come first
            self.upstream[node] = self.bits[node]
            for source in node.inputs:
                self.upstream[node] |= self.upstream[source]
        self.layers = sum(bit for node, bit in self.bits.items() if isinstance(node.module, PLAIN))

    def __iter__(self) -> Iterator[tuple[Node, Node, int]]:
        """Yield each residual addition, the end of its branch, and the layers of the branch."""
        for node in self.flow.nodes:
            if node.module is not None or function_name(node.name) not in _ADDITIONS or len(node.inputs) != 2:
                continue
            first, second = (self.upstream[side] & self.layers for side in node.inputs)
            own = zip((first & ~second, second & ~first), node.inputs, strict=True)
            (few, _), (many, branch) = sorted(own, key=lambda side: side[0].bit_count())
            if few.bit_count() <= 1 and few.bit_count() < many.bit_count():
                yield node, branch, many


def first_layers(flow: Flow) -> list[nn.Module]:
    """Return the convolutions and linear layers with which residual branches begin, in the order of execution."""
    branches, found = _Branches(flow), {}
    for _, _, layers in branches:
        starts = (node for node, bit in branches.bits.items() if branches.upstream[node] & layers == bit & layers > 0)
        found |= {node.module: None for node in starts if node.module is not None}
    return list(found)


def last_norms(flow: Flow, norms: set[nn.Module]) -> set[nn.Module]:
    """Return those of `norms` that end a residual branch each time they are called.

    The branch ends in a norm, and the norm's output goes nowhere but into the addition.
    """
    branches = _Branches(flow)
    ends: set[Node] = set()
    for addition, branch, _ in branches:
        before = branches.upstream[addition]
        for end in flow.upstream(branch, _lies_between) if _lies_between(branch) else (branch,):
            if end.module in norms and all(before & branches.bits[user] for user in flow.consumers[end]):
                ends.add(end)
    return {module for module in norms if (calls := flow.calls.get(module)) and ends.issuperset(calls)}


def _lies_between(node: Node) -> bool:
    name = function_name(node.name) if node.module is None else type(node.module).__name__
    return re.sub("[123]d$", "", name) in _BETWEEN


def zero_weight(norm: nn.Module) -> nn.Parameter:
    """Return the parameter that is zero if a norm starts at zero: its weight, or the group weight of BatchChannelNorm.

    With a channel weight of zero, BatchChannelNorm would divide by sqrt(eps) and multiply its gradients by hundreds.

    Raises:
        ValueError: if the layer has no weight.
    """
    wanted = "group_weight" if any(isinstance(module, BatchChannelNorm) for module in norm.modules()) else "weight"
    weight = next((p for name, p in norm.named_parameters() if name.rpartition(".")[2] == wanted), None)
    if weight is None:
        raise ValueError(f"zero_init_residual=True needs a norm with a weight, but {type(norm).__name__} has none")
    return weight
