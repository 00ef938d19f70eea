"""Table `motion`, ours: generated clips whose classes differ by the order of time.

One row takes a few minutes on one CPU core.
"""

from micronorm.data.clips import FRAMES
from micronorm.engine.schedules import Cosine
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import OPTIMIZER, make
from micronorm.recipes.recipe import Recipe, Table

EPOCHS = 8
STEP_BATCH = 32
_OURS = 'ours throughout: the paper has no such table. BCN is statistics="step"'


def _row(row: str, norm: NormSpec, weight: WeightSpec | None) -> Recipe:
    settings = Settings(epochs=EPOCHS, step_batch=STEP_BATCH, optimizer=OPTIMIZER, schedule=Cosine())
    return make(
        f"motion/{row}",
        "motion-no-shift" if row.startswith("no-shift") else "motion",
        "motion",
        norm,
        weight,
        batch=1,
        frames=FRAMES,
        settings=settings,
        task="video",
        notes=(_OURS,),
    )


TABLE = Table(
    name="motion",
    title="Ours: moving digits, one clip at a time; each class is another one played backwards; with and without shift",
    rows=(
        _row("bn", BN(micro_batch=FRAMES), None),
        _row("gn", GN(), None),
        _row("gn-ws", GN(), WS()),
        _row("bn-ws", BN(micro_batch=FRAMES), WS()),
        _row("bcn-ws", BCN(), WS()),
        _row("no-shift-gn-ws", GN(), WS()),
        _row("no-shift-bcn-ws", BCN(), WS()),
    ),
    default="bcn-ws",
)
