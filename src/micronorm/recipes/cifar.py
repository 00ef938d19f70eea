"""Tables on CIFAR: the paper's `cifar1` and `cifar2`; ours are `quick` and `micro_batch`."""

from dataclasses import replace
from functools import partial
from typing import Any

from micronorm.engine.optimization import Milestones
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, BRN, GN, SN, WS
from micronorm.nn.batch_renorm import RenormSchedule
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import OPTIMIZER, OURS, STEP, make, make_rows, shared_samples
from micronorm.recipes.recipe import Recipe, Table

STEP_BATCH = 128
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Images per micro-batch of table `micro_batch`."""

_CIFAR = (
    "the paper does not say, so we took the authors' code: 164 epochs, ×0.1 after 81 and 122, lr 0.1, momentum 0.9, "
    "weight decay 1e-4, crop after padding by 4 and flip; projection in the shortcuts that change shape"
)
_MICRO_CIFAR = "the paper does not say, so we chose: gradients are averaged over 128 images, as in a large batch"
_ZERO_START = (
    "the paper does not say for CIFAR, so we chose: the last norm of every residual block starts at zero (BCN: its "
    "group affine), as in the authors' ImageNet code; from the usual start lr 0.1 destroys a network of this depth in "
    "its first ten steps"
)
_PLAIN_START = "ours: the same row with every norm starting at weight 1, to show what the zero start does"
_QUOTED = (
    "the paper quotes this figure from the paper on DN and gives neither its schedule nor the size of its large batch; "
    "we run it like the rows beside it"
)
_SCHEDULE = "the paper gives no schedule for this table, so we took that of cifar1"
_DN = (
    "the paper quotes Dynamic Normalization's figure and refers to another paper for the method; it is not implemented "
    "here"
)
_RENORM = (
    "the limits of batch renormalization grow between steps 1,000 and 4,000 (r) or 2,500 (d), a tenth of its paper's "
    "schedule, as the training is about a tenth as long; its statistics move by 0.01 per micro-batch"
)

# min{32, channels / 4}, which the paper says of GN; BCN has the same
_GN = GN(min_channels_per_group=4)
_BCN = partial(BCN, min_channels_per_group=4)


def _row(
    name: str,
    network: str,
    data: str,
    norm: NormSpec | None,
    weight: WeightSpec | None,
    error: float | None = None,
    *,
    batch: int = STEP_BATCH,
    notes: tuple[str, ...] = (),
    zero_start: bool = False,
    **fields: Any,
) -> Recipe:
    """Make a recipe with 128 samples per step for 164 epochs, and SGD at 0.1, ×0.1 after 81 and 122 epochs."""
    settings = Settings(epochs=164, step_batch=STEP_BATCH, optimizer=OPTIMIZER, schedule=Milestones((81, 122)))
    whole = shared_samples(norm, batch)[0] == STEP_BATCH
    notes = (*notes, _CIFAR) if whole else (*notes, _CIFAR, _MICRO_CIFAR)
    fields |= {"paper": None if error is None else {"top1": error}, "zero_start": zero_start}
    fields |= {"notes": (*notes, _ZERO_START) if zero_start else notes}
    return make(name, network, data, norm, weight, batch=batch, settings=settings, **fields)


def _cifar1(short: str, data: str, *errors: float) -> tuple[Recipe, ...]:
    bn, bcn_ws, micro_gn, micro_gn_ws, micro_bcn_ws = errors
    plain = partial(_row, network="cifar-resnet110", data=data)
    row = partial(plain, zero_start=True)
    sequential, step, start = _BCN(statistics="sequential"), _BCN(), (_PLAIN_START,)
    micro = f"cifar1/{short}-micro"
    return (
        row(f"cifar1/{short}-bn", norm=BN(), weight=None, error=bn),
        row(f"cifar1/{short}-bcn-ws", norm=_BCN(statistics="batch"), weight=WS(), error=bcn_ws),
        row(f"{micro}-gn", norm=_GN, weight=None, error=micro_gn),
        row(f"{micro}-gn-ws", norm=_GN, weight=WS(), error=micro_gn_ws),
        row(f"{micro}-bcn-ws", norm=sequential, weight=WS(), error=micro_bcn_ws),
        row(f"{micro}-bcn-ws-step", norm=step, weight=WS(), notes=(STEP,)),
        plain(f"{micro}-gn-ws-plain-start", norm=_GN, weight=WS(), notes=start),
        plain(f"{micro}-bcn-ws-step-plain-start", norm=step, weight=WS(), notes=(STEP, *start)),
    )


_CIFAR1 = Table(
    name="cifar1",
    title="ResNet-110 on CIFAR-10 and CIFAR-100: BN and BCN+WS of 128 images, GN, GN+WS and BCN+WS of one",
    rows=(
        *_cifar1("c10", "cifar10", 6.43, 5.90, 7.45, 6.82, 6.31),
        *_cifar1("c100", "cifar100", 28.86, 28.36, 32.86, 29.49, 28.28),
    ),
)


def _cifar2(
    row: str, norm: NormSpec | None, weight: WeightSpec | None, error: float | None, note: str = "", **fields: Any
) -> Recipe:
    notes = (note, _SCHEDULE) if note else (_SCHEDULE,)
    return _row(f"cifar2/{row}", "cifar-resnet18", "cifar10", norm, weight, error, notes=notes, **fields)


def _dn(row: str, error: float, *, batch: int) -> Recipe:
    title = f"ResNet-18, CIFAR-10: DN of {batch} images"
    recipe = _cifar2(row, None, None, error, _QUOTED, batch=batch, unavailable=_DN, title=title)
    return replace(recipe, settings=replace(recipe.settings, unit=1, largest=None))


_CIFAR2 = Table(
    name="cifar2",
    title="ResNet-18 on CIFAR-10: BN, SN, DN and BCN+WS of 128 images; BN, SN and DN of 2, BCN+WS of one",
    rows=(
        _cifar2("bn", BN(), None, 5.20, _QUOTED),
        _cifar2("sn", SN(), None, 5.60, _QUOTED),
        _dn("dn", 5.02, batch=STEP_BATCH),
        _cifar2("bcn-ws", BCN(statistics="batch"), WS(), 4.96),
        _cifar2("micro-bn", BN(micro_batch=2), None, 8.45, _QUOTED),
        _cifar2("micro-sn", SN(micro_batch=2), None, 7.62, _QUOTED),
        _dn("micro-dn", 7.55, batch=2),
        _cifar2("micro-bcn-ws", BCN(statistics="sequential"), WS(), 5.43),
        _cifar2("micro-bcn-ws-step", BCN(), WS(), None, STEP),
    ),
)

_SHORT = Settings(epochs=30, step_batch=STEP_BATCH, optimizer=OPTIMIZER, schedule=Milestones((15, 22)))
_MICRO = {"gn": (_GN, None), "gn-ws": (_GN, WS()), "bcn-ws": (_BCN(), WS())}


def _quick(depth: int) -> tuple[Recipe, ...]:
    methods = {f"rn{depth}-{row}": method for row, method in {"bn": (BN(), None), **_MICRO}.items()}
    return make_rows("quick", f"cifar-resnet{depth}", "cifar10", methods, settings=_SHORT, notes=(OURS,))


_QUICK = Table(
    name="quick",
    title="Ours: ResNet-20 and ResNet-56 on CIFAR-10 for 30 epochs, BN of 128 images, GN, GN+WS and BCN+WS of one",
    rows=(*_quick(20), *_quick(56)),
)


def _renorm(size: int) -> BRN:
    """Return BRN at `size` images; its schedule counts micro-batches, of which a step has 128/size."""
    per_step = STEP_BATCH // size
    schedule = RenormSchedule(warmup=1_000 * per_step, r_until=4_000 * per_step, d_until=2_500 * per_step)
    return BRN(schedule=schedule, micro_batch=size)


_micro_batch = partial(make_rows, "micro_batch", "cifar-resnet20", "cifar10", settings=_SHORT)
_MICRO_BATCH = Table(
    name="micro_batch",
    title="Ours: ResNet-20 on CIFAR-10 for 30 epochs, BN and BRN of 1 to 128 images, GN, GN+WS and BCN+WS of one",
    rows=(
        *_micro_batch({f"bn-{size}": (BN(micro_batch=size), None) for size in SIZES[:-1]}, notes=(OURS,)),
        *_micro_batch({"bn-128": (BN(), None)}, notes=(OURS,)),
        *_micro_batch({f"brn-{size}": (_renorm(size), None) for size in SIZES}, notes=(OURS, _RENORM)),
        *_micro_batch(_MICRO, notes=(OURS,)),
    ),
)

TABLES = (_CIFAR1, _CIFAR2, _QUICK, _MICRO_BATCH)
