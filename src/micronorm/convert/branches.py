"""1×1 convolutions whose input goes elsewhere too: their backward adds the other branch's gradient to its own.

At the entrance of a residual block autograd adds the gradient of the shortcut to the convolution's in passes of its
own. Where the forward hands the convolution's input to others after it, these get it from the convolution instead
(`micronorm.nn.branch`), and with it their gradient comes back to the convolution.
"""

import operator
from collections.abc import Collection

import torch
import torch.fx
from torch import nn

from micronorm.convert.rewrite import norm_add
from micronorm.convert.rules import CONVOLUTIONS
from micronorm.convert.tracing import IN_PLACE
from micronorm.nn.branch import conv_and_input

_FACTS = ("size", "dim", "detach")  # of a tensor, without a gradient
_ADDITIONS = (operator.add, torch.add, "add")
_ADDITIONS_TO = (IN_PLACE["iadd"], "add_")  # the first operand
_READERS = (*CONVOLUTIONS, nn.AvgPool2d)


def join_branches(caller: nn.Module, graph: torch.fx.Graph, convolutions: Collection[nn.Module]) -> list[nn.Module]:
    """Edit a caller's graph: `convolutions`, where others take their input later, hand it on to these.

    The others are additions and convolutions, which are known to write nothing to it, and the caller returns one
    tensor: then whoever differentiates that wants both gradients. Two outputs may be differentiated one by one.

    Returns:
        The convolutions of which this was done, one entry per call.
    """
    joined = []
    place = {node: i for i, node in enumerate(graph.nodes)}
    if not isinstance(graph.output_node().args[0], torch.fx.Node):
        return joined
    for node in list(place):
        module = caller.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module is None or module not in convolutions:
            continue
        source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(source, torch.fx.Node):
            continue
        later = [user for user in source.users if place[user] > place[node] and not _asks_for_facts(user)]
        if not later or not all(_only_reads(caller, user, source) for user in later):
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


def _only_reads(caller: nn.Module, user: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Whether a call is known to take a tensor and leave it as it is."""
    if user.op == "call_module":
        return user.args == (source,) and isinstance(_first(caller.get_submodule(str(user.target))), _READERS)
    if user.target is norm_add:  # (norm, x, residual)
        return user.args[1] is not source
    if user.target in _ADDITIONS_TO:
        return user.args[0] is not source
    return user.target in _ADDITIONS


def _first(module: nn.Module) -> nn.Module:
    """The layer that a row of layers begins with; the module itself where it is none."""
    while type(module) is nn.Sequential and len(module):
        module = next((part for part in module if type(part) is not nn.Identity), module[0])
    return module
