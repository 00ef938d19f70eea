"""The data flow of a model: the calls of one forward, which output goes to which call, and its residual branches.

`trace` finds the data flow. Conversion uses it to find the norm after a convolution, and folding to merge layers.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from micronorm.nn.weight import PLAIN


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
        """Return the module's type and name, or the function's name, for messages."""
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
        """Return the calls of each module."""
        calls: dict[nn.Module, list[Node]] = {}
        for node in self.nodes:
            if node.module is not None:
                calls.setdefault(node.module, []).append(node)
        return calls

    @cached_property
    def consumers(self) -> dict[Node, list[Node]]:
        """Return the consumers of each node, one entry per use."""
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


# --- properties of calls ----------------------------------------------------------------------------------------------

# Functions and layers with f(a·x) = a·f(x): a norm after them still removes the scale. The names are without the number
# of dimensions (1d, 2d, 3d), and without the underscores of in-place functions and operators.
_PASSING_WORDS = """
    add iadd radd sub isub rsub mul imul rmul div truediv itruediv neg sum mean max amax maximum stack cat concat
    concatenate chunk split tensor_split unbind getitem setitem narrow select view view_as reshape reshape_as flatten
    unflatten permute transpose movedim moveaxis swapaxes contiguous squeeze unsqueeze expand expand_as repeat
    repeat_interleave to float half bfloat16 double type type_as clone detach roll flip pad relu leaky_relu dropout
    drop_path stochastic_depth max_pool avg_pool adaptive_avg_pool adaptive_max_pool interpolate pixel_shuffle
    pixel_unshuffle channel_shuffle boolean_dispatch

    Identity ReLU LeakyReLU Dropout DropPath StochasticDepth MaxPool AvgPool AdaptiveAvgPool AdaptiveMaxPool
    ReflectionPad ReplicationPad Upsample PixelShuffle PixelUnshuffle ChannelShuffle Flatten Unflatten Permute
"""
_PASSING = frozenset(_PASSING_WORDS.split())
_CONSTANT_PADS = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)  # pass a scale on if the constant is zero

# Calls that use a tensor's shape, dtype and device, but not its values.
_FRESH_WORDS = """
    new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like rand_like randn_like
"""
FRESH = frozenset(_FRESH_WORDS.split())

_ADDITIONS = frozenset({"add", "iadd", "radd"})
# What may lie between the last norm of a branch and the addition: dropout, stochastic depth, gates and scales. A ReLU
# may not: its gradient at zero is zero, so a branch that starts at zero would never train.
_BETWEEN_WORDS = """
    Identity Dropout DropPath StochasticDepth
    dropout drop_path stochastic_depth mul imul rmul div truediv clone contiguous to
"""
_BETWEEN = frozenset(_BETWEEN_WORDS.split())


def function_name(name: str) -> str:
    """Return a function's name without underscores: `relu_` and `__iadd__` as `relu` and `iadd`."""
    return name.strip("_")


def passes_scale(node: Node) -> bool:
    """Return whether a factor on the input is a factor on the output, so that a norm after the call removes it."""
    if isinstance(node.module, _CONSTANT_PADS):
        return node.module.value == 0
    names = [function_name(node.name)] if node.module is None else [c.__name__ for c in type(node.module).__mro__]
    return any(re.sub("[123]d$", "", name) in _PASSING for name in names)


def one_element_per_channel(node: Node, *, flat: bool) -> bool:
    """Return whether the output of a call holds one number per sample and channel.

    If its shape is unknown, a linear layer is taken to have such an output if `flat`: the norm behind it takes N×C.
    """
    if node.shape is None:
        return flat and isinstance(node.module, nn.Linear)
    return len(node.shape) == 2 or (len(node.shape) > 2 and all(size == 1 for size in node.shape[2:]))


# --- residual branches -----------------------------------------------------------------------------------------------


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
