"""Tables of semantic segmentation.

The paper's is `voc`. Ours are `shapes`, `camvid`, `label_maps` (your own images), and `hippocampus`, a residual 3-D
U-Net on MR volumes of the Medical Segmentation Decathlon. In ours nothing is pretrained.
"""

from typing import Any

from micronorm.engine.optimization import SGD, Poly, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, IN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import MICRO, OPTIMIZER, OURS, STEP, make, make_rows, method
from micronorm.recipes.recipe import Recipe, Table

STEP_BATCH = 16
_VOC_NOTES = (
    "the paper starts from its ResNet-101 of ImageNet: give that of the row with --weights",
    "the paper does not say, so we chose: momentum 0.9, weight decay 1e-4, poly power 0.9, scales from 0.5 to 2 (log "
    "uniform), mirroring, a pyramid of 256 channels without dropout, one learning rate for all layers",
)
_VOC_BATCH = 'the paper does not say which form of BCN, so we chose statistics="batch" over the 16 images of a step'


def _settings(**length: Any) -> Settings:
    optimizer = SGD(lr=0.007, momentum=0.9, weight_decay=1e-4)
    return Settings(**length, step_batch=STEP_BATCH, optimizer=optimizer, schedule=Poly())


def _voc(row: str, norm: NormSpec, weight: WeightSpec | None, miou: float | None, start: str, *notes: str) -> Recipe:
    fields = {"paper": None if miou is None else {"miou": miou}, "start": start, "notes": (*notes, *_VOC_NOTES)}
    options = {"settings": _settings(steps=30_000), "task": "segmentation", **fields}
    return make(f"voc/{row}", "deeplabv3-resnet101", "voc", norm, weight, **options)


def _ours(name: str, title: str, *notes: str, **length: int) -> Table:
    methods = {**MICRO, "bn": (BN(), None), "bn-ws": (BN(), WS())}
    options: dict[str, Any] = {"settings": _settings(**length), "task": "segmentation", "notes": notes}
    return Table(
        name=name,
        title=f"Ours: DeepLabV3, ResNet-50, {title}: GN, GN+WS, BCN+WS of one image, BN and BN+WS of 16",
        rows=make_rows(name, "deeplabv3-resnet50", name, methods, **options),
        default="bcn-ws",
    )


_VOC = Table(
    name="voc",
    title="DeepLabV3, ResNet-101, on PASCAL VOC 2012: mIoU of GN and GN+WS of one image, BN, BN+WS and BCN+WS of 16",
    rows=(
        _voc("gn", GN(), None, 74.90, "imagenet/rn101-gn"),
        _voc("gn-ws", GN(), WS(), 77.20, "imagenet/rn101-gn-ws"),
        _voc("bn", BN(), None, 76.49, "imagenet_ws/rn101-bn"),
        _voc("bn-ws", BN(), WS(), 77.15, "imagenet_ws/rn101-bn-ws"),
        _voc("bcn-ws", BCN(statistics="batch"), WS(), 78.22, "imagenet/rn101-bcn-ws", _VOC_BATCH),
        _voc("micro-bcn-ws-step", BCN(), WS(), None, "imagenet/rn101-bcn-ws-step", STEP),
    ),
)

_SHAPES = Table(  # one row takes about half a minute on one CPU core
    name="shapes",
    title="Ours: a small fully convolutional network on generated shapes, BN of 16 images; GN, GN+WS, BCN+WS of one",
    rows=make_rows(
        "shapes",
        "shapes",
        "shapes",
        {"bn": (BN(), None), **MICRO},
        settings=Settings(steps=300, step_batch=STEP_BATCH, optimizer=OPTIMIZER, schedule=Warmup(Poly(), steps=20)),
        task="segmentation",
        notes=(OURS,),
    ),
    default="bcn-ws",
)

_CAMVID = _ours(
    "camvid",
    "on CamVid from scratch",
    'our own table: the paper has none like it. Nothing is pretrained. BCN is statistics="step"',
    steps=3_000,
)

_LABEL_MAPS = _ours(
    "label_maps",
    "on images and label maps of your own",
    'our own table: give the folder with --data, and the length of the run with --epochs. BCN is statistics="step"',
    epochs=100,
)

TRAINED_FOLDS = (0, 1, 2)
_VOLUME_METHODS = {"in": (IN(), None), "bn": (BN(micro_batch=1), None), **MICRO}
_VOLUME_SETTINGS = Settings(
    steps=2_500,
    step_batch=8,
    optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=3e-5, nesterov=True),
    schedule=Poly(),
)
_VOLUME_NOTES = (
    "ours throughout: the paper has no such table. Patches of 32×48×32 voxels, mirrored along all axes, with random "
    "contrast, brightness and noise. Weight decay, Nesterov's momentum and the schedule are nnU-Net's. lr 0.1 with "
    "momentum 0.9 moves as far per gradient as its lr 0.01 with 0.99, and needs fewer steps to reach its speed. BCN is "
    'statistics="step"',
)

_HIPPOCAMPUS = Table(  # the result of a method is the mean of its folds
    name="hippocampus",
    title="Ours: a residual 3-D U-Net on hippocampus volumes, three folds: IN, BN, GN, GN+WS, BCN+WS of one volume",
    rows=tuple(
        make(
            f"hippocampus/{row}-fold{fold}",
            "unet3d",
            f"hippocampus-fold{fold}",
            norm,
            weight,
            settings=_VOLUME_SETTINGS,
            title=f"Residual 3-D U-Net, hippocampus without fold {fold}: {method(norm, weight)} of one volume",
            task="volumes",
            notes=_VOLUME_NOTES,
        )
        for row, (norm, weight) in _VOLUME_METHODS.items()
        for fold in TRAINED_FOLDS
    ),
    default="bcn-ws-fold0",
)

TABLES = (_VOC, _SHAPES, _CAMVID, _LABEL_MAPS, _HIPPOCAMPUS)
