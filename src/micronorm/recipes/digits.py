"""Table `digits`, ours: the demo's experiment, a small network on scikit-learn's digits, about a minute on a CPU."""

from micronorm.engine.optimization import SGD, Cosine
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import make, shared_samples
from micronorm.recipes.recipe import Recipe, Table

LEARNING_RATE = 0.02
EPOCHS = 8
STEP_BATCH = 64
_OURS = 'ours throughout: the paper has no such table. BCN is statistics="step"'


def _row(row: str, norm: NormSpec, weight: WeightSpec | None, *, batch: int = 1) -> Recipe:
    unit, largest = shared_samples(norm, batch)
    settings = Settings(
        epochs=EPOCHS,
        step_batch=STEP_BATCH,
        optimizer=SGD(lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-4),
        schedule=Cosine(),
        unit=unit,
        largest=largest,
    )
    return make(f"digits/{row}", "digits", "digits", norm, weight, batch=batch, settings=settings, notes=(_OURS,))


TABLE = Table(
    name="digits",
    title="Ours: a small residual network on 8×8 digits, BN of 64 images; BN, GN, GN+WS and BCN+WS of one",
    rows=(
        _row("bn-64", BN(), None, batch=STEP_BATCH),
        _row("bn", BN(micro_batch=1), None),
        _row("gn", GN(), None),
        _row("gn-ws", GN(), WS()),
        _row("bcn-ws", BCN(), WS()),
    ),
    default="bcn-ws",
)
