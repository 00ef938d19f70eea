"""Tables of video classification: the paper's `tsm`; ours are `motion` and `clips`."""

from typing import Any

from micronorm.data.files import FOLDS
from micronorm.data.videos import FRAMES
from micronorm.engine.optimization import SGD, Cosine, Milestones, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.imagenet import GPUS
from micronorm.recipes.protocols import OPTIMIZER, OURS, STEP, make, make_rows
from micronorm.recipes.recipe import Recipe, Table

STEP_BATCH = 32
CLIPS = STEP_BATCH // GPUS
"""Clips per GPU, which share the statistics of BN in table `tsm`."""
_TSM_NOTES = (
    "the paper starts from its ResNet-50 of ImageNet: give it with --weights",
    "the paper does not say, so we chose: momentum 0.9, weight decay 5e-4 (as in TSM's code), no dropout, a square "
    "crop of 0.66 to 1 of the shorter side, no mirroring; tested on one central crop of the middle frames of 8 equal "
    "parts",
)
_BATCH = 'the paper does not say which form of BCN, so we chose statistics="batch" over the 8 clips of a GPU'
_DRAWN = "training clips are drawn anew in each epoch; epochs and blur were chosen on clips of training digits"
_FOLDS = "a hash of the file name decides about the fold; clips are not mirrored, because the class is the direction"


def _tsm(
    row: str, norm: NormSpec, weight: WeightSpec | None, accuracy: tuple[float, float] | None, start: str, *notes: str
) -> Recipe:
    optimizer = SGD(lr=0.0125, momentum=0.9, weight_decay=5e-4)
    settings = Settings(epochs=45, step_batch=STEP_BATCH, optimizer=optimizer, schedule=Milestones((26, 36)))
    paper = None
    if accuracy is not None:  # the paper prints accuracies, this library errors
        paper = {name: round(100 - value, 2) for name, value in zip(("top1", "top5"), accuracy, strict=True)}
        notes = (*notes, "the paper prints accuracies: top-1 {:.2f} %, top-5 {:.2f} %".format(*accuracy))
    options = {"frames": FRAMES, "task": "video", "paper": paper, "notes": (*notes, *_TSM_NOTES), "start": start}
    return make(f"tsm/{row}", "tsm-resnet50", "something", norm, weight, batch=CLIPS, settings=settings, **options)


def _options(epochs: int, step_batch: int, schedule: Any, *notes: str) -> dict[str, Any]:
    settings = Settings(epochs=epochs, step_batch=step_batch, optimizer=OPTIMIZER, schedule=schedule)
    return {"settings": settings, "frames": FRAMES, "task": "video", "notes": (OURS, *notes)}


_MOTION_OPTIONS = _options(24, 32, Cosine(), _DRAWN)
_CLIPS_OPTIONS = _options(40, 16, Warmup(Cosine(), steps=20), _FOLDS)
_BN, _BCN = BN(micro_batch=CLIPS * FRAMES), BCN(statistics="batch")
_ONE_CLIP = BN(micro_batch=FRAMES)
_METHODS = {
    "bn": (_ONE_CLIP, None),
    "gn": (GN(), None),
    "gn-ws": (GN(), WS()),
    "bn-ws": (_ONE_CLIP, WS()),
    "bcn-ws": (BCN(), WS()),
}
_TSM = Table(
    name="tsm",
    title="TSM, ResNet-50, 8 frames, on Something-Something V1: GN and GN+WS of one clip, BN, BN+WS and BCN+WS of 8",
    rows=(
        _tsm("gn", GN(), None, (42.07, 73.20), "imagenet/rn50-gn"),
        _tsm("gn-ws", GN(), WS(), (44.26, 75.51), "imagenet/rn50-gn-ws"),
        _tsm("bn", _BN, None, (44.30, 74.53), "imagenet_ws/rn50-bn"),
        _tsm("bn-ws", _BN, WS(), (46.49, 76.46), "imagenet_ws/rn50-bn-ws"),
        _tsm("bcn-ws", _BCN, WS(), (45.27, 75.22), "imagenet/rn50-bcn-ws", _BATCH),
        _tsm("micro-bcn-ws-step", BCN(), WS(), None, "imagenet/rn50-bcn-ws-step", STEP),
    ),
)

_MOTION = Table(  # one row takes a few minutes on one CPU core
    name="motion",
    title="Ours: moving digits, one clip at a time; each class is another one played backwards; with and without shift",
    rows=(
        *make_rows("motion", "motion", "motion", _METHODS, **_MOTION_OPTIONS),
        make("motion/no-shift-gn-ws", "motion-no-shift", "motion", GN(), WS(), **_MOTION_OPTIONS),
        make("motion/no-shift-bcn-ws", "motion-no-shift", "motion", BCN(), WS(), **_MOTION_OPTIONS),
    ),
    default="bcn-ws",
)

_CLIPS = Table(
    name="clips",
    title="Ours: hand swipes to the left or right, BCN+WS of one clip, with and without the shift, tested on each fold",
    rows=tuple(
        make(f"clips/{row}-fold{fold}", network, f"clips-{fold}", BCN(), WS(), **_CLIPS_OPTIONS)
        for row, network in (("shift", "clips"), ("no-shift", "clips-no-shift"))
        for fold in range(FOLDS)
    ),
    default="shift-fold0",
)

TABLES = (_TSM, _MOTION, _CLIPS)
