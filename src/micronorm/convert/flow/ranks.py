"""Infer the number of axes of each call's output."""

import re

from torch import nn

from micronorm.convert.flow.graph import Flow, Node
from micronorm.convert.flow.kinds import function_name

# Layers that take inputs of one rank. BatchNorm1d is not among them: it takes N×C and N×C×L.
_OF_ONE_RANK = re.compile("(?:Conv|ConvTranspose|(?:Adaptive)?(?:Max|Avg)Pool)([123])d|BatchNorm([23])d")
_KEEPING_FILES = ("activation", "batchnorm", "dropout", "normalization", "padding")  # of torch.nn.modules
_KEEPING_TYPES = frozenset({"DropPath", "StochasticDepth"})  # of timm and torchvision, which may be absent
_KEEPING_WORDS = """
    add iadd radd sub isub rsub mul imul rmul div truediv cat concat concatenate relu leaky_relu silu gelu hardswish
    hardsigmoid sigmoid tanh elu softplus relu6 softmax matmul dropout dropout2d dropout3d drop_path stochastic_depth
    interpolate pad contiguous clone detach to float linear transpose movedim roll boolean_dispatch
"""
_KEEPING_FUNCTIONS = frozenset(_KEEPING_WORDS.split())


def ranks(flow: Flow) -> dict[Node, int]:
    """Return the number of axes of each call's output; calls for which it is not certain have no entry."""
    known: dict[Node, int] = {}
    for node in flow.nodes:  # in the order of execution, so that inputs come first
        rank = _rank(node, known)
        if rank is not None:
            known[node] = rank
    return known


def _rank(node: Node, known: dict[Node, int]) -> int | None:
    if node.shape is not None:
        return len(node.shape)
    if node.module is None:
        return _of_function(node, known)
    for base in type(node.module).__mro__:
        if base.__module__.startswith("torch.nn.") and (match := _OF_ONE_RANK.fullmatch(base.__name__)):
            return int(match[1] or match[2]) + 2
    if isinstance(node.module, nn.Flatten):
        return _flattened(node.module.start_dim, node.module.end_dim, _of_inputs(node, known))
    return _of_inputs(node, known) if _keeps_rank(node.module) else None


def _keeps_rank(module: nn.Module) -> bool:
    path = type(module).__module__.split(".")
    if isinstance(module, nn.MultiheadAttention):  # defined in torch.nn.modules.activation
        return False
    of_torch = path[:3] == ["torch", "nn", "modules"] and path[-1] in _KEEPING_FILES
    others = path[:2] == ["micronorm", "nn"] or type(module).__name__ in _KEEPING_TYPES
    return of_torch or others or isinstance(module, nn.Linear | nn.Identity | nn.Upsample)


def _of_function(node: Node, known: dict[Node, int]) -> int | None:
    name, rest = function_name(node.name), node.args[1:]
    if name == "flatten":
        start = node.kwargs.get("start_dim", rest[0] if rest else 0)
        end = node.kwargs.get("end_dim", rest[1] if len(rest) > 1 else -1)
        return _flattened(start, end, _of_inputs(node, known))
    if name in ("view", "reshape", "permute") and rest:
        sizes = rest[0] if isinstance(rest[0], list | tuple) else rest
        return len(sizes) if len(sizes) > 1 else None  # one may be a whole torch.Size, or a dtype
    if name in ("view_as", "reshape_as") and rest:
        return known.get(rest[0])
    if name[-2:] in ("1d", "2d", "3d") and ("_pool" in name or name.startswith("conv")):
        return int(name[-2]) + 2
    return _of_inputs(node, known) if name in _KEEPING_FUNCTIONS else None


def _flattened(start: int, end: int, rank: int | None) -> int | None:
    """Return the number of axes after flatten(start, end)."""
    if end == -1 and start >= 0:
        return start + 1
    return rank - (end - start) if rank is not None and 0 <= start <= end else None


def _of_inputs(node: Node, known: dict[Node, int]) -> int | None:
    """Return the most axes that an input has, as in broadcasting; None if one input is not known."""
    if not node.inputs or any(source not in known for source in node.inputs):
        return None
    return max(known[source] for source in node.inputs)
