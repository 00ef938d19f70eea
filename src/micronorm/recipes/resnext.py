"""Table `tab:resnext`: ResNeXt on ImageNet, GN without and with WS."""

from micronorm.nn import GN, WS
from micronorm.recipes.protocols import imagenet
from micronorm.recipes.recipe import Table

_RX50 = "resnext50-32x4d"
_RX101 = "resnext101-32x4d"
_GN = GN(groups=32)
_STEP = "the paper gives the iteration size, 32 images of one GPU; 4 GPUs, as for ResNet-101, are ours"

TABLE = Table(
    name="resnext",
    title="ResNeXt-50 and ResNeXt-101 32×4d on ImageNet: GN of one image without and with WS",
    rows=(
        imagenet("resnext/rx50-gn", _RX50, _GN, None, {"top1": 24.24, "top5": 7.27}, notes=(_STEP,)),
        imagenet("resnext/rx50-gn-ws", _RX50, _GN, WS(), {"top1": 22.71, "top5": 6.38}, notes=(_STEP,)),
        imagenet("resnext/rx101-gn", _RX101, _GN, None, {"top1": 22.86, "top5": 6.51}, notes=(_STEP,)),
        imagenet("resnext/rx101-gn-ws", _RX101, _GN, WS(), {"top1": 21.80, "top5": 6.03}, notes=(_STEP,)),
    ),
)
