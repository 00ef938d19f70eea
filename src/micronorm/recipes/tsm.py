"""Table `tab:tsm`: TSM on Something-Something V1."""

from micronorm.data.clips import FRAMES
from micronorm.engine.optimization import SGD
from micronorm.engine.schedules import Milestones
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import GPUS, STEP, make
from micronorm.recipes.recipe import Recipe, Table

STEP_BATCH = 32
CLIPS = STEP_BATCH // GPUS
"""Clips per GPU, which share the statistics of BN."""
_NOTES = (
    "the paper starts from its ResNet-50 of ImageNet: give it with --weights",
    "ours, the paper being silent: momentum 0.9, weight decay 5e-4 (as in TSM's code), no dropout, a square crop of "
    "0.66 to 1 of the shorter side, no mirroring; tested on one central crop of the middle frames of 8 equal parts",
)
_BATCH = 'ours, the paper being silent about the form of BCN here: statistics="batch" over the 8 clips of a GPU'


def _row(
    row: str,
    norm: NormSpec,
    weight: WeightSpec | None,
    accuracy: tuple[float, float] | None,
    *,
    start: str,
    batch: int = 1,
    notes: tuple[str, ...] = (),
) -> Recipe:
    settings = Settings(
        epochs=45,
        step_batch=STEP_BATCH,
        optimizer=SGD(lr=0.0125, momentum=0.9, weight_decay=5e-4),
        schedule=Milestones((26, 36)),
    )
    paper = None
    if accuracy is not None:  # the paper prints accuracies, this library errors
        paper = {name: round(100 - value, 2) for name, value in zip(("top1", "top5"), accuracy, strict=True)}
        notes = (*notes, "the paper prints accuracies: top-1 {:.2f} %, top-5 {:.2f} %".format(*accuracy))
    return make(
        f"tsm/{row}",
        "tsm-resnet50",
        "something",
        norm,
        weight,
        batch=batch,
        frames=FRAMES,
        settings=settings,
        task="video",
        paper=paper,
        notes=(*notes, *_NOTES),
        start=start,
    )


_BN = BN(micro_batch=CLIPS * FRAMES)
_BCN = BCN(statistics="batch")
TABLE = Table(
    name="tsm",
    title="TSM, ResNet-50, 8 frames, on Something-Something V1: GN and GN+WS of one clip, BN, BN+WS and BCN+WS of 8",
    rows=(
        _row("gn", GN(), None, (42.07, 73.20), start="imagenet/rn50-gn"),
        _row("gn-ws", GN(), WS(), (44.26, 75.51), start="imagenet/rn50-gn-ws"),
        _row("bn", _BN, None, (44.30, 74.53), start="imagenet_ws/rn50-bn", batch=CLIPS),
        _row("bn-ws", _BN, WS(), (46.49, 76.46), start="imagenet_ws/rn50-bn-ws", batch=CLIPS),
        _row("bcn-ws", _BCN, WS(), (45.27, 75.22), start="imagenet/rn50-bcn-ws", batch=CLIPS, notes=(_BATCH,)),
        _row("micro-bcn-ws-step", BCN(), WS(), None, start="imagenet/rn50-bcn-ws-step", notes=(STEP,)),
    ),
)
