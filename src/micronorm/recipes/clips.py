"""Table `clips`, ours: small networks on 230 videos of hand swipes to the left and to the right, in five folds."""

from micronorm.data.clips import FRAMES
from micronorm.data.files import FOLDS
from micronorm.engine.schedules import Cosine, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, WS
from micronorm.recipes.protocols import OPTIMIZER, make
from micronorm.recipes.recipe import Recipe, Table

EPOCHS = 40
STEP_BATCH = 16
_NOTES = (
    'ours throughout: the paper has no such table. BCN is statistics="step"',
    "a hash of the file name decides about the fold; clips are not mirrored, because the class is the direction",
)


def _row(row: str, fold: int) -> Recipe:
    settings = Settings(epochs=EPOCHS, step_batch=STEP_BATCH, optimizer=OPTIMIZER, schedule=Warmup(Cosine(), steps=20))
    return make(
        f"clips/{row}-fold{fold}",
        "clips-no-shift" if row == "no-shift" else "clips",
        f"clips-{fold}",
        BCN(),
        WS(),
        batch=1,
        frames=FRAMES,
        settings=settings,
        task="video",
        notes=_NOTES,
    )


TABLE = Table(
    name="clips",
    title="Ours: hand swipes to the left or right, BCN+WS of one clip, with and without the shift, tested on each fold",
    rows=tuple(_row(row, fold) for row in ("shift", "no-shift") for fold in range(FOLDS)),
    default="shift-fold0",
)
