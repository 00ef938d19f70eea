"""Table `tab:cifar2`: ResNet-18 on CIFAR-10 beside switchable and dynamic normalization."""

from typing import Any

from micronorm.nn import BCN, BN, SN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import STEP, cifar
from micronorm.recipes.recipe import Recipe, Table

_QUOTED = (
    "the paper quotes this figure from the paper on DN and gives neither its schedule nor the size of its large batch; "
    "we run it like the rows beside it"
)
_SCHEDULE = "the paper gives no schedule for this table, so we took that of cifar1"
_DN = (
    "the paper quotes Dynamic Normalization's figure and refers to another paper for the method; it is not implemented "
    "here"
)


def _row(
    row: str,
    norm: NormSpec | None,
    weight: WeightSpec | None,
    error: float | None,
    *,
    batch: int,
    note: str = _SCHEDULE,
    **fields: Any,
) -> Recipe:
    paper = None if error is None else {"top1": error}
    notes = tuple(dict.fromkeys((note, _SCHEDULE)))
    name = f"cifar2/{row}"
    return cifar(name, "cifar-resnet18", "cifar10", norm, weight, paper, batch=batch, notes=notes, **fields)


def _dn(row: str, error: float, *, batch: int) -> Recipe:
    title = f"ResNet-18, CIFAR-10: DN of {batch} images"
    return _row(row, None, None, error, batch=batch, note=_QUOTED, unavailable=_DN, title=title)


TABLE = Table(
    name="cifar2",
    title="ResNet-18 on CIFAR-10: BN, SN, DN and BCN+WS of 128 images; BN, SN and DN of 2, BCN+WS of one",
    rows=(
        _row("bn", BN(), None, 5.20, batch=128, note=_QUOTED),
        _row("sn", SN(), None, 5.60, batch=128, note=_QUOTED),
        _dn("dn", 5.02, batch=128),
        _row("bcn-ws", BCN(groups=32, statistics="batch"), WS(), 4.96, batch=128),
        _row("micro-bn", BN(micro_batch=2), None, 8.45, batch=2, note=_QUOTED),
        _row("micro-sn", SN(micro_batch=2), None, 7.62, batch=2, note=_QUOTED),
        _dn("micro-dn", 7.55, batch=2),
        _row("micro-bcn-ws", BCN(groups=32, statistics="sequential", rate="lr", micro_batch=1), WS(), 5.43, batch=1),
        _row("micro-bcn-ws-step", BCN(groups=32, statistics="step"), WS(), None, batch=1, note=STEP),
    ),
)
