"""Table `tab:cifar1`: ResNet-110 on CIFAR-10 and CIFAR-100, in large batches and one image at a time."""

from functools import partial

from micronorm.nn import BCN, BN, GN, WS
from micronorm.recipes import protocols
from micronorm.recipes.protocols import STEP
from micronorm.recipes.recipe import Recipe, Table

_RN110 = "cifar-resnet110"
# min{32, channels / 4}, which the paper says of GN; BCN has the same
_GN = GN(groups=32, min_channels_per_group=4)
_BATCH = BCN(groups=32, min_channels_per_group=4, statistics="batch")
_SEQUENTIAL = BCN(groups=32, min_channels_per_group=4, statistics="sequential", rate="lr", micro_batch=1)
_STEP = BCN(groups=32, min_channels_per_group=4, statistics="step")
_PLAIN_START = "ours: the same row with every norm starting at weight 1, to show what the zero start does"


def _rows(short: str, data: str, errors: tuple[float, float, float, float, float]) -> tuple[Recipe, ...]:
    bn, bcn_ws, micro_gn, micro_gn_ws, micro_bcn_ws = ({"top1": error} for error in errors)
    name = f"cifar1/{short}"
    start = (_PLAIN_START,)
    cifar = partial(protocols.cifar, zero_start=True)
    return (
        cifar(f"{name}-bn", _RN110, data, BN(), None, bn, batch=128),
        cifar(f"{name}-bcn-ws", _RN110, data, _BATCH, WS(), bcn_ws, batch=128),
        cifar(f"{name}-micro-gn", _RN110, data, _GN, None, micro_gn, batch=1),
        cifar(f"{name}-micro-gn-ws", _RN110, data, _GN, WS(), micro_gn_ws, batch=1),
        cifar(f"{name}-micro-bcn-ws", _RN110, data, _SEQUENTIAL, WS(), micro_bcn_ws, batch=1),
        cifar(f"{name}-micro-bcn-ws-step", _RN110, data, _STEP, WS(), None, batch=1, notes=(STEP,)),
        protocols.cifar(f"{name}-micro-gn-ws-plain-start", _RN110, data, _GN, WS(), None, batch=1, notes=start),
        protocols.cifar(
            f"{name}-micro-bcn-ws-step-plain-start",
            _RN110,
            data,
            _STEP,
            WS(),
            None,
            batch=1,
            notes=(STEP, *start),
        ),
    )


TABLE = Table(
    name="cifar1",
    title="ResNet-110 on CIFAR-10 and CIFAR-100: BN and BCN+WS of 128 images, GN, GN+WS and BCN+WS of one",
    rows=(
        *_rows("c10", "cifar10", (6.43, 5.90, 7.45, 6.82, 6.31)),
        *_rows("c100", "cifar100", (28.86, 28.36, 32.86, 29.49, 28.28)),
    ),
)
