"""Table `tab:voc`: DeepLabV3 on PASCAL VOC 2012. Ours: `camvid`, and `label_maps` for images of the user.

All have the same network and protocol. Nothing is pretrained in ours.
"""

from micronorm.engine.optimization import SGD
from micronorm.engine.schedules import Poly
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import STEP, make
from micronorm.recipes.recipe import Recipe, Table

STEP_BATCH = 16
STEPS = {"voc": 30_000, "camvid": 3_000}
EPOCHS = {"label_maps": 100}
_NETWORKS = {"voc": "deeplabv3-resnet101", "camvid": "deeplabv3-resnet50", "label_maps": "deeplabv3-resnet50"}
_NOTES = {
    "voc": (
        "the paper starts from its ResNet-101 of ImageNet: give that of the row with --weights",
        "ours, the paper being silent: momentum 0.9, weight decay 1e-4, poly power 0.9, scales from 0.5 to 2 (log "
        "uniform), mirroring, a pyramid of 256 channels without dropout, one learning rate for all layers",
    ),
    "camvid": ('ours throughout: the paper has no such table. Nothing is pretrained. BCN is statistics="step"',),
    "label_maps": (
        "ours throughout: give the folder with --data, and the length of the run with --epochs. BCN is "
        'statistics="step"',
    ),
}
_BATCH = 'ours, the paper being silent about the form of BCN here: statistics="batch" over the 16 images of a step'


def _row(
    table: str,
    row: str,
    norm: NormSpec,
    weight: WeightSpec | None,
    miou: float | None = None,
    start: str | None = None,
    *,
    batch: int = 1,
    notes: tuple[str, ...] = (),
) -> Recipe:
    settings = Settings(
        epochs=EPOCHS.get(table),
        steps=STEPS.get(table),
        step_batch=STEP_BATCH,
        optimizer=SGD(lr=0.007, momentum=0.9, weight_decay=1e-4),
        schedule=Poly(),
    )
    return make(
        f"{table}/{row}",
        _NETWORKS[table],
        table,
        norm,
        weight,
        batch=batch,
        settings=settings,
        task="segmentation",
        start=start,
        paper=None if miou is None else {"miou": miou},
        notes=(*notes, *_NOTES[table]),
    )


TABLE = Table(
    name="voc",
    title="DeepLabV3, ResNet-101, on PASCAL VOC 2012: mIoU of GN and GN+WS of one image, BN, BN+WS and BCN+WS of 16",
    rows=(
        _row("voc", "gn", GN(), None, 74.90, "imagenet/rn101-gn"),
        _row("voc", "gn-ws", GN(), WS(), 77.20, "imagenet/rn101-gn-ws"),
        _row("voc", "bn", BN(), None, 76.49, "imagenet_ws/rn101-bn", batch=STEP_BATCH),
        _row("voc", "bn-ws", BN(), WS(), 77.15, "imagenet_ws/rn101-bn-ws", batch=STEP_BATCH),
        _row(
            "voc",
            "bcn-ws",
            BCN(statistics="batch"),
            WS(),
            78.22,
            "imagenet/rn101-bcn-ws",
            batch=STEP_BATCH,
            notes=(_BATCH,),
        ),
        _row("voc", "micro-bcn-ws-step", BCN(), WS(), None, "imagenet/rn101-bcn-ws-step", notes=(STEP,)),
    ),
)


def _ours(name: str, title: str) -> Table:
    rows = (
        _row(name, "gn", GN(), None),
        _row(name, "gn-ws", GN(), WS()),
        _row(name, "bcn-ws", BCN(), WS()),
        _row(name, "bn", BN(), None, batch=STEP_BATCH),
        _row(name, "bn-ws", BN(), WS(), batch=STEP_BATCH),
    )
    return Table(
        name=name,
        title=f"Ours: DeepLabV3, ResNet-50, {title}: GN, GN+WS, BCN+WS of one image, BN and BN+WS of 16",
        rows=rows,
        default="bcn-ws",
    )


CAMVID = _ours("camvid", "on CamVid from scratch")
LABEL_MAPS = _ours("label_maps", "on images and label maps of your own")
