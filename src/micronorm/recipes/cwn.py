"""Table `tab:cwn`: WS beside weight normalization and centered weight normalization."""

from micronorm.nn import CWN, GN, WN, WS
from micronorm.recipes.protocols import imagenet
from micronorm.recipes.recipe import Table

_RN50 = "resnet50"
_GN = GN(groups=32)
_LENGTH = "ours: our form of the layer, with a length per output channel that starts at the kernel's own"

TABLE = Table(
    name="cwn",
    title="ResNet-50 with GN of one image on ImageNet: WN, CWN and WS",
    rows=(
        imagenet("cwn/gn", _RN50, _GN, None, {"top1": 24.81}),
        imagenet("cwn/gn-wn", _RN50, _GN, WN(), {"top1": 25.09}, notes=(_LENGTH,)),
        imagenet("cwn/gn-cwn", _RN50, _GN, CWN(), {"top1": 24.23}, notes=(_LENGTH,)),
        imagenet("cwn/gn-ws", _RN50, _GN, WS(), {"top1": 23.72}),
    ),
)
