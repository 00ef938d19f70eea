"""Tables of ours: `nuclei` and `coco128`, Mask R-CNN on small sets; `tiny_imagenet`, classifiers to start from."""

from micronorm.engine.optimization import SGD
from micronorm.engine.schedules import Cosine, StepMilestones, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import STEM, frozen_bn, make
from micronorm.recipes.recipe import Recipe, Table

STEP_BATCH = 8
STEPS = 1_000
_OURS = 'our own table: the paper has none like it. BCN is statistics="step"'
_NUCLEI = (
    "one image at a time: BN has the statistics of one image, in the heads those of its regions",
    "crops of 256×256 for training, whole images for testing, none of them resized; split by a hash of the image's ID",
)


def _detector(steps: int, *, lr: float) -> Settings:
    drops = StepMilestones((steps * 2 // 3, steps * 8 // 9))
    optimizer = SGD(lr=lr, momentum=0.9, weight_decay=1e-4)
    schedule = Warmup(drops, steps=100, start=0.1)
    return Settings(steps=steps, step_batch=STEP_BATCH, optimizer=optimizer, schedule=schedule)


def _nuclei(row: str, norm: NormSpec | None, weight: WeightSpec | None, start: str | None = None) -> Recipe:
    return make(
        f"nuclei/{row}",
        "maskrcnn-resnet50-nuclei" if norm else "maskrcnn-resnet50-nuclei-frozen",
        "nuclei",
        norm,
        weight,
        batch=1,
        settings=_detector(STEPS, lr=0.02),
        task="instances",
        notes=(_OURS, *_NUCLEI),
        start=start,
        frozen=STEM if start else (),
    )


NUCLEI = Table(
    name="nuclei",
    title="Ours: Mask R-CNN with FPN, ResNet-50, on nuclei, one image at a time: BN, GN, GN+WS, BCN+WS from scratch; "
    "frozen BN and BCN+WS from classifiers of Tiny ImageNet",
    rows=(
        _nuclei("bn", BN(micro_batch=1), None),
        _nuclei("gn", GN(), None),
        _nuclei("gn-ws", GN(), WS()),
        _nuclei("bcn-ws", BCN(), WS()),
        frozen_bn(_nuclei("pretrained-frozen-bn", None, None, "tiny_imagenet/bn")),
        _nuclei("pretrained-bcn-ws", BCN(), WS(), "tiny_imagenet/bcn-ws"),
    ),
    default="bcn-ws",
)

COCO128 = Table(
    name="coco128",
    title="Ours: Mask R-CNN with FPN, ResNet-50, learns 126 images of COCO and tested on the 128 of that split",
    rows=(
        make(
            "coco128/bcn-ws",
            "maskrcnn-resnet50-320",
            "coco128",
            BCN(),
            WS(),
            batch=1,
            settings=_detector(1_500, lr=0.02),
            task="instances",
            notes=(_OURS, "a check of the whole pipeline, not a benchmark: it must be able to learn by heart"),
        ),
    ),
    default="bcn-ws",
)


def _classifier(row: str, norm: NormSpec, weight: WeightSpec | None, *, batch: int = 1) -> Recipe:
    settings = Settings(
        epochs=30,
        step_batch=64,
        optimizer=SGD(lr=0.05, momentum=0.9, weight_decay=1e-4),
        schedule=Cosine(warmup_epochs=2),
    )
    return make(
        f"tiny_imagenet/{row}",
        "resnet50",
        "tiny_imagenet20",
        norm,
        weight,
        batch=batch,
        settings=settings,
        notes=(_OURS, "short: its weights are a start for the detectors of table nuclei"),
    )


TINY_IMAGENET = Table(
    name="tiny_imagenet",
    title="Ours: ResNet-50 on 20 classes of Tiny ImageNet: BN of 64 images, BCN+WS of one",
    rows=(_classifier("bn", BN(), None, batch=64), _classifier("bcn-ws", BCN(), WS())),
    default="bcn-ws",
)
