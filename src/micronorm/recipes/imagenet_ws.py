"""Table `tab:imagenet_ws`: WS on ImageNet beside BN, SN and GN."""

from micronorm.nn import BN, GN, SN, WS
from micronorm.recipes.protocols import imagenet
from micronorm.recipes.recipe import Table

_RN50 = "resnet50"
_RN101 = "resnet101"
_GN = GN(groups=32)
_QUOTED = "the paper quotes this figure from the paper on SN and did not run it; ours runs it like the rows beside it"
_EMPTY = "the paper leaves this cell empty"

TABLE = Table(
    name="imagenet_ws",
    title="ResNet-50 and ResNet-101 on ImageNet: BN of 64 or 32 images, SN and GN of one, BN and GN with WS",
    rows=(
        imagenet("imagenet_ws/rn50-bn", _RN50, BN(micro_batch=64), None, {"top1": 24.30, "top5": 7.19}, batch=64),
        imagenet("imagenet_ws/rn50-sn", _RN50, SN(micro_batch=1), None, {"top1": 25.00}, notes=(_QUOTED,)),
        imagenet("imagenet_ws/rn50-gn", _RN50, _GN, None, {"top1": 24.81, "top5": 7.46}),
        imagenet("imagenet_ws/rn50-bn-ws", _RN50, BN(micro_batch=64), WS(), {"top1": 23.76, "top5": 7.13}, batch=64),
        imagenet("imagenet_ws/rn50-gn-ws", _RN50, _GN, WS(), {"top1": 23.72, "top5": 6.99}),
        imagenet("imagenet_ws/rn101-bn", _RN101, BN(micro_batch=32), None, {"top1": 22.44, "top5": 6.21}, batch=32),
        imagenet("imagenet_ws/rn101-sn", _RN101, SN(micro_batch=1), None, None, notes=(_EMPTY,)),
        imagenet("imagenet_ws/rn101-gn", _RN101, _GN, None, {"top1": 22.87, "top5": 6.51}),
        imagenet("imagenet_ws/rn101-bn-ws", _RN101, BN(micro_batch=32), WS(), {"top1": 21.89, "top5": 6.01}, batch=32),
        imagenet("imagenet_ws/rn101-gn-ws", _RN101, _GN, WS(), {"top1": 22.10, "top5": 6.07}),
    ),
)
