"""Table `tab:imagenet`: BCN on ImageNet beside GN and GN+WS."""

from micronorm.nn import BCN, GN, WS
from micronorm.recipes.protocols import STEP, imagenet
from micronorm.recipes.recipe import Table

_RN50 = "resnet50"
_RN101 = "resnet101"
_GN = GN(groups=32)
_BATCH = BCN(groups=32, statistics="batch")
_CAPTION = (
    "the caption says 32 or 64 images per GPU for all rows; a GN row does not depend on it, and its figures are those "
    "that other tables give for one image"
)
_LARGE = 'the caption\'s 64 (ResNet-50) or 32 (ResNet-101) images per GPU without synchronization: statistics="batch"'

TABLE = Table(
    name="imagenet",
    title="ResNet-50 and ResNet-101 on ImageNet: GN, GN+WS, BCN+WS",
    rows=(
        imagenet("imagenet/rn50-gn", _RN50, _GN, None, {"top1": 24.81, "top5": 7.46}, notes=(_CAPTION,)),
        imagenet("imagenet/rn50-gn-ws", _RN50, _GN, WS(), {"top1": 23.72, "top5": 6.99}, notes=(_CAPTION,)),
        imagenet("imagenet/rn50-bcn-ws", _RN50, _BATCH, WS(), {"top1": 23.09, "top5": 6.55}, batch=64, notes=(_LARGE,)),
        imagenet("imagenet/rn50-bcn-ws-step", _RN50, BCN(groups=32), WS(), None, notes=(STEP,)),
        imagenet("imagenet/rn101-gn", _RN101, _GN, None, {"top1": 22.87, "top5": 6.51}, notes=(_CAPTION,)),
        imagenet("imagenet/rn101-gn-ws", _RN101, _GN, WS(), {"top1": 22.10, "top5": 6.07}, notes=(_CAPTION,)),
        imagenet(
            "imagenet/rn101-bcn-ws", _RN101, _BATCH, WS(), {"top1": 21.29, "top5": 5.60}, batch=32, notes=(_LARGE,)
        ),
        imagenet("imagenet/rn101-bcn-ws-step", _RN101, BCN(groups=32), WS(), None, notes=(STEP,)),
    ),
)
