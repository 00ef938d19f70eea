"""1×1 convolutions whose input goes elsewhere too: their backward adds the other branch's gradient to its own.

At the entrance of a residual block autograd adds the gradient of the shortcut to the convolution's in passes of its
own. Where the forward hands the convolution's input to others after it, these get it from the convolution instead
(`micronorm.nn.branch`), and with it their gradient comes back to the convolution.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch.fx
from torch import nn

from micronorm.convert.tracing import IN_PLACE
from micronorm.nn.branch import conv_and_input

_FACTS = ("size", "dim", "detach")  # of a tensor, without a gradient
_WRITING = frozenset(IN_PLACE.values())


def join_branches(caller: nn.Module, graph: torch.fx.Graph, convolutions: Collection[nn.Module]) -> list[nn.Module]:
    """Edit a caller's graph: `convolutions`, where others take their input later, hand it on to these.

    Returns:
        The convolutions of which this was done, one entry per call.
    """
    joined = []
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(place):
        module = caller.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module is None or module not in convolutions:
            continue
        source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(source, torch.fx.Node):
            continue
        # What the caller returns stays the very tensor it was.
        later = [user for user in source.users if place[user] > place[node] and user.op != "output"]
        if all(map(_asks_for_facts, later)) or any(_writes(user, source) for user in later):
            continue
        for made in _join(graph, node, source, later):
            place[made] = place[node]
        joined.append(module)
    return joined


def _join(
    graph: torch.fx.Graph, node: torch.fx.Node, source: torch.fx.Node, later: list[torch.fx.Node]
) -> list[torch.fx.Node]:
    """Replace one call; returns the nodes that stand for it."""
    with graph.inserting_before(node):
        conv = graph.create_node("get_attr", str(node.target))
        both = graph.call_function(conv_and_input, (conv, source))
        y, again = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
    node.replace_all_uses_with(y)
    for user in later:
        user.replace_input_with(source, again)
    graph.erase_node(node)
    return [conv, both, y, again]


def _asks_for_facts(user: torch.fx.Node) -> bool:
    return user.target is getattr or (user.op == "call_method" and user.target in _FACTS)


def _writes(user: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Whether a call plainly writes to a tensor: others may know that by another name, which autograd must see."""
    if user.op not in ("call_method", "call_function") or not (user.args and user.args[0] is source):
        return False
    name: Any = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
    return user.target in _WRITING or name.rstrip("_") + "_" == name or bool(user.kwargs.get("inplace"))
