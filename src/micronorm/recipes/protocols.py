"""The paper's training protocols: one for ImageNet, one for CIFAR, each a function that makes a recipe."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from micronorm.engine.optimization import SGD, ParameterGroup
from micronorm.engine.schedules import Milestones, StepMilestones, Warmup
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, BRN, SN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.recipe import DATA, Recipe

Figures = Mapping[str, float]

TITLES = {
    "digits": "small ResNet",
    "shapes": "small FCN",
    "cifar-resnet20": "ResNet-20",
    "cifar-resnet56": "ResNet-56",
    "cifar-resnet110": "ResNet-110",
    "cifar-resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "resnext50-32x4d": "ResNeXt-50 32×4d",
    "resnext101-32x4d": "ResNeXt-101 32×4d",
    "deeplabv3-resnet50": "DeepLabV3, ResNet-50",
    "deeplabv3-resnet101": "DeepLabV3, ResNet-101",
    "fasterrcnn-resnet50": "Faster R-CNN, ResNet-50",
    "fasterrcnn-resnet101": "Faster R-CNN, ResNet-101",
    "maskrcnn-resnet50": "Mask R-CNN, ResNet-50",
    "maskrcnn-resnet101": "Mask R-CNN, ResNet-101",
    "maskrcnn-resnet50-plain-fpn": "Mask R-CNN, ResNet-50, FPN without norms",
    "maskrcnn-resnet50-frozen": "Mask R-CNN, ResNet-50",
    "maskrcnn-resnet50-nuclei": "Mask R-CNN, ResNet-50",
    "maskrcnn-resnet50-nuclei-frozen": "Mask R-CNN, ResNet-50",
    "maskrcnn-resnet50-320": "Mask R-CNN, ResNet-50",
    "tsm-resnet50": "TSM, ResNet-50",
    "motion": "small TSM",
    "motion-no-shift": "small ResNet by frame",
    "clips": "small TSM",
    "clips-no-shift": "small ResNet by frame",
    "unet3d": "residual 3-D U-Net",
}

OPTIMIZER = SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)

STEP = (
    'ours: BCN with statistics="step", whose estimates move once per optimizer step. The paper has no figure for it; '
    'its own micro-batch algorithm is statistics="sequential"'
)
_IMAGENET_NETWORK = (
    "the paper does not say, so we chose: torchvision's network (stride in the 3×3 convolutions), Kaiming normal "
    "weights over the fan-out, the last norm of each residual block starting at zero (as in the authors' code; for BCN "
    "through the group affine), random resized crop and flip; tested on the central 224×224"
)
_MICRO_IMAGENET = (
    "{step} images per step: the paper's {iterations} iterations of one image per GPU on 4 GPUs, so that "
    "there are as many updates as with BN"
)
_CIFAR = (
    "the paper does not say, so we took the authors' code: 164 epochs, ×0.1 after 81 and 122, lr 0.1, momentum 0.9, "
    "weight decay 1e-4, crop after padding by 4 and flip; projection in the shortcuts that change shape"
)
_MICRO_CIFAR = "the paper does not say, so we chose: gradients are averaged over 128 images, as in a large batch"
_ZERO_START = (
    "the paper does not say for CIFAR, so we chose: the last norm of every residual block starts at zero (BCN: its "
    "group affine), as in the authors' ImageNet code; from the usual start lr 0.1 destroys a network of this depth in "
    "its first ten steps"
)

# Epochs and images per step. ResNet-101 has half the images because more did not fit into the authors' memory.
_IMAGENET_LENGTH = {
    "resnet50": (90, 256),
    "resnet101": (100, 128),
    "resnext50-32x4d": (100, 128),
    "resnext101-32x4d": (100, 128),
}
GPUS = 4

# Images per step, learning rate and steps of the 1× schedule of the detectors. ResNet-101 has one image per GPU.
_COCO_LENGTH = {"resnet50": (8, 0.01, 180_000), "resnet101": (4, 0.005, 360_000)}
STEM = ("backbone.body.conv1.", "backbone.body.bn1.", "backbone.body.layer1.")
"""What detectors that start from a classifier do not train: the stem and the first stage."""
_COCO = (
    "from the framework that the paper names (maskrcnn-benchmark): drops at 2/3 and 8/9 of the schedule, 500 steps of "
    "linear warm-up from 1/3, biases at twice the rate and without decay, stem and first stage frozen, norms in the "
    "pyramid (the caption leaves them out)",
    "ours: torchvision's losses, of each image alone; its ResNet has the stride in the 3×3 convolutions; the last "
    "convolution of the mask predictor starts near zero",
)
_COCO_BCN = (
    'the paper does not say which form of BCN, so we chose Algorithm 1 (statistics="sequential"), image by image in '
    "backbone and pyramid, and with all regions of an image as one micro-batch in the heads"
)


def method(norm: NormSpec | None, weight: WeightSpec | None) -> str:
    """Return the name of the method as in the paper: "GN+WS"."""
    name = type(norm).__name__ if norm is not None else "BN"
    if weight is None:
        return name
    if isinstance(weight, WS) and not (weight.center and weight.scale):
        return f"{name}+WS, {'mean' if weight.center else 'scale'} only"
    return f"{name}+{type(weight).__name__}"


def shared_samples(norm: NormSpec | None, batch: int, *, frames: int = 1) -> tuple[int, int | None]:
    """Return `unit` and `largest` of the settings for a norm over `batch` samples: images, or clips of `frames` images.

    Norms of one image may be cut anywhere. Norms over the whole batch of a forward need `batch` samples in each; norms
    that treat a batch as successive micro-batches need whole ones. Their `micro_batch` counts images.

    Example:
        >>> shared_samples(BN(), 128), shared_samples(BN(micro_batch=64), 64), shared_samples(BCN(), 1)
        ((128, 128), (64, None), (1, None))
        >>> shared_samples(BN(micro_batch=8), 1, frames=8)
        (1, None)
    """
    if norm is None or (isinstance(norm, BN | SN | BRN) and norm.micro_batch is None):
        return batch, batch
    if isinstance(norm, BCN) and norm.statistics == "batch":
        return batch, batch
    own = frames
    if isinstance(norm, BN | SN | BRN):
        own = norm.micro_batch or 1
    elif isinstance(norm, BCN) and norm.statistics == "sequential":
        own = norm.micro_batch
    if own != batch * frames:
        raise ValueError(f"{norm} treats a batch as micro-batches of {own}, not of {batch * frames}")
    return batch, None


def _title(network: str, data: str, norm: NormSpec | None, weight: WeightSpec | None, samples: str) -> str:
    estimates = ""
    if isinstance(norm, BCN):
        estimates = {"batch": "", "sequential": ", Algorithm 1", "step": ", estimates by step"}[norm.statistics]
    return f"{TITLES[network]}, {DATA[data].title}: {method(norm, weight)} of {samples}{estimates}"


def make(
    name: str,
    network: str,
    data: str,
    norm: NormSpec | None,
    weight: WeightSpec | None,
    *,
    batch: int,
    settings: Settings,
    title: str | None = None,
    frames: int = 1,
    **fields: Any,
) -> Recipe:
    """Make the recipe "table/row" of a norm over `batch` images or clips, with further `fields` of `Recipe`.

    The title, the classes, and the settings' `unit` and `largest` follow from the other arguments.
    """
    table, _, row = name.partition("/")
    unit, largest = (1, None) if fields.get("unavailable") else shared_samples(norm, batch, frames=frames)
    sample = "image" if frames == 1 else "clip"
    samples = f"one {sample}" if batch == 1 else f"{batch} {sample}s"
    return Recipe(
        table=table,
        row=row,
        title=title or _title(network, data, norm, weight, samples),
        network=network,
        classes=DATA[data].classes,
        norm=norm,
        weight=weight,
        data=data,
        settings=replace(settings, unit=unit, largest=largest),
        micro_batch=batch,
        **fields,
    )


def imagenet(
    name: str,
    network: str,
    norm: NormSpec,
    weight: WeightSpec | None,
    paper: Figures | None,
    *,
    batch: int = 1,
    notes: tuple[str, ...] = (),
) -> Recipe:
    """Make a recipe with SGD at 0.1, ×0.1 after every 30 epochs; samples per step and epochs depend on the network."""
    epochs, step_batch = _IMAGENET_LENGTH[network]
    schedule = Milestones(tuple(range(30, epochs, 30)))
    settings = Settings(epochs=epochs, step_batch=step_batch, optimizer=OPTIMIZER, schedule=schedule)
    notes = (*notes, _IMAGENET_NETWORK)
    if batch == 1:
        notes = (*notes, _MICRO_IMAGENET.format(step=step_batch, iterations=step_batch // GPUS))
    return make(name, network, "imagenet", norm, weight, batch=batch, settings=settings, paper=paper, notes=notes)


def cifar(
    name: str,
    network: str,
    data: str,
    norm: NormSpec | None,
    weight: WeightSpec | None,
    paper: Figures | None,
    *,
    batch: int,
    notes: tuple[str, ...] = (),
    zero_start: bool = False,
    **fields: Any,
) -> Recipe:
    """Make a recipe with 128 samples per step for 164 epochs, and SGD at 0.1, ×0.1 after 81 and 122 epochs."""
    settings = Settings(epochs=164, step_batch=128, optimizer=OPTIMIZER, schedule=Milestones((81, 122)))
    notes = (*notes, _CIFAR) if batch == settings.step_batch else (*notes, _CIFAR, _MICRO_CIFAR)
    fields |= {"paper": paper, "notes": (*notes, _ZERO_START) if zero_start else notes, "zero_start": zero_start}
    return make(name, network, data, norm, weight, batch=batch, settings=settings, **fields)


def coco(
    name: str,
    network: str,
    norm: NormSpec | None,
    weight: WeightSpec | None,
    paper: Figures | None,
    *,
    start: str,
    times: int,
    notes: tuple[str, ...] = (),
    **fields: Any,
) -> Recipe:
    """Make a recipe of a detector on COCO that starts from the recipe `start`, with the 1× or 2× schedule (`times`)."""
    kind, _, rest = network.partition("-")
    step_batch, lr, length = _COCO_LENGTH[rest.partition("-")[0]]
    steps = times * length
    settings = Settings(
        steps=steps,
        step_batch=step_batch,
        optimizer=SGD(lr=lr, momentum=0.9, weight_decay=1e-4),
        schedule=Warmup(StepMilestones((steps * 2 // 3, steps * 8 // 9)), steps=500, start=1 / 3),
        groups=(ParameterGroup(names="*bias", lr_factor=2.0, weight_decay=0.0),),
    )
    if isinstance(norm, BCN):
        notes = (STEP if norm.statistics == "step" else _COCO_BCN, *notes)
    return make(
        name,
        network,
        "coco",
        norm,
        weight,
        batch=1,
        settings=settings,
        task="instances" if kind == "maskrcnn" else "detection",
        paper=paper,
        notes=(*notes, *_COCO, f"starts from the weights of {start}: give them with --weights"),
        start=start,
        frozen=STEM,
        **fields,
    )


def frozen_bn(recipe: Recipe) -> Recipe:
    """Return the recipe of a network with FrozenBatchNorm, whose images may share a forward."""
    title = recipe.title.replace(": BN of one image", ": frozen BN")
    return replace(recipe, title=title, settings=replace(recipe.settings, largest=None))
