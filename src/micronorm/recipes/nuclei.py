"""Tables of ours: `nuclei` and `coco128`, Mask R-CNN on small sets; `tiny_imagenet`, classifiers to start from.

`objects` and `image_folders` are detectors and classifiers for data of your own.
"""

from micronorm.engine.optimization import SGD
from micronorm.engine.schedules import Cosine, StepMilestones, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.coco import STEM
from micronorm.recipes.protocols import MICRO, OURS, frozen_bn, make, make_rows
from micronorm.recipes.recipe import Recipe, Table

_NUCLEI_NOTES = (
    "one image at a time: BN has the statistics of one image, in the heads those of its regions",
    "crops of 256×256 for training, whole images for testing, none of them resized; split by a hash of the image's ID",
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
    "maskrcnn-resnet50-320",
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

TABLES = (_NUCLEI, _COCO128, _TINY_IMAGENET, _OBJECTS, _IMAGE_FOLDERS)
