"""Table `tab:ind_abl`: the two halves of WS, subtracting the mean (`eq:9`) and dividing by the deviation (`eq:10`)."""

from micronorm.nn import GN, WS
from micronorm.recipes.protocols import imagenet
from micronorm.recipes.recipe import Table

_RN50 = "resnet50"
_GN = GN(groups=32)
_RMS = "ours: without its mean taken off first, a kernel is divided by its root mean square"

TABLE = Table(
    name="ind_abl",
    title="ResNet-50 with GN of one image on ImageNet: WS and its two halves",
    rows=(
        imagenet("ind_abl/gn", _RN50, _GN, None, {"top1": 24.81}),
        imagenet("ind_abl/gn-mean", _RN50, _GN, WS(center=True, scale=False), {"top1": 23.96}),
        imagenet("ind_abl/gn-std", _RN50, _GN, WS(center=False, scale=True), {"top1": 24.60}, notes=(_RMS,)),
        imagenet("ind_abl/gn-ws", _RN50, _GN, WS(), {"top1": 23.72}),
    ),
)
