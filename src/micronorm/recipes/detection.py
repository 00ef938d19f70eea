"""Tables of detectors on torchvision's R-CNN.

The paper's tables on COCO are `mask`, Mask R-CNN for the 2× schedule, and `fast`, Faster R-CNN for the 1× schedule.
Ours are `nuclei` and `coco128`, Mask R-CNN on small sets, and `tiny_imagenet`, classifiers to start from. `objects` and
`image_folders` are detectors and classifiers for data of your own.
"""

from functools import partial
from typing import Any

from micronorm.engine.optimization import SGD, Cosine, ParameterGroup, StepMilestones, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import MICRO, OURS, STEP, frozen_bn, make, make_rows
from micronorm.recipes.recipe import Recipe, Table

BOXES = ("AP", "AP50", "AP75", "APl", "APm", "APs")
"""The columns of the paper's tables: averages over IoU, at 0.5, at 0.75, and of large, medium and small objects."""
_TABLES = {  # detector, task, length of the schedule, and columns
    "mask": ("maskrcnn", "instances", 2, (*BOXES, *(f"mask_{name}" for name in BOXES))),
    "fast": ("fasterrcnn", "detection", 1, BOXES),
}
# Images per step, learning rate and steps of the 1× schedule of the detectors. ResNet-101 has one image per GPU.
_LENGTH = {"resnet50": (8, 0.01, 180_000), "resnet101": (4, 0.005, 360_000)}
STEM = ("backbone.body.conv1.", "backbone.body.bn1.", "backbone.body.layer1.")
"""What detectors that start from a classifier do not train: the stem and the first stage."""
_PROTOCOL = (
    "from the framework that the paper names (maskrcnn-benchmark): drops at 2/3 and 8/9 of the schedule, 500 steps of "
    "linear warm-up from 1/3, biases at twice the rate and without decay, stem and first stage frozen, norms in the "
    "pyramid (the caption leaves them out)",
    "ours: torchvision's losses, of each image alone; its ResNet has the stride in the 3×3 convolutions",
)
_FORM = (
    'the paper does not say which form of BCN, so we chose Algorithm 1 (statistics="sequential"), image by image in '
    "backbone and pyramid, and with all regions of an image as one micro-batch in the heads"
)
_ALG1 = BCN(statistics="sequential")


def _row(
    table: str,
    row: str,
    norm: NormSpec | None,
    weight: WeightSpec | None,
    *figures: float,
    variant: str = "",
    start: str | None = None,
    notes: tuple[str, ...] = (),
) -> Recipe:
    """Make the recipe of a detector that starts from the ImageNet classifier of the same row, or from `start`.

    Args:
        table: "mask" or "fast".
        row: its name, which begins with the backbone, rn50 or rn101.
        norm: of the detector.
        weight: of the detector.
        figures: the paper's, in the order of its columns.
        variant: the end of the network's name.
        start: the recipe of the classifier.
        notes: put before those of the protocol.
    """
    kind, task, times, columns = _TABLES[table]
    backbone = row.partition("-")[0].replace("rn", "resnet")
    step_batch, lr, length = _LENGTH[backbone]
    steps, start = times * length, start or f"imagenet/{row}"
    settings = Settings(
        steps=steps,
        step_batch=step_batch,
        optimizer=SGD(lr=lr, momentum=0.9, weight_decay=1e-4),
        schedule=Warmup(StepMilestones((steps * 2 // 3, steps * 8 // 9)), steps=500, start=1 / 3),
        groups=(ParameterGroup(names="*bias", lr_factor=2.0, weight_decay=0.0),),
    )
    if isinstance(norm, BCN):
        notes = (STEP if norm.statistics == "step" else _FORM, *notes)
    fields: dict[str, Any] = {
        "task": task,
        "paper": dict(zip(columns, figures, strict=True)) if figures else None,
        "notes": (*notes, *_PROTOCOL, f"starts from the weights of {start}: give them with --weights"),
        "start": start,
        "frozen": STEM,
    }
    return make(
        f"{table}/{row}", f"{kind}-{backbone}{variant}", "coco", norm, weight, settings=settings, batch=1, **fields
    )


_mask, _fast = partial(_row, "mask"), partial(_row, "fast")

_MASK = Table(
    name="mask",
    title="Mask R-CNN with FPN, ResNet-50 and ResNet-101, on COCO: GN, GN+WS and BCN+WS of one or two images per GPU",
    rows=(
        _mask("rn50-gn", GN(), None, 39.8, 60.5, 43.4, 52.4, 42.9, 23.0, 36.1, 57.4, 38.7, 53.6, 38.6, 16.9),
        _mask("rn50-gn-ws", GN(), WS(), 40.8, 61.6, 44.8, 52.7, 44.0, 23.5, 36.5, 58.5, 38.9, 53.5, 39.3, 16.6),
        _mask("rn50-bcn-ws", _ALG1, WS(), 41.4, 62.2, 45.2, 54.7, 45.0, 24.2, 37.3, 59.4, 39.8, 55.0, 40.1, 17.9),
        _mask("rn50-bcn-ws-step", BCN(), WS()),
        _mask("rn101-gn", GN(), None, 41.5, 62.0, 45.5, 54.8, 45.0, 24.1, 37.0, 59.0, 39.6, 54.5, 40.0, 17.5),
        _mask("rn101-gn-ws", GN(), WS(), 42.7, 63.6, 46.8, 56.0, 46.0, 25.7, 37.9, 60.4, 40.7, 56.3, 40.6, 18.2),
        _mask("rn101-bcn-ws", _ALG1, WS(), 43.6, 64.4, 47.9, 57.4, 47.5, 25.6, 39.1, 61.4, 42.2, 57.3, 42.1, 19.1),
        _mask("rn101-bcn-ws-step", BCN(), WS()),
        _mask(
            "rn50-bcn-ws-step-plain-fpn",
            BCN(),
            WS(),
            variant="-plain-fpn",
            start="imagenet/rn50-bcn-ws-step",
            notes=("ours: no norm in the pyramid, as the caption has it",),
        ),
        frozen_bn(
            _mask(
                "rn50-frozen-bn",
                None,
                None,
                variant="-frozen",
                start="imagenet_ws/rn50-bn",
                notes=("ours: the usual baseline, with frozen BN in the backbone and no norm elsewhere",),
            )
        ),
    ),
)

_FAST = Table(
    name="fast",
    title="Faster R-CNN with FPN, ResNet-50 and ResNet-101, on COCO: GN, GN+WS and BCN+WS of one or two images per GPU",
    rows=(
        _fast("rn50-gn", GN(), None, 38.0, 59.1, 41.2, 49.5, 40.9, 22.4),
        _fast("rn50-gn-ws", GN(), WS(), 38.9, 60.4, 42.1, 50.4, 42.4, 23.5),
        _fast("rn50-bcn-ws", _ALG1, WS(), 39.7, 60.9, 43.1, 51.7, 43.2, 24.0),
        _fast("rn50-bcn-ws-step", BCN(), WS()),
        _fast("rn101-gn", GN(), None, 39.7, 60.9, 43.3, 51.9, 43.3, 23.1),
        _fast("rn101-gn-ws", GN(), WS(), 41.3, 62.8, 45.1, 53.9, 45.2, 24.7),
        _fast("rn101-bcn-ws", _ALG1, WS(), 41.8, 63.4, 45.8, 54.1, 45.6, 25.6),
        _fast("rn101-bcn-ws-step", BCN(), WS()),
    ),
)

# --- ours ------------------------------------------------------------------------------------------------------------

_NUCLEI_NOTES = (
    "one image at a time: BN has the statistics of one image, in the heads those of its regions",
    "crops of 256×256 for training, whole images for testing, none of them resized; split by a hash of the image's ID",
    "the last convolution of the mask predictor starts near zero",
)
_CHECK = "a check of the whole pipeline, not a benchmark: the detector must be able to memorize its images"
_START = "short: its weights are a start for the detectors of table nuclei"
_OWN = 'our own table: give the folder with --data, and the length of the run with --epochs. BCN is statistics="step"'


def _detector(steps: int) -> Settings:
    drops = StepMilestones((steps * 2 // 3, steps * 8 // 9))
    optimizer, schedule = SGD(lr=0.02, momentum=0.9, weight_decay=1e-4), Warmup(drops, steps=100, start=0.1)
    return Settings(steps=steps, step_batch=8, optimizer=optimizer, schedule=schedule)


def _nuclei(row: str, norm: NormSpec | None, weight: WeightSpec | None, start: str | None = None) -> Recipe:
    network = "maskrcnn-resnet50-nuclei" if norm else "maskrcnn-resnet50-nuclei-frozen"
    fields = {"task": "instances", "notes": (OURS, *_NUCLEI_NOTES), "start": start, "frozen": STEM if start else ()}
    return make(f"nuclei/{row}", network, "nuclei", norm, weight, settings=_detector(1_000), batch=1, **fields)


def _classifiers(table: str, data: str, *notes: str, epochs: int) -> tuple[Recipe, ...]:
    optimizer = SGD(lr=0.05, momentum=0.9, weight_decay=1e-4)
    settings = Settings(epochs=epochs, step_batch=64, optimizer=optimizer, schedule=Cosine(warmup_epochs=2))
    methods = {"bn": (BN(), None), "bcn-ws": (BCN(), WS())}
    return make_rows(table, "resnet50", data, methods, settings=settings, notes=notes)


def _objects(row: str, network: str, task: str) -> Recipe:
    optimizer, schedule = SGD(lr=0.02, momentum=0.9, weight_decay=1e-4), Warmup(Cosine(), steps=100, start=0.1)
    settings = Settings(epochs=50, step_batch=8, optimizer=optimizer, schedule=schedule)
    return make(f"objects/{row}", network, "objects", BCN(), WS(), settings=settings, task=task, notes=(_OWN,))


_COCO128_ROW = make(
    "coco128/bcn-ws",
    "maskrcnn-resnet50-512",
    "coco128",
    BCN(),
    WS(),
    settings=_detector(1_500),
    task="instances",
    notes=(OURS, _CHECK),
)
_NUCLEI = Table(
    name="nuclei",
    title="Ours: Mask R-CNN with FPN, ResNet-50, on nuclei, one image at a time: BN, GN, GN+WS, BCN+WS from scratch; "
    "frozen BN and BCN+WS from classifiers of Tiny ImageNet",
    rows=(
        _nuclei("bn", BN(micro_batch=1), None),
        *(_nuclei(row, *method) for row, method in MICRO.items()),
        frozen_bn(_nuclei("pretrained-frozen-bn", None, None, "tiny_imagenet/bn")),
        _nuclei("pretrained-bcn-ws", BCN(), WS(), "tiny_imagenet/bcn-ws"),
    ),
    default="bcn-ws",
)

_COCO128 = Table(
    name="coco128",
    title="Ours: Mask R-CNN with FPN, ResNet-50, trained on 126 images of COCO, tested on the 128 of that split",
    rows=(_COCO128_ROW,),
    default="bcn-ws",
)

_TINY_IMAGENET = Table(
    name="tiny_imagenet",
    title="Ours: ResNet-50 on 20 classes of Tiny ImageNet: BN of 64 images, BCN+WS of one",
    rows=_classifiers("tiny_imagenet", "tiny_imagenet20", OURS, _START, epochs=30),
    default="bcn-ws",
)

_OBJECTS = Table(
    name="objects",
    title="Ours: Mask and Faster R-CNN with FPN, ResNet-50, on images of your own in COCO's format: BCN+WS of one",
    rows=(
        _objects("bcn-ws", "maskrcnn-resnet50", "instances"),
        _objects("boxes-bcn-ws", "fasterrcnn-resnet50", "detection"),
    ),
    default="bcn-ws",
)

_IMAGE_FOLDERS = Table(
    name="image_folders",
    title="Ours: ResNet-50 on images of your own, a folder per class: BN of 64 images, BCN+WS of one",
    rows=_classifiers("image_folders", "image_folders", _OWN, epochs=50),
    default="bcn-ws",
)

TABLES = (_MASK, _FAST, _NUCLEI, _COCO128, _TINY_IMAGENET, _OBJECTS, _IMAGE_FOLDERS)
