"""Table `shapes`, ours: segmentation of generated shapes by a small network.

One row takes about half a minute on one CPU core.
"""

from micronorm.engine.schedules import Poly, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import OPTIMIZER, make
from micronorm.recipes.recipe import Recipe, Table

STEPS = 300
STEP_BATCH = 16
_OURS = 'our own table: the paper has none like it. BCN is statistics="step"'


def _row(row: str, norm: NormSpec, weight: WeightSpec | None, *, batch: int = 1) -> Recipe:
    settings = Settings(
        steps=STEPS,
        step_batch=STEP_BATCH,
        optimizer=OPTIMIZER,
        schedule=Warmup(Poly(), steps=20),
    )
    name, options = f"shapes/{row}", {"task": "segmentation", "notes": (_OURS,)}
    return make(name, "shapes", "shapes", norm, weight, batch=batch, settings=settings, **options)


TABLE = Table(
    name="shapes",
    title="Ours: a small fully convolutional network on generated shapes, BN of 16 images; GN, GN+WS, BCN+WS of one",
    rows=(
        _row("bn", BN(), None, batch=STEP_BATCH),
        _row("gn", GN(), None),
        _row("gn-ws", GN(), WS()),
        _row("bcn-ws", BCN(), WS()),
    ),
    default="bcn-ws",
)
