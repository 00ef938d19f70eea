"""The table of blocks with a fused forward: nn.Sequential, and frequent blocks of torchvision, timm, nnU-Net and MONAI.

Each function computes what the method that it replaces computes, with calls of `norm_act`. The digests beside it are
those of the method's sources for which it was written, one per form of the method in the library's versions. Blocks of
a library version with another source stay unfused, and the plan says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.convert.surgery import has_own_forward
from micronorm.nn.backends import resolve_backend
from micronorm.nn.norm_act import can_fuse, fusible_activation, has_hooks, norm_act
from micronorm.ops.pool import MAX_WINDOW, PoolWindow, max_pool2d

Forward = Callable[..., Any]
Fuses = Mapping[str, str]


@dataclass(frozen=True)
class Block:
    """A fused forward and the norms that it fuses.

    Args:
        forward: forward(self, …), with the arguments of the method that it replaces.
        fuses: what follows each norm, as in `register_block`; or a function that returns this for one module.
        method: the method that is replaced.
        source: digests, with spaces between them, of the method's sources for which `forward` was written; None skips
            the comparison.
    """

    forward: Forward
    fuses: Fuses | Callable[[Any], Fuses]
    method: str = "forward"
    source: str | None = None


# --- layers in a row -------------------------------------------------------------------------------------------------


def _run_sequential(self: nn.Sequential, input: Any) -> Any:
    """Run the layers one after the other, like nn.Sequential.forward; a norm computes the activation right after it."""
    layers = list(self)
    activated = False  # by the norm before
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if activated:
            activated = False
        elif following is not None and can_fuse(layer) and fusible_activation(following) is not None:
            input, activated = norm_act(layer, input, following), True
        else:
            input = layer(input)
    return input


def _sequential_fuses(module: nn.Module) -> Fuses:
    names = list(module._modules)
    return {name: following for name, following in pairwise(names) if module._modules[following] is not None}


def _chain(*names: str) -> tuple[Forward, Fuses]:
    """Return the forward that calls these children in order, and what it fuses: the second with the third.

    Args:
        names: a layer, its norm, its activation, and the layers after it. "relu" is the function.
    """
    first, norm, act, *rest = names

    def forward(self: Any, x: Tensor) -> Tensor:
        x = norm_act(getattr(self, norm), getattr(self, first)(x), F.relu if act == "relu" else getattr(self, act))
        for name in rest:
            x = getattr(self, name)(x)
        return x

    return forward, {norm: act}


# --- residual blocks -------------------------------------------------------------------------------------------------


def _conv_norm_relu(self: Any, x: Tensor, layers: int) -> Tensor:
    """Compute conv1, bn1 and relu, and so on up to `layers`."""
    for i in range(1, layers + 1):
        x = norm_act(getattr(self, f"bn{i}"), getattr(self, f"conv{i}")(x), self.relu)
    return x


def _shortcut(self: Any, x: Tensor) -> Tensor:
    downsample = getattr(self, "downsample", None)
    return x if downsample is None else downsample(x)


def _residual_block(layers: int) -> tuple[Forward, Fuses]:
    """Return the forward of a block with `layers` convolutions, and what it fuses: the last norm adds the shortcut."""

    def forward(self: Any, x: Tensor, shortcut: Tensor | None = None, children: Any = None) -> Tensor:
        out = getattr(self, f"conv{layers}")(_conv_norm_relu(self, x, layers - 1))
        residual = _shortcut(self, x) if shortcut is None else shortcut
        return norm_act(getattr(self, f"bn{layers}"), out, self.relu, residual=residual, inplace=True)

    return forward, {**{f"bn{i}": "relu" for i in range(1, layers)}, f"bn{layers}": "add relu"}


def _timm_basic_block(self: Any, x: Tensor) -> Tensor:
    shortcut = x
    x = self.aa(_norm_drop_act(self.bn1, self.conv1(x), self.drop_block, self.act1))
    return _timm_end(self, self.conv2(x), shortcut, self.bn2, self.act2)


def _timm_bottleneck(self: Any, x: Tensor) -> Tensor:
    shortcut = x
    x = norm_act(self.bn1, self.conv1(x), self.act1)
    x = self.aa(_norm_drop_act(self.bn2, self.conv2(x), self.drop_block, self.act2))
    return _timm_end(self, self.conv3(x), shortcut, self.bn3, self.act3)


def _norm_drop_act(norm: nn.Module, x: Tensor, drop: nn.Module, act: nn.Module) -> Tensor:
    return norm_act(norm, x, act) if does_nothing(drop) else act(drop(norm(x)))


def does_nothing(layer: nn.Module | None) -> bool:
    """Return whether an optional layer of a block is absent, or returns its input."""
    return layer is None or (type(layer) is nn.Identity and not has_hooks(layer))


def _timm_end(self: Any, x: Tensor, shortcut: Tensor, norm: nn.Module, act: nn.Module) -> Tensor:
    """Compute the last norm, squeeze-and-excitation, stochastic depth, the addition and the last activation."""
    if does_nothing(self.se) and does_nothing(self.drop_path):
        return norm_act(norm, x, act, residual=_shortcut(self, shortcut), inplace=True)
    x = norm(x)
    x = x if self.se is None else self.se(x)
    x = x if self.drop_path is None else self.drop_path(x)
    x += _shortcut(self, shortcut)
    return act(x)


def _dla_root(self: Any, x_children: list[Tensor]) -> Tensor:
    residual = x_children[0] if self.shortcut else None
    return norm_act(self.bn, self.conv(torch.cat(x_children, 1)), self.relu, residual=residual, inplace=True)


def _senet(self: Any, x: Tensor) -> Tensor:
    """Compute a block of timm's SENet, with two convolutions or three."""
    out = _conv_norm_relu(self, x, 2)
    if hasattr(self, "conv3"):
        out = self.bn3(self.conv3(out))
    return self.relu(self.se_module(out) + _shortcut(self, x))


def _resnest_bottleneck(self: Any, x: Tensor) -> Tensor:
    out = norm_act(self.bn1, self.conv1(x), self.act1)
    out = out if self.avd_first is None else self.avd_first(out)
    out = _norm_drop_act(self.bn2, self.conv2(out), self.drop_block, self.act2)
    out = out if self.avd_last is None else self.avd_last(out)
    out = self.conv3(out)
    dropped = x if self.drop_path is None else self.drop_path(x)
    shortcut = x if self.downsample is None else self.downsample(dropped)
    return norm_act(self.bn3, out, self.act3, residual=shortcut, inplace=True)


def _split_attention(self: Any, x: Tensor) -> Tensor:
    x = _norm_drop_act(self.bn0, self.conv(x), self.drop, self.act0)
    n, channels, height, width = x.shape
    split = (n, self.radix, channels // self.radix)
    if self.radix > 1:
        x = x.reshape(*split, height, width)
    pooled = (x.sum(dim=1) if self.radix > 1 else x).mean((2, 3), keepdim=True)
    attention = self.fc2(norm_act(self.bn1, self.fc1(pooled), self.act1))
    attention = self.rsoftmax(attention).view(n, -1, 1, 1)
    out = (x * attention.reshape(*split, 1, 1)).sum(dim=1) if self.radix > 1 else x * attention
    return out.contiguous()


# --- blocks of 3-D U-Nets --------------------------------------------------------------------------------------------


def _nnunet_block(last: str) -> tuple[Forward, Callable[[Any], Fuses]]:
    """Return the forward of nnU-Net's residual block whose last layer has this name, and what it fuses.

    A layer is a ConvDropoutNormReLU. The last one is a convolution and a norm; the block adds the shortcut to it.
    """
    layers, act = [f"conv{i}" for i in range(1, int(last[-1]))], f"nonlin{last[-1]}"

    def forward(self: Any, x: Tensor) -> Tensor:
        residual, end = self.skip(x), getattr(self, last)
        for name in layers:
            x = getattr(self, name)(x)
        if not _is_conv_and_norm(end):
            x = end(x)
            x += residual
            return getattr(self, act)(x)
        return norm_act(end.norm, end.conv(x), getattr(self, act), residual=residual, inplace=True)

    def fuses(self: Any) -> Fuses:
        plain = not self.apply_stochastic_depth and not self.apply_se and _is_conv_and_norm(getattr(self, last))
        return {f"{last}.norm": f"add {act}"} if plain else {}

    return forward, fuses


def _is_conv_and_norm(layer: Any) -> bool:
    return len(layer.all_modules) == 2 and not has_hooks(layer) and not has_hooks(layer.all_modules)


def _monai_residual(self: Any, inp: Tensor) -> Tensor:
    """Compute MONAI's block of DynUNet with a shortcut."""
    out = norm_act(self.norm1, self.conv1(inp), self.lrelu)
    residual = self.norm3(self.conv3(inp)) if hasattr(self, "conv3") else inp
    return norm_act(self.norm2, self.conv2(out), self.lrelu, residual=residual, inplace=True)


def _monai_basic(self: Any, inp: Tensor) -> Tensor:
    """Compute MONAI's block of DynUNet without a shortcut."""
    return norm_act(self.norm2, self.conv2(norm_act(self.norm1, self.conv1(inp), self.lrelu)), self.lrelu)


# --- whole networks: the norm of their stem --------------------------------------------------------------------------


def _resnet(self: Any, x: Tensor) -> Tensor:
    """Compute torchvision's ResNet."""
    x = self.maxpool(norm_act(self.bn1, self.conv1(x), self.relu))
    x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
    return self.fc(torch.flatten(self.avgpool(x), 1))


def _timm_resnet(self: Any, x: Tensor) -> Tensor:
    if self.grad_checkpointing:
        return type(self).forward_features(self, x)
    x = self.maxpool(norm_act(self.bn1, self.conv1(x), self.act1))
    return self.layer4(self.layer3(self.layer2(self.layer1(x))))


# --- max-pooling on a GPU --------------------------------------------------------------------------------------------

_LARGEST = 2**31  # the kernels count the outputs of a sample in 32 bits
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def can_pool(module: nn.Module) -> bool:
    """Return whether the module is an nn.MaxPool2d with windows that the kernels of `ops.pool` support."""
    return type(module) is nn.MaxPool2d and not has_own_forward(module) and _window(module) is not None


def _max_pool(self: Any, input: Tensor) -> Tensor:
    window = _window(self)
    if window is None or not isinstance(input, Tensor) or not _is_supported(input, window):
        return type(self).forward(self, input)
    return max_pool2d(input, window)


def _is_supported(x: Tensor, window: PoolWindow) -> bool:
    if x.ndim != 4 or x.dtype not in _DTYPES or x.numel() == 0 or torch.jit.is_tracing():
        return False
    height, width = window.output((x.shape[2], x.shape[3]))
    fits = min(height, width) > 0 and x.shape[1] * height * width < _LARGEST
    return fits and resolve_backend("auto", x) == "triton"


def _window(pool: Any) -> PoolWindow | None:
    """Return the windows of an nn.MaxPool2d, or None if the kernels do not support them."""
    kernel, padding, dilation = (_pair(size) for size in (pool.kernel_size, pool.padding, pool.dilation))
    stride = kernel if isinstance(pool.stride, (list, tuple)) and not pool.stride else _pair(pool.stride)
    if kernel is None or stride is None or padding is None or dilation != (1, 1) or pool.return_indices:
        return None
    # torch raises an error for other sizes and paddings.
    valid = min(*kernel, *stride) > 0 and all(0 <= 2 * p <= k for p, k in zip(padding, kernel, strict=True))
    small = kernel[0] * kernel[1] <= MAX_WINDOW and stride[0] * stride[1] <= MAX_WINDOW
    return PoolWindow(kernel, stride, padding, pool.ceil_mode) if valid and small else None


def _pair(size: Any) -> tuple[int, int] | None:
    """Return a size along both axes, or None if it is not one or two integers."""
    sizes = size if isinstance(size, (list, tuple)) else (size,)
    if not 1 <= len(sizes) <= 2 or not all(isinstance(s, int) for s in sizes):
        return None
    return sizes[0], sizes[-1]


MAX_POOL = Block(_max_pool, {})
"""nn.MaxPool2d by kernels. It is not in the table, because no norm takes part."""

# --- the table -------------------------------------------------------------------------------------------------------

_BASIC, _BOTTLENECK = _residual_block(2), _residual_block(3)
_BOTH_RELU = {"bn1": "relu", "bn2": "relu"}
_TIMM_BASIC = {"bn1": "act1 without drop_block", "bn2": "add act2 without se drop_path"}
_TIMM_BOTTLENECK = {"bn1": "act1", "bn2": "act2 without drop_block", "bn3": "add act3 without se drop_path"}
_RESNEST = {"bn1": "act1", "bn2": "act2 without drop_block", "bn3": "add act3"}
_SPLIT_ATTENTION = {"bn0": "act0 without drop", "bn1": "act1"}
_CONV_BN_RELU = _chain("conv", "bn", "relu")


def _dla_root_fuses(self: Any) -> Fuses:
    return {"bn": "add relu" if self.shortcut else "relu"}


BLOCKS: dict[type | str, Block] = {
    nn.Sequential: Block(_run_sequential, _sequential_fuses),
    "torchvision.models.resnet.BasicBlock": Block(*_BASIC, source="9533812a7e08"),
    "torchvision.models.resnet.Bottleneck": Block(*_BOTTLENECK, source="1ae3cab8f6e0"),
    "torchvision.models.resnet.ResNet": Block(_resnet, {"bn1": "relu"}, "_forward_impl", source="c536d32a6e1e"),
    "torchvision.models.googlenet.BasicConv2d": Block(*_CONV_BN_RELU, source="00e4e72d3536"),
    "torchvision.models.inception.BasicConv2d": Block(*_CONV_BN_RELU, source="00e4e72d3536"),
    "timm.models.resnet.BasicBlock": Block(_timm_basic_block, _TIMM_BASIC, source="3580b8e5cdce"),
    "timm.models.resnet.Bottleneck": Block(_timm_bottleneck, _TIMM_BOTTLENECK, source="63981a893bde"),
    "timm.models.resnet.ResNet": Block(_timm_resnet, {"bn1": "act1"}, "forward_features", source="0b6d183bb745"),
    "timm.models.dla.DlaBasic": Block(*_BASIC, source="0cb947bb8771"),
    "timm.models.dla.DlaBottleneck": Block(*_BOTTLENECK, source="3de1558339f9"),
    "timm.models.dla.DlaRoot": Block(_dla_root, _dla_root_fuses, source="27328a2d595d"),
    "timm.models.resnest.ResNestBottleneck": Block(_resnest_bottleneck, _RESNEST, source="9ac1e57434a7"),
    "timm.layers.split_attn.SplitAttn": Block(_split_attention, _SPLIT_ATTENTION, source="f9b0624e38be"),
    "timm.models.senet.Bottleneck": Block(_senet, _BOTH_RELU, source="5ed40b5c4041"),
    "timm.models.senet.SEResNetBlock": Block(_senet, _BOTH_RELU, source="cf2b21e664c8"),
    "dynamic_network_architectures.building_blocks.residual.BasicBlockD": Block(
        *_nnunet_block("conv2"), source="4ac00934c094"
    ),
    "dynamic_network_architectures.building_blocks.residual.BottleneckD": Block(
        *_nnunet_block("conv3"), source="b078a62b411e"
    ),
    "monai.networks.blocks.dynunet_block.UnetResBlock": Block(
        _monai_residual, {"norm1": "lrelu", "norm2": "add lrelu"}, source="748d7494bbaa"
    ),
    "monai.networks.blocks.dynunet_block.UnetBasicBlock": Block(
        _monai_basic, {"norm1": "lrelu", "norm2": "lrelu"}, source="8df7b50bde24"
    ),
    "timm.models.hgnet.ConvBNAct": Block(*_chain("conv", "bn", "act", "lab"), source="d4c548fc3679"),
    "timm.models.nextvit.ConvNormAct": Block(*_chain("conv", "norm", "act"), source="17a099fd02cd"),
    "timm.models.nextvit.ConvAttention": Block(
        *_chain("group_conv3x3", "norm", "act", "projection"), source="384b35c7fbb7"
    ),
}
"""The known blocks, by class or, for libraries that may not be installed, by the class's full name."""
