"""Table `hippocampus`, ours: a residual 3-D U-Net on MR volumes of the Medical Segmentation Decathlon, by fold.

Equal budgets, and one volume per micro-batch. The result of a method is the mean of its folds.
"""

from micronorm.engine.optimization import SGD
from micronorm.engine.schedules import Poly
from micronorm.engine.settings import Settings
from micronorm.nn import BN, IN
from micronorm.recipes.protocols import MICRO, make, method
from micronorm.recipes.recipe import Table

TRAINED_FOLDS = (0, 1, 2)
_METHODS = {"in": (IN(), None), "bn": (BN(micro_batch=1), None), **MICRO}
_SETTINGS = Settings(
    steps=2_500,
    step_batch=8,
    optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=3e-5, nesterov=True),
    schedule=Poly(),
)
_NOTES = (
    "ours throughout: the paper has no such table. Patches of 32×48×32 voxels, mirrored along all axes, with random "
    "contrast, brightness and noise. Weight decay, Nesterov's momentum and the schedule are nnU-Net's. lr 0.1 with "
    "momentum 0.9 takes as long strides as its 0.01 with 0.99, which needs more than our steps to gain speed. BCN is "
    'statistics="step"',
)

TABLES = (
    Table(
        name="hippocampus",
        title="Ours: a residual 3-D U-Net on hippocampus volumes, three folds: IN, BN, GN, GN+WS, BCN+WS of one volume",
        rows=tuple(
            make(
                f"hippocampus/{row}-fold{fold}",
                "unet3d",
                f"hippocampus-fold{fold}",
                norm,
                weight,
                settings=_SETTINGS,
                title=f"Residual 3-D U-Net, hippocampus without fold {fold}: {method(norm, weight)} of one volume",
                task="volumes",
                notes=_NOTES,
            )
            for row, (norm, weight) in _METHODS.items()
            for fold in TRAINED_FOLDS
        ),
        default="bcn-ws-fold0",
    ),
)
