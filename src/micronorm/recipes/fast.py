"""Table `tab:fast`: Faster R-CNN with FPN on COCO, 1× schedule: six figures for boxes."""

from micronorm.nn import BCN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.mask import BOXES, SEQUENTIAL
from micronorm.recipes.protocols import coco
from micronorm.recipes.recipe import Recipe, Table


def _row(row: str, norm: NormSpec, weight: WeightSpec | None, *paper: float) -> Recipe:
    network = f"fasterrcnn-resnet{row.partition('-')[0].removeprefix('rn')}"
    figures = dict(zip(BOXES, paper, strict=True)) if paper else None
    return coco(f"fast/{row}", network, norm, weight, figures, start=f"imagenet/{row}", times=1)


TABLE = Table(
    name="fast",
    title="Faster R-CNN with FPN, ResNet-50 and ResNet-101, on COCO: GN, GN+WS and BCN+WS of one or two images per GPU",
    rows=(
        _row("rn50-gn", GN(), None, 38.0, 59.1, 41.2, 49.5, 40.9, 22.4),
        _row("rn50-gn-ws", GN(), WS(), 38.9, 60.4, 42.1, 50.4, 42.4, 23.5),
        _row("rn50-bcn-ws", SEQUENTIAL, WS(), 39.7, 60.9, 43.1, 51.7, 43.2, 24.0),
        _row("rn50-bcn-ws-step", BCN(), WS()),
        _row("rn101-gn", GN(), None, 39.7, 60.9, 43.3, 51.9, 43.3, 23.1),
        _row("rn101-gn-ws", GN(), WS(), 41.3, 62.8, 45.1, 53.9, 45.2, 24.7),
        _row("rn101-bcn-ws", SEQUENTIAL, WS(), 41.8, 63.4, 45.8, 54.1, 45.6, 25.6),
        _row("rn101-bcn-ws-step", BCN(), WS()),
    ),
)
