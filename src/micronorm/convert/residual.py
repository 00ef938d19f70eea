"""Find the residual branches of a model in its data flow, and start them at zero."""

import re

from torch import nn

from micronorm.convert.flow import Flow, Node
from micronorm.convert.flow.kinds import function_name
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


def last_norms(flow: Flow, norms: set[nn.Module]) -> set[nn.Module]:
    """Return those of `norms` that end a residual branch each time they are called.

    One side of a residual addition, the shortcut, has at most one convolution that the other side does not have; the
    branch has more. The branch ends in a norm, and the norm's output goes nowhere but into the addition.
    """
    bits = {node: 1 << i for i, node in enumerate(flow.nodes)}
    upstream: dict[Node, int] = {}  # the node itself and all before it, as a set of bits
    for node in flow.nodes:  # in the order of execution: inputs come first
        upstream[node] = bits[node]
        for source in node.inputs:
            upstream[node] |= upstream[source]
    layers = sum(bit for node, bit in bits.items() if isinstance(node.module, PLAIN))
    ends: set[Node] = set()
    for node in flow.nodes:
        if node.module is not None or function_name(node.name) not in _ADDITIONS or len(node.inputs) != 2:
            continue
        first, second = node.inputs
        counts = [(upstream[a] & ~upstream[b] & layers).bit_count() for a, b in ((first, second), (second, first))]
        if min(counts) > 1 or counts[0] == counts[1]:
            continue
        branch = first if counts[0] > counts[1] else second
        for end in flow.upstream(branch, _lies_between) if _lies_between(branch) else (branch,):
            if end.module in norms and all(upstream[node] & bits[user] for user in flow.consumers[end]):
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
