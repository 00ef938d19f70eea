"""The paper's tables on ImageNet: `abl`, `imagenet_ws`, `cwn`, `ind_abl`, `resnext` and `imagenet`."""

from micronorm.engine.optimization import Milestones
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, CWN, GN, IN, LN, SN, WN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import OPTIMIZER, STEP, make, shared_samples
from micronorm.recipes.recipe import Recipe, Table

GPUS = 4
# Epochs and images per step. ResNet-101 has half the images because more did not fit into the authors' memory.
_LENGTH = {
    "resnet50": (90, 256),
    "resnet101": (100, 128),
    "resnext50-32x4d": (100, 128),
    "resnext101-32x4d": (100, 128),
}
_NETWORK = (
    "the paper does not say, so we chose: torchvision's network (stride in the 3×3 convolutions), Kaiming normal "
    "weights over the fan-out, the last norm of each residual block starting at zero (as in the authors' code; for BCN "
    "through the group affine), random resized crop and flip; tested on the central 224×224"
)
_MICRO = (
    "{step} images per step: the paper's {iterations} iterations of one image per GPU on 4 GPUs, so that "
    "there are as many updates as with BN"
)
_QUOTED = "the paper quotes this figure from the paper on SN and did not run it; ours runs it like the rows beside it"
_EMPTY = "the paper leaves this cell empty"
_KERNEL = "ours: our form of the layer, with a length per output channel that starts at the kernel's own"
_RMS = "ours: a kernel whose mean is not subtracted is divided by its root mean square"
_STEP_BATCH = "the paper gives the iteration size, 32 images of one GPU; 4 GPUs, as for ResNet-101, are ours"
_CAPTION = (
    "the caption says 32 or 64 images per GPU for all rows; a GN row does not depend on it, and its figures are those "
    "that other tables give for one image"
)
_LARGE = 'the caption\'s 64 (ResNet-50) or 32 (ResNet-101) images per GPU without synchronization: statistics="batch"'

_RN50, _RN101, _RX50, _RX101 = _LENGTH
_BATCH = BCN(statistics="batch")


def _row(
    name: str,
    network: str,
    norm: NormSpec,
    weight: WeightSpec | None,
    *errors: float,
    batch: int | None = None,
    notes: tuple[str, ...] = (),
) -> Recipe:
    """Make a recipe with SGD at 0.1, ×0.1 after every 30 epochs. `errors` are the paper's, top-1 and perhaps top-5."""
    epochs, step_batch = _LENGTH[network]
    schedule = Milestones(tuple(range(30, epochs, 30)))
    settings = Settings(epochs=epochs, step_batch=step_batch, optimizer=OPTIMIZER, schedule=schedule)
    paper = dict(zip(("top1", "top5"), errors, strict=False)) or None
    notes = (*notes, _NETWORK)
    if shared_samples(norm, batch or step_batch)[0] == 1:
        notes = (*notes, _MICRO.format(step=step_batch, iterations=step_batch // GPUS))
    return make(name, network, "imagenet", norm, weight, batch=batch, settings=settings, paper=paper, notes=notes)


TABLES = (
    Table(
        name="abl",
        title="ResNet-50 on ImageNet: LN, IN and GN of one image and BN of 64, each without and with WS",
        rows=(
            _row("abl/ln", _RN50, LN(), None, 27.22),
            _row("abl/ln-ws", _RN50, LN(), WS(), 24.60),
            _row("abl/in", _RN50, IN(), None, 29.49),
            _row("abl/in-ws", _RN50, IN(), WS(), 28.24),
            _row("abl/gn", _RN50, GN(), None, 24.81),
            _row("abl/gn-ws", _RN50, GN(), WS(), 23.72),
            _row("abl/bn", _RN50, BN(micro_batch=64), None, 24.30),
            _row("abl/bn-ws", _RN50, BN(micro_batch=64), WS(), 23.76),
        ),
    ),
    Table(
        name="imagenet_ws",
        title="ResNet-50 and ResNet-101 on ImageNet: BN of 64 or 32 images, SN and GN of one, BN and GN with WS",
        rows=(
            _row("imagenet_ws/rn50-bn", _RN50, BN(micro_batch=64), None, 24.30, 7.19),
            _row("imagenet_ws/rn50-sn", _RN50, SN(micro_batch=1), None, 25.00, notes=(_QUOTED,)),
            _row("imagenet_ws/rn50-gn", _RN50, GN(), None, 24.81, 7.46),
            _row("imagenet_ws/rn50-bn-ws", _RN50, BN(micro_batch=64), WS(), 23.76, 7.13),
            _row("imagenet_ws/rn50-gn-ws", _RN50, GN(), WS(), 23.72, 6.99),
            _row("imagenet_ws/rn101-bn", _RN101, BN(micro_batch=32), None, 22.44, 6.21),
            _row("imagenet_ws/rn101-sn", _RN101, SN(micro_batch=1), None, notes=(_EMPTY,)),
            _row("imagenet_ws/rn101-gn", _RN101, GN(), None, 22.87, 6.51),
            _row("imagenet_ws/rn101-bn-ws", _RN101, BN(micro_batch=32), WS(), 21.89, 6.01),
            _row("imagenet_ws/rn101-gn-ws", _RN101, GN(), WS(), 22.10, 6.07),
        ),
    ),
    Table(
        name="cwn",
        title="ResNet-50 with GN of one image on ImageNet: WN, CWN and WS",
        rows=(
            _row("cwn/gn", _RN50, GN(), None, 24.81),
            _row("cwn/gn-wn", _RN50, GN(), WN(), 25.09, notes=(_KERNEL,)),
            _row("cwn/gn-cwn", _RN50, GN(), CWN(), 24.23, notes=(_KERNEL,)),
            _row("cwn/gn-ws", _RN50, GN(), WS(), 23.72),
        ),
    ),
    Table(
        name="ind_abl",  # subtracting the mean is the paper's `eq:9`, dividing by the deviation `eq:10`
        title="ResNet-50 with GN of one image on ImageNet: WS and its two halves",
        rows=(
            _row("ind_abl/gn", _RN50, GN(), None, 24.81),
            _row("ind_abl/gn-mean", _RN50, GN(), WS(center=True, scale=False), 23.96),
            _row("ind_abl/gn-std", _RN50, GN(), WS(center=False, scale=True), 24.60, notes=(_RMS,)),
            _row("ind_abl/gn-ws", _RN50, GN(), WS(), 23.72),
        ),
    ),
    Table(
        name="resnext",
        title="ResNeXt-50 and ResNeXt-101 32×4d on ImageNet: GN of one image without and with WS",
        rows=(
            _row("resnext/rx50-gn", _RX50, GN(), None, 24.24, 7.27, notes=(_STEP_BATCH,)),
            _row("resnext/rx50-gn-ws", _RX50, GN(), WS(), 22.71, 6.38, notes=(_STEP_BATCH,)),
            _row("resnext/rx101-gn", _RX101, GN(), None, 22.86, 6.51, notes=(_STEP_BATCH,)),
            _row("resnext/rx101-gn-ws", _RX101, GN(), WS(), 21.80, 6.03, notes=(_STEP_BATCH,)),
        ),
    ),
    Table(
        name="imagenet",
        title="ResNet-50 and ResNet-101 on ImageNet: GN, GN+WS, BCN+WS",
        rows=(
            _row("imagenet/rn50-gn", _RN50, GN(), None, 24.81, 7.46, notes=(_CAPTION,)),
            _row("imagenet/rn50-gn-ws", _RN50, GN(), WS(), 23.72, 6.99, notes=(_CAPTION,)),
            _row("imagenet/rn50-bcn-ws", _RN50, _BATCH, WS(), 23.09, 6.55, batch=64, notes=(_LARGE,)),
            _row("imagenet/rn50-bcn-ws-step", _RN50, BCN(), WS(), notes=(STEP,)),
            _row("imagenet/rn101-gn", _RN101, GN(), None, 22.87, 6.51, notes=(_CAPTION,)),
            _row("imagenet/rn101-gn-ws", _RN101, GN(), WS(), 22.10, 6.07, notes=(_CAPTION,)),
            _row("imagenet/rn101-bcn-ws", _RN101, _BATCH, WS(), 21.29, 5.60, batch=32, notes=(_LARGE,)),
            _row("imagenet/rn101-bcn-ws-step", _RN101, BCN(), WS(), notes=(STEP,)),
        ),
    ),
)
