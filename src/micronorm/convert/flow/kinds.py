"""Properties of calls: do they pass a scale on, and do they leave one element per channel?"""

import re

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
