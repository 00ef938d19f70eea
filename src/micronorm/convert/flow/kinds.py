"""Properties of calls: do they pass a scale on, and do they leave one element per channel?"""

import re
from typing import Any

from torch import nn

from micronorm.convert.flow.graph import Node

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

_GLOBAL_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_REARRANGING = frozenset({"permute", "transpose", "movedim", "moveaxis", "swapaxes"})
_GROWING = frozenset({"interpolate", "upsample", "expand", "expand_as", "repeat", "pad", "roll", "pixel_shuffle"})


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

    If the model was run, the shape decides. Otherwise the calls before it do: there is a global pooling on every path,
    and nothing after it enlarges the map. With `flat`, for a norm that may take N×C, a linear layer counts as well.
    """
    if node.shape is not None:
        return len(node.shape) == 2 or (len(node.shape) > 2 and all(size == 1 for size in node.shape[2:]))
    # Every path back must reach a pooling before a call that enlarges the map, and before the model's input. This is a
    # loop because paths through a deep network are longer than Python's stack.
    paths, seen = [node], set()
    while paths:
        node = paths.pop()
        if node in seen or _is_global_pool(node) or (flat and isinstance(node.module, nn.Linear)):
            continue
        seen.add(node)
        if not node.inputs or _enlarges(node):
            return False
        paths.extend(node.inputs)
    return True


def _enlarges(node: Node) -> bool:
    """Return whether the output of a call may hold several elements per channel if its input holds one."""
    if node.module is None:
        return function_name(node.name) in _REARRANGING | _GROWING or _reshapes_to_a_map(node)
    if isinstance(node.module, _CONVOLUTIONS):
        return any(size != 1 for size in node.module.kernel_size)
    return isinstance(node.module, nn.Linear | nn.Upsample | nn.PixelShuffle | nn.ConvTranspose2d)


def _is_global_pool(node: Node) -> bool:
    if isinstance(node.module, _GLOBAL_POOLS):
        return _is_one(node.module.output_size)
    name = function_name(node.name)
    if node.module is not None:
        return False
    if name.startswith("adaptive_"):
        size = node.kwargs.get("output_size", node.args[1] if len(node.args) > 1 else None)
        return _is_one(size)
    if name in ("mean", "amax", "sum"):
        dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if isinstance(dims, int):  # the map may have been flattened before
            source = node.inputs[0] if node.inputs else None
            return dims in (2, -1) and source is not None and _is_flat_map(source)
        return isinstance(dims, list | tuple) and len(dims) >= 2 and set(dims) <= {2, 3, 4, -1, -2, -3}
    return False


def _is_flat_map(node: Node) -> bool:
    """Return whether the call is x.flatten(2): N×C×… to N×C×S."""
    return (
        function_name(node.name) == "flatten"
        and node.kwargs.get("start_dim", node.args[1] if len(node.args) > 1 else 0) == 2
    )


def _reshapes_to_a_map(node: Node) -> bool:
    """Return whether the call may turn N×C numbers into a map: view(n, 64, 4, 4), or sizes that are not known."""
    if function_name(node.name) not in ("view", "reshape", "unflatten"):
        return False
    sizes = node.args[1:]
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    return len(sizes) > 2 and any(size != 1 for size in sizes[2:])


def _is_one(size: Any) -> bool:
    sizes = size if isinstance(size, list | tuple) else (size,)
    return all(s == 1 for s in sizes)
