"""Table `tab:abl`: layer, instance, group and batch normalization on ImageNet, each without and with WS."""

from micronorm.nn import BN, GN, IN, LN, WS
from micronorm.recipes.protocols import imagenet
from micronorm.recipes.recipe import Table

_RN50 = "resnet50"

TABLE = Table(
    name="abl",
    title="ResNet-50 on ImageNet: LN, IN and GN of one image and BN of 64, each without and with WS",
    rows=(
        imagenet("abl/ln", _RN50, LN(), None, {"top1": 27.22}),
        imagenet("abl/ln-ws", _RN50, LN(), WS(), {"top1": 24.60}),
        imagenet("abl/in", _RN50, IN(), None, {"top1": 29.49}),
        imagenet("abl/in-ws", _RN50, IN(), WS(), {"top1": 28.24}),
        imagenet("abl/gn", _RN50, GN(groups=32), None, {"top1": 24.81}),
        imagenet("abl/gn-ws", _RN50, GN(groups=32), WS(), {"top1": 23.72}),
        imagenet("abl/bn", _RN50, BN(micro_batch=64), None, {"top1": 24.30}, batch=64),
        imagenet("abl/bn-ws", _RN50, BN(micro_batch=64), WS(), {"top1": 23.76}, batch=64),
    ),
)
