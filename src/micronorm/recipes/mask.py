"""Table `tab:mask`: Mask R-CNN with FPN on COCO, 2× schedule: six figures for boxes and six for masks."""

from micronorm.nn import BCN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import coco, frozen_bn
from micronorm.recipes.recipe import Recipe, Table

BOXES: tuple[str, ...] = ("AP", "AP50", "AP75", "APl", "APm", "APs")
"""The columns of the paper's tables: averages over IoU, at 0.5, at 0.75, and of large, medium and small objects."""
FIGURES = (*BOXES, *(f"mask_{name}" for name in BOXES))

SEQUENTIAL = BCN(statistics="sequential")


def _row(row: str, norm: NormSpec, weight: WeightSpec | None, *paper: float) -> Recipe:
    network = f"maskrcnn-resnet{row.partition('-')[0].removeprefix('rn')}"
    figures = dict(zip(FIGURES, paper, strict=True)) if paper else None
    return coco(f"mask/{row}", network, norm, weight, figures, start=f"imagenet/{row}", times=2)


TABLE = Table(
    name="mask",
    title="Mask R-CNN with FPN, ResNet-50 and ResNet-101, on COCO: GN, GN+WS and BCN+WS of one or two images per GPU",
    rows=(
        _row("rn50-gn", GN(), None, 39.8, 60.5, 43.4, 52.4, 42.9, 23.0, 36.1, 57.4, 38.7, 53.6, 38.6, 16.9),
        _row("rn50-gn-ws", GN(), WS(), 40.8, 61.6, 44.8, 52.7, 44.0, 23.5, 36.5, 58.5, 38.9, 53.5, 39.3, 16.6),
        _row("rn50-bcn-ws", SEQUENTIAL, WS(), 41.4, 62.2, 45.2, 54.7, 45.0, 24.2, 37.3, 59.4, 39.8, 55.0, 40.1, 17.9),
        _row("rn50-bcn-ws-step", BCN(), WS()),
        _row("rn101-gn", GN(), None, 41.5, 62.0, 45.5, 54.8, 45.0, 24.1, 37.0, 59.0, 39.6, 54.5, 40.0, 17.5),
        _row("rn101-gn-ws", GN(), WS(), 42.7, 63.6, 46.8, 56.0, 46.0, 25.7, 37.9, 60.4, 40.7, 56.3, 40.6, 18.2),
        _row("rn101-bcn-ws", SEQUENTIAL, WS(), 43.6, 64.4, 47.9, 57.4, 47.5, 25.6, 39.1, 61.4, 42.2, 57.3, 42.1, 19.1),
        _row("rn101-bcn-ws-step", BCN(), WS()),
        coco(
            "mask/rn50-bcn-ws-step-plain-fpn",
            "maskrcnn-resnet50-plain-fpn",
            BCN(),
            WS(),
            None,
            start="imagenet/rn50-bcn-ws-step",
            times=2,
            notes=("ours: no norm in the pyramid, as the caption has it",),
        ),
        frozen_bn(
            coco(
                "mask/rn50-frozen-bn",
                "maskrcnn-resnet50-frozen",
                None,
                None,
                None,
                start="imagenet_ws/rn50-bn",
                times=2,
                notes=("ours: the usual baseline, with frozen BN in the backbone and no norm elsewhere",),
            )
        ),
    ),
)
