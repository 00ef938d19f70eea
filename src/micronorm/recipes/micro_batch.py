"""Table `micro_batch`, ours: test error against the number of images per micro-batch, ResNet-20 on CIFAR-10."""

from micronorm.engine.schedules import Milestones
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, BRN, GN, WS
from micronorm.nn.batch_renorm import RenormSchedule
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import OPTIMIZER, make
from micronorm.recipes.recipe import Recipe, Table

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
STEP_BATCH = 128

_GN = GN(groups=32, min_channels_per_group=4)
_BCN = BCN(groups=32, min_channels_per_group=4, statistics="step")
_OURS = 'our own table: the paper has none like it. BCN is statistics="step"'
_RENORM = (
    "the limits of batch renormalization grow between steps 1,000 and 4,000 (r) or 2,500 (d), a tenth of its paper's "
    "schedule, as the training is about a tenth as long; its statistics move by 0.01 per micro-batch"
)


def _renorm(size: int) -> BRN:
    """Return BRN at `size` images; its schedule counts micro-batches, of which a step has 128/size."""
    per_step = STEP_BATCH // size
    schedule = RenormSchedule(warmup=1_000 * per_step, r_until=4_000 * per_step, d_until=2_500 * per_step)
    return BRN(schedule=schedule, micro_batch=size)


def _row(name: str, norm: NormSpec, weight: WeightSpec | None, *, batch: int, notes: tuple[str, ...] = ()) -> Recipe:
    settings = Settings(epochs=30, step_batch=STEP_BATCH, optimizer=OPTIMIZER, schedule=Milestones((15, 22)))
    data, notes = "cifar10", (_OURS, *notes)
    return make(
        f"micro_batch/{name}", "cifar-resnet20", data, norm, weight, batch=batch, settings=settings, notes=notes
    )


TABLE = Table(
    name="micro_batch",
    title="Ours: ResNet-20 on CIFAR-10 for 30 epochs, BN and BRN of 1 to 128 images, GN, GN+WS and BCN+WS of one",
    rows=(
        *(_row(f"bn-{size}", BN(micro_batch=size), None, batch=size) for size in SIZES[:-1]),
        _row("bn-128", BN(), None, batch=STEP_BATCH),
        *(_row(f"brn-{size}", _renorm(size), None, batch=size, notes=(_RENORM,)) for size in SIZES),
        _row("gn", _GN, None, batch=1),
        _row("gn-ws", _GN, WS(), batch=1),
        _row("bcn-ws", _BCN, WS(), batch=1),
    ),
)
